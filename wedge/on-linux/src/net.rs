//! Networks: streams of frames and tap devices of the host, read and written by processes of their own.
//!
//! Frames wait in two rings of shared memory for each network, one for each direction. Each has its process: the sender takes what the virtual CPU
//! has put into one ring to the descriptor, the receiver puts what comes from there into the other. So each only waits for one
//! thing at a time, and both have the network's descriptor, which the guest's processes have not.
//!
//! In a ring each frame is behind its length as 32 bits, big-endian. That is what goes over a stream, which processes therefore need not
//! look into: they move as many bytes at once as there are. Of a tap device each call of the host moves one frame, behind its offload header.
//!
//! Invariants: a ring has one process that puts and one that takes, each of which believes only its own position; what the other says is
//! checked against the ring's size, for the guest can change all of it. Nobody waits for anything that is not announced:
//! who waits says so first and looks once more.
//!
//! Packets of vsock go the same way ([`crate::vsock`]): one more network, behind all others.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, Ordering::SeqCst};

use linux_raw_sys::general as linux;
use linux_raw_sys::{errno, if_tun, ioctl};
use proto::wedge::{Filters, MAX_NETS, Net as Record, Start, layout};
use vmm_bus::backend::{Data, MAX_FRAME, Offload, OffloadCaps};
use vmm_bus::frames::{Frames, NetEndpoint as Connection, NetPort, Sockets};
use vmm_mem::Transfer;

use crate::shared::{event, shared};
use crate::sys::{self, Errno, Vector};
use crate::{device, processes, report};

/// Bytes of a ring. What comes in has more room: a sender outside does not wait when it is full.
const OUT: u32 = 1 << 19;
const IN: u32 = 1 << 20;
/// Bytes of a frame's length.
const LENGTH: u32 = 4;
/// Shortest frame: an Ethernet header.
const MIN_FRAME: u32 = 14;
/// Most bytes that are moved at once, so that one side works while the other does.
const PIECE: u32 = OUT / 4;
/// Number of the one that carries packets of vsock.
pub const VSOCK: usize = MAX_NETS;
/// Most processes of networks: for each a sender and a receiver.
pub const MAX_WORKERS: usize = 2 * (VSOCK + 1);

/// A ring of frames, with `SIZE` bytes.
#[repr(C)]
struct Ring<const SIZE: usize> {
    /// Bytes ever put.
    head: AtomicU32,
    /// Bytes ever taken.
    tail: AtomicU32,
    /// Who takes waits for [`Self::head`].
    hungry: AtomicU32,
    /// Who puts waits for [`Self::tail`].
    full: AtomicU32,
    bytes: UnsafeCell<[u8; SIZE]>,
}

// SAFETY: the bytes are only used by address, and all values of theirs are allowed.
unsafe impl<const SIZE: usize> Sync for Ring<SIZE> {}

impl<const SIZE: usize> Ring<SIZE> {
    const SIZE: u32 = SIZE as u32;

    /// Bytes that wait, for who takes from `tail` on. More than the ring has: nonsense.
    fn used(&self, tail: u32) -> u32 {
        self.head.load(SeqCst).wrapping_sub(tail)
    }

    /// Bytes that can be put, for who puts from `head` on.
    fn room(&self, head: u32) -> u32 {
        Self::SIZE.saturating_sub(head.wrapping_sub(self.tail.load(SeqCst)))
    }

    /// There is so much room that who waits for some is told; for who takes from `tail` on.
    fn has_enough_room(&self, tail: u32) -> bool {
        self.used(tail) <= Self::SIZE / 2
    }

    /// Where `length` bytes at a position are, in one piece or two.
    fn pieces(&self, at: u32, length: u32) -> [Vector; 2] {
        let offset = at % Self::SIZE;
        let first = length.min(Self::SIZE - offset);
        let start = self.bytes.get() as u64;
        [
            Vector { address: start + u64::from(offset), length: first.into() },
            Vector { address: start, length: u64::from(length - first) },
        ]
    }

    /// Copies between `length` bytes at a position, at most all of the ring, and memory at `address`.
    ///
    /// # Safety
    /// There are as many bytes of memory without Rust objects, which may be read, or written if `way` is [`Way::Out`].
    unsafe fn exchange(&self, way: Way, at: u32, address: *mut u8, length: u32) {
        let mut address = address;
        for piece in self.pieces(at, length) {
            let (ours, length) = (piece.address as *mut u8, piece.length as usize);
            let (from, to) = match way {
                Way::In => (address, ours),
                Way::Out => (ours, address),
            };
            // SAFETY: the pieces are in the ring; the caller vouches for the other side.
            unsafe { core::ptr::copy_nonoverlapping(from, to, length) };
            address = address.wrapping_add(length);
        }
    }

