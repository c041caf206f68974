//! Boot of the first CPU, from the boot loader to [`crate::start::bsp_main`]: reads the information
//! of boot loader and firmware, builds the kernel's page tables, and initialises interrupts, time
//! and the other CPUs.
//!
//! [`boot_main`] starts on the page tables of `boot.s`, which map the first 4 GiB, where all boot
//! information resides.

use crate::boot_info::{Machine, image};
use crate::cpu::MAX_CPUS;
use crate::features::{Features, features, initial_apic_id};
use crate::log::LOG;
use crate::memory::{self, DIRECT_MAP_LENGTH, IMAGE_OFFSET, KernelTables, direct};
use crate::{apic, cpu, entry, idt, io, ioapic, log, panic, smp, start, time};
use abi::Status;
use core::arch::{asm, global_asm};
use core::cell::UnsafeCell;
use hw_tables::acpi::{Fadt, Madt, MadtEntry, Tables, apic_flag, find_rsdp};
use hw_tables::{multiboot2, pvh};
use kernel_run::boot_memory::{BootMemory, FOUR_GIB, normalise};
use kernel_run::command_line;
use kernel_run::ranges::Range;

global_asm!(
    include_str!("boot.s"),
    boot_main = sym boot_main,
    processor_main = sym smp::processor_main,
    options(att_syntax)
);

/// Limits on untrusted boot information: entries per list, and total length in bytes.
const MAX_ENTRIES: u32 = 1024;
const MAX_INFORMATION: usize = 1 << 20;

struct Cell(UnsafeCell<Machine>);

// SAFETY: only `boot_main` and its callees access the description, on the first CPU.
unsafe impl Sync for Cell {}

static MACHINE: Cell = Cell(UnsafeCell::new(Machine::NEW));

/// Memory below 4 GiB written by the boot loader or the firmware.
fn loader_bytes(physical: u64, length: usize) -> Option<&'static [u8]> {
    // SAFETY: nothing writes there: the boot loader has finished, and memory in use is not
    // allocated. A boot loader that passes wrong addresses could as well have modified the kernel
    // image.
    unsafe { memory::bytes(physical, length) }
}

/// Like [`loader_bytes`], truncated at 4 GiB.
fn loader_text(physical: u64) -> &'static [u8] {
    let length = FOUR_GIB.saturating_sub(physical).min(command_line::LENGTH as u64);
    loader_bytes(physical, length as usize).unwrap_or(&[])
}

/// Reads the information of a PVH boot loader; returns the range to preserve besides the bundle.
fn read_pvh(machine: &mut Machine, information: u64) -> Option<Range> {
    let info = pvh::StartInfo::parse(loader_bytes(information, pvh::StartInfo::LENGTH)?)?;
    let list = |address, count: u32, length| {
        loader_bytes(address, count.min(MAX_ENTRIES) as usize * length).unwrap_or(&[])
    };
    machine.command_line.set(loader_text(info.command_line));
    machine.rsdp = info.rsdp;
    let modules = list(info.module_list, info.modules, pvh::Module::LENGTH);
    machine.bundle =
        pvh::Module::list(modules).next().map(|module| Range::sized(module.address, module.size));
    let map = list(info.memory_map, info.memory_ranges, pvh::MemoryRange::LENGTH);
    machine.memory =
        usable(|| pvh::MemoryRange::list(map).map(|entry| (entry.address, entry.size, entry.kind)));
    Some(Range::default())
}

/// RAM of a memory map, whose entries are base, length and kind, except for the first 64 KiB, where
/// memory maps are not always accurate and where CPUs start.
fn usable<I: Iterator<Item = (u64, u64, u32)>>(map: impl Fn() -> I) -> BootMemory {
    let ram = normalise(DIRECT_MAP_LENGTH, || {
        map().map(|(base, length, kind)| (Range::sized(base, length), kind == pvh::memory::RAM))
    });
    BootMemory::new(ram, Range::new(0, 0x1_0000))
}

/// Reads the information of a Multiboot2 boot loader; returns the range to preserve besides the
/// bundle.
fn read_multiboot2(machine: &mut Machine, information: u64) -> Option<Range> {
    let header = loader_bytes(information, multiboot2::BootInfo::HEADER_LENGTH)?;
    let length = multiboot2::BootInfo::length(header)?.min(MAX_INFORMATION);
    let info = multiboot2::BootInfo::parse(loader_bytes(information, length)?)?;
    machine.command_line.set(info.command_line().unwrap_or(&[]));
    machine.bundle =
        info.modules().next().map(|module| Range::new(module.start as u64, module.end as u64));
    machine.memory =
        usable(|| info.memory_map().map(|entry| (entry.address, entry.size, entry.kind)));
    // The RSDP is a copy in the boot information, which must therefore be preserved.
    machine.rsdp = info.rsdp().map_or(0, |copy| copy.as_ptr() as u64 - memory::DIRECT_MAP);
    Some(Range::sized(information, length as u64))
}

