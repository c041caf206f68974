//! Target `virt`: the guest of a complete board `virt` with a disk, a network device, a console, an
//! entropy source and a channel, on two vCPUs.
//!
//! The first byte of an input selects the interrupt controller, the way to the devices, the kind of
//! the vCPUs, and whether the guest drives two PCI functions of the machine itself. A sequence of
//! steps follows, each a byte for its kind (see `Step`) and its arguments; the top bit of that byte
//! selects the CPU. The run ends with the VM.
//!
//! Beside panics it detects: a call that does not return to the host, a kick of a CPU by itself, an
//! interrupt that the interrupt controller does not have, requests to a back end that are out of
//! range, and registers of a function of the machine outside of their window or over others.

use std::time::Duration;

use hw_arm64::gic::{Version, v2};
use hw_arm64::psci;
use vmm_arm64::testing::ScriptVcpu;
use vmm_arm64::{Arm64Vcpu as _, Exit, StartRequest, System, VcpuLoop, Width};
use vmm_boot::virt as layout;
use vmm_machine::{PassThroughFunction, Slots, Virt, VirtBus, VirtConfig};
use vmm_mem::GuestMemory;
use vmm_vcpu::{CounterClock, MemoryFault, StopReason};

use crate::ends::{
    CHANGE, CHANNEL, CPUS, Connected, OWN_REGISTERS, SLOTS, World, connected, place, run_steps,
};
use crate::input::{Input, Seed};

/// Kind of a step.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Step {
    /// Reads a register of a device. Place (8, see [`PLACES`]), offset (16), size.
    Read,
    /// Writes a register. Place (8), offset (16), size, value (64).
    Write,
    /// A fault with any syndrome. Place (8), offset (16), syndrome (32).
    Fault,
    /// An access by an instruction that the syndrome does not describe. Place (8), offset (16),
    /// write (8), instruction (32).
    Instruction,
    /// Accesses a system register. Syndrome (32), value (64).
    Register,
    /// Calls the firmware. By SMC (8), function (32), three arguments (64).
    Call,
    /// An instruction of a 32-bit CPU. Syndrome (32).
    AArch32,
    /// Sets a register. Number (8; system registers from 31 on), value (64).
    Set,
    /// Writes guest memory. Offset (32), length (8), bytes.
    Memory,
    /// Time passes. Nanoseconds (32).
    Run,
    /// Another exit. Kind (8), value (64).
    Exit,
    /// Delivers input. Slot, [`CHANGE`], or the serial line (8), length (16).
    Arrive,
    /// Presses the power button.
    Button,
}

const STEPS: [Step; 13] = [
    Step::Read,
    Step::Write,
    Step::Fault,
    Step::Instruction,
    Step::Register,
    Step::Call,
    Step::AArch32,
    Step::Set,
    Step::Memory,
    Step::Run,
    Step::Exit,
    Step::Arrive,
    Step::Button,
];

/// Addresses where a guest may find registers, and one where it does not.
const PLACES: [u64; 17] = [
    layout::DISTRIBUTOR,
    layout::REDISTRIBUTORS,
    layout::REDISTRIBUTORS + 0x1_0000,
    layout::REDISTRIBUTORS + 0x3_0000,
    layout::MESSAGES,
    layout::UART,
    layout::CLOCK,
    layout::BUTTON,
    layout::device(0),
    layout::channel_memory(0),
    layout::ECAM,
    layout::ECAM + 0x1_8000,
    layout::PCI_WINDOW,
    layout::PCI_WINDOW + 0x1_0000,
    layout::PCI_WINDOW + 0x1_8000,
    0x500_0000,
    layout::ECAM + ((layout::pass_through_pci_device(0) as u64) << 15),
];

