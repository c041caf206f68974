//! Fuzzes the system calls: random and nearly valid operations and arguments. The kernel must
//! survive.
//!
//! A worker thread performs the calls; the first thread monitors its progress and restarts it when
//! a call has stopped or blocked it. The worker skips calls that would only remove the resources of
//! the test itself.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use core::sync::atomic::{AtomicU64, Ordering};

use abi::ops::{SELF, UNMAP_SELF};
use abi::{Item, ItemKind, Op, PAGE_SHIFT, PAGE_SIZE, USER_END};
use native_check::{Random, Report, number};
use native_rt::thread::{Stack, ThreadResources, restart, spawn};
use native_rt::{
    Factory, Notification, Page, SchedContext, ServerThread, Status, drop_capability, error, info,
    probe, time,
};
use proto::start::{MEMORY, STACK_TOP, START_PAGE, Start, slot};

/// Capabilities of the first thread, which calls must not remove.
const WORKER: u64 = slot::FREE;
const SCHED: u64 = slot::FREE + 1;
const PROTECTED: [u64; 7] =
    [slot::THREAD, slot::FACTORY, slot::NOTIFICATION, slot::LOG, slot::CONTROL, WORKER, SCHED];
/// Private memory, which may be lost.
const PRIVATE: core::ops::Range<u64> = MEMORY..MEMORY + (256 << 10);
/// Address ranges of the program itself.
const OWN: [core::ops::Range<u64>; 2] = [0x1_0000..PRIVATE.start, PRIVATE.end..STACK_TOP];
/// Interval of the monitor, and the worker's time slice, in ns.
const LOOK: u64 = 30_000_000;
const TIME_SLICE: u64 = 5_000_000;
/// Number of undefined operations that are tried too.
const BEYOND: u64 = 4;

static STACK: Stack<{ 16 << 10 }> = Stack::new();
static CALLS: AtomicU64 = AtomicU64::new(0);
static ACCEPTED: AtomicU64 = AtomicU64::new(0);
static WANTED: AtomicU64 = AtomicU64::new(0);

native_rt::entry!(main);

fn main(start: &Start<'static>) -> u64 {
    let seed = number(start, 0, 1);
    WANTED.store(number(start, 1, 1_000_000), Ordering::Relaxed);
    let mut report = Report::default();
    let restarts = match watch(start, seed) {
        Ok(restarts) => restarts,
        Err(status) => {
            error!("cannot run a worker: {status:?}");
            report.case("hostile", Err("no worker"));
            return report.exit_code();
        }
    };
    let calls = CALLS.load(Ordering::Relaxed);
    let accepted = ACCEPTED.load(Ordering::Relaxed);
    info!("{calls} calls, {accepted} accepted, {restarts} restarts");
    report.case("hostile", Ok(()));
    report.exit_code()
}

/// Runs the worker until it has performed all calls; returns the number of restarts.
fn watch(start: &Start, seed: u64) -> Result<u64, Status> {
    // The worker must not preempt this thread.
    drop_capability(slot::SCHED)?;
    let factory = Factory::at(slot::FACTORY);
    let priority = start.priority;
    let sched = factory.sched_context(SCHED, priority, TIME_SLICE, 0)?;
    let resources =
        ThreadResources { factory, task: slot::TASK, slot: WORKER, cpu: start.cpu, sched };
    let thread = spawn(resources, &STACK, work, seed)?;
    let notification = Notification::at(slot::NOTIFICATION);
    let (mut restarts, mut last) = (0, 0);
    while CALLS.load(Ordering::Relaxed) < WANTED.load(Ordering::Relaxed) {
        // Events come from the worker.
        let _ = notification.wait(time::after(&start.clock, LOOK));
        let calls = CALLS.load(Ordering::Relaxed);
        if calls == last {
            restarts += 1;
            // The worker may have changed its own scheduling context.
            let _ = SchedContext::at(SCHED).set(priority, TIME_SLICE, 0);
            let _ = thread.bind_sched(sched);
            restart(thread, &STACK, work, seed.wrapping_add(restarts << 32))?;
        }
        last = calls;
    }
    let _ = thread.stop();
    Ok(restarts)
}

