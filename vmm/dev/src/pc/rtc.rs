//! Real-time clock MC146818 with CMOS memory.
//!
//! State: the index, 128 bytes of memory, the wall-clock second at VM time 0, interrupt flags.
//! Features: time from VM time, BCD or binary, 12 or 24 hours, century at 0x32, update-in-progress,
//! setting the clock (at once, or under the SET bit), alarm with don't-care bytes, periodic and
//! update interrupts (line 0), memory-size bytes as PC firmware leaves them, NMI mask bit of port
//! 0x70. Flags are derived from time when they are read; a timer runs only for an enabled interrupt
//! that is not pending already, so at most one interrupt is raised per read of register C.
//! Missing: stopping or shifting the divider (the bits are stored), daylight saving, square wave, a
//! day of the week that differs from the date's.
//! Documentation: Motorola MC146818A data sheet; IBM PC/AT Technical Reference, "Real-time clock";
//! ACPI 6.5, section 5.2.9 (century).

use vmm_bus::{Access, Device, Env, NEVER, Nanos, Ticks};

/// Registers.
pub mod spec {
    /// RW: index and NMI mask (port 0x70).
    pub const INDEX: u64 = 0;
    /// RW: the indexed byte (port 0x71).
    pub const DATA: u64 = 1;
    /// Index port: NMI is masked.
    pub const INDEX_NMI_MASK: u8 = 1 << 7;

    /// Seconds.
    pub const SECONDS: u8 = 0x00;
    /// Alarm, seconds.
    pub const SECONDS_ALARM: u8 = 0x01;
    /// Minutes.
    pub const MINUTES: u8 = 0x02;
    /// Alarm, minutes.
    pub const MINUTES_ALARM: u8 = 0x03;
    /// Hours.
    pub const HOURS: u8 = 0x04;
    /// Alarm, hours.
    pub const HOURS_ALARM: u8 = 0x05;
    /// Day of the week, Sunday = 1.
    pub const WEEKDAY: u8 = 0x06;
    /// Day of the month.
    pub const DAY: u8 = 0x07;
    /// Month.
    pub const MONTH: u8 = 0x08;
    /// Year of the century.
    pub const YEAR: u8 = 0x09;
    /// Register A.
    pub const A: u8 = 0x0a;
    /// Register B.
    pub const B: u8 = 0x0b;
    /// Register C.
    pub const C: u8 = 0x0c;
    /// Register D.
    pub const D: u8 = 0x0d;
    /// Century; the FADT contains this index.
    pub const CENTURY: u8 = 0x32;

    /// Memory below 640 KiB, in KiB, low byte.
    pub const BASE_MEMORY: u8 = 0x15;
    /// Memory above 1 MiB, in KiB, at most 65535; low byte.
    pub const EXTENDED_MEMORY: u8 = 0x17;
    /// The same, as set by the memory test.
    pub const EXTENDED_MEMORY_TESTED: u8 = 0x30;
    /// Memory above 16 MiB, in 64 KiB, low byte.
    pub const HIGH_MEMORY: u8 = 0x34;
    /// Memory above 4 GiB, in 64 KiB, lowest of three bytes.
    pub const FAR_MEMORY: u8 = 0x5b;

    /// A: update in progress.
    pub const A_UIP: u8 = 1 << 7;
    /// A: rate of the periodic interrupt.
    pub const A_RATE: u8 = 0x0f;
    /// A after firmware: 32,768 Hz crystal, 1,024 Hz periodic rate.
    pub const A_DEFAULT: u8 = 0x26;
    /// B: 24 hours (else 12).
    pub const B_24H: u8 = 1 << 1;
    /// B: binary (else BCD).
    pub const B_BINARY: u8 = 1 << 2;
    /// B: update interrupt. Its flag in C has the same bit, as have alarm and periodic interrupt.
    pub const B_UPDATE: u8 = 1 << 4;
    /// B: alarm interrupt.
    pub const B_ALARM: u8 = 1 << 5;
    /// B: periodic interrupt.
    pub const B_PERIODIC: u8 = 1 << 6;
    /// B: the clock is stopped and can be set.
    pub const B_SET: u8 = 1 << 7;
    /// C: the interrupt line is high.
    pub const C_IRQ: u8 = 1 << 7;
    /// D: memory and time are valid.
    pub const D_VALID: u8 = 1 << 7;

