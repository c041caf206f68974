//! Block device.
//!
//! State: one queue, and which chains are on their way outside.
//! Features: read, write, flush, discard, write-zeroes (one range each), identification, read-only disks, up to
//! [`IN_FLIGHT`] requests at a time that end in any order. The number and size of segments are limited so that
//! a request fits what the outside takes at once. A request that the outside has not answered after [`PATIENCE`] has failed for
//! the driver. From then on, all others fail at once, until the outside has answered those: a write that is
//! carried out late must not undo a later one. A driver that does not negotiate `VIRTIO_BLK_F_FLUSH` gets write-through: each of its
//! writes ends when the flush behind it has (VIRTIO 1.2, section 5.2.6.2).
//! Missing: several queues, secure erase, zones, a change of the cache mode (`VIRTIO_BLK_F_CONFIG_WCE`), lifetime.
//! Documentation: VIRTIO 1.2, section 5.2 "Block Device".

use super::queue::{Chain, Queue, RingError, with_readable, with_writable};
use super::{BATCH, CONFIG_LEN, Kind, MORE, VirtioDevice, more};
use vmm_bus::backend::{BlockInfo, BlockOp, BlockStatus, Part, SECTOR};
use vmm_bus::{Data, Env, Nanos};

/// Features, configuration, requests.
pub mod spec {
    /// Feature: a segment has a greatest size.
    pub const F_SIZE_MAX: u64 = 1 << 1;
    /// Feature: a request has a greatest number of segments.
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
    /// Configuration: greatest segment, 32 bits.
    pub const SIZE_MAX: usize = 8;
    /// Configuration: most segments, 32 bits.
    pub const SEG_MAX: usize = 12;
    /// Configuration: block size, 32 bits.
    pub const BLK_SIZE: usize = 20;
    /// Configuration: most sectors of a discard, 32 bits.
    pub const MAX_DISCARD_SECTORS: usize = 36;
    /// Configuration: most ranges of a discard, 32 bits.
    pub const MAX_DISCARD_SEG: usize = 40;
    /// Configuration: alignment of discards in sectors, 32 bits.
    pub const DISCARD_SECTOR_ALIGNMENT: usize = 44;
    /// Configuration: most sectors of a write-zeroes, 32 bits.
    pub const MAX_WRITE_ZEROES_SECTORS: usize = 48;
    /// Configuration: most ranges of a write-zeroes, 32 bits.
    pub const MAX_WRITE_ZEROES_SEG: usize = 52;
    /// Configuration: write-zeroes may give sectors up, 8 bits.
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
    /// Flag of a range: the sectors may be given up.
    pub const UNMAP: u32 = 1;

    /// Status: done.
    pub const S_OK: u8 = 0;
    /// Status: failed.
    pub const S_IOERR: u8 = 1;
    /// Status: unknown request.
    pub const S_UNSUPP: u8 = 2;
}
use spec::*;

/// Most requests outside at a time.
pub const IN_FLIGHT: usize = 64;
/// Entries of the queue.
const ENTRIES: u16 = 128;
/// Most segments: a chain has a head and a status too.
const MOST_SEGMENTS: u32 = ENTRIES as u32 - 2;
/// Greatest segment: a page, which the drivers have.
const SEGMENT: u32 = 4096;
/// Most sectors of one discard or write-zeroes.
const MOST_SECTORS: u32 = 1 << 22;

/// Longest time for a request, as Linux gives a disk of its own.
pub const PATIENCE: Nanos = 30_000_000_000;

/// A request that is outside. The index in the table is its number there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Request {
    /// `None`: the driver has its answer, the outside has not given one.
    chain: Option<Chain>,
    read: bool,
    /// What is still to be done when the outside has done this.
    then: Then,
    deadline: Nanos,
}

/// Rest of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Then {
    /// Nothing.
    End,
    /// A flush, because the driver knows none.
    Flush,
    /// A flush, for which the outside had no room yet.
    FlushAtOnce,
}

/// A block device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Blk {
    info: BlockInfo,
    queues: [Queue; 1],
    requests: [Option<Request>; IN_FLIGHT],
    /// The timer is armed for a request, not for a later one.
    is_watched: bool,
    /// Requests whose patience is over.
    lost: usize,
    /// The driver flushes when it wants data to last.
    knows_flush: bool,
}

/// What the head of a request comes to.
enum Verdict {
    /// It goes outside.
    Start(BlockOp),
    /// It ends here, with the first bytes of its data.
    End(u8, u32),
}

const REFUSED: Verdict = Verdict::End(S_IOERR, 0);
const UNKNOWN: Verdict = Verdict::End(S_UNSUPP, 0);

impl Blk {
    /// The device after power-on.
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

