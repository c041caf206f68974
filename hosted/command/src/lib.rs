//! Parts of every command of `parador`: exit codes and messages, progress, values of options,
//! signals, child programs, Parador's own binaries, the user's cache and downloads.
#![forbid(unsafe_code)]
// It panics where standard error cannot be written: messages::to_stderr.
#![deny(clippy::print_stderr)]

pub mod architecture;
pub mod cache;
pub mod digest;
pub mod disk_lock;
pub mod failure;
pub mod fetch;
pub mod input;
pub mod interrupt;
pub mod keyvalue;
pub mod lock;
pub mod messages;
pub mod output;
pub mod output_folder;
pub mod problem;
pub mod proc_number;
pub mod programs;
pub mod release;
pub mod scratch;
pub mod steps;
pub mod store;
pub mod streams;
pub mod supervise;
pub mod toml_text;
pub mod trust;
pub mod value;
