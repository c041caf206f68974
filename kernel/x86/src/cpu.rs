//! Per-CPU memory, and initialisation of a CPU's registers.
//!
//! Each CPU has an area at [`area`]: stacks separated by unmapped guard pages, then [`PerCpu`], to
//! which GS points while the kernel runs.

use crate::features::features;
use crate::io::{rdmsr, read_cr0, write_cr0, write_cr4, write_xcr0, wrmsr};
use crate::memory::{CPU_AREAS, KernelTables};
use abi::{PAGE_SIZE, Status};
use core::arch::asm;
use core::cell::UnsafeCell;
use core::mem::offset_of;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use hw_x86::msr;
use hw_x86::paging::{TaskState, cr0, cr4, descriptor};

/// Maximum number of CPUs in use.
pub const MAX_CPUS: usize = 64;
/// Length in bytes of an I/O permission bitmap: one bit per port.
pub const IO_MAP_LENGTH: usize = 8192;

/// Segment selectors, in the order that SYSCALL and SYSRET require (APM vol. 2 §6.1.1): kernel code
/// before kernel data, user data before 64-bit user code, as [`STAR`] states.
pub mod selector {
    /// Kernel code.
    pub const KERNEL_CODE: u16 = 0x08;
    /// Kernel data and stack.
    pub const KERNEL_DATA: u16 = 0x10;
    /// User data and stack.
    pub const USER_DATA: u16 = 0x18 | 3;
    /// User code, 64-bit.
    pub const USER_CODE: u16 = 0x20 | 3;
    /// Task state.
    pub const TASK_STATE: u16 = 0x28;
    /// Value of the MSR STAR.
    pub const STAR: u64 = (KERNEL_DATA as u64 | 3) << 48 | (KERNEL_CODE as u64) << 32;
}

const AREA_LENGTH: u64 = 0x2_0000;
/// Start and end of the stacks in an area: the kernel's, then those of exceptions.
const STACKS: [(u64, u64); 4] =
    [(0x1000, 0x5000), (0x6000, 0x8000), (0x9000, 0xb000), (0xc000, 0xe000)];
const PER_CPU: u64 = 0x1_0000;

/// Address of the area of CPU `index`.
const fn area(index: usize) -> u64 {
    CPU_AREAS + index as u64 * AREA_LENGTH
}

/// Task-state segment, followed by the I/O permission bitmap.
#[repr(C)]
struct Tss {
    state: TaskState,
    io_map: [u8; IO_MAP_LENGTH],
    /// The CPU may read one byte beyond the bitmap, which must be all ones (APM vol. 2 §12.2.4).
    end: u8,
}

const TSS_LIMIT: u32 = (offset_of!(Tss, end)) as u32;

/// State of one CPU. The first fields have fixed offsets, for assembly.
#[repr(C)]
pub struct PerCpu {
    this: u64,
    /// Offset 8: top of this CPU's kernel stack.
    pub kernel_stack_top: AtomicU64,
    /// Offset 16: scratch register of the entry code.
    pub scratch: AtomicU64,
    /// Index of this CPU; 0 is the boot CPU.
    pub id: u32,
    /// Id of its local APIC.
    pub apic_id: u32,
    /// Interrupt vectors taken in ring 0 and not handled yet, one bit each.
    pub pending: [AtomicU64; 4],
    /// TSC_AUX holds a guest's value.
    pub guest_tsc_aux: AtomicBool,
    gdt: UnsafeCell<[u64; 7]>,
    tss: UnsafeCell<Tss>,
}

const _: () = {
    assert!(offset_of!(PerCpu, this) == 0);
    assert!(offset_of!(PerCpu, kernel_stack_top) == 8);
    assert!(offset_of!(PerCpu, scratch) == 16);
    assert!(offset_of!(Tss, io_map) == 104);
    assert!(PER_CPU + size_of::<PerCpu>() as u64 <= AREA_LENGTH);
};

// SAFETY: the cells are written only by `create`, before the CPU runs, and by the CPU itself, in
// functions of this module that work on the current CPU.
unsafe impl Sync for PerCpu {}

static CREATED: AtomicUsize = AtomicUsize::new(0);

/// Offset of TSS.RSP0 in [`PerCpu`], for the entry code: end of the running thread's saved
/// registers.
pub const INTERRUPT_STACK: usize =
    offset_of!(PerCpu, tss) + offset_of!(Tss, state) + offset_of!(TaskState, rsp);

/// State of the executing CPU.
#[inline]
pub fn current() -> &'static PerCpu {
    let this: *const PerCpu;
    // SAFETY: in the kernel, GS points to this CPU's `PerCpu`, which begins with its own address
    // and lives for ever.
    unsafe {
        asm!("mov {}, gs:[0]", out(reg) this, options(nostack, pure, nomem, preserves_flags));
        &*this
    }
}

