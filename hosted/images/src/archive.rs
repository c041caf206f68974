//! Entries of a tar archive, with extended headers of limited length.
//!
//! Names and links come from GNU or pax headers if there are any. What has no meaning in an image
//! is refused: sparse files, devices, paths that lead out.

use crate::limits::{MAX_DEPTH, MAX_ENTRIES, MAX_FILE, MAX_HEADER, MAX_NAME, MAX_PATH};
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use tar::{Archive, Entries, EntryType, Header};

/// Most extended headers of an entry: its path, its link, and one of pax, after a global one.
const MAX_HEADERS: usize = 4;

/// Last second of ext4, in 2446: the lower 32 bits of its 34 are signed.
const MAX_TIME: u64 = (1 << 34) - (1 << 31) - 1;

/// Prefix of extended attributes in pax headers.
const XATTR: &str = "SCHILY.xattr.";
/// Attributes that a guest gets: of files' capabilities and labels, and of users. Those of file
/// systems (`system.`, `trusted.`), such as overlay's, have a meaning of their own.
const XATTRS: [&str; 2] = ["security.", "user."];

/// Path in an archive: its components, without `.` and `..`; empty for the root.
pub type Components = Vec<Vec<u8>>;

/// Contents of an entry besides its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// Directory.
    Folder,
    /// File with this number of bytes.
    File(u64),
    /// Symbolic link with this target.
    Symlink(Vec<u8>),
    /// Another name of the entry with this path.
    Hardlink(Components),
    /// Named pipe.
    Fifo,
}

/// Owner, mode, time and attributes of an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Permissions, set-user-ID, set-group-ID, sticky.
    pub mode: u16,
    /// User.
    pub user: u32,
    /// Group.
    pub group: u32,
    /// Last modification in seconds since 1970.
    pub modified: u64,
    /// Extended attributes: names and values.
    pub xattrs: Vec<(String, Vec<u8>)>,
}

/// Entry of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveEntry {
    /// Path.
    pub path: Components,
    /// Kind.
    pub kind: EntryKind,
    /// Owner, mode, time.
    pub attributes: Attributes,
}

/// Returns the error of an archive that is refused.
pub fn refused(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidData, text.into())
}

