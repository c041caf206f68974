//! Boot of the first CPU: device tree, log, page tables, interrupt controller, other CPUs.

use core::arch::{asm, global_asm};
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU64, Ordering};

use abi::Status;
use hw_arm64::image;
use hw_arm64::paging::entry;
use hw_arm64::registers::{hcr, mair, sctlr, tcr};
use hw_tables::fdt::{self, Fdt};
use hw_tables::virtio_mmio;
use kernel_core::table::Format;
use kernel_run::boot_memory::FOUR_GIB;
use kernel_run::ranges::Range;
use kernel_run::tables::{DEVICE, ImageLayout, READ_WRITE};

use crate::format::KernelStage1;
use crate::log::LOG;
use crate::machine::{Machine, option, uart};
use crate::memory::{self, BLOCK, IMAGE, KernelTables, direct};
use crate::{alternative, cpu, gic, has_vhe, io, log, panic, psci, smp, start, time, vcpu};

/// UART of the log where the device tree cannot be read: that of QEMU's machine `virt`.
const DEFAULT_UART: u64 = 0x0900_0000;
/// Alignment of a device tree in bytes (booting.rst).
const TREE_ALIGNMENT: u64 = 8;

/// Attributes of a block that the first tables map: global, by the kernel alone.
const BLOCK_OF_CODE: u64 = entry::VALID
    | entry::ACCESSED
    | entry::INNER_SHAREABLE
    | mair::NORMAL << hw_arm64::paging::stage1::TYPE_SHIFT;
const BLOCK_OF_DATA: u64 =
    BLOCK_OF_CODE | hw_arm64::paging::stage1::KERNEL_NX | hw_arm64::paging::stage1::USER_NX;

global_asm!(
    ".macro alternative vhe, without",
    alternative!("\\vhe", "\\without"),
    ".endm",
    include_str!("boot.s"),
    image_flags = const image::FLAGS,
    image_magic = const image::MAGIC,
    hcr_host = const hcr::HOST,
    hcr_without_vhe = const hcr::HOST_WITHOUT_VHE,
    sctlr = const sctlr::KERNEL,
    sctlr_without_vhe = const sctlr::KERNEL_WITHOUT_VHE,
    mair = const mair::KERNEL,
    tcr = const tcr::KERNEL,
    tcr_without_vhe = const tcr::KERNEL_WITHOUT_VHE,
    block = const BLOCK_OF_CODE,
    data_block = const BLOCK_OF_DATA,
    user = const hw_arm64::paging::stage1::USER,
    image_slot = const memory::FIRST_SLOT,
    tree_index = const memory::TREE_INDEX,
    main = sym boot_main,
    processor_main = sym smp::processor_main,
);

unsafe extern "C" {
    static image_start: u8;
    static text_end: u8;
    static rodata_end: u8;
    static image_end: u8;
    static boot_tables: [AtomicU64; 6 * 512];
    /// Table without entries, for stage 2 while no guest's or task's tables are loaded.
    pub static empty_table: [AtomicU64; 512];
    /// Replaces the tables of the kernel; `offset`: virtual minus physical addresses of the image.
    fn replace_tables(root: u64, offset: u64);
}

/// The first CPU was started at EL1: value of `boot.s`.
const STARTED_AT_EL1: u64 = 1;

struct Cell(UnsafeCell<Machine>);

// SAFETY: only the first CPU uses it, in `boot_main` and what follows.
unsafe impl Sync for Cell {}

static MACHINE: Cell = Cell(UnsafeCell::new(Machine::NEW));

#[repr(C, align(4096))]
struct Tables([[AtomicU64; 512]; 5]);

/// First direct map, of RAM below 4 GiB: a table of 1 GiB entries, and four of 2 MiB blocks.
static FIRST_MAP: Tables = Tables([const { [const { AtomicU64::new(0) }; 512] }; 5]);

/// Entry from `boot.s`: physical address of the device tree, exception level ([`STARTED_AT_EL1`]),
/// physical address of the image.
extern "C" fn boot_main(tree: u64, level: u64, image: u64) -> ! {
    memory::set_image(image);
    let bytes = tree_bytes(tree);
    let fdt = bytes.map(Fdt::parse);
    init_log(fdt.and_then(Result::ok).as_ref());
    log!(
        "Parador {}, booted at EL{}",
        env!("CARGO_PKG_VERSION"),
        match level {
            STARTED_AT_EL1 => "1",
            _ if has_vhe() => "2",
            _ => "2 without VHE",
        }
    );
    if level == STARTED_AT_EL1 {
        refuse("the kernel must be started at EL2: enable the machine's virtualization extension");
    }
    // SAFETY: this runs once, on the first CPU, and passes on the only reference.
    let machine = unsafe { &mut *MACHINE.0.get() };
    match fdt {
        None => refuse("no device tree: its address is not a multiple of 8, or nothing is there"),
        Some(Err(error)) => {
            log!("device tree at {tree:#x}: {error}");
            refuse("the device tree cannot be used");
        }
        Some(Ok(fdt)) => {
            if let Err(reason) = machine.read(&fdt, memory::limit()) {
                refuse(reason);
            }
        }
    }
    machine.tree = Range::sized(tree, bytes.map_or(0, <[u8]>::len) as u64);
    continue_boot(machine)
}

