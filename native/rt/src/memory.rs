//! Windows: memory without Rust objects, which is copied to and from, and delegated.

use abi::{Item, ItemKind, Op, PAGE_SHIFT, PAGE_SIZE, Selector, Status, ops};

use crate::objects::{Task, Vm};
use crate::page::Page;
use crate::processor::{clear, copy};
use crate::syscall::call;

/// Base of the range for received memory: `proto::start` and `abi::boot` leave these 64 GiB free.
const RECEIVE: u64 = 0x20_0000_0000;
/// Bytes of the range for received memory.
const RECEIVE_LENGTH: u64 = 0x10_0000_0000;

/// A range of mapped memory without Rust objects. Other tasks, guests and devices may access it
/// concurrently, so it is only copied, and its content is untrusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    base: u64,
    length: u64,
    writable: bool,
}

impl Window {
    /// Creates a window over `base..base + length`.
    ///
    /// # Safety
    /// No Rust object is in the range, now or later.
    pub(crate) const unsafe fn new(base: u64, length: u64) -> Self {
        Self { base, length, writable: true }
    }

    /// Creates a window over `base..base + length` that is not written to, and delegated without
    /// the write right.
    ///
    /// # Safety
    /// No Rust object except constant bytes is in the range, now or later.
    pub(crate) const unsafe fn read_only(base: u64, length: u64) -> Self {
        Self { base, length, writable: false }
    }

    /// Address of the first byte.
    pub const fn base(self) -> u64 {
        self.base
    }

    /// Length in bytes.
    pub const fn length(self) -> u64 {
        self.length
    }

    /// Returns those of `rights` that the window can be delegated with.
    pub(crate) const fn allowed_rights(self, rights: u8) -> u8 {
        if self.writable { rights } else { rights & !abi::rights::WRITE }
    }

    /// Returns the part of `length` bytes from `offset`; `None` beyond the window.
    pub fn part(self, offset: u64, length: u64) -> Option<Self> {
        let end = offset.checked_add(length)?;
        (end <= self.length).then_some(Self { base: self.base + offset, length, ..self })
    }

    /// Copies `bytes` to `offset`; returns `false` without effect if they do not fit or the window
    /// is read-only.
    #[must_use]
    pub fn write(self, offset: u64, bytes: &[u8]) -> bool {
        let Some(part) = self.part(offset, bytes.len() as u64) else { return false };
        if !self.writable {
            return false;
        }
        // SAFETY: the destination is in the window, the source is a slice; they cannot overlap.
        unsafe { copy(bytes.as_ptr() as u64, part.base, part.length) };
        true
    }

    /// Copies from `offset` to `bytes`; returns `false` without effect beyond the window.
    #[must_use]
    pub fn read(self, offset: u64, bytes: &mut [u8]) -> bool {
        let Some(part) = self.part(offset, bytes.len() as u64) else { return false };
        // SAFETY: the source is in the window, the destination is a slice; they cannot overlap.
        unsafe { copy(part.base, bytes.as_mut_ptr() as u64, part.length) };
        true
    }

    /// Copies `length` bytes from `offset` to `to` of another window; returns `false` without
    /// effect if either window is too short or `other` is read-only.
    #[must_use]
    pub fn copy_to(self, offset: u64, length: u64, other: Self, to: u64) -> bool {
        let (Some(source), Some(destination)) = (self.part(offset, length), other.part(to, length))
        else {
            return false;
        };
        if !other.writable {
            return false;
        }
        // SAFETY: both are in windows, in which there are no Rust objects. If they overlap, the
        // copied bytes are unspecified, which is safe.
        unsafe { copy(source.base, destination.base, length) };
        true
    }

    /// Copies `length` bytes of guest memory from `address` to `offset`; returns `false` if guest
    /// memory or the window is too short, or the window is read-only. A part may have been copied
    /// then.
    #[cfg(feature = "guest")]
    #[must_use]
    pub fn copy_from_guest(
        self,
        offset: u64,
        guest: &vmm_mem::GuestMemory,
        address: u64,
        length: u64,
    ) -> bool {
        let part = self.part(offset, length).filter(|_| self.writable);
        part.is_some_and(|part| part.exchange(vmm_mem::Transfer::FromGuest, guest, address))
    }

