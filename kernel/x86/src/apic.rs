//! Local APIC, in xAPIC or x2APIC mode behind one interface (APM vol. 2, chapter 16).
//!
//! The local APICs of all CPUs have the same address and mode, so one value represents them all.
//! The kernel runs with interrupts off, so register access sequences are not interrupted on their
//! CPU.

use crate::io::{rdmsr, wrmsr};
use crate::memory::direct;
use crate::{cpu, idt, time};
use core::sync::atomic::{AtomicU64, Ordering, fence};
use hw_x86::apic::local;
use hw_x86::msr;
use kernel_run::boot_memory::FOUR_GIB;
use spin::Once;

/// Register access, implemented by the hardware and by a fake for tests.
pub trait ApicRegisters {
    /// Reads a memory-mapped register.
    fn read(&self, register: u32) -> u32;
    /// Writes a memory-mapped register.
    fn write(&self, register: u32, value: u32);
    /// Reads a model-specific register.
    fn read_msr(&self, msr: u32) -> u64;
    /// Writes a model-specific register.
    fn write_msr(&self, msr: u32, value: u64);
    /// Current value of the time-stamp counter.
    fn tsc(&self) -> u64;
}

/// Hardware registers; the field is the physical address of the memory-mapped ones.
pub struct Hardware(u64);

impl ApicRegisters for Hardware {
    #[inline]
    fn read(&self, register: u32) -> u32 {
        // SAFETY: the local APIC's page, mapped uncached; the register is one of `local`.
        unsafe { direct(self.0 + register as u64).cast::<u32>().read_volatile() }
    }

    #[inline]
    fn write(&self, register: u32, value: u32) {
        // SAFETY: as in `read`. The APIC only interrupts CPUs, at vectors that have handlers.
        unsafe { direct(self.0 + register as u64).cast::<u32>().write_volatile(value) };
    }

    #[inline]
    fn read_msr(&self, msr: u32) -> u64 {
        // SAFETY: `Apic` accesses only local APIC registers that exist in its mode.
        unsafe { rdmsr(msr) }
    }

    #[inline]
    fn write_msr(&self, msr: u32, value: u64) {
        // SAFETY: as in `read_msr` and `write`.
        unsafe { wrmsr(msr, value) };
    }

    #[inline]
    fn tsc(&self) -> u64 {
        time::tsc()
    }
}

/// Polls of the delivery status after which the previous IPI counts as lost.
const MAX_POLLS: u32 = 1_000_000;
/// Fractional bits of the ratio between timer ticks and TSC ticks.
const RATIO_SHIFT: u32 = 32;

/// Local APIC of the executing CPU.
pub struct Apic<R> {
    registers: R,
    x2: bool,
    deadline: bool,
    /// Timer ticks per TSC tick, fixed-point; unused in deadline mode.
    ratio: AtomicU64,
}

impl<R: ApicRegisters> Apic<R> {
    /// A local APIC in x2APIC or xAPIC mode, its timer in TSC-deadline or one-shot mode.
    pub const fn new(registers: R, x2: bool, deadline: bool) -> Self {
        Self { registers, x2, deadline, ratio: AtomicU64::new(1 << RATIO_SHIFT) }
    }

    #[inline]
    fn read(&self, register: u32) -> u32 {
        if self.x2 {
            self.registers.read_msr(msr::X2APIC + register / 16) as u32
        } else {
            self.registers.read(register)
        }
    }

    #[inline]
    fn write(&self, register: u32, value: u32) {
        if self.x2 {
            self.registers.write_msr(msr::X2APIC + register / 16, value as u64);
        } else {
            self.registers.write(register, value);
        }
    }

