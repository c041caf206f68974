//! Memory that the kernel process of a slot shares with its user process, and what each of them
//! knows of the other ([`crate::isolation::user_process`]).

use core::mem::offset_of;
use core::sync::atomic::{AtomicU32, AtomicU64};

use proto::hosted::layout;

use crate::linux::signals::CONTEXT;
use crate::state::fixed::Fixed;
use crate::state::records::TLS_COUNT;
use crate::state::shared::export_words;

/// Capacity of the queue of mapping changes.
pub const MAX_COMMANDS: usize = 256;
/// Length of the user thread's signal stack in bytes. The thread always has one.
pub const STACK: usize = 0x8000;

/// Data for the user process. User mode can read it; it contains no secrets.
#[repr(C, align(4096))]
pub struct Request {
    /// Incremented to resume the user thread.
    pub turn: AtomicU32,
    /// Futex on which the user thread waits once the kernel process has seen it wait. Constant.
    pub parked: AtomicU32,
    /// Number of the current batch, incremented to start the mapper, which waits on it after each
    /// batch.
    pub batch: AtomicU32,
    /// Futex queue to which the kernel process moves a waiting mapper. Constant.
    pub batch_parked: AtomicU32,
    /// Futex on which the mapper waits forever after a failed call. Constant.
    pub failed: AtomicU32,
    /// Futex queue to which the kernel process moves a mapper that waits on `failed`. Constant.
    pub failed_parked: AtomicU32,
    /// Number of commands in the batch.
    pub used: AtomicU32,
    /// Not 0: user code with selectors, or after such code; load the descriptors, then the segment
    /// registers.
    pub is_compat: AtomicU32,
    /// Selectors of `ES`, `DS`, `FS`, `GS`.
    pub selectors: [AtomicU32; 4],
    /// Arguments of `set_thread_area`.
    pub areas: [[AtomicU32; 4]; 3],
    /// CPU set to which the user thread binds itself first, at an address in [`layout::CPU_SETS`];
    /// 0: unchanged.
    pub cpu_set: AtomicU64,
    /// Signal context from which user mode resumes.
    pub context: AtomicU64,
    /// Bases of `FS` and `GS`.
    pub bases: [AtomicU64; 2],
    /// System call number and arguments of each command.
    pub commands: [[AtomicU64; 7]; MAX_COMMANDS],
}

/// Data from the user process. User mode can overwrite all of it.
#[repr(C, align(4096))]
pub struct Response {
    /// [`Request::turn`] at the last stop. A hint: see [`is_stopped`].
    pub turn: AtomicU32,
    /// [`Request::batch`] of the last completed batch. A hint for when to query the host kernel:
    /// see [`await_mapper`].
    pub batch: AtomicU32,
    /// Signal number.
    pub number: AtomicU32,
    /// Selectors of `ES`, `DS`, `FS`, `GS`.
    pub selectors: [AtomicU32; 4],
    /// Bases of `FS` and `GS`.
    pub bases: [AtomicU64; 2],
    /// Signal context, read once, before user mode runs.
    pub context: AtomicU64,
    /// Process id, read once, before user mode runs.
    pub process: AtomicU64,
    /// Signal stack, [`STACK`] bytes.
    pub stack: [u8; STACK],
}

/// Memory shared by the two processes of a slot.
#[repr(C)]
pub struct Mailbox {
    pub request: Request,
    pub response: Response,
}

const _: () = assert!(size_of::<Mailbox>() as u64 <= layout::MAILBOX_LENGTH);
/// Address of the request.
pub const REQUEST: u64 = layout::MAILBOX;
/// Address of the response.
pub const RESPONSE: u64 = layout::MAILBOX + offset_of!(Mailbox, response) as u64;

export_words!("mailbox_request", REQUEST, Request; batch used commands);
export_words!("mailbox_response", RESPONSE, Response; batch);

/// State of the user process, as the kernel process knows it. All zeros: no process yet.
#[derive(Clone, Copy, Debug)]
pub struct UserProcess {
    /// Process id; 0: no process yet.
    pub process: u32,
    /// Address of the signal contexts. It is constant, because signals do not nest.
    pub context: u64,
    /// The first signal context; it contains the address of the extended state.
    pub template: [u64; CONTEXT as usize / 8],
    /// Layout of the extended state in the signal frame, as the host kernel reports it (`struct
    /// _fpx_sw_bytes`).
    pub layout: [u64; 6],
    /// End of the extended state.
    pub end: u32,
    /// CPU on which it runs, plus 1; 0: unknown.
    pub cpu: u32,
    /// User mode's selectors in `ES`, `DS`, `FS`, `GS`.
    pub selectors: [u16; 4],
    /// Selectors that its segment registers have.
    pub loaded: [u16; 4],
    /// Its TLS descriptors, as arguments of set_thread_area(2).
    pub areas: [[u32; 4]; TLS_COUNT],
    /// Consecutive processes that were replaced because a batch had failed.
    pub failures: u32,
    /// The process was abandoned, because a mapping call has failed.
    pub is_unmapped: bool,
}

/// Returns the mailbox of this process's slot.
pub fn mailbox() -> &'static Mailbox {
    Mailbox::get()
}

// SAFETY: each guest process maps it first if this mode is enabled. Everything in it is atomic
// except for the stack, of which only the address is used.
unsafe impl Fixed for Mailbox {
    const ADDRESS: u64 = layout::MAILBOX;
}

/// Handshake of the two threads of a user process, in memory that is unmapped before either handles
/// a request.
#[repr(C)]
pub struct Mapper {
    /// Not 0: the mapper has installed its filter, and does not read the user thread's memory any
    /// more.
    pub is_confined: AtomicU32,
    /// Not 0: the user thread has installed its filter, so the mapper can no longer map code that
    /// would run without one.
    pub may_map: AtomicU32,
}
