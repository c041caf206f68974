//! Accesses to the PCI bus of the board `pc`: configuration ports, and the bus' place.

use spin::mutex::SpinMutex;
use spin::relax::RelaxStrategy;
use vmm_bus::Env;
use vmm_dev::pci;
use vmm_dev::pci::{ConfigTarget, Function};

use super::cpu_bus::CpuBus;
use crate::functions::Functions;
use crate::interrupts::{ChipEnv, FUNCTIONS};
use crate::pci::{PciBoard, Windows};
use crate::{Host, layout};

impl<'a, H: Host, R: RelaxStrategy + 'a, const CPUS: usize, P: Functions> PciBoard<'a>
    for CpuBus<'a, '_, H, R, CPUS, P>
{
    type Relax = R;

    const ECAM: u64 = layout::ECAM as u64;

    fn with_function<T>(
        &mut self,
        slot: usize,
        call: impl FnOnce(&mut dyn Function, &mut dyn Env) -> T,
    ) -> Option<T> {
        let (result, needs_service) = self.pc.with_function(slot, self.host, self.cpu, call)?;
        self.needs_service |= needs_service;
        Some(result)
    }

    fn with_bridge<T>(&mut self, call: impl FnOnce(&mut dyn Function, &mut dyn Env) -> T) -> T {
        self.locked(|board| {
            let router = &mut board.machine.router;
            let mut env = ChipEnv { router, host: &mut *board.host, chip: FUNCTIONS };
            call(&mut board.machine.bridge, &mut env)
        })
    }

    fn windows(&self) -> &'a SpinMutex<Windows, R> {
        &self.pc.windows
    }

    fn slots(&self) -> usize {
        self.pc.functions.slots()
    }

    #[cold]
    fn unknown_address(&mut self, address: u64) {
        self.locked(|board| board.unknown_memory(address));
    }
}

impl<H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions> CpuBus<'_, '_, H, R, CPUS, P> {
    /// Decodes an access to the PCI configuration ports, if it is one.
    fn config_port(&mut self, port: u16, size: u8) -> Option<ConfigPort> {
        let offset = port.wrapping_sub(layout::PCI_ADDRESS);
        if offset >= 8 || self.pc.functions.slots() == 0 {
            return None;
        }
        match offset {
            0 if size == 4 => Some(ConfigPort::Address),
            4.. if offset + u16::from(size) <= 8 => {
                let address = self.locked(|board| board.machine.config_address);
                Some(ConfigPort::Data(address.target(u64::from(offset) - 4, size)))
            }
            _ => None,
        }
    }

    /// Reads a PCI configuration port; `None` for other ports or without PCI.
    #[inline]
    pub(super) fn config_in(&mut self, port: u16, size: u8) -> Option<u32> {
        if port & !7 == layout::PCI_ADDRESS { self.read_config_port(port, size) } else { None }
    }

    // Not inlined: other ports are more frequent.
    #[inline(never)]
    fn read_config_port(&mut self, port: u16, size: u8) -> Option<u32> {
        Some(match self.config_port(port, size)? {
            ConfigPort::Address => self.locked(|board| board.machine.config_address.get()),
            ConfigPort::Data(target) => self.config_read(target, size) as u32,
        })
    }

    /// Writes a PCI configuration port; `None` for other ports or without PCI.
    #[inline]
    pub(super) fn config_out(&mut self, port: u16, size: u8, value: u32) -> Option<()> {
        if port & !7 == layout::PCI_ADDRESS {
            self.write_config_port(port, size, value)
        } else {
            None
        }
    }

    #[inline(never)]
    fn write_config_port(&mut self, port: u16, size: u8, value: u32) -> Option<()> {
        match self.config_port(port, size)? {
            ConfigPort::Address => self.locked(|board| board.machine.config_address.set(value)),
            ConfigPort::Data(target) => self.config_write(target, value.into()),
        }
        Some(())
    }

    /// True if the address belongs to the PCI of the board, if it has PCI.
    pub(super) fn in_pci(&self, address: u64) -> bool {
        let end = u64::from(layout::ECAM) + pci::spec::ECAM_LEN;
        (layout::PCI_WINDOW.into()..end).contains(&address) && self.pc.functions.slots() != 0
    }
}

/// Meaning of an access to the PCI configuration ports.
enum ConfigPort {
    Address,
    /// A configuration register; `None` if it does not exist.
    Data(Option<ConfigTarget>),
}
