//! Seccomp filters of a VM's processes (seccomp(2)), built with `seccompiler` and installed by the
//! wedge.
//!
//! A guest process runs the guest kernel, which is not trusted. Its filter permits: mappings of its
//! own address space, of guest memory and of anonymous memory, returning guest memory to the host,
//! waiting and waking, yielding, its one timer, CPU affinity within the CPUs on which the VM was
//! started, its own CPU time, thread-local storage of 32-bit code, blocking signals, notifying the
//! device process, and exit. Any other system call kills it, and the VM with it. If the host
//! confines signals to the VM (Landlock), it may also send the signal that notifies a vCPU of
//! events.
//!
//! It cannot change a mapping from [`layout::CONFIG`] on, so it can pass the CPU sets that lie
//! there, whose contents cannot change, and no others.

use std::collections::BTreeMap;

use linux_raw_sys::{general as linux, io_uring, ioctl, net, prctl, ptrace};
use proto::hosted::{Filters, MAX_DISKS, MAX_NETS, layout, option};
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::{Eq, Ge, Le, MaskedEq};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter_all_threads, sock_filter,
};

use crate::Error;

/// System calls by number, each with the permitted argument sets; empty: any arguments.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Arguments and values of the conditions, all of which must hold.
type Conditions<'a> = &'a [(u8, u32)];

/// Returns the filters in the wedge's format.
///
/// They depend on [`option::TRACED`] and [`option::USER_PROCESS`]: the tracer of guest processes
/// and the user processes are created by the device process.
pub fn words(options: u64) -> Result<Vec<u64>, Error> {
    let mut words = Vec::new();
    let kicking = |rules: Result<Rules, _>| {
        let mut rules = rules?;
        signal(&mut rules, layout::KICK_SIGNAL)?;
        Ok(rules)
    };
    let guest = || guest(options);
    let programs = user_mode_calls(ptrace::SECCOMP_RET_KILL_PROCESS);
    let of_guest = [&programs[..], &check_address_range()].concat();
    for (rules, before) in [
        (guest(), &of_guest[..]),
        (worker(), &[]),
        (net(), &[]),
        (kicking(guest()), &of_guest),
        (kicking(worker()), &[]),
        (kicking(net()), &[]),
        // It sets up everything that guest processes cannot change later.
        (device(options), &programs),
    ] {
        let program = rules.and_then(compile).map_err(|error| Error::Filters(error.to_string()))?;
        words.extend(pack(&[before, &program[..]].concat())?);
    }
    let program = program().and_then(|rules| compile_or(rules, SeccompAction::Trap));
    let program = program.map_err(|error| Error::Filters(error.to_string()))?;
    words.extend(pack(&[&user_mode_calls(ptrace::SECCOMP_RET_TRAP)[..], &program[..]].concat())?);
    Ok(words)
}

/// Prologue of the filter of a process that runs guest user mode. A 32-bit call may set
/// thread-local storage. A call from the host's vsyscall page, which Syscall User Dispatch does not
/// intercept, raises a signal. Other 32-bit calls get the action `other`; 64-bit calls continue in
/// the filter.
fn user_mode_calls(other: u32) -> [sock_filter; 16] {
    /// `set_thread_area` (`arch/x86/entry/syscalls/syscall_32.tbl` in Linux).
    const SET_THREAD_AREA: u32 = 243;
    /// `AUDIT_ARCH_I386`.
    const I386: u32 = 0x4000_0003;
    let [gettimeofday, time, getcpu] = layout::VSYSCALL_CALLS;
    let (high, low) = ((layout::VSYSCALL >> 32) as u32, layout::VSYSCALL as u32);
    use data::{ARCHITECTURE, INSTRUCTION_POINTER, NUMBER};
    [
        load(ARCHITECTURE),
        unless(I386, 4),
        load(NUMBER),
        unless(SET_THREAD_AREA, 1),
        ret(ptrace::SECCOMP_RET_ALLOW),
        ret(other),
        // Only for these calls: the host caches calls that are allowed by number alone.
        load(NUMBER),
        sock_filter { jt: 2, ..unless(gettimeofday, 0) },
        sock_filter { jt: 1, ..unless(time, 0) },
        unless(getcpu, 6),
        load(INSTRUCTION_POINTER + 4),
        unless(high, 4),
        load(INSTRUCTION_POINTER),
        and(0xffff_f000),
        unless(low, 1),
        ret(ptrace::SECCOMP_RET_TRAP),
    ]
}

