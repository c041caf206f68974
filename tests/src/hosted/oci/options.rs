//! Options and parts of configurations that runc has: terminals and capabilities of `exec`, hooks,
//! sets of CPUs, privileged containers; files that a runtime must not wait for.

use super::{Engine, GONE, host_limit};
use anyhow::{Context, Result, ensure};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::Instant;

/// A container with all of them.
pub fn like_runc() -> Result<()> {
    let engine = Engine::new()?;
    engine.bundle("o", "sleep 1000", |config| {
        let seen = engine.path("seen");
        let hook = |name: &str| {
            let script = format!("cat >{}-{name}", seen.display());
            json!([{ "path": "/bin/sh", "args": ["sh", "-c", script], "timeout": 60 }])
        };
        config["hooks"] = ["createRuntime", "poststart", "poststop"]
            .into_iter()
            .map(|name| (name.to_owned(), hook(name)))
            .collect();
        config["linux"]["resources"]["cpu"] = json!({ "cpus": "0" });
        config["process"]["oomScoreAdj"] = json!(500);
        let cgroups = json!({ "destination": "/sys/fs/cgroup", "type": "cgroup" });
        let mounts = config["mounts"].as_array_mut().expect("mounts");
        mounts.push(cgroups);
        privileged(config);
    })?;
    let private = engine.path("o/rootfs/private");
    fs::create_dir(&private)?;
    fs::write(engine.path("o/rootfs/etc/passwd"), "web:x:5:5::/srv:/bin/sh\n")?;
    for (path, mode) in [(private, 0o700), (engine.path("o/rootfs/etc/passwd"), 0o600)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    }
    // A pipe in the place of a file that is to be written has no reader.
    make_pipe(&engine.path("pid.new"))?;
    let _input = engine.create("o")?;
    let pid: u64 = fs::read_to_string(engine.path("pid"))?.parse().context("no number")?;
    // An engine of an ordinary user may not enter the host's.
    let [own, carrier] =
        ["self", &pid.to_string()].map(|process| fs::read_link(format!("/proc/{process}/ns/pid")));
    ensure!(own? != carrier?, "the carrier is in the PID namespace of the engine");
    seen(&engine, "createRuntime", "creating", pid)?;
    engine.succeed(&["start", "o"])?;
    seen(&engine, "poststart", "running", pid)?;
    let score = fs::read_to_string(format!("/proc/{pid}/oom_score_adj"))?;
    ensure!(score == "500\n", "the host's score: {score}");
    terminal(&engine)?;
    capabilities(&engine)?;
    folders(&engine)?;
    nested_cgroups(&engine)?;
    // It has the guest's devices, and those of the host that the guest knows.
    let script = "[ -c /dev/kmsg ] && cat /dev/loop0 && [ -c /dev/own ] && ls /dev | grep -c no";
    let ended = engine.call(&["exec", "o", "sh", "-c", script])?;
    ensure!(ended.stdout == b"0\n", "{}", String::from_utf8_lossy(&ended.stderr));
    let count = engine.succeed(&["exec", "o", "grep", "-c", "^processor", "/proc/cpuinfo"])?;
    ensure!(count == "1\n", "CPUs of the VM: {count}");
    let cgroup = format!("parador-test-{}-o", std::process::id());
    let cpus = host_limit(&cgroup, ["cpuset.cpus", "cpuset.cpus"])?;
    ensure!(cpus == "0", "CPUs of the host: {cpus}");
    engine.succeed(&["update", "--cpuset-cpus", "0-1", "o"])?;
    ensure!(host_limit(&cgroup, ["cpuset.cpus", "cpuset.cpus"])? == "0-1", "update");
    engine.refused(&["delete", "o"], "cannot delete container o that is not stopped: running")?;
    engine.succeed(&["delete", "--force", "o"])?;
    seen(&engine, "poststop", "stopped", 0)?;
    engine.nothing_left("o")?;
    devices(&engine)?;
    hidden(&engine)?;
    not_started(&engine)?;
    refused(&engine)
}

/// States the devices that engines list for `--privileged`.
fn privileged(config: &mut Value) {
    config["linux"]["resources"]["devices"] =
        json!([{ "allow": false, "access": "rwm" }, { "allow": true, "access": "rwm" }]);
    config["linux"]["devices"] = json!([
        { "path": "/dev/no", "type": "c", "major": 10, "minor": 232 },
        { "path": "/dev/own", "type": "c", "major": 1, "minor": 5 }
    ]);
}

/// Checks the state that a hook had on its standard input.
fn seen(engine: &Engine, hook: &str, status: &str, pid: u64) -> Result<()> {
    let text = fs::read(engine.path(&format!("seen-{hook}"))).context("the hook has not run")?;
    let state: Value = serde_json::from_slice(&text).context("no state")?;
    let is_right = state["status"] == status && state["pid"] == pid && state["id"] == "o";
    ensure!(is_right, "{hook}: {state}");
    Ok(())
}

