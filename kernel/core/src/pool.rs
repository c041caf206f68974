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
//!   yields `None`. Generations have 40 bits and are never reused for any type: a matching
//!   generation implies a matching type. When they are exhausted, allocation fails.
//! * [`Memory::free`] only retires a slot: its bytes stay unchanged until [`Memory::reclaim`],
//!   which takes `&mut self` and therefore cannot run while any `&T` from `get` lives.
//! * Raw frames are only accessible as arrays of atomics ([`Memory::words`]), and only while the
//!   class of the frame is raw. User tasks and the page-table walker may write them at any time.
//! * `Memory` is used under the kernel lock only; it is neither `Sync` nor copied.
#![allow(unsafe_code)]

use core::cell::{Cell, UnsafeCell};
use core::marker::PhantomData;
use core::mem::{MaybeUninit, size_of};
use core::num::NonZeroU64;
use core::sync::atomic::{AtomicU64, Ordering};

use abi::{PAGE_SHIFT, Status};

const FRAME: usize = abi::PAGE_SIZE as usize;
const NONE: u32 = u32::MAX;
const INDEX_BITS: u32 = 24;
const GENERATION_BITS: u32 = 64 - INDEX_BITS;
/// Maximum size of kernel memory: slots are multiples of 16 bytes, indexed by 24 bits of the
/// handle.
pub const MAX_BYTES: usize = 16 << INDEX_BITS;
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

/// Reference to an object: slot index (high bits, extracted by one shift) and generation.
pub struct Handle<T>(NonZeroU64, PhantomData<*const T>);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Handle<T> {}
impl<T> PartialEq for Handle<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}
impl<T> Eq for Handle<T> {}
impl<T> core::fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl<T> Handle<T> {
    /// Slot index, in units of 16 bytes from the start of kernel memory.
    #[inline(always)]
    fn index(self) -> u32 {
        (self.0.get() >> GENERATION_BITS) as u32
    }

    /// Identifier that is unique over all objects ever allocated.
    pub fn id(self) -> u64 {
        self.0.get()
    }
}

/// A raw frame: page table, message page or processor structure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame(u32);

/// Maximum share of CPU time of a factory: exceeds the CPUs of any machine.
const MAX_SHARE: u64 = 4096 * abi::SHARE_OF_CPU;

/// Maximum depth of the factory tree.
const MAX_DEPTH: u8 = 16;

/// Quota of kernel memory (frames) and of CPU time, with the slabs charged to it.
pub struct Factory {
    quota: Cell<u32>,
    used: Cell<u32>,
    /// Maximum priority of scheduling contexts created from it.
    pub max_priority: u64,
    /// CPU time reserved for it, in units of 1 / [`abi::SHARE_OF_CPU`] of a CPU; 0: uses the share
    /// of the nearest ancestor that has one.
    share: u64,
    /// Unused part of the share.
    free_share: Cell<u64>,
    /// Nearest ancestor with a share of its own. It outlives this factory, whose memory is charged
    /// to it.
    share_owner: Option<Handle<Factory>>,
    parent: Option<Handle<Factory>>,
    /// Number of ancestors, which may be destroyed together with this factory.
    depth: u8,
    /// Number of capabilities to this factory.
    pub caps: Cell<u32>,
    partial: [Cell<u32>; SIZES],
}

impl Object for Factory {
    const CLASS: u8 = 0;
}

impl Factory {
    const fn new(
        quota: u32,
        max_priority: u64,
        share: u64,
        parent: Option<Handle<Factory>>,
        share_owner: Option<Handle<Factory>>,
        depth: u8,
    ) -> Self {
        Self {
            quota: Cell::new(quota),
            used: Cell::new(0),
            max_priority,
            share,
            free_share: Cell::new(share),
            share_owner,
            parent,
            depth,
            caps: Cell::new(0),
            partial: [const { Cell::new(NONE) }; SIZES],
        }
    }

    /// Frames not charged yet.
    pub fn available(&self) -> u32 {
        self.quota.get() - self.used.get()
    }

    fn charge(&self, frames: u32) -> Result<(), Status> {
        if frames > self.available() {
            return Err(Status::NoQuota);
        }
        self.used.set(self.used.get() + frames);
        Ok(())
    }

    fn uncharge(&self, frames: u32) {
        self.used.set(self.used.get() - frames);
    }
}

