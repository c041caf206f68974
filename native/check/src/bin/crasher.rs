//! Crashes in the way that its argument names. Survival is a failure.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use native_check::{Report, argument};
use native_rt::probe;
use proto::start::Start;

/// An address of the kernel's half.
const KERNEL: u64 = 0xffff_8000_0010_0000;
/// An address of neither half: no task's, and on x86-64 not canonical.
const NOWHERE: u64 = 0x0000_8000_0000_0000;

native_rt::entry!(main);

fn main(start: &Start<'static>) -> u64 {
    let kind = argument(start, 0).unwrap_or("null");
    match kind {
        "null" => drop(probe::read(0)),
        "read-kernel" => drop(probe::read(KERNEL)),
        "write-kernel" => probe::write(KERNEL, 0),
        "read-nowhere" => drop(probe::read(NOWHERE)),
        "write-code" => probe::write(probe::code_address(), 0),
        "execute-data" => probe::jump(proto::start::START_PAGE),
        "jump-kernel" => probe::jump(KERNEL),
        "jump-nowhere" => probe::jump(NOWHERE),
        "undefined" => probe::undefined(),
        "stack" => probe::exhaust_stack(),
        "panic" => panic!("as asked"),
        _ => {
            if let Some((_, fault)) = probe::FAULTS.iter().find(|(name, _)| *name == kind) {
                fault();
            }
        }
    }
    let mut report = Report::default();
    report.case(kind, Err("still alive"));
    report.exit_code()
}
