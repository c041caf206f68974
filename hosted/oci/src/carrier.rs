//! Carriers: the process that represents a container for the engine, and that of another process
//! in it.
//!
//! A carrier reports to the process that has started it over a socket: `ok`, or why it failed. That
//! of a container then listens at `start` in the container's folder, and answers in the same way.

use crate::bundle::Bundle;
use crate::line::{Carry, Global};
use crate::message::{ContainerMessage, ProcessMessage};
use crate::mounts::MountPlan;
use crate::network::{PodNetwork, VmNetwork};
use crate::store::{ContainerRecord, ProcessId, Store};
use crate::view::View;
use crate::{
    balloon, cgroup, forward, refuse, report, resolver, scratch, share, shortage, terminal,
};
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::input;
use hosted_command::messages::to_stderr;
use hosted_command::proc_number;
use hosted_command::supervise;
use hosted_exec::carrier::{Carried, Carrier};
use hosted_exec::connection::connect_to_agent;
use hosted_exec::vm::{self, AgentVm};
use hosted_monitor::config::Config;
use hosted_monitor::config::share::{ShareConfig, Tag};
use hosted_monitor::config::vm::VmConfig;
use nix::sched::{CloneFlags, unshare};
use oci_spec::runtime::Process;
use proto::agent::{AgentRequest, Guest, POD, Purpose, Root};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, kill_process, setsid};
use signal_hook::consts::{
    SIGABRT, SIGALRM, SIGCONT, SIGHUP, SIGINT, SIGIO, SIGPROF, SIGQUIT, SIGTERM, SIGTRAP, SIGUSR1,
    SIGUSR2, SIGVTALRM, SIGWINCH,
};
use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

/// Signals that containers get, besides the real-time signals: all that a carrier does not get for
/// a reason of its own.
const FORWARDED: [i32; 14] = [
    SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT, SIGALRM, SIGABRT, SIGIO,
    SIGPROF, SIGTRAP, SIGVTALRM,
];
/// Real-time signals for programs: 32 and 33 are the C library's.
pub const REAL_TIME: RangeInclusive<i32> = 34..=64;
/// Exit code of a container whose VM failed.
const LOST: u8 = 255;
/// Mount tag of the shared directory.
const TAG: &str = "pod";
/// File in the VM's folder with its process.
const VM: &str = "process";
/// Socket in a container's folder at which its carrier waits.
const START: &str = "start";
/// Answer of success.
const OK: &str = "ok";
/// Interval of checks while a carrier waits.
const INTERVAL: Duration = Duration::from_millis(50);
/// Interval of checks for a carrier's report.
const REPORT: Duration = Duration::from_millis(2);

/// Starts the carrier of a container, or of another process in it, and waits for its report.
///
/// # Errors
/// It fails, for the reason that it reports.
pub fn start(
    global: &Global,
    state: &ContainerRecord,
    console: Option<&Path>,
    process: Option<&Path>,
) -> Result<Child, Failure> {
    let socket = state.folder.join(format!("report-{}", std::process::id()));
    let listener = UnixListener::bind(&socket).file_error("listen at", &socket)?;
    let mut command = Command::new(supervise::SELF);
    command.arg("oci").arg("--root").arg(Store::new(global.root.as_deref()).root());
    if let Some(kernel) = &global.kernel {
        command.arg("--kernel").arg(kernel);
    }
    if let Some(backend) = clap_name(global) {
        command.arg("--backend").arg(backend);
    }
    global.programs.pass(&mut command);
    command.arg("carry").arg(&state.id).arg("--report").arg(&socket);
    for (option, path) in [("--console-socket", console), ("--process", process)] {
        if let Some(path) = path {
            command.arg(option).arg(path);
        }
    }
    let is_first = process.is_none() && state.has_own_vm();
    let mut child = spawn(command, is_first).start_error("the carrier")?;
    let reported = wait_for_report(&listener, &mut child);
    let _ = fs::remove_file(&socket);
    if reported.is_err() {
        // It ends after its report; `delete` waits for it otherwise.
        let _ = child.wait();
    }
    reported.map(|()| child)
}

/// Starts a carrier; that of a VM is the first process of a PID namespace (`is_first`), which has
/// the VM, too: all of its processes end with the carrier. Besides, `podman cp` enters the PID
/// namespace of a container's process, and for an ordinary user the kernel refuses the host's.
///
/// The carrier of a container in the VM of a sandbox stays outside, since it may have to end a VM
/// that is not its descendant.
fn spawn(mut command: Command, is_first: bool) -> io::Result<Child> {
    if !is_first {
        return command.spawn();
    }
    let in_namespace = move || {
        // It concerns the children of this thread.
        unshare(CloneFlags::CLONE_NEWPID)?;
        command.spawn()
    };
    let spawned = thread::Builder::new().spawn(in_namespace)?.join();
    spawned.unwrap_or_else(|_| Err(io::Error::other("a thread has panicked")))
}

