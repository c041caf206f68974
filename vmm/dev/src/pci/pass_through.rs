//! Configuration space of a function of the machine that the guest drives itself.
//!
//! The guest sees the identity of the real function, and its vendor-specific capabilities, by which
//! virtio places its structures. Everything else is the VMM's: the host owns the real configuration
//! space. So a guest's base addresses say where *it* wants the registers, and the board maps them
//! there; nothing that it writes reaches the function.
//!
//! State: command register, base addresses, interrupt line.
//! Features: up to six base addresses of 32-bit memory, of at least a page each; interrupt pin A.
//! Missing: I/O ports, expansion ROM, messages, power management, PCI Express and its extended
//! configuration space; the bit of the status register for a pending interrupt; the window to
//! registers in virtio's own capability (kind 5), which reads as written at the host's last reset.
//! The function's bus mastering is on as long as the VM runs, whatever the guest's command register
//! says: the IOMMU restricts the function to guest memory.
//! Documentation: PCI Local Bus 3.0, chapter 6.

use core::ops::Range;

use hw_tables::pci::{capabilities, capability};
use vmm_bus::{Access, Device, Env};

use super::Function;
use super::spec::{
    BAR, CAPABILITIES, CLASS, COMMAND, END, HAS_CAPABILITIES, ID, INTERRUPT, MASTER, MEMORY,
    NO_INTX, SUBSYSTEM,
};

/// Base addresses of a function.
pub const BARS: usize = 6;
/// Smallest length of registers in bytes: the part of memory that can be mapped.
const PAGE: u32 = 0x1000;
/// Interrupt pin A, in [`INTERRUPT`].
const PIN_A: u32 = 1 << 8;

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PassThroughFunction {
    /// Words that read as those of the real function; 0: hidden.
    words: [u32; END as usize / 4],
    /// Lengths in bytes, each 0 or a power of two of at least [`PAGE`].
    lengths: [u32; BARS],
    bases: [u32; BARS],
    command: u16,
    line: u8,
}

impl PassThroughFunction {
    /// Creates the configuration space of a function. `read` returns the words of the real one.
    /// `lengths`: bytes of the registers of each base address; 0: the guest gets none.
    pub fn new(read: impl Fn(u16) -> u32, lengths: [u64; BARS]) -> Self {
        let mut words = [0; END as usize / 4];
        let mut show = |at: u16, length: u16| {
            for at in (at..at.saturating_add(length).min(END)).step_by(4) {
                words[usize::from(at / 4)] = read(at);
            }
        };
        [ID, CLASS, SUBSYSTEM].into_iter().for_each(|register| show(register, 4));
        let vendor = || {
            let all = capabilities(&read).filter(|&(_, id)| id == capability::VENDOR);
            all.map(|(at, _)| at)
        };
        // The third byte is the length.
        vendor().for_each(|at| show(at, (read(at) >> 16 & 0xff) as u16));
        for (at, next) in vendor().zip(vendor().skip(1).map(u32::from).chain([0])) {
            let word = &mut words[usize::from(at / 4)];
            *word = *word & !0xff00 | next << 8;
        }
        words[usize::from(CAPABILITIES / 4)] = vendor().next().unwrap_or(0).into();
        let length = |bytes: u64| match u32::try_from(bytes) {
            Ok(bytes) if bytes.is_power_of_two() => bytes.max(PAGE),
            _ => 0,
        };
        Self { words, lengths: lengths.map(length), bases: [0; BARS], command: 0, line: 0 }
    }

    /// Returns where the guest wants the registers of a base address: its range, if it is inside of
    /// the window for registers, and memory decoding is on.
    pub fn registers(&self, index: usize, window: &Range<u64>) -> Option<Range<u64>> {
        let (&base, &length) = (self.bases.get(index)?, self.lengths.get(index)?);
        let range = u64::from(base)..u64::from(base) + u64::from(length);
        let is_inside = range.start >= window.start && range.end <= window.end;
        (length != 0 && self.command & MEMORY != 0 && is_inside).then_some(range)
    }

