//! What users see of a machine that runs: messages as JSON, its serial line elsewhere, maps for profilers.

use super::{Rig, children, end, start};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long something may take to appear.
const PATIENCE: Duration = Duration::from_secs(30);

/// Every message is an object with time, level, source and text, at the moment when it is said; the console is not among them.
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

/// Profilers find the functions of the guest's kernel for each of its processes, as long as it runs.
pub fn perf_map() -> Result<()> {
    let rig = Rig::new()?;
    let mut child = start(rig.run().arg("--perf-map"))?;
    let system_map = fs::read_to_string(rig.kernel().with_file_name("System.map"));
    let system_map = system_map.context("the kernel has no list of symbols")?;
    let symbol = system_map.lines().find_map(|line| line.strip_suffix(" T do_syscall_64"));
    let linked = u64::from_str_radix(symbol.context("no do_syscall_64")?, 16)?;
    // Where `proto::wedge::layout::IMAGE` is.
    let wanted = format!("{:x} ", linked.wrapping_sub(0xffff_ffff_8000_0000) + 0x4000_0000);
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
