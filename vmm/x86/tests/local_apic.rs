//! Scripts for the local APIC.

use proptest::prelude::*;
use vmm_bus::Nanos;
use vmm_bus::testing::Script;
use vmm_x86::apic::InterruptMessage;
use vmm_x86::apic::local::{Config, Events, Fault, LocalApic, Mode, spec::*};

const SECOND: Nanos = 1_000_000_000;
const MSR_EOI: u32 = X2APIC + EOI / 16;
const MSR_ICR: u32 = X2APIC + ICR_LOW / 16;

fn config(id: u32) -> Config {
    Config { id, bsp: id == 0, tsc_khz: 2_500_000, tsc_at_zero: 1000, physical_bits: 48 }
}

fn message(destination: u32, delivery: u8, vector: u8) -> InterruptMessage {
    InterruptMessage { destination, logical: false, delivery, vector, level: false }
}

/// An APIC that accepts interrupts, in xAPIC mode.
fn xapic(id: u32) -> (Script, LocalApic) {
    let (mut env, mut apic) = (Script::new(), LocalApic::new(config(id)));
    env.outl(&mut apic, SVR.into(), SVR_ENABLE | 0xff);
    (env, apic)
}

/// The same in x2APIC mode.
fn x2apic(id: u32) -> (Script, LocalApic) {
    let (mut env, mut apic) = xapic(id);
    let base = apic.read_msr(APIC_BASE, &env).unwrap();
    apic.write_msr(APIC_BASE, base | BASE_X2APIC, &mut env).unwrap();
    (env, apic)
}

#[test]
fn after_power_on() {
    let (mut env, mut apic) = (Script::new(), LocalApic::new(config(3)));
    assert_eq!(env.inl(&mut apic, ID.into()), 3 << 24);
    assert_eq!(env.inl(&mut apic, VERSION.into()), VERSION_VALUE);
    assert_eq!(env.inl(&mut apic, SVR.into()), 0xff);
    assert_eq!(env.inl(&mut apic, DFR.into()), u32::MAX);
    assert_eq!(env.inl(&mut apic, LVT_LINT0.into()), LVT_MASKED);
    assert_eq!(apic.read_msr(APIC_BASE, &env), Ok(BASE_ADDRESS | BASE_ENABLE));
    assert!(!apic.deliver(&message(3, FIXED, 0x40)), "disabled by software");
    assert!(apic.deliver(&message(3, NMI, 0)), "but not deaf");
    assert!(!apic.accepts_pic());
    apic.virtual_wire();
    assert!(apic.accepts_pic());
    apic.take_events();
    apic.set_lint(1, true);
    apic.set_lint(1, true);
    apic.set_lint(7, true);
    assert_eq!(apic.take_events(), Events { nmi: true, ..Events::default() });
    assert!(!apic.has_events());
}

#[test]
fn priorities_and_nesting() {
    let (mut env, mut apic) = xapic(0);
    for vector in [0x31, 0x52, 0x51] {
        assert!(apic.deliver(&message(0, FIXED, vector)));
    }
    assert!(!apic.deliver(&message(0, FIXED, 0x31)), "requested already");
    assert_eq!(apic.pending(), Some(0x52));
    assert!(!apic.will_eoi_be_elidable(0x52), "others wait");
    apic.accept(0x52);
    assert!(!apic.is_eoi_elidable(), "others wait");
    assert_eq!(env.inl(&mut apic, PPR.into()), 0x50);
    assert_eq!(apic.pending(), None, "0x51 is of the same class");
    apic.set_tpr(0x70);
    assert!(!apic.is_masked_by_priority(), "it waits for the EOI of the interrupt in service, too");
    apic.set_tpr(0);
    apic.deliver(&message(0, FIXED, 0x61));
    assert_eq!(apic.pending(), Some(0x61));
    apic.accept(0x61);
    assert_eq!(env.inl(&mut apic, (ISR + 0x20).into()), 1 << (0x52 & 31));
    assert_eq!(env.inl(&mut apic, (ISR + 0x30).into()), 1 << (0x61 & 31));
    assert_eq!((apic.eoi(), apic.eoi()), (None, None), "edges are not broadcast");
    assert_eq!(apic.pending(), Some(0x51));
    env.outl(&mut apic, TPR.into(), 0x5f);
    assert_eq!((apic.pending(), apic.cr8(), apic.ppr()), (None, 5, 0x5f));
    assert!(apic.is_masked_by_priority() && apic.has_pending());
    assert!(apic.take_events().priority, "a CPU with virtual CR8 must be updated");
    apic.set_cr8(4);
    assert!(!apic.is_masked_by_priority() && !apic.take_events().priority);
    assert_eq!((apic.pending(), apic.tpr()), (Some(0x51), 0x40));
    assert_eq!(env.inl(&mut apic, APR.into()), 0x50);
    apic.accept(0x77);
    assert_eq!(apic.ppr(), 0x40, "only what was requested can be accepted");
}

