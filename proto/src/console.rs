//! Console session: a byte stream in each direction between a client and a console server.
//!
//! The client calls its session gate; the server never calls a client, and never makes one wait. Both
//! directions have flow control: a write that does not fit is cut, and the server signals the
//! client's notification when there is room again or input has come. A client that is told of input reads until it
//! gets less than it wants: only input after that is told again.
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

/// Event bit of the *server's* notification: signal [`DRAINED`] to root as soon as everything
/// written has left the machine.
pub const DRAIN: u64 = 1 << 1;
/// Event bit of root's notification that a server signals in answer to [`DRAIN`].
pub const DRAINED: u64 = 1 << 0;
