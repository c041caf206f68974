//! Starts a built system in QEMU and connects the terminal to the guest's console.
//!
//! QEMU talks to pipes, never to the terminal itself: whatever ends this program, the terminal's
//! modes are restored here and QEMU dies with it (parent-death signal). QEMU runs in a process
//! group of its own, so signals from the terminal reach this program only.

use crate::attach::Bus;
use crate::check::Plan;
use crate::failure::{self, Failure};
use crate::image::Image;
use crate::interrupt::ENDING;
use crate::rootfs;
use crate::supervise::{self, AtEnd};
use crate::terminal::{Keys, Raw};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, read, write};
use rustix::process::Signal;
use signal_hook::low_level::pipe;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Added to an exit code by `root` before it writes it to `isa-debug-exit`, so that QEMU's own exit
/// codes 0 and 1 stay apart; QEMU makes `2 * value + 1` of what is written.
const REPORT_BASE: u8 = 0x10;
/// What Parador's kernel writes when it panics; the exit code that would give the same is never used.
const KERNEL_PANIC: u8 = 0x7f;
/// Lines of the kernel's log that are shown after a failure.
const SHOWN_LINES: usize = 20;
/// Bytes of QEMU's messages that are kept.
const KEPT_MESSAGES: usize = 16 << 10;

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

/// How a machine ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Exited(ExitStatus),
    Timeout,
    Signal(i32),
    /// The user pressed Ctrl-A X.
    Keys,
    /// Nobody reads the console any more.
    OutputClosed,
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
    let machine = Machine::start(command)?;
    let (end, messages) = machine.serve(options.timeout, &keys(&plan.console_clients()))?;
    let verdict = judge(&end);
    if verdict.show_log {
        show("QEMU's messages", &messages, &options.qemu.display().to_string());
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
    let text = match code {
        0 => "the guest powered off".to_owned(),
        1..=63 => format!("the guest ended with code {code}"),
        failure::GUEST_PANIC => "the guest's kernel panicked".to_owned(),
        failure::GUEST_FAULT => "the guest ended with a triple fault or unhandled fault".to_owned(),
        failure::WATCHDOG => "the guest's watchdog ended it".to_owned(),
        failure::GUEST_RESET => "the guest reset its machine".to_owned(),
        _ => format!("the system ended with code {code}"),
    };
    Verdict { code, text, show_log: code >= 64 && code != failure::GUEST_RESET }
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
        add(&["-device", "amd-iommu"]);
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

/// A running QEMU. Dropping it ends it.
struct Machine {
    child: Child,
    /// One pipe for each of [`ENDING`], readable when the signal came.
    signals: Vec<(i32, UnixStream)>,
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Fails if it has ended, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Machine {
    fn start(mut command: Command) -> Result<Self, Failure> {
        let mut signals = Vec::new();
        for signal in ENDING {
            let registered = UnixStream::pair().and_then(|(ours, theirs)| {
                pipe::register(signal, theirs)?;
                Ok(ours)
            });
            let ours = registered.map_err(|error| Failure::os("listen to signals", &error))?;
            signals.push((signal, ours));
        }
        let child = command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::program("QEMU", &error))?;
        Ok(Self { child, signals })
    }

    /// Carries bytes between terminal and machine until something ends. Returns QEMU's messages, too.
    fn serve(mut self, timeout: Option<Duration>, keys: &str) -> Result<(End, String), Failure> {
        let (Some(input), Some(output), Some(errors)) =
            (self.child.stdin.take(), self.child.stdout.take(), self.child.stderr.take())
        else {
            return Err(Failure::new(failure::INTERNAL, "QEMU has no pipes"));
        };
        set_nonblocking(input.as_fd())?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let raw = Raw::enter();
        if raw.is_some() {
            eprint!("parador: {}\r\n", keys.replace('\n', "\r\n"));
        }
        let mut traffic = Traffic {
            raw: raw.is_some(),
            keys: Keys::default(),
            input_open: true,
            pending: Vec::new(),
            messages: Vec::new(),
        };
        let end =
            traffic.carry(&self.signals, [input.as_fd(), output.as_fd(), errors.as_fd()], deadline);
        drop(raw);
        let end = match end? {
            Some(end) => end,
            None => {
                let status =
                    self.child.wait().map_err(|error| Failure::os("wait for QEMU", &error))?;
                End::Exited(status)
            }
        };
        Ok((end, String::from_utf8_lossy(&traffic.messages).into_owned()))
    }
}

fn set_nonblocking(pipe: BorrowedFd<'_>) -> Result<(), Failure> {
    fcntl_getfl(pipe)
        .and_then(|flags| fcntl_setfl(pipe, flags | OFlags::NONBLOCK))
        .map_err(|error| Failure::os("set up a pipe", &error.into()))
}

/// Bytes on their way.
struct Traffic {
    raw: bool,
    keys: Keys,
    input_open: bool,
    /// Keys that QEMU has not taken yet; while there are any, no more are read.
    pending: Vec<u8>,
    messages: Vec<u8>,
}

/// What is watched while a machine runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Signal(i32),
    Output,
    Errors,
    Keyboard,
    Input,
}

