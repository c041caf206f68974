//! Sockets between a guest and programs of this host.

use super::net::{noise, until};
use super::{Rig, ended, start};
use crate::system::artifacts;
use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Time limit for the peer.
const PATIENCE: Duration = Duration::from_secs(100);
/// Connections at once.
const MANY: usize = 6;

/// Connects to a port of the guest; `None` if no process listens.
fn connect(path: &Path, port: u32) -> Result<Option<BufReader<UnixStream>>> {
    let mut stream = match UnixStream::connect(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        stream => stream.context("cannot connect")?,
    };
    stream.set_read_timeout(Some(PATIENCE))?;
    writeln!(stream, "CONNECT {port}").context("cannot say a port")?;
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line).context("no answer")?;
    match line.strip_prefix("OK ").and_then(|port| port.trim_end().parse::<u32>().ok()) {
        Some(_) => Ok(Some(stream)),
        None if line.is_empty() => Ok(None),
        None => bail!("the answer is `{line}`"),
    }
}

/// Sends data, shuts its direction down and receives the echo; more data is in flight than the
/// buffers hold.
fn round(stream: BufReader<UnixStream>, data: Vec<u8>) -> Result<()> {
    let mut sender = stream.get_ref().try_clone().context("no descriptor")?;
    let wanted = data.clone();
    let sending = thread::spawn(move || -> Result<()> {
        sender.write_all(&data).context("cannot send")?;
        sender.shutdown(Shutdown::Write).context("cannot end a direction")
    });
    let mut back = Vec::new();
    let mut stream = stream;
    stream.read_to_end(&mut back).context("no echo arrived")?;
    sending.join().map_err(|_| anyhow::anyhow!("the sender panicked"))??;
    ensure!(back == wanted, "the echo has {} bytes, or other contents", back.len());
    Ok(())
}

/// The host's side of the guest's script.
fn talk(path: &Path, echo: &UnixListener, rude: &UnixListener) -> Result<()> {
    let accept = |listener: &UnixListener| {
        listener.set_nonblocking(true).context("cannot listen")?;
        let stream = until("connection of the guest", || match listener.accept() {
            Ok((stream, _)) => Ok(Some(stream)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error).context("cannot accept a connection"),
        })?;
        stream.set_nonblocking(false).context("cannot wait")?;
        stream.set_read_timeout(Some(PATIENCE)).context("cannot wait")?;
        Ok::<_, anyhow::Error>(stream)
    };
    // The guest connects to an echo server, and to a server that closes after the first bytes.
    let mut stream = accept(echo)?;
    let mut sink = stream.try_clone().context("no descriptor")?;
    std::io::copy(&mut stream, &mut sink).context("the guest's data stops")?;
    drop((stream, sink));
    let mut stream = accept(rude)?;
    stream.read_exact(&mut [0; 1000]).context("the guest sends nothing")?;
    drop(stream);
    // The host opens many connections, one that it closes early, and one to a port without a
    // listener.
    let first = until("listener in the guest", || connect(path, 7))?;
    let others = (1..MANY).map(|_| connect(path, 7)?.context("no further connection"));
    let all: Vec<_> = std::iter::once(Ok(first)).chain(others).collect::<Result<_>>()?;
    let rounds = all.into_iter().enumerate().map(|(number, stream)| {
        let mut data = noise();
        data.rotate_left(1000 * number);
        thread::spawn(move || round(stream, data))
    });
    let rounds: Vec<_> = rounds.collect();
    let mut gone = connect(path, 7)?.context("no further connection")?;
    gone.get_mut().write_all(&vec![1; 200_000]).context("cannot send")?;
    gone.read_exact(&mut [0; 10]).context("no echo arrived")?;
    drop(gone);
    for round in rounds {
        round.join().map_err(|_| anyhow::anyhow!("a connection's thread panicked"))??;
    }
    ensure!(connect(path, 8)?.is_none(), "a connection to a port without a listener succeeds");
    // All of the first listener's are over; the second one's is what the guest waits for.
    let last = until("last listener in the guest", || connect(path, 9))?;
    round(last, b"the end".to_vec())
}

/// Programs of guest and host connect in both directions, with more than is kept on the way,
/// several at once.
pub fn both_ways() -> Result<()> {
    let rig = Rig::new()?;
    let path = rig.path("vsock");
    let echo = UnixListener::bind(rig.path("vsock_50")).context("cannot listen")?;
    let rude = UnixListener::bind(rig.path("vsock_51")).context("cannot listen")?;
    // A stale socket.
    drop(UnixListener::bind(&path).context("cannot listen")?);
    let script = format!(
        "v=/mnt/linux-vsock; $v connect 99 </dev/null || echo no listener
        dd if=/dev/urandom of=/tmp/data bs=1M count=8 2>/dev/null
        $v connect 50 </tmp/data >/tmp/back; cmp /tmp/data /tmp/back; echo echoed
        $v flood 51 || echo rudely
        $v listen 7 {}; $v listen 9 1\n",
        MANY + 1
    );
    for cpus in ["1", "2"] {
        let program = artifacts().join("linux-vsock");
        let mut machine = rig.script(&script, &[&program])?;
        let child = start(machine.args(["-c", cpus, "--vsock", "cid=42,path=vsock"]))?;
        let host = talk(&path, &echo, &rude);
        if host.is_ok() {
            let mode = path.metadata().map(|file| file.permissions().mode() & 0o777);
            ensure!(mode.ok().is_none_or(|mode| mode == 0o600), "others may connect");
        }
        let ended = match &host {
            Ok(()) => ended(child)?,
            Err(_) => {
                super::succeed(std::process::Command::new("kill").arg(child.id().to_string()))?;
                ended(child)?
            }
        };
        // What the host has seen comes first: its failure is why the machine was ended.
        host.with_context(|| format!("{}\n{}", ended.console, ended.messages))?;
        let texts = ["no listener", "echoed", "rudely", "7 connections", "1 connections, 0 lost"];
        ended.well(0, &texts)?;
        ensure!(!path.exists(), "the socket has stayed");
    }
    Ok(())
}

/// Invalid options are refused before the VM starts.
pub fn refusals() -> Result<()> {
    let rig = Rig::new()?;
    let _taken = UnixListener::bind(rig.path("taken")).context("cannot listen")?;
    for (vsock, code, text) in [
        ("cid=2,path=vsock", 65, "invalid guest CID"),
        ("cid=3", 65, "`path` is missing"),
        ("cid=3,path=taken", 71, "in use by another process"),
        ("cid=3,path=none/vsock", 66, "none/vsock"),
    ] {
        super::end(rig.run().args(["--vsock", vsock]), "")?.has(code, &[text])?;
    }
    Ok(())
}
