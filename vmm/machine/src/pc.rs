//! The board `pc`: devices of a PC, with or without PCI, at the addresses of [`layout`].
//!
//! vCPUs run concurrently, each in a thread of the host. They share constant state ([`Fixed`])
//! without a lock. One lock protects chips, local APICs and router and is held while a chip works;
//! each PCI function has a lock of its own, and its effects on the rest take the board's lock
//! briefly, inside of its own. No lock is held while the guest runs. A thread that creates an event
//! for another CPU kicks it: a kick before that CPU enters the guest or waits is not lost
//! ([`Host::kick`]), and the CPU services all its events after each kick, so its flag for pending
//! events ([`CpuBus::needs_service`]) need not be shared.

use core::sync::atomic::{AtomicU8, Ordering::Relaxed};
use core::time::Duration;

use hw_x86::cpuid::leaf;

use spin::mutex::SpinMutex;
use spin::relax::{RelaxStrategy, Spin};
use vmm_bus::{Device, Map, Region, WAKE_CHANGE, WAKE_INPUT};
use vmm_dev::pc::debugexit::DebugExit;
use vmm_dev::pc::kbd::Keyboard;
use vmm_dev::pc::pic::PicPair;
use vmm_dev::pc::pit::Pit;
use vmm_dev::pc::pm::AcpiPm;
use vmm_dev::pc::port92::Port92;
use vmm_dev::pc::post::PostPort;
use vmm_dev::pc::pvpanic::PvPanic;
use vmm_dev::pc::reset::ResetPort;
use vmm_dev::pc::rtc::Rtc;
use vmm_dev::pc::uart::Uart;
use vmm_dev::pc::{pm, rtc};
use vmm_dev::pci::{Bridge, ConfigAddress};
use vmm_mem::GuestMemory;
use vmm_vcpu::{CounterClock, MAX_VCPUS, Outcome, StopReason};
use vmm_x86::apic::io::IoApic;
use vmm_x86::apic::local::{Config, LocalApic};
use vmm_x86::apic::{io, local};
use vmm_x86::cpuid::{CpuidConfig, CpuidTable, Values};
use vmm_x86::{Cpu, X86Vcpu};

use crate::functions::{Functions, MAX_FUNCTIONS};
pub use crate::interrupts::Counters;
use crate::interrupts::{CHIPS, Chip, ChipEnv, InterruptRouter};
use crate::once::Once;
use crate::{Host, PcConfig, layout};
use cpu_bus::CpuBus;

mod access;
mod cpu_bus;
mod delivery;
mod function;
mod pci_access;

/// Returns what `CPUID` depends on.
fn cpuid_config(config: &PcConfig, vcpus: usize, tsc_khz: u32) -> CpuidConfig {
    CpuidConfig {
        vcpus: vcpus as u8,
        xcr0_mask: config.xcr0_mask,
        tsc_khz,
        apic_khz: (local::spec::BUS_HZ / 1000) as u32,
        kvmclock: config.kvmclock,
        steal_time: config.steal_time,
        pv_flush: config.pv_flush,
        pv_ipi: config.pv_ipi,
        nested_paging: config.nested_paging,
    }
}

/// Returns the chips in their power-on state.
// Built in place: they are large, and stacks are small.
#[inline(always)]
fn chips(config: &PcConfig, memory: &GuestMemory) -> Chips {
    let below = |&(base, _): &(u64, u64)| base < FOUR_GIB;
    let rtc = rtc::Config {
        unix_seconds_at_zero: i64::try_from(config.start_unix.as_secs()).unwrap_or(i64::MAX),
        nanos_at_zero: config.start_unix.subsec_nanos(),
        low_memory: memory.ranges().filter(below).map(|range| range.1).sum(),
        high_memory: memory.ranges().filter(|range| !below(range)).map(|range| range.1).sum(),
    };
    Chips {
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
    }
}

