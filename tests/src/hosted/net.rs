//! Networks of machines that are processes of this host.

use super::{Ended, GONE, Rig, end, is_alive, start, succeed};
use crate::system::{artifacts, target};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes that go each way.
const DATA: usize = 8 << 20;
/// Time limit for the peer.
const PATIENCE: Duration = Duration::from_secs(100);
/// Time limit for the guest's answer at a forwarded port.
const ANSWER: Duration = Duration::from_secs(5);
/// Interval between attempts.
const TICK: Duration = Duration::from_millis(50);
/// Addresses of the guest's network card by DHCP; the router's is in a file then.
const CONFIGURE: &str = "ifconfig eth0 up; udhcpc -i eth0 -n -q
    ip route | sed -n 's/^default via \\([^ ]*\\).*/\\1/p' >/tmp/router";
// Of busybox, `nc` sends what it is given, then ends its own direction, and is done when the other
// direction ends. Who only takes must not end its direction first, and has a pipe that nothing
// comes through.

/// The guest ends when its link goes down.
const UNTIL_DOWN: &str =
    "ifconfig eth0 up; sleep 0.2; cat /sys/class/net/eth0/carrier; echo connected
until [ $(cat /sys/class/net/eth0/carrier) = 0 ]; do sleep 0.1; done; echo the cable is out\n";

/// Bytes that do not repeat.
pub(super) fn noise() -> Vec<u8> {
    let mut state = 1_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..DATA / 8).flat_map(|_| next()).collect()
}

/// Tries until there is something, or for too long.
pub(super) fn until<T>(what: &str, mut attempt: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = attempt()? {
            return Ok(found);
        }
        ensure!(Instant::now() < deadline, "no {what}");
        thread::sleep(TICK);
    }
}

fn accept(listener: &TcpListener) -> Result<TcpStream> {
    listener.set_nonblocking(true).context("cannot listen")?;
    let stream = until("connection of the guest", || match listener.accept() {
        Ok((stream, _)) => Ok(Some(stream)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error).context("cannot accept a connection"),
    })?;
    stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(PATIENCE)))?;
    Ok(stream)
}

/// Returns a free TCP port of this host.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen")?;
    Ok(listener.local_addr().context("no address")?.port())
}

/// A guest has an address, reaches a server of this host and is reached from it, by what `passt`
/// does.
pub fn user() -> Result<()> {
    let rig = Rig::new()?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen")?;
    let (server, forwarded) = (listener.local_addr()?.port(), free_port()?);
    let script = format!(
        "{CONFIGURE}
        router=$(cat /tmp/router)
        mkfifo /tmp/never; nc $router {server} <>/tmp/never >/tmp/data
        nc $router {server} </tmp/data; nc -l -p 7 </tmp/data >/tmp/none
        nc -l -p 7 <>/tmp/never\n"
    );
    let mut machine = rig.script(&script, &[])?;
    machine.args(["--net", &format!("user,hostloopback=on,hostfwd=tcp:{forwarded}:7")]);
    let machine = thread::spawn(move || end(&mut machine, ""));
    let host = talk(&listener, forwarded);
    let ended = machine.join().map_err(|_| anyhow::anyhow!("the machine's thread panicked"))??;
    // What the machine says comes first, if both went wrong.
    ended.well(0, &["the host has got it"])?;
    host?;
    hidden(&rig)
}

