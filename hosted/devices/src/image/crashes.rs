//! Images after the process is killed or the host loses power at any moment: a storage that logs
//! all writes reproduces the file at that moment.

use super::refcounts::{CheckResult, Header, Medium};
use super::{Disk, ImageConfig, SECTOR};
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::qcow2::{Qcow2, Qcow2CreateBuilder};
use imago::storage::drivers::CommonStorageHelper;
use imago::{FormatCreateBuilder, Storage};
use std::cell::RefCell;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Events on a file.
#[derive(Debug)]
enum Event {
    Write(u64, Vec<u8>),
    /// All earlier events are on disk.
    Synced(usize),
}

/// Contents of a file.
#[derive(Clone, Default, Debug)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn write(&mut self, at: u64, from: &[u8]) {
        let (at, end) = (at as usize, at as usize + from.len());
        if self.0.len() < end {
            self.0.resize(end, 0);
        }
        self.0[at..end].copy_from_slice(from);
    }

    fn read(&self, at: u64, to: &mut [u8]) {
        to.fill(0);
        let rest = self.0.get(at as usize..).unwrap_or_default();
        let length = rest.len().min(to.len());
        to[..length].copy_from_slice(&rest[..length]);
    }
}

impl Medium for RefCell<Bytes> {
    fn length(&self) -> io::Result<u64> {
        Ok(self.borrow().0.len() as u64)
    }

    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        self.borrow().read(at, to);
        Ok(())
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.borrow_mut().write(at, from);
        Ok(())
    }
}

/// A file and its log.
#[derive(Default, Debug)]
struct Log {
    bytes: Bytes,
    events: Vec<Event>,
    /// Number of syncs that succeed before all fail.
    syncs: Option<usize>,
}

/// Storage of an image.
#[derive(Clone, Default, Debug)]
struct Recorder(Arc<Mutex<Log>>, Arc<CommonStorageHelper>);

impl Recorder {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of(bytes: Bytes) -> Self {
        let recorder = Self::default();
        recorder.log().bytes = bytes;
        recorder
    }

    /// Returns the number of events so far.
    fn now(&self) -> usize {
        self.log().events.len()
    }
}

impl fmt::Display for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a recorder")
    }
}

impl Storage for Recorder {
    fn size(&self) -> io::Result<u64> {
        Ok(self.log().bytes.0.len() as u64)
    }

    unsafe fn pure_readv(&self, mut to: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        let mut bytes = vec![0; to.len() as usize];
        self.log().bytes.read(offset, &mut bytes);
        to.copy_from_slice(&bytes);
        Ok(())
    }

    unsafe fn pure_writev(&self, from: IoVector<'_>, offset: u64) -> io::Result<()> {
        let mut bytes = vec![0; from.len() as usize];
        from.copy_into_slice(&mut bytes);
        let mut log = self.log();
        log.bytes.write(offset, &bytes);
        log.events.push(Event::Write(offset, bytes));
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let before = self.now();
        // Other threads write meanwhile.
        std::thread::yield_now();
        let mut log = self.log();
        if let Some(left) = log.syncs {
            log.syncs = Some(left.checked_sub(1).ok_or(io::ErrorKind::StorageFull)?);
        }
        log.events.push(Event::Synced(before));
        Ok(())
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.1
    }
}

/// Pseudo-random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % limit
    }
}

/// A kind of image: bytes per cluster, bits per count, sectors of the disk.
type Shape = (usize, usize, u64);

/// Images in which tables of each kind are allocated often, and the table of refcount blocks grows,
/// too.
const SHAPES: [Shape; 3] = [(512, 64, 4500), (4096, 16, 9000), (65536, 16, 4096)];

/// Creates an image without data, and its log.
fn image((cluster, width, sectors): Shape) -> (Recorder, Disk<Recorder>) {
    let recorder = Recorder::default();
    let builder: Qcow2CreateBuilder<Recorder> = Qcow2::<Recorder>::create_builder(recorder.clone());
    let builder = builder.cluster_size(cluster).refcount_width(width).size(sectors * SECTOR);
    builder.create().unwrap();
    let disk = open(&recorder, sectors, false);
    disk.access.sync().unwrap();
    (recorder, disk)
}

