//! Emulation of instructions that access device memory, and of string port accesses.
//!
//! The CPU reports such an access before it happens, without the instruction. The emulator fetches
//! it through the guest's page tables, decodes it, and executes it as the CPU would: operands are
//! translated with the guest's rights, accessed and dirty bits are set, a failing translation
//! raises the guest's own page fault with nothing changed. An operand may be in memory or in a
//! device, or cross from one page to another.
//!
//! Repeated string instructions execute at most [`MOST_REPEATS`] iterations, one in single-step
//! mode; the rest follows when the guest executes the instruction again, which is where a CPU would
//! take interrupts too.
//!
//! Missing: segment limits and rights (relevant to 32-bit code only), protection keys, alignment
//! checks, atomicity of a locked access that crosses from memory to a device, data breakpoints, and
//! all vector instructions except moves of complete SSE registers.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod alu;
pub mod decode;
pub mod shift;
mod stack;
mod system;
mod vector;

use hw_walk::{Intent, Translation};
use hw_x86::msr::efer;
use vmm_mem::GuestMemory;
use vmm_x86::msr::is_canonical;
use vmm_x86::walk::{CodeSize, CodeView, GuestTables, raise};
use vmm_x86::{Event, Gpr, IoExit, Reg, Seg, X86Vcpu};

use crate::decode::{
    Address, Base, BitOp, DecodeError, Instruction, Op, Operand, Repeat, ones, sign_extend,
};

/// Maximum iterations of a repeated string instruction at a time.
pub const MOST_REPEATS: u32 = 256;
/// Vectors of exceptions.
const DIVIDE: u8 = 0;
const NOT_PRESENT: u8 = 11;
const STACK_FAULT: u8 = 12;
const PROTECTION: u8 = 13;
/// `RFLAGS.TF`.
const RFLAGS_TF: u64 = 1 << 8;

/// Devices at addresses without memory.
pub trait Devices {
    /// Reads 1 to 8 bytes at a guest-physical address.
    fn read(&mut self, address: u64, size: u8) -> u64;
    /// Writes 1 to 8 bytes.
    fn write(&mut self, address: u64, size: u8, value: u64);
    /// Reads a port (`IN`).
    fn port_in(&mut self, port: u16, size: u8) -> u32;
    /// Writes a port (`OUT`).
    fn port_out(&mut self, port: u16, size: u8, value: u32);
}

/// Result of executing an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Done {
    /// Completed: the guest continues at this address.
    Next(u64),
    /// A repeated string instruction, executed in part: the guest continues at the same address.
    Again,
}

/// Reason for not executing an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// The instruction raises this exception.
    Raise(Event),
    /// The instruction is not supported: its first bytes, little-endian.
    Unknown(u64),
}

/// Emulates the current instruction, which accessed an address without memory.
///
/// # Errors
/// See [`Stop`].
pub fn memory_access<V: X86Vcpu>(
    vcpu: &mut V,
    memory: &GuestMemory,
    devices: &mut impl Devices,
) -> Result<Done, Stop> {
    let code = CodeView::of(vcpu);
    let (instruction, bytes) = fetch(vcpu, memory, &code)?;
    if matches!(instruction.op, Op::Ins | Op::Outs) {
        // INS and OUTS with a device as memory operand take the port exit, which comes first.
        return Err(Stop::Unknown(bytes));
    }
    if matches!(instruction.op, Op::VectorMove { .. }) && vcpu.vector(0).is_none() {
        return Err(Stop::Unknown(bytes));
    }
    Emulator { vcpu, memory, devices, code, instruction }.execute()
}

/// Emulates the current instruction, an `INS` or `OUTS` with the exit `io`.
///
/// # Errors
/// See [`Stop`].
pub fn string_io<V: X86Vcpu>(
    vcpu: &mut V,
    memory: &GuestMemory,
    devices: &mut impl Devices,
    io: IoExit,
) -> Result<Done, Stop> {
    let code = CodeView::of(vcpu);
    let (instruction, bytes) = fetch(vcpu, memory, &code)?;
    let expected = if io.write { Op::Outs } else { Op::Ins };
    // The exit's permission check was for this port and size only.
    if instruction.op != expected || instruction.size != io.size {
        return Err(Stop::Unknown(bytes));
    }
    Emulator { vcpu, memory, devices, code, instruction }.execute()
}

