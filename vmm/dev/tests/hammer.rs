//! No sequence of accesses, timer calls and pin changes makes a model panic or wake without end.

use proptest::prelude::*;
use vmm_bus::testing::hammer::{hammer, steps};
use vmm_dev::pc::*;
use vmm_dev::virtio::console::Console;
use vmm_dev::virtio::entropy::Entropy;
use vmm_dev::virtio::input::PowerButton;
use vmm_dev::virtio::mmio::{Mmio, spec::*};

/// Registers of virtio on MMIO that a driver writes.
const WRITTEN: [u64; 16] = [
    DEVICE_FEATURES_SELECT,
    DRIVER_FEATURES,
    DRIVER_FEATURES_SELECT,
    QUEUE_SELECT,
    QUEUE_SIZE,
    QUEUE_READY,
    QUEUE_NOTIFY,
    INTERRUPT_ACK,
    STATUS,
    QUEUE_DESC,
    QUEUE_DRIVER,
    QUEUE_DEVICE,
    QUEUE_DEVICE + 4,
    SHARED_SELECT,
    CONFIG,
    GENERATION,
];

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
    fn virtio_on_mmio(steps in steps()) {
        fn write(device: &mut dyn vmm_bus::Device, what: u8, value: u64, env: &mut vmm_bus::testing::Script) {
            env.outl(device, WRITTEN[usize::from(what) % WRITTEN.len()], value as u32);
        }
        hammer(Mmio::new(Entropy::new()), &steps, |device, what, value, env| write(device, what, value, env));
        hammer(Mmio::new(Console::new()), &steps, |device, what, value, env| write(device, what, value, env));
        hammer(Mmio::new(PowerButton::new()), &steps, |device, what, value, env| {
            write(device, what, value, env);
            device.with_device(env, PowerButton::press);
        });
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
        let config = rtc::Config { unix_seconds_at_zero: start, nanos_at_zero: memory as u32 % 1_000_000_000, low_memory: memory, high_memory: !memory };
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
}
