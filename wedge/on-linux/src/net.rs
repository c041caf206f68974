//! Networks: worker processes for frame streams and tap devices of the host.
//!
//! Each network has two frame rings in shared memory, one per direction, with one worker each: the
//! sender moves frames from the vCPU's ring to the descriptor, the receiver moves frames from the
//! descriptor to the other ring. So each waits for one event only. Only workers have the descriptor
//! of the network.
//!
//! In a ring each frame is preceded by its length as 32 bits, big-endian. A stream has the same
//! format, so its workers move bytes without parsing them. A system call on a tap device moves one
//! frame, preceded by its offload header.
//!
//! Invariants: a ring has one producer and one consumer process; each trusts only its own position
//! and checks the peer's against the ring's size, because the guest can overwrite all of it. A
//! process that waits announces it first and checks once more.
//!
//! Vsock packets use the same rings ([`crate::vsock`]): one more network after all others.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, Ordering::SeqCst};

use host_linux::sys::{self, Errno, Vector};
use linux_raw_sys::general as linux;
use linux_raw_sys::{errno, if_tun, ioctl};
use proto::hosted::{Filters, MAX_NETS, MAX_QUEUES, NetRecord as Record, Start, layout};
use vmm_bus::backend::{Data, MAX_FRAME, Offload, OffloadCaps};
use vmm_bus::frames::{Frames, NetEndpoint as Connection, NetPort, Sockets};
use vmm_mem::Transfer;

use crate::state::shared::{NETS, NETS_LENGTH, event, shared_words};
use crate::{children as processes, kick as device, report};

/// Ring sizes in bytes. The inbound ring is larger, because a remote sender does not wait while it
/// is full.
const OUT: u32 = 1 << 19;
const IN: u32 = 1 << 20;
/// Length of the frame length field in bytes.
const LENGTH: u32 = 4;
/// Shortest frame in bytes: an Ethernet header.
const MIN_FRAME: u32 = 14;
/// Largest number of bytes moved at once, so that both sides of a ring overlap.
const PIECE: u32 = OUT / 4;
/// Index of the rings of vsock packets.
pub const VSOCK: usize = MAX_NETS;
/// Largest number of network workers: a sender and a receiver for each network.
pub const MAX_WORKERS: usize = 2 * (VSOCK + 1);

/// Ring of frames with `SIZE` bytes.
#[repr(C)]
struct FrameRing<const SIZE: usize> {
    /// Bytes ever produced.
    head: AtomicU32,
    /// Bytes ever consumed.
    tail: AtomicU32,
    /// The consumer waits for [`Self::head`].
    consumer_waiting: AtomicU32,
    /// The producer waits for [`Self::tail`].
    producer_waiting: AtomicU32,
    bytes: UnsafeCell<[u8; SIZE]>,
}

// SAFETY: the bytes are accessed by address only, and every value is valid.
unsafe impl<const SIZE: usize> Sync for FrameRing<SIZE> {}

impl<const SIZE: usize> FrameRing<SIZE> {
    const SIZE: u32 = SIZE as u32;

    /// Returns the pending bytes for a consumer at `tail`. A value above the ring's size is a
    /// protocol violation.
    fn used(&self, tail: u32) -> u32 {
        self.head.load(SeqCst).wrapping_sub(tail)
    }

    /// Returns the free space for a producer at `head`.
    fn room(&self, head: u32) -> u32 {
        Self::SIZE.saturating_sub(head.wrapping_sub(self.tail.load(SeqCst)))
    }

    /// Returns whether a consumer at `tail` must wake a waiting producer: the ring is at most half
    /// full.
    fn wakes_producer(&self, tail: u32) -> bool {
        self.used(tail) <= Self::SIZE / 2
    }

    /// Returns the one or two memory ranges of `length` bytes at a position.
    fn pieces(&self, at: u32, length: u32) -> [Vector; 2] {
        let offset = at % Self::SIZE;
        let first = length.min(Self::SIZE - offset);
        let start = self.bytes.get() as u64;
        [
            Vector { address: start + u64::from(offset), length: first.into() },
            Vector { address: start, length: u64::from(length - first) },
        ]
    }

