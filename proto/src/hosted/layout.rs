//! Virtual addresses in a guest process, and file descriptors that it inherits.
//!
//! The part above guest user mode resembles Linux's own upper half. The image and its modules are
//! within reach of sign-extended 32-bit addresses.

/// Second mapping of guest-physical memory, from address 0 on, for the kernel image.
pub const IMAGE: u64 = 0x4000_0000;
/// Largest length of the image mapping in bytes.
pub const IMAGE_LENGTH: u64 = 0x1000_0000;
/// Modules of the guest kernel.
pub const MODULES: u64 = 0x5000_0000;
/// End of the modules, exclusive.
pub const MODULES_END: u64 = 0x7000_0000;
/// Program image of the wedge.
pub const WEDGE: u64 = 0x7000_0000;
/// Memory shared by all processes of a VM; the [`Start`](super::Start) record is at its
/// beginning.
pub const SHARED: u64 = 0x7100_0000;
/// Length of the shared memory in bytes.
pub const SHARED_LENGTH: u64 = 0x0300_0000;
/// Stubs of rewritten sites, in shared memory.
pub const STUBS: u64 = 0x7200_0000;
/// Length of the stubs in bytes; the tables of the write profiler follow.
pub const STUBS_LENGTH: u64 = 0x0080_0000;
/// Private memory of one process.
pub const PRIVATE: u64 = 0x7400_0000;
/// Words that the device process shares with a process that it has created, until that process
/// has installed its seccomp filter.
pub const SETUP: u64 = 0x7780_0000;
/// Length of [`SETUP`] in bytes.
pub const SETUP_LENGTH: u64 = 0x1000;
/// Counters of the devices, in the device process until it has created the workers, and in the
/// workers.
pub const COUNTERS: u64 = 0x7790_0000;
/// Length of the counters in bytes.
pub const COUNTERS_LENGTH: u64 = 0x8000;
/// Mailbox shared by the kernel process and the user process of an address space, if user mode
/// runs in processes of its own.
pub const MAILBOX: u64 = 0x7700_0000;
/// Length of a mailbox in bytes.
pub const MAILBOX_LENGTH: u64 = 0x1_0000;
/// Offset of a slot's mailbox in the file of the shared memory.
pub const fn mailbox(vcpu: usize, slot: usize) -> u64 {
    SHARED_LENGTH + (vcpu * SLOTS + slot) as u64 * MAILBOX_LENGTH
}
/// Largest number of guest address spaces of one vCPU that have a process each.
pub const SLOTS: usize = 64;
/// End of the wedge's own addresses, exclusive.
pub const WEDGE_END: u64 = 0x7800_0000;
/// Fixed mappings of the guest kernel.
pub const FIXMAP: u64 = 0x7f00_0000;
/// End of the low addresses that guest user mode must not use; they begin at [`IMAGE`].
pub const LOW_END: u64 = 0x8000_0000;
/// End of guest user mode, exclusive.
pub const TASK_SIZE: u64 = 0x3fff_ffff_f000;
/// Direct map: all guest-physical memory.
pub const DIRECT: u64 = 0x4000_0000_0000;
/// `vmalloc` area of the guest kernel, and everything up to [`VMEMMAP`].
pub const VMALLOC: u64 = 0x4100_0000_0000;
/// Array of page descriptors of the guest kernel (`vmemmap`).
pub const VMEMMAP: u64 = 0x6a00_0000_0000;
/// End of the addresses that the guest can use, exclusive.
pub const GUEST_END: u64 = 0x7000_0000_0000;
/// All guest-physical memory, mapped for the wedge.
pub const WINDOW: u64 = GUEST_END;
/// Copies of the pages that user mode of one vCPU executes, with protection keys. The area is
/// as long as guest memory. In the file of guest memory the copies of all vCPUs follow guest
/// memory, one vCPU after another.
pub const COPIES: u64 = 0x7400_0000_0000;
/// First address that the wedge leaves to the host.
pub const HOST: u64 = 0x7800_0000_0000;
/// The VM's configuration: private to each process, and read-only before the guest runs. The
/// seccomp filter of guest processes refuses mmap(2), munmap(2) and mprotect(2) from here on.
pub const CONFIG: u64 = 0x7c00_0000_0000;
/// Length of [`CONFIG`] in bytes.
pub const CONFIG_LENGTH: u64 = 0x10_0000;
/// CPU sets that a guest process may pass to sched_setaffinity(2), read-only: one for each CPU,
/// indexed by its number, then one of all CPUs that the VM was started on.
pub const CPU_SETS: u64 = CONFIG + CONFIG_LENGTH;
/// Length of one CPU set in bytes.
pub const CPU_SET_LENGTH: u64 = 128;
/// Number of host CPUs that a set can hold.
pub const CPU_SET_CPUS: u64 = CPU_SET_LENGTH * 8;
/// Length of all CPU sets in bytes, whole pages.
pub const CPU_SETS_LENGTH: u64 = (CPU_SET_CPUS * CPU_SET_LENGTH) + 0x1000;

