//! The commands of the runtime, besides `create`.

use crate::bundle::Bundle;
use crate::carrier::REAL_TIME;
use crate::hooks::Stage;
use crate::line::{Exec, Global, RuntimeCommand, RuntimeLine};
use crate::store::{ContainerRecord, Status, Store};
use crate::{carrier, cgroup, create, hooks, refuse, report, resources, scratch, share, shortage};
use host_linux::sys::{NumberCall, call_with_numbers};
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::input;
use hosted_command::output::print;
use oci_spec::runtime::{Capabilities, Capability, Process};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use signal_hook::consts::SIGCHLD;
use signal_hook::iterator::Signals;
use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::Duration;

/// Version of the specification that states have.
const VERSION: &str = "1.0.2";
/// Time for processes to end after SIGKILL, and for a VM whose carrier has ended.
const ATTEMPTS: u32 = 500;
const INTERVAL: Duration = Duration::from_millis(10);
/// Names of signals, without SIG (signal(7)).
const SIGNALS: [(&str, Signal); 35] = [
    ("HUP", Signal::HUP),
    ("INT", Signal::INT),
    ("QUIT", Signal::QUIT),
    ("ILL", Signal::ILL),
    ("TRAP", Signal::TRAP),
    ("ABRT", Signal::ABORT),
    ("IOT", Signal::ABORT),
    ("BUS", Signal::BUS),
    ("FPE", Signal::FPE),
    ("KILL", Signal::KILL),
    ("USR1", Signal::USR1),
    ("SEGV", Signal::SEGV),
    ("USR2", Signal::USR2),
    ("PIPE", Signal::PIPE),
    ("ALRM", Signal::ALARM),
    ("TERM", Signal::TERM),
    ("STKFLT", Signal::STKFLT),
    ("CHLD", Signal::CHILD),
    ("CLD", Signal::CHILD),
    ("CONT", Signal::CONT),
    ("STOP", Signal::STOP),
    ("TSTP", Signal::TSTP),
    ("TTIN", Signal::TTIN),
    ("TTOU", Signal::TTOU),
    ("URG", Signal::URG),
    ("XCPU", Signal::XCPU),
    ("XFSZ", Signal::XFSZ),
    ("VTALRM", Signal::VTALARM),
    ("PROF", Signal::PROF),
    ("WINCH", Signal::WINCH),
    ("IO", Signal::IO),
    ("POLL", Signal::IO),
    ("PWR", Signal::POWER),
    ("SYS", Signal::SYS),
    ("UNUSED", Signal::SYS),
];

/// Carries out a command and returns the exit code.
///
/// # Errors
/// See the command.
pub fn carry_out(line: &RuntimeLine) -> Result<u8, Failure> {
    let global = &line.global;
    let store = Store::new(global.root.as_deref());
    match &line.command {
        RuntimeCommand::Create(arguments) => create::create(global, arguments, false).map(|_| 0),
        RuntimeCommand::Start { id } => start(global, &store, id).map(|()| 0),
        RuntimeCommand::Run { create: arguments, detach } => {
            // Before there is a container, which must not outlive an interrupted command.
            let passed = (!detach).then(PassedSignals::subscribe).transpose()?;
            let carrier = create::create(global, arguments, !detach)?;
            run(global, &store, &arguments.id, carrier, passed)
        }
        RuntimeCommand::State { id } => {
            let state = store.load(id)?;
            print(format!("{:#}\n", describe(&store, &state))).map(|()| 0)
        }
        RuntimeCommand::Kill { id, signal, all } => kill(&store, id, signal, *all).map(|()| 0),
        RuntimeCommand::Delete { force, id } => delete(global, &store, id, *force).map(|()| 0),
        RuntimeCommand::Exec(arguments) => exec(global, &store, arguments),
        RuntimeCommand::Ps { format, id, .. } => ps(&store, id, format).map(|()| 0),
        RuntimeCommand::List { format, quiet } => list(&store, format, *quiet).map(|()| 0),
        RuntimeCommand::Pause { id } => freeze(&store, id, Status::Running).map(|()| 0),
        RuntimeCommand::Resume { id } => freeze(&store, id, Status::Paused).map(|()| 0),
        RuntimeCommand::Update(arguments) => resources::update(&store, arguments).map(|()| 0),
        RuntimeCommand::Events { stats, interval, id } => {
            resources::events(&store, id, (!stats).then_some(interval.0)).map(|()| 0)
        }
        RuntimeCommand::Features => print(format!("{:#}\n", features())).map(|()| 0),
        RuntimeCommand::Carry(arguments) => carrier::become_carrier(global, arguments),
        RuntimeCommand::Exceed { bytes } => shortage::use_memory(*bytes).map(|()| 0),
    }
}

