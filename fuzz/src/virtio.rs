//! Target `virtio`: a device with PCI transport and an arbitrary driver.
//!
//! First byte: the device. Then steps, each a byte for its kind (see `Step`) and its arguments.
//!
//! Beside panics it detects: timers without end, requests to a back end that are out of range or
//! reuse an id (the scripted back end rejects both), and devices that fail after a reset.

use proto::ports::FrameKind;
use vmm_bus::backend::{BlockInfo, BlockStatus, NetInfo, Offload, Segments};
use vmm_bus::testing::{Script, ScriptBalloon, ScriptDisk, ScriptPort, ScriptServer, ScriptVsock};
use vmm_bus::{Device, WAKE_INPUT};
use vmm_dev::pci::{Function, spec as config};
use vmm_dev::virtio::balloon::{self, Balloon};
use vmm_dev::virtio::blk::{self, Blk};
use vmm_dev::virtio::console::{self, Console};
use vmm_dev::virtio::entropy::Entropy;
use vmm_dev::virtio::net::{self, NetCard};
use vmm_dev::virtio::p9::P9;
use vmm_dev::virtio::pci::spec::{NOTIFY, QUEUE_SIZE};
use vmm_dev::virtio::ports::{self, Ports};
use vmm_dev::virtio::queue::spec as ring;
use vmm_dev::virtio::vsock::{self, Vsock};
use vmm_dev::virtio::{self, VirtioDevice, spec::*};
use vmm_mem::GuestMemory;

use crate::driver::{HIGH_RINGS, Rig};
use crate::input::{Input, Seed};

/// Device types, by the first byte of an input.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Kind {
    Block,
    Net,
    Console,
    Entropy,
    Balloon,
    P9,
    Vsock,
    Ports,
}

/// Kind of a step.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Step {
    /// Sets the device up as a driver should. Features (64 bits).
    SetUp,
    /// Reads a register. Offset (16), size.
    Read,
    /// Writes a register. Offset (16), size, value (32).
    Write,
    /// Writes, then reads configuration space. Register (8), value (32), mask of bytes (8).
    Config,
    /// Writes guest memory. Address (32), length (8), bytes.
    Memory,
    /// Makes a valid chain available and notifies. Queue (8), number of buffers (8); of each:
    /// address (32), length (16), flags (8): 1 device-writable, 2 the length is in pages.
    Offer,
    /// Completes requests in the back end. Number (8), status (8).
    Complete,
    /// Sets the free room of the back end. Number (8).
    Room,
    /// Delivers input: a frame, typed bytes. Length (16), offload bits (8).
    Arrive,
    /// Delivers random numbers; sets the target of a balloon in pages, and requests statistics.
    /// Number (16).
    Entropy,
    /// Fires a timer, or all. Number (8).
    Wake,
    /// Advances time. Nanoseconds (32).
    Advance,
    /// Resets the VM.
    Reset,
    /// Delivers a frame of a console's host end. Kind (8), port (8), length (8), byte.
    Frame,
}

const STEPS: [Step; 14] = [
    Step::SetUp,
    Step::Read,
    Step::Write,
    Step::Config,
    Step::Memory,
    Step::Offer,
    Step::Complete,
    Step::Room,
    Step::Arrive,
    Step::Entropy,
    Step::Wake,
    Step::Advance,
    Step::Reset,
    Step::Frame,
];

/// Sectors of the disk.
const SECTORS: u64 = 256;
/// Maximum bytes of a request to the disk.
const MAX_BYTES: u32 = 0x1_0000;
/// Maximum requests to the disk at a time.
const ROOM: usize = 16;
/// Guest memory: space for the driver's rings, and more after a hole.
const LOW: (u64, u64) = (0, 0x6_0000);
const HIGH: (u64, u64) = (0x10_0000, 0x2000);
/// Address of the buffers of the last request.
const BUFFERS: u64 = 0x1000;
/// Queues with rings in low memory.
const FEW_QUEUES: usize = 5;
/// Transmit queue of the last port.
const LAST_TRANSMIT: usize = 2 * proto::ports::MAX_PORTS + 1;

