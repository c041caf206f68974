//! The board around a vCPU.

use hw_arm64::gic::SoftwareInterrupt;
use vmm_dev::arm64::gic::Virq;
use vmm_vcpu::{Outcome, Platform};

use crate::vcpu::Arm64Vcpu;

/// Start of a vCPU, by another one or by the loader.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StartRequest {
    /// Address of the first instruction; with AArch32 bit 0 tells that it is one of T32.
    pub entry: u64,
    /// Value of `x0`; with AArch32 that of `r2` for the first vCPU, and of `r0` for others.
    pub argument: u64,
}

/// Power of a vCPU, by its number as the result of `AFFINITY_INFO` (DEN 0022, section 5.7).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PowerState {
    /// It runs.
    On = 0,
    /// It does not run.
    Off = 1,
    /// It has been started, and does not run yet.
    OnPending = 2,
}

/// Pending for a vCPU, besides the interrupts of [`Arm64Platform::put_virqs`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Interrupts {
    /// The vCPU, which is off, starts.
    pub start: Option<StartRequest>,
    /// Interrupt of the virtual timer, if enabled.
    pub timer: Option<Virq>,
}

/// A guest operation that is not emulated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unknown {
    /// Access to a system register ([`hw_arm64::esr::system_register`]).
    SystemRegister(u32),
    /// Access to a register of coprocessor 15 by AArch32 code
    /// ([`hw_arm64::aarch32::coprocessor_register`]).
    Coprocessor(u32),
    /// Access to memory, at this guest-physical address, by an instruction that the syndrome does
    /// not describe.
    Instruction(u64),
    /// A call of firmware or hypervisor, by its number.
    Call(u64),
    /// An exit, by its syndrome.
    Exit(u64),
}

/// The board around a vCPU. `cpu` is the vCPU's index; its affinity is the same.
pub trait Arm64Platform: Platform<Interrupts = Interrupts> {
    /// Sends an SGI.
    fn send(&mut self, cpu: usize, interrupt: SoftwareInterrupt);
    /// Moves interrupts of the vCPU to its CPU's interface while that has room; returns whether
    /// none remains. The run loop calls it before the guest runs after each start.
    fn put_virqs<V: Arm64Vcpu>(&mut self, cpu: usize, vcpu: &mut V) -> bool;
    /// Handles the end of an interrupt.
    fn end_virq(&mut self, cpu: usize, number: u32);
    /// Starts the vCPU with this affinity. Returns a result of PSCI.
    fn start(&mut self, affinity: u64, request: StartRequest) -> i64;
    /// The vCPU has stopped itself.
    fn stopped(&mut self, cpu: usize);
    /// Returns the power of the vCPU with this affinity; `None`: there is none.
    fn power_state(&mut self, affinity: u64) -> Option<PowerState>;
    /// Ends the VM.
    fn end(&mut self, outcome: Outcome);
    /// Returns whether a device may be at a guest-physical address.
    fn has_device(&self, address: u64) -> bool;
    /// Reads from a device; `None`: none may be at the address.
    #[inline(always)]
    fn read_device(&mut self, cpu: usize, address: u64, size: u8) -> Option<u64> {
        self.has_device(address).then(|| self.mmio_read(cpu, address, size))
    }
    /// Guest-physical address of the vCPU's record of stolen time, in memory that the device tree
    /// leaves out; `None`: there is none.
    fn stolen_time_record(&self, cpu: usize) -> Option<u64>;
    /// Counts an operation that is not emulated, and logs it once.
    fn unknown(&mut self, what: Unknown);
}
