//! AMD IOMMUs. All of the machine share one device table.
//!
//! Interrupts are remapped if the firmware describes all I/O APICs; otherwise their interrupts
//! could not be distinguished from a device's. Then a function without a server may send none. A
//! server's function has a table with one interrupt, of root's message; all its other writes to
//! interrupt addresses are blocked: other vectors and processors, NMI, INIT and external
//! interrupts. The I/O APICs share a table in which the index of an interrupt is its vector, so the
//! kernel, which programs them, is unaffected. Without remapping, interrupts pass.
//!
//! Reference: [`hw_x86::iommu`].

use abi::PAGE_SIZE;
use heapless::Vec;
use hw_tables::acpi::{Ivrs, IvrsIoApic, Madt, MadtEntry};
use hw_x86::apic::msi;
pub use hw_x86::iommu::{ADDRESS_LIMIT, LEVELS, index, leaf, next_table, table};
use hw_x86::iommu::{
    BLOCKED, DEVICE_ENTRY, DEVICE_TABLE_LENGTH, ENTRY, INTERRUPT_ENTRY, INTERRUPTS, RING_PAGE,
    command, control, device_entry, event_device, is_blocked_request, register, remapped, status,
    with_interrupts,
};
use native_rt::device::DeviceRegisters;
use native_rt::start::Boot;
use native_rt::{Window, info, warn};

use super::{Event, MAX_POLLS, Message, physical, read, write};
use crate::memory::Memory;
use crate::pci::{Address, Pci};
use crate::platform::x86::table as firmware_table;

/// Maximum number of IOMMUs.
const MAX_UNITS: usize = 8;
/// Most I/O APICs; the kernel uses no more.
const MAX_IO_APICS: usize = 8;
/// Pages of an interrupt remapping table. It has as many entries as a message can name, since QEMU
/// looks beyond a shorter one.
const INTERRUPT_PAGES: u64 = (INTERRUPTS * INTERRUPT_ENTRY).div_ceil(PAGE_SIZE);

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

/// Remapping of the I/O APICs' interrupts.
struct Lines {
    /// The functions that the interrupts come from.
    devices: Vec<u16, MAX_IO_APICS>,
    /// Their table.
    table: Window,
}

/// All IOMMUs.
pub struct Units {
    units: Vec<Unit, MAX_UNITS>,
    devices: Window,
    /// `None`: interrupts are not remapped.
    lines: Option<Lines>,
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
        let madt = Madt::parse(firmware_table(boot, Madt::SIGNATURE)?).ok()?;
        let ids = madt.entries().filter_map(|entry| match entry {
            MadtEntry::IoApic { id, .. } => Some(id),
            _ => None,
        });
        let devices = sources(ids, || ivrs.io_apics())?;
        Some(Self { devices, table: memory.allocate(owner, INTERRUPT_PAGES)? })
    }
}

impl Units {
    /// Enables all IOMMUs. Returns `None` if there are none.
    pub fn new(boot: &Boot, _: &Pci, memory: &mut Memory, owner: usize) -> Option<Self> {
        let ivrs = Ivrs::parse(firmware_table(boot, Ivrs::SIGNATURE)?).ok()?;
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
        (!units.is_empty()).then_some(Self { units, devices, lines })
    }

    /// Pages that a server's domain needs beside its page tables: the remapping table of its
    /// function's interrupts.
    pub fn further_pages(&self) -> u64 {
        if self.lines.is_some() { INTERRUPT_PAGES } else { 0 }
    }

    /// The message by which a function is to interrupt, so that it arrives as `message`.
    pub fn message(&mut self, interrupts: Option<Window>, message: Message) -> Message {
        const FIRST: u64 = 0;
        let Some(table) = interrupts else { return message };
        remap(table, FIRST, message);
        (msi::ADDRESS, FIRST)
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

    /// Lets a function access what the page tables of a server permit, and interrupt.
    pub fn allow(
        &mut self,
        function: Address,
        server: usize,
        tables: Window,
        interrupts: Option<Window>,
    ) {
        let entry = device_entry(physical(tables), domain_number(server));
        let entry = match interrupts {
            Some(table) => with_interrupts(entry, Some(physical(table))),
            None => entry,
        };
        // The rights last: the first word alone has none yet.
        let at = u64::from(function.number()) * DEVICE_ENTRY;
        write(self.devices, at + 8, &entry[1..]);
        write(self.devices, at, &entry[..1]);
        self.forget(function, server);
    }

    /// Removes all access of a server's function.
    pub fn deny(&mut self, function: Address, server: usize) {
        // The rights first: the first word alone has none any more.
        let at = u64::from(function.number()) * DEVICE_ENTRY;
        write(self.devices, at, &blocked(self.lines.is_some()));
        self.forget(function, server);
    }

    fn forget(&mut self, function: Address, server: usize) {
        for unit in &mut self.units {
            unit.forget(function.number(), domain_number(server));
        }
    }

    /// Takes the oldest event of a log.
    pub fn next_event(&mut self) -> Option<Event> {
        let words = self.units.iter_mut().find_map(Unit::next_event)?;
        Some(Event {
            function: Some(Address::from_number(event_device(words[0]))),
            is_blocked_request: is_blocked_request(words[0]),
            words,
        })
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
}
