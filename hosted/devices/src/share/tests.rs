//! The server as a driver uses it, hostile ones included.

use super::*;
use linux_raw_sys::general as linux;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{getegid, geteuid};
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

mod host;

use crate::worker;
use host_linux::sandbox;

/// A driver, and a folder with a file, a subfolder with a file, links and a pipe.
struct Rig {
    server: NinepServer,
    folder: tempfile::TempDir,
}

const ROOT: u32 = 1;
const SUCCESS: Result<(), u32> = Ok(());

impl Rig {
    fn new(read_only: bool) -> Self {
        Self::with(Share { read_only, owners: false })
    }

    fn with(share: Share) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("file"), "content").unwrap();
        fs::create_dir(path("below")).unwrap();
        fs::write(path("below/deep"), "deep").unwrap();
        symlink("/etc/passwd", path("link")).unwrap();
        symlink("/", path("root")).unwrap();
        mknodat(CWD, path("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let served = fs::File::open(folder.path()).unwrap();
        let server = NinepServer::new(served.into(), share).unwrap();
        let rig = Self { server, folder };
        rig.attach();
        rig
    }

    /// Begins a session.
    fn attach(&self) {
        let version = [&8192_u32.to_le_bytes()[..], &name("9P2000.L")].concat();
        self.say(100, &version).unwrap();
        let fids = [ROOT.to_le_bytes(), u32::MAX.to_le_bytes()].concat();
        let attach = [&fids[..], &name("user"), &name(""), &0_u32.to_le_bytes()].concat();
        self.say(104, &attach).unwrap();
    }

    /// Sends a message and returns the fields of the answer.
    fn say(&self, kind: u8, fields: &[u8]) -> Result<Vec<u8>, u32> {
        let mut message = ((HEAD + fields.len()) as u32).to_le_bytes().to_vec();
        message.push(kind);
        message.extend([5, 0]);
        message.extend(fields);
        let answer = self.server.answer(&message);
        assert_eq!(answer[..4], (answer.len() as u32).to_le_bytes());
        assert_eq!(answer[5..HEAD], [5, 0]);
        match answer[4] {
            kind::ERROR => Err(u32::from_le_bytes(answer[HEAD..].try_into().unwrap())),
            other => {
                assert_eq!(other, kind + 1);
                Ok(answer[HEAD..].to_vec())
            }
        }
    }

    /// Walks from the root to `names`, as fid `to`.
    fn walk(&self, to: u32, names: &[&str]) -> Result<(), u32> {
        let mut fields = [ROOT.to_le_bytes(), to.to_le_bytes()].concat();
        fields.extend((names.len() as u16).to_le_bytes());
        names.iter().for_each(|part| fields.extend(name(part)));
        let answer = self.say(kind::WALK, &fields)?;
        // Number of names found.
        if usize::from(answer[0]) == names.len() { Ok(()) } else { Err(errno::ENOENT) }
    }

    fn open(&self, fid: u32, flags: u32) -> Result<(), u32> {
        self.say(kind::LOPEN, &[fid.to_le_bytes(), flags.to_le_bytes()].concat()).map(drop)
    }

    fn read(&self, fid: u32) -> Result<Vec<u8>, u32> {
        let fields = [&fid.to_le_bytes()[..], &[0; 8], &100_u32.to_le_bytes()].concat();
        self.say(116, &fields).map(|answer| answer[4..].to_vec())
    }
}

fn name(text: &str) -> Vec<u8> {
    [&(text.len() as u16).to_le_bytes()[..], text.as_bytes()].concat()
}

