//! Building: three kinds of bare-metal program and the host program.
//!
//! The kinds differ in compiler flags. Each set of flags has a target directory of its own, because
//! cargo rebuilds everything, `core` included, when flags change in a shared one.

use crate::process::{output, run, target, workspace};
use crate::toolchain::{Bare, host_cargo};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Programs with the same compiler flags.
pub struct Group {
    /// Name on the command line.
    pub name: &'static str,
    /// Target directory below `target/bare`.
    directory: &'static str,
    /// Packages in it.
    pub packages: &'static [&'static str],
    /// Flags beside the common ones.
    pub flags: &'static [&'static str],
}

/// The kernel runs at the bottom of the upper half, out of reach of absolute 32-bit addresses:
/// it needs position-independent code. Programs and guests are linked to fixed low addresses.
pub const GROUPS: &[Group] = &[
    Group {
        name: "kernel",
        directory: "kernel",
        packages: &["kernel-image"],
        flags: &["-Crelocation-model=pic", "-Ccode-model=small"],
    },
    Group {
        name: "native",
        directory: "programs",
        packages: &[
            "native-root",
            "native-console",
            "native-disk",
            "native-net",
            "native-vmm",
            "native-steward",
            "native-check",
        ],
        flags: &["-Crelocation-model=static", "-Ccode-model=small"],
    },
    Group {
        name: "wedge",
        directory: "programs",
        packages: &["wedge-on-linux"],
        flags: &["-Crelocation-model=static", "-Ccode-model=small"],
    },
    Group {
        name: "guests",
        directory: "programs",
        packages: &["guests-micro"],
        flags: &["-Crelocation-model=static", "-Ccode-model=small"],
    },
];

const HOST_PACKAGE: &str = "parador";

/// Programs for Linux guests, and their sources: a test of the driver for channels; everything that programs ask of a kernel; what they must
/// not get of it; a test of sockets between guest and host.
/// 32-bit programs are made without a library, whose 32-bit kind not every host has.
const LINUX_PROGRAMS: [(&str, &str, &[&str]); 7] = [
    ("linux-check-com", "check_com.c", &["-pthread"]),
    ("linux-stress", "stress.c", &["-pthread"]),
    ("linux-attack", "attack.c", &["-pthread"]),
    ("linux-vsock", "vsock.c", &["-pthread"]),
    ("linux-disk", "disk.c", &[]),
    (
        "linux-compat-32",
        "compat.c",
        &[
            "-m32",
            "-nostdlib",
            "-ffreestanding",
            "-fno-pic",
            "-fno-stack-protector",
            "-fcf-protection=none",
        ],
    ),
    (
        "linux-compat-64",
        "compat.c",
        &[
            "-m64",
            "-nostdlib",
            "-ffreestanding",
            "-fno-pic",
            "-fno-stack-protector",
            "-fcf-protection=none",
        ],
    ),
];

/// `cargo xtask build [PACKAGE...]`.
pub fn build(arguments: &[String]) -> Result<()> {
    let mut wanted: Vec<&str> = Vec::new();
    for argument in arguments {
        let name = argument.as_str();
        let known = name == HOST_PACKAGE
            || GROUPS.iter().any(|group| group.name == name || group.packages.contains(&name));
        match name {
            "--release" => {}
            _ if LINUX_PROGRAMS.iter().any(|program| program.0 == name) => wanted.push(name),
            "host" => wanted.push(HOST_PACKAGE),
            _ if known => wanted.push(name),
            _ => bail!("no package `{name}` to build"),
        }
    }
    let all = wanted.is_empty();
    let is_wanted = |group: &Group, package: &str| {
        all || wanted.contains(&package) || wanted.contains(&group.name)
    };

    let artifacts = artifacts();
    std::fs::create_dir_all(&artifacts)
        .with_context(|| format!("cannot make {}", artifacts.display()))?;
    for group in GROUPS {
        let packages: Vec<&str> =
            group.packages.iter().copied().filter(|package| is_wanted(group, package)).collect();
        if !packages.is_empty() {
            build_group(group, &packages, &artifacts)?;
        }
    }
    for (name, source, flags) in LINUX_PROGRAMS {
        if all || wanted.contains(&name) {
            run(Command::new("gcc")
                .args(["-O2", "-static", "-Wall", "-Wextra", "-Werror"])
                .args(flags)
                .arg("-o")
                .args([artifacts.join(name), workspace().join("guests/linux").join(source)]))?;
        }
    }
    if all || wanted.contains(&HOST_PACKAGE) {
        run(host_cargo().args(["build", "--release", "--package", HOST_PACKAGE]))?;
    }
    Ok(())
}

