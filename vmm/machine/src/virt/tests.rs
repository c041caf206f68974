use super::*;
use std::string::{String, ToString};
use std::vec::Vec;
use vmm_arm64::Virq;
use vmm_mem::testing;

#[derive(Default)]
struct ScriptHost {
    kicks: Vec<usize>,
    lines: Vec<String>,
    /// Interrupts that other threads have put, and how many of them have room.
    put: Vec<(usize, u32)>,
    room: usize,
    is_running: bool,
}

impl Host for ScriptHost {
    fn counter(&self) -> u64 {
        5_000_000
    }
    fn log(&mut self, _: Level, text: fmt::Arguments<'_>) {
        self.lines.push(text.to_string());
    }
    fn put_virqs(&mut self, index: usize, take: &mut dyn FnMut() -> Option<Virq>) -> bool {
        let before = self.put.len();
        while self.put.len() < self.room
            && let Some(virq) = take()
        {
            self.put.push((index, virq.number));
        }
        self.put.len() > before
    }
    fn notify(&mut self, _: usize) -> bool {
        self.is_running
    }
    fn kick(&mut self, index: usize) {
        self.kicks.push(index);
    }
}

#[test]
fn interrupts_reach_a_vcpu_that_runs_without_a_kick() {
    let memory = testing::memory(&[(layout::RAM, 4096)]);
    let virt = Virt::<Spin, 4>::new(config(), &memory);
    let mut host = ScriptHost { room: 1, is_running: true, ..ScriptHost::default() };
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    // Group 1 and SGIs 0 to 2 of vCPU 1 are enabled.
    bus.mmio_write(0, layout::DISTRIBUTOR, 4, 0x12);
    bus.mmio_write(0, layout::REDISTRIBUTORS + 0x3_0080, 4, 7);
    bus.mmio_write(0, layout::REDISTRIBUTORS + 0x3_0100, 4, 7);
    bus.start(1, START);
    bus.service_timers(1);
    let kicks = bus.host.kicks.len();
    let send = |bus: &mut CpuBus<'_, '_, ScriptHost, Spin, 4>, number: u64| {
        bus.send(0, SoftwareInterrupt::decode(number << 24 | 1 << 1));
    };
    // Its thread has not reset it yet: it gets a kick instead.
    send(&mut bus, 0);
    assert_eq!((bus.host.put.len(), bus.host.kicks.len()), (0, kicks + 1));
    virt.devices.lock().power[1] = Power::On;
    bus.service_timers(1);
    send(&mut bus, 1);
    assert_eq!((&bus.host.put[..], bus.host.kicks.len()), (&[(1, 0)][..], kicks + 2));
    bus.host.room = 4;
    bus.service_timers(1);
    send(&mut bus, 2);
    assert_eq!(bus.host.put, [(1, 0), (1, 1), (1, 2)]);
    assert_eq!(bus.host.kicks.len(), kicks + 2, "it runs, and has all");
    bus.host.is_running = false;
    bus.host.room = 5;
    send(&mut bus, 0);
    assert_eq!(bus.host.kicks.len(), kicks + 3, "it may be idle");
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