impl Traffic {
    /// `None`: QEMU closed its pipes, so it has ended.
    fn carry(
        &mut self,
        signals: &[(i32, UnixStream)],
        [input, output, errors]: [BorrowedFd<'_>; 3],
        deadline: Option<Instant>,
    ) -> Result<Option<End>, Failure> {
        let (mut output_open, mut errors_open) = (true, true);
        while output_open || errors_open {
            // A descriptor reports hang-ups even if nothing is wanted from it; so only those that
            // matter now are listed.
            let others = [
                (output_open, Source::Output, output, PollFlags::IN),
                (errors_open, Source::Errors, errors, PollFlags::IN),
                (
                    self.input_open && self.pending.is_empty(),
                    Source::Keyboard,
                    rustix::stdio::stdin(),
                    PollFlags::IN,
                ),
                (!self.pending.is_empty(), Source::Input, input, PollFlags::OUT),
            ];
            let signals = signals
                .iter()
                .map(|(signal, pipe)| (Source::Signal(*signal), pipe.as_fd(), PollFlags::IN));
            let others = others
                .into_iter()
                .filter(|other| other.0)
                .map(|(_, source, fd, flags)| (source, fd, flags));
            let (sources, mut fds): (Vec<Source>, Vec<PollFd<'_>>) = signals
                .chain(others)
                .map(|(source, fd, flags)| (source, PollFd::from_borrowed_fd(fd, flags)))
                .unzip();
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(Some(End::Timeout));
            }
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            match poll(&mut fds, left.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(Failure::os("wait for QEMU", &error.into())),
            }
            let ready = sources.into_iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
            for (source, _) in ready {
                match source {
                    Source::Signal(signal) => return Ok(Some(End::Signal(signal))),
                    Source::Output => match self.output(output)? {
                        Flow::Open => {}
                        Flow::Closed => output_open = false,
                        Flow::Ended(end) => return Ok(Some(end)),
                    },
                    Source::Errors => errors_open = self.errors(errors)?,
                    Source::Keyboard => {
                        if self.keyboard()? {
                            return Ok(Some(End::Keys));
                        }
                    }
                    Source::Input => self.input(input),
                }
            }
        }
        Ok(None)
    }

    /// From the machine to standard output.
    fn output(&mut self, from: BorrowedFd<'_>) -> Result<Flow, Failure> {
        let mut buffer = [0; 4096];
        let length = receive(from, &mut buffer)?;
        if length == 0 {
            return Ok(Flow::Closed);
        }
        let mut stdout = io::stdout().lock();
        match stdout.write_all(&buffer[..length]).and_then(|()| stdout.flush()) {
            Ok(()) => Ok(Flow::Open),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                Ok(Flow::Ended(End::OutputClosed))
            }
            Err(error) => Err(Failure::os("write to standard output", &error)),
        }
    }

    /// QEMU's messages are kept for the end, where they do not disturb the console.
    fn errors(&mut self, from: BorrowedFd<'_>) -> Result<bool, Failure> {
        let mut buffer = [0; 4096];
        let length = receive(from, &mut buffer)?;
        let room = KEPT_MESSAGES.saturating_sub(self.messages.len());
        self.messages.extend_from_slice(&buffer[..length.min(room)]);
        Ok(length != 0)
    }

    /// From standard input. `true`: the user ends the machine.
    fn keyboard(&mut self) -> Result<bool, Failure> {
        let mut buffer = [0; 4096];
        // A terminal that went away is the same as the end of a file.
        let length = receive(rustix::stdio::stdin(), &mut buffer).unwrap_or(0);
        self.input_open = length != 0;
        if self.raw {
            return Ok(self.keys.pass(&buffer[..length], &mut self.pending));
        }
        self.pending.extend_from_slice(&buffer[..length]);
        Ok(false)
    }

    /// To the machine, as much as it takes.
    fn input(&mut self, to: BorrowedFd<'_>) {
        match write(to, &self.pending) {
            Ok(taken) => drop(self.pending.drain(..taken)),
            Err(Errno::AGAIN | Errno::INTR) => {}
            // QEMU has ended, or closed its side: nothing will be taken any more.
            Err(_) => {
                self.pending.clear();
                self.input_open = false;
            }
        }
    }
}

/// What became of the machine's output.
enum Flow {
    Open,
    Closed,
    Ended(End),
}

/// Reads what is there; 0 at the end of the file.
fn receive(from: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<usize, Failure> {
    loop {
        match read(from, &mut *buffer) {
            Ok(length) => return Ok(length),
            Err(Errno::INTR) => {}
            Err(error) => return Err(Failure::os("read", &error.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
