//! Handlers of VM exits.

use hw_x86::apic::local;
use hw_x86::kvm::hypercall;
use hw_x86::msr::APIC_BASE;
use hw_x86::paging::xcr0;
use vmm_vcpu::{Activity, Flow, MAX_VCPUS, MemoryFault, Outcome, StopReason};

use super::Cpu;
use super::exception::{PROTECTION, UNDEFINED, interrupt_repetition, retire};
use crate::apic::InterruptMessage;
use crate::cpuid::{CpuView, Patch, Values};
use crate::exit::{Access, Exit, IoExit, Space};
use crate::length::Pattern;
use crate::platform::{Emulated, PcPlatform, Unknown};
use crate::pv::ApicIds;
use crate::registers::{Gpr, Reg};
use crate::vcpu::{InterruptWindow, X86Vcpu};

/// `APIC_BASE`: the local APIC is enabled.
pub(super) const APIC_ENABLED: u64 = 1 << 11;

impl Cpu {
    #[inline(always)]
    pub(super) fn cpuid<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P) {
        let Some(next) = self.fetch.next_rip(vcpu, platform.memory(), Pattern::CPUID) else {
            return self.inject_ud(vcpu, platform);
        };
        let (number, subleaf) = (vcpu.gpr(Gpr::Rax) as u32, vcpu.gpr(Gpr::Rcx) as u32);
        let (values, patch) = platform.cpuid().lookup(number, subleaf);
        let patched;
        let values = match patch {
            Patch::None => values,
            _ => {
                let values = *values;
                patched = self.patch_cpuid(vcpu, platform, &values, patch);
                &patched
            }
        };
        vcpu.set_gpr(Gpr::Rax, values[0].into());
        vcpu.set_gpr(Gpr::Rbx, values[1].into());
        vcpu.set_gpr(Gpr::Rcx, values[2].into());
        vcpu.set_gpr(Gpr::Rdx, values[3].into());
        retire(vcpu, next);
    }

    #[inline(never)]
    pub(super) fn patch_cpuid<V: X86Vcpu, P: PcPlatform>(
        &self,
        vcpu: &mut V,
        platform: &mut P,
        values: &Values,
        patch: Patch,
    ) -> Values {
        let cr4 = vcpu.get(Reg::Cr4);
        let xcr0 = match patch {
            Patch::XsaveSize | Patch::XsaveCompactSize => vcpu.get(Reg::Xcr0),
            // Few leaves depend on it, and the back end may have to fetch it.
            _ => 0,
        };
        let apic = match patch {
            Patch::Features | Patch::AmdFeatures => {
                let base = platform.apic_read(self.index, APIC_BASE);
                base.is_none_or(|base| base & APIC_ENABLED != 0)
            }
            _ => true,
        };
        let vtlb_events = match patch {
            Patch::VtlbEvents(index) => vcpu.vtlb_events(index),
            _ => None,
        };
        let view = CpuView { apic_id: self.index as u32, cr4, xcr0, apic, vtlb_events };
        platform.cpuid().patch(values, patch, view)
    }

    #[inline(always)]
    pub(super) fn port<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        io: IoExit,
    ) {
        // The CPU always reports the address after `IN` and `OUT` (EXITINFO2).
        if io.next_rip == 0 {
            return self.inject_ud(vcpu, platform);
        }
        let rax = vcpu.gpr(Gpr::Rax);
        if io.write {
            platform.port_out(io.port, io.size, rax as u32 & mask(io.size));
        } else {
            let value = platform.port_in(io.port, io.size) & mask(io.size);
            // A 32-bit result clears the upper half; narrower results keep the other bits.
            let kept = if io.size == 4 { 0 } else { rax & !u64::from(mask(io.size)) };
            vcpu.set_gpr(Gpr::Rax, kept | u64::from(value));
        }
        retire(vcpu, io.next_rip);
    }

    #[inline(never)]
    pub(super) fn msr<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        write: bool,
    ) {
        let pattern = if write { Pattern::WRMSR } else { Pattern::RDMSR };
        let Some(next) = self.fetch.next_rip(vcpu, platform.memory(), pattern) else {
            return self.inject_ud(vcpu, platform);
        };
        let msr = vcpu.gpr(Gpr::Rcx) as u32;
        let done = if write {
            let value = vcpu.gpr(Gpr::Rdx) << 32 | vcpu.gpr(Gpr::Rax) & 0xffff_ffff;
            self.write_msr(vcpu, platform, msr, value)
        } else {
            self.read_msr(vcpu, platform, msr).map(|value| {
                vcpu.set_gpr(Gpr::Rax, value & 0xffff_ffff);
                vcpu.set_gpr(Gpr::Rdx, value >> 32);
            })
        };
        match done {
            Some(()) => retire(vcpu, next),
            None => self.raise(vcpu, PROTECTION),
        }
    }

    #[inline(never)]
    pub(super) fn handle_slow_exit<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        exit: Exit,
    ) -> Flow {
        match exit {
            Exit::Io(io) => {
                let emulated = platform.emulate_io(self.index, vcpu, io);
                self.emulated(vcpu, emulated);
            }
            Exit::MemoryFault(fault) => self.memory_fault(vcpu, platform, fault)?,
            Exit::Access(access) => self.access(vcpu, platform, access),
            Exit::Hlt => {
                if self.skip(vcpu, platform, Pattern::HLT) {
                    self.activity = Activity::Halted;
                    self.needs_service = true;
                }
            }
            Exit::Halted { events } => {
                if self.skip(vcpu, platform, Pattern::HLT) {
                    self.activity = Activity::Halted;
                }
                return Err(StopReason::Recall(events));
            }
            Exit::Hypercall => self.hypercall(vcpu, platform),
            Exit::InterruptWindow => {
                self.window = InterruptWindow::Nothing;
                self.needs_service = true;
            }
            Exit::Deadline => {
                self.deadline.passed();
                self.needs_service = true;
            }
            Exit::Recall { events } => return Err(StopReason::Recall(events)),
            Exit::Xsetbv => self.xsetbv(vcpu, platform),
            Exit::CacheFlush => _ = self.skip(vcpu, platform, Pattern::CACHE_FLUSH),
            Exit::Pause => _ = self.skip(vcpu, platform, Pattern::PAUSE),
            Exit::CrAccess { .. } | Exit::InvalidatePage => self.control(vcpu, platform)?,
            Exit::PageFault { address, code } => self.page_fault(vcpu, address, code)?,
            Exit::Exception { vector, code } => self.exception(vcpu, platform, vector, code)?,
            Exit::Undefined => self.raise(vcpu, UNDEFINED),
            Exit::Protected => self.raise(vcpu, PROTECTION),
            Exit::Iret => self.nmi_mask.begin_return(vcpu),
            Exit::TaskSwitch => self.inject_ud(vcpu, platform),
            Exit::Spurious => {}
            Exit::Shutdown => return Err(StopReason::End(Outcome::TripleFault)),
            Exit::InvalidState { why, code } => {
                platform.unknown(Unknown::Other(why, code));
                return Err(StopReason::End(Outcome::TripleFault));
            }
            Exit::HostError(code) => return Err(StopReason::End(Outcome::HostError(code))),
            Exit::Unknown(code) => {
                platform.unknown(Unknown::Exit(code));
                return Err(StopReason::End(Outcome::HostError(code)));
            }
            Exit::Cpuid | Exit::Msr { .. } => {}
        }
        Ok(())
    }

    /// Performs an access for an instruction that the host emulates.
    pub(super) fn access<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        access: Access,
    ) {
        let Access { space, address, size, value } = access;
        let answer = match (space, value) {
            (Space::Port, None) => Some(platform.port_in(address as u16, size).into()),
            (Space::Port, Some(value)) => {
                platform.port_out(address as u16, size, value as u32);
                Some(0)
            }
            (Space::Memory, None) => Some(platform.mmio_read(self.index, address, size)),
            (Space::Memory, Some(value)) => {
                platform.mmio_write(self.index, address, size, value);
                Some(0)
            }
            (Space::Msr, None) => self.read_msr(vcpu, platform, address as u32),
            (Space::Msr, Some(value)) => {
                self.write_msr(vcpu, platform, address as u32, value).map(|()| 0)
            }
        };
        vcpu.complete_access(answer);
    }

    pub(super) fn memory_fault<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        fault: MemoryFault,
    ) -> Flow {
        if vcpu.event().is_some() {
            // The interrupt's stack or table is not memory: there is no instruction to emulate, and
            // another delivery would exit here again.
            platform.unknown(Unknown::Other("event delivery outside memory", fault.gpa));
            return Err(StopReason::End(Outcome::TripleFault));
        }
        if fault.walk {
            platform.unknown(Unknown::Other("page tables outside memory", fault.gpa));
            return Err(StopReason::End(Outcome::TripleFault));
        }
        if fault.fetch {
            // No device responds, so all bits read as 1: FF FF is an undefined opcode.
            platform.unknown(Unknown::Other("code outside memory", fault.gpa));
            self.raise(vcpu, UNDEFINED);
            return Ok(());
        }
        let emulated = platform.emulate_memory(self.index, vcpu, fault);
        self.emulated(vcpu, emulated);
        Ok(())
    }

    pub(super) fn emulated<V: X86Vcpu>(&mut self, vcpu: &mut V, emulated: Emulated) {
        match emulated {
            Emulated::Next(next) => retire(vcpu, next),
            Emulated::Again => interrupt_repetition(vcpu),
            Emulated::Raise(event) => self.raise(vcpu, event),
            Emulated::Unknown => self.raise(vcpu, UNDEFINED),
        }
    }

    pub(super) fn hypercall<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P) {
        let number = vcpu.gpr(Gpr::Rax);
        if !self.skip(vcpu, platform, Pattern::VMMCALL) {
            return;
        }
        let result = match number {
            _ if vcpu.get(Reg::Cpl) != 0 => hypercall::NOT_PERMITTED as u64,
            hypercall::SEND_IPI => send_ipi(vcpu, platform) as u64,
            _ => platform.hypercall(vcpu).unwrap_or_else(|| {
                platform.unknown(Unknown::Hypercall(number));
                hypercall::UNKNOWN as u64
            }),
        };
        vcpu.set_gpr(Gpr::Rax, result);
    }

    /// APM vol. 4, `XSETBV`: at CPL 0 only, register 0 only, x87 always set, AVX only with SSE.
    pub(super) fn xsetbv<V: X86Vcpu, P: PcPlatform>(&mut self, vcpu: &mut V, platform: &mut P) {
        let Some(next) = self.fetch.next_rip(vcpu, platform.memory(), Pattern::XSETBV) else {
            return self.inject_ud(vcpu, platform);
        };
        let value = vcpu.gpr(Gpr::Rdx) << 32 | vcpu.gpr(Gpr::Rax) & 0xffff_ffff;
        let register = vcpu.gpr(Gpr::Rcx) as u32;
        let allowed = platform.cpuid().xcr0_allowed();
        let avx512 = value & xcr0::AVX512;
        // The intercept may precede the check of the privilege level by the processor.
        let good = vcpu.get(Reg::Cpl) == 0
            && register == 0
            && value & !allowed == 0
            && value & xcr0::X87 != 0
            && (value & xcr0::AVX == 0 || value & xcr0::SSE != 0)
            && (avx512 == 0 || avx512 == xcr0::AVX512 && value & xcr0::AVX != 0);
        if !good {
            return self.raise(vcpu, PROTECTION);
        }
        vcpu.set(Reg::Xcr0, value);
        retire(vcpu, next);
    }

    /// Advances past the current instruction; raises `#UD` and returns `false` if it is not
    /// `pattern`.
    #[inline(never)]
    pub(super) fn skip<V: X86Vcpu, P: PcPlatform>(
        &mut self,
        vcpu: &mut V,
        platform: &mut P,
        pattern: Pattern,
    ) -> bool {
        match self.fetch.next_rip(vcpu, platform.memory(), pattern) {
            Some(next) => {
                retire(vcpu, next);
                true
            }
            None => {
                self.inject_ud(vcpu, platform);
                false
            }
        }
    }
}

