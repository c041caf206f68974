//! Per-CPU memory, and initialisation of a CPU's registers.
//!
//! Each CPU has an area at [`area`]: two stacks with unmapped pages around them, then [`PerCpu`],
//! to which TPIDR_EL2 points.

use core::mem::offset_of;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use abi::{PAGE_SIZE, Status};
use hw_arm64::registers::{
    AFFINITY, CNTHCTL_HOST, CNTKCTL_TASKS, has_extended_configuration, has_fine_traps, sctlr,
};

use crate::boot::empty_table;
use crate::machine::MAX_CPUS;
use crate::memory::{CPU_AREAS, KernelTables, physical_of};
use crate::{has_vhe, read_register, write_register};

const AREA_LENGTH: u64 = 0x1_0000;
/// Stack of the kernel, and that of exceptions in the kernel, which are bugs.
const KERNEL_STACK: (u64, u64) = (0x1000, 0x5000);
const BUG_STACK: (u64, u64) = (0x6000, 0x8000);
const PER_CPU: u64 = 0x9000;

/// State of one CPU. The first fields have fixed offsets, for assembly.
#[repr(C)]
pub struct PerCpu {
    /// Top of this CPU's kernel stack.
    kernel_stack_top: u64,
    /// Top of its stack for exceptions in the kernel.
    bug_stack_top: u64,
    /// Index of this CPU; 0 is the boot CPU.
    pub id: usize,
    /// Its affinity.
    pub affinity: u64,
    /// State that assembly uses while a guest runs.
    pub guest: GuestRun,
    /// State that assembly uses without VHE.
    without_vhe: WithoutVhe,
}

/// State of a CPU without VHE, where tasks depend on registers that guests have, too.
#[repr(C)]
#[derive(Default)]
struct WithoutVhe {
    /// SCTLR_EL1 and CNTKCTL_EL1 of the guest whose registers are loaded, while it does not run.
    guest_registers: [AtomicU64; 2],
    /// VTTBR_EL2 of the guest and of the task that are loaded.
    guest_tables: AtomicU64,
    task_tables: AtomicU64,
    /// Physical address of tables without entries.
    no_tables: u64,
}

/// State of a CPU that assembly uses while a guest runs.
#[repr(C)]
#[derive(Default)]
pub struct GuestRun {
    /// List register with the interrupt of the virtual timer, without number and priority; 0:
    /// guests have none.
    pub timer_list: AtomicU64,
    /// Not 0: the CPU may wait in place of the guest.
    pub may_wait: AtomicU64,
    /// HCR_EL2 of the guest whose registers are loaded.
    pub hcr: AtomicU64,
    /// Stack pointer of the kernel while a guest runs. Only assembly uses it.
    stack: AtomicU64,
    /// Ticks that it has waited so. Assembly loads it together with `stack`.
    pub waited: AtomicU64,
}

/// Offset of the top of the kernel stack in [`PerCpu`], for assembly.
pub const KERNEL_STACK_TOP: usize = offset_of!(PerCpu, kernel_stack_top);
/// Offset of the top of the stack for exceptions in the kernel.
pub const BUG_STACK_TOP: usize = offset_of!(PerCpu, bug_stack_top);
/// Offset of the kernel's stack pointer while a guest runs.
pub const GUEST_STACK: usize = offset_of!(PerCpu, guest.stack);
const _: () = assert!(WAITED == GUEST_STACK + 8);
/// Offsets of the fields of [`GuestRun`].
pub const TIMER_LIST: usize = offset_of!(PerCpu, guest.timer_list);
/// See [`TIMER_LIST`].
pub const MAY_WAIT: usize = offset_of!(PerCpu, guest.may_wait);
/// See [`TIMER_LIST`].
pub const WAITED: usize = offset_of!(PerCpu, guest.waited);
/// See [`TIMER_LIST`].
pub const GUEST_HCR: usize = offset_of!(PerCpu, guest.hcr);

/// Offsets of the fields of [`WithoutVhe`].
pub const GUEST_REGISTERS: usize = offset_of!(PerCpu, without_vhe.guest_registers);
/// See [`GUEST_REGISTERS`].
pub const GUEST_TABLES: usize = offset_of!(PerCpu, without_vhe.guest_tables);
/// See [`GUEST_REGISTERS`].
pub const TASK_TABLES: usize = offset_of!(PerCpu, without_vhe.task_tables);
/// See [`GUEST_REGISTERS`].
pub const NO_TABLES: usize = offset_of!(PerCpu, without_vhe.no_tables);

static CREATED: AtomicUsize = AtomicUsize::new(0);

/// Address of the area of CPU `index`.
const fn area(index: usize) -> u64 {
    CPU_AREAS + index as u64 * AREA_LENGTH
}

