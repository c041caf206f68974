//! Folders that the host changes, too, and files whose descriptors were closed meanwhile.

use super::*;
use rustix::process::{Resource, Rlimit, setrlimit};

/// A driver that holds names of a folder's 300 files from fid 10 on, of which few are open.
fn many_names() -> Rig {
    let mut rig = Rig::new(false);
    rig.server.set_limits(16, 1000);
    for number in 0..300 {
        fs::write(rig.folder.path().join(format!("below/{number}")), number.to_string()).unwrap();
    }
    for number in 0..300 {
        rig.walk(10 + number, &["below", &number.to_string()]).unwrap();
    }
    // Names that are looked at twice are closed.
    for number in 0..16 {
        rig.walk(1000 + number, &["file"]).unwrap();
    }
    rig
}

#[test]
fn names_that_are_not_used_need_no_descriptors() {
    let rig = many_names();
    assert!(rig.server.open_names() < 100, "{}", rig.server.open_names());
    for number in 0..300 {
        rig.open(10 + number, linux::O_RDONLY).unwrap();
        assert_eq!(rig.read(10 + number).unwrap(), number.to_string().as_bytes());
        rig.say(kind::CLUNK, &(10 + number).to_le_bytes()).unwrap();
    }
}

fn attributes(rig: &Rig, fid: u32) -> Result<(), u32> {
    rig.say(kind::GETATTR, &[&fid.to_le_bytes()[..], &[0; 8]].concat()).map(drop)
}

#[test]
fn names_that_are_used_again_take_the_descriptors_of_others() {
    let rig = many_names();
    std::thread::scope(|scope| {
        for first in 0..8 {
            let rig = &rig;
            scope.spawn(move || {
                for number in 0..600 {
                    attributes(rig, 10 + (first * 40 + number) % 300).unwrap();
                }
            });
        }
    });
    assert!(rig.server.open_names() < 100, "{}", rig.server.open_names());
}

