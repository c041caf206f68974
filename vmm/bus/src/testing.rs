//! A scripted [`Env`]: it records the effects of a device; the test provides the inputs.

pub mod hammer;

use crate::backend::{
    BackendRef, BalloonBackend, Block, BlockOp, BlockStatus, ByteStream, ChannelBackend, Data,
    EntropySource, Messages, Net, Offload, OffloadCaps, Packets,
};
use crate::{Access, Device, Env, MachineEvent, Msi, NEVER, Nanos, WAKE_INPUT};
use proto::channel::{Broken, Message, SendError, ShareState, View};
use proto::hosted::balloon::TAGS;
use proto::vsock::Header;
use std::collections::{BTreeMap, VecDeque};
use std::vec;
use std::vec::Vec;
use vmm_mem::GuestMemory;

/// Environment of one device under test.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// The clock. Set it directly, or let [`Script::advance`] fire the timers on the way.
    pub now: Nanos,
    /// Current level of each output line.
    pub lines: BTreeMap<u8, bool>,
    /// Every change of a line, in order.
    pub edges: Vec<(u8, bool)>,
    /// Armed deadlines by timer.
    pub deadlines: BTreeMap<u8, Nanos>,
    /// Message-signalled interrupts sent.
    pub msis: Vec<Msi>,
    /// Machine events.
    pub events: Vec<MachineEvent>,
    /// Missing features that were used.
    pub missing: Vec<(&'static str, u64)>,
    /// Guest memory; by default, a page at an address that no guest uses.
    pub memory: Option<GuestMemory>,
    /// Back end of a block device.
    pub disk: Option<ScriptDisk>,
    /// Back end of a network device.
    pub port: Option<ScriptPort>,
    /// Back end of a balloon.
    pub balloon: Option<ScriptBalloon>,
    /// Back end of a device that forwards messages.
    pub server: Option<ScriptServer>,
    /// Back end of a socket device.
    pub link: Option<ScriptVsock>,
    /// Back end of a channel.
    pub channel: Option<ScriptPeer>,
    /// Serial line or console, if there is no other back end.
    pub stream: ScriptStream,
    /// Number of random bytes available; their values count down.
    pub entropy: usize,
}

/// A byte stream of the [`Script`].
#[derive(Clone, Debug, Default)]
pub struct ScriptStream {
    /// Bytes written.
    pub output: Vec<u8>,
    /// Number of further bytes that it accepts; `None`: unlimited.
    pub room: Option<usize>,
    /// Bytes available to read.
    pub input: VecDeque<u8>,
}

impl ByteStream for ScriptStream {
    fn put(&mut self, byte: u8) -> bool {
        match &mut self.room {
            Some(0) => return false,
            Some(room) => *room -= 1,
            None => {}
        }
        self.output.push(byte);
        true
    }

    fn take(&mut self) -> Option<u8> {
        self.input.pop_front()
    }
}

/// Counts down.
impl EntropySource for usize {
    fn fill(&mut self, to: &mut [u8]) -> bool {
        let enough = *self >= to.len();
        if enough {
            for byte in to {
                *byte = *self as u8;
                *self -= 1;
            }
        }
        enough
    }
}

/// A disk of the [`Script`]: the test completes requests.
#[derive(Clone, Debug, Default)]
pub struct ScriptDisk {
    /// Content.
    pub content: Vec<u8>,
    /// Unfinished requests in the order of their start, with the bytes of writes and room for
    /// reads.
    pub requests: Vec<(u16, BlockOp, Vec<u8>)>,
    /// Results of the first of them, in order.
    pub ended: VecDeque<(u16, BlockStatus)>,
    /// Maximum requests at a time.
    pub room: usize,
}

impl ScriptDisk {
    /// Creates a disk of zeros that accepts `room` requests at a time.
    pub fn new(bytes: usize, room: usize) -> Self {
        Self { content: vec![0; bytes], room, ..Self::default() }
    }

    /// Carries out the request `id` and completes it.
    ///
    /// # Panics
    /// If there is no such request, or it exceeds the disk.
    pub fn complete(&mut self, id: u16) {
        let (_, op, data) = self.requests.iter_mut().find(|r| r.0 == id).expect("a request");
        let bytes = |sector: u64| sector as usize * 512;
        match *op {
            BlockOp::Read { sector } => {
                let length = data.len();
                data.copy_from_slice(&self.content[bytes(sector)..][..length]);
            }
            BlockOp::Write { sector } => {
                self.content[bytes(sector)..][..data.len()].copy_from_slice(data);
            }
            BlockOp::Discard { sector, count } | BlockOp::WriteZeroes { sector, count, .. } => {
                self.content[bytes(sector)..][..bytes(count.into())].fill(0);
            }
            BlockOp::Flush => {}
        }
        self.ended.push_back((id, BlockStatus::Done));
    }
}

