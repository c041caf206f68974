//! `cargo xtask bench tools`: the time from a package to the first output of a VM, the size of the
//! package, the time of one command in a VM, and that of Debian's tools with `parador qemu`.
//!
//! The package is installed in a fresh Debian 12 without a compiler, a folder that debootstrap
//! makes once from the mirror of this host's apt. Packages that it depends on come from that
//! mirror, so `install_s` includes their download. Then fakemachine and debos run in a second
//! Debian: with `parador qemu`, and debos also without a VM and in QEMU's translation.

use crate::report::{self, Figure};
use anyhow::{Context, Result, bail, ensure};
use parador_tests::system::target;
use parador_tests::tools::shows::{self, Machine};
use parador_tests::tools::{Debian, output, package};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Runs of `parador exec / -- true`; the figure is their median.
const ROUNDS: usize = 10;
/// Runs of fakemachine; the figure is their median.
const FAKEMACHINE_ROUNDS: usize = 5;
/// Folder with `parador` by QEMU's name.
const QEMU: &str = "/usr/lib/parador/qemu";
/// Parts of the package, compressed: key, title, and paths below the root directory.
const PARTS: [(&str, &str, &[&str]); 5] = [
    ("package_mib_parador", "package: parador", &["usr/bin"]),
    ("package_mib_vmlinux", "package: vmlinux", &["usr/lib/parador/vmlinux"]),
    ("package_mib_modules", "package: vmlinuz, modules", &["usr/lib/modules"]),
    (
        "package_mib_guest",
        "package: wedge, agent",
        &["usr/lib/parador/parador-wedge", "usr/lib/parador/agent.cpio"],
    ),
    ("package_mib_documents", "package: documents", &["usr/share", "lib/systemd"]),
];

/// Measures, prints and stores the figures.
pub fn measure() -> Result<()> {
    let package = package()?;
    fs::create_dir_all(work()).context("cannot make a folder for the bench")?;
    let mut figures = sizes(&package)?;
    let debian = Debian::fresh()?;
    let title = "apt install to the first output of parador exec";
    figures.push(Figure::new("install_s", title, install(&debian, &package)?, "s")?);
    figures.push(exec(&debian)?);
    drop(debian);
    figures.extend(tools(&package)?);
    report::print(&figures);
    report::write_json("bench-tools.json", &figures)?;
    report::append_line("tools.jsonl", &json!({ "figures": report::series(&figures) }))?;
    if figures.iter().any(|figure| !figure.holds()) {
        bail!("a figure misses its limit");
    }
    Ok(())
}

/// Returns the size of the package and of its parts, each compressed alone.
fn sizes(package: &Path) -> Result<Vec<Figure>> {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let bytes = fs::metadata(package).with_context(|| package.display().to_string())?.len();
    let mut figures = vec![Figure::new("package_mib", "package", mib(bytes), "MiB")?];
    let root = work().join("contents");
    remove(&root)?;
    output(Command::new("dpkg-deb").arg("--extract").arg(package).arg(&root))?;
    for (key, title, paths) in PARTS {
        let mut tar = Command::new("sh");
        tar.args(["-c", "tar -c -C \"$0\" \"$@\" | xz -9 --threads=1 | wc -c"]);
        let bytes = output(tar.arg(&root).args(paths))?.trim().parse().context("no size")?;
        figures.push(Figure {
            key: key.to_owned(),
            title: title.to_owned(),
            limit: f64::INFINITY,
            value: mib(bytes),
            ..figures[0].clone()
        });
    }
    remove(&root)?;
    Ok(figures)
}

/// Installs the package and returns the time in seconds until a command in a VM has printed.
fn install(debian: &Debian, package: &Path) -> Result<f64> {
    let path = debian.add(package)?;
    // A fresh Debian has the present list of packages.
    output(&mut debian.shell("apt-get update -q >&2"))?;
    let script = format!(
        "cd /root\napt-get install -q -y --no-install-recommends {path} >&2\n\
         parador exec / -- uname -r\n"
    );
    let start = Instant::now();
    let printed = output(&mut debian.shell(&script))?;
    let time = start.elapsed().as_secs_f64();
    ensure!(printed.trim().ends_with("-parador"), "another kernel has answered: {printed}");
    println!("kernel of the guest: {}", printed.trim());
    Ok(time)
}

/// Returns the median time of a command in milliseconds, and its spread. A shell in the Debian
/// reads its clock beside the command: the mounts of the folder do not count.
fn median(debian: &Debian, command: &str, rounds: usize) -> Result<(f64, f64)> {
    let mut times = Vec::new();
    for _ in 0..rounds {
        let printed = output(&mut debian.shell(&format!(
            "a=$(date +%s%N); {command} >&2; b=$(date +%s%N); echo $(((b - a) / 1000))"
        )))?;
        let us: f64 = printed.trim().parse().context("the shell printed no time")?;
        times.push(us / 1000.0);
    }
    times.sort_by(f64::total_cmp);
    let median = (times[(rounds - 1) / 2] + times[rounds / 2]) / 2.0;
    Ok((median, (times[rounds - 1] - times[0]) / median))
}

/// Measures a command that does nothing.
fn exec(debian: &Debian) -> Result<Figure> {
    let (time, spread) = median(debian, "parador exec / -- true", ROUNDS)?;
    Ok(Figure { spread, ..Figure::new("exec_ms", "parador exec / -- true, median", time, "ms")? })
}

/// Measures tools of Debian with the package.
fn tools(package: &Path) -> Result<Vec<Figure>> {
    let debian = Debian::with_tools()?;
    debian.install(package)?;
    let command = format!("PATH={QEMU}:$PATH fakemachine -b qemu -- true");
    let (time, spread) = median(&debian, &command, FAKEMACHINE_ROUNDS)?;
    let title = "fakemachine -b qemu -- true, median";
    let fakemachine = Figure::new("fakemachine_s", title, time / 1000.0, "s")?;
    let [host, ours, theirs] = [Machine::Host, Machine::Parador, Machine::Translation]
        .map(|machine| shows::build(&debian, machine));
    let (host, ours, theirs) = (host?, ours?, theirs?);
    ours.is_as(&host)?;
    theirs.is_as(&host)?;
    println!(
        "debos: host {:.1} s, parador {:.1} s, QEMU {:.1} s",
        host.time, ours.time, theirs.time
    );
    let ratio = "debos, relative to --disable-fakemachine";
    let share = "debos, relative to QEMU's translation";
    Ok(vec![
        Figure { spread, ..fakemachine },
        Figure::new("debos_ratio", ratio, ours.time / host.time, "x")?,
        Figure::new("debos_tcg_share", share, ours.time / theirs.time, "share")?,
    ])
}

/// Folder of this measurement.
fn work() -> PathBuf {
    target().join("bench/tools")
}

fn remove(folder: &Path) -> Result<()> {
    match folder.exists() {
        true => output(Command::new("rm").args(["-rf", "--one-file-system"]).arg(folder)).map(drop),
        false => Ok(()),
    }
}
