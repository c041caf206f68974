//! UART PL011.
//!
//! State: the registers, 16 received bytes, up to 16 bytes that the host has not accepted yet.
//! Features: FIFOs of 16 bytes; interrupts for received data and for room in the transmitter
//! (line 0). The line has no speed: the host gets a written byte at once, unless it refuses the
//! byte. Input stays with the host until the receiver has room, is enabled, and the guest waits for
//! it: its interrupt is let through, or it polls, that is, reads the flags repeatedly. So a driver
//! that empties the receiver during its start loses no input. Each received byte interrupts at
//! once, whatever the level, so there is no time-out.
//! Missing: loop-back, break and errors, flow control, DMA (reported), the effect of the divisor.
//! Documentation: Arm DDI 0183G.

use hw_arm64::pl011::*;
use vmm_bus::{Access, Device, Env, WAKE_INPUT};

use super::pl031::identification;

/// Bit of the control register: the UART is on.
const ON: u32 = 1 << 0;
/// Bit of the control register: loop-back.
const LOOP: u32 = 1 << 7;
/// Bit of the control register: the receiver is on.
const RECEIVER: u32 = 1 << 9;
/// Value of the control register after a reset: transmitter and receiver, but not the UART.
const RESET: u32 = 0x300;
/// Reads of the flags that count as polling for data. A driver reads them a few times when it
/// starts.
const POLLING: u8 = 8;
/// Registers of the line: low power, divisor, fraction, line control.
const LINE_REGISTERS: usize = 4;

/// A ring of bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Fifo16 {
    bytes: [u8; FIFO],
    head: usize,
    length: usize,
}

impl Fifo16 {
    const EMPTY: Self = Self { bytes: [0; FIFO], head: 0, length: 0 };

    fn is_full(&self) -> bool {
        self.length == FIFO
    }

    fn push(&mut self, byte: u8) {
        if !self.is_full() {
            self.bytes[(self.head + self.length) % FIFO] = byte;
            self.length += 1;
        }
    }

    fn front(&self) -> Option<u8> {
        (self.length != 0).then(|| self.bytes[self.head % FIFO])
    }

    fn pop(&mut self) -> Option<u8> {
        let byte = self.front()?;
        self.head = (self.head + 1) % FIFO;
        self.length -= 1;
        Some(byte)
    }
}

/// A PL011. Line 0 is its interrupt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pl011 {
    control: u32,
    line_registers: [u32; LINE_REGISTERS],
    levels: u32,
    mask: u32,
    received: Fifo16,
    /// Bytes that the host has refused.
    refused: Fifo16,
    /// The transmitter has got room since the guest has cleared its interrupt.
    has_room: bool,
    /// Reads of the flags without another access between them.
    flag_reads: u8,
    /// Present level of the interrupt line.
    line: bool,
}

impl Default for Pl011 {
    fn default() -> Self {
        Self::new()
    }
}

impl Pl011 {
    /// Creates the chip in its reset state.
    pub const fn new() -> Self {
        Self {
            control: RESET,
            line_registers: [0; LINE_REGISTERS],
            levels: 0x12,
            mask: 0,
            received: Fifo16::EMPTY,
            refused: Fifo16::EMPTY,
            has_room: false,
            flag_reads: 0,
            line: false,
        }
    }

    fn raw_interrupts(&self) -> u32 {
        let received = if self.received.length != 0 { RECEIVED | RECEIVE_TIMEOUT } else { 0 };
        received | if self.has_room { TRANSMITTED } else { 0 }
    }

    fn flags(&self) -> u32 {
        let transmitter = match self.refused.length {
            0 => TRANSMIT_EMPTY,
            FIFO => TRANSMIT_FULL,
            _ => 0,
        };
        transmitter | if self.received.length == 0 { RECEIVE_EMPTY } else { 0 }
    }

    fn update_line(&mut self, env: &mut dyn Env) {
        let level = self.raw_interrupts() & self.mask != 0;
        if level != self.line {
            self.line = level;
            env.set_line(0, level);
        }
    }

    /// Reads input while there is room.
    fn receive(&mut self, env: &mut dyn Env) {
        if self.control & (ON | RECEIVER) != ON | RECEIVER {
            return;
        }
        while !self.received.is_full() {
            let Some(byte) = env.take() else { break };
            self.received.push(byte);
        }
    }

    /// Reads input if the guest waits for its interrupt.
    fn receive_if_awaited(&mut self, env: &mut dyn Env) {
        if self.mask & (RECEIVED | RECEIVE_TIMEOUT) != 0 {
            self.receive(env);
        }
    }

    fn transmit(&mut self, byte: u8, env: &mut dyn Env) {
        if self.refused.length != 0 || !env.put(byte) {
            self.refused.push(byte);
        }
        self.has_room = !self.refused.is_full();
    }