/// Configuration space of a function of the machine: a capability of virtio, and MSI-X.
const OWN: [u32; 64] = {
    let mut words = [0xa5; 64];
    (words[0], words[1], words[13]) = (0x1042_1af4, 1 << 20, 0x40);
    (words[16], words[20]) = (0x0114_5009, 0x0001_0011);
    words
};
const MEMORY: u64 = 0x4_0000;
/// Event with which every call returns.
const BACK: u64 = 7;
/// Syndrome of an access that is described: class, length, validity.
const DATA_ABORT: u64 = 0x9300_0007;

thread_local! {
    static GUEST: GuestMemory = vmm_mem::testing::memory(&[(layout::RAM, MEMORY)]);
}

type Machine<'m> =
    Virt<'m, spin::relax::Spin, CPUS, Slots<Connected, SLOTS, spin::relax::Spin, VirtBus>>;

struct Rig<'m> {
    virt: Machine<'m>,
    cpus: [VcpuLoop; CPUS],
    vcpus: [ScriptVcpu; CPUS],
    world: World,
    memory: &'m GuestMemory,
}

impl<'m> Rig<'m> {
    fn new(memory: &'m GuestMemory, kind: u8) -> Self {
        let bus = if kind & 1 == 0 { VirtBus::Pci } else { VirtBus::Fixed };
        let config = VirtConfig {
            vcpus: CPUS as u8,
            clock: CounterClock::new(1_000_000, 0),
            start_unix: Duration::from_secs(1_700_000_000),
            start: StartRequest { entry: layout::RAM, argument: 0 },
            gic: if kind & 2 == 0 { Version::V3 } else { Version::V2 },
            width: if kind & 4 == 0 { Width::Bits64 } else { Width::Bits32 },
        };
        let mut virt = Virt::new(config, memory, connected(bus));
        if kind & 8 != 0 {
            let function =
                PassThroughFunction::new(|at| OWN[usize::from(at / 4)], [OWN_REGISTERS; 6]);
            virt.add_function(0, function.clone());
            virt.add_function(1, function);
        }
        Self {
            cpus: std::array::from_fn(|index| virt.cpu(index)),
            vcpus: std::array::from_fn(|_| ScriptVcpu::with_random(0x5a)),
            virt,
            world: World::default(),
            memory,
        }
    }

    /// One exit of a CPU; returns false if the VM has ended.
    fn exit(&mut self, cpu: usize, exit: Exit) -> bool {
        let vcpu = &mut self.vcpus[cpu];
        vcpu.exits = [exit, Exit::Recall { events: BACK }].into();
        self.world.running = cpu;
        let reason = self.virt.run(&mut self.cpus[cpu], vcpu, &mut self.world);
        // The guest takes them.
        for virq in vcpu.virqs.drain(..) {
            let end = layout::FIRST_MESSAGE + layout::MESSAGE_COUNT;
            assert!(virq.number & v2::NUMBER < end, "interrupt {}", virq.number);
        }
        match reason {
            StopReason::Recall(events) => assert_eq!(events, BACK),
            StopReason::Idle { .. } => {}
            StopReason::End(_) => return false,
        }
        true
    }

    fn fault(&mut self, cpu: usize, gpa: u64, syndrome: u64) -> bool {
        let fault = MemoryFault { gpa, write: syndrome & 1 << 6 != 0, fetch: false, walk: false };
        self.exit(cpu, Exit::MemoryFault { fault, syndrome })
    }

    /// A plain access to registers, by `x1`.
    fn mmio(&mut self, cpu: usize, gpa: u64, size: u8, write: Option<u64>) -> bool {
        self.vcpus[cpu].set_general(1, write.unwrap_or(0));
        let size = u64::from(size.trailing_zeros()) << 22;
        self.fault(cpu, gpa, DATA_ABORT | size | 1 << 16 | u64::from(write.is_some()) << 6)
    }

    /// An access by an instruction that the run loop decodes, at the start of memory.
    fn emulate(&mut self, cpu: usize, gpa: u64, write: bool, instruction: u32) -> bool {
        let _ = self.memory.write(layout::RAM, instruction);
        self.vcpus[cpu].set_pc(layout::RAM);
        self.fault(cpu, gpa, 0x9200_0007 | u64::from(write) << 6)
    }

