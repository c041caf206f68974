//! Several processors: all start, have ids and clocks, get messages of all kinds, sleep and are
//! woken, and can be started again. Where there is KVM's paravirtual interface: messages by
//! hypercall, and records of stolen time. Passes with one processor too.
#![no_std]
#![no_main]

use core::hint::spin_loop;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use guests_micro::smp::{self, Counters, MOST};
use guests_micro::trap::{NMI, TrapFrame};
use guests_micro::{apic, boot, check, cpu, guest, println};
use hw_x86::apic::local;
use hw_x86::cpuid::{features_c, kvm_a, leaf};
use hw_x86::kvm::{hypercall, steal_time};
use hw_x86::msr::kvm;

guest!(main, trap);

/// Counted.
const PLAIN: u8 = 0x40;
/// The receiver answers with `REPLY`.
const PING: u8 = 0x41;
/// The receiver takes note of the round and counts down [`LEFT`]; the last one answers with
/// `REPLY`.
const SHOOTDOWN: u8 = 0x42;
/// The receiver switches to x2APIC mode.
const SWITCH: u8 = 0x43;
const REPLY: u8 = 0x44;
/// The receiver reports its steal-time record ([`STATES`]).
const LOOK: u8 = 0x45;

const ROUNDS: u32 = 10_000;
/// Rounds in xAPIC mode, which takes more work, if there is x2APIC mode.
const FEW_ROUNDS: u32 = 1_000;
/// Rounds in which the sender spins: where processors share one, each costs a time slice.
const SPINNING_ROUNDS: u32 = 20;
/// Time limit in ticks for an expected event.
const PATIENCE: u64 = 20_000_000_000;
/// Long enough for what must not come.
const MOMENT: u64 = 20_000_000;
const BROADCAST: u32 = u32::MAX;
/// Command: also to the sender.
const ALL: u32 = 2 << 18;

static BEGUN: Counters = Counters::new();
static WOKEN: Counters = Counters::new();
static PLAINS: Counters = Counters::new();
static NMIS: Counters = Counters::new();
static SWITCHED: Counters = Counters::new();
static REPLIES: AtomicU32 = AtomicU32::new(0);
static STATES: AtomicU32 = AtomicU32::new(0);
static ROUND: AtomicU32 = AtomicU32::new(0);
static SEEN: [AtomicU32; MOST] = [const { AtomicU32::new(0) }; MOST];
static LEFT: AtomicU32 = AtomicU32::new(0);
static REPLY_WANTED: AtomicBool = AtomicBool::new(false);
static IDS: [AtomicU32; MOST] = [const { AtomicU32::new(0) }; MOST];
static TIMES: [Times; MOST] =
    [const { Times { tsc: AtomicU64::new(0), clock: AtomicU64::new(0) } }; MOST];

/// Clock readings of a vCPU.
struct Times {
    tsc: AtomicU64,
    /// Nanoseconds of the paravirtual clock, 0 without one.
    clock: AtomicU64,
}

fn trap(frame: &mut TrapFrame) {
    match frame.vector() {
        NMI => return NMIS.count(),
        PLAIN => PLAINS.count(),
        PING => apic::send(IDS[0].load(SeqCst), u32::from(REPLY) | local::ICR_ASSERT),
        SHOOTDOWN => {
            SEEN[smp::index()].store(ROUND.load(SeqCst), SeqCst);
            if LEFT.fetch_sub(1, SeqCst) == 1 && REPLY_WANTED.load(SeqCst) {
                apic::send(IDS[0].load(SeqCst), u32::from(REPLY) | local::ICR_ASSERT);
            }
        }
        SWITCH => {
            apic::end_of_interrupt();
            check!(apic::switch_to_x2apic().is_ok(), "a processor cannot enter x2APIC mode");
            return SWITCHED.count();
        }
        LOOK => STATES.store(RECORDS[smp::index()].state().load(SeqCst), SeqCst),
        REPLY => {
            REPLIES.fetch_add(1, SeqCst);
        }
        _ => guests_micro::trap::unexpected(frame),
    }
    apic::end_of_interrupt();
}

/// Program of every vCPU but the first.
fn other() -> ! {
    apic::enable();
    let index = smp::index();
    IDS[index].store(apic::id(), SeqCst);
    read_clocks(index);
    RECORDS[index].name();
    BEGUN.count();
    loop {
        cpu::enable_and_halt();
        cpu::disable_interrupts();
        WOKEN.count();
    }
}