fn start(global: &Global, store: &Store, id: &str) -> Result<(), Failure> {
    let _lock = store.lock(id)?;
    let state = store.load(id)?;
    match store.status(&state) {
        Status::Created => {}
        Status::Stopped => return Err(refuse("cannot start a container that has stopped")),
        _ => return Err(refuse("cannot start an already running container")),
    }
    carrier::let_start(&state)?;
    let hooks = Bundle::of(store, &state)?.hooks;
    // The container runs: a failure is a warning (OCI runtime specification, "Lifecycle").
    let done = hooks::run(hooks.as_ref(), Stage::Started, &describe(store, &state));
    done.unwrap_or_else(|failure| report::warning(global, &failure));
    Ok(())
}

/// Starts a container that was just created, and waits for its end, during which it gets `passed`
/// signals. Without them it is detached.
fn run(
    global: &Global,
    store: &Store,
    id: &str,
    mut carrier: Child,
    passed: Option<PassedSignals>,
) -> Result<u8, Failure> {
    let started = start(global, store, id);
    let ended = match (&started, passed) {
        (Ok(()), None) => return Ok(0),
        (Ok(()), Some(passed)) => passed.wait(&mut carrier),
        (Err(_), _) => carrier.wait(),
    };
    delete(global, store, id, true)?;
    started?;
    ended.map(exit_code).os_error("wait for the container")
}

/// Signals of a command that waits for its carrier, which has a session of its own.
struct PassedSignals(Signals);

impl PassedSignals {
    fn subscribe() -> Result<Self, Failure> {
        let all = carrier::forwarded().into_iter().chain([SIGCHLD]);
        Signals::new(all).map(Self).os_error("install signal handlers")
    }

    /// Passes signals on until the carrier ends.
    fn wait(mut self, carrier: &mut Child) -> io::Result<ExitStatus> {
        loop {
            if let Some(status) = carrier.try_wait()? {
                return Ok(status);
            }
            for signal in self.0.wait().filter(|signal| *signal != SIGCHLD) {
                // It was not waited for: its number is still its own.
                let arguments = [carrier.id().into(), signal.unsigned_abs().into(), 0, 0];
                let _ = call_with_numbers(NumberCall::Kill, arguments);
            }
        }
    }
}

/// Returns the state of a container for engines.
pub fn describe(store: &Store, state: &ContainerRecord) -> Value {
    let status = store.status(state);
    let carrier = state.carrier.filter(|_| status != Status::Stopped);
    json!({
        "ociVersion": VERSION,
        "id": state.id,
        "pid": carrier.map_or(0, |carrier| carrier.pid),
        "status": status.word(),
        "bundle": state.bundle,
        "rootfs": state.rootfs,
        "created": state.created,
        "owner": "",
        "annotations": state.annotations,
    })
}

