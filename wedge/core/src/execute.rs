//! Emulation of the sensitive instructions (APM vol. 3).

use hw_x86::msr::{CSTAR, FS_BASE, GS_BASE, KERNEL_GS_BASE, LSTAR, SFMASK, STAR};
use hw_x86::paging::{cr0, cr4};
use vmm_mem::GuestMemory;
use vmm_x86::IoExit;

use crate::cpu::{CS, DescriptorTable, SS, VirtualCpu, is_canonical, rflags};
use crate::decode::{Address, Instruction, Op, Operand};
use crate::segment::{self, code_of};
use crate::{Exit, Flush, Host, Interruption, Outcome, UNDEFINED, protection};

/// `CR3` bit 63: keep cached translations of the new address space.
const KEEP: u64 = 1 << 63;
/// `CR3`: root page table and PCID.
const CR3_VALID: u64 = 0x000f_ffff_ffff_ffff;
/// Types of system descriptors.
const LDT: u16 = 2;
const FREE_TSS: u16 = 9;
const BUSY_TSS: u16 = 11;
/// `RFLAGS.ZF`.
const ZF: u64 = 1 << 6;
/// Supported bits of control register 4.
const CR4_VALID: u64 = cr4::TSD
    | cr4::PSE
    | cr4::PAE
    | cr4::MCE
    | cr4::PGE
    | cr4::PCE
    | cr4::OSFXSR
    | cr4::OSXMMEXCPT
    | cr4::FSGSBASE
    | cr4::PCIDE
    | cr4::OSXSAVE
    // VME, PVI, DE: no effect in 64-bit mode, or without debug registers.
    | 1 << 0
    | 1 << 1
    | 1 << 3;

