//! Block device.
//!
//! State: one queue, and the chains of requests in flight.
//! Features: read, write, flush, discard, write-zeroes (one range each), identification, read-only
//! disks, up to [`IN_FLIGHT`] requests at a time that complete in any order. The number and size of
//! segments are limited so that a request fits the maximum of the back end. A request without
//! completion after [`PATIENCE`] fails for the driver. From then on all others fail at once until
//! the back end has completed the late ones: a late write must not undo a later one. A driver that
//! does not negotiate `VIRTIO_BLK_F_FLUSH` gets write-through: each of its writes completes with a
//! flush after it (VIRTIO 1.2, section 5.2.6.2).
//! Missing: several queues, secure erase, zones, a change of the cache mode
//! (`VIRTIO_BLK_F_CONFIG_WCE`), lifetime.
//! Documentation: VIRTIO 1.2, section 5.2 "Block Device".

use super::queue::{Chain, Queue, RingError, with_readable, with_writable};
use super::{BATCH, CONFIG_LEN, Kind, MORE, VirtioDevice, more};
use vmm_bus::backend::{BlockInfo, BlockOp, BlockStatus, Part, SECTOR};
use vmm_bus::{Data, Env, Nanos};

/// Features, configuration, requests.
pub mod spec {
    /// Feature: maximum size of a segment.
    pub const F_SIZE_MAX: u64 = 1 << 1;
    /// Feature: maximum number of segments.
    pub const F_SEG_MAX: u64 = 1 << 2;
    /// Feature: read-only.
    pub const F_RO: u64 = 1 << 5;
    /// Feature: block size.
    pub const F_BLK_SIZE: u64 = 1 << 6;
    /// Feature: flush.
    pub const F_FLUSH: u64 = 1 << 9;
    /// Feature: discard.
    pub const F_DISCARD: u64 = 1 << 13;
    /// Feature: write zeroes.
    pub const F_WRITE_ZEROES: u64 = 1 << 14;

    /// Configuration: capacity in sectors, 64 bits.
    pub const CAPACITY: usize = 0;
    /// Configuration: maximum segment size, 32 bits.
    pub const SIZE_MAX: usize = 8;
    /// Configuration: maximum segments, 32 bits.
    pub const SEG_MAX: usize = 12;
    /// Configuration: block size, 32 bits.
    pub const BLK_SIZE: usize = 20;
    /// Configuration: maximum sectors of a discard, 32 bits.
    pub const MAX_DISCARD_SECTORS: usize = 36;
    /// Configuration: maximum ranges of a discard, 32 bits.
    pub const MAX_DISCARD_SEG: usize = 40;
    /// Configuration: alignment of discards in sectors, 32 bits.
    pub const DISCARD_SECTOR_ALIGNMENT: usize = 44;
    /// Configuration: maximum sectors of a write-zeroes, 32 bits.
    pub const MAX_WRITE_ZEROES_SECTORS: usize = 48;
    /// Configuration: maximum ranges of a write-zeroes, 32 bits.
    pub const MAX_WRITE_ZEROES_SEG: usize = 52;
    /// Configuration: write-zeroes may deallocate sectors, 8 bits.
    pub const WRITE_ZEROES_MAY_UNMAP: usize = 56;

    /// Bytes of a request's head: type (32 bits), reserved (32), sector (64).
    pub const HEAD: usize = 16;
    /// Request: read.
    pub const T_IN: u32 = 0;
    /// Request: write.
    pub const T_OUT: u32 = 1;
    /// Request: flush.
    pub const T_FLUSH: u32 = 4;
    /// Request: identification.
    pub const T_GET_ID: u32 = 8;
    /// Request: discard.
    pub const T_DISCARD: u32 = 11;
    /// Request: write zeroes.
    pub const T_WRITE_ZEROES: u32 = 13;
    /// Bytes of a range of sectors: first (64 bits), number (32), flags (32).
    pub const RANGE: usize = 16;
    /// Flag of a range: the sectors may be deallocated.
    pub const UNMAP: u32 = 1;

