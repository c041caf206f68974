//! A controller with one disk, for tests: time passes only where the driver waits, and commands end
//! between any two register accesses. It panics when the driver violates the specification.

use std::cell::{Ref, RefCell};
use std::collections::BTreeSet;

use super::*;

pub const PHYSICAL: u64 = 1 << 32;
const MILLISECOND: u64 = 1_000_000;
/// Of `ERROR`: the link came up or was lost.
const LINK_CHANGED: u32 = 1 << 16;

/// Faults and delays of the disk.
#[derive(Clone, Debug)]
pub struct FakeConfig {
    /// The port's number.
    pub number: u32,
    /// NCQ is supported.
    pub queues: bool,
    /// 64-bit addresses are supported.
    pub wide: bool,
    /// First word of the serial number.
    pub serial: u16,
    /// Word of the identity about the size of sectors.
    pub sector_size: u16,
    /// Sectors that cannot be read or written.
    pub bad: BTreeSet<u64>,
    /// Flushes fail.
    pub fails_flush: bool,
    /// The device clears the bit of a failed plain command, as for a successful one.
    pub clears_failed: bool,
    /// A command that fails leaves the disk busy.
    pub stays_busy: bool,
    /// Value of all registers while the function is switched off.
    pub off: Option<u32>,
    /// Milliseconds for: the controller's reset, the port's stop, the link, the disk after a reset,
    /// IDENTIFY.
    pub reset: u64,
    pub stop: u64,
    pub link: u64,
    pub ready: u64,
    pub identify: u64,
}

impl Default for FakeConfig {
    fn default() -> Self {
        Self {
            number: 2,
            queues: true,
            wide: true,
            serial: 1,
            sector_size: 0,
            bad: BTreeSet::new(),
            fails_flush: false,
            clears_failed: false,
            stays_busy: false,
            off: None,
            reset: 1,
            stop: 1,
            link: 5,
            ready: 5,
            identify: 1,
        }
    }
}

#[derive(Default)]
struct State {
    now: u64,
    /// Register accesses until the next command ends; `None`: the test ends it.
    countdown: Option<u32>,
    control: u32,
    command: u32,
    interrupts: u32,
    errors: u32,
    issue: u32,
    queued: u32,
    link_control: u32,
    link_reset_at: u64,
    /// Ends of these operations.
    reset_until: u64,
    running_until: u64,
    link_from: u64,
    ready_from: u64,
    identify_at: Option<u64>,
    busy: bool,
    /// An error stopped the port; the disk has aborted queued commands until the link is reset.
    stopped: bool,
    needs_link_reset: bool,
    /// Commands in the order in which they end: slot, whether queued.
    pending: std::vec::Vec<u32>,
    /// Executed commands: ATA command and sector.
    done: std::vec::Vec<(u8, u64)>,
    resets_of_link: u32,
}

/// The controller as the driver accesses it.
pub struct Fake<'m> {
    config: RefCell<FakeConfig>,
    memory: &'m [AtomicU64],
    state: RefCell<State>,
}

pub fn memory() -> std::vec::Vec<AtomicU64> {
    (0..BYTES / 8).map(|_| AtomicU64::new(0)).collect()
}

impl<'m> Fake<'m> {
    pub fn new(config: FakeConfig, memory: &'m [AtomicU64]) -> Self {
        let link_from = config.link * MILLISECOND;
        let ready_from = link_from + config.ready * MILLISECOND;
        let state = State { link_from, ready_from, ..State::default() };
        Self { config: RefCell::new(config), memory, state: RefCell::new(state) }
    }

    /// Changes faults and delays.
    pub fn change(&self, config: FakeConfig) {
        *self.config.borrow_mut() = config;
    }

