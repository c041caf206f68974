//! Names in folders: creation, links, renaming and removal; and the owners of new files.
//!
//! With [`Share::owners`](crate::ninep::Share::owners) a thread creates a file while its file
//! system ids are those of the owner (setfsuid(2)), so the file has its owner and mode from its
//! first moment. Creating it as root and changing its owner afterwards would need the name a second
//! time: another program of the host that may write to the folder could put a link to a file of the
//! host in its place. The ids do not affect what the thread may do: it keeps its capabilities.

use linux_raw_sys::general as linux;
use rustix::fs::{self, AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::message::{Answer, Fields};
use super::named_files::Descriptor;
use super::{Failed, Fid, NinepServer, OPEN_FLAGS, kind, look_up, number};
use host_linux::sandbox::set_file_owner;

/// A user and a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ids {
    pub(super) user: u32,
    pub(super) group: u32,
}

/// Id that stands for none.
const NO_ID: u32 = u32::MAX;
/// Bits of a device number (`include/linux/kdev_t.h` in Linux).
const MAJOR_BITS: u32 = 12;
const MINOR_BITS: u32 = 20;

/// Time in which this thread creates files of another owner.
struct OwnerScope {
    own: Ids,
}

impl OwnerScope {
    fn begin(owner: Ids, own: Ids) -> Result<Self, Failed> {
        // Restores the ids if only one of them has changed, too.
        let scope = Self { own };
        set_file_owner(owner.user, owner.group)
            .map_err(|error| Errno::from_raw_os_error(error.0))?;
        Ok(scope)
    }
}

impl Drop for OwnerScope {
    fn drop(&mut self) {
        // A thread may always return to its own ids. With others it would give files to them.
        if set_file_owner(self.own.user, self.own.group).is_err() {
            std::process::abort();
        }
    }
}

impl NinepServer {
    /// Reads the guest user of an attachment, after its number. Without one, files belong
    /// to this process's user.
    pub(super) fn attached_user(&self, fields: &mut Fields) -> u32 {
        // Another fid, the name of the user, that of the folder, and the user.
        let mut user = || {
            fields.word()?;
            fields.text()?;
            fields.text()?;
            fields.word()
        };
        user().ok().filter(|&user| user != NO_ID).unwrap_or(self.own.user)
    }

    /// Reads a mode. Without owners, set-user-ID and set-group-ID bits are refused: such a program
    /// would give other host users the rights of this user.
    pub(super) fn mode(&self, mode: u32) -> Result<Mode, Failed> {
        if !self.share.owners && mode & (linux::S_ISUID | linux::S_ISGID) != 0 {
            return Err(Errno::PERM);
        }
        Ok(Mode::from_raw_mode(mode & !linux::S_IFMT))
    }

    /// Reads the new mode of a file. A folder may have the set-group-ID bit, which gives no user
    /// rights.
    pub(super) fn changed_mode(&self, fid: &Fid, mode: u32) -> Result<Mode, Failed> {
        let group = if fid.is(linux::S_IFDIR) { mode & linux::S_ISGID } else { 0 };
        Ok(self.mode(mode & !group)? | Mode::from_raw_mode(group))
    }

    /// Clears the set-user-ID and set-group-ID bits of a file that a guest user other than root
    /// writes to. Linux does it for an ordinary user, but this process keeps them by `CAP_FSETID`,
    /// and the driver does not clear them without a cache.
    pub(super) fn clear_set_id(&self, fid: &Fid, open: BorrowedFd<'_>) -> Result<(), Failed> {
        const GROUP: u32 = linux::S_ISGID | linux::S_IXGRP;
        if !self.share.owners || fid.user == 0 {
            return Ok(());
        }
        let mode = fs::fstat(open)?.st_mode;
        let group = if mode & GROUP == GROUP { linux::S_ISGID } else { 0 };
        let cleared = mode & !(linux::S_ISUID | group);
        if cleared == mode {
            return Ok(());
        }
        let mode = Mode::from_raw_mode(cleared & !linux::S_IFMT);
        fs::chmodat(&self.descriptors, number(&self.path(fid)?), mode, AtFlags::empty())
    }

