//! Console with a single port.
//!
//! State: two queues, and the number of bytes sent of the first chain.
//! Features: bytes in both directions through the back end, emergency write.
//! Missing: several ports, window size.
//! Documentation: VIRTIO 1.2, section 5.3 "Console Device".

use super::queue::{Queue, RingError, with_readable, with_writable};
use super::{BATCH, CONFIG_LEN, Kind, VirtioDevice, more};
use vmm_bus::Env;

/// Queues, features, configuration.
pub mod spec {
    /// Queue: input to the guest.
    pub const RECEIVE: usize = 0;
    /// Queue: output of the guest.
    pub const TRANSMIT: usize = 1;
    /// Feature: emergency write.
    pub const F_EMERG_WRITE: u64 = 1 << 2;
    /// Configuration: character of an emergency write (WO).
    pub const EMERG_WRITE: u64 = 8;
}
use spec::*;

/// Entries of each queue.
const ENTRIES: u16 = 64;
/// Bytes copied at a time.
const PIECE: usize = 64;

/// A console.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Console {
    queues: [Queue; 2],
    /// Bytes of the first chain that the back end has accepted.
    sent: u32,
}

impl Default for Console {
    fn default() -> Self {
        Self::new()
    }
}

impl Console {
    /// Creates the device in its power-on state.
    pub const fn new() -> Self {
        Self { queues: [Queue::new(ENTRIES), Queue::new(ENTRIES)], sent: 0 }
    }

    fn transmit(&mut self, env: &mut dyn Env) -> Result<(), RingError> {
        let queue = &mut self.queues[TRANSMIT];
        for _ in 0..BATCH {
            let Some(chain) = queue.pop(env.memory())? else {
                if queue.await_driver(env.memory())? {
                    continue;
                }
                return Ok(());
            };
            let mut piece = [0; PIECE];
            let count = with_readable(queue, env.memory(), chain, |mut data| {
                data.skip(self.sent);
                data.read(&mut piece)
            });
            let taken = piece[..count].iter().take_while(|byte| env.put(**byte)).count();
            self.sent += taken as u32;
            if taken < count {
                queue.undo_pop();
                return Ok(());
            }
            // No progress: the guest has shortened the chain.
            if self.sent >= chain.readable || count == 0 {
                self.sent = 0;
                queue.give_back(env.memory(), chain.head, 0);
            } else {
                queue.undo_pop();
            }
        }
        more(env);
        Ok(())
    }

    fn receive(&mut self, env: &mut dyn Env) -> Result<(), RingError> {
        let queue = &mut self.queues[RECEIVE];
        for _ in 0..BATCH {
            let Some(chain) = queue.pop(env.memory())? else {
                if queue.await_driver(env.memory())? {
                    continue;
                }
                return Ok(());
            };
            if chain.writable == 0 {
                return Err(RingError::Short);
            }
            let mut piece = [0; PIECE];
            let mut count = 0;
            for slot in piece.iter_mut().take(chain.writable as usize) {
                let Some(byte) = env.take() else { break };
                *slot = byte;
                count += 1;
            }
            if count == 0 {
                queue.undo_pop();
                return Ok(());
            }
            let memory = env.memory();
            let done = with_writable(queue, memory, chain, |mut data| data.write(&piece[..count]));
            queue.give_back(memory, chain.head, done as u32);
        }
        more(env);
        Ok(())
    }
}

impl VirtioDevice for Console {
    fn kind(&self) -> Kind {
        Kind::Console
    }

    fn features(&self) -> u64 {
        F_EMERG_WRITE
    }

    fn queues(&mut self) -> &mut [Queue] {
        &mut self.queues
    }

    fn config(&self, _: &mut [u8; CONFIG_LEN]) {}

    fn write_config(&mut self, offset: u64, _: u8, value: u64, env: &mut dyn Env) {
        if offset == EMERG_WRITE {
            // The register cannot report that there is no room.
            env.put(value as u8);
        } else {
            env.missing("virtio console: read-only configuration written", offset);
        }
    }

    fn start(&mut self, _: u64, _: &mut dyn Env) {}

    fn notify(&mut self, queue: usize, env: &mut dyn Env) -> Result<(), RingError> {
        if queue == TRANSMIT { self.transmit(env) } else { self.receive(env) }
    }

    fn wake(&mut self, _: u8, env: &mut dyn Env) -> Result<bool, RingError> {
        self.transmit(env)?;
        self.receive(env)?;
        Ok(false)
    }

    fn reset(&mut self, _: &mut dyn Env) {
        self.sent = 0;
    }
}
