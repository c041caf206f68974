//! `parador rootfs debian`: builds a Debian disk image, and the kernel and initial RAM disk that
//! boot it.
//!
//! debootstrap and apt fill a folder, with programs of another architecture executed by QEMU's user
//! emulation; from it `mke2fs -d` creates a file system: no loop devices, and all mounts are in a
//! namespace of their own. The result is a folder that appears complete or not at all. An existing
//! disk is only replaced on request, as a guest may have written to it, and not while a VM uses it.
//! One disk is built at a time, because all builds share a package cache.

use clap::Args;
use hosted_command::architecture::{Architecture, GuestArchitecture};
use hosted_command::disk_lock;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::input;
use hosted_command::interrupt::Interruptible;
use hosted_command::lock::Lock;
use hosted_command::messages::{self, Level};
use hosted_command::output_folder::OutputFolder;
use hosted_command::scratch::{self, ScratchFolder};
use hosted_command::steps::{Step, Steps};
use hosted_command::store;
use hosted_command::supervise::{self, AtEnd};
use hosted_command::trust;
use hosted_command::value::Size;
use hosted_kbuild::kernel::KernelFile;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, lchown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// File names in the folder: disk, kernel, initial RAM disk, SSH key pair, and the build record.
const DISK: &str = "disk.img";
const KERNEL: &str = "vmlinuz";
const INITRD: &str = "initrd.img";
const KEY: &str = "ssh-key";
const PUBLIC_KEY: &str = "ssh-key.pub";
const RECORD: &str = "made-with";
/// All of them.
const FILES: [&str; 6] = [DISK, KERNEL, INITRD, KEY, PUBLIC_KEY, RECORD];
/// Name prefix of the folders of running builds, which are in users' folders.
const WORK: &str = ".parador-rootfs-";

/// Value of --modules that installs none.
const NO_MODULES: &str = "none";
/// First line of [`RECORD`]; changes with the build procedure.
const VERSION: &str = "parador rootfs 1";
/// First words of the records of all versions.
const RECORDS: &str = "parador rootfs ";
/// Package cache.
const ARCHIVES: &str = "/var/cache/parador/packages";
/// Lock of the package cache, held during a build.
const ARCHIVES_LOCK: &str = "/var/cache/parador/packages.lock";
/// Packages of every disk besides its kernel: the RAM disk, systemd with logins and network, ssh.
const PACKAGES: [&str; 10] = [
    "initramfs-tools",
    "zstd",
    "systemd-sysv",
    "udev",
    "dbus",
    "libpam-systemd",
    "systemd-resolved",
    "iproute2",
    "iputils-ping",
    "openssh-server",
];
/// Script that makes the tree's programs run, and the one that runs there after debootstrap.
const ENTER: &str = include_str!("rootfs/enter.sh");
const SCRIPT: &str = include_str!("rootfs/packages.sh");
/// Program that executes those of AArch64, its package, and its handler for binfmt_misc
/// (Linux, Documentation/admin-guide/binfmt-misc.rst): header of an ELF file for AArch64, and the
/// bits of it that count. F: the program is the host's, not the tree's.
const QEMU: (&str, &str) = ("qemu-aarch64-static", "qemu-user-static");
const HEADER: &str = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00";
const MASK: &str =
    r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff";
/// Required programs and their packages.
const NEEDED: [(&str, &str); 6] = [
    ("debootstrap", "debootstrap"),
    ("gpgv", "gpgv"),
    ("mke2fs", "e2fsprogs"),
    ("ssh-keygen", "openssh-client"),
    ("unshare", "util-linux"),
    ("chroot", "coreutils"),
];
/// Debian's public keys, which verify a mirror's index, and their package.
const KEYRING: (&str, &str) =
    ("/usr/share/keyrings/debian-archive-keyring.gpg", "debian-archive-keyring");
