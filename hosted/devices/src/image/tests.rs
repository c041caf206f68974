use super::refcounts::{CheckResult, Header};
use super::*;
use imago::FormatCreateBuilder;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::qcow2::Qcow2CreateBuilder;
use imago::storage::drivers::CommonStorageHelper;
use std::fmt;
use std::io::{Seek, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use crate::worker::testing::{LIMIT, Rig};

const SECTORS: u64 = 4096;

/// Creates an empty image with clusters of `cluster` bytes.
fn empty_image(cluster: usize) -> tempfile::NamedTempFile {
    let place = tempfile::NamedTempFile::new().unwrap();
    let options = StorageOpenOptions::new().write(true);
    let file = File::from_open_file(place.reopen().unwrap(), options).unwrap();
    let builder: Qcow2CreateBuilder<File> = Qcow2::<File>::create_builder(file);
    builder.cluster_size(cluster).size(SECTORS * SECTOR).create().unwrap();
    place
}

/// Creates an image with data at its beginning.
fn image() -> (tempfile::NamedTempFile, Vec<u8>) {
    let place = empty_image(1 << 16);
    let disk = open(&place).unwrap();
    disk.access.write(&vec![7; 5000], 512).unwrap();
    drop(disk);
    let bytes = fs::read(place.path()).unwrap();
    (place, bytes)
}

fn open(place: &tempfile::NamedTempFile) -> Result<Disk, SetupError> {
    let file = fs::OpenOptions::new().read(true).write(true).open(place.path()).unwrap();
    Disk::open(file, None, ImageConfig { base: None, read_only: false, sectors: SECTORS })
}

#[test]
fn what_is_written_is_read() {
    let (place, _) = image();
    let disk = open(&place).unwrap();
    let mut bytes = vec![0; 6000];
    disk.access.read(&mut bytes, 0).unwrap();
    assert!(bytes[512..5512].iter().all(|byte| *byte == 7) && bytes[5512..] == [0; 488]);
    disk.zero(0, 3 << 20 >> 1).unwrap();
    disk.idle();
    disk.access.read(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [0; 6000]);
    let other = ImageConfig { base: None, read_only: true, sectors: SECTORS + 1 };
    let failed = Disk::open(place.reopen().unwrap(), None, other).map(drop).unwrap_err();
    assert!(failed.to_string().contains("size has changed"));
}

/// A file whose next read, write or sync blocks until released.
#[derive(Debug)]
struct Slow {
    file: File,
    holds: Arc<AtomicU8>,
    /// The next sync fails.
    fails: Arc<AtomicBool>,
    begun: Mutex<Sender<()>>,
    go: Mutex<Receiver<()>>,
}

const READ: u8 = 1;
const SYNC: u8 = 2;
const WRITE: u8 = 3;

impl Slow {
    fn hold(&self, what: u8) {
        if self.holds.compare_exchange(what, 0, SeqCst, SeqCst).is_ok() {
            self.begun.lock().unwrap().send(()).unwrap();
            self.go.lock().unwrap().recv().unwrap();
        }
    }
}

impl fmt::Display for Slow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a slow file")
    }
}

impl Storage for Slow {
    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    unsafe fn pure_readv(&self, to: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        self.hold(READ);
        // SAFETY: guaranteed by the caller.
        unsafe { self.file.pure_readv(to, offset) }
    }

    unsafe fn pure_writev(&self, from: IoVector<'_>, offset: u64) -> io::Result<()> {
        self.hold(WRITE);
        // SAFETY: guaranteed by the caller.
        unsafe { self.file.pure_writev(from, offset) }
    }

    fn flush(&self) -> io::Result<()> {
        self.file.flush()
    }

    fn sync(&self) -> io::Result<()> {
        self.hold(SYNC);
        if self.fails.swap(false, SeqCst) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.file.sync()
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.file.invalidate_cache() }
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        self.file.get_storage_helper()
    }
}

