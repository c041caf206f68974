//! Layout of the memory that a loader and the wedge share when a guest runs in Linux processes: the
//! [`Start`] record at offset 0, one record for each disk, network and shared directory, seccomp
//! filters and counters.
//!
//! Records consist of 64-bit little-endian words in the order of the fields.

use core::sync::atomic::AtomicU64;

/// Magic number, first word of the record: "PARADORW".
pub const MAGIC: u64 = u64::from_le_bytes(*b"PARADORW");
/// Version of the record.
pub const VERSION: u64 = 8;

/// Virtual addresses in a guest process, and file descriptors that it inherits.
///
/// The part above guest user mode resembles Linux's own upper half. The image and its modules are
/// within reach of sign-extended 32-bit addresses.
pub mod layout {
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
    pub const NETS: u64 = 0x900;
    /// Offset of the records of shared directories in shared memory.
    pub const SHARES: u64 = 0xa00;
    /// Offset of the vsock packet rings in shared memory.
    pub const VSOCK: u64 = 0x0280_0000;
    /// Offset of the [`Queue`](crate::requests::Queue)s in shared memory: of the disks, then of the
    /// shared directories.
    pub const QUEUES: u64 = 0x02c0_0000;
    /// Offset of [`VcpuStatistics`](super::VcpuStatistics) in shared memory, one for each vCPU.
    pub const STATISTICS: u64 = 0x02ef_0000;
    /// Offset of [`DebugState`](super::debug::DebugState) in shared memory.
    pub const DEBUG: u64 = 0x02ef_8000;
    /// Offset of [`Filters`](super::Filters) in shared memory.
    pub const FILTERS: u64 = 0x02f0_0000;
}

/// Seccomp filters of the VM's processes, one for each kind of process. A word is one instruction
/// (`struct sock_filter` in Linux).
#[derive(Clone, Copy, Debug)]
pub struct Filters {
    /// For each filter its length in instructions, then the instructions.
    pub programs: [[u64; Self::WORDS]; Self::COUNT],
}

impl Filters {
    /// Words of each filter, its length included.
    pub const WORDS: usize = 512;
    /// Number of filters.
    pub const COUNT: usize = 8;
    /// Index of the filter of guest processes.
    pub const GUEST: usize = 0;
    /// Index of the filter of disk workers.
    pub const WORKER: usize = 1;
    /// Index of the filter of network workers.
    pub const NET: usize = 2;
    /// Offset from these three indices to the variants that may also send [`layout::KICK_SIGNAL`];
    /// used where the host confines signals to processes of the VM.
    pub const KICKS: usize = 3;
    /// Index of the filter of the device process.
    pub const DEVICE: usize = 6;
    /// Index of the filter of the thread that runs user mode in a user process.
    pub const USER_THREAD: usize = 7;
}

const _: () = assert!(layout::FILTERS + size_of::<Filters>() as u64 <= layout::SHARED_LENGTH);

/// Largest number of disks of a VM.
pub const MAX_DISKS: usize = 4;
/// Largest number of networks of a VM.
pub const MAX_NETS: usize = 4;
/// Largest number of shared directories of a VM.
pub const MAX_SHARES: usize = 4;
/// Number of request queues.
pub const MAX_QUEUES: usize = MAX_DISKS + MAX_SHARES;

const _: () = assert!(
    layout::QUEUES + size_of::<[crate::requests::Queue; MAX_QUEUES]>() as u64 <= layout::STATISTICS
);

