//! Interrupt controllers 8259A, master and slave as in a PC/AT, with the edge/level registers.
//!
//! State: per chip the request, service and mask registers, input levels, mode bits and the step of
//! the initialisation.
//! Features: ICW1 to ICW4, OCW1 to OCW3, fully nested and special fully nested mode, special mask
//! mode, automatic EOI, rotation, specific and non-specific EOI, polling, spurious IRQ 7 and 15,
//! ELCR. An edge stays latched until it is acknowledged, even if the input falls before.
//! Missing (reported): single mode and other cascades than slave on input 2, MCS-80/85 mode.
//! Documentation: Intel 8259A data sheet (231468); Intel ICH9 datasheet, section 13.4 (ELCR).
//!
//! The pair drives no line of [`Env`]: the board reads [`PicPair::intr`] after each call.

use vmm_bus::{Access, Device, Env};

/// Registers.
pub mod spec {
    /// Master, even address: ICW1, OCW2, OCW3; IRR, ISR or poll on reading (port 0x20).
    pub const MASTER_COMMAND: u64 = 0;
    /// Master, odd address: ICW2 to ICW4, OCW1 (port 0x21).
    pub const MASTER_DATA: u64 = 1;
    /// Slave, even address (port 0xA0).
    pub const SLAVE_COMMAND: u64 = 2;
    /// Slave, odd address (port 0xA1).
    pub const SLAVE_DATA: u64 = 3;
    /// RW: inputs 0 to 7 are level triggered (port 0x4D0).
    pub const ELCR_MASTER: u64 = 4;
    /// RW: inputs 8 to 15 are level triggered (port 0x4D1).
    pub const ELCR_SLAVE: u64 = 5;

    /// ICW1: ICW4 follows.
    pub const ICW1_ICW4: u8 = 1 << 0;
    /// ICW1: no cascade.
    pub const ICW1_SINGLE: u8 = 1 << 1;
    /// ICW1: all inputs are level triggered.
    pub const ICW1_LEVEL: u8 = 1 << 3;
    /// Even address: this is ICW1.
    pub const ICW1_INIT: u8 = 1 << 4;
    /// ICW4: vectors in 8086 format.
    pub const ICW4_8086: u8 = 1 << 0;
    /// ICW4: automatic end of interrupt.
    pub const ICW4_AEOI: u8 = 1 << 1;
    /// ICW4: special fully nested mode.
    pub const ICW4_NESTED: u8 = 1 << 4;

    /// Even address: this is OCW3 (else OCW2).
    pub const OCW3: u8 = 1 << 3;
    /// OCW3: read register command, with [`OCW3_ISR`].
    pub const OCW3_READ: u8 = 1 << 1;
    /// OCW3: the register read is ISR (else IRR).
    pub const OCW3_ISR: u8 = 1 << 0;
    /// OCW3: the next read is a poll.
    pub const OCW3_POLL: u8 = 1 << 2;
    /// OCW3: bit 5 sets the special mask mode.
    pub const OCW3_SET_MASK_MODE: u8 = 1 << 6;
    /// OCW3: special mask mode.
    pub const OCW3_MASK_MODE: u8 = 1 << 5;

    /// OCW2, bits 5..=7: stop rotating in automatic EOI mode.
    pub const OCW2_AUTO_ROTATE_OFF: u8 = 0;
    /// OCW2: non-specific EOI.
    pub const OCW2_EOI: u8 = 1;
    /// OCW2: specific EOI.
    pub const OCW2_EOI_SPECIFIC: u8 = 3;
    /// OCW2: rotate in automatic EOI mode.
    pub const OCW2_AUTO_ROTATE_ON: u8 = 4;
    /// OCW2: rotate on non-specific EOI.
    pub const OCW2_ROTATE_EOI: u8 = 5;
    /// OCW2: set the lowest priority.
    pub const OCW2_SET_PRIORITY: u8 = 6;
    /// OCW2: rotate on specific EOI.
    pub const OCW2_ROTATE_EOI_SPECIFIC: u8 = 7;

    /// Poll: an interrupt was acknowledged.
    pub const POLL_TAKEN: u8 = 1 << 7;
    /// Input of the master that the slave drives.
    pub const CASCADE: u8 = 2;
    /// Inputs of the master that can be level triggered (not timer, keyboard, cascade).
    pub const ELCR_MASTER_MASK: u8 = 0xf8;
    /// Inputs of the slave that can be level triggered (not clock, coprocessor).
    pub const ELCR_SLAVE_MASK: u8 = 0xde;
}
use spec::*;

/// Meaning of the next write to the odd address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Icw2,
    Icw3,
    Icw4,
    Ready,
}

/// One 8259A.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Pic {
    slave: bool,
    irr: u8,
    isr: u8,
    imr: u8,
    /// Levels of the inputs.
    inputs: u8,
    elcr: u8,
    level_mode: bool,
    /// Upper five bits of the vectors.
    base: u8,
    /// Input of highest priority.
    first: u8,
    step: Step,
    single: bool,
    wants_icw4: bool,
    auto_eoi: bool,
    auto_rotate: bool,
    special_mask: bool,
    special_nested: bool,
    read_isr: bool,
    poll: bool,
}

