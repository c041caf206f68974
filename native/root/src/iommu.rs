//! IOMMUs: memory that a device may access, and interrupts that it may send.
//!
//! Root owns all memory anyway, so root has the driver of the hardware that protects it from
//! devices, and the kernel needs none. A function without a server may access no memory. A function
//! with a server may access the server's DMA memory, and the sessions of its clients, at their
//! physical addresses. Page tables belong to a server's index and are permanent, as that memory is,
//! so a restarted server reuses them.
//!
//! The IOMMUs log what they block. A server whose function made such a request is stopped.
//!
//! A module per kind has the same items: the format of its page tables, and `Units`, all IOMMUs of
//! the machine.

use abi::{PAGE_SIZE, boot};
use native_rt::start::Boot;
use native_rt::{Window, warn};
use proto::system::MAX_SERVERS;

use crate::memory::Memory;
use crate::pci::{Address, Pci};

#[cfg(target_arch = "x86_64")]
mod amd;
#[cfg(any(test, target_arch = "aarch64"))]
mod smmu;

#[cfg(target_arch = "x86_64")]
use amd::{ADDRESS_LIMIT, LEVELS, Units, index, leaf, next_table, table};
#[cfg(target_arch = "aarch64")]
use smmu::{ADDRESS_LIMIT, LEVELS, Units, index, leaf, next_table, table};

/// Pages of a server's page tables: for memory in about as many places.
const TABLE_PAGES: u64 = 32;
/// Maximum number of polls until a command must be complete.
const MAX_POLLS: u32 = 10_000_000;
/// Maximum number of events logged per call.
const MAX_LOGGED: u32 = 4;
/// Maximum number of events read per call: a device may cause them faster than root reads them.
const MAX_EVENTS: u32 = 256;

/// A server's page tables, the first page is the root; and further pages that the kind of IOMMU
/// needs.
struct Domain {
    pages: Window,
    used: u64,
    further: Option<Window>,
    /// The function that the server drives now.
    function: Option<Address>,
}

/// Address and data by which a function interrupts, or an input of an I/O APIC.
pub type Message = (u64, u64);

/// An entry of an IOMMU's log.
struct Event {
    /// The function that it is about; `None`: none that root knows.
    function: Option<Address>,
    /// The function requested what its page tables do not permit.
    is_blocked_request: bool,
    /// The first words of the entry.
    words: [u64; 2],
}

/// All IOMMUs, and the memory that each server's function may access.
pub struct Iommu {
    units: Units,
    domains: [Option<Domain>; MAX_SERVERS],
    /// Servers whose function made a request that was blocked, as a bit mask.
    offenders: u64,
}

