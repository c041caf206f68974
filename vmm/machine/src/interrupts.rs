//! Routing between devices: interrupt lines, interrupt messages and timers.
//!
//! The router records the effects of a device while it is called; the board propagates them
//! afterwards, because the receiver is another device.

use vmm_bus::{BackendRef, Env, MachineEvent, Msi, NEVER, Nanos};
use vmm_mem::GuestMemory;
use vmm_vcpu::{CounterClock, MAX_VCPUS, Outcome};
use vmm_x86::apic::InterruptMessage;

use crate::functions::MAX_FUNCTIONS;
use crate::layout;
use crate::once::Once;
use crate::{Host, Level};

/// Devices, numbered for timers and address maps. Local APIC `n` is `LocalApic as usize + n`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Chip {
    /// Serial line.
    Uart,
    /// 8259A pair.
    Pic,
    /// 8254.
    Pit,
    /// Real-time clock.
    Rtc,
    /// ACPI power management.
    Pm,
    /// Keyboard controller.
    Keyboard,
    /// System control port A.
    Port92,
    /// POST codes.
    Post,
    /// pvpanic.
    PvPanic,
    /// Debug exit.
    DebugExit,
    /// Reset port.
    Reset,
    /// I/O APIC.
    IoApic,
    /// First local APIC.
    LocalApic,
}

/// Devices other than local APICs, in order.
pub const CHIPS: [Chip; Chip::LocalApic as usize] = [
    Chip::Uart,
    Chip::Pic,
    Chip::Pit,
    Chip::Rtc,
    Chip::Pm,
    Chip::Keyboard,
    Chip::Port92,
    Chip::Post,
    Chip::PvPanic,
    Chip::DebugExit,
    Chip::Reset,
    Chip::IoApic,
];

/// Timer index of the first PCI function, after the local APICs.
pub const FUNCTIONS: usize = CHIPS.len() + MAX_VCPUS;
/// Timers: one for each chip, each local APIC, each PCI function.
const TIMERS: usize = FUNCTIONS + MAX_FUNCTIONS;
const _: () = assert!(TIMERS <= 64);
/// Timers of the local APICs of CPUs other than 0.
const OTHER_APICS: u64 = ((1 << (MAX_VCPUS - 1)) - 1) << (CHIPS.len() + 1);
/// Messages that one call of a device can send: an EOI may free every I/O APIC input.
const MESSAGES: usize = 24;

/// Counters of unsupported guest operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Accesses to ports without a device.
    pub unknown_ports: u64,
    /// Accesses to guest-physical addresses without memory or a device.
    pub unknown_memory: u64,
    /// Accesses to unknown MSRs or system registers, or with invalid values.
    pub unknown_registers: u64,
    /// Instructions that could not be emulated.
    pub unknown_instructions: u64,
    /// Uses of features that a device model lacks.
    pub missing: u64,
    /// Other unsupported operations.
    pub other: u64,
}

/// Pending interrupts, messages, timers and service requests of a board.
#[derive(Clone, Debug)]
pub struct InterruptRouter {
    pub clock: CounterClock,
    /// Guest memory, for devices.
    memory: GuestMemory,
    /// Levels of ISA interrupts.
    levels: u16,
    /// Lines that rose, and lines that fell, since the last propagation.
    rose: u16,
    fell: u16,
    messages: [InterruptMessage; MESSAGES],
    message_count: usize,
    timers: [Nanos; TIMERS],
    /// Bit `n`: timer `n` is armed. Few timers are armed at any time.
    armed: u64,
    /// CPUs whose pending events must be serviced.
    pub needs_service: u32,
    /// CPUs of `needs_service` that have been kicked for it.
    kicked: u32,
    pub end: Option<Outcome>,
    pub counters: Counters,
    pub once: Once,
}

/// Indices of the set bits, ascending.
fn ones(mut bits: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let next = (bits != 0).then(|| bits.trailing_zeros() as usize);
        bits &= bits.wrapping_sub(1);
        next
    })
}

const NO_MESSAGE: InterruptMessage =
    InterruptMessage { destination: 0, logical: false, delivery: 0, vector: 0, level: false };

