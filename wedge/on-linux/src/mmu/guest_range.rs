//! Memory calls of the host for addresses of the guest. They are safe, because the wedge keeps no
//! Rust object there: a range with memory of the wedge is refused.

use host_linux::sys::{self, Backing, Errno};
use proto::hosted::layout;

/// `EINVAL`.
const REFUSED: Errno = Errno(22);

/// Fails unless a range is the guest's, or from [`layout::WINDOW`] on a mapping of guest memory,
/// whose contents the wedge accesses by address only.
fn check(start: u64, length: u64, end: u64) -> Result<(), Errno> {
    let last = start.checked_add(length).ok_or(REFUSED)?;
    let is_low = last <= layout::WEDGE;
    let is_high = start >= layout::WEDGE_END && last <= end;
    if is_low || is_high { Ok(()) } else { Err(REFUSED) }
}

/// Maps guest memory or private memory, in place of previous mappings.
pub fn map(start: u64, length: u64, rights: u32, backing: Backing) -> Result<(), Errno> {
    map_below(layout::HOST, start, length, rights, backing)
}

/// Maps guest memory from an offset in its file on, and populates the mapping.
pub fn map_now(start: u64, length: u64, rights: u32, offset: u64) -> Result<(), Errno> {
    let backing = Backing::Populated(layout::MEMORY_FD, offset);
    map_below(layout::GUEST_END, start, length, rights, backing)
}

fn map_below(
    end: u64,
    start: u64,
    length: u64,
    rights: u32,
    backing: Backing,
) -> Result<(), Errno> {
    check(start, length, end)?;
    // SAFETY: no Rust object is in the range.
    unsafe { sys::map(start, length, rights, backing) }
}

/// Unmaps a range of the guest.
pub fn unmap(start: u64, length: u64) -> Result<(), Errno> {
    check(start, length, layout::GUEST_END)?;
    // SAFETY: no Rust object is in the range.
    unsafe { sys::unmap(start, length) }
}

/// Changes the rights of a range of the guest; the wedge accesses guest memory through another
/// mapping.
pub fn protect(start: u64, length: u64, rights: u32) -> Result<(), Errno> {
    check(start, length, layout::GUEST_END)?;
    // SAFETY: no Rust object is in the range.
    unsafe { sys::protect(start, length, rights) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_with_memory_of_the_wedge_are_refused() {
        for (start, length) in [
            (layout::WEDGE, 0x1000),
            (layout::WEDGE - 0x1000, 0x2000),
            (layout::WEDGE_END - 0x1000, 0x2000),
            (0, layout::TASK_SIZE),
            (layout::WINDOW, 0x1000),
            (u64::MAX - 0xfff, 0x1000),
        ] {
            assert_eq!(unmap(start, length), Err(REFUSED), "{start:#x}");
            assert_eq!(protect(start, length, 0), Err(REFUSED), "{start:#x}");
            assert_eq!(map_now(start, length, 0, 0), Err(REFUSED), "{start:#x}");
        }
        assert_eq!(map(layout::HOST - 0x1000, 0x2000, 0, Backing::Own), Err(REFUSED));
    }

    #[test]
    fn ranges_of_the_guest_are_permitted() {
        for (start, length) in [
            (0, layout::IMAGE),
            (layout::MODULES, layout::MODULES_END - layout::MODULES),
            (layout::FIXMAP, layout::LOW_END - layout::FIXMAP),
            (layout::LOW_END, layout::TASK_SIZE - layout::LOW_END),
            (layout::VMALLOC, layout::GUEST_END - layout::VMALLOC),
        ] {
            assert_eq!(check(start, length, layout::GUEST_END), Ok(()), "{start:#x}");
        }
        assert_eq!(check(layout::COPIES, 0x1000, layout::HOST), Ok(()));
    }
}
