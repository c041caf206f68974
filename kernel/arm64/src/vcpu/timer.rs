//! The virtual timer of guests, whose registers are in the CPU as those of EL1 are.
//!
//! Its interrupt reaches the guest in a list register that is linked to the host's interrupt: that
//! remains active until the guest ends it, and does not occur again until then. Mostly the entry
//! code puts it there, without an exit (`entry.rs`). When another vCPU is loaded, the active state
//! changes with it ([`VirtualTimer::save`], [`VirtualTimer::load`]).

use core::cell::Cell;

use abi::vcpu::arm64::{VcpuState, virq};
use hw_arm64::gic::virtual_interface as ich;
use hw_arm64::registers::{TIMER_ENABLED, TIMER_MASKED};
use kernel_core::Kernel;

use super::{GuestCpu, virqs};
use crate::{Arm64, gic, io, read_register, time, write_register};

/// State of a vCPU's timer beside its registers.
#[derive(Clone)]
pub struct VirtualTimer {
    /// The interrupt has occurred, and is in no list register yet.
    is_pending: Cell<bool>,
    /// Active state of the host's interrupt, while the vCPU is no CPU's owner.
    is_active: Cell<bool>,
}

impl VirtualTimer {
    /// Values after a reset.
    pub const fn reset() -> Self {
        Self { is_pending: Cell::new(false), is_active: Cell::new(false) }
    }

    /// Sets the values to those after a reset.
    pub fn clear(&self) {
        self.is_pending.set(false);
        self.is_active.set(false);
    }

    /// Returns whether the interrupt is in no list register yet.
    #[inline(always)]
    pub fn is_pending(&self) -> bool {
        self.is_pending.get()
    }

    /// Saves the active state, and returns it. The vCPU's list registers are loaded; `are_free`:
    /// none is in use.
    #[inline(always)]
    pub fn save(&self, are_free: bool) -> bool {
        self.is_active.set(self.is_pending.get() || !are_free && virqs::has_linked());
        self.is_active.get()
    }

    /// Loads the active state, if it differs from that of this CPU, whose timer is off. `None`: the
    /// CPU's is not known.
    pub fn load(&self, of_cpu: Option<bool>) {
        if of_cpu != Some(self.is_active.get()) {
            gic::set_virtual_timer_active(self.is_active.get());
        }
    }

    /// Moves a pending interrupt to a list register, if the VMM permits it and one is free.
    #[inline(always)]
    pub fn deliver(&self, state: &VcpuState) {
        if self.is_pending.get() {
            self.move_pending(state);
        }
    }

    #[cold]
    fn move_pending(&self, state: &VcpuState) {
        let word = state.timer_virq.get();
        let Some(link) = link().filter(|_| word & virq::VALID != 0) else { return };
        let is_placed = virqs::place_word(word & !virq::REPORT_END, link);
        if !is_placed {
            virqs::request_maintenance();
        }
        self.is_pending.set(!is_placed);
    }
}

/// Bits that link a list register to the host's interrupt; `None`: the machine has none.
pub fn link() -> Option<u64> {
    gic::virtual_timer().map(|number| ich::LINKED | u64::from(number) << ich::LINK_SHIFT)
}

/// Handles the interrupt of the timer on this CPU.
pub fn fired(kernel: &Kernel<Arm64>, local: &GuestCpu) {
    match local.owner.get().and_then(|owner| kernel.memory.get(owner)) {
        Some(vcpu) => vcpu.arch.timer.is_pending.set(true),
        None => {
            // The vCPU does not exist any more.
            stop();
            gic::set_virtual_timer_active(false);
        }
    }
}

/// After an exit from a guest with a GICv2: a timer that has expired interrupts. QEMU loses that
/// interrupt if the guest ends the previous one after the timer has expired again:
/// `gic_complete_irq` in its `hw/intc/arm_gic.c` deactivates the linked interrupt, but evaluates
/// the guest's interface only.
pub fn look_again() {
    if deadline() <= time::counter() {
        gic::look_at_virtual_timer();
    }
}

/// Stops the timer of this CPU.
pub fn stop() {
    // SAFETY: the timer of guests does not interrupt any more.
    unsafe { write_register!("S3_5_C14_C3_1", "cntv_ctl_el0", 0) };
    io::instruction_barrier();
}

/// Counter value at which the timer of this CPU interrupts; [`abi::FOREVER`] if it does not.
pub fn deadline() -> u64 {
    let control = read_register!("S3_5_C14_C3_1", "cntv_ctl_el0");
    match control & (TIMER_ENABLED | TIMER_MASKED) {
        TIMER_ENABLED => read_register!("S3_5_C14_C3_2", "cntv_cval_el0")
            .wrapping_add(read_register!("cntvoff_el2")),
        _ => abi::FOREVER,
    }
}