impl Pic {
    const fn new(slave: bool) -> Self {
        Self {
            slave,
            irr: 0,
            isr: 0,
            imr: 0xff,
            inputs: 0,
            elcr: 0,
            level_mode: false,
            base: if slave { 0x70 } else { 0x08 },
            first: 0,
            step: Step::Ready,
            single: false,
            wants_icw4: false,
            auto_eoi: false,
            auto_rotate: false,
            special_mask: false,
            special_nested: false,
            read_isr: false,
            poll: false,
        }
    }

    fn level_triggered(&self) -> u8 {
        if self.level_mode { 0xff } else { self.elcr }
    }

    /// Sets the inputs that are level-triggered: each requests by its present level from now on.
    fn set_elcr(&mut self, elcr: u8) {
        self.elcr = elcr;
        let level = self.level_triggered();
        self.irr = self.irr & !level | self.inputs & level;
    }

    fn set_input(&mut self, input: u8, level: bool) {
        let bit = 1 << input;
        let rises = self.inputs & bit == 0 && level;
        if level {
            self.inputs |= bit;
        } else {
            self.inputs &= !bit;
        }
        if self.level_triggered() & bit != 0 {
            self.irr = self.irr & !bit | if level { bit } else { 0 };
        } else if rises {
            self.irr |= bit;
        }
    }

    /// Rank of the highest priority in `bits`: 0 is the highest, 8 is none.
    fn rank(&self, bits: u8) -> u8 {
        if bits == 0 { 8 } else { bits.rotate_right(self.first.into()).trailing_zeros() as u8 }
    }

    /// The input to service now.
    fn request(&self) -> Option<u8> {
        let wanted = self.irr & !self.imr;
        if wanted == 0 || self.step != Step::Ready {
            return None;
        }
        let mut blocking = self.isr;
        if self.special_mask {
            blocking &= !self.imr;
        }
        let rank = self.rank(wanted);
        let input = (self.first + rank) & 7;
        // A slave in service does not block a further, higher request of the same slave.
        let is_of_slave = self.special_nested && !self.slave && input == CASCADE;
        let limit = self.rank(blocking) + u8::from(is_of_slave);
        (rank < limit).then_some(input)
    }

    fn acknowledge(&mut self, input: u8) {
        let bit = 1 << input;
        if self.level_triggered() & bit == 0 {
            self.irr &= !bit;
        }
        if !self.auto_eoi {
            self.isr |= bit;
        } else if self.auto_rotate {
            self.first = (input + 1) & 7;
        }
    }

    fn command(&mut self, value: u8, env: &mut dyn Env) {
        if value & ICW1_INIT != 0 {
            *self = Self {
                inputs: self.inputs,
                elcr: self.elcr,
                level_mode: value & ICW1_LEVEL != 0,
                single: value & ICW1_SINGLE != 0,
                wants_icw4: value & ICW1_ICW4 != 0,
                base: self.base,
                imr: 0,
                step: Step::Icw2,
                ..Self::new(self.slave)
            };
            self.irr = self.inputs & self.level_triggered();
            if self.single {
                env.missing("8259: single mode", value.into());
            }
            if !self.wants_icw4 {
                env.missing("8259: MCS-80 mode", value.into());
            }
        } else if value & OCW3 != 0 {
            if value & OCW3_SET_MASK_MODE != 0 {
                self.special_mask = value & OCW3_MASK_MODE != 0;
            }
            self.poll = value & OCW3_POLL != 0;
            if value & OCW3_READ != 0 {
                self.read_isr = value & OCW3_ISR != 0;
            }
        } else {
            self.end_of_interrupt(value);
        }
    }

    fn end_of_interrupt(&mut self, value: u8) {
        let chosen = value & 7;
        let command = value >> 5;
        match command {
            OCW2_AUTO_ROTATE_OFF => self.auto_rotate = false,
            OCW2_AUTO_ROTATE_ON => self.auto_rotate = true,
            OCW2_SET_PRIORITY => self.first = (chosen + 1) & 7,
            OCW2_EOI | OCW2_ROTATE_EOI => {
                // In special mask mode only a specific EOI completes a masked input.
                let ended = if self.special_mask { self.isr & !self.imr } else { self.isr };
                let rank = self.rank(ended);
                if rank < 8 {
                    let input = (self.first + rank) & 7;
                    self.isr &= !(1 << input);
                    if command == OCW2_ROTATE_EOI {
                        self.first = (input + 1) & 7;
                    }
                }
            }
            OCW2_EOI_SPECIFIC | OCW2_ROTATE_EOI_SPECIFIC => {
                self.isr &= !(1 << chosen);
                if command == OCW2_ROTATE_EOI_SPECIFIC {
                    self.first = (chosen + 1) & 7;
                }
            }
            _ => {}
        }
    }

