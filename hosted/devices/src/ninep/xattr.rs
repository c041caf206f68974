//! Extended attributes: a fid stands for the value of one, or for the list of all names.
//!
//! The value is read when the fid is made, and set when it is dropped. `user.*` are data of files'
//! owners; with [`Share::owners`](crate::ninep::Share::owners) also the capabilities of programs.
//! The server names a file by its descriptor in `/proc`, which leads to the file itself, also if
//! that is a symbolic link.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{self, XattrFlags};
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use super::message::{Answer, Fields};
use super::{Failed, Fid, NinepServer, number};

/// Longest value, and longest list of names, in bytes (`include/uapi/linux/limits.h` in Linux).
const MAX_VALUE: usize = 64 << 10;
/// Attributes that a driver reads or writes at a time.
const MAX_ATTRIBUTES: usize = 256;
/// Attributes that any share has.
const USER: &[u8] = b"user.";
/// Attribute of programs, for shares with owners.
const CAPABILITY: &[u8] = b"security.capability";

/// Extended attribute, or list of names, of a fid.
pub(super) struct Attribute {
    kind: Kind,
    /// Counts attributes: see [`NinepServer`].
    _counted: Arc<()>,
}

enum Kind {
    /// Value or list to read.
    Read(Vec<u8>),
    /// Attribute that is set to a value of this length.
    Write { name: Vec<u8>, flags: XattrFlags, length: usize, value: Mutex<Vec<u8>> },
}

impl Attribute {
    /// Reads from the value.
    pub(super) fn read(&self, to: &mut [u8], offset: u64) -> Result<usize, Failed> {
        let Kind::Read(value) = &self.kind else { return Err(Errno::BADF) };
        let offset = usize::try_from(offset).unwrap_or(usize::MAX).min(value.len());
        let count = to.len().min(value.len() - offset);
        to[..count].copy_from_slice(&value[offset..offset + count]);
        Ok(count)
    }

    /// Appends to the value.
    pub(super) fn write(&self, bytes: &[u8], offset: u64) -> Result<usize, Failed> {
        let Kind::Write { length, value, .. } = &self.kind else { return Err(Errno::BADF) };
        let mut value = value.lock().unwrap_or_else(PoisonError::into_inner);
        if offset != value.len() as u64 || value.len() + bytes.len() > *length {
            return Err(Errno::INVAL);
        }
        value.extend(bytes);
        Ok(bytes.len())
    }

    /// Sets the attribute of a file, if its value is complete.
    pub(super) fn finish(&self, path: &impl AsFd) -> Result<(), Failed> {
        let Kind::Write { name, flags, length, value } = &self.kind else { return Ok(()) };
        let value = value.lock().unwrap_or_else(PoisonError::into_inner);
        if value.len() != *length {
            return Err(Errno::INVAL);
        }
        // As Linux removes an attribute.
        if *length == 0 && flags.contains(XattrFlags::REPLACE) {
            return fs::removexattr(place(path), &name[..]);
        }
        fs::setxattr(place(path), &name[..], &value, *flags)
    }
}

/// Path of the file of a descriptor.
fn place(path: &impl AsFd) -> String {
    format!("/proc/self/fd/{}", number(path))
}

impl NinepServer {
    fn has_attribute(&self, name: &[u8]) -> bool {
        let is_user = name.strip_prefix(USER).is_some_and(|rest| !rest.is_empty());
        is_user || self.share.owners && name == CAPABILITY
    }

    /// Creates a fid for an attribute of a file.
    fn attribute(&self, of: &Fid, kind: Kind) -> Result<Fid, Failed> {
        // One reference is the server's.
        if Arc::strong_count(&self.attributes) > MAX_ATTRIBUTES {
            return Err(Errno::NOBUFS);
        }
        let path = self.path(of)?;
        let (fid, _) =
            self.new_fid(self.descriptor(|| fcntl_dupfd_cloexec(&*path, 0))?, of.user)?;
        fid.file.keep();
        let attribute = Attribute { kind, _counted: Arc::clone(&self.attributes) };
        Ok(Fid { attribute: Some(Box::new(attribute)), ..fid })
    }

    /// Makes a new fid for the value of an attribute; without a name for the names of all.
    pub(super) fn find_attribute(
        &self,
        fields: &mut Fields,
        answer: &mut Answer,
    ) -> Result<(), Failed> {
        let (fid, session) = self.fid(fields.word()?)?;
        let new = fields.word()?;
        let name = fields.text()?;
        let path = place(&self.path(&fid)?);
        let mut value = vec![0; MAX_VALUE];
        if name.is_empty() {
            let length = fs::listxattr(path, &mut value[..])?;
            let names = value[..length].split_inclusive(|&byte| byte == 0);
            let is_visible =
                |name: &&[u8]| self.has_attribute(name.strip_suffix(b"\0").unwrap_or(name));
            value = names.filter(is_visible).flatten().copied().collect();
        } else if self.has_attribute(name) {
            let length = fs::getxattr(path, name, &mut value[..])?;
            value.truncate(length);
            value.shrink_to_fit();
        } else {
            return Err(Errno::OPNOTSUPP);
        }
        let length = value.len() as u64;
        self.enter(session, new, self.attribute(&fid, Kind::Read(value))?, None)?;
        answer.quad(length);
        Ok(())
    }

    /// Makes a fid stand for an attribute of its file, which is set when the fid is dropped.
    pub(super) fn begin_attribute(&self, fields: &mut Fields) -> Result<(), Failed> {
        let number = fields.word()?;
        let (fid, session) = self.fid(number)?;
        let name = fields.text()?;
        let length = usize::try_from(fields.quad()?).unwrap_or(usize::MAX);
        let flags = XattrFlags::from_bits_retain(fields.word()?);
        if !self.has_attribute(name) {
            return Err(Errno::OPNOTSUPP);
        }
        if length > MAX_VALUE {
            return Err(Errno::TOOBIG);
        }
        let (name, value) = (name.to_vec(), Mutex::default());
        let attribute = self.attribute(&fid, Kind::Write { name, flags, length, value })?;
        self.enter(session, number, attribute, Some(&fid))
    }
}