#[test]
fn level_triggered_vectors_are_broadcast_at_their_end() {
    let (mut env, mut apic) = xapic(0);
    let level = InterruptMessage { level: true, ..message(0, FIXED, 0x41) };
    apic.deliver(&level);
    apic.accept(0x41);
    assert!(!apic.is_eoi_elidable());
    assert_eq!(env.inl(&mut apic, (TMR + 0x20).into()), 1 << 1);
    env.outl(&mut apic, EOI.into(), 0);
    assert_eq!(apic.take_events().eoi, Some(0x41));
    env.outl(&mut apic, SVR.into(), SVR_ENABLE | SVR_NO_BROADCAST | 0xff);
    apic.deliver(&level);
    apic.accept(0x41);
    assert_eq!(apic.eoi(), None);
    apic.deliver(&message(0, FIXED, 0x41));
    assert_eq!(env.inl(&mut apic, (TMR + 0x20).into()), 0);
}

#[test]
fn modes_and_their_transitions() {
    let (mut env, mut apic) = xapic(5);
    let base = apic.read_msr(APIC_BASE, &env).unwrap();
    let off = base & !BASE_ENABLE;
    let x2 = base | BASE_X2APIC;
    let mut write = |apic: &mut LocalApic, value| apic.write_msr(APIC_BASE, value, &mut env);
    for reserved in [1, 1 << 9, 1 << 48] {
        assert_eq!(write(&mut apic, base | reserved), Err(Fault));
    }
    assert_eq!(write(&mut apic, off | BASE_X2APIC), Err(Fault), "x2APIC without enable");
    assert_eq!(write(&mut apic, x2), Ok(()));
    assert_eq!(apic.mode(), Mode::X2Apic);
    assert_eq!(write(&mut apic, base), Err(Fault), "x2APIC to xAPIC");
    assert_eq!(write(&mut apic, off | BASE_X2APIC), Err(Fault), "x2APIC without enable");
    assert_eq!(write(&mut apic, off), Ok(()));
    assert_eq!(apic.mode(), Mode::Disabled);
    assert!(apic.accepts_pic());
    assert_eq!(write(&mut apic, x2), Err(Fault), "disabled to x2APIC");
    assert_eq!(write(&mut apic, base | 0x1000), Ok(()));
    assert_eq!((apic.mode(), apic.base()), (Mode::XApic, BASE_ADDRESS | 0x1000));
    assert_eq!(write(&mut apic, base | BASE_BSP), Ok(()));
    assert_eq!(apic.read_msr(APIC_BASE, &env), Ok(base), "the BSP bit stays");
    assert_eq!(apic.read_msr(MSR_EOI, &env), Err(Fault), "x2APIC registers in xAPIC mode");
}

#[test]
fn memory_answers_in_xapic_mode_only() {
    let (mut env, mut apic) = x2apic(1);
    assert_eq!(env.inl(&mut apic, VERSION.into()), u32::MAX);
    env.outl(&mut apic, TPR.into(), 0xff);
    assert_eq!(apic.tpr(), 0);
}

