use std::boxed::Box;
use std::fmt::Arguments;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::string::{String, ToString};
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::vec::Vec;

use proto::hosted::counters::OpTotals;
use proto::hosted::latency;
use vmm_bus::backend::Part;
use vmm_mem::GuestMemory;
use vmm_mem::testing::memory;

use super::*;
use crate::sandbox;

/// A VM that counts notifications and keeps warnings.
#[derive(Default)]
struct TestVm {
    notified: AtomicU32,
    warnings: Mutex<Vec<String>>,
    counters: DeviceCounters,
    time: AtomicU64,
}

impl NetHost for TestVm {
    fn notify(&self) {
        self.notified.fetch_add(1, SeqCst);
    }

    fn now(&self) -> u64 {
        self.time.fetch_add(5, SeqCst)
    }

    fn warn(&self, text: Arguments<'_>) {
        self.warnings.lock().unwrap().push(text.to_string());
    }
}

impl TestVm {
    /// Returns frames, dropped ones, and bytes.
    fn counted(&self, op: usize) -> (u64, u64, u64) {
        let OpTotals { requests, failed, bytes, .. } = self.counters.ops[op].totals();
        (requests, failed, bytes)
    }

    fn wait_for_notification(&self) {
        while self.notified.swap(0, SeqCst) == 0 {
            thread::yield_now();
        }
    }
}

/// Transport by workers.
struct Workers(&'static NetQueues, &'static TestVm);

impl Transport for Workers {
    fn host(&self) -> &impl NetHost {
        self.1
    }

    fn send(&mut self) {
        self.0.wake_sender();
    }
}

type TestEndpoint = FrameEndpoint<'static, Workers>;

/// Returns the two sides of new rings, which live until the process ends, as workers do.
fn network(fd: u32, is_tap: bool) -> (TestEndpoint, NetLink<'static>, &'static TestVm) {
    // SAFETY: zeroed memory is a valid value.
    let queues = Box::leak(unsafe { Box::<NetQueues>::new_zeroed().assume_init() });
    let vm: &TestVm = Box::leak(Box::default());
    let endpoint = FrameEndpoint::new(queues, Workers(queues, vm));
    (endpoint, NetLink { queues, fd, is_tap, counters: &vm.counters }, vm)
}

/// Returns an endpoint whose workers use one side of a stream, and the other side.
fn stream() -> (TestEndpoint, UnixStream, &'static TestVm) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let ours: &UnixStream = Box::leak(Box::new(ours));
    let (endpoint, link, vm) = network(ours.as_raw_fd() as u32, false);
    thread::spawn(move || run_sender(&link, vm));
    thread::spawn(move || run_receiver(&link, vm));
    (endpoint, theirs, vm)
}

