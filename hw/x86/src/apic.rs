//! Interrupt controllers: local APIC (APM vol. 2 (24593), chapter 16; SDM vol. 3, chapter 11), I/O
//! APIC (Intel 82093AA datasheet), and the 8259A registers needed to disable it.

/// Registers of the local APIC, by xAPIC offset (APM vol. 2, table 16-2). In x2APIC mode, register
/// `r` is MSR `0x800 + r / 16`.
pub mod local {
    /// Identifier: 31:24 in xAPIC mode, all 32 bits in x2APIC mode.
    pub const ID: u32 = 0x20;
    /// Version: 7:0 version, 23:16 highest local vector table entry.
    pub const VERSION: u32 = 0x30;
    /// Task priority.
    pub const TPR: u32 = 0x80;
    /// End of interrupt.
    pub const EOI: u32 = 0xb0;
    /// Logical destination (read-only in x2APIC mode).
    pub const LDR: u32 = 0xd0;
    /// Destination format (xAPIC only).
    pub const DFR: u32 = 0xe0;
    /// Spurious vector, and [`SVR_ENABLE`].
    pub const SVR: u32 = 0xf0;
    /// In-service bits, 8 registers of 32 bits, 0x10 apart.
    pub const ISR: u32 = 0x100;
    /// Trigger-mode bits, in the same layout.
    pub const TMR: u32 = 0x180;
    /// Interrupt-request bits, in the same layout.
    pub const IRR: u32 = 0x200;
    /// Error status; must be written before it is read.
    pub const ESR: u32 = 0x280;
    /// Interrupt command, low half; all 64 bits in x2APIC mode.
    pub const ICR_LOW: u32 = 0x300;
    /// Interrupt command, high half: destination in 31:24 (xAPIC only).
    pub const ICR_HIGH: u32 = 0x310;
    /// Local vector table: timer.
    pub const LVT_TIMER: u32 = 0x320;
    /// Local vector table: pin LINT0.
    pub const LVT_LINT0: u32 = 0x350;
    /// Local vector table: pin LINT1.
    pub const LVT_LINT1: u32 = 0x360;
    /// Local vector table: errors.
    pub const LVT_ERROR: u32 = 0x370;
    /// Initial count of the timer; writing it starts the timer, 0 stops it.
    pub const TIMER_INITIAL: u32 = 0x380;
    /// Current count of the timer.
    pub const TIMER_CURRENT: u32 = 0x390;
    /// Divider of the timer: [`DIVIDE_BY_1`].
    pub const TIMER_DIVIDE: u32 = 0x3e0;

    /// [`SVR`]: APIC enabled.
    pub const SVR_ENABLE: u32 = 1 << 8;
    /// Local vector table: masked.
    pub const LVT_MASKED: u32 = 1 << 16;
    /// [`LVT_TIMER`]: one-shot mode (both mode bits 0).
    pub const TIMER_ONE_SHOT: u32 = 0;
    /// [`LVT_TIMER`]: periodic mode.
    pub const TIMER_PERIODIC: u32 = 1 << 17;
    /// [`LVT_TIMER`]: TSC-deadline mode (MSR `TSC_DEADLINE`).
    pub const TIMER_TSC_DEADLINE: u32 = 2 << 17;
    /// [`TIMER_DIVIDE`]: divide by 1.
    pub const DIVIDE_BY_1: u32 = 0b1011;
    /// Delivery mode NMI, in the local vector table and in [`ICR_LOW`].
    pub const DELIVER_NMI: u32 = 4 << 8;
    /// [`ICR_LOW`]: INIT.
    pub const DELIVER_INIT: u32 = 5 << 8;
    /// [`ICR_LOW`]: start-up; the vector is the page number of the code.
    pub const DELIVER_STARTUP: u32 = 6 << 8;
    /// [`ICR_LOW`]: logical destination.
    pub const ICR_LOGICAL: u32 = 1 << 11;
    /// [`ICR_LOW`]: delivery pending (xAPIC only).
    pub const ICR_PENDING: u32 = 1 << 12;
    /// [`ICR_LOW`]: level "assert".
    pub const ICR_ASSERT: u32 = 1 << 14;
    /// Interrupt command: the trigger is a level.
    pub const ICR_LEVEL: u32 = 1 << 15;
    /// [`ICR_LOW`]: destination shorthand; 0: none.
    pub const ICR_SHORTHAND: u32 = 3 << 18;
    /// [`ICR_LOW`]: shorthand "all excluding self".
    pub const ICR_ALL_OTHERS: u32 = 3 << 18;
}

/// Registers of an I/O APIC (82093AA §3).
pub mod io {
    /// Offset of the register-select register.
    pub const SELECT: u64 = 0x00;
    /// Offset of the window to the selected register.
    pub const WINDOW: u64 = 0x10;
    /// Indirect: 23:16 highest redirection entry.
    pub const VERSION: u32 = 0x01;
    /// Indirect: low half of redirection entry 0; entry `n` is at `REDIRECTION + 2 * n`, followed
    /// by its high half.
    pub const REDIRECTION: u32 = 0x10;

    /// Redirection entry: the line is active low.
    pub const ACTIVE_LOW: u32 = 1 << 13;
    /// Redirection entry: level-triggered.
    pub const LEVEL: u32 = 1 << 15;
    /// Redirection entry: masked.
    pub const MASKED: u32 = 1 << 16;
    /// High half of a redirection entry: shift of the destination.
    pub const DESTINATION_SHIFT: u32 = 24;
}

/// Message-signalled interrupts (APM vol. 2 §16.6.9; PCI Local Bus 3.0 §6.8).
pub mod msi {
    /// Address: fixed part; the destination is in 19:12.
    pub const ADDRESS: u64 = 0xfee0_0000;
    /// Address: shift of the destination.
    pub const DESTINATION_SHIFT: u32 = 12;
}

/// The two 8259A controllers (Intel 231468).
pub mod pic {
    /// Command port of the first.
    pub const COMMAND_1: u16 = 0x20;
    /// Mask port of the first.
    pub const DATA_1: u16 = 0x21;
    /// Command port of the second.
    pub const COMMAND_2: u16 = 0xa0;
    /// Mask port of the second.
    pub const DATA_2: u16 = 0xa1;
    /// ICW1: initialise, with ICW4.
    pub const INITIALISE: u8 = 0x11;
    /// ICW3 of the first: the second is connected to line 2.
    pub const CASCADE_1: u8 = 1 << 2;
    /// ICW3 of the second: cascade identity.
    pub const CASCADE_2: u8 = 2;
    /// ICW4: 8086 mode.
    pub const MODE_8086: u8 = 1;
}
