//! Tests of the store with instant builds.

use super::*;
use hosted_command::failure;
use hosted_command::lock::POLL_INTERVAL;
use hosted_command::scratch::YOUNG;
use std::fs::File;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

fn store() -> (TempDir, Store) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().canonicalize().unwrap();
    let store = Store { entries: store::Store::at(path, KIND) };
    (folder, store)
}

fn inputs(source: &str) -> Inputs {
    let [kind, recipe, compiler] = ["previrt", "recipe", "gcc 1"].map(str::to_owned);
    Inputs { kind, recipe, source: source.to_owned(), compiler }
}

/// Creates the files of a build.
fn make(work: &Path, _: &Lock) -> Result<BuiltKernel, Failure> {
    let folder = work.join("kept");
    for name in [MODULES, HEADERS_FOLDER] {
        fs::create_dir_all(folder.join(name)).unwrap();
    }
    for name in [VMLINUX, BZIMAGE, SYMBOLS, CONFIGURED] {
        fs::write(folder.join(name), name).unwrap();
    }
    Ok(BuiltKernel { folder, linux: "6.1.192".to_owned() })
}

fn get(
    store: &Store,
    source: &str,
    make: impl FnOnce(&Path, &Lock) -> Result<BuiltKernel, Failure>,
) -> Result<(CachedKernel, UseLock), Failure> {
    store.get(&inputs(source), &Interruptible::new().unwrap(), &Steps::stderr(), make)
}

fn never(_: &Path, _: &Lock) -> Result<BuiltKernel, Failure> {
    panic!("this kernel is there")
}

/// Returns the names in the store, hidden ones too.
fn names(store: &Store) -> Vec<String> {
    let entries = fs::read_dir(store.folder()).unwrap().flatten();
    let mut names: Vec<_> = entries.map(|e| e.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Removes kernels and returns their names.
fn pruned(store: &Store, keep: usize) -> Vec<String> {
    let mut names = Vec::new();
    store.prune(keep, |name| names.push(name.to_owned())).unwrap();
    names
}

/// Sets the last use to this long ago.
fn age(folder: &Path, age: Duration) {
    File::open(folder).unwrap().set_modified(SystemTime::now() - age).unwrap();
}

#[test]
fn a_kernel_is_built_once() {
    let (_folder, store) = store();
    let (built, _) = get(&store, "a", make).unwrap();
    assert_eq!(built.record.linux, "6.1.192");
    let digest = "bda53947e9ee31b2381cad6b07dc756f83c688f16dce16bd23ac1386099b36b3";
    assert_eq!(built.record.sha256, digest, "that of sha256sum(1)");
    let (again, _) = get(&store, "a", never).unwrap();
    assert_eq!(again.folder, built.folder);
    let (other, _) = get(&store, "b", make).unwrap();
    assert_ne!(other.folder, built.folder);
    assert_eq!(names(&store).len(), 2, "the work folders are removed");
}

#[test]
fn every_input_counts() {
    let name = inputs("a").name();
    assert_eq!(inputs("a").name(), name);
    let changes: [fn(&mut Inputs); 4] = [
        |inputs| inputs.kind = "plain".into(),
        |inputs| inputs.recipe.push('x'),
        |inputs| inputs.source.push('x'),
        |inputs| inputs.compiler.push('x'),
    ];
    for change in changes {
        let mut inputs = inputs("a");
        change(&mut inputs);
        assert_ne!(inputs.name(), name, "{inputs:?}");
    }
    // The boundaries of parts count, too.
    assert_ne!(digest([&b"ab"[..], b"c"]), digest([&b"a"[..], b"bc"]));
}

#[test]
fn incomplete_and_damaged_kernels_are_rebuilt() {
    let (_folder, store) = store();
    let damages: [fn(&Path); 4] = [
        |folder| fs::remove_file(folder.join(RECORD)).unwrap(),
        |folder| fs::remove_file(folder.join(BZIMAGE)).unwrap(),
        |folder| fs::write(folder.join(VMLINUX), "short").unwrap(),
        // Same length.
        |folder| fs::write(folder.join(VMLINUX), "VMLINUX").unwrap(),
    ];
    let (built, _) = get(&store, "a", make).unwrap();
    for damage in damages {
        damage(&built.folder);
        let count = AtomicU32::new(0);
        let counted = |work: &Path, lock: &Lock| {
            count.fetch_add(1, SeqCst);
            make(work, lock)
        };
        let (again, _) = get(&store, "a", counted).unwrap();
        assert_eq!((count.load(SeqCst), &again.folder), (1, &built.folder));
        assert_eq!(fs::read(again.folder.join(VMLINUX)).unwrap(), VMLINUX.as_bytes());
        get(&store, "a", never).unwrap();
    }
}

#[test]
fn what_others_may_write_to_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let (_folder, store) = store();
    let (built, _) = get(&store, "a", make).unwrap();
    fs::set_permissions(&built.folder, fs::Permissions::from_mode(0o777)).unwrap();
    assert!(store.entries().unwrap().is_empty());
    fs::set_permissions(&built.folder, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(store.entries().unwrap().len(), 1);
}

#[test]
fn a_build_with_any_umask_is_used() {
    use std::os::unix::fs::PermissionsExt;
    let (_folder, store) = store();
    let loose = |work: &Path, lock: &Lock| {
        let made = make(work, lock)?;
        for name in ["", MODULES, HEADERS_FOLDER, VMLINUX] {
            let all = fs::Permissions::from_mode(0o777);
            fs::set_permissions(made.folder.join(name), all).unwrap();
        }
        Ok(made)
    };
    get(&store, "a", loose).unwrap();
    get(&store, "a", never).unwrap();
}

#[test]
fn a_kernel_being_removed_is_not_held() {
    let (_folder, store) = store();
    let (built, held) = get(&store, "a", make).unwrap();
    drop(held);
    let remover = File::open(&built.folder).unwrap();
    remover.try_lock().unwrap();
    assert!(built.hold().is_none());
    let failure = hold(&built.folder).unwrap_err();
    assert_eq!(failure.code(), failure::MISSING_FILE);
    drop(remover);
    assert_eq!(pruned(&store, 0), [inputs("a").name()]);
    assert!(built.hold().is_none(), "it is gone");
    assert!(hold(store.folder()).is_ok(), "a folder without a kernel needs no lock");
}

#[test]
fn a_build_that_fails_leaves_nothing() {
    let (_folder, store) = store();
    let failed = get(&store, "a", |work, _| {
        fs::write(work.join("half"), "").unwrap();
        Err(Failure::new(failure::INTERNAL, "make failed"))
    });
    assert!(failed.unwrap_err().to_string().contains("make failed"));
    assert_eq!(names(&store), [""; 0]);
}

/// Starts a build of `a` that ends on request, and returns once it has begun.
fn slow_build<'a>(
    scope: &'a thread::Scope<'a, '_>,
    store: &'a Store,
    fails: bool,
) -> mpsc::Sender<()> {
    let (begun, wait_begun) = mpsc::channel();
    let (end, wait_end) = mpsc::channel::<()>();
    scope.spawn(move || {
        let result = get(store, "a", |work, lock| {
            lock.note("512 of about 1650: mm/slub.o");
            begun.send(()).unwrap();
            wait_end.recv().unwrap();
            match fails {
                true => Err(Failure::new(failure::INTERNAL, "make failed")),
                false => make(work, lock),
            }
        });
        assert_eq!(result.is_err(), fails);
    });
    wait_begun.recv().unwrap();
    end
}

#[test]
fn two_builders_share_one_build() {
    let (_folder, store) = store();
    thread::scope(|scope| {
        let end = slow_build(scope, &store, false);
        let second = scope.spawn(|| get(&store, "a", never).unwrap().0.folder);
        let path = store.entries.lock_path(&inputs("a").name());
        let status = Lock::status(&path);
        assert_eq!(status, format!("process {}: 512 of about 1650: mm/slub.o", std::process::id()));
        thread::sleep(3 * POLL_INTERVAL);
        assert!(!second.is_finished(), "it waits");
        end.send(()).unwrap();
        assert!(second.join().unwrap().join(VMLINUX).is_file());
    });
    assert_eq!(names(&store).len(), 1);
}

#[test]
fn the_second_builds_if_the_first_fails() {
    let (_folder, store) = store();
    thread::scope(|scope| {
        let end = slow_build(scope, &store, true);
        let second = scope.spawn(|| get(&store, "a", make).unwrap());
        thread::sleep(POLL_INTERVAL);
        end.send(()).unwrap();
        second.join().unwrap();
    });
    assert_eq!(names(&store).len(), 1);
}

#[test]
fn what_killed_builders_leave_goes() {
    let (_folder, store) = store();
    let work = |name: &str, old: bool| {
        let path = store.folder().join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("file"), "").unwrap();
        age(&path, if old { 2 * YOUNG } else { Duration::ZERO });
        File::open(path).unwrap()
    };
    let held = work(".work-held", true);
    held.lock().unwrap();
    drop(work(".work-left", true));
    drop(work(".work-young", false));
    let name = inputs("a").name();
    fs::write(store.entries.lock_path(&name), "process 1: killed").unwrap();
    fs::write(store.entries.lock_path("other"), "").unwrap();
    get(&store, "a", make).unwrap();
    assert_eq!(names(&store), [".work-held", ".work-young", &name]);
}

