//! The wedge in processes of Linux: runs a pre-virtualized kernel and its programs without any help of the processor or the host's kernel
//! for virtual machines.
//!
//! One program, started by `parador run` with two descriptors: guest memory, and the memory that all processes of the machine share, with
//! the loader's record (`proto::wedge`). The first process serves devices; each address space of the guest has a further one on each virtual
//! CPU ([`processes`]). All state is in shared memory at fixed addresses ([`shared`]); the program itself has none.
#![no_std]
#![no_main]

mod apart;
mod balloon;
mod calls;
mod clock;
mod code;
mod compat;
mod counters;
mod debug;
mod device;
mod disk;
mod extended;
mod guest;
mod idle;
mod keys;
mod memory;
mod monitor;
mod net;
mod outside;
mod place;
mod processes;
mod profile;
mod report;
mod ring;
mod sandbox;
mod shared;
mod signal;
mod sites;
mod steal;
mod sys;

use core::arch::naked_asm;
use core::sync::atomic::Ordering::Relaxed;

use linux_raw_sys::general as linux;
use linux_raw_sys::prctl;
use proto::wedge::{layout, log, option};

use crate::device::Device;
use crate::memory::Ram;
use crate::sandbox::Signals;
use crate::shared::PRIVATE_LENGTH;
use crate::sys::{Backing, Errno};

/// Bytes that a process may have for itself, beside guest memory and what is shared: some copies of pages of programs.
const OWN_MEMORY: u64 = 32 << 20;

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
            // The host's memory is what is most often missing.
            report::say_at(log::ERROR, format_args!("{what}: error {}", error.0));
            sys::exit(report::HOST)
        }
    }
}

fn set_up() -> Result<Device, (&'static str, Errno)> {
    let data = linux::PROT_READ | linux::PROT_WRITE;
    let shared = Backing::Shared(layout::SHARED_FD, 0);
    // SAFETY: nothing is at these addresses yet.
    unsafe {
        sys::map(layout::SHARED, layout::SHARED_LENGTH, data, shared)
            .map_err(|error| ("cannot map the machine's shared memory", error))?;
        // What a guest prints is there, too: only stubs are code.
        let stubs = Backing::Shared(layout::SHARED_FD, layout::STUBS - layout::SHARED);
        sys::map(layout::STUBS, layout::STUBS_LENGTH, data | linux::PROT_EXEC, stubs)
            .map_err(|error| ("cannot map the machine's shared memory", error))?;
        sys::map(layout::PRIVATE, PRIVATE_LENGTH, data, Backing::Own)
            .map_err(|error| ("cannot map memory", error))?;
    }
    let Some(start) = shared::start() else {
        return Err(("the loader's record is of another version", Errno(0)));
    };
    shared::shared().options.store(start.options, Relaxed);
    if keys::are_on() {
        keys::set_up().map_err(|error| ("the host gives no protection keys", error))?;
        keys::close_shared().map_err(|error| ("the host cannot protect memory", error))?;
    }
    let ram = Ram::new(&start);
    ram.map(&start).map_err(|error| ("cannot map guest memory", error))?;
    let khz = clock::tsc_khz();
    let shared = shared::shared();
    shared.vcpus.store(start.vcpus as u32, Relaxed);
    shared.tsc_khz.store(khz, Relaxed);
    shared.unix_at_zero.store(clock::unix_at_zero(khz), Relaxed);
    // SAFETY: no memory is touched.
    let own = unsafe { sys::call(linux::__NR_getpid, [0; 6]) }.unwrap_or(0);
    shared.device.store(own as u32, Relaxed);
    place::learn();
    let limit = [OWN_MEMORY, OWN_MEMORY];
    let arguments = [linux::RLIMIT_DATA.into(), limit.as_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: the limit is read.
    unsafe { sys::call(linux::__NR_setrlimit, arguments) }
        .map_err(|error| ("the host sets no limit of memory", error))?;
    let filters = shared::filters();
    for (option, value) in [(prctl::PR_SET_NO_NEW_PRIVS, 1), (prctl::PR_SET_DUMPABLE, 0)] {
        // SAFETY: no memory is touched.
        unsafe { sys::call(linux::__NR_prctl, [option.into(), value, 0, 0, 0, 0]) }
            .map_err(|error| ("the host does not let a process give up rights", error))?;
    }
    // What the host lets its users have of networks, it may not let them have in an empty namespace.
    net::open_taps(&start).map_err(|error| ("the host gives no tap device", error))?;
    if start.options & option::SANDBOX != 0 {
        let (refused, signals) = sandbox::enter();
        shared.kicks.store(signals != Signals::Open, Relaxed);
        if signals == Signals::Numbered {
            shared.device.store(0, Relaxed);
            shared.first.store(processes::first::AWAITED, Relaxed);
        }
        if !refused.is_empty() {
            let is_needed = start.options & option::STRICT != 0;
            if is_needed || start.log >= log::INFO {
                let level = if is_needed { log::ERROR } else { log::INFO };
                report::say_at(level, format_args!("the host lets no process have {refused}"));
            }
            if is_needed {
                sys::exit(report::UNAVAILABLE);
            }
        }
    }
    let nets = net::make_workers(&start, &filters)
        .map_err(|error| ("the host makes no process for a network", error))?;
    let disks = disk::make_workers(&start, &filters)
        .map_err(|error| ("the host makes no process for a disk", error))?;
    let last = if start.console != 0 { layout::CONSOLE_FD } else { layout::CONTROL_FD };
    // They are the workers'.
    sys::close(layout::DISKS_FD, layout::CONTROL_FD - 1)
        .and_then(|()| sys::close(last + 1, u32::MAX))
        .map_err(|error| ("the host closes no descriptors", error))?;
    let mut device = Device::new(filters, ram, disks, nets, start.console != 0);
    for vcpu in 0..shared::vcpus().len() {
        device.make(vcpu, 0).map_err(|error| ("the host makes no process", error))?;
    }
    processes::begin(0, guest::main);
    Ok(device)
}
