//! The guest architecture x86-64: the interface to a host's vCPU ([`X86Vcpu`]), the exit reasons
//! ([`Exit`]), the platform around it ([`PcPlatform`]), and the CPU that the guest sees. The
//! invariants are those of [`vmm_vcpu`].
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod apic;
pub mod control;
pub mod cpuid;
pub mod exit;
pub mod length;
pub mod msr;
mod nmi;
pub mod platform;
pub mod pv;
pub mod registers;
pub mod run;
pub mod vcpu;
pub mod walk;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use control::{ControlAccess, DecodedControl};
pub use exit::{Access, Exit, IoExit, Space};
pub use platform::{Acknowledged, Interrupts, PcPlatform, PendingInterrupt, Unknown};
pub use registers::{Gpr, Groups, Reg, Registers, Seg, Segment};
pub use run::Cpu;
pub use vcpu::{Event, InterruptWindow, X86Vcpu};
