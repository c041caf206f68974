//! VMM of one VM: connects the board of the VMM library with the kernel and the servers.
//!
//! Its only capabilities are its guest memory, its console session and gates to root. Its own
//! memory is fixed at start: image, a stack per vCPU, one heap. Each vCPU has a thread and a
//! notification; the first thread also handles events of the servers and of root ([`control`]).
#![cfg_attr(not(test), no_std, no_main)]
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(dead_code, reason = "the rest needs the kernel"))]

mod backend;
mod channel;
mod console;
mod control;
mod devices;
mod exit;
mod guest_virtual;
mod host;
mod space;
mod vtlb;

use core::arch::x86_64::__cpuid_count;

use abi::{FOREVER, rights};
use heapless::Vec;
use hw_x86::cpuid::leaf;
use native_rt::start::{exit, file, guest_memory, windows};
use native_rt::thread::{HelperThread, ThreadResources, run_parallel};
use native_rt::{
    Factory, Gate, Message, Notification, SchedContext, Status, Vcpu, error, info, time, warn,
};
use proto::control::{STARTED, VmmStatistics, code};
use proto::start::{RangeKind, Role, Start, VCPU_STACK, Vmm, event, slot};
use proto::system::OnReset;
use spin::mutex::SpinMutex;
use spin::relax::RelaxStrategy;
use vmm_boot::{BootConfig, PcLayout};
use vmm_machine::{Functions, Once, Outcome, Pc, PcConfig, StopReason};
use vmm_mem::GuestMemory;
use vmm_vcpu::{CounterClock, MAX_VCPUS};
use vmm_x86::{Cpu, Gpr, Reg, Seg, X86Vcpu as _};

use crate::backend::NativeVcpu;
use crate::console::{CONSOLE, Console, ConsoleLine};
use crate::control::{CONTROL, ROOT_EVENTS, VcpuFigures};
use crate::devices::{DeviceSlots, Listeners, MAX_DEVICES};
use crate::guest_virtual::GuestVirtual;
use crate::host::NativeHost;
use crate::space::SPACE;

const VM: u64 = slot::FREE;
/// Returns the first slot of a vCPU: vCPU object, notification, thread and scheduling context.
const fn vcpu_slots(index: usize) -> u64 {
    VM + 1 + 4 * index as u64
}
/// Time slice of a vCPU's thread, in ns.
const TIME_SLICE: u64 = 10_000_000;
/// Time limit for the other vCPUs to stop after one has ended the VM, in ns.
const STOP_TIMEOUT: u64 = 1_000_000_000;

/// Yields while it waits for a lock: the owner may share the CPU.
struct YieldRelax;

impl RelaxStrategy for YieldRelax {
    fn relax() {
        native_rt::yield_now();
    }
}

type Board<'m> = Pc<'m, YieldRelax, MAX_VCPUS, Option<&'m Devices>>;
type Devices = dyn Functions + Sync;
type Cell<T> = SpinMutex<T, YieldRelax>;

#[cfg(not(test))]
native_rt::entry!(main);

/// Runs the VM; returns its exit code.
fn main(start: &Start<'static>) -> u64 {
    let Role::Vmm(plan) = &start.role else {
        error!("the start page does not describe a VMM");
        return code::BAD_CONFIG;
    };
    // Devices use stack memory, for which root reserves space by their number.
    match devices::count(plan) {
        0 => serve(start, plan, None),
        1..=2 => with_devices::<2>(start, plan),
        3 => with_devices::<3>(start, plan),
        4..=5 => with_devices::<5>(start, plan),
        _ => with_devices::<MAX_DEVICES>(start, plan),
    }
}

/// Runs a VM with at most `N` devices.
#[inline(never)]
fn with_devices<const N: usize>(start: &Start<'static>, plan: &Vmm) -> u64 {
    let mut devices = DeviceSlots::<N>::new();
    let opened = devices::open(&mut devices, start, plan);
    let opened = opened.and_then(|()| devices::open_channels(&mut devices, start, plan));
    match opened.and_then(|()| devices::open_console(&mut devices, plan)) {
        Ok(()) => serve(start, plan, Some(&devices)),
        Err(problem) => {
            error!("cannot connect the devices: {problem}");
            code::INTERNAL
        }
    }
}

