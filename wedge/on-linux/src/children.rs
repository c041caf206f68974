//! Child processes of the device process: their creation, their end, and their seccomp filters.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use host_linux::sys::{self, Errno};
use linux_raw_sys::general as linux;
use proto::hosted::{Filters, layout};

use crate::report::HOST;
use crate::state::config::{self, config};
use crate::state::setup;

/// Forks; returns the child's id in the parent, 0 in the child.
pub fn fork() -> Result<u32, Errno> {
    let arguments = [linux::SIGCHLD.into(), 0, 0, 0, 0, 0];
    // SAFETY: the child continues with a copy of this process's private memory.
    let child = unsafe { sys::call(linux::__NR_clone, arguments) }? as u32;
    let first = &setup::words().first;
    if child != 0 && matches!(first.load(SeqCst), first::AWAITED | first::HERE) {
        // The child may have arrived already. Its death before that is detected elsewhere.
        sys::wait(first, first::AWAITED, Some(PATIENCE));
        first.store(first::MET, SeqCst);
        sys::wake(first);
    }
    Ok(child)
}

/// Values of [`crate::state::setup::Words::first`] with a PID namespace.
pub mod first {
    /// The namespace has no process yet.
    pub const AWAITED: u32 = 1;
    /// Its first process will die with its parent.
    pub const HERE: u32 = 2;
    /// The parent has acknowledged that.
    pub const MET: u32 = 3;
}

/// Timeout of the handshake between the first process of a namespace and its parent in nanoseconds.
const PATIENCE: u64 = 10_000_000_000;

/// Returns the filter of a process that notifies vCPUs of events.
pub fn filter_index(which: usize) -> usize {
    which + if config::kicks() { Filters::KICKS } else { 0 }
}

/// Installs one of the seccomp filters in this process.
pub fn confine(filters: &Filters, which: usize) -> Result<(), Errno> {
    let [length, instructions @ ..] = &filters.programs[which];
    let length = instructions.len().min(*length as usize);
    sys::set_filter(&instructions[..length])
}

/// Returns the device process's id as its children see it: 0 in a PID namespace.
pub fn device() -> u32 {
    config().device.load(Relaxed)
}

/// Makes this process die with its parent. In a PID namespace it cannot detect that its parent has
/// died before; there the first process, with which the namespace ends, performs a handshake with
/// its parent.
pub fn die_with_parent(made_by: u32) -> Result<(), Errno> {
    sys::set_attribute(linux_raw_sys::prctl::PR_SET_PDEATHSIG, linux::SIGKILL)?;
    // The parent may have ended before the prctl.
    if sys::parent_id() != made_by {
        sys::exit(HOST);
    }
    let word = &setup::words().first;
    if word.compare_exchange(first::AWAITED, first::HERE, SeqCst, SeqCst).is_ok() {
        sys::wake(word);
        sys::wait(word, first::HERE, Some(PATIENCE));
        if word.load(SeqCst) != first::MET {
            sys::exit(HOST);
        }
    }
    Ok(())
}

/// Turns a new process into a worker for one host descriptor. It closes all other descriptors
/// except the common ones, and runs `make` before its filter is installed.
pub fn become_worker<T>(
    fd: u32,
    make: impl FnOnce() -> Result<T, Errno>,
    filters: &Filters,
    which: usize,
) -> Result<T, Errno> {
    die_with_parent(device())?;
    setup::unmap()?;
    for (first, last) in [
        (layout::INPUT_FD, layout::OUTPUT_FD),
        (layout::MEMORY_FD, layout::SHARED_FD),
        (layout::DISKS_FD, fd - 1),
        (fd + 1, u32::MAX),
    ] {
        if first <= last {
            sys::close(first, last)?;
        }
    }
    let made = make()?;
    confine(filters, filter_index(which))?;
    Ok(made)
}
