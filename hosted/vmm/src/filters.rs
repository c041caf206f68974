//! What the processes of a machine may ask of the host: filters of system calls (seccomp(2)), made by `seccompiler`, installed by the wedge.
//!
//! A guest process runs the guest's kernel, which may contain anything; with its filter it can change mappings of its own address space, of
//! the machine's memory or of fresh memory, give memory of the machine back, wait and wake, let others run, set its one timer, choose its own
//! CPUs among those that the VM was started on, ask for the CPU time that it has used, describe thread-local storage of 32-bit code, block
//! signals, ring the device process, and end. Everything else
//! ends it, and the machine with it. Where the host keeps signals within the machine, it may also send the one that tells a virtual CPU of events.
//!
//! It can change no mapping from [`layout::CONFIG`] on. So it can name the sets of CPUs there, and no others: what is in them cannot change.

use std::collections::BTreeMap;

use linux_raw_sys::{general as linux, io_uring, ioctl, net, prctl, ptrace};
use proto::wedge::{Filters, MAX_DISKS, MAX_NETS, layout, option};
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::{Eq, Ge, Le, MaskedEq};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter_all_threads, sock_filter,
};

use crate::Error;

/// System calls by number, each with the arguments that it may have: none, any.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Argument and value of each condition that has to hold.
type Conditions<'a> = &'a [(u8, u32)];

/// The filters, as the wedge reads them.
///
/// They depend on [`option::TRACED`] and [`option::USER_PROCESS`]: who traces guest processes, and who runs their programs, are processes that the device
/// process makes.
pub fn words(options: u64) -> Result<Vec<u64>, Error> {
    let mut words = Vec::new();
    let kicking = |rules: Result<Rules, _>| {
        let mut rules = rules?;
        signal(&mut rules, layout::KICK_SIGNAL)?;
        Ok(rules)
    };
    let guest = || guest(options);
    let programs = calls_of_programs(ptrace::SECCOMP_RET_KILL_PROCESS);
    let of_guest = [&programs[..], &addresses_of_guest()].concat();
    for (rules, before) in [
        (guest(), &of_guest[..]),
        (worker(), &[]),
        (net(), &[]),
        (kicking(guest()), &of_guest),
        (kicking(worker()), &[]),
        (kicking(net()), &[]),
        // It sets up what guest processes cannot change any more.
        (device(options), &programs),
    ] {
        let program = rules.and_then(compile).map_err(|error| Error::Filters(error.to_string()))?;
        words.extend(pack(&[before, &program[..]].concat())?);
    }
    let program = program().and_then(|rules| compile_or(rules, SeccompAction::Trap));
    let program = program.map_err(|error| Error::Filters(error.to_string()))?;
    words.extend(pack(&[&calls_of_programs(ptrace::SECCOMP_RET_TRAP)[..], &program[..]].concat())?);
    Ok(words)
}