#[test]
fn the_last_ones_are_kept_and_those_in_use() {
    let (_folder, store) = store();
    let mut folders = Vec::new();
    for (index, source) in ["a", "b", "c"].iter().enumerate() {
        let (entry, _) = get(&store, source, make).unwrap();
        age(&entry.folder, YOUNG * (10 - index as u32));
        folders.push(entry.folder);
    }
    // A use makes it the newest.
    let used = get(&store, "a", never).unwrap();
    drop(used);
    get(&store, "d", make).unwrap();
    let there = |source: &str| store.folder().join(inputs(source).name()).is_dir();
    assert_eq!(["a", "b", "c", "d"].map(there), [true, false, true, true]);

    let held = hold(&folders[2]).unwrap();
    age(&folders[2], 20 * YOUNG);
    get(&store, "e", make).unwrap();
    assert_eq!(["a", "c", "d", "e"].map(there), [true; 4], "c is in use");
    drop(held);
    age(&folders[2], 20 * YOUNG);
    assert_eq!(pruned(&store, KEPT), [inputs("c").name()]);
    fs::create_dir(store.folder().join("linux-copied-by-hand")).unwrap();
    assert_eq!(pruned(&store, 1).len(), 2);
    assert_eq!(pruned(&store, 0).len(), 2);
    assert_eq!(names(&store), [""; 0]);
}

#[test]
fn a_comparison_does_not_push_out_the_default_kernel() {
    let (_folder, store) = store();
    let name = |kind: &str| {
        let inputs = Inputs { kind: kind.into(), ..inputs("a") };
        store.get(&inputs, &Interruptible::new().unwrap(), &Steps::stderr(), make).unwrap();
        inputs.name()
    };
    let kinds = ["previrt", "untuned", "plain", "stock"];
    let made = kinds.map(name);
    assert_eq!(pruned(&store, 1), [""; 0]);
    assert!(made.iter().all(|name| store.folder().join(name).is_dir()));
}
