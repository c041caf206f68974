//! VMM of one VM: connects the board of the VMM library with the kernel and the servers.
//!
//! Its only capabilities are its guest memory, its console session and gates to root. Its own
//! memory is fixed at start: image, a stack per vCPU, one heap. Each vCPU has a thread and a
//! notification. The first thread also handles events of root ([`control`]), of the console and of
//! channels; events of a disk or network server go to the vCPU with the device's interrupt.
#![cfg_attr(not(test), no_std, no_main)]
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(dead_code, reason = "the rest needs the kernel"))]

#[cfg(target_arch = "aarch64")]
mod arm64;
mod channel;
mod console;
mod control;
mod devices;
mod host;
mod pass_through;
#[cfg_attr(target_arch = "aarch64", allow(dead_code, reason = "no vTLB there"))]
mod space;
mod steal;
#[cfg(target_arch = "x86_64")]
mod x86;

use abi::{FOREVER, rights};
use heapless::Vec;
use native_rt::start::{exit, guest_memory, windows};
use native_rt::thread::{HelperThread, ThreadResources, run_parallel};
use native_rt::{
    Factory, Gate, Message, Notification, SchedContext, SharedVcpu, Status, Vcpu, error, info,
    time, warn,
};
use proto::control::{STARTED, VmmStatistics, code};
use proto::start::{RangeKind, Role, Start, VCPU_STACK, Vmm, event, slot};
use proto::system::OnReset;
use spin::mutex::SpinMutex;
use spin::relax::RelaxStrategy;
use vmm_machine::functions::Bus;
use vmm_machine::{Functions, Once, Outcome, StopReason};
use vmm_mem::GuestMemory;
use vmm_vcpu::MAX_VCPUS;

#[cfg(target_arch = "aarch64")]
use crate::arm64 as platform;
use crate::console::{CONSOLE, Console, ConsoleLine};
use crate::control::{CONTROL, ROOT_EVENTS, VcpuFigures};
use crate::devices::{DeviceSlots, Listeners, MAX_DEVICES};
use crate::host::NativeHost;
use crate::platform::{GuestBoard, GuestBus, NativeVcpu, VcpuLoop};
use crate::space::SPACE;
#[cfg(target_arch = "x86_64")]
use crate::x86 as platform;

const VM: u64 = slot::FREE;
/// Returns the first slot of a vCPU: vCPU object, thread and scheduling context.
const fn vcpu_slots(index: usize) -> u64 {
    VM + 1 + 3 * index as u64
}
/// Time slice of a vCPU's thread, in ns.
const TIME_SLICE: u64 = 10_000_000;
/// Time limit for the other vCPUs to stop after one has ended the VM, in ns, beside two periods of
/// their CPU time, if that is limited. VMs of higher priority may delay them.
const STOP_TIMEOUT: u64 = 10_000_000_000;

/// Yields while it waits for a lock: the owner may share the CPU.
struct YieldRelax;

impl RelaxStrategy for YieldRelax {
    fn relax() {
        native_rt::yield_now();
    }
}

/// Devices of a VM in slots.
type Devices = dyn Functions<<GuestBus as Bus>::Device> + Sync;
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

