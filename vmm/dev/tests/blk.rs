//! Scripts for the block device.

mod driver;

use driver::{Rig, breaks};
use vmm_bus::backend::{BlockInfo, BlockOp, BlockStatus};
use vmm_bus::testing::ScriptDisk;
use vmm_dev::virtio::blk::{Blk, PATIENCE, spec::*};
use vmm_dev::virtio::pci::spec::CONFIG;
use vmm_dev::virtio::spec::F_EVENT_IDX;

const HEADS: u64 = 0x100;
const STATUS: u64 = 0x800;
const DATA: u64 = 0x2000;

fn info() -> BlockInfo {
    BlockInfo {
        sectors: 64,
        read_only: false,
        discard: true,
        write_zeroes: true,
        max_bytes: 0x2000,
        serial: *b"0123456789abcdefghij",
    }
}

struct Script {
    rig: Rig<Blk>,
    next: u64,
}

impl Script {
    fn new(info: BlockInfo, room: usize) -> Self {
        Self::with(info, room, !F_EVENT_IDX)
    }

    /// With a driver that accepts no features but these.
    fn with(info: BlockInfo, room: usize, features: u64) -> Self {
        let rig = Rig::ready(Blk::new(info), features, |env| {
            let mut disk = ScriptDisk::new(info.sectors as usize * 512, room);
            for (index, byte) in disk.content.iter_mut().enumerate() {
                *byte = (index / 512) as u8 + 1;
            }
            env.disk = Some(disk);
        });
        Self { rig, next: 0 }
    }

    fn disk(&mut self) -> &mut ScriptDisk {
        self.rig.env.disk.as_mut().unwrap()
    }

    /// Starts a request with data; returns the address of its status.
    fn start(&mut self, kind: u32, sector: u64, data: Option<(u64, u32)>) -> u64 {
        let (head, status) = (HEADS + 16 * self.next, STATUS + self.next);
        self.next = (self.next + 1) % 64;
        self.rig.put(head, &kind.to_le_bytes());
        self.rig.put(head + 8, &sector.to_le_bytes());
        self.rig.put(status, &[0xee]);
        let write = matches!(kind, T_IN | T_GET_ID);
        let mut chain = vec![(head, 16, false)];
        chain.extend(data.map(|(address, length)| (address, length, write)));
        chain.push((status, 1, true));
        self.rig.send(0, &chain);
        status
    }

    fn status(&self, at: u64) -> u8 {
        self.rig.get(at, 1)[0]
    }

    /// A request that completes in the device.
    #[track_caller]
    fn ends(&mut self, kind: u32, sector: u64, data: Option<(u64, u32)>, expected: u8) -> u32 {
        let status = self.start(kind, sector, data);
        assert_eq!(self.status(status), expected);
        let used = self.rig.used(0);
        assert_eq!(used.len(), 1);
        assert_eq!(self.rig.interrupts(), [0x41]);
        used[0].1
    }

    /// A request that the disk carries out.
    #[track_caller]
    fn does(&mut self, kind: u32, sector: u64, data: Option<(u64, u32)>) -> (BlockOp, u32) {
        let status = self.start(kind, sector, data);
        assert_eq!((self.status(status), self.rig.used(0)), (0xee, vec![]));
        let (id, op, _) = self.disk().requests[0].clone();
        self.disk().complete(id);
        self.rig.wake();
        assert_eq!(self.status(status), S_OK);
        assert_eq!(self.rig.interrupts(), [0x41]);
        (op, self.rig.used(0)[0].1)
    }
}

#[test]
fn configuration() {
    let mut script = Script::new(info(), 4);
    let mut config = |at: usize, size| script.rig.read(CONFIG + at as u64, size);
    assert_eq!((config(CAPACITY, 4), config(CAPACITY + 4, 4)), (64, 0));
    assert_eq!((config(SIZE_MAX, 4), config(SEG_MAX, 4)), (4096, 2));
    assert_eq!((config(BLK_SIZE, 4), config(MAX_DISCARD_SEG, 4)), (512, 1));
    assert_eq!(config(60, 4), 0);
    let large = BlockInfo { max_bytes: u32::MAX, ..info() };
    assert_eq!(Script::new(large, 4).rig.read(CONFIG + SEG_MAX as u64, 4), 126);
}