#[test]
fn files_are_read() {
    let rig = Rig::new(true);
    assert_eq!(rig.walk(2, &["below", "deep"]), SUCCESS);
    assert_eq!(rig.open(2, linux::O_RDONLY), SUCCESS);
    assert_eq!(rig.read(2).unwrap(), b"deep");
    assert_eq!(rig.walk(3, &["nothing"]), Err(errno::ENOENT));
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn files_are_made_and_changed() {
    let rig = Rig::new(false);
    rig.walk(2, &[]).unwrap();
    let made = [words(&[2]), name("new"), words(&[linux::O_RDWR, 0o600, 0])].concat();
    rig.say(kind::LCREATE, &made).unwrap();
    assert_eq!(rig.say(kind::LCREATE, &made), Err(errno::ENOTDIR), "it is the file's now");
    let written = [&words(&[2, 1, 0, 3])[..], b"abc"].concat();
    assert_eq!(rig.say(kind::WRITE, &written).unwrap(), words(&[3]));
    assert_eq!(rig.read(2).unwrap(), b"\0abc");
    let size = |size: u32| [words(&[2, 8, 0, 0, 0, size, 0]), vec![0; 32]].concat();
    rig.say(kind::SETATTR, &size(2)).unwrap();
    let time = [words(&[2, 0x120, 0, 0, 0]), vec![0; 24], words(&[77, 0, 5, 0])].concat();
    rig.say(kind::SETATTR, &time).unwrap();
    assert_eq!(rig.say(kind::FSYNC, &words(&[2, 1])), Ok(vec![]));
    let found = fs::metadata(rig.folder.path().join("new")).unwrap();
    let mode = found.permissions().mode() & 0o7777;
    assert_eq!((found.len(), found.mtime(), found.mtime_nsec(), mode), (2, 77, 5, 0o600));
    let attributes = rig.say(kind::GETATTR, &words(&[2, !0, !0])).unwrap();
    assert_eq!(attributes.len(), 153);
    assert_eq!(attributes[49..57], 2_u64.to_le_bytes(), "the size");

    let moved = [words(&[ROOT]), name("new"), words(&[ROOT]), name("moved")].concat();
    rig.say(kind::RENAMEAT, &moved).unwrap();
    rig.say(kind::LINK, &[words(&[ROOT, 2]), name("linked")].concat()).unwrap();
    rig.say(kind::MKDIR, &[words(&[ROOT]), name("sub"), words(&[0o700, 0])].concat()).unwrap();
    assert_eq!(fs::read(rig.folder.path().join("linked")).unwrap(), b"\0a");
    let gone = |text: &str, flags| [words(&[ROOT]), name(text), words(&[flags])].concat();
    assert_eq!(rig.say(kind::UNLINKAT, &gone("sub", 0)), Err(errno::EISDIR));
    rig.say(kind::UNLINKAT, &gone("sub", linux::AT_REMOVEDIR)).unwrap();
    rig.say(kind::UNLINKAT, &gone("linked", 0)).unwrap();
    // A fid keeps its file after the name has changed.
    assert_eq!(rig.read(2).unwrap(), b"\0a");
    rig.say(kind::CLUNK, &words(&[2])).unwrap();
    assert_eq!(rig.read(2), Err(errno::EBADF));
    assert_eq!(rig.say(kind::STATFS, &words(&[ROOT])).unwrap().len(), 60);
    rig.walk(3, &["link"]).unwrap();
    assert_eq!(rig.say(kind::READLINK, &words(&[3])).unwrap(), name("/etc/passwd"));
}

#[test]
fn folders_are_listed_in_pieces() {
    let rig = Rig::new(true);
    rig.walk(2, &[]).unwrap();
    rig.open(2, linux::O_RDONLY).unwrap();
    let (mut names, mut offset) = (Vec::new(), 0_u64);
    loop {
        let fields = [&words(&[2])[..], &offset.to_le_bytes(), &words(&[70])].concat();
        let list = rig.say(kind::READDIR, &fields).unwrap().split_off(4);
        let mut rest = &list[..];
        assert!(rest.len() <= 70);
        if rest.is_empty() {
            break;
        }
        while let [_, _, _, _, _, _, _, _, _, _, _, _, _, entry @ ..] = rest {
            offset = u64::from_le_bytes(entry[..8].try_into().unwrap());
            let length = usize::from(u16::from_le_bytes([entry[9], entry[10]]));
            names.push(String::from_utf8(entry[11..11 + length].to_vec()).unwrap());
            rest = &entry[11 + length..];
        }
    }
    names.sort();
    assert_eq!(names, [".", "..", "below", "file", "link", "pipe", "root"]);
    rig.walk(3, &["file"]).unwrap();
    let listed = [&words(&[3])[..], &[0; 8], &words(&[70])].concat();
    assert_eq!(rig.say(kind::READDIR, &listed), Err(errno::ENOTDIR));
}

/// A driver would take the root folders of file systems, which have equal inode numbers, for
/// one.
#[test]
fn files_of_different_file_systems_are_different() {
    let [proc, sys] = ["/proc", "/sys"].map(|path| fs::metadata(path).unwrap());
    assert_eq!(proc.ino(), sys.ino(), "the test is about these");
    let server = NinepServer::new(
        fs::File::open("/").unwrap().into(),
        Share { read_only: true, owners: false },
    )
    .unwrap();
    let rig = Rig { server, folder: tempfile::tempdir().unwrap() };
    rig.attach();
    let number = |path: &str| {
        let names = if path.is_empty() { &[][..] } else { &[path] };
        rig.walk(2, names).unwrap();
        // After the attributes that are valid: type, version, number.
        let answer = rig.say(kind::GETATTR, &words(&[2, !0, !0])).unwrap();
        rig.say(kind::CLUNK, &words(&[2])).unwrap();
        u64::from_le_bytes(answer[13..21].try_into().unwrap())
    };
    let found = ["", "proc", "sys", "proc"].map(number);
    assert_eq!(found[0], fs::metadata("/").unwrap().ino(), "the share's own file system");
    assert_ne!(found[1], found[2]);
    assert_eq!(found[1], found[3]);
}

#[test]
fn a_session_ends_with_the_next_one() {
    let rig = Rig::new(true);
    rig.walk(2, &["file"]).unwrap();
    assert_eq!(rig.walk(2, &["file"]), Err(errno::EBADF), "it is taken");
    let version = [&words(&[1 << 30])[..], &name("9P2000")].concat();
    let most = words(&[MAX_MESSAGE as u32]);
    assert_eq!(rig.say(kind::VERSION, &version).unwrap(), [most, name("unknown")].concat());
    assert_eq!(rig.walk(2, &["file"]), Err(errno::EBADF));
    assert_eq!(rig.open(2, linux::O_RDONLY), Err(errno::EBADF));
}

#[test]
fn a_lookup_is_a_walk_with_attributes() {
    let rig = Rig::new(true);
    let version = [words(&[8192]), name("9P2000.L.lookup")].concat();
    assert_eq!(rig.say(kind::VERSION, &version).unwrap(), version);
    rig.attach();
    let ending = |from: u32, to: u32, text: &str, ended: &[u32]| {
        let ended = [words(&[ended.len() as u32 * 4]), words(ended)].concat();
        rig.say(kind::LOOKUP, &[words(&[from, to]), name(text), ended].concat())
    };
    let look_up = |from: u32, to: u32, text: &str| ending(from, to, text, &[]);
    let attributes = |fid: u32| rig.say(kind::GETATTR, &words(&[fid, 0, 0])).unwrap();
    assert_eq!(look_up(ROOT, 2, "file").unwrap(), attributes(2));
    assert_eq!(rig.open(2, linux::O_RDONLY), SUCCESS);
    assert_eq!(rig.read(2).unwrap(), b"content");
    assert_eq!(look_up(ROOT, 2, "below"), Err(errno::EBADF), "it is taken");
    for text in ["..", ".", "", "below/deep", "/"] {
        assert_eq!(look_up(ROOT, 3, text), Err(errno::EACCES), "{text:?}");
    }
    assert_eq!(look_up(ROOT, 3, "nothing"), Err(errno::ENOENT));
    assert_eq!(look_up(2, 3, "file"), Err(errno::ENOTDIR));
    look_up(ROOT, 3, "link").unwrap();
    assert_eq!(rig.open(3, linux::O_RDONLY), Err(errno::ELOOP), "the link itself");
    // A fid may be replaced by one below it.
    look_up(ROOT, 4, "below").unwrap();
    assert_eq!(look_up(4, 4, "deep").unwrap(), attributes(4));
    // Fids end even if nothing is found, and unknown ones are no error.
    assert_eq!(ending(ROOT, 5, "nothing", &[2, 9, 4]), Err(errno::ENOENT));
    for fid in [2, 4] {
        assert_eq!(rig.say(kind::CLUNK, &words(&[fid])), Err(errno::EBADF), "{fid}");
    }
    ending(ROOT, 3, "below", &[3]).unwrap();
    assert_eq!(ending(3, 4, "deep", &[3]), Err(errno::EBADF), "it has ended");
    let fields = [words(&[ROOT, 4]), name("file"), words(&[3]), vec![0; 3]].concat();
    assert_eq!(rig.say(kind::LOOKUP, &fields), Err(errno::EINVAL), "no number");
}

#[test]
fn nothing_outside_is_named() {
    let rig = Rig::new(false);
    let outside = rig.folder.path().parent().unwrap().join("parador-outside");
    for names in [&[".."][..], &["below", "..", ".."], &["below/../.."], &["/"], &["."], &[""]] {
        assert_eq!(rig.walk(2, names), Err(errno::EACCES), "{names:?}");
    }
    assert_eq!(rig.walk(2, &["root", "etc"]), Err(errno::ENOENT), "links are not followed");
    assert_eq!(rig.walk(2, &["link"]), SUCCESS);
    assert_eq!(rig.open(2, linux::O_RDONLY), Err(errno::ELOOP));
    let made = |kind: u8, before: &[u32], after: &[u8]| {
        let before: Vec<u8> = before.iter().flat_map(|word| word.to_le_bytes()).collect();
        let escape = name("../parador-outside");
        (kind, [&before[..], &escape, after].concat())
    };
    rig.walk(4, &["file"]).unwrap();
    let (old, root) = ([ROOT.to_le_bytes().to_vec(), name("file")].concat(), ROOT.to_le_bytes());
    let renamed = [&old[..], &root, &name("../parador-outside")].concat();
    for (kind, fields) in [
        made(kind::LCREATE, &[ROOT], &[0; 12]),
        made(kind::MKDIR, &[ROOT], &[0; 8]),
        made(kind::UNLINKAT, &[ROOT], &[0; 4]),
        made(kind::LINK, &[ROOT, 4], &[]),
        made(kind::SYMLINK, &[ROOT], &[&name("file")[..], &[0; 4]].concat()),
        made(kind::MKNOD, &[ROOT], &words(&[linux::S_IFIFO | 0o600, 0, 0, 0])),
        (kind::RENAMEAT, renamed),
    ] {
        assert_eq!(rig.say(kind, &fields), Err(errno::EACCES), "{kind}");
    }
    assert!(!outside.exists());
}

#[test]
fn pipes_are_not_opened() {
    let rig = Rig::new(false);
    rig.walk(2, &["pipe"]).unwrap();
    assert_eq!(rig.open(2, linux::O_RDWR), Err(errno::EACCES));
    assert_eq!(rig.open(77, linux::O_RDWR), Err(errno::EBADF));
}

#[test]
fn rights_of_the_user_are_not_lent() {
    let rig = Rig::new(false);
    rig.walk(2, &["file"]).unwrap();
    let set = |fid: u32, valid: u32, mode: u32| {
        [&fid.to_le_bytes()[..], &valid.to_le_bytes(), &mode.to_le_bytes(), &[0; 48]].concat()
    };
    for mode in [0o4755, 0o2755, 0o6000] {
        assert_eq!(rig.say(kind::SETATTR, &set(2, 1, mode)), Err(errno::EPERM));
        let made = [&ROOT.to_le_bytes()[..], &name("new"), &[0; 4], &mode.to_le_bytes()];
        let made = [&made.concat()[..], &[0; 4]].concat();
        assert_eq!(rig.say(kind::LCREATE, &made), Err(errno::EPERM));
    }
    rig.say(kind::SETATTR, &set(2, 1, 0o640)).unwrap();
    rig.walk(3, &["pipe"]).unwrap();
    assert_eq!(rig.say(kind::SETATTR, &set(3, 8, 0)), Err(errno::EACCES), "pipes have no size");
    let mode = fs::metadata(rig.folder.path().join("file")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o640);
}

#[test]
fn a_file_that_is_open_for_reading_is_truncated() {
    const SIZE: u32 = 8;
    let rig = Rig::new(false);
    let path = rig.folder.path().join("file");
    for flags in [linux::O_RDONLY, linux::O_RDWR] {
        fs::write(&path, "text").unwrap();
        rig.walk(flags + 2, &["file"]).unwrap();
        rig.open(flags + 2, flags).unwrap();
        let fields = [&(flags + 2).to_le_bytes()[..], &SIZE.to_le_bytes(), &[0; 52]].concat();
        rig.say(kind::SETATTR, &fields).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 0, "{flags}");
    }
}

