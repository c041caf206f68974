//! Shared directory: transport of 9P messages.
//!
//! State: one queue, and the chains of messages in flight.
//! Features: the tag, up to [`IN_FLIGHT`] messages at a time with replies in any order. The driver
//! and the server of the back end interpret the messages.
//! Missing: no part of the specification, which only assigns the device type.
//! Documentation: the driver of Linux (`net/9p/trans_virtio.c`) and QEMU's device, which agree;
//! VIRTIO 1.2, section 5 (device type 9).

use super::queue::{Chain, Queue, RingError, with_writable};
use super::{BATCH, CONFIG_LEN, Kind, VirtioDevice, more};
use vmm_bus::{Data, Env};

/// Features, configuration.
pub mod spec {
    /// Feature: the configuration has a tag.
    pub const F_MOUNT_TAG: u64 = 1 << 0;
    /// Configuration: length of the tag, 16 bits.
    pub const TAG_LENGTH: usize = 0;
    /// Configuration: the tag.
    pub const TAG: usize = 2;
    /// Maximum bytes of a tag.
    pub const MOST_TAG: usize = 32;
}
use spec::*;

/// Maximum messages in flight.
pub const IN_FLIGHT: usize = 64;
/// Entries of the queue, as Linux requires.
const ENTRIES: u16 = 128;

/// A shared directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct P9 {
    tag: [u8; MOST_TAG],
    queues: [Queue; 1],
    /// Messages in flight, indexed by their id for the back end.
    messages: [Option<Chain>; IN_FLIGHT],
}

impl P9 {
    /// Creates the device in its power-on state. `tag` is padded with zeros.
    pub const fn new(tag: [u8; MOST_TAG]) -> Self {
        Self { tag, queues: [Queue::new(ENTRIES)], messages: [None; IN_FLIGHT] }
    }

    /// Starts messages until the queue is empty or the back end has no room.
    fn begin(&mut self, env: &mut dyn Env) -> Result<(), RingError> {
        for _ in 0..BATCH {
            let [queue] = &mut self.queues;
            let Some(chain) = queue.pop(env.memory())? else {
                if queue.await_driver(env.memory())? {
                    continue;
                }
                return Ok(());
            };
            if chain.readable == 0 || chain.writable == 0 {
                return Err(RingError::Short);
            }
            let Some((outside, memory)) = env.messages() else {
                // Without a back end the reply is empty.
                queue.give_back(env.memory(), chain.head, 0);
                continue;
            };
            let started = self.messages.iter().position(Option::is_none).filter(|&number| {
                let mut message = queue.readable(memory, chain.head);
                let mut answer = queue.writable(memory, chain.head);
                outside.start(
                    number as u16,
                    &mut Data::new(memory, &mut message, chain.readable),
                    &mut Data::new(memory, &mut answer, chain.writable),
                )
            });
            match started {
                Some(number) => self.messages[number] = Some(chain),
                None => {
                    // A reply resumes here.
                    queue.undo_pop();
                    return Ok(());
                }
            }
        }
        more(env);
        Ok(())
    }

    /// Handles replies.
    fn complete(&mut self, env: &mut dyn Env) {
        let [queue] = &mut self.queues;
        // The back end has at most the messages in flight.
        for _ in 0..IN_FLIGHT {
            let Some((outside, memory)) = env.messages() else { return };
            let Some((id, length)) = outside.completed() else { return };
            let chain = self.messages.get_mut(usize::from(id)).and_then(Option::take);
            let Some(chain) = chain else {
                outside.finish(id, &mut Data::new(memory, &mut core::iter::empty(), 0));
                continue;
            };
            let length = length.min(chain.writable);
            with_writable(queue, memory, chain, |mut data| {
                data.truncate(length);
                outside.finish(id, &mut data);
            });
            queue.give_back(memory, chain.head, length);
        }
    }
}

impl VirtioDevice for P9 {
    fn kind(&self) -> Kind {
        Kind::P9
    }

    fn features(&self) -> u64 {
        F_MOUNT_TAG
    }

    fn queues(&mut self) -> &mut [Queue] {
        &mut self.queues
    }

    fn config(&self, to: &mut [u8; CONFIG_LEN]) {
        let length = self.tag.iter().position(|&byte| byte == 0).unwrap_or(MOST_TAG);
        to[TAG_LENGTH..TAG].copy_from_slice(&(length as u16).to_le_bytes());
        to[TAG..TAG + length].copy_from_slice(&self.tag[..length]);
    }

    fn start(&mut self, _: u64, _: &mut dyn Env) {}

    fn notify(&mut self, _: usize, env: &mut dyn Env) -> Result<(), RingError> {
        self.begin(env)
    }

    fn wake(&mut self, _: u8, env: &mut dyn Env) -> Result<bool, RingError> {
        self.complete(env);
        self.begin(env)?;
        Ok(false)
    }

    fn reset(&mut self, env: &mut dyn Env) {
        self.messages = [None; IN_FLIGHT];
        if let Some((outside, _)) = env.messages() {
            outside.forget();
        }
    }
}
