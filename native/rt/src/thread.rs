//! Additional threads of this program.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use abi::{Item, Op, PAGE_SHIFT, PAGE_SIZE, Selector, Status, ops};
use proto::start::MAX_THREADS;

use crate::memory::Window;
use crate::objects::{Factory, OwnThread, SchedContext, ServerThread, yield_now};
use crate::processor::start_of_thread;
use crate::syscall::call;
use crate::time;

/// Stacks of the additional threads, lowest and highest address; thread `n` of the program has
/// entry `n - 1`.
static STACKS: [(AtomicU64, AtomicU64); MAX_THREADS] =
    [const { (AtomicU64::new(0), AtomicU64::new(0)) }; MAX_THREADS];
/// Message page of the first thread; those of the other threads follow.
static FIRST_PAGE: AtomicU64 = AtomicU64::new(0);

/// A stack of `BYTES` bytes for a thread, to be placed in a static. Its lowest page becomes the
/// guard page.
#[repr(C, align(4096))]
pub struct Stack<const BYTES: usize> {
    memory: UnsafeCell<[u8; BYTES]>,
    in_use: AtomicBool,
}

// SAFETY: `spawn` uses the memory once, for the thread that runs on it.
unsafe impl<const BYTES: usize> Sync for Stack<BYTES> {}

impl<const BYTES: usize> Stack<BYTES> {
    /// Creates a stack that is not in use.
    #[allow(clippy::new_without_default, reason = "a stack is only of use in a static")]
    pub const fn new() -> Self {
        assert!(BYTES >= 3 * PAGE_SIZE as usize && BYTES.is_multiple_of(PAGE_SIZE as usize));
        Self { memory: UnsafeCell::new([0; BYTES]), in_use: AtomicBool::new(false) }
    }
}

/// Sets the message page of the first thread, at start.
pub(crate) fn set_first_page(address: u64) {
    FIRST_PAGE.store(address, Ordering::Relaxed);
}

/// Returns the message page of the first thread.
#[cfg_attr(not(target_os = "none"), allow(dead_code, reason = "only asked when panicking"))]
pub(crate) fn first_page() -> u64 {
    FIRST_PAGE.load(Ordering::Relaxed)
}

/// Returns the index of the running thread, determined by its stack. 0 is the first thread.
fn thread_index() -> u64 {
    let here = 0u8;
    let address = (&raw const here) as u64;
    STACKS
        .iter()
        .position(|(low, high)| {
            (low.load(Ordering::Relaxed)..high.load(Ordering::Relaxed)).contains(&address)
        })
        .map_or(0, |index| index as u64 + 1)
}

/// Returns the address of the running thread's message page.
pub(crate) fn message_page() -> u64 {
    FIRST_PAGE.load(Ordering::Relaxed) + thread_index() * PAGE_SIZE
}

/// Resources of a new thread.
pub struct ThreadResources {
    /// Factory whose quota pays for it.
    pub factory: Factory,
    /// This task.
    pub task: Selector,
    /// Free slot for the thread.
    pub slot: Selector,
    /// CPU of the thread.
    pub cpu: u32,
    /// Scheduling context of the thread.
    pub sched: SchedContext,
}

/// Starts a thread of this program in `body`, with an argument. It runs until it is stopped.
pub fn spawn<const BYTES: usize>(
    resources: ThreadResources,
    stack: &'static Stack<BYTES>,
    body: extern "C" fn(u64) -> !,
    argument: u64,
) -> Result<OwnThread, Status> {
    let helper = HelperThread::on(resources, stack)?;
    start_thread(helper.thread, helper.top_of_stack, body, argument)?;
    Ok(helper.thread)
}

/// Creates a stopped thread with a scheduling context and a stack at `low..high`, whose lowest page
/// becomes the guard page.
///
/// # Safety
/// Only this thread uses the stack's memory.
unsafe fn create_thread(
    resources: ThreadResources,
    low: u64,
    high: u64,
) -> Result<OwnThread, Status> {
    let index = STACKS
        .iter()
        .position(|entry| {
            entry.0.compare_exchange(0, low, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        })
        .ok_or(Status::Overflow)?;
    STACKS[index].1.store(high, Ordering::Relaxed);
    let page = FIRST_PAGE.load(Ordering::Relaxed) + (index as u64 + 1) * PAGE_SIZE;
    let thread =
        resources.factory.own_thread(resources.slot, resources.task, resources.cpu, page)?;
    thread.bind_sched(resources.sched)?;

    let guard = Item::memory(0, abi::rights::ALL).pack();
    // SAFETY: the page is part of the stack, which holds no Rust object yet; none will be placed
    // there because access faults.
    unsafe { call(Op::Unmap, [guard, low >> PAGE_SHIFT, ops::UNMAP_SELF, 0, 0, 0]) }?;
    Ok(thread)
}

/// A thread that executes functions in parallel with the first one, repeatedly.
pub struct HelperThread {
    thread: OwnThread,
    top_of_stack: u64,
}

impl HelperThread {
    /// Creates an idle helper. `stack` has at least three pages, the lowest of which becomes the
    /// guard page.
    pub fn new(resources: ThreadResources, stack: Window) -> Result<Self, Status> {
        let (low, high) = (stack.base(), stack.base() + stack.length());
        if stack.length() < 3 * PAGE_SIZE {
            return Err(Status::BadArgument);
        }
        // SAFETY: no Rust object is in a window, and only this program has access to this one.
        let thread = unsafe { create_thread(resources, low, high) }?;
        Ok(Self { thread, top_of_stack: high })
    }

    /// Creates an idle helper on a stack, once.
    pub fn on<const BYTES: usize>(
        resources: ThreadResources,
        stack: &'static Stack<BYTES>,
    ) -> Result<Self, Status> {
        if stack.in_use.swap(true, Ordering::Relaxed) {
            return Err(Status::Busy);
        }
        let low = stack.memory.get() as u64;
        let high = low + BYTES as u64;
        // SAFETY: the memory is the stack's, which this call has just claimed.
        let thread = unsafe { create_thread(resources, low, high) }?;
        Ok(Self { thread, top_of_stack: high })
    }
}

/// Work of a helper.
struct Job<'a> {
    body: &'a (dyn Fn(usize) + Sync),
    index: usize,
    thread: OwnThread,
    is_done: AtomicBool,
}

