//! Devices in a device tree: search, the console, interrupts of a GIC.

use super::{Fdt, Node, u32};

/// Numbers of interrupts by their kind in the property `interrupts` of a device below a GIC
/// (Linux, `Documentation/devicetree/bindings/interrupt-controller/arm,gic-v3.yaml`): shared,
/// private to each CPU. First number and count.
const KINDS: [(u32, u32); 2] = [(32, 988), (16, 16)];

/// Triggers that are levels: high, low.
const LEVEL: u32 = 4 | 8;

impl<'a> Fdt<'a> {
    /// Returns the first enabled device with this name that `accepts` accepts.
    pub fn find(&self, name: &str, mut accepts: impl FnMut(&Node<'a>) -> bool) -> Option<Node<'a>> {
        let mut found = None;
        self.visit(|node| {
            if found.is_none() && node.is_enabled() && node.is_compatible(name) && accepts(node) {
                found = Some(*node);
            }
        });
        found
    }

    /// Returns the console, a device with this name: the one that `/chosen` names, else the first.
    pub fn console(&self, name: &str) -> Option<Node<'a>> {
        let path = self.node("/chosen").and_then(|node| node.text("stdout-path"));
        let chosen = path.and_then(|path| self.node(path.split(':').next().unwrap_or(path)));
        chosen.filter(|node| node.is_compatible(name)).or_else(|| self.find(name, |_| true))
    }
}

/// Number (INTID) of the interrupt that these cells name (kind, number, trigger), and whether it is
/// level-triggered.
pub(super) fn gic_interrupt(cells: &[u8]) -> Option<(u32, bool)> {
    let (first, count) = *KINDS.get(u32(cells, 0)? as usize)?;
    let (number, trigger) = (u32(cells, 4)?, u32(cells, 8)?);
    (number < count).then_some((first + number, trigger & LEVEL != 0))
}

impl Node<'_> {
    /// Number (INTID) of the device's interrupt with this index, for a device below a GIC.
    pub fn gic_interrupt(&self, index: usize) -> Option<u32> {
        self.gic_line(index).map(|(number, _)| number)
    }

    /// The same number, and whether the interrupt is level-triggered, else edge-triggered.
    pub fn gic_line(&self, index: usize) -> Option<(u32, bool)> {
        gic_interrupt(self.property("interrupts")?.get(12 * index..)?)
    }
}
