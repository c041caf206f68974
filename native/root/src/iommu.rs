//! AMD IOMMUs: memory that a device may access.
//!
//! Root owns all memory anyway, so root has the driver of the hardware that protects it from
//! devices, and the kernel needs none. All IOMMUs of the machine share one device table. A function
//! without a server may access no memory. A function with a server may access the server's DMA
//! memory, and the sessions of its clients, at their physical addresses; interrupts pass. Page
//! tables belong to a server's index and are permanent, as that memory is, so a restarted server
//! reuses them.
//!
//! Reference: [`hw_x86::iommu`].

use abi::{PAGE_SIZE, boot};
use heapless::Vec;
use hw_tables::acpi::Ivrs;
use hw_x86::iommu::{
    ADDRESS_LIMIT, BLOCKED, DEVICE_ENTRY, DEVICE_TABLE_LENGTH, ENTRY, LEVELS, RING_PAGE, command,
    control, device_entry, event_device, index, leaf, next_table, register, status, table,
};
use native_rt::device::DeviceRegisters;
use native_rt::start::Boot;
use native_rt::{Window, info, warn};
use proto::system::MAX_SERVERS;

use crate::memory::Memory;
use crate::pci::{self, Address};

/// Maximum number of IOMMUs.
const MAX_UNITS: usize = 8;
/// Pages of a server's page tables: for memory in about as many places.
const TABLE_PAGES: u64 = 32;
/// Maximum number of polls until a command must be complete.
const MAX_POLLS: u32 = 10_000_000;
/// Maximum number of events logged per call.
const MAX_LOGGED: u32 = 4;

/// An IOMMU: its registers, and three pages for commands, events, and the completion word.
struct Unit {
    registers: DeviceRegisters,
    pages: Window,
    /// Offset after the last command, and number of the last completion.
    tail: u64,
    answer: u64,
    /// Offset of the next event.
    head: u64,
}

/// A server's page tables; the first page is the root.
struct Domain {
    pages: Window,
    used: u64,
}

/// All IOMMUs.
pub struct Iommu {
    units: Vec<Unit, MAX_UNITS>,
    devices: Window,
    domains: [Option<Domain>; MAX_SERVERS],
}

/// Error: no memory for page tables, or memory beyond their range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoRoom;

fn physical(window: Window) -> u64 {
    window.base() - boot::PHYSICAL_WINDOW
}

fn read(window: Window, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    // All offsets here are inside.
    let _ = window.read(offset, &mut bytes);
    u64::from_le_bytes(bytes)
}

fn write(window: Window, offset: u64, words: &[u64]) {
    for (at, word) in (offset..).step_by(8).zip(words) {
        let _ = window.write(at, &word.to_le_bytes());
    }
}

impl Iommu {
    /// Enables all IOMMUs; from then on no device may access memory. Returns `None` if there are
    /// none. Their memory belongs to `owner`.
    pub fn new(boot: &Boot, memory: &mut Memory, owner: usize) -> Option<Self> {
        let ivrs = Ivrs::parse(pci::table(boot, Ivrs::SIGNATURE)?).ok()?;
        let pages = DEVICE_TABLE_LENGTH / PAGE_SIZE;
        let devices = memory.allocate_aligned(owner, pages, pages)?;
        for entry in 0..DEVICE_TABLE_LENGTH / DEVICE_ENTRY {
            write(devices, entry * DEVICE_ENTRY, &BLOCKED);
        }
        let mut units: Vec<Unit, MAX_UNITS> = Vec::new();
        let mut bases: Vec<u64, MAX_UNITS> = Vec::new();
        for iommu in ivrs.iommus().filter(|iommu| iommu.segment == 0) {
            if bases.contains(&iommu.base) {
                continue;
            }
            let unit = boot
                .registers(iommu.base, register::LENGTH)
                .zip(memory.allocate(owner, 3))
                .map(|(registers, pages)| Unit { registers, pages, tail: 0, answer: 0, head: 0 });
            let Some(unit) = unit.filter(|_| !units.is_full()) else {
                warn!(
                    "cannot enable the IOMMU at {:#x}: its devices can access all memory",
                    iommu.base
                );
                continue;
            };
            unit.enable(devices);
            info!("IOMMU at {:#x}: devices are limited to the memory of their servers", iommu.base);
            // There is room for as many.
            let _ = (bases.push(iommu.base), units.push(unit));
        }
        (!units.is_empty()).then_some(Self {
            units,
            devices,
            domains: [const { None }; MAX_SERVERS],
        })
    }

    /// Lets the function of a server access these windows, and no other memory.
    pub fn allow(
        &mut self,
        memory: &mut Memory,
        owner: usize,
        server: usize,
        function: Address,
        windows: impl Iterator<Item = Window>,
    ) -> Result<(), NoRoom> {
        let domain = self.domains.get_mut(server).ok_or(NoRoom)?;
        let domain = match domain {
            Some(domain) => domain,
            None => {
                let pages = memory.allocate(owner, TABLE_PAGES).ok_or(NoRoom)?;
                let mut new = Domain { pages, used: 0 };
                new.add_table().ok_or(NoRoom)?;
                domain.insert(new)
            }
        };
        for window in windows {
            for offset in (0..window.length()).step_by(PAGE_SIZE as usize) {
                domain.map(physical(window) + offset).ok_or(NoRoom)?;
            }
        }
        let entry = device_entry(physical(domain.pages), domain_number(server));
        self.set(function, server, entry);
        Ok(())
    }

