//! Threads of a process that is confined: made before its filter, which lets it make none.

use std::io;
use std::sync::{Arc, Barrier, OnceLock};
use std::thread::Builder;

/// What all threads do.
type Job = Box<dyn Fn() + Send + Sync>;

/// Bytes of a stack: address space, of which the host gives what is used.
const STACK: usize = 2 << 20;

/// Threads that wait for what they are to do, [`Threads::run`]. Nobody waits for their end.
pub struct Threads(Arc<OnceLock<Job>>);

impl Threads {
    /// Makes threads, which have what this one has given up given up, too. When it returns, all that their start asks of the host has been asked.
    ///
    /// # Errors
    /// The host makes none.
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
                // The end of a thread is calls that the filter does not let through, either.
                loop {
                    std::thread::park();
                }
            })?;
        }
        started.wait();
        Ok(Self(job))
    }

    /// Gives them something to do, once.
    pub fn run(&self, job: impl Fn() + Send + Sync + 'static) {
        let _ = self.0.set(Box::new(job));
    }
}

/// Ends the process with a thread that panics: others would wait for its requests.
struct Ends;

impl Drop for Ends {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// A heap for each thread would be made by calls that the filter does not let through, and be memory.
#[cfg(target_env = "gnu")]
fn share_heap() {
    // SAFETY: it sets a number of the allocator.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

#[cfg(not(target_env = "gnu"))]
fn share_heap() {}
