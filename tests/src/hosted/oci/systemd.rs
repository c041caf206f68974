//! Containers of podman on an emulated Debian with systemd and cgroups of version 2: those of root
//! and of an ordinary user, each in a scope that systemd makes.

use crate::system::{ONE_THREAD, qemu, target};
use crate::tools::{Debian, output, package};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Seconds that the machine may run; its work takes some minutes.
const LIMIT: u32 = 1500;
/// Most size of its disk.
const SIZE: &str = "4G";
/// The life of a container, by root and by the user; `$1` is a name. The cgroup of the container is
/// that of its carrier, and its limits are systemd's, too. A lack of memory in the guest
/// ends a process of the host there, too, which its kernel prints.
const LIFE: &str = r#"export XDG_RUNTIME_DIR=/run/user/$(id -u)
export DBUS_SESSION_BUS_ADDRESS=unix:path=$XDG_RUNTIME_DIR/bus
[ $(id -u) = 0 ] && unset DBUS_SESSION_BUS_ADDRESS
user=$([ $(id -u) = 0 ] || echo --user)
podman() { /usr/bin/podman --runtime /usr/bin/parador-oci "$@"; }
podman import -q /srv/image.tar image >/dev/null
echo "$1: cgroups $(podman info --format '{{.Host.CgroupManager}} {{.Host.CgroupsVersion}}')"
podman run --rm --network none image sh -c 'echo in a VM; exit 7'
echo "$1: code $?"
id=$(podman run -d --network none --memory 512m image sleep 1000)
cgroup=$(sed -n 's/^0:://p' /proc/$(podman inspect -f '{{.State.Pid}}' $id)/cgroup)
echo "$1: cgroup $cgroup"
echo "$1: memory $(cat /sys/fs/cgroup$cgroup/memory.max)"
systemctl $user daemon-reload
echo "$1: known $(systemctl $user show -P MemoryMax libpod-$id.scope)"
echo "$1: kept $(cat /sys/fs/cgroup$cgroup/memory.max)"
podman exec $id echo "$1: exec"
podman stop -t 1 $id >/dev/null
eater=$(podman run -d --network none --memory 16m image sh -c 'while :; do x=$x$x.; done')
echo "$1: without memory $(podman wait $eater)"
podman rm $eater >/dev/null
podman rm $id >/dev/null
echo "$1: removed $?"
sleep 2
[ -e /sys/fs/cgroup$cgroup ] || echo "$1: nothing is left"
"#;
/// First the user's, whose manager lingers.
const TEST: &str = "loginctl enable-linger user
until [ -S /run/user/$(id -u user)/bus ]; do sleep 1; done
machinectl --quiet shell user@ /bin/sh /srv/life.sh user | cat
sh /srv/life.sh root
systemctl list-units --no-legend 'libpod-*' | grep . || echo no scopes
echo the end
";

/// The life of a container of root and of a user.
pub fn systemd() -> Result<()> {
    let debian = Debian::with_systemd()?;
    debian.install(&package()?)?;
    let add = |name: &str, text: &str| {
        let path = debian.root().join("srv").join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    add("life.sh", LIFE)?;
    add("test.sh", TEST)?;
    let folder = TempDir::new_in(target()).context("cannot make a folder")?;
    let disk = disk(&debian, folder.path())?;
    let boot = |name: &str| newest(&debian.root().join("boot"), name);
    // Its time is counted in instructions, because the time that an agent has for its start is
    // limited, and other work may slow this host down.
    let mut machine = qemu(LIMIT, ONE_THREAD);
    machine.args(["-icount", "shift=1,sleep=off"]);
    // As for other emulated hosts: QEMU 7.2 does `IRET` of programs with the rights of a kernel.
    machine.args(["-cpu", "max,-smap,-pku", "-m", "3G"]);
    machine.arg("-kernel").arg(boot("vmlinuz-")?).arg("-initrd").arg(boot("initrd.img-")?);
    machine.args(["-append", "root=/dev/vda rw console=ttyS0 quiet systemd.show_status=0"]);
    machine.arg("-drive").arg(format!("file={},format=raw,if=virtio,cache=unsafe", disk.display()));
    check(&output(&mut machine)?.replace('\r', ""))
}

/// Makes a file system with the files of a Debian.
fn disk(debian: &Debian, folder: &Path) -> Result<PathBuf> {
    let disk = folder.join("disk");
    let mut make = Command::new("mke2fs");
    make.args(["-q", "-t", "ext4", "-d"]).arg(debian.root()).arg(&disk).arg(SIZE);
    output(&mut make)?;
    Ok(disk)
}

/// Returns the file in a folder whose name begins so.
fn newest(folder: &Path, prefix: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).context("cannot list the kernels")?;
    let mut found: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    found
        .retain(|path| path.file_name().is_some_and(|it| it.to_string_lossy().starts_with(prefix)));
    found.sort();
    found.pop().with_context(|| format!("no {prefix} in {}", folder.display()))
}

fn check(console: &str) -> Result<()> {
    let missing = |text: &str| format!("`{text}` is missing:\n{console}");
    for caller in ["user", "root"] {
        let lines = [
            "cgroups systemd v2",
            "code 7",
            "exec",
            "without memory 137",
            "removed 0",
            "nothing is left",
        ];
        for line in lines.map(|line| format!("{caller}: {line}")) {
            ensure!(console.contains(&line), missing(&line));
        }
        let user = format!("UID:{} ", if caller == "root" { 0 } else { 1000 });
        let is_kill = |line: &str| line.contains("Memory cgroup out of memory: Killed process");
        let killed = console.lines().any(|line| is_kill(line) && line.contains(&user));
        ensure!(killed, missing("Memory cgroup out of memory"));
        let value = |name: &str| {
            let begin = format!("{caller}: {name} ");
            let found = console.lines().find_map(|line| line.strip_prefix(&begin));
            found.with_context(|| missing(&begin))
        };
        let cgroup = value("cgroup")?;
        ensure!(cgroup.contains("/libpod-") && cgroup.ends_with(".scope"), "{caller}: {cgroup}");
        // That of the container and that of the VM besides.
        let memory: u64 = value("memory")?.parse().context("no limit of memory")?;
        ensure!(memory >= 512 << 20, "{caller}: {memory} bytes");
        for name in ["known", "kept"] {
            ensure!(value(name)? == memory.to_string(), "{caller}: {name} {}", value(name)?);
        }
    }
    match ["in a VM", "no scopes", "the end"].iter().find(|text| !console.contains(**text)) {
        Some(text) => bail!(missing(text)),
        None => Ok(()),
    }
}
