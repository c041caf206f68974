//! x86-64 hardware definitions from the manuals: layouts and constants only, no behaviour. Each
//! module names its source; "APM" is the AMD64 Architecture Programmer's Manual (24593, 24594).
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod apic;
pub mod cpuid;
pub mod iommu;
pub mod kvm;
pub mod msr;
pub mod paging;
pub mod uart;
pub mod vmcb;
