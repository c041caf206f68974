mod control;
mod further;

use super::*;
use crate::alu;
use crate::string::RFLAGS_TF;
use hw_x86::paging::{cr0, cr4, entry};
use vmm_mem::testing;
use vmm_x86::testing::ScriptedVcpu;

const CODE: u64 = 0x1000;
const DEVICE: u64 = 0xfec0_0000;

/// A device of byte registers that records accesses.
struct Recorder {
    bytes: [u8; 64],
    log: Vec<(char, u64, u8, u64)>,
    input: u32,
}

impl Recorder {
    fn new() -> Self {
        Self { bytes: [0; 64], log: Vec::new(), input: 0 }
    }
}

impl Devices for Recorder {
    fn read(&mut self, address: u64, size: u8) -> u64 {
        let at = (address - DEVICE) as usize;
        let value =
            (0..usize::from(size)).fold(0, |v, i| v | u64::from(self.bytes[at + i]) << (8 * i));
        self.log.push(('r', address - DEVICE, size, value));
        value
    }

    fn write(&mut self, address: u64, size: u8, value: u64) {
        let at = (address - DEVICE) as usize;
        for i in 0..usize::from(size) {
            self.bytes[at + i] = (value >> (8 * i)) as u8;
        }
        self.log.push(('w', address - DEVICE, size, value));
    }

    fn port_in(&mut self, port: u16, size: u8) -> u32 {
        self.input += 1;
        self.log.push(('i', port.into(), size, self.input.into()));
        self.input
    }

    fn port_out(&mut self, port: u16, size: u8, value: u32) {
        self.log.push(('o', port.into(), size, value.into()));
    }
}

fn long(code: &[u8]) -> (ScriptedVcpu, GuestMemory, Recorder) {
    // Identity map of the first 4 GiB in 1 GiB pages.
    let memory = testing::memory(&[(0, 0x10_000)]);
    memory.write(0x8000, 0x9000 | entry::PRESENT | entry::WRITE).unwrap();
    for page in 0..4 {
        let value = page << 30 | entry::PRESENT | entry::WRITE | entry::LARGE;
        memory.write(0x9000 + 8 * page, value).unwrap();
    }
    memory.write_slice(CODE, code).unwrap();
    let mut vcpu = ScriptedVcpu::long(0x8000);
    vcpu.set(Reg::Rip, CODE);
    vcpu.set_gpr(Gpr::Rbx, DEVICE);
    (vcpu, memory, Recorder::new())
}

/// Checks one instruction on the device word 0x8000_00f1 at offset 0: `rax`, the word and the
/// flags after it.
#[track_caller]
fn check(code: &[u8], rax: u64, expected_rax: u64, expected_word: u64, flags: u64) {
    let (mut vcpu, memory, mut device) = long(code);
    device.bytes[..4].copy_from_slice(&0x8000_00f1_u32.to_le_bytes());
    vcpu.set_gpr(Gpr::Rax, rax);
    let next = memory_access(&mut vcpu, &memory, &mut device);
    assert_eq!(next, Ok(Done::Next(CODE + code.len() as u64)));
    assert_eq!(vcpu.gpr(Gpr::Rax), expected_rax, "rax");
    let word = u64::from_le_bytes(device.bytes[..8].try_into().unwrap());
    assert_eq!(word, expected_word, "word");
    assert_eq!(vcpu.get(Reg::Rflags) & !2, flags, "flags");
}

