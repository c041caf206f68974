//! The driver with a failing controller.

use proptest::prelude::*;
use proto::disk::{BUFFER, Client, DATA, Session};
use proto::service::{DiskClient, DiskRange};

use super::fake::{Fake, FakeConfig, PHYSICAL, memory};
use super::*;
use crate::device::{COMMAND_LIMIT, RECORD_WORDS};
use crate::server::{BlockServer, Extent, info};

fn new<'m>(
    fake: &'m Fake<'m>,
    memory: &'m [AtomicU64],
    port: Option<u8>,
) -> Result<AhciDisk<'m, &'m Fake<'m>>, AhciError> {
    let words = [const { AtomicU64::new(0) }; RECORD_WORDS];
    new_with(fake, memory, port, &words)
}

fn new_with<'m>(
    fake: &'m Fake<'m>,
    memory: &'m [AtomicU64],
    port: Option<u8>,
    record: &[AtomicU64],
) -> Result<AhciDisk<'m, &'m Fake<'m>>, AhciError> {
    let record = DiskRecord::new(record).unwrap();
    AhciDisk::new(fake, port, memory, (PHYSICAL, PHYSICAL + BYTES), record)
}

fn command(operation: Operation, sector: u64) -> Command {
    Command { operation, sector, sectors: 1, address: PHYSICAL << 1 }
}

#[test]
fn a_disk_is_set_up() {
    let memory = memory();
    let fake = Fake::new(FakeConfig::default(), &memory);
    let disk = new(&fake, &memory, None).unwrap();
    let Geometry { sectors, depth, discard, .. } = disk.geometry();
    assert_eq!((sectors, depth, discard), (4096, 32, true));
    assert!(new(&fake, &memory, Some(1)).is_err_and(|error| error == AhciError::NoDisk));
    assert!(new(&fake, &memory, Some(9)).is_err_and(|error| error == AhciError::NoDisk));
    assert!(new(&fake, &memory[1..], None).is_err_and(|error| error == AhciError::Memory));
}

/// Clients repeat their writes to the next server, which must not execute them on another disk.
#[test]
fn a_later_server_takes_no_other_disk() {
    let memory = memory();
    let words = [const { AtomicU64::new(0) }; RECORD_WORDS];
    let usual = FakeConfig::default();
    let fake = Fake::new(usual.clone(), &memory);
    let outcome = |config: FakeConfig, port| {
        fake.change(config);
        new_with(&fake, &memory, port, &words).map(drop)
    };
    assert_eq!(outcome(usual.clone(), None), Ok(()));
    assert_eq!(outcome(usual.clone(), None), Ok(()));
    // The disk is silent, and the next port has one, too.
    let next = FakeConfig { number: 3, ..usual.clone() };
    assert_eq!(outcome(next.clone(), None), Err(AhciError::NoDisk));
    assert_eq!(outcome(next, Some(3)), Err(AhciError::NoDisk));
    let other = FakeConfig { serial: 7, ..usual.clone() };
    assert_eq!(outcome(other, None), Err(AhciError::OtherDisk(OtherDisk)));
    assert_eq!(outcome(usual, None), Ok(()));
    let text = AhciError::OtherDisk(OtherDisk).to_string();
    assert!(text.ends_with("attach that disk again, or restart the machine"), "{text}");
}

/// A controller without 64-bit addresses would use the memory 4 GiB below.
#[test]
fn memory_is_where_the_controller_can_access_it() {
    let outcome = |wide, end| {
        let memory = memory();
        let fake = Fake::new(FakeConfig { wide, ..FakeConfig::default() }, &memory);
        let words = [const { AtomicU64::new(0) }; RECORD_WORDS];
        let record = DiskRecord::new(&words).unwrap();
        AhciDisk::new(&fake, None, &memory, (1 << 20, end), record).map(drop)
    };
    assert_eq!(outcome(true, u64::MAX), Ok(()));
    assert_eq!(outcome(false, 1 << 32), Ok(()));
    assert_eq!(outcome(false, (1 << 32) + 1), Err(AhciError::Narrow((1 << 32) + 1)));
    let text = AhciError::Narrow(0x1_0000_1000).to_string();
    assert!(text.contains("memory for it ends at 0x100001000: use another controller"), "{text}");
}

#[test]
fn sectors_have_512_bytes() {
    let outcome = |sector_size| {
        let memory = memory();
        let fake = Fake::new(FakeConfig { sector_size, ..FakeConfig::default() }, &memory);
        new(&fake, &memory, None).map(drop)
    };
    // Bits 15:14 tell whether the word is valid, and bit 13 of larger physical sectors.
    for (word, expected) in [
        (0x6003, Ok(())),
        (0x1000, Ok(())),
        (0x5000, Err(AhciError::SectorSize)),
        (0x7003, Err(AhciError::SectorSize)),
    ] {
        assert_eq!(outcome(word), expected, "{word:#x}");
    }
}

