//! Tests with folders of one file each.

use super::*;
use std::os::unix::fs::symlink;
use tempfile::TempDir;

/// Returns a folder with the folders `old` and `new`, whose file `name` has their name.
fn folders() -> (TempDir, PathBuf, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old", "new"].map(|name| {
        let path = folder.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("name"), name).unwrap();
        path
    });
    (folder, old, new)
}

fn name(folder: &Path) -> String {
    fs::read_to_string(folder.join("name")).unwrap()
}

fn count(folder: &TempDir) -> usize {
    fs::read_dir(folder.path()).unwrap().count()
}

#[test]
fn one_folder_takes_the_place_of_another() {
    let (folder, old, new) = folders();
    let interruptible = Interruptible::new().unwrap();
    let output = OutputFolder::resolve(&old).unwrap();
    let refuse = || Err(Failure::new(failure::USAGE, "no"));
    assert!(output.put(&new, &interruptible, refuse).is_err());
    assert_eq!([&old, &new].map(|path| name(path)), ["old", "new"]);
    output.put(&new, &interruptible, || Ok(())).unwrap();
    assert_eq!([&old, &new].map(|path| name(path)), ["new", "old"]);
    let output = OutputFolder::resolve(&folder.path().join("none")).unwrap();
    output.put(&new, &interruptible, || Ok(())).unwrap();
    assert_eq!(name(output.path()), "old");
    assert_eq!(count(&folder), 2);
}

#[test]
fn file_systems_without_an_exchange() {
    let (folder, old, new) = folders();
    for error in [Errno::INVAL, Errno::NOSYS, Errno::OPNOTSUPP] {
        swap(&new, &old, |_, _| Err(error)).unwrap();
        assert_eq!([&old, &new].map(|path| name(path)), ["new", "old"]);
        swap(&new, &old, |_, _| Err(error)).unwrap();
    }
    assert_eq!([&old, &new].map(|path| name(path)), ["old", "new"]);
    // The new one is lost before its turn: the old one returns.
    let missing = folder.path().join("none");
    assert!(swap(&missing, &old, |_, _| Err(Errno::INVAL)).is_err());
    assert!(swap(&missing, &old, |_, _| Err(Errno::NOENT)).is_err());
    assert_eq!(name(&old), "old");
    assert_eq!(count(&folder), 2);
}

#[test]
fn links_are_followed() {
    let (folder, old, new) = folders();
    let interruptible = Interruptible::new().unwrap();
    let [link, chain, dangling] =
        ["link", "chain", "dangling"].map(|name| folder.path().join(name));
    symlink("old", &link).unwrap();
    symlink(&link, &chain).unwrap();
    symlink("later", &dangling).unwrap();
    let real = old.canonicalize().unwrap();
    for path in [&link, &chain, &link.join("")] {
        assert_eq!(OutputFolder::resolve(path).unwrap().path(), real);
    }
    let output = OutputFolder::resolve(&chain).unwrap();
    output.put(&new, &interruptible, || Ok(())).unwrap();
    assert!(link.is_symlink() && chain.is_symlink());
    assert_eq!([&chain, &old].map(|path| name(path)), ["new"; 2]);
    OutputFolder::resolve(&dangling).unwrap().put(&new, &interruptible, || Ok(())).unwrap();
    assert!(dangling.is_symlink());
    assert_eq!(name(&folder.path().join("later")), "old");
    let turning = folder.path().join("loop");
    symlink("loop", &turning).unwrap();
    assert!(OutputFolder::resolve(&turning).is_err());
}

#[test]
fn folders_that_cannot_be_replaced() {
    let (folder, old, _) = folders();
    let refusal = |path: &Path| {
        let failure = OutputFolder::resolve(path).unwrap_err();
        assert_eq!(failure.code(), failure::USAGE);
        failure.to_string()
    };
    for path in [".", "..", "/", "../.", "./"] {
        let text = refusal(Path::new(path));
        assert!(text.contains("current folder") && text.contains("-o /"), "{text}");
    }
    let text = refusal(Path::new("/proc"));
    assert!(text.contains("mount point") && text.contains("-o /proc/NAME"), "{text}");
    let link = folder.path().join("link");
    symlink("/proc", &link).unwrap();
    assert!(refusal(&link).contains("mount point"));
    assert!(refusal(&old.join("name")).contains("is not a folder"));
    assert!(refusal(&folder.path().join("none/..")).contains("does not exist"));
}

#[test]
fn other_entries_are_found() {
    let (_folder, old, _) = folders();
    let output = OutputFolder::resolve(&old).unwrap();
    assert_eq!(output.foreign_entry(&["name", "other"]).unwrap(), None);
    for name in ["c", "b"] {
        fs::write(old.join(name), "").unwrap();
    }
    let found = output.foreign_entry(&["name"]).unwrap().unwrap();
    assert_eq!(found.file_name().unwrap(), "b");
    assert!(!output.is_empty().unwrap());
    let none = OutputFolder::resolve(&old.join("none")).unwrap();
    assert!(none.is_empty().unwrap() && none.foreign_entry(&[]).unwrap().is_none());
}