#[test]
fn x2apic_registers_check_their_values() {
    let (mut env, mut apic) = x2apic(0x123);
    let msr = |register: u32| X2APIC + register / 16;
    assert_eq!(apic.read_msr(msr(ID), &env), Ok(0x123));
    assert_eq!(apic.read_msr(msr(LDR), &env), Ok(0x12 << 16 | 1 << 3));
    for register in [DFR, APR, RRR, EOI, ICR_HIGH, SELF_IPI, EXTENDED] {
        assert_eq!(apic.read_msr(msr(register), &env), Err(Fault), "{register:#x}");
    }
    let refused = [
        (ID, 0),
        (VERSION, 0),
        (LDR, 0),
        (PPR, 0),
        (IRR, 0),
        (TIMER_CURRENT, 0),
        (ICR_HIGH, 0),
        (EOI, 1),
        (ESR, 1),
        (TPR, 0x100),
        (SVR, 1 << 9),
        (LVT_TIMER, 1 << 13),
        (LVT_ERROR, 1 << 8),
        (TIMER_DIVIDE, 4),
        (TIMER_INITIAL, 1 << 32),
        (SELF_IPI, 0x100),
        (ICR_LOW, 1 << 20),
    ];
    for (register, value) in refused {
        assert_eq!(apic.write_msr(msr(register), value, &mut env), Err(Fault), "{register:#x}");
    }
    assert_eq!(apic.write_msr(msr(TPR), 0x30, &mut env), Ok(()));
    assert_eq!(apic.tpr(), 0x30);
    assert_eq!(apic.write_msr(msr(SELF_IPI), 0x45, &mut env), Ok(()));
    assert_eq!(apic.pending(), Some(0x45));
    assert!(apic.will_eoi_be_elidable(0x45) && !apic.will_eoi_be_elidable(0x46));
    apic.accept(0x45);
    assert!(apic.is_eoi_elidable() && !apic.will_eoi_be_elidable(0x45));
    assert_eq!(apic.write_msr(MSR_EOI, 0, &mut env), Ok(()));
    assert_eq!(apic.ppr(), 0x30);
    assert_eq!(apic.write_msr(0x10, 0, &mut env), Err(Fault));
}

#[test]
fn a_request_that_the_processor_takes_by_itself() {
    let (_, mut apic) = xapic(0);
    let again = message(0, FIXED, 0x31);
    assert!(apic.deliver(&again));
    apic.set_offered(Some(0x31));
    // The CPU may have taken the first before the second arrived: it must be notified.
    assert!(apic.deliver(&again));
    apic.accept_offered(0x31);
    assert_eq!(apic.eoi(), None);
    assert_eq!(apic.pending(), Some(0x31));
    // The CPU has not taken it: both requests are one.
    apic.set_offered(Some(0x31));
    assert!(apic.deliver(&again));
    apic.set_offered(Some(0x31));
    apic.accept_offered(0x31);
    assert_eq!((apic.eoi(), apic.pending()), (None, None));
    // The CPU takes the offered request, or another one.
    assert!(apic.deliver(&again) && apic.deliver(&message(0, FIXED, 0x32)));
    apic.set_offered(Some(0x32));
    assert!(!apic.deliver(&again), "it waits still");
    assert!(apic.deliver(&message(0, FIXED, 0x32)));
    apic.set_offered(None);
    apic.accept(0x32);
    assert!(!apic.deliver(&again));
    assert_eq!((apic.eoi(), apic.pending()), (None, Some(0x31)));
}

