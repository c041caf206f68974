//! `cargo xtask fuzz`: looks for new inputs for a target of `fuzz/`, guided by what they reach.
//!
//! The compiler counts branches for libFuzzer (LLVM's SanitizerCoverage); the sanitizers themselves
//! need an unstable compiler and find little in code without `unsafe`.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::{run, target, workspace};
use crate::toolchain::host_cargo;

const PACKAGE: &str = "parador-fuzz";
const USAGE: &str = "usage: cargo xtask fuzz TARGET [--seconds N] | cargo xtask fuzz --seeds";
/// Named for the compiler, so that what runs while building is built without counting.
const HOST: &str = "x86_64-unknown-linux-gnu";
/// Options of `-Cpasses=sancov-module` that libFuzzer needs.
const COVERAGE: &str = "-Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares \
    --cfg fuzzing";
const DEFAULT_SECONDS: u32 = 60;

/// `cargo xtask fuzz TARGET [--seconds N]`, or `--seeds`: writes the inputs to begin with.
pub fn fuzz(arguments: &[String]) -> Result<()> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["--seeds"] => run(host_cargo()
            .args(["test", "--package", PACKAGE, "seeds"])
            .env("PARADOR_WRITE_SEEDS", "1")),
        [name] => search(name, DEFAULT_SECONDS),
        [name, "--seconds", seconds] => search(name, seconds.parse().context(USAGE)?),
        _ => bail!(USAGE),
    }
}

fn search(name: &str, seconds: u32) -> Result<()> {
    let corpus = workspace().join("fuzz/corpus").join(name);
    if !corpus.is_dir() {
        bail!("there is no target `{name}`; fuzz/README.md has the list");
    }
    let directory = target().join("fuzz");
    run(host_cargo()
        .args(["build", "--package", PACKAGE, "--features", "libfuzzer", "--bin", "libfuzzer"])
        .args(["--profile", "fuzz", "--target", HOST, "--target-dir"])
        .arg(&directory)
        .env("RUSTFLAGS", COVERAGE))?;
    let found = directory.join("corpus").join(name);
    let failed = directory.join("failed").join(name);
    fs::create_dir_all(&found)?;
    fs::create_dir_all(&failed)?;
    // New inputs go to the first folder.
    run(Command::new(directory.join(HOST).join("fuzz/libfuzzer"))
        .env("PARADOR_FUZZ", name)
        .arg(&found)
        .arg(&corpus)
        .arg(format!("-artifact_prefix={}/", failed.display()))
        .arg(format!("-max_total_time={seconds}"))
        .args(["-max_len=4096", "-timeout=10", "-print_final_stats=1"]))
}
