//! The guest kernel's code: writes to it, and with protection keys the search of it.

use hw_walk::Intent;
use vmm_mem::GuestMemory;
use vmm_x86::walk::GuestTables;
use wedge_core::VirtualCpu;

use crate::mmu::exec_scan::{LENGTH, UD1, find};
use crate::mmu::ram::PAGE;

/// Largest number of bytes that Linux's `__text_poke` changes at once: `text_poke_copy` fills two
/// pages (`arch/x86/kernel/alternative.c`).
pub const MOST_POKED: usize = 2 * PAGE as usize;

/// Replaces the sequences that these bytes will form in kernel code by `UD1`, before the bytes are
/// written to a linear address: user mode may run on another vCPU. There are at most [`MOST_POKED`]
/// bytes. Returns whether there were sequences: in code that Linux generates they are not
/// instructions but a part of one, whose effect changes.
pub fn close_poke(cpu: &VirtualCpu, memory: &GuestMemory, to: u64, bytes: &mut [u8]) -> bool {
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
    offset != 0
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
    let tables = GuestTables(memory);
    let place = |linear| {
        let found = cpu.paging(linear, false).translate(&tables, linear, Intent::Read, false);
        Some(found.ok()?.address)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mmu::testing::{CODE, Rig, USER};
    use hw_x86::paging::entry;

    const FRAME: u64 = 0x8_0000;
    const WRPKRU: [u8; 3] = [0x0f, 0x01, 0xef];

    fn kernel() -> Rig {
        let mut rig = Rig::with_keys();
        rig.cpu.cpl = 0;
        // Not contiguous in memory.
        rig.set(USER, FRAME, CODE & !entry::USER);
        rig.set(USER + PAGE, FRAME + 4 * PAGE, CODE & !entry::USER);
        rig
    }

    fn bytes(rig: &Rig, at: u64) -> [u8; 3] {
        let mut bytes = [0; 3];
        rig.memory.read_slice(at, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn sequences_in_kernel_code_become_ud1() {
        let rig = kernel();
        rig.memory.write_slice(FRAME + 0x10, &WRPKRU).unwrap();
        close_kernel(&rig.cpu, &rig.memory, USER, USER + PAGE);
        assert_eq!(bytes(&rig, FRAME + 0x10), [0x0f, UD1, 0xef]);
    }

    #[test]
    fn sequences_across_pages_are_closed_too() {
        let rig = kernel();
        rig.memory.write(FRAME + PAGE - 1, 0x0f_u8).unwrap();
        rig.memory.write_slice(FRAME + 4 * PAGE, &WRPKRU[1..]).unwrap();
        close_kernel(&rig.cpu, &rig.memory, USER + PAGE, USER + 2 * PAGE);
        assert_eq!(rig.memory.read::<u8>(FRAME + 4 * PAGE).unwrap(), UD1);
    }

    #[test]
    fn a_poke_is_closed_before_it_is_written() {
        let rig = kernel();
        let mut poked = WRPKRU;
        assert!(close_poke(&rig.cpu, &rig.memory, USER + 0x20, &mut poked));
        assert_eq!(poked, [0x0f, UD1, 0xef]);
        // The end of a sequence of which memory has the beginning.
        rig.memory.write_slice(FRAME + 0x40, &WRPKRU[..2]).unwrap();
        let mut poked = [0xef];
        assert!(close_poke(&rig.cpu, &rig.memory, USER + 0x42, &mut poked));
        assert_eq!((poked, bytes(&rig, FRAME + 0x40)), ([0xef], [0x0f, UD1, 0]));
        assert!(!close_poke(&rig.cpu, &rig.memory, USER + 0x60, &mut [0x0f, 0x01, 0xee]));
    }

    #[test]
    fn writes_cross_pages_and_are_whole_or_nothing() {
        let rig = kernel();
        assert!(write_code(&rig.cpu, &rig.memory, USER + PAGE - 2, &[1, 2, 3, 4]).is_some());
        assert_eq!(rig.memory.read::<u16>(FRAME + PAGE - 2).unwrap(), 0x0201);
        assert_eq!(rig.memory.read::<u16>(FRAME + 4 * PAGE).unwrap(), 0x0403);
        assert!(write_code(&rig.cpu, &rig.memory, USER + 2 * PAGE - 1, &[9, 9]).is_none());
        assert_eq!(rig.memory.read::<u8>(FRAME + 5 * PAGE - 1).unwrap(), 0);
    }
}
