//! Text about operations of a guest that are not emulated.

use core::fmt;

use vmm_arm64::Unknown;

/// Text about an operation that is not emulated.
pub(super) struct Text(pub(super) Unknown);

impl fmt::Display for Text {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Unknown::SystemRegister(register) => {
                let [op0, op1, crn] = [register >> 14, register >> 11 & 7, register >> 7 & 15];
                let [crm, op2] = [register >> 3 & 15, register & 7];
                write!(to, "unknown system register S{op0}_{op1}_C{crn}_C{crm}_{op2}")
            }
            Unknown::Coprocessor(register) => {
                let [opc1, crn] = [register >> 11 & 7, register >> 7 & 15];
                let [crm, opc2] = [register >> 3 & 15, register & 7];
                write!(to, "unknown register p15, {opc1}, c{crn}, c{crm}, {opc2}")
            }
            Unknown::Instruction(address) => {
                write!(to, "no memory or device at guest-physical address {address:#x}")
            }
            Unknown::Call(number) => write!(to, "unknown call {number:#x}"),
            Unknown::Exit(syndrome) => write!(to, "unknown exception with syndrome {syndrome:#x}"),
        }
    }
}