#[test]
fn destinations() {
    let logical = |destination| InterruptMessage { logical: true, ..message(destination, 0, 0x40) };
    let (mut env, mut apic) = xapic(2);
    assert!(apic.matches(&message(2, FIXED, 0x40)));
    assert!(!apic.matches(&message(3, FIXED, 0x40)));
    assert!(apic.matches(&message(u32::MAX, FIXED, 0x40)));
    assert!(!apic.matches(&logical(0xff)), "no logical id yet");
    env.outl(&mut apic, LDR.into(), 0x24 << 24);
    assert!(apic.matches(&logical(0x04)) && apic.matches(&logical(0xff)));
    assert!(!apic.matches(&logical(0x03)));
    env.outl(&mut apic, DFR.into(), 0);
    assert!(apic.matches(&logical(0x2f)) && apic.matches(&logical(0xf4)));
    assert!(!apic.matches(&logical(0x22)) && !apic.matches(&logical(0x14)));
    let (_, apic) = x2apic(0x23);
    assert!(apic.matches(&logical(0x0002_0008)) && apic.matches(&logical(u32::MAX)));
    assert!(!apic.matches(&logical(0x0001_0008)) && !apic.matches(&logical(0x0002_0004)));
    assert!(!apic.matches(&message(0x123, FIXED, 0x40)));
}

#[test]
fn interrupt_commands() {
    let (mut env, mut apic) = x2apic(1);
    let send =
        |apic: &mut LocalApic, env: &mut Script, destination: u32, low: u32| -> (Vec<_>, _) {
            let value = u64::from(destination) << 32 | u64::from(low);
            apic.write_msr(MSR_ICR, value, env).unwrap();
            assert_eq!(apic.read_msr(MSR_ICR, env), Ok(value));
            (apic.take_message().into_iter().collect(), apic.pending())
        };
    let all = u32::MAX;
    assert_eq!(send(&mut apic, &mut env, 3, 0x41), (vec![message(3, FIXED, 0x41)], None));
    assert_eq!(send(&mut apic, &mut env, 3, DELIVER_NMI).0, [message(3, NMI, 0)]);
    assert_eq!(send(&mut apic, &mut env, 0, 3 << 18 | 0x42).0, [message(all, FIXED, 0x42)]);
    assert_eq!(apic.pending(), None, "all but self");
    let init = DELIVER_INIT | ICR_ASSERT;
    assert_eq!(send(&mut apic, &mut env, 2, init).0, [message(2, INIT, 0)]);
    assert!(send(&mut apic, &mut env, 2, DELIVER_INIT | ICR_LEVEL).0.is_empty(), "de-assertion");
    assert_eq!(send(&mut apic, &mut env, 2, DELIVER_INIT).0, [message(2, INIT, 0)], "an edge");
    assert_eq!(send(&mut apic, &mut env, 2, DELIVER_STARTUP | 8).0, [message(2, STARTUP, 8)]);
    assert_eq!(
        send(&mut apic, &mut env, 0, 2 << 18 | 0x43),
        (vec![message(all, FIXED, 0x43)], Some(0x43))
    );
    assert_eq!(send(&mut apic, &mut env, 0, 1 << 18 | 0x44), (vec![], Some(0x44)));
    assert_eq!(send(&mut apic, &mut env, 1, 0x45), (vec![], Some(0x45)), "its own id");
    // Logical destination: other APICs of the cluster may be targets, too.
    let both = send(&mut apic, &mut env, 6, ICR_LOGICAL | 0x46);
    assert_eq!(
        both,
        (vec![InterruptMessage { logical: true, ..message(6, FIXED, 0x46) }], Some(0x46))
    );
    assert_eq!(send(&mut apic, &mut env, 6, ICR_LOGICAL | 1 << 8 | 0x47), (vec![], Some(0x47)));
    send(&mut apic, &mut env, 1, DELIVER_NMI);
    assert!(apic.take_events().nmi);
    // Illegal vectors and modes are not delivered.
    assert!(send(&mut apic, &mut env, 3, 0x0f).0.is_empty());
    assert!(send(&mut apic, &mut env, 3, 3 << 8).0.is_empty());
    assert!(send(&mut apic, &mut env, 3, 1 << 18 | DELIVER_NMI).0.is_empty());
    assert_eq!(env.missing.len(), 2);
}

