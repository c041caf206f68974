//! A virtual CPU and its state page.

use core::sync::atomic::{AtomicU32, Ordering};

#[cfg(target_arch = "aarch64")]
pub use abi::vcpu::arm64::VcpuState;
#[cfg(target_arch = "x86_64")]
pub use abi::vcpu::x86::VcpuState;
use abi::{Op, PAGE_SIZE, Selector, Status};
use proto::start::STATE_PAGES;
use proto::system::MAX_VCPUS;

use crate::objects::{Factory, Notification, Vm};
use crate::syscall::call;

/// Bit mask of state pages in use; a page is never used for a second vCPU.
static STATE_PAGES_IN_USE: AtomicU32 = AtomicU32::new(0);

/// A virtual CPU. Dropping it does not destroy the kernel's object.
pub struct Vcpu {
    selector: Selector,
    state: &'static VcpuState,
}

/// A virtual CPU that another thread runs: its state page, whose fields are atomic.
#[derive(Clone, Copy)]
pub struct SharedVcpu {
    selector: Selector,
    state: &'static VcpuState,
}

impl SharedVcpu {
    /// Returns the state page.
    pub fn state(&self) -> &'static VcpuState {
        self.state
    }

    /// Makes the kernel look at the state page again; returns whether a thread is in
    /// [`Vcpu::run`].
    pub fn notify(&self) -> Result<bool, Status> {
        // SAFETY: changes no memory of this program but the state page, which is made of atomics.
        unsafe { call(Op::VcpuNotify, [self.selector, 0, 0, 0, 0, 0]) }.map(|words| words[0] != 0)
    }
}

impl Vcpu {
    /// Creates virtual CPU `index` (below [`MAX_VCPUS`]) of a VM; events of `notification` make
    /// [`Vcpu::run`] return.
    pub fn create(
        factory: Factory,
        slot: Selector,
        vm: Vm,
        index: u32,
        notification: Notification,
    ) -> Result<Self, Status> {
        if index as usize >= MAX_VCPUS
            || STATE_PAGES_IN_USE.fetch_or(1 << index, Ordering::Relaxed) & 1 << index != 0
        {
            return Err(Status::Busy);
        }
        let address = STATE_PAGES + index as u64 * PAGE_SIZE;
        factory.vcpu(slot, vm, address, notification)?;
        // SAFETY: the kernel has mapped a page of its own there, which exists as long as the task;
        // all fields are atomic integers.
        let state = unsafe { &*core::ptr::with_exposed_provenance(address as usize) };
        Ok(Self { selector: slot, state })
    }

    /// Returns the state page.
    #[inline(always)]
    pub fn state(&self) -> &VcpuState {
        self.state
    }

    /// Makes this vCPU the target `index` of interrupts that the guest of `vm`, its VM, sends by
    /// software.
    pub fn become_sgi_target(&self, vm: Vm, index: usize) -> Result<(), Status> {
        let arguments = [vm.selector(), index as u64, self.selector, 0, 0, 0];
        // SAFETY: changes no memory.
        unsafe { call(Op::VmSgiTarget, arguments) }.map(drop)
    }

    /// Returns the vCPU for other threads.
    pub fn shared(&self) -> SharedVcpu {
        SharedVcpu { selector: self.selector, state: self.state }
    }

    /// Runs the guest until it exits; the exit reason is in the state page.
    #[inline(always)]
    pub fn run(&mut self) -> Result<(), Status> {
        // SAFETY: changes only the state page, which is made of atomics.
        unsafe { call(Op::VcpuRun, [self.selector, 0, 0, 0, 0, 0]) }.map(drop)
    }

    /// Fetches state groups into the state page.
    pub fn fetch(&mut self, groups: u64) -> Result<(), Status> {
        // SAFETY: as for `run`.
        unsafe { call(Op::VcpuState, [self.selector, groups, 0, 0, 0, 0]) }.map(drop)
    }
}
