//! Interrupt controllers of the architecture: the local APIC of each CPU, and the I/O APIC.

pub mod io;
pub mod local;
mod message;

pub use message::InterruptMessage;
