//! Pump of networks: moves frames between a vCPU and a frame stream or a tap device of the host.
//!
//! Each network has two frame rings ([`NetQueues`]), one per direction. [`FrameEndpoint`] is the
//! vCPU's end of both. A [`Sender`] moves frames from a ring to the descriptor of the host, a
//! [`Receiver`] from the descriptor to the other ring. The VM decides where these run
//! ([`Transport`]): in two workers, each of which waits for one event only ([`run_sender`],
//! [`run_receiver`]), or in the vCPU's thread with a descriptor that does not block.
//!
//! In a ring each frame is preceded by its length as 32 bits, big-endian. A stream has the same
//! format, so its bytes are moved without parsing them. A system call on a tap device moves one
//! frame, preceded by its offload header.
//!
//! Invariants: a ring has one producer and one consumer; each trusts only its own position and
//! checks the peer's against the ring's size, because a guest may be able to overwrite all of it.
//! The side that waits announces it first and checks once more.
//!
//! Vsock packets use the same rings.

mod ring;

use core::fmt::{self, Display};
use core::sync::atomic::{AtomicU32, Ordering::SeqCst};

use linux_raw_sys::general as linux;
use linux_raw_sys::{errno, if_tun, ioctl};
use proto::hosted::counters::{DeviceCounters, EndedRequests, op};
use proto::vsock;
use vmm_bus::backend::{Data, MAX_FRAME, Offload, OffloadCaps};
use vmm_bus::frames::{Frames, NetEndpoint};

use crate::sys::{self, Errno, Vector};
use ring::{Direction, FrameRing, LENGTH};

/// Ring sizes in bytes. The inbound ring is larger, because a remote sender does not wait while it
/// is full.
const OUT: u32 = 1 << 19;
const IN: u32 = 1 << 20;
/// Shortest frame in bytes: an Ethernet header.
const MIN_FRAME: u32 = 14;
/// Length of the offload header in bytes.
const HEADER: u32 = Offload::HEADER as u32;
/// Longest frame of a stream in bytes.
const MAX_STREAM_FRAME: u32 = IN / 4 + 0x1000;
const _: () = assert!(MAX_STREAM_FRAME >= vsock::MOST_DATA + vsock::HEADER as u32);
const _: () = assert!(LENGTH + MAX_STREAM_FRAME <= OUT && LENGTH + HEADER + MAX_FRAME <= OUT);
/// Largest number of bytes that a worker moves at once, so that both sides of a ring overlap.
const PIECE: u32 = OUT / 4;
const AGAIN: Errno = Errno(errno::EAGAIN as i32);

/// A VM as the pump of one of its networks sees it.
pub trait NetHost {
    /// Notifies the vCPU of frames, of room for frames, or of the end of the connection.
    fn notify(&self);
    /// Returns a time in nanoseconds, of which only differences count.
    fn now(&self) -> u64;
    /// Prints a warning about the network.
    fn warn(&self, text: fmt::Arguments<'_>);
}

/// The VM's half of a [`FrameEndpoint`].
pub trait Transport {
    /// Returns the VM.
    fn host(&self) -> &impl NetHost;
    /// Sends queued frames and applies changed offloads, or wakes the worker that does.
    fn send(&mut self);
    /// Receives frames; returns whether there were any. `false` where a worker receives them.
    fn receive(&mut self) -> bool {
        false
    }
    /// Has the vCPU notified of the next frame, where no worker receives it.
    fn await_frames(&mut self) {}
}

/// Rings shared by a vCPU and the host's side of a network. Zeroed memory is a valid value.
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
    /// The connection is closed.
    is_down: AtomicU32,
}

impl NetQueues {
    /// Returns whether the connection is open.
    pub fn is_up(&self) -> bool {
        self.is_down.load(SeqCst) == 0
    }

    /// Returns whether the sending worker sleeps ([`Self::sleep`]).
    pub fn is_sender_asleep(&self) -> bool {
        self.out.consumer_waiting.load(SeqCst) != 0
    }

    /// Wakes the sending worker.
    pub fn wake_sender(&self) {
        self.calls.fetch_add(1, SeqCst);
        if ring::take(&self.out.consumer_waiting) {
            sys::wake(&self.calls);
        }
    }

