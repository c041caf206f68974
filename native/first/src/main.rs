//! Root of a system that consists of it alone. It checks the kernel from inside on AArch64: time,
//! threads on all CPUs, notifications, gates on one CPU and across CPUs, mappings, faults,
//! privileged instructions, guests. It prints `CHECK first ok` and resets the machine.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

mod guest;
mod guest32;

use core::sync::atomic::{AtomicU64, Ordering};

use abi::boot::slot;
use abi::{PAGE_SIZE, Status, rights};
use native_rt::start::Boot;
use native_rt::thread::{self, Stack, ThreadResources, spawn};
use native_rt::{
    Factory, Gate, Incoming, Message, Notification, Platform, Window, error, info, map_alias,
    probe, reply_wait, time, wait, yield_now,
};
use spin::Once;

/// Most CPUs on which threads are started: a program has eight threads at most.
const MAX_CPUS: usize = 4;
const STACK: usize = 4 * PAGE_SIZE as usize;
/// Priority and time slice of the threads.
const PRIORITY: u8 = 10;
const TIME_SLICE_NS: u64 = 1_000_000;
/// Times that must pass.
const SLEEP_NS: u64 = 20_000_000;
const PATIENCE_NS: u64 = 10_000_000_000;
/// Pauses in which each CPU of an emulator on a busy host executes something.
const PAUSES: u32 = 20;
const CALLS: u64 = 2000;
const BADGE: u64 = 0x77;
/// Offset of the alias of a page in the range for received memory.
const ALIAS: u64 = 0;

static STACKS: [Stack<STACK>; MAX_CPUS] = [const { Stack::new() }; MAX_CPUS];
static SERVER_STACKS: [Stack<STACK>; MAX_CPUS] = [const { Stack::new() }; MAX_CPUS];
static READER_STACK: Stack<STACK> = Stack::new();
static HOSTILE_STACK: Stack<STACK> = Stack::new();
/// Privileged instructions that a thread has come to, and those after which it has continued.
static ATTEMPTS: AtomicU64 = AtomicU64::new(0);
static SURVIVALS: AtomicU64 = AtomicU64::new(0);

/// Slot of the notification that all threads signal.
const DONE: u64 = slot::FREE;
/// Memory that the reader reads, and how often it has.
static READ_AT: Once<Window> = Once::new();
static READS: AtomicU64 = AtomicU64::new(0);

native_rt::root_entry!(main);

fn main(boot: Boot) -> ! {
    match check(&boot) {
        Ok(()) => info!("CHECK first ok"),
        Err((what, status)) => error!("CHECK first FAIL {what}: {status:?}"),
    }
    let platform = Platform::at(slot::PLATFORM);
    native_rt::log::flush(platform);
    let _ = platform.reset();
    loop {
        yield_now();
    }
}

