//! Both sides of a session, and hostile ones.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;

use proptest::prelude::*;

use super::*;
use crate::testing::memory;

const LENGTH: u64 = DATA + 4 * BUFFER;
const INFO: Info = Info {
    sectors: 1000,
    read_only: false,
    discard: true,
    write_zeroes: false,
    max_sectors: 64,
    depth: 16,
};

fn connect(client: &mut Client, server: &mut Session) {
    assert_eq!(client.poll(), None);
    assert_eq!(server.take(), None);
    assert!(server.take_signal());
}

#[test]
fn request_and_answer() {
    let memory = memory(512);
    let mut client = Client::new(&memory, LENGTH).unwrap();
    let mut server = Session::new(&memory, LENGTH, INFO).unwrap();
    assert_eq!(client.info(), None);
    connect(&mut client, &mut server);
    assert!(client.take_signal());
    assert_eq!(client.poll(), None);
    assert_eq!(client.info(), Some(INFO));
    assert!(server.sleep());
    let _ = (client.take_signal(), server.take_signal());
    let buffer = client.allocate(8 * SECTOR).unwrap();
    assert!(client.submit(Operation::Write, 10, 8, buffer.offset, 77));
    assert!(client.take_signal());
    assert!(client.sleep());
    let request = server.take().unwrap();
    assert_eq!((request.sector, request.sectors, request.offset), (10, 8, buffer.offset));
    assert!(!server.take_signal());
    server.complete(request.id, Status::Ok);
    assert!(server.take_signal());
    assert_eq!(client.poll(), Some(Completion { tag: 77, status: Status::Ok }));
    assert_eq!(client.poll(), None);
}

#[test]
fn requests_wait_for_those_that_were_forgotten() {
    let memory = memory(512);
    let mut client = Client::new(&memory, LENGTH).unwrap();
    let mut server = Session::new(&memory, LENGTH, INFO).unwrap();
    connect(&mut client, &mut server);
    client.forget();
    assert!(client.has_room(), "there was none");
    for tag in 0..2 {
        assert!(client.submit(Operation::Write, 10, 1, DATA, tag));
    }
    assert_eq!(client.poll(), None);
    let late = [server.take().unwrap(), server.take().unwrap()];
    client.forget();
    for (tag, request) in late.into_iter().enumerate() {
        assert!(!client.has_room());
        assert!(!client.submit(Operation::Write, 10, 1, DATA + 512, 3));
        server.complete(request.id, Status::Ok);
        assert_eq!(client.poll().map(|it| it.tag), Some(tag as u64));
    }
    assert!(client.has_room());
    assert!(client.submit(Operation::Write, 10, 1, DATA + 512, 3));
}

#[test]
fn a_server_knows_repeated_requests_and_read_completions() {
    let memory = memory(512);
    let mut client = Client::new(&memory, LENGTH).unwrap();
    let mut server = Session::new(&memory, LENGTH, INFO).unwrap();
    connect(&mut client, &mut server);
    assert_eq!(client.poll(), None);
    let take = |server: &mut Session| server.take().map(|it| (it.id, it.is_repeated));
    assert!(client.submit(Operation::Flush, 0, 0, 0, 1));
    assert!(client.submit(Operation::Flush, 0, 0, 0, 2));
    assert_eq!(take(&mut server), Some((0, false)));
    let first = server.complete(0, Status::Failed).unwrap();
    assert_eq!(take(&mut server), Some((1, false)));
    let second = server.complete(1, Status::Failed).unwrap();
    assert!(!server.has_read(first));
    assert!(client.poll().is_some());
    assert!(server.has_read(first) && !server.has_read(second));
    // The client has not read the second one when the server restarts.
    let mut server = Session::new(&memory, LENGTH, INFO).unwrap();
    connect(&mut client, &mut server);
    assert!(client.submit(Operation::Flush, 0, 0, 0, 3));
    assert_eq!(client.poll(), None);
    assert!(!server.has_read(first) && !server.has_read(second), "another connection");
    // The third one was submitted without a connection.
    assert_eq!([take(&mut server), take(&mut server)], [Some((1, true)), Some((0, true))]);
    assert!(client.submit(Operation::Flush, 0, 0, 0, 4));
    assert_eq!(take(&mut server), Some((2, false)));
}