/// Offsets in `struct seccomp_data` (seccomp(2)), little-endian.
mod data {
    pub const NUMBER: u32 = 0;
    pub const ARCHITECTURE: u32 = 4;
    pub const INSTRUCTION_POINTER: u32 = 8;
    /// High halves of the first two arguments.
    pub const FIRST_HIGH: u32 = 20;
    pub const SECOND_HIGH: u32 = 28;
}

/// Loads the word at this offset of `struct seccomp_data`.
const fn load(k: u32) -> sock_filter {
    sock_filter { code: 0x20, jt: 0, jf: 0, k }
}

/// Masks the accumulator.
const fn and(k: u32) -> sock_filter {
    sock_filter { code: 0x54, jt: 0, jf: 0, k }
}

/// Skips `jf` instructions unless the accumulator has this value.
const fn unless(k: u32, jf: u8) -> sock_filter {
    sock_filter { code: 0x15, jt: 0, jf, k }
}

/// Skips `jt` instructions if the accumulator is larger.
const fn if_above(k: u32, jt: u8) -> sock_filter {
    sock_filter { code: 0x25, jt, jf: 0, k }
}

/// Returns this action.
const fn ret(k: u32) -> sock_filter {
    sock_filter { code: 0x06, jt: 0, jf: 0, k }
}

/// Prologue of the filter of a guest process: kills it at a call whose first two arguments are an
/// address range that may reach [`layout::CONFIG`]. `seccompiler` only compares arguments with
/// constants; this adds them, in units of 4 GiB.
fn check_address_range() -> [sock_filter; 13] {
    /// `BPF_MISC | BPF_TAX`: copies the accumulator to X.
    const COPY: sock_filter = sock_filter { code: 0x07, jt: 0, jf: 0, k: 0 };
    /// `BPF_ALU | BPF_ADD | BPF_X`: adds X to the accumulator.
    const ADD: sock_filter = sock_filter { code: 0x0c, jt: 0, jf: 0, k: 0 };
    /// Upper halves of address and length, so the sum has no carry.
    const MOST: u32 = (layout::CONFIG >> 32) as u32;
    /// Upper halves of both: the lower halves add less than two.
    const MOST_TOGETHER: u32 = MOST - 2;
    [
        load(data::NUMBER),
        sock_filter { jt: 3, ..unless(linux::__NR_mmap, 0) },
        sock_filter { jt: 2, ..unless(linux::__NR_munmap, 0) },
        sock_filter { jt: 1, ..unless(linux::__NR_mprotect, 0) },
        unless(linux::__NR_pkey_mprotect, 8),
        load(data::FIRST_HIGH),
        if_above(MOST, 5),
        COPY,
        load(data::SECOND_HIGH),
        if_above(MOST, 2),
        ADD,
        sock_filter { jf: 1, ..if_above(MOST_TOGETHER, 0) },
        ret(ptrace::SECCOMP_RET_KILL_PROCESS),
    ]
}

fn compile(rules: Rules) -> Result<BpfProgram, BackendError> {
    compile_or(rules, SeccompAction::KillProcess)
}

/// Compiles rules; calls that are not allowed get the action `other`.
fn compile_or(rules: Rules, other: SeccompAction) -> Result<BpfProgram, BackendError> {
    let allow = SeccompAction::Allow;
    SeccompFilter::new(rules, other, allow, TargetArch::x86_64).and_then(BpfProgram::try_from)
}

/// Packs the length, the instructions (`struct sock_filter`), and zeros.
fn pack(program: &[sock_filter]) -> Result<Vec<u64>, Error> {
    let mut words = vec![program.len() as u64];
    words.extend(program.iter().map(|instruction| {
        u64::from(instruction.code)
            | u64::from(instruction.jt) << 16
            | u64::from(instruction.jf) << 24
            | u64::from(instruction.k) << 32
    }));
    if words.len() > Filters::WORDS {
        let text = format!("{} instructions (limit {})", program.len(), Filters::WORDS - 1);
        return Err(Error::Filters(text));
    }
    words.resize(Filters::WORDS, 0);
    Ok(words)
}

