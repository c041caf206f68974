//! Reasons for the return of a run loop and for the end of a VM.

/// Reason for the return of a run loop to the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopReason {
    /// Host-defined event bits: handle the events, pass input to the platform, run again.
    Recall(u64),
    /// The vCPU is halted, or has not been started, until the host's counter reaches this value
    /// (`u64::MAX`: no timer) or until the vCPU is kicked. Run again after either.
    Idle {
        /// Value of the host's counter.
        deadline_ticks: u64,
    },
    /// The VM has ended.
    End(Outcome),
}

/// Result of handling an exit: continue, or leave the loop.
pub type Flow = Result<(), StopReason>;

/// Execution state of a vCPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activity {
    /// Executes instructions.
    Running,
    /// Halted by an instruction that waits for an interrupt.
    Halted,
    /// Not started: waits for another vCPU to start it.
    Parked,
}

/// Reason for the end of a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The guest powered off.
    PowerOff,
    /// The guest requested a reset.
    Reset,
    /// Triple fault of the guest, or a guest state that cannot be run.
    TripleFault,
    /// The guest reported a panic.
    GuestPanic,
    /// The guest chose this exit code, 0 to 63.
    Code(u8),
    /// The host cannot run the vCPU: its error or exit code.
    HostError(u64),
}

impl Outcome {
    /// Exit code of a VM with this outcome (`docs/spec/exit-codes.md`).
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::PowerOff => 0,
            Self::Code(chosen) => chosen,
            Self::HostError(_) => 70,
            Self::GuestPanic => 80,
            Self::TripleFault => 81,
            Self::Reset => 83,
        }
    }
}
