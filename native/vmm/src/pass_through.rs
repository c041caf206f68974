//! Devices of the machine that the guest drives itself ([`PassThrough`]): the guest accesses their
//! registers without exits, and gets their interrupts by the board.
//!
//! A level-triggered interrupt is masked in the kernel from its event until the guest has ended it.

use abi::rights;
use native_rt::device::{register_page, registers};
use native_rt::{Irq, Notification, Status, error};
use proto::start::{PassThrough, Start, Vmm, event, slot};

use crate::platform;
use crate::space::SPACE;

fn interrupt(number: usize) -> Irq {
    Irq::at(slot::PASS_THROUGH + number as u64)
}

/// Maps the devices' registers for the guest, and lets their interrupts notify the first vCPU.
pub fn connect(start: &Start, plan: &Vmm) -> Result<(), Status> {
    const RIGHTS: u8 = rights::READ | rights::WRITE | rights::USER | rights::GLOBAL;
    for number in 0..plan.devices.len() {
        let page = register_page(start, number as u64).ok_or(Status::BadArgument)?;
        SPACE.map(page, platform::pass_through_page(number), RIGHTS)?;
        let notification = Notification::at(slot::NOTIFICATION);
        interrupt(number).bind(notification, event::pass_through_bit(number))?;
    }
    Ok(())
}

/// Stops the devices before a boot: what the previous guest has started must not reach the next.
pub fn reset(start: &Start, plan: &Vmm) {
    for (number, device) in plan.devices.iter().enumerate() {
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
