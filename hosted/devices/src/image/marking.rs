//! Dirty bit in the header of a qcow2 image that is open for writing.

use std::fs;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::refcounts::{COMMAND, Header, ImageError};
use crate::report::report;

/// State of the dirty bit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mark {
    Unset,
    Set,
    /// The bit could not be set: it may be missing on disk, although the host reports that once. No
    /// further writes.
    Failed,
    /// Closed: no further writes.
    Closed,
}

/// Marks an image as dirty from its first change until it is closed.
#[derive(Debug)]
pub struct Marking {
    mark: Mutex<Mark>,
    /// `None`: the image cannot be marked.
    marker: Option<Marker>,
}

/// An image that can be marked.
#[derive(Debug)]
struct Marker {
    file: fs::File,
    header: Header,
}

impl Marker {
    /// Sets or clears the bit, and syncs it to disk.
    fn write(&self, is_dirty: bool) -> io::Result<()> {
        self.header.write_dirty(&self.file, is_dirty)?;
        self.file.sync_data()
    }

    /// Rebuilds the reference counts of an image that was not closed. If the process is killed
    /// meanwhile, the next opener does it again: the dirty bit stays set until the image is closed.
    fn repair(&self) -> Result<(), ImageError> {
        let found = self.header.rebuild(&self.file)?;
        self.file.sync_data()?;
        report(&format!(
            "a qcow2 image was not closed; its reference counts have been rebuilt \
             ({} clusters were lost, {} were not counted)",
            found.leaked, found.missing
        ));
        Ok(())
    }
}

impl Marking {
    /// Creates a marking that does nothing.
    pub const fn none() -> Self {
        Self { mark: Mutex::new(Mark::Unset), marker: None }
    }

    /// Prepares an image for writing. One that was not closed is repaired.
    ///
    /// # Errors
    /// The image is invalid, cannot be repaired, or has reference counts that prevent allocation;
    /// the text is for the user.
    pub fn new(file: &fs::File) -> Result<Self, String> {
        let header = Header::read(file).map_err(|error| error.to_string())?;
        let is_dirty = header.is_dirty();
        let file = file.try_clone().map_err(|error| error.to_string())?;
        let marker = Marker { file, header };
        if is_dirty {
            let repaired = marker.repair();
            repaired.map_err(|error| format!("it was not closed, and {error} ({COMMAND})"))?;
        }
        if !header.counts_itself(&marker.file).map_err(|error| error.to_string())? {
            return Err(format!("its reference counts declare its own header free ({COMMAND})"));
        }
        let mark = Mutex::new(if is_dirty { Mark::Set } else { Mark::Unset });
        Ok(Self { mark, marker: header.is_plain().then_some(marker) })
    }

    fn mark(&self) -> MutexGuard<'_, Mark> {
        self.mark.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the image before a change.
    ///
    /// # Errors
    /// Errors of the host, now or at an earlier change, or the image is closed.
    pub fn begin_change(&self) -> io::Result<()> {
        let mut mark = self.mark();
        match (*mark, &self.marker) {
            (Mark::Closed, _) => return Err(io::Error::other("the image is closed")),
            (Mark::Failed, _) => {
                return Err(io::Error::other(
                    "the image could not be marked as dirty; it must be reopened",
                ));
            }
            (Mark::Unset, Some(marker)) => {
                marker.write(true).inspect_err(|_| *mark = Mark::Failed)?;
            }
            _ => {}
        }
        *mark = Mark::Set;
        Ok(())
    }

    /// Blocks further changes, flushes the image and clears the bit, unless pending requests may
    /// still change the image (not `is_drained`).
    ///
    /// # Errors
    /// Errors of the flush or the host. The bit stays set.
    pub fn close(
        &self,
        is_drained: bool,
        flush: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let mark = std::mem::replace(&mut *self.mark(), Mark::Closed);
        flush()?;
        match &self.marker {
            Some(marker) if is_drained && mark == Mark::Set => marker.write(false),
            _ => Ok(()),
        }
    }
}
