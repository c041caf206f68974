//! The wedge for Linux processes: runs a pre-virtualized kernel and its user mode without hardware
//! virtualization and without KVM.
//!
//! `parador run` starts the program with file descriptors of guest memory and of the memory shared
//! by all processes of the VM, with the loader's record ([`proto::hosted`]). The first process is
//! the device process; each guest address space has one further process per vCPU ([`processes`]).
//! All state is in shared memory at fixed addresses ([`state`]); the program has no static
//! variables.
//!
//! [`linux`] is the interface of the host kernel; [`state`] the layout of shared and private
//! memory, with the rule of its use ([`state::current`]); [`mmu`] keeps the host's page tables like
//! the guest's, over traits, so that unit tests run it; [`isolation`] separates the guest kernel
//! from its user mode in one of three ways. [`guest`] has the event loop of a vCPU, which runs it
//! ([`vcpu`]) and handles its stops ([`exits`]). No file imports one that imports it.
#![cfg_attr(target_os = "none", no_std)]
#![cfg_attr(target_os = "none", no_main)]

#[cfg(test)]
extern crate std;

mod backend;
mod balloon;
mod children;
mod clock;
mod compat;
mod counters;
mod cpu_affinity;
mod debug;
mod device;
mod disk;
mod effects;
mod exits;
mod guest;
mod guest_space;
mod idle;
mod isolation;
mod kick;
mod linux;
mod mmu;
mod monitor;
mod net;
mod processes;
mod profile;
mod regions;
mod report;
mod signal;
mod sites;
mod state;
mod steal_time;
mod timer;
mod vcpu;
mod xstate;

use core::arch::naked_asm;
use core::sync::atomic::Ordering::Relaxed;

use host_linux::sandbox::{self, Entered};
use host_linux::sys::{self, Backing, Errno};
use linux_raw_sys::general as uapi;
use linux_raw_sys::prctl;
use proto::hosted::{Start, console, layout, log, option};

use crate::device::DeviceServer;
use crate::linux::signals;
use crate::mmu::ram::Ram;
use crate::state::config::{Config, config};
use crate::state::shared::PRIVATE_LENGTH;
use crate::state::{config, device_counters, setup};

/// Limit of a process's private memory in bytes, without guest memory and shared memory: copies of
/// user pages.
const OWN_MEMORY: u64 = 4 << 20;
/// Limit of a process's stack in bytes, which does not count there.
const STACK: u64 = 1 << 20;

#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn parador_wedge_start() -> ! {
    naked_asm!("xor ebp, ebp", "and rsp, -16", "call {}", "ud2", sym begin)
}

/// Entry point of the unit tests' target, where the program cannot run: its addresses are fixed.
#[cfg(not(target_os = "none"))]
fn main() {}

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
                // Most often the host is out of memory.
                Some(error) => report::print_line(log::ERROR, format_args!("{what}: {error}")),
            }
            sys::exit(report::HOST)
        }
    }
}

/// Sets up the device process.
///
/// # Errors
/// The failed operation, and the host's error if a system call has failed.
fn set_up() -> Result<DeviceServer, (&'static str, Option<Errno>)> {
    let cannot = |what| move |error| (what, Some(error));
    let data = uapi::PROT_READ | uapi::PROT_WRITE;
    let shared = Backing::Shared(layout::SHARED_FD, 0);
    // SAFETY: nothing is mapped at these addresses yet. The memory is not executable, because a
    // guest can write it.
    unsafe {
        sys::map(layout::SHARED, layout::SHARED_LENGTH, data, shared)
            .map_err(cannot("cannot map the VM's shared memory"))?;
        sys::map(layout::PRIVATE, PRIVATE_LENGTH, data, Backing::Own)
            .map_err(cannot("cannot map the wedge's memory"))?;
    }
    setup::map().map_err(cannot("cannot map the wedge's memory"))?;
    config::map().map_err(cannot("cannot map the wedge's memory"))?;
    let tsc_khz = clock::tsc_khz();
    if !config::load(tsc_khz, clock::unix_at_zero(tsc_khz), cpu_affinity::detect()) {
        return Err(("the loader's record has another version", None));
    }
    let Config { start, .. } = config();
    let isolation = isolation::current();
    isolation.set_up_vm().map_err(cannot("cannot set up user/kernel isolation"))?;
    let ram = Ram::new(start);
    ram.map().map_err(cannot("cannot map guest memory"))?;
    config().device.store(sys::process_id(), Relaxed);
    for (resource, value) in [(uapi::RLIMIT_DATA, OWN_MEMORY), (uapi::RLIMIT_STACK, STACK)] {
        sys::limit(resource, value).map_err(cannot("cannot set a resource limit"))?;
    }
    // A guest process that may send these signals must not end this process or its children.
    sys::set_signal_mask(signals::SENT).map_err(cannot("cannot block signals"))?;
    // A program executed from a memfd would be named after its descriptor.
    sys::set_name(c"parador-wedge")
        .and_then(|()| sys::set_attribute(prctl::PR_SET_NO_NEW_PRIVS, 1))
        .and_then(|()| sys::set_attribute(prctl::PR_SET_DUMPABLE, 0))
        .map_err(cannot("cannot set PR_SET_NAME, PR_SET_NO_NEW_PRIVS and PR_SET_DUMPABLE"))?;
    // In an empty network namespace the host may refuse access to its networks.
    net::open_taps(start).map_err(cannot("cannot open a tap device"))?;
    enter_sandbox(start);
    sandbox::drop_capabilities().map_err(cannot("cannot drop capabilities"))?;
    config::seal()
        .and_then(|()| isolation.protect_config())
        .map_err(cannot("cannot protect the wedge's memory"))?;
    device_counters::map().map_err(cannot("cannot map the counters of devices"))?;
    let nets = net::make_workers(start, &config().filters)
        .map_err(cannot("cannot create a network worker"))?;
    let disks = disk::make_workers(start, &config().filters)
        .map_err(cannot("cannot create a disk worker"))?;
    device_counters::unmap().map_err(cannot("cannot unmap the counters of devices"))?;
    let last = if start.console != console::NONE { layout::CONSOLE_FD } else { layout::CONTROL_FD };
    // These descriptors belong to the workers.
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

/// Enters the sandbox if the loader requests it; exits if the loader requires all of it and the
/// host refuses a part.
fn enter_sandbox(start: &Start) {
    if start.options & option::SANDBOX == 0 {
        return;
    }
    // A tracer receives signals first.
    let separates_children = start.options & option::TRACED == 0;
    let Entered { refused, has_pid_namespace, has_signal_scope } =
        sandbox::enter(separates_children);
    let kicks = separates_children && (has_pid_namespace || has_signal_scope);
    config().kicks.store(kicks, Relaxed);
    if has_pid_namespace {
        config().device.store(0, Relaxed);
        setup::words().first.store(children::first::AWAITED, Relaxed);
    }
    if refused.is_empty() {
        return;
    }
    let is_needed = start.options & option::STRICT != 0;
    if is_needed || start.log >= log::INFO {
        let level = if is_needed { log::ERROR } else { log::INFO };
        report::print_line(level, format_args!("cannot enter the sandbox: {refused}"));
    }
    if is_needed {
        sys::exit(report::UNAVAILABLE);
    }
}
