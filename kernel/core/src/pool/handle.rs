//! References to objects.

use core::marker::PhantomData;
use core::num::NonZeroU64;

use super::GENERATION_BITS;

/// Reference to an object: slot index (high bits, extracted by one shift) and generation.
pub struct Handle<T>(pub(super) NonZeroU64, pub(super) PhantomData<*const T>);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Handle<T> {}
impl<T> PartialEq for Handle<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}
impl<T> Eq for Handle<T> {}
impl<T> core::fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl<T> Handle<T> {
    /// Slot index, in units of 16 bytes from the start of kernel memory.
    #[inline(always)]
    pub(super) fn index(self) -> u32 {
        (self.0.get() >> GENERATION_BITS) as u32
    }

    /// Identifier that is unique over all objects ever allocated.
    pub fn id(self) -> u64 {
        self.0.get()
    }
}