    /// Copies `length` bytes, at most the ring's size, between a position and memory at `address`.
    ///
    /// # Safety
    /// That memory must hold no Rust objects and be readable, or writable if `direction` is
    /// [`Direction::Out`].
    unsafe fn exchange(&self, direction: Direction, at: u32, address: *mut u8, length: u32) {
        let mut address = address;
        for piece in self.pieces(at, length) {
            let (ours, length) = (piece.address as *mut u8, piece.length as usize);
            let (from, to) = match direction {
                Direction::In => (address, ours),
                Direction::Out => (ours, address),
            };
            // SAFETY: the pieces are in the ring; the caller guarantees the other side.
            unsafe { core::ptr::copy_nonoverlapping(from, to, length) };
            address = address.wrapping_add(length);
        }
    }

    /// Writes bytes at a position.
    fn put(&self, at: u32, bytes: &[u8]) {
        // SAFETY: the bytes are only read.
        unsafe { self.exchange(Direction::In, at, bytes.as_ptr().cast_mut(), bytes.len() as u32) };
    }

    /// Reads bytes at a position.
    fn get<const N: usize>(&self, at: u32) -> [u8; N] {
        let mut bytes = [0; N];
        // SAFETY: the array belongs to this function.
        unsafe { self.exchange(Direction::Out, at, bytes.as_mut_ptr(), N as u32) };
        bytes
    }

    /// Copies between the ring and guest memory until the data ends.
    fn exchange_with_guest(&self, direction: Direction, at: u32, data: &mut Data<'_>) {
        let mut at = at;
        while let Some(part) = data.part(u32::MAX) {
            let (address, length) = (part.address, part.length.into());
            let copied = data.memory().for_each_part(
                direction.of_guest(),
                address,
                length,
                |guest, length| {
                    // SAFETY: it is mapped guest memory of this length, where no Rust object is.
                    unsafe { self.exchange(direction, at, guest, length as u32) };
                    at = at.wrapping_add(length as u32);
                },
            );
            if copied.is_err() {
                return;
            }
        }
    }
}

/// Direction of a copy from the ring's point of view.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    In,
    Out,
}

impl Direction {
    /// Returns the direction from guest memory's point of view.
    fn of_guest(self) -> Transfer {
        match self {
            Self::In => Transfer::FromGuest,
            Self::Out => Transfer::ToGuest,
        }
    }
}

/// Rings shared by a vCPU and the workers of a network.
#[repr(C)]
pub struct NetQueues {
    /// Frames from the guest. Its `consumer_waiting` refers to [`Self::calls`].
    out: FrameRing<{ OUT as usize }>,
    /// Frames to the guest.
    inward: FrameRing<{ IN as usize }>,
    /// Futex of the sender, incremented with each frame and each change of the offloads.
    calls: AtomicU32,
    /// Offloads that the guest accepts: `TUN_F_CSUM` and related bits.
    offloads: AtomicU32,
    /// The peer has closed the connection.
    is_down: AtomicU32,
}

/// Rings of all networks.
type AllNetQueues = [NetQueues; MAX_NETS];

/// Back end of a network device.
pub type NetEndpoint = NetPort<Rings>;

/// Back end of the vsock device.
pub type VsockEndpoint = Sockets<Rings>;

/// The vCPU's side of a network's rings.
pub struct Rings {
    net_index: usize,
    /// Bytes ever produced and consumed.
    head: u32,
    tail: u32,
}

/// Creates the back end of a network.
pub fn link(net_index: usize, record: &Record) -> NetEndpoint {
    NetPort::new(Rings::new(net_index), record.is_tap())
}

/// Creates the back end of the vsock device.
pub fn packets() -> VsockEndpoint {
    Sockets::new(Rings::new(VSOCK))
}

impl Rings {
    fn new(net_index: usize) -> Self {
        Self { net_index, head: 0, tail: 0 }
    }