fn main() {
    apic::enable();
    let first = apic::id();
    IDS[0].store(first, SeqCst);
    let mut ids = [first; MOST];
    let mut count = 1;
    for id in boot::processors().map(u32::from).filter(|&id| id != first).take(MOST - 1) {
        ids[count] = id;
        count += 1;
    }
    let ids = &ids[..count];
    println!("smp: {count} processors");
    for (index, &id) in ids.iter().enumerate().skip(1) {
        start(index, id, 1);
    }
    messages(ids, "xAPIC");
    by_hypercall(ids);
    flushes(ids);
    let x2apic = cpu::cpuid(leaf::FEATURES, 0).ecx & features_c::X2APIC != 0;
    let rounds = if x2apic { FEW_ROUNDS } else { ROUNDS };
    ping_pong(ids, rounds);
    shootdowns(ids, rounds);
    restart(ids);
    if x2apic {
        for (index, &id) in ids.iter().enumerate().skip(1) {
            apic::send(id, u32::from(SWITCH) | local::ICR_ASSERT);
            check!(SWITCHED.reaches(index, 1, PATIENCE), "processor {index} does not switch");
        }
        check!(apic::enter_x2apic().is_ok(), "the first processor cannot enter x2APIC mode");
        messages(ids, "x2APIC");
        by_hypercall(ids);
        ping_pong(ids, FEW_ROUNDS);
        shootdowns(ids, ROUNDS);
    }
    println!("smp: {count} processors work together");
}

/// Starts a processor for the `times`th time, and looks at what it says about itself.
fn start(index: usize, id: u32, times: u32) {
    let before = read_clocks(0);
    smp::start(index, id, other);
    check!(BEGUN.reaches(index, times, PATIENCE), "processor {index} stops on its way");
    let there = IDS[index].load(SeqCst);
    check!(there == id, "processor {index} has APIC id {there} instead of {id}");
    let tsc = TIMES[index].tsc.load(SeqCst);
    let clock = TIMES[index].clock.load(SeqCst);
    let after = read_clocks(0);
    check!((before.0..=after.0).contains(&tsc), "TSC of {index}: {before:?} {tsc} {after:?}");
    check!((before.1..=after.1).contains(&clock), "clock of {index}: {before:?} {clock} {after:?}");
}

/// Fixed interrupts and NMIs to each and to all.
fn messages(ids: &[u32], mode: &str) {
    let count = ids.len();
    let fixed = u32::from(PLAIN) | local::ICR_ASSERT;
    let nmi = local::DELIVER_NMI | local::ICR_ASSERT;
    let mut expected: [u32; MOST] = core::array::from_fn(|index| PLAINS.get(index));
    let mut nmis: [u32; MOST] = core::array::from_fn(|index| NMIS.get(index));
    for (index, &id) in ids.iter().enumerate().skip(1) {
        let woken = WOKEN.get(index);
        apic::send(id, fixed);
        expected[index] += 1;
        all_there(&PLAINS, &expected[..count], mode);
        check!(smp::wait(PATIENCE, || WOKEN.get(index) > woken), "{mode}: {index} sleeps on");
        apic::send(id, nmi);
        nmis[index] += 1;
        all_there(&NMIS, &nmis[..count], mode);
    }
    for round in 0..100 {
        let command = if round % 2 == 0 { local::ICR_ALL_OTHERS } else { ALL };
        let from = usize::from(command != ALL);
        apic::send(0, command | fixed);
        cpu::take_interrupts();
        expected[from..count].iter_mut().for_each(|expected| *expected += 1);
        all_there(&PLAINS, &expected[..count], mode);
        apic::send(0, local::ICR_ALL_OTHERS | nmi);
        nmis[1..count].iter_mut().for_each(|expected| *expected += 1);
        all_there(&NMIS, &nmis[..count], mode);
    }
    // The broadcast address means the sender, too.
    apic::send(BROADCAST, fixed);
    cpu::take_interrupts();
    expected[..count].iter_mut().for_each(|expected| *expected += 1);
    all_there(&PLAINS, &expected[..count], mode);
}

