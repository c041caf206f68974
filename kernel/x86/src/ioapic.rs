//! I/O APICs and the 8259 pair (82093AA datasheet, ACPI 6.5 §5.2.12), and message-signalled
//! interrupts.
//!
//! Interrupt inputs are identified by global system interrupt (GSI) number. All inputs are masked
//! until configured and unmasked.

use crate::cpu;
use crate::io::out8;
use crate::memory::direct;
use abi::args::IrqSource;
use hw_tables::acpi::{Madt, MadtEntry};
use hw_x86::apic::{io, msi, pic};
use kernel_run::ranges::Range;
use spin::Mutex;

/// Maximum number of I/O APICs in use.
pub const MAX_IO_APICS: usize = 8;

/// Access to the two memory-mapped registers of an I/O APIC.
trait Window {
    fn read(&mut self, offset: u64) -> u32;
    fn write(&mut self, offset: u64, value: u32);
}

/// Hardware registers at this physical address.
struct Mapped(u64);

impl Window for Mapped {
    fn read(&mut self, offset: u64) -> u32 {
        // SAFETY: registers that the firmware's table reports, mapped uncached.
        unsafe { direct(self.0 + offset).cast::<u32>().read_volatile() }
    }

    fn write(&mut self, offset: u64, value: u32) {
        // SAFETY: as in `read`; the I/O APIC only interrupts CPUs, at vectors that have handlers.
        unsafe { direct(self.0 + offset).cast::<u32>().write_volatile(value) };
    }
}

struct IoApic<W> {
    window: W,
    first_gsi: u32,
    count: u32,
}

impl<W: Window> IoApic<W> {
    /// Masks all inputs.
    fn new(window: W, first_gsi: u32) -> Self {
        let mut this = Self { window, first_gsi, count: 0 };
        this.count = (this.read(io::VERSION) >> 16 & 0xff) + 1;
        for input in 0..this.count {
            this.write(io::REDIRECTION + 2 * input, io::MASKED);
        }
        this
    }

    fn read(&mut self, register: u32) -> u32 {
        self.window.write(io::SELECT, register);
        self.window.read(io::WINDOW)
    }

    fn write(&mut self, register: u32, value: u32) {
        self.window.write(io::SELECT, register);
        self.window.write(io::WINDOW, value);
    }

    fn configure(&mut self, input: u32, flags: u32, destination: u8) {
        let low = io::REDIRECTION + 2 * input;
        // Masked while only half of the entry is written.
        self.write(low, io::MASKED);
        self.write(low + 1, (destination as u32) << io::DESTINATION_SHIFT);
        self.write(low, flags | io::MASKED);
    }

    fn set_masked(&mut self, input: u32, masked: bool) {
        let low = io::REDIRECTION + 2 * input;
        let old = self.read(low) & !io::MASKED;
        self.write(low, if masked { old | io::MASKED } else { old });
    }
}

type IoApics = [Option<IoApic<Mapped>>; MAX_IO_APICS];

static IO_APICS: Mutex<IoApics> = Mutex::new([const { None }; MAX_IO_APICS]);

/// I/O APIC of a GSI, and the number of its input.
fn find_input(io_apics: &mut IoApics, gsi: u32) -> Option<(&mut IoApic<Mapped>, u32)> {
    io_apics.iter_mut().flatten().find_map(|io_apic| {
        let input = gsi.checked_sub(io_apic.first_gsi)?;
        (input < io_apic.count).then_some((io_apic, input))
    })
}

/// Registers the I/O APICs of the MADT, masks all their inputs, and disables the 8259 pair.
pub fn init(madt: &Madt) {
    silence_pic();
    let found = madt.entries().filter_map(|entry| match entry {
        MadtEntry::IoApic { address, gsi_base, .. } => Some((address as u64, gsi_base)),
        _ => None,
    });
    for (place, (address, gsi_base)) in IO_APICS.lock().iter_mut().zip(found) {
        *place = Some(IoApic::new(Mapped(address), gsi_base));
    }
}

/// Moves the vectors of the 8259 pair away from the exceptions and masks all inputs: a masked 8259
/// may still raise spurious interrupts.
fn silence_pic() {
    let first = crate::idt::FIRST_INTERRUPT;
    let chips = [
        (pic::COMMAND_1, pic::DATA_1, first, pic::CASCADE_1),
        (pic::COMMAND_2, pic::DATA_2, first + 8, pic::CASCADE_2),
    ];
    for (command, data, vectors, cascade) in chips {
        // SAFETY: interrupt controllers without DMA, now masked.
        unsafe {
            out8(command, pic::INITIALISE);
            [vectors, cascade, pic::MODE_8086, 0xff]
                .into_iter()
                .for_each(|value| out8(data, value));
        }
    }
}

