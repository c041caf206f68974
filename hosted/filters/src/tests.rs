use proto::hosted::{Filters, layout, option};

use crate::bpf::pack;
use crate::device::{DeviceAccess, device_process};
use crate::kvm::kvm_process;
use crate::rules::compile;
use crate::stream::{stream_forwarder, switch};
use crate::{Compare, Condition, ProfileRule, Width, profile, words};

const X86_64: u32 = 0xc000_003e;
const I386: u32 = 0x4000_0003;
const X32: u32 = 0x4000_0000;
/// Far more system call numbers than Linux has.
const CALLS: u32 = 1024;
/// Argument sets that each call is tested with.
const TRIES: usize = 400;

fn filters() -> Vec<u64> {
    let words = words(0).unwrap();
    assert_eq!(words.len(), Filters::COUNT * Filters::WORDS);
    words
}

#[test]
fn filters_fit() {
    for filter in filters().chunks(Filters::WORDS) {
        let length = filter[0] as usize;
        assert!((10..Filters::WORDS).contains(&length), "{length}");
        // The last instruction returns, and no instruction follows.
        assert_eq!(filter[length] & 0xff, 0x06);
        assert!(filter[length + 1..].iter().all(|&word| word == 0));
    }
}

const ALLOW: u32 = 0x7fff_0000;
const TRAP: u32 = 0x0003_0000;
const ERRNO: u32 = 0x0005_0000;
const KILL_PROCESS: u32 = 0x8000_0000;

/// Returns whether the filter allows a call.
fn allows(filter: &[u64], call: u32, architecture: u32, arguments: [u64; 6]) -> bool {
    action(filter, call, architecture, 0x5555_6666_7777, arguments) == ALLOW
}

/// Interprets a filter on `struct seccomp_data` (`Documentation/networking/filter.rst` in
/// Linux).
fn action(filter: &[u64], call: u32, architecture: u32, at: u64, arguments: [u64; 6]) -> u32 {
    let mut data = vec![call, architecture, at as u32, (at >> 32) as u32];
    data.extend(arguments.iter().flat_map(|&word| [word as u32, (word >> 32) as u32]));
    let (mut at, mut accumulator, mut x) = (1, 0, 0_u32);
    loop {
        let word = filter[at];
        let (code, k) = (word & 0xffff, (word >> 32) as u32);
        let jump = |taken: bool| (word >> if taken { 16 } else { 24 } & 0xff) as usize;
        at += 1;
        match code {
            // BPF_LD | BPF_W | BPF_ABS
            0x20 => accumulator = data[k as usize / 4],
            // BPF_ALU | BPF_AND
            0x54 => accumulator &= k,
            // BPF_MISC | BPF_TAX; BPF_ALU | BPF_ADD | BPF_X
            0x07 => x = accumulator,
            0x0c => accumulator = accumulator.checked_add(x).unwrap(),
            // BPF_JMP: JA, JEQ, JGT, JGE, JSET
            0x05 => at += k as usize,
            0x15 => at += jump(accumulator == k),
            0x25 => at += jump(accumulator > k),
            0x35 => at += jump(accumulator >= k),
            0x45 => at += jump(accumulator & k != 0),
            // BPF_RET
            0x06 => {
                let is_errno = k & 0xffff_0000 == ERRNO;
                assert!(is_errno || matches!(k, KILL_PROCESS | ALLOW | TRAP), "{k:#x}");
                return k;
            }
            _ => panic!("instruction {code:#x}"),
        }
    }
}