macro_rules! record {
    ($($(#[$doc:meta])* $field:ident,)*) => {
        /// The loader's record.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct Start {
            $($(#[$doc])* pub $field: u64,)*
        }

        impl Start {
            /// Words of the record, magic number and version included.
            pub const WORDS: usize = 2 + [$(stringify!($field)),*].len();

            /// Encodes the record.
            pub fn to_words(&self) -> [u64; Self::WORDS] {
                [MAGIC, VERSION, $(self.$field,)*]
            }

            /// Decodes the record; `None` if magic number or version differ.
            pub fn from_words(words: &[u64; Self::WORDS]) -> Option<Self> {
                let [MAGIC, VERSION, $($field,)*] = *words else { return None };
                Some(Self { $($field,)* })
            }
        }
    };
}

record! {
    /// Guest memory in bytes.
    memory,
    /// Guest-physical end of memory below 4 GiB; the rest begins at 4 GiB.
    hole,
    /// XSAVE components that the guest may enable (`XCR0`).
    xcr0,
    /// Entry point of the kernel.
    rip,
    /// Initial stack pointer.
    rsp,
    /// First argument of the entry point.
    rdi,
    /// Base of `GS`.
    gs_base,
    /// Guest-physical address of the initial root page table.
    cr3,
    /// Linear address of the global descriptor table.
    gdt,
    /// Limit of the global descriptor table.
    gdt_limit,
    /// Code segment selector.
    cs,
    /// Guest-physical address of the page table that translates [`layout::IMAGE`] to
    /// [`layout::LOW_END`] in every address space.
    kernel_root,
    /// Linear address of the table of patch sites.
    sites,
    /// Length of the table in bytes.
    sites_length,
    /// Linear address of Linux's `__text_poke(how, to, from, length)`, which the wedge replaces; 0:
    /// none.
    text_poke,
    /// Linear address of `text_poke_memcpy`, the value of `how` for a copy.
    text_poke_memcpy,
    /// Number of vCPUs.
    vcpus,
    /// Linear address of the variable in which Linux leaves the entry point of a secondary CPU.
    initial_code,
    /// Linear address of the variable with a secondary CPU's stack pointer.
    initial_stack,
    /// Linear address of the variable with a secondary CPU's `GS` base.
    initial_gs,
    /// Linear address of a secondary CPU's GDT descriptor: limit, then base.
    early_gdt,
    /// Guest-physical address of the root page table of secondary CPUs.
    initial_cr3,
    /// Linear address of the kernel's code.
    code,
    /// End of the kernel's code, exclusive.
    code_end,
    /// Options: bits of [`option`].
    options,
    /// Number of disks.
    disks,
    /// Number of networks.
    nets,
    /// Least severe messages that are printed: see [`log`].
    log,
    /// Target of the balloon in pages of 4 KiB, plus 1; 0: the guest has no balloon.
    balloon,
    /// Number of shared directories.
    shares,
    /// The guest's vsock CID; 0: no vsock device.
    vsock,
    /// 1: the guest has a virtio console in addition to the serial port.
    console,
}

const _: () = assert!(Start::WORDS as u64 * 8 <= layout::DISKS);
const _: () = assert!(layout::DISKS + 8 * (MAX_DISKS * DiskRecord::WORDS) as u64 <= layout::NETS);
const _: () = assert!(layout::NETS + 8 * (MAX_NETS * NetRecord::WORDS) as u64 <= layout::SHARES);
const _: () = assert!(layout::DISKS_FD + MAX_DISKS as u32 <= layout::NETS_FD);
const _: () = assert!(layout::SHARES + 8 * (MAX_SHARES * ShareRecord::WORDS) as u64 <= 0x1000);

/// Record of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DiskRecord {
    /// Sectors of 512 bytes.
    pub sectors: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// Another process carries the requests out; the wedge inherits no descriptor for it.
    pub is_external: bool,
    /// Serial number reported to the guest, padded with zeros.
    pub serial: [u8; 20],
}

impl DiskRecord {
    /// Words of the record.
    pub const WORDS: usize = 5;

    /// Encodes the record.
    pub fn to_words(&self) -> [u64; Self::WORDS] {
        let flags = u64::from(self.read_only) | u64::from(self.is_external) << 1;
        let mut words = [self.sectors, flags, 0, 0, 0];
        pack(&self.serial, &mut words[2..]);
        words
    }

    /// Decodes the record.
    pub fn from_words(words: &[u64; Self::WORDS]) -> Self {
        let [sectors, flags, name @ ..] = words;
        let mut serial = [0; 20];
        unpack(name, &mut serial);
        Self { sectors: *sectors, read_only: flags & 1 != 0, is_external: flags & 2 != 0, serial }
    }
}

/// Record of a shared directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ShareRecord {
    /// Mount tag reported to the guest, padded with zeros.
    pub tag: [u8; 32],
}

impl ShareRecord {
    /// Words of the record.
    pub const WORDS: usize = 4;

    /// Encodes the record.
    pub fn to_words(&self) -> [u64; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        pack(&self.tag, &mut words);
        words
    }

    /// Decodes the record.
    pub fn from_words(words: &[u64; Self::WORDS]) -> Self {
        let mut share = Self::default();
        unpack(words, &mut share.tag);
        share
    }
}

/// Packs bytes into words; the last word is padded with zeros.
fn pack(bytes: &[u8], to: &mut [u64]) {
    for (word, bytes) in to.iter_mut().zip(bytes.chunks(8)) {
        let mut all = [0; 8];
        all[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(all);
    }
}

fn unpack(words: &[u64], to: &mut [u8]) {
    for (bytes, word) in to.chunks_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
    }
}

/// Record of a network.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NetRecord {
    /// MAC address of the guest's network card.
    pub mac: [u8; 6],
    /// MTU reported to the guest; 0: none is reported.
    pub mtu: u16,
    /// Name of the tap device, padded with zeros; the descriptor is an open `/dev/net/tun`. All
    /// zeros: the descriptor is a stream of frames, each preceded by its length as 32 bits,
    /// big-endian, as in `passt` and QEMU's `-netdev stream`.
    pub tap: [u8; 16],
}

