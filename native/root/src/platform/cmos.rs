//! The machine's wall clock: the real-time clock of a PC (Motorola MC146818A data sheet).

use native_rt::start::Boot;
use native_rt::{Ports, time};

const INDEX: u16 = 0;
const DATA: u16 = 1;

const SECONDS: u8 = 0;
const MINUTES: u8 = 2;
const HOURS: u8 = 4;
const DAY: u8 = 7;
const MONTH: u8 = 8;
const YEAR: u8 = 9;
const STATUS_A: u8 = 10;
const STATUS_B: u8 = 11;
const A_UPDATING: u8 = 1 << 7;
const B_24_HOURS: u8 = 1 << 1;
const B_BINARY: u8 = 1 << 2;
const PM: u8 = 1 << 7;
/// Base of the two-digit year.
const CENTURY: u64 = 2000;
/// Attempts to read a stable time from a clock that is being updated; the last one is taken as it
/// is.
const MAX_READS: u32 = 10_000;

/// Reads the wall clock: TSC, and seconds since 1970 at that time. Returns 1970 if the clock is
/// missing.
pub fn wall_clock(_: &Boot) -> (u64, u64) {
    let Some(ports) = Ports::new(0x70, 2) else { return (time::tsc(), 0) };
    let mut register = |index| {
        ports.write(INDEX, index);
        ports.read(DATA)
    };
    for _ in 0..MAX_READS {
        if register(STATUS_A) & A_UPDATING != 0 {
            continue;
        }
        let first = read(&mut register);
        let tsc = time::tsc();
        if register(STATUS_A) & A_UPDATING == 0 && first == read(&mut register) {
            return (tsc, first.unwrap_or(0));
        }
    }
    (time::tsc(), read(&mut register).unwrap_or(0))
}

/// Returns seconds since 1970; `None` if the registers hold no valid date.
fn read(register: &mut impl FnMut(u8) -> u8) -> Option<u64> {
    let status = register(STATUS_B);
    let number = |value: u8| {
        let digits = value & 0xf < 10 && value >> 4 < 10;
        match status & B_BINARY {
            0 if digits => Some((value >> 4) as u64 * 10 + (value & 0xf) as u64),
            0 => None,
            _ => Some(value as u64),
        }
    };
    let raw_hours = register(HOURS);
    let hours = if status & B_24_HOURS != 0 {
        number(raw_hours)?
    } else {
        number(raw_hours & !PM)? % 12 + if raw_hours & PM != 0 { 12 } else { 0 }
    };
    let (minutes, seconds) = (number(register(MINUTES))?, number(register(SECONDS))?);
    let (year, month, day) =
        (number(register(YEAR))?, number(register(MONTH))?, number(register(DAY))?);
    let valid = hours < 24
        && minutes < 60
        && seconds < 60
        && (1..=12).contains(&month)
        && (1..=31).contains(&day);
    valid.then(|| ((days(CENTURY + year, month, day) * 24 + hours) * 60 + minutes) * 60 + seconds)
}

/// Returns the days from 1970-01-01 to a later date, in the Gregorian calendar.
fn days(year: u64, month: u64, day: u64) -> u64 {
    // Years begin in March here, so that the leap day comes last.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leap_days = year / 4 - year / 100 + year / 400;
    // Months alternate between 31 and 30 days from March on, with a period of five.
    let day_of_year = (153 * month + 2) / 5 + day - 1;
    const TO_1970: u64 = 719_468;
    year * 365 + leap_days + day_of_year - TO_1970
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(registers: [u8; 12]) -> Option<u64> {
        read(&mut |index| registers[index as usize])
    }

    #[test]
    fn dates() {
        assert_eq!(days(1970, 1, 1), 0);
        assert_eq!(days(2000, 2, 29), 11_016);
        assert_eq!(days(2000, 3, 1), 11_017);
        assert_eq!(days(2026, 11, 21), 20_778);
    }

    #[test]
    fn both_notations_of_both_clocks() {
        // 2026-11-21 23:59:58
        let bcd = [0x58, 0, 0x59, 0, 0x23, 0, 0, 0x21, 0x11, 0x26, 0, B_24_HOURS];
        let binary = [58, 0, 59, 0, 11 | PM, 0, 0, 21, 11, 26, 0, B_BINARY];
        let seconds = 20_778 * 86_400 + 86_398;
        assert_eq!(at(bcd), Some(seconds));
        assert_eq!(at(binary), Some(seconds));
        let midnight = [0, 0, 0, 0, 0x12, 0, 0, 0x21, 0x11, 0x26, 0, 0];
        assert_eq!(at(midnight), Some(20_778 * 86_400));
    }

    #[test]
    fn no_date() {
        assert_eq!(at([0xff; 12]), None);
        assert_eq!(at([0; 12]), None);
    }
}