    /// Waits until the sending worker, which is idle, is woken. May return early.
    pub fn sleep(&self, is_idle: impl FnOnce() -> bool) {
        let seen = self.calls.load(SeqCst);
        self.out.consumer_waiting.store(1, SeqCst);
        if is_idle() {
            sys::wait(&self.calls, seen, None);
        }
        self.out.consumer_waiting.store(0, SeqCst);
    }

    /// Waits until the vCPU waits for frames, and until `wait_for_host` returns. The caller then
    /// notifies the vCPU.
    pub fn wait_for_vcpu(&self, wait_for_host: impl FnOnce()) {
        let waiting = &self.inward.consumer_waiting;
        while waiting.load(SeqCst) == 0 {
            sys::wait(waiting, 0, None);
        }
        wait_for_host();
        waiting.store(0, SeqCst);
    }

    /// Wakes the thread in [`Self::wait_for_vcpu`].
    pub fn wake_waiter(&self) {
        sys::wake(&self.inward.consumer_waiting);
    }

    /// Records, reports and notifies the end of the connection.
    fn close(&self, host: &impl NetHost, reason: &dyn Display) {
        if self.is_down.swap(1, SeqCst) == 0 {
            host.warn(format_args!("connection closed: {reason}"));
            host.notify();
        }
    }
}

/// Back end of a network or vsock device: the vCPU's end of its rings.
pub struct FrameEndpoint<'q, T> {
    queues: &'q NetQueues,
    transport: T,
    /// Bytes ever produced and consumed.
    head: u32,
    tail: u32,
}

impl<'q, T: Transport> FrameEndpoint<'q, T> {
    /// Creates an endpoint of unused rings.
    pub fn new(queues: &'q NetQueues, transport: T) -> Self {
        Self { queues, transport, head: 0, tail: 0 }
    }

    /// Returns the length of the first frame, and the number of received bytes after it, if it has
    /// arrived.
    fn announced(&self) -> Option<(u32, u32)> {
        let ring = &self.queues.inward;
        let used = ring.used(self.tail);
        let is_there = (LENGTH..=IN).contains(&used);
        is_there.then(|| (u32::from_be_bytes(ring.get(self.tail)), used - LENGTH))
    }

    /// Returns the length of the first frame, if it is complete.
    fn first_length(&self) -> Option<u32> {
        let (length, received) = self.announced()?;
        (length <= received).then_some(length)
    }

    /// Returns the position of bytes of the first frame.
    fn first_at(&self, before: u32) -> u32 {
        self.tail.wrapping_add(LENGTH).wrapping_add(before)
    }
}

impl<T: Transport> Frames for FrameEndpoint<'_, T> {
    fn put(&mut self, before: &[u8], data: &mut Data<'_>) -> bool {
        let ring = &self.queues.out;
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
        self.transport.send();
        true
    }

    fn await_first(&mut self) -> Option<u32> {
        let ring = &self.queues.inward;
        loop {
            match self.announced() {
                Some((length, received)) if length <= received => return Some(length),
                // The peer of a stream may send arbitrary lengths. The position of the next frame
                // is unknown then.
                Some((length, _)) if length > MAX_STREAM_FRAME => {
                    self.queues.close(self.transport.host(), &"invalid frame length");
                }
                _ => {}
            }
            if !self.queues.is_up() {
                return None;
            }
            if self.transport.receive() {
                continue;
            }
            let seen = ring.head.load(SeqCst);
            if ring.consumer_waiting.swap(1, SeqCst) == 0 {
                self.transport.await_frames();
            }
            if ring.head.load(SeqCst) == seen && self.first_length().is_none() {
                return None;
            }
            ring.consumer_waiting.store(0, SeqCst);
        }
    }

    fn copy_first(&self, before: u32, to: &mut Data<'_>) {
        let Some(length) = self.first_length() else { return };
        to.truncate(length.saturating_sub(before));
        self.queues.inward.exchange_with_guest(Direction::Out, self.first_at(before), to);
    }

    fn first_bytes<const N: usize>(&self, before: u32) -> Option<[u8; N]> {
        let end = before.checked_add(N as u32)?;
        (end <= self.first_length()?).then(|| self.queues.inward.get(self.first_at(before)))
    }

    fn forget_first(&mut self) {
        if let Some(length) = self.first_length() {
            self.tail = self.first_at(length);
            let ring = &self.queues.inward;
            if ring.consume(self.tail) {
                sys::wake(&ring.tail);
            }
        }
    }
}