/// Without `hostloopback` the guest reaches no service on the host's loopback address; forwarded
/// ports work.
fn hidden(rig: &Rig) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen")?;
    let (server, forwarded) = (listener.local_addr()?.port(), free_port()?);
    let script = format!(
        "{CONFIGURE}
        router=$(cat /tmp/router)
        for address in $router 127.0.0.1; do
            nc -w 3 $address {server} </dev/null && exit 9; done
        echo has tried; echo from the guest | nc -l -p 7\n"
    );
    let mut machine = rig.script(&script, &[])?;
    machine.args(["--net", &format!("user,hostfwd=tcp:{forwarded}:7")]);
    let mut child = start(&mut machine)?;
    // Before the guest has an address, `passt` waits for its answers in vain.
    wait_for(&mut child, "has tried\r\n")?;
    let back = until("answer at the forwarded port", || {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, forwarded))?;
        stream.set_read_timeout(Some(ANSWER))?;
        let mut back = String::new();
        let read = stream.write_all(b"go\n").and_then(|()| stream.read_to_string(&mut back));
        Ok((read.is_ok() && !back.is_empty()).then_some(back))
    });
    drop(child.stdin.take());
    let output = child.wait_with_output().context("cannot wait for parador")?;
    ensure!(back? == "from the guest\n", "something else came through the port");
    ensure!(output.status.code() == Some(0), "{output:?}");
    listener.set_nonblocking(true).context("cannot listen")?;
    ensure!(listener.accept().is_err(), "the guest has reached the host's loopback address");
    Ok(())
}

/// The host's side of [`user`].
fn talk(listener: &TcpListener, forwarded: u16) -> Result<()> {
    let data = noise();
    let mut stream = accept(listener)?;
    stream.write_all(&data).and_then(|()| stream.shutdown(Shutdown::Write))?;
    let mut back = Vec::new();
    accept(listener)?.read_to_end(&mut back).context("the guest sends nothing")?;
    ensure!(back == data, "the echo has {} bytes, or other contents", back.len());
    // Before the guest listens, connections are closed at once.
    let back = until("answer at the forwarded port", || {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, forwarded))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut back = Vec::new();
        // Debian 12's `passt` does not finish a handshake before the host says something.
        let read = stream.write_all(b"go\n").and_then(|()| stream.read_to_end(&mut back));
        if read.is_err() || back.is_empty() {
            return Ok(None);
        }
        Ok(Some(back))
    })?;
    ensure!(back == data, "{} bytes came through the port, or others", back.len());
    until("reader at the forwarded port", || {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, forwarded))?;
        let written = stream.write_all(b"the host has got it\n");
        // Who does not listen closes the connection at once.
        stream.set_read_timeout(Some(10 * TICK))?;
        let closed = stream.read(&mut [0]).map_err(|error| error.kind());
        Ok((written.is_ok() && closed == Err(ErrorKind::WouldBlock)).then_some(()))
    })
}

