//! Keyboard controller (i8042) without a keyboard or a mouse.
//!
//! State: command byte, output port, one byte of output, the command whose data byte is awaited.
//! Features: status and command registers, controller self-test, port tests, command byte, output
//! port with reset line (commands 0xD1, 0xF0..=0xFF), loop-back of data bytes (0xD2, 0xD3), IRQ1
//! (line 0). A byte to a keyboard or a mouse gets the response of an absent device: 0xFE and the
//! time-out bit.
//! Missing: devices, scan codes, controller RAM beyond byte 0, masking of address line 20, IRQ12.
//! Documentation: Intel 8042 UPI data sheet; IBM PC/AT Technical Reference, "Keyboard Controller".

use vmm_bus::{Access, Device, Env, MachineEvent};

/// Registers and commands.
pub mod spec {
    /// RW: data (port 0x60).
    pub const DATA: u64 = 0;
    /// RO status, WO command (port 0x64).
    pub const STATUS: u64 = 1;

    /// Status: a byte is available in the data register.
    pub const STATUS_OUTPUT_FULL: u8 = 1 << 0;
    /// Status: the last write was a command.
    pub const STATUS_COMMAND: u8 = 1 << 3;
    /// Status: the keyboard is not locked.
    pub const STATUS_UNLOCKED: u8 = 1 << 4;
    /// Status: the available byte is from the auxiliary device.
    pub const STATUS_AUX: u8 = 1 << 5;
    /// Status: the device has not responded in time.
    pub const STATUS_TIMEOUT: u8 = 1 << 6;

    /// Read the command byte.
    pub const CMD_READ_COMMAND_BYTE: u8 = 0x20;
    /// Write the command byte.
    pub const CMD_WRITE_COMMAND_BYTE: u8 = 0x60;
    /// Disable the auxiliary port.
    pub const CMD_AUX_DISABLE: u8 = 0xa7;
    /// Enable the auxiliary port.
    pub const CMD_AUX_ENABLE: u8 = 0xa8;
    /// Test the auxiliary port's lines.
    pub const CMD_AUX_TEST: u8 = 0xa9;
    /// Test the controller.
    pub const CMD_SELF_TEST: u8 = 0xaa;
    /// Test the keyboard port's lines.
    pub const CMD_KBD_TEST: u8 = 0xab;
    /// Disable the keyboard port.
    pub const CMD_KBD_DISABLE: u8 = 0xad;
    /// Enable the keyboard port.
    pub const CMD_KBD_ENABLE: u8 = 0xae;
    /// Read the output port.
    pub const CMD_READ_OUTPUT: u8 = 0xd0;
    /// Write the output port.
    pub const CMD_WRITE_OUTPUT: u8 = 0xd1;
    /// Write a byte as if from the keyboard.
    pub const CMD_WRITE_KBD_BUFFER: u8 = 0xd2;
    /// Write a byte as if from the auxiliary device.
    pub const CMD_WRITE_AUX_BUFFER: u8 = 0xd3;
    /// Send a byte to the auxiliary device.
    pub const CMD_WRITE_AUX: u8 = 0xd4;
    /// First of the commands that pulse output lines low: bits 0..=3 are the unchanged lines.
    pub const CMD_PULSE: u8 = 0xf0;

    /// Self-test result: passed.
    pub const SELF_TEST_PASSED: u8 = 0x55;
    /// Port test result: the clock line is stuck low, as with nothing attached.
    pub const PORT_CLOCK_LOW: u8 = 0x01;
    /// Response of an absent device.
    pub const RESEND: u8 = 0xfe;

    /// Command byte: interrupt when a keyboard byte is available.
    pub const COMMAND_KBD_IRQ: u8 = 1 << 0;
    /// Command byte: the self-test has passed.
    pub const COMMAND_SYSTEM: u8 = 1 << 2;
    /// Command byte: the keyboard port is disabled.
    pub const COMMAND_KBD_OFF: u8 = 1 << 4;
    /// Command byte: the auxiliary port is disabled.
    pub const COMMAND_AUX_OFF: u8 = 1 << 5;

    /// Output port: the reset line is not asserted.
    pub const OUTPUT_RUN: u8 = 1 << 0;
    /// Output port: address line 20 is enabled.
    pub const OUTPUT_A20: u8 = 1 << 1;
}
use spec::*;

/// The keyboard controller. Offset 0 is port 0x60, offset 1 port 0x64; line 0 is IRQ1.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Keyboard {
    command_byte: u8,
    output_port: u8,
    /// The available byte; the flags give its source.
    data: u8,
    /// `STATUS_OUTPUT_FULL`, `STATUS_AUX` and `STATUS_TIMEOUT` of `data`.
    flags: u8,
    last_was_command: bool,
    /// The command that needs a data byte.
    awaiting: Option<u8>,
}

