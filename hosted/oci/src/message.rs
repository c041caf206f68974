//! Configurations of containers as messages to the agent.

use crate::bundle::Bundle;
use crate::mounts::bytes;
use crate::resources::StatedLimits;
use crate::share;
use crate::store::ContainerRecord;
use crate::{devices, refuse, seccomp};
use hosted_command::failure::Failure;
use oci_spec::runtime::{
    Capabilities, Capability, Linux, LinuxCapabilities, LinuxDevice, LinuxDeviceType,
    LinuxPersonalityDomain, Process,
};
use proto::agent::container::{
    Capabilities as Sets, Container, ContainerMount, ContainerProcess, Device, ResourceLimit,
};
use proto::agent::{CommandUser, GuestCommand, MAX_GROUPS, POD, Strings, TerminalSize};
use std::path::{Path, PathBuf};

/// Capabilities in the order of their numbers (`linux/capability.h`).
const CAPABILITIES: [Capability; 41] = [
    Capability::Chown,
    Capability::DacOverride,
    Capability::DacReadSearch,
    Capability::Fowner,
    Capability::Fsetid,
    Capability::Kill,
    Capability::Setgid,
    Capability::Setuid,
    Capability::Setpcap,
    Capability::LinuxImmutable,
    Capability::NetBindService,
    Capability::NetBroadcast,
    Capability::NetAdmin,
    Capability::NetRaw,
    Capability::IpcLock,
    Capability::IpcOwner,
    Capability::SysModule,
    Capability::SysRawio,
    Capability::SysChroot,
    Capability::SysPtrace,
    Capability::SysPacct,
    Capability::SysAdmin,
    Capability::SysBoot,
    Capability::SysNice,
    Capability::SysResource,
    Capability::SysTime,
    Capability::SysTtyConfig,
    Capability::Mknod,
    Capability::Lease,
    Capability::AuditWrite,
    Capability::AuditControl,
    Capability::Setfcap,
    Capability::MacOverride,
    Capability::MacAdmin,
    Capability::Syslog,
    Capability::WakeAlarm,
    Capability::BlockSuspend,
    Capability::AuditRead,
    Capability::Perfmon,
    Capability::Bpf,
    Capability::CheckpointRestore,
];

/// Kernel parameter with the NIS domain of a UTS namespace.
const DOMAIN: &str = "kernel.domainname";
/// Execution domain of 32-bit programs (`linux/personality.h`).
const PERSONALITY_32_BIT: u32 = 8;

/// Process of a container, with the strings of its message.
#[derive(Debug)]
pub struct ProcessMessage<'a> {
    process: &'a Process,
    capabilities: Option<&'a LinuxCapabilities>,
    arguments: Vec<u8>,
    environment: Vec<u8>,
    groups: heapless::Vec<u32, MAX_GROUPS>,
    filter: Vec<u64>,
    oom_score: Option<i16>,
    personality: Option<u32>,
}

impl<'a> ProcessMessage<'a> {
    /// Reads a process of a container with this configuration, whose first process is `container`.
    ///
    /// # Errors
    /// A string has a zero, there are too many groups, the working directory is no absolute path,
    /// the OOM score is out of range, or a VM cannot have the seccomp profile.
    pub fn new(
        process: &'a Process,
        container: &'a Process,
        linux: &Linux,
    ) -> Result<Self, Failure> {
        if !process.cwd().is_absolute() {
            let text = format!("Cwd must be an absolute path: {:?}", process.cwd());
            return Err(refuse(text));
        }
        let unknown = [
            ("scheduler", process.scheduler().is_some()),
            ("ioPriority", process.io_priority().is_some()),
            ("execCPUAffinity", process.exec_cpu_affinity().is_some()),
        ];
        if let Some((name, _)) = unknown.iter().find(|(_, is_stated)| *is_stated) {
            return Err(refuse(format!("process.{name}: a process in a VM cannot have it")));
        }
        let personality = linux.personality().as_ref().map(|it| match it.domain() {
            LinuxPersonalityDomain::PerLinux => 0,
            LinuxPersonalityDomain::PerLinux32 => PERSONALITY_32_BIT,
        });
        let groups = process.user().additional_gids().as_deref().unwrap_or_default();
        let groups = heapless::Vec::from_slice(groups).map_err(|_| {
            refuse(format!("a process has {} groups; the most are {MAX_GROUPS}", groups.len()))
        })?;
        Ok(Self {
            process,
            capabilities: process.capabilities().as_ref().or(container.capabilities().as_ref()),
            arguments: strings(process.args().as_deref().unwrap_or_default())?,
            environment: strings(process.env().as_deref().unwrap_or_default())?,
            groups,
            filter: seccomp::filter(linux)?,
            oom_score: oom_score(process)?,
            personality,
        })
    }

