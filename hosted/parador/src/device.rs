//! Processes of a machine that serve one device each: this program, started again with nothing but what that device needs.

use crate::failure::{self, Failure};
use crate::machine::Other;
use crate::supervise::{self, AtEnd};
use command_fds::{CommandFdExt, FdMapping};
use proto::wedge::layout;
use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::fd::BorrowedFd;
use std::process::{ExitCode, Stdio};

/// First argument of such a start.
const MARK: &str = "--device";

/// What all devices of a machine have.
#[derive(Clone, Copy, Debug)]
pub struct Machine<'a> {
    /// Bytes of guest memory.
    pub memory: u64,
    /// Descriptors of guest memory, of shared memory, and of the doorbell.
    pub descriptors: [BorrowedFd<'a>; 3],
}

/// Starts the process of a shared directory, which is called `name` in messages; its requests are in this queue.
pub fn start(
    machine: &Machine<'_>,
    queue: usize,
    read_only: bool,
    folder: BorrowedFd<'_>,
    name: String,
) -> Result<Other, Failure> {
    let failed = |error: io::Error| Failure::os("start a process for a device", &error);
    let mut command = supervise::command(OsStr::new("/proc/self/exe"), AtEnd::Kill)?;
    let numbers = [layout::MEMORY_FD, layout::SHARED_FD, layout::DOORBELL_FD];
    let own = [(folder, layout::DISKS_FD)];
    let mut mappings = Vec::new();
    for (descriptor, number) in machine.descriptors.into_iter().zip(numbers).chain(own) {
        let parent_fd = descriptor.try_clone_to_owned().map_err(failed)?;
        mappings.push(FdMapping { parent_fd, child_fd: number as i32 });
    }
    command
        .arg(MARK)
        .args([machine.memory.to_string(), queue.to_string(), read_only.to_string()])
        .env_clear()
        .stdin(Stdio::null())
        // Nothing is written there: its end is the end of the process.
        .stdout(Stdio::piped())
        .fd_mappings(mappings)
        .map_err(|_| Failure::new(failure::INTERNAL, "descriptors collide"))?;
    Other::start(name, &mut command)
}

/// Serves a device if this process was started by [`start`]; returns the exit code if that cannot be, `None` if this is an ordinary start.
pub fn become_device() -> Option<ExitCode> {
    let mut arguments = env::args().skip(1);
    if arguments.next()? != MARK {
        return None;
    }
    let mut number = || arguments.next()?.parse().ok();
    let machine = number().zip(number());
    let read_only = arguments.next().and_then(|word| word.parse().ok());
    let served = match machine.zip(read_only) {
        Some(((memory, queue), read_only)) => {
            let machine = hosted_jail::Machine { memory, queue: queue as usize };
            hosted_jail::serve_share(machine, hosted_jail::Share { read_only })
        }
        None => Ok(()),
    };
    match served {
        Ok(()) => eprintln!("parador: error: {MARK} is for internal use"),
        Err(error) => eprintln!("parador: error: a device cannot be served: {error}"),
    }
    Some(ExitCode::from(failure::INTERNAL))
}