/// Returns the signals that containers get.
pub fn forwarded() -> Vec<i32> {
    FORWARDED.into_iter().chain(REAL_TIME).collect()
}

fn clap_name(global: &Global) -> Option<String> {
    use clap::ValueEnum;
    Some(global.backend?.to_possible_value()?.get_name().to_owned())
}

fn wait_for_report(listener: &UnixListener, child: &mut Child) -> Result<(), Failure> {
    listener.set_nonblocking(true).os_error("wait for the carrier")?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).os_error("wait for the carrier")?;
                return answer(stream, "the carrier");
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(Failure::os("wait for the carrier", &error)),
        }
        if let Ok(Some(status)) = child.try_wait() {
            return Err(refuse(format!("the carrier has ended ({status})")));
        }
        thread::sleep(REPORT);
    }
}

/// Receives `ok` or the reason of a failure.
fn answer(mut stream: UnixStream, of: &str) -> Result<(), Failure> {
    let mut text = String::new();
    stream.read_to_string(&mut text).os_error("receive the answer of the carrier")?;
    match &*text {
        OK => Ok(()),
        "" => Err(refuse(format!("{of} has ended"))),
        text => Err(refuse(text)),
    }
}

/// Sends `ok` or the reason of a failure.
fn send<T>(mut stream: &UnixStream, result: &Result<T, Failure>) -> io::Result<()> {
    let text = match result {
        Ok(_) => OK.to_owned(),
        Err(failure) => report::text(failure),
    };
    stream.write_all(text.as_bytes())?;
    stream.shutdown(Shutdown::Both)
}

/// Lets the carrier of a container start it.
///
/// # Errors
/// The carrier has ended, or the program cannot be started.
pub fn let_start(state: &ContainerRecord) -> Result<(), Failure> {
    let socket = state.folder.join(START);
    let stream = UnixStream::connect(&socket).file_error("connect to", &socket)?;
    answer(stream, "the container")
}

/// Returns the process of a VM; `None`: it was not started.
pub fn vm_process(vm_folder: &Path) -> Option<ProcessId> {
    serde_json::from_slice(&input::regular(&vm_folder.join(VM)).ok()?).ok()
}

/// Becomes a carrier; returns the exit code.
///
/// # Errors
/// The process that has started it cannot be reached.
pub fn become_carrier(global: &Global, carry: &Carry) -> Result<u8, Failure> {
    let reporter = UnixStream::connect(&carry.report).file_error("connect to", &carry.report)?;
    // It fails if it leads a session already, which is as good.
    let _ = setsid();
    let store = Store::new(global.root.as_deref());
    Ok(match &carry.process {
        None => container_beside_view(global, &store, carry, &reporter),
        Some(file) => member(&store, carry, file, &reporter),
    })
}

/// Carries a container in a second thread, while this one, the first, has the namespaces that
/// engines enter; returns the exit code.
fn container_beside_view(
    global: &Global,
    store: &Store,
    carry: &Carry,
    reporter: &UnixStream,
) -> u8 {
    let (send_view, view) = sync_channel::<View>(1);
    let (send_result, result) = sync_channel(1);
    thread::scope(|scope| {
        let carried = thread::Builder::new().spawn_scoped(scope, move || {
            let enter = |view: View| {
                // The other thread waits for it, and answers.
                send_view.send(view).ok();
                let gone = || refuse("the carrier's first thread has ended");
                result.recv().map_err(|_| gone()).and_then(|entered| entered)
            };
            container(global, store, carry, reporter, enter)
        });
        let Ok(carried) = carried else {
            let _ = send(reporter, &Err::<(), _>(refuse("cannot create a thread")));
            return LOST;
        };
        if let Ok(view) = view.recv() {
            let _ = send_result.send(view.enter());
        }
        // A panic of the thread has been reported.
        carried.join().unwrap_or(LOST)
    })
}

