//! An io_uring(7) of one thread for one file.
//!
//! The ring is restricted before use (`IORING_REGISTER_RESTRICTIONS`) to reads, writes, flushes and
//! fallocate of its one file, and to futex waits, by which the thread waits for new requests and
//! for completions at once. So the ring reaches no other descriptor. Hosts without io_uring, or
//! without futex waits in it (before Linux 6.7), use blocking calls instead.
//!
//! Only the process and the host kernel access the ring's memory.

use core::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use linux_raw_sys::general as linux;
use linux_raw_sys::io_uring as uring;
use linux_raw_sys::io_uring::{
    io_uring_op as op, io_uring_register_op as register,
    io_uring_register_restriction_op as restriction,
};

use crate::sys::{self, Errno, Vector};

/// Capacity: one entry for each request of a queue, and one for the wait; a power of two.
const ENTRIES: u32 = 128;
/// Permitted operations.
const OPERATIONS: [u8; 5] = [
    op::IORING_OP_READV as u8,
    op::IORING_OP_WRITEV as u8,
    op::IORING_OP_FSYNC as u8,
    op::IORING_OP_FALLOCATE as u8,
    op::IORING_OP_FUTEX_WAIT as u8,
];
/// `IOSQE_FIXED_FILE`: the descriptor is an index of registered files.
const FIXED_FILE: u64 = 1;
/// Completions are processed only in system calls that wait for them.
const FLAGS: u32 = uring::IORING_SETUP_R_DISABLED
    | uring::IORING_SETUP_SINGLE_ISSUER
    | uring::IORING_SETUP_DEFER_TASKRUN
    | uring::IORING_SETUP_NO_SQARRAY;

