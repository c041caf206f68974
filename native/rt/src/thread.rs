//! Further threads of this program.

use core::arch::naked_asm;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use abi::{Item, Op, PAGE_SHIFT, PAGE_SIZE, Selector, Status, ops};
use proto::start::MAX_THREADS;

use crate::memory::Window;
use crate::objects::{Factory, OwnThread, SchedContext, Serves, yield_now};
use crate::syscall::call;
use crate::time;

/// Stacks of the further threads, lowest and highest address; thread `n` of the program has entry `n - 1`.
static STACKS: [(AtomicU64, AtomicU64); MAX_THREADS] =
    [const { (AtomicU64::new(0), AtomicU64::new(0)) }; MAX_THREADS];
/// Message page of the first thread; the others' follow.
static FIRST_PAGE: AtomicU64 = AtomicU64::new(0);

/// A stack of `BYTES` bytes for a thread, to be put into a static. The lowest page of it becomes the guard.
#[repr(C, align(4096))]
pub struct Stack<const BYTES: usize> {
    memory: UnsafeCell<[u8; BYTES]>,
    taken: AtomicBool,
}

// SAFETY: the memory is handed out once, to the thread that runs on it.
unsafe impl<const BYTES: usize> Sync for Stack<BYTES> {}

impl<const BYTES: usize> Stack<BYTES> {
    /// A stack that is not in use.
    #[allow(clippy::new_without_default, reason = "a stack is only of use in a static")]
    pub const fn new() -> Self {
        assert!(BYTES >= 3 * PAGE_SIZE as usize && BYTES.is_multiple_of(PAGE_SIZE as usize));
        Self { memory: UnsafeCell::new([0; BYTES]), taken: AtomicBool::new(false) }
    }
}

/// Sets the message page of the first thread, at start.
pub(crate) fn set_first_page(address: u64) {
    FIRST_PAGE.store(address, Ordering::Relaxed);
}

/// Message page of the first thread.
#[cfg_attr(not(target_os = "none"), allow(dead_code, reason = "only asked when panicking"))]
pub(crate) fn first_page() -> u64 {
    FIRST_PAGE.load(Ordering::Relaxed)
}

/// The number of the running thread, by the stack that it runs on. 0 is the first.
fn number() -> u64 {
    let here = 0u8;
    let address = (&raw const here) as u64;
    STACKS
        .iter()
        .position(|(low, high)| {
            (low.load(Ordering::Relaxed)..high.load(Ordering::Relaxed)).contains(&address)
        })
        .map_or(0, |index| index as u64 + 1)
}

/// Address of the running thread's message page.
pub(crate) fn message_page() -> u64 {
    FIRST_PAGE.load(Ordering::Relaxed) + number() * PAGE_SIZE
}

/// What a thread is made of.
pub struct Making {
    /// The factory that pays.
    pub factory: Factory,
    /// This task.
    pub task: Selector,
    /// The free slot for the thread.
    pub slot: Selector,
    /// Its CPU.
    pub cpu: u32,
    /// What it runs on.
    pub sched: SchedContext,
}

/// Starts a thread of this program in `body`, with an argument. It runs until it is stopped.
pub fn spawn<const BYTES: usize>(
    making: Making,
    stack: &'static Stack<BYTES>,
    body: extern "C" fn(u64) -> !,
    argument: u64,
) -> Result<OwnThread, Status> {
    if stack.taken.swap(true, Ordering::Relaxed) {
        return Err(Status::Busy);
    }
    let low = stack.memory.get() as u64;
    let high = low + BYTES as u64;
    // SAFETY: the memory is the stack's, which was taken just now.
    let thread = unsafe { make(making, low, high) }?;
    begin(thread, high, body, argument)?;
    Ok(thread)
}

