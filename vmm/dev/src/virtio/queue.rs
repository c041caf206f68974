//! Device side of a split virtqueue.
//!
//! State: the addresses of the rings, and the device's position in them.
//! Features: indirect descriptors, event index, sizes of a power of two up to a maximum.
//! Missing: packed rings, and buffers used in order.
//! Documentation: VIRTIO 1.2, section 2.7 "Split Virtqueues".
//!
//! Guest memory is untrusted and may change between two reads. Invariants: a walk ends after at
//! most as many descriptors as the queue has; every value is read once, then validated;
//! [`Queue::pop`] returns only chains that are completely in guest memory, and a later walk of the
//! same chain, should the guest have changed it, ends early rather than leave memory. The device
//! writes only the used ring, and only while the driver has the queue enabled.

use core::sync::atomic::{Ordering, fence};
use vmm_bus::Data;
use vmm_bus::backend::Part;
use vmm_mem::{GuestMemory, MemoryError};

/// Layout of the rings.
pub mod spec {
    /// Bytes of a descriptor: address (64 bits), length (32), flags (16), next (16).
    pub const DESCRIPTOR: u64 = 16;
    /// Offset of a descriptor's length.
    pub const LENGTH: u64 = 8;
    /// Offset of a descriptor's flags.
    pub const FLAGS: u64 = 12;
    /// Offset of a descriptor's successor.
    pub const NEXT: u64 = 14;
    /// Descriptor flag: the descriptor has a successor.
    pub const F_NEXT: u16 = 1;
    /// Descriptor flag: the device writes.
    pub const F_WRITE: u16 = 2;
    /// Descriptor flag: the buffer is a table of descriptors.
    pub const F_INDIRECT: u16 = 4;
    /// Offset of the index in the available and in the used ring.
    pub const INDEX: u64 = 2;
    /// Offset of the entries in the available and in the used ring.
    pub const RING: u64 = 4;
    /// Bytes of an available entry.
    pub const AVAIL_ENTRY: u64 = 2;
    /// Bytes of a used entry: id (32 bits), length (32).
    pub const USED_ENTRY: u64 = 8;
    /// Flag of the available ring: the driver needs no interrupts.
    pub const NO_INTERRUPT: u16 = 1;
    /// Alignment of the descriptor table, the available ring and the used ring.
    pub const ALIGN: [u64; 3] = [16, 2, 4];
    /// Maximum entries of a queue.
    pub const MAX_SIZE: u16 = 1 << 15;
}
use spec::*;

/// A violation of the queue protocol by the driver: the device needs a reset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RingError {
    /// A ring is misaligned or outside memory.
    Rings,
    /// More chains are available than the queue has entries.
    AvailableIndex,
    /// A chain begins or continues at a descriptor outside the table.
    DescriptorIndex,
    /// A chain is longer than the queue, or has a cycle.
    TooLong,
    /// An indirect table in an indirect table, with a successor, or of an invalid length.
    Indirect,
    /// A readable descriptor follows a writable one.
    Order,
    /// A buffer is outside memory, or the chain has more than 2^32 - 1 bytes.
    Buffer,
    /// A chain is shorter than the minimum of the device's requests.
    Short,
}

impl From<MemoryError> for RingError {
    /// Enabling the queue validates the rings, so the error is in an indirect table.
    fn from(_: MemoryError) -> Self {
        Self::Indirect
    }
}

/// A descriptor of a chain, other than one that refers to an indirect table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// The buffer.
    pub part: Part,
    /// True for a device-writable buffer, false for a device-readable one.
    pub write: bool,
}

/// A chain of descriptors that the driver has made available.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chain {
    /// Index of its first descriptor, which identifies the chain.
    pub head: u16,
    /// Device-readable bytes.
    pub readable: u32,
    /// Device-writable bytes, after the readable ones.
    pub writable: u32,
}

/// Addresses of the parts of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rings {
    /// Descriptor table.
    pub descriptors: u64,
    /// Available ring (driver area).
    pub available: u64,
    /// Used ring (device area).
    pub used: u64,
}

