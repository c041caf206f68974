//! Clients, and the path of their requests to the disk and back.
//!
//! Clients take turns, one request each, so that none delays the other clients. The server answers
//! a request when the disk has completed it: acknowledged data survives this server. A flush needs
//! no ordering here, as the disk includes all writes that it has completed before.
//!
//! After a failed flush, all flushes fail until the server restarts: a disk drops data that it
//! could not write, and its next flush succeeds (ATA8-ACS, FLUSH CACHE EXT). A client whose data
//! may be among that must not take the restart for a repair. So its flushes fail in the next
//! server, too, until it has read that one has failed: a word of memory that outlives the server
//! has a bit for each client that has not.

use core::sync::atomic::{AtomicU64, Ordering};

use heapless::Vec;
use proto::disk::{CompletionMark, Info, Operation, Request, SECTOR, Session, Status};
use proto::service::{DiskClient, DiskRange, MAX_SESSIONS};

use crate::device::{Command, DeviceError, Disk, Geometry, MAX_DEPTH};
use crate::partition::Partition;

/// Range of sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First sector on the disk.
    pub first: u64,
    /// Number of sectors.
    pub sectors: u64,
}

impl Extent {
    /// Returns the first sector after the extent.
    pub fn end(&self) -> u64 {
        self.first.saturating_add(self.sectors)
    }

    /// Returns whether the extents share a sector.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.first < other.end() && other.first < self.end()
    }
}

/// Error of a client's range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeError {
    /// The partition does not exist.
    NoPartition(u8),
    /// The range is empty, or exceeds the disk or partition.
    Beyond,
    /// The disk is read-only, the client wants to write.
    ReadOnly,
    /// The range shares sectors with an earlier client's, and one of the two may write.
    Shared,
}

/// Checks whether a client may have this range beside those of `others`, each with its read-only
/// flag.
pub fn admit(
    extent: &Extent,
    read_only: bool,
    others: &[(Extent, bool)],
) -> Result<(), RangeError> {
    let clash = |(other, other_read_only): &(Extent, bool)| {
        other.overlaps(extent) && !(read_only && *other_read_only)
    };
    if others.iter().any(clash) { Err(RangeError::Shared) } else { Ok(()) }
}

/// Finds a client's range on a disk of `sectors` sectors.
pub fn locate(
    part: &DiskRange,
    partitions: &[Partition],
    sectors: u64,
) -> Result<Extent, RangeError> {
    let whole = match part.partition {
        None => Extent { first: 0, sectors },
        Some(number) => {
            let found = partitions.iter().find(|partition| partition.number == number);
            found.ok_or(RangeError::NoPartition(number))?.extent
        }
    };
    let end = whole.first.checked_add(whole.sectors).filter(|&end| end <= sectors);
    let left = whole.sectors.checked_sub(part.first);
    let (Some(_), Some(left)) = (end, left) else { return Err(RangeError::Beyond) };
    let length = if part.sectors == 0 { left } else { part.sectors };
    if length == 0 || length > left {
        return Err(RangeError::Beyond);
    }
    Ok(Extent { first: whole.first + part.first, sectors: length })
}

/// Returns the properties of a range for its client.
pub fn info(client: &DiskClient, extent: &Extent, disk: &Geometry) -> Result<Info, RangeError> {
    if disk.read_only && !client.read_only {
        return Err(RangeError::ReadOnly);
    }
    Ok(Info {
        sectors: extent.sectors,
        read_only: client.read_only,
        discard: disk.discard && !client.read_only,
        write_zeroes: disk.write_zeroes && !client.read_only,
        max_sectors: disk.max_sectors,
        depth: disk.depth as u32,
    })
}

struct Client<'m> {
    session: Session<'m>,
    extent: Extent,
    /// Physical address of the session's memory.
    physical: u64,
    signal: u64,
    /// Completion of its last flush that failed.
    failure: Option<CompletionMark>,
}

#[derive(Clone, Copy)]
struct InFlight {
    client: usize,
    id: u16,
    is_flush: bool,
}

/// The disk server.
pub struct BlockServer<'m, D> {
    disk: D,
    depth: usize,
    /// By session index; a client without a range has no entry.
    clients: Vec<Option<Client<'m>>, MAX_SESSIONS>,
    in_flight: [Option<InFlight>; MAX_DEPTH],
    /// Index of the client whose turn is next.
    turn: usize,
    /// A flush has failed.
    flush_failed: bool,
    /// Bits of clients that have not read the failure of a flush, of this server or an earlier one.
    uninformed: &'m AtomicU64,
}

const _: () = assert!(MAX_SESSIONS <= u64::BITS as usize);

impl<'m, D: Disk> BlockServer<'m, D> {
    /// Creates a server without clients. The disk has no commands in flight. `uninformed` is 0 for
    /// the first server of the disk, and as the last server has left it for others.
    pub fn new(disk: D, uninformed: &'m AtomicU64) -> Self {
        Self {
            depth: disk.geometry().depth.clamp(1, MAX_DEPTH),
            disk,
            clients: Vec::new(),
            in_flight: [None; MAX_DEPTH],
            turn: 0,
            flush_failed: false,
            uninformed,
        }
    }

    /// Returns the disk.
    pub fn disk(&mut self) -> &mut D {
        &mut self.disk
    }