/// Environment variables passed to programs that run as root: proxies. Others could change what is
/// executed, as `DEBOOTSTRAP_DIR` does.
const PASSED: [&str; 6] =
    ["http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "HTTPS_PROXY", "NO_PROXY"];
/// Suffix of a mirror's URL, and of its security updates.
const MIRROR: &str = "/debian";
const SECURITY: &str = "/debian-security";
/// Value of --security-mirror that disables security updates.
const NO_SECURITY: &str = "none";
/// Output lines shown of a failed program.
const SHOWN_LINES: usize = 12;

/// First byte of the partition.
const PARTITION: u64 = 1 << 20;
const SECTOR: u64 = 512;
/// Valid sizes: large enough for Debian, addressable by an MBR.
const SIZES: std::ops::RangeInclusive<u64> = 1 << 30..=1 << 40;

/// Options of `parador rootfs debian`.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// Output folder.
    #[arg(short, long, value_name = "FOLDER")]
    pub output: PathBuf,
    /// Architecture of the disk's programs, and so of the machine for it.
    #[arg(long, value_enum, default_value = "x86")]
    pub arch: Architecture,
    /// Size of the disk. The file is sparse.
    #[arg(long, value_name = "SIZE", value_parser = Size::parse, default_value = "4G")]
    pub size: Size,
    /// Additional packages.
    #[arg(long, value_name = "PACKAGE", value_delimiter = ',')]
    pub include: Vec<String>,
    /// Public key authorized for root [default: a new key pair].
    #[arg(long, value_name = "FILE")]
    pub ssh_key: Option<PathBuf>,
    /// Debian release.
    #[arg(long, default_value = "bookworm")]
    pub suite: String,
    /// Debian mirror for packages and updates. Its signature is verified.
    #[arg(long, value_name = "URL", default_value = "http://deb.debian.org/debian")]
    pub mirror: String,
    /// Mirror for security updates, or `none` [default: `debian-security` next to a mirror that
    /// ends in `debian`].
    #[arg(long, value_name = "URL")]
    pub security_mirror: Option<String>,
    /// Folder like /lib/modules, whose kernels' modules are installed, too, or `none` [default:
    /// those of the kernel of `parador run`].
    #[arg(long, value_name = "FOLDER")]
    pub modules: Option<PathBuf>,
    /// Rebuild the disk; its contents are lost. A disk that a VM uses is not replaced, nor a folder
    /// with other files.
    #[arg(long)]
    pub force: bool,
}

/// Returns a remedy if the missing file `path` is a result of this command.
pub fn advice(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let folder = path.parent()?;
    let is_ours = [DISK, KERNEL, INITRD].contains(&name);
    is_ours.then(|| format!("`sudo parador rootfs debian -o {}` creates it", folder.display()))
}

/// Checks the options that end up in commands and in the partition table.
fn check(options: &Options) -> Result<(), Failure> {
    let Options { size, .. } = options;
    if !SIZES.contains(&size.0) || size.0 % PARTITION != 0 {
        return Err(Failure::new(failure::USAGE, format!("invalid disk size {size}"))
            .help("use a whole number of MiB from 1G to 1024G"));
    }
    let is_word = |text: &str| {
        let mut bytes = text.bytes();
        bytes.next().is_some_and(|byte| byte.is_ascii_alphanumeric())
            && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"+-.:=~/_".contains(&byte))
    };
    let words = options.include.iter().chain([&options.suite, &options.mirror]);
    let words = words.chain(&options.security_mirror);
    if let Some(wrong) = words.into_iter().find(|word| !is_word(word)) {
        let message = format!("invalid name of a package, release or mirror: `{wrong}`");
        return Err(Failure::new(failure::USAGE, message));
    }
    security_mirror(options).map(drop)
}

