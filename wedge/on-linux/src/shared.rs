//! Memory that all processes of a machine share, what belongs to each virtual CPU, and what each process has for itself.
//!
//! A process is one of one virtual CPU's, for ever. That one's [`SharedVcpu`] is mapped once more at a fixed address, where entry code reaches it.
//! One process at a time has the virtual CPU ([`SharedVcpu::running`]); only that one uses what is not atomic.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64};

pub use proto::wedge::counter;
pub use proto::wedge::layout::SLOTS;
use proto::wedge::{
    DiskRecord, Filters, MAX_DISKS, MAX_NETS, MAX_SHARES, NetRecord, ShareRecord, Start,
    VcpuStatistics, layout,
};
use vmm_cpu::MAX_VCPUS;
use wedge_core::mapped::Mapped;
use wedge_x86::{CELL, CROSSING, Cell, PRIVATE};

pub use crate::config::has;
use crate::config::{self, config};
use crate::net::NetQueues;

/// Bytes of a ring of the console.
pub const RING: usize = 1 << 16;
/// Changes of the kernel's mappings that are remembered one by one.
pub const FLUSHES: usize = 256;
/// Bytes for extended state; the largest of today's, with AMX, is 11 KiB.
pub const EXTENDED_STATE: usize = 16 << 10;

/// Stacks of the virtual CPUs, one below the other from [`layout::STUBS`] on.
const STACKS_TOP: u64 = layout::STUBS;
const STACK_LENGTH: u64 = 1 << 20;
const STACKS: u64 = STACKS_TOP - MAX_VCPUS as u64 * STACK_LENGTH;
/// Where all processes see what belongs to each virtual CPU.
const VCPUS: u64 = STACKS - MAX_VCPUS as u64 * VCPU_LENGTH;
/// Length of a [`SharedVcpu`], whole pages.
pub const VCPU_LENGTH: u64 = size_of::<SharedVcpu>() as u64;
/// Where a process sees what belongs to its own virtual CPU.
pub const OWN_VCPU: u64 = CELL;
const SHARED_STRUCT: u64 = OWN_VCPU + VCPU_LENGTH;
/// Stack of a process that has not the virtual CPU.
pub const PRIVATE_STACK_TOP: u64 = layout::PRIVATE + 0x2_0000;
const _: () =
    assert!(size_of::<Mine>() <= 0x1_8000 && CROSSING == SIGNAL_STACK + SIGNAL_STACK_LENGTH);
/// Stack of signal handlers.
pub const SIGNAL_STACK: u64 = layout::PRIVATE + 0x2_0000;
/// Its length.
pub const SIGNAL_STACK_LENGTH: u64 = 0x2_0000;
/// Length of a process's own memory.
pub const PRIVATE_LENGTH: u64 = 0x5_0000;

const _: () = assert!(CELL == layout::SHARED + 0x1000 && PRIVATE == layout::PRIVATE);
const _: () = assert!(SHARED_STRUCT + size_of::<Shared>() as u64 <= VCPUS);
const _: () = assert!(layout::VSOCK + size_of::<NetQueues>() as u64 <= layout::QUEUES);

/// Bits of [`Cell::events`].
pub mod event {
    /// The deadline may have passed.
    pub const TIMER: u32 = 1;
    /// The console has bytes, or room.
    pub const CONSOLE: u32 = 2;
    /// The device process wants the machine to end.
    pub const STOP: u32 = 4;
    /// Requests of disks are done.
    pub const DISK: u32 = 16;
    /// Something is wanted of the balloon.
    pub const BALLOON: u32 = 32;
    /// Another virtual CPU has left something.
    pub const KICK: u32 = 64;
    /// Frames have come, or there is room for some.
    pub const NET: u32 = 128;
    /// The power button is pressed.
    pub const POWER_BUTTON: u32 = 1 << 8;
    /// Messages of shared directories are answered.
    pub const SHARE: u32 = 1 << 9;
    /// A debugger wants it to stop.
    pub const DEBUG: u32 = 1 << 10;
}

/// Values of [`Shared::started`].
pub mod started {
    /// The first vCPU is ready for the guest's first instruction. Nothing of the guest has run.
    pub const READY: u32 = 1;
    /// The device process knows, and takes what guest processes say for the guest's word from now on.
    pub const ALLOWED: u32 = 2;
}

