//! Encoding of messages.

use linux_raw_sys::general as linux;
use rustix::fs::{Stat, Timespec};
use rustix::io::Errno;
use std::sync::{Mutex, PoisonError};

use super::{Failed, HEAD, kind};

/// Returns the tag of a message, or `NOTAG`.
pub fn tag(message: &[u8]) -> [u8; 2] {
    message.get(5..HEAD).and_then(|tag| tag.try_into().ok()).unwrap_or([0xff; 2])
}

/// Builds an error response.
pub fn error(tag: [u8; 2], number: u32) -> Vec<u8> {
    let mut answer = ((HEAD + 4) as u32).to_le_bytes().to_vec();
    answer.push(kind::ERROR);
    answer.extend(tag);
    answer.extend(number.to_le_bytes());
    answer
}

/// A response under construction; its header is filled in at the end.
pub(super) struct Answer(pub(super) Vec<u8>);

impl Answer {
    pub(super) fn half(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn word(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn quad(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// Names and links of the host are shorter than 64 KiB.
    pub(super) fn text(&mut self, text: &[u8]) {
        let text = &text[..text.len().min(u16::MAX.into())];
        self.half(text.len() as u16);
        self.0.extend(text);
    }

    /// Writes the unique ID of a file: type, version, and its number among all files.
    pub(super) fn identity(&mut self, stat: &Stat, devices: &Devices) {
        const FOLDER: u8 = 0x80;
        const LINK: u8 = 0x02;
        self.0.push(match stat.st_mode & linux::S_IFMT {
            linux::S_IFDIR => FOLDER,
            linux::S_IFLNK => LINK,
            _ => 0,
        });
        self.word(stat.st_mtime as u32);
        self.quad(devices.number(stat));
    }

    /// Writes the attributes of a file, as in the answer to Tgetattr.
    #[allow(clippy::unnecessary_cast, reason = "the widths of fields differ between processors")]
    pub(super) fn attributes(&mut self, stat: &Stat, devices: &Devices) {
        /// All fields up to the number of blocks.
        const BASIC: u64 = 0x7ff;
        self.quad(BASIC);
        self.identity(stat, devices);
        self.word(stat.st_mode);
        self.word(stat.st_uid);
        self.word(stat.st_gid);
        for value in
            [stat.st_nlink as u64, stat.st_rdev, stat.st_size as u64, stat.st_blksize as u64]
        {
            self.quad(value);
        }
        self.quad(stat.st_blocks as u64);
        for value in [stat.st_atime as u64, stat.st_atime_nsec, stat.st_mtime as u64] {
            self.quad(value);
        }
        for value in [stat.st_mtime_nsec, stat.st_ctime as u64, stat.st_ctime_nsec] {
            self.quad(value);
        }
        // Birth time, generation and data version are not reported.
        self.0.extend([0; 32]);
    }
}

/// Host file systems of a share, in the order in which they were met: inode numbers are unique
/// within one only, and a driver takes files with equal numbers for one file.
#[derive(Default)]
pub(super) struct Devices(Mutex<Vec<u64>>);

impl Devices {
    /// Bits of a file's number that are its inode number; those above are its file system's.
    const INODE: u32 = 48;

    /// Returns the number of a file. Files of the first file system have their inode numbers.
    pub(super) fn number(&self, stat: &Stat) -> u64 {
        let mut devices = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = devices.iter().position(|&device| device == stat.st_dev);
        let index = known.unwrap_or_else(|| {
            devices.push(stat.st_dev);
            devices.len() - 1
        });
        let index = index as u64;
        if stat.st_ino >> Self::INODE == 0 && index >> (u64::BITS - Self::INODE - 1) == 0 {
            return index << Self::INODE | stat.st_ino;
        }
        // Too large a number, of a file system in memory: a hash, apart from all others.
        let mixed = (stat.st_ino ^ index.rotate_left(Self::INODE)).wrapping_mul(MIX);
        mixed ^ mixed >> 32 | 1 << (u64::BITS - 1)
    }
}

/// An odd multiplier without a pattern: 2^64 divided by the golden ratio.
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;

/// Remaining fields of a message.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn take(&mut self, length: usize) -> Result<&'a [u8], Failed> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Failed> {
        self.take(N)?.try_into().map_err(|_| Errno::INVAL)
    }

    pub(super) fn half(&mut self) -> Result<u16, Failed> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(super) fn word(&mut self) -> Result<u32, Failed> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn quad(&mut self) -> Result<u64, Failed> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads seconds and nanoseconds.
    pub(super) fn time(&mut self) -> Result<Timespec, Failed> {
        Ok(Timespec { tv_sec: self.quad()? as i64, tv_nsec: self.quad()? as i64 })
    }

    pub(super) fn text(&mut self) -> Result<&'a [u8], Failed> {
        let length = self.half()?;
        self.take(length.into())
    }

    /// Reads the name of a directory entry.
    pub(super) fn name(&mut self) -> Result<&'a [u8], Failed> {
        entry(self.text()?)
    }
}

/// Checks the name of a directory entry.
pub(super) fn entry(name: &[u8]) -> Result<&[u8], Failed> {
    match name {
        b"" | b"." | b".." => Err(Errno::ACCESS),
        name if name.contains(&b'/') => Err(Errno::ACCESS),
        name => Ok(name),
    }
}