/// What comes before the filter of a process that runs guests' programs. Of 32-bit calls, it may describe thread-local storage. A call of the
/// host's old page for calls (`vsyscall`), which dispatching does not see, becomes a signal. Of `other` 32-bit calls that comes; other calls go on.
fn calls_of_programs(other: u32) -> [sock_filter; 16] {
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
        give(ptrace::SECCOMP_RET_ALLOW),
        give(other),
        // Only of these: the host need not carry the filter out for what is allowed by its number alone.
        load(NUMBER),
        sock_filter { jt: 2, ..unless(gettimeofday, 0) },
        sock_filter { jt: 1, ..unless(time, 0) },
        unless(getcpu, 6),
        load(INSTRUCTION_POINTER + 4),
        unless(high, 4),
        load(INSTRUCTION_POINTER),
        and(0xffff_f000),
        unless(low, 1),
        give(ptrace::SECCOMP_RET_TRAP),
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

/// Keeps these bits of it.
const fn and(k: u32) -> sock_filter {
    sock_filter { code: 0x54, jt: 0, jf: 0, k }
}

/// Skips `jf` instructions unless it has this value.
const fn unless(k: u32, jf: u8) -> sock_filter {
    sock_filter { code: 0x15, jt: 0, jf, k }
}

/// Skips `jt` instructions if it is larger.
const fn if_above(k: u32, jt: u8) -> sock_filter {
    sock_filter { code: 0x25, jt, jf: 0, k }
}

/// Ends with this action.
const fn give(k: u32) -> sock_filter {
    sock_filter { code: 0x06, jt: 0, jf: 0, k }
}

/// What comes before the filter of a guest process: calls whose first two arguments are a range of addresses end it if the range may
/// reach [`layout::CONFIG`]. `seccompiler` compares arguments with constants; this adds them, in units of 4 GiB.
fn addresses_of_guest() -> [sock_filter; 13] {
    /// `BPF_MISC | BPF_TAX`: copies the accumulator to X.
    const COPY: sock_filter = sock_filter { code: 0x07, jt: 0, jf: 0, k: 0 };
    /// `BPF_ALU | BPF_ADD | BPF_X`: adds X to the accumulator.
    const ADD: sock_filter = sock_filter { code: 0x0c, jt: 0, jf: 0, k: 0 };
    /// Of address and length alone, so that their sum has no carry.
    const MOST: u32 = (layout::CONFIG >> 32) as u32;
    /// Of both: what the low halves add is less than two.
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
        give(ptrace::SECCOMP_RET_KILL_PROCESS),
    ]
}

fn compile(rules: Rules) -> Result<BpfProgram, BackendError> {
    compile_or(rules, SeccompAction::KillProcess)
}

/// What is not allowed comes to something else.
fn compile_or(rules: Rules, other: SeccompAction) -> Result<BpfProgram, BackendError> {
    let allow = SeccompAction::Allow;
    SeccompFilter::new(rules, other, allow, TargetArch::x86_64).and_then(BpfProgram::try_from)
}

/// The length, then the instructions (`struct sock_filter`), then zeros.
fn pack(program: &[sock_filter]) -> Result<Vec<u64>, Error> {
    let mut words = vec![program.len() as u64];
    words.extend(program.iter().map(|instruction| {
        u64::from(instruction.code)
            | u64::from(instruction.jt) << 16
            | u64::from(instruction.jf) << 24
            | u64::from(instruction.k) << 32
    }));
    if words.len() > Filters::WORDS {
        return Err(Error::Filters(format!("{} instructions are too many", program.len())));
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

/// A call that is allowed with each of these sets of arguments.
fn allow(rules: &mut Rules, call: u32, sets: &[Conditions<'_>]) -> Result<(), BackendError> {
    for set in sets {
        rules.entry(call.into()).or_default().push(rule(set)?);
    }
    Ok(())
}

/// With any arguments.
fn allow_all(rules: &mut Rules, calls: &[u32]) {
    rules.extend(calls.iter().map(|&call| (i64::from(call), Vec::new())));
}

/// A signal, to one process, not a group or all.
fn signal(rules: &mut Rules, number: u32) -> Result<(), BackendError> {
    let mut conditions = vec![SeccompCondition::new(1, Dword, Eq, number.into())?];
    conditions.push(SeccompCondition::new(0, Dword, Ge, 1)?);
    conditions.push(SeccompCondition::new(0, Dword, Le, i32::MAX as u64)?);
    rules.entry(linux::__NR_kill.into()).or_default().push(SeccompRule::new(conditions)?);
    Ok(())
}

/// A process chooses its own CPUs: one of the sets that the VM's processes cannot change.
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

/// What all do.
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

/// A thread that runs programs apart from their kernel: it waits, wakes and returns from signals. Another call comes from a program, which has
/// jumped to where the thread makes its own, and is the guest's, as its others are.
fn program() -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    // Who waits does so until it is woken: no time.
    let wait = SeccompCondition::new(1, Dword, Eq, linux::FUTEX_WAIT.into())?;
    let no_time = SeccompCondition::new(3, Qword, Eq, 0)?;
    rules.insert(linux::__NR_futex.into(), vec![SeccompRule::new(vec![wait, no_time])?]);
    allow(&mut rules, linux::__NR_futex, &[&[(1, linux::FUTEX_WAKE)]])?;
    own_cpus(&mut rules)?;
    allow_all(&mut rules, &[linux::__NR_rt_sigreturn, linux::__NR_restart_syscall]);
    Ok(rules)
}

/// A process with an address space of the guest.
fn guest(options: u64) -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    if options & option::USER_PROCESS != 0 {
        // It looks whether somebody waits.
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
    // It lets signals in once it has its filter. A guest could block and unblock them by rt_sigreturn(2) in any case.
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
            // A process that was stopped while it waited goes on waiting.
            linux::__NR_restart_syscall,
        ],
    );
    Ok(rules)
}

