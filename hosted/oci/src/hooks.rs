//! Hooks of configurations: programs of the host that run when a container is created, started or
//! deleted, with its state on their standard input (OCI runtime specification, "POSIX-platform
//! Hooks").
//!
//! Their container is the carrier: its namespaces are those that engines enter.

use crate::refuse;
use hosted_command::failure::Failure;
use oci_spec::runtime::{Hook, Hooks};
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Most bytes of a hook's standard error that a message has.
const SHOWN: usize = 1024;
/// Time after a hook's end for the rest of its standard error, which a descendant may keep open.
const REST: Duration = Duration::from_millis(100);
/// Interval of checks for the end of a hook.
const INTERVAL: Duration = Duration::from_millis(2);

/// Step in the life of a container that has hooks on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// `create` has made the container (`prestart`, `createRuntime`).
    Create,
    /// It was started (`poststart`).
    Started,
    /// It was deleted (`poststop`).
    Deleted,
}

impl Stage {
    /// Returns the lists of hooks and their names in the configuration.
    fn lists(self, hooks: &Hooks) -> Vec<(&'static str, &[Hook])> {
        let lists = match self {
            Self::Create => {
                vec![("prestart", hooks.prestart()), ("createRuntime", hooks.create_runtime())]
            }
            Self::Started => vec![("poststart", hooks.poststart())],
            Self::Deleted => vec![("poststop", hooks.poststop())],
        };
        lists.into_iter().filter_map(|(name, list)| Some((name, list.as_deref()?))).collect()
    }
}

/// Refuses the hooks that would run in the container's namespaces, which are those of a guest.
///
/// # Errors
/// There are such hooks, or the path of one is not absolute.
pub fn check(hooks: &Hooks) -> Result<(), Failure> {
    for (name, list) in
        [("createContainer", hooks.create_container()), ("startContainer", hooks.start_container())]
    {
        if list.as_ref().is_some_and(|list| !list.is_empty()) {
            let text = format!(
                "hooks.{name}: a VM cannot run programs of the host in the container's namespaces"
            );
            return Err(refuse(text).help("createRuntime runs them on the host"));
        }
    }
    for stage in [Stage::Create, Stage::Started, Stage::Deleted] {
        for (name, list) in stage.lists(hooks) {
            if let Some(hook) = list.iter().find(|hook| !hook.path().is_absolute()) {
                let path = hook.path().display();
                return Err(refuse(format!("hooks.{name}: {path} is not an absolute path")));
            }
        }
    }
    Ok(())
}

/// Runs the hooks of a stage, one after the other, with this state.
///
/// # Errors
/// One fails, or does not end within its time limit; the rest are not run.
pub fn run(hooks: Option<&Hooks>, stage: Stage, state: &Value) -> Result<(), Failure> {
    for (name, list) in hooks.map(|hooks| stage.lists(hooks)).unwrap_or_default() {
        for (index, hook) in list.iter().enumerate() {
            // The words of runc.
            let failed = |reason| refuse(format!("error running {name} hook #{index}: {reason}"));
            run_one(hook, state).map_err(failed)?;
        }
    }
    Ok(())
}

/// Runs a hook; returns the reason of its failure.
fn run_one(hook: &Hook, state: &Value) -> Result<(), String> {
    let path = hook.path();
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let mut command = Command::new(path);
    let mut arguments = hook.args().iter().flatten();
    if let Some(first) = arguments.next() {
        command.arg0(first);
    }
    let environment = hook.env().iter().flatten().filter_map(|entry| entry.split_once('='));
    command.args(arguments).env_clear().envs(environment.filter(|(name, _)| !name.is_empty()));
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| failed(&error))?;
    give(&mut child, state.to_string());
    let errors = errors(&mut child);
    // 0 states none.
    let limit = hook.timeout().and_then(|limit| u64::try_from(limit).ok()).filter(|it| *it > 0);
    let status =
        wait(&mut child, limit.map(Duration::from_secs)).map_err(|error| failed(&error))?;
    match status {
        Some(status) if status.success() => Ok(()),
        Some(status) => {
            let text = errors.recv_timeout(REST).unwrap_or_default();
            Err(failed(&format_args!("{status}, stderr: {}", text.trim())))
        }
        None => Err(failed(&format_args!("it did not end within {} s", limit.unwrap_or(0)))),
    }
}