/// Builds the disk unless it exists.
pub fn debian(options: &Options, steps: &Steps) -> Result<(), Failure> {
    check(options)?;
    let output = OutputFolder::resolve(&options.output)?;
    let key = options.ssh_key.as_deref().map(public_key).transpose()?;
    let caller = env::var("SUDO_UID").ok().and_then(|number| number.parse().ok());
    let kernel = KernelFile::find(None);
    let modules = modules(options, kernel.as_ref().ok(), caller)?;
    let record = record(options, key.as_deref(), modules.as_deref());
    if is_there(&output, options, &record)? {
        let shown = options.output.display();
        messages::to_stderr(format_args!("parador: {shown} already exists\n"));
        return Ok(());
    }
    check_host(options.arch)?;
    if wants_default_modules(options) && modules.is_none() {
        warn_of_no_modules(kernel.as_ref());
    }
    let archives = archives()?;

    let parent = output.parent();
    let failed = |path: &Path, error| Failure::file("create the folder", path, &error);
    // Root works there: only root and the caller of sudo may change what the path resolves to.
    let parent = &trust::check_for(&create_for_owner(parent, caller)?, caller)?;
    let output = output.in_parent(parent);
    let interruptible = Interruptible::new()?;
    let lock = Lock::wait(Path::new(ARCHIVES_LOCK), "a disk", steps)?;
    interruptible.remove_on_signal(lock.path());
    // Another process may have built this disk meanwhile.
    if is_there(&output, options, &record)? {
        return Ok(());
    }
    let _held = lock_disk(output.path())?;
    scratch::remove_abandoned(parent, WORK);
    let work = ScratchFolder::new_in(parent, WORK).map_err(|error| failed(parent, error))?;
    interruptible.remove_on_signal(work.path());
    let result = work.path().join("result");
    fs::create_dir(&result).map_err(|error| failed(&result, error))?;
    let inputs = Inputs { options, key: key.as_deref(), modules, archives };
    make(&inputs, work.path(), &result, steps, &interruptible)?;
    write(&result.join(RECORD), record.as_bytes())?;
    store::exclude_writers(&result).file_error("change", &result)?;
    give_to_owner_of(parent, &result)?;

    // The old disk is removed with the work folder.
    output.put(&result, &interruptible, || match is_there(&output, options, &record)? {
        false => Ok(()),
        true => {
            let text = format!("{} has got a disk meanwhile", options.output.display());
            Err(Failure::new(failure::USAGE, text).help("use it, or another folder"))
        }
    })
}

/// Locks the disk in the folder that is replaced, if it has one: no VM uses it until the result is
/// dropped.
fn lock_disk(folder: &Path) -> Result<Option<File>, Failure> {
    let path = folder.join(DISK);
    // A link is replaced, not its target.
    if !path.symlink_metadata().is_ok_and(|found| found.is_file()) {
        return Ok(None);
    }
    let disk = File::options().read(true).write(true).open(&path).file_error("open", &path)?;
    disk_lock::lock(&disk, &path, false)
        .map_err(|failure| failure.help("power off the VM first, or use another folder"))?;
    Ok(Some(disk))
}

/// Returns the mirror for security updates, if there is one.
fn security_mirror(options: &Options) -> Result<Option<String>, Failure> {
    let Options { mirror, security_mirror, .. } = options;
    match (security_mirror.as_deref(), mirror.trim_end_matches('/').strip_suffix(MIRROR)) {
        (Some(NO_SECURITY), _) => Ok(None),
        (Some(url), _) => Ok(Some(url.to_owned())),
        (None, Some(beside)) => Ok(Some(format!("{beside}{SECURITY}"))),
        (None, None) => {
            let text = format!("cannot derive the security mirror from {mirror}");
            Err(Failure::new(failure::USAGE, text)
                .help("use --security-mirror URL, or `--security-mirror none`"))
        }
    }
}

/// Returns all inputs of the result, as text; `modules` is that of [`modules`].
fn record(options: &Options, key: Option<&str>, modules: Option<&Path>) -> String {
    let Options { size, include, suite, mirror, .. } = options;
    let mut include = include.clone();
    include.sort();
    include.dedup();
    let security = options.security_mirror.as_deref();
    // A named folder stands for its contents; of the default kernel the release does.
    let modules = match &options.modules {
        Some(folder) => Some(format!("modules {}\n", folder.display())),
        None => modules
            .and_then(Path::file_name)
            .map(|release| format!("modules of the kernel {}\n", release.display())),
    };
    format!(
        "{VERSION}\nsize {size}\nsuite {suite}\nmirror {mirror}\n{}{}{}include {}\nkey {}\n",
        match options.arch {
            Architecture::X86 => "",
            Architecture::Arm64 => "architecture arm64\n",
        },
        security.map(|url| format!("security mirror {url}\n")).unwrap_or_default(),
        modules.unwrap_or_default(),
        include.join(","),
        key.unwrap_or("made here").trim(),
    )
}

