//! User, capabilities and limits of a process, which sets them itself before its program starts.

use crate::users;
use nix::sys::personality::{self, Persona};
use proto::agent::CommandUser;
use proto::agent::container::{Capabilities, ContainerProcess, ResourceLimit};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, setrlimit, umask};
use rustix::thread::{
    CapabilitySet, CapabilitySets, Gid, Uid, clear_ambient_capability_set,
    configure_capability_in_ambient_set, remove_capability_from_bounding_set, set_capabilities,
    set_keep_capabilities, set_no_new_privs, set_thread_gid, set_thread_groups, set_thread_uid,
};
use std::{fs, io};

/// Resources by their numbers (`asm-generic/resource.h`).
const RESOURCES: [Resource; 16] = [
    Resource::Cpu,
    Resource::Fsize,
    Resource::Data,
    Resource::Stack,
    Resource::Core,
    Resource::Rss,
    Resource::Nproc,
    Resource::Nofile,
    Resource::Memlock,
    Resource::As,
    Resource::Locks,
    Resource::Sigpending,
    Resource::Msgqueue,
    Resource::Nice,
    Resource::Rtprio,
    Resource::Rttime,
];

/// Open files of the agent: each process has about eleven.
const OF_AGENT: Rlimit = Rlimit { current: Some(1 << 16), maximum: Some(1 << 16) };
/// Open files of its children: those of process 1 (`INR_OPEN_CUR` and `INR_OPEN_MAX` in Linux'
/// `uapi/linux/fs.h`).
const OF_CHILDREN: Rlimit = Rlimit { current: Some(1024), maximum: Some(4096) };

/// Adjustment of a process' score for the OOM killer (proc(5)).
const OOM_SCORE: &str = "/proc/self/oom_score_adj";

/// Adds to an error what was done.
fn named(what: &str) -> impl FnOnce(Errno) -> io::Error {
    move |error| {
        let error = io::Error::from(error);
        io::Error::new(error.kind(), format!("{what}: {error}"))
    }
}

/// Raises the limit of open files for the agent.
pub fn raise_file_limit() -> io::Result<()> {
    setrlimit(Resource::Nofile, OF_AGENT).map_err(named("raise the limit of open files"))
}

/// Gives a child of the agent the limit of open files that it has without the agent's own.
pub fn restore_file_limit() -> io::Result<()> {
    setrlimit(Resource::Nofile, OF_CHILDREN).map_err(named("restore the limit of open files"))
}

/// Changes the user of this process; one other than root loses the capabilities (capabilities(7)).
pub fn change_user(user: &CommandUser<'_>) -> io::Result<()> {
    let user = users::resolve(user)?;
    let groups: Vec<Gid> = user.groups.into_iter().map(Gid::from_raw).collect();
    set_thread_groups(&groups).map_err(named("set the groups"))?;
    set_thread_gid(Gid::from_raw(user.group)).map_err(named("set the group"))?;
    set_thread_uid(Uid::from_raw(user.user)).map_err(named("set the user"))
}

/// Sets the score of a container's process for the OOM killer, in the guest's own `/proc`.
pub fn set_oom_score(process: &ContainerProcess<'_>) -> io::Result<()> {
    let Some(score) = process.oom_score else { return Ok(()) };
    let written = fs::write(OOM_SCORE, score.to_string());
    written.map_err(|error| io::Error::new(error.kind(), format!("set the OOM score: {error}")))
}

/// Sets limits, user and capabilities of a container's process, and its seccomp filter unless
/// [`apply_last`] does.
pub fn apply(process: &ContainerProcess<'_>) -> io::Result<()> {
    if !process.no_new_privileges {
        // The kernel requires the capabilities that are given up here (seccomp(2)).
        set_filter(process)?;
    }
    process.limits.iter().try_for_each(set_limit)?;
    // Without one, that of other runtimes; it is not inherited.
    umask(Mode::from_raw_mode(process.umask.unwrap_or(0o022) & 0o777));
    match &process.capabilities {
        None => change_user(&process.command.user)?,
        Some(sets) => {
            limit_bounding_set(sets.bounding)?;
            set_keep_capabilities(true).map_err(named("keep capabilities"))?;
            change_user(&process.command.user)?;
            set_sets(sets)?;
        }
    }
    if let Some(domain) = process.personality {
        personality::set(Persona::from_bits_retain(domain as i32))?;
    }
    if process.no_new_privileges {
        set_no_new_privs(true).map_err(named("give up new privileges"))?;
    }
    Ok(())
}

/// Sets the seccomp filter of a process that cannot gain privileges, when only its program remains
/// to be started: the filter need not permit anything else.
pub fn apply_last(process: &ContainerProcess<'_>) -> io::Result<()> {
    if process.no_new_privileges { set_filter(process) } else { Ok(()) }
}

fn set_filter(process: &ContainerProcess<'_>) -> io::Result<()> {
    if process.filter.is_empty() {
        return Ok(());
    }
    let set = host_linux::sys::set_filter(&process.filter);
    set.map_err(|error| named("set the seccomp filter")(Errno::from_raw_os_error(error.0)))
}

fn set_limit(limit: &ResourceLimit) -> io::Result<()> {
    let resource = RESOURCES.get(usize::from(limit.resource));
    let resource = *resource.ok_or_else(|| io::Error::other("set an unknown resource limit"))?;
    // `None` is infinity.
    let value = |value: u64| (value != u64::MAX).then_some(value);
    let (current, maximum) = (value(limit.soft), value(limit.hard));
    setrlimit(resource, Rlimit { current, maximum }).map_err(|error| {
        let name = format!("RLIMIT_{resource:?}").to_uppercase();
        named(&format!("set {name} to {}:{}", limit.soft, limit.hard))(error)
    })
}

fn limit_bounding_set(kept: u64) -> io::Result<()> {
    for number in 0..u64::BITS {
        let bit = 1 << number;
        if kept & bit != 0 {
            continue;
        }
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(bit)) {
            // The kernel has no more capabilities.
            Err(Errno::INVAL) => break,
            done => done.map_err(named("limit the capabilities"))?,
        }
    }
    Ok(())
}

fn set_sets(sets: &Capabilities) -> io::Result<()> {
    let set = CapabilitySet::from_bits_retain;
    let own = CapabilitySets {
        effective: set(sets.effective),
        permitted: set(sets.permitted),
        inheritable: set(sets.inheritable),
    };
    set_capabilities(None, own).map_err(named("set the capabilities"))?;
    clear_ambient_capability_set().map_err(named("clear the ambient capabilities"))?;
    for number in (0..u64::BITS).filter(|number| sets.ambient & (1 << number) != 0) {
        // One that is not permitted cannot be ambient; engines expect that it is left out.
        let capability = set(1 << number);
        let _ = configure_capability_in_ambient_set(capability, true);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_have_their_numbers() {
        assert!(RESOURCES.iter().enumerate().all(|(number, it)| *it as usize == number));
        assert!(set_limit(&ResourceLimit { resource: 16, soft: 0, hard: 0 }).is_err());
    }
}