/// Connects at most `N` devices and runs the VM; returns its exit code.
#[inline(never)]
fn with_devices<const N: usize>(start: &Start<'static>, plan: &Vmm) -> u64 {
    let mut devices = DeviceSlots::<N>::on(platform::bus(plan));
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
    let Some(memory) = guest_memory(start, platform::ram_ranges(plan.identity, plan.memory)) else {
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
    let mapped = map_guest(start, plan).and_then(|()| pass_through::connect(start, plan));
    if let Err(status) = mapped {
        error!("cannot map guest memory and devices: {status:?}");
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
    /// The vCPUs, for other threads than their own.
    shared: Vec<SharedVcpu, MAX_VCPUS>,
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
        let mut guest = Self {
            vcpus: Vec::new(),
            notifications: Vec::new(),
            shared: Vec::new(),
            helpers: Vec::new(),
        };
        let stacks = windows(start, RangeKind::Private).next();
        for (index, &cpu) in plan.cpus.iter().enumerate() {
            let slots = vcpu_slots(index);
            if index != 0 {
                let further = index as u64 - 1;
                let stack = stacks
                    .and_then(|window| window.part(further * VCPU_STACK, VCPU_STACK))
                    .ok_or(Status::NoQuota)?;
                let time =
                    start.cpu_time.map_or((TIME_SLICE, 0), |time| (time.budget, time.period));
                let sched = factory.sched_context(slots + 2, start.priority, time.0, time.1)?;
                let resources =
                    ThreadResources { factory, task: slot::TASK, slot: slots + 1, cpu, sched };
                let helper = HelperThread::new(resources, stack)?;
                guest.helpers.push(helper).map_err(|_| Status::Overflow)?;
            }
            let notification = Notification::at(slot::vcpu_notification(index));
            let space = SPACE.of_vcpu(index).ok_or(Status::BadCapability)?;
            let vcpu = Vcpu::create(factory, slots, space.0, index as u32, notification)?;
            guest.shared.push(vcpu.shared()).map_err(|_| Status::Overflow)?;
            let vcpu = platform::create_vcpu((vcpu, index), plan, (console, memory), space);
            let vcpu = Cell::new(vcpu);
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

/// Maps guest memory at its guest-physical addresses.
fn map_guest(start: &Start, plan: &Vmm) -> Result<(), Status> {
    let all = rights::READ | rights::WRITE | rights::EXECUTE | rights::USER | rights::GLOBAL;
    let mut offset = 0;
    for window in windows(start, RangeKind::Guest) {
        let mut first = 0;
        for (address, length) in platform::ram_ranges(plan.identity, plan.memory) {
            let from = offset.max(first);
            let end = (offset + window.length()).min(first + length);
            if let Some(length) = end.checked_sub(from).filter(|&length| length != 0) {
                let part = window.part(from - offset, length).ok_or(Status::BadArgument)?;
                SPACE.map(part, address + from - first, all)?;
            }
            first += length;
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
    guest: &mut Guest,
    console: &Console,
    (statistics, logged): (&Cell<VmmStatistics>, &mut Once),
    devices: Option<&Devices>,
) -> Result<Outcome, u64> {
    let Guest { vcpus, notifications, shared, helpers } = guest;
    pass_through::reset(start, plan);
    let loaded =
        power_on_and_load(devices, || platform::load(start, plan, memory, vcpus, devices))?;
    if plan.on_reset == OnReset::Exit {
        release_files(start);
    }
    let board = platform::create_board(start, plan, memory, loaded, devices);
    board.keep_logged(logged.clone());
    let drive = |index: usize| {
        let listeners = Listeners::new(plan);
        let paused_ticks = CONTROL.paused_ticks();
        let mut host = NativeHost {
            console,
            serial: ConsoleLine::Serial,
            notifications,
            vcpus: shared,
            start,
            listeners,
            devices: &plan.devices,
            paused_ticks,
            server_events: [0; 2],
        };
        let mut cpu = board.cpu(index);
        let mut vcpu = vcpus[index].lock();
        vcpu.start(index, context(index));
        let outcome = drive(&board, &mut cpu, &mut vcpu, &mut host);
        // The other vCPUs end too.
        board.end(outcome, &mut host);
        CONTROL.close(index, cpu.exits());
        let mut statistics = statistics.lock();
        for (sum, count) in statistics.exits.iter_mut().zip(cpu.exits()) {
            *sum += count;
        }
        for (sum, count) in statistics.server_events.iter_mut().zip(host.server_events) {
            *sum += count;
        }
    };
    let ran = run_parallel(helpers, stop_timeout(start), &drive, || drive(0));
    outcome_of(&board, ran, logged)
}

/// Time limit for the other vCPUs to stop, in ticks.
fn stop_timeout(start: &Start) -> u64 {
    let period = start.cpu_time.map_or(0, |time| time.period);
    let timeout = STOP_TIMEOUT.saturating_add(period.saturating_mul(2));
    time::ticks(start.clock.tsc_khz, timeout)
}

/// Returns the outcome of a run of all vCPUs, `ran` by [`run_parallel`]. The error is an exit code.
fn outcome_of(
    board: &GuestBoard,
    ran: Result<((), bool), Status>,
    logged: &mut Once,
) -> Result<Outcome, u64> {
    match ran {
        Ok(((), true)) => {
            *logged = board.logged();
            Ok(board.outcome().unwrap_or(Outcome::HostError(0)))
        }
        Ok(((), false)) => {
            // It may hold any lock, which would never be released.
            error!("the thread of a vCPU did not stop");
            Err(code::INTERNAL)
        }
        Err(status) => {
            error!("cannot start the thread of a vCPU: {status:?}");
            Err(code::INTERNAL)
        }
    }
}

/// Resets the devices, then loads the guest: otherwise peers of channels could write to the new
/// guest, and read its secrets, in memory that the previous one has shared. Root answers the
/// revocation of a share when its peer has no access any more.
fn power_on_and_load<T>(devices: Option<&Devices>, load: impl FnOnce() -> T) -> T {
    devices.power_on();
    load()
}

/// Runs a vCPU until the VM ends.
fn drive(
    board: &GuestBoard,
    cpu: &mut VcpuLoop,
    vcpu: &mut NativeVcpu,
    host: &mut NativeHost,
) -> Outcome {
    let index = cpu.index();
    let notification = host.notifications[index];
    // Earlier orders concern the VM before its reset, but a pause outlives the reset.
    let mut seen = CONTROL.orders();
    if CONTROL.boots_paused(index) {
        let events = serve_root(board, cpu, vcpu, host, event::PAUSE);
        notify_devices(board, cpu, events, host);
    }
    loop {
        let mut events = match board.run(cpu, vcpu, host) {
            StopReason::End(outcome) => {
                if outcome == Outcome::TripleFault {
                    platform::log_vcpu_state(index, vcpu);
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
            events |= serve_root(board, cpu, vcpu, host, events);
        }
        notify_devices(board, cpu, events, host);
    }
}

/// Handles root's events and new orders on a vCPU, which parks as long as the VM is paused.
/// Returns other events that arrived meanwhile.
#[cold]
fn serve_root(
    board: &GuestBoard,
    cpu: &VcpuLoop,
    vcpu: &mut NativeVcpu,
    host: &mut NativeHost,
    events: u64,
) -> u64 {
    let (index, notifications) = (cpu.index(), host.notifications);
    let mut driven = RunningVcpu { board, cpu, vcpu, host };
    let others = CONTROL.serve(index, events, notifications, context(index), &mut driven);
    host.paused_ticks = CONTROL.paused_ticks();
    vcpu.set_paused_ticks(host.paused_ticks);
    others
}

/// Passes events of servers and of peers to the console and the devices.
#[inline(always)]
fn notify_devices(board: &GuestBoard, cpu: &VcpuLoop, events: u64, host: &mut NativeHost) {
    let is_woken = events & event::CONSOLE != 0;
    if is_woken {
        host.console.wake();
    }
    if host.console.take_redirected() || is_woken {
        if let Some(slot) = host.listeners.console() {
            board.function_input(slot, Some(cpu), host);
        }
        board.input(Some(cpu), host);
    }
    for (number, device) in pass_through::interrupting(host.devices, events) {
        platform::interrupt(board, (number, device), cpu, host);
    }
    for slot in host.listeners.notified(events) {
        board.function_input(slot, Some(cpu), host);
        if host.listeners.has_server(slot) {
            let target = board.target(slot);
            let elsewhere = target != cpu.index();
            host.server_events[usize::from(elsewhere)] += 1;
            if elsewhere {
                devices::notify_vcpu(host.start, slot, target);
            }
        }
    }
    for slot in host.listeners.changed(events) {
        board.function_change(slot, Some(cpu), host);
    }
}

/// Returns the scheduling context of a vCPU's thread.
fn context(index: usize) -> SchedContext {
    SchedContext::at(if index == 0 { slot::SCHED } else { vcpu_slots(index) + 2 })
}

/// A VM and the vCPU that a thread runs.
struct RunningVcpu<'d, 'm, 'v, 'h> {
    board: &'d GuestBoard<'m>,
    cpu: &'d VcpuLoop,
    vcpu: &'d mut NativeVcpu<'v>,
    host: &'d mut NativeHost<'h>,
}

impl control::ControlledVm for RunningVcpu<'_, '_, '_, '_> {
    fn press_power_button(&mut self) {
        self.board.press_power_button(self.host);
    }

    fn has_ended(&self) -> bool {
        self.board.outcome().is_some()
    }

    fn is_pause_wanted(&self) -> bool {
        CONTROL.is_pause_wanted()
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

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_machine::Model;
    use vmm_machine::functions::FunctionCall;

    type Device = <GuestBus as Bus>::Device;

    /// Devices that record their reset.
    struct Recorder(Cell<Vec<&'static str, 2>>);

    impl Functions<Device> for Recorder {
        fn slots(&self) -> usize {
            0
        }

        fn model(&self, _: usize) -> Option<Model> {
            None
        }

        fn with(&self, _: usize, _: FunctionCall<'_, Device>) {}

        fn channel(&self, _: u64) -> Option<usize> {
            None
        }

        fn power_on(&self) {
            let _ = self.0.lock().push("reset");
        }
    }

    #[test]
    fn shares_are_revoked_before_the_guest_is_loaded() {
        let devices = Recorder(Cell::new(Vec::new()));
        let load = || devices.0.lock().push("load");
        assert_eq!(power_on_and_load(Some(&devices), load), Ok(()));
        assert_eq!(*devices.0.lock(), ["reset", "load"]);
        assert_eq!(power_on_and_load(None, || 1), 1);
    }
}
