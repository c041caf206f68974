//! Counters of devices: what the workers of disks, networks, vsock and shared directories have
//! done, for `parador run` to display.
//!
//! They are in a memory file of their own ([`layout::COUNTERS_FD`]), which only the processes that
//! carry requests out have: no process that runs a guest maps it, so a guest changes a figure only
//! by its requests. A worker updates its counters with relaxed atomic operations and without locks;
//! a reader may see one of them a request ahead of another.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{MAX_NETS, MAX_QUEUES, latency, layout};

/// Kinds of operations of a device.
pub const OPS: usize = 4;

/// Devices: request queues by their index, then networks, then vsock.
pub const DEVICES: usize = MAX_QUEUES + MAX_NETS + 1;

/// Indices of [`DeviceCounters::ops`].
pub mod op {
    use crate::requests::op;

    /// Disk or shared directory: reads.
    pub const READ: usize = 0;
    /// Disk or shared directory: writes.
    pub const WRITE: usize = 1;
    /// Disk: flushes.
    pub const FLUSH: usize = 2;
    /// Disk: discards and writes of zeros.
    pub const DISCARD: usize = 3;
    /// Shared directory: all messages but reads and writes.
    pub const OTHER: usize = 2;
    /// Network: frames to the guest.
    pub const RECEIVE: usize = 0;
    /// Network: frames from the guest.
    pub const TRANSMIT: usize = 1;

    /// Returns the index for a request of a disk ([`crate::requests::op`]); `None`: unknown.
    pub const fn of_disk(request: u32) -> Option<usize> {
        match request {
            op::READ => Some(READ),
            op::WRITE => Some(WRITE),
            op::FLUSH => Some(FLUSH),
            op::DISCARD | op::UNMAP | op::ZERO => Some(DISCARD),
            _ => None,
        }
    }
}

/// Counters of one kind of operation, in cache lines of their own.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct OpCounters {
    requests: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
    nanoseconds: AtomicU64,
    longest: AtomicU64,
    buckets: [AtomicU64; latency::BUCKETS],
}

/// Values of [`OpCounters`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OpTotals {
    /// Ended requests, or frames; failed ones included.
    pub requests: u64,
    /// Failed requests, or dropped frames.
    pub failed: u64,
    /// Bytes of the data of successful requests.
    pub bytes: u64,
    /// Sum of the times from a worker's start of a request to its end.
    pub nanoseconds: u64,
    /// Longest of these times in nanoseconds.
    pub longest: u64,
    /// Number of these times by [`latency::bucket`].
    pub buckets: [u64; latency::BUCKETS],
}

/// Ended requests that [`OpCounters::add`] adds.
#[derive(Clone, Copy, Debug, Default)]
pub struct EndedRequests {
    /// Requests, or frames; failed ones included.
    pub requests: u64,
    /// Failed requests, or dropped frames.
    pub failed: u64,
    /// Bytes of the data of successful requests.
    pub bytes: u64,
    /// One time of all of them; `None`: none was measured.
    pub nanoseconds: Option<u64>,
}

impl EndedRequests {
    /// Returns one request. The bytes of a failed one do not count.
    pub fn one(bytes: u64, is_failed: bool, nanoseconds: Option<u64>) -> Self {
        let bytes = if is_failed { 0 } else { bytes };
        Self { requests: 1, failed: is_failed.into(), bytes, nanoseconds }
    }
}

impl OpTotals {
    /// Words of the counters in memory.
    pub const WORDS: usize = 5 + latency::BUCKETS;

    /// Decodes the counters in memory.
    pub fn from_words(words: &[u64; Self::WORDS]) -> Self {
        let [requests, failed, bytes, nanoseconds, longest, buckets @ ..] = *words;
        Self { requests, failed, bytes, nanoseconds, longest, buckets }
    }
}

impl OpCounters {
    /// Returns the values.
    pub fn totals(&self) -> OpTotals {
        let Self { requests, failed, bytes, nanoseconds, longest, buckets } = self;
        let [requests, failed, bytes, nanoseconds, longest] =
            [requests, failed, bytes, nanoseconds, longest].map(|word| word.load(Relaxed));
        let buckets = buckets.each_ref().map(|word| word.load(Relaxed));
        OpTotals { requests, failed, bytes, nanoseconds, longest, buckets }
    }

