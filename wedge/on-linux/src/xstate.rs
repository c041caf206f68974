//! Extended state of the guest, where the wedge loads it.
//!
//! `PKRU` is extended state, too: `XRSTOR` with its bit would give the rights of whatever an area says. The wedge never asks for it, and
//! behind each `XRSTOR` it is looked whether it has been asked for, since programs can jump there.

use core::arch::asm;
use core::arch::x86_64::__cpuid_count;

use vmm_cpu::walk::Intent;
use vmm_mem::GuestMemory;
use wedge_core::VirtualCpu;

use crate::memory::PAGE;
use crate::shared::{EXTENDED_STATE, mine, vcpu};

/// `PKRU` in `XCR0` (SDM vol. 1, 13.1).
pub const PKRU: u64 = 1 << 9;
/// Legacy area and header.
const LEAST: u64 = 576;
const HEADER: usize = 512;

/// Where components are in an area.
#[derive(Clone, Copy, Debug)]
pub struct XsaveLayout {
    /// What the host has enabled (`XCR0`).
    enabled: u64,
    /// It has the compacted format (`XSAVEC`).
    is_compacting: bool,
    /// Bytes of an area with all of it.
    length: u64,
    /// Offset and length of each in the standard format, and whether it is aligned in the compacted one.
    each: [(u32, u32, bool); COMPONENTS],
}

/// Components that guests may have: all up to that of `PKRU`.
const COMPONENTS: usize = 9;

/// Asks the processor. To be called before anything is restored.
pub fn detect() {
    let (low, high): (u32, u32);
    // SAFETY: the loader has checked that programs may use it.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack))
    };
    const LEAF: u32 = 0xd;
    let each = core::array::from_fn(|component| {
        let part = __cpuid_count(LEAF, component as u32);
        match component {
            0 | 1 => (0, 0, false),
            _ => (part.ebx, part.eax, part.ecx & 2 != 0),
        }
    });
    let enabled = u64::from(high) << 32 | u64::from(low);
    let length = __cpuid_count(LEAF, 0).ebx.into();
    let is_compacting = __cpuid_count(LEAF, 1).eax & 2 != 0;
    mine().xsave_layout.set(XsaveLayout { enabled, is_compacting, length, each });
}

/// `XSAVE` of the components `features` to `area`, whatever was there: the instruction itself leaves the header's `XCOMP_BV` and
/// reserved words as they are (SDM vol. 1, 13.7), and areas of the guest or of a program, which can be compacted, are copied to the same place.
///
/// # Safety
/// The area is aligned, long enough for them, and used for nothing else.
pub unsafe fn save(area: u64, features: u64) {
    let (low, high) = (features as u32, (features >> 32) as u32);
    // SAFETY: the caller vouches for the area, which has a header.
    unsafe { ((area + HEADER as u64) as *mut [u64; 8]).write_volatile([0; 8]) };
    // SAFETY: the caller vouches for the area.
    unsafe { asm!("xsave64 [{}]", in(reg) area, in("eax") low, in("edx") high) };
}

/// `XRSTOR` from `area` of the components `features`, without `PKRU`.
///
/// # Safety
/// The area is an XSAVE area, long enough for its components, and sound.
pub unsafe fn load(area: u64, features: u64) {
    let features = features & !PKRU;
    let (low, high) = (features as u32, (features >> 32) as u32);
    // SAFETY: the caller vouches for the area; this program does not use extended state itself.
    unsafe {
        asm!(
            "xrstor64 [{area}]",
            "test eax, {pkru}",
            "jnz parador_wedge_wrong",
            area = in(reg) area,
            pkru = const PKRU,
            in("eax") low,
            in("edx") high,
        );
    }
}

/// Gives the processor the extended state that the host's kernel has put into a signal's frame, of which this much is there. What is not sound is
/// left out: a program can have written it.
pub fn restore(area: u64, left: u64) {
    /// `FP_XSTATE_MAGIC1`, and where it and the features are (`struct _fpx_sw_bytes`).
    const MAGIC: u32 = 0x4650_5853;
    const AT: usize = 464;
    if area == 0 || left < LEAST {
        return;
    }
    let bytes = area as *const u8;
    // SAFETY: the area is on a stack of signals, this long at least; if the host's kernel has written it, it has the features that it says.
    unsafe {
        if bytes.add(AT).cast::<u32>().read_unaligned() == MAGIC {
            let features = bytes.add(AT + 8).cast::<u64>().read_unaligned();
            let header = bytes.add(HEADER).cast::<[u64; 8]>().read_unaligned();
            let control = bytes.add(24).cast::<u32>().read_unaligned();
            let parts = mine().xsave_layout.get();
            if is_valid(&header, control, parts.enabled) && left >= parts.length {
                load(area, features);
            }
        } else if bytes.add(24).cast::<u32>().read_unaligned() >> 16 == 0 {
            asm!("fxrstor64 [{}]", in(reg) area);
        }
    }
}

