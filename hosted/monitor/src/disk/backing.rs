//! Backing files of qcow2 images: `backing=DIR`.
//!
//! A guest, or another user, may have written the image, so its header decides nothing but which
//! files of one folder are read: the user names the folder, no name leads out of it, and links in
//! it are not followed. The header states the format of each file; contents are never probed,
//! because a guest could have written a header into a raw file. `parador` reads headers only. The
//! files are opened to read and locked as a reader's, with QEMU's locks too.
//! Documentation: QEMU, `docs/interop/qcow2.txt`.

use super::{QCOW2, lock};
use hosted_command::failure::{self, Failure};
use hosted_devices::Base;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Largest number of backing files of a disk.
pub const MAX_FILES: usize = 8;
/// Bytes of the header common to all versions.
const HEADER: usize = 72;
/// Offset of the header's own length, from version 3 on.
const LENGTH: usize = 100;
/// Largest cluster; header, extensions and name are in the first one.
const MAX_CLUSTER: usize = 2 << 20;
/// Longest name in bytes.
const MAX_NAME: usize = 1023;
/// Header extension with the format of the backing file.
const FORMAT: u32 = 0xe279_2aca;

/// Backing file that an image names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Named {
    name: Vec<u8>,
    /// Its format as the header states it.
    format: Option<Vec<u8>>,
}

/// Header of an image, as far as `parador` reads it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Header {
    /// Virtual size in bytes.
    pub length: u64,
    /// The image is encrypted.
    pub is_encrypted: bool,
    /// The image has snapshots.
    pub has_snapshots: bool,
    /// Backing file.
    pub backing: Option<Named>,
}

/// An opened backing file.
#[derive(Debug)]
pub struct BackingFile {
    /// Opened to read, and locked.
    pub file: File,
    /// Its format.
    pub format: Base,
}

/// Reason why a backing file is not used.
#[derive(Debug)]
pub enum Problem {
    /// The host refuses it.
    Host(Failure),
    /// The file, and what is wrong with it; a remedy.
    Refused(String, &'static str),
}

impl Problem {
    /// Creates the failure of the disk with this path.
    pub fn failure(self, disk: &Path) -> Failure {
        match self {
            Self::Host(failure) => failure,
            Self::Refused(text, help) => {
                let text = format!("disk {}: {text}", disk.display());
                Failure::new(failure::BAD_CONFIG, text).help(help)
            }
        }
    }
}

impl Header {
    /// Reads the header of a file; `None`: it is no qcow2 image, or its header is invalid.
    ///
    /// # Errors
    /// Errors of the host.
    pub fn read(file: &File) -> io::Result<Option<Self>> {
        let mut bytes = vec![0; HEADER];
        let read = |bytes: &mut Vec<u8>, from: usize| {
            let mut done = from;
            while done < bytes.len() {
                match file.read_at(&mut bytes[done..], done as u64)? {
                    0 => break,
                    count => done += count,
                }
            }
            bytes.truncate(done);
            Ok::<_, io::Error>(())
        };
        read(&mut bytes, 0)?;
        if bytes.len() < HEADER || bytes[..4] != QCOW2 {
            return Ok(None);
        }
        let cluster = 1_usize.checked_shl(word(&bytes, 20).unwrap_or(u32::MAX));
        if long(&bytes, 8) != Some(0) {
            let length = cluster.filter(|length| (HEADER..=MAX_CLUSTER).contains(length));
            let Some(length) = length else { return Ok(None) };
            bytes.resize(length, 0);
            read(&mut bytes, HEADER)?;
        }
        Ok(Self::parse(&bytes))
    }

    /// Parses the first cluster.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let start = usize::try_from(long(bytes, 8)?).ok()?;
        let backing = match start {
            0 => None,
            _ => {
                let count = usize::try_from(word(bytes, 16)?).ok()?;
                let name = bytes.get(start..start.checked_add(count)?)?.to_vec();
                if name.is_empty() || name.len() > MAX_NAME || name.contains(&0) {
                    return None;
                }
                Some(Named { name, format: format(bytes) })
            }
        };
        Some(Self {
            length: long(bytes, 24)?,
            is_encrypted: word(bytes, 32)? != 0,
            has_snapshots: word(bytes, 60)? != 0,
            backing,
        })
    }
}