/// Returns whether the folder contains the requested disk. Fails if it contains other data, which
/// must not be lost.
fn is_there(output: &OutputFolder, options: &Options, record: &str) -> Result<bool, Failure> {
    if output.is_empty()? {
        return Ok(false);
    }
    let folder = output.path();
    let known = fs::read_to_string(folder.join(RECORD)).ok();
    let known = known.filter(|known| known.starts_with(RECORDS));
    let whole = [DISK, KERNEL, INITRD].iter().all(|name| folder.join(name).is_file());
    let shown = options.output.display();
    let refuse = |text: String, help: &str| Err(Failure::new(failure::USAGE, text).help(help));
    match known {
        None => {
            let text = format!("{shown} contains other files than a disk of `parador rootfs`");
            refuse(text, "use a folder that does not exist")
        }
        Some(_) if options.force => match output.foreign_entry(&FILES)? {
            None => Ok(false),
            Some(entry) => {
                let text = format!("{} is no file of the disk and would be lost", entry.display());
                refuse(text, "move it to another folder")
            }
        },
        Some(known) if known == record && whole => Ok(true),
        Some(_) => refuse(
            format!("the disk in {shown} was built with other options or is incomplete"),
            "use another folder, or --force to rebuild it: its contents will be lost",
        ),
    }
}

/// Returns the required packages that are missing.
fn missing(arch: Architecture, is_there: impl Fn(&Path) -> bool) -> Vec<&'static str> {
    let emulator = (arch != Architecture::X86).then_some(QEMU);
    let all = NEEDED.into_iter().chain([KEYRING]).chain(emulator);
    all.filter(|(file, _)| !is_there(Path::new(file))).map(|(_, package)| package).collect()
}

/// Checks the requirements on the host.
fn check_host(arch: Architecture) -> Result<(), Failure> {
    // The keyring is a path, programs are names.
    let missing = missing(arch, |file| supervise::find(file).is_some());
    if !missing.is_empty() {
        let message = format!("building a disk requires {}", missing.join(", "));
        return Err(Failure::new(failure::UNAVAILABLE, message)
            .help(format!("apt-get install {}", missing.join(" "))));
    }
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::new(failure::PERMISSION, "building a Debian disk requires root")
            .help("run the same command with sudo: packages install files of several users"));
    }
    Ok(())
}

fn public_key(path: &Path) -> Result<String, Failure> {
    let text = input::text(path)?;
    match text.starts_with("ssh-") || text.starts_with("ecdsa-") || text.starts_with("sk-") {
        true => Ok(text),
        false => {
            let message = format!("{} is not an SSH public key", path.display());
            Err(Failure::new(failure::BAD_CONFIG, message).help("use the .pub file"))
        }
    }
}

/// Copies kernel and initial RAM disk out of the tree.
fn copy_boot_files(tree: &Path, version: &str, result: &Path) -> Result<(), Failure> {
    for (name, prefix) in [(KERNEL, "vmlinuz-"), (INITRD, "initrd.img-")] {
        let (from, to) = (tree.join("boot").join(format!("{prefix}{version}")), result.join(name));
        fs::copy(&from, &to).file_error("copy", &from)?;
        // The host's user, who is not root, starts the guest.
        fs::set_permissions(&to, fs::Permissions::from_mode(0o644)).file_error("change", &to)?;
    }
    Ok(())
}

