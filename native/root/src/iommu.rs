//! AMD IOMMUs: memory that a device may access, and interrupts that it may send.
//!
//! Root owns all memory anyway, so root has the driver of the hardware that protects it from
//! devices, and the kernel needs none. All IOMMUs of the machine share one device table. A function
//! without a server may access no memory. A function with a server may access the server's DMA
//! memory, and the sessions of its clients, at their physical addresses. Page tables belong to a
//! server's index and are permanent, as that memory is, so a restarted server reuses them.
//!
//! Interrupts are remapped if the firmware describes all I/O APICs; otherwise their interrupts
//! could not be distinguished from a device's. Then a function without a server may send none. A
//! server's function has a table with one interrupt, of root's message; all its other writes to
//! interrupt addresses are blocked: other vectors and processors, NMI, INIT and external
//! interrupts. The I/O APICs share a table in which the index of an interrupt is its vector, so the
//! kernel, which programs them, is unaffected. Without remapping, interrupts pass.
//!
//! The IOMMUs log what they block. A server whose function made such a request is stopped.
//!
//! Reference: [`hw_x86::iommu`].

use abi::{PAGE_SIZE, boot};
use heapless::Vec;
use hw_tables::acpi::{Ivrs, IvrsIoApic, Madt, MadtEntry};
use hw_x86::apic::msi;
use hw_x86::iommu::{
    ADDRESS_LIMIT, BLOCKED, DEVICE_ENTRY, DEVICE_TABLE_LENGTH, ENTRY, INTERRUPT_ENTRY, INTERRUPTS,
    LEVELS, RING_PAGE, command, control, device_entry, event_device, index, is_blocked_request,
    leaf, next_table, register, remapped, status, table, with_interrupts,
};
use native_rt::device::DeviceRegisters;
use native_rt::start::Boot;
use native_rt::{Window, info, warn};
use proto::system::MAX_SERVERS;

use crate::memory::Memory;
use crate::pci::{self, Address};

/// Maximum number of IOMMUs.
const MAX_UNITS: usize = 8;
/// Most I/O APICs; the kernel uses no more.
const MAX_IO_APICS: usize = 8;
/// Pages of an interrupt remapping table. It has as many entries as a message can name, since QEMU
/// looks beyond a shorter one.
const INTERRUPT_PAGES: u64 = (INTERRUPTS * INTERRUPT_ENTRY).div_ceil(PAGE_SIZE);
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

/// A server's page tables; the first page is the root. And the remapping table of its function's
/// interrupts, if they are remapped.
struct Domain {
    pages: Window,
    used: u64,
    interrupts: Option<Window>,
    /// The function that the server drives now.
    function: Option<Address>,
}

/// Remapping of the I/O APICs' interrupts.
struct Lines {
    /// The functions that the interrupts come from.
    devices: Vec<u16, MAX_IO_APICS>,
    /// Their table.
    table: Window,
}

/// Address and data by which a function interrupts, or an input of an I/O APIC.
pub type Message = (u64, u64);

