//! Registers of AHCI controllers (AHCI 1.3.1, section 3).

/// Registers of the controller (section 3.1).
pub mod host {
    pub const CAPABILITIES: u64 = 0x00;
    pub const CONTROL: u64 = 0x04;
    pub const INTERRUPTS: u64 = 0x08;
    pub const PORTS: u64 = 0x0c;
    /// Of `CAPABILITIES`: native command queuing, 64-bit addresses.
    pub const QUEUES: u32 = 1 << 30;
    pub const WIDE: u32 = 1 << 31;
    /// Of `CONTROL`: reset, interrupt enable, AHCI enable.
    pub const RESET: u32 = 1 << 0;
    pub const INTERRUPT: u32 = 1 << 1;
    pub const ENABLE: u32 = 1 << 31;
}

/// Registers of a port (section 3.3), from `PORT + PORT_LENGTH * port`.
pub mod port {
    pub const COMMANDS: u64 = 0x00;
    pub const RECEIVED: u64 = 0x08;
    pub const INTERRUPTS: u64 = 0x10;
    pub const INTERRUPT_ENABLE: u64 = 0x14;
    pub const COMMAND: u64 = 0x18;
    pub const TASK_FILE: u64 = 0x20;
    pub const SIGNATURE: u64 = 0x24;
    pub const LINK: u64 = 0x28;
    pub const LINK_CONTROL: u64 = 0x2c;
    pub const ERROR: u64 = 0x30;
    pub const QUEUED: u64 = 0x34;
    pub const ISSUE: u64 = 0x38;
    /// Of `COMMAND`: start, spin up, power on, FIS receive enable, FIS receive running, command
    /// list running.
    pub const START: u32 = 1 << 0;
    pub const SPIN_UP: u32 = 1 << 1;
    pub const POWER: u32 = 1 << 2;
    pub const RECEIVE: u32 = 1 << 4;
    pub const RECEIVING: u32 = 1 << 14;
    pub const RUNNING: u32 = 1 << 15;
    /// Of `INTERRUPTS`: FIS received, also for queued commands.
    pub const ANSWERS: u32 = 0b1111;
    /// Of `INTERRUPTS`: every error that stops the port (section 6.1): task file, host bus,
    /// interface, overflow, and loss of the link.
    pub const ERRORS: u32 = 0xf << 27 | 1 << 24 | LINK_CHANGED;
    /// Of `INTERRUPTS`: the link came up or was lost; read-only, until `ERROR` is cleared.
    pub const LINK_CHANGED: u32 = 1 << 22;
    /// Of `LINK_CONTROL`: link reset.
    pub const LINK_RESET: u32 = 1;
    /// Of `LINK`: device present; link up and device active.
    pub const PRESENT: u32 = 0xf;
    pub const LINK_MASK: u32 = 0xf0f;
    pub const LINK_ACTIVE: u32 = 0x103;
    /// Of `TASK_FILE`: busy, data request.
    pub const BUSY: u32 = 0x88;
}
