//! Networks and vsock: frame streams and tap devices of the host ([`host_linux::net`]).
//!
//! The vCPU that uses a network card reads and writes its descriptor itself, without blocking.
//! Where no data or space is available, a thread of the network waits instead and notifies a vCPU.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use host_linux::net::{
    FrameEndpoint as Endpoint, NetHost, NetLink, NetQueues, Progress, Receiver, Sender, Transport,
    attach_tap,
};
use proto::hosted::counters::DeviceCounters;
use proto::hosted::{NetRecord as Record, log};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::Error;
use crate::clock;
use crate::vcpu_thread::{Notify, event};

/// A descriptor of the host, and its rings.
pub struct Network<'o> {
    /// Name for messages.
    name: String,
    file: File,
    is_tap: bool,
    queues: Box<NetQueues>,
    counters: &'o DeviceCounters,
    /// The vCPU's thread uses it; after the host has refused frames, the sender thread.
    sender: Mutex<Sender>,
}

impl<'o> Network<'o> {
    /// Creates a network from a stream descriptor, or from `/dev/net/tun` for the tap device in the
    /// record.
    pub fn new(
        name: String,
        file: File,
        record: &Record,
        counters: &'o DeviceCounters,
    ) -> Result<Self, Error> {
        let is_tap = record.is_tap();
        if is_tap {
            attach_tap(file.as_raw_fd() as u32, record.tap)
                .map_err(|error| io::Error::from_raw_os_error(error.0))
                .map_err(Error::host("attach to the tap device"))?;
        }
        fcntl_getfl(&file)
            .and_then(|flags| fcntl_setfl(&file, flags | OFlags::NONBLOCK))
            .map_err(Error::host("set up a network"))?;
        // SAFETY: zeroed memory is a valid value of the rings.
        let queues = unsafe { Box::<NetQueues>::new_zeroed().assume_init() };
        Ok(Self { name, file, is_tap, queues, counters, sender: Mutex::default() })
    }

    /// Loop of the sender thread: waits for space and writes queued output.
    pub fn send(&self, vcpu_thread: &impl Notify) {
        let host = SenderHost { network: self, vcpu_thread };
        loop {
            let progress = self.sender().send_all(&self.link(), &host);
            match progress {
                Progress::HostBlocks => self.wait(PollFlags::OUT),
                _ => self.queues.sleep(|| self.sender().is_idle(&self.queues)),
            }
        }
    }

    /// Loop of the receiver thread: waits for frames.
    pub fn receive(&self, vcpu_thread: &impl Notify) {
        loop {
            self.queues.wait_for_vcpu(|| self.wait(PollFlags::IN));
            vcpu_thread.notify(event::NET);
        }
    }

    fn wait(&self, what: PollFlags) {
        // On an error, the notified vCPU finds no data.
        let _ = poll(&mut [PollFd::new(&self.file, what)], None);
    }

    fn link(&self) -> NetLink<'_> {
        let Self { file, is_tap, queues, counters, .. } = self;
        NetLink { queues, fd: file.as_raw_fd() as u32, is_tap: *is_tap, counters }
    }

    fn sender(&self) -> MutexGuard<'_, Sender> {
        // Every update is atomic under the lock.
        self.sender.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NetHost for Network<'_> {
    fn notify(&self) {
        // The caller is the vCPU, which looks at the link and the rings itself.
    }

    fn now(&self) -> u64 {
        clock::nanoseconds()
    }

    fn warn(&self, text: fmt::Arguments<'_>) {
        eprintln!("<{}>{}: {text}", log::WARN, self.name);
    }
}

/// The VM as the sender thread of a network sees it.
struct SenderHost<'n, N> {
    network: &'n Network<'n>,
    vcpu_thread: &'n N,
}

impl<N: Notify> NetHost for SenderHost<'_, N> {
    fn notify(&self) {
        self.vcpu_thread.notify(event::NET);
    }

    fn now(&self) -> u64 {
        self.network.now()
    }

    fn warn(&self, text: fmt::Arguments<'_>) {
        self.network.warn(text);
    }
}

/// The guest device's end of a network.
pub type FrameEndpoint<'n> = Endpoint<'n, VcpuTransport<'n>>;

/// Creates the guest device's end of a network, which has one only.
pub fn endpoint<'n>(network: &'n Network<'n>) -> FrameEndpoint<'n> {
    let transport = VcpuTransport { network, receiver: Receiver::default() };
    Endpoint::new(&network.queues, transport)
}

/// Transport of frames by the thread of a vCPU.
pub struct VcpuTransport<'n> {
    network: &'n Network<'n>,
    receiver: Receiver,
}

impl Transport for VcpuTransport<'_> {
    fn host(&self) -> &impl NetHost {
        self.network
    }

    fn send(&mut self) {
        let Self { network, .. } = self;
        // A thread that is awake sends these frames, too.
        if network.queues.is_sender_asleep()
            && network.sender().send_all(&network.link(), *network) == Progress::HostBlocks
        {
            network.queues.wake_sender();
        }
    }

    fn receive(&mut self) -> bool {
        let Self { network, receiver } = self;
        receiver.receive(&network.link(), *network, u32::MAX) == Progress::Moved
    }

    fn await_frames(&mut self) {
        self.network.queues.wake_waiter();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vcpu_thread::VcpuThread;
    use std::io::{Read, Write};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::thread;
    use vmm_bus::Data;
    use vmm_bus::backend::Part;
    use vmm_bus::frames::{Frames, NetEndpoint};
    use vmm_mem::GuestMemory;
    use vmm_mem::testing::memory;

    fn network() -> (Network<'static>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let file = File::from(OwnedFd::from(ours));
        let counters = Box::leak(Box::default());
        let network = Network::new("network 0".to_owned(), file, &Record::default(), counters);
        (network.unwrap(), theirs)
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
        let (mut link, memory) = (endpoint(&network), memory(&[(0, 0x3000)]));
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
        let mut link = endpoint(&network);
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
                assert_eq!(link.first_bytes(0), Some([number; 50_000]));
                assert_eq!(link.first_bytes::<1>(50_000), None);
                link.forget_first();
            }
        });
    }

    #[test]
    fn a_length_that_is_none_ends_the_stream() {
        let (network, mut outside) = network();
        let mut link = endpoint(&network);
        outside.write_all(&[0x7f; 64]).unwrap();
        assert_eq!((link.await_first(), link.is_up()), (None, false));
        assert_eq!(link.await_first(), None);
    }

    #[test]
    fn what_the_host_does_not_take_waits() {
        let (network, mut outside) = network();
        // Its thread never ends.
        let network: &'static Network<'static> = Box::leak(Box::new(network));
        let (mut link, memory) = (endpoint(network), memory(&[(0, 0x1_0000)]));
        memory.fill(0, 0x1_0000, 7).unwrap();
        let mut put = || with(&memory, 0, 60_000, |data| link.put(&[1, 2], data));
        let count = (0..1000).take_while(|_| put()).count();
        assert!((8..100).contains(&count), "{count}");
        let vcpu_thread: &'static VcpuThread = Box::leak(Box::default());
        thread::spawn(|| network.send(vcpu_thread));
        for _ in 0..count {
            let mut bytes = vec![0; 4 + 60_002];
            outside.read_exact(&mut bytes).unwrap();
            assert_eq!(bytes[..7], [0, 0, 0xea, 0x62, 1, 2, 7]);
        }
        while vcpu_thread.take_events() & event::NET == 0 {
            thread::yield_now();
        }
    }
}
