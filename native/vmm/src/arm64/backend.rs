//! Native back end of a vCPU: [`Arm64Vcpu`] over a vCPU object of the kernel.
//!
//! The registers of EL1 are fetched on first use after an exit, and changed as a whole.

use abi::vcpu::arm64::{VcpuState, exit as arm64_exit, group, system, virq};
use abi::vcpu::{SharedU64, exit, memory_fault};
use hw_arm64::aarch32;
use hw_arm64::registers::sctlr;
use native_rt::{SchedContext, SharedVcpu, Vcpu, time};
use proto::vtlb::COUNTERS;
use vmm_arm64::{Arm64Vcpu, Exit, Sgis, System, Virq, Width, memory_fault_of_32_bit};
use vmm_bus::EntropySource;
use vmm_vcpu::MemoryFault;

use crate::console::Console;
use crate::devices::RandomSource;
use crate::steal::StealTime;

/// A vCPU of the kernel.
pub struct NativeVcpu<'a> {
    vcpu: Vcpu,
    /// Groups of the state page that are valid.
    valid: u64,
    console: &'a Console,
    /// Deadline of the board, as a counter value.
    deadline: u64,
    /// Ticks during which the VM was paused: its time is this much less than the host's.
    paused_ticks: u64,
    /// Halt mode for the kernel, unless pending output requires an exit.
    halt_mode: u64,
    steal_time: StealTime,
    /// Status with which the last run has failed, until its exit is returned.
    failed: Option<u64>,
    /// Random numbers for the guest.
    random: Option<RandomSource>,
}

impl<'a> NativeVcpu<'a> {
    /// Wraps a vCPU that has not run yet. Its runs flush `console` when its
    /// output has waited long enough.
    pub fn new(vcpu: Vcpu, console: &'a Console, random: Option<RandomSource>) -> Self {
        Self {
            vcpu,
            valid: 0,
            console,
            deadline: abi::FOREVER,
            paused_ticks: 0,
            halt_mode: 1,
            steal_time: StealTime::default(),
            failed: None,
            random,
        }
    }

    /// Starts the VM with this as its vCPU `index`, whose thread runs on `context`.
    pub fn start(&mut self, index: usize, context: SchedContext) {
        let state = self.vcpu.state();
        self.steal_time = StealTime::start(index, context, &state.run);
        state.exit_after_preemption.set(0);
    }

    /// Returns the number of world switches, and of exits handled in the kernel.
    pub fn counts(&mut self) -> (u64, u64) {
        let state = self.vcpu.state();
        (state.run.entries.get(), state.run.handled_in_kernel.get())
    }

    /// Returns the counters of the vTLB, which does not exist here.
    pub fn vtlb_counters(&mut self) -> [u64; COUNTERS] {
        [0; COUNTERS]
    }

    /// Returns the ticks that the kernel has waited while the guest was halted.
    pub fn halted(&mut self) -> u64 {
        self.vcpu.state().run.halted.get()
    }

    /// Sets the time of all pauses, in ticks. The guest's virtual counter continues from its value
    /// before the pause.
    pub fn set_paused_ticks(&mut self, ticks: u64) {
        if ticks != self.paused_ticks {
            self.paused_ticks = ticks;
            self.system_state();
            self.set_offset(ticks);
            // The kernel checks a new deadline before the guest runs; this one is in VM time again.
            self.deadline = 0;
        }
    }

    /// Changes the offset of the guest's virtual counter; the registers of EL1 are valid.
    fn set_offset(&mut self, ticks: u64) {
        let state = self.vcpu.state();
        state.counter_offset.set(ticks);
        state.run.dirty.set(state.run.dirty.get() | group::SYSTEM);
    }

    /// Returns the state page with valid registers of EL1.
    #[cold]
    fn system_state(&mut self) -> &VcpuState {
        if self.valid & group::SYSTEM == 0 {
            // It fails only for a wrong selector or right, which the next run reports.
            let _ = self.vcpu.fetch(group::SYSTEM);
            self.valid |= group::SYSTEM;
        }
        self.vcpu.state()
    }
}

/// Index of a register in the state page.
const fn index(register: System) -> usize {
    match register {
        System::Sctlr => system::SCTLR_EL1,
        System::Vbar => system::VBAR_EL1,
        System::Esr => system::ESR_EL1,
        System::Elr => system::ELR_EL1,
        System::Spsr => system::SPSR_EL1,
        System::Tcr => system::TCR_EL1,
        System::Ttbr0 => system::TTBR0_EL1,
        System::Ttbr1 => system::TTBR1_EL1,
        System::Ifsr => system::IFSR32_EL2,
        System::SpsrAbort => system::SPSR_ABT,
        System::SpsrUndefined => system::SPSR_UND,
    }
}

