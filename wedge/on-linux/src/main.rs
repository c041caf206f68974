//! The wedge in processes of Linux: runs a pre-virtualized kernel and its programs without any help of the processor or the host's kernel
//! for virtual machines.
//!
//! One program, started by `parador run` with two descriptors: guest memory, and the memory that all processes of the machine share, with
//! the loader's record (`proto::wedge`). The first process serves devices; each address space of the guest has a further one on each virtual
//! CPU ([`processes`]). All state is in shared memory at fixed addresses ([`shared`]); the program itself has none.
#![no_std]
#![no_main]

mod backend;
mod balloon;
mod clock;
mod compat;
mod config;
mod counters;
mod cpu_affinity;
mod debug;
mod device;
mod disk;
mod exec_scan;
mod frames;
mod guest;
mod idle;
mod io_uring;
mod memory;
mod monitor;
mod net;
mod pkeys;
mod processes;
mod profile;
mod report;
mod sandbox;
mod setup;
mod shared;
mod signal;
mod sites;
mod steal_time;
mod sys;
mod syscall_patch;
mod user_process;
mod xstate;

use core::arch::naked_asm;
use core::sync::atomic::Ordering::Relaxed;

use linux_raw_sys::general as linux;
use linux_raw_sys::prctl;
use proto::wedge::{Start, layout, log, option};

use crate::config::{Config, config};
use crate::device::DeviceServer;
use crate::memory::Ram;
use crate::sandbox::Signals;
use crate::shared::PRIVATE_LENGTH;
use crate::sys::{Backing, Errno};

/// Bytes that a process may have for itself, beside guest memory and what is shared: some copies of pages of programs.
const OWN_MEMORY: u64 = 4 << 20;
/// Bytes that the stack of a process may have, which do not count there.
const STACK: u64 = 1 << 20;

#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn parador_wedge_start() -> ! {
    naked_asm!("xor ebp, ebp", "and rsp, -16", "call {}", "ud2", sym begin)
}

extern "C" fn begin() -> ! {
    match set_up() {
        Ok(mut device) => {
            let code = device.serve();
            counters::print();
            profile::print();
            sys::exit(code)
        }
        Err((what, error)) => {
            match error {
                None => report::print_line(log::ERROR, format_args!("{what}")),
                // The host's memory is what is most often missing.
                Some(error) => report::print_line(log::ERROR, format_args!("{what}: {error}")),
            }
            sys::exit(report::HOST)
        }
    }
}

/// Sets the device process up.
///
/// # Errors
/// What cannot be done, and the host's error if it is the host that refuses.
fn set_up() -> Result<DeviceServer, (&'static str, Option<Errno>)> {
    let cannot = |what| move |error| (what, Some(error));
    let data = linux::PROT_READ | linux::PROT_WRITE;
    let shared = Backing::Shared(layout::SHARED_FD, 0);
    // SAFETY: nothing is at these addresses yet. Nothing there is executed: a guest can write it.
    unsafe {
        sys::map(layout::SHARED, layout::SHARED_LENGTH, data, shared)
            .map_err(cannot("cannot map the machine's shared memory"))?;
        sys::map(layout::PRIVATE, PRIVATE_LENGTH, data, Backing::Own)
            .map_err(cannot("cannot map the wedge's memory"))?;
    }
    setup::map().map_err(cannot("cannot map the wedge's memory"))?;
    if !config::load().map_err(cannot("cannot map the wedge's memory"))? {
        return Err(("the loader's record is of another version", None));
    }
    let Config { start, .. } = config();
    if pkeys::is_enabled() {
        pkeys::allocate().map_err(cannot("cannot allocate protection keys"))?;
        pkeys::protect_shared().map_err(cannot("cannot protect the wedge's memory"))?;
    }
    let ram = Ram::new(start);
    ram.map().map_err(cannot("cannot map guest memory"))?;
    // SAFETY: no memory is touched.
    let own = unsafe { sys::call(linux::__NR_getpid, [0; 6]) }.unwrap_or(0);
    config().device.store(own as u32, Relaxed);
    for (resource, value) in [(linux::RLIMIT_DATA, OWN_MEMORY), (linux::RLIMIT_STACK, STACK)] {
        sys::limit(resource, value).map_err(cannot("cannot set a resource limit"))?;
    }
    // A guest process that may send these must not end this one, nor those that it creates.
    sys::set_signal_mask(processes::SENT).map_err(cannot("cannot block signals"))?;
    // One that was executed from memory would have the number of a descriptor as its name.
    let name = c"parador-wedge".as_ptr() as u64;
    for (option, value) in
        [(prctl::PR_SET_NAME, name), (prctl::PR_SET_NO_NEW_PRIVS, 1), (prctl::PR_SET_DUMPABLE, 0)]
    {
        // SAFETY: no memory is touched.
        unsafe { sys::call(linux::__NR_prctl, [option.into(), value, 0, 0, 0, 0]) }
            .map_err(cannot("cannot set PR_SET_NAME, PR_SET_NO_NEW_PRIVS and PR_SET_DUMPABLE"))?;
    }
    // What the host lets its users have of networks, it may not let them have in an empty namespace.
    net::open_taps(start).map_err(cannot("cannot open a tap device"))?;
    enter_sandbox(start);
    sandbox::drop_capabilities().map_err(cannot("cannot drop capabilities"))?;
    config::seal().map_err(cannot("cannot protect the wedge's memory"))?;
    let nets = net::make_workers(start, &config().filters)
        .map_err(cannot("cannot create a process of a network"))?;
    let disks = disk::make_workers(start, &config().filters)
        .map_err(cannot("cannot create a process of a disk"))?;
    let last = if start.console != 0 { layout::CONSOLE_FD } else { layout::CONTROL_FD };
    // They are the workers'.
    sys::close(layout::DISKS_FD, layout::CONTROL_FD - 1)
        .and_then(|()| sys::close(last + 1, u32::MAX))
        .map_err(cannot("cannot close inherited descriptors"))?;
    let mut device = DeviceServer::new(ram, disks, nets);
    for vcpu in 0..config::vcpu_count() {
        device.create_guest(vcpu, 0).map_err(cannot("cannot create a guest process"))?;
    }
    processes::start_vcpu(0, guest::main);
    Ok(device)
}

/// Enters the sandbox, if the loader wants that; ends the process if it wants all of it and the host refuses some.
fn enter_sandbox(start: &Start) {
    if start.options & option::SANDBOX == 0 {
        return;
    }
    let (refused, signals) = sandbox::enter();
    config().kicks.store(signals != Signals::Unconfined, Relaxed);
    if signals == Signals::PidNamespace {
        config().device.store(0, Relaxed);
        setup::words().first.store(processes::first::AWAITED, Relaxed);
    }
    if refused.is_empty() {
        return;
    }
    let is_needed = start.options & option::STRICT != 0;
    if is_needed || start.log >= log::INFO {
        let level = if is_needed { log::ERROR } else { log::INFO };
        report::print_line(level, format_args!("the host refuses {refused}"));
    }
    if is_needed {
        sys::exit(report::UNAVAILABLE);
    }
}
