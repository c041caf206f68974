//! Restarts a server repeatedly while its clients work. Arguments: the server, the number of
//! restarts, the interval in ms.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use native_check::{Report, argument, number};
use native_rt::manage::ManagementGate;
use native_rt::{Notification, info, time};
use proto::manage::{RESTART, Refusal};
use proto::start::{Start, event, slot};

native_rt::entry!(main);

fn main(start: &Start<'static>) -> u64 {
    let mut report = Report::default();
    report.case("killer", restarts(start));
    report.exit_code()
}

fn restarts(start: &Start<'static>) -> Result<(), &'static str> {
    let server = argument(start, 0).ok_or("no server named")?;
    let pause = number(start, 2, 200) * 1_000_000;
    let root = ManagementGate::new();
    let notification = Notification::at(slot::NOTIFICATION);
    for round in 0..number(start, 1, 20) {
        let deadline = time::after(&start.clock, pause);
        if notification.wait(deadline).is_ok_and(|events| events & event::STOP != 0) {
            return Err("the clients ended before");
        }
        match root.request(RESTART, server, "") {
            Ok(()) => info!("restart {} of {server}", round + 1),
            Err(Refusal::RunsNot) => return Err("the server does not run"),
            Err(_) => return Err("cannot restart the server"),
        }
    }
    Ok(())
}
