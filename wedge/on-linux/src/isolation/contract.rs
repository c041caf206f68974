//! The interface of the three ways to isolate the guest kernel and the wedge from guest user mode.

use host_linux::sys::Errno;
use wedge_core::VirtualCpu;

use crate::compat;
use crate::isolation::mailbox::UserProcess;
use crate::mmu::ram::Ram;
use crate::state::shared::{SIGNAL_STACK, SIGNAL_STACK_LENGTH};

/// `stack_t` of sigaltstack(2): address, flags and length.
pub type SignalStack = [u64; 3];

/// The signal stack of a process, without flags.
pub static PLAIN_STACK: SignalStack = [SIGNAL_STACK, 0, SIGNAL_STACK_LENGTH];

/// Entry of host signals.
pub struct SignalEntry {
    /// Handler in place of the common one.
    pub handler: Option<u64>,
    /// Signal stack.
    pub stack: &'static SignalStack,
}

/// End of a run of user mode in its own process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// Pending events; user mode did not run.
    Events,
    /// A signal.
    Signal,
    /// The process was replaced: nothing is mapped in it, so that all user pages must be dropped.
    Unmapped,
}

/// A way to isolate the guest kernel and the wedge from guest user mode. What a way does not need
/// is done by the provided functions.
pub trait Isolation {
    /// Prepares the VM: for the device process, before it forks.
    fn set_up_vm(&self) -> Result<(), Errno> {
        Ok(())
    }

    /// Protects the configuration once it is sealed: for the device process.
    fn protect_config(&self) -> Result<(), Errno> {
        Ok(())
    }

    /// Protects the memory of a new guest process, before it maps anything of the guest.
    fn protect_process(&self) -> Result<(), Errno> {
        Ok(())
    }

    /// Maps what a new guest process of a slot needs beside the guest's memory.
    fn map_process(&self, _ram: &Ram, _vcpu: usize, _slot: usize) -> Result<(), Errno> {
        Ok(())
    }

    /// Returns whether executable pages must be scanned before they are mapped: user mode shares
    /// the address space with the kernel, and an instruction could open that to it.
    fn scans_code(&self) -> bool {
        false
    }

    /// Returns the entry of host signals.
    fn signal_entry(&self) -> SignalEntry {
        SignalEntry { handler: None, stack: &PLAIN_STACK }
    }

    /// Returns the signal stack to set when a handler is abandoned; `None`: it stays set.
    fn stack_after_handler(&self) -> Option<&'static SignalStack> {
        None
    }

    /// Notes a signal that has interrupted the kernel or the wedge, with its context at an address.
    fn on_signal(&self, _context: u64) {}

    /// Prepares an entry to the guest.
    fn before_entry(&self) {}

    /// Runs user mode in its own process; `None`: it runs in this one.
    fn run_user(&self, _user: &mut UserProcess, _cpu: &mut VirtualCpu) -> Option<Stop> {
        None
    }

    /// Returns `ES`, `DS`, `FS`, `GS` of stopped user mode.
    fn selectors(&self, _user: &UserProcess) -> [u16; 4] {
        compat::selectors()
    }
}
