//! podman as an engine of `parador oci`: as root, and of an ordinary user.

mod rootless;

use super::{Engine, GONE, fetch};
use crate::hosted::exec::run;
use anyhow::{Context, Result, bail, ensure};
use rootless::Rootless;
use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Page of a server in a container.
const PAGE: &str = "a page";
/// Address of the host's loopback interface for guests of slirp4netns.
const HOST_LOOPBACK: &str = "10.0.2.2";
/// MAC of slirp4netns with that address.
const ROUTER_MAC: &str = "52:55:0a:00:02:02";

/// podman with folders and an image of its own.
pub struct Podman {
    engine: Engine,
    /// The runtime under test.
    pub runtime: PathBuf,
    /// Folder with podman's files.
    home: PathBuf,
    user: Option<Rootless>,
}

impl Podman {
    /// Imports the image `test:1`, as root.
    pub fn new() -> Result<Self> {
        let engine = Engine::new()?;
        let runtime = engine.make_runtime()?;
        let home = engine.rig.folder().to_owned();
        Self { engine, runtime, home, user: None }.with_image()
    }

    /// Does the same for an ordinary user, with the installed package.
    pub fn rootless() -> Result<Self> {
        let engine = Engine::new()?;
        let user = Rootless::new(engine.rig.folder())?;
        let home = user.home.clone();
        Self { engine, runtime: rootless::RUNTIME.into(), home, user: Some(user) }.with_image()
    }

    fn with_image(self) -> Result<Self> {
        if Command::new("podman").arg("--version").output().is_err() {
            bail!("podman is missing: apt-get install podman");
        }
        let image = self.home.join("image.tar");
        self.engine.make_image(&image)?;
        self.succeed(&["import", &image.to_string_lossy(), "test:1"], None)?;
        Ok(self)
    }

    fn call(&self, arguments: &[&str], input: &str) -> Result<(Option<i32>, String)> {
        self.call_with(&self.runtime, arguments, input)
    }

    /// Calls podman with a runtime; returns the exit code and the output.
    pub fn call_with(
        &self,
        runtime: &Path,
        arguments: &[&str],
        input: &str,
    ) -> Result<(Option<i32>, String)> {
        let ended = run(&mut self.command(runtime, arguments), input)?;
        let text = [ended.stdout, ended.stderr].concat();
        Ok((ended.status.code(), String::from_utf8_lossy(&text).into_owned()))
    }

    /// A call of podman with a runtime.
    fn command(&self, runtime: &Path, arguments: &[&str]) -> Command {
        let mut command = match &self.user {
            None => Command::new("timeout"),
            Some(user) => user.command("timeout"),
        };
        command.args(["-s", "KILL", "200", "podman", "--log-level", "error"]);
        command.args(["--cgroup-manager", "cgroupfs", "--events-backend", "file"]);
        command.arg("--root").arg(self.home.join("storage"));
        command.arg("--runroot").arg(self.home.join("runroot"));
        command.arg("--runtime").arg(runtime);
        if self.user.is_some() && runtime == self.runtime {
            // The other runtime of tests has it in its script.
            command.args(["--runtime-flag", "backend=process"]);
        }
        command.args(arguments).current_dir(self.engine.rig.folder());
        command
    }

    fn succeed(&self, arguments: &[&str], output: Option<&str>) -> Result<()> {
        let (code, text) = self.call(arguments, "")?;
        let is_good = code == Some(0) && output.is_none_or(|output| output == text);
        ensure!(is_good, "{arguments:?}: {code:?} {text}");
        Ok(())
    }