/// Word of the state page for an interrupt.
const fn word(interrupt: Virq) -> u64 {
    let report = if interrupt.report_end { virq::REPORT_END } else { 0 };
    let priority = (interrupt.priority as u64) << virq::PRIORITY_SHIFT;
    virq::VALID | report | priority | interrupt.number as u64
}

/// Place for an interrupt in a state page. The board's lock is held by those who fill it, so it
/// stays free.
fn free_word(state: &VcpuState) -> Option<&SharedU64> {
    state.virqs.iter().find(|word| word.get() == 0)
}

/// Puts interrupts into the state page of a vCPU, which may run; returns whether there were any.
pub fn put_virqs(vcpu: SharedVcpu, take: &mut dyn FnMut() -> Option<Virq>) -> bool {
    let mut has_put = false;
    while let Some(place) = free_word(vcpu.state())
        && let Some(virq) = take()
    {
        place.set(word(virq));
        has_put = true;
    }
    has_put
}

/// Lets the kernel deliver SGIs to a vCPU, which may run. The board's lock is held.
pub fn set_sgis(vcpu: SharedVcpu, sgis: Sgis) {
    let state = vcpu.state();
    let (words, _) = sgis.priorities.as_chunks();
    for (priorities, word) in state.sgi_priorities.iter().zip(words) {
        priorities.set(u64::from_le_bytes(*word));
    }
    state.sgi_enabled.set(sgis.enabled.into());
}

/// Lets the kernel deliver an event of the vCPU's notification (one bit) as an interrupt, or no
/// longer; the vCPU may run. `index`: place of the event. The board's lock is held.
pub fn set_event_virq(vcpu: SharedVcpu, index: usize, event: u64, virq: Option<Virq>) {
    if let Some(place) = vcpu.state().event_virqs.get(index) {
        let number = u64::from(event.trailing_zeros()) << virq::EVENT_SHIFT;
        place.set(virq.map_or(0, |virq| word(virq) | number));
    }
}

impl vmm_vcpu::Vcpu for NativeVcpu<'_> {
    type Exit = Exit;

    fn set_deadline(&mut self, ticks: u64) {
        self.deadline = ticks.saturating_add(self.paused_ticks);
    }

    fn stolen(&mut self) -> u64 {
        self.steal_time.ticks(&self.vcpu.state().run)
    }

    fn set_wait_exits(&mut self, exit: bool) {
        self.halt_mode = u64::from(!exit);
    }

    fn flush_tlb(&mut self) {
        // The guest flushes its TLB itself.
    }

    fn run(&mut self) -> Exit {
        match self.run_to_access() {
            Some((fault, syndrome)) => Exit::MemoryFault { fault, syndrome },
            None => self.other_exit(),
        }
    }
}

impl NativeVcpu<'_> {
    /// Handles the kernel's deadline. Flushes overdue output: a guest that computes without ever
    /// being idle gives the VMM no other occasion. Returns an exit if there is one.
    fn deadline_exit(&mut self) -> Option<Exit> {
        let state = self.vcpu.state();
        let is_stale = self.steal_time.is_stale(&state.run);
        let exits_after_preemption = state.exit_after_preemption.get() != 0;
        let now = time::tsc();
        if self.console.flush_at() <= now {
            self.console.flush();
        }
        if self.deadline <= now {
            return Some(Exit::Deadline);
        }
        (exits_after_preemption && is_stale).then_some(Exit::Preempted)
    }
}

/// Returns the access at stage 2 that the kernel has reported in the state page, with its syndrome.
#[inline(always)]
fn access(state: &VcpuState) -> (MemoryFault, u64) {
    let information = state.run.exit_info.get();
    let fault = MemoryFault {
        gpa: state.run.fault_address.get(),
        write: information & memory_fault::WRITE != 0,
        fetch: information & memory_fault::FETCH != 0,
        walk: information & memory_fault::WALK != 0,
    };
    (fault, state.syndrome.get())
}

/// Returns the exit that the kernel has reported in the state page, with times of the VM.
fn decode(state: &VcpuState, paused_ticks: u64) -> Exit {
    let run = &state.run;
    let information = run.exit_info.get();
    match run.exit_reason.get() {
        exit::DEADLINE => Exit::Deadline,
        exit::RECALL => Exit::Recall { events: run.events.get() },
        exit::HALT => Exit::Wait { timer: state.timer_deadline.get().saturating_sub(paused_ticks) },
        exit::HALTED => Exit::Waited { events: run.events.get() },
        exit::HYPERCALL => Exit::Hypercall,
        exit::MEMORY_FAULT => {
            let (fault, syndrome) = access(state);
            Exit::MemoryFault { fault, syndrome }
        }
        arm64_exit::SYSTEM_REGISTER => Exit::SystemRegister { syndrome: information },
        arm64_exit::SECURE_CALL => Exit::SecureCall,
        arm64_exit::VIRQ_ENDED => Exit::VirqEnded { number: information as u32 },
        arm64_exit::INVALID_STATE => Exit::InvalidState,
        arm64_exit::AARCH32 => decode_32(state, information),
        _ => Exit::Unknown { syndrome: information },
    }
}

