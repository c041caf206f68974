//! Scripts for the board.

use super::*;
use crate::pci::parts;
use core::fmt;
use core::time::Duration;
use std::string::{String, ToString};
use std::vec::Vec;
use vmm_bus::testing::ScriptStream;
use vmm_bus::{BackendRef, DeviceBackend, EntropySource};
use vmm_mem::testing;
use vmm_vcpu::MemoryFault;
use vmm_x86::testing::ScriptedVcpu;
use vmm_x86::{Event, Exit, Gpr, InterruptWindow, IoExit, Reg};

use crate::{Level, Model, Slots};

/// A host whose counter ticks once a nanosecond, advanced by the test.
#[derive(Default)]
struct TestHost {
    tsc: u64,
    stream: ScriptStream,
    log: Vec<String>,
    kicks: Vec<usize>,
}

impl Host for TestHost {
    fn counter(&self) -> u64 {
        self.tsc
    }
    fn serial(&mut self) -> BackendRef<'_> {
        BackendRef::Bytes(&mut self.stream)
    }
    fn log(&mut self, _: Level, text: fmt::Arguments<'_>) {
        self.log.push(text.to_string());
    }
    fn kick(&mut self, index: usize) {
        self.kicks.push(index);
    }
}

/// Operations of the guest in these tests.
struct Rig<'m, P = ()> {
    pc: Pc<'m, Spin, MAX_VCPUS, P>,
    cpu: Cpu,
    vcpu: ScriptedVcpu,
    host: TestHost,
}

const RFLAGS_IF: u64 = 1 << 9;

impl<'m> Rig<'m> {
    fn new(memory: &'m GuestMemory, vcpus: u8) -> Self {
        Self::with(memory, vcpus, ())
    }
}

impl<'m, P: Functions> Rig<'m, P> {
    fn with(memory: &'m GuestMemory, vcpus: u8, functions: P) -> Self {
        let config = PcConfig {
            vcpus,
            clock: CounterClock::new(1_000_000, 0),
            xcr0_mask: 7,
            start_unix: Duration::from_secs(1_700_000_000),
            kvmclock: true,
            steal_time: true,
            pv_flush: true,
            pv_ipi: true,
            nested_paging: true,
            id: 5,
        };
        let mut vcpu = ScriptedVcpu::flat32();
        vcpu.set(Reg::Rip, 0x1000);
        vcpu.next_rip = 0x1000;
        let pc = Pc::with_functions(config, memory, |_, _| [0; 4], functions);
        Self { cpu: pc.cpu(0), pc, vcpu, host: TestHost::default() }
    }

    /// Takes the offered virtual interrupt, as a CPU does, if possible: as an event of the
    /// entry.
    fn take(vcpu: &mut ScriptedVcpu) {
        let Some(entry) = vcpu.entries.last_mut() else { return };
        if let (InterruptWindow::DeliverVirq(vector), Event::NONE, true) =
            (entry.window, entry.event, entry.open)
        {
            entry.event = Event::interrupt(vector);
            vcpu.window = InterruptWindow::Nothing;
        }
    }

    /// One exit, then a return to the host.
    #[track_caller]
    fn exit(&mut self, exit: Exit) {
        self.vcpu.then(move |vcpu| {
            Self::take(vcpu);
            exit
        });
        self.vcpu.then(|vcpu| {
            Self::take(vcpu);
            Exit::Recall { events: 7 }
        });
        let pause = self.pc.run(&mut self.cpu, &mut self.vcpu, &mut self.host);
        assert_eq!(pause, StopReason::Recall(7));
    }

    fn out(&mut self, port: u16, value: u8) {
        self.vcpu.set_gpr(Gpr::Rax, value.into());
        self.exit(io(port, 1, true));
    }

    fn inb(&mut self, port: u16) -> u8 {
        self.exit(io(port, 1, false));
        self.vcpu.gpr(Gpr::Rax) as u8
    }

