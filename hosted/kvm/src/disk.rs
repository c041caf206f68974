//! Raw disks: one file each, whose requests are executed by threads.
//!
//! A worker copies between the file and guest memory. Requests beyond the disk or guest memory
//! fail, and those with an error of the host.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use proto::errno::Cause;
use proto::hosted::{DiskRecord as Record, log};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use vmm_bus::Block;
use vmm_bus::backend::{BlockInfo, BlockOp, BlockStatus, Data, Part, SECTOR};
use vmm_mem::GuestMemory;

use crate::vcpu_thread::{Notify, event};

/// Threads per disk.
pub const WORKERS: usize = 2;
/// Zeros for hosts without fallocate(2) for them.
static ZEROS: [u8; 1 << 16] = [0; 1 << 16];

/// A raw disk.
pub struct RawDisk {
    file: File,
    record: Record,
    state: Mutex<State>,
    /// Signals that a request is queued or completed.
    changed: Condvar,
    /// A flush has failed. Locked during each flush.
    has_lost: Mutex<bool>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Request>,
    /// Requests in progress.
    running: usize,
    done: VecDeque<(u16, BlockStatus)>,
    /// An error has been reported.
    told: bool,
}

struct Request {
    id: u16,
    op: BlockOp,
    parts: Vec<Part>,
}

impl RawDisk {
    /// Creates a disk from a file.
    pub fn new(file: File, record: Record) -> Self {
        let (state, has_lost) = (Mutex::default(), Mutex::default());
        Self { file, record, state, changed: Condvar::new(), has_lost }
    }

    /// Returns the properties for the device model.
    pub fn info(&self) -> BlockInfo {
        BlockInfo::of_file(self.record.sectors, self.record.read_only, self.record.serial)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every update is atomic under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loop of a worker thread: executes requests; `number` is the index of the disk.
    pub fn work(&self, number: usize, memory: &GuestMemory, vcpu_thread: &impl Notify) {
        loop {
            let mut state = self.state();
            let request = loop {
                match state.waiting.pop_front() {
                    Some(request) => break request,
                    None => {
                        state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                    }
                }
            };
            state.running += 1;
            drop(state);
            let result = self.carry_out(&request, memory);
            let mut state = self.state();
            state.running -= 1;
            let status = match result {
                Ok(()) => BlockStatus::Done,
                Err(Failure::Nonsense) => BlockStatus::Failed,
                Err(Failure::Host(error))
                    if error.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error()) =>
                {
                    BlockStatus::Unsupported
                }
                Err(Failure::Host(error)) => {
                    if !std::mem::replace(&mut state.told, true) {
                        let level = log::WARN;
                        let cause = Cause::new(error.raw_os_error(), &error);
                        eprintln!("<{level}>disk {number}: request failed: {cause}");
                    }
                    BlockStatus::Failed
                }
            };
            state.done.push_back((request.id, status));
            drop(state);
            self.changed.notify_all();
            vcpu_thread.notify(event::DISK);
        }
    }

    fn carry_out(&self, request: &Request, memory: &GuestMemory) -> Result<(), Failure> {
        let Request { op, parts, .. } = request;
        if self.record.read_only && !matches!(op, BlockOp::Read { .. } | BlockOp::Flush) {
            return Err(Failure::Nonsense);
        }
        let length = parts.iter().map(|part| u64::from(part.length)).sum();
        match *op {
            BlockOp::Read { sector } => {
                let (at, mut bytes) = (self.place(sector, length)?, vec![0; length as usize]);
                self.file.read_exact_at(&mut bytes, at)?;
                let mut rest = &bytes[..];
                for part in parts {
                    let (first, others) = rest.split_at(part.length as usize);
                    memory.write_slice(part.address, first).map_err(|_| Failure::Nonsense)?;
                    rest = others;
                }
                Ok(())
            }
            BlockOp::Write { sector } => {
                let (at, mut bytes) = (self.place(sector, length)?, vec![0; length as usize]);
                let mut rest = &mut bytes[..];
                for part in parts {
                    let (first, others) = rest.split_at_mut(part.length as usize);
                    memory.read_slice(part.address, first).map_err(|_| Failure::Nonsense)?;
                    rest = others;
                }
                Ok(self.file.write_all_at(&bytes, at)?)
            }
            BlockOp::Flush => Ok(self.flush(File::sync_data)?),
            BlockOp::Discard { sector, count } => {
                self.allocate(FallocateFlags::PUNCH_HOLE, sector, count)
            }
            BlockOp::WriteZeroes { sector, count, unmap } => {
                let flag =
                    if unmap { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE };
                self.allocate(flag, sector, count).or_else(|_| self.zero(sector, count))
            }
        }
    }

    /// Flushes with `sync`, one at a time.
    ///
    /// After a failure, all flushes fail until the disk is reopened: the host kernel reports a lost
    /// write once, and drops the data.
    fn flush(&self, sync: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
        let mut has_lost = self.has_lost.lock().unwrap_or_else(PoisonError::into_inner);
        if *has_lost {
            return Err(Errno::IO.into());
        }
        let flushed = sync(&self.file);
        *has_lost = flushed.is_err();
        flushed
    }

    /// Returns the file offset of a sector; checks the length.
    fn place(&self, sector: u64, length: u64) -> Result<u64, Failure> {
        let count = length.div_ceil(SECTOR.into());
        match sector.checked_add(count) {
            Some(end)
                if end <= self.record.sectors && length <= u64::from(BlockInfo::FILE_BYTES) =>
            {
                Ok(sector * u64::from(SECTOR))
            }
            _ => Err(Failure::Nonsense),
        }
    }

