//! Disk session: block requests from a client to a disk server, in shared memory
//! ([`session`](crate::session)).
//!
//! | bytes | content |
//! |---|---|
//! | 0–4095 | header, request ring (to the server), completion ring (to the client) |
//! | 4096… | data buffers; the client alone assigns them to requests |
//!
//! The disk accesses the buffers by DMA: neither kernel nor server copies data. The server
//! completes every request once, in any order; concurrent requests are unordered. A write completes
//! when the disk has accepted it, an [`Operation::Flush`] when all requests completed before its
//! submission are on stable storage.
//!
//! A restarted server does not know the requests in flight, so the client submits all of them
//! again, marked as repeated and before all new ones. Every operation is idempotent, because its
//! data stays in its buffer until the completion.
//!
//! Request: word 0 operation (byte 0), 1 if it is repeated (byte 1), id (bytes 2–3), sectors (bytes
//! 4–7); word 1 first sector; word 2 offset of the data. Completion: id (bytes 0–1), status (byte
//! 2).

use core::sync::atomic::AtomicU64;

use crate::ring::{self, Broken, Consumer, Producer};
use crate::session::{ClientLink, Connection, HEADER, INFO, Link, ServerLink};

/// Sector size in bytes.
pub const SECTOR: u64 = 512;
/// Largest number of requests of a client in flight.
pub const SLOTS: usize = 64;
/// Offset of the first data buffer.
pub const DATA: u64 = 4096;
/// Allocation unit of data buffers in bytes.
pub const BUFFER: u64 = 4096;
/// Largest number of buffers of a session.
pub const MAX_BUFFERS: usize = 128;
/// Default length of a session's memory in bytes.
pub const SESSION_BYTES: u64 = DATA + 63 * BUFFER;

const REQUEST_WORDS: usize = 3;
const REQUESTS: usize = HEADER;
const COMPLETIONS: usize = REQUESTS + ring::words(REQUEST_WORDS, SLOTS);
const WORDS: usize = COMPLETIONS + ring::words(1, SLOTS);
const _: () = assert!(8 * WORDS as u64 <= DATA);

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Operation {
    /// Reads sectors to the data buffer.
    Read = 1,
    /// Writes sectors from the data buffer.
    Write = 2,
    /// Makes all completed writes durable. Sectors and data are 0.
    Flush = 3,
    /// Discards the contents of sectors. No data.
    Discard = 4,
    /// Writes zeros to sectors. No data.
    WriteZeroes = 5,
}

impl Operation {
    /// Decodes an operation.
    pub const fn from_code(code: u8) -> Option<Self> {
        from_code!(code: u8, Read, Write, Flush, Discard, WriteZeroes)
    }

    /// Returns whether the operation transfers data.
    pub const fn has_data(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }

    /// Returns whether the operation changes the disk's contents.
    pub const fn changes(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes)
    }
}

/// Result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// I/O error. A write may have been carried out in part.
    Failed = 1,
    /// Outside of the client's range of the disk, or malformed. Nothing was carried out.
    Invalid = 2,
    /// A change of a read-only disk. Nothing was carried out.
    ReadOnly = 3,
    /// An operation that the disk does not support. Nothing was carried out.
    Unsupported = 4,
}

impl Status {
    /// Decodes a status; unknown codes are failures.
    pub const fn from_code(code: u8) -> Self {
        match from_code!(code: u8, Ok, Invalid, ReadOnly, Unsupported) {
            Some(status) => status,
            None => Self::Failed,
        }
    }
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Operation.
    pub operation: Operation,
    /// Identifies the request in its completion.
    pub id: u16,
    /// Number of sectors.
    pub sectors: u32,
    /// First sector, from the start of the client's range.
    pub sector: u64,
    /// Offset of the data in the session's memory, a multiple of [`SECTOR`]; 0: no data.
    pub offset: u64,
    /// The client submitted the request before this connection. An earlier server may have carried
    /// it out.
    pub is_repeated: bool,
}

