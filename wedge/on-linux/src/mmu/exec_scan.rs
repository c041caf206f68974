//! Search of executable pages for instructions that change `PKRU`, with protection keys: user mode
//! must find none, except in the wedge's guarded entry code.
//!
//! Keys do not restrict instruction fetches, so every executable page of the process matters,
//! including the kernel's. Pages are scanned for `WRPKRU` and `XRSTOR` at every byte where an
//! instruction can begin. User code executes from copies in memory of the wedge
//! ([`crate::mmu::copies`]): a write to the original page, by user mode through another mapping, by
//! the kernel or by a device, does not change the copy. A sequence that is an instruction becomes
//! `UD1` in the copy, and the wedge emulates it. In kernel code it becomes `UD1` in place
//! ([`crate::mmu::kernel_code`]). A page in which a sequence is part of other instructions is
//! single-stepped ([`crate::mmu::steps`]).
//!
//! Code for user mode has the type [`ScannedPage`], which only a scan creates; nothing else is
//! written to copies.
//!
//! Invariants: the executable user-mode mappings of a process are copies, those of
//! [`crate::mmu::rewrite`], or, while the trap flag is set, stepped pages. A copy contains no
//! sequence, nor do two adjacent mapped copies. Copies belong to one vCPU: nothing executes a copy
//! while the wedge changes it.

use crate::mmu::ram::PAGE;

/// First byte of both sequences.
const FIRST: u8 = 0x0f;
/// Second byte of `UD1`, whose operand is encoded in the same way (SDM vol. 2).
pub const UD1: u8 = 0xb9;
/// Length of a sequence in bytes.
pub const LENGTH: usize = 3;
/// Longest instruction in bytes.
pub const LONGEST: u64 = 15;

/// Contents of a page of code.
pub type Page = [u8; PAGE as usize];

/// Returns whether `FIRST` and these bytes are `WRPKRU`, or `XRSTOR` from memory.
fn completes(second: u8, third: u8) -> bool {
    match second {
        0x01 => third == 0xef,
        0xae => third & 0x38 == 0x28 && third < 0xc0,
        _ => false,
    }
}

/// Returns the offset of the first sequence from an offset on.
pub fn find(bytes: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    while at + LENGTH <= bytes.len() {
        // Skip eight bytes at a time without the first byte.
        if let Some(&word) = bytes[at..].first_chunk::<8>() {
            let differs = u64::from_ne_bytes(word) ^ u64::from_ne_bytes([FIRST; 8]);
            const LOW: u64 = u64::from_ne_bytes([0x01; 8]);
            const HIGH: u64 = u64::from_ne_bytes([0x80; 8]);
            if differs.wrapping_sub(LOW) & !differs & HIGH == 0 {
                at += 8;
                continue;
            }
        }
        let end = (at + 8).min(bytes.len() - LENGTH + 1);
        for place in at..end {
            if bytes[place] == FIRST && completes(bytes[place + 1], bytes[place + 2]) {
                return Some(place);
            }
        }
        at += 8;
    }
    None
}

/// Returns whether a sequence is an instruction as C libraries use it: `xor edx, edx; xrstor`, and
/// `wrpkru; xor eax, eax; ret`.
fn is_instruction(bytes: &[u8], at: usize) -> bool {
    match bytes[at + 1] {
        0xae => {
            let before = &bytes[..at];
            let before = before.strip_suffix(&[0x48]).unwrap_or(before);
            before.ends_with(&[0x31, 0xd2])
        }
        _ => bytes[at + LENGTH..].starts_with(&[0x31, 0xc0, 0xc3]),
    }
}

/// Page that user mode may execute: with protection keys, no sequence is in it, and none begins or
/// ends in it that did not before.
#[derive(Clone, PartialEq, Eq)]
pub struct ScannedPage(Page);

impl ScannedPage {
    /// Closes the sequences of a page; `None`: it must not be executed.
    pub fn closed(mut page: Page) -> Option<Self> {
        close(&mut page).then_some(Self(page))
    }

    /// Applies edits to an executable page; `None`: the result must not be executed, which `keys`
    /// restrict.
    pub fn edited<'a>(
        mut page: Page,
        keys: bool,
        edits: impl Iterator<Item = (usize, &'a [u8])>,
    ) -> Option<Self> {
        const BORDER: usize = LENGTH - 1;
        for (at, bytes) in edits {
            let end = at + bytes.len();
            // The borders have determined which pages may be adjacent.
            if keys && (at < BORDER || end > page.len() - BORDER) {
                return None;
            }
            page.get_mut(at..end)?.copy_from_slice(bytes);
        }
        let has_sequence = keys && find(&page, 0).is_some();
        (!has_sequence).then_some(Self(page))
    }

