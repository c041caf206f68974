//! A disk whose file has a format of its own: qcow2.
//!
//! The library (`imago`) has the format. It never opens another file: an image that names one, for what it does not have itself or for its data, is
//! refused, because which files a machine reads is the user's to say. What the library keeps of tables goes to the file at flushes, soon
//! after the last change, and at the end.
//!
//! Whenever the process is killed, or the host loses its power, what has been flushed is in the image, and no table
//! points to a cluster that is counted as free: the library orders its writes (third_party/README.md). Clusters may be
//! counted that are not in use. So an image that has been changed is marked as dirty until it is closed, and the counts
//! of a dirty one are rebuilt before it is used ([`refcounts`]).

use std::fs;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use imago::file::File;
use imago::format::drivers::FormatDriverInstance;
use imago::qcow2::Qcow2;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder, Storage, StorageOpenOptions};
use proto::errno::Cause;
use proto::requests::{op, status};
use proto::wedge::layout;

use self::marking::Marking;
use crate::confine::{Failed, Files, confine};
use crate::worker::{Machine, Serve, Taken, Worker};

#[cfg(test)]
mod crashes;
mod marking;
mod refcounts;

/// Requests at a time.
const THREADS: usize = 8;
/// Bytes of a sector.
const SECTOR: u64 = 512;
/// Most bytes of a read or write, more than the device model lets a guest ask for.
const MOST_BYTES: usize = 1 << 20;

/// What a process is told of its image, whose descriptor is [`layout::DISKS_FD`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Image {
    /// Nothing is changed.
    pub read_only: bool,
    /// Sectors that the guest is told of.
    pub sectors: u64,
}

/// Serves a qcow2 image, until `end`.
///
/// # Errors
/// The process cannot be set up, or the image cannot be used.
pub fn serve_image(machine: Machine, image: Image, end: &AtomicBool) -> Result<(), Failed> {
    let worker = Worker::new(machine)?;
    // SAFETY: `parador run` starts the program with this descriptor, and nothing else of it uses it.
    let file = fs::File::from(unsafe { OwnedFd::from_raw_fd(layout::DISKS_FD as i32) });
    // The file is looked at in the confinement only: whoever has made it may mean harm.
    let threads = confine(Files::Own, THREADS)?;
    let disk = Disk::open(file, image)?;
    Ok(worker.serve(disk, &threads, end)?)
}

/// An open image.
///
/// Several threads use it. The library has its own locks for its tables, and holds none while it reads data, writes it where there is room
/// for it already, or waits for the host to have everything on the disk.
struct Disk<S: Storage + 'static = File> {
    access: FormatAccess<S>,
    claims: Claims,
    /// Bytes that the library makes zeros of together.
    cluster: u64,
    image: Image,
    marking: Marking,
    /// It has been told that the image or the host fails.
    has_told: AtomicBool,
}

/// The image is not as it has to be, or not to be read.
fn unusable(error: &io::Error) -> Failed {
    Failed::new("the image cannot be used", Cause::new(error.raw_os_error(), error))
}

impl Disk {
    fn open(file: fs::File, image: Image) -> Result<Self, Failed> {
        let failed = |error: io::Error| unusable(&error);
        let marking = if image.read_only { Ok(Marking::none()) } else { Marking::new(&file) };
        let marking = marking.map_err(|error| Failed::new("the image cannot be used", error))?;
        let options = StorageOpenOptions::new().write(!image.read_only);
        let file = File::from_open_file(file, options).map_err(failed)?;
        Ok(Self { marking, ..Self::with(file, image)? })
    }
}

