//! Interface of the host kernel.

pub mod sys;
