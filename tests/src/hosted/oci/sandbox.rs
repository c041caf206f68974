//! A sandbox that is deleted before the containers in its VM, as engines do it after a crash.

use super::configurations::network;
use super::{Engine, no_mounts_below};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;

/// Annotations of the CRI.
const KIND: &str = "io.kubernetes.cri.container-type";
const SANDBOX: &str = "io.kubernetes.cri.sandbox-id";
/// Names of a sandbox, and of its containers: one that runs, and one that was only created.
const POD: &str = "pod";
const RUNNING: &str = "member-running";
const CREATED: &str = "member-created";

fn member(config: &mut Value) {
    config["annotations"] = json!({ KIND: "container", SANDBOX: POD });
    config["process"]["user"]["gid"] = json!(7);
}

/// Processes that a container leaves in the PID namespace that the containers of a pod share end
/// with it.
fn processes_end(engine: &Engine) -> Result<()> {
    const NAME: &str = "member-leaving";
    const WATCHING: &str = "member-watching";
    let pod = engine.state(POD)?["pid"].to_string();
    let sharing = |config: &mut Value| {
        member(config);
        let shared = json!({ "type": "pid", "path": format!("/proc/{pod}/ns/pid") });
        config["linux"]["namespaces"][0] = shared;
    };
    engine.bundle(WATCHING, "sleep 1000", sharing)?;
    engine.bundle(NAME, "sleep 4321 & sleep 1; echo left", sharing)?;
    let _inputs = [engine.create(WATCHING)?, engine.create(NAME)?];
    engine.succeed(&["start", WATCHING])?;
    engine.succeed(&["start", NAME])?;
    // The pattern is not what it finds.
    let count = ["exec", WATCHING, "sh", "-c", "busybox ps | grep -c 'sleep 432[1]'"];
    let running = engine.call(&count)?;
    ensure!(running.stdout == b"2\n", "with the shell: {running:?}");
    engine.wait_for(NAME, "stopped")?;
    engine.succeed(&["kill", "--all", NAME, "KILL"])?;
    engine.succeed(&["delete", NAME])?;
    let left = engine.call(&count)?;
    ensure!(left.stdout == b"0\n", "{left:?}");
    engine.succeed(&["delete", "--force", WATCHING]).map(drop)
}

/// A program that cannot be executed ends its own container only.
fn not_executable(engine: &Engine) -> Result<()> {
    const NAME: &str = "member-wrong";
    engine.bundle(NAME, "", |config| {
        member(config);
        config["process"]["args"] = json!(["/bin/wrong"]);
    })?;
    let program = engine.path(NAME).join("rootfs/bin/wrong");
    fs::write(&program, "no program").context("cannot write")?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let _input = engine.create(NAME)?;
    engine.refused(&["start", NAME], "Exec format error")?;
    engine.wait_for(NAME, "stopped")?;
    engine.succeed(&["delete", NAME])?;
    let ended = engine.succeed(&["exec", RUNNING, "echo", "it runs"])?;
    ensure!(ended == "it runs\n", "{ended}");
    Ok(())
}

/// A container can have the PID namespace of another one, as `kubectl debug --target` demands.
fn with_processes_of_another(engine: &Engine) -> Result<()> {
    const NAME: &str = "member-debugging";
    let [pod, other] =
        [POD, RUNNING].map(|name| engine.state(name).map(|it| it["pid"].to_string()));
    let (pod, other) = (pod?, other?);
    engine.bundle(NAME, "sleep 2000", |config| {
        member(config);
        config["linux"]["namespaces"][1]["path"] = json!(format!("/proc/{pod}/ns/net"));
        let shared = json!({ "type": "pid", "path": format!("/proc/{other}/ns/pid") });
        config["linux"]["namespaces"][0] = shared;
    })?;
    let _input = engine.create(NAME)?;
    engine.succeed(&["start", NAME])?;
    let first = engine.succeed(&["exec", NAME, "cat", "/proc/1/cmdline"])?;
    ensure!(first == "sleep\x001000\0", "the first process: {first:?}");
    // Its carrier has the network of the pod, and that of a container without one a new one.
    let own = engine.state(NAME)?["pid"].to_string();
    let [own, pod, other, host] = [&*own, &*pod, &*other, "self"].map(network);
    let (own, pod, other) = (own?, pod?, other?);
    ensure!(own == pod && other != pod && other != host?, "{own:?} {pod:?} {other:?}");
    engine.succeed(&["delete", "--force", NAME]).map(drop)
}

/// The containers end with their sandbox, their mounts are removed, and they can be deleted later.
pub(super) fn deleted_first(engine: &Engine) -> Result<()> {
    let sandbox = |config: &mut Value| config["annotations"] = json!({ KIND: "sandbox" });
    engine.bundle(POD, "sleep 1000", sandbox)?;
    let mut inputs = vec![engine.create(POD)?];
    engine.succeed(&["start", POD])?;
    for name in [RUNNING, CREATED] {
        engine.bundle(name, "sleep 1000", member)?;
        inputs.push(engine.create(name)?);
    }
    // Changes of the configuration have no effect once there is a container.
    fs::remove_file(engine.path(RUNNING).join("config.json")).context("no configuration")?;
    engine.succeed(&["start", RUNNING])?;
    let group = engine.succeed(&["exec", "-u", "5", RUNNING, "id", "-g"])?;
    ensure!(group == "7\n", "the group of another user: {group}");
    engine.refused(&["pause", RUNNING], "cannot be paused alone")?;
    processes_end(engine)?;
    not_executable(engine)?;
    with_processes_of_another(engine)?;
    engine.refused(&["delete", POD], "cannot delete container pod that is not stopped")?;
    engine.succeed(&["delete", "--force", POD])?;
    no_mounts_below(&engine.path("run")).context("after the sandbox")?;
    for name in [RUNNING, CREATED] {
        let status = engine.state(name)?["status"].take();
        ensure!(status == "stopped", "{name} is {status}");
    }
    engine.refused(&["start", CREATED], "cannot start a container that has stopped")?;
    engine.refused(&["state", POD], "container \"pod\" does not exist")?;
    engine.succeed(&["delete", RUNNING])?;
    engine.succeed(&["delete", "--force", CREATED])?;
    [POD, RUNNING, CREATED].iter().try_for_each(|name| engine.nothing_left(name))
}