#[test]
fn nonsense_is_answered_at_once() {
    let memory = memory(512);
    let mut client = Client::new(&memory, LENGTH).unwrap();
    let info = Info { read_only: true, ..INFO };
    let mut server = Session::new(&memory, LENGTH, info).unwrap();
    connect(&mut client, &mut server);
    let read = Operation::Read;
    let cases = [
        (read, 1000, 1, DATA, Status::Invalid),
        (read, u64::MAX, 1, DATA, Status::Invalid),
        (read, 0, 0, DATA, Status::Invalid),
        (read, 0, 65, DATA, Status::Invalid),
        (read, 0, 1, 0, Status::Invalid),
        (read, 0, 1, DATA + 8, Status::Invalid),
        (read, 0, 2, LENGTH - 512, Status::Invalid),
        (read, 0, 1, !511, Status::Invalid),
        (Operation::Write, 0, 1, DATA, Status::ReadOnly),
        (Operation::Discard, 0, 1000, 0, Status::ReadOnly),
    ];
    for (tag, case) in cases.into_iter().enumerate() {
        assert!(client.submit(case.0, case.1, case.2, case.3, tag as u64));
    }
    assert_eq!(client.poll(), None);
    assert_eq!(server.take(), None);
    for (tag, case) in cases.into_iter().enumerate() {
        let expected = Completion { tag: tag as u64, status: case.4 };
        assert_eq!(client.poll(), Some(expected), "{case:?}");
    }
    assert!(client.submit(read, 999, 1, LENGTH - 512, 0));
    assert!(server.take().is_some());
    assert!(client.submit(Operation::Flush, 0, 0, 0, 0));
    assert!(server.take().is_some());
}

#[test]
fn buffers() {
    let memory = memory(512);
    let mut client = Client::new(&memory, LENGTH).unwrap();
    assert_eq!(client.allocate(0), None);
    assert_eq!(client.allocate(5 * BUFFER), None);
    let all: Vec<_> = (0..4).map(|_| client.allocate(1).unwrap()).collect();
    assert_eq!(client.allocate(1), None);
    client.release(all[1]);
    assert_eq!(client.allocate(2 * BUFFER), None);
    client.release(all[2]);
    let two = client.allocate(2 * BUFFER).unwrap();
    assert_eq!(two, Buffer { offset: all[1].offset, length: 2 * BUFFER });
    client.release(Buffer { offset: u64::MAX - BUFFER, length: 0 });
    let mut client = Client::new(&memory, DATA + 500 * BUFFER).unwrap();
    let whole = Buffer { offset: DATA, length: 128 * BUFFER };
    assert_eq!(client.allocate(128 * BUFFER), Some(whole));
    client.release(whole);
    assert_eq!(client.allocate(128 * BUFFER), Some(whole));
}

#[test]
fn a_new_client_waits_for_the_old_ones_requests() {
    let memory = memory(512);
    let mut server = Session::new(&memory, LENGTH, INFO).unwrap();
    let mut old = Client::new(&memory, LENGTH).unwrap();
    connect(&mut old, &mut server);
    assert!(old.submit(Operation::Read, 0, 1, DATA, 1));
    assert_eq!(old.poll(), None);
    let request = server.take().unwrap();
    let mut new = Client::new(&memory, LENGTH).unwrap();
    assert_eq!(new.poll(), None);
    assert_eq!(server.take(), None);
    assert_eq!(new.poll(), None);
    assert_eq!(new.info(), None, "the disk may still write to the buffers");
    server.complete(request.id, Status::Ok);
    assert_eq!(new.poll(), None, "the old one's answer");
    assert!(new.info().is_some());
}

#[derive(Clone, Debug)]
enum Step {
    Submit,
    Serve,
    Complete(prop::sample::Index),
    Poll,
    KillServer,
}

