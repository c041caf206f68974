//! Values with one user at a time.

use core::cell::Cell;

/// Value used only by the process that runs the vCPU, or by the process whose private memory holds
/// it.
#[repr(transparent)]
pub struct Owned<T>(Cell<T>);

// SAFETY: only one process at a time uses it, in its only thread.
unsafe impl<T> Sync for Owned<T> {}

impl<T: Copy> Owned<T> {
    /// Returns the value.
    pub fn get(&self) -> T {
        self.0.get()
    }

    /// Sets the value.
    pub fn set(&self, value: T) {
        self.0.set(value);
    }
}

impl<T> Owned<T> {
    /// Returns its address.
    pub const fn at(&self) -> *mut T {
        self.0.as_ptr()
    }
}