/// Makes a stopped thread that has time and a stack at `low..high`, whose lowest page becomes the guard.
///
/// # Safety
/// The stack's memory is this thread's alone.
unsafe fn make(making: Making, low: u64, high: u64) -> Result<OwnThread, Status> {
    let index = STACKS
        .iter()
        .position(|entry| {
            entry.0.compare_exchange(0, low, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        })
        .ok_or(Status::Overflow)?;
    STACKS[index].1.store(high, Ordering::Relaxed);
    let page = FIRST_PAGE.load(Ordering::Relaxed) + (index as u64 + 1) * PAGE_SIZE;
    let thread = making.factory.own_thread(making.slot, making.task, making.cpu, page)?;
    thread.bind_sched(making.sched)?;

    let guard = Item::memory(0, abi::rights::ALL).pack();
    // SAFETY: the page is part of the stack, which no Rust object lives in yet; nothing will be
    // put there because access faults.
    unsafe { call(Op::Unmap, [guard, low >> PAGE_SHIFT, ops::UNMAP_SELF, 0, 0, 0]) }?;
    Ok(thread)
}

/// A thread that helps the first one for as long as a function runs, again and again.
pub struct Hand {
    thread: OwnThread,
    top_of_stack: u64,
}

impl Hand {
    /// A thread that does nothing yet. Its stack is `stack`, of at least three pages, the lowest of which becomes
    /// the guard.
    pub fn new(making: Making, stack: Window) -> Result<Self, Status> {
        let (low, high) = (stack.base(), stack.base() + stack.length());
        if stack.length() < 3 * PAGE_SIZE {
            return Err(Status::BadArgument);
        }
        // SAFETY: no Rust object lives in a window, and nobody but this program knows this one.
        let thread = unsafe { make(making, low, high) }?;
        Ok(Self { thread, top_of_stack: high })
    }
}

/// What a hand does.
struct Job<'a> {
    body: &'a (dyn Fn(usize) + Sync),
    index: usize,
    thread: OwnThread,
    is_done: AtomicBool,
}

/// Lets hand `n` run `body(n + 1)` while this thread runs `main`, and returns when all have returned. A hand that
/// has not `patience` ticks of the time-stamp counter after `main` is stopped wherever it is. The first error, if a
/// hand does not start: then nothing runs, `main` neither.
pub fn together<T>(
    hands: &mut [Hand],
    patience: u64,
    body: &(dyn Fn(usize) + Sync),
    main: impl FnOnce() -> T,
) -> Result<T, Status> {
    if hands.is_empty() { Ok(main()) } else { with_hands(hands, patience, body, main) }
}

#[inline(never)]
fn with_hands<T>(
    hands: &mut [Hand],
    patience: u64,
    body: &(dyn Fn(usize) + Sync),
    main: impl FnOnce() -> T,
) -> Result<T, Status> {
    let job = |index: usize| Job {
        body,
        index: index + 1,
        thread: hands[index].thread,
        is_done: AtomicBool::new(false),
    };
    let jobs: [Option<Job>; MAX_THREADS] =
        core::array::from_fn(|index| (index < hands.len()).then(|| job(index)));
    let stop = |jobs: &[Option<Job>]| {
        for job in jobs.iter().flatten() {
            // It fails only if the thread has stopped itself meanwhile.
            let _ = job.thread.stop();
        }
    };
    for (index, (job, hand)) in jobs.iter().flatten().zip(hands.iter()).enumerate() {
        let argument = (&raw const *job) as u64;
        if let Err(status) = begin(hand.thread, hand.top_of_stack, work, argument) {
            stop(&jobs[..index]);
            return Err(status);
        }
    }
    let result = main();
    let deadline = time::tsc().saturating_add(patience);
    while !jobs.iter().flatten().all(|job| job.is_done.load(Ordering::Acquire))
        && time::tsc() < deadline
    {
        yield_now();
    }
    stop(&jobs);
    Ok(result)
}

/// Where a hand starts; the argument is its job's address.
extern "C" fn work(job: u64) -> ! {
    // SAFETY: `together` passes a job's address and does not return before the thread has stopped.
    let job = unsafe { &*core::ptr::with_exposed_provenance::<Job>(job as usize) };
    (job.body)(job.index);
    let thread = job.thread;
    job.is_done.store(true, Ordering::Release);
    loop {
        let _ = thread.stop();
    }
}

/// Starts a thread with an empty stack.
fn begin(
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
    let entry = enter as *const () as u64;
    // SAFETY: the thread starts in `enter` on a stack of its own.
    unsafe { call(Op::ThreadStart, [thread.selector(), entry, top_of_stack - 16, 0, 0, 0]) }
        .map(drop)
}

/// Stops a thread wherever it is and starts it again from the beginning. What it held is lost.
#[cfg(feature = "probe")]
pub fn restart<const BYTES: usize>(
    thread: OwnThread,
    stack: &'static Stack<BYTES>,
    body: extern "C" fn(u64) -> !,
    argument: u64,
) -> Result<(), Status> {
    thread.stop()?;
    begin(thread, stack.memory.get() as u64 + BYTES as u64, body, argument)
}

/// First instructions of a thread: the body's address and its argument are on the stack.
#[unsafe(naked)]
extern "C" fn enter() -> ! {
    naked_asm!("pop rax", "pop rdi", "xor ebp, ebp", "call rax", "ud2")
}
