//! The board `pc`: devices of a PC, with or without PCI, at the addresses of [`layout`].
//!
//! vCPUs run concurrently, each in a thread of the host. They share constant state ([`Fixed`])
//! without a lock; one lock protects devices and router and is held while a device works, never
//! while the guest runs. A thread that creates an event for another CPU kicks it: a kick before
//! that CPU enters the guest or waits is not lost ([`Host::kick`]), and the CPU services all its
//! events after each kick, so its flag for pending events ([`CpuBus::needs_service`]) need not be
//! shared.

use hw_x86::cpuid::leaf;
use vmm_bus::{Access, Device, Map, Piece, Region, WAKE_CHANGE, WAKE_INPUT};
use vmm_vcpu::{CounterClock, MAX_VCPUS, MemoryFault, Outcome, Platform, Signals, StopReason};
use vmm_x86::apic::InterruptMessage;
use vmm_x86::apic::io::{self, IoApic};
use vmm_x86::apic::local::{self, Config, LocalApic, Mode};
use vmm_x86::cpuid::{CpuidConfig, CpuidTable, Values};
use vmm_x86::platform::Emulated;
use vmm_x86::pv::ApicIds;

use spin::mutex::SpinMutex;
use spin::relax::{RelaxStrategy, Spin};
use vmm_dev::pc::debugexit::DebugExit;
use vmm_dev::pc::kbd::Keyboard;
use vmm_dev::pc::pic::PicPair;
use vmm_dev::pc::pit::Pit;
use vmm_dev::pc::pm::{self, AcpiPm};
use vmm_dev::pc::port92::Port92;
use vmm_dev::pc::post::PostPort;
use vmm_dev::pc::pvpanic::PvPanic;
use vmm_dev::pc::reset::ResetPort;
use vmm_dev::pc::rtc::{self, Rtc};
use vmm_dev::pc::uart::Uart;
use vmm_dev::pci::{self, Bridge, ConfigAddress, ConfigTarget, Function};
use vmm_emu::{Devices, Done, Stop};
use vmm_mem::GuestMemory;
use vmm_x86::{
    Acknowledged, Cpu, Interrupts, IoExit, PcPlatform, PendingInterrupt, Unknown, X86Vcpu,
};

use crate::functions::Functions;
use crate::hypercalls;
pub use crate::interrupts::Counters;
use crate::interrupts::{CHIPS, Chip, ChipEnv, FUNCTIONS, FunctionEnv, InterruptRouter};
use crate::layout;
use crate::once::Once;
use crate::{Host, Level, PcConfig};

/// Number of port ranges.
const PORT_RANGES: usize = 17;
const FOUR_GIB: u64 = 1 << 32;

/// A board with room for `CPUS` vCPUs, at most [`MAX_VCPUS`]. vCPU threads wait for the lock with
/// strategy `R`. `P` holds the functions on the PCI bus; `()`: no PCI.
pub struct Pc<'m, R = Spin, const CPUS: usize = MAX_VCPUS, P = ()> {
    fixed: Fixed<'m>,
    machine: SpinMutex<Machine<CPUS, P>, R>,
}

/// Constant state of a running VM.
struct Fixed<'m> {
    memory: &'m GuestMemory,
    cpuid: CpuidTable,
    clock: CounterClock,
    start_unix: u64,
    vcpus: usize,
    physical_bits: u32,
    id: u32,
    maps: Maps,
}

/// Devices and their router.
struct Machine<const CPUS: usize, P> {
    chips: Chips,
    apics: [LocalApic; CPUS],
    /// An I/O APIC input in mode ExtINT requests an interrupt acknowledge cycle with the 8259.
    ext_int: u32,
    /// The 8259's output at the last propagation.
    intr: bool,
    nmi: u32,
    init: u32,
    startup: [Option<u8>; CPUS],
    router: InterruptRouter,
    pci: Bus<P>,
}

/// The PCI bus.
struct Bus<P> {
    address: ConfigAddress,
    bridge: Bridge,
    functions: P,
}

/// Address maps.
struct Maps {
    ports: Map<PORT_RANGES>,
    io_apic: Map<1>,
    /// The page of a local APIC, independent of its current address.
    local_apic: Map<1>,
}

struct Chips {
    uart: Uart,
    pic: PicPair,
    pit: Pit,
    rtc: Rtc,
    pm: AcpiPm,
    keyboard: Keyboard,
    port92: Port92,
    post: PostPort,
    pvpanic: PvPanic,
    debug_exit: DebugExit,
    reset: ResetPort,
    io_apic: IoApic,
}

impl Chips {
    fn get(&mut self, chip: Chip) -> Option<&mut dyn Device> {
        Some(match chip {
            Chip::Uart => &mut self.uart,
            Chip::Pic => &mut self.pic,
            Chip::Pit => &mut self.pit,
            Chip::Rtc => &mut self.rtc,
            Chip::Pm => &mut self.pm,
            Chip::Keyboard => &mut self.keyboard,
            Chip::Port92 => &mut self.port92,
            Chip::Post => &mut self.post,
            Chip::PvPanic => &mut self.pvpanic,
            Chip::DebugExit => &mut self.debug_exit,
            Chip::Reset => &mut self.reset,
            Chip::IoApic => &mut self.io_apic,
            Chip::LocalApic => return None,
        })
    }
}

/// Map of the ports.
fn ports() -> Map<PORT_RANGES> {
    use layout::*;
    let at = |port: u16, length, chip: Chip| Region::bytes(port.into(), length, chip as u16);
    let regions = [
        at(PIC_MASTER, 2, Chip::Pic),
        at(PIC_SLAVE, 2, Chip::Pic).at(2),
        at(ELCR, 2, Chip::Pic).at(4),
        at(PIT, 4, Chip::Pit),
        at(PORT_B, 1, Chip::Pit).at(4),
        at(KEYBOARD_DATA, 1, Chip::Keyboard),
        at(KEYBOARD_STATUS, 1, Chip::Keyboard).at(1),
        at(RTC, 2, Chip::Rtc),
        at(POST, 1, Chip::Post),
        at(PORT_92, 1, Chip::Port92),
        at(SERIAL, 8, Chip::Uart),
        at(DEBUG_EXIT, 1, Chip::DebugExit),
        at(PVPANIC, 1, Chip::PvPanic),
        at(PM, pm::spec::LEN, Chip::Pm).widths(1, 4),
        at(RESET, 1, Chip::Reset),
    ];
    let mut map = Map::new();
    for region in regions {
        // A test verifies that the table has no overlap.
        let _ = map.insert(region);
    }
    map
}

fn page_of_words(base: u64, length: u64, chip: Chip) -> Map<1> {
    let mut map = Map::new();
    let _ = map.insert(Region::words(base, length, chip as u16));
    map
}

impl<'m, R: RelaxStrategy, const CPUS: usize> Pc<'m, R, CPUS> {
    /// Creates a board without PCI; see [`Pc::with_functions`].
    #[inline]
    pub fn new(
        config: PcConfig,
        memory: &'m GuestMemory,
        host_cpuid: impl Fn(u32, u32) -> Values,
    ) -> Self {
        Self::with_functions(config, memory, host_cpuid, ())
    }
}

impl<'m, R: RelaxStrategy, const CPUS: usize, P: Functions> Pc<'m, R, CPUS, P> {
    /// Creates a board in its power-on state; the caller has filled guest memory. `host_cpuid`
    /// returns the host's `CPUID` results for a leaf and a subleaf; `functions` are on the PCI bus.
    // Not inlined: its stack is free again while the VM runs.
    #[inline(never)]
    pub fn with_functions(
        config: PcConfig,
        memory: &'m GuestMemory,
        host_cpuid: impl Fn(u32, u32) -> Values,
        mut functions: P,
    ) -> Self {
        functions.power_on();
        const { assert!(CPUS >= 1 && CPUS <= MAX_VCPUS) };
        let vcpus = usize::from(config.vcpus).clamp(1, CPUS);
        let tsc_khz = u32::try_from(config.clock.khz()).unwrap_or(u32::MAX);
        let cpuid = CpuidConfig {
            vcpus: vcpus as u8,
            xcr0_mask: config.xcr0_mask,
            tsc_khz,
            apic_khz: (local::spec::BUS_HZ / 1000) as u32,
            kvmclock: config.kvmclock,
            steal_time: config.steal_time,
            pv_flush: config.pv_flush,
            pv_ipi: config.pv_ipi,
        };
        let cpuid = CpuidTable::new(&cpuid, host_cpuid);
        let physical_bits = (cpuid.lookup(leaf::SIZES, 0).0[0] & 0xff).clamp(36, 52);
        let apic = |index| {
            let mut apic = LocalApic::new(Config {
                id: index as u32,
                bsp: index == 0,
                tsc_khz,
                tsc_at_zero: 0,
                physical_bits: physical_bits as u8,
            });
            if index == 0 {
                apic.virtual_wire();
            }
            apic
        };
        let below = |&(base, _): &(u64, u64)| base < FOUR_GIB;
        let rtc = rtc::Config {
            unix_seconds_at_zero: i64::try_from(config.start_unix).unwrap_or(i64::MAX),
            low_memory: memory.ranges().filter(below).map(|range| range.1).sum(),
            high_memory: memory.ranges().filter(|range| !below(range)).map(|range| range.1).sum(),
        };
        let machine = || Machine {
            chips: Chips {
                uart: Uart::new(),
                pic: PicPair::new(),
                pit: Pit::new(),
                rtc: Rtc::new(rtc),
                pm: AcpiPm::new(),
                keyboard: Keyboard::new(),
                port92: Port92::new(),
                post: PostPort::new(),
                pvpanic: PvPanic::new(),
                debug_exit: DebugExit::new(),
                reset: ResetPort::new(),
                io_apic: IoApic::new(layout::IO_APIC_ID),
            },
            apics: core::array::from_fn(apic),
            ext_int: 0,
            intr: false,
            nmi: 0,
            init: 0,
            startup: [None; CPUS],
            router: InterruptRouter::new(config.clock, *memory),
            pci: Bus { address: ConfigAddress::default(), bridge: Bridge::new(), functions },
        };
        // Built in place: both are large, and stacks are small.
        let fixed = |cpuid| Fixed {
            memory,
            cpuid,
            clock: config.clock,
            start_unix: config.start_unix,
            vcpus,
            physical_bits,
            id: config.id,
            maps: Maps {
                ports: ports(),
                io_apic: page_of_words(layout::IO_APIC, io::spec::LEN, Chip::IoApic),
                local_apic: page_of_words(0, local::spec::LEN, Chip::LocalApic),
            },
        };
        Self { fixed: fixed(cpuid), machine: SpinMutex::new(machine()) }
    }

