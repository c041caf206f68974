//! Validated configuration of a VM: defaults are applied and conflicts between options excluded.
//! Conditions of the host and of files are checked later, by the parts that use them.

use crate::config::Config;
use crate::config::console::Target;
use crate::config::vm::{BackendChoice, Log, Optimisation, Protection, VmConfig};
use hosted_command::failure::{self, Failure};
use proto::hosted::{MAX_DISKS, MAX_NETS, MAX_SHARES, log};
use proto::system::MAX_VCPUS;

/// Page size.
const PAGE: u64 = 4096;
/// Default memory size in bytes.
const MEMORY: u64 = 1 << 30;
/// Smallest memory size in bytes that a kernel boots with.
const MIN_MEMORY: u64 = 64 << 20;

/// Specification of a VM.
pub struct Spec {
    /// Configuration that it was made from.
    pub config: Config,
    /// Guest memory in bytes.
    pub memory: u64,
    /// Initial size of the balloon in bytes; `None`: no balloon.
    pub balloon: Option<u64>,
    /// Number of virtual CPUs.
    pub vcpus: u8,
    /// Connection of the serial line.
    pub serial: Target,
    /// Connection of the virtio console; `None`: the VM has none.
    pub console: Option<Target>,
    /// Least severe messages of the VM's processes ([`log`]).
    pub log: u64,
}

impl Spec {
    /// Returns the configuration of the VM itself.
    pub fn vm(&self) -> &VmConfig {
        &self.config.vm
    }

    /// Returns whether options that only the process back end has are set: they count as a request
    /// for it.
    pub fn needs_processes(&self) -> bool {
        needs_processes(self.vm())
    }

    /// Returns the kernel's consoles as command-line parameters. The last one is the console of the
    /// first user process.
    pub fn console_parameters(&self) -> &'static str {
        match (&self.serial, &self.console) {
            (_, None) => "console=ttyS0",
            (Target::Null, Some(_)) => "console=hvc0",
            (_, Some(_)) => "console=ttyS0 console=hvc0",
        }
    }
}

impl Config {
    /// Applies defaults and checks that the options are valid together. `is_quiet` lowers the
    /// default of `--log`.
    ///
    /// # Errors
    /// An invalid option: code 64 or 65.
    pub fn validate(self, is_quiet: bool) -> Result<Spec, Failure> {
        let vm = &self.vm;
        let memory = memory(vm)?;
        let balloon = balloon(vm, memory)?;
        let vcpus = vcpus(vm)?;
        check_conflicts(vm)?;
        check_counts(&self)?;
        let (serial, console) = consoles(vm)?;
        let log = match vm.log.unwrap_or(if is_quiet { Log::Error } else { Log::default() }) {
            Log::Error => log::ERROR,
            Log::Warn => log::WARN,
            Log::Info => log::INFO,
        };
        Ok(Spec { config: self, memory, balloon, vcpus, serial, console, log })
    }
}

fn memory(vm: &VmConfig) -> Result<u64, Failure> {
    let memory = vm.memory.map_or(MEMORY, |size| size.0);
    if memory < MIN_MEMORY || !memory.is_multiple_of(PAGE) {
        let text = format!("memory must be page-aligned and at least 64 MiB (got {memory} bytes)");
        return Err(Failure::new(failure::USAGE, text).help("use --memory 64M or more"));
    }
    Ok(memory)
}

fn balloon(vm: &VmConfig, memory: u64) -> Result<Option<u64>, Failure> {
    let balloon = vm.balloon.unwrap_or_default().0.map(|size| size.0);
    if balloon.is_some_and(|bytes| bytes > memory - MIN_MEMORY) {
        let text = "--balloon leaves the guest less than 64 MiB";
        return Err(Failure::new(failure::USAGE, text).help("use --balloon on, or more --memory"));
    }
    Ok(balloon)
}

fn vcpus(vm: &VmConfig) -> Result<u8, Failure> {
    let vcpus = vm.cpus.unwrap_or(1);
    if !(1..=MAX_VCPUS).contains(&vcpus.into()) {
        let text = format!("--cpus must be 1 to {MAX_VCPUS} (got {vcpus})");
        return Err(Failure::new(failure::BAD_CONFIG, text));
    }
    if vm.profile_writes.is_some() && vcpus != 1 {
        let text = "--profile-writes supports one virtual CPU only";
        return Err(Failure::new(failure::USAGE, text).help("remove --cpus"));
    }
    Ok(vcpus)
}

fn needs_processes(vm: &VmConfig) -> bool {
    let protection =
        matches!(vm.protection, Some(Protection::Keys | Protection::Process | Protection::Remap));
    vm.counters
        || vm.profile_writes.is_some()
        || vm.perf_map
        || !vm.without.is_empty()
        || protection
}