    /// Copies `length` bytes from `offset` to guest memory at `address`; returns `false` as
    /// [`copy_from_guest`](Self::copy_from_guest) does.
    #[cfg(feature = "guest")]
    #[must_use]
    pub fn copy_to_guest(
        self,
        offset: u64,
        guest: &vmm_mem::GuestMemory,
        address: u64,
        length: u64,
    ) -> bool {
        let part = self.part(offset, length);
        part.is_some_and(|part| part.exchange(vmm_mem::Transfer::ToGuest, guest, address))
    }

    /// Copies between the whole window, which must be writable if it is the destination, and guest
    /// memory at `address`.
    #[cfg(feature = "guest")]
    fn exchange(self, way: vmm_mem::Transfer, guest: &vmm_mem::GuestMemory, address: u64) -> bool {
        let mut own = self.base;
        let copied = guest.for_each_part(way, address, self.length, |guest_part, length| {
            let guest_part = guest_part.expose_provenance() as u64;
            let (from, to) = match way {
                vmm_mem::Transfer::FromGuest => (guest_part, own),
                vmm_mem::Transfer::ToGuest => (own, guest_part),
            };
            // SAFETY: one range is guest memory, the other is in the window: both belong to this
            // task and hold no Rust objects. The lengths of the parts add up to at most the
            // window's.
            unsafe { copy(from, to, length as u64) };
            own += length as u64;
        });
        copied.is_ok()
    }

    /// Fills the window with zeros, unless it is read-only.
    pub fn clear(self) {
        if !self.writable {
            return;
        }
        // SAFETY: the range is in the window.
        unsafe { clear(self.base, self.length) };
    }

    /// Splits the window into the largest blocks that are naturally aligned both here and when
    /// mapped contiguously from address `destination`: address and order of each.
    pub fn blocks(self, destination: u64) -> impl Iterator<Item = (u64, u8)> + Clone {
        let mut at = self.base;
        let end = self.base + self.length;
        core::iter::from_fn(move || {
            let left = (end.saturating_sub(at)) >> PAGE_SHIFT;
            if left == 0 {
                return None;
            }
            let there = destination.wrapping_add(at.wrapping_sub(self.base));
            let aligned = ((at | there) >> PAGE_SHIFT).trailing_zeros();
            let order = aligned.min(left.ilog2()).min(Item::MAX_ORDER as u32) as u8;
            let block = at;
            at += PAGE_SIZE << order;
            Some((block, order))
        })
    }

    /// Revokes the window's pages from all tasks and VMs that they were delegated to.
    pub fn revoke(self) -> Result<(), Status> {
        self.unmap(0)
    }

    /// Revokes the window's pages from all holders, this task included.
    pub fn release(self) -> Result<(), Status> {
        self.unmap(ops::UNMAP_SELF)
    }

    fn unmap(self, flags: u64) -> Result<(), Status> {
        for (base, order) in self.blocks(self.base) {
            let item = Item::memory(order, abi::rights::ALL);
            // SAFETY: no Rust object is in a window.
            unsafe { call(Op::Unmap, [item.pack(), base >> PAGE_SHIFT, flags, 0, 0, 0]) }?;
        }
        Ok(())
    }
}

/// Address spaces that memory can be delegated to.
pub trait Space: Copy {
    /// Returns the slot of the task or VM.
    fn space(self) -> Selector;

    /// Delegates a window's pages to `destination` there, with these rights.
    fn map(self, window: Window, destination: u64, rights: u8) -> Result<(), Status> {
        let rights = window.allowed_rights(rights);
        for (base, order) in window.blocks(destination) {
            let there = destination + (base - window.base());
            delegate(
                self.space(),
                Item::memory(order, rights),
                base >> PAGE_SHIFT,
                there >> PAGE_SHIFT,
            )?;
        }
        Ok(())
    }
}

impl Space for Task {
    fn space(self) -> Selector {
        self.selector()
    }
}

