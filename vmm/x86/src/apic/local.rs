//! Local APIC, as xAPIC (memory-mapped) and x2APIC (MSRs).
//!
//! State: the register file, the APIC base MSR, the timer's deadline, the relation of the guest's
//! TSC to VM time, events pending for the board.
//! Features: priorities, EOI with broadcast and its suppression, logical destinations (flat,
//! cluster, x2APIC), all interrupt commands and shorthands, self-IPI, error register, local vector
//! table with timer (one-shot, periodic, TSC deadline), LINT0, LINT1, error; thermal and
//! performance entries are stored and never fire. The timer's bus clock is 1 GHz
//! ([`spec::BUS_HZ`]). Periodic expiries that the host was late for, or closer together than
//! [`spec::SHORTEST_PERIOD`], become one.
//! Missing (reported): remote read, level-triggered LINT pins, changing the id, AMD's extended
//! registers.
//! Documentation: Intel SDM vol. 3, chapter 11; AMD APM vol. 2, chapter 16.
//!
//! Wiring: besides [`Device`] (the xAPIC page) the board calls the methods. After each call that
//! may change state the board takes the [`Events`], and the message for *other* local APICs
//! ([`LocalApic::take_message`]): it delivers the message to every other local APIC that
//! [`matches`](LocalApic::matches) it; the sender has delivered it to itself already. So "all but
//! self" is a physical broadcast, whose destination is always `u32::MAX`.
//!
//! Cost: each set of vectors has a summary word, so that [`LocalApic::pending`], [`LocalApic::eoi`]
//! and delivery access two words, independent of the number of pending vectors.

use super::InterruptMessage;
use vmm_bus::{Access, Device, Env, NEVER, Nanos, Ticks};

mod registers;
pub mod spec;
mod timer;
mod vectors;

use spec::*;
use vectors::Vectors;

const TIMER: usize = 0;
const LINT0: usize = 3;
const LINT1: usize = 4;
const ERROR: usize = 5;
/// Lower vectors are reserved for exceptions and illegal in interrupts.
const FIRST_VECTOR: u8 = 16;

/// Access mode of the registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// No access: the CPU is connected to the 8259 only.
    Disabled,
    /// Memory-mapped.
    XApic,
    /// MSRs, with 32-bit ids.
    X2Apic,
}

/// An access that raises a general-protection exception, `#GP(0)`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault;

/// Events pending for the board.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Events {
    /// An NMI for the CPU.
    pub nmi: bool,
    /// INIT: reset the CPU and call [`LocalApic::init`].
    pub init: bool,
    /// Start-up IPI with this vector, if the CPU waits for it.
    pub startup: Option<u8>,
    /// A system management interrupt.
    pub smi: bool,
    /// An I/O APIC requests an acknowledge cycle with the 8259.
    pub ext_int: bool,
    /// EOI by register write of a level-triggered vector, to be sent to the I/O APIC.
    pub eoi: Option<u8>,
    /// The task priority was set by a register write: a CPU with virtual `CR8` must be updated.
    pub priority: bool,
}

/// Configuration of a local APIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// APIC id. In xAPIC mode the low eight bits are used.
    pub id: u32,
    /// True for the bootstrap CPU.
    pub bsp: bool,
    /// Frequency of the guest's TSC. 0 is taken as 1.
    pub tsc_khz: u32,
    /// The guest's TSC at VM time 0.
    pub tsc_at_zero: u64,
    /// Width of physical addresses, for the reserved bits of the base MSR.
    pub physical_bits: u8,
}

