//! Virtio devices of the guest, and their sessions with servers.
//!
//! A VM with devices has a slot for each attachment, in their order, and an entropy source after
//! them, where the processor makes random numbers or root has a seed; then come its channels and,
//! if configured, the console. Data is copied once between guest memory and the session's memory;
//! the session resends requests in flight when a server restarts. All code here runs under the lock
//! of its device.

use core::fmt;

use crate::YieldRelax;
use crate::channel::ChannelEnd;
use crate::console::ConsoleLine;
use crate::platform::GuestBus;
use heapless::Vec;
use native_rt::device::{Shared, channels, sessions};
use native_rt::random::{self, Generator};
use native_rt::{Notification, Window, time};
use proto::channel::MAX_VM_CHANNELS;
use proto::disk::{self, Operation, Status};
use proto::net;
use proto::service::Service;
use proto::session::set_notified_vcpu;
use proto::start::{Start, Vmm, event, slot};
use proto::system::{MAX_VM_DISKS, MAX_VM_NETS};
use vmm_bus::backend::{
    BackendRef, Block, BlockInfo, BlockOp, BlockStatus, Data, DeviceBackend, EntropySource, Net,
    NetInfo, Offload, OffloadCaps, Part, Segments,
};
use vmm_machine::{Model, Slots};

/// Slots of the devices of a VM.
pub type DeviceSlots<const N: usize> = Slots<HostEndpoint, N, YieldRelax, GuestBus>;

/// Maximum number of attachments of a VM.
const MAX_ATTACHMENTS: usize = MAX_VM_DISKS + MAX_VM_NETS;
/// Maximum number of devices of a VM.
pub const MAX_DEVICES: usize = MAX_ATTACHMENTS + 1 + MAX_VM_CHANNELS + 1;
/// Time limit for servers to answer when the VM starts, in ns.
const ANSWER_TIMEOUT: u64 = 10_000_000_000;
/// Maximum bytes of one disk request: several of them fit a session.
const MAX_REQUEST: u32 = 64 << 10;

/// Error of the device set-up.
#[derive(Debug)]
pub enum DeviceSetupError {
    /// More attachments than devices.
    TooMany,
    /// The session with this index is missing or too short.
    NoSession(usize),
    /// The server of the session with this index does not answer.
    NoAnswer(usize),
    /// The memory of the channel with this index is missing.
    NoChannel(usize),
}

impl fmt::Display for DeviceSetupError {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::TooMany => write!(to, "more devices than slots"),
            Self::NoSession(index) => {
                write!(to, "the memory of session {index} is missing or too short")
            }
            Self::NoChannel(index) => {
                write!(to, "the memory of channel {index} is missing or too short")
            }
            Self::NoAnswer(index) => write!(to, "the server of session {index} does not answer"),
        }
    }
}

/// Server side of a session.
struct ServerSide {
    notification: Notification,
    signal: u64,
}

impl ServerSide {
    fn signal(&self) {
        // It fails only if the server has ended; root signals the next one.
        let _ = self.notification.signal(self.signal);
    }
}

/// Host side of a device.
#[expect(clippy::large_enum_variant, reason = "there are few, and nothing allocates")]
pub enum HostEndpoint {
    /// A disk server.
    Disk(DiskSession),
    /// A port of a switch.
    Net(NetSession),
    /// Entropy.
    Entropy(RandomSource),
    /// A channel to another VM.
    Channel(ChannelEnd),
    /// The console, shared with the serial port.
    Console(ConsoleLine),
}

impl DeviceBackend for HostEndpoint {
    fn get(&mut self) -> BackendRef<'_> {
        match self {
            Self::Disk(disk) => BackendRef::Block(disk),
            Self::Net(port) => BackendRef::Net(port),
            Self::Entropy(source) => BackendRef::Entropy(source),
            Self::Channel(peer) => BackendRef::Channel(peer),
            Self::Console(line) => BackendRef::Bytes(line),
        }
    }
}

/// Source of random numbers.
#[expect(clippy::large_enum_variant, reason = "there is one")]
pub enum RandomSource {
    /// The processor.
    Processor,
    /// A generator with a seed by root.
    Generator(Generator),
}

impl RandomSource {
    /// Stream of the seed that the entropy source has. Greater ones are those of boots, and of
    /// vCPUs.
    const STREAM: u64 = 0;

