//! State that a debugger and the vCPUs share. The guest can overwrite it: the debugger displays it
//! and bases no decision on it.

use super::layout;
use crate::system::MAX_VCPUS;
use core::sync::atomic::Ordering::SeqCst;
use core::sync::atomic::{AtomicU32, AtomicU64};

/// Largest number of breakpoints.
pub const BREAKPOINTS: usize = 64;
/// Breakpoint instruction in Linux processes: `INT3`.
pub const BREAKPOINT: u8 = 0xcc;
/// Breakpoint instruction with KVM: `HLT`, which always exits.
pub const HALT: u8 = 0xf4;

/// State of all vCPUs.
#[derive(Debug)]
#[repr(C)]
pub struct DebugState {
    /// Stop request of the debugger for all vCPUs: see [`stop`].
    pub wanted: AtomicU32,
    /// Not 0: a vCPU has stopped, and the device process has not notified the debugger yet.
    pub halt_pending: AtomicU32,
    /// Linear addresses of breakpoints; 0: none.
    pub breakpoints: [AtomicU64; BREAKPOINTS],
    /// State of each vCPU.
    pub vcpus: [VcpuDebug; MAX_VCPUS],
}

/// State of one vCPU.
#[derive(Debug, Default)]
#[repr(C)]
pub struct VcpuDebug {
    /// Not 0: the vCPU has stopped and waits for a command. With a command it is about to resume.
    pub halted: AtomicU32,
    /// Reason of the last stop: see [`reason`].
    pub reason: AtomicU32,
    /// Number of stops.
    pub halts: AtomicU32,
    /// Next action of the vCPU: see [`command`].
    pub command: AtomicU32,
    /// Registers, valid while the vCPU is stopped.
    pub registers: [AtomicU64; register::COUNT],
}

/// Values of [`DebugState::wanted`].
pub mod stop {
    /// None. A vCPU that was too late for the last request resumes.
    pub const NONE: u32 = 0;
    /// All vCPUs stop.
    pub const REQUESTED: u32 = 1;
    /// No further vCPU stops, and stopped ones wait for their commands, which are being written.
    pub const ENDING: u32 = 2;
}

/// Values of [`VcpuDebug::reason`].
pub mod reason {
    /// The debugger requested it.
    pub const WANTED: u32 = 0;
    /// A breakpoint.
    pub const BREAKPOINT: u32 = 1;
    /// A single step.
    pub const STEP: u32 = 2;
}

/// Values of [`VcpuDebug::command`].
pub mod command {
    /// Wait.
    pub const WAIT: u32 = 0;
    /// Continue.
    pub const GO: u32 = 1;
    /// Execute one instruction, then stop.
    pub const STEP: u32 = 2;
}

/// Indices of [`VcpuDebug::registers`]. The general registers come first, in the order of their
/// encoding.
pub mod register {
    /// Instruction pointer.
    pub const RIP: usize = 16;
    /// Flags.
    pub const RFLAGS: usize = 17;
    /// Number of registers that the debugger can change.
    pub const CHANGEABLE: usize = 18;
    /// Selector of `CS`.
    pub const CS: usize = 18;
    /// Selector of `SS`.
    pub const SS: usize = 19;
    /// Page-table root.
    pub const CR3: usize = 20;
    /// Root page table that translates the kernel image.
    pub const KERNEL_ROOT: usize = 21;
    /// Levels of the page tables: 4, 5, or 0 with paging off. Other formats are not supported.
    pub const LEVELS: usize = 22;
    /// Number of registers.
    pub const COUNT: usize = 23;
}

const _: () = assert!(layout::DEBUG + size_of::<DebugState>() as u64 <= layout::FILTERS);

/// Host services that a stopping vCPU needs.
pub trait DebugHost {
    /// Notifies the debugger that a vCPU has stopped.
    fn notify_debugger(&self);
    /// Waits until this word differs from [`command::WAIT`], or a timeout. Returns `false` if the
    /// VM has ended.
    fn wait(&self, word: &AtomicU32) -> bool;
    /// Drops a stop request that arrived during the stop; called when the vCPU resumes.
    fn on_resume(&self);
}

impl Default for DebugState {
    fn default() -> Self {
        Self {
            wanted: AtomicU32::default(),
            halt_pending: AtomicU32::default(),
            breakpoints: [const { AtomicU64::new(0) }; BREAKPOINTS],
            vcpus: Default::default(),
        }
    }
}