    /// `CPUID` table, for hosts that handle `CPUID` themselves.
    pub fn cpuid(&self) -> &CpuidTable {
        &self.fixed.cpuid
    }

    /// Creates vCPU `index` in its power-on state, once: CPU 0 runs, other CPUs wait for a start-up
    /// IPI.
    pub fn cpu(&self, index: usize) -> Cpu {
        Cpu::new(index.min(self.fixed.vcpus - 1), self.fixed.physical_bits)
    }

    /// Runs a vCPU until the host is needed. `host`: services for the thread of this vCPU.
    pub fn run<V: X86Vcpu, H: Host>(
        &self,
        cpu: &mut Cpu,
        vcpu: &mut V,
        host: &mut H,
    ) -> StopReason {
        let mut bus = CpuBus { pc: self, host, cpu: cpu.index(), needs_service: false };
        cpu.run(vcpu, &mut bus)
    }

    /// Notifies the serial line of input or of room for output. `caller`: the vCPU whose thread
    /// calls between two runs, if any; it needs no kick. The same holds for
    /// [`Self::function_input`] and [`Self::function_change`].
    pub fn input<H: Host>(&self, caller: Option<&Cpu>, host: &mut H) {
        self.locked(host, caller.map_or(CPUS, Cpu::index), |board| {
            board.with_chip(Chip::Uart, |chip, env| chip.wake(WAKE_INPUT, env));
        });
    }

    /// Notifies the PCI function in `slot` of input or completions of its back end.
    pub fn function_input<H: Host>(&self, slot: usize, caller: Option<&Cpu>, host: &mut H) {
        self.locked(host, caller.map_or(CPUS, Cpu::index), |board| {
            board.with_function(slot, |function, env| function.wake(WAKE_INPUT, env));
        });
    }

    /// Notifies the PCI function in `slot` that the properties of its back end have changed.
    pub fn function_change<H: Host>(&self, slot: usize, caller: Option<&Cpu>, host: &mut H) {
        self.locked(host, caller.map_or(CPUS, Cpu::index), |board| {
            board.with_function(slot, |function, env| function.wake(WAKE_CHANGE, env));
        });
    }

    /// Calls `act` with the functions on the PCI bus, under the lock.
    pub fn functions<T>(&self, act: impl FnOnce(&mut P) -> T) -> T {
        act(&mut self.machine.lock().pci.functions)
    }

    /// Presses the power button: requests a shutdown of the guest.
    pub fn press_power_button<H: Host>(&self, host: &mut H) {
        self.locked(host, CPUS, |board| {
            let Machine { chips, router, .. } = &mut *board.machine;
            let mut env = ChipEnv { router, host: &mut *board.host, chip: Chip::Pm as usize };
            chips.pm.press_power_button(&mut env);
            board.propagate();
        });
    }

    /// Ends the VM unless it has ended: [`Pc::run`] returns the outcome on every vCPU.
    pub fn end<H: Host>(&self, outcome: Outcome, host: &mut H) {
        self.locked(host, CPUS, |board| board.machine.router.end(outcome));
    }

    /// Outcome, once the VM has ended.
    pub fn outcome(&self) -> Option<Outcome> {
        self.machine.lock().router.end
    }

    /// Counters of unsupported guest operations.
    pub fn counters(&self) -> Counters {
        self.machine.lock().router.counters
    }

    /// Keys of the messages logged so far, for the board of the guest's next boot.
    pub fn logged(&self) -> Once {
        self.machine.lock().router.once.clone()
    }

    /// Takes over the keys of messages that earlier boots have logged: none is logged again.
    pub fn keep_logged(&self, logged: Once) {
        self.machine.lock().router.once = logged;
    }

    /// Calls `act` under the lock on behalf of vCPU `running` ([`CPUS`](Self): none), and then
    /// kicks the CPUs with new events.
    #[inline]
    fn locked<H: Host, T>(
        &self,
        host: &mut H,
        running: usize,
        act: impl FnOnce(&mut PcBoard<'_, 'm, H, CPUS, P>) -> T,
    ) -> T {
        let mut machine = self.machine.lock();
        let mut board = PcBoard { fixed: &self.fixed, machine: &mut machine, host: &mut *host };
        let result = act(&mut board);
        let others = board.machine.router.take_kicks() & !(1 << running);
        // A kicked CPU may run before this thread continues, and takes the lock.
        drop(machine);
        if others != 0 {
            self.kick(others, host);
        }
        result
    }

    #[cold]
    fn kick<H: Host>(&self, others: u32, host: &mut H) {
        for cpu in (0..self.fixed.vcpus).filter(|cpu| others & 1 << cpu != 0) {
            host.kick(cpu);
        }
    }
}

/// Devices and host services, while the lock is held.
struct PcBoard<'a, 'm, H, const CPUS: usize, P> {
    fixed: &'a Fixed<'m>,
    machine: &'a mut Machine<CPUS, P>,
    host: &'a mut H,
}

