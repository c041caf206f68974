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
use super::message::widen;
use vmm_bus::{Access, Device, Env, NEVER, Nanos, Ticks};

/// Registers beyond those that [`hw_x86::apic::local`] names, by xAPIC offset.
pub mod spec {
    pub use hw_x86::apic::local::*;
    pub use hw_x86::msr::{APIC_BASE, TSC_DEADLINE, X2APIC};

    /// Last MSR of the x2APIC range.
    pub const X2APIC_LAST: u32 = X2APIC + 0xff;
    /// Arbitration priority (RO, xAPIC only).
    pub const APR: u32 = 0x90;
    /// Processor priority (RO).
    pub const PPR: u32 = 0xa0;
    /// Remote read (RO, xAPIC only).
    pub const RRR: u32 = 0xc0;
    /// Self-IPI (WO, x2APIC only).
    pub const SELF_IPI: u32 = 0x3f0;
    /// First of AMD's extended registers.
    pub const EXTENDED: u32 = 0x400;
    /// Bytes of the xAPIC page.
    pub const LEN: u64 = 0x1000;

    /// Version register: integrated APIC, six LVT entries, EOI broadcast can be suppressed.
    pub const VERSION_VALUE: u32 = 0x14 | 5 << 16 | 1 << 24;
    /// Bus clock of the timer before the divider.
    pub const BUS_HZ: u64 = 1_000_000_000;
    /// Minimum distance of periodic expiries, in nanoseconds.
    pub const SHORTEST_PERIOD: u64 = 50_000;

    /// [`SVR`]: no EOI broadcast.
    pub const SVR_NO_BROADCAST: u32 = 1 << 12;
    /// [`SVR`]: implemented bits.
    pub const SVR_MASK: u32 = 0xff | SVR_ENABLE | SVR_NO_BROADCAST;
    /// [`DFR`]: bits that read as one.
    pub const DFR_ONES: u32 = 0x0fff_ffff;
    /// [`DFR`], bits 31:28: cluster model.
    pub const DFR_CLUSTER: u32 = 0;

    /// [`ESR`]: send of a vector below 16.
    pub const ESR_SEND_VECTOR: u32 = 1 << 5;
    /// [`ESR`]: receipt of a vector below 16.
    pub const ESR_RECEIVE_VECTOR: u32 = 1 << 6;
    /// [`ESR`]: access to an unimplemented register.
    pub const ESR_REGISTER: u32 = 1 << 7;

    /// Delivery mode: fixed.
    pub const FIXED: u8 = 0;
    /// Delivery mode: lowest priority.
    pub const LOWEST: u8 = 1;
    /// Delivery mode: system management.
    pub const SMI: u8 = 2;
    /// Delivery mode: non-maskable.
    pub const NMI: u8 = 4;
    /// Delivery mode: INIT.
    pub const INIT: u8 = 5;
    /// Delivery mode: start-up.
    pub const STARTUP: u8 = 6;
    /// Delivery mode: the 8259 provides the vector.
    pub const EXT_INT: u8 = 7;

    /// [`ICR_LOW`]: stored bits.
    pub const ICR_MASK: u32 = 0x000c_cfff;
    /// [`ICR_LOW`], bits 19:18: no shorthand.
    pub const SHORTHAND_NONE: u32 = 0;
    /// Shorthand: self.
    pub const SHORTHAND_SELF: u32 = 1;
    /// Shorthand: all including self.
    pub const SHORTHAND_ALL: u32 = 2;

    /// [`LVT_TIMER`]: bits of the mode.
    pub const TIMER_MODE: u32 = 3 << 17;
    /// [`TIMER_DIVIDE`]: implemented bits.
    pub const DIVIDE_MASK: u32 = 0b1011;
    /// Local vector table: bits of the delivery mode.
    pub const LVT_DELIVERY: u32 = 7 << 8;
    /// Local vector table: level-triggered (LINT pins).
    pub const LVT_LEVEL: u32 = 1 << 15;
    /// Read-only bits of the LVT: delivery status, remote IRR.
    pub const LVT_READ_ONLY: u32 = 1 << 12 | 1 << 14;
    /// Writable bits of the entries from [`LVT_TIMER`] on.
    pub const LVT_WRITABLE: [u32; 6] = [
        0xff | LVT_MASKED | TIMER_MODE,
        0xff | LVT_MASKED | LVT_DELIVERY,
        0xff | LVT_MASKED | LVT_DELIVERY,
        0xff | LVT_MASKED | LVT_DELIVERY | LVT_LEVEL | 1 << 13,
        0xff | LVT_MASKED | LVT_DELIVERY | LVT_LEVEL | 1 << 13,
        0xff | LVT_MASKED,
    ];

