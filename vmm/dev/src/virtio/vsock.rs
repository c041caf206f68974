//! Sockets between a guest and its host.
//!
//! State: three queues, and the number of bytes that the guest has of the back end's first packet.
//! Features: streams. The driver and the back end interpret the packets; the back end keeps
//! connections and credit. The device ensures that a packet is a header with as many bytes of data
//! as the header states, and splits data for the guest into packets that fit its buffers.
//! Missing: sequenced packets; events, since a guest is not migrated to another host.
//! Documentation: VIRTIO 1.2, section 5.10 "Socket Device".

use super::queue::{Queue, RingError, with_readable, with_writable};
use super::{BATCH, CONFIG_LEN, Kind, VirtioDevice, more};
use vmm_bus::Env;

/// Queues, features, configuration.
pub mod spec {
    pub use proto::vsock::*;

    /// Queue: packets to the guest.
    pub const RECEIVE: usize = 0;
    /// Queue: packets from the guest.
    pub const TRANSMIT: usize = 1;
    /// Queue: events, which the device never sends.
    pub const EVENT: usize = 2;

    /// Feature: streams.
    pub const F_STREAM: u64 = 1 << 0;

    /// Configuration: the guest's CID, 64 bits.
    pub const GUEST_CID: usize = 0;
}
use spec::*;

/// Entries of the packet queues: Linux fills the receive queue with pages.
const ENTRIES: u16 = 256;
/// Entries of the event queue.
const EVENTS: u16 = 16;

/// A socket device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Vsock {
    cid: u64,
    queues: [Queue; 3],
    /// Bytes of data of the back end's first packet that the guest has.
    done: u32,
}

impl Vsock {
    /// Creates the device in its power-on state, with the guest's CID.
    pub const fn new(cid: u64) -> Self {
        Self {
            cid,
            queues: [Queue::new(ENTRIES), Queue::new(ENTRIES), Queue::new(EVENTS)],
            done: 0,
        }
    }

    /// Sends packets until the queue is empty or the back end has no room.
    fn transmit(&mut self, env: &mut dyn Env) -> Result<(), RingError> {
        for _ in 0..BATCH {
            let queue = &mut self.queues[TRANSMIT];
            let Some(chain) = queue.pop(env.memory())? else {
                if queue.await_driver(env.memory())? {
                    continue;
                }
                return Ok(());
            };
            let most = chain.readable.checked_sub(HEADER as u32).ok_or(RingError::Short)?;
            let length = with_readable(queue, env.memory(), chain, |mut data| {
                let mut header = [0; HEADER];
                data.read(&mut header);
                Header::from_bytes(&header).length
            });
            // An invalid packet is dropped, which stalls its connection. The back end validates
            // again, because the guest can change the header.
            if length <= most.min(MOST_DATA)
                && let Some((outside, memory)) = env.packets()
            {
                let taken = with_readable(queue, memory, chain, |mut data| {
                    data.truncate(HEADER as u32 + length);
                    outside.send(&mut data)
                });
                if !taken {
                    queue.undo_pop();
                    return Ok(());
                }
            }
            queue.give_back(env.memory(), chain.head, 0);
        }
        more(env);
        Ok(())
    }

    /// Delivers packets to the guest until none is queued or it has no buffers.
    fn receive(&mut self, env: &mut dyn Env) -> Result<(), RingError> {
        let queue = &mut self.queues[RECEIVE];
        for _ in 0..BATCH {
            let first = env.packets().and_then(|(outside, _)| outside.first());
            let Some((header, data)) = first else { return Ok(()) };
            let Some(chain) = queue.pop(env.memory())? else {
                if queue.await_driver(env.memory())? {
                    continue;
                }
                return Ok(());
            };
            let room = chain.writable.checked_sub(HEADER as u32).ok_or(RingError::Short)?;
            let left = data.saturating_sub(self.done);
            if room == 0 && left != 0 {
                return Err(RingError::Short);
            }
            let part = left.min(room);
            let Some((outside, memory)) = env.packets() else { return Ok(()) };
            with_writable(queue, memory, chain, |mut to| {
                to.write(&Header { length: part, ..header }.to_bytes());
                to.truncate(part);
                outside.copy(self.done, &mut to);
            });
            self.done += part;
            if self.done >= data {
                outside.drop_first();
                self.done = 0;
            }
            queue.give_back(memory, chain.head, HEADER as u32 + part);
        }
        more(env);
        Ok(())
    }
}

impl VirtioDevice for Vsock {
    fn kind(&self) -> Kind {
        Kind::Vsock
    }

    fn features(&self) -> u64 {
        F_STREAM
    }

    fn queues(&mut self) -> &mut [Queue] {
        &mut self.queues
    }

    fn config(&self, to: &mut [u8; CONFIG_LEN]) {
        to[GUEST_CID..GUEST_CID + 8].copy_from_slice(&self.cid.to_le_bytes());
    }

    fn start(&mut self, _: u64, _: &mut dyn Env) {}

    fn notify(&mut self, queue: usize, env: &mut dyn Env) -> Result<(), RingError> {
        match queue {
            TRANSMIT => self.transmit(env),
            RECEIVE => self.receive(env),
            // Buffers for events stay in the queue.
            _ => Ok(()),
        }
    }

    fn wake(&mut self, _: u8, env: &mut dyn Env) -> Result<bool, RingError> {
        self.transmit(env)?;
        self.receive(env)?;
        Ok(false)
    }

    fn reset(&mut self, env: &mut dyn Env) {
        self.done = 0;
        if let Some((outside, _)) = env.packets() {
            outside.reset();
        }
    }
}
