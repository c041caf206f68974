//! A shared directory: 9P2000.L below one folder of the host.
//!
//! The protocol is the library's (`p9`), which opens each name relative to its folder and never follows a symbolic link. What it leaves to a jail is
//! refused before it sees it ([`Guard::judge`]): names that are paths, `..`, and opening what is neither a file nor a folder. So a guest names
//! nothing outside of the folder, whatever links are in it and whoever moves them about.

use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use linux_raw_sys::errno;
use linux_raw_sys::general as linux;
use p9::Server;
use proto::requests::status;
use proto::wedge::layout;

use crate::confine::{Failed, Files, confine};
use crate::worker::{Machine, Serve, Taken, Worker, split};

/// Most bytes of a message: those that the library agrees upon with the driver.
const MOST_MESSAGE: usize = 64 * 1024 + 24;

/// What a process is told of its shared directory, whose descriptor is [`layout::DISKS_FD`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Share {
    /// Nothing is changed.
    pub read_only: bool,
}

/// Serves a shared directory, until `end`.
///
/// # Errors
/// The process cannot be set up.
pub fn serve_share(machine: Machine, share: Share, end: &AtomicBool) -> Result<(), Failed> {
    let worker = Worker::new(machine)?;
    // SAFETY: `parador run` starts the program with this descriptor, and nothing else of it uses it.
    let folder = unsafe { OwnedFd::from_raw_fd(layout::DISKS_FD as i32) };
    // The library wants a path whose last part is no link.
    let root = format!("/proc/self/fd/{}/.", layout::DISKS_FD);
    let mut guard = Guard::new(Path::new(&root), share)?;
    let folder = folder.as_fd();
    confine(if share.read_only { Files::Read(folder) } else { Files::Change(folder) })?;
    Ok(worker.serve(&mut guard, end)?)
}

impl Serve for Guard {
    fn act(&mut self, taken: &Taken<'_>) -> u8 {
        answer(self, taken)
    }
}

/// Answers a message in guest memory.
fn answer(guard: &mut Guard, taken: &Taken<'_>) -> u8 {
    let Some((message, room)) = split(taken) else { return status::FAILED };
    let done = taken.read(message, MOST_MESSAGE).and_then(|message| {
        let answer = guard.answer(&message);
        let most: u64 = room.iter().map(|part| u64::from(part.1)).sum();
        // A driver that has too little room has not made what it asked for fit.
        let answer =
            if answer.len() as u64 > most { error(tag(&message), errno::EMSGSIZE) } else { answer };
        taken.write(room, &answer)?;
        Some((answer.len() as u64).min(most))
    });
    taken.set_answer(done.unwrap_or(0) as u32);
    if done.is_some() { status::DONE } else { status::FAILED }
}

/// Types of messages (`include/net/9p/9p.h` in Linux).
mod kind {
    pub const ERROR: u8 = 7;
    pub const LOPEN: u8 = 12;
    pub const LCREATE: u8 = 14;
    pub const SYMLINK: u8 = 16;
    pub const MKNOD: u8 = 18;
    pub const RENAME: u8 = 20;
    pub const GETATTR: u8 = 24;
    pub const SETATTR: u8 = 26;
    pub const XATTRCREATE: u8 = 32;
    pub const LINK: u8 = 70;
    pub const MKDIR: u8 = 72;
    pub const RENAMEAT: u8 = 74;
    pub const UNLINKAT: u8 = 76;
    pub const WALK: u8 = 110;
    pub const WRITE: u8 = 118;
    pub const REMOVE: u8 = 122;
}

/// Bytes of a message before what it says: length (32 bits), type (8), tag (16).
const HEAD: usize = 7;

/// The server, behind what is refused.
struct Guard {
    server: Server,
    share: Share,
}

impl Guard {
    fn new(root: &Path, share: Share) -> Result<Self, Failed> {
        let server = Server::new(root, Default::default(), Default::default());
        let server = server.map_err(|error| Failed::new("server of files", error))?;
        Ok(Self { server, share })
    }

    /// The answer to a message; one that is none has no tag to answer to, and is answered nevertheless.
    fn answer(&mut self, message: &[u8]) -> Vec<u8> {
        match self.judge(message) {
            Ok(()) => self.hand_on(message).unwrap_or_else(|| error(tag(message), errno::EIO)),
            Err(number) => error(tag(message), number),
        }
    }