/// A disk on such a file: the operation to block next, whether the next sync fails, the report
/// that an operation is blocked, and its release.
struct SlowDisk {
    disk: Disk<Slow>,
    holds: Arc<AtomicU8>,
    fails: Arc<AtomicBool>,
    begins: Receiver<()>,
    go: Sender<()>,
}

fn slow(place: &tempfile::NamedTempFile) -> SlowDisk {
    let file = fs::OpenOptions::new().read(true).write(true).open(place.path()).unwrap();
    let file = File::from_open_file(file, StorageOpenOptions::new().write(true)).unwrap();
    let ((begun, begins), (go, gone)) = (channel(), channel());
    let holds = Arc::new(AtomicU8::new(0));
    let fails = Arc::new(AtomicBool::new(false));
    let (begun, gone) = (Mutex::new(begun), Mutex::new(gone));
    let slow = Slow { file, holds: holds.clone(), fails: fails.clone(), begun, go: gone };
    let disk =
        Disk::with(slow, None, ImageConfig { base: None, read_only: false, sectors: SECTORS })
            .unwrap();
    SlowDisk { disk, holds, fails, begins, go }
}

/// A flush that begins before another one fails does not succeed after it: the host reports the
/// error once.
#[test]
fn flushes_beside_one_that_fails() {
    let SlowDisk { disk, holds, fails, begins, go } = slow(&image().0);
    let mut rig = Rig::new(disk, 2);
    holds.store(SYNC, SeqCst);
    fails.store(true, SeqCst);
    rig.submit(0, op::FLUSH, 0, &[], 0);
    assert_eq!(begins.recv_timeout(LIMIT), Ok(()));
    rig.submit(1, op::FLUSH, 0, &[], 0);
    std::thread::sleep(Duration::from_millis(50));
    go.send(()).unwrap();
    let mut both = [rig.ended(), rig.ended()];
    both.sort_unstable();
    assert_eq!(both, [(0, status::FAILED), (1, status::FAILED)]);
    rig.submit(2, op::FLUSH, 0, &[], 0);
    assert_eq!(rig.ended(), (2, status::FAILED));
}

/// Zeroing a part of a cluster does not undo a concurrent write to another part.
#[test]
fn zeros_beside_a_write() {
    for op in [op::ZERO, op::UNMAP] {
        let SlowDisk { disk, holds, begins, go, .. } = slow(&image().0);
        let mut rig = Rig::new(disk, 2);
        rig.memory.write_slice(0, &[9; 4096]).unwrap();
        // In an unallocated cluster.
        rig.submit(0, op::WRITE, 2048, &[(0, 4096)], 0);
        let written = rig.ended();
        holds.store(WRITE, SeqCst);
        rig.submit(0, op::WRITE, 2048 + 128, &[(0, 4096)], 0);
        assert_eq!(begins.recv_timeout(LIMIT), Ok(()));
        rig.submit(1, op, 2048 + 128 + 8, &[], 8);
        // Time to read the state of the cluster.
        std::thread::sleep(Duration::from_millis(100));
        go.send(()).unwrap();
        let mut both = [rig.ended(), rig.ended()];
        both.sort_unstable();
        assert_eq!((written, both), ((0, 0), [(0, 0), (1, 0)]));
        rig.submit(2, op::READ, 2048 + 128, &[(8192, 8192)], 0);
        assert_eq!(rig.ended(), (2, status::DONE));
        let mut bytes = [1; 8192];
        rig.memory.read_slice(8192, &mut bytes).unwrap();
        assert!(bytes[..4096] == [9; 4096] && bytes[4096..] == [0; 4096]);
    }
}

