//! The matrix of scenarios and back ends in tests/README.md.

use crate::hosted::linux::LINUX;
use crate::systems::guests::{GUESTS, left_out};
use std::fmt::Write;

/// Groups of back ends of micro-guests, as their tests' names begin.
const GROUPS: [&str; 5] = ["native-x86-npt", "native-x86-vtlb", "bochs", "kvm", "hosted"];
/// Sign of a scenario that runs.
const RUNS: &str = "yes";

/// Returns the matrix in Markdown.
pub fn markdown() -> String {
    let mut rows = Vec::new();
    for &(name, ..) in GUESTS {
        rows.push((name, GROUPS.map(|group| left_out(group, name))));
    }
    for linux in LINUX {
        let native = Some("its Linux guests have scenarios of their own (`src/systems/linux.rs`)");
        let bochs = Some("its emulated machine has no disk");
        rows.push((linux.name, [native, native, bochs, linux.kvm.err(), None]));
    }
    let mut reasons: Vec<&str> = Vec::new();
    let mut text = format!("| scenario | {} |\n|---|---|---|---|---|---|\n", GROUPS.join(" | "));
    for (name, cells) in rows {
        let cells = cells.map(|cell| match cell {
            None => RUNS.to_owned(),
            Some(reason) => {
                let known = reasons.iter().position(|&other| other == reason);
                let index = known.unwrap_or_else(|| {
                    reasons.push(reason);
                    reasons.len() - 1
                });
                format!("no ({})", index + 1)
            }
        });
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| `{name}` | {} |", cells.join(" | "));
    }
    text.push('\n');
    for (index, reason) in reasons.iter().enumerate() {
        let _ = writeln!(text, "{}. {reason}", index + 1);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system::workspace;

    #[test]
    fn the_readme_has_it() {
        let readme = std::fs::read_to_string(workspace().join("tests/README.md")).unwrap();
        assert!(readme.contains(&markdown()), "tests/README.md must contain:\n{}", markdown());
    }
}
