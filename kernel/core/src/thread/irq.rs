//! Hardware interrupts.

use core::cell::Cell;

use abi::Status;
use abi::args::IrqSource;

use crate::arch::Arch;
use crate::object::*;
use crate::pool::{Account, Handle};
use crate::{Kernel, Result};

impl<A: Arch> Kernel<A> {
    /// Creates an interrupt. Fails with `Busy` if another one has the same line.
    pub(crate) fn new_irq(&self, factory: Account, source: IrqSource) -> Result<Handle<Irq<A>>> {
        if !A::irq_valid(source) {
            return Err(Status::BadArgument);
        }
        let same_line = |irq: &Irq<A>| match (irq.source, source) {
            (IrqSource::Line { gsi: a, .. }, IrqSource::Line { gsi: b, .. }) => a == b,
            _ => false,
        };
        let mut taken = self.irqs.iter().filter_map(|slot| self.memory.get(slot.get()?));
        if taken.any(same_line) {
            return Err(Status::Busy);
        }
        let index =
            self.irqs.iter().position(|slot| slot.get().is_none()).ok_or(Status::NoQuota)?;
        let handle = self.memory.alloc(
            factory,
            Irq {
                caps: Cell::new(0),
                source,
                cpu: 0,
                number: IrqNumber(index as u32),
                notification: Cell::new(None),
                bit: Cell::new(0),
            },
        )?;
        self.irqs[index].set(Some(handle));
        Ok(handle)
    }

    pub(crate) fn destroy_irq(&self, handle: Handle<Irq<A>>) {
        let irq = self.memory.at(handle);
        A::irq_set(irq, true);
        if let Some(slot) = self.irqs.get(irq.number.index()) {
            slot.set(None);
        }
        self.memory.free(handle);
    }

    /// Handles a device interrupt: signals the bound notification.
    pub fn interrupt(&self, number: IrqNumber) {
        let slot = self.irqs.get(number.index()).and_then(Cell::get);
        let Some(irq) = slot.and_then(|irq| self.memory.get(irq)) else { return };
        if matches!(irq.source, IrqSource::Line { level: true, .. }) {
            // A level-triggered line stays asserted until the driver has served the device.
            A::irq_set(irq, true);
        }
        if let Some(notification) = irq.notification.get() {
            self.signal(notification, 1 << irq.bit.get());
        }
    }
}