const _: () = assert!(MAX_SERVERS <= u64::BITS as usize);

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
        let units = Units::new(boot, &Pci::find(boot)?, memory, owner)?;
        Some(Self { units, domains: [const { None }; MAX_SERVERS], offenders: 0 })
    }

    /// The tables of a server, made at its first start.
    fn domain(
        &mut self,
        memory: &mut Memory,
        owner: usize,
        server: usize,
    ) -> Result<&mut Domain, NoRoom> {
        let domain = self.domains.get_mut(server).ok_or(NoRoom)?;
        if domain.is_none() {
            let pages = memory.allocate(owner, TABLE_PAGES).ok_or(NoRoom)?;
            let further = match self.units.further_pages() {
                0 => None,
                count => Some(memory.allocate(owner, count).ok_or(NoRoom)?),
            };
            let mut new = Domain { pages, used: 0, further, function: None };
            new.add_table().ok_or(NoRoom)?;
            *domain = Some(new);
        }
        domain.as_mut().ok_or(NoRoom)
    }

    /// The message by which the function of a server is to interrupt, so that it arrives as
    /// `message` from the next [`allow`](Self::allow) on.
    pub fn message(
        &mut self,
        memory: &mut Memory,
        owner: usize,
        server: usize,
        message: Message,
    ) -> Result<Message, NoRoom> {
        let further = self.domain(memory, owner, server)?.further;
        Ok(self.units.message(further, message))
    }

    /// An input of an I/O APIC may interrupt by this message.
    pub fn add_line(&mut self, message: Message) {
        self.units.add_line(message);
    }

    /// Lets the function of a server access these windows, and nothing else.
    pub fn allow(
        &mut self,
        memory: &mut Memory,
        owner: usize,
        server: usize,
        function: Address,
        windows: impl Iterator<Item = Window>,
    ) -> Result<(), NoRoom> {
        let domain = self.domain(memory, owner, server)?;
        for window in windows {
            for offset in (0..window.length()).step_by(PAGE_SIZE as usize) {
                domain.map(physical(window) + offset).ok_or(NoRoom)?;
            }
        }
        let (pages, further) = (domain.pages, domain.further);
        // Earlier requests of the function are not this server's.
        self.report();
        if let Some(domain) = &mut self.domains[server] {
            domain.function = Some(function);
        }
        self.units.allow(function, server, pages, further);
        Ok(())
    }

    /// Removes all access of a server's function.
    pub fn deny(&mut self, server: usize, function: Address) {
        if let Some(domain) = self.domains.get_mut(server).and_then(Option::as_mut) {
            domain.function = None;
            self.offenders &= !(1 << server);
        }
        self.units.deny(function, server);
    }

    /// Reads the logs of the IOMMUs, logs what they blocked, and notes the servers whose functions
    /// it came from for [`take_offender`](Self::take_offender).
    pub fn report(&mut self) {
        let Self { units, domains, offenders } = self;
        let count = take_all(
            || units.next_event(),
            |number, event| {
                let driven = domains.iter().map(|domain| domain.as_ref()?.function);
                *offenders |= offender(driven, &event);
                if number < MAX_LOGGED {
                    event.log();
                }
            },
        );
        if count > MAX_LOGGED {
            warn!("IOMMU: {} more events", count - MAX_LOGGED);
        }
    }

    /// Returns whether any server drives a function.
    pub fn is_used(&self) -> bool {
        self.domains.iter().flatten().any(|domain| domain.function.is_some())
    }

    /// Returns a server whose function made a request that was blocked, once.
    pub fn take_offender(&mut self) -> Option<usize> {
        let server = self.offenders.trailing_zeros() as usize;
        self.offenders &= self.offenders.wrapping_sub(1);
        (server < MAX_SERVERS).then_some(server)
    }
}

/// Calls `each` with the number of each event, from 0, and the event; returns how many were read.
fn take_all(mut next: impl FnMut() -> Option<Event>, mut each: impl FnMut(u32, Event)) -> u32 {
    let mut count = 0;
    while count < MAX_EVENTS
        && let Some(event) = next()
    {
        each(count, event);
        count += 1;
    }
    count
}

impl Event {
    fn log(&self) {
        let [first, second] = self.words;
        match self.function {
            Some(function) => {
                warn!("IOMMU: event of PCI function {function}: {first:#018x} {second:#018x}");
            }
            None => warn!("IOMMU: event: {first:#018x} {second:#018x}"),
        }
    }
}

/// Returns the server that an event accuses, as a bit mask: the one that drives the function now,
/// if the event is a blocked request. `driven` are the servers' functions, by index.
fn offender(mut driven: impl Iterator<Item = Option<Address>>, event: &Event) -> u64 {
    let Some(function) = event.function.filter(|_| event.is_blocked_request) else { return 0 };
    driven.position(|driven| driven == Some(function)).map_or(0, |server| 1 << server)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocked_request_accuses_the_server_that_drives_the_function() {
        let function = Address::from_number(0x18);
        let domains = [None, None, Some(function)];
        let offender = |count, function, is_blocked_request| {
            let event = Event { function, is_blocked_request, words: [0; 2] };
            offender(domains.iter().copied().take(count), &event)
        };
        assert_eq!(offender(3, Some(function), true), 1 << 2);
        assert_eq!(offender(3, Some(function), false), 0, "an error of the hardware");
        assert_eq!(offender(3, Some(Address::from_number(0x20)), true), 0, "no server drives it");
        assert_eq!(offender(2, Some(function), true), 0, "its server has ended");
        assert_eq!(offender(3, None, true), 0, "another stream");
    }

    #[test]
    fn a_device_cannot_keep_root_reading() {
        let event = || Some(Event { function: None, is_blocked_request: true, words: [0; 2] });
        let mut last = 0;
        assert_eq!(take_all(event, |number, _| last = number), MAX_EVENTS);
        assert_eq!(last, MAX_EVENTS - 1);
        assert_eq!(take_all(|| None, |_, _| {}), 0);
    }
}
