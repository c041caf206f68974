//! Management gate: requests of an operator's program to root while the system runs.
//!
//! Texts and the structs below travel in the message page, the structs in postcard's format. Word 0
//! of a message with texts is the length of the first text; word 1 of [`CREATE`] is the length of
//! the second text, which follows the first one.
//!
//! | label | words | reply |
//! |---|---|---|
//! | [`LIST`] | 0: smallest number | 0: length of an [`Entry`] in the page; 0 after the last one |
//! | [`FIGURES`] | 0: number | 0: length of [`Figures`] in the page |
//! | [`MEMORY`] | – | 0: free bytes, 1: free pieces, 2: kernel pages used, 3: all kernel pages |
//! | [`START`] … [`DESTROY`] | name | – |
//! | [`CREATE`] | name, name of the template | 0: number |
//!
//! The label of the reply to a refused request is [`crate::REFUSED`], and word 0 is the
//! [`Refusal`].
//!
//! Programs, servers and VMs are numbered. The number of an entry is constant while it is listed;
//! that of a destroyed VM is reused.

use serde::{Deserialize, Serialize};

use crate::control::REASONS;

/// Returns the entry with the smallest number that is not below the given one.
pub const LIST: u64 = 1;
/// Returns the figures of an entry. Those of a VM come from its last report, and the call requests
/// another report: call twice for current figures.
pub const FIGURES: u64 = 2;
/// Returns the free memory.
pub const MEMORY: u64 = 3;
/// Starts a VM that does not run.
pub const START: u64 = 4;
/// Presses a VM's power button. The VM is not restarted when it ends.
pub const STOP: u64 = 5;
/// Kills a VM. It is not restarted.
pub const KILL: u64 = 6;
/// Pauses the vCPUs and the virtual time of a VM.
pub const PAUSE: u64 = 7;
/// Resumes a paused VM.
pub const RESUME: u64 = 8;
/// Kills and restarts a VM or a server; the clients of a server reconnect.
pub const RESTART: u64 = 9;
/// Kills a VM and removes it.
pub const DESTROY: u64 = 10;
/// Creates a VM from a template, without starting it.
pub const CREATE: u64 = 11;

/// Largest length of an encoded struct in bytes.
pub const MAX_ENCODED: usize = 448;

/// Kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A device server.
    Server,
    /// A native program.
    Task,
    /// A VM.
    Vm,
    /// A template for VMs.
    Template,
}

/// State of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// Not started yet.
    New,
    /// Running.
    Running,
    /// Paused: the vCPUs and the virtual time are stopped.
    Paused,
    /// Waiting for its restart.
    Waiting,
    /// Ended with this exit code.
    Ended(u64),
}

/// A server, a native program, a VM or a template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry<'a> {
    /// Number.
    pub number: u32,
    /// Name.
    pub name: &'a str,
    /// Kind.
    pub kind: Kind,
    /// State.
    pub state: State,
    /// Guest memory in bytes; 0 unless it is a VM.
    pub memory: u64,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Priority, 0 to [`crate::system::MAX_PRIORITY`], highest first.
    pub priority: u8,
    /// Number of automatic restarts.
    pub restarts: u32,
}

impl<'a> Entry<'a> {
    /// Decodes an entry; `None` if it is malformed.
    pub fn decode(bytes: &'a [u8]) -> Option<Self> {
        postcard::from_bytes(bytes).ok()
    }
}

/// Contents of a VMM's report page, [`Report::LENGTH`] bytes, written on request. Times are in TSC
/// ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Report {
    /// TSC at the time of writing; 0: never written.
    pub written: u64,
    /// Total idle time of the vCPUs.
    pub halted: u64,
    /// Time that the VM was paused.
    pub paused: u64,
    /// CPU time of the vCPU threads.
    pub used: u64,
    /// Entries into the guest.
    pub entries: u64,
    /// Exits that the kernel handled without the VMM.
    pub handled_in_kernel: u64,
    /// Exits by reason, numbered as in the VMM library.
    pub exits: [u64; REASONS],
}

/// Offset of root's word in the page with the report of a VMM, after that: not 0 while the VM is to
/// be paused.
pub const PAUSE_WORD: u64 = Report::LENGTH as u64;

