//! Memory balloon: a guest returns memory to its host.
//!
//! State: queues, the target size, the chain that waits for the next request of statistics.
//! Features: inflation and deflation, deflation on lack of memory, statistics, reports of free
//! pages. Pages that the guest gives up or reports as free read as zeros at the next use, without a
//! request; unused pages stay with the host.
//! Missing: free page hints, page poison, pages larger than 4 KiB (the guest reports those in
//! ranges).
//! Documentation: VIRTIO 1.2, section 5.5 "Traditional Memory Balloon Device".

use super::queue::{Chain, Queue, RingError, with_readable};
use super::{BATCH, CONFIG_LEN, Kind, VirtioDevice, more};
use vmm_bus::Env;
use vmm_mem::{GuestMemory, PAGE_SIZE};

/// Queues, features, configuration, statistics.
pub mod spec {
    /// Queue: pages that the guest gives up.
    pub const INFLATE: usize = 0;
    /// Queue: pages that the guest takes back.
    pub const DEFLATE: usize = 1;
    /// Queue: statistics, if the driver has negotiated them.
    pub const STATISTICS: usize = 2;

    /// Feature: statistics.
    pub const F_STATS_VQ: u64 = 1 << 1;
    /// Feature: the guest may take pages back when it lacks memory.
    pub const F_DEFLATE_ON_OOM: u64 = 1 << 2;
    /// Feature: the guest reports free pages.
    pub const F_PAGE_REPORTING: u64 = 1 << 5;

    /// Configuration: target size in pages, 32 bits.
    pub const NUM_PAGES: usize = 0;
    /// Configuration: current size in pages (written by the driver), 32 bits.
    pub const ACTUAL: u64 = 4;

    /// Bytes of a page number.
    pub const NUMBER: usize = 4;
    /// Bytes of a statistic: tag (16 bits), value (64).
    pub const STATISTIC: usize = 10;
    /// End of the tags of statistics.
    pub use proto::hosted::balloon::TAGS;
}
use spec::*;

/// Entries of each queue.
const ENTRIES: u16 = 64;
/// Page numbers read of a chain; drivers send 256. A device need not use every page that it
/// receives.
const NUMBERS: usize = 256;

/// A balloon.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Balloon {
    /// The last two may be the reporting queue: the standard gives it index 4; Linux numbers queues
    /// without gaps and uses index 3 or, without statistics, 2.
    queues: [Queue; 5],
    /// Target size in pages.
    target: u32,
    actual: u32,
    /// The driver has negotiated statistics.
    has_statistics: bool,
    /// Chain with reported statistics; returned to request new ones.
    reported: Option<Chain>,
}

impl Default for Balloon {
    fn default() -> Self {
        Self::new()
    }
}

impl Balloon {
    /// Creates the device in its power-on state.
    pub const fn new() -> Self {
        Self {
            queues: [Queue::new(ENTRIES); 5],
            target: 0,
            actual: 0,
            has_statistics: false,
            reported: None,
        }
    }

    fn serve(&mut self, number: usize, env: &mut dyn Env) -> Result<(), RingError> {
        for _ in 0..BATCH {
            let queue = &mut self.queues[number];
            let Some(chain) = queue.pop(env.memory())? else {
                if queue.await_driver(env.memory())? {
                    continue;
                }
                return Ok(());
            };
            match number {
                INFLATE => Self::inflate(queue, chain, env),
                // The pages need no allocation before their use.
                DEFLATE => {}
                STATISTICS if self.has_statistics => {
                    Self::report_statistics(queue, chain, env);
                    let Some(older) = self.reported.replace(chain) else { continue };
                    self.queues[number].give_back(env.memory(), older.head, 0);
                    continue;
                }
                _ => Self::report(queue, chain, env),
            }
            self.queues[number].give_back(env.memory(), chain.head, 0);
        }
        more(env);
        Ok(())
    }

