//! Devices of an Arm board.

pub mod gic;
pub mod pl011;
pub mod pl031;