impl NetRecord {
    /// Words of the record.
    pub const WORDS: usize = 3;

    /// Encodes the record.
    pub fn to_words(&self) -> [u64; Self::WORDS] {
        let [a, b, c, d, e, f] = self.mac;
        let [low, high] = self.mtu.to_le_bytes();
        let (first, last) = self.tap.split_at(8);
        let word =
            |half: &[u8]| half.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        [u64::from_le_bytes([a, b, c, d, e, f, low, high]), word(first), word(last)]
    }

    /// Decodes the record.
    pub fn from_words(words: &[u64; Self::WORDS]) -> Self {
        let [a, b, c, d, e, f, low, high] = words[0].to_le_bytes();
        let mut tap = [0; 16];
        tap[..8].copy_from_slice(&words[1].to_le_bytes());
        tap[8..].copy_from_slice(&words[2].to_le_bytes());
        Self { mac: [a, b, c, d, e, f], mtu: u16::from_le_bytes([low, high]), tap }
    }

    /// Returns whether the descriptor is that of a tap device.
    pub fn is_tap(&self) -> bool {
        self.tap != [0; 16]
    }
}

/// Commands on [`layout::CONTROL_FD`], one byte each. The device process answers a command with the
/// same byte on completion.
pub mod control {
    /// Stop the guest processes.
    pub const PAUSE: u8 = b'p';
    /// Continue the guest processes.
    pub const RESUME: u8 = b'r';
    /// Press the power button.
    pub const POWER_BUTTON: u8 = b'b';
    /// Stop the vCPUs for a debugger.
    pub const HALT: u8 = b'h';
    /// Continue the vCPUs that a debugger has released.
    pub const GO: u8 = b'g';
    /// From the device process only: a vCPU has stopped for a debugger.
    pub const HALTED: u8 = b'H';
    /// From the device process only: a guest process was created.
    pub const PROCESS_CREATED: u8 = b'n';
    /// From the device process only: the guest is about to execute its first instruction.
    pub const STARTED: u8 = b's';
}

/// Exit codes of VMs (`docs/spec/exit-codes.md`) that a guest can cause.
pub mod exit {
    /// Largest exit code that a guest chooses itself, from 0 on.
    pub const LAST_CHOSEN: u8 = 63;
    /// Panic of the guest kernel.
    pub const PANIC: u8 = 80;
    /// Triple fault, or an unhandled fault.
    pub const FAULT: u8 = 81;
    /// Reset by the guest.
    pub const RESET: u8 = 83;