/// Fixed interrupts and NMIs by hypercall: to each, to all, to none.
fn by_hypercall(ids: &[u32]) {
    if cpu::kvm_features() & kvm_a::PV_SEND_IPI == 0 {
        return;
    }
    let send = |set: u128, first: u32, command: u32| {
        let words = [(set >> 64) as u64, first.into(), command.into(), 0, 0];
        cpu::hypercall_with(hypercall::SEND_IPI, set as u64, words).0 as i64
    };
    let mut expected: [u32; MOST] = core::array::from_fn(|index| PLAINS.get(index));
    let mut nmis: [u32; MOST] = core::array::from_fn(|index| NMIS.get(index));
    let lowest = ids.iter().copied().min().unwrap_or(0);
    let all = ids.iter().fold(0, |set, id| set | 1 << (id - lowest));
    for round in 0..100 {
        // Also to the sender, and by turns from the lowest id on and from below.
        let first = if lowest > 0 && round % 2 == 0 { lowest - 1 } else { lowest };
        let sent = send(all << (lowest - first), first, PLAIN.into());
        check!(sent == ids.len() as i64, "{sent} processors get an interrupt");
        cpu::take_interrupts();
        expected[..ids.len()].iter_mut().for_each(|expected| *expected += 1);
        all_there(&PLAINS, &expected[..ids.len()], "hypercall");
    }
    for (index, &id) in ids.iter().enumerate() {
        let sent = send(1, id, local::DELIVER_NMI);
        check!(sent == 1, "{sent} processors get an NMI");
        nmis[index] += 1;
        all_there(&NMIS, &nmis[..ids.len()], "hypercall");
    }
    let sent = send(0, lowest, PLAIN.into());
    check!(sent == 0, "{sent} processors get what is for none");
    for command in [local::ICR_ALL_OTHERS | u32::from(PLAIN), local::ICR_LOGICAL | u32::from(PLAIN)]
    {
        let sent = send(1, lowest, command);
        check!(sent == hypercall::INVALID, "command {command:#x} gives {sent}");
    }
    all_there(&PLAINS, &expected[..ids.len()], "hypercall");
}

/// A record of stolen time.
#[repr(C, align(64))]
struct Record([AtomicU32; steal_time::LENGTH as usize / 4]);
static RECORDS: [Record; MOST] = [const { Record([const { AtomicU32::new(0) }; _]) }; MOST];

impl Record {
    /// Names it to the hypervisor, for the processor that asks, if that knows such a thing.
    fn name(&self) {
        const ENABLE: u64 = 1;
        if cpu::kvm_features() & kvm_a::STEAL_TIME != 0 {
            let address = self.0.as_ptr().addr() as u64;
            // SAFETY: the record is the hypervisor's from now on, and holds atomics only.
            let named = unsafe { cpu::write_msr(kvm::STEAL_TIME, address | ENABLE) };
            check!(named.is_ok(), "no record of stolen time: {named:?}");
        }
    }

    /// Running state in the record.
    fn state(&self) -> &AtomicU32 {
        &self.0[steal_time::STATE as usize / 4]
    }

    /// The stolen time.
    fn stolen(&self) -> u64 {
        let version = &self.0[steal_time::VERSION as usize / 4];
        let half =
            |index: usize| u64::from(self.0[steal_time::STEAL as usize / 4 + index].load(SeqCst));
        loop {
            let before = version.load(SeqCst);
            let value = half(0) | half(1) << 32;
            if before.is_multiple_of(2) && version.load(SeqCst) == before {
                return value;
            }
        }
    }
}

/// A processor that sleeps says so in its record; what others want of its TLB it finds there when
/// it is woken.
fn flushes(ids: &[u32]) {
    if cpu::kvm_features() & kvm_a::PV_TLB_FLUSH == 0 {
        return;
    }
    for (record, &id) in RECORDS.iter().zip(ids).skip(1) {
        let state = record.state();
        let mut stolen = 0;
        for _ in 0..100 {
            let sleeps = smp::wait(PATIENCE, || state.load(SeqCst) == steal_time::PREEMPTED);
            check!(sleeps, "{id} sleeps, but its record says {}", state.load(SeqCst));
            let wish = steal_time::PREEMPTED | steal_time::FLUSH_TLB;
            let asked = state.compare_exchange(steal_time::PREEMPTED, wish, SeqCst, SeqCst);
            check!(asked.is_ok(), "{id} wakes up by itself: {asked:?}");
            STATES.store(u32::MAX, SeqCst);
            apic::send(id, u32::from(LOOK) | local::ICR_ASSERT);
            let looked = smp::wait(PATIENCE, || STATES.load(SeqCst) != u32::MAX);
            check!(
                looked && STATES.load(SeqCst) == 0,
                "{id} runs in state {:#x}",
                STATES.load(SeqCst)
            );
            check!(record.stolen() >= stolen, "stolen time of {id} goes back");
            stolen = record.stolen();
        }
    }
}

