//! Guest memory for tests: zeroed, of any layout, never freed.

use std::vec;

use crate::{GuestMemory, PAGE_SIZE, Window};

#[repr(align(4096))]
#[derive(Clone)]
struct Page(#[expect(dead_code, reason = "reached through pointers")] [u8; PAGE_SIZE as usize]);

/// Memory of these ranges: guest-physical base and length, ascending, whole pages.
///
/// # Panics
/// The ranges are no valid layout.
pub fn memory(ranges: &[(u64, u64)]) -> GuestMemory {
    let windows: vec::Vec<Window> = ranges
        .iter()
        .map(|&(base, length)| {
            let pages = vec![Page([0; PAGE_SIZE as usize]); (length / PAGE_SIZE) as usize];
            Window { base, length, host: pages.leak().as_mut_ptr().cast() }
        })
        .collect();
    // SAFETY: each window is an allocation of its own that lives as long as the program, and nobody else has
    // a pointer to it.
    unsafe { GuestMemory::new(&windows) }.expect("a valid layout")
}
