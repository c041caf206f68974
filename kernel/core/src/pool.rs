//! Kernel memory: frames, typed slabs, handles and quotas. The only module of this crate with
//! `unsafe`.
//!
//! # Soundness
//!
//! All kernel objects are in one physical range that nothing else uses. Every frame of it has a
//! class: free, raw, or slab of slots of one size, which objects of several types share.
//!
//! * A [`Handle`] names a slot and a generation. [`Memory::get`] checks that the frame is a slab of
//!   the slot size of the type and that the slot contains this very handle, so a stale handle
//!   yields `None`. Generations have 40 bits and are counted for each frame, for ever: no slot of a
//!   frame has the same one twice, for any type, so a matching handle implies a matching type. A
//!   frame whose generations are exhausted is not used again.
//! * [`Memory::free`] only retires a slot: its bytes stay unchanged until [`Memory::reclaim`],
//!   which takes `&mut self` and therefore cannot run while any `&T` from `get` lives.
//! * Raw frames are only accessible as arrays of atomics ([`Memory::words`]), and only while the
//!   class of the frame is raw. User tasks and the page-table walker may write them at any time.
//! * A [`Cached`] address is used only while [`Memory::destroyed_count`] is unchanged: then the
//!   object has not been freed. Counts of different memories never agree.
//! * `Memory` is used under the kernel lock only; it is neither `Sync` nor copied.
#![allow(unsafe_code)]

use core::cell::{Cell, UnsafeCell};
use core::marker::PhantomData;
use core::mem::{MaybeUninit, size_of};
use core::num::NonZeroU64;
use core::sync::atomic::{AtomicU64, Ordering};

use abi::{PAGE_SHIFT, Status};

use crate::Result;
pub use factory::{Account, Factory};
pub use handle::Handle;

mod factory;
mod frames;
mod handle;

const FRAME: usize = abi::PAGE_SIZE as usize;
const NONE: u32 = u32::MAX;
const INDEX_BITS: u32 = 24;
const GENERATION_BITS: u32 = 64 - INDEX_BITS;
/// Maximum size of kernel memory: slots are multiples of 16 bytes, indexed by 24 bits of the
/// handle.
pub const MAX_BYTES: usize = 16 << INDEX_BITS;
/// Maximum number of retired frames freed per kernel entry: a vCPU has more, with a large vTLB.
const RECLAIMED_FRAMES: u32 = 128;
/// Number of object types.
pub const CLASSES: usize = 16;
/// Number of slot sizes: powers of two, up to a frame.
const SIZES: usize = PAGE_SHIFT as usize + 1;

const CLASS_FREE: u8 = 0xff;
const CLASS_RAW: u8 = 0xfe;
const CLASS_RAW_RETIRED: u8 = 0xfd;
const CLASS_FIXED: u8 = 0xfc;

/// A type of object stored in slabs.
///
/// Values are never dropped, so they must not own resources; all mutable parts are `Cell`s.
pub trait Object: Sized + 'static {
    /// Unique index of the type, below [`CLASSES`].
    const CLASS: u8;
}

/// Address of an object, valid until an object is destroyed: cheaper than the look-up of a
/// [`Handle`].
pub struct Cached<T> {
    object: *const T,
    /// [`Memory::destroyed_count`] when the object was found.
    destroyed_count: u64,
}

impl<T> Cached<T> {
    /// No object.
    pub const NONE: Self = Self { object: core::ptr::null(), destroyed_count: 0 };
}

impl<T> Default for Cached<T> {
    fn default() -> Self {
        Self::NONE
    }
}
impl<T> Clone for Cached<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Cached<T> {}

/// Start values of [`Memory::destroyed_count`], so far apart that none is reached from another:
/// `2^COUNT_BITS` objects take years to destroy.
static DESTROYED_COUNTS: AtomicU64 = AtomicU64::new(1 << COUNT_BITS);
const COUNT_BITS: u32 = 50;

/// A raw frame: page table, message page or processor structure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame(u32);