/// Handles [`hypercall::SEND_IPI`]; returns the value for `rax`.
fn send_ipi<V: X86Vcpu, P: PcPlatform>(vcpu: &mut V, platform: &mut P) -> i64 {
    const DELIVERY: u32 = 7 << 8;
    let command = vcpu.gpr(Gpr::Rsi) as u32;
    let delivery = command & DELIVERY;
    let to_few = command & (local::ICR_LOGICAL | local::ICR_SHORTHAND) == 0;
    if !to_few || delivery != 0 && delivery != local::DELIVER_NMI {
        return hypercall::INVALID;
    }
    // The second half begins at 32 in a 32-bit guest: no VM has that many CPUs.
    const { assert!(MAX_VCPUS <= 32) };
    let [low, high] = [Gpr::Rbx, Gpr::Rcx].map(|half| u128::from(vcpu.gpr(half)));
    let to = ApicIds { first: vcpu.gpr(Gpr::Rdx) as u32, set: low | high << 64 };
    let message = InterruptMessage {
        destination: 0,
        logical: false,
        delivery: (delivery >> 8) as u8,
        vector: command as u8,
        level: false,
    };
    platform.multicast(to, message).into()
}

#[inline]
fn mask(size: u8) -> u32 {
    u32::MAX >> (32 - 8 * u32::from(size.clamp(1, 4)))
}
