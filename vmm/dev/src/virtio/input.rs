//! Input device with one key: the power button.
//!
//! State: events that wait for buffers of the driver, two queues.
//! Features: name, identity and key of the device; presses of the key, each with its release.
//! Missing: other keys, repetition, LEDs and sounds (what the driver sends is dropped).
//! Documentation: VIRTIO 1.2, section 5.8 "Input Device"; numbers of events are those of Linux
//! (`input-event-codes.h`).

use super::queue::{Queue, RingError, with_writable};
use super::{CONFIG_LEN, Kind, VirtioDevice};
use vmm_bus::Env;

/// Numbers of the standard and of Linux.
pub mod spec {
    /// Queue of events to the driver.
    pub const EVENTS: usize = 0;
    /// Queue of events from the driver.
    pub const STATUS: usize = 1;

    /// Configuration: selected item.
    pub const SELECT: u64 = 0;
    /// Configuration: selected part of the item.
    pub const PART: u64 = 1;
    /// Configuration: bytes of the item (RO).
    pub const SIZE: usize = 2;
    /// Configuration: the item (RO).
    pub const ITEM: usize = 8;

    /// Item: name of the device.
    pub const NAME: u8 = 0x01;
    /// Item: bus, vendor, product and version.
    pub const IDENTITY: u8 = 0x03;
    /// Item: bit mask of the events of a type, which the part selects.
    pub const EVENT_BITS: u8 = 0x11;

    /// Bytes of an event: type and code of 16 bits, value of 32.
    pub const EVENT: usize = 8;
    /// Type: end of a group of events.
    pub const SYNCHRONIZATION: u16 = 0;
    /// Type: keys.
    pub const KEY: u16 = 1;
    /// Code of the power button.
    pub const POWER: u16 = 116;
    /// Bus of virtual devices.
    pub const VIRTUAL_BUS: u16 = 6;
}
use spec::*;

/// Name of the device.
const NAME_TEXT: &[u8] = b"Power Button";
/// Entries of a queue.
const ENTRIES: u16 = 16;
/// Events of a press: the key, its release, each with the end of its group.
const PRESS: [(u16, u16, u32); 4] =
    [(KEY, POWER, 1), (SYNCHRONIZATION, 0, 0), (KEY, POWER, 0), (SYNCHRONIZATION, 0, 0)];

/// A power button.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PowerButton {
    queues: [Queue; 2],
    /// Selected item and part of the configuration.
    selected: [u8; 2],
    /// Events of [`PRESS`] that the driver has not got.
    waiting: usize,
}

impl Default for PowerButton {
    fn default() -> Self {
        Self::new()
    }
}

impl PowerButton {
    /// Creates the device in its power-on state.
    pub const fn new() -> Self {
        Self { queues: [Queue::new(ENTRIES); 2], selected: [0; 2], waiting: 0 }
    }

    /// Presses and releases the button. A press is lost while the driver has not got the last one.
    /// The device sends the events when it is called the next time.
    pub fn press(&mut self) {
        if self.waiting == 0 {
            self.waiting = PRESS.len();
        }
    }

    /// Fills buffers of the driver with events that wait.
    fn send(&mut self, env: &mut dyn Env) -> Result<(), RingError> {
        let queue = &mut self.queues[EVENTS];
        // A chain for each event, and some that the driver offers meanwhile.
        for _ in 0..2 * PRESS.len() {
            if self.waiting == 0 {
                break;
            }
            let Some(chain) = queue.pop(env.memory())? else {
                if queue.await_driver(env.memory())? {
                    continue;
                }
                return Ok(());
            };
            if (chain.writable as usize) < EVENT {
                return Err(RingError::Short);
            }
            let (kind, code, value) = PRESS[PRESS.len() - self.waiting];
            let mut event = [0; EVENT];
            event[..2].copy_from_slice(&kind.to_le_bytes());
            event[2..4].copy_from_slice(&code.to_le_bytes());
            event[4..].copy_from_slice(&value.to_le_bytes());
            let memory = env.memory();
            let done = with_writable(queue, memory, chain, |mut data| data.write(&event));
            queue.give_back(memory, chain.head, done as u32);
            self.waiting -= 1;
        }
        Ok(())
    }

    /// Returns the chains of the driver's own events, unread.
    fn drop_status(&mut self, env: &mut dyn Env) -> Result<(), RingError> {
        let queue = &mut self.queues[STATUS];
        // Each round takes a chain, of which there are at most as many as entries.
        for _ in 0..ENTRIES {
            let Some(chain) = queue.pop(env.memory())? else { break };
            queue.give_back(env.memory(), chain.head, 0);
        }
        queue.await_driver(env.memory()).map(drop)
    }

    /// Writes the selected item to `to` and returns its length.
    fn item(&self, to: &mut [u8]) -> usize {
        let [item, part] = self.selected;
        let mut put = |bytes: &[u8]| {
            to.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            bytes.len()
        };
        match (item, part) {
            (NAME, 0) => put(NAME_TEXT),
            (IDENTITY, 0) => {
                let mut words = [0; 8];
                words[..2].copy_from_slice(&VIRTUAL_BUS.to_le_bytes());
                put(&words)
            }
            (EVENT_BITS, kind) if u16::from(kind) == KEY => {
                let mut bits = [0; POWER as usize / 8 + 1];
                bits[POWER as usize / 8] = 1 << (POWER % 8);
                put(&bits)
            }
            _ => 0,
        }
    }
}

impl VirtioDevice for PowerButton {
    fn kind(&self) -> Kind {
        Kind::Input
    }

    fn features(&self) -> u64 {
        0
    }

    fn queues(&mut self) -> &mut [Queue] {
        &mut self.queues
    }

    fn config(&self, to: &mut [u8; CONFIG_LEN]) {
        to[..2].copy_from_slice(&self.selected);
        to[SIZE] = self.item(&mut to[ITEM..]) as u8;
    }

    fn write_config(&mut self, offset: u64, size: u8, value: u64, env: &mut dyn Env) {
        match (offset, size) {
            (SELECT, 1) => self.selected[0] = value as u8,
            (PART, 1) => self.selected[1] = value as u8,
            (SELECT, 2) => self.selected = (value as u16).to_le_bytes(),
            _ => env.missing("virtio: read-only configuration written", offset),
        }
    }

    fn start(&mut self, _: u64, _: &mut dyn Env) {
        // A press before the guest has a driver is lost.
        self.waiting = 0;
    }

    fn notify(&mut self, queue: usize, env: &mut dyn Env) -> Result<(), RingError> {
        match queue {
            EVENTS => self.send(env),
            _ => self.drop_status(env),
        }
    }

    fn wake(&mut self, _: u8, env: &mut dyn Env) -> Result<bool, RingError> {
        self.send(env).map(|()| false)
    }

    fn reset(&mut self, _: &mut dyn Env) {
        self.selected = [0; 2];
        self.waiting = 0;
    }
}