impl InterruptRouter {
    pub const fn new(clock: CounterClock, memory: GuestMemory) -> Self {
        Self {
            clock,
            memory,
            levels: 0,
            rose: 0,
            fell: 0,
            messages: [NO_MESSAGE; MESSAGES],
            message_count: 0,
            timers: [NEVER; TIMERS],
            armed: 0,
            needs_service: 0,
            kicked: 0,
            end: None,
            counters: Counters {
                unknown_ports: 0,
                unknown_memory: 0,
                unknown_registers: 0,
                unknown_instructions: 0,
                missing: 0,
                other: 0,
            },
            once: Once::new(),
        }
    }

    /// True if the last call of a device left effects to propagate.
    #[inline]
    pub fn has_pending(&self) -> bool {
        self.rose | self.fell != 0 || self.message_count != 0
    }

    /// Takes a changed interrupt line: its number, the intermediate level if it is back at the old
    /// one, and its current level. A pulse of either polarity is an edge, however short.
    pub fn take_change(&mut self) -> Option<(u8, Option<bool>, bool)> {
        let irq = (self.rose | self.fell).checked_ilog2()? as u8;
        let bit = 1 << irq;
        let level = self.levels & bit != 0;
        let pulse = self.rose & self.fell & bit != 0;
        self.rose &= !bit;
        self.fell &= !bit;
        Some((irq, pulse.then_some(!level), level))
    }

    /// Takes one of the sent messages; their order has no meaning.
    pub fn take_message(&mut self) -> Option<InterruptMessage> {
        self.message_count = self.message_count.checked_sub(1)?;
        Some(self.messages[self.message_count])
    }

    fn arm(&mut self, timer: usize, deadline: Nanos) {
        self.timers[timer] = deadline;
        self.armed = self.armed & !(1 << timer) | u64::from(deadline != NEVER) << timer;
        // CPU 0 services all timers except those of the other local APICs.
        let owner = if timer < FUNCTIONS { timer.saturating_sub(CHIPS.len()) } else { 0 };
        self.needs_service |= 1 << owner;
    }

    /// Takes the next timer from index `start` on whose deadline is not after `now`.
    pub fn take_due(&mut self, start: usize, now: Nanos) -> Option<usize> {
        let from = u64::MAX.checked_shl(start as u32).unwrap_or(0);
        let due = ones(self.armed & from).find(|&timer| self.timers[timer] <= now)?;
        self.armed &= !(1 << due);
        Some(due)
    }

    /// Next deadline of a CPU: of its local APIC, for CPU 0 also of devices and functions.
    pub fn deadline(&self, cpu: usize) -> Nanos {
        let mine = if cpu == 0 { !OTHER_APICS } else { 1 << (CHIPS.len() + cpu) };
        ones(self.armed & mine).map(|timer| self.timers[timer]).fold(NEVER, Nanos::min)
    }

    /// Ends the VM; the first outcome counts.
    pub fn end(&mut self, outcome: Outcome) {
        self.end.get_or_insert(outcome);
        self.needs_service = u32::MAX;
    }

    /// Takes the CPUs to kick: those with pending events that have not been kicked yet.
    #[inline]
    pub fn take_kicks(&mut self) -> u32 {
        let kicks = self.needs_service & !self.kicked;
        self.kicked |= kicks;
        kicks
    }

    /// Marks the pending events of a CPU as serviced.
    pub fn mark_serviced(&mut self, cpu: usize) {
        self.needs_service &= !(1 << cpu);
        self.kicked &= !(1 << cpu);
    }

    /// Logs a message once per key.
    pub fn log_once<H: Host>(
        &mut self,
        host: &mut H,
        level: Level,
        key: u64,
        text: core::fmt::Arguments<'_>,
    ) {
        self.once.log(host, level, key, text);
    }
}

/// Environment of one device.
pub struct ChipEnv<'a, H> {
    pub router: &'a mut InterruptRouter,
    pub host: &'a mut H,
    /// Timer index of the device; local APICs follow [`CHIPS`], then PCI functions.
    pub chip: usize,
}

