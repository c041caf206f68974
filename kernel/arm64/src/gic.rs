//! Interrupt controller: GICv3 (IHI 0069) with its CPU interface in system registers, or GICv2
//! ([`v2`]). All interrupts have one priority, and are in group 1 of a GICv3.

pub mod v2;

use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use hw_arm64::gic::{self, Version, distributor, redistributor};
use kernel_core::MAX_IRQS;
use kernel_core::object::IrqNumber;

use crate::io::{DeviceRegisters, data_barrier, instruction_barrier};
use crate::machine::{MAX_CPUS, Machine};
use crate::memory::direct;
use crate::{cpu, log, read_register, time, write_register};

/// Interrupt by which CPUs make each other enter the kernel.
pub const KICK: u32 = 0;
/// Time in which a redistributor wakes up, or a write to the distributor takes effect.
const ANSWER_MICROSECONDS: u64 = 100_000;

static DISTRIBUTOR: AtomicUsize = AtomicUsize::new(0);
/// Virtual addresses of the frames of each CPU's redistributor.
static REDISTRIBUTORS: [AtomicUsize; MAX_CPUS] = [const { AtomicUsize::new(0) }; MAX_CPUS];
static COUNT: AtomicU32 = AtomicU32::new(0);
static TIMER: AtomicU32 = AtomicU32::new(0);
/// Interrupt of the guests' timer; 0: none.
static VIRTUAL_TIMER: AtomicU32 = AtomicU32::new(0);
/// Place in the device tree of each CPU.
static PLACES: [AtomicUsize; MAX_CPUS] = [const { AtomicUsize::new(0) }; MAX_CPUS];
/// Private interrupts that are enabled: a bit each.
static PRIVATE: AtomicU32 = AtomicU32::new(0);
/// Object of each shared interrupt: its number plus 1; 0: none.
static OBJECTS: [AtomicU32; gic::END_SHARED as usize] =
    [const { AtomicU32::new(0) }; gic::END_SHARED as usize];

const _: () = assert!(MAX_IRQS < u32::MAX as usize);

fn registers(address: &AtomicUsize) -> DeviceRegisters {
    // SAFETY: `init` has stored the address of registers in the direct map; the controller has no
    // DMA before LPIs are enabled.
    unsafe { DeviceRegisters::new(address.load(Ordering::Relaxed)) }
}

fn wait_for_writes(all: DeviceRegisters) {
    time::becomes_true(ANSWER_MICROSECONDS, || {
        all.read(distributor::CTLR) & distributor::PENDING == 0
    });
}

/// Initialises the distributor: all shared interrupts disabled. Called by the first CPU.
pub fn init(machine: &Machine) {
    let [shared, private @ ..] = machine.interrupt_controller;
    v2::init(machine);
    DISTRIBUTOR.store(direct(shared.base) as usize, Ordering::Relaxed);
    TIMER.store(machine.timer, Ordering::Relaxed);
    VIRTUAL_TIMER.store(machine.virtual_timer.unwrap_or(0), Ordering::Relaxed);
    let of_guests = [machine.maintenance, machine.virtual_timer].into_iter().flatten();
    let of_guests: u32 = of_guests.map(|number| 1 << number).fold(0, |all, bit| all | bit);
    PRIVATE.store(1 << KICK | 1 << machine.timer | of_guests, Ordering::Relaxed);
    let all = registers(&DISTRIBUTOR);
    let count = 32 * ((all.read(distributor::TYPER) & 31) + 1);
    COUNT.store(count.min(gic::END_SHARED), Ordering::Relaxed);
    all.write(distributor::CTLR, 0);
    wait_for_writes(all);
    for first in (gic::FIRST_SHARED..count).step_by(32) {
        set_up(all, first);
    }
    if machine.gic_version == Version::V2 {
        all.write(distributor::CTLR, gic::v2::distributor::ENABLED);
        return log!("GICv2 with {count} interrupts");
    }
    all.write(distributor::CTLR, distributor::ENABLED);
    wait_for_writes(all);
    private.into_iter().for_each(|region| find_redistributors(machine, region.base, region.end));
    log!("GICv3 with {count} interrupts");
}