impl<T: Transport> NetEndpoint for FrameEndpoint<'_, T> {
    fn is_up(&self) -> bool {
        self.queues.is_up()
    }

    fn set_offload_caps(&mut self, caps: OffloadCaps) {
        let bit = |set, bit| if set { bit } else { 0 };
        let bits = bit(caps.csum, if_tun::TUN_F_CSUM)
            | bit(caps.tcp4, if_tun::TUN_F_TSO4)
            | bit(caps.tcp6, if_tun::TUN_F_TSO6);
        if self.queues.offloads.swap(bits, SeqCst) != bits {
            self.transport.send();
        }
    }
}

/// Attaches a descriptor of `/dev/net/tun` to the tap device with this name
/// (`Documentation/networking/tuntap.rst` in Linux). A persistent device keeps header length and
/// offloads of its former user; both are reset.
pub fn attach_tap(fd: u32, name: [u8; 16]) -> Result<(), Errno> {
    // `struct ifreq`: name, flags, padding.
    let mut request = [0_u8; 40];
    request[..16].copy_from_slice(&name);
    let flags = if_tun::IFF_TAP | if_tun::IFF_NO_PI | if_tun::IFF_VNET_HDR;
    request[16..20].copy_from_slice(&flags.to_le_bytes());
    let mut header = HEADER;
    let calls = [
        (ioctl::TUNSETIFF, request.as_mut_ptr() as u64),
        (ioctl::TUNSETVNETHDRSZ, &raw mut header as u64),
        (ioctl::TUNSETOFFLOAD, 0),
    ];
    for (call, argument) in calls {
        let arguments = [fd.into(), call.into(), argument, 0, 0, 0];
        // SAFETY: the request and the length have the required sizes. The offloads are a value.
        unsafe { sys::call(linux::__NR_ioctl, arguments) }?;
    }
    Ok(())
}

/// Result of [`Sender::send`] and [`Receiver::receive`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// Frames were moved or dropped.
    Moved,
    /// The ring has no frames to send, or no room for received ones.
    RingBlocks,
    /// The descriptor would block.
    HostBlocks,
    /// The connection is closed for the receiver.
    Closed,
}

/// A network from the host's side.
#[derive(Clone, Copy)]
pub struct NetLink<'q> {
    /// Rings.
    pub queues: &'q NetQueues,
    /// Descriptor of the host.
    pub fd: u32,
    /// The descriptor is that of a tap device.
    pub is_tap: bool,
    /// Counters of the network.
    pub counters: &'q DeviceCounters,
}

impl NetLink<'_> {
    /// Returns the least space for a received frame, and the space for its length, which the
    /// receiver writes after the read: a tap device returns complete frames without it.
    fn least_room(&self) -> (u32, u32) {
        if self.is_tap { (LENGTH + HEADER + MAX_FRAME, LENGTH) } else { (1, 0) }
    }

    /// Sets the offloads of a tap device that the guest accepts.
    fn set_offloads(&self, offloads: u32) {
        if self.is_tap {
            let arguments = [self.fd.into(), ioctl::TUNSETOFFLOAD.into(), offloads.into(), 0, 0, 0];
            // SAFETY: no memory is accessed. On failure, the device model drops frames that the
            // guest does not accept.
            let _ = unsafe { sys::call(linux::__NR_ioctl, arguments) };
        }
    }

    /// Reads into or writes from memory; returns the number of bytes.
    ///
    /// # Safety
    /// The vectors must be memory of the ring.
    unsafe fn transfer(&self, call: u32, vectors: &[Vector; 2]) -> Result<u32, Errno> {
        // An empty vector is valid.
        let arguments = [self.fd.into(), vectors.as_ptr() as u64, vectors.len() as u64, 0, 0, 0];
        loop {
            // SAFETY: the caller guarantees the vectors.
            match unsafe { sys::call(call, arguments) } {
                Err(Errno(number)) if number == errno::EINTR as i32 => {}
                result => return result.map(|done| done as u32),
            }
        }
    }
}

