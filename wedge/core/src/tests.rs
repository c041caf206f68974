//! Tests of the CPU model against the manual.

use hw_x86::msr;
use hw_x86::paging::{cr0, cr4, entry};
use std::vec;
use std::vec::Vec;
use vmm_mem::{GuestMemory, testing};

use crate::cpu::{VirtualCpu, rflags};
use crate::{DescriptorTable, Event, Exit, Flush, Host, Outcome, decode, thread_area, vector};

/// Page tables map the first MiB to itself except the page [`MISSING`]; level 3 may access only
/// [`USER_PAGE`].
const ROOT: u64 = 0x1000;
const GDT: u64 = 0x8000;
const IDT: u64 = 0x9000;
const TSS: u64 = 0xa000;
const STACK: u64 = 0x1_0000;
const RSP0: u64 = 0x2_0000;
const IST1: u64 = 0x3_0000;
const CODE: u64 = 0x4_0000;
const MISSING: u64 = 0x5_0000;
const HANDLER: u64 = 0x6_0000;

const KERNEL_CS: u16 = 0x10;
const KERNEL_DS: u16 = 0x18;
const USER_DS: u16 = 0x2b;
const USER_CS: u16 = 0x33;
const TSS_SELECTOR: u16 = 0x40;
/// A data segment that is not present.
const ABSENT: u16 = 0x50;

struct TestHost {
    fs: u64,
    gs: u64,
    flushed: Vec<Flush>,
    entered: Vec<(u64, bool)>,
}

impl Host for TestHost {
    fn fs_base(&mut self) -> u64 {
        self.fs
    }
    fn set_fs_base(&mut self, base: u64) {
        self.fs = base;
    }
    fn gs_base(&mut self) -> u64 {
        self.gs
    }
    fn set_gs_base(&mut self, base: u64) {
        self.gs = base;
    }
    fn flush(&mut self, what: Flush) {
        self.flushed.push(what);
    }
    fn enter_space(&mut self, cr3: u64, keep: bool) {
        self.entered.push((cr3, keep));
    }
}

struct Machine {
    cpu: VirtualCpu,
    memory: GuestMemory,
    host: TestHost,
}

impl Machine {
    fn new() -> Self {
        let memory = testing::memory(&[(0, 1 << 20)]);
        let write = |at: u64, value: u64| memory.write(at, value).unwrap();
        let table = entry::PRESENT | entry::WRITE | entry::USER;
        for level in 0..3 {
            write(ROOT + 0x1000 * level, (ROOT + 0x1000 * (level + 1)) | table);
        }
        for page in (0..256).filter(|page| page * 0x1000 != MISSING) {
            write(ROOT + 0x3000 + 8 * page, (page * 0x1000) | table);
        }
        let descriptors = [
            (KERNEL_CS, 0x00af_9b00_0000_ffff),
            (KERNEL_DS, 0x00cf_9300_0000_ffff),
            (USER_DS, 0x00cf_f300_0000_ffff),
            (USER_CS, 0x00af_fb00_0000_ffff),
            // An available task-state segment of 104 bytes.
            (TSS_SELECTOR, 0x0000_8900_0000_0067 | TSS << 16),
            (ABSENT, 0x00cf_1300_0000_ffff),
        ];
        for (selector, descriptor) in descriptors {
            write(GDT + u64::from(selector & !7), descriptor);
        }
        write(TSS + 4, RSP0);
        write(TSS + 0x24, IST1);
        let mut cpu = VirtualCpu::new();
        cpu.cr3 = ROOT;
        cpu.gdtr = DescriptorTable { base: GDT, limit: 0x5f };
        cpu.idtr = DescriptorTable { base: IDT, limit: 0xfff };
        cpu.segments[1].selector = KERNEL_CS;
        cpu.segments[2].selector = KERNEL_DS;
        cpu.frame.gpr[4] = STACK;
        cpu.frame.rip = CODE;
        cpu.star = 0x0023_0010 << 32;
        cpu.lstar = HANDLER + 0x1000;
        let host = TestHost { fs: 0, gs: 0x1234, flushed: vec![], entered: vec![] };
        let mut machine = Self { cpu, memory, host };
        for number in 0..=255 {
            machine.gate(number, 0x8e, 0);
        }
        assert_eq!(
            machine.run_with(&[0x0f, 0x00, 0xd8], &[(0, TSS_SELECTOR.into())]),
            Outcome::Next
        );
        machine.cpu.frame.rip = CODE;
        machine
    }

