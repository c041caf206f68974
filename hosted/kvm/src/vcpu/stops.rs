//! Stops for a debugger: requested ones, single steps, and breakpoints, which are `HLT`.

use std::sync::atomic::Ordering::SeqCst;

use hw_x86::msr::efer;
use hw_x86::paging::{cr0, cr4};
use proto::hosted::debug::{HALT, reason, register};
use rustix::io::Errno;
use vmm_x86::walk::CodeView;
use vmm_x86::{Exit, Gpr, Reg, X86Vcpu};

use super::{KvmVcpu, Pending, StepState};
use crate::debug;

impl KvmVcpu<'_> {
    /// Requests a debugger stop, if it is still wanted.
    pub fn stop(&mut self) {
        self.is_asked = self.stops.is_some();
        self.service_debug_stop();
    }

    /// Performs a requested stop, unless KVM has an incomplete instruction.
    pub fn service_debug_stop(&mut self) {
        if self.step == StepState::Done {
            self.halt(reason::STEP);
        }
        let is_between = matches!(self.pending, Pending::Nothing) && self.ports.is_none();
        if self.is_asked && is_between {
            self.is_asked = false;
            if self.stops.is_some_and(|stops| stops.shared.is_wanted()) {
                self.halt(reason::WANTED);
            }
        }
    }

    /// Stops until the debugger resumes the vCPU.
    pub fn halt(&mut self, why: u32) {
        let Some(stops) = self.stops else { return };
        // The event state is checked after the resumption.
        self.vcpu_thread.is_in_guest.store(false, SeqCst);
        self.cancel_interrupt();
        let mut registers = self.debug_registers();
        let before = registers;
        let steps = stops.halt(why, &mut registers);
        self.is_asked = false;
        if registers[..register::CHANGEABLE] != before[..register::CHANGEABLE] {
            for (code, value) in (0..16).zip(registers) {
                self.set_gpr(Gpr::from_code(code), value);
            }
            self.set(Reg::Rip, registers[register::RIP]);
            self.set(Reg::Rflags, registers[register::RFLAGS]);
        }
        self.step = if steps { StepState::Wanted } else { StepState::Nothing };
        // KVM steps from the address in its registers, which must be current.
        self.put_sregs();
        self.fd.set_kvm_immediate_exit(1);
        let result = match self.fd.run() {
            Err(error) if error.errno() != Errno::INTR.raw_os_error() => Err(error),
            _ => Ok(()),
        };
        self.note(result);
        let result = self.fd.set_guest_debug(&debug::control(steps));
        self.note(result);
    }

    /// Returns the registers in the debugger's format.
    pub fn debug_registers(&mut self) -> [u64; register::COUNT] {
        let mut registers = [0; register::COUNT];
        for (code, value) in (0..16).zip(&mut registers) {
            *value = self.gpr(Gpr::from_code(code));
        }
        let sregs = self.sregs();
        registers[register::RIP] = self.regs().rip;
        registers[register::RFLAGS] = self.regs().rflags;
        registers[register::CS] = sregs.cs.selector.into();
        registers[register::SS] = sregs.ss.selector.into();
        registers[register::CR3] = sregs.cr3;
        registers[register::KERNEL_ROOT] = sregs.cr3;
        registers[register::LEVELS] = levels(sregs.cr0, sregs.cr4, sregs.efer);
        registers
    }

    /// Handles an executed `HLT`: the guest's own, or a breakpoint of the debugger.
    pub fn halted(&mut self) -> Option<Exit> {
        let rip = self.regs().rip;
        if let Some(stops) = self.stops {
            let at = rip.wrapping_sub(1);
            let is_breakpoint = stops.shared.has_breakpoint(at);
            // The debugger may have removed the breakpoint and restored the instruction.
            if is_breakpoint || self.code_at(at).is_some_and(|byte| byte != HALT) {
                // The restored instruction has not been executed.
                self.set(Reg::Rip, at);
                if is_breakpoint {
                    self.halt(reason::BREAKPOINT);
                }
                return None;
            }
        }
        self.next_rip = rip;
        if self.step == StepState::Wanted {
            self.step = StepState::Done;
        }
        Some(Exit::Hlt)
    }

    /// Returns the code byte at this value of `RIP`.
    pub fn code_at(&mut self, rip: u64) -> Option<u8> {
        let mut view = CodeView::of(self);
        view.linear = view.linear.wrapping_add(rip.wrapping_sub(self.regs().rip));
        let mut bytes = [0; 15];
        matches!(view.fetch(self.memory, &mut bytes), Ok((1.., _))).then_some(bytes[0])
    }
}

/// Returns the levels of page tables in this mode, as in [`register::LEVELS`].
fn levels(cr0: u64, cr4: u64, efer: u64) -> u64 {
    match (cr0 & cr0::PG != 0, efer & efer::LMA != 0, cr4 & cr4::LA57 != 0) {
        (false, ..) => 0,
        (true, true, is_deep) => 4 + u64::from(is_deep),
        // 32-bit code.
        (true, false, _) => 2,
    }
}
