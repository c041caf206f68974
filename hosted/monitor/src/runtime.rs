//! Runtime folder of the user: control sockets of named VMs, and folders of running commands.
//!
//! | file | content |
//! |---|---|
//! | `NAME.sock` | control socket of the VM with this name |
//! | `NAME.lock` | lock of its process, which ends with it in any case |
//! | `exec-*` | files of a `parador exec` |

use crate::config::name::VmName;
use crate::console::remove_stale;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::lock::Lock;
use rustix::fs::{Access, Mode, OFlags, access, fchmod, open};
use rustix::process::{Uid, geteuid};
use std::env;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// Name of the folder in `$XDG_RUNTIME_DIR`.
const NAME: &str = "parador";
/// Suffixes of a VM's files.
const SOCKET: &str = ".sock";
const LOCK: &str = ".lock";

/// Attempts to take a name, and their interval.
const ATTEMPTS: u32 = 5;
const INTERVAL: Duration = Duration::from_millis(20);

/// Runtime folder of the user.
#[derive(Debug)]
pub struct RuntimeFolder(PathBuf);

/// Right to a name, and the path of the VM's control socket. Dropping it gives the name back.
#[derive(Debug)]
pub struct NamedVm {
    /// Control socket.
    pub socket: PathBuf,
    _lock: Lock,
}

impl RuntimeFolder {
    /// Opens the folder and creates it if necessary: `$XDG_RUNTIME_DIR/parador`, else of root
    /// `/run/parador`, of other users `parador-UID` in the folder for temporary files.
    ///
    /// # Errors
    /// It belongs to another user, or others may enter it: 77. It cannot be created.
    pub fn open() -> Result<Self, Failure> {
        Self::open_at(place())
    }

    fn open_at(folder: PathBuf) -> Result<Self, Failure> {
        match create(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(Failure::file("create the runtime folder", &folder, &error)
                    .help("set XDG_RUNTIME_DIR to a folder of yours"))
            }
            _ => Self::check(folder),
        }
    }

    /// Opens the folder, which no VM may have created yet.
    ///
    /// # Errors
    /// As those of [`RuntimeFolder::open`], if it exists.
    pub fn existing() -> Result<Self, Failure> {
        let folder = place();
        match fs::symlink_metadata(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self(folder)),
            _ => Self::check(folder),
        }
    }

    /// Checks that other users cannot use the folder, which may be in one that all users write to.
    fn check(folder: PathBuf) -> Result<Self, Failure> {
        let found = fs::symlink_metadata(&folder).file_error("read", &folder)?;
        let shown = folder.display();
        let refuse = |text: String| {
            Err(Failure::new(failure::PERMISSION, text)
                .help("remove it, or set XDG_RUNTIME_DIR to a folder of yours"))
        };
        if !found.is_dir() {
            return refuse(format!("the runtime folder {shown} is not a folder"));
        }
        if found.uid() != geteuid().as_raw() {
            let owner = found.uid();
            return refuse(format!("{shown} belongs to another user (ID {owner})"));
        }
        if found.mode() & 0o077 != 0 {
            let mode = found.mode() & 0o7777;
            return refuse(format!("other users may use {shown} (mode {mode:o})"));
        }
        Ok(Self(folder))
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    fn file(&self, name: &VmName, suffix: &str) -> PathBuf {
        self.0.join(format!("{}{suffix}", name.as_str()))
    }

    /// Takes a name; that of a VM that was killed is free.
    ///
    /// # Errors
    /// A VM has it: 64. The lock file cannot be created.
    pub fn claim(&self, name: &VmName) -> Result<NamedVm, Failure> {
        let path = self.file(name, LOCK);
        // A process that lists the VMs has the lock of a killed one for a moment.
        let take = || {
            for _ in 0..ATTEMPTS {
                if let Some(lock) = Lock::take(&path)? {
                    return Ok(Some(lock));
                }
                thread::sleep(INTERVAL);
            }
            Ok::<_, io::Error>(None)
        };
        let Some(lock) = take().file_error("lock", &path)? else {
            let (name, holder) = (name.as_str(), Lock::status(&path));
            let text = format!("a VM with the name {name} is running ({holder})");
            return Err(Failure::new(failure::USAGE, text)
                .help("use another name; `parador ps` lists all VMs"));
        };
        lock.note("running");
        Ok(NamedVm { socket: self.file(name, SOCKET), _lock: lock })
    }

    /// Returns the control socket of the VM with this name.
    ///
    /// # Errors
    /// There is none: 66.
    pub fn socket_of(&self, name: &VmName) -> Result<PathBuf, Failure> {
        let socket = self.file(name, SOCKET);
        match fs::symlink_metadata(&socket) {
            Ok(_) => Ok(socket),
            Err(_) => {
                let text = format!("no VM has the name {}", name.as_str());
                Err(Failure::new(failure::MISSING_FILE, text).help("`parador ps` lists all VMs"))
            }
        }
    }

    /// Returns the names and control sockets of all VMs, and removes the files of those that were
    /// killed.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn vms(&self) -> Result<Vec<(VmName, PathBuf)>, Failure> {
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.file_error("read", &self.0)?,
        };
        let names = entries.flatten().filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            VmName::parse(name.strip_suffix(SOCKET)?).ok()
        });
        let mut vms: Vec<_> = names.map(|name| (self.file(&name, SOCKET), name)).collect();
        vms.sort();
        vms.retain(|(socket, name)| !self.is_dead(name, socket));
        Ok(vms.into_iter().map(|(socket, name)| (name, socket)).collect())
    }

    /// Returns whether a VM has ended, and removes its files.
    fn is_dead(&self, name: &VmName, socket: &Path) -> bool {
        // It runs, or has just ended.
        let Ok(Some(_lock)) = Lock::take(&self.file(name, LOCK)) else { return false };
        // The name is this process' meanwhile; a file that is no socket stays.
        let _ = remove_stale(socket, "the control socket");
        true
    }
}

