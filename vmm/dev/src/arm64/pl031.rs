//! Real-time clock PL031.
//!
//! State: difference between the guest's and the host's clock, match register.
//! Features: seconds since 1970, which the guest can set.
//! Missing: the alarm (reported).
//! Documentation: Arm DDI 0224C.

use core::time::Duration;
use hw_arm64::pl031::*;
use vmm_bus::{Access, Device, Env};

const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// A PL031.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pl031 {
    /// Seconds at VM time 0.
    start: u32,
    /// Part of a second at VM time 0 in nanoseconds.
    phase: u64,
    matched: u32,
}

impl Pl031 {
    /// A clock that has this Unix time at VM time 0.
    pub const fn new(unix_at_zero: Duration) -> Self {
        let phase = unix_at_zero.subsec_nanos() as u64;
        Self { start: unix_at_zero.as_secs() as u32, phase, matched: 0 }
    }

    /// Seconds since the last one before VM time 0.
    fn elapsed(&self, env: &dyn Env) -> u32 {
        (env.now().saturating_add(self.phase) / NANOS_PER_SECOND) as u32
    }
}

impl Device for Pl031 {
    fn read(&mut self, access: Access, env: &mut dyn Env) -> u64 {
        match access.offset as usize {
            DATA | LOAD => self.start.wrapping_add(self.elapsed(env)).into(),
            MATCH => self.matched.into(),
            // The clock always runs.
            CONTROL => 1,
            offset => identification(offset, IDENTIFICATION, &IDENTITY),
        }
    }

    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        match access.offset as usize {
            LOAD => self.start = (value as u32).wrapping_sub(self.elapsed(env)),
            MATCH => self.matched = value as u32,
            INTERRUPT_MASK if value & 1 != 0 => env.missing("alarm of the PL031", value),
            _ => {}
        }
    }

    fn wake(&mut self, _: u8, _: &mut dyn Env) {}

    fn reset(&mut self, _: &mut dyn Env) {
        self.matched = 0;
    }
}

/// Register of a PrimeCell's identification at this offset; 0: there is none.
pub(super) fn identification(offset: usize, first: usize, identity: &[u8; 8]) -> u64 {
    let index = offset.checked_sub(first).map(|distance| distance / 4);
    index.and_then(|index| identity.get(index)).copied().unwrap_or(0).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_bus::testing::Script;

    #[test]
    fn time_advances_and_can_be_set() {
        let (mut clock, mut env) = (Pl031::new(Duration::new(999, 600_000_000)), Script::new());
        env.advance(&mut clock, 5 * NANOS_PER_SECOND);
        assert_eq!(env.inl(&mut clock, DATA as u64), 1004);
        env.advance(&mut clock, NANOS_PER_SECOND / 2);
        assert_eq!(env.inl(&mut clock, DATA as u64), 1005);
        env.outl(&mut clock, LOAD as u64, 50);
        env.advance(&mut clock, NANOS_PER_SECOND);
        assert_eq!(env.inl(&mut clock, DATA as u64), 51);
        assert_eq!(env.inl(&mut clock, 0xfe0), 0x31);
        assert_eq!(env.inl(&mut clock, 0xffc), 0xb1);
    }
}
