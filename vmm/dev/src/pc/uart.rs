//! Serial port 16550A.
//!
//! State: the registers, 16 received bytes, up to 16 bytes that the host has not accepted yet.
//! Features: FIFOs with trigger levels; interrupts for received data, character time-out, empty
//! transmitter, line status and modem status (line 0, gated by OUT2 as on a PC); loop-back; scratch
//! register; divisor latch. The line has no speed: the host gets a written byte at once, unless it
//! refuses the byte; then the byte stays in the transmitter, whose "empty" bits make the guest
//! wait. Likewise input stays with the host until the receiver has room and the guest waits for it:
//! its interrupt is enabled and gated through, or it polls, that is, reads the line status
//! repeatedly with nothing else to wait for. So the receiver never overruns. Bytes in the receiver
//! when it is cleared are received again, as if they had arrived later. So a driver that clears it
//! during its start, or prints without interrupts, loses no input.
//! Missing: parity and framing errors, break outside of loop-back (reported), the modem's lines
//! (clear to send, data set ready and carrier detect are always on), DMA mode (stored, no effect).
//! Documentation: National Semiconductor PC16550D data sheet.
//!
//! Cost: a byte sent is one `put` without other effects if the interrupt is disabled.

use vmm_bus::{Access, Device, Env, NEVER, Nanos, WAKE_INPUT};

/// Registers.
pub mod spec {
    /// RO: receiver buffer; WO: transmitter holding (divisor latch closed). RW: divisor low (open).
    pub const DATA: u64 = 0;
    /// RW: interrupt enable (divisor latch closed); divisor high (open).
    pub const IER: u64 = 1;
    /// RO: interrupt identification; WO: FIFO control ([`FCR_ENABLE`] ...).
    pub const IIR: u64 = 2;
    /// RW: line control.
    pub const LCR: u64 = 3;
    /// RW: modem control.
    pub const MCR: u64 = 4;
    /// RO: line status.
    pub const LSR: u64 = 5;
    /// RO: modem status.
    pub const MSR: u64 = 6;
    /// RW: scratch.
    pub const SCR: u64 = 7;

    /// Interrupt: received data, time-out.
    pub const IER_RX: u8 = 1 << 0;
    /// Interrupt: transmitter holding register empty.
    pub const IER_TX: u8 = 1 << 1;
    /// Interrupt: line status.
    pub const IER_LINE: u8 = 1 << 2;
    /// Interrupt: modem status.
    pub const IER_MODEM: u8 = 1 << 3;
    /// Implemented bits.
    pub const IER_MASK: u8 = 0x0f;

    /// Identification: modem status.
    pub const IIR_MODEM: u8 = 0x0;
    /// Identification: nothing pending.
    pub const IIR_NONE: u8 = 0x1;
    /// Identification: transmitter holding register empty.
    pub const IIR_TX: u8 = 0x2;
    /// Identification: received data.
    pub const IIR_RX: u8 = 0x4;
    /// Identification: line status.
    pub const IIR_LINE: u8 = 0x6;
    /// Identification: character time-out.
    pub const IIR_TIMEOUT: u8 = 0xc;
    /// The FIFOs are enabled.
    pub const IIR_FIFO: u8 = 0xc0;

    /// FIFOs on.
    pub const FCR_ENABLE: u8 = 1 << 0;
    /// Clear the receiver (self-clearing).
    pub const FCR_CLEAR_RX: u8 = 1 << 1;
    /// Clear the transmitter (self-clearing).
    pub const FCR_CLEAR_TX: u8 = 1 << 2;
    /// Bytes that raise the received-data interrupt, by FCR bits 6..=7.
    pub const TRIGGER_LEVELS: [u8; 4] = [1, 4, 8, 14];

    /// Break.
    pub const LCR_BREAK: u8 = 1 << 6;
    /// The divisor latch is open.
    pub const LCR_DLAB: u8 = 1 << 7;

    /// Data terminal ready.
    pub const MCR_DTR: u8 = 1 << 0;
    /// Request to send.
    pub const MCR_RTS: u8 = 1 << 1;
    /// User output 1.
    pub const MCR_OUT1: u8 = 1 << 2;
    /// User output 2: gates the interrupt on a PC.
    pub const MCR_OUT2: u8 = 1 << 3;
    /// Loop-back.
    pub const MCR_LOOP: u8 = 1 << 4;
    /// Implemented bits.
    pub const MCR_MASK: u8 = 0x1f;

    /// Data ready.
    pub const LSR_DATA: u8 = 1 << 0;
    /// Overrun.
    pub const LSR_OVERRUN: u8 = 1 << 1;
    /// Break received.
    pub const LSR_BREAK: u8 = 1 << 4;
    /// Transmitter holding register (or FIFO) empty.
    pub const LSR_THRE: u8 = 1 << 5;
    /// Transmitter empty.
    pub const LSR_TEMT: u8 = 1 << 6;
    /// The conditions of the line status interrupt, cleared by reading.
    pub const LSR_ERRORS: u8 = 0x1e;

