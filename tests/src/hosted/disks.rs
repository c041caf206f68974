//! Raw disks, and qcow2 images that a scenario ([`super::linux`]) does not cover.

use super::net::wait_for;
use super::{Rig, children, end, start, succeed};
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
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
    large.set_len(900 << 20).context("cannot make a disk")?;
    let script = "dd if=/dev/zero of=/dev/vdb bs=1M count=8 conv=fsync
        ! dd if=/dev/zero of=/dev/vdb bs=1M seek=890 count=8 conv=fsync
        echo continues\n";
    let mut inner = rig.script(script, &[])?;
    inner.args(["-m", "256M"]);
    // The limit of file sizes, in units of 512 bytes: between the file of guest memory, which is
    // twice as long on hosts with protection keys, and the end of the disk.
    let mut machine = rig.limited("-f 1500000", inner.args(["-d", "large.img"]));
    end(&mut machine, "")?.has(0, &["I/O error", "continues", "request failed"])?;
    Ok(())
}

/// Flushed data is in a qcow2 image when `parador` is killed. Code, because the kill waits for the
/// guest's text.
pub fn qcow2_kept() -> Result<()> {
    let rig = Rig::new()?;
    image(&rig, &["create", "-q", "-f", "qcow2", "new.qcow2", "4G"])?;
    let script = "echo root: | dd of=/dev/vdb bs=512 seek=77 count=1 conv=sync,fsync 2>/dev/null
        echo is to last; sleep 1000\n";
    let mut machine = rig.script(script, &[])?;
    let mut child = start(machine.args(["-d", "new.qcow2"]))?;
    wait_for(&mut child, "is to last")?;
    child.kill().and_then(|()| child.wait()).context("cannot end parador")?;
    std::thread::sleep(Duration::from_secs(1));
    image(&rig, &["check", "new.qcow2"])?;
    image(&rig, &["convert", "-O", "raw", "new.qcow2", "new.img"])?;
    let mut sector = [0; 5];
    let raw = File::open(rig.path("new.img")).context("no image")?;
    raw.read_exact_at(&mut sector, 77 * 512).context("cannot read a sector")?;
    ensure!(sector == *b"root:", "flushed data is missing");

    // The dirty bit of the header: the next start repairs the image.
    let image = File::options().write(true).open(rig.path("new.qcow2")).context("no image")?;
    image.write_all_at(&[1], 79).context("cannot write to the image")?;
    let mut machine = rig.run();
    machine.args(["-d", "new.qcow2", "--log-format", "json"]);
    let said = "\"source\":\"disk\",\"message\":\"a qcow2 image was not closed";
    end(&mut machine, "poweroff\n")?.well(0, &[said])?;
    Ok(())
}

/// Files that are no images, need other files, or are broken. Code, because it breaks the header of
/// an image.
pub fn qcow2_refused() -> Result<()> {
    let rig = Rig::new()?;
    let refused = |name: &str, text: &str| end(rig.run().args(["-d", name]), "")?.has(65, &[text]);
    image(&rig, &["create", "-q", "-f", "qcow2", "base.qcow2", "4G"])?;
    image(
        &rig,
        &["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "above.qcow2"],
    )?;
    refused("above.qcow2", "with a backing file")?;
    fs::write(rig.path("none.qcow2"), [0; 4096]).context("cannot write a file")?;
    refused("none.qcow2", "is not a qcow2 image")?;
    let mut bytes = fs::read(rig.path("base.qcow2")).context("cannot read an image")?;
    bytes[40..48].copy_from_slice(&u64::MAX.to_be_bytes());
    fs::write(rig.path("broken.qcow2"), bytes).context("cannot write an image")?;
    refused("broken.qcow2", "broken.qcow2: the image is unusable")?;
    Ok(())
}

/// Runs qemu-img in the folder of a VM.
fn image(rig: &Rig, arguments: &[&str]) -> Result<()> {
    succeed(Command::new("qemu-img").args(arguments).current_dir(rig.folder()))
}

/// Changes to an overlay of a raw disk or an image are the VM's own, survive its reset, and end
/// with it; two overlays have one base. Backing files of images show through and stay.
pub fn overlays() -> Result<()> {
    let rig = Rig::new()?;
    let [raw, image] = ["base.img", "base.qcow2"].map(|name| rig.path(name));
    let mut bytes = vec![0; 4 << 20];
    bytes[..4].copy_from_slice(b"base");
    fs::write(&raw, &bytes).context("cannot write a disk")?;
    let convert = ["convert", "-f", "raw", "-O", "qcow2"];
    succeed(Command::new("qemu-img").args(convert).args([&raw, &image]))?;
    let above = |name: &str, base: &str, format: &str| {
        let create = ["create", "-q", "-f", "qcow2", "-b", base, "-F", format, name];
        succeed(Command::new("qemu-img").args(create).current_dir(rig.folder()))
    };
    above("middle.qcow2", "base.img", "raw")?;
    above("top.qcow2", "middle.qcow2", "qcow2")?;
    above("other.qcow2", "middle.qcow2", "qcow2")?;
    let [middle, top, other] =
        ["middle.qcow2", "top.qcow2", "other.qcow2"].map(|name| rig.path(name));
    let kept = [&image, &middle, &other];
    let before = kept.map(fs::read);
    // The first start writes and resets; the second one finds that.
    let script =
        "for disk in b c d e f; do dd if=/dev/vd$disk bs=4 count=1 2>/dev/null; echo \" $disk\"; done
        test \"$(dd if=/dev/vdb bs=4 count=1 2>/dev/null)\" = base || exit 7
        for disk in b d e f; do printf mine | dd of=/dev/vd$disk conv=notrunc,fsync 2>/dev/null; done
        reboot -f\n";
    let mut run = rig.script(script, &[])?;
    for path in [&raw, &raw, &image] {
        run.arg("-d").arg(format!("path={},overlay=on", path.display()));
    }
    let backing = rig.folder().display();
    run.arg("-d").arg(format!("path={},backing={backing}", top.display()));
    run.arg("-d").arg(format!("path={},backing={backing},overlay=on", other.display()));
    let first = ["base b", "base c", "base d", "base e", "base f"];
    let second = ["mine b", "base c", "mine d", "mine e", "mine f"];
    let ended = end(run.args(["--on-reset", "reset"]), "")?;
    ended.well(7, &[&first[..], &second[..]].concat())?;
    ensure!(fs::read(&raw).context("no disk")? == bytes, "the disk was changed");
    for (path, before) in kept.into_iter().zip(before) {
        let is_same = fs::read(path).context("no image")? == before.context("no image")?;
        ensure!(is_same, "{} was changed", path.display());
    }
    succeed(Command::new("qemu-img").args(["check", "-q"]).arg(&top))?;
    let merged = rig.path("merged.img");
    succeed(Command::new("qemu-img").args(["convert", "-O", "raw"]).args([&top, &merged]))?;
    bytes[..4].copy_from_slice(b"mine");
    ensure!(fs::read(&merged).context("no disk")? == bytes, "the image lacks its change");
    Ok(())
}
