//! The virtual interface of a GICv3: system registers ICH_*_EL2.

use hw_arm64::gic::FIRST_SPECIAL;
use hw_arm64::gic::virtual_interface as ich;

use super::{ALL_LISTS, Interface};
use crate::{read_register, write_register};

/// See the module.
pub struct SystemRegisters;

impl Interface for SystemRegisters {
    #[inline(always)]
    fn is_number(number: u64) -> bool {
        number < FIRST_SPECIAL
    }

    #[inline(always)]
    fn list(index: usize) -> u64 {
        match index {
            0 => read_register!("S3_4_C12_C12_0"),
            1 => read_register!("S3_4_C12_C12_1"),
            2 => read_register!("S3_4_C12_C12_2"),
            _ => read_register!("S3_4_C12_C12_3"),
        }
    }

    #[inline(always)]
    fn set_list(index: usize, value: u64) {
        // SAFETY: interrupts for the guest, of which only the timer's is linked to one of the host.
        unsafe {
            match index {
                0 => write_register!("S3_4_C12_C12_0", value),
                1 => write_register!("S3_4_C12_C12_1", value),
                2 => write_register!("S3_4_C12_C12_2", value),
                _ => write_register!("S3_4_C12_C12_3", value),
            }
        }
    }

    #[inline(always)]
    fn set_control(value: u64) {
        // SAFETY: concerns what guests receive, and an interrupt that only makes the kernel look
        // again.
        unsafe { write_register!("S3_4_C12_C11_0", value) };
    }

    #[inline(always)]
    fn finish() {
        Self::set_control(ich::ENABLED);
    }

    #[inline(always)]
    fn free_lists() -> u64 {
        read_register!("S3_4_C12_C11_5") & ALL_LISTS
    }

    #[inline(always)]
    fn ended() -> u64 {
        read_register!("S3_4_C12_C11_3") & ALL_LISTS
    }

    #[inline(always)]
    fn settings() -> [u64; 3] {
        [
            read_register!("S3_4_C12_C11_7"),
            read_register!("S3_4_C12_C8_0"),
            read_register!("S3_4_C12_C9_0"),
        ]
    }

    #[inline(always)]
    fn set_settings([control, group_0, group_1]: [u64; 3]) {
        // SAFETY: they concern guests alone.
        unsafe {
            write_register!("S3_4_C12_C11_7", control);
            write_register!("S3_4_C12_C8_0", group_0);
            write_register!("S3_4_C12_C9_0", group_1);
        }
    }
}
