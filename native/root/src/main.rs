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
mod directory;
mod frames;
mod instances;
mod iommu;
mod lines;
mod loader;
mod manage;
mod manager;
mod memory;
mod mmio;
mod pass_through;
mod pci;
mod platform;
mod policy;
mod sessions;

use abi::boot::{BOOT_MAGIC, slot};
use abi::bundle::{HEADER_LENGTH, Header, SYSTEM_NAME};
use native_rt::start::Boot;
use native_rt::{Platform, info};
use proto::start::Clock;
use proto::system::{Board, System};

use crate::manager::Manager;

#[cfg(not(test))]
native_rt::root_entry!(main);

fn main(boot: Boot) -> ! {
    platform::prepare();
    assert!(
        boot.info.magic == BOOT_MAGIC && boot.info.abi_version == abi::ABI_VERSION,
        "the kernel has another version of the system-call interface"
    );
    let (tsc, unix_seconds) = platform::wall_clock(&boot);
    let clock = Clock { tsc_khz: boot.info.tsc_khz, tsc, unix_seconds };
    info!(
        "{} CPUs, counter {} kHz, {} pages of kernel memory",
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

/// Ends the system, or at least root: ends an emulated machine of a known board; others stay on.
fn leave(board: Board, outcome: u64) -> ! {
    // The end of the machine must not truncate the log.
    native_rt::log::flush(Platform::at(slot::PLATFORM));
    platform::leave(board, outcome);
    info!("the system has ended with code {outcome}: the machine can be switched off");
    loop {
        // A notification without a signaller: root sleeps for ever.
        let _ = native_rt::Notification::at(manager::NOTIFICATION).wait(abi::FOREVER);
    }
}
