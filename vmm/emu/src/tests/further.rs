//! Products, scans, shifts, comparisons, the stack and the task register, with device operands.

use super::*;
use crate::alu::{AF, CF, OF, PF, SF, ZF};

const OLD: u64 = 0x8000_00f1;

#[test]
fn products_scans_and_shifts() {
    // imul eax, [rbx]; imul eax, [rbx], 3; imul eax, [rbx], 0x100
    check(&[0x0f, 0xaf, 0x03], 2, 0x1e2, OLD, CF | OF);
    check(&[0x6b, 0x03, 3], 0, 0x8000_02d3, OLD, CF | OF);
    check(&[0x69, 0x03, 0, 1, 0, 0], 0, 0xf100, OLD, CF | OF);
    check(&[0x48, 0x0f, 0xaf, 0x03], 2, 2 * OLD, OLD, 0);
    // imul byte [rbx]; mul byte [rbx]: the product is in AX.
    check(&[0xf6, 0x2b], 2, 0xffe2, OLD, 0);
    check(&[0xf6, 0x23], 2, 0x1e2, OLD, CF | OF);
    // bsf, bsr, tzcnt, lzcnt
    check(&[0x0f, 0xbc, 0x43, 0x01], 7, 23, OLD, 0);
    check(&[0x0f, 0xbd, 0x03], 7, 31, OLD, 0);
    check(&[0x66, 0x0f, 0xbd, 0x03], 0x7_0000, 0x7_0007, OLD, 0);
    check(&[0xf3, 0x0f, 0xbc, 0x03], 7, 0, OLD, ZF);
    check(&[0xf3, 0x0f, 0xbd, 0x43, 0x01], 7, 8, OLD, 0);
    // No bit set: the register is kept, or gets the width.
    let high = 0x1122_3344_5566_7788;
    check(&[0x0f, 0xbc, 0x43, 0x04], high, high, OLD, ZF);
    check(&[0xf3, 0x48, 0x0f, 0xbd, 0x43, 0x08], high, 64, OLD, CF);
    // shld [rbx], eax, 4; shrd [rbx], eax, 4; shrd [rbx], eax, cl with 0
    check(&[0x0f, 0xa4, 0x03, 4], 0xa000_0000, 0xa000_0000, 0xf1a, OF);
    check(&[0x0f, 0xac, 0x03, 4], 5, 5, 0x5800_000f, PF | OF);
    check(&[0x0f, 0xad, 0x03], 5, 5, OLD, 0);
    check(&[0x0f, 0xac, 0x03, 1], 1, 1, 0xc000_0078, CF | SF | PF);
    // smsw [rbx]: two bytes, whatever the operand size.
    check(&[0x48, 0x0f, 0x01, 0x23], 0, 0, 0x8000_0011, 0);
}

#[test]
fn conditions_and_shifts() {
    let high = 0x1122_3344_5566_7788;
    // cmovz, cmovnz eax, [rbx]; the flags say "not zero". The upper half is cleared in both cases.
    check(&[0x0f, 0x44, 0x03], high, 0x5566_7788, OLD, 0);
    check(&[0x0f, 0x45, 0x03], high, OLD, OLD, 0);
    check(&[0x66, 0x0f, 0x44, 0x03], high, high, OLD, 0);
    // setz, setnz [rbx]
    check(&[0x0f, 0x94, 0x03], 0, 0, 0x8000_0000, 0);
    check(&[0x0f, 0x95, 0x03], 0, 0, 0x8000_0001, 0);
    // shl dword [rbx]; shr dword [rbx], 4; sar dword [rbx], 4; rol byte [rbx], cl with 0
    check(&[0xd1, 0x23], 0, 0, 0x1e2, CF | OF | PF);
    check(&[0xc1, 0x2b, 4], 0, 0, 0x0800_000f, PF | OF);
    check(&[0xc1, 0x3b, 4], 0, 0, 0xf800_000f, PF | SF);
    check(&[0xd2, 0x03], 0, 0, OLD, 0);
    // From overflow (0) to greater (15), with each flag that they test.
    let table: [(u64, u16); 7] = [
        (0, 0b1010_1010_1010_1010),
        (CF, 0b1010_1010_0110_0110),
        (ZF, 0b0110_1010_0101_1010),
        (PF, 0b1010_0110_1010_1010),
        (SF, 0b0101_1001_1010_1010),
        (OF, 0b0101_1010_1010_1001),
        (SF | OF, 0b1010_1001_1010_1001),
    ];
    for (flags, expected) in table {
        let found =
            (0..16).filter(|&code| alu::holds(code, flags)).fold(0, |set, code| set | 1 << code);
        assert_eq!(found, expected, "{flags:#x}: {found:016b}");
    }
}