    fn config(&self) -> Ref<'_, FakeConfig> {
        self.config.borrow()
    }

    /// Lets the next command end now.
    pub fn end_one(&self) {
        self.end(&mut self.state.borrow_mut());
    }

    /// Lets the next command end at an access of a register, counted from now.
    pub fn end_after(&self, accesses: u32) {
        self.state.borrow_mut().countdown = Some(accesses);
    }

    /// Lets nanoseconds pass.
    pub fn pass(&self, time: u64) {
        self.state.borrow_mut().now += time;
    }

    /// Reports an error, without a command.
    pub fn interrupt(&self, error: u32) {
        self.state.borrow_mut().interrupts |= error;
    }

    /// Loses the link, which comes up again.
    pub fn lose_link(&self) {
        self.state.borrow_mut().errors |= LINK_CHANGED;
    }

    /// Returns the commands executed without an error: ATA command and sector.
    pub fn done(&self) -> std::vec::Vec<(u8, u64)> {
        self.state.borrow().done.clone()
    }

    pub fn resets_of_link(&self) -> u32 {
        self.state.borrow().resets_of_link
    }

    pub fn pending(&self) -> usize {
        self.state.borrow().pending.len()
    }

    fn byte(&self, at: usize) -> u8 {
        self.memory[at / 8].load(Ordering::Relaxed).to_le_bytes()[at % 8]
    }

    /// Returns ATA command and sector of a slot.
    fn fis(&self, slot: u32) -> (u8, u64) {
        let table = TABLES + TABLE * slot as usize;
        let at = |index| u64::from(self.byte(table + index));
        let sector = [4, 5, 6, 8, 9, 10].iter().rev().fold(0, |sum, &index| sum << 8 | at(index));
        (self.byte(table + 2), sector)
    }

    /// Ends the next command.
    fn end(&self, state: &mut State) {
        if state.stopped || state.pending.is_empty() {
            return;
        }
        let slot = state.pending.remove(0);
        let bit = 1 << slot;
        let queued = state.queued & bit != 0;
        let (command, sector) = self.fis(slot);
        let is_good = match command {
            ata::FLUSH => !self.config().fails_flush,
            ata::MANAGE_DATA => true,
            _ => !self.config().bad.contains(&sector),
        };
        if is_good {
            state.done.push((command, sector));
            state.issue &= !bit;
            state.queued &= !bit;
            state.interrupts |= if queued { 8 } else { 1 };
            return;
        }
        state.interrupts |= 1 << 30;
        state.stopped = true;
        state.busy = self.config().stays_busy;
        state.needs_link_reset = queued;
        if !queued && self.config().clears_failed {
            state.issue &= !bit;
        }
        state.pending.clear();
    }

    /// Applies events that are due at this time, or between two accesses.
    fn advance(&self, state: &mut State) {
        if state.identify_at.is_some_and(|at| state.now >= at) {
            state.identify_at = None;
            self.identity();
            state.issue = 0;
            state.interrupts |= 2;
        }
        match state.countdown {
            Some(0) => {
                state.countdown = None;
                self.end(state);
            }
            Some(left) => state.countdown = Some(left - 1),
            None => {}
        }
    }

    fn identity(&self) {
        let set = |word: usize, value: u64| {
            let cell = &self.memory[(IDENTITY + 2 * word) / 8];
            cell.fetch_or(value << (16 * (word % 4)), Ordering::Relaxed);
        };
        set(10, self.config().serial.into());
        set(83, 1 << 10);
        set(106, self.config().sector_size.into());
        set(76, u64::from(self.config().queues) << 8);
        set(75, 31);
        set(100, 4096);
        set(169, 1);
    }

    fn issue(&self, state: &mut State, slots: u32) {
        assert!(state.command & port::START != 0, "a command for a port that is stopped");
        assert!(state.issue & slots == 0, "slots {slots:b} are issued twice");
        if state.stopped {
            // The driver has yet to see it.
            state.issue |= slots;
            return;
        }
        assert!(!state.needs_link_reset, "a command before the link was reset");
        let queued = state.queued & slots;
        assert!(queued == 0 || queued == slots, "queued and plain commands together");
        let busy = state.pending.iter().fold(0u32, |sum, slot| sum | 1 << slot);
        assert!(
            queued != 0 || busy == 0 && slots.is_power_of_two(),
            "a plain command beside other commands"
        );
        state.issue |= slots;
        for slot in (0..32).filter(|slot| slots >> slot & 1 != 0) {
            let command = self.fis(slot).0;
            let is_queued = matches!(command, ata::READ_QUEUED | ata::WRITE_QUEUED);
            assert_eq!(is_queued, queued != 0, "command {command:#x}");
            match command {
                ata::IDENTIFY => {
                    state.identify_at = Some(state.now + self.config().identify * MILLISECOND);
                }
                _ => state.pending.push(slot),
            }
        }
    }

    fn set_command(&self, state: &mut State, value: u32) {
        let running = state.now < state.running_until;
        if value & port::START != 0 && state.command & port::START == 0 {
            assert!(!running && value & port::RECEIVE != 0, "the port is started too early");
            assert!(!self.is_busy(state), "the port is started while the disk is busy");
        }
        if value & port::START == 0 && state.command & port::START != 0 {
            state.running_until = state.now + self.config().stop * MILLISECOND;
            (state.issue, state.queued, state.stopped) = (0, 0, false);
            state.pending.clear();
        }
        state.command = value & !(port::RUNNING | port::RECEIVING);
    }

    fn set_link_control(&self, state: &mut State, value: u32) {
        let (was, is) = (state.link_control & 0xf, value & 0xf);
        if is == port::LINK_RESET {
            assert!(state.command & port::START == 0, "the link is reset while the port runs");
            state.link_reset_at = state.now;
            state.link_from = u64::MAX;
        } else if was == port::LINK_RESET {
            assert!(
                state.now >= state.link_reset_at + MILLISECOND,
                "a reset too short for the device"
            );
            state.link_from = state.now + self.config().link * MILLISECOND;
            state.ready_from = state.link_from + self.config().ready * MILLISECOND;
            (state.busy, state.needs_link_reset) = (false, false);
            state.resets_of_link += 1;
            // The link was lost, as in every reset.
            state.errors |= LINK_CHANGED;
        }
        state.link_control = value;
    }

    fn is_busy(&self, state: &State) -> bool {
        let heard = state.now >= state.ready_from && state.command & port::RECEIVE != 0;
        state.busy || !heard
    }
}