    /// Enables this CPU's local APIC, with its local sources masked and the timer stopped.
    pub fn enable(&self) {
        let base = self.registers.read_msr(msr::APIC_BASE);
        // x2APIC mode can only be entered from xAPIC mode (APM vol. 2 §16.9).
        if base & msr::apic_base::ENABLE == 0 {
            self.registers.write_msr(msr::APIC_BASE, base | msr::apic_base::ENABLE);
        }
        if self.x2 && base & msr::apic_base::X2APIC == 0 {
            let on = msr::apic_base::ENABLE | msr::apic_base::X2APIC;
            self.registers.write_msr(msr::APIC_BASE, base | on);
        }
        for source in [local::LVT_LINT0, local::LVT_LINT1, local::LVT_ERROR] {
            self.write(source, local::LVT_MASKED);
        }
        self.write(local::TPR, (idt::TASK_PRIORITY as u32) << 4);
        self.write(local::SVR, local::SVR_ENABLE | idt::SPURIOUS as u32);
        self.write(local::TIMER_DIVIDE, local::DIVIDE_BY_1);
        self.write(local::TIMER_INITIAL, 0);
        let mode = if self.deadline { local::TIMER_TSC_DEADLINE } else { local::TIMER_ONE_SHOT };
        self.write(local::LVT_TIMER, mode | idt::TIMER as u32);
        if self.deadline {
            // The memory-mapped write must complete before the deadline is written (SDM vol. 3
            // §11.5.4.1).
            fence(Ordering::SeqCst);
            self.disarm();
        }
    }

    /// This CPU's local APIC id.
    pub fn id(&self) -> u32 {
        let raw = self.read(local::ID);
        if self.x2 { raw } else { raw >> 24 }
    }

    /// Returns whether the local APIC is in x2APIC mode.
    pub fn is_x2(&self) -> bool {
        self.x2
    }

    /// Returns whether the timer is in TSC-deadline mode.
    pub fn has_deadline(&self) -> bool {
        self.deadline
    }

    /// Signals the end of the interrupt in service (EOI).
    #[inline]
    pub fn eoi(&self) {
        self.write(local::EOI, 0);
    }

    /// Returns whether the interrupt with this vector is in service; a spurious one is not.
    #[cold]
    pub fn is_in_service(&self, vector: u8) -> bool {
        let register = local::ISR + 0x10 * (vector as u32 / 32);
        self.read(register) & 1 << (vector % 32) != 0
    }

    /// Sends an interrupt command to a local APIC.
    pub fn send(&self, apic_id: u32, command: u32) {
        // Data for the receiver must be visible first: an MSR write does not wait for earlier
        // stores.
        fence(Ordering::SeqCst);
        if self.x2 {
            let value = (apic_id as u64) << 32 | command as u64;
            self.registers.write_msr(msr::X2APIC + local::ICR_LOW / 16, value);
            return;
        }
        for _ in 0..MAX_POLLS {
            if self.read(local::ICR_LOW) & local::ICR_PENDING == 0 {
                break;
            }
            core::hint::spin_loop();
        }
        self.write(local::ICR_HIGH, apic_id << 24);
        self.write(local::ICR_LOW, command);
    }

    /// Sends an NMI to all other CPUs.
    pub fn send_nmi_to_others(&self) {
        self.send(0, local::ICR_ALL_OTHERS | local::ICR_ASSERT | local::DELIVER_NMI);
    }

    /// Sends INIT to a CPU, which then waits for [`Apic::send_startup`].
    pub fn send_init(&self, apic_id: u32) {
        self.send(apic_id, local::ICR_ASSERT | local::DELIVER_INIT);
    }

    /// Starts a waiting CPU in real mode at a page below 1 MiB.
    pub fn send_startup(&self, apic_id: u32, page: u64) {
        let page_number = (page >> abi::PAGE_SHIFT) as u32 & 0xff;
        self.send(apic_id, local::ICR_ASSERT | local::DELIVER_STARTUP | page_number);
    }

    /// Starts the timer at its maximum count, masked, for calibration.
    pub fn start_counting(&self) {
        self.write(local::LVT_TIMER, local::LVT_MASKED | local::TIMER_ONE_SHOT);
        self.write(local::TIMER_INITIAL, u32::MAX);
    }

    /// Remaining ticks of the timer.
    pub fn count(&self) -> u32 {
        self.read(local::TIMER_CURRENT)
    }

    /// Sets the timer frequency, which is the same on all CPUs.
    pub fn set_frequency(&self, apic_khz: u64, tsc_khz: u64) {
        let ratio = ((apic_khz as u128) << RATIO_SHIFT) / tsc_khz.max(1) as u128;
        self.ratio.store((ratio as u64).max(1), Ordering::Relaxed);
    }

