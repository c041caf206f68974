use super::*;
use core::fmt;
use core::time::Duration;
use std::string::{String, ToString};
use std::vec::Vec;
use vmm_arm64::testing::ScriptVcpu;
use vmm_arm64::{Sgis, Virq, Width};
use vmm_bus::BackendRef;
use vmm_mem::testing;

#[derive(Default)]
struct ScriptHost {
    kicks: Vec<usize>,
    lines: Vec<String>,
    /// Interrupts that other threads have put, and how many of them have room.
    put: Vec<(usize, u32)>,
    room: usize,
    is_running: bool,
    enabled_sgis: [u16; 2],
    /// Interrupts of the doorbells of the channels in the first two slots.
    doorbells: [Option<Virq>; 2],
    /// Devices of the machine that may interrupt again.
    ended: Vec<usize>,
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
    fn set_sgis(&mut self, index: usize, sgis: Sgis) {
        self.enabled_sgis[index] = sgis.enabled;
    }
    fn set_doorbells(&mut self, virq: &mut dyn FnMut(usize) -> Option<Virq>) {
        self.doorbells = core::array::from_fn(virq);
    }
    fn end_pass_through(&mut self, number: usize) {
        self.ended.push(number);
    }
    fn notify(&mut self, _: usize) -> bool {
        self.is_running
    }
    fn kick(&mut self, index: usize) {
        self.kicks.push(index);
    }
}

#[test]
fn completions_go_to_the_vcpu_with_the_interrupt() {
    let memory = testing::memory(&[(layout::RAM, 4096)]);
    let virt = Virt::<Spin, 4>::new(config(), &memory, ());
    let mut host = ScriptHost::default();
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    let route = |slot| {
        let interrupt = u64::from(layout::device_interrupt(slot, 0));
        layout::DISTRIBUTOR + distributor::IROUTER as u64 + 8 * interrupt
    };
    bus.mmio_write(0, route(2), 8, 1);
    // An affinity of none, and any vCPU.
    bus.mmio_write(0, route(3), 8, 9);
    bus.mmio_write(0, route(4), 8, 1 << 31);
    assert_eq!([1, 2, 3, 4].map(|slot| virt.target(slot)), [0, 1, 0, 0]);
}