/// Returns the exit of a 32-bit vCPU.
#[cold]
fn decode_32(state: &VcpuState, syndrome: u64) -> Exit {
    let address = state.run.fault_address.get();
    match memory_fault_of_32_bit(syndrome, address, state.pc.get(), state.pstate.get()) {
        Some((exit, pc, pstate)) => {
            state.pc.set(pc);
            state.pstate.set(pstate);
            exit
        }
        None => Exit::AArch32 { syndrome },
    }
}

impl Arm64Vcpu for NativeVcpu<'_> {
    #[inline(always)]
    fn run_to_access(&mut self) -> Option<(MemoryFault, u64)> {
        let run = &self.vcpu.state().run;
        let flush_at = self.console.flush_at();
        run.deadline.set(self.deadline.min(flush_at));
        // A wait must not delay pending output.
        run.halt.set(if flush_at == abi::FOREVER { self.halt_mode } else { 0 });
        if let Err(status) = self.vcpu.run() {
            self.failed = Some(status as u64);
            return None;
        }
        let state = self.vcpu.state();
        self.valid = state.run.valid.get();
        (state.run.exit_reason.get() == exit::MEMORY_FAULT).then(|| access(state))
    }

    #[inline(never)]
    fn other_exit(&mut self) -> Exit {
        loop {
            if let Some(status) = self.failed.take() {
                return Exit::HostError(status);
            }
            let state = self.vcpu.state();
            if state.run.exit_reason.get() != exit::DEADLINE {
                return decode(state, self.paused_ticks);
            }
            if let Some(exit) = self.deadline_exit() {
                return exit;
            }
            if let Some((fault, syndrome)) = self.run_to_access() {
                return Exit::MemoryFault { fault, syndrome };
            }
        }
    }

    fn general(&mut self, index: usize) -> u64 {
        self.vcpu.state().x.get(index).map_or(0, |register| register.get())
    }

    fn set_general(&mut self, index: usize, value: u64) {
        if let Some(register) = self.vcpu.state().x.get(index) {
            register.set(value);
        }
    }

    fn pc(&mut self) -> u64 {
        self.vcpu.state().pc.get()
    }

    fn set_pc(&mut self, value: u64) {
        self.vcpu.state().pc.set(value);
    }

    fn state(&mut self) -> u64 {
        self.vcpu.state().pstate.get()
    }

    fn set_state(&mut self, value: u64) {
        self.vcpu.state().pstate.set(value);
    }

    fn system(&mut self, register: System) -> u64 {
        self.system_state().system[index(register)].get()
    }

    fn set_system(&mut self, register: System, value: u64) {
        let state = self.system_state();
        state.system[index(register)].set(value);
        state.run.dirty.set(state.run.dirty.get() | group::SYSTEM);
    }

    fn reset(&mut self, affinity: u64, width: Width) {
        let state = self.vcpu.state();
        let all = [&state.sp, &state.tpidr];
        let registers = state.x.iter().chain(&state.system).chain(&state.virqs).chain(all);
        registers.for_each(|register| register.set(0));
        let is_32_bit = width == Width::Bits32;
        let control = if is_32_bit { aarch32::sctlr::OFF } else { sctlr::OFF };
        state.system[system::SCTLR_EL1].set(control);
        state.is_32_bit.set(is_32_bit.into());
        state.affinity.set(affinity);
        // Those of devices have followed their routes to other vCPUs when this one stopped.
        state.run.dirty.set(state.run.dirty.get() | group::INTERRUPTS);
        let ticks = self.paused_ticks;
        self.set_offset(ticks);
        self.valid |= group::SYSTEM;
    }

    fn has_room(&mut self) -> bool {
        free_word(self.vcpu.state()).is_some()
    }

    fn put_virq(&mut self, virq: Virq) {
        if let Some(place) = free_word(self.vcpu.state()) {
            place.set(word(virq));
        }
    }

    fn set_timer_virq(&mut self, virq: Option<Virq>) {
        self.vcpu.state().timer_virq.set(virq.map_or(0, word));
    }

    fn set_preemption_exits(&mut self) {
        self.vcpu.state().exit_after_preemption.set(1);
    }

    fn random(&mut self, to: &mut [u8]) -> bool {
        self.random.as_mut().is_some_and(|source| source.fill(to))
    }
}
