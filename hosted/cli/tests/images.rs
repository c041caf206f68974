//! The process of a qcow2 image, killed at any time: flushed data is in the image, in which QEMU
//! finds leaked clusters at most. Needs `qemu-img`.

use command_fds::{CommandFdExt, FdMapping};
use hosted_devices::testing::{Driver, Session};
use proto::hosted::layout;
use proto::requests::{op, status};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const GUEST: u64 = 64 << 20;
const LIMIT: Duration = Duration::from_secs(60);
const SECTOR: u64 = 512;
/// Bytes that are written and compared together.
const BLOCK: u64 = 4096;
/// Most blocks of a request, whose data is in guest memory from its number times this on.
const MOST: u64 = 16;
/// Requests at a time.
const REQUESTS: u16 = 16;
/// Seconds that tests of the load may last; there is no such variable in short runs.
const STRESS: &str = "PARADOR_STRESS_SECONDS";
/// Kills at random: of a short run, of a long one.
const KILLS: (usize, usize) = (100, 2000);

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % limit
    }
}

/// Creates an image of `bytes` bytes; `options` are those of `qemu-img create -o`.
fn create(path: &Path, options: &str, bytes: u64) {
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2", "-o", options]).arg(path).arg(bytes.to_string());
    assert!(command.status().unwrap().success());
}

/// Returns whether QEMU finds leaked clusters; any other finding fails.
fn has_leaks(path: &Path, what: &str) -> bool {
    let output = Command::new("qemu-img").arg("check").arg(path).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    match output.status.code() {
        Some(0) => false,
        Some(3) => true,
        code => panic!("{what}: {code:?}\n{said}\n{}", String::from_utf8_lossy(&output.stderr)),
    }
}

/// The process of an image. Dropping it kills it.
struct Process<'a> {
    child: Child,
    session: Session<'a>,
}

impl Drop for Process<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl<'a> Process<'a> {
    /// Starts the process for an image of this size and waits until it serves.
    fn start(driver: &'a mut Driver, path: &Path, bytes: u64) -> Self {
        // Each start after a kill says that the image is repaired.
        Self::start_with(driver, path, bytes, "text", Stdio::null())
    }

    /// Does the same; its messages have this format.
    fn start_with(
        driver: &'a mut Driver,
        path: &Path,
        bytes: u64,
        format: &str,
        messages: Stdio,
    ) -> Self {
        let image = File::options().read(true).write(true).open(path).unwrap();
        let (memory, sectors) = (driver.memory().to_string(), (bytes / SECTOR).to_string());
        let session = driver.session().unwrap();
        let memories = session.driver.descriptors().map(|(descriptor, number)| FdMapping {
            parent_fd: descriptor.try_clone_to_owned().unwrap(),
            child_fd: number as i32,
        });
        let image = FdMapping { parent_fd: image.into(), child_fd: layout::DISKS_FD as i32 };
        let mut command = Command::new(env!("CARGO_BIN_EXE_parador"));
        command
            .args(["--device", format, "image", &memory, "0", "false", &sectors, "none"])
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(messages)
            .fd_mappings(memories.into_iter().chain([image]).collect())
            .unwrap();
        let mut child = command.spawn().unwrap();
        let mut said = [1];
        let mut output = child.stdout.take().unwrap();
        output.read_exact(&mut said).unwrap();
        if said != [hosted_devices::READY] {
            let mut text = String::from_utf8_lossy(&said).into_owned();
            output.read_to_string(&mut text).unwrap();
            panic!("{}: {text}", path.display());
        }
        Self { child, session }
    }

    /// Carries a request of these blocks out, alone.
    fn act(&mut self, op: u32, block: u64, blocks: u64) {
        let part = (blocks != 0).then_some((0, (blocks * BLOCK) as u32));
        self.session.submit(0, op, block * BLOCK / SECTOR, part, 0);
        assert_eq!(self.session.completed(LIMIT), Some((0, status::DONE)));
    }

    fn write(&mut self, block: u64, value: u32) {
        self.session.driver.guest().write_all_at(&filled(value, 1), 0).unwrap();
        self.act(op::WRITE, block, 1);
    }