/// A local APIC. As a [`Device`] it is the xAPIC page; timer 0 is its timer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LocalApic {
    id: u32,
    reserved_base: u64,
    tsc: Ticks,
    /// The guest's TSC at VM time 0, signed: the guest may set its TSC back.
    tsc_at_zero: i64,
    base: u64,
    tpr: u8,
    ldr: u32,
    dfr: u32,
    svr: u32,
    isr: Vectors,
    tmr: Vectors,
    irr: Vectors,
    /// The request offered as a virtual interrupt; the CPU may have taken it already.
    offered: Option<u8>,
    /// `offered` has been requested again.
    requested_again: bool,
    esr: u32,
    /// Errors since the guest last latched them.
    errors: u32,
    icr_low: u32,
    icr_high: u32,
    lvt: [u32; 6],
    initial: u32,
    divide: u32,
    /// Expiry of the counting timer; [`NEVER`] if it does not run.
    expiry: Nanos,
    /// The TSC deadline; 0: none.
    deadline: u64,
    lint: [bool; 2],
    /// The message of the last interrupt command.
    sent: Option<InterruptMessage>,
    events: Events,
    has_events: bool,
}

impl LocalApic {
    /// Creates a local APIC in its power-on state, in xAPIC mode.
    pub const fn new(config: Config) -> Self {
        let address_bits = if config.physical_bits < 52 { config.physical_bits } else { 52 };
        let address = ((1_u64 << address_bits) - 1) & !0xfff;
        Self {
            id: config.id,
            reserved_base: !(address | BASE_ENABLE | BASE_X2APIC | BASE_BSP),
            tsc: Ticks::new(config.tsc_khz as u64 * 1000),
            tsc_at_zero: config.tsc_at_zero as i64,
            base: BASE_ADDRESS | BASE_ENABLE | if config.bsp { BASE_BSP } else { 0 },
            tpr: 0,
            ldr: 0,
            dfr: u32::MAX,
            svr: 0xff,
            isr: Vectors::EMPTY,
            tmr: Vectors::EMPTY,
            irr: Vectors::EMPTY,
            offered: None,
            requested_again: false,
            esr: 0,
            errors: 0,
            icr_low: 0,
            icr_high: 0,
            lvt: [LVT_MASKED; 6],
            initial: 0,
            divide: 0,
            expiry: NEVER,
            deadline: 0,
            lint: [false; 2],
            sent: None,
            events: Events {
                nmi: false,
                init: false,
                startup: None,
                smi: false,
                ext_int: false,
                eoi: None,
                priority: false,
            },
            has_events: false,
        }
    }

    /// Programs the APIC as firmware leaves that of the bootstrap CPU ("virtual wire"): enabled,
    /// the 8259 on LINT0, NMI on LINT1.
    pub fn virtual_wire(&mut self) {
        self.svr |= SVR_ENABLE;
        self.lvt[LINT0] = u32::from(EXT_INT) << 8;
        self.lvt[LINT1] = DELIVER_NMI;
    }

    /// The APIC id.
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// Access mode of the registers.
    #[inline]
    pub const fn mode(&self) -> Mode {
        match (self.base & BASE_ENABLE != 0, self.base & BASE_X2APIC != 0) {
            (false, _) => Mode::Disabled,
            (true, false) => Mode::XApic,
            (true, true) => Mode::X2Apic,
        }
    }

    /// True if the guest has enabled the APIC by software (SDM vol. 3, section 11.4.7.2). Otherwise
    /// it drops interrupts with a vector.
    #[inline]
    pub const fn is_software_enabled(&self) -> bool {
        self.svr & SVR_ENABLE != 0
    }

    /// Physical address of the xAPIC page.
    pub const fn base(&self) -> u64 {
        self.base & !0xfff
    }

    /// Task priority.
    pub const fn tpr(&self) -> u8 {
        self.tpr
    }

    /// Sets the task priority.
    pub fn set_tpr(&mut self, tpr: u8) {
        self.tpr = tpr;
    }

    /// CR8: the upper half of the task priority.
    #[inline]
    pub const fn cr8(&self) -> u8 {
        self.tpr >> 4
    }

    /// Sets the task priority from CR8.
    pub fn set_cr8(&mut self, cr8: u8) {
        self.tpr = cr8 << 4;
    }

    /// CPU priority: that of the task or of the interrupt in service (SDM vol. 3, section
    /// 11.8.3.1).
    #[inline]
    pub fn ppr(&self) -> u8 {
        let in_service = self.isr.highest().unwrap_or(0);
        if self.tpr >> 4 >= in_service >> 4 { self.tpr } else { in_service & 0xf0 }
    }