    fn wrmsr(&mut self, msr: u32, value: u64) {
        self.vcpu.set_gpr(Gpr::Rcx, msr.into());
        self.vcpu.set_gpr(Gpr::Rax, value & 0xffff_ffff);
        self.vcpu.set_gpr(Gpr::Rdx, value >> 32);
        self.exit(Exit::Msr { write: true });
    }

    /// A 32-bit access of `[ebx]` at an address of a device.
    fn mmio(&mut self, memory: &GuestMemory, address: u64, write: Option<u32>) -> u32 {
        let opcode: u8 = if write.is_some() { 0x89 } else { 0x8b };
        memory.write_slice(0x1000, &[opcode, 0x03]).unwrap();
        self.vcpu.set(Reg::Rip, 0x1000);
        self.vcpu.set_gpr(Gpr::Rbx, address);
        if let Some(value) = write {
            self.vcpu.set_gpr(Gpr::Rax, value.into());
        }
        let write = write.is_some();
        self.exit(Exit::MemoryFault(MemoryFault {
            gpa: address,
            write,
            fetch: false,
            walk: false,
        }));
        self.vcpu.gpr(Gpr::Rax) as u32
    }

    /// Runs with interrupts enabled; returns the events of the entries.
    fn events(&mut self) -> Vec<Event> {
        self.vcpu.set(Reg::Rflags, RFLAGS_IF);
        self.vcpu.entries.clear();
        self.exit(Exit::Spurious);
        self.vcpu.set(Reg::Rflags, 0);
        let events = self.vcpu.entries.iter().map(|entry| entry.event);
        events.filter(|event| event.is_some()).collect()
    }

    /// Programs the 8259s as an operating system does: vectors from 0x30, all inputs unmasked.
    fn init_pic(&mut self) {
        for (port, value) in [
            (0x20, 0x11),
            (0x21, 0x30),
            (0x21, 4),
            (0x21, 1),
            (0xa0, 0x11),
            (0xa1, 0x38),
            (0xa1, 2),
            (0xa1, 1),
        ] {
            self.out(port, value);
        }
        self.out(0x21, 0);
        self.out(0xa1, 0);
    }
}

fn io(port: u16, size: u8, write: bool) -> Exit {
    Exit::Io(IoExit { port, size, write, string: false, rep: false, next_rip: 0x1000 })
}

fn memory() -> GuestMemory {
    testing::memory(&[(0, 0x10_000)])
}

#[test]
fn the_tables_have_room_and_no_overlap() {
    assert_eq!(ports().regions().len(), 15);
    assert_eq!(page_of_words(layout::IO_APIC, 0x1000, Chip::IoApic).regions().len(), 1);
    for (number, &chip) in CHIPS.iter().enumerate() {
        assert_eq!(chip as usize, number);
    }
}

#[test]
fn serial_output_and_interrupt_through_the_8259() {
    let memory = memory();
    let mut rig = Rig::new(&memory, 1);
    for byte in b"hi" {
        rig.out(0x3f8, *byte);
    }
    assert_eq!(rig.host.stream.output, b"hi");
    rig.init_pic();
    rig.out(0x3fc, 0x08); // OUT2
    rig.out(0x3f9, 0x01); // received data
    assert_eq!(rig.events(), []);
    rig.host.stream.input.push_back(b'x');
    rig.pc.input(None, &mut rig.host);
    // Character time-out or trigger: at the latest a few characters later.
    rig.host.tsc += 10_000_000;
    assert_eq!(rig.events(), [Event::interrupt(0x34)]);
    assert_eq!(rig.inb(0x3f8), b'x');
    rig.out(0x20, 0x20);
    assert_eq!(rig.events(), []);
}

