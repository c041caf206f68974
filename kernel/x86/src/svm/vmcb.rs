//! Reset state of a VMCB, and the permission maps of ports and MSRs that all guests share (APM vol.
//! 2 §15.10, §15.11).

use core::cell::UnsafeCell;

use hw_x86::msr;
use hw_x86::paging::cr0;
use hw_x86::vmcb::{Vmcb, v_intr};

use crate::features::features;
use crate::memory::IMAGE_OFFSET;
use crate::svm::intercepts;

/// Every port and every MSR is intercepted, except the MSRs that the world switch saves and
/// restores.
#[repr(C, align(4096))]
struct PermissionMaps {
    io: [u8; 3 * 4096],
    msr: [u8; 2 * 4096],
}

struct SharedMaps(UnsafeCell<PermissionMaps>);

// SAFETY: written only by `init_maps`, before any guest runs.
unsafe impl Sync for SharedMaps {}

static MAPS: SharedMaps =
    SharedMaps(UnsafeCell::new(PermissionMaps { io: [0xff; 3 * 4096], msr: [0xff; 2 * 4096] }));

/// MSRs that a guest accesses without an exit: VMLOAD and VMSAVE switch them.
const SWITCHED: [u32; 10] = [
    msr::SYSENTER_CS,
    msr::SYSENTER_ESP,
    msr::SYSENTER_EIP,
    msr::STAR,
    msr::LSTAR,
    msr::CSTAR,
    msr::SFMASK,
    msr::FS_BASE,
    msr::GS_BASE,
    msr::KERNEL_GS_BASE,
];

/// Byte and first bit of an MSR in the permission map (APM vol. 2 §15.11).
const fn msr_bit_position(msr: u32) -> (usize, u32) {
    let offset = match msr {
        0xc000_0000..=0xc000_1fff => 0x800,
        0xc001_0000..=0xc001_1fff => 0x1000,
        _ => 0,
    };
    let index = msr & 0x1fff;
    (offset + index as usize / 4, index % 4 * 2)
}

/// Physical address of an object in the kernel image.
fn image_physical<T>(pointer: *const T) -> u64 {
    pointer as u64 - IMAGE_OFFSET
}

/// Initialises the permission maps. Called on the first CPU, before all others.
pub fn init_maps() {
    // SAFETY: the first CPU alone, before any guest runs.
    let maps = unsafe { &mut *MAPS.0.get() };
    let auxiliary = features().rdtscp.then_some(msr::TSC_AUX);
    for msr in SWITCHED.into_iter().chain(auxiliary) {
        let (byte, bit) = msr_bit_position(msr);
        maps.msr[byte] &= !(3 << bit);
    }
}

/// Gives a zeroed VMCB the reset state of a vCPU.
pub fn reset(Vmcb { control, save }: &Vmcb) {
    const PAT: u64 = 0x0007_0406_0007_0406;
    const NESTED_PAGING: u64 = 1;
    intercepts::set(control);
    // SAFETY: only the addresses of the maps are taken.
    let (io, msr) = unsafe { (&raw const (*MAPS.0.get()).io, &raw const (*MAPS.0.get()).msr) };
    control.iopm_base_pa.set(image_physical(io));
    control.msrpm_base_pa.set(image_physical(msr));
    control.v_intr.set(v_intr::INTR_MASKING);
    control.nested_control.set(NESTED_PAGING);
    save.efer.set(msr::efer::SVME);
    save.cr0.set(cr0::ET);
    save.rflags.set(2);
    save.dr6.set(0xffff_0ff0);
    save.dr7.set(0x400);
    save.pat.set(PAT);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_of_msrs() {
        // Two bits per MSR, in three ranges of 2 KiB (APM vol. 2, table 15-8).
        assert_eq!(msr_bit_position(0), (0, 0));
        assert_eq!(msr_bit_position(msr::SYSENTER_ESP), (0x175 / 4, 2));
        assert_eq!(msr_bit_position(msr::STAR), (0x800 + 0x81 / 4, 2));
        assert_eq!(msr_bit_position(msr::TSC_AUX), (0x800 + 0x103 / 4, 6));
        assert_eq!(msr_bit_position(0xc001_1fff), (0x17ff, 6));
    }
}
