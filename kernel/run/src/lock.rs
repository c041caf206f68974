//! The kernel lock, and TLB shootdown, which CPUs serve while they wait for it.

use core::cell::UnsafeCell;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kernel_core::Kernel;
use kernel_core::arch::Arch;
use kernel_core::pool::Memory;

use crate::Processor;

/// The kernel's state and its lock.
pub struct KernelLock<A: Arch> {
    kernel: UnsafeCell<Kernel<A>>,
    is_published: AtomicBool,
    is_held: AtomicBool,
    /// CPUs that must flush their TLBs (bit mask).
    shootdown: AtomicU64,
}

// SAFETY: the state is reached only through `Guard`, which exists once at a time.
unsafe impl<A: Arch> Sync for KernelLock<A> {}

impl<A: Arch> KernelLock<A> {
    /// The lock before [`publish`]: held.
    #[expect(clippy::new_without_default, reason = "only in constants")]
    pub const fn new() -> Self {
        Self {
            kernel: UnsafeCell::new(Kernel::new()),
            is_published: AtomicBool::new(false),
            is_held: AtomicBool::new(true),
            shootdown: AtomicU64::new(0),
        }
    }
}

/// Access to the kernel's state; exists while the lock is held.
pub struct Guard<A: Processor>(PhantomData<*const A>);

impl<A: Processor> Deref for Guard<A> {
    type Target = Kernel<A>;
    #[inline(always)]
    fn deref(&self) -> &Kernel<A> {
        // SAFETY: a guard exists only while the lock is held.
        unsafe { &*A::kernel_lock().kernel.get() }
    }
}

impl<A: Processor> DerefMut for Guard<A> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Kernel<A> {
        // SAFETY: as in `deref`.
        unsafe { &mut *A::kernel_lock().kernel.get() }
    }
}

/// Initialises the kernel's state, with the lock held.
pub fn publish<A: Processor>(memory: Memory) -> Guard<A> {
    assert!(!A::kernel_lock().is_published.swap(true, Ordering::Relaxed));
    // Only once, by the assertion; the lock starts out held, so no other CPU has access.
    let mut kernel = Guard(PhantomData);
    kernel.memory = memory;
    kernel
}

/// Waits until [`publish`] has been called.
pub fn wait_until_published<A: Processor>() {
    while !A::kernel_lock().is_published.load(Ordering::Acquire) {
        A::relax();
    }
}

/// Acquires the kernel lock for CPU `cpu_index`. Serves shootdowns while waiting, since the lock
/// holder may wait for this CPU's response.
#[inline(always)]
pub fn lock<A: Processor>(cpu_index: usize) -> Guard<A> {
    while A::kernel_lock().is_held.swap(true, Ordering::Acquire) {
        wait_for_lock::<A>(cpu_index);
    }
    A::lock_acquired();
    Guard(PhantomData)
}

#[cold]
fn wait_for_lock<A: Processor>(cpu_index: usize) {
    while A::kernel_lock().is_held.load(Ordering::Relaxed) {
        serve_shootdown::<A>(cpu_index);
        A::relax();
    }
}

fn serve_shootdown<A: Processor>(cpu_index: usize) {
    let shootdown = &A::kernel_lock().shootdown;
    if shootdown.load(Ordering::Acquire) & 1 << cpu_index != 0 {
        A::flush_local();
        shootdown.fetch_and(!(1 << cpu_index), Ordering::Release);
    }
}

/// Releases the kernel lock.
#[inline(always)]
pub fn unlock<A: Processor>(_guard: Guard<A>) {
    A::lock_released();
    A::kernel_lock().is_held.store(false, Ordering::Release);
}

/// Makes these CPUs (bit mask) flush their TLBs, and waits until they have: [`Arch::shootdown`] by
/// inter-processor interrupts.
pub fn shoot_down<A: Processor>(cpus: u64) {
    let shootdown = &A::kernel_lock().shootdown;
    shootdown.fetch_or(cpus, Ordering::AcqRel);
    (0..u64::BITS as usize).filter(|cpu| cpus & 1 << cpu != 0).for_each(A::kick);
    while shootdown.load(Ordering::Acquire) & cpus != 0 {
        A::relax();
    }
}
