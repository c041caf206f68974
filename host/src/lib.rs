//! A Linux host without the standard library, for the wedge's processes and the programs of
//! `hosted/`: system calls, the sandbox of a VM's processes, and the engine of raw disks.
#![no_std]

#[cfg(test)]
extern crate std;

pub mod disk;
pub mod io_uring;
pub mod sandbox;
pub mod sys;
