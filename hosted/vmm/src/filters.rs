//! What the processes of a machine may ask of the host: filters of system calls (seccomp(2)), made by `seccompiler`, installed by the wedge.
//!
//! A guest process runs the guest's kernel, which may contain anything; with its filter it can change mappings of its own address space, of
//! the machine's memory or of fresh memory, give memory of the machine back, wait and wake, let others run, set its timer, ring the device
//! process, and end. Everything else ends it, and the
//! machine with it.

use std::collections::BTreeMap;

use linux_raw_sys::general as linux;
use proto::wedge::{Filters, layout};
use seccompiler::SeccompCmpArgLen::Dword;
use seccompiler::SeccompCmpOp::Eq;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use crate::Error;

/// System calls by number, each with the arguments that it may have: none, any.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Argument and value of each condition that has to hold.
type Conditions<'a> = &'a [(u8, u32)];

/// The filters, as the wedge reads them.
pub fn words() -> Result<Vec<u64>, Error> {
    let mut words = Vec::new();
    for rules in [guest(), worker(), device()] {
        let program = rules.and_then(compile).map_err(|error| Error::Filters(error.to_string()))?;
        words.extend(pack(&program)?);
    }
    Ok(words)
}

fn compile(rules: Rules) -> Result<BpfProgram, BackendError> {
    let (kill, allow) = (SeccompAction::KillProcess, SeccompAction::Allow);
    SeccompFilter::new(rules, kill, allow, TargetArch::x86_64).and_then(BpfProgram::try_from)
}

/// The length, then the instructions (`struct sock_filter`), then zeros.
fn pack(program: &BpfProgram) -> Result<Vec<u64>, Error> {
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

/// A process with an address space of the guest.
fn guest() -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
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
    let clock = linux::CLOCK_MONOTONIC;
    allow(&mut rules, linux::__NR_timer_create, &[&[(0, clock)]])?;
    allow_all(
        &mut rules,
        &[
            linux::__NR_munmap,
            linux::__NR_mprotect,
            linux::__NR_timer_settime,
            linux::__NR_rt_sigreturn,
            linux::__NR_getrandom,
            linux::__NR_sched_yield,
        ],
    );
    Ok(rules)
}

/// A process of a disk, whose descriptor is the only one that it has beside those named here.
fn worker() -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    common(&mut rules, &[layout::ERRORS_FD, layout::DOORBELL_FD])?;
    allow_all(
        &mut rules,
        &[
            linux::__NR_preadv,
            linux::__NR_pwritev,
            linux::__NR_pwrite64,
            linux::__NR_fdatasync,
            linux::__NR_fallocate,
        ],
    );
    Ok(rules)
}

/// The process that serves the console and makes those of the guest, which set themselves up under this filter before they take theirs.
fn device() -> Result<Rules, BackendError> {
    let mut rules = guest()?;
    allow(&mut rules, linux::__NR_write, &[&[(0, layout::OUTPUT_FD)]])?;
    for descriptor in [layout::INPUT_FD, layout::DOORBELL_FD] {
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
    allow_all(
        &mut rules,
        &[
            linux::__NR_poll,
            linux::__NR_wait4,
            linux::__NR_kill,
            linux::__NR_getpid,
            linux::__NR_getppid,
            linux::__NR_close_range,
            linux::__NR_prctl,
            linux::__NR_seccomp,
            linux::__NR_sigaltstack,
            linux::__NR_rt_sigaction,
            linux::__NR_rt_sigprocmask,
        ],
    );
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_fit() {
        let words = words().unwrap();
        assert_eq!(words.len(), 3 * Filters::WORDS);
        for filter in words.chunks(Filters::WORDS) {
            let length = filter[0] as usize;
            assert!((10..Filters::WORDS).contains(&length), "{length}");
            // The last instruction returns, and nothing follows.
            assert_eq!(filter[length] & 0xff, 0x06);
            assert!(filter[length + 1..].iter().all(|&word| word == 0));
        }
    }
}
