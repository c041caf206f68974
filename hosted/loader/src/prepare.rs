//! Memory of a VM, ready to run.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::__cpuid_count as cpuid;
use std::os::fd::OwnedFd;

use hw_x86::paging::{entry, xcr0};
use proto::hosted::{
    DiskRecord, MAX_DISKS, MAX_NETS, MAX_SHARES, NetRecord, ShareRecord, Start, layout, option,
};
use vmm_boot::Rest;
use vmm_mem::shared::SharedMemory;
use vmm_mem::{GuestMemory, PAGE_SIZE};

use crate::Error;
use crate::image::{Image, physical};

/// Two page tables after the ACPI tables, in memory that the guest's memory map reserves: the root
/// that translates kernel addresses below 2 GiB, and the next level.
const ROOT: u64 = 0xf_0000;
const LEVEL_3: u64 = ROOT + 0x1000;
const TABLE: u64 = entry::PRESENT | entry::WRITE | entry::ACCESSED | entry::DIRTY;
/// Entry of the kernel image in the level 3 table, and entries of the fixmap in the level 2 table.
const IMAGE_ENTRY: u64 = layout::IMAGE >> 30;
const FIXMAP_ENTRIES: [(u64, u64); 2] = [(506, 0), (507, 0x1000)];
/// `__KERNEL_CS`.
const KERNEL_CODE: u64 = 0x10;
/// Configuration of a VM.
#[derive(Clone, Copy, Debug)]
pub struct VmSpec<'a> {
    /// Guest memory in bytes, a multiple of the page size.
    pub memory: u64,
    /// vCPUs, 1 to [`proto::system::MAX_VCPUS`].
    pub vcpus: u8,
    /// Initial RAM disk.
    pub initrd: Option<&'a [u8]>,
    /// Kernel command line.
    pub command_line: &'a str,
    /// Bits of [`proto::hosted::option`].
    pub options: u64,
    /// Least severe messages that are printed: see [`proto::hosted::log`].
    pub log: u64,
    /// Initial size of the balloon in bytes; `None`: no balloon.
    pub balloon: Option<u64>,
    /// Disks.
    pub disks: &'a [DiskRecord],
    /// Networks.
    pub nets: &'a [NetRecord],
    /// Shared directories.
    pub shares: &'a [ShareRecord],
    /// Guest CID of the vsock device, if there is one.
    pub vsock: Option<u32>,
    /// Virtio console in addition to the serial line: see [`proto::hosted::console`].
    pub console: u64,
}

/// Descriptors for a VM's first process.
#[derive(Debug)]
pub struct Prepared {
    /// Guest memory, for [`layout::MEMORY_FD`].
    pub memory: OwnedFd,
    /// Bytes of guest memory below 4 GiB, which come first in the file; the rest is mapped from 4
    /// GiB on.
    pub low: u64,
    /// Shared memory, for [`layout::SHARED_FD`].
    pub shared: OwnedFd,
}

/// Loads a kernel into the memory of a new VM.
pub fn prepare(image: &Image<'_>, machine: &VmSpec<'_>) -> Result<Prepared, Error> {
    let xcr0 = check_host()?;
    check_memory(machine.memory)?;
    check_direct_map(machine.memory)?;
    check_counts(machine)?;
    let chips = vmm_machine::layout_with_pci();
    let host = |action| move |error| Error::Host(action, error);
    // Copies of executable user pages, per vCPU, follow guest memory.
    let copies = if machine.options & option::KEYS != 0 { machine.vcpus.into() } else { 0 };
    let mut memory = guest_memory(machine.memory * (1 + copies))?;
    check_room(image, machine.memory)?;
    // The kernel is at the beginning of guest memory.
    image.write(&mut memory)?;
    let ranges: Vec<_> = vmm_boot::ram_ranges(machine.memory, chips.hole_start).collect();
    let (sites, sites_length) = image.sites();
    // Kernels without these functions patch code by themselves.
    let function = |name| image.symbol(name).map_or(0, crate::image::moved);
    let mut start = Start {
        memory: machine.memory,
        hole: chips.hole_start,
        xcr0,
        cs: KERNEL_CODE,
        kernel_root: ROOT,
        sites,
        sites_length,
        text_poke: function("__text_poke"),
        text_poke_memcpy: function("text_poke_memcpy"),
        vcpus: machine.vcpus.into(),
        options: machine.options,
        disks: machine.disks.len() as u64,
        nets: machine.nets.len() as u64,
        shares: machine.shares.len() as u64,
        vsock: machine.vsock.unwrap_or(0).into(),
        console: machine.console,
        log: machine.log,
        balloon: machine.balloon.map_or(0, |bytes| bytes / PAGE_SIZE + 1),
        ..Start::default()
    };
    memory
        .with(ranges, |memory| fill(memory, image, machine, &chips, &mut start))
        .map_err(host("lay out guest memory"))??;
    let filters = hosted_filters::words(machine.options).map_err(Error::Filters)?;
    // With user process isolation, memory shared by kernel and user processes follows.
    let mailboxes =
        if machine.options & option::USER_PROCESS != 0 { machine.vcpus.into() } else { 0 };
    let mut shared = shared_memory(layout::mailbox(mailboxes, 0))?;
    write_shared(&mut shared, machine, &start, filters)?;
    prepared(memory, shared, machine.memory)
}

