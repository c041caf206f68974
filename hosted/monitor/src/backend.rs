//! Back ends of `parador run`: the choice of one, and the preparation of a VM for its first
//! process.

use crate::companion::{self, WEDGE, Wedge};
use crate::compat;
use crate::config::BuiltInitrd;
use crate::config::net::NetConfig;
use crate::config::vm::{BackendChoice, Optimisation, Protection, Sandbox, VmConfig};
use crate::exit::BackendKind;
use crate::kvm;
use crate::net::NetBackend;
use crate::spec::Spec;
use crate::vm_files::VmFiles;
use hosted_command::architecture::Architecture;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::fetch;
use hosted_command::input;
use hosted_command::interrupt::Interruptible;
use hosted_command::messages::{Level, say};
use hosted_command::programs::Named;
use hosted_command::steps::Steps;
use hosted_kbuild::refused;
use hosted_loader::{Error, Image, KernelReader, Prepared};
use hosted_system::initramfs;
use proto::hosted::{layout, option};
use std::io::Seek;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;
use vmm_mem::large::Large;

/// Kernel command line of KVM guests, after the consoles.
const KVM_COMMAND_LINE: &str = "panic=-1";
/// Kernel command line of process guests, between the consoles and the user's text.
/// `mitigations=off`: they defend the kernel against user mode on a physical CPU that the guest
/// does not own. `transparent_hugepage=always`: a large page of user mode costs one fault and one
/// mapping of the host (Linux needs 512 MiB or more for it). `audit=0`: journald would turn
/// auditing on, which takes every system call through Linux' slow path. `parador_deferred=on`:
/// memory is zero at each start, and page structures of 2 GiB occupy 32 MiB.
pub const COMMAND_LINE: &str =
    "panic=-1 mitigations=off audit=0 transparent_hugepage=always parador_deferred=on";

/// Longest command line in bytes: Linux truncates it (`COMMAND_LINE_SIZE`, terminating zero
/// included).
const MAX_COMMAND_LINE: usize = 2047;
/// Added to the command line where the host has no 32-bit user mode.
const NO_COMPAT: &str = "ia32_emulation=off";

/// Kernel in memory, in the form that its back end takes.
pub enum KernelImage<'a> {
    /// KVM: contents of the file.
    Kvm(Large),
    /// Processes: the parsed kernel.
    Process(Box<Image<'a>>),
}

impl<'a> KernelImage<'a> {
    /// Chooses the back end for a kernel. An explicit request is never replaced by another back
    /// end.
    pub fn choose(spec: &Spec, source: &'a KernelReader, kernel: &Path) -> Result<Self, Failure> {
        match spec.vm().backend.unwrap_or_default() {
            BackendChoice::Kvm => match kvm::trial() {
                Ok(()) => read(source, kernel).map(Self::Kvm),
                Err(why) => {
                    let text = format!("KVM is not usable: {why}");
                    let failure = Failure::new(failure::UNAVAILABLE, text);
                    let help =
                        "--backend process runs kernels of `parador kernel build` without KVM";
                    Err(failure.help(help))
                }
            },
            BackendChoice::Auto if !spec.needs_processes() => match kvm::trial() {
                Ok(()) => read(source, kernel).map(Self::Kvm),
                Err(why) => Self::parse_without_kvm(source, kernel, &why),
            },
            BackendChoice::Auto | BackendChoice::Process => Self::parse(source, kernel),
        }
    }

    /// Parses the kernel for the process back end.
    fn parse(source: &'a KernelReader, kernel: &Path) -> Result<Self, Failure> {
        let image = Image::parse(source).map_err(|error| refused(&error, kernel))?;
        Ok(Self::Process(Box::new(image)))
    }

