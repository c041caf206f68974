//! The mark of an image that is being written to: the dirty bit of its header.

use std::fs;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::refcounts::{COMMAND, Header, Unsound};

/// Whether an image is marked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mark {
    Unset,
    Set,
    /// It is closed: nothing is written any more.
    Closed,
}

/// Marks an image from its first change until it is closed.
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
    /// Sets or clears the mark; it is on the disk then.
    fn write(&self, is_dirty: bool) -> io::Result<()> {
        self.header.write_dirty(&self.file, is_dirty)?;
        self.file.sync_data()
    }

    /// Rebuilds the counts of an image that was not closed.
    fn repair(&self) -> Result<(), Unsound> {
        let found = self.header.rebuild(&self.file)?;
        self.file.sync_data()?;
        eprintln!(
            "parador: a qcow2 image was not closed; its reference counts have been rebuilt \
             ({} clusters were lost, {} were not counted)",
            found.leaked, found.missing
        );
        Ok(())
    }
}

impl Marking {
    /// Marks nothing.
    pub const fn none() -> Self {
        Self { mark: Mutex::new(Mark::Unset), marker: None }
    }

    /// Prepares an image that is to be written to. One that was not closed is repaired.
    ///
    /// # Errors
    /// It is no image, cannot be repaired, or has counts that nothing can be allocated with: what the user is told.
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
            return Err(format!("it counts its own header as free ({COMMAND})"));
        }
        let mark = Mutex::new(if is_dirty { Mark::Set } else { Mark::Unset });
        Ok(Self { mark, marker: header.is_plain().then_some(marker) })
    }

    fn mark(&self) -> MutexGuard<'_, Mark> {
        self.mark.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the image before it is changed.
    ///
    /// # Errors
    /// The host's, or the image is closed.
    pub fn begin_change(&self) -> io::Result<()> {
        let mut mark = self.mark();
        match (*mark, &self.marker) {
            (Mark::Closed, _) => return Err(io::Error::other("the image is closed")),
            (Mark::Unset, Some(marker)) => marker.write(true)?,
            _ => {}
        }
        *mark = Mark::Set;
        Ok(())
    }

    /// Lets no change begin any more, flushes the image, and takes the mark away, unless requests that have begun
    /// may still change it (`is_settled`).
    ///
    /// # Errors
    /// Those of the flush, or the host's. The mark stays.
    pub fn close(
        &self,
        is_settled: bool,
        flush: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let mark = std::mem::replace(&mut *self.mark(), Mark::Closed);
        flush()?;
        match &self.marker {
            Some(marker) if is_settled && mark == Mark::Set => marker.write(false),
            _ => Ok(()),
        }
    }
}