/// A value that only the process with the virtual CPU uses, or only the process whose own memory it is in.
#[repr(transparent)]
pub struct Owned<T>(UnsafeCell<T>);

// SAFETY: only one process at a time uses it, in its only thread.
unsafe impl<T> Sync for Owned<T> {}

impl<T: Copy> Owned<T> {
    /// Its value.
    pub fn get(&self) -> T {
        // SAFETY: this is the only process that uses it now.
        unsafe { *self.0.get() }
    }

    /// Sets it.
    pub fn set(&self, value: T) {
        // SAFETY: as above.
        unsafe { *self.0.get() = value }
    }
}

impl<T> Owned<T> {
    /// Where it is.
    pub const fn at(&self) -> *mut T {
        self.0.get()
    }
}

/// A signal that has stopped the guest.
#[derive(Clone, Copy, Debug)]
pub struct Signal {
    /// Its number.
    pub number: u32,
    /// Vector of the processor's exception.
    pub vector: u64,
    /// Error code of the exception.
    pub code: u64,
    /// Page-fault address.
    pub address: u64,
}

/// Defines a structure of shared memory at an address, and for each field a symbol `parador_word_PREFIX_FIELD` in the file with
/// debugging information, with the field's address in guest processes and its size: tests write there what a hostile guest would.
/// What trusted processes read is in a table of `docs/design/0014-device-processes.md`.
macro_rules! shared_words {
    (
        $prefix:literal, $at:expr;
        $(#[$meta:meta])*
        pub struct $name:ident {
            $($(#[$doc:meta])* $visible:vis $field:ident: $type:ty,)*
        }
    ) => {
        $(#[$meta])*
        pub struct $name {
            $($(#[$doc])* $visible $field: $type,)*
        }

        $(core::arch::global_asm!(
            concat!(".globl parador_word_", $prefix, "_", stringify!($field)),
            concat!(".set parador_word_", $prefix, "_", stringify!($field), ", {at}"),
            concat!(".size parador_word_", $prefix, "_", stringify!($field), ", {size}"),
            at = const $at + core::mem::offset_of!($name, $field) as u64,
            size = const size_of::<$type>(),
        );)*
    };
}

shared_words! {
    "slot", OWN_VCPU + core::mem::offset_of!(SharedVcpu, slots) as u64;
    /// A process that has an address space of the guest.
    #[repr(C)]
    pub struct Slot {
        /// Its process; 0: not there yet.
        pub process: AtomicU32,
        /// Counts up whenever it gets the virtual CPU.
        pub turn: AtomicU32,
        /// What it maps for programs is out of date.
        pub stale: AtomicBool,
        /// It has something mapped that is larger than a page.
        pub large: AtomicBool,
        /// Process-context identifier of the space.
        pub pcid: AtomicU32,
        /// The root of its page tables (`CR3`).
        pub root: AtomicU64,
        /// Watched pages that it has protected.
        pub protected: AtomicU64,
        /// Changes of the kernel's mappings that it has followed.
        pub followed: AtomicU64,
        /// Changes of copies that it has followed.
        pub renewals: AtomicU64,
    }
}

/// Bytes from one process to another.
#[repr(C)]
pub struct ByteRing {
    /// Bytes ever put.
    pub head: AtomicU32,
    /// Bytes ever taken.
    pub tail: AtomicU32,
    bytes: [AtomicU8; RING],
}

impl ByteRing {
    /// Puts a byte; `false`: there is no room.
    pub fn put(&self, byte: u8) -> bool {
        use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
        let head = self.head.load(Relaxed);
        if head.wrapping_sub(self.tail.load(Acquire)) as usize >= RING {
            return false;
        }
        self.bytes[head as usize % RING].store(byte, Relaxed);
        self.head.store(head.wrapping_add(1), Release);
        true
    }

    /// Takes a byte.
    pub fn take(&self) -> Option<u8> {
        use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
        let tail = self.tail.load(Relaxed);
        // More than there is room for is nonsense, which the guest can write there.
        if !(1..=RING).contains(&(self.head.load(Acquire).wrapping_sub(tail) as usize)) {
            return None;
        }
        let byte = self.bytes[tail as usize % RING].load(Relaxed);
        self.tail.store(tail.wrapping_add(1), Release);
        Some(byte)
    }

    /// Bytes that can be put.
    pub fn room(&self) -> usize {
        use core::sync::atomic::Ordering::Acquire;
        // The guest can write anything there.
        RING.saturating_sub(self.head.load(Acquire).wrapping_sub(self.tail.load(Acquire)) as usize)
    }
}

/// Room for extended state, aligned as `XSAVE` wants it.
#[repr(C, align(64))]
pub struct XsaveArea(pub Owned<[u8; EXTENDED_STATE]>);

shared_words! {
    "vcpu", OWN_VCPU;
    /// What belongs to one virtual CPU. All zero in the beginning.
    #[repr(C, align(4096))]
    pub struct SharedVcpu {
        /// What entry code uses.
        cell: UnsafeCell<Cell>,
        /// XsaveArea state on its way to another process.
        pub xsave: XsaveArea,
        /// Stack pointer of the virtual CPU on its way.
        pub rsp: Owned<u64>,
        /// Bases of `FS` and `GS` on their way.
        pub fs_base: Owned<u64>,
        /// See above.
        pub gs_base: Owned<u64>,
        /// The signal that stopped the guest last.
        pub signal: Owned<Signal>,
        /// The slot that has the virtual CPU.
        pub running: AtomicU32,
        /// The slot that wants a process, plus 1.
        pub wanted: AtomicU32,
        /// The slot whose programs want a process, plus 1; 0: they have one.
        pub user_wanted: AtomicU32,
        /// How often the device process was asked to make a program stop, and how often it has told it to.
        pub stop_requests: AtomicU32,
        /// See above.
        pub stops_sent: AtomicU32,
        /// Whether the virtual CPU waits for events: see [`crate::idle::state`].
        pub idle: AtomicU32,
        /// For how long it looks for them itself at first, in ticks of the time-stamp counter.
        pub poll_ticks: Owned<u64>,
        /// Time-stamp counter at which the virtual CPU wants to be told.
        pub deadline: AtomicU64,
        /// Changes of the kernel's mappings so far.
        pub changes: AtomicU64,
        /// The last of them: an address, or [`EVERYTHING`].
        pub changed: [AtomicU64; FLUSHES],
        /// Copies of code whose beginning or end has changed so far.
        pub renewals: AtomicU64,
        /// The last of them: offsets in the descriptor of guest memory.
        pub renewed: [AtomicU64; FLUSHES],
        /// Where on the host it runs.
        pub placement: crate::cpu_affinity::VcpuPlacement,
        /// Changes of the table of copied frames that the vCPU has applied.
        pub frames_applied: AtomicU32,
        /// Those that it had seen in the guest's kernel with interrupts disabled, and applies before user mode.
        pub frames_seen: AtomicU32,
        /// What the host has not let it run.
        pub steal: Owned<crate::steal_time::StealState>,
        /// The processes.
        pub slots: [Slot; SLOTS],
    }
}

// SAFETY: the cell is used by entry code and by the process that has the virtual CPU; of the others, all use what is atomic in it only.
unsafe impl Sync for SharedVcpu {}

impl SharedVcpu {
    /// Events for it.
    pub fn events(&self) -> &AtomicU32 {
        // SAFETY: the word is atomic, and nobody makes a reference to the whole cell.
        unsafe { &(*self.cell.get()).events }
    }

    /// System calls that came without a signal.
    pub fn calls(&self) -> u64 {
        // SAFETY: for the end, when nobody changes it any longer.
        unsafe { (*self.cell.get()).calls }
    }
}

shared_words! {
    "shared", SHARED_STRUCT;
    /// The shared memory of all virtual CPUs. All zero in the beginning.
    #[repr(C, align(64))]
    pub struct Shared {
        /// Where the machine is: see `guest`.
        pub machine: AtomicU64,
        /// The machine has ended with this code, plus 1.
        pub ended: AtomicU32,
        /// The device process has been rung for.
        pub pending: AtomicU32,
        /// It shall interrupt these virtual CPUs: a bit for each.
        pub kick: AtomicU32,
        /// Whether the guest may run: see [`started`].
        pub started: AtomicU32,
        /// The kernel's code has been looked at, and may be executed beside programs.
        pub closed: AtomicBool,
        /// Frames that guest processes have copies of.
        pub frames: crate::frames::CopiedFrames,
        /// From the guest.
        pub output: ByteRing,
        /// To the guest.
        pub input: ByteRing,
        /// The same of the virtio console.
        pub console_output: ByteRing,
        /// See above.
        pub console_input: ByteRing,
        /// Frames of networks.
        pub nets: crate::net::AllNetQueues,
        /// The balloon.
        pub balloon: crate::balloon::BalloonState,
    }
}

/// As [`shared_words`] of other structures' fields, and of what there is of each virtual CPU.
macro_rules! export_words {
    ($prefix:literal, $at:expr, $name:ident; $($field:ident)*) => {
        $(core::arch::global_asm!(
            concat!(".globl parador_place_", $prefix, "_", stringify!($field)),
            concat!(".set parador_place_", $prefix, "_", stringify!($field), ", {at}"),
            at = const $at + core::mem::offset_of!($name, $field) as u64,
        );)*
    };
}
pub(crate) use export_words;

core::arch::global_asm!(
    ".globl parador_place_vcpus",
    ".set parador_place_vcpus, {at}",
    ".globl parador_place_vcpu_length",
    ".set parador_place_vcpu_length, {length}",
    at = const VCPUS,
    length = const VCPU_LENGTH,
);

/// In [`SharedVcpu::changed`]: all of the kernel's mappings.
pub const EVERYTHING: u64 = u64::MAX;

/// The shared memory.
pub fn shared() -> &'static Shared {
    // SAFETY: `main` has mapped it before anything else, zeroed, for as long as the process lives; what is not atomic is guarded as the
    // module's documentation says.
    unsafe { &*(SHARED_STRUCT as *const Shared) }
}

/// The virtual CPUs of the machine.
pub fn vcpus() -> &'static [SharedVcpu] {
    // SAFETY: as `shared`; there is room for so many.
    unsafe { core::slice::from_raw_parts(VCPUS as *const SharedVcpu, config::vcpu_count()) }
}

/// Where what belongs to a virtual CPU is in the descriptor of the shared memory.
pub fn vcpu_offset(index: usize) -> u64 {
    VCPUS + index as u64 * VCPU_LENGTH - layout::SHARED
}

/// The end of a virtual CPU's stack.
pub fn stack_top(index: usize) -> u64 {
    STACKS_TOP - index as u64 * STACK_LENGTH
}

/// What belongs to this process's virtual CPU. Not for the device process, nor for disks'.
pub fn vcpu() -> &'static SharedVcpu {
    // SAFETY: a process of the guest has mapped it before anything else; for what is not atomic, as `shared`.
    unsafe { &*(OWN_VCPU as *const SharedVcpu) }
}

/// What the wedge counts of a virtual CPU.
pub fn statistics(vcpu: usize) -> &'static VcpuStatistics {
    // SAFETY: as `shared`; all of it is atomic.
    let all =
        unsafe { &*((layout::SHARED + layout::STATISTICS) as *const [VcpuStatistics; MAX_VCPUS]) };
    &all[vcpu % MAX_VCPUS]
}

/// Of the one that this process is of.
pub fn own_statistics() -> &'static VcpuStatistics {
    statistics(mine().vcpu.load(core::sync::atomic::Ordering::Relaxed) as usize)
}

/// What entry code shares with the wedge.
pub fn cell() -> *mut Cell {
    CELL as *mut Cell
}

/// Events for this process's virtual CPU.
pub fn events() -> &'static AtomicU32 {
    vcpu().events()
}