    /// Parses the kernel for the process back end; `why` is the reason that KVM is not usable.
    fn parse_without_kvm(
        source: &'a KernelReader,
        kernel: &Path,
        why: &str,
    ) -> Result<Self, Failure> {
        match Image::parse(source) {
            Ok(image) => Ok(Self::Process(Box::new(image))),
            Err(Error::Kernel(..)) if vmm_boot::Kernel::detect(&read(source, kernel)?).is_ok() => {
                let kernel = kernel.display();
                let text = format!("{kernel} is not pre-virtualized, and KVM is not usable: {why}");
                Err(Failure::new(failure::UNAVAILABLE, text)
                    .help("`parador kernel build` builds a kernel that does not need KVM"))
            }
            Err(error) => Err(refused(&error, kernel)),
        }
    }

    /// Returns the parsed kernel of the process back end.
    pub fn image(&self) -> Option<&Image<'a>> {
        match self {
            Self::Process(image) => Some(image),
            Self::Kvm(_) => None,
        }
    }
}

/// Reads the whole kernel.
fn read(source: &KernelReader, path: &Path) -> Result<Large, Failure> {
    let file = source.file().try_clone().and_then(|mut file| {
        file.rewind()?;
        Large::read(&mut file)
    });
    file.file_error("read", path)
}

/// VM that can be started.
pub struct Start {
    /// Memory of the VM.
    pub prepared: Prepared,
    /// Descriptors of the KVM back end.
    pub more: Vec<(OwnedFd, u32)>,
    /// Connected networks.
    pub nets: Vec<NetBackend>,
}

/// Chosen back end.
pub struct Backend {
    program: Program,
    /// Kernel command line.
    command_line: String,
    /// Location of Parador's binaries.
    programs: Named,
}

/// Program of the VM's first process.
enum Program {
    /// `parador` itself as a KVM process.
    Kvm,
    /// The wedge.
    Wedge {
        wedge: Wedge,
        /// Bits of [`option`] that depend on the host.
        options: u64,
        /// Reason for guest user mode having access to the guest kernel, if that is not requested.
        open: Option<&'static str>,
    },
}

impl Backend {
    /// Finds the program that runs such a kernel, and decides what depends on the host.
    pub fn new(spec: &Spec, image: &KernelImage<'_>, named: &Named) -> Result<Self, Failure> {
        match image {
            KernelImage::Kvm(kernel) => {
                let command_line = line(spec, KVM_COMMAND_LINE);
                // A bzImage states its limit, and other kernels have others.
                if command_line.len() > MAX_COMMAND_LINE && is_vmlinux(kernel) {
                    return Err(too_long(&command_line));
                }
                Ok(Self { program: Program::Kvm, command_line, programs: named.clone() })
            }
            KernelImage::Process(_) => Self::of_processes(spec, named),
        }
    }

    fn of_processes(spec: &Spec, named: &Named) -> Result<Self, Failure> {
        let wedge = Wedge::find(named)?;
        let (use_keys, open) = use_protection_keys(spec.vm())?;
        let (command_line, compat) = match compat::is_there() {
            true => (line(spec, COMMAND_LINE), option::COMPAT),
            false => (line(spec, &format!("{COMMAND_LINE} {NO_COMPAT}")), 0),
        };
        if command_line.len() > MAX_COMMAND_LINE {
            return Err(too_long(&command_line));
        }
        let options = compat | if use_keys { option::KEYS } else { 0 };
        let program = Program::Wedge { wedge, options, open };
        Ok(Self { program, command_line, programs: named.clone() })
    }

    /// Returns which back end this is.
    pub fn kind(&self) -> BackendKind {
        match self.program {
            Program::Kvm => BackendKind::Kvm,
            Program::Wedge { .. } => BackendKind::Process,
        }
    }

