//! Observation of a running VM: messages as JSON, serial line back ends, symbol maps for profilers.

use super::{PROMPT, Rig, children, end, ended, start};
use crate::system::parador;
use anyhow::{Context, Result, bail, ensure};
use std::collections::HashMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

/// Time limit for an expected output.
const PATIENCE: Duration = Duration::from_secs(30);

/// Every message is an object with time, level, source and text, at the moment when it is said; the
/// console is not among them.
pub fn json() -> Result<()> {
    let rig = Rig::new()?;
    let mut run = rig.run();
    run.args(["--log", "info", "--log-format", "json", "-p", "parador.run=\"echo said; exit 3\""]);
    let ended = end(&mut run, "")?.well(3, &["said"])?;
    let mut sources = Vec::new();
    for line in ended.messages.lines() {
        let value: serde_json::Value =
            serde_json::from_str(line).with_context(|| format!("no JSON: {line}"))?;
        let text = |key: &str| value[key].as_str().unwrap_or_default().to_owned();
        ensure!(text("time").ends_with('Z') && !text("message").is_empty(), "{line}");
        ensure!(["error", "warn", "info"].contains(&&*text("level")), "{line}");
        sources.push(text("source"));
    }
    ensure!(sources.iter().any(|source| source == "parador-wedge"), "{}", ended.messages);
    let last = ended.messages.lines().last().unwrap_or_default();
    ensure!(last.contains("\"code\":3,\"reason\":\"guest-code\""), "{last}");
    let mut missing = rig.run();
    missing.args(["--log-format", "json", "-d", "nowhere"]);
    end(&mut missing, "")?.has(66, &["\"reason\":\"missing-file\""])?;
    Ok(())
}

/// The serial line on a socket, in a file, on a terminal of its own, nowhere.
pub fn serial() -> Result<()> {
    let rig = Rig::new()?;
    let run = "parador.run=\"sleep 1; echo said\"";
    let ended = end(rig.run().args(["--serial", "file=out", "-p", run]), "")?.well(0, &[])?;
    let printed = fs::read_to_string(rig.path("out")).context("no output")?;
    ensure!(printed.contains("\nsaid") && ended.console.is_empty(), "{printed}\n{ended:?}");
    let ended = end(rig.run().args(["--serial", "null", "-p", run]), "")?.well(0, &[])?;
    ensure!(ended.console.is_empty(), "{ended:?}");

    let mut child = start(rig.run().args(["--serial", "unix=serial"]))?;
    let path = rig.path("serial");
    let mut client = wait(|| UnixStream::connect(&path).ok())?;
    client.write_all(b"echo $((6*7)) is; poweroff\n").context("cannot write")?;
    let mut printed = String::new();
    client.read_to_string(&mut printed).context("cannot read")?;
    ensure!(printed.contains("42 is"), "{printed}");
    ensure!(child.wait().context("cannot wait for parador")?.success() && !path.exists());

    let mut child = start(rig.run().args(["--serial", "pty"]))?;
    let mut messages = child.stderr.take().context("no messages")?;
    let mut said = String::new();
    let name = wait(|| {
        let mut bytes = [0; 256];
        let count = messages.read(&mut bytes).ok()?;
        said.push_str(&String::from_utf8_lossy(&bytes[..count]));
        let (_, rest) = said.split_once("the serial line is ")?;
        rest.split_once('\n').map(|(name, _)| name.to_owned())
    })?;
    let terminal = fs::OpenOptions::new().read(true).write(true).open(&name);
    let mut terminal = terminal.with_context(|| format!("no {name}"))?;
    terminal.write_all(b"machine-exit 5\n").context("cannot write")?;
    let status = child.wait().context("cannot wait for parador")?;
    ensure!(status.code() == Some(5), "{status}");
    Ok(())
}

/// Reads until there is this text.
fn read_until(from: &mut impl Read, text: &str) -> Result<String> {
    let (mut all, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        match from.read(&mut buffer).context("cannot read")? {
            0 => bail!("`{text}` did not appear:\n{}", String::from_utf8_lossy(&all)),
            count => all.extend(&buffer[..count]),
        }
        if String::from_utf8_lossy(&all).contains(text) {
            return Ok(String::from_utf8_lossy(&all).into_owned());
        }
    }
}

