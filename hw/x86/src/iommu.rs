//! AMD IOMMU ("AMD I/O Virtualization Technology (IOMMU) Specification", 48882, rev. 3.0x):
//! registers, device table, page tables, interrupt remapping, commands and events.

/// Registers, 64 bits each (section 3.4).
pub mod register {
    /// Device table: bits 51:12 address, 8:0 number of pages minus one.
    pub const DEVICE_TABLE: u64 = 0x00;
    /// Command buffer: bits 51:12 address, 59:56 length ([`super::RING_PAGE`]).
    pub const COMMAND_BUFFER: u64 = 0x08;
    /// Event log, in the same format.
    pub const EVENT_LOG: u64 = 0x10;
    /// [`super::control`].
    pub const CONTROL: u64 = 0x18;
    /// Offset of the next command that the IOMMU executes.
    pub const COMMAND_HEAD: u64 = 0x2000;
    /// Offset after the last command.
    pub const COMMAND_TAIL: u64 = 0x2008;
    /// Offset of the next event that software reads.
    pub const EVENT_HEAD: u64 = 0x2010;
    /// Offset after the last event.
    pub const EVENT_TAIL: u64 = 0x2018;
    /// [`super::status`].
    pub const STATUS: u64 = 0x2020;
    /// Length of the register space in bytes.
    pub const LENGTH: u64 = 0x4000;
}

/// Control register (section 3.4.3).
pub mod control {
    /// Translation of device accesses is enabled.
    pub const ENABLE: u64 = 1 << 0;
    /// Event logging is enabled.
    pub const EVENT_LOG: u64 = 1 << 2;
    /// IOMMU table reads are cache-coherent.
    pub const COHERENT: u64 = 1 << 10;
    /// Command processing is enabled.
    pub const COMMANDS: u64 = 1 << 12;
}

/// Status register (section 3.4.14).
pub mod status {
    /// The event log has overflowed; write 1 to clear.
    pub const EVENT_OVERFLOW: u64 = 1 << 0;
}

/// Length field of a command buffer or event log of one page (256 entries).
pub const RING_PAGE: u64 = 8 << 56;
/// Length of a command or event in bytes.
pub const ENTRY: u64 = 16;
/// Length in bytes of the device table for all functions of a segment.
pub const DEVICE_TABLE_LENGTH: u64 = DEVICE_ENTRY << 16;
/// Length of a device table entry in bytes.
pub const DEVICE_ENTRY: u64 = 32;

/// Levels of the page tables in use, which map 512 GiB.
pub const LEVELS: u8 = 3;
/// First address beyond the range of the page tables.
pub const ADDRESS_LIMIT: u64 = 1 << (12 + 9 * LEVELS);

const PRESENT: u64 = 1 << 0;
const READ: u64 = 1 << 61;
const WRITE: u64 = 1 << 62;
const ADDRESS: u64 = 0xf_ffff_ffff_f000;

const fn level(level: u8) -> u64 {
    (level as u64) << 9
}

/// Device table entry (section 2.2.2.1) of a function without memory access: valid, translated,
/// without rights.
pub const BLOCKED: [u64; 4] = [0b11 | level(LEVELS), 0, 0, 0];

/// Device table entry of a function that accesses memory through the page table at `root`. Its
/// interrupts pass unless [`with_interrupts`] remaps them.
pub const fn device_entry(root: u64, domain: u16) -> [u64; 4] {
    [BLOCKED[0] | root & ADDRESS | READ | WRITE, domain as u64, 0, 0]
}

/// Entries of an interrupt remapping table (section 2.2.5): all that a message can name.
pub const INTERRUPTS: u64 = 1 << INTERRUPTS_LOG2;
/// Bytes of an entry of an interrupt remapping table.
pub const INTERRUPT_ENTRY: u64 = 4;
const INTERRUPTS_LOG2: u64 = 11;

/// Third word of a device table entry: interrupt remapping (bits 191:128).
mod interrupts {
    /// IV: the rest of the word is valid.
    pub const VALID: u64 = 1 << 0;
    /// IntTabLen, lowest bit: logarithm of the number of entries.
    pub const LENGTH_SHIFT: u64 = 1;
    /// Address of the table.
    pub const TABLE: u64 = 0xf_ffff_ffff_ffc0;
    /// IntCtl: fixed and arbitrated interrupts are remapped. 0: they are aborted.
    pub const REMAPPED: u64 = 2 << 60;
}

/// Returns the device table entry of a function whose fixed and arbitrated interrupts are remapped
/// by `table`. INIT, NMI and external interrupts are blocked; without a table all interrupts are.
pub const fn with_interrupts(entry: [u64; 4], table: Option<u64>) -> [u64; 4] {
    let word = match table {
        Some(table) => {
            let length = INTERRUPTS_LOG2 << interrupts::LENGTH_SHIFT;
            table & interrupts::TABLE | interrupts::REMAPPED | length | interrupts::VALID
        }
        None => interrupts::VALID,
    };
    [entry[0], entry[1], word, entry[3]]
}