/// Carries a container; returns the exit code. `enter` lets the first thread enter its view.
fn container(
    global: &Global,
    store: &Store,
    carry: &Carry,
    reporter: &UnixStream,
    enter: impl FnOnce(View) -> Result<(), Failure>,
) -> u8 {
    let prepared = Container::prepare(global, store, carry, enter);
    let is_reported = send(reporter, &prepared).is_ok();
    let Ok(container) = prepared else { return LOST };
    let Container { mut vm, network, carrier, listener, sandbox, cgroups } = container;
    // Without the process that has started it, no engine knows of the container.
    let carried = match is_reported {
        true => {
            let note = || store.note_start(&carry.id);
            wait_and_carry(&mut vm, &network, carrier, listener, note)
        }
        false => Ok(Carried { code: LOST, lacked_memory: false }),
    };
    if let Err(failure) = &carried
        && is_of_agent(failure)
        && let Some(vm) = sandbox.and_then(ProcessId::pid)
    {
        // The VM may have ended, and this process is not its parent.
        let _ = kill_process(vm, Signal::TERM);
    }
    match carried {
        Ok(Carried { lacked_memory: true, .. }) => {
            vm.end();
            shortage::report(&cgroups);
        }
        // The engine does its part meanwhile; `delete` waits for the end.
        _ => vm.let_end(),
    }
    exit_code(carried)
}

/// Returns whether a failure is that of the agent, which serves none of its containers then: it
/// sends malformed messages, or ends connections. A program that cannot be started, and a failure
/// of this host, such as a full disk, concern one container.
fn is_of_agent(failure: &Failure) -> bool {
    failure.code() == failure::INTERNAL
}

fn exit_code(carried: Result<Carried, Failure>) -> u8 {
    carried.map(|carried| carried.code).unwrap_or_else(|failure| {
        to_stderr(format_args!("parador-oci: {}\n", report::text(&failure)));
        LOST
    })
}

/// A container that waits to be started.
struct Container {
    vm: AgentVm,
    network: ContainerNetwork,
    carrier: Carrier,
    listener: UnixListener,
    /// Process of the VM if it is that of a sandbox.
    sandbox: Option<ProcessId>,
    /// Cgroups of the container on the host.
    cgroups: Vec<PathBuf>,
}

/// Network of a container, for its start.
struct ContainerNetwork {
    of_vm: VmNetwork,
    /// File systems of the container, of which one may have the engine's list of name servers.
    mounts: Vec<MountPlan>,
    /// Folder of the VM of a pod, whose engine connects to `localhost` in the network namespace.
    pod: Option<PathBuf>,
}

impl Container {
    fn prepare(
        global: &Global,
        store: &Store,
        carry: &Carry,
        enter: impl FnOnce(View) -> Result<(), Failure>,
    ) -> Result<Self, Failure> {
        let mut state = store.load(&carry.id)?;
        state.carrier = ProcessId::of(proc_number::own());
        store.save(&state)?;
        let bundle = Bundle::of(store, &state)?;
        if let Some(socket) = &carry.console_socket {
            terminal::give(socket, bundle.process.console_size().as_ref())?;
        }
        enter_cgroups(store, &mut state, &bundle)?;
        set_oom_score(&bundle);
        let mut vm = match bundle.sandbox {
            Some(_) => (AgentVm::attach(state.vm_folder.clone()), VmNetwork::Missing),
            None => start_vm(global, &state, &bundle)?,
        };
        let created = Self::create(&mut vm, &state, &bundle);
        // The guest has made the mount points.
        let created = created.and_then(|created| {
            if bundle.is_read_only {
                share::protect_root(&state.vm_folder, &state.id)?;
            }
            enter(View::new(&state, &bundle)?).map(|()| created)
        });
        match created {
            Ok((carrier, listener)) => {
                let is_member = bundle.sandbox.is_some();
                let sandbox = vm_process(&state.vm_folder).filter(|_| is_member);
                let pod = bundle.is_sandbox.then(|| state.vm_folder.clone());
                let network = ContainerNetwork { of_vm: vm.1, mounts: bundle.mounts, pod };
                let cgroups = state.cgroups;
                Ok(Self { vm: vm.0, network, carrier, listener, sandbox, cgroups })
            }
            Err(failure) => {
                vm.0.end();
                Err(failure)
            }
        }
    }

