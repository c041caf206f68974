//! The board `virt`: an AArch64 machine with GICv3 or GICv2, UART and clock, described by a device
//! tree (`vmm_boot::virt`). Its addresses are those of QEMU's machine of that name.
//!
//! vCPUs run concurrently, each in a thread of the host. One lock protects all devices but those in
//! slots ([`slots`]), which have one each; it is held while a device works, and not while the guest
//! runs. A thread that creates an event for another vCPU kicks it.

mod env;
mod own_functions;
mod pci_access;
mod slots;
mod unknown;

use core::ops::Range;
use core::time::Duration;

use hw_arm64::gic::{SoftwareInterrupt, Version, distributor, redistributor, v2};
use hw_arm64::psci;
use spin::mutex::SpinMutex;
use spin::relax::{RelaxStrategy, Spin};
use vmm_arm64::{
    Arm64Platform, Arm64Vcpu, Interrupts, PowerState, StartRequest, Unknown, VcpuLoop, Width,
};
use vmm_boot::virt as layout;
use vmm_bus::{Access, Device, Env, NEVER, Nanos, WAKE_INPUT};
use vmm_dev::arm64::gic::{Gic, v2m};
use vmm_dev::arm64::pl011::Pl011;
use vmm_dev::arm64::pl031::Pl031;
use vmm_dev::channel::spec as channel;
use vmm_dev::pci::Bridge;
use vmm_dev::pci::pass_through::PassThroughFunction;
use vmm_dev::virtio::input::PowerButton;
use vmm_dev::virtio::mmio::Mmio;
use vmm_mem::GuestMemory;
use vmm_vcpu::{CounterClock, MAX_VCPUS, Outcome, Platform, Signals, StopReason};

use crate::functions::Functions;
use crate::pci::Windows;
use crate::{Counters, Host, Level, Once};

use env::{ChipEnv, with_line};
use own_functions::OwnFunctions;
use unknown::Text;

pub use slots::{VirtBus, VirtDevice};

/// Configuration of the board.
#[derive(Clone, Copy, Debug)]
pub struct VirtConfig {
    /// Number of vCPUs, 1 to the capacity of the [`Virt`].
    pub vcpus: u8,
    /// VM time: frequency of the host's counter, and its value at the start of the VM.
    pub clock: CounterClock,
    /// Wall-clock time at VM time 0, since 1970-01-01 UTC.
    pub start_unix: Duration,
    /// Start of vCPU 0.
    pub start: StartRequest,
    /// Version of the interrupt controller: that of the host CPU's interface.
    pub gic: Version,
    /// Kind of all vCPUs.
    pub width: Width,
}

/// A board with room for `CPUS` vCPUs, at most [`MAX_VCPUS`]. vCPU threads wait for the lock with
/// strategy `R`. `P` holds the devices in slots; `()`: none.
pub struct Virt<'m, R = Spin, const CPUS: usize = MAX_VCPUS, P = ()> {
    fixed: Fixed<'m>,
    devices: SpinMutex<Devices<CPUS>, R>,
    functions: P,
    windows: SpinMutex<Windows, R>,
    /// Its lock is taken outside of that of the board.
    own_functions: SpinMutex<OwnFunctions, R>,
}

/// Constant state of a running VM.
struct Fixed<'m> {
    memory: &'m GuestMemory,
    clock: CounterClock,
    start_unix: Duration,
    vcpus: usize,
    width: Width,
    /// There are functions on PCI.
    has_pci: bool,
}

/// Power of a vCPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Power {
    Off,
    /// It starts when its thread looks.
    Starting(StartRequest),
    /// Its thread resets its registers.
    Started,
    On,
}

impl Power {
    fn state(self) -> PowerState {
        match self {
            Self::Off => PowerState::Off,
            Self::Starting(_) | Self::Started => PowerState::OnPending,
            Self::On => PowerState::On,
        }
    }
}