/// Where finished programs are collected.
pub fn artifacts() -> PathBuf {
    target().join("artifacts")
}

/// Cargo for the programs of a group, with its flags and its own target directory.
pub fn group_cargo(group: &Group, subcommand: &str, packages: &[&str]) -> Result<Command> {
    let mut command = Bare::choose()?.cargo(subcommand, group.flags);
    command
        .current_dir(workspace())
        .arg("--target-dir")
        .arg(target().join("bare").join(group.directory));
    for package in packages {
        command.args(["--package", package]);
    }
    Ok(command)
}

fn build_group(group: &Group, packages: &[&str], artifacts: &Path) -> Result<()> {
    let mut command = group_cargo(group, "build", packages)?;
    let messages = output(command.args(["--bins", "--message-format", "json-render-diagnostics"]))?;
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line).context("cargo printed no JSON")?;
        let Some(executable) = message["executable"].as_str() else { continue };
        let Some(name) = message["target"]["name"].as_str() else { continue };
        collect(Path::new(executable), &artifacts.join(artifact_name(group, name)))?;
    }
    Ok(())
}

/// Puts a stripped copy at `to` and the program as built beside it, with the suffix `.debug`.
fn collect(from: &Path, to: &Path) -> Result<()> {
    let debug = PathBuf::from(format!("{}.debug", to.display()));
    std::fs::copy(from, &debug)
        .with_context(|| format!("cannot copy {} to {}", from.display(), debug.display()))?;
    run(Command::new("strip").arg("--strip-all").arg("-o").arg(to).arg(from))
}

/// `kernel-image` becomes `kernel.elf`; other programs lose the package's prefix, checks and guests
/// keep `check-` and `guest-`.
fn artifact_name(group: &Group, target: &str) -> String {
    match (group.name, target) {
        ("kernel", _) => "kernel.elf".to_owned(),
        ("wedge", name) => name.to_owned(),
        ("guests", name) => match name.strip_prefix("guests-").or(name.strip_prefix("guest-")) {
            Some(rest) => format!("guest-{rest}"),
            None => format!("guest-{name}"),
        },
        (_, name) if !group.packages.contains(&name) => match name.strip_prefix("check-") {
            Some(rest) => format!("check-{rest}"),
            None => format!("check-{name}"),
        },
        (_, name) => name.strip_prefix("native-").unwrap_or(name).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_artifacts() {
        let [kernel, native, wedge, guests] = ["kernel", "native", "wedge", "guests"].map(|name| {
            GROUPS.iter().find(|group| group.name == name).expect("a group of that name")
        });
        assert_eq!(artifact_name(kernel, "kernel-image"), "kernel.elf");
        assert_eq!(artifact_name(native, "native-root"), "root");
        assert_eq!(artifact_name(native, "gatebench"), "check-gatebench");
        assert_eq!(artifact_name(native, "check-hostile"), "check-hostile");
        assert_eq!(artifact_name(native, "native-check"), "check");
        assert_eq!(artifact_name(wedge, "parador-wedge"), "parador-wedge");
        assert_eq!(artifact_name(guests, "exits"), "guest-exits");
        assert_eq!(artifact_name(guests, "guest-exits"), "guest-exits");
    }
}
