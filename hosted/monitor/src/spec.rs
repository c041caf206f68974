//! Validated configuration of a VM: defaults are applied and conflicts between options excluded.
//! Conditions of the host and of files are checked later, by the parts that use them.

use crate::config::Config;
use crate::config::console::Target;
use crate::config::port::MAX_NAMED;
use crate::config::vm::{BackendChoice, Log, Optimisation, Protection, VmConfig};
use hosted_command::failure::{self, Failure};
use proto::hosted::{MAX_DISKS, MAX_NETS, MAX_SHARES, console, log};
use proto::system::MAX_VCPUS;

/// Page size.
pub(crate) const PAGE: u64 = 4096;
/// Default memory size in bytes.
const MEMORY: u64 = 1 << 30;
/// Smallest memory size in bytes that a kernel boots with.
pub(crate) const MIN_MEMORY: u64 = 64 << 20;

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

    /// Returns whether the guest kernel has the virtio console as a console.
    fn is_kernel_console(&self) -> bool {
        self.vm().console.as_ref().is_some_and(|console| console.kernel)
    }

    /// Returns the kind of the virtio console ([`console`]).
    pub fn console_kind(&self) -> u64 {
        match &self.console {
            _ if !self.config.port.is_empty() => console::PORTS,
            Some(_) => console::SINGLE,
            None => console::NONE,
        }
    }

    /// Returns the kernel's consoles as command-line parameters. The last one is the console of the
    /// first user process.
    pub fn console_parameters(&self) -> &'static str {
        match (&self.serial, &self.console) {
            (_, None) => "console=ttyS0",
            _ if !self.is_kernel_console() => "console=ttyS0",
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
        let (serial, console) = consoles(&self)?;
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
        (config.port.len(), "ports", MAX_NAMED),
    ];
    match counts.into_iter().find(|(count, _, limit)| count > limit) {
        None => Ok(()),
        Some((count, what, limit)) => {
            Err(Failure::new(failure::USAGE, format!("{count} {what} (limit {limit})")))
        }
    }
}

/// Returns the connections of the serial line and of the virtio console, if there is one.
fn consoles(config: &Config) -> Result<(Target, Option<Target>), Failure> {
    let vm = &config.vm;
    let second = vm.console.as_ref().and_then(|console| console.target.clone());
    let first = match (&vm.serial, &second) {
        (None, Some(Target::Stdio)) => Target::Null,
        (serial, _) => serial.clone().unwrap_or_default(),
    };
    if first.is_exclusive() && second.as_ref() == Some(&first) {
        let text = "--serial and --console have the same target";
        let failure = Failure::new(failure::BAD_CONFIG, text);
        return Err(failure.help("use another target, such as --serial null"));
    }
    check_ports(config, &first, second.as_ref())?;
    Ok((first, second))
}

/// Checks that ports have different names and, where that is necessary, targets.
fn check_ports(config: &Config, serial: &Target, console: Option<&Target>) -> Result<(), Failure> {
    let mut used: Vec<&Target> = [serial].into_iter().chain(console).collect();
    for (index, port) in config.port.iter().enumerate() {
        let name = &port.name.0;
        if config.port[..index].iter().any(|other| other.name == port.name) {
            return Err(Failure::new(failure::BAD_CONFIG, format!("two ports are named `{name}`")));
        }
        if port.target.is_exclusive() && used.contains(&&port.target) {
            let text = format!("port `{name}` and another line have the same target");
            return Err(Failure::new(failure::BAD_CONFIG, text)
                .help("use another target, such as --serial null"));
        }
        used.push(&port.target);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::console::Virtio;
    use crate::config::port;
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
        let spec = validate(|vm| vm.console = Some(Virtio::parse("stdio").unwrap())).unwrap();
        assert_eq!((spec.serial, spec.console), (Target::Null, Some(Target::Stdio)));
        let refused = validate(|vm| {
            vm.serial = Some(Target::Stdio);
            vm.console = Some(Virtio::parse("stdio").unwrap());
        });
        assert!(refused.err().unwrap().contains("the same target"));
    }

    #[test]
    fn ports() {
        let validate = |console: &str, ports: &[&str]| {
            let mut config = Config::default();
            config.vm.console = Some(Virtio::parse(console).unwrap());
            config.port = ports.iter().map(|text| port::parse(text).unwrap()).collect();
            config.validate(false).map_err(|failure| failure.to_string())
        };
        let spec = validate("null,kernel=off", &[]).unwrap();
        assert_eq!((spec.console_kind(), spec.console_parameters()), (1, "console=ttyS0"));
        let shared = "target=file=/proc/self/fd/1";
        let ports = [format!("a,{shared}"), format!("b,{shared}")];
        let ports = ports.each_ref().map(|text| &**text);
        assert_eq!(validate("off", &ports).unwrap().console_kind(), 2);
        let refused = |ports: &[&str]| validate("off", ports).err().unwrap();
        assert!(refused(&["a,target=null", "a,target=pty"]).contains("named `a`"));
        assert!(refused(&["a,target=stdio"]).contains("same target"), "the serial line's");
        assert!(refused(&["a,target=unix=x", "b,target=unix=x"]).contains("same target"));
        let many: Vec<_> = (0..=MAX_NAMED).map(|index| format!("{index},target=null")).collect();
        let many: Vec<_> = many.iter().map(|text| &**text).collect();
        assert!(validate("off", &many).err().unwrap().contains("8 ports (limit 7)"));
        assert!(validate("null", &many[1..]).is_ok());
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
