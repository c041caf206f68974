//! The wedge in processes of Linux: runs a pre-virtualized kernel and its programs without any help of the processor or the host's kernel
//! for virtual machines.
//!
//! One program, started by `parador run` with two descriptors: guest memory, and the memory that all processes of the machine share, with
//! the loader's record (`proto::wedge`). The first process serves devices; each address space of the guest has a further one
//! ([`processes`]). All state is in shared memory at fixed addresses ([`shared`]); the program itself has none.
#![no_std]
#![no_main]

mod calls;
mod clock;
mod counters;
mod device;
mod disk;
mod guest;
mod memory;
mod outside;
mod processes;
mod profile;
mod report;
mod shared;
mod signal;
mod sites;
mod sys;

use core::arch::naked_asm;
use core::sync::atomic::Ordering::Relaxed;

use linux_raw_sys::general as linux;
use proto::wedge::layout;

use crate::memory::Ram;
use crate::shared::PRIVATE_LENGTH;
use crate::sys::{Backing, Errno};

#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn parador_wedge_start() -> ! {
    naked_asm!("xor ebp, ebp", "and rsp, -16", "call {}", "ud2", sym begin)
}

extern "C" fn begin() -> ! {
    match set_up() {
        Ok(()) => {
            let code = device::serve();
            counters::print();
            profile::print();
            sys::exit(code)
        }
        Err((what, error)) => {
            // The host's memory is what is most often missing.
            report::say(format_args!("{what}: error {}", error.0));
            sys::exit(report::HOST)
        }
    }
}

fn set_up() -> Result<(), (&'static str, Errno)> {
    let data = linux::PROT_READ | linux::PROT_WRITE;
    let shared = Backing::Shared(layout::SHARED_FD, 0);
    // SAFETY: nothing is at these addresses yet.
    unsafe {
        let rights = data | linux::PROT_EXEC;
        sys::map(layout::SHARED, layout::SHARED_LENGTH, rights, shared)
            .map_err(|error| ("cannot map the machine's shared memory", error))?;
        sys::map(layout::PRIVATE, PRIVATE_LENGTH, data, Backing::Own)
            .map_err(|error| ("cannot map memory", error))?;
    }
    let Some(start) = shared::start() else {
        return Err(("the loader's record is of another version", Errno(0)));
    };
    Ram::new(&start).map().map_err(|error| ("cannot map guest memory", error))?;
    // SAFETY: no memory is touched.
    let doorbell = unsafe { sys::call(linux::__NR_eventfd2, [0; 6]) };
    let doorbell = doorbell.map_err(|error| ("the host gives no event descriptor", error))?;
    if doorbell != u64::from(device::DOORBELL_FD) {
        return Err(("started with other descriptors than it expects", Errno(0)));
    }
    let khz = clock::tsc_khz();
    let shared = shared::shared();
    shared.options.store(start.options, Relaxed);
    shared.tsc_khz.store(khz, Relaxed);
    shared.unix_at_zero.store(clock::unix_at_zero(khz), Relaxed);
    // SAFETY: no memory is touched.
    let own = unsafe { sys::call(linux::__NR_getpid, [0; 6]) }.unwrap_or(0);
    shared.device.store(own as u32, Relaxed);
    disk::make_workers(&start).map_err(|error| ("the host makes no process for a disk", error))?;
    processes::make(0).map_err(|error| ("the host makes no process", error))?;
    processes::begin(guest::main);
    Ok(())
}