    /// The processor, or a stream of root's seed; `None`: the VM has no random numbers.
    pub fn new(plan: &Vmm, stream: u64) -> Option<Self> {
        if random::is_available() {
            return Some(Self::Processor);
        }
        Some(Self::Generator(Generator::new(plan.seed?, stream)))
    }
}

impl EntropySource for RandomSource {
    fn fill(&mut self, to: &mut [u8]) -> bool {
        match self {
            Self::Processor => random::fill(to),
            Self::Generator(generator) => {
                generator.fill(to);
                true
            }
        }
    }
}

impl HostEndpoint {
    /// Checks for the server's answer; returns the device model once it is known.
    fn poll_model(&mut self) -> Option<Model> {
        match self {
            Self::Disk(disk) => disk.poll_model().map(Model::Block),
            Self::Net(port) => port.poll_model().map(Model::Net),
            Self::Entropy(_) => Some(Model::Entropy),
            // They need no answer.
            Self::Channel(_) | Self::Console(_) => None,
        }
    }
}

/// Opens the sessions, waits until all servers have answered, and fills empty slots.
// Not inlined: its stack is free again while the VM runs.
#[inline(never)]
pub fn open<const N: usize>(
    devices: &mut DeviceSlots<N>,
    start: &Start,
    plan: &Vmm,
) -> Result<(), DeviceSetupError> {
    let timeout = time::ticks(start.clock.tsc_khz, ANSWER_TIMEOUT);
    let deadline = time::tsc().saturating_add(timeout);
    let mut memory = sessions(start);
    let own = Notification::at(slot::NOTIFICATION);
    // Other events that arrived meanwhile.
    let mut events = 0;
    for (index, attachment) in plan.attachments.iter().enumerate() {
        let session = memory.next().ok_or(DeviceSetupError::NoSession(index))?;
        let notification = Notification::at(slot::SESSIONS + index as u64);
        let server = ServerSide { notification, signal: attachment.signal };
        let endpoint = match attachment.service {
            Service::Disk => DiskSession::new(session, server).map(HostEndpoint::Disk),
            Service::Net => NetSession::new(session, server).map(HostEndpoint::Net),
        };
        let mut endpoint = endpoint.ok_or(DeviceSetupError::NoSession(index))?;
        let device = loop {
            if let Some(device) = endpoint.poll_model() {
                break device;
            }
            events |= own.wait(deadline).map_err(|_| DeviceSetupError::NoAnswer(index))?;
        };
        devices.add(device, endpoint).map_err(|_| DeviceSetupError::TooMany)?;
    }
    if let Some(source) = RandomSource::new(plan, RandomSource::STREAM) {
        devices
            .add(Model::Entropy, HostEndpoint::Entropy(source))
            .map_err(|_| DeviceSetupError::TooMany)?;
    }
    if events != 0 {
        // It fails only without the right, and then no code waits for events.
        let _ = own.signal(events);
    }
    Ok(())
}

/// Fills further slots with the ends of channels. Their peers need not run.
// Not inlined, for the same reason.
#[inline(never)]
pub fn open_channels<const N: usize>(
    devices: &mut DeviceSlots<N>,
    start: &Start,
    plan: &Vmm,
) -> Result<(), DeviceSetupError> {
    let mut memory = channels(start);
    for (index, end) in plan.channels.iter().enumerate() {
        let memory = memory.next().ok_or(DeviceSetupError::NoChannel(index))?;
        let created = ChannelEnd::new(index, end, memory, (start.name, plan));
        let (info, peer) = created.ok_or(DeviceSetupError::NoChannel(index))?;
        let added = devices.add(Model::Channel(info), HostEndpoint::Channel(peer));
        added.map_err(|_| DeviceSetupError::TooMany)?;
    }
    Ok(())
}

/// Fills a further slot with the console, if the guest has it as a device.
// Not inlined, for the same reason.
#[inline(never)]
pub fn open_console<const N: usize>(
    devices: &mut DeviceSlots<N>,
    plan: &Vmm,
) -> Result<(), DeviceSetupError> {
    if plan.virtio_console {
        devices
            .add(Model::Console, HostEndpoint::Console(ConsoleLine::Virtio))
            .map_err(|_| DeviceSetupError::TooMany)?;
    }
    Ok(())
}

/// Returns the number of devices of a VM.
pub fn count(plan: &Vmm) -> usize {
    match plan.attachments.len() + plan.channels.len() + usize::from(plan.virtio_console) {
        0 => 0,
        others => others + entropy_sources(plan),
    }
}

