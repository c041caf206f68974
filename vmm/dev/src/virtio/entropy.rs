//! Entropy source.
//!
//! State: one queue.
//! Features: fills buffers with random bytes of the host, at most [`MOST`] for each chain; waits
//! while the host has none.
//! Missing: no part of the specification.
//! Documentation: VIRTIO 1.2, section 5.4 "Entropy Device".

use super::queue::{Queue, RingError, with_writable};
use super::{BATCH, CONFIG_LEN, Kind, VirtioDevice, more};
use vmm_bus::Env;

/// Maximum bytes for one chain; a driver accepts fewer than its buffer holds.
pub const MOST: usize = 64;
/// Entries of the queue.
const ENTRIES: u16 = 16;

/// An entropy source.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entropy {
    queues: [Queue; 1],
}

impl Default for Entropy {
    fn default() -> Self {
        Self::new()
    }
}

impl Entropy {
    /// Creates the device in its power-on state.
    pub const fn new() -> Self {
        Self { queues: [Queue::new(ENTRIES)] }
    }

    fn serve(&mut self, env: &mut dyn Env) -> Result<(), RingError> {
        let [queue] = &mut self.queues;
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
            let mut bytes = [0; MOST];
            let wanted = MOST.min(chain.writable as usize);
            if !env.entropy().is_some_and(|(source, _)| source.fill(&mut bytes[..wanted])) {
                queue.undo_pop();
                return Ok(());
            }
            let memory = env.memory();
            let done = with_writable(queue, memory, chain, |mut data| data.write(&bytes[..wanted]));
            queue.give_back(memory, chain.head, done as u32);
        }
        more(env);
        Ok(())
    }
}

impl VirtioDevice for Entropy {
    fn kind(&self) -> Kind {
        Kind::Entropy
    }

    fn features(&self) -> u64 {
        0
    }

    fn queues(&mut self) -> &mut [Queue] {
        &mut self.queues
    }

    fn config(&self, _: &mut [u8; CONFIG_LEN]) {}

    fn start(&mut self, _: u64, _: &mut dyn Env) {}

    fn notify(&mut self, _: usize, env: &mut dyn Env) -> Result<(), RingError> {
        self.serve(env)
    }

    fn wake(&mut self, _: u8, env: &mut dyn Env) -> Result<bool, RingError> {
        self.serve(env)?;
        Ok(false)
    }

    fn reset(&mut self, _: &mut dyn Env) {}
}