#[test]
fn a_slow_host_holds_nothing_else_up() {
    let SlowDisk { disk, holds, begins, go, .. } = slow(&image().0);
    let mut rig = Rig::new(disk, 4);
    let done = |id: u16| (id, status::DONE);
    let part = |id: u64| [(id << 13, 4096)];
    // The tables are allocated.
    rig.submit(0, op::READ, 0, &part(0), 0);
    assert_eq!(rig.ended(), done(0));

    holds.store(READ, SeqCst);
    rig.submit(1, op::READ, 1, &part(1), 0);
    assert_eq!(begins.recv_timeout(LIMIT), Ok(()));
    rig.submit(2, op::READ, 1, &part(2), 0);
    assert_eq!(rig.ended(), done(2));
    // In an allocated cluster, and in an unallocated one; a flush, and a deallocation
    // elsewhere.
    for (id, op, sector) in [(3, op::WRITE, 8), (4, op::WRITE, 3000), (5, op::FLUSH, 0)] {
        rig.submit(id, op, sector, &part(2), 0);
        assert_eq!(rig.ended(), done(id));
    }
    rig.submit(6, op::UNMAP, 2048, &[], 2048);
    assert_eq!(rig.ended(), done(6));
    // A cluster being read is not deallocated.
    rig.submit(7, op::UNMAP, 0, &[], 2048);
    rig.submit(8, op::READ, 2100, &part(8), 0);
    assert_eq!(rig.ended(), done(8));
    assert!(rig.client.completed().is_none());
    go.send(()).unwrap();
    let mut both = [rig.ended(), rig.ended()];
    both.sort_unstable();
    assert_eq!(both, [done(1), done(7)]);

    holds.store(SYNC, SeqCst);
    rig.submit(9, op::FLUSH, 0, &[], 0);
    assert_eq!(begins.recv_timeout(LIMIT), Ok(()));
    for (id, op) in [(10, op::WRITE), (11, op::READ), (12, op::DISCARD)] {
        let part = part(1);
        rig.submit(id, op, 0, if op == op::DISCARD { &[] } else { &part }, 8);
        assert_eq!(rig.ended(), done(id));
    }
    go.send(()).unwrap();
    assert_eq!(rig.ended(), done(9));
    let counted = rig.counters.ops.each_ref().map(|op| op.totals());
    let requests = counted.map(|op| (op.requests, op.failed, op.bytes));
    let sectors = |count: u64| count * 512;
    let wanted = [
        (5, 0, sectors(5 * 8)),
        (3, 0, sectors(3 * 8)),
        (2, 0, 0),
        (3, 0, sectors(2048 + 2048 + 8)),
    ];
    assert_eq!(requests, wanted);
    // The data read meanwhile.
    let mut bytes = [0; 4096];
    rig.memory.read_slice(1 << 13, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 4096]);
}

/// A write that needs a new L2 table waits until its count is on the disk, and reads of other
/// tables do not wait for that.
#[test]
fn reads_beside_a_new_table() {
    // A table maps 64 sectors.
    let SlowDisk { disk, holds, begins, go, .. } = slow(&empty_image(512));
    let mut rig = Rig::new(disk, 2);
    rig.memory.write_slice(0, &[9; 4096]).unwrap();
    rig.submit(0, op::WRITE, 0, &[(0, 4096)], 0);
    assert_eq!(rig.ended(), (0, status::DONE));
    holds.store(SYNC, SeqCst);
    rig.submit(1, op::WRITE, 1024, &[(0, 4096)], 0);
    assert_eq!(begins.recv_timeout(LIMIT), Ok(()));
    rig.submit(2, op::READ, 0, &[(8192, 4096)], 0);
    assert_eq!(rig.ended(), (2, status::DONE));
    go.send(()).unwrap();
    assert_eq!(rig.ended(), (1, status::DONE));
    rig.submit(3, op::READ, 1024, &[(4096, 4096)], 0);
    assert_eq!(rig.ended(), (3, status::DONE));
    let mut bytes = [0; 8192];
    rig.memory.read_slice(4096, &mut bytes).unwrap();
    assert_eq!(bytes, [9; 8192]);
}

