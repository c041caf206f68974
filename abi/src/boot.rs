//! Initial state of root: boot page, first capabilities, and address-space layout. Tasks have 512
//! GiB on every processor; what need not be larger is at its lower end.

/// Address of [`BootInfo`] in root, mapped read-only.
pub const BOOT_INFO_ADDRESS: u64 = 0x3f_ff00_0000;
/// Address of the message page of root's first thread.
pub const ROOT_MESSAGE_PAGE: u64 = 0x3f_ff10_0000;
/// Top of root's first stack, which grows down and has [`ROOT_STACK_PAGES`] pages.
pub const ROOT_STACK_TOP: u64 = 0x3f_ff30_0000;
/// Length of root's first stack in pages.
pub const ROOT_STACK_PAGES: u64 = 96;
/// Base of the window in which root's physical memory is mapped: physical address `p` at
/// `PHYSICAL_WINDOW + p`; RAM write-back, device regions uncached.
pub const PHYSICAL_WINDOW: u64 = 0x40_0000_0000;

/// Root's first capabilities.
pub mod slot {
    /// Root's own task.
    pub const TASK: u64 = 1;
    /// Root's first thread.
    pub const THREAD: u64 = 2;
    /// Scheduling context of that thread.
    pub const SCHED_CONTEXT: u64 = 3;
    /// Factory with all of the kernel's memory.
    pub const FACTORY: u64 = 4;
    /// Platform control.
    pub const PLATFORM: u64 = 5;
    /// First free slot.
    pub const FREE: u64 = 16;
}

/// "PARADOR" and the ABI generation.
pub const BOOT_MAGIC: u64 = 0x0152_4f44_4152_4150;

/// Kind of a [`Region`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum RegionKind {
    /// Free RAM, at root's disposal.
    Ram = 1,
    /// Boot bundle ([`crate::bundle`]), in RAM.
    Bundle = 2,
    /// Device memory, mapped uncached.
    Device = 3,
    /// Device tree (AArch64), in RAM, read-only.
    DeviceTree = 4,
}

/// Physical range owned by root, mapped at `PHYSICAL_WINDOW + base`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Region {
    /// First byte.
    pub base: u64,
    /// Length in bytes, a multiple of the page size.
    pub length: u64,
    /// [`RegionKind`] as a number; 0 marks an unused entry.
    pub kind: u32,
    /// Reserved, 0.
    pub reserved: u32,
}

/// Maximum number of regions in [`BootInfo`].
pub const MAX_REGIONS: usize = 128;

/// The boot page.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(4096))]
pub struct BootInfo {
    /// [`BOOT_MAGIC`].
    pub magic: u64,
    /// [`crate::ABI_VERSION`].
    pub abi_version: u32,
    /// Number of started CPUs, which are indexed from 0.
    pub cpus: u32,
    /// TSC frequency in kHz; on AArch64 that of the system counter.
    pub tsc_khz: u64,
    /// Physical address of the ACPI RSDP, 0 if none; on AArch64 that of the device tree.
    pub rsdp: u64,
    /// Pages of kernel memory available in root's factory at start.
    pub quota_pages: u64,
    /// Bit 0 ([`FEATURE_NESTED`]): VMs with nested paging are supported. Bit 1
    /// ([`FEATURE_GICV2`]): the interrupt controller is a GICv2. Bit 2 ([`FEATURE_AARCH32`]):
    /// vCPUs may be 32-bit ones.
    pub features: u64,
    /// `XCR0` bits that guests may enable.
    pub xcr0_mask: u64,
    /// Physical base of the bundle.
    pub bundle_base: u64,
    /// Length of the bundle in bytes.
    pub bundle_length: u64,
    /// Number of used entries of `regions`.
    pub region_count: u64,
    /// Physical ranges owned by root.
    pub regions: [Region; MAX_REGIONS],
}

/// Bit of [`BootInfo::features`]: SVM with nested paging, or stage 2 of AArch64.
pub const FEATURE_NESTED: u64 = 1;
/// Bit of [`BootInfo::features`]: the interrupt controller, and so that of guests, is a GICv2
/// (AArch64).
pub const FEATURE_GICV2: u64 = 2;
/// Bit of [`BootInfo::features`]: the first CPU has AArch32 at EL1.
pub const FEATURE_AARCH32: u64 = 4;

const _: () = assert!(core::mem::size_of::<BootInfo>() == 4096);

/// Kernel counters, written to the message page by `PlatformAction::Stats`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct KernelStats {
    /// Kernel entries by system call.
    pub system_calls: u64,
    /// Host interrupts.
    pub interrupts: u64,
    /// World switches into guests.
    pub vm_entries: u64,
    /// VM exits handled in the kernel, without the VMM.
    pub exits_handled: u64,
    /// Kernel pages in use.
    pub pages_used: u64,
    /// Total number of kernel pages.
    pub pages_total: u64,
    /// Context switches between threads.
    pub switches: u64,
    /// TLB shootdowns sent to other CPUs.
    pub shootdowns: u64,
}

impl KernelStats {
    /// Counters in field order, as the message page holds them.
    pub const fn words(self) -> [u64; 8] {
        [
            self.system_calls,
            self.interrupts,
            self.vm_entries,
            self.exits_handled,
            self.pages_used,
            self.pages_total,
            self.switches,
            self.shootdowns,
        ]
    }
}