struct FrameInfo {
    /// Last generation of a slot of this frame.
    generation: Cell<u64>,
    used: Cell<u16>,
    /// First free slot of a slab, as byte offset in the frame; `u16::MAX` if the slab is full.
    free: Cell<u16>,
    next: Cell<u32>,
    prev: Cell<u32>,
    owner: Cell<Account>,
}

impl FrameInfo {
    /// Returns whether no slot of the frame can have another generation.
    fn is_exhausted(&self) -> bool {
        self.generation.get() == u64::MAX >> INDEX_BITS
    }
}

#[repr(C, align(16))]
struct Slot<T> {
    /// Handle; 0 while free or retired.
    name: Cell<u64>,
    /// Next retired slot (index), or next free slot in the frame (offset).
    link: Cell<u32>,
    /// [`Object::CLASS`] of the current or last object.
    class: Cell<u8>,
    value: UnsafeCell<MaybeUninit<T>>,
}

impl<T> Slot<T> {
    /// `log2` of the slot size for values of type `T`: the class of their frames.
    const SIZE: u8 = size_of::<Self>().next_power_of_two().trailing_zeros() as u8;
}

/// Offset of the bitmap of free frames, which follows the classes of all frames (one byte each).
/// The classes are stored apart from [`FrameInfo`], so that [`Memory::get`] finds them by frame
/// index alone.
const fn map_offset(frames: usize) -> usize {
    frames.next_multiple_of(align_of::<u64>())
}

/// Length of the bitmap of free frames, in words.
const fn map_words(frames: usize) -> usize {
    frames.div_ceil(64)
}

/// Offset of the frame table, which follows the bitmap of free frames.
const fn table_offset(frames: usize) -> usize {
    const { assert!(align_of::<FrameInfo>() <= align_of::<u64>()) };
    map_offset(frames) + 8 * map_words(frames)
}

/// Kernel memory.
pub struct Memory {
    base: *mut u8,
    physical: u64,
    count: u32,
    free: Cell<u32>,
    hint: Cell<u32>,
    retired: Cell<u32>,
    retired_raw: Cell<u32>,
    /// A list of retired memory is not empty, or [`Memory::request_work`] was called.
    has_work: Cell<bool>,
    destroyed_count: Cell<u64>,
    root: Factory,
}

impl Memory {
    /// Empty memory: every allocation fails.
    pub const fn empty() -> Self {
        Self {
            base: core::ptr::null_mut(),
            physical: 0,
            count: 0,
            free: Cell::new(0),
            hint: Cell::new(0),
            retired: Cell::new(NONE),
            retired_raw: Cell::new(NONE),
            has_work: Cell::new(false),
            destroyed_count: Cell::new(0),
            root: Factory::new(0, u64::MAX, 0, None, None, 0),
        }
    }

    /// Manages `bytes` bytes at `base` (physical address `physical`). Returns `None` if the range
    /// is too small for its own bookkeeping.
    ///
    /// # Safety
    /// The range is writable, page-aligned, at most [`MAX_BYTES`] long, lives for ever, and nothing
    /// else uses it.
    pub unsafe fn new(base: *mut u8, physical: u64, bytes: usize) -> Option<Self> {
        let count = bytes.min(MAX_BYTES) / FRAME;
        let table = table_offset(count);
        let fixed = (table + count * size_of::<FrameInfo>()).div_ceil(FRAME);
        if count < fixed + 8 {
            return None;
        }
        for index in 0..map_words(count) {
            // SAFETY: as below, for the bitmap.
            unsafe {
                base.add(map_offset(count)).cast::<Cell<u64>>().add(index).write(Cell::new(0));
            }
        }
        for index in 0..count {
            let class = if index < fixed { CLASS_FIXED } else { CLASS_FREE };
            // SAFETY: the caller passes the range; classes and table fit its first `fixed` frames.
            unsafe {
                base.add(index).cast::<Cell<u8>>().write(Cell::new(class));
                base.add(table).cast::<FrameInfo>().add(index).write(FrameInfo {
                    generation: Cell::new(0),
                    used: Cell::new(0),
                    free: Cell::new(u16::MAX),
                    next: Cell::new(NONE),
                    prev: Cell::new(NONE),
                    owner: Cell::new(None),
                });
            }
        }
        let free = (count - fixed) as u32;
        let memory = Self {
            base,
            physical,
            count: count as u32,
            free: Cell::new(free),
            hint: Cell::new(fixed as u32),
            root: Factory::new(free, u64::MAX, 0, None, None, 0),
            ..Self::empty()
        };
        for index in fixed..count {
            memory.set_free(index as u32, true);
        }
        let start = DESTROYED_COUNTS.fetch_add(1 << COUNT_BITS, Ordering::Relaxed);
        assert!(start >> 63 == 0, "too many memories");
        memory.destroyed_count.set(start);
        Some(memory)
    }

