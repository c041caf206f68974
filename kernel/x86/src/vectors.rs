//! SSE registers of a guest, which the VMM reads on request (`group::VECTORS`): from the CPU if
//! this vCPU ran there last, else from its save area (APM vol. 2 §11.4.4, §11.5.2).

use core::arch::asm;

use crate::io::{clear_ts, set_ts};

/// SSE registers in the format of the state page.
pub type XmmRegisters = [[u64; 2]; 16];

/// Offset of the registers in a save area.
const XMM: usize = 160;
/// Offset of the word that marks the components of an XSAVE area that are not in their initial
/// state, and its bit for the SSE registers.
const XSTATE_BV: usize = 512;
const SSE: u64 = 1 << 1;

/// Reads the CPU's registers.
pub fn from_cpu(to: &mut XmmRegisters) {
    // SAFETY: CR0.TS is clear only for these instructions; they write `to`, which has room for 16
    // registers. The kernel enables SSE if the CPU has it, as every CPU with SVM does.
    unsafe {
        clear_ts();
        asm!(
            ".irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
            "movups [{to} + 16 * \\n], xmm\\n",
            ".endr",
            to = in(reg) to.as_mut_ptr(), options(nostack, preserves_flags),
        );
    }
    set_ts();
}

/// Writes the CPU's registers. The upper halves of the AVX registers are preserved.
pub fn to_cpu(from: &XmmRegisters) {
    // SAFETY: as above; the registers are the guest's, and the kernel is compiled not to use them.
    unsafe {
        clear_ts();
        asm!(
            ".irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
            "movups xmm\\n, [{from} + 16 * \\n]",
            ".endr",
            from = in(reg) from.as_ptr(), options(nostack, preserves_flags, readonly),
        );
    }
    set_ts();
}

/// Reads the registers from a save area.
///
/// # Safety
/// `area` is an FXSAVE or XSAVE area that is not written concurrently.
pub unsafe fn from_area(area: *const u8) -> XmmRegisters {
    // SAFETY: by contract; its fields are aligned.
    unsafe { area.add(XMM).cast::<XmmRegisters>().read() }
}

/// Writes the registers to a save area; `xsave`: an XSAVE area.
///
/// # Safety
/// As for [`from_area`], and the area is not read concurrently.
pub unsafe fn to_area(area: *mut u8, from: &XmmRegisters, xsave: bool) {
    // SAFETY: by contract.
    unsafe {
        area.add(XMM).cast::<XmmRegisters>().write(*from);
        if xsave {
            let present = area.add(XSTATE_BV).cast::<u64>();
            present.write(present.read() | SSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn save_areas() {
        #[repr(align(64))]
        struct Area([u8; 1024]);
        let mut area = Area([0; 1024]);
        let mut registers: XmmRegisters =
            core::array::from_fn(|index| [index as u64, !0 - index as u64]);
        let pointer = area.0.as_mut_ptr();
        for xsave in [false, true] {
            registers[3] = [7, u64::from(xsave)];
            // SAFETY: the area is this test's.
            let found = unsafe {
                to_area(pointer, &registers, xsave);
                from_area(pointer)
            };
            assert_eq!(found, registers);
            assert_eq!(area.0[512], if xsave { 2 } else { 0 }, "the component is there");
        }
        // Register 3 is at offset 208 (APM vol. 2, figure 11-8).
        assert_eq!((area.0[208], area.0[216], area.0[159], area.0[416]), (7, 1, 0, 0));
    }
}