/// Entry of an interrupt remapping table (section 2.2.5.1): a message with its index becomes the
/// fixed interrupt `vector` of the CPU whose local APIC has this id. An entry of 0 blocks.
pub const fn remapped(vector: u8, apic_id: u8) -> u32 {
    const ENABLED: u32 = 1 << 0;
    (vector as u32) << 16 | (apic_id as u32) << 8 | ENABLED
}

/// Page table entry (section 2.2.3) of a page. 0 is not present.
pub const fn leaf(address: u64) -> u64 {
    address & ADDRESS | READ | WRITE | PRESENT
}

/// Entry of level 2 for a block of 2 MiB with the same rights.
pub const fn block(address: u64) -> u64 {
    // The level of the next table is 0: there is none.
    leaf(address)
}

/// Page table entry that refers to a table of level `next_level`, 1 to [`LEVELS`] - 1.
pub const fn table(address: u64, next_level: u8) -> u64 {
    leaf(address) | level(next_level)
}

/// Page table that an entry refers to, if present.
pub const fn next_table(entry: u64) -> Option<u64> {
    if entry & PRESENT != 0 { Some(entry & ADDRESS) } else { None }
}

/// Index of an address in a page table of a level.
pub const fn index(address: u64, level: u8) -> u64 {
    address >> (12 + 9 * (level - 1)) & 0x1ff
}

/// Commands (section 2.4).
pub mod command {
    /// Stores `data` at an aligned address when all previous commands are complete
    /// (COMPLETION_WAIT).
    pub const fn completion(address: u64, data: u64) -> [u64; 2] {
        [1 << 60 | address & 0xf_ffff_ffff_fff8 | 1, data]
    }

    /// Invalidates the device table entry of a function (INVALIDATE_DEVTAB_ENTRY).
    pub const fn invalidate_device(device: u16) -> [u64; 2] {
        [2 << 60 | device as u64, 0]
    }

    /// Invalidates the cached interrupt remapping table of a function (INVALIDATE_INTERRUPT_TABLE).
    pub const fn invalidate_interrupts(device: u16) -> [u64; 2] {
        [5 << 60 | device as u64, 0]
    }

    /// Invalidates all translations of a domain (INVALIDATE_IOMMU_PAGES, all pages).
    pub const fn invalidate_domain(domain: u16) -> [u64; 2] {
        [3 << 60 | (domain as u64) << 32, 0x7fff_ffff_ffff_f003]
    }
}

/// Function that caused an event (section 2.5), from the first word of the event log entry, whose
/// bits 63:60 are the event code.
pub const fn event_device(first: u64) -> u16 {
    first as u16
}

/// Returns whether an event is a request of its function that was blocked, from the first word of
/// the event log entry: IO_PAGE_FAULT (section 2.5.3), of memory or of an interrupt, or
/// INVALID_DEVICE_REQUEST (section 2.5.9). The other events are errors of tables and commands.
pub const fn is_blocked_request(first: u64) -> bool {
    matches!(first >> 60, 2 | 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values from the figures of the specification.
    #[test]
    fn entries() {
        assert_eq!(device_entry(0x12_3000, 7), [0x6000_0000_0012_3603, 7, 0, 0]);
        assert_eq!(BLOCKED[0] & (READ | WRITE), 0);
        let remapped_entry = with_interrupts(device_entry(0x12_3000, 7), Some(0x45_6000));
        assert_eq!(remapped_entry, [0x6000_0000_0012_3603, 7, 0x2000_0000_0045_6017, 0]);
        assert_eq!(with_interrupts(BLOCKED, None), [BLOCKED[0], 0, 1, 0]);
        assert_eq!(remapped(0x31, 5), 0x0031_0501);
        assert_eq!(INTERRUPTS * INTERRUPT_ENTRY, 0x2000);
        assert_eq!(leaf(0x5000), 0x6000_0000_0000_5001);
        assert_eq!(table(0x5000, 2), 0x6000_0000_0000_5401);
        assert_eq!((next_table(table(0x5000, 1)), next_table(0)), (Some(0x5000), None));
        let address = 3 << 30 | 5 << 21 | 7 << 12;
        assert_eq!((index(address, 3), index(address, 2), index(address, 1)), (3, 5, 7));
        assert_eq!(ADDRESS_LIMIT, 512 << 30);
        assert_eq!(DEVICE_TABLE_LENGTH, 2 << 20);
    }

    #[test]
    fn commands_and_events() {
        assert_eq!(command::completion(0x1008, 5), [0x1000_0000_0000_1009, 5]);
        assert_eq!(command::invalidate_device(0x18), [0x2000_0000_0000_0018, 0]);
        assert_eq!(command::invalidate_interrupts(0x18), [0x5000_0000_0000_0018, 0]);
        assert_eq!(command::invalidate_domain(2), [0x3000_0002_0000_0000, 0x7fff_ffff_ffff_f003]);
        assert_eq!(event_device(0x2000_0000_0000_0020), 0x20);
        let memory = 0x2000_0000_0000_0020;
        // Bit 51 (I): the request was an interrupt.
        let interrupt = memory | 1 << 51;
        assert!([memory, interrupt, 8 << 60].map(is_blocked_request).iter().all(|&is| is));
        assert!(![1, 3, 4, 5, 6, 7].map(|code| is_blocked_request(code << 60)).contains(&true));
    }
}
