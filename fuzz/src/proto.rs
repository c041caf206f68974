//! Target `proto`: all data that is read from another task.
//!
//! First byte: the decoder. Accepted data must survive encoding and decoding. For sessions the rest
//! of the input is words written by the peer, each with the next operation of both ends; the ends
//! must continue or break the connection, but never access data outside the session.

use std::sync::atomic::{AtomicU64, Ordering};

use proto::control::VmmStatistics;
use proto::manage::{Entry, Figures, Refusal, Report};
use proto::start::{MAX_START, Start};
use proto::system::System;
use proto::{bytes, console, disk, log, manage, net};

use crate::input::{Input, Seed};

/// Decoders, by the first byte of an input.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Decoder {
    Start,
    System,
    Manage,
    Words,
    Disk,
    Net,
}

/// Runs an input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 6 {
        0 => start(input.rest()),
        1 => system(input.rest()),
        2 => structs(input.rest()),
        3 => words(input),
        4 => disk_session(input),
        _ => net_session(input),
    }
}

fn start(bytes: &[u8]) {
    if let Some(start) = Start::decode(bytes) {
        // Encodings of numbers in the input may be longer than necessary.
        let mut buffer = vec![0; bytes.len().max(MAX_START)];
        let encoded = start.encode(&mut buffer).expect("as long as it was");
        assert_eq!(Start::decode(encoded), Some(start.clone()));
    }
}

fn system(bytes: &[u8]) {
    if let Ok(system) = System::decode(bytes) {
        let mut buffer = vec![0; bytes.len().max(64)];
        let encoded = system.encode(&mut buffer).expect("as long as it was");
        assert_eq!(System::decode(encoded).as_ref(), Ok(&system));
    }
}

fn structs(bytes: &[u8]) {
    if let Some(entry) = Entry::decode(bytes) {
        let mut buffer = vec![0; bytes.len() + 64];
        let encoded = postcard::to_slice(&entry, &mut buffer).expect("as long as it was");
        assert_eq!(Entry::decode(encoded), Some(entry.clone()));
        let _ = manage::is_name(entry.name);
    }
    if let Some(figures) = Figures::decode(bytes) {
        let mut buffer = [0; manage::MAX_ENCODED];
        let encoded = postcard::to_slice(&figures, &mut buffer).expect("always fits");
        assert_eq!(Figures::decode(encoded), Some(figures));
    }
}

fn words(mut input: Input<'_>) {
    let code = input.long();
    assert!(!Refusal::from_code(code).text().is_empty());
    let _ = (log::Level::from_code(code), disk::Status::from_code(code as u8));
    let _ = disk::Operation::from_code(code as u8);
    let bytes: Vec<u8> = input.rest().to_vec();
    let mut words = [0; 64];
    let used = bytes::pack(&bytes, &mut words);
    let mut unpacked = [0; 600];
    let back = bytes::unpack(&words[..used], code as usize, &mut unpacked);
    assert!(bytes.starts_with(&back[..back.len().min(bytes.len())]));
    let statistics = VmmStatistics::unpack(&words[..used]);
    assert_eq!(VmmStatistics::unpack(&statistics.pack()), statistics);
    let report = Report::default().pack();
    let report =
        Report::unpack(&std::array::from_fn::<u64, { Report::LENGTH / 8 - 1 }, _>(|index| {
            words.get(index).copied().unwrap_or(report[index])
        }));
    assert_eq!(Report::unpack(&report.pack()), report);
    let mut entry = [0; console::directory::ENTRY];
    let length = entry.len().min(bytes.len());
    entry[..length].copy_from_slice(&bytes[..length]);
    if let Some(name) = console::directory::name(&entry) {
        assert!(name.bytes().all(|byte| byte.is_ascii_graphic()));
    }
}

/// Words of a session shared by both ends, without data.
const WORDS: usize = 1024;

fn memory() -> Vec<AtomicU64> {
    (0..WORDS).map(|_| AtomicU64::new(0)).collect()
}

/// Writes a word as the peer: offset (16), value (64 or 8 bits). Returns the number of the ends'
/// operation.
fn scribble(memory: &[AtomicU64], input: &mut Input<'_>) -> u8 {
    let (place, what) = (usize::from(input.half()), input.byte());
    let value = if what & 0x80 != 0 { input.long() } else { input.byte().into() };
    if what & 0x40 == 0 {
        memory[place % WORDS].store(value, Ordering::Relaxed);
    }
    what & 0x3f
}