/// Consumer of the frames from the guest.
#[derive(Default, Debug)]
pub struct Sender {
    /// Bytes ever consumed.
    tail: u32,
    /// Offloads of the tap device.
    offloads: u32,
    /// Time in nanoseconds since which the host is to take bytes.
    began: Option<u64>,
    frames: FrameCounter,
}

impl Sender {
    /// Returns whether there are neither frames nor changed offloads.
    pub fn is_idle(&self, queues: &NetQueues) -> bool {
        queues.out.used(self.tail) == 0 && queues.offloads.load(SeqCst) == self.offloads
    }

    /// Sends until the ring is empty or the descriptor would block.
    pub fn send_all(&mut self, link: &NetLink<'_>, host: &impl NetHost) -> Progress {
        loop {
            match self.send(link, host) {
                Progress::Moved => {}
                progress => return progress,
            }
        }
    }

    /// Sends the first bytes of a stream, or the first frame of a tap device.
    fn send(&mut self, link: &NetLink<'_>, host: &impl NetHost) -> Progress {
        let NetQueues { out, offloads, .. } = link.queues;
        let wanted = offloads.load(SeqCst);
        if wanted != self.offloads {
            self.offloads = wanted;
            link.set_offloads(wanted);
        }
        let used = out.used(self.tail);
        if used == 0 {
            return Progress::RingBlocks;
        }
        let began = *self.began.get_or_insert_with(|| host.now());
        let (length, result) = match used {
            // Protocol violation: skip all of it.
            _ if used > OUT || !link.queues.is_up() => (used, None),
            _ if link.is_tap => self.send_frame(link, used),
            _ => {
                let length = used.min(PIECE);
                (used, Some(self.write(link, self.tail, length).map(|done| done.min(length))))
            }
        };
        let (done, mut counted) = match result {
            None => {
                self.frames.next = self.tail.wrapping_add(length);
                (length, EndedRequests::default())
            }
            Some(Ok(done)) => (done, self.count(link, done)),
            Some(Err(AGAIN)) => return Progress::HostBlocks,
            // A tap device that is down, or rejects a header, drops the frame.
            Some(Err(_)) if link.is_tap => (length, EndedRequests::one(0, true, None)),
            Some(Err(error)) => {
                link.queues.close(host, &error);
                (length, EndedRequests::default())
            }
        };
        self.began = None;
        counted.nanoseconds = Some(host.now().saturating_sub(began));
        link.counters.ops[op::TRANSMIT].add(&counted);
        self.tail = self.tail.wrapping_add(done);
        if out.consume(self.tail) && ring::take(&out.producer_waiting) {
            host.notify();
        }
        Progress::Moved
    }

    /// Returns the counters of `done` bytes that the host has taken from the ring.
    fn count(&mut self, link: &NetLink<'_>, done: u32) -> EndedRequests {
        if link.is_tap {
            return EndedRequests::one(done.saturating_sub(LENGTH + HEADER).into(), false, None);
        }
        let end = self.tail.wrapping_add(done);
        // The guest publishes whole frames: the rest of a length is there, too.
        self.frames.count(&link.queues.out, end, done, 1)
    }

    /// Sends the first frame; returns the number of bytes that it occupies, and that were consumed.
    /// `None`: the ring has no frame there.
    fn send_frame(&self, link: &NetLink<'_>, used: u32) -> (u32, Option<Result<u32, Errno>>) {
        let length = u32::from_be_bytes(link.queues.out.get(self.tail));
        let is_valid = used >= LENGTH
            && (HEADER + MIN_FRAME..=HEADER + MAX_FRAME).contains(&length)
            && length <= used - LENGTH;
        if !is_valid {
            return (used, None);
        }
        let all = LENGTH + length;
        (all, Some(self.write(link, self.tail.wrapping_add(LENGTH), length).map(|_| all)))
    }

    /// Writes bytes of the ring; returns their number.
    fn write(&self, link: &NetLink<'_>, at: u32, length: u32) -> Result<u32, Errno> {
        let vectors = link.queues.out.pieces(at, length);
        // SAFETY: the vectors are in the ring.
        unsafe { link.transfer(linux::__NR_writev, &vectors) }
    }
}

