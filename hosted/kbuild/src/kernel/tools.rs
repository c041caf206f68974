//! Build tools of the host.

use hosted_command::failure::{self, Failure};
use hosted_command::interrupt::Interruptible;
use hosted_command::supervise::{self, AtEnd};
use std::env;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Output lines shown of a failed program.
const SHOWN_LINES: usize = 40;

/// Creates a command for a build tool. Its environment is nearly empty, because variables could
/// change the result.
pub fn tool(name: &str) -> Result<Command, Failure> {
    let mut command = supervise::command(OsStr::new(name), AtEnd::Terminate)?;
    command.env_clear().env("LC_ALL", "C").stdin(Stdio::null());
    // `depmod` is in the last ones.
    let folders = supervise::search_path().chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    // The folders come from `PATH`, so none contains a colon.
    command.env("PATH", env::join_paths(folders).unwrap_or_default());
    Ok(command)
}

/// Returns the file that a line of `make` reports as compiled or assembled for the kernel.
pub fn compiled(line: &str) -> Option<&str> {
    let mut words = line.split_whitespace();
    let what = words.next()?;
    matches!(what, "CC" | "AS").then(|| words.find(|word| *word != "[M]")).flatten()
}

/// Runs a command and passes on its output lines.
pub fn follow(
    command: &mut Command,
    name: &str,
    interruptible: &Interruptible,
    mut line: impl FnMut(&str),
) -> Result<(), Failure> {
    let result = supervise::follow(command, name, Some(interruptible), SHOWN_LINES, |text| {
        line(text);
        // With parallel compilers, the error is not in the last line.
        compiled(text).is_none()
    })?;
    result.map_err(|last| {
        Failure::new(failure::INTERNAL, format!("{name} failed:\n{}", last.join("\n")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_make() {
        assert_eq!(compiled("  CC      mm/slub.o"), Some("mm/slub.o"));
        assert_eq!(compiled("  CC [M]  net/bridge/br.o"), Some("net/bridge/br.o"));
        assert_eq!(compiled("  HOSTCC  scripts/kallsyms"), None);
        assert_eq!(compiled(""), None);
    }
}
