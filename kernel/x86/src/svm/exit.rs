//! Translation between SVM and the vCPU interface: exits (AMD APM vol. 2, chapter 15 and appendix
//! C), events (§15.20) and segments (table B-2).
//!
//! Events and segments of the interface have the layout of the VMCB, so translation only removes
//! undefined bits; the assertions below hold the two definitions together.

use abi::vcpu::exit::{HALT, HYPERCALL, MEMORY_FAULT, UNKNOWN};
use abi::vcpu::memory_fault;
use abi::vcpu::x86::exit::{
    CACHE_FLUSH, CONTROL_REGISTER, CPUID, EXCEPTION, INVALID_STATE, INVALIDATE, IRET, MSR, PAUSE,
    PORT, PROTECTED, SHUTDOWN, TASK_SWITCH, UNDEFINED, WINDOW, XSETBV,
};
use abi::vcpu::x86::{access_rights, control_register, event as neutral, port};
use hw_x86::vmcb::{ControlArea, event, exit, ioio, npf};

use crate::hvm::internal;

/// Exit reasons, indexed by `EXITCODE`.
static REASONS: [u8; 0x90] = {
    let mut table = [0; 0x90];
    let mut code = 0;
    while code < table.len() {
        table[code] = listed_reason(code as u64) as u8;
        code += 1;
    }
    table
};

/// Exit reason of a code in [`REASONS`].
const fn listed_reason(code: u64) -> u64 {
    match code {
        exit::CR0_READ..=exit::CR15_WRITE | exit::CR0_SEL_WRITE => CONTROL_REGISTER,
        exit::MACHINE_CHECK => internal::MACHINE_CHECK,
        exit::EXCEPTION_BASE..=exit::EXCEPTION_LAST => EXCEPTION,
        exit::INTR..=exit::INIT | exit::FERR_FREEZE => internal::HOST_INTERRUPT,
        exit::VINTR => WINDOW,
        exit::INVLPG => INVALIDATE,
        exit::RDPMC => PROTECTED,
        exit::CPUID => CPUID,
        exit::IRET => IRET,
        exit::INVD | exit::WBINVD => CACHE_FLUSH,
        exit::PAUSE => PAUSE,
        exit::HLT => HALT,
        exit::IOIO => PORT,
        exit::MSR => MSR,
        exit::TASK_SWITCH => TASK_SWITCH,
        exit::SHUTDOWN => SHUTDOWN,
        exit::VMMCALL => HYPERCALL,
        exit::XSETBV => XSETBV,
        // Instructions that guests do not have.
        exit::RSM | exit::INVLPGA | exit::RDPRU => UNDEFINED,
        exit::VMRUN | exit::VMLOAD..=exit::SKINIT => UNDEFINED,
        exit::MONITOR..=exit::MWAIT_ARMED => UNDEFINED,
        _ => UNKNOWN,
    }
}

/// Translates `EXITCODE`. `refused` is called for a guest that the processor has not entered.
#[inline(always)]
pub fn reason(code: u64, refused: impl FnOnce()) -> u64 {
    match REASONS.get(code as usize) {
        Some(&reason) => reason.into(),
        None => match code {
            exit::NPF => MEMORY_FAULT,
            exit::INVALID | exit::INVALID_LOW => {
                refused();
                INVALID_STATE
            }
            _ => UNKNOWN,
        },
    }
}

/// Translates `EXITINFO1` of a port access. The interface has the layout of SVM.
#[inline(always)]
pub fn port_info(info1: u64) -> u64 {
    const SIZES: u64 = port::SIZE_MASK << port::SIZE_SHIFT;
    const FIELDS: u64 = port::IN | port::STRING | port::REP | SIZES | 0xffff << port::PORT_SHIFT;
    const _: () = assert!(
        port::IN == ioio::IN
            && port::STRING == ioio::STRING
            && port::REP == ioio::REP
            && port::PORT_SHIFT == ioio::PORT_SHIFT
            && 1 << port::SIZE_SHIFT == ioio::SIZE_8
            && 2 << port::SIZE_SHIFT == ioio::SIZE_16
            && 4 << port::SIZE_SHIFT == ioio::SIZE_32
    );
    info1 & FIELDS
}

/// Translates `EXITINFO1` of a nested page fault.
pub fn memory_fault_info(info1: u64) -> u64 {
    let bit = |from: u64, to: u64| if info1 & from != 0 { to } else { 0 };
    bit(npf::WRITE, memory_fault::WRITE)
        | bit(npf::FETCH, memory_fault::FETCH)
        | bit(npf::WALK, memory_fault::WALK)
}