    /// Returns the name of the process in messages.
    pub fn process_name(&self) -> &'static str {
        match self.program {
            Program::Kvm => "kvm",
            Program::Wedge { .. } => WEDGE.name,
        }
    }

    /// Returns the highest descriptor that the process creates by itself.
    pub fn last_descriptor(&self) -> i32 {
        match self.program {
            Program::Kvm => layout::CONTROL_FD as i32,
            Program::Wedge { .. } => layout::LAST_FD as i32,
        }
    }

    /// Returns the command that starts it, without an environment: the guest could read it in its
    /// processes.
    pub fn command(&self) -> Result<Command, Failure> {
        let mut command = match &self.program {
            Program::Kvm => kvm::command(),
            Program::Wedge { wedge, .. } => wedge.command(),
        }?;
        command.env_clear();
        Ok(command)
    }

    /// Describes a VM that is not started (`--dry-run`).
    pub fn say_dry_run(&self, kernel: &Path) {
        let how = match self.program {
            Program::Kvm => "run with KVM",
            Program::Wedge { .. } => "run in processes of this host",
        };
        say(Level::Info, &format!("{} would {how}", kernel.display()));
    }

    /// Warns of a guest kernel that guest user mode can change.
    pub fn warn_if_open(&self) {
        if let Program::Wedge { open: Some(why), .. } = self.program {
            let text = format!(
                "the guest kernel is not isolated from guest user mode: {why} (`--protection process` isolates it, slowly)"
            );
            say(Level::Warn, &text);
        }
    }

    /// Reads the kernel again for `action`.
    pub fn with_kernel<T>(
        &self,
        files: &VmFiles,
        action: impl FnOnce(&KernelImage<'_>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let (source, path) = (files.open_kernel()?, &files.kernel.path);
        match self.program {
            Program::Kvm => action(&KernelImage::Kvm(read(&source, path)?)),
            Program::Wedge { .. } => action(&KernelImage::parse(&source, path)?),
        }
    }

    /// Loads the kernel into new memory and connects the networks.
    pub fn prepare(
        &self,
        spec: &Spec,
        files: &VmFiles,
        image: &KernelImage<'_>,
    ) -> Result<Start, Failure> {
        let mut nets = open_nets(&spec.config.net)?;
        let initrd = initrd(spec.vm().initrd.as_deref(), &self.programs, spec.memory)?;
        let (prepared, more) = match image {
            KernelImage::Process(image) => {
                (self.load(spec, files, &nets, image, initrd.as_deref())?, Vec::new())
            }
            KernelImage::Kvm(bytes) => {
                let initrd = initrd.unwrap_or_default();
                self.describe(spec, files, &nets, bytes, &initrd)?
            }
        };
        nets.iter_mut().try_for_each(NetBackend::wait)?;
        Ok(Start { prepared, more, nets })
    }

    /// Loads the kernel for the process back end.
    fn load(
        &self,
        spec: &Spec,
        files: &VmFiles,
        nets: &[NetBackend],
        image: &Image<'_>,
        initrd: Option<&[u8]>,
    ) -> Result<Prepared, Failure> {
        let of_host = match self.program {
            Program::Wedge { options, .. } => options,
            Program::Kvm => 0,
        };
        let disks: Vec<_> = files.disks.iter().map(|disk| disk.record).collect();
        let nets: Vec<_> = nets.iter().map(|net| net.record).collect();
        let shares: Vec<_> = files.shares.iter().map(|share| share.record).collect();
        let machine = hosted_loader::VmSpec {
            memory: spec.memory,
            vcpus: spec.vcpus,
            initrd,
            command_line: &self.command_line,
            options: option_bits(spec.vm()) | of_host,
            log: spec.log,
            balloon: spec.balloon,
            disks: &disks,
            nets: &nets,
            shares: &shares,
            vsock: spec.config.vsock.as_ref().map(|vsock| vsock.cid()),
            console: spec.console_kind(),
        };
        hosted_loader::prepare(image, &machine).map_err(|error| refused(&error, &files.kernel.path))
    }

    /// Creates empty memory and the description of the VM for the KVM process, which loads the
    /// kernel itself.
    fn describe(
        &self,
        spec: &Spec,
        files: &VmFiles,
        nets: &[NetBackend],
        bytes: &[u8],
        initrd: &[u8],
    ) -> Result<(Prepared, Vec<(OwnedFd, u32)>), Failure> {
        kvm::check(&files.kernel.path, bytes, initrd.len() as u64, spec.memory)?;
        let machine = hosted_kvm::KvmConfig {
            memory: spec.memory,
            cpus: spec.vcpus,
            command_line: self.command_line.clone(),
            log: spec.log,
            disks: files.disks.iter().map(|disk| disk.record.to_words()).collect(),
            nets: nets.iter().map(|net| net.record.to_words()).collect(),
            shares: files.shares.iter().map(|share| share.record.to_words()).collect(),
            vsock: spec.config.vsock.as_ref().map(|vsock| vsock.cid()),
            console: spec.console_kind(),
            balloon: spec.balloon,
            sandbox: match spec.vm().sandbox.unwrap_or_default() {
                Sandbox::On => hosted_kvm::Sandbox::On,
                Sandbox::Off => hosted_kvm::Sandbox::Off,
                Sandbox::Strict => hosted_kvm::Sandbox::Strict,
            },
            debug: spec.vm().gdb.is_some(),
        };
        let more = kvm::files(&machine, bytes, initrd)?;
        let prepared = hosted_loader::empty(spec.memory);
        Ok((prepared.map_err(|error| refused(&error, &files.kernel.path))?, more))
    }
}