    fn arrive(&mut self, slot: usize, length: usize) {
        self.world.running = CPUS;
        if slot == CHANGE {
            self.virt.functions().with_backend(CHANNEL, |backend| backend.change(length));
            self.virt.function_input(CHANNEL, None, &mut self.world);
            return self.virt.function_change(CHANNEL, None, &mut self.world);
        }
        if slot >= 4 {
            self.world.stream.0.extend(std::iter::repeat_n(b'x', length % 64));
            self.virt.input(None, &mut self.world);
            return;
        }
        self.virt.functions().with_backend(slot, |backend| backend.arrive(length));
        self.virt.function_input(slot, None, &mut self.world);
        assert!(self.virt.target(slot) < CPUS);
    }

    fn set(&mut self, cpu: usize, number: usize, value: u64) {
        use System::*;
        let system =
            [Sctlr, Vbar, Esr, Elr, Spsr, Tcr, Ttbr0, Ttbr1, Ifsr, SpsrAbort, SpsrUndefined];
        let vcpu = &mut self.vcpus[cpu];
        match number.checked_sub(31) {
            None => vcpu.set_general(number, value),
            Some(0) => vcpu.set_pc(value),
            Some(1) => vcpu.set_state(value),
            Some(register) => vcpu.set_system(system[(register - 2) % system.len()], value),
        }
    }
}

/// Runs an input.
pub fn run(bytes: &[u8]) {
    let memory = GUEST.with(Clone::clone);
    let _ = memory.fill(layout::RAM, MEMORY, 0);
    let mut input = Input::new(bytes);
    let mut rig = Rig::new(&memory, input.byte());
    run_steps(&mut input, &STEPS, |step, cpu, input| act(&mut rig, step, cpu, input));
}

/// Executes a step; returns false if the VM has ended.
fn act(rig: &mut Rig<'_>, step: Step, cpu: usize, input: &mut Input<'_>) -> bool {
    let place = |input: &mut Input<'_>| place(input, &PLACES);
    match step {
        Step::Read => {
            let address = place(input);
            rig.mmio(cpu, address, input.size(), None)
        }
        Step::Write => {
            let address = place(input);
            let size = input.size();
            rig.mmio(cpu, address, size, Some(input.long()))
        }
        Step::Fault => {
            let address = place(input);
            rig.fault(cpu, address, input.word().into())
        }
        Step::Instruction => {
            let address = place(input);
            let write = input.byte() & 1 != 0;
            rig.emulate(cpu, address, write, input.word())
        }
        Step::Register => {
            let syndrome = u64::from(input.word());
            let value = input.long();
            rig.vcpus[cpu].set_general((syndrome >> 5 & 31).min(30) as usize, value);
            rig.exit(cpu, Exit::SystemRegister { syndrome })
        }
        Step::Call => {
            let is_secure = input.byte() & 1 != 0;
            let function = input.word();
            rig.vcpus[cpu].set_general(0, function.into());
            for register in 1..4 {
                rig.vcpus[cpu].set_general(register, input.long());
            }
            rig.exit(cpu, if is_secure { Exit::SecureCall } else { Exit::Hypercall })
        }
        Step::AArch32 => rig.exit(cpu, Exit::AArch32 { syndrome: input.word().into() }),
        Step::Set => {
            let number = usize::from(input.byte());
            rig.set(cpu, number % 44, input.long());
            true
        }
        Step::Memory => {
            let (offset, length) = (input.word(), input.byte());
            let address = layout::RAM + u64::from(offset);
            let _ = rig.memory.write_slice(address, input.bytes(length.into()));
            true
        }
        Step::Run => {
            rig.world.tsc = rig.world.tsc.saturating_add(input.word().into());
            rig.exit(cpu, Exit::Deadline)
        }
        Step::Exit => other(rig, cpu, input),
        Step::Arrive => {
            let slot = usize::from(input.byte()) % 6;
            rig.arrive(slot, input.half().into());
            true
        }
        Step::Button => {
            rig.world.running = CPUS;
            rig.virt.press_power_button(&mut rig.world);
            true
        }
    }
}

