//! Start of the first user task: kernel memory, the root task, and all resources that root owns.

use abi::boot::{self, BootInfo, Region, RegionKind, slot};
use abi::bundle::{self, Header};
use abi::{ItemKind, PAGE_SHIFT, PAGE_SIZE, Status, rights};
use hw_tables::elf::{self, Elf};
use hw_x86::paging::cr0;
use kernel_core::Kernel;
use kernel_core::mdb::Extent;
use kernel_core::object::{ObjectRef, SpaceRef, Task};
use kernel_core::pool::{Handle, MAX_BYTES, Memory};
use kernel_core::sched::PRIORITIES;

use crate::boot_info::Machine;
use crate::features::features;
use crate::io::{read_cr0, write_cr0};
use crate::memory::{FOUR_GIB, direct};
use crate::ranges::Range;
use crate::run::{self, Guard};
use crate::{X86, entry, log, vcpu};

/// Size of kernel memory: RAM divided by this, within these bounds in bytes.
const POOL_SHARE: u64 = 16;
const POOL_MIN: u64 = 4 << 20;
const POOL_MAX: u64 = 64 << 20;
/// Frames reserved for the kernel itself.
const RESERVED_FRAMES: u32 = 16;
/// Number of capability slots of root.
const ROOT_SLOTS: u64 = 4096;
/// Root has priority over its children, with time slices of 10 ms.
const ROOT_PRIORITY: u64 = 48;
/// Root may assign every priority.
const MAX_PRIORITY: u64 = PRIORITIES as u64 - 1;
const ROOT_SLICE_NS: u64 = 10_000_000;

/// Reason why root cannot be started, for the log.
type RootError = &'static str;

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
    let kernel = run::publish(memory);
    for cpu_index in 0..machine.cpus {
        if vcpu::alloc_host_pages(&kernel.memory, cpu_index).is_err() {
            panic!("kernel memory is too small for {} CPUs; increase pool=", machine.cpus)
        }
    }
    vcpu::init_this_cpu(0);
    if let Err(error) = start_root(&kernel, machine) {
        panic!("cannot start root: {error}");
    }
    log::start_buffering();
    run_threads(kernel, 0)
}

/// Continues the start of the other CPUs.
pub fn ap_main(index: usize) -> ! {
    entry::init();
    run::wait_until_published();
    let kernel = run::lock(index);
    vcpu::init_this_cpu(index);
    run_threads(kernel, index)
}

/// Starts to run threads on this CPU.
fn run_threads(kernel: Guard, cpu_index: usize) -> ! {
    kernel.cpus[cpu_index].resched.set(true);
    // A task that uses the FPU faults: native tasks have no FPU state, and the registers may hold a
    // guest's.
    // SAFETY: the kernel is compiled without floating point.
    unsafe { write_cr0(read_cr0() | cr0::TS) };
    let (kernel, next) = run::pick_next(kernel, cpu_index);
    let context = run::leave(kernel, cpu_index, next);
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

fn start_root(kernel: &Kernel<X86>, machine: &mut Machine) -> Result<(), RootError> {
    let quota = |_: Status| "kernel memory is too small; increase pool=";
    let memory = &kernel.memory;
    let bundle = machine.bundle.ok_or("no boot module")?;
    let file = root_file(bundle)?;
    let elf = Elf::parse(file).map_err(|_| "`root` is not a valid ELF executable")?;
    if elf.machine() != elf::Machine::X86_64 {
        return Err("`root` is not an x86-64 executable");
    }

    let available = memory.root().available().saturating_sub(RESERVED_FRAMES);
    let factory = memory.new_factory(None, available, MAX_PRIORITY, 0).map_err(quota)?;
    let payer = Some(factory);
    let task = kernel.new_task(payer, ROOT_SLOTS).map_err(quota)?;
    load(kernel, machine, task, file, &elf)?;
    map_stack(kernel, machine, task)?;

    let thread = kernel.new_thread(payer, task, 0, boot::ROOT_MESSAGE_PAGE).map_err(quota)?;
    let sched = kernel.new_sched(payer, ROOT_PRIORITY, ROOT_SLICE_NS, 0).map_err(quota)?;
    for (selector, object) in [
        (slot::TASK, ObjectRef::Task(task)),
        (slot::THREAD, ObjectRef::Thread(thread)),
        (slot::SCHED_CONTEXT, ObjectRef::SchedContext(sched)),
        (slot::FACTORY, ObjectRef::Factory(factory)),
        (slot::PLATFORM, ObjectRef::Platform),
    ] {
        kernel.insert_capability(task, selector, object, rights::ALL, None).map_err(quota)?;
    }
    let ports = Extent { kind: ItemKind::Port, base: 0, physical: 0, order: 16 };
    kernel.add_mapping(SpaceRef::Task(task), ports, rights::ALL, false, None).map_err(quota)?;

    let info = memory.alloc_raw(payer, 1).map_err(quota)?;
    kernel.map_fixed(task, boot::BOOT_INFO_ADDRESS, info, false).map_err(quota)?;
    let page = memory.address(info).cast::<BootInfo>();
    // SAFETY: a new frame; `BootInfo` is integers only and as large as a page.
    let page = unsafe { &mut *page };
    map_memory(kernel, machine, task, bundle, page).map_err(quota)?;
    page.magic = boot::BOOT_MAGIC;
    page.abi_version = abi::ABI_VERSION;
    page.cpus = machine.cpus as u32;
    page.tsc_khz = machine.tsc_khz;
    page.rsdp = machine.rsdp;
    page.quota_pages = memory.at(factory).available() as u64;
    page.features = if vcpu::is_ready() { boot::FEATURE_NESTED } else { 0 };
    page.xcr0_mask = features().xcr0_mask;
    page.bundle_base = bundle.base;
    page.bundle_length = bundle.end - bundle.base;

    kernel.bind_sched(thread, sched).map_err(quota)?;
    kernel
        .start_thread(thread, elf.entry(), boot::ROOT_STACK_TOP, boot::BOOT_INFO_ADDRESS)
        .map_err(|_| "the entry point of `root` is not a user address")
}

fn root_file(bundle: Range) -> Result<&'static [u8], RootError> {
    let length = bundle.end - bundle.base;
    // SAFETY: boot keeps the bundle out of free memory; its future owner, root, does not run yet,
    // and the kernel does not read it later.
    let bytes = unsafe { core::slice::from_raw_parts(direct(bundle.base), length as usize) };
    let header = Header::parse(bytes, length).map_err(|_| "the boot module is not a bundle")?;
    let file = header.find(bundle::ROOT_NAME).ok_or("the bundle contains no file `root`")?;
    Ok(&bytes[file.offset as usize..(file.offset + file.length) as usize])
}