/// Two machines on one switch; it ends with them.
pub fn switch() -> Result<()> {
    let (first, second) = (Rig::new()?, Rig::new()?);
    let socket = first.path("switch");
    let net = format!("switch={}", socket.display());
    let serve = "ifconfig eth0 10.77.0.1 up
        dd if=/dev/urandom of=/tmp/data bs=1M count=8 2>/dev/null
        nc -l -p 7 </tmp/data >/dev/null; mkfifo /tmp/never; nc -l -p 8 <>/tmp/never >/tmp/answer
        cmp /tmp/data /tmp/answer; echo the same\n";
    let ask = "ifconfig eth0 10.77.0.2 up
        until ping -c 1 -W 1 10.77.0.1; do sleep 0.2; done
        mkfifo /tmp/never
        until nc 10.77.0.1 7 <>/tmp/never >/tmp/data; do sleep 0.2; done
        until nc 10.77.0.1 8 </tmp/data; do sleep 0.2; done\n";
    let machine = first.script(serve, &[])?;
    // The mode of the socket does not depend on the user's.
    let mut serving = Command::new("sh");
    serving.args(["-c", "umask 0; exec \"$@\"", "sh"]).arg(machine.get_program());
    serving.args(machine.get_args()).args(["--net", &net]).current_dir(first.folder());
    serving.envs(machine.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut asking = second.script(ask, &[])?;
    asking.args(["--net", &net]);
    let serving = thread::spawn(move || end(&mut serving, ""));
    until("switch", || Ok(socket.exists().then_some(())))?;
    let mode = fs::metadata(&socket).context("no switch")?.permissions().mode();
    ensure!(mode & 0o7777 == 0o600, "the switch's socket has mode {mode:o}");
    for_one_user(&first, &socket)?;
    let asked = end(&mut asking, "");
    let served = serving.join().map_err(|_| anyhow::anyhow!("the machine's thread panicked"))??;
    served.well(0, &["the same"])?;
    asked?.well(0, &["1 packets received"])?;
    gone(&socket)?;

    // A VM continues without its switch, and the next VM starts another one.
    killed(&first, &net, "--switch")?;
    ensure!(socket.exists(), "the killed VM removed its socket");
    let mut machine = first.script("ifconfig eth0 up; cat /sys/class/net/eth0/carrier\n", &[])?;
    end(machine.args(["--net", &net]), "")?.well(0, &["\n1\n"])?;
    gone(&socket)
}

/// First argument of this program when it is to connect with a socket and wait until the other side
/// closes it ([`connect`]).
pub const CONNECT: &str = "--connect";

/// Connects with the socket that `arguments` name; what comes is nothing.
pub fn connect(arguments: &[String]) -> Result<()> {
    let mut stream = UnixStream::connect(&arguments[0]).context("cannot connect")?;
    stream.set_read_timeout(Some(PATIENCE)).context("no time limit")?;
    let read = stream.read(&mut [0]).context("the connection stays")?;
    ensure!(read == 0, "something has come");
    println!("closed");
    Ok(())
}

/// A switch belongs to one user: it refuses connections of other users, and other users' VMs refuse
/// to join it, even if the socket's mode permits it.
fn for_one_user(rig: &Rig, socket: &Path) -> Result<()> {
    if fs::metadata("/proc/self").context("no /proc")?.uid() != 0 {
        eprintln!("only root can be another user");
        return Ok(());
    }
    let open = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
    open(rig.folder(), 0o755).and_then(|()| open(socket, 0o666)).context("cannot change a mode")?;
    let itself = std::env::current_exe().context("no path of this program")?;
    let other_user = ["--reuid", "65534", "--regid", "65534", "--clear-groups"];
    for (file, name) in [(itself, "tests"), (target().join("release/parador"), "parador")] {
        fs::copy(&file, rig.path(name))
            .with_context(|| format!("cannot copy {}", file.display()))?;
    }
    let mut connecting = Command::new("setpriv");
    connecting.args(other_user).arg(rig.path("tests")).arg(CONNECT).arg(socket);
    let said = connecting.output().context("cannot start setpriv")?;
    ensure!(said.stdout == b"closed\n", "another user is connected with the switch: {said:?}");
    // As another user who serves it: root does not join.
    let path = rig.path("theirs");
    // Theirs alone: `parador` takes no programs from a folder that others may write to.
    fs::create_dir(&path)
        .and_then(|()| chown(&path, Some(65534), Some(65534)))
        .context("cannot make a folder")?;
    fs::copy(rig.kernel(), path.join("vmlinux")).context("cannot copy the kernel")?;
    fs::copy(artifacts().join("parador-wedge"), path.join("parador-wedge"))
        .context("cannot copy the wedge")?;
    let net = format!("switch={}", path.join("switch").display());
    let mut serving = Command::new("setpriv");
    serving.args(other_user).arg(rig.path("parador")).arg("run").arg(path.join("vmlinux"));
    serving.args(["-i", "busybox", "--backend", "process", "--timeout", "60s", "--net", &net]);
    serving.arg("--artifacts").arg(&path).env("XDG_CACHE_HOME", &path).current_dir(&path);
    let mut serving = start(&mut serving)?;
    let there = until("switch of another user", || Ok(path.join("switch").exists().then_some(())));
    let refused = end(rig.run().args(["--net", &net]), "");
    serving.kill().and_then(|()| serving.wait()).context("cannot end parador")?;
    there?;
    refused?.has(77, &["belongs to another user"])?;
    open(rig.folder(), 0o700).context("cannot change a mode")
}

fn gone(socket: &Path) -> Result<()> {
    let deadline = Instant::now() + GONE;
    while socket.exists() {
        ensure!(Instant::now() < deadline, "the switch has stayed");
        thread::sleep(TICK);
    }
    Ok(())
}

/// Processes below a process whose command line has this word.
fn helpers(process: u32, word: &str) -> Vec<u32> {
    let path = format!("/proc/{process}/task/{process}/children");
    let text = fs::read_to_string(path).unwrap_or_default();
    let below = text.split_whitespace().filter_map(|number| number.parse().ok());
    below
        .filter(|number: &u32| {
            let line = fs::read(format!("/proc/{number}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).any(|part| part.ends_with(word.as_bytes()))
        })
        .collect()
}

/// Reads what a machine prints, until it has printed this.
pub fn wait_for(child: &mut Child, text: &str) -> Result<()> {
    let output = child.stdout.as_mut().context("no output")?;
    let mut printed = Vec::new();
    let mut buffer = [0; 4096];
    while !String::from_utf8_lossy(&printed).contains(text) {
        match output.read(&mut buffer).context("cannot read output")? {
            0 => bail!("`{text}` did not appear:\n{}", String::from_utf8_lossy(&printed)),
            read => printed.extend(&buffer[..read]),
        }
    }
    Ok(())
}

/// A VM whose network helper is killed continues with its link down.
fn killed(rig: &Rig, net: &str, word: &str) -> Result<()> {
    let mut machine = rig.script(UNTIL_DOWN, &[])?;
    let mut child = start(machine.args(["--net", net]))?;
    wait_for(&mut child, "1\r\nconnected")?;
    let [helper] = helpers(child.id(), word)[..] else { bail!("not exactly one process {word}") };
    succeed(Command::new("kill").args(["-KILL", &helper.to_string()]))?;
    drop(child.stdin.take());
    let output = child.wait_with_output().context("cannot wait for parador")?;
    let console = String::from_utf8_lossy(&output.stdout).into_owned();
    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
    let ended = Ended { code: output.status.code().unwrap_or(-1), console, messages };
    ended.well(0, &["the cable is out", "network 0: connection closed"])?;
    Ok(())
}

/// A VM continues without its `passt`, and ends without one of its own processes. No process
/// remains.
pub fn kills() -> Result<()> {
    let rig = Rig::new()?;
    killed(&rig, "passt", "passt")?;
    // The sender, the receiver, `parador` itself.
    for victim in 0..3 {
        let mut machine = rig.script(UNTIL_DOWN, &[])?;
        let mut child = start(machine.args(["--net", "passt"]))?;
        wait_for(&mut child, "connected")?;
        let ([device], [passt]) =
            (&helpers(child.id(), super::WEDGE)[..], &helpers(child.id(), "passt")[..])
        else {
            bail!("no device process, or no passt");
        };
        let workers = helpers(*device, super::WEDGE);
        let process = workers.get(..2).and_then(|workers| workers.get(victim)).copied();
        let (process, code) = process.map_or((child.id(), None), |worker| (worker, Some(137)));
        succeed(Command::new("kill").args(["-KILL", &process.to_string()]))?;
        drop(child.stdin.take());
        let output = child.wait_with_output().context("cannot wait for parador")?;
        ensure!(output.status.code() == code, "{victim}: {output:?}");
        let all: Vec<u32> = workers.into_iter().chain([*device, *passt]).collect();
        let deadline = Instant::now() + GONE;
        while let Some(left) = all.iter().find(|process| is_alive(**process)) {
            ensure!(Instant::now() < deadline, "{victim}: process {left} has stayed");
            thread::sleep(TICK);
        }
    }
    Ok(())
}

/// Invalid network options are refused before the VM starts.
pub fn refusals() -> Result<()> {
    let rig = Rig::new()?;
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen")?;
    let taken = format!("user,hostfwd=tcp:{}:22", taken.local_addr()?.port());
    for (net, code, text) in [
        ("usr", 65, "one of user, passt, none"),
        ("user,hostfwd=22", 65, "expected tcp:2222:22"),
        ("tap=lo", 65, "lo is not a tap device"),
        ("switch=/none/switch", 66, "cannot open /none"),
        (&taken, 71, "passt cannot start"),
    ] {
        end(rig.run().args(["--net", net]), "")?.has(code, &[text])?;
    }
    let mut without = rig.run();
    // An empty PATH hides `passt`; `parador` itself is started by its path.
    let program = Command::new("sh").args(["-c", "command -v setpriv"]).output()?;
    let program = String::from_utf8_lossy(&program.stdout).trim().to_owned();
    let mut machine = Command::new(program);
    machine.args(without.args(["--net", "user"]).get_args()).current_dir(rig.folder.path());
    machine.envs(without.get_envs().filter_map(|(name, value)| Some((name, value?))));
    end(machine.env("PATH", "/none"), "")?.has(69, &["program not found: passt", "install"])?;
    Ok(())
}

/// A tap device in a name space of the test's: both directions, with offloads. Where there can be
/// none, that is said.
pub fn tap() -> Result<()> {
    /// Makes the device and, on the other side of it, who gives and takes data; then becomes the
    /// machine.
    const AROUND: &str = "busybox tunctl -t tap0 >/dev/null
        busybox ifconfig tap0 10.77.0.1 netmask 255.255.255.0 up
        mkfifo never; busybox nc -l -p 7 <data >/dev/null &
        busybox nc -l -p 8 <>never >answer & exec \"$@\"";
    let own = ["-rn", "--"];
    let probe =
        Command::new("unshare").args(own).args(["busybox", "tunctl", "-t", "tap0"]).output();
    let probe = probe.context("cannot start unshare")?;
    if !probe.status.success() {
        eprintln!("no tap devices here: {}", String::from_utf8_lossy(&probe.stderr).trim());
        return Ok(());
    }
    let rig = Rig::new()?;
    let data = noise();
    fs::write(rig.path("data"), &data).context("cannot write a file")?;
    let script = "ifconfig eth0 10.77.0.2 netmask 255.255.255.0 up; cat /sys/class/net/eth0/mtu
        cat /sys/class/net/eth0/address; ping -c 2 10.77.0.1
        mkfifo /tmp/never; nc 10.77.0.1 7 <>/tmp/never >/tmp/data; nc 10.77.0.1 8 </tmp/data\n";
    let mut inner = rig.script(script, &[])?;
    inner.args(["--net", "tap=tap0,mac=02:00:00:00:00:42"]);
    let mut machine = Command::new("unshare");
    machine.args(own).args(["sh", "-ec", AROUND, "sh"]).arg(inner.get_program());
    machine.args(inner.get_args()).current_dir(rig.folder.path());
    machine.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    end(&mut machine, "")?.well(0, &["\n1500\n", "02:00:00:00:00:42", "2 packets received"])?;
    let answer = until("answer", || {
        let answer = fs::read(rig.path("answer")).context("no answer")?;
        Ok((answer.len() >= DATA).then_some(answer))
    })?;
    ensure!(answer == data, "the echo has {} bytes, or other contents", answer.len());
    // Creating a device without permission is refused.
    let mut refused = Command::new("unshare");
    refused.args(["-rn", "setpriv", "--bounding-set=-all", "--inh-caps=-all", "--"]);
    refused.arg(inner.get_program());
    refused.args(rig.run().args(["--net", "tap=tap1"]).get_args());
    refused.current_dir(rig.folder.path());
    refused.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    end(&mut refused, "")?
        .has(71, &["cannot open a tap device: Operation not permitted (EPERM)"])?;
    Ok(())
}
