//! Management gate: what an operator's program asks of root while the system runs.
//!
//! Texts and the structs below travel in the message page, the structs in postcard's format. Word 0 of a message
//! with texts is the length of the first one; of [`CREATE`], word 1 is that of the second one, which follows.
//!
//! | label | words | reply |
//! |---|---|---|
//! | [`LIST`] | 0: least number | 0: length of an [`Entry`] in the page; 0 after the last one |
//! | [`FIGURES`] | 0: number | 0: length of [`Figures`] in the page |
//! | [`MEMORY`] | – | 0: free bytes, 1: free pieces, 2: kernel pages used, 3: kernel pages in all |
//! | [`START`] … [`DESTROY`] | name | – |
//! | [`CREATE`] | name, name of the template | 0: number |
//!
//! What cannot be done is refused: the label of the reply is [`crate::REFUSED`], and word 0 says why ([`Refusal`]).
//!
//! Programs, servers and virtual machines are numbered. A number never changes while the thing is listed; that of a
//! destroyed virtual machine is given again.

use serde::{Deserialize, Serialize};

use crate::control::REASONS;

/// Asks for the listed thing with the least number that is not below the given one.
pub const LIST: u64 = 1;
/// Asks for the figures of a listed thing. A virtual machine's come from its last report, and another one is
/// ordered: whoever wants fresh ones asks twice.
pub const FIGURES: u64 = 2;
/// Asks for the memory that is left.
pub const MEMORY: u64 = 3;
/// Starts a virtual machine that does not run.
pub const START: u64 = 4;
/// Presses a virtual machine's power button. When it ends it is not started again.
pub const STOP: u64 = 5;
/// Ends a virtual machine at once. It is not started again.
pub const KILL: u64 = 6;
/// Stops the virtual CPUs and the time of a virtual machine.
pub const PAUSE: u64 = 7;
/// Lets a paused virtual machine go on.
pub const RESUME: u64 = 8;
/// Ends a virtual machine or a server at once and starts it anew; a server's clients go on.
pub const RESTART: u64 = 9;
/// Ends a virtual machine at once, and forgets it.
pub const DESTROY: u64 = 10;
/// Makes a virtual machine after a template; it is not started.
pub const CREATE: u64 = 11;

/// Most bytes of an encoded struct.
pub const MAX_ENCODED: usize = 448;

/// What a listed thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A device server.
    Server,
    /// A native program.
    Task,
    /// A virtual machine.
    Vm,
    /// What virtual machines can be made after.
    Template,
}

/// What a listed thing does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// It has not been started.
    New,
    /// It runs.
    Running,
    /// Its virtual CPUs and its time are stopped.
    Paused,
    /// It is about to be started again.
    Waiting,
    /// It has ended with this exit code.
    Ended(u64),
}

/// A listed thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry<'a> {
    /// Its number.
    pub number: u32,
    /// Its name.
    pub name: &'a str,
    /// What it is.
    pub kind: Kind,
    /// What it does.
    pub state: State,
    /// Guest memory in bytes; 0 unless it is a virtual machine.
    pub memory: u64,
    /// Number of virtual CPUs.
    pub vcpus: u32,
    /// 0 to [`crate::system::MAX_PRIORITY`], highest first.
    pub priority: u8,
    /// How often it was started again by itself.
    pub restarts: u32,
}

impl<'a> Entry<'a> {
    /// Reads an entry; `None` if it is damaged.
    pub fn decode(bytes: &'a [u8]) -> Option<Self> {
        postcard::from_bytes(bytes).ok()
    }
}

/// What a VMM writes to its report page when it is asked, [`Report::LENGTH`] bytes. Times are in ticks of the TSC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Report {
    /// TSC when it was written; 0: never.
    pub written: u64,
    /// Time that the virtual CPUs were idle, in all.
    pub halted: u64,
    /// Time that the virtual machine was paused.
    pub paused: u64,
    /// CPU time of the virtual CPUs' threads.
    pub used: u64,
    /// World switches into the guest.
    pub entries: u64,
    /// Exits that the kernel settled itself.
    pub settled: u64,
    /// Exits by reason, numbered as the VMM library does.
    pub exits: [u64; REASONS],
}

impl Report {
    /// Bytes of the page that are used: a sequence number, which is odd while the rest is written, and the words.
    pub const LENGTH: usize = 8 * (1 + Self::WORDS);
    const WORDS: usize = 6 + REASONS;

    /// The words after the sequence number.
    pub fn pack(&self) -> [u64; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        let Self { written, halted, paused, used, entries, settled, exits } = *self;
        words[..6].copy_from_slice(&[written, halted, paused, used, entries, settled]);
        words[6..].copy_from_slice(&exits);
        words
    }

