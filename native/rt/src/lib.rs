//! Run-time of native programs: start-up, system calls, capability handles, memory, log, panic.
//!
//! All `unsafe` code of the native programs is in this crate; root, servers, VMM and checks are
//! safe Rust.
//!
//! # Soundness argument
//!
//! Capability selectors are plain numbers and the kernel checks every one: an invalid one returns a
//! `Status`. System calls can break Rust's memory rules only in these ways:
//!
//! 1. *The kernel writes to memory.* It writes to message pages and vCPU state pages, which it maps
//!    where nothing was mapped. Message pages are only accessed by copying ([`Page`]); a state page
//!    consists of atomic words.
//! 2. *The program changes its own address space.* An access to an unmapped page faults, which ends
//!    the program; that is safe. New pages must not lie where Rust objects are: the kernel refuses
//!    to map over an existing mapping, and memory can only be unmapped through a [`Window`], so no
//!    range that holds Rust objects ever becomes free. Received memory goes to a reserved range.
//! 3. *Other tasks access the program's memory.* Only [`Window`] memory can be delegated, and it
//!    holds no Rust objects: the program reads and writes it by copying in assembly, which the
//!    compiler sees as opaque.
//! 4. *Threads start at any address.* [`thread::spawn`] starts this program's threads on functions
//!    with stacks of their own, guarded by an unmapped page. [`Thread`] handles are only created
//!    for tasks that this program created, so [`Thread::start`] concerns other address spaces.
//! 5. *Ports.* On x86, `Ports` rejects devices that can be programmed to access memory.
//! 6. *Devices in memory.* [`device::DeviceRegisters`] are accessed by single loads and stores,
//!    [`device::Shared`] memory by copying and as atomic words. A device can be programmed to write
//!    anywhere, so a driver is trusted to pass only shared memory to it; if the platform has an
//!    IOMMU, root and the kernel enforce that.
//!
//! This relies on the guarantees of the program's creator, which are the kernel for root
//! (`abi::boot`) and root for all other programs (`proto::start`): the image, stack and pages are
//! mapped as described there, and windows overlap none of them. The feature `probe` voids the
//! argument deliberately.
#![cfg_attr(not(test), no_std)]

#[cfg_attr(target_arch = "aarch64", path = "arm64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "x86.rs")]
mod processor;

pub mod device;
#[cfg(all(feature = "heap", target_os = "none"))]
pub mod heap;
pub mod log;
pub mod manage;
mod memory;
mod objects;
mod page;
#[cfg(target_arch = "x86_64")]
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
    Space, Window, accept_memory, copy_capability, map_alias, received_memory, revoke_capability,
};
pub use objects::{
    Factory, Gate, Incoming, Irq, Message, Notification, OwnThread, Platform, SchedContext,
    ServerThread, Task, Thread, Vm, drop_capability, reply, reply_wait, wait, yield_now,
};
pub use page::Page;
#[cfg(target_arch = "x86_64")]
pub use port::Ports;
pub use slots::Slots;
pub use vcpu::{SharedVcpu, Vcpu};