    /// Hours in 12-hour mode: afternoon.
    pub const HOURS_PM: u8 = 1 << 7;
    /// Alarm bytes from here on match everything.
    pub const ALARM_ANY: u8 = 0xc0;
    /// The update-in-progress bit rises this long before an update, in nanoseconds.
    pub const UIP_NANOS: u64 = 244_000;
    /// The crystal.
    pub const HZ: u64 = 32_768;
}
use spec::*;

const CLOCK: Ticks = Ticks::new(HZ);
const SECOND: Nanos = 1_000_000_000;
const DAY_SECONDS: i64 = 86_400;
/// End of the year 9999, the last that two bytes of year and century can show.
const LAST_SECOND: i64 = 253_402_300_799;
const INTERRUPTS: u8 = B_UPDATE | B_ALARM | B_PERIODIC;

/// Configuration of the clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Config {
    /// Wall-clock time (Unix seconds, UTC) at VM time 0.
    pub unix_seconds_at_zero: i64,
    /// Its part of a second in nanoseconds, less than 1,000,000,000.
    pub nanos_at_zero: u32,
    /// Bytes of memory below 4 GiB.
    pub low_memory: u64,
    /// Bytes of memory above 4 GiB.
    pub high_memory: u64,
}

/// The clock. Offset 0 is port 0x70, offset 1 port 0x71; line 0 is IRQ8.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rtc {
    index: u8,
    nmi_masked: bool,
    /// The time bytes at 0 to 9 and at [`CENTURY`] are valid only under [`B_SET`].
    memory: [u8; 128],
    /// Wall-clock second at time 0.
    epoch: i64,
    /// Time at VM time 0: times of this clock begin with a second.
    phase: Nanos,
    /// Flags of register C up to `checked`.
    flags: u8,
    checked: Nanos,
    armed: Nanos,
}

impl Rtc {
    /// Creates the clock as firmware leaves it.
    pub const fn new(config: Config) -> Self {
        let mut memory = [0; 128];
        memory[A as usize] = A_DEFAULT;
        memory[B as usize] = B_24H;
        memory[D as usize] = D_VALID;
        let kib = min(config.low_memory / 1024, 640);
        let extended = min((config.low_memory / 1024).saturating_sub(1024), 0xffff);
        let high = min(config.low_memory.saturating_sub(16 << 20) >> 16, 0xffff);
        let far = min(config.high_memory >> 16, 0xff_ffff);
        memory = put(memory, BASE_MEMORY, kib, 2);
        memory = put(memory, EXTENDED_MEMORY, extended, 2);
        memory = put(memory, EXTENDED_MEMORY_TESTED, extended, 2);
        memory = put(memory, HIGH_MEMORY, high, 2);
        memory = put(memory, FAR_MEMORY, far, 3);
        Self {
            index: 0,
            nmi_masked: false,
            memory,
            epoch: config.unix_seconds_at_zero,
            phase: config.nanos_at_zero as Nanos,
            flags: 0,
            checked: config.nanos_at_zero as Nanos,
            armed: NEVER,
        }
    }

    /// True if the guest has masked the NMI through port 0x70.
    pub const fn nmi_masked(&self) -> bool {
        self.nmi_masked
    }

    fn byte(&self, index: u8) -> u8 {
        self.memory[usize::from(index & 0x7f)]
    }

    fn set_byte(&mut self, index: u8, value: u8) {
        self.memory[usize::from(index & 0x7f)] = value;
    }

    fn is_stopped(&self) -> bool {
        self.byte(B) & B_SET != 0
    }

    /// Present time of this clock.
    fn now(&self, env: &dyn Env) -> Nanos {
        env.now().saturating_add(self.phase)
    }

    /// Wall-clock second at `now`.
    fn second(&self, now: Nanos) -> i64 {
        self.epoch.saturating_add((now / SECOND) as i64).clamp(0, LAST_SECOND)
    }

