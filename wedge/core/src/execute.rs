//! Emulation of the sensitive instructions (APM vol. 3).

mod control;
mod descriptors;

use vmm_mem::GuestMemory;
use vmm_x86::IoExit;

use crate::cpu::{CS, SS, VirtualCpu, is_canonical, rflags};
use crate::decode::{Address, Instruction, Op, Operand};
use crate::segment;
use crate::{Exit, Host, Interruption, Outcome, UNDEFINED, protection};

type Result<T> = core::result::Result<T, Interruption>;

/// Environment of an instruction.
struct Context<'a, H> {
    memory: &'a GuestMemory,
    host: &'a mut H,
    /// Length of the instruction in bytes.
    length: usize,
    /// Operand size in bytes.
    size: usize,
}

impl VirtualCpu {
    /// Completes an instruction: execution continues at `next`, and `RF` is cleared.
    pub fn complete(&mut self, next: u64) {
        self.frame.rip = next;
        self.frame.rflags &= !rflags::RF;
    }

    /// Emulates the instruction at the instruction pointer. After [`Outcome::Next`] the caller must
    /// call [`VirtualCpu::complete`].
    pub fn execute(
        &mut self,
        memory: &GuestMemory,
        host: &mut impl Host,
        instruction: &Instruction,
    ) -> Outcome {
        let (length, size) = (instruction.length, usize::from(instruction.size));
        match self.try_execute(&mut Context { memory, host, length, size }, instruction) {
            Ok(outcome) => outcome,
            Err(Interruption::Page(fault)) => Outcome::Raise(self.page_fault(fault)),
            Err(Interruption::Event(event)) => Outcome::Raise(event),
        }
    }

    fn try_execute<H: Host>(
        &mut self,
        context: &mut Context<'_, H>,
        instruction: &Instruction,
    ) -> Result<Outcome> {
        let op = instruction.op;
        if self.cpl != 0 && !is_unprivileged(op) {
            return Err(protection(0).into());
        }
        match op {
            Op::Cli => self.held_flags &= !rflags::IF,
            Op::Sti => self.held_flags |= rflags::IF,
            Op::Hlt => return Ok(Outcome::Exit(Exit::Hlt)),
            Op::Pushf => {
                let value = self.rflags() & !(rflags::RF | rflags::VM);
                self.push(context.memory, context.size, value)?;
            }
            Op::Popf => self.pop_flags(context)?,
            Op::Push(from) => {
                let value = self.load(context, from, context.size)?;
                self.push(context.memory, context.size, value)?;
            }
            Op::PushImmediate(value) => {
                self.push(context.memory, context.size, i64::from(value) as u64)?;
            }
            Op::Pop(to) => self.pop_to(context, to)?,
            Op::In(_) | Op::Out(_) | Op::Ins | Op::Outs => return self.port(context, instruction),
            Op::CacheFlush => {}
            Op::Iret => return self.interrupt_return(context.memory),
            Op::Sysret(long) => return self.system_return(long),
            Op::Swapgs => {
                let base = context.host.gs_base();
                context.host.set_gs_base(self.kernel_gs_base);
                self.kernel_gs_base = base;
            }
            Op::Cpuid => return Ok(Outcome::Exit(Exit::Cpuid)),
            Op::Xsetbv => return Ok(Outcome::Exit(Exit::Xsetbv)),
            Op::Rdpmc => return Ok(Outcome::Exit(Exit::Protected)),
            Op::Hypercall => return Ok(Outcome::Exit(Exit::Hypercall)),
            Op::Int(number) => {
                return self.software_interrupt(context.memory, number, context.length as u64);
            }
            // CPUID does not report these.
            Op::Stac
            | Op::Clac
            | Op::Monitor
            | Op::Mwait
            | Op::Undefined
            | Op::Xrstor { .. }
            | Op::Sysexit => return Err(UNDEFINED.into()),
            _ => return self.execute_control(context, op),
        }
        Ok(Outcome::Next)
    }

    fn pop_flags<H>(&mut self, context: &Context<'_, H>) -> Result<()> {
        let value = self.top(context)?;
        self.frame.gpr[4] = self.frame.gpr[4].wrapping_add(context.size as u64);
        let old = self.rflags();
        let upper = if context.size == 2 { old & !0xffff } else { value & !0xffff };
        let kept = if self.cpl == 0 { 0 } else { rflags::IF | rflags::IOPL };
        let value = value & 0xffff | upper;
        self.set_rflags(value & !kept & !rflags::RF | old & kept);
        Ok(())
    }

