//! Docker as an engine of `parador oci`: it connects the network of a container after `create`, by
//! a hook, and its name server for networks that users make is at a loopback address.
//!
//! The test has a daemon of its own, in a network namespace of its own.

use super::{Engine, GONE, no_mounts_below, succeed};
use crate::hosted::exec::run;
use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Program of the daemon.
const DAEMON: &str = "/usr/sbin/dockerd";
/// Page of the server in a container.
const PAGE: &str = "a page";

/// Docker with folders and an image of its own.
struct Docker {
    engine: Engine,
    daemon: Option<Child>,
}

impl Docker {
    fn new() -> Result<Self> {
        ensure!(Path::new(DAEMON).exists(), "{DAEMON} is missing: apt-get install docker.io");
        let engine = Engine::new()?;
        let runtime = engine.make_runtime()?;
        let mut docker = Self { engine, daemon: None };
        docker.start(&runtime)?;
        let image = docker.engine.path("image.tar");
        docker.engine.make_image(&image)?;
        docker.succeed(&["import", &image.to_string_lossy(), "test:1"])?;
        Ok(docker)
    }

    fn start(&mut self, runtime: &Path) -> Result<()> {
        let log = File::create(self.engine.path("log")).context("cannot make a file")?;
        // The daemon's bridges and rules are in its namespace, whose first process it becomes.
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-ec", "ip link set lo up; exec \"$@\"", "sh", DAEMON]);
        for (option, path) in [("--data-root", "data"), ("--exec-root", "exec"), ("-p", "pid")] {
            command.arg(option).arg(self.engine.path(path));
        }
        command.args(["--storage-driver", "overlay2", "--add-runtime"]);
        command.arg(format!("parador={}", runtime.display()));
        command.arg("-H").arg(self.address());
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.daemon = Some(command.spawn().context("cannot start the daemon")?);
        let deadline = Instant::now() + GONE;
        while self.call(&["version"], "")?.0 != Some(0) {
            let log = fs::read_to_string(self.engine.path("log")).unwrap_or_default();
            ensure!(Instant::now() < deadline, "the daemon does not answer:\n{log}");
            sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    fn address(&self) -> String {
        format!("unix://{}", self.engine.path("socket").display())
    }

    fn call(&self, arguments: &[&str], input: &str) -> Result<(Option<i32>, String)> {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "200", "docker", "-H", &self.address()]).args(arguments);
        let ended = run(&mut command, input)?;
        let text = [ended.stdout, ended.stderr].concat();
        Ok((ended.status.code(), String::from_utf8_lossy(&text).into_owned()))
    }

    fn succeed(&self, arguments: &[&str]) -> Result<String> {
        let (code, text) = self.call(arguments, "")?;
        ensure!(code == Some(0), "{arguments:?}: {code:?} {text}");
        Ok(text)
    }

    /// Ends the daemon, which removes its network, and checks that nothing is left.
    fn end(mut self) -> Result<()> {
        let mut daemon = self.daemon.take().context("no daemon")?;
        let pid = Pid::from_child(&daemon);
        kill_process(pid, Signal::TERM).context("cannot end the daemon")?;
        daemon.wait().context("cannot wait for the daemon")?;
        // Docker leaves the namespace that it has for containers in that of the host.
        succeed(Command::new("umount").arg(self.engine.path("exec/netns/default")))?;
        self.engine.no_processes()?;
        no_mounts_below(self.engine.rig.folder())
    }
}

impl Drop for Docker {
    fn drop(&mut self) {
        // Nothing can be done where something fails.
        let Some(mut daemon) = self.daemon.take() else { return };
        let containers = self.call(&["ps", "--all", "--quiet"], "").unwrap_or_default().1;
        for container in containers.lines() {
            let _ = self.call(&["rm", "--force", container], "");
        }
        let _ = kill_process(Pid::from_child(&daemon), Signal::TERM);
        let _ = daemon.wait();
    }
}

/// Containers by Docker.
pub fn containers() -> Result<()> {
    let docker = Docker::new()?;
    attached(&docker)?;
    by_name(&docker)?;
    docker.end()
}

/// Exit codes, standard input, and the default network.
fn attached(docker: &Docker) -> Result<()> {
    let run = ["run", "--rm", "-i", "--runtime", "parador", "test:1"];
    for (code, command) in [(0, &["true"][..]), (7, &["sh", "-c", "exit 7"]), (127, &["/no/such"])]
    {
        let ended = docker.call(&[&run[..], command].concat(), "")?;
        ensure!(ended.0 == Some(code), "{command:?}: {ended:?}");
    }
    let ended = docker.call(&[&run[..], &["cat"]].concat(), "some\ninput\n")?;
    ensure!(ended == (Some(0), "some\ninput\n".to_owned()), "{ended:?}");
    let routes = docker.succeed(&[&run[..], &["ip", "route"]].concat())?;
    ensure!(routes.contains("default via 172.17.0.1 dev eth0"), "{routes}");
    let alone = ["run", "--rm", "--runtime", "parador", "--network", "none", "test:1"];
    let host = ["run", "--rm", "--runtime", "parador", "--network", "host", "test:1", "true"];
    let (code, text) = docker.call(&host, "")?;
    ensure!(code == Some(125) && text.contains("the host's network namespace"), "{code:?} {text}");
    let interfaces = docker.succeed(&[&alone[..], &["ls", "/sys/class/net"]].concat())?;
    ensure!(interfaces == "lo\n", "{interfaces}");
    Ok(())
}

/// A server of another container, which Docker's name server finds in a network of the test.
fn by_name(docker: &Docker) -> Result<()> {
    docker.succeed(&["network", "create", "test"])?;
    let script = format!("echo '{PAGE}' >/tmp/page; exec nc -l -p 8080 -e cat /tmp/page");
    let run = ["run", "--runtime", "parador", "--network", "test"];
    let server = ["-d", "--name", "server", "test:1", "sh", "-c", &script];
    docker.succeed(&[&run[..], &server].concat())?;
    // The server may not listen yet.
    let script = "until nc server 8080 </dev/null; do sleep 0.1; done";
    let page = docker.succeed(&[&run[..], &["--rm", "test:1", "sh", "-c", script]].concat())?;
    ensure!(page.ends_with(&format!("{PAGE}\n")), "{page}");
    ensure!(docker.succeed(&["wait", "server"])? == "0\n", "the server has failed");
    docker.succeed(&["rm", "server"])?;
    docker.succeed(&["network", "rm", "test"]).map(drop)
}
