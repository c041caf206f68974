//! Decoding of a vCPU's exit from its state page ([`abi::vcpu`]).

use abi::vcpu::x86::{VcpuState, control_register, exit as x86_exit, port};
use abi::vcpu::{exit, memory_fault};
use vmm_vcpu::MemoryFault;
use vmm_x86::exit::{Exit, IoExit};

use super::guest_virtual::GuestVirtual;

/// Description of [`x86_exit::INVALID_STATE`].
const INVALID: &str = "the CPU rejected the guest state";

/// Vector of a page fault.
const PAGE_FAULT: u8 = 14;

/// Returns the exit for `reason`, which the kernel has reported in the state page. A page fault in
/// a guest-virtual space is handled there.
#[inline(always)]
pub fn decode(reason: u64, state: &VcpuState, space: &mut Option<GuestVirtual<'_>>) -> Exit {
    let run = &state.run;
    match reason {
        x86_exit::CPUID => Exit::Cpuid,
        x86_exit::PORT => Exit::Io(decode_port(run.exit_info.get(), state.next_rip.get())),
        x86_exit::MSR => Exit::Msr { write: run.exit_info.get() != 0 },
        x86_exit::WINDOW => Exit::InterruptWindow,
        exit::HALT => Exit::Hlt,
        exit::HALTED => Exit::Halted { events: run.events.get() },
        exit::RECALL => Exit::Recall { events: run.events.get() },
        exit::DEADLINE => Exit::Deadline,
        exit::HYPERCALL => Exit::Hypercall,
        exit::MEMORY_FAULT => {
            Exit::MemoryFault(decode_memory_fault(run.exit_info.get(), run.fault_address.get()))
        }
        _ => decode_rare(reason, state, space),
    }
}

/// Exits that are not worth space in the run loop.
#[cold]
#[inline(never)]
fn decode_rare(reason: u64, state: &VcpuState, space: &mut Option<GuestVirtual<'_>>) -> Exit {
    let (info, address) = (state.run.exit_info.get(), state.run.fault_address.get());
    match reason {
        x86_exit::SHUTDOWN => Exit::Shutdown,
        x86_exit::CONTROL_REGISTER => Exit::CrAccess {
            register: (info & control_register::REGISTER) as u8,
            write: info & control_register::WRITE != 0,
        },
        x86_exit::INVALIDATE => Exit::InvalidatePage,
        x86_exit::EXCEPTION if info as u8 == PAGE_FAULT => match space {
            Some(space) => space.page_fault(state),
            None => Exit::PageFault { address, code: (info >> 32) as u32 },
        },
        x86_exit::EXCEPTION => Exit::Exception { vector: info as u8, code: (info >> 32) as u32 },
        x86_exit::XSETBV => Exit::Xsetbv,
        x86_exit::CACHE_FLUSH => Exit::CacheFlush,
        x86_exit::PAUSE => Exit::Pause,
        x86_exit::UNDEFINED => Exit::Undefined,
        x86_exit::PROTECTED => Exit::Protected,
        x86_exit::IRET => Exit::Iret,
        x86_exit::TASK_SWITCH => Exit::TaskSwitch,
        x86_exit::INVALID_STATE => Exit::InvalidState { why: INVALID, code: info },
        _ => Exit::Unknown(info),
    }
}

#[inline(always)]
fn decode_port(info: u64, next_rip: u64) -> IoExit {
    IoExit {
        port: (info >> port::PORT_SHIFT) as u16,
        size: (info >> port::SIZE_SHIFT & port::SIZE_MASK) as u8,
        write: info & port::IN == 0,
        string: info & port::STRING != 0,
        rep: info & port::REP != 0,
        next_rip,
    }
}

#[inline]
fn decode_memory_fault(info: u64, gpa: u64) -> MemoryFault {
    MemoryFault {
        gpa,
        write: info & memory_fault::WRITE != 0,
        fetch: info & memory_fault::FETCH != 0,
        walk: info & memory_fault::WALK != 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes an exit with this information.
    fn decoded(reason: u64, info: u64) -> Exit {
        let page = VcpuState::default();
        page.run.exit_info.set(info);
        page.run.events.set(5);
        page.run.fault_address.set(0xfee0_00b0);
        page.next_rip.set(0x1002);
        decode(reason, &page, &mut None)
    }

    #[test]
    fn ports() {
        let io = IoExit {
            port: 0x3f8,
            size: 1,
            write: true,
            string: false,
            rep: false,
            next_rip: 0x1002,
        };
        let info = 0x3f8 << port::PORT_SHIFT | 1 << port::SIZE_SHIFT;
        assert_eq!(decoded(x86_exit::PORT, info), Exit::Io(io));
        let info = 0x3f8 << 16 | 4 << port::SIZE_SHIFT | port::IN | port::STRING | port::REP;
        let io = IoExit { size: 4, write: false, string: true, rep: true, ..io };
        assert_eq!(decoded(x86_exit::PORT, info), Exit::Io(io));
    }

    #[test]
    fn memory_faults() {
        let write = MemoryFault { gpa: 0xfee0_00b0, write: true, fetch: false, walk: false };
        let walk = MemoryFault { write: false, fetch: true, walk: true, ..write };
        for (info, fault) in
            [(memory_fault::WRITE, write), (memory_fault::FETCH | memory_fault::WALK, walk)]
        {
            assert_eq!(decoded(exit::MEMORY_FAULT, info), Exit::MemoryFault(fault));
        }
    }

    #[test]
    fn details() {
        for (reason, info, expected) in [
            (exit::RECALL, 0, Exit::Recall { events: 5 }),
            (exit::HALTED, 0, Exit::Halted { events: 5 }),
            (exit::UNKNOWN, 0x87, Exit::Unknown(0x87)),
            (x86_exit::MSR, 0, Exit::Msr { write: false }),
            (x86_exit::MSR, 1, Exit::Msr { write: true }),
            (x86_exit::CONTROL_REGISTER, 0x18, Exit::CrAccess { register: 8, write: true }),
            (x86_exit::CONTROL_REGISTER, 0x04, Exit::CrAccess { register: 4, write: false }),
            (x86_exit::INVALIDATE, 0, Exit::InvalidatePage),
            (x86_exit::EXCEPTION, 14 | 7 << 32, Exit::PageFault { address: 0xfee0_00b0, code: 7 }),
            (x86_exit::EXCEPTION, 17 | 5 << 32, Exit::Exception { vector: 17, code: 5 }),
            (
                x86_exit::INVALID_STATE,
                u64::MAX,
                Exit::InvalidState { why: INVALID, code: u64::MAX },
            ),
        ] {
            assert_eq!(decoded(reason, info), expected);
        }
    }
}
