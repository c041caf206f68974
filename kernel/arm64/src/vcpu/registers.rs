//! Registers of EL1 that stay loaded in the CPU between exits: they belong to the vCPU that ran
//! there last.

use core::arch::asm;
use core::cell::Cell;
use core::sync::atomic::Ordering;

use abi::Status;
use abi::vcpu::arm64::{VcpuState, system};
use hw_arm64::aarch32::{FPEXC_ENABLED, psr};
use hw_arm64::registers::{
    AFFINITY, EL0_HAS_AARCH32, MPIDR_ONE, el1_has_aarch32, hcr, sctlr, spsr,
};

use super::float;
use crate::{alternative, cpu, has_vhe, read_register, write_register};

/// Calls a macro with each register: index in the state page, and its name at EL2. With E2H the
/// names of EL1 are EL2's registers there, and those of EL1 have encodings of their own
/// (Arm ARM, D8.1.5); the second name is that without VHE. Two more are in [`Pair`]. They come in
/// pairs, which are neighbours in memory, so that one instruction saves or loads two.
macro_rules! for_each_register {
    ($do:ident) => {
        $do! {
            CPACR_EL1 = "S3_5_C1_C0_2" "cpacr_el1", TTBR0_EL1 = "S3_5_C2_C0_0" "ttbr0_el1";
            TTBR1_EL1 = "S3_5_C2_C0_1" "ttbr1_el1", TCR_EL1 = "S3_5_C2_C0_2" "tcr_el1";
            MAIR_EL1 = "S3_5_C10_C2_0" "mair_el1", AMAIR_EL1 = "S3_5_C10_C3_0" "amair_el1";
            VBAR_EL1 = "S3_5_C12_C0_0" "vbar_el1", ESR_EL1 = "S3_5_C5_C2_0" "esr_el1";
            FAR_EL1 = "S3_5_C6_C0_0" "far_el1", AFSR0_EL1 = "S3_5_C5_C1_0" "afsr0_el1";
            AFSR1_EL1 = "S3_5_C5_C1_1" "afsr1_el1", ELR_EL1 = "S3_5_C4_C0_1" "elr_el1";
            SPSR_EL1 = "S3_5_C4_C0_0" "spsr_el1", SP_EL1 = "sp_el1";
            TPIDR_EL1 = "tpidr_el1", CONTEXTIDR_EL1 = "S3_5_C13_C0_1" "contextidr_el1";
            PAR_EL1 = "par_el1", CSSELR_EL1 = "csselr_el1";
            // The control register last, so that the timer starts with the other values.
            CNTV_CVAL_EL0 = "S3_5_C14_C3_2" "cntv_cval_el0",
                CNTV_CTL_EL0 = "S3_5_C14_C3_1" "cntv_ctl_el0";
        }
    };
}

/// The same with registers that only 32-bit vCPUs have, except FPEXC32_EL2. Processors without
/// AArch32 at EL1 have none of them.
macro_rules! for_each_register_of_32_bit {
    ($do:ident) => {
        $do! {
            SPSR_ABT = "spsr_abt",
            SPSR_UND = "spsr_und",
            SPSR_IRQ = "spsr_irq",
            SPSR_FIQ = "spsr_fiq",
            DACR32_EL2 = "dacr32_el2",
            IFSR32_EL2 = "ifsr32_el2",
        }
    };
}

/// Saved registers of a vCPU. While it is a CPU's owner, the CPU has newer values.
#[derive(Clone)]
pub struct SystemRegisters {
    saved: [Cell<u64>; system::COUNT],
    affinity: Cell<u64>,
    counter_offset: Cell<u64>,
    /// HCR_EL2 while it runs, which tells 32-bit vCPUs from others.
    hcr: Cell<u64>,
    /// Modes in which it may be entered: a bit each.
    modes: Cell<u32>,
    /// Its registers of floating point are in the CPU.
    has_float: Cell<bool>,
}