/// Searches the RSDP where PC firmware stores it (ACPI 6.5 §5.2.5.1). Returns 0 if there is none.
fn search_rsdp() -> u64 {
    const EBDA_POINTER: u64 = 0x40e;
    const BIOS: (u64, usize) = (0xe_0000, 0x2_0000);
    let segment =
        loader_bytes(EBDA_POINTER, 2).map_or(0, |raw| u16::from_le_bytes([raw[0], raw[1]]));
    [((segment as u64) << 4, 1024), BIOS]
        .into_iter()
        .find_map(|(base, length)| Some(base + find_rsdp(loader_bytes(base, length)?)? as u64))
        .unwrap_or(0)
}

/// Entry from `boot.s`, with the boot loader's magic number and the address of its information.
extern "C" fn boot_main(magic: u32, information: u32) -> ! {
    // SAFETY: this runs once, on the first CPU, and passes on the only reference.
    let machine = unsafe { &mut *MACHINE.0.get() };
    let (loader, preserved) = match magic {
        pvh::MAGIC => ("PVH", read_pvh(machine, information as u64)),
        multiboot2::LOADER_MAGIC => ("multiboot2", read_multiboot2(machine, information as u64)),
        _ => ("an unknown loader", None),
    };
    LOG.port().init(machine.command_line.option("log"));
    panic::init(machine.command_line.option("panic"));
    log!("Parador {}, booted by {loader}", env!("CARGO_PKG_VERSION"));
    let Some(preserved) = preserved else {
        panic!("invalid boot information (loader magic {magic:#x}, address {information:#x})")
    };
    log!("command line: {}", machine.command_line.text());
    log_features(features());
    reserve(machine, preserved);
    log_memory(machine);
    if machine.rsdp == 0 {
        machine.rsdp = search_rsdp();
    }
    if let Err(status) = build_address_space(machine) {
        panic!("not enough memory below 4 GiB for the kernel's page tables: {status:?}");
    }
    idt::init(&entry::INTERRUPT_STUBS, crate::machine_check::entry);
    // SAFETY: CPU 0's area was just mapped; nothing on the old stack is used again, and the only
    // reference to the description is passed on.
    unsafe {
        let index = cpu::create(initial_apic_id());
        asm!("mov rsp, {}", "xor ebp, ebp", "call {}", "ud2",
            in(reg) cpu::kernel_stack_top(index), sym continue_on_own_stack,
            in("rdi") &raw mut *machine, options(noreturn));
    }
}

fn log_features(have: &Features) {
    let names = [
        ("svm", have.svm),
        ("npt", have.npt),
        ("nrip-save", have.nrip_save),
        ("decode-assist", have.decode_assist),
        ("x2apic", have.x2apic),
        ("tsc-deadline", have.tsc_deadline),
        ("1g-pages", have.huge_pages),
        ("smep", have.smep),
        ("smap", have.smap),
        ("umip", have.umip),
        ("xsave", have.xsave),
    ];
    let present = core::fmt::from_fn(|f| {
        let mut present = names.iter().filter(|(_, is_present)| *is_present);
        present.try_for_each(|(name, _)| write!(f, " {name}"))
    });
    log!("CPU features:{present}; {} ASIDs", have.asids);
    if !have.svm {
        log!("no SVM: cannot run VMs");
    } else if !have.npt {
        log!("no nested paging: VMs need `npt = false`");
    }
}

/// Removes memory in use from free memory.
fn reserve(machine: &mut Machine, preserved: Range) {
    let image = image();
    let whole = Range::new(image.start, image.data.end - IMAGE_OFFSET);
    let free = &mut machine.memory.free;
    for range in [whole, preserved].into_iter().chain(machine.bundle) {
        free.remove(range.outward());
    }
    machine.memory.used.insert(whole.outward());
    machine.memory.used.insert(preserved.outward());
    if machine.bundle.is_some_and(|bundle| bundle.base % abi::PAGE_SIZE != 0) {
        log!("the boot module is not page-aligned: ignored");
        machine.bundle = None;
    }
}

fn log_memory(machine: &Machine) {
    for range in machine.memory.ram.as_slice() {
        log!("RAM {:#013x}..{:#013x}", range.base, range.end);
    }
    let memory = &machine.memory;
    log!("{} MiB RAM, {} MiB free", memory.ram.total() >> 20, memory.free.total() >> 20);
    if memory.ram.overflowed() || memory.free.overflowed() {
        log!("the memory map has too many entries: some RAM is not used");
    }
    match machine.bundle {
        Some(bundle) => log!("boot module {:#x}..{:#x}", bundle.base, bundle.end),
        None => log!("no boot module"),
    }
}

