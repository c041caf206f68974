//! Where the next instruction is, when the processor does not say.
//!
//! Older processors (and QEMU's TCG) do not save the address of the next instruction on an exit. The
//! instruction is known by then; what may vary are prefixes, so its bytes are looked at. A cache of translations makes
//! that cheap: a hit is confirmed by the bytes themselves, read anew. Only instructions without prefixes
//! are entered, so a confirmed hit has the length of its pattern.
//!
//! A translation can be stale if the guest replaces the page under a running instruction address. If the old
//! page then still holds the same instruction at that place, only a guest whose new page holds it with a
//! prefix would see a wrong next address, its own; every other stale entry fails the comparison.

use vmm_mem::GuestMemory;

use crate::backend::{Backend, Reg};
use crate::walk::{CodeSize, CodeView};

/// The opcode of an instruction that exits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pattern {
    bytes: [u8; 3],
    length: u8,
}

impl Pattern {
    const fn new<const N: usize>(opcode: [u8; N]) -> Self {
        let mut bytes = [0; 3];
        let mut at = 0;
        while at < N {
            bytes[at] = opcode[at];
            at += 1;
        }
        Self { bytes, length: N as u8 }
    }

    /// `CPUID`.
    pub const CPUID: Self = Self::new([0x0f, 0xa2]);
    /// `RDMSR`.
    pub const RDMSR: Self = Self::new([0x0f, 0x32]);
    /// `WRMSR`.
    pub const WRMSR: Self = Self::new([0x0f, 0x30]);
    /// `HLT`.
    pub const HLT: Self = Self::new([0xf4]);
    /// `VMMCALL`.
    pub const VMMCALL: Self = Self::new([0x0f, 0x01, 0xd9]);
    /// `XSETBV`.
    pub const XSETBV: Self = Self::new([0x0f, 0x01, 0xd1]);
    /// `INVD`.
    pub const INVD: Self = Self::new([0x0f, 0x08]);
    /// `WBINVD`, and `WBNOINVD` with its prefix.
    pub const WBINVD: Self = Self::new([0x0f, 0x09]);
    /// `PAUSE`: `NOP` with a prefix.
    pub const PAUSE: Self = Self::new([0x90]);
}

const ENTRIES: usize = 16;

#[derive(Clone, Copy, Debug)]
struct Entry {
    rip: u64,
    cr3: u64,
    address: u64,
}

/// Guest-physical addresses of instructions that exited lately.
#[derive(Clone, Debug)]
pub struct FetchCache {
    entries: [Entry; ENTRIES],
}

impl Default for FetchCache {
    fn default() -> Self {
        Self::new()
    }
}

impl FetchCache {
    /// An empty cache.
    pub const fn new() -> Self {
        // No CR3 has all bits set, so these never match.
        Self { entries: [Entry { rip: 0, cr3: u64::MAX, address: 0 }; ENTRIES] }
    }

    /// The address after the present instruction, which is one of `patterns`; `None` if it is none of them.
    #[inline]
    pub fn next_rip(
        &mut self,
        vcpu: &mut impl Backend,
        memory: &GuestMemory,
        patterns: &[Pattern],
    ) -> Option<u64> {
        let known = vcpu.next_rip();
        if known != 0 {
            return Some(known);
        }
        let rip = vcpu.get(Reg::Rip);
        let cr3 = vcpu.get(Reg::Cr3);
        let entry = &self.entries[slot(rip)];
        if entry.rip == rip && entry.cr3 == cr3 {
            for pattern in patterns {
                if is_at(memory, entry.address, pattern) {
                    return Some(rip.wrapping_add(pattern.length.into()));
                }
            }
        }
        self.walk(vcpu, memory, patterns, rip, cr3)
    }

    #[cold]
    fn walk(
        &mut self,
        vcpu: &mut impl Backend,
        memory: &GuestMemory,
        patterns: &[Pattern],
        rip: u64,
        cr3: u64,
    ) -> Option<u64> {
        let code = CodeView::of(vcpu);
        let mut bytes = [0; 15];
        let (count, address) = code.fetch(memory, &mut bytes).ok()?;
        let bytes = &bytes[..count];
        let start = prefixes(bytes, code.size);
        let found = patterns.iter().find(|pattern| {
            let opcode = &pattern.bytes[..usize::from(pattern.length)];
            bytes[start..].starts_with(opcode)
        })?;
        // In 64-bit mode the linear address is the instruction pointer; elsewhere the segment would
        // have to be compared too. An instruction across pages has no one place.
        let length = usize::from(found.length);
        if start == 0 && code.size == CodeSize::Bits64 && address & 0xfff <= 0x1000 - length as u64 {
            self.entries[slot(rip)] = Entry { rip, cr3, address };
        }
        Some(code.advance(rip, (start + length) as u64))
    }
}

fn slot(rip: u64) -> usize {
    (rip ^ rip >> 4 ^ rip >> 12) as usize % ENTRIES
}

#[inline]
fn is_at(memory: &GuestMemory, address: u64, pattern: &Pattern) -> bool {
    pattern.bytes[..usize::from(pattern.length)]
        .iter()
        .zip(address..)
        .all(|(&byte, at)| memory.read::<u8>(at) == Ok(byte))
}

/// Number of prefix bytes (APM vol. 3, section 1.2).
pub fn prefixes(bytes: &[u8], size: CodeSize) -> usize {
    let legacy = bytes
        .iter()
        .take_while(|byte| {
            matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3)
        })
        .count();
    let rex = size == CodeSize::Bits64 && bytes.get(legacy).is_some_and(|byte| byte & 0xf0 == 0x40);
    legacy + usize::from(rex)
}
