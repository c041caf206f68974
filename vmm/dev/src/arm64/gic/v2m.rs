//! Frame of the interrupt controller for interrupt messages (GICv2m): a write of an interrupt's
//! number to one register makes that interrupt pending.
//!
//! State: none.
//! Features: messages of functions and of CPUs, of one range of shared interrupts.
//! Missing: identification registers (read as 0).
//! Documentation: Arm DEN 0029 (SBSA 3.0), appendix E.

use core::ops::Range;

use hw_arm64::gic::v2m::*;
use vmm_bus::Access;

/// Reads a register of the frame with these interrupts.
pub fn read(interrupts: &Range<u32>, access: Access) -> u64 {
    match (access.offset, access.size) {
        (TYPER, 4) => typer(interrupts.start, interrupts.end - interrupts.start).into(),
        _ => 0,
    }
}

/// Returns the interrupt of a write to the frame; `None`: it is no message, or its number is not of
/// these interrupts.
pub fn interrupt(interrupts: &Range<u32>, access: Access, value: u64) -> Option<u32> {
    // A message of 16 bits is valid, too.
    let is_message = access.offset == SETSPI && matches!(access.size, 2 | 4);
    let number = u32::try_from(value).ok().filter(|_| is_message)?;
    interrupts.contains(&number).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_an_interrupt_of_the_frame() {
        let interrupts = 80..96;
        let read = |offset| read(&interrupts, Access::new(offset, 4));
        assert_eq!([read(TYPER), read(SETSPI), read(0xfcc)], [80 << 16 | 16, 0, 0]);
        let write = |offset, size, value| interrupt(&interrupts, Access::new(offset, size), value);
        assert_eq!([80, 95].map(|value| write(SETSPI, 4, value)), [Some(80), Some(95)]);
        assert_eq!([79, 96, 1 << 32 | 80].map(|value| write(SETSPI, 4, value)), [None; 3]);
        assert_eq!([write(SETSPI, 2, 81), write(SETSPI, 1, 81)], [Some(81), None]);
        assert_eq!(write(TYPER, 4, 80), None);
    }
}
