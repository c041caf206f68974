//! Networks and vsock: frame streams and tap devices of the host.
//!
//! The vCPU that uses a network card reads and writes its descriptor itself, without blocking.
//! Where no data or space is available, a thread of the network waits instead and notifies a vCPU.
//!
//! In a stream, each frame follows its length as a 32-bit big-endian number, as in the rings of
//! process VMs. A tap device transfers one frame per call, after its offload header.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use hosted_devices::describe;
use proto::hosted::{NetRecord as Record, log};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use vmm_bus::Data;
use vmm_bus::backend::{MAX_FRAME, Offload, OffloadCaps};
use vmm_bus::frames::{Frames, NetEndpoint};

use crate::vcpu_thread::{Notify, event};
use crate::{Error, calls};

/// Bytes of a frame's length field.
const LENGTH: usize = 4;
/// Most bytes queued for the host.
const ROOM: usize = 1 << 19;
/// Most bytes buffered from the host: two of the longest vsock packets.
const KEPT: usize = 1 << 19;
/// Longest frame of a stream in bytes.
const MAX_STREAM_FRAME: usize = KEPT / 2 + 0x1000;
const _: () = assert!(MAX_STREAM_FRAME > (proto::vsock::MOST_DATA as usize) + proto::vsock::HEADER);
const _: () = assert!(KEPT > MAX_FRAME as usize + Offload::HEADER + LENGTH);

/// A descriptor of the host, and its output queue.
pub struct Network {
    /// Name for messages.
    name: String,
    file: File,
    is_tap: bool,
    out: Mutex<Out>,
    /// Signals that the output queue is not empty.
    is_filled: Condvar,
    /// Signals that a vCPU waits for frames.
    is_hungry: Mutex<bool>,
    hungers: Condvar,
    is_down: AtomicBool,
}

/// Output that the host has not taken yet.
#[derive(Default)]
struct Out {
    bytes: Vec<u8>,
    /// Number of bytes already written.
    taken: usize,
    /// The guest has been refused a frame.
    is_awaited: bool,
}

