use super::*;
use proptest::prelude::*;
use yaxpeax_arch::LengthedInstruction;
use yaxpeax_x86::{long_mode, protected_mode, real_mode};

/// Result of another decoder: length, name, bytes of the memory operand if it exists.
struct Oracle {
    length: u64,
    name: String,
    memory: Option<u8>,
}

macro_rules! oracle {
    ($module:ident, $bytes:expr) => {
        $module::InstDecoder::default().decode_slice($bytes).ok().map(|found| Oracle {
            length: found.len().to_const().into(),
            name: found.opcode().to_string(),
            memory: (0..found.operand_count())
                .any(|i| found.operand(i).is_memory())
                .then(|| found.mem_size().and_then(|size| size.bytes_size()).unwrap_or(0)),
        })
    };
}

fn oracle(bytes: &[u8], mode: CodeSize) -> Option<Oracle> {
    match mode {
        CodeSize::Bits64 => oracle!(long_mode, bytes),
        CodeSize::Bits32 => oracle!(protected_mode, bytes),
        CodeSize::Bits16 => oracle!(real_mode, bytes),
    }
}

fn name(op: Op) -> &'static [&'static str] {
    match op {
        Op::Mov => &["mov", "movnti"],
        Op::MovZx => &["movzx"],
        Op::MovSx => &["movsx", "movsxd"],
        Op::MovBe => &["movbe"],
        Op::Alu(Alu::Add) => &["add"],
        Op::Alu(Alu::Or) => &["or"],
        Op::Alu(Alu::Adc) => &["adc"],
        Op::Alu(Alu::Sbb) => &["sbb"],
        Op::Alu(Alu::And) => &["and"],
        Op::Alu(Alu::Sub) => &["sub"],
        Op::Alu(Alu::Xor) => &["xor"],
        Op::Alu(Alu::Cmp) => &["cmp"],
        Op::Test => &["test"],
        Op::MoveIf(condition) => match condition >> 1 {
            0 => &["cmovo", "cmovno"],
            1 => &["cmovb", "cmovnb", "cmovae"],
            2 => &["cmovz", "cmovnz"],
            3 => &["cmovna", "cmova", "cmovbe"],
            4 => &["cmovs", "cmovns"],
            5 => &["cmovp", "cmovnp"],
            6 => &["cmovl", "cmovge"],
            _ => &["cmovle", "cmovg"],
        },
        Op::SetIf(condition) => match condition >> 1 {
            0 => &["seto", "setno"],
            1 => &["setb", "setae"],
            2 => &["setz", "setnz"],
            3 => &["setbe", "seta"],
            4 => &["sets", "setns"],
            5 => &["setp", "setnp"],
            6 => &["setl", "setge"],
            _ => &["setle", "setg"],
        },
        Op::Shift(Shift::RotateLeft) => &["rol"],
        Op::Shift(Shift::RotateRight) => &["ror"],
        Op::Shift(Shift::RotateCarryLeft) => &["rcl"],
        Op::Shift(Shift::RotateCarryRight) => &["rcr"],
        Op::Shift(Shift::Left) => &["shl", "sal"],
        Op::Shift(Shift::Right) => &["shr"],
        Op::Shift(Shift::SignedRight) => &["sar"],
        Op::Xchg => &["xchg"],
        Op::Xadd => &["xadd"],
        Op::Cmpxchg => &["cmpxchg"],
        Op::Inc => &["inc"],
        Op::Dec => &["dec"],
        Op::Not => &["not"],
        Op::Neg => &["neg"],
        Op::Bit(BitOp::Test) => &["bt"],
        Op::Bit(BitOp::Set) => &["bts"],
        Op::Bit(BitOp::Reset) => &["btr"],
        Op::Bit(BitOp::Complement) => &["btc"],
        Op::Movs => &["movs"],
        Op::Stos => &["stos"],
        Op::Lods => &["lods"],
        Op::Ins => &["ins"],
        Op::Outs => &["outs"],
        Op::Cmps => &["cmps"],
        Op::Scas => &["scas"],
        Op::Bsf => &["bsf"],
        Op::Bsr => &["bsr"],
        Op::Tzcnt => &["tzcnt"],
        Op::Lzcnt => &["lzcnt"],
        Op::Imul | Op::Multiply { signed: true } => &["imul"],
        Op::Multiply { signed: false } => &["mul"],
        Op::Divide { signed: true } => &["idiv"],
        Op::Divide { signed: false } => &["div"],
        Op::Shld => &["shld"],
        Op::Shrd => &["shrd"],
        Op::Smsw => &["smsw"],
        Op::MoveControl => &["mov"],
        Op::Lmsw => &["lmsw"],
        Op::Clts => &["clts"],
        Op::Invlpg => &["invlpg"],
        Op::Ltr => &["ltr"],
        Op::Push => &["push"],
        Op::Pop => &["pop"],
        Op::Call | Op::CallRelative => &["call"],
        Op::Jump => &["jmp"],
        Op::Return => &["ret", "return"],
        Op::Enter => &["enter"],
        Op::Leave => &["leave"],
        Op::VectorMove { is_aligned: false } => &["movdqu", "movups", "movupd"],
        Op::VectorMove { is_aligned: true } => {
            &["movdqa", "movaps", "movapd", "movntps", "movntpd", "movntdq"]
        }
    }
}

