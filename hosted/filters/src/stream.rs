//! Filters of processes that forward frames.

use linux_raw_sys::{general as linux, ioctl, net};
use seccompiler::BackendError;

use crate::Error;
use crate::rules::{Rules, allow, allow_all, compile, own_memory};

/// Installs the filter of a switch server: it forwards frames between sockets that it has or
/// accepts, and locks the file of this descriptor at the end.
///
/// # Errors
/// The filter cannot be installed.
pub fn confine_switch(lock: u32) -> Result<(), Error> {
    Ok(seccompiler::apply_filter(&switch(lock).and_then(compile)?)?)
}

/// Installs the filter of a process that forwards frames between sockets that it has.
///
/// # Errors
/// The filter cannot be installed.
pub fn confine_relay() -> Result<(), Error> {
    Ok(seccompiler::apply_filter(&stream_forwarder().and_then(compile)?)?)
}

/// Filter of a switch server.
pub fn switch(lock: u32) -> Result<Rules, BackendError> {
    let mut rules = stream_forwarder()?;
    allow(&mut rules, linux::__NR_ioctl, &[&[(1, ioctl::FIONBIO)]])?;
    allow(&mut rules, linux::__NR_flock, &[&[(0, lock)]])?;
    // Credentials of the peer.
    let peer = [(1, net::SOL_SOCKET), (2, net::SO_PEERCRED)];
    allow(&mut rules, linux::__NR_getsockopt, &[&peer])?;
    allow_all(&mut rules, &[linux::__NR_accept4]);
    Ok(rules)
}

/// Filter of a process that forwards data between sockets that it has.
pub fn stream_forwarder() -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    rules.insert(linux::__NR_mmap.into(), vec![own_memory()?]);
    allow_all(
        &mut rules,
        &[
            linux::__NR_ppoll,
            linux::__NR_recvfrom,
            linux::__NR_sendto,
            linux::__NR_close,
            // Memory, hash tables, exit.
            linux::__NR_mremap,
            linux::__NR_munmap,
            linux::__NR_madvise,
            linux::__NR_brk,
            linux::__NR_getrandom,
            linux::__NR_futex,
            linux::__NR_sigaltstack,
            linux::__NR_exit_group,
        ],
    );
    Ok(rules)
}