    /// Encodes a number in the format of the registers.
    fn encode(&self, value: u8) -> u8 {
        if self.byte(B) & B_BINARY != 0 { value } else { (value / 10) << 4 | (value % 10) }
    }

    /// Decodes a number in the format of the registers. BCD digits above 9 have their place value.
    fn decode(&self, value: u8) -> u8 {
        if self.byte(B) & B_BINARY != 0 { value } else { (value >> 4) * 10 + (value & 0xf) }
    }

    fn encode_hours(&self, hours: u8) -> u8 {
        if self.byte(B) & B_24H != 0 {
            return self.encode(hours);
        }
        let afternoon = if hours >= 12 { HOURS_PM } else { 0 };
        self.encode((hours + 11) % 12 + 1) | afternoon
    }

    fn decode_hours(&self, value: u8) -> u8 {
        if self.byte(B) & B_24H != 0 {
            return self.decode(value);
        }
        let afternoon = if value & HOURS_PM != 0 { 12 } else { 0 };
        self.decode(value & !HOURS_PM) % 12 + afternoon
    }

    /// Writes the time at `now` into the registers.
    fn latch_time(&mut self, now: Nanos) {
        let time = Civil::from_second(self.second(now));
        self.set_byte(SECONDS, self.encode(time.second));
        self.set_byte(MINUTES, self.encode(time.minute));
        self.set_byte(HOURS, self.encode_hours(time.hour));
        self.set_byte(WEEKDAY, self.encode(time.weekday));
        self.set_byte(DAY, self.encode(time.day));
        self.set_byte(MONTH, self.encode(time.month));
        self.set_byte(YEAR, self.encode((time.year % 100) as u8));
        self.set_byte(CENTURY, self.encode((time.year / 100) as u8));
    }

    /// Sets the clock to the time in the registers. An invalid time becomes the nearest valid one.
    fn load_time(&mut self, now: Nanos) {
        let number = |index| self.decode(self.byte(index));
        let time = Civil {
            year: u16::from(number(CENTURY).min(99)) * 100 + u16::from(number(YEAR).min(99)),
            month: number(MONTH).clamp(1, 12),
            day: number(DAY).clamp(1, 31),
            weekday: 1,
            hour: self.decode_hours(self.byte(HOURS)).min(23),
            minute: number(MINUTES).min(59),
            second: number(SECONDS).min(59),
        };
        self.epoch = time.to_second() - (now / SECOND) as i64;
    }

    /// Ticks of the crystal between periodic interrupts.
    fn period(&self) -> Option<u64> {
        match self.byte(A) & A_RATE {
            0 => None,
            // 256 Hz and 128 Hz, as rates 8 and 9 with the 32,768 Hz crystal.
            rate @ 1..=2 => Some(1 << (rate + 6)),
            rate => Some(1 << (rate - 1)),
        }
    }

    /// Time of the next alarm after `now`.
    fn next_alarm(&self, now: Nanos) -> Option<Nanos> {
        let matches = |index, value, alarm: u8| {
            let byte = self.byte(index);
            byte >= ALARM_ANY || alarm == value
        };
        let hour_alarm = self.decode_hours(self.byte(HOURS_ALARM));
        let minute_alarm = self.decode(self.byte(MINUTES_ALARM));
        let second_alarm = self.decode(self.byte(SECONDS_ALARM));
        let today = self.second(now);
        let mut at = today + 1;
        // Each step skips a whole hour, minute or second: at most 25 + 60 + 60 steps.
        while at <= today + DAY_SECONDS {
            let of_day = at % DAY_SECONDS;
            let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
            if !matches(HOURS_ALARM, hour as u8, hour_alarm) {
                at += 3600 - of_day % 3600;
            } else if !matches(MINUTES_ALARM, minute as u8, minute_alarm) {
                at += 60 - second;
            } else if !matches(SECONDS_ALARM, second as u8, second_alarm) {
                at += 1;
            } else {
                return (now / SECOND + (at - today) as u64).checked_mul(SECOND);
            }
        }
        None
    }

