//! Waits for descriptors.

use host_linux::sys;
use linux_raw_sys::general as linux;

/// Event of a descriptor with data, or whose writer has gone.
pub const READABLE: u16 = linux::POLLIN as u16;
/// Event of a descriptor with room, or whose reader has gone.
pub const WRITABLE: u16 = linux::POLLOUT as u16;

/// Waits until one of the descriptors has its event of poll(2), for `most` milliseconds at most;
/// returns which have.
pub fn wait<const COUNT: usize>(
    descriptors: [Option<(u32, u16)>; COUNT],
    most: u64,
) -> [bool; COUNT] {
    // `struct pollfd`; poll(2) ignores negative descriptors.
    let entry = |wanted: Option<(u32, u16)>| {
        let (fd, event) = wanted.unwrap_or((u32::MAX, 0));
        u64::from(fd) | u64::from(event) << 32
    };
    let mut entries = descriptors.map(entry);
    let arguments = [entries.as_mut_ptr() as u64, COUNT as u64, most, 0, 0, 0];
    // SAFETY: the kernel writes the results to the entries.
    match unsafe { sys::call(linux::__NR_poll, arguments) } {
        Ok(1..) => entries.map(|entry| entry >> 48 != 0),
        _ => [false; COUNT],
    }
}
