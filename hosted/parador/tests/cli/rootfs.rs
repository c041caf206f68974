//! `parador rootfs debian` around stand-ins for debootstrap and the others: what is left, and when. That the disk boots is tested
//! by a whole system.

use crate::support::{Folder, code, errors, send, wait_for, wait_for_end};
use rustix::process::{Signal, geteuid};
use std::process::{Command, Stdio};

/// Stands for `unshare OPTIONS -- PROGRAM ARGUMENTS`. Its debootstrap makes a tree with a kernel.
const UNSHARE: &str = "\
while [ \"$1\" != -- ]; do shift; done
echo \"$2\" >>called
case $2 in
debootstrap)
    mkdir -p \"$7/boot\"
    echo kernel >\"$7/boot/vmlinuz-6.1\"
    echo RAM disk >\"$7/boot/initrd.img-6.1\"
    ;;
esac";
const KEYGEN: &str =
    "for file; do :; done; echo private >\"$file\"; echo ssh-ed25519 >\"$file.pub\"";

fn folder(unshare: &str) -> Folder {
    let folder = Folder::new("");
    for name in ["debootstrap", "mke2fs", "chroot"] {
        folder.script(&format!("programs/{name}"), "exit 1");
    }
    folder.script("programs/ssh-keygen", KEYGEN);
    folder.script("programs/unshare", unshare);
    folder
}

fn rootfs(folder: &Folder, more: &[&str]) -> Command {
    let mut command = folder.parador(&["rootfs", "debian", "--output", "made/debian"]);
    let path = format!("{}:/bin:/usr/bin", folder.path("programs").display());
    command.args(more).env("PATH", path);
    command
}

/// Without root it goes no further than this.
fn is_refused(folder: &Folder) -> bool {
    if geteuid().is_root() {
        return false;
    }
    let output = rootfs(folder, &[]).output().unwrap();
    assert_eq!(code(&output), 77, "{}", errors(&output));
    assert!(errors(&output).contains("sudo"), "{}", errors(&output));
    true
}

#[test]
fn a_disk_is_made_once() {
    let folder = folder(UNSHARE);
    if is_refused(&folder) {
        return;
    }
    let output = rootfs(&folder, &["--include", "git,vim"]).output().unwrap();
    assert_eq!(code(&output), 0, "{}", errors(&output));
    assert_eq!(output.stdout, b"made/debian\n");
    assert_eq!(folder.list("made"), ["debian"]);
    let names = ["disk.img", "initrd.img", "made-with", "ssh-key", "ssh-key.pub", "vmlinuz"];
    assert_eq!(folder.list("made/debian"), names);
    assert_eq!(folder.read("made/debian/vmlinuz"), b"kernel\n");
    assert_eq!(folder.read("called"), b"debootstrap\nsh\nmke2fs\n");

    let output = rootfs(&folder, &["--include", "vim,git"]).output().unwrap();
    assert_eq!(code(&output), 0);
    assert!(errors(&output).contains("is there already"), "{}", errors(&output));
    let output = rootfs(&folder, &[]).output().unwrap();
    assert_eq!(code(&output), 64);
    assert!(errors(&output).contains("--force"), "{}", errors(&output));
    assert_eq!(folder.read("called"), b"debootstrap\nsh\nmke2fs\n");

    assert_eq!(code(&rootfs(&folder, &["--force"]).output().unwrap()), 0);
    assert_eq!(folder.list("made"), ["debian"]);
}

#[test]
fn what_is_missing_is_told() {
    let folder = folder(UNSHARE);
    std::fs::remove_file(folder.path("programs/debootstrap")).unwrap();
    let path = folder.path("programs");
    let output = rootfs(&folder, &[]).env("PATH", path).output().unwrap();
    assert_eq!(code(&output), 69);
    assert!(errors(&output).contains("apt-get install debootstrap"), "{}", errors(&output));
    assert!(folder.list("made").is_empty());
}

#[test]
fn a_failure_leaves_nothing() {
    let folder = folder("echo 'I: Retrieving'; echo 'E: no such mirror'; exit 1");
    if is_refused(&folder) {
        return;
    }
    let output = rootfs(&folder, &[]).output().unwrap();
    assert_eq!(code(&output), 69);
    let text = errors(&output);
    assert!(text.contains("E: no such mirror") && text.contains("mirror"), "{text}");
    assert!(!text.contains("Retrieving"), "{text}");
    assert!(folder.list("made").is_empty());
}

#[test]
fn a_signal_leaves_nothing() {
    // What was started goes on writing until it is killed.
    let folder = folder(
        "echo $$ >pid; while :; do for work in made/.partial-*; do echo >\"$work/file\"; done; done",
    );
    if is_refused(&folder) {
        return;
    }
    let mut child = rootfs(&folder, &[]).stderr(Stdio::null()).spawn().unwrap();
    let pid = wait_for(&folder.path("pid"));
    send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    wait_for_end(&pid);
    assert!(folder.list("made").is_empty());
}