    /// Time of the next periodic interrupt after `now`.
    fn next_period(&self, now: Nanos) -> Option<Nanos> {
        let period = self.period()?;
        Some(CLOCK.nanos((CLOCK.in_nanos(now) / period + 1).saturating_mul(period)))
    }

    /// Updates the flags to `now`.
    fn refresh(&mut self, now: Nanos) {
        let since = self.checked;
        if now <= since {
            return;
        }
        if self.next_period(since).is_some_and(|at| at <= now) {
            self.flags |= B_PERIODIC;
        }
        if !self.is_stopped() && now / SECOND != since / SECOND {
            self.flags |= B_UPDATE;
            // An alarm is possible only in this case.
            if self.flags & B_ALARM == 0 && self.next_alarm(since).is_some_and(|at| at <= now) {
                self.flags |= B_ALARM;
            }
        }
        self.checked = now;
    }

    fn pending(&self) -> bool {
        self.flags & self.byte(B) & INTERRUPTS != 0
    }

    /// Sets the line, and the timer for the next enabled event unless the line is high already.
    fn update(&mut self, now: Nanos, env: &mut dyn Env) {
        env.set_line(0, self.pending());
        let enabled = if self.pending() { 0 } else { self.byte(B) };
        let mut next = NEVER;
        if enabled & B_PERIODIC != 0 {
            next = next.min(self.next_period(now).unwrap_or(NEVER));
        }
        if enabled & B_UPDATE != 0 && !self.is_stopped() {
            next = next.min((now / SECOND + 1).saturating_mul(SECOND));
        }
        if enabled & B_ALARM != 0 && !self.is_stopped() {
            next = next.min(self.next_alarm(now).unwrap_or(NEVER));
        }
        if next != self.armed {
            self.armed = next;
            env.arm(0, if next == NEVER { NEVER } else { next.saturating_sub(self.phase) });
        }
    }

    fn read_data(&mut self, env: &mut dyn Env) -> u8 {
        let now = self.now(env);
        match self.index {
            SECONDS | MINUTES | HOURS | WEEKDAY..=YEAR | CENTURY => {
                if !self.is_stopped() {
                    self.latch_time(now);
                }
                self.byte(self.index)
            }
            A => {
                let near = now % SECOND >= SECOND - UIP_NANOS;
                let updating = if near && !self.is_stopped() { A_UIP } else { 0 };
                self.byte(A) & !A_UIP | updating
            }
            C => {
                self.refresh(now);
                let irq = if self.pending() { C_IRQ } else { 0 };
                let flags = self.flags | irq;
                self.flags = 0;
                self.update(now, env);
                flags
            }
            index => self.byte(index),
        }
    }

    fn write_data(&mut self, value: u8, env: &mut dyn Env) {
        let now = self.now(env);
        self.refresh(now);
        match self.index {
            SECONDS | MINUTES | HOURS | WEEKDAY..=YEAR | CENTURY => {
                if self.is_stopped() {
                    self.set_byte(self.index, value);
                } else {
                    self.latch_time(now);
                    self.set_byte(self.index, value);
                    self.load_time(now);
                }
            }
            A => self.set_byte(A, value & !A_UIP),
            B => {
                let was_stopped = self.is_stopped();
                if !was_stopped {
                    self.latch_time(now);
                }
                let is_stopped = value & B_SET != 0;
                if was_stopped && !is_stopped {
                    // In the format in which the bytes were written.
                    self.set_byte(B, value);
                    self.load_time(now);
                } else {
                    // SET disables the update interrupt.
                    self.set_byte(B, if is_stopped { value & !B_UPDATE } else { value });
                }
            }
            C | D => {}
            index => self.set_byte(index, value),
        }
        if self.index <= B {
            self.update(now, env);
        }
    }
}

const fn min(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}

/// Stores the `count` low bytes of `value` at `index`.
const fn put(mut memory: [u8; 128], index: u8, value: u64, count: usize) -> [u8; 128] {
    let mut i = 0;
    while i < count {
        memory[index as usize + i] = (value >> (8 * i)) as u8;
        i += 1;
    }
    memory
}

