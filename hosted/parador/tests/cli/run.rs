//! `parador run` where it refuses: what is wrong on the command line, with files, with kernels. Machines that run are tested by
//! whole systems.

use crate::support::{Folder, bzimage, code, errors};
use std::fs::File;

/// Runs in `folder` with these arguments, and must end with this code and text.
#[track_caller]
fn refused(folder: &Folder, arguments: &[&str], expected: i32, text: &str) {
    let output = folder.parador(&["run"]).args(arguments).output().unwrap();
    let errors = errors(&output);
    assert_eq!(code(&output), expected, "{arguments:?}: {errors}");
    assert!(errors.contains(text), "{arguments:?}: {errors}");
    assert!(!errors.contains("panicked"), "{errors}");
}

#[test]
fn command_lines() {
    let folder = Folder::new("");
    refused(&folder, &[], 64, "KERNEL");
    refused(&folder, &["k", "--kernel", "k"], 64, "cannot be used with");
    refused(&folder, &["k", "-m", "63M"], 64, "64M at least");
    refused(&folder, &["k", "-m", "much"], 64, "not a size");
    refused(&folder, &["k", "-c", "2"], 64, "2");
    refused(&folder, &["k", "--backend", "kvm"], 64, "possible values");
    refused(&folder, &["k", "--log", "loud"], 64, "possible values");
    refused(&folder, &["k", "--timeout", "soon"], 64, "not a time");
    refused(&folder, &["k", "--memry", "1G"], 64, "--memory");
}

#[test]
fn kernels() {
    let folder = Folder::new("");
    refused(&folder, &["vmlinux"], 66, "parador kernel build");
    folder.write("vmlinux", b"");
    refused(&folder, &["vmlinux"], 65, "no ELF file");
    folder.write("vmlinux", &bzimage());
    refused(&folder, &["vmlinux"], 65, "not a bzImage");
    folder.write("vmlinux", b"\x7fELF and no more");
    refused(&folder, &["vmlinux"], 65, "no sound ELF file");
    refused(&folder, &["programs"], 71, "directory");
}

#[test]
fn kernels_for_other_backends_are_named() {
    // This program is an ELF file for this processor, but no kernel.
    let folder = Folder::new("");
    let own = std::env::current_exe().unwrap();
    refused(&folder, &[own.to_str().unwrap()], 65, "not pre-virtualized");
}

#[test]
fn disks() {
    let folder = Folder::new("");
    let run = |disk: &str, expected, text: &str| {
        refused(&folder, &["vmlinux", "-d", disk], expected, text);
    };
    run("a.img,rw=on", 65, "unknown key `rw`");
    run("path=a.img,fromat=raw", 65, "did you mean `format`?");
    run("path=a.img,format=qcow2", 65, "qemu-img");
    let five = ["-d", "a", "-d", "b", "-d", "c", "-d", "d", "-d", "e"];
    refused(&folder, &[&["k"][..], &five].concat(), 64, "5 disks are more than 4");
    run("none.img", 66, "none.img");
    let small = File::create(folder.path("small.img")).unwrap();
    small.set_len(1000).unwrap();
    run("small.img", 65, "1000 bytes");
    run("programs", 71, "directory");
    run("/dev/null", 65, "no block device");
}