/// Returns what is copied to the disk's modules: the contents of the folder that the options name,
/// or the modules of the kernel that a VM boots by default, if there is one. Root copies it: only
/// root and `caller`, who receives the disk, may change a folder that is named.
fn modules(
    options: &Options,
    kernel: Option<&KernelFile>,
    caller: Option<u32>,
) -> Result<Option<PathBuf>, Failure> {
    match options.modules.as_deref() {
        None if !wants_default_modules(options) => Ok(None),
        None => Ok(kernel.and_then(KernelFile::modules)),
        Some(path) if path == Path::new(NO_MODULES) => Ok(None),
        Some(path) if path.is_dir() => Ok(Some(trust::check_for(path, caller)?.join("."))),
        Some(path) => {
            let message = format!("no folder with modules: {}", path.display());
            Err(Failure::new(failure::MISSING_FILE, message).help(
                "use the folder `lib/modules` of a kernel, for example /lib/modules, or \
                 `--modules none`",
            ))
        }
    }
}

/// Returns whether the disk gets the modules of the kernel that a VM boots by default, which is one
/// for x86.
fn wants_default_modules(options: &Options) -> bool {
    options.modules.is_none() && options.arch == Architecture::X86
}

/// Warns that the disk gets no modules for the kernel that a VM boots by default. With sudo(8) the
/// user's cache, which may have the kernel, is not that of root.
fn warn_of_no_modules(kernel: Result<&KernelFile, &Failure>) {
    let reason = match kernel {
        Ok(kernel) => format!("{} has none", kernel.path.display()),
        Err(failure) => failure.message().into_owned(),
    };
    let text = format!(
        "the disk gets no modules for the kernel of `parador run`: {reason}; with the FOLDER of \
         the kernel in `parador kernel list`, use `--modules FOLDER/modules/lib/modules`, or \
         `--modules none`"
    );
    messages::say(Level::Warn, &text);
}

/// Inputs of a disk.
struct Inputs<'a> {
    options: &'a Options,
    /// Public key authorized for root; `None`: that of a new pair.
    key: Option<&'a str>,
    /// Modules for another kernel than the disk's.
    modules: Option<PathBuf>,
    /// Package cache, locked.
    archives: PathBuf,
}

/// Builds everything but the record in `result`.
fn make(
    inputs: &Inputs<'_>,
    work: &Path,
    result: &Path,
    steps: &Steps,
    interruptible: &Interruptible,
) -> Result<(), Failure> {
    let Inputs { options, key, modules, archives } = inputs;
    let Options { suite, mirror, include, size, arch, .. } = options;
    let tree = work.join("tree");
    let key_file = match key {
        Some(text) => {
            let path = work.join("key.pub");
            write(&path, text.as_bytes())?;
            path
        }
        None => new_key(&result.join(KEY))?,
    };
    let network = "check the network and the mirror's URL; http_proxy sets a proxy";

    steps.run("base system", |step| {
        let mut command = contained("debootstrap")?;
        // Without --force-check-gpg, debootstrap only warns about a missing keyring.
        command.args(["--variant=minbase", "--force-check-gpg", "--keyring", KEYRING.0]);
        if *arch != Architecture::X86 {
            command.args(["--foreign", "--arch", GuestArchitecture::from(*arch).debian()]);
        }
        command.arg("--cache-dir").arg(archives).arg(suite).arg(&tree).arg(mirror);
        run(&mut command, "debootstrap", step, interruptible)
            .map_err(|error| error.help(network))?;
        Ok(((), format!("Debian {suite} from {mirror}")))
    })?;
    steps.run("packages", |step| {
        let mut command = contained("sh")?;
        command.args(["-c", ENTER, "parador-rootfs", "sh", "-c", SCRIPT, "parador-rootfs"]);
        command.arg(GuestArchitecture::from(*arch).kernel_package()).args(PACKAGES).args(include);
        command.env("TREE", &tree).env("ARCHIVES", archives).env("KEY", &key_file);
        let (emulator, handler) = emulator(*arch)?;
        command.env("WORK", work).env("QEMU", emulator).env("HANDLER", handler);
        command.env("SUITE", suite).env("MIRROR", mirror);
        command.env("MODULES", modules.as_deref().unwrap_or(Path::new("")));
        command.env("SECURITY_MIRROR", security_mirror(options)?.unwrap_or_default());
        run(&mut command, "apt-get", step, interruptible)
            .map_err(|error| error.help("check the package names and that the disk is not full"))?;
        Ok(((), format!("{} and their dependencies", 1 + PACKAGES.len() + include.len())))
    })?;
    let version = kernel_version(&tree)?;
    copy_boot_files(&tree, &version, result)?;
    steps.run("disk", |step| {
        write_disk(&result.join(DISK), *size, &tree, step, interruptible)?;
        Ok(((), format!("{size}, Linux {version}")))
    })
}

