//! Exclusive access to the virtual CPU that this process runs, and to the lists of the process.
//!
//! Rule: one [`CurrentVcpu`] is in use at a time. The event loop takes it once, when it begins, and
//! passes it down by `&mut`; what it lends ends before it lends again, as the compiler checks. Host
//! signals are the only code that runs in between. A handler that has interrupted the guest takes
//! its own value: the event loop is in [`CurrentVcpu::enter`] then, which has borrowed the loop's.
//! A handler that has interrupted the wedge takes none, and changes only atomic words beside the
//! virtual CPU ([`crate::state::shared::attention`], [`crate::state::shared::events`]).
//!
//! The virtual CPU is in shared memory, at the same address in each process of the vCPU, so that it
//! stays borrowed when the vCPU is handed over to another process in the middle of an instruction:
//! the next process continues where the previous one has stopped. The lists of a process are in its
//! private memory: [`CurrentProcess`] is passed down in the same way, and a hand-over borrows it,
//! so that no reference to one process's lists lives on in another process. Signal handlers do not
//! use them.

use core::ops::{Deref, DerefMut};
use core::sync::atomic::Ordering::Relaxed;

use wedge_core::VirtualCpu;
use wedge_x86::{CODE_32, CODE_64, Cause};

use crate::isolation::mailbox::UserProcess;
use crate::mmu::space::AddressSpace;
use crate::state::process::process;
use crate::state::shared::{attention, cell};

/// The virtual CPU that this process runs.
pub struct CurrentVcpu(());

impl CurrentVcpu {
    /// Takes the virtual CPU.
    ///
    /// # Safety
    /// This process must run the vCPU, and no other value may be in use: see the module's
    /// documentation.
    pub unsafe fn take() -> Self {
        Self(())
    }

    /// Makes the guest enter the wedge before it enables interrupts, or not.
    pub fn set_attention(&mut self, wanted: bool) {
        attention().store(wanted.into(), Relaxed);
    }

    /// Passes the segments of `SYSCALL` and `SYSRET` to entry code, after a change of `STAR`.
    pub fn update_call_segments(&mut self) {
        let [user, kernel] = self.call_segments();
        // SAFETY: only entry code uses them, while the guest runs.
        unsafe {
            (*cell()).user_segments = user;
            (*cell()).kernel_segments = kernel;
        }
    }

    /// Passes the privilege level and the code segment to entry code.
    pub fn prepare_entry(&mut self) {
        let is_user = u8::from(self.cpl == 3);
        let code = code_selector(self);
        // SAFETY: only entry code uses them, on the way to the guest.
        unsafe {
            (*cell()).dispatch = is_user;
            (*cell()).close = is_user & (*cell()).keys;
            (*cell()).code = code;
        }
    }

    /// Runs the guest until it stops. Signal handlers use the virtual CPU meanwhile.
    pub fn enter(&mut self) -> Cause {
        // SAFETY: this process runs the vCPU and is on its stack; the frame holds the guest's
        // registers. Nothing that this value has lent exists now.
        Cause::from_code(unsafe { wedge_x86::enter() })
    }
}

impl Deref for CurrentVcpu {
    type Target = VirtualCpu;

    fn deref(&self) -> &VirtualCpu {
        // SAFETY: the cell is mapped for the life of the process; by the rule of this module
        // nothing changes the virtual CPU while the reference lives.
        unsafe { &(*cell()).cpu }
    }
}

impl DerefMut for CurrentVcpu {
    fn deref_mut(&mut self) -> &mut VirtualCpu {
        // SAFETY: as in `deref`; nothing else refers to it either.
        unsafe { &mut (*cell()).cpu }
    }
}

/// Returns the selector of the host's code segment in which the guest runs.
pub fn code_selector(cpu: &VirtualCpu) -> u64 {
    if cpu.is_64_bit() { CODE_64.into() } else { CODE_32.into() }
}

/// The lists of the process that runs the vCPU.
pub struct CurrentProcess(());

/// Takes the virtual CPU and the lists, for an event loop.
///
/// # Safety
/// This process must run the vCPU, and no other values may be in use: see the module's
/// documentation.
pub unsafe fn take() -> (CurrentVcpu, CurrentProcess) {
    (CurrentVcpu(()), CurrentProcess(()))
}

impl CurrentProcess {
    /// Returns the lists of its mappings, and the state of its user process.
    pub fn parts(&mut self) -> (&mut AddressSpace, &mut UserProcess) {
        let process = process();
        // SAFETY: both are in the process's own memory, zeroed at first, which is valid; by the
        // rule of this module nothing else refers to them while this value is borrowed.
        unsafe { (&mut *process.space.at(), &mut *process.peer.at()) }
    }
}