    /// Adds ended requests.
    pub fn add(&self, ended: &EndedRequests) {
        for (counter, value) in [
            (&self.requests, ended.requests),
            (&self.failed, ended.failed),
            (&self.bytes, ended.bytes),
            (&self.nanoseconds, ended.nanoseconds.unwrap_or(0)),
        ] {
            if value != 0 {
                counter.fetch_add(value, Relaxed);
            }
        }
        let Some(time) = ended.nanoseconds else { return };
        if let Some(bucket) = self.buckets.get(latency::bucket(time)) {
            bucket.fetch_add(1, Relaxed);
        }
        // Rarely written.
        if time > self.longest.load(Relaxed) {
            self.longest.fetch_max(time, Relaxed);
        }
    }
}

/// Counters of one device.
#[derive(Debug, Default)]
#[repr(C)]
pub struct DeviceCounters {
    /// By kind of operation: see [`op`].
    pub ops: [OpCounters; OPS],
}

/// Counters of a VM's devices. Zeroed memory is the initial value.
#[derive(Debug)]
#[repr(C)]
pub struct VmCounters {
    devices: [DeviceCounters; DEVICES],
}

const _: () = assert!(OpTotals::WORDS * 8 <= size_of::<OpCounters>());
const _: () = assert!(size_of::<VmCounters>() as u64 <= layout::COUNTERS_LENGTH);
const _: () = assert!(layout::SETUP + layout::SETUP_LENGTH <= layout::COUNTERS);
const _: () = assert!(layout::COUNTERS + layout::COUNTERS_LENGTH <= layout::WEDGE_END);

impl VmCounters {
    /// Returns the counters of the device with this request queue; the last ones for an index
    /// without a queue.
    pub fn queue(&self, index: usize) -> &DeviceCounters {
        &self.devices[index.min(DEVICES - 1)]
    }

    /// Returns the counters of a network; those of vsock follow.
    pub fn net(&self, index: usize) -> &DeviceCounters {
        self.queue(MAX_QUEUES + index)
    }

    /// Returns the offset in the memory file of an operation of a device. Its index is that of its
    /// request queue, or [`MAX_QUEUES`] and that of its network.
    pub const fn offset(device: usize, op: usize) -> u64 {
        ((device * OPS + op) * size_of::<OpCounters>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_add_up() {
        let counters = OpCounters::default();
        counters.add(&EndedRequests::one(512, false, Some(30)));
        counters.add(&EndedRequests::one(512, true, Some(7000)));
        counters.add(&EndedRequests::one(4096, false, Some(20)));
        // Frames, whose time is not measured.
        counters.add(&EndedRequests::one(100, false, None));
        let totals = counters.totals();
        assert_eq!((totals.requests, totals.failed, totals.bytes), (4, 1, 4708));
        assert_eq!((totals.nanoseconds, totals.longest), (7050, 7000));
        assert_eq!(totals.buckets[..3], [2, 1, 0]);
        let mut words = [0; OpTotals::WORDS];
        words[..7].copy_from_slice(&[4, 1, 4708, 7050, 7000, 2, 1]);
        assert_eq!(OpTotals::from_words(&words), totals);
    }

    #[test]
    fn devices_have_different_places() {
        let counters = VmCounters { devices: Default::default() };
        let base = &raw const counters as u64;
        for (device, counted) in [
            (0, counters.queue(0)),
            (MAX_QUEUES - 1, counters.queue(MAX_QUEUES - 1)),
            (MAX_QUEUES, counters.net(0)),
            (DEVICES - 1, counters.net(MAX_NETS)),
            (DEVICES - 1, counters.queue(usize::MAX)),
        ] {
            let at = &raw const counted.ops[op::WRITE] as u64;
            assert_eq!(at - base, VmCounters::offset(device, op::WRITE));
        }
        assert_eq!(op::of_disk(crate::requests::op::ZERO), Some(op::DISCARD));
        assert_eq!(op::of_disk(u32::MAX), None);
    }
}
