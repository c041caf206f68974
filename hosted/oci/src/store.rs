//! Containers on the disk: a folder for each below the engine's root, with its state and a lock.
//!
//! The state is written before what it names is made, so that `delete` finds all that a
//! killed `create` has left. Sockets, and the files of the VM, are in a folder of the runtime
//! folder of the user, whose name is short: the engine's paths exceed the limit of Unix sockets.

use crate::systemd::Scope;
use crate::{cgroup, refuse};
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::input;
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::env;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

const STATE: &str = "state.json";
const LOCK: &str = "lock";
/// File that exists once the container was started.
const STARTED: &str = "started";
/// First letter of the folder of a container that is being removed, which no container's name has.
const REMOVED: char = '~';
/// Longest name of a container: it is that of a folder (`NAME_MAX`), after [`REMOVED`], too.
const LONGEST: usize = 254;

/// The containers of an engine.
#[derive(Debug)]
pub struct Store(PathBuf);

/// A process that may have ended: its number may be another one's meanwhile, so it has its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Number.
    pub pid: i32,
    /// Time of its start in clock ticks since the host's (proc(5)).
    started: u64,
}

/// ContainerRecord of a container on the disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContainerRecord {
    pub id: String,
    pub bundle: PathBuf,
    pub rootfs: PathBuf,
    /// Time in UTC.
    pub created: String,
    pub annotations: HashMap<String, String>,
    /// Folder of the container's sockets.
    pub folder: PathBuf,
    /// Folder of the VM: that of the container, or of its sandbox.
    pub vm_folder: PathBuf,
    /// Container whose PID namespace it has; `None`: its own, or that of its sandbox.
    #[serde(default)]
    pub pid_owner: Option<String>,
    /// Memory of the VM in bytes.
    pub vm_memory: u64,
    /// Limit of memory in bytes; `None`: none. That of a sandbox is the sum of its containers'.
    #[serde(default)]
    pub memory_limit: Option<u64>,
    /// CPU time in microseconds in each period, `u64::MAX`: no limit, and the period, both of its
    /// own VM on the host; `None`: not stated.
    #[serde(default)]
    pub cpu_quota: Option<u64>,
    #[serde(default)]
    pub cpu_period: Option<u64>,
    /// Scratch disk of the VM.
    pub vm_scratch: Option<PathBuf>,
    pub cgroups: Vec<PathBuf>,
    /// Scope of systemd, which the carrier enters; its cgroups are known then.
    pub scope: Option<Scope>,
    /// Carrier, once it was started.
    pub carrier: Option<ProcessId>,
}

impl ContainerRecord {
    /// Returns whether it runs in a VM of its own, and not in that of a sandbox.
    pub fn has_own_vm(&self) -> bool {
        self.vm_folder == self.folder
    }
}

/// Status as engines know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Creating,
    Created,
    Running,
    Paused,
    Stopped,
}

impl Status {
    /// Returns the engines' word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Created => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
        }
    }
}

impl ProcessId {
    /// Returns a process that exists; `None`: it does not.
    pub fn of(pid: u32) -> Option<Self> {
        let pid = i32::try_from(pid).ok()?;
        Some(Self { pid, started: start_time(pid)? })
    }

    /// Returns whether it has not ended.
    pub fn is_alive(self) -> bool {
        start_time(self.pid) == Some(self.started)
    }

    /// Returns it for signals; `None`: it has ended.
    pub fn pid(self) -> Option<Pid> {
        let pid = Pid::from_raw(self.pid).filter(|_| self.is_alive())?;
        test_kill_process(pid).is_ok().then_some(pid)
    }
}

