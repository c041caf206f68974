//! Decoding of SVM exits (AMD APM vol. 2, chapter 15 and appendix C).

use hw_x86::vmcb::{exit, ioio, npf};

use vmm_vcpu::MemoryFault;

use crate::exit::{Exit, IoExit};

/// Description of `VMEXIT_INVALID` (APM vol. 2, section 15.5.1).
const INVALID: &str = "the CPU rejected the guest state (VMEXIT_INVALID)";

/// Translates `EXITCODE`, `EXITINFO1` and `EXITINFO2`. The back end first decodes exit codes that
/// the kernel adds to those of the CPU.
#[inline]
pub fn decode(code: u64, info1: u64, info2: u64) -> Exit {
    match code {
        exit::CPUID => Exit::Cpuid,
        exit::IOIO => Exit::Io(decode_io(info1, info2)),
        exit::MSR => Exit::Msr { write: info1 & 1 != 0 },
        exit::HLT => Exit::Hlt,
        exit::VMMCALL => Exit::Hypercall,
        exit::NPF => Exit::MemoryFault(MemoryFault {
            gpa: info2,
            write: info1 & npf::WRITE != 0,
            fetch: info1 & npf::FETCH != 0,
            walk: info1 & npf::WALK != 0,
        }),
        exit::SHUTDOWN => Exit::Shutdown,
        exit::XSETBV => Exit::Xsetbv,
        exit::INVD | exit::WBINVD => Exit::CacheFlush,
        exit::PAUSE => Exit::Pause,
        exit::MONITOR
        | exit::MWAIT
        | exit::MWAIT_ARMED
        | exit::RDPRU
        | exit::VMRUN
        | exit::VMLOAD
        | exit::VMSAVE
        | exit::STGI
        | exit::CLGI
        | exit::SKINIT
        | exit::INVLPGA
        | exit::RSM => Exit::Undefined,
        exit::RDPMC => Exit::Protected,
        // The kernel handles machine checks.
        exit::EXCEPTION_BASE..=exit::EXCEPTION_LAST if code != exit::MACHINE_CHECK => {
            Exit::Exception { vector: (code - exit::EXCEPTION_BASE) as u8, code: info1 as u32 }
        }
        exit::IRET => Exit::Iret,
        exit::TASK_SWITCH => Exit::TaskSwitch,
        exit::CR0_READ..=exit::CR15_WRITE => {
            Exit::CrAccess { register: (code & 15) as u8, write: code & 16 != 0 }
        }
        exit::INTR | exit::NMI | exit::SMI | exit::INIT | exit::FERR_FREEZE => Exit::Spurious,
        exit::VINTR => Exit::InterruptWindow,
        exit::INVALID | exit::INVALID_LOW => Exit::InvalidState { why: INVALID, code },
        _ => Exit::Unknown(code),
    }
}

/// Decodes `EXITINFO1` and `EXITINFO2` of an IOIO exit (APM vol. 2, section 15.10.2).
fn decode_io(info1: u64, info2: u64) -> IoExit {
    let size = if info1 & ioio::SIZE_8 != 0 {
        1
    } else if info1 & ioio::SIZE_16 != 0 {
        2
    } else {
        4
    };
    IoExit {
        port: (info1 >> ioio::PORT_SHIFT) as u16,
        size,
        write: info1 & ioio::IN == 0,
        string: info1 & ioio::STRING != 0,
        rep: info1 & ioio::REP != 0,
        next_rip: info2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn io() {
        let exit = decode(exit::IOIO, 0x3f8 << 16 | ioio::SIZE_8, 0x1002);
        let expected = IoExit {
            port: 0x3f8,
            size: 1,
            write: true,
            string: false,
            rep: false,
            next_rip: 0x1002,
        };
        assert_eq!(exit, Exit::Io(expected));
        let Exit::Io(io) =
            decode(exit::IOIO, ioio::SIZE_32 | ioio::IN | ioio::STRING | ioio::REP, 0)
        else {
            panic!("not an I/O exit");
        };
        assert!((io.size, io.write, io.string, io.rep) == (4, false, true, true));
    }

    #[test]
    fn memory_fault() {
        let exit = decode(exit::NPF, npf::WRITE | npf::FINAL, 0xfee0_00b0);
        let fault = MemoryFault { gpa: 0xfee0_00b0, write: true, fetch: false, walk: false };
        assert_eq!(exit, Exit::MemoryFault(fault));
    }

    #[test]
    fn ranges() {
        assert_eq!(decode(0x18, 0, 0), Exit::CrAccess { register: 8, write: true });
        assert_eq!(decode(0x08, 0, 0), Exit::CrAccess { register: 8, write: false });
        assert_eq!(decode(exit::RDPMC, 0, 0), Exit::Protected);
        assert_eq!(decode(exit::VMRUN, 0, 0), Exit::Undefined);
        assert_eq!(decode(0x41, 0, 0), Exit::Exception { vector: 1, code: 0 });
        assert_eq!(decode(0x51, 0, 0), Exit::Exception { vector: 17, code: 0 });
        assert_eq!(decode(exit::MACHINE_CHECK, 0, 0), Exit::Unknown(0x52));
        assert_eq!(decode(0xdead, 0, 0), Exit::Unknown(0xdead));
        for code in [u64::MAX, 0xffff_ffff] {
            assert_eq!(decode(code, 0, 0), Exit::InvalidState { why: INVALID, code });
        }
    }
}
