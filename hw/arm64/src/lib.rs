//! AArch64 hardware definitions from the manuals: layouts and constants only, no behaviour. "Arm
//! ARM" is the Arm Architecture Reference Manual for A-profile (DDI 0487).
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod aarch32;
pub mod esr;
pub mod gic;
pub mod image;
pub mod load_store;
pub mod paging;
pub mod pl011;
pub mod pl031;
pub mod psci;
pub mod registers;
pub mod smmu;
