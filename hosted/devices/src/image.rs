//! Disk with a qcow2 image, or with an overlay of another disk.
//!
//! The library (`imago`) implements the format. It never opens another file, because only the user
//! decides which files a VM reads: `parador run` opens backing files, and an image that names one
//! without it, or an external data file, is refused. An overlay is an empty qcow2 image in a file
//! without a name, above a base that is only read; it ends with the VM. Cached tables are written
//! to the file at flushes, shortly after the last change, and at the end.
//!
//! Whenever the process is killed or the host loses power, flushed data is in the image, and no
//! table points to a cluster that is counted as free: the library orders its writes
//! (third_party/README.md). Unused clusters may stay counted. A modified image is therefore marked
//! as dirty until it is closed, and the counts of a dirty one are rebuilt before use
//! ([`refcounts`]).

use std::fs;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use imago::file::File;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{
    DenyImplicitOpenGate, FormatAccess, FormatCreateBuilder, FormatDriverBuilder, Storage,
    StorageOpenOptions,
};
use proto::errno::Cause;
use proto::hosted::{counters, layout};
use proto::requests::{op, status};

use self::marking::Marking;
use crate::confine::{FileAccess, SetupError, confine};
use crate::report::report;
use crate::worker::{Executed, GuestQueue, Serve, TakenRequest, Worker};

#[cfg(test)]
mod crashes;
mod marking;
mod refcounts;

/// Requests in parallel.
const THREADS: usize = 8;
/// Bytes per sector.
const SECTOR: u64 = 512;
/// Longest read or write in bytes, more than the device model permits.
const MAX_BYTES: usize = 1 << 20;

/// Format of the base of an overlay, or of a backing file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Base {
    /// Sectors in order.
    Raw,
    /// A qcow2 image.
    Qcow2,
}

/// Configuration of an image; its descriptor is [`layout::DISKS_FD`]. With a base, that is the
/// base's, and the next one is that of an empty file for the changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ImageConfig {
    /// Format of the base, if this is an overlay.
    pub base: Option<Base>,
    /// Read-only.
    pub read_only: bool,
    /// Size in sectors as reported to the guest.
    pub sectors: u64,
}

/// Serves a qcow2 image until `end`. `backing` are the formats of its backing files, from the one
/// that it names on down; their descriptors follow the others.
///
/// # Errors
/// The process cannot be set up, or the image is unusable.
pub fn serve_image(
    machine: GuestQueue,
    image: ImageConfig,
    backing: &[Base],
    end: &AtomicBool,
) -> Result<(), SetupError> {
    let worker = Worker::new(machine)?;
    let mut numbers = layout::DISKS_FD as i32..;
    let mut take = || {
        let number = numbers.next()?;
        // SAFETY: `parador run` starts the program with as many descriptors as are taken, and no
        // other code of it uses them.
        Some(fs::File::from(unsafe { OwnedFd::from_raw_fd(number) }))
    };
    let missing = || SetupError::new("the image is unusable", "it has no descriptor");
    let file = take().ok_or_else(missing)?;
    let changes = image.base.and_then(|base| Some((base, take()?)));
    let backing: Vec<_> = backing.iter().filter_map(|&format| Some((format, take()?))).collect();
    // The files are only read in the sandbox: they may be malicious.
    let threads = confine(FileAccess::Own, THREADS)?;
    let below = Disk::chain(backing)?;
    let disk = match changes {
        Some((base, changes)) => Disk::overlay(base, file, below, changes, image),
        None => Disk::open(file, below, image),
    }?;
    Ok(worker.serve(disk, &threads, end)?)
}

/// An open image.
///
/// Several threads use it. The library locks its tables, and holds no lock while it reads data or
/// writes to allocated clusters; while it waits for a sync, it holds only locks of allocating
/// writes.
struct Disk<S: Storage + 'static = File> {
    access: FormatAccess<S>,
    claims: RangeLocks,
    /// Granularity of zeroing in bytes.
    cluster: u64,
    image: ImageConfig,
    marking: Marking,
    /// An error has been reported.
    has_told: AtomicBool,
}

/// Creates the failure of an invalid or unreadable image.
fn unusable(error: &io::Error) -> SetupError {
    SetupError::new("the image is unusable", Cause::new(error.raw_os_error(), error))
}

/// Opens a file for the library, which reads it, or reads and writes it.
fn storage(file: fs::File, is_written: bool) -> Result<File, SetupError> {
    let options = StorageOpenOptions::new().write(is_written);
    File::from_open_file(file, options).map_err(|error| unusable(&error))
}

impl Disk {
    /// Opens backing files, the lowest one last, to read.
    fn chain(files: Vec<(Base, fs::File)>) -> Result<Option<FormatAccess<File>>, SetupError> {
        files.into_iter().rev().try_fold(None, |below, (format, file)| {
            Self::open_below(format, storage(file, false)?, below).map(Some)
        })
    }