    /// Adds the next client: its session, whose memory is at `physical` for the disk, its range,
    /// and the events to signal to it. `None`: the client gets no disk.
    pub fn add(&mut self, client: Option<(Session<'m>, Extent, u64, u64)>) {
        let client = client.map(|(session, extent, physical, signal)| Client {
            session,
            extent,
            physical,
            signal,
            failure: None,
        });
        // There are at most as many sessions as places.
        let _ = self.clients.push(client);
    }

    /// Processes all available work, then requests signals from all clients. Calls `signal` with
    /// index, vCPU and events of each client to signal.
    pub fn serve(&mut self, signal: impl FnMut(usize, usize, u64)) -> Result<(), DeviceError> {
        self.serve_all(signal).inspect_err(|_| {
            // It may have failed, and its client repeats it.
            if self.in_flight.iter().flatten().any(|command| command.is_flush) {
                self.uninformed.store(u64::MAX, Ordering::SeqCst);
            }
        })
    }

    fn serve_all(&mut self, mut signal: impl FnMut(usize, usize, u64)) -> Result<(), DeviceError> {
        loop {
            let mut progress = false;
            while let Some((number, status)) = self.disk.completed()? {
                self.complete(number, status)?;
                progress = true;
            }
            if self.start_next() {
                self.disk.flush_doorbell();
                progress = true;
            }
            for (index, client) in self.clients.iter_mut().enumerate() {
                if let Some(client) = client
                    && client.session.take_signal()
                {
                    signal(index, client.session.notified_vcpu(), client.signal);
                }
            }
            // With all places in use, the next completion wakes the server.
            let full = self.free().is_none();
            let mut idle = true;
            for client in self.clients.iter_mut().flatten() {
                // Every client must get the request.
                idle &= client.session.sleep();
            }
            if !progress && (idle || full) {
                return Ok(());
            }
        }
    }

    /// Starts the next requests, in turns; returns whether there were any. At most one for each
    /// command number: a flush that fails at once occupies none, so a client that repeats it for
    /// ever would otherwise keep the requests of all others from the disk.
    fn start_next(&mut self) -> bool {
        let mut started = false;
        for _ in 0..self.depth {
            let Some(number) = self.free() else { break };
            let Some((client, request)) = self.next() else { break };
            self.start(number, client, &request);
            started = true;
        }
        started
    }

    /// Returns whether the disk has commands in flight.
    pub fn is_busy(&self) -> bool {
        self.in_flight.iter().any(Option::is_some)
    }

    /// Returns a free command number.
    fn free(&self) -> Option<usize> {
        self.in_flight[..self.depth].iter().position(Option::is_none)
    }

    /// Returns the next request of the client whose turn it is, or of the next client that has one.
    fn next(&mut self) -> Option<(usize, Request)> {
        let (count, turn) = (self.clients.len(), self.turn);
        (0..count).map(|step| (turn + step) % count).find_map(|index| {
            let is_informed = self.is_informed(index);
            let request = self.clients.get_mut(index)?.as_mut()?.session.take();
            // Repeated requests come first, so none of its flushes that failed is in the ring.
            let is_new = request.is_none_or(|request| !request.is_repeated);
            if is_informed && is_new && self.is_informed(index) {
                self.uninformed.fetch_and(!(1 << index), Ordering::SeqCst);
            }
            let request = request?;
            self.turn = (index + 1) % count;
            Some((index, request))
        })
    }

    /// Returns whether a client has read the failures of all its flushes, but its bit is still set.
    fn is_informed(&mut self, index: usize) -> bool {
        let is_flush = |command: &InFlight| command.client == index && command.is_flush;
        if self.uninformed.load(Ordering::SeqCst) >> index & 1 == 0
            || self.in_flight.iter().flatten().any(is_flush)
        {
            return false;
        }
        let Some(Some(client)) = self.clients.get_mut(index) else { return false };
        client.failure.is_some_and(|failure| client.session.has_read(failure))
    }

    /// Completes a flush as failed.
    fn fail_flush(&mut self, index: usize, id: u16) {
        let Some(Some(client)) = self.clients.get_mut(index) else { return };
        // Before the completion: this server may end before the client reads it.
        self.uninformed.fetch_or(1 << index, Ordering::SeqCst);
        client.failure = client.session.complete(id, Status::Failed);
    }

    fn start(&mut self, number: usize, index: usize, request: &Request) {
        let is_flush = request.operation == Operation::Flush;
        let is_uninformed = self.uninformed.load(Ordering::SeqCst) >> index & 1 != 0;
        if is_flush && (self.flush_failed || is_uninformed) {
            return self.fail_flush(index, request.id);
        }
        let Some(Some(client)) = self.clients.get_mut(index) else { return };
        let command = Command {
            operation: request.operation,
            // The session has checked the request against the extent's length.
            sector: client.extent.first + request.sector,
            sectors: request.sectors,
            address: client.physical + request.offset,
        };
        self.in_flight[number] = Some(InFlight { client: index, id: request.id, is_flush });
        self.disk.start(number, &command);
    }

    fn complete(&mut self, number: usize, status: Status) -> Result<(), DeviceError> {
        let place = self.in_flight.get_mut(number).and_then(Option::take);
        let InFlight { client, id, is_flush } =
            place.ok_or(DeviceError("the device completed a command that was not in flight"))?;
        if is_flush && status != Status::Ok {
            self.flush_failed = true;
            // The lost data may be of any client, also of one that has read an earlier failure.
            self.uninformed.store(u64::MAX, Ordering::SeqCst);
            self.clients.iter_mut().flatten().for_each(|client| client.failure = None);
        }
        // A flush that was in flight beside the failed one has lost the same data.
        if is_flush && self.flush_failed {
            self.fail_flush(client, id);
        } else if let Some(Some(client)) = self.clients.get_mut(client) {
            client.session.complete(id, status);
        }
        Ok(())
    }
}

const _: () = assert!(SECTOR == 512);

#[cfg(test)]
mod tests;
