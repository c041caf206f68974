//! System MMU version 3 (Arm IHI 0070): registers, stream table, context descriptors, page tables
//! of stage 1, commands and events.

/// Name in a device tree.
pub const COMPATIBLE: &str = "arm,smmu-v3";

/// Registers (section 6.3). Those of the second page are at their full offset.
pub mod register {
    /// Features, 32 bits ([`super::idr0`]).
    pub const IDR0: u64 = 0x00;
    /// Sizes, 32 bits ([`super::idr1`]).
    pub const IDR1: u64 = 0x04;
    /// Sizes of addresses and pages, 32 bits ([`super::idr5`]).
    pub const IDR5: u64 = 0x14;
    /// [`super::cr0`], 32 bits.
    pub const CR0: u64 = 0x20;
    /// The part of CR0 that is in effect.
    pub const CR0_ACK: u64 = 0x24;
    /// Memory attributes of tables and queues, 32 bits ([`super::CR1_CACHED`]).
    pub const CR1: u64 = 0x28;
    /// 32 bits: bit 1 records events of unknown streams, bit 2 ignores broadcast invalidations.
    pub const CR2: u64 = 0x2c;
    /// Interrupts that the SMMU may raise, 32 bits.
    pub const IRQ_CTRL: u64 = 0x50;
    /// Stream table: address, 64 bits.
    pub const STREAM_TABLE: u64 = 0x80;
    /// Format and size of the stream table, 32 bits: `log2` of its entries if it is linear.
    pub const STREAM_TABLE_FORMAT: u64 = 0x88;
    /// Command queue, 64 bits: address and `log2` of its entries.
    pub const COMMANDS: u64 = 0x90;
    /// Index after the last command, 32 bits.
    pub const COMMANDS_PRODUCED: u64 = 0x98;
    /// Index of the next command that the SMMU executes, 32 bits ([`super::COMMAND_ERROR`]).
    pub const COMMANDS_CONSUMED: u64 = 0x9c;
    /// Event queue, in the same format.
    pub const EVENTS: u64 = 0xa0;
    /// Index after the last event, 32 bits; bit 31 changes with each overflow.
    pub const EVENTS_PRODUCED: u64 = 0x1_00a8;
    /// Index of the next event that software reads, 32 bits; bit 31 acknowledges an overflow.
    pub const EVENTS_CONSUMED: u64 = 0x1_00ac;
    /// Length of the register space in bytes.
    pub const LENGTH: u64 = 0x2_0000;
}

/// Bits of IDR0 (section 6.3.1).
pub mod idr0 {
    /// Stage 1.
    pub const STAGE_1: u32 = 1 << 1;
    /// Page tables of AArch64.
    pub const AARCH64: u32 = 1 << 3;
    /// Tables and queues may be cached by processors.
    pub const COHERENT: u32 = 1 << 4;
}

/// Bits of IDR1 (section 6.3.2).
pub mod idr1 {
    /// Bits of a stream's number.
    pub const STREAM_BITS: u32 = 0x3f;
    /// Tables or queues are at fixed addresses.
    pub const PRESET: u32 = 3 << 29;
}

/// Bits of IDR5 (section 6.3.6).
pub mod idr5 {
    /// Size of output addresses, coded as in context descriptors.
    pub const OUTPUT: u32 = 7;
    /// Pages of 4 KiB.
    pub const PAGES_4K: u32 = 1 << 4;
}

/// Bits of CR0 (section 6.3.9).
pub mod cr0 {
    /// Translation is enabled; streams without a valid entry access no memory.
    pub const ENABLE: u32 = 1 << 0;
    /// Events are recorded.
    pub const EVENTS: u32 = 1 << 2;
    /// Commands are executed.
    pub const COMMANDS: u32 = 1 << 3;
}

/// CR1: tables and queues are inner shareable, write-back in both caches.
pub const CR1_CACHED: u32 = 0b11_01_01 << 6 | 0b11_01_01;
/// CR2: events of streams without an entry are recorded; no broadcast invalidation is observed.
pub const CR2_RECORD: u32 = 0b110;

