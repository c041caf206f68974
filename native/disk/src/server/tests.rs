//! The server with a disk in memory.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use proptest::prelude::*;
use proto::disk::{BUFFER, Client as Session2, Completion, DATA, Operation};

use super::*;

/// A disk in memory. Data is one word for each sector; addresses are of words of a session.
struct Medium {
    sectors: RefCell<BTreeMap<u64, u64>>,
    memories: Vec2<Rc<Vec2<AtomicU64>>>,
    /// Memory that outlives the server.
    uninformed: AtomicU64,
}
type Vec2<T> = std::vec::Vec<T>;

struct Fake {
    medium: Rc<Medium>,
    queue: Vec2<(usize, Command)>,
    /// Number of commands that complete at the next look.
    ready: usize,
    /// Result of the next flush.
    flushed: Status,
    pick: u64,
}

const BASE: u64 = 1 << 32;

impl Disk for &RefCell<Fake> {
    fn geometry(&self) -> Geometry {
        Geometry {
            sectors: 4096,
            read_only: false,
            discard: true,
            write_zeroes: false,
            max_sectors: 64,
            depth: 5,
        }
    }
    fn start(&mut self, number: usize, command: &Command) {
        let queue = &mut self.borrow_mut().queue;
        assert!(queue.len() < 5 && queue.iter().all(|entry| entry.0 != number));
        queue.push((number, *command));
    }
    fn flush_doorbell(&mut self) {}
    fn acknowledge_interrupt(&mut self) {}
    fn completed(&mut self) -> Result<Option<(usize, Status)>, DeviceError> {
        let fake = &mut *self.borrow_mut();
        if fake.ready == 0 || fake.queue.is_empty() {
            return Ok(None);
        }
        fake.ready -= 1;
        fake.pick = fake.pick.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let index = (fake.pick >> 33) as usize % fake.queue.len();
        let (number, command) = fake.queue.remove(index);
        fake.medium.execute(&command);
        let status = match command.operation {
            Operation::Flush => std::mem::replace(&mut fake.flushed, Status::Ok),
            _ => Status::Ok,
        };
        Ok(Some((number, status)))
    }
}

impl Medium {
    fn execute(&self, command: &Command) {
        assert!(command.sector + u64::from(command.sectors) <= 4096);
        if !command.operation.has_data() {
            return;
        }
        for index in 0..u64::from(command.sectors) {
            let address = command.address + index * SECTOR;
            let memory = &self.memories[(address / BASE) as usize - 1];
            let word = &memory[(address % BASE / 8) as usize];
            let mut sectors = self.sectors.borrow_mut();
            let sector = sectors.entry(command.sector + index).or_default();
            if command.operation == Operation::Write {
                *sector = word.load(Ordering::Relaxed);
            } else {
                word.store(*sector, Ordering::Relaxed);
            }
        }
    }
}

const LENGTH: u64 = DATA + 16 * BUFFER;

fn medium(clients: usize) -> Rc<Medium> {
    let memory = || Rc::new((0..LENGTH / 8).map(|_| AtomicU64::new(0)).collect::<Vec2<_>>());
    let memories = (0..clients).map(|_| memory()).collect();
    Rc::new(Medium { sectors: RefCell::default(), memories, uninformed: AtomicU64::new(0) })
}

fn fake(medium: &Rc<Medium>) -> RefCell<Fake> {
    let medium = medium.clone();
    RefCell::new(Fake { medium, queue: Vec2::new(), ready: 0, flushed: Status::Ok, pick: 1 })
}

fn clients(medium: &Medium) -> Vec2<Session2<'_>> {
    let client = |memory| Session2::new(memory, LENGTH).unwrap();
    medium.memories.iter().map(|memory| client(&memory[..])).collect()
}

/// Ranges of 1000 sectors, contiguous from sector 10.
fn server<'m, 'f>(
    medium: &'m Medium,
    fake: &'f RefCell<Fake>,
) -> BlockServer<'m, &'f RefCell<Fake>> {
    let mut server = BlockServer::new(fake, &medium.uninformed);
    let geometry = server.disk.geometry();
    for (index, memory) in medium.memories.iter().enumerate() {
        let part = DiskRange { partition: None, first: 10 + 1000 * index as u64, sectors: 1000 };
        let extent = locate(&part, &[], geometry.sectors).unwrap();
        let client = DiskClient { part, read_only: false, signal: 1 };
        let info = info(&client, &extent, &geometry).unwrap();
        let session = Session::new(&memory[..], LENGTH, info).unwrap();
        server.add(Some((session, extent, BASE * (index as u64 + 1), 1)));
    }
    server
}

