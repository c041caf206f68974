//! `parador rootfs debian` with substitutes for debootstrap and other tools: results and cleanup. A
//! system test checks that the disk boots.

use crate::support::{Folder, code, errors, send, wait_for, wait_for_end};
use rustix::process::{Signal, geteuid};
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

/// Stands for `unshare OPTIONS -- PROGRAM ARGUMENTS`. Its debootstrap makes a tree with a kernel.
const UNSHARE: &str = "\
while [ \"$1\" != -- ]; do shift; done
echo \"$2\" >>called
echo \"$*\" >>arguments
case $2 in
debootstrap)
    while [ \"$2\" != bookworm ]; do shift; done
    mkdir -p \"$3/boot\"
    echo kernel >\"$3/boot/vmlinuz-6.1\"
    echo RAM disk >\"$3/boot/initrd.img-6.1\"
    echo 'W: the mirror is old'
    ;;
sh) echo \"$MIRROR $SECURITY_MIRROR ${DEBOOTSTRAP_DIR-clean}\" >mirrors ;;
esac";
const KEYGEN: &str =
    "for file; do :; done; echo private >\"$file\"; echo ssh-ed25519 >\"$file.pub\"";

/// Part of the warning about them.
const NO_MODULES: &str = "the disk gets no modules for the kernel of `parador run`";

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
    let mut command = folder.parador(&["rootfs", "debian"]);
    if !more.contains(&"--output") {
        command.args(["--output", "made/debian"]);
    }
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
    let mut command = rootfs(&folder, &["--include", "git,vim"]);
    let output = command.env("DEBOOTSTRAP_DIR", "/nowhere").output().unwrap();
    assert_eq!(code(&output), 0, "{}", errors(&output));
    assert!(errors(&output).contains("debootstrap: the mirror is old"), "{}", errors(&output));
    // The cache has no kernel.
    assert!(errors(&output).contains(NO_MODULES), "{}", errors(&output));
    let debootstrap = String::from_utf8(folder.read("arguments")).unwrap();
    let keys = "--force-check-gpg --keyring /usr/share/keyrings/debian-archive-keyring.gpg";
    assert!(debootstrap.contains(keys), "{debootstrap}");
    assert!(debootstrap.contains("--cache-dir /var/cache/parador/packages"), "{debootstrap}");
    let mirrors = "http://deb.debian.org/debian http://deb.debian.org/debian-security clean\n";
    assert_eq!(folder.read("mirrors"), mirrors.as_bytes());
    assert_eq!(output.stdout, b"made/debian\n");
    assert_eq!(folder.list("made"), ["debian"]);
    let names = ["disk.img", "initrd.img", "made-with", "ssh-key", "ssh-key.pub", "vmlinuz"];
    assert_eq!(folder.list("made/debian"), names);
    assert_eq!(folder.read("made/debian/vmlinuz"), b"kernel\n");
    assert_eq!(folder.read("called"), b"debootstrap\nsh\nmke2fs\n");

    let output = rootfs(&folder, &["--include", "vim,git"]).output().unwrap();
    assert_eq!(code(&output), 0);
    assert!(errors(&output).contains("already exists"), "{}", errors(&output));
    let output = rootfs(&folder, &[]).output().unwrap();
    assert_eq!(code(&output), 64);
    assert!(errors(&output).contains("--force"), "{}", errors(&output));
    assert_eq!(folder.read("called"), b"debootstrap\nsh\nmke2fs\n");

    let output = rootfs(&folder, &["--force", "--modules", "none"]).output().unwrap();
    assert_eq!(code(&output), 0);
    assert!(!errors(&output).contains(NO_MODULES), "{}", errors(&output));
    assert_eq!(folder.list("made"), ["debian"]);
}

