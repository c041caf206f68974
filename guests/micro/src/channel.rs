//! Channels to other machines (`docs/spec/channel.md`): finding the functions, their registers and memory, doorbells.

use crate::{cpu, port};
use abi::vcpu::HYPERCALL_DOORBELL;
use core::sync::atomic::AtomicU64;
use proto::channel::register::*;
use proto::channel::{FREE_AREA, Receiver, SHARE_BYTES, Sender};

/// Ports of PCI configuration mechanism 1, and the bit that turns it on.
const CONFIG_ADDRESS: u16 = 0xcf8;
const CONFIG_DATA: u16 = 0xcfc;
const CONFIG_ENABLE: u32 = 1 << 31;
/// Device and vendor.
const ID: u32 = 0x0001_5052;
/// Configuration: command (memory, master), base addresses, MSI-X capability with its enable bit.
const COMMAND: u32 = 0x04;
const MEMORY_AND_MASTER: u32 = 6;
const BARS: [u32; 3] = [0x10, 0x18, 0x20];
const MSIX: u32 = 0x40;
const MSIX_ENABLE: u32 = 1 << 31;
const DEVICES: u32 = 32;
/// Address of a message to the local APIC with id 0.
const TO_APIC_0: u32 = 0xfee0_0000;

/// An end of a channel.
#[derive(Clone, Copy)]
pub struct Channel {
    device: u32,
    /// Number among this machine's channels, once the function is on.
    number: u64,
    registers: u64,
    memory: u64,
    shares: u64,
}

/// The channels of this machine, in their order.
pub fn all() -> impl Iterator<Item = Channel> {
    (0..DEVICES).filter_map(|device| {
        if config_read(device, 0) != ID {
            return None;
        }
        let base = |bar| u64::from(config_read(device, bar) & !0xf);
        let [registers, memory, shares] = BARS.map(base);
        Some(Channel { device, number: 0, registers, memory, shares })
    })
}

fn select(device: u32, register: u32) {
    port::write32(CONFIG_ADDRESS, CONFIG_ENABLE | device << 11 | register & 0xfc);
}

/// Reads a register of configuration space.
pub fn config_read(device: u32, register: u32) -> u32 {
    select(device, register);
    port::read32(CONFIG_DATA)
}

/// Writes a register of configuration space.
pub fn config_write(device: u32, register: u32, value: u32) {
    select(device, register);
    port::write32(CONFIG_DATA, value);
}

impl Channel {
    /// Turns the function on: doorbells come as interrupt `vector`, events as the next one, both on the first processor.
    pub fn enable(&mut self, vector: u8) {
        config_write(self.device, COMMAND, MEMORY_AND_MASTER);
        config_write(self.device, MSIX, MSIX_ENABLE);
        for number in 0..2 {
            let entry = TABLE + 16 * u64::from(number);
            for (word, value) in [TO_APIC_0, 0, u32::from(vector + number), 0].iter().enumerate() {
                self.write(entry + 4 * word as u64, *value);
            }
        }
        self.number = self.read(NUMBER).into();
    }

    /// Reads a register.
    pub fn read(&self, register: u64) -> u32 {
        // SAFETY: registers of the function, mapped; reading them changes no memory.
        unsafe { ((self.registers + register) as *const u32).read_volatile() }
    }

    /// Writes a register. No command makes the function write to memory that this program has not offered.
    pub fn write(&self, register: u64, value: u32) {
        // SAFETY: as above; what the peer writes to offered memory is expected there.
        unsafe { ((self.registers + register) as *mut u32).write_volatile(value) }
    }

    /// Number of its device on bus 0.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Number among this machine's channels.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Rings at the peer; the kernel's answer.
    pub fn ring(&self) -> u64 {
        ring(self.number)
    }

    /// A name in the registers, filled up with zeros.
    pub fn name(&self, register: u64) -> [u8; NAME_LEN] {
        let mut name = [0; NAME_LEN];
        for (index, bytes) in name.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *bytes = self.read(register + 4 * index as u64).to_le_bytes();
        }
        name
    }

    /// The channel's memory.
    pub fn memory(&self) -> &'static [AtomicU64] {
        words(self.memory, self.read(SIZE).into())
    }

    /// The free area of the memory.
    pub fn free_area(&self) -> &'static [AtomicU64] {
        &self.memory()[FREE_AREA as usize / 8..]
    }

    /// Where a share of the peer is, all of its window, whether something is mapped or not.
    pub fn share(&self, share: usize) -> &'static [AtomicU64] {
        words(self.shares + share as u64 * SHARE_BYTES, SHARE_BYTES)
    }

    /// Both ends of the rings that are this side's.
    pub fn rings(&self) -> Option<(Sender<'static>, Receiver<'static>)> {
        let (memory, side) = (self.memory(), self.read(SIDE) as usize & 1);
        Some((Sender::attach(memory, side)?, Receiver::attach(memory, side)?))
    }

    /// Reads a register of one of this side's shares.
    pub fn own(&self, share: usize, register: u64) -> u32 {
        self.read(OWN_SHARES + share as u64 * SHARE_STEP + register)
    }

    /// Reads a register of one of the peer's shares.
    pub fn peers(&self, share: usize, register: u64) -> u32 {
        self.read(PEER_SHARES + share as u64 * SHARE_STEP + register)
    }

    /// Offers memory; whether that is accepted.
    pub fn offer(&self, share: usize, address: u64, length: u32, command: u32) -> bool {
        let base = OWN_SHARES + share as u64 * SHARE_STEP;
        self.write(base + SHARE_ADDRESS, address as u32);
        self.write(base + SHARE_ADDRESS + 4, (address >> 32) as u32);
        self.write(base + SHARE_LENGTH, length);
        self.write(base + SHARE_COMMAND, command);
        self.own(share, SHARE_RESULT) == 0
    }

    /// Gives a command for a share of the peer; whether that is accepted.
    pub fn command(&self, share: usize, command: u32) -> bool {
        self.write(PEER_SHARES + share as u64 * SHARE_STEP + SHARE_COMMAND, command);
        self.peers(share, SHARE_RESULT) == 0
    }

    /// Moves the window of the memory.
    pub fn move_memory(&mut self, to: u32) {
        config_write(self.device, BARS[1], to);
        self.memory = u64::from(config_read(self.device, BARS[1]) & !0xf);
    }

    /// Where the window of the memory is.
    pub fn memory_address(&self) -> u64 {
        self.memory
    }
}

/// Rings the doorbell with a number; the kernel's answer.
pub fn ring(number: u64) -> u64 {
    cpu::hypercall_with(HYPERCALL_DOORBELL, number, [0; 5]).0
}

/// Words of memory that is no program's.
pub fn words(address: u64, length: u64) -> &'static [AtomicU64] {
    // SAFETY: windows of functions and free RAM, in what start-up maps, aligned; accessed by atomic operations only.
    unsafe { core::slice::from_raw_parts(address as *const AtomicU64, (length / 8) as usize) }
}