/// Independent formulation of a guest process's filter.
fn guest_may(call: u32, arguments: [u64; 6], kicks: bool) -> bool {
    const PRIVATE_ANONYMOUS_FIXED: u32 = 0x32;
    const SHARED_FIXED: u32 = 0x11;
    const POPULATE: u32 = 0x8000;
    let [address, length, third, ..] = arguments;
    let [first, second, _, fourth, fifth, _] = arguments.map(|word| word as u32);
    // Ranges that certainly end before the configuration.
    let reaches = (address >> 32) + (length >> 32) + 2 > layout::CONFIG >> 32;
    if matches!(call, 9..=11 | 329) && reaches {
        return false;
    }
    match call {
        // write: messages, the doorbell
        1 => matches!(first, 2 | 5),
        // mmap: anonymous, guest memory
        9 => {
            fourth == PRIVATE_ANONYMOUS_FIXED
                || fourth & !POPULATE == SHARED_FIXED && fifth == layout::MEMORY_FD
        }
        // mprotect, munmap, rt_sigreturn, sched_yield, sigaltstack, restart_syscall,
        // timer_settime, exit_group, getrandom, pkey_mprotect
        10 | 11 | 15 | 24 | 131 | 219 | 223 | 231 | 318 | 329 => true,
        // kill: one process, with the event signal
        62 => kicks && second == layout::KICK_SIGNAL && (1..1 << 31).contains(&first),
        // futex: wait, wake
        202 => matches!(second, 0 | 1),
        // rt_sigprocmask: SIG_SETMASK
        14 => first == 2,
        // sched_setaffinity: its own, to one of 1,024 CPUs or to all of the VM
        203 => {
            let set = third.wrapping_sub(layout::CPU_SETS);
            first == 0 && second == 128 && set.is_multiple_of(128) && set / 128 <= 1024
        }
        // clock_gettime: CLOCK_PROCESS_CPUTIME_ID
        228 => first == 2,
        _ => false,
    }
}

/// Every call number with arguments of all kinds: the filter of a guest process allows what is
/// formulated above, no more.
#[test]
fn a_guest_process_may_do_this_and_no_more() {
    let filters = filters();
    let of = |which: usize| &filters[which * Filters::WORDS..][..Filters::WORDS];
    let mut seed: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        // Small numbers and flags are frequent, because they have meanings.
        match seed % 5 {
            0 => seed >> 8 & 7,
            1 => [0x32, 0x11, 0x8011, 0x12, 0x8032, 34, 128][(seed >> 8) as usize % 7],
            2 => seed >> 8 & 0xffff,
            3 => layout::CPU_SETS + (seed >> 8 & 0x7ff) * [64, 128][(seed >> 40) as usize % 2],
            _ => seed >> (seed >> 8 & 31),
        }
    };
    let mut allowed = 0;
    for (call, kicks) in (0..CALLS).chain([u32::MAX]).flat_map(|call| [(call, false), (call, true)])
    {
        let guest = of(Filters::GUEST + if kicks { Filters::KICKS } else { 0 });
        for _ in 0..TRIES {
            let arguments = [(); 6].map(|()| random());
            let allows = |call, architecture| allows(guest, call, architecture, arguments);
            assert_eq!(
                allows(call, X86_64),
                guest_may(call, arguments, kicks),
                "{call} {arguments:x?}"
            );
            // Other architectures, with other call numbers: set_thread_area.
            assert!(!allows(call | X32, X86_64), "{call}");
            assert_eq!(allows(call, I386), call == 243, "{call}");
            allowed += usize::from(allows(call, X86_64));
        }
    }
    assert!(allowed > 6 * TRIES);
}

/// A guest process cannot change protected mappings, and the wedge can change all others.
#[test]
fn a_guest_process_changes_no_mapping_of_the_configuration() {
    const MMAP: u32 = 9;
    let filters = filters();
    let end = layout::CPU_SETS + layout::CPU_SETS_LENGTH;
    for which in [Filters::GUEST, Filters::GUEST + Filters::KICKS] {
        let filter = &filters[which * Filters::WORDS..][..Filters::WORDS];
        let may = |call, address, length| {
            let arguments = [address, length, 0, 0x32, 0, 0];
            allows(filter, call, X86_64, arguments)
        };
        for call in [MMAP, 10, 11, 329] {
            for (start, end) in [
                (0, layout::IMAGE),
                (layout::LOW_END, layout::TASK_SIZE),
                (layout::MODULES, layout::MODULES_END),
                (layout::VMALLOC, layout::GUEST_END),
                (layout::DIRECT, layout::VMALLOC),
                (layout::COPIES, layout::HOST),
            ] {
                assert!(may(call, start, end - start), "{call} {start:#x}");
            }
            for (address, length) in [
                (layout::CONFIG, 0x1000),
                (layout::CPU_SETS, 0x1000),
                (end - 0x1000, 0x1000),
                (end, 0x1000),
                (layout::CONFIG - 0x1000, 0x2000),
                (layout::CONFIG - (1 << 32), 1 << 32 | 1),
                (0, layout::CONFIG + 1),
                (0, u64::MAX),
                (0x1000, u64::MAX - 0xfff),
                (u64::MAX - 0xfff, 0x1000),
                (1 << 63, 1 << 63),
                (layout::HOST, layout::CONFIG - layout::HOST + 1),
                (0xffff_ffff_0000_0000, layout::CONFIG),
            ] {
                assert!(!may(call, address, length), "{call} {address:#x} {length:#x}");
            }
        }
    }
}