/// Runs an input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 8 {
        0 => {
            let info = BlockInfo {
                sectors: SECTORS,
                discard: true,
                write_zeroes: true,
                max_bytes: MAX_BYTES,
                ..BlockInfo::default()
            };
            drive(Blk::new(info), input, |rig| {
                rig.put(BUFFERS, &[0; blk::spec::HEAD]);
                let head = (BUFFERS, blk::spec::HEAD as u32, false);
                rig.send(0, &[head, (BUFFERS + 0x1000, 512, true), (BUFFERS + 0x100, 1, true)]);
                // The back end still carries out requests from before the reset.
                for _ in 0..=2 * ROOM {
                    complete(rig, 0);
                }
                assert_eq!(rig.used(0).len(), 1, "a disk answers");
                assert_eq!(rig.get(BUFFERS + 0x100, 1), [blk::spec::S_OK]);
            });
        }
        1 => drive(NetCard::new(NetInfo::default()), input, |rig| {
            rig.put(BUFFERS, &[0; net::spec::HEADER]);
            let before = rig.env.port.as_ref().map_or(0, |port| port.sent.len());
            rig.send(net::spec::TRANSMIT, &[(BUFFERS, net::spec::HEADER as u32 + 60, false)]);
            assert_eq!(rig.used(net::spec::TRANSMIT).len(), 1, "a card sends");
            assert_eq!(rig.env.port.as_ref().map_or(0, |port| port.sent.len()), before + 1);
        }),
        2 => drive(Console::new(), input, |rig| {
            let before = rig.env.stream.output.len();
            rig.send(console::spec::TRANSMIT, &[(BUFFERS, 5, false)]);
            assert_eq!(rig.used(console::spec::TRANSMIT).len(), 1, "a console prints");
            assert_eq!(rig.env.stream.output.len(), before + 5);
        }),
        3 => drive(Entropy::new(), input, |rig| {
            rig.send(0, &[(BUFFERS, 8, true)]);
            assert_eq!(rig.used(0), [(0, 8)], "there is entropy");
        }),
        4 => drive(Balloon::new(), input, |rig| {
            let reports = balloon::spec::STATISTICS + 1;
            rig.send(reports, &[(BUFFERS, 0x1000, true)]);
            assert_eq!(rig.used(reports), [(0, 0)], "a balloon takes");
            let given = rig.env.balloon.as_ref().map(|given| given.discarded.as_slice());
            assert_eq!(given, Some(&[(BUFFERS, 0x1000)][..]));
        }),
        5 => drive(P9::new(*b"a tag of as many bytes as it has"), input, |rig| {
            rig.send(0, &[(BUFFERS, 7, false), (BUFFERS + 0x100, 9, true)]);
            complete(rig, 0);
            assert_eq!(rig.used(0), [(0, 9)], "a message is answered");
        }),
        6 => drive(Vsock::new(3), input, |rig| {
            rig.put(BUFFERS, &[0; vsock::spec::HEADER]);
            rig.send(vsock::spec::TRANSMIT, &[(BUFFERS, vsock::spec::HEADER as u32, false)]);
            assert_eq!(rig.used(vsock::spec::TRANSMIT).len(), 1, "a packet is sent");
            assert_eq!(rig.env.link.as_ref().map_or(0, |link| link.sent.len()), 1);
        }),
        _ => drive(Ports::new(), input, |rig| {
            rig.put(BUFFERS, &[0; ports::spec::CONTROL]);
            let message = [(BUFFERS, ports::spec::CONTROL as u32, false)];
            for queue in [ports::spec::CONTROL_TRANSMIT, LAST_TRANSMIT] {
                rig.send(queue, &message);
                assert_eq!(rig.used(queue).len(), 1, "messages and output are taken");
            }
        }),
    }
}

thread_local! {
    static GUEST: GuestMemory = vmm_mem::testing::memory(&[LOW, HIGH]);
    /// Of a device with many queues.
    static LARGE_GUEST: GuestMemory = vmm_mem::testing::memory(&[LOW, HIGH, HIGH_RINGS]);
}

