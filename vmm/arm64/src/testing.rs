//! A vCPU back end that plays a list of exits, for tests.

extern crate std;

use std::collections::VecDeque;
use std::vec::Vec;

use vmm_vcpu::{MemoryFault, Vcpu};

use crate::vcpu::{Arm64Vcpu, Exit, System, Virq, Width};

/// Error of [`Exit::HostError`] when the list is at its end.
pub const END: u64 = 7;

/// A vCPU whose guest makes a list of exits.
#[derive(Default)]
pub struct ScriptVcpu {
    /// Exits to come. At their end the host cannot run the vCPU ([`END`]).
    pub exits: VecDeque<Exit>,
    /// General-purpose registers.
    pub general: [u64; 31],
    /// Program counter.
    pub pc: u64,
    /// Processor state.
    pub state: u64,
    /// System registers, by [`System`].
    pub system: [u64; 11],
    /// Interrupts in the interface, which has room for two.
    pub virqs: Vec<Virq>,
    /// Affinity since the last reset.
    pub affinity: Option<u64>,
    /// Kind since the last reset.
    pub width: Width,
    /// Random byte of the host, if it has any.
    pub random: Option<u8>,
    /// Its source fails for more than no bytes.
    pub fails: bool,
    /// Ticks stolen so far: 500 more at each question.
    pub stolen: u64,
    /// [`Arm64Vcpu::set_preemption_exits`] has been called.
    pub has_preemption_exits: bool,
}

impl ScriptVcpu {
    /// Creates a vCPU of a host whose random numbers are all this one.
    pub fn with_random(byte: u8) -> Self {
        Self { random: Some(byte), ..Self::default() }
    }
}

impl Vcpu for ScriptVcpu {
    type Exit = Exit;

    fn set_deadline(&mut self, _: u64) {}

    fn stolen(&mut self) -> u64 {
        self.stolen += 500;
        self.stolen
    }

    fn set_wait_exits(&mut self, _: bool) {}

    fn flush_tlb(&mut self) {}

    fn run(&mut self) -> Exit {
        self.exits.pop_front().unwrap_or(Exit::HostError(END))
    }
}

impl Arm64Vcpu for ScriptVcpu {
    fn run_to_access(&mut self) -> Option<(MemoryFault, u64)> {
        match self.exits.front() {
            Some(&Exit::MemoryFault { fault, syndrome }) => {
                self.exits.pop_front();
                Some((fault, syndrome))
            }
            _ => None,
        }
    }

    fn other_exit(&mut self) -> Exit {
        self.run()
    }

    fn general(&mut self, index: usize) -> u64 {
        self.general[index]
    }

    fn set_general(&mut self, index: usize, value: u64) {
        self.general[index] = value;
    }

    fn pc(&mut self) -> u64 {
        self.pc
    }

    fn set_pc(&mut self, value: u64) {
        self.pc = value;
    }

    fn state(&mut self) -> u64 {
        self.state
    }

    fn set_state(&mut self, value: u64) {
        self.state = value;
    }

    fn system(&mut self, register: System) -> u64 {
        self.system[register as usize]
    }

    fn set_system(&mut self, register: System, value: u64) {
        self.system[register as usize] = value;
    }

    fn reset(&mut self, affinity: u64, width: Width) {
        (self.affinity, self.width) = (Some(affinity), width);
    }

    fn has_room(&mut self) -> bool {
        self.virqs.len() < 2
    }

    fn put_virq(&mut self, virq: Virq) {
        self.virqs.push(virq);
    }

    fn set_timer_virq(&mut self, _: Option<Virq>) {}

    fn set_preemption_exits(&mut self) {
        self.has_preemption_exits = true;
    }

    fn random(&mut self, to: &mut [u8]) -> bool {
        to.fill(self.random.unwrap_or_default());
        self.random.is_some() && (to.is_empty() || !self.fails)
    }
}