#[test]
fn instructions() {
    use crate::alu::{AF, CF, OF, PF, SF, ZF};
    const OLD: u64 = 0x8000_00f1;
    let high = 0x1122_3344_5566_7788;
    // mov eax, [rbx] and similar
    check(&[0x8b, 0x03], high, OLD, OLD, 0);
    check(&[0x66, 0x8b, 0x03], high, high & !0xffff | 0xf1, OLD, 0);
    check(&[0x8a, 0x03], high, high & !0xff | 0xf1, OLD, 0);
    check(&[0x8a, 0x23], high, high & !0xff00 | 0xf100, OLD, 0); // ah
    check(&[0x48, 0x8b, 0x03], high, OLD, OLD, 0);
    check(&[0x89, 0x03], high, high, 0x5566_7788, 0);
    check(&[0x48, 0x89, 0x03], high, high, high, 0);
    check(&[0x88, 0x63, 0x01], high, high, OLD & !0xff00 | 0x7700, 0); // [rbx+1] = ah
    check(&[0xc7, 0x03, 1, 2, 3, 4], 0, 0, 0x0403_0201, 0);
    check(&[0x48, 0xc7, 0x03, 0xff, 0xff, 0xff, 0xff], 0, 0, u64::MAX, 0);
    // movzx, movsx, movsxd, movbe, movnti
    check(&[0x0f, 0xb6, 0x03], high, 0xf1, OLD, 0);
    check(&[0x0f, 0xbe, 0x03], high, 0xffff_fff1, OLD, 0);
    check(&[0x48, 0x0f, 0xbe, 0x03], high, 0xffff_ffff_ffff_fff1, OLD, 0);
    check(&[0x48, 0x63, 0x03], high, 0xffff_ffff_8000_00f1, OLD, 0);
    check(&[0x0f, 0x38, 0xf0, 0x03], high, 0xf100_0080, OLD, 0);
    check(&[0x0f, 0xc3, 0x03], high, high, 0x5566_7788, 0);
    // add [rbx], eax; add eax, [rbx]; sub, cmp, and, or, xor, test
    check(&[0x01, 0x03], 0x8000_0000, 0x8000_0000, 0xf1, CF | OF);
    check(&[0x03, 0x03], 0x0f, 0x8000_0100, OLD, SF | AF | PF);
    check(&[0x83, 0x2b, 0xf1], 0, 0, 0x8000_0100, CF | SF | PF);
    check(&[0x39, 0x03], OLD, OLD, OLD, ZF | PF);
    check(&[0x80, 0x3b, 0xf2], 0, 0, OLD, CF | SF | PF | AF);
    check(&[0x81, 0x23, 0xf0, 0, 0, 0], 0, 0, 0xf0, PF);
    check(&[0x09, 0x03], 2, 2, OLD | 2, SF | PF);
    check(&[0x31, 0x03], OLD, OLD, 0, ZF | PF);
    check(&[0x85, 0x03], 0x100, 0x100, OLD, ZF | PF);
    check(&[0xf6, 0x03, 0x80], 0, 0, OLD, SF);
    // inc, dec, not, neg
    check(&[0xfe, 0x03], 0, 0, OLD + 1, SF);
    check(&[0xff, 0x0b], 0, 0, OLD - 1, SF | PF);
    check(&[0xf7, 0x13], 0, 0, 0x7fff_ff0e, 0);
    check(&[0xf7, 0x1b], 0, 0, 0x7fff_ff0f, CF | PF | AF);
    // xchg, lock xadd, cmpxchg equal and not
    check(&[0x87, 0x03], 5, OLD, 5, 0);
    check(&[0xf0, 0x0f, 0xc1, 0x03], 0x0f, OLD, 0x8000_0100, SF | AF | PF);
    check(&[0x0f, 0xb1, 0x0b], OLD, OLD, 0, ZF | PF);
    check(&[0x0f, 0xb1, 0x0b], 0, OLD, OLD, CF | AF | PF);
    // bt, bts with a constant; btr of a bit in another word
    check(&[0x0f, 0xba, 0x23, 31], 0, 0, OLD, CF);
    check(&[0x0f, 0xba, 0x2b, 1], 0, 0, OLD | 2, 0);
    check(&[0x0f, 0xb3, 0x43, 0x04], -32_i64 as u64, -32_i64 as u64, OLD - 1, CF);
}

