//! The afterburner: prepares kernels for execution without privilege, by rewriting their assembly,
//! not their source.
//!
//! [`rewrite()`] pads and records sensitive instructions in assembler text; [`assembler`] does so
//! when a compiler runs the assembler. [`verify()`] decodes the result and finds missed
//! instructions. [`null()`] makes an image in which every site jumps to a stub.
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
