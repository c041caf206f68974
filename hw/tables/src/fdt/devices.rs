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

impl Node<'_> {
    /// Number (INTID) of the device's interrupt with this index, for a device below a GIC.
    pub fn gic_interrupt(&self, index: usize) -> Option<u32> {
        let list = self.property("interrupts")?;
        // Cells: kind, number, trigger.
        let (first, count) = *KINDS.get(u32(list, 12 * index)? as usize)?;
        let number = u32(list, 12 * index + 4)?;
        (number < count).then_some(first + number)
    }

    /// Returns whether this interrupt is level-triggered, else edge-triggered.
    pub fn is_gic_level(&self, index: usize) -> bool {
        let trigger = self.property("interrupts").and_then(|list| u32(list, 12 * index + 8));
        trigger.is_some_and(|trigger| trigger & LEVEL != 0)
    }
}
