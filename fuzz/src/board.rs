//! Target `board`: the guest of a complete board `pc` with a disk, a network device, a console, an
//! entropy source and a channel, on two vCPUs.
//!
//! An input is a sequence of steps, each a byte for its kind (see `Step`) and its arguments; the
//! top bit of that byte selects the CPU. The run ends with the VM.
//!
//! Beside panics it detects: a call that does not return to the host, a kick of a CPU by itself,
//! and requests to a back end that are out of range.

use std::time::Duration;

use vmm_machine::functions::PciBus;
use vmm_machine::{Pc, PcConfig, Slots, layout};
use vmm_mem::GuestMemory;
use vmm_vcpu::{CounterClock, MemoryFault, StopReason};
use vmm_x86::testing::ScriptedVcpu;
use vmm_x86::{Cpu, Exit, Gpr, IoExit, Reg, X86Vcpu};

use crate::ends::{CHANGE, CHANNEL, CPUS, Connected, SLOTS, World, connected, place, run_steps};
use crate::input::{Input, Seed};

/// Kind of a step.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Step {
    /// Accesses a port. Port (16), kind (8; bits 0–1 size, 2 write, 3 string, 4 rep), value (32).
    Port,
    /// Reads memory-mapped registers. Place (8, see [`PLACES`]), offset (16), size.
    Read,
    /// Writes memory-mapped registers. Place (8), offset (16), size, value (32).
    Write,
    /// Emulates an instruction. Place (8), offset (16), kind of access (8; bit 0 write, 1 fetch, 2
    /// page walk), length (8), bytes.
    Instruction,
    /// Accesses an MSR. Number (32), write (8), value (64).
    Msr,
    /// `CPUID`. Leaf (32), subleaf (8).
    Cpuid,
    /// Accesses configuration space by ports. Device (8), register (8), kind (8; as ports), value
    /// (32)
    Config,
    /// Writes guest memory. Address (32), length (8), bytes.
    Memory,
    /// Runs with interrupts enabled or disabled (8) after a number of nanoseconds (32).
    Run,
    /// Another exit. Kind (8), value (64).
    Exit,
    /// Delivers input. Slot, [`CHANGE`], or the serial line (8), length (16).
    Arrive,
    /// Presses the power button.
    Button,
}

const STEPS: [Step; 12] = [
    Step::Port,
    Step::Read,
    Step::Write,
    Step::Instruction,
    Step::Msr,
    Step::Cpuid,
    Step::Config,
    Step::Memory,
    Step::Run,
    Step::Exit,
    Step::Arrive,
    Step::Button,
];

/// Addresses where a guest may find registers: windows of PCI functions, configuration space, I/O
/// APIC, local APIC, and an unmapped address.
const PLACES: [u64; 10] = [
    layout::PCI_WINDOW as u64,
    layout::PCI_WINDOW as u64 + 0x8000,
    layout::PCI_WINDOW as u64 + 0x1_0000,
    layout::PCI_WINDOW as u64 + 0x1_8000,
    layout::ECAM as u64,
    layout::ECAM as u64 + 0x1_8000,
    layout::IO_APIC,
    layout::LOCAL_APIC,
    0xfed0_0000,
    layout::PCI_WINDOW as u64 + 0x2_0000,
];

const MEMORY: u64 = 0x4_0000;
/// Address of the instruction to emulate.
const CODE: u64 = 0x1000;
/// Event with which every call returns.
const BACK: u64 = 7;

thread_local! {
    static GUEST: GuestMemory = vmm_mem::testing::memory(&[(0, MEMORY)]);
}

type Machine<'m> = Pc<'m, spin::relax::Spin, CPUS, Slots<Connected, SLOTS>>;

struct Rig<'m> {
    pc: Machine<'m>,
    cpus: [Cpu; CPUS],
    vcpus: [ScriptedVcpu; CPUS],
    world: World,
    memory: &'m GuestMemory,
}

impl<'m> Rig<'m> {
    fn new(memory: &'m GuestMemory) -> Self {
        let config = PcConfig {
            vcpus: CPUS as u8,
            clock: CounterClock::new(1_000_000, 0),
            xcr0_mask: 7,
            start_unix: Duration::from_secs(1_700_000_000),
            kvmclock: true,
            steal_time: true,
            pv_flush: true,
            pv_ipi: true,
            nested_paging: true,
            id: 1,
        };
        let pc = Pc::with_functions(config, memory, |_, _| [0; 4], connected(PciBus));
        Self {
            cpus: std::array::from_fn(|index| pc.cpu(index)),
            vcpus: std::array::from_fn(|_| ScriptedVcpu::flat32()),
            pc,
            world: World::default(),
            memory,
        }
    }

