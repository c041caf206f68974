//! Protocols between native programs, root and VMMs; the compiled system description; shared-memory
//! layouts of hosted VMs.
//!
//! Every message is an `abi::Tag`, whose label is the operation (calls) or a status (replies), up
//! to four register words, and words in the message page. Text and bytes travel in message-page
//! words, little-endian, packed by [`bytes`]. Receivers check every length: no sender is trusted.
//!
//! The badge of the gate identifies the sender, which cannot forge it.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

/// Decodes a code: `Some` of the listed variant with this number.
macro_rules! from_code {
    ($code:ident: $type:ty, $($variant:ident),+) => {
        match $code {
            $(code if code == Self::$variant as $type => Some(Self::$variant),)+
            _ => None,
        }
    };
}

pub mod agent;
pub mod bytes;
pub mod channel;
pub mod console;
pub mod control;
pub mod disk;
pub mod errno;
pub mod hosted;
pub mod log;
pub mod manage;
pub mod net;
pub mod polling;
pub mod ports;
pub mod requests;
pub mod ring;
pub mod service;
pub mod session;
pub mod start;
pub mod system;
#[cfg(test)]
mod testing;
pub mod vsock;
pub mod vtlb;

/// Label of a reply to a valid message.
pub const DONE: u64 = 0;
/// Label of a reply to an unknown operation or to arguments out of range.
pub const REFUSED: u64 = 1;