#[test]
fn products_of_every_size() {
    let (mut vcpu, memory, mut device) = long(&[0x48, 0xf7, 0x2b]);
    device.bytes[..8].copy_from_slice(&(-3_i64).to_le_bytes());
    vcpu.set_gpr(Gpr::Rax, 5);
    memory_access(&mut vcpu, &memory, &mut device).unwrap();
    assert_eq!((vcpu.gpr(Gpr::Rax), vcpu.gpr(Gpr::Rdx)), (-15_i64 as u64, u64::MAX));
    assert_eq!(vcpu.get(Reg::Rflags) & (CF | OF), 0);
    let (mut vcpu, memory, mut device) = long(&[0x48, 0xf7, 0x23]);
    device.bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    vcpu.set_gpr(Gpr::Rax, u64::MAX);
    memory_access(&mut vcpu, &memory, &mut device).unwrap();
    assert_eq!((vcpu.gpr(Gpr::Rax), vcpu.gpr(Gpr::Rdx)), (1, u64::MAX - 1));
    assert_eq!(vcpu.get(Reg::Rflags) & (CF | OF), CF | OF);
}

/// Divides by the device: registers of the dividend, the divisor in the device, registers of the
/// result; or none of them changed and `#DE`.
#[test]
fn quotients() {
    let divide = |code: &[u8], rdx: u64, rax: u64, divisor: u64| {
        let (mut vcpu, memory, mut device) = long(code);
        device.bytes[..8].copy_from_slice(&divisor.to_le_bytes());
        vcpu.set_gpr(Gpr::Rdx, rdx);
        vcpu.set_gpr(Gpr::Rax, rax);
        let done = memory_access(&mut vcpu, &memory, &mut device);
        let found = (vcpu.gpr(Gpr::Rdx), vcpu.gpr(Gpr::Rax));
        match done {
            Ok(_) => Some(found),
            Err(stop) => {
                assert_eq!(stop, Stop::Raise(Event::exception(0)));
                assert_eq!(found, (rdx, rax));
                None
            }
        }
    };
    let negative = |value: i64| value as u64;
    // div, idiv byte [rbx]: AX, with the remainder in AH.
    assert_eq!(divide(&[0xf6, 0x33], 9, 0x55_0107, 3), Some((9, 0x55_0257)));
    assert_eq!(divide(&[0xf6, 0x33], 9, 0x0300, 3), None);
    assert_eq!(divide(&[0xf6, 0x3b], 9, 0xfff9, 2), Some((9, 0xfffd)));
    assert_eq!(divide(&[0xf6, 0x3b], 9, 0x0080, 1), None);
    // div dword [rbx]: upper halves are cleared.
    let high = 0x1122_3344_0000_0000;
    assert_eq!(divide(&[0xf7, 0x33], high | 1, high | 5, 2), Some((1, 0x8000_0002)));
    // div, idiv qword [rbx]
    assert_eq!(divide(&[0x48, 0xf7, 0x33], 2, 7, 5), Some((4, 0x6666_6666_6666_6667)));
    assert_eq!(divide(&[0x48, 0xf7, 0x33], 5, 7, 5), None);
    assert_eq!(divide(&[0x48, 0xf7, 0x33], 0, 7, 0), None);
    let idiv = |rdx, rax, divisor: i64| divide(&[0x48, 0xf7, 0x3b], rdx, rax, divisor as u64);
    assert_eq!(idiv(u64::MAX, negative(-7), 2), Some((negative(-1), negative(-3))));
    assert_eq!(idiv(0, 7, -2), Some((1, negative(-3))));
    assert_eq!(idiv(u64::MAX, 1 << 63, -1), None);
    assert_eq!(idiv(1 << 63, 0, -1), None);
    assert_eq!(idiv(0, 7, 0), None);
}