    fn create(
        (vm, network): &mut (AgentVm, VmNetwork),
        state: &ContainerRecord,
        bundle: &Bundle,
    ) -> Result<(Carrier, UnixListener), Failure> {
        let is_own = bundle.sandbox.is_none();
        let found = match network {
            VmNetwork::Found(network) => Some(network),
            VmNetwork::Missing | VmNetwork::Awaited => None,
        };
        let modules = share::modules_of(&state.vm_folder, &state.id);
        let modules = modules.map(|modules| Path::new(POD).join(modules)).unwrap_or_default();
        let set_up = AgentRequest::Configure(Guest {
            name: if bundle.hostname.is_empty() { "parador" } else { &bundle.hostname },
            root: Root::Pod {
                tag: TAG,
                has_scratch: state.vm_scratch.is_some(),
                modules: modules.as_os_str().as_bytes(),
            },
            mounts: heapless::Vec::new(),
            network: found.as_ref().map(|network| network.guest.clone()),
        });
        let has_terminal = bundle.process.terminal().unwrap_or_default();
        let set_up = is_own.then_some(&set_up);
        let connected =
            Carrier::connect(vm, bundle.agent_timeout, None, &forwarded(), has_terminal, set_up)?;
        let carrier = connected
            .map_err(|code| refuse(format!("a signal has ended the carrier (exit code {code})")))?;
        if let Some(network) = found {
            network.connect()?;
        }
        let message = ContainerMessage::new(state, bundle)?;
        let request = AgentRequest::Create(message.message(carrier.terminal())?);
        carrier.request(vm, &request)?;
        let socket = state.folder.join(START);
        let listener = UnixListener::bind(&socket).file_error("listen at", &socket)?;
        Ok((carrier, listener))
    }
}

/// Sets the score of this process and of its VM for the host's OOM killer. That of a sandbox is for
/// its process alone; its VM has the memory of all containers.
fn set_oom_score(bundle: &Bundle) {
    let score = match (&bundle.sandbox, bundle.is_sandbox) {
        (Some(_), _) => None,
        (None, true) => Some(0),
        (None, false) => bundle.process.oom_score_adj(),
    };
    if let Some(score) = score {
        // An ordinary user cannot lower it.
        let _ = fs::write("/proc/self/oom_score_adj", score.to_string());
    }
}

/// Moves this process to the cgroups of its container.
fn enter_cgroups(
    store: &Store,
    state: &mut ContainerRecord,
    bundle: &Bundle,
) -> Result<(), Failure> {
    if let Some(scope) = &state.scope {
        // Of version 1, systemd makes the cgroup in its own hierarchy only.
        state.cgroups = cgroup::places(&scope.enter(&bundle.host_limits)?);
        store.save(state)?;
        state.cgroups = cgroup::make(&state.cgroups)?;
        store.save(state)?;
        cgroup::limit(&state.cgroups, &bundle.host_limits)?;
        if state.has_own_vm() {
            cgroup::confine(&state.cgroups, &bundle.cpu_set)?;
        }
    }
    cgroup::join(&state.cgroups)
}

/// Starts the VM of a container, in its network namespace.
fn start_vm(
    global: &Global,
    state: &ContainerRecord,
    bundle: &Bundle,
) -> Result<(AgentVm, VmNetwork), Failure> {
    let network = VmNetwork::enter(bundle.network.as_deref())?;
    let vm = VmConfig {
        kernel: global.kernel.clone(),
        memory: Some(bundle.memory),
        cpus: Some(bundle.cpus),
        backend: global.backend,
        api_socket: Some(balloon::socket(&state.vm_folder)),
        ..VmConfig::default()
    };
    let share = ShareConfig {
        path: share::path(&state.vm_folder),
        tag: Tag::try_from(TAG.to_owned()).map_err(refuse)?,
        ro: false,
        owners: true,
    };
    let scratch = state.vm_scratch.as_deref().zip(bundle.scratch);
    let scratch = scratch.map(|(path, size)| scratch::make(path, size)).transpose()?;
    let config = Config {
        disk: scratch.into_iter().collect(),
        share: vec![share],
        net: network.card()?.into_iter().collect(),
        ..vm::describe(&state.vm_folder, vm)?
    };
    let vm = AgentVm::start(&state.vm_folder, &config, &global.programs)?;
    let process = vm.pid().and_then(ProcessId::of);
    let file = state.vm_folder.join(VM);
    let text = serde_json::to_vec(&process).map_err(|error| refuse(error.to_string()));
    let written = text.and_then(|text| fs::write(&file, text).file_error("write", &file));
    match written {
        Ok(()) => Ok((vm, network)),
        Err(failure) => {
            vm.end();
            Err(failure)
        }
    }
}

