//! `create`: the container's folders, cgroups and mounts, and its carrier.

use crate::balloon::{self, Change};
use crate::bundle::Bundle;
use crate::hooks::Stage;
use crate::line::{Create, Global};
use crate::store::{ContainerRecord, Status, Store};
use crate::systemd::Scope;
use crate::{carrier, cgroup, hooks, lifecycle, refuse, report, scratch, share};
use hosted_command::failure::{Failure, IoContext};
use hosted_command::messages::to_stderr;
use hosted_monitor::runtime::RuntimeFolder;
use hosted_monitor::vm_files::KernelFile;
use oci_spec::runtime::LinuxNamespaceType;
use std::env;
use std::fs::{self, DirBuilder, File};
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{SystemTime, UNIX_EPOCH};

/// Prefix of containers' folders in the runtime folder.
const PREFIX: &str = "oci-";

/// Creates a container and returns its carrier.
///
/// # Errors
/// Its configuration demands what a VM cannot do, or the VM fails; nothing is left.
pub fn create(global: &Global, arguments: &Create, is_attached: bool) -> Result<Child, Failure> {
    if arguments.preserve_fds > 0 {
        return Err(refuse("a VM cannot take descriptors of the host (--preserve-fds)"));
    }
    let folder = arguments.bundle.clone().map_or_else(env::current_dir, Ok);
    let bundle = Bundle::open(&folder.os_error("find the current folder")?)?;
    let has_terminal = bundle.process.terminal().unwrap_or_default();
    match (has_terminal, &arguments.console_socket) {
        (true, None) if !is_attached => {
            let text = "cannot allocate tty if runc will detach without setting console socket";
            return Err(refuse(text));
        }
        (false, Some(_)) => {
            let text = "cannot use console socket if runc will not detach or allocate tty";
            return Err(refuse(text));
        }
        _ => {}
    }
    let store = Store::new(global.root.as_deref());
    let sandbox = bundle.sandbox.as_deref();
    let _sandbox_lock = sandbox.map(|id| store.lock_shared(id)).transpose()?;
    let sandbox = sandbox.map(|id| running_sandbox(&store, id)).transpose()?;
    let _lock = store.reserve(&arguments.id)?;
    let built = build(global, &store, arguments, &bundle, sandbox);
    if built.is_err() {
        // The reason of the failure is more important than what cannot be removed.
        if let Err(failure) = lifecycle::remove(&store, &arguments.id) {
            to_stderr(format_args!("{}\n", report::text(&failure)));
        }
    }
    built
}

/// Returns the state of the sandbox of a container.
fn running_sandbox(store: &Store, id: &str) -> Result<ContainerRecord, Failure> {
    let state = store.load(id)?;
    match store.status(&state) {
        Status::Running | Status::Created => Ok(state),
        status => {
            let text = format!("the sandbox \"{id}\" is not running: it is {}", status.word());
            Err(refuse(text))
        }
    }
}