    fn hand_on(&mut self, message: &[u8]) -> Option<Vec<u8>> {
        let mut answer = Vec::new();
        self.server.handle_message(&mut &message[..], &mut answer).ok()?;
        Some(answer)
    }

    /// What the library does not refuse itself.
    fn judge(&mut self, message: &[u8]) -> Result<(), u32> {
        let mut fields = Fields(message.get(HEAD..).ok_or(errno::EINVAL)?);
        let kind = message[4];
        let changes = [
            kind::LCREATE,
            kind::SYMLINK,
            kind::MKNOD,
            kind::RENAME,
            kind::SETATTR,
            kind::XATTRCREATE,
            kind::LINK,
            kind::MKDIR,
            kind::RENAMEAT,
            kind::UNLINKAT,
            kind::WRITE,
            kind::REMOVE,
        ];
        if self.share.read_only && changes.contains(&kind) {
            return Err(errno::EROFS);
        }
        match kind {
            kind::WALK => {
                fields.skip(8)?;
                let count = fields.half()?;
                (0..count).try_for_each(|_| fields.name())
            }
            kind::LCREATE => {
                fields.skip(4)?;
                fields.name()?;
                fields.skip(4)?;
                may_have_mode(fields.word()?)
            }
            kind::MKDIR | kind::UNLINKAT => {
                fields.skip(4)?;
                fields.name()
            }
            kind::SETATTR => {
                /// Fields that are valid: mode, size (`include/net/9p/9p.h`).
                const MODE: u32 = 1;
                const SIZE: u32 = 8;
                let fid = fields.word()?;
                let valid = fields.word()?;
                if valid & MODE != 0 {
                    may_have_mode(fields.word()?)?;
                }
                // The library opens the file for that.
                if valid & SIZE != 0 { self.may_be_opened(fid) } else { Ok(()) }
            }
            kind::LINK => {
                fields.skip(8)?;
                fields.name()
            }
            kind::RENAMEAT => {
                fields.skip(4)?;
                fields.name()?;
                fields.skip(4)?;
                fields.name()
            }
            kind::LOPEN => {
                let fid = fields.word()?;
                let flags = fields.word()?;
                let writes = linux::O_ACCMODE | linux::O_CREAT | linux::O_TRUNC;
                if self.share.read_only && flags & writes != 0 {
                    return Err(errno::EROFS);
                }
                self.may_be_opened(fid)
            }
            _ => Ok(()),
        }
    }

    /// Pipes would make the server wait; devices are the host's.
    fn may_be_opened(&mut self, fid: u32) -> Result<(), u32> {
        /// Offset of the mode in an answer: behind which fields are valid (64 bits) and the file's identity (13 bytes).
        const MODE: usize = HEAD + 8 + 13;
        let mut question = Vec::new();
        question.extend(((HEAD + 4 + 8) as u32).to_le_bytes());
        question.push(kind::GETATTR);
        question.extend(u16::MAX.to_le_bytes());
        question.extend(fid.to_le_bytes());
        question.extend(u64::MAX.to_le_bytes());
        let answer = self.hand_on(&question).ok_or(errno::EIO)?;
        if answer.get(4) != Some(&(kind::GETATTR + 1)) {
            // The library says why.
            return Ok(());
        }
        let mode = Fields(answer.get(MODE..).unwrap_or(&[])).word()?;
        match mode & linux::S_IFMT {
            linux::S_IFREG | linux::S_IFDIR => Ok(()),
            linux::S_IFLNK => Err(errno::ELOOP),
            _ => Err(errno::EACCES),
        }
    }
}

/// A program of the guest's that runs with the rights of this host's user, for others of this host, is not made.
fn may_have_mode(mode: u32) -> Result<(), u32> {
    if mode & (linux::S_ISUID | linux::S_ISGID) != 0 { Err(errno::EPERM) } else { Ok(()) }
}

fn tag(message: &[u8]) -> [u8; 2] {
    message.get(5..HEAD).and_then(|tag| tag.try_into().ok()).unwrap_or([0xff; 2])
}

/// The answer that something has failed.
fn error(tag: [u8; 2], number: u32) -> Vec<u8> {
    let mut answer = ((HEAD + 4) as u32).to_le_bytes().to_vec();
    answer.push(kind::ERROR);
    answer.extend(tag);
    answer.extend(number.to_le_bytes());
    answer
}

