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
pub use hw_x86::iommu::{ADDRESS_LIMIT, LEVELS, block, index, leaf, next_table, table};
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

/// Registers of the exclusion range (section 3.4), in which devices access memory untranslated.
const EXCLUSION: [u64; 2] = [0x20, 0x28];
/// Extended features (section 3.4): the IOMMU has [`INVALIDATE_ALL`].
const FEATURES: u64 = 0x30;
const HAS_INVALIDATE_ALL: u64 = 1 << 6;
/// Command that invalidates all cached entries (INVALIDATE_IOMMU_ALL, section 2.4.8).
const INVALIDATE_ALL: [u64; 2] = [8 << 60, 0];
/// Maximum number of commands without a wait for their completion; the buffer has 256.
const MAX_COMMANDS: usize = 128;

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
            let Some(mut unit) = unit.filter(|_| !units.is_full()) else {
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

    /// Removes all access of a server's function. Returns `false` if an IOMMU does not confirm it.
    pub fn deny(&mut self, function: Address, server: usize) -> bool {
        // The rights first: the first word alone has none any more.
        let at = u64::from(function.number()) * DEVICE_ENTRY;
        write(self.devices, at, &blocked(self.lines.is_some()));
        self.forget(function, server)
    }

    fn forget(&mut self, function: Address, server: usize) -> bool {
        let mut all_done = true;
        for unit in &mut self.units {
            all_done &= unit.forget(function.number(), domain_number(server));
        }
        all_done
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

/// Returns the commands that invalidate everything an IOMMU may have cached for its last owner.
fn invalidations(has_invalidate_all: bool) -> impl Iterator<Item = [u64; 2]> {
    let all = has_invalidate_all.then_some(INVALIDATE_ALL);
    // Functions and domains have numbers of 16 bits.
    let numbers = (!has_invalidate_all).then_some(0..=u16::MAX);
    let each = |number| {
        [
            command::invalidate_device(number),
            command::invalidate_domain(number),
            command::invalidate_interrupts(number),
        ]
    };
    all.into_iter().chain(numbers.into_iter().flatten().flat_map(each))
}

/// Executes commands until the IOMMU does not complete some in time: each further wait would last
/// as long. `execute` gets a command and whether to wait for the completion of all up to it; it
/// returns `false` if the IOMMU did not complete them. Returns `false` in that case, too.
fn execute_all(
    commands: impl Iterator<Item = [u64; 2]>,
    mut execute: impl FnMut([u64; 2], bool) -> bool,
) -> bool {
    (1..).zip(commands).all(|(number, command)| execute(command, number % MAX_COMMANDS == 0))
}

/// Takes the event at `head` of a log that ends at `tail`, and clears it. `read` returns the word
/// at an offset, `clear` clears the event at an offset. Returns `None` if there is no event, or if
/// the IOMMU has moved the end and not written the event yet: a cleared event has code 0.
fn take_event(
    head: &mut u64,
    tail: u64,
    read: impl Fn(u64) -> u64,
    clear: impl FnOnce(u64),
) -> Option<[u64; 2]> {
    const CODE_SHIFT: u32 = 60;
    if tail == *head {
        return None;
    }
    let first = read(*head);
    if first >> CODE_SHIFT == 0 {
        return None;
    }
    let event = [first, read(*head + 8)];
    clear(*head);
    *head = (*head + ENTRY) % PAGE_SIZE;
    Some(event)
}

/// Domain 0 is nobody's.
fn domain_number(server: usize) -> u16 {
    server as u16 + 1
}

impl Unit {
    const EVENTS: u64 = PAGE_SIZE;
    const ANSWER: u64 = 2 * PAGE_SIZE;

    /// Enables the IOMMU, from any state that the firmware has left.
    fn enable(&mut self, devices: Window) {
        let registers = self.registers;
        let base = physical(self.pages);
        registers.write64(register::CONTROL, 0);
        EXCLUSION.into_iter().for_each(|offset| registers.write64(offset, 0));
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
        let has_invalidate_all = registers.read64(FEATURES) & HAS_INVALIDATE_ALL != 0;
        let answers = execute_all(invalidations(has_invalidate_all), |command, waits| {
            self.put(command);
            !waits || self.complete()
        });
        if answers {
            self.complete();
        }
    }

    fn put(&mut self, command: [u64; 2]) {
        write(self.pages, self.tail, &command);
        self.tail = (self.tail + ENTRY) % PAGE_SIZE;
    }

    /// Invalidates the cached entries of a function and a domain, and waits for the completion.
    /// Returns `false` if there is none in time.
    fn forget(&mut self, device: u16, domain: u16) -> bool {
        self.put(command::invalidate_device(device));
        self.put(command::invalidate_domain(domain));
        self.invalidate_interrupts(device)
    }

    /// Invalidates what the unit has cached of a function's interrupts, and waits until it has
    /// completed all commands. Returns `false` if it did not in time.
    fn invalidate_interrupts(&mut self, device: u16) -> bool {
        self.put(command::invalidate_interrupts(device));
        self.complete()
    }

    /// Lets the IOMMU execute all commands, and waits until it has completed them. Returns `false`
    /// if it did not in time.
    fn complete(&mut self) -> bool {
        self.answer += 1;
        let place = physical(self.pages) + Self::ANSWER;
        self.put(command::completion(place, self.answer));
        self.registers.write64(register::COMMAND_TAIL, self.tail);
        let done = (0..MAX_POLLS).any(|_| read(self.pages, Self::ANSWER) == self.answer);
        if !done {
            warn!("an IOMMU did not complete a command in time");
        }
        done
    }

    /// Takes the oldest event.
    fn next_event(&mut self) -> Option<[u64; 2]> {
        let tail = self.registers.read64(register::EVENT_TAIL) % PAGE_SIZE;
        let pages = self.pages;
        let read_event = |offset| read(pages, Self::EVENTS + offset);
        let clear = |offset| write(pages, Self::EVENTS + offset, &[0; 2]);
        let event = take_event(&mut self.head, tail, read_event, clear);
        if event.is_some() {
            self.registers.write64(register::EVENT_HEAD, self.head);
        } else if self.registers.read64(register::STATUS) & status::EVENT_OVERFLOW != 0 {
            warn!("IOMMU: event log overflow");
            self.restart_log();
        }
        event
    }

    /// Restarts the event log after an overflow (section 2.5.1).
    fn restart_log(&mut self) {
        let control = self.registers.read64(register::CONTROL);
        self.registers.write64(register::CONTROL, control & !control::EVENT_LOG);
        write(self.pages, Self::EVENTS, &[0; PAGE_SIZE as usize / 8]);
        self.head = 0;
        self.registers.write64(register::EVENT_HEAD, 0);
        self.registers.write64(register::EVENT_TAIL, 0);
        self.registers.write64(register::STATUS, status::EVENT_OVERFLOW);
        self.registers.write64(register::CONTROL, control);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::nothing;
    use super::super::{Domain, Iommu};
    use super::*;
    use crate::manager::CHILDREN;

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
    fn the_next_vm_is_not_stopped_for_the_last_one() {
        let [first, second] = [0x18, 0x20].map(Address::from_number);
        let (_, nothing) = nothing();
        let domain = |functions| Domain { pages: nothing, used: 0, further: None, functions };
        let units = Units { units: Vec::new(), devices: nothing, lines: None };
        let mut iommu = Iommu { units, domains: [const { None }; CHILDREN], offenders: 1 << 2 };
        iommu.domains[1] = Some(domain(Vec::from_iter([first])));
        iommu.domains[2] = Some(domain(Vec::from_iter([second])));
        assert!(iommu.is_of_another(2, first) && !iommu.is_of_another(1, first));
        assert!(iommu.deny(2, first), "another's");
        assert_eq!(
            (&iommu.functions(1)[..], &iommu.functions(2)[..]),
            (&[first][..], &[second][..])
        );
        assert!(iommu.remove(2));
        assert!(iommu.functions(2).is_empty() && !iommu.is_of_another(1, second));
        assert_eq!(iommu.take_offender(), None);
    }

    #[test]
    fn a_function_without_a_server_sends_nothing() {
        assert_eq!(blocked(true), [BLOCKED[0], 0, 1, 0]);
        assert_eq!(blocked(false), BLOCKED, "the machine could not remap what it let pass");
    }

    #[test]
    fn everything_cached_before_is_invalidated() {
        assert_eq!(invalidations(true).collect::<std::vec::Vec<_>>(), [INVALIDATE_ALL]);
        let each: std::collections::BTreeSet<_> = invalidations(false).collect();
        assert_eq!(each.len(), 3 << 16);
        for number in [0, 1, 0x18, u16::MAX] {
            assert!(each.contains(&command::invalidate_device(number)));
            assert!(each.contains(&command::invalidate_domain(number)));
            assert!(each.contains(&command::invalidate_interrupts(number)));
        }
    }

    #[test]
    fn an_iommu_that_does_not_answer_is_waited_for_once() {
        let (mut commands, mut waits) = (0, 0);
        let mut execute_all = |answers| {
            (commands, waits) = (0, 0);
            let is_done = execute_all(invalidations(false), |_, is_wait| {
                commands += 1;
                waits += usize::from(is_wait);
                !is_wait || answers
            });
            (is_done, commands, waits)
        };
        assert_eq!(execute_all(true), (true, 3 << 16, (3 << 16) / MAX_COMMANDS));
        assert_eq!(execute_all(false), (false, MAX_COMMANDS, 1));
    }

    #[test]
    fn an_event_is_read_after_the_iommu_has_written_it() {
        use std::cell::RefCell;
        let log = RefCell::new([0; PAGE_SIZE as usize / 8]);
        let last = PAGE_SIZE - ENTRY;
        let mut head = last;
        let put = |offset: u64, words: [u64; 2]| {
            log.borrow_mut()[offset as usize / 8..][..2].copy_from_slice(&words);
        };
        let mut take = |tail| {
            let read = |offset: u64| log.borrow()[offset as usize / 8];
            take_event(&mut head, tail, read, |offset| put(offset, [0; 2]))
        };
        assert_eq!(take(last), None, "the log is empty");
        // The IOMMU moves the end first.
        assert_eq!(take(ENTRY), None);
        put(last, [2 << 60 | 0x18, 0x5000]);
        put(0, [8 << 60, 0]);
        assert_eq!(take(ENTRY), Some([2 << 60 | 0x18, 0x5000]));
        assert_eq!(take(ENTRY), Some([8 << 60, 0]));
        assert_eq!(take(ENTRY), None);
        // One round later, the old event is not read again.
        for offset in (ENTRY..last).step_by(ENTRY as usize) {
            put(offset, [2 << 60, 0]);
            assert_eq!(take(offset + ENTRY), Some([2 << 60, 0]));
        }
        assert_eq!(take(0), None);
        put(last, [1 << 60, 7]);
        assert_eq!(take(0), Some([1 << 60, 7]));
    }
}
