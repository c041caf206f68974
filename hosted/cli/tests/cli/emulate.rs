//! `parador system emulate` around a stand-in for QEMU: exit codes, signals, the terminal.

use crate::check::ARM64;
use crate::support::{
    Folder, ONE_VM, alive, bzimage, code, errors, image_arm64, send, wait_for, wait_for_end,
};
use rustix::fs::OFlags;
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};

fn folder() -> Folder {
    let folder = Folder::new(ONE_VM);
    folder.write("kernel", &bzimage());
    folder
}

/// QEMU's exit status when `root` reports this exit code.
fn status(code: i32) -> i32 {
    2 * (code + 0x10) + 1
}

#[test]
fn reported_codes_become_exit_codes() {
    let folder = folder();
    for reported in [0, 1, 47, 63, 80, 81, 82, 83] {
        let script = format!("echo console; exit {}", status(reported));
        let output = folder.emulate(&script, &[]).output().unwrap();
        assert_eq!(code(&output), reported, "{}", errors(&output));
        assert_eq!(output.stdout, b"console\n");
    }
    let output = folder.emulate("exit 33", &[]).output().unwrap();
    let text = errors(&output);
    assert!(text.contains("parador: the guest powered off (exit code 0, "), "{text}");
}

/// Finds the file for the log among QEMU's arguments.
const FIND_LOG: &str =
    "for word; do case $word in file,id=log,path=*) log=${word#*path=} ;; esac; done";

#[test]
fn a_panic_of_the_kernel_shows_the_end_of_its_log() {
    let script = format!("{FIND_LOG}; seq 1 100 >\"$log\"; exit 255");
    let folder = folder();
    let output = folder.emulate(&script, &["--log", "the.log"]).output().unwrap();
    assert_eq!(code(&output), 70);
    let text = errors(&output);
    assert!(text.contains("(the.log):\n  | 81\n"), "{text}");
    assert!(text.contains("  | 100\nparador: Parador's kernel panicked"), "{text}");
}

#[test]
fn failures_of_qemu() {
    let folder = folder();
    let output = folder.emulate("echo 'qemu: no such machine' >&2; exit 1", &[]).output().unwrap();
    assert_eq!(code(&output), 70);
    assert!(errors(&output).contains("  | qemu: no such machine\n"), "{}", errors(&output));
    assert_eq!(code(&folder.emulate("exit 0", &[]).output().unwrap()), 70);
    assert_eq!(code(&folder.emulate("kill -SEGV $$", &[]).output().unwrap()), 139);
    let output = folder.emulate("", &["--qemu", "missing-qemu"]).output().unwrap();
    assert_eq!(code(&output), 69);
    assert!(errors(&output).contains("apt-get install qemu-system-x86"), "{}", errors(&output));
}

