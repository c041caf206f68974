//! Layout of the memory shared by all processes of a VM, of each vCPU's part in it, and of each
//! process's private memory.
//!
//! A process belongs to one vCPU. That vCPU's [`SharedVcpu`] has a second mapping at a fixed
//! address, where entry code accesses it. One process at a time runs the vCPU
//! ([`SharedVcpu::running`]); only that process uses the non-atomic fields.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64};

use proto::hosted::MAX_NETS;
pub use proto::hosted::idle::state as idle_state;
use proto::hosted::layout::{self, EXTENDED_STATE, SLOTS};
use vmm_vcpu::MAX_VCPUS;
use wedge_x86::{CELL, CROSSING, Cell, PRIVATE};

use crate::linux::signals::Signal;
use crate::mmu::frame_table::CopiedFrames;
use crate::state::config;
use crate::state::fixed::Fixed;
use crate::state::owned::Owned;
use crate::state::records::{BalloonState, StealState, VcpuPlacement};

/// Capacity of a console ring in bytes.
pub const RING: usize = 1 << 16;
/// Devices with completions and without a request queue: networks, vsock.
pub const TARGETS: usize = MAX_NETS + 1;
/// Number of kernel mapping changes that are recorded individually.
pub const FLUSHES: usize = 256;
/// Top of the vCPUs' stacks, one below the other.
const STACKS_TOP: u64 = layout::STUBS;
/// Length of a vCPU's stack in bytes.
pub const STACK_LENGTH: u64 = 1 << 20;
/// Address of the stacks.
pub const STACKS: u64 = STACKS_TOP - MAX_VCPUS as u64 * STACK_LENGTH;
/// Address of all vCPUs' parts.
pub const VCPUS: u64 = STACKS - MAX_VCPUS as u64 * VCPU_LENGTH;
/// Length of a [`SharedVcpu`] in bytes, whole pages.
pub const VCPU_LENGTH: u64 = size_of::<SharedVcpu>() as u64;
/// Address of the process's own vCPU.
pub const OWN_VCPU: u64 = CELL;
/// Address of [`Shared`].
pub const SHARED_STRUCT: u64 = OWN_VCPU + VCPU_LENGTH;
/// Top of the stack of a process that does not run the vCPU.
pub const PRIVATE_STACK_TOP: u64 = layout::PRIVATE + 0x2_0000;
/// Stack of the signal handlers.
pub const SIGNAL_STACK: u64 = layout::PRIVATE + 0x2_0000;
/// Length of the signal stack in bytes.
pub const SIGNAL_STACK_LENGTH: u64 = 0x2_0000;
/// Length of a process's private memory in bytes.
pub const PRIVATE_LENGTH: u64 = 0x5_0000;

const _: () = assert!(CROSSING == SIGNAL_STACK + SIGNAL_STACK_LENGTH);
const _: () = assert!(CELL == layout::SHARED + 0x1000 && PRIVATE == layout::PRIVATE);
/// Address of the frame rings of the networks.
pub const NETS: u64 = (SHARED_STRUCT + size_of::<Shared>() as u64).next_multiple_of(64);
/// Length of the memory for them in bytes.
pub const NETS_LENGTH: u64 = VCPUS - NETS;
const _: () = assert!(NETS < VCPUS);

/// Bits of [`Cell::events`].
pub mod event {
    /// The timer may have expired.
    pub const TIMER: u32 = 1;
    /// A console has input, or room for output.
    pub const CONSOLE: u32 = 2;
    /// The device process requests the end of the VM.
    pub const STOP: u32 = 4;
    /// Disk requests have completed.
    pub const DISK: u32 = 16;
    /// The balloon's target has changed, or statistics are requested.
    pub const BALLOON: u32 = 32;
    /// Notification by another vCPU.
    pub const KICK: u32 = 64;
    /// Frames have arrived, or the rings have room.
    pub const NET: u32 = 128;
    /// The power button was pressed.
    pub const POWER_BUTTON: u32 = 1 << 8;
    /// Requests of shared directories have completed.
    pub const SHARE: u32 = 1 << 9;
    /// The debugger requests a stop.
    pub const DEBUG: u32 = 1 << 10;
}

/// Values of [`Shared::started`].
pub mod started {
    /// The first vCPU is about to execute the guest's first instruction.
    pub const READY: u32 = 1;
    /// The device process has acknowledged, and treats statements of guest processes as the guest's
    /// from then on.
    pub const ALLOWED: u32 = 2;
}

/// Defines a structure in shared memory at an address. For each field it defines a symbol
/// `parador_word_PREFIX_FIELD` in the binary with debug information, with the field's address in
/// guest processes and its size: tests overwrite these words like a hostile guest.
/// `docs/design/0014-device-processes.md` lists the words that trusted processes read.
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

