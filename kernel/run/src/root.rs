//! Start of root, the first user task: its memory, its threads, and all resources that it owns.

use abi::boot::{self, BootInfo, Region, RegionKind, slot};
use abi::bundle::{self, Header};
use abi::{ItemKind, PAGE_SHIFT, PAGE_SIZE, Status, rights};
use hw_tables::elf::{self, Elf};
use kernel_core::mdb::Extent;
use kernel_core::object::{ObjectRef, SpaceRef, Task};
use kernel_core::pool::Handle;
use kernel_core::sched::PRIORITIES;
use kernel_core::{Kernel, Result};

use crate::Processor;
use crate::boot_memory::{BootMemory, FOUR_GIB};
use crate::ranges::Range;

/// Frames reserved for the kernel itself.
const RESERVED_FRAMES: u32 = 16;
/// Number of capability slots of root.
const ROOT_SLOTS: u64 = 4096;
/// Root has priority over its children, with time slices of 10 ms.
const ROOT_PRIORITY: u64 = 48;
/// Root may assign every priority.
const MAX_PRIORITY: u64 = PRIORITIES as u64 - 1;
const ROOT_SLICE_NS: u64 = 10_000_000;

/// Rights to memory that root does not execute.
const DATA: u8 = rights::READ | rights::WRITE;

/// Reason why root cannot be started, for the log.
type RootError = &'static str;

/// Resources of root, and what it learns about the machine.
pub struct Resources<'a> {
    /// Physical memory. Root gets everything that remains free.
    pub memory: &'a mut BootMemory,
    /// Device memory, which root gets.
    pub devices: &'a [Range],
    /// Boot module, page-aligned; in neither the free nor the used memory.
    pub bundle: Option<Range>,
    /// Device tree, in the used memory. Root reads the pages that hold it.
    pub tree: Option<Range>,
    /// Processor that executables must be for.
    pub processor: elf::Machine,
}

/// Starts root with all resources of the machine. `describe` fills in the fields of the boot page
/// about the processor.
///
/// # Errors
/// The reason, for the log.
pub fn start<A: Processor>(
    kernel: &Kernel<A>,
    resources: Resources<'_>,
    describe: impl FnOnce(&mut BootInfo),
) -> Result<(), RootError> {
    let quota = |_: Status| "kernel memory is too small; increase pool=";
    let memory = &kernel.memory;
    let bundle = resources.bundle.ok_or("no boot module")?;
    let file = root_file::<A>(bundle)?;
    let elf = Elf::parse(file).map_err(|_| "`root` is not a valid ELF executable")?;
    if elf.machine() != resources.processor {
        return Err("`root` is an executable for another processor");
    }

    let available = memory.root().available().saturating_sub(RESERVED_FRAMES);
    let factory = memory.new_factory(None, available, MAX_PRIORITY, 0).map_err(quota)?;
    let payer = Some(factory);
    let task = kernel.new_task(payer, ROOT_SLOTS).map_err(quota)?;
    let mut image = Image { kernel, memory: resources.memory, task };
    image.load(&elf)?;
    let bottom = boot::ROOT_STACK_TOP - boot::ROOT_STACK_PAGES * PAGE_SIZE;
    image.new_pages(bottom, boot::ROOT_STACK_PAGES, DATA)?;

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
    if A::PORT_FRAMES > 0 {
        let ports = Extent { kind: ItemKind::Port, base: 0, physical: 0, order: 16 };
        kernel.add_mapping(SpaceRef::Task(task), ports, rights::ALL, false, None).map_err(quota)?;
    }

    let info = memory.alloc_raw(payer, 1).map_err(quota)?;
    kernel.map_fixed(task, boot::BOOT_INFO_ADDRESS, info, false).map_err(quota)?;
    let page = memory.address(info).cast::<BootInfo>();
    // SAFETY: a new frame; `BootInfo` is integers only and as large as a page.
    let page = unsafe { &mut *page };
    map_memory(kernel, &resources, task, bundle, page).map_err(quota)?;
    page.magic = boot::BOOT_MAGIC;
    page.abi_version = abi::ABI_VERSION;
    page.quota_pages = memory.at(factory).available() as u64;
    page.bundle_base = bundle.base;
    page.bundle_length = bundle.end - bundle.base;
    describe(page);

    kernel.bind_sched(thread, sched).map_err(quota)?;
    kernel
        .start_thread(thread, elf.entry(), boot::ROOT_STACK_TOP, boot::BOOT_INFO_ADDRESS)
        .map_err(|_| "the entry point of `root` is not a user address")
}