fn open(recorder: &Recorder, sectors: u64, read_only: bool) -> Disk<Recorder> {
    Disk::with(recorder.clone(), None, ImageConfig { base: None, read_only, sectors }).unwrap()
}

/// Operations on an image.
#[derive(Default)]
struct History {
    /// For each write: its events, its sectors, and their values after it (0: zeros).
    writes: Vec<(Range<usize>, Range<u64>, u32)>,
    /// Events of each flush.
    flushes: Vec<Range<usize>>,
}

fn sector(value: u32) -> [u8; SECTOR as usize] {
    let bytes = value.to_le_bytes();
    std::array::from_fn(|at| bytes[at % 4])
}

impl History {
    /// Performs a random operation on these sectors.
    fn execute(
        &mut self,
        disk: &Disk<Recorder>,
        recorder: &Recorder,
        random: &mut Random,
        sectors: &Range<u64>,
    ) {
        let before = recorder.now();
        let value = self.writes.len() as u32 + 1;
        let most = if random.below(8) == 0 { 300 } else { 40 };
        let length = 1 + random.below(most);
        let first = sectors.start + random.below(sectors.end - sectors.start - length);
        let (at, bytes) = (first * SECTOR, length * SECTOR);
        let value = match random.below(16) {
            0 => {
                disk.access.flush().and_then(|()| disk.access.sync()).unwrap();
                self.flushes.push(before..recorder.now());
                return;
            }
            1 => return disk.access.flush().unwrap(),
            2 | 3 => {
                let _claim = disk.claims.lock(at, bytes, true);
                // SAFETY: no other request uses these sectors.
                unsafe { disk.access.discard_to_zero_unsafe(at, bytes) }.unwrap();
                0
            }
            4 => {
                disk.access.write_zeroes(at, bytes).unwrap();
                0
            }
            _ => {
                let data: Vec<u8> = (0..length).flat_map(|_| sector(value)).collect();
                disk.access.write(&data, at).unwrap();
                value
            }
        };
        self.writes.push((before..recorder.now(), first..first + length, value));
    }

    /// Asserts that each sector has its flushed value or a later one after this number of events.
    fn check(&self, disk: &Disk<Recorder>, events: usize, sectors: &Range<u64>) {
        let flushed =
            self.flushes.iter().filter(|flush| flush.end <= events).map(|flush| flush.start);
        let flushed = flushed.max().unwrap_or(0);
        let mut allowed = vec![vec![0]; (sectors.end - sectors.start) as usize];
        for (during, range, value) in &self.writes {
            for sector in range.clone() {
                let allowed = &mut allowed[(sector - sectors.start) as usize];
                if during.end <= flushed {
                    allowed.clear();
                }
                if during.start <= events {
                    allowed.push(*value);
                }
            }
        }
        let mut bytes = vec![0; allowed.len() * SECTOR as usize];
        disk.access.read(&mut bytes, sectors.start * SECTOR).unwrap();
        for (index, (bytes, allowed)) in bytes.chunks(SECTOR as usize).zip(allowed).enumerate() {
            let value = u32::from_le_bytes([0, 1, 2, 3].map(|at| bytes[at]));
            let is_one = bytes[4..] == bytes[..bytes.len() - 4];
            let is_right = is_one && allowed.contains(&value);
            assert!(is_right, "sector {index} after {events} events: {value}, not {allowed:?}");
        }
    }
}

/// Checks the tables of an image: only leaks are acceptable.
fn check(medium: &RefCell<Bytes>, what: fmt::Arguments<'_>) -> CheckResult {
    let header = Header::read(medium).unwrap();
    let found = header.check(medium).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(found.missing, 0, "{what}");
    found
}