/// Operation to submit.
#[derive(Clone, Copy, Debug)]
pub enum Submission<'a> {
    /// Reads from this file offset on.
    Read(&'a [Vector], u64),
    /// Writes from this file offset on.
    Write(&'a [Vector], u64),
    /// fdatasync(2).
    Flush,
    /// fallocate(2): mode, offset, length.
    Allocate(u32, u64, u64),
    /// Waits on a futex word while it has this value.
    Wait(&'a AtomicU32, u32),
}

impl Submission<'_> {
    /// Encodes `struct io_uring_sqe`.
    fn words(&self, id: u64) -> [u64; 8] {
        let (operation, fd, offset, address, length, flags, third) = match *self {
            Self::Read(vectors, at) => {
                (0, 0, at, vectors.as_ptr() as u64, vectors.len() as u64, 0, 0)
            }
            Self::Write(vectors, at) => {
                (1, 0, at, vectors.as_ptr() as u64, vectors.len() as u64, 0, 0)
            }
            Self::Flush => (2, 0, 0, 0, 0, uring::IORING_FSYNC_DATASYNC, 0),
            Self::Allocate(mode, at, length) => (3, 0, at, length, mode.into(), 0, 0),
            Self::Wait(word, value) => (
                4,
                linux::FUTEX2_SIZE_U32,
                value.into(),
                word.as_ptr() as u64,
                0,
                0,
                u64::from(linux::FUTEX_BITSET_MATCH_ANY),
            ),
        };
        let first = u64::from(OPERATIONS[operation]) | FIXED_FILE << 8 | u64::from(fd) << 32;
        let fourth = length | u64::from(flags) << 32;
        [first, offset, address, fourth, id, 0, third, 0]
    }
}

/// An io_uring instance.
#[derive(Debug)]
pub struct IoUring {
    fd: u32,
    /// Addresses of the ring's words and arrays.
    sqes: u64,
    sq_tail: u64,
    cq_head: u64,
    cq_tail: u64,
    cqes: u64,
    /// Size of the submission ring, minus 1.
    mask: u32,
    cq_mask: u32,
    tail: u32,
    /// Submissions not passed to the host yet.
    unsubmitted: u32,
}

impl IoUring {
    /// Returns whether the host permits a ring with all required operations.
    pub fn is_possible() -> bool {
        let Ok((fd, _)) = set_up() else { return false };
        // `struct io_uring_probe`: last operation, number of entries, then for each operation its
        // number and flags.
        const SUPPORTED: u64 = 1;
        const MOST: usize = 256;
        let mut probe = [0_u64; 2 + MOST];
        let arguments = [
            fd.into(),
            register::IORING_REGISTER_PROBE as u64,
            probe.as_mut_ptr() as u64,
            MOST as u64,
            0,
            0,
        ];
        // SAFETY: the kernel writes the probe.
        let is_probed = unsafe { sys::call(linux::__NR_io_uring_register, arguments) }.is_ok();
        let _ = sys::close(fd, fd);
        let has = |operation: &u8| probe[2 + usize::from(*operation)] >> 16 & SUPPORTED != 0;
        is_probed && OPERATIONS.iter().all(has)
    }

    /// Creates a ring for a file descriptor; only this thread may use it. `number` is the ring's
    /// own descriptor, a free one without it.
    pub fn new(file: u32, number: Option<u32>) -> Result<Self, Errno> {
        let (mut fd, params) = set_up()?;
        if let Some(number) = number {
            // SAFETY: no memory is accessed.
            unsafe { sys::call(linux::__NR_dup3, [fd.into(), number.into(), 0, 0, 0, 0]) }?;
            sys::close(fd, fd)?;
            fd = number;
        }
        // Without an array of indices, the completions are last. The kernel refuses a longer
        // mapping.
        let length = u64::from(params.cq_off.cqes) + u64::from(params.cq_entries) * 16;
        let ring = map(fd, length, uring::IORING_OFF_SQ_RING)?;
        let sqes = map(fd, u64::from(params.sq_entries) * 64, uring::IORING_OFF_SQES)?;
        let call = |what: register, argument: u64, count: usize| {
            let arguments = [fd.into(), what as u64, argument, count as u64, 0, 0];
            // SAFETY: the kernel only reads the arguments of the callers below.
            unsafe { sys::call(linux::__NR_io_uring_register, arguments).map(drop) }
        };
        call(register::IORING_REGISTER_FILES, &raw const file as u64, 1)?;
        // `struct io_uring_restriction`: kind (16 bits), value (8 bits).
        let restrict = |what: restriction, value: u8| [what as u64 | u64::from(value) << 16, 0];
        let [read, write, flush, allocate, wait] =
            OPERATIONS.map(|value| restrict(restriction::IORING_RESTRICTION_SQE_OP, value));
        let fixed = FIXED_FILE as u8;
        let restrictions = [
            read,
            write,
            flush,
            allocate,
            wait,
            restrict(restriction::IORING_RESTRICTION_SQE_FLAGS_ALLOWED, fixed),
            restrict(restriction::IORING_RESTRICTION_SQE_FLAGS_REQUIRED, fixed),
        ];
        let address = restrictions.as_ptr() as u64;
        call(register::IORING_REGISTER_RESTRICTIONS, address, restrictions.len())?;
        call(register::IORING_REGISTER_ENABLE_RINGS, 0, 0)?;
        Ok(Self {
            fd,
            sqes,
            sq_tail: ring + u64::from(params.sq_off.tail),
            cq_head: ring + u64::from(params.cq_off.head),
            cq_tail: ring + u64::from(params.cq_off.tail),
            cqes: ring + u64::from(params.cq_off.cqes),
            mask: params.sq_entries - 1,
            cq_mask: params.cq_entries - 1,
            tail: 0,
            unsubmitted: 0,
        })
    }

    /// Adds a submission, which [`Self::wait`] passes to the host. The callers never exceed the
    /// capacity.
    pub fn push(&mut self, entry: Submission<'_>, id: u64) {
        let at = self.sqes + u64::from(self.tail & self.mask) * 64;
        // SAFETY: it is an entry of the ring, which the kernel reads only in io_uring_enter(2).
        unsafe { (at as *mut [u64; 8]).write_volatile(entry.words(id)) };
        self.tail = self.tail.wrapping_add(1);
        self.unsubmitted += 1;
        word(self.sq_tail).store(self.tail, Release);
    }

    /// Passes submissions to the host, and waits for `least` completions.
    pub fn wait(&mut self, least: u32) -> Result<(), Errno> {
        let arguments = [
            self.fd.into(),
            self.unsubmitted.into(),
            least.into(),
            uring::IORING_ENTER_GETEVENTS.into(),
            0,
            0,
        ];
        // SAFETY: the owner of each submission guarantees its memory, which is guest memory.
        let taken = unsafe { sys::call(linux::__NR_io_uring_enter, arguments) }?;
        self.unsubmitted = self.unsubmitted.saturating_sub(taken as u32);
        Ok(())
    }

    /// Returns the id and the result of the next completion.
    pub fn completed(&mut self) -> Option<(u64, Result<u64, Errno>)> {
        let head = word(self.cq_head).load(Relaxed);
        if head == word(self.cq_tail).load(Acquire) {
            return None;
        }
        // `struct io_uring_cqe`.
        let at = self.cqes + u64::from(head & self.cq_mask) * 16;
        // SAFETY: it is an entry of the completion ring, which the kernel does not change before
        // the head is advanced.
        let [id, result] = unsafe { (at as *const [u64; 2]).read_volatile() };
        word(self.cq_head).store(head.wrapping_add(1), Release);
        let result = result as i32;
        Some((id, u64::try_from(result).map_err(|_| Errno(-result))))
    }
}

/// Returns a word of the ring.
fn word(address: u64) -> &'static AtomicU32 {
    // SAFETY: the kernel has reported its offset; the mapping lives as long as the process.
    unsafe { &*(address as *const AtomicU32) }
}

/// Maps a part of the ring at an address that the kernel chooses, as io_uring requires.
fn map(fd: u32, length: u64, offset: u32) -> Result<u64, Errno> {
    let rights = linux::PROT_READ | linux::PROT_WRITE;
    let shared = linux::MAP_SHARED | linux::MAP_POPULATE;
    let arguments = [0, length, rights.into(), shared.into(), fd.into(), offset.into()];
    // SAFETY: the kernel chooses a free address.
    unsafe { sys::call(linux::__NR_mmap, arguments) }
}

fn set_up() -> Result<(u32, uring::io_uring_params), Errno> {
    // SAFETY: it consists of integers.
    let mut params: uring::io_uring_params = unsafe { core::mem::zeroed() };
    params.flags = FLAGS;
    let arguments = [ENTRIES.into(), &raw mut params as u64, 0, 0, 0, 0];
    // SAFETY: the kernel reads and writes the parameters.
    let fd = unsafe { sys::call(linux::__NR_io_uring_setup, arguments) }?;
    Ok((fd as u32, params))
}
