use super::*;
use hw_arm64::gic::v2::distributor as spec;
use std::{vec, vec::Vec};

fn word(offset: usize) -> Access {
    Access::new(offset as u64, 4)
}

/// A controller that a guest has set up, with two CPUs.
fn enabled() -> Gic<4> {
    let mut gic = Gic::new(Version::V3, 2);
    gic.write_distributor(0, word(CTLR), 0x13);
    gic.write_distributor(0, word(IGROUPR + 4), 0xffff_ffff);
    gic.write_distributor(0, word(ISENABLER + 4), 0b11);
    gic.write_distributor(0, word(IPRIORITYR + 32), 0xa0b0);
    for cpu in 0..2 {
        let frame = cpu * redistributor::LENGTH as usize + redistributor::PRIVATE;
        gic.write_redistributor(word(frame + IGROUPR), 0xffff_ffff);
        gic.write_redistributor(word(frame + ISENABLER), 0x0800_ffff);
        gic.write_redistributor(word(frame + IPRIORITYR), 0xc0c0_c0c0);
    }
    gic
}

#[test]
fn levels_come_again_while_they_last() {
    let mut gic = enabled();
    gic.set_level(33, true);
    gic.set_level(32, true);
    let first = Virq { number: 33, priority: 0xa0, report_end: true };
    assert_eq!(gic.take_virq(0), Some(first));
    assert_eq!(gic.take_virq(0).map(|virq| virq.number), Some(32));
    assert!(!gic.is_waiting(0) && !gic.is_waiting(1));
    gic.end_virq(0, 33);
    assert!(gic.is_waiting(0));
    gic.set_level(33, false);
    assert!(!gic.is_waiting(0));
}

#[test]
fn routes_and_edges() {
    let mut gic = enabled();
    gic.write_distributor(0, Access::new((IROUTER + 8 * 32) as u64, 8), 1);
    gic.write_distributor(0, word(ICFGR + 8), 0b10);
    assert_eq!(gic.read_distributor(0, word(ICFGR + 8)), 0b10);
    gic.set_level(32, true);
    gic.set_level(32, false);
    assert!(!gic.is_waiting(0));
    let virq = Virq { number: 32, priority: 0xb0, report_end: false };
    assert_eq!((gic.take_virq(1), gic.take_virq(1)), (Some(virq), None));
}

#[test]
fn interrupts_of_a_cpu_that_is_off_follow_their_routes() {
    let mut gic = enabled();
    let route = |gic: &mut Gic<4>, number: u64, cpu| {
        gic.write_distributor(0, Access::new(IROUTER as u64 + 8 * number, 8), cpu);
    };
    gic.write_distributor(0, word(ICFGR + 8), 0b10);
    for number in [32, 33] {
        route(&mut gic, number, 1);
        gic.set_level(number as u32, true);
    }
    let numbers = |gic: &mut Gic<4>, cpu| -> Vec<u32> {
        core::iter::from_fn(|| gic.take_virq(cpu)).map(|virq| virq.number).collect()
    };
    assert_eq!(numbers(&mut gic, 1), [33, 32]);
    for number in [32, 33] {
        route(&mut gic, number, 0);
    }
    assert!(!gic.is_waiting(0));
    gic.release(1);
    assert_eq!(numbers(&mut gic, 0), [33, 32]);
    // They are those of CPU 0 now.
    gic.release(1);
    assert!(!gic.is_waiting(0));
}

#[test]
fn a_private_level_of_a_cpu_that_is_off_comes_again() {
    let mut gic = enabled();
    let at = redistributor::PRIVATE;
    gic.write_redistributor(word(at + ISENABLER), 1 << 20);
    let expected = Some((20, true));
    for _ in 0..2 {
        gic.write_redistributor(word(at + ISPENDR), 1 << 20);
        assert_eq!(gic.take_virq(0).map(|virq| (virq.number, virq.report_end)), expected);
        gic.release(0);
    }
}

#[test]
fn a_kernel_that_takes_over_makes_interrupts_inactive() {
    let mut gic = enabled();
    gic.write_distributor(0, word(ICFGR + 8), 0b10);
    let taken = |gic: &mut Gic<4>| gic.take_virq(0).map(|virq| (virq.number, virq.report_end));
    // A level, and an edge, whose ends are not reported.
    for number in [33, 32] {
        gic.set_level(number, true);
        assert_eq!(taken(&mut gic), Some((number, number == 33)));
    }
    gic.set_level(32, false);
    assert!(!gic.is_waiting(0));
    gic.write_distributor(0, word(ICACTIVER + 4), 0b11);
    assert_eq!((taken(&mut gic), taken(&mut gic)), (Some((33, true)), None));
    // The host learns with the next edge that the last one is not active any more.
    for report_end in [true, false] {
        gic.set_level(32, true);
        gic.set_level(32, false);
        assert_eq!(taken(&mut gic), Some((32, report_end)));
    }
}

