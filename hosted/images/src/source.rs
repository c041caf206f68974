//! Files of an archive of images: those of a folder, or of a tar archive.

use crate::archive::{self, EntryKind, Visited, refused};
use crate::limits::{MAX_DOCUMENT, MAX_ENTRIES};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// First bytes of compressed files: gzip, zstd, xz, bzip2.
const COMPRESSED: [&[u8]; 4] = [b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"BZh"];
/// Place of the magic number of a tar archive, which it shares with no disk image.
const TAR: (std::ops::Range<usize>, &[u8]) = (257..262, b"ustar");
/// File of an OCI image layout.
pub const LAYOUT: &str = "oci-layout";

/// Returns whether a file that begins with `head` is a tar archive.
pub fn is_tar(head: &[u8]) -> bool {
    head.get(TAR.0) == Some(TAR.1)
}

/// Returns whether a file that begins with `head` is compressed.
pub fn is_compressed(head: &[u8]) -> bool {
    COMPRESSED.iter().any(|magic| head.starts_with(magic))
}

/// Place of a file in an archive.
#[derive(Clone, Copy, Debug)]
struct Member {
    place: u64,
    size: u64,
}

/// Files of an archive of images.
#[derive(Debug)]
pub enum ImageFiles {
    /// Those of a folder.
    Folder(PathBuf),
    /// Those of a tar archive.
    Archive {
        /// The archive.
        file: File,
        /// Its files.
        members: Members,
    },
}

/// Files and links of a tar archive, by path.
#[derive(Debug, Default)]
pub struct Members {
    files: HashMap<Vec<u8>, Member>,
    /// Layers that several images share, as old versions of Docker store them.
    links: HashMap<Vec<u8>, Vec<u8>>,
}

impl Members {
    /// Lists the files of an archive.
    fn read(file: &File) -> Result<Self> {
        let mut members = Self::default();
        archive::entries_of_file(file, |Visited { entry, place, .. }| {
            let path = entry.path.join(&b'/');
            match entry.kind {
                EntryKind::File(size) => drop(members.files.insert(path, Member { place, size })),
                EntryKind::Hardlink(target) => drop(members.links.insert(path, target.join(&b'/'))),
                EntryKind::Symlink(target) => {
                    let target = below(&entry.path, &target);
                    target.and_then(|target| members.links.insert(path, target));
                }
                _ => {}
            }
            match members.files.len() + members.links.len() > MAX_ENTRIES {
                true => Err(refused(format!("the archive has more than {MAX_ENTRIES} files"))),
                false => Ok(()),
            }
        })?;
        Ok(members)
    }

    fn find(&self, name: &str) -> Option<Member> {
        let name = name.as_bytes();
        // One link: a chain of them is not needed, and could be a circle.
        let name = self.links.get(name).map_or(name, Vec::as_slice);
        self.files.get(name).copied()
    }
}

/// Returns the path of a link's target in the archive; `None`: it is elsewhere.
fn below(link: &[Vec<u8>], target: &[u8]) -> Option<Vec<u8>> {
    if target.starts_with(b"/") {
        return None;
    }
    let mut path: Vec<&[u8]> = link.iter().map(Vec::as_slice).collect();
    path.pop();
    for part in target.split(|&byte| byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(path.pop()?),
            _ => path.push(part),
        }
    }
    Some(path.join(&b'/'))
}

impl ImageFiles {
    /// Opens the archive at `path`; `None`: it is none.
    ///
    /// # Errors
    /// It cannot be read, or is malformed.
    pub fn open(path: &Path) -> Result<Option<Self>> {
        if path.is_dir() {
            let is_layout = path.join(LAYOUT).is_file();
            return Ok(is_layout.then(|| Self::Folder(path.to_owned())));
        }
        let file = File::open(path)?;
        let mut head = [0; 512];
        match file.read_exact_at(&mut head, 0) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        if !is_tar(&head) {
            return Ok(None);
        }
        let members = Members::read(&file)?;
        Ok(Some(Self::Archive { file, members }))
    }

    /// Returns whether there is a file with this path.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::Folder(folder) => folder.join(name).is_file(),
            Self::Archive { members, .. } => members.find(name).is_some(),
        }
    }

    /// Opens a file.
    ///
    /// # Errors
    /// It is missing, or cannot be read.
    pub fn file(&self, name: &str) -> Result<Box<dyn Read + '_>> {
        let missing = || refused(format!("the archive has no file {name}"));
        match self {
            Self::Folder(folder) => {
                archive::components(name.as_bytes())?;
                let path = folder.join(name);
                match fs::metadata(&path) {
                    Ok(metadata) if metadata.is_file() => {}
                    Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                    _ => return Err(missing()),
                }
                Ok(Box::new(File::open(path)?))
            }
            Self::Archive { file, members } => {
                let Member { place, size } = members.find(name).ok_or_else(missing)?;
                Ok(Box::new(Section { file, place, left: size }))
            }
        }
    }

    /// Reads a document.
    ///
    /// # Errors
    /// As those of [`ImageFiles::file`]; it is too long.
    pub fn document(&self, name: &str) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = self.file(name)?.take(MAX_DOCUMENT + 1).read_to_end(&mut bytes)?;
        match read as u64 > MAX_DOCUMENT {
            true => Err(refused(format!("{name} has more than {MAX_DOCUMENT} bytes"))),
            false => Ok(bytes),
        }
    }
}

/// File in an archive, which several readers may share.
struct Section<'a> {
    file: &'a File,
    place: u64,
    left: u64,
}

impl Read for Section<'_> {
    fn read(&mut self, room: &mut [u8]) -> Result<usize> {
        let most = room.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if most == 0 {
            return Ok(0);
        }
        let count = self.file.read_at(&mut room[..most], self.place)?;
        if count == 0 {
            return Err(Error::new(ErrorKind::UnexpectedEof, "the archive ends early"));
        }
        self.place += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}
