use super::*;
use std::string::{String, ToString};
use std::vec::Vec;
use vmm_mem::testing;

#[derive(Default)]
struct ScriptHost {
    kicks: Vec<usize>,
    lines: Vec<String>,
}

impl Host for ScriptHost {
    fn counter(&self) -> u64 {
        5_000_000
    }
    fn log(&mut self, _: Level, text: fmt::Arguments<'_>) {
        self.lines.push(text.to_string());
    }
    fn kick(&mut self, index: usize) {
        self.kicks.push(index);
    }
}

const START: StartRequest = StartRequest { entry: layout::RAM, argument: 0 };

fn config() -> VirtConfig {
    VirtConfig { vcpus: 2, clock: CounterClock::new(1000, 0), start_unix: 100, start: START }
}

#[test]
fn vcpus_start_by_firmware_calls() {
    let memory = testing::memory(&[(layout::RAM, 4096)]);
    let virt = Virt::<Spin, 4>::new(config(), &memory);
    let mut host = ScriptHost::default();
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    assert_eq!(bus.service_timers(0).interrupts.start, Some(START));
    assert_eq!(bus.service_timers(1).interrupts.start, None);
    let request = StartRequest { entry: 4, argument: 5 };
    assert_eq!((bus.is_on(0), bus.is_on(1), bus.is_on(2)), (Some(true), Some(false), None));
    assert_eq!(bus.start(1, request), psci::SUCCESS);
    assert_eq!(bus.start(1, request), psci::ALREADY_ON);
    assert_eq!(bus.start(2, request), psci::INVALID_PARAMETERS);
    assert_eq!(bus.service_timers(1).interrupts.start, Some(request));
    bus.stopped(1);
    assert_eq!(bus.is_on(1), Some(false));
    assert_eq!(host.kicks, [1]);
}

#[test]
fn devices_are_at_their_addresses() {
    let memory = testing::memory(&[(layout::RAM, 4096)]);
    let virt = Virt::<Spin, 4>::new(config(), &memory);
    let mut host = ScriptHost::default();
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    assert_eq!(bus.mmio_read(0, layout::CLOCK, 4), 105);
    assert_eq!(bus.mmio_read(0, layout::UART + 0xfe0, 4), 0x11);
    assert_eq!(bus.mmio_read(0, layout::DISTRIBUTOR + 0xffe8, 4), 0x3b);
    assert_eq!(bus.mmio_read(0, layout::REDISTRIBUTORS + 0x2_0008, 8) >> 32, 1);
    assert!(bus.has_device(layout::UART) && !bus.has_device(layout::RAM - 4));
    for _ in 0..2 {
        bus.unknown(Unknown::SystemRegister(0xc001));
    }
    bus.end(Outcome::Reset);
    assert!(bus.needs_service(0));
    assert_eq!((virt.outcome(), virt.counters().unknown_registers), (Some(Outcome::Reset), 2));
    assert_eq!(host.lines, ["unknown system register S3_0_C0_C0_1"]);
}
