//! Stops of a virtual CPU for a debugger, which is a process of the host outside of the machine (`docs/design/0015-debugger.md`).
//!
//! A virtual CPU that stops leaves its registers in shared memory and waits there for a command. It does so in its own loop, where it has
//! no lock of the machine.

use core::sync::atomic::Ordering::SeqCst;

use proto::wedge::debug::{BREAKPOINT, Debug, Vcpu, command, reason, register};
use proto::wedge::layout;
use vmm_mem::GuestMemory;
use wedge_core::VirtualCpu;

use crate::processes;
use crate::shared::mine;
use crate::sys;

/// How long a virtual CPU waits before it looks whether it is still to wait, in nanoseconds.
const LOOK: u64 = 100_000_000;

/// What debugger and virtual CPUs leave for each other.
pub fn shared() -> &'static Debug {
    // SAFETY: in shared memory that is mapped as long as the process lives, zeroed in the beginning; all of it is atomic.
    unsafe { &*((layout::SHARED + layout::DEBUG) as *const Debug) }
}

/// Of this process's virtual CPU.
fn own() -> Option<&'static Vcpu> {
    shared().vcpus.get(mine().vcpu.load(SeqCst) as usize)
}

/// The debugger wants all virtual CPUs to stop.
pub fn is_wanted() -> bool {
    shared().wanted.load(SeqCst) != 0
}

/// What a breakpoint trap is to the debugger.
pub enum Trap {
    /// One of its breakpoints, at the instruction pointer now.
    Its,
    /// One that it has taken back since; the instruction is carried out again.
    Gone,
    /// The guest's own.
    Guests,
}

/// The guest has met a breakpoint instruction; the instruction pointer is behind it.
pub fn trap(cpu: &mut VirtualCpu, memory: &GuestMemory) -> Trap {
    let at = cpu.frame.rip.wrapping_sub(1);
    let mut byte = [0];
    let trap = if shared().breakpoints.iter().any(|place| place.load(SeqCst) == at) {
        Trap::Its
    } else if cpu.read(memory, at, &mut byte).is_ok() && byte != [BREAKPOINT] {
        Trap::Gone
    } else {
        return Trap::Guests;
    };
    cpu.frame.rip = at;
    trap
}

/// Stops until the debugger lets this virtual CPU go on. `true`: for one instruction.
pub fn halt(cpu: &mut VirtualCpu, why: u32) -> bool {
    let Some(own) = own() else { return false };
    for (place, value) in own.registers.iter().zip(cpu.frame.gpr) {
        place.store(value, SeqCst);
    }
    let others = [
        (register::RIP, cpu.frame.rip),
        (register::RFLAGS, cpu.rflags()),
        (register::CS, u64::from(cpu.segments[1].selector)),
        (register::SS, u64::from(cpu.segments[2].selector)),
        (register::CR3, cpu.cr3),
        (register::KERNEL_ROOT, cpu.shared.root),
    ];
    for (index, value) in others {
        own.registers[index].store(value, SeqCst);
    }
    own.command.store(command::WAIT, SeqCst);
    own.reason.store(why, SeqCst);
    own.halts.fetch_add(1, SeqCst);
    own.halted.store(1, SeqCst);
    shared().news.store(1, SeqCst);
    processes::ring();
    while own.command.load(SeqCst) == command::WAIT && (why != reason::WANTED || is_wanted()) {
        sys::wait(&own.command, command::WAIT, Some(LOOK));
    }
    let command = own.command.swap(command::WAIT, SeqCst);
    own.halted.store(0, SeqCst);
    for (value, place) in cpu.frame.gpr.iter_mut().zip(&own.registers) {
        *value = place.load(SeqCst);
    }
    cpu.frame.rip = own.registers[register::RIP].load(SeqCst);
    cpu.set_rflags(own.registers[register::RFLAGS].load(SeqCst));
    command == command::STEP
}
