//! Building: three kinds of bare-metal program and the host program.
//!
//! The kinds differ in compiler flags. Each set of flags has a target directory of its own, because
//! cargo rebuilds everything, `core` included, when flags change in a shared one.

use crate::flat;
use crate::mark;
use crate::process::{output, run, target, workspace};
use crate::toolchain::{ARM64, Bare, X86, host_cargo};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::fs::read;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Programs with the same compiler flags.
pub struct Group {
    /// Name on the command line.
    pub name: &'static str,
    /// Target triple.
    pub target: &'static str,
    /// Target directory below `target/bare`.
    directory: &'static str,
    /// Packages in it.
    pub packages: &'static [&'static str],
    /// Flags beside the common ones.
    pub flags: &'static [&'static str],
}

/// The kernel that measures its own longest path, for the tests and benchmarks.
const MEASURED: &str = "measured";
/// Native programs for x86-64; name of the group.
const NATIVE_GROUP: &str = "native";
/// Kernel and programs for AArch64, for descriptions of its board; name of the group.
pub const ARM64_GROUP: &str = "arm64";

/// The kernel runs at the bottom of the upper half, out of reach of absolute 32-bit addresses:
/// it needs position-independent code. Programs and guests are linked to fixed low addresses.
pub const GROUPS: &[Group] = &[
    Group {
        name: "kernel",
        target: X86,
        directory: "kernel",
        packages: &["kernel-image"],
        flags: &["-Crelocation-model=pic", "-Ccode-model=small"],
    },
    Group {
        name: MEASURED,
        target: X86,
        directory: "measured",
        packages: &["kernel-image"],
        flags: &["-Crelocation-model=pic", "-Ccode-model=small", "--cfg=parador_longest_path"],
    },
    Group {
        name: NATIVE_GROUP,
        target: X86,
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
        target: X86,
        directory: "programs",
        packages: &["wedge-on-linux"],
        flags: &["-Crelocation-model=static", "-Ccode-model=small"],
    },
    Group {
        name: "guests",
        target: X86,
        directory: "programs",
        packages: &["guests-micro"],
        flags: &["-Crelocation-model=static", "-Ccode-model=small"],
    },
    Group {
        name: ARM64_GROUP,
        target: ARM64,
        directory: "arm64",
        packages: &[
            "kernel-image",
            "native-root",
            "native-console",
            "native-disk",
            "native-net",
            "native-vmm",
            "native-steward",
            "native-check",
            "native-first",
            "guests-arm64",
        ],
        flags: &["-Crelocation-model=static"],
    },
];

const HOST_PACKAGE: &str = "parador";
/// Program that writes manual pages and completions from `parador`'s command line.
pub const DOCUMENTS_PACKAGE: &str = "hosted-documents";
/// Environment variable with the commit, for `hosted/cli`.
const COMMIT: &str = "PARADOR_COMMIT";
/// Cargo's profile of `parador` in a package.
const PACKAGE_PROFILE: &str = "distribution";

/// Process 1 of the guests of `parador exec`: a Linux program without shared libraries, since it
/// runs before there is a root directory.
pub const AGENT_PACKAGE: &str = "guests-agent";
/// Its binary.
pub const AGENT: &str = "parador-agent";
/// Binary of the wedge.
pub const WEDGE: &str = "parador-wedge";
/// Programs of one target do not share flags with build scripts and macros, which are the host's.
const AGENT_TARGET: &str = "x86_64-unknown-linux-gnu";
/// Flag of the compiler for programs without shared libraries.
const STATIC: &str = "-Ctarget-feature=+crt-static";

/// Flags of a program without a library.
const NO_LIBRARY: [&str; 4] =
    ["-nostdlib", "-ffreestanding", "-fno-stack-protector", "-fcf-protection=none"];

/// Programs for Linux guests, their sources and flags, static but for `-pie`: a test of the driver
/// for channels; everything that programs ask of a kernel; what they must not get of it; random
/// programs; a test of sockets between guest and host. 32-bit programs are made without a library,
/// whose 32-bit kind not every host has.
const LINUX_PROGRAMS: [(&str, &str, &[&[&str]]); 14] = [
    ("linux-check-com", "check_com.c", &[&["-pthread"]]),
    ("linux-check-com-arm64", "check_com.c", &[&["-pthread"]]),
    ("linux-stress", "stress.c", &[&["-pthread"]]),
    ("linux-attack", "attack.c", &[&["-pthread"]]),
    ("linux-isolation", "isolation.c", &[&["-pthread"]]),
    ("linux-isolation-steps", "isolation.c", &[&["-pthread", "-DSTEPS"]]),
    ("linux-fuzz", "fuzz.c", &[&["-pthread"]]),
    ("linux-vsock", "vsock.c", &[&["-pthread"]]),
    ("linux-disk", "disk.c", &[]),
    ("linux-agent", "agent.c", &[]),
    ("linux-compat-32", "compat.c", &[&["-m32", "-fno-pic"], &NO_LIBRARY]),
    // Its dynamic linker is the file itself, in the current folder.
    (
        "linux-compat-pie",
        "compat.c",
        &[&["-m32", "-fpie", "-pie", "-Wl,--dynamic-linker=linux-compat-pie"], &NO_LIBRARY],
    ),
    ("linux-compat-static-pie", "compat.c", &[&["-m32", "-fpie", "-static-pie"], &NO_LIBRARY]),
    ("linux-compat-64", "compat.c", &[&["-m64", "-fno-pic"], &NO_LIBRARY]),
];

