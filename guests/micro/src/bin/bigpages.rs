//! Touches all RAM sparsely, with a different offset in every large page, and finds what it wrote.
#![no_std]
#![no_main]

use guests_micro::{boot, check, guest, println, random::mix};

guest!(main);

/// A little less than a large page, so that offsets differ; a multiple of eight.
const STRIDE: usize = 0x1f_f000 - 0x238;
/// Every word of this much at the start of each range too.
const DENSE: u64 = 1 << 20;
const KEYS: [u64; 2] = [0x1111, 0x2222];

fn main() {
    let mut touched = 0u64;
    for key in KEYS {
        for address in places() {
            // SAFETY: RAM that no other code uses, mapped and aligned.
            unsafe { (address as *mut u64).write_volatile(mix(address ^ key)) };
        }
        for address in places() {
            // SAFETY: as above.
            let found = unsafe { (address as *const u64).read_volatile() };
            let expected = mix(address ^ key);
            check!(found == expected, "{address:#x} holds {found:#x} instead of {expected:#x}");
            touched += 1;
        }
    }
    let bytes: u64 = boot::free_ram().map(|(start, end)| end - start).sum();
    check!(bytes > DENSE, "only {bytes} bytes of RAM");
    println!("bigpages: {touched} words in {} MiB", bytes >> 20);
}

fn places() -> impl Iterator<Item = u64> {
    boot::free_ram().flat_map(|(start, end)| {
        let dense = (start..end.min(start + DENSE)).step_by(8);
        let sparse = (start..end - 7).step_by(STRIDE);
        dense.chain(sparse).chain([end - 8])
    })
}