#[test]
fn the_number_of_names_is_limited() {
    let mut rig = Rig::new(false);
    rig.server.set_limits(16, 10);
    for number in 0..20 {
        let expected = if number < 9 { SUCCESS } else { Err(errno::ENFILE) };
        assert_eq!(rig.walk(10 + number, &["file"]), expected, "{number}");
    }
    rig.say(kind::CLUNK, &10_u32.to_le_bytes()).unwrap();
    assert_eq!(rig.walk(10, &["file"]), SUCCESS);
}

#[test]
fn a_removed_file_stays_open() {
    let mut rig = Rig::new(false);
    rig.server.set_limits(1, 1000);
    rig.walk(2, &["below", "deep"]).unwrap();
    fs::remove_file(rig.folder.path().join("below/deep")).unwrap();
    for number in 10..200 {
        rig.walk(number, &["file"]).unwrap();
    }
    rig.say(kind::GETATTR, &[&2_u32.to_le_bytes()[..], &[0; 8]].concat()).unwrap();
}

#[test]
fn what_is_read_only_stays() {
    let rig = Rig::new(true);
    rig.walk(2, &["file"]).unwrap();
    for flags in [linux::O_RDWR, linux::O_WRONLY, linux::O_TRUNC] {
        assert_eq!(rig.open(2, flags), Err(errno::EROFS));
    }
    let made = [&ROOT.to_le_bytes()[..], &name("new"), &[0; 12]].concat();
    for kind in [kind::LCREATE, kind::MKDIR, kind::UNLINKAT, kind::SETATTR, kind::WRITE] {
        assert_eq!(rig.say(kind, &made), Err(errno::EROFS), "{kind}");
    }
}