fn check_counts(machine: &VmSpec<'_>) -> Result<(), Error> {
    if machine.disks.len() > MAX_DISKS {
        return Err(Error::TooManyDisks(machine.disks.len()));
    }
    if machine.nets.len() > MAX_NETS {
        return Err(Error::TooManyNets(machine.nets.len()));
    }
    if machine.shares.len() > MAX_SHARES {
        return Err(Error::TooManyShares(machine.shares.len()));
    }
    Ok(())
}

/// Writes the loader's records to shared memory.
fn write_shared(
    shared: &mut SharedMemory,
    machine: &VmSpec<'_>,
    start: &Start,
    filters: Vec<u64>,
) -> Result<(), Error> {
    let written = shared.with([(0, layout::SHARED_LENGTH)], |memory| {
        let disks = machine.disks.iter().flat_map(DiskRecord::to_words);
        let disks = (layout::DISKS..).step_by(8).zip(disks);
        let nets = machine.nets.iter().flat_map(NetRecord::to_words);
        let nets = (layout::NETS..).step_by(8).zip(nets);
        let shares = machine.shares.iter().flat_map(ShareRecord::to_words);
        let shares = (layout::SHARES..).step_by(8).zip(shares);
        let filters = (layout::FILTERS..).step_by(8).zip(filters);
        let words = (0..).step_by(8).zip(start.to_words()).chain(disks).chain(nets);
        words.chain(shares).chain(filters).try_for_each(|(at, word)| memory.write(at, word))
    });
    written
        .map_err(|error| Error::Host("write shared memory", error))?
        .map_err(vmm_boot::BootError::from)?;
    Ok(())
}

/// Creates a VM with `memory` bytes of memory; its own process loads the kernel.
pub fn empty(memory: u64) -> Result<Prepared, Error> {
    check_memory(memory)?;
    prepared(guest_memory(memory)?, shared_memory(layout::SHARED_LENGTH)?, memory)
}

/// Name of the memory file with guest memory.
pub const GUEST_MEMORY: &str = "parador-guest";

fn guest_memory(bytes: u64) -> Result<SharedMemory, Error> {
    SharedMemory::new(GUEST_MEMORY, bytes)
        .map_err(|error| Error::Host("create guest memory", error))
}

fn shared_memory(bytes: u64) -> Result<SharedMemory, Error> {
    SharedMemory::new("parador-shared", bytes)
        .map_err(|error| Error::Host("create shared memory", error))
}

fn prepared(memory: SharedMemory, shared: SharedMemory, length: u64) -> Result<Prepared, Error> {
    let descriptors = (memory.into_descriptor(), shared.into_descriptor());
    let (Ok(memory), Ok(shared)) = descriptors else {
        return Err(Error::Lacking("descriptors left"));
    };
    Ok(Prepared { memory, low: length.min(vmm_machine::layout_with_pci().hole_start), shared })
}

fn check_room(image: &Image<'_>, available: u64) -> Result<(), Error> {
    let needed = image.end();
    if needed > available {
        return Err(vmm_boot::BootError::TooLittleMemory { needed, available }.into());
    }
    Ok(())
}

/// Variables of Linux that its start-up code sets.
const VARIABLES: [(&str, u64); 4] = [
    ("page_offset_base", layout::DIRECT),
    ("vmalloc_base", layout::VMALLOC),
    ("vmemmap_base", layout::VMEMMAP),
    ("phys_base", 0),
];

