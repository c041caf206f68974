//! `parador oci`: the runtime's command line as engines use it, and engines where they are
//! installed.

mod cluster;
pub mod configurations;
pub mod confined;
pub mod containerd;
mod cost;
pub mod docker;
pub mod hostile;
pub mod kubernetes;
pub mod network;
pub mod options;
pub mod podman;
mod protobuf;
mod sandbox;
pub mod systemd;

use super::{GONE, Rig, SLOW, succeed};
use crate::system::{artifacts, target};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{PipeWriter, Read, Write, pipe};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Programs of the test's root directory, which are one.
const PROGRAMS: [&str; 19] = [
    "cat", "echo", "grep", "hostname", "httpd", "id", "ip", "kill", "ls", "mkdir", "mknod",
    "mount", "nc", "sh", "sleep", "stat", "stty", "true", "tty",
];

/// Fetches `/page` from a server at a port of this host's loopback address, with a time limit for
/// each part of its answer.
fn fetch(port: u16, limit: Duration) -> Result<String> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).context("cannot connect")?;
    stream.set_read_timeout(Some(limit))?;
    stream.write_all(b"GET /page HTTP/1.0\r\n\r\n").context("cannot send")?;
    let mut answer = String::new();
    let received = stream.read_to_string(&mut answer);
    received.with_context(|| format!("cannot receive more than {answer:?}"))?;
    Ok(answer)
}

/// An engine's folders, and containers with busybox in them.
struct Engine {
    rig: Rig,
    kernel: PathBuf,
    artifacts: PathBuf,
}

impl Engine {
    fn new() -> Result<Self> {
        let rig = Rig::new()?;
        let kernel = rig.kernel().to_owned();
        let engine = Self { rig, kernel, artifacts: artifacts() };
        // The runtime folder must be the user's alone.
        fs::create_dir(engine.path("run"))?;
        fs::set_permissions(engine.path("run"), fs::Permissions::from_mode(0o700))?;
        Ok(engine)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.rig.folder().join(name)
    }