#[test]
fn read_write_flush() {
    let mut script = Script::new(info(), 4);
    let (op, written) = script.does(T_IN, 3, Some((DATA, 1024)));
    assert_eq!((op, written), (BlockOp::Read { sector: 3 }, 1025));
    assert_eq!(script.rig.get(DATA, 512), [4; 512]);
    assert_eq!(script.rig.get(DATA + 512, 513), [&[5; 512][..], &[0]].concat());
    script.rig.put(DATA, &[0x77; 512]);
    let (op, written) = script.does(T_OUT, 63, Some((DATA, 512)));
    assert_eq!((op, written), (BlockOp::Write { sector: 63 }, 1));
    assert_eq!(script.disk().content[63 * 512..], [0x77; 512]);
    assert_eq!(script.does(T_FLUSH, 0, None), (BlockOp::Flush, 1));
}

#[test]
fn identification_and_unknown_requests() {
    let mut script = Script::new(info(), 4);
    assert_eq!(script.ends(T_GET_ID, 0, Some((DATA, 20)), S_OK), 21);
    assert_eq!(script.rig.get(DATA, 21), b"0123456789abcdefghij\0");
    assert_eq!(script.ends(T_GET_ID, 0, Some((DATA + 32, 30)), S_OK), 20, "padding is not written");
    script.ends(99, 0, None, S_UNSUPP);
    assert_eq!(script.disk().requests, []);
}

#[test]
fn ranges() {
    let mut script = Script::new(info(), 4);
    let range = |sector: u64, count: u32, flags: u32| {
        let mut bytes = [0; RANGE];
        bytes[..8].copy_from_slice(&sector.to_le_bytes());
        bytes[8..12].copy_from_slice(&count.to_le_bytes());
        bytes[12..].copy_from_slice(&flags.to_le_bytes());
        bytes
    };
    let data = Some((DATA, RANGE as u32));
    script.rig.put(DATA, &range(60, 4, 0));
    assert_eq!(script.does(T_DISCARD, 0, data).0, BlockOp::Discard { sector: 60, count: 4 });
    script.rig.put(DATA, &range(8, 2, UNMAP));
    let zeroes = BlockOp::WriteZeroes { sector: 8, count: 2, unmap: true };
    assert_eq!(script.does(T_WRITE_ZEROES, 0, data).0, zeroes);
    script.ends(T_DISCARD, 0, data, S_UNSUPP);
    for (bytes, expected) in [
        (range(61, 4, 0), S_IOERR),
        (range(u64::MAX, 1, 0), S_IOERR),
        (range(1, u32::MAX, 0), S_IOERR),
        (range(1, 0, 0), S_IOERR),
        (range(1, 1, 2), S_UNSUPP),
    ] {
        script.rig.put(DATA, &bytes);
        script.ends(T_WRITE_ZEROES, 0, data, expected);
        script.ends(T_DISCARD, 0, data, expected);
    }
    script.ends(T_DISCARD, 0, Some((DATA, 32)), S_UNSUPP);
    script.rig.put(DATA, &range(1, 1, 0));
    script.ends(T_DISCARD, 0, Some((DATA, 32)), S_IOERR);
    script.ends(T_DISCARD, 0, None, S_IOERR);
}

#[test]
fn requests_beyond_the_disk_fail() {
    let mut script = Script::new(info(), 4);
    for (sector, length) in
        [(64, 512), (63, 1024), (u64::MAX, 512), (0, 100), (0, 0), (0, 0x2200), (1 << 55, 512)]
    {
        script.ends(T_IN, sector, Some((DATA, length)), S_IOERR);
        script.ends(T_OUT, sector, Some((DATA, length)), S_IOERR);
    }
    let mut script = Script::new(BlockInfo { read_only: true, ..info() }, 4);
    script.ends(T_OUT, 0, Some((DATA, 512)), S_IOERR);
    script.rig.put(DATA, &[0; 8]);
    script.rig.put(DATA + 8, &[1, 0, 0, 0, 0, 0, 0, 0]);
    script.ends(T_WRITE_ZEROES, 0, Some((DATA, 16)), S_IOERR);
    script.does(T_IN, 0, Some((DATA, 512)));
}

#[test]
fn requests_end_in_any_order() {
    let mut script = Script::new(info(), 8);
    let at = |n: u64| DATA + 0x200 * n;
    let status: Vec<_> = (0..5).map(|n| script.start(T_IN, n, Some((at(n), 512)))).collect();
    for id in [3, 0, 4] {
        script.disk().complete(id);
    }
    script.disk().ended.push_back((1, BlockStatus::Failed));
    script.rig.wake();
    assert_eq!(script.rig.used(0), [(12, 513), (0, 513), (16, 513), (4, 0)]);
    assert_eq!(script.rig.interrupts(), [0x41]);
    let ends: Vec<_> = status.iter().map(|at| script.status(*at)).collect();
    assert_eq!(ends, [S_OK, S_IOERR, 0xee, S_OK, S_OK]);
    assert_eq!(script.rig.get(at(4), 512), [5; 512]);
    assert_eq!(script.rig.get(at(1), 512), [0; 512], "a failed read brings nothing");
    // A freed id is used again.
    script.start(T_IN, 9, Some((at(5), 512)));
    assert_eq!(script.disk().requests.len(), 2);
    script.disk().ended.extend([(7, BlockStatus::Unsupported), (2, BlockStatus::Unsupported)]);
    script.disk().requests.push((7, BlockOp::Flush, vec![]));
    script.rig.wake();
    assert_eq!(script.status(status[2]), S_UNSUPP, "and unused ids are ignored");
}

