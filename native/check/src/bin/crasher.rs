//! Crashes in the way that its argument names. Survival is a failure.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use native_check::{Report, argument};
use native_rt::{Ports, probe};
use proto::start::Start;

/// An address of the kernel's half.
const KERNEL: u64 = 0xffff_8000_0010_0000;
/// A non-canonical address.
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
        "privileged" => probe::privileged(),
        "bases" => probe::set_fs_base(),
        "divide" => probe::divide_by_zero(),
        "stack" => probe::exhaust_stack(),
        "port" => drop(Ports::new(0x3f8, 8).map(|ports| ports.read(0))),
        "panic" => panic!("as asked"),
        _ => {}
    }
    let mut report = Report::default();
    report.case(kind, Err("still alive"));
    report.exit_code()
}
