//! Build script of `parador`: hashes the afterburner's sources, so that `parador` recognizes cached
//! kernels of the same recipe, and embeds the wedge's binary if it has been built.

use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

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
    copy_wedge()
}

/// Path of the wedge's binary below the folder of build products: `cargo xtask build` builds it
/// before `parador`.
const WEDGE: &str = "artifacts/parador-wedge";

/// Puts the wedge's program where `parador` includes it; nothing, if there is none.
fn copy_wedge() -> io::Result<()> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty());
    let out = variable("OUT_DIR").map(PathBuf::from).ok_or(io::ErrorKind::NotFound)?;
    let workspace = Path::new("../..");
    let target = variable("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let wedge = workspace.join(target).join(WEDGE);
    println!("cargo::rerun-if-env-changed=CARGO_TARGET_DIR");
    println!("cargo::rerun-if-changed={}", wedge.display());
    let bytes = match fs::read(&wedge) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        read => read?,
    };
    fs::write(out.join("parador-wedge"), bytes)
}

/// Adds the files at and below `path`.
fn list(path: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    fs::read_dir(path)?.try_for_each(|entry| list(&entry?.path(), files))
}