/// Register pages of the I/O APICs.
pub fn pages() -> impl Iterator<Item = Range> {
    let io_apics = IO_APICS.lock();
    let bases = io_apics.each_ref().map(|place| Some(place.as_ref()?.window.0));
    bases.into_iter().flatten().map(|base| Range::sized(base, 0x20).outward())
}

/// Number of GSIs: one more than the highest one with an input.
pub fn gsi_count() -> u32 {
    let io_apics = IO_APICS.lock();
    io_apics.iter().flatten().map(|it| it.first_gsi + it.count).max().unwrap_or(0)
}

/// APIC id of a CPU, if the destination field of an interrupt has room for it.
fn destination(cpu: usize) -> Option<u8> {
    cpu::by_index(cpu)?.apic_id.try_into().ok()
}

/// Routes an input to a vector of a CPU, and unmasks it. No effect if there is no such input, or
/// the CPU can't be a destination.
pub fn route(line: IrqSource, vector: u8, cpu: usize) {
    let IrqSource::Line { gsi, level, active_low } = line else { return };
    let mut io_apics = IO_APICS.lock();
    if let Some(destination) = destination(cpu)
        && let Some((io_apic, input)) = find_input(&mut io_apics, gsi)
    {
        let flags = vector as u32
            | if level { io::LEVEL } else { 0 }
            | if active_low { io::ACTIVE_LOW } else { 0 };
        io_apic.configure(input, flags, destination);
        io_apic.set_masked(input, false);
    }
}

/// Masks an input. No effect if there is no such input.
pub fn mask(gsi: u32) {
    if let Some((io_apic, input)) = find_input(&mut IO_APICS.lock(), gsi) {
        io_apic.set_masked(input, true);
    }
}

/// MSI address that targets a CPU; `None` if the CPU can't be a destination.
pub fn msi_address(cpu: usize) -> Option<u64> {
    Some(msi::ADDRESS | u64::from(destination(cpu)?) << msi::DESTINATION_SHIFT)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 24 inputs, as in the 82093AA.
    struct Fake {
        selected: u32,
        registers: [u32; 0x40],
        half_written: bool,
    }

    impl Window for Fake {
        fn read(&mut self, offset: u64) -> u32 {
            assert_eq!(offset, io::WINDOW);
            if self.selected == io::VERSION {
                0x17_0020
            } else {
                self.registers[self.selected as usize]
            }
        }

        fn write(&mut self, offset: u64, value: u32) {
            match offset {
                io::SELECT => self.selected = value,
                _ => {
                    let selected = self.selected as usize;
                    if selected % 2 == 1 && self.registers[selected - 1] & io::MASKED == 0 {
                        self.half_written = true;
                    }
                    self.registers[selected] = value;
                }
            }
        }
    }

    #[test]
    fn starts_masked_and_stays_so_while_half_written() {
        let mut io_apic =
            IoApic::new(Fake { selected: 0, registers: [0; 0x40], half_written: false }, 0);
        assert_eq!(io_apic.count, 24);
        let low = |io_apic: &IoApic<Fake>, input: usize| io_apic.window.registers[0x10 + 2 * input];
        assert!((0..24).all(|input| low(&io_apic, input) == io::MASKED));
        io_apic.configure(9, 0x35 | io::LEVEL, 3);
        assert_eq!(low(&io_apic, 9), 0x35 | io::LEVEL | io::MASKED);
        io_apic.set_masked(9, false);
        assert_eq!(low(&io_apic, 9), 0x8035);
        assert_eq!(io_apic.window.registers[0x23], 3 << 24);
        io_apic.configure(9, 0x36, 4);
        io_apic.set_masked(9, true);
        assert_eq!(low(&io_apic, 9), 0x36 | io::MASKED);
        assert!(!io_apic.window.half_written);
    }

    #[test]
    fn unknown_inputs_and_cpus_are_refused() {
        assert_eq!(gsi_count(), 0);
        assert_eq!(msi_address(1), None);
        route(IrqSource::Line { gsi: 0, level: false, active_low: false }, 0x30, 0);
        mask(5);
    }
}
