//! Inherited descriptors with fixed numbers.
//!
//! The host refuses numbers beyond the limit of open files. `command_fds` assigns the numbers
//! between `fork` and `exec`, where it reports no useful error, so the limit is checked before.

use command_fds::{CommandFdExt, FdMapping};
use host_linux::sys::{NumberCall, call_with_numbers};
use hosted_command::failure::{self, Failure};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::process::Command;

/// First descriptor after the standard streams.
const FIRST: u32 = 3;

/// Keeps descriptors that this process has inherited from programs that it starts: processes of a
/// VM have those that they need only, and none holds a lock of its user's.
///
/// Linux before 5.11 cannot do it; they are inherited there.
pub fn withhold_inherited() {
    let _ = host_linux::sys::close_at_exec(FIRST);
}

/// Duplicates the descriptor with this number, with which this process was started: the copy has
/// the same position in a file, and sockets cannot be opened again. Callers must not have opened
/// any descriptors of their own, which could have the number.
///
/// # Errors
/// The number is not open for writing, or there are too many descriptors.
pub fn duplicate_inherited(number: u32) -> io::Result<File> {
    let copy = File::open("/dev/null")?;
    let own = copy.as_raw_fd() as u32;
    if own == number {
        return Err(Errno::BADF.into());
    }
    let arguments = [number.into(), own.into(), OFlags::CLOEXEC.bits().into(), 0];
    call_with_numbers(NumberCall::Duplicate, arguments)
        .map_err(|error| io::Error::from_raw_os_error(error.0))?;
    match fcntl_getfl(&copy)? & OFlags::ACCMODE {
        OFlags::RDONLY => Err(Errno::BADF.into()),
        _ => Ok(copy),
    }
}

/// Passes descriptors to the program of `command`, called `name` in messages. `last` is the highest
/// number that the program itself needs.
///
/// # Errors
/// RLIMIT_NOFILE is too low (71).
pub fn give(
    command: &mut Command,
    mappings: Vec<FdMapping>,
    last: i32,
    name: &str,
) -> Result<(), Failure> {
    let needed = needed(&mappings, last);
    if let Some(most) = getrlimit(Resource::Nofile).current
        && u64::from(needed) > most
    {
        let text = format!(
            "cannot start {name}: RLIMIT_NOFILE is {most}, but {needed} open files are required"
        );
        return Err(Failure::new(failure::OS_ERROR, text).help("raise the limit: `ulimit -n 1024`"));
    }
    let collide = |_| Failure::new(failure::INTERNAL, "descriptor numbers collide");
    command.fd_mappings(mappings).map(drop).map_err(collide)
}

/// Returns the required limit: the numbers of the program, and after them one for each descriptor
/// that must be moved out of the way.
fn needed(mappings: &[FdMapping], last: i32) -> u32 {
    let own = |mapping: &FdMapping| mapping.parent_fd.as_raw_fd();
    let is_in_the_way = |mapping: &&FdMapping| {
        own(mapping) != mapping.child_fd
            && mappings.iter().any(|other| other.child_fd == own(mapping))
    };
    let moved = mappings.iter().filter(is_in_the_way).count();
    let highest = mappings.iter().map(|mapping| mapping.child_fd).fold(last, i32::max);
    let behind = mappings.iter().map(own).fold(highest, i32::max);
    let highest = if moved == 0 { highest } else { behind };
    // No descriptor is negative.
    highest.unsigned_abs() + 1 + moved as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::fcntl_dupfd_cloexec;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    /// Returns a descriptor with this number, or a higher one if it is in use.
    fn from(number: i32) -> std::os::fd::OwnedFd {
        fcntl_dupfd_cloexec(std::io::stdin(), number).unwrap()
    }

    #[test]
    fn what_is_in_the_way_needs_a_number_behind_all() {
        let first = from(100);
        let number = first.as_raw_fd();
        let (free, second) = (number + 50, from(number + 1));
        let to = |parent_fd, child_fd| FdMapping { parent_fd, child_fd };
        assert_eq!(needed(&[], 2), 3);
        assert_eq!(needed(&[to(from(number), 4)], 2), 5);
        assert_eq!(needed(&[to(from(number), 4)], 9), 10);
        let behind = second.as_raw_fd() as u32;
        let both = [to(first, 4), to(second, number)];
        assert_eq!(needed(&both, 2), behind + 2);
        let [one, other] = both;
        let (one, other) = (to(one.parent_fd, free), to(other.parent_fd, 5));
        assert_eq!(needed(&[one, other], 2), free as u32 + 1);
    }

    #[test]
    fn a_number_beyond_the_limit_is_reported() {
        let most = getrlimit(Resource::Nofile).current.unwrap() as i32;
        let give = |child_fd| {
            let mapping = FdMapping { parent_fd: from(10), child_fd };
            give(&mut Command::new("true"), vec![mapping], 0, "a program")
        };
        assert!(give(most - 1).is_ok());
        let failure = give(most).unwrap_err();
        assert_eq!(failure.code(), failure::OS_ERROR);
        let text = format!("cannot start a program: RLIMIT_NOFILE is {most}, but {}", most + 1);
        assert!(failure.to_string().contains(&text), "{failure}");
    }

    #[test]
    fn an_inherited_descriptor_shares_its_position() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut file = File::create(&path).unwrap();
        file.write_all(b"before ").unwrap();
        duplicate_inherited(file.as_raw_fd() as u32).unwrap().write_all(b"event ").unwrap();
        file.write_all(b"after").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "before event after");
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        duplicate_inherited(theirs.as_raw_fd() as u32).unwrap().write_all(b"event").unwrap();
        let mut bytes = [0; 5];
        ours.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, *b"event");
        let read_only = File::open(&path).unwrap();
        for number in [read_only.as_raw_fd() as u32, 1 << 20] {
            let error = duplicate_inherited(number).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(Errno::BADF.raw_os_error()));
        }
    }
}