/// Runs `body(n + 1)` on helper `n` while this thread runs `main`, and returns when all have
/// returned. Stops a helper that has not returned `timeout` TSC ticks after `main`, at any
/// instruction: the second result is `false` then, and locks that it held stay locked. Returns the
/// first error if a helper does not start; then neither `main` nor any helper runs.
pub fn run_parallel<T>(
    helpers: &mut [HelperThread],
    timeout: u64,
    body: &(dyn Fn(usize) + Sync),
    main: impl FnOnce() -> T,
) -> Result<(T, bool), Status> {
    match helpers {
        [] => Ok((main(), true)),
        helpers => run_with_helpers(helpers, timeout, body, main),
    }
}

#[inline(never)]
fn run_with_helpers<T>(
    helpers: &mut [HelperThread],
    timeout: u64,
    body: &(dyn Fn(usize) + Sync),
    main: impl FnOnce() -> T,
) -> Result<(T, bool), Status> {
    let job = |index: usize| Job {
        body,
        index: index + 1,
        thread: helpers[index].thread,
        is_done: AtomicBool::new(false),
    };
    let jobs: [Option<Job>; MAX_THREADS] =
        core::array::from_fn(|index| (index < helpers.len()).then(|| job(index)));
    let stop = |jobs: &[Option<Job>]| {
        for job in jobs.iter().flatten() {
            // It fails only if the thread has stopped itself.
            let _ = job.thread.stop();
        }
    };
    for (index, (job, helper)) in jobs.iter().flatten().zip(helpers.iter()).enumerate() {
        let argument = (&raw const *job) as u64;
        if let Err(status) = start_thread(helper.thread, helper.top_of_stack, run_job, argument) {
            stop(&jobs[..index]);
            return Err(status);
        }
    }
    let result = main();
    let deadline = time::tsc().saturating_add(timeout);
    let all_returned = || jobs.iter().flatten().all(|job| job.is_done.load(Ordering::Acquire));
    while !all_returned() && time::tsc() < deadline {
        yield_now();
    }
    stop(&jobs);
    Ok((result, all_returned()))
}

/// Entry of a helper; the argument is the address of its job.
extern "C" fn run_job(job: u64) -> ! {
    // SAFETY: `run_parallel` passes a job's address and does not return before the thread has
    // stopped.
    let job = unsafe { &*core::ptr::with_exposed_provenance::<Job>(job as usize) };
    (job.body)(job.index);
    let thread = job.thread;
    job.is_done.store(true, Ordering::Release);
    loop {
        let _ = thread.stop();
    }
}

/// Starts a thread with an empty stack.
fn start_thread(
    thread: OwnThread,
    top_of_stack: u64,
    body: extern "C" fn(u64) -> !,
    argument: u64,
) -> Result<(), Status> {
    let first = core::ptr::with_exposed_provenance_mut::<u64>(top_of_stack as usize - 16);
    // SAFETY: the top of the stack, which is the caller's until the thread runs.
    unsafe {
        first.write(body as usize as u64);
        first.add(1).write(argument);
    }
    let entry = start_of_thread as *const () as u64;
    // SAFETY: the thread starts there on a stack of its own.
    unsafe { call(Op::ThreadStart, [thread.selector(), entry, top_of_stack - 16, 0, 0, 0]) }
        .map(drop)
}

/// Stops a thread at any instruction and restarts it from the beginning. Its resources leak.
#[cfg(feature = "probe")]
pub fn restart<const BYTES: usize>(
    thread: OwnThread,
    stack: &'static Stack<BYTES>,
    body: extern "C" fn(u64) -> !,
    argument: u64,
) -> Result<(), Status> {
    thread.stop()?;
    start_thread(thread, stack.memory.get() as u64 + BYTES as u64, body, argument)
}