proptest! {
    /// Every request is completed exactly once, and not before the disk has carried it out,
    /// whatever the order of events.
    #[test]
    fn nothing_is_lost_over_restarts(steps in prop::collection::vec(prop_oneof![
        6 => Just(Step::Submit),
        6 => Just(Step::Serve),
        4 => any::<prop::sample::Index>().prop_map(Step::Complete),
        6 => Just(Step::Poll),
        1 => Just(Step::KillServer),
    ], 0..300)) {
        let memory = memory(512);
        let mut client = Client::new(&memory, LENGTH).unwrap();
        let mut server = Session::new(&memory, LENGTH, INFO).unwrap();
        let mut taken: VecDeque<Request> = VecDeque::new();
        // Per request: how often the disk has carried it out, and whether it was completed.
        let mut model: BTreeMap<u64, (u32, bool)> = BTreeMap::new();
        let mut next = 0;
        let poll = |client: &mut Client, model: &mut BTreeMap<u64, (u32, bool)>| {
            while let Some(completion) = client.poll() {
                let entry = model.get_mut(&completion.tag).unwrap();
                assert!(entry.0 > 0, "answered and not done");
                assert!(!entry.1, "answered twice");
                entry.1 = true;
            }
        };
        let complete = |index: usize, taken: &mut VecDeque<Request>, server: &mut Session, model: &mut BTreeMap<u64, (u32, bool)>| {
            let request = taken.remove(index).unwrap();
            model.get_mut(&request.sector).unwrap().0 += 1;
            server.complete(request.id, Status::Ok);
        };
        for step in steps {
            match step {
                Step::Submit => {
                    // The sector identifies the request.
                    if next < 1000 && client.submit(Operation::Write, next, 1, DATA, next) {
                        model.insert(next, (0, false));
                        next += 1;
                    }
                }
                Step::Serve => taken.extend(server.take()),
                Step::Complete(index) => {
                    if !taken.is_empty() {
                        let index = index.index(taken.len());
                        complete(index, &mut taken, &mut server, &mut model);
                    }
                }
                Step::Poll => poll(&mut client, &mut model),
                Step::KillServer => {
                    taken.clear();
                    server = Session::new(&memory, LENGTH, INFO).unwrap();
                }
            }
        }
        for _ in 0..4 {
            poll(&mut client, &mut model);
            while let Some(request) = server.take() {
                taken.push_back(request);
            }
            while !taken.is_empty() {
                complete(0, &mut taken, &mut server, &mut model);
            }
        }
        prop_assert_eq!(client.under_way(), 0);
        prop_assert!(model.values().all(|&(_, answered)| answered));
    }

    /// Writes arbitrary words anywhere at any time, as a hostile peer does.
    #[test]
    fn hostile_words(writes in prop::collection::vec((0..512usize, any::<u64>(), 0..4u8), 0..200)) {
        let memory = memory(512);
        let mut client = Client::new(&memory, LENGTH).unwrap();
        let mut server = Session::new(&memory, LENGTH, INFO).unwrap();
        for (index, value, how) in writes {
            match how {
                0 => memory[index].store(value, Ordering::Relaxed),
                1 => memory[index].store(value % 128, Ordering::Relaxed),
                // An entry of the request ring, and its publication.
                2 => {
                    memory[REQUESTS + 16 + index % 192].store(value & 0x0007_0000_003f_0007, Ordering::Relaxed);
                    memory[REQUESTS].fetch_add(1, Ordering::Relaxed);
                }
                _ => {
                    memory[COMPLETIONS + 16 + index % 64].store(value & 0xff_ffff, Ordering::Relaxed);
                    memory[COMPLETIONS].fetch_add(1, Ordering::Relaxed);
                }
            }
            let _ = client.submit(Operation::Read, 0, 1, DATA, 0);
            while client.poll().is_some() {}
            let mut served = 0;
            while let Some(request) = server.take() {
                prop_assert!(INFO.check(&request).is_ok());
                prop_assert!(!request.operation.has_data() || request.offset >= DATA);
                prop_assert!(request.offset.checked_add(request.bytes()).unwrap() <= LENGTH || !request.operation.has_data());
                served += 1;
                prop_assert!(served <= SLOTS);
                if value & 1 != 0 {
                    server.complete(request.id, Status::Ok);
                }
            }
            let _ = (client.sleep(), server.sleep(), client.info(), client.take_signal());
        }
    }
}
