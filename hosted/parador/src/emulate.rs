//! Starts a built system in QEMU and connects the terminal to the guest's console.

use crate::attach::Bus;
use crate::check::Plan;
use crate::console::Console;
use crate::failure::{self, Failure};
use crate::image::Image;
use crate::machine::{self, End, Machine};
use crate::rootfs;
use crate::supervise::{self, AtEnd};
use rustix::process::Signal;
use std::ffi::OsString;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Added to an exit code by `root` before it writes it to `isa-debug-exit`, so that QEMU's own exit
/// codes 0 and 1 stay apart; QEMU makes `2 * value + 1` of what is written.
const REPORT_BASE: u8 = 0x10;
/// What Parador's kernel writes when it panics; the exit code that would give the same is never used.
const KERNEL_PANIC: u8 = 0x7f;
/// Lines of the kernel's log that are shown after a failure.
const SHOWN_LINES: usize = 20;

/// QEMU lists every feature of the real processor that it lacks.
const NOISE: &str = "warning: TCG doesn't support requested feature";

/// How to emulate.
#[derive(Debug)]
pub struct Options {
    /// QEMU's program.
    pub qemu: PathBuf,
    /// End after this time.
    pub timeout: Option<Duration>,
    /// Count instructions instead of time.
    pub icount: bool,
    /// File for the kernel's log.
    pub log: PathBuf,
    /// CD-ROM image to boot from instead of the kernel itself.
    pub iso: Option<PathBuf>,
    /// Further arguments for QEMU.
    pub extra: Vec<OsString>,
}

/// What an end means.
#[derive(Debug, PartialEq, Eq)]
struct Verdict {
    code: u8,
    text: String,
    /// The kernel's log may tell more.
    show_log: bool,
}

/// Runs the machine to its end and returns the exit code.
pub fn run(plan: &Plan, image: &Image, options: &Options) -> Result<u8, Failure> {
    for disk in &plan.disks {
        fs::File::open(&disk.path).map_err(|error| {
            let help = rootfs::advice(&disk.path)
                .unwrap_or_else(|| "make a disk with `truncate -s 1G FILE`".to_owned());
            Failure::file("open", &disk.path, &error)
                .help(help + "; paths start at the description's folder")
        })?;
    }
    let mut command = supervise::command(options.qemu.as_os_str(), AtEnd::Kill)
        .map_err(|failure| failure.help("install QEMU: apt-get install qemu-system-x86"))?;
    command.args(arguments(plan, image, options));
    // QEMU appends nothing to an old log, but one that it never gets to open would mislead.
    fs::write(&options.log, "").map_err(|error| Failure::file("write", &options.log, &error))?;
    let start = Instant::now();
    let machine = Machine::start("QEMU", command)?;
    let limit = machine::deadline(options.timeout);
    let (end, messages) =
        machine.serve(limit, &keys(&plan.console_clients()), &mut Console::Stdio, None, None)?;
    let verdict = judge(&end);
    if verdict.show_log {
        show("QEMU's messages", &messages.text(), &options.qemu.display().to_string());
        let log = fs::read(&options.log).unwrap_or_default();
        show(
            "end of the kernel's log",
            &String::from_utf8_lossy(&log),
            &options.log.display().to_string(),
        );
    }
    let seconds = start.elapsed().as_secs_f64();
    eprintln!("parador: {} (exit code {}, {seconds:.1} s)", verdict.text, verdict.code);
    Ok(verdict.code)
}