    /// Returns the message for a process with this terminal.
    ///
    /// # Errors
    /// None, except for defects of this module.
    pub fn message(&self, terminal: Option<TerminalSize>) -> Result<ContainerProcess<'_>, Failure> {
        let user = self.process.user();
        let command = GuestCommand {
            arguments: list(&self.arguments)?,
            environment: list(&self.environment)?,
            folder: bytes(self.process.cwd()),
            user: CommandUser::Ids {
                user: user.uid(),
                group: user.gid(),
                groups: self.groups.clone(),
            },
            terminal,
        };
        let limits = self.process.rlimits().iter().flatten().map(|limit| ResourceLimit {
            // The crate lists them in the order of their numbers.
            resource: limit.typ() as u8,
            soft: limit.soft(),
            hard: limit.hard(),
        });
        // As with runc, one without a list has none.
        let capabilities = self.capabilities.map_or_else(Sets::default, |all| Sets {
            bounding: bits(all.bounding().as_ref()),
            effective: bits(all.effective().as_ref()),
            permitted: bits(all.permitted().as_ref()),
            inheritable: bits(all.inheritable().as_ref()),
            ambient: bits(all.ambient().as_ref()),
        });
        Ok(ContainerProcess {
            command,
            capabilities: Some(capabilities),
            limits: limits.collect(),
            oom_score: self.oom_score,
            personality: self.personality,
            no_new_privileges: self.process.no_new_privileges().unwrap_or_default(),
            umask: user.umask(),
            filter: self.filter.clone(),
        })
    }
}

/// Container, with the strings of its message.
#[derive(Debug)]
pub struct ContainerMessage<'a> {
    state: &'a ContainerRecord,
    bundle: &'a Bundle,
    process: ProcessMessage<'a>,
    root: PathBuf,
    /// Paths of bind mounts in the guest.
    sources: Vec<PathBuf>,
    device_filter: Vec<u64>,
    masked: Vec<u8>,
    read_only: Vec<u8>,
}

impl<'a> ContainerMessage<'a> {
    /// Reads the configuration of a container.
    ///
    /// # Errors
    /// A string has a zero, there are too many groups, a VM cannot have the seccomp profile, or a
    /// rule for devices is malformed.
    pub fn new(state: &'a ContainerRecord, bundle: &'a Bundle) -> Result<Self, Failure> {
        let id = &*state.id;
        let guest = |path: PathBuf| Path::new(POD).join(path);
        let sources =
            bundle.mounts.iter().enumerate().map(|(index, mount)| match mount.is_bind() {
                true => guest(share::bind_of(id, index)),
                false => mount.source.clone(),
            });
        let linux = &bundle.linux;
        Ok(Self {
            state,
            bundle,
            process: ProcessMessage::new(&bundle.process, &bundle.process, linux)?,
            root: guest(share::root_of(id)),
            sources: sources.collect(),
            device_filter: devices::filter(linux)?,
            masked: strings(linux.masked_paths().as_deref().unwrap_or_default())?,
            read_only: strings(linux.readonly_paths().as_deref().unwrap_or_default())?,
        })
    }

    /// Returns the message for a container with this terminal.
    ///
    /// # Errors
    /// None, except for defects of this module.
    pub fn message(&self, terminal: Option<TerminalSize>) -> Result<Container<'_>, Failure> {
        let Bundle { mounts, linux, .. } = self.bundle;
        let mounts = mounts.iter().zip(&self.sources).map(|(mount, source)| ContainerMount {
            kind: &mount.kind,
            source: bytes(source),
            place: bytes(&mount.place),
            flags: mount.flags,
            data: &mount.data,
            copies: mount.copies,
        });
        let parameters = linux.sysctl().iter().flatten();
        let parameters = parameters.map(|(name, value)| (&**name, &**value));
        let domain = self.bundle.domain.as_deref().map(|domain| (DOMAIN, domain));
        let limits = linux.resources().as_ref().map(|all| StatedLimits::new(all).guest());
        let owner = self.state.pid_owner.as_deref().or(self.bundle.sandbox.as_deref());
        Ok(Container {
            name: &self.state.id,
            root: bytes(&self.root),
            read_only: self.bundle.is_read_only,
            has_scratch: self.state.vm_scratch.is_some(),
            hostname: &self.bundle.hostname,
            namespaces: self.bundle.namespaces,
            sandbox: owner.unwrap_or_default(),
            mounts: mounts.collect(),
            has_all_devices: self.bundle.is_privileged,
            devices: linux.devices().iter().flatten().map(device).collect(),
            device_filter: self.device_filter.clone(),
            masked: list(&self.masked)?,
            read_only_paths: list(&self.read_only)?,
            limits: limits.unwrap_or_default(),
            parameters: parameters.chain(domain).collect(),
            process: self.process.message(terminal)?,
        })
    }
}