/// Makes the server of the device in a slot signal this vCPU: the device's interrupt goes to it, so
/// it handles the completions and then the interrupt without a kick of another vCPU.
// The guest moves its interrupts rarely.
#[cold]
pub fn notify_vcpu(start: &Start, slot: usize, vcpu: usize) {
    // The devices with servers have the first slots.
    if let Some(session) = sessions(start).nth(slot) {
        set_notified_vcpu(session.words(), vcpu);
    }
}

/// Returns the number of entropy sources of a VM with devices. A source that never has bytes would
/// be worse than none: Linux waits for them while it loads the driver.
fn entropy_sources(plan: &Vmm) -> usize {
    usize::from(random::is_available() || plan.seed.is_some())
}

/// Mapping from events to devices.
#[derive(Clone, Copy)]
pub struct Listeners {
    /// Slots of the devices with servers: the first ones.
    sessions: u32,
    /// Slots of the channels.
    channels: u32,
    first_channel: usize,
    console: Option<usize>,
}

impl Listeners {
    /// Creates the mapping for a VM.
    pub fn new(plan: &Vmm) -> Self {
        let (sessions, channels) = (plan.attachments.len(), plan.channels.len());
        let first_channel = sessions + entropy_sources(plan);
        Self {
            sessions: (1 << sessions) - 1,
            channels: ((1 << channels) - 1) << first_channel,
            first_channel,
            console: plan.virtio_console.then_some(first_channel + channels),
        }
    }

    /// Returns the slot of the console, if the guest has it as a device.
    pub fn console(self) -> Option<usize> {
        self.console
    }

    /// Slots of the devices whose servers have signalled, and of the channels whose peers have rung
    /// the doorbell.
    pub fn notified(self, events: u64) -> impl Iterator<Item = usize> {
        // The events of sessions and of channels are consecutive bits.
        let of = |first: u64| (events >> first.trailing_zeros()) as u32;
        let channels = of(event::channel(0)) << self.first_channel;
        slots(of(event::session(0)) & self.sessions | channels & self.channels)
    }

    /// Slots of the channels, in the order of their numbers.
    pub fn channels(self) -> impl Iterator<Item = usize> {
        slots(self.channels)
    }

    /// Returns whether the device in a slot has a server.
    pub fn has_server(self, slot: usize) -> bool {
        self.sessions >> slot & 1 != 0
    }

    /// Slots of the devices whose host side has changed.
    pub fn changed(self, events: u64) -> impl Iterator<Item = usize> {
        slots(if events & event::CHANNELS != 0 { self.channels } else { 0 })
    }
}

/// Indices of the set bits, ascending.
fn slots(mut bits: u32) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let slot = (bits != 0).then(|| bits.trailing_zeros() as usize);
        bits &= bits.wrapping_sub(1);
        slot
    })
}

/// Session with a disk server.
pub struct DiskSession {
    client: disk::Client<'static>,
    window: Window,
    server: ServerSide,
    /// Requests in flight.
    requests: Vec<Request, { disk::SLOTS }>,
    /// Incremented when the device resets and drops its requests.
    generation: u32,
    /// An answer received while a request was started.
    early_answer: Option<disk::Completion>,
}

/// A request.
#[derive(Clone, Copy)]
struct Request {
    tag: u64,
    buffer: Option<disk::Buffer>,
}

impl DiskSession {
    fn new(session: Shared, server: ServerSide) -> Option<Self> {
        let window = session.window();
        let client = disk::Client::new(session.words(), window.length())?;
        Some(Self {
            client,
            window,
            server,
            requests: Vec::new(),
            generation: 0,
            early_answer: None,
        })
    }

    fn poll_model(&mut self) -> Option<BlockInfo> {
        // No request is in flight, so there is no answer. The call makes the server signal the
        // first one.
        self.client.poll();
        self.client.sleep();
        self.notify_server();
        let info = self.client.info()?;
        let most = u64::from(info.max_sectors) * disk::SECTOR;
        Some(BlockInfo {
            sectors: info.sectors,
            read_only: info.read_only,
            discard: info.discard,
            write_zeroes: info.write_zeroes,
            max_bytes: u32::try_from(most).map_or(MAX_REQUEST, |most| most.min(MAX_REQUEST)),
            serial: *b"parador\0\0\0\0\0\0\0\0\0\0\0\0\0",
        })
    }

