//! Scripts for the I/O APIC.

use vmm_bus::Device;
use vmm_bus::testing::Script;
use vmm_x86::apic::InterruptMessage;
use vmm_x86::apic::io::{IoApic, spec::*};

fn read(env: &mut Script, chip: &mut IoApic, index: u32) -> u32 {
    env.outl(chip, SELECT, index);
    env.inl(chip, WINDOW)
}

fn write(env: &mut Script, chip: &mut IoApic, index: u32, value: u32) {
    env.outl(chip, SELECT, index);
    env.outl(chip, WINDOW, value);
}

fn redirect(env: &mut Script, chip: &mut IoApic, pin: u8, destination: u8, low: u32) {
    let index = REDIRECTION + 2 * u32::from(pin);
    write(env, chip, index + 1, u32::from(destination) << DESTINATION_SHIFT);
    write(env, chip, index, low);
}

/// The messages sent so far.
fn messages(env: &Script) -> Vec<InterruptMessage> {
    env.msis.iter().map(|&msi| InterruptMessage::decode(msi).unwrap()).collect()
}

fn message(destination: u32, vector: u8, level: bool) -> InterruptMessage {
    InterruptMessage { destination, logical: false, delivery: 0, vector, level }
}

#[test]
fn registers() {
    let (mut env, mut chip) = (Script::new(), IoApic::new(2));
    assert_eq!(read(&mut env, &mut chip, ID), 2 << 24);
    assert_eq!(read(&mut env, &mut chip, VERSION), 0x0017_0020);
    assert_eq!(read(&mut env, &mut chip, ARBITRATION), 2 << 24);
    write(&mut env, &mut chip, ARBITRATION, 0);
    assert_eq!(read(&mut env, &mut chip, ARBITRATION), 2 << 24, "read-only");
    assert_eq!(read(&mut env, &mut chip, REDIRECTION), MASKED);
    assert_eq!(read(&mut env, &mut chip, REDIRECTION_LAST + 1), u32::MAX);
    write(&mut env, &mut chip, ID, u32::MAX);
    assert_eq!(read(&mut env, &mut chip, ID), 0xf << 24);
    assert_eq!(read(&mut env, &mut chip, ARBITRATION), 0xf << 24, "follows the identifier");
    write(&mut env, &mut chip, REDIRECTION_LAST - 1, u32::MAX);
    assert_eq!(read(&mut env, &mut chip, REDIRECTION_LAST - 1), WRITABLE);
    write(&mut env, &mut chip, REDIRECTION_LAST, u32::MAX);
    assert_eq!(read(&mut env, &mut chip, REDIRECTION_LAST), 0xff00_0000);
    chip.reset(&mut env);
    assert_eq!(read(&mut env, &mut chip, ID), 2 << 24);
    assert_eq!(read(&mut env, &mut chip, REDIRECTION_LAST - 1), MASKED);
}

#[test]
fn edges() {
    let (mut env, mut chip) = (Script::new(), IoApic::new(0));
    redirect(&mut env, &mut chip, 4, 1, MASKED | 0x30);
    chip.set_irq(4, true, &mut env);
    redirect(&mut env, &mut chip, 4, 1, 0x30);
    assert!(messages(&env).is_empty(), "an edge under the mask is lost");
    chip.set_irq(4, true, &mut env);
    chip.set_irq(4, false, &mut env);
    assert!(messages(&env).is_empty());
    chip.set_irq(4, true, &mut env);
    chip.set_irq(4, false, &mut env);
    chip.set_irq(4, true, &mut env);
    assert_eq!(messages(&env), [message(1, 0x30, false); 2]);
    chip.set_irq(24, true, &mut env);
    chip.set_irq(255, true, &mut env);
    assert_eq!(messages(&env).len(), 2);
}

#[test]
fn levels() {
    let (mut env, mut chip) = (Script::new(), IoApic::new(0));
    let entry = REDIRECTION + 2 * 9;
    chip.set_irq(9, true, &mut env);
    redirect(&mut env, &mut chip, 9, 0xff, LEVEL | 0x51);
    assert_eq!(messages(&env), [message(u32::MAX, 0x51, true)], "sent when unmasked");
    assert_ne!(read(&mut env, &mut chip, entry) & REMOTE_IRR, 0);
    chip.set_irq(9, false, &mut env);
    chip.set_irq(9, true, &mut env);
    assert_eq!(messages(&env).len(), 1, "not before the end of the first");
    chip.eoi(0x52, &mut env);
    assert_eq!(messages(&env).len(), 1);
    chip.eoi(0x51, &mut env);
    assert_eq!(messages(&env).len(), 2, "still asserted");
    chip.set_irq(9, false, &mut env);
    env.outl(&mut chip, END, 0x51);
    assert_eq!(messages(&env).len(), 2);
    assert_eq!(read(&mut env, &mut chip, entry) & REMOTE_IRR, 0);
    chip.set_irq(9, true, &mut env);
    assert_eq!(messages(&env).len(), 3);
    // A driver clears a stuck remote IRR by switching to masked edge and back.
    write(&mut env, &mut chip, entry, MASKED | 0x51);
    assert_eq!(read(&mut env, &mut chip, entry) & REMOTE_IRR, 0);
    write(&mut env, &mut chip, entry, LEVEL | 0x51);
    assert_eq!(messages(&env).len(), 4);
}

#[test]
fn shared_vectors_end_together() {
    let (mut env, mut chip) = (Script::new(), IoApic::new(0));
    for pin in [16, 23] {
        redirect(&mut env, &mut chip, pin, 0, LEVEL | 0x60);
        chip.set_irq(pin, true, &mut env);
    }
    chip.eoi(0x60, &mut env);
    assert_eq!(messages(&env), [message(0, 0x60, true); 4]);
}

#[test]
fn delivery_modes_and_logical_destinations() {
    let (mut env, mut chip) = (Script::new(), IoApic::new(0));
    redirect(&mut env, &mut chip, 0, 0xff, 7 << 8 | LOGICAL | 0x20);
    chip.set_irq(0, true, &mut env);
    let expected = InterruptMessage {
        destination: 0xff,
        logical: true,
        delivery: 7,
        vector: 0x20,
        level: false,
    };
    assert_eq!(messages(&env), [expected]);
}

#[test]
fn interrupts_without_an_eoi_are_edges() {
    for delivery in [2, 4, 5, 7] {
        let (mut env, mut chip) = (Script::new(), IoApic::new(0));
        chip.set_irq(3, true, &mut env);
        redirect(&mut env, &mut chip, 3, 1, LEVEL | delivery << 8 | 0x20);
        assert_eq!(messages(&env), [], "{delivery}: an edge under the mask is lost");
        for _ in 0..2 {
            chip.set_irq(3, false, &mut env);
            chip.set_irq(3, true, &mut env);
        }
        let expected = InterruptMessage { delivery: delivery as u8, ..message(1, 0x20, false) };
        assert_eq!(messages(&env), [expected; 2]);
        let entry = read(&mut env, &mut chip, REDIRECTION + 2 * 3);
        assert_eq!(entry & (LEVEL | REMOTE_IRR), LEVEL, "{delivery}");
    }
    // Lowest priority has a vector, and an EOI.
    let (mut env, mut chip) = (Script::new(), IoApic::new(0));
    redirect(&mut env, &mut chip, 3, 1, LEVEL | 1 << 8 | 0x20);
    chip.set_irq(3, true, &mut env);
    assert_ne!(read(&mut env, &mut chip, REDIRECTION + 2 * 3) & REMOTE_IRR, 0);
}