/// Creates the disk with the files of the tree.
fn write_disk(
    disk: &Path,
    size: Size,
    tree: &Path,
    step: &Step,
    interruptible: &Interruptible,
) -> Result<(), Failure> {
    write_partition_table(disk, size.0)?;
    step.now("copying files");
    let mut command = contained("mke2fs")?;
    command.args(["-q", "-F", "-t", "ext4", "-L", "debian", "-d"]).arg(tree);
    command.arg("-E").arg(format!("offset={PARTITION}"));
    command.arg(disk).arg(format!("{}k", (size.0 - PARTITION) >> 10));
    run(&mut command, "mke2fs", step, interruptible)
        .map_err(|error| error.help("check the free space on this disk, and --size"))
}

/// Returns the program that executes those of a disk, and its handler for binfmt_misc; nothing if
/// the processor does.
fn emulator(arch: Architecture) -> Result<(PathBuf, OsString), Failure> {
    if arch == Architecture::X86 {
        return Ok(Default::default());
    }
    let program = supervise::find(Path::new(QEMU.0)).ok_or_else(|| {
        Failure::new(failure::UNAVAILABLE, format!("no program {}", QEMU.0))
            .help(format!("apt-get install {}", QEMU.1))
    })?;
    let mut handler = OsString::from(format!(":parador-aarch64:M::{HEADER}:{MASK}:"));
    handler.push(&program);
    handler.push(":F");
    Ok((program, handler))
}

/// Returns the package cache: owned by root under sudo, too, because its contents are
/// installed with root's rights.
fn archives() -> Result<PathBuf, Failure> {
    let folder = Path::new(ARCHIVES);
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(folder)
        .file_error("create the folder", folder)?;
    trust::check(folder)
}

/// Generates a key pair and returns the public key's file.
fn new_key(path: &Path) -> Result<PathBuf, Failure> {
    let output = supervise::command(OsStr::new("ssh-keygen"), AtEnd::Kill)?
        .args(["-q", "-t", "ed25519", "-N", "", "-C", "parador", "-f"])
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .start_error("ssh-keygen")?;
    match output.status.success() {
        true => Ok(path.with_extension("pub")),
        false => {
            let text = String::from_utf8_lossy(&output.stderr);
            Err(Failure::new(failure::UNAVAILABLE, format!("ssh-keygen failed: {}", text.trim())))
        }
    }
}

/// Creates a command whose mounts and processes all end with it.
fn contained(program: &str) -> Result<Command, Failure> {
    let mut command = supervise::command(OsStr::new("unshare"), AtEnd::Kill)?;
    command.args(["--mount", "--propagation", "private", "--pid", "--kill-child", "--", program]);
    command.env_clear().env("LC_ALL", "C").stdin(Stdio::null());
    command.env("PATH", env::join_paths(supervise::search_path()).unwrap_or_default());
    command.envs(PASSED.iter().filter_map(|name| Some((name, env::var_os(name)?))));
    Ok(command)
}

