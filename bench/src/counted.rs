//! Exact counts between two marks in a guest program, by a QEMU plugin (`bench/plugin/count.c`).
//!
//! QEMU's own instruction clock is not enough: it advances while the machine waits for a disk.

use crate::guest::folder;
use anyhow::{Context, Error, Result, bail};
use parador_tests::system::workspace;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The compiled plugin and the path of its output.
pub struct Counter {
    plugin: PathBuf,
    to: PathBuf,
}

/// Events between the marks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Counts {
    /// Instructions of the whole machine.
    pub instructions: f64,
    /// World switches into guests.
    pub entries: f64,
}

impl Counter {
    /// Compiles the plugin, if this process has not. `name` names the file with the counts.
    pub fn new(name: &str) -> Result<Self> {
        // Another system may be loading the file.
        static PLUGIN: OnceLock<Result<PathBuf, String>> = OnceLock::new();
        let plugin = PLUGIN.get_or_init(|| compile().map_err(|error| format!("{error:#}")));
        let plugin = plugin.clone().map_err(Error::msg)?;
        Ok(Self { plugin, to: folder().join(name).with_extension("counts") })
    }

    /// Arguments for QEMU.
    pub fn arguments(&self) -> [String; 2] {
        let text = |path: &Path| path.display().to_string().replace(',', ",,");
        ["-plugin".into(), format!("{},to={}", text(&self.plugin), text(&self.to))]
    }

    /// Arguments for QEMU to count only world switches, which slows it less.
    pub fn entries_only(&self) -> [String; 2] {
        let [option, plugin] = self.arguments();
        [option, plugin + ",instructions=off"]
    }

    /// Reads the counts of the only measurement after the run.
    pub fn read(&self) -> Result<Counts> {
        self.read_all()?.first().copied().context("the program was not run")
    }

    /// Reads the counts of all measurements after the run, in their order.
    pub fn read_all(&self) -> Result<Vec<Counts>> {
        let text = fs::read_to_string(&self.to)
            .with_context(|| format!("cannot read {}", self.to.display()))?;
        between_marks(&text).with_context(|| format!("marks do not alternate: {text:?}"))
    }
}

/// Compiles the plugin.
fn compile() -> Result<PathBuf> {
    let plugin = folder().join("count.so");
    let compiled = Command::new("gcc")
        .args(["-O2", "-Wall", "-shared", "-fPIC", "-fvisibility=hidden", "-o"])
        .args([&plugin, &workspace().join("bench/plugin/count.c")])
        .status()
        .context("cannot start gcc")?;
    if !compiled.success() {
        bail!("gcc cannot compile the plugin that counts");
    }
    Ok(plugin)
}

/// Returns the differences between the marks 1 and 2, which alternate.
fn between_marks(text: &str) -> Option<Vec<Counts>> {
    let mark = |line: &str, number: &str| {
        let counts = line.strip_prefix(number)?.strip_prefix(' ')?;
        let (instructions, entries) = counts.split_once(' ')?;
        Some((instructions.parse::<u64>().ok()?, entries.parse::<u64>().ok()?))
    };
    let since = |start: u64, end: u64| end.checked_sub(start).map(|count| count as f64);
    let lines: Vec<&str> = text.lines().collect();
    let pairs = lines.chunks(2).map(|pair| {
        let (start, end) = (mark(pair[0], "1")?, mark(pair.get(1)?, "2")?);
        Some(Counts { instructions: since(start.0, end.0)?, entries: since(start.1, end.1)? })
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_of_marks() {
        let counts = Counts { instructions: 90.0, entries: 4.0 };
        assert_eq!(between_marks("1 10 1\n2 100 5\n"), Some(vec![counts]));
        let second = Counts { instructions: 7.0, entries: 0.0 };
        let text = "1 10 1\n2 100 5\n1 200 5\n2 207 5\n";
        assert_eq!(between_marks(text), Some(vec![counts, second]));
        assert_eq!(between_marks("1 10 1\n1 100 5\n"), None);
        assert_eq!(between_marks(""), Some(vec![]));
        assert_eq!(between_marks("1 10 1\n"), None);
        assert_eq!(between_marks("1 10 1\n2 9 5\n"), None);
    }
}