#[test]
fn timer_interrupts_of_the_8254() {
    let memory = memory();
    let mut rig = Rig::new(&memory, 1);
    rig.init_pic();
    rig.out(0x43, 0x34);
    rig.out(0x40, 0xa9);
    rig.out(0x40, 0x04); // 1193 ticks: 1 ms
    // The output rises with the new mode.
    assert_eq!(rig.events(), [Event::interrupt(0x30)]);
    rig.out(0x20, 0x20);
    for _ in 0..3 {
        let deadline = rig.vcpu.deadline;
        assert!(deadline > rig.host.tsc && deadline <= rig.host.tsc + 1_000_000, "{deadline}");
        rig.host.tsc = deadline;
        rig.vcpu.set(Reg::Rflags, RFLAGS_IF);
        rig.vcpu.entries.clear();
        rig.exit(Exit::Deadline);
        let delivered = rig.vcpu.entries.iter().filter(|entry| entry.event.is_some()).count();
        assert_eq!(delivered, 1);
        rig.out(0x20, 0x20);
    }
}

#[test]
fn io_apic_to_x2apic_with_tsc_deadline() {
    let memory = memory();
    let mut rig = Rig::new(&memory, 1);
    rig.wrmsr(0x1b, 0xfee0_0d00); // x2APIC
    rig.wrmsr(0x80f, 0x1ff);
    rig.wrmsr(0x832, 2 << 17 | 0xec); // TSC deadline, vector 0xec
    // The serial line on input 4, vector 0x51, to APIC 0.
    assert_eq!(rig.mmio(&memory, 0xfec0_0000, Some(0x18)), 0x18);
    rig.mmio(&memory, 0xfec0_0010, Some(0x51));
    assert_eq!(rig.mmio(&memory, 0xfec0_0010, None), 0x51);
    rig.wrmsr(0x6e0, 5_000);
    assert_eq!(rig.events(), []);
    assert_eq!(rig.vcpu.deadline, 5_001, "never early");
    // Both at once: the higher first, the lower after its EOI.
    rig.out(0x3fc, 0x08);
    rig.out(0x3f9, 0x02); // transmitter empty: at once
    rig.host.tsc = 5_001;
    assert_eq!(rig.events(), [Event::interrupt(0xec)]);
    assert_eq!(rig.events(), []);
    rig.wrmsr(0x80b, 0);
    assert_eq!(rig.events(), [Event::interrupt(0x51)]);
    rig.wrmsr(0x80b, 0);
    assert_eq!(rig.events(), []);
    assert_eq!(rig.pc.counters(), Counters::default());
}

#[test]
fn xapic_page_and_tsc_writes() {
    let memory = memory();
    let mut rig = Rig::new(&memory, 1);
    assert_eq!(rig.mmio(&memory, 0xfee0_0030, None) & 0xff, 0x14);
    rig.mmio(&memory, 0xfee0_00f0, Some(0x1ff));
    rig.mmio(&memory, 0xfee0_0320, Some(2 << 17 | 0xec));
    rig.host.tsc = 1_000;
    rig.wrmsr(0x10, 0); // the guest's counter starts again
    rig.wrmsr(0x6e0, 500);
    assert_eq!(rig.events(), []);
    assert_eq!(rig.vcpu.deadline, 1_501);
    rig.host.tsc = 1_501;
    assert_eq!(rig.events(), [Event::interrupt(0xec)]);
    // A moved page responds at its new address only.
    rig.wrmsr(0x1b, 0xfed0_0900);
    assert_eq!(rig.mmio(&memory, 0xfed0_0030, None) & 0xff, 0x14);
    assert_eq!(rig.mmio(&memory, 0xfee0_0030, None), u32::MAX);
    assert_eq!(rig.pc.counters().unknown_memory, 1);
}

