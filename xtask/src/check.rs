//! Running, testing and checking everything.

use crate::build::{self, ARM64_GROUP, GROUPS, artifacts, build, group_cargo};
use crate::package::package;
use crate::process::{output, run, target, workspace};
use crate::rules;
use crate::toolchain::{Bare, host_cargo};
use crate::workspace::packages;
use crate::{neutral, spec, specification, words};
use anyhow::{Context, Result, bail};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread;
use std::time::Instant;

const EXAMPLE: &str = "examples/three-guests.toml";
const EXAMPLE_ARM64: &str = "examples/arm64.toml";
const TESTS: &str = "parador-tests";
/// Target of [`TESTS`] that is never a part of all tests.
const FRONT_DOOR: &str = "front-door";
/// Argument that selects all tests that start no system.
const UNITS: &str = "units";
/// Option for [`TESTS`] that runs systems again and again.
const REPEAT: &str = "--repeat";
const BENCH: &str = "parador-bench";
/// MiB of disk for temporary files of all tests: those that build a kernel refuse less than 3 GiB.
const TEMPORARY_SPACE: u64 = 4 << 10;
/// The same with what is built in a fresh tree, 5.3 GiB.
const ALL_SPACE: u64 = 9 << 10;
/// Tells tests how many seconds the load of a machine lasts; this is a long one.
const STRESS: (&str, &str) = ("PARADOR_STRESS_SECONDS", "160");

/// `parador` as built.
fn parador() -> Command {
    let mut command = Command::new(target().join("release").join("parador"));
    command.current_dir(workspace()).env("PARADOR_TREE", workspace());
    command
}

/// `cargo xtask run [FILE] [ARGUMENT...]`: emulates a system; `parador` builds what it needs.
///
/// `cargo xtask run arm64`: emulates the example for AArch64.
pub fn emulate(arguments: &[String]) -> Result<()> {
    build(&["host".to_owned()])?;
    let mut command = parador();
    command.args(["system", "emulate"]);
    let (file, options) = emulated(arguments);
    // exec, so that signals of the terminal reach `parador` only.
    Err(command.arg(file).args(options).exec()).context("cannot start parador")
}

/// Returns the description to emulate, by default that of an example, and the further arguments.
fn emulated(arguments: &[String]) -> (&str, &[String]) {
    match arguments {
        [first, rest @ ..] if first == ARM64_GROUP => (EXAMPLE_ARM64, rest),
        [first, rest @ ..] if !first.starts_with('-') => (first, rest),
        _ => (EXAMPLE, arguments),
    }
}

/// `cargo xtask run-hosted [ARGUMENT...]`: builds a pre-virtualized kernel, if none is kept, and
/// boots it in processes of this host.
pub fn run_hosted(arguments: &[String]) -> Result<()> {
    build(&["host".to_owned()])?;
    let built = output(parador().args(["kernel", "build"]))?;
    // A digest, then the place.
    let kernel = built.split_once("  ").map(|(_, place)| place.trim_end());
    let kernel = kernel.context("`parador kernel build` names no kernel")?;
    let mut command = parador();
    command.args(["run", kernel, "-i", "busybox"]).args(arguments);
    Err(command.exec()).context("cannot start parador")
}

/// `cargo xtask image [FILE]`: builds everything and a bootable ISO image.
pub fn image(arguments: &[String]) -> Result<()> {
    build(&["host".to_owned()])?;
    let system = arguments.first().map_or(EXAMPLE, String::as_str);
    let iso = target().join("parador.iso");
    run(parador().args(["system", "build", system, "--iso"]).arg(&iso))?;
    println!("{}", iso.display());
    Ok(())
}

/// `cargo xtask test front-door [--here]`: the README's first commands in a fresh clone, or in this
/// tree. Builds nothing before but the program that types them.
fn front_door(arguments: &[String]) -> Result<()> {
    let mut command = host_cargo();
    command.args(["test", "--quiet", "--package", TESTS, "--test", FRONT_DOOR, "--"]);
    run(command.args(arguments))
}

/// `cargo xtask test [--long]`: unit tests and device scripts on the host, then systems in QEMU.
/// The second part runs even if the first fails, so that one run shows everything.
/// `cargo xtask test units` is the first part, and options or filters of systems select the second.
pub fn test(arguments: &[String]) -> Result<()> {
    let (long, arguments) = match arguments {
        [first, rest @ ..] if first == FRONT_DOOR => return front_door(rest),
        [first, rest @ ..] if first == "--long" => (true, rest),
        _ => (false, arguments),
    };
    if arguments == [UNITS] {
        build(&[])?;
        return unit_tests(long);
    }
    let is_all = arguments.is_empty();
    let is_repeated = arguments.iter().any(|argument| argument == REPEAT);
    if is_all {
        require_space()?;
    }
    let start = Instant::now();
    build(&["host".to_owned()])?;
    // Systems have time limits, which assume that no kernel build runs beside them. Compilers of
    // Rust leave it room: they often have one thing to do at a time.
    let kernel = (is_all || is_repeated).then(|| {
        let mut command = Command::new("nice");
        command.arg(parador().get_program()).args(["kernel", "build"]).current_dir(workspace());
        thread::spawn(move || run(&mut command))
    });
    build(&[])?;
    println!("built in {} s", start.elapsed().as_secs());
    let unit_result = if is_all { unit_tests(long) } else { Ok(()) };
    let wait = Instant::now();
    let kernel_result = kernel.map_or(Ok(()), |kernel| {
        kernel.join().unwrap_or_else(|_| bail!("the thread that builds the kernel panicked"))
    });
    println!("waited for the pre-virtualized kernel: {} s", wait.elapsed().as_secs());
    let mut command = host_cargo();
    command.args(["test", "--package", TESTS, "--test", "systems", "--"]).args(arguments);
    command.env("PARADOR_ARTIFACTS", artifacts());
    if long {
        command.env(STRESS.0, STRESS.1);
    }
    let system_result = run(&mut command);
    unit_result.and(kernel_result).and(system_result)
}