fn device(device: &LinuxDevice) -> Device<'_> {
    let kind = match device.typ() {
        LinuxDeviceType::B => 0o060_000,
        LinuxDeviceType::P => 0o010_000,
        _ => 0o020_000,
    };
    Device {
        path: bytes(device.path()),
        mode: kind | device.file_mode().unwrap_or(0o666) & 0o7777,
        major: device.major() as u32,
        minor: device.minor() as u32,
        user: device.uid().unwrap_or_default(),
        group: device.gid().unwrap_or_default(),
    }
}

fn oom_score(process: &Process) -> Result<Option<i16>, Failure> {
    let Some(score) = process.oom_score_adj() else { return Ok(None) };
    let valid = i16::try_from(score).ok().filter(|score| (-1000..=1000).contains(score));
    let wrong = || refuse(format!("process.oomScoreAdj: {score} is not from -1000 to 1000"));
    valid.map(Some).ok_or_else(wrong)
}

fn bits(set: Option<&Capabilities>) -> u64 {
    let numbers = CAPABILITIES.iter().enumerate();
    let bits = numbers.filter(|(_, it)| set.is_some_and(|set| set.contains(it)));
    bits.map(|(number, _)| 1 << number).sum()
}

/// Joins strings, each followed by a zero.
fn strings(all: &[String]) -> Result<Vec<u8>, Failure> {
    match all.iter().find(|string| string.contains('\0')) {
        Some(string) => Err(refuse(format!("the string {string:?} has a zero"))),
        None => Ok(all.iter().flat_map(|string| string.bytes().chain([0])).collect()),
    }
}

fn list(bytes: &[u8]) -> Result<Strings<'_>, Failure> {
    Strings::new(bytes).ok_or_else(|| refuse("a list of strings is malformed"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use oci_spec::runtime::PosixRlimitType;

    #[test]
    fn numbers_are_those_of_linux() {
        let set = |name: Capability| bits(Some(&[name].into_iter().collect()));
        assert_eq!(set(Capability::SysAdmin), 1 << 21);
        assert_eq!(set(Capability::CheckpointRestore), 1 << 40);
        assert_eq!(bits(None), 0);
        assert_eq!(PosixRlimitType::RlimitNofile as u8, 7);
        assert_eq!(PosixRlimitType::RlimitRttime as u8, 15);
    }

    #[test]
    fn capabilities_are_those_of_the_process_or_the_container() {
        let process = |bounding: Option<&str>| -> Process {
            let mut process = serde_json::json!({ "user": {}, "args": ["a"], "cwd": "/" });
            if let Some(name) = bounding {
                process["capabilities"] = serde_json::json!({ "bounding": [name] });
            }
            serde_json::from_value(process).unwrap()
        };
        let (none, chown, kill) =
            (process(None), process(Some("CAP_CHOWN")), process(Some("CAP_KILL")));
        let bounding = |process: &Process, container: &Process| {
            let message = ProcessMessage::new(process, container, &Linux::default()).unwrap();
            message.message(None).unwrap().capabilities.unwrap().bounding
        };
        assert_eq!(bounding(&none, &none), 0);
        assert_eq!(bounding(&none, &kill), 1 << 5);
        assert_eq!(bounding(&chown, &kill), 1);
    }

    #[test]
    fn processes_have_scores_and_domains() {
        let message = |folder: &str, score: i32, domain: &str| {
            let process = serde_json::json!({
                "user": {}, "args": ["a"], "cwd": folder, "oomScoreAdj": score,
            });
            let linux = serde_json::json!({ "personality": { "domain": domain } });
            let (process, linux): (Process, Linux) =
                (serde_json::from_value(process).unwrap(), serde_json::from_value(linux).unwrap());
            let message = ProcessMessage::new(&process, &process, &linux);
            let message = message.map_err(|failure| crate::report::text(&failure))?;
            let message = message.message(None).unwrap();
            Ok::<_, String>((message.oom_score, message.personality))
        };
        assert_eq!(message("/", 500, "LINUX32"), Ok((Some(500), Some(8))));
        assert_eq!(message("/", -1000, "LINUX"), Ok((Some(-1000), Some(0))));
        assert!(message("/", 1001, "LINUX").unwrap_err().contains("1001 is not from -1000"));
        let text = "Cwd must be an absolute path";
        assert!(message("a", 0, "LINUX").unwrap_err().starts_with(text));
        assert!(message("", 0, "LINUX").unwrap_err().starts_with(text));
    }

    #[test]
    fn strings_have_no_zeros() {
        assert_eq!(strings(&["a".into(), String::new()]).unwrap(), b"a\0\0");
        assert!(strings(&["a\0b".into()]).is_err());
    }
}