/// Waits until the counts are these, and checks that none is more a moment later.
fn all_there(counters: &Counters, expected: &[u32], mode: &str) {
    for (index, &expected) in expected.iter().enumerate() {
        let there = counters.reaches(index, expected, PATIENCE);
        check!(there, "{mode}: {index} counts {} of {expected}", counters.get(index));
    }
    for (index, &expected) in expected.iter().enumerate() {
        let count = counters.get(index);
        check!(count == expected, "{mode}: {index} counts {count} instead of {expected}");
    }
}

/// Sleeps until `replies` answers have come.
fn sleep_until(replies: u32) {
    while REPLIES.load(SeqCst) < replies {
        cpu::enable_and_halt();
        cpu::disable_interrupts();
    }
    check!(REPLIES.load(SeqCst) == replies, "{} replies", REPLIES.load(SeqCst));
}

/// Messages there and back, both sides asleep in between.
fn ping_pong(ids: &[u32], rounds: u32) {
    REPLIES.store(0, SeqCst);
    for (round, &id) in (1..=rounds).zip(ids[1..].iter().cycle()) {
        apic::send(id, u32::from(PING) | local::ICR_ASSERT);
        sleep_until(round);
    }
}

/// All other vCPUs do something at once, and the first vCPU continues when all have.
fn shootdowns(ids: &[u32], rounds: u32) {
    let others = ids.len() as u32 - 1;
    if others == 0 {
        return;
    }
    REPLIES.store(0, SeqCst);
    for round in 1..=rounds {
        let spins = round > rounds - SPINNING_ROUNDS;
        ROUND.store(round, SeqCst);
        LEFT.store(others, SeqCst);
        REPLY_WANTED.store(!spins, SeqCst);
        apic::send(0, u32::from(SHOOTDOWN) | local::ICR_ASSERT | local::ICR_ALL_OTHERS);
        if spins {
            while LEFT.load(SeqCst) != 0 {
                spin_loop();
            }
        } else {
            sleep_until(round);
        }
        for (index, seen) in SEEN[..ids.len()].iter().enumerate().skip(1) {
            check!(seen.load(SeqCst) == round, "round {round} not seen by {index}");
        }
    }
}

/// A processor that gets INIT is deaf until it is started again, and then as good as new.
fn restart(ids: &[u32]) {
    let index = ids.len() - 1;
    if index == 0 {
        return;
    }
    for times in 2..5 {
        let id = ids[index];
        let heard = PLAINS.get(index);
        smp::stop(id);
        apic::send(id, u32::from(PLAIN) | local::ICR_ASSERT);
        let came = smp::wait(MOMENT, || PLAINS.get(index) != heard);
        check!(!came, "processor {index} hears what it must not");
        start(index, id, times);
    }
    // All vCPUs have arrived.
    messages(ids, "restarted");
}

/// Notes what the clocks of processor `index`, the one that asks, say.
fn read_clocks(index: usize) -> (u64, u64) {
    let clock = read_clock(index);
    let tsc = cpu::tsc();
    TIMES[index].tsc.store(tsc, SeqCst);
    TIMES[index].clock.store(clock, SeqCst);
    (tsc, clock)
}

/// `struct pvclock_vcpu_time_info` (Linux, `Documentation/virt/kvm/x86/msr.rst`).
#[repr(C, align(64))]
struct ClockPage([AtomicU64; 4]);
static CLOCKS: [ClockPage; MOST] = [const { ClockPage([const { AtomicU64::new(0) }; 4]) }; MOST];

/// Nanoseconds by the paravirtual clock of processor `index`, 0 if there is none.
fn read_clock(index: usize) -> u64 {
    const ENABLE: u64 = 1;
    if cpu::kvm_features() & kvm_a::CLOCKSOURCE2 == 0 {
        return 0;
    }
    let page = &CLOCKS[index].0;
    let address = page.as_ptr().addr() as u64;
    // SAFETY: the structure is the hypervisor's from now on, and holds atomics only.
    let asked = unsafe { cpu::write_msr(kvm::SYSTEM_TIME, address | ENABLE) };
    check!(asked.is_ok(), "no paravirtual clock: {asked:?}");
    // Version, padding; TSC; nanoseconds then; factor and shift. Written only by the request above.
    let (tsc, nanos) = (page[1].load(SeqCst), page[2].load(SeqCst));
    let scale = page[3].load(SeqCst);
    let (factor, shift) = (scale as u32, (scale >> 32) as i8);
    let passed = u128::from(cpu::tsc() - tsc);
    let scaled = if shift < 0 { passed >> shift.unsigned_abs() } else { passed << shift };
    nanos + ((scaled * u128::from(factor)) >> 32) as u64
}
