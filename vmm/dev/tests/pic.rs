//! Scripts for the 8259A pair.

use proptest::prelude::*;
use vmm_bus::Device;
use vmm_bus::testing::Script;
use vmm_dev::pc::pic::{PicPair, spec::*};

const EOI: u8 = OCW2_EOI << 5;

/// The pair as a kernel initialises it: vectors 0x30 and 0x38, all inputs unmasked.
fn ready(env: &mut Script, icw4: u8) -> PicPair {
    let mut pic = PicPair::new();
    for (command, data, base, cascade) in
        [(MASTER_COMMAND, MASTER_DATA, 0x30, 4), (SLAVE_COMMAND, SLAVE_DATA, 0x38, 2)]
    {
        env.outb(&mut pic, command, ICW1_INIT | ICW1_ICW4);
        env.outb(&mut pic, data, base);
        env.outb(&mut pic, data, cascade);
        env.outb(&mut pic, data, icw4);
        env.outb(&mut pic, data, 0);
    }
    assert!(env.missing.is_empty());
    pic
}

fn pulse(pic: &mut PicPair, n: u8) {
    pic.set_irq(n, true);
    pic.set_irq(n, false);
}

#[test]
fn a_mask_reads_back_before_initialization() {
    let (mut env, mut pic) = (Script::new(), PicPair::new());
    env.outb(&mut pic, MASTER_DATA, 0xfb);
    assert_eq!(env.inb(&mut pic, MASTER_DATA), 0xfb);
    assert_eq!(env.inb(&mut pic, SLAVE_DATA), 0xff);
    pulse(&mut pic, 4);
    assert!(!pic.intr());
}

#[test]
fn edge_is_latched_and_acknowledged_once() {
    let mut env = Script::new();
    let mut pic = ready(&mut env, ICW4_8086);
    pic.set_irq(4, true);
    assert!(pic.intr());
    assert_eq!(pic.acknowledge(), 0x34);
    assert!(!pic.intr());
    env.outb(&mut pic, MASTER_COMMAND, EOI);
    assert!(!pic.intr(), "the level alone is no new edge");
    pic.set_irq(4, false);
    pic.set_irq(4, true);
    assert!(pic.intr());
}

#[test]
fn level_repeats_until_it_falls() {
    let mut env = Script::new();
    let mut pic = ready(&mut env, ICW4_8086);
    env.outb(&mut pic, ELCR_SLAVE, 0xff);
    assert_eq!(env.inb(&mut pic, ELCR_SLAVE), ELCR_SLAVE_MASK);
    env.outb(&mut pic, ELCR_MASTER, 0xff);
    assert_eq!(env.inb(&mut pic, ELCR_MASTER), ELCR_MASTER_MASK);
    pic.set_irq(10, true);
    for _ in 0..2 {
        assert_eq!(pic.acknowledge(), 0x3a);
        assert!(!pic.intr());
        env.outb(&mut pic, SLAVE_COMMAND, EOI);
        env.outb(&mut pic, MASTER_COMMAND, EOI);
        assert!(pic.intr());
    }
    pic.set_irq(10, false);
    assert!(!pic.intr());
}

/// Firmware and kernels choose the mode of an input while its device drives it.
#[test]
fn the_mode_of_an_input_changes_with_its_level() {
    let mut env = Script::new();
    let mut pic = ready(&mut env, ICW4_8086);
    for (elcr, irq, vector) in [(ELCR_MASTER, 5, 0x35), (ELCR_SLAVE, 10, 0x3a)] {
        let end = |pic: &mut PicPair, env: &mut Script| {
            env.outb(pic, SLAVE_COMMAND, EOI);
            env.outb(pic, MASTER_COMMAND, EOI);
        };
        // An asserted level requests, even if its edge has been acknowledged.
        pic.set_irq(irq, true);
        assert_eq!(pic.acknowledge(), vector);
        end(&mut pic, &mut env);
        assert!(!pic.intr());
        env.outb(&mut pic, elcr, 1 << (irq % 8));
        assert!(pic.intr());
        assert_eq!(pic.acknowledge(), vector);
        pic.set_irq(irq, false);
        end(&mut pic, &mut env);
        assert!(!pic.intr());
        // A latched edge does not, if its level has gone.
        env.outb(&mut pic, elcr, 0);
        pulse(&mut pic, irq);
        assert!(pic.intr());
        env.outb(&mut pic, elcr, 1 << (irq % 8));
        assert!(!pic.intr());
    }
}