#[test]
fn unknown_things_are_counted_and_logged_once() {
    let memory = memory();
    let mut rig = Rig::new(&memory, 1);
    for _ in 0..3 {
        assert_eq!(rig.inb(0x2e8), 0xff);
        rig.wrmsr(0x1234, 1);
    }
    assert_eq!(rig.mmio(&memory, 0xd000_0000, None), u32::MAX);
    // PCI configuration is absent, and its address register is no reset port.
    rig.vcpu.set_gpr(Gpr::Rax, 0x8000_0600);
    rig.exit(io(0xcf8, 4, true));
    rig.exit(io(0xcf8, 4, false));
    assert_eq!(rig.vcpu.gpr(Gpr::Rax), 0xffff_ffff);
    let counters = rig.pc.counters();
    assert_eq!(
        (counters.unknown_ports, counters.unknown_registers, counters.unknown_memory),
        (5, 3, 1)
    );
    assert_eq!(rig.host.log.len(), 4, "{:?}", rig.host.log);
}

#[test]
fn a_reset_does_not_let_the_guest_log_the_same_again() {
    let memory = memory();
    let mut logged = Once::new();
    let mut lines = Vec::new();
    for boot in 0..100 {
        let mut rig = Rig::new(&memory, 1);
        rig.pc.keep_logged(logged);
        rig.inb(0x2e8);
        // Another port at each boot.
        rig.inb(0x1000 + boot);
        // The crash kernel runs, and may report that repeatedly.
        rig.out(0x505, 2);
        rig.out(0x505, 2);
        logged = rig.pc.logged();
        lines.extend(rig.host.log);
    }
    assert!(lines[2].contains("crash kernel"), "{lines:?}");
    assert!(lines.len() < 50, "{} lines", lines.len());
    assert!(lines.last().is_some_and(|line| line.contains("only counted")), "{lines:?}");
}

#[test]
fn ways_to_end() {
    let cases: [(u16, u8, u32, Outcome); 7] = [
        (0x604, 2, 5 << 10 | 1 << 13, Outcome::PowerOff),
        (0xcf9, 1, 6, Outcome::Reset),
        (0x64, 1, 0xfe, Outcome::Reset),
        (0x92, 1, 3, Outcome::Reset),
        (0x505, 1, 1, Outcome::GuestPanic),
        (0x501, 1, 42, Outcome::Code(42)),
        (0x501, 4, 7, Outcome::Code(7)),
    ];
    for (port, size, value, outcome) in cases {
        let memory = memory();
        let mut rig = Rig::new(&memory, 1);
        rig.vcpu.set_gpr(Gpr::Rax, value.into());
        rig.vcpu.then(move |_| io(port, size, true));
        let pause = rig.pc.run(&mut rig.cpu, &mut rig.vcpu, &mut rig.host);
        assert_eq!(pause, StopReason::End(outcome), "port {port:#x}");
    }
}

#[test]
fn a_second_processor_starts_and_is_kicked() {
    let memory = memory();
    let mut rig = Rig::new(&memory, 2);
    let mut second = ScriptedVcpu::flat32();
    let mut cpu = rig.pc.cpu(1);
    let idle = StopReason::Idle { deadline_ticks: u64::MAX };
    assert_eq!(rig.pc.run(&mut cpu, &mut second, &mut rig.host), idle);
    rig.mmio(&memory, 0xfee0_0310, Some(1 << 24));
    rig.mmio(&memory, 0xfee0_0300, Some(0x4500)); // INIT
    rig.mmio(&memory, 0xfee0_0300, Some(0x4609)); // start at 0x9000
    assert_eq!(rig.host.kicks, [1], "once until it runs");
    second.then(|_| Exit::Recall { events: 1 });
    assert_eq!(rig.pc.run(&mut cpu, &mut second, &mut rig.host), StopReason::Recall(1));
    assert_eq!(second.segment(vmm_x86::Seg::Cs).base, 0x9000);
    // Its own id, and an interrupt from the first.
    second.set_gpr(Gpr::Rax, 1);
    second.next_rip = 2;
    second.then(|_| Exit::Cpuid);
    second.then(|_| Exit::Recall { events: 1 });
    rig.pc.run(&mut cpu, &mut second, &mut rig.host);
    assert_eq!(second.gpr(Gpr::Rbx) >> 24, 1);
}