    /// One exit of a CPU; returns false if the VM has ended.
    fn exit(&mut self, cpu: usize, exit: Exit) -> bool {
        let vcpu = &mut self.vcpus[cpu];
        vcpu.script.clear();
        vcpu.entries.clear();
        vcpu.then(move |_| exit);
        vcpu.then(|_| Exit::Recall { events: BACK });
        self.world.running = cpu;
        match self.pc.run(&mut self.cpus[cpu], vcpu, &mut self.world) {
            StopReason::Recall(events) => assert_eq!(events, BACK),
            StopReason::Idle { .. } => {}
            StopReason::End(_) => return false,
        }
        true
    }

    fn io(&mut self, cpu: usize, port: u16, kind: u8, value: u32) -> bool {
        let size = 1 << (kind & 3).min(2);
        let (write, string, rep) = (kind & 4 != 0, kind & 8 != 0, kind & 16 != 0);
        let vcpu = &mut self.vcpus[cpu];
        vcpu.set_gpr(Gpr::Rax, value.into());
        if string {
            // A string instruction is read from memory, because the exit does not describe it
            // completely.
            let opcode = if write { 0x6f } else { 0x6d } - u8::from(size == 1);
            let code: &[u8] = if rep { &[0xf3, opcode] } else { &[opcode] };
            let _ = self.memory.write_slice(CODE, code);
            vcpu.set(Reg::Rip, CODE);
            vcpu.set_gpr(Gpr::Rdx, port.into());
            vcpu.set_gpr(Gpr::Rsi, (value & 0x3_ffff).into());
            vcpu.set_gpr(Gpr::Rdi, (value & 0x3_ffff).into());
            vcpu.set_gpr(Gpr::Rcx, (value >> 24).into());
        }
        self.exit(cpu, Exit::Io(IoExit { port, size, write, string, rep, next_rip: CODE + 2 }))
    }

    /// Emulates the instruction at [`CODE`], which accesses `address` through `ebx`.
    fn emulate(&mut self, cpu: usize, code: &[u8], address: u64, access: u8, value: u32) -> bool {
        let _ = self.memory.write_slice(CODE, code);
        let vcpu = &mut self.vcpus[cpu];
        vcpu.set(Reg::Rip, CODE);
        vcpu.set_gpr(Gpr::Rbx, address);
        vcpu.set_gpr(Gpr::Rax, value.into());
        let (write, fetch, walk) = (access & 1 != 0, access & 2 != 0, access & 4 != 0);
        self.exit(cpu, Exit::MemoryFault(MemoryFault { gpa: address, write, fetch, walk }))
    }

    /// A plain access to registers.
    fn mmio(&mut self, cpu: usize, address: u64, size: u8, write: Option<u32>) -> bool {
        let opcode = if write.is_some() { 0x89 } else { 0x8b } - u8::from(size == 1);
        let code: &[u8] = if size == 2 { &[0x66, opcode, 0x03] } else { &[opcode, 0x03] };
        self.emulate(cpu, code, address, write.is_some().into(), write.unwrap_or(0))
    }

    fn arrive(&mut self, slot: usize, length: usize) {
        self.world.running = CPUS;
        if slot == CHANGE {
            self.pc.functions().with_backend(CHANNEL, |backend| backend.change(length));
            self.pc.function_input(CHANNEL, None, &mut self.world);
            return self.pc.function_change(CHANNEL, None, &mut self.world);
        }
        if slot >= 4 {
            self.world.stream.0.extend(std::iter::repeat_n(b'x', length % 64));
            self.pc.input(None, &mut self.world);
            return;
        }
        self.pc.functions().with_backend(slot, |backend| backend.arrive(length));
        self.pc.function_input(slot, None, &mut self.world);
    }
}

/// Runs an input.
pub fn run(bytes: &[u8]) {
    let memory = GUEST.with(Clone::clone);
    let _ = memory.fill(0, MEMORY, 0);
    let mut rig = Rig::new(&memory);
    let mut input = Input::new(bytes);
    run_steps(&mut input, &STEPS, |step, cpu, input| act(&mut rig, step, cpu, input));
}