/// Compares bytes of memory with those of the device: prefix, opcode, bytes, RCX at the end, flags.
#[test]
fn comparisons_end_where_they_must() {
    let compare = |code: &[u8], text: &[u8; 4], count: u64| {
        let (mut vcpu, memory, mut device) = long(code);
        memory.write_slice(0x2000, text).unwrap();
        device.bytes[..4].copy_from_slice(b"abcd");
        vcpu.set_gpr(Gpr::Rsi, 0x2000);
        vcpu.set_gpr(Gpr::Rdi, DEVICE);
        vcpu.set_gpr(Gpr::Rax, b'c'.into());
        vcpu.set_gpr(Gpr::Rcx, count);
        let next = memory_access(&mut vcpu, &memory, &mut device);
        assert_eq!(next, Ok(Done::Next(CODE + code.len() as u64)));
        let [rcx, rsi, rdi] = [Gpr::Rcx, Gpr::Rsi, Gpr::Rdi].map(|register| vcpu.gpr(register));
        (rcx, rsi - 0x2000, rdi - DEVICE, vcpu.get(Reg::Rflags) & !2)
    };
    let (equal, repe, repne) = (ZF | PF, 0xf3, 0xf2);
    assert_eq!(compare(&[repe, 0xa6], b"abcd", 4), (0, 4, 4, equal));
    assert_eq!(compare(&[repe, 0xa6], b"abxd", 4), (1, 3, 3, 0));
    assert_eq!(compare(&[repe, 0xa6], b"aaxd", 4), (2, 2, 2, CF | SF | PF | AF));
    assert_eq!(compare(&[repne, 0xa6], b"xxcx", 4), (1, 3, 3, equal));
    assert_eq!(compare(&[repe, 0xa6], b"xxxx", 0), (0, 0, 0, 0));
    assert_eq!(compare(&[0xa6], b"abcd", 4), (4, 1, 1, equal));
    assert_eq!(compare(&[repe, 0xa7], b"abcd", 1), (0, 4, 4, equal));
    assert_eq!(compare(&[repne, 0xae], b"xxxx", 9), (6, 0, 3, equal));
    assert_eq!(compare(&[repe, 0xae], b"xxxx", 9), (8, 0, 1, 0));
    // Downwards, and one step at a time.
    let (mut vcpu, memory, mut device) = long(&[repe, 0xae]);
    vcpu.set_gpr(Gpr::Rdi, DEVICE + 3);
    vcpu.set_gpr(Gpr::Rcx, 3);
    vcpu.set(Reg::Rflags, alu::DF | RFLAGS_TF);
    assert_eq!(memory_access(&mut vcpu, &memory, &mut device), Ok(Done::Again));
    assert_eq!((vcpu.gpr(Gpr::Rdi), vcpu.gpr(Gpr::Rcx)), (DEVICE + 2, 2));
}

/// Accesses of a device: read or write, offset, bytes, value.
type Log = Vec<(char, u64, u8, u64)>;

/// An instruction with the stack in the middle of the device: its result, the stack pointer, the
/// accesses.
fn on_stack(code: &[u8]) -> (Result<Done, Stop>, i64, Log, ScriptedVcpu) {
    let (mut vcpu, memory, mut device) = long(code);
    device.bytes[0x20..0x28].copy_from_slice(&0x1234_5678_9abc_u64.to_le_bytes());
    vcpu.set_gpr(Gpr::Rsp, DEVICE + 0x20);
    vcpu.set_gpr(Gpr::Rbp, DEVICE + 0x10);
    vcpu.set_gpr(Gpr::Rax, 0x55);
    let done = memory_access(&mut vcpu, &memory, &mut device);
    let moved = vcpu.gpr(Gpr::Rsp).wrapping_sub(DEVICE + 0x20) as i64;
    (done, moved, device.log, vcpu)
}