    fn gate(&mut self, number: u8, attributes: u8, ist: u8) {
        let target = HANDLER + 16 * u64::from(number);
        let low = target & 0xffff
            | u64::from(KERNEL_CS) << 16
            | u64::from(ist) << 32
            | u64::from(attributes) << 40
            | (target >> 16 & 0xffff) << 48;
        let at = IDT + 16 * u64::from(number);
        self.memory.write(at, low).unwrap();
        self.memory.write(at + 8, target >> 32).unwrap();
    }

    fn run(&mut self, bytes: &[u8]) -> Outcome {
        let instruction = decode(bytes).unwrap();
        let outcome = self.cpu.execute(&self.memory, &mut self.host, &instruction);
        if outcome == Outcome::Next {
            self.cpu.frame.rip += instruction.length as u64;
        }
        outcome
    }

    fn run_with(&mut self, bytes: &[u8], registers: &[(usize, u64)]) -> Outcome {
        for &(register, value) in registers {
            self.cpu.frame.gpr[register] = value;
        }
        self.run(bytes)
    }

    fn words<const N: usize>(&self, at: u64) -> [u64; N] {
        core::array::from_fn(|index| self.memory.read(at + 8 * index as u64).unwrap())
    }

    fn program(&mut self) {
        self.cpu.cpl = 3;
        self.cpu.segments[1].selector = USER_CS;
        self.cpu.segments[2].selector = USER_DS;
        self.cpu.held_flags = rflags::IF;
    }
}

#[test]
fn an_interrupt_and_back() {
    let mut m = Machine::new();
    m.program();
    m.cpu.frame.rflags = rflags::FIXED | rflags::TF | 1;
    m.cpu.deliver(&m.memory, Event::interrupt(0x31)).unwrap();
    assert_eq!((m.cpu.frame.rip, m.cpu.cpl), (HANDLER + 0x310, 0));
    assert_eq!(m.cpu.frame.gpr[4], RSP0 - 40);
    let flags = rflags::FIXED | rflags::TF | rflags::IF | 1;
    let expected = [CODE, USER_CS.into(), flags, STACK, USER_DS.into()];
    assert_eq!(m.words::<5>(RSP0 - 40), expected);
    assert_eq!(m.cpu.rflags(), rflags::FIXED | 1, "interrupt gate: no IF, no TF");
    assert_eq!((m.cpu.segments[1].selector, m.cpu.segments[2].selector), (KERNEL_CS, 0));
    assert_eq!(m.run(&[0x48, 0xcf]), Outcome::Jump);
    assert_eq!((m.cpu.frame.rip, m.cpu.cpl, m.cpu.frame.gpr[4]), (CODE, 3, STACK));
    assert_eq!(m.cpu.rflags(), flags);
    assert_eq!((m.cpu.segments[1].selector, m.cpu.segments[2].selector), (USER_CS, USER_DS));
}

#[test]
fn stacks_of_exceptions() {
    let mut m = Machine::new();
    // At level 0 on the same stack, aligned, with an error code.
    m.cpu.frame.gpr[4] = STACK - 4;
    m.cpu.deliver(&m.memory, Event::exception_code(vector::PROTECTION, 0x18)).unwrap();
    assert_eq!(m.cpu.frame.gpr[4], STACK - 16 - 48);
    let flags = rflags::FIXED | rflags::RF;
    let expected = [0x18, CODE, KERNEL_CS.into(), flags, STACK - 4, KERNEL_DS.into()];
    assert_eq!(m.words::<6>(STACK - 64), expected);
    assert_eq!(m.cpu.segments[2].selector, KERNEL_DS, "stays at the same level");
    // On an IST stack at every level; a trap gate leaves IF.
    let mut m = Machine::new();
    m.gate(2, 0x8f, 1);
    m.cpu.held_flags = rflags::IF;
    m.cpu.deliver(&m.memory, Event::NMI).unwrap();
    assert_eq!((m.cpu.frame.gpr[4], m.cpu.held_flags), (IST1 - 40, rflags::IF));
}

