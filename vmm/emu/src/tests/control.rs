//! Instructions with control registers.

use super::*;
use crate::{Control, control};
use vmm_x86::ControlAccess::{
    self, ClearTaskSwitched, InvalidatePage, LoadStatusWord, Read, Write,
};
use vmm_x86::DecodedControl;

const STATUS: u64 = 0x1_0000_ffff_1234;

/// A vCPU at this code: `rax` and `rdi` are small numbers, `fs` and `ds` have bases.
fn vcpu_at(mode: CodeSize, code: &[u8]) -> (ScriptedVcpu, GuestMemory, Recorder) {
    let (mut vcpu, memory, recorder) = long(code);
    if mode != CodeSize::Bits64 {
        vcpu = ScriptedVcpu::flat32();
        vcpu.set(Reg::Rip, CODE);
    }
    if mode == CodeSize::Bits16 {
        let mut cs = vcpu.segment(Seg::Cs);
        cs.attrib &= !0x400;
        vcpu.set_segment(Seg::Cs, cs);
    }
    for (segment, base) in [(Seg::Fs, 0x7000), (Seg::Ss, 0x300)] {
        let mut value = vcpu.segment(segment);
        value.base = base;
        vcpu.set_segment(segment, value);
    }
    vcpu.set_gpr(Gpr::Rax, STATUS);
    vcpu.set_gpr(Gpr::Rbx, 0x2000);
    vcpu.set_gpr(Gpr::Rbp, 0x4000);
    vcpu.set_gpr(Gpr::Rsi, 0x10);
    vcpu.set_gpr(Gpr::R12, 0xffff_8000_0000_0000);
    memory.write(0x2000, 0xabcd_u16).unwrap();
    memory.write(0x2010, 0x5678_u16).unwrap();
    (vcpu, memory, recorder)
}

/// Decodes this code, with its bytes from memory or from the host.
fn decoded(mode: CodeSize, code: &[u8]) -> Result<ControlAccess, Stop> {
    let (mut vcpu, memory, mut recorder) = vcpu_at(mode, code);
    match control(&mut vcpu, &memory, &mut recorder)? {
        Control::Access(DecodedControl { access, next }) => {
            assert_eq!(next, CODE + code.len() as u64, "{code:x?} {mode:?}");
            Ok(access)
        }
        Control::Completed(done) => panic!("{code:x?} {mode:?}: {done:?}"),
    }
}