impl<S: Storage + 'static> Disk<S> {
    fn with(file: S, image: Image) -> Result<Self, Failed> {
        let failed = |error: io::Error| unusable(&error);
        let opened = Qcow2::<S>::builder(file)
            .write(!image.read_only)
            .backing(None)
            .data_file(None)
            .open(DenyImplicitOpenGate::default())
            .map_err(failed)?;
        if opened.implicit_backing_file().is_some() || opened.requires_external_data_file() {
            return Err(Failed::new("the image cannot be used", "it needs another file"));
        }
        let cluster = opened.zero_granularity().unwrap_or(SECTOR);
        let access = FormatAccess::new(opened);
        if access.size() != image.sectors * SECTOR {
            return Err(Failed::new("the image cannot be used", "its size has changed"));
        }
        Ok(Self {
            access,
            claims: Claims::default(),
            cluster,
            image,
            marking: Marking::none(),
            has_told: AtomicBool::new(false),
        })
    }

    fn carry_out(&self, taken: &Taken<'_>) -> io::Result<()> {
        let range = |length: u64| -> io::Result<u64> {
            let end = taken.sector.checked_add(length.div_ceil(SECTOR));
            let is_whole = length.is_multiple_of(SECTOR);
            match end.filter(|end| is_whole && *end <= self.image.sectors) {
                Some(_) => Ok(taken.sector * SECTOR),
                None => Err(io::ErrorKind::InvalidInput.into()),
            }
        };
        if self.image.read_only && !matches!(taken.op, op::READ | op::FLUSH) {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        if matches!(taken.op, op::WRITE | op::DISCARD | op::UNMAP | op::ZERO) {
            self.marking.begin_change()?;
        }
        let count = u64::from(taken.count) * SECTOR;
        match taken.op {
            op::READ => {
                let length = taken.length();
                let at = range(length as u64)?;
                if length > MOST_BYTES {
                    return Err(io::ErrorKind::InvalidInput.into());
                }
                let mut bytes = vec![0; length];
                let _claim = self.claims.claim(at, length as u64, false);
                self.access.read(&mut bytes, at)?;
                taken.write(&taken.parts, &bytes).ok_or(io::ErrorKind::InvalidInput)?;
                Ok(())
            }
            op::WRITE => {
                let bytes = taken.read(&taken.parts, MOST_BYTES);
                let bytes = bytes.ok_or(io::ErrorKind::InvalidInput)?;
                let at = range(bytes.len() as u64)?;
                let _claim = self.claims.claim(at, bytes.len() as u64, false);
                self.access.write(&bytes, at)
            }
            op::FLUSH => {
                self.access.flush()?;
                self.access.sync()
            }
            op::DISCARD => {
                let at = range(count)?;
                let _claim = self.claims.claim(at, count, true);
                // SAFETY: nobody else reads or writes in this range, so nobody has found out where its data is and still goes there.
                unsafe { self.access.discard_to_any_unsafe(at, count) }
            }
            op::UNMAP | op::ZERO => self.make_zeros(range(count)?, count, taken.op == op::UNMAP),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Makes zeros, which need take no room if they `may_unmap`.
    ///
    /// Requests in the same clusters are not carried out meanwhile: if the rest of a cluster has zeros already, the library
    /// makes all of it zeros, and a write to the rest that comes between would be lost.
    fn make_zeros(&self, at: u64, length: u64, may_unmap: bool) -> io::Result<()> {
        let first = at - at % self.cluster;
        let end = (at + length).next_multiple_of(self.cluster);
        let _claim = self.claims.claim(first, end - first, true);
        let done = if may_unmap {
            // SAFETY: nobody else reads or writes in this range, so nobody has found out where its data is and still goes there.
            unsafe { self.access.discard_to_zero_unsafe(at, length) }
        } else {
            self.access.write_zeroes(at, length)
        };
        done.or_else(|_| self.zero(at, length))
    }

    /// Zeros for images that have none of their own (version 2).
    fn zero(&self, mut at: u64, length: u64) -> io::Result<()> {
        let zeros = vec![0; MOST_BYTES.min(length as usize)];
        let end = at + length;
        while at < end {
            let now = zeros.len().min((end - at) as usize);
            self.access.write(&zeros[..now], at)?;
            at += now as u64;
        }
        Ok(())
    }

    /// Says once that something fails; the guest gets an error each time.
    fn tell(&self, error: &io::Error) {
        if !self.has_told.swap(true, Relaxed) {
            let cause = Cause::new(error.raw_os_error(), error);
            eprintln!("parador: a qcow2 image: {cause}");
        }
    }
}

/// Ranges of the disk that requests are at work in. Others wait for who gives clusters up there, and it for them: where data has been
/// may be other data, or a table, at once.
#[derive(Default)]
struct Claims {
    /// First byte, the one behind the last, whether it is for one alone.
    held: Mutex<Vec<(u64, u64, bool)>>,
    left: Condvar,
}

impl Claims {
    fn held(&self) -> MutexGuard<'_, Vec<(u64, u64, bool)>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for those that do not go together with this one.
    fn claim(&self, at: u64, length: u64, alone: bool) -> Claim<'_> {
        let range = (at, at + length, alone);
        let meets =
            |other: &(u64, u64, bool)| other.0 < range.1 && range.0 < other.1 && (alone || other.2);
        let held = self.left.wait_while(self.held(), |held| held.iter().any(meets));
        held.unwrap_or_else(PoisonError::into_inner).push(range);
        Claim(self, range)
    }
}

/// A range, until it is dropped.
struct Claim<'a>(&'a Claims, (u64, u64, bool));

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut held = self.0.held();
        if let Some(place) = held.iter().position(|range| *range == self.1) {
            held.swap_remove(place);
        }
        drop(held);
        self.0.left.notify_all();
    }
}

