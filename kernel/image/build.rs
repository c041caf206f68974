//! Passes the linker script and its options to the linker, for bare-metal builds only.

use std::env::var;

fn main() {
    println!("cargo:rerun-if-changed=kernel.ld");
    println!("cargo:rerun-if-changed=build.rs");
    if var("CARGO_CFG_TARGET_OS").as_deref() != Ok("none") {
        return;
    }
    let here = var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    for option in [
        &format!("-T{here}/kernel.ld"),
        "--no-pie",
        "--no-dynamic-linker",
        "-zmax-page-size=4096",
        "-znognustack",
    ] {
        println!("cargo:rustc-link-arg-bins={option}");
    }
}
