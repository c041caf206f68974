//! Names that the driver holds (fids), and the limits of their number and memory.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use linux_raw_sys::general as linux;
use rustix::fs::{self, Stat};
use rustix::io::Errno;

use super::named_files::{Descriptor, NamedFile};
use super::xattr::Attribute;
use super::{Failed, NinepServer};
use crate::confine::OWN_MEMORY;

/// Names that a driver may hold.
const MAX_FIDS: usize = 1 << 20;
/// Bytes of a name of a closed file without its path: [`Fid`], [`NamedFile`], and entries in two
/// maps, with the allocator's overhead. (Measured: 271 if names are numbered in order, which leaves
/// the maps' nodes half full.)
const FID_BYTES: usize = 300;
const _: () = assert!(size_of::<Fid>() + size_of::<NamedFile>() <= 40 + 64);
/// Bytes for stacks and messages of requests, attributes, and the program.
const OTHER_BYTES: usize = 100 << 20;
/// Bytes that paths of closed files may take: 112 for each of as many names as possible.
pub(super) const MAX_PATH_BYTES: usize = OWN_MEMORY as usize - MAX_FIDS * FID_BYTES - OTHER_BYTES;

/// A name that the driver holds.
pub(super) struct Fid {
    /// Its file.
    pub(super) file: Arc<NamedFile>,
    /// File type and mode at the lookup. The type does not change.
    pub(super) mode: u32,
    /// Descriptor for reads and writes.
    pub(super) open: OnceLock<OwnedFd>,
    /// Serializes listings: their position is that of the descriptor.
    pub(super) list: Mutex<()>,
    /// Guest user that the name was looked up for, who owns files created by it.
    pub(super) user: u32,
    /// Extended attribute that is read or written instead of the file.
    pub(super) attribute: Option<Box<Attribute>>,
}

impl Fid {
    pub(super) fn is(&self, kind: u32) -> bool {
        self.mode & linux::S_IFMT == kind
    }

    /// Refuses pipes, which would block, and devices of the host.
    pub(super) fn may_be_opened(&self) -> Result<(), Failed> {
        if self.attribute.is_some() {
            return Err(Errno::INVAL);
        }
        match self.mode & linux::S_IFMT {
            linux::S_IFREG | linux::S_IFDIR => Ok(()),
            linux::S_IFLNK => Err(Errno::LOOP),
            _ => Err(Errno::ACCESS),
        }
    }

    pub(super) fn opened(&self) -> Result<BorrowedFd<'_>, Failed> {
        self.open.get().map(AsFd::as_fd).ok_or(Errno::BADF)
    }
}

/// Names of one session, which begins with the version message.
pub(super) struct Fids {
    pub(super) session: u64,
    pub(super) all: BTreeMap<u32, Arc<Fid>>,
    /// Largest number of fids.
    pub(super) most: usize,
}

impl Fids {
    pub(super) fn new() -> Self {
        Self { session: 0, all: BTreeMap::new(), most: MAX_FIDS }
    }
}

impl NinepServer {
    pub(super) fn fids(&self) -> MutexGuard<'_, Fids> {
        self.fids.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a fid and the session it belongs to.
    pub(super) fn fid(&self, number: u32) -> Result<(Arc<Fid>, u64), Failed> {
        let fids = self.fids();
        let fid = fids.all.get(&number).cloned().ok_or(Errno::BADF)?;
        Ok((fid, fids.session))
    }

    /// Creates a fid for a file.
    pub(super) fn new_fid(&self, file: OwnedFd, user: u32) -> Result<(Fid, Stat), Failed> {
        let stat = fs::fstat(&file)?;
        let (open, list) = (OnceLock::new(), Mutex::new(()));
        let file = self.files.name(file, &stat);
        Ok((Fid { file, mode: stat.st_mode, open, list, user, attribute: None }, stat))
    }

    /// Calls a function for each fid, with no more than a part of them in memory twice.
    pub(super) fn for_each_fid(&self, mut call: impl FnMut(&Fid)) {
        const PART: usize = 1024;
        let mut next = Some(0);
        while let Some(first) = next {
            let part: Vec<_> = {
                let fids = self.fids();
                let all = fids.all.range(first..).take(PART);
                all.map(|(number, fid)| (*number, Arc::clone(fid))).collect()
            };
            part.iter().for_each(|(_, fid)| call(fid));
            next = part.last().and_then(|(last, _)| last.checked_add(1));
        }
    }

    /// Returns the descriptor of a fid's file.
    pub(super) fn path(&self, fid: &Fid) -> Result<Arc<Descriptor>, Failed> {
        self.files.open(&fid.file, &self.folder, &self.descriptors)
    }

    /// Makes a descriptor, for which it closes unused files if the process may have no more.
    pub(super) fn descriptor<T>(&self, make: impl Fn() -> Result<T, Failed>) -> Result<T, Failed> {
        self.files.make_descriptor(&self.descriptors, make)
    }

    /// Adds a fid of this session; `instead` is the one that it replaces.
    pub(super) fn enter(
        &self,
        session: u64,
        number: u32,
        fid: Fid,
        instead: Option<&Arc<Fid>>,
    ) -> Result<(), Failed> {
        self.files.close_unused(&self.descriptors);
        let mut fids = self.fids();
        if fids.session != session {
            return Err(Errno::BADF);
        }
        let is_full = fids.all.len() >= fids.most || !self.files.has_room_for_path();
        if instead.is_none() && is_full {
            return Err(Errno::NFILE);
        }
        match (fids.all.entry(number), instead) {
            (Entry::Vacant(place), None) => {
                place.insert(Arc::new(fid));
                Ok(())
            }
            (Entry::Occupied(mut place), Some(old)) if Arc::ptr_eq(place.get(), old) => {
                place.insert(Arc::new(fid));
                Ok(())
            }
            _ => Err(Errno::BADF),
        }
    }

    /// Forgets a fid; an attribute that it writes is set now.
    pub(super) fn drop_fid(&self, number: u32) -> Result<(), Failed> {
        // The drop may close a descriptor, outside of the lock.
        let fid = self.fids().all.remove(&number).ok_or(Errno::BADF)?;
        let Some(attribute) = &fid.attribute else { return Ok(()) };
        attribute.finish(&*self.path(&fid)?)
    }
}