fn fill(
    memory: &GuestMemory,
    image: &Image<'_>,
    machine: &VmSpec<'_>,
    chips: &vmm_boot::PcLayout,
    start: &mut Start,
) -> Result<(), Error> {
    let failed = |error| Error::Boot(vmm_boot::BootError::from(error));
    let rest = Rest {
        layout: chips,
        vcpus: machine.vcpus,
        end: image.end(),
        initrd: machine.initrd,
        command_line: machine.command_line.as_bytes(),
    };
    image.relocate(memory)?;
    start.rdi = vmm_boot::load_rest(memory, &rest)?;
    let write = |at: u64, value: u64| memory.write(at, value).map_err(failed);
    let table = |name| place(image, name);
    for (name, value) in VARIABLES {
        write(table(name)?, value)?;
    }
    // Page tables as Linux' start-up code leaves them, but in the lower half.
    let (level_2, level_1) = (table("level2_kernel_pgt")?, table("level1_fixmap_pgt")?);
    memory.fill(ROOT, 2 * 0x1000, 0).map_err(failed)?;
    write(ROOT, LEVEL_3 | TABLE)?;
    write(LEVEL_3 + 8 * IMAGE_ENTRY, level_2 | TABLE)?;
    for (index, offset) in FIXMAP_ENTRIES {
        write(level_2 + 8 * index, (level_1 + offset) | TABLE)?;
    }
    let top = table("early_top_pgt")?;
    memory.fill(top, 0x1000, 0).map_err(failed)?;
    write(top, LEVEL_3 | TABLE)?;
    start.cr3 = top;
    let read = |name| -> Result<u64, Error> { memory.read(table(name)?).map_err(failed) };
    start.rip = layout::IMAGE + table("x86_64_start_kernel")?;
    // As after a call; the return address is not used.
    start.rsp = read("initial_stack")?.checked_sub(8).ok_or(Error::UNUSABLE)?;
    start.gs_base = read("initial_gs")?;
    let descriptor = table("early_gdt_descr")?;
    start.gdt_limit = memory.read::<u16>(descriptor).map_err(failed)?.into();
    start.gdt = memory_word(memory, descriptor + 2).map_err(failed)?;
    let words = [
        (&mut start.code, "_text"),
        (&mut start.code_end, "_etext"),
        (&mut start.initial_code, "initial_code"),
        (&mut start.initial_stack, "initial_stack"),
        (&mut start.initial_gs, "initial_gs"),
        (&mut start.early_gdt, "early_gdt_descr"),
    ];
    for (word, name) in words {
        *word = layout::IMAGE + table(name)?;
    }
    if start.code_end < start.code {
        return Err(Error::UNUSABLE);
    }
    start.initial_cr3 = table("init_top_pgt")?;
    Ok(())
}

/// Returns the guest-physical address of a symbol, which is in the kernel image.
fn place(image: &Image<'_>, name: &'static str) -> Result<u64, Error> {
    let address = physical(image.symbol(name)?);
    if address < image.end() { Ok(address) } else { Err(Error::UNUSABLE) }
}

