//! What a loader tells the wedge that runs a guest in processes of Linux: one record at the beginning of the memory that they share, and
//! one for each disk and each network behind it.
//!
//! All of it is numbers of 64 bits, little-endian, in the order of the fields.

use core::sync::atomic::AtomicU64;

/// First word of the record: "PARADORW".
pub const MAGIC: u64 = u64::from_le_bytes(*b"PARADORW");
/// Version of the record.
pub const VERSION: u64 = 8;

/// Where things are in the address space of a process, and descriptors that it inherits. The part above the guest's programs is like
/// Linux' own upper half; the image and its modules are where 32-bit sign-extended addresses reach.
pub mod layout {
    /// Guest-physical memory, once more for the kernel image: from guest-physical 0 on.
    pub const IMAGE: u64 = 0x4000_0000;
    /// Most bytes of it.
    pub const IMAGE_LENGTH: u64 = 0x1000_0000;
    /// Modules of the guest's kernel.
    pub const MODULES: u64 = 0x5000_0000;
    /// First address behind them.
    pub const MODULES_END: u64 = 0x7000_0000;
    /// The program that is the wedge.
    pub const WEDGE: u64 = 0x7000_0000;
    /// Memory that all processes of a machine share; the record is at its beginning.
    pub const SHARED: u64 = 0x7100_0000;
    /// Length of the shared memory in bytes.
    pub const SHARED_LENGTH: u64 = 0x0300_0000;
    /// Stubs of rewritten sites, in shared memory.
    pub const STUBS: u64 = 0x7200_0000;
    /// Room for them in bytes; tables of profiles follow.
    pub const STUBS_LENGTH: u64 = 0x0080_0000;
    /// Memory of one process.
    pub const PRIVATE: u64 = 0x7400_0000;
    /// Words that the device process shares with a process that it has created until that one has
    /// its seccomp filter.
    pub const SETUP: u64 = 0x7780_0000;
    /// Length of that memory in bytes.
    pub const SETUP_LENGTH: u64 = 0x1000;
    /// What two processes of an address space share, if programs have one of their own.
    pub const MAILBOX: u64 = 0x7700_0000;
    /// Its length in bytes.
    pub const MAILBOX_LENGTH: u64 = 0x1_0000;
    /// Where the one of a slot of a virtual CPU is in the descriptor of the shared memory.
    pub const fn mailbox(vcpu: usize, slot: usize) -> u64 {
        SHARED_LENGTH + (vcpu * SLOTS + slot) as u64 * MAILBOX_LENGTH
    }
    /// Most address spaces that have a process of their own, for each virtual CPU.
    pub const SLOTS: usize = 64;
    /// First address behind all that is the wedge's.
    pub const WEDGE_END: u64 = 0x7800_0000;
    /// Fixed mappings of the guest's kernel.
    pub const FIXMAP: u64 = 0x7f00_0000;
    /// End of what programs must not use in the first 2 GiB: it begins at [`IMAGE`].
    pub const LOW_END: u64 = 0x8000_0000;
    /// First address that no program may use.
    pub const TASK_SIZE: u64 = 0x3fff_ffff_f000;
    /// All guest-physical memory ("direct map").
    pub const DIRECT: u64 = 0x4000_0000_0000;
    /// `vmalloc` of the guest's kernel, and what follows.
    pub const VMALLOC: u64 = 0x4100_0000_0000;
    /// Its table of pages.
    pub const VMEMMAP: u64 = 0x6a00_0000_0000;
    /// First address that nothing of the guest reaches.
    pub const GUEST_END: u64 = 0x7000_0000_0000;
    /// All guest-physical memory, as the wedge uses it.
    pub const WINDOW: u64 = GUEST_END;
    /// Copies of the pages that programs of one virtual CPU execute, where memory is protected by keys: as long as guest memory. Behind that
    /// in its descriptor, those of one virtual CPU after the other.
    pub const COPIES: u64 = 0x7400_0000_0000;
    /// First address that the wedge leaves to the host.
    pub const HOST: u64 = 0x7800_0000_0000;
    /// The VM's configuration, private to each process and read-only once the guest runs. The seccomp
    /// filter of guest processes lets none map, unmap or protect anything from here on.
    pub const CONFIG: u64 = 0x7c00_0000_0000;
    /// Room for it in bytes.
    pub const CONFIG_LENGTH: u64 = 0x10_0000;
    /// Sets of host CPUs that a guest process may choose for itself (sched_setaffinity(2)), read-only:
    /// of each CPU alone by its number, then of all CPUs that the VM was started on.
    pub const CPU_SETS: u64 = CONFIG + CONFIG_LENGTH;
    /// Bytes of one of them.
    pub const CPU_SET_LENGTH: u64 = 128;
    /// Host CPUs that a set can have.
    pub const CPU_SET_CPUS: u64 = CPU_SET_LENGTH * 8;
    /// Room for all of them in bytes, in whole pages.
    pub const CPU_SETS_LENGTH: u64 = (CPU_SET_CPUS * CPU_SET_LENGTH) + 0x1000;

