//! Shared directory: 9P messages in guest memory, which a [`NinepServer`] answers below one folder
//! of the host.

use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::AtomicBool;

use linux_raw_sys::errno;
use proto::hosted::{counters, layout};
use proto::requests::status;

use crate::confine::{FileAccess, SetupError, confine};
use crate::ninep::{HEAD, MAX_MESSAGE, NinepServer, Share, error, kind, tag};
use crate::worker::{AnswerOrder, Executed, GuestQueue, Serve, TakenRequest, Worker, split};

/// Messages served in parallel; further ones wait while all of them wait for the host.
const THREADS: usize = 8;

/// Serves a shared directory until `end`; its descriptor is [`layout::DISKS_FD`].
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

    fn execute(&self, taken: &TakenRequest<'_>) -> Executed {
        let mut executed = Executed {
            status: status::FAILED,
            op: Some(counters::op::OTHER),
            bytes: 0,
            is_failed: true,
        };
        let Some((message, room)) = split(taken) else { return executed };
        let done = taken.read(message, MAX_MESSAGE).and_then(|message| {
            let answer = self.answer(&message);
            let most: u64 = room.iter().map(|part| u64::from(part.1)).sum();
            // The driver has provided too little space for the answer.
            let answer = if answer.len() as u64 > most {
                error(tag(&message), errno::EMSGSIZE)
            } else {
                answer
            };
            count(&message, &answer, &mut executed);
            taken.write(room, &answer)?;
            Some((answer.len() as u64).min(most))
        });
        taken.set_answer(done.unwrap_or(0) as u32);
        if done.is_some() {
            executed.status = status::DONE;
        }
        executed
    }
}

/// Fills in what is counted of a message and its answer.
fn count(message: &[u8], answer: &[u8], executed: &mut Executed) {
    let kind_of = |message: &[u8]| message.get(4).copied().unwrap_or(kind::ERROR);
    // Both answers begin with the number of bytes.
    let bytes = answer.get(HEAD..).and_then(|rest| rest.first_chunk());
    let bytes = bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes).into());
    (executed.op, executed.bytes) = match kind_of(message) {
        kind::READ => (Some(counters::op::READ), bytes),
        kind::WRITE => (Some(counters::op::WRITE), bytes),
        _ => (Some(counters::op::OTHER), 0),
    };
    executed.is_failed = kind_of(answer) == kind::ERROR;
}

#[cfg(test)]
mod tests;