/// Devices, and what they have done.
struct Devices<const CPUS: usize> {
    gic: Gic<CPUS>,
    uart: Pl011,
    clock: Pl031,
    button: Mmio<PowerButton>,
    power: [Power; CPUS],
    effects: Effects,
    /// CPU whose access is served: the distributor of a GICv2 shows each its own registers.
    accessing: usize,
    /// CPUs with events, which have been kicked.
    kicked: u32,
    /// CPUs whose threads do not know the settings of their interrupts yet: a bit each.
    stale: u32,
    /// Deadlines of the devices in slots, which CPU 0 services.
    timers: [Nanos; layout::MAX_SLOTS],
    /// CPU 0 does not know the next of these deadlines yet.
    is_rearmed: bool,
    bridge: Bridge,
    /// Interrupt of the last message of each slot's device; 0: it has sent none.
    messages: [u32; layout::MAX_SLOTS],
}

/// Effects of devices beside their interrupts.
struct Effects {
    end: Option<Outcome>,
    counters: Counters,
    once: Once,
    /// A device has set its line.
    has_line: bool,
}

/// Devices by their regions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Chip {
    Distributor,
    Redistributors,
    Messages,
    Uart,
    Clock,
    Button,
}

/// Device at an address, and the offset there. Where a GICv3 has more registers than a GICv2, those
/// of the latter read as zero.
fn chip_at(address: u64) -> Option<(Chip, u64)> {
    let regions = [
        (layout::DISTRIBUTOR, distributor::LENGTH, Chip::Distributor),
        (layout::REDISTRIBUTORS, layout::REDISTRIBUTORS_LENGTH, Chip::Redistributors),
        (layout::UART, layout::PAGE, Chip::Uart),
        (layout::CLOCK, layout::PAGE, Chip::Clock),
        (layout::BUTTON, layout::PAGE, Chip::Button),
        (layout::MESSAGES, hw_arm64::gic::v2m::LENGTH, Chip::Messages),
    ];
    let offset = |base: u64, length| Some(address.wrapping_sub(base)).filter(|&at| at < length);
    regions.into_iter().find_map(|(base, length, chip)| Some((chip, offset(base, length)?)))
}

/// Interrupts by message.
const MESSAGES: Range<u32> = layout::FIRST_MESSAGE..layout::FIRST_MESSAGE + layout::MESSAGE_COUNT;

const _: () = assert!(layout::REDISTRIBUTORS_LENGTH >= MAX_VCPUS as u64 * redistributor::LENGTH);
const _: () = assert!(MAX_VCPUS <= v2::MAX_CPUS);

impl<'m, R: RelaxStrategy, const CPUS: usize, P: Functions<dyn VirtDevice>> Virt<'m, R, CPUS, P> {
    /// Creates the board in its power-on state with these devices in slots; the caller has filled
    /// guest memory.
    pub fn new(config: VirtConfig, memory: &'m GuestMemory, functions: P) -> Self {
        const { assert!(CPUS >= 1 && CPUS <= MAX_VCPUS) };
        functions.power_on();
        let vcpus = usize::from(config.vcpus).clamp(1, CPUS);
        let mut power = [Power::Off; CPUS];
        power[0] = Power::Starting(config.start);
        let VirtConfig { clock, start_unix, gic, width, .. } = config;
        let mut has_pci = false;
        for slot in 0..functions.slots() {
            functions.with(slot, &mut |device, _| has_pci |= device.function().is_some());
        }
        Self {
            fixed: Fixed { memory, clock, start_unix, vcpus, width, has_pci },
            devices: SpinMutex::new(Devices {
                gic: Gic::new(gic, vcpus),
                uart: Pl011::new(),
                clock: Pl031::new(start_unix),
                button: Mmio::new(PowerButton::new()),
                power,
                effects: Effects {
                    end: None,
                    counters: Counters::default(),
                    once: Once::new(),
                    has_line: false,
                },
                accessing: 0,
                kicked: 0,
                stale: 0,
                timers: [NEVER; layout::MAX_SLOTS],
                is_rearmed: false,
                bridge: Bridge::new(),
                messages: [0; layout::MAX_SLOTS],
            }),
            functions,
            windows: SpinMutex::default(),
            own_functions: SpinMutex::default(),
        }
    }

    /// Adds a PCI function of the machine, device `number` that the guest drives itself.
    pub fn add_function(&mut self, number: usize, function: PassThroughFunction) {
        self.fixed.has_pci = true;
        self.own_functions.get_mut().add(number, function);
    }

    /// Creates vCPU `index`, once.
    pub fn cpu(&self, index: usize) -> VcpuLoop {
        VcpuLoop::new(index.min(self.fixed.vcpus - 1), self.fixed.width)
    }