    /// Descriptor of what is typed.
    pub const INPUT_FD: u32 = 0;
    /// Descriptor of what the guest prints.
    pub const OUTPUT_FD: u32 = 1;
    /// Descriptor of the wedge's own messages.
    pub const ERRORS_FD: u32 = 2;
    /// Descriptor of guest-physical memory.
    pub const MEMORY_FD: u32 = 3;
    /// Descriptor of the shared memory.
    pub const SHARED_FD: u32 = 4;
    /// Descriptor that wakes the device process (eventfd(2)).
    pub const DOORBELL_FD: u32 = 5;
    /// Descriptors of the disks, one after another.
    pub const DISKS_FD: u32 = 6;
    /// Descriptors of the networks, one after another, and behind them that of the stream of vsock's packets.
    pub const NETS_FD: u32 = 16;

    /// Descriptor by which the device process is told what the machine shall do, and says what became of it: see [`control`](super::control).
    pub const CONTROL_FD: u32 = 32;
    /// Descriptor of what the virtio console prints, and of what is typed there: a socket.
    pub const CONSOLE_FD: u32 = 33;

    /// Descriptor of the ring of a process of a disk (io_uring(7)).
    pub const RING_FD: u32 = 34;

    /// Signal by which the device process tells a process of the guest of events (`SIGUSR2`): one of those of which the host keeps one only. Of others it
    /// would queue any number while the process has no CPU, and then put a frame for each on the stack of signals, which overflows.
    pub const KICK_SIGNAL: u32 = 12;

    /// Linux' page of old calls, outside of what programs can map (`Documentation/arch/x86/x86_64/mm.rst` in Linux): a call at its beginning and one
    /// each KiB farther on.
    pub const VSYSCALL: u64 = 0xffff_ffff_ff60_0000;
    /// Numbers of the system calls that they are: `gettimeofday`, `time`, `getcpu`.
    pub const VSYSCALL_CALLS: [u32; 3] = [96, 201, 309];

    /// Where the records of the disks are in the shared memory.
    pub const DISKS: u64 = 0x800;
    /// Where the records of the networks are in the shared memory.
    pub const NETS: u64 = 0x900;
    /// Where the records of shared directories are in the shared memory.
    pub const SHARES: u64 = 0xa00;
    /// Where packets of vsock wait in the shared memory.
    pub const VSOCK: u64 = 0x0280_0000;
    /// Where the [`Queue`](crate::requests::Queue)s are in the shared memory: of the disks, then of the shared directories.
    pub const QUEUES: u64 = 0x02c0_0000;
    /// Where [`VcpuStatistics`](super::VcpuStatistics) are in the shared memory, one of each virtual CPU after another.
    pub const STATISTICS: u64 = 0x02ef_0000;
    /// Where [`DebugState`](super::debug::DebugState) is in the shared memory.
    pub const DEBUG: u64 = 0x02ef_8000;
    /// Where [`Filters`](super::Filters) are in the shared memory.
    pub const FILTERS: u64 = 0x02f0_0000;
}

