//! The guest as the options state it: its root, its directories and its command.

use crate::{Net, Options};
use hosted_command::failure::{self, Failure, IoContext};
use hosted_images::{ImageArchive, Settings, UnpackedImage, is_compressed};
use hosted_monitor::config::disk::{DiskConfig, Format};
use hosted_monitor::config::share::{ShareConfig, Tag};
use hosted_monitor::vm_files::KernelFile;
use proto::agent::{
    CommandUser, GuestCommand, MAX_GROUPS, MAX_MOUNTS, Mount, Root, Strings, TerminalSize,
};
use proto::hosted::MAX_SHARES;
use rustix::process::{getegid, geteuid, getgroups};
use rustix::thread::{CapabilitySet, capabilities};
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Mount tag of the root.
const ROOT_TAG: &str = "root";
/// First bytes of a qcow2 image.
const QCOW2: &[u8] = b"QFI\xfb";
/// Search path of commands where it is not this host's.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Variables that a command has of this host: its user, and the user's language and terminal.
const PASSED: [&str; 8] = ["HOME", "LANG", "LOGNAME", "SHELL", "TERM", "TZ", "USER", "COLORTERM"];
const PASSED_PREFIX: &str = "LC_";

/// Tag of the kernel's modules, and where Linux' tools find them.
const MODULES_TAG: &str = "modules";
const MODULES: &str = "/lib/modules";

/// Directory of the host in the guest.
#[derive(Debug, PartialEq, Eq)]
struct Shared {
    folder: PathBuf,
    /// Its path in the guest.
    place: PathBuf,
    tag: String,
    read_only: bool,
    /// Files have the guest's owners.
    owners: bool,
}

/// Root of the guest.
#[derive(Debug)]
enum RootFrom {
    Folder(PathBuf),
    Image(PathBuf, Format),
    Archive(Box<UnpackedImage>),
}

/// A guest and its command, as the options state them.
#[derive(Debug)]
pub struct Plan {
    root: RootFrom,
    shared: Vec<Shared>,
    /// Program and arguments, each followed by a zero.
    arguments: Vec<u8>,
    /// Environment, as arguments.
    environment: Vec<u8>,
    /// Working directory.
    folder: PathBuf,
    /// Supplementary groups of the caller.
    groups: heapless::Vec<u32, MAX_GROUPS>,
    /// The guest has a network.
    pub has_network: bool,
}

impl Plan {
    /// Reads the options.
    ///
    /// # Errors
    /// A folder or image is missing or not suitable: 64 to 66, 71 or 77.
    pub fn new(options: &Options) -> Result<Self, Failure> {
        let root = RootFrom::find(&options.root)?;
        let is_host = matches!(&root, RootFrom::Folder(folder) if folder == Path::new("/"));
        let current = env::current_dir().os_error("find the current folder")?;
        let mut shared = shared(options, &current)?;
        let is_shared = shared.iter().any(|shared| current.starts_with(&shared.folder));
        let of_image = root.settings().and_then(|settings| settings.folder.as_ref());
        let folder = match (&options.workdir, of_image) {
            (Some(folder), _) if folder.is_absolute() => folder.clone(),
            (Some(folder), _) => current.join(folder),
            (None, Some(folder)) => Path::new("/").join(folder),
            (None, None) if is_shared || is_host => current,
            (None, None) => PathBuf::from("/"),
        };
        // The user's directories come first.
        if shared.len() + 1 < MAX_SHARES {
            shared.extend(modules(options, is_host)?);
        }
        let arguments = strings(&command(options, &root)?);
        let base = match root.settings() {
            Some(settings) => of_image_environment(&settings.environment),
            None => of_host(is_host),
        };
        Ok(Self {
            root,
            shared,
            arguments,
            environment: strings(&environment(base, &options.env)?),
            folder,
            groups: groups()?,
            has_network: options.net == Net::User,
        })
    }

