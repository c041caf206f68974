//! Disk server: drives one disk and serves ranges of it to clients, over sessions in shared memory
//! (`proto::disk`).
//!
//! The disk transfers data directly between its medium and the clients' sessions (DMA). The server
//! answers a request when the disk has completed it. A restarted server resets the disk, reads the
//! partition table, and clients resend unanswered requests. It keeps no state of the last one but a
//! word about failed flushes ([`server`]).
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
use native_rt::{Irq, Notification, error, info, time, warn};
use proto::control::code;
use proto::disk::{Operation, Session, Status};
use proto::service::{DiskDriver, DiskServer, MAX_SESSIONS};
use proto::start::{Role, Start, event, slot};

use crate::device::{Command, Disk};
use crate::partition::{SECTOR, ScanResult};
use crate::server::{BlockServer, Extent};

/// Register ranges: virtio's configuration names its own, AHCI uses the last one (ABAR).
const AHCI_BAR: u64 = 5;
/// Offset of the buffer for sectors of partition tables.
const SCAN: u64 = 64 << 10;
const _: () = assert!(virtio::BYTES <= SCAN && ahci::BYTES <= SCAN);
/// Offset of the word that outlives the server, which only root initialises.
const UNINFORMED: u64 = SCAN + 4096;

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
    match plan.driver {
        DiskDriver::Virtio => match virtio::VirtioDisk::new(start, words, physical) {
            Ok(disk) => serve(start, plan, disk, dma),
            Err(error) => {
                error!("cannot set up the disk: {error}");
                code::INTERNAL
            }
        },
        DiskDriver::Ahci(port) => {
            let Some(host) = memory::registers(start, AHCI_BAR) else {
                error!("the controller has no registers");
                return code::BAD_CONFIG;
            };
            let controller = Hardware { registers: host, tsc_khz: start.clock.tsc_khz };
            let all = memory::sessions(start).chain([dma]);
            let end = all.map(|shared| shared.physical() + shared.window().length()).max();
            let end = end.unwrap_or_default();
            match ahci::AhciDisk::new(controller, port, words, physical, end) {
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

/// Waits for an event of the disk or of a client.
fn wait(disk: &mut impl Disk) -> bool {
    let waited = Notification::at(slot::NOTIFICATION).wait(FOREVER);
    // First at the disk: a line that is still high would interrupt again.
    if waited.is_ok_and(|events| events & event::INTERRUPT != 0) {
        disk.acknowledge_interrupt();
    }
    let _ = Irq::at(slot::DEVICE).acknowledge();
    waited.is_ok()
}

/// Reads a sector to the shared memory and copies it from there.
fn read_sector(
    disk: &mut impl Disk,
    dma: Shared,
    sector: u64,
    bytes: &mut [u8; SECTOR],
) -> Option<()> {
    let address = dma.physical() + SCAN;
    disk.start(0, &Command { operation: Operation::Read, sector, sectors: 1, address });
    disk.flush_doorbell();
    loop {
        match disk.completed() {
            Ok(Some((_, status))) => {
                return (status == Status::Ok && dma.window().read(SCAN, bytes)).then_some(());
            }
            Ok(None) if wait(disk) => {}
            Ok(None) | Err(_) => return None,
        }
    }
}

fn find_partitions(disk: &mut impl Disk, dma: Shared) -> ScanResult {
    let sectors = disk.geometry().sectors;
    partition::find(sectors, |sector, bytes| read_sector(disk, dma, sector, bytes))
}

fn serve(start: &Start, plan: &DiskServer, mut disk: impl Disk, dma: Shared) -> u64 {
    let geometry = disk.geometry();
    let ScanResult { partitions, refused } = find_partitions(&mut disk, dma);
    for number in refused {
        warn!(
            "partition {number} is not served: it overlaps another partition or a partition table"
        );
    }
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
            error!("the disk failed: {}", error.0);
            return code::INTERNAL;
        }
        if !wait(server.disk()) {
            error!("cannot wait for events");
            return code::INTERNAL;
        }
    }
}
