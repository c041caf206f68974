//! `parador`, the host program: makes, checks and starts systems that run on Parador's kernel.
//!
//! Exit codes, messages and option names are an interface; `failure` has the table of codes.
//! Messages go to standard error, what was asked for goes to standard output.
#![forbid(unsafe_code)]

mod afterburn;
mod api;
mod attach;
mod channels;
mod check;
mod commands;
mod config;
mod control;
mod ctl;
mod description;
mod device;
mod disk;
mod doctor;
mod emulate;
mod events;
mod failure;
mod fetch;
mod graph;
mod guest;
mod image;
mod initramfs;
mod interrupt;
mod kernel;
mod keyvalue;
mod kvm;
mod machine;
mod machine_exit;
mod module;
mod net;
mod output;
mod passt;
mod problem;
mod profile;
mod programs;
mod rootfs;
mod run;
mod share;
#[cfg(test)]
mod specification;
mod statistics;
mod steps;
mod supervise;
mod switch;
mod terminal;

use clap::Parser;
use clap::error::ErrorKind;
use std::process::ExitCode;

fn main() -> ExitCode {
    let becomes = supervise::become_other_program()
        .or_else(afterburn::become_assembler)
        .or_else(device::become_device)
        .or_else(switch::become_switch)
        .or_else(kvm::become_machine);
    if let Some(code) = becomes {
        return code;
    }
    let arguments = match commands::Cli::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // Values with a structure of their own say themselves what is wrong with them.
            let value = std::error::Error::source(&error);
            if let Some(failure) = value.and_then(|value| value.downcast_ref::<failure::Failure>())
            {
                failure.print();
                return ExitCode::from(failure.code());
            }
            // Nothing can be done if the message itself cannot be printed.
            let _ = error.print();
            return ExitCode::from(match error.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => 0,
                _ => failure::USAGE,
            });
        }
    };
    match commands::run(arguments) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            failure.print();
            ExitCode::from(failure.code())
        }
    }
}
