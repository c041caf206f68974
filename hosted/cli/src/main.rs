//! `parador`, the host program: builds, validates and starts systems that run on Parador's kernel,
//! and runs VMs on Linux.
//!
//! Exit codes, messages and option names are an interface; `failure` has the table of codes.
//! Messages go to standard error, results to standard output.
#![forbid(unsafe_code)]

use clap::Parser;
use clap::error::ErrorKind;
use hosted_command::failure::{self, Failure};
use hosted_command::messages;
use hosted_command::streams;
use hosted_command::supervise;
use hosted_kbuild::afterburn;
use parador_cli::{commands, foreign, version};
use std::io::{self, Write};
use std::process::ExitCode;

fn main() -> ExitCode {
    let becomes = hosted_monitor::become_part().or_else(afterburn::become_assembler);
    if let Some(code) = becomes {
        return code;
    }
    let mut arguments = supervise::arguments();
    let program = arguments.next();
    if hosted_qemu::is_called_as_qemu(program.as_deref()) {
        return exit_code(hosted_qemu::run(arguments));
    }
    if hosted_oci::is_called_as_runtime(program.as_deref()) {
        return ExitCode::from(hosted_oci::run(arguments));
    }
    messages::set(messages::wanted(supervise::arguments()));
    if let Err(failure) = foreign::check(supervise::arguments()) {
        failure.print();
        return ExitCode::from(failure.code());
    }
    let arguments = match commands::Cli::try_parse_from(supervise::arguments()) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Value parsers with an error of their own return a [`Failure`].
            let value = std::error::Error::source(&error);
            if let Some(failure) = value.and_then(|value| value.downcast_ref::<Failure>()) {
                failure.print();
                return ExitCode::from(own_code(failure.code()));
            }
            if error.kind() == ErrorKind::DisplayVersion && version::is_long(supervise::arguments())
            {
                return shown(streams::write_all(io::stdout(), version::long().as_bytes()));
            }
            if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
                return shown(error.print().and_then(|()| io::stdout().flush()));
            }
            if messages::is_json() {
                let text = error.to_string();
                let text = text.strip_prefix("error: ").unwrap_or(&text);
                let text: Vec<_> =
                    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
                Failure::new(failure::USAGE, text.join("; ")).print();
            } else {
                let _ = error.print();
            }
            return ExitCode::from(own_code(failure::USAGE));
        }
    };
    exit_code(commands::run(arguments))
}

/// Prints a failure, and returns the exit code.
fn exit_code(result: Result<u8, Failure>) -> ExitCode {
    ExitCode::from(result.unwrap_or_else(|failure| {
        failure.print();
        failure.code()
    }))
}

/// Returns the exit code of a text that was asked for. A reader that needs no more is no failure.
fn shown(written: io::Result<()>) -> ExitCode {
    match written {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            let failure = Failure::os("write to standard output", &error);
            failure.print();
            ExitCode::from(own_code(failure.code()))
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Returns whether the arguments are those of `parador exec`.
fn is_exec() -> bool {
    supervise::arguments().nth(1).is_some_and(|command| command == "exec")
}

/// Returns the exit code of a failure: `parador exec` leaves all others to its command.
fn own_code(code: u8) -> u8 {
    if is_exec() { hosted_exec::FAILED } else { code }
}
