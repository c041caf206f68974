use super::testing::{LIMIT, Rig};
use super::*;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Operations: immediate, blocked until released, ordered after a tag.
const QUICK: u32 = 0;
const SLOW: u32 = 1;
const AFTER: u32 = 2;

/// Reports started requests, and blocks slow ones. The sector is the tag.
struct Slow {
    begun: Sender<u64>,
    go: Mutex<Receiver<()>>,
    idle: Sender<()>,
}

impl Serve for Slow {
    fn execute(&self, taken: &TakenRequest<'_>) -> Executed {
        self.begun.send(taken.sector).unwrap();
        if taken.op == SLOW {
            self.go.lock().unwrap().recv().unwrap();
        }
        taken.write(&taken.parts, &[taken.sector as u8]).unwrap();
        Executed { status: taken.sector as u8, op: None, bytes: 0, is_failed: false }
    }

    fn order(&self, taken: &TakenRequest<'_>) -> AnswerOrder {
        if taken.op == AFTER {
            AnswerOrder::After(taken.count as u16)
        } else {
            AnswerOrder::Named(taken.sector as u16)
        }
    }

    fn idle(&self) {
        self.idle.send(()).unwrap();
    }

    fn close(&self, is_drained: bool) {
        assert!(is_drained);
        self.idle.send(()).unwrap();
    }
}

fn rig(threads: usize) -> (Rig, Receiver<u64>, Sender<()>, Receiver<()>) {
    let ((begun, begins), (go, gone), (idle, idles)) = (channel(), channel(), channel());
    let slow = Slow { begun, go: Mutex::new(gone), idle };
    (Rig::new(slow, threads), begins, go, idles)
}

#[test]
fn a_slow_request_holds_nothing_up() {
    let (mut rig, begins, go, _idles) = rig(2);
    rig.submit(5, SLOW, 5, &[], 0);
    assert_eq!(begins.recv_timeout(LIMIT), Ok(5));
    for id in [0, 9, 63] {
        rig.submit(id, QUICK, id.into(), &[], 0);
        assert_eq!(rig.ended(), (id, id as u8));
    }
    go.send(()).unwrap();
    assert_eq!(rig.ended(), (5, 5));
}

#[test]
fn more_than_there_are_threads_wait_in_the_queue() {
    let (mut rig, begins, go, _idles) = rig(2);
    for id in 0..64 {
        rig.submit(id, SLOW, id.into(), &[], 0);
    }
    for _ in 0..2 {
        begins.recv_timeout(LIMIT).unwrap();
    }
    assert_eq!(rig.client.queue.waiting.load(SeqCst).count_ones(), 62);
    (0..64).for_each(|_| go.send(()).unwrap());
    let mut ended: Vec<_> = (0..64).map(|_| rig.ended().0).collect();
    ended.sort_unstable();
    assert!(ended.into_iter().eq(0..64));
}

#[test]
fn an_answer_waits_for_the_one_before_it() {
    let (mut rig, begins, go, _idles) = rig(2);
    rig.submit(5, SLOW, 5, &[], 0);
    assert_eq!(begins.recv_timeout(LIMIT), Ok(5));
    rig.submit(1, AFTER, 1, &[], 5);
    rig.submit(2, AFTER, 2, &[], 77);
    // No request has the tag of the second, and the first was taken before the tag.
    assert_eq!(rig.ended(), (2, 2));
    assert!(rig.client.completed().is_none());
    go.send(()).unwrap();
    assert_eq!((rig.ended(), rig.ended()), ((5, 5), (1, 1)));
}

#[test]
fn nothing_is_overtaken_in_the_queue() {
    let (mut rig, begins, go, _idles) = rig(1);
    rig.submit(0, SLOW, 0, &[], 0);
    assert_eq!(begins.recv_timeout(LIMIT), Ok(0));
    // The thread takes the lower ID first.
    rig.submit(60, QUICK, 60, &[], 0);
    rig.submit(1, AFTER, 1, &[], 60);
    go.send(()).unwrap();
    assert_eq!([rig.ended(), rig.ended(), rig.ended()], [(0, 0), (60, 60), (1, 1)]);
    assert_eq!(begins.try_iter().collect::<Vec<_>>(), [1, 60]);
}