/// Name on the command line for every group of [`GROUPS`] but the measured kernel and AArch64: all
/// programs of Parador that a system description or `parador run` can name. `parador` builds this
/// in a source tree.
pub const RUNTIME: &str = "runtime";

/// The parts of the tree that one `cargo xtask build` makes.
struct Selection {
    /// Groups with those of their packages that are wanted, none of them empty.
    groups: Vec<(&'static Group, Vec<&'static str>)>,
    /// Entries of [`LINUX_PROGRAMS`], by name.
    linux: Vec<&'static str>,
    /// [`AGENT_PACKAGE`].
    agent: bool,
    /// The program `parador`.
    host: bool,
}

impl Selection {
    /// Returns the selection that the words of a command line name; no word stands for everything.
    /// Fails on a word that names nothing.
    fn parse(arguments: &[String]) -> Result<Self> {
        let words: Vec<&str> =
            arguments.iter().map(String::as_str).filter(|word| *word != "--release").collect();
        let has = |name: &str| words.is_empty() || words.contains(&name);
        let has_package = |group: &Group, package: &str| {
            // Programs of both architectures are named with their group for AArch64.
            let is_native =
                |other: &Group| other.name == NATIVE_GROUP && other.packages.contains(&package);
            let is_other = group.name == ARM64_GROUP && GROUPS.iter().any(is_native);
            let is_named = has(group.name) || words.contains(&package) && !is_other;
            is_named || ![MEASURED, ARM64_GROUP].contains(&group.name) && has(RUNTIME)
        };
        let linux = LINUX_PROGRAMS.iter().map(|program| program.0);
        let is_known = |word: &str| {
            [RUNTIME, "host", HOST_PACKAGE, AGENT_PACKAGE].contains(&word)
                || GROUPS.iter().any(|group| group.name == word || group.packages.contains(&word))
                || linux.clone().any(|name| name == word)
        };
        if let Some(word) = words.iter().find(|word| !is_known(word)) {
            bail!("no package `{word}` to build");
        }
        let groups = GROUPS.iter().map(|group| {
            let packages = group.packages.iter().copied();
            (group, packages.filter(|package| has_package(group, package)).collect::<Vec<_>>())
        });
        Ok(Self {
            groups: groups.filter(|(_, packages)| !packages.is_empty()).collect(),
            linux: linux.clone().filter(|name| has(name)).collect(),
            agent: ["guests", AGENT_PACKAGE, RUNTIME].into_iter().any(has),
            host: has("host") || has(HOST_PACKAGE),
        })
    }
}

/// `cargo xtask build [PACKAGE...]`.
pub fn build(arguments: &[String]) -> Result<()> {
    let selection = Selection::parse(arguments)?;
    let artifacts = artifacts();
    std::fs::create_dir_all(&artifacts)
        .with_context(|| format!("cannot make {}", artifacts.display()))?;
    for (group, packages) in &selection.groups {
        build_group(group, packages, &artifacts)?;
    }
    if selection.agent {
        build_agent(&artifacts)?;
    }
    for (name, source, flags) in LINUX_PROGRAMS {
        let flags = flags.concat();
        if selection.linux.contains(&name) {
            let is_arm64 = name.ends_with("-arm64");
            run(Command::new(if is_arm64 { "aarch64-linux-gnu-gcc" } else { "gcc" })
                .args(["-O2", "-Wall", "-Wextra", "-Werror"])
                .args((!flags.contains(&"-pie")).then_some("-static"))
                .args(flags)
                .arg("-o")
                .args([artifacts.join(name), workspace().join("guests/linux").join(source)]))?;
        }
    }
    if selection.host {
        let packages = ["--package", HOST_PACKAGE, "--package", DOCUMENTS_PACKAGE];
        let mut command = host_cargo();
        command.args(["build", "--release"]).args(packages).env(COMMIT, commit());
        run(&mut command)?;
    }
    Ok(())
}

