//! Detects whether this host is itself a Parador VM.
//!
//! A guest shows it in its ACPI tables, which only the superuser may read, and a process guest in
//! its kernel release and command line. CPUID does not help: user mode of a process guest executes
//! it natively.

use super::{Finding, State, read};
use std::fs;

/// An ACPI table that every VM has, and the position of its OEM ID (ACPI 6.5, 5.2.6).
const TABLE: &str = "/sys/firmware/acpi/tables/FACP";
const MAKER: std::ops::Range<usize> = 10..16;
/// OEM ID of Parador VMs (`vmm/boot`).
const OURS: &[u8] = b"PARADR";
/// Suffix of the release of a pre-virtualized kernel (`guests/linux/kernel/config`).
const RELEASE: &str = "-parador";

/// Kind of host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Host {
    /// Not detectably a Parador VM.
    Other,
    /// Parador VM with hardware virtualization: native or KVM.
    Vm,
    /// Parador VM of the process back end.
    Processes,
}

pub fn finding() -> Finding {
    let table = fs::read(TABLE).ok();
    let maker = table.as_deref().and_then(|table| table.get(MAKER));
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let (state, found) = match host(maker, &release, &read("/proc/cmdline").unwrap_or_default()) {
        Host::Other => (State::Ok, "not a Parador VM"),
        Host::Vm => (State::Ok, "a Parador VM: measurements are slower than on its host"),
        Host::Processes => {
            let text = "a Parador VM of the back end `process`, which cannot run nested VMs: run `parador` on its host";
            (State::Missing, text)
        }
    };
    Finding { name: "this host", state, found: found.to_owned(), purpose: "" }
}

fn host(maker: Option<&[u8]>, release: &str, command_line: &str) -> Host {
    let is_ours =
        command_line.split_once(crate::backend::COMMAND_LINE).is_some_and(|(before, _)| {
            before.split_whitespace().all(|word| word.starts_with("console="))
        });
    if release.trim_end().ends_with(RELEASE) && is_ours {
        Host::Processes
    } else if maker == Some(OURS) {
        Host::Vm
    } else {
        Host::Other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts() {
        let stock = "6.1.0-56-cloud-amd64\n";
        let own = "6.1.192-parador\n";
        let line = format!("console=ttyS0 {} parador.run=\"true\"\n", crate::backend::COMMAND_LINE);
        assert_eq!(host(Some(OURS), own, &line), Host::Processes);
        assert_eq!(host(None, own, &line), Host::Processes, "a user who may not read tables");
        assert_eq!(host(Some(OURS), stock, "console=ttyS0 panic=-1"), Host::Vm);
        assert_eq!(host(Some(b"BOCHS "), own, "console=ttyS0"), Host::Other, "the bare machine");
        assert_eq!(host(Some(b"DELL  "), stock, &line), Host::Other);
        assert_eq!(host(None, "", ""), Host::Other);
    }
}