    /// Creates an entry of `folder` with a group; it belongs to the folder's guest user.
    fn as_owner<T>(
        &self,
        folder: &Fid,
        group: u32,
        create: impl FnOnce() -> Result<T, Failed>,
    ) -> Result<T, Failed> {
        if !self.share.owners {
            return create();
        }
        let group = if group == NO_ID { self.own.group } else { group };
        let _scope = OwnerScope::begin(Ids { user: folder.user, group }, self.own)?;
        create()
    }

    /// Requests about names in folders.
    pub(super) fn change_folder(
        &self,
        kind: u8,
        fields: &mut Fields,
        answer: &mut Answer,
    ) -> Result<(), Failed> {
        match kind {
            kind::READLINK => {
                let (fid, _) = self.fid(fields.word()?)?;
                let target = fs::readlinkat(self.path(&fid)?, c"", Vec::new())?;
                answer.text(target.as_bytes());
                Ok(())
            }
            kind::LINK => {
                let (folder, _) = self.fid(fields.word()?)?;
                let (fid, _) = self.fid(fields.word()?)?;
                let name = fields.name()?;
                let flags = AtFlags::SYMLINK_FOLLOW;
                let file = self.path(&fid)?;
                fs::linkat(&self.descriptors, number(&file), self.path(&folder)?, name, flags)
            }
            kind::RENAMEAT => {
                let (from, _) = self.fid(fields.word()?)?;
                let old = fields.name()?;
                let (to, _) = self.fid(fields.word()?)?;
                let new = fields.name()?;
                let (from, to) = (self.path(&from)?, self.path(&to)?);
                self.rename((&from, old), (&to, new))
            }
            kind::UNLINKAT => {
                let (folder, _) = self.fid(fields.word()?)?;
                let name = fields.name()?;
                let is_folder = fields.word()? & linux::AT_REMOVEDIR != 0;
                let flags = if is_folder { AtFlags::REMOVEDIR } else { AtFlags::empty() };
                let folder = self.path(&folder)?;
                let _open = self.open_entry(&folder, name);
                fs::unlinkat(&folder, name, flags)
            }
            kind::MKDIR | kind::SYMLINK | kind::MKNOD => self.make_entry(kind, fields, answer),
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    /// Opens the files of an entry's names before the driver removes or renames it.
    fn open_entry(&self, folder: &Descriptor, name: &[u8]) -> (bool, Vec<Arc<Descriptor>>) {
        self.files.open_entry(&self.folder, &self.descriptors, folder, name)
    }

    /// Renames an entry, and with it the paths of closed files below it.
    fn rename(
        &self,
        (from, old): (&Descriptor, &[u8]),
        (to, new): (&Descriptor, &[u8]),
    ) -> Result<(), Failed> {
        let path = |folder, name| self.files.entry(&self.descriptors, folder, name);
        let (_, _replaced) = self.open_entry(to, new);
        let (is_folder, _renamed) = self.open_entry(from, old);
        let before = if is_folder { path(from, old) } else { None };
        if let Some(before) = &before
            && let Some(after) = path(to, new)
        {
            let mut growth = 0;
            self.for_each_fid(|fid| growth += fid.file.growth_by_rename(before, &after));
            if !self.files.has_room_for(growth) {
                return Err(Errno::NFILE);
            }
        }
        fs::renameat(from, old, to, new)?;
        if let Some(before) = before
            && let Some(after) = path(to, new)
        {
            self.for_each_fid(|fid| fid.file.follow_rename(&before, &after));
        }
        Ok(())
    }

    /// Creates a folder, a symbolic link or a node.
    fn make_entry(&self, kind: u8, fields: &mut Fields, answer: &mut Answer) -> Result<(), Failed> {
        let (folder, _) = self.fid(fields.word()?)?;
        let (path, name) = (&self.path(&folder)?, fields.name()?);
        match kind {
            kind::MKDIR => {
                // The host's kernel gives a folder the set-group-ID bit of its parent itself.
                let mode = self.mode(fields.word()? & !linux::S_ISGID)?;
                self.as_owner(&folder, fields.word()?, || fs::mkdirat(path, name, mode))?;
            }
            kind::SYMLINK => {
                let target = fields.text()?;
                self.as_owner(&folder, fields.word()?, || fs::symlinkat(target, path, name))?;
            }
            _ => {
                let mode = fields.word()?;
                let (major, minor) = (fields.word()?, fields.word()?);
                let (kind, device) = self.node(mode, major, minor)?;
                let mode = self.mode(mode)?;
                let group = fields.word()?;
                self.as_owner(&folder, group, || fs::mknodat(path, name, kind, mode, device))?;
            }
        }
        let stat = fs::statat(path, name, AtFlags::SYMLINK_NOFOLLOW)?;
        answer.identity(&stat, &self.devices);
        Ok(())
    }

    /// Returns type and device number of a node. Device nodes are for shares with owners only: they
    /// lead to the host's devices.
    fn node(&self, mode: u32, major: u32, minor: u32) -> Result<(FileType, fs::Dev), Failed> {
        let kind = FileType::from_raw_mode(mode);
        match kind {
            FileType::RegularFile | FileType::Fifo | FileType::Socket => Ok((kind, 0)),
            FileType::CharacterDevice | FileType::BlockDevice if self.share.owners => {
                if major >> MAJOR_BITS != 0 || minor >> MINOR_BITS != 0 {
                    return Err(Errno::INVAL);
                }
                Ok((kind, fs::makedev(major, minor)))
            }
            FileType::CharacterDevice | FileType::BlockDevice => Err(Errno::PERM),
            _ => Err(Errno::INVAL),
        }
    }

    /// Opens a regular file in the place of one that is to be created.
    ///
    /// # Errors
    /// `EXIST`: it is none, or the driver would have to check the user's rights.
    fn open_existing(
        &self,
        folder: &Fid,
        file: &OwnedFd,
        flags: OFlags,
    ) -> Result<OwnedFd, Failed> {
        let stat = fs::fstat(file)?;
        let is_regular = stat.st_mode & linux::S_IFMT == linux::S_IFREG;
        // Without owners the host checks them. This process may open all files otherwise.
        if !is_regular || self.share.owners && folder.user != 0 {
            return Err(Errno::EXIST);
        }
        self.descriptor(|| fs::openat(&self.descriptors, number(file), flags, Mode::empty()))
    }

    /// Creates and opens a file.
    pub(super) fn create(&self, fields: &mut Fields, answer: &mut Answer) -> Result<(), Failed> {
        let number_of_fid = fields.word()?;
        let (folder, session) = self.fid(number_of_fid)?;
        let name = fields.name()?;
        let wanted = fields.word()?;
        let mode = self.mode(fields.word()?)?;
        let group = fields.word()?;
        if !folder.is(linux::S_IFDIR) {
            return Err(Errno::NOTDIR);
        }
        let flags = wanted & OPEN_FLAGS & !linux::O_DIRECTORY;
        let flags = OFlags::from_bits_retain(flags) | OFlags::CLOEXEC;
        let place = self.path(&folder)?;
        let create = || fs::openat(&place, name, flags | OFlags::CREATE | OFlags::EXCL, mode);
        let open = match self.descriptor(|| self.as_owner(&folder, group, create)) {
            // The host has made it since the driver's lookup.
            Err(Errno::EXIST) if wanted & linux::O_EXCL == 0 => {
                let file = self.descriptor(|| look_up(&place, name))?;
                self.open_existing(&folder, &file, flags)
            }
            open => open,
        }?;
        // Reopens the same file, whatever the name refers to by now.
        let path = OFlags::PATH | OFlags::CLOEXEC;
        let reopen = || fs::openat(&self.descriptors, number(&open), path, Mode::empty());
        let path = self.descriptor(reopen)?;
        let (fid, stat) = self.new_fid(path, folder.user)?;
        fid.file.keep();
        let _ = fid.open.set(open);
        self.enter(session, number_of_fid, fid, Some(&folder))?;
        answer.identity(&stat, &self.devices);
        answer.word(0);
        Ok(())
    }
}