/// Checks pairs of options that exclude or require each other.
fn check_conflicts(vm: &VmConfig) -> Result<(), Failure> {
    let refuse = |text: &str, help: &str| Err(Failure::new(failure::USAGE, text).help(help));
    if vm.wait_boot && vm.api_socket.is_none() && vm.name.is_none() {
        return refuse("--wait-boot requires --api-socket or --name", "add --api-socket PATH");
    }
    if vm.backend == Some(BackendChoice::Kvm) && needs_processes(vm) {
        let text = "--counters, --perf-map, --profile-writes, --protection keys|process|remap and --without require --backend process";
        return refuse(text, "remove --backend kvm");
    }
    let is_profiled = vm.profile_writes.is_some() || vm.without.contains(&Optimisation::InProcess);
    if vm.protection == Some(Protection::Process) && is_profiled {
        let text = "--protection process conflicts with --profile-writes and --without in-process";
        return refuse(text, "remove one of the options");
    }
    Ok(())
}

fn check_counts(config: &Config) -> Result<(), Failure> {
    let counts = [
        (config.disk.len(), "disks", MAX_DISKS),
        (config.share.len(), "shared directories", MAX_SHARES),
        (config.net.len(), "networks", MAX_NETS),
    ];
    match counts.into_iter().find(|(count, _, limit)| count > limit) {
        None => Ok(()),
        Some((count, what, limit)) => {
            Err(Failure::new(failure::USAGE, format!("{count} {what} (limit {limit})")))
        }
    }
}

/// Returns the connections of the serial line and of the virtio console, if there is one.
fn consoles(vm: &VmConfig) -> Result<(Target, Option<Target>), Failure> {
    let second = vm.console.as_ref().and_then(|console| console.0.clone());
    let first = match (&vm.serial, &second) {
        (None, Some(Target::Stdio)) => Target::Null,
        (serial, _) => serial.clone().unwrap_or_default(),
    };
    let is_shared = !matches!(first, Target::Null | Target::Pty) && second.as_ref() == Some(&first);
    if is_shared {
        let text = "--serial and --console have the same target";
        let failure = Failure::new(failure::BAD_CONFIG, text);
        return Err(failure.help("use another target, such as --serial null"));
    }
    Ok((first, second))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::console::Virtio;
    use hosted_command::value::Size;

    fn validate(change: impl FnOnce(&mut VmConfig)) -> Result<Spec, String> {
        let mut config = Config::default();
        change(&mut config.vm);
        config.validate(false).map_err(|failure| failure.to_string())
    }

    #[test]
    fn defaults() {
        let spec = validate(|_| {}).unwrap();
        assert_eq!((spec.memory, spec.vcpus, spec.balloon), (MEMORY, 1, Some(0)));
        assert_eq!((&spec.serial, &spec.console, spec.log), (&Target::Stdio, &None, log::WARN));
        assert_eq!(spec.console_parameters(), "console=ttyS0");
        assert!(!spec.needs_processes());
        assert_eq!(Config::default().validate(true).unwrap().log, log::ERROR);
    }

    #[test]
    fn a_console_on_standard_output_replaces_the_serial_line() {
        let spec = validate(|vm| vm.console = Some(Virtio(Some(Target::Stdio)))).unwrap();
        assert_eq!((spec.serial, spec.console), (Target::Null, Some(Target::Stdio)));
        let refused = validate(|vm| {
            vm.serial = Some(Target::Stdio);
            vm.console = Some(Virtio(Some(Target::Stdio)));
        });
        assert!(refused.err().unwrap().contains("the same target"));
    }

    #[test]
    fn options_that_do_not_fit_are_refused() {
        let refused = |change: fn(&mut VmConfig)| validate(change).err().unwrap();
        assert!(refused(|vm| vm.memory = Some(Size(1 << 20))).contains("at least 64 MiB"));
        assert!(refused(|vm| vm.cpus = Some(9)).contains("--cpus must be 1 to"));
        assert!(refused(|vm| vm.wait_boot = true).contains("requires --api-socket"));
        let processes = |vm: &mut VmConfig| {
            vm.backend = Some(BackendChoice::Kvm);
            vm.counters = true;
        };
        assert!(refused(processes).contains("require --backend process"));
        let traced = |vm: &mut VmConfig| {
            vm.protection = Some(Protection::Process);
            vm.without = vec![Optimisation::InProcess];
        };
        assert!(refused(traced).contains("conflicts with"));
        let balloon = |vm: &mut VmConfig| {
            vm.memory = Some(Size(MIN_MEMORY));
            vm.balloon = Some(crate::config::vm::BalloonConfig(Some(Size(PAGE))));
        };
        assert!(refused(balloon).contains("less than 64 MiB"));
    }
}
