//! Defects that the model in `fuzz` puts into the vTLB, to show that it notices each; and the steps
//! that the vTLB takes. Without the feature `testing` there are none.

#[cfg(feature = "testing")]
mod testing;

#[cfg(feature = "testing")]
pub use testing::*;

/// Returns whether the code is to break the rule with this name.
#[cfg(not(feature = "testing"))]
#[inline(always)]
pub const fn breaks(_: &str) -> bool {
    false
}

/// Counts a step: an entry or table that is looked at.
#[cfg(not(feature = "testing"))]
#[inline(always)]
pub const fn step() {}
