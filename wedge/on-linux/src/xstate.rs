//! Extended state of the guest, where the wedge saves and restores it.
//!
//! `PKRU` is part of extended state: `XRSTOR` of its component would load rights from memory. The
//! wedge never requests that component, and checks this after each `XRSTOR`, because user mode can
//! jump to the instruction.

use core::arch::asm;
use core::arch::x86_64::__cpuid_count;

use hw_walk::Intent;
use proto::hosted::layout::EXTENDED_STATE;
use vmm_mem::GuestMemory;
use vmm_x86::walk::GuestTables;
use wedge_core::VirtualCpu;

use crate::mmu::ram::PAGE;
use crate::state::process::process;
use crate::state::records::{COMPONENTS, XsaveLayout};
use crate::state::shared::vcpu;

/// `PKRU` component in `XCR0` (SDM vol. 1, 13.1).
pub const PKRU: u64 = 1 << 9;
/// Components that guests may have.
const GUEST: u64 = (1 << COMPONENTS) - 1;
/// Length of legacy area and header in bytes.
const LEAST: u64 = 576;
const HEADER: usize = 512;

/// Reads the layout from CPUID. To be called before any restore.
pub fn detect() {
    let (low, high): (u32, u32);
    // SAFETY: the loader has checked that user mode may execute it.
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
    let is_compacting = __cpuid_count(LEAF, 1).eax & 2 != 0;
    process().xsave_layout.set(XsaveLayout { enabled, is_compacting, each });
}

/// Saves the components `features` to `area` (`XSAVE`), whatever its previous contents. The
/// instruction itself preserves the header's `XCOMP_BV` and reserved words (SDM vol. 1, 13.7), but
/// the same memory also receives copies of guest areas, which may be compacted.
///
/// # Safety
/// The area must be aligned, long enough for the components, and without any other use.
pub unsafe fn save(area: u64, features: u64) {
    let (low, high) = (features as u32, (features >> 32) as u32);
    // SAFETY: the caller guarantees an area, which has a header.
    unsafe { ((area + HEADER as u64) as *mut [u64; 8]).write_volatile([0; 8]) };
    // SAFETY: the caller guarantees the area.
    unsafe { asm!("xsave64 [{}]", in(reg) area, in("eax") low, in("edx") high) };
}

/// Restores the components `features`, except for `PKRU`, from `area` (`XRSTOR`).
///
/// # Safety
/// The area must be a valid XSAVE area, and long enough for its components.
pub unsafe fn load(area: u64, features: u64) {
    let features = features & !PKRU;
    let (low, high) = (features as u32, (features >> 32) as u32);
    // SAFETY: the caller guarantees the area; the wedge does not use extended state itself.
    unsafe {
        asm!(
            "xrstor64 [rdi]",
            "test eax, {pkru}",
            "jnz parador_wedge_wrong",
            in("rdi") area,
            pkru = const PKRU,
            in("eax") low,
            in("edx") high,
        );
    }
}

/// Returns the length of an instruction that restores extended state, by its bytes; `None`: it is
/// another one. After `#GP`, which loads nothing, the wedge continues behind it: a signal may
/// overwrite a forged frame after the check of [`restore`].
pub fn refused_restore(code: [u8; 4]) -> Option<u64> {
    const XRSTOR: [u8; 4] = [0x48, 0x0f, 0xae, 0x2f];
    const FXRSTOR: [u8; 4] = [0x48, 0x0f, 0xae, 0x0f];
    [XRSTOR, FXRSTOR].contains(&code).then_some(code.len() as u64)
}