/// Runs the VM with these devices, if any; returns its exit code.
fn serve(start: &Start<'static>, plan: &Vmm, devices: Option<&Devices>) -> u64 {
    if !(1..=MAX_VCPUS).contains(&plan.cpus.len()) {
        error!("{} vCPUs requested; the limit is 1 to {MAX_VCPUS}", plan.cpus.len());
        return code::BAD_CONFIG;
    }
    let layout = vmm_machine::layout();
    let ranges = vmm_boot::ram_ranges(plan.memory, layout.hole_start);
    let Some(memory) = guest_memory(start, ranges) else {
        error!("the start page does not describe {} bytes of guest memory", plan.memory);
        return code::BAD_CONFIG;
    };
    let console = &CONSOLE;
    console.open(plan.console, &start.clock);
    let mut guest = match Guest::new(start, plan, (console, &memory)) {
        Ok(made) => made,
        Err(status) => {
            error!("cannot create the VM: {status:?}");
            return code::INTERNAL;
        }
    };
    if let Err(status) = map_guest(start, layout.hole_start) {
        error!("cannot map guest memory: {status:?}");
        return code::INTERNAL;
    }
    let statistics = Cell::new(VmmStatistics::ZERO);
    CONTROL.report_to(windows(start, RangeKind::Report).next());
    // Root continues in any case.
    let _ = Gate::at(slot::CONTROL).call(Message::new(STARTED, [0; 4]));
    let mut resets = 0u32;
    // For all boots together: a guest that resets repeatedly is logged once.
    let mut logged = Once::new();
    loop {
        let outcome = match run(
            start,
            plan,
            &memory,
            &mut guest,
            console,
            (&statistics, &mut logged),
            devices,
        ) {
            Ok(outcome) => outcome,
            Err(code) => return code,
        };
        if outcome == Outcome::Reset && plan.on_reset == OnReset::Reset {
            resets = resets.wrapping_add(1);
            // A guest may reset in a loop.
            if resets.is_power_of_two() {
                info!("reset number {resets}");
            }
            continue;
        }
        console.finish(Notification::at(slot::NOTIFICATION));
        exit(exit_code(outcome), &guest.statistics(statistics.into_inner()));
    }
}

/// Kernel objects of the VM.
struct Guest<'a> {
    vcpus: Vec<Cell<NativeVcpu<'a>>, MAX_VCPUS>,
    notifications: Vec<Notification, MAX_VCPUS>,
    /// Threads of all vCPUs but the first.
    helpers: Vec<HelperThread, MAX_VCPUS>,
}

impl<'a> Guest<'a> {
    fn new(
        start: &Start,
        plan: &Vmm,
        (console, memory): (&'a Console, &'a GuestMemory),
    ) -> Result<Self, Status> {
        let factory = Factory::at(slot::FACTORY);
        SPACE.create(plan)?;
        let mut guest = Self { vcpus: Vec::new(), notifications: Vec::new(), helpers: Vec::new() };
        let stacks = windows(start, RangeKind::Private).next();
        for (index, &cpu) in plan.cpus.iter().enumerate() {
            let slots = vcpu_slots(index);
            let notification = if index == 0 {
                Notification::at(slot::NOTIFICATION)
            } else {
                let further = index as u64 - 1;
                let stack = stacks
                    .and_then(|window| window.part(further * VCPU_STACK, VCPU_STACK))
                    .ok_or(Status::NoQuota)?;
                let time =
                    start.cpu_time.map_or((TIME_SLICE, 0), |time| (time.budget, time.period));
                let sched = factory.sched_context(slots + 3, start.priority, time.0, time.1)?;
                let resources =
                    ThreadResources { factory, task: slot::TASK, slot: slots + 2, cpu, sched };
                let helper = HelperThread::new(resources, stack)?;
                guest.helpers.push(helper).map_err(|_| Status::Overflow)?;
                factory.notification(slots + 1)?
            };
            let (vm, is_virtual) = SPACE.of_vcpu(index).ok_or(Status::BadCapability)?;
            let vcpu = Vcpu::create(factory, slots, vm, index as u32, notification)?;
            let optimisations = vtlb::optimisations(plan.vtlb, plan.cpus.len());
            let space = is_virtual.then(|| GuestVirtual::new(vm, memory, physical_bits()));
            let vcpu = Cell::new(NativeVcpu::new(vcpu, console, optimisations, space));
            guest.notifications.push(notification).map_err(|_| Status::Overflow)?;
            guest.vcpus.push(vcpu).map_err(|_| Status::Overflow)?;
        }
        Ok(guest)
    }

    /// Adds the counts of the vCPUs.
    fn statistics(&self, mut sum: VmmStatistics) -> VmmStatistics {
        for vcpu in &self.vcpus {
            let mut vcpu = vcpu.lock();
            let (entries, settled) = vcpu.counts();
            sum.entries += entries;
            sum.handled_in_kernel += settled;
            for (sum, count) in sum.vtlb.iter_mut().zip(vcpu.vtlb_counters()) {
                *sum += count;
            }
        }
        sum
    }
}

