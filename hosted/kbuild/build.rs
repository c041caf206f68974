//! Build script: hashes the afterburner's sources, so that `parador` recognizes cached kernels of
//! the same recipe.

use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The crates that rewrite and record sensitive instructions, from this package's folder. Their
/// manifests pin the versions of the instruction decoder and the ELF reader.
const CRATES: [&str; 2] = ["../../wedge/afterburn", "../../wedge/sites"];

fn main() -> io::Result<()> {
    let mut digest = Sha256::new();
    for folder in CRATES {
        for part in ["Cargo.toml", "src"] {
            let path = Path::new(folder).join(part);
            println!("cargo::rerun-if-changed={}", path.display());
            let mut files = Vec::new();
            list(&path, &mut files)?;
            files.sort();
            for file in files {
                let bytes = fs::read(&file)?;
                digest.update(file.as_os_str().as_encoded_bytes());
                digest.update([0]);
                digest.update((bytes.len() as u64).to_le_bytes());
                digest.update(bytes);
            }
        }
    }
    let mut text = String::new();
    for byte in digest.finalize() {
        write!(text, "{byte:02x}").map_err(io::Error::other)?;
    }
    println!("cargo::rustc-env=PARADOR_AFTERBURNER={text}");
    Ok(())
}

/// Adds the files at and below `path`.
fn list(path: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    fs::read_dir(path)?.try_for_each(|entry| list(&entry?.path(), files))
}
