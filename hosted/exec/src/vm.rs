//! VMs whose RAM disk is the agent: their description, their process, the end of both.

use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::proc_number;
use hosted_command::programs::Named;
use hosted_command::supervise::{self, AtEnd};
use hosted_monitor::config::Config;
use hosted_monitor::config::console::Target;
use hosted_monitor::config::vm::VmConfig;
use hosted_monitor::config::vsock::{Cid, VsockConfig};
use proto::system::MAX_VCPUS;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// CID of the guest; VMs of different commands are not connected.
const CID: u32 = 3;
/// Parameters of the guest kernel. `rcu_expedited`: a process moves to its cgroup, and network
/// interfaces and mounts are made, without waits for several timer ticks of all vCPUs.
/// `psi`: an idle guest does not wake every two seconds for averages of stalls, which the wakes of
/// their computation keep up. `compaction_proactiveness`: nor twice a second for its kcompactd.
/// `percpu_pagelist_high_fraction`: each vCPU keeps 1 MiB of free pages for itself, not 27 MiB.
/// `dhash_entries`, `ihash_entries`: of 2 GiB Linux would give 3 MiB to tables of names and inodes.
const COMMAND_LINE: &str = "quiet loglevel=3 rcupdate.rcu_expedited=1 \
     psi=0 sysctl.vm.compaction_proactiveness=0 sysctl.vm.percpu_pagelist_high_fraction=1024 \
     dhash_entries=65536 ihash_entries=32768";
/// Further parameter where this host has found its TSC reliable: the guest does not wake twice a
/// second to compare its clocks.
const TSC_IS_RELIABLE: &str = "tsc=reliable";
/// File with the clock that this host's kernel has chosen (Linux 6.1,
/// Documentation/ABI/testing/sysfs-devices-system-clocksource).
const HOSTS_CLOCK: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
/// Files in the VM's folder.
const DESCRIPTION: &str = "vm.toml";
const CONSOLE: &str = "console";
const MESSAGES: &str = "messages";
const SOCKET: &str = "vsock";
/// Lines of the console that are shown when the guest fails.
const SHOWN: usize = 10;
/// Time for the VM to end after a signal, or after the end of its connections, on a busy host.
const END: Duration = Duration::from_secs(5);
/// The same for a VM of another process, whose end this one does not see.
const MOMENT: Duration = Duration::from_millis(100);
/// Interval of checks.
const INTERVAL: Duration = Duration::from_millis(2);

/// VM whose guest has the agent.
pub struct AgentVm {
    /// Its process; `None`: another process has started it.
    child: Option<Child>,
    folder: PathBuf,
}

/// Returns the description of a VM with its files in `folder`, and without devices: `vm` states its
/// size, kernel and back end.
///
/// # Errors
/// None, except for defects of this module.
pub fn describe(folder: &Path, vm: VmConfig) -> Result<Config, Failure> {
    let internal = |text: String| Failure::new(failure::INTERNAL, text);
    Ok(Config {
        vm: VmConfig {
            initrd: Some("agent".into()),
            cmdline: Some(command_line(fs::read_to_string(HOSTS_CLOCK).ok().as_deref())),
            // A guest that prints without end must not fill the runtime folder, which is in memory.
            serial: Some(Target::Tail(folder.join(CONSOLE))),
            ..vm
        },
        disk: Vec::new(),
        net: Vec::new(),
        share: Vec::new(),
        vsock: Some(VsockConfig {
            cid: Cid::try_from(CID).map_err(internal)?,
            path: folder.join(SOCKET),
        }),
        port: Vec::new(),
    })
}

/// Returns the guest's command line; `clock`: that of this host's kernel, if it is known.
fn command_line(clock: Option<&str>) -> String {
    match clock.map(str::trim) {
        Some("tsc") => format!("{COMMAND_LINE} {TSC_IS_RELIABLE}"),
        _ => COMMAND_LINE.to_owned(),
    }
}

/// Returns the number of this host's CPUs, up to that of a VM.
pub fn host_cpus() -> u8 {
    thread::available_parallelism().map_or(1, |count| count.get().min(MAX_VCPUS) as u8)
}

/// Returns the memory of this host in bytes, with its swap: a VM cannot have more.
pub fn host_memory() -> u64 {
    let host = rustix::system::sysinfo();
    let unit = u64::from(host.mem_unit.max(1));
    host.totalram.saturating_add(host.totalswap).saturating_mul(unit)
}

impl AgentVm {
    /// Starts the VM that [`describe`] describes, which ends with this process; the agent may not
    /// answer yet.
    ///
    /// # Errors
    /// Its files or its process cannot be made.
    pub fn start(folder: &Path, config: &Config, programs: &Named) -> Result<Self, Failure> {
        check_length(&folder.join(SOCKET))?;
        let file = folder.join(DESCRIPTION);
        fs::write(&file, config.to_toml()?).file_error("write", &file)?;
        let messages = folder.join(MESSAGES);
        let messages = File::create(&messages).file_error("write", &messages)?;
        let mut command = supervise::own(AtEnd::Terminate)?;
        command.args(["run", "--quiet", "--config"]).arg(&file);
        programs.pass(&mut command);
        // Signals of the terminal are the command's.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(messages);
        let child = command.spawn().start_error("the VM")?;
        Ok(Self { child: Some(child), folder: folder.to_owned() })
    }