    /// Trailing edge of the ring indicator, among the change bits 0..=3.
    pub const MSR_RING_CHANGE: u8 = 1 << 2;
    /// Clear to send.
    pub const MSR_CTS: u8 = 1 << 4;
    /// Data set ready.
    pub const MSR_DSR: u8 = 1 << 5;
    /// Ring indicator.
    pub const MSR_RI: u8 = 1 << 6;
    /// Data carrier detect.
    pub const MSR_DCD: u8 = 1 << 7;

    /// Bytes in each FIFO.
    pub const FIFO: usize = 16;
    /// Time of one bit at divisor 1 (115,200 baud), in nanoseconds.
    pub const BIT_NANOS: u64 = 8_681;
}
use spec::*;

/// Four characters of ten bits: the character time-out of bytes below the trigger level.
const TIMEOUT_BITS: u64 = 40;
/// Maximum character time-out: a slow divisor must not delay input that has no speed.
const TIMEOUT_MAX: Nanos = 20_000_000;

/// Reads of the line status that count as polling for data. Drivers read it a few times when they
/// print or start.
const POLLING: u8 = 8;

/// A ring of bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Fifo {
    bytes: [u8; FIFO],
    head: u8,
    len: u8,
}

impl Fifo {
    const EMPTY: Self = Self { bytes: [0; FIFO], head: 0, len: 0 };

    fn push(&mut self, byte: u8) {
        let at = usize::from(self.head + self.len) % FIFO;
        self.bytes[at] = byte;
        self.len = (self.len + 1).min(FIFO as u8);
    }

    fn front(&self) -> Option<u8> {
        (self.len != 0).then(|| self.bytes[usize::from(self.head) % FIFO])
    }

    fn pop(&mut self) -> Option<u8> {
        let byte = self.front()?;
        self.head = (self.head + 1) % FIFO as u8;
        self.len -= 1;
        Some(byte)
    }
}

/// A 16550A. Offsets 0 to 7 are its registers; line 0 is its interrupt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Uart {
    ier: u8,
    fcr: u8,
    lcr: u8,
    mcr: u8,
    /// Error bits only; the other bits are derived.
    lsr: u8,
    msr: u8,
    scr: u8,
    divisor: u16,
    rx: Fifo,
    /// Bytes that the host has refused.
    tx: Fifo,
    /// Last byte received, read again from an empty receiver.
    last: u8,
    /// The transmitter has become empty, which the guest has not been notified of.
    tx_event: bool,
    /// The oldest byte has waited for the character time-out.
    timed_out: bool,
    timer_armed: bool,
    /// The bytes in the receiver are from the transmitter.
    looped: bool,
    /// The host may have bytes that have not been read.
    more: bool,
    /// Consecutive reads of the line status with nothing to wait for but data.
    status_reads: u8,
    /// Present level of the interrupt line.
    line: bool,
}

impl Default for Uart {
    fn default() -> Self {
        Self::new()
    }
}

impl Uart {
    /// Creates the chip in its reset state, at 9,600 baud.
    pub const fn new() -> Self {
        Self {
            ier: 0,
            fcr: 0,
            lcr: 0,
            mcr: 0,
            lsr: 0,
            msr: MSR_CTS | MSR_DSR | MSR_DCD,
            scr: 0,
            divisor: 12,
            rx: Fifo::EMPTY,
            tx: Fifo::EMPTY,
            last: 0,
            tx_event: false,
            timed_out: false,
            timer_armed: false,
            looped: false,
            // The host may have kept input since the previous boot, and does not report it again.
            more: true,
            status_reads: 0,
            line: false,
        }
    }

    fn fifos(&self) -> bool {
        self.fcr & FCR_ENABLE != 0
    }

    /// Capacity of each direction in bytes.
    fn capacity(&self) -> u8 {
        if self.fifos() { FIFO as u8 } else { 1 }
    }

    fn trigger(&self) -> u8 {
        if self.fifos() { TRIGGER_LEVELS[usize::from(self.fcr >> 6)] } else { 1 }
    }

    fn line_status(&self) -> u8 {
        let data = if self.rx.len != 0 { LSR_DATA } else { 0 };
        let empty = if self.tx.len == 0 { LSR_THRE | LSR_TEMT } else { 0 };
        self.lsr | data | empty
    }