    /// The value that a block has, which is the same all over it.
    fn read(&mut self, block: u64) -> u32 {
        self.act(op::READ, block, 1);
        let mut bytes = vec![0; BLOCK as usize];
        self.session.driver.guest().read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes[4..], bytes[..bytes.len() - 4], "block {block} is torn");
        u32::from_le_bytes([0, 1, 2, 3].map(|at| bytes[at]))
    }

    /// Ends it in order.
    fn end(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

fn filled(value: u32, blocks: u64) -> Vec<u8> {
    value.to_le_bytes().repeat((blocks * BLOCK / 4) as usize)
}

/// Each write needs an L2 table of its own; the process is killed after each of the first ten.
#[test]
fn killed_after_each_of_the_first_writes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let mut driver = Driver::new(GUEST).unwrap();
    for (options, bytes, table) in [
        ("compat=1.1,cluster_size=64k", 8 << 30, 512 << 20),
        ("compat=1.1,cluster_size=4k", 64 << 20, 2 << 20),
        ("compat=0.10,cluster_size=64k", 8 << 30, 512 << 20),
    ] {
        for writes in 1..=10 {
            create(&path, options, bytes);
            let mut process = Process::start(&mut driver, &path, bytes);
            (0..writes).for_each(|number| process.write(number * table / BLOCK, 1));
            drop(process);
            let what = format!("{options}, killed after {writes} writes");
            has_leaks(&path, &what);

            // What is written and flushed now is there the next time.
            let mut process = Process::start(&mut driver, &path, bytes);
            (0..32).for_each(|number| process.write(16 * number, 100 + number as u32));
            process.act(op::FLUSH, 0, 0);
            process.end();
            let is_old = options.contains("0.10");
            assert!(!has_leaks(&path, &what) || is_old, "{what}: it has not been repaired");
            let mut process = Process::start(&mut driver, &path, bytes);
            for number in 0..32 {
                assert_eq!(process.read(16 * number), 100 + number as u32, "{what}");
            }
        }
    }
}

/// The repair of an image is reported in the format of the VM's other messages.
#[test]
fn repairs_are_reported_in_both_formats() {
    const BYTES: u64 = 64 << 20;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let mut driver = Driver::new(GUEST).unwrap();
    create(&path, "compat=1.1", BYTES);
    Process::start(&mut driver, &path, BYTES).write(0, 1);
    let mut report = |format: &str| {
        let (driver, errors) = (&mut driver, Stdio::piped());
        let mut process = Process::start_with(driver, &path, BYTES, format, errors);
        let mut messages = process.child.stderr.take().unwrap();
        // It is killed, so the image stays dirty.
        drop(process);
        let mut text = String::new();
        messages.read_to_string(&mut text).unwrap();
        text
    };
    let text = report("text");
    assert!(text.starts_with("parador: a qcow2 image was not closed; "), "{text}");
    let json = report("json");
    let record: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&record["level"], &record["source"]), (&"warn".into(), &"disk".into()));
    let message = record["message"].as_str().unwrap();
    assert!(message.starts_with("a qcow2 image was not closed; "), "{message}");
}

/// The values that a block may have.
#[derive(Default)]
struct Block {
    /// Value at the start of the process.
    known: u32,
    /// Values written since.
    written: Vec<u32>,
    /// The first of these that have been flushed.
    flushed: usize,
}

impl Block {
    /// Those that it may have after a kill: the last that was flushed, and what was written later.
    fn allowed(&self) -> Vec<u32> {
        let known = if self.flushed == 0 { Some(self.known) } else { None };
        known.into_iter().chain(self.written[self.flushed.saturating_sub(1)..].to_vec()).collect()
    }
}

/// The blocks of an image that were ever written.
#[derive(Default)]
struct Blocks {
    values: BTreeMap<u64, Block>,
    /// Requests in progress: operation and blocks; for a flush, the number of writes of each block.
    under_way: BTreeMap<u16, (u32, u64, u64, BTreeMap<u64, usize>)>,
    written: u32,
}

impl Blocks {
    fn is_busy(&self, block: u64, blocks: u64) -> bool {
        let meets = |first: u64, count: u64| first < block + blocks && block < first + count;
        self.under_way.values().any(|(_, first, count, _)| meets(*first, *count))
    }