/// A process of a disk, whose descriptor is the only one that it has beside those named here.
fn worker() -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    common(&mut rules, &[layout::ERRORS_FD, layout::DOORBELL_FD])?;
    for disk in layout::DISKS_FD..layout::DISKS_FD + MAX_DISKS as u32 {
        // What waits, or not.
        for flags in [0, linux::RWF_NOWAIT] {
            allow(&mut rules, linux::__NR_preadv2, &[&[(0, disk), (5, flags)]])?;
        }
        for call in [linux::__NR_pwritev, linux::__NR_pwrite64, linux::__NR_fdatasync] {
            allow(&mut rules, call, &[&[(0, disk)]])?;
        }
        for mode in [linux::FALLOC_FL_PUNCH_HOLE, linux::FALLOC_FL_ZERO_RANGE] {
            let mode = mode | linux::FALLOC_FL_KEEP_SIZE;
            allow(&mut rules, linux::__NR_fallocate, &[&[(0, disk), (1, mode)]])?;
        }
    }
    // What its ring does is restricted when it is made.
    let enter = &[(0, layout::RING_FD), (3, io_uring::IORING_ENTER_GETEVENTS)];
    allow(&mut rules, linux::__NR_io_uring_enter, &[enter])?;
    Ok(rules)
}

/// A process of a network, whose descriptor is the only one that it has beside those named here. Of a tap device it can only say which frames
/// are taken.
fn net() -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    common(&mut rules, &[layout::ERRORS_FD, layout::DOORBELL_FD])?;
    // Behind the networks is vsock's stream.
    for net in layout::NETS_FD..=layout::NETS_FD + MAX_NETS as u32 {
        allow(&mut rules, linux::__NR_readv, &[&[(0, net)]])?;
        allow(&mut rules, linux::__NR_writev, &[&[(0, net)]])?;
        allow(&mut rules, linux::__NR_ioctl, &[&[(0, net), (1, ioctl::TUNSETOFFLOAD)]])?;
    }
    Ok(rules)
}

