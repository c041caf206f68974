//! ACPI power management registers.
//!
//! State: status and enable of the PM1a event and GPE0 blocks, PM1a control.
//! Features: PM timer (32 bits, derived from time) with its overflow event, power button, soft-off
//! (S5), 16 general-purpose events, SCI (line 0, level). The VM is always in ACPI mode: `SCI_EN` is
//! set and there is no SMI command port (`SMI_CMD` is 0 in the FADT). The enable bits of the RTC
//! and global lock events are stored, since kernels read them back; the events never occur: the RTC
//! does not wake the VM, and no firmware shares the lock.
//! Missing (reported): sleep states other than S5, bus master and RTC events, sleep button.
//! Documentation: ACPI 6.5, sections 4.8.2, 4.8.3 and 4.8.4.

use vmm_bus::{Access, Device, Env, MachineEvent, NEVER, Ticks};

/// Registers. Offsets are from the start of the block.
pub mod spec {
    /// PM1a event block: status (RW1C), then enable (RW), two bytes each.
    pub const PM1_EVENT: u64 = 0;
    /// PM1a control block (RW).
    pub const PM1_CONTROL: u64 = 4;
    /// PM timer (RO), 32 bits: set `TMR_VAL_EXT` in the FADT.
    pub const TIMER: u64 = 8;
    /// GPE0 block: status (RW1C), then enable (RW), two bytes each.
    pub const GPE0: u64 = 12;
    /// Bytes of all blocks.
    pub const LEN: u64 = 16;

    /// Event: the highest bit of the timer has changed.
    pub const TMR: u16 = 1 << 0;
    /// Event: firmware has released the global lock, which it never holds.
    pub const GBL: u16 = 1 << 5;
    /// Event: the power button was pressed.
    pub const PWRBTN: u16 = 1 << 8;
    /// Event: the RTC's alarm, which can be enabled but never occurs.
    pub const RTC: u16 = 1 << 10;
    /// The events that can be enabled.
    pub const EVENTS: u16 = TMR | GBL | PWRBTN | RTC;

    /// Control: ACPI mode.
    pub const SCI_EN: u16 = 1 << 0;
    /// Control: sleep type, bits 10..=12.
    pub const SLP_TYP_SHIFT: u32 = 10;
    /// Control: go to sleep (WO).
    pub const SLP_EN: u16 = 1 << 13;
    /// Sleep type of soft-off: the `\_S5` package must hold this number.
    pub const SLP_TYP_S5: u16 = 5;

    /// Clock of the PM timer.
    pub const HZ: u64 = 3_579_545;
    /// The overflow event occurs when this bit changes.
    pub const TIMER_TOP_BIT: u32 = 31;
}
use spec::*;

const CLOCK: Ticks = Ticks::new(HZ);
/// Bits of PM1 control that are stored: bus master reload and the sleep type.
const CONTROL_STORED: u16 = 1 << 1 | 7 << SLP_TYP_SHIFT;

/// The power management block: 16 bytes of registers (see [`spec`]); line 0 is the SCI.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AcpiPm {
    status: u16,
    enable: u16,
    control: u16,
    gpe_status: u16,
    gpe_enable: u16,
    /// Half periods of the timer already reported as overflow events.
    halves: u64,
}

impl AcpiPm {
    /// Creates the block in its power-on state, in ACPI mode.
    pub const fn new() -> Self {
        Self { status: 0, enable: 0, control: 0, gpe_status: 0, gpe_enable: 0, halves: 0 }
    }

    /// Presses the power button: the guest sees the event and is expected to shut down.
    pub fn press_power_button(&mut self, env: &mut dyn Env) {
        self.status |= PWRBTN;
        self.update(env);
    }

    /// Raises general-purpose event `n`, 0 to 15; other events do not exist.
    pub fn raise_gpe(&mut self, n: u8, env: &mut dyn Env) {
        self.gpe_status |= 1_u16.checked_shl(n.into()).unwrap_or(0);
        self.update(env);
    }

    fn ticks(env: &dyn Env) -> u64 {
        CLOCK.in_nanos(env.now())
    }

    /// Records a timer overflow since the last call.
    fn refresh(&mut self, env: &dyn Env) {
        let halves = Self::ticks(env) >> TIMER_TOP_BIT;
        if halves != self.halves {
            self.halves = halves;
            self.status |= TMR;
        }
    }

    fn update(&self, env: &mut dyn Env) {
        let pending = self.status & self.enable | self.gpe_status & self.gpe_enable;
        env.set_line(0, pending != 0);
        let wanted = self.enable & TMR != 0 && self.status & TMR == 0;
        env.arm(0, if wanted { CLOCK.nanos((self.halves + 1) << TIMER_TOP_BIT) } else { NEVER });
    }

    fn write_byte(&mut self, offset: u64, value: u8, env: &mut dyn Env) {
        // The register has 16 bits; `value` is its low or its high byte.
        let high = offset & 1 != 0;
        let wide = u16::from(value) << if high { 8 } else { 0 };
        let keep = if high { 0x00ff } else { 0xff00 };
        match offset & !1 {
            PM1_EVENT => self.status &= !wide,
            2 => self.enable = (self.enable & keep | wide) & EVENTS,
            PM1_CONTROL => {
                self.control = (self.control & keep | wide) & CONTROL_STORED;
                if wide & SLP_EN != 0 {
                    match self.control >> SLP_TYP_SHIFT & 7 {
                        SLP_TYP_S5 => env.machine(MachineEvent::PowerOff),
                        other => env.missing("ACPI: sleep state", other.into()),
                    }
                }
            }
            GPE0 => self.gpe_status &= !wide,
            14 => self.gpe_enable = self.gpe_enable & keep | wide,
            _ => {}
        }
    }
}

impl Device for AcpiPm {
    fn read(&mut self, access: Access, env: &mut dyn Env) -> u64 {
        if access.offset & !3 == TIMER {
            return Self::ticks(env) >> (8 * (access.offset & 3)) & access.open_bus();
        }
        self.refresh(env);
        let events = u64::from(self.enable) << 16 | u64::from(self.status);
        let gpes = u64::from(self.gpe_enable) << 16 | u64::from(self.gpe_status);
        let word = match access.offset & !3 {
            PM1_EVENT => events,
            PM1_CONTROL => (self.control | SCI_EN).into(),
            GPE0 => gpes,
            _ => return access.open_bus(),
        };
        word >> (8 * (access.offset & 3)) & access.open_bus()
    }

    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        self.refresh(env);
        for i in 0..access.size.min(8) {
            let offset = access.offset.saturating_add(i.into());
            self.write_byte(offset, (value >> (8 * i)) as u8, env);
        }
        self.update(env);
    }

    fn wake(&mut self, timer: u8, env: &mut dyn Env) {
        if timer == 0 {
            self.refresh(env);
            self.update(env);
        }
    }

    fn reset(&mut self, env: &mut dyn Env) {
        *self = Self { halves: Self::ticks(env) >> TIMER_TOP_BIT, ..Self::new() };
        self.update(env);
    }
}
