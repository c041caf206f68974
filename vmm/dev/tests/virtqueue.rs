//! Virtqueues, random and hostile ones among them, in the model and in rust-vmm's `virtio-queue`:
//! both find the same chains, request the same notifications and leave the same memory content.

use proptest::prelude::*;
use virtio_queue::{Queue as Oracle, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_bus::backend::Part;
use vmm_dev::virtio::queue::{Queue, RingError, Rings, spec::*, with_writable};
use vmm_mem::GuestMemory;

const SIZE: u16 = 8;
const RINGS: Rings = Rings { descriptors: 0x1000, available: 0x1100, used: 0x1200 };
/// Address of indirect tables.
const TABLES: u64 = 0x1400;
/// End of memory; the device must not access addresses beyond it.
const END: u64 = 0x4000;
/// More memory after a hole.
const ISLAND: (u64, u64) = (0x8000, 0x1000);

/// The same memory twice.
struct Twins {
    ours: GuestMemory,
    theirs: GuestMemoryMmap<()>,
}

impl Twins {
    fn new() -> Self {
        let ranges = [(0, END), ISLAND];
        let theirs = ranges.map(|(base, length)| (GuestAddress(base), length as usize));
        Self {
            ours: vmm_mem::testing::memory(&ranges),
            theirs: GuestMemoryMmap::from_ranges(&theirs).unwrap(),
        }
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        self.ours.write_slice(address, bytes).unwrap();
        self.theirs.write_slice(bytes, GuestAddress(address)).unwrap();
    }

    #[track_caller]
    fn compare(&self) {
        for (base, length) in [(0, END), ISLAND] {
            let (mut ours, mut theirs) = (vec![0; length as usize], vec![0; length as usize]);
            self.ours.read_slice(base, &mut ours).unwrap();
            self.theirs.read_slice(&mut theirs, GuestAddress(base)).unwrap();
            let differing = ours.iter().zip(&theirs).position(|(a, b)| a != b);
            assert_eq!(differing, None, "of the bytes from {base:#x} on");
        }
    }
}

fn queues(twins: &Twins, event_index: bool) -> (Queue, Oracle) {
    let mut ours = Queue::new(SIZE);
    ours.set_rings(RINGS);
    ours.enable(event_index, &twins.ours).unwrap();
    let mut theirs = Oracle::new(SIZE).unwrap();
    theirs.set_desc_table_address(Some(RINGS.descriptors as u32), None);
    theirs.set_avail_ring_address(Some(RINGS.available as u32), None);
    theirs.set_used_ring_address(Some(RINGS.used as u32), None);
    theirs.set_event_idx(event_index);
    theirs.set_ready(true);
    assert!(theirs.is_valid(&twins.theirs));
    (ours, theirs)
}

/// A descriptor in its memory format.
#[derive(Clone, Copy, Debug)]
struct Raw {
    address: u64,
    length: u32,
    flags: u16,
    next: u16,
}

impl Raw {
    fn bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.length.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// Mostly buffers after the rings, sometimes near edges or outside memory.
fn buffer() -> impl Strategy<Value = (u64, u32)> {
    prop_oneof![
        8 => (0x2000_u64..0x3000, 0_u32..0x100),
        1 => (END - 0x20..END + 0x20, 0_u32..0x40),
        1 => (ISLAND.0 - 0x20..ISLAND.0 + 0x20, 0_u32..0x40),
        1 => (any::<u64>(), any::<u32>()),
        1 => (0x2000_u64..0x3000, any::<u32>()),
    ]
}

fn plain() -> impl Strategy<Value = Raw> {
    let flags = prop_oneof![6 => 0_u16..4, 1 => any::<u16>()];
    let next = prop_oneof![8 => 0..SIZE, 1 => any::<u16>()];
    (buffer(), flags, next).prop_map(|((address, length), flags, next)| Raw {
        address,
        length,
        flags,
        next,
    })
}

/// Valid chains are rare among random descriptors: here each descriptor continues at the next one,
/// and writable ones are last.
fn tidy() -> impl Strategy<Value = Vec<Raw>> {
    let one = ((0x2000_u64..0x3000, 0_u32..0x100), any::<bool>());
    (prop::collection::vec(one, 1..SIZE as usize), 0..SIZE as usize).prop_map(|(list, writes)| {
        let last = list.len() - 1;
        let entry = |(index, ((address, length), more)): (usize, ((u64, u32), bool))| {
            let write = if index >= writes { F_WRITE } else { 0 };
            let next = if more && index != last { F_NEXT } else { 0 };
            Raw { address, length, flags: write | next, next: index as u16 + 1 }
        };
        list.into_iter().enumerate().map(entry).collect()
    })
}

fn table() -> impl Strategy<Value = Vec<Raw>> {
    prop_oneof![2 => tidy(), 1 => prop::collection::vec(plain(), 1..=SIZE as usize)]
}

fn indirect() -> impl Strategy<Value = Raw> {
    let length =
        prop_oneof![6 => (1_u32..12).prop_map(|n| n * 16), 1 => 0_u32..200, 1 => any::<u32>()];
    let address = prop_oneof![6 => Just(TABLES), 1 => TABLES - 8..TABLES + 64, 1 => any::<u64>()];
    let flags = prop_oneof![6 => Just(F_INDIRECT), 1 => any::<u16>().prop_map(|f| f | F_INDIRECT)];
    (address, length, flags, 0..SIZE).prop_map(|(address, length, flags, next)| Raw {
        address,
        length,
        flags,
        next,
    })
}

/// Operation of a driver between two calls of the device.
#[derive(Clone, Debug)]
struct Round {
    heads: Vec<u16>,
    used_event: u16,
    device: usize,
}

fn round() -> impl Strategy<Value = Round> {
    let head = prop_oneof![12 => 0..SIZE, 1 => any::<u16>()];
    (prop::collection::vec(head, 0..6), any::<u16>(), 0_usize..8)
        .prop_map(|(heads, used_event, device)| Round { heads, used_event, device })
}

/// Returns true if a chain, as rust-vmm walks it, keeps the rules that rust-vmm does not check.
fn keeps_the_rules(twins: &Twins, head: u16, list: &[(Part, u16)]) -> bool {
    let Some((_, last_flags)) = list.last() else { return false };
    let mut written = false;
    let mut total = 0_u64;
    for (part, flags) in list {
        let write = flags & F_WRITE != 0;
        if written && !write || !twins.ours.contains(part.address, part.length.into()) {
            return false;
        }
        written |= write;
        total += u64::from(part.length);
    }
    // The descriptor of an indirect table must be the last of the direct ones.
    let mut index = head;
    for _ in 0..SIZE {
        let at = RINGS.descriptors + 16 * u64::from(index);
        let flags: u16 = twins.ours.read(at + FLAGS).unwrap();
        if flags & (F_INDIRECT | F_NEXT) == F_INDIRECT | F_NEXT {
            return false;
        }
        if flags & F_INDIRECT != 0 || flags & F_NEXT == 0 {
            break;
        }
        index = twins.ours.read(at + NEXT).unwrap();
        if index >= SIZE {
            break;
        }
    }
    last_flags & F_NEXT == 0 && total <= u32::MAX.into() && list.len() <= SIZE.into()
}

/// Serves empty chains until the ring's index, which begins at 0, is `end`.
fn advance(twins: &Twins, ours: &mut Queue, theirs: &mut Oracle, end: u16) {
    let empty = Raw { address: 0x2000, length: 8, flags: 0, next: 0 };
    twins.write(RINGS.descriptors + 16 * 7, &empty.bytes());
    twins.write(RINGS.available + RING, &[7, 0].repeat(SIZE.into()));
    let mut index = 0_u16;
    while index < end {
        index = index.saturating_add(SIZE).min(end);
        twins.write(RINGS.available + INDEX, &index.to_le_bytes());
        while let Some(chain) = ours.pop(&twins.ours).unwrap() {
            ours.give_back(&twins.ours, chain.head, 0);
            let head = theirs.iter(&twins.theirs).unwrap().next().unwrap().head_index();
            theirs.add_used(&twins.theirs, head, 0).unwrap();
        }
    }
}

enum Served {
    Chain,
    None,
    /// The ring is broken from here on, or its content is unpredictable.
    Broken,
}

/// Serves the next chain in both queues, and compares what they find.
fn serve(twins: &Twins, ours: &mut Queue, theirs: &mut Oracle) -> Result<Served, TestCaseError> {
    let found = ours.pop(&twins.ours);
    let oracle = match theirs.iter(&twins.theirs) {
        Ok(mut iterator) => iterator.next(),
        Err(virtio_queue::Error::InvalidAvailRingIndex) => {
            prop_assert_eq!(found, Err(RingError::AvailableIndex));
            return Ok(Served::Broken);
        }
        Err(error) => panic!("{error}"),
    };
    let Some(oracle) = oracle else {
        prop_assert_eq!(found, Ok(None));
        return Ok(Served::None);
    };
    let head = oracle.head_index();
    let list: Vec<(Part, u16)> =
        oracle.map(|d| (Part { address: d.addr().0, length: d.len() }, d.flags())).collect();
    let good = head < SIZE && keeps_the_rules(twins, head, &list);
    prop_assert_eq!(found.is_ok(), good, "{:?} {:?}", found, list);
    let Ok(Some(chain)) = found else { return Ok(Served::Broken) };
    prop_assert_eq!(chain.head, head);
    let walked: Vec<_> = ours.walk(&twins.ours, head).map(|d| d.unwrap()).collect();
    prop_assert_eq!(walked.len(), list.len());
    for (descriptor, (part, flags)) in walked.iter().zip(&list) {
        prop_assert_eq!(descriptor.part, *part);
        prop_assert_eq!(descriptor.write, flags & F_WRITE != 0);
    }
    // Fill the writable part only. This may change later chains.
    let fill = vec![0xa5; chain.writable as usize];
    let written = with_writable(ours, &twins.ours, chain, |mut data| data.write(&fill));
    if written != fill.len() {
        // The chain contains its own descriptors.
        return Ok(Served::Broken);
    }
    for (part, _) in list.iter().filter(|(_, flags)| flags & F_WRITE != 0) {
        let bytes = &fill[..part.length as usize];
        twins.theirs.write_slice(bytes, GuestAddress(part.address)).unwrap();
    }
    ours.give_back(&twins.ours, head, chain.writable);
    theirs.add_used(&twins.theirs, head, chain.writable).unwrap();
    Ok(Served::Chain)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn both_find_the_same_chains(
        direct in table(), inner in table(), gate in prop::option::of((indirect(), 0..SIZE)),
        start in prop_oneof![30 => Just(0), 1 => 0xff00_u16..], rounds in prop::collection::vec(round(), 1..6), event_index: bool,
    ) {
        let twins = Twins::new();
        for (index, raw) in direct.iter().enumerate() {
            twins.write(RINGS.descriptors + 16 * index as u64, &raw.bytes());
        }
        for (index, raw) in inner.iter().enumerate() {
            twins.write(TABLES + 16 * index as u64, &raw.bytes());
        }
        if let Some((raw, index)) = gate {
            twins.write(RINGS.descriptors + 16 * u64::from(index), &raw.bytes());
        }
        let (mut ours, mut theirs) = queues(&twins, event_index);
        let mut index = start;
        if start != 0 {
            advance(&twins, &mut ours, &mut theirs, start);
            prop_assert_eq!(ours.wants_interrupt(&twins.ours) || !event_index, theirs.needs_notification(&twins.theirs).unwrap());
        }
        for round in rounds {
            for head in round.heads {
                let slot = u64::from(index % SIZE);
                twins.write(RINGS.available + RING + 2 * slot, &head.to_le_bytes());
                index = index.wrapping_add(1);
            }
            twins.write(RINGS.available + INDEX, &index.to_le_bytes());
            twins.write(RINGS.available + RING + 2 * u64::from(SIZE), &round.used_event.to_le_bytes());
            for _ in 0..round.device {
                match serve(&twins, &mut ours, &mut theirs)? {
                    Served::Chain => {}
                    Served::None => break,
                    Served::Broken => return Ok(()),
                }
            }
            if event_index {
                prop_assert_eq!(ours.wants_interrupt(&twins.ours), theirs.needs_notification(&twins.theirs).unwrap());
                prop_assert_eq!(ours.await_driver(&twins.ours), Ok(theirs.enable_notification(&twins.theirs).unwrap()));
            }
            twins.compare();
        }
    }

    /// Rings at any address, of any size: both enable the same ones.
    #[test]
    fn both_enable_the_same_rings(
        size in prop_oneof![0_u16..40, any::<u16>()],
        places in prop::array::uniform3(prop_oneof![
            4 => (0_u64..END / 16).prop_map(|p| p * 16),
            2 => END - 0x400..END + 0x10,
            2 => ISLAND.0 - 8..ISLAND.0 + ISLAND.1,
            1 => any::<u64>(),
        ]),
    ) {
        let twins = Twins::new();
        let mut ours = Queue::new(32);
        ours.set_size(size);
        let [descriptors, available, used] = places;
        ours.set_rings(Rings { descriptors, available, used });
        let mut theirs = Oracle::new(32).unwrap();
        let placed = theirs.try_set_size(size).is_ok()
            && theirs.try_set_desc_table_address(GuestAddress(descriptors)).is_ok()
            && theirs.try_set_avail_ring_address(GuestAddress(available)).is_ok()
            && theirs.try_set_used_ring_address(GuestAddress(used)).is_ok();
        theirs.set_ready(true);
        let valid = placed && theirs.is_valid(&twins.theirs);
        prop_assert_eq!(ours.enable(true, &twins.ours).is_ok(), valid);
        prop_assert_eq!(ours.ready(), valid);
    }
}

#[test]
fn interrupts_without_event_index() {
    let twins = Twins::new();
    let (mut queue, _) = queues(&twins, false);
    assert!(!queue.wants_interrupt(&twins.ours), "nothing is used");
    queue.add_used(&twins.ours, 0, 0);
    assert!(!queue.wants_interrupt(&twins.ours), "nothing is published");
    queue.publish(&twins.ours);
    assert!(queue.wants_interrupt(&twins.ours));
    assert!(!queue.wants_interrupt(&twins.ours), "once");
    twins.write(RINGS.available, &NO_INTERRUPT.to_le_bytes());
    queue.give_back(&twins.ours, 0, 0);
    assert!(!queue.wants_interrupt(&twins.ours));
}

#[test]
fn a_queue_that_is_not_enabled_does_nothing() {
    let twins = Twins::new();
    twins.write(RINGS.available, &[0, 0, 3, 0]);
    let mut queue = Queue::new(SIZE);
    queue.set_rings(RINGS);
    assert_eq!(queue.pop(&twins.ours), Ok(None));
    assert_eq!(queue.await_driver(&twins.ours), Ok(false));
    assert!(!queue.wants_interrupt(&twins.ours));
    queue.enable(false, &twins.ours).unwrap();
    queue.set_size(2);
    queue.set_rings(Rings::default());
    assert_eq!((queue.size(), queue.rings()), (SIZE, RINGS), "fixed while enabled");
    assert_eq!(queue.pop(&twins.ours).unwrap().unwrap().head, 0);
    queue.undo_pop();
    assert_eq!(queue.pop(&twins.ours).unwrap().unwrap().head, 0);
    queue.reset();
    assert_eq!(queue.pop(&twins.ours), Ok(None));
    assert_eq!((Queue::new(0).max_size(), Queue::new(100).max_size()), (1, 64));
    assert_eq!(Queue::new(u16::MAX).max_size(), MAX_SIZE);
}