/// Information of the other exits: 0 if the reason has none.
#[inline]
pub fn info(reason: u64, control: &ControlArea) -> u64 {
    let (code, info1) = (control.exit_code.get(), control.exit_info1.get());
    match reason {
        MSR => info1 & 1,
        CONTROL_REGISTER if code == exit::CR0_SEL_WRITE => control_register::WRITE,
        CONTROL_REGISTER => code & (control_register::REGISTER | control_register::WRITE),
        EXCEPTION => (code - exit::EXCEPTION_BASE) | info1 << 32,
        INVALID_STATE | UNKNOWN => code,
        _ => 0,
    }
}

const _: () = assert!(
    neutral::VECTOR == event::VECTOR
        && neutral::KIND == event::TYPE_MASK
        && neutral::INTERRUPT == event::TYPE_INTR
        && neutral::NMI == event::TYPE_NMI
        && neutral::EXCEPTION == event::TYPE_EXCEPTION
        && neutral::SOFTWARE == event::TYPE_SOFT
        && neutral::HAS_CODE == event::ERROR_VALID
        && neutral::VALID == event::VALID
        && neutral::CODE_SHIFT == 32
);

/// Translates an event to inject to `EVENTINJ`.
pub fn to_event_inj(wanted: u64) -> u64 {
    const FIELDS: u64 = event::VECTOR | event::TYPE_MASK | event::ERROR_VALID | event::VALID;
    wanted & (FIELDS | u64::from(u32::MAX) << neutral::CODE_SHIFT)
}

/// Translates `EXITINTINFO`: event to inject again after an exit that interrupted its delivery, or
/// 0. Software interrupts and exceptions recur, because their instruction has not completed (APM
/// vol. 2 §15.20).
#[inline(always)]
pub fn interrupted_event(info: u64) -> u64 {
    if info & event::VALID == 0 {
        return 0;
    }
    let by_instruction = info & event::TYPE_MASK == event::TYPE_SOFT
        || info & event::TYPE_MASK == event::TYPE_EXCEPTION
            && matches!(info & event::VECTOR, 3 | 4);
    if by_instruction { 0 } else { info }
}

/// Translates the first word of a segment (selector, access rights, limit) for the VMCB.
pub fn to_vmcb_access(word: u64) -> u64 {
    const UNDEFINED_RIGHTS: u64 = (!access_rights::ALL as u64) << 16;
    word & !UNDEFINED_RIGHTS
}

#[cfg(test)]
mod tests {
    use super::*;
    use abi::vcpu::exit::FIRST_OF_ARCH;

    /// Reasons of single exit codes.
    const SINGLE: [(u64, u64); 34] = [
        (exit::MACHINE_CHECK, internal::MACHINE_CHECK),
        (exit::INTR, internal::HOST_INTERRUPT),
        (exit::NMI, internal::HOST_INTERRUPT),
        (exit::SMI, internal::HOST_INTERRUPT),
        (exit::INIT, internal::HOST_INTERRUPT),
        (exit::FERR_FREEZE, internal::HOST_INTERRUPT),
        (exit::VINTR, WINDOW),
        (exit::CR0_SEL_WRITE, CONTROL_REGISTER),
        (exit::INVLPG, INVALIDATE),
        (exit::RDPMC, PROTECTED),
        (exit::CPUID, CPUID),
        (exit::RSM, UNDEFINED),
        (exit::IRET, IRET),
        (exit::INVD, CACHE_FLUSH),
        (exit::WBINVD, CACHE_FLUSH),
        (exit::PAUSE, PAUSE),
        (exit::HLT, HALT),
        (exit::INVLPGA, UNDEFINED),
        (exit::IOIO, PORT),
        (exit::MSR, MSR),
        (exit::TASK_SWITCH, TASK_SWITCH),
        (exit::SHUTDOWN, SHUTDOWN),
        (exit::VMRUN, UNDEFINED),
        (exit::VMMCALL, HYPERCALL),
        (exit::VMLOAD, UNDEFINED),
        (exit::VMSAVE, UNDEFINED),
        (exit::STGI, UNDEFINED),
        (exit::CLGI, UNDEFINED),
        (exit::SKINIT, UNDEFINED),
        (exit::MONITOR, UNDEFINED),
        (exit::MWAIT, UNDEFINED),
        (exit::MWAIT_ARMED, UNDEFINED),
        (exit::XSETBV, XSETBV),
        (exit::RDPRU, UNDEFINED),
    ];