fn rule(conditions: Conditions<'_>) -> Result<SeccompRule, BackendError> {
    let conditions: Result<_, _> = conditions
        .iter()
        .map(|&(argument, value)| SeccompCondition::new(argument, Dword, Eq, value.into()))
        .collect();
    SeccompRule::new(conditions?)
}

/// Allows a call with each of these argument sets.
fn allow(rules: &mut Rules, call: u32, sets: &[Conditions<'_>]) -> Result<(), BackendError> {
    for set in sets {
        rules.entry(call.into()).or_default().push(rule(set)?);
    }
    Ok(())
}

/// Allows calls with any arguments.
fn allow_all(rules: &mut Rules, calls: &[u32]) {
    rules.extend(calls.iter().map(|&call| (i64::from(call), Vec::new())));
}

/// Allows a signal to single processes, not to groups.
fn signal(rules: &mut Rules, number: u32) -> Result<(), BackendError> {
    let mut conditions = vec![SeccompCondition::new(1, Dword, Eq, number.into())?];
    conditions.push(SeccompCondition::new(0, Dword, Ge, 1)?);
    conditions.push(SeccompCondition::new(0, Dword, Le, i32::MAX as u64)?);
    rules.entry(linux::__NR_kill.into()).or_default().push(SeccompRule::new(conditions)?);
    Ok(())
}

/// Allows a process to set its own CPU affinity to a set that the VM's processes cannot change.
fn own_cpus(rules: &mut Rules) -> Result<(), BackendError> {
    const LENGTH: u64 = layout::CPU_SET_LENGTH;
    const LAST: u64 = layout::CPU_SETS + layout::CPU_SET_CPUS * LENGTH;
    let conditions = vec![
        SeccompCondition::new(0, Dword, Eq, 0)?,
        SeccompCondition::new(1, Dword, Eq, LENGTH)?,
        SeccompCondition::new(2, Qword, Ge, layout::CPU_SETS)?,
        SeccompCondition::new(2, Qword, Le, LAST)?,
        SeccompCondition::new(2, Dword, MaskedEq(LENGTH - 1), 0)?,
    ];
    rules.insert(linux::__NR_sched_setaffinity.into(), vec![SeccompRule::new(conditions)?]);
    Ok(())
}

/// Calls of all processes.
fn common(rules: &mut Rules, descriptors: &[u32]) -> Result<(), BackendError> {
    allow_all(rules, &[linux::__NR_exit_group]);
    for operation in [linux::FUTEX_WAIT, linux::FUTEX_WAKE] {
        allow(rules, linux::__NR_futex, &[&[(1, operation)]])?;
    }
    for &descriptor in descriptors {
        allow(rules, linux::__NR_write, &[&[(0, descriptor)]])?;
    }
    Ok(())
}

/// Filter of a thread that runs user mode in a separate process: it waits, wakes and returns from
/// signals. Any other call comes from user mode, which has jumped to the thread's code, and is
/// forwarded to the guest kernel like all its calls.
fn program() -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    // Waits have no timeout.
    let wait = SeccompCondition::new(1, Dword, Eq, linux::FUTEX_WAIT.into())?;
    let no_time = SeccompCondition::new(3, Qword, Eq, 0)?;
    rules.insert(linux::__NR_futex.into(), vec![SeccompRule::new(vec![wait, no_time])?]);
    allow(&mut rules, linux::__NR_futex, &[&[(1, linux::FUTEX_WAKE)]])?;
    own_cpus(&mut rules)?;
    allow_all(&mut rules, &[linux::__NR_rt_sigreturn, linux::__NR_restart_syscall]);
    Ok(rules)
}