    /// Removes all access of a server's function.
    pub fn deny(&mut self, server: usize, function: Address) {
        self.set(function, server, BLOCKED);
    }

    fn set(&mut self, function: Address, server: usize, entry: [u64; 4]) {
        let device = function.number();
        let at = u64::from(device) * DEVICE_ENTRY;
        // The word with the rights is written last to grant and first to revoke: in between, the
        // entry grants no access.
        if entry == BLOCKED {
            write(self.devices, at, &entry);
        } else {
            write(self.devices, at + 8, &entry[1..]);
            write(self.devices, at, &entry[..1]);
        }
        for unit in &mut self.units {
            unit.forget(device, domain_number(server));
        }
    }

    /// Logs device accesses that the IOMMUs blocked.
    pub fn report(&mut self) {
        let mut told = 0;
        let mut more = 0;
        for unit in &mut self.units {
            while let Some(event) = unit.next_event() {
                if told < MAX_LOGGED {
                    let [first, second] = event;
                    let function = Address::from_number(event_device(first));
                    warn!("IOMMU: event of PCI function {function}: {first:#018x} {second:#018x}");
                    told += 1;
                } else {
                    more += 1;
                }
            }
        }
        if more != 0 {
            warn!("IOMMU: {more} more events");
        }
    }
}

/// Domain 0 has no server.
fn domain_number(server: usize) -> u16 {
    server as u16 + 1
}

impl Domain {
    /// Takes a zeroed page into use as a table; returns its offset.
    fn add_table(&mut self) -> Option<u64> {
        let offset = self.used * PAGE_SIZE;
        self.pages.part(offset, PAGE_SIZE)?;
        self.used += 1;
        Some(offset)
    }

    /// Maps a page to its own address.
    fn map(&mut self, address: u64) -> Option<()> {
        if address >= ADDRESS_LIMIT {
            return None;
        }
        let base = physical(self.pages);
        let mut offset = 0;
        for level in (2..=LEVELS).rev() {
            let at = offset + 8 * index(address, level);
            offset = match next_table(read(self.pages, at)) {
                Some(next) => next - base,
                None => {
                    let next = self.add_table()?;
                    write(self.pages, at, &[table(base + next, level - 1)]);
                    next
                }
            };
        }
        write(self.pages, offset + 8 * index(address, 1), &[leaf(address)]);
        Some(())
    }
}

impl Unit {
    const EVENTS: u64 = PAGE_SIZE;
    const ANSWER: u64 = 2 * PAGE_SIZE;

    /// Enables the IOMMU, from any state that the firmware has left.
    fn enable(&self, devices: Window) {
        let registers = self.registers;
        let base = physical(self.pages);
        registers.write64(register::CONTROL, 0);
        let pages = DEVICE_TABLE_LENGTH / PAGE_SIZE - 1;
        registers.write64(register::DEVICE_TABLE, physical(devices) | pages);
        registers.write64(register::COMMAND_BUFFER, base | RING_PAGE);
        registers.write64(register::EVENT_LOG, (base + Self::EVENTS) | RING_PAGE);
        let (commands, events) = (register::COMMAND_HEAD, register::EVENT_HEAD);
        for offset in [commands, register::COMMAND_TAIL, events, register::EVENT_TAIL] {
            registers.write64(offset, 0);
        }
        let all = control::ENABLE | control::EVENT_LOG | control::COHERENT | control::COMMANDS;
        registers.write64(register::CONTROL, all);
    }

    fn put(&mut self, command: [u64; 2]) {
        write(self.pages, self.tail, &command);
        self.tail = (self.tail + ENTRY) % PAGE_SIZE;
    }

    /// Invalidates the cached entries of a function and a domain, and waits for the completion.
    fn forget(&mut self, device: u16, domain: u16) {
        self.answer += 1;
        let place = physical(self.pages) + Self::ANSWER;
        self.put(command::invalidate_device(device));
        self.put(command::invalidate_domain(domain));
        self.put(command::completion(place, self.answer));
        self.registers.write64(register::COMMAND_TAIL, self.tail);
        let done = (0..MAX_POLLS).any(|_| read(self.pages, Self::ANSWER) == self.answer);
        if !done {
            warn!("an IOMMU did not complete a command in time");
        }
    }

    /// Takes the oldest event.
    fn next_event(&mut self) -> Option<[u64; 2]> {
        if self.registers.read64(register::EVENT_TAIL) % PAGE_SIZE == self.head {
            if self.registers.read64(register::STATUS) & status::EVENT_OVERFLOW != 0 {
                warn!("IOMMU: event log overflow");
                self.restart_log();
            }
            return None;
        }
        let at = Self::EVENTS + self.head;
        let event = [read(self.pages, at), read(self.pages, at + 8)];
        self.head = (self.head + ENTRY) % PAGE_SIZE;
        self.registers.write64(register::EVENT_HEAD, self.head);
        Some(event)
    }

    /// Restarts the event log after an overflow (section 2.5.1).
    fn restart_log(&mut self) {
        let control = self.registers.read64(register::CONTROL);
        self.registers.write64(register::CONTROL, control & !control::EVENT_LOG);
        self.head = 0;
        self.registers.write64(register::EVENT_HEAD, 0);
        self.registers.write64(register::EVENT_TAIL, 0);
        self.registers.write64(register::STATUS, status::EVENT_OVERFLOW);
        self.registers.write64(register::CONTROL, control);
    }
}