    /// Pending interrupt of highest priority.
    fn pending(&self) -> u8 {
        if self.ier & IER_LINE != 0 && self.lsr & LSR_ERRORS != 0 {
            IIR_LINE
        } else if self.ier & IER_RX != 0 && self.rx.len >= self.trigger() {
            IIR_RX
        } else if self.ier & IER_RX != 0 && self.timed_out {
            IIR_TIMEOUT
        } else if self.ier & IER_TX != 0 && self.tx_event {
            IIR_TX
        } else if self.ier & IER_MODEM != 0 && self.msr & 0xf != 0 {
            IIR_MODEM
        } else {
            IIR_NONE
        }
    }

    fn update_line(&mut self, env: &mut dyn Env) {
        let level = self.mcr & MCR_OUT2 != 0 && self.ier != 0 && self.pending() != IIR_NONE;
        if level != self.line {
            self.line = level;
            env.set_line(0, level);
        }
    }

    /// Restarts the character time-out after a byte was received or read.
    fn restart_timeout(&mut self, env: &mut dyn Env) {
        self.timed_out = false;
        let wanted = self.fifos()
            && self.ier & IER_RX != 0
            && self.rx.len != 0
            && self.rx.len < self.trigger();
        if wanted {
            let bits = TIMEOUT_BITS * BIT_NANOS * u64::from(self.divisor.max(1));
            env.arm(0, env.now().saturating_add(bits.min(TIMEOUT_MAX)));
        } else if self.timer_armed {
            env.arm(0, NEVER);
        }
        self.timer_armed = wanted;
    }

    /// Reads input if the guest waits for the interrupt; otherwise it must poll.
    fn fill(&mut self, env: &mut dyn Env) {
        // A driver that only probes for interrupts does not gate them through.
        let waits = self.ier & IER_RX != 0 && self.mcr & MCR_OUT2 != 0;
        let room = if waits { self.capacity() } else { 0 };
        self.fill_to(room, env);
    }

    /// Reads input until the receiver holds `room` bytes.
    fn fill_to(&mut self, room: u8, env: &mut dyn Env) {
        self.more = true;
        if self.mcr & MCR_LOOP != 0 {
            // The receiver is disconnected from the line; the bytes stay with the host.
            return;
        }
        let before = self.rx.len;
        while self.rx.len < room {
            let Some(byte) = env.take() else {
                self.more = false;
                break;
            };
            self.rx.push(byte);
            self.looped = false;
        }
        if self.rx.len != before {
            self.restart_timeout(env);
        }
    }

    /// Offers the host the refused bytes again.
    fn drain(&mut self, env: &mut dyn Env) {
        while let Some(byte) = self.tx.front() {
            if !env.put(byte) {
                return;
            }
            self.tx.pop();
            self.tx_event |= self.tx.len == 0;
        }
    }

    fn transmit(&mut self, byte: u8, env: &mut dyn Env) {
        // A byte withdraws the interrupt of the empty transmitter (PC16550D, "Interrupt Control
        // Functions"): a driver that has not read the cause gets another edge.
        if core::mem::take(&mut self.tx_event) && self.ier & IER_TX != 0 {
            self.update_line(env);
        }
        if self.mcr & MCR_LOOP != 0 {
            if self.rx.len < self.capacity() {
                self.rx.push(byte);
                self.looped = true;
                self.restart_timeout(env);
            } else {
                self.lsr |= LSR_OVERRUN;
            }
            self.tx_event = true;
        } else if self.tx.len == 0 && env.put(byte) {
            self.tx_event = true;
        } else {
            // A guest that ignores the "empty" bits loses bytes, as on the chip.
            if self.tx.len < self.capacity() {
                self.tx.push(byte);
            }
        }
        if self.ier != 0 {
            self.update_line(env);
        }
    }

    fn receive(&mut self, env: &mut dyn Env) -> u8 {
        if let Some(byte) = self.rx.pop() {
            self.last = byte;
            if self.more && self.rx.len == 0 {
                self.fill(env);
            }
            if self.timed_out || self.timer_armed || self.rx.len != 0 {
                self.restart_timeout(env);
            }
            self.update_line(env);
        }
        self.last
    }

    fn identify(&mut self, env: &mut dyn Env) -> u8 {
        let pending = self.pending();
        if pending == IIR_TX {
            self.tx_event = false;
            self.update_line(env);
        }
        pending | if self.fifos() { IIR_FIFO } else { 0 }
    }

    fn enable_interrupts(&mut self, value: u8, env: &mut dyn Env) {
        let value = value & IER_MASK;
        // Drivers expect an interrupt each time this is enabled with an empty transmitter.
        if value & !self.ier & IER_TX != 0 && self.tx.len == 0 {
            self.tx_event = true;
        }
        let rx_changed = (value ^ self.ier) & IER_RX != 0;
        self.ier = value;
        if rx_changed {
            if self.more {
                self.fill(env);
            }
            self.restart_timeout(env);
        }
        self.update_line(env);
    }