#[test]
fn xapic_commands_have_eight_bit_destinations() {
    let (mut env, mut apic) = xapic(0);
    env.outl(&mut apic, ICR_HIGH.into(), 0x02ff_ffff);
    env.outl(&mut apic, ICR_LOW.into(), DELIVER_STARTUP | ICR_PENDING | 0x9a);
    assert_eq!(apic.take_message(), Some(message(2, STARTUP, 0x9a)));
    assert_eq!(env.inl(&mut apic, ICR_LOW.into()), DELIVER_STARTUP | 0x9a, "never pending");
    env.outl(&mut apic, ICR_HIGH.into(), 0xff00_0000);
    env.outl(&mut apic, ICR_LOW.into(), 0x55);
    assert_eq!(apic.take_message(), Some(message(u32::MAX, FIXED, 0x55)));
    assert_eq!(apic.pending(), Some(0x55));
}

#[test]
fn events_of_messages() {
    let (mut env, mut apic) = xapic(1);
    for delivery in [NMI, SMI, INIT, STARTUP, EXT_INT] {
        assert!(apic.deliver(&message(1, delivery, 0x10)));
    }
    assert!(!apic.deliver(&message(1, 3, 0x10)));
    let all = Events {
        nmi: true,
        init: true,
        startup: Some(0x10),
        smi: true,
        ext_int: true,
        ..Events::default()
    };
    assert_eq!(apic.take_events(), all);
    apic.deliver(&message(1, FIXED, 0x80));
    apic.init(&mut env);
    assert_eq!((apic.pending(), apic.id(), apic.mode()), (None, 1, Mode::XApic));
    assert_eq!(env.inl(&mut apic, SVR.into()), 0xff);
}

#[test]
fn errors_are_latched_and_interrupt() {
    let (mut env, mut apic) = xapic(0);
    env.outl(&mut apic, LVT_ERROR.into(), 0xfe);
    env.inl(&mut apic, 0x10);
    assert_eq!(apic.pending(), Some(0xfe));
    assert_eq!(env.inl(&mut apic, ESR.into()), 0, "not before it is written");
    env.outl(&mut apic, ESR.into(), 0);
    assert_eq!(env.inl(&mut apic, ESR.into()), ESR_REGISTER);
    env.outl(&mut apic, LVT_ERROR.into(), 3);
    apic.deliver(&message(0, FIXED, 5));
    env.outl(&mut apic, ICR_LOW.into(), 5);
    env.outl(&mut apic, ESR.into(), 0);
    assert_eq!(env.inl(&mut apic, ESR.into()), ESR_RECEIVE_VECTOR | ESR_SEND_VECTOR);
    env.inl(&mut apic, EXTENDED.into());
    env.outl(&mut apic, EXTENDED.into(), 0);
    env.outl(&mut apic, ID.into(), 0);
    assert_eq!(env.missing.len(), 3);
}

#[test]
fn local_entries_are_masked_while_disabled() {
    let (mut env, mut apic) = xapic(0);
    env.outl(&mut apic, LVT_LINT0.into(), 0x70);
    apic.set_lint(0, true);
    assert_eq!(apic.pending(), Some(0x70));
    apic.set_lint(0, false);
    apic.accept(0x70);
    apic.eoi();
    env.outl(&mut apic, SVR.into(), 0xff);
    assert_eq!(env.inl(&mut apic, LVT_LINT0.into()), LVT_MASKED | 0x70);
    env.outl(&mut apic, LVT_LINT0.into(), 0x70);
    apic.set_lint(0, true);
    assert_eq!(apic.pending(), None);
    env.outl(&mut apic, SVR.into(), SVR_ENABLE);
    env.outl(&mut apic, LVT_LINT0.into(), LVT_LEVEL | 0x70);
    assert_eq!(env.missing.len(), 1);
}