#[test]
fn parts() {
    let partitions = [Partition { number: 1, extent: Extent { first: 64, sectors: 100 } }];
    let locate = |partition, first, sectors| {
        locate(&DiskRange { partition, first, sectors }, &partitions, 1000)
    };
    assert_eq!(locate(None, 0, 0), Ok(Extent { first: 0, sectors: 1000 }));
    assert_eq!(locate(Some(1), 10, 0), Ok(Extent { first: 74, sectors: 90 }));
    assert_eq!(locate(Some(1), 10, 90), Ok(Extent { first: 74, sectors: 90 }));
    assert_eq!(locate(Some(1), 10, 91), Err(RangeError::Beyond));
    assert_eq!(locate(Some(1), 100, 0), Err(RangeError::Beyond));
    assert_eq!(locate(Some(1), u64::MAX, 2), Err(RangeError::Beyond));
    assert_eq!(locate(None, 999, 2), Err(RangeError::Beyond));
    assert_eq!(locate(Some(2), 0, 0), Err(RangeError::NoPartition(2)));
    let huge = [Partition { number: 1, extent: Extent { first: 1, sectors: u64::MAX } }];
    let part = DiskRange { partition: Some(1), ..DiskRange::WHOLE };
    assert_eq!(super::locate(&part, &huge, 1000), Err(RangeError::Beyond));
}

#[test]
fn no_two_clients_write_the_same_sector() {
    let extent = |first, sectors| Extent { first, sectors };
    let others = [(extent(10, 10), false), (extent(30, 10), true)];
    assert_eq!(admit(&extent(20, 10), false, &others), Ok(()));
    assert_eq!(admit(&extent(19, 1), true, &others), Err(RangeError::Shared));
    assert_eq!(admit(&extent(0, 11), false, &others), Err(RangeError::Shared));
    assert_eq!(admit(&extent(20, 11), true, &others), Ok(()));
    assert_eq!(admit(&extent(20, 11), false, &others), Err(RangeError::Shared));
    assert_eq!(admit(&extent(u64::MAX, 9), false, &others), Ok(()));
}

#[test]
fn each_client_chooses_the_vcpu_to_signal() {
    let medium = medium(2);
    let fake = fake(&medium);
    let mut server = server(&medium, &fake);
    let _clients = clients(&medium);
    proto::session::set_notified_vcpu(&medium.memories[1][..], 3);
    let mut signalled = Vec2::new();
    server.serve(|client, vcpu, _| signalled.push((client, vcpu))).unwrap();
    assert_eq!(signalled, [(0, 0), (1, 3)], "a new server signals all");
}

#[test]
fn clients_take_turns() {
    let medium = medium(3);
    let fake = fake(&medium);
    let mut server = server(&medium, &fake);
    let mut clients = clients(&medium);
    for _ in 0..2 {
        clients.iter_mut().for_each(|client| assert_eq!(client.poll(), None));
        server.serve(|_, _, _| {}).unwrap();
    }
    for client in &mut clients {
        for _ in 0..4 {
            assert!(client.submit(Operation::Read, 0, 1, DATA, 0));
        }
    }
    server.serve(|_, _, _| {}).unwrap();
    let sectors: Vec2<u64> = fake.borrow().queue.iter().map(|entry| entry.1.sector).collect();
    assert_eq!(sectors, [10, 1010, 2010, 10, 1010], "five at a time, in turns");
}

/// Flushes that fail at once occupy no place at the disk.
#[test]
fn failed_flushes_do_not_delay_others() {
    let medium = medium(2);
    let fake = fake(&medium);
    let mut server = server(&medium, &fake);
    let mut clients = clients(&medium);
    fake.borrow_mut().flushed = Status::Failed;
    assert_eq!(flush_all(&fake, &mut server, &mut clients[..1], [0]), [Status::Failed]);
    for _ in 0..2 {
        assert_eq!(clients[1].poll(), None);
        server.serve(|_, _, _| {}).unwrap();
    }
    while clients[0].has_room() {
        assert!(clients[0].submit(Operation::Flush, 0, 0, 0, 8));
    }
    assert!(clients[1].submit(Operation::Read, 0, 1, DATA, 7));
    assert!(server.start_next());
    // The disk is notified after these.
    assert_eq!(fake.borrow().queue.len(), 1);
    let failed = core::iter::from_fn(|| clients[0].poll()).count();
    assert!((1..=5).contains(&failed), "{failed}");
}