impl Block for ScriptDisk {
    fn start(&mut self, id: u16, op: BlockOp, data: &mut Data<'_>) -> bool {
        if self.requests.len() >= self.room {
            return false;
        }
        assert!(self.requests.iter().all(|r| r.0 != id), "a number in use");
        let mut bytes = vec![0; data.remaining() as usize];
        if matches!(op, BlockOp::Write { .. }) {
            data.read(&mut bytes);
        }
        self.requests.push((id, op, bytes));
        true
    }

    fn completed(&mut self) -> Option<(u16, BlockStatus)> {
        self.ended.pop_front()
    }

    fn finish(&mut self, id: u16, data: &mut Data<'_>) {
        let at = self.requests.iter().position(|r| r.0 == id).expect("a request");
        let (_, op, bytes) = self.requests.remove(at);
        if matches!(op, BlockOp::Read { .. }) {
            data.write(&bytes);
        }
    }

    fn forget(&mut self) {
        self.requests.clear();
        self.ended.clear();
    }
}

/// A network port of the [`Script`].
#[derive(Clone, Debug, Default)]
pub struct ScriptPort {
    /// The port is not connected.
    pub link_down: bool,
    /// Offloads that the guest accepts.
    pub caps: OffloadCaps,
    /// Frames sent by the guest.
    pub sent: Vec<(Offload, Vec<u8>)>,
    /// Number of further frames that the guest may send.
    pub room: usize,
    /// Frames for the guest.
    pub waiting: VecDeque<(Offload, Vec<u8>)>,
}

impl Net for ScriptPort {
    fn link_up(&self) -> bool {
        !self.link_down
    }

    fn set_offload_caps(&mut self, caps: OffloadCaps) {
        self.caps = caps;
    }

    fn send(&mut self, offload: Offload, frame: &mut Data<'_>) -> bool {
        let room = self.room > 0;
        if room {
            self.room -= 1;
            let mut bytes = vec![0; frame.remaining() as usize];
            let length = frame.read(&mut bytes);
            bytes.truncate(length);
            self.sent.push((offload, bytes));
        }
        room
    }

    fn first(&mut self) -> Option<(Offload, u32)> {
        self.waiting.front().map(|(offload, frame)| (*offload, frame.len() as u32))
    }

    fn copy(&mut self, offset: u32, to: &mut Data<'_>) {
        if let Some((_, frame)) = self.waiting.front() {
            to.write(frame.get(offset as usize..).unwrap_or_default());
        }
    }

    fn drop_first(&mut self) {
        self.waiting.pop_front();
    }
}

/// A balloon of the [`Script`]: requests of the test and reports of the guest.
#[derive(Clone, Debug, Default)]
pub struct ScriptBalloon {
    /// Target size in pages.
    pub wanted: u32,
    /// Size reported by the guest, in pages.
    pub actual: u32,
    /// Discarded ranges.
    pub discarded: Vec<(u64, u64)>,
    /// A request of statistics is pending.
    pub asks: bool,
    /// Reported statistics.
    pub statistics: Vec<(u16, u64)>,
}

impl BalloonBackend for ScriptBalloon {
    fn target_pages(&self) -> u32 {
        self.wanted
    }

    fn set_inflated(&mut self, pages: u32) {
        self.actual = pages;
    }

    fn discard(&mut self, address: u64, length: u64) {
        self.discarded.push((address, length));
    }

    fn take_statistics_request(&mut self) -> bool {
        std::mem::take(&mut self.asks)
    }

    fn report_statistics(&mut self, values: &[Option<u64>; TAGS]) {
        let values = (0..).zip(values).filter_map(|(tag, value)| Some((tag, (*value)?)));
        self.statistics.extend(values);
    }
}

/// A server of the [`Script`]: the test replies to messages.
#[derive(Clone, Debug, Default)]
pub struct ScriptServer {
    /// Unfinished messages: id, bytes, room for the reply.
    pub messages: Vec<(u16, Vec<u8>, u32)>,
    /// Messages with a reply, in order.
    pub ended: VecDeque<(u16, Vec<u8>)>,
    /// Maximum messages at a time.
    pub room: usize,
}

