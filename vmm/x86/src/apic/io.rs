//! I/O APIC with 24 pins.
//!
//! State: the redirection table, the index register, the levels of the pins.
//! Features: edge and level triggering, remote IRR with redelivery of a level that is still
//! asserted after its EOI, all delivery modes, version 0x20 with its EOI register. An edge on a
//! masked pin is lost, as on the chip. Pins are active when their level is true, whatever polarity
//! is programmed. The arbitration id is the chip's own id, as after each write of it; there is no
//! bus on which it would rotate.
//! Missing: the delivery status bit (messages are never pending). Remote IRR is set when a level is
//! sent, also to a destination that no local APIC has, as in QEMU and KVM; the chip sets it when a
//! local APIC accepts the message. Drivers clear it by switching to edge and back.
//! Documentation: Intel 82093AA data sheet; Intel ICH9 datasheet, section 13.5 (EOI register).

use super::local::spec::{FIXED, LOWEST};
use super::message::spec as msi;
use vmm_bus::{Access, Device, Env, Msi};

/// Registers beyond those that [`hw_x86::apic::io`] names.
pub mod spec {
    pub use hw_x86::apic::io::*;

    /// Offset of the EOI register (WO): a vector.
    pub const END: u64 = 0x40;
    /// Bytes of the register page.
    pub const LEN: u64 = 0x1000;
    /// Indirect: identifier in 27:24 (RW).
    pub const ID: u32 = 0x00;
    /// Indirect: arbitration identifier (RO).
    pub const ARBITRATION: u32 = 0x02;
    /// Number of pins.
    pub const PINS: u8 = 24;
    /// Last indirect register.
    pub const REDIRECTION_LAST: u32 = REDIRECTION + 2 * PINS as u32 - 1;
    /// Version register: 0x20 (has the EOI register), highest entry.
    pub const VERSION_VALUE: u32 = 0x20 | (PINS as u32 - 1) << 16;

    /// Redirection entry: logical destination.
    pub const LOGICAL: u32 = 1 << 11;
    /// Redirection entry: a level interrupt was sent and its EOI is outstanding (RO).
    pub const REMOTE_IRR: u32 = 1 << 14;
    /// Low half of a redirection entry: writable bits.
    pub const WRITABLE: u32 = 0xff | 7 << 8 | LOGICAL | ACTIVE_LOW | LEVEL | MASKED;
}
use spec::*;

/// A redirection entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Entry {
    low: u32,
    /// Eight bits.
    destination: u8,
}

impl Entry {
    /// Returns whether the pin is level-triggered: SMI, NMI, INIT and ExtINT are edges even if they
    /// are programmed as levels, since no EOI ends them (82093AA, section 3.2.4).
    fn is_level(self) -> bool {
        let delivery = (self.low >> msi::DELIVERY_SHIFT & 7) as u8;
        self.low & LEVEL != 0 && matches!(delivery, FIXED | LOWEST)
    }

    /// The message. Delivery mode and vector have the same positions in an entry as in the
    /// message's data.
    fn message(self) -> Msi {
        const DATA: u32 = 0x7ff;
        let logical = if self.low & LOGICAL != 0 { msi::LOGICAL } else { 0 };
        let destination = u64::from(self.destination) << msi::DESTINATION_SHIFT;
        let level = if self.is_level() { msi::LEVEL } else { 0 };
        Msi { address: msi::APICS | destination | logical, data: self.low & DATA | level }
    }
}

/// An I/O APIC. Its registers are 32 bits wide at offsets 0, 0x10 and 0x40; it has no lines and
/// sends messages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IoApic {
    id: u8,
    reset_id: u8,
    index: u8,
    entries: [Entry; PINS as usize],
    /// Levels of the pins.
    levels: u32,
}

