//! Client of root's management gate (`proto::manage`), for programs that have one.

use proto::DONE;
use proto::manage::{Entry, FIGURES, Figures, LIST, MAX_ENCODED, MEMORY, Refusal};
use proto::start::slot;
use proto::system::MAX_NAME;

use crate::objects::{Gate, Message};
use crate::page::Page;

/// Maximum number of entries in a list.
const MAX_LISTED: u64 = 64;

/// Management gate of root.
#[derive(Clone, Copy)]
pub struct ManagementGate(Gate);

impl Default for ManagementGate {
    fn default() -> Self {
        Self::new()
    }
}

impl ManagementGate {
    /// Returns the gate that root delegated at start.
    pub fn new() -> Self {
        Self(Gate::at(slot::MANAGE))
    }

    fn call(self, message: Message) -> Result<Message, Refusal> {
        match self.0.call(message) {
            Ok(answer) if answer.tag.label == DONE => Ok(answer),
            Ok(answer) => Err(Refusal::from_code(answer.words[0])),
            // The call fails only without the gate.
            Err(_) => Err(Refusal::Malformed),
        }
    }

    /// Requests an operation on one or two names.
    pub fn request(self, label: u64, name: &str, second: &str) -> Result<(), Refusal> {
        if name.len() > MAX_NAME || second.len() > MAX_NAME {
            return Err(Refusal::BadName);
        }
        let mut text = [0; 2 * MAX_NAME];
        text[..name.len()].copy_from_slice(name.as_bytes());
        text[name.len()..][..second.len()].copy_from_slice(second.as_bytes());
        let words = Page::current().set_bytes(&text[..name.len() + second.len()]);
        let lengths = [name.len() as u64, second.len() as u64, 0, 0];
        self.call(Message::new(label, lengths).with_page(words)).map(drop)
    }

    /// Calls `each` with every listed entry.
    pub fn list(self, mut each: impl FnMut(&Entry)) -> Result<(), Refusal> {
        let mut from = 0;
        for _ in 0..MAX_LISTED {
            let answer = self.call(Message::new(LIST, [from, 0, 0, 0]))?;
            let mut buffer = [0; MAX_ENCODED];
            let bytes = Page::current().bytes(answer.tag.words, answer.words[0], &mut buffer);
            if bytes.is_empty() {
                break;
            }
            let entry = Entry::decode(bytes).ok_or(Refusal::Malformed)?;
            from = u64::from(entry.number) + 1;
            each(&entry);
        }
        Ok(())
    }

    /// Returns the figures of entry `number`.
    pub fn figures(self, number: u32) -> Result<Figures, Refusal> {
        let answer = self.call(Message::new(FIGURES, [number.into(), 0, 0, 0]))?;
        let mut buffer = [0; MAX_ENCODED];
        let bytes = Page::current().bytes(answer.tag.words, answer.words[0], &mut buffer);
        Figures::decode(bytes).ok_or(Refusal::Malformed)
    }

    /// Returns free bytes, free ranges, kernel pages in use, and kernel pages in total.
    pub fn memory(self) -> Result<[u64; 4], Refusal> {
        self.call(Message::new(MEMORY, [0; 4])).map(|answer| answer.words)
    }
}