/// Returns the time of a process' start; `None`: it has ended, and may be a zombie.
fn start_time(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before may contain anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

impl Store {
    /// Returns the store at the engine's root, or at the default one.
    pub fn new(root: Option<&Path>) -> Self {
        let default = || {
            let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
            let runtime = runtime.filter(|folder| folder.is_absolute());
            runtime.unwrap_or_else(|| "/run".into()).join("parador-oci")
        };
        Self(root.map_or_else(default, Path::to_owned))
    }

    /// Returns the root.
    pub fn root(&self) -> &Path {
        &self.0
    }

    /// Returns the folder of a container.
    ///
    /// # Errors
    /// The name is not one of a container.
    pub fn folder(&self, id: &str) -> Result<PathBuf, Failure> {
        let is_fine = |byte: u8| byte.is_ascii_alphanumeric() || b"_+-.".contains(&byte);
        let fits = (1..=LONGEST).contains(&id.len()) && id.bytes().all(is_fine);
        match fits && !matches!(id, "." | "..") {
            true => Ok(self.0.join(id)),
            false => Err(refuse(format!("invalid container ID format: {id:?}"))),
        }
    }

    /// Makes the folder of a container, and locks it.
    ///
    /// # Errors
    /// The container exists.
    pub fn reserve(&self, id: &str) -> Result<File, Failure> {
        let folder = self.folder(id)?;
        let mut builder = DirBuilder::new();
        builder.mode(0o711).recursive(true).create(&self.0).file_error("create", &self.0)?;
        match DirBuilder::new().mode(0o700).create(&folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(refuse("container with given ID already exists"));
            }
            made => made.file_error("create", &folder)?,
        }
        self.lock(id)
    }

    /// Locks a container: one command at a time changes it.
    ///
    /// # Errors
    /// It does not exist.
    pub fn lock(&self, id: &str) -> Result<File, Failure> {
        let (lock, path) = self.open_lock(id)?;
        lock.lock().file_error("lock", &path)?;
        // Another command may have deleted the container meanwhile, and one may have been created.
        let is_same = |found: fs::Metadata| {
            lock.metadata().is_ok_and(|own| (own.dev(), own.ino()) == (found.dev(), found.ino()))
        };
        match fs::metadata(&path).is_ok_and(is_same) {
            true => Ok(lock),
            false => Err(does_not_exist(id)),
        }
    }

    /// Locks a sandbox while a container is added to it: others may be added meanwhile, and it is
    /// not deleted.
    ///
    /// # Errors
    /// It does not exist.
    pub fn lock_shared(&self, id: &str) -> Result<File, Failure> {
        let (lock, path) = self.open_lock(id)?;
        lock.lock_shared().file_error("lock", &path)?;
        Ok(lock)
    }

    fn open_lock(&self, id: &str) -> Result<(File, PathBuf), Failure> {
        let path = self.folder(id)?.join(LOCK);
        let opened = File::options().create(true).append(true).open(&path);
        Ok((opened.map_err(|error| missing(id, &path, &error))?, path))
    }

    /// Reads the state of a container.
    ///
    /// # Errors
    /// It does not exist, or its state is malformed.
    pub fn load(&self, id: &str) -> Result<ContainerRecord, Failure> {
        let path = self.folder(id)?.join(STATE);
        let text = input::regular(&path).map_err(|failure| match failure.code() {
            failure::MISSING_FILE => does_not_exist(id),
            _ => failure,
        })?;
        serde_json::from_slice(&text)
            .map_err(|error| refuse(format!("{} is malformed: {error}", path.display())))
    }

    /// Writes the state of a container; another process reads the old one or the new one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, state: &ContainerRecord) -> Result<(), Failure> {
        let folder = self.folder(&state.id)?;
        let (new, path) = (folder.join("state.new"), folder.join(STATE));
        let text = serde_json::to_vec(state).map_err(|error| refuse(error.to_string()))?;
        fs::write(&new, text).file_error("write", &new)?;
        fs::rename(&new, &path).file_error("write", &path)
    }

    /// Notes that a container was started.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn note_start(&self, id: &str) -> Result<(), Failure> {
        let path = self.folder(id)?.join(STARTED);
        fs::write(&path, "").file_error("write", &path)
    }

    /// Returns the status of a container.
    pub fn status(&self, state: &ContainerRecord) -> Status {
        let is_started = self.0.join(&state.id).join(STARTED).exists();
        match state.carrier {
            None => Status::Creating,
            Some(carrier) if !carrier.is_alive() => Status::Stopped,
            Some(_) if !is_started => Status::Created,
            Some(_) if cgroup::is_frozen(&state.cgroups) => Status::Paused,
            Some(_) => Status::Running,
        }
    }

    /// Returns the containers that run, or are to run, in this VM.
    pub fn in_vm(&self, vm_folder: &Path) -> Vec<ContainerRecord> {
        let all = self.ids().into_iter().filter_map(|id| self.load(&id).ok());
        let is_there = |state: &ContainerRecord| {
            state.vm_folder == vm_folder && self.status(state) != Status::Stopped
        };
        all.filter(is_there).collect()
    }

    /// Removes the folder of a container.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn remove(&self, id: &str) -> Result<(), Failure> {
        let folder = self.folder(id)?;
        // No command that waits for the lock finds the folder, and makes files in it again.
        let removed = self.0.join(format!("{REMOVED}{id}"));
        // A killed command may have left it.
        let _ = fs::remove_dir_all(&removed);
        fs::rename(&folder, &removed).file_error("remove", &folder)?;
        fs::remove_dir_all(&removed).file_error("remove", &removed)
    }

    /// Returns the names of all containers.
    pub fn ids(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let mut ids: Vec<String> = names.filter(|name| self.folder(name).is_ok()).collect();
        ids.sort();
        ids
    }
}