/// Runs a command and shows its output as progress.
fn run(
    command: &mut Command,
    name: &str,
    step: &Step,
    interruptible: &Interruptible,
) -> Result<(), Failure> {
    let show = |line: &str| {
        match line.trim().strip_prefix("W: ") {
            Some(warning) => step.warn(&format!("{name}: {warning}")),
            None if line.trim().is_empty() => {}
            None => step.now(line.trim().strip_prefix("I: ").unwrap_or(line.trim())),
        }
        true
    };
    let followed = supervise::follow(command, name, Some(interruptible), SHOWN_LINES, show)?;
    let Err(mut last) = followed else { return Ok(()) };
    // Programs report the reason at the end, after many lines of progress.
    let is_error =
        |line: &String| ["E: ", "W: ", "mke2fs: "].iter().any(|mark| line.trim().starts_with(mark));
    if last.iter().any(is_error) {
        last.retain(is_error);
    }
    Err(Failure::new(failure::UNAVAILABLE, format!("{name} failed:\n{}", last.join("\n"))))
}

/// The version of the one kernel in the tree.
fn kernel_version(tree: &Path) -> Result<String, Failure> {
    let boot = tree.join("boot");
    let names = fs::read_dir(&boot).file_error("read", &boot)?;
    let mut versions: Vec<String> = names
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter_map(|name| name.strip_prefix("vmlinuz-").map(str::to_owned))
        .collect();
    // Several kernels are only possible with packages that the user added; the choice just has to
    // be deterministic.
    versions.sort();
    versions
        .pop()
        .ok_or_else(|| Failure::new(failure::UNAVAILABLE, "no kernel is installed in the tree"))
}

/// Creates a disk of `size` bytes with one partition in an MBR: entry at 446 with type and
/// position, signature at 510.
fn write_partition_table(path: &Path, size: u64) -> Result<(), Failure> {
    const LINUX: u8 = 0x83;
    let mut first = [0; SECTOR as usize];
    first[450] = LINUX;
    let sectors = |bytes: u64| u32::try_from(bytes / SECTOR).unwrap_or(u32::MAX).to_le_bytes();
    first[454..458].copy_from_slice(&sectors(PARTITION));
    first[458..462].copy_from_slice(&sectors(size - PARTITION));
    first[510..].copy_from_slice(&[0x55, 0xaa]);
    File::create(path)
        .and_then(|mut file| file.write_all(&first).and_then(|()| file.set_len(size)))
        .file_error("write", path)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    fs::write(path, bytes).file_error("write", path)
}

/// Creates a folder and those above it that are missing, gives each to the owner of the one above,
/// because a user has a folder in the own one, not one of root, and returns its path without links.
///
/// # Errors
/// Others than root and `caller` can change where the folders are created ([`trust::check_for`]):
/// they could choose the file that root gives away. A folder cannot be created.
fn create_for_owner(folder: &Path, caller: Option<u32>) -> Result<PathBuf, Failure> {
    if folder.is_dir() {
        return trust::check_for(folder, caller);
    }
    let above = folder.parent().filter(|above| *above != Path::new("")).unwrap_or(Path::new("."));
    let above = create_for_owner(above, caller)?;
    let Some(name) = folder.file_name() else {
        return trust::check_for(&above.join(".."), caller);
    };
    let folder = above.join(name);
    let created = match fs::create_dir(&folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => Ok(()),
        Err(error) => Err(error),
        Ok(()) => fs::metadata(&above)
            .and_then(|owner| lchown(&folder, Some(owner.uid()), Some(owner.gid()))),
    };
    created.file_error("create the folder", &folder).map(|()| folder)
}

/// Gives a folder and its files to the owner of `parent`: results of `sudo` belong to the user.
fn give_to_owner_of(parent: &Path, folder: &Path) -> Result<(), Failure> {
    let failed = |error| Failure::file("change the owner of", folder, &error);
    let owner = fs::metadata(parent).map_err(failed)?;
    let give = |path: &Path| lchown(path, Some(owner.uid()), Some(owner.gid()));
    for entry in fs::read_dir(folder).map_err(failed)? {
        give(&entry.map_err(failed)?.path()).map_err(failed)?;
    }
    // Temporary folders are accessible to their owner only.
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).map_err(failed)?;
    give(folder).map_err(failed)
}

#[cfg(test)]
mod tests;
