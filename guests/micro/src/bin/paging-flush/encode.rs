//! All encodings of `INVLPG` in 64-bit mode, with registers that make each name one address (APM
//! vol. 3, §1.2 to §1.4 and `INVLPG`).

use core::arch::asm;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

const STACK_POINTER: usize = 4;
const REGISTERS: usize = 16;
/// In ModRM: an SIB byte follows. In SIB: no index.
const SIB: u8 = 4;
/// With mod 0: a displacement of 32 bits and no base; without SIB relative to RIP.
const NO_BASE: u8 = 5;
const INDEX_VALUE: u64 = 0x121;
const DISPLACEMENTS: [i64; 3] = [0, -0x58, -0x1234_5678];
/// Upper halves of registers where addresses have 32 bits.
const UPPER: u64 = 0xdead_beef << 32;
/// Bits of REX.
const REX_X: u8 = 1 << 1;
const REX_B: u8 = 1 << 0;

/// Prefixes before REX.
#[derive(Clone, Copy, Debug)]
pub struct Prefixes {
    /// The bytes, 0 where there is none.
    pub bytes: [u8; 2],
    /// Base of the segment that they select.
    pub base: u64,
}

impl Prefixes {
    /// No prefix.
    pub const NONE: Self = Self { bytes: [0; 2], base: 0 };
    const ADDRESS_SIZE: u8 = 0x67;

    fn is_narrow(self) -> bool {
        self.bytes.contains(&Self::ADDRESS_SIZE)
    }
}

/// Form of the operand.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// REX, 0 if there is none.
    pub rex: u8,
    /// Field mod of ModRM, 0 to 2.
    pub mode: u8,
    /// Field r/m of ModRM.
    pub rm: u8,
    /// SIB, where r/m asks for one.
    pub sib: u8,
}

impl Form {
    /// All forms with this REX, and every `step`th SIB.
    pub fn all(rex: u8, step: usize) -> impl Iterator<Item = Self> {
        (0..3).flat_map(move |mode| {
            (0..8).flat_map(move |rm| {
                let count = if rm == SIB { 256 } else { 1 };
                (0..count).step_by(step).map(move |sib| Self { rex, mode, rm, sib: sib as u8 })
            })
        })
    }

    /// Registers of base and index, and the scale.
    fn parts(self) -> (Option<usize>, Option<usize>, u8) {
        let high = |bit: u8| if self.rex & bit != 0 { 8 } else { 0 };
        if self.rm != SIB {
            let base = (self.mode, self.rm) != (0, NO_BASE);
            return (base.then_some(usize::from(self.rm) | high(REX_B)), None, 0);
        }
        let (base, index) = (self.sib & 7, usize::from(self.sib >> 3 & 7) | high(REX_X));
        let has_base = (self.mode, base) != (0, NO_BASE);
        let has_index = index != usize::from(SIB);
        (
            has_base.then_some(usize::from(base) | high(REX_B)),
            has_index.then_some(index),
            self.sib >> 6,
        )
    }

    fn is_rip_relative(self) -> bool {
        self.mode == 0 && self.rm == NO_BASE
    }
}

/// An instruction and the registers that it needs.
struct Program {
    registers: [u64; REGISTERS],
    bytes: [u8; 24],
    length: usize,
}

impl Program {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes[self.length..][..bytes.len()].copy_from_slice(bytes);
        self.length += bytes.len();
    }
}

/// State that the code below loads: registers, the address of the instruction, and that to return
/// to; behind them it saves the stack pointer.
struct State(UnsafeCell<[u64; REGISTERS + 3]>);
// SAFETY: used by the first processor only.
unsafe impl Sync for State {}
static STATE: State = State(UnsafeCell::new([0; REGISTERS + 3]));
const RETURN: usize = REGISTERS + 1;