#[test]
fn lowest_priority_messages_reach_an_enabled_local_apic() {
    const LOWEST: u32 = 1 << 8;
    let memory = memory();
    let mut rig = Rig::new(&memory, 2);
    let (mut second, mut cpu) = (ScriptedVcpu::flat32(), rig.pc.cpu(1));
    rig.mmio(&memory, 0xfee0_0310, Some(1 << 24));
    rig.mmio(&memory, 0xfee0_0300, Some(0x4500)); // INIT
    rig.mmio(&memory, 0xfee0_0300, Some(0x4609)); // start
    // The second has the lower priority, but does not accept interrupts.
    rig.mmio(&memory, 0xfee0_0080, Some(0x20));
    for (register, value) in [(0x19, 0xff << 24), (0x18, LOWEST | 0x51)] {
        rig.mmio(&memory, 0xfec0_0000, Some(register));
        rig.mmio(&memory, 0xfec0_0010, Some(value));
    }
    rig.out(0x3fc, 0x08); // OUT2
    rig.out(0x3f9, 0x02); // transmitter empty: at once
    assert_eq!(rig.events(), [Event::interrupt(0x51)]);
    rig.mmio(&memory, 0xfee0_00b0, Some(0));
    // It does not keep a message that it sends to all, either.
    let swap = |rig: &mut Rig<'_>, second: &mut ScriptedVcpu, cpu: &mut Cpu| {
        core::mem::swap(&mut rig.vcpu, second);
        core::mem::swap(&mut rig.cpu, cpu);
    };
    swap(&mut rig, &mut second, &mut cpu);
    rig.exit(Exit::Spurious); // It starts, which sets its registers.
    rig.vcpu.next_rip = 2;
    rig.wrmsr(0x1b, 0xfee0_0c00); // x2APIC
    rig.wrmsr(0x830, 0xffff_ffff << 32 | u64::from(LOWEST | 0x62));
    swap(&mut rig, &mut second, &mut cpu);
    assert_eq!(rig.events(), [Event::interrupt(0x62)]);
}

/// `MOV CR8, EAX` in 32-bit code (`LOCK MOV CR0, EAX`).
const MOV_CR8_EAX: &[u8] = &[0xf0, 0x0f, 0x22, 0xc0];

#[test]
fn the_task_priority_holds_interrupts_off() {
    const VECTOR: u32 = 0x41;
    const SEND_SELF: u32 = 1 << 18 | 1 << 14;
    let memory = memory();
    memory.write_slice(0x1000, MOV_CR8_EAX).unwrap();
    let mut rig = Rig::new(&memory, 1);
    rig.mmio(&memory, 0xfee0_00f0, Some(0x1ff));
    // Written through the APIC's TPR, the priority reaches the CPU.
    rig.mmio(&memory, 0xfee0_0080, Some(0x93));
    assert_eq!(rig.vcpu.cr8, 9);
    rig.mmio(&memory, 0xfee0_0300, Some(SEND_SELF | VECTOR));
    assert_eq!((rig.events(), rig.vcpu.cr8_exits), ([].into(), true));
    // The priority masks this class until it is lowered.
    memory.write_slice(0x1000, MOV_CR8_EAX).unwrap();
    for (priority, expected) in [(4, None), (3, Some(Event::interrupt(VECTOR as u8)))] {
        rig.vcpu.set(Reg::Rip, 0x1000);
        rig.vcpu.set_gpr(Gpr::Rax, priority);
        rig.exit(Exit::CrAccess { register: 8, write: true });
        assert_eq!(u64::from(rig.vcpu.cr8), priority);
        assert_eq!(rig.vcpu.cr8_exits, expected.is_none());
        assert_eq!(rig.events().first().copied(), expected);
    }
    assert_eq!(rig.mmio(&memory, 0xfee0_0080, None), 0x30);
}