/// Filter of a guest process with an address space of the guest.
fn guest(options: u64) -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    if options & option::USER_PROCESS != 0 {
        // Check for waiters.
        allow(&mut rules, linux::__NR_futex, &[&[(1, linux::FUTEX_CMP_REQUEUE)]])?;
    }
    common(&mut rules, &[layout::ERRORS_FD, layout::DOORBELL_FD])?;
    let memory = linux::MAP_SHARED | linux::MAP_FIXED;
    let own = linux::MAP_PRIVATE | linux::MAP_ANONYMOUS | linux::MAP_FIXED;
    allow(
        &mut rules,
        linux::__NR_mmap,
        &[
            &[(3, memory), (4, layout::MEMORY_FD)],
            &[(3, memory | linux::MAP_POPULATE), (4, layout::MEMORY_FD)],
            &[(3, own)],
        ],
    )?;
    let hole = linux::FALLOC_FL_PUNCH_HOLE | linux::FALLOC_FL_KEEP_SIZE;
    allow(&mut rules, linux::__NR_fallocate, &[&[(0, layout::MEMORY_FD), (1, hole)]])?;
    own_cpus(&mut rules)?;
    // It unblocks signals once it has its filter. A guest could block and unblock them with
    // rt_sigreturn(2) anyway.
    allow(&mut rules, linux::__NR_rt_sigprocmask, &[&[(0, linux::SIG_SETMASK)]])?;
    // Its own CPU time.
    let used = linux::CLOCK_PROCESS_CPUTIME_ID;
    allow(&mut rules, linux::__NR_clock_gettime, &[&[(0, used)]])?;
    allow_all(
        &mut rules,
        &[
            linux::__NR_munmap,
            linux::__NR_mprotect,
            linux::__NR_pkey_mprotect,
            linux::__NR_sigaltstack,
            linux::__NR_timer_settime,
            linux::__NR_rt_sigreturn,
            linux::__NR_getrandom,
            linux::__NR_sched_yield,
            // Restart of a wait after SIGSTOP and SIGCONT.
            linux::__NR_restart_syscall,
        ],
    );
    Ok(rules)
}

/// Filter of a disk process; its disk is its only descriptor besides those named here.
fn worker() -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    common(&mut rules, &[layout::ERRORS_FD, layout::DOORBELL_FD])?;
    disks(&mut rules)?;
    // The ring is restricted at its creation.
    let enter = &[(0, layout::RING_FD), (3, io_uring::IORING_ENTER_GETEVENTS)];
    allow(&mut rules, linux::__NR_io_uring_enter, &[enter])?;
    Ok(rules)
}

/// Allows the calls on raw disks.
fn disks(rules: &mut Rules) -> Result<(), BackendError> {
    for disk in layout::DISKS_FD..layout::DISKS_FD + MAX_DISKS as u32 {
        // Flags with and without waiting.
        for flags in [0, linux::RWF_NOWAIT] {
            allow(rules, linux::__NR_preadv2, &[&[(0, disk), (5, flags)]])?;
        }
        for call in [linux::__NR_pwritev, linux::__NR_pwrite64, linux::__NR_fdatasync] {
            allow(rules, call, &[&[(0, disk)]])?;
        }
        for mode in [linux::FALLOC_FL_PUNCH_HOLE, linux::FALLOC_FL_ZERO_RANGE] {
            let mode = mode | linux::FALLOC_FL_KEEP_SIZE;
            allow(rules, linux::__NR_fallocate, &[&[(0, disk), (1, mode)]])?;
        }
    }
    Ok(())
}

/// Filter of a network process; its network is its only descriptor besides those named here. Of a
/// tap device it may only set the offloads.
fn net() -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    common(&mut rules, &[layout::ERRORS_FD, layout::DOORBELL_FD])?;
    // The vsock stream follows the networks.
    for net in layout::NETS_FD..=layout::NETS_FD + MAX_NETS as u32 {
        allow(&mut rules, linux::__NR_readv, &[&[(0, net)]])?;
        allow(&mut rules, linux::__NR_writev, &[&[(0, net)]])?;
        allow(&mut rules, linux::__NR_ioctl, &[&[(0, net), (1, ioctl::TUNSETOFFLOAD)]])?;
    }
    Ok(rules)
}