/// Reads eight unaligned bytes.
fn memory_word(memory: &GuestMemory, at: u64) -> Result<u64, vmm_mem::MemoryError> {
    let mut bytes = [0; 8];
    memory.read_slice(at, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Checks that the host has this much memory.
///
/// # Errors
/// [`Error::TooMuchMemory`]
pub fn check_memory(wanted: u64) -> Result<(), Error> {
    let host = rustix::system::sysinfo();
    let unit = u64::from(host.mem_unit.max(1));
    // The kernel reports memory in units of `mem_unit` bytes.
    let available = host.totalram.saturating_add(host.totalswap).saturating_mul(unit);
    if wanted > available { Err(Error::TooMuchMemory { wanted, available }) } else { Ok(()) }
}

/// Checks that guest memory fits into the direct map of the guest kernel. Of each VM with more than
/// 3 GiB the hole below 4 GiB is there, too.
fn check_direct_map(memory: u64) -> Result<(), Error> {
    const LIMIT: u64 = layout::VMALLOC - layout::DIRECT - (4 << 30);
    if memory > LIMIT { Err(Error::MemoryLimit { memory, limit: LIMIT }) } else { Ok(()) }
}

/// Registers after `CPUID`, which only x86 CPUs have.
#[cfg(not(target_arch = "x86_64"))]
#[derive(Default)]
struct CpuidResult {
    eax: u32,
    ebx: u32,
    ecx: u32,
    edx: u32,
}

/// A CPU without the instruction has none of the features.
#[cfg(not(target_arch = "x86_64"))]
fn cpuid(_leaf: u32, _subleaf: u32) -> CpuidResult {
    CpuidResult::default()
}

/// Checks that host CPU and kernel support the process back end. Returns the extended state of the
/// CPU that a guest may use (`XCR0`). The host kernel may have disabled a part of it, which the
/// wedge excludes: it reads `XCR0`.
///
/// # Errors
/// [`Error::Lacking`]
pub fn check_host() -> Result<u64, Error> {
    check_processor(cpuid(1, 0).ecx, rustix::param::linux_hwcap().1)?;
    let state = cpuid(0xd, 0);
    check_state(state.ebx)?;
    let offered = u64::from(state.edx) << 32 | u64::from(state.eax);
    Ok(offered & (xcr0::X87 | xcr0::SSE | xcr0::AVX | xcr0::AVX512))
}

/// Checks that the wedge has room for the extended state of the host (`CPUID` leaf 0xd, `EBX`), in
/// bytes: also for the components that guests do not get.
fn check_state(length: u32) -> Result<(), Error> {
    match length as usize {
        ..=layout::EXTENDED_STATE => Ok(()),
        _ => Err(Error::Lacking("CPU whose extended state (XSAVE) fits into 16 KiB")),
    }
}

/// Returns whether the CPU and the host kernel have protection keys (`OSPKE`; SDM vol. 2, CPUID),
/// and no instruction encoding that the wedge does not scan for (`APX_F`; Intel's APX Architecture
/// Specification, 3.1.4.1).
pub fn has_keys() -> bool {
    const OSPKE: u32 = 1 << 4;
    const APX: u32 = 1 << 21;
    let features = cpuid(7, 0);
    let has_apx = features.eax >= 1 && cpuid(7, 1).edx & APX != 0;
    features.ecx & OSPKE != 0 && !has_apx
}

/// Checks the required features in `CPUID` leaf 1 (`ECX`) and in `AT_HWCAP2`.
fn check_processor(features: u32, hwcap2: usize) -> Result<(), Error> {
    const XSAVE: u32 = 1 << 26;
    const OSXSAVE: u32 = 1 << 27;
    if features & (XSAVE | OSXSAVE) != XSAVE | OSXSAVE {
        return Err(Error::Lacking("XSAVE"));
    }
    // `HWCAP2_FSGSBASE` (`arch/x86/include/uapi/asm/hwcap2.h` in Linux): the host kernel enables
    // the instructions in user mode.
    const FSGSBASE: usize = 1 << 1;
    if hwcap2 & FSGSBASE == 0 {
        return Err(Error::Lacking(
            "FSGSBASE in user mode (requires a CPU of 2013 and Linux 5.9, or newer)",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_stays_below_the_vmalloc_area() {
        let limit = 1020 << 30;
        check_direct_map(limit).unwrap();
        let error = check_direct_map(limit + PAGE_SIZE).unwrap_err();
        assert!(error.to_string().contains("limit 1044480 MiB"), "{error}");
        assert_eq!(error.help(), Some("reduce --memory"));
        let hole = vmm_machine::layout_with_pci().hole_start;
        let ranges = vmm_boot::ram_ranges(limit, hole);
        let end = ranges.map(|(start, length)| start + length).max();
        assert!(end.is_some_and(|end| layout::DIRECT + end <= layout::VMALLOC));
    }

    #[test]
    fn hosts_that_lack_something() {
        const XSAVE: u32 = 3 << 26;
        let lacking = |features, hwcap2| check_processor(features, hwcap2).unwrap_err().to_string();
        assert!(lacking(0, 2).contains("XSAVE"));
        assert!(lacking(1 << 26, 2).contains("XSAVE"));
        assert!(lacking(XSAVE, 0).contains("FSGSBASE"));
        assert!(lacking(XSAVE, 1).contains("FSGSBASE"));
        check_processor(XSAVE, 2).unwrap();
        check_state(11_008).unwrap();
        #[cfg(target_arch = "x86_64")]
        assert_ne!(check_host().map_or(xcr0::X87, |offered| offered & xcr0::X87), 0);
        assert!(check_state(0x4001).unwrap_err().to_string().contains("XSAVE"));
    }
}