#[test]
fn messages_that_are_none() {
    let rig = Rig::new(false);
    for message in [&[][..], &[1], &[9, 0, 0, 0, kind::WALK, 1, 0, 1, 2], &[0xff; 40]] {
        assert_eq!(rig.server.answer(message)[4], kind::ERROR, "{message:?}");
    }
    // Every kind with every length of zeros.
    for kind in 0..=255 {
        for length in 0..40 {
            let mut message = ((HEAD + length) as u32).to_le_bytes().to_vec();
            message.extend([kind, 0, 0]);
            message.extend(vec![1; length]);
            assert!(rig.server.answer(&message).len() >= HEAD);
        }
    }
}

fn message(kind: u8, tag: u16, fields: &[u8]) -> Vec<u8> {
    let mut message = ((HEAD + fields.len()) as u32).to_le_bytes().to_vec();
    message.push(kind);
    message.extend(tag.to_le_bytes());
    message.extend(fields);
    message
}

/// Opening a file with a lease of another process waits for the holder (fcntl(2), "Leases").
#[test]
fn a_slow_file_holds_nothing_up() {
    let rig = Rig::new(false);
    rig.walk(2, &["file"]).unwrap();
    rig.walk(3, &["below", "deep"]).unwrap();
    let lease = fs::File::options().read(true).write(true).open(rig.folder.path().join("file"));
    let lease = lease.unwrap();
    let control = |command: i32, value: i32| {
        // SAFETY: it takes and gives numbers.
        unsafe { libc::fcntl(lease.as_raw_fd(), command, value) }
    };
    // The lease break is reported by an ignored signal.
    assert_eq!(control(linux::F_SETSIG as i32, libc::SIGURG), 0);
    assert_eq!(control(libc::F_SETLEASE, libc::F_WRLCK), 0);

    let Rig { server, folder: _folder } = rig;
    let mut machine = worker::testing::Rig::new(server, 2);
    let done = |id: u16| (id, status::DONE);
    let numbers = |numbers: &[u32]| -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    };
    machine.say(9, &message(kind::LOPEN, 7, &numbers(&[2, linux::O_RDWR])));
    while control(libc::F_GETLEASE, 0) == libc::F_WRLCK {
        std::thread::yield_now();
    }
    machine.say(1, &message(kind::FLUSH, 8, &7_u16.to_le_bytes()));
    machine.say(2, &message(kind::LOPEN, 10, &numbers(&[3, linux::O_RDONLY])));
    assert_eq!(machine.ended(), done(2));
    machine.say(3, &message(kind::READ, 11, &numbers(&[3, 0, 0, 100])));
    assert_eq!(machine.ended(), done(3));
    machine.say(4, &message(kind::CLUNK, 12, &numbers(&[3])));
    assert_eq!(machine.ended(), done(4));
    let answer = |id: u64, length: usize| {
        let mut answer = vec![0; length];
        machine.memory.read_slice((id << 13) + 4096, &mut answer).unwrap();
        answer
    };
    assert_eq!(answer(3, 15), [&[15, 0, 0, 0, 117, 11, 0, 4, 0, 0, 0], &b"deep"[..]].concat());
    assert!(machine.client.completed().is_none(), "what is flushed has not ended");
    // Fails if the host has broken the lease meanwhile.
    assert_eq!(control(libc::F_SETLEASE, libc::F_UNLCK), 0);
    assert_eq!((machine.ended(), machine.ended()), (done(9), done(1)));
    let kind = |id: u64| {
        let mut head = [0; HEAD];
        machine.memory.read_slice((id << 13) + 4096, &mut head).unwrap();
        head[4]
    };
    assert_eq!((kind(9), kind(1)), (kind::LOPEN + 1, kind::FLUSH + 1));
    let counted = machine.counters.ops.each_ref().map(|op| op.totals());
    let counted = counted.map(|op| (op.requests, op.failed, op.bytes));
    assert_eq!(counted, [(1, 0, 4), (0, 0, 0), (4, 0, 0), (0, 0, 0)]);
}

