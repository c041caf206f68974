//! Virtual interrupts and interrupt windows in the VMCB (APM vol. 2 §15.21), with the intercepts
//! that depend on them.
//!
//! # Invariants
//!
//! * `V_TPR` is the guest's CR8, which the guest reads and writes without an exit. Only
//!   [`set_priority`] changes it.
//! * A virtual interrupt ignores `V_TPR`: the VMM has compared it with the task priority. While one
//!   is pending, writes of CR8 exit, and the VMM compares again. (`V_INTR_PRIO` would do the same
//!   without an exit, but QEMU TCG also delivers an interrupt of the same class, and loses it on a
//!   write of CR8 while one is pending.)

use abi::vcpu::x86::window;
use hw_x86::vmcb::{ControlArea, event, intercept_cr, intercept3, v_intr};

/// A pending virtual interrupt that ignores the guest's task priority.
const PENDING: u64 = v_intr::IRQ | v_intr::IGNORE_TPR | 0xf << v_intr::PRIO_SHIFT;

/// Sets the pending virtual interrupt, keeping the task priority. Writes of CR8 exit while one is
/// pending, or if `exit_wanted` is set.
fn set(control: &ControlArea, pending: u64, exit_wanted: bool) {
    control.v_intr.set(control.v_intr.get() & v_intr::TPR | v_intr::INTR_MASKING | pending);
    let exits = exit_wanted || pending != 0;
    let others = control.intercept_cr.get() & !intercept_cr::WRITE_CR8;
    control.intercept_cr.set(if exits { others | intercept_cr::WRITE_CR8 } else { others });
}

fn pending(vector: u64) -> u64 {
    PENDING | (vector & event::VECTOR) << v_intr::VECTOR_SHIFT
}

/// Returns whether a window requests exits on writes of CR8.
const fn wants_cr8_exit(wanted: u64) -> bool {
    wanted & window::PRIORITY != 0
}

/// Returns whether a window leaves the virtual interrupt unused.
pub const fn is_unused(wanted: u64) -> bool {
    wanted & (window::EXIT | window::DELIVER_VIRQ) == 0
}

/// Sets the guest's task priority.
pub fn set_priority(control: &ControlArea, cr8: u64) {
    control.v_intr.set(control.v_intr.get() & !v_intr::TPR | cr8 & v_intr::TPR);
}

/// The guest's task priority.
#[inline(always)]
pub fn priority(control: &ControlArea) -> u64 {
    control.v_intr.get() & v_intr::TPR
}

/// Returns whether a virtual interrupt is pending.
#[inline(always)]
pub fn is_pending(control: &ControlArea) -> bool {
    control.v_intr.get() & v_intr::IRQ != 0
}

/// Configures a window, after window `before`: its action occurs when the processor could deliver a
/// virtual interrupt.
pub fn set_window(control: &ControlArea, before: u64, wanted: u64) {
    let virq = if is_unused(wanted) { 0 } else { pending(wanted) };
    set(control, virq, wants_cr8_exit(wanted));
    if (before ^ wanted) & (window::EXIT | window::IRET) != 0 {
        let vintr = if wanted & window::EXIT != 0 { intercept3::VINTR } else { 0 };
        let iret = if wanted & window::IRET != 0 { intercept3::IRET } else { 0 };
        let others = control.intercept3.get() & !(intercept3::VINTR | intercept3::IRET);
        control.intercept3.set(others | vintr | iret);
    }
}

/// Makes an interrupt pending while the window leaves the virtual interrupt unused ([`is_unused`]).
pub fn offer(control: &ControlArea, vector: u64, wanted: u64) {
    set(control, pending(vector), wants_cr8_exit(wanted));
}

/// Clears the virtual interrupt, which the guest has taken or the kernel withdraws.
pub fn clear(control: &ControlArea, wanted: u64) {
    set(control, 0, wants_cr8_exit(wanted));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control(cr8: u64) -> ControlArea {
        // SAFETY: all fields are integers.
        let control: ControlArea = unsafe { core::mem::zeroed() };
        control.intercept3.set(intercept3::HLT);
        set_priority(&control, cr8);
        control
    }

    /// State of the VMCB: writes of CR8 exit, the window exits, pending vector, task priority.
    fn state(control: &ControlArea) -> (bool, bool, Option<u64>, u64) {
        let vector = control.v_intr.get() >> v_intr::VECTOR_SHIFT & 0xff;
        assert_eq!(control.intercept_cr.get() & !intercept_cr::WRITE_CR8, 0, "reads never exit");
        assert_eq!(control.intercept3.get() & !intercept3::VINTR, intercept3::HLT);
        assert_ne!(control.v_intr.get() & v_intr::INTR_MASKING, 0);
        assert_eq!(control.v_intr.get() & v_intr::IGNORE_TPR != 0, is_pending(control));
        (
            control.intercept_cr.get() != 0,
            control.intercept3.get() & intercept3::VINTR != 0,
            is_pending(control).then_some(vector),
            priority(control),
        )
    }

    #[test]
    fn windows_keep_the_task_priority() {
        let control = control(9);
        let mut before = 0;
        for (wanted, expected) in [
            (0, (false, false, None, 9)),
            (window::DELIVER_VIRQ | 0x61, (true, false, Some(0x61), 9)),
            (window::PRIORITY, (true, false, None, 9)),
            (window::EXIT, (true, true, Some(0), 9)),
            (window::EXIT | window::PRIORITY, (true, true, Some(0), 9)),
            (0, (false, false, None, 9)),
        ] {
            set_window(&control, before, wanted);
            assert_eq!(state(&control), expected, "{wanted:#x}");
            before = wanted;
        }
        // Any value written by a VMM changes only the task priority.
        set_priority(&control, u64::MAX);
        assert_eq!(state(&control), (false, false, None, 15));
    }

    #[test]
    fn iret_exits_if_asked() {
        let control = control(0);
        let mut before = 0;
        for window in [0, window::EXIT, window::DELIVER_VIRQ | 0x41, window::PRIORITY] {
            set_window(&control, before, window);
            let without = control.intercept3.get();
            before = window | window::IRET;
            set_window(&control, window, before);
            assert_eq!(control.intercept3.get(), without | intercept3::IRET, "{window:#x}");
            assert_eq!(is_unused(window), is_unused(window | window::IRET));
        }
    }

    #[test]
    fn writes_of_cr8_exit_while_something_is_pending() {
        for (wanted, wants_cr8_exit) in [(0, false), (window::PRIORITY, true)] {
            assert!(is_unused(wanted));
            let control = control(3);
            set_window(&control, 0, wanted);
            offer(&control, 0x1_0000_0041, wanted);
            assert_eq!(state(&control), (true, false, Some(0x41), 3));
            clear(&control, wanted);
            assert_eq!(state(&control), (wants_cr8_exit, false, None, 3));
        }
        assert!(!is_unused(window::EXIT) && !is_unused(window::DELIVER_VIRQ | window::PRIORITY));
    }
}
