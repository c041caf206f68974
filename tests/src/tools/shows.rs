//! Tools of others with Parador: what a user of each does, in a Debian 12 of its own.

use super::{Debian, output, package};
use crate::system::workspace;
use anyhow::{Context, Error, Result, ensure};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::Instant;

/// Recipe of debos: a Debian on a disk with an EFI system partition.
const RECIPE: &str = include_str!("../../tools/recipe.yaml");
/// Folder of the EFI system partition in the list of files.
const ESP: &str = " ./boot/efi";
/// Script that traces a guest.
const TRACERS: &str = include_str!("../../tools/trace.sh");
/// Job of a CI service, which users copy.
const JOB: &str = include_str!("../../../examples/ci.sh");

/// Program that runs the steps of a recipe of debos.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// This host, without a VM.
    Host,
    /// `parador qemu`, by its other name.
    Parador,
    /// QEMU, by translation; with the kernel of the package.
    Translation,
}

/// Result of debos.
#[derive(Debug)]
pub struct Built {
    /// Time in seconds.
    pub time: f64,
    /// Files of the image: kind, mode, owner, group, path, target of a link.
    list: Vec<String>,
}

/// Builds an image with debos.
///
/// # Errors
/// debos fails.
pub fn build(debian: &Debian, machine: Machine) -> Result<Built> {
    // debos shares the recipe's folder, in which the mirror is, too.
    let folder = debian.root().join("srv");
    fs::write(folder.join("recipe.yaml"), RECIPE).context("cannot write the recipe")?;
    let (before, options) = match machine {
        // The loop device stays if debos fails. `/dev/disk` is udev's, and systemd-nspawn wants it.
        Machine::Host => (
            "PATH=/srv/no-udev:$PATH\n\
             [ -d /dev/disk ] || { mkdir /dev/disk; made=/dev/disk; }\n\
             trap 'losetup -n -O NAME -j out/image.img | xargs -r losetup -d
             if [ -n \"$made\" ]; then rmdir $made; fi' EXIT",
            "--disable-fakemachine -t esp:none",
        ),
        Machine::Parador => ("PATH=/usr/lib/parador/qemu:$PATH", "-b qemu"),
        Machine::Translation => ("PATH=/srv/tcg:$PATH", "-b qemu"),
    };
    let script = format!(
        "cd /srv\nmkdir -p out\nmade=\n{before}\n\
         timeout -s KILL 5400 debos {options} --artifactdir out recipe.yaml >&2\n"
    );
    let start = Instant::now();
    output(&mut debian.shell(&script)).with_context(|| format!("{machine:?}"))?;
    let time = start.elapsed().as_secs_f64();
    let list = fs::read_to_string(folder.join("out/list")).context("debos made no list")?;
    fs::remove_dir_all(folder.join("out")).context("cannot remove the image")?;
    Ok(Built { time, list: list.lines().map(str::to_owned).collect() })
}

impl Built {
    /// Checks that a VM has made the same files as this host, and a file on its EFI system
    /// partition.
    ///
    /// # Errors
    /// They differ.
    pub fn is_as(&self, host: &Self) -> Result<()> {
        let is_esp = |line: &&String| line.contains(ESP);
        let esp: Vec<_> = self.list.iter().filter(is_esp).collect();
        let has_file = esp.iter().any(|line| line.contains("/boot/efi/startup.nsh"));
        ensure!(has_file, "no file on the EFI system partition: {esp:?}");
        let lines = |built: &Self| -> Vec<String> {
            built.list.iter().filter(|line| !is_esp(line)).cloned().collect()
        };
        let (ours, theirs) = (lines(self), lines(host));
        let only = |a: &[String], b: &[String]| -> Vec<String> {
            a.iter().filter(|line| !b.contains(line)).take(20).cloned().collect()
        };
        let (here, there) = (only(&ours, &theirs), only(&theirs, &ours));
        ensure!(ours == theirs, "only in a VM: {here:#?}\nonly on the host: {there:#?}");
        ensure!(ours.len() > 1000, "the image has {} files", ours.len());
        Ok(())
    }
}

/// Makes the package of this tree, once for all tests of this process.
fn made() -> Result<PathBuf> {
    static PACKAGE: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let made = PACKAGE.get_or_init(|| {
        let made = output(Command::new("scripts/cargo").args(["xtask", "package"]));
        made.and_then(|_| package()).map_err(|error| format!("{error:#}"))
    });
    made.clone().map_err(Error::msg)
}

/// A Debian with tools and the package of this tree.
fn installed() -> Result<Debian> {
    let package = made()?;
    let debian = Debian::with_tools()?;
    debian.install(&package)?;
    Ok(debian)
}

/// Runs a script without input; it ends with this code.
fn ends(debian: &Debian, script: &str, code: i32) -> Result<String> {
    let ended = debian.shell(script).output().context("cannot start a shell")?;
    let Output { status, stdout, stderr } = ended;
    let [text, errors] = [stdout, stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    ensure!(status.code() == Some(code), "{status}, and not {code}:\n{script}\n{text}{errors}");
    Ok(text)
}

/// fakemachine runs a command and returns its code. debos makes the same files with
/// `parador qemu` as on the host.
pub fn debos() -> Result<()> {
    let debian = installed()?;
    let fakemachine = "PATH=/usr/lib/parador/qemu:$PATH timeout -s KILL 300 fakemachine -b qemu";
    ends(&debian, &format!("{fakemachine} -- \"sh -c 'exit 7'\" </dev/null"), 7)?;
    let host = build(&debian, Machine::Host)?;
    build(&debian, Machine::Parador)?.is_as(&host)
}

/// debvm makes a Debian and runs it until its shutdown, with ssh.
pub fn debvm() -> Result<()> {
    let printed = ends(
        &installed()?,
        "cd /srv\n\
         PATH=/usr/lib/parador/qemu:$PATH\n\
         ssh-keygen -q -t ed25519 -N '' -f key\n\
         debvm-create -o vm.img -z 1G -k key.pub -- \
             'deb [trusted=yes] copy:///srv/mirror bookworm main' >&2\n\
         port=$(python3 -c 'import socket; s = socket.socket(); s.bind((\"127.0.0.1\", 0)); print(s.getsockname()[1])')\n\
         timeout -s KILL 900 debvm-run -i vm.img -s $port </dev/null >log 2>&1 &\n\
         trap 'tail -n 30 log >&2' EXIT\n\
         until ssh -o NoHostAuthenticationForLocalhost=yes -o BatchMode=yes -o ConnectTimeout=60 \
             -i key -p $port root@127.0.0.1 'uname -r; systemctl is-system-running --wait; poweroff'\n\
         do kill -0 $!; sleep 1; done\n\
         wait $!\n",
        0,
    )?;
    ensure!(printed.contains("-parador\n") && printed.contains("running\n"), "{printed}");
    Ok(())
}

/// Programs that trace by BPF and tracepoints show what a guest does: system calls by name, kernel
/// functions with arguments of their types, functions of programs, histograms.
pub fn tracers() -> Result<()> {
    let debian = installed()?;
    let root = debian.root().join("srv/trace.sh");
    fs::write(root, TRACERS).context("cannot write the script")?;
    let printed = ends(&debian, "timeout -s KILL 600 parador exec / -- sh /srv/trace.sh", 0)?;
    for text in [
        "openat by cat: 1",
        "vfs_open of trace-me",
        "@reads[head]: 1",
        "@opened_us",
        "main of bash: 1",
        "openat(",
        "trace-me",
    ] {
        ensure!(printed.contains(text), "`{text}` did not appear:\n{printed}");
    }
    Ok(())
}

/// virtme-ng runs a command and returns its code.
pub fn virtme_ng() -> Result<()> {
    let script = "cd /srv\n\
        PATH=/usr/lib/parador/qemu:/opt/vng/bin:$PATH\n\
        timeout -s KILL 300 vng --run /usr/lib/modules/*-parador/vmlinuz -- \
            'uname -r; exit 3' </dev/null\n";
    let printed = ends(&installed()?, script, 3)?;
    ensure!(printed.contains("-parador"), "{printed}");
    Ok(())
}

/// The job of a CI service installs the package, and passes the result of a test on. lintian finds
/// no error in the package, and each override gives a reason.
pub fn job() -> Result<()> {
    let debian = Debian::with_tools()?;
    let path = debian.add(&made()?)?;
    let project = debian.root().join("root/project");
    fs::create_dir(&project).context("cannot make a folder")?;
    fs::write(project.join("ci.sh"), JOB).context("cannot write the job")?;
    let test = "set -e\nuname -r >result\ntouch /usr/bin/x\n[ \"$1\" = good ] || exit 5\n";
    fs::write(project.join("test.sh"), test).context("cannot write the test")?;
    for (word, code) in [("good", 0), ("bad", 5)] {
        let script =
            format!("cd /root/project\nrm -f result\nsh ci.sh {path} sh test.sh {word} </dev/null");
        ends(&debian, &script, code)?;
        let result = fs::read_to_string(project.join("result")).context("no result")?;
        ensure!(result.trim().ends_with("-parador"), "the test ran on the host: {result}");
        ensure!(!debian.root().join("usr/bin/x").exists(), "the test has changed the host");
    }
    ends(&debian, &format!("lintian --allow-root --fail-on error {path}"), 0)?;
    let overrides = workspace().join("xtask/package/lintian-overrides");
    let overrides = fs::read_to_string(overrides).context("no overrides")?;
    let has_reason =
        |(before, line): (&str, &str)| before.starts_with('#') || line.starts_with('#');
    let mut pairs = std::iter::once("").chain(overrides.lines()).zip(overrides.lines());
    ensure!(pairs.all(has_reason), "an override of lintian has no reason:\n{overrides}");
    Ok(())
}