impl Request {
    fn pack(&self) -> [u64; REQUEST_WORDS] {
        let first = self.operation as u64
            | u64::from(self.is_repeated) << 8
            | u64::from(self.id) << 16
            | u64::from(self.sectors) << 32;
        [first, self.sector, self.offset]
    }

    fn id(words: [u64; REQUEST_WORDS]) -> u16 {
        (words[0] >> 16) as u16
    }

    fn unpack(words: [u64; REQUEST_WORDS]) -> Option<Self> {
        Some(Self {
            operation: Operation::from_code(words[0] as u8)?,
            id: Self::id(words),
            sectors: (words[0] >> 32) as u32,
            sector: words[1],
            offset: words[2],
            is_repeated: words[0] >> 8 & 1 != 0,
        })
    }

    /// Returns the length of the data in bytes.
    pub fn bytes(&self) -> u64 {
        if self.operation.has_data() { u64::from(self.sectors) * SECTOR } else { 0 }
    }
}

/// Properties of a client's range of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Info {
    /// Length in sectors.
    pub sectors: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// [`Operation::Discard`] is supported.
    pub discard: bool,
    /// [`Operation::WriteZeroes`] is supported.
    pub write_zeroes: bool,
    /// Largest number of sectors of one request; at least 8.
    pub max_sectors: u32,
    /// Queue depth of the disk: a hint.
    pub depth: u32,
}

impl Info {
    fn pack(&self) -> [u64; INFO] {
        let flags = u64::from(self.read_only)
            | u64::from(self.discard) << 1
            | u64::from(self.write_zeroes) << 2;
        [self.sectors, flags, self.max_sectors.into(), self.depth.into(), 0, 0, 0, 0]
    }

    fn unpack(words: [u64; INFO]) -> Self {
        let small = |word: u64| u32::try_from(word).unwrap_or(u32::MAX);
        Self {
            sectors: words[0],
            read_only: words[1] & 1 != 0,
            discard: words[1] & 2 != 0,
            write_zeroes: words[1] & 4 != 0,
            max_sectors: small(words[2]).max(8),
            depth: small(words[3]).max(1),
        }
    }

    /// Validates a request for this range, except for its data buffer.
    ///
    /// # Errors
    /// The status with which the request must be completed.
    pub fn check(&self, request: &Request) -> Result<(), Status> {
        if request.operation == Operation::Flush {
            return Ok(());
        }
        let end = request.sector.checked_add(request.sectors.into());
        if request.sectors == 0
            || end.is_none_or(|end| end > self.sectors)
            || (request.operation.has_data() && request.sectors > self.max_sectors)
        {
            return Err(Status::Invalid);
        }
        match request.operation {
            operation if operation.changes() && self.read_only => Err(Status::ReadOnly),
            Operation::Discard if !self.discard => Err(Status::Unsupported),
            Operation::WriteZeroes if !self.write_zeroes => Err(Status::Unsupported),
            _ => Ok(()),
        }
    }
}

/// Adjacent data buffers: a part of the session's memory that belongs to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Offset in the session's memory.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Completion of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Tag that the caller passed with the request.
    pub tag: u64,
    /// Result.
    pub status: Status,
}

#[derive(Clone, Copy)]
struct Pending {
    request: Request,
    tag: u64,
    /// Sequence number of the submission.
    number: u64,
    /// The request is in the ring of the current connection.
    sent: bool,
}

/// Client side of a session: keeps requests until their completion, over restarts of the server.
pub struct Client<'m> {
    memory: &'m [AtomicU64],
    link: ClientLink<'m>,
    requests: Producer<'m, REQUEST_WORDS, SLOTS>,
    completions: Consumer<'m, 1, SLOTS>,
    pending: [Option<Pending>; SLOTS],
    next_number: u64,
    /// Allocated buffers, one bit each.
    buffers: u128,
    buffer_count: usize,
    must_signal: bool,
    /// Forgotten requests are in flight.
    has_forgotten: bool,
}

