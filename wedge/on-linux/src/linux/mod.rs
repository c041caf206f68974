//! Interface of the host kernel.

pub mod signals;