fn build(
    global: &Global,
    store: &Store,
    arguments: &Create,
    bundle: &Bundle,
    sandbox: Option<ContainerRecord>,
) -> Result<Child, Failure> {
    let id = &arguments.id;
    let folder = new_folder(RuntimeFolder::open()?.path())?;
    let path = bundle.linux.cgroups_path().as_deref();
    let scope = global.systemd_cgroup.then(|| Scope::new(path, id)).transpose()?;
    let default = Path::new("/").join(id);
    let cgroups = match scope {
        Some(_) => Vec::new(),
        None => cgroup::places(path.unwrap_or(&default)),
    };
    let mut state = ContainerRecord {
        id: id.clone(),
        bundle: bundle.path.clone(),
        rootfs: bundle.rootfs.clone(),
        created: report::now(),
        annotations: bundle.annotations.clone(),
        vm_scratch: scratch_disk(bundle, sandbox.as_ref(), &folder)?,
        vm_memory: sandbox.as_ref().map_or(bundle.memory.0, |sandbox| sandbox.vm_memory),
        pid_owner: pid_owner(store, bundle, sandbox.as_ref())?,
        memory_limit: bundle.memory_limit,
        cpu_quota: bundle.host_limits.cpu_quota,
        cpu_period: bundle.host_limits.cpu_period,
        vm_folder: sandbox.map_or_else(|| folder.clone(), |sandbox| sandbox.vm_folder),
        folder,
        cgroups,
        scope,
        carrier: None,
    };
    bundle.keep(store, id)?;
    store.save(&state)?;
    let made = DirBuilder::new().mode(0o700).create(&state.folder);
    made.file_error("create", &state.folder)?;
    state.cgroups = cgroup::make(&state.cgroups)?;
    store.save(&state)?;
    cgroup::limit(&state.cgroups, &bundle.host_limits)?;
    if state.has_own_vm() {
        cgroup::confine(&state.cgroups, &bundle.cpu_set)?;
        share::make(&state.vm_folder)?;
    } else {
        // An `update` before may have taken memory that this container is allowed.
        balloon::fit(store, &state.vm_folder, Change::Deflate)?;
    }
    // The start of the VM reports a kernel that is missing.
    let kernel = state.has_own_vm().then(|| KernelFile::find(global.kernel.as_deref()).ok());
    let modules = kernel.flatten().and_then(|kernel| kernel.modules());
    let modules = modules.as_deref();
    share::mount_all(&state.vm_folder, id, &bundle.rootfs, &bundle.mounts, modules)?;
    let console = arguments.console_socket.as_deref();
    let mut carrier = carrier::start(global, &state, console, None)?;
    let begun = run_hooks(store, id, bundle, (Stage::Create, Status::Creating));
    let created = match begun {
        Ok(()) => write_pid(arguments.pid_file.as_deref(), carrier),
        Err(failure) => {
            end(&mut carrier);
            Err(failure)
        }
    };
    if created.is_err() {
        // They undo what those before have done (OCI runtime specification, "Lifecycle").
        let undone = run_hooks(store, id, bundle, (Stage::Deleted, Status::Stopped));
        undone.unwrap_or_else(|failure| report::warning(global, &failure));
    }
    created
}

fn run_hooks(
    store: &Store,
    id: &str,
    bundle: &Bundle,
    (stage, status): (Stage, Status),
) -> Result<(), Failure> {
    let mut state = lifecycle::describe(store, &store.load(id)?);
    state["status"] = status.word().into();
    hooks::run(bundle.hooks.as_ref(), stage, &state)
}

/// Returns the container in the VM of a sandbox whose PID namespace a container is to have, if its
/// configuration states that of a process.
///
/// # Errors
/// The process is the carrier of no container in the VM.
fn pid_owner(
    store: &Store,
    bundle: &Bundle,
    sandbox: Option<&ContainerRecord>,
) -> Result<Option<String>, Failure> {
    let mut all = bundle.linux.namespaces().iter().flatten();
    let stated = all.find(|it| it.typ() == LinuxNamespaceType::Pid);
    let stated = stated.and_then(|it| it.path().as_ref()).and_then(|path| path.to_str());
    let owner = stated.and_then(stated_process);
    let (Some(number), Some(sandbox)) = (owner, sandbox) else { return Ok(None) };
    let is_it = |other: &ContainerRecord| other.carrier.is_some_and(|it| it.pid == number);
    match store.in_vm(&sandbox.vm_folder).into_iter().find(is_it) {
        Some(other) => Ok(Some(other.id)),
        None => Err(refuse(format!(
            "the PID namespace of process {number} is that of no container in the VM of the \
             sandbox \"{}\": it has ended, or is in another VM",
            sandbox.id
        ))),
    }
}

/// Returns the process of a PID namespace's path; `None`: the path is another one.
fn stated_process(path: &str) -> Option<i32> {
    path.strip_prefix("/proc/")?.strip_suffix("/ns/pid")?.parse().ok()
}

/// Ends a carrier of which no engine knows.
fn end(carrier: &mut Child) {
    // It may have ended by itself.
    let _ = carrier.kill();
    let _ = carrier.wait();
}