#[test]
fn request_that_is_gone_is_spurious() {
    let mut env = Script::new();
    let mut pic = ready(&mut env, ICW4_8086);
    assert_eq!(pic.acknowledge(), 0x37);
    env.outb(&mut pic, MASTER_COMMAND, OCW3 | OCW3_READ | OCW3_ISR);
    assert_eq!(env.inb(&mut pic, MASTER_COMMAND), 0, "without a service bit");
}

#[test]
fn registers_and_masks() {
    let mut env = Script::new();
    let mut pic = ready(&mut env, ICW4_8086);
    env.outb(&mut pic, MASTER_DATA, 1 << 3);
    pulse(&mut pic, 3);
    assert!(!pic.intr());
    env.outb(&mut pic, MASTER_COMMAND, OCW3 | OCW3_READ);
    assert_eq!(env.inb(&mut pic, MASTER_COMMAND), 1 << 3);
    env.outb(&mut pic, MASTER_DATA, 0);
    assert!(pic.intr(), "requests survive the mask");
}

#[test]
fn poll_is_an_acknowledge() {
    let mut env = Script::new();
    let mut pic = ready(&mut env, ICW4_8086);
    pulse(&mut pic, 9);
    env.outb(&mut pic, SLAVE_COMMAND, OCW3 | OCW3_POLL);
    assert_eq!(env.inb(&mut pic, SLAVE_COMMAND), POLL_TAKEN | 1);
    assert!(!pic.intr());
    env.outb(&mut pic, SLAVE_COMMAND, OCW3 | OCW3_POLL);
    assert_eq!(env.inb(&mut pic, SLAVE_COMMAND), 0);
    env.outb(&mut pic, SLAVE_COMMAND, OCW3 | OCW3_READ | OCW3_ISR);
    assert_eq!(env.inb(&mut pic, SLAVE_COMMAND), 1 << 1);
}

#[test]
fn automatic_end_and_rotation() {
    let mut env = Script::new();
    let mut pic = ready(&mut env, ICW4_8086 | ICW4_AEOI);
    env.outb(&mut pic, MASTER_COMMAND, OCW2_AUTO_ROTATE_ON << 5);
    pulse(&mut pic, 1);
    assert_eq!(pic.acknowledge(), 0x31);
    // Input 1 has the lowest priority now.
    pulse(&mut pic, 1);
    pulse(&mut pic, 5);
    assert_eq!(pic.acknowledge(), 0x35);
    assert_eq!(pic.acknowledge(), 0x31);
    assert!(!pic.intr());
}

#[test]
fn rotation_on_end_of_interrupt() {
    let mut env = Script::new();
    let mut pic = ready(&mut env, ICW4_8086);
    pulse(&mut pic, 4);
    assert_eq!(pic.acknowledge(), 0x34);
    env.outb(&mut pic, MASTER_COMMAND, OCW2_ROTATE_EOI << 5);
    pulse(&mut pic, 4);
    pulse(&mut pic, 6);
    assert_eq!(pic.acknowledge(), 0x36);
    env.outb(&mut pic, MASTER_COMMAND, OCW2_ROTATE_EOI_SPECIFIC << 5 | 6);
    env.outb(&mut pic, MASTER_COMMAND, OCW2_SET_PRIORITY << 5 | 3);
    pulse(&mut pic, 0);
    assert_eq!(pic.acknowledge(), 0x34, "4 is the highest after 3 was made the lowest");
    env.outb(&mut pic, MASTER_COMMAND, OCW2_EOI_SPECIFIC << 5 | 4);
    assert_eq!(pic.acknowledge(), 0x30);
}