/// Calls from the vsyscall page become signals; other calls from there are not affected.
#[test]
fn calls_of_the_old_page_become_signals() {
    let filters = filters();
    for which in [Filters::GUEST, Filters::GUEST + Filters::KICKS, Filters::DEVICE] {
        let filter = &filters[which * Filters::WORDS..][..Filters::WORDS];
        for call in 0..CALLS {
            for (at, is_there) in [
                (0xffff_ffff_ff60_0000, true),
                (0xffff_ffff_ff60_0800, true),
                (0xffff_ffff_ff60_0fff, true),
                (0xffff_ffff_ff60_1000, false),
                (0xffff_ffff_ff5f_ffff, false),
                (0x7fff_ff60_0000, false),
                (0xff60_0000, false),
            ] {
                let does = |at| action(filter, call, X86_64, at, [0; 6]);
                let is_old = is_there && matches!(call, 96 | 201 | 309);
                assert_eq!(does(at), if is_old { TRAP } else { does(0) }, "{call} at {at:#x}");
            }
        }
    }
}

/// A thread of user mode waits without a timeout, wakes, sets its CPU affinity and returns from
/// signals; all other calls are forwarded to the guest.
#[test]
fn a_thread_of_programs_may_do_this_and_no_more() {
    let filters = words(option::USER_PROCESS).unwrap();
    let program = &filters[Filters::USER_THREAD * Filters::WORDS..][..Filters::WORDS];
    for call in (0..CALLS).chain([u32::MAX]) {
        for [first, second, fourth] in
            [[0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 4096], [0, 0, 1 << 32], [7, 4, 0]]
        {
            let arguments = [first, second, 0, fourth, 0, 0];
            let may = match call {
                15 | 219 => true,
                202 => matches!((second, fourth), (0, 0) | (1, _)),
                _ => false,
            };
            let found = action(program, call, X86_64, 0, arguments);
            assert_eq!(found, if may { ALLOW } else { TRAP }, "{call} {arguments:?}");
            assert_eq!(action(program, call | X32, X86_64, 0, arguments), TRAP, "{call}");
            let found = action(program, call, I386, 0, arguments);
            assert_eq!(found, if call == 243 { ALLOW } else { TRAP }, "{call}");
        }
    }
    for (arguments, may) in [
        ([0, 128, layout::CPU_SETS, 0, 0, 0], true),
        ([0, 128, layout::CPU_SETS + 1024 * 128, 0, 0, 0], true),
        ([0, 128, layout::CPU_SETS + 1025 * 128, 0, 0, 0], false),
        ([0, 128, layout::CPU_SETS + 64, 0, 0, 0], false),
        ([0, 64, layout::CPU_SETS, 0, 0, 0], false),
        ([1, 128, layout::CPU_SETS, 0, 0, 0], false),
        ([0, 128, layout::MAILBOX, 0, 0, 0], false),
    ] {
        let found = action(program, 203, X86_64, 0, arguments);
        assert_eq!(found, if may { ALLOW } else { TRAP }, "{arguments:x?}");
    }
    // Checks for waiters, and thread creation.
    let of = |filters: &[u64], which: usize, call, arguments| {
        allows(&filters[which * Filters::WORDS..][..Filters::WORDS], call, X86_64, arguments)
    };
    let (requeue, thread) = ([0, 4, 0, 1, 0, 0], [0x1_0900, 0, 0, 0, 0, 0]);
    let without = self::filters();
    for (which, call, arguments) in [(Filters::GUEST, 202, requeue), (Filters::DEVICE, 56, thread)]
    {
        assert!(of(&filters, which, call, arguments) && !of(&without, which, call, arguments));
    }
}

