//! Scripts for the power management registers and the chips of one or two ports.

use vmm_bus::testing::Script;
use vmm_bus::{Access, Device, MachineEvent};
use vmm_dev::pc::{debugexit, kbd, pm, port92, post, pvpanic, reset};

fn outw(env: &mut Script, device: &mut dyn Device, offset: u64, value: u16) {
    device.write(Access::new(offset, 2), value.into(), env);
}

fn inw(env: &mut Script, device: &mut dyn Device, offset: u64) -> u16 {
    device.read(Access::new(offset, 2), env) as u16
}

#[test]
fn soft_off() {
    let (mut env, mut pm) = (Script::new(), pm::AcpiPm::new());
    assert_eq!(inw(&mut env, &mut pm, pm::spec::PM1_CONTROL), pm::spec::SCI_EN);
    let s5 = pm::spec::SLP_TYP_S5 << pm::spec::SLP_TYP_SHIFT;
    outw(&mut env, &mut pm, pm::spec::PM1_CONTROL, s5);
    assert_eq!(inw(&mut env, &mut pm, pm::spec::PM1_CONTROL), s5 | pm::spec::SCI_EN);
    assert!(env.events.is_empty());
    outw(&mut env, &mut pm, pm::spec::PM1_CONTROL, s5 | pm::spec::SLP_EN);
    assert_eq!(env.events, [MachineEvent::PowerOff]);
    outw(&mut env, &mut pm, pm::spec::PM1_CONTROL, 1 << 10 | pm::spec::SLP_EN);
    assert_eq!(env.missing, [("ACPI: sleep state", 1)]);
}

#[test]
fn pm_timer_counts_and_overflows() {
    let (mut env, mut pm) = (Script::new(), pm::AcpiPm::new());
    env.now = 1_000_000_000;
    assert_eq!(env.inl(&mut pm, pm::spec::TIMER), 3_579_545);
    assert_eq!(env.inb(&mut pm, pm::spec::TIMER + 1), (3_579_545 >> 8) as u8);
    outw(&mut env, &mut pm, 2, pm::spec::TMR);
    let half = (1_u64 << 31) * 1_000_000_000 / pm::spec::HZ;
    env.advance(&mut pm, half - 1_000_000_010);
    assert!(!env.line(0));
    env.advance(&mut pm, 20);
    assert!(env.line(0));
    assert!(env.deadlines.is_empty());
    outw(&mut env, &mut pm, pm::spec::PM1_EVENT, pm::spec::TMR);
    assert!(!env.line(0));
    env.advance(&mut pm, half + 20);
    assert!(env.line(0), "each time the highest bit changes");
}

#[test]
fn power_button_and_general_purpose_events() {
    let (mut env, mut pm) = (Script::new(), pm::AcpiPm::new());
    pm.press_power_button(&mut env);
    assert!(!env.line(0));
    outw(&mut env, &mut pm, 2, pm::spec::PWRBTN);
    assert!(env.line(0));
    assert_eq!(env.inl(&mut pm, pm::spec::PM1_EVENT), 0x0100_0100);
    env.outb(&mut pm, 1, 1);
    assert!(!env.line(0), "status bits clear by writing ones, bytewise too");
    outw(&mut env, &mut pm, 14, 1 << 3);
    pm.raise_gpe(3, &mut env);
    pm.raise_gpe(200, &mut env);
    assert!(env.line(0));
    assert_eq!(inw(&mut env, &mut pm, pm::spec::GPE0), 1 << 3);
    pm.reset(&mut env);
    assert!(!env.line(0));
    assert_eq!(env.inl(&mut pm, pm::spec::GPE0), 0);
}

#[test]
fn reset_register_resets_on_the_rise() {
    let (mut env, mut port) = (Script::new(), reset::ResetPort::new());
    env.outb(&mut port, 0, 0x02);
    assert!(env.events.is_empty());
    env.outb(&mut port, 0, 0x06);
    env.outb(&mut port, 0, 0x06);
    assert_eq!(env.events, [MachineEvent::Reset]);
    assert_eq!(env.inb(&mut port, 0), 0x06);
    port.reset(&mut env);
    env.outb(&mut port, 0, 0x0e);
    assert_eq!(env.events.len(), 2);
}