#[test]
fn every_form_is_decoded() {
    use CodeSize::{Bits16, Bits32, Bits64};
    let read = |control, register| Read { control, register };
    let write = |control, register| Write { control, register };
    let kernel = 0xffff_8000_0000_0000_u64;
    let cases: &[(CodeSize, &[u8], ControlAccess)] = &[
        (Bits64, &[0x0f, 0x20, 0xc0], read(0, Gpr::Rax)),
        (Bits64, &[0x0f, 0x22, 0xd8], write(3, Gpr::Rax)),
        (Bits64, &[0x41, 0x0f, 0x22, 0xe7], write(4, Gpr::R15)),
        (Bits64, &[0x44, 0x0f, 0x20, 0xc3], read(8, Gpr::Rbx)),
        (Bits64, &[0x44, 0x0f, 0x22, 0xc3], write(8, Gpr::Rbx)),
        // Neither REX.W, 66, F2, F3 nor a segment has an effect, nor do the mode bits of ModRM.
        (Bits64, &[0x48, 0x0f, 0x22, 0xc0], write(0, Gpr::Rax)),
        (Bits64, &[0x66, 0x0f, 0x20, 0xd4], read(2, Gpr::Rsp)),
        (Bits64, &[0x2e, 0xf3, 0x0f, 0x20, 0xd9], read(3, Gpr::Rcx)),
        (Bits64, &[0x0f, 0x22, 0x1c], write(3, Gpr::Rsp)),
        (Bits64, &[0x0f, 0x20, 0x45], read(0, Gpr::Rbp)),
        // LOCK selects CR8.
        (Bits32, &[0xf0, 0x0f, 0x22, 0xc3], write(8, Gpr::Rbx)),
        (Bits32, &[0x0f, 0x22, 0xc0], write(0, Gpr::Rax)),
        (Bits32, &[0x0f, 0x20, 0xe2], read(4, Gpr::Rdx)),
        (Bits16, &[0x0f, 0x22, 0xc0], write(0, Gpr::Rax)),
        (Bits16, &[0x66, 0x0f, 0x20, 0xc0], read(0, Gpr::Rax)),
        // A register that does not exist; its access raises #UD.
        (Bits64, &[0x0f, 0x22, 0xc8], write(1, Gpr::Rax)),
        (Bits64, &[0x0f, 0x06], ClearTaskSwitched),
        (Bits16, &[0x0f, 0x06], ClearTaskSwitched),
        (Bits64, &[0x0f, 0x01, 0xf0], LoadStatusWord(0x1234)),
        (Bits64, &[0x48, 0x0f, 0x01, 0xf0], LoadStatusWord(0x1234)),
        (Bits32, &[0x0f, 0x01, 0xf6], LoadStatusWord(0x10)),
        (Bits16, &[0x0f, 0x01, 0xf0], LoadStatusWord(0x1234)),
        (Bits64, &[0x0f, 0x01, 0x33], LoadStatusWord(0xabcd)),
        (Bits32, &[0x0f, 0x01, 0x34, 0x1e], LoadStatusWord(0x5678)),
        (Bits16, &[0x0f, 0x01, 0x30], LoadStatusWord(0x5678)),
        (Bits64, &[0x0f, 0x01, 0x3b], InvalidatePage(0x2000)),
        (Bits64, &[0x0f, 0x01, 0x3c, 0x73], InvalidatePage(0x2020)),
        (Bits64, &[0x0f, 0x01, 0x7b, 0xff], InvalidatePage(0x1fff)),
        (Bits64, &[0x0f, 0x01, 0x3d, 0x10, 0, 0, 0], InvalidatePage(CODE + 7 + 0x10)),
        (
            Bits64,
            &[0x0f, 0x01, 0x3c, 0x25, 0, 0x10, 0, 0x80],
            InvalidatePage(0xffff_ffff_8000_1000),
        ),
        (Bits64, &[0x41, 0x0f, 0x01, 0x7c, 0x24, 0x08], InvalidatePage(kernel + 8)),
        // Address-size prefix, segment bases: the stack's counts outside of 64-bit mode.
        (Bits64, &[0x67, 0x41, 0x0f, 0x01, 0x7c, 0x24, 0x08], InvalidatePage(8)),
        (Bits64, &[0x64, 0x0f, 0x01, 0x3b], InvalidatePage(0x9000)),
        (Bits64, &[0x0f, 0x01, 0x7d, 0], InvalidatePage(0x4000)),
        (Bits32, &[0x0f, 0x01, 0x7d, 0], InvalidatePage(0x4300)),
        (Bits32, &[0x0f, 0x01, 0x3d, 0, 0, 0, 0xc0], InvalidatePage(0xc000_0000)),
        (Bits32, &[0x64, 0x0f, 0x01, 0x3d, 0, 0xf0, 0xff, 0xff], InvalidatePage(0x6000)),
        (Bits32, &[0x67, 0x0f, 0x01, 0x38], InvalidatePage(0x2010)),
        (Bits16, &[0x0f, 0x01, 0x7f, 2], InvalidatePage(0x2002)),
        (Bits16, &[0x67, 0x0f, 0x01, 0x3b], InvalidatePage(0x2000)),
    ];
    for &(mode, code, expected) in cases {
        assert_eq!(decoded(mode, code), Ok(expected), "{code:x?} {mode:?}");
    }
}

#[test]
fn other_instructions_are_refused() {
    for (mode, code) in [
        (CodeSize::Bits64, &[0x0f, 0x01, 0xf8][..]), // swapgs
        (CodeSize::Bits64, &[0xf0, 0x0f, 0x22, 0xd8]),
        (CodeSize::Bits64, &[0xf0, 0x0f, 0x01, 0x3b]),
        (CodeSize::Bits32, &[0xf0, 0x0f, 0x06]),
        (CodeSize::Bits32, &[0x89, 0x03]),
        (CodeSize::Bits32, &[0x0f, 0x21, 0xc0]),
    ] {
        assert!(matches!(decoded(mode, code), Err(Stop::Unknown(_))), "{code:x?}");
    }
    // They access no device of their own.
    for code in [&[0x0f, 0x06][..], &[0x0f, 0x22, 0xc0], &[0x0f, 0x01, 0x33], &[0x0f, 0x01, 0x3b]] {
        let (mut vcpu, memory, mut recorder) = vcpu_at(CodeSize::Bits64, code);
        let done = memory_access(&mut vcpu, &memory, &mut recorder);
        assert!(matches!(done, Err(Stop::Unknown(_))), "{code:x?}");
    }
}

