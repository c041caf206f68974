//! A disk whose file has a format of its own: qcow2.
//!
//! The library (`imago`) has the format. It never opens another file: an image that names one, for what it does not have itself or for its data, is
//! refused, because which files a machine reads is the user's to say. What the library keeps of tables goes to the file at flushes, soon
//! after the last change, and at the end.

use std::fs;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::AtomicBool;

use imago::file::File;
use imago::qcow2::Qcow2;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder, StorageOpenOptions};
use proto::requests::{op, status};
use proto::wedge::layout;

use crate::confine::{Failed, Files, confine};
use crate::worker::{Machine, Serve, Taken, Worker};

/// Bytes of a sector.
const SECTOR: u64 = 512;
/// Most bytes of a read or write, more than the device model lets a guest ask for.
const MOST_BYTES: usize = 1 << 20;

/// What a process is told of its image, whose descriptor is [`layout::DISKS_FD`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Image {
    /// Nothing is changed.
    pub read_only: bool,
    /// Sectors that the guest is told of.
    pub sectors: u64,
}

/// Serves a qcow2 image, until `end`.
///
/// # Errors
/// The process cannot be set up, or the image cannot be used.
pub fn serve_image(machine: Machine, image: Image, end: &AtomicBool) -> Result<(), Failed> {
    let worker = Worker::new(machine)?;
    // SAFETY: `parador run` starts the program with this descriptor, and nothing else of it uses it.
    let file = fs::File::from(unsafe { OwnedFd::from_raw_fd(layout::DISKS_FD as i32) });
    // The file is looked at in the confinement only: whoever has made it may mean harm.
    confine(Files::Own)?;
    let mut disk = Disk::open(file, image)?;
    Ok(worker.serve(&mut disk, end)?)
}

/// An open image.
struct Disk {
    access: FormatAccess<File>,
    image: Image,
    /// It has been told that the image or the host fails.
    has_told: bool,
}

impl Disk {
    fn open(file: fs::File, image: Image) -> Result<Self, Failed> {
        let failed = |error: io::Error| Failed::new("the image cannot be used", error);
        let options = StorageOpenOptions::new().write(!image.read_only);
        let file = File::from_open_file(file, options).map_err(failed)?;
        let opened = Qcow2::<File>::builder(file)
            .write(!image.read_only)
            .backing(None)
            .data_file(None)
            .open(DenyImplicitOpenGate::default())
            .map_err(failed)?;
        if opened.implicit_backing_file().is_some() || opened.requires_external_data_file() {
            return Err(Failed::new("the image cannot be used", "it needs another file"));
        }
        let access = FormatAccess::new(opened);
        if access.size() != image.sectors * SECTOR {
            return Err(Failed::new("the image cannot be used", "its size has changed"));
        }
        Ok(Self { access, image, has_told: false })
    }