/// A virtio console in the place of the serial line, and beside it: both ways, with more than is
/// kept on the way.
pub fn console() -> Result<()> {
    let rig = Rig::new()?;
    let mut child = start(rig.run().args(["--console", "stdio"]))?;
    let mut input = child.stdin.take().context("no input")?;
    let mut output = child.stdout.take().context("no output")?;
    let mut printed = read_until(&mut output, PROMPT)?;
    ensure!(printed.contains("Run /init"), "{printed}");
    input.write_all(b"tty; seq 30000; sleep 1; machine-exit 4\n").context("cannot write")?;
    output.read_to_string(&mut printed).context("cannot read")?;
    let status = child.wait().context("cannot wait for parador")?;
    ensure!(status.code() == Some(4) && printed.contains("\n/dev/hvc0\r"), "{status}:\n{printed}");
    let numbers = printed.lines().filter_map(|line| line.parse::<u32>().ok());
    ensure!(numbers.eq(1..=30000), "numbers are missing:\n{printed}");

    // Two virtual CPUs; the kernel's messages go to both, the shell has one of them.
    let mut machine = rig.run();
    machine.args(["-c", "2", "--console", "unix=hvc", "--serial", "file=out"]);
    let mut child = start(&mut machine)?;
    let path = rig.path("hvc");
    let mut client = wait(|| UnixStream::connect(&path).ok())?;
    read_until(&mut client, PROMPT)?;
    client.write_all(b"echo $((6*7)) is; echo to the line >/dev/ttyS0; sleep 1; poweroff\n")?;
    let mut printed = String::new();
    client.read_to_string(&mut printed).context("cannot read")?;
    ensure!(printed.contains("42 is") && !printed.contains("\nto the line"), "{printed}");
    ensure!(child.wait().context("cannot wait for parador")?.success() && !path.exists());
    let line = fs::read_to_string(rig.path("out")).context("no output")?;
    let has = |text: &str| line.contains(text);
    ensure!(has("Linux version") && has("to the line") && !has("42 is"), "{line}");

    let both = ["--console", "stdio", "--serial", "stdio"];
    end(rig.run().args(both), "")?.has(65, &["have the same target"])?;
    Ok(())
}

/// Profilers find the functions of the guest's kernel for each of its processes, as long as it
/// runs.
pub fn perf_map() -> Result<()> {
    let rig = Rig::new()?;
    let mut child = start(rig.run().arg("--perf-map"))?;
    let system_map = fs::read_to_string(rig.kernel().with_file_name("System.map"));
    let system_map = system_map.context("the kernel has no list of symbols")?;
    let symbol = system_map.lines().find_map(|line| line.strip_suffix(" T do_syscall_64"));
    let linked = u64::from_str_radix(symbol.context("no do_syscall_64")?, 16)?;
    let offset = linked.wrapping_sub(0xffff_ffff_8000_0000);
    // Where `proto::hosted::layout::IMAGE` is.
    let wanted = format!("{:x} ", offset + 0x4000_0000);
    let path = |process: u32| PathBuf::from(format!("/tmp/perf-{process}.map"));
    let has_map = |process: &u32| {
        let own = fs::symlink_metadata(path(*process)).ok()?;
        let text = fs::read_to_string(path(*process)).ok()?;
        let line = text.lines().find(|line| line.ends_with(" do_syscall_64"))?;
        (line.starts_with(&wanted) && own.mode() & 0o777 == 0o600).then_some(())
    };
    let all = children(&child)?;
    // `parador` and the device process have none.
    for process in &all[2..] {
        wait(|| has_map(process)).with_context(|| format!("process {process}"))?;
    }
    let mut input = child.stdin.take().context("no input")?;
    input.write_all(b"poweroff\n").context("cannot write")?;
    child.wait_with_output().context("cannot wait for parador")?;
    let left: Vec<_> = all.iter().filter(|process| path(**process).exists()).collect();
    ensure!(left.is_empty(), "maps of {left:?} have stayed");

    // What `perf report` reads: offsets in guest memory.
    let mut symbols = parador(rig.folder());
    symbols.args(["kernel", "symbols"]).arg(rig.kernel()).arg("symbols");
    ensure!(symbols.status().context("cannot start parador")?.success(), "no symbols");
    let file = rig.folder().join("symbols/memfd:parador-guest (deleted)");
    let names = Command::new("nm").arg(file).output().context("cannot start nm")?.stdout;
    let wanted = format!("{offset:016x} T do_syscall_64");
    let names = String::from_utf8_lossy(&names);
    ensure!(names.lines().any(|line| line == wanted), "no {wanted}");
    Ok(())
}

