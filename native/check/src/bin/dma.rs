//! Replaces a disk server: makes its disk read and write foreign memory and, on PCs, send foreign
//! interrupts, and prints whether the disk could. Overwrites a sector between the partition table
//! and the first partition.
//!
//! Devices may report success for an access that an IOMMU blocked, so only contents count. The disk
//! reads the kernel's program text. It writes memory that no program uses after boot; if the IOMMU
//! blocks that, it writes the kernel's text, too: if the system survives, it was protected.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use core::sync::atomic::{AtomicU64, Ordering};

use native_check::Report;
use native_rt::device::dma;
use native_rt::{Irq, Notification, info, time};
use native_virtio::{QUEUE_BYTES, Queue, Transport, WRITE};
use proto::disk::SECTOR;
use proto::start::{Clock, Start, event, slot};

/// Physical address of the kernel's image (on QEMU's machine `virt`), and a lower bound of its
/// sectors.
const KERNEL: u64 = if cfg!(target_arch = "x86_64") { 0x10_0000 } else { 0x4020_0000 };
const KERNEL_SECTORS: u64 = 128;
/// Conventional memory after the BIOS data area; where the emulator starts the machine.
const UNUSED: u64 = if cfg!(target_arch = "x86_64") { 0x600 } else { 0x4000_0000 };
/// The last word of a partition table.
const SIGNATURE: u64 = 0xaa55;
/// A sector outside of all partitions.
const FREE: u64 = 100;
/// Request types (virtio 1.2, section 5.2.6).
const IN: u64 = 0;
const OUT: u64 = 1;
/// Words after the queue: type, sector, status, and from `DATA` on a sector.
const RECORD: usize = QUEUE_BYTES as usize / 8;
const STATUS: usize = RECORD + 2;
const DATA: usize = RECORD + 64;
/// Bytes of an interrupt message, and the address range of the local APICs (APM vol. 2, section
/// 16.6.9).
const MESSAGE: u64 = 4;
const APIC: u64 = 0xfee0_0000;
/// Number of exception vectors, and the vector of spurious interrupts.
const EXCEPTIONS: u32 = 32;
const SPURIOUS: u32 = 0xff;
/// Delivery modes of messages: lowest priority, NMI, ExtINT. Two are omitted: SMI is the
/// firmware's, and INIT resets the processor, which only interrupt remapping prevents.
const LOWEST: u32 = 1 << 8;
const NMI: u32 = 4 << 8;
const EXTERNAL: u32 = 7 << 8;
/// Flag of the available ring: the device sends no interrupts (virtio 1.2, section 2.7.7).
const NO_INTERRUPT: u64 = 1;
/// Time limit of a request: number of polls, and ns between them.
const MAX_POLLS: u32 = 100;
const PAUSE: u64 = 10_000_000;

native_rt::entry!(main);

fn main(start: &Start<'static>) -> u64 {
    let mut report = Report::default();
    report.case("dma", check(start));
    if cfg!(target_arch = "x86_64") {
        report.case("messages", messages(start));
    }
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
    // The disk must still work.
    let again = disk.read(0);
    if again == Some(table) { Ok(()) } else { Err("the disk does not work any more") }
}

