//! Building systems from descriptions with `parador`.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// Root of the source tree.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// Where build products are.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(path) => workspace().join(path),
        None => workspace().join("target"),
    }
}

/// The folder of native programs and micro-guests, made by `cargo xtask build`.
pub fn artifacts() -> PathBuf {
    target().join("artifacts")
}

/// Runs `parador` with these arguments, without a terminal.
pub fn parador(arguments: &[&str], folder: &Path) -> Result<Output> {
    let program = target().join("release").join("parador");
    Command::new(&program)
        .args(arguments)
        .current_dir(folder)
        .env("PARADOR_ARTIFACTS", artifacts())
        .env("XDG_CACHE_HOME", target().join("cache"))
        .output()
        .with_context(|| format!("cannot start {}; run `cargo xtask build`", program.display()))
}

/// A built system, removed when dropped.
#[derive(Debug)]
pub struct Image {
    folder: TempDir,
    /// Parador's kernel.
    pub kernel: PathBuf,
    /// Its boot module.
    pub bundle: PathBuf,
}

impl Image {
    /// Builds the system that `description` (TOML) says. `{artifacts}` in it stands for the folder
    /// of programs.
    pub fn build(description: &str) -> Result<Self> {
        Self::build_with(description, &[])
    }

    /// Builds the system and a CD-ROM image of it.
    pub fn build_disc(description: &str) -> Result<Self> {
        Self::build_with(description, &["--iso", "disc.iso"])
    }

    fn build_with(description: &str, options: &[&str]) -> Result<Self> {
        let folder = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
        let text = description.replace("{artifacts}", &artifacts().display().to_string());
        std::fs::write(folder.path().join("system.toml"), text).context("cannot write TOML")?;
        let mut arguments = vec!["system", "build", "system.toml", "--output", "image"];
        arguments.extend_from_slice(options);
        let output = parador(&arguments, folder.path())?;
        if !output.status.success() {
            bail!(
                "`parador system build` failed ({})\n{}",
                output.status,
                String::from_utf8_lossy(&output.stderr)
            );
        }
        let kernel = folder.path().join("image/kernel.elf");
        let bundle = folder.path().join("image/bundle");
        Ok(Self { folder, kernel, bundle })
    }

    /// The CD-ROM image of [`Image::build_disc`].
    pub fn disc(&self) -> PathBuf {
        self.folder.path().join("disc.iso")
    }
}