/// Each client submits a flush. Returns the first result that each of `readers` reads.
fn flush_all<const N: usize>(
    fake: &RefCell<Fake>,
    server: &mut BlockServer<&RefCell<Fake>>,
    clients: &mut [Session2],
    readers: [usize; N],
) -> [Status; N] {
    for client in &mut *clients {
        assert!(client.submit(Operation::Flush, 0, 0, 0, 8));
    }
    let mut results = [None; N];
    while results.contains(&None) {
        fake.borrow_mut().ready = 9;
        server.serve(|_, _, _| {}).unwrap();
        for (result, reader) in results.iter_mut().zip(readers) {
            let ended = clients[reader].poll();
            *result = result.or(ended.map(|completion| completion.status));
        }
    }
    results.map(Option::unwrap)
}

/// A restart of the server is not a success of a flush whose failure a client has not read.
#[test]
fn a_failed_flush_fails_in_the_next_server() {
    let (ok, failed) = (Status::Ok, Status::Failed);
    let medium = medium(3);
    let fake = fake(&medium);
    let mut clients = clients(&medium);
    let mut first = server(&medium, &fake);
    fake.borrow_mut().flushed = failed;
    // The second client does not read its result. The third one has not flushed.
    assert_eq!(flush_all(&fake, &mut first, &mut clients[..2], [0]), [failed]);
    // Any other request shows that the first client has read it.
    assert!(clients[0].submit(Operation::Read, 0, 1, DATA, 7));
    first.serve(|_, _, _| {}).unwrap();
    drop(first);
    fake.borrow_mut().queue.clear();

    let mut second = server(&medium, &fake);
    for client in &mut clients {
        assert_eq!(client.poll(), None);
    }
    second.serve(|_, _, _| {}).unwrap();
    // The second client repeats its flush, and has no result of it when this server ends.
    assert_eq!(clients[1].poll(), None);
    second.serve(|_, _, _| {}).unwrap();
    // The third one reads a failure, before a flush of the first one fails in this server.
    assert_eq!(flush_all(&fake, &mut second, &mut clients[2..], [0]), [failed]);
    fake.borrow_mut().ready = 9;
    assert_eq!(clients[0].poll(), None, "repeated");
    second.serve(|_, _, _| {}).unwrap();
    assert_eq!(clients[0].poll(), Some(Completion { tag: 7, status: ok }));
    assert_eq!(medium.uninformed.load(Ordering::Relaxed) & 0b111, 0b010);
    fake.borrow_mut().flushed = failed;
    assert_eq!(flush_all(&fake, &mut second, &mut clients[..1], [0]), [failed]);
    second.serve(|_, _, _| {}).unwrap();
    assert_eq!(medium.uninformed.load(Ordering::Relaxed) & 0b111, 0b110);
    drop(second);
    fake.borrow_mut().queue.clear();

    let mut third = server(&medium, &fake);
    let results = flush_all(&fake, &mut third, &mut clients[1..], [0, 1]);
    assert_eq!(results, [failed; 2]);
    // Its second flush was submitted before it knew of the failure of the first.
    assert_eq!(clients[1].poll().map(|it| it.status), Some(failed));
    assert_eq!(flush_all(&fake, &mut third, &mut clients[1..], [0, 1]), [ok; 2]);
    assert_eq!(flush_all(&fake, &mut third, &mut clients[..1], [0]), [ok]);
    assert_eq!(medium.uninformed.load(Ordering::Relaxed) & 0b111, 0);
}

