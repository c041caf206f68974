//! Thread and vCPU of `VcpuRun`, across the release of the kernel lock.

use kernel_core::Kernel;
use kernel_core::object::{Notification, Thread, Vcpu, Vm};
use kernel_core::pool::Memory;

use crate::X86;

/// Thread and vCPU of an entry, looked up under the kernel lock.
#[derive(Clone, Copy)]
pub struct GuestEntry<'a> {
    /// The thread, in `VcpuRun`.
    pub thread: &'a Thread<X86>,
    /// The vCPU that it runs.
    pub vcpu: &'a Vcpu<X86>,
}

/// A [`GuestEntry`] across release of the kernel lock.
pub struct UnlockedEntry {
    thread: *const Thread<X86>,
    vcpu: *const Vcpu<X86>,
}

impl<'a> GuestEntry<'a> {
    /// Entry of `vcpu` by `thread`. `None` if its VM or notification no longer exists.
    #[inline(always)]
    pub fn new(
        kernel: &'a Kernel<X86>,
        thread: &'a Thread<X86>,
        vcpu: &'a Vcpu<X86>,
    ) -> Option<Self> {
        if vcpu.arch.destroyed_count.get() != kernel.memory.destroyed_count() {
            cache_objects(&kernel.memory, vcpu)?;
        }
        Some(Self { thread, vcpu })
    }

    /// Entry of the CPU's current thread, if that is in `VcpuRun`.
    #[cold]
    #[inline(never)]
    pub fn current(kernel: &'a Kernel<X86>, cpu_index: usize) -> Option<Self> {
        let thread = kernel.memory.get(kernel.cpus[cpu_index].current.get()?)?;
        Self::new(kernel, thread, kernel.memory.get(thread.state.get().vcpu()?)?)
    }

    /// Revalidates an entry after the lock was re-acquired. `destroyed_count`: value before its
    /// release.
    #[inline(always)]
    pub fn revalidate(
        kernel: &'a Kernel<X86>,
        unlocked: &UnlockedEntry,
        destroyed_count: u64,
        cpu_index: usize,
    ) -> Option<Self> {
        if destroyed_count != kernel.memory.destroyed_count() {
            return Self::current(kernel, cpu_index);
        }
        // SAFETY: objects do not move, and none was destroyed since these were references.
        Some(unsafe { Self { thread: &*unlocked.thread, vcpu: &*unlocked.vcpu } })
    }

    /// This entry, for [`GuestEntry::revalidate`].
    #[inline(always)]
    pub fn unlocked(&self) -> UnlockedEntry {
        UnlockedEntry { thread: self.thread, vcpu: self.vcpu }
    }

    /// VM of the vCPU.
    #[inline(always)]
    pub fn vm(&self) -> &'a Vm<X86> {
        // SAFETY: no object was destroyed since the look-up, as checked when the entry was made;
        // the lock is held.
        unsafe { &*self.vcpu.arch.vm.get() }
    }

    /// Notification of the vCPU.
    #[inline(always)]
    pub fn notification(&self) -> &'a Notification<X86> {
        // SAFETY: as above.
        unsafe { &*self.vcpu.arch.notification.get() }
    }
}

#[cold]
#[inline(never)]
fn cache_objects(memory: &Memory, vcpu: &Vcpu<X86>) -> Option<()> {
    vcpu.arch.vm.set(memory.get(vcpu.vm)?);
    vcpu.arch.notification.set(memory.get(vcpu.notification)?);
    vcpu.arch.destroyed_count.set(memory.destroyed_count());
    Some(())
}
