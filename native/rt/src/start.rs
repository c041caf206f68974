//! Start and end of a program.

use core::slice;
#[cfg(target_arch = "x86_64")]
use core::sync::atomic::{AtomicU32, Ordering};

use abi::boot::{self, BootInfo, RegionKind};
use proto::control;
use proto::start::{
    FILES, FILES_ALIGN, MAX_START, MESSAGE_PAGE, RangeKind, START_PAGE, Start, slot,
};

use crate::device::DeviceRegisters;
use crate::memory::Window;
use crate::objects::{Gate, Message, Platform};
use crate::page::Page;
#[cfg(target_arch = "x86_64")]
use crate::port::Ports;
use crate::{log, processor, thread};

/// Makes `main(&'static Start) -> u64` the entry of a task that root starts; it returns the exit
/// code.
#[macro_export]
macro_rules! entry {
    ($main:path) => {
        #[unsafe(no_mangle)]
        extern "C" fn native_main() -> ! {
            $crate::start::run($main)
        }
    };
}

/// Makes `main(Boot) -> !` the entry of root, the first task.
#[macro_export]
macro_rules! root_entry {
    ($main:path) => {
        #[unsafe(no_mangle)]
        extern "C" fn native_main() -> ! {
            $crate::start::run_root($main)
        }
    };
}

/// Runs the program of a task; called by [`entry!`](crate::entry) only.
#[doc(hidden)]
pub fn run(main: fn(&Start<'static>) -> u64) -> ! {
    thread::set_first_page(MESSAGE_PAGE);
    log::to_gate(Gate::at(slot::LOG));
    let pointer = core::ptr::with_exposed_provenance(START_PAGE as usize);
    // SAFETY: root maps the start page read-only and never changes it.
    let bytes = unsafe { slice::from_raw_parts(pointer, MAX_START) };
    let code = match Start::decode(bytes) {
        Some(start) => main(&start),
        None => control::code::INTERNAL,
    };
    exit(code, &control::VmmStatistics::ZERO)
}

/// Ends the program: reports the exit code and statistics to root.
pub fn exit(code: u64, statistics: &control::VmmStatistics) -> ! {
    let words = statistics.pack();
    Page::current().set_words(&words);
    let message = Message::new(control::EXITED, [code, 0, 0, 0]).with_page(words.len() as u8);
    let _ = Gate::at(slot::CONTROL).call(message);
    stop()
}

/// Ends the thread by a fault, which root receives through the task's fault gate.
fn stop() -> ! {
    loop {
        processor::undefined();
    }
}

/// Memory ranges of a kind that the start page describes.
pub fn windows<'a>(start: &'a Start, kind: RangeKind) -> impl Iterator<Item = Window> + 'a {
    start.ranges.iter().filter(move |range| range.kind == kind).map(|range| {
        // SAFETY: root keeps the ranges clear of the program's image, stack and pages, and files
        // are constant.
        unsafe {
            match range.kind {
                RangeKind::Private
                | RangeKind::Guest
                | RangeKind::Report
                | RangeKind::Session
                | RangeKind::Channel
                | RangeKind::Dma
                | RangeKind::Registers => Window::new(range.base, range.length),
                RangeKind::Directory | RangeKind::Configuration => {
                    Window::read_only(range.base, range.length)
                }
                RangeKind::Kernel | RangeKind::Initrd => {
                    let length = range.length.next_multiple_of(abi::PAGE_SIZE);
                    Window::read_only(range.base & !(abi::PAGE_SIZE - 1), length)
                }
            }
        }
    })
}

/// Returns the read-only file that root maps for this task.
pub fn file(start: &Start, kind: RangeKind) -> Option<&'static [u8]> {
    let range = start.ranges.iter().find(|range| range.kind == kind)?;
    let fits =
        range.base >= FILES && range.base.checked_add(range.length)? <= FILES + 2 * FILES_ALIGN;
    if !fits {
        return None;
    }
    let pointer = core::ptr::with_exposed_provenance(range.base as usize);
    // SAFETY: root maps files of the bundle there, read-only, and no task has write access.
    Some(unsafe { slice::from_raw_parts(pointer, range.length as usize) })
}