    /// Status: done.
    pub const S_OK: u8 = 0;
    /// Status: failed.
    pub const S_IOERR: u8 = 1;
    /// Status: unknown request.
    pub const S_UNSUPP: u8 = 2;
}
use spec::*;

/// Maximum requests in flight.
pub const IN_FLIGHT: usize = 64;
/// Entries of the queue.
const ENTRIES: u16 = 128;
/// Maximum segments: a chain also has a head and a status.
const MOST_SEGMENTS: u32 = ENTRIES as u32 - 2;
/// Maximum segment size: a page, as drivers use.
const SEGMENT: u32 = 4096;
/// Maximum sectors of a discard or write-zeroes.
const MOST_SECTORS: u32 = 1 << 22;
/// Maximum sectors of a write-zeroes as announced to drivers: 16 MiB. A back end whose host cannot
/// zero a range writes the zeros, of [`IN_FLIGHT`] requests within [`PATIENCE`].
const ANNOUNCED_ZEROES: u32 = 1 << 15;

/// Timeout of a request, as Linux uses for a physical disk.
pub const PATIENCE: Nanos = 30_000_000_000;

/// A request in flight. Its index in the table is its id for the back end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Request {
    /// `None`: the request has timed out for the driver, and is still in flight in the back end.
    chain: Option<Chain>,
    read: bool,
    /// Work to do after the completion.
    then: Then,
    deadline: Nanos,
}

/// Work after a completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Then {
    /// None: the request ends.
    End,
    /// A flush, because the driver has not negotiated it.
    Flush,
    /// A flush that the back end had no room for yet.
    FlushAtOnce,
}

/// A block device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Blk {
    info: BlockInfo,
    queues: [Queue; 1],
    requests: [Option<Request>; IN_FLIGHT],
    /// The timer is armed for a request in flight, not a later one.
    is_watched: bool,
    /// Number of timed-out requests.
    lost: usize,
    /// The driver has negotiated flush and issues it itself.
    knows_flush: bool,
}

/// Decision about a request.
enum Decision {
    /// Start it in the back end.
    Start(BlockOp),
    /// End it with this status and the number of bytes written.
    End(u8, u32),
}

const REFUSED: Decision = Decision::End(S_IOERR, 0);
const UNKNOWN: Decision = Decision::End(S_UNSUPP, 0);

impl Blk {
    /// Creates the device in its power-on state.
    pub const fn new(info: BlockInfo) -> Self {
        Self {
            info,
            queues: [Queue::new(ENTRIES)],
            requests: [None; IN_FLIGHT],
            is_watched: false,
            lost: 0,
            knows_flush: false,
        }
    }

    /// Maximum number and size of segments, which together fit the back end's maximum.
    fn segments(&self) -> (u32, u32) {
        ((self.info.max_bytes / SEGMENT).clamp(1, MOST_SEGMENTS), SEGMENT)
    }

    /// Starts requests until the queue is empty or the back end has no room.
    fn begin(&mut self, env: &mut dyn Env) -> Result<(), RingError> {
        if !self.flush_late(env) {
            return Ok(());
        }
        for _ in 0..BATCH {
            let queue = &mut self.queues[0];
            let Some(chain) = queue.pop(env.memory())? else {
                if queue.await_driver(env.memory())? {
                    continue;
                }
                return Ok(());
            };
            if !self.request(chain, env)? {
                // The completion of another request, or the back end, resumes here.
                self.queues[0].undo_pop();
                return Ok(());
            }
        }
        more(env);
        Ok(())
    }

