//! Access to the registers, by offset and by MSR.

use vmm_bus::{Env, NEVER};

use super::spec::*;
use super::{Fault, LINT0, LINT1, LocalApic, Mode, TIMER};
use crate::apic::message::widen;

impl LocalApic {
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

    pub(super) fn write_x2apic(
        &mut self,
        register: u32,
        value: u64,
        env: &mut dyn Env,
    ) -> Result<(), Fault> {
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

    pub(super) fn write_base(&mut self, value: u64, env: &mut dyn Env) -> Result<(), Fault> {
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
    pub(super) const fn x2apic_ldr(&self) -> u32 {
        (self.id >> 4) << 16 | 1 << (self.id & 0xf)
    }

    /// Reads a register that is the same in both modes; `None` if it does not exist.
    pub(super) fn read_register(&self, register: u32, env: &dyn Env) -> Option<u32> {
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
    pub(super) fn write_register(&mut self, register: u32, value: u32, env: &mut dyn Env) {
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
                if !self.is_software_enabled() {
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

    pub(super) fn write_lvt(&mut self, index: usize, value: u32, env: &mut dyn Env) {
        let disabled = if !self.is_software_enabled() { LVT_MASKED } else { 0 };
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
    pub(super) fn apr(&self) -> u8 {
        let requested = self.irr.highest().unwrap_or(0) >> 4;
        let in_service = self.isr.highest().unwrap_or(0) >> 4;
        let task = self.tpr >> 4;
        if task >= requested && task > in_service {
            self.tpr
        } else {
            (task & in_service).max(requested) << 4
        }
    }
}

/// Index of the LVT entry at `register`, which is one of [`LVT_TIMER`]`..=`[`LVT_ERROR`].
const fn lvt_index(register: u32) -> usize {
    ((register - LVT_TIMER) >> 4) as usize
}
