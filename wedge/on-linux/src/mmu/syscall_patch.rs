//! Rewriting of user-mode system calls so that they enter the wedge without a signal: the decision
//! and the code.
//!
//! The first calls of a call site arrive by Syscall User Dispatch. A frequent call site is replaced
//! by a jump in a private copy of its page ([`crate::mmu::rewrite`]); guest memory does not change.
//! The jump is `jmp [slot]`, seven bytes in place of
//!
//! - `mov eax, NUMBER; syscall` or
//! - `mov r9, [rsp+8]; syscall` (the C library's `syscall`),
//!
//! whose first instruction moves to the call's stub. The slot's address is chosen so that the bytes
//! in place of `syscall` are `int 0x74`: a jump to them faults and still results in the system
//! call, and so does a call that the kernel restarts. Without such an instruction (`read` has
//! number 0, for which there are shorter encodings), `syscall` becomes a short jump to nearby
//! padding ([`padding`]), which holds the long jump. All other call sites keep using signals.
//!
//! Invariants: only read-only pages are copied; decisions, changes and scans use the executed copy;
//! a copy is dropped together with the mapping of its page, and slots are reused only after all
//! copies of the process were dropped.

use proto::hosted::layout;
use wedge_core::padding;

use crate::mmu::exec_scan::Page;
use crate::mmu::host::STUB;
use crate::mmu::ram::PAGE;

/// Slots: the third address byte is the opcode of `INT`, the fourth one its vector.
pub const SLOTS: u64 = 0x74cd_0000;
/// Length of the slots in bytes.
pub const SLOTS_LENGTH: u64 = 0x1_0000;
/// Stubs, the targets of the slots.
pub const STUBS: u64 = SLOTS + SLOTS_LENGTH;
/// Number of slots.
pub const MAX_CALLS: u32 = (SLOTS_LENGTH / 8) as u32;
/// Vector in place of `syscall`.
const VECTOR: u8 = 0x74;
const _: () = assert!(SLOTS >> 16 == (VECTOR as u64) << 8 | 0xcd);
const _: () = assert!(SLOTS >= layout::PRIVATE && stub_address(MAX_CALLS) <= layout::WEDGE_END);

/// Number of calls by signal after which a call site is rewritten.
const REWRITE_AFTER: u32 = 4;
/// Capacity of the call site counters.
const PLACES: usize = 256;
/// Capacity in copied pages.
pub const PAGES: usize = 128;
/// Length of the replaced code in bytes.
pub const LENGTH: usize = 7;
/// `mov r9, [rsp+8]`.
const LOAD_SIXTH: [u8; 5] = [0x4c, 0x8b, 0x4c, 0x24, 0x08];
const MOVE_NUMBER: u8 = 0xb8;
/// First instruction of a stub that replaces none: `nop`.
pub const NONE: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
/// Opcode of the short jump.
pub const SHORT_JUMP: u8 = 0xeb;
/// `syscall`.
pub const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// Returns the address of a stub.
pub const fn stub_address(index: u32) -> u64 {
    STUBS + STUB as u64 * index as u64
}

/// Rewritten system calls of a process.
pub struct Calls {
    /// Return address of a call site, and number of its calls.
    places: [(u64, u32); PLACES],
    /// Addresses of copied pages; 0: none.
    pages: [u64; PAGES],
    /// Offsets of the original pages in guest memory.
    frames: [u64; PAGES],
    /// Number of used slots.
    used: u32,
}

impl Default for Calls {
    fn default() -> Self {
        Self { places: [(0, 0); PLACES], pages: [0; PAGES], frames: [0; PAGES], used: 0 }
    }
}

impl Calls {
    /// Counts a call by signal; returns whether the call site is to be rewritten now.
    pub fn note(&mut self, after: u64) -> bool {
        let place = &mut self.places[(after ^ after >> 8) as usize % PLACES];
        if place.0 != after {
            *place = (after, 0);
        }
        place.1 += 1;
        place.1.is_multiple_of(REWRITE_AFTER)
    }

