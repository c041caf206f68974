//! Interrupts and exceptions: delivery through the guest's IDT, and the return from handlers.

use core::mem::offset_of;

use hw_x86::paging::TaskState;
use hw_x86::vmcb::event;
use vmm_mem::GuestMemory;

use crate::cpu::{CS, SS, VirtualCpu, is_canonical, rflags};
use crate::segment::{self, code_of};
use crate::{Event, Exit, Interruption, Outcome, protection, vector};

/// Gate types (APM vol. 2, section 4.8.4).
const INTERRUPT_GATE: u8 = 0xe;
const TRAP_GATE: u8 = 0xf;
/// Error-code bits: external event; the code names an IDT entry.
const EXTERNAL: u32 = 1;
const IN_IDT: u32 = 2;

/// Origin of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Source {
    /// Exception whose instruction is restarted.
    Fault,
    /// Interrupt, or another exception.
    Hardware,
    /// `INT n`, `INT3`: the gate's DPL must admit the caller.
    Software,
}

/// Exceptions that cause a double fault in combination (APM vol. 2, table 8-3).
fn is_contributory(vector: u8) -> bool {
    matches!(vector, 0 | 10..=13)
}

/// Returns the origin of an event. All exceptions except `#DB`, `#BP`, `#OF`, `#DF` and `#MC` are
/// faults (APM vol. 2, table 8-1).
fn source_of(event: Event) -> Source {
    match event.is_exception() && !matches!(event.vector(), 1 | 3 | 4 | 8 | 18) {
        true => Source::Fault,
        false => Source::Hardware,
    }
}

impl VirtualCpu {
    /// Delivers an interrupt or exception to the guest.
    ///
    /// # Errors
    /// [`Exit::Shutdown`]: a fault during the delivery of a double fault.
    pub fn deliver(&mut self, memory: &GuestMemory, event: Event) -> Result<(), Exit> {
        let mut current = event;
        // The event, a fault of its delivery, the double fault.
        for _ in 0..3 {
            let code = (current.0 & event::ERROR_VALID != 0).then_some((current.0 >> 32) as u32);
            let source = source_of(current);
            let Err(interruption) = self.through_gate(memory, current.vector(), code, source)
            else {
                return Ok(());
            };
            let second = match interruption {
                Interruption::Page(fault) => self.page_fault(fault),
                Interruption::Event(event) => event,
            };
            let (first, next) = (current.vector(), second.vector());
            if current.is_exception() && first == vector::DOUBLE_FAULT {
                return Err(Exit::Shutdown);
            }
            let page = vector::PAGE_FAULT;
            let double = current.is_exception()
                && (is_contributory(first) && is_contributory(next)
                    || first == page && (next == page || is_contributory(next)));
            current = if double {
                Event::exception_code(vector::DOUBLE_FAULT, 0)
            } else if current.is_exception() {
                second
            } else {
                external(second)
            };
        }
        Err(Exit::Shutdown)
    }

    /// Emulates `INT n`, which is `length` bytes long and at the instruction pointer.
    pub(crate) fn software_interrupt(
        &mut self,
        memory: &GuestMemory,
        number: u8,
        length: u64,
    ) -> Result<Outcome, Interruption> {
        let rip = self.frame.rip;
        self.frame.rip = rip.wrapping_add(length);
        match self.through_gate(memory, number, None, Source::Software) {
            Ok(()) => Ok(Outcome::Jump),
            Err(interruption) => {
                self.frame.rip = rip;
                Err(interruption)
            }
        }
    }

    /// Delivers an `INT n` or `INT3` that the host CPU has reported. The instruction is `length`
    /// bytes long and ends at the instruction pointer.
    ///
    /// # Errors
    /// As [`VirtualCpu::deliver`].
    pub fn deliver_software(
        &mut self,
        memory: &GuestMemory,
        number: u8,
        length: u64,
    ) -> Result<(), Exit> {
        self.frame.rip = self.frame.rip.wrapping_sub(length);
        match self.software_interrupt(memory, number, length) {
            Ok(_) => Ok(()),
            Err(Interruption::Page(fault)) => {
                let event = self.page_fault(fault);
                self.deliver(memory, event)
            }
            Err(Interruption::Event(event)) => self.deliver(memory, event),
        }
    }