#[test]
fn faults_while_delivering() {
    // Unmapped stack: a page fault during the delivery of a page fault is a double fault, which
    // uses an IST stack.
    let mut m = Machine::new();
    m.gate(vector::DOUBLE_FAULT, 0x8e, 1);
    m.cpu.frame.gpr[4] = MISSING + 0x800;
    let fault = Event::exception_code(vector::PAGE_FAULT, 2);
    m.cpu.deliver(&m.memory, fault).unwrap();
    assert_eq!(m.cpu.frame.rip, HANDLER + 0x80);
    assert_eq!(m.words::<2>(IST1 - 48), [0, CODE]);
    assert_eq!(m.cpu.cr2, ((MISSING + 0x800) & !15) - 48);
    // Without that stack: a triple fault.
    let mut m = Machine::new();
    m.cpu.frame.gpr[4] = MISSING + 0x800;
    assert_eq!(m.cpu.deliver(&m.memory, fault), Err(Exit::Shutdown));
    // Missing gate of an interrupt: `#NP`, marked as external.
    let mut m = Machine::new();
    m.gate(0x31, 0x0e, 0);
    m.cpu.deliver(&m.memory, Event::interrupt(0x31)).unwrap();
    assert_eq!(m.cpu.frame.rip, HANDLER + 16 * u64::from(vector::NOT_PRESENT));
    assert_eq!(m.words::<1>(m.cpu.frame.gpr[4]), [0x31 * 8 + 3]);
    // Two faults that do not combine are delivered one after the other.
    let mut m = Machine::new();
    m.gate(vector::UNDEFINED, 0x0e, 0);
    m.cpu.deliver(&m.memory, Event::exception(vector::UNDEFINED)).unwrap();
    assert_eq!(m.cpu.frame.rip, HANDLER + 16 * u64::from(vector::NOT_PRESENT));
    // Beyond the limit: `#GP`, twice a double fault, which has no gate either.
    let mut m = Machine::new();
    m.cpu.idtr.limit = 0;
    assert_eq!(m.cpu.deliver(&m.memory, Event::interrupt(0x31)), Err(Exit::Shutdown));
}

#[test]
fn software_interrupts_need_an_open_gate() {
    let mut m = Machine::new();
    m.program();
    let closed = Event::exception_code(vector::PROTECTION, 0x80 * 8 + 2);
    assert_eq!(m.run(&[0xcd, 0x80]), Outcome::Raise(closed));
    assert_eq!(m.cpu.frame.rip, CODE);
    m.gate(0x80, 0xee, 0);
    assert_eq!(m.run(&[0xcd, 0x80]), Outcome::Jump);
    assert_eq!(m.words::<1>(RSP0 - 40), [CODE + 2]);
    let mut m = Machine::new();
    m.program();
    m.gate(3, 0xee, 0);
    m.cpu.frame.rip = CODE + 1;
    m.cpu.deliver_software(&m.memory, 3, 1).unwrap();
    assert_eq!((m.cpu.frame.rip, m.words::<1>(RSP0 - 40)), (HANDLER + 0x30, [CODE + 1]));
}

#[test]
fn system_calls() {
    let mut m = Machine::new();
    m.program();
    m.cpu.sfmask = rflags::IF | rflags::TF;
    m.cpu.frame.rflags = rflags::FIXED | rflags::TF | 1;
    m.cpu.system_call();
    assert_eq!((m.cpu.frame.rip, m.cpu.cpl, m.cpu.frame.gpr[1]), (HANDLER + 0x1000, 0, CODE));
    assert_eq!(m.cpu.frame.gpr[11], rflags::FIXED | rflags::TF | rflags::IF | 1);
    assert_eq!(m.cpu.rflags(), rflags::FIXED | 1);
    assert_eq!((m.cpu.segments[1].selector, m.cpu.segments[2].selector), (KERNEL_CS, KERNEL_DS));
    assert_eq!(m.cpu.frame.gpr[4], STACK);
    assert_eq!(m.run(&[0x48, 0x0f, 0x07]), Outcome::Jump);
    assert_eq!((m.cpu.frame.rip, m.cpu.cpl), (CODE, 3));
    assert_eq!((m.cpu.segments[1].selector, m.cpu.segments[2].selector), (USER_CS, USER_DS));
    assert_eq!(m.cpu.rflags(), rflags::FIXED | rflags::TF | rflags::IF | 1);
    let segments = m.cpu.call_segments();
    assert_eq!(segments[0], [m.cpu.segments[1], m.cpu.segments[2]], "what entry code does");
    // User mode must not return to the kernel.
    let refused = Event::exception_code(vector::PROTECTION, 0);
    assert_eq!(m.run(&[0x48, 0x0f, 0x07]), Outcome::Raise(refused));
}

