//! Starts a built system in QEMU and connects the terminal to the guest's console.

use crate::console::HostConsole;
use crate::event_loop::deadline;
use crate::exit::ExitCause;
use crate::vm_process::VmProcess;
use hosted_command::architecture::Architecture;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::input;
use hosted_command::messages;
use hosted_command::supervise::{self, AtEnd};
use hosted_system::attach::{Bus, EmulatedDisk, MAX_MMIO_DEVICES, MMIO_PER_PAGE, VirtioBus};
use hosted_system::image::Image;
use hosted_system::resolved::ResolvedSystem;
use hosted_system::rootfs;
use rustix::process::Signal;
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Offset of exit codes that `root` writes to `isa-debug-exit`, which keeps them apart from QEMU's
/// own exit codes 0 and 1; QEMU exits with `2 * value + 1`.
const REPORT_BASE: u8 = 0x10;
/// Value that Parador's kernel writes after a panic; the exit code with the same value is never
/// used.
const KERNEL_PANIC: u8 = 0x7f;
/// Line of `root` with the outcome, and start of the line of a panicked kernel.
const OUTCOME: &str = "root: outcome ";
const PANIC: &str = "kernel: PANIC";
/// Lines of the kernel log that are shown after a failure.
const SHOWN_LINES: usize = 20;

/// Warning of QEMU for each feature of the CPU model that TCG lacks.
const NOISE: &str = "warning: TCG doesn't support requested feature";

/// Options of an emulation.
#[derive(Debug)]
pub struct Options {
    /// QEMU binary.
    pub qemu: PathBuf,
    /// Time limit.
    pub timeout: Option<Duration>,
    /// Count instructions instead of time.
    pub icount: bool,
    /// File for the kernel log.
    pub log: PathBuf,
    /// CD-ROM image to boot instead of the kernel.
    pub iso: Option<PathBuf>,
    /// Additional QEMU arguments.
    pub extra: Vec<OsString>,
}

/// Result of an emulation.
#[derive(Debug, PartialEq, Eq)]
struct Verdict {
    code: u8,
    text: String,
    /// The kernel log may contain details.
    show_log: bool,
}

/// Runs QEMU to its end and returns the exit code.
pub fn run(system: &ResolvedSystem, image: &Image, options: &Options) -> Result<u8, Failure> {
    let disks = system.disks.iter().map(|disk| disk.path.as_path());
    disks.chain([&*options.log]).chain(options.iso.as_deref()).try_for_each(check_text)?;
    system.disks.iter().try_for_each(|disk| check_disk(&disk.path))?;
    let mut command = supervise::command(options.qemu.as_os_str(), AtEnd::Kill)
        .map_err(|failure| failure.help(qemu_help(system)))?;
    command.args(arguments(system, image, options));
    let _log = reserve_log(&options.log)?;
    let start = Instant::now();
    let machine = VmProcess::start("QEMU", command)?;
    let limit = deadline(options.timeout);
    let (end, messages) = machine.serve(
        limit,
        &keys(&system.console_clients()),
        &mut HostConsole::stdio()?,
        None,
        None,
    )?;
    let log = fs::read(&options.log).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let verdict = match system.board.architecture() {
        Architecture::Arm64 => logged_verdict(&end, &log),
        Architecture::X86 => exit_verdict(&end),
    };
    if verdict.show_log {
        show("QEMU's messages", &messages.text(), &options.qemu.display().to_string());
        show("end of the kernel's log", &log, &options.log.display().to_string());
    }
    let seconds = start.elapsed().as_secs_f64();
    let Verdict { text, code, .. } = &verdict;
    messages::to_stderr(format_args!("parador: {text} (exit code {code}, {seconds:.1} s)\n"));
    Ok(verdict.code)
}

/// Empties the file of a kernel log: QEMU does so only if it gets to open it, and an old log would
/// mislead. Another emulation does not take the file until the result is dropped: the exit code may
/// be that of the log.
fn reserve_log(path: &Path) -> Result<File, Failure> {
    let mut options = File::options();
    let log = options.write(true).create(true).truncate(false).open(path);
    let log = log.file_error("write", path)?;
    if !log.metadata().file_error("read", path)?.is_file() {
        return Ok(log);
    }
    if let Err(TryLockError::WouldBlock) = log.try_lock() {
        let text = format!("another emulation writes its kernel log to {}", path.display());
        return Err(Failure::new(failure::OS_ERROR, text).help("use another file: `--log FILE`"));
    }
    log.set_len(0).file_error("write", path)?;
    Ok(log)
}