/// Counter of the frames in the bytes of a stream.
///
/// The guest may be able to overwrite their lengths in the ring. Bytes that the host has moved are
/// known without it, and each frame has a least length, so a guest's own figures are wrong by the
/// share of the lengths in the shortest frames at most.
#[derive(Default, Debug)]
struct FrameCounter {
    /// Position of the next length.
    next: u32,
}

impl FrameCounter {
    /// Returns the counters of the last `moved` bytes of a ring up to position `end`. A frame
    /// counts when `least` bytes of its length have passed.
    fn count<const SIZE: usize>(
        &mut self,
        ring: &FrameRing<SIZE>,
        end: u32,
        moved: u32,
        least: u32,
    ) -> EndedRequests {
        let most = moved / (LENGTH + MIN_FRAME) + 1;
        let mut frames = 0;
        while end.wrapping_sub(self.next).cast_signed() >= least.cast_signed() {
            let length = u32::from_be_bytes(ring.get(self.next));
            if frames == most || length > MAX_STREAM_FRAME {
                // No frames of the guest's driver, or of a peer that the receiver accepts.
                self.next = end;
                break;
            }
            self.next = self.next.wrapping_add(LENGTH + length);
            frames += 1;
        }
        let bytes = moved.saturating_sub(frames * LENGTH);
        EndedRequests { requests: frames.into(), bytes: bytes.into(), ..EndedRequests::default() }
    }
}

/// Producer of the frames to the guest.
#[derive(Default, Debug)]
pub struct Receiver {
    /// Bytes ever produced.
    head: u32,
    frames: FrameCounter,
}

impl Receiver {
    /// Receives at most `most` bytes of a stream, or one frame of a tap device.
    pub fn receive(&mut self, link: &NetLink<'_>, host: &impl NetHost, most: u32) -> Progress {
        let ring = &link.queues.inward;
        let room = ring.room(self.head);
        let (least, before) = link.least_room();
        if room < least {
            return Progress::RingBlocks;
        }
        let vectors = ring.pieces(self.head.wrapping_add(before), (room - before).min(most));
        // SAFETY: the vectors are in the ring.
        let done = match unsafe { link.transfer(linux::__NR_readv, &vectors) } {
            Ok(done @ 1..) => done,
            Ok(0) => {
                link.queues.close(host, &"the peer has closed its socket");
                return Progress::Closed;
            }
            Err(AGAIN) => return Progress::HostBlocks,
            Err(error) => {
                link.queues.close(host, &error);
                return Progress::Closed;
            }
        };
        let end = self.head.wrapping_add(before + done);
        let counted = if link.is_tap {
            ring.put(self.head, &done.to_be_bytes());
            EndedRequests::one(done.saturating_sub(HEADER).into(), false, None)
        } else {
            self.frames.count(ring, end, done, LENGTH)
        };
        link.counters.ops[op::RECEIVE].add(&counted);
        self.head = end;
        if ring.produce(self.head) {
            host.notify();
        }
        Progress::Moved
    }
}

/// Sends until the process ends: the loop of a worker whose descriptor blocks.
pub fn run_sender(link: &NetLink<'_>, host: &impl NetHost) -> ! {
    let mut sender = Sender::default();
    loop {
        match sender.send_all(link, host) {
            Progress::HostBlocks => link.queues.close(host, &AGAIN),
            _ => link.queues.sleep(|| sender.is_idle(link.queues)),
        }
    }
}

/// Receives until the process ends: the loop of a worker whose descriptor blocks.
pub fn run_receiver(link: &NetLink<'_>, host: &impl NetHost) -> ! {
    let NetQueues { inward, is_down, .. } = link.queues;
    let mut receiver = Receiver::default();
    loop {
        match receiver.receive(link, host, PIECE) {
            Progress::Moved => {}
            Progress::RingBlocks => inward.wait_for_room(receiver.head, link.least_room().0),
            Progress::HostBlocks | Progress::Closed => {
                link.queues.close(host, &AGAIN);
                loop {
                    sys::wait(is_down, 1, None);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
