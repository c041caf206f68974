//! Replaces a VMM: writes, reads and flushes its first disk with many requests in flight, and
//! compares all data read with the acknowledged writes. Command line: number of requests, seed.
//! Another check may kill the disk's server meanwhile.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use native_check::{Random, Report};
use native_rt::device::{Shared, sessions};
use native_rt::{Notification, info, time};
use proto::disk::{BUFFER, Buffer, Client, Operation, SECTOR, Status};
use proto::service::{Attachment, Service};
use proto::start::{Role, Start, event, slot};

/// Number of 4-KiB blocks used.
const BLOCKS: usize = 256;
/// Number of requests in flight.
const DEPTH: usize = 16;
const SECTORS: u32 = (BUFFER / SECTOR) as u32;
/// Time without any answer after which the check fails, in ns.
const ANSWER_TIMEOUT: u64 = 20_000_000_000;

native_rt::entry!(main);

/// Content of each block: the last acknowledged version; `None` during a write.
type Versions = [Option<u64>; BLOCKS];

#[derive(Clone, Copy)]
struct Job {
    operation: Operation,
    block: usize,
    version: u64,
    buffer: Option<Buffer>,
}

struct Check<'s> {
    start: &'s Start<'static>,
    memory: Shared,
    attachment: Attachment,
    client: Client<'static>,
    versions: Versions,
    busy: [bool; BLOCKS],
    jobs: [Option<Job>; DEPTH],
    answered: u64,
}

fn main(start: &Start<'static>) -> u64 {
    let mut report = Report::default();
    report.case("disk", check(start));
    report.exit_code()
}

fn check(start: &Start<'static>) -> Result<(), &'static str> {
    let Role::Vmm(plan) = &start.role else { return Err("the start page does not describe a VMM") };
    let mut words = plan.command_line.split_ascii_whitespace();
    let mut number = || words.next().and_then(|word| word.parse().ok());
    let (count, seed) = (number().unwrap_or(1000), number().unwrap_or(1));
    let pairs = plan.attachments.iter().zip(sessions(start));
    let disk = pairs.into_iter().find(|(attachment, _)| attachment.service == Service::Disk);
    let (&attachment, memory) = disk.ok_or("no disk")?;
    let client = Client::new(memory.words(), memory.window().length()).ok_or("no session")?;
    let mut check = Check {
        start,
        memory,
        attachment,
        client,
        versions: [None; BLOCKS],
        busy: [false; BLOCKS],
        jobs: [None; DEPTH],
        answered: 0,
    };
    check.run(count, seed)
}

impl Check<'_> {
    fn run(&mut self, count: u64, seed: u64) -> Result<(), &'static str> {
        let info = loop {
            self.collect()?;
            if let Some(info) = self.client.info() {
                break info;
            }
            self.wait()?;
        };
        info!("disk of {} sectors", info.sectors);
        if info.sectors < BLOCKS as u64 * u64::from(SECTORS) {
            return Err("the disk is too small");
        }
        let mut random = Random::new(seed);
        let mut submitted = 0;
        let begin = time::tsc();
        while self.answered < count {
            while submitted < count && self.submit(&mut random) {
                submitted += 1;
            }
            self.signal();
            if !self.collect()? {
                self.wait()?;
            }
        }
        let nanos = time::nanos(self.start.clock.tsc_khz, time::tsc() - begin);
        info!("{} requests, {} ns each", self.answered, nanos / count.max(1));
        self.verify_all()
    }

    fn submit(&mut self, random: &mut Random) -> bool {
        let Some(tag) = self.jobs.iter().position(Option::is_none) else { return false };
        let block = random.below(BLOCKS as u64) as usize;
        let operation = match random.below(16) {
            0 => Operation::Flush,
            // A block that was never written has unknown content.
            1..8 if self.versions[block].is_some() => Operation::Read,
            _ => Operation::Write,
        };
        self.begin(tag, operation, block, random.draw() >> 16)
    }

    fn begin(&mut self, tag: usize, operation: Operation, block: usize, version: u64) -> bool {
        if operation == Operation::Flush {
            let job = Job { operation, block, version, buffer: None };
            self.jobs[tag] = Some(job);
            return self.client.submit(operation, 0, 0, 0, tag as u64);
        }
        if self.busy[block] {
            return false;
        }
        let Some(buffer) = self.client.allocate(BUFFER) else { return false };
        let version = match operation {
            Operation::Write => version,
            _ => self.versions[block].unwrap_or(0),
        };
        if operation == Operation::Write {
            self.versions[block] = None;
            for (index, offset) in (0..BUFFER).step_by(8).enumerate() {
                let word = pattern(block, version, index as u64).to_le_bytes();
                if !self.memory.window().write(buffer.offset + offset, &word) {
                    return false;
                }
            }
        }
        self.busy[block] = true;
        self.jobs[tag] = Some(Job { operation, block, version, buffer: Some(buffer) });
        let sector = block as u64 * u64::from(SECTORS);
        self.client.submit(operation, sector, SECTORS, buffer.offset, tag as u64)
    }

    /// Collects answers; returns whether there were any.
    fn collect(&mut self) -> Result<bool, &'static str> {
        let mut any = false;
        while let Some(completion) = self.client.poll() {
            any = true;
            self.answered += 1;
            let job = self.jobs.get_mut(completion.tag as usize).and_then(Option::take);
            let job = job.ok_or("an answer to no request")?;
            if completion.status != Status::Ok {
                return Err("a request failed");
            }
            let Some(buffer) = job.buffer else { continue };
            self.busy[job.block] = false;
            if job.operation == Operation::Write {
                self.versions[job.block] = Some(job.version);
            } else {
                self.compare(&job, buffer)?;
            }
            self.client.release(buffer);
        }
        self.signal();
        Ok(any)
    }

    fn compare(&self, job: &Job, buffer: Buffer) -> Result<(), &'static str> {
        for (index, offset) in (0..BUFFER).step_by(8).enumerate() {
            let mut word = [0; 8];
            let read = self.memory.window().read(buffer.offset + offset, &mut word);
            let expected = pattern(job.block, job.version, index as u64);
            if !read || u64::from_le_bytes(word) != expected {
                return Err("an acknowledged write is lost");
            }
        }
        Ok(())
    }

    fn verify_all(&mut self) -> Result<(), &'static str> {
        for block in 0..BLOCKS {
            if self.versions[block].is_some() {
                let target = self.answered + 1;
                if !self.begin(0, Operation::Read, block, 0) {
                    return Err("cannot submit");
                }
                self.signal();
                while self.answered < target {
                    if !self.collect()? {
                        self.wait()?;
                    }
                }
            }
        }
        Ok(())
    }

    fn signal(&mut self) {
        if self.client.take_signal() {
            // A server that has ended receives the requests again when it restarts.
            let _ = Notification::at(slot::SESSIONS).signal(self.attachment.signal);
        }
    }

    fn wait(&mut self) -> Result<(), &'static str> {
        if !self.client.sleep() {
            return Ok(());
        }
        let deadline = time::after(&self.start.clock, ANSWER_TIMEOUT);
        let events = Notification::at(slot::NOTIFICATION).wait(deadline);
        match events {
            Ok(events) if events & event::STOP != 0 => Err("stopped"),
            Ok(_) => Ok(()),
            Err(_) => Err("no answer"),
        }
    }
}

fn pattern(block: usize, version: u64, index: u64) -> u64 {
    (version << 8 ^ block as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(index)
}