fn does_not_exist(id: &str) -> Failure {
    refuse(format!("container \"{id}\" does not exist"))
}

fn missing(id: &str, path: &Path, error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::NotFound => does_not_exist(id),
        _ => Failure::file("read", path, error),
    }
}

#[cfg(test)]
pub mod testing {
    //! Containers for tests.

    use super::*;

    /// Returns a container with a VM of its own.
    pub fn state(id: &str, carrier: Option<ProcessId>) -> ContainerRecord {
        ContainerRecord {
            id: id.to_owned(),
            bundle: "/bundle".into(),
            rootfs: "/bundle/rootfs".into(),
            created: "2026-11-26T04:00:00Z".to_owned(),
            annotations: HashMap::new(),
            folder: "/folder".into(),
            vm_folder: "/folder".into(),
            pid_owner: None,
            vm_memory: 64 << 20,
            memory_limit: None,
            cpu_quota: None,
            cpu_period: None,
            vm_scratch: None,
            cgroups: Vec::new(),
            scope: None,
            carrier,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::state;
    use super::*;

    #[test]
    fn containers_have_states() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(Some(&folder.path().join("root")));
        let text = |failure: Failure| crate::report::text(&failure);
        assert_eq!(text(store.load("a").unwrap_err()), "container \"a\" does not exist");
        assert_eq!(text(store.lock("a").unwrap_err()), "container \"a\" does not exist");
        drop(store.reserve("a").unwrap());
        let again = text(store.reserve("a").unwrap_err());
        assert_eq!(again, "container with given ID already exists");
        // A killed `create` may have left the folder alone.
        assert_eq!(text(store.load("a").unwrap_err()), "container \"a\" does not exist");
        let own = ProcessId::of(std::process::id()).unwrap();
        let wrong = ProcessId { started: own.started + 1, ..own };
        for (carrier, status) in
            [(None, Status::Creating), (Some(own), Status::Created), (Some(wrong), Status::Stopped)]
        {
            store.save(&state("a", carrier)).unwrap();
            assert_eq!(store.status(&store.load("a").unwrap()), status);
        }
        store.save(&state("a", Some(own))).unwrap();
        assert_eq!(store.in_vm(Path::new("/folder")).len(), 1);
        assert!(store.in_vm(Path::new("/other")).is_empty());
        store.note_start("a").unwrap();
        assert_eq!(store.status(&store.load("a").unwrap()), Status::Running);
        assert_eq!(store.ids(), ["a"]);
        // One that waits for the lock of a container that is deleted does not get another's.
        let lock = store.lock("a").unwrap();
        let waiting = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| store.lock("a").map(drop));
            std::thread::sleep(std::time::Duration::from_millis(100));
            store.remove("a").unwrap();
            let new = store.reserve("a").unwrap();
            drop((lock, new));
            waiting.join().unwrap()
        });
        assert_eq!(text(waiting.unwrap_err()), "container \"a\" does not exist");
        // A killed command has left its folder.
        fs::create_dir_all(store.root().join("~a/b")).unwrap();
        assert_eq!(store.ids(), ["a"]);
        store.remove("a").unwrap();
        assert!(fs::read_dir(store.root()).unwrap().next().is_none());
    }

    #[test]
    fn states_of_older_versions_are_read() {
        let mut old = serde_json::to_value(state("a", None)).unwrap();
        for name in ["memory_limit", "cpu_quota", "cpu_period"] {
            assert!(old.as_object_mut().unwrap().remove(name).is_some(), "{name}");
        }
        let read: ContainerRecord = serde_json::from_value(old).unwrap();
        assert_eq!((read.memory_limit, read.cpu_quota, read.cpu_period), (None, None, None));
    }

    #[test]
    fn names_are_those_of_folders() {
        let store = Store::new(Some(Path::new("/root")));
        for wrong in ["", ".", "..", "a/b", "a b", &"x".repeat(LONGEST + 1)] {
            assert!(store.folder(wrong).is_err(), "{wrong}");
        }
        let folder = tempfile::tempdir().unwrap();
        let removing = Store::new(Some(folder.path()));
        let longest = "x".repeat(LONGEST);
        drop(removing.reserve(&longest).unwrap());
        removing.remove(&longest).unwrap();
        assert_eq!(store.folder("a-B_0.+").unwrap(), Path::new("/root/a-B_0.+"));
    }
}
