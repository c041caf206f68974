//! Does everything to virtio devices that a driver must not do: chains that run in circles, buffers
//! anywhere, rings over each other, impossible sizes and features, jumping indices, storms of
//! notifications, resets in between, tables of interrupts full of garbage. Between the rounds each
//! device must work again after a reset.
//!
//! Devices write to free RAM, or to addresses without RAM: otherwise a device would overwrite this
//! program, and that would be right.
#![no_std]
#![no_main]

use guests_micro::pci::Function;
use guests_micro::ram::Ram;
use guests_micro::random::Random;
use guests_micro::trap::{NMI, TrapFrame};
use guests_micro::virtio::{Kind, Queues, RING_BYTES, SIZE, VirtioDevice, common, status};
use guests_micro::{check, guest, println};
use hw_tables::pci::{command, register};

guest!(main, trap);

/// Rounds for each device.
const ROUNDS: u32 = 1500;
/// The device is used properly after as many rounds.
const BREAK: u32 = 25;
/// Parts of the free RAM: rings, which the device is never told to fill with data, and buffers.
const RINGS: u64 = 4 * RING_BYTES;
const BUFFERS: u64 = 1 << 20;
/// Bytes of a sector; and how many are written and read at a time.
const SECTOR: u32 = 512;
const SECTORS: u32 = 8;
/// Type of frames, for experiments (IEEE 802, local experimental EtherType 2).
const FRAME_TYPE: [u8; 2] = [0x88, 0xb6];

/// Messages with an interrupt may say NMI.
fn trap(frame: &mut TrapFrame) {
    if frame.vector() != NMI {
        guests_micro::trap::unexpected(frame);
    }
}

fn main() {
    let free = Ram::free();
    check!(free.is_some_and(|ram| ram.end() - ram.start() >= RINGS + BUFFERS), "no RAM: {free:x?}");
    let Some(free) = free else { return };
    let (rings, buffers) = (free.part(0, RINGS), free.part(RINGS, BUFFERS));
    let mut wanted = [0; 3];
    for (kind, wanted) in [Kind::Block, Kind::Net, Kind::Entropy].into_iter().zip(&mut wanted) {
        let device = VirtioDevice::find(kind);
        check!(device.is_some(), "there is no {kind:?}");
        let Some(device) = device else { return };
        let base = device.function.read(register::BASE_ADDRESS);
        let mut hostile =
            Hostile { device, kind, base, rings, buffers, random: Random(kind as u64) };
        hostile.works();
        for round in 1..=ROUNDS {
            hostile.round();
            if device.status() & status::NEEDS_RESET != 0 {
                *wanted += 1;
            }
            if round % BREAK == 0 {
                hostile.works();
            }
        }
        check!(*wanted > ROUNDS / 20, "{kind:?} minds too little: {}", *wanted);
    }
    println!("hostile-rings: {ROUNDS} rounds, resets wanted {wanted:?}, all devices work");
}

struct Hostile {
    device: VirtioDevice,
    kind: Kind,
    /// The base address register as the firmware has set it.
    base: u32,
    rings: Ram,
    buffers: Ram,
    random: Random,
}

impl Hostile {
    fn one_in(&mut self, count: u64) -> bool {
        self.random.below(count) == 0
    }

    /// An address for the device: of a buffer, or where there is no RAM.
    fn address(&mut self) -> u64 {
        let word = self.random.word();
        match word % 8 {
            0 => u64::MAX - (word >> 32 & 0xfff),
            1 => self.device.common.start() + (word >> 32 & 0xfff),
            2 => 0xfee0_0000 + (word >> 32 & 0xff0),
            3 => 1 << 40 | word >> 32,
            _ => self.buffers.start() + self.random.below(BUFFERS),
        }
    }

    /// A length for a buffer there that stays in the buffers, or leaves all RAM.
    fn length(&mut self, address: u64) -> u32 {
        match self.random.below(8) {
            0 => 0,
            1 => u32::MAX - self.random.below(4096) as u32,
            2 => 0x8000_0000,
            _ => self.buffers.end().checked_sub(address).map_or(1, |most| {
                let usual = [1, 16, 512, 4096, 0x1_0000][self.random.below(5) as usize];
                usual.min(most) as u32
            }),
        }
    }

    /// An address for a ring: its own, misaligned, over another one, or where there is no RAM.
    fn ring(&mut self, proper: u64) -> u64 {
        match self.random.below(12) {
            0 => proper + 1,
            1 => self.rings.start() + 0x1000 * self.random.below(6),
            2 => self.device.common.start(),
            3 => u64::MAX - 0xf,
            4 => 1 << 52,
            _ => proper,
        }
    }

    /// Index of a descriptor: mostly one that exists.
    fn index(&mut self) -> u16 {
        if self.one_in(10) {
            self.random.word() as u16
        } else {
            self.random.below(SIZE.into()) as u16
        }
    }

