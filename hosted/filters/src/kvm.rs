//! Filter of a VM's process with KVM.

use linux_raw_sys::{general as linux, io_uring};
use proto::hosted::layout;
use seccompiler::SeccompCmpArgLen::Dword;
use seccompiler::SeccompCmpOp::MaskedEq;
use seccompiler::{BackendError, SeccompCondition, SeccompRule, apply_filter_all_threads};

use crate::Error;
use crate::rules::{Rules, allow, allow_all, compile, own_memory};
use crate::wedge::{disks, nets};

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
pub fn kvm_process(own: u32, debugs: bool) -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    for call in KVM_CALLS.into_iter().chain(debugs.then_some(KVM_DEBUG)) {
        allow(&mut rules, linux::__NR_ioctl, &[&[(1, call)]])?;
    }
    let written = [layout::OUTPUT_FD, layout::ERRORS_FD, layout::CONTROL_FD, layout::CONSOLE_FD];
    for descriptor in written {
        allow(&mut rules, linux::__NR_write, &[&[(0, descriptor)]])?;
    }
    nets(&mut rules)?;
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
/// The filter cannot be installed.
pub fn confine_kvm(debugs: bool) -> Result<(), Error> {
    let program = kvm_process(std::process::id(), debugs).and_then(compile)?;
    Ok(apply_filter_all_threads(&program)?)
}
