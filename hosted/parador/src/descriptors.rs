//! Descriptors that a program has by number from its first instruction on.
//!
//! The host refuses numbers that the limit of open files does not reach. Between `fork` and `exec`, where descriptors get their numbers, that
//! could not be told well, and what does it (`command_fds`) takes it for granted there: so it is looked at before.

use crate::failure::{self, Failure};
use command_fds::{CommandFdExt, FdMapping};
use rustix::process::{Resource, getrlimit};
use std::os::fd::AsRawFd;
use std::process::Command;

/// Gives the program of `command`, which is called `name` in messages, these descriptors. `last` is the highest number that the program itself
/// needs.
///
/// # Errors
/// The host does not permit so many open files (71).
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
            "cannot start {name}: it needs {needed} open files, and {most} are permitted (RLIMIT_NOFILE)"
        );
        return Err(Failure::new(failure::OS_ERROR, text).help("permit more: `ulimit -n 1024`"));
    }
    let collide = |_| Failure::new(failure::INTERNAL, "descriptors collide");
    command.fd_mappings(mappings).map(drop).map_err(collide)
}

/// How many numbers there must be: those that the program has, and behind all of them one for each descriptor that is in the way of another.
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

    /// A descriptor with this number, or a higher one if that is taken.
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
    fn a_number_that_is_not_permitted_is_told_of() {
        let most = getrlimit(Resource::Nofile).current.unwrap() as i32;
        let give = |child_fd| {
            let mapping = FdMapping { parent_fd: from(10), child_fd };
            give(&mut Command::new("true"), vec![mapping], 0, "a program")
        };
        assert!(give(most - 1).is_ok());
        let failure = give(most).unwrap_err();
        assert_eq!(failure.code(), failure::OS_ERROR);
        let text = format!("cannot start a program: it needs {} open files, and {most}", most + 1);
        assert!(failure.to_string().contains(&text), "{failure}");
    }
}