#[test]
fn arguments_of_qemu() {
    let folder = folder();
    let script = "for word; do echo \"$word\"; done; exit 33";
    let arguments =
        ["--cpus", "4", "-m", "1G", "--icount", "--log", "a,b.log", "--", "-gdb", "tcp::1"];
    let output = folder.emulate(script, &arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap().replace('\n', " ");
    for expected in [
        "-M q35 -cpu EPYC,+svm,+npt -accel tcg -smp 4 -m 1024 ",
        "-nodefaults -no-user-config -display none -no-reboot ",
        "-icount shift=0,sleep=off ",
        "-chardev stdio,id=console,signal=off -serial chardev:console ",
        "-chardev file,id=log,path=./a,,b.log -serial chardev:log ",
        "-device isa-debug-exit,iobase=0xf4,iosize=4 ",
        "-append log=com2 panic=debug-exit -kernel image/kernel.elf -initrd image/bundle -gdb tcp::1 ",
    ] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
    let output = folder.emulate(script, &["-m", "64M"]).output().unwrap();
    assert_eq!(code(&output), 65);
    assert!(
        errors(&output).starts_with("system.toml: error: not enough memory (64 MiB)"),
        "{}",
        errors(&output)
    );
}

/// Returns QEMU's arguments for a system for AArch64 with the disks `a.img` and `b.img`.
fn arguments_on_arm64(description: &str) -> String {
    let folder = Folder::new(description);
    folder.write("kernel", &image_arm64());
    folder.write("a.img", &[0; 512]);
    folder.write("b.img", &[0; 512]);
    let script = format!("{FIND_LOG}; echo \"root: outcome 0\" >\"$log\"; echo \"$@\"");
    let output = folder.emulate(&script, &[]).output().unwrap();
    assert_eq!(code(&output), 0, "{}", errors(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn devices_of_aarch64_have_pages_of_their_own() {
    let text = arguments_on_arm64(&ARM64.replace("\"a.img\"", "\"a.img\", \"b.img,ro=on\""));
    for expected in [
        "-M virt,virtualization=on,gic-version=3 ",
        "-global virtio-mmio.force-legacy=false ",
        "-device virtio-serial-device,bus=virtio-mmio-bus.31 -device virtconsole,chardev=log ",
        "id=disk0,readonly=off,snapshot=off \
         -device virtio-blk-device,bus=virtio-mmio-bus.0,drive=disk0 ",
        "-device virtio-blk-device,bus=virtio-mmio-bus.8,drive=disk1 ",
        "-netdev user,id=net0 -device virtio-net-device,bus=virtio-mmio-bus.16,netdev=net0 ",
    ] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
}

#[test]
fn devices_of_aarch64_behind_an_iommu_are_on_pci() {
    let disks = "\"a.img\", \"b.img,bus=ahci\"";
    let guarded = ARM64.replace("\"a.img\"", disks).replace("mmio:", "");
    let text = arguments_on_arm64(&guarded.replacen("\n\n", "\niommu = true\n\n", 1));
    for expected in [
        "-M virt,virtualization=on,gic-version=3,iommu=smmuv3 ",
        "-device virtio-serial-device,bus=virtio-mmio-bus.31 -device virtconsole,chardev=log ",
        "-device virtio-blk-pci,iommu_platform=on,disable-legacy=on,drive=disk0 ",
        "-device ahci,id=ide ",
        "-device ide-hd,bus=ide.0,drive=disk1 ",
        "-device virtio-net-pci,iommu_platform=on,disable-legacy=on,netdev=net0,romfile= ",
    ] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
    assert!(!text.contains("amd-iommu"), "{text}");
}

#[test]
fn without_building() {
    let folder = folder();
    let output = folder.emulate("exit 33", &["--no-build"]).output().unwrap();
    assert_eq!(code(&output), 66);
    assert!(errors(&output).contains("help: build it without"), "{}", errors(&output));
    assert_eq!(code(&folder.emulate("exit 33", &[]).output().unwrap()), 0);
    std::fs::remove_file(folder.path("programs/vmm")).unwrap();
    assert_eq!(code(&folder.emulate("exit 33", &["--no-build"]).output().unwrap()), 0);
}

#[test]
fn only_for_emulated_machines() {
    let folder = Folder::new(&ONE_VM.replace("qemu-q35", "pc"));
    folder.write("kernel", &bzimage());
    let output = folder.emulate("exit 33", &[]).output().unwrap();
    assert_eq!(code(&output), 65);
}

#[test]
fn standard_input_reaches_the_guest() {
    let folder = folder();
    let mut child = folder
        .emulate("read line; echo \"got $line\"; exit 33", &[])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Without a terminal Ctrl-A is a byte like any other.
    child.stdin.take().unwrap().write_all(b"a\x01xb\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((code(&output), &output.stdout[..]), (0, &b"got a\x01xb\n"[..]));
}

/// Starts an emulation that does not end by itself.
fn start_endless(folder: &Folder) -> Child {
    let mut command = folder.emulate(&endless(folder), &[]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn an_image_and_a_log_have_one_writer() {
    let folder = folder();
    let mut first = start_endless(&folder);
    wait_for(&folder.path("pid"));
    let bundle = std::fs::metadata(folder.path("image/bundle")).unwrap().ino();
    let is_refused = |command: &mut Command, message: &str| {
        let output = command.output().unwrap();
        let text = errors(&output);
        assert!(code(&output) == 71 && text.contains(message), "{text}");
    };
    let used = "another process uses the image in image\n   help: wait for its end, or use";
    is_refused(&mut folder.emulate("exit 33", &["--log", "other.log"]), used);
    is_refused(&mut folder.parador(&["system", "build", "system.toml", "-o", "image"]), used);
    let elsewhere = ["system", "emulate", "system.toml", "-o", "other", "--log"];
    let emulate = |log: &str| {
        let mut command = folder.parador(&elsewhere);
        command.arg(log).env("PARADOR_QEMU", folder.script("qemu", "exit 33"));
        command
    };
    let written = "another emulation writes its kernel log to image/kernel.log\n   help: use";
    is_refused(&mut emulate("image/kernel.log"), written);
    is_refused(&mut folder.emulate("exit 33", &["--no-build"]), written);
    let reader = &["--no-build", "--log", "other.log"];
    assert_eq!(code(&folder.emulate("exit 33", reader).output().unwrap()), 0);
    assert_eq!(code(&emulate("/dev/null").output().unwrap()), 0);
    assert_eq!(std::fs::metadata(folder.path("image/bundle")).unwrap().ino(), bundle);
    send(&first, Signal::TERM);
    first.wait().unwrap();
    assert_eq!(code(&folder.emulate("exit 33", &[]).output().unwrap()), 0);
    assert_eq!(folder.list("image"), ["bundle", "kernel.elf", "kernel.log"]);
}

#[test]
fn what_killed_builds_leave_goes() {
    let folder = folder();
    for name in ["image/.parador-image-left", "image/.other"] {
        std::fs::create_dir_all(folder.path(name)).unwrap();
        let old = SystemTime::now() - Duration::from_secs(120);
        File::open(folder.path(name)).unwrap().set_modified(old).unwrap();
    }
    assert_eq!(code(&folder.emulate("exit 33", &[]).output().unwrap()), 0);
    assert_eq!(folder.list("image"), [".other", "bundle", "kernel.elf", "kernel.log"]);
}

/// Writes its process number and stays.
fn endless(folder: &Folder) -> String {
    format!("echo $$ >{}; exec /bin/sleep 60", folder.path("pid").display())
}

#[test]
fn the_time_limit() {
    let folder = folder();
    let output = folder.emulate(&endless(&folder), &["--timeout", "1s"]).output().unwrap();
    assert_eq!(code(&output), 124);
    assert!(!alive(&wait_for(&folder.path("pid"))));
}

#[test]
fn signals_end_everything() {
    for (signal, expected) in [
        (Signal::INT, Some(130)),
        (Signal::TERM, Some(143)),
        (Signal::HUP, Some(129)),
        (Signal::KILL, None),
    ] {
        let folder = folder();
        let mut child = start_endless(&folder);
        let pid = wait_for(&folder.path("pid"));
        send(&child, signal);
        assert_eq!(child.wait().unwrap().code(), expected, "{signal:?}");
        wait_for_end(&pid);
    }
}

#[test]
fn the_console_has_no_reader() {
    let folder = folder();
    let script =
        format!("echo $$ >{}; while echo console; do :; done", folder.path("pid").display());
    let mut child =
        folder.emulate(&script, &[]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 100]).unwrap();
    drop(stdout);
    assert_eq!(child.wait().unwrap().code(), Some(141));
    wait_for_end(&wait_for(&folder.path("pid")));
}

/// A terminal: the side of the user and the side of the program.
fn terminal() -> (File, OwnedFd) {
    let user = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&user).unwrap();
    unlockpt(&user).unwrap();
    let name = ptsname(&user, Vec::new()).unwrap();
    let flags = OFlags::RDWR | OFlags::NOCTTY;
    let program = rustix::fs::open(name, flags, rustix::fs::Mode::empty()).unwrap();
    (File::from(user), program)
}

/// Runs the stand-in on a terminal, types `keys` when it is ready, and returns exit code and what
/// it got. The terminal's modes are raw meanwhile and as before afterwards.
fn on_terminal(keys: &[u8], signal: Option<Signal>) -> (Option<i32>, Vec<u8>) {
    let folder = folder();
    let (mut user, program) = terminal();
    let is_raw = || !tcgetattr(&program).unwrap().local_modes.contains(LocalModes::ICANON);
    let got = folder.path("got");
    let script = format!(
        "echo $$ >{}; dd bs=1 count=4 of={} 2>/dev/null; exit 33",
        folder.path("pid").display(),
        got.display()
    );
    assert!(!is_raw());
    let mut child = folder
        .emulate(&script, &[])
        .stdin(program.try_clone().unwrap())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let pid = wait_for(&folder.path("pid"));
    while !is_raw() {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    user.write_all(keys).unwrap();
    if let Some(signal) = signal {
        send(&child, signal);
    }
    let status = child.wait().unwrap();
    assert!(!is_raw(), "modes are not restored");
    wait_for_end(&pid);
    (status.code(), std::fs::read(got).unwrap_or_default())
}

#[test]
fn keys_of_a_terminal() {
    // Ctrl-C, Ctrl-Z and Ctrl-D go to the guest.
    assert_eq!(on_terminal(b"\x03\x1a\x04\r", None), (Some(0), b"\x03\x1a\x04\r".to_vec()));
    assert_eq!(on_terminal(b"a\x01\x01b\x01e", None), (Some(0), b"a\x01b\x01".to_vec()));
    assert_eq!(on_terminal(b"\x01x", None).0, Some(0));
    assert_eq!(on_terminal(b"", Some(Signal::TERM)).0, Some(143));
}