    fn reason(code: u64) -> u64 {
        super::reason(code, || ())
    }

    #[test]
    fn reasons_of_all_codes() {
        for (code, expected) in SINGLE {
            assert_eq!(reason(code), expected, "{code:#x}");
        }
        for code in exit::CR0_READ..=exit::CR15_WRITE {
            assert_eq!(reason(code), CONTROL_REGISTER, "{code:#x}");
        }
        let exceptions = exit::EXCEPTION_BASE..=exit::EXCEPTION_LAST;
        for code in exceptions.filter(|&code| code != exit::MACHINE_CHECK) {
            assert_eq!(reason(code), EXCEPTION, "{code:#x}");
        }
        assert_eq!(reason(exit::NPF), MEMORY_FAULT);
        for code in [exit::INVALID, exit::INVALID_LOW] {
            assert_eq!(reason(code), INVALID_STATE);
        }
        let unknown = [exit::DR0_READ, exit::DR15_WRITE, exit::RDTSC, exit::PUSHF, 0x401, 0xdead];
        for code in unknown {
            assert_eq!(reason(code), UNKNOWN, "{code:#x}");
        }
        // Reasons that the kernel handles itself are not in the interface.
        for code in 0..0x500 {
            let internal = [internal::HOST_INTERRUPT, internal::MACHINE_CHECK];
            let reserved = (UNKNOWN + 1..FIRST_OF_ARCH).contains(&reason(code));
            assert_eq!(reserved, internal.contains(&reason(code)), "{code:#x}");
        }
    }

    #[test]
    fn information() {
        // SAFETY: all fields are integers.
        let control: ControlArea = unsafe { core::mem::zeroed() };
        let of = |code: u64, info1: u64| {
            control.exit_code.set(code);
            control.exit_info1.set(info1);
            (reason(code), info(reason(code), &control))
        };
        assert_eq!(of(exit::MSR, 1), (MSR, 1));
        assert_eq!(of(0x18, 0), (CONTROL_REGISTER, control_register::WRITE | 8));
        assert_eq!(of(0x08, 0), (CONTROL_REGISTER, 8));
        assert_eq!(of(0x41, 0), (EXCEPTION, 1));
        assert_eq!(of(0x51, 5), (EXCEPTION, 17 | 5 << 32));
        assert_eq!(of(exit::INVALID, 0), (INVALID_STATE, u64::MAX));
        assert_eq!(of(0xdead, 7), (UNKNOWN, 0xdead));
        assert_eq!(of(exit::CPUID, 7), (CPUID, 0));
    }

    #[test]
    fn ports_and_memory_faults() {
        let output = 0x3f8 << 16 | ioio::SIZE_8;
        assert_eq!(port_info(output | 1 << 9 | 3 << 10), 0x3f8 << 16 | 1 << port::SIZE_SHIFT);
        let string = ioio::SIZE_32 | ioio::IN | ioio::STRING | ioio::REP;
        assert_eq!(port_info(string), 4 << 4 | port::IN | port::STRING | port::REP);
        assert_eq!(memory_fault_info(npf::WRITE | npf::FINAL), memory_fault::WRITE);
        assert_eq!(
            memory_fault_info(npf::PRESENT | npf::FETCH | npf::WALK),
            memory_fault::FETCH | memory_fault::WALK
        );
    }

    #[test]
    fn events() {
        let page_fault = neutral::VALID | neutral::EXCEPTION | neutral::HAS_CODE | 14 | 2 << 32;
        assert_eq!(to_event_inj(page_fault), page_fault);
        assert_eq!(to_event_inj(u64::MAX), !0x7fff_f000);
        assert_eq!(interrupted_event(page_fault), page_fault);
        assert_eq!(interrupted_event(page_fault & !neutral::VALID), 0);
        for recurring in [neutral::SOFTWARE | 0x80, neutral::EXCEPTION | 3, neutral::EXCEPTION | 4]
        {
            assert_eq!(interrupted_event(neutral::VALID | recurring), 0);
        }
    }

    #[test]
    fn segments_have_no_undefined_rights() {
        assert_eq!(to_vmcb_access(0xffff_ffff_fc9b_0008), 0xffff_ffff_0c9b_0008);
    }
}
