//! Names of faults (AMD APM vol. 2, section 8.2).

use core::fmt;

/// A fault of a child, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Exception vector.
    pub vector: u64,
    /// Error code.
    pub error: u64,
    /// Address of a page fault.
    pub address: u64,
    /// Instruction pointer.
    pub ip: u64,
}

const PAGE_FAULT: u64 = 14;

impl fmt::Display for Fault {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        let name = match self.vector {
            0 => "division error",
            1 => "debug exception",
            3 => "breakpoint",
            4 => "overflow",
            5 => "bound range exceeded",
            6 => "undefined instruction",
            7 => "device not available",
            10 => "invalid TSS",
            11 => "segment not present",
            12 => "stack fault",
            13 => "general protection fault",
            PAGE_FAULT => "page fault",
            16 | 19 => "floating-point exception",
            17 => "alignment check",
            18 => "machine check",
            21 => "control protection fault",
            _ => "exception",
        };
        if self.vector == PAGE_FAULT {
            let access = match self.error {
                error if error & 1 << 4 != 0 => "executing",
                error if error & 1 << 1 != 0 => "writing",
                _ => "reading",
            };
            let why = if self.error & 1 != 0 { "protected" } else { "unmapped" };
            write!(to, "{name} {access} {why} {:#x}", self.address)?;
        } else {
            write!(to, "{name} (vector {}, error {:#x})", self.vector, self.error)?;
        }
        write!(to, " at ip {:#x}", self.ip)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let fault = Fault { vector: 14, error: 0x7, address: 0x1000, ip: 0x20_0000 };
        assert_eq!(fault.to_string(), "page fault writing protected 0x1000 at ip 0x200000");
        let fault = Fault { vector: 6, error: 0, ..fault };
        assert_eq!(fault.to_string(), "undefined instruction (vector 6, error 0x0) at ip 0x200000");
    }
}
