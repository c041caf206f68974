//! A scripted [`Env`]: what a device did is recorded, what the world does is said by the test.

use crate::{Access, Device, Env, InterruptMessage, MachineEvent, NEVER, Nanos, WAKE_INPUT};
use std::collections::{BTreeMap, VecDeque};
use std::vec::Vec;

/// The world of one device under test.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// The clock. Set it directly, or let [`Script::advance`] fire the timers on the way.
    pub now: Nanos,
    /// Present level of each output line.
    pub lines: BTreeMap<u8, bool>,
    /// Every change of a line, in order.
    pub edges: Vec<(u8, bool)>,
    /// Armed deadlines by timer.
    pub deadlines: BTreeMap<u8, Nanos>,
    /// Bytes put to the outside.
    pub output: Vec<u8>,
    /// How many more bytes the outside takes; `None`: all.
    pub room: Option<usize>,
    /// Bytes waiting outside.
    pub input: VecDeque<u8>,
    /// Messages sent.
    pub messages: Vec<InterruptMessage>,
    /// Machine events.
    pub events: Vec<MachineEvent>,
    /// Missing features that were touched.
    pub missing: Vec<(&'static str, u64)>,
}

impl Script {
    /// A world at time 0 where nothing has happened.
    pub fn new() -> Self {
        Self::default()
    }

    /// The level of `line`; a line never set is low.
    pub fn line(&self, line: u8) -> bool {
        self.lines.get(&line).copied().unwrap_or(false)
    }

    /// How often `line` has risen.
    pub fn rises(&self, line: u8) -> usize {
        self.edges.iter().filter(|e| **e == (line, true)).count()
    }

    /// Reads one byte register.
    pub fn inb(&mut self, device: &mut dyn Device, offset: u64) -> u8 {
        device.read(Access::new(offset, 1), self) as u8
    }

    /// Writes one byte register.
    pub fn outb(&mut self, device: &mut dyn Device, offset: u64, value: u8) {
        device.write(Access::new(offset, 1), value.into(), self);
    }

    /// Reads one 32-bit register.
    pub fn inl(&mut self, device: &mut dyn Device, offset: u64) -> u32 {
        device.read(Access::new(offset, 4), self) as u32
    }

    /// Writes one 32-bit register.
    pub fn outl(&mut self, device: &mut dyn Device, offset: u64, value: u32) {
        device.write(Access::new(offset, 4), value.into(), self);
    }

    /// Lets bytes arrive from outside.
    pub fn send(&mut self, device: &mut dyn Device, bytes: &[u8]) {
        self.input.extend(bytes);
        device.wake(WAKE_INPUT, self);
    }

    /// Moves the clock forward by `span`, waking `device` at each deadline on the way, in order.
    ///
    /// # Panics
    /// If one timer fires 100,000 times: the device re-arms without end.
    pub fn advance(&mut self, device: &mut dyn Device, span: Nanos) {
        let end = self.now.saturating_add(span);
        for _ in 0..100_000 {
            let next = self.deadlines.iter().min_by_key(|(_, deadline)| **deadline);
            let Some((&timer, &deadline)) = next.filter(|(_, deadline)| **deadline <= end) else {
                self.now = end;
                return;
            };
            self.now = self.now.max(deadline);
            self.deadlines.remove(&timer);
            device.wake(timer, self);
        }
        panic!("a timer without end");
    }
}

impl Env for Script {
    fn now(&self) -> Nanos {
        self.now
    }

    fn set_line(&mut self, line: u8, level: bool) {
        if self.lines.insert(line, level).unwrap_or(false) != level {
            self.edges.push((line, level));
        }
    }

    fn arm(&mut self, timer: u8, deadline: Nanos) {
        if deadline == NEVER {
            self.deadlines.remove(&timer);
        } else {
            self.deadlines.insert(timer, deadline);
        }
    }

    fn put(&mut self, byte: u8) -> bool {
        match &mut self.room {
            Some(0) => return false,
            Some(room) => *room -= 1,
            None => {}
        }
        self.output.push(byte);
        true
    }

    fn take(&mut self) -> Option<u8> {
        self.input.pop_front()
    }

    fn message(&mut self, message: InterruptMessage) {
        self.messages.push(message);
    }

    fn machine(&mut self, event: MachineEvent) {
        self.events.push(event);
    }

    fn missing(&mut self, what: &'static str, value: u64) {
        self.missing.push((what, value));
    }
}