/// State of CPU `index`, if it exists.
pub fn by_index(index: usize) -> Option<&'static PerCpu> {
    // SAFETY: areas stay mapped for ever once created.
    (index < CREATED.load(Ordering::Acquire)).then(|| unsafe { &*per_cpu(index) })
}

fn per_cpu(index: usize) -> *mut PerCpu {
    (area(index) + PER_CPU) as *mut PerCpu
}

/// Maps the area of CPU `index` in the new tables.
pub fn map_area(tables: &KernelTables, index: usize) -> Result<(), Status> {
    for (start, end) in STACKS {
        tables.map_new(area(index) + start, (end - start) / PAGE_SIZE)?;
    }
    let pages = (size_of::<PerCpu>() as u64).div_ceil(PAGE_SIZE);
    tables.map_new(area(index) + PER_CPU, pages)
}

/// Task state of CPU `index`, with its kernel and exception stacks.
fn task_state(index: usize) -> TaskState {
    let mut state = TaskState::new();
    state.rsp[0] = kernel_stack_top(index);
    for (number, (_, end)) in STACKS[1..].iter().enumerate() {
        state.ist[number] = area(index) + end;
    }
    state
}

/// Initialises the area of the next CPU and returns its index.
///
/// # Safety
/// The next area is mapped in the current tables, and only the first CPU calls this.
pub unsafe fn create(apic_id: u32) -> usize {
    let index = CREATED.load(Ordering::Relaxed);
    let this = per_cpu(index);
    let segment = descriptor::task_state(this as u64 + offset_of!(PerCpu, tss) as u64, TSS_LIMIT);
    // SAFETY: mapped and unused, by contract; the bitmap is filled in place, since the struct is
    // too large for the stack.
    unsafe {
        (&raw mut (*this).this).write(this as u64);
        (&raw mut (*this).kernel_stack_top).write(AtomicU64::new(kernel_stack_top(index)));
        (&raw mut (*this).id).write(index as u32);
        (&raw mut (*this).apic_id).write(apic_id);
        (&raw mut (*this).gdt).cast::<[u64; 7]>().write([
            0,
            descriptor::KERNEL_CODE,
            descriptor::KERNEL_DATA,
            descriptor::USER_DATA,
            descriptor::USER_CODE,
            segment[0],
            segment[1],
        ]);
        let tss = (&raw mut (*this).tss).cast::<Tss>();
        tss.write_bytes(0xff, 1);
        (&raw mut (*tss).state).write(task_state(index));
    }
    CREATED.store(index + 1, Ordering::Release);
    index
}

/// Discards the CPU created last, which failed to start, so that the next one can use its area.
pub fn discard_last() {
    CREATED.fetch_sub(1, Ordering::AcqRel);
}

/// Top of the kernel stack of CPU `index`.
pub const fn kernel_stack_top(index: usize) -> u64 {
    area(index) + STACKS[0].1
}

/// End of the kernel or exception stack that contains `address`, if any.
pub fn stack_end(address: u64) -> Option<u64> {
    let offset = address.checked_sub(CPU_AREAS)? % AREA_LENGTH;
    let (_, end) = STACKS.into_iter().find(|&(start, end)| (start..end).contains(&offset))?;
    Some(address - offset + end)
}

/// Operand of LGDT and LIDT.
#[repr(C, packed)]
pub struct TablePointer {
    limit: u16,
    base: u64,
}

impl TablePointer {
    /// Returns a pointer to a table.
    pub fn to<T>(table: *const T) -> Self {
        Self { limit: size_of::<T>() as u16 - 1, base: table as u64 }
    }
}

/// Initialises this CPU, whose index is `index`: segments, control registers, features.
///
/// # Safety
/// Runs once per CPU, on that CPU, after its area was created, with interrupts off.
pub unsafe fn activate(index: usize) {
    let this = per_cpu(index);
    // SAFETY: the tables are in the CPU's area, which lives for ever; the selectors refer to them;
    // GS gets this CPU's `PerCpu`. Its task state is not busy, since this runs once.
    unsafe {
        let gdt = TablePointer::to((&raw const (*this).gdt).cast::<[u64; 7]>());
        asm!(
            "lgdt [{gdt}]",
            "push {code}",
            "lea {scratch}, [rip + 2f]",
            "push {scratch}",
            "retfq",
            "2:",
            "mov ds, {data:e}",
            "mov es, {data:e}",
            "mov ss, {data:e}",
            "mov fs, {zero:e}",
            "mov gs, {zero:e}",
            "ltr {task:x}",
            // Firmware may have left an LDT whose segments have non-zero bases.
            "lldt {zero:x}",
            gdt = in(reg) &gdt,
            code = const selector::KERNEL_CODE,
            scratch = out(reg) _,
            data = in(reg) selector::KERNEL_DATA as u32,
            zero = in(reg) 0,
            task = in(reg) selector::TASK_STATE,
        );
        wrmsr(msr::GS_BASE, this as u64);
        // User-mode bases, which tasks cannot change.
        wrmsr(msr::FS_BASE, 0);
        wrmsr(msr::KERNEL_GS_BASE, 0);
        crate::idt::load();
        set_control_registers();
    }
}

