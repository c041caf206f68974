//! Host prerequisites of `parador`, and its report on them.

use super::escape::outside::plain_user;
use super::{Ended, Rig, children, end, start, succeed};
use crate::system::target;
use crate::transcript::ensure_lacks;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// A copy of `parador` alone runs a kernel that is named: without a source tree, a folder of
/// programs, an environment and a home.
pub fn copied() -> Result<()> {
    let rig = Rig::new()?;
    let copy = rig.folder().join("a copy");
    fs::copy(target().join("release/parador"), &copy).context("cannot copy parador")?;
    let run = || {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(&copy).arg("run").arg(rig.kernel());
        command.args(["-i", "busybox", "--backend", "process", "--timeout", "120s"]);
        command.env_clear().env("PATH", "/usr/bin:/bin").current_dir("/");
        command
    };
    end(&mut run(), "echo $((6*7)) is\nsleep 1\nmachine-exit 9\n")?.well(9, &["\n42 is\n"])?;
    // Its processes have the program's name.
    let mut child = start(&mut run())?;
    children(&child)?;
    succeed(Command::new("kill").arg(child.id().to_string()))?;
    child.wait().context("cannot wait for parador")?;
    Ok(())
}

/// `parador doctor` tries what a host permits, and says so when a filter of system calls, a limit
/// or the VM that it is in forbids it.
pub fn doctor() -> Result<()> {
    let parador = target().join("release/parador");
    let report = |command: &mut Command| -> Result<Value> {
        let output = command.output().context("cannot start parador")?;
        serde_json::from_slice(&output.stdout).with_context(|| format!("no report: {output:?}"))
    };
    let finding = |report: &Value, name: &str| -> Result<(String, String)> {
        let all = report["findings"].as_array().context("no findings")?;
        let one = all.iter().find(|one| one["name"] == name).with_context(|| name.to_owned())?;
        let text = |key: &str| one[key].as_str().unwrap_or_default().to_owned();
        Ok((text("state"), text("found")))
    };
    let here = report(Command::new(&parador).args(["doctor", "--json"]))?;
    ensure!(here["backend"].is_string(), "nothing runs here: {here}");
    let (state, found) = finding(&here, "passt")?;
    ensure!(state == "ok" && found.contains("/passt, "), "passt: {found}");
    for name in ["processes", "memory", "open files", "address space", "file size", "this host"] {
        ensure!(finding(&here, name)?.0 == "ok", "{name}: {here}");
    }
    let mut limited = Command::new("prlimit");
    limited.args(["--nproc=30", "--nofile=100", "--as=262144000"]).arg(&parador);
    let limited = report(limited.args(["doctor", "--json"]))?;
    for (name, wanted) in [("processes", "30 (RLIMIT_NPROC"), ("open files", "100 (RLIMIT_NOFILE")]
    {
        let (state, found) = finding(&limited, name)?;
        ensure!(state != "ok" && found.contains(wanted), "{name}: {found}");
    }
    ensure!(finding(&limited, "address space")?.0 == "missing", "{limited}");
    ensure!(limited["backend"].is_null(), "{limited}");
    // No namespaces inside, where sysctls say that there are.
    let mut denied = Command::new("unshare");
    denied.args(["--user", "--map-root-user", "sh", "-c"]);
    denied.arg("echo 0 >/proc/sys/user/max_user_namespaces && exec \"$@\"").arg("sh");
    let denied = report(denied.arg(&parador).args(["doctor", "--json"]))?;
    let (state, found) = finding(&denied, "user namespaces")?;
    ensure!(state == "absent" && found.contains("ENOSPC"), "user namespaces: {found}");
    inside()
}

/// In a VM of Parador in processes it says that none runs there.
fn inside() -> Result<()> {
    let rig = Rig::new()?;
    let parador = target().join("release/parador").display().to_string();
    let script = format!(
        "mount -t 9p -o trans=virtio,version=9p2000.L,msize=65560,ro host /mnt
        for folder in proc dev sys; do mount -o bind /$folder /mnt/$folder; done
        chroot /mnt {parador} doctor; echo code $?; machine-exit 5\n"
    );
    let mut machine = rig.run();
    machine.args(["-m", "512M", "--share", "/:host,ro=on"]);
    let ended = end(&mut machine, &script)?;
    ended.well(
        5,
        &["MISSING  this host", "back end `process`, which cannot run nested VMs", "code 69"],
    )?;
    Ok(())
}