/// What the keys do, where the console is a terminal; `clients` share it.
fn keys(clients: &[&str]) -> String {
    if clients.is_empty() {
        return "Ctrl-A X ends the machine; all other keys go to the guest".to_owned();
    }
    let digits = (1..=9).zip(clients).map(|(digit, name)| format!(", {digit} {name}"));
    format!(
        "several share this terminal. Ctrl-] and a digit choose whom you see and type to: 0 log{}\n\
         parador: Ctrl-] ? explains the rest; Ctrl-A X ends the machine",
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
    eprintln!("parador: {what} ({origin}):");
    for line in &lines[lines.len().saturating_sub(SHOWN_LINES)..] {
        eprintln!("  | {}", line.trim_end());
    }
}

fn judge(end: &End) -> Verdict {
    let verdict = |code: u8, text: &str| Verdict { code, text: text.to_owned(), show_log: false };
    let failed = |text: String| Verdict { code: failure::INTERNAL, text, show_log: true };
    match end {
        End::Timeout => {
            Verdict { show_log: true, ..verdict(failure::TIMEOUT, "the time limit was reached") }
        }
        End::Signal(signal) => verdict(128 + *signal as u8, &format!("ended by signal {signal}")),
        End::Keys => verdict(0, "ended from the keyboard"),
        End::OutputClosed => verdict(128 + Signal::PIPE.as_raw() as u8, "nobody reads the console"),
        End::Request | End::Reset => verdict(0, "ended by request"),
        End::Other(name, status) => failed(format!("the process of {name} has ended ({status})")),
        End::Exited(status) => match (status.code(), status.signal()) {
            (Some(0), _) => {
                failed("the machine ended without a report: it was reset or switched off".into())
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

/// The meaning of a value written to `isa-debug-exit`.
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

fn arguments(plan: &Plan, image: &Image, options: &Options) -> Vec<OsString> {
    let cpus = plan.cpus.unwrap_or(1);
    let megabytes = plan.machine_memory(image.bundle_length).div_ceil(1 << 20);
    let mut arguments: Vec<OsString> = Vec::new();
    let mut add = |words: &[&str]| arguments.extend(words.iter().map(OsString::from));
    add(&["-M", "q35", "-cpu", "EPYC,+svm,+npt", "-accel", "tcg"]);
    add(&["-smp", &cpus.to_string(), "-m", &megabytes.to_string()]);
    add(&["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    if options.icount {
        add(&["-icount", "shift=0,sleep=off", "-seed", "1"]);
        add(&["-rtc", "base=2024-01-01T00:00:00,clock=vm"]);
    }
    // `signal=off`: Ctrl-C is a byte like any other.
    add(&["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"]);
    let log = option_path(&options.log);
    add(&["-chardev", &format!("file,id=log,path={log}"), "-serial", "chardev:log"]);
    add(&["-device", "isa-debug-exit,iobase=0xf4,iosize=4"]);
    // Without these virtio devices pass the IOMMU by.
    let translated = if plan.iommu { ",iommu_platform=on,disable-legacy=on" } else { "" };
    if plan.iommu {
        add(&["-device", "amd-iommu,intremap=on"]);
    }
    for (number, disk) in plan.disks.iter().enumerate() {
        let on_off = |on| if on { "on" } else { "off" };
        let drive = format!(
            "file={},format={},if=none,id=disk{number},readonly={},snapshot={}",
            option_path(&disk.path),
            disk.format,
            on_off(disk.read_only),
            on_off(disk.snapshot),
        );
        let port = plan.disks[..number].iter().filter(|other| other.bus == disk.bus).count();
        let device = match disk.bus {
            Bus::Virtio => format!("virtio-blk-pci,drive=disk{number}{translated}"),
            Bus::Ahci => format!("ide-hd,drive=disk{number},bus=ide.{port}"),
        };
        add(&["-drive", &drive, "-device", &device]);
    }
    for (number, net) in plan.nets.iter().enumerate() {
        let forwards: String =
            net.forwards.iter().map(|forward| format!(",hostfwd={forward}")).collect();
        add(&["-netdev", &format!("user,id=net{number}{forwards}")]);
        add(&["-device", &format!("virtio-net-pci,netdev=net{number},romfile={translated}")]);
    }
    match &options.iso {
        // GRUB wants a display to write its menu to.
        Some(iso) => {
            let drive = format!("file={},format=raw,media=cdrom,readonly=on", option_path(iso));
            add(&["-drive", &drive, "-boot", "d", "-vga", "std"]);
        }
        None => {
            add(&["-append", &plan.kernel_command_line()]);
            arguments.extend(["-kernel".into(), image.kernel.clone().into_os_string()]);
            arguments.extend(["-initrd".into(), image.bundle.clone().into_os_string()]);
        }
    }
    arguments.extend(options.extra.iter().cloned());
    arguments
}

/// A path as a value in one of QEMU's comma-separated options.
fn option_path(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::ExitStatus;

    fn exited(code: i32) -> Verdict {
        judge(&End::Exited(ExitStatus::from_raw(code << 8)))
    }

    /// QEMU's exit status for an exit code written by `root`.
    fn status(code: i32) -> i32 {
        2 * (code + i32::from(REPORT_BASE)) + 1
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
        let killed = judge(&End::Exited(ExitStatus::from_raw(9)));
        assert_eq!(killed.code, 137);
    }

    #[test]
    fn ends_from_outside() {
        assert_eq!(judge(&End::Timeout).code, 124);
        assert_eq!(judge(&End::Signal(15)).code, 143);
        assert_eq!(judge(&End::Signal(2)).code, 130);
    }

    #[test]
    fn commas_in_paths() {
        assert_eq!(option_path(Path::new("a,b/c")), "a,,b/c");
    }
}