    /// Puts bytes at a position.
    fn put(&self, at: u32, bytes: &[u8]) {
        // SAFETY: the bytes are read.
        unsafe { self.exchange(Way::In, at, bytes.as_ptr().cast_mut(), bytes.len() as u32) };
    }

    /// Bytes at a position.
    fn get<const N: usize>(&self, at: u32) -> [u8; N] {
        let mut bytes = [0; N];
        // SAFETY: the array is this function's.
        unsafe { self.exchange(Way::Out, at, bytes.as_mut_ptr(), N as u32) };
        bytes
    }

    /// Copies between the ring and guest memory until the data ends.
    fn exchange_with_guest(&self, way: Way, at: u32, data: &mut Data<'_>) {
        let mut at = at;
        while let Some(part) = data.part(u32::MAX) {
            let (address, length) = (part.address, part.length.into());
            let copied =
                data.memory().for_each_part(way.of_guest(), address, length, |guest, length| {
                    // SAFETY: it is guest memory of this length, which is mapped and where no Rust object is.
                    unsafe { self.exchange(way, at, guest, length as u32) };
                    at = at.wrapping_add(length as u32);
                });
            if copied.is_err() {
                return;
            }
        }
    }
}

/// Direction of a copy, as the ring has it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    In,
    Out,
}

impl Way {
    /// As guest memory has it, if that is the other side.
    fn of_guest(self) -> Transfer {
        match self {
            Self::In => Transfer::FromGuest,
            Self::Out => Transfer::ToGuest,
        }
    }
}

/// What a machine shares with the processes of a network.
#[repr(C)]
pub struct Port {
    /// From the guest. Its `hungry` is about [`Self::calls`].
    out: Ring<{ OUT as usize }>,
    /// To the guest.
    inward: Ring<{ IN as usize }>,
    /// Counts up whenever there is something for the sender.
    calls: AtomicU32,
    /// What frames the guest takes: `TUN_F_CSUM` and its neighbours.
    takes: AtomicU32,
    /// The other side has gone.
    is_down: AtomicU32,
}

/// The networks of a machine.
pub type Ports = [Port; MAX_NETS];

/// A network as the guest's card has it.
pub type Link = NetPort<Rings>;

/// Packets of vsock as the guest's device has them.
pub type Packets = Sockets<Rings>;

/// The rings of a network, on the virtual CPU's side.
pub struct Rings {
    number: usize,
    /// Bytes ever put and taken.
    head: u32,
    tail: u32,
}

/// The network with this number.
pub fn link(number: usize, record: &Record) -> Link {
    NetPort::new(Rings::new(number), record)
}

/// The rings of vsock.
pub fn packets() -> Packets {
    Sockets::new(Rings::new(VSOCK))
}

impl Rings {
    fn new(number: usize) -> Self {
        Self { number, head: 0, tail: 0 }
    }

    fn port(&self) -> &'static Port {
        port(self.number)
    }

    fn call(&self) {
        let port = self.port();
        port.calls.fetch_add(1, SeqCst);
        if port.out.hungry.load(SeqCst) != 0 {
            sys::wake(&port.calls);
        }
    }

    /// Length of the first frame with its header, if all of it is there.
    fn first_length(&self) -> Option<u32> {
        let ring = &self.port().inward;
        let used = ring.used(self.tail);
        if !(LENGTH..=IN).contains(&used) {
            return None;
        }
        let length = u32::from_be_bytes(ring.get(self.tail));
        // A stream's other side may say anything. Its frames are lost then, for nobody knows where the next one is.
        (length <= used - LENGTH).then_some(length)
    }

    /// Takes bytes out.
    fn take(&mut self, length: u32) {
        let ring = &self.port().inward;
        self.tail = self.tail.wrapping_add(length);
        ring.tail.store(self.tail, SeqCst);
        if ring.full.load(SeqCst) != 0 && ring.has_enough_room(self.tail) {
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
            ring.full.store(1, SeqCst);
            if ring.room(self.head) < all {
                return false;
            }
            ring.full.store(0, SeqCst);
        }
        ring.put(self.head, &length.to_be_bytes());
        let at = self.head.wrapping_add(LENGTH);
        ring.put(at, before);
        ring.exchange_with_guest(Way::In, at.wrapping_add(before.len() as u32), data);
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
            ring.hungry.store(1, SeqCst);
            if ring.head.load(SeqCst) == seen && self.first_length().is_none() {
                return None;
            }
            ring.hungry.store(0, SeqCst);
        }
    }

    fn copy_first(&self, before: u32, to: &mut Data<'_>) {
        let Some(length) = self.first_length() else { return };
        to.truncate(length.saturating_sub(before));
        let at = self.tail.wrapping_add(LENGTH).wrapping_add(before);
        self.port().inward.exchange_with_guest(Way::Out, at, to);
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
        if self.port().takes.swap(bits, SeqCst) != bits {
            self.call();
        }
    }
}

