//! Run-time of native programs: start-up, system calls, capability handles, memory, log, panic.
//!
//! All `unsafe` code of the native programs is here; root, servers, VMM and checks are safe Rust.
//!
//! # Why a safe program stays safe
//!
//! Capability selectors are plain numbers and the kernel checks every one: a wrong one gives a
//! `Status`. System calls can break Rust's rules about memory in these ways only:
//!
//! 1. *The kernel writes to memory.* It does so to message pages and vCPU state pages, which it
//!    places itself where nothing is mapped. Message pages are only accessed by copying
//!    ([`Page`]); a state page belongs to one [`Vcpu`], which hands out a reference for as long as it
//!    is not running.
//! 2. *The program changes its own address space.* Pages that are taken away fault, which ends the
//!    program; that is safe. Pages that come must not lie where Rust objects are: the kernel refuses
//!    to map over something, and memory can only be taken away through a [`Window`], so no range that
//!    holds Rust objects ever becomes free. Received memory goes to a range reserved for it.
//! 3. *Others access the program's memory.* Only [`Window`] memory can be delegated, and it holds no Rust
//!    objects: it is read and written by copying in assembly, of which the compiler knows only that bytes
//!    come or go.
//! 4. *Threads start anywhere.* [`thread::spawn`] starts this program's threads on functions with
//!    stacks of their own, guarded by an unmapped page. [`Thread`] handles are only made for tasks that this
//!    program created, so [`Thread::start`] concerns other address spaces.
//! 5. *Ports.* [`Ports`] refuses devices that can be programmed to write to memory by themselves.
//! 6. *Devices in memory.* [`device::Registers`] are accessed by single loads and stores, [`device::Shared`] memory
//!    by copying and as atomic words. A device can be told to write anywhere, so a program that drives one is
//!    trusted to name only shared memory to it; where the machine has an IOMMU, root's and the kernel's settings of it
//!    enforce that.
//!
//! This rests on what the program's creator promises: the kernel for root (`abi::boot`), root for
//! everybody else (`proto::start`): the image, stack and pages are mapped as described there, and
//! windows overlap none of them. With the feature `probe` the argument does not hold, on purpose.
#![cfg_attr(not(test), no_std)]

#[cfg(not(target_arch = "x86_64"))]
compile_error!("native programs run on x86-64 only, so far");

pub mod device;
#[cfg(all(feature = "heap", target_os = "none"))]
pub mod heap;
pub mod log;
pub mod manage;
mod memory;
mod objects;
mod page;
mod port;
#[cfg(feature = "probe")]
pub mod probe;
pub mod random;
mod slots;
pub mod start;
mod syscall;
pub mod thread;
pub mod time;
mod vcpu;

pub use abi::Status;
pub use memory::{
    Space, Window, accept_memory, copy_capability, map_again, received_memory, revoke_capability,
};
pub use objects::{
    Caller, Factory, Gate, Irq, Message, Notification, OwnThread, Platform, SchedContext, Serves,
    Task, Thread, Vm, drop_capability, reply, reply_wait, wait, yield_now,
};
pub use page::Page;
pub use port::Ports;
pub use slots::Slots;
pub use vcpu::Vcpu;