#[test]
fn one_shot_timer() {
    let (mut env, mut apic) = xapic(0);
    env.outl(&mut apic, LVT_TIMER.into(), 0x60);
    env.outl(&mut apic, TIMER_DIVIDE.into(), 0b0011);
    env.outl(&mut apic, TIMER_INITIAL.into(), 1000);
    env.advance(&mut apic, 4000);
    assert_eq!(env.inl(&mut apic, TIMER_CURRENT.into()), 750, "divided by 16");
    env.outl(&mut apic, TIMER_DIVIDE.into(), DIVIDE_BY_1);
    assert_eq!(env.inl(&mut apic, TIMER_CURRENT.into()), 750);
    env.advance(&mut apic, 749);
    assert_eq!(apic.pending(), None);
    env.advance(&mut apic, 1);
    assert_eq!(apic.pending(), Some(0x60));
    assert_eq!(env.inl(&mut apic, TIMER_CURRENT.into()), 0);
    assert!(env.deadlines.is_empty());
    env.outl(&mut apic, TIMER_INITIAL.into(), 1000);
    env.outl(&mut apic, TIMER_INITIAL.into(), 0);
    assert!(env.deadlines.is_empty(), "a count of 0 stops");
}

#[test]
fn periodic_timer() {
    let (mut env, mut apic) = xapic(0);
    env.outl(&mut apic, LVT_TIMER.into(), TIMER_PERIODIC | 0x60);
    env.outl(&mut apic, TIMER_DIVIDE.into(), DIVIDE_BY_1);
    env.outl(&mut apic, TIMER_INITIAL.into(), 1_000_000);
    let mut expiries = 0;
    for _ in 0..10_000 {
        env.advance(&mut apic, 10_000);
        if let Some(vector) = apic.pending() {
            apic.accept(vector);
            apic.eoi();
            expiries += 1;
        }
    }
    assert_eq!(expiries, 100);
    env.advance(&mut apic, 300_000);
    assert_eq!(env.inl(&mut apic, TIMER_CURRENT.into()), 700_000);
    // A late host: the count has wrapped, the next expiry is on the old grid.
    env.now += 5_000_000;
    assert_eq!(env.inl(&mut apic, TIMER_CURRENT.into()), 700_000);
    env.advance(&mut apic, 0);
    assert_eq!(env.deadlines[&0], env.now + 700_000);
    // The shortest period does not wake the host for each expiry.
    env.outl(&mut apic, TIMER_INITIAL.into(), 1);
    env.advance(&mut apic, SECOND);
    assert_eq!(env.inl(&mut apic, TIMER_CURRENT.into()), 1);
}

#[test]
fn tsc_deadline_timer() {
    let (mut env, mut apic) = xapic(0);
    apic.set_tsc_deadline(5000, &mut env);
    assert_eq!(apic.read_msr(TSC_DEADLINE, &env), Ok(0), "in another mode: ignored");
    env.outl(&mut apic, LVT_TIMER.into(), TIMER_TSC_DEADLINE | 0x60);
    env.outl(&mut apic, TIMER_INITIAL.into(), 1000);
    let counts = [TIMER_INITIAL, TIMER_CURRENT].map(|at| env.inl(&mut apic, at.into()));
    assert_eq!(counts, [0, 0], "counts are of other modes");
    // TSC 1000 at time 0, 2.5 ticks a nanosecond.
    apic.write_msr(TSC_DEADLINE, 1000 + 2_500_000, &mut env).unwrap();
    env.advance(&mut apic, 999_999);
    assert_eq!((apic.pending(), apic.read_msr(TSC_DEADLINE, &env)), (None, Ok(2_501_000)));
    env.advance(&mut apic, 4);
    assert_eq!((apic.pending(), apic.read_msr(TSC_DEADLINE, &env)), (Some(0x60), Ok(0)));
    apic.accept(0x60);
    apic.eoi();
    // One that has passed fires as soon as the host can; 0 disarms; so does another mode.
    apic.set_tsc_deadline(1, &mut env);
    env.advance(&mut apic, 0);
    assert_eq!(apic.pending(), Some(0x60));
    apic.set_tsc_deadline(u64::MAX, &mut env);
    assert!(env.deadlines[&0] > 1 << 62);
    apic.set_tsc_deadline(1 << 40, &mut env);
    apic.set_tsc_deadline(0, &mut env);
    assert!(env.deadlines.is_empty());
    apic.set_tsc_deadline(1 << 40, &mut env);
    env.outl(&mut apic, LVT_TIMER.into(), 0x60);
    assert!(env.deadlines.is_empty());
}

