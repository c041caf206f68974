//! Whether this host is a VM of Parador itself.
//!
//! A guest sees that by the tables of ACPI, which only the superuser may read, and a guest of processes by its kernel's name and the command
//! line that it always has. CPUID says nothing: programs of such a guest execute it on the host's processor.

use super::{Finding, State, read};
use std::fs;

/// A table of ACPI that every machine has, and where its maker is (ACPI 6.5, 5.2.6).
const TABLE: &str = "/sys/firmware/acpi/tables/FACP";
const MAKER: std::ops::Range<usize> = 10..16;
/// The maker of ours (`vmm/boot`).
const OURS: &[u8] = b"PARADR";
/// How the release of a pre-virtualized kernel ends (`guests/linux/kernel/config`).
const RELEASE: &str = "-parador";

/// What this host is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Host {
    /// No VM of Parador, as far as can be seen.
    Other,
    /// A VM that a processor's virtualization runs: of our kernel, or by KVM.
    Vm,
    /// A VM in processes.
    Processes,
}

pub fn finding() -> Finding {
    let table = fs::read(TABLE).ok();
    let maker = table.as_deref().and_then(|table| table.get(MAKER));
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let (state, found) = match host(maker, &release, &read("/proc/cmdline").unwrap_or_default()) {
        Host::Other => (State::Ok, "no VM of Parador"),
        Host::Vm => {
            (State::Ok, "a VM of Parador: what is measured here is slower than on its host")
        }
        Host::Processes => {
            let text = "a VM of Parador in processes (back end `process`), in which no other one runs: start it on the host";
            (State::Missing, text)
        }
    };
    Finding { name: "this host", state, found: found.to_owned(), purpose: "" }
}

fn host(maker: Option<&[u8]>, release: &str, command_line: &str) -> Host {
    let is_ours = command_line.split_once(crate::run::COMMAND_LINE).is_some_and(|(before, _)| {
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
        let line = format!("console=ttyS0 {} parador.run=\"true\"\n", crate::run::COMMAND_LINE);
        assert_eq!(host(Some(OURS), own, &line), Host::Processes);
        assert_eq!(host(None, own, &line), Host::Processes, "a user who may not read tables");
        assert_eq!(host(Some(OURS), stock, "console=ttyS0 panic=-1"), Host::Vm);
        assert_eq!(host(Some(b"BOCHS "), own, "console=ttyS0"), Host::Other, "the bare machine");
        assert_eq!(host(Some(b"DELL  "), stock, &line), Host::Other);
        assert_eq!(host(None, "", ""), Host::Other);
    }
}
