//! Control registers of a guest with a vTLB: its own values, and those that the processor runs it
//! with. The processor always pages with write protection, in the format of the shadow tables.

use core::cell::Cell;

use abi::vcpu::x86::VcpuState;
use hw_x86::msr::efer;
use hw_x86::paging::{cr0, cr4, entry};
use hw_x86::vmcb::{ControlArea, SaveArea, Vmcb, intercept_cr, intercept_exceptions, intercept3};
use kernel_core::vtlb::defects::breaks;

/// Bits of CR0 that the guest changes without an exit (APM vol. 2 §15.9).
const FREE: u64 = cr0::TS | cr0::MP;
/// Bits of CR0 that the guest sees only: its memory is cached.
const SEEN: u64 = cr0::CD | cr0::NW;
/// Bits of CR0 that are set always.
const FORCED: u64 = cr0::PG | cr0::WP;

/// Values of the guest's control registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Registers {
    /// CR0.
    pub cr0: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// EFER, without SVME.
    pub efer: u64,
}

/// Mode of the guest's paging.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// It does not.
    Off,
    /// Three-level tables (PAE).
    Pae,
    /// Four-level tables (long mode).
    Long,
    /// Two-level tables, which are not supported.
    TwoLevel,
}

impl Registers {
    /// Values in the save area, as a VMM has written them.
    pub fn written(save: &SaveArea) -> Self {
        Self {
            cr0: save.cr0.get(),
            cr3: save.cr3.get(),
            cr4: save.cr4.get(),
            efer: save.efer.get() & !efer::SVME,
        }
    }

    /// Copies them to the state page.
    pub fn show(&self, state: &VcpuState) {
        state.cr0.set(self.cr0);
        state.cr3.set(self.cr3);
        state.cr4.set(self.cr4);
        state.efer.set(self.efer);
    }

    /// Returns the mode of paging.
    pub fn mode(&self) -> Mode {
        if self.cr0 & cr0::PG == 0 {
            Mode::Off
        } else if self.efer & efer::LMA != 0 {
            Mode::Long
        } else if self.cr4 & cr4::PAE != 0 {
            Mode::Pae
        } else {
            Mode::TwoLevel
        }
    }

    /// Values that all translations depend on: a change drops them. Other bits of CR4 are included,
    /// which costs nothing.
    pub fn role(&self) -> (u64, u64, u64) {
        let has = |rule: &str| if breaks(rule) { 0 } else { u64::MAX };
        (
            self.cr0 & (cr0::PG | cr0::WP) & has("drop-at-cr0"),
            self.cr4 & has("drop-at-cr4"),
            self.efer & (efer::LMA | efer::NXE) & has("drop-at-efer"),
        )
    }

    /// Level of the root table.
    pub fn top(&self) -> u32 {
        if self.mode() == Mode::Long { 3 } else { 2 }
    }

    /// Guest-physical address of the root table; `None` without paging.
    pub fn root(&self) -> Option<u64> {
        match self.mode() {
            Mode::Long => Some(self.cr3 & entry::ADDRESS),
            Mode::Pae => Some(self.cr3 & 0xffff_ffe0),
            Mode::Off | Mode::TwoLevel => None,
        }
    }
}

/// The guest's registers, as far as they are not in the VMCB.
#[derive(Clone, Default)]
pub struct ControlRegisters(Cell<Registers>);

impl ControlRegisters {
    /// The guest's registers.
    pub fn get(&self, save: &SaveArea) -> Registers {
        let registers = self.0.get();
        Registers { cr0: registers.cr0 & !FREE | save.cr0.get() & FREE, ..registers }
    }

    /// The guest's registers, except for the bits of CR0 that change without an exit.
    #[inline(always)]
    pub fn last(&self) -> Registers {
        self.0.get()
    }

    /// Sets CR3.
    pub fn set_root(&self, cr3: u64) {
        self.0.set(Registers { cr3, ..self.0.get() });
    }

    /// Sets all registers, in the VMCB those that the processor uses.
    pub fn set(&self, Vmcb { control, save }: &Vmcb, registers: Registers) {
        let Registers { cr0, cr4, efer, .. } = registers;
        self.0.set(registers);
        let is_long = registers.mode() == Mode::Long;
        let real_cr0 = cr0 & !SEEN | FORCED;
        // With LA57 the processor would walk the root as a table of level 5.
        // Without paging there are no user pages, but all shadow leaves are.
        let of_users = if registers.root().is_none() { cr4::SMEP | cr4::SMAP } else { 0 };
        let real_cr4 = (cr4 | cr4::PAE) & !(cr4::PCIDE | cr4::LA57 | of_users);
        // The root is a table of the same level in any case.
        const LONG: u64 = efer::LMA | efer::LME;
        let long = if is_long { LONG } else { 0 };
        save.cr0.set(real_cr0);
        save.cr4.set(real_cr4);
        save.efer.set(efer & !LONG | long | efer::SVME | efer::NXE);
        // The selective intercept compares with the real value: a write that sets a forced bit
        // would not be seen.
        const CR0: u32 = intercept_cr::READ_CR0 | intercept_cr::WRITE_CR0;
        let accesses = |differs: bool, bits: u32| if differs { bits } else { 0 };
        let wanted =
            accesses(real_cr0 != cr0, CR0) | accesses(real_cr4 != cr4, intercept_cr::READ_CR4);
        let others = !(CR0 | intercept_cr::READ_CR4);
        control.intercept_cr.set(control.intercept_cr.get() & others | wanted);
    }
}

/// Sets the intercepts of a vTLB, besides those of every guest, without nested paging.
pub fn set_intercepts(control: &ControlArea) {
    control.nested_control.set(0);
    let registers = intercept_cr::READ_CR3 | intercept_cr::WRITE_CR3 | intercept_cr::WRITE_CR4;
    control.intercept_cr.set(control.intercept_cr.get() | registers);
    let instructions = intercept3::CR0_SEL_WRITE | intercept3::INVLPG;
    control.intercept3.set(control.intercept3.get() | instructions);
    let exceptions = control.intercept_exceptions.get() | intercept_exceptions::PF;
    control.intercept_exceptions.set(exceptions);
}