    /// Vector to inject now: the highest request, if it is above the CPU priority.
    #[inline]
    pub fn pending(&self) -> Option<u8> {
        let vector = self.irr.highest()?;
        (vector >> 4 > self.ppr() >> 4).then_some(vector)
    }

    /// True if a request is pending below the task priority only.
    #[inline]
    pub fn is_masked_by_priority(&self) -> bool {
        self.has_pending() && self.pending().is_none()
    }

    /// True if a request could be injected at the lowest task priority.
    #[inline]
    pub fn has_pending(&self) -> bool {
        let in_service = self.isr.highest().unwrap_or(0);
        self.irr.highest().is_some_and(|vector| vector >> 4 > in_service >> 4)
    }

    /// Acknowledges `vector`: moves it from requested to in service. A vector that is not requested
    /// changes nothing.
    #[inline]
    pub fn accept(&mut self, vector: u8) {
        if self.irr.has(vector) {
            self.irr.clear(vector);
            self.isr.set(vector);
        }
    }

    /// Sets the request offered as a virtual interrupt, which the CPU may take at any time, or
    /// withdraws the offer. The CPU has taken none so far.
    #[inline]
    pub fn set_offered(&mut self, vector: Option<u8>) {
        self.offered = vector;
        self.requested_again = false;
    }

    /// Acknowledges the offered request. A second request of the same vector may have arrived after
    /// the CPU took the first, and stays requested.
    pub fn accept_offered(&mut self, vector: u8) {
        self.accept(vector);
        if self.offered.take() == Some(vector) && core::mem::take(&mut self.requested_again) {
            self.irr.set(vector);
        }
    }

    /// Completes the interrupt in service. Returns the vector that the I/O APIC must be notified
    /// of.
    #[inline]
    pub fn eoi(&mut self) -> Option<u8> {
        let vector = self.isr.highest()?;
        self.isr.clear(vector);
        (self.tmr.has(vector) && self.svr & SVR_NO_BROADCAST == 0).then_some(vector)
    }

    /// True if the EOI of the interrupt in service has no further effect: the interrupt is
    /// edge-triggered and no request is pending. Then the guest may complete it in memory instead
    /// of exiting (PV EOI).
    #[inline]
    pub fn is_eoi_elidable(&self) -> bool {
        self.irr.filled == 0 && self.isr.highest().is_some_and(|vector| !self.tmr.has(vector))
    }

    /// True if the same will hold for `vector` once the CPU takes it: no other vector is requested
    /// or in service, so the next EOI is that of `vector`.
    #[inline]
    pub fn will_eoi_be_elidable(&self, vector: u8) -> bool {
        self.isr.filled == 0 && self.irr.is_only(vector) && !self.tmr.has(vector)
    }

    /// True if [`LocalApic::take_events`] would return an event.
    #[inline]
    pub const fn has_events(&self) -> bool {
        self.has_events
    }

    /// Takes the pending events. The board calls it after each write, delivery, LINT change and
    /// wake.
    pub fn take_events(&mut self) -> Events {
        self.has_events = false;
        core::mem::take(&mut self.events)
    }

    /// Takes the message of an interrupt command for other local APICs. A call of a method sends at
    /// most one.
    #[inline]
    pub fn take_message(&mut self) -> Option<InterruptMessage> {
        self.sent.take()
    }

    /// True if this APIC is a destination of `message`.
    #[inline]
    pub fn matches(&self, message: &InterruptMessage) -> bool {
        let destination = message.destination;
        match (self.mode(), message.logical) {
            (Mode::Disabled, _) => false,
            _ if destination == u32::MAX => true,
            (Mode::XApic, false) => destination == self.id & 0xff,
            (Mode::X2Apic, false) => destination == self.id,
            (_, true) => self.matches_logical(destination),
        }
    }