fn other(rig: &mut Rig<'_>, cpu: usize, input: &mut Input<'_>) -> bool {
    let (kind, value) = (input.byte(), input.long());
    let exit = match kind % 7 {
        0 => Exit::Wait { timer: value },
        1 => Exit::Waited { events: 0 },
        2 => Exit::Preempted,
        3 => Exit::VirqEnded { number: value as u32 },
        4 => Exit::Unknown { syndrome: value },
        5 => Exit::InvalidState,
        _ => Exit::Deadline,
    };
    rig.exit(cpu, exit)
}

/// CPU 1, in the byte of a step.
const SECOND: u8 = 0x80;

impl Seed {
    fn virt(self, step: Step) -> Self {
        self.byte(step as u8)
    }

    fn write(self, place: u8, offset: u16, size: u8, value: u64) -> Self {
        self.virt(Step::Write).byte(place).half(offset).size(size).long(value)
    }

    fn call(self, function: u32, arguments: [u64; 3]) -> Self {
        let start = self.virt(Step::Call).byte(0).word(function);
        arguments.into_iter().fold(start, Seed::long)
    }

    fn in_memory(self, offset: u32, bytes: &[u8]) -> Self {
        self.virt(Step::Memory).word(offset).byte(bytes.len() as u8).bytes(bytes)
    }

    /// Settings of a GICv3 with all interrupts in group 1, enabled and edge-triggered.
    fn interrupts(self) -> Self {
        let start = self.write(0, 0, 4, 0x12);
        let all = |seed: Self, word: u16| {
            [(0x80, 0xffff_ffff), (0x100, 0xffff_ffff)]
                .into_iter()
                .fold(seed, |seed, (block, value)| seed.write(0, block + 4 * word, 4, value))
                .write(0, 0xc00 + 8 * word, 4, 0xaaaa_aaaa)
                .write(0, 0xc04 + 8 * word, 4, 0xaaaa_aaaa)
        };
        (1..4).fold(start, all).write(2, 0x80, 4, 0xffff_ffff).write(2, 0x100, 4, 0xffff_ffff)
    }

    /// A read request in queue 0 of the entropy source, with its rings in memory.
    fn request(self) -> Self {
        let ram = layout::RAM.to_le_bytes();
        let descriptor = [&ram[..], &[8, 0, 0, 0, 2, 0]].concat();
        self.in_memory(0x2000, &descriptor).in_memory(0x3000, &[0, 0, 1, 0])
    }
}

/// Registers of a virtio transport to set: offset, size and value.
const RINGS: [u64; 3] = [layout::RAM + 0x2000, layout::RAM + 0x3000, layout::RAM + 0x4000];