#[test]
fn software_interrupts_and_timers() {
    let mut gic = enabled();
    gic.send(0, SoftwareInterrupt::decode(1 << 40 | 3 << 24));
    assert!(!gic.is_waiting(0));
    let virq = Virq { number: 3, priority: 0xc0, report_end: false };
    assert_eq!(gic.take_virq(1), Some(virq));
    assert_eq!(gic.timer_virq(1).map(|virq| virq.number), Some(TIMER));
    gic.write_redistributor(word(redistributor::PRIVATE + ICENABLER), 1 << TIMER);
    assert_eq!(gic.timer_virq(0), None);
}

#[test]
fn settings_of_a_cpu() {
    let mut gic = enabled();
    let frame = redistributor::LENGTH as usize + redistributor::PRIVATE;
    gic.write_redistributor(word(frame + ICENABLER), 1 << 4);
    let second = gic.sgis(1);
    assert_eq!(second.enabled, 0xffef);
    assert_eq!(second.priorities[..5], [0xc0, 0xc0, 0xc0, 0xc0, 0]);
    assert_eq!(gic.sgis(0).enabled, 0xffff);
    assert_eq!(gic.changed_by_redistributor(word(frame + ICENABLER)), 0b10);
    assert_eq!(gic.changed_by_redistributor(word(4 * frame)), 0);
    assert_eq!(gic.changed_by_distributor(0, word(CTLR)), 0b11);
    assert_eq!(gic.changed_by_distributor(0, word(ISENABLER + 4)), 0);
    gic.write_distributor(0, word(CTLR), 0);
    assert_eq!(gic.sgis(0).enabled, 0);
}

#[test]
fn identification() {
    let gic = enabled();
    assert_eq!(gic.read_distributor(0, word(PIDR2)) >> 4 & 15, 3);
    assert_eq!(gic.read_distributor(0, word(TYPER)) & 31, 3);
    let second = redistributor::LENGTH + redistributor::TYPER as u64;
    assert_eq!(gic.read_redistributor(Access::new(second, 8)), 1 << 32 | 1 << 8 | 1 << 4);
    assert_eq!(gic.read_redistributor(Access::new(2 * redistributor::LENGTH, 4)), 0);
}

#[test]
fn no_access_is_fatal() {
    let mut gic = enabled();
    for offset in 0..4 * redistributor::LENGTH {
        for size in [1, 2, 4, 8] {
            let access = Access::new(offset, size);
            if !offset.is_multiple_of(size.into()) {
                continue;
            }
            gic.write_redistributor(access, u64::MAX);
            gic.read_redistributor(access);
            if offset < LENGTH {
                gic.write_distributor(0, access, u64::MAX);
                gic.read_distributor(0, access);
            }
        }
    }
    for number in 0..1100 {
        gic.set_level(number, true);
        gic.end_virq(0, number);
    }
    while gic.take_virq(0).is_some() {}
}

/// A GICv2 that a guest has set up, with three CPUs.
fn enabled_v2() -> Gic<4> {
    let mut gic = Gic::new(Version::V2, 3);
    gic.write_distributor(0, word(CTLR), 1);
    for cpu in 0..3 {
        gic.write_distributor(cpu, word(ISENABLER), 0x0800_ffff);
        gic.write_distributor(cpu, word(IPRIORITYR), 0xc0c0_c0c0);
    }
    gic.write_distributor(0, word(ISENABLER + 4), 0b11);
    gic.write_distributor(0, word(spec::ITARGETSR + 32), 0xff06);
    gic
}

fn numbers(gic: &mut Gic<4>, cpu: usize) -> Vec<u32> {
    core::iter::from_fn(|| gic.take_virq(cpu)).map(|virq| virq.number).collect()
}