/// Connects the descriptors of tap devices with them. For the device process, in the beginning.
pub fn open_taps(start: &Start) -> Result<(), Errno> {
    for number in 0..count(start) {
        let record = crate::shared::net(number);
        if record.is_tap() {
            // `struct ifreq`: name, flags, room.
            let mut request = [0_u8; 40];
            request[..16].copy_from_slice(&record.tap);
            let flags = if_tun::IFF_TAP | if_tun::IFF_NO_PI | if_tun::IFF_VNET_HDR;
            request[16..20].copy_from_slice(&flags.to_le_bytes());
            let arguments = [
                descriptor(number).into(),
                ioctl::TUNSETIFF.into(),
                request.as_mut_ptr() as u64,
                0,
                0,
                0,
            ];
            // SAFETY: the request is read and written, and has its size.
            unsafe { sys::call(linux::__NR_ioctl, arguments) }?;
        }
    }
    Ok(())
}

fn count(start: &Start) -> usize {
    (start.nets as usize).min(MAX_NETS)
}

fn descriptor(number: usize) -> u32 {
    layout::NETS_FD + number as u32
}

fn port(number: usize) -> &'static Port {
    shared().nets.get(number).unwrap_or_else(|| crate::shared::vsock())
}

/// Makes the processes of all networks. For the device process, before there are guests. Gives their ids.
pub fn make_workers(start: &Start, filters: &Filters) -> Result<[u32; MAX_WORKERS], Errno> {
    let mut workers = [0; MAX_WORKERS];
    for (index, place) in workers.iter_mut().enumerate() {
        let number = index / 2;
        let is_there = number < count(start) || number == VSOCK && start.vsock != 0;
        if is_there {
            // Read here: when a worker first runs, the guest may have changed it.
            let is_tap = crate::shared::net(number).is_tap();
            match processes::fork()? {
                0 => work(index, is_tap, filters),
                worker => *place = worker,
            }
        }
    }
    Ok(workers)
}

/// The sender or the receiver of a network.
fn work(index: usize, is_tap: bool, filters: &Filters) -> ! {
    let number = index / 2;
    let alone = sys::ignore(linux::SIGPIPE).and_then(|()| {
        processes::become_worker(descriptor(number), || Ok(()), filters, Filters::NET)
    });
    if let Err(error) = alone {
        report::say(format_args!("cannot set up a process of network {number}: {error}"));
        sys::exit(report::HOST);
    }
    let worker = Worker { number, is_tap, port: port(number) };
    if index.is_multiple_of(2) { worker.send() } else { worker.receive() }
}

struct Worker {
    number: usize,
    is_tap: bool,
    port: &'static Port,
}

impl Worker {
    fn send(&self) -> ! {
        let Port { out, calls, takes, .. } = self.port;
        let (mut tail, mut taken) = (0_u32, 0);
        loop {
            let seen = calls.load(SeqCst);
            let wanted = takes.load(SeqCst);
            if wanted != taken {
                taken = wanted;
                self.set_takes(wanted);
            }
            let used = out.used(tail);
            if used == 0 {
                out.hungry.store(1, SeqCst);
                if out.used(tail) == 0 && takes.load(SeqCst) == taken {
                    sys::wait(calls, seen, None);
                }
                out.hungry.store(0, SeqCst);
                continue;
            }
            let done = match used {
                // Nonsense: all of it is passed over.
                _ if used > OUT => used,
                _ if self.port.is_down.load(SeqCst) != 0 => used,
                _ if self.is_tap => self.send_frame(tail, used),
                _ => self.write(tail, used.min(PIECE)).unwrap_or(used),
            };
            tail = tail.wrapping_add(done);
            out.tail.store(tail, SeqCst);
            if out.full.load(SeqCst) != 0
                && out.has_enough_room(tail)
                && out.full.swap(0, SeqCst) != 0
            {
                device::tell(0, event::NET);
            }
        }
    }