#[test]
fn data_and_errors_are_counted() {
    let count = |message: &[u8], answer: &[u8]| {
        let (status, op) = (status::DONE, None);
        let mut executed = Executed { status, op, bytes: 0, is_failed: false };
        super::count(message, answer, &mut executed);
        (executed.op, executed.bytes, executed.is_failed)
    };
    let answer = |kind: u8, bytes: u32| message(kind, 1, &bytes.to_le_bytes());
    use counters::op::{OTHER, READ, WRITE};
    for (kind, counted) in [
        (kind::READ, (Some(READ), 7, false)),
        (kind::WRITE, (Some(WRITE), 7, false)),
        (kind::WALK, (Some(OTHER), 0, false)),
    ] {
        assert_eq!(count(&message(kind, 1, &[]), &answer(kind + 1, 7)), counted);
    }
    let error = answer(kind::ERROR, errno::ENOENT);
    assert!(count(&message(kind::READ, 1, &[]), &error).2);
    assert_eq!(count(&[], &error), (Some(OTHER), 0, true));
}

/// Creates a node in the root.
fn node(rig: &Rig, text: &str, mode: u32, major: u32, minor: u32) -> Result<(), u32> {
    let fields = [words(&[ROOT]), name(text), words(&[mode, major, minor, u32::MAX])].concat();
    rig.say(kind::MKNOD, &fields).map(drop)
}