#[test]
fn repeated_moves_are_bounded_and_resume() {
    let (mut vcpu, memory, mut device) = long(&[0xf3, 0xa4]);
    memory.write_slice(0x2000, b"hello").unwrap();
    vcpu.set_gpr(Gpr::Rsi, 0x2000);
    vcpu.set_gpr(Gpr::Rdi, DEVICE);
    vcpu.set_gpr(Gpr::Rcx, 5);
    assert_eq!(memory_access(&mut vcpu, &memory, &mut device), Ok(Done::Next(CODE + 2)));
    assert_eq!(&device.bytes[..5], b"hello");
    assert_eq!(vcpu.gpr(Gpr::Rcx), 0);

    let (mut vcpu, memory, mut device) = long(&[0xf3, 0x48, 0xab]);
    vcpu.set_gpr(Gpr::Rdi, 0x2000);
    vcpu.set_gpr(Gpr::Rcx, 300);
    vcpu.set_gpr(Gpr::Rax, u64::MAX);
    assert_eq!(memory_access(&mut vcpu, &memory, &mut device), Ok(Done::Again));
    assert_eq!(vcpu.gpr(Gpr::Rcx), 300 - u64::from(MOST_REPEATS));
    assert_eq!(memory_access(&mut vcpu, &memory, &mut device), Ok(Done::Next(CODE + 3)));
    assert_eq!(memory.read::<u64>(0x2000 + 299 * 8), Ok(u64::MAX));
    assert_eq!(memory.read::<u64>(0x2000 + 300 * 8), Ok(0));
}

#[test]
fn a_round_is_a_step() {
    let (mut vcpu, memory, mut device) = long(&[0xf3, 0xa4]);
    vcpu.set_gpr(Gpr::Rsi, 0x2000);
    vcpu.set_gpr(Gpr::Rdi, DEVICE);
    vcpu.set_gpr(Gpr::Rcx, 2);
    vcpu.set(Reg::Rflags, RFLAGS_TF);
    assert_eq!(memory_access(&mut vcpu, &memory, &mut device), Ok(Done::Again));
    assert_eq!((vcpu.gpr(Gpr::Rcx), vcpu.gpr(Gpr::Rdi)), (1, DEVICE + 1));
    // No iteration remains: the last one ends it.
    assert_eq!(memory_access(&mut vcpu, &memory, &mut device), Ok(Done::Next(CODE + 2)));
    assert_eq!((vcpu.gpr(Gpr::Rcx), device.log.len()), (0, 2));
}

#[test]
fn string_ports() {
    let (mut vcpu, memory, mut device) = long(&[0xf3, 0x6e]);
    memory.write_slice(0x2000, b"ok").unwrap();
    vcpu.set_gpr(Gpr::Rsi, 0x2000);
    vcpu.set_gpr(Gpr::Rcx, 2);
    vcpu.set_gpr(Gpr::Rdx, 0x3f8);
    let io = IoExit { port: 0x3f8, size: 1, write: true, string: true, rep: true, next_rip: 0 };
    assert_eq!(string_io(&mut vcpu, &memory, &mut device, io), Ok(Done::Next(CODE + 2)));
    assert_eq!(device.log, [('o', 0x3f8, 1, b'o'.into()), ('o', 0x3f8, 1, b'k'.into())]);
    // An exit that does not match the instruction is not executed.
    let other = IoExit { size: 2, ..io };
    assert!(matches!(string_io(&mut vcpu, &memory, &mut device, other), Err(Stop::Unknown(_))));

    let (mut vcpu, memory, mut device) = long(&[0x66, 0x6d]);
    vcpu.set_gpr(Gpr::Rdi, 0x2002);
    vcpu.set(Reg::Rflags, alu::DF);
    let io = IoExit { port: 0x10, size: 2, write: false, string: true, rep: false, next_rip: 0 };
    assert_eq!(string_io(&mut vcpu, &memory, &mut device, io), Ok(Done::Next(CODE + 2)));
    assert_eq!((memory.read::<u16>(0x2002), vcpu.gpr(Gpr::Rdi)), (Ok(1), 0x2000));
}

