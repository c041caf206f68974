//! Device processes: `parador` executed again, with only the resources of one device.

use crate::descriptors;
use crate::device_process::DeviceProcess;
use command_fds::FdMapping;
use hosted_command::failure::{self, Failure};
use hosted_command::messages::{self, Format, Level};
use hosted_command::streams;
use hosted_command::supervise::{self, AtEnd};
use hosted_devices::{Base, ImageConfig, SetupError, Share, Vsock, report};
use proto::hosted::layout;
use signal_hook::consts::{SIGTERM, SIGXFSZ};
use signal_hook::flag;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// First argument of such a process.
const MARK: &str = "--device";
/// Kinds of devices, as the third argument.
const SHARE: &str = "share";
const IMAGE: &str = "image";
const VSOCK: &str = "vsock";
/// Source of messages of a disk.
const DISK: &str = "disk";
/// Argument of an image that is no overlay.
const NO_BASE: &str = "none";

/// Resources shared by all device processes of a VM.
#[derive(Clone, Copy, Debug)]
pub struct VmDescriptors<'a> {
    /// Guest memory in bytes.
    pub memory: u64,
    /// Descriptors of guest memory, shared memory, the doorbell and the counters.
    pub descriptors: [BorrowedFd<'a>; 4],
}

/// Device that a process serves.
#[derive(Clone, Debug)]
pub enum DeviceKind {
    /// Shared directory.
    Share(Share),
    /// Disk with a qcow2 image, and the formats of its backing files.
    Image(ImageConfig, Vec<Base>),
}

impl DeviceKind {
    /// Returns the kind and its configuration as arguments, of which [`DeviceKind::parse`] is the
    /// inverse.
    fn words(self) -> (&'static str, Vec<String>) {
        match self {
            Self::Share(Share { read_only, owners }) => {
                (SHARE, [read_only, owners].map(|word| word.to_string()).into())
            }
            Self::Image(ImageConfig { base, read_only, sectors }, backing) => {
                let mut words = vec![read_only.to_string(), sectors.to_string()];
                words.push(base.map_or(NO_BASE, word_of_base).to_owned());
                words.extend(backing.into_iter().map(|base| word_of_base(base).to_owned()));
                (IMAGE, words)
            }
        }
    }

    /// Parses the kind and its configuration.
    fn parse(kind: &str, mut words: impl Iterator<Item = String>) -> Option<Self> {
        let read_only = words.next()?.parse().ok()?;
        match kind {
            SHARE => Some(Self::Share(Share { read_only, owners: words.next()?.parse().ok()? })),
            IMAGE => {
                let sectors = words.next()?.parse().ok()?;
                let base = match words.next()? {
                    word if word == NO_BASE => None,
                    word => Some(parse_base(&word)?),
                };
                let backing = words.map(|word| parse_base(&word)).collect::<Option<_>>()?;
                Some(Self::Image(ImageConfig { base, read_only, sectors }, backing))
            }
            _ => None,
        }
    }
}

/// Starts the process of a device. `queue` is the index of its request queue, `own` the descriptors
/// of its files; `name` is for messages.
pub fn start(
    machine: &VmDescriptors<'_>,
    queue: usize,
    device: DeviceKind,
    own: &[BorrowedFd<'_>],
    name: String,
) -> Result<DeviceProcess, Failure> {
    let failed = |error: io::Error| Failure::os("start a device process", &error);
    let numbers = [layout::MEMORY_FD, layout::SHARED_FD, layout::DOORBELL_FD, layout::COUNTERS_FD];
    let own = own.iter().copied().zip(layout::DISKS_FD..);
    let mut mappings = Vec::new();
    for (descriptor, number) in machine.descriptors.into_iter().zip(numbers).chain(own) {
        let parent_fd = descriptor.try_clone_to_owned().map_err(failed)?;
        mappings.push(FdMapping { parent_fd, child_fd: number as i32 });
    }
    let (kind, words) = device.words();
    let numbers = [machine.memory, queue as u64].map(|number| number.to_string());
    let arguments: Vec<_> = [kind.to_owned()].into_iter().chain(numbers).chain(words).collect();
    spawn(&arguments, mappings, name)
}

/// Returns the format that an argument names.
fn parse_base(word: &str) -> Option<Base> {
    [Base::Raw, Base::Qcow2].into_iter().find(|&base| word_of_base(base) == word)
}

/// Returns the argument for a format.
fn word_of_base(base: Base) -> &'static str {
    match base {
        Base::Raw => "raw",
        Base::Qcow2 => "qcow2",
    }
}

