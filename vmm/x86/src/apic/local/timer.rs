//! The timer: one-shot, periodic, TSC deadline.

use vmm_bus::{Env, NEVER, Nanos};

use super::spec::*;
use super::{LocalApic, TIMER};

impl LocalApic {
    /// Reports that the guest has set its TSC to `tsc`.
    pub fn sync_tsc(&mut self, tsc: u64, env: &mut dyn Env) {
        self.tsc_at_zero = tsc.wrapping_sub(self.tsc.in_nanos(env.now())) as i64;
        if self.deadline != 0 {
            self.arm_deadline(env);
        }
    }

    /// Writes the TSC deadline; ignored in other timer modes (SDM vol. 3, section 11.5.4.1).
    #[inline]
    pub fn set_tsc_deadline(&mut self, deadline: u64, env: &mut dyn Env) {
        if self.lvt[TIMER] & TIMER_MODE != TIMER_TSC_DEADLINE {
            return;
        }
        let was_armed = self.deadline != 0;
        self.deadline = deadline;
        if deadline != 0 {
            self.arm_deadline(env);
        } else if was_armed {
            env.arm(0, NEVER);
        }
    }

    pub(super) fn arm_deadline(&self, env: &mut dyn Env) {
        let ticks = i128::from(self.deadline) - i128::from(self.tsc_at_zero);
        // A deadline before VM time 0 has passed; one beyond the clock never passes.
        env.arm(0, self.tsc.nanos(u64::try_from(ticks.max(0)).unwrap_or(u64::MAX)));
    }

    /// Bus cycles (nanoseconds) per count (SDM vol. 3, figure 11-10).
    pub(super) fn divider(&self) -> u64 {
        let code = self.divide & 3 | self.divide >> 1 & 4;
        1 << ((code + 1) & 7)
    }

    pub(super) fn periodic(&self) -> bool {
        self.lvt[TIMER] & TIMER_MODE == TIMER_PERIODIC
    }

    /// Starts the count-down from `count`; 0 stops the timer.
    pub(super) fn start_count(&mut self, count: u32, env: &mut dyn Env) {
        if self.lvt[TIMER] & TIMER_MODE == TIMER_TSC_DEADLINE {
            return;
        }
        self.expiry = if count == 0 {
            NEVER
        } else {
            env.now().saturating_add(u64::from(count) * self.divider())
        };
        env.arm(0, self.expiry);
    }

    pub(super) fn current_count(&self, now: Nanos) -> u32 {
        if self.expiry == NEVER {
            return 0;
        }
        let mut left = self.expiry.saturating_sub(now);
        let period = u64::from(self.initial) * self.divider();
        if self.periodic() && period != 0 {
            // The expiry may be several periods ahead, or past if the host is late.
            let over = now.saturating_sub(self.expiry) % period;
            left = if over != 0 { period - over } else { left % period };
            left = if left == 0 { period } else { left };
        }
        u32::try_from(left.div_ceil(self.divider())).unwrap_or(u32::MAX)
    }

    pub(super) fn expire_count(&mut self, env: &mut dyn Env) {
        let now = env.now();
        if self.expiry == NEVER || now < self.expiry {
            return env.arm(0, self.expiry);
        }
        self.fire(TIMER);
        let period = u64::from(self.initial) * self.divider();
        if self.periodic() && period != 0 {
            let late = now.saturating_add(SHORTEST_PERIOD) - self.expiry;
            let periods = late / period + 1;
            self.expiry = self.expiry.saturating_add(periods.saturating_mul(period));
            env.arm(0, self.expiry);
        } else {
            self.expiry = NEVER;
        }
    }
}
