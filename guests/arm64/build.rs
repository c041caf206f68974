//! Hands the linker script to the linker, for bare metal only.

use std::env::var;

fn main() {
    println!("cargo:rerun-if-changed=guest.ld");
    println!("cargo:rerun-if-changed=build.rs");
    if var("CARGO_CFG_TARGET_OS").as_deref() != Ok("none") {
        return;
    }
    let here = var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    for option in [&format!("-T{here}/guest.ld"), "--no-pie", "-zmax-page-size=4096"] {
        println!("cargo:rustc-link-arg-bins={option}");
    }
}
