//! Stops of a virtual CPU for a debugger, which is a process of the host outside of the machine (`docs/design/0015-debugger.md`).
//!
//! A virtual CPU that stops leaves its registers in shared memory and waits there for a command. It does so in its own loop, where it has
//! no lock of the machine.

use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::SeqCst;

use proto::wedge::debug::{BREAKPOINT, DebugHost, DebugState, command, register};
use proto::wedge::layout;
use vmm_mem::GuestMemory;
use wedge_core::VirtualCpu;

use crate::shared::{mine, vcpu};
use crate::sys;
use crate::{idle, processes};

/// How long a virtual CPU waits before it looks whether it is still to wait, in nanoseconds.
const LOOK: u64 = 100_000_000;

/// What debugger and virtual CPUs leave for each other.
pub fn shared() -> &'static DebugState {
    // SAFETY: in shared memory that is mapped as long as the process lives, zeroed in the beginning; all of it is atomic.
    unsafe { &*((layout::SHARED + layout::DEBUG) as *const DebugState) }
}

/// What a breakpoint trap is to the debugger.
pub enum Trap {
    /// One of its breakpoints, at the instruction pointer now.
    Debugger,
    /// One that it has taken back since; the instruction is carried out again.
    Removed,
    /// The guest's own.
    Guest,
}

/// The guest has met a breakpoint instruction; the instruction pointer is behind it.
pub fn trap(cpu: &mut VirtualCpu, memory: &GuestMemory) -> Trap {
    let at = cpu.frame.rip.wrapping_sub(1);
    let mut byte = [0];
    let trap = if shared().has_breakpoint(at) {
        Trap::Debugger
    } else if cpu.read(memory, at, &mut byte).is_ok() && byte != [BREAKPOINT] {
        Trap::Removed
    } else {
        return Trap::Guest;
    };
    cpu.frame.rip = at;
    trap
}

/// By the device process, and on a word of shared memory.
struct Host;

impl DebugHost for Host {
    fn notify_debugger(&self) {
        shared().halt_pending.store(1, SeqCst);
        processes::notify();
    }

    fn wait(&self, word: &AtomicU32) {
        sys::wait(word, command::WAIT, Some(LOOK));
    }

    fn on_resume(&self) {
        // While it steps, events wait.
    }
}

/// Stops until the debugger lets this virtual CPU go on. `true`: for one instruction.
pub fn halt(cpu: &mut VirtualCpu, why: u32) -> bool {
    let mut registers = [0; register::COUNT];
    registers[..cpu.frame.gpr.len()].copy_from_slice(&cpu.frame.gpr);
    registers[register::RIP] = cpu.frame.rip;
    registers[register::RFLAGS] = cpu.rflags();
    registers[register::CS] = cpu.segments[1].selector.into();
    registers[register::SS] = cpu.segments[2].selector.into();
    registers[register::CR3] = cpu.cr3;
    registers[register::KERNEL_ROOT] = cpu.shared.root;
    registers[register::LEVELS] = 4;
    // No other vCPU waits for this one (`frames::sync_before_entry`), which comes by there before the guest goes on.
    vcpu().idle.store(idle::state::POLLING, SeqCst);
    let steps = shared().halt(mine().vcpu.load(SeqCst) as usize, why, &mut registers, &Host);
    vcpu().idle.store(idle::state::BUSY, SeqCst);
    let general = cpu.frame.gpr.len();
    cpu.frame.gpr.copy_from_slice(&registers[..general]);
    cpu.frame.rip = registers[register::RIP];
    cpu.set_rflags(registers[register::RFLAGS]);
    steps
}
