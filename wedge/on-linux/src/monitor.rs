//! A process that traces one of the guest's, as in the first version of King, Dunlap and Chen's virtual machine (USENIX ATC 2003, section 3): each
//! signal of the guest's process, a system call of a program or a fault, stops it, and goes on to it only when this process has said so. It exists to be
//! measured; nothing depends on what it sees.
//!
//! Invariants: it passes on every signal, but those of one kind that come before the last one has been passed on, and lives exactly as long as the process that it traces.

use linux_raw_sys::general as linux;
use linux_raw_sys::ptrace;

use crate::processes::{self, KICK};
use crate::sys::{self, Errno};

/// Forks. The child, traced, goes on, with the number of its parent; the parent never returns.
pub fn begin() -> Result<u32, Errno> {
    processes::die_with_parent(processes::device())?;
    // What it waits for must not come before it waits. The child sets a mask of its own.
    let waited: u64 = 1 << (linux::SIGCHLD - 1) | 1 << (KICK - 1);
    let arguments = [linux::SIG_BLOCK.into(), &raw const waited as u64, 0, 8, 0, 0];
    // SAFETY: the mask is read.
    unsafe { sys::call(linux::__NR_rt_sigprocmask, arguments) }?;
    // SAFETY: no memory is touched.
    let own = unsafe { sys::call(linux::__NR_getpid, [0; 6]) }?;
    let child = processes::fork()?;
    if child == 0 {
        trace(ptrace::PTRACE_TRACEME, 0, 0)?;
        return Ok(own as u32);
    }
    serve(own as u32, child, &waited)
}

fn serve(own: u32, child: u32, waited: &u64) -> ! {
    // Each would stop the child once more.
    let mut is_kicked = false;
    loop {
        let arguments = [&raw const *waited as u64, 0, 0, 8, 0, 0];
        // SAFETY: the mask is read.
        let signal = unsafe { sys::call(linux::__NR_rt_sigtimedwait, arguments) };
        if signal == Ok(KICK.into()) {
            if !is_kicked {
                is_kicked = true;
                sys::kill(child, KICK);
            }
            continue;
        }
        while let Some(status) = changed(child) {
            let (low, high) = ((status & 0x7f) as u8, (status >> 8) as u8);
            match low {
                0 => sys::exit(high),
                // Stopped. If it cannot go on, it is being killed, which comes next.
                0x7f => {
                    is_kicked &= u32::from(high) != KICK;
                    let _ = trace(ptrace::PTRACE_CONT, child, high);
                }
                // Its end is known by this process's, which the guest cannot bring about.
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

/// What has happened to the child, if anything has (wait4(2)).
fn changed(child: u32) -> Option<u32> {
    let mut status = 0_u32;
    let arguments = [child.into(), &raw mut status as u64, u64::from(linux::WNOHANG), 0, 0, 0];
    // SAFETY: the kernel writes the status.
    let process = unsafe { sys::call(linux::__NR_wait4, arguments) }.unwrap_or(0);
    (process != 0).then_some(status)
}

fn trace(request: u32, process: u32, signal: u8) -> Result<(), Errno> {
    let arguments = [request.into(), process.into(), 0, signal.into(), 0, 0];
    // SAFETY: neither request touches memory.
    unsafe { sys::call(linux::__NR_ptrace, arguments).map(drop) }
}