#[test]
fn flags() {
    let mut m = Machine::new();
    m.cpu.held_flags = rflags::IF;
    m.cpu.frame.rflags = rflags::FIXED | 0x41;
    assert_eq!(m.run(&[0x9c]), Outcome::Next);
    assert_eq!(m.words::<1>(STACK - 8), [rflags::FIXED | rflags::IF | 0x41]);
    assert_eq!(m.run(&[0xfa]), Outcome::Next);
    assert_eq!(m.cpu.held_flags, 0);
    assert_eq!(m.run(&[0x9d]), Outcome::Next);
    assert_eq!((m.cpu.held_flags, m.cpu.frame.gpr[4]), (rflags::IF, STACK));
    // POPF of user mode leaves IF and IOPL; reserved bits keep their values.
    m.program();
    m.memory.write(STACK, !rflags::IF).unwrap();
    assert_eq!(m.run(&[0x9d]), Outcome::Next);
    let open = rflags::USER_WRITABLE & !rflags::RF;
    assert_eq!(m.cpu.rflags(), open | rflags::FIXED | rflags::IF);
    let refused = Event::exception_code(vector::PROTECTION, 0);
    assert_eq!(m.run(&[0xfa]), Outcome::Raise(refused));
}

/// A fault saves RF set, any other event saves RF clear; RF is cleared on completion.
#[test]
fn breakpoints_are_reported_once() {
    let saved = |event: Event, flags: u64| {
        let mut m = Machine::new();
        m.cpu.frame.rflags = rflags::FIXED | flags;
        m.cpu.deliver(&m.memory, event).unwrap();
        assert_eq!(m.cpu.frame.rflags & rflags::RF, 0);
        m.memory
            .read::<u64>(m.cpu.frame.gpr[4] + if event.0 >> 11 & 1 != 0 { 24 } else { 16 })
            .unwrap()
            & rflags::RF
    };
    for flags in [0, rflags::RF] {
        assert_eq!(saved(Event::exception_code(vector::PROTECTION, 0), flags), rflags::RF);
        assert_eq!(saved(Event::exception(6), flags), rflags::RF);
        assert_eq!(saved(Event::exception(vector::DEBUG), flags), 0);
        assert_eq!(saved(Event::interrupt(0x40), flags), 0);
    }
    let mut m = Machine::new();
    m.cpu.frame.rflags = rflags::FIXED | rflags::RF;
    m.cpu.complete(CODE + 1);
    assert_eq!((m.cpu.frame.rip, m.cpu.frame.rflags), (CODE + 1, rflags::FIXED));
}

/// The host CPU holds `AC` at level 3 only; the guest sees its own value.
#[test]
fn alignment_checks_are_not_the_kernels() {
    let is_on = |m: &Machine| (m.cpu.frame.rflags & rflags::AC, m.cpu.rflags() & rflags::AC);
    let mut m = Machine::new();
    m.program();
    m.cpu.frame.rflags |= rflags::AC;
    m.cpu.deliver(&m.memory, Event::interrupt(0x31)).unwrap();
    assert_eq!(is_on(&m), (0, rflags::AC), "a gate leaves it to the guest's kernel");
    let [.., flags] = m.words::<3>(RSP0 - 40);
    assert_eq!(flags & rflags::AC, rflags::AC);
    assert_eq!(m.run(&[0x9c]), Outcome::Next);
    assert_eq!(m.words::<1>(RSP0 - 48)[0] & rflags::AC, rflags::AC, "PUSHF");
    m.memory.write(RSP0 - 48, rflags::FIXED).unwrap();
    assert_eq!((m.run(&[0x9d]), is_on(&m)), (Outcome::Next, (0, 0)), "POPF without it");
    assert_eq!((m.run(&[0x48, 0xcf]), is_on(&m)), (Outcome::Jump, (rflags::AC, rflags::AC)));
    m.cpu.sfmask = rflags::IF;
    m.cpu.system_call();
    assert_eq!(is_on(&m), (0, rflags::AC), "SYSCALL without AC in SFMASK");
    assert_eq!((m.run(&[0x48, 0x0f, 0x07]), is_on(&m)), (Outcome::Jump, (rflags::AC, rflags::AC)));
    // Set by a POPF of the kernel without a patch site.
    let mut m = Machine::new();
    m.cpu.sync_flags(rflags::FIXED | rflags::AC);
    assert_eq!(is_on(&m), (0, rflags::AC));
    m.cpu.enter_user();
    assert_eq!(is_on(&m), (0, 0), "SYSRET takes all flags from R11");
}