impl<'m> Client<'m> {
    /// Creates the client of a session of `length` bytes whose first words are `memory`. `None` if
    /// the session is too short.
    pub fn new(memory: &'m [AtomicU64], length: u64) -> Option<Self> {
        let buffers = length.checked_sub(DATA)? / BUFFER;
        Some(Self {
            memory,
            link: ClientLink::new(memory)?,
            requests: Producer::new(memory.get(REQUESTS..)?)?,
            completions: Consumer::new(memory.get(COMPLETIONS..)?)?,
            pending: [None; SLOTS],
            next_number: 0,
            buffers: 0,
            buffer_count: buffers.min(MAX_BUFFERS as u64) as usize,
            must_signal: false,
            has_forgotten: false,
        })
    }

    /// Returns the disk's properties once the server was connected. The size is constant over
    /// restarts of the server.
    pub fn info(&self) -> Option<Info> {
        self.link.info().map(Info::unpack)
    }

    /// Allocates adjacent buffers for `bytes` bytes of data; `None` if not enough are free. They
    /// belong to the caller until [`release`](Self::release).
    pub fn allocate(&mut self, bytes: u64) -> Option<Buffer> {
        let count = bytes.div_ceil(BUFFER);
        if count == 0 || count > self.buffer_count as u64 {
            return None;
        }
        let mask = u128::MAX >> (128 - count);
        let first = (0..=self.buffer_count - count as usize)
            .find(|first| self.buffers & mask << first == 0)?;
        self.buffers |= mask << first;
        Some(Buffer { offset: DATA + first as u64 * BUFFER, length: count * BUFFER })
    }

    /// Frees buffers, after the request was completed and its data copied out.
    pub fn release(&mut self, buffer: Buffer) {
        let first = buffer.offset.saturating_sub(DATA) / BUFFER;
        for index in first..first + buffer.length / BUFFER {
            if index < MAX_BUFFERS as u64 {
                self.buffers &= !(1 << index);
            }
        }
    }

    /// Returns whether another request can be submitted.
    pub fn has_room(&self) -> bool {
        !self.has_forgotten && self.pending.iter().any(Option::is_none)
    }

    /// Lets no request be submitted before all in flight are completed: their issuer has forgotten
    /// them, and a late write must not undo one of a later request.
    pub fn forget(&mut self) {
        self.has_forgotten = self.under_way() != 0;
    }

    /// Returns the number of requests in flight.
    pub fn under_way(&self) -> usize {
        self.pending.iter().flatten().count()
    }

    /// Submits a request, or queues it until the server is connected. `offset` is that of the data
    /// in the session's memory, 0 without data. `false` without [room](Self::has_room).
    ///
    /// After one or several submissions, [`take_signal`](Self::take_signal) returns whether to
    /// signal the server.
    #[must_use]
    pub fn submit(
        &mut self,
        operation: Operation,
        sector: u64,
        sectors: u32,
        offset: u64,
        tag: u64,
    ) -> bool {
        if self.has_forgotten {
            return false;
        }
        let Some(id) = self.pending.iter().position(Option::is_none) else { return false };
        let request =
            Request { operation, id: id as u16, sectors, sector, offset, is_repeated: false };
        self.pending[id] = Some(Pending { request, tag, number: self.next_number, sent: false });
        self.next_number += 1;
        if self.link.is_connected() {
            self.send(id);
        }
        true
    }

    fn send(&mut self, id: usize) {
        let Some(pending) = &mut self.pending[id] else { return };
        match self.requests.put(pending.request.pack()) {
            Ok(true) => {
                pending.sent = true;
                self.must_signal |= self.requests.must_signal();
            }
            // The ring has a slot for every request; a server that reports it full violates the
            // protocol.
            Ok(false) | Err(Broken) => self.link.give_up(),
        }
    }