/// Executes a step; returns false if the VM has ended.
fn act(rig: &mut Rig<'_>, step: Step, cpu: usize, input: &mut Input<'_>) -> bool {
    let place = |input: &mut Input<'_>| place(input, &PLACES);
    match step {
        Step::Port => {
            let (port, kind, value) = (input.half(), input.byte(), input.word());
            rig.io(cpu, port, kind, value)
        }
        Step::Read => {
            let address = place(input);
            rig.mmio(cpu, address, input.size(), None)
        }
        Step::Write => {
            let address = place(input);
            let size = input.size();
            rig.mmio(cpu, address, size, Some(input.word()))
        }
        Step::Instruction => {
            let address = place(input);
            let (access, length) = (input.byte(), input.byte() % 16);
            let code = input.bytes(length.into());
            rig.emulate(cpu, code, address, access, 0x1234_5678)
        }
        Step::Msr => {
            let (number, write, value) = (input.word(), input.byte() & 1 != 0, input.long());
            let vcpu = &mut rig.vcpus[cpu];
            vcpu.set_gpr(Gpr::Rcx, number.into());
            vcpu.set_gpr(Gpr::Rax, value & 0xffff_ffff);
            vcpu.set_gpr(Gpr::Rdx, value >> 32);
            rig.exit(cpu, Exit::Msr { write })
        }
        Step::Cpuid => {
            let vcpu = &mut rig.vcpus[cpu];
            vcpu.set_gpr(Gpr::Rax, input.word().into());
            vcpu.set_gpr(Gpr::Rcx, input.byte().into());
            rig.exit(cpu, Exit::Cpuid)
        }
        Step::Config => {
            let (device, register) = (u32::from(input.byte()), u32::from(input.byte()));
            let (kind, value) = (input.byte() & 7, input.word());
            let address = 1 << 31 | (device & 0x1f) << 11 | register;
            let data = layout::PCI_DATA + (register & 3) as u16;
            rig.io(cpu, layout::PCI_ADDRESS, 6, address) && rig.io(cpu, data, kind, value)
        }
        Step::Memory => {
            let (address, length) = (input.word(), input.byte());
            let _ = rig.memory.write_slice(address.into(), input.bytes(length.into()));
            true
        }
        Step::Run => {
            let (on, span) = (input.byte() & 1, input.word());
            rig.world.tsc = rig.world.tsc.saturating_add(span.into());
            rig.vcpus[cpu].set(Reg::Rflags, u64::from(on) << 9 | 2);
            rig.exit(cpu, Exit::Spurious)
        }
        Step::Exit => {
            let (kind, value) = (input.byte(), input.long());
            let exit = match kind % 13 {
                0 => Exit::Hlt,
                1 => Exit::Hypercall,
                2 => Exit::InterruptWindow,
                3 => Exit::Deadline,
                4 => Exit::Xsetbv,
                5 => Exit::CacheFlush,
                6 => Exit::Pause,
                7 => Exit::Undefined,
                8 => Exit::Protected,
                9 if value & 0x200 != 0 => Exit::InvalidatePage,
                9 => Exit::CrAccess { register: value as u8, write: value & 0x100 != 0 },
                10 => Exit::Unknown(value),
                11 if value & 2 != 0 => Exit::PageFault { address: value, code: value as u32 & 31 },
                11 => Exit::Exception { vector: if value & 1 == 0 { 1 } else { 17 }, code: 0 },
                _ => Exit::Shutdown,
            };
            rig.exit(cpu, exit)
        }
        Step::Arrive => {
            let slot = usize::from(input.byte()) % 5;
            rig.arrive(slot, input.half().into());
            true
        }
        Step::Button => {
            rig.world.running = CPUS;
            rig.pc.press_power_button(&mut rig.world);
            true
        }
    }
}

impl Seed {
    fn board(self, step: Step) -> Self {
        self.byte(step as u8)
    }

    fn out(self, port: u16, value: u8) -> Self {
        self.board(Step::Port).half(port).byte(4).word(value.into())
    }

    fn store(self, place: u8, offset: u16, size: u8, value: u32) -> Self {
        self.board(Step::Write).byte(place).half(offset).size(size).word(value)
    }

    fn msr(self, number: u32, value: u64) -> Self {
        self.board(Step::Msr).word(number).byte(1).long(value)
    }

    fn run(self, span: u32) -> Self {
        self.board(Step::Run).byte(1).word(span)
    }

    fn poke(self, address: u32, bytes: &[u8]) -> Self {
        self.board(Step::Memory).word(address).byte(bytes.len() as u8).bytes(bytes)
    }
}

