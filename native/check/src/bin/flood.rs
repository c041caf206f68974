//! Exhausts a quota with objects of each kind, frees them, and repeats: the same number must fit
//! every time.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use native_check::{Report, number};
use native_rt::{Factory, OwnThread, Status, drop_capability, error, info};
use proto::start::{Start, slot};

const FACTORY: u64 = slot::FREE;
const FIRST: u64 = slot::FREE + 1;
/// Kinds of objects, and the quota in pages that each exhausts.
const KINDS: [(&str, u64); 6] = [
    ("task", 24),
    ("gate", 1),
    ("notification", 1),
    ("factory", 24),
    ("sched-context", 1),
    ("vm", 24),
];

native_rt::entry!(main);

fn main(start: &Start<'static>) -> u64 {
    let mut report = Report::default();
    let rounds = number(start, 0, 10);
    for (kind, (name, pages)) in KINDS.iter().enumerate() {
        let result = flood(kind, *pages, rounds);
        if let Ok(count) = result {
            info!("{count} objects of kind {name} in {pages} pages");
        }
        report.case(name, result.map(drop));
    }
    report.exit_code()
}

fn make(factory: Factory, kind: usize, at: u64) -> Result<(), Status> {
    match kind {
        0 => factory.task(at, 16).map(drop),
        1 => factory.gate(at, OwnThread::at(slot::THREAD), 1).map(drop),
        2 => factory.notification(at).map(drop),
        3 => factory.factory(at, 1, 0, 0).map(drop),
        4 => factory.sched_context(at, 1, 1_000_000, 0).map(drop),
        _ => factory.vm(at, abi::vm_mode::NESTED).map(drop),
    }
}

/// Fills and empties the quota; returns the number of objects that fit.
fn flood(kind: usize, pages: u64, rounds: u64) -> Result<u64, &'static str> {
    let factory = Factory::at(slot::FACTORY)
        .factory(FACTORY, pages, 1, 0)
        .map_err(|_| "cannot split the quota")?;
    let mut first = None;
    for round in 0..rounds {
        let mut count = 0;
        let end = loop {
            if FIRST + count == slot::COUNT {
                break Ok(());
            }
            match make(factory, kind, FIRST + count) {
                Ok(()) => count += 1,
                Err(status) => break Err(status),
            }
        };
        for at in FIRST..FIRST + count {
            if drop_capability(at).is_err() {
                return Err("cannot free an object");
            }
        }
        if !matches!(end, Ok(()) | Err(Status::NoQuota | Status::Unsupported)) {
            error!("{end:?} after {count}");
            return Err("creation failed for another reason than the quota");
        }
        if *first.get_or_insert(count) != count {
            error!("round {round}: {count}");
            return Err("another number of objects");
        }
    }
    drop_capability(FACTORY).map_err(|_| "cannot free the factory")?;
    Ok(first.unwrap_or(0))
}