/// The exit is the only sign of a write that does not change the class.
#[test]
fn a_write_of_cr8_clears_the_lower_half_of_the_task_priority() {
    let memory = memory();
    memory.write_slice(0x1000, MOV_CR8_EAX).unwrap();
    let mut rig = Rig::new(&memory, 1);
    for priority in [9, 4] {
        rig.mmio(&memory, 0xfee0_0080, Some(0x93));
        assert_eq!((rig.vcpu.cr8, rig.vcpu.cr8_exits), (9, true));
        memory.write_slice(0x1000, MOV_CR8_EAX).unwrap();
        rig.vcpu.set(Reg::Rip, 0x1000);
        rig.vcpu.set_gpr(Gpr::Rax, priority.into());
        rig.exit(Exit::CrAccess { register: 8, write: true });
        assert_eq!((rig.vcpu.cr8, rig.vcpu.cr8_exits), (priority, false));
        assert_eq!(rig.mmio(&memory, 0xfee0_0080, None), u32::from(priority) << 4);
    }
    // Another write of the register does, too.
    rig.mmio(&memory, 0xfee0_0080, Some(0x93));
    rig.mmio(&memory, 0xfee0_0080, Some(0x90));
    assert!(!rig.vcpu.cr8_exits);
}

#[test]
fn a_task_priority_that_the_guest_lowers_by_itself_loses_no_interrupt() {
    let memory = memory();
    let mut rig = Rig::new(&memory, 2);
    rig.mmio(&memory, 0xfee0_00f0, Some(0x1ff));
    rig.mmio(&memory, 0xfee0_0080, Some(0xf0));
    // A timer that another vCPU's thread services after the guest lowered its priority without
    // an exit.
    rig.mmio(&memory, 0xfee0_0320, Some(0x51));
    rig.mmio(&memory, 0xfee0_03e0, Some(0xb));
    rig.mmio(&memory, 0xfee0_0380, Some(1000));
    rig.host.tsc += 1_000_000;
    let mut second = ScriptedVcpu::flat32();
    let mut cpu = rig.pc.cpu(1);
    rig.pc.run(&mut cpu, &mut second, &mut rig.host);
    assert_eq!(rig.host.kicks, [0], "the local APIC still knows of the old priority only");
    rig.vcpu.cr8 = 0;
    assert_eq!(rig.events(), [Event::interrupt(0x51)]);
    assert_eq!(rig.mmio(&memory, 0xfee0_0080, None), 0);
}

#[test]
fn a_hypercall_interrupts_several() {
    let memory = memory();
    memory.write_slice(0x1000, &[0x0f, 0x01, 0xd9]).unwrap();
    let mut rig = Rig::new(&memory, 3);
    let mut call = |low: u64, first: u64, command: u64| {
        use hw_x86::kvm::hypercall::SEND_IPI;
        let arguments = [
            (Gpr::Rax, SEND_IPI),
            (Gpr::Rbx, low),
            (Gpr::Rcx, 0),
            (Gpr::Rdx, first),
            (Gpr::Rsi, command),
        ];
        for (register, value) in arguments {
            rig.vcpu.set_gpr(register, value);
        }
        rig.host.kicks.clear();
        rig.exit(Exit::Hypercall);
        let events: Vec<_> = rig.vcpu.entries.drain(..).map(|entry| entry.event).collect();
        (rig.vcpu.gpr(Gpr::Rax), rig.host.kicks.clone(), events.contains(&Event::NMI))
    };
    const NMI: u64 = 0x400;
    // The sender may be a target; other CPUs are kicked once until they have serviced their
    // events.
    assert_eq!(call(0b111, 0, NMI), (3, [1, 2].into(), true));
    assert_eq!(call(0b11, 1, NMI), (2, [].into(), false));
    assert_eq!(call(!0, 3, NMI), (0, [].into(), false));
    assert_eq!(call(1, 0, 0x31), (1, [].into(), false), "its local APIC is off");
}