#[test]
fn without_room_requests_wait() {
    let mut script = Script::new(info(), 1);
    let first = script.start(T_IN, 0, Some((DATA, 512)));
    let second = script.start(T_IN, 1, Some((DATA + 512, 512)));
    assert_eq!(script.disk().requests.len(), 1);
    script.disk().complete(0);
    script.rig.wake();
    assert_eq!((script.status(first), script.status(second)), (S_OK, 0xee));
    assert_eq!(script.disk().requests.len(), 1, "the second has begun");
    script.disk().complete(0);
    script.rig.wake();
    assert_eq!(script.status(second), S_OK);
    assert_eq!(script.rig.used(0).len(), 2);
}

#[test]
fn a_disk_that_does_not_answer() {
    let mut script = Script::new(info(), 4);
    let first = script.start(T_OUT, 0, Some((DATA, 512)));
    script.rig.env.now += PATIENCE / 2;
    let second = script.start(T_IN, 1, Some((DATA + 512, 512)));
    assert_eq!(script.rig.timer(), Some(PATIENCE), "of the first");
    script.rig.env.now = PATIENCE - 1;
    script.rig.tick();
    assert_eq!((script.status(first), script.status(second)), (0xee, 0xee));
    script.rig.env.now = PATIENCE;
    script.rig.tick();
    assert_eq!((script.status(first), script.status(second)), (S_IOERR, 0xee));
    assert_eq!((script.rig.used(0), script.rig.interrupts()), (vec![(0, 1)], vec![0x41]));
    assert_eq!(script.rig.timer(), Some(PATIENCE + PATIENCE / 2));
    // No new request is started while the write may still complete.
    script.ends(T_OUT, 0, Some((DATA, 512)), S_IOERR);
    script.ends(T_FLUSH, 0, None, S_IOERR);
    // The read completes in time; the late write is not reported.
    script.disk().complete(1);
    script.rig.wake();
    assert_eq!(script.status(second), S_OK);
    assert_eq!(script.rig.used(0).len(), 1);
    script.rig.put(first, &[0xee]);
    script.disk().complete(0);
    script.rig.wake();
    assert_eq!((script.status(first), script.rig.used(0)), (0xee, vec![]));
    assert_eq!(script.rig.interrupts(), [0x41]);
    // The device works again, and the timer stops by itself.
    script.does(T_IN, 2, Some((DATA, 512)));
    script.rig.env.now = 3 * PATIENCE;
    script.rig.tick();
    script.does(T_IN, 3, Some((DATA, 512)));
    assert_eq!(script.rig.timer(), Some(4 * PATIENCE));
    // A late read delivers no data.
    script.rig.put(DATA, &[0; 512]);
    let status = script.start(T_IN, 4, Some((DATA, 512)));
    script.rig.env.now += PATIENCE;
    script.rig.tick();
    script.disk().complete(0);
    script.rig.wake();
    assert_eq!((script.status(status), script.rig.get(DATA, 512)), (S_IOERR, vec![0; 512]));
    assert_eq!((script.rig.used(0).len(), script.rig.interrupts()), (1, vec![0x41]));
    script.does(T_FLUSH, 0, None);
}