/// The running program's task.
#[derive(Clone, Copy)]
struct OwnTask;

impl Space for OwnTask {
    fn space(self) -> Selector {
        ops::SELF
    }
}

impl Space for Vm {
    fn space(self) -> Selector {
        self.selector()
    }
}

impl Vm {
    /// Removes the mappings that this task has made in the VM and that overlap the block of
    /// `2^order` pages at `address`. `free_tables`: also frees the block's page tables.
    pub fn unmap_at(self, address: u64, order: u8, free_tables: bool) -> Result<(), Status> {
        let item = Item::memory(order, abi::rights::ALL).pack();
        let flags = if free_tables { ops::FREE_TABLES } else { 0 };
        let arguments = [self.selector(), item, address >> PAGE_SHIFT, flags, 0, 0];
        // SAFETY: this task's memory does not change.
        unsafe { call(Op::UnmapAt, arguments) }.map(drop)
    }
}

impl Task {
    /// Delegates a capability to a slot there, with a subset of its rights.
    pub fn delegate(self, capability: Selector, slot: Selector, rights: u8) -> Result<(), Status> {
        delegate(self.selector(), Item::capability(rights), capability, slot)
    }

    /// Delegates the I/O ports `base..base + count`; `count` is a power of two and divides `base`.
    pub fn delegate_ports(self, base: u16, count: u16) -> Result<(), Status> {
        let order = count.trailing_zeros() as u8;
        delegate(self.selector(), Item::ports(order), base as u64, base as u64)
    }
}

/// Copies a capability to a free slot of this task, with a subset of its rights.
pub fn copy_capability(capability: Selector, slot: Selector, rights: u8) -> Result<(), Status> {
    delegate(ops::SELF, Item::capability(rights), capability, slot)
}

fn delegate(target: Selector, item: Item, source: u64, destination: u64) -> Result<(), Status> {
    // SAFETY: memory comes out of a window. It goes to another space, or to an unmapped range of
    // this one.
    unsafe { call(Op::Delegate, [target, item.pack(), source, destination, 0, 0]) }.map(drop)
}

pub(crate) fn unmap_capability(selector: Selector, own: bool) -> Result<(), Status> {
    let item = Item::capability(abi::rights::ALL);
    let flags = if own { ops::UNMAP_SELF } else { 0 };
    // SAFETY: the only change to this task's memory is an unmapping.
    unsafe { call(Op::Unmap, [item.pack(), selector, flags, 0, 0, 0]) }.map(drop)
}

/// Revokes all delegations of a capability, and keeps it.
pub fn revoke_capability(selector: Selector) -> Result<(), Status> {
    unmap_capability(selector, false)
}

/// Lets the running thread receive memory with messages: up to `length` bytes, at `offset` of the
/// range for received memory. A length of 0 refuses memory.
pub fn accept_memory(offset: u64, length: u64) -> bool {
    let fits = offset.checked_add(length).is_some_and(|end| end <= RECEIVE_LENGTH);
    if fits {
        let base = (RECEIVE + offset) >> PAGE_SHIFT;
        let accept = abi::Window { base, count: length >> PAGE_SHIFT };
        Page::current().accept(ItemKind::Memory, accept);
    }
    fits
}

/// Maps windows a second time in this task, contiguously, as one window at `offset` of the range
/// for received memory. Delegations from the alias can be revoked without affecting the original. A
/// failure leaves no mapping.
pub fn map_alias(
    pieces: impl Iterator<Item = Window>,
    offset: u64,
    rights: u8,
) -> Result<Window, Status> {
    let writable = rights & abi::rights::WRITE != 0;
    let mut whole = Window { base: RECEIVE + offset, length: 0, writable };
    for piece in pieces {
        let at = whole.base + whole.length;
        whole.length += piece.length;
        whole.writable &= piece.writable;
        let fits = offset.checked_add(whole.length).is_some_and(|end| end <= RECEIVE_LENGTH);
        let mapped = if fits { OwnTask.map(piece, at, rights) } else { Err(Status::BadArgument) };
        if let Err(status) = mapped {
            // An absent mapping counts as revoked.
            let _ = whole.release();
            return Err(status);
        }
    }
    Ok(whole)
}