/// All IOMMUs.
pub struct Iommu {
    units: Vec<Unit, MAX_UNITS>,
    devices: Window,
    domains: [Option<Domain>; MAX_SERVERS],
    /// `None`: interrupts are not remapped.
    lines: Option<Lines>,
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

/// Makes an entry of an interrupt remapping table: message `number` arrives as `message` does
/// without remapping.
fn remap(table: Window, number: u64, (address, data): Message) {
    let apic_id = (address >> msi::DESTINATION_SHIFT) as u8;
    let entry = remapped(data as u8, apic_id);
    let _ = table.write(number * INTERRUPT_ENTRY, &entry.to_le_bytes());
}

/// The functions that the I/O APICs' interrupts come from, by their ids in the MADT. `None`: not
/// all are known.
fn sources<I: Iterator<Item = IvrsIoApic>>(
    ids: impl Iterator<Item = u8>,
    known: impl Fn() -> I,
) -> Option<Vec<u16, MAX_IO_APICS>> {
    let mut devices = Vec::new();
    for id in ids {
        let io_apic = known().find(|known| known.id == id)?;
        devices.push(io_apic.device).ok()?;
    }
    (!devices.is_empty()).then_some(devices)
}

impl Lines {
    /// `None`: interrupts cannot be remapped.
    fn new(boot: &Boot, ivrs: Ivrs, memory: &mut Memory, owner: usize) -> Option<Self> {
        let madt = Madt::parse(pci::table(boot, Madt::SIGNATURE)?).ok()?;
        let ids = madt.entries().filter_map(|entry| match entry {
            MadtEntry::IoApic { id, .. } => Some(id),
            _ => None,
        });
        let devices = sources(ids, || ivrs.io_apics())?;
        Some(Self { devices, table: memory.allocate(owner, INTERRUPT_PAGES)? })
    }
}

impl Iommu {
    /// Enables all IOMMUs; from then on no device may access memory. Returns `None` if there are
    /// none. Their memory belongs to `owner`.
    pub fn new(boot: &Boot, memory: &mut Memory, owner: usize) -> Option<Self> {
        let ivrs = Ivrs::parse(pci::table(boot, Ivrs::SIGNATURE)?).ok()?;
        let pages = DEVICE_TABLE_LENGTH / PAGE_SIZE;
        let devices = memory.allocate_aligned(owner, pages, pages)?;
        let lines = Lines::new(boot, ivrs, memory, owner);
        for entry in 0..DEVICE_TABLE_LENGTH / DEVICE_ENTRY {
            write(devices, entry * DEVICE_ENTRY, &blocked(lines.is_some()));
        }
        for &device in lines.iter().flat_map(|lines| &lines.devices) {
            let table = lines.as_ref().map(|lines| physical(lines.table));
            write(devices, u64::from(device) * DEVICE_ENTRY, &with_interrupts(BLOCKED, table));
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
            info!("IOMMU at {:#x}: devices may access what their servers have", iommu.base);
            if lines.is_none() {
                warn!("the IOMMU remaps no interrupts: devices may send any");
            }
            // There is room for as many.
            let _ = (bases.push(iommu.base), units.push(unit));
        }
        (!units.is_empty()).then_some(Self {
            units,
            devices,
            domains: [const { None }; MAX_SERVERS],
            lines,
            offenders: 0,
        })
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
            let interrupts = match self.lines {
                Some(_) => Some(memory.allocate(owner, INTERRUPT_PAGES).ok_or(NoRoom)?),
                None => None,
            };
            let mut new = Domain { pages, used: 0, interrupts, function: None };
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
        const FIRST: u64 = 0;
        let domain = self.domain(memory, owner, server)?;
        let Some(table) = domain.interrupts else { return Ok(message) };
        remap(table, FIRST, message);
        Ok((msi::ADDRESS, FIRST))
    }

    /// An input of an I/O APIC may interrupt by this message.
    pub fn add_line(&mut self, message: Message) {
        let Some(lines) = &self.lines else { return };
        // The I/O APIC's own vector is the number of its message.
        remap(lines.table, message.1 & 0xff, message);
        for unit in &mut self.units {
            for &device in &lines.devices {
                unit.invalidate_interrupts(device);
            }
        }
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
        let entry = device_entry(physical(domain.pages), domain_number(server));
        let entry = match domain.interrupts {
            Some(table) => with_interrupts(entry, Some(physical(table))),
            None => entry,
        };
        // Earlier requests of the function are not this server's.
        self.report();
        if let Some(domain) = &mut self.domains[server] {
            domain.function = Some(function);
        }
        self.set(function, server, entry);
        Ok(())
    }

    /// Removes all access of a server's function.
    pub fn deny(&mut self, server: usize, function: Address) {
        if let Some(domain) = self.domains.get_mut(server).and_then(Option::as_mut) {
            domain.function = None;
            self.offenders &= !(1 << server);
        }
        self.set(function, server, blocked(self.lines.is_some()));
    }