#[test]
fn framing_is_free() {
    let mut script = Script::new(info(), 4);
    // Head in two parts; data and status in one.
    script.rig.put(HEADS, &T_IN.to_le_bytes());
    script.rig.put(HEADS + 0x20, &[0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]);
    script.rig.send(0, &[(HEADS, 4, false), (HEADS + 0x20, 12, false), (DATA, 513, true)]);
    script.disk().complete(0);
    script.rig.wake();
    assert_eq!(script.rig.get(DATA, 513), [&[6; 512][..], &[S_OK]].concat());
    // The head extends into the data.
    script.rig.put(HEADS, &[T_OUT as u8, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
    script.rig.put(HEADS + 16, &[0x33; 500]);
    script.rig.put(DATA, &[0x44; 12]);
    script.rig.send(0, &[(HEADS, 516, false), (DATA, 12, false), (STATUS, 1, true)]);
    script.disk().complete(0);
    assert_eq!(
        script.disk().content[9 * 512..][..512],
        [[0x33; 500].as_slice(), &[0x44; 12]].concat()
    );
}

#[test]
fn reset_forgets_requests() {
    let mut script = Script::new(info(), 4);
    script.start(T_IN, 0, Some((DATA, 512)));
    script.rig.set_up(u64::MAX);
    assert_eq!(script.disk().requests, []);
    script.rig.wake();
    assert_eq!(script.rig.used(0), []);
    script.next = 0;
    script.does(T_IN, 1, Some((DATA, 512)));
}

/// A write of a driver without flushes completes after the flush, with the result of the flush.
#[test]
fn without_flushes_writes_go_through() {
    let mut script = Script::with(info(), 4, !(F_EVENT_IDX | F_FLUSH));
    let under_way = |script: &mut Script| -> Vec<_> {
        script.disk().requests.iter().map(|(id, op, _)| (*id, *op)).collect()
    };
    for ends in [BlockStatus::Done, BlockStatus::Failed] {
        let status = script.start(T_OUT, 5, Some((DATA, 512)));
        assert_eq!(under_way(&mut script), [(0, BlockOp::Write { sector: 5 })]);
        script.disk().complete(0);
        script.rig.wake();
        assert_eq!((script.status(status), script.rig.used(0)), (0xee, vec![]));
        assert_eq!(under_way(&mut script), [(0, BlockOp::Flush)]);
        script.disk().ended.push_back((0, ends));
        script.rig.wake();
        let expected = if ends == BlockStatus::Done { S_OK } else { S_IOERR };
        assert_eq!((script.status(status), script.rig.used(0).len()), (expected, 1));
    }
    // A failed write needs no flush; a read has none.
    let status = script.start(T_OUT, 5, Some((DATA, 512)));
    script.disk().ended.push_back((0, BlockStatus::Failed));
    script.rig.wake();
    assert_eq!((script.status(status), under_way(&mut script)), (S_IOERR, vec![]));
    script.rig.used(0);
    script.rig.interrupts();
    script.does(T_IN, 5, Some((DATA, 512)));
    // Write-zeroes counts as a write.
    script.rig.put(DATA, &[7, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    let status = script.start(T_WRITE_ZEROES, 0, Some((DATA, RANGE as u32)));
    script.disk().complete(0);
    script.rig.wake();
    assert_eq!((script.status(status), under_way(&mut script)), (0xee, vec![(0, BlockOp::Flush)]));
    script.disk().complete(0);
    script.rig.wake();
    assert_eq!(script.status(status), S_OK);
}

/// A back end without room for the flush gets it before any new request.
#[test]
fn a_flush_after_a_write_waits_for_room() {
    let mut script = Script::with(info(), 2, !(F_EVENT_IDX | F_FLUSH));
    let write = script.start(T_OUT, 5, Some((DATA, 512)));
    script.start(T_IN, 6, Some((DATA + 512, 512)));
    // The disk has shrunk.
    script.disk().room = 1;
    script.disk().complete(0);
    script.rig.wake();
    let read = script.start(T_IN, 7, Some((DATA + 1024, 512)));
    assert_eq!(script.disk().requests.len(), 1, "only the first read");
    script.disk().complete(1);
    script.rig.wake();
    let ops: Vec<_> = script.disk().requests.iter().map(|(id, op, _)| (*id, *op)).collect();
    assert_eq!((script.status(write), ops), (0xee, vec![(0, BlockOp::Flush)]));
    script.disk().complete(0);
    script.rig.wake();
    assert_eq!((script.status(write), script.status(read)), (S_OK, 0xee));
    // A new driver may negotiate flush.
    script.rig.set_up(!F_EVENT_IDX);
    script.next = 0;
    script.rig.interrupts();
    script.does(T_OUT, 1, Some((DATA, 512)));
}

#[test]
fn without_a_disk_requests_fail() {
    let mut script = Script::new(info(), 4);
    script.rig.env.disk = None;
    script.ends(T_FLUSH, 0, None, S_IOERR);
    script.rig.wake();
}

#[test]
fn broken_rules() {
    let mut script = Script::new(info(), 4);
    let rig = &mut script.rig;
    breaks(rig, 0, &[(HEADS, 15, false), (STATUS, 1, true)]);
    breaks(rig, 0, &[(HEADS, 16, false)]);
    breaks(rig, 0, &[(STATUS, 1, true), (HEADS, 16, false)]);
    breaks(rig, 0, &[(driver::MEMORY - 8, 16, false), (STATUS, 1, true)]);
}