/// Returns the format of the backing file, if an extension of the header states it.
fn format(bytes: &[u8]) -> Option<Vec<u8>> {
    let is_new = word(bytes, 4)? >= 3;
    let mut at = if is_new { usize::try_from(word(bytes, LENGTH)?).ok()? } else { HEADER };
    loop {
        let (kind, length) = (word(bytes, at)?, usize::try_from(word(bytes, at + 4)?).ok()?);
        let start = at + 8;
        let end = start.checked_add(length)?;
        match kind {
            0 => return None,
            FORMAT => return bytes.get(start..end).map(<[u8]>::to_vec),
            _ => at = end.checked_next_multiple_of(8).filter(|&next| next < bytes.len())?,
        }
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_be_bytes(bytes.try_into().ok()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from(word(bytes, at)?) << 32 | u64::from(word(bytes, at + 4)?))
}

/// Opens the backing file that an image names, and those below it.
///
/// # Errors
/// One is missing, in use or unsuitable, leads out of `folder`, or there are more than
/// [`MAX_FILES`].
pub fn open_chain(image: &File, first: &Named, folder: &Path) -> Result<Vec<BackingFile>, Problem> {
    let host = |action: &str, path: &Path, error: io::Error| {
        Problem::Host(Failure::file(action, path, &error))
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let beneath = openat(CWD, folder, flags, Mode::empty());
    let beneath = beneath.map_err(|error| host("open folder", folder, error.into()))?;
    let identity = |file: &File| file.metadata().map(|found| (found.dev(), found.ino()));
    let mut known = vec![identity(image).map_err(|error| host("examine disk", folder, error))?];
    let mut files = Vec::new();
    let (mut next, mut place) = (Some(first.clone()), PathBuf::new());
    while let Some(named) = next {
        let shown = String::from_utf8_lossy(&named.name).replace(char::is_control, "?");
        let refuse =
            |text: &str, help| Problem::Refused(format!("backing file {shown} {text}"), help);
        if files.len() == MAX_FILES {
            return Err(refuse(
                &format!("is one of more than {MAX_FILES}"),
                "merge them: `qemu-img convert -O qcow2 OLD NEW`",
            ));
        }
        let format = stated_format(&named).map_err(|(text, help)| refuse(text, help))?;
        place = relative(&named.name, &place, folder)
            .ok_or_else(|| refuse("is not a file of the folder backing=DIR", OUTSIDE))?;
        let path = folder.join(&place);
        let file = open_beneath(&beneath, &place).map_err(|error| match error {
            Errno::XDEV | Errno::LOOP => refuse("leads out of the folder backing=DIR", OUTSIDE),
            error => host("open backing file", &path, error.into()),
        })?;
        let kind = file.metadata().map_err(|error| host("examine backing file", &path, error))?;
        if !kind.is_file() {
            return Err(refuse("is not a file", OUTSIDE));
        }
        if known.contains(&(kind.dev(), kind.ino())) {
            return Err(refuse("is below itself", "its images are broken"));
        }
        known.push((kind.dev(), kind.ino()));
        lock::lock(&file, &path, true).map_err(Problem::Host)?;
        next = match format {
            Base::Raw => None,
            Base::Qcow2 => {
                let header = Header::read(&file);
                let header = header.map_err(|error| host("read backing file", &path, error))?;
                let header = header.filter(|header| !header.is_encrypted);
                let header = header.ok_or_else(|| {
                    refuse("is not a qcow2 image without encryption", "its header states qcow2")
                })?;
                header.backing
            }
        };
        files.push(BackingFile { file, format });
    }
    Ok(files)
}

/// Returns the format of a backing file as a header states it; or what is wrong, and a remedy.
fn stated_format(named: &Named) -> Result<Base, (&'static str, &'static str)> {
    match named.format.as_deref() {
        Some(b"raw") => Ok(Base::Raw),
        Some(b"qcow2") => Ok(Base::Qcow2),
        Some(_) => Err((
            "has a format other than raw and qcow2",
            "convert it: `qemu-img convert -O qcow2 OLD NEW`",
        )),
        None => Err((
            "has no format in the header of its image",
            "state it: `qemu-img rebase -u -b NAME -F FORMAT IMAGE`",
        )),
    }
}

/// Remedy for a name that leads elsewhere.
const OUTSIDE: &str = "move the file there without links, and name it: \
    `qemu-img rebase -u -b NAME -F FORMAT IMAGE`";

/// Returns the place in `folder` that a name means in an image at `image`, as QEMU finds it: beside
/// the image. An absolute name must be below `folder`. The kernel refuses `..` and links that lead
/// out of it.
fn relative(name: &[u8], image: &Path, folder: &Path) -> Option<PathBuf> {
    // QEMU takes the part before a colon for a protocol, such as `nbd:` or `json:`.
    let first = name.split(|&byte| byte == b'/').next().unwrap_or_default();
    if first.contains(&b':') {
        return None;
    }
    let name = Path::new(OsStr::from_bytes(name));
    if name.is_relative() {
        return Some(image.parent().unwrap_or(Path::new("")).join(name));
    }
    let below = |folder: &Path| name.strip_prefix(folder).ok().map(Path::to_owned);
    let absolute = std::path::absolute(folder).ok()?;
    below(&absolute).or_else(|| below(&folder.canonicalize().ok()?))
}

/// Opens a file below a folder to read, without following links.
fn open_beneath(folder: &OwnedFd, place: &Path) -> Result<File, Errno> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    openat2(folder, place, flags, Mode::empty(), resolve).map(File::from)
}

#[cfg(test)]
mod tests;