impl<H: Host, const CPUS: usize, P: Functions> PcBoard<'_, '_, H, CPUS, P> {
    /// Calls a device, then propagates its effects.
    #[inline]
    fn with_chip<R>(
        &mut self,
        chip: Chip,
        call: impl FnOnce(&mut dyn Device, &mut ChipEnv<'_, H>) -> R,
    ) -> Option<R> {
        let Machine { chips, router, .. } = &mut *self.machine;
        let mut env = ChipEnv { router, host: &mut *self.host, chip: chip as usize };
        let result = call(chips.get(chip)?, &mut env);
        if self.machine.router.has_pending() || chip == Chip::Pic {
            self.propagate();
        }
        Some(result)
    }

    /// Calls a local APIC, then propagates its effects.
    fn with_apic<R>(
        &mut self,
        cpu: usize,
        call: impl FnOnce(&mut LocalApic, &mut ChipEnv<'_, H>) -> R,
    ) -> R {
        let Machine { apics, router, .. } = &mut *self.machine;
        let mut env = ChipEnv { router, host: &mut *self.host, chip: CHIPS.len() + cpu };
        let result = call(&mut apics[cpu], &mut env);
        if let Some(message) = self.machine.apics[cpu].take_message() {
            // The APIC has delivered the message to itself already.
            self.deliver(message, Some(cpu));
        }
        if self.machine.apics[cpu].has_events() || self.machine.router.has_pending() {
            self.propagate();
        }
        if self.interrupt_waits(cpu) {
            self.machine.router.needs_service |= 1 << cpu;
        }
        result
    }

    /// Calls a PCI function, then propagates its effects.
    fn with_function<T>(
        &mut self,
        slot: usize,
        call: impl FnOnce(&mut dyn Function, &mut FunctionEnv<'_, H>) -> T,
    ) -> Option<T> {
        let Machine { pci, router, .. } = &mut *self.machine;
        let chip = ChipEnv { router, host: &mut *self.host, chip: FUNCTIONS + slot };
        let (function, backend) = pci.functions.get(slot)?;
        let result = call(function, &mut FunctionEnv { chip, backend });
        // Common case: no other effects.
        self.deliver_all();
        if self.machine.router.has_pending() {
            self.propagate();
        }
        Some(result)
    }

    /// Slot of the function with a window at `address`, and the offset in the window.
    fn function_at(&mut self, address: u64) -> Option<(usize, u64)> {
        let functions = &mut self.machine.pci.functions;
        (0..functions.slots()).find_map(|slot| {
            let (base, length) = functions.get(slot)?.0.window()?;
            let offset = address.wrapping_sub(base);
            (offset < length).then_some((slot, offset))
        })
    }

    /// Reads from configuration space.
    fn config_read(&mut self, target: Option<ConfigTarget>, size: u8) -> u64 {
        let open_bus = Access::new(0, size).open_bus();
        let Some(target) = target else { return open_bus };
        match usize::from(target.device).checked_sub(1) {
            Some(slot) => {
                let read =
                    self.with_function(slot, |function, env| target.read(Some(function), env));
                read.unwrap_or(open_bus)
            }
            None => {
                let Machine { pci, router, .. } = &mut *self.machine;
                let mut env = ChipEnv { router, host: &mut *self.host, chip: FUNCTIONS };
                target.read(Some(&mut pci.bridge), &mut env)
            }
        }
    }

    /// Writes to configuration space.
    fn config_write(&mut self, target: Option<ConfigTarget>, value: u64) {
        let Some(target) = target else { return };
        match usize::from(target.device).checked_sub(1) {
            Some(slot) => {
                self.with_function(slot, |function, env| target.write(value, Some(function), env));
            }
            None => {
                let Machine { pci, router, .. } = &mut *self.machine;
                let mut env = ChipEnv { router, host: &mut *self.host, chip: FUNCTIONS };
                target.write(value, Some(&mut pci.bridge), &mut env);
            }
        }
    }

    /// Decodes an access to the PCI configuration ports, if it is one.
    #[inline]
    fn config_port(&self, port: u16, size: u8) -> Option<ConfigPort> {
        let offset = port.wrapping_sub(layout::PCI_ADDRESS);
        if offset >= 8 || self.machine.pci.functions.slots() == 0 {
            return None;
        }
        match offset {
            0 if size == 4 => Some(ConfigPort::Address),
            4.. if offset + u16::from(size) <= 8 => {
                let target = self.machine.pci.address.target(u64::from(offset) - 4, size);
                Some(ConfigPort::Data(target))
            }
            _ => None,
        }
    }

    /// True if the address belongs to the PCI of the board, if it has PCI.
    fn in_pci(&self, address: u64) -> bool {
        let end = u64::from(layout::ECAM) + pci::spec::ECAM_LEN;
        (layout::PCI_WINDOW.into()..end).contains(&address)
            && self.machine.pci.functions.slots() != 0
    }

    /// Reads an address of PCI; `None` for other addresses or without PCI.
    fn pci_read(&mut self, address: u64, size: u8) -> Option<u64> {
        self.in_pci(address).then(|| {
            let mut value = 0;
            for part in parts(address, size) {
                let access = Access::new(part.address, part.size);
                let config = part.address.wrapping_sub(layout::ECAM.into());
                let read = if config < pci::spec::ECAM_LEN {
                    self.config_read(pci::ecam(config, part.size), part.size)
                } else if let Some((slot, offset)) = self.function_at(part.address) {
                    let access = Access::new(offset, part.size);
                    self.with_function(slot, |function, env| function.read(access, env))
                        .unwrap_or(access.open_bus())
                } else {
                    self.no_window(part.address);
                    access.open_bus()
                };
                value |= (read & access.open_bus()) << part.shift;
            }
            value
        })
    }

    /// Writes an address of PCI; `false` for other addresses or without PCI.
    fn pci_write(&mut self, address: u64, size: u8, value: u64) -> bool {
        if !self.in_pci(address) {
            return false;
        }
        for part in parts(address, size) {
            let value = value >> part.shift & Access::new(0, part.size).open_bus();
            let config = part.address.wrapping_sub(layout::ECAM.into());
            if config < pci::spec::ECAM_LEN {
                self.config_write(pci::ecam(config, part.size), value);
            } else if let Some((slot, offset)) = self.function_at(part.address) {
                let access = Access::new(offset, part.size);
                self.with_function(slot, |function, env| function.write(access, value, env));
            } else {
                self.no_window(part.address);
            }
        }
        true
    }

    /// Reports an address of PCI without a device.
    #[cold]
    fn no_window(&mut self, address: u64) {
        let functions = &mut self.machine.pci.functions;
        let absent = (0..functions.slots()).any(|slot| {
            functions.get(slot).is_some_and(|(function, _)| function.is_memory(address))
        });
        if !absent {
            self.unknown_memory(address);
        }
    }

    /// Propagates all recorded effects. Terminates: a line change or a message makes no line
    /// change, and only an EOI makes messages.
    fn propagate(&mut self) {
        loop {
            if let Some((irq, pulse, level)) = self.machine.router.take_change() {
                for level in pulse.into_iter().chain([level]) {
                    self.set_irq(irq, level);
                }
            } else if let Some(message) = self.machine.router.take_message() {
                self.deliver(message, None);
            } else if !self.take_apic_events() {
                break;
            }
        }
        self.update_intr();
    }

    fn set_irq(&mut self, irq: u8, level: bool) {
        let Machine { chips, router, .. } = &mut *self.machine;
        chips.pic.set_irq(irq, level);
        if let Some(pin) = layout::gsi(irq) {
            let mut env = ChipEnv { router, host: &mut *self.host, chip: Chip::IoApic as usize };
            chips.io_apic.set_irq(pin, level, &mut env);
        }
    }

    /// Connects the 8259's output to LINT0 of every local APIC.
    fn update_intr(&mut self) {
        let level = self.machine.chips.pic.intr();
        if level == self.machine.intr {
            return;
        }
        self.machine.intr = level;
        for cpu in 0..self.fixed.vcpus {
            self.machine.apics[cpu].set_lint(0, level);
            // A pin in another mode than ExtINT may have turned the edge into an event.
            self.take_events_of(cpu);
            if self.interrupt_waits(cpu) {
                self.request_service(cpu);
            }
        }
    }

    /// Delivers all messages of devices to their local APICs.
    #[inline]
    fn deliver_all(&mut self) {
        while let Some(message) = self.machine.router.take_message() {
            self.deliver(message, None);
        }
    }

    /// Delivers a message to its local APICs, except the sender.
    fn deliver(&mut self, message: InterruptMessage, sender: Option<usize>) {
        if message.delivery == local::spec::LOWEST {
            return self.deliver_lowest(message, sender);
        }
        for cpu in 0..self.fixed.vcpus {
            if Some(cpu) != sender && self.machine.apics[cpu].matches(&message) {
                self.deliver_to(cpu, &message);
            }
        }
    }

    /// Delivers a message to the destination of lowest priority.
    #[cold]
    fn deliver_lowest(&mut self, message: InterruptMessage, sender: Option<usize>) {
        let apics = &self.machine.apics;
        let lowest = (0..self.fixed.vcpus)
            .filter(|&cpu| Some(cpu) != sender && apics[cpu].matches(&message))
            .min_by_key(|&cpu| apics[cpu].ppr());
        if let Some(cpu) = lowest {
            self.deliver_to(cpu, &message);
        }
    }

    /// Delivers a message to the local APICs with these ids, including the sender's; returns their
    /// number.
    fn multicast(&mut self, to: ApicIds, message: &InterruptMessage) -> u32 {
        let mut count = 0;
        for cpu in 0..self.fixed.vcpus {
            if to.contains(self.machine.apics[cpu].id()) {
                count += 1;
                self.deliver_to(cpu, message);
            }
        }
        count
    }

    fn deliver_to(&mut self, cpu: usize, message: &InterruptMessage) {
        if self.machine.apics[cpu].deliver(message) {
            self.take_events_of(cpu);
            self.request_service(cpu);
        }
    }

    /// Requests that the CPU services its pending events.
    fn request_service(&mut self, cpu: usize) {
        self.machine.router.needs_service |= 1 << cpu;
    }

    /// Takes the events of local APICs for the board; true if there was any.
    fn take_apic_events(&mut self) -> bool {
        let mut any = false;
        for cpu in 0..self.fixed.vcpus {
            any |= self.take_events_of(cpu);
        }
        any
    }

    #[inline]
    fn take_events_of(&mut self, cpu: usize) -> bool {
        let any = self.machine.apics[cpu].has_events();
        if any {
            self.take_known_events_of(cpu);
        }
        any
    }

    #[inline(never)]
    fn take_known_events_of(&mut self, cpu: usize) {
        let machine = &mut *self.machine;
        let events = machine.apics[cpu].take_events();
        let bit = 1 << cpu;
        if events.nmi {
            machine.nmi |= bit;
        }
        if events.init {
            machine.init |= bit;
            machine.startup[cpu] = None;
        }
        if events.startup.is_some() {
            machine.startup[cpu] = events.startup;
        }
        if events.ext_int {
            machine.ext_int |= bit;
        }
        if let Some(vector) = events.eoi {
            let Machine { chips, router, .. } = machine;
            let mut env = ChipEnv { router, host: &mut *self.host, chip: Chip::IoApic as usize };
            chips.io_apic.eoi(vector, &mut env);
        }
        if events.smi {
            self.machine.router.counters.other += 1;
        }
        let alerts = events.nmi || events.init || events.ext_int || events.priority;
        if alerts || events.startup.is_some() {
            self.request_service(cpu);
        }
    }

    /// True if the 8259 has an interrupt for this CPU.
    #[inline]
    fn pic_waits(&self, cpu: usize) -> bool {
        let machine = &*self.machine;
        let asked = machine.ext_int & 1 << cpu != 0;
        machine.intr && (asked || machine.apics[cpu].accepts_pic() && cpu == 0)
    }

    /// True if an interrupt is pending for this CPU, even below the task priority: the CPU may have
    /// a lower task priority that its local APIC does not know yet.
    #[inline]
    fn interrupt_waits(&self, cpu: usize) -> bool {
        self.machine.apics[cpu].has_pending() || self.pic_waits(cpu)
    }

    /// The interrupt pending for this CPU.
    fn waiting(&self, cpu: usize) -> PendingInterrupt {
        let apic = &self.machine.apics[cpu];
        match apic.pending() {
            _ if self.pic_waits(cpu) => PendingInterrupt::Pic,
            Some(vector) => {
                PendingInterrupt::Virq { vector, eoi_elidable: apic.will_eoi_be_elidable(vector) }
            }
            None if apic.is_masked_by_priority() => PendingInterrupt::Masked,
            None => PendingInterrupt::None,
        }
    }

    fn read_piece(&mut self, piece: Piece) -> u64 {
        match piece.device.and_then(|device| CHIPS.get(usize::from(device))) {
            Some(&chip) => self
                .with_chip(chip, |chip, env| chip.read(piece.access, env))
                .unwrap_or(piece.access.open_bus()),
            None => self.unknown_port(piece.access),
        }
    }

    fn write_piece(&mut self, piece: Piece, value: u64) {
        match piece.device.and_then(|device| CHIPS.get(usize::from(device))) {
            Some(&chip) => {
                self.with_chip(chip, |chip, env| chip.write(piece.access, value, env));
            }
            None => {
                self.unknown_port(piece.access);
            }
        }
    }

    #[cold]
    fn unknown_port(&mut self, access: Access) -> u64 {
        self.machine.router.counters.unknown_ports += 1;
        let port = access.offset;
        let text = format_args!("unknown port {port:#x}");
        self.machine.router.log_once(self.host, PROBING, key(1, port), text);
        access.open_bus()
    }

    #[cold]
    fn unknown_memory(&mut self, address: u64) {
        self.machine.router.counters.unknown_memory += 1;
        let page = address & !0xfff;
        let text = format_args!("no memory or device at guest-physical address {address:#x}");
        self.machine.router.log_once(self.host, PROBING, key(2, page), text);
    }

    /// Offset in the page of this CPU's local APIC.
    fn in_local_apic(&self, cpu: usize, address: u64) -> Option<u64> {
        let apic = &self.machine.apics[cpu];
        let offset = address.wrapping_sub(apic.base());
        (apic.mode() == Mode::XApic && offset < local::spec::LEN).then_some(offset)
    }
}

/// Severity of probing: systems detect hardware by accessing absent devices.
const PROBING: Level = Level::Info;

/// Meaning of an access to the PCI configuration ports.
enum ConfigPort {
    Address,
    /// A configuration register; `None` if it does not exist.
    Data(Option<ConfigTarget>),
}

/// A naturally aligned part of an access, of at most four bytes.
struct Part {
    address: u64,
    size: u8,
    /// Position of its bits in the value.
    shift: u32,
}

/// Parts of an access of at most eight bytes.
fn parts(address: u64, size: u8) -> impl Iterator<Item = Part> {
    let size = size.min(8);
    let mut done = 0;
    core::iter::from_fn(move || {
        let left = size - done;
        let at = address.wrapping_add(done.into());
        let fits = |width: &u8| *width <= left && at.is_multiple_of((*width).into());
        let width = [4, 2, 1].into_iter().find(fits)?;
        let shift = 8 * u32::from(done);
        done += width;
        Some(Part { address: at, size: width, shift })
    })
}

/// A key for [`crate::once::Once`]; addresses of texts (kind 0) are below 2^56.
const fn key(kind: u64, what: u64) -> u64 {
    kind << 56 | (what & ((1 << 56) - 1))
}

impl<H: Host, const CPUS: usize, P: Functions> PcBoard<'_, '_, H, CPUS, P> {
    #[inline]
    fn port_in(&mut self, port: u16, size: u8) -> u32 {
        if let Some(place) = self.config_port(port, size) {
            return match place {
                ConfigPort::Address => self.machine.pci.address.get(),
                ConfigPort::Data(target) => self.config_read(target, size) as u32,
            };
        }
        if port == layout::PCI_ADDRESS && size == 4 {
            return self.unknown_port(Access::new(port.into(), size)) as u32;
        }
        let maps = &self.fixed.maps;
        maps.ports.read(port.into(), size, |piece| self.read_piece(piece)) as u32
    }

    #[inline]
    fn port_out(&mut self, port: u16, size: u8, value: u32) {
        if let Some(place) = self.config_port(port, size) {
            match place {
                ConfigPort::Address => self.machine.pci.address.set(value),
                ConfigPort::Data(target) => self.config_write(target, value.into()),
            }
            return;
        }
        if port == layout::PCI_ADDRESS && size == 4 {
            self.unknown_port(Access::new(port.into(), size));
            return;
        }
        let maps = &self.fixed.maps;
        maps.ports.write(port.into(), size, value.into(), |piece, value| {
            self.write_piece(piece, value);
        });
    }

    fn apic_read(&mut self, cpu: usize, msr: u32) -> Option<u64> {
        let value = self.with_apic(cpu, |apic, env| apic.read_msr(msr, env)).ok();
        if value.is_none() {
            self.unknown(Unknown::MsrRead(msr));
        }
        value
    }

    fn apic_write(&mut self, cpu: usize, msr: u32, value: u64) -> Option<()> {
        let done = self.with_apic(cpu, |apic, env| apic.write_msr(msr, value, env)).ok();
        if done.is_none() {
            self.unknown(Unknown::MsrWrite(msr, value));
        }
        done
    }

    fn read_memory(&mut self, cpu: usize, address: u64, size: u8) -> u64 {
        let maps = &self.fixed.maps;
        if let Some(offset) = self.in_local_apic(cpu, address) {
            return maps.local_apic.read(offset, size, |Piece { device, access }| match device {
                Some(_) => self.with_apic(cpu, |apic, env| apic.read(access, env)),
                None => access.open_bus(),
            });
        }
        if let Some(value) = self.pci_read(address, size) {
            return value;
        }
        maps.io_apic.read(address, size, |piece| match piece.device {
            Some(_) => self.read_piece(piece),
            None => {
                self.unknown_memory(piece.access.offset);
                piece.access.open_bus()
            }
        })
    }

    fn write_memory(&mut self, cpu: usize, address: u64, size: u8, value: u64) {
        let maps = &self.fixed.maps;
        if let Some(offset) = self.in_local_apic(cpu, address) {
            maps.local_apic.write(offset, size, value, |Piece { device, access }, value| {
                if device.is_some() {
                    self.with_apic(cpu, |apic, env| apic.write(access, value, env));
                }
            });
            return;
        }
        if self.pci_write(address, size, value) {
            return;
        }
        maps.io_apic.write(address, size, value, |piece, value| match piece.device {
            Some(_) => self.write_piece(piece, value),
            None => self.unknown_memory(piece.access.offset),
        });
    }

    /// Services all due timers and returns the events pending for a CPU.
    fn service_timers(&mut self, cpu: usize) -> Signals<Interrupts> {
        let now = self.fixed.clock.nanos(self.host.counter());
        // Each timer once: one that is due again at once is serviced by the next call.
        let mut start = 0;
        while let Some(timer) = self.machine.router.take_due(start, now) {
            start = timer + 1;
            match CHIPS.get(timer) {
                Some(&chip) => {
                    self.with_chip(chip, |chip, env| chip.wake(0, env));
                }
                None if timer >= FUNCTIONS => {
                    self.with_function(timer - FUNCTIONS, |function, env| function.wake(0, env));
                }
                None => {
                    let owner = timer - CHIPS.len();
                    // Requests service of the owner if the timer creates an event.
                    self.with_apic(owner, |apic, env| apic.wake(0, env));
                }
            }
        }
        let bit = 1 << cpu;
        let init = self.machine.init & bit != 0;
        if init {
            self.with_apic(cpu, |apic, env| apic.init(env));
        }
        let maskable = self.waiting(cpu);
        let machine = &mut *self.machine;
        let offered =
            if let PendingInterrupt::Virq { vector, .. } = maskable { Some(vector) } else { None };
        machine.apics[cpu].set_offered(offered);
        let interrupts = Interrupts {
            nmi: machine.nmi & bit != 0,
            maskable,
            init,
            startup: machine.startup[cpu].take(),
            cr8: machine.apics[cpu].cr8(),
            tpr_low: machine.apics[cpu].tpr() & 0xf != 0,
        };
        machine.nmi &= !bit;
        machine.init &= !bit;
        machine.router.mark_serviced(cpu);
        let deadline = machine.router.deadline(cpu);
        Signals { end: machine.router.end, deadline, interrupts }
    }

    fn acknowledge(&mut self, cpu: usize) -> Option<Acknowledged> {
        if self.pic_waits(cpu) {
            self.machine.ext_int &= !(1 << cpu);
            let vector = self.machine.chips.pic.acknowledge();
            self.update_intr();
            let more = self.machine.apics[cpu].pending().is_some() || self.pic_waits(cpu);
            return Some(Acknowledged { vector, eoi_elidable: false, more });
        }
        let apic = &mut self.machine.apics[cpu];
        let vector = apic.pending()?;
        apic.set_offered(None);
        apic.accept(vector);
        // No other requested interrupt has a higher priority.
        Some(Acknowledged { vector, eoi_elidable: apic.is_eoi_elidable(), more: false })
    }

    #[cold]
    fn unknown(&mut self, what: Unknown) {
        let InterruptRouter { counters, .. } = &mut self.machine.router;
        match what {
            Unknown::MsrRead(_) | Unknown::MsrWrite(..) => counters.unknown_msrs += 1,
            Unknown::Instruction { .. } => counters.unknown_instructions += 1,
            Unknown::Exit(_) | Unknown::Hypercall(_) | Unknown::Other(..) => counters.other += 1,
        }
        let router = &mut self.machine.router;
        let host = &mut *self.host;
        match what {
            Unknown::MsrRead(msr) => {
                let text = format_args!("read of unknown MSR {msr:#x}");
                router.log_once(host, PROBING, key(3, msr.into()), text);
            }
            Unknown::MsrWrite(msr, value) => {
                let text = format_args!("refused write of {value:#x} to MSR {msr:#x}");
                router.log_once(host, PROBING, key(4, msr.into()), text);
            }
            Unknown::Instruction { rip, bytes } => {
                let text = format_args!(
                    "instruction at {rip:#x} not emulated: {:02x?}",
                    bytes.to_le_bytes()
                );
                router.log_once(host, Level::Warning, key(5, bytes), text);
            }
            Unknown::Exit(code) => {
                let text = format_args!("unknown exit {code:#x}");
                router.log_once(host, Level::Warning, key(6, code), text);
            }
            Unknown::Hypercall(number) => {
                let text = format_args!("unknown hypercall {number:#x}");
                router.log_once(host, Level::Warning, key(7, number), text);
            }
            Unknown::Other(text, value) => {
                let address = text.as_ptr().addr() as u64;
                let text = format_args!("{text}: {value:#x}");
                router.log_once(host, Level::Warning, key(0, address), text);
            }
        }
    }
}

/// The board as seen by one vCPU while it runs.
struct CpuBus<'a, 'm, H, R, const CPUS: usize, P> {
    pc: &'a Pc<'m, R, CPUS, P>,
    host: &'a mut H,
    cpu: usize,
    /// This CPU has events to service. Events from other threads come with a kick.
    needs_service: bool,
}

impl<'m, H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions> CpuBus<'_, 'm, H, R, CPUS, P> {
    #[inline]
    fn locked<T>(&mut self, act: impl FnOnce(&mut PcBoard<'_, 'm, H, CPUS, P>) -> T) -> T {
        let bit = 1 << self.cpu;
        let (result, needs_service) = self.pc.locked(self.host, self.cpu, |board| {
            (act(board), board.machine.router.needs_service & bit != 0)
        });
        self.needs_service |= needs_service;
        result
    }

    /// Result of an emulated access.
    fn finish<V: X86Vcpu>(&mut self, vcpu: &mut V, result: Result<Done, Stop>) -> Emulated {
        match result {
            Ok(Done::Next(next)) => Emulated::Next(next),
            Ok(Done::Again) => Emulated::Again,
            Err(Stop::Raise(event)) => Emulated::Raise(event),
            Err(Stop::Unknown(bytes)) => {
                let rip = vcpu.get(vmm_x86::Reg::Rip);
                self.unknown(Unknown::Instruction { rip, bytes });
                Emulated::Unknown
            }
        }
    }
}

impl<H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions> Platform
    for CpuBus<'_, '_, H, R, CPUS, P>
{
    type Interrupts = Interrupts;

    #[inline]
    fn memory(&self) -> &GuestMemory {
        self.pc.fixed.memory
    }

    #[inline]
    fn clock(&self) -> &CounterClock {
        &self.pc.fixed.clock
    }

    #[inline]
    fn counter(&self) -> u64 {
        self.host.counter()
    }

    fn start_unix(&self) -> u64 {
        self.pc.fixed.start_unix
    }

    fn mmio_read(&mut self, cpu: usize, address: u64, size: u8) -> u64 {
        self.locked(|board| board.read_memory(cpu, address, size))
    }

    fn mmio_write(&mut self, cpu: usize, address: u64, size: u8, value: u64) {
        self.locked(|board| board.write_memory(cpu, address, size, value));
    }

    #[inline]
    fn needs_service(&self, _: usize) -> bool {
        self.needs_service
    }

    fn service_timers(&mut self, cpu: usize) -> Signals<Interrupts> {
        self.needs_service = false;
        self.locked(|board| board.service_timers(cpu))
    }
}

impl<H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions> PcPlatform
    for CpuBus<'_, '_, H, R, CPUS, P>
{
    #[inline]
    fn cpuid(&self) -> &CpuidTable {
        &self.pc.fixed.cpuid
    }

    #[inline]
    fn port_in(&mut self, port: u16, size: u8) -> u32 {
        self.locked(|board| board.port_in(port, size))
    }

    #[inline]
    fn port_out(&mut self, port: u16, size: u8, value: u32) {
        self.locked(|board| board.port_out(port, size, value));
    }

    fn apic_read(&mut self, cpu: usize, msr: u32) -> Option<u64> {
        self.locked(|board| board.apic_read(cpu, msr))
    }

    fn apic_write(&mut self, cpu: usize, msr: u32, value: u64) -> Option<()> {
        self.locked(|board| board.apic_write(cpu, msr, value))
    }

    fn cr8(&mut self, cpu: usize) -> u8 {
        self.locked(|board| board.machine.apics[cpu].cr8())
    }

    fn set_cr8(&mut self, cpu: usize, value: u8) {
        self.locked(|board| board.with_apic(cpu, |apic, _| apic.set_cr8(value)));
    }

    fn tsc_written(&mut self, cpu: usize, tsc: u64) {
        self.locked(|board| board.with_apic(cpu, |apic, env| apic.sync_tsc(tsc, env)));
    }

    fn emulate_memory<V: X86Vcpu>(&mut self, _: usize, vcpu: &mut V, _: MemoryFault) -> Emulated {
        let memory = self.pc.fixed.memory;
        let result = vmm_emu::memory_access(vcpu, memory, self);
        self.finish(vcpu, result)
    }

    fn emulate_io<V: X86Vcpu>(&mut self, _: usize, vcpu: &mut V, io: IoExit) -> Emulated {
        let memory = self.pc.fixed.memory;
        let result = vmm_emu::string_io(vcpu, memory, self, io);
        self.finish(vcpu, result)
    }

    fn hypercall<V: X86Vcpu>(&mut self, vcpu: &mut V) -> Option<u64> {
        let id = self.pc.fixed.id;
        self.locked(|board| hypercalls::serve(vcpu, id, &mut board.machine.pci.functions))
    }

    fn multicast(&mut self, to: ApicIds, message: InterruptMessage) -> u32 {
        self.locked(|board| board.multicast(to, &message))
    }

    fn acknowledge(&mut self, cpu: usize) -> Option<Acknowledged> {
        self.locked(|board| board.acknowledge(cpu))
    }

    fn accept_virq(&mut self, cpu: usize, vector: u8) {
        self.locked(|board| {
            board.with_apic(cpu, |apic, _| apic.accept_offered(vector));
        });
    }

    fn end_of_interrupt(&mut self, cpu: usize) {
        // An interrupt whose EOI has no further effect.
        self.locked(|board| {
            board.with_apic(cpu, |apic, _| apic.eoi());
        });
    }

    #[cold]
    fn unknown(&mut self, what: Unknown) {
        self.locked(|board| board.unknown(what));
    }
}

/// Devices for the emulator: the lock is taken for each access, not for the whole instruction.
impl<H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions> Devices
    for CpuBus<'_, '_, H, R, CPUS, P>
{
    fn read(&mut self, address: u64, size: u8) -> u64 {
        self.mmio_read(self.cpu, address, size)
    }

    fn write(&mut self, address: u64, size: u8, value: u64) {
        self.mmio_write(self.cpu, address, size, value);
    }

    fn port_in(&mut self, port: u16, size: u8) -> u32 {
        PcPlatform::port_in(self, port, size)
    }

    fn port_out(&mut self, port: u16, size: u8, value: u32) {
        PcPlatform::port_out(self, port, size, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::fmt;
    use std::collections::VecDeque;
    use std::string::{String, ToString};
    use std::vec::Vec;
    use vmm_mem::testing;
    use vmm_x86::testing::ScriptedVcpu;
    use vmm_x86::{Event, Exit, Gpr, InterruptWindow, Reg};

    use crate::{DeviceBackend, Level, Model, Slots};

    /// A host whose counter ticks once a nanosecond, advanced by the test.
    #[derive(Default)]
    struct TestHost {
        tsc: u64,
        output: Vec<u8>,
        input: VecDeque<u8>,
        log: Vec<String>,
        kicks: Vec<usize>,
    }

    impl Host for TestHost {
        fn counter(&self) -> u64 {
            self.tsc
        }
        fn put(&mut self, byte: u8) -> bool {
            self.output.push(byte);
            true
        }
        fn take(&mut self) -> Option<u8> {
            self.input.pop_front()
        }
        fn log(&mut self, _: Level, text: fmt::Arguments<'_>) {
            self.log.push(text.to_string());
        }
        fn kick(&mut self, index: usize) {
            self.kicks.push(index);
        }
    }

    /// Operations of the guest in these tests.
    struct Rig<'m, P = ()> {
        pc: Pc<'m, Spin, MAX_VCPUS, P>,
        cpu: Cpu,
        vcpu: ScriptedVcpu,
        host: TestHost,
    }

    const RFLAGS_IF: u64 = 1 << 9;

    impl<'m> Rig<'m> {
        fn new(memory: &'m GuestMemory, vcpus: u8) -> Self {
            Self::with(memory, vcpus, ())
        }
    }

    impl<'m, P: Functions> Rig<'m, P> {
        fn with(memory: &'m GuestMemory, vcpus: u8, functions: P) -> Self {
            let config = PcConfig {
                vcpus,
                clock: CounterClock::new(1_000_000, 0),
                xcr0_mask: 7,
                start_unix: 1_700_000_000,
                kvmclock: true,
                steal_time: true,
                pv_flush: true,
                pv_ipi: true,
                id: 5,
            };
            let mut vcpu = ScriptedVcpu::flat32();
            vcpu.set(Reg::Rip, 0x1000);
            vcpu.next_rip = 0x1000;
            let pc = Pc::with_functions(config, memory, |_, _| [0; 4], functions);
            Self { cpu: pc.cpu(0), pc, vcpu, host: TestHost::default() }
        }

        /// Takes the offered virtual interrupt, as a CPU does, if possible: as an event of the
        /// entry.
        fn take(vcpu: &mut ScriptedVcpu) {
            let Some(entry) = vcpu.entries.last_mut() else { return };
            if let (InterruptWindow::DeliverVirq(vector), Event::NONE, true) =
                (entry.window, entry.event, entry.open)
            {
                entry.event = Event::interrupt(vector);
                vcpu.window = InterruptWindow::Nothing;
            }
        }

        /// One exit, then a return to the host.
        #[track_caller]
        fn exit(&mut self, exit: Exit) {
            self.vcpu.then(move |vcpu| {
                Self::take(vcpu);
                exit
            });
            self.vcpu.then(|vcpu| {
                Self::take(vcpu);
                Exit::Recall { events: 7 }
            });
            let pause = self.pc.run(&mut self.cpu, &mut self.vcpu, &mut self.host);
            assert_eq!(pause, StopReason::Recall(7));
        }

        fn out(&mut self, port: u16, value: u8) {
            self.vcpu.set_gpr(Gpr::Rax, value.into());
            self.exit(io(port, 1, true));
        }

        fn inb(&mut self, port: u16) -> u8 {
            self.exit(io(port, 1, false));
            self.vcpu.gpr(Gpr::Rax) as u8
        }

        fn wrmsr(&mut self, msr: u32, value: u64) {
            self.vcpu.set_gpr(Gpr::Rcx, msr.into());
            self.vcpu.set_gpr(Gpr::Rax, value & 0xffff_ffff);
            self.vcpu.set_gpr(Gpr::Rdx, value >> 32);
            self.exit(Exit::Msr { write: true });
        }

        /// A 32-bit access of `[ebx]` at an address of a device.
        fn mmio(&mut self, memory: &GuestMemory, address: u64, write: Option<u32>) -> u32 {
            let opcode: u8 = if write.is_some() { 0x89 } else { 0x8b };
            memory.write_slice(0x1000, &[opcode, 0x03]).unwrap();
            self.vcpu.set(Reg::Rip, 0x1000);
            self.vcpu.set_gpr(Gpr::Rbx, address);
            if let Some(value) = write {
                self.vcpu.set_gpr(Gpr::Rax, value.into());
            }
            let write = write.is_some();
            self.exit(Exit::MemoryFault(MemoryFault {
                gpa: address,
                write,
                fetch: false,
                walk: false,
            }));
            self.vcpu.gpr(Gpr::Rax) as u32
        }

        /// Runs with interrupts enabled; returns the events of the entries.
        fn events(&mut self) -> Vec<Event> {
            self.vcpu.set(Reg::Rflags, RFLAGS_IF);
            self.vcpu.entries.clear();
            self.exit(Exit::Spurious);
            self.vcpu.set(Reg::Rflags, 0);
            let events = self.vcpu.entries.iter().map(|entry| entry.event);
            events.filter(|event| event.is_some()).collect()
        }

        /// Programs the 8259s as an operating system does: vectors from 0x30, all inputs unmasked.
        fn init_pic(&mut self) {
            for (port, value) in [
                (0x20, 0x11),
                (0x21, 0x30),
                (0x21, 4),
                (0x21, 1),
                (0xa0, 0x11),
                (0xa1, 0x38),
                (0xa1, 2),
                (0xa1, 1),
            ] {
                self.out(port, value);
            }
            self.out(0x21, 0);
            self.out(0xa1, 0);
        }
    }

    fn io(port: u16, size: u8, write: bool) -> Exit {
        Exit::Io(IoExit { port, size, write, string: false, rep: false, next_rip: 0x1000 })
    }

    fn memory() -> GuestMemory {
        testing::memory(&[(0, 0x10_000)])
    }

    #[test]
    fn the_tables_have_room_and_no_overlap() {
        assert_eq!(ports().regions().len(), 15);
        assert_eq!(page_of_words(layout::IO_APIC, 0x1000, Chip::IoApic).regions().len(), 1);
        for (number, &chip) in CHIPS.iter().enumerate() {
            assert_eq!(chip as usize, number);
        }
    }

    #[test]
    fn serial_output_and_interrupt_through_the_8259() {
        let memory = memory();
        let mut rig = Rig::new(&memory, 1);
        for byte in b"hi" {
            rig.out(0x3f8, *byte);
        }
        assert_eq!(rig.host.output, b"hi");
        rig.init_pic();
        rig.out(0x3fc, 0x08); // OUT2
        rig.out(0x3f9, 0x01); // received data
        assert_eq!(rig.events(), []);
        rig.host.input.push_back(b'x');
        rig.pc.input(None, &mut rig.host);
        // Character time-out or trigger: at the latest a few characters later.
        rig.host.tsc += 10_000_000;
        assert_eq!(rig.events(), [Event::interrupt(0x34)]);
        assert_eq!(rig.inb(0x3f8), b'x');
        rig.out(0x20, 0x20);
        assert_eq!(rig.events(), []);
    }

    #[test]
    fn timer_interrupts_of_the_8254() {
        let memory = memory();
        let mut rig = Rig::new(&memory, 1);
        rig.init_pic();
        rig.out(0x43, 0x34);
        rig.out(0x40, 0xa9);
        rig.out(0x40, 0x04); // 1193 ticks: 1 ms
        // The output rises with the new mode.
        assert_eq!(rig.events(), [Event::interrupt(0x30)]);
        rig.out(0x20, 0x20);
        for _ in 0..3 {
            let deadline = rig.vcpu.deadline;
            assert!(deadline > rig.host.tsc && deadline <= rig.host.tsc + 1_000_000, "{deadline}");
            rig.host.tsc = deadline;
            rig.vcpu.set(Reg::Rflags, RFLAGS_IF);
            rig.vcpu.entries.clear();
            rig.exit(Exit::Deadline);
            let delivered = rig.vcpu.entries.iter().filter(|entry| entry.event.is_some()).count();
            assert_eq!(delivered, 1);
            rig.out(0x20, 0x20);
        }
    }

    #[test]
    fn io_apic_to_x2apic_with_tsc_deadline() {
        let memory = memory();
        let mut rig = Rig::new(&memory, 1);
        rig.wrmsr(0x1b, 0xfee0_0d00); // x2APIC
        rig.wrmsr(0x80f, 0x1ff);
        rig.wrmsr(0x832, 2 << 17 | 0xec); // TSC deadline, vector 0xec
        // The serial line on input 4, vector 0x51, to APIC 0.
        assert_eq!(rig.mmio(&memory, 0xfec0_0000, Some(0x18)), 0x18);
        rig.mmio(&memory, 0xfec0_0010, Some(0x51));
        assert_eq!(rig.mmio(&memory, 0xfec0_0010, None), 0x51);
        rig.wrmsr(0x6e0, 5_000);
        assert_eq!(rig.events(), []);
        assert_eq!(rig.vcpu.deadline, 5_001, "never early");
        // Both at once: the higher first, the lower after its EOI.
        rig.out(0x3fc, 0x08);
        rig.out(0x3f9, 0x02); // transmitter empty: at once
        rig.host.tsc = 5_001;
        assert_eq!(rig.events(), [Event::interrupt(0xec)]);
        assert_eq!(rig.events(), []);
        rig.wrmsr(0x80b, 0);
        assert_eq!(rig.events(), [Event::interrupt(0x51)]);
        rig.wrmsr(0x80b, 0);
        assert_eq!(rig.events(), []);
        assert_eq!(rig.pc.counters(), Counters::default());
    }

    #[test]
    fn xapic_page_and_tsc_writes() {
        let memory = memory();
        let mut rig = Rig::new(&memory, 1);
        assert_eq!(rig.mmio(&memory, 0xfee0_0030, None) & 0xff, 0x14);
        rig.mmio(&memory, 0xfee0_00f0, Some(0x1ff));
        rig.mmio(&memory, 0xfee0_0320, Some(2 << 17 | 0xec));
        rig.host.tsc = 1_000;
        rig.wrmsr(0x10, 0); // the guest's counter starts again
        rig.wrmsr(0x6e0, 500);
        assert_eq!(rig.events(), []);
        assert_eq!(rig.vcpu.deadline, 1_501);
        rig.host.tsc = 1_501;
        assert_eq!(rig.events(), [Event::interrupt(0xec)]);
        // A moved page responds at its new address only.
        rig.wrmsr(0x1b, 0xfed0_0900);
        assert_eq!(rig.mmio(&memory, 0xfed0_0030, None) & 0xff, 0x14);
        assert_eq!(rig.mmio(&memory, 0xfee0_0030, None), u32::MAX);
        assert_eq!(rig.pc.counters().unknown_memory, 1);
    }

    #[test]
    fn unknown_things_are_counted_and_logged_once() {
        let memory = memory();
        let mut rig = Rig::new(&memory, 1);
        for _ in 0..3 {
            assert_eq!(rig.inb(0x2e8), 0xff);
            rig.wrmsr(0x1234, 1);
        }
        assert_eq!(rig.mmio(&memory, 0xd000_0000, None), u32::MAX);
        // PCI configuration is absent, and its address register is no reset port.
        rig.vcpu.set_gpr(Gpr::Rax, 0x8000_0600);
        rig.exit(io(0xcf8, 4, true));
        rig.exit(io(0xcf8, 4, false));
        assert_eq!(rig.vcpu.gpr(Gpr::Rax), 0xffff_ffff);
        let counters = rig.pc.counters();
        assert_eq!(
            (counters.unknown_ports, counters.unknown_msrs, counters.unknown_memory),
            (5, 3, 1)
        );
        assert_eq!(rig.host.log.len(), 4, "{:?}", rig.host.log);
    }

    #[test]
    fn a_reset_does_not_let_the_guest_log_the_same_again() {
        let memory = memory();
        let mut logged = Once::new();
        let mut lines = Vec::new();
        for boot in 0..100 {
            let mut rig = Rig::new(&memory, 1);
            rig.pc.keep_logged(logged);
            rig.inb(0x2e8);
            // Another port at each boot.
            rig.inb(0x1000 + boot);
            // The crash kernel runs, and may report that repeatedly.
            rig.out(0x505, 2);
            rig.out(0x505, 2);
            logged = rig.pc.logged();
            lines.extend(rig.host.log);
        }
        assert!(lines[2].contains("crash kernel"), "{lines:?}");
        assert!(lines.len() < 50, "{} lines", lines.len());
        assert!(lines.last().is_some_and(|line| line.contains("only counted")), "{lines:?}");
    }

    #[test]
    fn ways_to_end() {
        let cases: [(u16, u8, u32, Outcome); 7] = [
            (0x604, 2, 5 << 10 | 1 << 13, Outcome::PowerOff),
            (0xcf9, 1, 6, Outcome::Reset),
            (0x64, 1, 0xfe, Outcome::Reset),
            (0x92, 1, 3, Outcome::Reset),
            (0x505, 1, 1, Outcome::GuestPanic),
            (0x501, 1, 42, Outcome::Code(42)),
            (0x501, 4, 7, Outcome::Code(7)),
        ];
        for (port, size, value, outcome) in cases {
            let memory = memory();
            let mut rig = Rig::new(&memory, 1);
            rig.vcpu.set_gpr(Gpr::Rax, value.into());
            rig.vcpu.then(move |_| io(port, size, true));
            let pause = rig.pc.run(&mut rig.cpu, &mut rig.vcpu, &mut rig.host);
            assert_eq!(pause, StopReason::End(outcome), "port {port:#x}");
        }
    }

    #[test]
    fn a_second_processor_starts_and_is_kicked() {
        let memory = memory();
        let mut rig = Rig::new(&memory, 2);
        let mut second = ScriptedVcpu::flat32();
        let mut cpu = rig.pc.cpu(1);
        let idle = StopReason::Idle { deadline_ticks: u64::MAX };
        assert_eq!(rig.pc.run(&mut cpu, &mut second, &mut rig.host), idle);
        rig.mmio(&memory, 0xfee0_0310, Some(1 << 24));
        rig.mmio(&memory, 0xfee0_0300, Some(0x4500)); // INIT
        rig.mmio(&memory, 0xfee0_0300, Some(0x4609)); // start at 0x9000
        assert_eq!(rig.host.kicks, [1], "once until it runs");
        second.then(|_| Exit::Recall { events: 1 });
        assert_eq!(rig.pc.run(&mut cpu, &mut second, &mut rig.host), StopReason::Recall(1));
        assert_eq!(second.segment(vmm_x86::Seg::Cs).base, 0x9000);
        // Its own id, and an interrupt from the first.
        second.set_gpr(Gpr::Rax, 1);
        second.next_rip = 2;
        second.then(|_| Exit::Cpuid);
        second.then(|_| Exit::Recall { events: 1 });
        rig.pc.run(&mut cpu, &mut second, &mut rig.host);
        assert_eq!(second.gpr(Gpr::Rbx) >> 24, 1);
    }

    #[test]
    fn the_task_priority_holds_interrupts_off() {
        const VECTOR: u32 = 0x41;
        const SEND_SELF: u32 = 1 << 18 | 1 << 14;
        let memory = memory();
        memory.write_slice(0x1000, &[0x0f, 0x22, 0xc0]).unwrap(); // mov cr8, eax
        let mut rig = Rig::new(&memory, 1);
        rig.mmio(&memory, 0xfee0_00f0, Some(0x1ff));
        // Written through the APIC's TPR, the priority reaches the CPU.
        rig.mmio(&memory, 0xfee0_0080, Some(0x93));
        assert_eq!(rig.vcpu.cr8, 9);
        rig.mmio(&memory, 0xfee0_0300, Some(SEND_SELF | VECTOR));
        assert_eq!((rig.events(), rig.vcpu.cr8_exits), ([].into(), true));
        // The priority masks this class until it is lowered.
        memory.write_slice(0x1000, &[0x0f, 0x22, 0xc0]).unwrap();
        for (priority, expected) in [(4, None), (3, Some(Event::interrupt(VECTOR as u8)))] {
            rig.vcpu.set(Reg::Rip, 0x1000);
            rig.vcpu.set_gpr(Gpr::Rax, priority);
            rig.exit(Exit::CrAccess { register: 8, write: true });
            assert_eq!(u64::from(rig.vcpu.cr8), priority);
            assert_eq!(rig.vcpu.cr8_exits, expected.is_none());
            assert_eq!(rig.events().first().copied(), expected);
        }
        assert_eq!(rig.mmio(&memory, 0xfee0_0080, None), 0x30);
    }

    /// The exit is the only sign of a write that does not change the class.
    #[test]
    fn a_write_of_cr8_clears_the_lower_half_of_the_task_priority() {
        let memory = memory();
        memory.write_slice(0x1000, &[0x0f, 0x22, 0xc0]).unwrap(); // mov cr8, eax
        let mut rig = Rig::new(&memory, 1);
        for priority in [9, 4] {
            rig.mmio(&memory, 0xfee0_0080, Some(0x93));
            assert_eq!((rig.vcpu.cr8, rig.vcpu.cr8_exits), (9, true));
            memory.write_slice(0x1000, &[0x0f, 0x22, 0xc0]).unwrap();
            rig.vcpu.set(Reg::Rip, 0x1000);
            rig.vcpu.set_gpr(Gpr::Rax, priority.into());
            rig.exit(Exit::CrAccess { register: 8, write: true });
            assert_eq!((rig.vcpu.cr8, rig.vcpu.cr8_exits), (priority, false));
            assert_eq!(rig.mmio(&memory, 0xfee0_0080, None), u32::from(priority) << 4);
        }
        // Another write of the register does, too.
        rig.mmio(&memory, 0xfee0_0080, Some(0x93));
        rig.mmio(&memory, 0xfee0_0080, Some(0x90));
        assert!(!rig.vcpu.cr8_exits);
    }

    #[test]
    fn a_task_priority_that_the_guest_lowers_by_itself_loses_no_interrupt() {
        let memory = memory();
        let mut rig = Rig::new(&memory, 2);
        rig.mmio(&memory, 0xfee0_00f0, Some(0x1ff));
        rig.mmio(&memory, 0xfee0_0080, Some(0xf0));
        // A timer that another vCPU's thread services after the guest lowered its priority without
        // an exit.
        rig.mmio(&memory, 0xfee0_0320, Some(0x51));
        rig.mmio(&memory, 0xfee0_03e0, Some(0xb));
        rig.mmio(&memory, 0xfee0_0380, Some(1000));
        rig.host.tsc += 1_000_000;
        let mut second = ScriptedVcpu::flat32();
        let mut cpu = rig.pc.cpu(1);
        rig.pc.run(&mut cpu, &mut second, &mut rig.host);
        assert_eq!(rig.host.kicks, [0], "the local APIC still knows of the old priority only");
        rig.vcpu.cr8 = 0;
        assert_eq!(rig.events(), [Event::interrupt(0x51)]);
        assert_eq!(rig.mmio(&memory, 0xfee0_0080, None), 0);
    }

    #[test]
    fn a_hypercall_interrupts_several() {
        let memory = memory();
        memory.write_slice(0x1000, &[0x0f, 0x01, 0xd9]).unwrap();
        let mut rig = Rig::new(&memory, 3);
        let mut call = |low: u64, first: u64, command: u64| {
            use hw_x86::kvm::hypercall::SEND_IPI;
            let arguments = [
                (Gpr::Rax, SEND_IPI),
                (Gpr::Rbx, low),
                (Gpr::Rcx, 0),
                (Gpr::Rdx, first),
                (Gpr::Rsi, command),
            ];
            for (register, value) in arguments {
                rig.vcpu.set_gpr(register, value);
            }
            rig.host.kicks.clear();
            rig.exit(Exit::Hypercall);
            let events: Vec<_> = rig.vcpu.entries.drain(..).map(|entry| entry.event).collect();
            (rig.vcpu.gpr(Gpr::Rax), rig.host.kicks.clone(), events.contains(&Event::NMI))
        };
        const NMI: u64 = 0x400;
        // The sender may be a target; other CPUs are kicked once until they have serviced their
        // events.
        assert_eq!(call(0b111, 0, NMI), (3, [1, 2].into(), true));
        assert_eq!(call(0b11, 1, NMI), (2, [].into(), false));
        assert_eq!(call(!0, 3, NMI), (0, [].into(), false));
        assert_eq!(call(1, 0, 0x31), (1, [].into(), false), "its local APIC is off");
    }

    /// Entropy of a test: constant.
    struct Sevens(bool);

    impl DeviceBackend for Sevens {
        fn entropy(&mut self, to: &mut [u8]) -> bool {
            to.fill(7);
            self.0
        }
    }

    impl<P: Functions> Rig<'_, P> {
        /// Reads or writes a 32-bit register of device 1 through the ports of PCI.
        fn config(&mut self, register: u32, write: Option<u32>) -> u32 {
            self.vcpu.set_gpr(Gpr::Rax, u64::from(0x8000_0800 | register));
            self.exit(io(layout::PCI_ADDRESS, 4, true));
            self.vcpu.set_gpr(Gpr::Rax, write.unwrap_or(0).into());
            self.exit(io(layout::PCI_DATA, 4, write.is_some()));
            self.vcpu.gpr(Gpr::Rax) as u32
        }
    }

    #[test]
    fn a_pci_function_works_and_interrupts() {
        let memory = memory();
        let mut slots = Slots::<Sevens, 2>::new();
        assert_eq!(slots.add(Model::Entropy, Sevens(false)).ok(), Some(0));
        let mut rig = Rig::with(&memory, 1, slots);
        rig.wrmsr(0x1b, 0xfee0_0d00); // x2APIC
        rig.wrmsr(0x80f, 0x1ff);
        // Both ways to access configuration space.
        let ecam = u64::from(layout::ECAM);
        assert_eq!(rig.config(0, None), 0x1044_1af4);
        assert_eq!(rig.mmio(&memory, ecam, None), 0x0008_1b36);
        assert_eq!(rig.mmio(&memory, ecam + 0x8000, None), 0x1044_1af4);
        assert_eq!(rig.mmio(&memory, ecam + 0x1_0000, None), u32::MAX, "an empty slot");
        assert_eq!(rig.mmio(&memory, ecam + 0x1_8000, None), u32::MAX, "no slot");
        assert_eq!(rig.config(0x10, None), layout::PCI_WINDOW);
        let window = u64::from(layout::PCI_WINDOW) + 0x10_0000;
        assert_eq!(rig.mmio(&memory, window, None), u32::MAX, "it does not answer yet");
        assert_eq!(rig.pc.counters().unknown_memory, 1);
        rig.config(0x10, Some(window as u32));
        rig.config(0x04, Some(6));
        rig.config(0x40, Some(1 << 31));
        // Bytes: features, status; then a queue of 4 entries, and vector 1 for it.
        let outb = |rig: &mut Rig<'_, _>, at: u64, size: u8, value: u32| {
            let code: &[u8] = match size {
                1 => &[0x88, 0x03],
                2 => &[0x66, 0x89, 0x03],
                _ => &[0x89, 0x03],
            };
            memory.write_slice(0x1000, code).unwrap();
            rig.vcpu.set(Reg::Rip, 0x1000);
            rig.vcpu.set_gpr(Gpr::Rbx, window + at);
            rig.vcpu.set_gpr(Gpr::Rax, value.into());
            let gpa = window + at;
            rig.exit(Exit::MemoryFault(MemoryFault {
                gpa,
                write: true,
                fetch: false,
                walk: false,
            }));
        };
        for (at, size, value) in [
            (0x14, 1, 3),
            (0x08, 4, 1),
            (0x0c, 4, 1),
            (0x14, 1, 11),
            (0x18, 2, 4),
            (0x1a, 2, 1),
            (0x20, 4, 0x2000),
            (0x28, 4, 0x3000),
            (0x30, 4, 0x4000),
            (0x1c, 2, 1),
            (0x4010, 4, 0xfee0_0000),
            (0x4018, 4, 0x61),
            (0x401c, 4, 0),
            (0x14, 1, 15),
        ] {
            outb(&mut rig, at, size, value);
        }
        memory.write_slice(0x2000, &[0, 0x50, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 2, 0]).unwrap();
        memory.write_slice(0x3000, &[0, 0, 1, 0]).unwrap();
        outb(&mut rig, 0x3000, 2, 0);
        assert_eq!(rig.events(), [], "nothing to give");
        rig.pc.functions(|slots| slots.backend(0).unwrap().0 = true);
        rig.pc.function_input(0, Some(&rig.cpu), &mut rig.host);
        assert_eq!(memory.read::<u64>(0x5000), Ok(0x0707_0707_0707_0707));
        assert_eq!(rig.events(), [Event::interrupt(0x61)]);
        // The reset port is inside the configuration address, for single bytes.
        rig.vcpu.then(|_| io(0xcf9, 1, true));
        rig.vcpu.set_gpr(Gpr::Rax, 6);
        let pause = rig.pc.run(&mut rig.cpu, &mut rig.vcpu, &mut rig.host);
        assert_eq!(pause, StopReason::End(Outcome::Reset));
    }

    #[test]
    fn accesses_across_registers_are_split() {
        let split = |address, size| {
            parts(address, size)
                .map(|part| (part.address, part.size, part.shift))
                .collect::<Vec<_>>()
        };
        assert_eq!(split(8, 8), [(8, 4, 0), (12, 4, 32)]);
        assert_eq!(split(7, 4), [(7, 1, 0), (8, 2, 8), (10, 1, 24)]);
        assert_eq!(split(u64::MAX, 2), [(u64::MAX, 1, 0), (0, 1, 8)]);
        assert_eq!(split(0, 0), []);
    }

    #[test]
    fn any_port_any_value() {
        let memory = memory();
        let mut rig = Rig::new(&memory, 1);
        let mut random = 1_u64;
        for _ in 0..20_000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let port = (random >> 48) as u16 & 0xfff;
            let size = 1 << (random >> 44 & 3).min(2);
            let write = random >> 40 & 1 != 0;
            rig.vcpu.set_gpr(Gpr::Rax, random >> 8);
            rig.host.tsc += random & 0xffff;
            rig.vcpu.then(move |_| io(port, size, write));
            rig.vcpu.then(|_| Exit::Recall { events: 0 });
            if let StopReason::End(_) = rig.pc.run(&mut rig.cpu, &mut rig.vcpu, &mut rig.host) {
                rig = Rig::new(&memory, 1);
            }
        }
    }
}