/// Sends a signal to the process of a container. `is_for_all`: it may have ended, since all of its
/// processes have then.
fn kill(store: &Store, id: &str, signal: &str, is_for_all: bool) -> Result<(), Failure> {
    let state = store.load(id)?;
    let signal = parse_signal(signal)?;
    if is_for_all && store.status(&state) == Status::Stopped {
        return Ok(());
    }
    let carrier = state.carrier.and_then(|carrier| carrier.pid());
    let carrier = carrier.ok_or_else(|| refuse("container not running"))?;
    if signal == Signal::KILL.as_raw() {
        cgroup::freeze(&state.cgroups, false)?;
    }
    let arguments = [carrier.as_raw_pid(), signal].map(i32::unsigned_abs).map(u64::from);
    let sent = call_with_numbers(NumberCall::Kill, [arguments[0], arguments[1], 0, 0]);
    let sent = sent.map_err(|error| io::Error::from_raw_os_error(error.0));
    sent.map(drop).os_error("send the signal")
}

/// Reads a signal: its number, or its name with or without SIG, also relative to the first or last
/// real-time signal. Returns the number.
fn parse_signal(text: &str) -> Result<i32, Failure> {
    let wrong = || refuse(format!("unknown signal {text:?}"));
    let upper = text.to_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let offset = |text: &str| text.is_empty().then_some(0).or_else(|| text.parse().ok());
    let number = if let Some(after) = name.strip_prefix("RTMIN") {
        offset(after).and_then(|offset: i32| REAL_TIME.start().checked_add(offset))
    } else if let Some(before) = name.strip_prefix("RTMAX") {
        offset(before).and_then(|offset: i32| REAL_TIME.end().checked_add(offset))
    } else {
        let known = SIGNALS.iter().find(|(known, _)| *known == name);
        return match (known, text.parse()) {
            (Some((_, signal)), _) => Ok(signal.as_raw()),
            (None, Ok(number)) if is_signal(number) => Ok(number),
            _ => Err(wrong()),
        };
    };
    number.filter(|number| REAL_TIME.contains(number)).ok_or_else(wrong)
}

fn is_signal(number: i32) -> bool {
    Signal::from_named_raw(number).is_some() || REAL_TIME.contains(&number)
}

fn delete(global: &Global, store: &Store, id: &str, is_forced: bool) -> Result<(), Failure> {
    if is_forced && !store.folder(id)?.exists() {
        return Ok(());
    }
    let _lock = match store.lock(id) {
        // Another command has deleted it.
        Err(_) if is_forced && !store.folder(id)?.exists() => return Ok(()),
        lock => lock?,
    };
    let state = match store.load(id) {
        Ok(state) => state,
        // A killed `create` has left the folder.
        Err(_) if is_forced => return store.remove(id),
        Err(failure) => return Err(failure),
    };
    match store.status(&state) {
        Status::Stopped => {}
        // It has no process yet.
        Status::Created => kill_carrier(&state)?,
        _ if is_forced => kill_carrier(&state)?,
        status => {
            let status = status.word();
            let text = format!("cannot delete container {id} that is not stopped: {status}");
            return Err(refuse(text));
        }
    }
    // A killed `create` may not have kept it.
    let hooks = Bundle::of(store, &state).ok().and_then(|bundle| bundle.hooks);
    remove(store, id)?;
    let last = describe(store, &state);
    let done = hooks::run(hooks.as_ref(), Stage::Deleted, &last);
    done.unwrap_or_else(|failure| report::warning(global, &failure));
    Ok(())
}

/// Kills the carrier of a container, and waits for its end.
fn kill_carrier(state: &ContainerRecord) -> Result<(), Failure> {
    cgroup::freeze(&state.cgroups, false)?;
    let Some(carrier) = state.carrier else { return Ok(()) };
    if let Some(pid) = carrier.pid() {
        // It may have ended meanwhile.
        let _ = kill_process(pid, Signal::KILL);
    }
    match wait_until(|| !carrier.is_alive()) {
        true => Ok(()),
        false => Err(refuse("the carrier does not end")),
    }
}

fn wait_until(mut is_so: impl FnMut() -> bool) -> bool {
    (0..ATTEMPTS).any(|_| {
        let is_now = is_so();
        if !is_now {
            thread::sleep(INTERVAL);
        }
        is_now
    })
}