#[test]
fn interrupts_reach_a_vcpu_that_runs_without_a_kick() {
    let memory = testing::memory(&[(layout::RAM, 4096)]);
    let virt = Virt::<Spin, 4>::new(config(), &memory, ());
    let mut host = ScriptHost { room: 1, is_running: true, ..ScriptHost::default() };
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    // Group 1 and SGIs 0 to 2 of vCPU 1 are enabled.
    bus.mmio_write(0, layout::DISTRIBUTOR, 4, 0x12);
    bus.mmio_write(0, layout::REDISTRIBUTORS + 0x3_0080, 4, 7);
    bus.mmio_write(0, layout::REDISTRIBUTORS + 0x3_0100, 4, 7);
    bus.start(1, START);
    bus.service_timers(1);
    let kicks = bus.host.kicks.len();
    let send = |bus: &mut CpuBus<'_, '_, ScriptHost, Spin, 4, ()>, number: u64| {
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

#[test]
fn a_device_of_the_machine_interrupts_again_after_the_end() {
    let memory = testing::memory(&[(layout::RAM, 4096)]);
    let virt = Virt::<Spin, 4>::new(config(), &memory, ());
    let mut host = ScriptHost { room: 8, ..ScriptHost::default() };
    // Group 1, and interrupts 36 and 37, the second edge-triggered.
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    for (register, value) in [(0, 0x12), (0x84, 0x30), (0x104, 0x30), (0xc08, 2 << 10)] {
        bus.mmio_write(0, layout::DISTRIBUTOR + register, 4, value);
    }
    virt.devices.lock().power[0] = Power::On;
    virt.pass_through_interrupt(0, true, None, &mut host);
    virt.pass_through_interrupt(1, false, None, &mut host);
    assert_eq!(host.put, [(0, 36), (0, 37)]);
    virt.pass_through_interrupt(0, true, None, &mut host);
    assert_eq!(host.put.len(), 2, "the guest has not ended it");
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    bus.end_virq(0, 36);
    bus.end_virq(0, layout::UART_INTERRUPT);
    assert_eq!((&bus.host.ended[..], bus.host.put.len()), (&[0][..], 2), "its line is low");
    virt.pass_through_interrupt(0, true, None, &mut host);
    assert_eq!(host.put, [(0, 36), (0, 37), (0, 36)]);
}

#[test]
fn a_vcpu_learns_the_settings_of_its_interrupts() {
    let memory = testing::memory(&[(layout::RAM, 4096)]);
    let virt = Virt::<Spin, 4>::new(config(), &memory, ());
    let mut host = ScriptHost::default();
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    bus.start(1, START);
    bus.service_timers(0);
    bus.service_timers(1);
    // Each vCPU that runs, for the distributor.
    bus.mmio_write(0, layout::DISTRIBUTOR, 4, 0x12);
    assert!(bus.needs_service(0));
    assert_eq!(bus.host.kicks, [1, 1]);
    bus.service_timers(0);
    bus.service_timers(1);
    // Group 1 and SGI 2 of vCPU 1.
    bus.mmio_write(0, layout::REDISTRIBUTORS + 0x3_0080, 4, 0xffff);
    bus.mmio_write(0, layout::REDISTRIBUTORS + 0x3_0100, 4, 1 << 2);
    assert!(!bus.needs_service(0));
    assert_eq!(bus.host.kicks, [1, 1, 1], "once");
    assert_eq!(bus.host.enabled_sgis, [0, 1 << 2]);
    bus.service_timers(1);
    // Neither other registers nor reads concern it.
    bus.mmio_write(0, layout::DISTRIBUTOR + 0x104, 4, 1);
    bus.mmio_read(0, layout::REDISTRIBUTORS + 0x3_0100, 4);
    assert!(!bus.needs_service(0));
    assert_eq!(bus.host.kicks.len(), 3);
}

#[test]
fn the_host_learns_the_interrupts_of_doorbells() {
    let memory = testing::memory(&[(layout::RAM, 4096)]);
    let virt = Virt::<Spin, 4>::new(config(), &memory, ());
    let mut host = ScriptHost::default();
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    let number = layout::device_interrupt(1, 0);
    let register = |block: usize, bits: u32| {
        let offset = block + (number * bits / 32) as usize * 4;
        (layout::DISTRIBUTOR + offset as u64, u64::from(number * bits % 32))
    };
    let mut write = |(address, shift): (u64, u64), value: u64| {
        bus.mmio_write(0, address, 4, value << shift);
        bus.host.doorbells
    };
    let virq = Virq { number, priority: 0xa0, report_end: false };
    let (enable, edge) = (register(distributor::ISENABLER, 1), register(distributor::ICFGR, 2));
    // Group 1, the priority, and all but one of what it needs.
    write((layout::DISTRIBUTOR, 0), 0x12);
    write(register(distributor::IGROUPR, 1), 1);
    write(register(distributor::IPRIORITYR, 8), 0xa0);
    assert_eq!(write(enable, 1), [None, None], "a level's end would have to be reported");
    assert_eq!(write(edge, 2), [None, Some(virq)]);
    // Disabled, and enabled again.
    assert_eq!(write(register(distributor::ICENABLER, 1), 1), [None, None]);
    assert_eq!(write(enable, 1), [None, Some(virq)]);
    // To vCPU 1, and back.
    let route = (layout::DISTRIBUTOR + (distributor::IROUTER + 8 * number as usize) as u64, 0);
    assert_eq!(write(route, 1), [None, None]);
    assert_eq!(write(route, 0), [None, Some(virq)]);
    assert_eq!(write((layout::DISTRIBUTOR, 0), 0), [None, None]);
}

const START: StartRequest = StartRequest { entry: layout::RAM, argument: 0 };

fn config() -> VirtConfig {
    VirtConfig {
        vcpus: 2,
        clock: CounterClock::new(1000, 0),
        start_unix: Duration::from_secs(100),
        start: START,
        gic: Version::V3,
        width: Width::Bits64,
    }
}

#[test]
fn a_gicv2_has_one_distributor_for_all() {
    let memory = testing::memory(&[(layout::RAM, 4096)]);
    let config = VirtConfig { gic: Version::V2, ..config() };
    let virt = Virt::<Spin, 4>::new(config, &memory, ());
    let mut host = ScriptHost { room: 4, is_running: true, ..ScriptHost::default() };
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    bus.start(1, START);
    bus.service_timers(0);
    bus.service_timers(1);
    virt.devices.lock().power[1] = Power::On;
    bus.mmio_write(0, layout::DISTRIBUTOR, 4, 1);
    // The registers of private interrupts are those of the vCPU that accesses them.
    let enables = layout::DISTRIBUTOR + 0x100;
    let mut other_host = ScriptHost::default();
    let mut other = CpuBus { virt: &virt, host: &mut other_host, cpu: 1, needs_service: false };
    other.mmio_write(1, enables, 4, 1 << 2);
    assert_eq!((bus.mmio_read(0, enables, 4), other.mmio_read(1, enables, 4)), (0, 1 << 2));
    bus.service_timers(1);
    // SGI 2 of vCPU 0 to vCPU 1, which runs.
    bus.mmio_write(0, layout::DISTRIBUTOR + 0xf00, 4, 2 << 16 | 2);
    assert_eq!(bus.host.put, [(1, 2)]);
    assert_eq!(other.host.enabled_sgis, [0, 0], "the host delivers none by itself");
    // The CPU's interface is memory of the guest, and there are no redistributors.
    assert!(!bus.has_device(layout::CPU_INTERFACE));
    assert_eq!(bus.mmio_read(0, layout::REDISTRIBUTORS + 0x8, 8), 0);
}

#[test]
fn vcpus_start_by_firmware_calls() {
    let memory = testing::memory(&[(layout::RAM, 4096)]);
    let virt = Virt::<Spin, 4>::new(config(), &memory, ());
    let mut host = ScriptHost::default();
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    assert_eq!(bus.service_timers(0).interrupts.start, Some(START));
    assert_eq!(bus.service_timers(1).interrupts.start, None);
    let mut vcpu = ScriptVcpu::default();
    bus.put_virqs(0, &mut vcpu);
    let request = StartRequest { entry: layout::RAM + 5, argument: 5 };
    let states = [0, 1, 2].map(|affinity| bus.power_state(affinity));
    assert_eq!(states, [Some(PowerState::On), Some(PowerState::Off), None]);
    for entry in [layout::RAM - 1, layout::RAM + 4096, u64::MAX] {
        let outside = StartRequest { entry, ..request };
        assert_eq!(bus.start(1, outside), psci::INVALID_ADDRESS, "{entry:#x}");
        assert_eq!(bus.start(2, outside), psci::INVALID_PARAMETERS, "{entry:#x}");
    }
    assert_eq!(bus.start(1, request), psci::SUCCESS);
    assert_eq!(bus.start(2, request), psci::INVALID_PARAMETERS);
    let pending = (psci::ON_PENDING, Some(PowerState::OnPending));
    assert_eq!((bus.start(1, request), bus.power_state(1)), pending);
    assert_eq!(bus.service_timers(1).interrupts.start, Some(request));
    assert_eq!((bus.start(1, request), bus.power_state(1)), pending, "it has not run");
    // The thread of a vCPU does this before the guest runs.
    bus.put_virqs(1, &mut vcpu);
    let running = (psci::ALREADY_ON, Some(PowerState::On));
    assert_eq!((bus.start(1, request), bus.power_state(1)), running);
    bus.stopped(1);
    assert_eq!(bus.power_state(1), Some(PowerState::Off));
    assert_eq!(host.kicks, [1]);
}

#[test]
fn devices_are_at_their_addresses() {
    let memory = testing::memory(&[(layout::RAM, 4096)]);
    let virt = Virt::<Spin, 4>::new(config(), &memory, ());
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

/// An entropy source that has bytes, and a console without any.
enum BackEnd {
    Entropy(usize),
    Console(vmm_bus::testing::ScriptStream),
}

impl vmm_bus::DeviceBackend for BackEnd {
    fn get(&mut self) -> BackendRef<'_> {
        match self {
            Self::Entropy(left) => BackendRef::Entropy(left),
            Self::Console(stream) => BackendRef::Bytes(stream),
        }
    }
}

type SlotsBus<'a, 'm> =
    CpuBus<'a, 'm, ScriptHost, Spin, 4, crate::Slots<BackEnd, 3, Spin, VirtBus>>;

/// Initialises queue `queue` of the device in a slot, with rings from `rings` on, in which buffer 0
/// is available.
fn set_up(bus: &mut SlotsBus<'_, '_>, slot: usize, queue: u64, rings: u64, flags: u16) {
    use vmm_dev::virtio::mmio::spec::*;
    let mut write =
        |register: u64, value: u64| bus.mmio_write(0, layout::device(slot) + register, 4, value);
    for (register, value) in [
        (STATUS, 3),
        (DRIVER_FEATURES_SELECT, 1),
        (DRIVER_FEATURES, 1),
        (STATUS, 11),
        (QUEUE_SELECT, queue),
        (QUEUE_SIZE, 4),
        (QUEUE_DESC, rings),
        (QUEUE_DRIVER, rings + 0x100),
        (QUEUE_DEVICE, rings + 0x200),
        (QUEUE_READY, 1),
    ] {
        write(register, value);
    }
    let memory = bus.memory();
    memory.write(rings, layout::RAM).expect("in memory");
    memory.write(rings + 8, 64_u32).expect("in memory");
    memory.write(rings + 12, flags).expect("in memory");
    memory.write(rings + 0x102, 1_u16).expect("in memory");
    bus.mmio_write(0, layout::device(slot) + STATUS, 4, 15);
}

#[test]
fn devices_in_slots_interrupt_by_their_lines() {
    use vmm_dev::virtio::mmio::spec::*;
    let memory = testing::memory(&[(layout::RAM, 0x4000)]);
    let mut slots = crate::Slots::new();
    assert_eq!(slots.add(crate::Model::Entropy, BackEnd::Entropy(200)).ok(), Some(0));
    let stream = vmm_bus::testing::ScriptStream { room: Some(10), ..Default::default() };
    assert_eq!(slots.add(crate::Model::Console, BackEnd::Console(stream)).ok(), Some(1));
    let virt = Virt::<Spin, 4, _>::new(config(), &memory, slots);
    let mut host = ScriptHost::default();
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    bus.service_timers(0);
    // Group 1, and the interrupts of the slots, edge-triggered.
    bus.mmio_write(0, layout::DISTRIBUTOR, 4, 0x12);
    for (block, value) in [(0x84, 0xffff_0000), (0x104, 0xffff_0000), (0xc0c, 0xaaaa_aaaa)] {
        bus.mmio_write(0, layout::DISTRIBUTOR + block, 4, value);
    }
    let device = |slot| layout::device(slot);
    assert_eq!(bus.mmio_read(0, device(0) + MAGIC, 4), u64::from(MAGIC_VALUE));
    assert_eq!([0, 1].map(|slot| bus.mmio_read(0, device(slot) + DEVICE_ID, 4)), [4, 3]);
    assert_eq!(bus.mmio_read(0, device(2), 4), 0xffff_ffff, "an empty slot");
    assert_eq!(bus.mmio_read(0, device(0) + 2, 4), 0, "not aligned");
    assert!(bus.has_device(device(2)) && !bus.has_device(device(3)));
    assert!(!bus.has_device(layout::channel_memory(0)), "no channel");

    set_up(&mut bus, 0, 0, layout::RAM + 0x1000, 2);
    assert!(bus.needs_service, "its interrupt is for this vCPU");
    let take = |virt: &Virt<'_, Spin, 4, _>| virt.devices.lock().gic.take_virq(0);
    let virq = take(&virt).map(|virq| (virq.number, virq.report_end));
    assert_eq!((virq, take(&virt)), (Some((48, false)), None));
    assert_eq!(bus.mmio_read(0, device(0) + INTERRUPT_STATUS, 4), 1);

    // The console has no room for everything: it continues when the host has room.
    set_up(&mut bus, 1, 1, layout::RAM + 0x2000, 0);
    assert_eq!(take(&virt), None);
    virt.functions.with_backend(1, |end| {
        if let BackEnd::Console(stream) = end {
            stream.room = None;
        }
    });
    virt.function_input(1, None, &mut host);
    assert_eq!(take(&virt).map(|virq| virq.number), Some(50));
}

#[test]
fn functions_of_pci_interrupt_by_messages() {
    use vmm_dev::virtio::pci::spec::*;
    let memory = testing::memory(&[(layout::RAM, 0x4000)]);
    let mut slots = crate::Slots::<BackEnd, 3, Spin, VirtBus>::on(VirtBus::Pci);
    assert_eq!(slots.add(crate::Model::Entropy, BackEnd::Entropy(200)).ok(), Some(0));
    let virt = Virt::<Spin, 4, _>::new(config(), &memory, slots);
    let mut host = ScriptHost::default();
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    bus.service_timers(0);
    let function = layout::ECAM + (1 << 15);
    assert_eq!(bus.mmio_read(0, layout::ECAM, 4), 0x0008_1b36, "the bridge");
    assert_eq!(bus.mmio_read(0, function, 4), 0x1044_1af4);
    assert_eq!(bus.mmio_read(0, function + (1 << 15), 4), 0xffff_ffff, "an empty slot");
    assert_eq!(bus.mmio_read(0, layout::device(0), 4), 0xffff_ffff, "it is on PCI");
    assert!(bus.has_device(layout::PCI_WINDOW) && bus.has_device(layout::ECAM));
    assert_eq!(bus.mmio_read(0, layout::MESSAGES + 8, 4), 80 << 16 | 48);
    // The window elsewhere than at power-on; memory and messages; MSI-X.
    let window = layout::PCI_WINDOW + 0x10_0000;
    for (register, value) in [(0x10, window), (0x04, 6), (0x40, 1 << 31)] {
        bus.mmio_write(0, function + register, 4, value);
    }
    let interrupt = layout::FIRST_MESSAGE + 2;
    let rings = layout::RAM + 0x1000;
    for (register, size, value) in [
        (STATUS, 1, 3),
        (DRIVER_FEATURE_SELECT, 4, 1),
        (DRIVER_FEATURE, 4, 1),
        (STATUS, 1, 11),
        (QUEUE_SIZE, 2, 4),
        (QUEUE_VECTOR, 2, 1),
        (QUEUE_DESC, 8, rings),
        (QUEUE_DRIVER, 8, rings + 0x100),
        (QUEUE_DEVICE, 8, rings + 0x200),
        (QUEUE_ENABLE, 2, 1),
        (TABLE + 16, 8, layout::MESSAGES + 0x40),
        (TABLE + 24, 4, interrupt.into()),
        (TABLE + 28, 4, 0),
    ] {
        bus.mmio_write(0, window + register, size, value);
    }
    memory.write(rings, layout::RAM).expect("in memory");
    memory.write(rings + 8, 64_u32).expect("in memory");
    memory.write(rings + 12, 2_u16).expect("in memory");
    memory.write(rings + 0x102, 1_u16).expect("in memory");
    // Group 1 and messages are enabled, edge-triggered, and that of the device is for vCPU 1.
    bus.mmio_write(0, layout::DISTRIBUTOR, 4, 0x12);
    for (block, value) in [(0x88, 0xffff_0000), (0x108, 0xffff_0000), (0xc14, 0xaaaa_aaaa)] {
        bus.mmio_write(0, layout::DISTRIBUTOR + block, 4, value);
    }
    bus.mmio_write(0, layout::DISTRIBUTOR + 0x6000 + 8 * u64::from(interrupt), 8, 1);
    bus.mmio_write(0, window + STATUS, 1, 15);
    let take = |cpu| virt.devices.lock().gic.take_virq(cpu).map(|virq| virq.number);
    assert_eq!([take(0), take(1), take(1)], [None, Some(interrupt), None]);
    assert_eq!(virt.target(0), 1, "completions go there");

    // A CPU may send a message, too; other numbers are none.
    bus.mmio_write(0, layout::MESSAGES + 0x40, 4, u64::from(interrupt) + 1);
    bus.mmio_write(0, layout::MESSAGES + 0x40, 4, u64::from(layout::UART_INTERRUPT));
    assert_eq!([take(0), take(0)], [Some(interrupt + 1), None]);
    bus.mmio_write(0, window + TABLE + 24, 4, u64::from(layout::FIRST_MESSAGE) + 48);
    let messages = |host: &ScriptHost| host.lines.len();
    memory.write(rings + 0x102, 2_u16).expect("in memory");
    virt.function_input(0, None, &mut host);
    assert_eq!((take(0), messages(&host)), (None, 1), "{:?}", host.lines);
}

#[test]
fn timers_of_slots_are_deadlines_of_the_first_vcpu() {
    let memory = testing::memory(&[(layout::RAM, 0x4000)]);
    let mut slots = crate::Slots::<BackEnd, 3, Spin, VirtBus>::new();
    assert!(slots.add(crate::Model::Entropy, BackEnd::Entropy(0)).is_ok());
    let virt = Virt::<Spin, 4, _>::new(config(), &memory, slots);
    let mut host = ScriptHost::default();
    // VM time is 5 s.
    let now = 5_000_000_000;
    let arm = |host: &mut ScriptHost, running, deadline| {
        virt.with_function(0, host, running, |_, env| env.arm(0, deadline));
    };
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    bus.service_timers(0);
    arm(&mut host, Some(1), now + 7);
    assert_eq!(host.kicks, [0], "another thread must tell the first vCPU");
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    assert_eq!(bus.service_timers(0).deadline, now + 7);
    assert_eq!(bus.service_timers(1).deadline, NEVER);
    arm(&mut host, Some(0), now);
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    assert_eq!(bus.service_timers(0).deadline, NEVER, "it was called");
    assert_eq!(host.kicks, [0]);
}

#[test]
fn a_press_of_the_power_button_interrupts_the_guest() {
    use vmm_dev::virtio::mmio::spec::*;
    let memory = testing::memory(&[(layout::RAM, 0x4000)]);
    let virt = Virt::<Spin, 4, _>::new(
        config(),
        &memory,
        crate::Slots::<BackEnd, 3, Spin, VirtBus>::new(),
    );
    let mut host = ScriptHost::default();
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    assert_eq!(bus.mmio_read(0, layout::BUTTON + DEVICE_ID, 4), 18);
    // Its registers are those of a device in a slot at another address.
    for (register, value) in [
        (STATUS, 3),
        (DRIVER_FEATURES_SELECT, 1),
        (DRIVER_FEATURES, 1),
        (STATUS, 11),
        (QUEUE_SIZE, 4),
        (QUEUE_DESC, layout::RAM + 0x1000),
        (QUEUE_DRIVER, layout::RAM + 0x1100),
        (QUEUE_DEVICE, layout::RAM + 0x1200),
        (QUEUE_READY, 1),
        (STATUS, 15),
    ] {
        bus.mmio_write(0, layout::BUTTON + register, 4, value);
    }
    memory.write(layout::RAM + 0x1000, layout::RAM).expect("in memory");
    memory.write(layout::RAM + 0x1008, 8_u32).expect("in memory");
    memory.write(layout::RAM + 0x100c, 2_u16).expect("in memory");
    memory.write(layout::RAM + 0x1102, 1_u16).expect("in memory");
    virt.press_power_button(&mut host);
    assert_eq!(memory.read::<u16>(layout::RAM + 0x1202).expect("in memory"), 1);
    let mut bus = CpuBus { virt: &virt, host: &mut host, cpu: 0, needs_service: false };
    assert_eq!(bus.mmio_read(0, layout::BUTTON + INTERRUPT_STATUS, 4), 1);
    bus.mmio_write(0, layout::DISTRIBUTOR, 4, 0x12);
    for block in [0x84, 0x104] {
        bus.mmio_write(0, layout::DISTRIBUTOR + block, 4, 4);
    }
    let virq = virt.devices.lock().gic.take_virq(0);
    assert_eq!(virq.map(|virq| (virq.number, virq.report_end)), Some((34, true)));
}