    /// Submits all requests in flight again, in the order of their submission.
    fn send_all(&mut self) {
        for pending in self.pending.iter_mut().flatten() {
            (pending.sent, pending.request.is_repeated) = (false, true);
        }
        while self.link.is_connected() {
            let unsent = |(id, pending): (usize, &Option<Pending>)| {
                pending.filter(|pending| !pending.sent).map(|pending| (pending.number, id))
            };
            let Some((_, id)) = self.pending.iter().enumerate().filter_map(unsent).min() else {
                break;
            };
            self.send(id);
        }
        self.must_signal = true;
    }

    /// Polls the connection and returns the next completion. To be called after a signal of the
    /// server, until there is none.
    pub fn poll(&mut self) -> Option<Completion> {
        match self.link.poll() {
            Connection::Down => return None,
            Connection::Asked => {
                self.must_signal = true;
                return None;
            }
            Connection::Fresh => {
                self.requests.restart();
                self.completions.restart();
                self.send_all();
            }
            Connection::Up => {}
        }
        // A ring holds this many invalid completions; only a server that violates the protocol
        // produces more.
        for _ in 0..SLOTS {
            let [word] = match self.completions.take() {
                Ok(Some(entry)) => entry,
                Ok(None) => return None,
                Err(Broken) => {
                    self.link.give_up();
                    return None;
                }
            };
            let status = Status::from_code((word >> 16) as u8);
            let slot = self.pending.get_mut(usize::from(word as u16));
            if let Some(slot) = slot
                && let Some(pending) = slot.take_if(|pending| pending.sent)
            {
                self.has_forgotten = self.has_forgotten && self.under_way() != 0;
                return Some(Completion { tag: pending.tag, status });
            }
        }
        None
    }

    /// Requests a signal for the next completion. `false`: call [`poll`](Self::poll) again first.
    pub fn sleep(&mut self) -> bool {
        // Without a connection the server signals anyway; the next poll detects a broken one.
        !self.link.is_connected() || self.completions.sleep() == Ok(true)
    }

    /// Returns whether to signal the server. To be called after submitting and polling.
    #[must_use]
    pub fn take_signal(&mut self) -> bool {
        core::mem::take(&mut self.must_signal)
    }

    /// Returns the words of the session.
    pub fn memory(&self) -> &'m [AtomicU64] {
        self.memory
    }
}

/// Position of a completion in the ring of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionMark {
    connection: u64,
    /// Number of completions up to it, modulo 2^32.
    put: u32,
}

/// Server side of one client's session.
pub struct Session<'m> {
    link: ServerLink<'m>,
    memory: &'m [AtomicU64],
    requests: Consumer<'m, REQUEST_WORDS, SLOTS>,
    completions: Producer<'m, 1, SLOTS>,
    /// End of the data buffers.
    end: u64,
    info: Info,
    /// Requests taken and not completed. A new connection waits until there are none.
    under_way: usize,
    must_signal: bool,
}

impl<'m> Session<'m> {
    /// Creates the server of a session of `length` bytes whose first words are `memory`, in a new
    /// generation. `None` if it is too short. No device may still write to the session.
    pub fn new(memory: &'m [AtomicU64], length: u64, info: Info) -> Option<Self> {
        length.checked_sub(DATA)?;
        Some(Self {
            link: ServerLink::new(memory)?,
            memory,
            requests: Consumer::new(memory.get(REQUESTS..)?)?,
            completions: Producer::new(memory.get(COMPLETIONS..)?)?,
            end: length,
            info,
            under_way: 0,
            must_signal: true,
        })
    }

    /// Polls for a new connection, and accepts it once no request of the older one is in flight.
    fn connect(&mut self) {
        let Some(request) = self.link.request() else { return };
        if self.under_way != 0 {
            return;
        }
        ring::clear(&self.memory[REQUESTS..]);
        ring::clear(&self.memory[COMPLETIONS..]);
        self.requests.restart();
        self.completions.restart();
        self.link.accept(request, self.info.pack());
        self.must_signal = true;
    }