/// Removes everything that a container has on the host, once its VM has ended.
///
/// # Errors
/// The VM does not end, or something cannot be removed.
pub fn remove(store: &Store, id: &str) -> Result<(), Failure> {
    // `create` may have failed before it was written.
    let Ok(state) = store.load(id) else { return store.remove(id) };
    let has_own_vm = state.has_own_vm();
    let vm = carrier::vm_process(&state.vm_folder).filter(|_| has_own_vm);
    if let Some(vm) = vm
        && !wait_until(|| !vm.is_alive())
    {
        if let Some(pid) = vm.pid() {
            let _ = kill_process(pid, Signal::KILL);
        }
        if !wait_until(|| !vm.is_alive()) {
            return Err(refuse("the VM does not end"));
        }
    }
    if has_own_vm {
        release_members(store, &state)?;
    }
    if let Some(disk) = state.vm_scratch.as_deref().filter(|_| has_own_vm) {
        scratch::remove(disk)?;
    }
    share::unmount_all(&state.vm_folder, id)?;
    if has_own_vm {
        share::unmount_shared(&state.vm_folder)?;
    }
    cgroup::remove(&state.cgroups)?;
    remove_folder(&state.folder)?;
    store.remove(id)
}

/// Ends the containers that have run in the VM of a sandbox, which has ended, and removes their
/// mounts below its folder. They are stopped then, and the engine deletes them later.
fn release_members(store: &Store, sandbox: &ContainerRecord) -> Result<(), Failure> {
    for id in store.ids() {
        let is_member = |state: &ContainerRecord| {
            state.id != sandbox.id && state.vm_folder == sandbox.vm_folder
        };
        if !store.load(&id).is_ok_and(|state| is_member(&state)) {
            continue;
        }
        // One that is deleted at this moment has no lock or no state any more.
        let Ok(_lock) = store.lock(&id) else { continue };
        let Ok(member) = store.load(&id) else { continue };
        cgroup::freeze(&member.cgroups, false)?;
        // By itself it ends with 255.
        if !wait_until(|| member.carrier.is_none_or(|carrier| !carrier.is_alive())) {
            kill_carrier(&member)?;
        }
        share::unmount_all(&member.vm_folder, &id)?;
    }
    Ok(())
}

/// Removes a container's folder: its files, and empty folders only, since mounts may be below.
fn remove_folder(folder: &Path) -> Result<(), Failure> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.file_error("read", folder)?,
    };
    for entry in entries.flatten() {
        let path = entry.path();
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let removed = if is_folder { fs::remove_dir(&path) } else { fs::remove_file(&path) };
        removed.file_error("remove", &path)?;
    }
    fs::remove_dir(folder).file_error("remove", folder)
}

fn exec(global: &Global, store: &Store, arguments: &Exec) -> Result<u8, Failure> {
    let state = store.load(&arguments.id)?;
    match store.status(&state) {
        Status::Running => {}
        Status::Stopped => return Err(refuse("cannot exec in a stopped container")),
        status => {
            let text = format!("cannot exec in a container that is {}", status.word());
            return Err(refuse(text));
        }
    }
    if arguments.preserve_fds > 0 {
        return Err(refuse("a VM cannot take descriptors of the host (--preserve-fds)"));
    }
    let process = process(store, &state, arguments)?;
    if !arguments.detach && arguments.console_socket.is_none() && arguments.pid_file.is_none() {
        return carrier::carry_here(store, &state, &process);
    }
    let file = state.folder.join(format!("exec-{}", std::process::id()));
    let text = serde_json::to_vec(&process).map_err(|error| refuse(error.to_string()))?;
    fs::write(&file, text).file_error("write", &file)?;
    let console = arguments.console_socket.as_deref();
    let passed = (!arguments.detach).then(PassedSignals::subscribe).transpose()?;
    let started = carrier::start(global, &state, console, Some(&file));
    // The carrier removes it, unless it could not be started.
    let _ = fs::remove_file(&file);
    let mut started = create::write_pid(arguments.pid_file.as_deref(), started?)?;
    match passed {
        None => Ok(0),
        Some(passed) => Ok(exit_code(passed.wait(&mut started).os_error("wait for the process")?)),
    }
}