/// A disk process accesses disks in the required ways, and its ring in one way.
#[test]
fn a_process_of_a_disk_may_do_this_and_no_more() {
    const GETEVENTS: u64 = 1;
    const NOWAIT: u64 = 8;
    let filters = filters();
    let worker = &filters[Filters::WORKER * Filters::WORDS..][..Filters::WORDS];
    let may = |call, arguments| allows(worker, call, X86_64, arguments);
    for fd in 0..64 {
        let is_disk = (6..14).contains(&fd);
        // preadv2, pwritev, fdatasync, fallocate
        for (call, arguments) in [
            (327, [fd, 1, 1, 0, 0, NOWAIT]),
            (296, [fd, 1, 1, 0, 0, 0]),
            (75, [fd, 0, 0, 0, 0, 0]),
            (285, [fd, 3, 0, 512, 0, 0]),
        ] {
            assert_eq!(may(call, arguments), is_disk, "{call} {fd}");
        }
        assert_eq!(may(426, [fd, 1, 1, GETEVENTS, 0, 0]), fd == 34);
    }
    // Appending, deallocating blocks, polling threads, other ring operations.
    for (call, arguments) in [
        (327, [6, 1, 1, 0, 0, 16]),
        (285, [6, 8, 0, 512, 0, 0]),
        (426, [34, 1, 1, 2, 0, 0]),
        (425, [8, 0, 0, 0, 0, 0]),
        (427, [34, 2, 0, 0, 0, 0]),
    ] {
        assert!(!may(call, arguments), "{call} {arguments:?}");
    }
}

/// A KVM process writes to its outputs and networks; its ioctls are limited to vCPUs and tap
/// devices.
#[test]
fn a_machine_of_kvm_may_do_this_and_no_more() {
    const OFFLOAD: u64 = 0x4004_54d0;
    let [filter, debugged] = [false, true]
        .map(|debugs| pack(&kvm_process(7, debugs).and_then(compile).unwrap()).unwrap());
    let may = |call, arguments| allows(&filter, call, X86_64, arguments);
    // KVM_SET_GUEST_DEBUG
    let debug = [20, 0x4048_ae9b, 0, 0, 0, 0];
    assert!(!may(16, debug) && allows(&debugged, 16, X86_64, debug));
    for fd in 0..64 {
        let is_net = (16..=20).contains(&fd);
        let is_written = matches!(fd, 1 | 2 | 32 | 33);
        assert_eq!(may(1, [fd, 4096, 1, 0, 0, 0]), is_written, "{fd}");
        // readv, writev
        for call in [19, 20] {
            assert_eq!(may(call, [fd, 4096, 2, 0, 0, 0]), is_net, "{call} {fd}");
        }
        assert_eq!(may(16, [fd, OFFLOAD, 7, 0, 0, 0]), is_net, "{fd}");
        // KVM_RUN; KVM_CREATE_VCPU, KVM_SET_USER_MEMORY_REGION, TUNSETIFF, TIOCSTI
        assert!(may(16, [fd, 0xae80, 0, 0, 0, 0]));
        for other in [0xae41, 0x4020_ae46, 0x4004_54ca, 0x5412] {
            assert!(!may(16, [fd, other, 0, 0, 0, 0]), "{fd} {other:#x}");
        }
    }
    for fd in 0..64 {
        // preadv2, pwritev, fdatasync
        for call in [327, 296, 75] {
            assert_eq!(may(call, [fd, 1, 1, 0, 0, 0]), (6..14).contains(&fd), "{call} {fd}");
        }
    }
    // io_uring_enter to wait; no other flags, no other ring operations.
    assert!(may(426, [50, 1, 1, 1, 0, 0]) && !may(426, [50, 1, 1, 2, 0, 0]));
    assert!(!may(425, [8, 0, 0, 0, 0, 0]) && !may(427, [50, 2, 0, 0, 0, 0]));
    // Signals to itself and private memory; no other signals, no executable memory, no files.
    assert!(may(234, [7, 9, 10, 0, 0, 0]) && !may(234, [8, 9, 10, 0, 0, 0]));
    assert!(may(9, [0, 4096, 3, 0x22, 0, 0]) && !may(9, [0, 4096, 7, 0x22, 0, 0]));
    assert!(!may(9, [0, 4096, 3, 1, 3, 0]) && !may(10, [0, 4096, 5, 0, 0, 0]));
}

