//! Failures of the loader (`hosted/loader`) as failures of a command.

use hosted_command::failure::{self, Failure};
use hosted_loader::Error;
use std::path::Path;

/// Creates the failure of a kernel that the loader rejects.
pub fn refused(error: &Error, kernel: &Path) -> Failure {
    let code = match error {
        Error::Host(..) | Error::TooMuchMemory { .. } => failure::OS_ERROR,
        Error::Lacking(_) => failure::UNAVAILABLE,
        _ => failure::BAD_CONFIG,
    };
    let failure = match error {
        Error::Host(action, error) => Failure::os(action, error),
        Error::Lacking(_)
        | Error::TooMuchMemory { .. }
        | Error::TooManyDisks(_)
        | Error::TooManyNets(_)
        | Error::TooManyShares(_) => Failure::new(code, error.to_string()),
        _ => Failure::new(code, format!("{}: {error}", kernel.display())),
    };
    match error.help() {
        Some(help) => failure.help(help),
        None => failure,
    }
}