/// Checks that the kernel takes none of these interrupts for an exception, and continues to accept
/// others.
fn messages(start: &Start<'static>) -> Result<(), &'static str> {
    let mut disk = Disk::new(start)?;
    let irq = Irq::at(slot::DEVICE);
    let notification = Notification::at(slot::NOTIFICATION);
    irq.bind(notification, event::INTERRUPT.trailing_zeros()).map_err(|_| "no interrupt")?;
    let (address, own) = irq.message().map_err(|_| "the interrupt is no message")?;
    if address & !0xf_f000 != APIC {
        return Err("messages are written elsewhere");
    }
    disk.silence();
    disk.events = 0;
    // They arrive while other tasks run or the CPU is idle; then while this program runs.
    for waits in [true, false] {
        disk.waits = waits;
        for vector in 0..EXCEPTIONS {
            disk.send(start, vector)?;
            disk.send(start, LOWEST | vector)?;
        }
        for message in [SPURIOUS, NMI, EXTERNAL, SPURIOUS] {
            disk.send(start, message)?;
        }
    }
    if disk.events != 0 {
        return Err("an unexpected interrupt arrived");
    }
    disk.send(start, own as u32)?;
    disk.events |= notification.wait(time::after(&start.clock, PAUSE)).unwrap_or(0);
    let can = disk.events & event::INTERRUPT != 0;
    info!("the disk {} send interrupts of its choice", if can { "can" } else { "cannot" });
    Ok(())
}

/// Words of a sector.
type Sector = [u64; SECTOR as usize / 8];

struct Disk {
    clock: Clock,
    transport: Transport,
    queue: Queue<'static>,
    words: &'static [AtomicU64],
    physical: u64,
    /// The program sleeps while the disk works.
    waits: bool,
    /// Events received meanwhile.
    events: u64,
}

impl Disk {
    /// Resets the disk and sets it up.
    fn new(start: &Start<'static>) -> Result<Self, &'static str> {
        let memory = dma(start).ok_or("no memory for the disk")?;
        let (transport, _) = Transport::new(start, 0).map_err(|_| "cannot set up the disk")?;
        let (words, physical) = (memory.words(), memory.physical());
        let queue = Queue::new(words, physical, transport.queue_size(0)).ok_or("no queue")?;
        transport.set_queue(0, &queue).map_err(|_| "no queue")?;
        transport.start();
        let clock = start.clock;
        Ok(Self { clock, transport, queue, words, physical, waits: true, events: 0 })
    }

    /// Disables completion interrupts of the disk.
    fn silence(&self) {
        let [_, available, _] = self.queue.addresses();
        self.words[((available - self.physical) / 8) as usize]
            .fetch_or(NO_INTERRUPT, Ordering::Release);
    }

    /// Makes the disk write a message to a local APIC: it reads a sector that begins with the
    /// message.
    fn send(&mut self, start: &Start<'static>, message: u32) -> Result<(), &'static str> {
        self.words[DATA].store(message.into(), Ordering::Relaxed);
        if !self.request(OUT, FREE, self.at(DATA)) {
            return Err("the disk cannot write");
        }
        let rest = (self.at(DATA + 1), (SECTOR - MESSAGE) as u32);
        if !self.transfer(IN, FREE, &[(APIC, MESSAGE as u32), rest]) {
            let (waits, events) = (self.waits, self.events);
            *self = Self { waits, events, ..Self::new(start)? };
            self.silence();
        }
        Ok(())
    }

    /// Returns the physical address of a word of its memory.
    fn at(&self, word: usize) -> u64 {
        self.physical + 8 * word as u64
    }

    /// Reads a sector.
    fn read(&mut self, sector: u64) -> Option<Sector> {
        let done = self.request(IN, sector, self.at(DATA));
        done.then(|| core::array::from_fn(|word| self.words[DATA + word].load(Ordering::Acquire)))
    }

    /// Makes the disk write a sector from a physical address, and returns it; zeros if the disk
    /// cannot read there.
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

    /// Performs a request that may fail, and resets the disk if that is necessary.
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

    /// Transfers a sector from or to a physical address; returns whether the disk reported success.
    fn request(&mut self, kind: u64, sector: u64, address: u64) -> bool {
        self.transfer(kind, sector, &[(address, SECTOR as u32)])
    }

    /// Transfers a sector in one or two parts: physical addresses and lengths.
    fn transfer(&mut self, kind: u64, sector: u64, parts: &[(u64, u32)]) -> bool {
        for (word, value) in [(RECORD, kind), (RECORD + 1, sector), (STATUS, u64::MAX)] {
            self.words[word].store(value, Ordering::Relaxed);
        }
        let flags = if kind == IN { WRITE } else { 0 };
        let (record, status) = (self.at(RECORD), self.at(STATUS));
        let part = |&(address, length): &(u64, u32)| (address, length, flags);
        let (head, tail) = ((record, 16, 0), (status, 1, WRITE));
        let offered = match parts {
            [one] => self.queue.offer(0, &[head, part(one), tail]),
            [one, two] => self.queue.offer(0, &[head, part(one), part(two), tail]),
            _ => false,
        };
        if !offered {
            return false;
        }
        self.transport.notify(self.transport.doorbell(0), 0);
        self.finish()
    }

    /// Waits for the end of a request; returns whether it succeeded.
    fn finish(&mut self) -> bool {
        let end = time::after(&self.clock, PAUSE * u64::from(MAX_POLLS));
        while time::tsc() < end {
            if self.queue.take().is_ok_and(|taken| taken.is_some()) {
                return self.words[STATUS].load(Ordering::Acquire) as u8 == 0;
            }
            if self.transport.needs_reset() {
                return false;
            }
            // A pause, unless an interrupt comes.
            let deadline = if self.waits { time::after(&self.clock, PAUSE) } else { 0 };
            self.events |= Notification::at(slot::NOTIFICATION).wait(deadline).unwrap_or(0);
        }
        false
    }
}