/// Encodes `INVLPG` of this form at `code`, so that it names `target` or an address a few bytes
/// below. `None`: a displacement does not reach it.
fn encode(form: Form, prefixes: Prefixes, target: u64, code: u64) -> Option<Program> {
    let mut program = Program { registers: [0x5555; REGISTERS], bytes: [0; 24], length: 0 };
    prefixes.bytes.iter().filter(|&&byte| byte != 0).for_each(|&byte| program.push(&[byte]));
    if form.rex != 0 {
        program.push(&[form.rex]);
    }
    program.push(&[0x0f, 0x01, form.mode << 6 | 7 << 3 | form.rm]);
    if form.rm == SIB {
        program.push(&[form.sib]);
    }
    let target = target.wrapping_sub(prefixes.base);
    let (base, index, scale) = form.parts();
    let mut displacement = DISPLACEMENTS[usize::from(form.mode)];
    let registers = &mut program.registers;
    // The upper halves of narrow addresses do not count.
    let upper = if prefixes.is_narrow() { UPPER } else { 0 };
    let rest = target.wrapping_sub_signed(displacement);
    match (base, index) {
        (Some(base), Some(index)) if base == index => {
            registers[base] = (rest / (1 + (1 << scale))) | upper;
        }
        (Some(base), index) => {
            let index = index.inspect(|&index| registers[index] = INDEX_VALUE | upper);
            let part = if index.is_some() { INDEX_VALUE << scale } else { 0 };
            registers[base] = rest.wrapping_sub(part) | upper;
        }
        (None, index) => {
            let index = index.inspect(|&index| registers[index] = INDEX_VALUE | upper);
            let part = if index.is_some() { INDEX_VALUE << scale } else { 0 };
            let end = code + program.length as u64 + 4;
            let from = if form.is_rip_relative() { end } else { part };
            displacement = target.wrapping_sub(from) as i64;
        }
    }
    if form.mode == 1 {
        program.push(&(displacement as i8).to_le_bytes());
    } else if form.mode == 2 || base.is_none() {
        program.push(&i32::try_from(displacement).ok()?.to_le_bytes());
    }
    // JMP to an address that is in memory at an absolute address.
    let place = STATE.0.get().addr() + RETURN * 8;
    program.push(&[0xff, 0x24, 0x25]);
    program.push(&u32::try_from(place).ok()?.to_le_bytes());
    Some(program)
}

/// Executes `INVLPG` of this form in the page `words` at `code`, and returns true if it can name
/// the target.
pub fn execute(
    form: Form,
    prefixes: Prefixes,
    target: u64,
    code: u64,
    words: &[AtomicU64],
) -> bool {
    let Some(mut program) = encode(form, prefixes, target, code) else { return false };
    let (base, index, _) = form.parts();
    let stack = if [base, index].contains(&Some(STACK_POINTER)) {
        program.registers[STACK_POINTER]
    } else {
        // Exceptions that must not come have a stack, unless the operand needs the register.
        super::cpu::stack_pointer() - 0x1000
    };
    program.registers[STACK_POINTER] = stack;
    for (word, bytes) in words.iter().zip(program.bytes.as_chunks::<8>().0) {
        word.store(u64::from_le_bytes(*bytes), SeqCst);
    }
    // SAFETY: the instruction changes no register and no memory, and continues at label 2. Nothing
    // needs the stack, because interrupts are off. The stack below has not grown by a page.
    unsafe {
        let state = &mut *STATE.0.get();
        state[..REGISTERS].copy_from_slice(&program.registers);
        state[REGISTERS] = code;
        asm!(
            "push rbx", "push rbp",
            "lea rax, [rip + 2f]", "mov [rip + {state} + 136], rax",
            "mov [rip + {state} + 144], rsp",
            "mov rax, [rip + {state}]", "mov rcx, [rip + {state} + 8]",
            "mov rdx, [rip + {state} + 16]", "mov rbx, [rip + {state} + 24]",
            "mov rsp, [rip + {state} + 32]", "mov rbp, [rip + {state} + 40]",
            "mov rsi, [rip + {state} + 48]", "mov rdi, [rip + {state} + 56]",
            "mov r8, [rip + {state} + 64]", "mov r9, [rip + {state} + 72]",
            "mov r10, [rip + {state} + 80]", "mov r11, [rip + {state} + 88]",
            "mov r12, [rip + {state} + 96]", "mov r13, [rip + {state} + 104]",
            "mov r14, [rip + {state} + 112]", "mov r15, [rip + {state} + 120]",
            "jmp [rip + {state} + 128]",
            "2:", "mov rsp, [rip + {state} + 144]", "pop rbp", "pop rbx",
            state = sym STATE,
            out("rax") _, out("rcx") _, out("rdx") _, out("rsi") _, out("rdi") _, out("r8") _,
            out("r9") _, out("r10") _, out("r11") _, out("r12") _, out("r13") _, out("r14") _,
            out("r15") _,
        );
    }
    true
}
