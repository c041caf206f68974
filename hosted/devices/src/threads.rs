//! Threads of a confined process: created before its seccomp filter, which forbids new ones.

use std::io;
use std::sync::{Arc, Barrier, OnceLock};
use std::thread::Builder;

/// Function of all threads.
type Job = Box<dyn Fn() + Send + Sync>;

/// Stack size in bytes: address space, of which the host allocates the used part.
const STACK: usize = 2 << 20;

/// Threads that wait for [`Threads::run`]. They are never joined.
pub struct Threads(Arc<OnceLock<Job>>);

impl Threads {
    /// Creates threads, which inherit this thread's restrictions. After the return, their start
    /// makes no further system calls.
    ///
    /// # Errors
    /// The host cannot create threads.
    pub fn start(count: usize) -> io::Result<Self> {
        share_heap();
        let job = Arc::new(OnceLock::<Job>::new());
        let started = Arc::new(Barrier::new(count + 1));
        for _ in 0..count {
            let (job, started) = (job.clone(), started.clone());
            Builder::new().stack_size(STACK).spawn(move || {
                let _ends = Ends;
                started.wait();
                job.wait()();
                // The seccomp filter does not permit the exit of a thread, either.
                loop {
                    std::thread::park();
                }
            })?;
        }
        started.wait();
        Ok(Self(job))
    }

    /// Starts a function in all threads, once.
    pub fn run(&self, job: impl Fn() + Send + Sync + 'static) {
        let _ = self.0.set(Box::new(job));
    }
}

/// Ends the process if a thread panics: other processes would wait for its requests.
struct Ends;

impl Drop for Ends {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// The seccomp filter forbids the calls that create a heap per thread, which would cost memory,
/// too.
#[cfg(target_env = "gnu")]
fn share_heap() {
    // SAFETY: it sets a parameter of the allocator.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

#[cfg(not(target_env = "gnu"))]
fn share_heap() {}
