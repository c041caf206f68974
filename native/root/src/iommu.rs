//! IOMMUs: memory that a device may access, and interrupts that it may send.
//!
//! Root owns all memory anyway, so root has the driver of the hardware that protects it from
//! devices, and the kernel needs none. A function without a driver may access no memory. A function
//! with a server may access the server's DMA memory, and the sessions of its clients, at their
//! physical addresses. Page tables belong to a server's index and are permanent, as that memory is,
//! so a restarted server reuses them. A function that a guest drives may access the guest's memory,
//! at guest-physical addresses; its page tables end with the VM ([`Iommu::remove`]).
//!
//! The IOMMUs log what they block. A server or VM whose function made such a request is stopped.
//!
//! A module per kind has the same items: the format of its page tables, and `Units`, all IOMMUs of
//! the machine.

use abi::{PAGE_SIZE, boot};
use heapless::Vec;
use native_rt::start::Boot;
use native_rt::{Window, warn};
use proto::system::MAX_VM_DEVICES;

use crate::manager::CHILDREN;
use crate::memory::{MAX_GUEST_PIECES, Memory};
use crate::pci::{Address, Pci};

#[cfg(target_arch = "x86_64")]
mod amd;
#[cfg(any(test, target_arch = "aarch64"))]
mod smmu;

#[cfg(target_arch = "x86_64")]
use amd::{ADDRESS_LIMIT, LEVELS, Units, block, index, leaf, next_table, table};
#[cfg(target_arch = "aarch64")]
use smmu::{ADDRESS_LIMIT, LEVELS, Units, block, index, leaf, next_table, table};

/// Pages of a server's page tables: for memory in about as many places.
const TABLE_PAGES: u64 = 32;
/// Memory that one entry of level 2 maps, in bytes.
const BLOCK: u64 = 512 * PAGE_SIZE;
/// Maximum number of polls until a command must be complete.
const MAX_POLLS: u32 = 10_000_000;
/// Maximum number of events logged per call.
const MAX_LOGGED: u32 = 4;
/// Maximum number of events read per call: a device may cause them faster than root reads them.
const MAX_EVENTS: u32 = 256;