    /// [`APIC_BASE`]: this is the bootstrap CPU (RO here).
    pub const BASE_BSP: u64 = 1 << 8;
    /// [`APIC_BASE`]: x2APIC mode.
    pub const BASE_X2APIC: u64 = 1 << 10;
    /// [`APIC_BASE`]: enabled.
    pub const BASE_ENABLE: u64 = 1 << 11;
    /// [`APIC_BASE`] after reset, without the mode.
    pub const BASE_ADDRESS: u64 = 0xfee0_0000;
}
use spec::*;

const TIMER: usize = 0;
const LINT0: usize = 3;
const LINT1: usize = 4;
const ERROR: usize = 5;
/// Lower vectors are reserved for exceptions and illegal in interrupts.
const FIRST_VECTOR: u8 = 16;

/// A set of vectors, with a summary bit for each non-empty word.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Vectors {
    words: [u32; 8],
    filled: u8,
}

impl Vectors {
    #[inline]
    fn set(&mut self, vector: u8) {
        let word = vector >> 5;
        self.words[usize::from(word)] |= 1 << (vector & 31);
        self.filled |= 1 << word;
    }

    #[inline]
    fn clear(&mut self, vector: u8) {
        let word = vector >> 5;
        self.words[usize::from(word)] &= !(1 << (vector & 31));
        if self.words[usize::from(word)] == 0 {
            self.filled &= !(1 << word);
        }
    }

    #[inline]
    fn has(&self, vector: u8) -> bool {
        self.words[usize::from(vector >> 5)] & 1 << (vector & 31) != 0
    }

    /// True if `vector` is the only member of the set.
    #[inline]
    fn is_only(&self, vector: u8) -> bool {
        let word = vector >> 5;
        self.filled == 1 << word && self.words[usize::from(word)] == 1 << (vector & 31)
    }

