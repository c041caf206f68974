//! Interface between the kernel's vCPUs ([`crate::vcpu`]) and a vendor's virtualization extension.

use abi::vcpu::x86::VcpuState;
use kernel_core::Result;
use kernel_core::object::Translation;
use kernel_core::pool::{Account, Memory};

/// Exit reasons that the kernel handles itself, in the range that [`abi::vcpu::exit`] reserves.
pub mod internal {
    /// A host interrupt, or another event of the host that has been handled.
    pub const HOST_INTERRUPT: u64 = 8;
    /// A machine check.
    pub const MACHINE_CHECK: u64 = 9;
    /// The vTLB needs frames before the guest can continue.
    pub const NEEDS_FRAMES: u64 = 10;
}

/// Result of [`Hvm::enter`].
pub struct GuestExit {
    /// Exit reason: of [`abi::vcpu::exit`], [`abi::vcpu::x86::exit`] or [`internal`].
    pub reason: u64,
    /// Number of hypercalls handled before it, each of which counts as an exit and an entry.
    pub handled: u64,
}

/// A vCPU's control structure of a virtualization extension (SVM: VMCB).
///
/// General-purpose registers are in the state page; the extension keeps the others, and copies them
/// by groups. All functions that concern a vCPU are called on its CPU. Unless stated otherwise the
/// kernel lock is held.
pub trait Hvm: Clone + 'static {
    /// State of the extension on one CPU.
    type Local: 'static;
    /// Its initial value.
    const LOCAL: Self::Local;
    /// Frames that the extension needs for host state on each CPU.
    const HOST_FRAMES: u32;

    /// Initialises what all CPUs share. Called on the first CPU, before all others.
    fn init();
    /// Enables the extension on this CPU, which owns the frames of host state at `host`, a physical
    /// address.
    fn init_cpu(local: &Self::Local, host: u64);
    /// Returns whether guests can run.
    fn is_ready() -> bool;

    /// Allocates the structure of a vCPU in its reset state.
    fn new(memory: &Memory, factory: Account, translation: Translation) -> Result<Self>;
    /// Frees it.
    fn free(&self, memory: &Memory);

    /// Returns whether the guest needs [`Hvm::flush`] for a reason of the extension.
    fn needs_flush(&self, local: &Self::Local) -> bool;
    /// Makes the next entry start without TLB entries of the guest, with second-stage tables at
    /// `root`, a physical address.
    fn flush(&self, local: &Self::Local, root: u64);
    /// The second-stage tables at `root` have lost mappings.
    fn unmapped(&self, root: u64);
    /// Prepares the guest's memory for an entry, after [`Hvm::flush`]; frames are charged to
    /// `factory`.
    fn prepare_memory(&self, memory: &Memory, factory: Account, state: &VcpuState) -> Result<()>;
    /// Sets the I/O permission map, at a physical address.
    fn set_port_map(&self, map: u64);
    /// Takes the window and the event to inject from the state page, before an entry.
    fn prepare(&self, state: &VcpuState);
    /// Runs the guest until it exits, except for [`abi::vcpu::HYPERCALL_VERSION`], without the
    /// kernel lock. A host interrupt that causes the exit is then in `PerCpu::pending`.
    fn enter(&self, local: &Self::Local, state: &VcpuState) -> GuestExit;
    /// Brings the event, the window and the task priority in the state page up to date after an
    /// exit.
    fn finish(&self, state: &VcpuState);
    /// Writes the description of the last exit to the state page. Returns the groups that its
    /// handler needs.
    fn describe(&self, reason: u64, state: &VcpuState) -> u64;

    /// Copies groups to the state page.
    fn read_groups(&self, state: &VcpuState, groups: u64);
    /// Copies `IP`, `CONTROL` and `CODE`, as far as they are in `groups`: the groups of most exits.
    fn read_code(&self, state: &VcpuState, groups: u64);
    /// Takes over the group `IP`.
    fn write_ip(&self, state: &VcpuState);
    /// Takes over changed groups other than `IP` and those of [`crate::fpu`].
    fn write_groups(&self, state: &VcpuState, dirty: u64);

    /// Instruction pointer.
    fn ip(&self) -> u64;
    /// Returns whether the last exit was a hypercall with this number by the guest's kernel, and
    /// then advances the guest beyond it.
    fn skip_kernel_hypercall(&self, number: u64) -> bool;
    /// Returns whether a host interrupt hit the guest in an interrupt shadow that the next entry
    /// would lose.
    fn loses_shadow(&self) -> bool;
}