    fn port(&self) -> &'static NetQueues {
        port(self.net_index)
    }

    fn call(&self) {
        let port = self.port();
        port.calls.fetch_add(1, SeqCst);
        if port.out.consumer_waiting.load(SeqCst) != 0 {
            sys::wake(&port.calls);
        }
    }

    /// Returns the length of the first frame with its header, if it is complete.
    fn first_length(&self) -> Option<u32> {
        let ring = &self.port().inward;
        let used = ring.used(self.tail);
        if !(LENGTH..=IN).contains(&used) {
            return None;
        }
        let length = u32::from_be_bytes(ring.get(self.tail));
        // The peer of a stream may send arbitrary lengths. Its frames are lost then, because frame
        // boundaries are unknown.
        (length <= used - LENGTH).then_some(length)
    }

    /// Consumes bytes.
    fn take(&mut self, length: u32) {
        let ring = &self.port().inward;
        self.tail = self.tail.wrapping_add(length);
        ring.tail.store(self.tail, SeqCst);
        if ring.producer_waiting.load(SeqCst) != 0 && ring.wakes_producer(self.tail) {
            sys::wake(&ring.tail);
        }
    }
}

impl Frames for Rings {
    fn put(&mut self, before: &[u8], data: &mut Data<'_>) -> bool {
        let ring = &self.port().out;
        let length = before.len() as u32 + data.remaining();
        let all = LENGTH + length;
        if ring.room(self.head) < all {
            ring.producer_waiting.store(1, SeqCst);
            if ring.room(self.head) < all {
                return false;
            }
            ring.producer_waiting.store(0, SeqCst);
        }
        ring.put(self.head, &length.to_be_bytes());
        let at = self.head.wrapping_add(LENGTH);
        ring.put(at, before);
        ring.exchange_with_guest(Direction::In, at.wrapping_add(before.len() as u32), data);
        self.head = self.head.wrapping_add(all);
        ring.head.store(self.head, SeqCst);
        self.call();
        true
    }

    fn await_first(&mut self) -> Option<u32> {
        let ring = &self.port().inward;
        loop {
            if let Some(length) = self.first_length() {
                return Some(length);
            }
            let seen = ring.head.load(SeqCst);
            ring.consumer_waiting.store(1, SeqCst);
            if ring.head.load(SeqCst) == seen && self.first_length().is_none() {
                return None;
            }
            ring.consumer_waiting.store(0, SeqCst);
        }
    }

    fn copy_first(&self, before: u32, to: &mut Data<'_>) {
        let Some(length) = self.first_length() else { return };
        to.truncate(length.saturating_sub(before));
        let at = self.tail.wrapping_add(LENGTH).wrapping_add(before);
        self.port().inward.exchange_with_guest(Direction::Out, at, to);
    }

    fn first_bytes<const N: usize>(&self, before: u32) -> Option<[u8; N]> {
        let end = before.checked_add(N as u32)?;
        let at = self.tail.wrapping_add(LENGTH).wrapping_add(before);
        (end <= self.first_length()?).then(|| self.port().inward.get(at))
    }

    fn forget_first(&mut self) {
        if let Some(length) = self.first_length() {
            self.take(LENGTH + length);
        }
    }
}

impl Connection for Rings {
    fn is_up(&self) -> bool {
        self.port().is_down.load(SeqCst) == 0
    }

    fn set_offload_caps(&mut self, caps: OffloadCaps) {
        let bit = |set, bit| if set { bit } else { 0 };
        let bits = bit(caps.csum, if_tun::TUN_F_CSUM)
            | bit(caps.tcp4, if_tun::TUN_F_TSO4)
            | bit(caps.tcp6, if_tun::TUN_F_TSO6);
        if self.port().offloads.swap(bits, SeqCst) != bits {
            self.call();
        }
    }
}

/// Attaches the descriptors to their tap devices. For the device process, at its start.
pub fn open_taps(start: &Start) -> Result<(), Errno> {
    for net_index in 0..count(start) {
        let record = crate::state::config::net(net_index);
        if record.is_tap() {
            // `struct ifreq`: name, flags, padding.
            let mut request = [0_u8; 40];
            request[..16].copy_from_slice(&record.tap);
            let flags = if_tun::IFF_TAP | if_tun::IFF_NO_PI | if_tun::IFF_VNET_HDR;
            request[16..20].copy_from_slice(&flags.to_le_bytes());
            let arguments = [
                descriptor(net_index).into(),
                ioctl::TUNSETIFF.into(),
                request.as_mut_ptr() as u64,
                0,
                0,
                0,
            ];
            // SAFETY: the request has the required size, and is read and written.
            unsafe { sys::call(linux::__NR_ioctl, arguments) }?;
        }
    }
    Ok(())
}