/// Maps new zeroed pages in root; returns their kernel virtual address.
fn new_pages(
    kernel: &Kernel<X86>,
    machine: &mut Machine,
    task: Handle<Task<X86>>,
    address: u64,
    pages: u64,
    rights: u8,
) -> Result<*mut u8, RootError> {
    let length = pages * PAGE_SIZE;
    let physical = machine
        .memory
        .allocate(length, PAGE_SIZE, FOUR_GIB)
        .ok_or("not enough memory below 4 GiB for `root`")?;
    // SAFETY: boot allocated the range; the direct map includes it.
    unsafe { direct(physical).write_bytes(0, length as usize) };
    for page in 0..pages {
        let extent = Extent {
            kind: ItemKind::Memory,
            base: (address >> PAGE_SHIFT) + page,
            physical: (physical >> PAGE_SHIFT) + page,
            order: 0,
        };
        kernel
            .add_mapping(SpaceRef::Task(task), extent, rights, false, None)
            .map_err(|_| "segments of `root` overlap or exceed kernel memory")?;
    }
    Ok(direct(physical))
}

fn load(
    kernel: &Kernel<X86>,
    machine: &mut Machine,
    task: Handle<Task<X86>>,
    file: &[u8],
    elf: &Elf,
) -> Result<(), RootError> {
    for segment in elf.segments() {
        let range = Range::new(segment.vaddr, segment.vaddr.wrapping_add(segment.memsz));
        if range.end < range.base || range.end >= abi::USER_END {
            return Err("a segment of `root` is not at user addresses");
        }
        let whole = range.outward();
        let mut rights = rights::READ;
        rights |= if segment.writable() { rights::WRITE } else { 0 };
        rights |= if segment.executable() { rights::EXECUTE } else { 0 };
        let pages = whole.length() / PAGE_SIZE;
        let to = new_pages(kernel, machine, task, whole.base, pages, rights)?;
        let data = elf.data(&segment);
        debug_assert!(data.len() <= file.len());
        let offset = (range.base - whole.base) as usize;
        // SAFETY: the file part is not longer than the segment, whose pages have just been mapped.
        unsafe { to.add(offset).copy_from_nonoverlapping(data.as_ptr(), data.len()) };
    }
    Ok(())
}

fn map_stack(
    kernel: &Kernel<X86>,
    machine: &mut Machine,
    task: Handle<Task<X86>>,
) -> Result<(), RootError> {
    let bottom = boot::ROOT_STACK_TOP - boot::ROOT_STACK_PAGES * PAGE_SIZE;
    let rights = rights::READ | rights::WRITE;
    new_pages(kernel, machine, task, bottom, boot::ROOT_STACK_PAGES, rights).map(|_| ())
}

/// Maps all remaining memory in root, as naturally aligned blocks, and lists it in the boot page.
fn map_memory(
    kernel: &Kernel<X86>,
    machine: &Machine,
    task: Handle<Task<X86>>,
    bundle: Range,
    page: &mut BootInfo,
) -> Result<(), Status> {
    let free = machine.memory.free.as_slice().iter().map(|&range| (range, RegionKind::Ram));
    let devices = machine.devices.as_slice().iter().map(|&range| (range, RegionKind::Device));
    let all = free.chain([(bundle.outward(), RegionKind::Bundle)]).chain(devices);
    let mut count = 0;
    for (range, kind) in all {
        if count == page.regions.len() {
            log!("more than {count} memory regions: the rest is not used");
            break;
        }
        let device = kind == RegionKind::Device;
        let rights = if device { rights::READ | rights::WRITE } else { rights::ALL };
        let (mut at, end) = (range.base >> PAGE_SHIFT, range.end >> PAGE_SHIFT);
        while at < end {
            let largest = 1 << Kernel::<X86>::max_order().min(abi::Item::MAX_ORDER);
            let order = (at | largest).trailing_zeros().min((end - at).ilog2());
            let extent = Extent {
                kind: ItemKind::Memory,
                base: (boot::PHYSICAL_WINDOW >> PAGE_SHIFT) + at,
                physical: at,
                order: order as u8,
            };
            kernel.add_mapping(SpaceRef::Task(task), extent, rights, device, None)?;
            at += 1 << order;
        }
        let length = range.end - range.base;
        page.regions[count] = Region { base: range.base, length, kind: kind as u32, reserved: 0 };
        count += 1;
    }
    page.region_count = count as u64;
    Ok(())
}