    /// Waits until a detached container has printed this.
    fn wait_for_log(&self, name: &str, expected: &str) -> Result<()> {
        let deadline = Instant::now() + GONE;
        loop {
            let (code, text) = self.call(&["logs", name], "")?;
            if code == Some(0) && text == expected {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the log of {name}: {code:?} {text}");
            sleep(Duration::from_millis(100));
        }
    }

    /// Returns the capabilities that podman may give, after the colon of its status.
    fn bounding_set(&self) -> Result<String> {
        let own = "/proc/self/status";
        let text = match &self.user {
            None => fs::read_to_string(own).context("no status")?,
            // Its user namespace has all.
            Some(_) => self.call(&["unshare", "cat", own], "")?.1,
        };
        let set = text.lines().find_map(|line| line.strip_prefix("CapBnd:"));
        Ok(set.context("no bounding set")?.to_owned())
    }

    /// Checks that containers which were removed have left no trace.
    fn nothing_left(&self) -> Result<()> {
        let Some(user) = &self.user else { return self.engine.nothing_left("d") };
        let (code, mounts) = self.call(&["unshare", "cat", "/proc/self/mountinfo"], "")?;
        let own = user.runtime.join("parador");
        let is_clean = code == Some(0) && !mounts.contains(&*own.to_string_lossy());
        ensure!(is_clean, "mounts are left: {code:?} {mounts}");
        for folder in ["parador", "parador-oci"] {
            let entries = fs::read_dir(user.runtime.join(folder)).context("no runtime folder")?;
            let left: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
            ensure!(left.is_empty(), "left in {folder}: {left:?}");
        }
        self.engine.no_processes()
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        // Nothing can be done where something fails.
        let _ = self.call(&["rm", "--force", "--all", "--time", "0"], "");
        match &self.user {
            // It ends the process that keeps the user namespace.
            Some(_) => drop(self.call(&["system", "migrate"], "")),
            // podman leaves its storage mounted, which keeps the folder.
            None => {
                let mut unmount = Command::new("umount");
                let _ = unmount.arg("--quiet").arg(self.home.join("storage/overlay")).status();
            }
        }
    }
}

/// podman as root.
pub fn as_root() -> Result<()> {
    let podman = Podman::new()?;
    attached(&podman)?;
    on_a_terminal(&podman)?;
    detached(&podman)?;
    podman.nothing_left()
}

/// podman of an ordinary user, whose network is slirp4netns.
pub fn rootless() -> Result<()> {
    let podman = Podman::rootless()?;
    attached(&podman)?;
    detached(&podman)?;
    published(&podman)?;
    to_the_host(&podman)?;
    built(&podman)?;
    untrusted(&podman)?;
    podman.nothing_left()
}

/// Exit codes, standard input, terminals, volumes.
fn attached(podman: &Podman) -> Result<()> {
    let run = ["run", "--rm", "-i", "--network", "none", "test:1"];
    for (code, command) in [
        (0, &["true"][..]),
        (1, &["sh", "-c", "exit 1"]),
        (255, &["sh", "-c", "exit 255"]),
        (127, &["/no/such"]),
        // 128 and the signal, which a process 1 would ignore.
        (143, &["sh", "-c", "sh -c 'kill -TERM $$'; exit $?"]),
    ] {
        let ended = podman.call(&[&run[..], command].concat(), "")?;
        ensure!(ended.0 == Some(code), "{command:?}: {ended:?}");
    }
    let ended = podman.call(&[&run[..], &["cat"]].concat(), "some\ninput\n")?;
    ensure!(ended == (Some(0), "some\ninput\n".to_owned()), "{ended:?}");
    let script = "[ -t 0 ] && [ -t 1 ] && echo terminal";
    let terminal = ["run", "--rm", "-t", "--network", "none", "test:1", "sh", "-c", script];
    podman.succeed(&terminal, Some("terminal\r\n"))?;
    // The guest's devices and all capabilities.
    let script = "[ -c /dev/kmsg ] && mount -t tmpfs none /tmp && echo privileged";
    let privileged =
        ["run", "--rm", "--privileged", "--network", "none", "test:1", "sh", "-c", script];
    podman.succeed(&privileged, Some("privileged\n"))?;
    let volume = podman.home.join("volume");
    fs::create_dir(&volume).context("cannot make a folder")?;
    if let Some(user) = &podman.user {
        user.give(&volume)?;
    }
    let option = format!("{}:/volume", volume.display());
    let script = "echo made >/volume/made; stat -c %u /volume/made";
    let run = ["run", "--rm", "-v", &option, "--network", "none", "test:1", "sh", "-c", script];
    podman.succeed(&run, Some("0\n"))?;
    let made = fs::read_to_string(volume.join("made")).context("the volume was not changed")?;
    ensure!(made == "made\n", "{made}");
    Ok(())
}

/// The container's terminal has the size of that on which podman runs, which sets it after
/// `create`.
fn on_a_terminal(podman: &Podman) -> Result<()> {
    let run = ["run", "--rm", "-it", "--network", "none", "test:1", "stty", "size"];
    let command = podman.command(&podman.runtime, &run);
    let words = [command.get_program()].into_iter().chain(command.get_args());
    // None has a space in it. It must have a foreground process group, unlike that of `timeout`.
    let words: Vec<_> = words.skip(4).map(|word| word.to_string_lossy()).collect();
    let line = format!("stty rows 50 cols 132; exec {}", words.join(" "));
    let mut script = Command::new("timeout");
    script.args(["-s", "KILL", "200", "script", "-qec", &line, "/dev/null"]);
    let ended = crate::hosted::exec::run(&mut script, "")?;
    let output = String::from_utf8_lossy(&ended.stdout);
    // `script` may add the end of its input.
    let is_good = ended.status.success() && output.starts_with("50 132\r\n");
    ensure!(is_good, "{ended:?}");
    Ok(())
}

/// `exec`, `logs`, `stop`, `kill`.
fn detached(podman: &Podman) -> Result<()> {
    let script = "trap 'exit 3' TERM; trap 'exit 9' USR1; echo begun; while :; do sleep 0.1; done";
    let run = ["run", "-d", "--name", "d", "--network", "none", "test:1", "sh", "-c", script];
    let ends: [(&[&str], &str); 3] = [
        (&["stop", "d"], "3\n"),
        (&["kill", "--signal", "USR1", "d"], "9\n"),
        (&["kill", "d"], "137\n"),
    ];
    for (end, code) in ends {
        podman.succeed(&run, None)?;
        podman.wait_for_log("d", "begun\n")?;
        if code == "3\n" {
            let ended = podman.call(&["exec", "d", "sh", "-c", "id -u; exit 42"], "")?;
            ensure!(ended.0 == Some(42) && ended.1.starts_with("0\n"), "{ended:?}");
            let script = "[ -t 0 ] && [ -t 1 ] && echo terminal";
            podman.succeed(&["exec", "-t", "d", "sh", "-c", script], Some("terminal\r\n"))?;
            podman.succeed(&["exec", "-t", "d", "tty"], Some("/dev/pts/0\r\n"))?;
            let status = ["exec", "--privileged", "d", "grep", "CapEff", "/proc/self/status"];
            let expected = format!("CapEff:{}\n", podman.bounding_set()?);
            podman.succeed(&status, Some(&expected))?;
            copied(podman)?;
        }
        podman.succeed(end, None)?;
        podman.succeed(&["wait", "d"], Some(code))?;
        podman.succeed(&["inspect", "-f", "{{.State.ExitCode}}", "d"], Some(code))?;
        podman.succeed(&["rm", "d"], None)?;
    }
    Ok(())
}

/// `podman cp` into a running container and out of it, which enters the carrier's mount namespace.
fn copied(podman: &Podman) -> Result<()> {
    let [from, to] = ["copied-from", "copied-to"].map(|name| podman.home.join(name));
    fs::write(&from, PAGE).context("cannot write")?;
    if let Some(user) = &podman.user {
        user.give(&from)?;
    }
    let inside = format!("/tmp/parador-copied-{}", std::process::id());
    let target = format!("d:{inside}");
    podman.succeed(&["cp", &from.to_string_lossy(), &target], None)?;
    ensure!(!Path::new(&inside).exists(), "podman cp has written to the host");
    podman.succeed(&["exec", "d", "cat", &inside], Some(PAGE))?;
    podman.succeed(&["cp", &target, &to.to_string_lossy()], None)?;
    let back = fs::read_to_string(&to).context("no copy")?;
    ensure!(back == PAGE, "{back}");
    Ok(())
}

/// A published port, to which podman's port forwarder connects from inside of the namespace.
fn published(podman: &Podman) -> Result<()> {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen")?;
    let port = free.local_addr().context("no port")?.port();
    drop(free);
    let option = format!("127.0.0.1:{port}:8080");
    let script = format!("echo '{PAGE}' >/tmp/page; exec httpd -f -p 8080 -h /tmp");
    podman.succeed(
        &["run", "-d", "--name", "web", "-p", &option, "test:1", "sh", "-c", &script],
        None,
    )?;
    let deadline = Instant::now() + GONE;
    loop {
        let answer = fetch(port, Duration::from_secs(5)).unwrap_or_else(|error| error.to_string());
        if answer.ends_with(&format!("{PAGE}\n")) {
            break;
        }
        // The server may not listen yet.
        ensure!(Instant::now() < deadline, "the published port answers {answer:?}");
        sleep(Duration::from_millis(100));
    }
    podman.succeed(&["rm", "--force", "--time", "0", "web"], None)
}

/// A connection by slirp4netns to a server of the host.
fn to_the_host(podman: &Podman) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen")?;
    let port = listener.local_addr().context("no port")?.port().to_string();
    let server = std::thread::spawn(move || {
        // The client shows that it gets nothing.
        let Ok((stream, _)) = listener.accept() else { return };
        let _ = (&stream).write_all(PAGE.as_bytes());
    });
    let network = "slirp4netns:allow_host_loopback=true";
    let run = ["run", "--rm", "--network", network, "test:1", "nc", HOST_LOOPBACK, &port];
    let ended = podman.call(&run, "");
    // Where the container has not connected.
    let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, port.parse()?));
    server.join().map_err(|_| anyhow::anyhow!("the server has panicked"))?;
    let ended = ended?;
    ensure!(ended == (Some(0), PAGE.to_owned()), "{ended:?}");
    Ok(())
}