    /// Returns the root for the agent.
    pub fn root(&self) -> Root<'_> {
        match self.root {
            RootFrom::Folder(_) => Root::Share(ROOT_TAG),
            RootFrom::Image(..) => Root::Disk,
            RootFrom::Archive(_) => Root::FileSystem,
        }
    }

    /// Returns the command for the agent.
    ///
    /// # Errors
    /// None, except for defects of this module.
    pub fn command(&self, terminal: Option<TerminalSize>) -> Result<GuestCommand<'_>, Failure> {
        let zeros = || Failure::new(failure::INTERNAL, "a list of strings is malformed");
        Ok(GuestCommand {
            arguments: Strings::new(&self.arguments).ok_or_else(zeros)?,
            environment: Strings::new(&self.environment).ok_or_else(zeros)?,
            folder: self.folder.as_os_str().as_bytes(),
            user: self.user(),
            terminal,
        })
    }

    /// Returns a directory of another user which root's guest is to change, but where it has no
    /// rights.
    pub fn of_other_user(&self) -> Option<&Path> {
        if !geteuid().is_root() {
            return None;
        }
        let changed = self.shared.iter().filter(|shared| !shared.read_only && !shared.owners);
        changed.map(|shared| shared.folder.as_path()).find(|folder| {
            fs::metadata(folder).is_ok_and(|found| is_closed_to_root(found.uid(), found.mode()))
        })
    }

    /// Returns the user of the command: that of the image, or the caller.
    fn user(&self) -> CommandUser<'_> {
        match self.root.settings() {
            Some(settings) => CommandUser::Named(&settings.user),
            None => CommandUser::Ids {
                user: geteuid().as_raw(),
                group: getegid().as_raw(),
                groups: self.groups.clone(),
            },
        }
    }

    /// Returns the mounts for the agent.
    pub fn mounts(&self) -> heapless::Vec<Mount<'_>, MAX_MOUNTS> {
        let mounts = self.shared.iter().map(|shared| Mount {
            tag: &shared.tag,
            place: shared.place.as_os_str().as_bytes(),
            read_only: shared.read_only,
            owners: shared.owners,
        });
        // `parador run` refuses more.
        mounts.take(MAX_MOUNTS).collect()
    }

    /// Returns the shared directories and the disks of the VM.
    ///
    /// # Errors
    /// A tag is invalid, which this module does not make.
    pub fn devices(&self) -> Result<(Vec<ShareConfig>, Vec<DiskConfig>), Failure> {
        let share = |path: &Path, tag: &str, ro, owners| {
            let tag = Tag::try_from(tag.to_owned());
            let tag = tag.map_err(|text| Failure::new(failure::INTERNAL, text))?;
            Ok::<_, Failure>(ShareConfig { path: path.to_owned(), tag, ro, owners })
        };
        let mut shares = Vec::new();
        let mut disks = Vec::new();
        let disk = |path: &Path, format| DiskConfig {
            path: path.to_owned(),
            ro: true,
            overlay: false,
            backing: None,
            id: None,
            format: Some(format),
        };
        match &self.root {
            RootFrom::Folder(folder) => shares.push(share(folder, ROOT_TAG, true, reads_all())?),
            RootFrom::Image(path, format) => disks.push(disk(path, *format)),
            RootFrom::Archive(image) => disks.push(disk(&image.disk, Format::Raw)),
        }
        for Shared { folder, tag, read_only, owners, .. } in &self.shared {
            shares.push(share(folder, tag, *read_only, *owners)?);
        }
        Ok((shares, disks))
    }
}

impl RootFrom {
    /// Finds out what a root is, by its contents.
    fn find(root: &Path) -> Result<Self, Failure> {
        let found = fs::canonicalize(root).file_error("find the root", root)?;
        let kind = fs::metadata(&found).file_error("find the root", root)?.file_type();
        if (kind.is_dir() || kind.is_file())
            && let Some(archive) = ImageArchive::open(&found)?
        {
            return Ok(Self::Archive(Box::new(archive.unpack()?)));
        }
        if kind.is_dir() {
            return Ok(Self::Folder(found));
        }
        if !kind.is_file() && !kind.is_block_device() {
            return Err(unknown(root));
        }
        let mut head = Vec::new();
        let file = File::open(&found).file_error("open", root)?;
        file.take(2048).read_to_end(&mut head).file_error("read", root)?;
        match head {
            head if head.starts_with(QCOW2) => Ok(Self::Image(found, Format::Qcow2)),
            head if is_ext4(&head) || is_partitioned(&head) => Ok(Self::Image(found, Format::Raw)),
            head if is_compressed(&head) => {
                Err(unknown(root).help("decompress it first: only layers may be compressed"))
            }
            _ => Err(unknown(root)),
        }
    }