fn disk_session(mut input: Input<'_>) {
    const LENGTH: u64 = disk::DATA + 4 * disk::BUFFER;
    let memory = memory();
    let info = disk::Info { sectors: 1000, max_sectors: 16, depth: 4, ..disk::Info::default() };
    let (Some(mut client), Some(mut server)) =
        (disk::Client::new(&memory, LENGTH), disk::Session::new(&memory, LENGTH, info))
    else {
        panic!("there is memory enough")
    };
    let mut served: Vec<u16> = Vec::new();
    while !input.is_empty() {
        let what = scribble(&memory, &mut input);
        match what % 8 {
            0 | 1 => {
                let before = client.under_way();
                if client.poll().is_some() {
                    assert_eq!(client.under_way() + 1, before, "an answer to what was asked");
                }
            }
            2 | 3 => {
                if let Some(request) = server.take() {
                    assert_eq!(info.check(&request), Ok(()));
                    if request.operation.has_data() {
                        assert!(request.offset >= disk::DATA);
                        assert!(request.offset + request.bytes() <= LENGTH, "{request:?}");
                    }
                    served.push(request.id);
                }
            }
            4 => {
                if let Some(id) = served.pop() {
                    server.complete(id, disk::Status::Ok);
                }
            }
            5 => {
                let operation =
                    disk::Operation::from_code(what >> 3).unwrap_or(disk::Operation::Read);
                let room = client.has_room();
                assert_eq!(client.submit(operation, what.into(), 1, disk::DATA, 1), room);
            }
            6 => {
                let buffer = client.allocate(u64::from(what) * 512);
                if let Some(buffer) = buffer {
                    assert!(buffer.offset + buffer.length <= LENGTH);
                    client.release(buffer);
                }
            }
            _ => {
                let _ = (client.sleep(), server.sleep(), client.info());
                let _ = (client.take_signal(), server.take_signal());
            }
        }
    }
}

fn net_session(mut input: Input<'_>) {
    const LENGTH: u64 = net::SESSION_BYTES;
    let memory = memory();
    let info = net::Info { mac: [2, 0, 0, 0, 0, 1] };
    let (Some(mut client), Some(mut port)) =
        (net::Client::new(&memory, LENGTH), net::Port::new(&memory, LENGTH, info))
    else {
        panic!("there is memory enough")
    };
    let within = |frame: net::Frame| {
        assert!((net::MIN_FRAME..=net::MAX_FRAME).contains(&frame.length), "{frame:?}");
        assert!(frame.offset >= net::DATA && frame.offset + frame.length <= LENGTH, "{frame:?}");
    };
    while !input.is_empty() {
        let what = scribble(&memory, &mut input);
        let length = net::MIN_FRAME << (what >> 3);
        let offload = net::Offload::default();
        match what % 8 {
            0 => {
                client.poll();
                client.set_offload_caps(net::OffloadCaps {
                    sums: true,
                    tcp4: what & 8 != 0,
                    tcp6: false,
                });
            }
            1 => {
                port.poll();
                let _ = port.offload_caps();
            }
            2 => {
                if let Some(offset) = client.place(length) {
                    within(net::Frame { offset, length, offload });
                    client.send(net::Frame { offset, length, offload });
                }
            }
            3 => {
                if let Some(offset) = port.place(length) {
                    within(net::Frame { offset, length, offload });
                    port.send(net::Frame { offset, length, offload });
                }
            }
            4 => client.receive().into_iter().for_each(within),
            5 => port.receive().into_iter().for_each(within),
            6 => {
                client.done();
                port.done();
            }
            _ => {
                let _ = (client.sleep(), client.sleep_for_room(), port.sleep());
                let _ = (client.take_signal(), port.take_signal(), client.info());
            }
        }
    }
}

impl Seed {
    fn decoder(decoder: Decoder) -> Self {
        Self::new().byte(decoder as u8)
    }

    /// Both ends execute an operation, without a write of the peer.
    fn does(self, what: u8) -> Self {
        self.half(0).byte(what | 0x40).byte(0)
    }

    /// The peer writes a word, then both ends execute an operation.
    fn scribbles(self, place: u16, value: u64, what: u8) -> Self {
        self.half(place).byte(what | 0x80).long(value)
    }
}

fn example_start() -> Vec<u8> {
    use proto::start::{Clock, Range, RangeKind, Role, Vmm};
    let mut cpus = heapless::Vec::new();
    let mut ranges = heapless::Vec::new();
    let mut attachments = heapless::Vec::new();
    let _ = cpus.extend_from_slice(&[0, 1]);
    let _ =
        ranges.push(Range { kind: RangeKind::Guest, base: 1 << 38, length: 1 << 28, physical: 0 });
    let _ = attachments.push(proto::service::Attachment {
        service: proto::service::Service::Net,
        signal: 1 << 32,
    });
    let mut channels = heapless::Vec::new();
    let _ = channels.push(proto::channel::End {
        side: 1,
        peer: 2,
        peer_name: "other",
        doorbell: true,
        signal: 1 << 16,
    });
    let mut devices = heapless::Vec::new();
    let kind = proto::start::PassThroughKind::Virtio;
    let _ = devices.push(proto::start::PassThrough { kind, is_level: true });
    let start = Start {
        name: "linux",
        cpu: 1,
        priority: 10,
        cpu_time: None,
        clock: Clock { tsc_khz: 1_000_000, tsc: 5, unix_seconds: 1_700_000_000 },
        ranges,
        role: Role::Vmm(Vmm {
            cpus,
            memory: 1 << 28,
            command_line: "console=ttyS0",
            console: true,
            on_reset: proto::system::OnReset::Reset,
            kvmclock: false,
            virtio_console: true,
            transport: proto::system::VirtioTransport::Mmio,
            vtlb: None,
            xcr0_mask: 7,
            gicv2: false,
            aarch32: false,
            seed: Some([3; 32]),
            attachments,
            id: 1,
            channels,
            devices,
            identity: Some(1 << 30),
        }),
    };
    let mut buffer = [0; MAX_START];
    start.encode(&mut buffer).map(|bytes| bytes.to_vec()).unwrap_or_default()
}