/// Filters of system calls, which the machine's processes take, for each kind of them. A word is an instruction (`struct sock_filter` of
/// Linux).
#[derive(Clone, Copy, Debug)]
pub struct Filters {
    /// Of each the length in instructions, then these.
    pub programs: [[u64; Self::WORDS]; Self::COUNT],
}

impl Filters {
    /// Words of each.
    pub const WORDS: usize = 512;
    /// How many there are.
    pub const COUNT: usize = 8;
    /// [`Self::programs`]: of the guest's processes.
    pub const GUEST: usize = 0;
    /// Of those of disks.
    pub const WORKER: usize = 1;
    /// Of those of networks.
    pub const NET: usize = 2;
    /// What is added to these for the same that may send [`layout::KICK_SIGNAL`], where that reaches processes of the machine only.
    pub const KICKS: usize = 3;
    /// Of the device process.
    pub const DEVICE: usize = 6;
    /// Of the thread that runs programs, if these have processes of their own.
    pub const USER_THREAD: usize = 7;
}

const _: () = assert!(layout::FILTERS + size_of::<Filters>() as u64 <= layout::SHARED_LENGTH);

/// Most disks of a machine.
pub const MAX_DISKS: usize = 4;
/// Most networks of a machine.
pub const MAX_NETS: usize = 4;
/// Most shared directories of a machine.
pub const MAX_SHARES: usize = 4;
/// Queues of requests.
pub const MAX_QUEUES: usize = MAX_DISKS + MAX_SHARES;

const _: () = assert!(
    layout::QUEUES + size_of::<[crate::requests::Queue; MAX_QUEUES]>() as u64 <= layout::STATISTICS
);

