//! TSC: frequency and conversion to nanoseconds.
//!
//! The frequency is reported by CPUID or calibrated against a timer of known frequency: the ACPI PM
//! timer (ACPI 6.5 §4.8.2.1), else the PIT (Intel 8254). The local APIC timer is calibrated at the
//! same time.

use crate::io::{in8, in32, out8};
use core::arch::x86_64::_rdtsc;
use kernel_run::time::Scale;
use spin::Once;

/// Frequency of the PM timer in Hz.
const PM_HZ: u64 = 3_579_545;
/// Minimum width of the PM timer: 24 bits.
const PM_MASK: u32 = 0xff_ffff;
/// Frequency of the PIT in Hz.
const PIT_HZ: u64 = 1_193_182;
/// Length of a calibration, as a fraction of a second.
const MEASURES_PER_SECOND: u64 = 100;
/// Reads of a timer without change after which it counts as absent.
const MAX_POLLS: u32 = 1_000_000;

static SCALE: Once<Scale> = Once::new();

/// Scale of the TSC. Before [`set_frequency`], one tick counts as one nanosecond.
pub fn scale_of_tsc() -> Scale {
    SCALE.get().copied().unwrap_or(const { Scale::new(1_000_000) })
}

/// Sets the TSC's frequency. The first call wins.
pub fn set_frequency(khz: u64) {
    SCALE.call_once(|| Scale::new(khz));
}

/// Current TSC value. Not ordered with other instructions.
#[inline]
pub fn tsc() -> u64 {
    // SAFETY: reading the counter has no effect.
    unsafe { _rdtsc() }
}

/// TSC ticks to nanoseconds.
pub fn to_nanoseconds(ticks: u64) -> u64 {
    scale_of_tsc().nanoseconds(ticks)
}

/// Nanoseconds to TSC ticks.
pub fn to_ticks(nanoseconds: u64) -> u64 {
    scale_of_tsc().ticks(nanoseconds)
}

/// Waits at least `microseconds`.
pub fn wait_microseconds(microseconds: u64) {
    let end = tsc().saturating_add(to_ticks(microseconds.saturating_mul(1000)));
    while tsc() < end {
        core::hint::spin_loop();
    }
}

/// Result of [`measure`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Measured {
    /// TSC in kHz.
    pub tsc_khz: u64,
    /// Local APIC timer in kHz.
    pub apic_khz: u64,
    /// Name of the reference timer.
    pub reference: &'static str,
}

/// Calibrates the TSC and the local APIC timer, which `apic_count` reads while it counts down,
/// against the PM timer at `pm_port`, else the PIT. Takes about 10 ms. `None` if neither counts.
pub fn measure(pm_port: Option<u16>, apic_count: impl Fn() -> u32) -> Option<Measured> {
    let sample = || (tsc(), apic_count());
    let by_pm = pm_port.and_then(|port| span_of_pm_timer(port, sample));
    let by_pm = by_pm.map(|span| frequencies(span, PM_HZ, "PM timer"));
    by_pm.or_else(|| Some(frequencies(span_of_pit(sample)?, PIT_HZ, "PIT")))
}

type Sample = (u64, u32);
/// Samples at the start and at the end of a calibration, and its length in ticks of the reference.
type Span = (Sample, Sample, u64);

fn frequencies((start, end, passed): Span, hertz: u64, reference: &'static str) -> Measured {
    let khz = |count: u64| {
        (count as u128 * hertz as u128 / (passed as u128 * 1000)).clamp(1, u32::MAX as u128) as u64
    };
    Measured {
        tsc_khz: khz(end.0.wrapping_sub(start.0)),
        apic_khz: khz(start.1.wrapping_sub(end.1) as u64),
        reference,
    }
}

/// Samples at a tick of the PM timer, and at the first one after the length of a calibration.
fn span_of_pm_timer(port: u16, sample: impl Fn() -> Sample) -> Option<Span> {
    // SAFETY: reads a timer that the firmware reports.
    let read = || unsafe { in32(port) } & PM_MASK;
    let wait_for_change = |from: u32| (0..MAX_POLLS).map(|_| read()).find(|&now| now != from);
    let first = wait_for_change(read())?;
    let start = sample();
    let mut last = first;
    loop {
        last = wait_for_change(last)?;
        let passed = (last.wrapping_sub(first) & PM_MASK) as u64;
        if passed >= PM_HZ / MEASURES_PER_SECOND {
            return Some((start, sample(), passed));
        }
    }
}

/// Samples at the start and at the end of a count of PIT channel 2, which is otherwise unused.
fn span_of_pit(sample: impl Fn() -> Sample) -> Option<Span> {
    const TICKS: u16 = (PIT_HZ / MEASURES_PER_SECOND) as u16;
    /// System control port B: bit 0 gate and bit 5 output of channel 2, bit 1 speaker.
    const CONTROL_B: u16 = 0x61;
    const CHANNEL_2: u16 = 0x42;
    const COMMAND: u16 = 0x43;
    /// Channel 2, both bytes, mode 0: the output rises at the end.
    const COUNT_DOWN_ONCE: u8 = 0xb0;
    // SAFETY: the PIT and the speaker have no DMA.
    unsafe {
        out8(CONTROL_B, in8(CONTROL_B) & !0b11 | 0b01);
        out8(COMMAND, COUNT_DOWN_ONCE);
        out8(CHANNEL_2, TICKS as u8);
        out8(CHANNEL_2, (TICKS >> 8) as u8);
    }
    let start = sample();
    // SAFETY: as above.
    let done = (0..MAX_POLLS).any(|_| unsafe { in8(CONTROL_B) } & 1 << 5 != 0);
    done.then(|| (start, sample(), TICKS.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_from_samples() {
        let found = frequencies(((100, 0xffff_0000), (24_000_100, 0xfff0_0000), 35_795), PM_HZ, "");
        assert_eq!(found.tsc_khz, 2_400_030);
        assert_eq!(found.apic_khz, 98_305);
        let dead = frequencies(((100, 5), (100, 5), 35_795), PM_HZ, "");
        assert_eq!((dead.tsc_khz, dead.apic_khz), (1, 1), "never 0");
    }
}