/// Filter of the process that serves the console and creates guest processes, which set themselves
/// up under this filter before they install theirs.
fn device(options: u64) -> Result<Rules, BackendError> {
    let mut rules = guest(options)?;
    if options & option::USER_PROCESS != 0 {
        // A user process has a second thread.
        let thread = linux::CLONE_VM | linux::CLONE_SIGHAND | linux::CLONE_THREAD;
        allow(&mut rules, linux::__NR_clone, &[&[(0, thread)]])?;
    }
    if options & option::TRACED != 0 {
        for request in [ptrace::PTRACE_TRACEME, ptrace::PTRACE_CONT] {
            allow(&mut rules, linux::__NR_ptrace, &[&[(0, request)]])?;
        }
        allow_all(&mut rules, &[linux::__NR_rt_sigtimedwait]);
    }
    for descriptor in [layout::OUTPUT_FD, layout::CONTROL_FD, layout::CONSOLE_FD] {
        allow(&mut rules, linux::__NR_write, &[&[(0, descriptor)]])?;
    }
    let inputs = [layout::INPUT_FD, layout::DOORBELL_FD, layout::CONTROL_FD, layout::CONSOLE_FD];
    for descriptor in inputs {
        allow(&mut rules, linux::__NR_read, &[&[(0, descriptor)]])?;
    }
    // A guest process maps the state of its vCPU.
    allow(
        &mut rules,
        linux::__NR_mmap,
        &[&[(3, linux::MAP_SHARED | linux::MAP_FIXED), (4, layout::SHARED_FD)]],
    )?;
    // A process, not a thread, without new namespaces.
    allow(&mut rules, linux::__NR_clone, &[&[(0, linux::SIGCHLD)]])?;
    for number in [linux::SIGKILL, linux::SIGSTOP, linux::SIGCONT, layout::KICK_SIGNAL] {
        signal(&mut rules, number)?;
    }
    for request in [prctl::PR_SET_PDEATHSIG, prctl::PR_SET_SYSCALL_USER_DISPATCH] {
        allow(&mut rules, linux::__NR_prctl, &[&[(0, request)]])?;
    }
    // `SECCOMP_SET_MODE_FILTER` without flags.
    allow(&mut rules, linux::__NR_seccomp, &[&[(0, 1), (1, 0)]])?;
    // Timer of a guest process.
    allow(&mut rules, linux::__NR_timer_create, &[&[(0, linux::CLOCK_MONOTONIC)]])?;
    allow_all(
        &mut rules,
        &[
            linux::__NR_poll,
            linux::__NR_wait4,
            linux::__NR_getpid,
            linux::__NR_getppid,
            linux::__NR_close_range,
            linux::__NR_rt_sigaction,
            linux::__NR_rt_sigprocmask,
        ],
    );
    Ok(rules)
}

/// Installs the filter of a switch server: it forwards frames between sockets that it has or
/// accepts, and locks the folder of this descriptor at the end.
///
/// # Errors
/// [`Error::Filters`]
pub fn confine_switch(folder: u32) -> Result<(), Error> {
    let failed = |error: &dyn std::fmt::Display| Error::Filters(error.to_string());
    let program = switch(folder).and_then(compile).map_err(|error| failed(&error))?;
    seccompiler::apply_filter(&program).map_err(|error| failed(&error))
}

/// Installs the filter of a process that forwards frames between sockets that it has.
///
/// # Errors
/// [`Error::Filters`]
pub fn confine_relay() -> Result<(), Error> {
    let failed = |error: &dyn std::fmt::Display| Error::Filters(error.to_string());
    let program = stream_forwarder().and_then(compile).map_err(|error| failed(&error))?;
    seccompiler::apply_filter(&program).map_err(|error| failed(&error))
}

fn switch(folder: u32) -> Result<Rules, BackendError> {
    let mut rules = stream_forwarder()?;
    allow(&mut rules, linux::__NR_ioctl, &[&[(1, ioctl::FIONBIO)]])?;
    allow(&mut rules, linux::__NR_flock, &[&[(0, folder)]])?;
    // Credentials of the peer.
    let peer = [(1, net::SOL_SOCKET), (2, net::SO_PEERCRED)];
    allow(&mut rules, linux::__NR_getsockopt, &[&peer])?;
    allow_all(&mut rules, &[linux::__NR_accept4]);
    Ok(rules)
}