    /// Devices in slots.
    pub fn functions(&self) -> &P {
        &self.functions
    }

    /// Runs a vCPU until the host is needed. `host`: services for the thread of this vCPU.
    pub fn run<V: Arm64Vcpu, H: Host>(
        &self,
        cpu: &mut VcpuLoop,
        vcpu: &mut V,
        host: &mut H,
    ) -> StopReason {
        let index = cpu.index();
        cpu.run(vcpu, &mut CpuBus { virt: self, host, cpu: index, needs_service: false })
    }

    /// Notifies the UART of input or of room for output. `caller`: the vCPU whose thread calls
    /// between two runs, if any; it needs no kick.
    pub fn input<H: Host>(&self, caller: Option<&VcpuLoop>, host: &mut H) {
        self.locked(host, caller.map(VcpuLoop::index), |devices, env| {
            devices.with_uart(env, |uart, env| uart.wake(WAKE_INPUT, env));
        });
    }

    /// Returns the vCPU to notify of completions for the device in a slot: that with the interrupt
    /// of its queues, or of its last message. The first one, if the guest has routed it to none.
    pub fn target(&self, slot: usize) -> usize {
        let devices = self.devices.lock();
        let last = devices.messages.get(slot).copied().filter(|&number| number != 0);
        devices.gic.target(last.unwrap_or(layout::device_interrupt(slot, 0))).unwrap_or(0)
    }

    /// Passes the interrupt of device `number` that the guest drives itself to the guest. A level
    /// stays until the guest has ended the interrupt ([`Host::end_pass_through`]). `caller`: as for
    /// [`Virt::input`].
    pub fn pass_through_interrupt<H: Host>(
        &self,
        number: usize,
        is_level: bool,
        caller: Option<&VcpuLoop>,
        host: &mut H,
    ) {
        let interrupt = layout::pass_through_interrupt(number);
        self.locked(host, caller.map(VcpuLoop::index), |devices, _| match is_level {
            true => devices.gic.set_level(interrupt, true),
            false => devices.gic.set_pending(interrupt),
        });
    }

    /// Presses the power button: requests a shutdown of the guest.
    pub fn press_power_button<H: Host>(&self, host: &mut H) {
        self.locked(host, None, |devices, of| {
            devices.with_button(of, |button, env| button.with_device(env, PowerButton::press));
        });
    }

    /// Ends the VM unless it has ended: [`Virt::run`] returns the outcome on every vCPU.
    pub fn end<H: Host>(&self, outcome: Outcome, host: &mut H) {
        self.locked(host, None, |devices, _| {
            devices.effects.end.get_or_insert(outcome);
        });
    }

    /// Outcome, once the VM has ended.
    pub fn outcome(&self) -> Option<Outcome> {
        self.devices.lock().effects.end
    }

    /// Returns the keys of logged messages, to [keep](Virt::keep_logged) for the next board.
    pub fn logged(&self) -> Once {
        self.devices.lock().effects.once.clone()
    }

    /// Continues with the keys of logged messages of a previous board.
    pub fn keep_logged(&self, logged: Once) {
        self.devices.lock().effects.once = logged;
    }

    /// Counters of unsupported guest operations.
    pub fn counters(&self) -> Counters {
        self.devices.lock().effects.counters
    }