macro_rules! record {
    ($($(#[$doc:meta])* $field:ident,)*) => {
        /// The record.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct Start {
            $($(#[$doc])* pub $field: u64,)*
        }

        impl Start {
            /// Words of the record, magic number and version included.
            pub const WORDS: usize = 2 + [$(stringify!($field)),*].len();

            /// The record as it lies in memory.
            pub fn to_words(&self) -> [u64; Self::WORDS] {
                [MAGIC, VERSION, $(self.$field,)*]
            }

            /// The record from memory; `None` if it is none of this version.
            pub fn from_words(words: &[u64; Self::WORDS]) -> Option<Self> {
                let [MAGIC, VERSION, $($field,)*] = *words else { return None };
                Some(Self { $($field,)* })
            }
        }
    };
}

record! {
    /// Bytes of guest memory.
    memory,
    /// Guest-physical address at which memory below 4 GiB ends; the rest is at 4 GiB.
    hole,
    /// Extended state that the guest may use (`XCR0`).
    xcr0,
    /// Where the kernel begins: address, stack, first argument.
    rip,
    /// Stack pointer.
    rsp,
    /// First argument.
    rdi,
    /// Base of `GS`.
    gs_base,
    /// Guest-physical address of the first page table.
    cr3,
    /// Linear address of the global descriptor table.
    gdt,
    /// Its limit.
    gdt_limit,
    /// Code segment.
    cs,
    /// Guest-physical address of the page table that says what is between [`layout::IMAGE`] and [`layout::LOW_END`].
    kernel_root,
    /// Linear address of the table of sites.
    sites,
    /// Its length in bytes.
    sites_length,
    /// Linear address of Linux' `__text_poke(how, to, from, length)`, which the wedge does in its own way; 0: none.
    text_poke,
    /// Linear address of `text_poke_memcpy`: `how`, if it copies.
    text_poke_memcpy,
    /// Number of virtual CPUs.
    vcpus,
    /// Linear addresses of Linux' words for a further processor when it is started: where it begins, its stack, its base of `GS`, its descriptor
    /// table (limit and address).
    initial_code,
    /// See above.
    initial_stack,
    /// See above.
    initial_gs,
    /// See above.
    early_gdt,
    /// Guest-physical address of the page table that it begins with.
    initial_cr3,
    /// Linear addresses of the kernel's code: first, and first behind.
    code,
    /// See above.
    code_end,
    /// Options: see [`option`].
    options,
    /// Number of disks.
    disks,
    /// Number of networks.
    nets,
    /// Messages that are printed: see [`log`].
    log,
    /// Pages of 4 KiB that the guest is to give up, plus 1; 0: it has no balloon.
    balloon,
    /// Number of shared directories.
    shares,
    /// The guest's number for vsock; 0: it has none.
    vsock,
    /// 1: there is a virtio console beside the serial line.
    console,
}

const _: () = assert!(Start::WORDS as u64 * 8 <= layout::DISKS);
const _: () = assert!(layout::DISKS + 8 * (MAX_DISKS * DiskRecord::WORDS) as u64 <= layout::NETS);
const _: () = assert!(layout::NETS + 8 * (MAX_NETS * NetRecord::WORDS) as u64 <= layout::SHARES);
const _: () = assert!(layout::DISKS_FD + MAX_DISKS as u32 <= layout::NETS_FD);
const _: () = assert!(layout::SHARES + 8 * (MAX_SHARES * ShareRecord::WORDS) as u64 <= 0x1000);

/// A disk: what its descriptor is. Without descriptor another program carries its requests out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DiskRecord {
    /// Sectors of 512 bytes.
    pub sectors: u64,
    /// Nothing is written to it.
    pub read_only: bool,
    /// It has no descriptor.
    pub is_external: bool,
    /// Its name for the guest, filled up with zeros.
    pub serial: [u8; 20],
}

impl DiskRecord {
    /// Words of the record.
    pub const WORDS: usize = 5;

    /// The record as it lies in memory.
    pub fn to_words(&self) -> [u64; Self::WORDS] {
        let flags = u64::from(self.read_only) | u64::from(self.is_external) << 1;
        let mut words = [self.sectors, flags, 0, 0, 0];
        pack(&self.serial, &mut words[2..]);
        words
    }

    /// The record from memory.
    pub fn from_words(words: &[u64; Self::WORDS]) -> Self {
        let [sectors, flags, name @ ..] = words;
        let mut serial = [0; 20];
        unpack(name, &mut serial);
        Self { sectors: *sectors, read_only: flags & 1 != 0, is_external: flags & 2 != 0, serial }
    }
}

/// A shared directory: its name for the guest, filled up with zeros.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ShareRecord {
    /// The name.
    pub tag: [u8; 32],
}

impl ShareRecord {
    /// Words of the record.
    pub const WORDS: usize = 4;

    /// The record as it lies in memory.
    pub fn to_words(&self) -> [u64; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        pack(&self.tag, &mut words);
        words
    }

    /// The record from memory.
    pub fn from_words(words: &[u64; Self::WORDS]) -> Self {
        let mut share = Self::default();
        unpack(words, &mut share.tag);
        share
    }
}

/// Bytes in words, the last one filled up with zeros.
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

/// A network: what its descriptor is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NetRecord {
    /// The card's address.
    pub mac: [u8; 6],
    /// Longest packet that the guest is told of; 0: it is told nothing.
    pub mtu: u16,
    /// The descriptor is that of `/dev/net/tun`, and this is the name of the tap device that it shall stand for, filled up with zeros. All
    /// zeros: it is a stream of frames, each behind its length as 32 bits, big-endian (as `passt` and QEMU's `-netdev stream` have it).
    pub tap: [u8; 16],
}

impl NetRecord {
    /// Words of the record.
    pub const WORDS: usize = 3;