/// Waits until there is something.
pub(super) fn wait<T>(mut what: impl FnMut() -> Option<T>) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = what() {
            return Ok(found);
        }
        ensure!(Instant::now() < deadline, "it has not appeared");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The device process of an idle VM sleeps, and notices at once that a process of the guest has
/// been killed.
pub fn idle() -> Result<()> {
    const TIME: Duration = Duration::from_secs(5);
    // Once a second would be 5.
    const MOST: u64 = 2;
    let rig = Rig::new()?;
    let child = start(&mut rig.run())?;
    let all = children(&child)?;
    // The guest boots, and returns free memory.
    let count = || -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", all[1])).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line?.trim().parse().ok()
    };
    let is_quiet = || {
        let before = count()?;
        thread::sleep(TIME);
        (count()? - before <= MOST).then_some(())
    };
    wait(is_quiet).context("the device process of an idle VM wakes")?;
    let begun = Instant::now();
    let mut kill = Command::new("kill");
    kill.args(["-KILL", &all[2].to_string()]);
    ensure!(kill.status().context("cannot start kill")?.success(), "cannot kill {}", all[2]);
    let ended = ended(child)?;
    let time = begun.elapsed();
    ensure!(ended.code != 0 && time < PATIENCE, "code {} after {time:?}", ended.code);
    Ok(())
}

/// The guest's steal time shows the CPU time that two VMs on one CPU take from each other, and none
/// if there is one VM.
pub fn steal() -> Result<()> {
    const LOOP: &str = "timeout 6 sh -c 'while :; do :; done'; grep '^cpu ' /proc/stat; poweroff\n";
    let rig = Rig::new()?;
    let status = fs::read_to_string("/proc/self/status").context("no status")?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:\t"));
    let cpu = allowed.and_then(|list| list.split([',', '-']).next()).context("no CPU")?;
    for count in [1, 2] {
        let machine = || -> Result<Waits> {
            let run = rig.run();
            let mut command = Command::new("taskset");
            command.args(["-c", cpu]).arg(run.get_program()).args(run.get_args());
            command.current_dir(rig.folder());
            command.envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
            let mut child = start(&mut command)?;
            let mut input = child.stdin.take().context("no input")?;
            input.write_all(LOOP.as_bytes()).context("cannot write")?;
            Waits::of(child)
        };
        let mut machines = (0..count).map(|_| machine()).collect::<Result<Vec<_>>>()?;
        let mut runs = true;
        while runs {
            thread::sleep(Duration::from_millis(20));
            runs = false;
            for machine in &mut machines {
                runs |= machine.look()?;
            }
        }
        for machine in machines {
            let waited = machine.seconds();
            let ended = ended(machine.child)?.well(0, &[])?;
            let line = ended.console.lines().find_map(|line| line.strip_prefix("cpu  "));
            // In hundredths of a second: proc_stat(5).
            let steal = line.and_then(|line| line.split(' ').nth(7)?.parse::<f64>().ok());
            let steal = steal.context("no stolen time")? / 100.0;
            ensure!(count == 1 || waited > 1.0, "two machines have waited {waited} s only");
            ensure!(steal > waited / 2.0 - 0.5, "{count}: {steal} s of {waited} s reported");
            ensure!(
                steal < waited * 1.3 + 0.5,
                "{count}: {steal} s reported instead of {waited} s"
            );
        }
    }
    Ok(())
}

/// Returns the time that the processes of a VM have waited for a host CPU.
struct Waits {
    child: Child,
    device: u32,
    each: HashMap<String, u64>,
}

impl Waits {
    fn of(child: Child) -> Result<Self> {
        let device = children(&child)?[1];
        Ok(Self { child, device, each: HashMap::new() })
    }

    /// Returns true while the process runs.
    fn look(&mut self) -> Result<bool> {
        let device = self.device;
        let all = fs::read_to_string(format!("/proc/{device}/task/{device}/children"));
        for process in all.unwrap_or_default().split_whitespace() {
            // Time run, time waited, in nanoseconds (Documentation/scheduler/sched-stats.rst in
            // Linux).
            let times = fs::read_to_string(format!("/proc/{process}/schedstat"));
            let times = times.unwrap_or_default();
            if let Some(waited) = times.split(' ').nth(1).and_then(|time| time.parse().ok()) {
                self.each.insert(process.to_owned(), waited);
            }
        }
        Ok(self.child.try_wait().context("cannot wait for parador")?.is_none())
    }

    fn seconds(&self) -> f64 {
        self.each.values().sum::<u64>() as f64 / 1e9
    }
}