    /// Reads the words after the sequence number.
    pub fn unpack(words: &[u64; Self::WORDS]) -> Self {
        let [written, halted, paused, used, entries, settled, ..] = *words;
        let exits = core::array::from_fn(|index| words[6 + index]);
        Self { written, halted, paused, used, entries, settled, exits }
    }
}

/// Figures of a listed thing. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Figures {
    /// From its start to the moment that the others are of; 0: it has told nothing yet.
    pub lived: u64,
    /// CPU time.
    pub run: u64,
    /// Time that it wanted a CPU and had none.
    pub steal: u64,
    /// Time that its virtual CPUs were idle.
    pub halt: u64,
    /// Time that it was paused.
    pub paused: u64,
    /// Bytes of memory beyond guest memory and kernel memory.
    pub bytes: u64,
    /// Bytes of kernel memory set aside for it.
    pub kernel_bytes: u64,
    /// World switches into the guest.
    pub entries: u64,
    /// Exits that the kernel settled itself.
    pub settled: u64,
    /// Exits by reason, numbered as the VMM library does.
    pub exits: [u64; REASONS],
}

impl Figures {
    /// Reads figures; `None` if they are damaged.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        postcard::from_bytes(bytes).ok()
    }
}

/// Why something is not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Refusal {
    /// The message makes no sense.
    Malformed = 1,
    /// Nothing has that name.
    Unknown = 2,
    /// It is no virtual machine.
    NoVm = 3,
    /// It is no template.
    NoTemplate = 4,
    /// Something has that name already.
    Taken = 5,
    /// That is no name.
    BadName = 6,
    /// There are as many virtual machines as there can be.
    Full = 7,
    /// It runs already.
    Runs = 8,
    /// It does not run.
    RunsNot = 9,
    /// It is not paused.
    PausedNot = 10,
    /// It cannot be started; the log says why.
    Failed = 11,
    /// The system is ending.
    Ending = 12,
}

impl Refusal {
    /// The refusal with this number; an unknown one reads as [`Refusal::Malformed`].
    pub const fn from_code(code: u64) -> Self {
        match code {
            2 => Self::Unknown,
            3 => Self::NoVm,
            4 => Self::NoTemplate,
            5 => Self::Taken,
            6 => Self::BadName,
            7 => Self::Full,
            8 => Self::Runs,
            9 => Self::RunsNot,
            10 => Self::PausedNot,
            11 => Self::Failed,
            12 => Self::Ending,
            _ => Self::Malformed,
        }
    }

    /// What to tell a user.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Malformed => "root does not understand this",
            Self::Unknown => "nothing has that name",
            Self::NoVm => "that is no virtual machine",
            Self::NoTemplate => "that is no template",
            Self::Taken => "the name is taken",
            Self::BadName => "a name has 1 to 31 characters of a-z, 0-9 and -",
            Self::Full => "there are as many virtual machines as there can be",
            Self::Runs => "it runs already",
            Self::RunsNot => "it does not run",
            Self::PausedNot => "it is not paused",
            Self::Failed => "it cannot be started; the log says why",
            Self::Ending => "the system is ending",
        }
    }
}

/// Whether virtual machines can be called this.
pub fn is_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=crate::system::MAX_NAME).contains(&text.len()) && text.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_structs_fit_a_message() {
        let figures = Figures {
            lived: u64::MAX,
            run: u64::MAX,
            steal: u64::MAX,
            halt: u64::MAX,
            paused: u64::MAX,
            bytes: u64::MAX,
            kernel_bytes: u64::MAX,
            entries: u64::MAX,
            settled: u64::MAX,
            exits: [u64::MAX; REASONS],
        };
        let mut buffer = [0; MAX_ENCODED];
        let bytes = postcard::to_slice(&figures, &mut buffer).unwrap();
        assert_eq!(Figures::decode(bytes), Some(figures));
        const { assert!(MAX_ENCODED <= crate::console::MAX_BYTES) };
    }

    #[test]
    fn reports_round_trip() {
        let mut report = Report { written: 1, halted: 2, settled: 3, ..Report::default() };
        report.exits[REASONS - 1] = 9;
        assert_eq!(Report::unpack(&report.pack()), report);
        assert_eq!(Report::LENGTH, 8 + 8 * report.pack().len());
    }

    #[test]
    fn refusals_have_their_numbers() {
        for code in 1..=12 {
            assert_eq!(Refusal::from_code(code) as u64, code);
        }
        assert_eq!(Refusal::from_code(99), Refusal::Malformed);
    }

    #[test]
    fn names() {
        assert!(is_name("linux-2"));
        for wrong in ["", "Linux", "a b", "x".repeat(32).as_str(), "ä"] {
            assert!(!is_name(wrong), "{wrong}");
        }
    }
}