/// Checks that a path can be a part of an option.
fn check_text(path: &Path) -> Result<(), Failure> {
    if path.to_str().is_some() {
        return Ok(());
    }
    let text = format!("the path {} is not UTF-8", path.display());
    Err(Failure::new(failure::USAGE, text).help("rename the file, or its folder"))
}

/// Checks that QEMU can open a disk, for a better message than its own.
fn check_disk(path: &Path) -> Result<(), Failure> {
    input::try_open(path).map(drop).map_err(|error| {
        let help = rootfs::advice(path)
            .unwrap_or_else(|| "create a disk with `truncate -s 1G FILE`".to_owned());
        Failure::file("open", path, &error)
            .help(help + "; paths are relative to the description's folder")
    })
}

/// Describes the terminal's keys; `clients` share the console.
fn keys(clients: &[&str]) -> String {
    if clients.is_empty() {
        return "Ctrl-A X kills QEMU; all other keys go to the guest".to_owned();
    }
    let digits = (1..=9).zip(clients).map(|(digit, name)| format!(", {digit} {name}"));
    format!(
        "this terminal is shared. Ctrl-] and a digit select the console: 0 log{}\n\
         parador: Ctrl-] ? lists all keys; Ctrl-A X kills QEMU",
        digits.collect::<String>()
    )
}

/// Prints the last lines of a text, if there are any.
fn show(what: &str, text: &str, origin: &str) {
    let tells = |line: &&str| !line.trim().is_empty() && !line.contains(NOISE);
    let lines: Vec<&str> = text.lines().filter(tells).collect();
    if lines.is_empty() {
        return;
    }
    messages::to_stderr(format_args!("parador: {what} ({origin}):\n"));
    for line in &lines[lines.len().saturating_sub(SHOWN_LINES)..] {
        messages::to_stderr(format_args!("  | {}\n", line.trim_end()));
    }
}

fn exit_verdict(end: &ExitCause) -> Verdict {
    let verdict = |code: u8, text: &str| Verdict { code, text: text.to_owned(), show_log: false };
    let failed = |text: String| Verdict { code: failure::INTERNAL, text, show_log: true };
    match end {
        ExitCause::Timeout => {
            Verdict { show_log: true, ..verdict(failure::TIMEOUT, "time limit reached") }
        }
        ExitCause::Signal(signal) => {
            verdict(128 + *signal as u8, &format!("ended by signal {signal}"))
        }
        ExitCause::Keyboard => verdict(0, "ended from the keyboard"),
        ExitCause::OutputClosed => {
            verdict(128 + Signal::PIPE.as_raw() as u8, "the reader of the console has closed it")
        }
        ExitCause::Request | ExitCause::Reset => verdict(0, "ended by request"),
        ExitCause::DeviceProcess(name, status) => {
            failed(format!("the process of {name} exited ({status})"))
        }
        ExitCause::Exited(status) => match (status.code(), status.signal()) {
            (Some(0), _) => {
                failed("QEMU exited without an exit code of the system: reset or power-off".into())
            }
            (Some(code), _) if code & 1 == 1 && code >> 1 >= i32::from(REPORT_BASE) => {
                reported((code >> 1) as u8)
            }
            (Some(code), _) => failed(format!("QEMU failed with exit code {code}")),
            (None, signal) => {
                let signal = signal.unwrap_or(0);
                let text = format!("QEMU was killed by signal {signal}");
                Verdict { code: 128 + signal as u8, text, show_log: true }
            }
        },
    }
}

/// Interprets the end of a machine without `isa-debug-exit`: `root` logs the outcome, then resets
/// it. Nothing that another program logs comes later, or begins with this text.
fn logged_verdict(end: &ExitCause, log: &str) -> Verdict {
    let ExitCause::Exited(status) = end else { return exit_verdict(end) };
    let outcome = log.lines().rev().find_map(|line| line.strip_prefix(OUTCOME));
    match outcome.and_then(|code| code.trim().parse::<u8>().ok()) {
        _ if status.code() != Some(0) => exit_verdict(end),
        _ if log.lines().any(|line| line.starts_with(PANIC)) => reported(KERNEL_PANIC),
        Some(code) if code <= failure::GUEST_RESET => reported(code + REPORT_BASE),
        _ => exit_verdict(end),
    }
}

/// Interprets a value written to `isa-debug-exit`.
fn reported(value: u8) -> Verdict {
    if value == KERNEL_PANIC {
        let text = "Parador's kernel panicked; this is always a bug in Parador".to_owned();
        return Verdict { code: failure::INTERNAL, text, show_log: true };
    }
    let code = value - REPORT_BASE;
    Verdict {
        code,
        text: failure::meaning_of_end(code),
        show_log: code >= 64 && code != failure::GUEST_RESET,
    }
}

