//! Computes checksums and checks its registers, until root asks it to stop. The activity of other
//! tasks must not change a result.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use native_check::{Random, Report};
use native_rt::start::windows;
use native_rt::{Notification, Window, error, info, probe};
use proto::start::{RangeKind, Start, event, slot};

/// Rounds of the loop in which registers must keep their values.
const LOOPS: u64 = 10_000;
const BLOCK: usize = 4096;

native_rt::entry!(main);

fn main(start: &Start<'static>) -> u64 {
    let mut report = Report::default();
    let Some(memory) = windows(start, RangeKind::Private).next() else {
        report.case("neighbour", Err("no memory"));
        return report.exit_code();
    };
    let expected = fill(memory);
    let notification = Notification::at(slot::NOTIFICATION);
    let (mut rounds, mut mismatches) = (0u64, 0u64);
    while notification.poll() & event::STOP == 0 {
        rounds += 1;
        let sum = checksum(memory);
        if sum != expected {
            error!("round {rounds}: checksum {sum:#x}, not {expected:#x}");
            mismatches += 1;
        }
        mismatches += probe::check_registers(rounds ^ expected, LOOPS);
        if let Some(value) = probe::foreign_register().filter(|&value| value != 0) {
            error!("round {rounds}: a register of others: {value:#x}");
            mismatches += 1;
        }
    }
    info!("{rounds} rounds, {mismatches} mismatches");
    let result = if mismatches == 0 && rounds > 0 { Ok(()) } else { Err("results changed") };
    report.case("neighbour", result);
    report.exit_code()
}

/// Fills memory with a pattern; returns its checksum.
fn fill(memory: Window) -> u64 {
    let mut random = Random::new(42);
    let mut sum = 0;
    for offset in (0..memory.length()).step_by(BLOCK) {
        let mut block = [0; BLOCK];
        for word in block.chunks_exact_mut(8) {
            word.copy_from_slice(&random.draw().to_le_bytes());
        }
        // The window's length is a multiple of the block's.
        let _ = memory.write(offset, &block);
        sum = add(sum, &block);
    }
    sum
}

fn checksum(memory: Window) -> u64 {
    let mut sum = 0;
    for offset in (0..memory.length()).step_by(BLOCK) {
        let mut block = [0; BLOCK];
        let _ = memory.read(offset, &mut block);
        sum = add(sum, &block);
    }
    sum
}

/// FNV-1a over words.
fn add(sum: u64, block: &[u8; BLOCK]) -> u64 {
    block.chunks_exact(8).fold(sum, |sum, word| {
        let mut raw = [0; 8];
        raw.copy_from_slice(word);
        (sum ^ u64::from_le_bytes(raw)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