    /// Returns what an image states about its command.
    fn settings(&self) -> Option<&Settings> {
        match self {
            Self::Archive(image) => Some(&image.settings),
            _ => None,
        }
    }
}

/// Returns the command: that of the options, or of the image.
fn command(options: &Options, root: &RootFrom) -> Result<Vec<OsString>, Failure> {
    if !options.command.is_empty() {
        return Ok(options.command.clone());
    }
    let what = match root.settings() {
        Some(settings) if !settings.command.is_empty() => {
            return Ok(settings.command.iter().map(OsString::from).collect());
        }
        Some(_) => "the image states no command",
        None => "only an OCI or Docker archive has a command of its own",
    };
    Err(Failure::new(failure::USAGE, format!("the command is missing: {what}"))
        .help("use `parador exec ROOT -- COMMAND...`"))
}

/// Returns whether a disk has an ext4 superblock (Linux' `Documentation/filesystems/ext4`).
fn is_ext4(head: &[u8]) -> bool {
    head.get(1080..1082) == Some(&[0x53, 0xef])
}

/// Returns whether a disk has a partition table: an MBR, or the protective one of a GPT.
fn is_partitioned(head: &[u8]) -> bool {
    head.get(510..512) == Some(&[0x55, 0xaa])
}

fn unknown(root: &Path) -> Failure {
    let text = format!(
        "{} is no folder, OCI or Docker archive, ext4 file system, partitioned disk or qcow2 image",
        root.display()
    );
    Failure::new(failure::BAD_CONFIG, text)
        .help("use a folder, an archive of a container image, or an image of a disk")
}

/// Returns whether a folder is in a file system of which each kernel has its own: the host's in its
/// place would describe other processes and devices to the guest.
fn is_of_kernel(folder: &Path) -> bool {
    let is_in = |place: &str| folder.starts_with(place);
    ["/proc", "/sys", "/dev"].into_iter().any(is_in) && !is_in("/dev/shm")
}

/// Returns the shared directories: the current folder, and those of the options.
fn shared(options: &Options, current: &Path) -> Result<Vec<Shared>, Failure> {
    let is_shareable = current != Path::new("/") && !is_of_kernel(current);
    let own = is_shareable.then(|| (current.to_owned(), false, false));
    let more = options.rw.iter().map(|changed| (&changed.folder, false, changed.owners));
    let more = more.chain(options.ro.iter().map(|folder| (folder, true, false)));
    let more = more.map(|(folder, read_only, owners)| {
        let found = fs::canonicalize(folder).file_error("find the folder", folder)?;
        if is_of_kernel(&found) {
            let text = format!("{} is the guest kernel's own", found.display());
            return Err(Failure::new(failure::USAGE, text)
                .help("/proc, /sys and /dev of this host cannot be shared, but for /dev/shm"));
        }
        match (found == Path::new("/"), read_only) {
            (true, false) => Err(Failure::new(
                failure::USAGE,
                "--rw / would let the command change all of this host",
            )
            .help("name the folders that it may change")),
            (true, true) => Err(Failure::new(failure::USAGE, "--ro / would hide the guest's root")
                .help("use / as ROOT")),
            _ => Ok((found, read_only, owners)),
        }
    });
    let mut shared: Vec<Shared> = Vec::new();
    for folder in own.map(Ok).into_iter().chain(more) {
        let (folder, read_only, owners) = folder?;
        if folder.to_str().is_none() {
            let text = format!("the path {} is not UTF-8", folder.display());
            return Err(Failure::new(failure::BAD_CONFIG, text));
        }
        // An explicit option counts more than the current folder.
        shared.retain(|shared| shared.folder != folder);
        let place = folder.clone();
        shared.push(Shared { folder, place, tag: String::new(), read_only, owners });
    }
    for (index, shared) in shared.iter_mut().enumerate() {
        shared.tag = format!("folder{index}");
    }
    Ok(shared)
}

/// Returns whether root without its capabilities may not write to a file of this owner and mode.
fn is_closed_to_root(owner: u32, mode: u32) -> bool {
    owner != 0 && mode & 0o002 == 0
}