fn root_file<A: Processor>(bundle: Range) -> Result<&'static [u8], RootError> {
    let length = bundle.end - bundle.base;
    // SAFETY: boot keeps the bundle out of free memory; its future owner, root, does not run yet,
    // and the kernel does not read it later.
    let bytes = unsafe { core::slice::from_raw_parts(A::direct(bundle.base), length as usize) };
    let header = Header::parse(bytes, length).map_err(|_| "the boot module is not a bundle")?;
    let file = header.find(bundle::ROOT_NAME).ok_or("the bundle contains no file `root`")?;
    Ok(&bytes[file.offset as usize..(file.offset + file.length) as usize])
}

/// Root's executable and stack, while they are loaded.
struct Image<'a, A: Processor> {
    kernel: &'a Kernel<A>,
    memory: &'a mut BootMemory,
    task: Handle<Task<A>>,
}

impl<A: Processor> Image<'_, A> {
    /// Maps new zeroed pages; returns their kernel virtual address.
    fn new_pages(&mut self, address: u64, pages: u64, rights: u8) -> Result<*mut u8, RootError> {
        let length = pages * PAGE_SIZE;
        let physical = self
            .memory
            .allocate(length, PAGE_SIZE, FOUR_GIB)
            .ok_or("not enough memory below 4 GiB for `root`")?;
        // SAFETY: boot allocated the range; the direct map includes it.
        unsafe { A::direct(physical).write_bytes(0, length as usize) };
        for page in 0..pages {
            let (base, physical) =
                ((address >> PAGE_SHIFT) + page, (physical >> PAGE_SHIFT) + page);
            let extent = Extent { kind: ItemKind::Memory, base, physical, order: 0 };
            self.kernel
                .add_mapping(SpaceRef::Task(self.task), extent, rights, false, None)
                .map_err(|_| "segments of `root` overlap or exceed kernel memory")?;
        }
        Ok(A::direct(physical))
    }

    /// Loads the segments of the executable.
    fn load(&mut self, elf: &Elf) -> Result<(), RootError> {
        for segment in elf.segments() {
            let range = Range::new(segment.vaddr, segment.vaddr.wrapping_add(segment.memsz));
            if range.end < range.base || range.end >= abi::USER_END {
                return Err("a segment of `root` is not at user addresses");
            }
            let whole = range.outward();
            let mut rights = rights::READ;
            rights |= if segment.writable() { rights::WRITE } else { 0 };
            rights |= if segment.executable() { rights::EXECUTE } else { 0 };
            let to = self.new_pages(whole.base, whole.length() / PAGE_SIZE, rights)?;
            let data = elf.data(&segment);
            let offset = (range.base - whole.base) as usize;
            // SAFETY: the file part is not longer than the segment, whose pages have just been
            // mapped.
            unsafe { to.add(offset).copy_from_nonoverlapping(data.as_ptr(), data.len()) };
        }
        Ok(())
    }
}

/// Maps all remaining memory in root, as naturally aligned blocks, and lists it in the boot page.
fn map_memory<A: Processor>(
    kernel: &Kernel<A>,
    resources: &Resources<'_>,
    task: Handle<Task<A>>,
    bundle: Range,
    page: &mut BootInfo,
) -> Result<()> {
    let free = resources.memory.free.as_slice().iter();
    let free = free.map(|&range| (range, RegionKind::Ram, rights::ALL));
    let devices = resources.devices.iter().map(|&range| (range, RegionKind::Device, DATA));
    let tree = resources.tree.map(|tree| (tree.outward(), RegionKind::DeviceTree, rights::READ));
    let bundle = (bundle.outward(), RegionKind::Bundle, rights::ALL);
    let mut count = 0;
    for (range, kind, rights) in free.chain([bundle]).chain(devices).chain(tree) {
        if count == page.regions.len() {
            A::log(format_args!("more than {count} memory regions: the rest is not used"));
            break;
        }
        let device = kind == RegionKind::Device;
        let (mut at, end) = (range.base >> PAGE_SHIFT, range.end >> PAGE_SHIFT);
        while at < end {
            let largest = 1 << Kernel::<A>::max_order().min(abi::Item::MAX_ORDER);
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