/// Entropy of a test: constant.
struct Sevens(bool);

impl EntropySource for Sevens {
    fn fill(&mut self, to: &mut [u8]) -> bool {
        to.fill(7);
        self.0
    }
}

impl DeviceBackend for Sevens {
    fn get(&mut self) -> BackendRef<'_> {
        BackendRef::Entropy(self)
    }
}

impl<P: Functions> Rig<'_, P> {
    /// Reads or writes a 32-bit register of device 1 through the ports of PCI.
    fn config(&mut self, register: u32, write: Option<u32>) -> u32 {
        self.vcpu.set_gpr(Gpr::Rax, u64::from(0x8000_0800 | register));
        self.exit(io(layout::PCI_ADDRESS, 4, true));
        self.vcpu.set_gpr(Gpr::Rax, write.unwrap_or(0).into());
        self.exit(io(layout::PCI_DATA, 4, write.is_some()));
        self.vcpu.gpr(Gpr::Rax) as u32
    }
}

#[test]
fn a_pci_function_works_and_interrupts() {
    let memory = memory();
    let mut slots = Slots::<Sevens, 2>::new();
    assert_eq!(slots.add(Model::Entropy, Sevens(false)).ok(), Some(0));
    let mut rig = Rig::with(&memory, 1, slots);
    rig.wrmsr(0x1b, 0xfee0_0d00); // x2APIC
    rig.wrmsr(0x80f, 0x1ff);
    // Both ways to access configuration space.
    let ecam = u64::from(layout::ECAM);
    assert_eq!(rig.config(0, None), 0x1044_1af4);
    assert_eq!(rig.mmio(&memory, ecam, None), 0x0008_1b36);
    assert_eq!(rig.mmio(&memory, ecam + 0x8000, None), 0x1044_1af4);
    assert_eq!(rig.mmio(&memory, ecam + 0x1_0000, None), u32::MAX, "an empty slot");
    assert_eq!(rig.mmio(&memory, ecam + 0x1_8000, None), u32::MAX, "no slot");
    assert_eq!(rig.config(0x10, None), layout::PCI_WINDOW);
    let window = u64::from(layout::PCI_WINDOW) + 0x10_0000;
    assert_eq!(rig.mmio(&memory, window, None), u32::MAX, "it does not answer yet");
    assert_eq!(rig.pc.counters().unknown_memory, 1);
    rig.config(0x10, Some(window as u32));
    rig.config(0x04, Some(6));
    rig.config(0x40, Some(1 << 31));
    // Bytes: features, status; then a queue of 4 entries, and vector 1 for it.
    let outb = |rig: &mut Rig<'_, _>, at: u64, size: u8, value: u32| {
        let code: &[u8] = match size {
            1 => &[0x88, 0x03],
            2 => &[0x66, 0x89, 0x03],
            _ => &[0x89, 0x03],
        };
        memory.write_slice(0x1000, code).unwrap();
        rig.vcpu.set(Reg::Rip, 0x1000);
        rig.vcpu.set_gpr(Gpr::Rbx, window + at);
        rig.vcpu.set_gpr(Gpr::Rax, value.into());
        let gpa = window + at;
        rig.exit(Exit::MemoryFault(MemoryFault { gpa, write: true, fetch: false, walk: false }));
    };
    for (at, size, value) in [
        (0x14, 1, 3),
        (0x08, 4, 1),
        (0x0c, 4, 1),
        (0x14, 1, 11),
        (0x18, 2, 4),
        (0x1a, 2, 1),
        (0x20, 4, 0x2000),
        (0x28, 4, 0x3000),
        (0x30, 4, 0x4000),
        (0x1c, 2, 1),
        (0x4010, 4, 0xfee0_0000),
        (0x4018, 4, 0x61),
        (0x401c, 4, 0),
        (0x14, 1, 15),
    ] {
        outb(&mut rig, at, size, value);
    }
    memory.write_slice(0x2000, &[0, 0x50, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 2, 0]).unwrap();
    memory.write_slice(0x3000, &[0, 0, 1, 0]).unwrap();
    outb(&mut rig, 0x3000, 2, 0);
    assert_eq!(rig.events(), [], "nothing to give");
    rig.pc.functions().with_backend(0, |backend| backend.0 = true);
    rig.pc.function_input(0, Some(&rig.cpu), &mut rig.host);
    assert_eq!(memory.read::<u64>(0x5000), Ok(0x0707_0707_0707_0707));
    assert_eq!(rig.events(), [Event::interrupt(0x61)]);
    // The reset port is inside the configuration address, for single bytes.
    rig.vcpu.then(|_| io(0xcf9, 1, true));
    rig.vcpu.set_gpr(Gpr::Rax, 6);
    let pause = rig.pc.run(&mut rig.cpu, &mut rig.vcpu, &mut rig.host);
    assert_eq!(pause, StopReason::End(Outcome::Reset));
}

