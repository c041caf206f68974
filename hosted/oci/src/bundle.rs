//! Configurations of containers: what a VM cannot do is refused, and its size follows from limits
//! and annotations.

use crate::annotations;
use crate::cgroup::{CpuSet, HostLimits};
use crate::devices;
use crate::hooks;
use crate::mounts::MountPlan;
use crate::network;
use crate::refuse;
use crate::resources::StatedLimits;
use crate::store::{ContainerRecord, Store};
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::input;
use hosted_command::value::Size;
use hosted_exec::patience::AgentTimeout;
use hosted_exec::vm::{host_cpus, host_memory};
use oci_spec::runtime::{
    Hooks, Linux, LinuxDevice, LinuxDeviceType, LinuxNamespace, LinuxNamespaceType, Mount, Process,
    Spec,
};
use proto::agent::container::Namespaces;
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

const CONFIGURATION: &str = "config.json";
/// Annotations of containerd and of CRI-O: the kind of a container, and the name of its sandbox.
const KINDS: [&str; 2] = ["io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType"];
const SANDBOXES: [&str; 2] = ["io.kubernetes.cri.sandbox-id", "io.kubernetes.cri-o.SandboxID"];
const SANDBOX: &str = "sandbox";
/// Annotations of containerd for a sandbox: the sum of its containers' limits.
const SUM_MEMORY: &str = "io.kubernetes.cri.sandbox-memory";
const SUM_QUOTA: &str = "io.kubernetes.cri.sandbox-cpu-quota";
const SUM_PERIOD: &str = "io.kubernetes.cri.sandbox-cpu-period";
const SUM_SHARES: &str = "io.kubernetes.cri.sandbox-cpu-shares";
/// Microseconds of CPU time are granted for this period, unless another one is stated.
const PERIOD: u64 = 100_000;
/// Character devices that a guest has (`Documentation/admin-guide/devices.txt` in Linux).
const DEVICES: [(i64, i64); 11] = [
    (1, 3),
    (1, 5),
    (1, 7),
    (1, 8),
    (1, 9),
    (1, 11),
    (5, 0),
    (5, 1),
    (5, 2),
    // /dev/net/tun and /dev/fuse.
    (10, 200),
    (10, 229),
];

/// Configuration of a container, checked.
#[derive(Debug)]
pub struct Bundle {
    /// The folder.
    pub path: PathBuf,
    /// The file.
    text: Vec<u8>,
    pub rootfs: PathBuf,
    pub is_read_only: bool,
    pub hostname: String,
    /// NIS domain; `None`: that of the guest.
    pub domain: Option<String>,
    pub process: Process,
    pub linux: Linux,
    /// It has all devices of the guest.
    pub is_privileged: bool,
    /// Programs of the host.
    pub hooks: Option<Hooks>,
    pub mounts: Vec<MountPlan>,
    pub namespaces: Namespaces,
    /// Network namespace; `None`: the guest has a loopback interface only.
    pub network: Option<PathBuf>,
    /// Container in whose VM it runs; `None`: its own.
    pub sandbox: Option<String>,
    /// It is the sandbox of a pod.
    pub is_sandbox: bool,
    pub annotations: HashMap<String, String>,
    /// Size of its own VM.
    pub memory: Size,
    pub cpus: u8,
    /// Limit of memory in bytes, for a sandbox the sum of its containers'; `None`: none.
    pub memory_limit: Option<u64>,
    /// Limits of its own VM on the host.
    pub host_limits: HostLimits,
    /// CPUs and memory nodes of the host for its own VM.
    pub cpu_set: CpuSet,
    /// Size of the scratch disk; `None`: changes of the root directory reach the host's files.
    pub scratch: Option<Size>,
    /// Time limit for the first answer of the agent.
    pub agent_timeout: AgentTimeout,
}

impl Bundle {
    /// Reads the configuration in a folder.
    ///
    /// # Errors
    /// It is malformed, or demands what a VM cannot do.
    pub fn open(folder: &Path) -> Result<Self, Failure> {
        let path = fs::canonicalize(folder).file_error("find the bundle", folder)?;
        let file = path.join(CONFIGURATION);
        let text = input::regular(&file).map_err(|failure| match failure.code() {
            // The words of runc.
            failure::MISSING_FILE => {
                let text = format!("JSON specification file {CONFIGURATION} not found");
                refuse(text).help(format!("it must be in {}", path.display()))
            }
            _ => failure,
        })?;
        Self::read(path, &file, text)
    }