/// Returns whether the caller may read files of all owners: root, except in containers that lack
/// the capability.
fn reads_all() -> bool {
    let needed = CapabilitySet::DAC_READ_SEARCH;
    geteuid().is_root() && capabilities(None).is_ok_and(|sets| sets.permitted.contains(needed))
}

/// Returns the modules of the guest's kernel, unless the root has them.
fn modules(options: &Options, is_host: bool) -> Result<Option<Shared>, Failure> {
    let found = KernelFile::find(options.kernel.as_deref())?.modules();
    let found = found.and_then(|folder| fs::canonicalize(folder).ok());
    Ok(found.and_then(|folder| {
        let place = Path::new(MODULES).join(folder.file_name()?);
        let is_there = is_host && has_modules(&place);
        let tag = MODULES_TAG.to_owned();
        let shared = Shared { folder, place, tag, read_only: true, owners: false };
        (!is_there).then_some(shared)
    }))
}

/// Returns whether a folder has the list by which modprobe(8) finds modules. A folder without it,
/// as a removed kernel package or an unpacked container leaves it, has none.
fn has_modules(folder: &Path) -> bool {
    folder.join("modules.dep").is_file()
}

fn joined(name: &OsStr, value: &OsStr) -> OsString {
    let mut variable = name.to_owned();
    variable.push("=");
    variable.push(value);
    variable
}

/// Returns the variables that a command has of this host, with its search path if its programs are
/// this host's.
fn of_host(is_host: bool) -> Vec<OsString> {
    let path = env::var_os("PATH").filter(|_| is_host).unwrap_or_else(|| PATH.into());
    let own = env::vars_os().filter(|(name, _)| {
        let name = name.to_str().unwrap_or_default();
        PASSED.contains(&name) || name.starts_with(PASSED_PREFIX)
    });
    let own = own.map(|(name, value)| joined(&name, &value));
    [joined(OsStr::new("PATH"), &path)].into_iter().chain(own).collect()
}

/// Returns the variables of an image's command: a search path, the caller's terminal, and those
/// that the image states.
fn of_image_environment(stated: &[String]) -> Vec<OsString> {
    let mut all = vec![joined(OsStr::new("PATH"), OsStr::new(PATH))];
    all.extend(env::var_os("TERM").map(|term| joined(OsStr::new("TERM"), &term)));
    for variable in stated {
        replace(&mut all, OsStr::new(variable.split('=').next().unwrap_or(variable)));
        all.push(variable.into());
    }
    all
}

/// Removes a variable that is set again.
fn replace(all: &mut Vec<OsString>, name: &OsStr) {
    let prefix = joined(name, OsStr::new(""));
    all.retain(|one| !one.as_bytes().starts_with(prefix.as_bytes()));
}

/// Adds the variables of the options to an environment: `NAME=VALUE`.
fn environment(mut all: Vec<OsString>, set: &[OsString]) -> Result<Vec<OsString>, Failure> {
    for variable in set {
        let bytes = variable.as_bytes();
        let name = OsStr::from_bytes(bytes.split(|&byte| byte == b'=').next().unwrap_or(bytes));
        if name.is_empty() {
            return Err(Failure::new(failure::USAGE, "-e needs NAME or NAME=VALUE"));
        }
        replace(&mut all, name);
        match bytes.contains(&b'=') {
            true => all.push(variable.clone()),
            // One that this host does not have is not set.
            false => all.extend(env::var_os(name).map(|value| joined(name, &value))),
        }
    }
    Ok(all)
}

/// Joins strings, each followed by a zero. The kernel's own strings have no zeros in them.
fn strings(all: &[OsString]) -> Vec<u8> {
    let bytes = all.iter().map(|string| string.clone().into_vec());
    bytes.flat_map(|string| string.into_iter().chain([0])).collect()
}

