//! Measures a call through a gate to another task on the same CPU, with its reply.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use native_check::{number, same};
use native_rt::{Factory, Gate, Message, ServerThread, Space, Status, error, info, probe, time};
use proto::start::{MESSAGE_PAGE, Start, slot};

const BATCHES: usize = 10;
const BADGE: u64 = 7;
/// Time slice of the server, in ns.
const TIME_SLICE: u64 = 10_000_000;

native_rt::entry!(main);

fn main(start: &Start<'static>) -> u64 {
    let rounds = number(start, 0, 1000);
    // A server without a scheduling context always runs on its callers'; one with its own could
    // continue after a reply, so the kernel takes a scheduling decision.
    for (name, with_time, slot) in
        [("gate_call_reply", false, slot::FREE), ("gate_call_reply_active", true, slot::FREE + 4)]
    {
        let gate = match make_server(start, slot, with_time) {
            Ok(gate) => gate,
            Err(status) => {
                error!("CHECK gatebench FAIL no server: {status:?}");
                return 1;
            }
        };
        match measure(gate, rounds) {
            Ok(ticks) => {
                let nanos = time::nanos(start.clock.tsc_khz, ticks);
                let tenths = nanos.saturating_mul(10) / rounds.max(1);
                info!("VB {name} {}.{} ns", tenths / 10, tenths % 10);
            }
            Err(why) => {
                error!("CHECK gatebench FAIL {why}");
                return 1;
            }
        }
    }
    info!("CHECK gatebench ok");
    0
}

/// Creates a server in a task of its own, with `slot` and the next three slots.
fn make_server(start: &Start, slot: u64, with_time: bool) -> Result<Gate, Status> {
    let factory = Factory::at(slot::FACTORY);
    let task = factory.task(slot, 16)?;
    let (code, entry) = probe::echo_server();
    task.map(code, code.base(), abi::rights::READ | abi::rights::EXECUTE)?;
    let thread = factory.thread(slot + 1, task, start.cpu, MESSAGE_PAGE)?;
    if with_time {
        let sched = factory.sched_context(slot + 2, start.priority, TIME_SLICE, 0)?;
        thread.bind_sched(sched)?;
    }
    thread.start(entry, 0, 0)?;
    factory.gate(slot + 3, thread, BADGE)
}

/// Returns the shortest time of a batch of `rounds` calls, in ticks.
fn measure(gate: Gate, rounds: u64) -> Result<u64, &'static str> {
    let message = Message::new(1, [1, 2, 3, 4]);
    let expected = Message::new(1, [1, 2, 3, BADGE]);
    same("answer", gate.call(message), Ok(expected))?;
    let mut best = u64::MAX;
    for _ in 0..BATCHES {
        let begin = time::tsc();
        for _ in 0..rounds {
            gate.call(message).map_err(|_| "a call failed")?;
        }
        best = best.min(time::tsc().wrapping_sub(begin));
    }
    Ok(best)
}
