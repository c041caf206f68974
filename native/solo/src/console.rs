//! The machine's UART as the guest's console: a PL011 at the place of QEMU's machine `virt`. The
//! kernel's log uses it, too: it has the lines before the guest starts and after its end.

use abi::Status;
use abi::args::irq_flags;
use abi::boot::slot;
use heapless::Deque;
use hw_arm64::pl011::{
    CLEAR, DATA, FLAGS, INTERRUPT_MASK, RECEIVE_EMPTY, RECEIVE_TIMEOUT, RECEIVED, TRANSMIT_FULL,
};
use native_rt::device::DeviceRegisters;
use native_rt::start::Boot;
use native_rt::{Factory, Irq, Notification, Platform};
use spin::Once;
use vmm_bus::ByteStream;

use crate::Cell;

/// Registers and interrupt of the UART.
const UART: u64 = 0x900_0000;
const LENGTH: u64 = 0x1000;
const INTERRUPT: u32 = 33;
/// Bytes of input that wait for the guest.
const INPUT: usize = 256;

/// The UART.
pub struct MachineUart {
    registers: DeviceRegisters,
    input: Cell<Deque<u8, INPUT>>,
    irq: Once<Irq>,
}

static UART_OF_MACHINE: Once<MachineUart> = Once::new();

/// Opens the UART, if the machine has one.
pub fn open(boot: &Boot) -> Option<&'static MachineUart> {
    let registers = boot.registers(UART, LENGTH)?;
    let input = Cell::new(Deque::new());
    Some(UART_OF_MACHINE.call_once(|| MachineUart { registers, input, irq: Once::new() }))
}

impl MachineUart {
    /// Binds the interrupt for input to a bit of a notification, in this slot.
    pub fn bind(&self, at: u64, to: Notification, bit: u32) -> Result<(), Status> {
        let (factory, platform) = (Factory::at(slot::FACTORY), Platform::at(slot::PLATFORM));
        let irq = factory.irq(at, platform, INTERRUPT, irq_flags::LEVEL)?;
        irq.bind(to, bit)?;
        self.registers.write32(INTERRUPT_MASK as u64, RECEIVED | RECEIVE_TIMEOUT);
        irq.acknowledge()?;
        self.irq.call_once(|| irq);
        Ok(())
    }

    fn has(&self, flag: u32) -> bool {
        self.registers.read32(FLAGS as u64) & flag != 0
    }

    /// Takes the UART's input; more than the guest's buffer holds is lost.
    pub fn receive(&self) {
        let mut input = self.input.lock();
        // What comes after the last byte was read interrupts again.
        self.registers.write32(CLEAR as u64, RECEIVED | RECEIVE_TIMEOUT);
        for _ in 0..INPUT {
            if self.has(RECEIVE_EMPTY) {
                break;
            }
            let _ = input.push_back(self.registers.read32(DATA as u64) as u8);
        }
        if let Some(irq) = self.irq.get() {
            // It fails only if the capability is gone.
            let _ = irq.acknowledge();
        }
    }

    /// Waits until the UART has taken all output.
    pub fn flush(&self) {
        while self.has(TRANSMIT_FULL) {
            native_rt::yield_now();
        }
    }
}

/// Guest's end of the console.
pub struct GuestLine(pub &'static MachineUart);

impl ByteStream for GuestLine {
    fn put(&mut self, byte: u8) -> bool {
        while self.0.has(TRANSMIT_FULL) {
            native_rt::yield_now();
        }
        self.0.registers.write32(DATA as u64, byte.into());
        true
    }

    fn take(&mut self) -> Option<u8> {
        self.0.input.lock().pop_front()
    }
}