#[test]
fn a_stack_of_a_device() {
    let writes = |code: &[u8], moved: i64, written: (u64, u8, u64)| {
        let (done, by, log, _) = on_stack(code);
        assert_eq!(done, Ok(Done::Next(CODE + code.len() as u64)), "{code:x?}");
        assert_eq!((by, log), (moved, vec![('w', written.0, written.1, written.2)]), "{code:x?}");
    };
    // push -7; push -2; push rax; push ax; push rsp: its value before
    writes(&[0x6a, 0xf9], -8, (0x18, 8, -7_i64 as u64));
    writes(&[0x68, 0xfe, 0xff, 0xff, 0xff], -8, (0x18, 8, -2_i64 as u64));
    writes(&[0x50], -8, (0x18, 8, 0x55));
    writes(&[0x66, 0x50], -2, (0x1e, 2, 0x55));
    writes(&[0x54], -8, (0x18, 8, DEVICE + 0x20));
    // enter 16, 0
    writes(&[0xc8, 16, 0, 0], -24, (0x18, 8, DEVICE + 0x10));
    assert_eq!(on_stack(&[0xc8, 16, 0, 0]).3.gpr(Gpr::Rbp), DEVICE + 0x18);
    // push [rbx]; pop rax; pop [rsp]: relative to the new stack pointer
    let (_, moved, log, _) = on_stack(&[0xff, 0x33]);
    assert_eq!((moved, log), (-8, vec![('r', 0, 8, 0), ('w', 0x18, 8, 0)]));
    let (_, moved, log, mut vcpu) = on_stack(&[0x58]);
    let value = 0x1234_5678_9abc;
    assert_eq!((moved, log, vcpu.gpr(Gpr::Rax)), (8, vec![('r', 0x20, 8, value)], value));
    let (_, moved, log, _) = on_stack(&[0x8f, 0x04, 0x24]);
    assert_eq!((moved, log), (8, vec![('r', 0x20, 8, value), ('w', 0x28, 8, value)]));
    // pop rsp; leave
    assert_eq!(on_stack(&[0x5c]).3.gpr(Gpr::Rsp), value);
    let (_, moved, log, _) = on_stack(&[0xc9]);
    assert_eq!((moved, log), (-8, vec![('r', 0x10, 8, 0)]));
}

#[test]
fn branches_through_a_device() {
    let next = |code: &[u8]| {
        let (done, moved, log, _) = on_stack(code);
        (done, moved, log)
    };
    let (there, behind) = (Ok(Done::Next(0x1234_5678_9abc)), CODE + 5);
    assert_eq!(next(&[0xc3]), (there, 8, vec![('r', 0x20, 8, 0x1234_5678_9abc)]));
    assert_eq!(next(&[0xc2, 4, 0]).1, 12);
    let call = next(&[0xe8, 0xf0, 0xff, 0xff, 0xff]);
    assert_eq!(call, (Ok(Done::Next(behind - 16)), -8, vec![('w', 0x18, 8, behind)]));
    // call [rbx + 0x20]; jmp [rbx + 0x20]; call rax
    let read = ('r', 0x20, 8, 0x1234_5678_9abc);
    assert_eq!(next(&[0xff, 0x53, 0x20]), (there, -8, vec![read, ('w', 0x18, 8, CODE + 3)]));
    assert_eq!(next(&[0xff, 0x63, 0x20]), (there, 0, vec![read]));
    assert_eq!(next(&[0xff, 0xd0]).0, Ok(Done::Next(0x55)));
    // To a non-canonical address: no change except the device's accesses.
    let (mut vcpu, memory, mut device) = long(&[0xff, 0x13]);
    device.bytes[7] = 0x80;
    vcpu.set_gpr(Gpr::Rsp, DEVICE + 0x20);
    let refused = Err(Stop::Raise(Event::exception_code(PROTECTION, 0)));
    assert_eq!(memory_access(&mut vcpu, &memory, &mut device), refused);
    assert_eq!((vcpu.gpr(Gpr::Rsp), device.log.len()), (DEVICE + 0x20, 1));
}