    fn carry_out(&mut self, taken: &Taken<'_>) -> io::Result<()> {
        let range = |length: u64| -> io::Result<u64> {
            let end = taken.sector.checked_add(length.div_ceil(SECTOR));
            let is_whole = length.is_multiple_of(SECTOR);
            match end.filter(|end| is_whole && *end <= self.image.sectors) {
                Some(_) => Ok(taken.sector * SECTOR),
                None => Err(io::ErrorKind::InvalidInput.into()),
            }
        };
        if self.image.read_only && !matches!(taken.op, op::READ | op::FLUSH) {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        let count = u64::from(taken.count) * SECTOR;
        match taken.op {
            op::READ => {
                let length = taken.length();
                let at = range(length as u64)?;
                if length > MOST_BYTES {
                    return Err(io::ErrorKind::InvalidInput.into());
                }
                let mut bytes = vec![0; length];
                self.access.read(&mut bytes, at)?;
                taken.write(&taken.parts, &bytes).ok_or(io::ErrorKind::InvalidInput)?;
                Ok(())
            }
            op::WRITE => {
                let bytes = taken.read(&taken.parts, MOST_BYTES);
                let bytes = bytes.ok_or(io::ErrorKind::InvalidInput)?;
                let at = range(bytes.len() as u64)?;
                self.access.write(&bytes, at)
            }
            op::FLUSH => self.access.flush().and_then(|()| self.access.sync()),
            op::DISCARD => {
                let at = range(count)?;
                self.access.discard_to_any(at, count)
            }
            op::UNMAP => {
                let at = range(count)?;
                let done = self.access.discard_to_zero(at, count);
                done.or_else(|_| self.zero(at, count))
            }
            op::ZERO => {
                let at = range(count)?;
                let done = self.access.write_zeroes(at, count);
                done.or_else(|_| self.zero(at, count))
            }
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Zeros for images that have none of their own (version 2).
    fn zero(&self, mut at: u64, length: u64) -> io::Result<()> {
        let zeros = vec![0; MOST_BYTES.min(length as usize)];
        let end = at + length;
        while at < end {
            let now = zeros.len().min((end - at) as usize);
            self.access.write(&zeros[..now], at)?;
            at += now as u64;
        }
        Ok(())
    }

    /// Says once that something fails; the guest gets an error each time.
    fn tell(&mut self, error: &io::Error) {
        if !self.has_told {
            self.has_told = true;
            eprintln!("parador: a qcow2 image: {error}");
        }
    }
}

impl Serve for Disk {
    fn act(&mut self, taken: &Taken<'_>) -> u8 {
        match self.carry_out(taken) {
            Ok(()) => status::DONE,
            Err(error) if error.kind() == io::ErrorKind::Unsupported => status::UNSUPPORTED,
            // The guest's own nonsense.
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => status::FAILED,
            Err(error) => {
                self.tell(&error);
                status::FAILED
            }
        }
    }

    fn idle(&mut self) {
        if !self.image.read_only
            && let Err(error) = self.access.flush()
        {
            self.tell(&error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use imago::FormatCreateBuilder;
    use imago::qcow2::Qcow2CreateBuilder;
    use std::io::{Seek, Write};

    const SECTORS: u64 = 4096;

    /// An image with something at its beginning.
    fn image() -> (tempfile::NamedTempFile, Vec<u8>) {
        let place = tempfile::NamedTempFile::new().unwrap();
        let options = || StorageOpenOptions::new().write(true);
        let file = File::from_open_file(place.reopen().unwrap(), options()).unwrap();
        let builder: Qcow2CreateBuilder<File> = Qcow2::<File>::create_builder(file);
        builder.size(SECTORS * SECTOR).create().unwrap();
        let disk = open(&place).unwrap();
        disk.access.write(&vec![7; 5000], 512).unwrap();
        drop(disk);
        let bytes = fs::read(place.path()).unwrap();
        (place, bytes)
    }

    fn open(place: &tempfile::NamedTempFile) -> Result<Disk, Failed> {
        let file = fs::OpenOptions::new().read(true).write(true).open(place.path()).unwrap();
        Disk::open(file, Image { read_only: false, sectors: SECTORS })
    }

    #[test]
    fn what_is_written_is_read() {
        let (place, _) = image();
        let mut disk = open(&place).unwrap();
        let mut bytes = vec![0; 6000];
        disk.access.read(&mut bytes, 0).unwrap();
        assert!(bytes[512..5512].iter().all(|byte| *byte == 7) && bytes[5512..] == [0; 488]);
        disk.zero(0, 3 << 20 >> 1).unwrap();
        disk.idle();
        disk.access.read(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [0; 6000]);
        let other = Image { read_only: true, sectors: SECTORS + 1 };
        let failed = Disk::open(place.reopen().unwrap(), other).map(drop).unwrap_err();
        assert!(failed.to_string().contains("size has changed"));
    }

    /// Whatever is in a file, to read it is an error or an image; the process goes on.
    #[test]
    fn files_that_mean_harm() {
        let (mut place, good) = image();
        let mut random = 1_u64;
        let mut next = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) as usize % below
        };
        for round in 0..400 {
            let mut bytes = good.clone();
            for _ in 0..=round % 3 {
                // The header, or any table.
                let at = if round % 2 == 0 { next(104) } else { next(bytes.len() / 8) * 8 };
                bytes[at] = next(256) as u8;
            }
            place.rewind().unwrap();
            place.as_file().set_len(0).unwrap();
            place.write_all(&bytes).unwrap();
            // Writing is another matter: the library may end the process, which is what it is a process for.
            let image = Image { read_only: true, sectors: SECTORS };
            if let Ok(disk) = Disk::open(place.reopen().unwrap(), image) {
                let mut read = vec![0; 8192];
                let _ = disk.access.read(&mut read, 0);
            }
        }
    }
}