    /// Root factory, charged for everything without another factory.
    pub fn root(&self) -> &Factory {
        &self.root
    }

    fn info(&self, frame: u32) -> &FrameInfo {
        assert!(frame < self.count);
        let table = table_offset(self.count as usize);
        // SAFETY: in bounds of the table that `new` initialised; only `Cell`s inside.
        unsafe { &*self.base.add(table).cast::<FrameInfo>().add(frame as usize) }
    }

    fn class(&self, frame: u32) -> &Cell<u8> {
        assert!(frame < self.count);
        // SAFETY: in bounds of the classes that `new` initialised.
        unsafe { &*self.base.add(frame as usize).cast() }
    }

    /// Bitmap of free frames.
    fn map(&self) -> &[Cell<u64>] {
        let count = self.count as usize;
        if count == 0 {
            return &[];
        }
        // SAFETY: the words that `new` initialised; only the bitmap uses them.
        unsafe {
            let words = self.base.add(map_offset(count)).cast::<Cell<u64>>();
            core::slice::from_raw_parts(words, map_words(count))
        }
    }

    fn owner(&self, frame: u32) -> &Factory {
        self.info(frame).owner.get().and_then(|handle| self.get(handle)).unwrap_or(&self.root)
    }

    pub(crate) fn factory(&self, factory: Account) -> Result<&Factory> {
        match factory {
            None => Ok(&self.root),
            Some(handle) => self.get(handle).ok_or(Status::BadCapability),
        }
    }

    /// Contents of a raw frame.
    pub fn words(&self, frame: Frame) -> &[AtomicU64; 512] {
        assert!(self.class(frame.0).get() == CLASS_RAW);
        // SAFETY: the frame is in range (checked by `info`) and raw, so it holds no typed value;
        // it stays raw or retired until `reclaim`, which needs `&mut self`.
        unsafe { &*self.base.add(frame.0 as usize * FRAME).cast() }
    }

    /// Kernel virtual address of a raw frame.
    pub fn address(&self, frame: Frame) -> *mut u8 {
        self.words(frame).as_ptr().cast::<u8>().cast_mut()
    }

    fn slot<T: Object>(&self, index: u32) -> &Slot<T> {
        // SAFETY: callers pass indices of slots in frames of class `Slot::<T>::SIZE` only. The slot
        // headers were initialised when the frame became a slab, which it stays until `reclaim`
        // releases it, with `&mut self`. Only `get` and `alloc` depend on whether the value is
        // initialised.
        unsafe { &*self.base.add((index as usize) << 4).cast() }
    }

    /// Returns the object, or `None` if it has been freed.
    #[inline(always)]
    pub fn get<T: Object>(&self, handle: Handle<T>) -> Option<&T> {
        let index = handle.index();
        let frame = index >> (PAGE_SHIFT - 4);
        // SAFETY: only `alloc` creates handles, so the frame has a class.
        let class: &Cell<u8> = unsafe { &*self.base.add(frame as usize).cast() };
        if class.get() != Slot::<T>::SIZE {
            return None;
        }
        let slot = self.slot::<T>(index);
        if slot.name.get() != handle.0.get() {
            return None;
        }
        // SAFETY: the slot is in use, so its value is initialised; it is not written or reused
        // before `reclaim`.
        Some(unsafe { (*slot.value.get()).assume_init_ref() })
    }