/// Most descriptors that the table of limits goes through: all a machine with each device needs
/// less.
const MOST_FILES: u32 = 64;

/// With low limits of descriptors, processes, memory and file sizes `parador run` works or names
/// the failed operation and its cause; it never panics, does not hang, and leaves no process.
pub fn limits() -> Result<()> {
    let rig = Rig::new()?;
    let (parador, kernel) = (rig.folder().join("parador"), rig.folder().join("vmlinux"));
    fs::copy(target().join("release/parador"), &parador).context("cannot copy parador")?;
    fs::copy(rig.kernel(), &kernel).context("cannot copy the kernel")?;
    fs::set_permissions(rig.folder(), Permissions::from_mode(0o777))
        .context("cannot set a mode")?;
    let disk = rig.folder().join("raw");
    fs::write(&disk, [0; 4096]).context("cannot write a file")?;
    fs::set_permissions(&disk, Permissions::from_mode(0o666)).context("cannot set a mode")?;
    let user = plain_user()?;
    let run = |limit: &str, before: &[&str], options: &[&str]| {
        // A time limit of its own: what waits for nothing has to be seen.
        let mut command = Command::new("timeout");
        command.args(["-k", "1", "60"]).args(&user).args(before);
        command.args(["prlimit", limit]).arg(&parador);
        command.arg("run").arg(&kernel).args(["--backend", "process", "-i", "busybox"]);
        command.args(["--cmdline", "quiet parador.run=true"]).args(options);
        command.env_clear().env("PATH", "/usr/bin:/bin").current_dir(rig.folder());
        command
    };
    let all: &'static [&'static str] =
        &["--disk", "raw", "--share", ".:here", "--vsock", "cid=5,path=vsock"];
    let more: &'static [&'static str] =
        &["--gdb", "unix=gdb", "--api-socket", "api", "--cpus", "2"];
    let files = |options: &'static [&'static str]| {
        (6..=MOST_FILES).map(move |most| (format!("--nofile={most}"), options))
    };
    let processes = (1..=24).map(|most| (format!("--nproc={most}"), all));
    let memory = [50, 100, 300, 1000, 2000].map(|most| (format!("--as={most}000000"), all));
    let written = ["0", "4096", "100000000"].map(|most| (format!("--fsize={most}"), all));
    let table = files(&[]).chain(files(all)).chain(files(more)).chain(processes);
    let table =
        table.chain(memory).chain(written).map(|(limit, options)| (limit, options, &[][..]));
    // Descriptors of the caller move those of `parador` out of the way of the VM's numbers: a VM
    // then starts with the lowest limit.
    let inheriting = ["bash", "-c", "exec 3<. 4<. 5<. 6<. 7<. 8<. 9<. 10<. \"$@\"", "bash"];
    let lowest =
        (16..=MOST_FILES).map(|most| (format!("--nofile={most}"), &[][..], &inheriting[..]));
    for (limit, options, before) in table.chain(lowest) {
        let ended = end(&mut run(&limit, before, options), "")?;
        acceptable(ended).with_context(|| format!("{limit} {options:?}"))?;
        let left = Command::new("pgrep").arg("-f").arg(&parador).output()?;
        let left = String::from_utf8_lossy(&left.stdout).into_owned();
        ensure!(left.is_empty(), "{limit} {options:?}: processes are left: {left}");
    }
    end(&mut run("--nofile=64", &[], all), "")?.well(0, &[])?;
    Ok(())
}

/// It ran, or it has said what it could not do, and why.
fn acceptable(ended: Ended) -> Result<()> {
    if ended.code() == 0 {
        return ended.well(0, &[]).map(drop);
    }
    let ended = ended.well(71, &["parador: ", "cannot "])?;
    let wrong = ["panicked", "Bad file descriptor", "Invalid argument"];
    ensure_lacks(&ended.messages, &wrong)
}
