//! Processes of a machine that serve one device each: this program, started again with nothing but what that device needs.

use crate::descriptors;
use crate::failure::{self, Failure};
use crate::machine::Other;
use crate::supervise::{self, AtEnd};
use command_fds::FdMapping;
use hosted_jail::{Failed, Image, Share, Vsock};
use proto::wedge::layout;
use signal_hook::consts::{SIGTERM, SIGXFSZ};
use signal_hook::flag;
use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// First argument of such a start.
const MARK: &str = "--device";
/// Kinds of devices.
const SHARE: &str = "share";
const IMAGE: &str = "image";
const VSOCK: &str = "vsock";

/// What all devices of a machine have.
#[derive(Clone, Copy, Debug)]
pub struct Machine<'a> {
    /// Bytes of guest memory.
    pub memory: u64,
    /// Descriptors of guest memory, of shared memory, and of the doorbell.
    pub descriptors: [BorrowedFd<'a>; 3],
}

/// What a process serves.
#[derive(Clone, Copy, Debug)]
pub enum Device {
    /// A folder.
    Share(Share),
    /// A qcow2 image.
    Image(Image),
}

/// Starts the process of a device, which is called `name` in messages and has this descriptor; its requests are in this queue.
pub fn start(
    machine: &Machine<'_>,
    queue: usize,
    device: Device,
    own: BorrowedFd<'_>,
    name: String,
) -> Result<Other, Failure> {
    let failed = |error: io::Error| Failure::os("start a process for a device", &error);
    let numbers = [layout::MEMORY_FD, layout::SHARED_FD, layout::DOORBELL_FD];
    let own = [(own, layout::DISKS_FD)];
    let (kind, read_only, sectors) = match device {
        Device::Share(Share { read_only }) => (SHARE, read_only, 0),
        Device::Image(Image { read_only, sectors }) => (IMAGE, read_only, sectors),
    };
    let mut mappings = Vec::new();
    for (descriptor, number) in machine.descriptors.into_iter().zip(numbers).chain(own) {
        let parent_fd = descriptor.try_clone_to_owned().map_err(failed)?;
        mappings.push(FdMapping { parent_fd, child_fd: number as i32 });
    }
    let numbers = [machine.memory, queue as u64, sectors].map(|number| number.to_string());
    let [memory, queue, sectors] = numbers;
    let arguments = [kind.to_owned(), memory, queue, read_only.to_string(), sectors];
    spawn(&arguments, mappings, name)
}

/// Starts the process of vsock with its descriptors.
pub fn start_vsock(vsock: Vsock, own: [OwnedFd; 3]) -> Result<Other, Failure> {
    let numbered = own.into_iter().zip(layout::DISKS_FD as i32..);
    let mappings = numbered.map(|(parent_fd, child_fd)| FdMapping { parent_fd, child_fd });
    spawn(&[VSOCK.to_owned(), vsock.cid.to_string()], mappings.collect(), VSOCK.to_owned())
}

fn spawn(arguments: &[String], mappings: Vec<FdMapping>, name: String) -> Result<Other, Failure> {
    let mut command = supervise::command(OsStr::new("/proc/self/exe"), AtEnd::Terminate)?;
    command
        .arg(MARK)
        .args(arguments)
        .env_clear()
        .stdin(Stdio::null())
        // There it says that it serves; its end is the end of the process.
        .stdout(Stdio::piped());
    descriptors::give(&mut command, mappings, layout::DISKS_FD as i32, &name)?;
    Other::start(name, &mut command)
}

/// Serves a device if this process was started by [`start`]; returns the exit code if that cannot be, `None` if this is an ordinary start.
pub fn become_device() -> Option<ExitCode> {
    let mut arguments = env::args().skip(1);
    if arguments.next()? != MARK {
        return None;
    }
    let Some(device) = described(arguments) else {
        eprintln!("parador: error: {MARK} is for internal use");
        return Some(ExitCode::from(failure::INTERNAL));
    };
    let end = Arc::new(AtomicBool::new(false));
    // A limit of the size of files is an error, not the end.
    let listens = flag::register(SIGTERM, end.clone())
        .and_then(|_| flag::register(SIGXFSZ, Arc::default()))
        .map_err(Failed::from);
    let served = listens.and_then(|_| match device {
        Served::Requests(machine, Device::Share(share)) => {
            hosted_jail::serve_share(machine, share, &end)
        }
        Served::Requests(machine, Device::Image(image)) => {
            hosted_jail::serve_image(machine, image, &end)
        }
        Served::Vsock(vsock) => hosted_jail::serve_vsock(vsock, &end),
    });
    Some(match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Whoever has started this process says it.
            print!("{error}");
            ExitCode::from(if error.is_of_host() { failure::OS_ERROR } else { failure::BAD_CONFIG })
        }
    })
}

/// What a process is started for.
enum Served {
    /// Requests of a machine.
    Requests(hosted_jail::Machine, Device),
    /// Connections.
    Vsock(Vsock),
}

/// What [`start`] and [`start_vsock`] say.
fn described(mut arguments: impl Iterator<Item = String>) -> Option<Served> {
    let kind = arguments.next()?;
    if kind == VSOCK {
        return Some(Served::Vsock(Vsock { cid: arguments.next()?.parse().ok()? }));
    }
    let memory = arguments.next()?.parse().ok()?;
    let queue = arguments.next()?.parse().ok()?;
    let read_only = arguments.next()?.parse().ok()?;
    let sectors = arguments.next()?.parse().ok()?;
    let device = match kind.as_str() {
        SHARE => Device::Share(Share { read_only }),
        IMAGE => Device::Image(Image { read_only, sectors }),
        _ => return None,
    };
    Some(Served::Requests(hosted_jail::Machine { memory, queue }, device))
}