/// The driver grants each operation the time of the specifications, independent of the speed of
/// register accesses.
#[test]
fn waits_are_in_time() {
    let outcome = |config: FakeConfig| {
        let memory = memory();
        let fake = Fake::new(config, &memory);
        new(&fake, &memory, None).map(drop)
    };
    let usual = FakeConfig::default();
    assert_eq!(outcome(FakeConfig { reset: 900, ..usual.clone() }), Ok(()));
    assert_eq!(outcome(FakeConfig { reset: 1100, ..usual.clone() }), Err(AhciError::NoDisk));
    assert_eq!(outcome(FakeConfig { link: 1900, ..usual.clone() }), Ok(()));
    // Empty ports in front of it use their time, too.
    assert_eq!(outcome(FakeConfig { link: 2400, ..usual.clone() }), Err(AhciError::NoDisk));
    assert_eq!(outcome(FakeConfig { ready: 30_000, ..usual.clone() }), Ok(()));
    assert_eq!(outcome(FakeConfig { ready: 40_000, ..usual.clone() }), Err(AhciError::NoDisk));
    assert_eq!(outcome(FakeConfig { identify: 30_000, ..usual.clone() }), Ok(()));
    assert_eq!(outcome(FakeConfig { identify: 32_000, ..usual }), Err(AhciError::Identify));
}

/// An error between the reads of interrupt status and commands, at each access.
#[test]
fn an_error_at_any_moment_is_no_success() {
    for accesses in 0..12 {
        for (queues, clears_failed, stays_busy) in
            [(false, true, false), (false, false, false), (false, true, true), (true, true, false)]
        {
            let memory = memory();
            let bad = [7].into();
            let config =
                FakeConfig { queues, clears_failed, stays_busy, bad, ..FakeConfig::default() };
            let fake = Fake::new(config, &memory);
            let mut disk = new(&fake, &memory, None).unwrap();
            disk.start(3, &command(Operation::Write, 7));
            disk.flush_doorbell();
            fake.end_after(accesses);
            let status = (0..20).find_map(|_| disk.completed().unwrap());
            let case = (accesses, queues, clears_failed, stays_busy);
            assert_eq!(status, Some((3, Status::Failed)), "{case:?}");
            assert_eq!(fake.done(), [], "{case:?}");
            assert_eq!(fake.resets_of_link() > 0, queues || stays_busy, "{case:?}");
            // The disk works again.
            disk.start(4, &command(Operation::Read, 8));
            disk.flush_doorbell();
            fake.end_one();
            assert_eq!(disk.completed(), Ok(Some((4, Status::Ok))), "{case:?}");
        }
    }
}

/// At each access, a command ends; its interrupt does not stay after the driver has seen it, and an
/// error that it withdraws is not lost.
#[test]
fn interrupts_are_withdrawn_without_commands_in_flight() {
    const INTERRUPTS: u64 = PORT + port::INTERRUPTS;
    for accesses in 0..12 {
        for (sector, expected) in [(6, Status::Ok), (7, Status::Failed)] {
            let memory = memory();
            let fake = Fake::new(FakeConfig { bad: [7].into(), ..FakeConfig::default() }, &memory);
            let mut disk = new(&fake, &memory, None).unwrap();
            disk.start(3, &command(Operation::Write, sector));
            disk.flush_doorbell();
            fake.end_after(accesses);
            let status = (0..20).find_map(|_| {
                disk.acknowledge_interrupt();
                disk.completed().unwrap()
            });
            assert_eq!(status, Some((3, expected)), "{accesses}");
            disk.acknowledge_interrupt();
            assert_eq!((&fake).read(INTERRUPTS), 0, "{accesses}");
            assert_eq!(disk.completed(), Ok(None), "{accesses}");
        }
    }
}

/// Registers of a function that root has switched off, or that has been removed, answer nothing.
#[test]
fn a_controller_that_is_switched_off_completes_nothing() {
    for value in [0, u32::MAX] {
        let memory = memory();
        let fake = Fake::new(FakeConfig::default(), &memory);
        let mut disk = new(&fake, &memory, None).unwrap();
        disk.start(0, &command(Operation::Read, 7));
        disk.flush_doorbell();
        fake.change(FakeConfig { off: Some(value), ..FakeConfig::default() });
        assert!(disk.completed().is_err(), "{value:#x}");
    }
}

