//! Shared directory: 9P messages in guest memory, which a [`NinepServer`] answers below one folder
//! of the host.

use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::AtomicBool;

use linux_raw_sys::errno;
use proto::hosted::layout;
use proto::requests::status;

use crate::confine::{FileAccess, SetupError, confine};
use crate::ninep::{HEAD, MAX_MESSAGE, NinepServer, error, kind, tag};
use crate::worker::{AnswerOrder, GuestQueue, Serve, TakenRequest, Worker, split};

/// Messages served in parallel; further ones wait while all of them wait for the host.
const THREADS: usize = 8;

/// Configuration of a shared directory; its descriptor is [`layout::DISKS_FD`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Share {
    /// Read-only.
    pub read_only: bool,
}

/// Serves a shared directory until `end`.
///
/// # Errors
/// The process cannot be set up.
pub fn serve_share(machine: GuestQueue, share: Share, end: &AtomicBool) -> Result<(), SetupError> {
    let worker = Worker::new(machine)?;
    // SAFETY: `parador run` starts the program with this descriptor, and no other code of it uses
    // it.
    let folder = unsafe { OwnedFd::from_raw_fd(layout::DISKS_FD as i32) };
    let server = NinepServer::new(folder, share.read_only);
    let server =
        server.map_err(|error| SetupError::host("cannot set up the 9P server", &error.into()))?;
    let folder = server.folder();
    let files = if share.read_only { FileAccess::Read(folder) } else { FileAccess::Change(folder) };
    let threads = confine(files, THREADS)?;
    Ok(worker.serve(server, &threads, end)?)
}

impl Serve for NinepServer {
    /// Messages have tags, and a flush is answered after the flushed message. Requests are not
    /// aborted: a completed change is better than half of one.
    fn order(&self, taken: &TakenRequest<'_>) -> AnswerOrder {
        let mut head = [0; HEAD + 2];
        let Some((message, _)) = split(taken) else { return AnswerOrder::Free };
        let length = taken.read_into(message, &mut head);
        let tag = u16::from_le_bytes([head[5], head[6]]);
        match (head[4], length) {
            (kind::FLUSH, 9) => AnswerOrder::After(u16::from_le_bytes([head[7], head[8]])),
            (_, HEAD..) => AnswerOrder::Named(tag),
            _ => AnswerOrder::Free,
        }
    }

    fn execute(&self, taken: &TakenRequest<'_>) -> u8 {
        let Some((message, room)) = split(taken) else { return status::FAILED };
        let done = taken.read(message, MAX_MESSAGE).and_then(|message| {
            let answer = self.answer(&message);
            let most: u64 = room.iter().map(|part| u64::from(part.1)).sum();
            // The driver has provided too little space for the answer.
            let answer = if answer.len() as u64 > most {
                error(tag(&message), errno::EMSGSIZE)
            } else {
                answer
            };
            taken.write(room, &answer)?;
            Some((answer.len() as u64).min(most))
        });
        taken.set_answer(done.unwrap_or(0) as u32);
        if done.is_some() { status::DONE } else { status::FAILED }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linux_raw_sys::general as linux;
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::fs;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use crate::worker;

    /// A driver, and a folder with a file, a subfolder with a file, links and a pipe.
    struct Rig {
        server: NinepServer,
        folder: tempfile::TempDir,
    }

    const ROOT: u32 = 1;
    const SUCCESS: Result<(), u32> = Ok(());

    impl Rig {
        fn new(read_only: bool) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = |name: &str| folder.path().join(name);
            fs::write(path("file"), "content").unwrap();
            fs::create_dir(path("below")).unwrap();
            fs::write(path("below/deep"), "deep").unwrap();
            symlink("/etc/passwd", path("link")).unwrap();
            symlink("/", path("root")).unwrap();
            mknodat(CWD, path("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
            let served = fs::File::open(folder.path()).unwrap();
            let server = NinepServer::new(served.into(), read_only).unwrap();
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
        for refused in [kind::SYMLINK, kind::MKNOD] {
            assert_eq!(rig.say(refused, &[0; 40]), Err(errno::EACCES));
        }
        assert_eq!(rig.say(kind::XATTRCREATE, &[0; 40]), Err(errno::EOPNOTSUPP));
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
        let server = NinepServer::new(fs::File::open("/").unwrap().into(), true).unwrap();
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
    fn nothing_outside_is_named() {
        let rig = Rig::new(false);
        let outside = rig.folder.path().parent().unwrap().join("parador-outside");
        for names in [&[".."][..], &["below", "..", ".."], &["below/../.."], &["/"], &["."], &[""]]
        {
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
        let (old, root) =
            ([ROOT.to_le_bytes().to_vec(), name("file")].concat(), ROOT.to_le_bytes());
        let renamed = [&old[..], &root, &name("../parador-outside")].concat();
        for (kind, fields) in [
            made(kind::LCREATE, &[ROOT], &[0; 12]),
            made(kind::MKDIR, &[ROOT], &[0; 8]),
            made(kind::UNLINKAT, &[ROOT], &[0; 4]),
            made(kind::LINK, &[ROOT, 4], &[]),
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
    }
}
