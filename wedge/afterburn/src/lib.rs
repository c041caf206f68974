//! The afterburner: makes kernels ready to run without privilege, by working on their assembly, not on their source.
//!
//! [`rewrite()`] pads and records sensitive instructions in assembler text, [`assembler`] does so where a compiler
//! calls the assembler. [`verify()`] decodes what came out and finds what was missed.
#![forbid(unsafe_code)]

pub mod assembler;
mod error;
mod image;
mod lexer;
mod machine;
mod mnemonics;
pub mod rewrite;
mod tables;
pub mod verify;

pub use error::Error;
pub use rewrite::{Misunderstood, Pads, Rewritten, rewrite};
pub use verify::verify;