/// Reports why the kernel does not run on this machine, and stops it.
fn refuse(reason: &str) -> ! {
    log!("{reason}");
    log!("stopped");
    io::stop()
}

/// Bytes of the device tree in the window of the first tables.
fn tree_bytes(physical: u64) -> Option<&'static [u8]> {
    if physical == 0 || !physical.is_multiple_of(TREE_ALIGNMENT) {
        return None;
    }
    let window = IMAGE + memory::TREE_INDEX as u64 * BLOCK;
    let pointer = (window + physical % BLOCK) as *const u8;
    // SAFETY: `boot.s` has mapped two blocks, of which a tree occupies at most as much as one; the
    // loader has placed something readable there, and nothing writes it.
    let bytes = |length| unsafe { core::slice::from_raw_parts(pointer, length) };
    Some(bytes(fdt::length(bytes(8)).unwrap_or(8)))
}

/// Entry `index` of the table with this number among those of `boot.s`.
fn boot_entry(table: usize, index: usize) -> &'static AtomicU64 {
    // SAFETY: the tables are in the image, mapped, and only atomics.
    unsafe { &boot_tables[table * 512 + index] }
}

/// Makes new entries of tables visible to walks.
fn publish_entries() {
    // SAFETY: a barrier.
    unsafe { asm!("dsb ishst", "isb", options(nostack)) };
}

/// Maps the block with these device registers in entry `index` of the first tables; returns their
/// virtual address.
fn map_registers(index: usize, physical: u64) -> usize {
    let leaf = KernelStage1::leaf(physical & !(BLOCK - 1), DEVICE, 1);
    boot_entry(5, index).store(leaf, Ordering::Relaxed);
    publish_entries();
    (IMAGE + index as u64 * BLOCK + physical % BLOCK) as usize
}

/// Begins the log: on a virtio console with `log=virtio`, where there is one, else on the UART.
fn init_log(fdt: Option<&Fdt<'_>>) {
    if let Some(fdt) = fdt
        && option(fdt, "log") == Some("virtio")
        && init_virtio_log(fdt)
    {
        return;
    }
    let physical = fdt.and_then(uart).unwrap_or(DEFAULT_UART);
    let address = map_registers(memory::UART_INDEX, physical);
    // SAFETY: just mapped; the device tree says that a PL011 is there.
    unsafe { LOG.port().init_pl011(physical, address) };
}

/// Begins the log on a virtio console; `false`: there is none. Only devices in the block of the
/// first virtio device are searched.
fn init_virtio_log(fdt: &Fdt<'_>) -> bool {
    let mut block = None;
    let console = fdt.find(virtio_mmio::COMPATIBLE, |node| {
        let Some((physical, _)) = node.ranges().next() else { return false };
        let of_device = physical & !(BLOCK - 1);
        if *block.get_or_insert(of_device) != of_device {
            return false;
        }
        let address = map_registers(memory::LOG_INDEX, physical);
        // SAFETY: just mapped; the device tree says that a virtio device is there.
        unsafe { LOG.port().init_virtio(physical, address) }
    });
    console.is_some()
}

fn continue_boot(machine: &'static mut Machine) -> ! {
    let has_log = machine.command_line.option("log") != Some("none");
    if !has_log {
        LOG.port().remove();
    }
    panic::init(machine.command_line.option("panic"));
    log!("command line: {}", machine.command_line.text());
    if machine.has_psci {
        psci::init();
    }
    machine.counter_khz = time::init();
    log!("counter {} kHz", machine.counter_khz);
    reserve(machine);
    log_memory(machine);
    map_ram(machine);
    if let Err(status) = build_address_space(machine) {
        panic!("not enough memory below 4 GiB for the kernel's page tables: {status:?}");
    }
    if has_log {
        match LOG.port().physical().filter(|&physical| physical < FOUR_GIB) {
            // SAFETY: the direct map has device registers below 4 GiB.
            Some(physical) => unsafe { LOG.port().relocate(direct(physical) as usize) },
            None => LOG.port().remove(),
        }
    }
    // SAFETY: CPU 0's area was just mapped; nothing on the old stack is used again, and the only
    // reference to the description is passed on.
    unsafe {
        let index = cpu::create(cpu::affinity());
        asm!("mov sp, {}", "mov x29, xzr", "bl {}", "brk #1",
            in(reg) cpu::kernel_stack_top(index), sym continue_on_own_stack,
            in("x0") &raw mut *machine, options(noreturn));
    }
}