impl Default for Keyboard {
    fn default() -> Self {
        Self::new()
    }
}

impl Keyboard {
    /// Creates the controller as firmware leaves it: tested, ports disabled, address line 20
    /// enabled.
    pub const fn new() -> Self {
        Self {
            command_byte: COMMAND_SYSTEM | COMMAND_KBD_OFF | COMMAND_AUX_OFF,
            output_port: OUTPUT_RUN | OUTPUT_A20,
            data: 0,
            flags: 0,
            last_was_command: false,
            awaiting: None,
        }
    }

    fn answer(&mut self, data: u8, flags: u8, env: &mut dyn Env) {
        self.data = data;
        self.flags = STATUS_OUTPUT_FULL | flags;
        self.update_line(env);
    }

    fn update_line(&self, env: &mut dyn Env) {
        let keyboard_byte = self.flags & (STATUS_OUTPUT_FULL | STATUS_AUX) == STATUS_OUTPUT_FULL;
        env.set_line(0, keyboard_byte && self.command_byte & COMMAND_KBD_IRQ != 0);
    }

    fn command(&mut self, command: u8, env: &mut dyn Env) {
        self.awaiting = None;
        match command {
            CMD_READ_COMMAND_BYTE => self.answer(self.command_byte, 0, env),
            CMD_AUX_DISABLE => self.command_byte |= COMMAND_AUX_OFF,
            CMD_AUX_ENABLE => self.command_byte &= !COMMAND_AUX_OFF,
            CMD_KBD_DISABLE => self.command_byte |= COMMAND_KBD_OFF,
            CMD_KBD_ENABLE => self.command_byte &= !COMMAND_KBD_OFF,
            CMD_SELF_TEST => {
                self.command_byte |= COMMAND_SYSTEM;
                self.answer(SELF_TEST_PASSED, 0, env);
            }
            CMD_KBD_TEST | CMD_AUX_TEST => self.answer(PORT_CLOCK_LOW, 0, env),
            CMD_READ_OUTPUT => self.answer(self.output_port, 0, env),
            CMD_WRITE_COMMAND_BYTE
            | CMD_WRITE_OUTPUT
            | CMD_WRITE_KBD_BUFFER
            | CMD_WRITE_AUX_BUFFER
            | CMD_WRITE_AUX => self.awaiting = Some(command),
            CMD_PULSE.. => {
                if command & OUTPUT_RUN == 0 {
                    env.machine(MachineEvent::Reset);
                }
            }
            _ => env.missing("keyboard controller: command", command.into()),
        }
    }

    fn data_byte(&mut self, value: u8, env: &mut dyn Env) {
        match self.awaiting.take() {
            Some(CMD_WRITE_COMMAND_BYTE) => {
                self.command_byte = value;
                self.update_line(env);
            }
            Some(CMD_WRITE_OUTPUT) => {
                self.output_port = value;
                if value & OUTPUT_A20 == 0 {
                    env.missing("keyboard controller: A20 off", value.into());
                }
                if value & OUTPUT_RUN == 0 {
                    env.machine(MachineEvent::Reset);
                }
            }
            Some(CMD_WRITE_KBD_BUFFER) => self.answer(value, 0, env),
            Some(CMD_WRITE_AUX_BUFFER) => self.answer(value, STATUS_AUX, env),
            Some(CMD_WRITE_AUX) => self.answer(RESEND, STATUS_AUX | STATUS_TIMEOUT, env),
            _ => self.answer(RESEND, STATUS_TIMEOUT, env),
        }
    }
}

impl Device for Keyboard {
    fn read(&mut self, access: Access, env: &mut dyn Env) -> u64 {
        match access.offset {
            DATA => {
                if self.flags != 0 {
                    self.flags = 0;
                    self.update_line(env);
                }
                self.data.into()
            }
            STATUS => {
                let system = self.command_byte & COMMAND_SYSTEM;
                let command = if self.last_was_command { STATUS_COMMAND } else { 0 };
                (self.flags | system | command | STATUS_UNLOCKED).into()
            }
            _ => access.open_bus(),
        }
    }

    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        self.last_was_command = access.offset == STATUS;
        match access.offset {
            DATA => self.data_byte(value as u8, env),
            STATUS => self.command(value as u8, env),
            _ => {}
        }
    }

    fn wake(&mut self, _: u8, _: &mut dyn Env) {}

    fn reset(&mut self, env: &mut dyn Env) {
        *self = Self::new();
        self.update_line(env);
    }
}