    /// Delivers an event (APM vol. 2, section 8.9). No state changes on failure.
    fn through_gate(
        &mut self,
        memory: &GuestMemory,
        number: u8,
        error_code: Option<u32>,
        source: Source,
    ) -> Result<(), Interruption> {
        let named = (u32::from(number) * 8) | IN_IDT;
        let offset = u64::from(number) * 16;
        if offset + 15 > u64::from(self.idtr.limit) {
            return Err(protection(named).into());
        }
        let mut gate = [0; 16];
        self.read(memory, self.idtr.base.wrapping_add(offset), &mut gate)?;
        let attributes = gate[5];
        let kind = attributes & 0x1f;
        if !matches!(kind, INTERRUPT_GATE | TRAP_GATE)
            || source == Source::Software && (attributes >> 5 & 3) < self.cpl
        {
            return Err(protection(named).into());
        }
        if attributes & 0x80 == 0 {
            return Err(Event::exception_code(vector::NOT_PRESENT, named).into());
        }
        let word = |at: usize| u16::from_le_bytes([gate[at], gate[at + 1]]);
        let target = [0, 6, 8, 10].iter().rev().fold(0, |sum, &at| sum << 16 | u64::from(word(at)));
        let code = self.gate_code(memory, word(2))?;
        let inward = self.cpl != 0;
        let stack = gate[4] & 7;
        let top = if stack != 0 {
            self.task_word(memory, offset_of!(TaskState, ist) as u64 + 8 * (u64::from(stack) - 1))?
        } else if inward {
            self.task_word(memory, offset_of!(TaskState, rsp) as u64)?
        } else {
            self.frame.gpr[4]
        };
        let bottom = self.push_frame(memory, top, error_code, source)?;
        self.frame.gpr[4] = bottom;
        self.frame.rip = target;
        self.segments[CS] = code;
        if inward {
            // The null selector at the new privilege level.
            self.segments[SS] = segment::null();
            self.set_level(0);
        }
        self.frame.rflags &= !(rflags::TF | rflags::NT | rflags::RF | rflags::VM);
        if kind == INTERRUPT_GATE {
            self.held_flags &= !rflags::IF;
        }
        Ok(())
    }

    /// Writes the stack frame of an event below `top`. Returns the new stack pointer.
    fn push_frame(
        &self,
        memory: &GuestMemory,
        top: u64,
        error_code: Option<u32>,
        source: Source,
    ) -> Result<u64, Interruption> {
        // After a fault, an instruction breakpoint is not reported again (APM vol. 2, section
        // 13.1.1).
        let again = if source == Source::Fault { rflags::RF } else { 0 };
        let mut words = [0_u64; 6];
        let frame = [
            self.frame.rip,
            self.segments[CS].selector.into(),
            self.rflags() & !rflags::RF | again,
            self.frame.gpr[4],
            self.segments[SS].selector.into(),
        ];
        let from = usize::from(error_code.is_none());
        words[0] = error_code.unwrap_or(0).into();
        words[1..].copy_from_slice(&frame);
        let words = &words[from..];
        let length = 8 * words.len() as u64;
        let bottom = (top & !0xf).wrapping_sub(length);
        if !is_canonical(bottom) {
            return Err(Event::exception_code(vector::STACK, 0).into());
        }
        let mut bytes = [0; 48];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        self.write(memory, bottom, &bytes[..length as usize])?;
        Ok(bottom)
    }

    /// Returns the code segment of a gate. Gates of kernels use the segment of `SYSCALL`, which
    /// avoids reading the GDT.
    fn gate_code(
        &self,
        memory: &GuestMemory,
        selector: u16,
    ) -> Result<vmm_x86::Segment, Interruption> {
        if selector & !3 == (self.star >> 32) as u16 & !3 && selector & !3 != 0 {
            return Ok(segment::kernel_code(selector));
        }
        let refuse = protection(code_of(selector));
        if selector & !3 == 0 {
            return Err(protection(0).into());
        }
        let code = self.descriptor(memory, selector)?;
        if !segment::is_64_bit(&code) || segment::level(&code) != 0 {
            return Err(refuse.into());
        }
        if !segment::is_present(&code) {
            return Err(Event::exception_code(vector::NOT_PRESENT, code_of(selector)).into());
        }
        Ok(segment::kernel_code(selector))
    }

    /// Reads a word of the task-state segment.
    fn task_word(&self, memory: &GuestMemory, offset: u64) -> Result<u64, Interruption> {
        if offset + 7 > self.tr.limit.into() {
            let code = code_of(self.tr.selector);
            return Err(Event::exception_code(vector::INVALID_TSS, code).into());
        }
        Ok(self.read_value(memory, self.tr.base.wrapping_add(offset), 8)?)
    }