/// Bits 30:24 of the command queue's consumed index: reason why the SMMU executes no more commands.
pub const COMMAND_ERROR: u32 = 0x7f << 24;
/// Bit 31 of an event queue's indices: overflow.
pub const OVERFLOW: u32 = 1 << 31;
/// Length of a command in bytes.
pub const COMMAND: u64 = 16;
/// Length of an event in bytes.
pub const EVENT: u64 = 32;
/// Address bits of tables and queues.
const ADDRESS: u64 = 0xf_ffff_ffff_ffff;
/// Read-allocate hint in the base address registers.
const ALLOCATE: u64 = 1 << 62;

/// Base address register of a queue with `1 << log2` entries.
pub const fn queue(address: u64, log2: u32) -> u64 {
    address & ADDRESS | log2 as u64 | ALLOCATE
}

/// Base address register of the stream table.
pub const fn stream_table(address: u64) -> u64 {
    address & ADDRESS | ALLOCATE
}

/// Length of a stream table entry in bytes (section 5.2).
pub const STREAM_ENTRY: u64 = 64;
/// Stream table entry of a stream without memory access: not valid, so its requests are events.
pub const BLOCKED: [u64; 8] = [0; 8];

/// Stream table entry of a stream that accesses memory by the context descriptor at an address.
pub const fn stream_entry(context: u64) -> [u64; 8] {
    const VALID: u64 = 1 << 0;
    const STAGE_1: u64 = 0b101 << 1;
    // Context descriptor table: inner shareable, write-back. Incoming shareability is used.
    const CACHED: u64 = 0b11_01_01 << 2;
    const SHAREABILITY: u64 = 1 << 44;
    [context & ADDRESS & !0x3f | STAGE_1 | VALID, CACHED | SHAREABILITY, 0, 0, 0, 0, 0, 0]
}

/// Context descriptor (section 5.4) of 64 bytes: pages of 4 KiB from the page table at `root`,
/// output addresses of the coded size, faults end the access and are events.
pub const fn context(root: u64, tag: u16, output: u32) -> [u64; 8] {
    const INPUT: u64 = 64 - (12 + 9 * LEVELS as u64);
    // Walks: inner shareable, write-back.
    const CACHED: u64 = 0b11_01_01 << 8;
    const NO_UPPER_HALF: u64 = 1 << 30;
    const VALID: u64 = 1 << 31;
    const AARCH64: u64 = 1 << 41;
    const RECORD: u64 = 1 << 45;
    const ABORT: u64 = 1 << 46;
    // The tag is not shared with processors, whose invalidations are ignored.
    const PRIVATE: u64 = 1 << 47;
    // Attribute 0: write-back.
    const ATTRIBUTES: u64 = 0xff;
    let flags = CACHED | NO_UPPER_HALF | VALID | AARCH64 | RECORD | ABORT | PRIVATE;
    let first = INPUT | flags | (output as u64) << 32 | (tag as u64) << 48;
    [first, root & ADDRESS & !0xf, 0, ATTRIBUTES, 0, 0, 0, 0]
}

/// Levels of the page tables in use, which map 512 GiB.
pub const LEVELS: u8 = 3;
/// First address beyond the range of the page tables.
pub const ADDRESS_LIMIT: u64 = 1 << (12 + 9 * LEVELS);

const VALID: u64 = 1 << 0;
/// A table, or a page at the last level (Arm ARM, D8.3).
const TABLE_OR_PAGE: u64 = 1 << 1;
const FRAME: u64 = 0xffff_ffff_f000;

/// Page table entry of a page that unprivileged requests read and write, and execute nothing from.
/// 0 is not present.
pub const fn leaf(address: u64) -> u64 {
    const UNPRIVILEGED: u64 = 1 << 6;
    const INNER_SHAREABLE: u64 = 3 << 8;
    const ACCESSED: u64 = 1 << 10;
    const NOT_GLOBAL: u64 = 1 << 11;
    const NO_EXECUTION: u64 = 3 << 53;
    let flags = UNPRIVILEGED | INNER_SHAREABLE | ACCESSED | NOT_GLOBAL | NO_EXECUTION;
    address & FRAME | flags | TABLE_OR_PAGE | VALID
}