/// Adds one to a counter.
pub fn count(counter: usize) {
    own_statistics().counters[counter].fetch_add(1, core::sync::atomic::Ordering::Relaxed);
}

/// What the loader has left in shared memory. The guest can change it: [`config::load`] reads it, once, before
/// there is a guest, and nothing else does.
pub mod loaded {
    use super::{
        DiskRecord, Filters, MAX_DISKS, MAX_NETS, MAX_SHARES, NetRecord, ShareRecord, Start, layout,
    };

    /// A copy of what is at this offset.
    ///
    /// # Safety
    /// There is a `T`, for which all values are allowed.
    unsafe fn at<T: Copy>(offset: u64) -> T {
        // SAFETY: the device process has mapped it, and is the only process; the caller vouches for the type.
        unsafe { ((layout::SHARED + offset) as *const T).read_volatile() }
    }

    /// The filters.
    pub fn filters() -> Filters {
        // SAFETY: it consists of numbers.
        unsafe { at(layout::FILTERS) }
    }

    /// The record; `None`: it is of another version.
    pub fn start() -> Option<Start> {
        // SAFETY: as above.
        Start::from_words(&unsafe { at(0) })
    }

    /// All disks.
    pub fn disks() -> [DiskRecord; MAX_DISKS] {
        // SAFETY: as above.
        let records: [[u64; DiskRecord::WORDS]; MAX_DISKS] = unsafe { at(layout::DISKS) };
        records.each_ref().map(DiskRecord::from_words)
    }