    /// True if this APIC is in the set of logical destinations `destination`.
    #[inline(never)]
    fn matches_logical(&self, destination: u32) -> bool {
        if self.mode() == Mode::X2Apic {
            let own = self.x2apic_ldr();
            return destination >> 16 == own >> 16 && destination & own & 0xffff != 0;
        }
        let (destination, own) = (destination as u8, (self.ldr >> 24) as u8);
        if self.dfr >> 28 == DFR_CLUSTER {
            let cluster = destination >> 4;
            (cluster == own >> 4 || cluster == 0xf) && destination & own & 0xf != 0
        } else {
            destination & own != 0
        }
    }

    /// Delivers `message` to this APIC. `true`: a new event is pending for the CPU.
    #[inline]
    pub fn deliver(&mut self, message: &InterruptMessage) -> bool {
        if self.mode() == Mode::Disabled {
            return false;
        }
        match message.delivery {
            FIXED | LOWEST => {
                return self.is_software_enabled() && self.request(message.vector, message.level);
            }
            STARTUP => self.events.startup = Some(message.vector),
            mode => return self.signal(mode),
        }
        self.has_events = true;
        true
    }

    /// Sets the level of pin LINT0 (0) or LINT1 (1). For a pin in mode ExtINT the board queries the
    /// 8259 itself ([`LocalApic::accepts_pic`]).
    pub fn set_lint(&mut self, pin: u8, level: bool) {
        let Some(was) = self.lint.get_mut(usize::from(pin)) else { return };
        let risen = level && !*was;
        *was = level;
        if risen {
            self.fire(LINT0 + usize::from(pin));
        }
    }

    /// True if an interrupt of the 8259 reaches the CPU: through LINT0, or past a disabled APIC.
    #[inline]
    pub fn accepts_pic(&self) -> bool {
        let entry = self.lvt[LINT0];
        let through = entry & LVT_MASKED == 0 && entry & LVT_DELIVERY == u32::from(EXT_INT) << 8;
        through || self.base & BASE_ENABLE == 0
    }

    /// Handles INIT: restores the power-on state, except for the id and the base MSR.
    pub fn init(&mut self, env: &mut dyn Env) {
        *self = Self {
            reserved_base: self.reserved_base,
            tsc: self.tsc,
            base: self.base,
            lint: self.lint,
            ..Self::new(Config {
                id: self.id,
                bsp: false,
                tsc_khz: 0,
                tsc_at_zero: self.tsc_at_zero as u64,
                physical_bits: 0,
            })
        };
        env.arm(0, NEVER);
    }

    /// Requests `vector`. `true`: it is a new request, or the CPU may have taken the offered one.
    #[inline]
    fn request(&mut self, vector: u8, level: bool) -> bool {
        if vector < FIRST_VECTOR {
            self.error(ESR_RECEIVE_VECTOR);
            return true;
        }
        if level {
            self.tmr.set(vector);
        } else {
            self.tmr.clear(vector);
        }
        if self.irr.has(vector) {
            self.requested_again |= self.offered == Some(vector);
            return self.requested_again;
        }
        self.irr.set(vector);
        true
    }

    /// Receives an interrupt without a vector.
    fn signal(&mut self, delivery: u8) -> bool {
        match delivery {
            NMI => self.events.nmi = true,
            SMI => self.events.smi = true,
            INIT => self.events.init = true,
            EXT_INT => self.events.ext_int = true,
            _ => return false,
        }
        self.has_events = true;
        true
    }

    fn error(&mut self, error: u32) {
        self.errors |= error;
        let entry = self.lvt[ERROR];
        if entry & LVT_MASKED == 0 {
            let vector = entry as u8;
            if vector < FIRST_VECTOR {
                // An illegal error vector adds an error, which must not raise another one.
                self.errors |= ESR_RECEIVE_VECTOR;
            } else {
                self.request(vector, false);
            }
        }
    }

    /// Delivers the local interrupt `index`.
    fn fire(&mut self, index: usize) {
        let entry = self.lvt[index];
        if entry & LVT_MASKED != 0 {
            return;
        }
        match (entry >> 8 & 7) as u8 {
            FIXED => {
                self.request(entry as u8, false);
            }
            // The board queries the 8259 itself.
            EXT_INT => {}
            mode => {
                self.signal(mode);
            }
        }
    }

