//! Host services of the VM.

use core::fmt;

use native_rt::{Notification, SharedVcpu, log, time};
use proto::start::{PassThrough, Start, event};
use vmm_bus::BackendRef;
use vmm_machine::{Host, Level, Sgis, Virq};

use crate::console::{Console, ConsoleLine};
use crate::devices::Listeners;
use crate::{pass_through, platform};

/// Host services as one thread uses them: clock, console, log, kicks of other threads.
pub struct NativeHost<'a> {
    /// Host side of the serial line and the virtio console.
    pub console: &'a Console,
    /// Serial line.
    pub serial: ConsoleLine,
    /// Notification of each vCPU.
    pub notifications: &'a [Notification],
    /// Each vCPU, for other threads than its own.
    pub vcpus: &'a [SharedVcpu],
    /// Environment of this program.
    pub start: &'a Start<'a>,
    /// Devices that the guest drives itself.
    pub devices: &'a [PassThrough],
    /// Mapping from events to devices.
    pub listeners: Listeners,
    /// Ticks by which the VM's time is less than the host's, because of pauses.
    pub paused_ticks: u64,
    /// Counts of this thread, as in [`proto::control::VmmStatistics`].
    pub server_events: [u64; 2],
}

impl Host for NativeHost<'_> {
    #[inline(always)]
    fn counter(&self) -> u64 {
        time::tsc().wrapping_sub(self.paused_ticks)
    }

    fn serial(&mut self) -> BackendRef<'_> {
        BackendRef::Bytes(&mut self.serial)
    }

    fn log(&mut self, level: Level, text: fmt::Arguments<'_>) {
        let level = match level {
            Level::Error => log::Level::Error,
            Level::Warning => log::Level::Warn,
            Level::Info => log::Level::Info,
        };
        log::write(level, text);
    }

    fn put_virqs(&mut self, index: usize, take: &mut dyn FnMut() -> Option<Virq>) -> bool {
        self.vcpus.get(index).is_some_and(|&vcpu| platform::put_virqs(vcpu, take))
    }

    fn set_sgis(&mut self, index: usize, sgis: Sgis) {
        if let Some(&vcpu) = self.vcpus.get(index) {
            platform::set_sgis(vcpu, sgis);
        }
    }

    fn set_doorbells(&mut self, virq: &mut dyn FnMut(usize) -> Option<Virq>) {
        let Some(&vcpu) = self.vcpus.first() else { return };
        for (channel, slot) in self.listeners.channels().enumerate() {
            platform::set_event_virq(vcpu, channel, event::channel(channel), virq(slot));
        }
    }

    fn notify(&mut self, index: usize) -> bool {
        // It fails only if the capability is gone, and the vCPU with it.
        self.vcpus.get(index).is_some_and(|vcpu| vcpu.notify().unwrap_or(true))
    }

    fn end_pass_through(&mut self, number: usize) {
        pass_through::acknowledge(number);
    }

    #[cold]
    fn place_registers(&mut self, number: usize, index: usize, address: Option<u64>) -> bool {
        pass_through::place_registers(self.start, number, index, address)
    }

    fn kick(&mut self, index: usize) {
        if let Some(notification) = self.notifications.get(index) {
            // It fails only if the capability is gone, and the vCPU with it.
            let _ = notification.signal(event::KICK);
        }
    }
}