/// Returns the commit that is checked out, for `parador --version`; with the suffix `-changed` if
/// the tree has other contents.
pub fn commit() -> String {
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        let output = command.args(arguments).current_dir(workspace()).output();
        let output = output.ok().filter(|output| output.status.success());
        output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"]);
    let changes = git(&["status", "--porcelain", "--untracked-files=no"]);
    match commit {
        Some(commit) if changes.is_some_and(|changes| changes.is_empty()) => commit,
        Some(commit) => format!("{commit}-changed"),
        // An archive of the tree.
        None => "unknown".to_owned(),
    }
}

/// Returns flags of the compiler that keep the paths of this tree and of cargo's folder out of a
/// program.
fn without_paths() -> [String; 2] {
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let cargo = std::env::var_os("CARGO_HOME").map_or(home.join(".cargo"), PathBuf::from);
    [(workspace(), "parador"), (cargo, "cargo")]
        .map(|(folder, name)| format!("--remap-path-prefix={}=/usr/src/{name}", folder.display()))
}

/// Passes flags of the compiler, which may contain spaces.
fn encode_flags(command: &mut Command, flags: impl Iterator<Item = String>) {
    let flags: Vec<String> = flags.collect();
    command.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}")).env_remove("RUSTFLAGS");
}

/// Builds `parador` for a package, linked statically, and returns its path. `release` is the
/// package's version.
pub fn static_parador(release: &str) -> Result<PathBuf> {
    let folder = target().join("package/build");
    let mut command = host_cargo();
    command.args(["build", "--profile", PACKAGE_PROFILE, "--package", HOST_PACKAGE]);
    command.args(["--target", AGENT_TARGET, "--target-dir"]).arg(&folder);
    encode_flags(&mut command, [STATIC.to_owned()].into_iter().chain(without_paths()));
    command.env("PARADOR_RELEASE", release).env(COMMIT, commit());
    run(&mut command)?;
    Ok(folder.join(AGENT_TARGET).join(PACKAGE_PROFILE).join(HOST_PACKAGE))
}

/// Returns the folder of finished programs.
pub fn artifacts() -> PathBuf {
    target().join("artifacts")
}

/// Cargo for the programs of a group, with its flags and its own target directory.
pub fn group_cargo(group: &Group, subcommand: &str, packages: &[&str]) -> Result<Command> {
    let compiler = Bare::choose_for(group.target)?;
    let mut command = compiler.cargo_for(group.target, subcommand, group.flags);
    command
        .current_dir(workspace())
        .arg("--target-dir")
        .arg(target().join("bare").join(group.directory));
    for package in packages {
        command.args(["--package", package]);
    }
    if group.target == ARM64 {
        // Programs for x86-64 need the default feature of their package.
        command.arg("--no-default-features");
    }
    Ok(command)
}

fn build_agent(artifacts: &Path) -> Result<()> {
    let folder = target().join("agent");
    let flags = [STATIC.to_owned(), "-Crelocation-model=static".to_owned()];
    let mut command = host_cargo();
    command.args(["build", "--release", "--package", AGENT_PACKAGE, "--target", AGENT_TARGET]);
    encode_flags(&mut command, flags.into_iter().chain(without_paths()));
    command.arg("--target-dir").arg(&folder);
    run(&mut command)?;
    collect(&folder.join(AGENT_TARGET).join("release").join(AGENT), &artifacts.join(AGENT))
}

fn build_group(group: &Group, packages: &[&str], artifacts: &Path) -> Result<()> {
    let mut command = group_cargo(group, "build", packages)?;
    let messages = output(command.args(["--bins", "--message-format", "json-render-diagnostics"]))?;
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line).context("cargo printed no JSON")?;
        let Some(executable) = message["executable"].as_str() else { continue };
        let Some(name) = message["target"]["name"].as_str() else { continue };
        let artifact = artifacts.join(artifact_name(group, name));
        match group.name {
            ARM64_GROUP => flat::collect(Path::new(executable), &artifact)?,
            _ => collect(Path::new(executable), &artifact)?,
        }
    }
    Ok(())
}

/// Puts a stripped copy at `to`, marked with the release if `parador` starts it, and the program
/// as built beside it, with the suffix `.debug`. What has not changed keeps its time: `parador`
/// contains two of the programs, and is built again when one is newer.
fn collect(from: &Path, to: &Path) -> Result<()> {
    let debug = PathBuf::from(format!("{}.debug", to.display()));
    let is_same = |a: &Path, b: &Path| matches!((read(a), read(b)), (Ok(a), Ok(b)) if a == b);
    let is_marked = to.file_name().is_some_and(|name| name == AGENT || name == WEDGE);
    if to.is_file() && is_same(from, &debug) && (!is_marked || mark::is_marked(to)) {
        return Ok(());
    }
    std::fs::copy(from, &debug)
        .with_context(|| format!("cannot copy {} to {}", from.display(), debug.display()))?;
    match is_marked {
        true => mark::strip_and_mark(from, to, mark::RELEASE),
        false => run(Command::new("strip").arg("--strip-all").arg("-o").arg(to).arg(from)),
    }
}