fn example_system() -> Vec<u8> {
    use proto::system::*;
    let mut servers = heapless::Vec::new();
    let _ = servers.push(Server {
        name: "disk",
        kind: ServerKind::Block,
        device: Device::Pci(PciClass::Ahci(Some(1)), 0),
        binary: "disk",
        priority: 40,
        cpu_time: Some(CpuTime { budget: 1_000_000, period: 10_000_000 }),
        restart: Restart::OnCrash,
    });
    let mut tasks = heapless::Vec::new();
    let mut arguments = heapless::Vec::new();
    let _ = arguments.push("1000");
    let _ = tasks.push(TaskSpec {
        name: "steward",
        binary: "steward",
        arguments,
        cpu: 0,
        priority: 5,
        cpu_time: None,
        essential: true,
        console: Some(0),
        manage: true,
    });
    let mut disks = heapless::Vec::new();
    let part = proto::service::DiskRange { partition: Some(2), first: 0, sectors: 0 };
    let _ = disks.push(VmDisk { server: 0, part, read_only: true });
    let mut vms = heapless::Vec::new();
    let _ = vms.push(Vm {
        name: "linux",
        memory: 1 << 28,
        vcpus: 1,
        pins: heapless::Vec::new(),
        binary: "vmm",
        kernel: "linux.kernel",
        initrd: Some("linux.initrd"),
        command_line: "quiet",
        console: None,
        priority: 10,
        cpu_time: None,
        restart: Restart::Always,
        on_reset: OnReset::Exit,
        kvmclock: true,
        virtio_console: false,
        transport: proto::system::VirtioTransport::Pci,
        vtlb: Some(proto::vtlb::Vtlb {
            pool: 16,
            rung: proto::vtlb::Rung::Cache,
            spaces: 4,
            trace_writes: false,
        }),
        essential: false,
        template: true,
        disks,
        nets: heapless::Vec::new(),
        devices: heapless::Vec::from_iter([Device::Mmio(VirtioClass::Block, 1)]),
    });
    let mut channels = heapless::Vec::new();
    let _ = channels.push(Channel { between: [0, 1], size: 1 << 20, doorbell: true });
    let system = System {
        board: Board::QemuQ35,
        log: SerialPort::Com2,
        cpus: 2,
        servers,
        tasks,
        vms,
        channels,
    };
    let mut buffer = [0; 512];
    system.encode(&mut buffer).map(|bytes| bytes.to_vec()).unwrap_or_default()
}

/// Initial inputs.
pub fn seeds() -> Vec<(&'static str, Seed)> {
    let entry = Entry {
        number: 3,
        name: "linux-1",
        kind: manage::Kind::Vm,
        state: manage::State::Ended(81),
        memory: 1 << 28,
        vcpus: 2,
        priority: 10,
        restarts: 1,
    };
    let entry = postcard::to_stdvec(&entry).unwrap_or_default();
    let figures = postcard::to_stdvec(&Figures { lived: 1 << 40, ..Figures::default() });
    let connected = |decoder| Seed::decoder(decoder).does(0);
    // The client connects, the server accepts; the client sends, the server receives and replies.
    let disk = [0, 2, 0, 0x0d, 2, 4, 7, 0].into_iter().fold(connected(Decoder::Disk), Seed::does);
    // Then ring positions jump, and the generation changes.
    let disk_broken =
        disk.clone().scribbles(64, 1 << 31, 2).scribbles(64 + 8, 77, 0).scribbles(0, 9, 0).does(5);
    let net = [1, 0, 2, 5, 6, 0x13, 4, 7].into_iter().fold(connected(Decoder::Net), Seed::does);
    let net_broken =
        net.clone().scribbles(64 + 16, u64::MAX, 5).scribbles(1, 0, 4).scribbles(64, 3, 5);
    vec![
        ("start", Seed::decoder(Decoder::Start).bytes(&example_start())),
        ("system", Seed::decoder(Decoder::System).bytes(&example_system())),
        ("entry", Seed::decoder(Decoder::Manage).bytes(&entry)),
        ("figures", Seed::decoder(Decoder::Manage).bytes(&figures.unwrap_or_default())),
        ("words", Seed::decoder(Decoder::Words).long(5).bytes(b"linux-1")),
        ("disk", disk),
        ("disk-broken", disk_broken),
        ("net", net),
        ("net-broken", net_broken),
    ]
}