    /// One descriptor.
    fn descriptor(&mut self, at: u64) {
        let address = self.address();
        let length = self.length(address);
        let flags =
            if self.one_in(8) { self.random.word() as u16 } else { self.random.below(4) as u16 };
        // A table of descriptors must be where the device never writes data.
        let (address, length, flags) = if self.one_in(6) {
            (self.rings.start() + RINGS - 0x1000, 16 * (1 + self.random.below(8) as u32), flags | 4)
        } else {
            (address, length, flags & !4)
        };
        self.rings.write(at, address);
        self.rings.write(at + 8, length);
        self.rings.write(at + 12, flags);
        let next = self.index();
        self.rings.write(at + 14, next);
    }

    /// Does something wrong, after setting the device up or as it is.
    fn round(&mut self) {
        if !self.one_in(3) {
            self.restore();
            let features = self.random.word();
            self.device.set_up(features, self.rings);
        }
        for _ in 0..=self.random.below(3) {
            match self.random.below(8) {
                0 => self.setting(),
                1 => self.vectors(),
                2 => self.configuration(),
                3 => self.register(),
                _ => self.chains(),
            }
        }
    }

    /// Fills the rings and notifies.
    fn chains(&mut self) {
        let queue = self.random.below(self.device.queues().max(1).into()) as u16;
        let start = self.rings.start() + u64::from(queue) * RING_BYTES;
        for index in 0..u64::from(SIZE) {
            self.descriptor(start + 16 * index);
        }
        for index in 0..8 {
            self.descriptor(self.rings.start() + RINGS - 0x1000 + 16 * index);
        }
        for slot in 0..u64::from(SIZE) {
            let head = self.index();
            self.rings.write(start + 0x1000 + 4 + 2 * slot, head);
        }
        let old: u16 = self.rings.read(start + 0x1002);
        let step =
            if self.one_in(6) { self.random.word() as u16 } else { self.random.below(17) as u16 };
        self.rings.write(start + 0x1002, old.wrapping_add(step));
        let storm = if self.one_in(10) { 100 } else { 3 };
        for _ in 0..=self.random.below(storm) {
            let queue = if self.one_in(10) { self.random.word() as u16 } else { queue };
            self.device.notify(queue);
            // More chains while the device may be at work on those before.
            let head = self.index();
            self.rings.write(start + 0x1004, head);
        }
    }

    /// Goes through the motions of a set-up with impossible values.
    fn setting(&mut self) {
        let registers = self.device.common;
        if self.one_in(2) {
            registers.write(common::STATUS, 0u8);
        }
        registers.write(common::STATUS, status::ACKNOWLEDGE | status::DRIVER);
        let features = self.random.word();
        self.device.choose(features);
        registers.write(common::STATUS, self.random.word() as u8);
        registers.write(common::QUEUE_SELECT, self.random.below(5) as u16);
        let size = match self.random.below(4) {
            0 => self.random.word() as u16,
            1 => 0,
            2 => 3,
            _ => SIZE,
        };
        registers.write(common::QUEUE_SIZE, size);
        let start = self.rings.start();
        let parts = [0, 0x1000, 0x2000].map(|offset| self.ring(start + offset));
        self.device.place_queue(parts);
        registers.write(common::QUEUE_ENABLE, 1u16);
        registers.write(common::STATUS, status::DRIVER_OK | self.random.word() as u8);
        self.device.notify(0);
    }

    /// Fills the table of interrupts.
    fn vectors(&mut self) {
        for at in (0..self.device.vectors.length()).step_by(16) {
            let address = if self.one_in(2) {
                0xfee0_0000 | self.random.word() & 0xf_fffc
            } else {
                self.address()
            };
            // Any delivery mode but those that stop or start a processor, which this program needs.
            let delivery = [0, 1, 2, 3, 4, 7][self.random.below(6) as usize] << 8;
            let data = self.random.word() as u32 & !0x700 | delivery;
            self.device.vectors.write(at, address as u32);
            self.device.vectors.write(at + 4, (address >> 32) as u32);
            self.device.vectors.write(at + 8, data);
            self.device.vectors.write(at + 12, self.random.word() as u32 & 1);
        }
        self.device.common.write(0x10, self.random.below(6) as u16);
        self.device.common.write(common::QUEUE_SELECT, self.random.below(4) as u16);
        self.device.common.write(0x1a, self.random.below(6) as u16);
        let enabled = (self.random.word() as u32 & 3) << 30;
        for (at, id) in self.device.function.capabilities() {
            if id == hw_tables::pci::capability::MSI_X {
                self.device.function.write(at, enabled);
            }
        }
    }

