//! Raw and qcow2 disks.

use super::{Rig, children, end, start, succeed_with};
use crate::system::artifacts;
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::Duration;

/// Written data is found by the next VM; a read-only disk does not change.
pub fn disk() -> Result<()> {
    let rig = Rig::new()?;
    let write = "dd if=/dev/urandom of=/mnt/data bs=1M count=40 2>/dev/null
        md5sum /mnt/data >/mnt/sum; sync; echo 3 >/proc/sys/vm/drop_caches; md5sum -c /mnt/sum
        cat /sys/block/vda/serial; echo; fstrim -v /mnt || true; md5sum -c /mnt/sum; mount -o remount,ro /mnt\n";
    end(&mut rig.script(write, &[])?, "")?.well(0, &["/mnt/data: OK", "disk0"])?;
    rig.check_disk("disk.img")?;

    fs::rename(rig.path("disk.img"), rig.path("second.img")).context("cannot rename a disk")?;
    let read = "mkdir /second; mount -o ro /dev/vdb /second
        sed 's,/mnt,/second,' /second/sum | md5sum -c; cat /sys/block/vdb/serial; echo
        ! dd if=/dev/zero of=/dev/vdb bs=512 count=1
        for n in 1 2 3 4; do dd if=/dev/vdb of=/dev/null bs=64k & done; wait
        head -c 64 /dev/hwrng | wc -c\n";
    let before = fs::read(rig.path("second.img")).context("cannot read a disk")?;
    let mut machine = rig.script(read, &[])?;
    machine.args(["--disk", "path=second.img,ro=on,id=the second"]);
    end(&mut machine, "")?.well(0, &["/second/data: OK", "the second", "\n64\n"])?;
    let after = fs::read(rig.path("second.img")).context("cannot read a disk")?;
    ensure!(before == after, "a disk that is read only has changed");
    Ok(())
}

/// Two VMs cannot write to one disk; the end of a VM releases its disk.
pub fn disk_in_use() -> Result<()> {
    let rig = Rig::new()?;
    let mut first = rig.script("sleep 1000\n", &[])?;
    let mut child = start(&mut first)?;
    children(&child)?;
    let refused = end(rig.run().args(["-d", "disk.img"]), "")?;
    refused.has(71, &["is in use by another VM"])?;
    child.kill().and_then(|()| child.wait()).context("cannot end parador")?;
    end(rig.run().args(["-d", "disk.img"]), "poweroff\n")?.well(0, &["the guest powered off"])?;
    Ok(())
}

/// On a full host disk the guest gets I/O errors and the VM continues.
pub fn disk_full() -> Result<()> {
    let rig = Rig::new()?;
    let large = File::create(rig.path("large.img")).context("cannot make a disk")?;
    large.set_len(400 << 20).context("cannot make a disk")?;
    let script = "dd if=/dev/zero of=/dev/vdb bs=1M count=8 conv=fsync
        ! dd if=/dev/zero of=/dev/vdb bs=1M seek=390 count=8 conv=fsync
        echo continues\n";
    let mut inner = rig.script(script, &[])?;
    inner.args(["-m", "256M"]);
    // The limit of file sizes, in units of 512 bytes: between guest memory and the end of the disk.
    let mut machine = Command::new("sh");
    machine.args(["-c", "ulimit -f 650000; exec \"$@\" -d large.img", "sh"]);
    machine.arg(inner.get_program()).args(inner.get_args()).current_dir(rig.folder.path());
    machine.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    end(&mut machine, "")?.has(0, &["I/O error", "continues", "request failed"])?;
    Ok(())
}