#[test]
fn sgis_of_a_gicv2_have_sources() {
    let mut gic = enabled_v2();
    // To CPUs 1 and 2, and to one that does not exist.
    gic.write_distributor(0, word(spec::SGIR), 0xfe_0003);
    gic.write_distributor(1, word(spec::SGIR), 1 << 24 | 3);
    gic.write_distributor(2, word(spec::SGIR), 2 << 24 | 3);
    let source = |cpu: u32, number| cpu << 10 | number;
    assert_eq!(gic.read_distributor(2, word(spec::SPENDSGIR)), 0x0700_0000);
    assert_eq!(numbers(&mut gic, 2), [source(0, 3), source(1, 3), source(2, 3)]);
    assert_eq!(numbers(&mut gic, 0), [source(1, 3)]);
    assert_eq!(numbers(&mut gic, 1), [source(0, 3)]);
    assert!(!gic.is_waiting(3), "it does not exist");
    // By source, and not by the registers of other interrupts.
    gic.write_distributor(1, Access::new(spec::SPENDSGIR as u64 + 5, 1), 0xff);
    gic.write_distributor(1, Access::new(spec::CPENDSGIR as u64 + 5, 1), 0b10);
    gic.write_distributor(1, word(ISPENDR), 0xffff);
    gic.write_distributor(1, word(ICPENDR), 0xffff);
    assert_eq!(gic.read_distributor(1, word(ISPENDR)), 1 << 5);
    assert_eq!(numbers(&mut gic, 1), [source(0, 5), source(2, 5)]);
    assert_eq!(gic.sgis(1), Sgis::default(), "the host delivers none");
}

#[test]
fn registers_of_a_gicv2_are_banked() {
    let mut gic = enabled_v2();
    assert_eq!(gic.read_distributor(0, word(TYPER)), 2 << 5 | 3);
    assert_eq!(gic.read_distributor(0, word(spec::PIDR2)) >> 4 & 15, 2);
    for cpu in 0..3 {
        let own = 0x0101_0101 << cpu;
        gic.write_distributor(cpu, word(spec::ITARGETSR + 4), 0);
        assert_eq!(gic.read_distributor(cpu, word(spec::ITARGETSR + 4)), own);
    }
    gic.write_distributor(1, word(ICENABLER), 1 << TIMER);
    assert_eq!([0, 1].map(|cpu| gic.timer_virq(cpu).is_some()), [true, false]);
    gic.write_distributor(1, word(IGROUPR), u64::MAX);
    assert_eq!(gic.read_distributor(1, word(IGROUPR)), 0, "no groups");
    let changed = |offset| gic.changed_by_distributor(1, word(offset));
    assert_eq!([CTLR, ICENABLER, IPRIORITYR + 24].map(changed), [0b111, 0b10, 0b10]);
    assert_eq!([ISENABLER + 4, IPRIORITYR + 32, spec::SGIR].map(changed), [0; 3]);
}

#[test]
fn targets_of_a_gicv2() {
    let mut gic = enabled_v2();
    assert_eq!(gic.read_distributor(0, word(spec::ITARGETSR + 32)), 0x0706, "CPUs that exist");
    gic.set_level(32, true);
    gic.set_level(33, true);
    // The first of CPUs 1 and 2, and the first of all.
    assert_eq!([0, 1, 2].map(|cpu| numbers(&mut gic, cpu)), [vec![33], vec![32], vec![]]);
    gic.write_distributor(2, Access::new(spec::ITARGETSR as u64 + 32, 1), 4);
    gic.end_virq(1, 32);
    assert_eq!([1, 2].map(|cpu| numbers(&mut gic, cpu)), [vec![], vec![32]]);
    gic.write_distributor(2, Access::new(spec::ITARGETSR as u64 + 32, 1), 0);
    gic.end_virq(2, 32);
    assert_eq!([0, 1, 2].map(|cpu| numbers(&mut gic, cpu)), [const { Vec::<u32>::new() }; 3]);
}

#[test]
fn one_cpu_is_the_target_of_all() {
    let mut gic = Gic::<1>::new(Version::V2, 1);
    gic.write_distributor(0, word(CTLR), 1);
    gic.write_distributor(0, word(ISENABLER + 4), 1);
    gic.write_distributor(0, word(spec::ITARGETSR + 32), 0xff);
    let targets = |number| gic.read_distributor(0, word(spec::ITARGETSR + number));
    assert_eq!([0, 32].map(targets), [0, 0], "read as zero");
    gic.write_distributor(0, word(spec::ITARGETSR + 32), 0);
    gic.set_level(32, true);
    let virqs: Vec<u32> = core::iter::from_fn(|| gic.take_virq(0)).map(|it| it.number).collect();
    assert_eq!(virqs, [32]);
}

#[test]
fn no_access_to_a_gicv2_is_fatal() {
    let mut gic = enabled_v2();
    for offset in 0..LENGTH {
        for (cpu, size) in [(0, 1), (1, 2), (2, 4), (0, 8)] {
            let access = Access::new(offset, size);
            if offset.is_multiple_of(size.into()) {
                gic.write_distributor(cpu, access, u64::MAX);
                gic.read_distributor(cpu, access);
            }
        }
    }
    for cpu in 0..3 {
        while gic.take_virq(cpu).is_some() {}
    }
}
