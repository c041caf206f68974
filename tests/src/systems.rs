//! Systems of the native microhypervisor: every description, and what must happen in it.

pub mod arm32;
pub mod arm64;
pub mod checks;
pub mod consoles;
pub mod guests;
pub mod linux;
pub mod pass_through;
pub mod refused;
pub mod servers;
pub mod vtlb;

use crate::scenario::{Backend, Scenario};
use crate::system::Machine;

/// Back ends of systems with several VMs or native programs.
pub const EVERY_BACKEND: &[Backend] = &[Backend::NativeX86Npt];
/// Back ends of systems in which nothing depends on the architecture.
pub const BOTH_ARCHITECTURES: &[Backend] = &[Backend::NativeX86Npt, Backend::NativeArm64Vhe];

/// The head of a description. Virtual machines share CPUs where there is only one.
pub const HEAD: &str = "[system]\nboard = \"{board}\"\nlog = \"com2\"\nshare_cpus = true\n";

/// Kernel parameters of Linux on an emulated machine: on a busy host a boot until the first program
/// can take a minute, which the detectors of lock-ups must not report. A guest that hangs exceeds
/// the time limit of its test.
pub const SLOW_HOST: &str = "watchdog_thresh=60 rcupdate.rcu_cpu_stall_timeout=120";

/// Adds a virtual machine with Debian's kernel and a busybox RAM disk.
pub fn linux(name: &str, command_line: &str, more: &str) -> String {
    format!(
        "\n[[vm]]\nname = \"{name}\"\nmemory = \"256M\"\nkernel = \"debian\"\ninitrd = \"busybox\"\n\
         cmdline = \"console={{serial}} {SLOW_HOST} {command_line}\"\n{more}\n"
    )
}

/// Returns a scenario with defaults for this system.
pub fn base(name: &'static str, system: String) -> Scenario {
    Scenario {
        name,
        backends: EVERY_BACKEND,
        cpus: &[1],
        long_cpus: &[],
        system: format!("{HEAD}{system}"),
        machine: Machine::default(),
        steps: Vec::new(),
        texts: Vec::new(),
        code: 0,
        never: &[],
        most: &[],
        counters: &[],
        limit: 120,
    }
}

/// Adds a native program.
pub fn task(name: &str, binary: &str, arguments: &[&str], more: &str) -> String {
    format!("\n[[task]]\nname = \"{name}\"\nbinary = \"{binary}\"\nargs = {arguments:?}\n{more}\n")
}

/// Adds a virtual machine with a micro-guest.
pub fn micro(name: &str, guest: &str, more: &str) -> String {
    format!(
        "\n[[vm]]\nname = \"{name}\"\nmemory = \"16M\"\n\
         kernel = \"micro:{guest}\"\n{more}\n"
    )
}

/// The guest console is the first serial line.
pub const CONSOLE: &str = "console = \"com1\"";

/// Returns all scenarios of the native microhypervisor; `is_long`: those of long runs, too.
pub fn scenarios(is_long: bool) -> Vec<Scenario> {
    [
        guests::bochs_scenarios(is_long),
        servers::server_scenarios(),
        checks::check_scenarios(),
        guests::guest_scenarios(),
        guests::channel_scenarios(),
        linux::machine_scenarios(),
        linux::linux_scenarios(),
        vtlb::vtlb_scenarios(is_long),
        consoles::console_scenarios(),
        arm64::arm64_scenarios(),
        arm64::arm64_devices(),
        arm64::arm64_guarded_devices(),
        pass_through::arm64_pass_through(),
        pass_through::arm64_pci_pass_through(),
        arm64::arm64_gicv2(is_long),
        arm64::arm64_mmio(),
        arm64::arm64_refused_devices(),
        arm64::arm64_without_vhe(is_long),
        arm32::arm32_scenarios(is_long),
    ]
    .concat()
}