#[test]
fn only_a_disk_that_no_vm_uses_is_rebuilt() {
    let folder = folder(UNSHARE);
    if is_refused(&folder) {
        return;
    }
    symlink("made/debian", folder.path("link")).unwrap();
    let force = || rootfs(&folder, &["--force", "--output", "link"]).output().unwrap();
    assert_eq!(code(&rootfs(&folder, &[]).output().unwrap()), 0);
    let disk = folder.path("made/debian/disk.img");
    let identity = || fs::metadata(&disk).unwrap().ino();
    let (first, calls) = (identity(), folder.read("called"));
    let vm = File::open(&disk).unwrap();
    vm.try_lock().unwrap();
    let output = force();
    assert_eq!(code(&output), 71, "{}", errors(&output));
    let text = errors(&output);
    assert!(text.contains("disk.img is in use by another VM"), "{text}");
    drop(vm);
    folder.write("made/debian/notes", b"mine");
    let output = force();
    assert_eq!(code(&output), 64, "{}", errors(&output));
    assert!(errors(&output).contains("debian/notes is no file of the disk"), "{}", errors(&output));
    assert_eq!((identity(), folder.read("called")), (first, calls), "before the build");

    fs::remove_file(folder.path("made/debian/notes")).unwrap();
    // Left by a killed process; and of another program.
    for name in ["made/.parador-rootfs-left", "made/.partial-other"] {
        fs::create_dir(folder.path(name)).unwrap();
        let time = SystemTime::now() - Duration::from_secs(3600);
        File::open(folder.path(name)).unwrap().set_modified(time).unwrap();
    }
    assert_eq!(code(&force()), 0);
    assert_ne!(identity(), first);
    assert!(folder.path("link").is_symlink());
    assert_eq!(folder.list("made"), [".partial-other", "debian"]);
}

#[test]
fn builds_wait_for_each_other() {
    // apt refuses a cache that another one uses.
    let alone = "mkdir running || { echo 'E: Could not get lock'; exit 1; }; sleep 0.5\n";
    let folder = folder(&format!("{alone}{UNSHARE}\nrmdir running"));
    if is_refused(&folder) {
        return;
    }
    let start = |more: &[&str]| {
        let mut command = rootfs(&folder, more);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    // Two want one disk, and get it; the third wants another one.
    let builds = [start(&[]), start(&[]), start(&["--output", "made/other"])];
    let mut waited = 0;
    for build in builds {
        let output = build.wait_with_output().unwrap();
        assert_eq!(code(&output), 0, "{}", errors(&output));
        waited += usize::from(errors(&output).contains("waiting for another build of a disk"));
    }
    // The first may have waited for a build of another test.
    assert!(waited >= 2, "{waited}");
    assert_eq!(folder.list("made"), ["debian", "other"]);
    assert_eq!(folder.read("called"), b"debootstrap\nsh\nmke2fs\n".repeat(2));
}

#[test]
fn missing_programs_are_reported() {
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
    // The child keeps writing until it is killed.
    let folder = folder(
        "echo $$ >pid; while :; do for work in made/.parador-rootfs-*; do echo >\"$work/file\"; done; done",
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

#[test]
fn a_mirror_without_a_signature_is_refused() {
    let folder = folder(UNSHARE);
    if is_refused(&folder) {
        return;
    }
    // As the real one, but for name spaces, which not every host has.
    folder.script("programs/unshare", "while [ \"$1\" != -- ]; do shift; done; shift; exec \"$@\"");
    std::fs::remove_file(folder.path("programs/debootstrap")).unwrap();
    std::fs::create_dir_all(folder.path("debian/dists/bookworm")).unwrap();
    let release = "Origin: Debian\nSuite: stable\nCodename: bookworm\nComponents: main\n\
                   Architectures: amd64\nSHA256:\n";
    folder.write("debian/dists/bookworm/Release", release.as_bytes());
    let mirror = format!("file://{}", folder.path("debian").display());
    let path = format!("{}:/bin:/usr/bin:/usr/sbin:/sbin", folder.path("programs").display());
    let mut command = rootfs(&folder, &["--mirror", &mirror]);
    let output = command.env("PATH", path).output().unwrap();
    assert_eq!(code(&output), 69, "{}", errors(&output));
    let text = errors(&output);
    assert!(text.contains("E: Failed getting release signature file"), "{text}");
    assert!(folder.list("made").is_empty());
}

#[test]
fn root_works_in_no_folder_that_others_may_change() {
    let folder = folder(UNSHARE);
    if is_refused(&folder) {
        return;
    }
    std::fs::create_dir(folder.path("made")).unwrap();
    let writable = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(folder.path("made"), writable).unwrap();
    let output = rootfs(&folder, &[]).output().unwrap();
    assert_eq!(code(&output), 77, "{}", errors(&output));
    assert!(errors(&output).contains("is writable by other users"), "{}", errors(&output));
    assert!(folder.list("made").is_empty() && !folder.path("called").exists());
}
