//! Areas of the memory that the process shares with `parador run` and with device processes.

use std::io;

use proto::hosted::balloon::BalloonReport;
use proto::hosted::counters::VmCounters;
use proto::hosted::debug::DebugState;
use proto::hosted::{MAX_QUEUES, layout};
use proto::requests::Queue;
use vmm_mem::shared::SharedMemory;

use crate::Error;

/// The areas.
#[derive(Clone, Copy)]
pub struct SharedAreas<'o> {
    /// Request queues of disks and shared directories.
    pub queues: &'o [Queue; MAX_QUEUES],
    /// State shared with the debugger.
    pub debug: &'o DebugState,
    /// Statistics of the guest's memory.
    pub report: &'o BalloonReport,
    /// Counters of the devices.
    pub counters: &'o VmCounters,
}

impl<'o> SharedAreas<'o> {
    /// Locates the areas in the memory of [`layout::SHARED_FD`] and [`layout::COUNTERS_FD`].
    pub fn new(shared: &'o SharedMemory, counters: &'o SharedMemory) -> Result<Self, Error> {
        let failed = Error::host("locate an area of shared memory");
        // SAFETY: all of these areas is atomic, with no invalid value.
        unsafe {
            Ok(Self {
                queues: area(shared, layout::QUEUES).map_err(&failed)?,
                debug: area(shared, layout::DEBUG).map_err(&failed)?,
                report: area(shared, layout::BALLOON).map_err(&failed)?,
                counters: area(counters, 0).map_err(&failed)?,
            })
        }
    }
}

/// Returns the area at this offset, a multiple of the page size.
///
/// # Safety
/// All fields of the area must be atomic, with no invalid value.
unsafe fn area<T>(shared: &SharedMemory, offset: u64) -> io::Result<&T> {
    let place = shared.at(offset, size_of::<T>() as u64)?;
    // SAFETY: the area lies in the mapping, which lives as long as `shared`, page-aligned; the
    // caller guarantees the rest.
    Ok(unsafe { &*place.cast() })
}
