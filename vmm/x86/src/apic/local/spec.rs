//! Registers beyond those that [`hw_x86::apic::local`] names, by xAPIC offset.

pub use hw_x86::apic::local::*;
pub use hw_x86::msr::{APIC_BASE, TSC_DEADLINE, X2APIC};

/// Last MSR of the x2APIC range.
pub const X2APIC_LAST: u32 = X2APIC + 0xff;
/// Arbitration priority (RO, xAPIC only).
pub const APR: u32 = 0x90;
/// Processor priority (RO).
pub const PPR: u32 = 0xa0;
/// Remote read (RO, xAPIC only).
pub const RRR: u32 = 0xc0;
/// Self-IPI (WO, x2APIC only).
pub const SELF_IPI: u32 = 0x3f0;
/// First of AMD's extended registers.
pub const EXTENDED: u32 = 0x400;
/// Bytes of the xAPIC page.
pub const LEN: u64 = 0x1000;

/// Version register: integrated APIC, six LVT entries, EOI broadcast can be suppressed.
pub const VERSION_VALUE: u32 = 0x14 | 5 << 16 | 1 << 24;
/// Bus clock of the timer before the divider.
pub const BUS_HZ: u64 = 1_000_000_000;
/// Minimum distance of periodic expiries, in nanoseconds.
pub const SHORTEST_PERIOD: u64 = 50_000;

/// [`SVR`]: no EOI broadcast.
pub const SVR_NO_BROADCAST: u32 = 1 << 12;
/// [`SVR`]: implemented bits.
pub const SVR_MASK: u32 = 0xff | SVR_ENABLE | SVR_NO_BROADCAST;
/// [`DFR`]: bits that read as one.
pub const DFR_ONES: u32 = 0x0fff_ffff;
/// [`DFR`], bits 31:28: cluster model.
pub const DFR_CLUSTER: u32 = 0;

/// [`ESR`]: send of a vector below 16.
pub const ESR_SEND_VECTOR: u32 = 1 << 5;
/// [`ESR`]: receipt of a vector below 16.
pub const ESR_RECEIVE_VECTOR: u32 = 1 << 6;
/// [`ESR`]: access to an unimplemented register.
pub const ESR_REGISTER: u32 = 1 << 7;

/// Delivery mode: fixed.
pub const FIXED: u8 = 0;
/// Delivery mode: lowest priority.
pub const LOWEST: u8 = 1;
/// Delivery mode: system management.
pub const SMI: u8 = 2;
/// Delivery mode: non-maskable.
pub const NMI: u8 = 4;
/// Delivery mode: INIT.
pub const INIT: u8 = 5;
/// Delivery mode: start-up.
pub const STARTUP: u8 = 6;
/// Delivery mode: the 8259 provides the vector.
pub const EXT_INT: u8 = 7;

/// [`ICR_LOW`]: stored bits.
pub const ICR_MASK: u32 = 0x000c_cfff;
/// [`ICR_LOW`], bits 19:18: no shorthand.
pub const SHORTHAND_NONE: u32 = 0;
/// Shorthand: self.
pub const SHORTHAND_SELF: u32 = 1;
/// Shorthand: all including self.
pub const SHORTHAND_ALL: u32 = 2;

/// [`LVT_TIMER`]: bits of the mode.
pub const TIMER_MODE: u32 = 3 << 17;
/// [`TIMER_DIVIDE`]: implemented bits.
pub const DIVIDE_MASK: u32 = 0b1011;
/// Local vector table: bits of the delivery mode.
pub const LVT_DELIVERY: u32 = 7 << 8;
/// Local vector table: level-triggered (LINT pins).
pub const LVT_LEVEL: u32 = 1 << 15;
/// Read-only bits of the LVT: delivery status, remote IRR.
pub const LVT_READ_ONLY: u32 = 1 << 12 | 1 << 14;
/// Writable bits of the entries from [`LVT_TIMER`] on.
pub const LVT_WRITABLE: [u32; 6] = [
    0xff | LVT_MASKED | TIMER_MODE,
    0xff | LVT_MASKED | LVT_DELIVERY,
    0xff | LVT_MASKED | LVT_DELIVERY,
    0xff | LVT_MASKED | LVT_DELIVERY | LVT_LEVEL | 1 << 13,
    0xff | LVT_MASKED | LVT_DELIVERY | LVT_LEVEL | 1 << 13,
    0xff | LVT_MASKED,
];

/// [`APIC_BASE`]: this is the bootstrap CPU (RO here).
pub const BASE_BSP: u64 = 1 << 8;
/// [`APIC_BASE`]: x2APIC mode.
pub const BASE_X2APIC: u64 = 1 << 10;
/// [`APIC_BASE`]: enabled.
pub const BASE_ENABLE: u64 = 1 << 11;
/// [`APIC_BASE`] after reset, without the mode.
pub const BASE_ADDRESS: u64 = 0xfee0_0000;
