//! KVM paravirtual interface that unmodified Linux uses: the end of an interrupt without an exit,
//! IPIs to several CPUs at once, and a record of steal time (Linux
//! `Documentation/virt/kvm/x86/msr.rst` and `hypercalls.rst`).
//!
//! *PV EOI* (`MSR_KVM_PV_EOI_EN`). The guest registers a word of its memory. With an interrupt
//! whose EOI has no further effect, the VMM sets bit 0 of the word: the guest may complete the
//! interrupt by clearing the bit instead of writing to its local APIC. It does so with one
//! instruction, on the CPU that the word belongs to; so the VMM owns the bit while that CPU does
//! not run.
//!
//! *Steal time* (`MSR_KVM_STEAL_TIME`). The guest registers a record in its memory for each CPU.
//! The VMM writes it after the host has preempted the vCPU, and marks in it that an idle vCPU does
//! not run: then other vCPUs request a flush of its TLB in the record instead of waking it. A vCPU
//! that the host preempts while the guest runs is not marked: requests of the guest reach it as an
//! IPI.

use hw_x86::kvm::steal_time;
use vmm_mem::GuestMemory;
use vmm_vcpu::CounterClock;
use vmm_vcpu::steal::StealTime;

/// The word or record is in use.
const ENABLE: u64 = 1;
/// Must be 0: the word is aligned.
const RESERVED: u64 = 2;
/// Must be 0: the record is aligned.
const STEAL_RESERVED: u64 = (steal_time::LENGTH - 1) & !ENABLE;
/// Bit of the word that the guest may clear to complete the interrupt.
const OFFERED: u32 = 1;

/// PV EOI word of a vCPU.
#[derive(Clone, Debug)]
pub struct EoiWord {
    msr: u64,
    offered: bool,
}

impl EoiWord {
    /// No word registered.
    pub const OFF: Self = Self { msr: 0, offered: false };

    /// Current value of the MSR.
    pub const fn get(&self) -> u64 {
        self.msr
    }

    /// Handles a guest write to the MSR. `None` for an invalid value or an address outside memory.
    pub fn set(&mut self, memory: &GuestMemory, value: u64) -> Option<()> {
        let is_good =
            value & RESERVED == 0 && (value & ENABLE == 0 || memory.contains(value & !ENABLE, 4));
        if is_good {
            *self = Self { msr: value, offered: false };
        }
        is_good.then_some(())
    }

    /// Offers the guest to complete an interrupt without an exit. Returns false if no word is
    /// registered.
    #[inline]
    pub fn offer(&mut self, memory: &GuestMemory) -> bool {
        self.offered = self.msr & ENABLE != 0;
        if self.offered {
            self.write(memory, OFFERED);
        }
        self.offered
    }

    /// Withdraws an outstanding offer; returns true if the guest has used it.
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
        // `set` has validated the address, and guest memory does not shrink.
        let _ = memory.write(self.msr & !ENABLE, word);
    }
}

/// Steal-time record of a vCPU.
#[derive(Clone, Debug)]
pub struct StealRecord {
    msr: u64,
    time: StealTime,
    version: u32,
    /// The record marks the vCPU as not running.
    is_preempted: bool,
}

impl StealRecord {
    /// No record registered.
    pub const OFF: Self =
        Self { msr: 0, time: StealTime::UNREPORTED, version: 0, is_preempted: false };

    /// Current value of the MSR.
    pub const fn get(&self) -> u64 {
        self.msr
    }

    /// True if a record is registered.
    #[inline]
    pub const fn is_on(&self) -> bool {
        self.msr & ENABLE != 0
    }

    /// Handles a guest write to the MSR. `None` for an invalid value or an address outside memory.
    pub fn set(
        &mut self,
        memory: &GuestMemory,
        clock: &CounterClock,
        value: u64,
        stolen: u64,
    ) -> Option<()> {
        let is_good = value & STEAL_RESERVED == 0
            && (value & ENABLE == 0 || memory.contains(value & !ENABLE, steal_time::LENGTH));
        if !is_good {
            return None;
        }
        self.msr = value;
        self.is_preempted = false;
        if self.is_on() {
            self.write(memory, steal_time::STATE, 0_u32);
            self.publish(memory, clock, stolen);
        }
        Some(())
    }

    /// Drops the record on INIT. A later record continues the count.
    pub fn reset(&mut self) {
        self.msr = 0;
        self.is_preempted = false;
    }

    /// Marks the vCPU as not running: it is about to wait.
    pub fn leave(&mut self, memory: &GuestMemory) {
        if self.is_on() && !self.is_preempted {
            self.is_preempted = true;
            self.write(memory, steal_time::STATE, steal_time::PREEMPTED);
        }
    }

    /// Updates the record of a vCPU that is about to run. Returns true if its TLB must be flushed
    /// first.
    pub fn enter(&mut self, memory: &GuestMemory, clock: &CounterClock, stolen: u64) -> bool {
        if self.time.has_changed(stolen) {
            self.publish(memory, clock, stolen);
        }
        core::mem::take(&mut self.is_preempted) && self.mark_running(memory)
    }

    /// Marks the vCPU as running. From then on other vCPUs request a flush by an IPI.
    fn mark_running(&self, memory: &GuestMemory) -> bool {
        let state = (self.msr & !ENABLE) + steal_time::STATE;
        let Ok(Err(changed)) = memory.compare_exchange(state, steal_time::PREEMPTED, 0) else {
            return false;
        };
        // Other vCPUs only add the flush request, once; another failure is the guest's own write to
        // the word.
        let _ = memory.compare_exchange(state, changed, 0);
        changed & steal_time::FLUSH_TLB != 0
    }

    #[cold]
    fn publish(&mut self, memory: &GuestMemory, clock: &CounterClock, stolen: u64) {
        let nanos = self.time.report(stolen, clock);
        self.write(memory, steal_time::VERSION, self.version.wrapping_add(1));
        self.write(memory, steal_time::STEAL, nanos);
        self.version = self.version.wrapping_add(2);
        self.write(memory, steal_time::VERSION, self.version);
    }

    fn write<T: vmm_mem::Word>(&self, memory: &GuestMemory, field: u64, value: T) {
        // `set` has validated the address, and guest memory does not shrink.
        let _ = memory.write((self.msr & !ENABLE) + field, value);
    }
}

/// Set of APIC ids in a hypercall.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ApicIds {
    /// The lowest id.
    pub first: u32,
    /// Bit `n`: id `first + n`.
    pub set: u128,
}

impl ApicIds {
    /// True if the set contains this id.
    pub const fn contains(&self, id: u32) -> bool {
        let bit = id.wrapping_sub(self.first);
        bit < u128::BITS && self.set >> bit & 1 != 0
    }
}