impl ScriptServer {
    /// Replies to the message `id`.
    pub fn answer(&mut self, id: u16, bytes: &[u8]) {
        self.ended.push_back((id, bytes.to_vec()));
    }
}

impl Messages for ScriptServer {
    fn start(&mut self, id: u16, message: &mut Data<'_>, answer: &mut Data<'_>) -> bool {
        if self.messages.len() >= self.room {
            return false;
        }
        assert!(self.messages.iter().all(|m| m.0 != id), "a number in use");
        let mut bytes = vec![0; message.remaining() as usize];
        let length = message.read(&mut bytes);
        bytes.truncate(length);
        self.messages.push((id, bytes, answer.remaining()));
        true
    }

    fn completed(&mut self) -> Option<(u16, u32)> {
        self.ended.front().map(|(id, answer)| (*id, answer.len() as u32))
    }

    fn finish(&mut self, id: u16, answer: &mut Data<'_>) {
        if let Some((_, bytes)) = self.ended.pop_front() {
            answer.write(&bytes);
        }
        self.messages.retain(|m| m.0 != id);
    }

    fn forget(&mut self) {
        self.messages.clear();
        self.ended.clear();
    }
}

/// Host side of a socket device of the [`Script`].
#[derive(Clone, Debug, Default)]
pub struct ScriptVsock {
    /// Packets sent by the guest.
    pub sent: Vec<Vec<u8>>,
    /// Number of further packets that the guest may send.
    pub room: usize,
    /// Packets for the guest: headers and data.
    pub waiting: VecDeque<(Header, Vec<u8>)>,
    /// Number of resets of the device.
    pub resets: usize,
}

impl Packets for ScriptVsock {
    fn send(&mut self, packet: &mut Data<'_>) -> bool {
        let room = self.room > 0;
        if room {
            self.room -= 1;
            let mut bytes = vec![0; packet.remaining() as usize];
            let length = packet.read(&mut bytes);
            bytes.truncate(length);
            self.sent.push(bytes);
        }
        room
    }

    fn first(&mut self) -> Option<(Header, u32)> {
        self.waiting.front().map(|(header, data)| (*header, data.len() as u32))
    }

    fn copy(&mut self, offset: u32, to: &mut Data<'_>) {
        if let Some((_, data)) = self.waiting.front() {
            to.write(data.get(offset as usize..).unwrap_or_default());
        }
    }

    fn drop_first(&mut self) {
        self.waiting.pop_front();
    }

    fn reset(&mut self) {
        self.resets += 1;
    }
}

/// Peer of a channel of the [`Script`].
#[derive(Clone, Debug, Default)]
pub struct ScriptPeer {
    /// State of the channel.
    pub view: View,
    /// Number of doorbells.
    pub rings: usize,
    /// Guest-physical addresses of memory and shares.
    pub placed: (Option<u64>, Option<u64>),
    /// Accepted offers: share, address, length, writable.
    pub offers: Vec<(usize, u64, u32, bool)>,
    /// The peer refuses offers.
    pub refuses: bool,
    /// State that the peer gives a share right after the guest has offered or mapped it.
    pub answer: Option<ShareState>,
    /// Messages for the guest.
    pub messages: VecDeque<Message>,
}

impl ChannelBackend for ScriptPeer {
    fn notify(&mut self) -> bool {
        self.rings += 1;
        true
    }

    fn view(&mut self) -> View {
        self.view
    }

    fn offer(&mut self, share: usize, address: u64, length: u32, writable: bool) -> bool {
        if self.refuses {
            return false;
        }
        self.offers.push((share, address, length, writable));
        self.view.own[share] = self.answer.unwrap_or(ShareState::Offered);
        true
    }

    fn revoke(&mut self, share: usize) {
        self.view.own[share] = ShareState::None;
    }

    fn map(&mut self, share: usize) -> bool {
        let share = &mut self.view.peers[share];
        let there = share.state != ShareState::None;
        if there {
            share.state = self.answer.unwrap_or(ShareState::Mapped);
        }
        there
    }

    fn unmap(&mut self, share: usize) {
        let share = &mut self.view.peers[share];
        if share.state == ShareState::Mapped {
            share.state = ShareState::Offered;
        }
    }

    fn set_addresses(&mut self, memory: Option<u64>, shares: Option<u64>) {
        self.placed = (memory, shares);
    }

    fn send(&mut self, message: &Message) -> Result<(), SendError> {
        if self.refuses {
            return Err(SendError::Full);
        }
        self.messages.push_back(*message);
        Ok(())
    }