    /// Returns the first byte and length of a sector range.
    fn range(&self, sector: u64, count: u32) -> Result<(u64, u64), Failure> {
        match sector.checked_add(count.into()) {
            Some(end) if end <= self.record.sectors => {
                Ok((sector * u64::from(SECTOR), u64::from(count) * u64::from(SECTOR)))
            }
            _ => Err(Failure::Nonsense),
        }
    }

    /// Changes the allocation of sectors, which read as zeros afterwards.
    fn allocate(&self, flag: FallocateFlags, sector: u64, count: u32) -> Result<(), Failure> {
        let (at, length) = self.range(sector, count)?;
        fallocate(&self.file, flag | FallocateFlags::KEEP_SIZE, at, length)
            .map_err(|error| Failure::Host(error.into()))
    }

    /// Writes zeros.
    fn zero(&self, sector: u64, count: u32) -> Result<(), Failure> {
        let (mut at, mut left) = self.range(sector, count)?;
        while left != 0 {
            let length = left.min(ZEROS.len() as u64);
            self.file.write_all_at(&ZEROS[..length as usize], at)?;
            (at, left) = (at + length, left - length);
        }
        Ok(())
    }
}

/// Reason that a request fails.
#[derive(Debug)]
enum Failure {
    /// Invalid: outside of the disk or of memory.
    Nonsense,
    /// Error of the host.
    Host(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Host(error)
    }
}

impl Block for &RawDisk {
    fn start(&mut self, id: u16, op: BlockOp, data: &mut Data<'_>) -> bool {
        let parts = std::iter::from_fn(|| data.part(u32::MAX)).collect();
        self.state().waiting.push_back(Request { id, op, parts });
        self.changed.notify_one();
        true
    }

    fn completed(&mut self) -> Option<(u16, BlockStatus)> {
        self.state().done.pop_front()
    }

    fn finish(&mut self, _: u16, _: &mut Data<'_>) {
        // Read data is already in guest memory.
    }

    fn forget(&mut self) {
        let mut state = self.state();
        // Requests that no worker has started are dropped.
        state.waiting.clear();
        let running = |state: &mut State| state.running != 0;
        let mut state =
            self.changed.wait_while(state, running).unwrap_or_else(PoisonError::into_inner);
        state.done.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_mem::testing::memory;

    fn disk() -> RawDisk {
        let file = tempfile::tempfile().unwrap();
        file.set_len(16 * u64::from(SECTOR)).unwrap();
        RawDisk::new(file, Record { sectors: 16, ..Record::default() })
    }

    fn request(op: BlockOp, parts: &[(u64, u32)]) -> Request {
        let part = |&(address, length): &(u64, u32)| Part { address, length };
        Request { id: 0, op, parts: parts.iter().map(part).collect() }
    }

    #[test]
    fn what_is_written_is_read() {
        let (disk, memory) = (disk(), memory(&[(0, 0x3000)]));
        memory.write_slice(0x1000, &[7; 1024]).unwrap();
        let carry_out = |op, parts: &[_]| disk.carry_out(&request(op, parts), &memory);
        carry_out(BlockOp::Write { sector: 14 }, &[(0x1000, 100), (0x1200, 924)]).unwrap();
        carry_out(BlockOp::Flush, &[]).unwrap();
        carry_out(BlockOp::Read { sector: 14 }, &[(0x2000, 1024)]).unwrap();
        let mut bytes = [0; 1024];
        memory.read_slice(0x2000, &mut bytes).unwrap();
        assert_eq!(bytes[..612], [7; 612]);
        carry_out(BlockOp::WriteZeroes { sector: 14, count: 1, unmap: false }, &[]).unwrap();
        carry_out(BlockOp::Read { sector: 14 }, &[(0x2000, 1024)]).unwrap();
        memory.read_slice(0x2000, &mut bytes).unwrap();
        assert_eq!((bytes[511], bytes[512]), (0, 7));
    }

    #[test]
    fn a_failed_flush_is_the_last_word() {
        let disk = disk();
        assert!(disk.flush(|_| Ok(())).is_ok());
        // Two concurrent flushes: the host reports the error to the first one only.
        let (failing, begins) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                disk.flush(|_| {
                    failing.send(()).unwrap();
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    Err(Errno::IO.into())
                })
            });
            begins.recv().unwrap();
            assert!(disk.flush(|_| Ok(())).is_err());
            assert!(first.join().unwrap().is_err());
        });
        assert!(disk.flush(|_| Ok(())).is_err());
        let flush = request(BlockOp::Flush, &[]);
        let flushed = disk.carry_out(&flush, &memory(&[(0, 0x3000)]));
        assert!(matches!(flushed, Err(Failure::Host(_))));
    }

    #[test]
    fn nonsense_fails() {
        let (disk, memory) = (disk(), memory(&[(0, 0x3000)]));
        for (op, parts) in [
            (BlockOp::Read { sector: 16 }, &[(0, 512)][..]),
            (BlockOp::Write { sector: 15 }, &[(0, 1024)]),
            (BlockOp::Read { sector: u64::MAX }, &[(0, 512)]),
            (BlockOp::Read { sector: 0 }, &[(0x2f00, 512)]),
            (BlockOp::Read { sector: 0 }, &[(0, u32::MAX)]),
            (BlockOp::Discard { sector: 1, count: 16 }, &[]),
        ] {
            let result = disk.carry_out(&request(op, parts), &memory);
            assert!(matches!(result, Err(Failure::Nonsense)), "{op:?}: {result:?}");
        }
        let read_only = RawDisk { record: Record { read_only: true, ..disk.record }, ..disk };
        let write = request(BlockOp::Write { sector: 0 }, &[(0, 512)]);
        assert!(matches!(read_only.carry_out(&write, &memory), Err(Failure::Nonsense)));
    }
}