    /// Returns the VM that another process has started, with its files in `folder`.
    pub fn attach(folder: PathBuf) -> Self {
        Self { child: None, folder }
    }

    /// Returns the number of the process in `/proc`; `None`: it is the child of another one.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(proc_number::of_child)
    }

    /// Returns the path of the socket that leads to the guest's ports.
    pub fn socket(&self) -> PathBuf {
        self.folder.join(SOCKET)
    }

    /// Returns whether the guest may be on the way to its agent.
    pub fn is_starting(&self) -> bool {
        self.child.is_some()
    }

    /// Returns whether the VM has ended, as far as this process knows.
    pub fn has_ended(&mut self) -> bool {
        let child = self.child.as_mut();
        child.is_some_and(|child| child.try_wait().is_ok_and(|status| status.is_some()))
    }

    /// Waits for the end of the VM, or a moment if another process has started it. Returns false if
    /// it does not end.
    pub fn wait(&mut self) -> bool {
        if self.child.is_none() {
            thread::sleep(MOMENT);
            return true;
        }
        let deadline = Instant::now() + END;
        while !self.has_ended() {
            if Instant::now() > deadline {
                return false;
            }
            thread::sleep(INTERVAL);
        }
        true
    }

    /// Creates the failure of a VM that has ended, or does not answer, by what it has printed.
    pub fn failure(&mut self, what: &str) -> Failure {
        let read = |name: &str| fs::read(self.folder.join(name)).unwrap_or_default();
        let [messages, console] =
            [MESSAGES, CONSOLE].map(|name| String::from_utf8_lossy(&read(name)).into_owned());
        let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
        let status = ended.map_or_else(String::new, |status| format!(" ({status})"));
        let last = last_words(&console);
        let code = ended.and_then(|status| status.code());
        let code =
            code.and_then(|code| u8::try_from(code).ok()).filter(|code| *code >= failure::USAGE);
        let text = [&format!("{what}{status}"), messages.trim_end(), last.trim_end()];
        let text: Vec<&str> = text.into_iter().filter(|text| !text.is_empty()).collect();
        Failure::new(code.unwrap_or(failure::INTERNAL), text.join("\n"))
    }

    /// Lets the VM that this process has started end, and does not wait for it.
    pub fn let_end(&mut self) {
        let Some(child) = &mut self.child else { return };
        // Fails if it has ended.
        if let Ok(None) = child.try_wait() {
            let _ = kill_process(Pid::from_child(child), Signal::TERM);
        }
    }

    /// Ends the VM that this process has started.
    pub fn end(mut self) {
        if self.child.is_none() {
            return;
        }
        self.let_end();
        if !self.wait()
            && let Some(child) = &mut self.child
        {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Checks that a socket can have the path: `sun_path` of unix(7) has 108 bytes, with a zero.
fn check_length(socket: &Path) -> Result<(), Failure> {
    const LIMIT: usize = 107;
    let length = socket.as_os_str().len();
    if length <= LIMIT {
        return Ok(());
    }
    let text = format!("the socket {} has a path of {length} bytes", socket.display());
    Err(Failure::new(failure::USAGE, format!("{text} (limit {LIMIT})"))
        .help("set XDG_RUNTIME_DIR to a folder with a shorter path"))
}

/// Returns the lines of a console that state the reason of an end: a panic's first ones, else the
/// last ones.
fn last_words(console: &str) -> String {
    const PANIC: &str = "Kernel panic - ";
    let lines: Vec<&str> = console.lines().map(str::trim_end).collect();
    let panic = lines.iter().position(|line| line.contains(PANIC));
    let first = panic.unwrap_or(lines.len().saturating_sub(SHOWN));
    lines[first..].iter().take(SHOWN).copied().collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_trusts_the_tsc_that_this_host_trusts() {
        assert!(command_line(Some("tsc\n")).ends_with(" tsc=reliable"));
        for other in [Some("kvm-clock\n"), Some(""), None] {
            assert_eq!(command_line(other), COMMAND_LINE);
        }
    }

    #[test]
    fn paths_of_sockets_are_bounded() {
        let path = |length: usize| PathBuf::from(format!("/{}", "a".repeat(length - 1)));
        check_length(&path(107)).unwrap();
        let failure = check_length(&path(108)).unwrap_err();
        assert_eq!(failure.code(), failure::USAGE);
        assert!(failure.to_string().contains("108 bytes (limit 107)"), "{failure}");
    }

    #[test]
    fn the_file_of_the_console_is_bounded() {
        let config = describe(Path::new("/run/vm"), VmConfig::default()).unwrap();
        assert_eq!(config.vm.serial, Some(Target::Tail("/run/vm/console".into())));
    }

    #[test]
    fn a_panic_is_shown_from_its_reason_on() {
        let lines = |range: std::ops::Range<usize>| {
            range.map(|number| format!("line {number}\r\n")).collect::<String>()
        };
        assert_eq!(last_words(""), "");
        assert_eq!(last_words(&lines(0..2)), "line 0\nline 1");
        assert!(last_words(&lines(0..30)).starts_with("line 20\n"));
        let panic = "[    1.7] Kernel panic - not syncing: System is deadlocked on memory\r\n";
        let shown = last_words(&[&lines(0..30), panic, &lines(30..60)].concat());
        assert!(shown.starts_with(panic.trim_end()) && shown.ends_with("line 38"), "{shown}");
    }
}