/// Top of the kernel stack of CPU `index`.
pub const fn kernel_stack_top(index: usize) -> u64 {
    area(index) + KERNEL_STACK.1
}

/// Maps the area of CPU `index` in the new tables.
///
/// # Errors
/// There is not enough memory.
pub fn map_area(tables: &KernelTables<'_>, index: usize) -> Result<(), Status> {
    for (start, end) in [KERNEL_STACK, BUG_STACK] {
        tables.map_new(area(index) + start, (end - start) / PAGE_SIZE)?;
    }
    tables.map_new(area(index) + PER_CPU, 1)
}

/// Initialises the area of the next CPU and returns its index.
///
/// # Safety
/// The next area is mapped, and only the first CPU calls this.
pub unsafe fn create(affinity: u64) -> usize {
    let index = CREATED.load(Ordering::Relaxed);
    assert!(index < MAX_CPUS);
    let state = PerCpu {
        kernel_stack_top: kernel_stack_top(index),
        bug_stack_top: area(index) + BUG_STACK.1,
        id: index,
        affinity,
        guest: GuestRun::default(),
        without_vhe: WithoutVhe {
            no_tables: physical_of(&raw const empty_table),
            ..WithoutVhe::default()
        },
    };
    // SAFETY: mapped, by the caller; no CPU uses it before it is counted.
    unsafe { ((area(index) + PER_CPU) as *mut PerCpu).write(state) };
    CREATED.store(index + 1, Ordering::Release);
    index
}

/// Removes the last area, whose CPU does not start.
///
/// # Safety
/// No CPU uses it, and only the first CPU calls this.
pub unsafe fn discard_last() {
    CREATED.fetch_sub(1, Ordering::Release);
}

/// Sets the registers of the CPU with this index that do not change later.
///
/// # Safety
/// Only this CPU calls it, once; its area exists.
pub unsafe fn activate(index: usize) {
    // SAFETY: the vectors handle everything on the stacks of this area; EL0 gets the counters, and
    // neither floating point nor the debug registers.
    unsafe {
        write_register!("tpidr_el2", area(index) + PER_CPU);
        write_register!("vbar_el2", &raw const crate::entry::vectors as u64);
        write_register!("cnthctl_el2", CNTHCTL_HOST);
        write_register!("mdscr_el1", 0);
        write_register!("tpidrro_el0", 0);
        if !has_vhe() {
            write_register!("sctlr_el1", sctlr::TASKS);
            write_register!("cntkctl_el1", CNTKCTL_TASKS);
        }
    }
    clear_traps();
    crate::vcpu::float::forbid();
    crate::io::instruction_barrier();
    // SAFETY: no guest runs before this CPU runs threads.
    unsafe { crate::vcpu::init_this_cpu() };
    // No task has run yet. A flush without VHE would concern all CPUs of an emulator.
    crate::run::set_tables(crate::memory::kernel_root());
}

/// Clears registers of traps that firmware may have left, or that have any value after a reset.
fn clear_traps() {
    let [first, second] = [read_register!("id_aa64mmfr0_el1"), read_register!("id_aa64mmfr1_el1")];
    // SAFETY: they exist, and concern guests alone, whose accesses that are not permitted trap by
    // registers that are set later.
    unsafe {
        write_register!("hstr_el2", 0);
        if has_extended_configuration(second) {
            // HCRX_EL2.
            write_register!("S3_4_C1_C2_2", 0);
        }
        if has_fine_traps(first) {
            // HFGRTR_EL2, HFGWTR_EL2, HFGITR_EL2, HDFGRTR_EL2, HDFGWTR_EL2.
            write_register!("S3_4_C1_C1_4", 0);
            write_register!("S3_4_C1_C1_5", 0);
            write_register!("S3_4_C1_C1_6", 0);
            write_register!("S3_4_C3_C1_4", 0);
            write_register!("S3_4_C3_C1_5", 0);
        }
    }
}

/// State of the executing CPU.
#[inline(always)]
pub fn current() -> &'static PerCpu {
    let this = read_register!("tpidr_el2") as *const PerCpu;
    // SAFETY: `activate` has set the register; areas stay mapped for ever.
    unsafe { &*this }
}

/// State of CPU `index`, if it exists.
pub fn by_index(index: usize) -> Option<&'static PerCpu> {
    let exists = index < CREATED.load(Ordering::Acquire);
    // SAFETY: areas stay mapped for ever once created, and do not change.
    exists.then(|| unsafe { &*((area(index) + PER_CPU) as *const PerCpu) })
}

/// Affinity of the executing CPU.
pub fn affinity() -> u64 {
    read_register!("mpidr_el1") & AFFINITY
}
