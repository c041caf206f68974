//! Virtio devices over MMIO, which a device tree lists: enumeration, and their end.
//!
//! The registers of several devices may share a page, the smallest part of memory that root can
//! delegate. A device whose page has others is refused, so no server can reach foreign registers.
//! There is no IOMMU: a server must be trusted with all memory, because its device can access it.

use abi::PAGE_SIZE;
use heapless::Vec;
use hw_tables::fdt::Fdt;
use hw_tables::virtio_mmio as register;
use native_rt::device::DeviceRegisters;
use native_rt::start::Boot;
use proto::start::PassThroughKind;
use proto::system::VirtioClass;

/// Maximum number of transports, with or without a device: QEMU's board `virt` has 32.
const MAX_TRANSPORTS: usize = 64;

/// Place of a device, as the device tree describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Physical address of its registers; those of a transport are inside of one page.
    pub base: u64,
    /// Number (INTID) of its interrupt.
    pub interrupt: u32,
    /// The interrupt is level-triggered.
    pub is_level: bool,
}

/// Error of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchError {
    /// The machine has no such device.
    Missing,
    /// Another device has registers in the same page.
    SharedPage,
}

/// Returns the transports of a device tree in ascending order of their addresses.
fn places(tree: &Fdt) -> Vec<Place, MAX_TRANSPORTS> {
    let mut places = Vec::new();
    // The search accepts none, to visit all.
    let _ = tree.find(register::COMPATIBLE, |node| {
        if let Some((base, length)) = node.ranges().next()
            && let Some((interrupt, is_level)) = node.gic_line(0)
            && length >= register::LENGTH
            && base % PAGE_SIZE <= PAGE_SIZE - register::LENGTH
        {
            // Those beyond the limit are not searched.
            let _ = places.push(Place { base, interrupt, is_level });
        }
        false
    });
    places.sort_unstable();
    places
}

/// Returns device `index` of a class. `kind` returns the device type at a place: 0 without a
/// device.
fn choose(
    places: &[Place],
    kind: impl Fn(&Place) -> u32,
    class: VirtioClass,
    index: u8,
) -> Result<Place, SearchError> {
    let wanted = match class {
        VirtioClass::Block => register::BLOCK,
        VirtioClass::Net => register::NET,
    };
    let mut found = places.iter().filter(|place| kind(place) == wanted);
    let place = found.nth(index.into()).ok_or(SearchError::Missing)?;
    let is_neighbour = |other: &&Place| {
        other.base / PAGE_SIZE == place.base / PAGE_SIZE && other.base != place.base
    };
    match places.iter().filter(is_neighbour).any(|other| kind(other) != 0) {
        true => Err(SearchError::SharedPage),
        false => Ok(*place),
    }
}

/// Registers at an address, inside of one page, if the kernel passes that memory to root.
pub fn registers(boot: &Boot, base: u64, length: u64) -> Option<DeviceRegisters> {
    let page = base & !(PAGE_SIZE - 1);
    boot.registers(page, PAGE_SIZE)?.part(base - page, length)
}

/// Finds device `index` of a class in the machine's device tree.
pub fn find(boot: &Boot, class: VirtioClass, index: u8) -> Result<Place, SearchError> {
    let tree = boot.device_tree().and_then(|bytes| Fdt::parse(bytes).ok());
    let places = places(&tree.ok_or(SearchError::Missing)?);
    let kind = |place: &Place| match registers(boot, place.base, register::LENGTH) {
        Some(device) if device.read32(register::MAGIC) == register::MAGIC_VALUE => {
            device.read32(register::DEVICE_ID)
        }
        _ => 0,
    };
    choose(&places, kind, class, index)
}

/// Resets the device at a place, which then accesses no memory. Returns `false` if it reports that
/// it has not been reset.
pub fn reset(boot: &Boot, place: &Place) -> bool {
    let device = registers(boot, place.base, register::LENGTH);
    device.is_some_and(|device| device.stop(PassThroughKind::Virtio))
}

#[cfg(test)]
mod tests {
    use super::*;

    static VIRT: &[u8] = include_bytes!("../../../hw/tables/src/fdt/virt.dtb");

    #[test]
    fn the_transports_of_a_virtual_machine() {
        let places = places(&Fdt::parse(VIRT).unwrap());
        assert_eq!(places.len(), 32);
        assert_eq!(places[0], Place { base: 0xa00_0000, interrupt: 48, is_level: false });
        assert_eq!(places[31], Place { base: 0xa00_3e00, interrupt: 79, is_level: false });
    }

    #[test]
    fn devices_are_counted_by_class_and_have_a_page_of_their_own() {
        let places = places(&Fdt::parse(VIRT).unwrap());
        let with = |devices: &'static [(usize, u32)]| {
            let all = places.clone();
            move |place: &Place| {
                let index = all.iter().position(|other| other == place);
                devices.iter().find(|&&(at, _)| Some(at) == index).map_or(0, |&(_, kind)| kind)
            }
        };
        let apart = [(0, register::BLOCK), (8, register::NET), (16, register::BLOCK), (31, 3)];
        let apart = with(Box::leak(Box::new(apart)));
        let choose = |kind: &dyn Fn(&Place) -> u32, class, index| {
            choose(&places, kind, class, index).map(|place| place.base)
        };
        assert_eq!(choose(&apart, VirtioClass::Block, 0), Ok(0xa00_0000));
        assert_eq!(choose(&apart, VirtioClass::Block, 1), Ok(0xa00_2000));
        assert_eq!(choose(&apart, VirtioClass::Net, 0), Ok(0xa00_1000));
        assert_eq!(choose(&apart, VirtioClass::Net, 1), Err(SearchError::Missing));
        // The kernel's console counts, too.
        let shared = with(&[(0, register::BLOCK), (7, 3), (30, register::NET), (31, 3)]);
        assert_eq!(choose(&shared, VirtioClass::Block, 0), Err(SearchError::SharedPage));
        assert_eq!(choose(&shared, VirtioClass::Net, 0), Err(SearchError::SharedPage));
    }
}
