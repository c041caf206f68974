//! Start of the CPUs after boot: kernel memory, root, and the first threads.

use abi::boot;
use hw_tables::elf;
use kernel_core::arch::Arch as _;
use kernel_run::root::{self, Resources};
use kernel_run::start::memory_pool;
use kernel_run::{exit, lock};

use crate::boot_info::Machine;
use crate::features::features;
use crate::io::set_ts;
use crate::log::LOG;
use crate::run::{self, Guard};
use crate::{X86, entry, log, vcpu};

/// Continues the start of the first CPU after boot.
pub fn bsp_main(machine: &'static mut Machine) -> ! {
    entry::init();
    vcpu::init();
    let option = machine.command_line.option("pool");
    let memory = memory_pool::<X86>(&mut machine.memory, option);
    log!("{} KiB of kernel memory", memory.1 >> 10);
    run::set_cpus(machine.cpus);
    let kernel = lock::publish::<X86>(memory.0);
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
        tree: None,
        processor: elf::Machine::X86_64,
    };
    let started = root::start(&kernel, resources, |page| {
        (page.cpus, page.tsc_khz, page.rsdp) = (cpus, tsc_khz, rsdp);
        page.features = if X86::has_nested() { boot::FEATURE_NESTED } else { 0 };
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
    let context = exit::leave(kernel, cpu_index, None);
    // SAFETY: a thread's context; nothing on this stack is used again.
    unsafe { entry::leave_to(context) }
}