    fn base_index(register: u16) -> Option<usize> {
        let index = usize::from(register.checked_sub(BAR)? / 4);
        (index < BARS).then_some(index)
    }
}

impl Device for PassThroughFunction {
    fn read(&mut self, access: Access, _: &mut dyn Env) -> u64 {
        access.open_bus()
    }

    fn write(&mut self, _: Access, _: u64, _: &mut dyn Env) {}

    fn wake(&mut self, _: u8, _: &mut dyn Env) {}

    fn reset(&mut self, _: &mut dyn Env) {
        (self.bases, self.command, self.line) = ([0; BARS], 0, 0);
    }
}

impl Function for PassThroughFunction {
    fn config_read(&mut self, register: u16, _: &mut dyn Env) -> u32 {
        if let Some(index) = Self::base_index(register) {
            return self.bases[index];
        }
        let word = self.words.get(usize::from(register / 4)).copied().unwrap_or(0);
        match register {
            COMMAND => {
                let has_list = self.words[usize::from(CAPABILITIES / 4)] != 0;
                u32::from(self.command) | if has_list { HAS_CAPABILITIES } else { 0 }
            }
            INTERRUPT => u32::from(self.line) | PIN_A,
            _ => word,
        }
    }

    fn config_write(&mut self, register: u16, value: u32, mask: u32, _: &mut dyn Env) {
        let merge = |old: u32| old & !mask | value & mask;
        if let Some(index) = Self::base_index(register) {
            // The bits below the size read as 0, which lets the guest probe the size.
            let size_mask = match self.lengths[index] {
                0 => 0,
                length => !(length - 1),
            };
            self.bases[index] = merge(self.bases[index]) & size_mask;
            return;
        }
        match register {
            COMMAND => {
                self.command = merge(self.command.into()) as u16 & (MEMORY | MASTER | NO_INTX);
            }
            // Storage for the guest.
            INTERRUPT => self.line = merge(self.line.into()) as u8,
            _ => {}
        }
    }

    fn window(&self) -> Option<(u64, u64)> {
        None
    }

    fn is_memory(&self, address: u64) -> bool {
        let all = 0..u64::MAX;
        (0..BARS).any(|index| {
            self.registers(index, &all).is_some_and(|registers| registers.contains(&address))
        })
    }
}

#[cfg(test)]
mod tests {
    use vmm_bus::testing::Script;

    use super::*;

    const WINDOW: Range<u64> = 0x2000_0000..0x3000_0000;

    /// A virtio disk of QEMU, with MSI-X, PCI Express and two structures.
    fn real() -> [u32; 64] {
        let mut words = [0x5555_5555; 64];
        words[0] = 0x1042_1af4;
        words[1] = 0x0010_0406;
        words[2] = 0x0100_0001;
        words[0x2c / 4] = 0x1100_1af4;
        words[0x34 / 4] = 0x98;
        words[0x98 / 4] = 0x0001_8411;
        words[0x84 / 4] = 0x0214_7009;
        words[0x70 / 4] = 0x0114_4009;
        (words[0x74 / 4], words[0x78 / 4]) = (4, 0);
        words[0x40 / 4] = 0x0002_0010;
        words
    }

    fn function() -> PassThroughFunction {
        let words = real();
        PassThroughFunction::new(|at| words[usize::from(at / 4)], [0, 0, 0, 0, 0x4000, 0])
    }

    fn read(function: &mut PassThroughFunction, register: u16) -> u32 {
        function.config_read(register, &mut Script::new())
    }

    fn write(function: &mut PassThroughFunction, register: u16, value: u32) {
        function.config_write(register, value, u32::MAX, &mut Script::new());
    }

