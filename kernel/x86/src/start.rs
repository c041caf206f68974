//! Start of the CPUs after boot: kernel memory, root, and the first threads.

use abi::PAGE_SIZE;
use abi::boot;
use hw_tables::elf;
use kernel_core::pool::{MAX_BYTES, Memory};
use kernel_run::boot_memory::FOUR_GIB;
use kernel_run::root::{self, Resources};
use kernel_run::{exit, lock};

use crate::boot_info::Machine;
use crate::features::features;
use crate::io::set_ts;
use crate::log::LOG;
use crate::memory::direct;
use crate::run::{self, Guard};
use crate::{X86, entry, log, vcpu};

/// Size of kernel memory: RAM divided by this, within these bounds in bytes.
const POOL_SHARE: u64 = 16;
const POOL_MIN: u64 = 4 << 20;
const POOL_MAX: u64 = 64 << 20;

/// Continues the start of the first CPU after boot.
pub fn bsp_main(machine: &'static mut Machine) -> ! {
    entry::init();
    vcpu::init();
    let share = (machine.memory.ram.total() / POOL_SHARE).clamp(POOL_MIN, POOL_MAX);
    let length = machine.option("pool").and_then(parse_size).unwrap_or(share);
    let length = length.min(MAX_BYTES as u64) & !(PAGE_SIZE - 1);
    let Some(base) = machine.memory.allocate(length, PAGE_SIZE, FOUR_GIB) else {
        panic!("cannot allocate {length:#x} bytes of kernel memory below 4 GiB; reduce pool=");
    };
    // SAFETY: boot allocated the range, which is otherwise unused; the direct map includes it.
    let memory = unsafe { Memory::new(direct(base), base, length as usize) };
    let Some(memory) = memory else {
        panic!("kernel memory of {length:#x} bytes is too small; increase pool=")
    };
    log!("{} KiB of kernel memory", length >> 10);
    run::set_cpus(machine.cpus);
    let kernel = lock::publish::<X86>(memory);
    for cpu_index in 0..machine.cpus {
        if vcpu::alloc_host_pages(&kernel.memory, cpu_index).is_err() {
            panic!("kernel memory is too small for {} CPUs; increase pool=", machine.cpus)
        }
    }
    vcpu::init_this_cpu(0);
    let (cpus, tsc_khz, rsdp) = (machine.cpus as u32, machine.tsc_khz, machine.rsdp);
    let resources = Resources {
        memory: &mut machine.memory,
        devices: machine.devices.as_slice(),
        bundle: machine.bundle,
        processor: elf::Machine::X86_64,
    };
    let started = root::start(&kernel, resources, |page| {
        (page.cpus, page.tsc_khz, page.rsdp) = (cpus, tsc_khz, rsdp);
        let has_nested = vcpu::is_ready() && features().npt;
        page.features = if has_nested { boot::FEATURE_NESTED } else { 0 };
        page.xcr0_mask = features().xcr0_mask;
    });
    if let Err(error) = started {
        panic!("cannot start root: {error}");
    }
    LOG.start_buffering();
    run_threads(kernel, 0)
}

/// Continues the start of the other CPUs.
pub fn ap_main(index: usize) -> ! {
    entry::init();
    lock::wait_until_published::<X86>();
    let kernel = lock::lock::<X86>(index);
    vcpu::init_this_cpu(index);
    run_threads(kernel, index)
}

/// Starts to run threads on this CPU.
fn run_threads(kernel: Guard, cpu_index: usize) -> ! {
    kernel.cpus[cpu_index].resched.set(true);
    // A task that uses the FPU faults: native tasks have no FPU state, and the registers may hold a
    // guest's.
    set_ts();
    let (kernel, next) = exit::pick_next(kernel, cpu_index);
    let context = exit::leave(kernel, cpu_index, next);
    // SAFETY: a thread's context; nothing on this stack is used again.
    unsafe { entry::leave_to(context) }
}

/// Parses a number of bytes with an optional suffix K, M or G.
fn parse_size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(['K', 'M', 'G']);
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}