    /// Opens a file that is only read, above `below`.
    fn open_below(
        format: Base,
        file: File,
        below: Option<FormatAccess<File>>,
    ) -> Result<FormatAccess<File>, SetupError> {
        match format {
            Base::Raw => {
                let raw = Raw::<File>::builder(file).write(false);
                let raw = raw.open(DenyImplicitOpenGate::default());
                Ok(FormatAccess::new(raw.map_err(|error| unusable(&error))?))
            }
            Base::Qcow2 => Self::open_image(file, false, below),
        }
    }

    fn open(
        file: fs::File,
        below: Option<FormatAccess<File>>,
        image: ImageConfig,
    ) -> Result<Self, SetupError> {
        let marking = if image.read_only { Ok(Marking::none()) } else { Marking::new(&file) };
        let marking = marking.map_err(|error| SetupError::new("the image is unusable", error))?;
        let file = storage(file, !image.read_only)?;
        Ok(Self { marking, ..Self::with(file, below, image)? })
    }

    /// Opens a new overlay of `file`, which is above `below`. No other process ever opens the
    /// overlay, so it needs no marking.
    fn overlay(
        base: Base,
        file: fs::File,
        below: Option<FormatAccess<File>>,
        changes: fs::File,
        image: ImageConfig,
    ) -> Result<Self, SetupError> {
        let failed = |error: io::Error| unusable(&error);
        let below = Self::open_below(base, storage(file, false)?, below)?;
        // After a reset of the VM it has the changes of before.
        if changes.metadata().map_err(failed)?.len() == 0 {
            let created = storage(changes.try_clone().map_err(failed)?, true)?;
            let bytes = image.sectors * SECTOR;
            Qcow2::<File>::create_builder(created).size(bytes).create().map_err(failed)?;
        }
        let changes = storage(changes, true)?;
        Self::of_access(Self::open_image(changes, true, Some(below))?, image)
    }
}