impl SystemRegisters {
    /// Values after a reset: translation off, timer off.
    pub fn new() -> Self {
        let this = Self {
            saved: [const { Cell::new(0) }; system::COUNT],
            affinity: Cell::new(0),
            counter_offset: Cell::new(0),
            hcr: Cell::new(hcr::guest(false, has_vhe())),
            modes: Cell::new(modes_of_64_bit()),
            has_float: Cell::new(false),
        };
        this.saved[system::SCTLR_EL1].set(sctlr::OFF);
        this
    }

    /// Returns whether the vCPU may be entered with a processor state: the processor can return to
    /// it, and it is none of EL2.
    #[inline(always)]
    pub fn permits(&self, state: u64) -> bool {
        self.modes.get() >> (state & spsr::MODE) & 1 != 0
    }

    /// Affinity that the guest reads.
    pub fn affinity(&self) -> u64 {
        self.affinity.get()
    }

    /// Saves the registers of this CPU, whose owner the vCPU is.
    #[inline(always)]
    pub fn save(&self) {
        macro_rules! save {
            ($($a:ident = $($name_a:literal)+, $b:ident = $($name_b:literal)+;)+) => {
                $(let pair = (read_register!($($name_a),+), read_register!($($name_b),+));
                self.saved[system::$a].set(pair.0);
                self.saved[system::$b].set(pair.1);)+
            };
        }
        for_each_register!(save);
        let Pair { sctlr, cntkctl } = Pair::read();
        self.saved[system::SCTLR_EL1].set(sctlr);
        self.saved[system::CNTKCTL_EL1].set(cntkctl);
        if self.hcr.get() & hcr::RW == 0 {
            self.save_32();
        }
    }

    #[cold]
    fn save_32(&self) {
        macro_rules! save {
            ($($index:ident = $name:literal,)+) => {
                $(self.saved[system::$index].set(read_register!($name));)+
            };
        }
        for_each_register_of_32_bit!(save);
        if self.has_float.get() {
            self.saved[system::FPEXC32_EL2].set(float::fpexc());
        }
    }

    #[cold]
    fn load_32(&self) {
        macro_rules! load {
            ($($index:ident = $name:literal,)+) => {
                // SAFETY: `write` has found that the processor has them; they have no effect on EL2
                // and on tasks.
                unsafe { $(write_register!($name, self.saved[system::$index].get());)+ }
            };
        }
        for_each_register_of_32_bit!(load);
        self.load_fpexc();
    }

    /// Loads FPEXC32_EL2. While floating point traps, it must be enabled there: otherwise it would
    /// be undefined for the guest instead.
    fn load_fpexc(&self) {
        let saved = self.saved[system::FPEXC32_EL2].get();
        float::set_fpexc(if self.has_float.get() { saved } else { FPEXC_ENABLED });
    }

    /// The registers of floating point in the CPU, which is loaded with this vCPU's others if it
    /// gets them, are now its own, or not any more.
    #[cold]
    pub fn set_has_float(&self, has_float: bool) {
        self.has_float.set(has_float);
        if has_float && self.hcr.get() & hcr::RW == 0 {
            self.load_fpexc();
        }
    }

    /// Loads them; the guest's timer is stopped. The next entry of the guest synchronises them.
    pub fn load(&self) {
        macro_rules! load {
            ($($a:ident = $($name_a:literal)+, $b:ident = $($name_b:literal)+;)+) => {
                $(let pair = (self.saved[system::$a].get(), self.saved[system::$b].get());
                // SAFETY: registers of EL1, which have no effect on EL2 and on tasks; stage 2
                // confines the translations, and the timer's interrupt is the guest's.
                unsafe {
                    write_register!($($name_a,)+ pair.0);
                    write_register!($($name_b,)+ pair.1);
                })+
            };
        }
        let hcr = self.hcr.get();
        cpu::current().guest.hcr.store(hcr, Ordering::Relaxed);
        if hcr & hcr::RW == 0 {
            self.load_32();
        }
        // SAFETY: what a guest reads as its affinity and its counter.
        unsafe {
            write_register!("vmpidr_el2", MPIDR_ONE | self.affinity.get());
            write_register!("cntvoff_el2", self.counter_offset.get());
        }
        let saved = |index: usize| self.saved[index].get();
        Pair { sctlr: saved(system::SCTLR_EL1), cntkctl: saved(system::CNTKCTL_EL1) }.write();
        for_each_register!(load);
    }

