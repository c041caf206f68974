//! The management gate.

use native_rt::{Gate, Message, Page};
use proto::DONE;
use proto::manage::{CREATE, Entry, FIGURES, Figures, LIST, MAX_ENCODED, MEMORY, Refusal};
use proto::start::slot;
use proto::system::MAX_NAME;

/// Most things that are listed.
const MAX_LISTED: u64 = 64;

/// Root, as this program sees it.
#[derive(Clone, Copy)]
pub struct Root(Gate);

impl Root {
    /// The gate that root has given.
    pub fn new() -> Self {
        Self(Gate::at(slot::MANAGE))
    }

    fn call(self, message: Message) -> Result<Message, Refusal> {
        match self.0.call(message) {
            Ok(answer) if answer.tag.label == DONE => Ok(answer),
            Ok(answer) => Err(Refusal::from_code(answer.words[0])),
            // Without the gate, nothing is possible.
            Err(_) => Err(Refusal::Malformed),
        }
    }

    /// Asks for something about one name, or two for [`CREATE`].
    pub fn ask(self, label: u64, name: &str, second: &str) -> Result<(), Refusal> {
        let mut text = heapless::Vec::<u8, { 2 * MAX_NAME }>::new();
        let fits = text.extend_from_slice(name.as_bytes()).is_ok()
            && text.extend_from_slice(second.as_bytes()).is_ok();
        if !fits || second.is_empty() == (label == CREATE) {
            return Err(Refusal::BadName);
        }
        let words = Page::current().set_bytes(&text);
        let lengths = [name.len() as u64, second.len() as u64, 0, 0];
        self.call(Message::new(label, lengths).with_page(words)).map(drop)
    }

    /// Calls `each` with everything that is listed.
    pub fn list(self, mut each: impl FnMut(&Entry)) -> Result<(), Refusal> {
        let mut from = 0;
        for _ in 0..MAX_LISTED {
            let answer = self.call(Message::new(LIST, [from, 0, 0, 0]))?;
            let mut buffer = [0; MAX_ENCODED];
            let bytes = Page::current().bytes(answer.tag.words, answer.words[0], &mut buffer);
            if bytes.is_empty() {
                break;
            }
            let Ok(entry) = postcard::from_bytes::<Entry>(bytes) else {
                return Err(Refusal::Malformed);
            };
            from = u64::from(entry.number) + 1;
            each(&entry);
        }
        Ok(())
    }

    /// The figures of a listed thing.
    pub fn figures(self, number: u32) -> Result<Figures, Refusal> {
        let answer = self.call(Message::new(FIGURES, [number.into(), 0, 0, 0]))?;
        let mut buffer = [0; MAX_ENCODED];
        let bytes = Page::current().bytes(answer.tag.words, answer.words[0], &mut buffer);
        postcard::from_bytes(bytes).map_err(|_| Refusal::Malformed)
    }

    /// Free bytes, free pieces, kernel pages in use, and in all.
    pub fn memory(self) -> Result<[u64; 4], Refusal> {
        self.call(Message::new(MEMORY, [0; 4])).map(|answer| answer.words)
    }
}
