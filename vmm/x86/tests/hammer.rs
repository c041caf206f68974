//! No sequence of accesses, timer calls and pin changes makes an interrupt controller panic or wake
//! without end.

use proptest::prelude::*;
use vmm_bus::Env;
use vmm_bus::testing::Script;
use vmm_bus::testing::hammer::{hammer, steps};
use vmm_x86::apic::{InterruptMessage, io, local};

fn message(value: u64) -> InterruptMessage {
    InterruptMessage {
        destination: (value >> 24) as u32,
        logical: value & 1 << 20 != 0,
        delivery: (value >> 16) as u8,
        vector: value as u8,
        level: value & 1 << 21 != 0,
    }
}

fn call_local_apic(apic: &mut local::LocalApic, what: u8, value: u64, env: &mut Script) {
    let register = local::spec::X2APIC + (value >> 8 & 0x3f) as u32;
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
            let _ = apic.write_msr(local::spec::APIC_BASE, base, env);
        }
        8 => {
            let _ = apic.read_msr(register, env);
        }
        9 => {
            apic.take_events();
            apic.take_message();
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
    fn interrupt_controllers(
        steps in steps(), id: u32, tsc_khz: u32, tsc_at_zero: u64, physical_bits: u8,
    ) {
        let config = local::Config { id, bsp: false, tsc_khz, tsc_at_zero, physical_bits };
        hammer(local::LocalApic::new(config), &steps, call_local_apic);
        hammer(io::IoApic::new(id as u8), &steps, |chip, what, value, env: &mut Script| {
            match what % 3 {
                0 => chip.set_irq(value as u8, what & 4 != 0, env as &mut dyn Env),
                1 => chip.eoi(value as u8, env),
                _ => {
                    env.outl(chip, io::spec::SELECT, u32::from(what) % 0x40);
                    env.outl(chip, io::spec::WINDOW, value as u32);
                }
            }
        });
    }
}
