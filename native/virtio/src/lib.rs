//! Driver side of virtio over PCI or MMIO (virtio 1.2, sections 2.7, 4.1 and 4.2): queues and the
//! modern transports. Safe code only: queues are atomic words in memory shared with the device,
//! requests name physical addresses.
//!
//! The `virtio-drivers` crate was considered. It takes requests as Rust slices, but the data of a
//! disk's or network's clients is memory of other tasks; its block driver cannot flush while other
//! requests are in flight; it does not set interrupt vectors; and it trusts the device's ring. The
//! remaining part would be the size of this crate.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

mod mmio;
mod pci;
mod queue;
mod transport;

pub use queue::{Broken, MAX_SIZE, QUEUE_BYTES, Queue, WRITE};
pub use transport::{SetupError, Transport, VERSION_1};