    /// Signals by which Linux ends a process for an action of its own: `SIGILL`, `SIGTRAP`,
    /// `SIGABRT`, `SIGBUS`, `SIGFPE`, `SIGSEGV`, `SIGPIPE`, `SIGXFSZ` and `SIGSYS` (signal(7),
    /// x86).
    pub const SELF_INFLICTED: [u32; 9] = [4, 5, 6, 7, 8, 11, 13, 25, 31];

    /// Returns whether a guest may cause this exit code.
    pub const fn is_guest_code(code: u8) -> bool {
        matches!(code, 0..=LAST_CHOSEN | PANIC | FAULT | RESET)
    }
}

/// Counters of one vCPU. The guest can overwrite them: they are for display only.
#[derive(Debug)]
#[repr(C)]
pub struct VcpuStatistics {
    /// Entries into the wedge by kind of patch site, indexed by the kind's number.
    pub sites: [AtomicU64; 256],
    /// Other counters, indexed by [`counter`].
    pub counters: [AtomicU64; 16],
}

const _: () = assert!(
    layout::STATISTICS + (crate::system::MAX_VCPUS * size_of::<VcpuStatistics>()) as u64
        <= layout::DEBUG
);

/// State that a debugger and the vCPUs share. The guest can overwrite it: the debugger displays it
/// and bases no decision on it.
pub mod debug {
    use super::layout;
    use crate::system::MAX_VCPUS;
    use core::sync::atomic::Ordering::SeqCst;
    use core::sync::atomic::{AtomicU32, AtomicU64};

    /// Largest number of breakpoints.
    pub const BREAKPOINTS: usize = 64;
    /// Breakpoint instruction in Linux processes: `INT3`.
    pub const BREAKPOINT: u8 = 0xcc;
    /// Breakpoint instruction with KVM: `HLT`, which always exits.
    pub const HALT: u8 = 0xf4;

    /// State of all vCPUs.
    #[derive(Debug)]
    #[repr(C)]
    pub struct DebugState {
        /// Not 0: the debugger requests a stop of all vCPUs.
        pub wanted: AtomicU32,
        /// Not 0: a vCPU has stopped, and the device process has not notified the debugger yet.
        pub halt_pending: AtomicU32,
        /// Linear addresses of breakpoints; 0: none.
        pub breakpoints: [AtomicU64; BREAKPOINTS],
        /// State of each vCPU.
        pub vcpus: [VcpuDebug; MAX_VCPUS],
    }

    /// State of one vCPU.
    #[derive(Debug, Default)]
    #[repr(C)]
    pub struct VcpuDebug {
        /// Not 0: the vCPU has stopped and waits for a command.
        pub halted: AtomicU32,
        /// Reason of the last stop: see [`reason`].
        pub reason: AtomicU32,
        /// Number of stops.
        pub halts: AtomicU32,
        /// Next action of the vCPU: see [`command`].
        pub command: AtomicU32,
        /// Registers, valid while the vCPU is stopped.
        pub registers: [AtomicU64; register::COUNT],
    }

    /// Values of [`VcpuDebug::reason`].
    pub mod reason {
        /// The debugger requested it.
        pub const WANTED: u32 = 0;
        /// A breakpoint.
        pub const BREAKPOINT: u32 = 1;
        /// A single step.
        pub const STEP: u32 = 2;
    }

    /// Values of [`VcpuDebug::command`].
    pub mod command {
        /// Wait.
        pub const WAIT: u32 = 0;
        /// Continue.
        pub const GO: u32 = 1;
        /// Execute one instruction, then stop.
        pub const STEP: u32 = 2;
    }