    /// Returns its contents.
    pub fn bytes(&self) -> &Page {
        &self.0
    }
}

/// Replaces the sequences that are instructions by `UD1`; `false`: the page must not be executed.
fn close(bytes: &mut [u8; PAGE as usize]) -> bool {
    let mut from = 0;
    while let Some(at) = find(bytes, from) {
        if !is_instruction(bytes, at) {
            return false;
        }
        bytes[at + 1] = UD1;
        from = at + 1;
    }
    true
}

/// Returns whether a sequence may end with the first bytes of a page.
pub fn is_end(page: &[u8; PAGE as usize]) -> bool {
    let [a, b, ..] = *page;
    completes(0x01, a) || completes(0xae, a) || completes(a, b)
}

/// Returns the last two bytes if a sequence may begin there.
pub fn is_beginning(page: &[u8; PAGE as usize]) -> Option<[u8; 2]> {
    let [.., a, b] = *page;
    (b == FIRST || a == FIRST && matches!(b, 0x01 | 0xae)).then_some([a, b])
}

/// Effect of an instruction on a single step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// None: the trap follows it.
    Step,
    /// It pushes the trap flag.
    Pushes,
    /// It is a sequence, or another instruction could execute before the trap (SDM vol. 3, 6.8.3,
    /// 18.3.1.4; vol. 1, 16.3.7).
    Never,
}

/// Classifies a user-mode instruction, which may be truncated where the following bytes are not
/// executable.
pub fn next(bytes: &[u8]) -> Next {
    // In 32-bit code 40 to 4F are instructions; their successor is classified too early then.
    let is_prefix = |byte: &u8| matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x40..=0x4f | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3);
    let prefixes = bytes.iter().take_while(|byte| is_prefix(byte)).count();
    match bytes[prefixes..] {
        [0x9c, ..] => Next::Pushes,
        // POP SS, POPF, IRET, MOV to SS, XBEGIN.
        [0x17 | 0x9d | 0xcf, ..] | [0xc7, 0xf8, ..] => Next::Never,
        [0x8e, operands, ..] if operands >> 3 & 7 == 2 => Next::Never,
        [FIRST, second, third, ..] if completes(second, third) => Next::Never,
        _ => Next::Step,
    }
}

/// Returns the first and the last page that the instruction at an address may be in.
pub fn pages_of(rip: u64) -> (u64, u64) {
    (rip & !(PAGE - 1), rip.wrapping_add(LONGEST - 1) & !(PAGE - 1))
}

