//! No sequence of accesses, timer calls and pin changes makes a model panic or wake without end.

use proptest::prelude::*;
use vmm_bus::testing::Script;
use vmm_bus::{Access, Device, Env, InterruptMessage, Nanos, WAKE_INPUT};
use vmm_dev::pc::*;

/// One operation of a guest or a host.
#[derive(Clone, Copy, Debug)]
enum Step {
    Read(Access),
    Write(Access, u64),
    Wake(u8),
    Advance(Nanos),
    Jump(Nanos),
    Input(u8),
    Room(usize),
    Reset,
    /// For the chips with methods: a call chosen by the numbers.
    Call(u8, u64),
}

/// Offsets: mostly existing registers, sometimes any.
fn offset() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => 0_u64..16,
        4 => (0_u64..0x40).prop_map(|r| r * 16),
        1 => any::<u64>(),
    ]
}

fn access() -> impl Strategy<Value = Access> {
    let size = prop_oneof![4 => prop::sample::select(vec![1_u8, 2, 4, 8]), 1 => any::<u8>()];
    (offset(), size).prop_map(|(offset, size)| Access::new(offset, size))
}

fn value() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 0_u64..256, 2 => any::<u32>().prop_map(u64::from), 1 => any::<u64>()]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => access().prop_map(Step::Read),
        10 => (access(), value()).prop_map(|(a, v)| Step::Write(a, v)),
        1 => prop::sample::select(vec![0_u8, 1, WAKE_INPUT]).prop_map(Step::Wake),
        2 => (0_u64..2_000_000).prop_map(Step::Advance),
        1 => any::<u64>().prop_map(Step::Jump),
        1 => any::<u8>().prop_map(Step::Input),
        1 => (0_usize..20).prop_map(Step::Room),
        1 => Just(Step::Reset),
        4 => (any::<u8>(), value()).prop_map(|(w, v)| Step::Call(w, v)),
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..300)
}

fn hammer<D: Device>(
    mut device: D,
    steps: &[Step],
    mut call: impl FnMut(&mut D, u8, u64, &mut Script),
) {
    let mut env = Script::new();
    for step in steps {
        match *step {
            Step::Read(access) => {
                device.read(access, &mut env);
            }
            Step::Write(access, value) => device.write(access, value, &mut env),
            Step::Wake(timer) => device.wake(timer, &mut env),
            Step::Advance(span) => env.advance(&mut device, span),
            Step::Jump(span) => env.now = env.now.saturating_add(span >> 4),
            Step::Input(byte) => env.send(&mut device, &[byte; 3]),
            Step::Room(room) => env.room = Some(room),
            Step::Reset => device.reset(&mut env),
            Step::Call(what, value) => call(&mut device, what, value, &mut env),
        }
    }
}

fn message(value: u64) -> InterruptMessage {
    InterruptMessage {
        destination: (value >> 24) as u32,
        logical: value & 1 << 20 != 0,
        delivery: (value >> 16) as u8,
        vector: value as u8,
        level: value & 1 << 21 != 0,
    }
}

fn call_lapic(apic: &mut lapic::LocalApic, what: u8, value: u64, env: &mut Script) {
    let register = lapic::spec::X2APIC + (value >> 8 & 0x3f) as u32;
    match what % 12 {
        0 => {
            apic.deliver(&message(value));
        }
        1 => apic.accept(apic.pending().unwrap_or(value as u8)),
        2 => {
            apic.eoi();
        }
        3 => apic.set_lint(value as u8, value & 0x100 != 0),
        4 => apic.set_tsc_deadline(value, env),
        5 => apic.sync_tsc(value, env),
        6 => apic.init(env),
        7 => {
            let modes = [0, 0x800, 0xc00, 0x400];
            let base = 0xfee0_0000 | modes[value as usize % 4] | value & 0x8000_0000_0000_0000;
            let _ = apic.write_msr(lapic::spec::APIC_BASE, base, env);
        }
        8 => {
            let _ = apic.read_msr(register, env);
        }
        9 => {
            apic.take_events();
            apic.matches(&message(value));
        }
        _ => {
            let _ = apic.write_msr(register, value & 0xff | value >> 8 & !0xff, env);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn port_chips(steps in steps()) {
        hammer(uart::Uart::new(), &steps, |_, _, _, _| {});
        hammer(pit::Pit::new(), &steps, |_, _, _, _| {});
        hammer(kbd::Keyboard::new(), &steps, |_, _, _, _| {});
        hammer(port92::Port92::new(), &steps, |_, _, _, _| {});
        hammer(reset::ResetPort::new(), &steps, |_, _, _, _| {});
        hammer(post::PostPort::new(), &steps, |_, _, _, _| {});
        hammer(pvpanic::PvPanic::new(), &steps, |_, _, _, _| {});
        hammer(debugexit::DebugExit::new(), &steps, |_, _, _, _| {});
    }

    #[test]
    fn pic(steps in steps()) {
        hammer(pic::PicPair::new(), &steps, |pic, what, value, _| {
            if what % 2 == 0 {
                pic.set_irq(value as u8, what & 2 != 0);
            } else if pic.intr() {
                pic.acknowledge();
            }
        });
    }

    #[test]
    fn clocks(steps in steps(), start: i64, memory: u64) {
        let config = rtc::Config { unix_seconds_at_zero: start, low_memory: memory, high_memory: !memory };
        // The index port makes every register reachable by the call.
        hammer(rtc::Rtc::new(config), &steps, |rtc, what, value, env| {
            env.outb(rtc, rtc::spec::INDEX, what % 16);
            env.outb(rtc, rtc::spec::DATA, value as u8);
        });
        hammer(pm::AcpiPm::new(), &steps, |pm, what, value, env| {
            if what % 2 == 0 {
                pm.raise_gpe(value as u8, env);
            } else {
                pm.press_power_button(env);
            }
        });
    }

    #[test]
    fn interrupt_controllers(
        steps in steps(), id: u32, tsc_khz: u32, tsc_at_zero: u64, physical_bits: u8,
    ) {
        let config = lapic::Config { id, bsp: false, tsc_khz, tsc_at_zero, physical_bits };
        hammer(lapic::LocalApic::new(config), &steps, call_lapic);
        hammer(ioapic::IoApic::new(id as u8), &steps, |chip, what, value, env: &mut Script| {
            match what % 3 {
                0 => chip.set_irq(value as u8, what & 4 != 0, env as &mut dyn Env),
                1 => chip.eoi(value as u8, env),
                _ => {
                    env.outl(chip, ioapic::spec::SELECT, u32::from(what) % 0x40);
                    env.outl(chip, ioapic::spec::WINDOW, value as u32);
                }
            }
        });
    }
}
