//! The interrupt descriptor table, shared by all CPUs (APM vol. 2 §8.9).

use crate::cpu::selector;
use core::arch::asm;
use hw_x86::paging::GateDescriptor;
use spin::Once;

/// Vectors of exceptions that need a stack of their own, because they can happen where the
/// kernel's is unusable, and the index of that stack.
pub mod stack {
    /// Non-maskable interrupt (vector 2): can come between SYSCALL and the switch of stacks.
    pub const NMI: (u8, u8) = (2, 1);
    /// Double fault (vector 8): usually the kernel's stack has overflowed.
    pub const DOUBLE_FAULT: (u8, u8) = (8, 2);
    /// Machine check (vector 18): like NMI.
    pub const MACHINE_CHECK: (u8, u8) = (18, 3);
}

/// Vector of the local APIC's timer.
pub const TIMER: u8 = 0xf0;
/// Vector of interrupts between CPUs: reschedule, shoot down.
pub const IPI: u8 = 0xf1;
/// Vector of spurious interrupts; needs no end of interrupt.
pub const SPURIOUS: u8 = 0xff;
/// First vector after the exceptions.
pub const FIRST_INTERRUPT: u8 = 0x20;

/// Breakpoint and overflow: the two exceptions that a task may raise by instruction.
const BY_SOFTWARE: [usize; 2] = [3, 4];

static IDT: Once<[GateDescriptor; 256]> = Once::new();

/// Makes the table from one entry point per vector, and one that does not return for machine checks. The first call wins.
pub fn init(stubs: &[unsafe extern "C" fn(); 256], machine_check: unsafe extern "C" fn()) {
    IDT.call_once(|| {
        core::array::from_fn(|vector| {
            let ist = [stack::NMI, stack::DOUBLE_FAULT, stack::MACHINE_CHECK]
                .iter()
                .find(|&&(number, _)| number as usize == vector)
                .map_or(0, |&(_, index)| index);
            let dpl = if BY_SOFTWARE.contains(&vector) { 3 } else { 0 };
            let is_machine_check = vector == stack::MACHINE_CHECK.0 as usize;
            let entry = if is_machine_check { machine_check } else { stubs[vector] };
            GateDescriptor::interrupt(entry as usize as u64, selector::KERNEL_CODE, ist, dpl)
        })
    });
}

/// Loads the table on this CPU, if it was made.
///
/// # Safety
/// The entry points are those of exceptions and interrupts, and this CPU's stacks for them are in place.
pub unsafe fn load() {
    if let Some(table) = IDT.get() {
        let pointer = crate::cpu::TablePointer::to(table);
        // SAFETY: a static table of gates; its entry points are the caller's.
        unsafe { asm!("lidt [{}]", in(reg) &pointer, options(readonly, nostack, preserves_flags)) };
    }
}
