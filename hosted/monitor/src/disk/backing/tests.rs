//! Headers of images, and which files they may name.

use super::*;
use std::fs;
use std::os::unix::fs::symlink;

/// Image whose header names a backing file, or none; the format goes into an extension.
fn image(name: &str, format: Option<&str>) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    bytes[..4].copy_from_slice(&QCOW2);
    let mut word = |at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
    word(4, 3);
    word(20, 12);
    word(28, 1 << 20);
    word(LENGTH, 104);
    // An extension of another kind comes first.
    word(104, 0x6803_f857);
    word(108, 3);
    if let Some(format) = format {
        word(120, FORMAT);
        word(124, format.len() as u32);
        bytes[128..128 + format.len()].copy_from_slice(format.as_bytes());
    }
    if !name.is_empty() {
        bytes[8..16].copy_from_slice(&512_u64.to_be_bytes());
        bytes[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
        bytes[512..512 + name.len()].copy_from_slice(name.as_bytes());
    }
    bytes
}

fn named(name: &str, format: Option<&str>) -> Option<Named> {
    let format = format.map(|format| format.as_bytes().to_vec());
    Some(Named { name: name.as_bytes().to_vec(), format })
}

#[test]
fn headers() {
    let parse = |bytes: &[u8]| Header::parse(bytes);
    let alone = parse(&image("", None)).unwrap();
    assert_eq!((alone.length, alone.backing), (1 << 20, None));
    for format in [None, Some("raw"), Some("qcow2")] {
        let header = parse(&image("base", format)).unwrap();
        assert_eq!(header.backing, named("base", format));
    }
    // Version 2: the extensions follow the short header, here the format's end marker at once.
    let mut old = image("base", Some("raw"));
    old[7] = 2;
    assert_eq!(parse(&old).unwrap().backing, named("base", None));
    // A name beyond the cluster, too long, empty, with a zero; extensions that do not end.
    for (at, value) in [(8, 1), (14, 0x10), (17, 1), (18, 4), (513, 0)] {
        let mut bytes = image("base", None);
        bytes[at] = value;
        assert_eq!(parse(&bytes), None, "{at}");
    }
    let mut empty = image("base", None);
    empty[19] = 0;
    assert_eq!(parse(&empty), None);
    for length in [u32::MAX, u32::MAX - 7, 4096] {
        let mut bytes = image("base", Some("raw"));
        bytes[108..112].copy_from_slice(&length.to_be_bytes());
        assert_eq!(parse(&bytes).unwrap().backing, named("base", None));
    }
    // Any bytes.
    let good = image("base", Some("qcow2"));
    for at in 0..160 {
        for value in [0, 1, 0x7f, 0xff] {
            let mut bytes = good.clone();
            bytes[at] = value;
            let _ = parse(&bytes);
            let _ = parse(&bytes[..at]);
        }
    }
}

#[test]
fn names_below_a_folder() {
    let folder = Path::new("/images");
    let place = |name: &str, image: &str| relative(name.as_bytes(), Path::new(image), folder);
    assert_eq!(place("base", ""), Some("base".into()));
    assert_eq!(place("base", "sub/middle"), Some("sub/base".into()), "beside the image");
    assert_eq!(place("/images/sub/base", "other/x"), Some("sub/base".into()));
    for name in ["/etc/passwd", "/imagesx/base", "nbd:host:1", "json:{}", "file:base"] {
        assert_eq!(place(name, ""), None, "{name}");
    }
}

/// Opens the chain below an image with this name of a backing file.
fn chain(folder: &Path, name: &str, format: &str) -> Result<Vec<BackingFile>, String> {
    let top = tempfile::tempfile().unwrap();
    let named = named(name, Some(format).filter(|format| !format.is_empty())).unwrap();
    let opened = open_chain(&top, &named, folder);
    opened.map_err(|problem| problem.failure(Path::new("top")).to_string())
}

#[test]
fn chains() {
    let folder = tempfile::tempdir().unwrap();
    let beneath = folder.path().join("beneath");
    let path = |name: &str| beneath.join(name);
    fs::create_dir_all(path("sub")).unwrap();
    fs::write(path("raw"), image("/etc/passwd", Some("raw"))).unwrap();
    fs::write(path("sub/other"), [0; 100]).unwrap();
    fs::write(path("sub/middle"), image("../sub/other", Some("raw"))).unwrap();
    fs::write(path("top"), image("sub/middle", Some("qcow2"))).unwrap();
    fs::write(folder.path().join("secret"), [0; 512]).unwrap();
    let formats = |name: &str, format: &str| {
        let files = chain(&beneath, name, format)?;
        Ok::<_, String>(files.iter().map(|file| file.format).collect::<Vec<_>>())
    };
    // A raw file's contents are not looked at.
    assert_eq!(formats("raw", "raw"), Ok(vec![Base::Raw]));
    assert_eq!(formats("top", "qcow2"), Ok(vec![Base::Qcow2, Base::Qcow2, Base::Raw]));
    let absolute = path("raw").display().to_string();
    assert_eq!(formats(&absolute, "raw"), Ok(vec![Base::Raw]));

    symlink("/etc/passwd", path("link")).unwrap();
    symlink("..", path("up")).unwrap();
    symlink("raw", path("inside")).unwrap();
    let secret = folder.path().join("secret").display().to_string();
    for (name, format, said) in [
        ("../secret", "raw", "leads out"),
        ("sub/../../secret", "raw", "leads out"),
        ("link", "raw", "leads out"),
        ("up/secret", "raw", "leads out"),
        ("inside", "raw", "leads out"),
        (&secret, "raw", "is not a file of the folder"),
        ("/proc/self/fd/0", "raw", "is not a file of the folder"),
        ("sub", "raw", "is not a file"),
        ("raw", "", "has no format"),
        ("raw", "vmdk", "other than raw and qcow2"),
        ("sub/other", "qcow2", "is not a qcow2 image"),
        ("nothing", "raw", "No such file"),
    ] {
        let text = formats(name, format).unwrap_err();
        assert!(text.contains(said), "{name} {format}: {text}");
    }
}

#[test]
fn chains_that_do_not_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("a"), image("b", Some("qcow2"))).unwrap();
    fs::write(path("b"), image("a", Some("qcow2"))).unwrap();
    let text = chain(folder.path(), "a", "qcow2").map(drop).unwrap_err();
    assert!(text.contains("below itself"), "{text}");
    for index in 0..=MAX_FILES {
        let next = if index < MAX_FILES { format!("n{}", index + 1) } else { String::new() };
        fs::write(path(&format!("n{index}")), image(&next, Some("qcow2"))).unwrap();
    }
    assert_eq!(chain(folder.path(), "n1", "qcow2").map(|files| files.len()), Ok(MAX_FILES));
    let text = chain(folder.path(), "n0", "qcow2").map(drop).unwrap_err();
    assert!(text.contains("more than 8"), "{text}");
}

/// Readers share a file; a writer excludes them, and they exclude it.
#[test]
fn files_are_locked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("raw");
    fs::write(&path, [0; 512]).unwrap();
    let files = (chain(folder.path(), "raw", "raw"), chain(folder.path(), "raw", "raw"));
    assert!(files.0.is_ok() && files.1.is_ok());
    let writer = || File::options().read(true).write(true).open(&path).unwrap();
    assert!(lock::lock(&writer(), &path, false).is_err());
    drop(files);
    let held = writer();
    lock::lock(&held, &path, false).unwrap();
    let text = chain(folder.path(), "raw", "raw").map(drop).unwrap_err();
    assert!(text.contains("in use"), "{text}");
}