/// Filter of a process that forwards data between sockets that it has.
fn stream_forwarder() -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    rules.insert(linux::__NR_mmap.into(), vec![own_memory()?]);
    allow_all(
        &mut rules,
        &[
            linux::__NR_ppoll,
            linux::__NR_recvfrom,
            linux::__NR_sendto,
            linux::__NR_close,
            // Memory, hash tables, exit.
            linux::__NR_mremap,
            linux::__NR_munmap,
            linux::__NR_madvise,
            linux::__NR_brk,
            linux::__NR_getrandom,
            linux::__NR_futex,
            linux::__NR_sigaltstack,
            linux::__NR_exit_group,
        ],
    );
    Ok(rules)
}

/// Arguments of mmap(2) for private memory without execute permission.
fn own_memory() -> Result<SeccompRule, BackendError> {
    let data = SeccompCondition::new(2, Dword, MaskedEq(linux::PROT_EXEC.into()), 0)?;
    let anonymous = linux::MAP_ANONYMOUS.into();
    let own = SeccompCondition::new(3, Dword, MaskedEq(anonymous), anonymous)?;
    SeccompRule::new(vec![data, own])
}

/// Direction of an ioctl(2) argument: read or written by the kernel.
const READS: u32 = 1;
const WRITES: u32 = 2;

/// Returns the number of a KVM ioctl: direction, number and size of its argument (`_IOC` of
/// `asm-generic/ioctl.h` in Linux).
const fn kvm(direction: u32, number: u32, size: u32) -> u32 {
    const KVM: u32 = 0xae;
    direction << 30 | size << 16 | KVM << 8 | number
}

/// KVM ioctls on vCPUs after their creation (`linux/kvm.h`): run, interrupts, registers.
const KVM_CALLS: [u32; 14] = [
    kvm(0, 0x80, 0),
    kvm(READS, 0x86, 4),
    kvm(0, 0x9a, 0),
    // Get and set special registers, MSRs, events, debug registers, extended control registers.
    kvm(WRITES, 0x83, 312),
    kvm(READS, 0x84, 312),
    kvm(READS | WRITES, 0x88, 8),
    kvm(READS, 0x89, 8),
    kvm(WRITES, 0x9f, 64),
    kvm(READS, 0xa0, 64),
    kvm(WRITES, 0xa1, 128),
    kvm(READS, 0xa2, 128),
    kvm(WRITES, 0xa6, 392),
    kvm(READS, 0xa7, 392),
    // TSC offset.
    kvm(READS, 0xe1, 24),
];

/// Debug events: breakpoints and single steps.
const KVM_DEBUG: u32 = kvm(READS, 0x9b, 72);

/// Filter of a KVM process, with or without a debugger.
fn kvm_process(own: u32, debugs: bool) -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    for call in KVM_CALLS.into_iter().chain(debugs.then_some(KVM_DEBUG)) {
        allow(&mut rules, linux::__NR_ioctl, &[&[(1, call)]])?;
    }
    let written = [layout::OUTPUT_FD, layout::ERRORS_FD, layout::CONTROL_FD, layout::CONSOLE_FD];
    for descriptor in written {
        allow(&mut rules, linux::__NR_write, &[&[(0, descriptor)]])?;
    }
    // The vsock stream follows the networks.
    for net in layout::NETS_FD..=layout::NETS_FD + MAX_NETS as u32 {
        allow(&mut rules, linux::__NR_write, &[&[(0, net)]])?;
        allow(&mut rules, linux::__NR_ioctl, &[&[(0, net), (1, ioctl::TUNSETOFFLOAD)]])?;
    }
    disks(&mut rules)?;
    // Its rings are restricted at their creation.
    let enter = &[(3, io_uring::IORING_ENTER_GETEVENTS)];
    allow(&mut rules, linux::__NR_io_uring_enter, &[enter])?;
    // Its own threads.
    allow(&mut rules, linux::__NR_tgkill, &[&[(0, own)]])?;
    // Private memory without execute permission.
    let data = SeccompCondition::new(2, Dword, MaskedEq(linux::PROT_EXEC.into()), 0)?;
    rules.insert(linux::__NR_mmap.into(), vec![own_memory()?]);
    rules.insert(linux::__NR_mprotect.into(), vec![SeccompRule::new(vec![data])?]);
    allow_all(
        &mut rules,
        &[
            linux::__NR_brk,
            linux::__NR_clock_gettime,
            linux::__NR_clock_nanosleep,
            linux::__NR_close,
            linux::__NR_exit,
            linux::__NR_exit_group,
            linux::__NR_fallocate,
            linux::__NR_futex,
            linux::__NR_getpid,
            linux::__NR_getrandom,
            linux::__NR_gettid,
            linux::__NR_lseek,
            linux::__NR_madvise,
            linux::__NR_mremap,
            linux::__NR_munmap,
            linux::__NR_newfstatat,
            linux::__NR_ppoll,
            linux::__NR_read,
            linux::__NR_restart_syscall,
            linux::__NR_rt_sigprocmask,
            linux::__NR_rt_sigreturn,
            linux::__NR_sched_yield,
            linux::__NR_sigaltstack,
            linux::__NR_statx,
            linux::__NR_timer_delete,
            linux::__NR_timer_settime,
        ],
    );
    Ok(rules)
}