    fn pop_to<H: Host>(&mut self, context: &mut Context<'_, H>, to: Operand) -> Result<()> {
        let value = self.top(context)?;
        let top = self.frame.gpr[4];
        // An address that depends on RSP uses its value after the pop.
        self.frame.gpr[4] = top.wrapping_add(context.size as u64);
        self.store(context, to, context.size, value).inspect_err(|_| self.frame.gpr[4] = top)
    }

    /// Emulates `SYSCALL` of user mode; the instruction pointer is after the instruction.
    pub fn system_call(&mut self) {
        let flags = self.rflags();
        self.frame.gpr[1] = self.frame.rip;
        self.frame.gpr[11] = flags & !rflags::RF;
        let selector = (self.star >> 32) as u16;
        self.frame.rip = self.lstar;
        self.segments[CS] = segment::kernel_code(selector);
        self.segments[SS] = segment::flat_data((selector & !3).wrapping_add(8));
        self.cpl = 0;
        self.set_rflags(flags & !self.sfmask & !rflags::RF);
    }

    /// Returns `CS` and `SS` of user mode (`SYSRET` to 64-bit code) and of the kernel (`SYSCALL`).
    pub fn call_segments(&self) -> [[vmm_x86::Segment; 2]; 2] {
        let (program, kernel) = ((self.star >> 48) as u16, (self.star >> 32) as u16);
        [
            [
                segment::user_code_64(program.wrapping_add(16)),
                segment::flat_data(segment::user_stack(self.star)),
            ],
            [segment::kernel_code(kernel), segment::flat_data((kernel & !3).wrapping_add(8))],
        ]
    }

    /// Applies the effects of `SYSRET` to 64-bit code, except for `RIP` and the flags; `IF` is set.
    pub fn enter_user(&mut self) {
        let [[code, stack], _] = self.call_segments();
        (self.segments[CS], self.segments[SS]) = (code, stack);
        self.held_flags = rflags::IF;
        self.cpl = 3;
    }

    /// Returns whether `SYSCALL` clears all flags that user mode can set.
    pub fn call_masks_flags(&self) -> bool {
        (rflags::USER_WRITABLE | rflags::IF) & !self.sfmask == 0
    }

    fn system_return(&mut self, long: bool) -> Result<Outcome> {
        let rip = self.frame.gpr[1];
        let selector = (self.star >> 48) as u16;
        if long && !is_canonical(rip) {
            return Err(protection(0).into());
        }
        self.frame.rip = if long { rip } else { rip & 0xffff_ffff };
        let flags = self.frame.gpr[11];
        self.segments[CS] = if long {
            segment::user_code_64(selector.wrapping_add(16))
        } else {
            segment::user_code_32(selector)
        };
        self.segments[SS] = segment::flat_data(segment::user_stack(self.star));
        self.cpl = 3;
        self.set_rflags(flags & !(rflags::RF | rflags::VM));
        Ok(Outcome::Jump)
    }

    /// Checks access to ports by `IOPL`, else by the task's I/O permission bitmap (APM vol. 2,
    /// section 12.2.4).
    fn check_port(&self, memory: &GuestMemory, port: u16, size: u8) -> Result<()> {
        /// Offset of the I/O map base in a 64-bit task-state segment.
        const MAP: u64 = 0x66;
        if u64::from(self.cpl) <= (self.rflags() & rflags::IOPL) >> 12 {
            return Ok(());
        }
        let limit = u64::from(self.tr.limit);
        if limit < MAP + 1 {
            return Err(protection(0).into());
        }
        let at = self.read_value(memory, self.tr.base.wrapping_add(MAP), 2)? + u64::from(port / 8);
        // Two bytes: the bits of one access may cross a byte boundary.
        if at + 1 > limit {
            return Err(protection(0).into());
        }
        let bits = self.read_value(memory, self.tr.base.wrapping_add(at), 2)? >> (port % 8);
        match bits & ((1 << size) - 1) {
            0 => Ok(()),
            _ => Err(protection(0).into()),
        }
    }