    /// Reads the configuration that a container was created with: changes in its bundle, which may
    /// be gone, have no effect (OCI runtime specification, "Lifecycle").
    ///
    /// # Errors
    /// The copy cannot be read.
    pub fn of(store: &Store, state: &ContainerRecord) -> Result<Self, Failure> {
        let file = store.folder(&state.id)?.join(CONFIGURATION);
        let text = input::regular(&file)?;
        Self::read(state.bundle.clone(), &file, text)
    }

    /// Keeps the configuration of a container that is created.
    ///
    /// # Errors
    /// The copy cannot be written.
    pub fn keep(&self, store: &Store, id: &str) -> Result<(), Failure> {
        let file = store.folder(id)?.join(CONFIGURATION);
        fs::write(&file, &self.text).file_error("write", &file)
    }

    fn read(path: PathBuf, file: &Path, text: Vec<u8>) -> Result<Self, Failure> {
        let spec: Spec = serde_json::from_slice(&text)
            .map_err(|error| refuse(format!("{}: {error}", file.display())))?;
        Self::new(path, spec).map(|bundle| Self { text, ..bundle })
    }

    fn new(path: PathBuf, spec: Spec) -> Result<Self, Failure> {
        let missing = |what: &str| refuse(format!("config.json: `{what}` is missing"));
        let mut linux = spec.linux().clone().ok_or_else(|| missing("linux"))?;
        let process = spec.process().clone().ok_or_else(|| missing("process"))?;
        let root = spec.root().clone().ok_or_else(|| missing("root"))?;
        if process.args().as_ref().is_none_or(Vec::is_empty) {
            return Err(missing("process.args"));
        }
        let annotations = spec.annotations().clone().unwrap_or_default();
        let sandbox = sandbox(&annotations)?;
        let is_sandbox = is_sandbox(&annotations);
        spec.hooks().as_ref().map_or(Ok(()), hooks::check)?;
        let is_privileged = devices::are_all_permitted(&linux)?;
        if is_privileged {
            remove_unknown_devices(&mut linux);
        }
        check_linux(&linux)?;
        let (namespaces, network) = namespaces(&linux, is_sandbox, sandbox.is_some())?;
        // For ordinary users podman mounts the host's devices.
        let is_left_out = |mount: &&Mount| is_privileged && is_host_device(mount);
        let mounts = spec.mounts().iter().flatten().filter(|mount| !is_left_out(mount));
        let mounts = mounts.map(|mount| MountPlan::new(mount, &path));
        let limits = limits(&linux, &annotations)?;
        let cpu_set = linux.resources().as_ref().map(CpuSet::new).transpose()?.unwrap_or_default();
        let (memory, cpus) = size(&limits, &cpu_set, &annotations)?;
        let host_limits = match sandbox {
            Some(_) => HostLimits::default(),
            None => limits.host(annotations::extra(&annotations)?.0),
        };
        let scratch = annotations::scratch(&annotations)?;
        let agent_timeout = annotations::agent_timeout(&annotations)?;
        Ok(Self {
            text: Vec::new(),
            rootfs: path.join(root.path()),
            is_read_only: root.readonly().unwrap_or_default(),
            hostname: spec.hostname().clone().unwrap_or_default(),
            domain: spec.domainname().clone().filter(|domain| !domain.is_empty()),
            mounts: mounts.collect::<Result<_, _>>()?,
            path,
            process,
            linux,
            is_privileged,
            hooks: spec.hooks().clone(),
            namespaces,
            network,
            sandbox,
            is_sandbox,
            annotations,
            memory,
            cpus,
            memory_limit: limits.memory_limit(),
            host_limits,
            cpu_set,
            scratch,
            agent_timeout,
        })
    }
}

