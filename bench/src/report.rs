//! Results: a printed table, `target/bench.json`, and the series in git.

use crate::promises;
use anyhow::{Context, Result};
use parador_tests::system::{target, workspace};
use serde_json::{Map, Value, json};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::process::Command;

/// One figure.
#[derive(Clone, Debug)]
pub struct Figure {
    /// Key in `bench.json`.
    pub key: String,
    /// Title for people.
    pub title: String,
    /// Measured value.
    pub value: f64,
    /// Unit of the value and of the peer's.
    pub unit: &'static str,
    /// World switches (entries into the guest) per operation; `None` without a guest.
    pub world_switches: Option<f64>,
    /// Figure of the peer for the same operation; `None` without a peer.
    pub peer: Option<f64>,
    /// Largest allowed value, or the least one (`at_least` in `promises.toml`).
    pub limit: f64,
    /// Largest difference between repeated runs, relative to the value.
    pub spread: f64,
}

impl Figure {
    /// Creates a figure of one run, without a peer and world switches, that has a limit in
    /// `promises.toml`.
    pub fn new(key: &str, title: &str, value: f64, unit: &'static str) -> Result<Self> {
        let limit = promises::limit(key)?;
        let (key, title) = (key.to_owned(), title.to_owned());
        Ok(Self { key, title, value, unit, world_switches: None, peer: None, limit, spread: 0.0 })
    }

    /// Returns true if the value keeps its limit.
    pub fn holds(&self) -> bool {
        match promises::is_least(&self.key) {
            true => self.value >= self.limit,
            false => self.value <= self.limit,
        }
    }

    fn json(&self) -> Value {
        json!({
            "value": rounded(self.value),
            "unit": self.unit,
            "world_switches": self.world_switches.map(rounded),
            "peer": self.peer.map(rounded),
        })
    }
}

/// Four decimals, because ratios differ in the third; more for small shares.
pub fn rounded(value: f64) -> f64 {
    let scale = if value.abs() < 0.1 { 1_000_000.0 } else { 10_000.0 };
    (value * scale).round() / scale
}

/// Prints the figures with limits and peers.
pub fn print(figures: &[Figure]) {
    println!(
        "\n{:<46} {:>12} {:>9} {:>9} {:>9} {:>9}  unit",
        "figure", "value", "limit", "peer", "switches", "spread"
    );
    for figure in figures {
        println!(
            "{:<46} {:>12} {:>9} {:>9} {:>9} {:>8.3}%  {}{}",
            figure.title,
            short(figure.value),
            short(figure.limit),
            figure.peer.map_or("-".into(), short),
            figure.world_switches.map_or("-".into(), short),
            figure.spread * 100.0,
            figure.unit,
            if figure.holds() { "" } else { "   MISSED" },
        );
    }
}

/// Formats a value: few digits for small values, no fraction for large ones.
pub fn short(value: f64) -> String {
    match value {
        value if value.fract() == 0.0 || value >= 1000.0 => format!("{value:.0}"),
        value if value >= 20.0 => format!("{value:.1}"),
        value if value < 0.1 => format!("{value:.5}"),
        value => format!("{value:.3}"),
    }
}

/// Writes figures to a file in `target`.
pub fn write_json(name: &str, figures: &[Figure]) -> Result<()> {
    let object: Map<String, Value> =
        figures.iter().map(|figure| (figure.key.clone(), figure.json())).collect();
    write_object(name, &object)
}

/// Writes an object to a file in `target`.
pub fn write_object(name: &str, object: &Map<String, Value>) -> Result<()> {
    let path = target().join(name);
    let text = serde_json::to_string_pretty(object)? + "\n";
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    println!("\nwrote {}", path.display());
    Ok(())
}

/// Returns figures with their spread, as a series keeps them.
pub fn series(figures: &[Figure]) -> Map<String, Value> {
    let keyed = figures.iter().map(|figure| {
        let mut object = figure.json();
        object["spread"] = json!(rounded(figure.spread));
        (figure.key.clone(), object)
    });
    keyed.collect()
}

/// Appends this run to the series in git. `rows` are those of the guest benchmark.
pub fn append_series(figures: &[Figure], rows: Value, guest_kernel: &str) -> Result<()> {
    append_line(
        "native-x86.jsonl",
        &json!({ "guest_kernel": guest_kernel, "figures": series(figures), "guest": rows }),
    )
}

/// Appends an object to a series in git, with commit, date and QEMU's version.
pub fn append_line(name: &str, fields: &Value) -> Result<()> {
    let mut commit = git(&["rev-parse", "--short=12", "HEAD"]);
    if !git(&["status", "--porcelain", "--untracked-files=no"]).is_empty() {
        commit.push_str("-changed");
    }
    let mut line = json!({
        "commit": commit,
        "date": git(&["log", "-1", "--format=%cI"]),
        "qemu": qemu_version(),
    });
    if let (Some(line), Some(fields)) = (line.as_object_mut(), fields.as_object()) {
        line.extend(fields.clone());
    }
    let path = workspace().join("bench/results").join(name);
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)
        .with_context(|| format!("cannot write {}", path.display()))?;
    writeln!(file, "{line}")?;
    println!("added a line to {}", path.display());
    Ok(())
}

/// Returns the version that QEMU prints, such as `7.2.22 (Debian ...)`.
pub fn qemu_version() -> String {
    let text = first_line(Command::new("qemu-system-x86_64").arg("--version"));
    text.trim_start_matches("QEMU emulator version ").to_owned()
}

fn git(arguments: &[&str]) -> String {
    first_line(Command::new("git").args(arguments).current_dir(workspace()))
}

/// Returns the first line of a program's output; empty if it cannot be run, because a figure
/// without its origin is still a figure.
fn first_line(command: &mut Command) -> String {
    let output = command.output().map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_has_the_agreed_keys() {
        let figure = Figure {
            key: String::from("hypercall"),
            title: String::new(),
            value: 101.0,
            unit: "instructions",
            world_switches: Some(1.0),
            peer: None,
            limit: 170.0,
            spread: 0.0,
        };
        let text = figure.json().to_string();
        assert_eq!(
            text,
            r#"{"value":101.0,"unit":"instructions","world_switches":1.0,"peer":null}"#
        );
        assert!(figure.holds());
    }

    #[test]
    fn digits() {
        let texts = [5843.0, 1.0123, 99.56, 0.00123].map(short);
        assert_eq!(texts, ["5843", "1.012", "99.6", "0.00123"]);
    }
}