pub(crate) use shared_words;

shared_words! {
    "slot", OWN_VCPU + core::mem::offset_of!(SharedVcpu, slots) as u64;
    /// Process of a guest address space.
    #[repr(C)]
    pub struct Slot {
        /// Process id; 0: not created yet.
        pub process: AtomicU32,
        /// Incremented when the process is to run the vCPU.
        pub turn: AtomicU32,
        /// Its user-mode mappings are stale.
        pub stale: AtomicBool,
        /// It has mapped a large page.
        pub large: AtomicBool,
        /// PCID of the address space.
        pub pcid: AtomicU32,
        /// Root page table (`CR3`).
        pub root: AtomicU64,
        /// Number of watched pages that it has write-protected.
        pub protected: AtomicU64,
        /// Number of kernel mapping changes that it has applied.
        pub followed: AtomicU64,
        /// Number of changed code copies that it has applied.
        pub renewals: AtomicU64,
    }
}

/// Byte ring between two processes.
#[repr(C)]
pub struct ByteRing {
    /// Bytes ever produced.
    pub head: AtomicU32,
    /// Bytes ever consumed.
    pub tail: AtomicU32,
    bytes: [AtomicU8; RING],
}

impl ByteRing {
    /// Creates an empty ring.
    #[cfg(test)]
    pub const fn empty() -> Self {
        Self {
            head: AtomicU32::new(0),
            tail: AtomicU32::new(0),
            bytes: [const { AtomicU8::new(0) }; RING],
        }
    }

    /// Produces a byte; `false`: the ring is full.
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

    /// Consumes a byte.
    pub fn take(&self) -> Option<u8> {
        use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
        let tail = self.tail.load(Relaxed);
        // The guest can set a fill level above the capacity.
        if !(1..=RING).contains(&(self.head.load(Acquire).wrapping_sub(tail) as usize)) {
            return None;
        }
        let byte = self.bytes[tail as usize % RING].load(Relaxed);
        self.tail.store(tail.wrapping_add(1), Release);
        Some(byte)
    }

    /// Returns the free space in bytes.
    pub fn room(&self) -> usize {
        use core::sync::atomic::Ordering::Acquire;
        // The guest can write arbitrary positions.
        RING.saturating_sub(self.head.load(Acquire).wrapping_sub(self.tail.load(Acquire)) as usize)
    }
}

/// Area for extended state, aligned for `XSAVE`.
#[repr(C, align(64))]
pub struct XsaveArea(pub Owned<[u8; EXTENDED_STATE]>);

shared_words! {
    "vcpu", OWN_VCPU;
    /// State of one vCPU, initially zero.
    #[repr(C, align(4096))]
    pub struct SharedVcpu {
        /// State shared with entry code.
        cell: UnsafeCell<Cell>,
        /// Extended state during a switch of the process.
        pub xsave: XsaveArea,
        /// Stack pointer of the vCPU during a switch.
        pub rsp: Owned<u64>,
        /// Base of `FS` during a switch.
        pub fs_base: Owned<u64>,
        /// Base of `GS` during a switch.
        pub gs_base: Owned<u64>,
        /// Last signal that has stopped the guest.
        pub signal: Owned<Signal>,
        /// Slot that runs the vCPU.
        pub running: AtomicU32,
        /// Slot that requests a process, plus 1.
        pub wanted: AtomicU32,
        /// Slot that requests a user process, plus 1; 0: none.
        pub user_wanted: AtomicU32,
        /// Requests to the device process to stop user mode.
        pub stop_requests: AtomicU32,
        /// Requests that the device process has executed.
        pub stops_sent: AtomicU32,
        /// Idle state of the vCPU for the VM's own processes: see [`idle_state`]. A vCPU that a
        /// debugger has stopped polls here, and is busy for others ([`proto::hosted::idle`]).
        pub idle: AtomicU32,
        /// The guest has interrupts disabled and waits for none: see [`crate::kick`].
        pub may_defer: AtomicBool,
        /// vCPUs whose wakes are deferred, one bit each.
        pub deferred: AtomicU32,
        /// Duration of idle polling in TSC ticks.
        pub poll_ticks: Owned<u64>,
        /// TSC at which the timer of the vCPU expires.
        pub deadline: AtomicU64,
        /// Number of kernel mapping changes.
        pub changes: AtomicU64,
        /// The last changes: addresses, or [`EVERYTHING`].
        pub changed: [AtomicU64; FLUSHES],
        /// Number of code copies whose first or last bytes have changed.
        pub renewals: AtomicU64,
        /// The last ones: offsets in the file of guest memory.
        pub renewed: [AtomicU64; FLUSHES],
        /// Host CPU of the vCPU.
        pub placement: VcpuPlacement,
        /// Changes of the table of copied frames that the vCPU has applied.
        pub frames_applied: AtomicU32,
        /// Changes that it had seen in the guest kernel with interrupts disabled; it applies them
        /// before user mode.
        pub frames_seen: AtomicU32,
        /// Stolen time.
        pub steal: Owned<StealState>,
        /// Processes of the vCPU.
        pub slots: [Slot; SLOTS],
    }
}

