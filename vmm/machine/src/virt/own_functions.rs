//! PCI functions of the machine that the guest drives itself: where their registers are mapped.
//!
//! A guest moves registers by its writes to configuration space. They are mapped only inside of the
//! window for registers, and not over those of another such function, so no mapping covers RAM.
//! With `transport = "pci"` a guest can place them over the registers of a function that its VMM
//! emulates: its accesses then reach its own function instead, which harms this guest alone.
//! Registers that overlap others stay unmapped until the guest accesses their function's
//! configuration space again.

use core::ops::Range;

use vmm_boot::virt as layout;
use vmm_dev::pci::pass_through::{BARS, PassThroughFunction};

/// Addresses where registers can be.
const WINDOW: Range<u64> = layout::PCI_WINDOW..layout::PCI_WINDOW + layout::PCI_WINDOW_LENGTH;

/// The functions, by their number among the devices that the guest drives itself.
#[derive(Default)]
pub(super) struct OwnFunctions {
    functions: [Option<PassThroughFunction>; layout::MAX_PASS_THROUGH],
    /// Addresses and lengths of mapped registers, by base address.
    mapped: [[Option<(u64, u64)>; BARS]; layout::MAX_PASS_THROUGH],
}

impl OwnFunctions {
    /// Adds a function.
    pub(super) fn add(&mut self, number: usize, function: PassThroughFunction) {
        if let Some(place) = self.functions.get_mut(number) {
            *place = Some(function);
        }
    }

    /// Returns a function.
    pub(super) fn get(&mut self, number: usize) -> Option<&mut PassThroughFunction> {
        self.functions.get_mut(number)?.as_mut()
    }

    /// Maps a function's registers where the guest wants them. `place` maps or unmaps those of a
    /// base address, and returns whether they are mapped.
    pub(super) fn place(
        &mut self,
        number: usize,
        mut place: impl FnMut(usize, Option<u64>) -> bool,
    ) {
        let Some(Some(function)) = self.functions.get(number) else { return };
        let wanted: [_; BARS] = core::array::from_fn(|index| {
            let range = function.registers(index, &WINDOW)?;
            Some((range.start, range.end - range.start))
        });
        // Those that move make room for each other.
        for (index, wanted) in wanted.into_iter().enumerate() {
            if self.mapped[number][index].is_some_and(|mapped| Some(mapped) != wanted) {
                place(index, None);
                self.mapped[number][index] = None;
            }
        }
        for (index, wanted) in wanted.into_iter().enumerate() {
            if let Some(wanted) = wanted
                && !self.mapped.as_flattened().iter().flatten().any(|&other| overlap(wanted, other))
                && place(index, Some(wanted.0))
            {
                self.mapped[number][index] = Some(wanted);
            }
        }
    }
}

fn overlap((first, length): (u64, u64), (other, other_length): (u64, u64)) -> bool {
    first < other + other_length && other < first + length
}

#[cfg(test)]
mod tests {
    use vmm_bus::testing::Script;
    use vmm_dev::pci::Function as _;
    use vmm_dev::pci::spec::{BAR, COMMAND};

    use super::*;

    /// Two functions with registers at base address 0, the first one also at 1.
    fn functions() -> OwnFunctions {
        let mut own = OwnFunctions::default();
        own.add(0, PassThroughFunction::new(|_| 0, [0x4000, 0x1000, 0, 0, 0, 0]));
        own.add(3, PassThroughFunction::new(|_| 0, [0x4000, 0, 0, 0, 0, 0]));
        own.add(4, PassThroughFunction::new(|_| 0, [0x4000; BARS]));
        own
    }

    /// Writes a register of a function's configuration space; returns what is mapped and unmapped.
    fn write(
        own: &mut OwnFunctions,
        number: usize,
        register: u16,
        value: u32,
    ) -> Vec<(usize, Option<u64>)> {
        let function = own.get(number).expect("a function");
        function.config_write(register, value, u32::MAX, &mut Script::new());
        let mut calls = Vec::new();
        own.place(number, |index, address| {
            calls.push((index, address));
            true
        });
        calls
    }

    #[test]
    fn registers_follow_the_guests_addresses() {
        let mut own = functions();
        assert!(own.get(4).is_none() && own.get(1).is_none());
        assert_eq!(write(&mut own, 0, BAR, 0x2000_0000), []);
        assert_eq!(write(&mut own, 0, COMMAND, 2), [(0, Some(0x2000_0000))]);
        assert_eq!(write(&mut own, 0, COMMAND, 2), [], "unchanged");
        let moved = [(0, None), (0, Some(0x2100_0000))];
        assert_eq!(write(&mut own, 0, BAR, 0x2100_0000), moved);
        assert_eq!(write(&mut own, 0, COMMAND, 0), [(0, None)]);
    }

    #[test]
    fn registers_over_others_or_outside_are_not_mapped() {
        let mut own = functions();
        write(&mut own, 0, COMMAND, 2);
        write(&mut own, 3, COMMAND, 2);
        for outside in [0x4000_0000, 0x0800_0000, 0x3f00_0000, 0xffff_c000, 0x1fff_c000, 0] {
            assert_eq!(write(&mut own, 0, BAR, outside), [], "{outside:#x}");
        }
        assert_eq!(write(&mut own, 0, BAR, 0x2000_0000), [(0, Some(0x2000_0000))]);
        assert_eq!(write(&mut own, 0, BAR + 4, 0x2000_1000), [], "over its own");
        assert_eq!(write(&mut own, 3, BAR, 0x2000_0000), [], "over another's");
        assert_eq!(write(&mut own, 3, BAR, 0x2000_4000), [(0, Some(0x2000_4000))]);
        // The first one goes, which makes room for the second one.
        let swapped = [(0, None), (1, Some(0x2000_1000))];
        assert_eq!(
            write(&mut own, 0, BAR, 0x2fff_c001),
            [(0, None), (0, Some(0x2fff_c000)), swapped[1]]
        );
    }

    #[test]
    fn what_the_host_cannot_map_is_tried_again() {
        let mut own = functions();
        write(&mut own, 3, BAR, 0x2000_0000);
        let function = own.get(3).expect("a function");
        function.config_write(COMMAND, 2, u32::MAX, &mut Script::new());
        let mut calls = 0;
        for _ in 0..2 {
            own.place(3, |_, _| {
                calls += 1;
                false
            });
        }
        assert_eq!(calls, 2);
    }
}
