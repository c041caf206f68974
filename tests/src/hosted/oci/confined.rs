//! A guest whose kernel is under control of a container: on the host it changes what the container
//! may change, and nothing else.

use super::{Engine, GONE};
use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Sandbox. Tests that run at the same time have containers, and so cgroups, of other names.
const POD: &str = "taken";
const MEMBER: &str = "taken-member";

/// Run by the guest's kernel outside of all containers, as the program for core dumps: prints what
/// of the shared directory it could change.
const DEEDS: &str = r#"
B=/pod/taken/root/bin/busybox
try() { "$@" 2>/dev/null && echo "$*"; }
put() { echo x >"$1"; }
{
try $B mv /pod/taken /pod/moved
try $B mkdir /pod/new
try $B mkdir /pod/taken/9
try $B ln -s / /pod/link
try $B mv /pod/taken/4 /pod/taken/moved
try $B rmdir /pod/taken-member/0
try put /pod/file
try put /pod/taken/5
try put /pod/taken-member/root/made
try put /pod/taken/4/made
try put /pod/taken/6/made
try put /pod/taken/6/below/made
} >/pod/taken/root/changed
echo done >/pod/taken/root/done
"#;

/// Installs [`DEEDS`] and lets a process dump its core.
const SCRIPT: &str = "
echo '|/pod/taken/root/bin/busybox sh /pod/taken/root/deeds' >/proc/sys/kernel/core_pattern
sh -c 'kill -SEGV $$'
while :; do sleep 0.1; done";

fn sandbox(config: &mut Value) {
    config["annotations"] = json!({ "io.kubernetes.cri.container-type": "sandbox" });
    let all = json!(["CAP_SYS_ADMIN", "CAP_KILL"]);
    config["process"]["capabilities"] =
        json!({ "bounding": all, "effective": all, "permitted": all });
    config["linux"]["readonlyPaths"] = json!([]);
    let read_only = json!({ "destination": "/read-only", "type": "bind",
        "source": "../read-only", "options": ["rbind", "rprivate", "ro"] });
    config["mounts"].as_array_mut().expect("mounts").push(read_only);
}

fn member(config: &mut Value) {
    config["annotations"] = json!({ "io.kubernetes.cri.container-type": "container",
        "io.kubernetes.cri.sandbox-id": POD });
    config["root"]["readonly"] = json!(true);
}

/// The kernel of a guest cannot change folders through which the host walks, nor what is read-only,
/// file systems below included.
pub fn shares() -> Result<()> {
    let engine = Engine::new()?;
    engine.bundle(POD, SCRIPT, sandbox)?;
    engine.bundle(MEMBER, "sleep 1000", member)?;
    let root = engine.path(POD).join("rootfs");
    fs::write(root.join("deeds"), DEEDS).context("cannot write")?;
    fs::create_dir_all(engine.path("read-only/below")).context("cannot make a folder")?;
    let below = engine.path("read-only/below");
    let mut mount = Command::new("mount");
    super::succeed(mount.args(["-t", "tmpfs", "none"]).arg(&below))?;
    let tried = deeds(&engine, &root);
    super::succeed(Command::new("umount").arg(&below))?;
    tried
}

fn deeds(engine: &Engine, root: &Path) -> Result<()> {
    let _inputs = [engine.create(POD)?, engine.create(MEMBER)?];
    engine.succeed(&["start", MEMBER])?;
    engine.succeed(&["start", POD])?;
    let deadline = Instant::now() + GONE;
    while !root.join("done").exists() {
        ensure!(Instant::now() < deadline, "no core dump: {}", engine.output());
        sleep(Duration::from_millis(20));
    }
    let changed = fs::read_to_string(root.join("changed")).context("nothing was tried")?;
    ensure!(changed == "put /pod/taken/4/made\n", "the guest has done: {changed}");
    ensure!(engine.path("volume/made").exists(), "the volume was not changed");
    // The host's own ways through the shared directory.
    engine.succeed(&["delete", "--force", MEMBER])?;
    let again = engine.create(MEMBER)?;
    drop(again);
    engine.succeed(&["delete", "--force", MEMBER])?;
    engine.succeed(&["delete", "--force", POD])?;
    [MEMBER, POD].iter().try_for_each(|name| engine.nothing_left(name))
}

/// A signal to `run` goes to the container, whose end is that of the command.
pub fn signals() -> Result<()> {
    let engine = Engine::new()?;
    engine.bundle("run", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.1; done", |_| {})?;
    let mut command = engine.runtime();
    command.args(["run", "--bundle", "run", "--pid-file", "pid", "run"]);
    // The limit of `runtime` would end with the signal; the test has its own.
    let arguments: Vec<_> = command.get_args().skip(3).map(ToOwned::to_owned).collect();
    let mut direct = Command::new(&arguments[0]);
    direct.args(&arguments[1..]).current_dir(engine.rig.folder());
    for (name, value) in command.get_envs() {
        direct.env(name, value.unwrap_or_default());
    }
    let output = fs::File::create(engine.path("output")).context("cannot make a file")?;
    let mut run = direct.stdin(Stdio::null()).stdout(output).spawn().context("cannot start")?;
    let deadline = Instant::now() + GONE;
    while !engine.output().contains("ready") {
        ensure!(Instant::now() < deadline && run.try_wait()?.is_none(), "it does not start");
        sleep(Duration::from_millis(20));
    }
    kill_process(Pid::from_child(&run), Signal::TERM).context("cannot send a signal")?;
    let status = loop {
        if let Some(status) = run.try_wait()? {
            break status;
        }
        if Instant::now() > deadline {
            run.kill()?;
        }
        sleep(Duration::from_millis(20));
    };
    ensure!(status.code() == Some(7), "{status}");
    engine.nothing_left("run")
}
