//! Scripts for the real-time clock.

use vmm_bus::testing::Script;
use vmm_bus::{Device, Nanos};
use vmm_dev::pc::rtc::{Config, Rtc, spec::*};

const SECOND: Nanos = 1_000_000_000;
/// 2024-02-29 23:59:58, a Thursday.
const LEAP_EVE: i64 = 1_709_251_198;

fn clock() -> (Script, Rtc) {
    clock_at(0)
}

/// A clock that has this part of a second at VM time 0.
fn clock_at(nanos_at_zero: u32) -> (Script, Rtc) {
    let (low_memory, high_memory) = (3 << 30, 1 << 30);
    let config = Config { unix_seconds_at_zero: LEAP_EVE, nanos_at_zero, low_memory, high_memory };
    (Script::new(), Rtc::new(config))
}

fn read(env: &mut Script, rtc: &mut Rtc, index: u8) -> u8 {
    env.outb(rtc, INDEX, index);
    env.inb(rtc, DATA)
}

fn write(env: &mut Script, rtc: &mut Rtc, index: u8, value: u8) {
    env.outb(rtc, INDEX, index);
    env.outb(rtc, DATA, value);
}

fn time(env: &mut Script, rtc: &mut Rtc) -> [u8; 8] {
    [CENTURY, YEAR, MONTH, DAY, WEEKDAY, HOURS, MINUTES, SECONDS].map(|i| read(env, rtc, i))
}

#[test]
fn time_passes_in_bcd_and_binary() {
    let (mut env, mut rtc) = clock();
    let bcd = [0x20, 0x24, 0x02, 0x29, 5, 0x23, 0x59, 0x58];
    assert_eq!(time(&mut env, &mut rtc), bcd);
    env.now = 2 * SECOND;
    assert_eq!(time(&mut env, &mut rtc), [0x20, 0x24, 0x03, 0x01, 6, 0, 0, 0]);
    env.now = SECOND;
    write(&mut env, &mut rtc, B, B_BINARY);
    assert_eq!(time(&mut env, &mut rtc), [20, 24, 2, 29, 5, HOURS_PM | 11, 59, 59]);
    env.now = 2 * SECOND;
    assert_eq!(read(&mut env, &mut rtc, HOURS), 12, "midnight in 12-hour mode");
}

#[test]
fn the_clock_is_set_at_once_or_under_set() {
    let (mut env, mut rtc) = clock();
    write(&mut env, &mut rtc, HOURS, 0x07);
    assert_eq!(read(&mut env, &mut rtc, HOURS), 0x07);
    env.now = 10 * SECOND;
    write(&mut env, &mut rtc, B, B_SET | B_24H);
    for (index, value) in [(CENTURY, 0x19), (YEAR, 0x99), (MONTH, 0x12), (DAY, 0x31)] {
        write(&mut env, &mut rtc, index, value);
    }
    for (index, value) in [(HOURS, 0x23), (MINUTES, 0x59), (SECONDS, 0x59)] {
        write(&mut env, &mut rtc, index, value);
    }
    env.now = 100 * SECOND;
    assert_eq!(read(&mut env, &mut rtc, SECONDS), 0x59, "it stands");
    write(&mut env, &mut rtc, B, B_24H);
    env.now += SECOND;
    assert_eq!(time(&mut env, &mut rtc), [0x20, 0x00, 0x01, 0x01, 7, 0, 0, 0]);
}

#[test]
fn invalid_times_are_clamped() {
    let (mut env, mut rtc) = clock();
    write(&mut env, &mut rtc, B, B_SET);
    for index in [SECONDS, MINUTES, HOURS, DAY, MONTH, YEAR, CENTURY] {
        write(&mut env, &mut rtc, index, 0xff);
    }
    write(&mut env, &mut rtc, B, B_24H);
    assert_eq!(time(&mut env, &mut rtc)[..4], [0x99, 0x99, 0x12, 0x31]);
}

#[test]
fn update_in_progress_precedes_the_second() {
    let (mut env, mut rtc) = clock();
    env.now = SECOND - UIP_NANOS - 1;
    assert_eq!(read(&mut env, &mut rtc, A), A_DEFAULT);
    env.now += 1;
    assert_eq!(read(&mut env, &mut rtc, A), A_DEFAULT | 0x80);
    env.now = SECOND;
    assert_eq!(read(&mut env, &mut rtc, A), A_DEFAULT);
}

#[test]
fn seconds_begin_with_those_of_the_wall_clock() {
    let (mut env, mut rtc) = clock_at(600_000_000);
    write(&mut env, &mut rtc, B, B_24H | B_UPDATE);
    env.advance(&mut rtc, SECOND * 4 / 10 - 1);
    assert_eq!((read(&mut env, &mut rtc, SECONDS), env.line(0)), (0x58, false));
    env.advance(&mut rtc, 1);
    assert_eq!((read(&mut env, &mut rtc, SECONDS), env.line(0)), (0x59, true));
    assert_eq!(read(&mut env, &mut rtc, C) & !B_PERIODIC, C_IRQ | B_UPDATE);
    env.advance(&mut rtc, SECOND - UIP_NANOS);
    assert_eq!((read(&mut env, &mut rtc, A), env.line(0)), (A_DEFAULT | 0x80, false));
    env.advance(&mut rtc, UIP_NANOS);
    assert_eq!((read(&mut env, &mut rtc, SECONDS), env.line(0)), (0x00, true));
}