#[test]
fn a_full_bus_continues_with_second_functions() {
    let memory = memory();
    let mut slots = Box::new(Slots::<Sevens, MAX_FUNCTIONS>::new());
    for slot in 0..MAX_FUNCTIONS {
        assert_eq!(slots.add(Model::Entropy, Sevens(true)).ok(), Some(slot));
    }
    assert!(slots.add(Model::Entropy, Sevens(true)).is_err());
    let mut rig = Rig::with(&memory, 1, *slots);
    let ecam = u64::from(layout::ECAM);
    let mut at = |device: u64, function: u64, register| {
        rig.mmio(&memory, ecam + (device << 15 | function << 12) + register, None)
    };
    let found = |at: &mut dyn FnMut(u64, u64, u64) -> u32, function| {
        (0..32).filter(|&device| at(device, function, 0) != u32::MAX).count()
    };
    assert_eq!(found(&mut at, 0), 32, "the bridge and 31 devices");
    assert_eq!((1..8).map(|function| found(&mut at, function)).sum::<usize>(), 1);
    assert_eq!((at(1, 1, 0), at(0, 1, 0)), (0x1044_1af4, u32::MAX));
    assert_eq!(at(1, 1, 0x10), layout::PCI_WINDOW + 31 * 0x8000);
    let types: Vec<u32> = [0, 1, 2, 31].map(|device| at(device, 0, 0xc)).into();
    assert_eq!(types, [0, 1 << 23, 0, 0]);
    assert_eq!(at(1, 1, 0xc), 0);
}

#[test]
fn accesses_across_registers_are_split() {
    let split = |address, size| {
        parts(address, size).map(|part| (part.address, part.size, part.shift)).collect::<Vec<_>>()
    };
    assert_eq!(split(8, 8), [(8, 4, 0), (12, 4, 32)]);
    assert_eq!(split(7, 4), [(7, 1, 0), (8, 2, 8), (10, 1, 24)]);
    assert_eq!(split(u64::MAX, 2), [(u64::MAX, 1, 0), (0, 1, 8)]);
    assert_eq!(split(0, 0), []);
}

#[test]
fn any_port_any_value() {
    let memory = memory();
    let mut rig = Rig::new(&memory, 1);
    let mut random = 1_u64;
    for _ in 0..20_000 {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let port = (random >> 48) as u16 & 0xfff;
        let size = 1 << (random >> 44 & 3).min(2);
        let write = random >> 40 & 1 != 0;
        rig.vcpu.set_gpr(Gpr::Rax, random >> 8);
        rig.host.tsc += random & 0xffff;
        rig.vcpu.then(move |_| io(port, size, write));
        rig.vcpu.then(|_| Exit::Recall { events: 0 });
        if let StopReason::End(_) = rig.pc.run(&mut rig.cpu, &mut rig.vcpu, &mut rig.host) {
            rig = Rig::new(&memory, 1);
        }
    }
}
