//! Disk server: drives one disk and serves ranges of it to clients, over sessions in shared memory
//! (`proto::disk`).
//!
//! The disk transfers data directly between its medium and the clients' sessions (DMA). The server
//! answers a request when the disk has completed it. A restarted server resets the disk, reads the
//! partition table, and clients resend unanswered requests. It keeps no state of the last one but a
//! word about failed flushes ([`server`]) and the identity of the disk ([`DiskRecord`]).
#![cfg_attr(not(test), no_std, no_main)]
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(dead_code, reason = "the rest needs the kernel"))]

mod ahci;
mod device;
mod partition;
mod server;
mod virtio;

use abi::FOREVER;
use heapless::Vec;
use native_rt::device::{self as memory, DeviceRegisters, Shared};
use native_rt::{Irq, Notification, Status as KernelStatus, error, info, time, warn};
use proto::control::code;
use proto::disk::{Operation, Session, Status};
use proto::service::{DiskDriver, DiskServer, MAX_SESSIONS};
use proto::start::{Clock, Role, Start, event, slot};

use crate::device::{COMMAND_LIMIT, Command, DeviceError, Disk, DiskRecord};
use crate::partition::{Partitions, SECTOR, ScanResult};
use crate::server::{BlockServer, Extent};
use crate::virtio::VirtioDisk;

/// Register ranges: virtio's configuration names its own, AHCI uses the last one (ABAR).
const AHCI_BAR: u64 = 5;
/// Offset of the buffer for sectors of partition tables.
const SCAN: u64 = 64 << 10;
const _: () = assert!(virtio::BYTES <= SCAN && ahci::BYTES <= SCAN);
/// Offset of the word that outlives the server, which only root initialises.
const UNINFORMED: u64 = SCAN + 4096;
/// Offset of the [`DiskRecord`], which does so, too.
const RECORD: u64 = UNINFORMED + 8;

#[cfg(not(test))]
native_rt::entry!(main);

/// Runs the server; returns the exit code of a failure.
fn main(start: &Start<'static>) -> u64 {
    let Role::Disk(plan) = &start.role else {
        error!("the start page does not describe a disk server");
        return code::BAD_CONFIG;
    };
    let Some(dma) = memory::dma(start) else {
        error!("the start page has no device");
        return code::BAD_CONFIG;
    };
    let irq = Irq::at(slot::DEVICE);
    let notification = Notification::at(slot::NOTIFICATION);
    if let Err(status) = irq.bind(notification, event::INTERRUPT.trailing_zeros()) {
        error!("cannot bind the interrupt: {status:?}");
        return code::INTERNAL;
    }
    let physical = dma.physical();
    let Some(words) = dma.words().get(..SCAN as usize / 8) else {
        error!("the memory for the device is too short");
        return code::BAD_CONFIG;
    };
    let kept = dma.words().get(RECORD as usize / 8..).unwrap_or_default();
    let Some(record) = DiskRecord::new(kept) else {
        error!("the memory for the device is too short");
        return code::BAD_CONFIG;
    };
    match plan.driver {
        DiskDriver::Virtio => {
            let wait = |disk: &mut VirtioDisk| _ = wait(disk, &start.clock, true);
            match VirtioDisk::new(start, words, physical, record, wait) {
                Ok(disk) => serve(start, plan, disk, dma),
                Err(error) => {
                    error!("cannot set up the disk: {error}");
                    code::INTERNAL
                }
            }
        }
        DiskDriver::Ahci(port) => {
            let Some(host) = memory::registers(start, AHCI_BAR) else {
                error!("the controller has no registers");
                return code::BAD_CONFIG;
            };
            let controller = Hardware { registers: host, tsc_khz: start.clock.tsc_khz };
            let all = memory::sessions(start).chain([dma]);
            let end = all.map(|shared| shared.physical() + shared.window().length()).max();
            let end = end.unwrap_or_default();
            match ahci::AhciDisk::new(controller, port, words, (physical, end), record) {
                Ok(disk) => serve(start, plan, disk, dma),
                Err(error) => {
                    error!("cannot set up the disk: {error}");
                    code::INTERNAL
                }
            }
        }
    }
}

/// Registers of an AHCI controller, and the TSC clock.
struct Hardware {
    registers: DeviceRegisters,
    tsc_khz: u64,
}

impl ahci::Controller for Hardware {
    fn length(&self) -> u64 {
        self.registers.length()
    }

    fn read(&self, register: u64) -> u32 {
        self.registers.read32(register)
    }

    fn write(&self, register: u64, value: u32) {
        self.registers.write32(register, value);
    }