    fn send_to_self(&mut self, vector: u8) {
        if vector < FIRST_VECTOR {
            self.error(ESR_SEND_VECTOR);
        } else if self.is_software_enabled() {
            self.request(vector, false);
        }
    }

    /// Executes the interrupt command in `icr_low` for `destination`.
    fn command(&mut self, destination: u32, env: &mut dyn Env) {
        let low = self.icr_low;
        let (vector, delivery) = (low as u8, (low >> 8 & 7) as u8);
        let with_vector = matches!(delivery, FIXED | LOWEST);
        if with_vector && vector < FIRST_VECTOR {
            return self.error(ESR_SEND_VECTOR);
        }
        match delivery {
            FIXED | LOWEST | SMI | NMI | STARTUP => {}
            // The de-assertion, of a level, synchronises arbitration ids, which are not modelled.
            INIT if low & (ICR_ASSERT | ICR_LEVEL) == ICR_LEVEL => return,
            INIT => {}
            _ => return env.missing("local APIC: delivery mode", low.into()),
        }
        let logical = low & ICR_LOGICAL != 0;
        let message = InterruptMessage { destination, logical, delivery, vector, level: false };
        let broadcast = InterruptMessage { destination: u32::MAX, logical: false, ..message };
        match low >> 18 & 3 {
            SHORTHAND_NONE => {
                // An APIC that is disabled by software takes no part in the arbitration.
                let takes_part = delivery != LOWEST || self.is_software_enabled();
                let own = self.matches(&message) && takes_part;
                if own {
                    self.deliver(&message);
                }
                // One receiver suffices for lowest priority; the own id has no other receiver.
                let only = delivery == LOWEST || !logical && destination != u32::MAX;
                if !(own && only) {
                    self.sent = Some(message);
                }
            }
            SHORTHAND_SELF if with_vector => self.send_to_self(vector),
            SHORTHAND_SELF => env.missing("local APIC: self shorthand without vector", low.into()),
            SHORTHAND_ALL => {
                self.deliver(&broadcast);
                self.sent = Some(broadcast);
            }
            _ => self.sent = Some(broadcast),
        }
    }
}

impl Device for LocalApic {
    fn read(&mut self, access: Access, env: &mut dyn Env) -> u64 {
        if self.mode() != Mode::XApic || access.offset >= LEN {
            return access.open_bus();
        }
        // Registers are 32 bits wide, 16 bytes apart; the bytes between read as zero.
        if access.offset & 0xf != 0 {
            return 0;
        }
        let register = access.offset as u32;
        match self.read_register(register, env) {
            Some(value) => value.into(),
            None => {
                if register >= EXTENDED {
                    env.missing("local APIC: extended register", register.into());
                }
                self.error(ESR_REGISTER);
                0
            }
        }
    }

    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        if self.mode() != Mode::XApic || access.offset >= LEN || access.offset & 0xf != 0 {
            return;
        }
        let register = access.offset as u32;
        if register >= EXTENDED {
            env.missing("local APIC: extended register", register.into());
        }
        self.write_register(register, value as u32, env);
    }

    fn wake(&mut self, timer: u8, env: &mut dyn Env) {
        if timer != 0 {
            return;
        }
        if self.lvt[TIMER] & TIMER_MODE != TIMER_TSC_DEADLINE {
            self.expire_count(env);
        } else if self.deadline != 0 {
            let ticks = i128::from(self.deadline) - i128::from(self.tsc_at_zero);
            if i128::from(self.tsc.in_nanos(env.now())) >= ticks {
                self.deadline = 0;
                self.fire(TIMER);
            } else {
                self.arm_deadline(env);
            }
        }
    }

    fn reset(&mut self, env: &mut dyn Env) {
        self.init(env);
        self.base = self.base & BASE_BSP | BASE_ADDRESS | BASE_ENABLE;
    }
}