/// Returns the kernel command line; `own` are the parameters of the back end.
fn line(spec: &Spec, own: &str) -> String {
    let consoles = spec.console_parameters();
    match &spec.vm().cmdline {
        Some(more) => format!("{consoles} {own} {more}"),
        None => format!("{consoles} {own}"),
    }
}

/// Refuses a command line that Linux would truncate.
fn too_long(command_line: &str) -> Failure {
    let length = command_line.len();
    let text = format!("the kernel command line has {length} bytes (limit {MAX_COMMAND_LINE})");
    Failure::new(failure::BAD_CONFIG, text)
        .help("shorten --cmdline; move settings to a script on a disk or --share")
}

/// Returns whether a kernel is an ELF file of Linux, which has its banner uncompressed.
fn is_vmlinux(kernel: &[u8]) -> bool {
    const BANNER: &[u8] = b"Linux version ";
    kernel.starts_with(b"\x7fELF") && kernel.windows(BANNER.len()).any(|bytes| bytes == BANNER)
}

/// Decides whether protection keys isolate the guest kernel from guest user mode. Returns the
/// reason, too, if they are wanted but unavailable.
fn use_protection_keys(vm: &VmConfig) -> Result<(bool, Option<&'static str>), Failure> {
    let lacking = if vm.profile_writes.is_some() {
        Some("`--profile-writes` changes the access rights of kernel memory")
    } else if vm.without.contains(&Optimisation::Functions) {
        Some("`--without functions` lets the kernel modify its code unnoticed")
    } else if !hosted_loader::has_keys() {
        Some("the host has no protection keys (PKU)")
    } else {
        None
    };
    match (vm.protection.unwrap_or_default(), lacking) {
        (Protection::None | Protection::Process | Protection::Remap, _) => Ok((false, None)),
        (Protection::Auto, lacking) => Ok((lacking.is_none(), lacking)),
        (Protection::Keys, None) => Ok((true, None)),
        (Protection::Keys, Some(why)) => {
            let text = format!("cannot isolate the guest kernel from guest user mode: {why}");
            let failure = Failure::new(failure::UNAVAILABLE, text);
            let help = "`--protection process` isolates it on any host, slowly; `--protection none` if guest user mode is trusted";
            Err(failure.help(help))
        }
    }
}