/// The terminal of `exec` has a name in the container, and belongs to its user.
fn terminal(engine: &Engine) -> Result<()> {
    let script = "tty; stat -c %u $(tty); echo opened >$(tty)";
    let ended = engine.succeed(&["exec", "-t", "-u", "5:5", "o", "sh", "-c", script])?;
    ensure!(ended == "/dev/pts/0\r\n5\r\nopened\r\n", "{ended:?}");
    // A container's file in the place of the multiplexer is not opened.
    let script = "mount -t tmpfs none /dev/pts && echo x >/dev/pts/ptmx";
    engine.succeed(&["exec", "--cap", "sys_admin", "o", "sh", "-c", script])?;
    let ended =
        engine.succeed(&["exec", "-t", "o", "sh", "-c", "[ -t 0 ] && cat /dev/pts/ptmx"])?;
    ensure!(ended == "x\r\n", "{ended:?}");
    Ok(())
}

/// A process of `exec` has further capabilities, or none that `execve` gives.
fn capabilities(engine: &Engine) -> Result<()> {
    let effective = |options: &[&str], line: &str| {
        let command = ["o", "grep", line, "/proc/self/status"];
        let text = engine.succeed(&[&["exec"], options, &command].concat())?;
        Ok::<_, anyhow::Error>(text.split_whitespace().nth(1).unwrap_or_default().to_owned())
    };
    ensure!(effective(&[], "CapEff")? == "0000000000000001", "of the container");
    let options = ["--cap", "CAP_NET_ADMIN", "-c", "kill"];
    ensure!(effective(&options, "CapEff")? == "0000000000001021", "more");
    ensure!(effective(&options, "CapInh")? == "0000000000000000", "inheritable");
    ensure!(effective(&["--no-new-privs"], "NoNewPrivs")? == "1", "privileges");
    // The guest's kernel loads the modules for it, with those that they need.
    let script = "brctl addbr new && cat /sys/class/net/new/bridge/forward_delay";
    let ended = engine.succeed(&["exec", "--cap", "CAP_NET_ADMIN", "o", "sh", "-c", script])?;
    ensure!(ended == "1500\n", "a bridge: {ended}");
    let script = "mkdir -p /dev/net && mknod /dev/net/tun c 10 200 && : </dev/net/tun";
    engine.succeed(&["exec", "--cap", "mknod", "o", "sh", "-c", script])?;
    engine.refused(&["exec", "--cap", "CAP_NO", "o", "true"], "unknown capability \"CAP_NO\"")
}

/// A user starts in a folder, and has the home, that only root can look up.
fn folders(engine: &Engine) -> Result<()> {
    let script = "pwd; echo $HOME";
    let of_user = ["exec", "-u", "5:5", "--cwd", "/private", "o", "sh", "-c", script];
    let ended = engine.succeed(&of_user)?;
    ensure!(ended == "/private\n/srv\n", "{ended}");
    // The program is one of the path that it has.
    let twice = ["exec", "-e", "PATH=/no", "-e", "PATH=/bin", "o", "true"];
    engine.succeed(&twice).map(drop)
}

/// Processes enter a container that gives its controllers to cgroups of its own.
fn nested_cgroups(engine: &Engine) -> Result<()> {
    let script = "cd /sys/fs/cgroup && mkdir own && for process in $(cat cgroup.procs); do \
        echo $process >own/cgroup.procs; done 2>/dev/null; echo +memory >cgroup.subtree_control";
    engine.succeed(&["exec", "o", "sh", "-c", script])?;
    let ended = engine.succeed(&["exec", "o", "cat", "/proc/self/cgroup"])?;
    ensure!(ended == "0::/own\n", "{ended}");
    Ok(())
}