struct FrameInfo {
    used: Cell<u16>,
    /// First free slot of a slab, as byte offset in the frame; `u16::MAX` if the slab is full.
    free: Cell<u16>,
    next: Cell<u32>,
    prev: Cell<u32>,
    owner: Cell<Option<Handle<Factory>>>,
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

/// Index of the first of `count` consecutive set bits of a word, if it has them.
fn first_run(word: u64, count: u32) -> Option<u32> {
    let runs = (1..count).fold(word, |runs, shift| runs & word >> shift);
    (runs != 0).then(|| runs.trailing_zeros())
}

/// Kernel memory.
pub struct Memory {
    base: *mut u8,
    physical: u64,
    count: u32,
    free: Cell<u32>,
    hint: Cell<u32>,
    generation: Cell<u64>,
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
            generation: Cell::new(1),
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
            generation: Cell::new(1),
            retired: Cell::new(NONE),
            retired_raw: Cell::new(NONE),
            has_work: Cell::new(false),
            destroyed_count: Cell::new(0),
            root: Factory::new(free, u64::MAX, 0, None, None, 0),
        };
        for index in fixed..count {
            memory.set_free(index as u32, true);
        }
        Some(memory)
    }

    /// Number of free frames.
    pub fn free_frames(&self) -> u32 {
        self.free.get()
    }

    /// Total number of frames.
    pub fn total_frames(&self) -> u32 {
        self.count
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

    fn set_free(&self, frame: u32, free: bool) {
        let word = &self.map()[frame as usize / 64];
        let bit = 1 << (frame % 64);
        word.set(if free { word.get() | bit } else { word.get() & !bit });
    }

    /// Finds `count` consecutive free frames within one word of the bitmap.
    fn find_free(&self, count: u32) -> Option<u32> {
        let map = self.map();
        let start = (self.hint.get() as usize / 64).min(map.len());
        let (before, after) = map.split_at(start);
        let places = (start..).zip(after).chain((0..).zip(before));
        places
            .filter(|(_, word)| word.get() != 0)
            .find_map(|(index, word)| Some(64 * index as u32 + first_run(word.get(), count)?))
    }

    fn owner(&self, frame: u32) -> &Factory {
        self.info(frame).owner.get().and_then(|handle| self.get(handle)).unwrap_or(&self.root)
    }

    pub(crate) fn factory(&self, factory: Option<Handle<Factory>>) -> Result<&Factory, Status> {
        match factory {
            None => Ok(&self.root),
            Some(handle) => self.get(handle).ok_or(Status::BadCapability),
        }
    }

    /// Allocates `frames` consecutive frames, at most 64, charged to `factory`.
    fn take_frames(
        &self,
        factory: Option<Handle<Factory>>,
        frames: u32,
        class: u8,
    ) -> Result<u32, Status> {
        let account = self.factory(factory)?;
        account.charge(frames)?;
        let Some(first) = self.find_free(frames) else {
            account.uncharge(frames);
            return Err(Status::NoQuota);
        };
        for frame in first..first + frames {
            let info = self.info(frame);
            self.class(frame).set(class);
            self.set_free(frame, false);
            info.owner.set(factory);
            info.used.set(0);
        }
        self.free.set(self.free.get() - frames);
        self.hint.set(first);
        Ok(first)
    }

    fn release_frame(&self, frame: u32) {
        self.owner(frame).uncharge(1);
        let info = self.info(frame);
        self.class(frame).set(CLASS_FREE);
        self.set_free(frame, true);
        info.owner.set(None);
        self.free.set(self.free.get() + 1);
        self.hint.set(frame.min(self.hint.get()));
    }

    /// Allocates `count` consecutive zeroed raw frames; returns the first.
    pub fn alloc_raw(&self, factory: Option<Handle<Factory>>, count: u32) -> Result<Frame, Status> {
        let first = self.take_frames(factory, count, CLASS_RAW)?;
        for frame in first..first + count {
            for word in self.words(Frame(frame)) {
                word.store(0, Ordering::Relaxed);
            }
        }
        Ok(Frame(first))
    }

    /// Retires `count` raw frames from `first`; [`Memory::reclaim`] frees them.
    pub fn free_raw(&self, first: Frame, count: u32) {
        for frame in first.0..first.0 + count {
            let info = self.info(frame);
            assert!(self.class(frame).get() == CLASS_RAW);
            self.class(frame).set(CLASS_RAW_RETIRED);
            info.next.set(self.retired_raw.replace(frame));
            self.has_work.set(true);
        }
    }

    /// Contents of a raw frame.
    pub fn words(&self, frame: Frame) -> &[AtomicU64; 512] {
        assert!(self.class(frame.0).get() == CLASS_RAW);
        // SAFETY: the frame is in range (checked by `info`) and raw, so it holds no typed value;
        // it stays raw or retired until `reclaim`, which needs `&mut self`.
        unsafe { &*self.base.add(frame.0 as usize * FRAME).cast() }
    }

    /// Physical address of a raw frame.
    pub fn physical(&self, frame: Frame) -> u64 {
        self.physical + ((frame.0 as u64) << PAGE_SHIFT)
    }

    /// Raw frame at index `offset` of an allocation that starts at `first`.
    pub fn following(&self, first: Frame, offset: u32) -> Frame {
        let frame = Frame(first.0 + offset);
        assert!(self.class(frame.0).get() == CLASS_RAW);
        frame
    }

    /// Raw frame at a physical address. Panics if there is none: page tables refer only to frames
    /// that the kernel allocated.
    pub fn frame_at(&self, physical: u64) -> Frame {
        let frame = (physical.wrapping_sub(self.physical) >> PAGE_SHIFT) as u32;
        assert!(self.class(frame).get() == CLASS_RAW);
        Frame(frame)
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

    /// Returns the object. Panics if it has been freed, which is a kernel bug.
    #[inline(always)]
    pub fn at<T: Object>(&self, handle: Handle<T>) -> &T {
        self.get(handle).expect("handle outlived its object")
    }

    /// Allocates an object, charged to `factory` (`None`: the root factory).
    pub fn alloc<T: Object>(
        &self,
        factory: Option<Handle<Factory>>,
        value: T,
    ) -> Result<Handle<T>, Status> {
        const {
            assert!(size_of::<Slot<T>>() <= FRAME);
            assert!((T::CLASS as usize) < CLASSES);
        }
        let account = self.factory(factory)?;
        let generation = self.generation.get();
        if generation >> GENERATION_BITS != 0 {
            return Err(Status::NoQuota);
        }
        let head = &account.partial[Slot::<T>::SIZE as usize];
        if head.get() == NONE {
            let frame = self.take_frames(factory, 1, Slot::<T>::SIZE)?;
            self.init_slab::<T>(frame);
            let info = self.info(frame);
            info.next.set(NONE);
            info.prev.set(NONE);
            head.set(frame);
        }
        let frame = head.get();
        let info = self.info(frame);
        let offset = info.free.get();
        let index = (frame << (PAGE_SHIFT - 4)) + (offset as u32 >> 4);
        let slot = self.slot::<T>(index);
        info.free.set(slot.link.get() as u16);
        info.used.set(info.used.get() + 1);
        if info.free.get() == u16::MAX {
            self.unlink(account, Slot::<T>::SIZE, frame);
        }
        self.generation.set(generation + 1);
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

    fn unlink(&self, account: &Factory, class: u8, frame: u32) {
        let info = self.info(frame);
        match info.prev.get() {
            NONE => account.partial[class as usize].set(info.next.get()),
            prev => self.info(prev).next.set(info.next.get()),
        }
        if info.next.get() != NONE {
            self.info(info.next.get()).prev.set(info.prev.get());
        }
        info.next.set(NONE);
        info.prev.set(NONE);
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

    /// Number of objects destroyed so far. While it is unchanged, objects found by handle still
    /// exist.
    #[inline(always)]
    pub fn destroyed_count(&self) -> u64 {
        self.destroyed_count.get()
    }

    /// Creates a factory with `quota` frames and, unless 0, `share` of CPU time, both taken from
    /// `parent` or the owner of its share (`NoQuota`). Fails with `BadRights` if the maximum
    /// priority exceeds the parent's, and with `Overflow` if the factory tree is too deep.
    pub fn new_factory(
        &self,
        parent: Option<Handle<Factory>>,
        quota: u32,
        max_priority: u64,
        share: u64,
    ) -> Result<Handle<Factory>, Status> {
        let account = self.factory(parent)?;
        if max_priority > account.max_priority {
            return Err(Status::BadRights);
        }
        if share > MAX_SHARE {
            return Err(Status::BadArgument);
        }
        if account.depth >= MAX_DEPTH {
            return Err(Status::Overflow);
        }
        let share_owner = self.share_owner(parent);
        account.charge(quota)?;
        let factory =
            Factory::new(quota, max_priority, share, parent, share_owner, account.depth + 1);
        self.exchange_share(share_owner, 0, share)
            .and_then(|()| {
                self.alloc(parent, factory).inspect_err(|_| self.return_share(share_owner, share))
            })
            .inspect_err(|_| account.uncharge(quota))
    }

    /// Factory whose share of CPU time is charged for objects of `factory`; `None` if unlimited.
    pub(crate) fn share_owner(&self, factory: Option<Handle<Factory>>) -> Option<Handle<Factory>> {
        let account = factory.and_then(|handle| self.get(handle))?;
        if account.share != 0 { factory } else { account.share_owner }
    }

    /// Replaces a charge of `old` share units by `new`. Fails with `NoQuota`, without effect, if
    /// the share is exceeded.
    pub(crate) fn exchange_share(
        &self,
        share_owner: Option<Handle<Factory>>,
        old: u64,
        new: u64,
    ) -> Result<(), Status> {
        let Some(share_owner) = share_owner.and_then(|handle| self.get(handle)) else {
            return Ok(());
        };
        let left = (share_owner.free_share.get() + old).checked_sub(new).ok_or(Status::NoQuota)?;
        share_owner.free_share.set(left);
        Ok(())
    }

    /// Returns `share` units of CPU time.
    pub(crate) fn return_share(&self, share_owner: Option<Handle<Factory>>, share: u64) {
        if let Some(share_owner) = share_owner.and_then(|handle| self.get(handle)) {
            share_owner.free_share.set(share_owner.free_share.get() + share);
        }
    }

    /// Destroys a factory without capabilities and charges, and returns its quota to its parent;
    /// likewise for its ancestors.
    pub fn destroy_factory(&self, handle: Handle<Factory>) {
        let mut next = Some(handle);
        while let Some(handle) = next {
            let Some(factory) = self.get(handle) else { return };
            if factory.caps.get() != 0 || factory.used.get() != 0 {
                return;
            }
            let quota = factory.quota.get();
            next = factory.parent;
            self.return_share(factory.share_owner, factory.share);
            self.free(handle);
            if let Ok(parent) = self.factory(next) {
                parent.uncharge(quota);
            }
        }
    }

    /// Frees retired slots and frames.
    pub fn reclaim(&mut self) {
        self.has_work.set(false);
        while self.retired_raw.get() != NONE {
            let frame = self.retired_raw.get();
            self.retired_raw.set(self.info(frame).next.get());
            self.release(frame);
        }
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
            info.free.set(((index << 4) & (FRAME as u32 - 1)) as u16);
            info.used.set(info.used.get() - 1);
            let account = self.owner(frame);
            if was_full {
                let head = &account.partial[class as usize];
                info.next.set(head.get());
                info.prev.set(NONE);
                if head.get() != NONE {
                    self.info(head.get()).prev.set(frame);
                }
                head.set(frame);
            }
            if info.used.get() == 0 {
                self.unlink(account, class, frame);
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

    /// Requests deferred work before the kernel exits.
    pub fn request_work(&self) {
        self.has_work.set(true);
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// Leaked kernel memory of `frames` frames.
    pub fn memory(frames: usize) -> Memory {
        let layout = std::alloc::Layout::from_size_align(frames * FRAME, FRAME).unwrap();
        // SAFETY: the layout is not empty; the range is ours for ever.
        unsafe {
            Memory::new(std::alloc::alloc_zeroed(layout), 0x4000_0000, frames * FRAME).unwrap()
        }
    }

    /// Returns every object of a type.
    pub fn all<T: Object>(memory: &Memory) -> std::vec::Vec<Handle<T>> {
        let size = 1 << Slot::<T>::SIZE;
        let slabs = (0..memory.count).filter(|frame| memory.class(*frame).get() == Slot::<T>::SIZE);
        slabs
            .flat_map(|frame| {
                (0..FRAME / size)
                    .map(move |index| (frame << (PAGE_SHIFT - 4)) + ((index * size) >> 4) as u32)
            })
            .filter_map(|index| {
                let slot = memory.slot::<T>(index);
                let raw = NonZeroU64::new(slot.name.get())?;
                (slot.class.get() == T::CLASS).then_some(Handle(raw, PhantomData))
            })
            .collect()
    }

    /// Number of bookkeeping frames.
    pub fn fixed(memory: &Memory) -> u32 {
        (0..memory.count).filter(|&frame| memory.class(frame).get() == CLASS_FIXED).count() as u32
    }

    /// Checks the quotas: a factory is charged for the frames that it owns and the quotas of its
    /// children.
    pub fn audit(memory: &Memory) {
        let frames = 0..memory.count;
        let free = frames.clone().filter(|&frame| memory.class(frame).get() == CLASS_FREE).count();
        assert_eq!(memory.free.get() as usize, free);
        let factories = all::<Factory>(memory);
        let used = |name: Option<Handle<Factory>>| {
            let taken = |&frame: &u32| {
                !matches!(memory.class(frame).get(), CLASS_FREE | CLASS_FIXED)
                    && memory.info(frame).owner.get() == name
            };
            let passed_on = factories.iter().map(|other| memory.at(*other));
            frames.clone().filter(taken).count() as u32
                + passed_on.filter(|other| other.parent == name).map(|f| f.quota.get()).sum::<u32>()
        };
        assert_eq!(memory.root.used.get(), used(None));
        for name in &factories {
            assert_eq!(memory.at(*name).used.get(), used(Some(*name)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    struct Small(Cell<u64>);
    impl Object for Small {
        const CLASS: u8 = 14;
    }
    struct Large(#[allow(dead_code)] [Cell<u64>; 300]);
    impl Object for Large {
        const CLASS: u8 = 15;
    }

    #[test]
    fn stale_handles_are_refused() {
        let mut memory = testing::memory(64);
        let handle = memory.alloc(None, Small(Cell::new(7))).unwrap();
        assert_eq!(memory.at(handle).0.get(), 7);
        memory.free(handle);
        assert!(memory.get(handle).is_none());
        memory.reclaim();
        let other = memory.alloc(None, Small(Cell::new(8))).unwrap();
        assert!(memory.get(handle).is_none(), "the slot was reused, the handle was not");
        assert_eq!(memory.at(other).0.get(), 8);
    }

    #[test]
    fn quota_is_exact_and_returned() {
        let mut memory = testing::memory(64);
        let before = memory.free_frames();
        let factory = memory.new_factory(None, 5, 63, 0).unwrap();
        memory.at(factory).caps.set(1);
        let handles: Vec<_> = (0..)
            .map_while(|_| memory.alloc(Some(factory), Large([const { Cell::new(0) }; 300])).ok())
            .collect();
        assert_eq!(handles.len(), 5, "one object a frame");
        assert_eq!(memory.alloc_raw(Some(factory), 1).err(), Some(Status::NoQuota));
        for handle in handles {
            memory.free(handle);
        }
        memory.reclaim();
        assert_eq!(memory.at(factory).available(), 5);
        memory.at(factory).caps.set(0);
        memory.destroy_factory(factory);
        memory.reclaim();
        assert_eq!(memory.free_frames(), before);
        assert_eq!(memory.root().used.get(), 0);
    }

    #[test]
    fn factory_lives_until_its_objects_are_gone() {
        let mut memory = testing::memory(64);
        let parent = memory.new_factory(None, 20, 63, 0).unwrap();
        memory.at(parent).caps.set(1);
        let child = memory.new_factory(Some(parent), 10, 63, 0).unwrap();
        let raw = memory.alloc_raw(Some(child), 3).unwrap();
        memory.destroy_factory(child);
        assert!(memory.get(child).is_some(), "frames are still out");
        memory.free_raw(raw, 3);
        memory.reclaim();
        assert!(memory.get(child).is_none());
        assert_eq!(memory.at(parent).available(), 20);
    }

    #[test]
    fn random_objects_against_a_map() {
        let mut memory = testing::memory(256);
        let factory = memory.new_factory(None, 100, 63, 0).unwrap();
        memory.at(factory).caps.set(1);
        let mut model: Vec<(Handle<Small>, u64)> = Vec::new();
        let mut seed = 1u64;
        for step in 0..20_000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            if seed >> 60 < 8 {
                if let Ok(handle) = memory.alloc(Some(factory), Small(Cell::new(step))) {
                    model.push((handle, step));
                }
            } else if !model.is_empty() {
                let (handle, _) = model.swap_remove((seed >> 32) as usize % model.len());
                memory.free(handle);
            }
            if seed >> 40 & 7 == 0 {
                memory.reclaim();
            }
            if step % 64 == 0 {
                for (handle, value) in &model {
                    assert_eq!(memory.at(*handle).0.get(), *value);
                }
            }
        }
        for (handle, _) in model {
            memory.free(handle);
        }
        memory.reclaim();
        assert_eq!(memory.at(factory).available(), 100);
    }
}
