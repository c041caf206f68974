//! Root: the first task. It owns all resources at boot and delegates them by the system
//! description.
//!
//! One thread serves the log, control and fault gates of all children; the badge identifies child
//! and gate. Root calls no child, so no child can block it. Root trusts a child's messages only
//! about the child itself.
//!
//! Invariants:
//! - A child has exactly the capabilities that [`child`] delegates.
//! - Memory has one owner: the pool, or one child. It returns to the pool when the child is
//!   destroyed.
//! - The worst effect of a child's actions is its own end; root logs the cause and continues.
#![cfg_attr(not(test), no_std, no_main)]
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(dead_code, reason = "the rest needs the kernel"))]

mod alarm;
mod channels;
mod child;
mod clock;
mod directory;
mod fault;
mod frames;
mod instances;
mod iommu;
mod lines;
mod loader;
mod manage;
mod manager;
mod memory;
mod pci;
mod policy;
mod sessions;

use abi::boot::{BOOT_MAGIC, slot};
use abi::bundle::{HEADER_LENGTH, Header, SYSTEM_NAME};
use native_rt::start::Boot;
use native_rt::{Platform, Ports, info};
use proto::control::code;
use proto::start::Clock;
use proto::system::System;

use crate::manager::Manager;

/// Port of QEMU's `isa-debug-exit`.
const EXIT_PORT: u16 = 0xf4;
/// Added to an exit code written there, to distinguish it from QEMU's own exit codes.
const EXIT_BASE: u8 = 0x10;

#[cfg(not(test))]
native_rt::root_entry!(main);

fn main(boot: Boot) -> ! {
    native_rt::start::on_root_panic(EXIT_PORT, EXIT_BASE + code::INTERNAL as u8);
    assert!(
        boot.info.magic == BOOT_MAGIC && boot.info.abi_version == abi::ABI_VERSION,
        "the kernel has another version of the system-call interface"
    );
    let (tsc, unix_seconds) = clock::read_wall_clock();
    let clock = Clock { tsc_khz: boot.info.tsc_khz, tsc, unix_seconds };
    info!(
        "{} CPUs, TSC {} kHz, {} pages of kernel memory",
        boot.info.cpus, boot.info.tsc_khz, boot.info.quota_pages
    );
    let header = boot.bundle.get(..HEADER_LENGTH).unwrap_or(&[]);
    let header = Header::parse(header, boot.info.bundle_length).expect("the bundle is damaged");
    let file = header.find(SYSTEM_NAME).expect("the bundle has no system description");
    let bytes = &boot.bundle[file.offset as usize..][..file.length as usize];
    let system = System::decode(bytes).expect("cannot decode the system description");
    let thread = native_rt::OwnThread::at(slot::THREAD);
    Manager::new(&boot, header, &system, clock, thread).run()
}

/// Ends the system, or at least root: with `on_qemu`, writes the outcome to QEMU's exit port. Other
/// machines stay on: power-off requires an interpreter of ACPI's machine language.
fn leave(on_qemu: bool, outcome: u64) -> ! {
    // The end of the machine must not truncate the log.
    native_rt::log::flush(Platform::at(slot::PLATFORM));
    if on_qemu && let Some(port) = Ports::new(EXIT_PORT, 1) {
        port.write(0, EXIT_BASE.wrapping_add(outcome.min(code::RESET) as u8));
    }
    info!("the system has ended with code {outcome}: the machine can be switched off");
    loop {
        // A notification without a signaller: root sleeps for ever.
        let _ = native_rt::Notification::at(manager::NOTIFICATION).wait(abi::FOREVER);
    }
}
