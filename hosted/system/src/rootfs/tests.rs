//! Tests of the options, of what is replaced, and of the scripts.

use super::*;
use hosted_command::input::testing::with_named_pipe;

fn options(output: PathBuf) -> Options {
    Options {
        output,
        arch: Architecture::X86,
        size: Size(4 << 30),
        include: vec!["b".into(), "a".into()],
        ssh_key: None,
        suite: "bookworm".into(),
        mirror: "http://deb.debian.org/debian".into(),
        security_mirror: None,
        modules: None,
        force: false,
    }
}

#[test]
fn a_named_pipe_is_no_key() {
    assert_eq!(with_named_pipe(public_key).unwrap_err().code(), failure::BAD_CONFIG);
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    fs::write(&key, "ssh-ed25519 AAAA").unwrap();
    assert_eq!(public_key(&key).unwrap(), "ssh-ed25519 AAAA");
}

#[test]
fn new_folders_belong_to_the_owner_of_the_one_above() {
    let above = tempfile::tempdir().unwrap();
    if rustix::process::geteuid().is_root() {
        lchown(above.path(), Some(1234), Some(5678)).unwrap();
    }
    let owner = |path: &Path| fs::metadata(path).map(|found| (found.uid(), found.gid())).unwrap();
    let new = above.path().join("a/../b/c");
    let caller = Some(owner(above.path()).0);
    let real = above.path().canonicalize().unwrap().join("b/c");
    for _ in 0..2 {
        assert_eq!(create_for_owner(&new, caller).unwrap(), real);
    }
    for path in ["a", "b", "b/c"] {
        assert_eq!(owner(&above.path().join(path)), owner(above.path()), "{path}");
    }
    fs::write(above.path().join("file"), "").unwrap();
    assert!(create_for_owner(&above.path().join("file"), caller).is_err());
    // Nothing is created where others can move the folders.
    let open = above.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    let failure = create_for_owner(&open.join("a/b"), caller).unwrap_err();
    assert_eq!(failure.code(), failure::PERMISSION);
    assert!(!open.join("a").exists());
}

#[test]
fn what_is_there_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(folder.path().join("debian"));
    let is_there = |options: &Options, record: &str| {
        let output = OutputFolder::resolve(&options.output).unwrap();
        super::is_there(&output, options, record)
    };
    let record = record(&options, None, None);
    assert!(!is_there(&options, &record).unwrap());
    fs::create_dir(&options.output).unwrap();
    assert!(!is_there(&options, &record).unwrap());
    for name in [DISK, KERNEL, INITRD, RECORD] {
        assert!(name == DISK || is_there(&options, &record).is_err(), "{name}");
        fs::write(options.output.join(name), &record).unwrap();
    }
    assert!(is_there(&options, &record).unwrap());
    options.include.reverse();
    assert_eq!(super::record(&options, None, None), record);
    // The kernel of `parador run` has become another one.
    let modules = Path::new("modules/6.1.192-parador");
    let with_modules = super::record(&options, None, Some(modules));
    assert!(with_modules.contains("modules of the kernel 6.1.192-parador\n"), "{with_modules}");
    assert!(is_there(&options, &with_modules).is_err());
    options.arch = Architecture::Arm64;
    assert!(is_there(&options, &super::record(&options, None, None)).is_err());
    options.arch = Architecture::X86;
    options.size = Size(2 << 30);
    let other = super::record(&options, None, None);
    assert!(is_there(&options, &other).is_err());
    options.force = true;
    assert!(!is_there(&options, &other).unwrap());
    let notes = options.output.join("notes");
    fs::write(&notes, "").unwrap();
    let failure = is_there(&options, &other).unwrap_err().to_string();
    assert!(failure.contains("debian/notes"), "{failure}");
    fs::remove_file(notes).unwrap();
    fs::write(options.output.join(RECORD), "something else").unwrap();
    assert!(is_there(&options, &other).is_err(), "no record of this command");
    fs::remove_file(options.output.join(RECORD)).unwrap();
    assert!(is_there(&options, &other).is_err(), "never a folder of others");
}

#[test]
fn a_disk_of_a_vm_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    assert!(lock_disk(folder.path()).unwrap().is_none());
    let path = folder.path().join(DISK);
    fs::write(&path, "").unwrap();
    let held = lock_disk(folder.path()).unwrap().unwrap();
    let vm = File::open(&path).unwrap();
    assert!(disk_lock::lock(&vm, &path, true).is_err(), "no VM starts meanwhile");
    drop(held);
    for is_reader in [true, false] {
        let vm = File::options().read(true).write(true).open(&path).unwrap();
        disk_lock::lock(&vm, &path, is_reader).unwrap();
        let text = lock_disk(folder.path()).unwrap_err().to_string();
        assert!(text.contains("disk.img is in use") && text.contains("power off"), "{text}");
    }
}

