//! Tests with entries of one file.

use super::*;
use std::cell::Cell;
use std::os::unix::fs::symlink;
use std::thread;
use tempfile::TempDir;

const KIND: Kind = Kind { folder: "things", record: "record", item: "thing" };

fn store() -> (TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::at(folder.path().to_owned(), KIND);
    (folder, store)
}

fn entry(store: &Store, name: &str) -> PathBuf {
    let path = store.folder().join(name);
    fs::create_dir(&path).unwrap();
    fs::write(path.join(KIND.record), name).unwrap();
    path
}

fn make(work: &Path, _: &Lock) -> Result<PathBuf, Failure> {
    let made = work.join("made");
    fs::create_dir(&made).unwrap();
    fs::write(made.join(KIND.record), "built").unwrap();
    Ok(made)
}

fn find(folder: &Path) -> Option<String> {
    fs::read_to_string(folder.join(KIND.record)).ok()
}

fn get(store: &Store) -> (String, UseLock, bool) {
    let interruptible = Interruptible::new().unwrap();
    store.get("a", &interruptible, &Steps::stderr(), find, make).unwrap()
}

#[test]
fn a_full_disk_is_said_before_the_build() {
    const ROOM: u64 = 2 << 30;
    assert!(enough(ROOM, ROOM, Path::new("/c"), "kernel").is_ok());
    let failure = enough(ROOM - 1, ROOM, Path::new("/c"), "kernel").unwrap_err();
    assert_eq!(failure.code(), failure::OS_ERROR);
    let text = failure.to_string();
    assert!(text.contains("/c has 2047 MiB left") && text.contains("XDG_CACHE_HOME"), "{text}");
}

#[test]
fn damaged_entries_are_replaced_and_whole_ones_stay() {
    let folder = tempfile::tempdir().unwrap();
    let [place, made] = ["place", "made"].map(|name| folder.path().join(name));
    let put = |must: &str, other: &str| {
        fs::create_dir(&made).unwrap();
        fs::write(made.join("must"), must).unwrap();
        fs::write(made.join("other"), other).unwrap();
        put_whole(&made, &place, "must").unwrap();
        let _ = fs::remove_dir_all(&made);
        fs::read_to_string(place.join("must")).unwrap()
    };
    assert_eq!(put("", "a"), "", "the first one");
    assert_eq!(put("b", ""), "b");
    assert!(!is_whole(&place, "must"));
    assert_eq!(put("c", "c"), "c");
    assert!(is_whole(&place, "must") && !is_whole(&place, "none"));
    assert_eq!(put("d", "d"), "c", "another process was first");
}

#[test]
fn entries_in_use_stay_from_the_lookup_on() {
    let (_folder, store) = store();
    for is_new in [true, false] {
        let (_, held, built) = get(&store);
        assert_eq!(built, is_new);
        assert_eq!(store.remove(store.all().unwrap()).unwrap(), [""; 0]);
        drop(held);
    }
    assert_eq!(store.remove(store.all().unwrap()).unwrap(), ["a"]);
}

#[test]
fn an_entry_being_removed_is_not_found() {
    let (_folder, store) = store();
    let path = entry(&store, "a");
    let remover = File::open(&path).unwrap();
    remover.try_lock().unwrap();
    assert!(KIND.hold(&path).is_none());
    let (text, _held, is_new) = get(&store);
    assert_eq!((&*text, is_new), ("built", true));
    drop(remover);
    assert!(KIND.hold(&path).is_some());
    assert!(KIND.hold(&store.folder().join("none")).is_none());
}

/// Makes `link` lead to another folder: other processes have removed and built an entry.
fn turn(link: &Path, to: &Path) {
    let next = link.with_extension("next");
    symlink(to, &next).unwrap();
    fs::rename(&next, link).unwrap();
}

#[test]
fn only_the_opened_folder_counts() {
    let (_folder, store) = store();
    let [first, second] = ["a", "b"].map(|name| entry(&store, name));
    let link = store.folder().join("link");
    turn(&link, &first);
    let file = File::open(&link).unwrap();
    assert!(is_at(&file, &link).unwrap());
    turn(&link, &second);
    assert!(!is_at(&file, &link).unwrap());
    fs::remove_file(&link).unwrap();
    assert!(!is_at(&file, &link).unwrap());
}

#[test]
fn several_may_remove_at_once() {
    let (_folder, store) = store();
    let folders: Vec<_> = (0..40).map(|index| entry(&store, &index.to_string())).collect();
    let remove = || store.remove(folders.clone()).unwrap().len();
    let removed: Vec<usize> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(remove)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(removed.iter().sum::<usize>(), folders.len());
    assert!(store.all().unwrap().is_empty());
}

#[test]
fn what_is_removed_is_said_in_spite_of_a_failure() {
    let (_folder, store) = store();
    let [first, last] = ["a", "c"].map(|name| entry(&store, name));
    // Cannot be opened, by root either.
    let wrong = store.folder().join("x".repeat(300));
    let gone = store.folder().join("gone");
    let mut names = Vec::new();
    let result =
        store.remove_each(vec![gone, first, wrong, last], |name| names.push(name.to_owned()));
    let text = result.unwrap_err().to_string();
    assert!(text.contains("cannot remove the thing"), "{text}");
    assert_eq!(names, ["a", "c"]);
}

#[test]
fn other_users_cannot_write_to_a_result() {
    let (_folder, store) = store();
    let mode = |path: &Path| fs::symlink_metadata(path).unwrap().mode() & 0o7777;
    let allow = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    let outside = store.folder().join(".outside");
    fs::write(&outside, "").unwrap();
    allow(&outside, 0o666);
    let is_made = Cell::new(false);
    let make = |work: &Path, lock: &Lock| {
        let made = make(work, lock)?;
        fs::create_dir(made.join("deep")).unwrap();
        fs::write(made.join("deep/program"), "").unwrap();
        symlink(&outside, made.join("link")).unwrap();
        for (name, mode) in
            [("", 0o775), (KIND.record, 0o606), ("deep", 0o1777), ("deep/program", 0o4777)]
        {
            allow(&made.join(name), mode);
        }
        is_made.set(true);
        Ok(made)
    };
    let interruptible = Interruptible::new().unwrap();
    store.get("a", &interruptible, &Steps::stderr(), find, make).unwrap();
    assert!(is_made.get());
    let place = store.folder().join("a");
    let modes = ["", KIND.record, "deep", "deep/program"].map(|name| mode(&place.join(name)));
    assert_eq!(modes, [0o755, 0o604, 0o1755, 0o4755]);
    assert_eq!(mode(&outside), 0o666, "links are not followed");
}