/// Initial inputs.
pub fn seeds() -> Vec<(&'static str, Seed)> {
    // The 8259s with vectors from 0x30, the 8254 at 1 kHz.
    let pic = [(0x20, 0x11), (0x21, 0x30), (0x21, 4), (0x21, 1), (0x21, 0)]
        .into_iter()
        .fold(Seed::new(), |seed, (port, value)| seed.out(port, value));
    let timer = pic
        .clone()
        .out(0x43, 0x34)
        .out(0x40, 0xa9)
        .out(0x40, 4)
        .run(1_000_000)
        .out(0x20, 0x20)
        .run(1_000_000);
    let serial = pic
        .out(0x3fc, 8)
        .out(0x3f9, 3)
        .out(0x3f8, b'f')
        .board(Step::Arrive)
        .byte(4)
        .half(20)
        .run(10_000_000)
        .board(Step::Port)
        .half(0x3f8)
        .byte(0)
        .word(0);
    let apic = Seed::new()
        .msr(0x1b, 0xfee0_0d00)
        .msr(0x80f, 0x1ff)
        .msr(0x832, 2 << 17 | 0xec)
        .store(6, 0, 4, 0x18)
        .store(6, 0x10, 4, 0x51)
        .msr(0x6e0, 5000)
        .run(6000)
        .msr(0x80b, 0);
    let start = Seed::new()
        .store(7, 0xf0, 4, 0x1ff)
        .store(7, 0x310, 4, 1 << 24)
        .store(7, 0x300, 4, 0x4500)
        .store(7, 0x300, 4, 0x4609)
        .byte(0x80 | Step::Run as u8)
        .byte(1)
        .word(100)
        .byte(0x80 | Step::Cpuid as u8)
        .word(1)
        .byte(0);
    // Enable memory and bus master; then queue 0 of the entropy source with 4 entries, and a
    // request.
    let function = Seed::new().board(Step::Config).byte(4).byte(4).byte(5).word(6);
    let virtio = [
        (0x14, 1, 3),
        (0x08, 4, 1),
        (0x0c, 4, 1),
        (0x14, 1, 11),
        (0x18, 2, 4),
        (0x20, 4, 0x2000),
        (0x28, 4, 0x3000),
        (0x30, 4, 0x4000),
        (0x1c, 2, 1),
        (0x14, 1, 15),
    ]
    .into_iter()
    .fold(function, |seed, (offset, size, value)| seed.store(3, offset, size, value))
    .poke(0x2000, &[0, 0x50, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 2, 0])
    .poke(0x3000, &[0, 0, 1, 0])
    .store(3, 0x3000, 2, 0)
    .board(Step::Arrive)
    .byte(3)
    .half(40);
    let overlap = (1..5)
        .fold(Seed::new(), |seed, device| {
            seed.board(Step::Config).byte(device).byte(4).byte(5).word(6)
        })
        // Two windows at the same address, one over the I/O APIC.
        .board(Step::Config)
        .byte(1)
        .byte(0x10)
        .byte(6)
        .word(layout::PCI_WINDOW + 0x8000)
        .board(Step::Config)
        .byte(2)
        .byte(0x10)
        .byte(6)
        .word(layout::IO_APIC as u32)
        .store(1, 0, 4, 7)
        .board(Step::Read)
        .byte(4)
        .half(0)
        .size(4);
    let instructions = [
        &[0xf3, 0xa5][..],                           // rep movsd
        &[0xf0, 0x0f, 0xb1, 0x0b],                   // lock cmpxchg
        &[0x0f, 0xba, 0x2b, 0x05],                   // bts
        &[0x80, 0x0b, 0x01],                         // or
        &[0x0f, 0xb7, 0x03],                         // movzx
        &[0x67, 0x66, 0x2e, 0xf0, 0xc7, 0x04, 0x1d], // cut off
    ]
    .into_iter()
    .fold(Seed::new(), |seed, code| {
        seed.board(Step::Instruction).byte(0).half(0).byte(1).byte(code.len() as u8).bytes(code)
    });
    let strings = Seed::new()
        .board(Step::Port)
        .half(0x3f8)
        .byte(0x1c)
        .word(0x1000_2000)
        .board(Step::Port)
        .half(0x3f8)
        .byte(0x19)
        .word(0x0403_fffe);
    let clock = [(0x70, 0x0b), (0x71, 0x72), (0x70, 0x0a), (0x71, 0x21), (0x70, 0x0c)]
        .into_iter()
        .fold(Seed::new(), |seed, (port, value)| seed.out(port, value))
        .run(1 << 30)
        .board(Step::Button)
        .run(1)
        .board(Step::Exit)
        .byte(0)
        .long(0);
    vec![
        ("timer", timer),
        ("serial", serial),
        ("apic", apic),
        ("second-cpu", start),
        ("virtio", virtio),
        ("windows-overlap", overlap),
        ("instructions", instructions),
        ("strings", strings),
        ("clock-and-button", clock),
    ]
}
