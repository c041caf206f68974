//! Interface of the host kernel.

pub mod poll;
pub mod signals;