    /// Indices of [`VcpuDebug::registers`]. The general registers come first, in the order of their
    /// encoding.
    pub mod register {
        /// Instruction pointer.
        pub const RIP: usize = 16;
        /// Flags.
        pub const RFLAGS: usize = 17;
        /// Number of registers that the debugger can change.
        pub const CHANGEABLE: usize = 18;
        /// Selector of `CS`.
        pub const CS: usize = 18;
        /// Selector of `SS`.
        pub const SS: usize = 19;
        /// Page-table root.
        pub const CR3: usize = 20;
        /// Root page table that translates the kernel image.
        pub const KERNEL_ROOT: usize = 21;
        /// Levels of the page tables: 4, 5, or 0 with paging off. Other formats are not supported.
        pub const LEVELS: usize = 22;
        /// Number of registers.
        pub const COUNT: usize = 23;
    }

    const _: () = assert!(layout::DEBUG + size_of::<DebugState>() as u64 <= layout::FILTERS);

    /// Host services that a stopping vCPU needs.
    pub trait DebugHost {
        /// Notifies the debugger that a vCPU has stopped.
        fn notify_debugger(&self);
        /// Waits until this word differs from [`command::WAIT`], or a timeout.
        fn wait(&self, word: &AtomicU32);
        /// Drops a stop request that arrived during the stop; called when the vCPU resumes.
        fn on_resume(&self);
    }

    impl Default for DebugState {
        fn default() -> Self {
            Self {
                wanted: AtomicU32::default(),
                halt_pending: AtomicU32::default(),
                breakpoints: [const { AtomicU64::new(0) }; BREAKPOINTS],
                vcpus: Default::default(),
            }
        }
    }

    impl DebugState {
        /// Returns whether the debugger requests a stop of all vCPUs.
        pub fn is_wanted(&self) -> bool {
            self.wanted.load(SeqCst) != 0
        }

        /// Returns whether there is a breakpoint at this address.
        pub fn has_breakpoint(&self, at: u64) -> bool {
            self.breakpoints.iter().any(|place| place.load(SeqCst) == at)
        }

        /// Stops vCPU `index` until the debugger releases it. Returns whether it is to execute a
        /// single instruction. `registers` receives the debugger's changes.
        pub fn halt(
            &self,
            index: usize,
            why: u32,
            registers: &mut [u64; register::COUNT],
            host: &impl DebugHost,
        ) -> bool {
            let Some(own) = self.vcpus.get(index) else { return false };
            for (place, value) in own.registers.iter().zip(&*registers) {
                place.store(*value, SeqCst);
            }
            own.command.store(command::WAIT, SeqCst);
            own.reason.store(why, SeqCst);
            own.halts.fetch_add(1, SeqCst);
            own.halted.store(1, SeqCst);
            host.notify_debugger();
            while own.command.load(SeqCst) == command::WAIT
                && (why != reason::WANTED || self.is_wanted())
            {
                host.wait(&own.command);
            }
            let command = own.command.swap(command::WAIT, SeqCst);
            host.on_resume();
            own.halted.store(0, SeqCst);
            for (value, place) in registers[..register::CHANGEABLE].iter_mut().zip(&own.registers) {
                *value = place.load(SeqCst);
            }
            command == command::STEP
        }
    }
}

/// Indices of [`VcpuStatistics::counters`].
pub mod counter {
    /// Page faults that led to a mapping.
    pub const FILLS: usize = 0;
    /// Page faults injected into the guest.
    pub const FAULTS: usize = 1;
    /// System calls that arrived by signal.
    pub const CALLS: usize = 2;
    /// Switches of the guest process, that is, of the address space.
    pub const SWITCHES: usize = 3;
    /// Full flushes of user-mode mappings.
    pub const FLUSHES: usize = 4;
    /// Emulated sensitive instructions without a patch site.
    pub const UNRECORDED: usize = 5;
    /// Signals from other processes.
    pub const KICKS: usize = 6;
    /// Names of the counters in reports, in their order.
    pub const NAMES: [&str; 7] = [
        "mappings filled in",
        "page faults of the guest",
        "calls by signal",
        "changes of the process",
        "flushes of all of a program",
        "sensitive instructions without a site",
        "signals from outside",
    ];
}

