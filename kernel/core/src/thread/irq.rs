//! Hardware interrupts.

use core::cell::Cell;

use crate::Kernel;
use crate::arch::Arch;
use crate::object::*;
use crate::pool::Handle;

impl<A: Arch> Kernel<A> {
    pub(crate) fn destroy_irq(&self, handle: Handle<Irq<A>>) {
        let irq = self.memory.at(handle);
        A::irq_set(irq, true);
        if let Some(slot) = self.irq_slot(irq.vector) {
            slot.set(None);
        }
        self.memory.free(handle);
    }

    /// Handles a device interrupt at `vector`: signals the bound notification.
    pub fn interrupt(&self, vector: u8) {
        let Some(irq) =
            self.irq_slot(vector).and_then(Cell::get).and_then(|irq| self.memory.get(irq))
        else {
            return;
        };
        if matches!(irq.source, crate::arch::IrqSource::Line { level: true, .. }) {
            // A level-triggered line stays asserted until the driver has served the device.
            A::irq_set(irq, true);
        }
        if let Some(notification) = irq.notification.get() {
            self.signal(notification, 1 << irq.bit.get());
        }
    }
}
