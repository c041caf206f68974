//! What unmodified Linux does with less than the processor's own means, if the hypervisor speaks the KVM paravirtual
//! interface: the end of an interrupt without an exit, interrupts to several processors at once, and a record of
//! the time that others took (Linux `Documentation/virt/kvm/x86/msr.rst` and `hypercalls.rst`).
//!
//! *End of interrupt* (`MSR_KVM_PV_EOI_EN`). The guest names a word of its memory. With an interrupt whose end has no effect
//! but itself, bit 0 of the word is set: the guest may end the interrupt by clearing it, instead of writing to its local
//! APIC. It does so with one instruction, on the processor that the word belongs to; so, while that does not run, the
//! bit is the VMM's.
//!
//! *Stolen time* (`MSR_KVM_STEAL_TIME`). The guest names a record of its memory for each processor. It is written when the host
//! has taken the processor away, and says that the processor does not run while it is idle: then other processors ask for
//! a flush of its TLB in the record, instead of waking it for that. A processor that the host takes away in the middle of
//! the guest is not marked: what the guest wants of it comes as an interrupt.

use hw_x86::kvm::steal_time;
use vmm_mem::GuestMemory;

use crate::clock::TscClock;

/// The word, or the record, is in use.
const ENABLE: u64 = 1;
/// Must be 0: the word is aligned.
const RESERVED: u64 = 2;
/// Must be 0: the record is aligned.
const STEAL_RESERVED: u64 = (steal_time::LENGTH - 1) & !ENABLE;
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

/// The record of stolen time of one virtual CPU. Times are ticks as the back end counts them, from its own beginning.
#[derive(Clone, Debug)]
pub struct StealRecord {
    msr: u64,
    /// Stolen before the guest first named a record.
    before: Option<u64>,
    /// Stolen so far, as the record has it.
    told: u64,
    version: u32,
    /// The record says that the CPU does not run.
    is_away: bool,
}

impl StealRecord {
    /// No record.
    pub const OFF: Self = Self { msr: 0, before: None, told: 0, version: 0, is_away: false };

    /// What the guest has written to the register.
    pub const fn get(&self) -> u64 {
        self.msr
    }

    /// Whether there is a record.
    #[inline]
    pub const fn is_on(&self) -> bool {
        self.msr & ENABLE != 0
    }

    /// The guest writes the register. `None`: a bad value, or no memory.
    pub fn set(
        &mut self,
        memory: &GuestMemory,
        clock: &TscClock,
        value: u64,
        stolen: u64,
    ) -> Option<()> {
        let is_good = value & STEAL_RESERVED == 0
            && (value & ENABLE == 0 || memory.contains(value & !ENABLE, steal_time::LENGTH));
        if !is_good {
            return None;
        }
        self.msr = value;
        self.is_away = false;
        if self.is_on() {
            self.write(memory, steal_time::STATE, 0_u32);
            self.tell(memory, clock, stolen);
        }
        Some(())
    }

    /// INIT: there is no record. Should there be one again, it goes on where this one was.
    pub fn reset(&mut self) {
        self.msr = 0;
        self.is_away = false;
    }

    /// The CPU is about to wait.
    pub fn leave(&mut self, memory: &GuestMemory) {
        if self.is_on() && !self.is_away {
            self.is_away = true;
            self.write(memory, steal_time::STATE, steal_time::PREEMPTED);
        }
    }

    /// The CPU, which has a record, is about to run. Gives whether its TLB has to be flushed before.
    pub fn enter(&mut self, memory: &GuestMemory, clock: &TscClock, stolen: u64) -> bool {
        if stolen != self.told {
            self.tell(memory, clock, stolen);
        }
        core::mem::take(&mut self.is_away) && self.come_back(memory)
    }

    /// Takes back that the CPU does not run. From then on a flush is asked for by an interrupt.
    fn come_back(&self, memory: &GuestMemory) -> bool {
        let state = (self.msr & !ENABLE) + steal_time::STATE;
        let Ok(Err(changed)) = memory.compare_exchange(state, steal_time::PREEMPTED, 0) else {
            return false;
        };
        // Others only add that a flush is wanted, once; if this fails the guest plays with its own memory.
        let _ = memory.compare_exchange(state, changed, 0);
        changed & steal_time::FLUSH_TLB != 0
    }

    #[cold]
    fn tell(&mut self, memory: &GuestMemory, clock: &TscClock, stolen: u64) {
        let before = *self.before.get_or_insert(stolen);
        let nanos = clock.duration(stolen.wrapping_sub(before));
        self.told = stolen;
        self.write(memory, steal_time::VERSION, self.version.wrapping_add(1));
        self.write(memory, steal_time::STEAL, nanos);
        self.version = self.version.wrapping_add(2);
        self.write(memory, steal_time::VERSION, self.version);
    }

    fn write<T: vmm_mem::Word>(&self, memory: &GuestMemory, field: u64, value: T) {
        // It is memory (`set`), and memory stays.
        let _ = memory.write((self.msr & !ENABLE) + field, value);
    }
}

/// Processors that a hypercall names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ApicIds {
    /// The lowest id.
    pub first: u32,
    /// Bit `n`: id `first + n`.
    pub set: u128,
}

impl ApicIds {
    /// Whether this id is among them.
    pub const fn contains(&self, id: u32) -> bool {
        let bit = id.wrapping_sub(self.first);
        bit < u128::BITS && self.set >> bit & 1 != 0
    }
}
