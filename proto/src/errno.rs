//! Names of Linux's error numbers (errno(3)), for messages.
//!
//! The wedge has no C library. The names are those of `errno.h`, the texts those of the C library,
//! so that a message reads the same from each process of a VM.

use core::fmt::{self, Display, Formatter};

/// Number, name and text of the errors that system calls of Parador's processes return.
const ERRORS: &[(i32, &str, &str)] = &[
    (1, "EPERM", "Operation not permitted"),
    (2, "ENOENT", "No such file or directory"),
    (3, "ESRCH", "No such process"),
    (4, "EINTR", "Interrupted system call"),
    (5, "EIO", "Input/output error"),
    (6, "ENXIO", "No such device or address"),
    (7, "E2BIG", "Argument list too long"),
    (8, "ENOEXEC", "Exec format error"),
    (9, "EBADF", "Bad file descriptor"),
    (10, "ECHILD", "No child processes"),
    (11, "EAGAIN", "Resource temporarily unavailable"),
    (12, "ENOMEM", "Cannot allocate memory"),
    (13, "EACCES", "Permission denied"),
    (14, "EFAULT", "Bad address"),
    (15, "ENOTBLK", "Block device required"),
    (16, "EBUSY", "Device or resource busy"),
    (17, "EEXIST", "File exists"),
    (18, "EXDEV", "Invalid cross-device link"),
    (19, "ENODEV", "No such device"),
    (20, "ENOTDIR", "Not a directory"),
    (21, "EISDIR", "Is a directory"),
    (22, "EINVAL", "Invalid argument"),
    (23, "ENFILE", "Too many open files in system"),
    (24, "EMFILE", "Too many open files"),
    (25, "ENOTTY", "Inappropriate ioctl for device"),
    (26, "ETXTBSY", "Text file busy"),
    (27, "EFBIG", "File too large"),
    (28, "ENOSPC", "No space left on device"),
    (29, "ESPIPE", "Illegal seek"),
    (30, "EROFS", "Read-only file system"),
    (31, "EMLINK", "Too many links"),
    (32, "EPIPE", "Broken pipe"),
    (33, "EDOM", "Numerical argument out of domain"),
    (34, "ERANGE", "Numerical result out of range"),
    (35, "EDEADLK", "Resource deadlock avoided"),
    (36, "ENAMETOOLONG", "File name too long"),
    (37, "ENOLCK", "No locks available"),
    (38, "ENOSYS", "Function not implemented"),
    (39, "ENOTEMPTY", "Directory not empty"),
    (40, "ELOOP", "Too many levels of symbolic links"),
    (61, "ENODATA", "No data available"),
    (62, "ETIME", "Timer expired"),
    (71, "EPROTO", "Protocol error"),
    (74, "EBADMSG", "Bad message"),
    (75, "EOVERFLOW", "Value too large for defined data type"),
    (77, "EBADFD", "File descriptor in bad state"),
    (87, "EUSERS", "Too many users"),
    (88, "ENOTSOCK", "Socket operation on non-socket"),
    (89, "EDESTADDRREQ", "Destination address required"),
    (90, "EMSGSIZE", "Message too long"),
    (91, "EPROTOTYPE", "Protocol wrong type for socket"),
    (92, "ENOPROTOOPT", "Protocol not available"),
    (93, "EPROTONOSUPPORT", "Protocol not supported"),
    (95, "EOPNOTSUPP", "Operation not supported"),
    (97, "EAFNOSUPPORT", "Address family not supported by protocol"),
    (98, "EADDRINUSE", "Address already in use"),
    (99, "EADDRNOTAVAIL", "Cannot assign requested address"),
    (100, "ENETDOWN", "Network is down"),
    (101, "ENETUNREACH", "Network is unreachable"),
    (102, "ENETRESET", "Network dropped connection on reset"),
    (103, "ECONNABORTED", "Software caused connection abort"),
    (104, "ECONNRESET", "Connection reset by peer"),
    (105, "ENOBUFS", "No buffer space available"),
    (106, "EISCONN", "Transport endpoint is already connected"),
    (107, "ENOTCONN", "Transport endpoint is not connected"),
    (108, "ESHUTDOWN", "Cannot send after transport endpoint shutdown"),
    (110, "ETIMEDOUT", "Connection timed out"),
    (111, "ECONNREFUSED", "Connection refused"),
    (112, "EHOSTDOWN", "Host is down"),
    (113, "EHOSTUNREACH", "No route to host"),
    (114, "EALREADY", "Operation already in progress"),
    (115, "EINPROGRESS", "Operation now in progress"),
    (116, "ESTALE", "Stale file handle"),
    (122, "EDQUOT", "Disk quota exceeded"),
    (125, "ECANCELED", "Operation canceled"),
    (130, "EOWNERDEAD", "Owner died"),
    (131, "ENOTRECOVERABLE", "State not recoverable"),
];

/// An error number, displayed as `No space left on device (ENOSPC)`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Errno(pub i32);

impl Errno {
    /// Returns the name in `errno.h` and the text of the C library.
    pub fn name(self) -> Option<(&'static str, &'static str)> {
        let found = ERRORS.iter().find(|(number, ..)| *number == self.0);
        found.map(|&(_, name, text)| (name, text))
    }
}

impl Display for Errno {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some((name, text)) => write!(f, "{text} ({name})"),
            None => write!(f, "unknown error {}", self.0),
        }
    }
}

/// Cause of an error: its name if it has an error number, else its own text. Rust's `io::Error`
/// displays `os error 28`.
#[derive(Clone, Copy)]
pub struct Cause<'e> {
    errno: Option<Errno>,
    text: &'e dyn Display,
}

impl<'e> Cause<'e> {
    /// Creates a cause from the error number, as returned by `io::Error::raw_os_error`, and the
    /// error.
    pub fn new(number: Option<i32>, text: &'e dyn Display) -> Self {
        Self { errno: number.map(Errno), text }
    }
}

impl Display for Cause<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.errno {
            Some(errno) => errno.fmt(f),
            None => self.text.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    /// The texts equal those of the host's C library, and each number is listed once.
    #[test]
    fn texts_are_those_of_the_c_library() {
        for (index, &(number, name, text)) in ERRORS.iter().enumerate() {
            let host = io::Error::from_raw_os_error(number).to_string();
            assert_eq!(host, format!("{text} (os error {number})"), "{name}");
            assert!(ERRORS[index + 1..].iter().all(|other| other.0 > number), "{name}");
        }
    }

    #[test]
    fn causes_have_names() {
        assert_eq!(Errno(28).to_string(), "No space left on device (ENOSPC)");
        let host = io::Error::from_raw_os_error(11);
        let cause = Cause::new(host.raw_os_error(), &host).to_string();
        assert_eq!(cause, "Resource temporarily unavailable (EAGAIN)");
        let own = io::Error::other("the image is broken");
        assert_eq!(Cause::new(own.raw_os_error(), &own).to_string(), "the image is broken");
        assert_eq!(Errno(4000).to_string(), "unknown error 4000");
    }
}