/// Returns the argument for a format of messages.
fn word_of_format(format: Format) -> &'static str {
    match format {
        Format::Text => "text",
        Format::Json => "json",
    }
}

/// Returns the format of messages that an argument names.
fn parse_format(word: &str) -> Option<Format> {
    [Format::Text, Format::Json].into_iter().find(|&format| word_of_format(format) == word)
}

/// Starts the process of the vsock device with its descriptors.
pub fn start_vsock(vsock: Vsock, own: [OwnedFd; 3]) -> Result<DeviceProcess, Failure> {
    let numbered = own.into_iter().zip(layout::DISKS_FD as i32..);
    let mappings = numbered.map(|(parent_fd, child_fd)| FdMapping { parent_fd, child_fd });
    spawn(&[VSOCK.to_owned(), vsock.cid.to_string()], mappings.collect(), VSOCK.to_owned())
}

fn spawn(
    arguments: &[String],
    mappings: Vec<FdMapping>,
    name: String,
) -> Result<DeviceProcess, Failure> {
    let mut command = supervise::own(AtEnd::Terminate)?;
    command
        .arg(MARK)
        .arg(word_of_format(messages::format()))
        .args(arguments)
        .env_clear()
        .stdin(Stdio::null())
        // The process reports READY there; a hang-up is its end.
        .stdout(Stdio::piped());
    // A reader of messages that does not keep up must not stop the device.
    if let Some(errors) = streams::reopened(io::stderr().as_fd()) {
        command.stderr(errors);
    }
    descriptors::give(&mut command, mappings, layout::DISKS_FD as i32, &name)?;
    DeviceProcess::start(name, &mut command)
}

/// Serves a device if this process was started by [`start`] or [`start_vsock`] and returns the exit
/// code; `None` in an ordinary `parador`.
pub fn become_device() -> Option<ExitCode> {
    let words = supervise::arguments().skip(1);
    let mut arguments = words.map_while(|word| word.into_string().ok());
    if arguments.next()? != MARK {
        return None;
    }
    let format = arguments.next().and_then(|word| parse_format(&word));
    let Some((format, device)) = format.zip(parse_arguments(arguments)) else {
        eprintln!("parador: error: {MARK} is for internal use");
        return Some(ExitCode::from(failure::INTERNAL));
    };
    messages::set(format);
    report::set_format(|text| messages::line(Level::Warn, DISK, text));
    let end = Arc::new(AtomicBool::new(false));
    // Exceeding RLIMIT_FSIZE is an error of the write, not the end of the process.
    let listens = flag::register(SIGTERM, end.clone())
        .and_then(|_| flag::register(SIGXFSZ, Arc::default()))
        .map_err(SetupError::from);
    let served = listens.and_then(|_| match device {
        Served::Requests(machine, DeviceKind::Share(share)) => {
            hosted_devices::serve_share(machine, share, &end)
        }
        Served::Requests(machine, DeviceKind::Image(image, backing)) => {
            hosted_devices::serve_image(machine, image, &backing, &end)
        }
        Served::Vsock(vsock) => hosted_devices::serve_vsock(vsock, &end),
    });
    Some(match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The parent process prints the message.
            print!("{error}");
            ExitCode::from(if error.is_of_host() { failure::OS_ERROR } else { failure::BAD_CONFIG })
        }
    })
}

/// Task of a device process.
enum Served {
    /// Requests of a virtio device in shared memory.
    Requests(hosted_devices::GuestQueue, DeviceKind),
    /// Vsock connections.
    Vsock(Vsock),
}

/// Parses the arguments that [`start`] and [`start_vsock`] pass.
fn parse_arguments(mut arguments: impl Iterator<Item = String>) -> Option<Served> {
    let kind = arguments.next()?;
    if kind == VSOCK {
        return Some(Served::Vsock(Vsock { cid: arguments.next()?.parse().ok()? }));
    }
    let memory = arguments.next()?.parse().ok()?;
    let queue = arguments.next()?.parse().ok()?;
    let device = DeviceKind::parse(&kind, arguments)?;
    Some(Served::Requests(hosted_devices::GuestQueue { memory, queue }, device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_of_messages_are_passed_on() {
        for format in [Format::Text, Format::Json] {
            assert_eq!(parse_format(word_of_format(format)), Some(format));
        }
        assert_eq!(parse_format(IMAGE), None);
    }
}