    fn control_fifos(&mut self, value: u8, env: &mut dyn Env) {
        let value = if value & FCR_ENABLE == 0 { value & !0xf8 } else { value };
        let switched = (value ^ self.fcr) & FCR_ENABLE != 0;
        if (switched || value & FCR_CLEAR_RX != 0) && self.looped {
            self.rx = Fifo::EMPTY;
        }
        if (switched || value & FCR_CLEAR_TX != 0) && self.tx.len != 0 {
            self.tx = Fifo::EMPTY;
            self.tx_event = true;
        }
        self.fcr = value & !(FCR_CLEAR_RX | FCR_CLEAR_TX);
        if self.more {
            self.fill(env);
        }
        self.restart_timeout(env);
        self.update_line(env);
    }

    fn control_line(&mut self, value: u8, env: &mut dyn Env) {
        let break_on = value & !self.lcr & LCR_BREAK != 0;
        self.lcr = value;
        if break_on && self.mcr & MCR_LOOP != 0 {
            self.lsr |= LSR_BREAK;
            self.update_line(env);
        } else if break_on {
            env.missing("16550: break", value.into());
        }
    }

    fn control_modem(&mut self, value: u8, env: &mut dyn Env) {
        let was_cut_off = self.mcr & (MCR_LOOP | MCR_OUT2) != MCR_OUT2;
        self.mcr = value & MCR_MASK;
        let looped = self.mcr & MCR_LOOP != 0;
        let lines = if looped {
            let mut lines = 0;
            for (output, input) in
                [(MCR_RTS, MSR_CTS), (MCR_DTR, MSR_DSR), (MCR_OUT1, MSR_RI), (MCR_OUT2, MSR_DCD)]
            {
                if self.mcr & output != 0 {
                    lines |= input;
                }
            }
            lines
        } else {
            MSR_CTS | MSR_DSR | MSR_DCD
        };
        let old = self.msr & 0xf0;
        let mut changes = (old ^ lines) >> 4;
        if lines & MSR_RI != 0 {
            // Only the trailing edge of the ring indicator is reported.
            changes &= !MSR_RING_CHANGE;
        }
        self.msr = lines | self.msr & 0xf | changes;
        if was_cut_off && self.more {
            self.fill(env);
        }
        self.update_line(env);
    }
}

impl Device for Uart {
    fn read(&mut self, access: Access, env: &mut dyn Env) -> u64 {
        let latch = self.lcr & LCR_DLAB != 0;
        let status_reads = core::mem::take(&mut self.status_reads);
        let value = match access.offset {
            LSR => {
                if status_reads >= POLLING && self.more && self.rx.len == 0 {
                    self.fill_to(1, env);
                }
                let status = self.line_status();
                self.status_reads =
                    if self.tx.len == 0 { status_reads.saturating_add(1) } else { 0 };
                if self.lsr != 0 {
                    self.lsr = 0;
                    self.update_line(env);
                }
                status
            }
            DATA if latch => self.divisor as u8,
            DATA => {
                if self.rx.len != 0 {
                    // A guest that reads data keeps polling.
                    self.status_reads = status_reads.saturating_add(1);
                }
                self.receive(env)
            }
            IER if latch => (self.divisor >> 8) as u8,
            IER => self.ier,
            IIR => self.identify(env),
            LCR => self.lcr,
            MCR => self.mcr,
            MSR => {
                let status = self.msr;
                if status & 0xf != 0 {
                    self.msr &= 0xf0;
                    self.update_line(env);
                }
                status
            }
            SCR => self.scr,
            _ => 0xff,
        };
        value.into()
    }

    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        let latch = self.lcr & LCR_DLAB != 0;
        let value = value as u8;
        self.status_reads = 0;
        match access.offset {
            DATA if latch => self.divisor = self.divisor & 0xff00 | u16::from(value),
            DATA => self.transmit(value, env),
            IER if latch => self.divisor = self.divisor & 0xff | u16::from(value) << 8,
            IER => self.enable_interrupts(value, env),
            IIR => self.control_fifos(value, env),
            LCR => self.control_line(value, env),
            MCR => self.control_modem(value, env),
            SCR => self.scr = value,
            _ => {}
        }
    }

    fn wake(&mut self, timer: u8, env: &mut dyn Env) {
        if timer == WAKE_INPUT {
            self.drain(env);
            self.fill(env);
        } else if self.timer_armed {
            self.timer_armed = false;
            self.timed_out = self.rx.len != 0;
        }
        self.update_line(env);
    }

    fn reset(&mut self, env: &mut dyn Env) {
        *self = Self { line: self.line, ..Self::new() };
        env.arm(0, NEVER);
        self.update_line(env);
    }
}