    /// Handles one request; `false`: no room.
    fn request(&mut self, chain: Chain, env: &mut dyn Env) -> Result<bool, RingError> {
        if (chain.readable as usize) < HEAD || chain.writable == 0 {
            return Err(RingError::Short);
        }
        let queue = self.queues[0];
        let mut head = [0; HEAD];
        let mut range = [0; RANGE];
        with_readable(&queue, env.memory(), chain, |mut data| {
            data.read(&mut head);
            data.read(&mut range);
        });
        let op = match self.check(chain, &head, &range) {
            Decision::Start(op) if self.lost == 0 => op,
            Decision::Start(_) => {
                self.end(chain, S_IOERR, 0, env);
                return Ok(true);
            }
            Decision::End(status, wanted) => {
                let done = with_writable(&queue, env.memory(), chain, |mut data| {
                    data.truncate(wanted);
                    data.write(&self.info.serial) as u32
                });
                self.end(chain, status, done, env);
                return Ok(true);
            }
        };
        let Some(number) = self.requests.iter().position(Option::is_none) else {
            return Ok(false);
        };
        let Some((outside, memory)) = env.block() else {
            self.end(chain, S_IOERR, 0, env);
            return Ok(true);
        };
        let id = number as u16;
        let read = matches!(op, BlockOp::Read { .. });
        let started = match op {
            BlockOp::Write { .. } => with_readable(&queue, memory, chain, |mut data| {
                data.skip(HEAD as u32);
                outside.start(id, op, &mut data)
            }),
            BlockOp::Read { .. } => with_writable(&queue, memory, chain, |mut data| {
                data.truncate(chain.writable - 1);
                outside.start(id, op, &mut data)
            }),
            _ => outside.start(id, op, &mut Data::new(memory, &mut core::iter::empty(), 0)),
        };
        if started {
            let deadline = env.now().saturating_add(PATIENCE);
            let changes = matches!(op, BlockOp::Write { .. } | BlockOp::WriteZeroes { .. });
            let then = if changes && !self.knows_flush { Then::Flush } else { Then::End };
            self.requests[number] = Some(Request { chain: Some(chain), read, then, deadline });
            // Rarely re-armed: the timer keeps running when the request ends.
            if !self.is_watched {
                self.watch(env);
            }
        }
        Ok(started)
    }

    /// Arms the timer for the oldest request.
    fn watch(&mut self, env: &mut dyn Env) {
        let waiting = self.requests.iter().flatten().filter(|request| request.chain.is_some());
        let first = waiting.map(|request| request.deadline).min();
        self.is_watched = first.is_some();
        if let Some(first) = first {
            env.arm(MORE, first);
        }
    }

    /// Fails timed-out requests. The back end still has them, and their ids.
    fn expire(&mut self, env: &mut dyn Env) {
        let now = env.now();
        for number in 0..IN_FLIGHT {
            let over = self.requests[number].as_mut().filter(|request| request.deadline <= now);
            if let Some(chain) = over.and_then(|request| request.chain.take()) {
                if self.lost == 0 {
                    env.missing("virtio-blk: request timed out", number as u64);
                }
                self.lost += 1;
                self.end(chain, S_IOERR, 0, env);
            }
        }
    }

    fn check(&self, chain: Chain, head: &[u8; HEAD], range: &[u8; RANGE]) -> Decision {
        let sector = quad(head, 8);
        let kind = long(head, 0);
        match kind {
            T_IN if self.fits(sector, chain.writable - 1) => {
                Decision::Start(BlockOp::Read { sector })
            }
            T_OUT if !self.info.read_only && self.fits(sector, chain.readable - HEAD as u32) => {
                Decision::Start(BlockOp::Write { sector })
            }
            T_IN | T_OUT => REFUSED,
            T_FLUSH => Decision::Start(BlockOp::Flush),
            T_GET_ID => Decision::End(S_OK, (chain.writable - 1).min(20)),
            T_DISCARD | T_WRITE_ZEROES => self.check_range(kind, chain, range),
            _ => UNKNOWN,
        }
    }