/// A disk that stops interrupts no more.
#[test]
fn a_command_that_does_not_end_is_the_end() {
    let memory = memory();
    let fake = Fake::new(FakeConfig::default(), &memory);
    let mut disk = new(&fake, &memory, None).unwrap();
    disk.start(0, &command(Operation::Read, 7));
    fake.pass(COMMAND_LIMIT);
    disk.flush_doorbell();
    fake.pass(COMMAND_LIMIT - 1);
    assert_eq!(disk.completed(), Ok(None));
    fake.pass(1);
    // It has completed meanwhile, however late.
    fake.end_one();
    assert_eq!(disk.completed(), Ok(Some((0, Status::Ok))));
    disk.start(1, &command(Operation::Read, 7));
    disk.flush_doorbell();
    fake.pass(COMMAND_LIMIT);
    assert_eq!(disk.completed(), Err(OVERDUE));
}

/// The link may have been lost with the disk, and the next one is another. Its interrupt by line
/// would never end.
#[test]
fn a_lost_link_is_the_end() {
    let lost = Err(DeviceError("the link to the disk was lost"));
    for has_interrupted in [true, false] {
        let memory = memory();
        let fake = Fake::new(FakeConfig::default(), &memory);
        let mut disk = new(&fake, &memory, None).unwrap();
        fake.lose_link();
        if has_interrupted {
            disk.acknowledge_interrupt();
            assert_eq!(disk.completed(), lost);
        }
        disk.start(0, &command(Operation::Write, 7));
        disk.flush_doorbell();
        assert_eq!(fake.pending(), 0, "not issued");
        assert_eq!(disk.completed(), lost);
    }
}

/// An error that comes without commands is not the next one's, and its interrupt ends.
#[test]
fn an_error_without_commands_fails_none() {
    const INTERRUPTS: u64 = PORT + port::INTERRUPTS + 2 * PORT_LENGTH;
    const FATAL: u32 = 1 << 27;
    for has_interrupted in [true, false] {
        let memory = memory();
        let fake = Fake::new(FakeConfig::default(), &memory);
        let mut disk = new(&fake, &memory, None).unwrap();
        fake.interrupt(FATAL);
        if has_interrupted {
            disk.acknowledge_interrupt();
            assert_eq!(disk.completed(), Ok(None));
            assert_eq!((&fake).read(INTERRUPTS), 0);
        }
        disk.start(0, &command(Operation::Write, 7));
        disk.flush_doorbell();
        let status = (0..3).find_map(|_| {
            fake.end_one();
            disk.completed().unwrap()
        });
        assert_eq!(status, Some((0, Status::Ok)));
    }
}

#[test]
fn of_several_only_the_bad_one_fails() {
    let memory = memory();
    let fake = Fake::new(FakeConfig { bad: [11].into(), ..FakeConfig::default() }, &memory);
    let mut disk = new(&fake, &memory, None).unwrap();
    for slot in 0..4 {
        disk.start(slot, &command(Operation::Write, 10 + slot as u64));
    }
    disk.flush_doorbell();
    let mut ended = std::vec::Vec::new();
    for _ in 0..12 {
        fake.end_one();
        while let Some(end) = disk.completed().unwrap() {
            ended.push(end);
        }
    }
    ended.sort_by_key(|(slot, _)| *slot);
    let expected = [Status::Ok, Status::Failed, Status::Ok, Status::Ok];
    assert_eq!(ended, expected.into_iter().enumerate().collect::<std::vec::Vec<_>>());
    assert_eq!(fake.resets_of_link(), 1);
}

#[test]
fn a_port_that_hangs_is_the_end() {
    let bad = FakeConfig { bad: [7].into(), ..FakeConfig::default() };
    for (later, message) in [
        (FakeConfig { stop: 600, ..bad.clone() }, "the port does not stop"),
        (FakeConfig { link: 2200, ..bad.clone() }, "the link stays down after a reset"),
        (FakeConfig { ready: 40_000, ..bad.clone() }, "the disk stays busy after an error"),
    ] {
        let memory = memory();
        let fake = Fake::new(bad.clone(), &memory);
        let mut disk = new(&fake, &memory, None).unwrap();
        fake.change(later);
        disk.start(0, &command(Operation::Read, 7));
        disk.flush_doorbell();
        fake.end_one();
        assert_eq!(disk.completed(), Err(DeviceError(message)));
    }
}