/// Calls `act` with a part of guest memory.
fn with<T>(memory: &GuestMemory, length: u32, act: impl FnOnce(&mut Data<'_>) -> T) -> T {
    let mut parts = [Part { address: 0, length }].into_iter();
    act(&mut Data::new(memory, &mut parts, length))
}

fn first(endpoint: &mut TestEndpoint, vm: &TestVm) -> Option<u32> {
    loop {
        match endpoint.await_first() {
            None if endpoint.is_up() => vm.wait_for_notification(),
            first => return first,
        }
    }
}

#[test]
fn a_range_at_the_end_of_a_ring_has_two_pieces() {
    let (endpoint, ..) = network(0, false);
    let ring = &endpoint.queues.out;
    let [first, second] = ring.pieces(3 * OUT - 8, 20);
    assert_eq!((first.length, second.length), (8, 12));
    assert_eq!(first.address, second.address + u64::from(OUT) - 8);
    let [first, second] = ring.pieces(u32::MAX, 0);
    assert_eq!((first.length, second.length), (0, 0));
    ring.put(u32::MAX - 2, b"wrapped");
    assert_eq!(ring.get(u32::MAX - 2), *b"wrapped");
    assert_eq!(ring.get(0), *b"pped");
}

#[test]
fn positions_of_a_peer_are_checked() {
    let (endpoint, ..) = network(0, false);
    let ring = &endpoint.queues.out;
    ring.tail.store(5, SeqCst);
    assert_eq!((ring.room(5), ring.room(OUT + 5), ring.room(4)), (OUT, 0, 0));
    ring.head.store(4, SeqCst);
    assert_eq!((ring.used(4), ring.used(5)), (0, u32::MAX));
    ring.producer_waiting.store(1, SeqCst);
    ring.head.store(OUT, SeqCst);
    assert_eq!((ring.consume(OUT / 2 - 1), ring.consume(OUT / 2)), (false, true));
}

#[test]
fn workers_move_frames_in_order() {
    const COUNT: u32 = 300;
    let (mut endpoint, mut outside, vm) = stream();
    let memory = memory(&[(0, 0x1_0000)]);
    let echo = thread::spawn(move || {
        for _ in 0..COUNT {
            let mut length = [0; 4];
            outside.read_exact(&mut length).unwrap();
            let mut frame = std::vec![0; u32::from_be_bytes(length) as usize];
            outside.read_exact(&mut frame).unwrap();
            outside.write_all(&length).unwrap();
            outside.write_all(&frame).unwrap();
        }
        outside
    });
    let length = |index: u32| index * 199 % 60_000;
    let mut frames = 0..COUNT;
    let mut take = |endpoint: &mut TestEndpoint| {
        let Some(index) = frames.next() else { return false };
        assert_eq!(first(endpoint, vm), Some(length(index) + 4));
        assert_eq!(endpoint.first_bytes(0), Some(index.to_le_bytes()));
        assert_eq!(endpoint.first_bytes::<4>(length(index) + 1), None);
        with(&memory, 0x1_0000, |data| endpoint.copy_first(4, data));
        endpoint.forget_first();
        true
    };
    for index in 0..COUNT {
        let before = index.to_le_bytes();
        while !with(&memory, length(index), |data| endpoint.put(&before, data)) {
            take(&mut endpoint);
        }
    }
    while take(&mut endpoint) {}
    let all = (COUNT.into(), 0, (0..COUNT).map(|index| u64::from(length(index)) + 4).sum());
    assert_eq!(vm.counted(op::RECEIVE), all);
    // The sender counts after the echo may have returned.
    while vm.counted(op::TRANSMIT).0 < all.0 {
        thread::yield_now();
    }
    assert_eq!(vm.counted(op::TRANSMIT), all);
    let [received, sent] = [op::RECEIVE, op::TRANSMIT].map(|op| vm.counters.ops[op].totals());
    assert_eq!((received.nanoseconds, received.buckets), (0, [0; latency::BUCKETS]));
    let pieces: u64 = sent.buckets.iter().sum();
    assert!(sent.longest >= 5 && sent.nanoseconds >= 5 * pieces && pieces > 0, "{sent:?}");
    drop(echo.join().unwrap());
    assert_eq!((first(&mut endpoint, vm), endpoint.is_up()), (None, false));
    assert!(vm.warnings.lock().unwrap()[0].starts_with("connection closed: "));
}

#[test]
fn a_full_ring_notifies_when_it_is_half_empty() {
    let (mut endpoint, mut outside, vm) = stream();
    let memory = memory(&[(0, 0x1_0000)]);
    let mut put = || with(&memory, 60_000, |data| endpoint.put(&[], data));
    let count = (0..).take_while(|_| put()).count();
    outside.read_exact(&mut std::vec![0; count * 60_004]).unwrap();
    vm.wait_for_notification();
    assert!(put());
}

#[test]
fn an_invalid_length_ends_a_stream() {
    let (mut endpoint, mut outside, vm) = stream();
    outside.write_all(&(MAX_STREAM_FRAME + 1).to_be_bytes()).unwrap();
    assert_eq!((first(&mut endpoint, vm), endpoint.is_up()), (None, false));
    assert_eq!(*vm.warnings.lock().unwrap(), ["connection closed: invalid frame length"]);
}

/// A datagram socket moves one frame per call, as a tap device does.
#[test]
fn a_tap_device_moves_one_frame_per_call() {
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_nonblocking(true).unwrap();
    let (mut endpoint, link, vm) = network(ours.as_raw_fd() as u32, true);
    let (mut sender, mut receiver) = (Sender::default(), Receiver::default());
    let (memory, mut frame) = (memory(&[(0, 0x1_0000)]), [0; 100]);
    memory.write_slice(0, b"an Ethernet frame").unwrap();
    for length in [17, MIN_FRAME - 1, 14] {
        let header = [7; Offload::HEADER];
        assert!(with(&memory, length, |data| endpoint.put(&header, data)));
        assert_eq!(sender.send_all(&link, vm), Progress::RingBlocks);
    }
    // The invalid one is dropped.
    assert_eq!(theirs.recv(&mut frame).unwrap(), Offload::HEADER + 17);
    assert_eq!(frame[..Offload::HEADER + 2], *b"\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07an");
    assert_eq!(theirs.recv(&mut frame).unwrap(), Offload::HEADER + 14);
    assert!(theirs.recv(&mut frame).is_err());

    assert_eq!(receiver.receive(&link, vm, u32::MAX), Progress::HostBlocks);
    theirs.send(&[1, 2, 3]).unwrap();
    theirs.send(&[4]).unwrap();
    assert_eq!(receiver.receive(&link, vm, u32::MAX), Progress::Moved);
    assert_eq!(receiver.receive(&link, vm, u32::MAX), Progress::Moved);
    assert_eq!((endpoint.await_first(), endpoint.first_bytes(1)), (Some(3), Some([2, 3])));
    endpoint.forget_first();
    assert_eq!((endpoint.await_first(), endpoint.first_bytes(0)), (Some(1), Some([4])));
    assert_eq!(endpoint.first_bytes::<2>(u32::MAX), None);
    assert_eq!((vm.counted(op::TRANSMIT), vm.counted(op::RECEIVE)), ((2, 0, 31), (2, 0, 0)));
    assert!(vm.warnings.lock().unwrap().is_empty());
}

/// Frames wait while the host takes none; a violation of the protocol is skipped.
#[test]
fn a_sender_keeps_frames_and_skips_violations() {
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let (mut endpoint, link, vm) = network(ours.as_raw_fd() as u32, true);
    let (mut sender, memory) = (Sender::default(), memory(&[(0, 0x1000)]));
    let mut sent = 0;
    let header = [0; Offload::HEADER];
    let mut put = || with(&memory, 60, |data| endpoint.put(&header, data));
    while put() && sender.send_all(&link, vm) != Progress::HostBlocks {
        sent += 1;
    }
    assert!(!sender.is_idle(link.queues));
    theirs.recv(&mut [0; 100]).unwrap();
    assert_eq!(sender.send_all(&link, vm), Progress::RingBlocks);
    (0..sent).for_each(|_| assert_eq!(theirs.recv(&mut [0; 100]).unwrap(), 60 + 10));
    link.queues.out.head.fetch_sub(1, SeqCst);
    assert!(!sender.is_idle(link.queues));
    assert_eq!(sender.send_all(&link, vm), Progress::RingBlocks);
    assert!(sender.is_idle(link.queues));
}

/// A guest that overwrites lengths, or a peer with others, makes only its own figures wrong, by
/// little.
#[test]
fn forged_lengths_are_bounded() {
    let (endpoint, ..) = network(0, false);
    let ring = &endpoint.queues.out;
    let mut frames = FrameCounter::default();
    // Empty frames only: as many as could be.
    let counted = frames.count(ring, 1800, 1800, 1);
    assert_eq!((counted.requests, counted.bytes), (101, 1800 - 4 * 101));
    assert_eq!(frames.next, 1800);
    ring.put(1800, &u32::MAX.to_be_bytes());
    let counted = frames.count(ring, 1900, 100, 1);
    assert_eq!((counted.requests, counted.bytes, frames.next), (0, 100, 1900));
    // One length on both sides of the end of a move.
    ring.put(1900, &60_u32.to_be_bytes());
    assert_eq!(frames.count(ring, 1902, 2, LENGTH).requests, 0);
    assert_eq!(frames.count(ring, 1964, 62, LENGTH).requests, 1);
    assert_eq!(frames.next, 1964);
}

#[test]
fn only_a_tun_descriptor_becomes_a_tap_device() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    assert!(attach_tap(ours.as_raw_fd() as u32, [b'x'; 16]).is_err());
}