    /// Offers the host the refused bytes again.
    fn drain(&mut self, env: &mut dyn Env) {
        while let Some(byte) = self.refused.front() {
            if !env.put(byte) {
                return;
            }
            self.refused.pop();
            self.has_room = true;
        }
    }
}

impl Device for Pl011 {
    fn read(&mut self, access: Access, env: &mut dyn Env) -> u64 {
        let flag_reads = core::mem::take(&mut self.flag_reads);
        let value = match access.offset as usize {
            DATA => {
                let byte = self.received.pop().unwrap_or(0);
                // A guest that reads data keeps polling.
                self.flag_reads = flag_reads;
                self.receive_if_awaited(env);
                byte.into()
            }
            FLAGS => {
                if flag_reads >= POLLING && self.received.length == 0 {
                    self.receive(env);
                }
                self.flag_reads = flag_reads.saturating_add(1);
                self.flags()
            }
            CONTROL => self.control,
            FIFO_LEVELS => self.levels,
            INTERRUPT_MASK => self.mask,
            RAW_INTERRUPTS => self.raw_interrupts(),
            INTERRUPTS => self.raw_interrupts() & self.mask,
            offset @ LOW_POWER..CONTROL => self.line_registers[(offset - LOW_POWER) / 4],
            offset => identification(offset, IDENTIFICATION, &IDENTITY) as u32,
        };
        self.update_line(env);
        value.into()
    }

    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        let word = value as u32;
        self.flag_reads = 0;
        match access.offset as usize {
            DATA => self.transmit(value as u8, env),
            CONTROL => {
                if word & LOOP != 0 {
                    env.missing("loop-back of the PL011", value);
                }
                self.control = word & 0xffff;
                self.receive_if_awaited(env);
            }
            FIFO_LEVELS => self.levels = word & 0x3f,
            INTERRUPT_MASK => {
                self.mask = word & ALL_INTERRUPTS;
                self.receive_if_awaited(env);
            }
            CLEAR if word & TRANSMITTED != 0 => self.has_room = false,
            DMA_CONTROL if word != 0 => env.missing("DMA of the PL011", value),
            offset @ LOW_POWER..CONTROL => {
                self.line_registers[(offset - LOW_POWER) / 4] = word & 0xffff;
            }
            _ => {}
        }
        self.update_line(env);
    }

    fn wake(&mut self, timer: u8, env: &mut dyn Env) {
        if timer == WAKE_INPUT {
            self.drain(env);
            self.receive_if_awaited(env);
            self.update_line(env);
        }
    }

    fn reset(&mut self, env: &mut dyn Env) {
        *self = Self { line: self.line, ..Self::new() };
        self.update_line(env);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_bus::testing::Script;

    fn started() -> (Pl011, Script) {
        let (mut uart, mut env) = (Pl011::new(), Script::new());
        env.outl(&mut uart, CONTROL as u64, ENABLED);
        (uart, env)
    }

    #[test]
    fn output_waits_for_the_host() {
        let (mut uart, mut env) = started();
        env.stream.room = Some(1);
        env.outl(&mut uart, INTERRUPT_MASK as u64, TRANSMITTED);
        for byte in 0..17 {
            env.outl(&mut uart, DATA as u64, byte);
        }
        assert_eq!(env.stream.output, [0]);
        assert_eq!(env.inl(&mut uart, FLAGS as u64) & TRANSMIT_FULL, TRANSMIT_FULL);
        assert!(!env.line(0), "no room");
        env.stream.room = None;
        uart.wake(WAKE_INPUT, &mut env);
        assert_eq!(env.stream.output, (0..17).collect::<Vec<u8>>());
        assert!(env.line(0), "room");
        env.outl(&mut uart, CLEAR as u64, TRANSMITTED);
        assert!(!env.line(0));
    }

    #[test]
    fn input_waits_for_the_guest() {
        let (mut uart, mut env) = started();
        env.send(&mut uart, b"ab");
        assert_eq!(env.inl(&mut uart, FLAGS as u64) & RECEIVE_EMPTY, RECEIVE_EMPTY);
        env.outl(&mut uart, INTERRUPT_MASK as u64, RECEIVED);
        assert!(env.line(0));
        assert_eq!(env.inl(&mut uart, INTERRUPTS as u64), RECEIVED);
        assert_eq!([0; 2].map(|_| env.inl(&mut uart, DATA as u64)), [0x61, 0x62]);
        assert!(!env.line(0));
    }

    #[test]
    fn a_guest_that_polls_gets_input() {
        let (mut uart, mut env) = started();
        env.send(&mut uart, b"x");
        let is_empty = |flags: u32| flags & RECEIVE_EMPTY != 0;
        let reads = (0..20).take_while(|_| is_empty(env.inl(&mut uart, FLAGS as u64))).count();
        assert_eq!(reads, usize::from(POLLING));
        assert_eq!(env.inl(&mut uart, IDENTIFICATION as u64), 0x11);
    }
}