#[cfg(test)]
mod tests;

/// Number of port ranges.
const PORT_RANGES: usize = 17;
const FOUR_GIB: u64 = 1 << 32;

/// A board with room for `CPUS` vCPUs, at most [`MAX_VCPUS`]. vCPU threads wait for the lock with
/// strategy `R`. `P` holds the functions on the PCI bus; `()`: no PCI.
pub struct Pc<'m, R = Spin, const CPUS: usize = MAX_VCPUS, P = ()> {
    fixed: Fixed<'m>,
    machine: SpinMutex<Machine<CPUS>, R>,
    windows: SpinMutex<crate::pci::Windows, R>,
    functions: P,
    /// vCPU that the last interrupt of each function went to.
    targets: [AtomicU8; MAX_FUNCTIONS],
}

/// Constant state of a running VM.
struct Fixed<'m> {
    memory: &'m GuestMemory,
    cpuid: CpuidTable,
    clock: CounterClock,
    start_unix: Duration,
    vcpus: usize,
    physical_bits: u32,
    id: u32,
    maps: Maps,
}

/// Devices and their router.
struct Machine<const CPUS: usize> {
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
    config_address: ConfigAddress,
    bridge: Bridge,
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
        functions: P,
    ) -> Self {
        functions.power_on();
        const { assert!(CPUS >= 1 && CPUS <= MAX_VCPUS) };
        let vcpus = usize::from(config.vcpus).clamp(1, CPUS);
        let tsc_khz = u32::try_from(config.clock.khz()).unwrap_or(u32::MAX);
        let cpuid = CpuidTable::new(&cpuid_config(&config, vcpus, tsc_khz), host_cpuid);
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
        let machine = || Machine {
            chips: chips(&config, memory),
            apics: core::array::from_fn(apic),
            ext_int: 0,
            intr: false,
            nmi: 0,
            init: 0,
            startup: [None; CPUS],
            router: InterruptRouter::new(config.clock, *memory),
            config_address: ConfigAddress::default(),
            bridge: Bridge::new(),
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
        Self {
            fixed: fixed(cpuid),
            machine: SpinMutex::new(machine()),
            windows: SpinMutex::default(),
            functions,
            targets: [const { AtomicU8::new(0) }; _],
        }
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
        self.wake(slot, WAKE_INPUT, caller, host);
    }

    /// Notifies the PCI function in `slot` that the properties of its back end have changed.
    pub fn function_change<H: Host>(&self, slot: usize, caller: Option<&Cpu>, host: &mut H) {
        self.wake(slot, WAKE_CHANGE, caller, host);
    }

    fn wake<H: Host>(&self, slot: usize, timer: u8, caller: Option<&Cpu>, host: &mut H) {
        let running = caller.map_or(CPUS, Cpu::index);
        self.with_function(slot, host, running, |function, env| function.wake(timer, env));
    }

    /// The functions on the PCI bus.
    pub fn functions(&self) -> &P {
        &self.functions
    }

    /// vCPU to notify of completions for the function in `slot`: the one that its last interrupt
    /// went to. It finds the completions and handles their interrupt without a further kick.
    pub fn target(&self, slot: usize) -> usize {
        self.targets.get(slot).map_or(0, |target| target.load(Relaxed).into())
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
        act: impl FnOnce(&mut PcBoard<'_, 'm, H, CPUS>) -> T,
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
struct PcBoard<'a, 'm, H, const CPUS: usize> {
    fixed: &'a Fixed<'m>,
    machine: &'a mut Machine<CPUS>,
    host: &'a mut H,
}

impl<H: Host, const CPUS: usize> PcBoard<'_, '_, H, CPUS> {
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
            self.deliver(&message, Some(cpu));
        }
        if self.machine.apics[cpu].has_events() || self.machine.router.has_pending() {
            self.propagate();
        }
        self.request_service_if_waiting(cpu);
        result
    }
}