#[test]
fn faults_change_nothing() {
    // movs from a page that is not mapped to the device.
    let (mut vcpu, memory, mut device) = long(&[0x48, 0xa5]);
    vcpu.set_gpr(Gpr::Rsi, 5 << 30);
    vcpu.set_gpr(Gpr::Rdi, DEVICE);
    let stop = memory_access(&mut vcpu, &memory, &mut device);
    assert_eq!(stop, Err(Stop::Raise(Event::exception_code(14, 0))));
    assert_eq!(vcpu.get(Reg::Cr2), 5 << 30);
    assert!(device.log.is_empty() && vcpu.gpr(Gpr::Rdi) == DEVICE);
    // A non-canonical address, with and without the stack segment.
    let (mut vcpu, memory, mut device) = long(&[0x8b, 0x03]);
    vcpu.set_gpr(Gpr::Rbx, 1 << 63);
    let stop = memory_access(&mut vcpu, &memory, &mut device);
    assert_eq!(stop, Err(Stop::Raise(Event::exception_code(13, 0))));
    let (mut vcpu, memory, mut device) = long(&[0x8b, 0x45, 0x00]);
    vcpu.set_gpr(Gpr::Rbp, 1 << 63);
    let stop = memory_access(&mut vcpu, &memory, &mut device);
    assert_eq!(stop, Err(Stop::Raise(Event::exception_code(12, 0))));
    // Not supported.
    let (mut vcpu, memory, mut device) = long(&[0x0f, 0x6f, 0x03]);
    let stop = memory_access(&mut vcpu, &memory, &mut device);
    assert_eq!(stop, Err(Stop::Unknown(0x036f0f)));
}

/// Tables with 4 KiB pages: an operand over two pages, an instruction over two pages, accessed
/// and dirty bits.
#[test]
fn pages() {
    let memory = testing::memory(&[(0, 0x10_000)]);
    let table = entry::PRESENT | entry::WRITE;
    memory.write(0x8000, 0x9000 | table).unwrap();
    memory.write(0x9000, 0xa000 | table).unwrap();
    memory.write(0xa000, 0xb000 | table).unwrap();
    // Code at 0x1fff spans pages 1 and 2 (at 0x5000); data pages 4 (device) and 6 (memory).
    for (page, target) in [(1, 0x1000), (2, 0x5000), (4, DEVICE), (5, 0x6000)] {
        memory.write(0xb000 + 8 * page, target | table).unwrap();
    }
    memory.write(0x1fff, 0x89_u8).unwrap();
    memory.write(0x5000, 0x03_u8).unwrap(); // mov [rbx], eax
    let mut vcpu = ScriptedVcpu::long(0x8000);
    vcpu.set(Reg::Rip, 0x1fff);
    vcpu.set_gpr(Gpr::Rax, 0x4433_2211);
    vcpu.set_gpr(Gpr::Rbx, 0x403c);
    let mut device = Recorder::new();
    assert_eq!(memory_access(&mut vcpu, &memory, &mut device), Ok(Done::Next(0x2001)));
    assert_eq!(device.log, [('w', 0x3c, 4, 0x4433_2211)]);
}