/// Builds the kernel's page tables with areas for all CPUs, and loads them.
fn build_address_space(machine: &mut Machine) -> Result<(), Status> {
    let mut list = [0; MAX_CPUS];
    let areas = processors(machine.rsdp, &mut list).max(1);
    // SAFETY: the start-up tables map RAM below 4 GiB in the direct map, too.
    let tables =
        unsafe { KernelTables::new(&mut machine.memory, direct) }.ok_or(Status::NoQuota)?;
    tables.map_image(&image(), IMAGE_OFFSET)?;
    tables.map_physical()?;
    for index in 0..areas {
        cpu::map_area(&tables, index)?;
    }
    let root = tables.finish();
    memory::publish(root);
    // SAFETY: the tables map the image at its address, the direct map, and the image's data,
    // including the stack.
    unsafe { io::write_cr3(root) };
    Ok(())
}

/// Lists the APIC ids of the processors that the MADT reports as enabled, this one first. Returns
/// their number.
fn processors(rsdp: u64, list: &mut [u32; MAX_CPUS]) -> usize {
    list[0] = initial_apic_id();
    let mut count = 1;
    let Some(madt) = find_madt(rsdp) else { return count };
    for entry in madt.entries() {
        let (id, flags) = match entry {
            MadtEntry::LocalApic { id, flags, .. } => (id as u32, flags),
            MadtEntry::X2Apic { id, flags, .. } => (id, flags),
            _ => continue,
        };
        if flags & apic_flag::ENABLED == 0 || list[..count].contains(&id) {
            continue;
        }
        if count == MAX_CPUS {
            log!("more than {MAX_CPUS} CPUs: the rest is not used");
            break;
        }
        list[count] = id;
        count += 1;
    }
    count
}

fn find_madt(rsdp: u64) -> Option<Madt<'static>> {
    let tables = Tables::from_address(rsdp, loader_bytes).ok()?;
    Madt::parse(tables.find(Madt::SIGNATURE)?).ok()
}

fn find_pm_timer(rsdp: u64) -> Option<u16> {
    let tables = Tables::from_address(rsdp, loader_bytes).ok()?;
    Fadt::parse(tables.find(Fadt::SIGNATURE)?).ok()?.pm_timer()?.port()
}

extern "C" fn continue_on_own_stack(machine: &'static mut Machine) -> ! {
    // SAFETY: the first CPU, once; its area exists.
    unsafe { cpu::activate(0) };
    let have = features();
    let Some(local) = apic::init(have.x2apic, have.tsc_deadline) else {
        panic!("the local APIC is not below 4 GiB, and the CPU has no x2APIC mode");
    };
    local.enable();
    crate::machine_check::init();
    find_frequencies(machine);
    if let Some(madt) = find_madt(machine.rsdp) {
        ioapic::init(&madt);
    } else {
        log!("no ACPI MADT: one CPU, no device interrupts");
    }
    machine.devices = machine.memory.holes();
    machine.devices.remove(Range::sized(apic::page(), abi::PAGE_SIZE));
    ioapic::pages().for_each(|page| machine.devices.remove(page));
    start_processors(machine);
    start::bsp_main(machine)
}

fn find_frequencies(machine: &mut Machine) {
    let have = features();
    let local = apic::local();
    let known = have.tsc_khz.zip(have.apic_khz.or(local.has_deadline().then_some(1)));
    let (tsc_khz, apic_khz, source) = known.map_or_else(
        || {
            local.start_counting();
            let Some(found) = time::measure(find_pm_timer(machine.rsdp), || local.count()) else {
                panic!("cannot calibrate the TSC: neither the ACPI PM timer nor the PIT counts");
            };
            (have.tsc_khz.unwrap_or(found.tsc_khz), found.apic_khz, found.reference)
        },
        |(tsc, apic)| (tsc, apic, "CPUID"),
    );
    time::set_frequency(tsc_khz);
    local.set_frequency(apic_khz, tsc_khz);
    local.enable();
    machine.tsc_khz = tsc_khz;
    log!(
        "TSC {tsc_khz} kHz by {source}, APIC timer {}, {}",
        if local.has_deadline() { "by TSC deadline" } else { "one-shot" },
        if local.is_x2() { "x2APIC" } else { "xAPIC" },
    );
}

fn start_processors(machine: &mut Machine) {
    let mut list = [0; MAX_CPUS];
    let count = processors(machine.rsdp, &mut list);
    let Some(page) = smp::trampoline_page(&machine.memory.ram) else {
        log!("no RAM below 64 KiB: cannot start other CPUs");
        return;
    };
    for &apic_id in &list[1..count] {
        // SAFETY: the first CPU, the others in reset; the page is unused; the areas of all CPUs are
        // mapped.
        if unsafe { smp::start(apic_id, page) } {
            machine.cpus += 1;
        } else {
            log!("the CPU with APIC id {apic_id} does not respond: not used");
        }
    }
    log!("{} of {count} CPUs started", machine.cpus);
}