impl Controller for &Fake<'_> {
    fn length(&self) -> u64 {
        PORT + PORT_LENGTH * 6
    }

    fn read(&self, register: u64) -> u32 {
        if let Some(value) = self.config().off {
            return value;
        }
        let state = &mut *self.state.borrow_mut();
        self.advance(state);
        let Some(offset) = register.checked_sub(PORT) else {
            return match register {
                host::CAPABILITIES => {
                    let FakeConfig { queues, wide, .. } = *self.config();
                    0x1f << 8 | u32::from(queues) << 30 | u32::from(wide) << 31
                }
                host::CONTROL => state.control | u32::from(state.now < state.reset_until),
                host::PORTS => 0b111111,
                _ => 0,
            };
        };
        if offset / PORT_LENGTH != u64::from(self.config().number) {
            return 0;
        }
        let present = state.link_from != u64::MAX;
        let since = |from| state.now >= from;
        match offset % PORT_LENGTH {
            port::INTERRUPTS if state.errors & LINK_CHANGED != 0 => {
                state.interrupts | port::LINK_CHANGED
            }
            port::INTERRUPTS => state.interrupts,
            port::COMMAND => {
                let running = state.command & port::START != 0 || !since(state.running_until);
                let receiving = state.command & port::RECEIVE != 0;
                state.command | u32::from(running) << 15 | u32::from(receiving) << 14
            }
            port::TASK_FILE => {
                if self.is_busy(state) {
                    0x80
                } else {
                    0x50
                }
            }
            port::SIGNATURE => {
                if self.is_busy(state) {
                    u32::MAX
                } else {
                    DISK_SIGNATURE
                }
            }
            port::LINK if present && since(state.link_from) => 0x123,
            port::LINK => u32::from(present),
            port::LINK_CONTROL => state.link_control,
            port::ERROR => state.errors,
            port::QUEUED => state.queued,
            port::ISSUE => state.issue,
            _ => 0,
        }
    }

    fn write(&self, register: u64, value: u32) {
        let state = &mut *self.state.borrow_mut();
        self.advance(state);
        let Some(offset) = register.checked_sub(PORT) else {
            if register == host::CONTROL {
                state.control = value & !host::RESET;
                if value & host::RESET != 0 {
                    state.reset_until = state.now + self.config().reset * MILLISECOND;
                }
            }
            return;
        };
        if offset / PORT_LENGTH != u64::from(self.config().number) {
            return;
        }
        match offset % PORT_LENGTH {
            port::INTERRUPTS => state.interrupts &= !value,
            port::COMMAND => self.set_command(state, value),
            port::LINK_CONTROL => self.set_link_control(state, value),
            port::ERROR => state.errors &= !value,
            port::QUEUED => state.queued |= value,
            port::ISSUE => self.issue(state, value),
            _ => {}
        }
    }

    fn now(&self) -> u64 {
        self.state.borrow().now
    }

    fn pause(&self) {
        self.state.borrow_mut().now += MILLISECOND / 10;
    }
}
