//! Console session: a byte stream in each direction between a client and a console server.
//!
//! The client calls its session gate; the server never calls a client, and never blocks one. Both
//! directions have flow control: a write is truncated to the free space, and the server signals the
//! client's notification when space is free again or input has arrived. After a signal for input,
//! the client must read until it gets less than it requested: only input after that is signalled
//! again.
//!
//! A failed call means that the server has ended. The client then waits for the event of its
//! session, which root signals once the gate belongs to a new server, or no server will follow, and
//! opens its session again. A refused call means that a new server is in place already. Data that
//! the old server had accepted and not printed, or not delivered, is lost.
//!
//! | label | words | reply |
//! |---|---|---|
//! | [`OPEN`] | 0: events to signal; one item: the notification, right `SIGNAL` | – |
//! | [`WRITE`] | 0: length; bytes in the page | 0: bytes taken |
//! | [`READ`] | 0: most bytes wanted | 0: length; bytes in the page |
//! | [`CLOSE`] | – | – |

/// Opens the session, or reopens it with another notification. Pending input of the previous
/// session is dropped.
pub const OPEN: u64 = 1;
/// Writes bytes.
pub const WRITE: u64 = 2;
/// Reads bytes.
pub const READ: u64 = 3;
/// Closes the session: the server drops the notification.
pub const CLOSE: u64 = 4;

/// Largest number of bytes in one message.
pub const MAX_BYTES: usize = 480;

/// Event bit of the *server's* notification: call root with [`DRAINED`](crate::control::DRAINED) as
/// soon as all output was transmitted.
pub const DRAIN: u64 = 1 << 1;
/// Event bit of a multiplexer's notification: root has changed the [`directory`], or written to the
/// log.
pub const CHANGED: u64 = 1 << 6;

/// Memory that root shares with a multiplexer, read-only: names of sessions, and the log.
///
/// A session is identified by the badge of its gate. An entry is a name padded with zeros; an empty
/// one has no client.
pub mod directory {
    use crate::system::MAX_NAME;

    /// Number of sessions.
    pub const SESSIONS: usize = 40;
    /// Session of the log; no client has its gate.
    pub const LOG_SESSION: usize = 0;
    /// Bytes of a directory entry.
    pub const ENTRY: usize = MAX_NAME + 1;
    /// Offset of the total number of bytes written to the log.
    pub const LOG_END: u64 = 2048;
    /// Offset of the log, a ring: byte number `n` is at `n % LOG_LENGTH`.
    pub const LOG: u64 = 4096;
    /// Bytes of the log.
    pub const LOG_LENGTH: u64 = 8192;
    /// Bytes of the whole region.
    pub const LENGTH: u64 = LOG + LOG_LENGTH;

    const _: () = assert!((SESSIONS * ENTRY) as u64 <= LOG_END);

    /// Encodes a name as an entry; longer names are truncated.
    pub fn entry(name: &str) -> [u8; ENTRY] {
        let mut entry = [0; ENTRY];
        let length = name.len().min(MAX_NAME);
        entry[..length].copy_from_slice(&name.as_bytes()[..length]);
        entry
    }

    /// Decodes an entry; `None` if it is empty or malformed.
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
