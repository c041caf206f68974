//! [`Arm64Vcpu`] over a vCPU object of the kernel.
//!
//! The registers of EL1 are fetched on first use after an exit, and changed as a whole.

use abi::vcpu::arm64::{VcpuState, exit as arm64_exit, group, system, virq};
use abi::vcpu::{exit, memory_fault};
use hw_arm64::registers::sctlr;
use vmm_arm64::{Arm64Vcpu, Exit, System, Virq};
use vmm_vcpu::MemoryFault;

/// A vCPU of the kernel.
pub struct NativeVcpu {
    vcpu: native_rt::Vcpu,
    /// Groups of the state page that are valid.
    valid: u64,
}

impl NativeVcpu {
    /// Wraps a vCPU that has not run yet.
    pub fn new(vcpu: native_rt::Vcpu) -> Self {
        vcpu.state().run.halt.set(1);
        Self { vcpu, valid: 0 }
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
    }
}

/// Word of the state page for an interrupt.
const fn word(interrupt: Virq) -> u64 {
    let report = if interrupt.report_end { virq::REPORT_END } else { 0 };
    let priority = (interrupt.priority as u64) << virq::PRIORITY_SHIFT;
    virq::VALID | report | priority | interrupt.number as u64
}

impl vmm_vcpu::Vcpu for NativeVcpu {
    type Exit = Exit;

    fn set_deadline(&mut self, ticks: u64) {
        self.vcpu.state().run.deadline.set(ticks);
    }

    fn stolen(&mut self) -> u64 {
        // The board has no record of stolen time.
        0
    }

    fn set_wait_exits(&mut self, exit: bool) {
        self.vcpu.state().run.halt.set(u64::from(!exit));
    }

    fn flush_tlb(&mut self) {
        // The guest flushes its TLB itself.
    }

    fn run(&mut self) -> Exit {
        if let Err(status) = self.vcpu.run() {
            return Exit::HostError(status as u64);
        }
        let state = self.vcpu.state();
        self.valid = state.run.valid.get();
        decode(state)
    }
}

/// Returns the exit that the kernel has reported in the state page.
fn decode(state: &VcpuState) -> Exit {
    let run = &state.run;
    let information = run.exit_info.get();
    match run.exit_reason.get() {
        exit::DEADLINE => Exit::Deadline,
        exit::RECALL => Exit::Recall { events: run.events.get() },
        exit::HALT => Exit::Wait { timer: state.timer_deadline.get() },
        exit::HALTED => Exit::Waited { events: run.events.get() },
        exit::HYPERCALL => Exit::Hypercall,
        exit::MEMORY_FAULT => Exit::MemoryFault {
            fault: MemoryFault {
                gpa: run.fault_address.get(),
                write: information & memory_fault::WRITE != 0,
                fetch: information & memory_fault::FETCH != 0,
                walk: information & memory_fault::WALK != 0,
            },
            syndrome: state.syndrome.get(),
        },
        arm64_exit::SYSTEM_REGISTER => Exit::SystemRegister { syndrome: information },
        arm64_exit::SECURE_CALL => Exit::SecureCall,
        arm64_exit::VIRQ_ENDED => Exit::VirqEnded { number: information as u32 },
        arm64_exit::INVALID_STATE => Exit::InvalidState,
        _ => Exit::Unknown { syndrome: information },
    }
}

impl Arm64Vcpu for NativeVcpu {
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

    fn reset(&mut self, affinity: u64) {
        let state = self.vcpu.state();
        let all = [&state.sp, &state.tpidr, &state.counter_offset];
        let registers = state.x.iter().chain(&state.system).chain(&state.virqs).chain(all);
        registers.for_each(|register| register.set(0));
        state.system[system::SCTLR_EL1].set(sctlr::OFF);
        state.affinity.set(affinity);
        state.run.dirty.set(state.run.dirty.get() | group::SYSTEM);
        self.valid |= group::SYSTEM;
    }

    fn has_room(&mut self) -> bool {
        self.vcpu.state().virqs.iter().any(|word| word.get() == 0)
    }

    fn put_virq(&mut self, virq: Virq) {
        let mut free = self.vcpu.state().virqs.iter().filter(|word| word.get() == 0);
        if let Some(place) = free.next() {
            place.set(word(virq));
        }
    }

    fn set_timer_virq(&mut self, virq: Option<Virq>) {
        self.vcpu.state().timer_virq.set(virq.map_or(0, word));
    }
}
