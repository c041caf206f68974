//! Values at fixed addresses.

/// A value at the same address in each process that uses it.
///
/// # Safety
/// Whenever [`Fixed::get`] is called, [`Fixed::ADDRESS`] must be the address of a valid value,
/// which stays mapped as long as the process uses it. All of its fields must be atomic, constant,
/// or used by one process at a time without references to them.
pub unsafe trait Fixed: Sized + 'static {
    /// Its address.
    const ADDRESS: u64;

    /// Returns it.
    fn get() -> &'static Self {
        // SAFETY: the implementation guarantees the value and its use.
        unsafe { &*(Self::ADDRESS as *const Self) }
    }
}