#[test]
fn guest_sets_its_tsc_back() {
    let (mut env, mut apic) = xapic(0);
    env.now = 10 * SECOND;
    env.outl(&mut apic, LVT_TIMER.into(), TIMER_TSC_DEADLINE | 0x60);
    apic.set_tsc_deadline(30_000_000_000, &mut env);
    apic.sync_tsc(0, &mut env);
    assert!(env.deadlines[&0].abs_diff(22 * SECOND) < 4);
    apic.sync_tsc(30_000_000_001, &mut env);
    env.advance(&mut apic, 4);
    assert_eq!(apic.pending(), Some(0x60));
}

/// Vectors as plain lists, priorities as the manual states them.
struct Naive {
    irr: [bool; 256],
    isr: [bool; 256],
    tmr: [bool; 256],
    tpr: u8,
}

impl Naive {
    fn highest(set: &[bool; 256]) -> Option<usize> {
        (0..256).rev().find(|v| set[*v])
    }

    fn ppr(&self) -> u8 {
        let in_service = Self::highest(&self.isr).unwrap_or(0) as u8;
        if self.tpr & 0xf0 >= in_service & 0xf0 { self.tpr } else { in_service & 0xf0 }
    }

    fn pending(&self) -> Option<u8> {
        Self::highest(&self.irr).map(|v| v as u8).filter(|v| v & 0xf0 > self.ppr() & 0xf0)
    }

    fn word(set: &[bool; 256], word: usize) -> u32 {
        (0..32).fold(0, |value, bit| value | u32::from(set[word * 32 + bit]) << bit)
    }
}

proptest! {
    #[test]
    fn vectors_as_in_the_naive_model(steps in prop::collection::vec((0_u8..5, any::<u8>(), any::<bool>()), 1..300)) {
        let (mut env, mut apic) = xapic(0);
        let mut naive = Naive { irr: [false; 256], isr: [false; 256], tmr: [false; 256], tpr: 0 };
        for (what, vector, level) in steps {
            let at = usize::from(vector);
            match what {
                0 | 1 => {
                    apic.deliver(&InterruptMessage { level, ..message(0, FIXED, vector) });
                    if vector >= 16 {
                        naive.irr[at] = true;
                        naive.tmr[at] = level;
                    }
                }
                2 => {
                    if let Some(next) = apic.pending() {
                        apic.accept(next);
                        naive.irr[usize::from(next)] = false;
                        naive.isr[usize::from(next)] = true;
                    }
                }
                3 => {
                    let expected = Naive::highest(&naive.isr);
                    if let Some(ended) = expected {
                        naive.isr[ended] = false;
                    }
                    prop_assert_eq!(apic.eoi(), expected.filter(|v| naive.tmr[*v]).map(|v| v as u8));
                }
                _ => {
                    // Mostly low: a high priority would mask all requests.
                    naive.tpr = if level { vector } else { vector & 0x3f };
                    apic.set_tpr(naive.tpr);
                }
            }
            prop_assert_eq!((apic.pending(), apic.ppr()), (naive.pending(), naive.ppr()));
        }
        for word in 0..8 {
            let at = word as u64 * 0x10;
            for (base, set) in [(ISR, &naive.isr), (TMR, &naive.tmr), (IRR, &naive.irr)] {
                prop_assert_eq!(env.inl(&mut apic, u64::from(base) + at), Naive::word(set, word));
            }
        }
    }
}