/// The process of a shared directory changes what its kind may, and runs, signals and connects to
/// nothing.
#[test]
fn a_process_of_a_folder_may_do_this_and_no_more() {
    let of = |access| pack(&device_process(access).and_then(compile).unwrap()).unwrap();
    let [read, change, owners] =
        [DeviceAccess::Read, DeviceAccess::Change, DeviceAccess::Owners].map(of);
    // setxattr, removexattr, mkdirat, fchownat, unlinkat, renameat, linkat, symlinkat, fchmodat
    let changes = [188, 197, 258, 260, 263, 264, 265, 266, 268];
    // mknodat with a type; setfsuid, setfsgid
    let node = |kind: u64| (259, [3, 4096, kind << 12 | 0o644, 0x801, 0, 0]);
    let nodes = [1, 8, 12].map(node);
    let devices = [node(2), node(6), (122, [0; 6]), (123, [7; 6])];
    let all = |filter: &[u64], calls: &[(u32, [u64; 6])], is_allowed: bool| {
        for &(call, arguments) in calls {
            assert_eq!(
                allows(filter, call, X86_64, arguments),
                is_allowed,
                "{call} {arguments:x?}"
            );
        }
    };
    let changes = changes.map(|call| (call, [3; 6]));
    all(&read, &[&changes[..], &nodes, &devices].concat(), false);
    all(&change, &[&changes[..], &nodes].concat(), true);
    all(&change, &devices, false);
    all(&owners, &[&changes[..], &nodes, &devices].concat(), true);
    // getxattr, listxattr; opening to write
    let reads = [(191, [3; 6]), (194, [3; 6])];
    let opened = [(257, [3, 4096, 2, 0, 0, 0])];
    for (filter, writes) in [(&read, false), (&change, true), (&owners, true)] {
        all(filter, &reads, true);
        all(filter, &opened, writes);
        // ioctl, socket, connect, clone, fork, execve, kill, ptrace, setuid, setgid, setreuid,
        // setresuid, setgroups, capset, mount, chroot, prctl, tgkill, unshare, execveat,
        // open_by_handle_at, name_to_handle_at, io_uring_setup, pidfd_getfd
        let never = [
            16, 41, 42, 56, 57, 59, 62, 101, 105, 106, 113, 117, 116, 126, 165, 161, 157, 234, 272,
            322, 304, 303, 425, 438,
        ];
        all(filter, &never.map(|call| (call, [3; 6])), false);
    }
}

/// The process of an image reads the size of a block device, and sends no other ioctl.
#[test]
fn a_process_of_an_image_may_do_this_and_no_more() {
    const BLKGETSIZE64: u64 = 0x8008_1272;
    let own = pack(&device_process(DeviceAccess::Own).and_then(compile).unwrap()).unwrap();
    let may = |call, arguments| allows(&own, call, X86_64, arguments);
    assert!(may(16, [16, BLKGETSIZE64, 4096, 0, 0, 0]));
    // BLKDISCARD, BLKZEROOUT, BLKROSET, BLKRRPART, FICLONE, FIONBIO, TIOCSTI
    for other in [0x1277, 0x127f, 0x125d, 0x125f, 0x4004_9409, 0x5421, 0x5412, 0] {
        assert!(!may(16, [16, other, 4096, 0, 0, 0]), "{other:#x}");
    }
    // fallocate, pwritev; openat
    assert!(may(285, [3; 6]) && may(296, [3; 6]) && !may(257, [3; 6]));
}

/// The switch server forwards frames, reads peer credentials, and locks its folder.
#[test]
fn a_switch_may_do_this_and_no_more() {
    const FIONBIO: u64 = 0x5421;
    let filter = pack(&switch(1).and_then(compile).unwrap()).unwrap();
    let may = |call, arguments| allows(&filter, call, X86_64, arguments);
    // Anonymous memory without execute permission; no executable memory, no files.
    assert!(may(9, [0, 4096, 3, 0x22, 0, 0]));
    for (rights, flags) in [(7, 0x22), (5, 0x22), (4, 0x22), (3, 1), (3, 2)] {
        assert!(!may(9, [0, 4096, rights, flags, 3, 0]), "{rights} {flags:#x}");
    }
    assert!(may(73, [1, 2, 0, 0, 0, 0]) && !may(73, [2, 2, 0, 0, 0, 0]));
    // SOL_SOCKET, SO_PEERCRED; another option.
    assert!(may(55, [9, 1, 17, 0, 0, 0]) && !may(55, [9, 1, 4, 0, 0, 0]));
    assert!(may(16, [9, FIONBIO, 0, 0, 0, 0]) && !may(16, [9, 0x5412, 0, 0, 0, 0]));
    // mprotect, connect, bind, listen, kill, unlink, newfstatat, unlinkat
    for call in [10, 42, 49, 50, 62, 87, 262, 263] {
        assert!(!may(call, [1; 6]), "{call}");
    }
    // A frame filter has no further permissions and accepts no connections.
    let relay = pack(&stream_forwarder().and_then(compile).unwrap()).unwrap();
    for call in 0..CALLS {
        let may_relay = allows(&relay, call, X86_64, [0; 6]);
        assert!(!may_relay || may(call, [0; 6]) && call != 288, "{call}");
    }
}