    fn data(&mut self, value: u8, env: &mut dyn Env) {
        match self.step {
            Step::Ready => self.imr = value,
            Step::Icw2 => {
                self.base = value & 0xf8;
                self.step = match (self.single, self.wants_icw4) {
                    (false, _) => Step::Icw3,
                    (true, true) => Step::Icw4,
                    (true, false) => Step::Ready,
                };
            }
            Step::Icw3 => {
                let expected = if self.slave { CASCADE } else { 1 << CASCADE };
                if value != expected {
                    env.missing("8259: other cascade", value.into());
                }
                self.step = if self.wants_icw4 { Step::Icw4 } else { Step::Ready };
            }
            Step::Icw4 => {
                if value & ICW4_8086 == 0 {
                    env.missing("8259: MCS-80 mode", value.into());
                }
                self.auto_eoi = value & ICW4_AEOI != 0;
                self.special_nested = value & ICW4_NESTED != 0;
                self.step = Step::Ready;
            }
        }
    }

    fn read_command(&self) -> u8 {
        if self.read_isr { self.isr } else { self.irr }
    }

    /// Reads as a poll if one was commanded: acknowledges the highest request.
    fn poll(&mut self) -> Option<u8> {
        if !self.poll {
            return None;
        }
        self.poll = false;
        let Some(input) = self.request() else { return Some(0) };
        self.acknowledge(input);
        Some(POLL_TAKEN | input)
    }
}

/// The master and the slave. Offsets 0 and 1 are ports 0x20 and 0x21, 2 and 3 are 0xA0 and 0xA1, 4
/// and 5 are 0x4D0 and 0x4D1.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PicPair {
    master: Pic,
    slave: Pic,
    /// The master's INTR output.
    output: bool,
}

impl Default for PicPair {
    fn default() -> Self {
        Self::new()
    }
}

impl PicPair {
    /// Creates the chips as firmware leaves them: initialised (vectors 0x08 and 0x70), every input
    /// masked. Kernels probe for the chips by writing a mask before they initialise them.
    pub const fn new() -> Self {
        Self { master: Pic::new(false), slave: Pic::new(true), output: false }
    }

    /// Sets the level of input `n`, 0 to 15. Input 2 is the cascade, which only the slave drives.
    pub fn set_irq(&mut self, n: u8, level: bool) {
        match n {
            CASCADE => {}
            0..=7 => self.master.set_input(n, level),
            8..=15 => self.slave.set_input(n - 8, level),
            _ => {}
        }
        self.update();
    }

    /// The INTR line to the CPU (or to LINT0).
    #[inline]
    pub fn intr(&self) -> bool {
        self.output
    }

    /// Acknowledge cycle of the CPU: returns the vector, that of input 7 if no request remains.
    pub fn acknowledge(&mut self) -> u8 {
        let vector = match self.master.request() {
            Some(CASCADE) => {
                self.master.acknowledge(CASCADE);
                let input = self.slave.request();
                if let Some(input) = input {
                    self.slave.acknowledge(input);
                }
                let vector = self.slave.base + input.unwrap_or(7);
                // The slave's output falls with the acknowledge; a further request is a new edge.
                self.master.set_input(CASCADE, false);
                vector
            }
            Some(input) => {
                self.master.acknowledge(input);
                self.master.base + input
            }
            None => self.master.base + 7,
        };
        self.update();
        vector
    }

    fn update(&mut self) {
        let cascade = self.slave.request().is_some();
        self.master.set_input(CASCADE, cascade);
        if !cascade {
            // The slave's request has disappeared before the master serviced it.
            self.master.irr &= !(1 << CASCADE);
        }
        self.output = self.master.request().is_some();
    }
}

impl Device for PicPair {
    fn read(&mut self, access: Access, _: &mut dyn Env) -> u64 {
        let value = match access.offset {
            MASTER_COMMAND | MASTER_DATA => match self.master.poll() {
                Some(polled) => polled,
                None if access.offset == MASTER_DATA => self.master.imr,
                None => self.master.read_command(),
            },
            SLAVE_COMMAND | SLAVE_DATA => match self.slave.poll() {
                Some(polled) => {
                    self.master.set_input(CASCADE, false);
                    polled
                }
                None if access.offset == SLAVE_DATA => self.slave.imr,
                None => self.slave.read_command(),
            },
            ELCR_MASTER => self.master.elcr,
            ELCR_SLAVE => self.slave.elcr,
            _ => return access.open_bus(),
        };
        self.update();
        value.into()
    }

    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        let value = value as u8;
        match access.offset {
            MASTER_COMMAND => self.master.command(value, env),
            MASTER_DATA => self.master.data(value, env),
            SLAVE_COMMAND => self.slave.command(value, env),
            SLAVE_DATA => self.slave.data(value, env),
            ELCR_MASTER => self.master.set_elcr(value & ELCR_MASTER_MASK),
            ELCR_SLAVE => self.slave.set_elcr(value & ELCR_SLAVE_MASK),
            _ => {}
        }
        self.update();
    }

    fn wake(&mut self, _: u8, _: &mut dyn Env) {}

    fn reset(&mut self, _: &mut dyn Env) {
        // Other devices drive the inputs, which keep their levels.
        let (master, slave) = (self.master.inputs, self.slave.inputs);
        *self = Self::new();
        self.master.inputs = master;
        self.slave.inputs = slave;
        self.update();
    }
}