    /// All networks.
    pub fn nets() -> [NetRecord; MAX_NETS] {
        // SAFETY: as above.
        let records: [[u64; NetRecord::WORDS]; MAX_NETS] = unsafe { at(layout::NETS) };
        records.each_ref().map(NetRecord::from_words)
    }

    /// All shared directories.
    pub fn shares() -> [ShareRecord; MAX_SHARES] {
        // SAFETY: as above.
        let records: [[u64; ShareRecord::WORDS]; MAX_SHARES] = unsafe { at(layout::SHARES) };
        records.each_ref().map(ShareRecord::from_words)
    }
}

/// The loader's record.
pub fn start() -> Option<Start> {
    Some(config().start)
}

/// What the loader says of a disk.
pub fn disk(number: usize) -> DiskRecord {
    config().disks.get(number).copied().unwrap_or_default()
}

/// What the loader says of a network.
pub fn net(number: usize) -> NetRecord {
    config().nets.get(number).copied().unwrap_or_default()
}

/// Packets of vsock on their way.
pub fn vsock() -> &'static NetQueues {
    // SAFETY: as `shared`; there is room up to what follows.
    unsafe { &*((layout::SHARED + layout::VSOCK) as *const NetQueues) }
}

/// What the loader says of a shared directory.
pub fn share(number: usize) -> ShareRecord {
    config().shares.get(number).copied().unwrap_or_default()
}

