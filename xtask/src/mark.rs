//! Release of Parador in the files that belong to `parador`: `hosted/command/src/release.rs` reads
//! it.

use crate::process::run;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Release of the programs in a source tree: the version of the workspace.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");
/// ELF section of the release.
const SECTION: &str = ".parador_release";

/// Copies an executable without symbols and marks the copy; `release` is the text of the section.
pub fn strip_and_mark(from: &Path, to: &Path, release: &str) -> Result<()> {
    mark_with(&["--strip-all"], from, to, release)
}

/// Copies an executable without debugging information and marks the copy. Symbols and relocations
/// stay.
pub fn mark(from: &Path, to: &Path, release: &str) -> Result<()> {
    mark_with(&["--strip-debug"], from, to, release)
}

fn mark_with(options: &[&str], from: &Path, to: &Path, release: &str) -> Result<()> {
    let text = PathBuf::from(format!("{}.release", to.display()));
    let failed = || format!("cannot write {}", text.display());
    fs::write(&text, format!("{release}\n")).with_context(failed)?;
    let mut objcopy = Command::new("objcopy");
    objcopy.args(options).args(["--remove-section", SECTION, "--add-section"]);
    objcopy.arg(format!("{SECTION}={}", text.display())).arg(from).arg(to);
    run(&mut objcopy)?;
    fs::remove_file(&text).with_context(failed)
}

/// Returns whether an executable is marked.
pub fn is_marked(path: &Path) -> bool {
    let section = SECTION.as_bytes();
    fs::read(path).is_ok_and(|file| file.windows(section.len()).any(|part| part == section))
}
