//! Rules of filters: the permitted system calls, with conditions on their arguments.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use linux_raw_sys::general as linux;
use proto::hosted::layout;
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::{Eq, Ge, Le, MaskedEq};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

/// System calls by number, each with the permitted argument sets; empty: any arguments.
pub type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Arguments and values of the conditions, all of which must hold.
pub type Conditions<'a> = &'a [(u8, u32)];

#[cfg(target_arch = "x86_64")]
const TARGET: TargetArch = TargetArch::x86_64;
#[cfg(target_arch = "aarch64")]
const TARGET: TargetArch = TargetArch::aarch64;

/// Compiles rules; calls that are not allowed kill the process.
pub fn compile(rules: Rules) -> Result<BpfProgram, BackendError> {
    compile_or(rules, SeccompAction::KillProcess)
}

/// Compiles rules; calls that are not allowed get the action `other`.
pub fn compile_or(rules: Rules, other: SeccompAction) -> Result<BpfProgram, BackendError> {
    let allow = SeccompAction::Allow;
    SeccompFilter::new(rules, other, allow, TARGET).and_then(BpfProgram::try_from)
}

fn rule(conditions: Conditions<'_>) -> Result<SeccompRule, BackendError> {
    let conditions: Result<_, _> = conditions
        .iter()
        .map(|&(argument, value)| SeccompCondition::new(argument, Dword, Eq, value.into()))
        .collect();
    SeccompRule::new(conditions?)
}

/// Allows a call with each of these argument sets.
pub fn allow(rules: &mut Rules, call: u32, sets: &[Conditions<'_>]) -> Result<(), BackendError> {
    for set in sets {
        rules.entry(call.into()).or_default().push(rule(set)?);
    }
    Ok(())
}

/// Allows a call whose first argument is one of these numbers; with `more`, another argument has
/// that value.
pub fn allow_range(
    rules: &mut Rules,
    call: u32,
    first: RangeInclusive<u32>,
    more: Option<(u8, u32)>,
) -> Result<(), BackendError> {
    let bounds = [(Ge, *first.start()), (Le, *first.end())];
    let bounds = bounds.into_iter().map(|(compare, value)| (0, compare, value));
    let conditions = bounds.chain(more.map(|(argument, value)| (argument, Eq, value)));
    let conditions: Result<_, _> = conditions
        .map(|(argument, compare, value)| {
            SeccompCondition::new(argument, Dword, compare, value.into())
        })
        .collect();
    rules.entry(call.into()).or_default().push(SeccompRule::new(conditions?)?);
    Ok(())
}

/// Allows calls with any arguments.
pub fn allow_all(rules: &mut Rules, calls: &[u32]) {
    rules.extend(calls.iter().map(|&call| (i64::from(call), Vec::new())));
}

/// Allows a signal to single processes, not to groups.
pub fn signal(rules: &mut Rules, number: u32) -> Result<(), BackendError> {
    let mut conditions = vec![SeccompCondition::new(1, Dword, Eq, number.into())?];
    conditions.push(SeccompCondition::new(0, Dword, Ge, 1)?);
    conditions.push(SeccompCondition::new(0, Dword, Le, i32::MAX as u64)?);
    rules.entry(linux::__NR_kill.into()).or_default().push(SeccompRule::new(conditions)?);
    Ok(())
}

/// Allows a process to set its own CPU affinity to a set that the VM's processes cannot change.
pub fn own_cpus(rules: &mut Rules) -> Result<(), BackendError> {
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

/// Arguments of mmap(2) for private memory without execute permission.
pub fn own_memory() -> Result<SeccompRule, BackendError> {
    let data = SeccompCondition::new(2, Dword, MaskedEq(linux::PROT_EXEC.into()), 0)?;
    let kind = (linux::MAP_PRIVATE | linux::MAP_ANONYMOUS).into();
    let own = SeccompCondition::new(3, Dword, MaskedEq(kind), kind)?;
    SeccompRule::new(vec![data, own])
}