    fn port<H>(&self, context: &Context<'_, H>, instruction: &Instruction) -> Result<Outcome> {
        let (op, size) = (instruction.op, instruction.size);
        let port = match op {
            Op::In(Some(port)) | Op::Out(Some(port)) => port.into(),
            _ => self.frame.gpr[2] as u16,
        };
        self.check_port(context.memory, port, size)?;
        Ok(Outcome::Exit(Exit::Io(IoExit {
            port,
            size,
            write: matches!(op, Op::Out(_) | Op::Outs),
            string: matches!(op, Op::Ins | Op::Outs),
            rep: instruction.repeat,
            // The caller knows the address of the next instruction.
            next_rip: 0,
        })))
    }

    fn get(&self, register: u8) -> u64 {
        self.frame.gpr[usize::from(register & 15)]
    }

    fn set(&mut self, register: u8, value: u64) {
        self.frame.gpr[usize::from(register & 15)] = value;
    }

    /// Returns the linear address of a memory operand. The instruction is `length` bytes long and
    /// at the instruction pointer.
    pub fn address(&self, host: &mut impl Host, at: Address, length: usize) -> u64 {
        let mut linear = i64::from(at.displacement) as u64;
        if at.relative {
            linear = linear.wrapping_add(self.frame.rip).wrapping_add(length as u64);
        }
        if let Some(base) = at.base {
            linear = linear.wrapping_add(self.get(base));
        }
        if let Some((index, scale)) = at.index {
            linear = linear.wrapping_add(self.get(index) << scale);
        }
        linear.wrapping_add(match at.segment {
            Some(4) => host.fs_base(),
            Some(_) => host.gs_base(),
            None => 0,
        })
    }

    fn load<H: Host>(
        &self,
        context: &mut Context<'_, H>,
        from: Operand,
        size: usize,
    ) -> Result<u64> {
        Ok(match from {
            Operand::Register(register) => self.get(register),
            Operand::Memory(at) => {
                let linear = self.address(context.host, at, context.length);
                self.read_value(context.memory, linear, size)?
            }
        })
    }

    fn store<H: Host>(
        &mut self,
        context: &mut Context<'_, H>,
        to: Operand,
        size: usize,
        value: u64,
    ) -> Result<()> {
        match to {
            Operand::Register(register) => {
                let mut target = self.get(register);
                merge(&mut target, size, value);
                self.set(register, target);
                Ok(())
            }
            Operand::Memory(at) => {
                let linear = self.address(context.host, at, context.length);
                Ok(self.write_value(context.memory, linear, size, value)?)
            }
        }
    }

    fn push(&mut self, memory: &GuestMemory, size: usize, value: u64) -> Result<()> {
        let top = self.frame.gpr[4].wrapping_sub(size as u64);
        self.write_value(memory, top, size, value)?;
        self.frame.gpr[4] = top;
        Ok(())
    }

    /// Reads the operand on top of the stack.
    fn top<H>(&self, context: &Context<'_, H>) -> Result<u64> {
        Ok(self.read_value(context.memory, self.frame.gpr[4], context.size)?)
    }
}

/// Returns whether user mode may execute the instruction; the rest raises `#GP`.
fn is_unprivileged(op: Op) -> bool {
    matches!(
        op,
        Op::In(_)
            | Op::Out(_)
            | Op::Ins
            | Op::Outs
            | Op::Pushf
            | Op::Popf
            | Op::Push(_)
            | Op::PushImmediate(_)
            | Op::Pop(_)
            | Op::Sgdt(_)
            | Op::Sidt(_)
            | Op::Sldt(_)
            | Op::Str(_)
            | Op::Smsw(_)
            | Op::ReadSegment { .. }
            | Op::WriteSegment { .. }
            | Op::PushSegment(_)
            | Op::PopSegment(_)
            | Op::FarReturn(_)
            | Op::Iret
            | Op::Cpuid
            | Op::Lar { .. }
            | Op::Lsl { .. }
            | Op::Verr(_)
            | Op::Verw(_)
            | Op::Int(_)
            | Op::Undefined
    )
}

/// Merges `size` bytes into a register; four bytes clear the upper half.
fn merge(target: &mut u64, size: usize, value: u64) {
    *target = match size {
        8 => value,
        4 => value & 0xffff_ffff,
        2 => *target & !0xffff | value & 0xffff,
        _ => *target & !0xff | value & 0xff,
    };
}