/// A flush fails, and so does the recovery: the server ends. The disk has no error to report to the
/// next server.
#[test]
fn a_flush_that_fails_with_the_controller_fails_in_the_next_server() {
    const LENGTH: u64 = DATA + BUFFER;
    let session: Vec<_> = (0..LENGTH / 8).map(|_| AtomicU64::new(0)).collect();
    let uninformed = AtomicU64::new(0);
    let mut client = Client::new(&session, LENGTH).unwrap();
    // Runs a server until the client has `count` results, or it ends.
    let mut run = |later: FakeConfig, count: usize| {
        let memory = memory();
        let fake = Fake::new(FakeConfig::default(), &memory);
        let mut server = BlockServer::new(new(&fake, &memory, None).unwrap(), &uninformed);
        fake.change(later);
        let extent = Extent { first: 0, sectors: 4096 };
        let plan = DiskClient { part: DiskRange::WHOLE, read_only: false, signal: 1 };
        let info = info(&plan, &extent, &server.disk().geometry()).unwrap();
        let served = Session::new(&session, LENGTH, info).unwrap();
        server.add(Some((served, extent, PHYSICAL << 1, 1)));
        let mut results = std::vec::Vec::new();
        while results.len() < count {
            if client.under_way() == 0 {
                assert!(client.submit(Operation::Flush, 0, 0, 0, 9));
            }
            if let Err(error) = server.serve(|_, _, _| {}) {
                results.push(Err(error));
                break;
            }
            fake.end_one();
            results.extend(client.poll().map(|completion| Ok(completion.status)));
        }
        results
    };
    let good = FakeConfig::default();
    let bad = FakeConfig { fails_flush: true, ready: 40_000, stays_busy: true, ..good.clone() };
    assert_eq!(run(bad, 1), [Err(DeviceError("the disk stays busy after an error"))]);
    assert_eq!(run(good, 3), [Ok(Status::Failed), Ok(Status::Ok), Ok(Status::Ok)]);
}

#[test]
fn kinds_take_turns() {
    const PLAIN: u32 = 0b0011;
    let cases = [
        // With no command in flight: the waiting slots, and of both kinds the one that was not
        // issued last.
        (0b1100, 0, true, 0b1100),
        (0b0011, 0, true, 0b0001),
        (0b0110, 0, false, 0b0010),
        (0b0110, 0, true, 0b0100),
        // Further queued commands while no plain one waits, and no command beside a plain one.
        (0b0100, 0b1000, false, 0b0100),
        (0b0101, 0b1000, false, 0),
        (0b0101, 0b1000, true, 0),
        (0b0101, 0b0010, true, 0),
        (0b0100, 0b0010, true, 0),
        (0b0001, 0b0010, true, 0),
        (0, 0, false, 0),
    ];
    for (waiting, issued, last_was_plain, next) in cases {
        assert_eq!(
            next_slots(waiting, issued, PLAIN, last_was_plain),
            next,
            "{waiting:b} {issued:b}"
        );
    }
}

proptest! {
    /// Commands end at any moment, some with errors: each is reported once, with its own result.
    #[test]
    fn every_command_is_reported_as_it_ended(
        queues: bool,
        clears_failed: bool,
        stays_busy: bool,
        steps in prop::collection::vec((0..4u8, 0..40u64, 0..15u32), 1..60),
    ) {
        let memory = memory();
        // Every third sector is bad.
        let bad = (0..40).filter(|sector| sector % 3 == 0).collect();
        let config = FakeConfig { queues, clears_failed, stays_busy, bad, ..FakeConfig::default() };
        let fake = Fake::new(config, &memory);
        let mut disk = new(&fake, &memory, None).unwrap();
        let mut in_flight = [None; SLOTS];
        let check = |in_flight: &mut [Option<(Operation, u64)>; SLOTS], (slot, status): (usize, Status)| {
            let (operation, sector) = in_flight[slot].take().expect("a command in flight");
            let good = operation == Operation::Flush || sector % 3 != 0;
            prop_assert_eq!(status, if good { Status::Ok } else { Status::Failed });
            let codes = match operation {
                Operation::Read => [ata::READ, ata::READ_QUEUED],
                Operation::Write => [ata::WRITE, ata::WRITE_QUEUED],
                _ => [ata::FLUSH; 2],
            };
            let sector = if operation == Operation::Flush { 0 } else { sector };
            let done = fake.done().iter().any(|done| codes.contains(&done.0) && done.1 == sector);
            prop_assert!(!good || done, "{:?} {} was not carried out", operation, sector);
            Ok(())
        };
        for (kind, sector, accesses) in steps {
            let free = in_flight.iter().position(Option::is_none);
            if let (0..3, Some(slot)) = (kind, free) {
                let operation = [Operation::Read, Operation::Write, Operation::Flush][usize::from(kind)];
                disk.start(slot, &command(operation, sector));
                in_flight[slot] = Some((operation, sector));
                disk.flush_doorbell();
            }
            fake.end_after(accesses);
            if let Some(ended) = disk.completed().unwrap() {
                check(&mut in_flight, ended)?;
            }
        }
        for _ in 0..8 * SLOTS {
            fake.end_one();
            while let Some(ended) = disk.completed().unwrap() {
                check(&mut in_flight, ended)?;
            }
        }
        prop_assert_eq!(in_flight, [None; SLOTS]);
    }
}
