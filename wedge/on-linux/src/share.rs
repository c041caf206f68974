//! Shared directories: a server in a process of its own, of another program (`hosted/jail`), reads and answers messages in guest memory.

use core::sync::atomic::Ordering::Relaxed;

use proto::requests::{Client, op};
use proto::wedge::MAX_DISKS;
use vmm_bus::{Data, Messages};

use crate::disk;
use crate::sys;

/// A shared directory as the guest's device has it.
pub struct Link {
    client: Client<'static>,
}

impl Link {
    /// The shared directory with this number.
    pub fn new(number: usize) -> Self {
        Self { client: Client::new(disk::queue(MAX_DISKS + number)) }
    }
}

impl Messages for Link {
    fn start(&mut self, id: u16, message: &mut Data<'_>, answer: &mut Data<'_>) -> bool {
        let Some(request) = self.client.request(id) else { return false };
        request.op.store(op::MESSAGE, Relaxed);
        let count = disk::fill(&request.parts, message);
        let used = count + disk::fill(&request.parts[count..], answer);
        request.count.store(count as u32, Relaxed);
        request.used.store(used as u32, Relaxed);
        disk::give(&mut self.client, id);
        true
    }

    fn completed(&mut self) -> Option<(u16, u32)> {
        let (id, request) = self.client.completed()?;
        Some((id, request.answer.load(Relaxed)))
    }

    fn finish(&mut self, id: u16, _: &mut Data<'_>) {
        // The answer is there already.
        self.client.finish(id);
    }

    fn forget(&mut self) {
        // A message may wait for the host for ever; its server writes no memory any more.
        self.client.abandon(|answers, seen| sys::wait(answers, seen, None));
    }
}