/// Threads that each write their own part, concurrently with flushes and deallocations; the
/// image is valid afterwards.
#[test]
fn many_at_a_time() {
    let (place, _) = image();
    let disk = open(&place).unwrap();
    let each = SECTORS / 4;
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let disk = &disk;
            scope.spawn(move || {
                let mut random = thread + 1;
                let mut expected = vec![0; (each * SECTOR) as usize];
                let start = thread * each * SECTOR;
                disk.zero(start, each * SECTOR).unwrap();
                for round in 0..300_u64 {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let length = (random >> 20) % 300 * SECTOR;
                    let at = (random >> 33) % (each - 300) * SECTOR;
                    let range = at as usize..(at + length) as usize;
                    match round % 10 {
                        0 => disk.access.flush().unwrap(),
                        1 | 2 => {
                            let _claim = disk.claims.lock(start + at, length, true);
                            // SAFETY: no other thread uses this part.
                            let done =
                                unsafe { disk.access.discard_to_zero_unsafe(start + at, length) };
                            done.unwrap();
                            expected[range].fill(0);
                        }
                        3..7 => {
                            let mut bytes = vec![0; length as usize];
                            disk.access.read(&mut bytes, start + at).unwrap();
                            assert_eq!(bytes, expected[range]);
                        }
                        _ => {
                            let bytes = vec![round as u8; length as usize];
                            disk.access.write(&bytes, start + at).unwrap();
                            expected[range].copy_from_slice(&bytes);
                        }
                    }
                }
                let mut bytes = vec![0; expected.len()];
                disk.access.read(&mut bytes, start).unwrap();
                assert!(bytes == expected);
            });
        }
    });
    disk.access.flush().unwrap();
    let before = read_all(&disk);
    drop(disk);
    assert!(read_all(&open(&place).unwrap()) == before);
}