/// `kernel-image` becomes `kernel.elf`; other programs lose the package's prefix, checks and guests
/// keep `check-` and `guest-`.
fn artifact_name(group: &Group, target: &str) -> String {
    match (group.name, target) {
        ("kernel", _) => "kernel.elf".to_owned(),
        (MEASURED, _) => "kernel-measured.elf".to_owned(),
        (ARM64_GROUP, "kernel-image") => "kernel-arm64.image".to_owned(),
        (ARM64_GROUP, name) if name.starts_with("guest-") => format!("{name}-arm64.image"),
        (ARM64_GROUP, name) => {
            format!("{}-arm64", name.strip_prefix("native-").unwrap_or(name))
        }
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
    use crate::workspace::programs;
    use std::collections::BTreeSet;
    use std::fs;

    /// Programs that `parador` needs although no description names them.
    const IMPLIED: [&str; 7] =
        ["kernel.elf", "root", "console", "vmm", "disk", "net", "parador-wedge"];
    /// Text before the name of a program in a description, and the prefix of its artifact.
    const NAMES: [(&str, &str); 5] = [
        ("kernel = \"micro:", "guest-"),
        ("binary = \"", ""),
        ("vmm = \"", ""),
        ("program = \"", ""),
        ("{artifacts}/", ""),
    ];

    fn select(words: &[&str]) -> Result<Selection> {
        Selection::parse(&words.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    /// Returns the artifacts that a description in TOML names.
    fn named_artifacts(description: &str) -> Vec<String> {
        let of_arm64 = |name: String| match name.starts_with("guest-") {
            true => format!("{name}-arm64.image"),
            false => format!("{name}-arm64"),
        };
        let is_arm64 = description.contains("board = \"qemu-virt\"");
        let named = |line: &str| {
            let (rest, prefix) = NAMES
                .iter()
                .find_map(|(before, prefix)| Some((line.split_once(before)?.1, prefix)))?;
            Some(format!("{prefix}{}", rest.split('"').next()?))
        };
        let names = description.lines().filter_map(named);
        names.map(|name| if is_arm64 { of_arm64(name) } else { name }).collect()
    }

    #[test]
    fn runtime_has_the_programs_of_all_examples() {
        let mut made = BTreeSet::new();
        for (group, packages) in select(&[RUNTIME, ARM64_GROUP]).expect("known words").groups {
            for package in packages {
                let programs = programs(package).expect("cargo metadata");
                made.extend(programs.iter().map(|name| artifact_name(group, name)));
            }
        }
        let mut needed: Vec<String> = IMPLIED.map(str::to_owned).into();
        for entry in fs::read_dir(workspace().join("examples")).expect("examples") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|extension| extension == "toml") {
                needed.extend(named_artifacts(&fs::read_to_string(path).expect("a text")));
            }
        }
        for name in ["steward", "guest-answer", "guest-hello", "steward-arm64"] {
            assert!(needed.iter().any(|needed| needed == name), "`{name}` is not in {needed:?}");
        }
        let missing: Vec<_> = needed.iter().filter(|name| !made.contains(*name)).collect();
        assert!(missing.is_empty(), "no group makes {missing:?}, but {made:?}");
    }

    #[test]
    fn selections() {
        let all = select(&[]).expect("everything");
        assert_eq!(all.groups.len(), GROUPS.len());
        assert_eq!(all.linux.len(), LINUX_PROGRAMS.len());
        assert!(all.host);
        let some = select(&["--release", "native-root", "linux-disk"]).expect("known words");
        assert_eq!(some.groups.len(), 1);
        assert_eq!(some.groups[0].1, ["native-root"]);
        assert_eq!(some.linux, ["linux-disk"]);
        assert!(!some.host);
        for word in ["host", HOST_PACKAGE] {
            let host = select(&[word]).expect("a known word");
            assert!(host.host && host.groups.is_empty() && host.linux.is_empty());
        }
        assert!(select(&["kernel", "nothing"]).is_err());
    }

    #[test]
    fn names_of_artifacts() {
        let [kernel, native, wedge, guests, arm64] =
            ["kernel", NATIVE_GROUP, "wedge", "guests", "arm64"].map(|name| {
                GROUPS.iter().find(|group| group.name == name).expect("a group of that name")
            });
        assert_eq!(artifact_name(arm64, "kernel-image"), "kernel-arm64.image");
        assert_eq!(artifact_name(arm64, "first"), "first-arm64");
        assert_eq!(artifact_name(arm64, "native-root"), "root-arm64");
        assert_eq!(artifact_name(arm64, "guest-exits"), "guest-exits-arm64.image");
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