/// ISA interrupt of a device's line 0.
const fn irq(chip: usize) -> Option<u8> {
    const UART: usize = Chip::Uart as usize;
    const PIT: usize = Chip::Pit as usize;
    const RTC: usize = Chip::Rtc as usize;
    const PM: usize = Chip::Pm as usize;
    const KEYBOARD: usize = Chip::Keyboard as usize;
    match chip {
        UART => Some(layout::SERIAL_IRQ),
        PIT => Some(layout::PIT_IRQ),
        RTC => Some(layout::RTC_IRQ),
        PM => Some(layout::SCI),
        KEYBOARD => Some(layout::KEYBOARD_IRQ),
        _ => None,
    }
}

impl<H: Host> Env for ChipEnv<'_, H> {
    fn now(&self) -> Nanos {
        self.router.clock.nanos(self.host.counter())
    }

    fn set_line(&mut self, line: u8, level: bool) {
        let (0, Some(irq)) = (line, irq(self.chip)) else { return };
        let bit = 1 << irq;
        match (self.router.levels & bit != 0, level) {
            (false, true) => self.router.rose |= bit,
            (true, false) => self.router.fell |= bit,
            _ => return,
        }
        self.router.levels ^= bit;
    }

    fn arm(&mut self, timer: u8, deadline: Nanos) {
        if timer == 0 {
            self.router.arm(self.chip, deadline);
        }
    }

    fn memory(&self) -> &GuestMemory {
        &self.router.memory
    }

    /// Of the serial line: no other device outside of PCI has one.
    fn backend(&mut self) -> (BackendRef<'_>, &GuestMemory) {
        (self.host.serial(), &self.router.memory)
    }

    fn msi(&mut self, msi: Msi) {
        let Some(message) = InterruptMessage::decode(msi) else {
            return self.missing("interrupt message to no local APIC", msi.address);
        };
        if let Some(place) = self.router.messages.get_mut(self.router.message_count) {
            *place = message;
            self.router.message_count += 1;
        } else {
            // Unreachable: see `MESSAGES`.
            self.router.counters.other += 1;
        }
    }

    fn machine(&mut self, event: MachineEvent) {
        let outcome = match event {
            MachineEvent::PowerOff => Outcome::PowerOff,
            MachineEvent::Reset => Outcome::Reset,
            MachineEvent::GuestPanic => Outcome::GuestPanic,
            MachineEvent::ExitCode(code) => Outcome::Code(code),
            MachineEvent::GuestCrashLoaded => {
                let what = "the guest has crashed and runs its crash kernel";
                let key = what.as_ptr().addr() as u64;
                return self.router.log_once(self.host, Level::Info, key, format_args!("{what}"));
            }
        };
        self.router.end(outcome);
    }

    fn missing(&mut self, what: &'static str, value: u64) {
        self.router.counters.missing += 1;
        // The address identifies the text: each is one literal of one device.
        let key = what.as_ptr().addr() as u64;
        self.router.log_once(self.host, Level::Warning, key, format_args!("{what} ({value:#x})"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::fmt::Arguments;
    use vmm_mem::testing;

    #[derive(Default)]
    struct CountingHost {
        logged: usize,
    }

    impl Host for CountingHost {
        fn counter(&self) -> u64 {
            0
        }
        fn log(&mut self, _: Level, _: Arguments<'_>) {
            self.logged += 1;
        }
        fn kick(&mut self, _: usize) {}
    }

    #[test]
    fn interrupts_to_no_local_apic_are_counted() {
        let memory = testing::memory(&[(0, 4096)]);
        let mut router = InterruptRouter::new(CounterClock::new(1_000_000, 0), memory);
        let mut host = CountingHost::default();
        let mut env = ChipEnv { router: &mut router, host: &mut host, chip: FUNCTIONS };
        env.msi(Msi { address: 0xfee0_1000, data: 0x41 });
        for _ in 0..2 {
            env.msi(Msi { address: 0x1_fee0_1000, data: 0x42 });
        }
        assert_eq!((router.counters.missing, host.logged), (2, 1));
        assert_eq!(router.take_message().map(|message| message.vector), Some(0x41));
        assert_eq!(router.take_message(), None);
    }
}
