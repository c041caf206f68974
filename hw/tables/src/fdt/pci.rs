//! Host bridges for PCI in a device tree (Devicetree Specification v0.4, section 2.4.3; "PCI Bus
//! Binding to IEEE Std 1275-1994", rev. 2.1, section 2.2.1; Linux, `Documentation/devicetree/
//! bindings/pci/{host-generic-pci.yaml,pci-iommu.txt}`).

use super::devices::gic_interrupt;
use super::{Fdt, Node, number, u32};

/// Host bridge whose configuration space is memory.
pub const COMPATIBLE: &str = "pci-host-ecam-generic";
/// Cells of an address on a PCI bus, of which the first states space, bus, device and function.
const ADDRESS_CELLS: usize = 3;
/// Cells of the number of an interrupt pin, and of a GIC's interrupt.
const PIN_CELLS: usize = 1;
const GIC_CELLS: usize = 3;

/// Word `index` of a property.
fn cell(property: &[u8], index: usize) -> Option<u32> {
    u32(property, 4 * index)
}

impl<'a> Fdt<'a> {
    /// Returns the node that others refer to by this number.
    pub fn referred(&self, phandle: u32) -> Option<Node<'a>> {
        let mut found = None;
        self.visit(|node| {
            if found.is_none() && node.number("phandle") == Some(phandle.into()) {
                found = Some(*node);
            }
        });
        found
    }
}

impl Node<'_> {
    /// First and last bus behind a host bridge.
    pub fn buses(&self) -> Option<(u8, u8)> {
        let range = self.property("bus-range")?;
        Some((u8::try_from(cell(range, 0)?).ok()?, u8::try_from(cell(range, 1)?).ok()?))
    }

    /// Address and length of a host bridge's memory for registers: addresses of 32 bits, not
    /// prefetchable, that are the same on the bus.
    pub fn register_window(&self) -> Option<(u64, u64)> {
        const SPACE: u32 = 3 << 24 | 1 << 30;
        const MEMORY_32: u32 = 2 << 24;
        let cells = self.depth.checked_sub(1).map(|parent| self.buses[parent].address_cells)?;
        let mut rest = self.property("ranges")?;
        while !rest.is_empty() {
            let space = u32(rest, 0)?;
            let (on_bus, after) = number(rest.get(4..)?, 2)?;
            let (base, after) = number(after, cells)?;
            let (length, after) = number(after, 2)?;
            rest = after;
            if space & SPACE == MEMORY_32 && on_bus == base {
                return Some((base, length));
            }
        }
        None
    }

    /// Interrupt (INTID) of a pin, 1 to 4, of a device on the first bus, and whether it is a level.
    pub fn pin_interrupt(&self, device: u8, pin: u8) -> Option<(u32, bool)> {
        let mask = self.property("interrupt-map-mask")?;
        let map = self.property("interrupt-map")?;
        let masks = |at, value| Some(value & cell(mask, at)?);
        let wanted = (masks(0, u32::from(device) << 11)?, masks(ADDRESS_CELLS, u32::from(pin))?);
        let mut at = 0;
        while let Some(parent) = cell(map, at + ADDRESS_CELLS + PIN_CELLS) {
            let controller = self.fdt.referred(parent)?;
            let cells = controller.number("#address-cells").unwrap_or(0);
            let specifier = at + ADDRESS_CELLS + PIN_CELLS + 1 + usize::try_from(cells).ok()?;
            if controller.number("#interrupt-cells") != Some(GIC_CELLS as u64) {
                return None;
            }
            if (cell(map, at)?, cell(map, at + ADDRESS_CELLS)?) == wanted {
                return gic_interrupt(map.get(4 * specifier..)?);
            }
            at = specifier + GIC_CELLS;
        }
        None
    }

    /// The streams of functions' requests, by the property `iommu-map`. A tree that maps several
    /// functions to one stream by a mask has none.
    pub fn streams(&self) -> impl Iterator<Item = Streams> + use<'_> {
        let mask = self.number("iommu-map-mask").unwrap_or(u16::MAX.into());
        let map = self.property("iommu-map").filter(|_| mask == u16::MAX.into());
        map.unwrap_or(&[]).chunks_exact(16).filter_map(|entry| {
            Some(Streams {
                first: u16::try_from(cell(entry, 0)?).ok()?,
                smmu: cell(entry, 1)?,
                stream: cell(entry, 2)?,
                count: cell(entry, 3)?,
            })
        })
    }
}

/// Streams of functions whose numbers (bus, device, function) follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streams {
    /// The first function.
    pub first: u16,
    /// Reference to the SMMU that translates them.
    pub smmu: u32,
    /// The first function's stream.
    pub stream: u32,
    /// Number of functions.
    pub count: u32,
}

impl Streams {
    /// The stream of a function.
    pub fn of(self, function: u16) -> Option<u32> {
        let offset = u32::from(function).checked_sub(u32::from(self.first));
        self.stream.checked_add(offset.filter(|&offset| offset < self.count)?)
    }

    /// The function with a stream.
    pub fn function(self, stream: u32) -> Option<u16> {
        let offset = stream.checked_sub(self.stream).filter(|&offset| offset < self.count)?;
        u16::try_from(u32::from(self.first).checked_add(offset)?).ok()
    }
}