#[test]
fn segments() {
    let mut m = Machine::new();
    let load_es =
        |m: &mut Machine, selector: u16| m.run_with(&[0x8e, 0xc0], &[(0, selector.into())]);
    let refused = |selector: u16| {
        Outcome::Raise(Event::exception_code(vector::PROTECTION, u32::from(selector & !3)))
    };
    for selector in [0, 3, KERNEL_DS, USER_DS, KERNEL_CS] {
        assert_eq!(load_es(&mut m, selector), Outcome::Next, "{selector:#x}");
        assert_eq!(m.cpu.segments[0].selector, selector);
    }
    for selector in [KERNEL_DS | 3, 0x78, TSS_SELECTOR, 4] {
        assert_eq!(load_es(&mut m, selector), refused(selector), "{selector:#x}");
    }
    let absent = Event::exception_code(vector::NOT_PRESENT, ABSENT.into());
    assert_eq!(load_es(&mut m, ABSENT), Outcome::Raise(absent));
    // SS: writable, of the current level.
    let load_ss =
        |m: &mut Machine, selector: u16| m.run_with(&[0x8e, 0xd0], &[(0, selector.into())]);
    assert_eq!(load_ss(&mut m, KERNEL_DS), Outcome::Next);
    assert_eq!(load_ss(&mut m, 0), Outcome::Next);
    for selector in [USER_DS, KERNEL_CS, KERNEL_DS | 3] {
        assert_eq!(load_ss(&mut m, selector), refused(selector));
    }
    // The null selector in FS clears its base.
    m.host.fs = 7;
    assert_eq!(m.run_with(&[0x8e, 0xe0], &[(0, 0)]), Outcome::Next);
    assert_eq!(m.host.fs, 0);
    // mov eax, cs clears the upper half; mov ax, cs keeps it.
    m.run_with(&[0x8c, 0xc8], &[(0, u64::MAX)]);
    assert_eq!(m.cpu.frame.gpr[0], KERNEL_CS.into());
    m.run_with(&[0x66, 0x8c, 0xc8], &[(0, u64::MAX)]);
    assert_eq!(m.cpu.frame.gpr[0], !0xffff | u64::from(KERNEL_CS));
}

#[test]
fn what_descriptors_tell() {
    let mut m = Machine::new();
    const ZF: u64 = 1 << 6;
    let mut lar = |selector: u16| {
        m.run_with(&[0x0f, 0x02, 0xc8], &[(0, selector.into()), (1, 5)]);
        (m.cpu.frame.rflags & ZF != 0).then_some(m.cpu.frame.gpr[1])
    };
    assert_eq!(lar(USER_CS), Some(0x00a0_fb00));
    assert_eq!(lar(KERNEL_DS), Some(0x00c0_9300));
    assert_eq!(lar(KERNEL_DS | 3), None);
    assert_eq!(lar(0), None);
    assert_eq!(lar(0x1000), None);
    assert_eq!(lar(TSS_SELECTOR), Some(0x8b00), "busy now");
    // lar ecx, eax and cx, ax; lsl ecx, eax and cx, ax
    for (opcode, selector, value) in [(2, USER_CS, 0x00a0_fb00), (3, USER_CS, 0xffff_ffff)] {
        let start = [(0, selector.into()), (1, u64::MAX)];
        m.run_with(&[0x0f, opcode, 0xc8], &start);
        assert_eq!(m.cpu.frame.gpr[1], value);
        m.run_with(&[0x66, 0x0f, opcode, 0xc8], &start);
        assert_eq!(m.cpu.frame.gpr[1], !0xffff | value & 0xffff, "{opcode}");
    }
    let mut verw = |selector: u16| {
        m.run_with(&[0x0f, 0x00, 0xe8], &[(0, selector.into())]);
        m.cpu.frame.rflags & ZF != 0
    };
    assert!(verw(USER_DS) && verw(KERNEL_DS));
    assert!(!verw(USER_CS) && !verw(KERNEL_DS | 3) && !verw(0));
}