fn read_all(disk: &Disk) -> Vec<u8> {
    let mut bytes = vec![0; (SECTORS * SECTOR) as usize];
    disk.access.read(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn images_that_count_their_header_as_free() {
    let (place, good) = image();
    let number = |at: usize| u64::from_be_bytes(good[at..at + 8].try_into().unwrap());
    let table = number(48);
    let block = number(table as usize);
    for (at, bytes) in [(table, &[0; 8][..]), (block, &[0; 2]), (48, &[0xff; 8]), (48, &[0x7f])] {
        fs::write(place.path(), &good).unwrap();
        assert!(open(&place).is_ok());
        place.as_file().write_all_at(bytes, at).unwrap();
        let failed = open(&place).map(drop).unwrap_err().to_string();
        let is_said = failed.contains("declare its own header free");
        assert!(is_said || failed.contains("Invalid argument"), "{failed}");
    }
}

/// An image open for writing is marked in its header; one that was not closed is repaired.
#[test]
fn an_image_is_marked_until_it_is_closed() {
    let (place, _) = image();
    let is_dirty = || Header::read(place.as_file()).unwrap().is_dirty();
    let mut rig = Rig::new(open(&place).unwrap(), 1);
    let mut act = |op| {
        rig.submit(0, op, 64, &[(0, 4096)], 8);
        assert_eq!(rig.ended(), (0, status::DONE));
    };
    act(op::READ);
    act(op::FLUSH);
    assert!(!is_dirty());
    act(op::WRITE);
    assert!(is_dirty());
    act(op::FLUSH);

    // The process is killed.
    let killed = tempfile::NamedTempFile::new().unwrap();
    fs::copy(place.path(), killed.path()).unwrap();
    let header = Header::read(killed.as_file()).unwrap();
    // An unused distant cluster is counted, and the L2 table is not.
    let table = read_number(killed.as_file(), 48);
    let block = read_number(killed.as_file(), table);
    let l2 = read_number(killed.as_file(), read_number(killed.as_file(), 40)) << 1 >> 1;
    killed.as_file().write_all_at(&[0, 1], block + 2000).unwrap();
    killed.as_file().write_all_at(&[0, 0], block + (l2 >> 16) * 2).unwrap();
    let before = fs::read(killed.path()).unwrap();
    assert_eq!(header.check(killed.as_file()).unwrap(), CheckResult { leaked: 1, missing: 1 });
    let reader = ImageConfig { base: None, read_only: true, sectors: SECTORS };
    let disk = Disk::open(killed.reopen().unwrap(), None, reader).unwrap();
    let mut bytes = vec![0; 5000];
    disk.access.read(&mut bytes, 512).unwrap();
    assert_eq!(bytes, [7; 5000]);
    drop(disk);
    assert!(fs::read(killed.path()).unwrap() == before, "a reader changes nothing");
    let disk = open(&killed).unwrap();
    assert_eq!(header.check(killed.as_file()).unwrap(), CheckResult::default());
    // It stays marked until it is closed, even without a write.
    assert!(Header::read(killed.as_file()).unwrap().is_dirty());
    disk.close(true);
    assert!(!Header::read(killed.as_file()).unwrap().is_dirty());
    assert!(disk.marking.begin_change().is_err());

    // An L1 table in place of the L2 table cannot be repaired.
    fs::write(killed.path(), before).unwrap();
    let l1 = read_number(killed.as_file(), 40);
    killed.as_file().write_all_at(&l1.to_be_bytes(), l1).unwrap();
    let failed = open(&killed).map(drop).unwrap_err().to_string();
    assert!(failed.contains("in use twice") && failed.contains(refcounts::COMMAND), "{failed}");

    rig.watch(&AtomicBool::new(true));
    assert!(!is_dirty());
    assert_eq!(
        Header::read(place.as_file()).unwrap().check(place.as_file()).unwrap(),
        CheckResult::default()
    );
}

fn read_number(file: &fs::File, at: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, at).unwrap();
    u64::from_be_bytes(bytes)
}

/// An image that may still be written to is not marked as closed.
#[test]
fn an_image_with_requests_stays_marked() {
    let (place, _) = image();
    let disk = open(&place).unwrap();
    disk.marking.begin_change().unwrap();
    disk.close(false);
    assert!(Header::read(place.as_file()).unwrap().is_dirty());
}

/// After an image could not be marked, it is not changed: the host may report the lost mark once.
#[test]
fn an_image_without_its_mark_is_not_changed() {
    let (place, _) = image();
    let marking = Marking::new(&fs::File::open(place.path()).unwrap()).unwrap();
    let first = marking.begin_change().unwrap_err();
    assert!(first.raw_os_error().is_some(), "the file is open to read: {first}");
    let second = marking.begin_change().unwrap_err();
    assert!(second.to_string().contains("must be reopened"), "{second}");
}

/// Arbitrary file contents give an error or a working disk, never the end of the process.
#[test]
fn files_that_mean_harm() {
    let (mut place, good) = image();
    let mut random = 1_u64;
    let mut next = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) as usize % below
    };
    for round in 0..400 {
        let mut bytes = good.clone();
        for _ in 0..=round % 3 {
            // The header, or any table.
            let at = if round % 2 == 0 { next(104) } else { next(bytes.len() / 8) * 8 };
            bytes[at] = next(256) as u8;
        }
        // Some are marked as not closed.
        bytes[79] |= u8::from(round % 4 == 1);
        place.rewind().unwrap();
        place.as_file().set_len(0).unwrap();
        place.write_all(&bytes).unwrap();
        if let Ok(disk) = open(&place) {
            let mut read = vec![0; 8192];
            let _ = disk.access.read(&mut read, 0);
            let _ = disk.zero(4096, 100_000);
            let _ = disk.access.write_zeroes(1 << 20, 1 << 17);
            let _ = disk.access.write(&read, 1 << 20);
            let _ = disk.access.flush();
        }
    }
}