/// Returns an annotation that engines name differently.
fn find<'a>(annotations: &'a HashMap<String, String>, names: [&str; 2]) -> Option<&'a str> {
    names.iter().find_map(|name| annotations.get(*name)).map(String::as_str)
}

fn is_sandbox(annotations: &HashMap<String, String>) -> bool {
    find(annotations, KINDS) == Some(SANDBOX)
}

/// Returns the sandbox in whose VM a container runs; `None`: it has its own.
fn sandbox(annotations: &HashMap<String, String>) -> Result<Option<String>, Failure> {
    match find(annotations, KINDS) {
        None | Some(SANDBOX) => Ok(None),
        Some("container") => match find(annotations, SANDBOXES) {
            Some(sandbox) => Ok(Some(sandbox.to_owned())),
            None => Err(refuse("the annotation with the sandbox of the container is missing")),
        },
        Some(other) => Err(refuse(format!("unknown type of a container: {other:?}"))),
    }
}

/// Removes the devices of the host that engines list for a privileged container, in whose place it
/// gets all of the guest.
fn remove_unknown_devices(linux: &mut Linux) {
    let devices = linux.devices().clone().map(|mut devices| {
        devices.retain(is_known);
        devices
    });
    linux.set_devices(devices);
}

/// Refuses what a VM would leave out silently.
fn check_linux(linux: &Linux) -> Result<(), Failure> {
    if matches!(linux.rootfs_propagation().as_deref(), Some("shared" | "rshared")) {
        return Err(refuse("linux.rootfsPropagation: a VM cannot propagate mounts to the host"));
    }
    if linux.intel_rdt().is_some() {
        return Err(refuse("linux.intelRdt: a VM cannot have a part of the host's cache"));
    }
    let has_users =
        linux.namespaces().iter().flatten().any(|it| it.typ() == LinuxNamespaceType::User);
    let mut mappings = linux.uid_mappings().iter().chain(linux.gid_mappings()).flatten();
    if has_users && mappings.any(|it| it.container_id() != it.host_id()) {
        // The owners of files would be wrong.
        return Err(refuse("linux.uidMappings, gidMappings: a VM cannot map the IDs of users"));
    }
    let mut offsets = linux.time_offsets().iter().flatten();
    if offsets
        .any(|(_, offset)| offset.secs().unwrap_or(0) != 0 || offset.nanosecs().unwrap_or(0) != 0)
    {
        return Err(refuse("linux.timeOffsets: a VM has no time namespaces"));
    }
    linux.devices().iter().flatten().try_for_each(check_device)
}

/// Returns whether a mount is that of a device of the host.
fn is_host_device(mount: &Mount) -> bool {
    let is_device = |path: &PathBuf| {
        let kind = fs::metadata(path).map(|found| found.file_type());
        kind.is_ok_and(|kind| kind.is_char_device() || kind.is_block_device())
    };
    mount.source().as_ref().is_some_and(is_device)
}

/// Returns whether the guest has a device.
fn is_known(device: &LinuxDevice) -> bool {
    // A FIFO has no number.
    let is_fifo = device.typ() == LinuxDeviceType::P;
    let is_block = device.typ() == LinuxDeviceType::B;
    is_fifo || !is_block && DEVICES.contains(&(device.major(), device.minor()))
}

fn check_device(device: &LinuxDevice) -> Result<(), Failure> {
    match is_known(device) {
        true => Ok(()),
        false => Err(refuse(format!(
            "device {}: a VM has no devices of the host",
            device.path().display()
        ))),
    }
}

/// Namespaces that the containers of a pod can share.
const OF_PODS: [LinuxNamespaceType; 3] =
    [LinuxNamespaceType::Pid, LinuxNamespaceType::Ipc, LinuxNamespaceType::Uts];