    /// The record as it lies in memory.
    pub fn to_words(&self) -> [u64; Self::WORDS] {
        let [a, b, c, d, e, f] = self.mac;
        let [low, high] = self.mtu.to_le_bytes();
        let (first, last) = self.tap.split_at(8);
        let word =
            |half: &[u8]| half.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        [u64::from_le_bytes([a, b, c, d, e, f, low, high]), word(first), word(last)]
    }

    /// The record from memory.
    pub fn from_words(words: &[u64; Self::WORDS]) -> Self {
        let [a, b, c, d, e, f, low, high] = words[0].to_le_bytes();
        let mut tap = [0; 16];
        tap[..8].copy_from_slice(&words[1].to_le_bytes());
        tap[8..].copy_from_slice(&words[2].to_le_bytes());
        Self { mac: [a, b, c, d, e, f], mtu: u16::from_le_bytes([low, high]), tap }
    }

    /// It is a tap device.
    pub fn is_tap(&self) -> bool {
        self.tap != [0; 16]
    }
}

/// Bytes on [`layout::CONTROL_FD`]. The device process answers each with the same byte when it is done.
pub mod control {
    /// The processes of the guest stop.
    pub const PAUSE: u8 = b'p';
    /// They go on.
    pub const RESUME: u8 = b'r';
    /// The power button is pressed.
    pub const POWER_BUTTON: u8 = b'b';
    /// The virtual CPUs stop, for a debugger.
    pub const HALT: u8 = b'h';
    /// Those that a debugger lets go on do so.
    pub const GO: u8 = b'g';
    /// From the device process only: a virtual CPU has stopped for a debugger.
    pub const HALTED: u8 = b'H';
    /// From the device process only: there is a further process of the guest.
    pub const PROCESS_CREATED: u8 = b'n';
    /// From the device process only: the guest's first instruction comes now.
    pub const STARTED: u8 = b's';
}

/// Exit codes of VMs (`docs/spec/exit-codes.md`), as far as a guest has a say.
pub mod exit {
    /// Last code that a guest chooses itself, from 0 on.
    pub const LAST_CHOSEN: u8 = 63;
    /// The guest's kernel panicked.
    pub const PANIC: u8 = 80;
    /// A triple fault, or a fault that nobody handles.
    pub const FAULT: u8 = 81;
    /// The guest reset its VM.
    pub const RESET: u8 = 83;

    /// Signals by which Linux ends a process for what that process does: `SIGILL`, `SIGTRAP`,
    /// `SIGABRT`, `SIGBUS`, `SIGFPE`, `SIGSEGV`, `SIGPIPE`, `SIGXFSZ` and `SIGSYS` (signal(7), x86).
    pub const SELF_INFLICTED: [u32; 9] = [4, 5, 6, 7, 8, 11, 13, 25, 31];

    /// Whether a guest may bring this code about.
    pub const fn is_guest_code(code: u8) -> bool {
        matches!(code, 0..=LAST_CHOSEN | PANIC | FAULT | RESET)
    }
}

/// What the wedge counts. It is in memory that the guest can change: for people and their graphs, not for decisions.
#[derive(Debug)]
#[repr(C)]
pub struct VcpuStatistics {
    /// Times that each kind of site came to the wedge, by the kind's number.
    pub sites: [AtomicU64; 256],
    /// Other counters: see [`counter`].
    pub counters: [AtomicU64; 16],
}

/// One for each virtual CPU.
const _: () = assert!(
    layout::STATISTICS + (crate::system::MAX_VCPUS * size_of::<VcpuStatistics>()) as u64
        <= layout::DEBUG
);

/// What a debugger and the virtual CPUs leave for each other. A guest can change it: the debugger shows it and believes nothing.
pub mod debug {
    use super::layout;
    use crate::system::MAX_VCPUS;
    use core::sync::atomic::Ordering::SeqCst;
    use core::sync::atomic::{AtomicU32, AtomicU64};

