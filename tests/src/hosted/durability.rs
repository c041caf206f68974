//! Flushed data survives every failure; a disk that has lost data fails all further flushes
//! (`docs/durability.md`).
//!
//! A loop device whose file is on a full file system takes all writes, and loses them when the host
//! writes them back: the failure that a flush reports once. The emulated host loses its power when
//! its QEMU is ended: what is in its page cache is gone.

use super::net::wait_for;
use super::{Rig, children, end, killed, start};
use crate::kvm::{Host, emulated, no_files, succeed};
use crate::transcript::ensure_lacks;
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// A command line of a guest that writes to its first disk, flushes that, and waits. The text is in
/// sector [`PLACE`].
const WRITES: &str = "quiet parador.run=\"(echo is to last; cat /dev/zero) | dd of=/dev/vda bs=4k count=1 seek=7 conv=fsync,notrunc \
    2>/dev/null; echo it is flushed; while :; do sleep 9; done\"";
/// The same without a flush: what is written is past the guest's cache.
const WRITES_ONLY: &str = "(echo is to last; cat /dev/zero) | dd of=/dev/vda bs=4k count=1 seek=7 iflag=fullblock oflag=direct conv=notrunc \
    2>/dev/null; echo it is written";
const WRITTEN: &str = "it is written";
const TEXT: &[u8] = b"is to last\n";
/// Offset of the text in bytes.
const PLACE: u64 = 7 * 4096;
/// Bytes of a disk.
const LENGTH: u64 = 1 << 20;

/// Script of the emulated host, for each back end.
const SCRIPT: &str = r#"
quiet() { parador run /vmlinux -i busybox -m 128M --timeout 300s --artifacts /bin "$@" </dev/null 2>&1; }
flush='dd if=/dev/null of=/dev/vda count=0 conv=fsync,notrunc 2>/dev/null'
disk() { mkdir -p $1; mount -t tmpfs -o size=$2 full $1; truncate -s 8M $1/file; losetup $3 $1/file; }

for backend in kvm process; do
echo "== lost by $backend"
disk /tmp/full-$backend 2M /dev/loop0
quiet --backend $backend -d /dev/loop0 -p "quiet parador.run=\"
    $flush && echo an early flush succeeds
    dd if=/dev/zero of=/dev/vda bs=64k count=96 conv=fsync,notrunc 2>/dev/null && echo data is safe
    sleep 1; $flush && echo a late flush succeeds; $flush && echo a later flush succeeds; echo ends\""
echo "code $?"
mount -o remount,size=16M /tmp/full-$backend
quiet --backend $backend -d /dev/loop0 -p "quiet parador.run=\"
    dd if=/dev/zero of=/dev/vda bs=64k count=96 conv=fsync,notrunc 2>/dev/null && $flush && echo reopened, flushes succeed; echo ends\""
echo "code $?"
losetup -d /dev/loop0; umount /tmp/full-$backend
done

