//! The PCI bus of the board `virt`, if its virtio devices are on it, or functions that the guest
//! drives itself.

use spin::mutex::SpinMutex;
use spin::relax::RelaxStrategy;
use vmm_arm64::{Arm64Platform, Unknown};
use vmm_boot::virt as layout;
use vmm_bus::Env;
use vmm_dev::pci::{Function, spec};

use super::slots::VirtDevice;
use super::{ChipEnv, CpuBus};
use crate::Host;
use crate::functions::Functions;
use crate::pci::{PciBoard, Windows};

const _: () = assert!(layout::ECAM_LENGTH == spec::ECAM_LEN);
/// First of the places on the bus of functions that the guest drives itself, counted as slots.
const FIRST_OWN: usize = layout::pass_through_pci_device(0) as usize - 1;

impl<'a, H: Host, R: RelaxStrategy + 'a, const CPUS: usize, P: Functions<dyn VirtDevice>>
    PciBoard<'a> for CpuBus<'a, '_, H, R, CPUS, P>
{
    const ECAM: u64 = layout::ECAM;
    type Relax = R;

    fn with_function<T>(
        &mut self,
        slot: usize,
        call: impl FnOnce(&mut dyn Function, &mut dyn Env) -> T,
    ) -> Option<T> {
        match slot.checked_sub(FIRST_OWN).filter(|&number| number < layout::MAX_PASS_THROUGH) {
            Some(number) => self.with_own_function(number, call),
            None => self.with_slot(slot, |device, env| Some(call(device.function()?, env)))?,
        }
    }

    fn with_bridge<T>(&mut self, call: impl FnOnce(&mut dyn Function, &mut dyn Env) -> T) -> T {
        self.locked(|devices, (fixed, host)| {
            let effects = &mut devices.effects;
            let mut env = ChipEnv { fixed, effects, host, line: None };
            call(&mut devices.bridge, &mut env)
        })
    }

    fn windows(&self) -> &'a SpinMutex<Windows, R> {
        &self.virt.windows
    }

    fn slots(&self) -> usize {
        FIRST_OWN + layout::MAX_PASS_THROUGH
    }

    #[cold]
    fn unknown_address(&mut self, address: u64) {
        self.unknown(Unknown::Instruction(address));
    }
}

impl<H: Host, R: RelaxStrategy, const CPUS: usize, P: Functions<dyn VirtDevice>>
    CpuBus<'_, '_, H, R, CPUS, P>
{
    /// Calls a function that the guest drives itself, and then maps its registers where the guest
    /// wants them.
    fn with_own_function<T>(
        &mut self,
        number: usize,
        call: impl FnOnce(&mut dyn Function, &mut dyn Env) -> T,
    ) -> Option<T> {
        let virt = self.virt;
        let mut own = virt.own_functions.lock();
        let function = own.get(number)?;
        let result = self.locked(|devices, (fixed, host)| {
            let effects = &mut devices.effects;
            call(function, &mut ChipEnv { fixed, effects, host, line: None })
        });
        let host = &mut *self.host;
        own.place(number, |index, address| host.place_registers(number, index, address));
        Some(result)
    }

    /// Returns whether an address belongs to the PCI bus, if there is one.
    pub(super) fn in_pci(&self, address: u64) -> bool {
        let is_window = address.wrapping_sub(layout::PCI_WINDOW) < layout::PCI_WINDOW_LENGTH;
        let is_config = address.wrapping_sub(layout::ECAM) < layout::ECAM_LENGTH;
        (is_window || is_config) && self.virt.fixed.has_pci
    }
}
