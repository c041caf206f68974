//! Cgroups of the host: those of the carrier and its VM, at the engine's path, in every hierarchy
//! (version 1) or the only one (version 2).

use hosted_command::failure::{Failure, IoContext};
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::thread;
use std::time::Duration;

/// Place of all hierarchies.
const ROOT: &str = "/sys/fs/cgroup";
/// File that adds a process to a cgroup.
const PROCESSES: &str = "cgroup.procs";
/// Settings that a cgroup of version 1 needs before it takes processes.
const CPUSET: [&str; 2] = ["cpuset.cpus", "cpuset.mems"];
/// Time for the processes of a cgroup to end.
const ATTEMPTS: u32 = 200;
const INTERVAL: Duration = Duration::from_millis(25);

/// Returns the cgroups of a container at the engine's path: one in each hierarchy.
pub fn places(path: &Path) -> Vec<PathBuf> {
    let below: PathBuf =
        path.components().filter(|it| matches!(it, Component::Normal(_))).collect();
    if below.as_os_str().is_empty() {
        return Vec::new();
    }
    hierarchies(Path::new(ROOT)).into_iter().map(|hierarchy| hierarchy.join(&below)).collect()
}

/// Returns the roots of the hierarchies below a folder, which may be one itself.
fn hierarchies(root: &Path) -> Vec<PathBuf> {
    if root.join(PROCESSES).exists() {
        return vec![root.to_owned()];
    }
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    // Links are other names of the same hierarchies.
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut found: Vec<PathBuf> = folders.map(|entry| entry.path()).collect();
    found.retain(|folder| folder.join(PROCESSES).exists());
    found.sort();
    found
}

/// Makes the cgroups. Returns those that this process may make: none for users without rights.
///
/// # Errors
/// One cannot be made for another reason.
pub fn make(places: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let mut made = Vec::new();
    for place in places {
        match fs::create_dir_all(place) {
            Err(error) if is_refused(&error) => continue,
            done => done.file_error("create the cgroup", place)?,
        }
        inherit_cpus(place).file_error("set up the cgroup", place)?;
        made.push(place.clone());
    }
    Ok(made)
}

fn is_refused(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

/// Copies the CPUs and nodes of the cgroups above, which version 1 does not do.
fn inherit_cpus(place: &Path) -> io::Result<()> {
    let root = Path::new(ROOT);
    let above: Vec<&Path> = place.ancestors().take_while(|it| *it != root).collect();
    for pair in above.windows(2).rev() {
        let &[own, parent] = pair else { continue };
        for name in CPUSET {
            let Ok(value) = fs::read_to_string(own.join(name)) else { continue };
            if value.trim().is_empty() {
                fs::write(own.join(name), fs::read_to_string(parent.join(name))?)?;
            }
        }
    }
    Ok(())
}

/// Moves this process to cgroups.
///
/// # Errors
/// One does not take it.
pub fn join(places: &[PathBuf]) -> Result<(), Failure> {
    places.iter().try_for_each(|place| {
        let file = place.join(PROCESSES);
        fs::write(&file, "0").file_error("move the process to the cgroup", place)
    })
}

/// Removes cgroups once their processes have ended.
///
/// # Errors
/// One still has processes after five seconds.
pub fn remove(places: &[PathBuf]) -> Result<(), Failure> {
    for place in places {
        let mut removed = remove_tree(place);
        for _ in 0..ATTEMPTS {
            match &removed {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {}
                _ => break,
            }
            thread::sleep(INTERVAL);
            removed = remove_tree(place);
        }
        match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound || is_refused(&error) => {}
            done => done.file_error("remove the cgroup", place)?,
        }
    }
    Ok(())
}

/// Removes a cgroup and those below it.
fn remove_tree(place: &Path) -> io::Result<()> {
    for entry in fs::read_dir(place)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(place)
}

/// File of the freezer in one of the cgroups, and what it contains when frozen and when not.
fn freezer(places: &[PathBuf]) -> Option<(PathBuf, [&'static str; 2])> {
    places.iter().find_map(|place| {
        let new = place.join("cgroup.freeze");
        let old = place.join("freezer.state");
        match (old.exists(), new.exists()) {
            (true, _) => Some((old, ["FROZEN", "THAWED"])),
            (_, true) => Some((new, ["1", "0"])),
            _ => None,
        }
    })
}

/// Stops or continues all processes of a container; `false`: there is no freezer.
///
/// # Errors
/// The freezer refuses.
pub fn freeze(places: &[PathBuf], is_frozen: bool) -> Result<bool, Failure> {
    let Some((file, [frozen, thawed])) = freezer(places) else { return Ok(false) };
    let state = if is_frozen { frozen } else { thawed };
    fs::write(&file, state).file_error("write", &file).map(|()| true)
}

/// Returns whether the processes of a container are stopped.
pub fn is_frozen(places: &[PathBuf]) -> bool {
    freezer(places).is_some_and(|(file, [_, thawed])| {
        fs::read_to_string(file).is_ok_and(|state| state.trim() != thawed)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_of_both_versions() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        assert!(hierarchies(root).is_empty());
        for name in ["cpu", "memory", "other"] {
            fs::create_dir(root.join(name)).unwrap();
        }
        std::os::unix::fs::symlink("cpu", root.join("link")).unwrap();
        for name in ["cpu", "memory"] {
            fs::write(root.join(name).join(PROCESSES), "").unwrap();
        }
        assert_eq!(hierarchies(root), [root.join("cpu"), root.join("memory")]);
        fs::write(root.join(PROCESSES), "").unwrap();
        assert_eq!(hierarchies(root), [root]);
        assert!(places(Path::new("/")).is_empty());
    }

    #[test]
    fn freezers() {
        let folder = tempfile::tempdir().unwrap();
        let places = [folder.path().to_owned()];
        assert!(!freeze(&places, true).unwrap());
        fs::write(folder.path().join("cgroup.freeze"), "0\n").unwrap();
        assert!(!is_frozen(&places));
        assert!(freeze(&places, true).unwrap() && is_frozen(&places));
    }
}