/// Changes go to the overlay, which is opened again after a reset; the base stays.
#[test]
fn overlays_keep_their_base() {
    let folder = tempfile::tempdir().unwrap();
    let length = SECTORS * SECTOR;
    let raw = folder.path().join("base");
    let bytes: Vec<u8> = (0..length).map(|at| (at / 512 % 251) as u8).collect();
    fs::write(&raw, &bytes).unwrap();
    let image = folder.path().join("base.qcow2");
    let convert = ["convert", "-f", "raw", "-O", "qcow2"];
    let made = std::process::Command::new("qemu-img").args(convert).args([&raw, &image]).status();
    let mut bases = vec![(Base::Raw, raw)];
    // Not installed everywhere.
    bases.extend(made.is_ok_and(|made| made.success()).then_some((Base::Qcow2, image)));
    for (base, path) in bases {
        let before = fs::read(&path).unwrap();
        let changes = tempfile::tempfile().unwrap();
        let config = ImageConfig { base: Some(base), read_only: false, sectors: SECTORS };
        let open = || {
            let file = fs::File::open(&path).unwrap();
            Disk::overlay(base, file, None, changes.try_clone().unwrap(), config).unwrap()
        };
        let mut wanted = bytes.clone();
        let disk = open();
        disk.access.write(&[0xee; 1024][..], 512 * 3).unwrap();
        wanted[512 * 3..512 * 5].fill(0xee);
        disk.make_zeros(0, 512, true).unwrap();
        wanted[..512].fill(0);
        disk.close(true);
        drop(disk);
        let disk = open();
        let mut found = vec![0; length as usize];
        disk.access.read(&mut found, 0).unwrap();
        assert!(found == wanted, "{base:?}");
        assert!(fs::read(&path).unwrap() == before, "{base:?}: the base was changed");
    }
}

/// Reads go down a chain of backing files, also of shorter ones; writes stay in the image.
#[test]
fn backing_files_show_through() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let length = SECTORS * SECTOR;
    let mut wanted = vec![0; length as usize];
    // The lowest file is raw and has half of the length.
    let raw: Vec<u8> = (0..length / 2).map(|at| (at / 512 % 251) as u8).collect();
    fs::write(path("raw"), &raw).unwrap();
    wanted[..raw.len()].copy_from_slice(&raw);
    let make = |name: &str| {
        let created = fs::File::create_new(path(name)).unwrap();
        let created = storage(created, true).unwrap();
        Qcow2::<File>::create_builder(created).size(length).create().unwrap();
    };
    let file = |name: &str| fs::File::options().read(true).write(true).open(path(name)).unwrap();
    let config = ImageConfig { base: None, read_only: false, sectors: SECTORS };
    let open = |name: &str, below: &[(Base, &str)]| {
        let below = below.iter().map(|&(format, name)| (format, file(name))).collect();
        Disk::open(file(name), Disk::chain(below).unwrap(), config).unwrap()
    };
    let chain = [(Base::Qcow2, "middle"), (Base::Raw, "raw")];
    for (name, below, at, value) in
        [("middle", &chain[1..], 7, 0xaa), ("top", &chain[..], 8, 0xbb), ("top", &chain[..], 2, 0)]
    {
        if !path(name).exists() {
            make(name);
        }
        let before: Vec<_> = below.iter().map(|(_, name)| fs::read(path(name)).unwrap()).collect();
        let disk = open(name, below);
        let range = at * 512..(at + 2) * 512;
        if value == 0 {
            disk.make_zeros(range.start, 1024, true).unwrap();
        } else {
            disk.access.write(&[value; 1024][..], range.start).unwrap();
        }
        wanted[range.start as usize..range.end as usize].fill(value);
        disk.close(true);
        drop(disk);
        let mut found = vec![0; length as usize];
        open(name, below).access.read(&mut found, 0).unwrap();
        assert!(found == wanted, "{name} {at}");
        for ((_, name), before) in below.iter().zip(before) {
            assert!(fs::read(path(name)).unwrap() == before, "{name} was changed");
        }
    }
}
