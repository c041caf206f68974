//! Driver of a PL011 (PrimeCell UART, DDI 0183G). Speed and format are those that the firmware has
//! set.

use hw_arm64::pl011::{
    ALL_INTERRUPTS, BUSY, CLEAR, CONTROL, DATA, ENABLED, FLAGS, INTERRUPT_MASK, INTERRUPTS,
    RECEIVE_EMPTY, RECEIVE_TIMEOUT, RECEIVED, TRANSMIT_FULL, TRANSMITTED,
};
use native_rt::device::DeviceRegisters;

use super::{IDLE_READS, MAX_ROUNDS, SerialDriver};

/// Interrupts of the receiver: its FIFO is filled to its level, or has waited below it.
const RECEIVER: u32 = RECEIVED | RECEIVE_TIMEOUT;

/// Register access of a PL011, by byte offset.
pub trait Pl011Registers {
    /// Reads a register.
    fn read(&mut self, register: usize) -> u32;
    /// Writes a register.
    fn write(&mut self, register: usize, value: u32);
}

impl Pl011Registers for DeviceRegisters {
    fn read(&mut self, register: usize) -> u32 {
        self.read32(register as u64)
    }
    fn write(&mut self, register: usize, value: u32) {
        self.write32(register as u64, value);
    }
}

/// Driver of a PL011.
pub struct Pl011<R> {
    registers: R,
    /// Enabled interrupts.
    enabled: u32,
}

impl<R: Pl011Registers> Pl011<R> {
    /// Initialises the port: receive interrupts.
    pub fn new(mut registers: R) -> Self {
        registers.write(INTERRUPT_MASK, 0);
        registers.write(CLEAR, ALL_INTERRUPTS);
        registers.write(CONTROL, ENABLED);
        let mut uart = Self { registers, enabled: 0 };
        uart.enable(RECEIVER, true);
        uart
    }

    fn has(&mut self, flag: u32) -> bool {
        self.registers.read(FLAGS) & flag != 0
    }

    fn enable(&mut self, interrupts: u32, on: bool) {
        let enabled = if on { self.enabled | interrupts } else { self.enabled & !interrupts };
        if enabled != self.enabled {
            self.enabled = enabled;
            self.registers.write(INTERRUPT_MASK, enabled);
        }
    }
}

impl<R: Pl011Registers> SerialDriver for Pl011<R> {
    const IS_LEVEL: bool = true;

    fn service<T>(
        &mut self,
        room: usize,
        client: &mut T,
        next: impl Fn(&mut T) -> Option<u8>,
        received: impl Fn(&mut T, u8),
    ) {
        let mut room = room;
        for _ in 0..MAX_ROUNDS {
            // First: input that comes after the last byte was read interrupts again.
            self.registers.write(CLEAR, RECEIVER);
            while room > 0 && !self.has(RECEIVE_EMPTY) {
                received(client, self.registers.read(DATA) as u8);
                room -= 1;
            }
            self.enable(RECEIVER, room > 0);
            self.send(|| next(client));
            if self.registers.read(INTERRUPTS) == 0 {
                break;
            }
        }
    }

    /// Interrupts only while bytes remain: the interrupt is the passage of the FIFO's level.
    fn send(&mut self, mut next: impl FnMut() -> Option<u8>) {
        self.registers.write(CLEAR, TRANSMITTED);
        let is_full = loop {
            if self.has(TRANSMIT_FULL) {
                break true;
            }
            let Some(byte) = next() else { break false };
            self.registers.write(DATA, byte.into());
        };
        self.enable(TRANSMITTED, is_full);
    }

    fn drain(&mut self) -> bool {
        (0..IDLE_READS).any(|_| !self.has(BUSY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A port with a transmit FIFO of this room.
    #[derive(Default)]
    struct Line {
        sent: Vec<u8>,
        typed: Vec<u8>,
        mask: u32,
        room: usize,
    }

    impl Pl011Registers for Line {
        fn read(&mut self, register: usize) -> u32 {
            let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
            match register {
                DATA => self.typed.remove(0).into(),
                FLAGS => {
                    flag(self.typed.is_empty(), RECEIVE_EMPTY)
                        | flag(self.room == 0, TRANSMIT_FULL | BUSY)
                }
                INTERRUPTS => flag(!self.typed.is_empty(), RECEIVED) & self.mask,
                _ => 0,
            }
        }
        fn write(&mut self, register: usize, value: u32) {
            match register {
                DATA => {
                    self.sent.push(value as u8);
                    self.room -= 1;
                }
                INTERRUPT_MASK => self.mask = value,
                _ => {}
            }
        }
    }

    #[test]
    fn transmit_interrupt_only_while_bytes_wait() {
        let mut uart = Pl011::new(Line { room: 16, ..Line::default() });
        assert_eq!(uart.registers.mask, RECEIVER);
        let mut bytes = 0..20u8;
        uart.send(|| bytes.next());
        assert_eq!(uart.registers.sent.len(), 16);
        assert_eq!(uart.registers.mask, RECEIVER | TRANSMITTED);
        assert!(!uart.drain(), "a transmitter that does not move is not waited for");
        uart.registers.room = 16;
        uart.send(|| bytes.next());
        assert_eq!(uart.registers.sent, (0..20).collect::<Vec<_>>());
        assert_eq!(uart.registers.mask, RECEIVER);
        assert!(uart.drain());
    }

    #[test]
    fn input_without_room_stays_and_does_not_interrupt() {
        let mut uart = Pl011::new(Line { typed: b"abc".to_vec(), room: 16, ..Line::default() });
        let mut received = Vec::new();
        uart.service(2, &mut received, |_| None, Vec::push);
        assert_eq!((&received[..], uart.registers.mask), (&b"ab"[..], 0));
        uart.service(2, &mut received, |_| None, Vec::push);
        assert_eq!((&received[..], uart.registers.mask), (&b"abc"[..], RECEIVER));
    }
}
