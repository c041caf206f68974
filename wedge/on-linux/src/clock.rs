//! The host CPU's time-stamp counter: its frequency, and the wall-clock time at which it was 0;
//! serialisation, and yielding while waiting for a lock.

use core::arch::x86_64::{__cpuid, _rdtsc};

use host_linux::sys;
use linux_raw_sys::general as linux;
use spin::relax::RelaxStrategy;

use crate::state::config::config;

/// Duration of the frequency measurement in nanoseconds.
const MEASURED: u64 = 10_000_000;
const SECOND: u64 = 1_000_000_000;

/// Reads the TSC.
pub fn tsc() -> u64 {
    // SAFETY: the host permits user mode to read it.
    unsafe { _rdtsc() }
}

/// Yields the host CPU while waiting for a lock, since the owner may need it.
pub struct YieldRelax;

impl RelaxStrategy for YieldRelax {
    fn relax() {
        /// Number of spins before yielding, some microseconds: locks are held for less time unless
        /// the owner is preempted.
        const LOOKS: u32 = 64;
        for _ in 0..LOOKS {
            core::hint::spin_loop();
        }
        sys::yield_now();
    }
}

/// Serialises the CPU after a write to code through another address (APM vol. 2, 7.6.1).
pub fn serialize() {
    // SAFETY: `IRET` to the next instruction, with the current stack, flags and segments.
    unsafe {
        core::arch::asm!(
            "mov {stack}, rsp",
            "mov {segment:e}, ss",
            "push {segment}",
            "push {stack}",
            "pushfq",
            "mov {segment:e}, cs",
            "push {segment}",
            "lea {segment}, [rip + 2f]",
            "push {segment}",
            "iretq",
            "2:",
            stack = out(reg) _,
            segment = out(reg) _,
        );
    }
}

/// Converts microseconds to TSC ticks, for processes of the VM.
pub fn ticks(microseconds: u64) -> u64 {
    microseconds.saturating_mul(config().tsc_khz) / 1000
}

/// Returns a time in nanoseconds without a system call, of which only differences count.
pub fn nanoseconds() -> u64 {
    let (ticks, khz) = (tsc(), config().tsc_khz.max(1));
    // Two steps, because the product with a million would overflow.
    ticks / khz * 1_000_000 + ticks % khz * 1_000_000 / khz
}

/// Returns the TSC frequency in kHz: from CPUID, else measured.
pub fn tsc_khz() -> u64 {
    reported().unwrap_or_else(measured).max(1)
}

/// Reads the frequency from hypervisor leaf 0x4000_0010 (proposed by VMware, common among
/// hypervisors) or Intel's leaf 0x15 (SDM vol. 2, `CPUID`).
fn reported() -> Option<u64> {
    const HYPERVISOR: u32 = 1 << 31;
    const TIMING: u32 = 0x4000_0010;
    const CRYSTAL: u32 = 0x15;
    if __cpuid(1).ecx & HYPERVISOR != 0
        && (TIMING..TIMING + 256).contains(&__cpuid(0x4000_0000).eax)
    {
        let khz = __cpuid(TIMING).eax;
        if khz != 0 {
            return Some(khz.into());
        }
    }
    if __cpuid(0).eax >= CRYSTAL {
        let leaf = __cpuid(CRYSTAL);
        if leaf.eax != 0 && leaf.ebx != 0 && leaf.ecx != 0 {
            let hz = u64::from(leaf.ecx) * u64::from(leaf.ebx) / u64::from(leaf.eax);
            return Some(hz / 1000);
        }
    }
    None
}

fn measured() -> u64 {
    measure(tsc, || now(linux::CLOCK_MONOTONIC))
}

/// Measures the frequency of a counter in kHz with a clock in nanoseconds.
fn measure(mut counter: impl FnMut() -> u64, mut clock: impl FnMut() -> u64) -> u64 {
    let (from, start) = sample(&mut counter, &mut clock);
    while clock().saturating_sub(start) < MEASURED {}
    let (to, end) = sample(&mut counter, &mut clock);
    let (ticks, time) = (u128::from(to.saturating_sub(from)), u128::from(end - start));
    u64::try_from(ticks * 1_000_000 / time).unwrap_or(1)
}

/// Reads a counter and a clock at the same time: in the shortest of some attempts, because the host
/// may preempt this process, or serve an interrupt, between the two.
fn sample(counter: &mut impl FnMut() -> u64, clock: &mut impl FnMut() -> u64) -> (u64, u64) {
    const ATTEMPTS: usize = 8;
    let mut best = (u64::MAX, 0, 0);
    for _ in 0..ATTEMPTS {
        let before = counter();
        let time = clock();
        let length = counter().wrapping_sub(before);
        if length < best.0 {
            best = (length, before + length / 2, time);
        }
    }
    (best.1, best.2)
}

/// Returns the Unix time in nanoseconds at which the TSC was 0.
pub fn unix_at_zero(khz: u64) -> u64 {
    let (ticks, time) = sample(&mut tsc, &mut || now(linux::CLOCK_REALTIME));
    let nanoseconds = u128::from(ticks) * 1_000_000 / u128::from(khz.max(1));
    time.saturating_sub(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
}

/// Reads a host clock in nanoseconds.
pub fn now(clock: u32) -> u64 {
    let time = sys::time(clock);
    time[0].saturating_mul(SECOND).saturating_add(time[1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::Cell;

    #[test]
    fn a_preempted_measurement_is_repeated() {
        /// Time between two readings, and time without the CPU, in nanoseconds.
        const READING: u64 = 100;
        const PREEMPTED: u64 = 3_000_000;
        // A counter of 2 GHz; the process loses the CPU before every fifth reading of the clock.
        let (time, readings) = (Cell::new(1_000_000), Cell::new(0));
        let counter = || {
            time.set(time.get() + READING);
            2 * time.get()
        };
        let clock = || {
            readings.set(readings.get() + 1);
            let lost = if readings.get() % 5 == 1 { PREEMPTED } else { 0 };
            time.set(time.get() + READING + lost);
            time.get()
        };
        assert_eq!(measure(counter, clock), 2_000_000);
    }
}
