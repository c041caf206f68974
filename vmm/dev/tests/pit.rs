//! Scripts for the 8254 and port 0x61.

use proptest::prelude::*;
use vmm_bus::testing::Script;
use vmm_bus::{Device, Nanos};
use vmm_dev::pc::pit::{Pit, spec::*};

const CHANNEL_0: u64 = 0;

/// The middle of `tick`.
fn at(tick: u64) -> Nanos {
    tick * 1_000_000_000 / HZ + 400
}

fn program(env: &mut Script, pit: &mut Pit, channel: u64, mode: u8, count: u16) {
    env.outb(pit, CONTROL, (channel as u8) << 6 | 3 << 4 | mode << 1);
    env.outb(pit, channel, count as u8);
    env.outb(pit, channel, (count >> 8) as u8);
}

fn count(env: &mut Script, pit: &mut Pit, channel: u64) -> u16 {
    env.outb(pit, CONTROL, (channel as u8) << 6);
    let low = env.inb(pit, channel);
    u16::from_le_bytes([low, env.inb(pit, channel)])
}

#[test]
fn periodic_interrupt() {
    let (mut env, mut pit) = (Script::new(), Pit::new());
    program(&mut env, &mut pit, CHANNEL_0, 2, 11932);
    env.advance(&mut pit, 1_000_000_000);
    assert_eq!(env.rises(0), 1 + 99, "high from the start, then 99 whole periods");
    program(&mut env, &mut pit, CHANNEL_0, 3, 0);
    let before = env.rises(0);
    env.advance(&mut pit, 10_000_000_000);
    assert_eq!(env.rises(0) - before, 182);
}

#[test]
fn one_shot_interrupt() {
    let (mut env, mut pit) = (Script::new(), Pit::new());
    program(&mut env, &mut pit, CHANNEL_0, 0, 1000);
    assert!(!env.line(0));
    env.advance(&mut pit, at(999));
    assert!(!env.line(0));
    env.advance(&mut pit, at(2));
    assert!(env.line(0));
    env.advance(&mut pit, 10_000_000_000);
    assert_eq!(env.rises(0), 1);
    // Mode 4 is high but for one tick.
    program(&mut env, &mut pit, CHANNEL_0, 4, 1000);
    assert!(env.line(0) && env.rises(0) == 1);
    env.advance(&mut pit, 10_000_000_000);
    assert_eq!(env.rises(0), 2);
}

#[test]
fn a_new_program_replaces_the_old() {
    let (mut env, mut pit) = (Script::new(), Pit::new());
    program(&mut env, &mut pit, CHANNEL_0, 2, 100);
    env.outb(&mut pit, CONTROL, 0x30);
    assert!(env.deadlines.is_empty() && !env.line(0));
    env.advance(&mut pit, 1_000_000_000);
    assert!(!env.line(0));
}

#[test]
fn fast_periods_are_merged() {
    let (mut env, mut pit) = (Script::new(), Pit::new());
    program(&mut env, &mut pit, CHANNEL_0, 2, 1);
    env.advance(&mut pit, 100_000_000);
    assert!(env.rises(0) <= 2001, "{}", env.rises(0));
    // A late host gets one edge for all missed ones.
    program(&mut env, &mut pit, CHANNEL_0, 2, 11932);
    let before = env.rises(0);
    env.now += 95_000_000;
    env.advance(&mut pit, 6_000_000);
    assert_eq!(env.rises(0) - before, 2);
}

#[test]
fn latches_hold_until_read() {
    let (mut env, mut pit) = (Script::new(), Pit::new());
    program(&mut env, &mut pit, CHANNEL_0, 2, 1000);
    env.now = at(10);
    // Count and status of channels 0 and 2.
    env.outb(&mut pit, CONTROL, READ_BACK << 6 | 1 << 1 | 1 << 3);
    env.now = at(100);
    env.outb(&mut pit, CONTROL, 0);
    assert_eq!(env.inb(&mut pit, 0), STATUS_OUTPUT | 3 << 4 | 2 << 1);
    assert_eq!((env.inb(&mut pit, 0), env.inb(&mut pit, 0)), (0xde, 0x03), "990, not 900");
    assert_eq!((env.inb(&mut pit, 0), env.inb(&mut pit, 0)), (0x84, 0x03), "then live: 900");
    assert_eq!(env.inb(&mut pit, 2) & STATUS_NULL, STATUS_NULL);
}

