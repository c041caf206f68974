//! Artifacts for AArch64: the kernel as a flat image, which firmware and emulators load (Linux,
//! Documentation/arm64/booting.rst), micro-guests as flat images, and programs as they are, since
//! the host's `strip` does not know them.

use anyhow::{Context, Result, ensure};
use hw_tables::elf::Elf;
use std::fs;
use std::path::Path;

/// End of the name of a flat image.
const IMAGE: &str = "image";

/// Puts an executable at `to`, flat if its name says so.
pub fn collect(from: &Path, to: &Path) -> Result<()> {
    let mut bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    if to.extension().is_some_and(|end| end == IMAGE) {
        bytes = flatten(&bytes).with_context(|| from.display().to_string())?;
    }
    if fs::read(to).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    fs::write(to, bytes).with_context(|| format!("cannot write {}", to.display()))
}

/// Bytes of an executable as they are in memory, from its first segment on. What begins as zero at
/// the end is left out.
fn flatten(file: &[u8]) -> Result<Vec<u8>> {
    let elf = Elf::parse(file).map_err(|error| anyhow::anyhow!("no executable: {error:?}"))?;
    let segments = || elf.segments().filter(|segment| segment.filesz > 0);
    let start = segments().map(|segment| segment.paddr).min().context("no segments")?;
    let mut flat = Vec::new();
    for segment in segments() {
        let at = usize::try_from(segment.paddr - start)?;
        ensure!(at < 1 << 30, "its segments are far apart");
        let data = elf.data(&segment);
        flat.resize(flat.len().max(at + data.len()), 0);
        flat[at..at + data.len()].copy_from_slice(data);
    }
    Ok(flat)
}