/// Returns the memory that item `index` of the last received message delegated.
pub fn received_memory(index: usize) -> Option<Window> {
    let (item, base) = Page::current().item(index)?;
    let base = base.checked_mul(PAGE_SIZE)?;
    let length = PAGE_SIZE << item.order;
    let reserved = base >= RECEIVE && base.checked_add(length)? <= RECEIVE + RECEIVE_LENGTH;
    (item.kind == ItemKind::Memory && reserved).then_some(Window {
        base,
        length,
        writable: item.rights & abi::rights::WRITE != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(base: u64, length: u64) -> Window {
        // SAFETY: only its arithmetic is used.
        unsafe { Window::new(base, length) }
    }

    #[test]
    fn blocks_are_aligned_in_both_spaces() {
        let window = window(0x20_3000, 0x40_5000);
        for destination in [0, 0x3000, 0x1000, 0x20_3000] {
            let mut at = window.base();
            for (base, order) in window.blocks(destination) {
                let size = PAGE_SIZE << order;
                assert_eq!(base, at);
                assert_eq!(base % size, 0);
                assert_eq!((destination + base - window.base()) % size, 0);
                at += size;
            }
            assert_eq!(at, window.base() + window.length());
        }
        assert_eq!(window.blocks(0x3000).map(|block| block.1).max(), Some(9));
    }

    #[test]
    fn parts_stay_inside() {
        let window = window(0x1000, 0x1000);
        assert_eq!(window.part(0xfff, 1).map(Window::base), Some(0x1fff));
        assert_eq!(window.part(0xfff, 2), None);
        assert_eq!(window.part(u64::MAX, 2), None);
    }

    #[test]
    fn copies() {
        let memory = vec![1u8; 100].leak();
        let window = window(memory.as_mut_ptr() as u64, 100);
        assert!(window.write(3, b"thirteen chars"));
        let mut read = [0; 14];
        assert!(window.read(3, &mut read));
        assert_eq!(&read, b"thirteen chars");
        assert!(!window.write(90, &[0; 11]));
        assert!(window.copy_to(3, 4, window, 50));
        assert!(window.read(50, &mut read[..4]));
        assert_eq!(&read[..4], b"thir");
        assert!(!window.copy_to(97, 4, window, 0));
        assert!(!window.copy_to(0, 4, window, u64::MAX));
        window.clear();
        assert!(window.read(86, &mut read));
        assert_eq!(read, [0; 14]);
    }

    #[cfg(feature = "guest")]
    #[test]
    fn copies_from_and_to_a_guest() {
        #[repr(align(4096))]
        struct Page([u8; 4096]);
        let page = Box::leak(Box::new(Page([7; 4096])));
        let host = page.0.as_mut_ptr();
        let memory = vmm_mem::Window { base: 0x1000, length: 4096, host };
        // SAFETY: leaked memory without other users.
        let guest = unsafe { vmm_mem::GuestMemory::new(&[memory]) }.unwrap();
        let window = window(vec![1u8; 100].leak().as_mut_ptr() as u64, 100);
        assert!(window.write(0, b"to a guest"));
        assert!(window.copy_to_guest(3, &guest, 0x1ff9, 7));
        assert!(window.copy_from_guest(93, &guest, 0x1ff9, 7));
        let mut read = [0; 10];
        assert!(window.read(90, &mut read));
        assert_eq!(&read, b"\x01\x01\x01a guest");
        assert!(!window.copy_to_guest(0, &guest, 0x1ff9, 8), "beyond the guest's memory");
        assert!(!window.copy_from_guest(0, &guest, 0xfff, 1));
        assert!(!window.copy_from_guest(94, &guest, 0x1000, 7), "beyond the window");
        assert!(!window.copy_to_guest(94, &guest, 0x1000, 7));
        assert!(window.read(90, &mut read));
        assert_eq!(&read, b"\x01\x01\x01a guest");
    }
}
