//! Emulation of instructions that access device memory or control registers, and of string port
//! accesses.
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
mod control;
pub mod decode;
pub mod shift;
mod single;
mod stack;
mod string;
mod system;
mod vector;

pub use control::{Control, control};
use hw_walk::{Intent, Translation};
use hw_x86::msr::efer;
use vmm_mem::GuestMemory;
use vmm_x86::msr::is_canonical;
use vmm_x86::walk::{CodeSize, CodeView, GuestTables, raise};
use vmm_x86::{Event, Gpr, IoExit, Reg, Seg, X86Vcpu};

use crate::decode::{Address, Base, DecodeError, Instruction, Op, Operand, ones, sign_extend};

/// Maximum iterations of a repeated string instruction at a time.
pub const MOST_REPEATS: u32 = 256;
/// Vectors of exceptions.
const NOT_PRESENT: u8 = 11;
const STACK_FAULT: u8 = 12;
const PROTECTION: u8 = 13;

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
    if matches!(instruction.op, Op::Ins | Op::Outs) || control::is_control(instruction.op) {
        // INS and OUTS with a device as memory operand take the port exit, which comes first; so do
        // instructions with control registers, with a back end that can emulate them.
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

    /// Resolves an operand. `other` is the other operand: a bit index may select a word beyond it.
    fn resolve(
        &mut self,
        operand: Operand,
        size: u8,
        write: bool,
        other: Operand,
    ) -> Result<Place, Stop> {
        Ok(match operand {
            Operand::None | Operand::Vector(_) | Operand::Control(_) => Place::Constant(0),
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

/// `rAX`.
const ACCUMULATOR: Place = Place::Register { register: Gpr::Rax, high: false };

#[cfg(test)]
mod tests;