/// Initial inputs.
pub fn seeds() -> Vec<(&'static str, Seed)> {
    let [descriptors, driver, device] = RINGS;
    // Enable memory and bus master; MSI-X; queue 0 of the entropy source with 4 entries, vector 1.
    let function = Seed::new().byte(0).interrupts().write(10, 0x4 + 0x8000, 4, 6);
    let function = function.write(11, 0x8004, 4, 6).write(11, 0x8040, 4, 1 << 31);
    let pci = [
        (0x14, 1, 3),
        (0x08, 4, 1),
        (0x0c, 4, 1),
        (0x14, 1, 11),
        (0x18, 2, 4),
        (0x1a, 2, 1),
        (0x20, 8, descriptors),
        (0x28, 8, driver),
        (0x30, 8, device),
        (0x1c, 2, 1),
        (0x4010, 8, layout::MESSAGES + 0x40),
        (0x4018, 4, u64::from(layout::FIRST_MESSAGE) + 2),
        (0x401c, 4, 0),
        (0x14, 1, 15),
    ]
    .into_iter()
    .fold(function, |seed, (offset, size, value)| seed.write(14, offset, size, value))
    .request()
    .write(14, 0x3000, 2, 0)
    .virt(Step::Arrive)
    .byte(3)
    .half(40);
    // The same at a fixed address: slot 3.
    let fixed = [
        (0x70, 3),
        (0x24, 1),
        (0x20, 1),
        (0x70, 11),
        (0x38, 4),
        (0x80, descriptors),
        (0x90, driver),
        (0xa0, device),
        (0x44, 1),
        (0x70, 15),
        (0x50, 0),
    ]
    .into_iter()
    .fold(Seed::new().byte(1).interrupts().request(), |seed, (register, value)| {
        seed.write(8, 0x3000 + register, 4, value)
    });
    let second = Seed::new()
        .byte(0)
        .interrupts()
        .call(psci::CPU_ON as u32, [1, layout::RAM + 0x100, 5])
        .byte(SECOND | Step::Run as u8)
        .word(10)
        // ICC_SGI1R_EL1: SGI 3 to CPU 1.
        .virt(Step::Register)
        .word(0x6230_1600 | 5 << 5)
        .long(3 << 24 | 2)
        .byte(SECOND | Step::Call as u8)
        .byte(0)
        .word(psci::CPU_OFF as u32)
        .bytes(&[0; 24]);
    let instructions = [0xb800_4420, 0xa901_7c22, 0xa8c1_0440, 0x3dc0_0020].into_iter().fold(
        Seed::new().byte(1),
        |seed, instruction: u32| {
            seed.virt(Step::Instruction).byte(5).half(0).byte(1).word(instruction)
        },
    );
    let line = Seed::new()
        .byte(2)
        .write(0, 0, 4, 1)
        .write(5, 0x38, 4, 0x7f0)
        .write(5, 0, 1, b'f'.into())
        .virt(Step::Arrive)
        .byte(4)
        .half(20)
        .virt(Step::Read)
        .byte(5)
        .half(0)
        .size(4);
    let old = Seed::new()
        .byte(6)
        .virt(Step::AArch32)
        .word(0x0de0_0000)
        .virt(Step::Fault)
        .byte(5)
        .half(0)
        .word(0x9380_0046)
        .virt(Step::Button)
        .virt(Step::Exit)
        .byte(0)
        .long(5);
    // Base address 4 of both functions over each other, one of them elsewhere, and outside.
    let window = layout::PCI_WINDOW;
    let own = [
        (0x4, 6),
        (0x8004, 6),
        (0x20, window),
        (0x8020, window),
        (0x8024, window + 0x8000),
        (0x20, window + 0x8000),
        (0x10, layout::RAM),
        (0x20, u64::MAX),
        (0x4, 0),
    ];
    let own = own
        .into_iter()
        .fold(Seed::new().byte(8), |seed, (offset, value)| seed.write(16, offset, 4, value));
    vec![
        ("pci", pci),
        ("own-functions", own),
        ("fixed", fixed),
        ("second-cpu", second),
        ("instructions", instructions),
        ("serial", line),
        ("aarch32-gicv2", old),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_of_the_machine_follow_the_guest() {
        let memory = GUEST.with(Clone::clone);
        let mut rig = Rig::new(&memory, 8);
        let configuration = PLACES[16];
        for (offset, value) in [(4, 2), (0x20, layout::PCI_WINDOW), (0x10, layout::RAM)] {
            assert!(rig.mmio(0, configuration + offset, 4, Some(value)));
        }
        let placed: Vec<_> = rig.world.placed.iter().map(|(&key, &at)| (key, at)).collect();
        assert_eq!(placed, [((0, 4), layout::PCI_WINDOW)]);
    }

    #[test]
    fn seeds_reach_devices_on_both_ways() {
        for name in ["pci", "fixed"] {
            let (_, seed) = seeds().into_iter().find(|(of, _)| *of == name).expect("a seed");
            run(&seed.finish());
            let used = GUEST.with(|memory| memory.read::<u16>(RINGS[2] + 2));
            assert_eq!(used, Ok(1), "{name}");
        }
    }
}
