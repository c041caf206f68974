use std::boxed::Box;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU8, AtomicU64};
use std::thread;
use std::time::Duration;
use std::{vec, vec::Vec};

use proto::hosted::counters::OpTotals;
use proto::requests::Client;

use super::*;

/// Guest memory of a test, from address 0 on, and the time.
struct Memory(Vec<AtomicU8>, AtomicU64);

// SAFETY: the bytes are atomic.
unsafe impl DiskHost for &Memory {
    fn locate(&self, address: u64, length: u64) -> Option<u64> {
        let end = address.checked_add(length)?;
        (end <= self.0.len() as u64).then(|| self.0.as_ptr() as u64 + address)
    }

    fn notify(&self) {}

    fn now(&self) -> u64 {
        // Each request takes at least this long.
        self.1.fetch_add(5, SeqCst)
    }

    fn warn(&self, _: fmt::Arguments<'_>) {}
}

impl Memory {
    fn new() -> Self {
        Self((0..0x3000).map(|_| AtomicU8::new(0)).collect(), AtomicU64::new(1))
    }

    fn bytes(&self, address: usize, length: usize) -> Vec<u8> {
        self.0[address..address + length].iter().map(|byte| byte.load(SeqCst)).collect()
    }
}

/// Disk of 16 sectors.
fn file() -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(16 * SECTOR).unwrap();
    file
}

fn queue() -> &'static Queue {
    // SAFETY: zeroed memory is an empty queue.
    let queue: Box<Queue> = unsafe { Box::new_zeroed().assume_init() };
    Box::leak(queue)
}

fn worker<'a>(
    file: &File,
    errors: &'a FlushErrors,
    memory: &'a Memory,
    queue: &'a Queue,
    counters: &'a DeviceCounters,
) -> Worker<'a, &'a Memory> {
    let record = DiskRecord { sectors: 16, ..DiskRecord::default() };
    Worker { fd: file.as_raw_fd() as u32, index: 0, record, errors, queue, counters, host: memory }
}

fn write_request(request: &Request, op: u32, sector: u64, count: u32, parts: &[(u64, u32)]) {
    request.op.store(op, Relaxed);
    request.sector.store(sector, Relaxed);
    request.count.store(count, Relaxed);
    request.used.store(parts.len() as u32, Relaxed);
    for (part, &(address, length)) in request.parts.iter().zip(parts) {
        part.address.store(address, Relaxed);
        part.length.store(length, Relaxed);
    }
}