#[test]
fn control_registers() {
    let mut m = Machine::new();
    let refused = Outcome::Raise(Event::exception_code(vector::PROTECTION, 0));
    let write = |m: &mut Machine, control: u8, value: u64| {
        m.run_with(&[0x0f, 0x22, 0xc0 | control << 3], &[(0, value)])
    };
    let good = m.cpu.cr0;
    for bad in [good & !cr0::PG, good & !cr0::PE, good | cr0::NW, good | 1 << 40] {
        assert_eq!(write(&mut m, 0, bad), refused);
    }
    assert_eq!(write(&mut m, 0, good | cr0::TS), Outcome::Next);
    assert_eq!(m.run(&[0x0f, 0x06]), Outcome::Next);
    assert_eq!(m.cpu.cr0, good);
    assert_eq!(m.host.flushed, []);
    for value in [good & !cr0::WP, good] {
        assert_eq!(write(&mut m, 0, value), Outcome::Next);
        assert_eq!(core::mem::take(&mut m.host.flushed), [Flush::All], "{value:#x}");
    }
    for bad in [0, cr4::PAE | cr4::SMAP, cr4::PAE | 1 << 63, cr4::PAE | cr4::UMIP] {
        assert_eq!(write(&mut m, 4, bad), refused);
    }
    // Address spaces with and without PCIDs.
    assert_eq!(write(&mut m, 3, 0x2000 | 0x18), Outcome::Next);
    assert_eq!(write(&mut m, 3, 1 << 63), refused, "without identifiers the bit is reserved");
    assert_eq!(write(&mut m, 4, cr4::PAE | cr4::PCIDE), refused, "while CR3 has low bits");
    assert_eq!(write(&mut m, 3, 0x2000), Outcome::Next);
    assert_eq!(write(&mut m, 4, cr4::PAE | cr4::PCIDE), Outcome::Next);
    m.cpu.cr3 = ROOT;
    m.host.entered.clear();
    assert_eq!(write(&mut m, 3, 1 << 63 | ROOT | 5), Outcome::Next);
    assert_eq!(write(&mut m, 3, ROOT | 6), Outcome::Next);
    assert_eq!(m.host.entered, [(ROOT | 5, true), (ROOT | 6, false)]);
    assert_eq!((m.cpu.cr3, m.cpu.pcid()), (ROOT | 6, 6));
    assert_eq!(write(&mut m, 2, 77), Outcome::Next);
    assert_eq!(m.run(&[0x0f, 0x20, 0xd3]), Outcome::Next);
    assert_eq!(m.cpu.frame.gpr[3], 77);
    assert_eq!(write(&mut m, 1, 0), Outcome::Raise(Event::exception(vector::UNDEFINED)));
}

#[test]
fn flushes() {
    let mut m = Machine::new();
    let pair = 0x7000;
    let mut invpcid = |kind: u64, pcid: u64, linear: u64| {
        m.memory.write(pair, pcid).unwrap();
        m.memory.write(pair + 8, linear).unwrap();
        m.host.flushed.clear();
        let outcome = m.run_with(&[0x66, 0x0f, 0x38, 0x82, 0x08], &[(0, pair), (1, kind)]);
        (outcome == Outcome::Next).then(|| m.host.flushed[0])
    };
    assert_eq!(invpcid(0, 5, 0x8000), Some(Flush::PageOf { pcid: 5, linear: 0x8000 }));
    assert_eq!(invpcid(1, 5, 0), Some(Flush::Space(5)));
    assert_eq!(invpcid(2, 0, 0), Some(Flush::All));
    assert_eq!(invpcid(3, 0, 0), Some(Flush::Spaces));
    assert_eq!(invpcid(0, 5, 1 << 50), None);
    assert_eq!(invpcid(1, 0x1000, 0), None);
    assert_eq!(invpcid(4, 0, 0), None);
    m.host.flushed.clear();
    m.run_with(&[0x0f, 0x01, 0x78, 0x10], &[(0, 0x8000)]);
    assert_eq!(m.host.flushed, [Flush::Page(0x8010)]);
}