/// Calls `visit` with each entry of an archive and its data, in order.
///
/// # Errors
/// The archive is malformed, exceeds a limit or has an entry that is refused; those of `visit`.
pub fn entries(input: impl Read, visit: impl FnMut(Visited<'_>) -> Result<()>) -> Result<()> {
    visit_all(Archive::new(input).entries()?, visit)
}

/// Does the same as [`entries`] for a file, without reading the data that `visit` does not read.
///
/// # Errors
/// As those of [`entries`].
pub fn entries_of_file(file: &File, visit: impl FnMut(Visited<'_>) -> Result<()>) -> Result<()> {
    visit_all(Archive::new(file).entries_with_seek()?, visit)
}

/// Entry of an archive as a visitor gets it.
pub struct Visited<'a> {
    /// The entry.
    pub entry: ArchiveEntry,
    /// Its data.
    pub data: &'a mut dyn Read,
    /// Place of the data in the archive.
    pub place: u64,
}

fn visit_all<R: Read>(
    entries: Entries<'_, R>,
    mut visit: impl FnMut(Visited<'_>) -> Result<()>,
) -> Result<()> {
    let mut extended = Extended::default();
    // Raw: extended headers are entries, whose length is checked here.
    for (index, entry) in entries.raw(true).enumerate() {
        if index >= (1 + MAX_HEADERS) * MAX_ENTRIES {
            return Err(refused(format!("the archive has more than {MAX_ENTRIES} entries")));
        }
        let mut entry = entry?;
        if extended.take(entry.header().entry_type(), &mut entry)? {
            continue;
        }
        let place = entry.raw_file_position();
        let found = std::mem::take(&mut extended).describe(entry.header());
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let found = found.map_err(|error| refused(format!("entry {name}: {error}")))?;
        visit(Visited { entry: found, data: &mut entry, place })?;
    }
    Ok(())
}

/// Returns a number of a header, which `read` parses; that of a blank field is 0, as for other
/// readers of archives.
fn number<T: Default>(field: &[u8], read: impl FnOnce() -> Result<T>) -> Result<T> {
    let is_blank = field.iter().all(|byte| matches!(byte, 0 | b' '));
    if is_blank { Ok(T::default()) } else { read() }
}

/// Extended headers before an entry.
#[derive(Default)]
struct Extended {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    modified: Option<u64>,
    user: Option<u32>,
    group: Option<u32>,
    xattrs: Vec<(String, Vec<u8>)>,
    /// Number of these headers, and their bytes.
    count: usize,
    bytes: u64,
}

impl Extended {
    /// Reads an extended header; `false`: the entry is none.
    fn take(&mut self, kind: EntryType, entry: &mut impl Read) -> Result<bool> {
        match kind {
            // The last zero is no part of it.
            EntryType::GNULongName => self.path = Some(text(&self.contents(entry)?)),
            EntryType::GNULongLink => self.link = Some(text(&self.contents(entry)?)),
            EntryType::XHeader => {
                let records = self.contents(entry)?;
                self.take_pax(&records)?;
            }
            // Comments of git, and defaults that image builders do not write.
            EntryType::XGlobalHeader => drop(self.contents(entry)?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Reads an extended header within the limits of those of one entry.
    fn contents(&mut self, entry: &mut impl Read) -> Result<Vec<u8>> {
        self.count += 1;
        if self.count > MAX_HEADERS {
            let text = format!("an entry has more than {MAX_HEADERS} extended headers");
            return Err(refused(text));
        }
        let mut bytes = Vec::new();
        let room = MAX_HEADER - self.bytes;
        self.bytes += entry.take(room + 1).read_to_end(&mut bytes)? as u64;
        match self.bytes > MAX_HEADER {
            true => Err(refused(format!(
                "the extended headers of an entry have more than {MAX_HEADER} bytes"
            ))),
            false => Ok(bytes),
        }
    }

    fn take_pax(&mut self, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (key, value, after) =
                record(rest).ok_or_else(|| refused("a pax record is malformed"))?;
            rest = after;
            let key = std::str::from_utf8(key).map_err(|_| refused("a pax header is not UTF-8"))?;
            let number = || {
                let whole = value.split(|&byte| byte == b'.').next().unwrap_or_default();
                let text = std::str::from_utf8(whole).ok();
                text.and_then(|text| text.parse::<u64>().ok())
            };
            let id = || number().and_then(|id| u32::try_from(id).ok());
            let invalid = || refused(format!("the pax record {key} is malformed"));
            match key {
                "path" => self.path = Some(value.to_vec()),
                "linkpath" => self.link = Some(value.to_vec()),
                "size" => self.size = Some(number().ok_or_else(invalid)?),
                // One before 1970 is negative.
                "mtime" => self.modified = Some(number().unwrap_or(0)),
                "uid" => self.user = Some(id().ok_or_else(invalid)?),
                "gid" => self.group = Some(id().ok_or_else(invalid)?),
                _ if key.starts_with("GNU.sparse.") => return Err(refused("a sparse file")),
                _ => {
                    let name = key.strip_prefix(XATTR).filter(|name| is_kept(name));
                    self.xattrs.extend(name.map(|name| (name.to_owned(), value.to_vec())));
                }
            }
        }
        Ok(())
    }

    /// Returns the entry with this header.
    fn describe(self, header: &Header) -> Result<ArchiveEntry> {
        let size = header.entry_size()?;
        if self.size.is_some_and(|stated| stated != size) || size > MAX_FILE {
            return Err(refused(format!("a file has more than {MAX_FILE} bytes")));
        }
        let link = || self.link.clone().or_else(|| header.link_name_bytes().map(Into::into));
        let link = || link().filter(|link| !link.is_empty() && link.len() <= MAX_PATH);
        let link = || link().ok_or_else(|| refused("a link without a valid target"));
        let bytes = self.path.clone().unwrap_or_else(|| header.path_bytes().into_owned());
        let old = header.as_old();
        let kind = match header.entry_type() {
            // Version 7 of Unix had no type of directories.
            EntryType::Regular if old.linkflag == [0] && bytes.ends_with(b"/") => EntryKind::Folder,
            EntryType::Regular | EntryType::Continuous => EntryKind::File(size),
            EntryType::Directory => EntryKind::Folder,
            EntryType::Symlink => EntryKind::Symlink(link()?),
            EntryType::Link => {
                // kaniko writes absolute targets, which are those in the image, too.
                let link = link()?;
                let start = link.iter().position(|&byte| byte != b'/').unwrap_or(link.len());
                EntryKind::Hardlink(components(&link[start..])?)
            }
            EntryType::Fifo => EntryKind::Fifo,
            EntryType::Block | EntryType::Char => return Err(refused("a device node")),
            EntryType::GNUSparse => return Err(refused("a sparse file")),
            kind => {
                let kind = char::from(kind.as_byte()).escape_default();
                return Err(refused(format!("of unknown type `{kind}`")));
            }
        };
        let id = |id: u64| u32::try_from(id).map_err(|_| refused("an owner is out of range"));
        let user = || id(number(&old.uid, || header.uid())?);
        let group = || id(number(&old.gid, || header.gid())?);
        let modified = || number(&old.mtime, || header.mtime());
        let attributes = Attributes {
            mode: (number(&old.mode, || header.mode())? & 0o7777) as u16,
            user: self.user.map_or_else(user, Ok)?,
            group: self.group.map_or_else(group, Ok)?,
            modified: self.modified.map_or_else(modified, Ok)?.min(MAX_TIME),
            xattrs: self.xattrs,
        };
        Ok(ArchiveEntry { path: components(&bytes)?, kind, attributes })
    }
}

/// Splits the first record of a pax header, `LENGTH KEY=VALUE` and a newline, into its key, its
/// value and what follows; `None`: it is malformed. Only the length ends a record: names and values
/// of attributes may have newlines (POSIX.1-2001, pax, "pax Extended Header").
fn record(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = bytes.iter().position(|&byte| byte == b' ')?;
    let length: usize = std::str::from_utf8(&bytes[..space]).ok()?.parse().ok()?;
    let line = bytes.get(space + 1..length)?.strip_suffix(b"\n")?;
    let equals = line.iter().position(|&byte| byte == b'=')?;
    Some((&line[..equals], &line[equals + 1..], &bytes[length..]))
}

/// Returns whether an extended attribute is kept.
fn is_kept(name: &str) -> bool {
    let prefix = XATTRS.iter().find(|prefix| name.starts_with(**prefix));
    prefix.is_some_and(|prefix| name.len() > prefix.len() && name.len() <= MAX_NAME)
        && name.bytes().all(|byte| byte.is_ascii_graphic())
}

fn text(bytes: &[u8]) -> Vec<u8> {
    bytes.split(|&byte| byte == 0).next().unwrap_or_default().to_vec()
}

/// Splits a path.
///
/// # Errors
/// It leads out of the archive, or is too long.
pub fn components(path: &[u8]) -> Result<Components> {
    if path.first() == Some(&b'/') {
        return Err(refused("an absolute path"));
    }
    if path.len() > MAX_PATH || path.contains(&0) {
        return Err(refused(format!("a path with a zero, or of more than {MAX_PATH} bytes")));
    }
    let mut all = Components::new();
    for part in path.split(|&byte| byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return Err(refused("a path with `..`")),
            _ if part.len() > MAX_NAME => {
                return Err(refused(format!("a name of more than {MAX_NAME} bytes")));
            }
            _ => all.push(part.to_vec()),
        }
    }
    if all.len() > MAX_DEPTH {
        return Err(refused(format!("a path of more than {MAX_DEPTH} components")));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_its_length_ends_a_pax_record() {
        let header = b"12 path=a\nb\n29 SCHILY.xattr.user.a=x\n\n=y\n9 uid=77\n";
        let mut extended = Extended::default();
        extended.take_pax(header).unwrap();
        assert_eq!(extended.path.as_deref(), Some(&b"a\nb"[..]));
        assert_eq!(extended.xattrs, [("user.a".to_owned(), b"x\n\n=y".to_vec())]);
        assert_eq!(extended.user, Some(77));
        for wrong in [
            "x",
            "5",
            "99 a=b\n",
            "0 a=b\n",
            "6 a=b",
            "6 ab\n\n",
            "3 a=b\n",
            "-6 a=b\n",
            "7 a=b\n\0",
        ] {
            let refused = Extended::default().take_pax(wrong.as_bytes());
            assert_eq!(refused.unwrap_err().to_string(), "a pax record is malformed", "{wrong:?}");
        }
    }
}