/// Returns the remedy for a missing QEMU.
fn qemu_help(system: &ResolvedSystem) -> &'static str {
    match system.board.architecture() {
        Architecture::X86 => "install QEMU: apt-get install qemu-system-x86",
        Architecture::Arm64 => "install QEMU: apt-get install qemu-system-arm",
    }
}

fn arguments(system: &ResolvedSystem, image: &Image, options: &Options) -> Vec<OsString> {
    let cpus = system.cpus.unwrap_or(1);
    let megabytes = system.machine_memory(image.bundle_length).div_ceil(1 << 20);
    let mut arguments: Vec<OsString> = Vec::new();
    let mut add = |words: &[&str]| arguments.extend(words.iter().map(OsString::from));
    let is_arm64 = system.board.architecture() == Architecture::Arm64;
    if is_arm64 {
        let smmu = if system.iommu { ",iommu=smmuv3" } else { "" };
        let machine = format!("virt,virtualization=on,gic-version=3{smmu}");
        add(&["-M", &machine, "-cpu", "cortex-a76"]);
    } else {
        add(&["-M", "q35", "-cpu", "EPYC,+svm,+npt", "-accel", "tcg"]);
    }
    add(&["-smp", &cpus.to_string(), "-m", &megabytes.to_string()]);
    add(&["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    if options.icount {
        add(&["-icount", "shift=0,sleep=off", "-seed", "1"]);
        add(&["-rtc", "base=2024-01-01T00:00:00,clock=vm"]);
    }
    // `signal=off`: QEMU passes Ctrl-C through as a byte.
    add(&["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"]);
    let log = option_path(&options.log);
    add(&["-chardev", &format!("file,id=log,path={log}")]);
    if is_arm64 {
        // The last transport: disks and network cards begin with the first one.
        add(&["-global", "virtio-mmio.force-legacy=false"]);
        let last = mmio_bus(MAX_MMIO_DEVICES) + MMIO_PER_PAGE - 1;
        add(&["-device", &format!("virtio-serial-device,bus=virtio-mmio-bus.{last}")]);
        add(&["-device", "virtconsole,chardev=log"]);
    } else {
        add(&["-serial", "chardev:log", "-device", "isa-debug-exit,iobase=0xf4,iosize=4"]);
    }
    if system.iommu && !is_arm64 {
        add(&["-device", "amd-iommu,intremap=on"]);
    }
    add_devices(system, &mut add);
    match &options.iso {
        // GRUB requires a display for its menu.
        Some(iso) => {
            let drive = format!("file={},format=raw,media=cdrom,readonly=on", option_path(iso));
            add(&["-drive", &drive, "-boot", "d", "-vga", "std"]);
        }
        None => {
            add(&["-append", &system.kernel_command_line()]);
            arguments.extend(["-kernel".into(), image.kernel.clone().into_os_string()]);
            arguments.extend(["-initrd".into(), image.bundle.clone().into_os_string()]);
        }
    }
    arguments.extend(options.extra.iter().cloned());
    arguments
}

/// Returns the number of the transport over MMIO of disk or network card `index`: the first one of
/// a page.
fn mmio_bus(index: usize) -> usize {
    MMIO_PER_PAGE * index
}

/// Adds the machine's disks and network cards.
fn add_devices(system: &ResolvedSystem, add: &mut impl FnMut(&[&str])) {
    // Without these options, virtio devices on PCI bypass the IOMMU.
    let translated = if system.iommu { ",iommu_platform=on,disable-legacy=on" } else { "" };
    let architecture = system.board.architecture();
    let bus = VirtioBus::of(architecture, system.iommu);
    let virtio = |name: &str, index: usize| match bus {
        VirtioBus::Pci => format!("{name}-pci{translated}"),
        VirtioBus::Mmio => format!("{name}-device,bus=virtio-mmio-bus.{}", mmio_bus(index)),
    };
    // A PC has the controller.
    if architecture == Architecture::Arm64 && system.disks.iter().any(|d| d.bus == Bus::Ahci) {
        add(&["-device", "ahci,id=ide"]);
    }
    for (number, disk) in system.disks.iter().enumerate() {
        let device = match disk.bus {
            Bus::Virtio => virtio("virtio-blk", number),
            Bus::Ahci => {
                let others = system.disks[..number].iter();
                format!("ide-hd,bus=ide.{}", others.filter(|other| other.bus == Bus::Ahci).count())
            }
        };
        let device = format!("{device},drive=disk{number}");
        add(&["-drive", &drive_argument(disk, number), "-device", &device]);
    }
    for (number, net) in system.nets.iter().enumerate() {
        let forwards: String =
            net.forwards.iter().map(|forward| format!(",hostfwd={forward}")).collect();
        add(&["-netdev", &format!("user,id=net{number}{forwards}")]);
        let device = virtio("virtio-net", system.disks.len() + number);
        let rom = if bus == VirtioBus::Pci { ",romfile=" } else { "" };
        add(&["-device", &format!("{device},netdev=net{number}{rom}")]);
    }
}

/// Returns the drive of a disk.
fn drive_argument(disk: &EmulatedDisk, number: usize) -> String {
    let on_off = |on| if on { "on" } else { "off" };
    format!(
        "file={},format={},if=none,id=disk{number},readonly={},snapshot={}",
        option_path(&disk.path),
        disk.format,
        on_off(disk.read_only),
        on_off(disk.snapshot),
    )
}

/// Escapes a path for QEMU's comma-separated options. A colon in the first component would end the
/// name of a protocol.
fn option_path(path: &Path) -> String {
    Path::new(".").join(path).to_string_lossy().replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;
    use hosted_command::input::testing::with_named_pipe;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::process::ExitStatus;

    fn exited(code: i32) -> Verdict {
        exit_verdict(&ExitCause::Exited(ExitStatus::from_raw(code << 8)))
    }

    /// Returns QEMU's exit status for an exit code that `root` writes.
    fn status(code: i32) -> i32 {
        2 * (code + i32::from(REPORT_BASE)) + 1
    }

    #[test]
    fn a_named_pipe_is_no_disk() {
        assert!(
            with_named_pipe(check_disk).unwrap_err().to_string().contains("it is a named pipe")
        );
        let file = tempfile::NamedTempFile::new().unwrap();
        check_disk(file.path()).unwrap();
    }

    #[test]
    fn codes_of_guests_pass() {
        for code in (0..=63).chain(80..=83) {
            assert_eq!(i32::from(exited(status(code)).code), code);
        }
        assert_eq!(exited(status(0)).text, "the guest powered off");
        assert!(!exited(status(0)).show_log);
        assert!(exited(status(80)).show_log);
    }

    #[test]
    fn failures_of_the_kernel_and_of_qemu() {
        let kernel = exited(2 * i32::from(KERNEL_PANIC) + 1);
        assert_eq!((kernel.code, kernel.show_log), (failure::INTERNAL, true));
        for code in [0, 1, 2, 3, 0x1f, 70] {
            assert_eq!(exited(code).code, failure::INTERNAL, "{code}");
        }
        let killed = exit_verdict(&ExitCause::Exited(ExitStatus::from_raw(9)));
        assert_eq!(killed.code, 137);
    }

    #[test]
    fn outcomes_in_the_log() {
        let verdict = |code: i32, log: &str| {
            logged_verdict(&ExitCause::Exited(ExitStatus::from_raw(code << 8)), log).code
        };
        assert_eq!(verdict(0, "root: outcome 0\n"), 0);
        assert_eq!(verdict(0, "vm: root: outcome 0\nroot: outcome 1\nroot: outcome 81\n"), 81);
        assert_eq!(verdict(0, "kernel: PANIC on the CPU\nroot: outcome 0\n"), failure::INTERNAL);
        for log in ["", "vm: root: outcome 0\n", "root: outcome 900\n", "root: outcome x\n"] {
            assert_eq!(verdict(0, log), failure::INTERNAL, "{log}");
        }
        assert_eq!(verdict(1, "root: outcome 0\n"), failure::INTERNAL);
        assert_eq!(logged_verdict(&ExitCause::Timeout, "root: outcome 0\n").code, 124);
    }

    #[test]
    fn ends_from_outside() {
        assert_eq!(exit_verdict(&ExitCause::Timeout).code, 124);
        assert_eq!(exit_verdict(&ExitCause::Signal(15)).code, 143);
        assert_eq!(exit_verdict(&ExitCause::Signal(2)).code, 130);
    }

    #[test]
    fn paths_in_options() {
        assert_eq!(option_path(Path::new("/a,b/c")), "/a,,b/c");
        assert_eq!(option_path(Path::new("a:b.img")), "./a:b.img");
        check_text(Path::new("a:b.img")).unwrap();
        let failure = check_text(Path::new(OsStr::from_bytes(b"\xff.img"))).unwrap_err();
        assert_eq!(failure.code(), failure::USAGE);
    }
}