/// Returns the guest memory that the start page describes, at the guest-physical `ranges` (base,
/// length), in order; `None` if its size differs or the ranges are no valid memory layout.
#[cfg(feature = "guest")]
pub fn guest_memory(
    start: &Start,
    ranges: impl Iterator<Item = (u64, u64)>,
) -> Option<vmm_mem::GuestMemory> {
    // Root maps the pieces contiguously.
    let mut next = proto::start::GUEST_MEMORY;
    for window in windows(start, RangeKind::Guest) {
        if window.base() != next {
            return None;
        }
        next += window.length();
    }
    let end = next;
    next = proto::start::GUEST_MEMORY;
    let nothing = vmm_mem::Window { base: 0, length: 0, host: core::ptr::null_mut() };
    let mut all = [nothing; vmm_mem::MAX_RANGES];
    let mut count = 0;
    for (base, length) in ranges {
        let host = core::ptr::with_exposed_provenance_mut(next as usize);
        *all.get_mut(count)? = vmm_mem::Window { base, length, host };
        count += 1;
        next = next.checked_add(length)?;
    }
    if next != end {
        return None;
    }
    // SAFETY: the windows are parts of the guest memory that root mapped writable for this task,
    // checked above; it holds no Rust objects, and the task never unmaps it.
    unsafe { vmm_mem::GuestMemory::new(&all[..count]) }.ok()
}

/// Resources that the kernel passes to root.
pub struct Boot {
    /// The boot page.
    pub info: &'static BootInfo,
    /// The boot bundle; read-only for all tasks.
    pub bundle: &'static [u8],
}

impl Boot {
    /// RAM regions: physical address and memory.
    pub fn ram(&self) -> impl Iterator<Item = (u64, Window)> {
        let count = (self.info.region_count as usize).min(boot::MAX_REGIONS);
        self.info.regions[..count]
            .iter()
            .filter(|region| region.kind == RegionKind::Ram as u32)
            .map(|region| {
                // SAFETY: the kernel maps free RAM there, which is no part of this program.
                (region.base, unsafe {
                    Window::new(boot::PHYSICAL_WINDOW + region.base, region.length)
                })
            })
    }

    /// Returns the pages of device memory at `base..base + length`, to delegate.
    pub fn device_pages(&self, base: u64, length: u64) -> Option<Window> {
        let first = base & !(abi::PAGE_SIZE - 1);
        let end = base.checked_add(length)?.checked_next_multiple_of(abi::PAGE_SIZE)?;
        let count = (self.info.region_count as usize).min(boot::MAX_REGIONS);
        let inside = |region: &boot::Region| {
            region.kind == RegionKind::Device as u32
                && first >= region.base
                && end <= region.base + region.length
        };
        self.info.regions[..count].iter().any(inside).then(|| {
            // SAFETY: the kernel maps device memory there, which holds no Rust object.
            unsafe { Window::new(boot::PHYSICAL_WINDOW + first, end - first) }
        })
    }

    /// Returns the device registers at the physical addresses `base..base + length`, page-aligned.
    pub fn registers(&self, base: u64, length: u64) -> Option<DeviceRegisters> {
        let window =
            self.device_pages(base, length).filter(|_| base.is_multiple_of(abi::PAGE_SIZE))?;
        // SAFETY: the kernel maps device memory there, writable and permanently.
        Some(unsafe { DeviceRegisters::new(window.base(), length) })
    }