    /// Loads the register that tasks can read, too. Called before every entry.
    #[inline(always)]
    pub fn load_readable(&self) {
        // SAFETY: any value has no effect.
        unsafe { write_register!("tpidrro_el0", self.saved[system::TPIDRRO_EL0].get()) };
    }

    /// Saves the register that tasks can read, too, and clears it. Called after every exit.
    #[inline(always)]
    pub fn save_readable(&self) {
        self.saved[system::TPIDRRO_EL0].set(read_register!("tpidrro_el0"));
        clear_readable();
    }

    /// Copies the saved values to the state page.
    pub fn read(&self, state: &VcpuState) {
        for (to, from) in state.system.iter().zip(&self.saved) {
            to.set(from.get());
        }
        state.affinity.set(self.affinity.get());
        state.counter_offset.set(self.counter_offset.get());
        state.is_32_bit.set((self.hcr.get() & hcr::RW == 0).into());
    }

    /// Takes over the values of the state page, on the CPU on which the vCPU runs.
    ///
    /// # Errors
    /// `Unsupported`: it is a 32-bit vCPU, and the CPU has no AArch32 at EL1.
    pub fn write(&self, state: &VcpuState) -> Result<(), Status> {
        let is_32_bit = state.is_32_bit.get() != 0;
        if is_32_bit && !el1_has_aarch32(read_register!("id_aa64pfr0_el1")) {
            return Err(Status::Unsupported);
        }
        self.hcr.set(hcr::guest(is_32_bit, has_vhe()));
        self.modes.set(if is_32_bit { psr::GUEST_MODES } else { modes_of_64_bit() });
        for (to, from) in self.saved.iter().zip(&state.system) {
            to.set(from.get());
        }
        self.affinity.set(state.affinity.get() & AFFINITY);
        self.counter_offset.set(state.counter_offset.get());
        Ok(())
    }
}

/// Modes that a 64-bit guest may have on this processor: a bit each.
fn modes_of_64_bit() -> u32 {
    let has_aarch32 = read_register!("id_aa64pfr0_el1") & 0xf == EL0_HAS_AARCH32;
    spsr::GUEST_MODES | u32::from(has_aarch32) << spsr::EL0_32
}

/// SCTLR_EL1 and CNTKCTL_EL1, on which tasks depend without VHE: they are in memory then while the
/// guest does not run (`entry.rs`).
struct Pair {
    sctlr: u64,
    cntkctl: u64,
}

impl Pair {
    fn read() -> Self {
        let (sctlr, cntkctl);
        // SAFETY: reading the registers changes nothing.
        unsafe {
            asm!(
                alternative!("mrs x9, S3_5_C1_C0_0", "bl get_guest_registers"),
                alternative!("mrs x10, S3_5_C14_C1_0", "nop"),
                out("x9") sctlr, out("x10") cntkctl, out("x11") _, out("x30") _, options(nostack),
            );
        }
        Self { sctlr, cntkctl }
    }

    fn write(self) {
        // SAFETY: registers of EL1, which have no effect on EL2 and on tasks.
        unsafe {
            asm!(
                alternative!("msr S3_5_C1_C0_0, x9", "bl set_guest_registers"),
                alternative!("msr S3_5_C14_C1_0, x10", "nop"),
                in("x9") self.sctlr, in("x10") self.cntkctl, out("x11") _, out("x30") _,
                options(nostack),
            );
        }
    }
}

/// Clears the register that tasks can read, too.
#[inline(always)]
pub fn clear_readable() {
    // SAFETY: any value has no effect.
    unsafe { write_register!("tpidrro_el0", 0) };
}
