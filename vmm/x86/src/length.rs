//! Address of the next instruction, when the CPU does not report it.
//!
//! Older CPUs (and QEMU TCG) do not save the address of the next instruction on an exit. The exit
//! gives the instruction, but its prefixes may vary, so the VMM reads its bytes. A cache of
//! translations, page by page, makes that cheap: a hit is confirmed by the bytes themselves, which
//! are read again, and only for an instruction without prefixes, so a confirmed hit has the length
//! of its pattern.
//!
//! A translation can be stale if the guest replaces the page under a running instruction address.
//! If the old page then still holds the same instruction at that address, only a guest whose new
//! page holds it with a prefix would see a wrong next address, its own; every other stale entry
//! fails the comparison.

use vmm_mem::GuestMemory;

use crate::registers::Reg;
use crate::vcpu::X86Vcpu;
use crate::walk::{CodeSize, CodeView, is_64_bit, locate_64_bit};

/// Opcode of an instruction that exits: its bytes as a little-endian number, a mask of the
/// significant bits, and the number of bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pattern {
    opcode: u32,
    mask: u32,
    length: u8,
}

impl Pattern {
    const fn new(opcode: u32, length: u8) -> Self {
        Self { opcode, mask: u32::MAX >> (32 - 8 * length), length }
    }

    /// `CPUID`.
    pub const CPUID: Self = Self::new(0xa20f, 2);
    /// `RDMSR`.
    pub const RDMSR: Self = Self::new(0x320f, 2);
    /// `WRMSR`.
    pub const WRMSR: Self = Self::new(0x300f, 2);
    /// `HLT`.
    pub const HLT: Self = Self::new(0xf4, 1);
    /// `VMMCALL`.
    pub const VMMCALL: Self = Self::new(0xd9_010f, 3);
    /// `XSETBV`.
    pub const XSETBV: Self = Self::new(0xd1_010f, 3);
    /// `INVD` (`0F 08`), `WBINVD` (`0F 09`), and `WBNOINVD` with its prefix.
    pub const CACHE_FLUSH: Self = Self { mask: 0xfeff, ..Self::new(0x080f, 2) };
    /// `PAUSE`: `NOP` with a prefix.
    pub const PAUSE: Self = Self::new(0x90, 1);

    /// True if the instruction begins with these bytes.
    #[inline]
    const fn is(&self, bytes: u64) -> bool {
        bytes as u32 & self.mask == self.opcode
    }

    /// True if the instruction at a guest-physical address begins with these bytes, in the same
    /// page.
    #[inline(always)]
    fn is_at(self, memory: &GuestMemory, address: u64) -> bool {
        // Aligned words are read at once and never cross a page.
        let (base, shift) = (address & !7, 8 * (address & 7));
        let low = memory.read::<u64>(base).unwrap_or(0) >> shift;
        let whole = shift + 8 * u64::from(self.length) <= 64;
        self.is(if whole { low } else { low | second_word(memory, base + 8) << (64 - shift) })
    }
}

const ENTRIES: usize = 16;
/// Bits of an address within its page.
const OFFSET: u64 = 0xfff;

/// Translation of a page of code in 64-bit mode, where linear addresses are instruction pointers.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Linear address of the page.
    page: u64,
    cr3: u64,
    /// Guest-physical address of the page.
    address: u64,
}

/// Cache of the guest-physical addresses of pages whose instructions exited recently.
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
        // No page has this address, so these never match.
        Self { entries: [Entry { page: u64::MAX, cr3: 0, address: 0 }; ENTRIES] }
    }

    /// Address after the current instruction if it is `pattern`, else `None`.
    #[inline(always)]
    pub fn next_rip(
        &mut self,
        vcpu: &mut impl X86Vcpu,
        memory: &GuestMemory,
        pattern: Pattern,
    ) -> Option<u64> {
        let known = vcpu.next_rip();
        if known != 0 {
            return Some(known);
        }
        self.find(vcpu, memory, pattern)
    }

    /// Like [`Self::next_rip`], but reads the bytes in any case: after an exit not caused by an
    /// instruction the address that the CPU reports belongs to another instruction.
    #[inline(never)]
    pub fn next_rip_from_bytes(
        &mut self,
        vcpu: &mut impl X86Vcpu,
        memory: &GuestMemory,
        pattern: Pattern,
    ) -> Option<u64> {
        self.find(vcpu, memory, pattern)
    }

    #[inline(always)]
    fn find(
        &mut self,
        vcpu: &mut impl X86Vcpu,
        memory: &GuestMemory,
        pattern: Pattern,
    ) -> Option<u64> {
        if is_64_bit(vcpu) {
            let rip = vcpu.get(Reg::Rip);
            let cr3 = vcpu.get(Reg::Cr3);
            let entry = &self.entries[slot(rip)];
            let page = if entry.page == rip & !OFFSET && entry.cr3 == cr3 {
                Some(entry.address)
            } else {
                self.walk(memory, rip, cr3)
            };
            if page.is_some_and(|page| pattern.is_at(memory, page | rip & OFFSET)) {
                return Some(rip.wrapping_add(pattern.length.into()));
            }
        }
        decode_next_rip(vcpu, memory, pattern)
    }

    /// Translates the page of code at `rip` and caches the result.
    #[inline(never)]
    fn walk(&mut self, memory: &GuestMemory, rip: u64, cr3: u64) -> Option<u64> {
        let address = locate_64_bit(memory, cr3, rip)? & !OFFSET;
        self.entries[slot(rip)] = Entry { page: rip & !OFFSET, cr3, address };
        Some(address)
    }
}

/// [`FetchCache::next_rip`] of an instruction with prefixes, in another mode, or across pages.
#[cold]
fn decode_next_rip(vcpu: &mut impl X86Vcpu, memory: &GuestMemory, pattern: Pattern) -> Option<u64> {
    let code = CodeView::of(vcpu);
    let mut bytes = [0; 15];
    let (count, _) = code.fetch(memory, &mut bytes).ok()?;
    let start = prefixes(&bytes[..count], code.size);
    let length = usize::from(pattern.length);
    let opcode = bytes[..count].get(start..start + length)?;
    let opcode = opcode.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
    pattern.is(opcode).then(|| code.advance(vcpu.get(Reg::Rip), (start + length) as u64))
}

#[inline(always)]
fn slot(rip: u64) -> usize {
    (rip >> 12 ^ rip >> 16) as usize % ENTRIES
}

/// The word at `address`, unless it is in the next page.
#[cold]
fn second_word(memory: &GuestMemory, address: u64) -> u64 {
    if address & 0xfff == 0 { 0 } else { memory.read(address).unwrap_or(0) }
}

/// Number of prefix bytes (APM vol. 3, section 1.2).
fn prefixes(bytes: &[u8], size: CodeSize) -> usize {
    let legacy = bytes
        .iter()
        .take_while(|byte| {
            matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3)
        })
        .count();
    let rex = size == CodeSize::Bits64 && bytes.get(legacy).is_some_and(|byte| byte & 0xf0 == 0x40);
    legacy + usize::from(rex)
}
