//! Devices of the machine that guests drive themselves: a UART, and virtio devices, over MMIO or on
//! PCI. Their registers are in the guest's memory, and their interrupts are the VMM's.
//!
//! # Invariants
//!
//! * A device has one owner, which `parador system check` verifies: a server, or a VM.
//! * A virtio device over MMIO accesses all memory of the machine, as there is no IOMMU for it: its
//!   guest is trusted by the description. A UART accesses none. A PCI function accesses the guest's
//!   memory alone, at guest-physical addresses, by the IOMMU ([`function`]).
//! * Before the memory of an ended VM is used again, the registers of its devices are revoked, and
//!   then the devices reset: no vCPU can start them again. A PCI function is disabled, too, and the
//!   IOMMU denies it everything. The memory stays unused for ever if the IOMMU does not confirm
//!   that, or if another device does not complete its reset.

mod function;

use heapless::Vec;
use hw_tables::virtio_mmio;
use native_rt::start::Boot;
use proto::start::{PassThrough, PassThroughKind, slot};
use proto::system::{Device, MAX_VM_DEVICES};

pub use self::function::Guest;
use crate::child::{Child, FOR_GUESTS, Resources, StartError};
use crate::iommu::Iommu;
use crate::mmio::{self, Place};
use crate::platform;

/// Returns kind and place of a device over MMIO. Fails for devices that no guest can drive.
fn find(boot: &Boot, device: Device) -> Result<(PassThroughKind, Place), StartError> {
    match device {
        Device::Serial(port) => {
            let place = platform::serial_place(boot, port).ok_or(StartError::Device)?;
            Ok((PassThroughKind::Pl011, place))
        }
        Device::Mmio(class, index) => {
            Ok((PassThroughKind::Virtio, mmio::find(boot, class, index)?))
        }
        Device::Pci(..) | Device::None => Err(StartError::Device),
    }
}

/// Bytes of a device's registers.
fn length(kind: PassThroughKind) -> u64 {
    match kind {
        PassThroughKind::Pl011 => abi::PAGE_SIZE,
        PassThroughKind::Virtio => virtio_mmio::LENGTH,
        // Its registers are in several places.
        PassThroughKind::Pci => 0,
    }
}

/// Makes a device neither interrupt nor access memory. Returns `false` if it reports that it still
/// does.
fn reset(boot: &Boot, kind: PassThroughKind, place: &Place) -> bool {
    mmio::registers(boot, place.base, length(kind)).is_some_and(|device| device.stop(kind))
}

/// Gives a VM its devices; returns the description for its VMM.
pub fn connect(
    child: &mut Child,
    resources: &mut Resources,
    mut iommu: Option<&mut Iommu>,
    guest: Guest,
    devices: &[Device],
) -> Result<Vec<PassThrough, MAX_VM_DEVICES>, StartError> {
    let mut all = Vec::new();
    for (number, &device) in (0..).zip(devices) {
        if let Device::Pci(class, index) = device {
            let device = (all.len(), class, index);
            let iommu = iommu.as_deref_mut();
            let device = function::connect(child, resources, iommu, guest, device)?;
            // As below.
            let _ = all.push(device);
            continue;
        }
        let (kind, place) = find(resources.boot, device)?;
        if !reset(resources.boot, kind, &place) {
            return Err(StartError::Device);
        }
        let own = (number, slot::PASS_THROUGH + number, FOR_GUESTS);
        child.add_mmio_device(resources, (place, length(kind)), own)?;
        native_rt::info!("guest drives the device at {:#x}", place.base);
        // There is room for as many as the description can have.
        let _ = all.push(PassThrough { kind, is_level: place.is_level });
    }
    Ok(all)
}

/// Handles the end of a VM with devices, before its memory is used again. Returns `false` if a
/// device may still access it. `has_run`: its guest may have started them.
pub fn vm_ended(
    boot: &Boot,
    iommu: Option<&mut Iommu>,
    vm: (usize, &Child),
    devices: &[Device],
    has_run: bool,
) -> bool {
    let mut all_stopped = stop_all(boot, devices) || !has_run;
    if let Some(iommu) = iommu {
        let numbers = (0..devices.len()).filter(|&number| is_function(&devices[number]));
        // After a failed start it has the first ones only.
        for device in numbers.zip(iommu.functions(vm.0)) {
            all_stopped &= function::vm_ended(boot, iommu, vm, device);
        }
        all_stopped &= iommu.remove(vm.0);
    }
    all_stopped
}

fn is_function(device: &Device) -> bool {
    matches!(device, Device::Pci(..))
}

/// Revokes the registers of all devices but PCI functions, and resets them. Returns `false` if one
/// may still access memory.
fn stop_all(boot: &Boot, devices: &[Device]) -> bool {
    let mut all_stopped = true;
    for &device in devices.iter().filter(|device| !is_function(device)) {
        all_stopped &= stop(boot, device);
    }
    all_stopped
}

/// Revokes the registers of a device and resets it. Returns `false` if it may still access memory:
/// also if it is not found any more.
fn stop(boot: &Boot, device: Device) -> bool {
    let Ok((kind, place)) = find(boot, device) else { return false };
    // It fails only if nothing was delegated.
    let _ = boot.device_pages(place.base, length(kind)).map(native_rt::Window::revoke);
    let is_stopped = reset(boot, kind, &place);
    match is_stopped {
        true => native_rt::info!("device at {:#x} is reset", place.base),
        false => native_rt::error!("cannot reset the device at {:#x}", place.base),
    }
    is_stopped
}

#[cfg(test)]
pub mod tests {
    use abi::boot::{BootInfo, MAX_REGIONS, Region};
    use proto::system::{PciClass, VirtioClass};

    use super::*;

    pub const WITHOUT_DEVICES: BootInfo = BootInfo {
        magic: 0,
        abi_version: 0,
        cpus: 1,
        tsc_khz: 0,
        rsdp: 0,
        quota_pages: 0,
        features: 0,
        xcr0_mask: 0,
        bundle_base: 0,
        bundle_length: 0,
        region_count: 0,
        regions: [Region { base: 0, length: 0, kind: 0, reserved: 0 }; MAX_REGIONS],
    };

    #[test]
    fn a_device_that_is_not_found_counts_as_running() {
        static MACHINE: BootInfo = WITHOUT_DEVICES;
        let boot = Boot { info: &MACHINE, bundle: &[] };
        let missing = Device::Mmio(VirtioClass::Block, 0);
        assert!(!stop(&boot, missing));
        let function = Device::Pci(PciClass::Virtio(VirtioClass::Net), 0);
        assert!(!stop_all(&boot, &[missing, function]));
        assert!(stop_all(&boot, &[function]), "the IOMMU denies it");
    }
}