// SAFETY: only entry code and the process that runs the vCPU use the cell; all other processes use
// only its atomic fields.
unsafe impl Sync for SharedVcpu {}

impl SharedVcpu {
    /// Returns the pending events.
    pub fn events(&self) -> &AtomicU32 {
        self.atomic_words().0
    }

    /// Returns whether the guest must check for pending events before it enables interrupts: not 0.
    pub fn attention(&self) -> &AtomicU8 {
        self.atomic_words().1
    }

    #[inline]
    fn atomic_words(&self) -> (&AtomicU32, &AtomicU8) {
        let cell = self.cell.get();
        // SAFETY: the words are atomic, and no reference to the whole cell exists.
        unsafe { (&(*cell).events, &(*cell).attention) }
    }

    /// Returns the number of system calls without a signal.
    pub fn calls(&self) -> u64 {
        // SAFETY: called after the end of the VM, when the value is constant.
        unsafe { (*self.cell.get()).calls }
    }
}

shared_words! {
    "shared", SHARED_STRUCT;
    /// Memory shared by all vCPUs, initially zero.
    #[repr(C, align(64))]
    pub struct Shared {
        /// Address of the VM's state: see `guest`.
        pub machine: AtomicU64,
        /// Exit code of the ended VM, plus 1; 0: not ended.
        pub ended: AtomicU32,
        /// The device process was notified, and has not woken yet.
        pub pending: AtomicU32,
        /// vCPUs that the device process is to interrupt, one bit each.
        pub kick: AtomicU32,
        /// Start of the guest: see [`started`].
        pub started: AtomicU32,
        /// The kernel's code was scanned, and may be executable together with user mode.
        pub closed: AtomicBool,
        /// The wedge has warned that it changes code which the guest kernel has generated.
        pub has_changed_code: AtomicBool,
        /// vCPU to notify of completions, by network, then vsock.
        pub targets: [AtomicU8; TARGETS],
        /// Frames of which guest processes have copies.
        pub frames: CopiedFrames,
        /// Serial output.
        pub output: ByteRing,
        /// Serial input.
        pub input: ByteRing,
        /// Output of the virtio console.
        pub console_output: ByteRing,
        /// Input of the virtio console.
        pub console_input: ByteRing,
        /// State of the balloon.
        pub balloon: BalloonState,
    }
}

/// Exports addresses of fields of further structures, and of per-vCPU state, as [`shared_words`]
/// does.
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

/// In [`SharedVcpu::changed`]: all kernel mappings.
pub const EVERYTHING: u64 = u64::MAX;

/// Returns the shared memory.
pub fn shared() -> &'static Shared {
    Shared::get()
}

// SAFETY: `main` maps it first, zeroed, for the life of the process. The module's documentation
// states which process uses the non-atomic fields.
unsafe impl Fixed for Shared {
    const ADDRESS: u64 = SHARED_STRUCT;
}

/// Returns the state of all vCPUs.
pub fn vcpus() -> &'static [SharedVcpu] {
    // SAFETY: as `shared`; the range has room for this number.
    unsafe { core::slice::from_raw_parts(VCPUS as *const SharedVcpu, config::vcpu_count()) }
}

/// Returns the offset of a vCPU's state in the file of the shared memory.
pub fn vcpu_offset(index: usize) -> u64 {
    VCPUS + index as u64 * VCPU_LENGTH - layout::SHARED
}

/// Returns the top of a vCPU's stack.
pub fn stack_top(index: usize) -> u64 {
    STACKS_TOP - index as u64 * STACK_LENGTH
}

/// Returns the state of this process's vCPU. Not for the device process, nor for workers.
pub fn vcpu() -> &'static SharedVcpu {
    SharedVcpu::get()
}

// SAFETY: a guest process maps it first; for the non-atomic fields see the module's documentation.
unsafe impl Fixed for SharedVcpu {
    const ADDRESS: u64 = OWN_VCPU;
}

/// Returns the address of the state shared with entry code.
pub fn cell() -> *mut Cell {
    CELL as *mut Cell
}

/// Returns the pending events of this process's vCPU.
pub fn events() -> &'static AtomicU32 {
    vcpu().events()
}

/// Returns [`SharedVcpu::attention`] of this process's vCPU.
pub fn attention() -> &'static AtomicU8 {
    vcpu().attention()
}