    /// Arms the timer for TSC value `deadline`. A deadline in the past interrupts immediately; one
    /// beyond the range of the timer interrupts early.
    #[inline]
    pub fn arm(&self, deadline: u64) {
        if self.deadline {
            self.registers.write_msr(msr::TSC_DEADLINE, deadline.max(1));
            return;
        }
        let wait = deadline.saturating_sub(self.registers.tsc()) as u128;
        let ticks = (wait * self.ratio.load(Ordering::Relaxed) as u128) >> RATIO_SHIFT;
        self.write(local::TIMER_INITIAL, ticks.clamp(1, u32::MAX as u128) as u32);
    }

    /// Stops the timer.
    #[inline]
    pub fn disarm(&self) {
        if self.deadline {
            self.registers.write_msr(msr::TSC_DEADLINE, 0);
        } else {
            self.write(local::TIMER_INITIAL, 0);
        }
    }
}

impl Apic<Hardware> {
    /// Sends an IPI with `vector` to CPU `index`. No effect if there is no such CPU.
    pub fn send_ipi(&self, index: usize, vector: u8) {
        if let Some(target) = cpu::by_index(index) {
            self.send(target.apic_id, local::ICR_ASSERT | vector as u32);
        }
    }
}

static LOCAL: Once<Apic<Hardware>> = Once::new();

/// Selects the mode: x2APIC if the CPU supports it or is in it already. `None` if the registers are
/// beyond the direct map.
pub fn init(x2apic: bool, deadline: bool) -> Option<&'static Apic<Hardware>> {
    // SAFETY: every long-mode CPU has this register.
    let base = unsafe { rdmsr(msr::APIC_BASE) };
    let x2 = x2apic || base & msr::apic_base::X2APIC != 0;
    let address = base & msr::apic_base::ADDRESS;
    (x2 || address < FOUR_GIB)
        .then(|| LOCAL.call_once(|| Apic::new(Hardware(address), x2, deadline)))
}

/// Local APIC of this CPU. Panics before [`init`].
#[inline]
pub fn local() -> &'static Apic<Hardware> {
    LOCAL.get().expect("local APIC used before its initialisation")
}

/// Local APIC, if initialised, for the panic path.
pub fn try_local() -> Option<&'static Apic<Hardware>> {
    LOCAL.get()
}

