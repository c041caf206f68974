//! Devices of a PC.

pub mod debugexit;
pub mod kbd;
pub mod pic;
pub mod pit;
pub mod pm;
pub mod port92;
pub mod post;
pub mod pvpanic;
pub mod reset;
pub mod rtc;
pub mod uart;
