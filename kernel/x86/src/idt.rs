//! Interrupt descriptor table, shared by all CPUs (APM vol. 2 §8.9).

use crate::cpu::selector;
use core::arch::asm;
use hw_x86::paging::GateDescriptor;
use kernel_core::MAX_IRQS;
use kernel_core::object::IrqNumber;
use spin::Once;

/// Vector of non-maskable interrupts, which can occur between SYSCALL and the stack switch.
const NMI: usize = 2;
/// Vector of double faults: usually a kernel stack overflow.
const DOUBLE_FAULT: usize = 8;
/// Vector of machine checks, which can occur where NMIs can.
const MACHINE_CHECK: usize = 18;
/// Exceptions with their own stack, because they can occur where the kernel stack is unusable.
const OWN_STACK: [usize; 3] = [NMI, DOUBLE_FAULT, MACHINE_CHECK];

/// First vector of device interrupts.
const FIRST_IRQ: u8 = 0x30;
/// Vector of the local APIC's timer.
pub const TIMER: u8 = 0xf0;
/// Vector of IPIs: reschedule, TLB shootdown.
pub const IPI: u8 = 0xf1;
/// Vector of spurious interrupts, which need no EOI.
pub const SPURIOUS: u8 = 0xff;
/// First vector after the exceptions.
pub const FIRST_INTERRUPT: u8 = 0x20;
/// Task priority class of every CPU (bits 7:4 of TPR, CR8), constant: the local APIC delivers no
/// interrupt of this class and below, i.e. vectors 0 to 31. A device may request one by an MSI. If
/// it were delivered, the entry code could not distinguish it from the exception with that vector
/// before reading the stack, since it has no error code.
pub const TASK_PRIORITY: u8 = FIRST_INTERRUPT / 16 - 1;

const _: () = assert!(FIRST_IRQ as usize + MAX_IRQS == TIMER as usize);

/// Vector of a device interrupt.
pub fn vector(number: IrqNumber) -> u8 {
    FIRST_IRQ + number.0 as u8
}

/// Device interrupt of a vector; of other vectors, a number that no interrupt has.
pub fn irq_number(vector: u8) -> IrqNumber {
    IrqNumber(vector.wrapping_sub(FIRST_IRQ).into())
}

/// Breakpoint and overflow: the exceptions that tasks may raise by instruction.
const BY_SOFTWARE: [usize; 2] = [3, 4];

static IDT: Once<[GateDescriptor; 256]> = Once::new();

/// Initialises the table with one entry point per vector, and a non-returning one for machine
/// checks. The first call wins.
pub fn init(stubs: &[unsafe extern "C" fn(); 256], machine_check: unsafe extern "C" fn()) {
    IDT.call_once(|| {
        core::array::from_fn(|vector| {
            // Index in the interrupt stack table, from 1; 0: none.
            let ist = OWN_STACK.iter().position(|&own| own == vector).map_or(0, |at| at as u8 + 1);
            let dpl = if BY_SOFTWARE.contains(&vector) { 3 } else { 0 };
            let entry = if vector == MACHINE_CHECK { machine_check } else { stubs[vector] };
            GateDescriptor::interrupt(entry as usize as u64, selector::KERNEL_CODE, ist, dpl)
        })
    });
}

/// Loads the table on this CPU, if it is initialised.
///
/// # Safety
/// The entry points handle exceptions and interrupts, and this CPU's stacks for them are set up.
pub unsafe fn load() {
    if let Some(table) = IDT.get() {
        let pointer = crate::cpu::TablePointer::to(table);
        // SAFETY: a static table of gates; its entry points are valid by contract.
        unsafe { asm!("lidt [{}]", in(reg) &pointer, options(readonly, nostack, preserves_flags)) };
    }
}