/// Physical address of the register page.
pub fn page() -> u64 {
    local().registers.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[derive(Debug, PartialEq, Clone, Copy)]
    enum Event {
        Write(u32, u32),
        Msr(u32, u64),
    }
    use Event::{Msr, Write};

    /// Records writes; returns preset values on reads.
    struct Fake {
        events: RefCell<Vec<Event>>,
        base: u64,
        now: u64,
        pending: RefCell<u32>,
        in_service: u8,
    }

    impl Fake {
        fn new(base: u64, now: u64) -> Self {
            Self { events: RefCell::default(), base, now, pending: RefCell::new(0), in_service: 0 }
        }
    }

    impl ApicRegisters for Fake {
        fn read(&self, register: u32) -> u32 {
            match register {
                local::ID => 0x0500_0000,
                local::ICR_LOW if *self.pending.borrow() > 0 => {
                    *self.pending.borrow_mut() -= 1;
                    local::ICR_PENDING
                }
                register if register == local::ISR + 0x10 * (self.in_service as u32 / 32) => {
                    1 << (self.in_service % 32)
                }
                _ => 0,
            }
        }
        fn write(&self, register: u32, value: u32) {
            self.events.borrow_mut().push(Write(register, value));
        }
        fn read_msr(&self, msr: u32) -> u64 {
            match msr {
                msr::APIC_BASE => self.base,
                0x802 => 0x1_0005,
                other => panic!("read of MSR {other:#x}"),
            }
        }
        fn write_msr(&self, msr: u32, value: u64) {
            self.events.borrow_mut().push(Msr(msr, value));
        }
        fn tsc(&self) -> u64 {
            self.now
        }
    }

    fn taken(apic: &Apic<Fake>) -> Vec<Event> {
        apic.registers.events.take()
    }

    #[test]
    fn xapic_never_uses_x2apic_registers() {
        let apic = Apic::new(Fake::new(0xfee0_0900, 0), false, false);
        apic.enable();
        let events = taken(&apic);
        assert!(events.iter().all(|event| matches!(event, Write(..))), "{events:?}");
        assert!(events.contains(&Write(local::SVR, 0x1ff)));
        assert!(events.contains(&Write(local::TPR, 0x10)), "vectors 0 to 31 are held off");
        assert!(events.contains(&Write(local::LVT_TIMER, 0xf0)));
        assert_eq!(apic.id(), 5);
        *apic.registers.pending.borrow_mut() = 3;
        apic.send_startup(7, 0x8000);
        assert_eq!(*apic.registers.pending.borrow(), 0, "waits for the previous IPI");
        assert_eq!(taken(&apic), [Write(0x310, 7 << 24), Write(0x300, 0x4608)]);
        apic.eoi();
        assert_eq!(taken(&apic), [Write(0xb0, 0)]);
    }

    #[test]
    fn x2apic_never_touches_memory() {
        let apic = Apic::new(Fake::new(0xfee0_0100, 0), true, true);
        apic.enable();
        let events = taken(&apic);
        assert_eq!(events[..2], [Msr(0x1b, 0xfee0_0900), Msr(0x1b, 0xfee0_0d00)]);
        assert!(events.iter().all(|event| matches!(event, Msr(..))), "{events:?}");
        assert!(events.contains(&Msr(0x832, 2 << 17 | 0xf0)));
        assert!(events.contains(&Msr(0x808, 0x10)), "vectors 0 to 31 are held off");
        assert_eq!(events.last(), Some(&Msr(msr::TSC_DEADLINE, 0)));
        assert_eq!(apic.id(), 0x1_0005);
        apic.send_init(0x1_0007);
        apic.send_nmi_to_others();
        apic.eoi();
        assert_eq!(
            taken(&apic),
            [Msr(0x830, 0x1_0007_0000_4500), Msr(0x830, 0xc_4400), Msr(0x80b, 0)]
        );
    }

    #[test]
    fn x2apic_that_firmware_turned_on_stays() {
        let apic = Apic::new(Fake::new(0xfee0_0d00, 0), true, true);
        apic.enable();
        assert!(!taken(&apic).iter().any(|event| matches!(event, Msr(0x1b, _))));
    }

    #[test]
    fn in_service() {
        for vector in [0x20, 0x5f, 0xf0, 0xff] {
            let mut fake = Fake::new(0xfee0_0900, 0);
            fake.in_service = vector;
            let apic = Apic::new(fake, false, false);
            let found: Vec<u8> = (0..=u8::MAX).filter(|&it| apic.is_in_service(it)).collect();
            assert_eq!(found, [vector]);
        }
    }

    #[test]
    fn one_shot_deadlines() {
        let apic = Apic::new(Fake::new(0xfee0_0900, 1_000_000), false, false);
        apic.set_frequency(100_000, 2_000_000);
        for (deadline, count) in [
            (3_000_000, 99_999..=100_000),
            (1_000_000, 1..=1),
            (5, 1..=1),
            (u64::MAX, u32::MAX..=u32::MAX),
        ] {
            apic.arm(deadline);
            let [Write(local::TIMER_INITIAL, ticks)] = taken(&apic)[..] else { panic!() };
            assert!(count.contains(&ticks), "{deadline}: {ticks}");
        }
        apic.disarm();
        assert_eq!(taken(&apic), [Write(local::TIMER_INITIAL, 0)]);
    }

    #[test]
    fn tsc_deadlines() {
        let apic = Apic::new(Fake::new(0xfee0_0900, 1_000_000), false, true);
        apic.arm(0);
        apic.arm(77);
        apic.disarm();
        let expected = [1, 77, 0].map(|value| Msr(msr::TSC_DEADLINE, value));
        assert_eq!(taken(&apic), expected, "0 would disarm");
    }
}
