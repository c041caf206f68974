//! A Linux host without the standard library, for the wedge's processes and the programs of
//! `hosted/`: system calls, the sandbox of a VM's processes, the engine of raw disks, and the pump
//! of networks.
#![no_std]

#[cfg(test)]
extern crate std;

pub mod disk;
pub mod io_uring;
pub mod net;
pub mod sandbox;
pub mod sys;
