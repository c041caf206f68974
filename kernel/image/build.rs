//! Passes the linker script and its options to the linker, for bare-metal builds only.

use std::env::var;

fn main() {
    println!("cargo:rerun-if-changed=x86.ld");
    println!("cargo:rerun-if-changed=arm64.ld");
    println!("cargo:rerun-if-changed=build.rs");
    if var("CARGO_CFG_TARGET_OS").as_deref() != Ok("none") {
        return;
    }
    let script = match var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("aarch64") => "arm64.ld",
        _ => "x86.ld",
    };
    let here = var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    for option in [
        &format!("-T{here}/{script}"),
        "--no-pie",
        "--no-dynamic-linker",
        "-zmax-page-size=4096",
        "-znognustack",
    ] {
        println!("cargo:rustc-link-arg-bins={option}");
    }
}