impl Report {
    /// Bytes of the page in use: a sequence number, odd during a write, and the words.
    pub const LENGTH: usize = 8 * (1 + Self::WORDS);
    const WORDS: usize = 6 + REASONS;

    /// Packs the words after the sequence number.
    pub fn pack(&self) -> [u64; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        let Self { written, halted, paused, used, entries, handled_in_kernel, exits } = *self;
        words[..6].copy_from_slice(&[written, halted, paused, used, entries, handled_in_kernel]);
        words[6..].copy_from_slice(&exits);
        words
    }

    /// Unpacks the words after the sequence number.
    pub fn unpack(words: &[u64; Self::WORDS]) -> Self {
        let [written, halted, paused, used, entries, handled_in_kernel, ..] = *words;
        let exits = core::array::from_fn(|index| words[6 + index]);
        Self { written, halted, paused, used, entries, handled_in_kernel, exits }
    }
}

/// Figures of an entry. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Figures {
    /// Time from its start to the moment of these figures; 0: no report yet.
    pub lived: u64,
    /// CPU time.
    pub run: u64,
    /// Time that it was ready without a CPU.
    pub steal: u64,
    /// Idle time of its vCPUs.
    pub halt: u64,
    /// Time that it was paused.
    pub paused: u64,
    /// Bytes of memory beyond guest memory and kernel memory.
    pub bytes: u64,
    /// Bytes of kernel memory reserved for it.
    pub kernel_bytes: u64,
    /// Entries into the guest.
    pub entries: u64,
    /// Exits that the kernel handled without the VMM.
    pub handled_in_kernel: u64,
    /// Exits by reason, numbered as in the VMM library.
    pub exits: [u64; REASONS],
}

impl Figures {
    /// Decodes figures; `None` if they are malformed.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        postcard::from_bytes(bytes).ok()
    }
}

/// Reason for refusing a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Refusal {
    /// The message is malformed.
    Malformed = 1,
    /// No entry has this name.
    Unknown = 2,
    /// The entry is not a VM.
    NoVm = 3,
    /// The entry is not a template.
    NoTemplate = 4,
    /// The name is in use.
    Taken = 5,
    /// The name is invalid.
    BadName = 6,
    /// The maximum number of VMs exists.
    Full = 7,
    /// It runs already.
    Runs = 8,
    /// It does not run.
    RunsNot = 9,
    /// It is not paused.
    PausedNot = 10,
    /// The start has failed; the log contains the cause.
    Failed = 11,
    /// The system is shutting down.
    Ending = 12,
}

impl Refusal {
    /// Decodes a refusal; unknown codes read as [`Refusal::Malformed`].
    pub const fn from_code(code: u64) -> Self {
        let refusal = from_code!(code: u64, Unknown, NoVm, NoTemplate, Taken, BadName, Full, Runs,
            RunsNot, PausedNot, Failed, Ending);
        match refusal {
            Some(refusal) => refusal,
            None => Self::Malformed,
        }
    }

    /// Returns the message for the user.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Malformed => "malformed request",
            Self::Unknown => "no entry has this name",
            Self::NoVm => "not a VM",
            Self::NoTemplate => "not a template",
            Self::Taken => "the name is in use",
            Self::BadName => "a name must have 1 to 31 characters of a-z, 0-9 and -",
            Self::Full => "the maximum number of VMs exists",
            Self::Runs => "already running",
            Self::RunsNot => "not running",
            Self::PausedNot => "not paused",
            Self::Failed => "cannot start; see the log for the cause",
            Self::Ending => "the system is shutting down",
        }
    }
}

/// Returns whether a VM can have this name.
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
            handled_in_kernel: u64::MAX,
            exits: [u64::MAX; REASONS],
        };
        let mut buffer = [0; MAX_ENCODED];
        let bytes = postcard::to_slice(&figures, &mut buffer).unwrap();
        assert_eq!(Figures::decode(bytes), Some(figures));
        const { assert!(MAX_ENCODED <= crate::console::MAX_BYTES) };
    }

    #[test]
    fn reports_round_trip() {
        let mut report =
            Report { written: 1, halted: 2, handled_in_kernel: 3, ..Report::default() };
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