/// Disables 32 interrupts from `first` on, and puts them into group 1. The firmware has done this
/// with a GICv2, if that has groups for software that is not secure.
fn set_up(of: DeviceRegisters, first: u32) {
    let word = first as usize / 8;
    of.write(distributor::ICENABLER + word, u32::MAX);
    if !v2::is_present() {
        of.write(distributor::IGROUPR + word, u32::MAX);
    }
    for at in (first as usize..first as usize + 32).step_by(4) {
        of.write(distributor::IPRIORITYR + at, u32::from_ne_bytes([gic::PRIORITY; 4]));
    }
}

/// Finds the redistributors of listed CPUs in a region.
fn find_redistributors(machine: &Machine, base: u64, end: u64) {
    let mut at = base;
    while at + redistributor::LENGTH <= end {
        // SAFETY: registers of the redistributors, in the direct map.
        let frames = unsafe { DeviceRegisters::new(direct(at) as usize) };
        let kind = frames.read_long(redistributor::TYPER);
        // Aff3 to Aff0 in the upper half.
        let affinity = kind >> 32 & 0xff_ffff | (kind >> 56) << 32;
        let listed = &machine.affinities[..machine.listed_cpus];
        if let Some(index) = listed.iter().position(|&one| one == affinity) {
            REDISTRIBUTORS[index].store(direct(at) as usize, Ordering::Relaxed);
        }
        if kind & redistributor::LAST != 0 {
            return;
        }
        let is_long = kind & redistributor::VIRTUAL != 0;
        at += if is_long { redistributor::LENGTH_V4 } else { redistributor::LENGTH };
    }
}

/// Returns whether the CPU with place `listed` in the device tree has an interface.
pub fn has_cpu(listed: usize) -> bool {
    v2::is_present() || REDISTRIBUTORS[listed].load(Ordering::Relaxed) != 0
}

/// Initialises the interface of the executing CPU, which is the one with place `listed` in the
/// device tree. Returns whether it has one.
pub fn init_cpu(listed: usize) -> bool {
    if v2::is_present() {
        set_up_private(registers(&DISTRIBUTOR));
        v2::init_cpu(cpu::current().id);
        return true;
    }
    if !has_cpu(listed) {
        return false;
    }
    PLACES[cpu::current().id].store(listed, Ordering::Relaxed);
    let frames = registers(&REDISTRIBUTORS[listed]);
    frames.write(redistributor::WAKER, frames.read(redistributor::WAKER) & !redistributor::SLEEP);
    let is_awake = || frames.read(redistributor::WAKER) & redistributor::CHILDREN_ASLEEP == 0;
    if !time::becomes_true(ANSWER_MICROSECONDS, is_awake) {
        return false;
    }
    set_up_private(frames.from(redistributor::PRIVATE));
    // SAFETY: interrupts of group 1 reach this CPU, which masks them until it runs a task.
    unsafe {
        write_register!("icc_sre_el2", gic::SYSTEM_REGISTERS);
        instruction_barrier();
        write_register!("icc_pmr_el1", gic::ALL_PRIORITIES);
        write_register!("icc_ctlr_el1", gic::SEPARATE_DEACTIVATION);
        write_register!("icc_igrpen1_el1", 1);
    }
    instruction_barrier();
    true
}

/// Enables the private interrupts of a CPU that are in use.
fn set_up_private(private: DeviceRegisters) {
    set_up(private, 0);
    private.write(distributor::ISENABLER, PRIVATE.load(Ordering::Relaxed));
}

/// Sends the interrupt [`KICK`] to a CPU.
pub fn kick(cpu_index: usize) {
    if v2::is_present() {
        return v2::send(cpu_index, KICK);
    }
    let Some(target) = cpu::by_index(cpu_index) else { return };
    let value = gic::software_interrupt(target.affinity, KICK.into());
    // SAFETY: the CPU enters its kernel. The barrier makes what this CPU has written visible first.
    unsafe {
        core::arch::asm!("dsb ishst", options(nostack));
        write_register!("icc_sgi1r_el1", value);
    }
    instruction_barrier();
}

/// Cause of an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The timer of this CPU.
    Timer,
    /// The timer of the guest whose registers are loaded. Its interrupt remains active.
    VirtualTimer,
    /// Another CPU.
    Kick,
    /// An interrupt object's.
    Object(IrqNumber),
    /// Nothing to do: the kernel was entered, or does not use it.
    Unused,
}

/// An interrupt in service, to be ended by [`end`].
#[derive(Debug)]
pub struct InService {
    /// With the source of a GICv2's SGI.
    number: u64,
    /// The guest deactivates it.
    is_linked: bool,
}