    fn receive(&mut self) -> Result<Option<Message>, Broken> {
        Ok(self.messages.pop_front())
    }

    fn reset(&mut self) {
        self.view = View::default();
        self.placed = (None, None);
    }
}

/// Memory of a [`Script`] without guest memory.
fn no_memory() -> &'static GuestMemory {
    static PAGE: std::sync::OnceLock<GuestMemory> = std::sync::OnceLock::new();
    PAGE.get_or_init(|| vmm_mem::testing::memory(&[(1 << 51, vmm_mem::PAGE_SIZE)]))
}

impl Script {
    /// Creates an environment at time 0 without inputs.
    pub fn new() -> Self {
        Self::default()
    }

    /// The level of `line`; a line never set is low.
    pub fn line(&self, line: u8) -> bool {
        self.lines.get(&line).copied().unwrap_or(false)
    }

    /// Number of rising edges of `line`.
    pub fn rises(&self, line: u8) -> usize {
        self.edges.iter().filter(|e| **e == (line, true)).count()
    }

    /// Reads one byte register.
    pub fn inb(&mut self, device: &mut dyn Device, offset: u64) -> u8 {
        device.read(Access::new(offset, 1), self) as u8
    }

    /// Writes one byte register.
    pub fn outb(&mut self, device: &mut dyn Device, offset: u64, value: u8) {
        device.write(Access::new(offset, 1), value.into(), self);
    }

    /// Reads one 32-bit register.
    pub fn inl(&mut self, device: &mut dyn Device, offset: u64) -> u32 {
        device.read(Access::new(offset, 4), self) as u32
    }

    /// Writes one 32-bit register.
    pub fn outl(&mut self, device: &mut dyn Device, offset: u64, value: u32) {
        device.write(Access::new(offset, 4), value.into(), self);
    }

    /// Delivers input bytes.
    pub fn send(&mut self, device: &mut dyn Device, bytes: &[u8]) {
        self.stream.input.extend(bytes);
        device.wake(WAKE_INPUT, self);
    }

    /// Advances the clock by `span`, waking `device` at each deadline on the way, in order.
    ///
    /// # Panics
    /// If one timer fires 100,000 times: the device re-arms without end.
    pub fn advance(&mut self, device: &mut dyn Device, span: Nanos) {
        let end = self.now.saturating_add(span);
        for _ in 0..100_000 {
            let next = self.deadlines.iter().min_by_key(|(_, deadline)| **deadline);
            let Some((&timer, &deadline)) = next.filter(|(_, deadline)| **deadline <= end) else {
                self.now = end;
                return;
            };
            self.now = self.now.max(deadline);
            self.deadlines.remove(&timer);
            device.wake(timer, self);
        }
        panic!("a timer without end");
    }
}

impl Env for Script {
    fn now(&self) -> Nanos {
        self.now
    }

    fn set_line(&mut self, line: u8, level: bool) {
        if self.lines.insert(line, level).unwrap_or(false) != level {
            self.edges.push((line, level));
        }
    }

    fn arm(&mut self, timer: u8, deadline: Nanos) {
        if deadline == NEVER {
            self.deadlines.remove(&timer);
        } else {
            self.deadlines.insert(timer, deadline);
        }
    }

    fn memory(&self) -> &GuestMemory {
        self.memory.as_ref().unwrap_or_else(|| no_memory())
    }

    fn backend(&mut self) -> (BackendRef<'_>, &GuestMemory) {
        let backend = match self {
            Self { disk: Some(disk), .. } => BackendRef::Block(disk),
            Self { port: Some(port), .. } => BackendRef::Net(port),
            Self { balloon: Some(balloon), .. } => BackendRef::Balloon(balloon),
            Self { server: Some(server), .. } => BackendRef::Messages(server),
            Self { link: Some(link), .. } => BackendRef::Packets(link),
            Self { channel: Some(channel), .. } => BackendRef::Channel(channel),
            Self { entropy: entropy @ 1.., .. } => BackendRef::Entropy(entropy),
            Self { stream, .. } => BackendRef::Bytes(stream),
        };
        (backend, self.memory.as_ref().unwrap_or_else(|| no_memory()))
    }

    fn msi(&mut self, msi: Msi) {
        self.msis.push(msi);
    }

    fn machine(&mut self, event: MachineEvent) {
        self.events.push(event);
    }

    fn missing(&mut self, what: &'static str, value: u64) {
        self.missing.push((what, value));
    }
}