    /// Returns the index of the next slot; `None`: all are used.
    pub fn free_slot(&self) -> Option<u32> {
        (self.used < MAX_CALLS).then_some(self.used)
    }

    /// Returns whether the slot of this index is used.
    pub fn is_used(&self, index: u64) -> bool {
        index < u64::from(self.used)
    }

    /// Returns the index for a page's entry; `None`: all are used.
    pub fn place_of(&self, page: u64) -> Option<usize> {
        let wanted = if self.has_copy(page) { page } else { 0 };
        self.pages.iter().position(|copied| *copied == wanted)
    }

    /// Enters a rewritten call: the entry of its page, and the offset of that in guest memory.
    pub fn add(&mut self, index: usize, page: u64, offset: u64) {
        self.used += 1;
        self.pages[index] = page;
        self.frames[index] = offset;
    }

    /// Returns whether this process has a private copy of a page.
    pub fn has_copy(&self, page: u64) -> bool {
        page != 0 && self.used != 0 && self.pages.contains(&page)
    }

    /// Returns whether the page of `rip` has rewritten calls, so that `int` at `rip` is the second
    /// half of one.
    pub fn is_rewritten(&self, rip: u64) -> bool {
        self.has_copy(rip & !(PAGE - 1))
    }

    /// Returns the copied page of an entry if its original is in a range of guest memory, given by
    /// its offset.
    pub fn copy_of(&self, index: usize, offset: u64, length: u64) -> Option<u64> {
        let is_wanted = (offset..offset + length).contains(&self.frames[index]);
        Some(self.pages[index]).filter(|&page| page != 0 && is_wanted)
    }

    /// Forgets the copies in an unmapped range.
    pub fn forget(&mut self, start: u64, end: u64) {
        if self.used == 0 {
            return;
        }
        for page in &mut self.pages {
            if (start..end).contains(page) {
                *page = 0;
            }
        }
        if self.pages.iter().all(|&page| page == 0) {
            self.used = 0;
            self.places.fill((0, 0));
        }
    }
}

/// Replacement of a call site.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Replacement {
    /// First instruction of its stub.
    pub first: [u8; NONE.len()],
    /// Offset of the jump to the stub in the page.
    pub jump: usize,
    /// Short jump in place of `syscall`, if the jump is elsewhere.
    pub short: Option<[u8; SYSCALL.len()]>,
}

/// Returns the replacement of the call site before `after`, an offset in a page, whose last call
/// had this number.
pub fn find_replacement(bytes: &Page, after: usize, number: u32) -> Option<Replacement> {
    let call = after.checked_sub(SYSCALL.len())?;
    if bytes[call..after] != SYSCALL {
        return None;
    }
    // Check the byte before: a prefix would select another register.
    if let Some(start) = after.checked_sub(LENGTH).filter(|&start| start != 0) {
        let is_prefix = bytes[start - 1] & 0xf0 == 0x40;
        let first = *bytes[start..].first_chunk()?;
        let moves = first[0] == MOVE_NUMBER && first[1..] == number.to_le_bytes();
        if first == LOAD_SIXTH || !is_prefix && moves {
            return Some(Replacement { first, jump: start, short: None });
        }
    }
    let jump = padding::find(bytes, after, LENGTH)?;
    let distance = i8::try_from(jump - after).ok()?;
    Some(Replacement { first: NONE, jump, short: Some([SHORT_JUMP, distance as u8]) })
}

/// Returns the jump to the stub of a slot.
pub fn jump_to(index: u32) -> [u8; LENGTH] {
    let slot = SLOTS as u32 + 8 * index;
    let mut jump = [0xff, 0x24, 0x25, 0, 0, 0, 0];
    jump[3..].copy_from_slice(&slot.to_le_bytes());
    jump
}

/// Returns the index of the slot of a jump; `None`: it is no such jump.
pub fn slot_of(jump: &[u8]) -> Option<u64> {
    let [0xff, 0x24, 0x25, slot @ ..] = jump else { return None };
    let slot = <[u8; 4]>::try_from(slot).map(u32::from_le_bytes).ok()?;
    Some(u64::from(slot).wrapping_sub(SLOTS) / 8)
}