/// Restores the extended state from a signal frame, of which `left` bytes are accessible. Invalid
/// state is ignored: user mode may have forged it.
pub fn restore(area: u64, left: u64) {
    /// `FP_XSTATE_MAGIC1`, the offset of `struct _fpx_sw_bytes`, and that of the features in it.
    const MAGIC: u32 = 0x4650_5853;
    const AT: usize = 464;
    if area == 0 || left < LEAST {
        return;
    }
    let bytes = area as *const u8;
    // SAFETY: the area is on a signal stack and at least this long; if the host kernel has written
    // it, it has the features that it states.
    unsafe {
        if bytes.add(AT).cast::<u32>().read_unaligned() == MAGIC {
            let features = bytes.add(AT + 8).cast::<u64>().read_unaligned();
            let header = bytes.add(HEADER).cast::<[u64; 8]>().read_unaligned();
            let control = bytes.add(24).cast::<u32>().read_unaligned();
            let parts = process().xsave_layout.get();
            // The host saves components that a guest has not (AMX) only if they are in use: their
            // room may be missing, but they are not read.
            let features = features & GUEST;
            if is_valid(&header, control, &parts, parts.enabled)
                && left >= length(&header, features, &parts)
            {
                load(area, features);
            }
        } else if bytes.add(24).cast::<u32>().read_unaligned() >> 16 == 0 {
            asm!("fxrstor64 [rdi]", in("rdi") area);
        }
    }
}

/// Returns whether `XRSTOR` accepts an area with this header and `MXCSR` (SDM vol. 1, 13.8), on a
/// CPU with these components.
fn is_valid(header: &[u64; 8], control: u32, parts: &XsaveLayout, known: u64) -> bool {
    const COMPACT: u64 = 1 << 63;
    let [present, layout, rest @ ..] = *header;
    let is_known = match layout {
        0 => present & !known == 0,
        _ => {
            parts.is_compacting
                && layout & COMPACT != 0
                && layout & !COMPACT & !known == 0
                && present & !(layout & !COMPACT) == 0
        }
    };
    is_known && rest == [0; 6] && control >> 16 == 0
}

/// Reason for not emulating an `XRSTOR`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum XrstorError {
    /// The area is not readable.
    Fault(hw_walk::PageFault),
    /// The area is invalid.
    Protection,
}