#[test]
fn single_byte_counts() {
    let (mut env, mut pit) = (Script::new(), Pit::new());
    env.outb(&mut pit, CONTROL, 2 << 6 | 1 << 4);
    env.outb(&mut pit, 2, 0x20);
    assert_eq!((env.inb(&mut pit, 2), env.inb(&mut pit, 2)), (0x20, 0x20));
    env.outb(&mut pit, CONTROL, 2 << 6 | 2 << 4);
    env.outb(&mut pit, 2, 0x20);
    assert_eq!(env.inb(&mut pit, 2), 0x20);
    assert_eq!(count(&mut env, &mut pit, 2), 0x2020, "the latch gives the high byte alone");
}

#[test]
fn speaker_port_gates_and_shows_channel_2() {
    let (mut env, mut pit) = (Script::new(), Pit::new());
    let out2 = |env: &mut Script, pit: &mut Pit| env.inb(pit, PORT_B) & PORT_B_OUT2 != 0;
    env.outb(&mut pit, PORT_B, PORT_B_GATE2);
    program(&mut env, &mut pit, 2, 0, 1000);
    env.now = at(400);
    assert!(!out2(&mut env, &mut pit));
    env.outb(&mut pit, PORT_B, 0);
    env.now = at(5000);
    assert_eq!(count(&mut env, &mut pit, 2), 600, "the gate stops the count");
    env.outb(&mut pit, PORT_B, PORT_B_GATE2);
    env.now = at(5599);
    assert!(!out2(&mut env, &mut pit));
    env.now = at(5601);
    assert!(out2(&mut env, &mut pit));
    // Mode 1 starts with the gate.
    program(&mut env, &mut pit, 2, 1, 100);
    assert!(out2(&mut env, &mut pit));
    env.outb(&mut pit, PORT_B, 0);
    env.outb(&mut pit, PORT_B, PORT_B_GATE2);
    assert!(!out2(&mut env, &mut pit));
    env.now += at(101);
    assert!(out2(&mut env, &mut pit));
    assert_eq!(env.inb(&mut pit, PORT_B) & PORT_B_STORED, PORT_B_GATE2);
}

#[test]
fn refresh_toggles() {
    let (mut env, mut pit) = (Script::new(), Pit::new());
    let mut toggles = 0;
    let mut last = env.inb(&mut pit, PORT_B);
    for _ in 0..1000 {
        env.now += 1000;
        let value = env.inb(&mut pit, PORT_B);
        toggles += u32::from((value ^ last) & PORT_B_REFRESH != 0);
        last = value;
    }
    assert_eq!(toggles, 66);
}

#[test]
fn bcd_is_reported_and_reset_stops() {
    let (mut env, mut pit) = (Script::new(), Pit::new());
    env.outb(&mut pit, CONTROL, 0x35);
    assert_eq!(env.missing.len(), 1);
    program(&mut env, &mut pit, CHANNEL_0, 2, 100);
    pit.reset(&mut env);
    assert!(!env.line(0) && env.deadlines.is_empty());
}

/// The chip's counting element, one clock at a time.
struct Stepper {
    mode: u8,
    reload: u32,
    count: u32,
    output: bool,
    expired: bool,
}

impl Stepper {
    fn new(mode: u8, reload: u32) -> Self {
        let count = if mode == 3 { reload & !1 } else { reload };
        Self { mode, reload, count, output: mode != 0, expired: false }
    }

    fn step(&mut self) {
        match self.mode {
            2 => {
                self.count -= 1;
                if self.count == 0 {
                    self.count = self.reload;
                }
                self.output = self.count != 1;
            }
            3 => {
                // An odd count holds the output high for one clock more, showing zero.
                let hold = self.reload & 1 != 0 && self.output;
                if self.count == 2 && !hold || self.count == 0 {
                    self.count = self.reload & !1;
                    self.output = !self.output;
                } else {
                    self.count -= 2;
                }
            }
            _ => {
                self.count = self.count.wrapping_sub(1) & 0xffff;
                let zero = self.count == 0 && !self.expired;
                self.expired |= zero;
                self.output = if self.mode == 0 { self.expired } else { !zero };
            }
        }
    }
}

proptest! {
    #[test]
    fn counts_like_the_chip(
        mode in prop::sample::select(vec![0_u8, 2, 3, 4]), reload in 2_u16..600, ticks in 0_u64..3000,
    ) {
        let (mut env, mut pit) = (Script::new(), Pit::new());
        env.outb(&mut pit, PORT_B, PORT_B_GATE2);
        program(&mut env, &mut pit, 2, mode, reload);
        let mut stepper = Stepper::new(mode, reload.into());
        (0..ticks).for_each(|_| stepper.step());
        env.now = at(ticks);
        prop_assert_eq!(count(&mut env, &mut pit, 2), stepper.count as u16);
        prop_assert_eq!(env.inb(&mut pit, PORT_B) & PORT_B_OUT2 != 0, stepper.output);
    }
}