/// Runs a script with this umask and substitutes for the programs that need root; `$1` and so on
/// are `arguments`.
fn run_script(script: &str, arguments: &[&str], folder: &Path) -> String {
    let programs = folder.join("programs");
    fs::create_dir(&programs).unwrap();
    for name in ["mount", "chroot"] {
        let path = programs.join(name);
        fs::write(&path, "#!/bin/sh\nexit 0\n").unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let key = folder.join("key");
    fs::write(&key, "ssh-ed25519").unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "umask 077; exec sh -c \"$@\"", "sh", script, "script"]).args(arguments);
    command.env("PATH", format!("{}:/bin:/usr/bin", programs.display())).env("TREE", folder);
    command.env("ARCHIVES", folder).env("KEY", key).env("QEMU", "").env("MODULES", "");
    command.env("SUITE", "bookworm").env("MIRROR", "m").env("SECURITY_MIRROR", "");
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn users_of_the_disk_read_its_files() {
    let tree = tempfile::tempdir().unwrap();
    for name in ["usr/sbin", "etc/apt", "etc/default", "etc/systemd/network", "root"] {
        fs::create_dir_all(tree.path().join(name)).unwrap();
    }
    run_script(SCRIPT, &["linux-image"], tree.path());
    let mode = |name: &str| fs::metadata(tree.path().join(name)).unwrap().mode() & 0o777;
    for name in ["etc/apt/sources.list", "etc/hosts", "etc/fstab", "etc/default/locale"] {
        assert_eq!(mode(name), 0o644, "{name}");
    }
    assert_eq!(mode("root/.ssh"), 0o700);
}

#[test]
fn programs_in_the_tree_have_the_usual_umask() {
    let tree = tempfile::tempdir().unwrap();
    assert_eq!(run_script(ENTER, &["sh", "-c", "umask"], tree.path()), "0022\n");
    let archives = fs::metadata(tree.path().join("var/cache/apt/archives")).unwrap();
    assert_eq!(archives.mode() & 0o777, 0o755);
}

#[test]
fn arguments_that_make_no_sense() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |change: fn(&mut Options)| {
        let mut options = options(folder.path().join("debian"));
        change(&mut options);
        debian(&options, &Steps::stderr()).unwrap_err().code()
    };
    assert_eq!(refused(|options| options.size = Size(1 << 20)), failure::USAGE);
    assert_eq!(refused(|options| options.size = Size((1 << 30) + 1024)), failure::USAGE);
    assert_eq!(refused(|options| options.include = vec!["-o".into()]), failure::USAGE);
    assert_eq!(refused(|options| options.suite = "a b".into()), failure::USAGE);
    let missing = refused(|options| options.ssh_key = Some("/nowhere".into()));
    assert_eq!(missing, failure::MISSING_FILE);
    let missing = refused(|options| options.modules = Some("/nowhere".into()));
    assert_eq!(missing, failure::MISSING_FILE);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn without_keys_there_is_no_disk() {
    use Architecture::{Arm64, X86};
    assert_eq!(missing(Arm64, |_| true), [""; 0]);
    let keyring = |file: &Path| file != Path::new(KEYRING.0);
    assert_eq!(missing(X86, keyring), ["debian-archive-keyring"]);
    assert_eq!(missing(X86, |file| file != Path::new("gpgv")), ["gpgv"]);
    let emulator = |file: &Path| file != Path::new("qemu-aarch64-static");
    assert_eq!(missing(X86, emulator), [""; 0]);
    assert_eq!(missing(Arm64, emulator), ["qemu-user-static"]);
}

#[test]
fn the_mirror_has_security_updates_too() {
    let security = |mirror: &str, security: Option<&str>| {
        let mut options = options(PathBuf::new());
        options.mirror = mirror.to_owned();
        options.security_mirror = security.map(str::to_owned);
        security_mirror(&options).map_err(|failure| failure.code())
    };
    let beside = Ok(Some("http://mirror/debian-security".to_owned()));
    assert_eq!(security("http://mirror/debian", None), beside);
    assert_eq!(security("http://mirror/debian/", None), beside);
    assert_eq!(security("http://mirror/other", None), Err(failure::USAGE));
    assert_eq!(security("http://mirror/other", Some("file:/s")), Ok(Some("file:/s".into())));
    assert_eq!(security("http://mirror/debian", Some("none")), Ok(None));
}

#[test]
fn one_partition_after_the_first_mebibyte() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    write_partition_table(&path, 1 << 30).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 30);
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes[446..462], [0, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 0xf8, 0x1f, 0]);
}

#[test]
fn advice_names_the_folder() {
    let advice = advice(Path::new("a/debian/vmlinuz")).unwrap();
    assert_eq!(advice, "`sudo parador rootfs debian -o a/debian` creates it");
    assert_eq!(super::advice(Path::new("a/debian/disk")), None);
}