/// The process that serves the console and makes those of the guest, which set themselves up under this filter before they take theirs.
fn device(options: u64) -> Result<Rules, BackendError> {
    let mut rules = guest(options)?;
    if options & option::USER_PROCESS != 0 {
        // A process of programs has a second thread.
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
    // A process of the guest maps what belongs to its virtual CPU.
    allow(
        &mut rules,
        linux::__NR_mmap,
        &[&[(3, linux::MAP_SHARED | linux::MAP_FIXED), (4, layout::SHARED_FD)]],
    )?;
    // A process, not a thread, and no name spaces.
    allow(&mut rules, linux::__NR_clone, &[&[(0, linux::SIGCHLD)]])?;
    for number in [linux::SIGKILL, linux::SIGSTOP, linux::SIGCONT, layout::KICK_SIGNAL] {
        signal(&mut rules, number)?;
    }
    for request in [prctl::PR_SET_PDEATHSIG, prctl::PR_SET_SYSCALL_USER_DISPATCH] {
        allow(&mut rules, linux::__NR_prctl, &[&[(0, request)]])?;
    }
    // `SECCOMP_SET_MODE_FILTER` without flags.
    allow(&mut rules, linux::__NR_seccomp, &[&[(0, 1), (1, 0)]])?;
    // The timer of a process of the guest.
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

/// Confines this process, a program of Rust's library that only carries frames between sockets that it has or accepts, and in the end
/// locks the folder of this descriptor.
///
/// # Errors
/// [`Error::Filters`]
pub fn confine_switch(folder: u32) -> Result<(), Error> {
    let failed = |error: &dyn std::fmt::Display| Error::Filters(error.to_string());
    let program = switch(folder).and_then(compile).map_err(|error| failed(&error))?;
    seccompiler::apply_filter(&program).map_err(|error| failed(&error))
}

/// Confines this process, a program of Rust's library that only carries frames between sockets that it has.
///
/// # Errors
/// [`Error::Filters`]
pub fn confine_relay() -> Result<(), Error> {
    let failed = |error: &dyn std::fmt::Display| Error::Filters(error.to_string());
    let program = carrier().and_then(compile).map_err(|error| failed(&error))?;
    seccompiler::apply_filter(&program).map_err(|error| failed(&error))
}

fn switch(folder: u32) -> Result<Rules, BackendError> {
    let mut rules = carrier()?;
    allow(&mut rules, linux::__NR_ioctl, &[&[(1, ioctl::FIONBIO)]])?;
    allow(&mut rules, linux::__NR_flock, &[&[(0, folder)]])?;
    // Who connects.
    let peer = [(1, net::SOL_SOCKET), (2, net::SO_PEERCRED)];
    allow(&mut rules, linux::__NR_getsockopt, &[&peer])?;
    allow_all(&mut rules, &[linux::__NR_accept4]);
    Ok(rules)
}

/// A process that carries bytes between sockets that it has.
fn carrier() -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    rules.insert(linux::__NR_mmap.into(), vec![own_memory()?]);
    allow_all(
        &mut rules,
        &[
            linux::__NR_ppoll,
            linux::__NR_recvfrom,
            linux::__NR_sendto,
            linux::__NR_close,
            // Memory, hash tables, the end.
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

/// Arguments of mmap(2) for memory of the process's own, none of which becomes code.
fn own_memory() -> Result<SeccompRule, BackendError> {
    let data = SeccompCondition::new(2, Dword, MaskedEq(linux::PROT_EXEC.into()), 0)?;
    let anonymous = linux::MAP_ANONYMOUS.into();
    let own = SeccompCondition::new(3, Dword, MaskedEq(anonymous), anonymous)?;
    SeccompRule::new(vec![data, own])
}

/// Direction of an argument of ioctl(2): the kernel reads it, writes it.
const READS: u32 = 1;
const WRITES: u32 = 2;

/// Number of a call of KVM: direction, number and size of its argument (`_IOC` of `asm-generic/ioctl.h` in Linux).
const fn kvm(direction: u32, number: u32, size: u32) -> u32 {
    const KVM: u32 = 0xae;
    direction << 30 | size << 16 | KVM << 8 | number
}

/// What a process may ask of KVM's processors once there are all of them (`linux/kvm.h`): to run, interrupts, registers.
const KVM_CALLS: [u32; 14] = [
    kvm(0, 0x80, 0),
    kvm(READS, 0x86, 4),
    kvm(0, 0x9a, 0),
    // Special registers, MSRs, events, debug registers, extended control registers: to get and to set.
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
    // The offset of the time-stamp counter.
    kvm(READS, 0xe1, 24),
];

/// What a debugger wants to be told of: breakpoints, and single instructions.
const KVM_DEBUG: u32 = kvm(READS, 0x9b, 72);

/// The process that is a machine of KVM, which a debugger may stop or not.
fn machine(own: u32, debugs: bool) -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    for call in KVM_CALLS.into_iter().chain(debugs.then_some(KVM_DEBUG)) {
        allow(&mut rules, linux::__NR_ioctl, &[&[(1, call)]])?;
    }
    let written = [layout::OUTPUT_FD, layout::ERRORS_FD, layout::CONTROL_FD, layout::CONSOLE_FD];
    for descriptor in written {
        allow(&mut rules, linux::__NR_write, &[&[(0, descriptor)]])?;
    }
    // Behind the networks is vsock's stream.
    for net in layout::NETS_FD..=layout::NETS_FD + MAX_NETS as u32 {
        allow(&mut rules, linux::__NR_write, &[&[(0, net)]])?;
        allow(&mut rules, linux::__NR_ioctl, &[&[(0, net), (1, ioctl::TUNSETOFFLOAD)]])?;
    }
    // Its own threads.
    allow(&mut rules, linux::__NR_tgkill, &[&[(0, own)]])?;
    // Memory of its own, none of which becomes code.
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
            linux::__NR_fdatasync,
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
            linux::__NR_pread64,
            linux::__NR_pwrite64,
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

/// Confines this process, which is a machine of KVM and has all its threads and processors; if it `debugs`, a debugger may stop it.
///
/// # Errors
/// [`Error::Filters`]
pub fn confine(debugs: bool) -> Result<(), Error> {
    let failed = |error: &dyn std::fmt::Display| Error::Filters(error.to_string());
    let rules = machine(std::process::id(), debugs);
    let program = rules.and_then(compile).map_err(|error| failed(&error))?;
    apply_filter_all_threads(&program).map_err(|error| failed(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    const X86_64: u32 = 0xc000_003e;
    const I386: u32 = 0x4000_0003;
    const X32: u32 = 0x4000_0000;
    /// Far more than Linux has.
    const CALLS: u32 = 1024;
    /// Sets of arguments that each call is tried with.
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
            // The last instruction returns, and nothing follows.
            assert_eq!(filter[length] & 0xff, 0x06);
            assert!(filter[length + 1..].iter().all(|&word| word == 0));
        }
    }

    const ALLOW: u32 = 0x7fff_0000;
    const TRAP: u32 = 0x0003_0000;

    /// Whether the host carries a call out.
    fn allows(filter: &[u64], call: u32, architecture: u32, arguments: [u64; 6]) -> bool {
        action(filter, call, architecture, 0x5555_6666_7777, arguments) == ALLOW
    }

    /// What the host does: the program on `struct seccomp_data`, as `Documentation/networking/filter.rst` in Linux says.
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

    /// What a guest process may do, in other words.
    fn guest_may(call: u32, arguments: [u64; 6], kicks: bool) -> bool {
        const PRIVATE_ANONYMOUS_FIXED: u32 = 0x32;
        const SHARED_FIXED: u32 = 0x11;
        const POPULATE: u32 = 0x8000;
        let [address, length, third, ..] = arguments;
        let [first, second, _, fourth, fifth, _] = arguments.map(|word| word as u32);
        // Ranges that are sure to end before what must not change.
        let reaches = (address >> 32) + (length >> 32) + 2 > layout::CONFIG >> 32;
        if matches!(call, 9..=11 | 329) && reaches {
            return false;
        }
        match call {
            // write: messages, the doorbell
            1 => matches!(first, 2 | 5),
            // mmap: of its own, of guest memory
            9 => {
                fourth == PRIVATE_ANONYMOUS_FIXED
                    || fourth & !POPULATE == SHARED_FIXED && fifth == layout::MEMORY_FD
            }
            // mprotect, munmap, rt_sigreturn, sched_yield, sigaltstack, restart_syscall, timer_settime, exit_group, getrandom, pkey_mprotect
            10 | 11 | 15 | 24 | 131 | 219 | 223 | 231 | 318 | 329 => true,
            // kill: one process, by the signal for events
            62 => kicks && second == layout::KICK_SIGNAL && (1..1 << 31).contains(&first),
            // futex: wait, wake
            202 => matches!(second, 0 | 1),
            // rt_sigprocmask: SIG_SETMASK
            14 => first == 2,
            // sched_setaffinity: of itself, to one of 1,024 CPUs or to all that there are
            203 => {
                let set = third.wrapping_sub(layout::CPU_SETS);
                first == 0 && second == 128 && set.is_multiple_of(128) && set / 128 <= 1024
            }
            // clock_gettime: CLOCK_PROCESS_CPUTIME_ID
            228 => first == 2,
            _ => false,
        }
    }

    /// Every number with arguments of all kinds: what the filter of a guest process lets through is what is written down above, not more.
    #[test]
    fn a_guest_process_may_do_this_and_no_more() {
        let filters = filters();
        let of = |which: usize| &filters[which * Filters::WORDS..][..Filters::WORDS];
        let mut seed: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut random = || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            // Small numbers and flags often, for they mean something.
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
                // The other ways in, where numbers mean other calls: set_thread_area.
                assert!(!allows(call | X32, X86_64), "{call}");
                assert_eq!(allows(call, I386), call == 243, "{call}");
                allowed += usize::from(allows(call, X86_64));
            }
        }
        assert!(allowed > 6 * TRIES);
    }

    /// No guest process changes a mapping of what it must not change; the wedge changes all others.
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

    /// The guest answers calls of the host's old page; nothing else comes of being there.
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

    /// A thread of programs waits, without a time, wakes, chooses its own CPUs and returns from signals; all else is the guest's.
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
        // Who looks whether it waits, and who makes it.
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

    /// The process of a disk reaches disks, in the ways that it needs, and its ring in one way.
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
        // Writing at the end, taking blocks out, polling threads, other calls of rings.
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

    /// The process of a machine of KVM writes where it prints and answers, and to networks; of devices it asks processors and tap devices only.
    #[test]
    fn a_machine_of_kvm_may_do_this_and_no_more() {
        const OFFLOAD: u64 = 0x4004_54d0;
        let [filter, debugged] = [false, true]
            .map(|debugs| pack(&machine(7, debugs).and_then(compile).unwrap()).unwrap());
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
        // Signals to itself, memory without code; no others, no code, no files.
        assert!(may(234, [7, 9, 10, 0, 0, 0]) && !may(234, [8, 9, 10, 0, 0, 0]));
        assert!(may(9, [0, 4096, 3, 0x22, 0, 0]) && !may(9, [0, 4096, 7, 0x22, 0, 0]));
        assert!(!may(9, [0, 4096, 3, 1, 3, 0]) && !may(10, [0, 4096, 5, 0, 0, 0]));
    }

    /// The server of a switch carries frames, asks who connects, and locks its folder.
    #[test]
    fn a_switch_may_do_this_and_no_more() {
        const FIONBIO: u64 = 0x5421;
        let filter = pack(&switch(1).and_then(compile).unwrap()).unwrap();
        let may = |call, arguments| allows(&filter, call, X86_64, arguments);
        // Anonymous memory without code; neither code nor files.
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
        // A relay does no more, and takes nobody in.
        let relay = pack(&carrier().and_then(compile).unwrap()).unwrap();
        for call in 0..CALLS {
            let may_relay = allows(&relay, call, X86_64, [0; 6]);
            assert!(!may_relay || may(call, [0; 6]) && call != 288, "{call}");
        }
    }

    /// None of them lets anything new be executed, traced or opened, or reaches other processes' memory or the network.
    #[test]
    fn no_process_may_do_what_machines_never_need() {
        const NEVER: [u32; 24] = [
            // open, socket, connect, fork, vfork, execve, kill's relatives tkill and tgkill, ptrace, setuid, mount, init_module
            2, 41, 42, 57, 58, 59, 200, 234, 101, 105, 165, 175,
            // openat, unshare, process_vm_readv, process_vm_writev, execveat, userfaultfd, bpf, io_uring_setup, pidfd_open, clone3,
            // openat2, pidfd_getfd
            257, 272, 310, 311, 322, 323, 321, 425, 434, 435, 437, 438,
        ];
        let kvm = pack(&machine(7, true).and_then(compile).unwrap()).unwrap();
        let switch = pack(&switch(1).and_then(compile).unwrap()).unwrap();
        for filter in filters().chunks(Filters::WORDS).chain([&kvm[..], &switch[..]]) {
            for call in NEVER {
                assert!(!allows(filter, call, X86_64, [0; 6]), "{call}");
                assert!(!allows(filter, call, X86_64, [3; 6]), "{call}");
            }
        }
    }
}