    /// Most breakpoints.
    pub const BREAKPOINTS: usize = 64;
    /// The instruction that is put where one is, in processes: `INT3`.
    pub const BREAKPOINT: u8 = 0xcc;
    /// With KVM: `HLT`, at which the guest is left in any case.
    pub const HALT: u8 = 0xf4;

    /// Of all virtual CPUs.
    #[derive(Debug)]
    #[repr(C)]
    pub struct DebugState {
        /// Not 0: they shall stop.
        pub wanted: AtomicU32,
        /// One has stopped: not 0 until the device process has told the debugger.
        pub halt_pending: AtomicU32,
        /// Linear addresses of breakpoints; 0: none.
        pub breakpoints: [AtomicU64; BREAKPOINTS],
        /// Each of them.
        pub vcpus: [VcpuDebug; MAX_VCPUS],
    }

    /// Of one virtual CPU.
    #[derive(Debug, Default)]
    #[repr(C)]
    pub struct VcpuDebug {
        /// Not 0: it has stopped, and waits for a command.
        pub halted: AtomicU32,
        /// Why it stopped last.
        pub reason: AtomicU32,
        /// How often it has stopped.
        pub halts: AtomicU32,
        /// What it shall do.
        pub command: AtomicU32,
        /// Its registers while it has stopped.
        pub registers: [AtomicU64; register::COUNT],
    }

    /// Values of [`VcpuDebug::reason`].
    pub mod reason {
        /// Somebody wanted it.
        pub const WANTED: u32 = 0;
        /// It is at a breakpoint.
        pub const BREAKPOINT: u32 = 1;
        /// It has carried out an instruction.
        pub const STEP: u32 = 2;
    }

    /// Values of [`VcpuDebug::command`].
    pub mod command {
        /// Wait.
        pub const WAIT: u32 = 0;
        /// Go on.
        pub const GO: u32 = 1;
        /// Carry an instruction out, and stop.
        pub const STEP: u32 = 2;
    }

    /// Indices of [`VcpuDebug::registers`]. General registers come first, as instructions encode them.
    pub mod register {
        /// Instruction pointer.
        pub const RIP: usize = 16;
        /// Flags.
        pub const RFLAGS: usize = 17;
        /// Registers up to here can be changed.
        pub const CHANGEABLE: usize = 18;
        /// Selectors.
        pub const CS: usize = 18;
        /// See above.
        pub const SS: usize = 19;
        /// Page-table root.
        pub const CR3: usize = 20;
        /// Root by which addresses of the kernel's image are translated.
        pub const KERNEL_ROOT: usize = 21;
        /// Levels of page tables: 4, 5, or 0, where linear addresses are physical ones. Tables of others are not known.
        pub const LEVELS: usize = 22;
        /// How many there are.
        pub const COUNT: usize = 23;
    }

    const _: () = assert!(layout::DEBUG + size_of::<DebugState>() as u64 <= layout::FILTERS);

    /// What a virtual CPU that stops does by its host.
    pub trait DebugHost {
        /// Tells the debugger that one has stopped.
        fn notify_debugger(&self);
        /// Waits until this word is no longer [`command::WAIT`], or for some time.
        fn wait(&self, word: &AtomicU32);
        /// It goes on. That it should stop it has been told for the stop that is over.
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
        /// The debugger wants all virtual CPUs to stop.
        pub fn is_wanted(&self) -> bool {
            self.wanted.load(SeqCst) != 0
        }

        /// There is a breakpoint.
        pub fn has_breakpoint(&self, at: u64) -> bool {
            self.breakpoints.iter().any(|place| place.load(SeqCst) == at)
        }