/// Executes the steps, then resets the device and calls `works`.
fn drive<D: VirtioDevice>(mut device: D, mut input: Input<'_>, works: impl FnOnce(&mut Rig<D>)) {
    let guest = if device.queues().len() > FEW_QUEUES { &LARGE_GUEST } else { &GUEST };
    let memory = guest.with(Clone::clone);
    for (base, length) in memory.ranges() {
        let _ = memory.fill(base, length, 0);
    }
    let kind = device.kind();
    let mut rig = Rig::ready(device, u64::MAX, |env| {
        env.memory = Some(memory);
        connect(kind, env);
    });
    while !input.is_empty() {
        let step = STEPS[usize::from(input.byte()) % STEPS.len()];
        act(&mut rig, step, &mut input);
        // The content of interrupts is not checked, and may be large.
        rig.env.msis.clear();
        rig.env.missing.clear();
        rig.env.stream.output.clear();
        if let Some(given) = &mut rig.env.balloon {
            given.statistics.clear();
            let discarded = std::mem::take(&mut given.discarded);
            let is_memory = |&(address, length): &_| rig.memory().contains(address, length);
            assert!(discarded.iter().all(is_memory), "what is given up is memory");
        }
        if let Some(link) = &mut rig.env.link {
            for packet in link.sent.drain(..) {
                let most = vsock::spec::HEADER + vsock::spec::MOST_DATA as usize;
                assert!((vsock::spec::HEADER..=most).contains(&packet.len()), "a packet is one");
            }
        }
    }
    rig.function.reset(&mut rig.env);
    rig.env.stream.room = None;
    if kind == virtio::Kind::Entropy {
        rig.env.entropy = 8;
    }
    if let Some(disk) = &mut rig.env.disk {
        disk.room = 2 * ROOM;
    }
    if let Some(server) = &mut rig.env.server {
        server.room = 2 * ROOM;
    }
    if let Some(port) = &mut rig.env.port {
        *port = ScriptPort { room: 1, ..ScriptPort::default() };
    }
    if let Some(link) = &mut rig.env.link {
        *link = ScriptVsock { room: 1, ..ScriptVsock::default() };
    }
    master(&mut rig);
    rig.set_up(u64::MAX);
    assert_eq!(rig.status(), ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    works(&mut rig);
}

/// Connects the back end that this kind of device needs.
fn connect(kind: virtio::Kind, env: &mut Script) {
    match kind {
        virtio::Kind::Block => env.disk = Some(ScriptDisk::new(SECTORS as usize * 512, ROOM)),
        virtio::Kind::Net => env.port = Some(ScriptPort { room: 16, ..ScriptPort::default() }),
        virtio::Kind::Console | virtio::Kind::Input => {}
        virtio::Kind::Entropy => env.entropy = 256,
        virtio::Kind::Balloon => env.balloon = Some(ScriptBalloon::default()),
        virtio::Kind::P9 => {
            env.server = Some(ScriptServer { room: ROOM, ..ScriptServer::default() });
        }
        virtio::Kind::Vsock => {
            env.link = Some(ScriptVsock { room: ROOM, ..ScriptVsock::default() });
        }
    }
}

fn master<D: VirtioDevice>(rig: &mut Rig<D>) {
    let command = (config::MEMORY | config::MASTER).into();
    rig.function.config_write(config::COMMAND, command, 0xffff, &mut rig.env);
}

/// Completes the oldest request with a status.
fn complete<D: VirtioDevice>(rig: &mut Rig<D>, status: u8) {
    if let Some(server) = &mut rig.env.server
        && let Some(id) = server.messages.get(server.ended.len()).map(|message| message.0)
    {
        server.answer(id, &vec![status; 9 + 300 * usize::from(status)]);
    }
    // Completed requests stay in the list until the device fetches them.
    if let Some(disk) = &mut rig.env.disk
        && let Some(id) = disk.requests.get(disk.ended.len()).map(|request| request.0)
    {
        match status {
            0 => disk.complete(id),
            1 => disk.ended.push_back((id, BlockStatus::Unsupported)),
            _ => disk.ended.push_back((id, BlockStatus::Failed)),
        }
    }
    rig.wake();
}

fn act<D: VirtioDevice>(rig: &mut Rig<D>, step: Step, input: &mut Input<'_>) {
    match step {
        Step::SetUp => {
            master(rig);
            rig.set_up(input.long());
        }
        Step::Read => {
            let offset = input.half();
            rig.read(offset.into(), input.size());
        }
        Step::Write => {
            let (offset, size) = (input.half(), input.size());
            rig.write(offset.into(), size, input.word().into());
        }
        Step::Config => {
            let register = u16::from(input.byte() & !3);
            let (value, bytes) = (input.word(), input.byte());
            let mask = (0..4).filter(|byte| bytes & 1 << byte != 0).map(|byte| 0xff << (8 * byte));
            let mask = mask.fold(0, |all, byte: u32| all | byte);
            rig.function.config_write(register, value, mask, &mut rig.env);
            rig.function.config_read(register, &mut rig.env);
        }
        Step::Memory => {
            let (address, length) = (input.word(), input.byte());
            let _ = rig.memory().write_slice(address.into(), input.bytes(length.into()));
        }
        Step::Offer => {
            let (queue, count) = (usize::from(input.byte()), usize::from(input.byte()) % 4 + 1);
            let mut buffers = [(0, 0, false); 4];
            for buffer in &mut buffers[..count] {
                let (address, length, flags) =
                    (input.word(), u32::from(input.half()), input.byte());
                let length = if flags & 2 != 0 { length << 12 } else { length };
                *buffer = (address.into(), length, flags & 1 != 0);
            }
            let queues = rig.queues();
            rig.send(queue % queues, &buffers[..count]);
        }
        Step::Complete => {
            let (count, status) = (input.byte() % 20, input.byte());
            for _ in 0..count {
                complete(rig, status);
            }
        }
        Step::Room => {
            let room = usize::from(input.byte());
            rig.env.stream.room = Some(room);
            if let Some(disk) = &mut rig.env.disk {
                disk.room = room;
            }
            if let Some(port) = &mut rig.env.port {
                port.room = room;
            }
            if let Some(server) = &mut rig.env.server {
                server.room = room;
            }
            if let Some(link) = &mut rig.env.link {
                link.room = room;
            }
            rig.wake();
        }
        Step::Arrive => {
            let (length, bits) = (usize::from(input.half()), input.byte());
            if let Some(port) = rig.env.port.as_mut().filter(|port| port.waiting.len() < 64) {
                let segments =
                    [Segments::None, Segments::Tcp4, Segments::Tcp6][usize::from(bits >> 4) % 3];
                let offload = Offload { needs_csum: bits & 1 != 0, segments, ..Offload::default() };
                port.waiting.push_back((offload, vec![bits; length]));
                port.link_down = bits & 2 != 0;
            }
            if let Some(link) = rig.env.link.as_mut().filter(|link| link.waiting.len() < 64) {
                link.waiting.push_back((vsock::spec::Header::default(), vec![bits; length]));
            }
            rig.env.stream.input.extend(std::iter::repeat_n(bits, length % 256));
            rig.wake();
        }
        Step::Entropy => {
            let count = input.half();
            if let Some(given) = &mut rig.env.balloon {
                given.asks = true;
                given.wanted = count.into();
            } else if rig.env.entropy != 0 {
                rig.env.entropy = count.into();
            }
            rig.wake();
        }
        Step::Wake => {
            let timer = input.byte();
            rig.function.wake(if timer & 0x80 != 0 { WAKE_INPUT } else { timer }, &mut rig.env);
        }
        Step::Advance => {
            let span = input.word();
            rig.env.advance(&mut rig.function, span.into());
        }
        Step::Reset => rig.function.reset(&mut rig.env),
        Step::Frame => {
            let [kind, port, length, byte] = std::array::from_fn(|_| input.byte());
            rig.env.stream.input.extend([kind, port, length, 0]);
            rig.env.stream.input.extend(std::iter::repeat_n(byte, length.into()));
            rig.wake();
        }
    }
}

impl Seed {
    fn step(self, step: Step) -> Self {
        self.byte(step as u8)
    }

    fn write_register(self, offset: u64, size: u8, value: u32) -> Self {
        self.step(Step::Write).half(offset as u16).size(size).word(value)
    }

    fn memory(self, address: u64, bytes: &[u8]) -> Self {
        self.step(Step::Memory).word(address as u32).byte(bytes.len() as u8).bytes(bytes)
    }

    fn descriptor(self, index: u64, address: u64, length: u32, flags: u16, next: u16) -> Self {
        let entry = Self::new().long(address).word(length).half(flags).half(next).finish();
        self.memory(0x1_0000 + ring::DESCRIPTOR * index, &entry)
    }

    /// Makes `count` chains that begin at descriptor 0 available in queue 0, and notifies.
    fn available(self, count: u16) -> Self {
        let index = Self::new().half(0).half(count).finish();
        self.memory(0x1_4000, &index).write_register(NOTIFY, 2, 0)
    }

    fn frame(self, kind: FrameKind, port: u8, length: u8, byte: u8) -> Self {
        self.step(Step::Frame).byte(kind as u8).byte(port).byte(length).byte(byte)
    }

    /// Sends a control message of a console's driver.
    fn control(self, port: u32, event: u16) -> Self {
        self.memory(0x100, &Self::new().word(port).half(event).half(1).finish())
            .offer(ports::spec::CONTROL_TRANSMIT as u8, &[(0x100, 8, 0)])
    }

    fn offer(self, queue: u8, buffers: &[(u64, u16, u8)]) -> Self {
        let start = self.step(Step::Offer).byte(queue).byte(buffers.len() as u8 - 1);
        buffers.iter().fold(start, |seed, &(address, length, flags)| {
            seed.word(address as u32).half(length).byte(flags)
        })
    }
}

/// A head of a disk request.
fn head(kind: u32, sector: u64) -> Vec<u8> {
    Seed::new().word(kind).word(0).long(sector).finish()
}

/// Initial inputs.
pub fn seeds() -> Vec<(&'static str, Seed)> {
    use blk::spec::{T_DISCARD, T_GET_ID, T_IN, T_OUT};
    let of = |kind: Kind| Seed::new().byte(kind as u8);
    let read_and_write = [(T_IN, 1), (T_OUT, 0), (T_GET_ID, 1)]
        .into_iter()
        .fold(of(Kind::Block), |seed, (kind, flags)| {
            seed.memory(0x100, &head(kind, 3)).offer(
                0,
                &[
                    (0x100, 16, 0),
                    (0x2000, if kind == T_GET_ID { 20 } else { 4096 }, flags),
                    (0x200, 1, 1),
                ],
            )
        })
        .step(Step::Complete)
        .byte(3)
        .byte(0);
    let discard = of(Kind::Block)
        .memory(0x100, &head(T_DISCARD, 0))
        .memory(0x300, &Seed::new().long(250).word(7).word(0).finish())
        .offer(0, &[(0x100, 16, 0), (0x300, 16, 0), (0x200, 1, 1)])
        .step(Step::Complete)
        .byte(1)
        .byte(1);
    let cycle = of(Kind::Block)
        .descriptor(0, 0x100, 16, ring::F_NEXT, 1)
        .descriptor(1, 0x200, 16, ring::F_NEXT, 0)
        .available(1);
    let jump = of(Kind::Entropy).descriptor(0, 0x100, 16, ring::F_WRITE, 0).available(0x8001);
    let indirect = of(Kind::Console)
        .descriptor(0, 0x400, 32, ring::F_INDIRECT, 0)
        .memory(
            0x400,
            &Seed::new().long(0x100).word(5).half(ring::F_NEXT | ring::F_WRITE).half(1).finish(),
        )
        .memory(
            0x410,
            &Seed::new().long(HIGH.0 + HIGH.1 - 4).word(4).half(ring::F_WRITE).half(0).finish(),
        )
        .available(1)
        .step(Step::Arrive)
        .half(9)
        .byte(b'k');
    let nested = of(Kind::Entropy).descriptor(0, 0x1_0000, 16, ring::F_INDIRECT, 0).available(1);
    let frames = of(Kind::Net)
        .offer(0, &[(0x2000, 256, 1), (0x3000, 8, 3)])
        .offer(0, &[(0x8000, 8, 3)])
        .step(Step::Arrive)
        .half(600)
        .byte(1)
        .memory(
            0x100,
            &[net::spec::NEEDS_CSUM, net::spec::GSO_TCPV4, 54, 0, 100, 0, 34, 0, 16, 0, 0, 0],
        )
        .offer(1, &[(0x100, 12, 0), (0x4000, 1500, 0)])
        .step(Step::Arrive)
        .half(60)
        .byte(0x12);
    let setting_up = of(Kind::Net)
        .write_register(STATUS_REGISTER, 1, 0)
        .write_register(QUEUE_SIZE, 2, 3)
        .step(Step::SetUp)
        .long(F_VERSION_1 | F_EVENT_IDX)
        .step(Step::Config)
        .byte(0x10)
        .word(u32::MAX)
        .byte(0xf)
        .step(Step::Reset)
        .step(Step::SetUp)
        .long(F_VERSION_1);
    let slow = of(Kind::Console)
        .step(Step::Room)
        .byte(3)
        .offer(1, &[(0, 16, 2)])
        .step(Step::Advance)
        .word(1_000_000)
        .step(Step::Wake)
        .byte(0x80)
        .step(Step::Entropy)
        .half(1);
    let pages = Seed::new().word(3).word(2).word(1).word(u32::MAX).finish();
    let balloon = of(Kind::Balloon)
        .memory(0x100, &pages)
        .offer(0, &[(0x100, 16, 0)])
        .offer(3, &[(0x2000, 2, 3), (0x1f80, 0x1100, 1)])
        .memory(0x200, &Seed::new().half(4).long(77).finish())
        .offer(2, &[(0x200, 10, 0)])
        .step(Step::Entropy)
        .half(5)
        .offer(2, &[(0x200, 9, 0)]);
    let messages = of(Kind::P9)
        .offer(0, &[(0x100, 7, 0), (0x2000, 5, 1), (0x3000, 900, 1)])
        .offer(0, &[(0x100, 700, 0), (0x2000, 5, 1)])
        .step(Step::Complete)
        .byte(2)
        .byte(1);
    let packet = vsock::spec::Header { length: 4, op: vsock::spec::op::RW, ..Default::default() };
    let sockets = of(Kind::Vsock)
        .memory(0x100, &packet.to_bytes())
        .offer(vsock::spec::TRANSMIT as u8, &[(0x100, 44, 0), (0x12c, 4, 0)])
        .offer(vsock::spec::TRANSMIT as u8, &[(0x100, 44, 0)])
        .step(Step::Arrive)
        .half(300)
        .byte(0)
        .offer(vsock::spec::RECEIVE as u8, &[(0x2000, 144, 1)])
        .offer(vsock::spec::RECEIVE as u8, &[(0x3000, 44, 1), (0x4000, 200, 1)])
        .offer(vsock::spec::EVENT as u8, &[(0x3000, 8, 1)]);
    let named = of(Kind::Ports)
        .frame(FrameKind::Define, 1, 5, b'n')
        .frame(FrameKind::Open, 1, 0, 0)
        .offer(ports::spec::CONTROL_RECEIVE as u8, &[(0x2000, 128, 1)])
        .offer(ports::spec::CONTROL_RECEIVE as u8, &[(0x2100, 128, 1)])
        .offer(ports::spec::CONTROL_RECEIVE as u8, &[(0x2200, 128, 1)])
        .control(0, ports::spec::DEVICE_READY)
        .control(1, ports::spec::PORT_READY)
        .control(1, ports::spec::PORT_OPEN)
        .frame(FrameKind::Data, 1, 99, b'd')
        .offer(4, &[(0x3000, 64, 1)])
        .step(Step::Room)
        .byte(9)
        .offer(5, &[(0x3000, 300, 0)])
        .frame(FrameKind::Close, 1, 0, 0)
        .step(Step::SetUp)
        .long(F_VERSION_1);
    vec![
        ("ports", named),
        ("balloon", balloon),
        ("messages", messages),
        ("read-write-identify", read_and_write),
        ("discard", discard),
        ("cycle", cycle),
        ("index-jumps", jump),
        ("indirect", indirect),
        ("indirect-in-ring", nested),
        ("frames", frames),
        ("sockets", sockets),
        ("set-up-twice", setting_up),
        ("slow-outside", slow),
    ]
}

/// The device status register.
const STATUS_REGISTER: u64 = vmm_dev::virtio::pci::spec::STATUS;