/// Entry of level 2 for a block of 2 MiB with the same rights.
pub const fn block(address: u64) -> u64 {
    leaf(address) & !TABLE_OR_PAGE
}

/// Page table entry that refers to a table. Its level follows from the place of the entry.
pub const fn table(address: u64, _next_level: u8) -> u64 {
    address & FRAME | TABLE_OR_PAGE | VALID
}

/// Page table that an entry refers to, if present.
pub const fn next_table(entry: u64) -> Option<u64> {
    if entry & VALID != 0 { Some(entry & FRAME) } else { None }
}

/// Index of an address in a page table of a level; level 1 has the pages.
pub const fn index(address: u64, level: u8) -> u64 {
    address >> (12 + 9 * (level - 1)) & 0x1ff
}

/// Commands (section 4).
pub mod command {
    /// Forgets the entry of a stream and its context descriptors (CFGI_STE).
    pub const fn invalidate_stream(stream: u32) -> [u64; 2] {
        const ONLY_ENTRY: u64 = 1 << 0;
        [0x03 | (stream as u64) << 32, ONLY_ENTRY]
    }

    /// Forgets the context descriptors of a stream (CFGI_CD_ALL).
    pub const fn invalidate_contexts(stream: u32) -> [u64; 2] {
        [0x06 | (stream as u64) << 32, 0]
    }

    /// Forgets everything about all streams (CFGI_ALL).
    pub const fn invalidate_all() -> [u64; 2] {
        const ALL: u64 = 31;
        [0x04, ALL]
    }

    /// Forgets translations with a tag (TLBI_NH_ASID).
    pub const fn invalidate_tag(tag: u16) -> [u64; 2] {
        [0x11 | (tag as u64) << 48, 0]
    }

    /// Forgets all translations of these tables (TLBI_NSNH_ALL).
    pub const fn invalidate_translations() -> [u64; 2] {
        [0x30, 0]
    }

    /// Is consumed when all previous commands are complete (CMD_SYNC without a signal).
    pub const fn complete() -> [u64; 2] {
        [0x46, 0]
    }
}

/// Stream that an event is about.
pub const fn event_stream(first: u64) -> u32 {
    (first >> 32) as u32
}

/// Returns whether an event is a request that page tables did not permit (sections 7.3.13 to
/// 7.3.16): translation, address size, access flag, permission.
pub const fn is_blocked_request(first: u64) -> bool {
    matches!(first as u8, 0x10..=0x13)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_walk_down_to_their_page() {
        let address = (5 << 30) + (6 << 21) + (7 << 12);
        assert_eq!([3, 2, 1].map(|level| index(address, level)), [5, 6, 7]);
        assert_eq!(next_table(table(address, 2)), Some(address));
        assert_eq!(next_table(0), None);
        assert_eq!(leaf(address) & FRAME, address);
        assert_eq!(leaf(address) & 1 << 7, 0, "writable");
        assert_eq!(leaf(address) & 3, 3, "a page");
        assert_eq!(block(address) & 3, 1, "a block");
        assert_eq!(block(address) | TABLE_OR_PAGE, leaf(address));
    }

    #[test]
    fn descriptors() {
        let context = context(0x1234_5000, 7, 4);
        assert_eq!(context[0] & 0x3f, 25, "input addresses of 39 bits");
        assert_eq!(context[0] >> 48, 7);
        assert_eq!(context[0] >> 32 & 7, 4);
        assert_eq!(context[1], 0x1234_5000);
        let entry = stream_entry(0x8_1234_5040);
        assert_eq!(entry[0], 0x8_1234_5040 | 0b1011);
        assert_eq!(BLOCKED[0] & 1, 0);
    }

    #[test]
    fn events() {
        assert_eq!(event_stream(0x18 << 32 | 0x10), 0x18);
        assert!(is_blocked_request(0x10) && is_blocked_request(0x13));
        assert!(!is_blocked_request(0x04) && !is_blocked_request(0x0a), "errors of root");
    }
}
