//! SMMU version 3: the one that the device tree names for the PCI functions.
//!
//! A function's stream has no valid entry while nothing drives it, so its requests fail and are
//! events. Stage 1 translates: for a server each page to its own address, for a guest
//! guest-physical addresses to physical ones; an SMMU that has stage 2 alone is refused. Functions
//! interrupt by lines, which the SMMU does not see.
//!
//! Reference: [`hw_arm64::smmu`].

use core::sync::atomic::{Ordering, fence};

use abi::PAGE_SIZE;
use heapless::Vec;
#[cfg_attr(test, allow(unused_imports, reason = "that of the host's architecture is used"))]
pub use hw_arm64::smmu::{ADDRESS_LIMIT, LEVELS, block, index, leaf, next_table, table};
use hw_arm64::smmu::{
    BLOCKED, COMMAND, COMMAND_ERROR, COMPATIBLE, CR1_CACHED, CR2_RECORD, EVENT, OVERFLOW,
    STREAM_ENTRY, command, context, cr0, event_stream, idr0, idr1, idr5, is_blocked_request, queue,
    register, stream_entry, stream_table,
};
use hw_tables::fdt::pci::Streams;
use native_rt::device::DeviceRegisters;
use native_rt::start::Boot;
use native_rt::{Window, info, warn};

use super::{Event, MAX_POLLS, Message, physical, read, write};
use crate::memory::Memory;
use crate::pci::{Address, Pci};
use crate::platform::arm64::{pci_node, tree};

/// Entries of the queues, as `log2`: each has a page at most.
const COMMANDS_LOG2: u32 = (PAGE_SIZE / COMMAND).ilog2();
const EVENTS_LOG2: u32 = (PAGE_SIZE / EVENT).ilog2();

/// Most ranges of functions with consecutive streams.
const MAX_RANGES: usize = 8;

/// The SMMU: its registers, the stream table, and a page for commands and one for events.
pub struct Units {
    registers: DeviceRegisters,
    streams: Window,
    pages: Window,
    /// Streams of the functions.
    map: Vec<Streams, MAX_RANGES>,
    /// Size of output addresses, coded.
    output: u32,
    /// Indices after the last command, and of the next event, with the bit that changes with each
    /// round.
    produced: u32,
    consumed: u32,
    /// It did not complete a command: nothing invalidates what it has cached any more.
    has_failed: bool,
}

/// Reason why an SMMU cannot be used.
type Unsupported = &'static str;

/// Checks the features of an SMMU that must hold `streams` streams.
fn check(features: u32, sizes: u32, pages: u32, streams: u64) -> Result<(), Unsupported> {
    const NEEDED: u32 = idr0::STAGE_1 | idr0::AARCH64 | idr0::COHERENT;
    if features & NEEDED != NEEDED || pages & idr5::PAGES_4K == 0 {
        return Err("it lacks stage 1 for AArch64 with pages of 4 KiB, or coherent tables");
    }
    if sizes & idr1::PRESET != 0 {
        return Err("its tables have fixed addresses");
    }
    if streams > 1 << (sizes & idr1::STREAM_BITS) {
        return Err("it has too few streams");
    }
    Ok(())
}

/// Entries of the stream table: a power of two, with all functions' streams, of whole pages.
fn entries(largest: u32) -> u64 {
    (u64::from(largest) + 1).next_power_of_two().max(PAGE_SIZE / STREAM_ENTRY)
}

impl Units {
    /// Enables the SMMU. Returns `None` if there is none.
    pub fn new(boot: &Boot, pci: &Pci, memory: &mut Memory, owner: usize) -> Option<Self> {
        let tree = tree(boot)?;
        let bridge = pci_node(&tree)?;
        let mut map = Vec::new();
        // Functions beyond the limit count as not the SMMU's.
        bridge.streams().take(MAX_RANGES).for_each(|streams| {
            // There is room.
            let _ = map.push(streams);
        });
        let node =
            tree.referred(map.first()?.smmu).filter(|node| node.is_compatible(COMPATIBLE))?;
        let (base, _) = node.ranges().next()?;
        match Self::enable(boot, pci, (memory, owner), map, base) {
            Ok(units) => {
                info!("IOMMU at {base:#x}: devices may access what their servers have");
                Some(units)
            }
            Err(reason) => {
                warn!(
                    "cannot enable the IOMMU at {base:#x}, {reason}: its devices can access all memory"
                );
                None
            }
        }
    }

