//! Parts of the start of the CPUs after boot.

use abi::PAGE_SIZE;
use kernel_core::pool::{MAX_BYTES, Memory};

use crate::Processor;
use crate::boot_memory::{BootMemory, FOUR_GIB};

/// Size of kernel memory: RAM divided by this, within these bounds in bytes.
const POOL_SHARE: u64 = 16;
const POOL_MIN: u64 = 4 << 20;
const POOL_MAX: u64 = 64 << 20;

/// Allocates the kernel's memory and returns it with its length in bytes. `option`: the length by
/// the command line.
///
/// # Panics
/// There is not enough memory: without its pool the kernel cannot run.
pub fn memory_pool<A: Processor>(memory: &mut BootMemory, option: Option<&str>) -> (Memory, u64) {
    let share = (memory.ram.total() / POOL_SHARE).clamp(POOL_MIN, POOL_MAX);
    let length = option.and_then(parse_size).unwrap_or(share);
    let length = length.min(MAX_BYTES as u64) & !(PAGE_SIZE - 1);
    let Some(base) = memory.allocate(length, PAGE_SIZE, FOUR_GIB) else {
        panic!("cannot allocate {length:#x} bytes of kernel memory below 4 GiB; reduce pool=");
    };
    // SAFETY: boot allocated the range, which is otherwise unused; the direct map includes it.
    let memory = unsafe { Memory::new(A::direct(base), base, length as usize) };
    let Some(memory) = memory else {
        panic!("kernel memory of {length:#x} bytes is too small; increase pool=")
    };
    (memory, length)
}

/// Parses a number of bytes with an optional suffix K, M or G.
fn parse_size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(['K', 'M', 'G']);
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}