#[test]
fn a_request_is_there_once() {
    let (mut rig, begins, go, _idles) = rig(2);
    rig.submit(5, SLOW, 5, &[], 0);
    assert_eq!(begins.recv_timeout(LIMIT), Ok(5));
    // The guest submits it again.
    rig.submit(5, SLOW, 5, &[], 0);
    rig.submit(6, QUICK, 6, &[], 0);
    assert_eq!(rig.ended(), (6, 6));
    go.send(()).unwrap();
    assert_eq!(rig.ended(), (5, 5));
    rig.submit(5, QUICK, 7, &[], 0);
    assert_eq!(rig.ended(), (5, 7));
    assert_eq!(begins.try_iter().collect::<Vec<_>>(), [6, 7]);
}

#[test]
fn a_reset_does_not_wait() {
    let (mut rig, begins, go, _idles) = rig(2);
    rig.submit(5, SLOW, 5, &[(0x1000, 1)], 0);
    assert_eq!(begins.recv_timeout(LIMIT), Ok(5));
    // A request ordered after it, and a later one with the same tag.
    rig.submit(6, AFTER, 6, &[], 5);
    assert_eq!(begins.recv_timeout(LIMIT), Ok(6));
    rig.abandon();
    rig.submit(5, QUICK, 7, &[(0x1001, 1)], 0);
    // The old request has no effect once others have started.
    assert!(begins.recv_timeout(IDLE_DELAY).is_err());
    go.send(()).unwrap();
    assert_eq!(rig.ended(), (5, 7));
    assert!(rig.client.completed().is_none());
    assert_eq!(rig.memory.read::<u16>(0x1000).unwrap(), 0x700, "nothing is written late");
}

#[test]
fn the_end_waits_for_what_has_begun() {
    let (mut rig, begins, go, idles) = rig(1);
    rig.submit(5, SLOW, 5, &[], 0);
    assert_eq!(begins.recv_timeout(LIMIT), Ok(5));
    std::thread::scope(|scope| {
        scope.spawn(|| rig.watch(&AtomicBool::new(true)));
        assert!(idles.recv_timeout(IDLE_DELAY).is_err());
        go.send(()).unwrap();
    });
    // Cached data is written to the file once no request is in progress.
    assert_eq!(rig.ended(), (5, 5));
    assert_eq!(idles.try_iter().count(), 1);
}

#[test]
fn a_moment_without_requests_is_noticed() {
    let (mut rig, _begins, _go, idles) = rig(1);
    let end = AtomicBool::new(false);
    rig.submit(5, QUICK, 5, &[], 0);
    assert_eq!(rig.ended(), (5, 5));
    std::thread::scope(|scope| {
        scope.spawn(|| rig.watch(&end));
        assert_eq!(idles.recv_timeout(LIMIT), Ok(()));
        end.store(true, SeqCst);
        rig.signal();
    });
}

#[test]
fn a_vcpu_that_waits_is_notified_without_the_device_process() {
    use proto::hosted::idle::state::{BUSY, POLLING};
    let (mut rig, begins, ..) = rig(1);
    rig.client.queue.target.store(2, SeqCst);
    for (id, state, (completions, pending)) in [(0, POLLING, (1, 0)), (1, BUSY, (0, 1))] {
        rig.vcpus[2].state.store(state, SeqCst);
        rig.submit(id, QUICK, id.into(), &[], 0);
        assert_eq!(begins.recv_timeout(LIMIT), Ok(id.into()));
        let until = Instant::now() + LIMIT;
        let notices =
            || (rig.vcpus[2].completions.load(SeqCst), rig.client.queue.pending.load(SeqCst));
        while notices() == (0, 0) && Instant::now() < until {
            std::thread::yield_now();
        }
        assert_eq!(notices(), (completions, pending));
        rig.vcpus[2].completions.store(0, SeqCst);
        rig.ended();
    }
    // A vCPU that does not exist.
    rig.client.queue.target.store(u32::MAX, SeqCst);
    rig.submit(2, QUICK, 2, &[], 0);
    assert_eq!(rig.ended(), (2, 2));
}
