//! Memory of a vCPU: its processor structures and its state page.

use core::cell::Cell;
use core::ptr;

use abi::vcpu::RunControl;
use abi::vcpu::x86::{VcpuState, group};
use kernel_core::arch::{Arch, ArchVcpu};
use kernel_core::object::{Notification, Translation, Vcpu, Vm};
use kernel_core::pool::{Account, Frame, Memory};
use kernel_core::{Kernel, Result, count};

use crate::fpu::{ExtendedState, Owner};
use crate::hvm::Hvm;
use crate::{Extension, X86};

/// Processor structures of a vCPU.
#[derive(Clone)]
pub struct VcpuFrames {
    /// Control structure of the virtualization extension.
    pub hvm: Extension,
    /// Registers that stay loaded in the CPU.
    pub extended: ExtendedState,
    state: *const VcpuState,
    /// Objects of the vCPU, cached over many entries. Objects do not move, and these exist as long
    /// as `Memory::destroyed_count` is unchanged.
    pub vm: Cell<*const Vm<X86>>,
    /// See `vm`.
    pub notification: Cell<*const Notification<X86>>,
    /// See `vm`.
    pub destroyed_count: Cell<u64>,
    /// Generation of the VM's space that the vCPU was last entered with.
    pub vm_generation: Cell<u64>,
    /// TSC value at which the VMM's thread blocked because the guest is at `HLT`; 0: it is not
    /// blocked.
    pub halted: Cell<u64>,
}

impl ArchVcpu for VcpuFrames {
    fn new(memory: &Memory, factory: Account, state: Frame, kind: Translation) -> Result<Self> {
        let hvm = Extension::new(memory, factory, kind)?;
        let extended = ExtendedState::new(memory, factory).inspect_err(|_| hvm.free(memory))?;
        let this = Self {
            hvm,
            extended,
            state: memory.address(state).cast(),
            vm: Cell::new(ptr::null()),
            notification: Cell::new(ptr::null()),
            destroyed_count: Cell::new(u64::MAX),
            vm_generation: Cell::new(0),
            halted: Cell::new(0),
        };
        this.state().run.deadline.set(abi::FOREVER);
        Ok(this)
    }

    fn free(&self, memory: &Memory) {
        self.hvm.free(memory);
        self.extended.free(memory);
    }

    fn count_preemption(&self) {
        self.state().run.preemptions.add(1);
    }
}

impl VcpuFrames {
    /// The state page. The VMM may write it at any time: each field is an atomic word, read once.
    #[inline(always)]
    pub fn state(&self) -> &VcpuState {
        // SAFETY: a frame that exists as long as the vCPU; all fields are atomic integers, any
        // value is valid.
        unsafe { &*self.state }
    }

    /// Copies groups to the state page. The caller marks them valid.
    pub fn read_groups(&self, groups: u64) {
        self.hvm.read_groups(self.state(), groups);
        if groups & group::XCR0 != 0 {
            self.state().xcr0.set(self.extended.xcr0());
        }
    }

    /// Applies groups other than `IP` that the VMM has changed. `is_owner`: the CPU holds this
    /// vCPU's extended state. Fails for an XCR0 that the machine does not support.
    #[cold]
    pub fn write_slow_groups(&self, dirty: u64, is_owner: bool) -> Result<()> {
        let state = self.state();
        self.hvm.write_groups(state, dirty);
        if dirty & group::VECTORS != 0 {
            self.extended.write_vectors(state, is_owner);
        }
        if dirty & group::XCR0 != 0 {
            self.extended.set_xcr0(state.xcr0.get(), is_owner)?;
        }
        Ok(())
    }
}

/// Counts the exit of [`Hvm::enter`].
#[inline(always)]
pub fn count_exit(kernel: &Kernel<X86>, run: &RunControl, handled: u64) {
    run.entries.add(1);
    if handled != 0 {
        // Each counts as an exit and another entry.
        run.entries.add(handled);
        run.handled_in_kernel.add(handled);
        add(&kernel.counters.vm_entries, handled);
        add(&kernel.counters.handled_in_kernel, handled);
    }
}

/// Counts an exit that the kernel handles.
#[inline(always)]
pub fn count_handled(kernel: &Kernel<X86>, run: &RunControl) {
    run.handled_in_kernel.add(1);
    count(&kernel.counters.handled_in_kernel);
}

/// Returns whether the kernel may wait at the guest's `HLT`.
#[inline(always)]
pub fn may_halt(state: &VcpuState) -> bool {
    state.run.halt.get() != 0 && state.window.get() | state.inject.get() == 0
}

fn add(counter: &Cell<u64>, value: u64) {
    counter.set(counter.get() + value);
}

/// Copies groups of a vCPU's state to its state page, including state loaded in the CPU, but not
/// those that another CPU may have loaded. `owner` is the CPU's.
pub fn read_groups(memory: &Memory, owner: &Owner, vcpu: &Vcpu<X86>, groups: u64) {
    let (frames, state) = (&vcpu.arch, vcpu.arch.state());
    let is_here = vcpu.cpu.get().is_none_or(|cpu| cpu == X86::this_cpu());
    let groups = if is_here { groups } else { groups & !(group::XCR0 | group::VECTORS) };
    if groups & (group::XCR0 | group::VECTORS) != 0 {
        let owner = owner.vcpu().and_then(|owner| memory.get(owner));
        let is_owner = owner.is_some_and(|owner| ptr::eq(owner, vcpu));
        if is_owner {
            frames.extended.save_xcr0();
        }
        if groups & group::VECTORS != 0 {
            frames.extended.read_vectors(state, is_owner);
        }
    }
    frames.read_groups(groups);
    state.run.valid.set(state.run.valid.get() | groups & group::ALL);
}