impl DebugState {
    /// Returns whether the debugger requests a stop of all vCPUs.
    pub fn is_wanted(&self) -> bool {
        self.wanted.load(SeqCst) == stop::REQUESTED
    }

    /// Returns whether there is a breakpoint at this address.
    pub fn has_breakpoint(&self, at: u64) -> bool {
        self.breakpoints.iter().any(|place| place.load(SeqCst) == at)
    }

    /// Stops vCPU `index` until the debugger releases it or the VM ends. Returns whether it is to
    /// execute a single instruction. `registers` receives the debugger's changes.
    pub fn halt(
        &self,
        index: usize,
        why: u32,
        registers: &mut [u64; register::COUNT],
        host: &impl DebugHost,
    ) -> bool {
        let Some(own) = self.vcpus.get(index) else { return false };
        for (place, value) in own.registers.iter().zip(&*registers) {
            place.store(*value, SeqCst);
        }
        own.command.store(command::WAIT, SeqCst);
        own.reason.store(why, SeqCst);
        own.halts.fetch_add(1, SeqCst);
        own.halted.store(1, SeqCst);
        host.notify_debugger();
        loop {
            while own.command.load(SeqCst) == command::WAIT
                && (why != reason::WANTED || self.wanted.load(SeqCst) != stop::NONE)
            {
                if !host.wait(&own.command) {
                    return false;
                }
            }
            for (value, place) in registers[..register::CHANGEABLE].iter_mut().zip(&own.registers) {
                *value = place.load(SeqCst);
            }
            host.on_resume();
            own.halted.store(0, SeqCst);
            // Last: a vCPU that is halted without a command is stopped.
            let command = own.command.swap(command::WAIT, SeqCst);
            // The debugger may have found this vCPU stopped after its request, in which case no
            // event follows.
            if command != command::WAIT || self.wanted.load(SeqCst) == stop::NONE {
                return command == command::STEP;
            }
            own.halted.store(1, SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::Cell;

    /// A debugger that requests a stop while the vCPU resumes.
    struct LateRequest<'s> {
        state: &'s DebugState,
        waits: Cell<u32>,
        resumes: Cell<u32>,
    }

    impl DebugHost for LateRequest<'_> {
        fn notify_debugger(&self) {}

        fn wait(&self, word: &AtomicU32) -> bool {
            self.waits.set(self.waits.get() + 1);
            assert_eq!(self.state.vcpus[1].halted.load(SeqCst), 1);
            word.store(command::STEP, SeqCst);
            true
        }

        fn on_resume(&self) {
            self.resumes.set(self.resumes.get() + 1);
            let own = &self.state.vcpus[1];
            assert_eq!(own.halted.load(SeqCst), 1);
            if self.resumes.get() == 1 {
                self.state.wanted.store(stop::REQUESTED, SeqCst);
                own.registers[0].store(9, SeqCst);
            } else {
                // A debugger that looks now does not find a stopped vCPU.
                assert_eq!(own.command.load(SeqCst), command::STEP);
            }
        }
    }

    #[test]
    fn a_request_finds_a_stopped_vcpu_only_if_it_stays_stopped() {
        let state = DebugState::default();
        let (waits, resumes) = (Cell::new(0), Cell::new(0));
        let host = LateRequest { state: &state, waits, resumes };
        let mut registers = [0; register::COUNT];
        // The earlier request has ended already.
        assert!(state.halt(1, reason::WANTED, &mut registers, &host));
        assert_eq!((host.waits.get(), host.resumes.get(), registers[0]), (1, 2, 9));
        let own = &state.vcpus[1];
        assert_eq!((own.halted.load(SeqCst), own.halts.load(SeqCst)), (0, 1));
    }

    /// A host whose VM has ended.
    struct Ended;

    impl DebugHost for Ended {
        fn notify_debugger(&self) {}

        fn wait(&self, _: &AtomicU32) -> bool {
            false
        }

        fn on_resume(&self) {
            unreachable!("nothing resumes the vCPU");
        }
    }

    #[test]
    fn the_end_of_the_vm_ends_a_stop() {
        let mut registers = [0; register::COUNT];
        assert!(!DebugState::default().halt(0, reason::STEP, &mut registers, &Ended));
    }
}