/// Which process this is, and whether system calls are dispatched; in its own memory.
#[repr(C)]
pub struct Mine {
    /// See [`wedge_x86::Private`]; it is at the beginning.
    pub private: wedge_x86::Private,
    /// The process's slot.
    pub slot: AtomicU32,
    /// Number of its virtual CPU.
    pub vcpu: AtomicU32,
    /// Its timer is set to this value of the time-stamp counter.
    pub armed: AtomicU64,
    /// Its timer.
    pub timer: AtomicU32,
    /// The CPU of the host that it keeps to.
    pub binding: crate::cpu_affinity::ProcessBinding,
    /// Something of the kernel's image can be executed beside its code.
    pub image: AtomicBool,
    /// Bytes of the signal stack, from its top on, that signals have used.
    pub frames: AtomicU64,
    /// What of them the next program must not see: see `signal::scrub`.
    pub scrubs: AtomicU8,
    /// Its rewritten system calls.
    pub calls: Owned<crate::syscall_patch::Calls>,
    /// Frames that it has write-protected.
    pub copied: Owned<crate::frames::AppliedFrames>,
    /// What it has mapped for programs.
    pub mapped: Owned<Mapped<{ crate::memory::PIECES }>>,
    /// Its pages of code.
    pub code: Owned<crate::exec_scan::Code>,
    /// How the host's processor lays out extended state.
    pub xsave_layout: Owned<crate::xstate::XsaveLayout>,
    /// Descriptors for thread-local storage that the host has for it.
    pub thread_local: Owned<crate::compat::ThreadLocal>,
    /// Its programs' own process.
    pub peer: Owned<crate::user_process::Peer>,
    /// That process has not been able to map or unmap something, and was given up.
    pub unmapped: AtomicBool,
    /// In a program process.
    pub mapper: crate::user_process::Mapper,
    /// How long it has had the virtual CPU, and what it has had of the host's.
    pub turns: Owned<crate::steal_time::TurnTimes>,
}

/// The process's own memory.
pub fn mine() -> &'static Mine {
    // SAFETY: mapped by `main` before anything else, zeroed; all of it is atomic.
    unsafe { &*(PRIVATE as *const Mine) }
}
