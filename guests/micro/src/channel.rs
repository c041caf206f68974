//! Channels to other machines (`docs/spec/channel.md`): finding the functions, their registers and
//! memory, doorbells.

use crate::check;
use crate::cpu::{self, sleep_until};
use crate::pci::{BarWindow, Function, base_address};
use crate::random::mix;
use abi::vcpu::HYPERCALL_DOORBELL;
use core::sync::atomic::AtomicU64;
use hw_tables::pci::msi_x;
use proto::channel::register::*;
use proto::channel::{
    FREE_AREA, MAX_PAYLOAD, Message, Receiver, SHARE_BYTES, SHARES, SendError, Sender,
};

/// Vendor and device.
const ID: (u16, u16) = (0x5052, 0x0001);
/// Base address registers.
const REGISTERS: u8 = 0;
const MEMORY: u8 = 2;
const PEERS_SHARES: u8 = 4;
/// Address of a message to the local APIC with id 0.
const TO_APIC_0: u32 = 0xfee0_0000;

/// An end of a channel.
#[derive(Clone, Copy)]
pub struct ChannelEnd {
    function: Function,
    /// Number among this machine's channels, once the function is on.
    number: u64,
    registers: BarWindow,
    memory: u64,
    shares: u64,
}

/// The channels of this machine, in their order.
pub fn all() -> impl Iterator<Item = ChannelEnd> {
    Function::all().filter(|function| function.id() == ID).filter_map(|function| {
        let start = |bar, length| Some(function.window(bar, 0, length)?.start());
        Some(ChannelEnd {
            function,
            number: 0,
            registers: function.window(REGISTERS, 0, WINDOW.into())?,
            memory: start(MEMORY, 0)?,
            shares: start(PEERS_SHARES, SHARES as u64 * SHARE_BYTES)?,
        })
    })
}

/// The first channel, turned on as [`ChannelEnd::enable`] does; there has to be one.
pub fn first(vector: u8) -> Option<ChannelEnd> {
    let mut found = all().next();
    check!(found.is_some(), "there is no channel");
    if let Some(channel) = &mut found {
        channel.enable(vector);
    }
    found
}

impl ChannelEnd {
    /// Turns the function on: doorbells come as interrupt `vector`, events as the next one, both on
    /// the first processor.
    pub fn enable(&mut self, vector: u8) {
        self.function.enable();
        self.function.send_messages();
        for number in 0..2 {
            let entry = TABLE + msi_x::ENTRY * u64::from(number);
            for (word, value) in [TO_APIC_0, 0, u32::from(vector + number), 0].iter().enumerate() {
                self.write(entry + 4 * word as u64, *value);
            }
        }
        self.number = self.read(NUMBER).into();
    }

    /// Reads a register.
    pub fn read(&self, register: u64) -> u32 {
        self.registers.read(register)
    }

    /// Writes a register. No command makes the function write to memory that this program has not
    /// offered.
    pub fn write(&self, register: u64, value: u32) {
        self.registers.write(register, value);
    }

    /// Its function.
    pub fn function(&self) -> Function {
        self.function
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

    /// Window of a share of the peer, mapped or not.
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
        self.function.write(base_address(MEMORY), to);
        if let Some(window) = self.function.window(MEMORY, 0, self.read(SIZE).into()) {
            self.memory = window.start();
        }
    }

    /// Address of the memory window.
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
    // SAFETY: windows of functions and free RAM, in what start-up maps, aligned; accessed by atomic
    // operations only.
    unsafe { core::slice::from_raw_parts(address as *const AtomicU64, (length / 8) as usize) }
}

/// A channel with its two rings, to a peer that keeps the rules.
pub struct Ends {
    /// The channel.
    pub channel: ChannelEnd,
    /// The ring to the peer.
    pub sender: Sender<'static>,
    /// The ring from the peer.
    pub receiver: Receiver<'static>,
}

impl Ends {
    /// Continues where an earlier program in this VM stopped.
    pub fn new(channel: ChannelEnd) -> Option<Self> {
        let (sender, receiver) = channel.rings()?;
        Some(Self { channel, sender, receiver })
    }

    /// Sends; waits for room if there is none.
    pub fn send(&mut self, message: &Message) {
        let Self { channel, sender, .. } = self;
        sleep_until(|| {
            let mut sent = sender.send(message);
            if sent == Err(SendError::Full) {
                sender.want_room(true);
                sent = sender.send(message);
            }
            match sent {
                Ok(rings) => {
                    if rings {
                        channel.ring();
                    }
                    Some(())
                }
                Err(SendError::Full) => None,
                Err(error) => {
                    check!(false, "sending: {error:?}");
                    Some(())
                }
            }
        });
        sender.want_room(false);
    }

    /// Waits for a message.
    pub fn receive(&mut self) -> Message {
        let Self { channel, receiver, .. } = self;
        let message = sleep_until(|| {
            let mut received = receiver.receive();
            if received == Ok(None) {
                receiver.want_messages(true);
                received = receiver.receive();
            }
            match received {
                Ok(Some((message, rings))) => {
                    if rings {
                        channel.ring();
                    }
                    Some(message)
                }
                Ok(None) => None,
                Err(_) => {
                    check!(false, "the ring is broken");
                    None
                }
            }
        });
        receiver.want_messages(false);
        message
    }

    /// Sends the message with this number.
    pub fn tell(&mut self, step: u64) {
        self.send(&message(step));
    }

    /// Waits for that message, and no other.
    pub fn expect(&mut self, step: u64) {
        let received = self.receive();
        check!(
            is_intact(&received, step),
            "message {step} came as {:#x}, {} bytes",
            received.tag,
            received.length
        );
    }
}

/// Message number `number`: length and content follow from it.
pub fn message(number: u64) -> Message {
    let length = (mix(number) % (MAX_PAYLOAD as u64 + 1)) as u32;
    let payload = core::array::from_fn(|word| mix(number << 8 | word as u64));
    Message { tag: number as u32, length, payload }
}

/// Returns true if the payload of a message is that of message `number`.
pub fn is_intact(received: &Message, number: u64) -> bool {
    let expected = message(number);
    let bytes = |message: &Message| message.payload.map(u64::to_le_bytes);
    let length = expected.length as usize;
    (received.tag, received.length) == (expected.tag, expected.length)
        && bytes(received).as_flattened()[..length] == bytes(&expected).as_flattened()[..length]
}