/// Values of [`Start::log`], the least severe messages that are printed. A message of a VM's
/// process is a line `<LEVEL>TEXT` on standard error.
pub mod log {
    /// The VM cannot continue.
    pub const ERROR: u64 = 0;
    /// The guest used something that is not supported.
    pub const WARN: u64 = 1;
    /// Information.
    pub const INFO: u64 = 2;
}

/// Bits of [`Start::options`].
pub mod option {
    /// Every patch site enters the wedge; none is handled in place.
    pub const NO_FAST_PATHS: u64 = 1 << 0;
    /// System calls of user mode are not rewritten.
    pub const NO_CALL_SITES: u64 = 1 << 1;
    /// Kernel functions are not replaced.
    pub const NO_FUNCTIONS: u64 = 1 << 4;
    /// Prints the counters when the VM ends.
    pub const COUNTERS: u64 = 1 << 2;
    /// Counts writes to page tables, descriptor tables and devices by instruction.
    pub const PROFILE: u64 = 1 << 3;
    /// The VM's processes enter empty namespaces and a Landlock domain, as far as the host permits.
    pub const SANDBOX: u64 = 1 << 5;
    /// A debugger may stop the vCPUs.
    pub const DEBUG: u64 = 1 << 11;
    /// With [`SANDBOX`]: the VM ends if the host refuses a part of the sandbox.
    pub const STRICT: u64 = 1 << 6;
    /// A fault maps one page, and a flush drops all user-mode mappings.
    pub const NO_BATCHES: u64 = 1 << 7;
    /// One process serves all address spaces of a vCPU, one after another.
    pub const ONE_SPACE: u64 = 1 << 8;
    /// The guest kernel is unmapped while user mode runs. Requires [`NO_FAST_PATHS`] and
    /// [`NO_CALL_SITES`].
    pub const REMAP: u64 = 1 << 9;
    /// A tracer process receives all signals of a guest process.
    pub const TRACED: u64 = 1 << 10;
    /// Protection keys isolate the kernel from user mode; the file of guest memory holds copies of
    /// executable pages after guest memory ([`layout::COPIES`](super::layout::COPIES)). Excludes
    /// [`REMAP`].
    pub const KEYS: u64 = 1 << 12;
    /// The host supports 32-bit system calls.
    pub const COMPAT: u64 = 1 << 14;
    /// User mode runs in processes of its own, in which the kernel is not mapped. Excludes
    /// [`KEYS`], [`REMAP`], [`TRACED`] and [`PROFILE`]; requires [`NO_CALL_SITES`]. The shared
    /// memory is followed by a [`mailbox`](super::layout::mailbox) for each slot.
    pub const USER_PROCESS: u64 = 1 << 15;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_record_round_trips() {
        let start = Start { memory: 1, sites_length: 7, options: 3, ..Start::default() };
        let mut words = start.to_words();
        assert_eq!(Start::from_words(&words), Some(start));
        words[1] += 1;
        assert_eq!(Start::from_words(&words), None);
    }

    #[test]
    fn a_network_round_trips() {
        let net = NetRecord { mac: [2, 3, 4, 5, 6, 7], mtu: 65_520, tap: *b"abcdefghijklmno\0" };
        assert_eq!(NetRecord::from_words(&net.to_words()), net);
        let stream = NetRecord::from_words(&[0; NetRecord::WORDS]);
        assert_eq!((stream, stream.is_tap(), net.is_tap()), (NetRecord::default(), false, true));
    }

    #[test]
    fn a_disk_round_trips() {
        let serial = *b"abcdefghijklmnopqrst";
        let disk = DiskRecord { sectors: 7, read_only: true, is_external: false, serial };
        assert_eq!(DiskRecord::from_words(&disk.to_words()), disk);
        let disk = DiskRecord { read_only: false, is_external: true, ..disk };
        assert_eq!(DiskRecord::from_words(&disk.to_words()), disk);
        let share = ShareRecord { tag: *b"abcdefghijklmnopqrstuvwxyz012345" };
        assert_eq!(ShareRecord::from_words(&share.to_words()), share);
        assert_eq!(DiskRecord::from_words(&[0; DiskRecord::WORDS]), DiskRecord::default());
    }
}