/// Returns the namespaces of the container's own, and the path of its network namespace.
fn namespaces(
    linux: &Linux,
    is_sandbox: bool,
    is_member: bool,
) -> Result<(Namespaces, Option<PathBuf>), Failure> {
    let all: Vec<LinuxNamespace> = linux.namespaces().clone().unwrap_or_default();
    let find = |kind| all.iter().find(|namespace| namespace.typ() == kind);
    let own = |kind, name: &str| match find(kind).map(|it| it.path()) {
        Some(None) => Ok(true),
        // Those of the pod are those of the guest.
        Some(Some(_)) if is_member && OF_PODS.contains(&kind) => Ok(false),
        // CRI-O makes those of a pod on the host.
        Some(Some(path)) if is_sandbox && OF_PODS.contains(&kind) => match fs::metadata(path) {
            Ok(found) if network::is_of_host(&found, kind) => {
                Err(refuse(format!("a VM cannot have the host's {name} namespace")))
            }
            _ => Ok(false),
        },
        Some(Some(path)) => Err(refuse(format!(
            "namespace {}: a VM cannot join another {name} namespace",
            path.display()
        ))),
        None => Ok(false),
    };
    for (kind, name) in [
        (LinuxNamespaceType::Pid, "PID"),
        (LinuxNamespaceType::Ipc, "IPC"),
        (LinuxNamespaceType::Network, "network"),
    ] {
        if find(kind).is_none() {
            return Err(refuse(format!("a VM cannot have the host's {name} namespace")));
        }
    }
    let pid = own(LinuxNamespaceType::Pid, "PID")?;
    let ipc = own(LinuxNamespaceType::Ipc, "IPC")?;
    let uts = own(LinuxNamespaceType::Uts, "UTS")?;
    // Those of a sandbox are for all containers of the pod: they are the guest's.
    let namespaces = Namespaces { pid, ipc: ipc && !is_sandbox, uts: uts && !is_sandbox };
    for (kind, name) in [
        (LinuxNamespaceType::Mount, "mount"),
        (LinuxNamespaceType::User, "user"),
        (LinuxNamespaceType::Cgroup, "cgroup"),
        (LinuxNamespaceType::Time, "time"),
    ] {
        own(kind, name)?;
    }
    let network = find(LinuxNamespaceType::Network).and_then(|it| it.path().clone());
    Ok((namespaces, network))
}

/// Returns the limits that size a VM: those of the container, or for a sandbox the sums that
/// containerd states. A sandbox's own share of CPU time does not concern its containers.
fn limits(linux: &Linux, annotations: &HashMap<String, String>) -> Result<StatedLimits, Failure> {
    let own = linux.resources().as_ref().map(StatedLimits::new).unwrap_or_default();
    if !is_sandbox(annotations) {
        return Ok(own);
    }
    Ok(StatedLimits {
        memory: sum(annotations, SUM_MEMORY)?.or(own.memory),
        cpu_quota: sum(annotations, SUM_QUOTA)?.or(own.cpu_quota),
        cpu_period: sum(annotations, SUM_PERIOD)?.or(own.cpu_period),
        cpu_shares: sum(annotations, SUM_SHARES)?,
        processes: own.processes,
    })
}

/// Reads an annotation with a sum; 0: there is none.
fn sum<T: FromStr + Default + PartialEq>(
    annotations: &HashMap<String, String>,
    name: &str,
) -> Result<Option<T>, Failure> {
    let Some(text) = annotations.get(name) else { return Ok(None) };
    let value = text.parse().map_err(|_| refuse(format!("annotation {name}: {text:?}")))?;
    Ok(Some(value).filter(|value| *value != T::default()))
}