    /// Most segments and greatest segment, which together the outside takes at once.
    fn segments(&self) -> (u32, u32) {
        ((self.info.max_bytes / SEGMENT).clamp(1, MOST_SEGMENTS), SEGMENT)
    }

    /// Starts requests, until there are no more or the outside has no room.
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
                // The end of another request, or the outside, comes back here.
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
        let op = match self.judge(chain, &head, &range) {
            Verdict::Start(op) if self.lost == 0 => op,
            Verdict::Start(_) => {
                self.end(chain, S_IOERR, 0, env);
                return Ok(true);
            }
            Verdict::End(status, wanted) => {
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
            // Seldom: the timer runs on when the request has ended.
            if !self.is_watched {
                self.watch(env);
            }
        }
        Ok(started)
    }

    /// Arms the timer for the request that has waited longest.
    fn watch(&mut self, env: &mut dyn Env) {
        let waiting = self.requests.iter().flatten().filter(|request| request.chain.is_some());
        let first = waiting.map(|request| request.deadline).min();
        self.is_watched = first.is_some();
        if let Some(first) = first {
            env.arm(MORE, first);
        }
    }

    /// Ends requests whose time is over. The outside still has them, and their numbers.
    fn expire(&mut self, env: &mut dyn Env) {
        let now = env.now();
        for number in 0..IN_FLIGHT {
            let over = self.requests[number].as_mut().filter(|request| request.deadline <= now);
            if let Some(chain) = over.and_then(|request| request.chain.take()) {
                if self.lost == 0 {
                    env.missing("virtio-blk: a request gets no answer", number as u64);
                }
                self.lost += 1;
                self.end(chain, S_IOERR, 0, env);
            }
        }
    }

    fn judge(&self, chain: Chain, head: &[u8; HEAD], range: &[u8; RANGE]) -> Verdict {
        let sector = quad(head, 8);
        let kind = long(head, 0);
        match kind {
            T_IN if self.fits(sector, chain.writable - 1) => {
                Verdict::Start(BlockOp::Read { sector })
            }
            T_OUT if !self.info.read_only && self.fits(sector, chain.readable - HEAD as u32) => {
                Verdict::Start(BlockOp::Write { sector })
            }
            T_IN | T_OUT => REFUSED,
            T_FLUSH => Verdict::Start(BlockOp::Flush),
            T_GET_ID => Verdict::End(S_OK, (chain.writable - 1).min(20)),
            T_DISCARD | T_WRITE_ZEROES => self.judge_range(kind, chain, range),
            _ => UNKNOWN,
        }
    }

    /// Section 5.2.6.2.
    fn judge_range(&self, kind: u32, chain: Chain, range: &[u8; RANGE]) -> Verdict {
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
        Verdict::Start(if discard {
            BlockOp::Discard { sector, count }
        } else {
            BlockOp::WriteZeroes { sector, count, unmap: flags & UNMAP != 0 }
        })
    }

    /// Whether `bytes` are whole sectors of the disk, not more than the outside takes.
    fn fits(&self, sector: u64, bytes: u32) -> bool {
        bytes != 0
            && bytes.is_multiple_of(SECTOR)
            && bytes <= self.info.max_bytes
            && self.inside(sector, bytes / SECTOR)
    }

    fn inside(&self, sector: u64, count: u32) -> bool {
        sector.checked_add(count.into()).is_some_and(|end| end <= self.info.sectors)
    }

    /// Gives a chain back of which the first `done` bytes have been written.
    fn end(&mut self, chain: Chain, status: u8, done: u32, env: &mut dyn Env) {
        let queue = &mut self.queues[0];
        let memory = env.memory();
        let before = chain.writable - 1;
        with_writable(queue, memory, chain, |mut data| {
            data.skip(before);
            data.write(&[status]);
        });
        // The status is behind the data: it counts where there is no gap.
        let written = if done == before { chain.writable } else { done };
        queue.give_back(memory, chain.head, written);
    }

    /// Starts the flush behind a completed write; `false`: there is none to come.
    fn flush_behind(&mut self, id: u16, status: BlockStatus, env: &mut dyn Env) -> bool {
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

    /// Starts the flushes that the outside had no room for, before anything new; `false`: it still has none.
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

    /// Takes over what has completed outside.
    fn complete(&mut self, env: &mut dyn Env) {
        // The outside has no more than were given to it: requests, and flushes behind them.
        for _ in 0..2 * IN_FLIGHT {
            let Some((outside, _)) = env.block() else { return };
            let Some((id, status)) = outside.completed() else { return };
            if self.flush_behind(id, status, env) {
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
            (MAX_WRITE_ZEROES_SECTORS, MOST_SECTORS),
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