impl<S: Storage + 'static> Serve for Disk<S> {
    fn act(&self, taken: &Taken<'_>) -> u8 {
        match self.carry_out(taken) {
            Ok(()) => status::DONE,
            Err(error) if error.kind() == io::ErrorKind::Unsupported => status::UNSUPPORTED,
            // The guest's own nonsense.
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => status::FAILED,
            Err(error) => {
                self.tell(&error);
                status::FAILED
            }
        }
    }

    fn idle(&self) {
        if !self.image.read_only
            && let Err(error) = self.access.flush()
        {
            self.tell(&error);
        }
    }

    /// Requests that are still being carried out may change the image: it stays marked.
    fn close(&self, is_settled: bool) {
        if self.image.read_only {
            return;
        }
        let flush = || self.access.flush().and_then(|()| self.access.sync());
        let done = self.marking.close(is_settled, flush);
        if let Err(error) = done {
            self.tell(&error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::refcounts::{Found, Header};
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

    /// An image with something at its beginning.
    fn image() -> (tempfile::NamedTempFile, Vec<u8>) {
        let place = tempfile::NamedTempFile::new().unwrap();
        let options = || StorageOpenOptions::new().write(true);
        let file = File::from_open_file(place.reopen().unwrap(), options()).unwrap();
        let builder: Qcow2CreateBuilder<File> = Qcow2::<File>::create_builder(file);
        builder.size(SECTORS * SECTOR).create().unwrap();
        let disk = open(&place).unwrap();
        disk.access.write(&vec![7; 5000], 512).unwrap();
        drop(disk);
        let bytes = fs::read(place.path()).unwrap();
        (place, bytes)
    }

    fn open(place: &tempfile::NamedTempFile) -> Result<Disk, Failed> {
        let file = fs::OpenOptions::new().read(true).write(true).open(place.path()).unwrap();
        Disk::open(file, Image { read_only: false, sectors: SECTORS })
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
        let other = Image { read_only: true, sectors: SECTORS + 1 };
        let failed = Disk::open(place.reopen().unwrap(), other).map(drop).unwrap_err();
        assert!(failed.to_string().contains("size has changed"));
    }

    /// A file whose next read, or wait for the disk, takes until it is let go.
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
            // SAFETY: what the caller warrants.
            unsafe { self.file.pure_readv(to, offset) }
        }

        unsafe fn pure_writev(&self, from: IoVector<'_>, offset: u64) -> io::Result<()> {
            self.hold(WRITE);
            // SAFETY: what the caller warrants.
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
            // SAFETY: what the caller warrants.
            unsafe { self.file.invalidate_cache() }
        }

        fn get_storage_helper(&self) -> &CommonStorageHelper {
            self.file.get_storage_helper()
        }
    }

    /// A disk on such a file: what is held up next, whether the next sync fails, what says that something is held up, and what
    /// lets it go.
    struct SlowDisk {
        disk: Disk<Slow>,
        holds: Arc<AtomicU8>,
        fails: Arc<AtomicBool>,
        begins: Receiver<()>,
        go: Sender<()>,
    }

    fn slow() -> SlowDisk {
        let (place, _) = image();
        let file = fs::OpenOptions::new().read(true).write(true).open(place.path()).unwrap();
        let file = File::from_open_file(file, StorageOpenOptions::new().write(true)).unwrap();
        let ((begun, begins), (go, gone)) = (channel(), channel());
        let holds = Arc::new(AtomicU8::new(0));
        let fails = Arc::new(AtomicBool::new(false));
        let (begun, gone) = (Mutex::new(begun), Mutex::new(gone));
        let slow = Slow { file, holds: holds.clone(), fails: fails.clone(), begun, go: gone };
        let disk = Disk::with(slow, Image { read_only: false, sectors: SECTORS }).unwrap();
        SlowDisk { disk, holds, fails, begins, go }
    }

    /// A flush that begins before another has failed does not end well after it: the host reports the error once.
    #[test]
    fn flushes_beside_one_that_fails() {
        let SlowDisk { disk, holds, fails, begins, go } = slow();
        let mut rig = Rig::new(disk, 2);
        holds.store(SYNC, SeqCst);
        fails.store(true, SeqCst);
        rig.give(0, op::FLUSH, 0, &[], 0);
        assert_eq!(begins.recv_timeout(LIMIT), Ok(()));
        rig.give(1, op::FLUSH, 0, &[], 0);
        std::thread::sleep(Duration::from_millis(50));
        go.send(()).unwrap();
        let mut both = [rig.ended(), rig.ended()];
        both.sort_unstable();
        assert_eq!(both, [(0, status::FAILED), (1, status::FAILED)]);
        rig.give(2, op::FLUSH, 0, &[], 0);
        assert_eq!(rig.ended(), (2, status::FAILED));
    }

    /// Zeros in a part of a cluster do not undo a write to another part that has not ended when they begin.
    #[test]
    fn zeros_beside_a_write() {
        for op in [op::ZERO, op::UNMAP] {
            let SlowDisk { disk, holds, begins, go, .. } = slow();
            let mut rig = Rig::new(disk, 2);
            rig.memory.write_slice(0, &[9; 4096]).unwrap();
            // In a cluster that has no data yet.
            rig.give(0, op::WRITE, 2048, &[(0, 4096)], 0);
            let written = rig.ended();
            holds.store(WRITE, SeqCst);
            rig.give(0, op::WRITE, 2048 + 128, &[(0, 4096)], 0);
            assert_eq!(begins.recv_timeout(LIMIT), Ok(()));
            rig.give(1, op, 2048 + 128 + 8, &[], 8);
            // Time to look at what the cluster has.
            std::thread::sleep(Duration::from_millis(100));
            go.send(()).unwrap();
            let mut both = [rig.ended(), rig.ended()];
            both.sort_unstable();
            assert_eq!((written, both), ((0, 0), [(0, 0), (1, 0)]));
            rig.give(2, op::READ, 2048 + 128, &[(8192, 8192)], 0);
            assert_eq!(rig.ended(), (2, status::DONE));
            let mut bytes = [1; 8192];
            rig.memory.read_slice(8192, &mut bytes).unwrap();
            assert!(bytes[..4096] == [9; 4096] && bytes[4096..] == [0; 4096]);
        }
    }

    #[test]
    fn a_slow_host_holds_nothing_else_up() {
        let SlowDisk { disk, holds, begins, go, .. } = slow();
        let mut rig = Rig::new(disk, 4);
        let done = |id: u16| (id, status::DONE);
        let part = |id: u64| [(id << 13, 4096)];
        // The tables are there already.
        rig.give(0, op::READ, 0, &part(0), 0);
        assert_eq!(rig.ended(), done(0));

        holds.store(READ, SeqCst);
        rig.give(1, op::READ, 1, &part(1), 0);
        assert_eq!(begins.recv_timeout(LIMIT), Ok(()));
        rig.give(2, op::READ, 1, &part(2), 0);
        assert_eq!(rig.ended(), done(2));
        // Where there is room, and where there is none yet; what is to last, what is given up elsewhere.
        for (id, op, sector) in [(3, op::WRITE, 8), (4, op::WRITE, 3000), (5, op::FLUSH, 0)] {
            rig.give(id, op, sector, &part(2), 0);
            assert_eq!(rig.ended(), done(id));
        }
        rig.give(6, op::UNMAP, 2048, &[], 2048);
        assert_eq!(rig.ended(), done(6));
        // What is being read is not given up.
        rig.give(7, op::UNMAP, 0, &[], 2048);
        rig.give(8, op::READ, 2100, &part(8), 0);
        assert_eq!(rig.ended(), done(8));
        assert!(rig.client.completed().is_none());
        go.send(()).unwrap();
        let mut both = [rig.ended(), rig.ended()];
        both.sort_unstable();
        assert_eq!(both, [done(1), done(7)]);

        holds.store(SYNC, SeqCst);
        rig.give(9, op::FLUSH, 0, &[], 0);
        assert_eq!(begins.recv_timeout(LIMIT), Ok(()));
        for (id, op) in [(10, op::WRITE), (11, op::READ), (12, op::DISCARD)] {
            let part = part(1);
            rig.give(id, op, 0, if op == op::DISCARD { &[] } else { &part }, 8);
            assert_eq!(rig.ended(), done(id));
        }
        go.send(()).unwrap();
        assert_eq!(rig.ended(), done(9));
        // What was read while it waited.
        let mut bytes = [0; 4096];
        rig.memory.read_slice(1 << 13, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 4096]);
    }

    /// Threads that write each its own, beside flushes and what gives clusters up; the image is whole then.
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
                                let _claim = disk.claims.claim(start + at, length, true);
                                // SAFETY: nobody else is in this thread's part.
                                let done = unsafe {
                                    disk.access.discard_to_zero_unsafe(start + at, length)
                                };
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
        for (at, bytes) in [(table, &[0; 8][..]), (block, &[0; 2]), (48, &[0xff; 8]), (48, &[0x7f])]
        {
            fs::write(place.path(), &good).unwrap();
            assert!(open(&place).is_ok());
            place.as_file().write_all_at(bytes, at).unwrap();
            let failed = open(&place).map(drop).unwrap_err().to_string();
            let is_said = failed.contains("counts its own header as free");
            assert!(is_said || failed.contains("Invalid argument"), "{failed}");
        }
    }

    /// An image that is being written to says so in its header; one that was not closed is repaired.
    #[test]
    fn an_image_is_marked_until_it_is_closed() {
        let (place, _) = image();
        let is_dirty = || Header::read(place.as_file()).unwrap().is_dirty();
        let mut rig = Rig::new(open(&place).unwrap(), 1);
        let mut act = |op| {
            rig.give(0, op, 64, &[(0, 4096)], 8);
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
        // A cluster far behind those in use is counted, and the L2 table is not.
        let table = read_number(killed.as_file(), 48);
        let block = read_number(killed.as_file(), table);
        let l2 = read_number(killed.as_file(), read_number(killed.as_file(), 40)) << 1 >> 1;
        killed.as_file().write_all_at(&[0, 1], block + 2000).unwrap();
        killed.as_file().write_all_at(&[0, 0], block + (l2 >> 16) * 2).unwrap();
        let before = fs::read(killed.path()).unwrap();
        assert_eq!(header.check(killed.as_file()).unwrap(), Found { leaked: 1, missing: 1 });
        let reader = Image { read_only: true, sectors: SECTORS };
        let disk = Disk::open(killed.reopen().unwrap(), reader).unwrap();
        let mut bytes = vec![0; 5000];
        disk.access.read(&mut bytes, 512).unwrap();
        assert_eq!(bytes, [7; 5000]);
        drop(disk);
        assert!(fs::read(killed.path()).unwrap() == before, "a reader changes nothing");
        let disk = open(&killed).unwrap();
        assert_eq!(header.check(killed.as_file()).unwrap(), Found::default());
        // It stays marked until it is closed, also if nothing is written.
        assert!(Header::read(killed.as_file()).unwrap().is_dirty());
        disk.close(true);
        assert!(!Header::read(killed.as_file()).unwrap().is_dirty());
        assert!(disk.marking.begin_change().is_err());

        // The L1 table in the place of the L2 table cannot be repaired.
        fs::write(killed.path(), before).unwrap();
        let l1 = read_number(killed.as_file(), 40);
        killed.as_file().write_all_at(&l1.to_be_bytes(), l1).unwrap();
        let failed = open(&killed).map(drop).unwrap_err().to_string();
        assert!(failed.contains("in use twice") && failed.contains(refcounts::COMMAND), "{failed}");

        rig.watch(&AtomicBool::new(true));
        assert!(!is_dirty());
        assert_eq!(
            Header::read(place.as_file()).unwrap().check(place.as_file()).unwrap(),
            Found::default()
        );
    }

    fn read_number(file: &fs::File, at: u64) -> u64 {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    }

    /// Of an image that may still be written to nobody says that it is closed.
    #[test]
    fn an_image_with_requests_stays_marked() {
        let (place, _) = image();
        let disk = open(&place).unwrap();
        disk.marking.begin_change().unwrap();
        disk.close(false);
        assert!(Header::read(place.as_file()).unwrap().is_dirty());
    }

    /// Whatever is in a file, to use it is an error or works; the process goes on.
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
            // Some have not been closed, as their header says.
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
}
