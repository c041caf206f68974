//! Shared directory: 9P messages in guest memory, which a [`NinepServer`] answers below one folder
//! of the host.

use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::AtomicBool;

use linux_raw_sys::errno;
use proto::hosted::layout;
use proto::requests::status;

use crate::confine::{FileAccess, SetupError, confine};
use crate::ninep::{HEAD, MAX_MESSAGE, NinepServer, error, kind, tag};
use crate::worker::{AnswerOrder, GuestQueue, Serve, TakenRequest, Worker, split};

/// Messages served in parallel; further ones wait while all of them wait for the host.
const THREADS: usize = 8;

/// Configuration of a shared directory; its descriptor is [`layout::DISKS_FD`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Share {
    /// Read-only.
    pub read_only: bool,
    /// The guest creates and changes files of any owner, with all bits of their modes, and device
    /// nodes. The process must have root's capabilities.
    pub owners: bool,
}

/// Serves a shared directory until `end`.
///
/// # Errors
/// The process cannot be set up.
pub fn serve_share(machine: GuestQueue, share: Share, end: &AtomicBool) -> Result<(), SetupError> {
    let worker = Worker::new(machine)?;
    // SAFETY: `parador run` starts the program with this descriptor, and no other code of it uses
    // it.
    let folder = unsafe { OwnedFd::from_raw_fd(layout::DISKS_FD as i32) };
    let server = NinepServer::new(folder, share);
    let server =
        server.map_err(|error| SetupError::host("cannot set up the 9P server", &error.into()))?;
    let folder = server.folder();
    let files = match (share.read_only, share.owners) {
        (true, false) => FileAccess::Read(folder),
        (true, true) => FileAccess::ReadOwners(folder),
        (false, false) => FileAccess::Change(folder),
        (false, true) => FileAccess::Owners(folder),
    };
    let threads = confine(files, THREADS)?;
    Ok(worker.serve(server, &threads, end)?)
}

impl Serve for NinepServer {
    /// Messages have tags, and a flush is answered after the flushed message. Requests are not
    /// aborted: a completed change is better than half of one.
    fn order(&self, taken: &TakenRequest<'_>) -> AnswerOrder {
        let mut head = [0; HEAD + 2];
        let Some((message, _)) = split(taken) else { return AnswerOrder::Free };
        let length = taken.read_into(message, &mut head);
        let tag = u16::from_le_bytes([head[5], head[6]]);
        match (head[4], length) {
            (kind::FLUSH, 9) => AnswerOrder::After(u16::from_le_bytes([head[7], head[8]])),
            (_, HEAD..) => AnswerOrder::Named(tag),
            _ => AnswerOrder::Free,
        }
    }

    fn execute(&self, taken: &TakenRequest<'_>) -> u8 {
        let Some((message, room)) = split(taken) else { return status::FAILED };
        let done = taken.read(message, MAX_MESSAGE).and_then(|message| {
            let answer = self.answer(&message);
            let most: u64 = room.iter().map(|part| u64::from(part.1)).sum();
            // The driver has provided too little space for the answer.
            let answer = if answer.len() as u64 > most {
                error(tag(&message), errno::EMSGSIZE)
            } else {
                answer
            };
            taken.write(room, &answer)?;
            Some((answer.len() as u64).min(most))
        });
        taken.set_answer(done.unwrap_or(0) as u32);
        if done.is_some() { status::DONE } else { status::FAILED }
    }
}

#[cfg(test)]
mod tests;
