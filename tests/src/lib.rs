//! Starts whole systems in QEMU and holds them to what they must print and return.
//!
//! A test is data: a [`Scenario`](scenario::Scenario) says what to boot, what to type, what must
//! appear on the console and in the kernel's log, and how it must end. One body runs all of them
//! on every [`Backend`](scenario::Backend). Nothing here outlives the test process: QEMU is killed
//! when its handle goes, and by the kernel if this process dies.
#![forbid(unsafe_code)]

pub mod image;
pub mod machine;
pub mod scenario;
pub mod transcript;
