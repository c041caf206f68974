//! Interrupt controller of version 2 (IHI 0048): CPU interface, SGIs and targets. Its registers for
//! one CPU are banked, at the same address for every CPU.

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use hw_arm64::gic::v2::{self, cpu_interface, distributor};
use hw_arm64::gic::{self, Version};
use kernel_run::ranges::Range;

use super::DISTRIBUTOR;
use crate::io::{DeviceRegisters, data_barrier};
use crate::machine::{MAX_CPUS, Machine};
use crate::memory::direct;

/// The machine has this version.
static IS_PRESENT: AtomicBool = AtomicBool::new(false);
/// Virtual addresses of the registers for this CPU, and of its virtual interface.
static CPU_INTERFACE: AtomicUsize = AtomicUsize::new(0);
static HYPERVISOR_INTERFACE: AtomicUsize = AtomicUsize::new(0);
/// Physical address of the guests' interface.
static GUEST_INTERFACE: AtomicU64 = AtomicU64::new(0);
/// Bit by which the distributor knows each CPU, by its index.
static TARGETS: [AtomicU8; MAX_CPUS] = [const { AtomicU8::new(0) }; MAX_CPUS];

/// Returns whether the machine's interrupt controller has version 2.
#[inline(always)]
pub fn is_present() -> bool {
    IS_PRESENT.load(Ordering::Relaxed)
}

/// Physical address of the guests' interface to the CPU.
pub fn guest_interface() -> u64 {
    GUEST_INTERFACE.load(Ordering::Relaxed)
}

/// Registers of the executing CPU's virtual interface.
pub fn hypervisor_interface() -> DeviceRegisters {
    super::registers(&HYPERVISOR_INTERFACE)
}

fn cpu_registers() -> DeviceRegisters {
    super::registers(&CPU_INTERFACE)
}

/// Stores the addresses, if the machine has this version. Called by the first CPU.
pub fn init(machine: &Machine) {
    let [_, cpu, hypervisor, guest] = machine.interrupt_controller;
    if machine.gic_version != Version::V2 {
        return;
    }
    let address = |of: Range| direct(of.base) as usize;
    CPU_INTERFACE.store(address(cpu), Ordering::Relaxed);
    HYPERVISOR_INTERFACE.store(address(hypervisor), Ordering::Relaxed);
    GUEST_INTERFACE.store(guest.base, Ordering::Relaxed);
    IS_PRESENT.store(true, Ordering::Relaxed);
}

/// Initialises the interface of the executing CPU, whose private interrupts are set up.
pub fn init_cpu(cpu_index: usize) {
    // Of the first private interrupts, which only this CPU can get. One CPU alone reads 0.
    let own = super::registers(&DISTRIBUTOR).read(distributor::ITARGETSR) as u8;
    TARGETS[cpu_index].store(own.max(1), Ordering::Relaxed);
    let registers = cpu_registers();
    registers.write(cpu_interface::PMR, gic::ALL_PRIORITIES as u32);
    registers.write(cpu_interface::CTLR, cpu_interface::ENABLED);
    data_barrier();
}

/// Bit by which the distributor knows a CPU.
fn target(cpu_index: usize) -> u8 {
    TARGETS.get(cpu_index).map_or(0, |target| target.load(Ordering::Relaxed))
}

/// Sends an interrupt to a CPU, which sees what this one has written.
#[cold]
pub fn send(cpu_index: usize, number: u32) {
    data_barrier();
    let value = v2::software_interrupt(target(cpu_index), number);
    super::registers(&DISTRIBUTOR).write(distributor::SGIR, value);
}

/// Acknowledges the next pending interrupt: IAR.
#[cold]
pub fn acknowledge() -> u64 {
    cpu_registers().read(cpu_interface::IAR).into()
}

/// Ends the service of an interrupt, and deactivates it unless a guest does.
#[cold]
pub fn end(value: u64, is_linked: bool) {
    let registers = cpu_registers();
    registers.write(cpu_interface::EOIR, value as u32);
    if !is_linked {
        registers.write(cpu_interface::DIR, value as u32);
    }
}

/// Routes a shared interrupt to a CPU.
pub fn route(number: u32, cpu_index: usize) {
    let all = super::registers(&DISTRIBUTOR);
    let (word, shift) = (distributor::ITARGETSR + number as usize / 4 * 4, 8 * (number % 4));
    let others = all.read(word) & !(0xff << shift);
    all.write(word, others | u32::from(target(cpu_index)) << shift);
}