/// QEMU and others use headers of 12 bytes and all offloads, which a persistent device keeps.
#[test]
fn a_tap_device_does_not_keep_the_settings_of_its_former_user() {
    const SIOCETHTOOL: u32 = 0x8946;
    const ETHTOOL_GTSO: u32 = 0x1e;
    // The namespace of this thread, and its devices, end with it.
    if let Err(error) = sandbox::unshare(linux::CLONE_NEWNET) {
        std::println!("skipped: no network namespace: {error}");
        return;
    }
    let control = |file: &dyn AsRawFd, call: u32, argument: u64| {
        let arguments = [file.as_raw_fd() as u64, call.into(), argument, 0, 0, 0];
        // SAFETY: the arguments below are values, or addresses of memory with the required size.
        unsafe { sys::call(linux::__NR_ioctl, arguments) }.unwrap();
    };
    let open = || File::options().read(true).write(true).open("/dev/net/tun");
    let former = match open() {
        // A host without the driver, or a container without access to its devices.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
            std::println!("skipped: no TAP devices: /dev/net/tun: {error}");
            return;
        }
        opened => opened.unwrap(),
    };
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    let name = *b"tap0\0\0\0\0\0\0\0\0\0\0\0\0";
    let does_tso = || {
        let mut value = [ETHTOOL_GTSO, 0];
        let start = u64::from_ne_bytes(*b"tap0\0\0\0\0");
        let mut request = [start, 0, value.as_mut_ptr() as u64, 0, 0];
        control(&socket, SIOCETHTOOL, request.as_mut_ptr() as u64);
        value[1] != 0
    };
    attach_tap(former.as_raw_fd() as u32, name).unwrap();
    let mut length = 12_u32;
    control(&former, ioctl::TUNSETPERSIST, 1);
    control(&former, ioctl::TUNSETVNETHDRSZ, &raw mut length as u64);
    let offloads = if_tun::TUN_F_CSUM | if_tun::TUN_F_TSO4;
    control(&former, ioctl::TUNSETOFFLOAD, offloads.into());
    assert!(does_tso());
    drop(former);

    let own = open().unwrap();
    attach_tap(own.as_raw_fd() as u32, name).unwrap();
    control(&own, ioctl::TUNGETVNETHDRSZ, &raw mut length as u64);
    assert_eq!((length, does_tso()), (HEADER, false));
}