/// What is left of a message.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], u32> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(errno::EINVAL)?;
        self.0 = rest;
        Ok(taken)
    }

    fn skip(&mut self, length: usize) -> Result<(), u32> {
        self.take(length).map(drop)
    }

    fn half(&mut self) -> Result<u16, u32> {
        Ok(u16::from_le_bytes(self.take(2)?.try_into().map_err(|_| errno::EINVAL)?))
    }

    fn word(&mut self) -> Result<u32, u32> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().map_err(|_| errno::EINVAL)?))
    }

    /// A name of something in a folder.
    fn name(&mut self) -> Result<(), u32> {
        let length = self.half()?;
        match self.take(length.into())? {
            b"" | b"." | b".." => Err(errno::EACCES),
            name if name.contains(&b'/') => Err(errno::EACCES),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// A driver, and a folder with a file, a folder with a file, links and a pipe.
    struct Rig {
        guard: Guard,
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
            let guard = Guard::new(folder.path(), Share { read_only }).unwrap();
            let mut rig = Self { guard, folder };
            let version = [&8192_u32.to_le_bytes()[..], &name("9P2000.L")].concat();
            rig.say(100, &version).unwrap();
            let fids = [ROOT.to_le_bytes(), u32::MAX.to_le_bytes()].concat();
            let attach = [&fids[..], &name("user"), &name(""), &0_u32.to_le_bytes()].concat();
            rig.say(104, &attach).unwrap();
            rig
        }

        /// Sends a message; gives what the answer says.
        fn say(&mut self, kind: u8, fields: &[u8]) -> Result<Vec<u8>, u32> {
            let mut message = ((HEAD + fields.len()) as u32).to_le_bytes().to_vec();
            message.push(kind);
            message.extend([5, 0]);
            message.extend(fields);
            let answer = self.guard.answer(&message);
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

        /// Goes from the root to `names`, as fid `to`.
        fn walk(&mut self, to: u32, names: &[&str]) -> Result<(), u32> {
            let mut fields = [ROOT.to_le_bytes(), to.to_le_bytes()].concat();
            fields.extend((names.len() as u16).to_le_bytes());
            names.iter().for_each(|part| fields.extend(name(part)));
            let answer = self.say(kind::WALK, &fields)?;
            // As many as were found.
            if usize::from(answer[0]) == names.len() { Ok(()) } else { Err(errno::ENOENT) }
        }

        fn open(&mut self, fid: u32, flags: u32) -> Result<(), u32> {
            self.say(kind::LOPEN, &[fid.to_le_bytes(), flags.to_le_bytes()].concat()).map(drop)
        }

        fn read(&mut self, fid: u32) -> Result<Vec<u8>, u32> {
            let fields = [&fid.to_le_bytes()[..], &[0; 8], &100_u32.to_le_bytes()].concat();
            self.say(116, &fields).map(|answer| answer[4..].to_vec())
        }
    }

    fn name(text: &str) -> Vec<u8> {
        [&(text.len() as u16).to_le_bytes()[..], text.as_bytes()].concat()
    }

    #[test]
    fn files_are_read() {
        let mut rig = Rig::new(true);
        assert_eq!(rig.walk(2, &["below", "deep"]), SUCCESS);
        assert_eq!(rig.open(2, linux::O_RDONLY), SUCCESS);
        assert_eq!(rig.read(2).unwrap(), b"deep");
        assert_eq!(rig.walk(3, &["nothing"]), Err(errno::ENOENT));
    }

    #[test]
    fn nothing_outside_is_named() {
        let mut rig = Rig::new(false);
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
        let mut rig = Rig::new(false);
        rig.walk(2, &["pipe"]).unwrap();
        assert_eq!(rig.open(2, linux::O_RDWR), Err(errno::EACCES));
        assert_eq!(rig.open(77, linux::O_RDWR), Err(errno::EBADF));
    }

    #[test]
    fn rights_of_the_user_are_not_lent() {
        let mut rig = Rig::new(false);
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
        let mut rig = Rig::new(true);
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
        let mut rig = Rig::new(false);
        for message in [&[][..], &[1], &[9, 0, 0, 0, kind::WALK, 1, 0, 1, 2], &[0xff; 40]] {
            assert_eq!(rig.guard.answer(message)[4], kind::ERROR, "{message:?}");
        }
        // Every kind with every length of nothing much.
        for kind in 0..=255 {
            for length in 0..40 {
                let mut message = ((HEAD + length) as u32).to_le_bytes().to_vec();
                message.extend([kind, 0, 0]);
                message.extend(vec![1; length]);
                assert!(rig.guard.answer(&message).len() >= HEAD);
            }
        }
    }
}
