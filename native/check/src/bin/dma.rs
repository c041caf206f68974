//! In place of a disk server: has its disk read and write memory that it was not given, and prints whether the disk could.
//! Overwrites a sector between the partition table and the first partition.
//!
//! Devices may report success for what an IOMMU kept from them, so only contents count. What is read is the kernel's program. What is
//! written is memory that nobody uses after boot; if that is not possible, the kernel's program is overwritten, too: whoever
//! is alive afterwards was protected.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use core::sync::atomic::{AtomicU64, Ordering};

use native_check::Report;
use native_rt::device::{configuration, dma, registers};
use native_rt::{Notification, info, time};
use native_virtio::{QUEUE_BYTES, Queue, Transport, WRITE};
use proto::disk::SECTOR;
use proto::start::{Clock, Start, slot};

/// Where the kernel's program is in physical memory, and at least so many sectors of it.
const KERNEL: u64 = 0x10_0000;
const KERNEL_SECTORS: u64 = 128;
/// Conventional memory after the BIOS' data.
const UNUSED: u64 = 0x600;
/// The last word of a partition table.
const SIGNATURE: u64 = 0xaa55;
/// A sector that belongs to nobody.
const FREE: u64 = 100;
/// Types of requests (virtio 1.2, section 5.2.6).
const IN: u64 = 0;
const OUT: u64 = 1;
/// Words behind the queue: type, sector, status, and from `DATA` on a sector.
const RECORD: usize = QUEUE_BYTES as usize / 8;
const STATUS: usize = RECORD + 2;
const DATA: usize = RECORD + 64;
/// Time for a request, in looks and ns.
const LOOKS: u32 = 100;
const PAUSE: u64 = 10_000_000;

native_rt::entry!(main);

fn main(start: &Start<'static>) -> u64 {
    let mut report = Report::default();
    report.case("dma", check(start));
    report.exit_code()
}

fn check(start: &Start<'static>) -> Result<(), &'static str> {
    let mut disk = Disk::new(start)?;
    let table = disk.read(0).ok_or("the disk cannot read the partition table")?;
    if table[63] >> 48 != SIGNATURE {
        return Err("there is no partition table");
    }
    let reads = disk.peek(start, KERNEL)?.iter().any(|&word| word != 0);
    disk.try_request(start, IN, 0, UNUSED)?;
    let writes = disk.peek(start, UNUSED)? == table;
    if !reads && !writes {
        for sector in 0..KERNEL_SECTORS {
            disk.try_request(start, IN, 0, KERNEL + SECTOR * sector)?;
        }
    }
    let tell = |could| if could { "can" } else { "cannot" };
    info!("the disk {} read and {} write what is not its server's", tell(reads), tell(writes));
    // It is no worse for that.
    let again = disk.read(0);
    if again == Some(table) { Ok(()) } else { Err("the disk does not work any more") }
}

/// The words of a sector.
type Sector = [u64; SECTOR as usize / 8];

struct Disk {
    clock: Clock,
    transport: Transport,
    queue: Queue<'static>,
    words: &'static [AtomicU64],
    physical: u64,
}

impl Disk {
    /// Resets the disk and sets it up.
    fn new(start: &Start<'static>) -> Result<Self, &'static str> {
        let memory = dma(start).ok_or("no memory for the disk")?;
        let space = configuration(start).ok_or("no disk")?;
        let (transport, _) = Transport::new(space, |number| registers(start, number), 0)
            .map_err(|_| "the disk cannot be set up")?;
        let (words, physical) = (memory.words(), memory.physical());
        let queue = Queue::new(words, physical, transport.queue_size(0)).ok_or("no queue")?;
        transport.set_queue(0, &queue).map_err(|_| "no queue")?;
        transport.start();
        Ok(Self { clock: start.clock, transport, queue, words, physical })
    }

    /// The address of a word of its memory.
    fn at(&self, word: usize) -> u64 {
        self.physical + 8 * word as u64
    }

    /// Reads a sector.
    fn read(&mut self, sector: u64) -> Option<Sector> {
        let done = self.request(IN, sector, self.at(DATA));
        done.then(|| core::array::from_fn(|word| self.words[DATA + word].load(Ordering::Acquire)))
    }

    /// What the disk finds at a physical address; zeros if it reads nothing.
    fn peek(&mut self, start: &Start<'static>, address: u64) -> Result<Sector, &'static str> {
        for word in 0..SECTOR as usize / 8 {
            self.words[DATA + word].store(0, Ordering::Relaxed);
        }
        if !self.request(OUT, FREE, self.at(DATA)) {
            return Err("the disk cannot write");
        }
        self.try_request(start, OUT, FREE, address)?;
        self.read(FREE).ok_or("the disk cannot read what it wrote")
    }

    /// A request that may fail, and leave the disk in need of a reset.
    fn try_request(
        &mut self,
        start: &Start<'static>,
        kind: u64,
        sector: u64,
        address: u64,
    ) -> Result<(), &'static str> {
        if !self.request(kind, sector, address) {
            *self = Self::new(start)?;
        }
        Ok(())
    }

    /// Moves a sector from or to a physical address; whether the disk did.
    fn request(&mut self, kind: u64, sector: u64, address: u64) -> bool {
        for (word, value) in [(RECORD, kind), (RECORD + 1, sector), (STATUS, u64::MAX)] {
            self.words[word].store(value, Ordering::Relaxed);
        }
        let flags = if kind == IN { WRITE } else { 0 };
        let (record, status) = (self.at(RECORD), self.at(STATUS));
        let chain = [(record, 16, 0), (address, SECTOR as u32, flags), (status, 1, WRITE)];
        if !self.queue.offer(0, &chain) {
            return false;
        }
        self.transport.notify(self.transport.doorbell(0), 0);
        for _ in 0..LOOKS {
            if self.queue.take().is_ok_and(|taken| taken.is_some()) {
                return self.words[STATUS].load(Ordering::Acquire) as u8 == 0;
            }
            if self.transport.needs_reset() {
                return false;
            }
            let deadline = time::after(&self.clock, PAUSE);
            // Nobody signals: this is a pause.
            let _ = Notification::at(slot::NOTIFICATION).wait(deadline);
        }
        false
    }
}
