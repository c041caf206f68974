//! The VM of a command: a `parador run` whose RAM disk is the agent.

use crate::Options;
use crate::guest::Plan;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::scratch::{self, ScratchFolder};
use hosted_command::supervise::{self, AtEnd};
use hosted_monitor::config::Config;
use hosted_monitor::config::console::Target;
use hosted_monitor::config::net::NetConfig;
use hosted_monitor::config::vm::VmConfig;
use hosted_monitor::config::vsock::{Cid, VsockConfig};
use hosted_monitor::runtime::RuntimeFolder;
use proto::agent::Network;
use proto::system::MAX_VCPUS;
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

/// CID of the guest; VMs of different commands are not connected.
const CID: u32 = 3;
/// Network of guests, which passt and the agent agree on; it is that of QEMU's user networking.
pub const NETWORK: Network = Network {
    address: [10, 0, 2, 15],
    prefix: 24,
    gateway: [10, 0, 2, 2],
    resolver: [10, 0, 2, 3],
};
/// Parameters of the guest kernel.
const COMMAND_LINE: &str = "quiet loglevel=3";
/// Prefix of the VM's folder.
const PREFIX: &str = "exec-";
/// Files in the VM's folder.
const CONSOLE: &str = "console";
const MESSAGES: &str = "messages";
const SOCKET: &str = "vsock";
/// Lines of the console that are shown when the guest fails.
const SHOWN: usize = 10;
/// Time for the VM to end after a signal.
const PATIENCE: Duration = Duration::from_millis(20);
const ATTEMPTS: u32 = 250;

/// A VM that runs.
pub struct CommandVm {
    child: Child,
    folder: ScratchFolder,
}

impl CommandVm {
    /// Starts the VM; the agent may not answer yet.
    ///
    /// # Errors
    /// Its files or its process cannot be made.
    pub fn start(options: &Options, plan: &Plan) -> Result<Self, Failure> {
        let runtime = RuntimeFolder::open()?;
        scratch::remove_abandoned(runtime.path(), PREFIX);
        let folder = ScratchFolder::new_in(runtime.path(), PREFIX);
        let folder = folder.os_error("create a folder for the VM")?;
        let file = folder.path().join("vm.toml");
        let text = config(options, plan, folder.path())?.to_toml()?;
        fs::write(&file, text).file_error("write", &file)?;
        let messages = folder.path().join(MESSAGES);
        let messages = File::create(&messages).file_error("write", &messages)?;
        let mut command = own(AtEnd::Terminate)?;
        command.args(["run", "--quiet", "--config"]).arg(&file);
        options.programs.pass(&mut command);
        // Signals of the terminal are the command's.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(messages);
        let child = command.spawn().start_error("the VM")?;
        Ok(Self { child, folder })
    }

    /// Returns the path of the socket that leads to the guest's ports.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join(SOCKET)
    }

    /// Returns whether the VM has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_some())
    }

    /// Creates the failure of a VM that has ended, or does not answer, by what it has printed.
    pub fn failure(&mut self, what: &str) -> Failure {
        let read = |name: &str| fs::read(self.folder.path().join(name)).unwrap_or_default();
        let [messages, console] =
            [MESSAGES, CONSOLE].map(|name| String::from_utf8_lossy(&read(name)).into_owned());
        let status = match self.child.try_wait() {
            Ok(Some(status)) => format!(" ({status})"),
            _ => String::new(),
        };
        let console: Vec<&str> = console.lines().map(str::trim_end).collect();
        let last = console[console.len().saturating_sub(SHOWN)..].join("\n");
        let code = self.child.try_wait().ok().flatten().and_then(|status| status.code());
        let code =
            code.and_then(|code| u8::try_from(code).ok()).filter(|code| *code >= failure::USAGE);
        let text = [&format!("{what}{status}"), messages.trim_end(), last.trim_end()];
        let text: Vec<&str> = text.into_iter().filter(|text| !text.is_empty()).collect();
        Failure::new(code.unwrap_or(failure::INTERNAL), text.join("\n"))
    }

    /// Ends the VM and removes its files.
    pub fn end(mut self) {
        // Fails if it has ended.
        if let Ok(None) = self.child.try_wait() {
            let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        }
        let has_ended = (0..ATTEMPTS).any(|_| {
            let is_over = self.has_ended();
            if !is_over {
                thread::sleep(PATIENCE);
            }
            is_over
        });
        if !has_ended {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Creates a command for this program, which ends with it.
fn own(at_end: AtEnd) -> Result<Command, Failure> {
    supervise::command(OsStr::new("/proc/self/exe"), at_end)
}

fn config(options: &Options, plan: &Plan, folder: &Path) -> Result<Config, Failure> {
    let host = thread::available_parallelism().map_or(1, |count| count.get().min(MAX_VCPUS) as u8);
    let internal = |text: String| Failure::new(failure::INTERNAL, text);
    let (share, disk) = plan.devices()?;
    let absolute = |path: &PathBuf| std::path::absolute(path).file_error("find", path);
    Ok(Config {
        vm: VmConfig {
            kernel: options.kernel.as_ref().map(absolute).transpose()?,
            initrd: Some("agent".into()),
            cmdline: Some(COMMAND_LINE.to_owned()),
            memory: Some(options.memory),
            cpus: Some(options.cpus.unwrap_or(host)),
            backend: options.backend,
            serial: Some(Target::File(folder.join(CONSOLE))),
            log_format: Some(options.log_format),
            ..VmConfig::default()
        },
        disk,
        net: if plan.has_network {
            vec![NetConfig::user(NETWORK.address.into())]
        } else {
            Vec::new()
        },
        share,
        vsock: Some(VsockConfig {
            cid: Cid::try_from(CID).map_err(internal)?,
            path: folder.join(SOCKET),
        }),
        port: Vec::new(),
    })
}