/// Creates the folder for this user alone, whatever the umask.
fn create(folder: &Path) -> io::Result<()> {
    const MODE: u32 = 0o700;
    DirBuilder::new().mode(MODE).create(folder)?;
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let created = open(folder, flags, Mode::empty())?;
    Ok(fchmod(created, Mode::from_raw_mode(MODE))?)
}

fn place() -> PathBuf {
    // Root of a user namespace, or of a container, may lack it.
    let has_run = access("/run", Access::WRITE_OK).is_ok();
    place_of(env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from), geteuid(), has_run)
}

fn place_of(runtime: Option<PathBuf>, user: Uid, has_run: bool) -> PathBuf {
    match runtime.filter(|folder| folder.is_absolute() && folder.is_dir()) {
        Some(folder) => folder.join(NAME),
        // Programs that clean `/tmp` up do not know that they are in use.
        None if user.is_root() && has_run => Path::new("/run").join(NAME),
        None => env::temp_dir().join(format!("{NAME}-{}", user.as_raw())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    fn name(text: &str) -> VmName {
        VmName::parse(text).unwrap()
    }

    #[test]
    fn a_name_is_given_once_and_taken_over_from_the_dead() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = RuntimeFolder::open_at(folder.path().join(NAME)).unwrap();
        let a = runtime.claim(&name("a")).unwrap();
        let _listener = UnixListener::bind(&a.socket).unwrap();
        let failure = runtime.claim(&name("a")).unwrap_err();
        assert_eq!(failure.code(), failure::USAGE);
        assert!(failure.to_string().contains(&std::process::id().to_string()), "{failure}");
        let b = runtime.claim(&name("b")).unwrap();
        // The socket of a killed VM stays; its lock does not.
        drop(UnixListener::bind(&b.socket).unwrap());
        drop(b);
        assert_eq!(runtime.socket_of(&name("a")).unwrap(), a.socket);
        let names: Vec<_> = runtime.vms().unwrap().into_iter().map(|vm| vm.0).collect();
        assert_eq!(names, [name("a")]);
        let failure = runtime.socket_of(&name("b")).unwrap_err();
        assert_eq!(failure.code(), failure::MISSING_FILE);
        runtime.claim(&name("b")).unwrap();
    }

    #[test]
    fn the_folder_is_where_nothing_cleans_up() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = || Some(folder.path().to_owned());
        assert_eq!(place_of(runtime(), Uid::ROOT, true), folder.path().join(NAME));
        for none in [None, Some("relative".into()), Some(folder.path().join("missing"))] {
            assert_eq!(place_of(none.clone(), Uid::ROOT, true), Path::new("/run/parador"));
            assert!(place_of(none.clone(), Uid::ROOT, false).ends_with("parador-0"));
            assert!(place_of(none, Uid::from_raw(7), true).ends_with("parador-7"));
        }
    }

    #[test]
    fn the_folder_is_the_users_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NAME);
        // Beside tests that bind sockets, with another umask.
        RuntimeFolder::open_at(path.clone()).unwrap();
        RuntimeFolder::open_at(path.clone()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o700);
        let refused = |path: &Path| {
            let failure = RuntimeFolder::open_at(path.to_owned()).unwrap_err();
            assert_eq!(failure.code(), failure::PERMISSION);
            failure.to_string()
        };
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(refused(&path).contains("mode 755"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        let link = folder.path().join("link");
        symlink(&path, &link).unwrap();
        assert!(refused(&link).contains("is not a folder"));
        if geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(1), None).unwrap();
            assert!(refused(&path).contains("another user (ID 1)"));
        }
    }
}