/// Submits a request and waits for its status.
fn execute(client: &mut Client<'_>, op: u32, sector: u64, count: u32, parts: &[(u64, u32)]) -> u8 {
    write_request(client.request(0).unwrap(), op, sector, count, parts);
    if client.give(0) {
        sys::wake_one(&client.queue.calls);
    }
    loop {
        if let Some((id, request)) = client.completed() {
            let status = request.status.load(Relaxed);
            client.finish(id);
            return status;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Runs a test with each engine that the host has.
fn with_engines(test: impl Fn(&File, &Memory, &mut Client<'_>)) {
    with_counters(|file, memory, client, _| test(file, memory, client));
}

/// The same for a test that reads the counters.
fn with_counters(test: impl Fn(&File, &Memory, &mut Client<'_>, &DeviceCounters)) {
    let engines = if IoUring::is_possible() { &[false, true][..] } else { &[false] };
    for &has_ring in engines {
        let (file, memory, errors) = (file(), Memory::new(), FlushErrors::default());
        // The workers end with the test's process.
        let (memory, errors): (&Memory, &FlushErrors) =
            (Box::leak(Box::new(memory)), Box::leak(Box::new(errors)));
        let (queue, kept) = (queue(), file.try_clone().unwrap());
        let counters: &DeviceCounters = Box::leak(Box::default());
        thread::spawn(move || {
            let worker = worker(&kept, errors, memory, queue, counters);
            let ring = has_ring.then(|| IoUring::new(worker.fd, None).unwrap());
            panic!("{}", worker.serve(ring))
        });
        test(&file, memory, &mut Client::new(queue), counters);
    }
}

#[test]
fn what_is_written_is_read() {
    with_engines(|file, memory, client| {
        memory.0[0x1000..0x2000].iter().for_each(|byte| byte.store(7, SeqCst));
        let parts = [(0x1000, 100), (0x1200, 924)];
        assert_eq!(execute(client, op::WRITE, 14, 0, &parts), status::DONE);
        assert_eq!(execute(client, op::FLUSH, 0, 0, &[]), status::DONE);
        let mut bytes = vec![0; 1024];
        file.read_exact_at(&mut bytes, 14 * SECTOR).unwrap();
        assert_eq!(bytes, [7; 1024]);
        assert_eq!(execute(client, op::READ, 14, 0, &[(0x2000, 1024)]), status::DONE);
        assert_eq!(memory.bytes(0x2000, 1024), [7; 1024]);
        assert_eq!(execute(client, op::ZERO, 14, 1, &[]), status::DONE);
        assert_eq!(execute(client, op::READ, 14, 0, &[(0x2000, 1024)]), status::DONE);
        assert_eq!(memory.bytes(0x21ff, 2), [0, 7]);
    });
}

/// A file that ends within the last sector: the rest reads as zeros, and a write extends the file.
#[test]
fn the_last_sector_is_padded() {
    with_engines(|file, memory, client| {
        memory.0[0x1000..0x3000].iter().for_each(|byte| byte.store(7, SeqCst));
        assert_eq!(execute(client, op::WRITE, 14, 0, &[(0x1000, 1024)]), status::DONE);
        file.set_len(15 * SECTOR + 100).unwrap();
        let parts = [(0x2000, 600), (0x2800, 424)];
        assert_eq!(execute(client, op::READ, 14, 0, &parts), status::DONE);
        assert_eq!(memory.bytes(0x2000, 600), [7; 600]);
        assert_eq!(memory.bytes(0x2800, 12), [7; 12]);
        assert_eq!(memory.bytes(0x280c, 412), [0; 412]);
        assert_eq!(memory.bytes(0x29a8, 1), [7], "only the request's memory");
        assert_eq!(execute(client, op::WRITE, 15, 0, &[(0x1000, 512)]), status::DONE);
        assert_eq!(file.metadata().unwrap().len(), 16 * SECTOR);
        // A file that another program has cut is an error.
        file.set_len(15 * SECTOR).unwrap();
        assert_eq!(execute(client, op::READ, 14, 0, &[(0x2000, 1024)]), status::FAILED);
    });
}

#[test]
fn invalid_requests_fail() {
    with_engines(|_, _, client| {
        for (op, sector, count, parts) in [
            (op::READ, 16, 0, &[(0, 512)][..]),
            (op::WRITE, 15, 0, &[(0, 1024)]),
            (op::READ, u64::MAX, 0, &[(0, 512)]),
            (op::READ, 0, 0, &[(0x2f00, 512)]),
            (op::READ, 0, 0, &[(0, u32::MAX)]),
            (op::READ, 0, 0, &[(0, 511)]),
            (op::READ, 0, 0, &[]),
            (op::DISCARD, 1, 16, &[]),
            (99, 0, 0, &[]),
        ] {
            let status = execute(client, op, sector, count, parts);
            assert_eq!(status, status::FAILED, "{op} {sector} {count} {parts:?}");
        }
        assert_eq!(execute(client, op::READ, 0, 0, &[(0, 512)]), status::DONE);
    });
}

#[test]
fn a_read_only_disk_is_not_written() {
    let (file, memory, errors) = (file(), Memory::new(), FlushErrors::default());
    let counters = DeviceCounters::default();
    let mut worker = worker(&file, &errors, &memory, queue(), &counters);
    worker.record.read_only = true;
    for op in [op::WRITE, op::DISCARD, op::ZERO, op::UNMAP] {
        let request = &worker.queue.requests[0];
        write_request(request, op, 0, 1, &[(0, 512)]);
        assert!(matches!(worker.plan(request, &mut { Job::NONE }), Err(Failure::Invalid)));
    }
}

/// On a host whose fallocate(2) fails, zeros are written in steps, between which the worker
/// executes other requests.
#[test]
fn zeros_without_fallocate_are_written_in_steps() {
    const LENGTH: u64 = (5 << 20) + SECTOR;
    let (file, memory, errors) = (file(), Memory::new(), FlushErrors::default());
    let counters = DeviceCounters::default();
    file.write_all_at(&vec![7; LENGTH as usize + 1024], 0).unwrap();
    let mut worker = worker(&file, &errors, &memory, queue(), &counters);
    worker.record.sectors = LENGTH / SECTOR + 2;
    let request = &worker.queue.requests[0];
    write_request(request, op::ZERO, 1, (LENGTH / SECTOR) as u32, &[]);
    let mut job = Job::NONE;
    assert!(worker.plan(request, &mut job).is_ok());
    let (mut result, mut steps) = (Err(Errno(errno::EOPNOTSUPP as i32)), Vec::new());
    let done = loop {
        if let Some(done) = worker.on_completion(&mut job, result) {
            break done;
        }
        assert!(matches!(job.entry(), Submission::Write(..)));
        result = worker.call(&job, 0);
        steps.extend(result);
    };
    assert!(done.is_ok());
    assert_eq!(steps, [1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, SECTOR]);
    let mut bytes = vec![0; LENGTH as usize + 1024];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let (rest, zeros) = (SECTOR as usize, SECTOR as usize..(SECTOR + LENGTH) as usize);
    assert!(bytes[zeros.clone()].iter().all(|byte| *byte == 0));
    assert!(bytes[..rest].iter().chain(&bytes[zeros.end..]).all(|byte| *byte == 7));
}

/// A block device with larger blocks than the guest's refuses to discard a part of one. A discard
/// may have no effect, but one that the host does not know is reported.
#[test]
fn a_discard_may_have_no_effect() {
    let (file, memory, errors) = (file(), Memory::new(), FlushErrors::default());
    let counters = DeviceCounters::default();
    let worker = worker(&file, &errors, &memory, queue(), &counters);
    for (op, error, is_done) in [
        (op::DISCARD, errno::EINVAL, Some(true)),
        (op::DISCARD, errno::EOPNOTSUPP, Some(false)),
        (op::UNMAP, errno::EINVAL, None),
    ] {
        let request = &worker.queue.requests[0];
        write_request(request, op, 1, 1, &[]);
        let mut job = Job::NONE;
        assert!(worker.plan(request, &mut job).is_ok());
        let done = worker.on_completion(&mut job, Err(Errno(error as i32)));
        assert_eq!(done.map(|done| done.is_ok()), is_done, "{op} {error}");
    }
}

#[test]
fn requests_are_counted() {
    with_counters(|_, _, client, counters| {
        for (op, sector, count, parts) in [
            (op::WRITE, 0, 0, &[(0, 1024), (0x1000, 512)][..]),
            (op::WRITE, 2, 0, &[(0, 512)]),
            (op::READ, 0, 0, &[(0, 4096)]),
            (op::READ, 15, 0, &[(0, 4096)]),
            (op::FLUSH, 0, 0, &[]),
            (op::ZERO, 0, 3, &[]),
            (op::DISCARD, 0, 99, &[]),
            (99, 0, 0, &[]),
        ] {
            execute(client, op, sector, count, parts);
        }
        let totals = counters.ops.each_ref().map(|op| op.totals());
        let counted = totals.map(|op| (op.requests, op.failed, op.bytes));
        assert_eq!(counted, [(2, 1, 4096), (2, 0, 2048), (1, 0, 0), (2, 1, 3 * 512)]);
        let is_timed = |op: &OpTotals| op.longest >= 5 && op.nanoseconds >= 5 * op.requests;
        assert!(totals.iter().all(is_timed), "{totals:?}");
        // Each request has one time, of the first bucket.
        assert!(totals.iter().all(|op| op.buckets[0] == op.requests), "{totals:?}");
    });
}

#[test]
fn a_failed_flush_is_the_last_word() {
    let errors = FlushErrors::default();
    errors.enter();
    assert!(errors.check().is_ok() && errors.flush_result(Ok(())).is_ok());
    // Two concurrent flushes: the host reports the error to the first one only.
    thread::scope(|scope| {
        let second = scope.spawn(|| {
            errors.enter();
            let done = errors.check();
            errors.leave();
            done
        });
        thread::sleep(Duration::from_millis(50));
        assert!(errors.flush_result(Err(Errno(errno::EIO as i32).into())).is_err());
        errors.leave();
        assert!(second.join().unwrap().is_err());
    });
    assert!(errors.flush_result(Ok(())).is_err());
}
