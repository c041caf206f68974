//! Values with one user at a time.

use core::cell::UnsafeCell;

/// Value used only by the process that runs the vCPU, or by the process whose private memory holds
/// it.
#[repr(transparent)]
pub struct Owned<T>(UnsafeCell<T>);

// SAFETY: only one process at a time uses it, in its only thread.
unsafe impl<T> Sync for Owned<T> {}

impl<T: Copy> Owned<T> {
    /// Returns the value.
    pub fn get(&self) -> T {
        // SAFETY: no other process uses it now.
        unsafe { *self.0.get() }
    }

    /// Sets the value.
    pub fn set(&self, value: T) {
        // SAFETY: as above.
        unsafe { *self.0.get() = value }
    }
}

impl<T> Owned<T> {
    /// Returns its address.
    pub const fn at(&self) -> *mut T {
        self.0.get()
    }
}