#[test]
fn links_and_nodes_are_made_and_not_followed() {
    let rig = Rig::new(false);
    let path = |text: &str| rig.folder.path().join(text);
    let link = |text: &str, target: &str| {
        let fields = [words(&[ROOT]), name(text), name(target), words(&[7])].concat();
        rig.say(kind::SYMLINK, &fields).map(drop)
    };
    let long = "x".repeat(4096);
    for target in ["/etc/passwd", "..", "../../..", "nowhere", "a b"] {
        assert_eq!(link("new", target), SUCCESS);
        assert_eq!(fs::read_link(path("new")).unwrap().to_str(), Some(target));
        assert_eq!(rig.walk(2, &["new"]), SUCCESS);
        assert_eq!(rig.say(kind::READLINK, &words(&[2])).unwrap(), name(target));
        assert_eq!(rig.open(2, linux::O_RDONLY), Err(errno::ELOOP));
        assert_eq!(rig.walk(3, &["new", "passwd"]), Err(errno::ENOENT));
        // Its own attributes change, not those of its target.
        let set = |valid: u32, rest: [u32; 5]| {
            [&words(&[2, valid])[..], &words(&rest), &[0; 32]].concat()
        };
        assert_ne!(rig.say(kind::SETATTR, &set(1, [0o777, 0, 0, 0, 0])), Ok(vec![]));
        assert_eq!(rig.say(kind::SETATTR, &set(8, [0; 5])), Err(errno::ELOOP));
        // A hard link to the link is one to itself.
        rig.say(kind::LINK, &[words(&[ROOT, 2]), name("second")].concat()).unwrap();
        assert_eq!(fs::read_link(path("second")).unwrap().to_str(), Some(target));
        rig.say(kind::CLUNK, &words(&[2])).unwrap();
        fs::remove_file(path("new")).and_then(|()| fs::remove_file(path("second"))).unwrap();
    }
    assert_eq!(link("new", ""), Err(errno::ENOENT));
    assert_eq!(link("new", &long), Err(errno::ENAMETOOLONG));
    assert_eq!(link("new", "zero\0inside"), Err(errno::EINVAL));
    assert_eq!(link("file", "/"), Err(errno::EEXIST));

    for (text, kind) in [("p", linux::S_IFIFO), ("s", linux::S_IFSOCK), ("r", linux::S_IFREG)] {
        assert_eq!(node(&rig, text, kind | 0o600, 1, 3), SUCCESS);
        assert_eq!(fs::symlink_metadata(path(text)).unwrap().mode(), kind | 0o600);
    }
    assert_eq!(node(&rig, "p", linux::S_IFIFO | 0o600, 0, 0), Err(errno::EEXIST));
    for (kind, error) in [
        (linux::S_IFCHR, errno::EPERM),
        (linux::S_IFBLK, errno::EPERM),
        (linux::S_IFREG | linux::S_ISUID, errno::EPERM),
        (linux::S_IFDIR, errno::EINVAL),
        (linux::S_IFLNK, errno::EINVAL),
        (0, errno::EINVAL),
    ] {
        assert_eq!(node(&rig, "n", kind | 0o600, 1, 3), Err(error), "{kind:o}");
    }
    // A fid of another share, or of none.
    assert_eq!(rig.say(kind::LINK, &[words(&[ROOT, 88]), name("n")].concat()), Err(errno::EBADF));
    assert!(!path("n").exists());
}