    fn set(&mut self, function: Address, server: usize, entry: [u64; 4]) {
        let device = function.number();
        let at = u64::from(device) * DEVICE_ENTRY;
        // The rights last when they are given, first when they are taken: either way the first word
        // alone has none yet, or none any more.
        if entry[0] == BLOCKED[0] {
            write(self.devices, at, &entry);
        } else {
            write(self.devices, at + 8, &entry[1..]);
            write(self.devices, at, &entry[..1]);
        }
        for unit in &mut self.units {
            unit.forget(device, domain_number(server));
        }
    }

    /// Reads the logs of the IOMMUs, logs what they blocked, and notes the servers whose functions
    /// it came from for [`take_offender`](Self::take_offender).
    pub fn report(&mut self) {
        let mut logged = 0;
        let mut more = 0;
        for unit in &mut self.units {
            while let Some([first, second]) = unit.next_event() {
                let function = Address::from_number(event_device(first));
                let driven = self.domains.iter().map(|domain| domain.as_ref()?.function);
                self.offenders |= offender(driven, function, first);
                if logged < MAX_LOGGED {
                    warn!("IOMMU: event of PCI function {function}: {first:#018x} {second:#018x}");
                    logged += 1;
                } else {
                    more += 1;
                }
            }
        }
        if more != 0 {
            warn!("IOMMU: {more} more events");
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

/// Returns the server that an event accuses, as a bit mask: the one that drives the function now,
/// if the event is a blocked request. `driven` are the servers' functions, by index.
fn offender(
    mut driven: impl Iterator<Item = Option<Address>>,
    function: Address,
    first: u64,
) -> u64 {
    match driven.position(|driven| driven == Some(function)) {
        Some(server) if is_blocked_request(first) => 1 << server,
        _ => 0,
    }
}

/// Device table entry of a function that no server drives.
fn blocked(remaps: bool) -> [u64; 4] {
    if remaps { with_interrupts(BLOCKED, None) } else { BLOCKED }
}

/// Domain 0 is nobody's.
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
        self.put(command::invalidate_device(device));
        self.put(command::invalidate_domain(domain));
        self.invalidate_interrupts(device);
    }

    /// Invalidates what the unit has cached of a function's interrupts, and waits until it has
    /// completed all commands.
    fn invalidate_interrupts(&mut self, device: u16) {
        self.answer += 1;
        let place = physical(self.pages) + Self::ANSWER;
        self.put(command::invalidate_interrupts(device));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_are_remapped_if_all_io_apics_are_known() {
        let known = [(0, 0xa0), (2, 0xa1), (0, 0xa2)];
        let known = known.map(|(id, device)| IvrsIoApic { id, device });
        let find = |ids: &[u8]| sources(ids.iter().copied(), || known.iter().copied());
        assert_eq!(find(&[2, 0]).as_deref(), Some(&[0xa1, 0xa0][..]));
        assert_eq!(find(&[0, 1]), None, "interrupts of the second one would be blocked");
        assert_eq!(find(&[]), None, "nothing says that there are no others");
        assert_eq!(find(&[0; MAX_IO_APICS + 1]), None);
    }

    #[test]
    fn a_function_without_a_server_sends_nothing() {
        assert_eq!(blocked(true), [BLOCKED[0], 0, 1, 0]);
        assert_eq!(blocked(false), BLOCKED, "the machine could not remap what it let pass");
    }

    #[test]
    fn a_blocked_request_accuses_the_server_that_drives_the_function() {
        let function = Address::from_number(0x18);
        let domains = [None, None, Some(function)];
        let offender =
            |count, function, first| offender(domains.iter().copied().take(count), function, first);
        let fault = 2 << 60 | 0x18;
        assert_eq!(offender(3, function, fault), 1 << 2);
        assert_eq!(offender(3, function, 4 << 60 | 0x18), 0, "an error of the hardware");
        assert_eq!(offender(3, Address::from_number(0x20), fault), 0, "no server drives it");
        assert_eq!(offender(2, function, fault), 0, "its server has ended");
    }
}
