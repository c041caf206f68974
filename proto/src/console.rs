//! Console session: a byte stream in each direction between a client and a console server.
//!
//! The client calls its session gate; the server never calls a client, and never makes one wait. Both
//! directions have flow control: a write that does not fit is cut, and the server signals the
//! client's notification when there is room again or input has come. A client that is told of input reads until it
//! gets less than it wants: only input after that is told again.
//!
//! A call that fails means that the server has ended. The client then waits for the event of its session, which root
//! signals when it has put the gate to another server in the place of the old one, or when none will come; and opens its
//! session anew. A call that is refused means that there is another server already. What the old server had taken and not
//! shown, or not yet given, is lost.
//!
//! | label | words | reply |
//! |---|---|---|
//! | [`OPEN`] | 0: events to signal; one item: the notification, right `SIGNAL` | – |
//! | [`WRITE`] | 0: length; bytes in the page | 0: bytes taken |
//! | [`READ`] | 0: most bytes wanted | 0: length; bytes in the page |
//! | [`CLOSE`] | – | – |

/// Starts the session, or starts it anew with another notification. Waiting input of an older
/// session is dropped.
pub const OPEN: u64 = 1;
/// Writes bytes.
pub const WRITE: u64 = 2;
/// Reads bytes.
pub const READ: u64 = 3;
/// Ends the session: the server gives up the notification.
pub const CLOSE: u64 = 4;

/// Most bytes in one message.
pub const MAX_BYTES: usize = 480;

/// Event bit of the *server's* notification: call root with [`DRAINED`](crate::control::DRAINED) as soon as everything
/// written has left the machine.
pub const DRAIN: u64 = 1 << 1;
/// Event bit of a multiplexer's notification: root has changed the [`directory`] or written to the log.
pub const CHANGED: u64 = 1 << 6;

/// What root shares with a multiplexer, which may only read it: the names of sessions, and the log.
///
/// A session is the badge of its gate. An entry of a name is filled with zeros after the name; an empty one
/// means that the client is gone.
pub mod directory {
    use crate::system::MAX_NAME;

    /// Number of sessions.
    pub const SESSIONS: usize = 40;
    /// The session that stands for the log; nobody has its gate.
    pub const LOG_SESSION: usize = 0;
    /// Bytes of an entry.
    pub const ENTRY: usize = MAX_NAME + 1;
    /// Offset of the number of bytes ever written to the log.
    pub const LOG_END: u64 = 2048;
    /// Offset of the log, a ring: byte number `n` is at `n % LOG_LENGTH`.
    pub const LOG: u64 = 4096;
    /// Bytes of the log.
    pub const LOG_LENGTH: u64 = 8192;
    /// Bytes of the whole region.
    pub const LENGTH: u64 = LOG + LOG_LENGTH;

    const _: () = assert!((SESSIONS * ENTRY) as u64 <= LOG_END);

    /// The entry for a name; longer ones are cut.
    pub fn entry(name: &str) -> [u8; ENTRY] {
        let mut entry = [0; ENTRY];
        let length = name.len().min(MAX_NAME);
        entry[..length].copy_from_slice(&name.as_bytes()[..length]);
        entry
    }

    /// The name in an entry; `None` if there is none, or something else.
    pub fn name(entry: &[u8; ENTRY]) -> Option<&str> {
        let length = entry.iter().position(|&byte| byte == 0)?;
        let printable = entry[..length].iter().all(|byte| byte.is_ascii_graphic());
        core::str::from_utf8(&entry[..length]).ok().filter(|name| printable && !name.is_empty())
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn names_round_trip() {
            for text in ["a", "linux-1", "a-name-of-31-characters-just-fit"] {
                assert_eq!(name(&entry(text)), Some(&text[..text.len().min(MAX_NAME)]));
            }
            assert_eq!(name(&entry("")), None);
            assert_eq!(name(&entry("a\x1b[2J")), None);
            assert_eq!(name(&[b'x'; ENTRY]), None);
        }
    }
}