type Result<T> = core::result::Result<T, Interruption>;

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
        match self.try_execute(memory, host, instruction) {
            Ok(outcome) => outcome,
            Err(Interruption::Page(fault)) => Outcome::Raise(self.page_fault(fault)),
            Err(Interruption::Event(event)) => Outcome::Raise(event),
        }
    }

    fn try_execute(
        &mut self,
        memory: &GuestMemory,
        host: &mut impl Host,
        instruction: &Instruction,
    ) -> Result<Outcome> {
        let Instruction { op, length, size, .. } = *instruction;
        let bytes = usize::from(size);
        if self.cpl != 0 && !is_unprivileged(op) {
            return Err(protection(0).into());
        }
        match op {
            Op::Cli => self.held_flags &= !rflags::IF,
            Op::Sti => self.held_flags |= rflags::IF,
            Op::Hlt => return Ok(Outcome::Exit(Exit::Hlt)),
            Op::Pushf => {
                let value = self.rflags() & !(rflags::RF | rflags::VM);
                self.push(memory, bytes, value)?;
            }
            Op::Popf => {
                let value = self.read_value(memory, self.frame.gpr[4], bytes)?;
                self.frame.gpr[4] = self.frame.gpr[4].wrapping_add(size.into());
                let old = self.rflags();
                let upper = if size == 2 { old & !0xffff } else { value & !0xffff };
                let kept = if self.cpl == 0 { 0 } else { rflags::IF | rflags::IOPL };
                let value = value & 0xffff | upper;
                self.set_rflags(value & !kept & !rflags::RF | old & kept);
            }
            Op::Push(from) => {
                let value = self.load(memory, host, from, bytes, length)?;
                self.push(memory, bytes, value)?;
            }
            Op::PushImmediate(value) => self.push(memory, bytes, i64::from(value) as u64)?,
            Op::Pop(to) => {
                let value = self.read_value(memory, self.frame.gpr[4], bytes)?;
                let top = self.frame.gpr[4];
                // An address that depends on RSP uses its value after the pop.
                self.frame.gpr[4] = top.wrapping_add(size.into());
                if let Err(interruption) = self.store(memory, host, to, bytes, length, value) {
                    self.frame.gpr[4] = top;
                    return Err(interruption);
                }
            }
            Op::In(port) | Op::Out(port) => {
                let port = port.map_or(self.frame.gpr[2] as u16, u16::from);
                self.check_port(memory, port, size)?;
                return Ok(self.port(instruction, port, matches!(op, Op::Out(_)), false));
            }
            Op::Ins | Op::Outs => {
                let port = self.frame.gpr[2] as u16;
                self.check_port(memory, port, size)?;
                return Ok(self.port(instruction, port, op == Op::Outs, true));
            }
            Op::ReadControl { control, register } => {
                let value = match control {
                    0 => self.cr0,
                    2 => self.cr2,
                    3 => self.cr3,
                    4 => self.cr4,
                    8 => {
                        return Ok(Outcome::Exit(Exit::CrAccess { register: 8, write: false }));
                    }
                    _ => return Err(UNDEFINED.into()),
                };
                self.set(register, value);
            }
            Op::WriteControl { control, register } => {
                let value = self.get(register);
                match control {
                    0 => self.write_cr0(host, value)?,
                    2 => self.cr2 = value,
                    3 => self.write_cr3(host, value)?,
                    4 => self.write_cr4(host, value)?,
                    8 => return Ok(Outcome::Exit(Exit::CrAccess { register: 8, write: true })),
                    _ => return Err(UNDEFINED.into()),
                }
            }
            Op::ReadDebug { debug, register } => {
                let value = self.dr[alias(debug)];
                self.set(register, value);
            }
            Op::WriteDebug { debug, register } => self.write_debug(debug, self.get(register))?,
            Op::Rdmsr => {
                let Some(value) = self.own_msr(host) else {
                    return Ok(Outcome::Exit(Exit::Msr { write: false }));
                };
                self.set(0, value & 0xffff_ffff);
                self.set(2, value >> 32);
            }
            Op::Wrmsr => return self.write_msr(host),
            Op::Lgdt(at) => {
                self.gdtr = self.load_table(memory, host, at, length)?;
                self.user_code = segment::null();
            }
            Op::Lidt(at) => self.idtr = self.load_table(memory, host, at, length)?,
            Op::Sgdt(at) => self.store_table(memory, host, at, length, self.gdtr)?,
            Op::Sidt(at) => self.store_table(memory, host, at, length, self.idtr)?,
            Op::Lldt(from) => {
                let selector = self.load(memory, host, from, 2, length)? as u16;
                self.ldtr = if selector & !3 == 0 {
                    segment::null()
                } else {
                    self.system_segment(memory, selector, LDT)?
                };
            }
            Op::Ltr(from) => {
                let selector = self.load(memory, host, from, 2, length)? as u16;
                let mut segment = self.system_segment(memory, selector, FREE_TSS)?;
                segment.attrib |= BUSY_TSS;
                if let Some(at) = self.descriptor_at(selector) {
                    let low = self.read_value(memory, at, 8)?;
                    self.write_value(memory, at, 8, low | 1 << 41)?;
                }
                self.tr = segment;
            }
            Op::Sldt(to) => {
                self.store_selector(memory, host, to, bytes, length, self.ldtr.selector)?;
            }
            Op::Str(to) => {
                self.store_selector(memory, host, to, bytes, length, self.tr.selector)?;
            }
            Op::Smsw(to) => {
                let (value, width) = match to {
                    Operand::Register(_) => (self.cr0, bytes),
                    Operand::Memory(_) => (self.cr0, 2),
                };
                self.store(memory, host, to, width, length, value)?;
            }
            Op::Lmsw(from) => {
                let value = self.load(memory, host, from, 2, length)?;
                // LMSW sets PE, but does not clear it.
                let low = value & 0xf | self.cr0 & cr0::PE;
                self.write_cr0(host, self.cr0 & !0xf | low)?;
            }
            Op::Clts => self.cr0 &= !cr0::TS,
            Op::Invlpg(at) => {
                let linear = self.address(host, at, length);
                host.flush(Flush::Page(linear));
            }
            Op::Invpcid { kind, descriptor } => {
                let at = self.address(host, descriptor, length);
                let pcid = self.read_value(memory, at, 8)?;
                let linear = self.read_value(memory, at.wrapping_add(8), 8)?;
                if pcid > 0xfff {
                    return Err(protection(0).into());
                }
                let pcid = pcid as u16;
                host.flush(match self.get(kind) {
                    0 if is_canonical(linear) => Flush::PageOf { pcid, linear },
                    1 => Flush::Space(pcid),
                    2 => Flush::All,
                    3 => Flush::Spaces,
                    _ => return Err(protection(0).into()),
                });
            }
            Op::CacheFlush => {}
            Op::Iret => return self.interrupt_return(memory),
            Op::Sysret(long) => return self.system_return(long),
            Op::Swapgs => {
                let base = host.gs_base();
                host.set_gs_base(self.kernel_gs_base);
                self.kernel_gs_base = base;
            }
            Op::ReadSegment { segment, to } => {
                let selector = self.segments[usize::from(segment)].selector;
                self.store_selector(memory, host, to, bytes, length, selector)?;
            }
            Op::WriteSegment { segment, from } => {
                let selector = self.load(memory, host, from, 2, length)? as u16;
                self.load_data_segment(memory, host, segment.into(), selector)?;
            }
            Op::PushSegment(number) => {
                let selector = self.segments[usize::from(number)].selector;
                self.push(memory, bytes, selector.into())?;
            }
            Op::PopSegment(number) => {
                let selector = self.read_value(memory, self.frame.gpr[4], bytes)? as u16;
                self.load_data_segment(memory, host, number.into(), selector)?;
                self.frame.gpr[4] = self.frame.gpr[4].wrapping_add(size.into());
            }
            Op::FarReturn(drop) => return self.far_return(memory, bytes, drop.into()),
            Op::FarJump(at) | Op::FarCall(at) => {
                let link = matches!(op, Op::FarCall(_));
                return self.far_transfer(memory, host, at, bytes, length, link);
            }
            Op::Cpuid => return Ok(Outcome::Exit(Exit::Cpuid)),
            Op::Xsetbv => return Ok(Outcome::Exit(Exit::Xsetbv)),
            Op::Rdpmc => return Ok(Outcome::Exit(Exit::Protected)),
            Op::Hypercall => return Ok(Outcome::Exit(Exit::Hypercall)),
            // CPUID does not report these.
            Op::Stac
            | Op::Clac
            | Op::Monitor
            | Op::Mwait
            | Op::Undefined
            | Op::Xrstor { .. }
            | Op::Sysexit => {
                return Err(UNDEFINED.into());
            }
            Op::Lar { register, from } | Op::Lsl { register, from } => {
                let selector = self.load(memory, host, from, 2, length)? as u16;
                let rights = matches!(op, Op::Lar { .. });
                let value = self.visible(memory, selector, rights)?;
                self.set_zero_flag(value.is_some());
                if let Some(value) = value {
                    let mut target = self.get(register);
                    merge(&mut target, bytes.max(4), value);
                    self.set(register, target);
                }
            }
            Op::Verr(from) | Op::Verw(from) => {
                let selector = self.load(memory, host, from, 2, length)? as u16;
                let write = matches!(op, Op::Verw(_));
                let allowed = self.verify(memory, selector, write)?;
                self.set_zero_flag(allowed);
            }
            Op::Int(number) => return self.software_interrupt(memory, number, length as u64),
        }
        Ok(Outcome::Next)
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

    fn port(&self, instruction: &Instruction, port: u16, write: bool, string: bool) -> Outcome {
        Outcome::Exit(Exit::Io(IoExit {
            port,
            size: instruction.size,
            write,
            string,
            rep: instruction.repeat,
            // The caller knows the address of the next instruction.
            next_rip: 0,
        }))
    }

    fn get(&self, register: u8) -> u64 {
        self.frame.gpr[usize::from(register & 15)]
    }

    fn set(&mut self, register: u8, value: u64) {
        self.frame.gpr[usize::from(register & 15)] = value;
    }

    fn set_zero_flag(&mut self, on: bool) {
        self.frame.rflags = self.frame.rflags & !ZF | if on { ZF } else { 0 };
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

    fn load(
        &mut self,
        memory: &GuestMemory,
        host: &mut impl Host,
        from: Operand,
        size: usize,
        length: usize,
    ) -> Result<u64> {
        Ok(match from {
            Operand::Register(register) => self.get(register),
            Operand::Memory(at) => {
                let linear = self.address(host, at, length);
                self.read_value(memory, linear, size)?
            }
        })
    }

    fn store(
        &mut self,
        memory: &GuestMemory,
        host: &mut impl Host,
        to: Operand,
        size: usize,
        length: usize,
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
                let linear = self.address(host, at, length);
                Ok(self.write_value(memory, linear, size, value)?)
            }
        }
    }

    /// Stores a selector: zero-extended to a register, as two bytes to memory.
    fn store_selector(
        &mut self,
        memory: &GuestMemory,
        host: &mut impl Host,
        to: Operand,
        size: usize,
        length: usize,
        selector: u16,
    ) -> Result<()> {
        let size = if matches!(to, Operand::Memory(_)) { 2 } else { size };
        self.store(memory, host, to, size, length, selector.into())
    }

    fn push(&mut self, memory: &GuestMemory, size: usize, value: u64) -> Result<()> {
        let top = self.frame.gpr[4].wrapping_sub(size as u64);
        self.write_value(memory, top, size, value)?;
        self.frame.gpr[4] = top;
        Ok(())
    }

    fn load_table(
        &mut self,
        memory: &GuestMemory,
        host: &mut impl Host,
        at: Address,
        length: usize,
    ) -> Result<DescriptorTable> {
        let linear = self.address(host, at, length);
        let limit = self.read_value(memory, linear, 2)? as u16;
        let base = self.read_value(memory, linear.wrapping_add(2), 8)?;
        if !is_canonical(base) {
            return Err(protection(0).into());
        }
        Ok(DescriptorTable { base, limit })
    }

    fn store_table(
        &mut self,
        memory: &GuestMemory,
        host: &mut impl Host,
        at: Address,
        length: usize,
        table: DescriptorTable,
    ) -> Result<()> {
        let linear = self.address(host, at, length);
        let mut bytes = [0; 10];
        bytes[..2].copy_from_slice(&table.limit.to_le_bytes());
        bytes[2..].copy_from_slice(&table.base.to_le_bytes());
        Ok(self.write(memory, linear, &bytes)?)
    }

    /// Reads a system descriptor of the GDT, which has 16 bytes in long mode.
    fn system_segment(
        &self,
        memory: &GuestMemory,
        selector: u16,
        kind: u16,
    ) -> Result<vmm_x86::Segment> {
        let refuse = protection(code_of(selector));
        let at = if selector & 4 == 0 { self.descriptor_at(selector) } else { None };
        let at = at.ok_or(refuse)?;
        let mut found = segment::unpack(selector, self.read_value(memory, at, 8)?);
        let high = self.read_value(memory, at.wrapping_add(8), 8)?;
        found.base |= high << 32;
        if segment::system_type(&found) != Some(kind) {
            return Err(refuse.into());
        }
        if !segment::is_present(&found) {
            let code = code_of(selector);
            return Err(crate::Event::exception_code(crate::vector::NOT_PRESENT, code).into());
        }
        Ok(found)
    }

    fn far_transfer(
        &mut self,
        memory: &GuestMemory,
        host: &mut impl Host,
        at: Address,
        size: usize,
        length: usize,
        link: bool,
    ) -> Result<Outcome> {
        let linear = self.address(host, at, length);
        let target = self.read_value(memory, linear, size)?;
        let selector = self.read_value(memory, linear.wrapping_add(size as u64), 2)? as u16;
        let refuse = protection(code_of(selector));
        if selector & !3 == 0 {
            return Err(protection(0).into());
        }
        let code = self.descriptor(memory, selector)?;
        // Call gates and 32-bit code are not supported here.
        if !segment::is_64_bit(&code) || segment::level(&code) != self.cpl {
            return Err(refuse.into());
        }
        if !is_canonical(target) {
            return Err(protection(0).into());
        }
        if link {
            let back = self.frame.rip.wrapping_add(length as u64);
            let top = self.frame.gpr[4];
            self.push(memory, size, self.segments[CS].selector.into())?;
            if let Err(interruption) = self.push(memory, size, back) {
                self.frame.gpr[4] = top;
                return Err(interruption);
            }
        }
        let level = u16::from(self.cpl);
        self.segments[CS] = vmm_x86::Segment { selector: selector & !3 | level, ..code };
        self.frame.rip = target;
        Ok(Outcome::Jump)
    }

    /// `LAR`, `LSL`: returns the descriptor's rights or limit, if visible at this privilege level.
    fn visible(&self, memory: &GuestMemory, selector: u16, rights: bool) -> Result<Option<u64>> {
        let Some(at) = self.descriptor_at(selector) else { return Ok(None) };
        let descriptor = self.read_value(memory, at, 8)?;
        let found = segment::unpack(selector, descriptor);
        let level = self.cpl.max((selector & 3) as u8);
        let known = match segment::system_type(&found) {
            None => true,
            Some(kind) => matches!(kind, LDT | FREE_TSS | BUSY_TSS) || rights && kind == 0xc,
        };
        if !known || segment::is_inner_data(&found, level) {
            return Ok(None);
        }
        Ok(Some(if rights { descriptor >> 32 & 0x00f0_ff00 } else { found.limit.into() }))
    }

    /// Emulates `VERR` and `VERW`.
    fn verify(&self, memory: &GuestMemory, selector: u16, write: bool) -> Result<bool> {
        let Some(at) = self.descriptor_at(selector) else { return Ok(false) };
        let found = segment::unpack(selector, self.read_value(memory, at, 8)?);
        let level = self.cpl.max((selector & 3) as u8);
        let suits =
            if write { segment::is_writable_data(&found) } else { segment::is_readable(&found) };
        Ok(suits && !segment::is_inner_data(&found, level))
    }

    fn write_cr0(&mut self, host: &mut impl Host, value: u64) -> Result<()> {
        let bad = value & cr0::NW != 0 && value & cr0::CD == 0
            || value >> 32 != 0
            // Leaving long mode is not supported.
            || value & (cr0::PG | cr0::PE) != cr0::PG | cr0::PE;
        if bad {
            return Err(protection(0).into());
        }
        let changed = self.cr0 ^ value;
        self.cr0 = value | cr0::ET;
        if changed & cr0::WP != 0 {
            host.flush(Flush::All);
        }
        Ok(())
    }

    fn write_cr3(&mut self, host: &mut impl Host, value: u64) -> Result<()> {
        let with_pcid = self.cr4 & cr4::PCIDE != 0;
        if value & !(CR3_VALID | if with_pcid { KEEP } else { 0 }) != 0 {
            return Err(protection(0).into());
        }
        self.cr3 = value & CR3_VALID;
        let root = if with_pcid { self.cr3 } else { self.cr3 & !0xfff };
        host.enter_space(root, value & KEEP != 0);
        Ok(())
    }

    fn write_cr4(&mut self, host: &mut impl Host, value: u64) -> Result<()> {
        let changed = self.cr4 ^ value;
        let bad = value & !CR4_VALID != 0
            || value & cr4::PAE == 0
            // APM vol. 2, section 5.5.1: PCIDE may be set only while the PCID is 0.
            || changed & value & cr4::PCIDE != 0 && self.cr3 & 0xfff != 0;
        if bad {
            return Err(protection(0).into());
        }
        self.cr4 = value;
        if changed & (cr4::PGE | cr4::PSE | cr4::PCIDE) != 0 {
            host.flush(Flush::All);
        }
        Ok(())
    }

    fn write_debug(&mut self, debug: u8, value: u64) -> Result<()> {
        let number = alias(debug);
        self.dr[number] = match number {
            6 | 7 if value >> 32 != 0 => return Err(protection(0).into()),
            6 => value & 0xe00f | 0xffff_0ff0,
            7 => value & 0xffff_27ff | 0x400,
            _ if !is_canonical(value) => return Err(protection(0).into()),
            _ => value,
        };
        Ok(())
    }

    /// Returns the value of an MSR that this model implements itself.
    fn own_msr(&self, host: &mut impl Host) -> Option<u64> {
        Some(match self.frame.gpr[1] as u32 {
            FS_BASE => host.fs_base(),
            GS_BASE => host.gs_base(),
            KERNEL_GS_BASE => self.kernel_gs_base,
            STAR => self.star,
            LSTAR => self.lstar,
            CSTAR => self.cstar,
            SFMASK => self.sfmask,
            _ => return None,
        })
    }

    fn write_msr(&mut self, host: &mut impl Host) -> Result<Outcome> {
        let value = self.frame.gpr[2] << 32 | self.frame.gpr[0] & 0xffff_ffff;
        let msr = self.frame.gpr[1] as u32;
        let address = matches!(msr, FS_BASE | GS_BASE | KERNEL_GS_BASE | LSTAR | CSTAR);
        if address && !is_canonical(value) {
            return Err(protection(0).into());
        }
        match msr {
            FS_BASE => host.set_fs_base(value),
            GS_BASE => host.set_gs_base(value),
            KERNEL_GS_BASE => self.kernel_gs_base = value,
            STAR => self.star = value,
            LSTAR => self.lstar = value,
            CSTAR => self.cstar = value,
            SFMASK => self.sfmask = value & 0xffff_ffff,
            _ => return Ok(Outcome::Exit(Exit::Msr { write: true })),
        }
        Ok(Outcome::Next)
    }
}

/// Maps debug registers 4 and 5 to 6 and 7.
fn alias(debug: u8) -> usize {
    match debug & 7 {
        4 => 6,
        5 => 7,
        other => other.into(),
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