/// Writes the standard input of a hook, which need not read it.
fn give(child: &mut Child, text: String) {
    let Some(mut input) = child.stdin.take() else { return };
    // Without memory for a thread the hook gets nothing, and fails.
    let _ = thread::Builder::new().spawn(move || input.write_all(text.as_bytes()));
}

/// Returns a receiver of the first bytes of a hook's standard error, which is read to its end.
fn errors(child: &mut Child) -> Receiver<String> {
    let (sender, receiver) = channel();
    if let Some(mut stderr) = child.stderr.take() {
        let read = move || {
            let (mut text, mut room) = (Vec::new(), [0; SHOWN]);
            while let Ok(count @ 1..) = stderr.read(&mut room) {
                let rest = SHOWN - text.len();
                text.extend_from_slice(&room[..count.min(rest)]);
            }
            // The hook may have succeeded.
            let _ = sender.send(String::from_utf8_lossy(&text).into_owned());
        };
        // Without memory for a thread the message has less.
        let _ = thread::Builder::new().spawn(read);
    }
    receiver
}

/// Waits for a hook's end; `None`: it had to be killed.
fn wait(child: &mut Child, limit: Option<Duration>) -> std::io::Result<Option<ExitStatus>> {
    let Some(limit) = limit else { return child.wait().map(Some) };
    let until = Instant::now() + limit.min(Duration::from_secs(1 << 32));
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() > until {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn result(hooks: Value, stage: Stage) -> Result<(), String> {
        let hooks: Hooks = serde_json::from_value(hooks).unwrap();
        let done = check(&hooks).and_then(|()| run(Some(&hooks), stage, &json!({ "id": "a" })));
        done.map_err(|failure| crate::report::text(&failure))
    }

    fn shell(script: &str) -> Value {
        json!({ "path": "/bin/sh", "args": ["name", "-c", script], "env": ["A=b"], "timeout": 1 })
    }

    #[test]
    fn hooks_have_the_state_and_their_environment() {
        let script =
            r#"[ "$(cat)" = '{"id":"a"}' ] && [ $A = b ] && [ $0 = name ] && [ -z "$HOME" ]"#;
        assert_eq!(result(json!({ "prestart": [shell(script)] }), Stage::Create), Ok(()));
        let large = json!({ "text": "x".repeat(1 << 20) });
        let hooks = serde_json::from_value(json!({ "poststart": [shell("true")] })).unwrap();
        assert!(run(Some(&hooks), Stage::Started, &large).is_ok(), "nothing is read");
    }

    #[test]
    fn failures_name_the_hook() {
        let hooks = json!({ "createRuntime": [shell("true"), shell("echo why >&2; exit 3")] });
        let text = result(hooks.clone(), Stage::Create).unwrap_err();
        let expected = "error running createRuntime hook #1: /bin/sh: exit status: 3, stderr: why";
        assert_eq!(text, expected);
        assert_eq!(result(hooks, Stage::Deleted), Ok(()), "those of another stage");
        let text = result(json!({ "poststop": [shell("sleep 60")] }), Stage::Deleted).unwrap_err();
        assert!(text.ends_with("it did not end within 1 s"), "{text}");
        let text = result(json!({ "poststart": [{ "path": "/no" }] }), Stage::Started).unwrap_err();
        assert!(text.contains("poststart hook #0: /no: No such file"), "{text}");
    }

    #[test]
    fn hooks_in_the_container_are_refused() {
        let refused = |hooks: Value| result(hooks, Stage::Create).unwrap_err();
        let text = refused(json!({ "startContainer": [{ "path": "/bin/true" }] }));
        assert!(text.starts_with("hooks.startContainer: a VM cannot run"), "{text}");
        let text = refused(json!({ "poststop": [{ "path": "true" }] }));
        assert_eq!(text, "hooks.poststop: true is not an absolute path");
        assert_eq!(result(json!({ "createContainer": [] }), Stage::Create), Ok(()));
    }
}