/// Returns whether an address is in a page that the instruction at `rip` may be in.
pub fn is_beside(rip: u64, linear: u64) -> bool {
    let (first, last) = pages_of(rip);
    [first, last].contains(&(linear & !(PAGE - 1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WRPKRU: [u8; 3] = [0x0f, 0x01, 0xef];
    const XRSTOR: [u8; 3] = [0x0f, 0xae, 0x28];

    fn page(at: usize, bytes: &[u8]) -> Page {
        let mut page = [0x90; PAGE as usize];
        page[at..at + bytes.len()].copy_from_slice(bytes);
        page
    }

    #[test]
    fn both_sequences_are_found_at_every_offset() {
        for sequence in [WRPKRU, XRSTOR] {
            for at in [0, 1, 7, 8, 9, 4092, 4093] {
                assert_eq!(find(&page(at, &sequence), 0), Some(at), "{sequence:x?} at {at}");
            }
        }
    }

    #[test]
    fn other_instructions_with_the_same_first_bytes_are_none() {
        // XGETBV, XSAVE, LFENCE, XRSTOR with a register operand.
        for bytes in
            [[0x0f, 0x01, 0xd0], [0x0f, 0xae, 0x20], [0x0f, 0xae, 0xe8], [0x0f, 0xae, 0xef]]
        {
            assert_eq!(find(&page(100, &bytes), 0), None, "{bytes:x?}");
        }
    }

    #[test]
    fn each_operand_of_xrstor_from_memory_is_found() {
        for operand in 0..=0xff_u8 {
            let is_memory = operand >> 6 != 3 && operand >> 3 & 7 == 5;
            assert_eq!(find(&[0x0f, 0xae, operand], 0).is_some(), is_memory, "{operand:#x}");
        }
    }

    #[test]
    fn a_sequence_before_the_start_or_cut_off_is_not_found() {
        assert_eq!(find(&page(8, &WRPKRU), 9), None);
        assert_eq!(find(&WRPKRU[..2], 0), None);
        assert_eq!(find(&page(4094, &WRPKRU[..2]), 0), None);
    }

    proptest! {
        #[test]
        fn the_search_by_words_agrees_with_one_by_bytes(
            bytes in proptest::collection::vec(
                prop_oneof![Just(0x0f_u8), Just(0x01), Just(0xae), Just(0xef), Just(0x28), any::<u8>()],
                0..64,
            ),
            from in 0..64_usize,
        ) {
            let slow = bytes.windows(3).enumerate().skip(from).find(|(_, three)| {
                three[0] == 0x0f && completes(three[1], three[2])
            });
            prop_assert_eq!(find(&bytes, from), slow.map(|(at, _)| at));
        }

        #[test]
        fn a_scanned_page_has_no_sequence(
            bytes in proptest::collection::vec(prop_oneof![Just(0x0f_u8), Just(0x01), Just(0xef), Just(0x31), Just(0xc0), Just(0xc3)], 40),
        ) {
            if let Some(scanned) = ScannedPage::closed(page(8, &bytes)) {
                prop_assert_eq!(find(scanned.bytes(), 0), None);
            }
        }
    }

    #[test]
    fn instructions_of_c_libraries_become_ud1() {
        let wrpkru = page(16, &[0x0f, 0x01, 0xef, 0x31, 0xc0, 0xc3]);
        let closed = ScannedPage::closed(wrpkru).unwrap();
        assert_eq!(closed.bytes()[16..19], [0x0f, UD1, 0xef]);
        // `xor edx, edx; xrstor [rsp]`, with and without REX.W.
        for code in
            [&[0x31, 0xd2, 0x0f, 0xae, 0x2c, 0x24][..], &[0x31, 0xd2, 0x48, 0x0f, 0xae, 0x2c, 0x24]]
        {
            let closed = ScannedPage::closed(page(16, code)).unwrap();
            assert_eq!(find(closed.bytes(), 0), None);
        }
    }

    #[test]
    fn a_sequence_inside_of_other_code_refuses_the_page() {
        assert!(ScannedPage::closed(page(16, &WRPKRU)).is_none());
        assert!(ScannedPage::closed(page(16, &XRSTOR)).is_none());
    }

    #[test]
    fn edits_may_not_form_a_sequence_with_keys() {
        let before = page(16, &[0x0f, 0x01]);
        let edit = [(18, &[0xef][..])];
        assert!(ScannedPage::edited(before, true, edit.into_iter()).is_none());
        let free = ScannedPage::edited(before, false, edit.into_iter()).unwrap();
        assert_eq!(free.bytes()[16..19], WRPKRU);
    }

    #[test]
    fn edits_at_the_borders_are_refused_with_keys_and_beyond_the_page_always() {
        let page = page(0, &[]);
        for at in [0, 1, 4095] {
            assert!(
                ScannedPage::edited(page, true, [(at, &[0][..])].into_iter()).is_none(),
                "{at}"
            );
            assert!(
                ScannedPage::edited(page, false, [(at, &[0][..])].into_iter()).is_some(),
                "{at}"
            );
        }
        assert!(ScannedPage::edited(page, true, [(2, &[0][..])].into_iter()).is_some());
        assert!(ScannedPage::edited(page, false, [(4095, &[0, 0][..])].into_iter()).is_none());
    }

    #[test]
    fn beginnings_and_ends_of_sequences_across_pages() {
        assert_eq!(is_beginning(&page(4095, &[0x0f])), Some([0x90, 0x0f]));
        assert_eq!(is_beginning(&page(4094, &[0x0f, 0xae])), Some([0x0f, 0xae]));
        assert_eq!(is_beginning(&page(4094, &[0x0f, 0x05])), None);
        assert!(is_end(&page(0, &[0xef])));
        assert!(is_end(&page(0, &[0xae, 0x28])));
        assert!(is_end(&page(0, &[0x2c])));
        assert!(!is_end(&page(0, &[0x90, 0x90])));
    }

    #[test]
    fn the_effect_of_instructions_on_a_step() {
        assert_eq!(next(&[0x90]), Next::Step);
        assert_eq!(next(&[0x66, 0x9c]), Next::Pushes);
        // POP SS, POPF, IRETQ, XBEGIN, MOV SS, WRPKRU.
        for code in [&[0x17][..], &[0x9d], &[0x48, 0xcf], &[0xc7, 0xf8], &[0x8e, 0xd0], &WRPKRU] {
            assert_eq!(next(code), Next::Never, "{code:x?}");
        }
        // MOV DS.
        assert_eq!(next(&[0x8e, 0xd8]), Next::Step);
    }

    #[test]
    fn pages_of_an_instruction() {
        assert_eq!(pages_of(0x1000), (0x1000, 0x1000));
        assert_eq!(pages_of(0x1ff2), (0x1000, 0x2000));
        assert!(is_beside(0x1ff2, 0x2fff) && is_beside(0x1ff2, 0x1000));
        assert!(!is_beside(0x1ff1, 0x2000));
    }
}
