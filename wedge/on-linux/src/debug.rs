//! Stops of vCPUs for a debugger, which is a host process outside of the VM
//! (`docs/design/0015-debugger.md`).
//!
//! A stopping vCPU writes its registers to shared memory and waits there for a command. It stops in
//! its run loop, where it holds no lock of the VM.

use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::SeqCst;

use host_linux::sys;
use proto::hosted::debug::{BREAKPOINT, DebugHost, DebugState, command, register};
use proto::hosted::layout;
use vmm_mem::GuestMemory;
use wedge_core::VirtualCpu;

use crate::state::doorbell;
use crate::state::fixed::Fixed;
use crate::state::process::own_index;
use crate::state::shared::{idle_state, vcpu};

/// Interval of a stopped vCPU's checks in nanoseconds.
const LOOK: u64 = 100_000_000;

/// Returns the state shared by debugger and vCPUs.
pub fn shared() -> &'static DebugState {
    DebugState::get()
}

// SAFETY: it is in shared memory, mapped for the life of the process and initially zero; all fields
// are atomic.
unsafe impl Fixed for DebugState {
    const ADDRESS: u64 = layout::SHARED + layout::DEBUG;
}

/// Classification of a breakpoint trap.
pub enum Trap {
    /// A breakpoint of the debugger, at the current instruction pointer.
    Debugger,
    /// A breakpoint that the debugger has removed; the instruction is executed again.
    Removed,
    /// A breakpoint instruction of the guest.
    Guest,
}

/// Classifies a breakpoint trap. The instruction pointer is after the instruction, and is moved
/// back for the debugger's breakpoints.
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

/// Notifies through the device process, and waits on words in shared memory.
struct Host;

impl DebugHost for Host {
    fn notify_debugger(&self) {
        shared().halt_pending.store(1, SeqCst);
        doorbell::notify();
    }

    fn wait(&self, word: &AtomicU32) -> bool {
        sys::wait(word, command::WAIT, Some(LOOK));
        // The end of the VM kills this process.
        true
    }

    fn on_resume(&self) {
        // Events stay pending during a single step.
    }
}

/// Stops until the debugger releases this vCPU. Returns whether it is to execute a single
/// instruction.
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
    // The other vCPUs do not wait for a stopped one (`frames::sync_before_entry`); it synchronises
    // itself before the guest resumes.
    vcpu().idle.store(idle_state::POLLING, SeqCst);
    let steps = shared().halt(own_index(), why, &mut registers, &Host);
    vcpu().idle.store(idle_state::BUSY, SeqCst);
    let general = cpu.frame.gpr.len();
    cpu.frame.gpr.copy_from_slice(&registers[..general]);
    cpu.frame.rip = registers[register::RIP];
    cpu.set_rflags(registers[register::RFLAGS]);
    steps
}
