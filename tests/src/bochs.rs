//! Systems on Bochs, a second emulator of SVM: unlike QEMU's, its `ryzen` saves the address of the
//! next instruction (nRIP).
//!
//! Bochs has no exit-code device and keeps running after the system has ended: the last line of the
//! log has the code, and the test kills the process. docs/CAVEATS.md lists the differences between
//! its processors and real ones.

use crate::system::{Running, described, follow_log, parador};
use crate::transcript::Transcript;
use anyhow::{Context, Result, bail, ensure};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Time in which Bochs connects its serial line.
const START: Duration = Duration::from_secs(30);
/// Time that a micro-guest may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(20);
/// Text before the exit code in root's last log line on a machine that stays on.
const END: &str = "the system has ended with code ";
/// Prefix of a kernel panic in the log.
const PANIC: &str = "kernel: PANIC";
const IMAGE: &str = "system.iso";
const LOG: &str = "log";

/// A processor with SVM, as Bochs calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// `ryzen`: saves the address of the next instruction.
    Ryzen,
    /// `phenom_8650_toliman`: does not, and has 64 ASIDs.
    Phenom,
    /// `turion64_tyler`: has no nested paging.
    Turion,
}

impl Model {
    /// Bochs' name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ryzen => "ryzen",
            Self::Phenom => "phenom_8650_toliman",
            Self::Turion => "turion64_tyler",
        }
    }
}

/// Configuration of a machine whose first serial line is a connection to this port of the host, and
/// the second one the log. Instructions are time: 50 million of them are a second.
fn configuration(model: Model, port: u16) -> String {
    let model = model.name();
    format!(
        "plugin_ctrl: serial=1, unmapped=1, biosdev=1, speaker=0
config_interface: textconfig
display_library: rfb, options=\"timeout=0\"
memory: guest=512, host=512
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
cpu: model={model}, count=1, ips=50000000, reset_on_triple_fault=0, ignore_bad_msrs=1
ata0-master: type=cdrom, path={IMAGE}, status=inserted
boot: cdrom
com1: enabled=1, mode=socket-client, dev=localhost:{port}
com2: enabled=1, mode=file, dev={LOG}
clock: sync=none, time0=946681200
log: /dev/null
panic: action=fatal
error: action=ignore
info: action=ignore
debug: action=ignore
"
    )
}

/// Builds and starts the system that `description` (TOML) says, like [`Running::start`].
pub fn start(description: &str, model: Model) -> Result<Running> {
    let folder = described(description)?;
    build(folder.path())?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen")?;
    listener.set_nonblocking(true).context("cannot listen")?;
    let port = listener.local_addr().context("a listener has no address")?.port();
    fs::write(folder.path().join("bochs"), configuration(model, port))
        .context("cannot write the configuration of Bochs")?;
    let log = folder.path().join(LOG);
    File::create(&log).context("cannot make the log")?;
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "bochs-bin", "-q", "-f", "bochs"]);
    command.current_dir(folder.path()).stdin(Stdio::piped());
    let mut child = command
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start Bochs through setpriv")?;
    let pipes = child.stdin.take().zip(child.stderr.take());
    let (mut debugger, errors) = pipes.context("Bochs has no pipes")?;
    let log_ended = Arc::default();
    let mut running = Running {
        child,
        input: Box::new(std::io::empty()),
        stays_on: true,
        folder,
        console: Transcript::follow("console", std::io::empty()),
        log: follow_log(&log, &log_ended)?,
        log_ended,
        messages: Transcript::follow("messages of Bochs", errors),
    };
    // Debian's Bochs has a debugger, which waits for this command.
    debugger.write_all(b"c\n").context("cannot start the machine")?;
    let console = connection(&listener, &mut running)
        .with_context(|| format!("\n{}", running.messages.tail()))?;
    let input = console.try_clone().context("cannot copy the console's descriptor")?;
    running.console = Transcript::follow("console", console);
    running.input = Box::new(input);
    Ok(running)
}

/// Makes the CD-ROM image of the description in a folder.
fn build(folder: &Path) -> Result<()> {
    let mut command = parador(folder);
    command.args(["system", "build", "system.toml", "--output", "image", "--iso", IMAGE]);
    let output = command.output().context("cannot start parador through setpriv")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cannot build the system:\n{errors}");
    Ok(())
}

/// The machine's first serial line.
fn connection(listener: &TcpListener, running: &mut Running) -> Result<TcpStream> {
    let deadline = Instant::now() + START;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).context("cannot wait for the console")?;
                return Ok(stream);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("cannot accept the console"),
        }
        ensure!(!running.has_ended()?, "Bochs has ended by itself");
        ensure!(Instant::now() < deadline, "Bochs does not connect its serial line");
        sleep(PAUSE);
    }
}

/// The exit code in a log; `None` if the system has not ended.
pub(crate) fn code(log: &str) -> Result<Option<i32>> {
    if let Some(panic) = log.lines().find(|line| line.starts_with(PANIC)) {
        bail!("Parador's kernel panicked: {panic}");
    }
    let Some((_, rest)) = log.split_once(END) else { return Ok(None) };
    // The line may not be there in full yet.
    let Some((code, _)) = rest.split_once(':') else { return Ok(None) };
    code.parse().map(Some).with_context(|| format!("`{code}` is no exit code"))
}

/// Checks that nRIP saving is used. The guest of `exits` prints the instructions per exit. On a
/// processor that saves the next instruction's address a `CPUID` exit costs less, because the VMM
/// does not decode the instruction; all other costs are equal.
pub fn next_instruction(exits: &str) -> Result<()> {
    /// Least difference; it was 78 when measured.
    const LOOK: f64 = 40.0;
    let figures = |model: Model, saves| {
        let mut running = start(exits, model)?;
        let code = running.wait(Instant::now() + LIMIT)?;
        let (console, log) = (running.console.text(), running.log.text());
        ensure!(code == 0, "{}: code {code}\n{}", model.name(), running.transcripts());
        ensure!(log.contains(" nrip-save ") == saves, "{}: {log}", model.name());
        anyhow::Ok((figure(&console, "VB cpuid ")?, figure(&console, "VB pio ")?))
    };
    let (saved, port) = figures(Model::Ryzen, true)?;
    let (looked, same_port) = figures(Model::Phenom, false)?;
    ensure!((port - same_port).abs() < LOOK, "port accesses: {port} and {same_port} ns");
    ensure!(saved + LOOK < looked, "CPUID: {saved} and {looked} ns");
    Ok(())
}

/// The number behind a name on a console.
fn figure(console: &str, name: &str) -> Result<f64> {
    let rest = console.split_once(name).with_context(|| format!("no `{name}`:\n{console}"))?.1;
    let number = rest.split_whitespace().next().unwrap_or_default();
    number.parse().with_context(|| format!("`{number}` is no number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_in_logs() {
        let end = format!("root: outcome 83\nroot: {END}83: the machine");
        assert_eq!(code(&end).unwrap(), Some(83));
        assert_eq!(code(&format!("root: {END}8")).unwrap(), None);
        assert_eq!(code("root: vm guest started\n").unwrap(), None);
        let panic = code(&format!("{PANIC} on the CPU with APIC id 0\n")).unwrap_err();
        assert!(panic.to_string().contains("APIC id 0"), "{panic}");
    }
}