#[test]
fn operand_over_two_pages() {
    let memory = testing::memory(&[(0, 0x10_000)]);
    let table = entry::PRESENT | entry::WRITE;
    memory.write(0x8000, 0x9000 | table).unwrap();
    memory.write(0x9000, 0xa000 | table).unwrap();
    memory.write(0xa000, 0xb000 | table).unwrap();
    for (page, target) in [(1, 0x1000), (4, 0x6000), (5, DEVICE)] {
        memory.write(0xb000 + 8 * page, target | table).unwrap();
    }
    memory.write_slice(0x1000, &[0x89, 0x03]).unwrap();
    let mut vcpu = ScriptedVcpu::long(0x8000);
    vcpu.set(Reg::Rip, 0x1000);
    vcpu.set_gpr(Gpr::Rax, 0x4433_2211);
    vcpu.set_gpr(Gpr::Rbx, 0x4ffd);
    let mut device = Recorder::new();
    assert_eq!(memory_access(&mut vcpu, &memory, &mut device), Ok(Done::Next(0x1002)));
    assert_eq!(memory.read::<u16>(0x6ffd), Ok(0x2211));
    assert_eq!(device.log, [('w', 0, 1, 0x44)]);
    let leaf = |page: u64| memory.read::<u64>(0xb000 + 8 * page).unwrap();
    let marks = entry::ACCESSED | entry::DIRTY;
    assert_eq!((leaf(4) & marks, leaf(5) & marks), (marks, marks));
    assert_eq!(memory.read::<u64>(0xa000).unwrap() & marks, entry::ACCESSED);
    assert_eq!(leaf(1) & marks, 0, "fetches again do not mark");
    // Read-only: a page fault in the guest, no write.
    memory.write(0xb000 + 8 * 5, DEVICE | entry::PRESENT).unwrap();
    memory.write(0x6ffd, 0_u16).unwrap();
    let stop = memory_access(&mut vcpu, &memory, &mut device);
    assert_eq!(stop, Err(Stop::Raise(Event::exception_code(14, 3))));
    assert_eq!(vcpu.get(Reg::Cr2), 0x5000);
    assert_eq!(memory.read::<u16>(0x6ffd), Ok(0));
    // The kernel may write read-only pages while WP is clear.
    vcpu.set(Reg::Cr0, cr0::PE | cr0::PG);
    assert_eq!(memory_access(&mut vcpu, &memory, &mut device), Ok(Done::Next(0x1002)));
}

#[test]
fn old_paging_modes() {
    // 32-bit tables: a 4 MiB page and a 4 KiB page; then PAE.
    let memory = testing::memory(&[(0, 0x10_000)]);
    memory.write_slice(CODE, &[0x89, 0x03]).unwrap(); // mov [ebx], eax
    memory.write(0x8000_u64, (entry::PRESENT | entry::WRITE | entry::LARGE) as u32).unwrap();
    memory.write(0x8004, (0x9000 | entry::PRESENT | entry::WRITE) as u32).unwrap();
    memory.write(0x9000, (DEVICE | entry::PRESENT | entry::WRITE) as u32).unwrap();
    let mut vcpu = ScriptedVcpu::flat32();
    vcpu.set(Reg::Cr0, cr0::PE | cr0::PG | cr0::WP);
    vcpu.set(Reg::Cr4, cr4::PSE);
    vcpu.set(Reg::Cr3, 0x8000);
    vcpu.set(Reg::Rip, CODE);
    vcpu.set_gpr(Gpr::Rax, 7);
    vcpu.set_gpr(Gpr::Rbx, 0x40_0010);
    let mut device = Recorder::new();
    assert_eq!(memory_access(&mut vcpu, &memory, &mut device), Ok(Done::Next(CODE + 2)));
    assert_eq!(device.log, [('w', 0x10, 4, 7)]);

    let memory = testing::memory(&[(0, 0x10_000)]);
    memory.write_slice(CODE, &[0x89, 0x03]).unwrap();
    memory.write(0x8020, 0x9000 | entry::PRESENT).unwrap(); // root is 32-byte aligned
    let large = entry::PRESENT | entry::WRITE | entry::LARGE;
    memory.write(0x9000, large).unwrap();
    memory.write(0x9008, DEVICE & !0x1f_ffff | large).unwrap();
    vcpu.set(Reg::Cr4, cr4::PAE);
    vcpu.set(Reg::Cr3, 0x8020);
    vcpu.set_gpr(Gpr::Rbx, 0x20_0020);
    let mut device = Recorder::new();
    assert_eq!(memory_access(&mut vcpu, &memory, &mut device), Ok(Done::Next(CODE + 2)));
    assert_eq!(device.log, [('w', 0x20, 4, 7)]);
}
