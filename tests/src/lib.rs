//! Starts whole systems in QEMU and holds them to what they must print and return.
//!
//! A test is data: a [`Scenario`](scenario::Scenario) names the system to boot, the input, the
//! texts that must appear on the console and in the kernel's log, and the exit code. One body runs
//! all of them on every [`Backend`](scenario::Backend), through the program that users have:
//! `parador system emulate`. Nothing here outlives the test process: `parador` is killed when its
//! handle goes, and by Linux if this process dies, and takes QEMU with it.
#![forbid(unsafe_code)]

pub mod afterburn;
pub mod arm64;
pub mod bochs;
pub mod debian;
pub mod docs;
pub mod foreign;
pub mod front_door;
pub mod fuzz;
pub mod hosted;
pub mod isolation;
pub mod keys;
pub mod kvm;
pub mod matrix;
pub mod outcome;
pub mod pae;
pub mod previrt;
pub mod refusals;
pub mod repeat;
pub mod runner;
pub mod sandbox;
pub mod scenario;
pub mod system;
pub mod systems;
pub mod terminal;
pub mod tools;
pub mod transcript;
pub mod userland;
