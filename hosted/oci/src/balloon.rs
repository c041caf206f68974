//! The balloon of a VM whose containers' limits of memory have been lowered: the guest returns the
//! rest of its memory to the host.
//!
//! A VM is made for the limits at its start, so its balloon is empty until `update` lowers one. The
//! guest takes memory back before it would have to kill a process, however large the balloon is.

use crate::annotations;
use crate::store::{ContainerRecord, Store};
use hosted_command::failure::{self, Failure, IoContext};
use hosted_monitor::ctl;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// File in the VM's folder with the size of the balloon in bytes, and its lock.
const SIZE: &str = "balloon";
/// Control socket in the VM's folder.
const SOCKET: &str = "control";
/// Sizes are multiples of this, in bytes.
const PAGE: u64 = 4096;

/// Returns the control socket of a VM.
pub fn socket(vm_folder: &Path) -> PathBuf {
    vm_folder.join(SOCKET)
}

/// Change of the balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Give the guest memory back that its containers' limits allow.
    Deflate,
    /// Take memory that they do not allow.
    Inflate,
}

/// Fits the balloon of a VM to the limits of its containers, if that is a change of this kind.
///
/// # Errors
/// The VM refuses, or does not answer.
pub fn fit(store: &Store, vm_folder: &Path, change: Change) -> Result<(), Failure> {
    let path = vm_folder.join(SIZE);
    let opened = File::options().create(true).append(true).open(&path);
    let file = opened.file_error("open", &path)?;
    // The limits are those of this moment, so the last change is the right one.
    file.lock().file_error("lock", &path)?;
    let text = fs::read_to_string(&path).file_error("read", &path)?;
    let former = text.trim().parse().unwrap_or(0);
    if former == 0 && change == Change::Deflate {
        return Ok(());
    }
    let size = size(&store.in_vm(vm_folder))?;
    let is_wanted = match change {
        Change::Deflate => size < former,
        Change::Inflate => size > former,
    };
    if !is_wanted {
        return Ok(());
    }
    match ctl::set_balloon(&socket(vm_folder), size) {
        // A VM of an earlier version has no control socket, and keeps its memory.
        Err(failure) if failure.code() == failure::MISSING_FILE => return Ok(()),
        set => set?,
    }
    fs::write(&path, size.to_string()).file_error("write", &path)
}

/// Returns the memory of a VM in bytes that the limits of its containers leave over; 0: there is
/// one without a limit.
fn size(containers: &[ContainerRecord]) -> Result<u64, Failure> {
    let Some(owner) = containers.iter().find(|state| state.has_own_vm()) else { return Ok(0) };
    let members = || containers.iter().filter(|state| !state.has_own_vm());
    let sum = members().try_fold(0_u64, |sum, state| Some(sum.saturating_add(state.memory_limit?)));
    // A sandbox without containers runs nothing yet.
    let sum = sum.filter(|_| members().next().is_some());
    let Some(limit) = owner.memory_limit.into_iter().chain(sum).min() else { return Ok(0) };
    let extra = annotations::extra(&owner.annotations)?;
    let needed = limit.saturating_add(extra.0).max(annotations::LEAST.0);
    Ok(owner.vm_memory.saturating_sub(needed) / PAGE * PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::testing::state;

    const MIB: u64 = 1 << 20;

    fn member(limit: Option<u64>) -> ContainerRecord {
        let memory_limit = limit.map(|limit| limit * MIB);
        ContainerRecord { folder: "/other".into(), memory_limit, ..state("b", None) }
    }

    fn owner(memory: u64, limit: Option<u64>) -> ContainerRecord {
        let memory_limit = limit.map(|limit| limit * MIB);
        ContainerRecord { vm_memory: memory * MIB, memory_limit, ..state("a", None) }
    }

    fn mebibytes(containers: &[ContainerRecord]) -> u64 {
        size(containers).unwrap() / MIB
    }

    #[test]
    fn what_limits_leave_over() {
        // As it was created: 64M besides the container.
        assert_eq!(mebibytes(&[owner(564, Some(500))]), 0);
        assert_eq!(mebibytes(&[owner(564, Some(100))]), 400);
        assert_eq!(mebibytes(&[owner(564, None)]), 0);
        assert_eq!(mebibytes(&[owner(564, Some(u64::MAX / MIB))]), 0);
        // 64M at least.
        let mut small = owner(564, Some(10));
        small.annotations.insert("dev.parador.memory".to_owned(), "1M".to_owned());
        assert_eq!(mebibytes(&[small]), 500);
    }

    #[test]
    fn limits_of_a_pod_add_up() {
        let [one, other] = [member(Some(200)), member(Some(100))];
        let pod = |sum, members: &[&ContainerRecord]| {
            let members = members.iter().map(|&member| member.clone());
            mebibytes(&members.chain([owner(2048, sum)]).collect::<Vec<_>>())
        };
        assert_eq!(pod(None, &[&one, &other]), 2048 - 364);
        assert_eq!(pod(Some(250), &[&one, &other]), 2048 - 314);
        assert_eq!(pod(None, &[&one, &member(None)]), 0);
        assert_eq!(pod(Some(1984), &[&one, &member(None)]), 0);
        assert_eq!(pod(None, &[]), 0);
        assert_eq!(mebibytes(&[one]), 0);
    }
}