/// Returns memory and CPUs of a VM.
fn size(
    limits: &StatedLimits,
    cpu_set: &CpuSet,
    annotations: &HashMap<String, String>,
) -> Result<(Size, u8), Failure> {
    annotations::check_names(annotations)?;
    let extra = annotations::extra(annotations)?;
    let default = annotations::default_memory(annotations)?;
    let memory = match limits.memory.filter(|limit| *limit > 0) {
        // Pages of 4 KiB. A limit may exceed what the host has, and takes no effect then.
        Some(limit) => {
            let wanted = limit.unsigned_abs().saturating_add(extra.0).min(host_memory());
            Size((wanted >> 12) << 12)
        }
        None => default,
    };
    let quota = limits.cpu_quota.filter(|quota| *quota > 0);
    let period = limits.cpu_period.filter(|period| *period > 0).unwrap_or(PERIOD);
    let wanted = quota.map(|quota| quota.unsigned_abs().div_ceil(period));
    let most = cpu_set.count().unwrap_or(u64::MAX).min(host_cpus().into());
    // At least one, and at most those of the host.
    let cpus = wanted.unwrap_or(most).clamp(1, most) as u8;
    Ok((Size(memory.0.max(annotations::LEAST.0)), cpus))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::annotations::{AGENT_TIMEOUT, DEFAULT, EXTRA, SCRATCH};
    use serde_json::{Value, json};

    fn spec() -> Value {
        json!({
            "ociVersion": "1.0.2",
            "root": { "path": "rootfs" },
            "process": { "user": {}, "cwd": "/", "args": ["true"] },
            "linux": { "namespaces": [
                { "type": "pid" }, { "type": "network", "path": "/run/netns/x" },
                { "type": "ipc" }, { "type": "uts" }, { "type": "mount" }
            ] }
        })
    }

    fn open(spec: Value) -> Result<Bundle, String> {
        let spec = serde_json::from_value(spec).unwrap();
        Bundle::new("/bundle".into(), spec).map_err(|failure| crate::report::text(&failure))
    }

    fn with(pointer: &str, name: &str, value: Value) -> Value {
        let mut spec = spec();
        spec.pointer_mut(pointer).unwrap()[name] = value;
        spec
    }

    #[test]
    fn a_container_has_its_own_vm() {
        let bundle = open(spec()).unwrap();
        assert_eq!(bundle.rootfs, Path::new("/bundle/rootfs"));
        assert_eq!(bundle.network, Some("/run/netns/x".into()));
        assert_eq!(bundle.namespaces, Namespaces { pid: true, ipc: true, uts: true });
        assert_eq!((bundle.sandbox, bundle.memory), (None, Size(2 << 30)));
    }

    #[test]
    fn namespaces_of_a_pod_are_those_of_the_guest() {
        let mut sandbox = with("", "annotations", json!({ KINDS[1]: SANDBOX }));
        let namespaces = |spec: &Value| open(spec.clone()).map(|bundle| bundle.namespaces);
        let of_sandbox = Namespaces { pid: true, ipc: false, uts: false };
        assert_eq!(namespaces(&sandbox), Ok(of_sandbox));
        // Those that CRI-O has made.
        let all = sandbox["linux"]["namespaces"].as_array_mut().unwrap();
        for namespace in all.iter_mut().filter(|it| it["type"] == "ipc" || it["type"] == "uts") {
            namespace["path"] = json!("/run/ipcns/x");
        }
        assert_eq!(namespaces(&sandbox), Ok(of_sandbox));
        let all = sandbox["linux"]["namespaces"].as_array_mut().unwrap();
        all.iter_mut().find(|it| it["type"] == "mount").unwrap()["path"] = json!("/run/x");
        let text = "namespace /run/x: a VM cannot join another mount namespace";
        assert_eq!(namespaces(&sandbox), Err(text.to_owned()));
    }

    #[test]
    fn the_size_follows_from_limits_and_annotations() {
        let size = |limit: i64, quota: i64, annotations: Value| {
            let mut spec = with("", "annotations", annotations);
            spec["linux"]["resources"] =
                json!({ "memory": { "limit": limit }, "cpu": { "quota": quota } });
            open(spec).map(|bundle| (bundle.memory.0 >> 20, bundle.cpus))
        };
        assert_eq!(size(100 << 20, 50_000, json!({})), Ok((164, 1)));
        let annotations = json!({ EXTRA: "128M", DEFAULT: "1G" });
        assert_eq!(size(100 << 20, 1, annotations.clone()), Ok((228, 1)));
        assert_eq!(size(-1, 0, annotations).map(|it| it.0), Ok(1024));
        assert_eq!(size(1 << 50, 0, json!({})).map(|it| it.0), Ok(host_memory() >> 20));
        let wrong = size(-1, 0, json!({ EXTRA: "much" })).unwrap_err();
        assert!(wrong.starts_with("annotation dev.parador.memory: invalid size"), "{wrong}");
        for (text, expected) in [("on", Some(8 << 30)), ("64M", Some(64 << 20)), ("1M", None)] {
            let found = open(with("", "annotations", json!({ SCRATCH: text })));
            assert_eq!(found.ok().and_then(|it| it.scratch).map(|it| it.0), expected, "{text}");
        }
        for (text, expected) in [("2m", Ok("2m")), ("2h", Err("2h"))] {
            let found = open(with("", "annotations", json!({ AGENT_TIMEOUT: text })));
            let expected = expected.map(AgentTimeout::parse).map(Result::unwrap).map_err(|text| {
                format!("annotation {AGENT_TIMEOUT}: expected 1s to 1h (got {text})")
            });
            assert_eq!(found.map(|it| it.agent_timeout), expected);
        }
        let unknown = size(-1, 0, json!({ "dev.parador.more": "1" }));
        assert_eq!(unknown, Err("unknown annotation dev.parador.more".to_owned()));
    }

    #[test]
    fn a_sandbox_has_the_size_of_its_containers() {
        let annotations = json!({ KINDS[0]: SANDBOX, SUM_MEMORY: "134217728", SUM_QUOTA: "0" });
        let mut spec = with("", "annotations", annotations);
        spec["linux"]["resources"] = json!({ "cpu": { "shares": 2, "quota": 1 } });
        let bundle = open(spec.clone()).unwrap();
        assert_eq!((bundle.memory, bundle.cpus), (Size(192 << 20), 1));
        let limits = bundle.host_limits;
        assert_eq!((limits.memory, limits.cpu_quota), (Some(224 << 20), Some(1)));
        assert_eq!(limits.cpu_shares, None);
        spec["annotations"] = json!({ KINDS[0]: "container", SANDBOXES[0]: "pod" });
        assert_eq!(open(spec.clone()).unwrap().host_limits, HostLimits::default());
        spec["annotations"] = json!({ KINDS[0]: SANDBOX, SUM_SHARES: "x" });
        assert_eq!(open(spec).unwrap_err(), format!("annotation {SUM_SHARES}: \"x\""));
    }

    #[test]
    fn lists_without_hooks_and_devices_without_hosts_are_harmless() {
        open(with("", "hooks", json!({ "prestart": [], "poststop": [] }))).unwrap();
        let device = |device: Value| open(with("/linux", "devices", json!([device])));
        device(json!({ "path": "/dev/fifo", "type": "p" })).unwrap();
        device(json!({ "path": "/dev/no", "type": "c", "major": 1, "minor": 3 })).unwrap();
        let refused = device(json!({ "path": "/dev/no", "type": "b", "major": 1, "minor": 3 }));
        assert_eq!(refused.unwrap_err(), "device /dev/no: a VM has no devices of the host");
        open(with("/linux", "timeOffsets", json!({ "boottime": { "secs": 0 } }))).unwrap();
        let refused = open(with("/linux", "timeOffsets", json!({ "boottime": { "secs": 1 } })));
        assert_eq!(refused.unwrap_err(), "linux.timeOffsets: a VM has no time namespaces");
        let mapping = |host: u32| {
            let mapping = json!([{ "containerID": 0, "hostID": host, "size": 1000 }]);
            let mut spec = with("/linux", "uidMappings", mapping);
            spec["linux"]["namespaces"].as_array_mut().unwrap().push(json!({ "type": "user" }));
            open(spec)
        };
        mapping(0).unwrap();
        let text = "linux.uidMappings, gidMappings: a VM cannot map the IDs of users";
        assert_eq!(mapping(100_000).unwrap_err(), text);
        let refused = open(with("/linux", "intelRdt", json!({ "closID": "a" })));
        assert!(refused.unwrap_err().starts_with("linux.intelRdt: "));
        assert_eq!(open(with("", "domainname", json!("a"))).unwrap().domain.as_deref(), Some("a"));
        assert_eq!(open(with("", "domainname", json!(""))).unwrap().domain, None);
    }

    #[test]
    fn privileged_containers_have_no_devices_of_the_host() {
        let spec = |allow: bool| {
            let devices = json!([
                { "path": "/dev/kvm", "type": "c", "major": 10, "minor": 232 },
                { "path": "/dev/sda", "type": "b", "major": 8, "minor": 0 },
                { "path": "/dev/zero", "type": "c", "major": 1, "minor": 5 }
            ]);
            let mut spec = with("/linux", "devices", devices);
            spec["linux"]["resources"]["devices"] = json!([
                { "allow": false, "access": "rwm" },
                { "allow": allow, "access": "rwm" },
                { "allow": true, "type": "c", "major": 10, "minor": 232, "access": "rwm" }
            ]);
            spec["mounts"] = json!([
                { "destination": "/dev/full", "source": "/dev/full", "options": ["bind"] },
                { "destination": "/etc/hosts", "source": "/etc/hosts", "options": ["bind"] }
            ]);
            spec
        };
        let bundle = open(spec(true)).unwrap();
        let paths: Vec<_> = bundle.linux.devices().iter().flatten().map(|it| it.path()).collect();
        assert!(bundle.is_privileged && paths == [Path::new("/dev/zero")], "{paths:?}");
        assert_eq!(bundle.mounts.len(), 1);
        let refused = open(spec(false)).unwrap_err();
        assert_eq!(refused, "device /dev/kvm: a VM has no devices of the host");
    }

    #[test]
    fn a_set_of_cpus_limits_their_number() {
        let cpus = |text: &str| {
            let resources = json!({ "cpu": { "cpus": text } });
            open(with("/linux", "resources", resources)).map(|bundle| bundle.cpus)
        };
        assert_eq!((cpus("0"), cpus("")), (Ok(1), Ok(host_cpus())));
        assert!(cpus("x").unwrap_err().contains("linux.resources.cpu.cpus: \"x\""));
    }

    #[test]
    fn what_a_vm_cannot_do_is_refused() {
        let refused = |spec: Value| open(spec).unwrap_err();
        let without = |kind: &str| {
            let mut spec = spec();
            let all = spec["linux"]["namespaces"].as_array_mut().unwrap();
            all.retain(|namespace| namespace["type"] != kind);
            refused(spec)
        };
        assert_eq!(without("network"), "a VM cannot have the host's network namespace");
        assert_eq!(without("pid"), "a VM cannot have the host's PID namespace");
        assert_eq!(without("ipc"), "a VM cannot have the host's IPC namespace");
        let mut foreign = spec();
        foreign["linux"]["namespaces"][0]["path"] = json!("/proc/self/ns/pid");
        let text = "namespace /proc/self/ns/pid: a VM cannot join another PID namespace";
        assert_eq!(refused(foreign.clone()), text);
        foreign["annotations"] = json!({ KINDS[0]: "container", SANDBOXES[0]: "pod" });
        let member = open(foreign.clone()).unwrap();
        assert!(!member.namespaces.pid && member.sandbox.as_deref() == Some("pod"));
        for kind in ["mount", "user", "cgroup", "time"] {
            let mut other = foreign.clone();
            let path = json!({ "type": kind, "path": "/run/x" });
            other["linux"]["namespaces"].as_array_mut().unwrap().insert(0, path);
            let text = format!("namespace /run/x: a VM cannot join another {kind} namespace");
            assert_eq!(refused(other), text);
        }
        foreign["annotations"] = json!({ KINDS[1]: SANDBOX });
        assert_eq!(refused(foreign.clone()), "a VM cannot have the host's PID namespace");
        foreign["annotations"] = json!({ KINDS[1]: "other" });
        assert_eq!(refused(foreign), "unknown type of a container: \"other\"");
        let device = json!([{ "path": "/dev/kvm", "type": "c", "major": 10, "minor": 232 }]);
        let text = "device /dev/kvm: a VM has no devices of the host";
        assert_eq!(refused(with("/linux", "devices", device)), text);
        let hooks = json!({ "startContainer": [{ "path": "/bin/true" }] });
        assert!(refused(with("", "hooks", hooks)).starts_with("hooks.startContainer: a VM cannot"));
        let text = "linux.rootfsPropagation: a VM cannot propagate mounts to the host";
        assert_eq!(refused(with("/linux", "rootfsPropagation", json!("rshared"))), text);
        let empty = json!([]);
        let text = "config.json: `process.args` is missing";
        assert_eq!(refused(with("/process", "args", empty)), text);
    }
}
