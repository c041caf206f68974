//! Seccomp profiles of containers as filters for processes of a guest.
//!
//! A filter has a part for each architecture: its system calls, each with the rules of the profile
//! in their order. The first rule whose conditions hold states the action. A call of another
//! architecture kills the process.

use std::collections::BTreeMap;

use linux_raw_sys::ptrace::SECCOMP_RET_KILL_PROCESS;
use seccompiler::{BpfProgram, SeccompCondition, SeccompRule, sock_filter};
use syscalls::Sysno;

use crate::Error;
use crate::bpf::{data, equal, jump, load, ret, unless, word};

/// Most instructions of a filter (`BPF_MAXINSNS` of Linux).
const MOST: usize = 4096;
/// Own architecture of this program and its guests (`linux/audit.h`).
#[cfg(target_arch = "x86_64")]
const OWN: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const OWN: u32 = 0xc000_00b7;
/// `AUDIT_ARCH_I386`.
#[cfg(target_arch = "x86_64")]
const I386: u32 = 0x4000_0003;

/// System calls of a profile with one action.
#[derive(Clone, Debug)]
pub struct ProfileRule<'a> {
    /// Names. An architecture's part lacks those that it does not have.
    pub names: &'a [String],
    /// Conditions on the arguments, all of which must hold.
    pub conditions: Vec<SeccompCondition>,
    /// Action with its value (`SECCOMP_RET_*` of Linux).
    pub action: u32,
}

/// Returns a profile as instructions (`struct sock_filter`), for 32-bit programs, too, if
/// `has_32_bit`: `default` is the action of all other calls.
///
/// # Errors
/// The filter or the rules of one call are too long.
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(unused_variables, reason = "32-bit calls of other architectures are not known")
)]
pub fn profile(
    default: u32,
    has_32_bit: bool,
    rules: &[ProfileRule<'_>],
) -> Result<Vec<u64>, Error> {
    let own = |name: &str| name.parse::<Sysno>().ok().map(|call| call.id() as u32);
    let mut filter = vec![load(data::ARCHITECTURE)];
    add_part(&mut filter, OWN, &part(default, rules, own)?);
    #[cfg(target_arch = "x86_64")]
    if has_32_bit {
        let other = |name: &str| name.parse::<syscalls::x86::Sysno>().ok().map(|call| call as u32);
        add_part(&mut filter, I386, &part(default, rules, other)?);
    }
    filter.push(ret(SECCOMP_RET_KILL_PROCESS));
    match filter.len() <= MOST {
        true => Ok(filter.iter().map(word).collect()),
        false => {
            let text =
                format!("the profile has {} instructions; the most are {MOST}", filter.len());
            Err(Error(text))
        }
    }
}

/// Adds the part of an architecture, whose instructions all others skip.
fn add_part(filter: &mut Vec<sock_filter>, architecture: u32, part: &[sock_filter]) {
    filter.extend([equal(architecture, 1), jump(part.len() as u32)]);
    filter.extend_from_slice(part);
}

/// Returns the part of an architecture, whose calls have these numbers.
fn part(
    default: u32,
    rules: &[ProfileRule<'_>],
    number: impl Fn(&str) -> Option<u32>,
) -> Result<Vec<sock_filter>, Error> {
    let mut calls: BTreeMap<u32, Vec<&ProfileRule<'_>>> = BTreeMap::new();
    for rule in rules {
        for call in rule.names.iter().filter_map(|name| number(name)) {
            calls.entry(call).or_default().push(rule);
        }
    }
    let mut part = vec![load(data::NUMBER)];
    for (call, rules) in calls {
        let actions = actions(default, &rules)?;
        let length = u8::try_from(actions.len())
            .map_err(|_| Error(format!("system call {call} has too many rules")))?;
        part.push(unless(call, length));
        part.extend(actions);
    }
    part.push(ret(default));
    Ok(part)
}

/// Returns the instructions of one call, the last of which returns.
fn actions(default: u32, rules: &[&ProfileRule<'_>]) -> Result<Vec<sock_filter>, Error> {
    let mut actions = Vec::new();
    for rule in rules {
        if rule.conditions.is_empty() {
            actions.push(ret(rule.action));
            return Ok(actions);
        }
        actions.extend(BpfProgram::from(SeccompRule::new(rule.conditions.clone())?));
        actions.push(ret(rule.action));
    }
    actions.push(ret(default));
    Ok(actions)
}
