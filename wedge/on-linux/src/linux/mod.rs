//! Interface of the host kernel.

pub mod signals;
pub mod sys;