    /// Validates a discard or write-zeroes (section 5.2.6.2).
    fn check_range(&self, kind: u32, chain: Chain, range: &[u8; RANGE]) -> Decision {
        let (sector, count, flags) = (quad(range, 0), long(range, 8), long(range, 12));
        let discard = kind == T_DISCARD;
        if discard && !self.info.discard || flags & !UNMAP != 0 || discard && flags & UNMAP != 0 {
            return UNKNOWN;
        }
        if self.info.read_only
            || chain.readable as usize != HEAD + RANGE
            || count == 0
            || count > MOST_SECTORS
            || !self.inside(sector, count)
        {
            return REFUSED;
        }
        Decision::Start(if discard {
            BlockOp::Discard { sector, count }
        } else {
            BlockOp::WriteZeroes { sector, count, unmap: flags & UNMAP != 0 }
        })
    }

    /// True if `bytes` are complete sectors of the disk, within the back end's maximum.
    fn fits(&self, sector: u64, bytes: u32) -> bool {
        bytes != 0
            && bytes.is_multiple_of(SECTOR)
            && bytes <= self.info.max_bytes
            && self.inside(sector, bytes / SECTOR)
    }

    fn inside(&self, sector: u64, count: u32) -> bool {
        sector.checked_add(count.into()).is_some_and(|end| end <= self.info.sectors)
    }

    /// Returns a chain whose first `done` bytes have been written.
    fn end(&mut self, chain: Chain, status: u8, done: u32, env: &mut dyn Env) {
        let queue = &mut self.queues[0];
        let memory = env.memory();
        let before = chain.writable - 1;
        with_writable(queue, memory, chain, |mut data| {
            data.skip(before);
            data.write(&[status]);
        });
        // The status follows the data: it counts only without a gap.
        let written = if done == before { chain.writable } else { done };
        queue.give_back(memory, chain.head, written);
    }

    /// Starts the flush after a completed write; `false`: none is required.
    fn flush_after(&mut self, id: u16, status: BlockStatus, env: &mut dyn Env) -> bool {
        let Some(Some(request)) = self.requests.get_mut(usize::from(id)) else { return false };
        let Some((outside, memory)) = env.block() else { return false };
        if request.then != Then::Flush || status != BlockStatus::Done {
            return false;
        }
        let mut none = core::iter::empty();
        outside.finish(id, &mut Data::new(memory, &mut none, 0));
        let started = outside.start(id, BlockOp::Flush, &mut Data::new(memory, &mut none, 0));
        request.then = if started { Then::End } else { Then::FlushAtOnce };
        true
    }

    /// Starts flushes that had no room, before new requests; `false`: still no room.
    fn flush_late(&mut self, env: &mut dyn Env) -> bool {
        let Some((outside, memory)) = env.block() else { return true };
        for (id, request) in self.requests.iter_mut().enumerate() {
            let due = request.as_mut().filter(|request| request.then == Then::FlushAtOnce);
            let Some(request) = due else { continue };
            let mut none = core::iter::empty();
            if !outside.start(id as u16, BlockOp::Flush, &mut Data::new(memory, &mut none, 0)) {
                return false;
            }
            request.then = Then::End;
        }
        true
    }

    /// Handles completions of the back end.
    fn complete(&mut self, env: &mut dyn Env) {
        // The back end has at most the requests in flight, and a flush after each.
        for _ in 0..2 * IN_FLIGHT {
            let Some((outside, _)) = env.block() else { return };
            let Some((id, status)) = outside.completed() else { return };
            if self.flush_after(id, status, env) {
                continue;
            }
            let Some((outside, memory)) = env.block() else { return };
            let request = self.requests.get_mut(usize::from(id)).and_then(Option::take);
            let chain = request.and_then(|request| request.chain);
            if request.is_some() && chain.is_none() {
                self.lost -= 1;
            }
            let queue = self.queues[0];
            let brings = status == BlockStatus::Done && request.is_some_and(|request| request.read);
            let length = if brings { chain.map_or(0, |chain| chain.writable - 1) } else { 0 };
            let mut none = core::iter::empty::<Part>();
            let mut parts = chain.map(|chain| queue.writable(memory, chain.head));
            let parts: &mut dyn Iterator<Item = Part> = match &mut parts {
                Some(parts) => parts,
                None => &mut none,
            };
            outside.finish(id, &mut Data::new(memory, parts, length));
            let status = match status {
                BlockStatus::Done => S_OK,
                BlockStatus::Failed => S_IOERR,
                BlockStatus::Unsupported => S_UNSUPP,
            };
            if let Some(chain) = chain {
                self.end(chain, status, length, env);
            }
        }
    }
}