/// Returns the caller's groups.
fn groups() -> Result<heapless::Vec<u32, MAX_GROUPS>, Failure> {
    let groups = getgroups().map_err(io::Error::from).os_error("find the user's groups")?;
    let own = groups.iter().map(|group| group.as_raw());
    // More are unusual, and lend rights only.
    Ok(own.take(MAX_GROUPS).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_folder_has_no_modules() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!has_modules(folder.path()));
        fs::write(folder.path().join("modules.dep"), "").unwrap();
        assert!(has_modules(folder.path()));
    }

    #[test]
    fn variables_are_set_passed_and_replaced() {
        let set = ["A=1=2", "PATH=/own", "NO_SUCH_VARIABLE", "CARGO_MANIFEST_DIR"];
        let found = environment(of_host(false), &set.map(OsString::from)).unwrap();
        let has = |text: &str| found.iter().filter(|one| *one == text).count();
        assert_eq!((has("A=1=2"), has("PATH=/own")), (1, 1));
        assert_eq!(has(concat!("CARGO_MANIFEST_DIR=", env!("CARGO_MANIFEST_DIR"))), 1);
        let names = found.iter().map(|one| one.to_str().unwrap().split('=').next().unwrap());
        let names: Vec<_> =
            names.filter(|name| ["PATH", "NO_SUCH_VARIABLE"].contains(name)).collect();
        assert_eq!(names, ["PATH"]);
        for wrong in ["", "=x"] {
            let code = environment(Vec::new(), &[OsString::from(wrong)]).unwrap_err().code();
            assert_eq!(code, failure::USAGE);
        }
        let path = joined_path(&of_host(true));
        assert_eq!(path, env::var_os("PATH").unwrap());
        assert_eq!(joined_path(&of_host(false)), PATH);
    }

    #[test]
    fn an_image_has_its_own_environment() {
        let stated = ["PATH=/image".to_owned(), "A=1".into(), "A=2".into()];
        let found = of_image_environment(&stated);
        assert_eq!(joined_path(&found), "/image");
        let names = found.iter().map(|one| one.to_str().unwrap());
        let names: Vec<&str> = names.filter(|one| !one.starts_with("TERM=")).collect();
        assert_eq!(names, ["PATH=/image", "A=2"]);
        assert_eq!(joined_path(&of_image_environment(&[])), PATH);
    }

    #[test]
    fn folders_of_kernels_are_not_shared() {
        for folder in ["/proc", "/proc/1/fd", "/sys/fs/cgroup", "/dev", "/dev/pts"] {
            assert!(is_of_kernel(Path::new(folder)), "{folder}");
        }
        for folder in ["/", "/process", "/dev/shm", "/dev/shm/a", "/srv/dev", "/system"] {
            assert!(!is_of_kernel(Path::new(folder)), "{folder}");
        }
    }

    #[test]
    fn folders_of_other_users_are_closed_to_root() {
        assert!(is_closed_to_root(1000, 0o40755) && is_closed_to_root(1000, 0o40770));
        assert!(!is_closed_to_root(0, 0o40700) && !is_closed_to_root(1000, 0o41777));
    }

    fn joined_path(variables: &[OsString]) -> OsString {
        let path = variables.iter().find_map(|one| one.to_str()?.strip_prefix("PATH="));
        path.unwrap().into()
    }

    #[test]
    fn strings_end_with_zeros() {
        assert_eq!(strings(&["a".into(), "".into(), "bc".into()]), b"a\0\0bc\0");
    }

    #[test]
    fn roots_are_recognised_by_contents() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let kind = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            match RootFrom::find(&path) {
                Ok(RootFrom::Folder(_)) => "folder",
                Ok(RootFrom::Image(_, Format::Raw)) => "raw",
                Ok(RootFrom::Image(_, Format::Qcow2)) => "qcow2",
                Ok(RootFrom::Archive(_)) => "archive",
                Err(failure) => {
                    assert_eq!(failure.code(), failure::BAD_CONFIG);
                    "none"
                }
            }
        };
        let with = |place: usize, bytes: &[u8]| {
            let mut all = vec![0; 2048];
            all[place..place + bytes.len()].copy_from_slice(bytes);
            all
        };
        assert_eq!(kind(b""), "none");
        assert_eq!(kind(&with(0, b"\x7fELF")), "none");
        assert_eq!(kind(&with(1080, &[0x53, 0xef])), "raw");
        assert_eq!(kind(&with(510, &[0x55, 0xaa])), "raw");
        assert_eq!(kind(QCOW2), "qcow2");
        assert!(matches!(RootFrom::find(folder.path()), Ok(RootFrom::Folder(_))));
        let code = RootFrom::find(Path::new("/nowhere")).unwrap_err().code();
        assert_eq!(code, failure::MISSING_FILE);
    }
}
