//! The VMM of one virtual machine: connects the machine of the VMM library with the kernel and the
//! servers.
//!
//! It holds capabilities for its guest's memory, its console session and gates to root; nothing else. The memory
//! that it uses beyond the guest's is fixed when it starts: image, one stack, one heap.
#![cfg_attr(not(test), no_std, no_main)]
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(dead_code, reason = "the rest needs the kernel"))]

mod backend;
mod console;
mod host;
mod registers;

use core::arch::x86_64::__cpuid_count;

use abi::rights;
use native_rt::start::{exit, file, guest_memory, windows};
use native_rt::{
    Factory, Gate, Message, Notification, Space, Status, Vcpu, Vm, error, info, time, warn,
};
use proto::control::{STARTED, Statistics, code};
use proto::start::{RangeKind, Role, Start, Vmm, event, slot};
use proto::system::OnReset;
use vmm_boot::BootConfig;
use vmm_cpu::TscClock;
use vmm_machine::{Outcome, Pause, Pc, PcConfig};
use vmm_mem::GuestMemory;

use crate::backend::NativeVcpu;
use crate::console::Console;
use crate::host::NativeHost;

const VM: u64 = slot::FREE;
const VCPU: u64 = slot::FREE + 1;
/// Number of virtual CPUs that this VMM can run.
const MAX_VCPUS: usize = 1;

#[cfg(not(test))]
native_rt::entry!(main);

/// Runs the virtual machine; returns its exit code.
fn main(start: &Start<'static>) -> u64 {
    let Role::Vmm(plan) = &start.role else {
        error!("started as something else than a VMM");
        return code::BAD_CONFIG;
    };
    if plan.cpus.len() != MAX_VCPUS {
        error!("{} virtual CPUs; this version runs {MAX_VCPUS}", plan.cpus.len());
        return code::BAD_CONFIG;
    }
    let layout = vmm_machine::layout();
    let ranges = vmm_boot::ram_ranges(plan.memory, layout.hole_start);
    let Some(memory) = guest_memory(start, ranges) else {
        error!("guest memory is not {} bytes", plan.memory);
        return code::BAD_CONFIG;
    };
    let (vm, vcpu) = match make_guest() {
        Ok(made) => made,
        Err(status) => {
            error!("the kernel makes no guest: {status:?}");
            return code::INTERNAL;
        }
    };
    if let Err(status) = map_guest(start, vm, layout.hole_start) {
        error!("cannot map guest memory: {status:?}");
        return code::INTERNAL;
    }
    let console = Console::open(plan.console, &start.clock);
    let mut vcpu = NativeVcpu::new(vcpu, &console);
    let mut statistics = Statistics::ZERO;
    // Root goes on in any case.
    let _ = Gate::at(slot::CONTROL).call(Message::new(STARTED, [0; 4]));
    let mut resets = 0u32;
    loop {
        let outcome = match run(start, plan, &memory, &mut vcpu, &console, &mut statistics) {
            Ok(outcome) => outcome,
            Err(code) => return code,
        };
        if outcome == Outcome::Reset && plan.on_reset == OnReset::Reset {
            resets = resets.wrapping_add(1);
            // A guest may do nothing else than reset.
            if resets.is_power_of_two() {
                info!("reset number {resets}");
            }
            continue;
        }
        console.finish(Notification::at(slot::NOTIFICATION));
        (statistics.entries, statistics.settled) = vcpu.counts();
        exit(exit_code(outcome), &statistics);
    }
}

fn make_guest() -> Result<(Vm, Vcpu), Status> {
    let factory = Factory::at(slot::FACTORY);
    let vm = factory.vm(VM)?;
    let vcpu = Vcpu::create(factory, VCPU, vm, 0, Notification::at(slot::NOTIFICATION))?;
    Ok((vm, vcpu))
}

/// Maps guest memory for the guest: from 0 to the hole, the rest from 4 GiB on.
fn map_guest(start: &Start, vm: Vm, hole_start: u64) -> Result<(), Status> {
    const FOUR_GIB: u64 = 1 << 32;
    let all = rights::READ | rights::WRITE | rights::EXECUTE;
    let mut offset = 0;
    for window in windows(start, RangeKind::Guest) {
        let low = window.length().min(hole_start.saturating_sub(offset));
        if let Some(below) = window.part(0, low) {
            vm.map(below, offset, all)?;
        }
        if let Some(above) = window.part(low, window.length() - low) {
            vm.map(above, FOUR_GIB + (offset + low).saturating_sub(hole_start), all)?;
        }
        offset += window.length();
    }
    Ok(())
}

/// Boots the guest and runs it until it ends. The error is an exit code.
fn run(
    start: &Start,
    plan: &Vmm,
    memory: &GuestMemory,
    vcpu: &mut NativeVcpu,
    console: &Console,
    statistics: &mut Statistics,
) -> Result<Outcome, u64> {
    let layout = vmm_machine::layout();
    let config = BootConfig {
        layout: &layout,
        vcpus: 1,
        kernel: file(start, RangeKind::Kernel).unwrap_or(&[]),
        initrd: file(start, RangeKind::Initrd),
        command_line: plan.command_line.as_bytes(),
    };
    match vmm_boot::load(memory, &config) {
        Ok(state) => registers::set(vcpu, &state),
        Err(error) => {
            error!("the guest cannot be loaded: {error:?}");
            return Err(code::BAD_CONFIG);
        }
    }
    if plan.on_reset == OnReset::Exit {
        release_files(start);
    }
    let config = PcConfig {
        vcpus: 1,
        clock: TscClock::new(start.clock.tsc_khz, time::tsc()),
        xcr0_mask: plan.xcr0_mask,
        start_unix: time::unix_seconds(&start.clock),
        kvmclock: true,
    };
    let mut host = NativeHost { console };
    let mut pc = Pc::<MAX_VCPUS>::new(config, memory, host_cpuid);
    let notification = Notification::at(slot::NOTIFICATION);
    let outcome = loop {
        let events = match pc.run(0, vcpu, &mut host) {
            Pause::End(outcome) => break outcome,
            Pause::Recall(events) => events,
            Pause::Idle { deadline_tsc } => {
                console.flush();
                match notification.wait(deadline_tsc) {
                    Ok(events) => events,
                    Err(Status::Timeout) => continue,
                    Err(status) => {
                        error!("cannot wait: {status:?}");
                        return Err(code::INTERNAL);
                    }
                }
            }
        };
        if events & event::CONSOLE != 0 {
            console.wake();
            pc.input(&mut host);
        }
    };
    for (sum, count) in statistics.exits.iter_mut().zip(pc.exits(0)) {
        *sum += count;
    }
    Ok(outcome)
}

/// Gives the files up, and the page tables that map them: the guest will not be loaded again.
fn release_files(start: &Start) {
    for kind in [RangeKind::Kernel, RangeKind::Initrd] {
        for window in windows(start, kind) {
            if let Err(status) = window.release() {
                warn!("a file cannot be given up: {status:?}");
            }
        }
    }
}

fn host_cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    let values = __cpuid_count(leaf, subleaf);
    [values.eax, values.ebx, values.ecx, values.edx]
}

fn exit_code(outcome: Outcome) -> u64 {
    match outcome {
        Outcome::PowerOff => code::OK,
        Outcome::Code(chosen) => chosen.into(),
        Outcome::GuestPanic => code::GUEST_PANIC,
        Outcome::TripleFault => code::GUEST_FAULT,
        Outcome::Reset => code::RESET,
        Outcome::HostError(what) => {
            error!("the virtual CPU cannot run: {what:#x}");
            code::INTERNAL
        }
    }
}