/// Checks the file after a kill at each event.
#[test]
fn killed_anywhere() {
    for (number, shape) in SHAPES.into_iter().enumerate() {
        let ((recorder, disk), sectors) = (image(shape), 0..shape.2);
        let (start, file) = (recorder.now(), RefCell::new(recorder.log().bytes.clone()));
        let (mut history, mut random) = (History::default(), Random(number as u64 + 1));
        for _ in 0..600 {
            history.execute(&disk, &recorder, &mut random, &sectors);
        }
        let log = recorder.log();
        assert!(log.events.len() > 600 && history.flushes.len() > 10);
        // With the smallest clusters, the table of refcount blocks has been moved.
        assert!(number != 0 || log.bytes.0.len() > 2 << 20);
        for (index, event) in log.events.iter().enumerate().skip(start) {
            let Event::Write(at, data) = event else { continue };
            file.borrow_mut().write(*at, data);
            let events = index + 1;
            check(&file, format_args!("{shape:?}, killed after {events} events"));
            if events % 8 == 0 {
                let recorder = Recorder::of(file.borrow().clone());
                history.check(&open(&recorder, shape.2, true), events, &sectors);
            }
        }
    }
}

/// Returns the file after a power loss at this event: any subset of the unsynced sectors is on
/// disk.
fn after_power_loss(events: &[Event], random: &mut Random) -> Bytes {
    let synced = events.iter().map(|event| match event {
        Event::Synced(before) => *before,
        Event::Write(..) => 0,
    });
    let synced = synced.max().unwrap_or(0);
    let mut bytes = Bytes::default();
    let share = random.below(5);
    for (index, event) in events.iter().enumerate() {
        let Event::Write(at, data) = event else { continue };
        if index < synced {
            bytes.write(*at, data);
            continue;
        }
        let mut done = 0;
        while done < data.len() {
            // Sector writes are atomic.
            let length = SECTOR as usize - (*at as usize + done) % SECTOR as usize;
            let length = length.min(data.len() - done);
            if random.below(4) < share {
                bytes.write(at + done as u64, &data[done..done + length]);
            }
            done += length;
        }
    }
    bytes
}

#[test]
fn power_lost_anywhere() {
    for (number, shape) in SHAPES.into_iter().enumerate() {
        let ((recorder, disk), sectors) = (image(shape), 0..shape.2);
        let mut random = Random(number as u64 + 77);
        let mut history = History::default();
        for _ in 0..600 {
            history.execute(&disk, &recorder, &mut random, &sectors);
        }
        let log = recorder.log();
        let is_header = |event: &Event| matches!(event, Event::Write(0, _));
        let moved = log.events[start_of(&history)..].iter().filter(|event| is_header(event));
        assert!(number != 0 || moved.count() != 0, "the table of refcount blocks has been moved");
        // Random moments, and those at which the header has changed.
        let moments = log.events.iter().zip(1..).flat_map(|(event, events)| match event {
            event if is_header(event) => [events; 30].to_vec(),
            _ => [events; 1][..usize::from(random.below(6) == 0)].to_vec(),
        });
        for events in moments.collect::<Vec<_>>() {
            let bytes = after_power_loss(&log.events[..events], &mut random);
            // The image did not exist yet.
            if events <= start_of(&history) {
                continue;
            }
            let bytes = RefCell::new(bytes);
            check(&bytes, format_args!("{shape:?}, power lost after {events} events"));
            let bytes = bytes.into_inner();
            let crashed = Recorder::of(bytes.clone());
            history.check(&open(&crashed, shape.2, true), events, &sectors);
            if events % 16 == 0 {
                second_life(bytes, &history, events, shape);
            }
        }
    }
}

/// Returns the number of events before the first write.
fn start_of(history: &History) -> usize {
    history.writes.first().map_or(0, |write| write.0.start)
}