/// Removes memory in use from free memory.
fn reserve(machine: &mut Machine) {
    let start = memory::image_physical();
    let whole = Range::new(start, start + image_layout().data.end - IMAGE);
    let ram = &machine.memory.ram;
    let is_ram = |range: &Range| {
        ram.as_slice().iter().any(|of| of.base <= range.base && range.end <= of.end)
    };
    if !is_ram(&whole.outward()) {
        panic!("the kernel's image is not in RAM that the device tree lists");
    }
    machine.bundle = machine.bundle.filter(|bundle| {
        let is_good = bundle.base % abi::PAGE_SIZE == 0 && is_ram(&bundle.outward());
        if !is_good {
            log!("the boot module is not page-aligned, or not in RAM: ignored");
        }
        is_good
    });
    let memory = &mut machine.memory;
    for range in [whole, machine.tree].into_iter().chain(machine.bundle) {
        memory.free.remove(range.outward());
    }
    memory.used.insert(whole.outward());
    memory.used.insert(machine.tree.outward());
}

fn log_memory(machine: &Machine) {
    for range in machine.memory.ram.as_slice() {
        log!("RAM {:#013x}..{:#013x}", range.base, range.end);
    }
    let memory = &machine.memory;
    log!("{} MiB RAM, {} MiB free", memory.ram.total() >> 20, memory.free.total() >> 20);
    match machine.bundle {
        Some(bundle) => log!("boot module {:#x}..{:#x}", bundle.base, bundle.end),
        None => log!("no boot module"),
    }
}

/// Maps RAM below 4 GiB in the first direct map.
fn map_ram(machine: &Machine) {
    let [top, blocks @ ..] = &FIRST_MAP.0;
    for range in machine.memory.ram.as_slice() {
        for base in (range.base..range.end.min(FOUR_GIB)).step_by(BLOCK as usize) {
            let leaf = KernelStage1::leaf(base, READ_WRITE, 1);
            blocks[(base >> 30) as usize][(base >> 21 & 511) as usize]
                .store(leaf, Ordering::Relaxed);
        }
    }
    let table = |of: *const [AtomicU64; 512]| KernelStage1::table(memory::physical_of(of));
    for (entry, below) in top.iter().zip(blocks) {
        entry.store(table(below), Ordering::Relaxed);
    }
    boot_entry(0, memory::slot(memory::DIRECT_MAP)).store(table(top), Ordering::Relaxed);
    publish_entries();
}

/// Sections of the image.
pub fn image_layout() -> ImageLayout {
    let at = |symbol: *const u8| symbol as u64;
    ImageLayout {
        start: memory::image_physical(),
        code: Range::new(at(&raw const image_start), at(&raw const text_end)),
        constants: Range::new(at(&raw const text_end), at(&raw const rodata_end)),
        data: Range::new(at(&raw const rodata_end), at(&raw const image_end)),
    }
}

/// Builds the kernel's page tables with areas for all CPUs, and loads them.
fn build_address_space(machine: &mut Machine) -> Result<(), Status> {
    let offset = IMAGE - memory::image_physical();
    // SAFETY: `map_ram` has mapped RAM below 4 GiB there.
    let tables = unsafe { KernelTables::new(&mut machine.memory, direct) };
    let tables = tables.ok_or(Status::NoQuota)?;
    tables.map_image(&image_layout(), offset)?;
    tables.map_physical()?;
    for index in 0..machine.listed_cpus.max(1) {
        cpu::map_area(&tables, index)?;
    }
    let root = tables.finish();
    memory::publish(root);
    set_identity_map(boot_entry(0, identity_slot()).load(Ordering::Relaxed));
    // SAFETY: the tables map the image at its address, with the stack, and have the identity map.
    unsafe { replace_tables(root, offset) };
    Ok(())
}

/// Entry of root tables with the identity map.
fn identity_slot() -> usize {
    memory::slot(memory::image_physical())
}

/// Sets the entry of the identity map in the kernel's tables. CPUs need it while they start.
fn set_identity_map(entry: u64) {
    let root = memory::root_entries(memory::kernel_root());
    root[identity_slot()].store(entry, Ordering::Relaxed);
    publish_entries();
}

/// Removes the identity map when all CPUs have started.
fn remove_identity_map() {
    set_identity_map(0);
    // SAFETY: flushes only.
    unsafe { asm!("dsb ish", "tlbi alle2is", "dsb ish", "isb", options(nostack)) };
}

extern "C" fn continue_on_own_stack(machine: &'static mut Machine) -> ! {
    let listed = machine.affinities[..machine.listed_cpus].iter();
    let Some(place) = listed.clone().position(|&affinity| affinity == cpu::affinity()) else {
        panic!("the device tree does not list the CPU with affinity {:#x}", cpu::affinity());
    };
    gic::init(machine);
    vcpu::virqs::init(machine.maintenance.is_some());
    // SAFETY: the first CPU, once; its area exists.
    unsafe { cpu::activate(0) };
    if !gic::init_cpu(place) {
        panic!("the first CPU has no interrupt controller");
    }
    smp::start_all(machine);
    remove_identity_map();
    start::bsp_main(machine)
}