/// Maps guest memory: from 0 to the hole, and the rest from 4 GiB on.
fn map_guest(start: &Start, hole_start: u64) -> Result<(), Status> {
    const FOUR_GIB: u64 = 1 << 32;
    let all = rights::READ | rights::WRITE | rights::EXECUTE | rights::USER | rights::GLOBAL;
    let mut offset = 0;
    for window in windows(start, RangeKind::Guest) {
        let low = window.length().min(hole_start.saturating_sub(offset));
        if let Some(below) = window.part(0, low) {
            SPACE.map(below, offset, all)?;
        }
        if let Some(above) = window.part(low, window.length() - low) {
            SPACE.map(above, FOUR_GIB + (offset + low).saturating_sub(hole_start), all)?;
        }
        offset += window.length();
    }
    Ok(())
}

/// Loads the guest and sets the first vCPU to its initial state. The error is an exit code.
fn load(
    start: &Start,
    plan: &Vmm,
    memory: &GuestMemory,
    layout: &PcLayout,
    vcpus: &[Cell<NativeVcpu>],
) -> Result<(), u64> {
    let config = BootConfig {
        layout,
        vcpus: vcpus.len() as u8,
        kernel: file(start, RangeKind::Kernel).unwrap_or(&[]),
        initrd: file(start, RangeKind::Initrd),
        command_line: plan.command_line.as_bytes(),
    };
    match vmm_boot::load(memory, &config) {
        Ok(state) => vmm_machine::registers::set(&mut *vcpus[0].lock(), &state),
        Err(error) => {
            error!("cannot load the guest: {error:?}");
            return Err(code::BAD_CONFIG);
        }
    }
    if plan.on_reset == OnReset::Exit {
        release_files(start);
    }
    Ok(())
}

fn board_config(start: &Start, plan: &Vmm, count: u8) -> PcConfig {
    PcConfig {
        vcpus: count,
        clock: CounterClock::new(
            start.clock.tsc_khz,
            time::tsc().wrapping_sub(CONTROL.paused_ticks()),
        ),
        xcr0_mask: plan.xcr0_mask,
        start_unix: time::unix_seconds(&start.clock),
        kvmclock: plan.kvmclock,
        // Linux reads it at every context switch: too expensive for its use on a single CPU.
        steal_time: count > 1,
        pv_flush: plan.vtlb.is_none(),
        pv_ipi: true,
        nested_paging: plan.vtlb.is_none(),
        id: plan.id,
    }
}

/// Boots the guest and runs it until it ends. The error is an exit code.
fn run(
    start: &Start,
    plan: &Vmm,
    memory: &GuestMemory,
    guest: &mut Guest,
    console: &Console,
    (statistics, logged): (&Cell<VmmStatistics>, &mut Once),
    devices: Option<&Devices>,
) -> Result<Outcome, u64> {
    let Guest { vcpus, notifications, helpers, .. } = guest;
    let layout =
        if devices.is_some() { vmm_machine::layout_with_pci() } else { vmm_machine::layout() };
    load(start, plan, memory, &layout, vcpus)?;
    let config = board_config(start, plan, vcpus.len() as u8);
    let pc = Board::with_functions(config, memory, host_cpuid, devices);
    pc.keep_logged(logged.clone());
    let drive = |index: usize| {
        let listeners = Listeners::new(plan);
        let paused_ticks = CONTROL.paused_ticks();
        let mut host = NativeHost {
            console,
            serial: ConsoleLine::Serial,
            notifications,
            listeners,
            paused_ticks,
        };
        let mut cpu = pc.cpu(index);
        let mut vcpu = vcpus[index].lock();
        vcpu.start(index, context(index));
        let outcome = drive(&pc, &mut cpu, &mut vcpu, &mut host);
        // The other vCPUs end too.
        pc.end(outcome, &mut host);
        CONTROL.close(index, cpu.exits());
        for (sum, count) in statistics.lock().exits.iter_mut().zip(cpu.exits()) {
            *sum += count;
        }
    };
    let timeout = time::ticks(start.clock.tsc_khz, STOP_TIMEOUT);
    let ran = run_parallel(helpers, timeout, &drive, || drive(0));
    *logged = pc.logged();
    match ran {
        Ok(()) => Ok(pc.outcome().unwrap_or(Outcome::HostError(0))),
        Err(status) => {
            error!("cannot start the thread of a vCPU: {status:?}");
            Err(code::INTERNAL)
        }
    }
}