    /// Calls `act` under the lock on behalf of vCPU `running`, and then kicks the other vCPUs that
    /// have new events. Returns whether that vCPU has events to service, too.
    fn locked<H: Host, T>(
        &self,
        host: &mut H,
        running: Option<usize>,
        act: impl FnOnce(&mut Devices<CPUS>, (&Fixed<'m>, &mut H)) -> T,
    ) -> (T, bool) {
        let mut devices = self.devices.lock();
        let result = act(&mut devices, (&self.fixed, host));
        let own = running.map_or(0, |cpu| 1 << cpu);
        let vcpus = self.fixed.vcpus;
        let mut waiting = devices.waiting(vcpus);
        let needs_service = waiting & own != 0;
        if waiting & !own == 0 {
            return (result, needs_service);
        }
        let put = devices.put_virqs(waiting & !own, host);
        if put != 0 {
            waiting = devices.waiting(vcpus);
        }
        let kicks = waiting & !own & !devices.kicked;
        devices.kicked |= kicks;
        drop(devices);
        let is_in = |cpus: u32, cpu: usize| cpus & 1 << cpu != 0;
        for cpu in (0..vcpus).filter(|&cpu| is_in(kicks | put, cpu)) {
            if is_in(kicks, cpu) || !host.notify(cpu) {
                host.kick(cpu);
            }
        }
        (result, needs_service)
    }
}

impl<const CPUS: usize> Devices<CPUS> {
    /// CPUs that have something to do: a bit each.
    fn waiting(&self, vcpus: usize) -> u32 {
        let waits = |cpu: usize| {
            self.effects.end.is_some()
                || cpu == 0 && self.is_rearmed
                || matches!(self.power[cpu], Power::Starting(_))
                || matches!(self.power[cpu], Power::Started | Power::On)
                    && (self.stale & 1 << cpu != 0 || self.gic.is_waiting(cpu))
        };
        (0..vcpus).filter(|&cpu| waits(cpu)).map(|cpu| 1 << cpu).sum()
    }

    /// Moves interrupts of these CPUs to their interfaces, while they run, as far as the host can.
    /// Returns the CPUs that have got some: a bit each.
    fn put_virqs<H: Host>(&mut self, cpus: u32, host: &mut H) -> u32 {
        let mut done = 0;
        for cpu in (0..CPUS).filter(|cpu| cpus & 1 << cpu != 0) {
            if self.power[cpu] == Power::On && host.put_virqs(cpu, &mut || self.gic.take_virq(cpu))
            {
                done |= 1 << cpu;
            }
        }
        done
    }

    /// Passes the settings of these CPUs' interrupts on: to the host at once, since it delivers
    /// SGIs, and to their threads when these look. Passes those of doorbells to the host, too.
    fn pass_settings<H: Host>(&mut self, cpus: u32, host: &mut H) {
        self.stale |= cpus;
        for cpu in (0..CPUS).filter(|cpu| cpus & 1 << cpu != 0) {
            host.set_sgis(cpu, self.gic.sgis(cpu));
        }
        host.set_doorbells(&mut |slot| {
            let line = channel::VECTOR_DOORBELL as u8;
            self.gic.edge_virq(0, layout::device_interrupt(slot, line))
        });
    }

    /// Calls the UART, then passes its line to the interrupt controller.
    fn with_uart<H: Host, T>(
        &mut self,
        of: (&Fixed<'_>, &mut H),
        call: impl FnOnce(&mut Pl011, &mut dyn Env) -> T,
    ) -> T {
        let Self { uart, gic, effects, .. } = self;
        with_line((gic, layout::UART_INTERRUPT), effects, of, |env| call(uart, env))
    }

    /// Calls the power button, likewise.
    fn with_button<H: Host, T>(
        &mut self,
        of: (&Fixed<'_>, &mut H),
        call: impl FnOnce(&mut Mmio<PowerButton>, &mut dyn Env) -> T,
    ) -> T {
        let Self { button, gic, effects, .. } = self;
        with_line((gic, layout::BUTTON_INTERRUPT), effects, of, |env| call(button, env))
    }

    fn read<H: Host>(&mut self, chip: Chip, access: Access, of: (&Fixed<'_>, &mut H)) -> u64 {
        match chip {
            Chip::Distributor => self.gic.read_distributor(self.accessing, access),
            Chip::Redistributors => self.gic.read_redistributor(access),
            Chip::Messages => v2m::read(&MESSAGES, access),
            Chip::Uart => self.with_uart(of, |uart, env| uart.read(access, env)),
            Chip::Button => self.with_button(of, |button, env| button.read(access, env)),
            Chip::Clock => {
                let (fixed, host) = of;
                let effects = &mut self.effects;
                self.clock.read(access, &mut ChipEnv { fixed, effects, host, line: None })
            }
        }
    }

    fn write<H: Host>(&mut self, chip: Chip, access: Access, value: u64, of: (&Fixed<'_>, &mut H)) {
        match chip {
            Chip::Distributor => {
                let cpu = self.accessing;
                self.gic.write_distributor(cpu, access, value);
                self.pass_settings(self.gic.changed_by_distributor(cpu, access), of.1);
            }
            Chip::Redistributors => {
                self.gic.write_redistributor(access, value);
                self.pass_settings(self.gic.changed_by_redistributor(access), of.1);
            }
            Chip::Messages => {
                if let Some(number) = v2m::interrupt(&MESSAGES, access, value) {
                    self.gic.set_pending(number);
                }
            }
            Chip::Uart => self.with_uart(of, |uart, env| uart.write(access, value, env)),
            Chip::Button => self.with_button(of, |button, env| button.write(access, value, env)),
            Chip::Clock => {
                let (fixed, host) = of;
                let effects = &mut self.effects;
                self.clock.write(access, value, &mut ChipEnv { fixed, effects, host, line: None });
            }
        }
    }
}

/// The board as seen by one vCPU while it runs.
struct CpuBus<'a, 'm, H, R, const CPUS: usize, P> {
    virt: &'a Virt<'m, R, CPUS, P>,
    host: &'a mut H,
    cpu: usize,
    /// This CPU has events to service. Events from other threads come with a kick.
    needs_service: bool,
}

impl<'m, H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions<dyn VirtDevice>>
    CpuBus<'_, 'm, H, R, CPUS, P>
{
    fn locked<T>(&mut self, act: impl FnOnce(&mut Devices<CPUS>, (&Fixed<'m>, &mut H)) -> T) -> T {
        let (result, needs_service) = self.virt.locked(self.host, Some(self.cpu), act);
        self.needs_service |= needs_service;
        result
    }

    /// Index of the vCPU with this affinity.
    fn index(&self, affinity: u64) -> Option<usize> {
        usize::try_from(affinity).ok().filter(|&index| index < self.virt.fixed.vcpus)
    }
}

impl<H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions<dyn VirtDevice>>
    CpuBus<'_, '_, H, R, CPUS, P>
{
    /// Reads a register of the board's own devices.
    #[inline(always)]
    fn read_chip(&mut self, chip: Chip, offset: u64, size: u8) -> u64 {
        let access = Access::new(offset, size);
        if !offset.is_multiple_of(size.into()) {
            return 0;
        }
        let mut devices = self.virt.devices.lock();
        devices.effects.has_line = false;
        devices.accessing = self.cpu;
        let value = devices.read(chip, access, (&self.virt.fixed, &mut *self.host));
        let has_line = devices.effects.has_line;
        drop(devices);
        if has_line {
            // Reads have no other effects that concern a vCPU.
            self.locked(|_, _| {});
        }
        value
    }
}

impl<H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions<dyn VirtDevice>> Platform
    for CpuBus<'_, '_, H, R, CPUS, P>
{
    type Interrupts = Interrupts;

    fn memory(&self) -> &GuestMemory {
        self.virt.fixed.memory
    }

    fn clock(&self) -> &CounterClock {
        &self.virt.fixed.clock
    }

    fn counter(&self) -> u64 {
        self.host.counter()
    }

    fn start_unix(&self) -> Duration {
        self.virt.fixed.start_unix
    }

    fn mmio_read(&mut self, _: usize, address: u64, size: u8) -> u64 {
        match chip_at(address) {
            Some((chip, offset)) => self.read_chip(chip, offset, size),
            None => self.read_slot(address, size),
        }
    }

    fn mmio_write(&mut self, _: usize, address: u64, size: u8, value: u64) {
        let Some((chip, offset)) = chip_at(address) else {
            return self.write_slot(address, size, value);
        };
        let access = Access::new(offset, size);
        if offset.is_multiple_of(size.into()) {
            let cpu = self.cpu;
            self.locked(|devices, of| {
                devices.accessing = cpu;
                devices.write(chip, access, value, of);
            });
        }
    }

    fn needs_service(&self, _: usize) -> bool {
        self.needs_service
    }

    fn service_timers(&mut self, cpu: usize) -> Signals<Interrupts> {
        if cpu == 0 {
            self.service_slots();
        }
        let signals = self.locked(|devices, (_, host)| {
            devices.kicked &= !(1 << cpu);
            let start = match devices.power[cpu] {
                Power::Starting(request) => {
                    devices.power[cpu] = Power::Started;
                    devices.pass_settings(1 << cpu, host);
                    Some(request)
                }
                _ => None,
            };
            devices.stale &= !(1 << cpu);
            let interrupts = Interrupts { start, timer: devices.gic.timer_virq(cpu) };
            let deadline = if cpu == 0 { devices.take_deadline() } else { NEVER };
            Signals { end: devices.effects.end, deadline, interrupts }
        });
        self.needs_service = false;
        signals
    }
}

impl<H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions<dyn VirtDevice>> Arm64Platform
    for CpuBus<'_, '_, H, R, CPUS, P>
{
    fn send(&mut self, cpu: usize, interrupt: SoftwareInterrupt) {
        self.locked(|devices, _| devices.gic.send(cpu, interrupt));
    }

    fn put_virqs<V: Arm64Vcpu>(&mut self, cpu: usize, vcpu: &mut V) -> bool {
        self.locked(|devices, _| {
            if devices.power[cpu] == Power::Started {
                devices.power[cpu] = Power::On;
            }
            while vcpu.has_room()
                && let Some(virq) = devices.gic.take_virq(cpu)
            {
                vcpu.put_virq(virq);
            }
            !devices.gic.is_waiting(cpu)
        })
    }

    fn end_virq(&mut self, cpu: usize, number: u32) {
        let device = layout::pass_through_number(number);
        self.locked(|devices, _| {
            if device.is_some() {
                devices.gic.set_level(number, false);
            }
            devices.gic.end_virq(cpu, number);
        });
        if let Some(device) = device {
            self.host.end_pass_through(device);
        }
    }

    fn start(&mut self, affinity: u64, request: StartRequest) -> i64 {
        let Some(index) = self.index(affinity) else { return psci::INVALID_PARAMETERS };
        // One byte: with AArch32 the address is not aligned.
        if !self.virt.fixed.memory.contains(request.entry, 1) {
            return psci::INVALID_ADDRESS;
        }
        self.locked(|devices, _| match devices.power[index].state() {
            PowerState::On => psci::ALREADY_ON,
            PowerState::OnPending => psci::ON_PENDING,
            PowerState::Off => {
                devices.power[index] = Power::Starting(request);
                psci::SUCCESS
            }
        })
    }

    fn stopped(&mut self, cpu: usize) {
        self.locked(|devices, _| {
            devices.power[cpu] = Power::Off;
            devices.gic.release(cpu);
        });
    }

    fn power_state(&mut self, affinity: u64) -> Option<PowerState> {
        let index = self.index(affinity)?;
        Some(self.locked(|devices, _| devices.power[index].state()))
    }

    fn end(&mut self, outcome: Outcome) {
        self.locked(|devices, _| {
            devices.effects.end.get_or_insert(outcome);
        });
    }

    #[inline(always)]
    fn read_device(&mut self, _: usize, address: u64, size: u8) -> Option<u64> {
        match chip_at(address) {
            Some((chip, offset)) => Some(self.read_chip(chip, offset, size)),
            None => self.has_slot(address).then(|| self.read_slot(address, size)),
        }
    }

    fn has_device(&self, address: u64) -> bool {
        chip_at(address).is_some() || self.has_slot(address)
    }

    fn stolen_time_record(&self, cpu: usize) -> Option<u64> {
        let memory = self.virt.fixed.memory;
        let ram = memory.ranges().next()?;
        (ram.1 > layout::STOLEN_TIME_LENGTH).then(|| layout::stolen_time_record(ram, cpu))
    }

    #[cold]
    fn unknown(&mut self, what: Unknown) {
        self.locked(|devices, (_, host)| {
            let Effects { counters, once, .. } = &mut devices.effects;
            let (counter, key) = match what {
                Unknown::SystemRegister(register) => {
                    (&mut counters.unknown_registers, 1 << 56 | u64::from(register))
                }
                Unknown::Coprocessor(register) => {
                    (&mut counters.unknown_registers, 5 << 56 | u64::from(register))
                }
                Unknown::Instruction(address) => {
                    (&mut counters.unknown_memory, 2 << 56 | address & ((1 << 56) - 1))
                }
                Unknown::Call(number) => (&mut counters.other, 3 << 56 | number),
                Unknown::Exit(syndrome) => (&mut counters.other, 4 << 56 | syndrome),
            };
            *counter += 1;
            once.log(host, Level::Info, key, format_args!("{}", Text(what)));
        });
    }
}

#[cfg(test)]
mod tests;
