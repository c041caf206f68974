//! Seccomp profiles of configurations as filters, which the guest's kernel applies.

use crate::refuse;
use hosted_command::failure::Failure;
use hosted_filters::{Compare, Condition, ProfileRule, Width, profile};
use oci_spec::runtime::{
    Arch, Linux, LinuxSeccompAction, LinuxSeccompArg, LinuxSeccompOperator, LinuxSyscall,
};

/// Returns the filter of a configuration as instructions; empty: it has no profile.
///
/// # Errors
/// The profile wants notifications of the host, or is malformed or too long.
pub fn filter(linux: &Linux) -> Result<Vec<u64>, Failure> {
    let Some(all) = linux.seccomp() else { return Ok(Vec::new()) };
    let default = action(all.default_action(), all.default_errno_ret())?;
    let has_32_bit = all.architectures().iter().flatten().any(|it| *it == Arch::ScmpArchX86);
    let mut rules = Vec::new();
    for call in all.syscalls().iter().flatten() {
        let action = action(call.action(), call.errno_ret())?;
        for conditions in alternatives(call)? {
            rules.push(ProfileRule { names: call.names(), conditions, action });
        }
    }
    profile(default, has_32_bit, &rules).map_err(|error| refuse(error.to_string()))
}

fn action(action: LinuxSeccompAction, value: Option<u32>) -> Result<u32, Failure> {
    match action {
        LinuxSeccompAction::ScmpActNotify => {
            Err(refuse("seccomp: a VM cannot notify a process of the host (SCMP_ACT_NOTIFY)"))
        }
        action => match value {
            // The value has 16 bits in a filter.
            Some(value) if value > 0xffff => {
                Err(refuse(format!("seccomp: invalid errno {value}; the largest is 65535")))
            }
            value => Ok(action.as_u32(value)),
        },
    }
}

/// Returns the lists of conditions of a rule, one of which must hold. As with runc, several
/// conditions on the same argument are alternatives.
fn alternatives(call: &LinuxSyscall) -> Result<Vec<Vec<Condition>>, Failure> {
    let all = call.args().as_deref().unwrap_or_default();
    let mut conditions = all.iter().map(condition).collect::<Result<Vec<_>, _>>()?;
    let is_repeated = |(index, one): (usize, &LinuxSeccompArg)| {
        all[..index].iter().any(|other| other.index() == one.index())
    };
    Ok(match all.iter().enumerate().any(is_repeated) {
        true => conditions.drain(..).map(|condition| vec![condition]).collect(),
        false => vec![conditions],
    })
}

fn condition(one: &LinuxSeccompArg) -> Result<Condition, Failure> {
    let (compare, value) = match one.op() {
        LinuxSeccompOperator::ScmpCmpNe => (Compare::Ne, one.value()),
        LinuxSeccompOperator::ScmpCmpLt => (Compare::Lt, one.value()),
        LinuxSeccompOperator::ScmpCmpLe => (Compare::Le, one.value()),
        LinuxSeccompOperator::ScmpCmpEq => (Compare::Eq, one.value()),
        LinuxSeccompOperator::ScmpCmpGe => (Compare::Ge, one.value()),
        LinuxSeccompOperator::ScmpCmpGt => (Compare::Gt, one.value()),
        LinuxSeccompOperator::ScmpCmpMaskedEq => {
            (Compare::MaskedEq(one.value()), one.value_two().unwrap_or_default())
        }
    };
    let wrong = || refuse(format!("seccomp: invalid argument index {}", one.index()));
    let index = u8::try_from(one.index()).map_err(|_| wrong())?;
    Condition::new(index, Width::Qword, compare, value).map_err(|_| wrong())
}