/// Emulates the guest's `XRSTOR` from a linear address. [`refused_restore`] must not skip that of a
/// valid area: the registers of another task would stay.
pub fn emulate_xrstor(
    cpu: &VirtualCpu,
    memory: &GuestMemory,
    linear: u64,
    xcr0: u64,
) -> Result<(), XrstorError> {
    if !linear.is_multiple_of(64) {
        return Err(XrstorError::Protection);
    }
    let parts = process().xsave_layout.get();
    let known = parts.enabled_of(xcr0);
    let wanted = (cpu.frame.gpr[2] << 32 | cpu.frame.gpr[0] & 0xffff_ffff) & known;
    let at = vcpu().xsave.0.at();
    // SAFETY: its only other use is a switch of the process, which does not happen now.
    let area = unsafe { &mut *at };
    let tables = GuestTables(memory);
    let read = |from: usize, to: &mut [u8]| {
        let (mut at, mut left) = (linear.wrapping_add(from as u64), to);
        while !left.is_empty() {
            let length = ((PAGE - at % PAGE) as usize).min(left.len());
            // With the rights of the current privilege level.
            let found = cpu.paging(at, cpu.cpl == 3).translate(&tables, at, Intent::Read, true);
            let (part, rest) = left.split_at_mut(length);
            if memory.read_slice(found.map_err(XrstorError::Fault)?.address, part).is_err() {
                // Unassigned memory reads as all ones.
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
    if !is_valid(&header, control, &parts, known) {
        return Err(XrstorError::Protection);
    }
    let end = length(&header, wanted, &parts);
    let end = usize::try_from(end).unwrap_or(EXTENDED_STATE).min(EXTENDED_STATE);
    if end > LEAST as usize {
        read(LEAST as usize, &mut area[LEAST as usize..end])?;
    }
    // SAFETY: the area is a validated copy, and as long as its components.
    unsafe { load(at as u64, wanted) };
    Ok(())
}

/// Returns the number of bytes that `XRSTOR` reads for these components.
fn length(header: &[u64; 8], wanted: u64, parts: &XsaveLayout) -> u64 {
    let [present, layout, ..] = *header;
    let compact = layout >> 63 != 0;
    let mut end = LEAST;
    let mut next = LEAST;
    for (component, &(offset, length, aligned)) in parts.each.iter().enumerate().skip(2) {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A CPU with AVX-512, PKRU and AMX, whose tile data is from 2,752 to 10,944.
    fn with_amx() -> XsaveLayout {
        let mut each = [(0, 0, false); COMPONENTS];
        each[2] = (576, 256, false);
        each[5] = (1088, 64, false);
        each[6] = (1152, 512, false);
        each[7] = (1664, 1024, false);
        each[8] = (2688, 0, false);
        XsaveLayout { enabled: 0x6_02e7, is_compacting: true, each }
    }

    #[test]
    fn state_of_guests_needs_no_room_for_that_of_the_host() {
        let parts = with_amx();
        let header = [0x2_00e7, 0, 0, 0, 0, 0, 0, 0];
        assert!(is_valid(&header, 0x1f80, &parts, parts.enabled));
        assert_eq!(length(&header, parts.enabled & GUEST, &parts), 2688);
        let few = [0x7, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(length(&few, GUEST, &parts), 832);
    }

    #[test]
    fn state_that_the_host_has_disabled_is_invalid() {
        // AVX-512 of the CPU is disabled.
        let parts = XsaveLayout { enabled: 0x207, ..with_amx() };
        let known = parts.enabled_of(0xe7);
        assert_eq!(known, 7);
        assert!(is_valid(&[7, 0, 0, 0, 0, 0, 0, 0], 0x1f80, &parts, known));
        assert!(!is_valid(&[0xe7, 0, 0, 0, 0, 0, 0, 0], 0x1f80, &parts, known));
        assert!(!is_valid(&[7, 1 << 63 | 0xe7, 0, 0, 0, 0, 0, 0], 0x1f80, &parts, known));
    }

    #[test]
    fn compacted_state_is_as_long_as_its_last_component() {
        let parts = with_amx();
        let header = [0x24, 1 << 63 | 0x64, 0, 0, 0, 0, 0, 0];
        assert!(is_valid(&header, 0x1f80, &parts, parts.enabled));
        assert_eq!(length(&header, GUEST, &parts), LEAST + 256 + 64);
        // A component that the area has no room for.
        assert!(!is_valid(&[0x80, 1 << 63, 0, 0, 0, 0, 0, 0], 0x1f80, &parts, parts.enabled));
    }

    #[test]
    fn an_instruction_that_restores_is_recognized() {
        // xrstor64 [rdi], fxrstor64 [rdi], xsave64 [rdi], xrstor [rdi]
        assert_eq!(refused_restore([0x48, 0x0f, 0xae, 0x2f]), Some(4));
        assert_eq!(refused_restore([0x48, 0x0f, 0xae, 0x0f]), Some(4));
        assert_eq!(refused_restore([0x48, 0x0f, 0xae, 0x27]), None);
        assert_eq!(refused_restore([0x0f, 0xae, 0x2f, 0x48]), None);
    }

    #[test]
    fn what_xrstor_refuses_is_invalid() {
        let parts = with_amx();
        let is_valid =
            |header: [u64; 8], control| is_valid(&header, control, &parts, parts.enabled);
        assert!(is_valid([3, 0, 0, 0, 0, 0, 0, 0], 0x1f80));
        assert!(!is_valid([1 << 62, 0, 0, 0, 0, 0, 0, 0], 0x1f80));
        assert!(!is_valid([3, 0, 1, 0, 0, 0, 0, 0], 0x1f80));
        assert!(!is_valid([3, 0, 0, 0, 0, 0, 0, 0], 0x1_0000));
    }
}
