//! Replaces a VMM without disks, networks and channels: for as many ms as its guest's command line
//! says (default 5,000), checks that it cannot signal a task without a session with it. Started in
//! place of a VM that had sessions, while a server restarts.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use native_check::Report;
use native_rt::{Notification, Status, error, info, time};
use proto::start::{Role, Start, slot};

native_rt::entry!(main);

fn main(start: &Start<'static>) -> u64 {
    let mut report = Report::default();
    let text = if let Role::Vmm(vmm) = &start.role { vmm.command_line } else { "" };
    let millis = text.trim().parse().unwrap_or(5_000);
    info!("probes for {millis} ms");
    let end = time::after(&start.clock, millis * 1_000_000);
    report.case("stranger", probe_slots(start, end));
    report.exit_code()
}

/// Tries every slot in which a session or channel would place a notification, until `end`.
fn probe_slots(start: &Start<'static>, end: u64) -> Result<(), &'static str> {
    let own = Notification::at(slot::NOTIFICATION);
    loop {
        for at in slot::CHANNELS..slot::COUNT {
            // No event bits: a receiver is not disturbed.
            match Notification::at(at).signal(0) {
                Err(Status::BadCapability) => {}
                result => {
                    error!("slot {at}: {result:?}");
                    return Err("it can signal a foreign task");
                }
            }
        }
        match own.wait(time::after(&start.clock, 10_000_000)) {
            Err(Status::Timeout) => {}
            Ok(events) => {
                error!("events {events:#x}");
                return Err("a foreign task signals it");
            }
            Err(_) => return Err("cannot wait for events"),
        }
        if time::tsc() >= end {
            return Ok(());
        }
    }
}
