//! Licences of the packages from crates.io that the programs in the package contain.

use crate::process::{output, workspace};
use crate::toolchain::host_cargo;
use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// Programs in the package.
const PROGRAMS: [&str; 3] = ["parador", "wedge-on-linux", "guests-agent"];
/// Begins of the names of files with licences.
const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"];

/// Returns a text with each licence once, after the packages that it is for.
pub fn text() -> Result<String> {
    let linked = linked()?;
    let metadata = output(host_cargo().args(["metadata", "--format-version", "1"]))?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata: no JSON")?;
    let packages = metadata["packages"].as_array().context("cargo metadata: no packages")?;
    let mut licences: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut list = String::new();
    for package in packages {
        let field = |name: &str| package[name].as_str().unwrap_or_default();
        let name = format!("{} v{}", field("name"), field("version"));
        let Some(folder) = Path::new(field("manifest_path")).parent() else { continue };
        let is_own =
            folder.starts_with(workspace()) && !folder.starts_with(workspace().join("third_party"));
        if !linked.contains(&name) || is_own {
            continue;
        }
        writeln!(list, "{name}: {}", field("license"))?;
        for text in licence_files(folder)? {
            licences.entry(text).or_default().push(name.clone());
        }
    }
    let mut sorted: Vec<_> = licences.into_iter().map(|(text, names)| (names, text)).collect();
    sorted.sort();
    let mut all = format!("Packages in the programs of this package, and their licences\n\n{list}");
    for (names, text) in sorted {
        writeln!(all, "\n{}\n{}\n\n{}", "=".repeat(80), names.join(", "), text.trim())?;
    }
    Ok(all)
}

/// Returns name and version of every package in the programs: `libc v0.2.1`.
fn linked() -> Result<BTreeSet<String>> {
    let mut command = host_cargo();
    command.args(["tree", "--edges", "normal", "--prefix", "none", "--no-dedupe"]);
    command.args(["--target", "all", "--format", "{p}"]);
    for program in PROGRAMS {
        command.args(["--package", program]);
    }
    let lines = output(&mut command)?;
    let two_words = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    Ok(lines.lines().map(two_words).collect())
}

/// Reads the licences of a package.
fn licence_files(folder: &Path) -> Result<Vec<String>> {
    let listed = || format!("cannot list {}", folder.display());
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).with_context(listed)? {
        let path = entry.with_context(listed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        if path.is_file() && NAMES.iter().any(|start| name.starts_with(start)) {
            paths.push(path);
        }
    }
    paths.sort();
    let read = |path| fs::read(path).map(|text| String::from_utf8_lossy(&text).into_owned());
    paths.iter().map(read).collect::<Result<_, _>>().with_context(listed)
}
