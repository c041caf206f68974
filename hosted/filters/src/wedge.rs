//! Filters of the processes of a pre-virtualized VM.
//!
//! A guest process runs the guest kernel, which is not trusted. Its filter permits: mappings of its
//! own address space, of guest memory and of anonymous memory, returning guest memory to the host,
//! waiting and waking, yielding, its one timer, CPU affinity within the CPUs on which the VM was
//! started, its own CPU time, thread-local storage of 32-bit code, blocking signals, notifying the
//! device process, and exit. If the host confines signals to the VM (Landlock), it may also send
//! the signal that notifies a vCPU of events.
//!
//! It cannot change a mapping from [`layout::CONFIG`] on, so it can pass the CPU sets that lie
//! there, whose contents cannot change, and no others.

use linux_raw_sys::{general as linux, io_uring, ioctl, prctl, ptrace};
use proto::hosted::{MAX_DISKS, MAX_NETS, layout, option};
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::Eq;
use seccompiler::{BackendError, SeccompAction, SeccompCondition, SeccompRule};

use crate::Error;
use crate::bpf::{check_address_range, pack, user_mode_calls};
use crate::rules::{Rules, allow, allow_all, allow_range, compile, compile_or, own_cpus, signal};

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
        let program = rules.and_then(compile)?;
        words.extend(pack(&[before, &program[..]].concat())?);
    }
    let program = program().and_then(|rules| compile_or(rules, SeccompAction::Trap))?;
    words.extend(pack(&[&user_mode_calls(ptrace::SECCOMP_RET_TRAP)[..], &program[..]].concat())?);
    Ok(words)
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
pub fn disks(rules: &mut Rules) -> Result<(), BackendError> {
    // One rule for all: a rule for each disk would make filters of more than 511 instructions.
    let disks = layout::DISKS_FD..=layout::DISKS_FD + MAX_DISKS as u32 - 1;
    let mut allow = |call, more| allow_range(rules, call, disks.clone(), more);
    // Flags with and without waiting.
    for flags in [0, linux::RWF_NOWAIT] {
        allow(linux::__NR_preadv2, Some((5, flags)))?;
    }
    for call in [linux::__NR_pwritev, linux::__NR_fdatasync] {
        allow(call, None)?;
    }
    for mode in [linux::FALLOC_FL_PUNCH_HOLE, linux::FALLOC_FL_ZERO_RANGE] {
        allow(linux::__NR_fallocate, Some((1, mode | linux::FALLOC_FL_KEEP_SIZE)))?;
    }
    Ok(())
}

/// Filter of a network process; its network is its only descriptor besides those named here. Of a
/// tap device it may only set the offloads.
fn net() -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    common(&mut rules, &[layout::ERRORS_FD, layout::DOORBELL_FD])?;
    nets(&mut rules)?;
    Ok(rules)
}

/// Allows the calls on networks.
pub fn nets(rules: &mut Rules) -> Result<(), BackendError> {
    // The vsock stream follows the networks.
    for net in layout::NETS_FD..=layout::NETS_FD + MAX_NETS as u32 {
        allow(rules, linux::__NR_readv, &[&[(0, net)]])?;
        allow(rules, linux::__NR_writev, &[&[(0, net)]])?;
        allow(rules, linux::__NR_ioctl, &[&[(0, net), (1, ioctl::TUNSETOFFLOAD)]])?;
    }
    Ok(())
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
    let inputs = [
        layout::INPUT_FD,
        layout::DOORBELL_FD,
        layout::CONTROL_FD,
        layout::CONSOLE_FD,
        layout::EXITS_FD,
    ];
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
    let attributes =
        [prctl::PR_SET_NAME, prctl::PR_SET_PDEATHSIG, prctl::PR_SET_SYSCALL_USER_DISPATCH];
    for request in attributes {
        allow(&mut rules, linux::__NR_prctl, &[&[(0, request)]])?;
    }
    // `SECCOMP_SET_MODE_FILTER` without flags.
    allow(&mut rules, linux::__NR_seccomp, &[&[(0, 1), (1, 0)]])?;
    // Timer of a guest process.
    allow(&mut rules, linux::__NR_timer_create, &[&[(0, linux::CLOCK_BOOTTIME)]])?;
    allow_all(
        &mut rules,
        &[
            #[cfg(target_arch = "x86_64")]
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
