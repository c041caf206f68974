//! Answers every message that comes through its channels, until the power button is pressed. At the
//! other end is, for example, a Linux guest with `/dev/parador-com0`.
#![no_std]
#![no_main]

use guests_micro::channel::{self, ChannelEnd};
use guests_micro::trap::{FIRST_INTERRUPT, TrapFrame};
use guests_micro::{apic, boot, check, cpu, guest, port, println};
use proto::channel::register::{NAME_LEN, PEER_NAME};
use proto::channel::{MAX_PAYLOAD, MAX_VM_CHANNELS, Message, Receiver, Sender};

guest!(main, trap);

const POWER_VECTOR: u8 = 0x40;
/// Doorbell vector of all channels: any doorbell makes the program check all of them.
const CHANNEL_VECTORS: u8 = 0x50;
/// Prefix of an answer.
const HEARD: &[u8] = b"heard: ";

fn trap(frame: &mut TrapFrame) {
    match frame.vector() {
        POWER_VECTOR => guests_micro::exit(0),
        vector if u64::from(vector) < FIRST_INTERRUPT => guests_micro::trap::unexpected(frame),
        _ => apic::end_of_interrupt(),
    }
}

/// An end of a channel.
struct End {
    channel: ChannelEnd,
    peer: [u8; NAME_LEN],
    sender: Sender<'static>,
    receiver: Receiver<'static>,
}

impl End {
    fn new(mut channel: ChannelEnd) -> Option<Self> {
        channel.enable(CHANNEL_VECTORS);
        let (sender, receiver) = channel.rings()?;
        receiver.want_messages(true);
        Some(Self { channel, peer: channel.name(PEER_NAME), sender, receiver })
    }

    /// Answers a message; whether there was something.
    fn answer(&mut self) -> bool {
        let peer = text(&self.peer);
        match self.receiver.receive() {
            Ok(None) => false,
            Ok(Some((message, rings))) => {
                let mut bytes = printable(&message);
                println!("{peer}: {}", text(&bytes));
                bytes.rotate_right(HEARD.len());
                bytes[..HEARD.len()].copy_from_slice(HEARD);
                let length = text(&bytes).len().min(MAX_PAYLOAD - 1);
                bytes[length] = b'\n';
                let mut payload = [0; MAX_PAYLOAD / 8];
                for (word, bytes) in payload.iter_mut().zip(bytes.as_chunks().0) {
                    *word = u64::from_le_bytes(*bytes);
                }
                let answer = Message { tag: message.tag, length: length as u32 + 1, payload };
                let sent = self.sender.send(&answer);
                if sent.is_err() {
                    println!("{peer} does not take answers: {sent:?}");
                }
                if rings || sent == Ok(true) {
                    self.channel.ring();
                }
                true
            }
            Err(_) => {
                println!("{peer} has broken a ring");
                if let Some((sender, receiver)) = self.channel.rings() {
                    (self.sender, self.receiver) = (sender, receiver);
                }
                true
            }
        }
    }
}

/// A message's payload up to its line's end, zeros after it, and dots for what cannot be printed.
fn printable(message: &Message) -> [u8; MAX_PAYLOAD] {
    let mut bytes = [0; MAX_PAYLOAD];
    let payload = message.payload.map(u64::to_le_bytes);
    let line = payload.as_flattened().iter().take(message.length as usize);
    for (to, &from) in bytes.iter_mut().zip(line.take_while(|&&byte| byte != b'\n')) {
        *to = if (b' '..=b'~').contains(&from) { from } else { b'.' };
    }
    bytes
}

/// Text up to the first zero.
fn text(bytes: &[u8]) -> &str {
    let length = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    core::str::from_utf8(&bytes[..length]).unwrap_or("?")
}

fn main() {
    apic::enable();
    let button = boot::power_button();
    let Ok(Some((status, interrupt))) = button else {
        check!(false, "the ACPI tables do not show a power button: {button:?}");
        return;
    };
    apic::route_level(interrupt, POWER_VECTOR);
    port::write16(status + boot::PM1_ENABLE, boot::POWER_BUTTON);
    let mut ends = [const { None::<End> }; MAX_VM_CHANNELS];
    for (end, channel) in ends.iter_mut().zip(channel::all()) {
        *end = End::new(channel);
        if let Some(end) = end {
            println!("each message of {} gets an answer", text(&end.peer));
        }
    }
    loop {
        cpu::disable_interrupts();
        let mut busy = false;
        for end in ends.iter_mut().flatten() {
            busy |= end.answer();
        }
        if busy { cpu::enable_interrupts() } else { cpu::enable_and_halt() }
    }
}
