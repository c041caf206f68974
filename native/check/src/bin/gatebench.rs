//! Measures a call through a gate to another task on the same CPU and the reply.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use native_check::{number, same};
use native_rt::{Factory, Gate, Message, Serves, Space, Status, error, info, probe, time};
use proto::start::{MESSAGE_PAGE, Start, slot};

const BATCHES: usize = 10;
const BADGE: u64 = 7;
/// Turn of the server, in ns.
const TURN: u64 = 10_000_000;

native_rt::entry!(main);

fn main(start: &Start<'static>) -> u64 {
    let rounds = number(start, 0, 1000);
    match make_server(start) {
        Ok(gate) => measure(start, gate, rounds),
        Err(status) => {
            error!("CHECK gatebench FAIL no server: {status:?}");
            1
        }
    }
}

fn make_server(start: &Start) -> Result<Gate, Status> {
    let factory = Factory::at(slot::FACTORY);
    let task = factory.task(slot::FREE, 16)?;
    let (code, entry) = probe::echo_server();
    task.map(code, code.base(), abi::rights::READ | abi::rights::EXECUTE)?;
    let thread = factory.thread(slot::FREE + 1, task, start.cpu, MESSAGE_PAGE)?;
    // Above us, so that it waits for calls before the first one.
    let priority = start.priority.saturating_add(1).min(63);
    let sched = factory.sched_context(slot::FREE + 2, priority, TURN, 0)?;
    thread.bind_sched(sched)?;
    thread.start(entry, 0, 0)?;
    factory.gate(slot::FREE + 3, thread, BADGE)
}

fn measure(start: &Start, gate: Gate, rounds: u64) -> u64 {
    let message = Message::new(1, [1, 2, 3, 4]);
    let expected = Message::new(1, [1, 2, 3, BADGE]);
    if same("answer", gate.call(message), Ok(expected)).is_err() {
        error!("CHECK gatebench FAIL wrong answer");
        return 1;
    }
    let mut best = u64::MAX;
    for _ in 0..BATCHES {
        let begin = time::tsc();
        for _ in 0..rounds {
            if gate.call(message).is_err() {
                error!("CHECK gatebench FAIL a call failed");
                return 1;
            }
        }
        best = best.min(time::tsc().wrapping_sub(begin));
    }
    let tenths = time::nanos(start.clock.tsc_khz, best).saturating_mul(10) / rounds.max(1);
    info!("VB gate_call_reply {}.{} ns", tenths / 10, tenths % 10);
    info!("CHECK gatebench ok");
    0
}
