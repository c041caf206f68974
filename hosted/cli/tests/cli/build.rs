//! `parador system build`: what is in an image, and that there is never half of one.

use crate::support::{Folder, ONE_VM, bzimage, code, errors, send, wait_for, wait_for_end};
use abi::bundle::Header;
use proto::system::{Board, OnReset, Restart, SerialPort, System};
use proto::vtlb::{Rung, Vtlb};
use rustix::process::Signal;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

const BUILD: [&str; 5] = ["system", "build", "system.toml", "-o", "image"];

fn content<'a>(bundle: &'a [u8], name: &str) -> &'a [u8] {
    let header = Header::parse(bundle, bundle.len() as u64).unwrap();
    let file = header.find(name).unwrap_or_else(|| panic!("no {name}"));
    &bundle[file.offset as usize..][..file.length as usize]
}

#[test]
fn a_whole_image() {
    let second = "initrd = \"kernel\"\ncmdline = \"quiet\"\nrestart = \"on-crash\"\non_reset = \"reset\"\nkvmclock = false\nvirtio_console = true\n\
        [[vm]]\nname = \"b\"\nmemory = \"1G\"\nkernel = \"kernel\"\ncpus = { pin = [2] }\nessential = false\nnpt = false\nvtlb = \"256K\"\nrung = \"cache=3\"\n\
        [[task]]\nname = \"t\"\nbinary = \"check-hostile\"\nargs = [\"1\", \"two\"]\ncpu = 3\npriority = 63\n";
    let folder = Folder::new(&format!("{ONE_VM}{second}"));
    folder.write("kernel", &bzimage());
    let output = folder.parador(&BUILD).output().unwrap();
    assert_eq!(code(&output), 0, "{}", errors(&output));
    assert_eq!(output.stdout, b"image\n");
    assert_eq!(folder.list("image"), ["bundle", "kernel.elf"]);
    assert_eq!(folder.read("image/kernel.elf"), b"stand-in for kernel.elf");

    let bundle = folder.read("image/bundle");
    for name in ["root", "console", "vmm", "check-hostile"] {
        assert_eq!(content(&bundle, name), format!("stand-in for {name}").as_bytes());
    }
    let system = System::decode(content(&bundle, "system")).unwrap();
    assert_eq!((system.board, system.log, system.cpus), (Board::QemuQ35, SerialPort::Com2, 4));
    assert_eq!(system.servers[0].binary, "console");
    let [linux, b] = &system.vms[..] else { panic!("two virtual machines") };
    assert_eq!((linux.memory, linux.vcpus, linux.pins.len()), (64 << 20, 1, 0));
    assert_eq!((linux.console, linux.command_line), (Some(0), "quiet"));
    assert_eq!((linux.restart, linux.on_reset), (Restart::OnCrash, OnReset::Reset));
    assert!(!linux.kvmclock && b.kvmclock);
    assert!(linux.virtio_console && !b.virtio_console);
    assert_eq!((&b.pins[..], b.essential, b.console), (&[2][..], false, None));
    assert_eq!(b.command_line, "console=ttyS0");
    let vtlb = Vtlb { pool: 64, rung: Rung::Cache, spaces: 3, trace_writes: false };
    assert_eq!((linux.vtlb, b.vtlb), (None, Some(vtlb)));
    // One file, used three times, is in the bundle once.
    assert_eq!(
        (linux.kernel, linux.initrd, b.kernel),
        ("linux.kernel", Some("linux.kernel"), "linux.kernel")
    );
    assert_eq!(content(&bundle, "linux.kernel"), bzimage());
    assert_eq!((&system.tasks[0].arguments[..], system.tasks[0].cpu), (&["1", "two"][..], 3));

    assert_eq!(code(&folder.parador(&BUILD).output().unwrap()), 0);
    assert_eq!(folder.read("image/bundle"), bundle, "equal inputs give equal images");
}

#[test]
fn a_busybox_ram_disk() {
    let folder = Folder::new(&format!("{ONE_VM}initrd = \"busybox\"\n"));
    folder.write("kernel", &bzimage());
    let output = folder.parador(&BUILD).output().unwrap();
    // Without an installed busybox and without a package source this cannot work.
    if code(&output) == 69 {
        return;
    }
    assert_eq!(code(&output), 0, "{}", errors(&output));
    let bundle = folder.read("image/bundle");
    assert!(content(&bundle, "linux.initrd").starts_with(b"070701"));
}

#[test]
fn missing_programs() {
    let folder = Folder::new(ONE_VM);
    folder.write("kernel", &bzimage());
    std::fs::remove_file(folder.path("programs/vmm")).unwrap();
    let output = folder.parador(&BUILD).output().unwrap();
    assert_eq!(code(&output), 66);
    assert!(errors(&output).contains("no binary `vmm` in /"), "{}", errors(&output));
    assert!(folder.list("image").is_empty());

    let folder = Folder::new(
        "[system]\nboard = \"pc\"\n[[task]]\nname = \"a\"\nbinary = \"check-absent\"\n",
    );
    let output = folder.parador(&BUILD).output().unwrap();
    assert_eq!(code(&output), 66);
    assert!(
        errors(&output).contains("system.toml:5:10: error: no binary `check-absent`"),
        "{}",
        errors(&output)
    );

    let output = folder.parador(&BUILD).env("PARADOR_ARTIFACTS", "nowhere").output().unwrap();
    assert_eq!((code(&output), errors(&output).lines().count()), (66, 1));
}