    fn enable(
        boot: &Boot,
        pci: &Pci,
        (memory, owner): (&mut Memory, usize),
        map: Vec<Streams, MAX_RANGES>,
        base: u64,
    ) -> Result<Self, Unsupported> {
        let mut largest = Some(0);
        pci.for_each(|function| {
            let stream = stream(&map, function.address);
            largest = largest.and_then(|largest| Some(stream?.max(largest)));
        });
        let largest = largest.ok_or("which is not that of all functions")?;
        let registers = boot.registers(base, register::LENGTH).ok_or("without registers")?;
        let [features, sizes, pages] =
            [register::IDR0, register::IDR1, register::IDR5].map(|at| registers.read32(at));
        let count = entries(largest);
        check(features, sizes, pages, count)?;
        let length = count * STREAM_ENTRY / PAGE_SIZE;
        let streams = memory.allocate_aligned(owner, length, length).ok_or("without memory")?;
        let queues = memory.allocate(owner, 2).ok_or("without memory")?;
        let output = pages & idr5::OUTPUT;
        let mut units = Self {
            registers,
            streams,
            pages: queues,
            map,
            output,
            produced: 0,
            consumed: 0,
            has_failed: false,
        };
        units.start(count.ilog2())?;
        Ok(units)
    }

    /// Enables it from any state that the firmware has left (section 6.3.9.6). `log2`: of the
    /// entries of the stream table.
    fn start(&mut self, log2: u32) -> Result<(), Unsupported> {
        let registers = self.registers;
        self.control(0)?;
        registers.write32(register::IRQ_CTRL, 0);
        registers.write32(register::CR1, CR1_CACHED);
        registers.write32(register::CR2, CR2_RECORD);
        registers.write64(register::STREAM_TABLE, stream_table(physical(self.streams)));
        registers.write32(register::STREAM_TABLE_FORMAT, log2);
        let base = physical(self.pages);
        registers.write64(register::COMMANDS, queue(base, COMMANDS_LOG2));
        registers.write64(register::EVENTS, queue(base + PAGE_SIZE, EVENTS_LOG2));
        for index in [
            register::COMMANDS_PRODUCED,
            register::COMMANDS_CONSUMED,
            register::EVENTS_PRODUCED,
            register::EVENTS_CONSUMED,
        ] {
            registers.write32(index, 0);
        }
        self.control(cr0::COMMANDS)?;
        self.put(command::invalidate_all());
        self.put(command::invalidate_translations());
        if !self.complete() {
            return Err("which does not execute commands");
        }
        self.control(cr0::COMMANDS | cr0::EVENTS)?;
        self.control(cr0::COMMANDS | cr0::EVENTS | cr0::ENABLE)
    }

    /// Changes CR0, and waits until the change is in effect.
    fn control(&self, value: u32) -> Result<(), Unsupported> {
        self.registers.write32(register::CR0, value);
        let is_done = (0..MAX_POLLS).any(|_| self.registers.read32(register::CR0_ACK) == value);
        is_done.then_some(()).ok_or("which does not change its state")
    }

    /// Pages that a server's domain needs beside its page tables: the context descriptor.
    pub fn further_pages(&self) -> u64 {
        1
    }

    /// The message by which a function interrupts: the SMMU does not change it.
    pub fn message(&mut self, _: Option<Window>, message: Message) -> Message {
        message
    }

    /// The SMMU does not see lines.
    pub fn add_line(&mut self, _: Message) {}

    /// Lets a function access what the page tables of a server permit.
    pub fn allow(
        &mut self,
        function: Address,
        server: usize,
        tables: Window,
        descriptor: Option<Window>,
    ) {
        let Some(descriptor) = descriptor else { return };
        let words = context(physical(tables), tag(server), self.output);
        write(descriptor, 0, &words);
        self.set(function, server, &stream_entry(physical(descriptor)));
    }

    /// Removes all access of a server's function. Returns `false` if the SMMU does not confirm it.
    pub fn deny(&mut self, function: Address, server: usize) -> bool {
        self.set(function, server, &BLOCKED)
    }

    /// Changes the entry of a function's stream. The word that makes it valid is written last, and
    /// changes between valid and not only. Returns `false` if the SMMU may use another entry.
    fn set(&mut self, function: Address, server: usize, entry: &[u64; 8]) -> bool {
        let Some(stream) = stream(&self.map, function) else { return false };
        let at = u64::from(stream) * STREAM_ENTRY;
        write(self.streams, at, &BLOCKED[..1]);
        self.forget(stream, server);
        write(self.streams, at + 8, &entry[1..]);
        write(self.streams, at, &entry[..1]);
        self.forget(stream, server)
    }

    /// Invalidates what it has cached of a stream and a server's page tables, and waits. Returns
    /// `false` if it may still use that.
    fn forget(&mut self, stream: u32, server: usize) -> bool {
        self.put(command::invalidate_stream(stream));
        self.put(command::invalidate_contexts(stream));
        self.put(command::invalidate_tag(tag(server)));
        self.complete()
    }

    fn put(&mut self, command: [u64; 2]) {
        let place = self.produced % (1 << COMMANDS_LOG2);
        write(self.pages, u64::from(place) * COMMAND, &command);
        self.produced = (self.produced + 1) % (2 << COMMANDS_LOG2);
    }