#[test]
fn a_fault_leaves_the_stack() {
    // pop [rax] of an unmapped address; push [rbx] with a non-canonical stack.
    let (mut vcpu, memory, mut device) = long(&[0x8f, 0x00]);
    vcpu.set_gpr(Gpr::Rsp, DEVICE);
    vcpu.set_gpr(Gpr::Rax, 5 << 30);
    let stop = memory_access(&mut vcpu, &memory, &mut device);
    assert_eq!(stop, Err(Stop::Raise(Event::exception_code(14, 2))));
    assert_eq!((vcpu.gpr(Gpr::Rsp), device.log.len()), (DEVICE, 0));
    let (mut vcpu, memory, mut device) = long(&[0xff, 0x33]);
    vcpu.set_gpr(Gpr::Rsp, 1 << 63);
    let stop = memory_access(&mut vcpu, &memory, &mut device);
    assert_eq!(stop, Err(Stop::Raise(Event::exception_code(STACK_FAULT, 0))));
    assert!(device.log.is_empty());
}

#[test]
fn stacks_of_16_and_32_bits() {
    let memory = testing::memory(&[(0, 0x10_000)]);
    memory.write_slice(CODE, &[0x6a, 0x81]).unwrap();
    for (attrib, rsp, top, at) in [
        (0xc93_u16, 0x20, 0x1c, 0x1c),
        // Only the low half is used, and it wraps around.
        (0x893, 0x7_0002, 0x7_fffe, 0xfffe),
    ] {
        let mut vcpu = ScriptedVcpu::flat32();
        vcpu.set(Reg::Rip, CODE);
        vcpu.set_gpr(Gpr::Rsp, rsp);
        let base = DEVICE.wrapping_sub(if attrib == 0xc93 { 0 } else { 0xffe0 });
        let stack = vcpu.segment(Seg::Ss);
        vcpu.set_segment(Seg::Ss, vmm_x86::Segment { attrib, base, ..stack });
        let mut device = Recorder::new();
        let done = memory_access(&mut vcpu, &memory, &mut device);
        assert_eq!(done, Ok(Done::Next(CODE + 2)));
        assert_eq!(vcpu.gpr(Gpr::Rsp), top);
        let at = base + at - DEVICE;
        assert_eq!(device.log, [('w', at, 4, 0xffff_ff81)]);
    }
}

#[test]
fn the_task_register() {
    // ltr [rbx]
    let load = |selector: u16, rights: u8, limit: u32, cpl: u64| {
        let (mut vcpu, memory, mut device) = long(&[0x0f, 0x00, 0x1b]);
        device.bytes[..2].copy_from_slice(&selector.to_le_bytes());
        let low = 0x1200_0034_5678_0067 | u64::from(rights) << 40;
        memory.write(0x3040, low).unwrap();
        memory.write(0x3048, 0xffff_8000_u64).unwrap();
        let table = vmm_x86::Segment { selector: 0, attrib: 0, limit, base: 0x3000 };
        vcpu.set_segment(Seg::Gdtr, table);
        vcpu.set(Reg::Cpl, cpl);
        let done = memory_access(&mut vcpu, &memory, &mut device);
        (done, vcpu.segment(Seg::Tr), memory.read::<u8>(0x3045).unwrap())
    };
    let (done, task, rights) = load(0x40, 0x89, 0x4f, 0);
    assert_eq!((done, rights), (Ok(Done::Next(CODE + 3)), 0x8b));
    assert_eq!((task.selector, task.attrib, task.limit), (0x40, 0x8b, 0x67));
    assert_eq!(task.base, 0xffff_8000_1234_5678);
    let refused = |vector, code| Err(Stop::Raise(Event::exception_code(vector, code)));
    for (selector, rights, limit, cpl, expected) in [
        (0, 0x89, 0x4f, 0, refused(PROTECTION, 0)),
        (0x44, 0x89, 0x4f, 0, refused(PROTECTION, 0x44)),
        (0x40, 0x89, 0x4e, 0, refused(PROTECTION, 0x40)),
        (0x40, 0x8b, 0x4f, 0, refused(PROTECTION, 0x40)),
        (0x40, 0x99, 0x4f, 0, refused(PROTECTION, 0x40)),
        (0x40, 0x09, 0x4f, 0, refused(NOT_PRESENT, 0x40)),
    ] {
        let (done, task, after) = load(selector, rights, limit, cpl);
        assert_eq!((done, task.selector, after), (expected, 0, rights), "{selector:#x}");
    }
    assert_eq!(load(0x40, 0x89, 0x4f, 3).1.selector, 0, "not for programs");
}