/// Requests about extended attributes of fid 2.
struct Attributes<'a>(&'a Rig);

impl Attributes<'_> {
    /// Returns a value, or the list of names.
    fn get(&self, text: &str) -> Result<Vec<u8>, u32> {
        let Self(rig) = self;
        let length = rig.say(kind::XATTRWALK, &[words(&[2, 9]), name(text)].concat())?;
        let value = rig.read(9).unwrap();
        assert_eq!(length, (value.len() as u64).to_le_bytes());
        assert_eq!(rig.open(9, linux::O_RDONLY), Err(errno::EINVAL));
        assert_eq!(rig.say(kind::WRITE, &words(&[9, 0, 0, 0])), Err(errno::EBADF));
        rig.say(kind::CLUNK, &words(&[9])).unwrap();
        Ok(value)
    }

    /// Sets a value of `length` bytes of which `value` is sent.
    fn set(&self, text: &str, value: &[u8], length: u32, flags: u32) -> Result<(), u32> {
        let Self(rig) = self;
        let fields = (words(&[2, 8, 0]), words(&[8]), words(&[length, 0, flags]));
        rig.say(kind::WALK, &[&fields.0[..8], &[0, 0]].concat()).unwrap();
        let begun = rig.say(kind::XATTRCREATE, &[fields.1, name(text), fields.2].concat());
        let written = begun.and_then(|_| {
            let count = value.len() as u32;
            rig.say(kind::WRITE, &[&words(&[8, 0, 0, count])[..], value].concat())
        });
        let ended = rig.say(kind::CLUNK, &words(&[8]));
        written.and(ended).map(drop)
    }
}

#[test]
fn attributes_of_users_are_kept() {
    const REPLACE: u32 = 2;
    let rig = Rig::new(false);
    rig.walk(2, &["file"]).unwrap();
    let at = Attributes(&rig);
    assert_eq!(at.get(""), Ok(vec![]));
    assert_eq!(at.set("user.a", b"one", 3, 0), SUCCESS);
    assert_eq!(at.set("user.b", b"", 0, 0), SUCCESS);
    let mut list = at.get("").unwrap();
    list.sort_unstable();
    assert_eq!(list, b"\0\0..abeerrssuu");
    assert_eq!((at.get("user.a"), at.get("user.b")), (Ok(b"one".into()), Ok(vec![])));
    assert_eq!(at.get("user.c"), Err(errno::ENODATA));
    assert_eq!(at.set("user.a", b"", 0, REPLACE), SUCCESS, "it is removed");
    assert_eq!(at.get("user.a"), Err(errno::ENODATA));
    // Incomplete, too long, of other kinds.
    assert_eq!(at.set("user.d", b"one", 4, 0), Err(errno::EINVAL));
    assert_eq!(at.set("user.d", b"one", 2, 0), Err(errno::EINVAL));
    assert_eq!(at.set("user.d", b"", u32::MAX, 0), Err(errno::E2BIG));
    for text in ["user.", "security.capability", "security.selinux", "trusted.a", "system.b"] {
        assert_eq!(at.get(text), Err(errno::EOPNOTSUPP), "{text}");
        assert_eq!(at.set(text, b"one", 3, 0), Err(errno::EOPNOTSUPP), "{text}");
    }
    assert_eq!(at.get("user.d"), Err(errno::ENODATA));
    // Links to files outside of the folder have none of their targets' attributes.
    rig.say(kind::CLUNK, &words(&[2])).unwrap();
    rig.walk(2, &["link"]).unwrap();
    assert_eq!(at.set("user.a", b"one", 3, 0), Err(errno::EPERM));
}