extern "C" fn work(seed: u64) -> ! {
    let mut random = Random::new(seed);
    loop {
        let operation = random.below(abi::OPERATIONS.len() as u64 + BEYOND);
        // `Yield` is harmless but slow: other tasks on the CPU run meanwhile.
        if operation == Op::Yield as u64 && random.below(1000) != 0 {
            continue;
        }
        let mut arguments = [0; 6];
        arguments.fill_with(|| value(&mut random));
        shape(operation, &mut arguments, &mut random);
        if ends_test(operation, &arguments) {
            continue;
        }
        if random.below(64) == 0 {
            let words = [0; Page::WORDS].map(|_: u64| value(&mut random));
            Page::current().set_words(&words);
        }
        if CALLS.fetch_add(1, Ordering::Relaxed) >= WANTED.load(Ordering::Relaxed) {
            CALLS.store(WANTED.load(Ordering::Relaxed), Ordering::Relaxed);
            let _ = Notification::at(slot::NOTIFICATION).wait(abi::FOREVER);
            continue;
        }
        let (status, _) = probe::system_call(operation, arguments);
        if status == Status::Ok as u64 {
            ACCEPTED.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Returns a random argument: mostly a plausible one, sometimes any value.
fn value(random: &mut Random) -> u64 {
    match random.below(16) {
        0 => random.draw(),
        1 => 1 << random.below(64),
        2 => (1u64 << random.below(64)).wrapping_sub(1),
        3 => u64::MAX - random.below(4),
        4 => USER_END - random.below(2) * PAGE_SIZE,
        5 => PRIVATE.start + random.below(64) * PAGE_SIZE,
        6 => START_PAGE + random.below(0x200) * PAGE_SIZE,
        7 => (PRIVATE.start >> PAGE_SHIFT) + random.below(64),
        8 => item(random).pack(),
        9 => 0xffff_8000_0000_0000 | random.draw() >> 20,
        _ => random.below(slot::COUNT + 8),
    }
}

fn item(random: &mut Random) -> Item {
    let kind = [ItemKind::Memory, ItemKind::Capability, ItemKind::Port][random.below(3) as usize];
    let orders = if random.below(8) == 0 { Item::MAX_ORDER as u64 + 1 } else { 4 };
    Item {
        kind,
        grant: random.below(4) == 0,
        order: random.below(orders) as u8,
        rights: random.draw() as u8,
    }
}

/// Makes the arguments of some operations more plausible, and limits waits.
fn shape(operation: u64, arguments: &mut [u64; 6], random: &mut Random) {
    match Op::from_code(operation) {
        Some(Op::GateReplyWait) => arguments[0] &= !abi::reply_wait::WAIT,
        Some(Op::NotificationWait) => {
            if arguments[1] > time::tsc() {
                arguments[1] = 0;
            }
        }
        Some(Op::Create) if random.below(4) != 0 => {
            arguments[0] = slot::FACTORY;
            arguments[1] = 1 + random.below(10);
        }
        Some(Op::Delegate) if random.below(2) == 0 => {
            arguments[0] = if random.below(2) == 0 { SELF } else { random.below(slot::COUNT) };
            arguments[1] = item(random).pack();
        }
        Some(Op::Unmap) if random.below(2) == 0 => {
            arguments[0] = item(random).pack();
            arguments[2] = random.below(2);
        }
        Some(Op::UnmapAt) if random.below(2) == 0 => {
            arguments[0] = if random.below(2) == 0 { SELF } else { random.below(slot::COUNT) };
            arguments[1] = item(random).pack();
            arguments[3] = random.below(2);
        }
        _ => {}
    }
}

/// Returns whether a call would only end the test: it unmaps the program's own pages or the first
/// thread's resources, stops the first thread, or calls root as this task.
fn ends_test(operation: u64, arguments: &[u64; 6]) -> bool {
    let [first, second, third, ..] = *arguments;
    match Op::from_code(operation) {
        Some(Op::GateCall) => first == slot::LOG || first == slot::CONTROL,
        // All objects of the program, the worker included, are children of its factory.
        Some(Op::Unmap) if third & UNMAP_SELF == 0 => has_slot(first, second, slot::FACTORY),
        Some(Op::Unmap) => takes(first, second),
        Some(Op::Delegate) => {
            Item::unpack(second).is_some_and(|item| item.grant) && takes(second, third)
        }
        Some(Op::ThreadStart | Op::ThreadStop | Op::ThreadBind) => first == slot::THREAD,
        _ => false,
    }
}

/// Returns whether the item names a resource that the program needs.
fn takes(item: u64, base: u64) -> bool {
    let Some(unpacked) = Item::unpack(item) else { return false };
    let (first, last) = range(unpacked, base);
    match unpacked.kind {
        ItemKind::Memory => {
            OWN.iter().any(|own| first < own.end >> PAGE_SHIFT && last >= own.start >> PAGE_SHIFT)
        }
        ItemKind::Capability => PROTECTED.iter().any(|&slot| has_slot(item, base, slot)),
        ItemKind::Port => false,
    }
}

/// Returns whether the item has a capability slot.
fn has_slot(item: u64, base: u64, slot: u64) -> bool {
    let Some(item) = Item::unpack(item) else { return false };
    let (first, last) = range(item, base);
    item.kind == ItemKind::Capability && (first..=last).contains(&slot)
}

/// Returns the first and last unit of an item.
fn range(item: Item, base: u64) -> (u64, u64) {
    let count = 1u64 << item.order;
    let first = base & !(count - 1);
    (first, first.saturating_add(count - 1))
}
