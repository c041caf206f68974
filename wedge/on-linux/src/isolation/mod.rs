//! Isolation of the guest kernel and the wedge from guest user mode: by protection keys
//! ([`pkeys`]), by processes ([`user_process`]), or not at all ([`none`]), behind one trait
//! ([`contract::Isolation`]).

pub mod contract;
pub mod mailbox;
pub mod none;
pub mod pkeys;
pub mod signal_stacks;
pub mod user_process;
pub mod user_thread;

use proto::hosted::option;

use crate::isolation::contract::Isolation;
use crate::isolation::none::Unprotected;
use crate::isolation::pkeys::ProtectionKeys;
use crate::isolation::user_process::UserProcesses;
use crate::state::config::has;

/// Returns the VM's isolation.
pub fn current() -> &'static dyn Isolation {
    if has(option::KEYS) {
        &ProtectionKeys
    } else if has(option::USER_PROCESS) {
        &UserProcesses
    } else {
        &Unprotected
    }
}