impl Out {
    fn left(&self) -> usize {
        self.bytes.len() - self.taken
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every update is atomic under the lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Network {
    /// Creates a network from a stream descriptor, or from `/dev/net/tun` for the tap device in the
    /// record.
    pub fn new(name: String, file: File, record: &Record) -> Result<Self, Error> {
        let is_tap = record.is_tap();
        if is_tap {
            calls::become_tap(&file, record.tap)
                .map_err(Error::host("attach to the tap device"))?;
        }
        fcntl_getfl(&file)
            .and_then(|flags| fcntl_setfl(&file, flags | OFlags::NONBLOCK))
            .map_err(Error::host("set up a network"))?;
        Ok(Self {
            name,
            file,
            is_tap,
            out: Mutex::default(),
            is_filled: Condvar::new(),
            is_hungry: Mutex::default(),
            hungers: Condvar::new(),
            is_down: AtomicBool::new(false),
        })
    }

    /// Loop of the sender thread: waits for space and writes queued output.
    pub fn send(&self, vcpu_thread: &impl Notify) {
        loop {
            let is_idle = |out: &mut Out| out.left() == 0 && !out.is_awaited;
            let out = lock(&self.out);
            drop(self.is_filled.wait_while(out, is_idle).unwrap_or_else(PoisonError::into_inner));
            self.wait(PollFlags::OUT);
            let mut out = lock(&self.out);
            self.flush(&mut out);
            let has_room = out.left() <= ROOM / 2 && std::mem::take(&mut out.is_awaited);
            if has_room || self.is_down.load(SeqCst) {
                vcpu_thread.notify(event::NET);
            }
        }
    }

    /// Loop of the receiver thread: waits for frames.
    pub fn receive(&self, vcpu_thread: &impl Notify) {
        loop {
            let is_fed = |is_hungry: &mut bool| !*is_hungry;
            let is_hungry = lock(&self.is_hungry);
            drop(
                self.hungers.wait_while(is_hungry, is_fed).unwrap_or_else(PoisonError::into_inner),
            );
            self.wait(PollFlags::IN);
            *lock(&self.is_hungry) = false;
            vcpu_thread.notify(event::NET);
        }
    }

    fn wait(&self, what: PollFlags) {
        // On an error, the notified vCPU finds no data.
        let _ = poll(&mut [PollFd::new(&self.file, what)], None);
    }

    /// Writes queued output, as much as the host takes.
    fn flush(&self, out: &mut Out) {
        while out.left() != 0 {
            match (&self.file).write(&out.bytes[out.taken..]) {
                // A tap device takes whole frames.
                Ok(_) if self.is_tap => out.taken = out.bytes.len(),
                Ok(count) => out.taken += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    out.taken = out.bytes.len();
                    // A tap device that is down, or rejects a header, drops the frame.
                    if !self.is_tap {
                        self.end(&describe(&error));
                    }
                }
            }
        }
        out.bytes.clear();
        out.taken = 0;
    }

    /// Takes the link down.
    fn end(&self, error: &dyn std::fmt::Display) {
        if !self.is_down.swap(true, SeqCst) {
            eprintln!("<{}>{}: connection closed: {error}", log::WARN, self.name);
        }
    }
}

/// The guest device's end of a network.
pub struct FrameEndpoint<'n> {
    network: &'n Network,
    /// Received frames, each after its length, and their positions: the last one may be incomplete.
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl<'n> FrameEndpoint<'n> {
    /// Creates an endpoint without frames.
    pub fn new(network: &'n Network) -> Self {
        Self { network, bytes: vec![0; KEPT], start: 0, end: 0 }
    }

    /// Returns the length of the first frame, if it is complete.
    fn first_length(&self) -> Option<usize> {
        let length = self.announced()?;
        (length <= self.end - self.start - LENGTH).then_some(length)
    }

    /// Returns the length field of the first frame.
    fn announced(&self) -> Option<usize> {
        let bytes = self.bytes[self.start..self.end].first_chunk::<LENGTH>()?;
        Some(u32::from_be_bytes(*bytes) as usize)
    }

    /// Returns the first frame.
    fn first(&self) -> &[u8] {
        let length = self.first_length().unwrap_or(0);
        self.bytes.get(self.start + LENGTH..).map_or(&[], |rest| &rest[..length.min(rest.len())])
    }

    /// Reads available data; returns whether there was any.
    fn fill(&mut self) -> bool {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.bytes.len() - self.start < MAX_STREAM_FRAME + LENGTH {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let Network { file, is_tap, .. } = self.network;
        let before = if *is_tap { LENGTH } else { 0 };
        let place = self.end + before;
        match { file }.read(&mut self.bytes[place..]) {
            Ok(0) => self.network.end(&"the peer closed the socket"),
            Ok(count) => {
                if *is_tap {
                    self.bytes[self.end..place].copy_from_slice(&(count as u32).to_be_bytes());
                }
                self.end = place + count;
                return true;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => return true,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => self.network.end(&describe(&error)),
        }
        false
    }
}

impl Frames for FrameEndpoint<'_> {
    fn put(&mut self, before: &[u8], data: &mut Data<'_>) -> bool {
        let Network { out, is_tap, is_filled, .. } = self.network;
        let mut out = lock(out);
        let length = before.len() + data.remaining() as usize;
        let room = if *is_tap { 0 } else { ROOM.saturating_sub(LENGTH + length) };
        if out.left() != 0 && out.left() > room {
            out.is_awaited = true;
            is_filled.notify_one();
            return false;
        }
        if !*is_tap {
            out.bytes.extend((length as u32).to_be_bytes());
        }
        out.bytes.extend(before);
        let at = out.bytes.len();
        out.bytes.resize(at + data.remaining() as usize, 0);
        data.read(&mut out.bytes[at..]);
        self.network.flush(&mut out);
        if out.left() != 0 {
            is_filled.notify_one();
        }
        true
    }

    fn await_first(&mut self) -> Option<u32> {
        loop {
            match (self.first_length(), self.announced()) {
                (Some(length), _) => return Some(length as u32),
                // The position of the next frame is unknown.
                (None, Some(length)) if length > MAX_STREAM_FRAME => {
                    self.network.end(&"invalid frame length");
                    (self.start, self.end) = (0, 0);
                    return None;
                }
                (None, _) => {}
            }
            if self.network.is_down.load(SeqCst) {
                return None;
            }
            if !self.fill() {
                if !self.network.is_down.load(SeqCst) {
                    *lock(&self.network.is_hungry) = true;
                    self.network.hungers.notify_one();
                }
                return None;
            }
        }
    }

    fn copy_first(&self, before: u32, to: &mut Data<'_>) {
        to.write(self.first().get(before as usize..).unwrap_or_default());
    }

    fn first_bytes<const N: usize>(&self, before: u32) -> Option<[u8; N]> {
        self.first().get(before as usize..)?.first_chunk().copied()
    }

    fn forget_first(&mut self) {
        if let Some(length) = self.first_length() {
            self.start += LENGTH + length;
        }
    }
}

impl NetEndpoint for FrameEndpoint<'_> {
    fn is_up(&self) -> bool {
        !self.network.is_down.load(SeqCst)
    }

    fn set_offload_caps(&mut self, caps: OffloadCaps) {
        if self.network.is_tap {
            // On an error, the device model drops frames that the guest does not accept.
            let _: io::Result<()> = calls::set_offload(&self.network.file, caps);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vcpu_thread::VcpuThread;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::thread;
    use vmm_bus::backend::Part;
    use vmm_mem::GuestMemory;
    use vmm_mem::testing::memory;

    fn network() -> (Network, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let file = File::from(OwnedFd::from(ours));
        (Network::new("network 0".to_owned(), file, &Record::default()).unwrap(), theirs)
    }

    /// Calls `act` with a part of guest memory.
    fn with<T>(
        memory: &GuestMemory,
        address: u64,
        length: u32,
        act: impl FnOnce(&mut Data<'_>) -> T,
    ) -> T {
        let mut parts = [Part { address, length }].into_iter();
        act(&mut Data::new(memory, &mut parts, length))
    }

    #[test]
    fn frames_come_whole_and_in_order() {
        let (network, mut outside) = network();
        let (mut link, memory) = (FrameEndpoint::new(&network), memory(&[(0, 0x3000)]));
        assert_eq!(link.await_first(), None);
        outside.write_all(&[0, 0, 0, 3, 1, 2]).unwrap();
        assert_eq!(link.await_first(), None);
        outside.write_all(&[3, 0, 0, 0, 0, 0, 0, 0, 1, 9]).unwrap();
        assert_eq!(link.await_first(), Some(3));
        with(&memory, 0x1000, 64, |data| link.copy_first(1, data));
        assert_eq!(memory.read::<u32>(0x1000).unwrap(), 0x0302);
        assert_eq!((link.first_bytes::<3>(0), link.first_bytes::<4>(0)), (Some([1, 2, 3]), None));
        link.forget_first();
        assert_eq!(link.await_first(), Some(0));
        link.forget_first();
        assert_eq!((link.await_first(), link.first_bytes(0)), (Some(1), Some([9])));
        link.forget_first();
        drop(outside);
        assert!(link.is_up());
        assert_eq!((link.await_first(), link.is_up()), (None, false));
    }

    #[test]
    fn many_frames_pass_the_end_of_the_buffer() {
        let (network, mut outside) = network();
        let mut link = FrameEndpoint::new(&network);
        thread::scope(|scope| {
            scope.spawn(move || {
                for number in 0..100_u8 {
                    let frame = vec![number; 50_000];
                    outside.write_all(&50_000_u32.to_be_bytes()).unwrap();
                    outside.write_all(&frame).unwrap();
                }
            });
            for number in 0..100_u8 {
                while link.await_first().is_none() {
                    assert!(number == 0 || link.is_up());
                    thread::yield_now();
                }
                assert!(link.first().iter().all(|byte| *byte == number));
                assert_eq!(link.first().len(), 50_000);
                link.forget_first();
            }
        });
    }

    #[test]
    fn a_length_that_is_none_ends_the_stream() {
        let (network, mut outside) = network();
        let mut link = FrameEndpoint::new(&network);
        outside.write_all(&[0x7f; 64]).unwrap();
        assert_eq!((link.await_first(), link.is_up()), (None, false));
        assert_eq!(link.await_first(), None);
    }

    #[test]
    fn what_the_host_does_not_take_waits() {
        let (network, mut outside) = network();
        // Its thread never ends.
        let network: &'static Network = Box::leak(Box::new(network));
        let (mut link, memory) = (FrameEndpoint::new(network), memory(&[(0, 0x1_0000)]));
        memory.fill(0, 0x1_0000, 7).unwrap();
        let mut put = || with(&memory, 0, 60_000, |data| link.put(&[1, 2], data));
        let count = (0..1000).take_while(|_| put()).count();
        assert!((8..100).contains(&count), "{count}");
        let vcpu_thread: &'static VcpuThread = Box::leak(Box::default());
        thread::spawn(|| network.send(vcpu_thread));
        for _ in 0..count {
            let mut bytes = vec![0; LENGTH + 60_002];
            outside.read_exact(&mut bytes).unwrap();
            assert_eq!(bytes[..LENGTH + 3], [0, 0, 0xea, 0x62, 1, 2, 7]);
        }
        while vcpu_thread.take_events() & event::NET == 0 {
            thread::yield_now();
        }
    }
}