#[test]
fn the_kernel_alone_accesses_control_registers() {
    let protection = Stop::Raise(Event::exception_code(PROTECTION, 0));
    for code in [
        &[0x0f, 0x20, 0xc0][..],
        &[0x0f, 0x22, 0xc0],
        &[0x0f, 0x06],
        &[0x0f, 0x01, 0xf0],
        // The operand is not read: its page fault would come second.
        &[0x0f, 0x01, 0x34, 0x25, 0, 0, 0, 0x80],
        &[0x0f, 0x01, 0x3b],
    ] {
        let (mut vcpu, memory, mut recorder) = vcpu_at(CodeSize::Bits64, code);
        // The code is readable for the user.
        for table in [0x8000, 0x9000] {
            let entry = memory.read::<u64>(table).unwrap();
            memory.write(table, entry | entry::USER).unwrap();
        }
        vcpu.set(Reg::Cpl, 3);
        let done = control(&mut vcpu, &memory, &mut recorder);
        assert_eq!(done, Err(protection), "{code:x?}");
    }
}

#[test]
fn status_words_are_stored() {
    const CR0: u64 = cr0::PE | cr0::ET | cr0::PG | cr0::WP;
    let user = |vcpu: &mut ScriptedVcpu, memory: &GuestMemory| {
        for table in [0x8000, 0x9000] {
            let entry = memory.read::<u64>(table).unwrap();
            memory.write(table, entry | entry::USER).unwrap();
        }
        vcpu.set(Reg::Cpl, 3);
    };
    for (code, expected) in [
        (&[0x0f, 0x01, 0xe0][..], CR0),
        (&[0x48, 0x0f, 0x01, 0xe0], CR0),
        (&[0x66, 0x0f, 0x01, 0xe0], STATUS & !0xffff | CR0 & 0xffff),
    ] {
        for umip in [0, cr4::UMIP] {
            let (mut vcpu, memory, mut recorder) = vcpu_at(CodeSize::Bits64, code);
            user(&mut vcpu, &memory);
            let cr4 = vcpu.get(Reg::Cr4);
            vcpu.set(Reg::Cr4, cr4 | umip);
            let done = control(&mut vcpu, &memory, &mut recorder);
            if umip != 0 {
                assert_eq!(done, Err(Stop::Raise(Event::exception_code(PROTECTION, 0))));
                continue;
            }
            let next = Done::Next(CODE + code.len() as u64);
            assert_eq!(done, Ok(Control::Completed(next)), "{code:x?}");
            assert_eq!(vcpu.gpr(Gpr::Rax), expected, "{code:x?}");
        }
    }
    let (mut vcpu, memory, mut recorder) = vcpu_at(CodeSize::Bits64, &[0x0f, 0x01, 0x23]);
    control(&mut vcpu, &memory, &mut recorder).unwrap();
    assert_eq!(memory.read::<u32>(0x2000), Ok(CR0 as u32 & 0xffff));
}

#[test]
fn an_operand_in_a_missing_page_faults() {
    // lmsw [0x1_0000_0000_0000 - 8 GiB ...]: an address without tables.
    let (mut vcpu, memory, mut recorder) = vcpu_at(CodeSize::Bits64, &[0x0f, 0x01, 0x33]);
    vcpu.set_gpr(Gpr::Rbx, 0x80_0000_0000);
    let done = control(&mut vcpu, &memory, &mut recorder);
    assert_eq!(done, Err(Stop::Raise(Event::exception_code(14, 0))));
    assert_eq!(vcpu.get(Reg::Cr2), 0x80_0000_0000);
}