/// A split virtqueue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Queue {
    max_size: u16,
    size: u16,
    ready: bool,
    /// The driver has disabled the queue: it stays as it is until it is reset.
    stopped: bool,
    event_index: bool,
    rings: Rings,
    /// The next available entry to take.
    next_available: u16,
    /// The next used entry to fill.
    next_used: u16,
    /// Index of used entries published to the driver.
    published: u16,
    /// Value of `published` at the last interrupt decision.
    considered: u16,
}

impl Queue {
    /// Creates a queue with at most `max_size` entries, rounded down to a power of two of at least
    /// 1.
    pub const fn new(max_size: u16) -> Self {
        let max_size = if max_size == 0 {
            1
        } else if max_size > MAX_SIZE {
            MAX_SIZE
        } else {
            1 << max_size.ilog2()
        };
        Self {
            max_size,
            size: max_size,
            ready: false,
            stopped: false,
            event_index: false,
            rings: Rings { descriptors: 0, available: 0, used: 0 },
            next_available: 0,
            next_used: 0,
            published: 0,
            considered: 0,
        }
    }

    /// Restores the state before the driver's set-up.
    pub fn reset(&mut self) {
        *self = Self::new(self.max_size);
    }

    /// Maximum number of entries.
    pub fn max_size(&self) -> u16 {
        self.max_size
    }

    /// Number of entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Sets the number of entries, while the queue is disabled. [`Queue::enable`] rejects numbers
    /// other than powers of two up to the maximum.
    pub fn set_size(&mut self, size: u16) {
        if !self.ready && !self.stopped {
            self.size = size;
        }
    }

    /// Addresses of the parts.
    pub fn rings(&self) -> Rings {
        self.rings
    }

    /// Sets the addresses, while the queue is disabled.
    pub fn set_rings(&mut self, rings: Rings) {
        if !self.ready && !self.stopped {
            self.rings = rings;
        }
    }

    /// True if the driver has enabled the queue.
    pub fn ready(&self) -> bool {
        self.ready
    }

    /// Enables the queue.
    ///
    /// # Errors
    /// [`RingError::Rings`] for an invalid size or address. The queue stays disabled.
    pub fn enable(&mut self, event_index: bool, memory: &GuestMemory) -> Result<(), RingError> {
        if self.ready || self.stopped {
            return Ok(());
        }
        let size = u64::from(self.size);
        let Rings { descriptors, available, used } = self.rings;
        let parts = [
            (descriptors, DESCRIPTOR * size),
            // Each ring ends with the event index of the opposite side (section 2.7.10).
            (available, RING + AVAIL_ENTRY * size + 2),
            (used, RING + USED_ENTRY * size + 2),
        ];
        let placed = |(&(address, length), &align): (&(u64, u64), &u64)| {
            address.is_multiple_of(align) && memory.contains(address, length)
        };
        if !self.size.is_power_of_two()
            || self.size > self.max_size
            || !parts.iter().zip(&ALIGN).all(placed)
        {
            return Err(RingError::Rings);
        }
        self.ready = true;
        self.event_index = event_index;
        Ok(())
    }

    /// Disables the queue until it is reset. Size and rings stay, because chains that the device
    /// still has may be given back.
    pub fn disable(&mut self) {
        self.stopped |= self.ready;
        self.ready = false;
    }