#[test]
fn a_bad_description_makes_nothing() {
    let folder = Folder::new(&ONE_VM.replace("64M", "1M"));
    folder.write("kernel", &bzimage());
    assert_eq!(code(&folder.parador(&BUILD).output().unwrap()), 65);
    assert!(!folder.path("image").exists());
}

/// A limit on file size stands for a full disk.
#[test]
fn a_full_disk_leaves_the_former_image() {
    let folder = Folder::new(ONE_VM);
    folder.write("kernel", &bzimage());
    assert_eq!(code(&folder.parador(&BUILD).output().unwrap()), 0);
    let former = folder.read("image/bundle");
    let mut grown = bzimage();
    grown.resize(1 << 20, 7);
    folder.write("kernel", &grown);
    folder.write("programs/kernel.elf", b"a newer kernel");
    let parador = folder.parador(&BUILD);
    let mut limited = Command::new("sh");
    limited
        .args(["-c", "trap '' XFSZ; ulimit -f 100; exec \"$@\"", "sh"])
        .arg(parador.get_program())
        .args(parador.get_args())
        .current_dir(folder.path(""))
        .env("PARADOR_ARTIFACTS", "programs");
    let output = limited.output().unwrap();
    assert_eq!(code(&output), 71, "{}", errors(&output));
    assert!(errors(&output).contains("cannot write image/"), "{}", errors(&output));
    assert_eq!(folder.list("image"), ["bundle", "kernel.elf"]);
    assert_eq!(folder.read("image/bundle"), former);
    assert_eq!(folder.read("image/kernel.elf"), b"stand-in for kernel.elf");
}

#[test]
fn no_apt() {
    let folder = Folder::new(&ONE_VM.replace("\"kernel\"", "\"debian\""));
    let output = folder.parador(&BUILD).env("PATH", folder.path("")).output().unwrap();
    assert_eq!(code(&output), 69);
    assert!(errors(&output).contains("program not found: apt-cache"), "{}", errors(&output));
    assert!(folder.list("image").is_empty());
}

#[test]
fn apt_without_network() {
    let folder = Folder::new(&ONE_VM.replace("\"kernel\"", "\"debian\""));
    folder
        .script("apt-cache", "echo 'Version: 1'; echo 'Depends: linux-image-1-cloud-amd64 (= 1)'");
    folder.script("apt-get", "echo 'E: Temporary failure resolving' >&2; exit 100");
    let output = folder.parador(&BUILD).env("PATH", folder.path("")).output().unwrap();
    assert_eq!(code(&output), 69);
    let text = errors(&output);
    assert!(
        text.contains(
            "apt-get cannot get linux-image-1-cloud-amd64 1: E: Temporary failure resolving"
        ),
        "{text}"
    );
    assert!(text.contains("help: check the network"), "{text}");
    assert!(folder.list("image").is_empty());
    assert!(folder.list("cache/parador").is_empty());
}

#[test]
fn a_signal_leaves_nothing() {
    let folder = Folder::new(&ONE_VM.replace("\"kernel\"", "\"debian\""));
    folder
        .script("apt-cache", "echo 'Version: 1'; echo 'Depends: linux-image-1-cloud-amd64 (= 1)'");
    folder.script(
        "apt-get",
        &format!("echo $$ >{}; exec /bin/sleep 60", folder.path("pid").display()),
    );
    let child = folder
        .parador(&BUILD)
        .env("PATH", folder.path(""))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let pid = wait_for(&folder.path("pid"));
    // Not SIGINT, which what has started the tests may ignore.
    send(&child, Signal::TERM);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(143), "{:?}", output.status.signal());
    wait_for_end(&pid);
    assert!(folder.list("image").is_empty());
    assert!(folder.list("cache/parador").is_empty());
}

#[test]
fn a_cd_rom_image() {
    let folder = Folder::new(ONE_VM);
    folder.write("kernel", &bzimage());
    let arguments = [&BUILD[..], &["--iso", "boot.iso"]].concat();
    let output = folder.parador(&arguments).env("PATH", folder.path("")).output().unwrap();
    assert_eq!(code(&output), 69);
    assert!(errors(&output).contains("grub-common"), "{}", errors(&output));
    assert!(folder.list("image").is_empty());

    folder.script("grub-mkrescue", "echo 'xorriso : FAILURE : no room' >&2; exit 1");
    let output = folder.parador(&arguments).env("PATH", folder.path("")).output().unwrap();
    assert_eq!(code(&output), 69);
    assert!(errors(&output).contains("xorriso : FAILURE : no room"), "{}", errors(&output));
    assert!(folder.list("image").is_empty() && !folder.path("boot.iso").exists());

    folder.script(
        "grub-mkrescue",
        "cat \"$3\"/boot/grub/grub.cfg \"$3\"/boot/parador/kernel.elf >\"$2\"",
    );
    let output = folder
        .parador(&arguments)
        .env("PATH", format!("{}:/bin:/usr/bin", folder.path("").display()))
        .output()
        .unwrap();
    assert_eq!(code(&output), 0, "{}", errors(&output));
    assert_eq!(output.stdout, b"image\nboot.iso\n");
    let iso = String::from_utf8(folder.read("boot.iso")).unwrap();
    assert!(iso.contains("multiboot2 /boot/parador/kernel.elf log=com2"), "{iso}");
    assert!(iso.contains("module2 /boot/parador/bundle"), "{iso}");
    assert!(!folder.list("").iter().any(|name| name.starts_with(".parador")));
}
