//! Guests whose agent is another one: of another version, silent, or with malformed messages.

use super::Engine;
use crate::hosted::succeed;
use crate::system::artifacts;
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Program of guests/linux/agent.c, and its section with the mode, which has a length.
const AGENT: &str = "linux-agent";
const SECTION: &str = "hostile_mode";
const LENGTH: usize = 16;
/// The true agent's name, and its section with the release.
const NAME: &str = "parador-agent";
const RELEASE: &str = ".parador_release";

/// Deed of the agent, and part of the message about it.
const CASES: [(&str, &str); 4] = [
    ("version", "the agent has version 99 of the protocol"),
    ("silence", "no agent has answered within 3 s"),
    ("create", "a message is malformed"),
    ("run", "a message is too long"),
];

/// Makes a folder of artifacts with the agent of a mode.
fn make_artifacts(engine: &Engine, mode: &str) -> Result<PathBuf> {
    let folder = engine.path(&format!("artifacts-{mode}"));
    fs::create_dir(&folder).context("cannot make a folder")?;
    for entry in fs::read_dir(artifacts()).context("no artifacts")? {
        let entry = entry.context("no artifacts")?;
        if entry.file_name() != NAME {
            symlink(entry.path(), folder.join(entry.file_name())).context("cannot make a link")?;
        }
    }
    let (release, section) = (engine.path("release"), engine.path("mode"));
    let mut bytes = mode.as_bytes().to_vec();
    bytes.resize(LENGTH, 0);
    fs::write(&section, bytes).context("cannot write")?;
    let objcopy = |option: &str, section: &str, file: &Path, names: [PathBuf; 2]| {
        let mut command = Command::new("objcopy");
        command.arg(option).arg(format!("{section}={}", file.display()));
        succeed(command.args(names))
    };
    let changed = engine.path("agent");
    let copy = engine.path("copy");
    objcopy("--dump-section", RELEASE, &release, [artifacts().join(NAME), copy])?;
    objcopy("--update-section", SECTION, &section, [artifacts().join(AGENT), changed.clone()])?;
    objcopy("--add-section", RELEASE, &release, [changed, folder.join(NAME)])?;
    Ok(folder)
}

/// Each agent ends its VM and its container, and nothing is left.
pub fn agents() -> Result<()> {
    let mut engine = Engine::new()?;
    for (mode, text) in CASES {
        engine.artifacts = make_artifacts(&engine, mode)?;
        let annotations = json!({ "dev.parador.agent_timeout": "3s" });
        let is_silent = mode == "silence";
        engine.bundle(mode, "true", |config| {
            if is_silent {
                config["annotations"] = annotations;
            }
        })?;
        let run = ["run", "--bundle", mode, mode];
        match mode {
            "run" => {
                let ended = engine.call(&run)?;
                let errors = String::from_utf8_lossy(&ended.stderr);
                let is_good = ended.status.code() == Some(255) && errors.contains(text);
                ensure!(is_good, "{mode}: {} {errors}", ended.status);
            }
            _ => engine.refused(&run, text).with_context(|| mode.to_owned())?,
        }
        engine.nothing_left(mode)?;
    }
    Ok(())
}