/// Fetches and decodes the instruction; also returns the first bytes for reports.
fn fetch<V: X86Vcpu>(
    vcpu: &mut V,
    memory: &GuestMemory,
    code: &CodeView,
) -> Result<(Instruction, u64), Stop> {
    let mut bytes = [0; 15];
    let (given, count) = vcpu.instruction_bytes();
    let mut count = count.min(15);
    bytes[..count].copy_from_slice(&given[..count]);
    let mut decoded = decode::decode(&bytes[..count], code.size);
    if decoded == Err(DecodeError::Truncated) {
        count = match code.fetch(memory, &mut bytes) {
            Ok((count, _)) => count,
            Err(fault) => return Err(Stop::Raise(raise(fault, vcpu))),
        };
        decoded = decode::decode(&bytes[..count], code.size);
    }
    let mut first = [0; 8];
    first.copy_from_slice(&bytes[..8]);
    let first = u64::from_le_bytes(first);
    match decoded {
        Ok(instruction) => Ok((instruction, first)),
        Err(DecodeError::Unknown) => Err(Stop::Unknown(first)),
        Err(DecodeError::Truncated) => {
            // The instruction continues in a page that is not mapped.
            let next = code.linear.wrapping_add(count as u64);
            match code.paging.translate(&GuestTables(memory), next, Intent::Fetch, false) {
                Err(fault) => Err(Stop::Raise(raise(fault, vcpu))),
                Ok(_) => Err(Stop::Unknown(first)),
            }
        }
    }
}

/// Location of an operand of up to 8 bytes: in one piece, or in two pages.
#[derive(Clone, Copy)]
struct Span {
    first: u64,
    first_size: u8,
    second: u64,
    size: u8,
}

struct Emulator<'a, V, D> {
    vcpu: &'a mut V,
    memory: &'a GuestMemory,
    devices: &'a mut D,
    code: CodeView,
    instruction: Instruction,
}