#[test]
fn moves_of_sse_registers() {
    let old = [0x0807_0605_0403_0201, 0x100f_0e0d_0c0b_0a09];
    let new = [0x1122_3344_5566_7788, 0x99aa_bbcc_ddee_ff00];
    let run = |code: &[u8], at: u64| {
        let (mut vcpu, memory, mut device) = long(code);
        for (byte, value) in device.bytes.iter_mut().zip(1..) {
            *byte = value;
        }
        let mut vectors = [[7, 8]; 16];
        vectors[12] = new;
        vcpu.vectors = Some(vectors);
        vcpu.set_gpr(Gpr::Rbx, DEVICE + at);
        let done = memory_access(&mut vcpu, &memory, &mut device);
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&device.bytes[at as usize..][..16]);
        (done, vcpu.vectors.unwrap(), u128::from_le_bytes(bytes), device.log.len())
    };
    let as_number = |[low, high]: [u64; 2]| u128::from(low) | u128::from(high) << 64;
    // movdqu, movups, movupd, movaps, movapd, movdqa xmm12, [rbx]
    let loads: [&[u8]; 6] = [
        &[0xf3, 0x44, 0x0f, 0x6f, 0x23],
        &[0x44, 0x0f, 0x10, 0x23],
        &[0x66, 0x44, 0x0f, 0x10, 0x23],
        &[0x44, 0x0f, 0x28, 0x23],
        &[0x66, 0x44, 0x0f, 0x28, 0x23],
        &[0x66, 0x44, 0x0f, 0x6f, 0x23],
    ];
    for (number, code) in loads.into_iter().enumerate() {
        let (done, vectors, _, accesses) = run(code, 0);
        assert_eq!(done, Ok(Done::Next(CODE + code.len() as u64)), "{code:x?}");
        assert_eq!((vectors[12], vectors[4], accesses), (old, [7, 8], 2), "{code:x?}");
        // Not at a multiple of 16: three are permitted.
        let (done, vectors, ..) = run(code, 1);
        let fault = Err(Stop::Raise(Event::exception_code(13, 0)));
        assert_eq!(done, if number < 3 { Ok(Done::Next(CODE + code.len() as u64)) } else { fault });
        assert_eq!(vectors[12] == new, number >= 3, "{code:x?}");
    }
    // movdqu, movups, movaps, movntps, movdqa, movntdq [rbx], xmm12
    let stores: [&[u8]; 6] = [
        &[0xf3, 0x44, 0x0f, 0x7f, 0x23],
        &[0x44, 0x0f, 0x11, 0x23],
        &[0x44, 0x0f, 0x29, 0x23],
        &[0x44, 0x0f, 0x2b, 0x23],
        &[0x66, 0x44, 0x0f, 0x7f, 0x23],
        &[0x66, 0x44, 0x0f, 0xe7, 0x23],
    ];
    for code in stores {
        let (done, vectors, stored, accesses) = run(code, 16);
        assert_eq!(done, Ok(Done::Next(CODE + code.len() as u64)), "{code:x?}");
        assert_eq!((stored, vectors[12], accesses), (as_number(new), new, 2), "{code:x?}");
    }
    // A back end without these registers; movss, movq mm4, movlps: not supported.
    let (mut vcpu, memory, mut device) = long(loads[0]);
    assert!(matches!(memory_access(&mut vcpu, &memory, &mut device), Err(Stop::Unknown(_))));
    for code in [&[0xf3, 0x0f, 0x10, 0x23][..], &[0x0f, 0x6f, 0x23], &[0x0f, 0x12, 0x23]] {
        assert!(matches!(run(code, 0).0, Err(Stop::Unknown(_))), "{code:x?}");
    }
}
