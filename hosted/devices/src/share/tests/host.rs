//! Folders that the host changes, too, and files whose descriptors were closed meanwhile.

use super::*;

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
    let attributes =
        |fid: u32| rig.say(kind::GETATTR, &[&fid.to_le_bytes()[..], &[0; 8]].concat()).map(drop);
    rig.walk(5, &["below"]).unwrap();
    rig.say(kind::UNLINKAT, &[below("0"), vec![0; 4]].concat()).unwrap();
    attributes(10).unwrap();
    // One takes the other's place: both names keep their files.
    rig.say(kind::RENAMEAT, &[below("1"), below("2")].concat()).unwrap();
    for (fid, text) in [(11, b"1"), (12, b"2")] {
        attributes(fid).unwrap();
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