/// Whether `XRSTOR` takes an area with this header and `MXCSR` (SDM vol. 1, 13.8), on a processor with these features.
fn is_valid(header: &[u64; 8], control: u32, known: u64) -> bool {
    const COMPACT: u64 = 1 << 63;
    let [present, layout, rest @ ..] = *header;
    let parts = match layout {
        0 => present & !known == 0,
        _ => {
            mine().xsave_layout.get().is_compacting
                && layout & COMPACT != 0
                && layout & !COMPACT & !known == 0
                && present & !(layout & !COMPACT) == 0
        }
    };
    parts && rest == [0; 6] && control >> 16 == 0
}

/// Why the guest's `XRSTOR` is not carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum XrstorError {
    /// The area is not readable.
    Fault(vmm_cpu::walk::PageFault),
    /// It is not sound.
    Protection,
}

/// Carries out the guest's `XRSTOR` from a linear address.
pub fn emulate_xrstor(
    cpu: &VirtualCpu,
    memory: &GuestMemory,
    linear: u64,
    xcr0: u64,
) -> Result<(), XrstorError> {
    if !linear.is_multiple_of(64) {
        return Err(XrstorError::Protection);
    }
    let wanted = (cpu.frame.gpr[2] << 32 | cpu.frame.gpr[0] & 0xffff_ffff) & xcr0;
    let at = vcpu().xsave.0.at();
    // SAFETY: only a change of the process uses it otherwise, which is not now.
    let area = unsafe { &mut *at };
    let read = |from: usize, to: &mut [u8]| {
        let (mut at, mut left) = (linear.wrapping_add(from as u64), to);
        while !left.is_empty() {
            let length = ((PAGE - at % PAGE) as usize).min(left.len());
            // With the rights of who asks for it.
            let found = cpu.paging(at, cpu.cpl == 3).translate(memory, at, Intent::Read, true);
            let (part, rest) = left.split_at_mut(length);
            if memory.read_slice(found.map_err(XrstorError::Fault)?.0, part).is_err() {
                // As of memory that is not there.
                part.fill(0xff);
            }
            (at, left) = (at.wrapping_add(length as u64), rest);
        }
        Ok(())
    };
    read(0, &mut area[..LEAST as usize])?;
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&area[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    let header: [u64; 8] = core::array::from_fn(|index| word(HEADER + 8 * index));
    let control = word(24) as u32;
    if !is_valid(&header, control, xcr0) {
        return Err(XrstorError::Protection);
    }
    let end = length(&header, wanted);
    let end = usize::try_from(end).unwrap_or(EXTENDED_STATE).min(EXTENDED_STATE);
    if end > LEAST as usize {
        read(LEAST as usize, &mut area[LEAST as usize..end])?;
    }
    // SAFETY: the area is a copy that is sound, and as long as its components.
    unsafe { load(at as u64, wanted) };
    Ok(())
}

/// Bytes of an area that `XRSTOR` reads for these components.
fn length(header: &[u64; 8], wanted: u64) -> u64 {
    let [present, layout, ..] = *header;
    let compact = layout >> 63 != 0;
    let mut end = LEAST;
    let mut next = LEAST;
    let parts = mine().xsave_layout.get().each;
    for (component, &(offset, length, aligned)) in parts.iter().enumerate().skip(2) {
        let bit = 1 << component;
        let is_read = present & wanted & bit != 0;
        let (offset, length) = (u64::from(offset), u64::from(length));
        if !compact {
            end = if is_read { end.max(offset + length) } else { end };
        } else if layout & bit != 0 {
            next = if aligned { next.next_multiple_of(64) } else { next };
            next += length;
            end = if is_read { next } else { end };
        }
    }
    end
}
