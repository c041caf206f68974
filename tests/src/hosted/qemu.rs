//! `parador qemu`: command lines of QEMU.

use super::observed::wait;
use super::{LIMIT, Rig, end, ended, start};
use crate::system::{artifacts, target};
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::process::Command;

/// Name by which tools call QEMU.
const PROGRAM: &str = "qemu-system-x86_64";
/// Length of the disk in bytes: its last sector is not complete.
const DISK: u64 = 1000;
/// Script of the guest, which finds ports by their names, as udev does.
const SCRIPT: &str = r#"
port() {
    for port in /sys/class/virtio-ports/*; do
        if [ "$(cat $port/name)" = "$1" ]; then echo /dev/${port##*/}; fi
    done
}
exec 3<>$(port t.socket)
read line <&3
echo "pong $line" >&3
{ cat /sys/block/vda/serial /sys/block/vda/size; echo; tail -c 36 /dev/vda | od -c; } >/mnt/disk
# Until the end of standard input.
tr a-z A-Z <$(port t.stdin) >$(port t.stdout)
echo a message of the console >/dev/hvc0
echo 3 >$(port t.ret)
reboot -f
"#;

/// `parador` by QEMU's name, in the rig's folder.
fn qemu(rig: &Rig) -> Result<Command> {
    let path = rig.folder().join(PROGRAM);
    if !path.exists() {
        symlink(target().join("release").join("parador"), &path).context("cannot make a link")?;
    }
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", &LIMIT.to_string()]).arg(path).current_dir(rig.folder());
    command.env("PARADOR_ARTIFACTS", artifacts());
    Ok(command)
}

/// A guest in the manner of fakemachine and virtme-ng: a console, named ports for its streams, a
/// shared directory, a disk of an odd length. Wrong command lines.
pub fn front_end() -> Result<()> {
    let rig = Rig::new()?;
    let share = rig.folder().join("a,share");
    fs::create_dir(&share).and_then(|()| fs::write(share.join("script"), SCRIPT))?;
    fs::write(rig.folder().join("odd.img"), [b'd'; DISK as usize]).context("cannot make a disk")?;
    let mut command = qemu(&rig)?;
    command.args(["-name", "test", "-m", "256M", "-smp", "2", "-display", "none", "-no-reboot"]);
    command.arg("-kernel").arg(rig.kernel()).args(["-initrd", "busybox", "-net", "none"]);
    command.args(["-chardev", "null,id=for-ttyS0", "-serial", "chardev:for-ttyS0"]);
    command.args(["-chardev", "file,id=hvc0,path=console", "-device", "virtio-serial"]);
    command.args(["-device", "virtconsole,chardev=hvc0"]);
    for (name, chardev) in [
        ("stdin", "stdio,id=stdin,signal=on,mux=off"),
        ("stdout", "file,id=stdout,path=/proc/self/fd/1"),
        ("ret", "file,id=ret,path=ret"),
        ("socket", "socket,id=socket,path=socket,server=on,wait=off"),
    ] {
        let port = format!("virtserialport,name=t.{name},chardev={name}");
        command.args(["-chardev", chardev, "-device", "virtio-serial-pci", "-device", &port]);
    }
    command.args(["-virtfs", "local,path=a,,share,mount_tag=host,security_model=none"]);
    command.args(["-drive", "file=odd.img,if=none,format=raw,cache=unsafe,id=d"]);
    command.args(["-device", "virtio-blk-pci,drive=d,serial=odd"]);
    let mount = "mount -t 9p -o trans=virtio,version=9p2000.L host /mnt";
    command.args(["-append", &format!("parador.run=\"{mount}; sh -e /mnt/script\"")]);
    let mut child = start(&mut command)?;
    let path = rig.folder().join("socket");
    let mut client = wait(|| UnixStream::connect(&path).ok())?;
    client.write_all(b"ping\n").context("cannot write to the socket")?;
    let mut answer = [0; 10];
    client.read_exact(&mut answer).context("no answer at the socket")?;
    ensure!(&answer == b"pong ping\n", "{answer:?}");
    let text: String = (0..5000).map(|number| format!("line {number}\n")).collect();
    let mut input = child.stdin.take().context("no input")?;
    input.write_all(text.as_bytes()).context("cannot write")?;
    drop(input);
    let ended = ended(child)?;
    let ignored = "ignored: -name test -device virtio-serial -device virtio-serial-pci";
    let ended = ended.has(0, &[ignored])?;
    ensure!(ended.console == text.to_uppercase(), "{}", ended.console);
    let read = |name: &str| fs::read_to_string(rig.folder().join(name)).context("no output");
    ensure!(read("ret")? == "3\n", "{}", read("ret")?);
    let console = read("console")?;
    ensure!(console.contains("a message of the console"), "{console}");
    ensure!(!console.contains("Linux version"), "the kernel prints on its console: {console}");
    let disk = read("a,share/disk")?;
    ensure!(disk.starts_with("odd2\n") && disk.contains("d   d  \\0  \\0"), "{disk}");
    let length = File::open(rig.folder().join("odd.img"))?.metadata()?.len();
    ensure!(length == DISK, "the file has {length} bytes");
    refused(&rig)
}

/// Command lines that start no VM.
fn refused(rig: &Rig) -> Result<()> {
    for (words, code, text) in [
        (&["-kernel", "k", "-device", "e1000"][..], 64, "unknown device `e1000`"),
        (&["-kernel", "k", "-daemonize"], 64, "unknown option -daemonize"),
        (&["-kernel", "k", "-bios", "f"], 69, "no firmware"),
        (&["-kernel", "k", "-nodefaults"], 66, "k: "),
    ] {
        end(qemu(rig)?.args(words), "")?.has(code, &[text])?;
    }
    let mut command = crate::system::parador(rig.folder());
    end(command.args(["qemu", "--version"]), "")?.has(0, &["QEMU emulator version"])?;
    Ok(())
}
