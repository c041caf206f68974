//! A sandbox that is deleted before the containers in its VM, as engines do it after a crash.

use super::{Engine, no_mounts_below};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

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
    std::fs::remove_file(engine.path(RUNNING).join("config.json")).context("no configuration")?;
    engine.succeed(&["start", RUNNING])?;
    let group = engine.succeed(&["exec", "-u", "5", RUNNING, "id", "-g"])?;
    ensure!(group == "7\n", "the group of another user: {group}");
    engine.refused(&["pause", RUNNING], "cannot be paused alone")?;
    processes_end(engine)?;
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