    /// Address of an object for [`Memory::cached`]; `None` if it has been freed.
    pub fn cache<T: Object>(&self, handle: Handle<T>) -> Option<Cached<T>> {
        let destroyed_count = self.destroyed_count.get();
        self.get(handle).map(|object| Cached { object, destroyed_count })
    }

    /// Returns the object, or `None` if any object has been destroyed since [`Memory::cache`].
    #[inline(always)]
    pub fn cached<T: Object>(&self, cached: Cached<T>) -> Option<&T> {
        if cached.destroyed_count != self.destroyed_count.get() {
            return None;
        }
        // SAFETY: counts are unique to this memory and never return to an earlier value, so `cache`
        // found the object here, and no object was freed since; it is not written or reused before
        // `reclaim`, which needs `&mut self`. `NONE` has count 0, which no memory has.
        Some(unsafe { &*cached.object })
    }

    /// Returns the object. Panics if it has been freed, which is a kernel bug.
    #[inline(always)]
    pub fn at<T: Object>(&self, handle: Handle<T>) -> &T {
        self.get(handle).expect("handle outlived its object")
    }

    /// Allocates an object, charged to `factory` (`None`: the root factory).
    pub fn alloc<T: Object>(&self, factory: Account, value: T) -> Result<Handle<T>> {
        const {
            assert!(size_of::<Slot<T>>() <= FRAME);
            assert!((T::CLASS as usize) < CLASSES);
        }
        let account = self.factory(factory)?;
        let head = &account.partial[Slot::<T>::SIZE as usize];
        if head.get() == NONE {
            let frame = self.take_frames(factory, 1, Slot::<T>::SIZE)?;
            self.init_slab::<T>(frame);
            self.link(head, frame);
        }
        let frame = head.get();
        let info = self.info(frame);
        let offset = info.free.get();
        let generation = info.generation.get() + 1;
        info.generation.set(generation);
        let index = (frame << (PAGE_SHIFT - 4)) + (offset as u32 >> 4);
        let slot = self.slot::<T>(index);
        // After its last generation a slab counts as full.
        info.free.set(if info.is_exhausted() { u16::MAX } else { slot.link.get() as u16 });
        info.used.set(info.used.get() + 1);
        if info.free.get() == u16::MAX {
            self.unlink(account, Slot::<T>::SIZE, frame);
        }
        // SAFETY: the slot is free: no reference to its value exists.
        unsafe { slot.value.get().write(MaybeUninit::new(value)) };
        slot.class.set(T::CLASS);
        let raw = (index as u64) << GENERATION_BITS | generation;
        slot.name.set(raw);
        Ok(Handle(NonZeroU64::new(raw).expect("generations start at 1"), PhantomData))
    }

    fn init_slab<T: Object>(&self, frame: u32) {
        let size = 1 << Slot::<T>::SIZE;
        let mut next = u16::MAX;
        for index in (0..FRAME / size).rev() {
            let offset = index * size;
            // SAFETY: the frame was just allocated for this class and is unused; the slot is inside
            // it.
            unsafe {
                let slot: *mut Slot<T> = self.base.add(frame as usize * FRAME + offset).cast();
                (&raw mut (*slot).name).write(Cell::new(0));
                (&raw mut (*slot).link).write(Cell::new(next as u32));
                (&raw mut (*slot).class).write(Cell::new(0));
            }
            next = offset as u16;
        }
        self.info(frame).free.set(next);
    }

    /// Adds a slab with free slots to a list.
    fn link(&self, head: &Cell<u32>, frame: u32) {
        let info = self.info(frame);
        info.next.set(head.replace(frame));
        info.prev.set(NONE);
        if info.next.get() != NONE {
            self.info(info.next.get()).prev.set(frame);
        }
    }