/// Returns an error if a disk is too small for all tests, which would be dozens of failures later.
fn require_space() -> Result<()> {
    let products = target();
    std::fs::create_dir_all(&products).with_context(|| format!("{}", products.display()))?;
    let built = mebibytes(Command::new("du").arg("-sm").arg(&products))?;
    let rest = ALL_SPACE.saturating_sub(built).max(TEMPORARY_SPACE);
    for (folder, needed) in [(std::env::temp_dir(), TEMPORARY_SPACE), (products, rest)] {
        let room = mebibytes(Command::new("df").args(["-m", "--output=avail"]).arg(&folder))?;
        if room < needed {
            bail!(
                "all tests require {needed} MiB of free space in {}; it has {room} MiB: free some, or \
                 set TMPDIR or CARGO_TARGET_DIR to a folder of another disk",
                folder.display()
            );
        }
    }
    Ok(())
}

/// Returns the number at the start of a command's last line.
fn mebibytes(command: &mut Command) -> Result<u64> {
    let text = output(command)?;
    let word = text.lines().last().and_then(|line| line.split_whitespace().next());
    word.and_then(|word| word.parse().ok()).with_context(|| format!("no size: {text:?}"))
}

/// Unit tests and device scripts: all tests that start no system.
fn unit_tests(long: bool) -> Result<()> {
    let start = Instant::now();
    let mut command = host_cargo();
    command.args(["test", "--workspace", "--no-fail-fast"]);
    if long {
        command.env(STRESS.0, STRESS.1);
    }
    for package in packages()?.iter().filter(|package| !package.on_host || package.name == TESTS) {
        command.args(["--exclude", &package.name]);
    }
    let result = run(&mut command);
    let of_tests = run(host_cargo().args(["test", "--package", TESTS, "--lib"]));
    println!("unit tests: {} s", start.elapsed().as_secs());
    result.and(of_tests)
}

/// `cargo xtask bench [ARGUMENT...]`.
pub fn bench(arguments: &[String]) -> Result<()> {
    match arguments {
        [first] if first == "tools" => package(&[])?,
        [first] if first == ARM64_GROUP => build(&[ARM64_GROUP.to_owned(), "host".to_owned()])?,
        _ => build(&[])?,
    }
    run(host_cargo()
        .args(["run", "--release", "--package", BENCH, "--"])
        .args(arguments)
        .env("PARADOR_ARTIFACTS", artifacts()))
}

/// `cargo xtask check`: everything that can be said without running the system.
pub fn check() -> Result<()> {
    run(host_cargo().args(["fmt", "--all", "--check"]))?;
    let mut host = host_cargo();
    host.args(["clippy", "--workspace", "--all-targets"]);
    for package in packages()?.iter().filter(|package| !package.on_host) {
        host.args(["--exclude", &package.name]);
    }
    run(host.args(["--", "-D", "warnings"]))?;
    for group in GROUPS {
        if Bare::choose_for(group.target)?.has_clippy() {
            let mut command = group_cargo(group, "clippy", group.packages)?;
            run(command.args(["--bins", "--", "-D", "warnings"]))?;
        } else {
            // Without the second compiler's linter, the output says that the code was not linted.
            println!(
                "clippy: SKIPPED for {}, package rust-web-clippy is not installed",
                group.name
            );
        }
    }
    neutral::check(&packages()?)?;
    rules::deps()?;
    rules::unsafe_code(&[])?;
    spec::spec(&[])?;
    words::words(&[])?;
    specification::specification(&[])?;
    rules::size()
}

/// `cargo xtask ci`: what must pass before a change is merged.
pub fn ci() -> Result<()> {
    check()?;
    test(&[])
}

/// `cargo xtask artifacts`: prints the directory of finished programs, for scripts.
pub fn print_artifacts() {
    println!("{}", build::artifacts().display());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_follow_the_example() {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        for (text, file, options) in [
            ("", EXAMPLE, ""),
            ("--timeout 5s", EXAMPLE, "--timeout 5s"),
            ("arm64 --icount", EXAMPLE_ARM64, "--icount"),
            ("a.toml --icount", "a.toml", "--icount"),
        ] {
            assert_eq!(emulated(&words(text)), (file, &words(options)[..]), "{text}");
        }
    }
}