    /// Takes the next available chain, if any.
    ///
    /// # Errors
    /// If the driver has violated the protocol; the queue is unusable until it is reset.
    pub fn pop(&mut self, memory: &GuestMemory) -> Result<Option<Chain>, RingError> {
        if !self.ready {
            return Ok(None);
        }
        let waiting = self.available_index(memory)?.wrapping_sub(self.next_available);
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > self.size {
            return Err(RingError::AvailableIndex);
        }
        let slot = u64::from(self.next_available & (self.size - 1));
        let head = memory
            .read::<u16>(self.rings.available + RING + AVAIL_ENTRY * slot)
            .map_err(|_| RingError::Rings)?;
        let chain = self.check(memory, head)?;
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(chain))
    }

    /// Undoes the last [`Queue::pop`]: the next one returns the same chain.
    pub fn undo_pop(&mut self) {
        self.next_available = self.next_available.wrapping_sub(1);
    }

    /// Validates the chain that begins at `head`.
    ///
    /// # Errors
    /// See [`Queue::pop`].
    pub fn check(&self, memory: &GuestMemory, head: u16) -> Result<Chain, RingError> {
        let mut chain = Chain { head, readable: 0, writable: 0 };
        let mut is_writing = false;
        for descriptor in self.walk(memory, head) {
            let Descriptor { part, write } = descriptor?;
            if !memory.contains(part.address, part.length.into()) {
                return Err(RingError::Buffer);
            }
            // Also for empty descriptors.
            if is_writing && !write {
                return Err(RingError::Order);
            }
            is_writing = write;
            let sum = if write { &mut chain.writable } else { &mut chain.readable };
            *sum = sum.checked_add(part.length).ok_or(RingError::Buffer)?;
        }
        // Section 2.7.5.2: at most 2^32 bytes in total.
        chain.readable.checked_add(chain.writable).ok_or(RingError::Buffer)?;
        Ok(chain)
    }

    /// Iterates over the descriptors of the chain that begins at `head`, with those of an indirect
    /// table in place of the descriptor that refers to it. An error ends the iteration.
    pub fn walk<'a>(&self, memory: &'a GuestMemory, head: u16) -> Walk<'a> {
        Walk {
            memory,
            table: self.rings.descriptors,
            entries: self.size,
            next: Some(head),
            left: self.size,
            indirect: false,
        }
    }

    /// Device-readable parts of a chain, in order.
    pub fn readable<'a>(&self, memory: &'a GuestMemory, head: u16) -> Parts<'a> {
        Parts { walk: self.walk(memory, head), write: false }
    }

    /// Device-writable parts of a chain, in order.
    pub fn writable<'a>(&self, memory: &'a GuestMemory, head: u16) -> Parts<'a> {
        Parts { walk: self.walk(memory, head), write: true }
    }

    /// Fills the next used entry: the device has completed a chain and has written `written` bytes
    /// from the start of its writable part. [`Queue::publish`] makes it visible to the driver.
    pub fn add_used(&mut self, memory: &GuestMemory, head: u16, written: u32) {
        let slot = u64::from(self.next_used & (self.size - 1));
        let entry = self.rings.used + RING + USED_ENTRY * slot;
        // `enable` has validated the ring, and guest memory does not shrink.
        let _ = memory.write(entry, u32::from(head));
        let _ = memory.write(entry + 4, written);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Publishes all used entries to the driver.
    pub fn publish(&mut self, memory: &GuestMemory) {
        // Orders entries and data before the index (section 2.7.8).
        fence(Ordering::Release);
        let _ = memory.write(self.rings.used + INDEX, self.next_used);
        self.published = self.next_used;
    }

    /// [`Queue::add_used`], then [`Queue::publish`].
    pub fn give_back(&mut self, memory: &GuestMemory, head: u16, written: u32) {
        self.add_used(memory, head, written);
        self.publish(memory);
    }

    /// Requests a notification for the next available chain. Returns true if one is available
    /// already. Without event index the driver always notifies.
    ///
    /// # Errors
    /// See [`Queue::pop`].
    pub fn await_driver(&mut self, memory: &GuestMemory) -> Result<bool, RingError> {
        if !self.ready {
            return Ok(false);
        }
        if self.event_index {
            let event = self.rings.used + RING + USED_ENTRY * u64::from(self.size);
            let _ = memory.write(event, self.next_available);
            // The driver may have read the old value and not notify (section 2.7.10): check again.
            fence(Ordering::SeqCst);
        }
        Ok(self.available_index(memory)? != self.next_available)
    }

    /// True if the driver wants an interrupt for entries published since the last call.
    pub fn wants_interrupt(&mut self, memory: &GuestMemory) -> bool {
        if !self.ready || self.published == self.considered {
            return false;
        }
        let old = core::mem::replace(&mut self.considered, self.published);
        // Orders the index before the read of the driver's event index (section 2.7.7).
        fence(Ordering::SeqCst);
        let available = self.rings.available;
        if self.event_index {
            let event = available + RING + AVAIL_ENTRY * u64::from(self.size);
            let event = memory.read::<u16>(event).unwrap_or(old);
            self.published.wrapping_sub(event).wrapping_sub(1) < self.published.wrapping_sub(old)
        } else {
            memory.read::<u16>(available).is_ok_and(|flags| flags & NO_INTERRUPT == 0)
        }
    }

    fn available_index(&self, memory: &GuestMemory) -> Result<u16, RingError> {
        let index = memory.read(self.rings.available + INDEX).map_err(|_| RingError::Rings);
        // Orders the index before its entries and descriptors.
        fence(Ordering::Acquire);
        index
    }
}