impl<V: X86Vcpu, D: Devices> Emulator<'_, V, D> {
    fn execute(&mut self) -> Result<Done, Stop> {
        let rip = self.vcpu.get(Reg::Rip);
        let Instruction { op, length, .. } = self.instruction;
        let next = self.code.advance(rip, length.into());
        if op.is_string() {
            return Ok(if self.string()? { Done::Next(next) } else { Done::Again });
        }
        match op {
            Op::Push | Op::Pop | Op::Enter | Op::Leave => self.stack(op)?,
            Op::Call | Op::CallRelative | Op::Jump | Op::Return => {
                return self.branch(op, next).map(Done::Next);
            }
            Op::Ltr => self.load_task_register()?,
            Op::VectorMove { is_aligned } => self.vector_move(is_aligned)?,
            _ => self.single()?,
        }
        Ok(Done::Next(next))
    }

    /// Executes an instruction that is neither a string nor a control-transfer instruction.
    fn single(&mut self) -> Result<(), Stop> {
        let Instruction { op, size, source_size, first, second, .. } = self.instruction;
        let rflags = self.vcpu.get(Reg::Rflags);
        // Both operands are resolved before the first access, since a device must not see an
        // instruction that faults.
        let writes = !matches!(op, Op::Test | Op::Alu(decode::Alu::Cmp) | Op::Bit(BitOp::Test));
        let to = self.resolve(first, size, writes, second)?;
        let from = self.resolve(second, source_size, op == Op::Xchg || op == Op::Xadd, first)?;
        match op {
            Op::Mov | Op::MovZx => {
                let value = self.load(from, source_size);
                self.store(to, size, value);
            }
            Op::MovSx => {
                let value = self.load(from, source_size);
                self.store(to, size, sign_extend(value, source_size));
            }
            Op::MoveIf(condition) => {
                // In any case the operand is read and the upper half cleared.
                let value = self.load(from, size);
                let is_moved = alu::holds(condition, rflags);
                let value = if is_moved { value } else { self.load(to, size) };
                self.store(to, size, value);
            }
            Op::SetIf(condition) => self.store(to, 1, alu::holds(condition, rflags).into()),
            Op::Shift(kind) => {
                let value = self.load(to, size);
                let count = self.load(from, 1);
                if let Some((result, flags)) = shift::shift(kind, value, count, size, rflags) {
                    self.store(to, size, result);
                    self.vcpu.set(Reg::Rflags, flags);
                }
            }
            Op::MovBe => {
                let value = self.load(from, size);
                self.store(to, size, value.swap_bytes() >> (64 - 8 * u32::from(size)));
            }
            Op::Alu(alu) => {
                let (a, b) = (self.load(to, size), self.load(from, size));
                let (result, flags) = alu::alu(alu, a, b, size, rflags);
                if writes {
                    self.store(to, size, result);
                }
                self.vcpu.set(Reg::Rflags, flags);
            }
            Op::Test => {
                let (a, b) = (self.load(to, size), self.load(from, size));
                let (_, flags) = alu::alu(decode::Alu::And, a, b, size, rflags);
                self.vcpu.set(Reg::Rflags, flags);
            }
            Op::Xchg => {
                let (a, b) = (self.load(to, size), self.load(from, size));
                self.store(to, size, b);
                self.store(from, size, a);
            }
            Op::Xadd => {
                let (a, b) = (self.load(to, size), self.load(from, size));
                let (sum, flags) = alu::alu(decode::Alu::Add, a, b, size, rflags);
                self.store(from, size, a);
                self.store(to, size, sum);
                self.vcpu.set(Reg::Rflags, flags);
            }
            Op::Cmpxchg => {
                let accumulator = Place::Register { register: Gpr::Rax, high: false };
                let (old, expected) = (self.load(to, size), self.load(accumulator, size));
                let (_, flags) = alu::alu(decode::Alu::Cmp, expected, old, size, rflags);
                if flags & alu::ZF != 0 {
                    let new = self.load(from, size);
                    self.store(to, size, new);
                } else {
                    // The CPU writes the old value back in this case.
                    self.store(to, size, old);
                    self.store(accumulator, size, old);
                }
                self.vcpu.set(Reg::Rflags, flags);
            }
            Op::Inc | Op::Dec => {
                let value = self.load(to, size);
                let (result, flags) = alu::step(op == Op::Inc, value, size, rflags);
                self.store(to, size, result);
                self.vcpu.set(Reg::Rflags, flags);
            }
            Op::Not => {
                let value = self.load(to, size);
                self.store(to, size, !value);
            }
            Op::Neg => {
                let value = self.load(to, size);
                let (result, flags) = alu::alu(decode::Alu::Sub, 0, value, size, rflags);
                self.store(to, size, result);
                self.vcpu.set(Reg::Rflags, flags);
            }
            Op::Bit(bit) => {
                let (value, index) = (self.load(to, size), self.load(from, size));
                let (result, flags) =
                    alu::bit(bit, value, index & (8 * u64::from(size) - 1), rflags);
                if writes {
                    self.store(to, size, result);
                }
                self.vcpu.set(Reg::Rflags, flags);
            }
            Op::Bsf | Op::Bsr => {
                let value = self.load(from, size);
                let (bit, flags) = alu::scan(op == Op::Bsr, value, size, rflags);
                // Without a set bit the register is kept, its upper half too (APM vol. 3, BSF).
                if let Some(bit) = bit {
                    self.store(to, size, bit);
                }
                self.vcpu.set(Reg::Rflags, flags);
            }
            Op::Tzcnt | Op::Lzcnt => {
                let value = self.load(from, size);
                let (count, flags) = alu::count_zeros(op == Op::Lzcnt, value, size, rflags);
                self.store(to, size, count);
                self.vcpu.set(Reg::Rflags, flags);
            }
            Op::Imul => {
                let other = match self.instruction.third {
                    Operand::Immediate(value) => value,
                    _ => self.load(to, size),
                };
                let value = self.load(from, size);
                let ((product, _), flags) = alu::multiply(true, value, other, size, rflags);
                self.store(to, size, product);
                self.vcpu.set(Reg::Rflags, flags);
            }
            Op::Multiply { signed } => {
                let accumulator = Place::Register { register: Gpr::Rax, high: false };
                let (a, b) = (self.load(accumulator, size), self.load(from, size));
                let ((low, high), flags) = alu::multiply(signed, a, b, size, rflags);
                let upper = upper_half(size);
                self.store(accumulator, size, low);
                self.store(upper, size, high);
                self.vcpu.set(Reg::Rflags, flags);
            }
            Op::Divide { signed } => {
                let accumulator = Place::Register { register: Gpr::Rax, high: false };
                let upper = upper_half(size);
                let (high, low) = (self.load(upper, size), self.load(accumulator, size));
                let divisor = self.load(from, size);
                let (quotient, remainder) = alu::divide(signed, high, low, divisor, size)
                    .ok_or(Stop::Raise(Event::exception(DIVIDE)))?;
                self.store(accumulator, size, quotient);
                self.store(upper, size, remainder);
            }
            Op::Shld | Op::Shrd => {
                let count = match self.instruction.third {
                    Operand::Immediate(count) => count,
                    _ => self.vcpu.gpr(Gpr::Rcx),
                };
                let (a, b) = (self.load(to, size), self.load(from, size));
                let back = op == Op::Shrd;
                if let Some((result, flags)) = alu::double_shift(back, a, b, count, size, rflags) {
                    self.store(to, size, result);
                    self.vcpu.set(Reg::Rflags, flags);
                } else if size == 4 && matches!(to, Place::Register { .. }) {
                    // The upper half is cleared nevertheless.
                    self.store(to, size, a);
                }
            }
            Op::Smsw => {
                let value = self.vcpu.get(Reg::Cr0);
                self.store(to, size, value);
            }
            // Handled elsewhere.
            _ => {}
        }
        Ok(())
    }

    /// Executes a string instruction; returns true if it is finished.
    fn string(&mut self) -> Result<bool, Stop> {
        let Instruction { op, size, segment, address_size, repeat, .. } = self.instruction;
        let mask = ones(address_size);
        let backwards = self.vcpu.get(Reg::Rflags) & alu::DF != 0;
        let step = if backwards { u64::from(size).wrapping_neg() } else { size.into() };
        let port = self.vcpu.gpr(Gpr::Rdx) as u16;
        let accumulator = Place::Register { register: Gpr::Rax, high: false };
        // Each iteration is a single step.
        let steps = self.vcpu.get(Reg::Rflags) & RFLAGS_TF != 0;
        let most = if steps { 1 } else { MOST_REPEATS };
        let mut round = 0;
        loop {
            if repeat != Repeat::No && self.vcpu.gpr(Gpr::Rcx) & mask == 0 {
                return Ok(true);
            }
            if round == most {
                return Ok(false);
            }
            round += 1;
            let source = self.vcpu.gpr(Gpr::Rsi) & mask;
            let target = self.vcpu.gpr(Gpr::Rdi) & mask;
            match op {
                Op::Movs => {
                    let from = self.span(segment, source, size, Intent::Read)?;
                    let to = self.span(Seg::Es, target, size, Intent::Write)?;
                    let value = self.read(from);
                    self.write(to, value);
                }
                Op::Stos => {
                    let to = self.span(Seg::Es, target, size, Intent::Write)?;
                    let value = self.load(accumulator, size);
                    self.write(to, value);
                }
                Op::Lods => {
                    let from = self.span(segment, source, size, Intent::Read)?;
                    let value = self.read(from);
                    self.store(accumulator, size, value);
                }
                Op::Cmps => {
                    let from = self.span(segment, source, size, Intent::Read)?;
                    let to = self.span(Seg::Es, target, size, Intent::Read)?;
                    let (a, b) = (self.read(from), self.read(to));
                    self.compare(a, b, size);
                }
                Op::Scas => {
                    let to = self.span(Seg::Es, target, size, Intent::Read)?;
                    let (a, b) = (self.load(accumulator, size), self.read(to));
                    self.compare(a, b, size);
                }
                Op::Ins => {
                    let to = self.span(Seg::Es, target, size, Intent::Write)?;
                    let value = self.devices.port_in(port, size);
                    self.write(to, value.into());
                }
                _ => {
                    let from = self.span(segment, source, size, Intent::Read)?;
                    let value = self.read(from) as u32;
                    self.devices.port_out(port, size, value);
                }
            }
            if matches!(op, Op::Movs | Op::Lods | Op::Outs | Op::Cmps) {
                self.count(Gpr::Rsi, step, mask);
            }
            if matches!(op, Op::Movs | Op::Stos | Op::Ins | Op::Cmps | Op::Scas) {
                self.count(Gpr::Rdi, step, mask);
            }
            if repeat == Repeat::No {
                return Ok(true);
            }
            self.count(Gpr::Rcx, u64::MAX, mask);
            let equal = self.vcpu.get(Reg::Rflags) & alu::ZF != 0;
            if repeat == Repeat::WhileEqual && !equal || repeat == Repeat::WhileDifferent && equal {
                return Ok(true);
            }
        }
    }

    /// Sets the flags of `CMP`.
    fn compare(&mut self, first: u64, second: u64, size: u8) {
        let rflags = self.vcpu.get(Reg::Rflags);
        let (_, flags) = alu::alu(decode::Alu::Cmp, first, second, size, rflags);
        self.vcpu.set(Reg::Rflags, flags);
    }

    /// Adds to a counting register of the address size.
    fn count(&mut self, register: Gpr, step: u64, mask: u64) {
        let old = self.vcpu.gpr(register);
        let new = old.wrapping_add(step) & mask;
        // 32-bit results clear the upper half, 16-bit results keep the other bits.
        let kept = if mask == 0xffff { old & !mask } else { 0 };
        self.vcpu.set_gpr(register, kept | new);
    }

    /// Resolves an operand. `other` is the other operand: a bit index may select a word beyond it.
    fn resolve(
        &mut self,
        operand: Operand,
        size: u8,
        write: bool,
        other: Operand,
    ) -> Result<Place, Stop> {
        Ok(match operand {
            Operand::None | Operand::Vector(_) => Place::Constant(0),
            Operand::Immediate(value) => Place::Constant(value),
            Operand::Register { register, high } => Place::Register { register, high },
            Operand::Memory(address) => {
                let mut offset = self.effective(address);
                if let (Op::Bit(_), Operand::Register { register, .. }) =
                    (self.instruction.op, other)
                {
                    let bit = sign_extend(self.vcpu.gpr(register), size) as i64;
                    let word = bit >> (8 * u32::from(size)).trailing_zeros();
                    offset = offset.wrapping_add((word as u64).wrapping_mul(size.into()))
                        & ones(self.instruction.address_size);
                }
                let intent = if write { Intent::Write } else { Intent::Read };
                Place::Memory(self.span(address.segment, offset, size, intent)?)
            }
        })
    }

    /// Effective address of a memory operand: the offset in its segment.
    fn effective(&mut self, address: Address) -> u64 {
        let base = match address.base {
            Base::None => 0,
            Base::Register(register) => self.vcpu.gpr(register),
            Base::Next => {
                let rip = self.vcpu.get(Reg::Rip);
                self.code.advance(rip, self.instruction.length.into())
            }
        };
        let index = match address.index {
            None => 0,
            Some((register, scale)) => self.vcpu.gpr(register) << scale,
        };
        base.wrapping_add(index).wrapping_add(address.displacement)
            & ones(self.instruction.address_size)
    }

    /// The linear address of `offset` in a segment.
    fn linear(&mut self, segment: Seg, offset: u64) -> u64 {
        let long = self.code.size == CodeSize::Bits64;
        let base = if long && !matches!(segment, Seg::Fs | Seg::Gs) {
            0
        } else {
            self.vcpu.segment(segment).base
        };
        let linear = base.wrapping_add(offset);
        if long { linear } else { linear & 0xffff_ffff }
    }

    /// Translates `size` bytes at `offset` in a segment.
    fn span(&mut self, segment: Seg, offset: u64, size: u8, intent: Intent) -> Result<Span, Stop> {
        let long = self.code.size == CodeSize::Bits64;
        let linear = self.linear(segment, offset);
        let last = linear.wrapping_add(u64::from(size) - 1);
        if long && !(is_canonical(linear) && is_canonical(last)) {
            let vector = if segment == Seg::Ss { STACK_FAULT } else { PROTECTION };
            return Err(Stop::Raise(Event::exception_code(vector, 0)));
        }
        self.span_at(linear, size, intent)
    }

    /// Translates `size` bytes at a linear address.
    fn span_at(&mut self, linear: u64, size: u8, intent: Intent) -> Result<Span, Stop> {
        let first = self.translate(linear, intent)?;
        let first_size = first.left().min(size.into()) as u8;
        let second = if first_size < size {
            self.translate(linear.wrapping_add(first_size.into()), intent)?.address
        } else {
            0
        };
        Ok(Span { first: first.address, first_size, second, size })
    }

    fn translate(&mut self, linear: u64, intent: Intent) -> Result<Translation, Stop> {
        let paging = self.code.paging;
        // Addresses of 32-bit code wrap, also with the tables of a 64-bit kernel.
        let narrow = self.code.size != CodeSize::Bits64 && paging.efer & efer::LMA != 0;
        let linear = if narrow { linear & 0xffff_ffff } else { linear };
        paging
            .translate(&GuestTables(self.memory), linear, intent, true)
            .map_err(|fault| Stop::Raise(raise(fault, self.vcpu)))
    }

    fn read(&mut self, span: Span) -> u64 {
        let low = self.read_part(span.first, span.first_size);
        if span.first_size == span.size {
            return low;
        }
        let high = self.read_part(span.second, span.size - span.first_size);
        low | high << (8 * u32::from(span.first_size))
    }

    fn read_part(&mut self, address: u64, size: u8) -> u64 {
        let read = match size {
            1 => self.memory.read::<u8>(address).map(u64::from),
            2 => self.memory.read::<u16>(address).map(u64::from),
            4 => self.memory.read::<u32>(address).map(u64::from),
            8 => self.memory.read::<u64>(address),
            _ => {
                let mut bytes = [0; 8];
                self.memory
                    .read_slice(address, &mut bytes[..usize::from(size.min(8))])
                    .map(|()| u64::from_le_bytes(bytes))
            }
        };
        match read {
            Ok(value) => value,
            Err(_) => self.devices.read(address, size) & ones(size),
        }
    }

    fn write(&mut self, span: Span, value: u64) {
        self.write_part(span.first, span.first_size, value);
        if span.first_size < span.size {
            let rest = value >> (8 * u32::from(span.first_size));
            self.write_part(span.second, span.size - span.first_size, rest);
        }
    }

    fn write_part(&mut self, address: u64, size: u8, value: u64) {
        let written = match size {
            1 => self.memory.write(address, value as u8),
            2 => self.memory.write(address, value as u16),
            4 => self.memory.write(address, value as u32),
            8 => self.memory.write(address, value),
            _ => self.memory.write_slice(address, &value.to_le_bytes()[..usize::from(size.min(8))]),
        };
        if written.is_err() {
            self.devices.write(address, size, value & ones(size));
        }
    }

    /// Value of an operand, zero-extended.
    fn load(&mut self, place: Place, size: u8) -> u64 {
        let value = match place {
            Place::Constant(value) => value,
            Place::Register { register, high } => {
                self.vcpu.gpr(register) >> if high { 8 } else { 0 }
            }
            Place::Memory(span) => self.read(span),
        };
        value & ones(size)
    }

    fn store(&mut self, place: Place, size: u8, value: u64) {
        match place {
            Place::Constant(_) => {}
            Place::Memory(span) => self.write(span, value),
            Place::Register { register, high } => {
                let shift = if high { 8 } else { 0 };
                // 32-bit results clear the upper half, narrower results keep the other bits.
                let replaced = if size == 4 { u64::MAX } else { ones(size) << shift };
                let old = self.vcpu.gpr(register);
                let new = (value & ones(size)) << shift;
                self.vcpu.set_gpr(register, old & !replaced | new);
            }
        }
    }
}

/// A resolved operand.
#[derive(Clone, Copy)]
enum Place {
    Constant(u64),
    Register { register: Gpr, high: bool },
    Memory(Span),
}

/// Location of the upper half of a product or dividend: AH for bytes, which use AX.
fn upper_half(size: u8) -> Place {
    match size {
        1 => Place::Register { register: Gpr::Rax, high: true },
        _ => Place::Register { register: Gpr::Rdx, high: false },
    }
}

#[cfg(test)]
mod tests {
    mod further;

    use super::*;
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
        let io =
            IoExit { port: 0x10, size: 2, write: false, string: true, rep: false, next_rip: 0 };
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
}
