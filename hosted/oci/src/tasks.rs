//! Threads of a carrier for what others ask for, and their limit.

use std::sync::Arc;
use std::thread::Builder;

/// Running threads.
pub struct Tasks {
    /// Each thread has a copy.
    running: Arc<()>,
    most: usize,
}

impl Tasks {
    /// Creates none, of `most` at a time.
    pub fn new(most: usize) -> Self {
        Self { running: Arc::new(()), most }
    }

    /// Does something in a thread of its own. Nothing is done if too many threads run, or without
    /// memory for another: the client asks again.
    pub fn spawn(&self, act: impl FnOnce() + Send + 'static) {
        if Arc::strong_count(&self.running) > self.most {
            return;
        }
        let own = Arc::clone(&self.running);
        let _ = Builder::new().spawn(move || {
            let _own = own;
            act();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn the_number_is_limited() {
        let (tasks, (done, is_done)) = (Tasks::new(1), channel());
        let (end, has_ended) = channel::<()>();
        let first = done.clone();
        tasks.spawn(move || {
            first.send(1).unwrap();
            has_ended.recv().unwrap();
        });
        assert_eq!(is_done.recv(), Ok(1));
        let second = done.clone();
        tasks.spawn(move || second.send(2).unwrap());
        end.send(()).unwrap();
        while Arc::strong_count(&tasks.running) > 1 {
            std::thread::yield_now();
        }
        tasks.spawn(move || done.send(3).unwrap());
        assert_eq!(is_done.iter().collect::<Vec<_>>(), [3]);
    }
}