fn long(bytes: &[u8], at: usize) -> u32 {
    let mut value = [0; 4];
    value.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(value)
}

fn quad(bytes: &[u8], at: usize) -> u64 {
    u64::from(long(bytes, at)) | u64::from(long(bytes, at + 4)) << 32
}

impl VirtioDevice for Blk {
    fn kind(&self) -> Kind {
        Kind::Block
    }

    fn features(&self) -> u64 {
        let always = F_SIZE_MAX | F_SEG_MAX | F_BLK_SIZE | F_FLUSH;
        let BlockInfo { read_only, discard, write_zeroes, .. } = self.info;
        let when = |condition, feature| if condition { feature } else { 0 };
        always
            | when(read_only, F_RO)
            | when(discard && !read_only, F_DISCARD)
            | when(write_zeroes && !read_only, F_WRITE_ZEROES)
    }

    fn queues(&mut self) -> &mut [Queue] {
        &mut self.queues
    }

    fn config(&self, to: &mut [u8; CONFIG_LEN]) {
        let mut put = |at: usize, bytes: &[u8]| to[at..at + bytes.len()].copy_from_slice(bytes);
        let (count, size) = self.segments();
        put(CAPACITY, &self.info.sectors.to_le_bytes());
        for (at, value) in [
            (SIZE_MAX, size),
            (SEG_MAX, count),
            (BLK_SIZE, SECTOR),
            (MAX_DISCARD_SECTORS, MOST_SECTORS),
            (MAX_DISCARD_SEG, 1),
            (DISCARD_SECTOR_ALIGNMENT, 1),
            (MAX_WRITE_ZEROES_SECTORS, ANNOUNCED_ZEROES),
            (MAX_WRITE_ZEROES_SEG, 1),
        ] {
            put(at, &value.to_le_bytes());
        }
        put(WRITE_ZEROES_MAY_UNMAP, &[self.info.discard.into()]);
    }

    fn start(&mut self, features: u64, _: &mut dyn Env) {
        self.knows_flush = features & F_FLUSH != 0;
    }

    fn notify(&mut self, _: usize, env: &mut dyn Env) -> Result<(), RingError> {
        self.begin(env)
    }

    fn wake(&mut self, timer: u8, env: &mut dyn Env) -> Result<bool, RingError> {
        self.complete(env);
        if timer == MORE {
            self.expire(env);
            self.watch(env);
        }
        self.begin(env)?;
        Ok(false)
    }

    fn reset(&mut self, env: &mut dyn Env) {
        self.requests = [None; IN_FLIGHT];
        self.is_watched = false;
        self.lost = 0;
        self.knows_flush = false;
        if let Some((outside, _)) = env.block() {
            outside.forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A back end that writes zeros at 40 MB/s completes all write-zeroes in time.
    #[test]
    fn write_zeroes_end_in_time() {
        let mut config = [0; CONFIG_LEN];
        Blk::new(BlockInfo::default()).config(&mut config);
        let bytes = u64::from(long(&config, MAX_WRITE_ZEROES_SECTORS)) * u64::from(SECTOR);
        assert!(bytes > 0 && bytes * IN_FLIGHT as u64 <= PATIENCE / 1_000_000_000 * 40_000_000);
    }
}