/// Returns the exit code of a carrier that has ended: its own, or 128 and the signal that has ended
/// it.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

/// Returns the process of the options: that of a file, or the container's with another command.
fn process(store: &Store, state: &ContainerRecord, arguments: &Exec) -> Result<Process, Failure> {
    if let Some(file) = &arguments.process {
        let text = input::regular(file)?;
        let mut process: Process = serde_json::from_slice(&text)
            .map_err(|error| refuse(format!("{}: {error}", file.display())))?;
        if arguments.tty {
            process.set_terminal(Some(true));
        }
        return Ok(process);
    }
    if arguments.command.is_empty() {
        return Err(refuse("the command is missing"));
    }
    let mut process = Bundle::of(store, state)?.process;
    process.set_args(Some(arguments.command.clone()));
    process.set_terminal(Some(arguments.tty));
    let mut environment = process.env().clone().unwrap_or_default();
    environment.extend(arguments.env.iter().cloned());
    process.set_env(Some(environment));
    add_capabilities(&mut process, &arguments.cap)?;
    if arguments.no_new_privs {
        process.set_no_new_privileges(Some(true));
    }
    if let Some(folder) = &arguments.cwd {
        process.set_cwd(folder.clone());
    }
    if let Some(user) = &arguments.user {
        let (user, group) =
            user.split_once(':').map_or((&**user, None), |(user, group)| (user, Some(group)));
        let number = |text: &str| {
            text.parse().map_err(|_| refuse(format!("{text:?} is not the number of a user")))
        };
        process.user_mut().set_uid(number(user)?);
        // Without one, that of the container.
        if let Some(group) = group {
            process.user_mut().set_gid(number(group)?);
        }
    }
    Ok(process)
}

/// Adds capabilities, named with or without CAP_, to those that a process has, as runc does: they
/// are not inheritable.
fn add_capabilities(process: &mut Process, names: &[String]) -> Result<(), Failure> {
    let unknown = |name: &str| refuse(format!("unknown capability {name:?}"));
    let parse = |name: &String| -> Result<Capability, Failure> {
        let upper = name.to_uppercase();
        let full = format!("CAP_{}", upper.strip_prefix("CAP_").unwrap_or(&upper));
        serde_json::from_value(json!(full)).map_err(|_| unknown(name))
    };
    let added = names.iter().map(parse).collect::<Result<Capabilities, _>>()?;
    if added.is_empty() {
        return Ok(());
    }
    let none = || serde_json::from_value(json!({}));
    let mut all = process.capabilities().clone().map_or_else(none, Ok).map_err(|error| {
        Failure::new(failure::INTERNAL, format!("cannot make a set of capabilities: {error}"))
    })?;
    let joined = |set: &Option<Capabilities>| {
        Some(set.iter().flatten().chain(&added).copied().collect::<Capabilities>())
    };
    let sets = [all.bounding(), all.effective(), all.permitted()].map(joined);
    let [bounding, effective, permitted] = sets;
    all.set_bounding(bounding).set_effective(effective).set_permitted(permitted);
    process.set_capabilities(Some(all));
    Ok(())
}

fn ps(store: &Store, id: &str, format: &str) -> Result<(), Failure> {
    let state = store.load(id)?;
    let carrier = state.carrier.filter(|carrier| carrier.is_alive());
    let all: Vec<i32> = carrier.into_iter().map(|carrier| carrier.pid).collect();
    match format {
        "json" => print(format!("{}\n", json!(all))),
        _ => print(all.iter().fold("PID\n".to_owned(), |text, pid| format!("{text}{pid}\n"))),
    }
}