    fn now(&self) -> u64 {
        time::nanos(self.tsc_khz, time::tsc())
    }

    fn pause(&self) {
        native_rt::yield_now();
    }
}

/// Waits for an event of the disk or of a client. A device that stops sends none, so with commands
/// in flight (`is_busy`) it returns after [`COMMAND_LIMIT`] at the latest.
fn wait(disk: &mut impl Disk, clock: &Clock, is_busy: bool) -> bool {
    let deadline = if is_busy { time::after(clock, COMMAND_LIMIT) } else { FOREVER };
    let waited = Notification::at(slot::NOTIFICATION).wait(deadline);
    // First at the disk: a line that is still high would interrupt again.
    if waited.is_ok_and(|events| events & event::INTERRUPT != 0) {
        disk.acknowledge_interrupt();
    }
    let _ = Irq::at(slot::DEVICE).acknowledge();
    matches!(waited, Ok(_) | Err(KernelStatus::Timeout))
}

/// Reads a sector to the shared memory and copies it from there; `None` if the disk cannot read it.
fn read_sector(
    disk: &mut impl Disk,
    dma: Shared,
    clock: &Clock,
    sector: u64,
    bytes: &mut [u8; SECTOR],
) -> Result<Option<()>, DeviceError> {
    let address = dma.physical() + SCAN;
    disk.start(0, &Command { operation: Operation::Read, sector, sectors: 1, address });
    disk.flush_doorbell();
    loop {
        match disk.completed()? {
            Some((_, status)) => {
                let is_read = status == Status::Ok && dma.window().read(SCAN, bytes);
                return Ok(is_read.then_some(()));
            }
            None if wait(disk, clock, true) => {}
            None => return Err(DeviceError("cannot wait for events")),
        }
    }
}

/// Finds the partitions to serve.
fn find_partitions(
    disk: &mut impl Disk,
    dma: Shared,
    clock: &Clock,
) -> Result<Partitions, DeviceError> {
    let sectors = disk.geometry().sectors;
    let mut failure = Ok(());
    let ScanResult { partitions, refused } = partition::find(sectors, |sector, bytes| {
        failure.ok()?;
        read_sector(disk, dma, clock, sector, bytes).unwrap_or_else(|error| {
            failure = Err(error);
            None
        })
    });
    failure?;
    for number in refused {
        warn!(
            "partition {number} is not served: it overlaps another partition or a partition table"
        );
    }
    Ok(partitions)
}

/// Logs a failure of the disk; returns the exit code.
fn disk_failed(error: DeviceError) -> u64 {
    error!("the disk failed: {}", error.0);
    code::INTERNAL
}

fn serve(start: &Start, plan: &DiskServer, mut disk: impl Disk, dma: Shared) -> u64 {
    let geometry = disk.geometry();
    let partitions = match find_partitions(&mut disk, dma, &start.clock) {
        Ok(partitions) => partitions,
        Err(error) => return disk_failed(error),
    };
    info!(
        "{} MiB, {} partitions, {} requests at once",
        geometry.sectors >> 11,
        partitions.len(),
        geometry.depth
    );
    let Some(uninformed) = dma.words().get(UNINFORMED as usize / 8) else {
        error!("the memory for the device is too short");
        return code::BAD_CONFIG;
    };
    let mut server = BlockServer::new(disk, uninformed);
    let mut given: Vec<(Extent, bool), MAX_SESSIONS> = Vec::new();
    for (number, (client, memory)) in plan.clients.iter().zip(memory::sessions(start)).enumerate() {
        let extent = server::locate(&client.part, &partitions, geometry.sectors);
        let both = extent.and_then(|extent| {
            let info = server::info(client, &extent, &geometry)?;
            server::admit(&extent, client.read_only, &given)?;
            Ok((extent, info))
        });
        if let Ok((extent, _)) = &both {
            // There are at most as many clients as sessions.
            let _ = given.push((*extent, client.read_only));
        }
        let client = match both {
            Ok((extent, info)) => Session::new(memory.words(), memory.window().length(), info)
                .map(|session| (session, extent, memory.physical(), client.signal)),
            Err(error) => {
                warn!("cannot serve client {number}: {error:?}");
                None
            }
        };
        server.add(client);
    }
    loop {
        let signal = |number, vcpu, events| {
            // A client that has ended gets a new session when it restarts.
            let _ = Notification::at(slot::peer(number, vcpu)).signal(events);
        };
        if let Err(error) = server.serve(signal) {
            return disk_failed(error);
        }
        let is_busy = server.is_busy();
        if !wait(server.disk(), &start.clock, is_busy) {
            error!("cannot wait for events");
            return code::INTERNAL;
        }
    }
}
