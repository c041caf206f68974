//! Command line of the program `parador`, which `hosted/documents` reads, too.
#![forbid(unsafe_code)]

pub mod commands;
pub mod foreign;
pub mod version;
