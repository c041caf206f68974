//! Tracer of a guest process, as in the first version of King, Dunlap and Chen's VMM (USENIX ATC
//! 2003, section 3).
//!
//! Each signal of the guest process, for a system call of user mode or a fault, stops it, and is
//! delivered once the tracer permits it. The tracer exists for measurements; nothing depends on it.
//!
//! Invariants: it forwards every signal, merging equal ones that arrive before the last one was
//! forwarded, and lives exactly as long as its tracee.

use host_linux::sys::{self, Errno};
use linux_raw_sys::general as linux;
use linux_raw_sys::ptrace;

use crate::children;
use crate::linux::signals::KICK;

/// Forks. The child continues as the tracee and returns the id of its parent; the parent never
/// returns.
pub fn begin() -> Result<u32, Errno> {
    children::die_with_parent(children::device())?;
    // Block the signals before waiting for them. The child sets its own mask.
    let waited: u64 = 1 << (linux::SIGCHLD - 1) | 1 << (KICK - 1);
    sys::change_signal_mask(linux::SIG_BLOCK, waited)?;
    let own = sys::process_id();
    let child = children::fork()?;
    if child == 0 {
        trace(ptrace::PTRACE_TRACEME, 0, 0)?;
        return Ok(own);
    }
    serve(own, child, &waited)
}

fn serve(own: u32, child: u32, waited: &u64) -> ! {
    // Each further signal would stop the child again.
    let mut is_kicked = false;
    loop {
        if sys::wait_for_signal(*waited) == Ok(KICK) {
            if !is_kicked {
                is_kicked = true;
                sys::kill(child, KICK);
            }
            continue;
        }
        while let Some((_, status)) = sys::wait_for_child(child.into(), linux::WNOHANG) {
            let (low, high) = ((status & 0x7f) as u8, (status >> 8) as u8);
            match low {
                0 => sys::exit(high),
                // Stopped. If it cannot continue, it is being killed, and its exit follows.
                0x7f => {
                    is_kicked &= u32::from(high) != KICK;
                    let _ = trace(ptrace::PTRACE_CONT, child, high);
                }
                // This process reports the tracee's exit by its own, which the guest cannot cause.
                killer => {
                    if u32::from(killer) == linux::SIGKILL {
                        sys::kill(own, linux::SIGKILL);
                    }
                    sys::exit(128 + killer)
                }
            }
        }
    }
}

fn trace(request: u32, process: u32, signal: u8) -> Result<(), Errno> {
    let arguments = [request.into(), process.into(), 0, signal.into(), 0, 0];
    // SAFETY: neither request accesses memory.
    unsafe { sys::call(linux::__NR_ptrace, arguments).map(drop) }
}
