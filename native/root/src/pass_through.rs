//! Devices of the machine that guests drive themselves: a UART, and virtio devices over MMIO. Their
//! registers are in the guest's memory, and their interrupts are the VMM's.
//!
//! # Invariants
//!
//! * A device has one owner, which `parador system check` verifies: a server, or a VM.
//! * A virtio device accesses all memory of the machine, as there is no IOMMU for it: its guest is
//!   trusted by the description. A UART accesses none.
//! * Before the memory of an ended VM is used again, the registers of its devices are revoked, and
//!   then the devices reset: no vCPU can start them again. The memory stays unused for ever if a
//!   device does not complete its reset.

use heapless::Vec;
use hw_tables::virtio_mmio;
use native_rt::start::Boot;
use proto::start::{PassThrough, PassThroughKind, slot};
use proto::system::{Device, MAX_VM_DEVICES};

use crate::child::{Child, FOR_GUESTS, Resources, StartError};
use crate::mmio::{self, Place};
use crate::platform;

/// Returns kind and place of a device. Fails for devices that no guest can drive.
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
    devices: &[Device],
) -> Result<Vec<PassThrough, MAX_VM_DEVICES>, StartError> {
    let mut all = Vec::new();
    for (number, &device) in (0..).zip(devices) {
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
/// device may still access it.
pub fn vm_ended(boot: &Boot, devices: &[Device]) -> bool {
    let mut all_stopped = true;
    for &device in devices {
        let Ok((kind, place)) = find(boot, device) else {
            all_stopped = false;
            continue;
        };
        // It fails only if nothing was delegated.
        let _ = boot.device_pages(place.base, length(kind)).map(native_rt::Window::revoke);
        if reset(boot, kind, &place) {
            native_rt::info!("device at {:#x} is reset", place.base);
        } else {
            native_rt::error!("cannot reset the device at {:#x}", place.base);
            all_stopped = false;
        }
    }
    all_stopped
}

#[cfg(test)]
mod tests {
    use abi::boot::{BootInfo, MAX_REGIONS, Region};
    use proto::system::VirtioClass;

    use super::*;

    #[test]
    fn a_device_that_is_not_found_counts_as_running() {
        static MACHINE_WITHOUT_DEVICES: BootInfo = BootInfo {
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
        let boot = Boot { info: &MACHINE_WITHOUT_DEVICES, bundle: &[] };
        assert!(!vm_ended(&boot, &[Device::Mmio(VirtioClass::Block, 0)]));
        assert!(vm_ended(&boot, &[]));
    }
}
