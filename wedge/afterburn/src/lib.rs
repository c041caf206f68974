//! The afterburner: makes kernels ready to run without privilege, by working on their assembly, not on their source.
//!
//! [`rewrite()`] pads and records sensitive instructions in assembler text, [`assembler`] does so where a compiler
//! calls the assembler. [`verify()`] decodes what came out and finds what was missed. [`null()`] makes an
//! image of which every site goes through a stub.
#![forbid(unsafe_code)]

pub mod assembler;
mod error;
mod image;
mod lexer;
mod machine;
mod mnemonics;
pub mod null;
pub mod rewrite;
mod sweep;
mod tables;
pub mod verify;

pub use error::Error;
pub use null::null;
pub use rewrite::{Misunderstood, Pad, Rewritten, rewrite};
pub use verify::{Exceptions, verify};