/// The disk reports once that it has lost data.
#[test]
fn a_failed_flush_is_the_last_word() {
    let medium = medium(2);
    let fake = fake(&medium);
    let mut server = server(&medium, &fake);
    let mut clients = clients(&medium);
    let mut round = |flushed| {
        fake.borrow_mut().flushed = flushed;
        for client in &mut clients {
            assert!(client.submit(Operation::Read, 0, 1, DATA, 7));
            assert!(client.submit(Operation::Flush, 0, 0, 0, 8));
        }
        let mut ended = [[None; 2]; 2];
        while ended.as_flattened().contains(&None) {
            fake.borrow_mut().ready = 9;
            server.serve(|_, _, _| {}).unwrap();
            for (client, ended) in clients.iter_mut().zip(&mut ended) {
                while let Some(Completion { tag, status }) = client.poll() {
                    ended[(tag - 7) as usize] = Some(status);
                }
            }
        }
        ended.map(|ended| ended.map(Option::unwrap))
    };
    let (ok, failed) = (Status::Ok, Status::Failed);
    assert_eq!(round(ok), [[ok, ok]; 2]);
    let first = round(failed);
    assert!(first.iter().any(|client| client[1] == failed));
    // For both clients, whichever of them received the failure first.
    assert_eq!(round(ok), [[ok, failed]; 2]);
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u8),
    Flush,
    Serve(usize),
    Poll,
    Kill,
}

proptest! {
    /// Two clients write and the server is killed at any point: every acknowledged write is on
    /// the disk, and no data of one client is in the other client's range.
    #[test]
    fn no_acknowledged_write_is_lost(steps in prop::collection::vec((0..2usize, prop_oneof![
        6 => (0..40u64, 1..4u8).prop_map(|(sector, count)| Step::Write(sector, count)),
        1 => Just(Step::Flush),
        5 => (0..6usize).prop_map(Step::Serve),
        5 => Just(Step::Poll),
        1 => Just(Step::Kill),
    ]), 0..200)) {
        let medium = medium(2);
        let mut clients = clients(&medium);
        // For each tag: client, first sector, number, buffer.
        let mut requests = BTreeMap::new();
        // Last acknowledged value of each sector of each client; none while a write is in
        // flight.
        let mut known: [BTreeMap<u64, u64>; 2] = Default::default();
        let mut busy: [BTreeMap<u64, u32>; 2] = Default::default();
        let mut tag = 0u64;
        let mut kills = 0;
        let mut rest = steps.into_iter();
        'life: loop {
            let device = fake(&medium);
            let mut server = server(&medium, &device);
            for (who, step) in rest.by_ref() {
                match step {
                    Step::Write(sector, count) => {
                        let overlap = (sector..sector + u64::from(count)).any(|sector| busy[who].contains_key(&sector));
                        let bytes = u64::from(count) * SECTOR;
                        if overlap || !clients[who].has_room() {
                            continue;
                        }
                        let Some(buffer) = clients[who].allocate(bytes) else { continue };
                        for index in 0..u64::from(count) {
                            let word = (buffer.offset + index * SECTOR) / 8;
                            medium.memories[who][word as usize].store(tag << 8 | index, Ordering::Relaxed);
                            busy[who].insert(sector + index, 1);
                            known[who].remove(&(sector + index));
                        }
                        prop_assert!(clients[who].submit(Operation::Write, sector, count.into(), buffer.offset, tag));
                        requests.insert(tag, (who, sector, count, Some(buffer)));
                        tag += 1;
                    }
                    Step::Flush => {
                        if clients[who].submit(Operation::Flush, 0, 0, 0, tag) {
                            requests.insert(tag, (who, 0, 0, None));
                            tag += 1;
                        }
                    }
                    Step::Serve(ready) => {
                        device.borrow_mut().ready = ready;
                        server.serve(|_, _, _| {}).unwrap();
                    }
                    Step::Poll => {
                        while let Some(Completion { tag, status }) = clients[who].poll() {
                            prop_assert_eq!(status, Status::Ok);
                            let (client, sector, count, buffer) = requests.remove(&tag).unwrap();
                            prop_assert_eq!(client, who);
                            for index in 0..u64::from(count) {
                                busy[who].remove(&(sector + index));
                                known[who].insert(sector + index, tag << 8 | index);
                            }
                            buffer.into_iter().for_each(|buffer| clients[who].release(buffer));
                        }
                    }
                    Step::Kill => {
                        kills += 1;
                        continue 'life;
                    }
                }
                let sectors = medium.sectors.borrow();
                for (who, known) in known.iter().enumerate() {
                    for (sector, value) in known {
                        prop_assert_eq!(sectors.get(&(10 + 1000 * who as u64 + sector)), Some(value), "after {} kills", kills);
                    }
                }
            }
            break;
        }
    }
}
