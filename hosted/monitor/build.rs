//! Build script: puts the wedge's binary where the monitor includes it; an empty file, if it has
//! not been built.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// Path of the wedge's binary below the folder of build products: `cargo xtask build` builds it
/// before `parador`.
const WEDGE: &str = "artifacts/parador-wedge";

fn main() -> io::Result<()> {
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