#[test]
fn attributes_are_limited() {
    let rig = Rig::new(false);
    rig.walk(2, &["file"]).unwrap();
    let list = |fid: u32| rig.say(kind::XATTRWALK, &[words(&[2, fid]), name("")].concat());
    for fid in 0..256 {
        assert!(list(1000 + fid).is_ok());
    }
    assert_eq!(list(3000), Err(errno::ENOBUFS));
    rig.say(kind::CLUNK, &words(&[1000])).unwrap();
    assert!(list(3000).is_ok());
    rig.say(kind::CLUNK, &words(&[1001])).unwrap();
    assert_eq!(list(3000), Err(errno::EBADF), "it is taken");
}

/// Files get their owner and mode, of which the usual mask (022) clears nothing here; only root may
/// use other ids than its own.
#[test]
fn owners_are_the_guest_s() {
    let rig = Rig::with(Share { read_only: false, owners: true });
    let own = (geteuid().as_raw(), getegid().as_raw());
    let ids = if own.0 == 0 {
        sandbox::keep_capabilities_of_other_users().unwrap();
        (1234, 4321)
    } else {
        own
    };
    let attached = [&words(&[3, u32::MAX])[..], &name("user"), &name(""), &words(&[ids.0])];
    rig.say(kind::ATTACH, &attached.concat()).unwrap();
    let copy = |to: u32| rig.say(kind::WALK, &[&words(&[3, to])[..], &[0, 0]].concat()).unwrap();
    copy(4);
    let made = [words(&[4]), name("f"), words(&[linux::O_RDWR, 0o6751, ids.1])].concat();
    rig.say(kind::LCREATE, &made).unwrap();
    rig.say(kind::MKDIR, &[words(&[3]), name("d"), words(&[0o1755, ids.1])].concat()).unwrap();
    rig.say(kind::SYMLINK, &[words(&[3]), name("l"), name("f"), words(&[ids.1])].concat()).unwrap();
    let fields = [words(&[3]), name("p"), words(&[linux::S_IFIFO | 0o644, 0, 0, ids.1])].concat();
    rig.say(kind::MKNOD, &fields).unwrap();
    let found = |text: &str| {
        let found = fs::symlink_metadata(rig.folder.path().join(text)).unwrap();
        ((found.uid(), found.gid()), found.mode() & 0o7777)
    };
    let all = ["f", "d", "l", "p"].map(found);
    assert_eq!(all, [0o6751, 0o1755, 0o777, 0o644].map(|mode| (ids, mode)));
    // Its owner writes to it.
    let write = |fid: u32| rig.say(kind::WRITE, &[&words(&[fid, 0, 0, 1])[..], b"x"].concat());
    write(4).unwrap();
    assert_eq!(found("f").1, 0o751, "as Linux does");
    // By the first fid files belong to this process; the thread's ids are its own again.
    assert_eq!(node(&rig, "own", linux::S_IFREG | 0o600, 0, 0), SUCCESS);
    assert_eq!(found("own").0, own);

    rig.walk(5, &["f"]).unwrap();
    let set = |valid: u32, mode, user, group| {
        [&words(&[5, valid, mode, user, group])[..], &[0; 40]].concat()
    };
    // The owner's change does not clear the bits of the mode that is set with it.
    rig.say(kind::SETATTR, &set(7, 0o4711, own.0, own.1)).unwrap();
    assert_eq!(found("f"), (own, 0o4711));
    if own.0 == 0 {
        rig.open(5, linux::O_RDWR).unwrap();
        write(5).unwrap();
        assert_eq!(found("f").1, 0o4711, "root keeps them");
    }
    rig.say(kind::SETATTR, &set(2, 0, own.0, 0)).unwrap();
    assert_eq!(found("f").1, 0o711, "as Linux does");
    rig.say(kind::SETATTR, &set(6, 0, u32::MAX, u32::MAX)).unwrap();
    assert_eq!(found("f").0, own, "all ones: unchanged");
    for (major, minor) in [(1 << 12, 0), (0, 1 << 20), (u32::MAX, u32::MAX)] {
        assert_eq!(node(&rig, "n", linux::S_IFCHR, major, minor), Err(errno::EINVAL));
    }
    if own.0 == 0 {
        // A number that the kernel of the guest decodes in the same way.
        assert_eq!(node(&rig, "n", linux::S_IFCHR | 0o600, 0xfff, 0xf_ffff), SUCCESS);
        assert_eq!(fs::metadata(rig.folder.path().join("n")).unwrap().rdev(), 0xffff_ffff_u64);
    } else {
        assert_eq!(node(&rig, "n", linux::S_IFCHR | 0o600, 1, 3), Err(errno::EPERM));
    }
}