/// Returns the bits of [`option`] for the wedge that the configuration sets.
fn option_bits(vm: &VmConfig) -> u64 {
    let counters = if vm.counters { option::COUNTERS } else { 0 };
    let debug = if vm.gdb.is_some() { option::DEBUG } else { 0 };
    let profile = if vm.profile_writes.is_some() { option::PROFILE } else { 0 };
    let sandbox = match vm.sandbox.unwrap_or_default() {
        Sandbox::On => option::SANDBOX,
        Sandbox::Off => 0,
        Sandbox::Strict => option::SANDBOX | option::STRICT,
    };
    let protection = match vm.protection.unwrap_or_default() {
        Protection::Auto | Protection::Keys | Protection::None => 0,
        // System calls switch to another process.
        Protection::Process => option::USER_PROCESS | option::NO_CALL_SITES,
        // Transitions in place would bypass the wedge, which maps and unmaps the kernel.
        Protection::Remap => option::REMAP | option::NO_FAST_PATHS | option::NO_CALL_SITES,
    };
    let all = counters | profile | debug | sandbox | protection;
    vm.without.iter().fold(all, |option_bits, optimisation| {
        option_bits
            | match optimisation {
                Optimisation::FastSites => option::NO_FAST_PATHS,
                Optimisation::CallSites => option::NO_CALL_SITES,
                Optimisation::Functions => option::NO_FUNCTIONS,
                Optimisation::Batches => option::NO_BATCHES,
                Optimisation::Spaces => option::ONE_SPACE,
                Optimisation::InProcess => option::TRACED,
            }
    })
}

/// Connects the configured networks.
fn open_nets(nets: &[NetConfig]) -> Result<Vec<NetBackend>, Failure> {
    let opened: Vec<_> = nets.iter().map(NetConfig::open).collect::<Result<_, _>>()?;
    if nets.len() > 1 && opened.iter().any(Option::is_none) {
        return Err(Failure::new(failure::BAD_CONFIG, "--net none conflicts with another --net"));
    }
    Ok(opened.into_iter().flatten().collect())
}

/// Reads or builds the configured RAM disk; a guest with `memory` bytes has no room for more.
fn initrd(path: Option<&Path>, named: &Named, memory: u64) -> Result<Option<Vec<u8>>, Failure> {
    let Some(path) = path else { return Ok(None) };
    let initrd = match BuiltInitrd::of(path) {
        Some(BuiltInitrd::Busybox) => busybox(),
        Some(BuiltInitrd::Agent) => companion::agent_disk(named),
        None => input::bytes(path, memory),
    };
    initrd.map(Some)
}

/// Builds the RAM disk with a shell.
fn busybox() -> Result<Vec<u8>, Failure> {
    let interruptible = Interruptible::new()?;
    let (busybox, _) = Steps::stderr().run("RAM disk", |step| {
        let (path, title) = fetch::busybox(Architecture::X86.into(), step, &interruptible)?;
        Ok(((path, ()), title))
    })?;
    initramfs::busybox(Architecture::X86, &busybox, &[], &[])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn a_command_line_that_linux_would_truncate_is_refused() {
        let backend = |kernel: &[u8], length| {
            let mut config = Config::default();
            config.vm.cmdline = Some("x".repeat(length));
            let spec = config.validate(true).unwrap();
            let kernel = KernelImage::Kvm(Large::copy_of(kernel).unwrap());
            Backend::new(&spec, &kernel, &Named::default()).map(drop)
        };
        let vmlinux = b"\x7fELF \0Linux version 6.1\0";
        backend(vmlinux, 1000).unwrap();
        let failure = backend(vmlinux, MAX_COMMAND_LINE).unwrap_err();
        assert_eq!(failure.code(), failure::BAD_CONFIG);
        assert!(failure.to_string().contains("limit 2047"), "{failure}");
        backend(b"\x7fELF \0another kernel\0", MAX_COMMAND_LINE).unwrap();
        backend(b"bzImage Linux version 6.1", MAX_COMMAND_LINE).unwrap();
    }
}
