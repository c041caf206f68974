//! podman as an engine of `parador oci`.

use super::{Engine, make_root, succeed};
use crate::hosted::exec::run;
use anyhow::{Result, bail, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// podman with folders and an image of its own.
pub struct Podman {
    engine: Engine,
    /// The runtime under test.
    pub runtime: PathBuf,
}

impl Podman {
    /// Imports the image `test:1`.
    pub fn new() -> Result<Self> {
        if Command::new("podman").arg("--version").output().is_err() {
            bail!("podman is missing: apt-get install podman");
        }
        let engine = Engine::new()?;
        make_root(&engine.path("tree"))?;
        let mut tar = Command::new("tar");
        succeed(
            tar.args(["-C", "tree", "-cf", "image.tar", "."]).current_dir(engine.rig.folder()),
        )?;
        let runtime = engine.make_runtime()?;
        let podman = Self { engine, runtime };
        podman.succeed(&["import", "image.tar", "test:1"], None)?;
        Ok(podman)
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
        let folder = self.engine.rig.folder();
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "200"]);
        command.args(["podman", "--cgroup-manager", "cgroupfs", "--events-backend", "file"]);
        command.arg("--root").arg(self.engine.path("storage"));
        command.arg("--runroot").arg(self.engine.path("runroot"));
        command.arg("--runtime").arg(runtime).args(arguments);
        let ended = run(command.current_dir(folder), input)?;
        let text = [ended.stdout, ended.stderr].concat();
        Ok((ended.status.code(), String::from_utf8_lossy(&text).into_owned()))
    }

    fn succeed(&self, arguments: &[&str], output: Option<&str>) -> Result<()> {
        let (code, text) = self.call(arguments, "")?;
        let is_good = code == Some(0) && output.is_none_or(|output| output == text);
        ensure!(is_good, "{arguments:?}: {code:?} {text}");
        Ok(())
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        // podman leaves its storage mounted, which keeps the folder.
        let mut unmount = Command::new("umount");
        let _ = unmount.arg("--quiet").arg(self.engine.path("storage/overlay")).status();
    }
}

/// podman as root: exit codes, standard input, `exec`, `logs`, `stop`.
pub fn as_root() -> Result<()> {
    let podman = Podman::new()?;
    let run = ["run", "--rm", "-i", "--network", "none", "test:1"];
    for (code, command) in [
        (0, &["true"][..]),
        (1, &["sh", "-c", "exit 1"]),
        (255, &["sh", "-c", "exit 255"]),
        (127, &["/no/such"]),
    ] {
        let ended = podman.call(&[&run[..], command].concat(), "")?;
        ensure!(ended.0 == Some(code), "{command:?}: {ended:?}");
    }
    let ended = podman.call(&[&run[..], &["cat"]].concat(), "some\ninput\n")?;
    ensure!(ended == (Some(0), "some\ninput\n".to_owned()), "{ended:?}");
    let script = "trap 'exit 3' TERM; echo begun; while :; do sleep 0.1; done";
    let detached = ["run", "-d", "--name", "d", "--network", "none", "test:1", "sh", "-c", script];
    podman.succeed(&detached, None)?;
    let ended = podman.call(&["exec", "d", "sh", "-c", "id -u; exit 42"], "")?;
    ensure!(ended.0 == Some(42) && ended.1.starts_with("0\n"), "{ended:?}");
    podman.succeed(&["logs", "d"], Some("begun\n"))?;
    podman.succeed(&["stop", "d"], None)?;
    podman.succeed(&["inspect", "-f", "{{.State.ExitCode}}", "d"], Some("3\n"))?;
    podman.succeed(&["rm", "d"], None)?;
    podman.engine.nothing_left("d")
}