#[test]
fn special_mask_mode_lets_lower_requests_in() {
    let mut env = Script::new();
    let mut pic = ready(&mut env, ICW4_8086);
    pulse(&mut pic, 3);
    assert_eq!(pic.acknowledge(), 0x33);
    pulse(&mut pic, 6);
    assert!(!pic.intr());
    env.outb(&mut pic, MASTER_DATA, 1 << 3);
    env.outb(&mut pic, MASTER_COMMAND, OCW3 | OCW3_SET_MASK_MODE | OCW3_MASK_MODE);
    assert!(pic.intr());
    assert_eq!(pic.acknowledge(), 0x36);
}

#[test]
fn special_nested_mode_lets_the_slave_interrupt_itself() {
    for (icw4, nested) in [(ICW4_8086, false), (ICW4_8086 | ICW4_NESTED, true)] {
        let mut env = Script::new();
        let mut pic = ready(&mut env, icw4);
        pulse(&mut pic, 12);
        assert_eq!(pic.acknowledge(), 0x3c);
        pulse(&mut pic, 4);
        assert!(!pic.intr(), "a lower priority than the slave's");
        pulse(&mut pic, 9);
        assert_eq!(pic.intr(), nested);
    }
}

#[test]
fn missing_features_are_reported() {
    let (mut env, mut pic) = (Script::new(), PicPair::new());
    env.outb(&mut pic, MASTER_COMMAND, ICW1_INIT | ICW1_SINGLE);
    assert_eq!(env.missing.len(), 2);
    env.outb(&mut pic, MASTER_DATA, 0x30);
    pulse(&mut pic, 0);
    assert_eq!(pic.acknowledge(), 0x30);
    pic.reset(&mut env);
    assert!(!pic.intr());
}

/// Fully nested mode as the data sheet states it: a request is serviced if its input has a higher
/// priority than every input in service; a slave's inputs all have the priority of master input 2.
#[derive(Default)]
struct Reference {
    requested: [bool; 16],
    levels: [bool; 16],
    /// Innermost last.
    in_service: Vec<u8>,
}

impl Reference {
    const ORDER: [u8; 15] = [0, 1, 8, 9, 10, 11, 12, 13, 14, 15, 3, 4, 5, 6, 7];

    fn next(&self) -> Option<u8> {
        let rank = |n: u8| if n >= 8 { 2 } else { n };
        let bound = self.in_service.iter().map(|n| rank(*n)).min().unwrap_or(8);
        let first = Self::ORDER.into_iter().find(|n| self.requested[usize::from(*n)])?;
        (rank(first) < bound).then_some(first)
    }
}

proptest! {
    #[test]
    fn priorities_as_in_the_reference(steps in prop::collection::vec((0_u8..4, 0_u8..16), 1..300)) {
        let mut env = Script::new();
        let mut pic = ready(&mut env, ICW4_8086);
        let mut reference = Reference::default();
        for (what, n) in steps {
            match what {
                0 | 1 => {
                    let (level, at) = (what == 1, usize::from(n));
                    pic.set_irq(n, level);
                    if n != CASCADE {
                        reference.requested[at] |= level && !reference.levels[at];
                        reference.levels[at] = level;
                    }
                }
                2 => {
                    if let Some(next) = reference.next() {
                        prop_assert_eq!(pic.acknowledge(), 0x30 + next);
                        reference.requested[usize::from(next)] = false;
                        reference.in_service.push(next);
                    }
                }
                _ => {
                    if let Some(ended) = reference.in_service.pop() {
                        if ended >= 8 {
                            env.outb(&mut pic, SLAVE_COMMAND, EOI);
                        }
                        env.outb(&mut pic, MASTER_COMMAND, EOI);
                    }
                }
            }
            prop_assert_eq!(pic.intr(), reference.next().is_some());
        }
    }
}