/// Page tables of a server or VM, the first page is the root; and further pages that the kind of
/// IOMMU needs.
struct Domain {
    pages: Window,
    used: u64,
    further: Option<Window>,
    /// The functions that are driven now: one of a server.
    functions: Vec<Address, MAX_VM_DEVICES>,
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

/// All IOMMUs, and the memory that the functions of each child, a server or a VM, may access.
pub struct Iommu {
    units: Units,
    domains: [Option<Domain>; CHILDREN],
    /// Children whose function made a request that was blocked, as a bit mask.
    offenders: u64,
}

const _: () = assert!(CHILDREN <= u64::BITS as usize);

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
        Some(Self { units, domains: [const { None }; CHILDREN], offenders: 0 })
    }

    /// The tables of a child, made at its first use: `pages` pages of `owner`.
    fn domain(
        &mut self,
        memory: &mut Memory,
        (owner, pages): (usize, u64),
        child: usize,
    ) -> Result<&mut Domain, NoRoom> {
        let domain = self.domains.get_mut(child).ok_or(NoRoom)?;
        if domain.is_none() {
            let pages = memory.allocate(owner, pages).ok_or(NoRoom)?;
            let further = match self.units.further_pages() {
                0 => None,
                count => Some(memory.allocate(owner, count).ok_or(NoRoom)?),
            };
            let mut new = Domain { pages, used: 0, further, functions: Vec::new() };
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
        let further = self.domain(memory, (owner, TABLE_PAGES), server)?.further;
        Ok(self.units.message(further, message))
    }

    /// An input of an I/O APIC may interrupt by this message.
    pub fn add_line(&mut self, message: Message) {
        self.units.add_line(message);
    }

    /// Lets the function of a server access these windows at their physical addresses, and nothing
    /// else.
    pub fn allow(
        &mut self,
        memory: &mut Memory,
        owner: usize,
        server: usize,
        function: Address,
        windows: impl Iterator<Item = Window>,
    ) -> Result<(), NoRoom> {
        let domain = self.domain(memory, (owner, TABLE_PAGES), server)?;
        for window in windows {
            domain.map_window(physical(window), window).ok_or(NoRoom)?;
        }
        self.enable(server, function)
    }

    /// Lets a function that a guest drives access guest memory, and nothing else: these windows,
    /// one after the other from guest-physical address `base` on. The tables belong to the VM, and
    /// all its functions share them.
    pub fn allow_guest(
        &mut self,
        memory: &mut Memory,
        vm: usize,
        function: Address,
        (base, windows): (u64, &[Window]),
    ) -> Result<(), NoRoom> {
        if self.domains.get(vm).is_none_or(Option::is_none) {
            let bytes = windows.iter().map(|window| window.length()).sum();
            let domain = self.domain(memory, (vm, guest_table_pages(bytes)), vm)?;
            let mut address = base;
            for &window in windows {
                domain.map_window(address, window).ok_or(NoRoom)?;
                address += window.length();
            }
        }
        self.enable(vm, function)
    }

    /// Puts a function into the domain of a child, which exists.
    fn enable(&mut self, child: usize, function: Address) -> Result<(), NoRoom> {
        // Earlier requests of the function are not this child's.
        self.report();
        let domain = self.domains.get_mut(child).and_then(Option::as_mut).ok_or(NoRoom)?;
        domain.functions.push(function).map_err(|_| NoRoom)?;
        self.units.allow(function, child, domain.pages, domain.further);
        Ok(())
    }

    /// The functions that a child drives now, in the order in which they were allowed.
    pub fn functions(&self, child: usize) -> Vec<Address, MAX_VM_DEVICES> {
        let functions = self.domains.get(child).map_or(&[][..], Domain::functions);
        functions.iter().copied().collect()
    }

    /// Returns whether a child other than this one drives a function now. Functions are found by
    /// their position among those of their class, which changes if one is absent.
    pub fn is_of_another(&self, child: usize, function: Address) -> bool {
        let driven = self.domains.iter().map(Domain::functions);
        owner(driven, function).is_some_and(|owner| owner != child)
    }

    /// Removes all access of a child's function; no effect on one that another child drives.
    /// Returns `false` if an IOMMU does not confirm it: the function may still access the child's
    /// memory.
    pub fn deny(&mut self, child: usize, function: Address) -> bool {
        if self.is_of_another(child, function) {
            return true;
        }
        if let Some(domain) = self.domains.get_mut(child).and_then(Option::as_mut) {
            domain.functions.retain(|driven| *driven != function);
            self.offenders &= !(1 << child);
        }
        self.units.deny(function, child)
    }

    /// Forgets the page tables of a VM, whose memory is freed with the VM's: all its functions are
    /// denied. Returns `false` as [`deny`](Self::deny) does.
    pub fn remove(&mut self, vm: usize) -> bool {
        self.offenders &= !(1 << vm);
        let domain = self.domains.get_mut(vm).and_then(Option::take);
        let mut all_denied = true;
        for function in domain.into_iter().flat_map(|domain| domain.functions) {
            all_denied &= self.units.deny(function, vm);
        }
        all_denied
    }

    /// Reads the logs of the IOMMUs, logs what they blocked, and notes the children whose functions
    /// it came from for [`take_offender`](Self::take_offender).
    pub fn report(&mut self) {
        let Self { units, domains, offenders } = self;
        let count = take_all(
            || units.next_event(),
            |number, event| {
                let driven = domains.iter().map(Domain::functions);
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

    /// Returns whether any child drives a function.
    pub fn is_used(&self) -> bool {
        self.domains.iter().any(|domain| !Domain::functions(domain).is_empty())
    }

    /// Returns a child whose function made a request that was blocked, once.
    pub fn take_offender(&mut self) -> Option<usize> {
        let child = self.offenders.trailing_zeros() as usize;
        self.offenders &= self.offenders.wrapping_sub(1);
        (child < CHILDREN).then_some(child)
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

/// Returns the child that an event accuses, as a bit mask: the one that drives the function now, if
/// the event is a blocked request. `driven` are the children's functions, by index.
fn offender<'d>(driven: impl Iterator<Item = &'d [Address]>, event: &Event) -> u64 {
    let function = event.function.filter(|_| event.is_blocked_request);
    function.and_then(|function| owner(driven, function)).map_or(0, |child| 1 << child)
}

/// Returns the child that drives a function now.
fn owner<'d>(mut driven: impl Iterator<Item = &'d [Address]>, function: Address) -> Option<usize> {
    driven.position(|driven| driven.contains(&function))
}

/// Most pages of the tables of a guest with that much memory: one per level, per GiB that it
/// touches, and per piece that is no multiple of [`BLOCK`].
fn guest_table_pages(bytes: u64) -> u64 {
    u64::from(LEVELS) + (bytes >> 30) + 2 + MAX_GUEST_PIECES as u64
}

/// Returns the entries that map `length` bytes at a physical address to addresses from `address`
/// on: address, level, entry.
fn entries(address: u64, physical: u64, length: u64) -> impl Iterator<Item = (u64, u8, u64)> {
    let mut done = 0;
    core::iter::from_fn(move || {
        let left = length.checked_sub(done).filter(|&left| left >= PAGE_SIZE)?;
        let (at, target) = (address + done, physical + done);
        let is_block = (at | target).is_multiple_of(BLOCK) && left >= BLOCK;
        done += if is_block { BLOCK } else { PAGE_SIZE };
        Some(if is_block { (at, 2, block(target)) } else { (at, 1, leaf(target)) })
    })
}

impl Domain {
    /// The functions that a child drives now.
    fn functions(domain: &Option<Self>) -> &[Address] {
        domain.as_ref().map_or(&[], |domain| &domain.functions)
    }

    /// Takes a zeroed page into use as a table; returns its offset.
    fn add_table(&mut self) -> Option<u64> {
        let offset = self.used * PAGE_SIZE;
        self.pages.part(offset, PAGE_SIZE)?;
        self.used += 1;
        Some(offset)
    }

    /// Maps a window's memory to addresses from `address` on, in blocks where both are aligned.
    fn map_window(&mut self, address: u64, window: Window) -> Option<()> {
        entries(address, physical(window), window.length())
            .try_for_each(|(at, level, entry)| self.map(at, level, entry))
    }

    /// Writes the entry of this level for an address.
    fn map(&mut self, address: u64, last: u8, entry: u64) -> Option<()> {
        if address >= ADDRESS_LIMIT {
            return None;
        }
        let base = physical(self.pages);
        let mut offset = 0;
        for level in (last + 1..=LEVELS).rev() {
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
        write(self.pages, offset + 8 * index(address, last), &[entry]);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use abi::boot::{BootInfo, MAX_REGIONS, Region, RegionKind};
    use native_rt::device::DeviceRegisters;

    use super::*;
    use crate::pass_through::tests::WITHOUT_DEVICES;

    /// Registers of no length, which read as ones, and memory of no length, which takes nothing.
    pub fn nothing() -> (DeviceRegisters, Window) {
        const DEVICE: Region =
            Region { base: 0, length: PAGE_SIZE, kind: RegionKind::Device as u32, reserved: 0 };
        static MACHINE: BootInfo =
            BootInfo { region_count: 1, regions: [DEVICE; MAX_REGIONS], ..WITHOUT_DEVICES };
        let boot = Boot { info: &MACHINE, bundle: &[] };
        boot.registers(0, 0).zip(boot.device_pages(0, 0)).expect("device memory")
    }

    #[test]
    fn a_blocked_request_accuses_the_child_that_drives_the_function() {
        let function = Address::from_number(0x18);
        let of_vm = [Address::from_number(0x28), function];
        let domains: [&[Address]; 3] = [&[], &[], &of_vm];
        let offender = |count, function, is_blocked_request| {
            let event = Event { function, is_blocked_request, words: [0; 2] };
            offender(domains.iter().copied().take(count), &event)
        };
        assert_eq!(offender(3, Some(function), true), 1 << 2);
        assert_eq!(offender(3, Some(of_vm[0]), true), 1 << 2);
        assert_eq!(offender(3, Some(function), false), 0, "an error of the hardware");
        assert_eq!(offender(3, Some(Address::from_number(0x20)), true), 0, "no server drives it");
        assert_eq!(offender(2, Some(function), true), 0, "its server has ended");
        assert_eq!(offender(3, None, true), 0, "another stream");
    }

    #[test]
    fn a_function_belongs_to_the_child_that_drives_it() {
        let [first, second, free] = [0x18, 0x20, 0x28].map(Address::from_number);
        let domains: [&[Address]; 3] = [&[], &[first], &[second]];
        let owner = |function| owner(domains.into_iter(), function);
        assert_eq!((owner(first), owner(second), owner(free)), (Some(1), Some(2), None));
    }

    #[test]
    fn guest_memory_is_mapped_in_blocks_where_both_addresses_allow_it() {
        let all =
            |address, physical, length| entries(address, physical, length).collect::<Vec<_>>();
        assert_eq!(
            all(0x4000_0000, 0x1_2020_0000, BLOCK),
            [(0x4000_0000, 2, block(0x1_2020_0000))]
        );
        // A piece of 1 MiB, and one whose addresses differ by less than a block.
        for (address, physical, length) in
            [(0x4020_0000, 0x8000_0000, BLOCK / 2), (0x4000_0000, 0x8010_0000, BLOCK)]
        {
            let entries = all(address, physical, length);
            assert_eq!(entries.len() as u64, length / PAGE_SIZE);
            let last = length - PAGE_SIZE;
            assert_eq!(entries[0], (address, 1, leaf(physical)));
            assert_eq!(entries.last(), Some(&(address + last, 1, leaf(physical + last))));
        }
        let (address, physical) = (0x4000_0000, 0x2_0000_0000);
        let tail = all(address, physical, 2 * BLOCK + 2 * PAGE_SIZE);
        assert_eq!(tail.iter().map(|entry| entry.1).collect::<Vec<_>>(), [2, 2, 1, 1]);
        assert_eq!(tail[3].0, address + 2 * BLOCK + PAGE_SIZE);
        assert_eq!(all(address, physical, 0), []);
        assert_eq!(guest_table_pages(128 << 20), u64::from(LEVELS) + 2 + 20);
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