#[test]
fn registers_of_its_own() {
    let mut m = Machine::new();
    let refused = Outcome::Raise(Event::exception_code(vector::PROTECTION, 0));
    let write = |m: &mut Machine, msr: u32, value: u64| {
        m.run_with(&[0x0f, 0x30], &[(1, msr.into()), (0, value & 0xffff_ffff), (2, value >> 32)])
    };
    for msr in [msr::FS_BASE, msr::GS_BASE, msr::KERNEL_GS_BASE, msr::LSTAR, msr::CSTAR] {
        assert_eq!(write(&mut m, msr, 1 << 47), refused);
        assert_eq!(write(&mut m, msr, u64::MAX << 47), Outcome::Next);
        assert_eq!(m.run(&[0x0f, 0x32]), Outcome::Next);
        assert_eq!((m.cpu.frame.gpr[0], m.cpu.frame.gpr[2]), (0x0000_0000, 0xffff_8000));
    }
    let outcome = write(&mut m, msr::APIC_BASE, 0);
    assert_eq!(outcome, Outcome::Exit(Exit::Msr { write: true }));
    write(&mut m, msr::GS_BASE, 1);
    write(&mut m, msr::KERNEL_GS_BASE, 2);
    assert_eq!(m.run(&[0x0f, 0x01, 0xf8]), Outcome::Next);
    assert_eq!((m.host.gs, m.cpu.kernel_gs_base), (2, 1));
}

#[test]
fn operands_of_memory_fault_as_the_guest_would() {
    let mut m = Machine::new();
    // lgdt (rax) across the end of the mapped range: nothing is loaded.
    let before = m.cpu.gdtr;
    let outcome = m.run_with(&[0x0f, 0x01, 0x10], &[(0, MISSING - 4)]);
    assert_eq!(outcome, Outcome::Raise(Event::exception_code(vector::PAGE_FAULT, 0)));
    assert_eq!((m.cpu.gdtr, m.cpu.cr2), (before, MISSING));
    // A pop to an unmapped address leaves the stack pointer.
    let outcome = m.run_with(&[0x8f, 0x00], &[(0, MISSING)]);
    assert_eq!(outcome, Outcome::Raise(Event::exception_code(vector::PAGE_FAULT, 2)));
    assert_eq!(m.cpu.frame.gpr[4], STACK);
    // Relative to the end of the instruction.
    m.cpu.frame.rip = CODE;
    m.memory.write(CODE + 8 + 0x100, 0x0123_4567_89ab_0fff_u64).unwrap();
    assert_eq!(m.run(&[0x40, 0x0f, 0x01, 0x1d, 0, 1, 0, 0]), Outcome::Next);
    assert_eq!(m.cpu.idtr.limit, 0xfff);
}

#[test]
fn far_returns() {
    let mut m = Machine::new();
    m.memory.write(STACK, HANDLER).unwrap();
    m.memory.write(STACK + 8, u64::from(KERNEL_CS)).unwrap();
    assert_eq!(m.run(&[0x48, 0xcb]), Outcome::Jump);
    assert_eq!((m.cpu.frame.rip, m.cpu.frame.gpr[4]), (HANDLER, STACK + 16));
    m.cpu.frame.gpr[4] = STACK;
    m.memory.write(STACK + 8, u64::from(KERNEL_DS)).unwrap();
    let bad = Event::exception_code(vector::PROTECTION, KERNEL_DS.into());
    assert_eq!(m.run(&[0x48, 0xcb]), Outcome::Raise(bad));
}

/// Addresses of the kernel image have the same translation in every address space.
#[test]
fn shared_addresses_have_a_root_of_their_own() {
    let mut m = Machine::new();
    m.cpu.shared = crate::cpu::SharedRange { start: CODE, end: CODE + 0x1000, root: ROOT };
    m.cpu.cr3 = 0xf_0000;
    let mut bytes = [0; 4];
    assert!(m.cpu.read(&m.memory, CODE, &mut bytes).is_ok());
    assert!(m.cpu.read(&m.memory, STACK, &mut bytes).is_err());
}