    /// Takes the next request, which the caller must [complete](Self::complete). It has been
    /// validated against the disk's [`Info`], and its data is within the session's buffers. Invalid
    /// requests are completed here.
    pub fn take(&mut self) -> Option<Request> {
        self.connect();
        for _ in 0..SLOTS {
            if !self.link.is_connected() {
                return None;
            }
            let Ok(taken) = self.take_raw() else {
                self.link.give_up();
                return None;
            };
            let words = taken?;
            let checked = Request::unpack(words).ok_or(Status::Invalid).and_then(|request| {
                self.info.check(&request)?;
                self.check_data(&request)?;
                Ok(request)
            });
            self.under_way += 1;
            match checked {
                Ok(request) => return Some(request),
                Err(status) => {
                    self.complete(Request::id(words), status);
                }
            }
        }
        None
    }

    /// Takes an entry, if the completion ring has room for its completion.
    fn take_raw(&mut self) -> Result<Option<[u64; REQUEST_WORDS]>, Broken> {
        if self.completions.room()? <= self.under_way {
            return Ok(None);
        }
        self.requests.take()
    }

    fn check_data(&self, request: &Request) -> Result<(), Status> {
        if !request.operation.has_data() {
            return Ok(());
        }
        let end = request.offset.checked_add(request.bytes());
        let fits = request.offset >= DATA
            && request.offset.is_multiple_of(SECTOR)
            && end.is_some_and(|end| end <= self.end);
        if fits { Ok(()) } else { Err(Status::Invalid) }
    }

    /// Completes request `id`, which was taken. Returns the position of the completion for
    /// [`has_read`](Self::has_read); `None` if the connection is closed.
    pub fn complete(&mut self, id: u16, status: Status) -> Option<CompletionMark> {
        self.under_way = self.under_way.saturating_sub(1);
        let mut mark = None;
        if self.link.is_connected() {
            match self.completions.put([u64::from(id) | (status as u64) << 16]) {
                Ok(true) => {
                    let (connection, put) = (self.link.connection(), self.completions.total_put());
                    mark = Some(CompletionMark { connection, put });
                    self.must_signal |= self.completions.must_signal();
                }
                // The completion ring had room when the request was taken.
                Ok(false) | Err(Broken) => self.link.give_up(),
            }
        }
        self.connect();
        mark
    }

    /// Returns whether the client has read a completion, on the same connection.
    pub fn has_read(&mut self, mark: CompletionMark) -> bool {
        let is_past = |taken: u32| taken.wrapping_sub(mark.put) < 1 << 31;
        self.link.connection() == mark.connection
            && self.completions.total_taken().is_ok_and(is_past)
    }

    /// Requests a signal for the next request. `false`: call [`take`](Self::take) again first.
    pub fn sleep(&mut self) -> bool {
        if !self.link.is_connected() {
            return true;
        }
        let sleeps = self.requests.sleep().and_then(|sleeps| {
            // A client that leaves this many completions unread violates the protocol, and is not
            // waited for.
            Ok(sleeps || self.completions.room()? <= self.under_way)
        });
        sleeps.unwrap_or_else(|Broken| {
            self.link.give_up();
            true
        })
    }

    /// Returns the index of the client's vCPU to signal ([`ServerLink::notified_vcpu`]).
    #[inline]
    pub fn notified_vcpu(&self) -> usize {
        self.link.notified_vcpu()
    }

    /// Returns whether to signal the client. To be called after taking and completing.
    #[must_use]
    pub fn take_signal(&mut self) -> bool {
        core::mem::take(&mut self.must_signal)
    }

    /// Returns the number of requests taken and not completed.
    pub fn under_way(&self) -> usize {
        self.under_way
    }

    /// Returns the disk's properties.
    pub fn info(&self) -> &Info {
        &self.info
    }
}

#[cfg(test)]
mod tests;
