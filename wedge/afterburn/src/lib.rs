//! The afterburner: makes kernels ready to run without privilege, by working on their assembly, not on their source.
//!
//! [`rewrite()`] pads and records sensitive instructions in assembler text, [`assembler`] does so where a compiler
//! calls the assembler.
#![forbid(unsafe_code)]

pub mod assembler;
mod error;
mod lexer;
mod machine;
mod mnemonics;
pub mod rewrite;

pub use error::Error;
pub use rewrite::{Misunderstood, Pads, Rewritten, rewrite};