    /// Moves the window away, switches the function off and on, and uses its back door.
    fn configuration(&mut self) {
        let function = self.device.function;
        match self.random.below(4) {
            0 => function.write(register::BASE_ADDRESS, self.random.word() as u32),
            1 => function.write(register::COMMAND, self.random.word() as u32),
            2 => function.write(register::BASE_ADDRESS, 0xfee0_0000),
            _ => {
                // The access capability (section 4.1.4.9), on what holds no address.
                let offset = [0, 0x12, 0x14, 0x16, 0x18, 0x1000, 0x2000, 0x3000, u32::MAX];
                let offset = offset[self.random.below(9) as usize];
                let access = function.capabilities().find(|&(at, id)| {
                    id == hw_tables::pci::capability::VENDOR && function.read(at) >> 24 == 5
                });
                if let Some((at, _)) = access {
                    function.write(at + 8, offset);
                    function.write(at + 12, self.random.below(6) as u32);
                    function.write(at + 16, self.random.word() as u32);
                    function.read(at + 16);
                }
            }
        }
        self.device.notify(0);
        self.restore();
    }

    /// Writes a register, whole or in part, that holds no address.
    fn register(&mut self) {
        let offset = self.random.below(common::QUEUE_ADDRESSES);
        match self.random.below(3) {
            0 => self.device.common.write(offset, self.random.word() as u8),
            1 => self.device.common.write(offset & !1, self.random.word() as u16),
            _ => self.device.common.write(offset & !3, self.random.word() as u32),
        }
        let offset = self.random.below(self.device.config.length());
        self.device.config.write(offset, self.random.word() as u8);
    }

    /// Makes the registers reachable.
    fn restore(&self) {
        let function: Function = self.device.function;
        function.write(register::BASE_ADDRESS, self.base);
        function.write(register::COMMAND, u32::from(command::MEMORY | command::BUS_MASTER));
    }

    /// Sets the device up and uses it properly.
    fn works(&mut self) {
        self.restore();
        let features = if self.one_in(2) { u64::MAX } else { 0 };
        let queues = self.device.set_up(features, self.rings);
        check!(queues.is_some(), "{:?} is not ready: {:#x}", self.kind, self.device.status());
        let Some(mut queues) = queues else { return };
        match self.kind {
            Kind::Block => self.disk_works(&mut queues),
            Kind::Net => self.card_works(&mut queues),
            Kind::Entropy => self.entropy_works(&mut queues),
        }
    }

    /// Sectors read back as they were written.
    fn disk_works(&mut self, queues: &mut Queues) {
        let (head, state, data) =
            (self.buffers.start(), self.buffers.start() + 16, self.buffers.start() + 4096);
        let bytes = SECTOR * SECTORS;
        let sectors: u64 = self.device.config.read::<u32>(0).into();
        let sector = self.random.below(sectors / u64::from(SECTORS)) * u64::from(SECTORS);
        let seed = self.random.word();
        let words = || (data..data + u64::from(bytes)).step_by(8);
        for (kind, word) in [(1u32, seed), (0, 0)] {
            self.buffers.write(head, kind);
            self.buffers.write(head + 4, 0u32);
            self.buffers.write(head + 8, sector);
            self.buffers.write(state, 0xffu8);
            words().for_each(|at| self.buffers.write(at, if kind == 1 { word ^ at } else { 0 }));
            let chain = [(head, 16, false), (data, bytes, kind == 0), (state, 1, true)];
            let written = queues.request(0, &chain);
            let found: u8 = self.buffers.read(state);
            let expected = if kind == 0 { bytes + 1 } else { 1 };
            check!(written == Some(expected), "disk: request {kind} wrote {written:?}");
            check!(found == 0, "disk: request {kind} ends with {found}");
        }
        let wrong = words().find(|&at| self.buffers.read::<u64>(at) != seed ^ at);
        check!(wrong.is_none(), "disk: wrong data of sector {sector}");
    }

    /// A frame goes out.
    fn card_works(&mut self, queues: &mut Queues) {
        const HEADER: u64 = 12;
        let frame = self.buffers.start();
        for at in 0..HEADER + 60 {
            let byte = match at.checked_sub(HEADER) {
                Some(0..6) => 0xff,
                Some(own @ 6..12) => self.device.config.read(own - 6),
                Some(kind @ 12..14) => FRAME_TYPE[kind as usize - 12],
                _ => 0u8,
            };
            self.buffers.write(frame + at, byte);
        }
        let written = queues.request(1, &[(frame, HEADER as u32 + 60, false)]);
        check!(written == Some(0), "card: a frame ends with {written:?}");
    }

    /// Bytes come, not all the same.
    fn entropy_works(&mut self, queues: &mut Queues) {
        let at = self.buffers.start();
        self.buffers.write(at, 0u64);
        self.buffers.write(at + 8, 0u64);
        let written = queues.request(0, &[(at, 16, true)]);
        check!(written == Some(16), "entropy: {written:?}");
        check!(self.buffers.read::<u64>(at) != self.buffers.read(at + 8), "entropy repeats itself");
    }
}
