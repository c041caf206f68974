//! The end of an interrupt without an exit: the KVM paravirtual interface (Linux
//! `Documentation/virt/kvm/x86/msr.rst`, `MSR_KVM_PV_EOI_EN`), which unmodified Linux speaks.
//!
//! The guest names a word of its memory. With an interrupt whose end has no effect but itself, bit 0 of the word is
//! set: the guest may end the interrupt by clearing it, instead of writing to its local APIC. It does so with one
//! instruction, on the processor that the word belongs to; so, while that does not run, the bit is the VMM's.

use vmm_mem::GuestMemory;

/// The word is in use.
const ENABLE: u64 = 1;
/// Must be 0: the word is aligned.
const RESERVED: u64 = 2;
/// In the word: the guest may end the interrupt by clearing this.
const OFFERED: u32 = 1;

/// The word of one virtual CPU.
#[derive(Clone, Debug)]
pub struct EoiWord {
    msr: u64,
    offered: bool,
}

impl EoiWord {
    /// No word.
    pub const OFF: Self = Self { msr: 0, offered: false };

    /// What the guest has written to the register.
    pub const fn get(&self) -> u64 {
        self.msr
    }

    /// The guest writes the register. `None`: a bad value, or no memory.
    pub fn set(&mut self, memory: &GuestMemory, value: u64) -> Option<()> {
        let is_good =
            value & RESERVED == 0 && (value & ENABLE == 0 || memory.contains(value & !ENABLE, 4));
        if is_good {
            *self = Self { msr: value, offered: false };
        }
        is_good.then_some(())
    }

    /// Offers the guest to end an interrupt by itself, if it has a word. Gives whether it has.
    pub fn offer(&mut self, memory: &GuestMemory) -> bool {
        self.offered = self.msr & ENABLE != 0;
        if self.offered {
            self.write(memory, OFFERED);
        }
        self.offered
    }

    /// Takes the offer back, if there is one; whether the guest has made use of it.
    pub fn is_ended(&mut self, memory: &GuestMemory) -> bool {
        if !core::mem::take(&mut self.offered) {
            return false;
        }
        let is_ended = memory.read::<u32>(self.msr & !ENABLE).is_ok_and(|word| word & OFFERED == 0);
        if !is_ended {
            self.write(memory, 0);
        }
        is_ended
    }

    fn write(&self, memory: &GuestMemory, word: u32) {
        // It is memory (`set`), and memory stays.
        let _ = memory.write(self.msr & !ENABLE, word);
    }
}
