//! Measures the first access of a guest to a page of its memory, as a program that is the guest's
//! VMM: each page that it maps when the guest has accessed it (`arm_stage2_demand`), and pages that
//! it has mapped before (`arm_stage2_eager`). Parador's own VMM maps all memory before.
//!
//! A page on demand costs a fault of the guest, its exit to the VMM, the system call that delegates
//! the page, and the entry of the guest, which repeats its access. The tables for it exist.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use abi::vcpu::exit;
use abi::{PAGE_SIZE, Status, rights, vm_mode};
use native_rt::start::windows;
use native_rt::{Factory, Space, Vcpu, Vm, Window, error, info, probe, time};
use proto::start::{RangeKind, Start, slot};

/// Guest-physical addresses.
const CODE: u64 = 0x4000_0000;
const MEMORY: u64 = 0x5000_0000;
/// Measured rounds with all pages of the private memory; one before them makes the tables.
const ROUNDS: u64 = 64;

native_rt::entry!(main);

fn main(start: &Start<'static>) -> u64 {
    match measure(start) {
        Ok(()) => {
            info!("CHECK stage2 ok");
            0
        }
        Err((what, status)) => {
            error!("CHECK stage2 FAIL {what}: {status:?}");
            1
        }
    }
}

type Outcome<T = ()> = Result<T, (&'static str, Status)>;

/// A guest that writes to pages, and its VM's memory.
struct Guest {
    vm: Vm,
    vcpu: Vcpu,
    entry: u64,
    memory: Window,
}

fn measure(start: &Start<'static>) -> Outcome {
    let mut guest = Guest::new(start)?;
    let pages = guest.memory.length() / PAGE_SIZE;
    let (mut on_demand, mut mapped, mut single) = (0, 0, 0);
    for round in 0..=ROUNDS {
        guest.memory.revoke().map_err(|status| ("revoke", status))?;
        let ticks = guest.write(pages, pages)?;
        // Of the exits after the last page, and of the measurement.
        let rest = guest.write(1, 0)?;
        if round != 0 {
            on_demand += ticks - rest;
            mapped += guest.write(pages, 0)?;
            single += guest.write(1, 0)?;
        }
    }
    report(start, "arm_stage2_demand", on_demand, ROUNDS * pages);
    report(start, "arm_stage2_eager", mapped - single, ROUNDS * (pages - 1));
    Ok(())
}

/// Prints the time of an event that happened `count` times in `ticks`.
fn report(start: &Start, name: &str, ticks: u64, count: u64) {
    let tenths = time::nanos(start.clock.tsc_khz, ticks) * 10 / count.max(1);
    info!("VB {name} {}.{} ns", tenths / 10, tenths % 10);
}

impl Guest {
    fn new(start: &Start<'static>) -> Outcome<Self> {
        let factory = Factory::at(slot::FACTORY);
        let create = |status| ("creation of the guest", status);
        let vm = factory.vm(slot::FREE, vm_mode::NESTED).map_err(create)?;
        let events = factory.notification(slot::FREE + 1).map_err(create)?;
        let vcpu = Vcpu::create(factory, slot::FREE + 2, vm, 0, events).map_err(create)?;
        let (code, entry) = probe::page_writer();
        vm.map(code, CODE, rights::READ | rights::EXECUTE).map_err(create)?;
        let memory = windows(start, RangeKind::Private).next();
        let memory = memory.ok_or(("no private memory", Status::Ok))?;
        Ok(Self { vm, vcpu, entry: CODE + entry - code.base(), memory })
    }

    /// Lets the guest write to the first `pages` pages, of which `faults` are to be mapped when it
    /// does. Returns the ticks that it takes.
    fn write(&mut self, pages: u64, faults: u64) -> Outcome<u64> {
        let state = self.vcpu.state();
        state.pc.set(self.entry);
        state.x[0].set(MEMORY);
        state.x[1].set(pages);
        let mut count = 0;
        let begin = time::tsc();
        loop {
            self.vcpu.run().map_err(|status| ("run of the guest", status))?;
            let run = &self.vcpu.state().run;
            if run.exit_reason.get() != exit::MEMORY_FAULT {
                break;
            }
            let offset = run.fault_address.get().wrapping_sub(MEMORY);
            let page = self.memory.part(offset, PAGE_SIZE).ok_or(("wrong address", Status::Ok))?;
            let all = rights::READ | rights::WRITE;
            self.vm.map(page, MEMORY + offset, all).map_err(|status| ("mapping", status))?;
            count += 1;
        }
        let ticks = time::tsc() - begin;
        let reason = self.vcpu.state().run.exit_reason.get();
        match reason == exit::HYPERCALL && count == faults {
            true => Ok(ticks),
            false => {
                error!("exit {reason}, {count} faults instead of {faults}");
                Err(("unexpected exits", Status::Ok))
            }
        }
    }
}