    /// Returns bytes of firmware tables, which are not RAM for root.
    pub fn firmware(&self, base: u64, length: usize) -> Option<&'static [u8]> {
        self.device_pages(base, length as u64)?;
        let address = (boot::PHYSICAL_WINDOW + base) as usize;
        // SAFETY: mapped, checked above. The firmware has finished with its tables, and root
        // delegates only device registers, which do not overlap them.
        Some(unsafe { slice::from_raw_parts(core::ptr::with_exposed_provenance(address), length) })
    }

    /// Returns the device tree, if the kernel passes one.
    pub fn device_tree(&self) -> Option<&'static [u8]> {
        let count = (self.info.region_count as usize).min(boot::MAX_REGIONS);
        let mut regions = self.info.regions[..count].iter();
        let region = regions.find(|region| region.kind == RegionKind::DeviceTree as u32)?;
        let offset = self.info.rsdp.checked_sub(region.base)?;
        let length = region.length.checked_sub(offset)? as usize;
        let address = (boot::PHYSICAL_WINDOW + self.info.rsdp) as usize;
        // SAFETY: the kernel maps these pages read-only, and nothing writes them.
        Some(unsafe { slice::from_raw_parts(core::ptr::with_exposed_provenance(address), length) })
    }

    /// Returns the pages of the bundle that hold `offset..offset + length`, to delegate read-only.
    pub fn bundle_pages(&self, offset: u64, length: u64) -> Option<Window> {
        let end = offset.checked_add(length)?;
        if end > self.info.bundle_length {
            return None;
        }
        let first = (self.info.bundle_base + offset) & !(abi::PAGE_SIZE - 1);
        let last = (self.info.bundle_base + end).next_multiple_of(abi::PAGE_SIZE);
        // SAFETY: the bundle is constant.
        Some(unsafe { Window::read_only(boot::PHYSICAL_WINDOW + first, last - first) })
    }
}

/// Runs root; called by [`root_entry!`](crate::root_entry) only.
#[doc(hidden)]
pub fn run_root(main: fn(Boot) -> !) -> ! {
    thread::set_first_page(boot::ROOT_MESSAGE_PAGE);
    log::to_platform(Platform::at(boot::slot::PLATFORM));
    let info = core::ptr::with_exposed_provenance::<BootInfo>(boot::BOOT_INFO_ADDRESS as usize);
    // SAFETY: the kernel maps the boot page read-only and never changes it.
    let info = unsafe { &*info };
    let address = (boot::PHYSICAL_WINDOW + info.bundle_base) as usize;
    // SAFETY: the kernel maps the bundle there; root never creates a writable window of it.
    let bundle = unsafe {
        slice::from_raw_parts(
            core::ptr::with_exposed_provenance(address),
            info.bundle_length as usize,
        )
    };
    main(Boot { info, bundle })
}

/// Port and value that end the machine when root panics; bit 31 marks them as set.
#[cfg(target_arch = "x86_64")]
static PANIC_PORT_WRITE: AtomicU32 = AtomicU32::new(0);

/// Makes a panic of root write `value` to `port` before it resets the machine.
#[cfg(target_arch = "x86_64")]
pub fn on_root_panic(port: u16, value: u8) {
    PANIC_PORT_WRITE.store(1 << 31 | (port as u32) << 8 | value as u32, Ordering::Relaxed);
}

/// Ends the machine by the port that root has chosen, if any.
#[cfg(target_arch = "x86_64")]
fn write_panic_port() {
    let last = PANIC_PORT_WRITE.load(Ordering::Relaxed);
    if last >> 31 != 0
        && let Some(port) = Ports::new((last >> 8) as u16, 1)
    {
        port.write(0, last as u8);
    }
}

/// Reports a panic to root (or, in root, to the kernel's log) and stops.
#[cfg(target_os = "none")]
#[panic_handler]
fn panic(info: &core::panic::PanicInfo) -> ! {
    use core::fmt::Write;
    let mut text = log::Text::new();
    let _ = write!(text, "{info}");
    if thread::first_page() == boot::ROOT_MESSAGE_PAGE {
        root_panicked(text.bytes());
    } else {
        let words = Page::current().set_bytes(text.bytes());
        let length = text.bytes().len() as u64;
        let message = Message::new(control::PANICKED, [length, 0, 0, 0]).with_page(words);
        let _ = Gate::at(slot::CONTROL).call(message);
    }
    stop()
}

#[cfg_attr(not(target_os = "none"), allow(dead_code, reason = "only called when panicking"))]
fn root_panicked(text: &[u8]) {
    let platform = Platform::at(boot::slot::PLATFORM);
    log::write_platform(platform, b"root: ");
    log::write_platform(platform, text);
    log::write_platform(platform, b"\n");
    log::flush(platform);
    #[cfg(target_arch = "x86_64")]
    write_panic_port();
    let _ = platform.reset();
}
