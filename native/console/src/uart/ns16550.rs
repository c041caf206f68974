//! Driver of a 16550 (National Semiconductor PC16550D data sheet).

use native_rt::Ports;

use super::{IDLE_READS, MAX_ROUNDS, SerialDriver};

/// Registers, by offset.
mod register {
    /// Data; divisor's low byte with `LCR_DIVISOR`.
    pub const DATA: u16 = 0;
    /// Interrupt enable; divisor's high byte with `LCR_DIVISOR`.
    pub const IER: u16 = 1;
    /// Interrupt identification (read), FIFO control (write).
    pub const IIR: u16 = 2;
    pub const FCR: u16 = 2;
    /// Line control.
    pub const LCR: u16 = 3;
    /// Modem control.
    pub const MCR: u16 = 4;
    /// Line status.
    pub const LSR: u16 = 5;
    /// Modem status.
    pub const MSR: u16 = 6;
}

const IER_RECEIVED: u8 = 1 << 0;
const IER_TRANSMITTED: u8 = 1 << 1;
/// Set: no interrupt is pending.
const IIR_NONE: u8 = 1 << 0;
/// FIFOs enabled without clearing input left by a previous server; receive trigger at one byte, as
/// typing is slower than the server.
const FCR_START: u8 = 0x01;
const LCR_8N1: u8 = 0x03;
const LCR_DIVISOR: u8 = 1 << 7;
/// DTR, RTS, and OUT2, which connects the interrupt on a PC.
const MCR_READY: u8 = 0x0b;
const LSR_RECEIVED: u8 = 1 << 0;
/// The transmit FIFO is empty.
const LSR_ROOM: u8 = 1 << 5;
/// The transmitter has sent everything.
const LSR_IDLE: u8 = 1 << 6;
const FIFO: usize = 16;
/// 115200 baud.
const DIVISOR: u8 = 1;

/// Register access of a 16550.
pub trait UartRegisters {
    /// Reads a register.
    fn read(&mut self, register: u16) -> u8;
    /// Writes a register.
    fn write(&mut self, register: u16, value: u8);
}

impl UartRegisters for Ports {
    fn read(&mut self, register: u16) -> u8 {
        Ports::read(*self, register)
    }
    fn write(&mut self, register: u16, value: u8) {
        Ports::write(*self, register, value);
    }
}

/// Driver of a serial port.
pub struct Ns16550<R> {
    registers: R,
    /// Enabled interrupts.
    enabled: u8,
}

impl<R: UartRegisters> Ns16550<R> {
    /// Initialises the port: 115200 baud, 8 bits, no parity, receive interrupt.
    pub fn new(mut registers: R) -> Self {
        registers.write(register::IER, 0);
        registers.write(register::LCR, LCR_DIVISOR | LCR_8N1);
        registers.write(register::DATA, DIVISOR);
        registers.write(register::IER, 0);
        registers.write(register::LCR, LCR_8N1);
        registers.write(register::FCR, FCR_START);
        registers.write(register::MCR, MCR_READY);
        let mut uart = Self { registers, enabled: 0 };
        uart.enable(IER_RECEIVED, true);
        uart
    }

    fn enable(&mut self, interrupt: u8, on: bool) {
        let enabled = if on { self.enabled | interrupt } else { self.enabled & !interrupt };
        if enabled != self.enabled {
            self.enabled = enabled;
            self.registers.write(register::IER, enabled);
        }
    }
}

impl<R: UartRegisters> SerialDriver for Ns16550<R> {
    /// The line is edge-triggered: [`SerialDriver::service`] ends when the port has deasserted it.
    const IS_LEVEL: bool = false;

    fn service<T>(
        &mut self,
        room: usize,
        client: &mut T,
        next: impl Fn(&mut T) -> Option<u8>,
        received: impl Fn(&mut T, u8),
    ) {
        let mut room = room;
        for _ in 0..MAX_ROUNDS {
            while room > 0 && self.registers.read(register::LSR) & LSR_RECEIVED != 0 {
                received(client, self.registers.read(register::DATA));
                room -= 1;
            }
            self.enable(IER_RECEIVED, room > 0);
            self.registers.read(register::MSR);
            self.send(|| next(client));
            if self.registers.read(register::IIR) & IIR_NONE != 0 {
                break;
            }
        }
    }

    /// Fills the transmit FIFO if it is empty.
    fn send(&mut self, mut next: impl FnMut() -> Option<u8>) {
        if self.registers.read(register::LSR) & LSR_ROOM == 0 {
            return;
        }
        let mut sent = 0;
        while sent < FIFO
            && let Some(byte) = next()
        {
            self.registers.write(register::DATA, byte);
            sent += 1;
        }
        self.enable(IER_TRANSMITTED, sent != 0);
    }

    fn drain(&mut self) -> bool {
        (0..IDLE_READS).any(|_| self.registers.read(register::LSR) & LSR_IDLE != 0)
    }
}

#[cfg(test)]
pub mod testing {
    use super::*;

    /// A port that sends at once, until it is stuck.
    #[derive(Default)]
    pub struct Line {
        pub sent: Vec<u8>,
        pub typed: Vec<u8>,
        pub ier: u8,
        pub lcr: u8,
        /// Number of bytes that it still accepts.
        pub room: usize,
    }

    impl UartRegisters for Line {
        fn read(&mut self, register: u16) -> u8 {
            match register {
                register::DATA => self.typed.remove(0),
                register::LSR => {
                    let room = if self.room >= FIFO { LSR_ROOM | LSR_IDLE } else { 0 };
                    room | if self.typed.is_empty() { 0 } else { LSR_RECEIVED }
                }
                register::IIR => IIR_NONE,
                _ => 0,
            }
        }
        fn write(&mut self, register: u16, value: u8) {
            match register {
                register::DATA if self.lcr & LCR_DIVISOR == 0 => {
                    self.sent.push(value);
                    self.room -= 1;
                }
                register::IER if self.lcr & LCR_DIVISOR == 0 => self.ier = value,
                register::LCR => self.lcr = value,
                _ => {}
            }
        }
    }

    impl<R> Ns16550<R> {
        pub fn line(&mut self) -> &mut R {
            &mut self.registers
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::Line;
    use super::*;

    #[test]
    fn transmit_interrupt_only_while_sending() {
        let mut uart = Ns16550::new(Line { room: 17, ..Line::default() });
        assert_eq!(uart.line().ier, IER_RECEIVED);
        let mut bytes = 0..20u8;
        uart.send(|| bytes.next());
        assert_eq!(uart.line().sent.len(), FIFO);
        assert_eq!(uart.line().ier, IER_RECEIVED | IER_TRANSMITTED);
        uart.send(|| bytes.next());
        assert_eq!(uart.line().sent.len(), FIFO, "no room, nothing sent");
        uart.line().room = 32;
        uart.send(|| bytes.next());
        uart.send(|| bytes.next());
        assert_eq!(uart.line().sent, (0..20).collect::<Vec<_>>());
        assert_eq!(uart.line().ier, IER_RECEIVED);
    }

    #[test]
    fn receives_all() {
        let mut uart = Ns16550::new(Line { typed: b"abc".to_vec(), room: 16, ..Line::default() });
        let mut received = Vec::new();
        uart.service(2, &mut received, |_| None, Vec::push);
        assert_eq!(received, b"ab", "no room for more");
        assert_eq!(uart.line().ier, 0, "nor interrupts");
        uart.service(2, &mut received, |_| None, Vec::push);
        assert_eq!(received, b"abc");
        assert_eq!(uart.line().ier, IER_RECEIVED);
    }
}