/// No filter allows executing or tracing programs, opening files, or reaching other processes'
/// memory or the network.
#[test]
fn no_process_may_do_what_machines_never_need() {
    const NEVER: [u32; 24] = [
        // open, socket, connect, fork, vfork, execve, tkill, tgkill, ptrace, setuid, mount,
        // init_module
        2, 41, 42, 57, 58, 59, 200, 234, 101, 105, 165, 175,
        // openat, unshare, process_vm_readv, process_vm_writev, execveat, userfaultfd, bpf,
        // io_uring_setup, pidfd_open, clone3, openat2, pidfd_getfd
        257, 272, 310, 311, 322, 323, 321, 425, 434, 435, 437, 438,
    ];
    let kvm = pack(&kvm_process(7, true).and_then(compile).unwrap()).unwrap();
    let switch = pack(&switch(1).and_then(compile).unwrap()).unwrap();
    let [image, sockets] = [DeviceAccess::Own, DeviceAccess::Sockets]
        .map(|access| pack(&device_process(access).and_then(compile).unwrap()).unwrap());
    let others = [&kvm[..], &switch[..], &image[..], &sockets[..]];
    for filter in filters().chunks(Filters::WORDS).chain(others) {
        for call in NEVER {
            assert!(!allows(filter, call, X86_64, [0; 6]), "{call}");
            assert!(!allows(filter, call, X86_64, [3; 6]), "{call}");
        }
    }
}

/// A profile states the actions of calls, of both architectures; the first rule that holds counts.
#[test]
fn profiles_of_containers() {
    let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    let [files, clone, mkdir] =
        [&["openat", "mmap2", "no_such_call"][..], &["clone"], &["mkdir"]].map(names);
    let namespaces = Condition::new(0, Width::Qword, Compare::MaskedEq(0x7e02_0000), 0).unwrap();
    let rules = [
        ProfileRule { names: &files, conditions: Vec::new(), action: ALLOW },
        ProfileRule { names: &clone, conditions: vec![namespaces.clone()], action: ALLOW },
        ProfileRule { names: &mkdir, conditions: Vec::new(), action: ERRNO | 38 },
        ProfileRule { names: &mkdir, conditions: Vec::new(), action: ALLOW },
    ];
    for has_32_bit in [false, true] {
        let filter = profile(ERRNO | 1, has_32_bit, &rules).unwrap();
        let filter = [&[filter.len() as u64], &filter[..]].concat();
        let of = |architecture, call, first| {
            action(&filter, call, architecture, 0, [first, 0, 0, 0, 0, 0])
        };
        // openat, clone without and with a namespace, mkdir, write, read in x32
        assert_eq!(of(X86_64, 257, 0), ALLOW);
        assert_eq!(of(X86_64, 56, 0x11), ALLOW);
        assert_eq!(of(X86_64, 56, 0x1000_0011), ERRNO | 1);
        assert_eq!(of(X86_64, 83, 0), ERRNO | 38);
        assert_eq!(of(X86_64, 1, 0), ERRNO | 1);
        assert_eq!(of(X86_64, X32 | 257, 0), ERRNO | 1);
        // openat and mmap2, clone, mkdir, write of 32-bit programs
        let expected = [ALLOW, ALLOW, ALLOW, ERRNO | 38, ERRNO | 1];
        for (call, expected) in [295, 192, 120, 39, 4].into_iter().zip(expected) {
            let expected = if has_32_bit { expected } else { KILL_PROCESS };
            assert_eq!(of(I386, call, 0), expected, "{call}");
        }
    }
    let many = ProfileRule { names: &clone, conditions: vec![namespaces; 100], action: ALLOW };
    assert!(profile(ALLOW, false, &[many]).is_err());
}