/// `podman build` connects the network after `create`: the guest has an answer of slirp4netns.
fn built(podman: &Podman) -> Result<()> {
    let file = podman.home.join("Containerfile");
    let command = format!("nc -w 5 {HOST_LOOPBACK} 9 </dev/null; cat /proc/net/arp >/neighbours");
    fs::write(&file, format!("FROM test:1\nRUN {command}\n")).context("cannot write")?;
    let file = file.to_string_lossy();
    podman.succeed(&["build", "--quiet", "--tag", "built:1", "--file", &file], None)?;
    let run = ["run", "--rm", "--network", "none", "built:1", "cat", "/neighbours"];
    let (code, text) = podman.call(&run, "")?;
    ensure!(code == Some(0) && text.contains(ROUTER_MAC), "{code:?} {text}");
    Ok(())
}

/// In podman's user namespace, files of the host's root are trusted in the package only.
fn untrusted(podman: &Podman) -> Result<()> {
    let folder = podman.engine.path("artifacts");
    fs::create_dir(&folder).context("cannot make a folder")?;
    let flag = format!("artifacts={}", folder.display());
    let run = ["--runtime-flag", &flag, "run", "--rm", "--network", "none", "test:1", "true"];
    let (code, text) = podman.call(&run, "")?;
    let expected = format!("{} belongs to a user without an ID", folder.display());
    ensure!(code == Some(126) && text.contains(&expected), "{code:?} {text}");
    Ok(())
}