/// Runs a vCPU until the VM ends.
fn drive(pc: &Board, cpu: &mut Cpu, vcpu: &mut NativeVcpu, host: &mut NativeHost) -> Outcome {
    let index = cpu.index();
    let notification = host.notifications[index];
    // Earlier orders concern the VM before its reset.
    let mut seen = CONTROL.orders();
    loop {
        let mut events = match pc.run(cpu, vcpu, host) {
            StopReason::End(outcome) => {
                if outcome == Outcome::TripleFault {
                    log_vcpu_state(index, vcpu);
                }
                return outcome;
            }
            StopReason::Recall(events) => events,
            StopReason::Idle { deadline_ticks } => {
                if host.console.flush_at() != FOREVER {
                    host.console.flush();
                }
                let deadline = deadline_ticks.saturating_add(host.paused_ticks);
                match CONTROL.idle(index, notification, deadline) {
                    Ok(events) => events,
                    Err(Status::Timeout) => continue,
                    Err(status) => {
                        error!("cannot wait for events: {status:?}");
                        return Outcome::HostError(status as u64);
                    }
                }
            }
        };
        if events & ROOT_EVENTS != 0 || seen != CONTROL.orders() {
            seen = CONTROL.orders();
            let notifications = host.notifications;
            let mut driven = RunningVcpu { pc, cpu, vcpu, host };
            events |= CONTROL.serve(index, events, notifications, context(index), &mut driven);
            host.paused_ticks = CONTROL.paused_ticks();
            vcpu.set_paused_ticks(host.paused_ticks);
        }
        if events & event::CONSOLE != 0 {
            host.console.wake();
            if let Some(slot) = host.listeners.console() {
                pc.function_input(slot, Some(cpu), host);
            }
            pc.input(Some(cpu), host);
        }
        for slot in host.listeners.notified(events) {
            pc.function_input(slot, Some(cpu), host);
        }
        for slot in host.listeners.changed(events) {
            pc.function_change(slot, Some(cpu), host);
        }
    }
}

/// Logs the state of a vCPU after a triple fault or an error.
#[cold]
fn log_vcpu_state(index: usize, vcpu: &mut NativeVcpu) {
    let [rip, rflags] = [Reg::Rip, Reg::Rflags].map(|register| vcpu.get(register));
    let rsp = vcpu.gpr(Gpr::Rsp);
    let [cr0, cr2, cr3, cr4] =
        [Reg::Cr0, Reg::Cr2, Reg::Cr3, Reg::Cr4].map(|register| vcpu.get(register));
    error!("vCPU {index} failed: rip {rip:#x} rsp {rsp:#x} rflags {rflags:#x}");
    error!("  cr0 {cr0:#x} cr2 {cr2:#x} cr3 {cr3:#x} cr4 {cr4:#x}");
    let [cs, ss, idtr] = [Seg::Cs, Seg::Ss, Seg::Idtr].map(|segment| vcpu.segment(segment));
    error!(
        "  cs {:#x} ss {:#x} idt {:#x}+{:#x} delivering {:?}",
        cs.selector,
        ss.selector,
        idtr.base,
        idtr.limit,
        vcpu.event()
    );
}

/// Returns the scheduling context of a vCPU's thread.
fn context(index: usize) -> SchedContext {
    SchedContext::at(if index == 0 { slot::SCHED } else { vcpu_slots(index) + 3 })
}

/// A VM and the vCPU that a thread runs.
struct RunningVcpu<'d, 'm, 'v, 'h> {
    pc: &'d Board<'m>,
    cpu: &'d Cpu,
    vcpu: &'d mut NativeVcpu<'v>,
    host: &'d mut NativeHost<'h>,
}

impl control::ControlledVm for RunningVcpu<'_, '_, '_, '_> {
    fn press_power_button(&mut self) {
        self.pc.press_power_button(self.host);
    }

    fn has_ended(&self) -> bool {
        self.pc.outcome().is_some()
    }

    fn figures(&mut self) -> VcpuFigures {
        VcpuFigures::new(self.vcpu, self.cpu.exits())
    }
}

/// Unmaps the files and frees the page tables that map them: the guest is not loaded again.
fn release_files(start: &Start) {
    for kind in [RangeKind::Kernel, RangeKind::Initrd] {
        for window in windows(start, kind) {
            if let Err(status) = window.release() {
                warn!("cannot unmap a file: {status:?}");
            }
        }
    }
}

/// Returns the width of physical addresses.
fn physical_bits() -> u32 {
    (host_cpuid(leaf::SIZES, 0)[0] & 0xff).clamp(36, 52)
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
            error!("cannot run the vCPU: {what:#x}");
            code::INTERNAL
        }
    }
}