/// Calls `act` with the device-readable data of a chain.
pub fn with_readable<R>(
    queue: &Queue,
    memory: &GuestMemory,
    chain: Chain,
    act: impl FnOnce(Data<'_>) -> R,
) -> R {
    let mut parts = queue.readable(memory, chain.head);
    act(Data::new(memory, &mut parts, chain.readable))
}

/// Calls `act` with the device-writable data of a chain.
pub fn with_writable<R>(
    queue: &Queue,
    memory: &GuestMemory,
    chain: Chain,
    act: impl FnOnce(Data<'_>) -> R,
) -> R {
    let mut parts = queue.writable(memory, chain.head);
    act(Data::new(memory, &mut parts, chain.writable))
}

/// Iterator over the descriptors of a chain.
#[derive(Clone, Debug)]
pub struct Walk<'a> {
    memory: &'a GuestMemory,
    table: u64,
    entries: u16,
    next: Option<u16>,
    /// Maximum number of further descriptors.
    left: u16,
    indirect: bool,
}

impl Walk<'_> {
    fn step(&mut self, index: u16) -> Result<Descriptor, RingError> {
        let mut index = index;
        loop {
            if index >= self.entries {
                return Err(RingError::DescriptorIndex);
            }
            let at =
                self.table.checked_add(DESCRIPTOR * u64::from(index)).ok_or(RingError::Indirect)?;
            if !self.memory.contains(at, DESCRIPTOR) {
                return Err(RingError::Indirect);
            }
            let address = self.memory.read(at)?;
            let length: u32 = self.memory.read(at + LENGTH)?;
            let flags: u16 = self.memory.read(at + FLAGS)?;
            if flags & F_INDIRECT != 0 {
                self.enter(address, length, flags)?;
                index = 0;
                continue;
            }
            self.left = self.left.checked_sub(1).ok_or(RingError::TooLong)?;
            if flags & F_NEXT != 0 {
                self.next = Some(self.memory.read(at + NEXT)?);
            }
            let part = Part { address, length };
            return Ok(Descriptor { part, write: flags & F_WRITE != 0 });
        }
    }

    /// Continues in an indirect table (section 2.7.5.3).
    fn enter(&mut self, address: u64, length: u32, flags: u16) -> Result<(), RingError> {
        let entries = length / DESCRIPTOR as u32;
        if self.indirect
            || flags & F_NEXT != 0
            || entries == 0
            || !length.is_multiple_of(DESCRIPTOR as u32)
        {
            return Err(RingError::Indirect);
        }
        self.table = address;
        // Entries beyond the range of an index are unusable.
        self.entries = u16::try_from(entries).map_err(|_| RingError::Indirect)?;
        self.indirect = true;
        Ok(())
    }
}

impl Iterator for Walk<'_> {
    type Item = Result<Descriptor, RingError>;

    fn next(&mut self) -> Option<Self::Item> {
        let index = self.next.take()?;
        Some(self.step(index))
    }
}

/// Iterator over the readable or writable parts of a chain.
#[derive(Clone, Debug)]
pub struct Parts<'a> {
    walk: Walk<'a>,
    write: bool,
}

impl Iterator for Parts<'_> {
    type Item = Part;

    fn next(&mut self) -> Option<Part> {
        loop {
            let descriptor = self.walk.next()?.ok()?;
            if descriptor.write == self.write {
                return Some(descriptor.part);
            }
        }
    }
}
