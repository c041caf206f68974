//! The signal that makes a vCPU's thread leave the guest.

use std::cell::Cell;
use std::os::raw::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use nix::sys::signal::Signal;
use vmm_sys_util::signal::register_signal_handler;

use crate::Error;

/// Signal that makes a thread leave the guest.
pub const KICK: Signal = Signal::SIGUSR1;

thread_local! {
    /// `immediate_exit` of this thread's vCPU.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
    /// Number of kicks of this thread.
    static KICKS: AtomicU64 = const { AtomicU64::new(0) };
}

/// Signal handler. Sets `immediate_exit`, so a signal just before a guest entry makes KVM exit
/// immediately.
extern "C" fn kicked(_: c_int, _: *mut nix::libc::siginfo_t, _: *mut c_void) {
    KICKS.with(|kicks| kicks.fetch_add(1, SeqCst));
    let flag = IMMEDIATE_EXIT.get();
    if !flag.is_null() {
        // SAFETY: the thread's own `KvmVcpu` has set the address, and clears it before it releases
        // the memory. Only KVM and this thread access it.
        unsafe { flag.write_volatile(1) };
    }
}

/// Installs the handler of the kick signal, once per process.
pub fn install_handler() -> Result<(), Error> {
    register_signal_handler(KICK as c_int, kicked)
        .map_err(Error::host("install the signal handler"))
}

/// Sets `immediate_exit` of the calling thread's vCPU; null: it has none any more.
pub fn set_immediate_exit(flag: *mut u8) {
    IMMEDIATE_EXIT.set(flag);
}

/// Returns the number of kicks of the calling thread.
pub fn count() -> u64 {
    KICKS.with(|kicks| kicks.load(SeqCst))
}