fn count(start: &Start) -> usize {
    (start.nets as usize).min(MAX_NETS)
}

fn descriptor(net_index: usize) -> u32 {
    layout::NETS_FD + net_index as u32
}

shared_words! {
    "shared", NETS;
    /// Frame rings of the networks, in shared memory.
    #[repr(C)]
    pub struct NetSection {
        nets: AllNetQueues,
    }
}

const _: () = assert!(size_of::<NetSection>() as u64 <= NETS_LENGTH);
const _: () = assert!(layout::VSOCK + size_of::<NetQueues>() as u64 <= layout::QUEUES);

/// Returns the frame rings of all networks.
fn networks() -> &'static AllNetQueues {
    // SAFETY: the device process has mapped the shared memory, initially zero, for the life of each
    // process; the place is reserved for them.
    unsafe { &(*(NETS as *const NetSection)).nets }
}

/// Returns the vsock packet rings.
fn vsock() -> &'static NetQueues {
    // SAFETY: as `networks`.
    unsafe { &*((layout::SHARED + layout::VSOCK) as *const NetQueues) }
}

fn port(net_index: usize) -> &'static NetQueues {
    networks().get(net_index).unwrap_or_else(|| vsock())
}

/// Creates the workers of all networks; returns their ids. For the device process, before the guest
/// runs.
pub fn make_workers(start: &Start, filters: &Filters) -> Result<[u32; MAX_WORKERS], Errno> {
    let mut workers = [0; MAX_WORKERS];
    for (index, place) in workers.iter_mut().enumerate() {
        let net_index = index / 2;
        let is_there = net_index < count(start) || net_index == VSOCK && start.vsock != 0;
        if is_there {
            // Read now: the guest may change it before a worker runs.
            let is_tap = crate::state::config::net(net_index).is_tap();
            match processes::fork()? {
                0 => work(index, is_tap, filters),
                worker => *place = worker,
            }
        }
    }
    Ok(workers)
}

/// Runs the sender or the receiver of a network.
fn work(index: usize, is_tap: bool, filters: &Filters) -> ! {
    let net_index = index / 2;
    let alone = sys::ignore(linux::SIGPIPE).and_then(|()| {
        processes::become_worker(descriptor(net_index), || Ok(()), filters, Filters::NET)
    });
    if let Err(error) = alone {
        report::warn(format_args!("cannot set up a worker of network {net_index}: {error}"));
        sys::exit(report::HOST);
    }
    let worker = Worker { net_index, is_tap, port: port(net_index) };
    if index.is_multiple_of(2) { worker.send() } else { worker.receive() }
}

struct Worker {
    net_index: usize,
    is_tap: bool,
    port: &'static NetQueues,
}

impl Worker {
    fn send(&self) -> ! {
        let NetQueues { out, calls, offloads, .. } = self.port;
        let (mut tail, mut taken) = (0_u32, 0);
        loop {
            let seen = calls.load(SeqCst);
            let wanted = offloads.load(SeqCst);
            if wanted != taken {
                taken = wanted;
                self.set_takes(wanted);
            }
            let used = out.used(tail);
            if used == 0 {
                out.consumer_waiting.store(1, SeqCst);
                if out.used(tail) == 0 && offloads.load(SeqCst) == taken {
                    sys::wait(calls, seen, None);
                }
                out.consumer_waiting.store(0, SeqCst);
                continue;
            }
            let done = match used {
                // Protocol violation: skip all of it.
                _ if used > OUT => used,
                _ if self.port.is_down.load(SeqCst) != 0 => used,
                _ if self.is_tap => self.send_frame(tail, used),
                _ => self.write(tail, used.min(PIECE)).unwrap_or(used),
            };
            tail = tail.wrapping_add(done);
            out.tail.store(tail, SeqCst);
            if out.producer_waiting.load(SeqCst) != 0
                && out.wakes_producer(tail)
                && out.producer_waiting.swap(0, SeqCst) != 0
            {
                device::raise_completion(MAX_QUEUES + self.net_index, event::NET);
            }
        }
    }