        /// Virtual CPU `index` stops until the debugger lets it go on: `true` for one instruction. The registers are those that
        /// it has then, as far as they can be changed.
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
    /// Faults that led to a mapping.
    pub const FILLS: usize = 0;
    /// Faults that were the guest's own.
    pub const FAULTS: usize = 1;
    /// System calls that were caught.
    pub const CALLS: usize = 2;
    /// Changes of the address space.
    pub const SWITCHES: usize = 3;
    /// Flushes of all that programs have mapped.
    pub const FLUSHES: usize = 4;
    /// Sensitive instructions without a site.
    pub const UNRECORDED: usize = 5;
    /// Signals that came from outside.
    pub const KICKS: usize = 6;
    /// Names, for reports.
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

/// Values of [`Start::log`]: the least grave messages that are printed. A message of a machine's process is a line, `<LEVEL>TEXT`, on standard
/// error.
pub mod log {
    /// The machine cannot go on.
    pub const ERROR: u64 = 0;
    /// The guest wanted something that there is not.
    pub const WARN: u64 = 1;
    /// Worth knowing.
    pub const INFO: u64 = 2;
}

/// Bits of [`Start::options`].
pub mod option {
    /// Every site goes through the wedge's general path, none is done in place.
    pub const NO_FAST_PATHS: u64 = 1 << 0;
    /// System calls of programs are not rewritten.
    pub const NO_CALL_SITES: u64 = 1 << 1;
    /// Functions of the kernel are left as they are.
    pub const NO_FUNCTIONS: u64 = 1 << 4;
    /// What the wedge has done is printed in the end.
    pub const COUNTERS: u64 = 1 << 2;
    /// Writes to page tables, descriptor tables and devices are counted by their instructions.
    pub const PROFILE: u64 = 1 << 3;
    /// The machine's processes give up names of files, networks and whatever else the host lets them.
    pub const SANDBOX: u64 = 1 << 5;
    /// A debugger may stop the virtual CPUs.
    pub const DEBUG: u64 = 1 << 11;
    /// With [`SANDBOX`]: the machine ends if the host refuses any of it.
    pub const STRICT: u64 = 1 << 6;
    /// A fault fills in one page, and a flush drops everything.
    pub const NO_BATCHES: u64 = 1 << 7;
    /// One process has all address spaces of a virtual CPU, one after another.
    pub const ONE_SPACE: u64 = 1 << 8;
    /// The guest's kernel is not mapped while programs run. Only together with [`NO_FAST_PATHS`] and [`NO_CALL_SITES`].
    pub const REMAP: u64 = 1 << 9;
    /// All signals of a guest process go through one that traces it.
    pub const TRACED: u64 = 1 << 10;
    /// Protection keys keep programs out of their kernel; the descriptor of guest memory has copies behind it ([`layout::COPIES`](super::layout::COPIES)).
    /// Not together with [`REMAP`].
    pub const KEYS: u64 = 1 << 12;
    /// The host has 32-bit system calls.
    pub const COMPAT: u64 = 1 << 14;
    /// Programs have processes of their own, without their kernel. Neither together with [`KEYS`], [`REMAP`], [`TRACED`] and [`PROFILE`], nor without
    /// [`NO_CALL_SITES`]. There is a [`mailbox`](super::layout::mailbox) for each slot behind the shared memory.
    pub const USER_PROCESS: u64 = 1 << 15;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_record_comes_back() {
        let start = Start { memory: 1, sites_length: 7, options: 3, ..Start::default() };
        let mut words = start.to_words();
        assert_eq!(Start::from_words(&words), Some(start));
        words[1] += 1;
        assert_eq!(Start::from_words(&words), None);
    }

    #[test]
    fn a_network_comes_back() {
        let net = NetRecord { mac: [2, 3, 4, 5, 6, 7], mtu: 65_520, tap: *b"abcdefghijklmno\0" };
        assert_eq!(NetRecord::from_words(&net.to_words()), net);
        let stream = NetRecord::from_words(&[0; NetRecord::WORDS]);
        assert_eq!((stream, stream.is_tap(), net.is_tap()), (NetRecord::default(), false, true));
    }

    #[test]
    fn a_disk_comes_back() {
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