#[test]
fn port_92_resets_and_keeps_a20() {
    let (mut env, mut port) = (Script::new(), port92::Port92::new());
    assert_eq!(env.inb(&mut port, 0), port92::spec::A20);
    env.outb(&mut port, 0, 0);
    assert_eq!(env.missing.len(), 1);
    env.outb(&mut port, 0, 3);
    assert_eq!(env.events, [MachineEvent::Reset]);
}

#[test]
fn keyboard_controller_without_a_keyboard() {
    use kbd::spec::*;
    let (mut env, mut kbd) = (Script::new(), kbd::Keyboard::new());
    let status = |env: &mut Script, kbd: &mut kbd::Keyboard| env.inb(kbd, STATUS);
    assert_eq!(status(&mut env, &mut kbd) & STATUS_OUTPUT_FULL, 0);
    for (command, answer) in [
        (CMD_SELF_TEST, SELF_TEST_PASSED),
        (CMD_KBD_TEST, PORT_CLOCK_LOW),
        (CMD_AUX_TEST, PORT_CLOCK_LOW),
        (CMD_READ_OUTPUT, OUTPUT_RUN | OUTPUT_A20),
    ] {
        env.outb(&mut kbd, STATUS, command);
        assert_eq!(status(&mut env, &mut kbd) & STATUS_OUTPUT_FULL, 1);
        assert_eq!(env.inb(&mut kbd, DATA), answer);
        assert_eq!(status(&mut env, &mut kbd) & STATUS_OUTPUT_FULL, 0);
    }
    env.outb(&mut kbd, STATUS, CMD_WRITE_COMMAND_BYTE);
    env.outb(&mut kbd, DATA, COMMAND_KBD_IRQ);
    env.outb(&mut kbd, STATUS, CMD_READ_COMMAND_BYTE);
    assert!(env.line(0));
    assert_eq!(env.inb(&mut kbd, DATA), COMMAND_KBD_IRQ);
    assert!(!env.line(0));
    env.outb(&mut kbd, DATA, 0xff);
    assert_ne!(status(&mut env, &mut kbd) & STATUS_TIMEOUT, 0);
    assert_eq!(env.inb(&mut kbd, DATA), RESEND);
    env.outb(&mut kbd, STATUS, CMD_WRITE_AUX);
    env.outb(&mut kbd, DATA, 0xff);
    assert_ne!(status(&mut env, &mut kbd) & STATUS_AUX, 0);
    assert!(!env.line(0), "IRQ1 is the keyboard's");
    env.outb(&mut kbd, STATUS, 0xff);
    assert!(env.events.is_empty(), "pulses no line");
    env.outb(&mut kbd, STATUS, 0xfe);
    env.outb(&mut kbd, STATUS, CMD_WRITE_OUTPUT);
    env.outb(&mut kbd, DATA, OUTPUT_A20);
    assert_eq!(env.events, [MachineEvent::Reset; 2]);
}

#[test]
fn the_guest_ends_its_machine() {
    let (mut env, mut exit) = (Script::new(), debugexit::DebugExit::new());
    env.outb(&mut exit, 0, 63);
    env.outb(&mut exit, 0, 64);
    env.outl(&mut exit, 0, 0x1_0001);
    assert_eq!(env.events, [MachineEvent::ExitCode(63)]);
    assert_eq!(env.missing.len(), 2);
}

#[test]
fn the_guest_reports_its_panic() {
    let (mut env, mut port) = (Script::new(), pvpanic::PvPanic::new());
    assert_eq!(env.inb(&mut port, 0), 3);
    env.outb(&mut port, 0, 2);
    env.outb(&mut port, 0, 1);
    env.outb(&mut port, 0, 4);
    assert_eq!(env.events, [MachineEvent::GuestCrashLoaded, MachineEvent::GuestPanic]);
    assert_eq!(env.missing.len(), 1);
}

#[test]
fn post_code_latch() {
    let (mut env, mut port) = (Script::new(), post::PostPort::new());
    env.outb(&mut port, 0, 0xaa);
    assert_eq!((port.code(), env.inb(&mut port, 0)), (0xaa, 0xaa));
}
