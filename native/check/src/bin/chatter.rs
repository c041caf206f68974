//! Writes lines to the log at full speed, until root asks it to stop.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use native_rt::{Notification, info};
use proto::start::{Start, event, slot};

native_rt::entry!(main);

fn main(_: &Start<'static>) -> u64 {
    let notification = Notification::at(slot::NOTIFICATION);
    let mut count = 0u64;
    while notification.poll() & event::STOP == 0 {
        count += 1;
        // Two lines per call: the budget counts each.
        info!("line {count}\nand one more");
    }
    0
}