/// Returns the scratch disk of a container's VM.
fn scratch_disk(
    bundle: &Bundle,
    sandbox: Option<&ContainerRecord>,
    folder: &Path,
) -> Result<Option<PathBuf>, Failure> {
    match (bundle.scratch, sandbox) {
        (Some(_), Some(sandbox)) if sandbox.vm_scratch.is_none() => {
            Err(refuse("the sandbox of the container has no scratch disk (dev.parador.scratch)"))
        }
        (_, Some(sandbox)) => Ok(sandbox.vm_scratch.clone()),
        (size, None) => Ok(size.map(|_| scratch::path(folder))),
    }
}

/// Writes the number of a carrier to a file of the engine, which sees all of it or nothing, and
/// returns the carrier.
///
/// # Errors
/// The file cannot be written. The carrier has ended then, and what it carries.
pub fn write_pid(path: Option<&Path>, mut carrier: Child) -> Result<Child, Failure> {
    let Some(path) = path else { return Ok(carrier) };
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    // One that a killed process has left, or a pipe, for whose reader this would wait.
    let _ = fs::remove_file(&new);
    let written = File::create_new(&new)
        .and_then(|mut file| file.write_all(carrier.id().to_string().as_bytes()));
    let written = written.file_error("write", &new);
    match written.and_then(|()| fs::rename(&new, path).file_error("write", path)) {
        Ok(()) => Ok(carrier),
        Err(failure) => {
            let _ = fs::remove_file(&new);
            end(&mut carrier);
            Err(failure)
        }
    }
}

/// Returns the path of a new folder in the runtime folder, without links: the kernel lists mounts
/// by such paths.
fn new_folder(runtime: &Path) -> Result<PathBuf, Failure> {
    let runtime = fs::canonicalize(runtime).file_error("find the runtime folder", runtime)?;
    Ok(runtime.join(unique_name()))
}

/// Returns a name that no other container has: of this process, and its time.
fn unique_name() -> PathBuf {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{PREFIX}{}-{:x}", std::process::id(), since.as_micros()).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ProcessId;
    use crate::store::testing::state;
    use serde_json::json;
    use std::os::unix::fs::symlink;

    #[test]
    fn folders_have_the_paths_that_the_kernel_lists() {
        let folder = tempfile::tempdir().unwrap();
        let real = fs::canonicalize(folder.path()).unwrap().join("run");
        fs::create_dir(&real).unwrap();
        let link = folder.path().join("link");
        symlink(&real, &link).unwrap();
        assert_eq!(new_folder(&link).unwrap().parent(), Some(&*real));
        assert!(new_folder(&folder.path().join("missing")).is_err());
    }

    #[test]
    fn a_shared_pid_namespace_is_that_of_a_container_in_the_vm() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(Some(&folder.path().join("root")));
        let carrier = ProcessId::of(std::process::id()).unwrap();
        let sandbox = state("pod", Some(carrier));
        drop(store.reserve("pod").unwrap());
        store.save(&sandbox).unwrap();
        let owner = |path: &str| {
            let configuration = json!({
                "ociVersion": "1.0.2", "root": { "path": "rootfs" },
                "process": { "user": {}, "cwd": "/", "args": ["true"] },
                "annotations": { "io.kubernetes.cri.container-type": "container",
                    "io.kubernetes.cri.sandbox-id": "pod" },
                "linux": { "namespaces": [{ "type": "pid", "path": path },
                    { "type": "network" }, { "type": "ipc" }] }
            });
            let file = folder.path().join("config.json");
            fs::write(file, configuration.to_string()).unwrap();
            pid_owner(&store, &Bundle::open(folder.path()).unwrap(), Some(&sandbox))
                .map_err(|failure| report::text(&failure))
        };
        let of = |pid: i32| format!("/proc/{pid}/ns/pid");
        assert_eq!(owner(&of(carrier.pid)), Ok(Some("pod".to_owned())));
        assert_eq!(owner("/run/pidns/x"), Ok(None));
        let refused = owner(&of(1)).unwrap_err();
        assert!(refused.starts_with("the PID namespace of process 1 is that of no container"));
    }
}