    #[inline]
    fn highest(&self) -> Option<u8> {
        let word = self.filled.checked_ilog2()?;
        let bit = self.words[word as usize & 7].checked_ilog2()?;
        Some((word * 32 + bit) as u8)
    }
}

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
            isr: Vectors { words: [0; 8], filled: 0 },
            tmr: Vectors { words: [0; 8], filled: 0 },
            irr: Vectors { words: [0; 8], filled: 0 },
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
    pub fn matches(&self, message: &InterruptMessage) -> bool {
        let destination = message.destination;
        match (self.mode(), message.logical) {
            (Mode::Disabled, _) => false,
            _ if destination == u32::MAX => true,
            (Mode::XApic, false) => destination == self.id & 0xff,
            (Mode::X2Apic, false) => destination == self.id,
            (Mode::XApic, true) => {
                let (destination, own) = (destination as u8, (self.ldr >> 24) as u8);
                if self.dfr >> 28 == DFR_CLUSTER {
                    let cluster = destination >> 4;
                    (cluster == own >> 4 || cluster == 0xf) && destination & own & 0xf != 0
                } else {
                    destination & own != 0
                }
            }
            (Mode::X2Apic, true) => {
                let own = self.x2apic_ldr();
                destination >> 16 == own >> 16 && destination & own & 0xffff != 0
            }
        }
    }

    /// Delivers `message` to this APIC. `true`: a new event is pending for the CPU.
    pub fn deliver(&mut self, message: &InterruptMessage) -> bool {
        if self.mode() == Mode::Disabled {
            return false;
        }
        match message.delivery {
            FIXED | LOWEST => {
                return self.svr & SVR_ENABLE != 0 && self.request(message.vector, message.level);
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

    /// Reports that the guest has set its TSC to `tsc`.
    pub fn sync_tsc(&mut self, tsc: u64, env: &mut dyn Env) {
        self.tsc_at_zero = tsc.wrapping_sub(self.tsc.in_nanos(env.now())) as i64;
        if self.deadline != 0 {
            self.arm_deadline(env);
        }
    }

    /// Writes the TSC deadline; ignored in other timer modes (SDM vol. 3, section 11.5.4.1).
    #[inline]
    pub fn set_tsc_deadline(&mut self, deadline: u64, env: &mut dyn Env) {
        if self.lvt[TIMER] & TIMER_MODE != TIMER_TSC_DEADLINE {
            return;
        }
        let was_armed = self.deadline != 0;
        self.deadline = deadline;
        if deadline != 0 {
            self.arm_deadline(env);
        } else if was_armed {
            env.arm(0, NEVER);
        }
    }

    /// Reads an MSR of this APIC: base, TSC deadline or an x2APIC register.
    ///
    /// # Errors
    /// If the MSR does not exist (in this mode) or cannot be read.
    pub fn read_msr(&self, index: u32, env: &dyn Env) -> Result<u64, Fault> {
        match index {
            APIC_BASE => Ok(self.base),
            TSC_DEADLINE => Ok(self.deadline),
            X2APIC..=X2APIC_LAST if self.mode() == Mode::X2Apic => {
                let register = (index - X2APIC) << 4;
                match register {
                    ICR_LOW => Ok(u64::from(self.icr_high) << 32 | u64::from(self.icr_low)),
                    ID => Ok(self.id.into()),
                    LDR => Ok(self.x2apic_ldr().into()),
                    DFR | APR | RRR | EOI | ICR_HIGH => Err(Fault),
                    _ => self.read_register(register, env).map(u64::from).ok_or(Fault),
                }
            }
            _ => Err(Fault),
        }
    }

    /// Writes an MSR of this APIC.
    ///
    /// # Errors
    /// If the MSR does not exist (in this mode), cannot be written, the value has reserved bits, or
    /// the base selects a mode that cannot follow the current one (SDM vol. 3, section 11.12.5).
    pub fn write_msr(&mut self, index: u32, value: u64, env: &mut dyn Env) -> Result<(), Fault> {
        match index {
            TSC_DEADLINE => {
                self.set_tsc_deadline(value, env);
                Ok(())
            }
            X2APIC..=X2APIC_LAST if self.mode() == Mode::X2Apic => {
                self.write_x2apic((index - X2APIC) << 4, value, env)
            }
            APIC_BASE => self.write_base(value, env),
            _ => Err(Fault),
        }
    }

    fn write_x2apic(&mut self, register: u32, value: u64, env: &mut dyn Env) -> Result<(), Fault> {
        if register == ICR_LOW {
            if value as u32 & !(ICR_MASK | ICR_PENDING) != 0 {
                return Err(Fault);
            }
            self.icr_low = value as u32 & ICR_MASK;
            self.icr_high = (value >> 32) as u32;
            self.command(self.icr_high, env);
            return Ok(());
        }
        let writable = match register {
            EOI | ESR => 0,
            TPR | SELF_IPI => 0xff,
            SVR => SVR_MASK,
            // Read-only bits may be written, with no effect: Linux writes back what it read.
            LVT_TIMER..=LVT_ERROR => LVT_WRITABLE[lvt_index(register)] | LVT_READ_ONLY,
            TIMER_INITIAL => u32::MAX,
            TIMER_DIVIDE => DIVIDE_MASK,
            _ => return Err(Fault),
        };
        if value & !u64::from(writable) != 0 {
            return Err(Fault);
        }
        if register == SELF_IPI {
            self.send_to_self(value as u8);
        } else {
            self.write_register(register, value as u32, env);
        }
        Ok(())
    }

    fn write_base(&mut self, value: u64, env: &mut dyn Env) -> Result<(), Fault> {
        if value & self.reserved_base != 0 {
            return Err(Fault);
        }
        let mode = value & (BASE_ENABLE | BASE_X2APIC);
        match (self.mode(), mode) {
            (_, BASE_X2APIC) => return Err(Fault),
            (Mode::Disabled, mode) if mode & BASE_X2APIC != 0 => return Err(Fault),
            (Mode::X2Apic, BASE_ENABLE) => return Err(Fault),
            _ => {}
        }
        let disabled = self.mode() != Mode::Disabled && mode == 0;
        let entered = self.mode() == Mode::XApic && mode & BASE_X2APIC != 0;
        self.base = value & !BASE_BSP | self.base & BASE_BSP;
        if disabled {
            self.init(env);
        } else if entered {
            self.icr_high = 0;
        }
        Ok(())
    }

    /// Logical id in x2APIC mode (SDM vol. 3, section 11.12.10.2): cluster and one bit.
    const fn x2apic_ldr(&self) -> u32 {
        (self.id >> 4) << 16 | 1 << (self.id & 0xf)
    }

    /// Reads a register that is the same in both modes; `None` if it does not exist.
    fn read_register(&self, register: u32, env: &dyn Env) -> Option<u32> {
        let word = (register >> 4 & 7) as usize;
        Some(match register {
            ID => self.id << 24,
            VERSION => VERSION_VALUE,
            TPR => self.tpr.into(),
            APR => self.apr().into(),
            PPR => self.ppr().into(),
            EOI | RRR => 0,
            LDR => self.ldr,
            DFR => self.dfr,
            SVR => self.svr,
            ISR..TMR => self.isr.words[word],
            TMR..IRR => self.tmr.words[word],
            IRR..ESR => self.irr.words[word],
            ESR => self.esr,
            ICR_LOW => self.icr_low,
            ICR_HIGH => self.icr_high,
            LVT_TIMER..=LVT_ERROR => self.lvt[lvt_index(register)],
            TIMER_INITIAL => self.initial,
            TIMER_CURRENT => self.current_count(env.now()),
            TIMER_DIVIDE => self.divide,
            _ => return None,
        })
    }

    /// Writes a register that is the same in both modes.
    fn write_register(&mut self, register: u32, value: u32, env: &mut dyn Env) {
        match register {
            EOI => {
                if let Some(vector) = self.eoi() {
                    self.events.eoi = Some(vector);
                    self.has_events = true;
                }
            }
            TPR => {
                self.tpr = value as u8;
                self.events.priority = true;
                self.has_events = true;
            }
            LDR => self.ldr = value & 0xff00_0000,
            DFR => self.dfr = value | DFR_ONES,
            SVR => {
                self.svr = value & SVR_MASK;
                if self.svr & SVR_ENABLE == 0 {
                    self.lvt.iter_mut().for_each(|entry| *entry |= LVT_MASKED);
                }
            }
            ESR => self.esr = core::mem::take(&mut self.errors),
            ICR_LOW => {
                self.icr_low = value & ICR_MASK;
                let destination = (self.icr_high >> 24) as u8;
                self.command(widen(destination, value & ICR_LOGICAL != 0), env);
            }
            ICR_HIGH => self.icr_high = value & 0xff00_0000,
            LVT_TIMER..=LVT_ERROR => self.write_lvt(lvt_index(register), value, env),
            // No effect while the timer waits for a deadline (SDM vol. 3, section 11.5.4.1).
            TIMER_INITIAL if self.lvt[TIMER] & TIMER_MODE == TIMER_TSC_DEADLINE => {}
            TIMER_INITIAL => {
                self.initial = value;
                self.start_count(value, env);
            }
            TIMER_DIVIDE => {
                let left = self.current_count(env.now());
                self.divide = value & DIVIDE_MASK;
                if left != 0 {
                    self.start_count(left, env);
                }
            }
            ID => env.missing("local APIC: change of the id", value.into()),
            VERSION | APR | PPR | RRR | ISR..ESR | TIMER_CURRENT => {}
            _ => self.error(ESR_REGISTER),
        }
    }

    fn write_lvt(&mut self, index: usize, value: u32, env: &mut dyn Env) {
        let disabled = if self.svr & SVR_ENABLE == 0 { LVT_MASKED } else { 0 };
        let old = self.lvt[index];
        let new = value & LVT_WRITABLE[index] | disabled;
        self.lvt[index] = new;
        let deadline_mode = |entry| entry & TIMER_MODE == TIMER_TSC_DEADLINE;
        if index == TIMER && deadline_mode(old) != deadline_mode(new) {
            self.deadline = 0;
            self.expiry = NEVER;
            env.arm(0, NEVER);
        }
        let pin_interrupts = new & (LVT_MASKED | LVT_DELIVERY) == 0;
        if matches!(index, LINT0 | LINT1) && new & LVT_LEVEL != 0 && pin_interrupts {
            env.missing("local APIC: level-triggered LINT pin", new.into());
        }
    }

    /// Arbitration priority (SDM vol. 3, section 11.7.2).
    fn apr(&self) -> u8 {
        let requested = self.irr.highest().unwrap_or(0) >> 4;
        let in_service = self.isr.highest().unwrap_or(0) >> 4;
        let task = self.tpr >> 4;
        if task >= requested && task > in_service {
            self.tpr
        } else {
            (task & in_service).max(requested) << 4
        }
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
        } else if self.svr & SVR_ENABLE != 0 {
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
            // The de-assertion only synchronises arbitration ids, which are not modelled.
            INIT if low & ICR_ASSERT == 0 => return,
            INIT => {}
            _ => return env.missing("local APIC: delivery mode", low.into()),
        }
        let logical = low & ICR_LOGICAL != 0;
        let message = InterruptMessage { destination, logical, delivery, vector, level: false };
        let broadcast = InterruptMessage { destination: u32::MAX, logical: false, ..message };
        match low >> 18 & 3 {
            SHORTHAND_NONE => {
                let own = self.matches(&message);
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

    fn arm_deadline(&self, env: &mut dyn Env) {
        let ticks = i128::from(self.deadline) - i128::from(self.tsc_at_zero);
        // A deadline before VM time 0 has passed; one beyond the clock never passes.
        env.arm(0, self.tsc.nanos(u64::try_from(ticks.max(0)).unwrap_or(u64::MAX)));
    }

    /// Bus cycles (nanoseconds) per count (SDM vol. 3, figure 11-10).
    fn divider(&self) -> u64 {
        let code = self.divide & 3 | self.divide >> 1 & 4;
        1 << ((code + 1) & 7)
    }

    fn periodic(&self) -> bool {
        self.lvt[TIMER] & TIMER_MODE == TIMER_PERIODIC
    }

    /// Starts the count-down from `count`; 0 stops the timer.
    fn start_count(&mut self, count: u32, env: &mut dyn Env) {
        if self.lvt[TIMER] & TIMER_MODE == TIMER_TSC_DEADLINE {
            return;
        }
        self.expiry = if count == 0 {
            NEVER
        } else {
            env.now().saturating_add(u64::from(count) * self.divider())
        };
        env.arm(0, self.expiry);
    }

    fn current_count(&self, now: Nanos) -> u32 {
        if self.expiry == NEVER {
            return 0;
        }
        let mut left = self.expiry.saturating_sub(now);
        let period = u64::from(self.initial) * self.divider();
        if self.periodic() && period != 0 {
            // The expiry may be several periods ahead, or past if the host is late.
            let over = now.saturating_sub(self.expiry) % period;
            left = if over != 0 { period - over } else { left % period };
            left = if left == 0 { period } else { left };
        }
        u32::try_from(left.div_ceil(self.divider())).unwrap_or(u32::MAX)
    }

    fn expire_count(&mut self, env: &mut dyn Env) {
        let now = env.now();
        if self.expiry == NEVER || now < self.expiry {
            return env.arm(0, self.expiry);
        }
        self.fire(TIMER);
        let period = u64::from(self.initial) * self.divider();
        if self.periodic() && period != 0 {
            let late = now.saturating_add(SHORTEST_PERIOD) - self.expiry;
            let periods = late / period + 1;
            self.expiry = self.expiry.saturating_add(periods.saturating_mul(period));
            env.arm(0, self.expiry);
        } else {
            self.expiry = NEVER;
        }
    }
}

/// Index of the LVT entry at `register`, which is one of [`LVT_TIMER`]`..=`[`LVT_ERROR`].
const fn lvt_index(register: u32) -> usize {
    ((register - LVT_TIMER) >> 4) as usize
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
