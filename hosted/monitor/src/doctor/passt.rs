//! Checks for `passt`, which user networks require.

use super::{Finding, State};
use crate::passt::PROGRAM;
use hosted_command::supervise;
use std::path::Path;
use std::process::{Command, Stdio};

pub fn finding() -> Finding {
    let (state, found) = match supervise::find(Path::new(PROGRAM)) {
        None => (State::Absent, "not in PATH: install Debian's package passt".to_owned()),
        Some(path) => {
            let mut command = Command::new(&path);
            command.arg("--version").stdin(Stdio::null()).stderr(Stdio::null());
            let output = command.output().ok().filter(|output| output.status.success());
            let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
            match text.as_deref().and_then(version) {
                Some(version) => (State::Ok, format!("{}, {version}", path.display())),
                None => (State::Absent, format!("{} does not run", path.display())),
            }
        }
    };
    Finding { name: PROGRAM, state, found, purpose: "--net user" }
}

/// Returns the version in the output of `passt --version`. Debian 12's says "unknown version".
fn version(text: &str) -> Option<&str> {
    text.lines().next()?.strip_prefix("passt ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        let text = "passt 0.0~git20230309.7c7625d-1\nCopyright Red Hat\n";
        assert_eq!(version(text), Some("0.0~git20230309.7c7625d-1"));
        assert_eq!(version("passt unknown version\n"), Some("unknown version"));
        assert_eq!(version("pasta 1"), None);
        assert_eq!(version(""), None);
    }
}
