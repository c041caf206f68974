//! Console server: owns a serial port and serves it to clients as byte streams.
//!
//! A single client has the line exclusively, byte for byte. [`mux`] lets several clients share it:
//! an escape key selects the client that the line shows and sends keys to, and the server keeps the
//! output of the other clients. Interrupts drive both directions. The server never waits for the
//! line or for a client: it truncates a write that does not fit, and signals the client's
//! notification when there is room.
#![cfg_attr(not(test), no_std, no_main)]
#![forbid(unsafe_code)]

mod cook;
mod directory;
mod mux;
mod output;
mod ring;
mod server;
mod uart;

use native_rt::start::windows;
use native_rt::{Incoming, Irq, Notification, error, reply_wait, wait};
use proto::control::code;
use proto::start::{RangeKind, Role, Start, event, slot};
use spin::{Mutex, MutexGuard};

use crate::directory::Directory;
use crate::mux::Mux;
use crate::server::ConsoleServer;
use crate::uart::ConsolePort;

/// Too large for the stack.
static MUX: Mutex<Mux> = Mutex::new(Mux::new());
/// Consecutive failures to wait after which the server ends.
const MAX_FAILURES: u32 = 1000;

#[cfg(not(test))]
native_rt::entry!(main);

/// Runs the server; returns the exit code of a failure.
#[cfg_attr(test, allow(dead_code, reason = "needs the kernel"))]
fn main(start: &Start<'static>) -> u64 {
    let Role::Console { port, multiplex } = start.role else {
        error!("the start page does not describe a console server");
        return code::BAD_CONFIG;
    };
    let Some(uart) = uart::open(start, port) else {
        error!("the start page describes no known serial port (port {port:#x})");
        return code::BAD_CONFIG;
    };
    let irq = Irq::at(slot::DEVICE);
    let bit = event::INTERRUPT.trailing_zeros();
    if let Err(status) = irq.bind(Notification::at(slot::NOTIFICATION), bit) {
        error!("cannot bind the interrupt: {status:?}");
        return code::INTERNAL;
    }
    let directory = windows(start, RangeKind::Directory).next().map(Directory::new);
    // The program's only thread reaches this line once.
    let mux = MutexGuard::leak(MUX.lock());
    if multiplex {
        mux.multiplex();
    }
    let mut server = ConsoleServer::new(uart, irq, mux, directory);
    server.interrupt();
    serve(&mut server)
}

fn serve(server: &mut ConsoleServer<ConsolePort>) -> u64 {
    let mut failures = 0;
    let mut next = wait();
    loop {
        match next {
            Ok(Incoming::Call(badge, message)) => {
                failures = 0;
                let answer = server.call(badge, message);
                next = reply_wait(answer);
            }
            Ok(Incoming::Events(events)) => {
                failures = 0;
                server.events(events);
                next = wait();
            }
            Err(status) => {
                failures += 1;
                if failures == MAX_FAILURES {
                    error!("cannot wait for callers: {status:?}");
                    return code::INTERNAL;
                }
                next = wait();
            }
        }
    }
}