/// The limit of descriptors is one of the process, so the test is in a process of its own.
#[test]
fn requests_at_the_limit_of_descriptors_close_unused_files() {
    const MARK: &str = "PARADOR_TEST_OWN_PROCESS";
    const NAME: &str = "requests_at_the_limit_of_descriptors_close_unused_files";
    if std::env::var_os(MARK).is_none() {
        let mut own = std::process::Command::new(std::env::current_exe().unwrap());
        own.args(["--exact", &format!("share::tests::host::{NAME}")]).env(MARK, "1");
        let output = own.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let rig = Rig::new(false);
    for number in 0..300 {
        fs::write(rig.folder.path().join(format!("below/{number}")), "").unwrap();
    }
    let limit = Rlimit { current: Some(100), maximum: Some(100) };
    setrlimit(Resource::Nofile, limit).unwrap();
    for number in 0..300 {
        rig.walk(10 + number, &["below", &number.to_string()]).unwrap();
    }
    (0..300).for_each(|number| attributes(&rig, 10 + number).unwrap());
    let take_all = || std::iter::from_fn(|| rustix::io::dup(rig.server.folder()).ok());
    let attach = [&words(&[1000, u32::MAX])[..], &name("user"), &name(""), &words(&[0])].concat();
    let look_up = [words(&[ROOT, 1001]), name("file"), words(&[0])].concat();
    let copy = |to: u32| [&words(&[ROOT, to])[..], &[0, 0]].concat();
    let create = |fid: u32, text: &str| {
        [words(&[fid]), name(text), words(&[linux::O_RDWR, 0o600, 0])].concat()
    };
    let size = [words(&[20, 8, 0, 0, 0, 5, 0]), vec![0; 32]].concat();
    for (kind, free, fields) in [
        (kind::ATTACH, 0, attach),
        (kind::LOOKUP, 0, look_up),
        (kind::WALK, 0, copy(1002)),
        (kind::WALK, 0, copy(1003)),
        (kind::LCREATE, 0, create(1002, "new")),
        (kind::LCREATE, 1, create(1003, "other")),
        (kind::LOPEN, 0, words(&[1001, linux::O_RDONLY])),
        (kind::SETATTR, 0, size),
        (kind::XATTRWALK, 0, [words(&[30, 1004]), name("")].concat()),
    ] {
        (20..40).for_each(|fid| attributes(&rig, fid).unwrap());
        let mut taken: Vec<_> = take_all().collect();
        taken.truncate(taken.len() - free);
        rig.say(kind, &fields).unwrap_or_else(|error| panic!("{kind}: {error}"));
    }
}

#[test]
fn paths_of_closed_files_are_limited() {
    let mut rig = Rig::new(false);
    rig.server.set_limits(16, 1000);
    // After 4096 for the longest path of one: for 100 files or more.
    rig.server.set_path_bytes(4096 + 4000);
    for _ in 0..2 {
        let walk = |number: &u32| rig.walk(10 + number, &["below", "deep"]);
        let failed = (0..300).find(|number| walk(number).is_err()).unwrap();
        assert!((100..150).contains(&failed), "{failed}");
        assert_eq!(walk(&failed), Err(errno::ENFILE));
        for number in 0..failed {
            if number % 2 == 0 {
                attributes(&rig, 10 + number).unwrap();
            }
            rig.say(kind::CLUNK, &words(&[10 + number])).unwrap();
        }
    }
}

#[test]
fn a_longer_name_of_a_folder_needs_room_for_the_paths_below() {
    let rig = many_names();
    rig.server.set_path_bytes(20_000);
    let root = ROOT.to_le_bytes();
    let renamed = |new: &str| {
        let fields = [&root[..], &name("below"), &root, &name(new)].concat();
        rig.say(kind::RENAMEAT, &fields).map(drop)
    };
    assert_eq!(renamed(&"x".repeat(200)), Err(errno::ENFILE));
    attributes(&rig, 10).unwrap();
    assert_eq!(renamed("longer"), SUCCESS);
    attributes(&rig, 11).unwrap();
}

#[test]
fn a_closed_name_follows_its_driver_but_not_the_host() {
    let rig = many_names();
    let path = |name: &str| rig.folder.path().join(name);
    let root = ROOT.to_le_bytes();
    let moved = [&root[..], &name("below"), &root, &name("there")].concat();
    rig.say(kind::RENAMEAT, &moved).unwrap();
    rig.open(10, linux::O_RDONLY).unwrap();
    assert_eq!(rig.read(10).unwrap(), b"0");
    // Another file, none, and the same one by a link in place of its folder.
    fs::rename(path("there/1"), path("1")).unwrap();
    fs::write(path("there/1"), "other").unwrap();
    assert_eq!(rig.open(11, linux::O_RDONLY), Err(errno::ESTALE));
    fs::remove_file(path("there/2")).unwrap();
    assert_eq!(rig.open(12, linux::O_RDONLY), Err(errno::ESTALE));
    fs::rename(path("there"), path("elsewhere")).unwrap();
    symlink("elsewhere", path("there")).unwrap();
    assert_eq!(rig.open(13, linux::O_RDONLY), Err(errno::ESTALE));
}

#[test]
fn a_closed_name_keeps_the_file_that_its_driver_removes() {
    let rig = many_names();
    let below = |number: &str| [&5_u32.to_le_bytes()[..], &name(number)].concat();
    rig.walk(5, &["below"]).unwrap();
    rig.say(kind::UNLINKAT, &[below("0"), vec![0; 4]].concat()).unwrap();
    attributes(&rig, 10).unwrap();
    // One takes the other's place: both names keep their files.
    rig.say(kind::RENAMEAT, &[below("1"), below("2")].concat()).unwrap();
    for (fid, text) in [(11, b"1"), (12, b"2")] {
        attributes(&rig, fid).unwrap();
        rig.open(fid, linux::O_RDONLY).unwrap();
        assert_eq!(rig.read(fid).unwrap(), text);
    }
    assert_eq!(fs::read(rig.folder.path().join("below/2")).unwrap(), b"1");
}

#[test]
fn a_file_that_the_host_has_made_is_opened() {
    let rig = Rig::new(false);
    let create = |fid: u32, text: &str, flags: u32| {
        rig.walk(fid, &[]).unwrap();
        let made = [words(&[fid]), name(text), words(&[linux::O_RDWR | flags, 0o600, 0])].concat();
        rig.say(kind::LCREATE, &made).map(drop)
    };
    assert_eq!(create(2, "file", linux::O_CREAT | linux::O_EXCL), Err(errno::EEXIST));
    assert_eq!(create(3, "file", linux::O_CREAT), SUCCESS);
    assert_eq!(rig.read(3).unwrap(), b"content");
    for (fid, other) in [(4, "below"), (5, "link"), (6, "pipe")] {
        assert_eq!(create(fid, other, linux::O_CREAT), Err(errno::EEXIST), "{other}");
    }
    assert_eq!(create(7, "file", linux::O_CREAT | linux::O_TRUNC), SUCCESS);
    assert_eq!(rig.read(7).unwrap(), b"");
    // The driver has not checked the rights of another user than root.
    let rig = Rig::with(Share { read_only: false, owners: true });
    for (user, expected) in [(0, SUCCESS), (1234, Err(errno::EEXIST))] {
        let fid = 10 + user;
        let attached = [&words(&[fid, u32::MAX])[..], &name("user"), &name(""), &words(&[user])];
        rig.say(kind::ATTACH, &attached.concat()).unwrap();
        let made = [words(&[fid]), name("file"), words(&[linux::O_RDWR, 0o600, 0])].concat();
        if user == 0 || geteuid().is_root() {
            assert_eq!(rig.say(kind::LCREATE, &made).map(drop), expected, "{user}");
        }
    }
}

#[test]
fn a_folder_keeps_its_set_group_id_bit() {
    let rig = Rig::new(false);
    let folder = rig.folder.path().join("below");
    rig.walk(2, &["below"]).unwrap();
    let set = |mode: u32| rig.say(kind::SETATTR, &[words(&[2, 1, mode]), vec![0; 48]].concat());
    for mode in [0o2770, 0o2755, 0o755] {
        set(mode).unwrap();
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o7777, mode);
    }
    assert_eq!(set(0o4755).map(drop), Err(errno::EPERM));
}

/// The owner of a folder may read its names, and nothing about its files.
#[test]
fn a_folder_of_names_is_listed() {
    let rig = Rig::new(false);
    let folder = rig.folder.path().join("below");
    let other = 1234;
    rustix::fs::chown(&folder, Some(rustix::fs::Uid::from_raw(other)), None).ok();
    fs::set_permissions(rig.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o444)).unwrap();
    if geteuid().is_root() {
        // This thread has no capabilities for files of others then.
        sandbox::set_file_owner(other, other).unwrap();
    }
    assert!(fs::metadata(folder.join("deep")).is_err());
    rig.walk(2, &["below"]).unwrap();
    rig.open(2, linux::O_RDONLY).unwrap();
    let listed = [&words(&[2])[..], &[0; 8], &words(&[1000])].concat();
    let list = rig.say(kind::READDIR, &listed);
    sandbox::set_file_owner(geteuid().as_raw(), getegid().as_raw()).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    let list = list.unwrap();
    assert!(list.windows(4).any(|text| text == b"deep"), "{list:?}");
}
