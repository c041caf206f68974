//! The deadline of a vCPU: when to leave the guest because a timer is due.

use vmm_bus::Nanos;

use crate::clock::CounterClock;
use crate::vcpu::Vcpu;

/// The deadline set in a [`Vcpu`], which is only called when it changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Deadline(Nanos);

impl Deadline {
    /// No deadline has been set.
    pub const UNSET: Self = Self(0);

    /// Sets the deadline in VM time.
    #[inline]
    pub fn set<V: Vcpu>(&mut self, deadline: Nanos, vcpu: &mut V, clock: &CounterClock) {
        if deadline != self.0 {
            self.0 = deadline;
            vcpu.set_deadline(clock.ticks(deadline));
        }
    }

    /// Notes that the deadline has passed. The back end keeps it until a new one is set.
    pub fn passed(&mut self) {
        self.0 = 0;
    }
}
