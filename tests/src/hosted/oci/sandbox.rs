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
    engine.succeed(&["start", RUNNING])?;
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
