//! The contract of a vCPU, for every guest architecture: what a host provides ([`Vcpu`]), what the
//! machine model provides ([`Platform`]), and why the run loop between the two stops
//! ([`StopReason`]).
//!
//! A run loop enters the guest ([`Vcpu::run`]), handles each exit by means of the platform, and
//! returns when the host is needed. Before an entry it services due timers and pending events
//! ([`Platform::service_timers`]), but only if there may be any ([`Platform::needs_service`]).
//!
//! Invariants:
//! - No event is lost: an event whose delivery an exit interrupted is delivered before any other.
//! - Every guest operation ends in an architectural result (a value, an exception, a reset) or in a
//!   typed outcome, never in a panic.
//! - All state is plain data: no lock, clock, thread or file. Time is passed by the caller, as
//!   ticks of the host's counter.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod clock;
pub mod deadline;
pub mod platform;
pub mod steal;
pub mod stop;
mod vcpu;

pub use clock::CounterClock;
pub use platform::{Platform, Signals};
pub use stop::{Activity, Flow, Outcome, StopReason};
pub use vcpu::{MemoryFault, Vcpu};

/// Maximum number of vCPUs of a VM.
pub const MAX_VCPUS: usize = 8;
