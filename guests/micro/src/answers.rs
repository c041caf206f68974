//! Answers to the messages of a channel, for guests of both architectures: at the other end is, for
//! example, a Linux guest with `/dev/parador-com0`.

use core::fmt::Write;
use proto::channel::register::NAME_LEN;
use proto::channel::{MAX_PAYLOAD, Message, Receiver, Sender};

/// Prefix of an answer.
const HEARD: &[u8] = b"heard: ";

/// The rings of a channel, from and to this side.
pub type Rings = (Sender<'static>, Receiver<'static>);

/// The other end of a channel, whose messages are answered.
pub struct Peer {
    name: [u8; NAME_LEN],
    sender: Sender<'static>,
    receiver: Receiver<'static>,
}

impl Peer {
    /// Asks for messages. `name` is filled up with zeros.
    pub fn new(name: [u8; NAME_LEN], (sender, receiver): Rings) -> Self {
        receiver.want_messages(true);
        Self { name, sender, receiver }
    }

    /// The peer's name.
    pub fn name(&self) -> &str {
        text(&self.name)
    }

    /// Answers a message, and prints it; whether there was one. `ring` rings the peer's doorbell,
    /// `rings` attaches to the rings again.
    pub fn answer(
        &mut self,
        console: &mut impl Write,
        ring: impl FnOnce(),
        rings: impl FnOnce() -> Option<Rings>,
    ) -> bool {
        // Writing to a console cannot fail.
        match self.receiver.receive() {
            Ok(None) => return false,
            Ok(Some((message, wants_doorbell))) => {
                let mut bytes = printable(&message);
                let _ = write!(console, "{}: {}\r\n", self.name(), text(&bytes));
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
                    let name = self.name();
                    let _ = write!(console, "{name} does not take answers: {sent:?}\r\n");
                }
                if wants_doorbell || sent == Ok(true) {
                    ring();
                }
            }
            Err(_) => {
                let _ = write!(console, "{} has broken a ring\r\n", self.name());
                if let Some((sender, receiver)) = rings() {
                    (self.sender, self.receiver) = (sender, receiver);
                }
            }
        }
        true
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