    /// Discards the pages whose numbers are in a chain, merged into contiguous ranges.
    fn inflate(queue: &Queue, chain: Chain, env: &mut dyn Env) {
        let Some((backend, memory)) = env.balloon() else { return };
        let mut bytes = [0; NUMBERS * NUMBER];
        let length = with_readable(queue, memory, chain, |mut data| data.read(&mut bytes));
        let mut numbers = [0; NUMBERS];
        let used = length / NUMBER;
        for (number, bytes) in numbers.iter_mut().zip(bytes[..length].as_chunks().0) {
            *number = u32::from_le_bytes(*bytes);
        }
        let numbers = &mut numbers[..used];
        numbers.sort_unstable();
        for piece in numbers.chunk_by(|one, next| one.checked_add(1) == Some(*next)) {
            let length = piece.len() as u64 * PAGE_SIZE;
            discard(backend, memory, u64::from(piece[0]) * PAGE_SIZE, length);
        }
    }

    /// Discards the complete pages of a chain's device-writable buffers.
    fn report(queue: &Queue, chain: Chain, env: &mut dyn Env) {
        let Some((backend, memory)) = env.balloon() else { return };
        for part in queue.writable(memory, chain.head) {
            // It may have changed since it was validated.
            if !memory.contains(part.address, part.length.into()) {
                return;
            }
            // One without bytes may be anywhere.
            let Some(start) = part.address.checked_next_multiple_of(PAGE_SIZE) else { return };
            let end = (part.address + u64::from(part.length)) & !(PAGE_SIZE - 1);
            discard(backend, memory, start, end.saturating_sub(start));
        }
    }

    /// Reports statistics to the back end.
    fn report_statistics(queue: &Queue, chain: Chain, env: &mut dyn Env) {
        let Some((backend, memory)) = env.balloon() else { return };
        let mut bytes = [0; STATISTIC * TAGS];
        let length = with_readable(queue, memory, chain, |mut data| data.read(&mut bytes));
        let mut values = [None; TAGS];
        for &[tag, more, ref value @ ..] in bytes[..length].as_chunks::<STATISTIC>().0 {
            let tag = u16::from_le_bytes([tag, more]);
            if let Some(place) = values.get_mut(usize::from(tag)) {
                *place = Some(u64::from_le_bytes(*value));
            }
        }
        backend.report_statistics(&values);
    }

    fn update_target(&mut self, env: &mut dyn Env) -> bool {
        let Some((backend, memory)) = env.balloon() else { return false };
        let wanted = backend.target_pages();
        if self.reported.is_some()
            && backend.take_statistics_request()
            && let Some(chain) = self.reported.take()
        {
            self.queues[STATISTICS].give_back(memory, chain.head, 0);
        }
        wanted != core::mem::replace(&mut self.target, wanted)
    }
}

/// Discards a range, if it is memory.
fn discard(
    backend: &mut dyn vmm_bus::BalloonBackend,
    memory: &GuestMemory,
    address: u64,
    length: u64,
) {
    if length != 0 && memory.contains(address, length) {
        backend.discard(address, length);
    }
}

impl VirtioDevice for Balloon {
    fn kind(&self) -> Kind {
        Kind::Balloon
    }

    fn features(&self) -> u64 {
        F_STATS_VQ | F_DEFLATE_ON_OOM | F_PAGE_REPORTING
    }

    fn queues(&mut self) -> &mut [Queue] {
        &mut self.queues
    }

    fn config(&self, to: &mut [u8; CONFIG_LEN]) {
        let words = [self.target, self.actual];
        for (place, word) in to[NUM_PAGES..].chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }

    fn write_config(&mut self, offset: u64, size: u8, value: u64, env: &mut dyn Env) {
        if (offset, size) != (ACTUAL, 4) {
            return env.missing("virtio balloon: read-only configuration written", offset);
        }
        self.actual = value as u32;
        if let Some((backend, _)) = env.balloon() {
            backend.set_inflated(self.actual);
        }
    }

    fn start(&mut self, features: u64, env: &mut dyn Env) {
        self.has_statistics = features & F_STATS_VQ != 0;
        self.update_target(env);
    }

    fn notify(&mut self, queue: usize, env: &mut dyn Env) -> Result<(), RingError> {
        self.serve(queue, env)
    }

    fn wake(&mut self, _: u8, env: &mut dyn Env) -> Result<bool, RingError> {
        let has_changed = self.update_target(env);
        for queue in 0..self.queues.len() {
            self.serve(queue, env)?;
        }
        Ok(has_changed)
    }

    fn reset(&mut self, env: &mut dyn Env) {
        *self = Self { target: self.target, queues: self.queues, ..Self::new() };
        if let Some((backend, _)) = env.balloon() {
            backend.set_inflated(0);
        }
    }
}
