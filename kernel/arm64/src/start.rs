//! Start of the CPUs after boot: kernel memory, root, and the first threads.

use abi::boot::{FEATURE_AARCH32, FEATURE_GICV2, FEATURE_NESTED};
use hw_arm64::registers::el1_has_aarch32;
use hw_tables::elf;
use kernel_run::root::{self, Resources};
use kernel_run::start::memory_pool;
use kernel_run::{exit, lock};

use crate::log::LOG;
use crate::machine::Machine;
use crate::run::{self, Guard};
use crate::{Arm64, entry, gic, log, read_register};

/// Continues the start of the first CPU after boot.
pub fn bsp_main(machine: &'static mut Machine) -> ! {
    let option = machine.command_line.option("pool");
    let (memory, length) = memory_pool::<Arm64>(&mut machine.memory, option);
    log!("{} KiB of kernel memory", length >> 10);
    run::set_cpus(machine.cpus);
    let kernel = lock::publish::<Arm64>(memory);
    let (cpus, counter_khz, tree) = (machine.cpus as u32, machine.counter_khz, machine.tree);
    let resources = Resources {
        memory: &mut machine.memory,
        devices: machine.devices.as_slice(),
        bundle: machine.bundle,
        tree: Some(tree),
        processor: elf::Machine::Aarch64,
    };
    let started = root::start(&kernel, resources, |page| {
        (page.cpus, page.tsc_khz, page.rsdp) = (cpus, counter_khz, tree.base);
        let has_aarch32 = el1_has_aarch32(read_register!("id_aa64pfr0_el1"));
        page.features = FEATURE_NESTED
            | if gic::v2::is_present() { FEATURE_GICV2 } else { 0 }
            | if has_aarch32 { FEATURE_AARCH32 } else { 0 };
    });
    if let Err(error) = started {
        panic!("cannot start root: {error}");
    }
    LOG.start_buffering();
    run_threads(kernel, 0)
}

/// Continues the start of the other CPUs.
pub fn ap_main(index: usize) -> ! {
    lock::wait_until_published::<Arm64>();
    let kernel = lock::lock::<Arm64>(index);
    run_threads(kernel, index)
}

/// Starts to run threads on this CPU.
fn run_threads(kernel: Guard, cpu_index: usize) -> ! {
    kernel.cpus[cpu_index].resched.set(true);
    let context = exit::leave(kernel, cpu_index, None);
    // SAFETY: a thread's context; nothing on this stack is used again.
    unsafe { entry::leave_to(context) }
}
