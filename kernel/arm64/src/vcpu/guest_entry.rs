//! Objects of `VcpuRun`.

use core::cell::Cell;

use abi::vcpu::arm64::VcpuState;
use kernel_core::Kernel;
use kernel_core::object::{Notification, Thread, Vcpu, Vm};
use kernel_core::pool::{Cached, Memory};

use crate::Arm64;

/// Cached look-ups of a vCPU's VM and notification.
pub type Lookup = Cell<(Cached<Vm<Arm64>>, Cached<Notification<Arm64>>)>;

/// Objects of an entry, looked up under the kernel lock.
#[derive(Clone, Copy)]
pub struct GuestEntry<'a> {
    /// The thread, in `VcpuRun`.
    pub thread: &'a Thread<Arm64>,
    /// The vCPU that it runs.
    pub vcpu: &'a Vcpu<Arm64>,
    /// VM of the vCPU.
    pub vm: &'a Vm<Arm64>,
    /// Notification of the vCPU.
    pub notification: &'a Notification<Arm64>,
    /// State page of the vCPU.
    pub state: &'a VcpuState,
}

impl<'a> GuestEntry<'a> {
    /// Entry of `vcpu` by `thread`. `None` if its VM or notification no longer exists.
    #[inline(always)]
    pub fn new(
        memory: &'a Memory,
        thread: &'a Thread<Arm64>,
        vcpu: &'a Vcpu<Arm64>,
    ) -> Option<Self> {
        let lookup = &vcpu.arch.lookup;
        let (vm, notification) = lookup.get();
        if let (Some(vm), Some(notification)) = (memory.cached(vm), memory.cached(notification)) {
            return Some(Self { thread, vcpu, vm, notification, state: vcpu.arch.state() });
        }
        lookup.set((memory.cache(vcpu.vm)?, memory.cache(vcpu.notification)?));
        let (vm, notification) = (memory.get(vcpu.vm)?, memory.get(vcpu.notification)?);
        Some(Self { thread, vcpu, vm, notification, state: vcpu.arch.state() })
    }

    /// Entry of the CPU's current thread, if that is in `VcpuRun`.
    #[inline(always)]
    pub fn current(kernel: &'a Kernel<Arm64>, cpu_index: usize) -> Option<Self> {
        let thread = kernel.memory.get(kernel.cpus[cpu_index].current.get()?)?;
        let vcpu = kernel.vcpu_of(thread, thread.state.get().vcpu()?)?;
        Self::new(&kernel.memory, thread, vcpu)
    }
}