type Outcome<T = ()> = Result<T, (&'static str, Status)>;

/// Names what has failed.
trait Named<T> {
    fn named(self, what: &'static str) -> Outcome<T>;
}

impl<T> Named<T> for Result<T, Status> {
    fn named(self, what: &'static str) -> Outcome<T> {
        self.map_err(|status| (what, status))
    }
}

fn ensure(holds: bool, what: &'static str) -> Outcome {
    if holds { Ok(()) } else { Err((what, Status::Ok)) }
}

/// Hands out slots.
struct Slots(u64);

impl Slots {
    fn next(&mut self) -> u64 {
        self.0 += 1;
        self.0
    }

    /// Resources of a thread on this CPU.
    fn thread(&mut self, cpu: u32) -> Outcome<ThreadResources> {
        let factory = Factory::at(slot::FACTORY);
        let sched = factory.sched_context(self.next(), PRIORITY, TIME_SLICE_NS, 0);
        let sched = sched.named("scheduling context")?;
        Ok(ThreadResources { factory, task: slot::TASK, slot: self.next(), cpu, sched })
    }
}

fn check(boot: &Boot) -> Outcome {
    let info = boot.info;
    let memory: u64 = boot.ram().map(|(_, window)| window.length()).sum();
    info!("{} CPUs, {} MiB, counter {} kHz", info.cpus, memory >> 20, info.tsc_khz);
    let done = Factory::at(slot::FACTORY).notification(DONE).named("notification")?;
    let mut slots = Slots(DONE);
    let khz = info.tsc_khz;
    let cpus = (info.cpus as usize).min(MAX_CPUS) as u32;
    sleep(done, khz)?;
    threads(&mut slots, done, cpus, khz)?;
    for cpu in 0..cpus {
        calls(&mut slots, cpu, khz)?;
    }
    let (_, ram) =
        boot.ram().max_by_key(|(_, window)| window.length()).ok_or(("RAM", Status::Ok))?;
    guest::check(&mut slots, boot, ram, khz)?;
    guest32::check(&mut slots, boot, ram)?;
    privileged(&mut slots, cpus - 1, khz)?;
    mapping(&mut slots, ram, cpus - 1, khz)
}

/// Lets threads of lower priority run.
fn pause(khz: u64) {
    let _ = Notification::at(DONE).wait(time::tsc() + time::ticks(khz, SLEEP_NS));
}

/// A deadline passes, not too early.
fn sleep(done: Notification, khz: u64) -> Outcome {
    let start = time::tsc();
    let ended = done.wait(start + time::ticks(khz, SLEEP_NS));
    ensure(ended == Err(Status::Timeout), "a wait with a deadline ends by it")?;
    let passed = time::nanos(khz, time::tsc() - start);
    ensure((SLEEP_NS - 1000..SLEEP_NS * 50).contains(&passed), "a deadline passes in time")
}

/// A thread on each CPU runs beside busy ones, and signals.
fn threads(slots: &mut Slots, done: Notification, cpus: u32, khz: u64) -> Outcome {
    let mut threads = [None; MAX_CPUS];
    for (cpu, (place, stack)) in (0..cpus).zip(threads.iter_mut().zip(&STACKS)) {
        let resources = slots.thread(cpu)?;
        *place = Some(spawn(resources, stack, signal_done, cpu.into()).named("thread")?);
    }
    let (mut seen, all) = (0, (1 << cpus) - 1);
    let end = time::tsc() + time::ticks(khz, PATIENCE_NS);
    while seen != all {
        seen |= done.wait(end).named("threads on all CPUs signal")?;
    }
    for thread in threads.into_iter().flatten() {
        thread.stop().named("stop of a busy thread")?;
    }
    ensure(seen == all, "each thread signals its bit")
}

extern "C" fn signal_done(index: u64) -> ! {
    let _ = Notification::at(DONE).signal(1 << index);
    loop {
        yield_now();
    }
}

/// Calls a server on a CPU; it adds its badge to the words.
fn calls(slots: &mut Slots, cpu: u32, khz: u64) -> Outcome {
    let factory = Factory::at(slot::FACTORY);
    let resources = slots.thread(cpu)?;
    let stack = &SERVER_STACKS[cpu as usize];
    let server = spawn(resources, stack, serve, 0).named("server")?;
    let gate = factory.gate(slots.next(), server, BADGE).named("gate")?;
    let start = time::tsc();
    for round in 0..CALLS {
        let words = [round, !round, cpu.into(), round << 32];
        let reply = call(gate, words)?;
        let expected = words.map(|word| word.wrapping_add(BADGE));
        ensure(reply == expected, "a reply has what the server sent")?;
    }
    let each = time::nanos(khz, time::tsc() - start) / CALLS;
    info!("call of a server on CPU {cpu}: {each} ns");
    server.stop().named("stop")?;
    let after = gate.call(Message::new(0, [0; 4])).err();
    ensure(after.is_some(), "a stopped server does not answer")
}

fn call(gate: Gate, words: [u64; 4]) -> Outcome<[u64; 4]> {
    gate.call(Message::new(1, words)).map(|reply| reply.words).named("call")
}

extern "C" fn serve(_argument: u64) -> ! {
    let mut incoming = wait();
    loop {
        incoming = match incoming {
            Ok(Incoming::Call(badge, message)) => {
                let words = message.words.map(|word| word.wrapping_add(badge));
                reply_wait(Message::new(0, words))
            }
            _ => wait(),
        };
    }
}

/// A thread that executes a privileged instruction is stopped at it, and nothing else happens.
fn privileged(slots: &mut Slots, cpu: u32, khz: u64) -> Outcome {
    let thread = spawn(slots.thread(cpu)?, &HOSTILE_STACK, execute, u64::MAX).named("thread")?;
    for index in 0..probe::PRIVILEGED.len() as u64 {
        thread::restart(thread, &HOSTILE_STACK, execute, index).named("restart")?;
        let end = time::tsc() + time::ticks(khz, PATIENCE_NS);
        while ATTEMPTS.load(Ordering::Relaxed) <= index {
            ensure(time::tsc() < end, "a thread comes to a privileged instruction")?;
            pause(khz);
        }
        pause(khz);
        if SURVIVALS.load(Ordering::Relaxed) != 0 {
            error!("executed: {}", probe::PRIVILEGED[index as usize]);
        }
        ensure(
            SURVIVALS.load(Ordering::Relaxed) == 0,
            "no task executes a privileged instruction",
        )?;
    }
    info!("{} privileged instructions refused", probe::PRIVILEGED.len());
    Ok(())
}

extern "C" fn execute(index: u64) -> ! {
    if index != u64::MAX {
        ATTEMPTS.fetch_add(1, Ordering::Relaxed);
        probe::privileged(index as usize);
        SURVIVALS.fetch_add(1, Ordering::Relaxed);
    }
    loop {
        yield_now();
    }
}

/// A page that was unmapped is unmapped on all CPUs, at once.
fn mapping(slots: &mut Slots, ram: Window, cpu: u32, khz: u64) -> Outcome {
    let page = ram.part(0, PAGE_SIZE).ok_or(("a page of RAM", Status::Ok))?;
    ensure(page.write(0, &[0xa5; 8]), "a page can be written")?;
    let alias = map_alias([page].into_iter(), ALIAS, rights::READ).named("alias")?;
    let mut bytes = [0; 8];
    ensure(alias.read(0, &mut bytes) && bytes == [0xa5; 8], "an alias has the same bytes")?;
    READ_AT.call_once(|| alias);
    let reader = spawn(slots.thread(cpu)?, &READER_STACK, read_always, 0).named("reader")?;
    let end = time::tsc() + time::ticks(khz, PATIENCE_NS);
    while READS.load(Ordering::Relaxed) < 1000 {
        ensure(time::tsc() < end, "a thread on another CPU reads the alias")?;
        pause(khz);
    }
    page.revoke().named("revoke")?;
    let count = READS.load(Ordering::Relaxed);
    (0..PAUSES).for_each(|_| pause(khz));
    // One read may have been counted after the revocation.
    ensure(READS.load(Ordering::Relaxed) <= count + 1, "no CPU reads a page that was revoked")?;
    // The kernel has stopped it already, and logged why.
    let _ = reader.stop();
    ensure(page.write(0, &[1; 8]), "the original remains")
}

extern "C" fn read_always(_argument: u64) -> ! {
    let mut byte = [0];
    loop {
        if let Some(page) = READ_AT.get() {
            // What it holds does not matter.
            let _ = page.read(0, &mut byte);
        }
        READS.fetch_add(1, Ordering::Relaxed);
    }
}