/// Rebuilds the counts; later writes are then readable in addition to the earlier data.
fn second_life(bytes: Bytes, history: &History, events: usize, shape: Shape) {
    let medium = RefCell::new(bytes);
    let header = Header::read(&medium).unwrap();
    header.rebuild(&medium).unwrap();
    assert_eq!(header.check(&medium).unwrap(), CheckResult::default());
    let recorder = Recorder::of(medium.into_inner());
    let disk = open(&recorder, shape.2, false);
    let half = shape.2 / 2;
    let data: Vec<u8> = (0..half).flat_map(|_| sector(u32::MAX)).collect();
    disk.access.write(&data, 0).unwrap();
    disk.access.flush().unwrap();
    let mut read = vec![0; data.len()];
    disk.access.read(&mut read, 0).unwrap();
    assert!(read == data);
    let rest = half..shape.2;
    let beyond = history.writes.iter().map(|(during, range, value)| {
        (during.clone(), range.start.max(half)..range.end.max(half), *value)
    });
    let beyond = History { writes: beyond.collect(), flushes: history.flushes.clone() };
    beyond.check(&disk, events, &rest);
    let file = RefCell::new(recorder.log().bytes.clone());
    assert_eq!(check(&file, format_args!("a second life")), CheckResult::default());
}

/// Threads that each write their own part, concurrently with flushes.
#[test]
fn several_at_a_time() {
    let shape = (4096, 16, 12000);
    let (recorder, disk) = image(shape);
    let each = shape.2 / 4;
    let histories: Vec<_> = std::thread::scope(|scope| {
        let threads = (0..4).map(|thread| {
            let (disk, recorder) = (&disk, &recorder);
            scope.spawn(move || {
                let (mut history, mut random) = (History::default(), Random(thread + 5));
                let sectors = thread * each..(thread + 1) * each;
                for _ in 0..200 {
                    history.execute(disk, recorder, &mut random, &sectors);
                }
                (history, sectors)
            })
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let log = recorder.log();
    let start = histories.iter().map(|(history, _)| start_of(history)).max().unwrap_or(0);
    let mut random = Random(3);
    for events in (start + 1..log.events.len()).step_by(7) {
        for killed in [true, false] {
            let bytes = match killed {
                true => before(&log.events[..events]),
                false => after_power_loss(&log.events[..events], &mut random),
            };
            let bytes = RefCell::new(bytes);
            check(&bytes, format_args!("killed: {killed}, after {events} events"));
            let disk = open(&Recorder::of(bytes.into_inner()), shape.2, true);
            histories.iter().for_each(|(history, sectors)| history.check(&disk, events, sectors));
        }
    }
}

/// Returns the file after these events.
fn before(events: &[Event]) -> Bytes {
    let mut bytes = Bytes::default();
    for event in events {
        if let Event::Write(at, data) = event {
            bytes.write(*at, data);
        }
    }
    bytes
}

/// After a failed sync, all later ones fail, and no table points to data that may not be on disk.
#[test]
fn a_failed_sync_is_the_last_word() {
    let shape = (4096, 16, 16384);
    for syncs in 0..12 {
        let ((recorder, disk), sectors) = (image(shape), 0..shape.2);
        disk.access.write(&sector(9)[..], 0).unwrap();
        disk.access.flush().and_then(|()| disk.access.sync()).unwrap();
        recorder.log().syncs = Some(syncs);
        let mut failed = None;
        for number in 0..64_u64 {
            // Each in another L2 table.
            let at = number * (2 << 20) % (sectors.end * SECTOR);
            let written = disk.access.write(&sector(number as u32)[..], at + number * 4096);
            let flushed = disk.access.flush().and_then(|()| disk.access.sync());
            match &failed {
                // The host's disk works again, but the lost data stays lost.
                Some(_) => assert!(flushed.is_err()),
                None if written.is_err() || flushed.is_err() => {
                    failed = Some(recorder.now());
                    recorder.log().syncs = None;
                    let again = disk.access.flush().and_then(|()| disk.access.sync());
                    assert!(again.is_err(), "{syncs} syncs");
                }
                None => {}
            }
        }
        assert!(failed.is_some());
        let mut random = Random(1);
        let events = &recorder.log().events;
        for _ in 0..20 {
            // No later sync reached the storage.
            let file = RefCell::new(after_power_loss(events, &mut random));
            check(&file, format_args!("after {syncs} syncs, then none"));
        }
    }
}