/// Waits until the container is to be started, notes that, and carries it to its end.
fn wait_and_carry(
    vm: &mut AgentVm,
    network: &ContainerNetwork,
    mut carrier: Carrier,
    listener: UnixListener,
    note: impl FnOnce() -> Result<(), Failure>,
) -> Result<Carried, Failure> {
    let stream = loop {
        if let Some(code) = carrier.early_end() {
            return Ok(Carried { code, lacked_memory: false });
        }
        let watched = [listener.as_fd(), carrier.control()];
        let mut waiting = watched.map(|it| PollFd::from_borrowed_fd(it, PollFlags::IN));
        let limit = Timespec::try_from(INTERVAL).ok();
        // A signal interrupts it.
        let _ = poll(&mut waiting, limit.as_ref());
        let [is_started, has_ended] = waiting.map(|it| !it.revents().is_empty());
        if has_ended || vm.has_ended() {
            return Err(vm.failure("the VM has ended before the container was started"));
        }
        if is_started {
            break listener.accept().os_error("wait for the start")?.0;
        }
    };
    // A further `start` must not wait for an answer.
    drop(listener);
    let started = network
        .connect(vm, &carrier)
        .and_then(|()| carrier.request(vm, &AgentRequest::Run))
        .and_then(|()| note());
    // The process that wants the start may have been killed; the container has started.
    let _ = send(&stream, &started);
    started?;
    carrier.carry(vm, None)
}

impl ContainerNetwork {
    /// Lets the guest take over the network that the engine has set up after `create`, or removes
    /// its card if there is none. A name server of the network namespace answers to the guest.
    fn connect(&self, vm: &mut AgentVm, carrier: &Carrier) -> Result<(), Failure> {
        match self.of_vm {
            VmNetwork::Missing => return Ok(()),
            VmNetwork::Found(_) => {}
            VmNetwork::Awaited => {
                let found = PodNetwork::find_late()?;
                if let Some(network) = &found {
                    network.connect()?;
                }
                carrier.request(vm, &AgentRequest::Connect(found.map(PodNetwork::with_mac)))?;
            }
        }
        self.pod.clone().map_or(Ok(()), forward::start)?;
        let Some(address) = resolver::find(&self.mounts) else { return Ok(()) };
        resolver::relay(connect_to_agent(vm, Purpose::Resolver { address })?, address)
    }
}

/// Carries another process of a container; returns the exit code.
fn member(store: &Store, carry: &Carry, file: &Path, reporter: &UnixStream) -> u8 {
    let prepare = || {
        let text = input::regular(file)?;
        fs::remove_file(file).file_error("remove", file)?;
        let process: Process = serde_json::from_slice(&text)
            .map_err(|error| refuse(format!("{}: {error}", file.display())))?;
        if let Some(socket) = &carry.console_socket {
            terminal::give(socket, process.console_size().as_ref())?;
        }
        enter(store, &store.load(&carry.id)?, &process)
    };
    let entered = prepare();
    let is_reported = send(reporter, &entered).is_ok();
    match entered {
        Ok((mut vm, carrier)) if is_reported => exit_code(carrier.carry(&mut vm, None)),
        _ => LOST,
    }
}

/// Starts another process in a container. It ends with this process.
fn enter(
    store: &Store,
    state: &ContainerRecord,
    process: &Process,
) -> Result<(AgentVm, Carrier), Failure> {
    cgroup::join(&state.cgroups)?;
    let bundle = Bundle::of(store, state)?;
    let mut vm = AgentVm::attach(state.vm_folder.clone());
    let has_terminal = process.terminal().unwrap_or_default();
    let connected =
        Carrier::connect(&mut vm, bundle.agent_timeout, None, &forwarded(), has_terminal, None)?;
    let carrier =
        connected.map_err(|code| refuse(format!("a signal has ended the carrier ({code})")))?;
    let message = ProcessMessage::new(process, &bundle.process, &bundle.linux)?;
    let process = message.message(carrier.terminal())?;
    carrier.request(&mut vm, &AgentRequest::Enter { container: &state.id, process })?;
    carrier.request(&mut vm, &AgentRequest::Run)?;
    Ok((vm, carrier))
}

/// Carries another process of a container in this process; returns the exit code.
///
/// # Errors
/// It cannot be started.
pub fn carry_here(
    store: &Store,
    state: &ContainerRecord,
    process: &Process,
) -> Result<u8, Failure> {
    let (mut vm, carrier) = enter(store, state, process)?;
    carrier.carry(&mut vm, None).map(|carried| carried.code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_of_the_host_are_those_of_one_container() {
        let full = Failure::os("write the command's output", &io::ErrorKind::StorageFull.into());
        let refused = Failure::new(failure::UNAVAILABLE, "the guest cannot start `a`");
        for failure in [full, refused, refuse("the answer of ip is malformed")] {
            assert!(!is_of_agent(&failure), "{failure}");
        }
        let malformed = AgentVm::attach("/no/such".into()).failure("a message is malformed");
        assert!(is_of_agent(&malformed));
    }
}
