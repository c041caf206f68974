//! Build script: puts the binaries of the wedge and the agent where the monitor includes them; an
//! empty file, if one has not been built.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// Names of the binaries, which `cargo xtask build` builds before `parador`.
const BINARIES: [&str; 2] = ["parador-wedge", "parador-agent"];

fn main() -> io::Result<()> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty());
    let out = variable("OUT_DIR").map(PathBuf::from).ok_or(io::ErrorKind::NotFound)?;
    let workspace = Path::new("../..");
    let target = variable("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let artifacts = workspace.join(target).join("artifacts");
    println!("cargo::rerun-if-env-changed=CARGO_TARGET_DIR");
    for name in BINARIES {
        let binary = artifacts.join(name);
        println!("cargo::rerun-if-changed={}", binary.display());
        let bytes = match fs::read(&binary) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read?,
        };
        fs::write(out.join(name), bytes)?;
    }
    Ok(())
}