fn modes() -> impl Strategy<Value = CodeSize> {
    prop_oneof![Just(CodeSize::Bits16), Just(CodeSize::Bits32), Just(CodeSize::Bits64)]
}

fn prefix() -> impl Strategy<Value = u8> {
    prop_oneof![
        Just(0x66),
        Just(0x67),
        Just(0x64),
        Just(0x26),
        Just(0x36),
        Just(0xf3),
        0x40_u8..0x50,
    ]
}

/// Bytes that often begin a supported instruction.
fn likely() -> impl Strategy<Value = Vec<u8>> {
    let opcode = prop_oneof![
        any::<u8>().prop_map(|byte| vec![byte]),
        any::<u8>().prop_map(|byte| vec![0x0f, byte]),
        (0xf0_u8..0xf2).prop_map(|byte| vec![0x0f, 0x38, byte]),
    ];
    (proptest::collection::vec(prefix(), 0..3), opcode, any::<[u8; 12]>()).prop_map(
        |(prefixes, opcode, rest)| {
            let mut bytes = prefixes;
            bytes.extend(opcode);
            bytes.extend(rest);
            bytes.truncate(15);
            bytes
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Supported instructions have the same meaning in another decoder.
    #[test]
    fn agrees_with_another_decoder(bytes in likely(), mode in modes()) {
        let Ok(found) = decode(&bytes, mode) else { return Ok(()) };
        let Some(other) = oracle(&bytes, mode) else {
            // It refuses ModRM mode bits, which the processor ignores, and missing registers.
            if found.op == Op::MoveControl {
                return Ok(());
            }
            return Err(TestCaseError::fail(format!("only we decode {bytes:02x?} {mode:?}: {found:?}")));
        };
        let what = format!("{bytes:02x?} {mode:?}: {found:?} {}", other.name);
        prop_assert_eq!(u64::from(found.length), other.length, "{}", what);
        prop_assert!(name(found.op).contains(&other.name.as_str()), "{}", what);
        let is_memory = |operand| matches!(operand, Operand::Memory(_));
        let string = found.op.is_string();
        // For a bit test with a constant the other decoder reports 8 bytes in 64-bit code,
        // whatever the prefixes.
        let sized = !matches!((found.op, found.second), (Op::Bit(_), Operand::Immediate(_)));
        if !string && sized {
            let size = if is_memory(found.second) { found.source_size } else { found.size };
            let memory =
                (is_memory(found.first) || is_memory(found.second)).then_some(size);
            prop_assert_eq!(memory, other.memory, "{}", what);
        }
    }

    /// No input panics, and the beginning of an instruction is truncated, not another
    /// instruction.
    #[test]
    fn shorter_is_truncated(bytes in likely(), mode in modes()) {
        if let Ok(found) = decode(&bytes, mode) {
            for length in 0..usize::from(found.length) {
                prop_assert_eq!(decode(&bytes[..length], mode), Err(DecodeError::Truncated));
            }
        }
    }
}

#[test]
fn operands() {
    let memory = |bytes: &[u8], mode| {
        let found = decode(bytes, mode).unwrap();
        match (found.first, found.second) {
            (Operand::Memory(address), _) | (_, Operand::Memory(address)) => address,
            _ => panic!("no memory operand in {found:?}"),
        }
    };
    // mov eax, [r12+rcx*4-8]
    let found = memory(&[0x41, 0x8b, 0x44, 0x8c, 0xf8], CodeSize::Bits64);
    let expected = Address {
        segment: Seg::Ds,
        base: Base::Register(Gpr::R12),
        index: Some((Gpr::Rcx, 2)),
        displacement: (-8_i64) as u64,
    };
    assert_eq!(found, expected);
    // mov [rip+0x100], eax
    let found = memory(&[0x89, 0x05, 0, 1, 0, 0], CodeSize::Bits64);
    assert_eq!((found.base, found.displacement), (Base::Next, 0x100));
    // mov [0x100], eax
    let found = memory(&[0x89, 0x05, 0, 1, 0, 0], CodeSize::Bits32);
    assert_eq!((found.base, found.displacement), (Base::None, 0x100));
    // mov [rsp], eax; mov eax, gs:[0]
    let found = memory(&[0x89, 0x04, 0x24], CodeSize::Bits64);
    assert_eq!((found.segment, found.base), (Seg::Ss, Base::Register(Gpr::Rsp)));
    let found = memory(&[0x65, 0xa1, 0, 0, 0, 0, 0, 0, 0, 0], CodeSize::Bits64);
    assert_eq!((found.segment, found.base), (Seg::Gs, Base::None));
    // mov al, [bp+di+2]
    let found = memory(&[0x8a, 0x43, 2], CodeSize::Bits16);
    assert_eq!((found.segment, found.index), (Seg::Ss, Some((Gpr::Rdi, 0))));
}
