//! The virtual interface of a GICv2: registers GICH_* of the executing CPU. The guest's own
//! interface (GICV) shows what is here.

use core::sync::atomic::{AtomicU32, Ordering};

use hw_arm64::gic::FIRST_SPECIAL;
use hw_arm64::gic::v2::{self, hypervisor_interface as gich};
use hw_arm64::gic::virtual_interface as ich;

use super::{ALL_LISTS, Interface};
use crate::cpu;
use crate::gic::v2::hypervisor_interface;
use crate::machine::MAX_CPUS;
use crate::vcpu::timer;

/// Value of each CPU's control register: most exits leave it as it is.
static CONTROL: [AtomicU32; MAX_CPUS] = [const { AtomicU32::new(0) }; MAX_CPUS];
/// Numbers below this are SGIs, which have a source.
const END_SGIS: u64 = 16;

/// See the module.
pub struct MappedRegisters;

impl Interface for MappedRegisters {
    fn is_number(number: u64) -> bool {
        let is_sgi = number & u64::from(v2::NUMBER) < END_SGIS;
        number < FIRST_SPECIAL || is_sgi && number <= v2::NUMBER_AND_SOURCE.into()
    }

    #[cold]
    #[inline(never)]
    fn list(index: usize) -> u64 {
        v2::from_list(hypervisor_interface().read(gich::LR + 4 * index))
    }

    #[cold]
    #[inline(never)]
    fn set_list(index: usize, value: u64) {
        hypervisor_interface().write(gich::LR + 4 * index, v2::to_list(value));
    }

    #[cold]
    #[inline(never)]
    fn set_control(value: u64) {
        let (current, value) = (&CONTROL[cpu::current().id], value as u32);
        if current.load(Ordering::Relaxed) != value {
            current.store(value, Ordering::Relaxed);
            hypervisor_interface().write(gich::HCR, value);
        }
    }

    fn finish() {
        Self::set_control(ich::ENABLED);
        timer::look_again();
    }

    #[cold]
    #[inline(never)]
    fn free_lists() -> u64 {
        u64::from(hypervisor_interface().read(gich::ELRSR)) & ALL_LISTS
    }

    #[cold]
    #[inline(never)]
    fn ended() -> u64 {
        u64::from(hypervisor_interface().read(gich::EISR)) & ALL_LISTS
    }

    fn settings() -> [u64; 3] {
        let registers = hypervisor_interface();
        [registers.read(gich::VMCR).into(), registers.read(gich::APR).into(), 0]
    }

    fn set_settings([control, active, _]: [u64; 3]) {
        let registers = hypervisor_interface();
        registers.write(gich::VMCR, control as u32);
        registers.write(gich::APR, active as u32);
    }
}