/// A disk that is a qcow2 image: what the guest has written is in it when the machine has ended,
/// and QEMU finds nothing wrong.
pub fn qcow2() -> Result<()> {
    let rig = Rig::new()?;
    let image = |arguments: &[&str]| {
        succeed_with(Command::new("qemu-img").args(arguments).current_dir(rig.folder.path()))
    };
    for (version, more) in [("1.1", "compat=1.1"), ("0.10", "compat=0.10,cluster_size=4k")] {
        image(&["create", "-q", "-f", "qcow2", "-o", more, "new.qcow2", "4G"])?;
        let script = "dd if=/dev/urandom of=/tmp/data bs=1M count=12 2>/dev/null
            dd if=/tmp/data of=/dev/vdb bs=1M seek=3000 2>/dev/null
            sync; echo 3 >/proc/sys/vm/drop_caches
            dd if=/dev/vdb bs=1M skip=3000 count=12 2>/dev/null | cmp - /tmp/data && echo the same
            dd if=/dev/vdb bs=1M skip=100 count=9 2>/dev/null | cmp -n 9000000 - /dev/zero && echo zeros
            blkdiscard -z -o 3145728000 -l 1000960 /dev/vdb || dd if=/dev/zero of=/dev/vdb bs=512 seek=6144000 count=1955 2>/dev/null
            dd if=/dev/vdb bs=512 skip=6144000 count=1955 2>/dev/null | cmp -n 1000960 - /dev/zero && echo zeroed
            /mnt/linux-disk vdb 256 || :
            mkdir /second; mount /dev/vdc /second; cp /tmp/data /second; fstrim /second; sync
            for n in 1 2 3 4; do cp /tmp/data /second/$n & done; wait; rm /second/2; umount /second
            blockdev --getsize64 /dev/vdb; md5sum /tmp/data\n";
        let mut machine = rig.script(script, &[&artifacts().join("linux-disk")])?;
        image(&["convert", "-q", "-O", "qcow2", "-o", more, "disk.img", "copy.qcow2"])?;
        machine.args(["-c", "2", "-d", "new.qcow2", "-d", "copy.qcow2"]);
        let mut texts = vec!["the same", "zeros", "zeroed", "\n4294967296\n"];
        // Images of the older version have no zeros of their own, so that they take a while.
        if version == "0.10" {
            texts.push("disk: a read beside zeros");
        }
        let ended = end(&mut machine, "")?.well(0, &texts)?;
        let said = ended.console.lines().find_map(|line| line.strip_suffix("  /tmp/data"));
        let sum = said.context("no checksum")?.trim();
        for name in ["new.qcow2", "copy.qcow2"] {
            image(&["check", name]).with_context(|| format!("{name}, version {version}"))?;
        }
        image(&["convert", "-O", "raw", "copy.qcow2", "copy.img"])?;
        rig.check_disk("copy.img")?;
        let script = "mkdir /second; mount -o ro /dev/vdb /second; cat /second/4 | md5sum
            ! dd if=/dev/zero of=/dev/vdb bs=512 count=1\n";
        let mut machine = rig.script(script, &[])?;
        let before = fs::read(rig.path("copy.qcow2")).context("cannot read an image")?;
        machine.args(["-d", "copy.qcow2,ro=on"]);
        end(&mut machine, "")?.well(0, &[sum])?;
        let after = fs::read(rig.path("copy.qcow2")).context("cannot read an image")?;
        ensure!(before == after, "an image that is read only has changed");
    }

    // What was to last is there, whatever ends the machine.
    let script = "echo root: | dd of=/dev/vdb bs=512 seek=77 count=1 conv=sync,fsync 2>/dev/null
        echo is to last; sleep 1000\n";
    let mut machine = rig.script(script, &[])?;
    let mut child = start(machine.args(["-d", "new.qcow2"]))?;
    let mut console = child.stdout.take().context("no console")?;
    let (mut text, mut bytes) = (Vec::new(), [0; 4096]);
    while !String::from_utf8_lossy(&text).contains("is to last") {
        let count = console.read(&mut bytes).context("cannot read the console")?;
        ensure!(count != 0, "no message:\n{}", String::from_utf8_lossy(&text));
        text.extend(&bytes[..count]);
    }
    child.kill().and_then(|()| child.wait()).context("cannot end parador")?;
    std::thread::sleep(Duration::from_secs(1));
    image(&["check", "new.qcow2"])?;
    image(&["convert", "-O", "raw", "new.qcow2", "new.img"])?;
    let mut sector = [0; 5];
    let raw = File::open(rig.path("new.img")).context("no image")?;
    raw.read_exact_at(&mut sector, 77 * 512).context("cannot read a sector")?;
    ensure!(sector == *b"root:", "flushed data is missing");

    // Images that are none, or need others, or are broken.
    let refused =
        |name: &str, code, text: &str| end(rig.run().args(["-d", name]), "")?.has(code, &[text]);
    image(&["create", "-q", "-f", "qcow2", "-b", "copy.qcow2", "-F", "qcow2", "above.qcow2"])?;
    refused("above.qcow2", 65, "with a backing file")?;
    fs::write(rig.path("none.qcow2"), [0; 4096]).context("cannot write a file")?;
    refused("none.qcow2", 65, "is not a qcow2 image")?;
    let mut bytes = fs::read(rig.path("copy.qcow2")).context("cannot read an image")?;
    bytes[40..48].copy_from_slice(&u64::MAX.to_be_bytes());
    fs::write(rig.path("broken.qcow2"), bytes).context("cannot write an image")?;
    refused("broken.qcow2", 65, "broken.qcow2: the image is unusable")?;
    Ok(())
}