    #[test]
    fn the_guest_sees_identity_and_vendor_capabilities_only() {
        let mut function = function();
        assert_eq!(read(&mut function, ID), 0x1042_1af4);
        assert_eq!(read(&mut function, CLASS), 0x0100_0001);
        assert_eq!(read(&mut function, SUBSYSTEM), 0x1100_1af4);
        assert_eq!(read(&mut function, COMMAND), HAS_CAPABILITIES, "all off");
        assert_eq!(read(&mut function, INTERRUPT), PIN_A);
        assert_eq!(read(&mut function, 0x30), 0, "no expansion ROM");
        let words: Vec<u32> = (0..END).step_by(4).map(|at| read(&mut function, at)).collect();
        let list: Vec<_> = capabilities(|at| words[usize::from(at / 4)]).collect();
        assert_eq!(list, [(0x84, 9), (0x70, 9)], "without MSI-X and PCI Express");
        assert_eq!(words[0x74 / 4], 4, "the place of the structure");
        assert_eq!(words[0x40 / 4..0x70 / 4], [0; 12], "hidden");
    }

    #[test]
    fn foreign_words_make_no_trouble() {
        let mut function = PassThroughFunction::new(|_| u32::MAX, [u64::MAX; BARS]);
        write(&mut function, BAR, u32::MAX);
        assert_eq!(read(&mut function, BAR), 0);
        let loops = |at: u16| match at {
            COMMAND => 1 << 20,
            CAPABILITIES => 0x40,
            _ => 0x00ff_fc09,
        };
        let mut function = PassThroughFunction::new(loops, [0x10, 3, 0, 0, 1 << 32, 1 << 31]);
        for (index, expected) in [0xffff_f000, 0, 0, 0, 0, 1 << 31].into_iter().enumerate() {
            write(&mut function, BAR + 4 * index as u16, u32::MAX);
            assert_eq!(read(&mut function, BAR + 4 * index as u16), expected, "{index}");
        }
        // The list ends.
        let words: Vec<u32> = (0..END).step_by(4).map(|at| read(&mut function, at)).collect();
        assert_eq!(capabilities(|at| words[usize::from(at / 4)]).count(), 2);
    }

    #[test]
    fn registers_are_inside_of_the_window_or_nowhere() {
        let mut function = function();
        let bar = BAR + 16;
        write(&mut function, bar, u32::MAX);
        assert_eq!(read(&mut function, bar), 0xffff_c000);
        write(&mut function, BAR + 20, u32::MAX);
        assert_eq!(read(&mut function, BAR + 20), 0, "32-bit");
        write(&mut function, bar, 0x2000_0123);
        assert_eq!(function.registers(4, &WINDOW), None, "decoding is off");
        write(&mut function, COMMAND, u32::MAX);
        assert_eq!(read(&mut function, COMMAND) as u16, MEMORY | MASTER | NO_INTX);
        assert_eq!(function.registers(4, &WINDOW), Some(0x2000_0000..0x2000_4000));
        assert!(function.is_memory(0x2000_3fff) && !function.is_memory(0x2000_4000));
        for (base, is_inside) in [
            (0x2fff_c000, true),
            (0x3000_0000, false),
            (0x1fff_c000, false),
            // RAM, the interrupt controller, the end of 32 bits, 0.
            (0x4000_0000, false),
            (0x0800_0000, false),
            (0xffff_c000, false),
            (0, false),
        ] {
            write(&mut function, bar, base);
            assert_eq!(function.registers(4, &WINDOW).is_some(), is_inside, "{base:#x}");
        }
        assert_eq!(function.registers(0, &WINDOW), None);
        assert_eq!(function.registers(usize::MAX, &WINDOW), None);
    }

    #[test]
    fn a_write_of_some_bytes_changes_them_only() {
        let mut function = function();
        let mut env = Script::new();
        write(&mut function, BAR + 16, 0x2001_4000);
        function.config_write(BAR + 16, 0x0002_0000, 0x00ff_0000, &mut env);
        assert_eq!(read(&mut function, BAR + 16), 0x2002_4000);
        function.config_write(INTERRUPT, 0x2a2a, 0xff, &mut env);
        assert_eq!(read(&mut function, INTERRUPT), PIN_A | 0x2a);
    }
}