fn list(store: &Store, format: &str, is_quiet: bool) -> Result<(), Failure> {
    // One that is created or deleted at this moment has no state.
    let states: Vec<ContainerRecord> =
        store.ids().iter().filter_map(|id| store.load(id).ok()).collect();
    if is_quiet {
        return print(states.iter().map(|state| format!("{}\n", state.id)).collect::<String>());
    }
    let all: Vec<Value> = states.iter().map(|state| describe(store, state)).collect();
    if format == "json" {
        return print(format!("{}\n", json!(all)));
    }
    let mut text = format!("{:<24} {:<8} {:<9} {:<24} BUNDLE\n", "ID", "PID", "STATUS", "CREATED");
    for one in &all {
        let [id, status, created, bundle] =
            ["id", "status", "created", "bundle"].map(|name| one[name].as_str().unwrap_or("-"));
        text += &format!("{id:<24} {:<8} {status:<9} {created:<24} {bundle}\n", one["pid"]);
    }
    print(text)
}

fn freeze(store: &Store, id: &str, expected: Status) -> Result<(), Failure> {
    let _lock = store.lock(id)?;
    let state = store.load(id)?;
    let status = store.status(&state);
    if status != expected {
        let text = format!("the container is {}, not {}", status.word(), expected.word());
        return Err(refuse(text));
    }
    if !state.has_own_vm() {
        let text = "a container in the VM of its sandbox cannot be paused alone: pause the sandbox";
        return Err(refuse(text));
    }
    match cgroup::freeze(&state.cgroups, expected == Status::Running)? {
        true => Ok(()),
        false => Err(refuse("the container has no cgroup that can be frozen")),
    }
}

/// Returns the features of the runtime.
fn features() -> Value {
    json!({
        "ociVersionMin": "1.0.0",
        "ociVersionMax": VERSION,
        "hooks": ["prestart", "createRuntime", "poststart", "poststop"],
        "linux": {
            "namespaces": ["cgroup", "ipc", "mount", "network", "pid", "uts"],
            "cgroup": { "v1": true, "v2": true, "systemd": true },
            "seccomp": { "enabled": true },
            "apparmor": { "enabled": false },
            "selinux": { "enabled": false },
        },
        "annotations": { "dev.parador.vm": "true" },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_numbers_and_names() {
        for text in ["15", "TERM", "SIGTERM", "term"] {
            assert_eq!(parse_signal(text).unwrap(), 15);
        }
        for (text, number) in [
            ("37", 37),
            ("SIGRTMIN+3", 37),
            ("rtmin", 34),
            ("RTMAX-1", 63),
            ("CHLD", 17),
            ("SYS", 31),
            ("64", 64),
        ] {
            assert_eq!(parse_signal(text).unwrap(), number, "{text}");
        }
        for wrong in ["", "0", "99", "SIGNONE", "RTMIN+31", "RTMIN-1", "RTMAX+1", "RTMINx", "33"] {
            assert!(parse_signal(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn capabilities_are_added() {
        let process = json!({ "user": {}, "args": ["a"], "cwd": "/",
            "capabilities": { "bounding": ["CAP_CHOWN"], "inheritable": [] } });
        let mut process: Process = serde_json::from_value(process).unwrap();
        add_capabilities(&mut process, &["net_admin".into(), "CAP_CHOWN".into()]).unwrap();
        let all = process.capabilities().clone().unwrap();
        let sizes = [all.bounding(), all.effective(), all.permitted(), all.inheritable()]
            .map(|set| set.as_ref().map_or(0, Capabilities::len));
        assert_eq!(sizes, [2, 2, 2, 0]);
        let wrong = add_capabilities(&mut process, &["CAP_NO".into()]).unwrap_err();
        assert_eq!(report::text(&wrong), "unknown capability \"CAP_NO\"");
    }

    #[test]
    fn what_may_be_mounted_below_stays() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("own");
        fs::create_dir_all(own.join("share/a")).unwrap();
        assert!(remove_folder(&own).is_err());
        assert!(own.join("share/a").exists());
        fs::remove_dir(own.join("share/a")).unwrap();
        fs::write(own.join("file"), "").unwrap();
        remove_folder(&own).unwrap();
        remove_folder(&own).unwrap();
    }
}