/// Installs the filter of a KVM process that has created all its threads and vCPUs; with `debugs`,
/// a debugger may stop it.
///
/// # Errors
/// [`Error::Filters`]
pub fn confine(debugs: bool) -> Result<(), Error> {
    let failed = |error: &dyn std::fmt::Display| Error::Filters(error.to_string());
    let rules = kvm_process(std::process::id(), debugs);
    let program = rules.and_then(compile).map_err(|error| failed(&error))?;
    apply_filter_all_threads(&program).map_err(|error| failed(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

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

    /// Returns whether the filter allows a call.
    fn allows(filter: &[u64], call: u32, architecture: u32, arguments: [u64; 6]) -> bool {
        action(filter, call, architecture, 0x5555_6666_7777, arguments) == ALLOW
    }

    /// Interprets a filter on `struct seccomp_data` (`Documentation/networking/filter.rst` in
    /// Linux).
    fn action(filter: &[u64], call: u32, architecture: u32, at: u64, arguments: [u64; 6]) -> u32 {
        const KILL_PROCESS: u32 = 0x8000_0000;
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
                    assert!(matches!(k, KILL_PROCESS | ALLOW | TRAP), "{k:#x}");
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
        for (call, kicks) in
            (0..CALLS).chain([u32::MAX]).flat_map(|call| [(call, false), (call, true)])
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
        for (which, call, arguments) in
            [(Filters::GUEST, 202, requeue), (Filters::DEVICE, 56, thread)]
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
            let is_disk = (6..10).contains(&fd);
            // preadv2, pwritev, pwrite64, fdatasync, fallocate
            for (call, arguments) in [
                (327, [fd, 1, 1, 0, 0, NOWAIT]),
                (296, [fd, 1, 1, 0, 0, 0]),
                (18, [fd, 1, 1, 0, 0, 0]),
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
            let is_written = is_net || matches!(fd, 1 | 2 | 32 | 33);
            assert_eq!(may(1, [fd, 4096, 1, 0, 0, 0]), is_written, "{fd}");
            assert_eq!(may(16, [fd, OFFLOAD, 7, 0, 0, 0]), is_net, "{fd}");
            // KVM_RUN; KVM_CREATE_VCPU, KVM_SET_USER_MEMORY_REGION, TUNSETIFF, TIOCSTI
            assert!(may(16, [fd, 0xae80, 0, 0, 0, 0]));
            for other in [0xae41, 0x4020_ae46, 0x4004_54ca, 0x5412] {
                assert!(!may(16, [fd, other, 0, 0, 0, 0]), "{fd} {other:#x}");
            }
        }
        for fd in 0..64 {
            // preadv2, pwritev, pwrite64, fdatasync
            for call in [327, 296, 18, 75] {
                assert_eq!(may(call, [fd, 1, 1, 0, 0, 0]), (6..10).contains(&fd), "{call} {fd}");
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
        for filter in filters().chunks(Filters::WORDS).chain([&kvm[..], &switch[..]]) {
            for call in NEVER {
                assert!(!allows(filter, call, X86_64, [0; 6]), "{call}");
                assert!(!allows(filter, call, X86_64, [3; 6]), "{call}");
            }
        }
    }
}