    /// Sends the first frame; returns the number of consumed bytes.
    fn send_frame(&self, tail: u32, used: u32) -> u32 {
        const HEADER: u32 = Offload::HEADER as u32;
        let length = u32::from_be_bytes(self.port.out.get(tail));
        if used < LENGTH
            || !(HEADER + MIN_FRAME..=HEADER + MAX_FRAME).contains(&length)
            || length > used - LENGTH
        {
            return used;
        }
        // A frame is dropped if the device is down or rejects its header.
        let _ = self.write(tail.wrapping_add(LENGTH), length);
        LENGTH + length
    }

    /// Writes bytes of the ring; returns their number. `None`: the peer has closed the connection.
    fn write(&self, at: u32, length: u32) -> Option<u32> {
        let vectors = self.port.out.pieces(at, length);
        // SAFETY: the vectors are in the ring.
        match unsafe { self.transfer(linux::__NR_writev, &vectors) } {
            Ok(done) => Some((done as u32).min(length)),
            Err(error) => {
                if !self.is_tap {
                    self.set_link_down(Some(error));
                }
                None
            }
        }
    }

    fn set_takes(&self, offloads: u32) {
        if self.is_tap {
            let fd = descriptor(self.net_index);
            let arguments = [fd.into(), ioctl::TUNSETOFFLOAD.into(), offloads.into(), 0, 0, 0];
            // SAFETY: no memory is accessed. On failure, the device model drops frames that the
            // guest does not accept.
            let _ = unsafe { sys::call(linux::__NR_ioctl, arguments) };
        }
    }

    fn receive(&self) -> ! {
        const HEADER: u32 = Offload::HEADER as u32;
        let ring = &self.port.inward;
        let mut head = 0_u32;
        // A tap device returns complete frames; each is preceded by a length, written after the
        // read.
        let (before, least) =
            if self.is_tap { (LENGTH, LENGTH + HEADER + MAX_FRAME) } else { (0, 1) };
        loop {
            let seen = ring.tail.load(SeqCst);
            let room = ring.room(head);
            if room < least {
                ring.producer_waiting.store(1, SeqCst);
                if ring.room(head) < least {
                    sys::wait(&ring.tail, seen, None);
                }
                ring.producer_waiting.store(0, SeqCst);
                continue;
            }
            let vectors = ring.pieces(head.wrapping_add(before), (room - before).min(PIECE));
            // SAFETY: the vectors are in the ring.
            let done = match unsafe { self.transfer(linux::__NR_readv, &vectors) } {
                Ok(done) if done != 0 => done as u32,
                end => self.stop_receiving(end.err()),
            };
            if self.is_tap {
                ring.put(head, &done.to_be_bytes());
            }
            head = head.wrapping_add(before + done);
            ring.head.store(head, SeqCst);
            if ring.consumer_waiting.load(SeqCst) != 0 && ring.consumer_waiting.swap(0, SeqCst) != 0
            {
                device::raise_completion(MAX_QUEUES + self.net_index, event::NET);
            }
        }
    }

    /// Reads into or writes from memory; returns the number of bytes.
    ///
    /// # Safety
    /// The vectors must be memory of the ring.
    unsafe fn transfer(&self, call: u32, vectors: &[Vector; 2]) -> Result<u64, Errno> {
        // An empty vector is valid.
        let fd = descriptor(self.net_index);
        let arguments = [fd.into(), vectors.as_ptr() as u64, vectors.len() as u64, 0, 0, 0];
        loop {
            // SAFETY: the caller guarantees the vectors.
            match unsafe { sys::call(call, arguments) } {
                Err(Errno(number)) if number == errno::EINTR as i32 => {}
                result => return result,
            }
        }
    }

    /// Reports the end of the input, and waits forever.
    fn stop_receiving(&self, error: Option<Errno>) -> ! {
        self.set_link_down(error);
        loop {
            sys::wait(&self.port.is_down, 1, None);
        }
    }

    /// Reports a lost link to the guest.
    fn set_link_down(&self, error: Option<Errno>) {
        if self.port.is_down.swap(1, SeqCst) == 0 {
            let net_index = self.net_index;
            match error {
                Some(error) => {
                    report::warn(format_args!("network {net_index}: connection closed: {error}"))
                }
                None => report::warn(format_args!(
                    "network {net_index}: connection closed: the peer has closed its socket"
                )),
            }
            device::raise_completion(MAX_QUEUES + self.net_index, event::NET);
        }
    }
}
