//! The guest kernel's code: writes to it, and with protection keys the search of it.

use vmm_cpu::walk::Intent;
use vmm_mem::GuestMemory;
use wedge_core::VirtualCpu;

use crate::mmu::exec_scan::{LENGTH, UD1, find};
use crate::mmu::ram::PAGE;

/// Largest number of bytes that Linux's `__text_poke` changes at once: `text_poke_copy` fills two
/// pages (`arch/x86/kernel/alternative.c`).
pub const MOST_POKED: usize = 2 * PAGE as usize;

/// Replaces the sequences that these bytes will form in kernel code by `UD1`, before the bytes are
/// written to a linear address: user mode may run on another vCPU. There are at most [`MOST_POKED`]
/// bytes.
pub fn close_poke(cpu: &VirtualCpu, memory: &GuestMemory, to: u64, bytes: &mut [u8]) {
    const BORDER: usize = LENGTH - 1;
    let mut around = [0; MOST_POKED + 2 * BORDER];
    let end = BORDER + bytes.len();
    let all = &mut around[..end + BORDER];
    let from = to.wrapping_sub(BORDER as u64);
    for (start, end) in [(0, BORDER), (end, end + BORDER)] {
        // Unmapped bytes form no sequence.
        let _ = cpu.read(memory, from.wrapping_add(start as u64), &mut all[start..end]);
    }
    all[BORDER..end].copy_from_slice(bytes);
    let mut offset = 0;
    while let Some(found) = find(all, offset) {
        offset = found + 1;
        match bytes.get_mut(offset.wrapping_sub(BORDER)) {
            Some(byte) => *byte = UD1,
            // The write can only fail if the page is unmapped by now.
            None => drop(write_code(cpu, memory, from + offset as u64, &[UD1])),
        }
    }
}

/// Replaces the sequences in the kernel code between two linear addresses, and those that extend
/// into it, by `UD1`.
pub fn close_kernel(cpu: &VirtualCpu, memory: &GuestMemory, start: u64, end: u64) {
    const BORDER: usize = LENGTH - 1;
    let mut bytes = [0; PAGE as usize + 2 * BORDER];
    let mut at = start & !(PAGE - 1);
    while at < end {
        let from = at - BORDER as u64;
        for (start, end) in
            [(0, BORDER), (BORDER, BORDER + PAGE as usize), (BORDER + PAGE as usize, bytes.len())]
        {
            let part = &mut bytes[start..end];
            if cpu.read(memory, from + start as u64, part).is_err() {
                // Unmapped bytes form no sequence.
                part.fill(0);
            }
        }
        let mut offset = 0;
        while let Some(found) = find(&bytes, offset) {
            // The write can only fail if the page is unmapped by now.
            let _ = write_code(cpu, memory, from + found as u64 + 1, &[UD1]);
            offset = found + 1;
        }
        at += PAGE;
    }
}

/// Writes to kernel memory, regardless of the rights of its mapping. `None`: a part of it is not
/// mapped, and nothing was written.
pub fn write_code(cpu: &VirtualCpu, memory: &GuestMemory, to: u64, bytes: &[u8]) -> Option<()> {
    let place = |linear| {
        let found = cpu.paging(linear, false).translate(memory, linear, Intent::Read, false);
        Some(found.ok()?.0)
    };
    for is_check in [true, false] {
        let (mut at, mut left) = (to, bytes);
        while !left.is_empty() {
            let length = ((PAGE - at % PAGE) as usize).min(left.len());
            let (part, rest) = left.split_at(length);
            let address = place(at)?;
            if !is_check {
                // Writes to unassigned addresses are dropped, as those of the kernel itself.
                let _ = memory.write_slice(address, part);
            }
            (at, left) = (at.wrapping_add(length as u64), rest);
        }
    }
    Some(())
}
