//! Devices of the machine that the guest drives itself ([`PassThrough`]): the guest accesses their
//! registers without exits, and gets their interrupts by the board. Registers of a PCI function are
//! where the guest wants them ([`place_registers`]), those of others at addresses of the board.
//!
//! A level-triggered interrupt is masked in the kernel from its event until the guest has ended it.

use abi::{PAGE_SIZE, rights};
use hw_tables::pci::{msi_x_table, parts_without_table};
use native_rt::device::{configuration, function_registers, register_page, registers};
use native_rt::{Irq, Notification, Status, Window, error};
use proto::start::{PassThrough, PassThroughKind, Start, Vmm, event, slot};

use crate::platform;
use crate::space::SPACE;

fn interrupt(number: usize) -> Irq {
    Irq::at(slot::PASS_THROUGH + number as u64)
}

const RIGHTS: u8 = rights::READ | rights::WRITE | rights::USER | rights::GLOBAL;

/// Maps the registers of devices that are no PCI functions for the guest, and lets the interrupts
/// of all notify the first vCPU.
pub fn connect(start: &Start, plan: &Vmm) -> Result<(), Status> {
    for (number, device) in plan.devices.iter().enumerate() {
        if device.kind != PassThroughKind::Pci {
            let page = register_page(start, number as u64).ok_or(Status::BadArgument)?;
            SPACE.map(page, platform::pass_through_page(number), RIGHTS)?;
        }
        let notification = Notification::at(slot::NOTIFICATION);
        interrupt(number).bind(notification, event::pass_through_bit(number))?;
    }
    Ok(())
}

/// Returns the parts of the registers of base address `index` of a PCI function that the guest may
/// have: the offset of each, and its memory.
fn parts(start: &Start, number: usize, index: usize) -> impl Iterator<Item = (u64, Window)> {
    let index = u8::try_from(index).unwrap_or(u8::MAX);
    let registers = function_registers(start, number, index);
    let table = configuration(start, number).and_then(|real| {
        let (of, offset, length) = msi_x_table(|at| real.read32(at.into()))?;
        (of == index).then_some((offset, length))
    });
    registers.into_iter().flat_map(move |registers| {
        let parts = parts_without_table(table, registers.length(), PAGE_SIZE);
        parts.filter_map(move |(at, length)| Some((at, registers.part(at, length)?)))
    })
}

/// Maps the registers of base address `index` of a PCI function for the guest at an address, or
/// unmaps them (`None`). Returns whether they are mapped: not if the address is in use, or kernel
/// memory for page tables is exhausted.
pub fn place_registers(start: &Start, number: usize, index: usize, address: Option<u64>) -> bool {
    let map = |base: u64| {
        let mut all = parts(start, number, index);
        all.try_for_each(|(offset, part)| SPACE.map(part, base + offset, RIGHTS))
    };
    let is_mapped = address.is_some_and(|base| map(base).is_ok());
    if !is_mapped {
        parts(start, number, index).for_each(|(_, part)| SPACE.unmap(part));
    }
    is_mapped
}

/// Stops the devices before a boot: what the previous guest has started must not reach the next. A
/// PCI function was reset by root: its guest boots once.
pub fn reset(start: &Start, plan: &Vmm) {
    let own = plan.devices.iter().enumerate();
    for (number, device) in own.filter(|(_, device)| device.kind != PassThroughKind::Pci) {
        let stopped = registers(start, number as u64).is_some_and(|at| at.stop(device.kind));
        if !stopped {
            error!("device {number} of the guest's own does not stop");
        }
        acknowledge(number);
    }
}

/// Lets a device interrupt again.
pub fn acknowledge(number: usize) {
    // It fails only if the capability is gone, and the device with it.
    let _ = interrupt(number).acknowledge();
}

/// Devices whose interrupts are among these events: number and description.
pub fn interrupting(
    devices: &[PassThrough],
    events: u64,
) -> impl Iterator<Item = (usize, PassThrough)> {
    let all = devices.iter().copied().enumerate();
    all.filter(move |&(number, _)| events & event::pass_through(number) != 0)
}