    /// The runtime, with the options of an engine.
    fn runtime(&self) -> Command {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "120"]).arg(target().join("release").join("parador"));
        command.arg("oci").arg("--root").arg(self.path("root"));
        command.arg("--log").arg(self.path("log")).args(["--log-format", "json"]);
        command.arg("--kernel").arg(&self.kernel).args(["--backend", "process"]);
        command.env("PARADOR_ARTIFACTS", &self.artifacts).env("XDG_RUNTIME_DIR", self.path("run"));
        command.current_dir(self.rig.folder());
        command
    }

    /// Makes an archive of the test's root directory, which engines import as an image.
    fn make_image(&self, archive: &Path) -> Result<()> {
        make_root(&self.path("tree"))?;
        let mut tar = Command::new("tar");
        succeed(tar.arg("-C").arg(self.path("tree")).arg("-cf").arg(archive).arg("."))
    }

    /// Makes a program that is the runtime for engines: they choose its options.
    fn make_runtime(&self) -> Result<PathBuf> {
        let program = self.path("parador-oci");
        let text = format!(
            "#!/bin/sh\nexport PARADOR_ARTIFACTS={} XDG_RUNTIME_DIR={}\n\
             exec {} oci --kernel {} --backend process \"$@\"\n",
            self.artifacts.display(),
            self.path("run").display(),
            target().join("release/parador").display(),
            self.kernel.display()
        );
        fs::write(&program, text).context("cannot write")?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        Ok(program)
    }

    /// Returns whether the creation of a container has come to a step.
    fn is_at(&self, name: &str, step: Step) -> bool {
        let state = || -> Option<Value> {
            let text = fs::read(self.path("root").join(name).join("state.json")).ok()?;
            serde_json::from_slice(&text).ok()
        };
        let Some(state) = state() else { return false };
        let folder = Path::new(state["folder"].as_str().unwrap_or_default());
        match step {
            Step::State => true,
            Step::Folder => folder.exists(),
            Step::Mounts => folder.join("share").join(name).join("root").exists(),
            Step::Carrier => !state["carrier"].is_null(),
            Step::Vm => folder.join("process").exists(),
            Step::Agent => folder.join("vsock").exists(),
        }
    }

    fn call(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = self.runtime();
        command.args(arguments).stdin(Stdio::null());
        command.output().with_context(|| format!("cannot start {command:?}"))
    }

    fn succeed(&self, arguments: &[&str]) -> Result<String> {
        let ended = self.call(arguments)?;
        let errors = String::from_utf8_lossy(&ended.stderr);
        ensure!(ended.status.success(), "{arguments:?}: {} {errors}", ended.status);
        Ok(String::from_utf8_lossy(&ended.stdout).into_owned())
    }

    /// Expects that a command is refused with this text, in the log, too.
    fn refused(&self, arguments: &[&str], text: &str) -> Result<()> {
        let _ = fs::remove_file(self.path("log"));
        let ended = self.call(arguments)?;
        let errors = String::from_utf8_lossy(&ended.stderr);
        let is_refused = ended.status.code() == Some(1) && errors.contains(text);
        ensure!(is_refused, "{arguments:?}: {} {errors}", ended.status);
        let log = fs::read_to_string(self.path("log")).context("no log")?;
        let line: Value = serde_json::from_str(&log).context("the log is not one JSON line")?;
        let is_good = line["level"] == "error" && line["msg"].as_str().unwrap_or("").contains(text);
        ensure!(is_good, "{log}");
        Ok(())
    }

    /// Makes a bundle, whose process executes a script.
    fn bundle(&self, name: &str, script: &str, change: impl FnOnce(&mut Value)) -> Result<()> {
        let folder = self.path(name);
        make_root(&folder.join("rootfs"))?;
        let mut config = json!({
            "ociVersion": "1.0.2",
            "hostname": "inside",
            "root": { "path": "rootfs" },
            "process": {
                "user": { "uid": 0, "gid": 0 },
                "cwd": "/",
                "args": ["sh", "-c", script],
                "env": ["PATH=/bin", "A=b c"],
                "capabilities": { "bounding": ["CAP_CHOWN"], "effective": ["CAP_CHOWN"],
                    "permitted": ["CAP_CHOWN"] },
                "rlimits": [{ "type": "RLIMIT_NOFILE", "soft": 100, "hard": 200 }]
            },
            "mounts": [
                { "destination": "/proc", "type": "proc", "source": "proc" },
                { "destination": "/dev", "type": "tmpfs", "source": "tmpfs",
                  "options": ["nosuid", "mode=755"] },
                { "destination": "/dev/pts", "type": "devpts", "source": "devpts",
                  "options": ["newinstance", "ptmxmode=0666", "mode=0620"] },
                { "destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"] },
                { "destination": "/volume", "type": "bind", "source": "../volume",
                  "options": ["rbind", "rprivate"] },
                { "destination": "/etc/message", "type": "bind", "source": "../message",
                  "options": ["bind", "ro"] }
            ],
            "linux": {
                "cgroupsPath": format!("/parador-test-{}-{name}", std::process::id()),
                "resources": { "memory": { "limit": 64 << 20 } },
                "namespaces": [{ "type": "pid" }, { "type": "network" }, { "type": "ipc" },
                    { "type": "uts" }, { "type": "mount" }],
                "maskedPaths": ["/proc/keys"],
                "readonlyPaths": ["/proc/sys"]
            }
        });
        change(&mut config);
        fs::create_dir_all(self.path("volume"))?;
        fs::write(self.path("message"), "a message\n")?;
        fs::write(folder.join("config.json"), config.to_string()).context("cannot write")
    }

    /// Creates a container; its output goes to a file, as to an engine's pipe. Its standard input
    /// stays open as long as the result.
    fn create(&self, name: &str) -> Result<PipeWriter> {
        let output = File::create(self.path("output")).context("cannot make a file")?;
        let errors = output.try_clone().context("cannot copy a descriptor")?;
        let mut command = self.runtime();
        command.args(["create", "--bundle", name, "--pid-file", "pid", name]);
        let (reader, input) = pipe().context("cannot make a pipe")?;
        command.stdin(reader).stdout(output).stderr(errors);
        let status = command.status().context("cannot start the runtime")?;
        let output = fs::read_to_string(self.path("output")).unwrap_or_default();
        ensure!(status.success(), "create {name}: {status} {output}");
        Ok(input)
    }

    fn output(&self) -> String {
        fs::read_to_string(self.path("output")).unwrap_or_default()
    }

    fn state(&self, name: &str) -> Result<Value> {
        serde_json::from_str(&self.succeed(&["state", name])?).context("no state")
    }

    fn wait_for(&self, name: &str, status: &str) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.state(name)?["status"] != status {
            let output = self.output();
            ensure!(Instant::now() < deadline, "{name} is not {status}: {output}");
            sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Checks that a deleted container has left no trace: mounts, cgroups, files, processes.
    fn nothing_left(&self, name: &str) -> Result<()> {
        no_mounts_below(&self.path("run"))?;
        let cgroup = format!("parador-test-{}-{name}", std::process::id());
        let all = Command::new("find").args(["/sys/fs/cgroup", "-name", &cgroup]).output()?;
        ensure!(all.stdout.is_empty(), "{}", String::from_utf8_lossy(&all.stdout));
        let runtime = fs::read_dir(self.path("run/parador")).into_iter().flatten().flatten();
        let left: Vec<_> = runtime.map(|entry| entry.file_name()).collect();
        ensure!(left.is_empty() && !self.path("root").join(name).exists(), "left: {left:?}");
        self.no_processes()
    }

    /// Waits until no process has the folder of the test in its command line.
    fn no_processes(&self) -> Result<()> {
        let deadline = Instant::now() + GONE;
        while super::exec::processes(self.rig.folder())? != 0 {
            ensure!(Instant::now() < deadline, "processes are left");
            sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

/// Returns a limit of a container's cgroup on the host, by its name in version 1 or 2.
fn host_limit(cgroup: &str, files: [&str; 2]) -> Result<String> {
    let mut find = Command::new("find");
    find.args(["/sys/fs/cgroup", "-path", &format!("*/{cgroup}/*"), "("]);
    find.args(["-name", files[0], "-o", "-name", files[1], ")"]);
    let found = super::succeed_with(&mut find)?;
    let file = found.lines().next().context("the cgroup has no such limit")?;
    Ok(fs::read_to_string(file).context("no limit")?.trim().to_owned())
}

/// Checks that the limit of memory of a container's cgroup on the host is this one.
fn ensure_host_memory(cgroup: &str, mib: u64) -> Result<()> {
    let found = host_limit(cgroup, ["memory.limit_in_bytes", "memory.max"])?;
    ensure!(found == (mib << 20).to_string(), "the host's limit is {found}, not {mib} MiB");
    Ok(())
}

/// Checks that nothing is mounted in a folder.
fn no_mounts_below(folder: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("no mounts")?;
    let folder = folder.to_str().context("a path that is not UTF-8")?;
    ensure!(!mounts.contains(folder), "mounts are left:\n{mounts}");
    Ok(())
}

/// Step of the creation of a container.
#[derive(Clone, Copy, Debug)]
enum Step {
    State,
    Folder,
    Mounts,
    Carrier,
    Vm,
    Agent,
}

/// Makes a root directory with busybox.
fn make_root(root: &Path) -> Result<()> {
    for folder in ["bin", "etc", "tmp"] {
        fs::create_dir_all(root.join(folder)).context("cannot make a folder")?;
    }
    fs::copy("/bin/busybox", root.join("bin/busybox")).context("cannot copy busybox")?;
    for program in PROGRAMS {
        symlink("busybox", root.join("bin").join(program)).context("cannot make a link")?;
    }
    Ok(())
}

/// Script in a container; each line has its expected output after `#`.
const SCRIPT: &str = r#"
hostname                                            # inside
echo $$ "$A"                                        # 1 b c
cat /etc/message                                    # a message
echo made >/volume/made; stat -c %u /volume/made    # 0
grep CapEff /proc/self/status | grep -c 0000000001$ # 1
ulimit -n                                           # 100
umask                                               # 0022
grep -c . /proc/keys                                # 0
echo 1 >/proc/sys/kernel/panic || echo refused      # refused
ls /dev/null /dev/fd /dev/ptmx | grep -c dev        # 3
echo x >/etc/message || echo read-only              # read-only
mkdir /tmp/folder || echo filtered                  # filtered
grep -c Seccomp:.2 /proc/self/status                # 1
"#;

/// The life of a container: create, start, exec, kill, state, delete; refusals.
pub fn life() -> Result<()> {
    let mut engine = Engine::new()?;
    let lines = SCRIPT.lines().filter_map(|line| line.split_once(" # "));
    let lines = lines.map(|(command, output)| (command.trim(), output.trim()));
    let (commands, expected): (Vec<_>, Vec<_>) = lines.unzip();
    let commands = commands.join("\n");
    let script =
        format!("exec 2>/dev/null\n{commands}\ntrap 'exit 7' TERM; while :; do sleep 0.1; done");
    engine.bundle("a", &script, |config| {
        config["linux"]["seccomp"] = json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],
            "syscalls": [{ "names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38 }],
        });
    })?;
    let _input = engine.create("a")?;
    ensure!(engine.output().is_empty(), "it runs before its start");
    let pid = fs::read_to_string(engine.path("pid")).context("no number")?;
    let state = engine.state("a")?;
    let number: u64 = pid.parse().context("the number is malformed")?;
    ensure!(state["status"] == "created" && state["pid"] == number, "{state}");
    engine.refused(&["create", "--bundle", "a", "a"], "already exists")?;
    engine.succeed(&["start", "a"])?;
    engine.refused(&["delete", "a"], "cannot delete container a that is not stopped: running")?;
    engine.refused(&["start", "a"], "cannot start an already running container")?;
    let deadline = Instant::now() + GONE;
    while engine.output().lines().count() < expected.len() && Instant::now() < deadline {
        sleep(Duration::from_millis(20));
    }
    let output = engine.output();
    let found: Vec<_> = output.lines().collect();
    ensure!(found == expected, "{found:?}\n{expected:?}");
    ensure!(engine.path("volume/made").exists(), "the volume was not changed");
    let inside = engine.succeed(&["exec", "a", "sh", "-c", "hostname; id -u; echo $A"])?;
    ensure!(inside == "inside\n0\nb c\n", "{inside}");
    let code = engine.call(&["exec", "a", "sh", "-c", "exit 42"])?.status.code();
    ensure!(code == Some(42), "exec ended with {code:?}");
    engine.refused(&["exec", "a", "/no/such"], "No such file or directory")?;
    ensure!(engine.succeed(&["ps", "-f", "json", "a"])?.trim() == format!("[{pid}]"), "ps");
    limits(&engine)?;
    ensure!(engine.succeed(&["list", "-q"])? == "a\n", "list");
    engine.succeed(&["kill", "a", "TERM"])?;
    engine.wait_for("a", "stopped")?;
    engine.refused(&["kill", "a"], "container not running")?;
    engine.succeed(&["delete", "a"])?;
    engine.refused(&["state", "a"], "container \"a\" does not exist")?;
    engine.succeed(&["delete", "--force", "a"])?;
    engine.nothing_left("a")?;
    scratch(&engine)?;
    refusals(&engine)?;
    missing_files(&mut engine)
}

/// With a scratch disk, changes of the root do not reach the host, and take none of its memory.
fn scratch(engine: &Engine) -> Result<()> {
    let script = "echo changed >/etc/new; grep -c ' / overlay ' /proc/mounts; cat /etc/new";
    engine.bundle("s", script, |config| {
        config["annotations"] = json!({ "dev.parador.scratch": "on" });
    })?;
    // The engine need not close the standard input of one that ends.
    let _input = engine.create("s")?;
    engine.succeed(&["start", "s"])?;
    engine.wait_for("s", "stopped")?;
    ensure!(engine.output() == "1\nchanged\n", "{}", engine.output());
    ensure!(!engine.path("s/rootfs/etc/new").exists(), "the host's file was changed");
    engine.succeed(&["delete", "s"])?;
    engine.nothing_left("s")
}

/// Limits change while container `a` runs, and its statistics have them.
fn limits(engine: &Engine) -> Result<()> {
    let statistics = || -> Result<Value> {
        let event = engine.succeed(&["events", "--stats", "a"])?;
        Ok(serde_json::from_str::<Value>(&event).context("no event")?["data"].take())
    };
    let before = statistics()?;
    let memory = &before["memory"]["usage"];
    ensure!(memory["limit"] == 64 << 20 && before["pids"]["limit"] == 0, "{before}");
    let is_used = |value: &Value| value.as_u64().is_some_and(|value| value > 0);
    ensure!(is_used(&memory["usage"]) && is_used(&before["cpu"]["usage"]["total"]), "{before}");
    // The VM has 64M more than the container, and its processes 32M more than the VM.
    let cgroup = format!("parador-test-{}-a", std::process::id());
    ensure_host_memory(&cgroup, 64 + 64 + 32)?;
    engine.succeed(&["update", "--memory", "33554432", "--pids-limit", "9", "a"])?;
    ensure_host_memory(&cgroup, 32 + 64 + 32)?;
    engine.succeed(&["update", "--cpu-quota", "50000", "--cpu-period", "100000", "a"])?;
    let found = host_limit(&cgroup, ["cpu.cfs_quota_us", "cpu.max"])?;
    ensure!(found.starts_with("50000"), "the host's limit of CPU time is {found}");
    let after = statistics()?;
    let is_changed = after["memory"]["usage"]["limit"] == 32 << 20 && after["pids"]["limit"] == 9;
    ensure!(is_changed, "{after}");
    engine.refused(&["update", "--memory", "1073741824", "a"], "exceeds the memory of the VM")?;
    balloon(engine, &cgroup)
}

/// The guest of container `a` returns the memory that its lowered limit leaves over, and gets it
/// back when the limit rises.
fn balloon(engine: &Engine, cgroup: &str) -> Result<()> {
    // 32 MiB less than at the start, in pages.
    const LESS: u64 = (32 << 20) / 4096;
    let pages = |event: &str| -> Result<u64> {
        let text = engine.succeed(&["exec", "a", "grep", event, "/proc/vmstat"])?;
        let count = text.split_whitespace().nth(1).and_then(|count| count.parse().ok());
        count.with_context(|| format!("no count of {event}: {text}"))
    };
    let wait_for = |event: &str| -> Result<()> {
        let deadline = Instant::now() + SLOW;
        while pages(event)? < LESS {
            ensure!(Instant::now() < deadline, "{event}: {} pages of {LESS}", pages(event)?);
        }
        Ok(())
    };
    wait_for("balloon_inflate")?;
    let before = pages("balloon_deflate")?;
    ensure!(before < LESS, "{before} pages are back before the limit rises");
    engine.succeed(&["update", "--memory", "67108864", "a"])?;
    ensure_host_memory(cgroup, 64 + 64 + 32)?;
    wait_for("balloon_deflate")
}

/// Configurations that a VM cannot carry out leave nothing.
fn refusals(engine: &Engine) -> Result<()> {
    type Change = fn(&mut Value);
    let cases: [(&str, Change); 14] = [
        // As Docker has it, and not as others do, which leave the namespace out.
        ("a VM cannot have the host's network namespace", |config| {
            config["linux"]["namespaces"][1]["path"] = json!("/proc/self/ns/net");
        }),
        ("a VM cannot have the host's network namespace", |config| {
            config["linux"]["namespaces"].as_array_mut().map(|all| all.remove(1));
        }),
        ("a VM cannot have the host's PID namespace", |config| {
            config["linux"]["namespaces"].as_array_mut().map(|all| all.remove(0));
        }),
        ("a VM cannot join another IPC namespace", |config| {
            config["linux"]["namespaces"][2]["path"] = json!("/proc/1/ns/ipc");
        }),
        ("device /dev/kvm: a VM has no devices of the host", |config| {
            config["linux"]["devices"] =
                json!([{ "path": "/dev/kvm", "type": "c", "major": 10, "minor": 232 }]);
        }),
        ("a VM cannot propagate mounts to the host", |config| {
            config["mounts"][4]["options"] = json!(["rbind", "rshared"]);
        }),
        ("container \"pod\" does not exist", |config| {
            config["annotations"] = json!({ "io.kubernetes.cri.container-type": "container",
                "io.kubernetes.cri.sandbox-id": "pod" });
        }),
        ("a VM cannot notify a process of the host", |config| {
            config["linux"]["seccomp"] = json!({ "defaultAction": "SCMP_ACT_NOTIFY" });
        }),
        ("cannot start `none`: executable file not found in $PATH", |config| {
            config["process"]["args"] = json!(["none"]);
        }),
        ("cannot mount", |config| config["mounts"][4]["source"] = json!("/no/such")),
        ("mount /volume: a VM cannot map the IDs of users", |config| {
            let map = json!([{ "containerID": 0, "hostID": 1000, "size": 1 }]);
            config["mounts"][4]["uidMappings"] = map;
        }),
        ("process.scheduler: a process in a VM cannot have it", |config| {
            config["process"]["scheduler"] = json!({ "policy": "SCHED_BATCH" });
        }),
        ("annotation dev.parador.memory: invalid size", |config| {
            config["annotations"] = json!({ "dev.parador.memory": "x" });
        }),
        ("set no_such_parameter", |config| {
            config["linux"]["sysctl"] = json!({ "no_such_parameter": "1" });
        }),
    ];
    for (index, (text, change)) in cases.into_iter().enumerate() {
        let name = format!("refused{index}");
        engine.bundle(&name, "true", change)?;
        engine.refused(&["create", "--bundle", &name, &name], text)?;
        engine.nothing_left(&name)?;
    }
    Ok(())
}

/// A kernel or an agent that does not exist is in the message.
fn missing_files(engine: &mut Engine) -> Result<()> {
    engine.bundle("missing", "true", |_| {})?;
    let kernel = std::mem::replace(&mut engine.kernel, "/no/kernel".into());
    engine.refused(&["create", "--bundle", "missing", "missing"], "/no/kernel")?;
    engine.nothing_left("missing")?;
    engine.kernel = kernel;
    engine.artifacts = engine.path("artifacts");
    fs::create_dir(&engine.artifacts).context("cannot make a folder")?;
    engine.refused(&["create", "--bundle", "missing", "missing"], "agent")?;
    engine.nothing_left("missing")
}

/// A carrier or a VM that is killed leaves nothing after `delete`.
pub fn killed() -> Result<()> {
    let engine = Engine::new()?;
    for (name, is_started, victim) in
        [("created", false, "carrier"), ("running", true, "carrier"), ("vm", true, "vm")]
    {
        engine.bundle(name, "sleep 1000", |_| {})?;
        let _input = engine.create(name)?;
        if is_started {
            engine.succeed(&["start", name])?;
        }
        let carrier = engine.state(name)?["pid"].to_string();
        let number = match victim {
            "carrier" => carrier,
            _ => child_of(&carrier)?,
        };
        succeed(Command::new("kill").args(["-9", &number]))?;
        engine.wait_for(name, "stopped")?;
        engine.succeed(&["delete", name])?;
        engine.nothing_left(name)?;
    }
    for (index, step) in STEPS.into_iter().enumerate() {
        killed_at(&engine, &format!("step{index}"), step)?;
    }
    engine.bundle("forced", "sleep 1000", |_| {})?;
    let _input = engine.create("forced")?;
    engine.succeed(&["delete", "--force", "forced"])?;
    engine.nothing_left("forced")?;
    killed_start(&engine)?;
    sandbox::deleted_first(&engine)
}

/// A container runs, and is known to run, although `start` was killed before it had an answer.
fn killed_start(engine: &Engine) -> Result<()> {
    engine.bundle("starting", "sleep 1000", |_| {})?;
    let _input = engine.create("starting")?;
    let state = fs::read(engine.path("root/starting/state.json")).context("no state")?;
    let state: Value = serde_json::from_slice(&state).context("no state")?;
    let folder = Path::new(state["folder"].as_str().context("no folder")?);
    // What `start` does first.
    drop(UnixStream::connect(folder.join("start")).context("cannot connect")?);
    engine.wait_for("starting", "running")?;
    engine.refused(&["start", "starting"], "cannot start an already running container")?;
    engine.succeed(&["exec", "starting", "true"])?;
    engine.refused(&["delete", "starting"], "that is not stopped: running")?;
    engine.succeed(&["delete", "--force", "starting"])?;
    engine.nothing_left("starting")
}

/// Process that is killed at a step.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Create,
    Carrier,
    Vm,
}

const STEPS: [(Step, Victim); 9] = [
    (Step::State, Victim::Create),
    (Step::Folder, Victim::Create),
    (Step::Mounts, Victim::Create),
    (Step::Carrier, Victim::Create),
    (Step::Carrier, Victim::Carrier),
    (Step::Vm, Victim::Carrier),
    (Step::Vm, Victim::Vm),
    (Step::Agent, Victim::Vm),
    (Step::Agent, Victim::Create),
];

/// Kills a process when `create` has come to a step; nothing is left after `delete --force`.
fn killed_at(engine: &Engine, name: &str, (step, victim): (Step, Victim)) -> Result<()> {
    engine.bundle(name, "sleep 1000", |_| {})?;
    let mut command = engine.runtime();
    command.args(["create", "--bundle", name, name]).stdin(Stdio::null());
    let mut timeout = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let deadline = Instant::now() + SLOW;
    while !engine.is_at(name, step) {
        let is_over = timeout.try_wait()?.is_some() || Instant::now() > deadline;
        ensure!(!is_over, "`create` has not come to {step:?}");
        sleep(Duration::from_micros(200));
    }
    let create = child_of(&timeout.id().to_string())?;
    let number = match victim {
        Victim::Create => Ok(create),
        Victim::Carrier => child_of(&create),
        Victim::Vm => child_of(&create).and_then(|carrier| child_of(&carrier)),
    };
    // It may have ended meanwhile.
    if let Ok(number) = number {
        let _ = Command::new("kill").args(["-9", &number]).stderr(Stdio::null()).status();
    }
    timeout.wait().context("cannot wait for `create`")?;
    engine.succeed(&["delete", "--force", name])?;
    engine.nothing_left(name).with_context(|| format!("{victim:?} killed at {step:?}"))
}

/// Returns the first child of a process.
fn child_of(process: &str) -> Result<String> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).context("no such process")?;
    // A thread other than the first one has started the VM.
    let mut children = threads.flatten().filter_map(|thread| {
        let children = fs::read_to_string(thread.path().join("children")).ok()?;
        children.split_whitespace().next().map(str::to_owned)
    });
    children.next().context("it has no child")
}