    /// Emulates `IRETQ` (APM vol. 3), which pops five words at every privilege level.
    pub(crate) fn interrupt_return(
        &mut self,
        memory: &GuestMemory,
    ) -> Result<Outcome, Interruption> {
        if self.frame.rflags & rflags::NT != 0 {
            return Err(protection(0).into());
        }
        let mut bytes = [0; 40];
        self.read(memory, self.frame.gpr[4], &mut bytes)?;
        let mut words = [0; 5];
        for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*chunk);
        }
        let [rip, cs, flags, rsp, ss] = words;
        let (code, level) = self.return_segment(memory, cs as u16)?;
        if segment::is_64_bit(&code) && !is_canonical(rip) {
            return Err(protection(0).into());
        }
        let outward = level > self.cpl;
        let stack = if ss as u16 & !3 == 0 && level != 3 {
            vmm_x86::Segment { selector: ss as u16, ..segment::null() }
        } else if self.segments[SS].selector == ss as u16 && !outward {
            self.segments[SS]
        } else if ss as u16 == segment::user_stack(self.star) && level == 3 {
            segment::flat_data(ss as u16)
        } else {
            self.return_stack(memory, ss as u16, level)?
        };
        self.frame.rip = rip;
        self.frame.gpr[4] = rsp;
        self.segments[CS] = code;
        self.segments[SS] = stack;
        // Only level 0 may change IOPL and IF.
        let kept = if self.cpl == 0 { 0 } else { rflags::IOPL | rflags::IF };
        let flags = flags & !kept | self.rflags() & kept;
        if outward {
            self.cpl = level;
            self.drop_inner_segments();
        }
        self.set_rflags(flags & !rflags::VM);
        Ok(Outcome::Jump)
    }

    /// Emulates `LRETQ`, without parameters to drop.
    pub(crate) fn far_return(
        &mut self,
        memory: &GuestMemory,
        size: usize,
        drop: u64,
    ) -> Result<Outcome, Interruption> {
        let rsp = self.frame.gpr[4];
        let step = size as u64;
        let rip = self.read_value(memory, rsp, size)?;
        let cs = self.read_value(memory, rsp.wrapping_add(step), size)? as u16;
        let (code, level) = self.return_segment(memory, cs)?;
        if segment::is_64_bit(&code) && !is_canonical(rip) {
            return Err(protection(0).into());
        }
        let mut top = rsp.wrapping_add(2 * step).wrapping_add(drop);
        if level > self.cpl {
            let outer = self.read_value(memory, top, size)?;
            let ss = self.read_value(memory, top.wrapping_add(step), size)? as u16;
            let stack = self.return_stack(memory, ss, level)?;
            top = outer.wrapping_add(drop);
            self.segments[SS] = stack;
            self.set_level(level);
            self.drop_inner_segments();
        }
        self.segments[CS] = code;
        self.frame.rip = rip;
        self.frame.gpr[4] = top;
        Ok(Outcome::Jump)
    }

    fn return_stack(
        &self,
        memory: &GuestMemory,
        selector: u16,
        level: u8,
    ) -> Result<vmm_x86::Segment, Interruption> {
        let refuse = protection(code_of(selector));
        if selector & !3 == 0 {
            return Err(protection(0).into());
        }
        let stack = self.descriptor(memory, selector)?;
        let suits = segment::is_writable_data(&stack)
            && segment::level(&stack) == level
            && (selector & 3) as u8 == level;
        if !suits {
            return Err(refuse.into());
        }
        if !segment::is_present(&stack) {
            return Err(Event::exception_code(vector::STACK, code_of(selector)).into());
        }
        Ok(stack)
    }

    /// Nulls data segments of the inner level on a return to an outer level (APM vol. 2, section
    /// 8.9.3).
    fn drop_inner_segments(&mut self) {
        for (number, segment) in self.segments.iter_mut().enumerate() {
            let data = number != CS && number != SS;
            if data && segment::is_inner_data(segment, self.cpl) {
                *segment = segment::null();
            }
        }
    }
}

/// Marks a fault of the delivery of an external event in its error code.
fn external(event: Event) -> Event {
    let selective = (10..=13).contains(&event.vector());
    if selective && event.0 & event::ERROR_VALID != 0 {
        Event(event.0 | u64::from(EXTERNAL) << 32)
    } else {
        event
    }
}