/// Returns the code of a stub at an address: the first instruction, `mov rcx, after`, and a jump to
/// the wedge's entry.
pub fn stub_code(at: u64, first: &[u8], after: u64, entry: u64) -> [u8; STUB] {
    let mut code = [0xcc; STUB];
    code[..5].copy_from_slice(first);
    code[5..7].copy_from_slice(&[0x48, 0xb9]);
    code[7..15].copy_from_slice(&after.to_le_bytes());
    code[15] = 0xe9;
    let distance = entry.wrapping_sub(at + 20) as u32;
    code[16..20].copy_from_slice(&distance.to_le_bytes());
    code
}

/// Returns whether `rip` is in a stub or slot. Only user mode executes them.
pub fn is_call_code(rip: u64) -> bool {
    (SLOTS..stub_address(MAX_CALLS)).contains(&rip)
}

/// Offsets of a stub's instructions.
const INSTRUCTIONS: [u64; 3] = [0, 5, 15];

/// Returns the stub that has an instruction at `rip`.
pub fn stub_at(rip: u64) -> Option<u64> {
    let offset = rip.checked_sub(STUBS).filter(|_| is_stub(rip))?;
    INSTRUCTIONS.contains(&(offset % STUB as u64)).then_some(offset / STUB as u64)
}

/// Returns the place of a rewritten call in its page's original, from the first instruction of its
/// stub and its return address.
pub fn call_site(first: [u8; NONE.len()], after: u64) -> u64 {
    let length = if first == NONE { SYSCALL.len() } else { LENGTH };
    after.wrapping_sub(length as u64)
}

/// Returns the first instruction of a stub, and its return address.
pub fn decode_stub(code: &[u8; STUB]) -> Option<([u8; NONE.len()], u64)> {
    Some((*code.first_chunk()?, u64::from_le_bytes(*code[7..].first_chunk()?)))
}