/// Takes the next pending interrupt of this CPU.
pub fn take() -> Option<(InService, Cause)> {
    match v2::is_present() {
        true => taken(v2::acknowledge()),
        false => taken(read_register!("icc_iar1_el1")),
    }
}

/// Cause of an interrupt that this CPU has taken, by the value of ICC_IAR1_EL1, or of a GICv2's
/// IAR, which has more than the number of an SGI. A GICv3 has no longer numbers before LPIs are
/// enabled.
pub fn taken(value: u64) -> Option<(InService, Cause)> {
    let number = value as u32 & gic::v2::NUMBER;
    if u64::from(number) >= gic::FIRST_SPECIAL {
        return None;
    }
    // SAFETY: orders the read before the accesses to devices that follow.
    unsafe { core::arch::asm!("dsb sy", options(nostack)) };
    let cause = match number {
        KICK => Cause::Kick,
        _ if number == TIMER.load(Ordering::Relaxed) => Cause::Timer,
        _ if number == VIRTUAL_TIMER.load(Ordering::Relaxed) => Cause::VirtualTimer,
        _ => match OBJECTS[number as usize].load(Ordering::Relaxed) {
            0 => Cause::Unused,
            object => Cause::Object(IrqNumber(object - 1)),
        },
    };
    Some((InService { number: value, is_linked: cause == Cause::VirtualTimer }, cause))
}

/// Ends the service of an interrupt.
pub fn end(InService { number, is_linked }: InService) {
    if v2::is_present() {
        return v2::end(number, is_linked);
    }
    // SAFETY: the interrupt may be delivered again, unless a guest has to deactivate it.
    unsafe {
        write_register!("icc_eoir1_el1", number);
        if !is_linked {
            write_register!("icc_dir_el1", number);
        }
    }
    instruction_barrier();
}

/// Number of the interrupt of the guests' timer; `None`: the machine has none.
pub fn virtual_timer() -> Option<u32> {
    Some(VIRTUAL_TIMER.load(Ordering::Relaxed)).filter(|&number| number != 0)
}

/// Makes this CPU's interrupt of the guests' timer active or inactive.
pub fn set_virtual_timer_active(is_active: bool) {
    let Some(number) = virtual_timer() else { return };
    let private = if v2::is_present() {
        registers(&DISTRIBUTOR)
    } else {
        let place = PLACES[cpu::current().id].load(Ordering::Relaxed);
        registers(&REDISTRIBUTORS[place]).from(redistributor::PRIVATE)
    };
    let register = if is_active { distributor::ISACTIVER } else { distributor::ICACTIVER };
    private.write(register, 1 << number);
    data_barrier();
}

/// Makes the distributor of a GICv2 look at the guests' timer again, by enabling its interrupt,
/// which is enabled.
#[cold]
pub fn look_at_virtual_timer() {
    let bits = virtual_timer().map_or(0, |number| 1 << number);
    registers(&DISTRIBUTOR).write(distributor::ISENABLER, bits);
    data_barrier();
}

/// Returns whether a device can have this interrupt.
pub fn is_valid(number: u32) -> bool {
    (gic::FIRST_SHARED..COUNT.load(Ordering::Relaxed)).contains(&number)
}

/// Disables a shared interrupt.
pub fn mask(number: u32) {
    let all = registers(&DISTRIBUTOR);
    all.write(distributor::ICENABLER + number as usize / 32 * 4, 1 << (number % 32));
    wait_for_writes(all);
}

/// Routes a shared interrupt to a CPU, for an interrupt object, and enables it.
pub fn enable(number: u32, is_level: bool, object: IrqNumber, cpu_index: usize) {
    let Some(target) = cpu::by_index(cpu_index) else { return };
    let all = registers(&DISTRIBUTOR);
    let index = number as usize;
    OBJECTS[index].store(object.0 + 1, Ordering::Relaxed);
    match v2::is_present() {
        true => v2::route(number, cpu_index),
        false => all.write_long(distributor::IROUTER + 8 * index, target.affinity),
    }
    let kind = distributor::ICFGR + index / 16 * 4;
    let edge = 2 << (number % 16 * 2);
    let others = all.read(kind) & !edge;
    all.write(kind, if is_level { others } else { others | edge });
    all.write(distributor::ISENABLER + index / 32 * 4, 1 << (number % 32));
}
