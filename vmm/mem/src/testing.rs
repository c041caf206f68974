//! Guest memory for tests: zeroed, of any layout, never freed.

use std::vec;

use crate::{GuestMemory, PAGE_SIZE, Window};

#[repr(align(4096))]
#[derive(Clone)]
struct Page(#[expect(dead_code, reason = "reached through pointers")] [u8; PAGE_SIZE as usize]);

/// Creates memory of these ranges: guest-physical base and length, ascending, whole pages.
///
/// # Panics
/// If the ranges are no valid layout.
pub fn memory(ranges: &[(u64, u64)]) -> GuestMemory {
    let windows: vec::Vec<Window> = ranges
        .iter()
        .map(|&(base, length)| {
            let pages = vec![Page([0; PAGE_SIZE as usize]); (length / PAGE_SIZE) as usize];
            Window { base, length, host: pages.leak().as_mut_ptr().cast() }
        })
        .collect();
    // SAFETY: each window is a separate allocation that is never freed, and no other pointer to it
    // exists.
    unsafe { GuestMemory::new(&windows) }.expect("a valid layout")
}