/// Returns whether `rip` is in a stub.
pub fn is_stub(rip: u64) -> bool {
    (STUBS..stub_address(MAX_CALLS)).contains(&rip)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(at: usize, bytes: &[u8]) -> Page {
        let mut page = [0xc3; PAGE as usize];
        page[at..at + bytes.len()].copy_from_slice(bytes);
        page
    }

    /// `mov eax, NUMBER; syscall`.
    fn call(number: u32) -> [u8; 7] {
        let [a, b, c, d] = number.to_le_bytes();
        [MOVE_NUMBER, a, b, c, d, 0x0f, 0x05]
    }

    #[test]
    fn a_call_with_its_number_is_replaced_whole() {
        let found = find_replacement(&page(100, &call(39)), 107, 39).unwrap();
        assert_eq!(
            found,
            Replacement { first: call(39)[..5].try_into().unwrap(), jump: 100, short: None }
        );
    }

    #[test]
    fn the_number_must_be_the_one_of_the_call() {
        assert_eq!(find_replacement(&page(100, &call(39)), 107, 40), None);
    }

    #[test]
    fn a_prefix_before_the_number_selects_another_register() {
        let mut code = [0; 8];
        code[0] = 0x41;
        code[1..].copy_from_slice(&call(39));
        assert_eq!(find_replacement(&page(100, &code), 108, 39), None);
    }

    #[test]
    fn the_sixth_argument_of_the_c_library() {
        let mut code = [0; 7];
        code[..5].copy_from_slice(&LOAD_SIXTH);
        code[5..].copy_from_slice(&SYSCALL);
        let found = find_replacement(&page(64, &code), 71, 9).unwrap();
        assert_eq!((found.first, found.jump, found.short), (LOAD_SIXTH, 64, None));
    }

    #[test]
    fn without_a_move_the_jump_is_in_padding() {
        // `xor eax, eax; syscall; ret`, then padding before the next function.
        let code = [0x31, 0xc0, 0x0f, 0x05, 0xc3, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0, 0x66, 0x90];
        let bytes = page(256, &code);
        let Replacement { first, jump, short } = find_replacement(&bytes, 260, 0).unwrap();
        assert_eq!((first, padding::find(&bytes, 260, LENGTH)), (NONE, Some(jump)));
        assert_eq!(short, Some([SHORT_JUMP, (jump - 260) as u8]));
    }

    #[test]
    fn no_call_site_without_a_system_call_or_at_the_start() {
        assert_eq!(find_replacement(&page(100, &[0x90; 8]), 107, 39), None);
        assert_eq!(find_replacement(&page(0, &SYSCALL), 1, 39), None);
        // The byte before the first instruction is in another page.
        assert_eq!(find_replacement(&page(0, &call(39)), 7, 39), None);
    }

    #[test]
    fn jumps_name_their_slots() {
        for index in [0, 1, MAX_CALLS - 1] {
            let jump = jump_to(index);
            assert_eq!(slot_of(&jump), Some(index.into()));
            // The second half is the interrupt whose vector stands for the call.
            assert_eq!(jump[5..], [0xcd, VECTOR]);
        }
        assert_eq!(slot_of(&[0xff, 0x24, 0x24, 0, 0, 0, 0]), None);
        assert!(slot_of(&[0xff, 0x24, 0x25, 0, 0, 0, 0]).unwrap() > MAX_CALLS.into());
    }

    #[test]
    fn a_stub_keeps_its_instruction_and_return_address() {
        let at = stub_address(3);
        let code = stub_code(at, &LOAD_SIXTH, 0x1234_5678_9abc, 0x7000_0100);
        assert_eq!(decode_stub(&code), Some((LOAD_SIXTH, 0x1234_5678_9abc)));
        let distance = i32::from_le_bytes(code[16..20].try_into().unwrap());
        assert_eq!((at + 20).wrapping_add_signed(distance.into()), 0x7000_0100);
        assert!(code[20..].iter().all(|&byte| byte == 0xcc));
    }

    #[test]
    fn stubs_are_known_by_their_address() {
        assert!(is_stub(stub_address(0)) && is_stub(stub_address(MAX_CALLS) - 1));
        assert!(!is_stub(STUBS - 1) && !is_stub(stub_address(MAX_CALLS)));
    }

    #[test]
    fn frequent_calls_are_rewritten() {
        let mut calls = Calls::default();
        let due: std::vec::Vec<bool> = (0..8).map(|_| calls.note(0x40_1000)).collect();
        assert_eq!(due, [false, false, false, true, false, false, false, true]);
        // Another call site at the same place starts from 0.
        let other = 0x40_1000 + 0x1_0000_0000;
        assert!(!calls.note(other) && !calls.note(0x40_1000));
    }

    #[test]
    fn slots_are_reused_once_no_page_is_copied() {
        let mut calls = Calls::default();
        let (a, b) = (0x40_0000, 0x41_0000);
        for (index, page) in [(0, a), (1, b)] {
            let place = calls.place_of(page).unwrap();
            calls.add(place, page, page);
            assert_eq!(calls.free_slot(), Some(index + 1));
        }
        assert!(calls.has_copy(a) && calls.is_rewritten(b + 5) && !calls.has_copy(a + PAGE));
        calls.forget(a, a + PAGE);
        assert!(!calls.has_copy(a) && calls.free_slot() == Some(2));
        calls.forget(0, u64::MAX);
        assert_eq!(calls.free_slot(), Some(0));
    }

    #[test]
    fn copies_are_found_by_their_originals() {
        let mut calls = Calls::default();
        let place = calls.place_of(0x40_0000).unwrap();
        calls.add(place, 0x40_0000, 0x8000);
        assert_eq!(calls.copy_of(place, 0x8000, PAGE), Some(0x40_0000));
        assert_eq!(calls.copy_of(place, 0x9000, PAGE), None);
        assert_eq!(calls.copy_of(place + 1, 0, u64::MAX), None);
    }
}