    fn notify_server(&mut self) {
        if self.client.take_signal() {
            self.server.signal();
        }
    }

    fn tag(&self, id: u16) -> u64 {
        u64::from(self.generation) << 16 | u64::from(id)
    }

    /// Removes a request and frees its buffer.
    fn remove(&mut self, tag: u64) -> Option<Request> {
        let at = self.requests.iter().position(|request| request.tag == tag)?;
        let request = self.requests.swap_remove(at);
        if let Some(buffer) = request.buffer {
            self.client.release(buffer);
        }
        Some(request)
    }
}

impl Block for DiskSession {
    fn start(&mut self, id: u16, op: BlockOp, data: &mut Data<'_>) -> bool {
        // The server may have restarted while the guest did not use the disk.
        if self.early_answer.is_none() {
            self.early_answer = self.client.poll();
        }
        if self.requests.is_full() || !self.client.has_room() {
            self.notify_server();
            return false;
        }
        let sectors = u64::from(data.remaining()) / disk::SECTOR;
        let (operation, sector, count) = match op {
            BlockOp::Read { sector } => (Operation::Read, sector, sectors as u32),
            BlockOp::Write { sector } => (Operation::Write, sector, sectors as u32),
            BlockOp::Flush => (Operation::Flush, 0, 0),
            BlockOp::Discard { sector, count } => (Operation::Discard, sector, count),
            BlockOp::WriteZeroes { sector, count, .. } => (Operation::WriteZeroes, sector, count),
        };
        let buffer = if operation.has_data() {
            let Some(buffer) = self.client.allocate(data.remaining().into()) else { return false };
            if operation == Operation::Write {
                put(self.window, buffer.offset, data);
            }
            Some(buffer)
        } else {
            None
        };
        let tag = self.tag(id);
        let offset = buffer.map_or(0, |buffer| buffer.offset);
        // There is room for both.
        let _ = self.requests.push(Request { tag, buffer });
        let _ = self.client.submit(operation, sector, count, offset, tag);
        self.notify_server();
        true
    }

    fn completed(&mut self) -> Option<(u16, BlockStatus)> {
        // Ignores a server that keeps sending invalid answers after this many of them.
        for _ in 0..2 * disk::SLOTS {
            let completion = self.early_answer.take().or_else(|| self.client.poll());
            self.notify_server();
            let Some(completion) = completion else {
                if self.client.sleep() {
                    return None;
                }
                continue;
            };
            let status = match completion.status {
                Status::Ok => BlockStatus::Done,
                Status::Unsupported => BlockStatus::Unsupported,
                Status::Failed | Status::Invalid | Status::ReadOnly => BlockStatus::Failed,
            };
            if completion.tag >> 16 == u64::from(self.generation) {
                return Some((completion.tag as u16, status));
            }
            self.remove(completion.tag);
        }
        None
    }

    fn finish(&mut self, id: u16, data: &mut Data<'_>) {
        let tag = self.tag(id);
        let buffer = self.requests.iter().find(|request| request.tag == tag);
        if let Some(buffer) = buffer.and_then(|request| request.buffer) {
            get(self.window, buffer.offset, data);
        }
        self.remove(tag);
    }

    fn forget(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        self.client.forget();
    }
}

/// Session with a switch.
pub struct NetSession {
    client: net::Client<'static>,
    window: Window,
    server: ServerSide,
    up: bool,
    /// The oldest waiting frame.
    first: Option<net::Frame>,
}

impl NetSession {
    fn new(session: Shared, server: ServerSide) -> Option<Self> {
        let window = session.window();
        let client = net::Client::new(session.words(), window.length())?;
        Some(Self { client, window, server, up: false, first: None })
    }

    fn poll_model(&mut self) -> Option<NetInfo> {
        self.poll();
        self.client.info().map(|info| NetInfo { mac: info.mac, ..NetInfo::default() })
    }

    fn poll(&mut self) -> bool {
        let up = self.client.poll();
        if up != self.up {
            // Frames of an earlier connection are gone.
            self.first = None;
        }
        self.up = up;
        self.notify_server();
        up
    }

    fn notify_server(&mut self) {
        if self.client.take_signal() {
            self.server.signal();
        }
    }
}

impl Net for NetSession {
    fn link_up(&self) -> bool {
        self.up
    }

    fn set_offload_caps(&mut self, caps: OffloadCaps) {
        let OffloadCaps { csum: sums, tcp4, tcp6 } = caps;
        self.client.set_offload_caps(net::OffloadCaps { sums, tcp4, tcp6 });
    }