    /// Begins a request at random, if there is a number for it.
    fn begin(&mut self, session: &mut Session<'_>, random: &mut Random, blocks: u64) {
        let free = (0..REQUESTS).find(|id| !self.under_way.contains_key(id));
        let op = match random.below(20) {
            0 => op::FLUSH,
            1 => op::UNMAP,
            2 => op::ZERO,
            _ => op::WRITE,
        };
        let count = if op == op::FLUSH { 0 } else { 1 + random.below(MOST) };
        let first = random.below(blocks - count);
        let Some(id) = free.filter(|_| !self.is_busy(first, count)) else { return };
        let mut flushes = BTreeMap::new();
        if op == op::FLUSH {
            // Of a block that is being written to, the last write is not done yet.
            flushes.extend(self.values.iter().map(|(number, block)| {
                (*number, block.written.len() - usize::from(self.is_busy(*number, 1)))
            }));
        }
        self.written += 1;
        let value = if op == op::WRITE { self.written } else { 0 };
        for block in first..first + count {
            self.values.entry(block).or_default().written.push(value);
        }
        let at = u64::from(id) * MOST * BLOCK;
        let part = (op == op::WRITE).then_some((at, (count * BLOCK) as u32));
        session.driver.guest().write_all_at(&filled(value, count), at).unwrap();
        let sectors = if part.is_none() { count * BLOCK / SECTOR } else { 0 };
        self.under_way.insert(id, (op, first, count, flushes));
        session.submit(id, op, first * BLOCK / SECTOR, part, sectors as u32);
    }

    /// A request has ended.
    fn end(&mut self, (id, status): (u16, u8)) {
        assert_eq!(status, status::DONE);
        let (_, _, _, flushes) = self.under_way.remove(&id).unwrap();
        for (number, writes) in flushes {
            let block = self.values.get_mut(&number).unwrap();
            // A flush that began later may have ended before.
            block.flushed = block.flushed.max(writes);
        }
    }

    /// Compares all blocks after a kill; they are what is known then.
    fn check(&mut self, process: &mut Process<'_>, what: &str) {
        self.under_way.clear();
        for (number, block) in &mut self.values {
            let (value, allowed) = (process.read(*number), block.allowed());
            assert!(allowed.contains(&value), "{what}: block {number}: {value}, not {allowed:?}");
            *block = Block { known: value, ..Block::default() };
        }
    }
}

/// Several requests at a time, and a kill at random.
#[test]
fn killed_at_random() {
    let kills = if std::env::var_os(STRESS).is_some() { KILLS.1 } else { KILLS.0 };
    const BYTES: u64 = 64 << 20;
    const OPTIONS: [&str; 3] = [
        "compat=1.1,cluster_size=64k",
        "compat=1.1,cluster_size=4k",
        "compat=0.10,cluster_size=4k",
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let mut driver = Driver::new(GUEST).unwrap();
    let mut random = Random(1);
    let mut blocks = Blocks::default();
    let (mut leaks, mut flushes, mut requests) = (0, 0, 0);
    for kill in 0..kills {
        // Where much is allocated there is most to go wrong.
        let options = OPTIONS[kill / 5 % OPTIONS.len()];
        if kill % 5 == 0 {
            create(&path, options, BYTES);
            blocks = Blocks::default();
        }
        let mut process = Process::start(&mut driver, &path, BYTES);
        let what = format!("{options}, kill {kill}");
        blocks.check(&mut process, &what);
        for _ in 0..random.below(300) {
            blocks.begin(&mut process.session, &mut random, BYTES / BLOCK);
            let wait = if random.below(4) == 0 { LIMIT } else { Duration::ZERO };
            requests += 1;
            if !blocks.under_way.is_empty()
                && let Some(ended) = process.session.completed(wait)
            {
                flushes += u32::from(blocks.under_way[&ended.0].0 == op::FLUSH);
                blocks.end(ended);
            }
        }
        drop(process);
        leaks += usize::from(has_leaks(&path, &what));
    }
    println!("{kills} kills, {requests} requests, {flushes} flushes; {leaks} times lost clusters");
    assert!(flushes != 0 && leaks != 0, "the kills have shown nothing");
}