/// A date and a time of day.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Civil {
    year: u16,
    month: u8,
    day: u8,
    /// Sunday = 1.
    weekday: u8,
    hour: u8,
    minute: u8,
    second: u8,
}

/// Days before each month of a year that begins in March (the leap day is last).
const MONTH_STARTS: [i64; 12] = [0, 31, 61, 92, 122, 153, 184, 214, 245, 275, 306, 337];
/// Days from 1 March of year 0 to 1 January 1970.
const UNIX_DAY: i64 = 719_468;

impl Civil {
    fn to_second(self) -> i64 {
        // Years begin in March: January and February belong to the year before.
        let month = (usize::from(self.month) + 9) % 12;
        let year = i64::from(self.year) - i64::from(self.month <= 2);
        let leaps = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
        let days = year * 365 + leaps + MONTH_STARTS[month] + i64::from(self.day) - 1 - UNIX_DAY;
        let of_day =
            i64::from(self.hour) * 3600 + i64::from(self.minute) * 60 + i64::from(self.second);
        days * DAY_SECONDS + of_day
    }

    fn from_second(second: i64) -> Self {
        let unix_day = second.div_euclid(DAY_SECONDS);
        let of_day = second.rem_euclid(DAY_SECONDS);
        let day = unix_day + UNIX_DAY;
        // The last day of 400, 100 and 4 years is a leap day and must not start a further year.
        let (cycle, day) = (day.div_euclid(146_097), day.rem_euclid(146_097));
        let century = (day / 36_524).min(3);
        let day = day - century * 36_524;
        let (four, day) = (day / 1_461, day % 1_461);
        let one = (day / 365).min(3);
        let day = day - one * 365;
        let month = MONTH_STARTS.partition_point(|start| *start <= day) - 1;
        let year = cycle * 400 + century * 100 + four * 4 + one + i64::from(month >= 10);
        Self {
            year: year as u16,
            month: ((month + 2) % 12 + 1) as u8,
            day: (day - MONTH_STARTS[month] + 1) as u8,
            weekday: ((unix_day + 4).rem_euclid(7) + 1) as u8,
            hour: (of_day / 3600) as u8,
            minute: (of_day / 60 % 60) as u8,
            second: (of_day % 60) as u8,
        }
    }
}

impl Device for Rtc {
    fn read(&mut self, access: Access, env: &mut dyn Env) -> u64 {
        match access.offset {
            DATA => self.read_data(env).into(),
            // The index cannot be read on a PC.
            _ => access.open_bus(),
        }
    }

    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        let value = value as u8;
        match access.offset {
            INDEX => {
                self.index = value & !INDEX_NMI_MASK;
                self.nmi_masked = value & INDEX_NMI_MASK != 0;
            }
            DATA => self.write_data(value, env),
            _ => {}
        }
    }

    fn wake(&mut self, timer: u8, env: &mut dyn Env) {
        if timer == 0 {
            self.armed = NEVER;
            let now = self.now(env);
            self.refresh(now);
            self.update(now, env);
        }
    }

    /// Time and memory are battery-backed: reset only disables interrupts.
    fn reset(&mut self, env: &mut dyn Env) {
        let now = self.now(env);
        self.refresh(now);
        self.index = 0;
        self.nmi_masked = false;
        self.flags = 0;
        let b = self.byte(B) & !INTERRUPTS;
        self.set_byte(B, b);
        self.update(now, env);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_round_trip() {
        for (second, date) in [
            (0, (1970, 1, 1, 5)),
            (951_782_400, (2000, 2, 29, 3)),
            (951_868_800, (2000, 3, 1, 4)),
            (4_107_542_399, (2100, 2, 28, 1)),
            (4_107_542_400, (2100, 3, 1, 2)),
            (LAST_SECOND, (9999, 12, 31, 6)),
        ] {
            let civil = Civil::from_second(second);
            assert_eq!((civil.year, civil.month, civil.day, civil.weekday), date);
            assert_eq!(civil.to_second(), second);
        }
        for day in 0..LAST_SECOND / DAY_SECONDS {
            let second = day * DAY_SECONDS + day % DAY_SECONDS;
            assert_eq!(Civil::from_second(second).to_second(), second);
        }
    }
}