    /// Sends the first frame; gives how many bytes of the ring are done with.
    fn send_frame(&self, tail: u32, used: u32) -> u32 {
        const HEADER: u32 = Offload::HEADER as u32;
        let length = u32::from_be_bytes(self.port.out.get(tail));
        if used < LENGTH
            || !(HEADER + MIN_FRAME..=HEADER + MAX_FRAME).contains(&length)
            || length > used - LENGTH
        {
            return used;
        }
        // What the device does not take, because it is down or the guest's header makes no sense, is lost.
        let _ = self.write(tail.wrapping_add(LENGTH), length);
        LENGTH + length
    }

    /// Writes bytes of the ring; gives how many were taken. `None`: the other side has gone.
    fn write(&self, at: u32, length: u32) -> Option<u32> {
        let vectors = self.port.out.pieces(at, length);
        // SAFETY: the vectors are in the ring.
        match unsafe { self.transfer(linux::__NR_writev, &vectors) } {
            Ok(done) => Some((done as u32).min(length)),
            Err(error) => {
                if !self.is_tap {
                    self.end_of_stream(Some(error));
                }
                None
            }
        }
    }

    fn set_takes(&self, takes: u32) {
        if self.is_tap {
            let fd = descriptor(self.number);
            let arguments = [fd.into(), ioctl::TUNSETOFFLOAD.into(), takes.into(), 0, 0, 0];
            // SAFETY: no memory is touched. If it fails, the card drops what the guest does not take.
            let _ = unsafe { sys::call(linux::__NR_ioctl, arguments) };
        }
    }

    fn receive(&self) -> ! {
        const HEADER: u32 = Offload::HEADER as u32;
        let ring = &self.port.inward;
        let mut head = 0_u32;
        // Of a tap device whole frames are read, each behind a length that is not there yet.
        let (before, least) =
            if self.is_tap { (LENGTH, LENGTH + HEADER + MAX_FRAME) } else { (0, 1) };
        loop {
            let seen = ring.tail.load(SeqCst);
            let room = ring.room(head);
            if room < least {
                ring.full.store(1, SeqCst);
                if ring.room(head) < least {
                    sys::wait(&ring.tail, seen, None);
                }
                ring.full.store(0, SeqCst);
                continue;
            }
            let vectors = ring.pieces(head.wrapping_add(before), (room - before).min(PIECE));
            // SAFETY: the vectors are in the ring.
            let done = match unsafe { self.transfer(linux::__NR_readv, &vectors) } {
                Ok(done) if done != 0 => done as u32,
                end => self.end_of_input(end.err()),
            };
            if self.is_tap {
                ring.put(head, &done.to_be_bytes());
            }
            head = head.wrapping_add(before + done);
            ring.head.store(head, SeqCst);
            if ring.hungry.load(SeqCst) != 0 && ring.hungry.swap(0, SeqCst) != 0 {
                device::tell(0, event::NET);
            }
        }
    }

    /// Reads to or writes from memory, and gives how many bytes.
    ///
    /// # Safety
    /// The vectors are memory of the ring.
    unsafe fn transfer(&self, call: u32, vectors: &[Vector; 2]) -> Result<u64, Errno> {
        // An empty one does no harm.
        let fd = descriptor(self.number);
        let arguments = [fd.into(), vectors.as_ptr() as u64, vectors.len() as u64, 0, 0, 0];
        loop {
            // SAFETY: the caller vouches for the vectors.
            match unsafe { sys::call(call, arguments) } {
                Err(Errno(number)) if number == errno::EINTR as i32 => {}
                result => return result,
            }
        }
    }

    /// Nothing will come any more.
    fn end_of_input(&self, error: Option<Errno>) -> ! {
        self.end_of_stream(error);
        loop {
            sys::wait(&self.port.is_down, 1, None);
        }
    }

    /// The guest is told that its cable is out.
    fn end_of_stream(&self, error: Option<Errno>) {
        if self.port.is_down.swap(1, SeqCst) == 0 {
            let number = self.number;
            match error {
                Some(error) => {
                    report::say(format_args!("network {number}: the other side has gone: {error}"))
                }
                None => report::say(format_args!(
                    "network {number}: the other side has gone: it closed its socket"
                )),
            }
            device::tell(0, event::NET);
        }
    }
}