impl<S: Storage + 'static> Disk<S> {
    fn with(
        file: S,
        below: Option<FormatAccess<S>>,
        image: ImageConfig,
    ) -> Result<Self, SetupError> {
        Self::of_access(Self::open_image(file, !image.read_only, below)?, image)
    }

    /// Opens a qcow2 image, above `below` if that is given.
    fn open_image(
        file: S,
        is_written: bool,
        below: Option<FormatAccess<S>>,
    ) -> Result<FormatAccess<S>, SetupError> {
        let failed = |error: io::Error| unusable(&error);
        let has_below = below.is_some();
        let opened = Qcow2::<S>::builder(file)
            .write(is_written)
            .backing(below)
            .data_file(None)
            .open(DenyImplicitOpenGate::default())
            .map_err(failed)?;
        let lacks_backing = opened.implicit_backing_file().is_some() && !has_below;
        if lacks_backing || opened.requires_external_data_file() {
            return Err(SetupError::new(
                "the image is unusable",
                "it has a backing file or an external data file",
            ));
        }
        Ok(FormatAccess::new(opened))
    }

    fn of_access(access: FormatAccess<S>, image: ImageConfig) -> Result<Self, SetupError> {
        let cluster = access.inner().zero_granularity().unwrap_or(SECTOR);
        if access.size() != image.sectors * SECTOR {
            return Err(SetupError::new("the image is unusable", "its size has changed"));
        }
        Ok(Self {
            access,
            claims: RangeLocks::default(),
            cluster,
            image,
            marking: Marking::none(),
            has_told: AtomicBool::new(false),
        })
    }

    fn carry_out(&self, taken: &TakenRequest<'_>) -> io::Result<()> {
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
        if matches!(taken.op, op::WRITE | op::DISCARD | op::UNMAP | op::ZERO) {
            self.marking.begin_change()?;
        }
        let count = u64::from(taken.count) * SECTOR;
        match taken.op {
            op::READ => {
                let length = taken.length();
                let at = range(length as u64)?;
                if length > MAX_BYTES {
                    return Err(io::ErrorKind::InvalidInput.into());
                }
                let mut bytes = vec![0; length];
                let _claim = self.claims.lock(at, length as u64, false);
                self.access.read(&mut bytes, at)?;
                taken.write(&taken.parts, &bytes).ok_or(io::ErrorKind::InvalidInput)?;
                Ok(())
            }
            op::WRITE => {
                let bytes = taken.read(&taken.parts, MAX_BYTES);
                let bytes = bytes.ok_or(io::ErrorKind::InvalidInput)?;
                let at = range(bytes.len() as u64)?;
                let _claim = self.claims.lock(at, bytes.len() as u64, false);
                self.access.write(&bytes, at)
            }
            op::FLUSH => {
                self.access.flush()?;
                self.access.sync()
            }
            op::DISCARD => {
                let at = range(count)?;
                let _claim = self.claims.lock(at, count, true);
                // SAFETY: no other request uses this range, so no pending access refers to the old
                // location of its data.
                unsafe { self.access.discard_to_any_unsafe(at, count) }
            }
            op::UNMAP | op::ZERO => self.make_zeros(range(count)?, count, taken.op == op::UNMAP),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Zeroes a range; `may_unmap` permits to deallocate it.
    ///
    /// Requests in the same clusters must wait: if the rest of a cluster is zero already, the
    /// library zeroes the whole cluster, and a concurrent write to the rest would be lost.
    fn make_zeros(&self, at: u64, length: u64, may_unmap: bool) -> io::Result<()> {
        let first = at - at % self.cluster;
        let end = (at + length).next_multiple_of(self.cluster);
        let _claim = self.claims.lock(first, end - first, true);
        let done = if may_unmap {
            // SAFETY: no other request uses this range, so no pending access refers to the old
            // location of its data.
            unsafe { self.access.discard_to_zero_unsafe(at, length) }
        } else {
            self.access.write_zeroes(at, length)
        };
        done.or_else(|_| self.zero(at, length))
    }

    /// Writes zeros to images without zero clusters (version 2).
    fn zero(&self, mut at: u64, length: u64) -> io::Result<()> {
        let zeros = vec![0; MAX_BYTES.min(length as usize)];
        let end = at + length;
        while at < end {
            let now = zeros.len().min((end - at) as usize);
            self.access.write(&zeros[..now], at)?;
            at += now as u64;
        }
        Ok(())
    }

    /// Reports the first error; the guest gets an error each time.
    fn report_error(&self, error: &io::Error) {
        if !self.has_told.swap(true, Relaxed) {
            report(&format!("qcow2 image: {}", Cause::new(error.raw_os_error(), error)));
        }
    }
}

/// Ranges in use by requests. Deallocation excludes other requests from its range: the old location
/// of the data may immediately be reused for other data or a table.
#[derive(Default)]
struct RangeLocks {
    /// First byte, end, and whether the range is exclusive.
    held: Mutex<Vec<(u64, u64, bool)>>,
    left: Condvar,
}

impl RangeLocks {
    fn held(&self) -> MutexGuard<'_, Vec<(u64, u64, bool)>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no conflicting range is locked, and locks this one.
    fn lock(&self, at: u64, length: u64, alone: bool) -> RangeLock<'_> {
        let range = (at, at + length, alone);
        let meets =
            |other: &(u64, u64, bool)| other.0 < range.1 && range.0 < other.1 && (alone || other.2);
        let held = self.left.wait_while(self.held(), |held| held.iter().any(meets));
        held.unwrap_or_else(PoisonError::into_inner).push(range);
        RangeLock(self, range)
    }
}

/// A locked range; dropping it unlocks the range.
struct RangeLock<'a>(&'a RangeLocks, (u64, u64, bool));

impl Drop for RangeLock<'_> {
    fn drop(&mut self) {
        let mut held = self.0.held();
        if let Some(place) = held.iter().position(|range| *range == self.1) {
            held.swap_remove(place);
        }
        drop(held);
        self.0.left.notify_all();
    }
}

impl<S: Storage + 'static> Serve for Disk<S> {
    fn execute(&self, taken: &TakenRequest<'_>) -> Executed {
        let status = match self.carry_out(taken) {
            Ok(()) => status::DONE,
            Err(error) if error.kind() == io::ErrorKind::Unsupported => status::UNSUPPORTED,
            // An invalid request of the guest.
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => status::FAILED,
            Err(error) => {
                self.report_error(&error);
                status::FAILED
            }
        };
        let bytes = match taken.op {
            op::READ | op::WRITE => taken.length() as u64,
            op::DISCARD | op::UNMAP | op::ZERO => u64::from(taken.count) * SECTOR,
            _ => 0,
        };
        let op = counters::op::of_disk(taken.op);
        Executed { status, op, bytes, is_failed: status != status::DONE }
    }

    fn idle(&self) {
        if !self.image.read_only
            && let Err(error) = self.access.flush()
        {
            self.report_error(&error);
        }
    }

    /// Requests in progress may still change the image, which then stays marked.
    fn close(&self, is_drained: bool) {
        if self.image.read_only {
            return;
        }
        let flush = || self.access.flush().and_then(|()| self.access.sync());
        let done = self.marking.close(is_drained, flush);
        if let Err(error) = done {
            self.report_error(&error);
        }
    }
}

#[cfg(test)]
mod tests;