/// Serial input.
pub const INPUT_FD: u32 = 0;
/// Serial output.
pub const OUTPUT_FD: u32 = 1;
/// Messages of the wedge.
pub const ERRORS_FD: u32 = 2;
/// Guest-physical memory.
pub const MEMORY_FD: u32 = 3;
/// Shared memory.
pub const SHARED_FD: u32 = 4;
/// Doorbell of the device process (eventfd(2)).
pub const DOORBELL_FD: u32 = 5;
/// First disk; the other disks follow.
pub const DISKS_FD: u32 = 6;
/// First network; the other networks follow, then the stream of vsock packets.
pub const NETS_FD: u32 = 16;

/// Control socket between `parador` and the device process: see [`control`](super::control).
pub const CONTROL_FD: u32 = 32;
/// Socket of the virtio console, for both directions.
pub const CONSOLE_FD: u32 = 33;

/// The io_uring(7) of a disk worker.
pub const RING_FD: u32 = 34;
/// Counters of the devices: see [`counters`](super::counters). Processes that run a guest close it
/// first.
pub const COUNTERS_FD: u32 = 35;
/// Descriptor of the device process that is readable after the exit of a child (signalfd(2)).
pub const EXITS_FD: u32 = 36;
/// Highest of these numbers: processes of a VM need a limit of open files above it.
pub const LAST_FD: u32 = EXITS_FD;

/// Signal by which the device process notifies a guest process of events (`SIGUSR2`).
///
/// It is a standard signal, of which the host keeps one instance pending. Real-time signals
/// would queue while the process has no CPU, and each would push a frame, which overflows the
/// signal stack.
pub const KICK_SIGNAL: u32 = 12;

/// Linux's vsyscall page, outside of the addresses that user mode can map
/// (`Documentation/arch/x86/x86_64/mm.rst` in Linux). It holds one call at each multiple of 1
/// KiB.
pub const VSYSCALL: u64 = 0xffff_ffff_ff60_0000;
/// System call numbers of the vsyscalls: `gettimeofday`, `time`, `getcpu`.
pub const VSYSCALL_CALLS: [u32; 3] = [96, 201, 309];

/// Offset of the disk records in shared memory.
pub const DISKS: u64 = 0x800;
/// Offset of the network records in shared memory.
pub const NETS: u64 = 0xa00;
/// Offset of the records of shared directories in shared memory.
pub const SHARES: u64 = 0xb00;
/// Offset of the vsock packet rings in shared memory.
pub const VSOCK: u64 = 0x0280_0000;
/// Offset of the [`Queue`](crate::requests::Queue)s in shared memory: of the disks, then of the
/// shared directories.
pub const QUEUES: u64 = 0x02b0_0000;
/// Offset of [`VcpuStatistics`](super::VcpuStatistics) in shared memory, one for each vCPU.
pub const STATISTICS: u64 = 0x02ef_0000;
/// Offset of [`BalloonReport`](super::balloon::BalloonReport) in shared memory.
pub const BALLOON: u64 = 0x02ef_6000;
/// Offset of [`IdleRecords`](super::idle::IdleRecords) in shared memory.
pub const IDLE: u64 = 0x02ef_7000;
/// Offset of [`DebugState`](super::debug::DebugState) in shared memory.
pub const DEBUG: u64 = 0x02ef_8000;
/// Space for the extended state of a processor (XSAVE) in bytes; the largest today, with AMX, is
/// 11 KiB.
pub const EXTENDED_STATE: usize = 16 << 10;
/// Offset of [`Filters`](super::Filters) in shared memory.
pub const FILTERS: u64 = 0x02f0_0000;