/// # Safety
/// As for [`activate`].
unsafe fn set_control_registers() {
    /// Reset value of the PAT; firmware may have changed it.
    const PAT_RESET: u64 = 0x0007_0406_0007_0406;
    let have = features();
    let when = |present: bool, bits: u64| if present { bits } else { 0 };
    let new_cr4 = cr4::PAE
        | cr4::PGE
        // With MCE clear, a machine check resets the machine without any message.
        | when(have.mce, cr4::MCE)
        | when(have.fxsr, cr4::OSFXSR | cr4::OSXMMEXCPT)
        | when(have.xsave, cr4::OSXSAVE)
        // No FSGSBASE: the FS and GS bases are not part of a thread's registers. They are 0, since
        // no descriptor available to tasks has another base. Per-task bases would be switched in
        // `X86::load_space`.
        | when(have.umip, cr4::UMIP)
        | when(have.smep, cr4::SMEP)
        | when(have.smap, cr4::SMAP);
    let new_cr0 = read_cr0() & !(cr0::EM | cr0::TS | cr0::CD | cr0::NW)
        | cr0::PE
        | cr0::MP
        | cr0::NE
        | cr0::WP
        | cr0::PG;
    // SAFETY: features that the CPU has; none of them changes the contents of kernel memory. The
    // kernel has no user-accessible pages, so SMEP and SMAP do not restrict it.
    unsafe {
        wrmsr(msr::PAT, PAT_RESET);
        write_cr4(new_cr4);
        write_cr0(new_cr0);
        let efer = rdmsr(msr::EFER);
        wrmsr(msr::EFER, efer | msr::efer::SCE | msr::efer::NXE);
        if have.xsave {
            write_xcr0(have.xcr0_mask);
        }
    }
}

/// This CPU's stack for interrupts and exceptions from CPL 3.
#[inline]
pub fn interrupt_stack() -> u64 {
    let cpu = current();
    // SAFETY: as in `set_interrupt_stack`.
    unsafe { (&raw const (*cpu.tss.get()).state.rsp).cast::<u64>().read_unaligned() }
}

/// Sets this CPU's stack for interrupts and exceptions from CPL 3.
#[inline]
pub fn set_interrupt_stack(top: u64) {
    let cpu = current();
    // SAFETY: only this CPU accesses its task state, never concurrently with itself: the kernel
    // runs with interrupts off.
    unsafe { (&raw mut (*cpu.tss.get()).state.rsp).cast::<u64>().write_unaligned(top) };
}

/// Denies the running task all I/O ports, on this CPU.
pub fn disable_ports() {
    set_io_map_base(u16::MAX);
}

/// Grants the running task the ports whose bits in `map` are 0, on this CPU.
pub fn load_ports(map: &[u8; IO_MAP_LENGTH]) {
    // SAFETY: as in `set_interrupt_stack`.
    unsafe { (&raw mut (*current().tss.get()).io_map).write(*map) };
    enable_loaded_ports();
}

/// Grants the ports of the map that was loaded last.
pub fn enable_loaded_ports() {
    set_io_map_base(offset_of!(Tss, io_map) as u16);
}

fn set_io_map_base(base: u16) {
    // SAFETY: as in `set_interrupt_stack`.
    unsafe { (&raw mut (*current().tss.get()).state.io_map_base).write_unaligned(base) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cpu_has_its_own_stacks() {
        for index in [0, 1, 5, MAX_CPUS - 1] {
            let TaskState { rsp, ist, .. } = task_state(index);
            for stack in [rsp[0], ist[0], ist[1], ist[2]] {
                assert!(
                    (area(index)..area(index) + PER_CPU).contains(&stack),
                    "{index}: {stack:#x}"
                );
                assert_eq!(stack_end(stack - 8), Some(stack), "mapped, and its end");
            }
            assert_eq!((rsp[0], &ist[3..]), (kernel_stack_top(index), &[0; 4][..]));
        }
    }

    #[test]
    fn stacks_have_ends() {
        assert_eq!(stack_end(area(3) + 0x1000), Some(kernel_stack_top(3)));
        assert_eq!(stack_end(area(2) + 0x7ff8), Some(area(2) + 0x8000));
        assert_eq!(stack_end(area(1)), None, "the unmapped page below");
        assert_eq!(stack_end(area(1) + 0x5000), None, "the unmapped page above");
        assert_eq!(stack_end(5), None);
    }
}