    fn unlink(&self, account: &Factory, class: u8, frame: u32) {
        let info = self.info(frame);
        match info.prev.get() {
            NONE => account.partial[class as usize].set(info.next.get()),
            prev => self.info(prev).next.set(info.next.get()),
        }
        if info.next.get() != NONE {
            self.info(info.next.get()).prev.set(info.prev.get());
        }
    }

    /// Retires an object: its handle becomes invalid at once, its memory is reused after
    /// [`Memory::reclaim`]. Freeing it again has no effect.
    pub fn free<T: Object>(&self, handle: Handle<T>) {
        if self.get(handle).is_none() {
            return;
        }
        let index = handle.index();
        let slot = self.slot::<T>(index);
        slot.name.set(0);
        slot.link.set(self.retired.replace(index));
        self.has_work.set(true);
        self.destroyed_count.set(self.destroyed_count.get() + 1);
    }

    /// Number of objects destroyed so far, from a start value that differs between memories. While
    /// it is unchanged, objects found by handle still exist.
    #[inline(always)]
    pub fn destroyed_count(&self) -> u64 {
        self.destroyed_count.get()
    }

    /// Frees retired slots, and up to [`RECLAIMED_FRAMES`] frames: the next call continues.
    pub fn reclaim(&mut self) {
        let mut left = RECLAIMED_FRAMES;
        while left != 0 && self.has_retired_frames() {
            left -= 1;
            let frame = self.retired_raw.get();
            self.retired_raw.set(self.info(frame).next.get());
            self.release(frame);
        }
        self.has_work.set(self.has_retired_frames());
        while self.retired.get() != NONE {
            let index = self.retired.get();
            // Every slot begins with `name` and `link`, for every type.
            let frame = index >> (PAGE_SHIFT - 4);
            // SAFETY: a retired slot is in a slab; its header has this layout for every type.
            let slot: &Slot<[u8; 0]> = unsafe { &*self.base.add((index as usize) << 4).cast() };
            self.retired.set(slot.link.get());
            let info = self.info(frame);
            let class = self.class(frame).get();
            slot.link.set(info.free.get() as u32);
            let was_full = info.free.get() == u16::MAX;
            info.used.set(info.used.get() - 1);
            let account = self.owner(frame);
            if !info.is_exhausted() {
                info.free.set(((index << 4) & (FRAME as u32 - 1)) as u16);
                if was_full {
                    self.link(&account.partial[class as usize], frame);
                }
                if info.used.get() == 0 {
                    self.unlink(account, class, frame);
                }
            }
            if info.used.get() == 0 {
                self.release(frame);
            }
        }
    }

    /// Frees a frame, and its factory if this was the last charge of a factory without
    /// capabilities.
    fn release(&self, frame: u32) {
        let owner = self.info(frame).owner.get();
        self.release_frame(frame);
        if let Some(owner) = owner {
            self.destroy_factory(owner);
        }
    }

    /// Returns whether [`Memory::reclaim`] has anything to do, or [`Memory::request_work`] was
    /// called.
    pub fn has_work(&self) -> bool {
        self.has_work.get()
    }

    /// Returns whether [`Memory::reclaim`] has left frames.
    pub fn has_retired_frames(&self) -> bool {
        self.retired_raw.get() != NONE
    }

    /// Requests deferred work before the kernel exits.
    pub fn request_work(&self) {
        self.has_work.set(true);
    }
}

/// Leaked kernel memory of `frames` frames.
#[cfg(test)]
pub(crate) fn leaked(frames: usize) -> Memory {
    let layout = std::alloc::Layout::from_size_align(frames * FRAME, FRAME).unwrap();
    // SAFETY: the layout is not empty; the range is ours for ever.
    unsafe { Memory::new(std::alloc::alloc_zeroed(layout), 0x4000_0000, frames * FRAME).unwrap() }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