    /// Executes all commands. Returns `false` if the SMMU did not complete some in time, now or
    /// earlier: each further wait would last as long, and its index says nothing after commands
    /// that it did not read have been overwritten.
    fn complete(&mut self) -> bool {
        if self.has_failed {
            return false;
        }
        self.put(command::complete());
        // The SMMU reads tables and commands after it sees the index.
        fence(Ordering::SeqCst);
        self.registers.write32(register::COMMANDS_PRODUCED, self.produced);
        let consumed = || self.registers.read32(register::COMMANDS_CONSUMED);
        self.has_failed = !(0..MAX_POLLS).any(|_| consumed() & !COMMAND_ERROR == self.produced);
        if self.has_failed {
            warn!("an IOMMU did not complete a command in time ({:#x})", consumed());
        }
        !self.has_failed
    }

    /// Takes the oldest event.
    pub fn next_event(&mut self) -> Option<Event> {
        let produced = self.registers.read32(register::EVENTS_PRODUCED);
        let acknowledged = self.registers.read32(register::EVENTS_CONSUMED);
        if (produced ^ acknowledged) & OVERFLOW != 0 {
            warn!("IOMMU: event log overflow");
        }
        let overflow = produced & OVERFLOW;
        if produced & !OVERFLOW == self.consumed {
            self.registers.write32(register::EVENTS_CONSUMED, self.consumed | overflow);
            return None;
        }
        // The SMMU has written the event before the index.
        fence(Ordering::SeqCst);
        let place = self.consumed % (1 << EVENTS_LOG2);
        let at = PAGE_SIZE + u64::from(place) * EVENT;
        let words = [0, 16].map(|offset| read(self.pages, at + offset));
        self.consumed = (self.consumed + 1) % (2 << EVENTS_LOG2);
        self.registers.write32(register::EVENTS_CONSUMED, self.consumed | overflow);
        let stream = event_stream(words[0]);
        let function = self.map.iter().find_map(|streams| streams.function(stream));
        let function = function.map(Address::from_number);
        Some(Event { function, is_blocked_request: is_blocked_request(words[0]), words })
    }
}

/// The stream of a function, if the first function's SMMU translates it.
fn stream(map: &[Streams], function: Address) -> Option<u32> {
    let smmu = map.first()?.smmu;
    let mut of_smmu = map.iter().filter(|streams| streams.smmu == smmu);
    of_smmu.find_map(|streams| streams.of(function.number()))
}

/// Tag of the translations of a server or VM, by its index among all children. 0 is nobody's.
fn tag(server: usize) -> u16 {
    server as u16 + 1
}

#[cfg(test)]
mod tests {
    use super::super::tests::nothing;
    use super::*;

    #[test]
    fn features() {
        let of_qemu = idr0::STAGE_1 | idr0::AARCH64 | idr0::COHERENT;
        let sizes = 16;
        assert_eq!(check(of_qemu, sizes, idr5::PAGES_4K, 1 << 16), Ok(()));
        assert!(check(of_qemu & !idr0::STAGE_1, sizes, idr5::PAGES_4K, 64).is_err());
        assert!(check(of_qemu & !idr0::COHERENT, sizes, idr5::PAGES_4K, 64).is_err());
        assert!(check(of_qemu, sizes, 0, 64).is_err(), "larger pages only");
        assert!(check(of_qemu, sizes, idr5::PAGES_4K, 1 << 17).is_err(), "streams");
        assert!(check(of_qemu, sizes | idr1::PRESET, idr5::PAGES_4K, 64).is_err());
    }

    #[test]
    fn functions_of_another_smmu_have_no_stream() {
        let first = Streams { first: 0, smmu: 1, stream: 0x40, count: 8 };
        let map = [first, Streams { first: 8, smmu: 2, stream: 0, count: 8 }];
        assert_eq!(stream(&map, Address::from_number(3)), Some(0x43));
        assert_eq!(stream(&map, Address::from_number(9)), None);
        assert_eq!(stream(&[], Address::from_number(0)), None);
    }

    #[test]
    fn an_smmu_that_has_failed_denies_nothing() {
        let (registers, nothing) = nothing();
        let streams = Streams { first: 0, smmu: 1, stream: 0, count: 1 };
        let mut units = Units {
            registers,
            streams: nothing,
            pages: nothing,
            map: Vec::from_iter([streams]),
            output: 0,
            produced: 0,
            consumed: 0,
            has_failed: true,
        };
        assert!(!units.deny(Address::from_number(0), 0), "the index may be equal by chance");
        assert!(!units.deny(Address::from_number(1), 0), "no stream");
    }

    #[test]
    fn the_stream_table_has_all_functions() {
        assert_eq!(entries(0), PAGE_SIZE / STREAM_ENTRY);
        assert_eq!(entries(0xff), 256);
        assert_eq!(entries(0x100), 512);
        assert_eq!(entries(u16::MAX.into()), 1 << 16);
    }
}