/// A container that is not privileged makes nodes for devices of the guest, but cannot use them,
/// unless its rules permit it.
fn devices(engine: &Engine) -> Result<()> {
    let rule = |kind: &str, major: u32, minor: u32| json!({ "allow": true, "type": kind, "major": major, "minor": minor, "access": "r" });
    // As many rules as there may be.
    let rules = (1..512).map(|number| rule("c", 1000 + number, number));
    let rules: Vec<Value> = rules.chain([rule("b", 7, 1)]).collect();
    for (name, rules) in [("plain", json!(null)), ("loop", json!(rules))] {
        engine.bundle(name, "sleep 1000", |config| {
            let sets = ["bounding", "effective", "permitted"].into_iter();
            config["process"]["capabilities"] =
                sets.map(|set| (set.to_owned(), json!(["CAP_MKNOD"]))).collect();
            config["linux"]["resources"]["devices"] = rules;
        })?;
        let _input = engine.create(name)?;
        engine.succeed(&["start", name])?;
        let use_of = |minor: &str| {
            let script = format!(
                "echo x >/dev/null && mknod /tmp/loop{minor} b 7 {minor} && cat /tmp/loop{minor}"
            );
            let ended = engine.call(&["exec", name, "sh", "-c", &script])?;
            Ok::<_, anyhow::Error>(String::from_utf8_lossy(&ended.stderr).into_owned())
        };
        let denied = |text: &str| text.contains("/tmp/loop") && text.contains("not permitted");
        let (first, second) = (use_of("0")?, use_of("1")?);
        ensure!(denied(&first), "{name}: a device of the guest: {first:?}");
        let is_right = if name == "loop" { second.is_empty() } else { denied(&second) };
        ensure!(is_right, "{name}: the other device: {second:?}");
        engine.succeed(&["delete", "--force", name])?;
        engine.nothing_left(name)?;
    }
    Ok(())
}

/// An image without a file system at `/dev`, whose `/dev/null` leads to another file, shows that
/// not in the place of hidden ones.
fn hidden(engine: &Engine) -> Result<()> {
    engine.bundle("hidden", "cat /proc/keys; [ -c /dev/null ] && echo device", |config| {
        let mounts = config["mounts"].as_array_mut().expect("mounts");
        mounts.retain(|it| it["destination"] != "/dev");
    })?;
    let devices = engine.path("hidden/rootfs/dev");
    fs::create_dir_all(&devices)?;
    symlink("/etc/message", devices.join("null")).context("cannot make a link")?;
    let shown = engine.succeed(&["run", "--bundle", "hidden", "hidden"])?;
    ensure!(shown == "device\n", "{shown}");
    engine.nothing_left("hidden")
}

/// A container that was not started is deleted without `--force`.
fn not_started(engine: &Engine) -> Result<()> {
    engine.bundle("created", "sleep 1000", |_| {})?;
    let _input = engine.create("created")?;
    engine.succeed(&["delete", "created"])?;
    engine.nothing_left("created")
}

/// Files without an end, hooks that fail, and CPUs that the host has not, leave nothing.
fn refused(engine: &Engine) -> Result<()> {
    engine.bundle("hook", "true", |config| {
        let fails = json!({ "path": "/bin/sh", "args": ["sh", "-c", "echo why >&2; exit 3"] });
        let script = format!("cat >{}", engine.path("seen-undone").display());
        let undoes = json!({ "path": "/bin/sh", "args": ["sh", "-c", script] });
        config["hooks"] = json!({ "createRuntime": [fails], "poststop": [undoes] });
    })?;
    let text = "error running createRuntime hook #0: /bin/sh: exit status: 3, stderr: why";
    engine.refused(&["create", "--bundle", "hook", "hook"], text)?;
    engine.nothing_left("hook")?;
    let state = fs::read_to_string(engine.path("seen-undone")).context("no poststop hook")?;
    ensure!(state.contains("\"status\":\"stopped\""), "{state}");
    engine.bundle("cpus", "true", |config| {
        config["linux"]["resources"]["cpu"] = json!({ "cpus": "4000" });
    })?;
    engine.refused(&["create", "--bundle", "cpus", "cpus"], "cannot set the limit 4000 in")?;
    engine.nothing_left("cpus")?;
    engine.bundle("pipe", "true", |_| {})?;
    let config = engine.path("pipe/config.json");
    fs::remove_file(&config)?;
    make_pipe(&config)?;
    let begun = Instant::now();
    engine.refused(&["create", "--bundle", "pipe", "pipe"], "is not a regular file")?;
    fs::remove_file(&config)?;
    fs::File::create(&config)?.set_len(10 << 30)?;
    engine.refused(&["create", "--bundle", "pipe", "pipe"], "has more than 16777216 bytes")?;
    ensure!(begun.elapsed() < GONE, "the runtime has waited for {:?}", begun.elapsed());
    process_files(engine)
}

/// A process of a file that has no end is refused, and limits of one, too.
fn process_files(engine: &Engine) -> Result<()> {
    engine.bundle("file", "sleep 1000", |_| {})?;
    let _input = engine.create("file")?;
    engine.succeed(&["start", "file"])?;
    make_pipe(&engine.path("process"))?;
    let text = "is not a regular file";
    for file in ["process", "/dev/zero"] {
        engine.refused(&["exec", "--process", file, "file"], text)?;
        engine.refused(&["update", "--resources", file, "file"], text)?;
    }
    engine.succeed(&["delete", "--force", "file"])?;
    engine.nothing_left("file")
}

fn make_pipe(path: &Path) -> Result<()> {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).context("cannot make a pipe")
}