echo "== killed"
truncate -s 1M /tmp/killed.img
quiet --backend kvm -d /tmp/killed.img -p 'quiet parador.run="ONLY; while :; do sleep 9; done"' >/tmp/log &
until grep -q 'it is written' /tmp/log; do sleep 1; done
machine=$(for process in /proc/[0-9]*; do
    tr '\0' '\n' <$process/cmdline | grep -qx -e --kvm-machine && echo $process
done)
kill -9 ${machine#/proc/}; wait $!
echo "code $?"
dd if=/tmp/killed.img bs=4k skip=7 count=1 2>/dev/null | head -n 1

echo "== used"
disk /tmp/used 16M /dev/loop1
mkswap /dev/loop1 >/dev/null; swapon /dev/loop1
quiet --backend process -d /dev/loop1 -p quiet
echo "code $?"
quiet --backend process -d /dev/loop1,ro=on -p 'quiet parador.run="dd if=/dev/vda of=/dev/null bs=4k count=1 2>/dev/null && echo only read"'
echo "code $?"
swapoff /dev/loop1
quiet --backend process -d /dev/loop1 -p 'quiet parador.run="echo free again"'
echo "code $?"
echo "== end"
"#;

/// After one failed flush all flushes fail until the disk is opened again; a block device that the
/// host uses is refused.
pub fn lost() -> Result<()> {
    let folder = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
    let script = SCRIPT.replace("ONLY", WRITES_ONLY);
    let text = succeed(emulated(folder.path(), &script, no_files)?.stdin(Stdio::null()))?;
    check(&text).with_context(|| format!("the emulated host has printed:\n{text}"))
}

fn check(text: &str) -> Result<()> {
    let part = |name: &str, wanted: &[&str], unwanted: &[&str]| -> Result<()> {
        let part = text.split("== ").find(|part| part.starts_with(name));
        let part = part.with_context(|| format!("no part `{name}`"))?;
        for wanted in wanted {
            ensure!(part.contains(wanted), "{name}: `{wanted}` is missing");
        }
        ensure_lacks(part, unwanted).context(name.to_owned())
    };
    let wanted = ["an early flush succeeds", "request failed", "ends\n", "reopened"];
    let unwanted = ["data is safe", "a late flush succeeds", "a later flush succeeds"];
    part("lost by kvm", &wanted, &unwanted)?;
    part("lost by process", &wanted, &unwanted)?;
    part("killed", &["code 137", "is to last"], &[])?;
    part("used", &["is in use by the host", "code 71", "only read", "free again"], &[])?;
    part("end", &[], &[])
}

/// Completed writes are in the file after any of the VM's processes is killed and after a guest
/// panic. There is no flush.
pub fn kept() -> Result<()> {
    let rig = Rig::new()?;
    let disk = rig.path("kept.img");
    let run = |then: &str| {
        let line = format!("quiet parador.run=\"{WRITES_ONLY}; {then}\"");
        let mut run = rig.run();
        run.args(["-d", "kept.img", "-p", &line]);
        run
    };
    // `parador` itself, the device process, a worker of the disk, the last process of the guest.
    for (victim, code) in [(0, None), (1, Some(137)), (2, Some(137)), (usize::MAX, Some(137))] {
        make(&disk)?;
        let mut child = start(&mut run("while :; do sleep 9; done"))?;
        wait_for(&mut child, WRITTEN)?;
        let all = children(&child)?;
        let process = all.get(victim).or(all.last()).copied().context("no process")?;
        killed(child, &all, process, "KILL", code).with_context(|| format!("victim {victim}"))?;
        has_text(&disk).with_context(|| format!("victim {victim}"))?;
    }
    make(&disk)?;
    end(&mut run("echo c >/proc/sysrq-trigger"), "")?.has(80, &[WRITTEN])?;
    has_text(&disk).context("after a panic")
}

/// Script of an emulated host that loses its power: a raw disk with each back end, and an image in
/// a file system.
const POWER: &str = r#"
quiet() { parador run /vmlinux -i busybox -m 128M --timeout 600s --artifacts /bin -p 'WRITES' "$@" </dev/null; }
until [ -e /dev/nvme2n1 ]; do sleep 1; done
mkdir /tmp/files; mount -t ext4 /dev/nvme2n1 /tmp/files
quiet --backend kvm -d /dev/nvme0n1 >1 2>&1 &
quiet --backend process -d /dev/nvme1n1 >2 2>&1 &
quiet --backend process -d /tmp/files/image.qcow2 >3 2>&1 &
for log in 1 2 3; do until grep 'it is flushed' $log; do sleep 1; done; done
echo "== flushed"
while :; do sleep 9; done
"#;

/// Flushed data is on the host's disk when the host loses its power.
pub fn power() -> Result<()> {
    let folder = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
    let path = |name: &str| folder.path().join(name);
    let files = path("files");
    fs::create_dir(&files)?;
    let image = files.join("image.qcow2");
    let mut create = Command::new("qemu-img");
    succeed(create.args(["create", "-q", "-f", "qcow2"]).arg(&image).arg(LENGTH.to_string()))?;
    File::create(path("2.img"))?.set_len(64 << 20)?;
    succeed(
        Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).args([&files, &path("2.img")]),
    )?;
    let mut machine = emulated(folder.path(), &POWER.replace("WRITES", WRITES), no_files)?;
    for number in 0..3 {
        let name = format!("{number}.img");
        if number != 2 {
            make(&path(&name))?;
        }
        let drive = format!("file={name},if=none,id=drive{number},format=raw,cache=writeback");
        let device = format!("nvme,drive=drive{number},serial={number}");
        machine.args(["-drive", &drive, "-device", &device]);
    }
    let mut host = Host::start(&mut machine)?;
    let flushed = host.until("== flushed");
    host.end(true)?;
    flushed.with_context(|| format!("the emulated host has printed:\n{}", host.printed))?;
    for name in ["0.img", "1.img"] {
        has_text(&path(name)).with_context(|| name.to_owned())?;
    }
    // The journal first. 1: it has done something.
    let status =
        Command::new("e2fsck").arg("-fp").arg(path("2.img")).stdout(Stdio::null()).status();
    let status = status.context("cannot start e2fsck")?;
    ensure!(matches!(status.code(), Some(0 | 1)), "e2fsck: {status}");
    let dump = format!("dump /image.qcow2 {}", path("after.qcow2").display());
    succeed(Command::new("debugfs").args(["-R", &dump]).arg(path("2.img")))?;
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-f", "qcow2", "-O", "raw"]);
    succeed(convert.args([path("after.qcow2"), path("after.img")]))?;
    has_text(&path("after.img")).context("the image")
}

/// Makes an empty disk.
fn make(path: &Path) -> Result<()> {
    let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    file.set_len(LENGTH).context("cannot make a disk")
}

/// Checks that a disk has the data that the guest flushed.
fn has_text(disk: &Path) -> Result<()> {
    let mut found = [0; TEXT.len()];
    let file = File::open(disk).with_context(|| format!("cannot open {}", disk.display()))?;
    file.read_exact_at(&mut found, PLACE).context("cannot read a disk")?;
    ensure!(found == TEXT, "flushed data is missing: {found:?}");
    Ok(())
}