/// User mode may access the ports that the I/O bitmap or IOPL permits.
#[test]
fn ports_of_programs() {
    const MAP: u64 = 104;
    const OUT: &[u8] = &[0xee];
    const OUT_LONG: &[u8] = &[0xef];
    let refused = Outcome::Raise(Event::exception_code(vector::PROTECTION, 0));
    let passes = |outcome| matches!(outcome, Outcome::Exit(Exit::Io(_)));
    let mut m = Machine::new();
    assert!(passes(m.run_with(OUT, &[(2, 0x501)])), "the kernel has them all");
    m.cpu.cpl = 3;
    // The segment ends before the bitmap.
    m.memory.write(TSS + 0x66, MAP as u16).unwrap();
    assert_eq!(m.run(OUT), refused);
    m.cpu.tr.limit = (MAP + 0x501 / 8 + 1) as u32;
    for byte in 0..=0x501 / 8 + 1 {
        m.memory.write(TSS + MAP + byte, 0xff_u8).unwrap();
    }
    assert_eq!(m.run(OUT), refused);
    m.memory.write(TSS + MAP + 0x501 / 8, !(1_u8 << 1)).unwrap();
    assert!(passes(m.run(OUT)));
    assert_eq!(m.run(OUT_LONG), refused, "three of its four ports are closed");
    assert_eq!(m.run_with(OUT, &[(2, 0x50f)]), refused, "the map has no byte behind");
    m.cpu.frame.rflags |= rflags::IOPL;
    assert!(passes(m.run_with(OUT, &[(2, 0xffff)])));
}

#[test]
fn code_of_32_bits() {
    const CODE_32: u16 = 0x23;
    let mut m = Machine::new();
    m.memory.write(GDT + 0x20, 0x00cf_fb00_0000_ffff_u64).unwrap();
    m.program();
    assert!(m.cpu.is_64_bit());
    // User mode switches to 32-bit code and back by itself.
    m.cpu.sync_code_segment(false);
    assert!(!m.cpu.is_64_bit() && m.cpu.segments[1].selector == CODE_32);
    m.cpu.sync_code_segment(true);
    assert!(m.cpu.is_64_bit() && m.cpu.segments[1].selector == USER_CS);
    m.cpu.sync_code_segment(false);
    // `int $0x80`, and the return.
    m.gate(0x80, 0xee, 0);
    m.cpu.frame.rip = CODE + 2;
    m.cpu.deliver_software(&m.memory, 0x80, 2).unwrap();
    assert!(m.cpu.is_64_bit() && m.cpu.frame.rip == HANDLER + 0x800);
    assert_eq!(m.words::<2>(RSP0 - 40), [CODE + 2, CODE_32.into()]);
    m.cpu.sync_code_segment(false);
    assert!(m.cpu.is_64_bit(), "the kernel's code is");
    assert_eq!(m.run(&[0x48, 0xcf]), Outcome::Jump);
    assert_eq!((m.cpu.is_64_bit(), m.cpu.cpl, m.cpu.frame.rip), (false, 3, CODE + 2));
    // Data segments loaded by user mode.
    m.cpu.sync_data_segment(3, USER_DS);
    m.cpu.sync_data_segment(5, 0);
    assert_eq!([3, 5].map(|register| m.cpu.segments[register].selector), [USER_DS, 0]);
}

#[test]
fn areas_of_threads() {
    let m = Machine::new();
    m.memory.write(GDT + 0x58, 0x12cf_f334_5678_ffff_u64).unwrap();
    // The second descriptor is beyond the limit.
    let found = m.cpu.descriptors::<2>(&m.memory, 0x5b);
    assert_eq!(found, [0x12cf_f334_5678_ffff, 0]);
    // 32 bits, writable, limit in pages, present.
    assert_eq!(thread_area(12, found[0]), [12, 0x1234_5678, 0xf_ffff, 0x11]);
    // Expand-down, read-only, in bytes, usable.
    assert_eq!(thread_area(13, 0x0050_f400_0010_00ff), [13, 0x10, 0xff, 0x4b]);
    assert_eq!(thread_area(14, 0), [14, 0, 0, 0]);
}