#[test]
fn periodic_interrupt_waits_for_its_acknowledge() {
    let (mut env, mut rtc) = clock();
    write(&mut env, &mut rtc, B, B_24H | B_PERIODIC);
    env.advance(&mut rtc, SECOND);
    assert_eq!(env.rises(0), 1, "not acknowledged, not repeated");
    assert!(env.deadlines.is_empty());
    let mut interrupts = 0;
    for _ in 0..4096 {
        if env.line(0) {
            assert_eq!(read(&mut env, &mut rtc, C) & (C_IRQ | B_PERIODIC), C_IRQ | B_PERIODIC);
            interrupts += 1;
        }
        env.advance(&mut rtc, SECOND / 4096);
    }
    assert!((1023..=1025).contains(&interrupts), "{interrupts}");
}

#[test]
fn flags_rise_without_interrupts_too() {
    let (mut env, mut rtc) = clock();
    assert_eq!(read(&mut env, &mut rtc, C), 0);
    env.now = SECOND;
    assert_eq!(read(&mut env, &mut rtc, C), B_UPDATE | B_PERIODIC);
    assert_eq!(read(&mut env, &mut rtc, C), 0, "reading clears");
    assert!(!env.line(0) && env.deadlines.is_empty());
}

#[test]
fn update_interrupt_each_second() {
    let (mut env, mut rtc) = clock();
    write(&mut env, &mut rtc, A, 0x20);
    write(&mut env, &mut rtc, HOURS_ALARM, 0x12);
    write(&mut env, &mut rtc, B, B_24H | B_UPDATE);
    for second in 1..4 {
        env.advance(&mut rtc, SECOND);
        assert_eq!(env.rises(0), second);
        assert_eq!(read(&mut env, &mut rtc, C), C_IRQ | B_UPDATE);
    }
}

#[test]
fn alarm_at_a_time_and_with_bytes_that_do_not_matter() {
    let (mut env, mut rtc) = clock();
    for (index, value) in [(HOURS_ALARM, 0), (MINUTES_ALARM, 1), (SECONDS_ALARM, 5)] {
        write(&mut env, &mut rtc, index, value);
    }
    write(&mut env, &mut rtc, B, B_24H | B_ALARM);
    assert_eq!(env.deadlines[&0], 67 * SECOND);
    env.advance(&mut rtc, 67 * SECOND - 1);
    assert!(!env.line(0));
    env.advance(&mut rtc, 1);
    assert_eq!(read(&mut env, &mut rtc, C) & (C_IRQ | B_ALARM), C_IRQ | B_ALARM);
    assert_eq!(env.deadlines[&0], (67 + 86_400) * SECOND, "again tomorrow");
    write(&mut env, &mut rtc, HOURS_ALARM, ALARM_ANY);
    write(&mut env, &mut rtc, MINUTES_ALARM, ALARM_ANY);
    assert_eq!(env.deadlines[&0], 127 * SECOND);
    write(&mut env, &mut rtc, HOURS_ALARM, 0x24);
    assert!(env.deadlines.is_empty(), "never");
}

#[test]
fn memory_and_its_sizes() {
    let (mut env, mut rtc) = clock();
    let word = |env: &mut Script, rtc: &mut Rtc, index| {
        u32::from(read(env, rtc, index)) | u32::from(read(env, rtc, index + 1)) << 8
    };
    assert_eq!(word(&mut env, &mut rtc, BASE_MEMORY), 640);
    assert_eq!(word(&mut env, &mut rtc, EXTENDED_MEMORY), 0xffff);
    assert_eq!(word(&mut env, &mut rtc, HIGH_MEMORY), ((3 << 30) - (16 << 20)) >> 16);
    assert_eq!(word(&mut env, &mut rtc, FAR_MEMORY), (1 << 30) >> 16);
    write(&mut env, &mut rtc, 0x7f, 0xa5);
    assert_eq!(read(&mut env, &mut rtc, 0x7f), 0xa5);
    write(&mut env, &mut rtc, D, 0);
    assert_eq!(read(&mut env, &mut rtc, D), D_VALID);
}

#[test]
fn nmi_mask_and_reset() {
    let (mut env, mut rtc) = clock();
    env.outb(&mut rtc, INDEX, INDEX_NMI_MASK | B);
    assert!(rtc.nmi_masked());
    env.outb(&mut rtc, DATA, B_24H | B_PERIODIC | B_UPDATE);
    env.advance(&mut rtc, SECOND);
    assert!(env.line(0));
    rtc.reset(&mut env);
    assert!(!env.line(0) && env.deadlines.is_empty() && !rtc.nmi_masked());
    assert_eq!(read(&mut env, &mut rtc, SECONDS), 0x59, "the battery");
}