impl IoApic {
    /// Creates the chip in its power-on state with id `id` (four bits): every pin masked.
    pub const fn new(id: u8) -> Self {
        Self {
            id: id & 0xf,
            reset_id: id & 0xf,
            index: 0,
            entries: [Entry { low: MASKED, destination: 0 }; PINS as usize],
            levels: 0,
        }
    }

    /// Sets the level of `pin`, 0 to 23; other pins do not exist.
    pub fn set_irq(&mut self, pin: u8, level: bool, env: &mut dyn Env) {
        if pin >= PINS {
            return;
        }
        let bit = 1 << pin;
        let risen = level && self.levels & bit == 0;
        self.levels = self.levels & !bit | if level { bit } else { 0 };
        // An asserted level is sent again when it is unmasked or completed.
        if risen {
            self.service(pin, env);
        }
    }

    /// Handles the EOI of the level-triggered `vector`.
    pub fn eoi(&mut self, vector: u8, env: &mut dyn Env) {
        for pin in 0..PINS {
            let entry = &mut self.entries[usize::from(pin)];
            if entry.low & REMOTE_IRR != 0 && entry.low as u8 == vector {
                entry.low &= !REMOTE_IRR;
                self.service_level(pin, env);
            }
        }
    }

    /// Sends the interrupt of `pin`, unless it is masked or (if level-triggered) already sent.
    fn service(&mut self, pin: u8, env: &mut dyn Env) {
        let entry = &mut self.entries[usize::from(pin)];
        let is_level = entry.is_level();
        if entry.low & MASKED != 0 || is_level && entry.low & REMOTE_IRR != 0 {
            return;
        }
        if is_level {
            entry.low |= REMOTE_IRR;
        }
        env.msi(entry.message());
    }

    fn service_level(&mut self, pin: u8, env: &mut dyn Env) {
        if self.levels & 1 << pin != 0 && self.entries[usize::from(pin)].is_level() {
            self.service(pin, env);
        }
    }

    fn read_indirect(&self) -> u32 {
        match u32::from(self.index) {
            ID | ARBITRATION => u32::from(self.id) << 24,
            VERSION => VERSION_VALUE,
            index @ REDIRECTION..=REDIRECTION_LAST => {
                let entry = self.entries[(index - REDIRECTION) as usize / 2];
                if index & 1 == 0 {
                    entry.low
                } else {
                    u32::from(entry.destination) << DESTINATION_SHIFT
                }
            }
            _ => u32::MAX,
        }
    }

    fn write_indirect(&mut self, value: u32, env: &mut dyn Env) {
        match u32::from(self.index) {
            ID => self.id = (value >> 24) as u8 & 0xf,
            index @ REDIRECTION..=REDIRECTION_LAST => {
                let pin = ((index - REDIRECTION) / 2) as u8;
                let entry = &mut self.entries[usize::from(pin)];
                if index & 1 != 0 {
                    entry.destination = (value >> DESTINATION_SHIFT) as u8;
                    return;
                }
                // Remote IRR has a meaning for levels only; drivers clear it by switching to edge
                // and back.
                let irr = entry.low & REMOTE_IRR;
                entry.low = value & WRITABLE;
                entry.low |= if entry.is_level() { irr } else { 0 };
                self.service_level(pin, env);
            }
            _ => {}
        }
    }
}

impl Device for IoApic {
    fn read(&mut self, access: Access, _: &mut dyn Env) -> u64 {
        match access.offset {
            SELECT => self.index.into(),
            WINDOW => self.read_indirect().into(),
            END => 0,
            _ => access.open_bus(),
        }
    }

    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        match access.offset {
            SELECT => self.index = value as u8,
            WINDOW => self.write_indirect(value as u32, env),
            END => self.eoi(value as u8, env),
            _ => {}
        }
    }

    fn wake(&mut self, _: u8, _: &mut dyn Env) {}

    fn reset(&mut self, _: &mut dyn Env) {
        // Other devices drive the pins, which keep their levels.
        *self = Self { levels: self.levels, ..Self::new(self.reset_id) };
    }
}