    fn send(&mut self, offload: Offload, frame: &mut Data<'_>) -> bool {
        let length = u64::from(frame.remaining());
        // The frame is lost without a switch, or if it is too short or too long.
        if !self.poll() || !(net::MIN_FRAME..=net::MAX_FRAME).contains(&length) {
            return true;
        }
        let mut place = self.client.place(length);
        if place.is_none() && !self.client.sleep_for_room() {
            // The switch may have created room just now; otherwise the frame is lost.
            place = self.client.place(length);
        } else if place.is_none() {
            return false;
        }
        let Some(place) = place else { return true };
        put(self.window, place, frame);
        self.client.send(net::Frame { offset: place, length, offload: to_session(offload) });
        self.notify_server();
        true
    }

    fn first(&mut self) -> Option<(Offload, u32)> {
        self.poll();
        for _ in 0..2 * net::FRAMES {
            self.first = self.client.receive();
            match self.first {
                Some(frame) => match from_session(frame.offload) {
                    Some(offload) => return Some((offload, frame.length as u32)),
                    None => self.drop_first(),
                },
                None if self.client.sleep() => return None,
                None => {}
            }
        }
        None
    }

    fn copy(&mut self, offset: u32, to: &mut Data<'_>) {
        if let Some(frame) = self.first {
            let offset = u64::from(offset).min(frame.length);
            to.truncate((frame.length - offset) as u32);
            get(self.window, frame.offset + offset, to);
        }
    }

    fn drop_first(&mut self) {
        if self.first.take().is_some() {
            self.client.done();
            self.notify_server();
        }
    }
}

/// `VIRTIO_NET_HDR_F_DATA_VALID`.
const DATA_VALID: u8 = 2;
/// `VIRTIO_NET_HDR_GSO_TCPV4`, `_TCPV6`.
const TCP4: u8 = 1;
const TCP6: u8 = 4;

fn to_session(offload: Offload) -> net::Offload {
    let bit = |set, bit| if set { bit } else { 0 };
    net::Offload {
        flags: bit(offload.needs_csum, net::NEEDS_SUM) | bit(offload.data_valid, DATA_VALID),
        segments: match offload.segments {
            Segments::None => 0,
            Segments::Tcp4 => TCP4,
            Segments::Tcp6 => TCP6,
        },
        header: offload.header_length,
        segment: offload.segment_size,
        sum_start: offload.csum_start,
        sum_offset: offload.csum_offset,
    }
}

/// Converts an offload from the session; `None`: a guest cannot receive such a frame.
fn from_session(offload: net::Offload) -> Option<Offload> {
    Some(Offload {
        needs_csum: offload.flags & net::NEEDS_SUM != 0,
        data_valid: offload.flags & DATA_VALID != 0,
        segments: match offload.segments {
            0 => Segments::None,
            TCP4 => Segments::Tcp4,
            TCP6 => Segments::Tcp6,
            _ => return None,
        },
        ecn: false,
        header_length: offload.header,
        segment_size: offload.segment,
        csum_start: offload.sum_start,
        csum_offset: offload.sum_offset,
    })
}

/// Copies all data to an offset of the session, limited to both lengths.
fn put(window: Window, mut offset: u64, data: &mut Data<'_>) {
    while let Some(Part { address, length }) = data.part(u32::MAX) {
        if !window.copy_from_guest(offset, data.memory(), address, length.into()) {
            return;
        }
        offset += u64::from(length);
    }
}

/// Copies from an offset of the session until the data is full, limited to both lengths.
fn get(window: Window, mut offset: u64, data: &mut Data<'_>) {
    while let Some(Part { address, length }) = data.part(u32::MAX) {
        if !window.copy_to_guest(offset, data.memory(), address, length.into()) {
            return;
        }
        offset += u64::from(length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offloads_cross_the_session() {
        let offload = Offload {
            needs_csum: true,
            data_valid: true,
            segments: Segments::Tcp6,
            ecn: false,
            header_length: 74,
            segment_size: 1440,
            csum_start: 54,
            csum_offset: 16,
        };
        assert_eq!(from_session(to_session(offload)), Some(offload));
        let plain = Offload::default();
        assert_eq!(from_session(to_session(plain)), Some(plain));
        let udp = net::Offload { segments: 3, ..net::Offload::default() };
        assert_eq!(from_session(udp), None);
    }
}
