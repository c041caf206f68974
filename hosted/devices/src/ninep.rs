//! 9P2000.L server below one folder of the host, for several requests in parallel.
//!
//! State: the names that the driver holds (fids), each with a file ([`named_files`]), and the
//! negotiated sizes.
//! No lock is held during system calls, except that of one file while it is opened again: a request
//! first takes references to its fids, and a fid that is dropped meanwhile lives until its last
//! request ends. Two listings by one fid are serialized.
//!
//! Every name is a single path component, looked up relative to the descriptor of its folder
//! without following links. Only files and folders are opened. The guest thus cannot name anything
//! outside of the folder, whatever links it contains and however the host moves folders. The target
//! of a symbolic link is text for the server.
//!
//! With [`Share::owners`] the process has capabilities for files of all owners, and a new file is
//! created as its owner (`entries`). Permissions are the guest kernel's concern then.
//! Missing: locks (the driver has its own), messages that Linux does not send.
//! Documentation: `include/net/9p/9p.h` and `net/9p/client.c` in Linux, the description of 9P2000.L
//! at <https://github.com/chaos/diod/blob/master/protocol.md>, intro(5) of Plan 9.

mod entries;
mod fids;
mod message;
mod named_files;
mod xattr;

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use linux_raw_sys::errno;
use linux_raw_sys::general as linux;
use rustix::fs::{self, AtFlags, Mode, OFlags, RawDir, SeekFrom, Timespec, Timestamps};
use rustix::fs::{Gid, Uid};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{getegid, geteuid};

use entries::Ids;
use fids::{Fid, Fids, MAX_PATH_BYTES};
use message::{Answer, Devices, Fields};
pub use message::{error, tag};
use named_files::NamedFiles;

use crate::confine::most_files;

/// Configuration of a shared directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Share {
    /// Read-only.
    pub read_only: bool,
    /// The guest creates and changes files of any owner, with all bits of their modes, and device
    /// nodes. The process must have root's capabilities.
    pub owners: bool,
}

/// Longest message in bytes: 1 MiB of data and their header.
pub const MAX_MESSAGE: usize = (1 << 20) + 24;
/// Shortest message size that a driver may negotiate.
const MIN_MESSAGE: u32 = 256;

/// Most names of one walk.
const MAX_NAMES: u16 = 16;

/// Message types; a response has the type of its request plus one.
pub mod kind {
    pub const ERROR: u8 = 7;
    pub const STATFS: u8 = 8;
    pub const LOPEN: u8 = 12;
    pub const LCREATE: u8 = 14;
    pub const SYMLINK: u8 = 16;
    pub const MKNOD: u8 = 18;
    pub const RENAME: u8 = 20;
    pub const READLINK: u8 = 22;
    pub const GETATTR: u8 = 24;
    pub const SETATTR: u8 = 26;
    pub const XATTRWALK: u8 = 30;
    pub const XATTRCREATE: u8 = 32;
    pub const READDIR: u8 = 40;
    pub const FSYNC: u8 = 50;
    pub const LOCK: u8 = 52;
    pub const GETLOCK: u8 = 54;
    pub const LINK: u8 = 70;
    pub const MKDIR: u8 = 72;
    pub const RENAMEAT: u8 = 74;
    pub const UNLINKAT: u8 = 76;
    /// Our own: ends fids, walks to one name, and answers as [`GETATTR`].
    pub const LOOKUP: u8 = 78;
    pub const VERSION: u8 = 100;
    pub const ATTACH: u8 = 104;
    pub const FLUSH: u8 = 108;
    pub const WALK: u8 = 110;
    pub const READ: u8 = 116;
    pub const WRITE: u8 = 118;
    pub const CLUNK: u8 = 120;
    pub const REMOVE: u8 = 122;
}

/// Messages that modify the folder.
const CHANGES: [u8; 12] = [
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

/// Valid fields of an attribute change.
mod valid {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const CTIME: u32 = 1 << 6;
    pub const ATIME_SET: u32 = 1 << 7;
    pub const MTIME_SET: u32 = 1 << 8;
}

/// Bytes of a message header: length (32 bits), type (8), tag (16).
pub const HEAD: usize = 7;

/// Open flags that the driver may request, as in Linux. Not `O_DIRECT`, which would require aligned
/// buffers here.
const OPEN_FLAGS: u32 = linux::O_ACCMODE
    | linux::O_TRUNC
    | linux::O_APPEND
    | linux::O_NONBLOCK
    | linux::O_DIRECTORY
    | linux::O_NOATIME
    | linux::O_SYNC;

/// Bytes per read of a directory.
const LIST: usize = 16 << 10;

type Failed = Errno;

/// A server for one driver.
pub struct NinepServer {
    folder: OwnedFd,
    /// `/proc/self/fd`: reopens or modifies the file of a [`Descriptor`].
    descriptors: OwnedFd,
    files: NamedFiles,
    share: Share,
    /// Ids of this process.
    own: Ids,
    devices: Devices,
    /// Counts the fids with an attribute, each of which has a reference.
    attributes: Arc<()>,
    /// Longest response in bytes.
    most: AtomicU32,
    fids: Mutex<Fids>,
}

impl NinepServer {
    /// Creates a server for the files below this folder.
    ///
    /// # Errors
    /// There is no `/proc`.
    pub fn new(folder: OwnedFd, share: Share) -> Result<Self, Failed> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let devices = Devices::default();
        // Its own file system is the first.
        devices.number(&fs::fstat(&folder)?);
        let descriptors = fs::open("/proc/self/fd", flags, Mode::empty())?;
        // The other half is for files that are open for reads and writes.
        let most = usize::try_from(most_files()).unwrap_or(usize::MAX) / 2;
        Ok(Self {
            files: NamedFiles::new(&folder, &descriptors, most, MAX_PATH_BYTES),
            folder,
            descriptors,
            share,
            own: Ids { user: geteuid().as_raw(), group: getegid().as_raw() },
            devices,
            attributes: Arc::new(()),
            most: AtomicU32::new(MAX_MESSAGE as u32),
            fids: Mutex::new(Fids::new()),
        })
    }

    /// Sets the number of open names from which on unused ones are closed, and that of all names.
    #[cfg(test)]
    pub fn set_limits(&mut self, open: usize, most: usize) {
        self.files.set_most(open);
        self.fids().most = most;
    }

    /// Sets the number of bytes that paths of closed files may take.
    #[cfg(test)]
    pub fn set_path_bytes(&self, most: usize) {
        self.files.set_path_bytes(most);
    }

    /// Returns the number of names whose files are open.
    #[cfg(test)]
    pub fn open_names(&self) -> usize {
        self.files.open_files()
    }

    /// Returns the served folder.
    pub fn folder(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }

    /// Answers a message. An invalid one without a tag is answered, too.
    pub fn answer(&self, message: &[u8]) -> Vec<u8> {
        let tag = tag(message);
        let Some((head, fields)) = message.split_at_checked(HEAD) else {
            return error(tag, errno::EINVAL);
        };
        let kind = head[4];
        let mut answer = Answer(vec![0; HEAD]);
        if let Err(failure) = self.carry_out(kind, &mut Fields(fields), &mut answer) {
            return error(tag, failure.raw_os_error() as u32);
        }
        let Answer(mut bytes) = answer;
        let length = bytes.len() as u32;
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        // Message types fit: they are constants of this module.
        bytes[4] = kind.wrapping_add(1);
        bytes[5..HEAD].copy_from_slice(&tag);
        bytes
    }

    fn carry_out(&self, kind: u8, fields: &mut Fields, answer: &mut Answer) -> Result<(), Failed> {
        if self.share.read_only && CHANGES.contains(&kind) {
            return Err(Errno::ROFS);
        }
        match kind {
            kind::VERSION => self.version(fields, answer),
            kind::ATTACH => self.attach(fields, answer),
            kind::WALK => self.walk(fields, answer),
            kind::LOOKUP => self.look_up(fields, answer),
            kind::CLUNK => self.drop_fid(fields.word()?),
            kind::GETATTR => self.attributes(fields, answer),
            kind::SETATTR => self.set_attributes(fields),
            kind::STATFS => self.file_system(fields, answer),
            kind::LOPEN => self.open(fields, answer),
            kind::LCREATE => self.create(fields, answer),
            kind::READ => self.read(fields, answer),
            kind::WRITE => self.write(fields, answer),
            kind::FSYNC => self.sync(fields),
            kind::READDIR => self.list(fields, answer),
            // The worker delays this answer until the flushed request has ended.
            kind::FLUSH => Ok(()),
            kind::LOCK | kind::GETLOCK => self.lock(kind, fields, answer),
            kind::XATTRWALK => self.find_attribute(fields, answer),
            kind::XATTRCREATE => self.begin_attribute(fields),
            _ => self.change_folder(kind, fields, answer),
        }
    }

    /// Locks are granted, since they are local to the guest.
    fn lock(&self, kind: u8, fields: &mut Fields, answer: &mut Answer) -> Result<(), Failed> {
        /// The lock is granted.
        const SUCCESS: u8 = 0;
        /// Type of an absent lock.
        const NONE: u8 = 2;
        self.fid(fields.word()?)?.0.opened()?;
        if kind == kind::LOCK {
            answer.0.push(SUCCESS);
            return Ok(());
        }
        fields.take(1)?;
        answer.0.push(NONE);
        // Start, length, process.
        answer.0.extend(fields.take(20)?);
        answer.text(fields.text()?);
        Ok(())
    }

    fn version(&self, fields: &mut Fields, answer: &mut Answer) -> Result<(), Failed> {
        /// The second one has [`kind::LOOKUP`].
        const VERSIONS: [&[u8]; 2] = [b"9P2000.L", b"9P2000.L.lookup"];
        let most = fields.word()?;
        if most < MIN_MESSAGE {
            return Err(Errno::INVAL);
        }
        let most = most.min(MAX_MESSAGE as u32);
        let asked = fields.text()?;
        let before = {
            let mut fids = self.fids();
            fids.session += 1;
            std::mem::take(&mut fids.all)
        };
        drop(before);
        self.most.store(most, Relaxed);
        answer.word(most);
        answer.text(if VERSIONS.contains(&asked) { asked } else { b"unknown" });
        Ok(())
    }

    fn attach(&self, fields: &mut Fields, answer: &mut Answer) -> Result<(), Failed> {
        let number = fields.word()?;
        let session = self.fids().session;
        let user = self.attached_user(fields);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = || fs::openat(&self.folder, c".", flags, Mode::empty());
        let (fid, stat) = self.new_fid(self.descriptor(open)?, user)?;
        self.enter(session, number, fid, None)?;
        answer.identity(&stat, &self.devices);
        Ok(())
    }

    fn walk(&self, fields: &mut Fields, answer: &mut Answer) -> Result<(), Failed> {
        let (number, new) = (fields.word()?, fields.word()?);
        let (start, session) = self.fid(number)?;
        let count = fields.half()?;
        if count > MAX_NAMES {
            return Err(Errno::INVAL);
        }
        let names = (0..count).map(|_| fields.name()).collect::<Result<Vec<_>, _>>()?;
        let path = self.path(&start)?;
        let mut place: Option<OwnedFd> = None;
        let mut found = Vec::new();
        for name in &names {
            let from = place.as_ref().map_or(path.as_fd(), AsFd::as_fd);
            let found_file = self.descriptor(|| look_up(from, name));
            match found_file.and_then(|path| Ok((fs::fstat(&path)?, path))) {
                Ok((stat, path)) => {
                    place = Some(path);
                    found.push(stat);
                }
                Err(error) if found.is_empty() => return Err(error),
                // The driver sees how many names were found.
                Err(_) => break,
            }
        }
        if found.len() == names.len() {
            let copy = || self.descriptor(|| fcntl_dupfd_cloexec(&path, 0));
            let file = place.map_or_else(copy, Ok)?;
            let instead = (number == new).then_some(&start);
            self.enter(session, new, self.new_fid(file, start.user)?.0, instead)?;
        }
        answer.half(found.len() as u16);
        found.iter().for_each(|stat| answer.identity(stat, &self.devices));
        Ok(())
    }

    fn attributes(&self, fields: &mut Fields, answer: &mut Answer) -> Result<(), Failed> {
        let (fid, _) = self.fid(fields.word()?)?;
        answer.attributes(&fs::fstat(self.path(&fid)?)?, &self.devices);
        Ok(())
    }

    /// Walks to one name, and answers with its attributes. Fids of a list end before.
    fn look_up(&self, fields: &mut Fields, answer: &mut Answer) -> Result<(), Failed> {
        let (number, new) = (fields.word()?, fields.word()?);
        let name = fields.text()?;
        let size = fields.word()? as usize;
        let (ended, rest) = fields.take(size)?.as_chunks();
        if !rest.is_empty() {
            return Err(Errno::INVAL);
        }
        for ended in ended {
            // As with Tclunk, which the driver would send for it, whether it succeeds or not.
            let _ = self.drop_fid(u32::from_le_bytes(*ended));
        }
        let (start, session) = self.fid(number)?;
        let (path, name) = (self.path(&start)?, message::entry(name)?);
        let file = self.descriptor(|| look_up(&*path, name))?;
        let (fid, stat) = self.new_fid(file, start.user)?;
        let instead = (number == new).then_some(&start);
        self.enter(session, new, fid, instead)?;
        answer.attributes(&stat, &self.devices);
        Ok(())
    }

    fn set_attributes(&self, fields: &mut Fields) -> Result<(), Failed> {
        let (fid, _) = self.fid(fields.word()?)?;
        let changed = fields.word()?;
        let is_changed = |bits: u32| changed & bits != 0;
        let mode = fields.word()?;
        let (user, group) = (fields.word()?, fields.word()?);
        let size = fields.quad()?;
        let times = [fields.time()?, fields.time()?];
        let path = self.path(&fid)?;
        let (place, name) = (&self.descriptors, &number(&path)[..]);
        let mode = is_changed(valid::MODE).then(|| self.changed_mode(&fid, mode)).transpose()?;
        let only_noted = changed & !valid::CTIME == 0 && is_changed(valid::CTIME);
        if is_changed(valid::UID | valid::GID) || only_noted {
            // All ones: unchanged.
            let given = |bit, id: u32| (is_changed(bit) && id != u32::MAX).then_some(id);
            let user = given(valid::UID, user).map(Uid::from_raw);
            let group = given(valid::GID, group).map(Gid::from_raw);
            fs::chownat(place, name, user, group, AtFlags::empty())?;
        }
        // After the owner, whose change clears set-user-ID bits.
        if let Some(mode) = mode {
            fs::chmodat(place, name, mode, AtFlags::empty())?;
        }
        if is_changed(valid::SIZE) {
            fid.may_be_opened()?;
            if fid.is(linux::S_IFDIR) {
                return Err(Errno::ISDIR);
            }
            let truncated = fid.opened().and_then(|open| fs::ftruncate(open, size));
            match truncated {
                // It is not open, or for reading only: the driver truncates such a file, too, when
                // a program opens it with `O_RDONLY | O_TRUNC`.
                Err(Errno::BADF | Errno::INVAL) => {
                    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
                    let open = || fs::openat(place, name, flags, Mode::empty());
                    fs::ftruncate(self.descriptor(open)?, size)?;
                }
                done => done?,
            }
        }
        if is_changed(valid::ATIME | valid::MTIME) {
            let time = |bit, set, time| match (is_changed(bit), is_changed(set)) {
                (false, _) => Timespec { tv_sec: 0, tv_nsec: fs::UTIME_OMIT },
                (true, false) => Timespec { tv_sec: 0, tv_nsec: fs::UTIME_NOW },
                (true, true) => time,
            };
            let times = Timestamps {
                last_access: time(valid::ATIME, valid::ATIME_SET, times[0]),
                last_modification: time(valid::MTIME, valid::MTIME_SET, times[1]),
            };
            fs::utimensat(place, name, &times, AtFlags::empty())?;
        }
        Ok(())
    }

    fn file_system(&self, fields: &mut Fields, answer: &mut Answer) -> Result<(), Failed> {
        let (fid, _) = self.fid(fields.word()?)?;
        let host = fs::fstatfs(self.path(&fid)?)?;
        answer.word(host.f_type as u32);
        answer.word(host.f_bsize as u32);
        for value in [host.f_blocks, host.f_bfree, host.f_bavail, host.f_files, host.f_ffree] {
            answer.quad(value);
        }
        // The host's file system ID is not revealed.
        answer.quad(0);
        answer.word(host.f_namelen as u32);
        Ok(())
    }

    fn open(&self, fields: &mut Fields, answer: &mut Answer) -> Result<(), Failed> {
        let (fid, _) = self.fid(fields.word()?)?;
        let flags = fields.word()?;
        let writes = linux::O_ACCMODE | linux::O_CREAT | linux::O_TRUNC;
        if self.share.read_only && flags & writes != 0 {
            return Err(Errno::ROFS);
        }
        fid.may_be_opened()?;
        let flags = OFlags::from_bits_retain(flags & OPEN_FLAGS) | OFlags::CLOEXEC;
        let path = self.path(&fid)?;
        let name = number(&path);
        let open = |flags| {
            self.descriptor(|| fs::openat(&self.descriptors, &name[..], flags, Mode::empty()))
        };
        let open = match open(flags) {
            // Only the owner may ask for it, and drivers ask for all files (overlayfs does).
            Err(Errno::PERM) if flags.contains(OFlags::NOATIME) => open(flags - OFlags::NOATIME),
            open => open,
        }?;
        let stat = fs::fstat(&open)?;
        fid.file.keep();
        // A fid can be opened once.
        fid.open.set(open).map_err(|_| Errno::INVAL)?;
        answer.identity(&stat, &self.devices);
        // I/O unit: as much as fits into a message.
        answer.word(0);
        Ok(())
    }

    /// Returns the requested bytes, as far as they fit into a response.
    fn fitting(&self, wanted: u32) -> usize {
        let most = self.most.load(Relaxed) as usize - HEAD - size_of::<u32>();
        most.min(wanted as usize)
    }

    fn read(&self, fields: &mut Fields, answer: &mut Answer) -> Result<(), Failed> {
        let (fid, _) = self.fid(fields.word()?)?;
        let offset = fields.quad()?;
        let start = HEAD + size_of::<u32>();
        answer.0.resize(start + self.fitting(fields.word()?), 0);
        let room = &mut answer.0[start..];
        let count = match &fid.attribute {
            Some(attribute) => attribute.read(room, offset)?,
            None => rustix::io::pread(fid.opened()?, room, offset)?,
        };
        answer.0.truncate(start + count);
        answer.0[HEAD..start].copy_from_slice(&(count as u32).to_le_bytes());
        Ok(())
    }

    fn write(&self, fields: &mut Fields, answer: &mut Answer) -> Result<(), Failed> {
        let (fid, _) = self.fid(fields.word()?)?;
        let offset = fields.quad()?;
        let count = fields.word()?;
        let bytes = fields.take(count as usize)?;
        let count = match &fid.attribute {
            Some(attribute) => attribute.write(bytes, offset)?,
            None => {
                let open = fid.opened()?;
                self.clear_set_id(&fid, open)?;
                rustix::io::pwrite(open, bytes, offset)?
            }
        };
        answer.word(count as u32);
        Ok(())
    }

    fn sync(&self, fields: &mut Fields) -> Result<(), Failed> {
        let (fid, _) = self.fid(fields.word()?)?;
        let open = fid.opened()?;
        // Older drivers do not send the datasync flag.
        let is_data_only = fields.word().is_ok_and(|word| word != 0);
        if is_data_only { fs::fdatasync(open) } else { fs::fsync(open) }
    }

    fn list(&self, fields: &mut Fields, answer: &mut Answer) -> Result<(), Failed> {
        let (fid, _) = self.fid(fields.word()?)?;
        let offset = fields.quad()?;
        let end = HEAD + size_of::<u32>() + self.fitting(fields.word()?);
        if !fid.is(linux::S_IFDIR) {
            return Err(Errno::NOTDIR);
        }
        let open = fid.opened()?;
        let path = self.path(&fid)?;
        let _alone = fid.list.lock().unwrap_or_else(PoisonError::into_inner);
        fs::seek(open, SeekFrom::Start(offset))?;
        answer.word(0);
        let mut room = vec![MaybeUninit::uninit(); LIST];
        let mut entries = RawDir::new(open, &mut room);
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name();
            // The parent of the folder is not visible to the guest.
            let looked_up = if name == c".." { c"." } else { name };
            let stat = match fs::statat(&path, looked_up, AtFlags::SYMLINK_NOFOLLOW) {
                // It has been removed meanwhile.
                Err(Errno::NOENT) => continue,
                // The file system says nothing more: a folder of which only names may be read, or a
                // mount whose server has gone.
                Err(_) => {
                    let mut stat = fs::fstat(&path)?;
                    (stat.st_ino, stat.st_mode) = (entry.ino(), entry.file_type().as_raw_mode());
                    stat
                }
                Ok(stat) => stat,
            };
            let before = answer.0.len();
            answer.identity(&stat, &self.devices);
            answer.quad(entry.next_entry_cookie());
            // As `d_type` of readdir(3).
            answer.0.push((stat.st_mode >> 12) as u8);
            answer.text(name.to_bytes());
            if answer.0.len() > end {
                answer.0.truncate(before);
                break;
            }
        }
        let start = HEAD + size_of::<u32>();
        let count = (answer.0.len() - start) as u32;
        answer.0[HEAD..start].copy_from_slice(&count.to_le_bytes());
        Ok(())
    }
}

/// Looks up a name without following a link.
fn look_up(folder: impl AsFd, name: &[u8]) -> Result<OwnedFd, Failed> {
    fs::openat(folder, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// Returns the name of a descriptor in [`NinepServer::descriptors`].
fn number(descriptor: &impl AsFd) -> String {
    use std::os::fd::AsRawFd;
    descriptor.as_fd().as_raw_fd().to_string()
}
