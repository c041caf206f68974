//! Configurations that other runtimes accept: what they state is there, or is harmless.

use super::super::succeed_with;
use super::{Engine, GONE};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Name of the container.
const NAME: &str = "odd";

/// Script in the container; each line has its expected output after `#`.
const SCRIPT: &str = r#"
cat /proc/self/oom_score_adj                               # 123
pwd; stat -c %a /plain/made                                # /plain/made/by/runtime 755
cat /proc/sys/kernel/domainname                            # example.org
busybox uname -m                                           # i686
ls /copied; stat -c %a /copied                             # file 750
echo x >/copied/new && cat /copied/new                     # x
grep -c ' /copied tmpfs ro' /proc/mounts                   # 0
stat -c %a /plain /stated                                  # 711 700
cat /null && echo empty                                    # empty
echo x >/below/file || echo read-only                      # read-only
stat -c %a /deep /deep/er                                  # 755 755
cat /etc/resolv.conf /missing/stub                         # a message a message
grep -c ' /missing/' /proc/mounts; ls /missing/a           # 3 in
/protected/busybox echo runs                               # runs
echo x >/protected/file || echo protected                  # protected
ulimit -Hn                                                 # 2000000
test -p /dev/fifo && echo fifo                             # fifo
"#;

fn change(config: &mut Value) {
    config["hooks"] = json!({ "prestart": [], "poststop": [] });
    config["domainname"] = json!("example.org");
    config["process"]["oomScoreAdj"] = json!(123);
    config["process"]["cwd"] = json!("/plain/made/by/runtime");
    config["process"]["rlimits"] =
        json!([{ "type": "RLIMIT_NOFILE", "soft": 2_000_000, "hard": 2_000_000 }]);
    let mounts = [
        json!({ "destination": "/copied", "type": "tmpfs", "source": "tmpfs",
            "options": ["tmpcopyup"] }),
        json!({ "destination": "/plain", "type": "tmpfs", "source": "tmpfs" }),
        json!({ "destination": "/stated", "type": "tmpfs", "source": "tmpfs",
            "options": ["tmpcopyup", "mode=0700"] }),
        json!({ "destination": "/null", "type": "bind", "source": "/dev/null",
            "options": ["bind"] }),
        json!({ "destination": "/below", "type": "bind", "source": "../volume",
            "options": ["rbind", "rro"] }),
        json!({ "destination": "/deep/er/est", "type": "bind", "source": "../volume",
            "options": ["rbind"] }),
        json!({ "destination": "/etc/resolv.conf", "type": "bind", "source": "../message",
            "options": ["bind"] }),
        json!({ "destination": "/dangling/a", "type": "tmpfs", "source": "tmpfs" }),
        json!({ "destination": "/dangling/a/in", "type": "bind", "source": "../volume",
            "options": ["rbind"] }),
    ];
    config["mounts"].as_array_mut().expect("mounts").extend(mounts);
    config["linux"]["devices"] = json!([{ "path": "/dev/fifo", "type": "p", "fileMode": 384 }]);
    config["linux"]["personality"] = json!({ "domain": "LINUX32" });
    config["linux"]["readonlyPaths"] = json!(["/proc/sys", "/protected"]);
}

/// The container has all of it, and gets real-time signals.
pub fn accepted() -> Result<()> {
    let engine = Engine::new()?;
    let lines = SCRIPT.lines().filter_map(|line| line.split_once(" # "));
    let (commands, expected): (Vec<_>, Vec<_>) = lines.unzip();
    let expected: Vec<&str> = expected.iter().flat_map(|it| it.split_whitespace()).collect();
    let commands = commands.join("\n");
    let script = format!(
        "exec 2>/dev/null\n{commands}\ntrap 'echo resized' 28; trap 'echo signal; exit 7' 37\n\
         echo ready; while :; do sleep 0.1; done"
    );
    engine.bundle(NAME, &script, change)?;
    let root = engine.path(NAME).join("rootfs");
    for (folder, mode) in
        [("copied", 0o750), ("plain", 0o711), ("stated", 0o711), ("protected", 0o755)]
    {
        let folder = root.join(folder);
        fs::create_dir(&folder).context("cannot make a folder")?;
        fs::set_permissions(&folder, fs::Permissions::from_mode(mode))?;
    }
    for (target, link) in [("../missing/stub", "etc/resolv.conf"), ("/missing", "dangling")] {
        symlink(target, root.join(link)).context("cannot make a link")?;
    }
    fs::write(root.join("copied/file"), "").context("cannot write")?;
    fs::copy("/bin/busybox", root.join("protected/busybox")).context("cannot copy busybox")?;
    engine.refused(
        &["create", "--bundle", NAME, "--pid-file", "/no/such/pid", NAME],
        "cannot write /no/such/pid",
    )?;
    engine.nothing_left(NAME)?;
    let _input = engine.create(NAME)?;
    engine.succeed(&["start", NAME])?;
    let output = wait_for_line(&engine, "ready")?;
    let found: Vec<&str> = output.split_whitespace().filter(|word| *word != "ready").collect();
    ensure!(found == expected, "{found:?}\n{expected:?}");
    ensure!(!root.join("copied/new").exists(), "the host's folder was changed");
    fs::write(root.join("bin/garbage"), "echo shell").context("cannot write")?;
    fs::set_permissions(root.join("bin/garbage"), fs::Permissions::from_mode(0o755))?;
    engine.refused(&["exec", NAME, "garbage"], "exec /bin/garbage: Exec format error")?;
    let process = engine.path("process");
    let process = process.to_str().context("a path that is not UTF-8")?;
    let text = json!({ "args": ["grep", "CapBnd", "/proc/self/status"], "cwd": "/", "user": {},
        "env": ["PATH=/bin"] });
    fs::write(process, text.to_string())?;
    let bounding = engine.succeed(&["exec", "--process", process, NAME])?;
    ensure!(bounding == "CapBnd:\t0000000000000001\n", "{bounding}");
    fs::write(process, "{")?;
    engine.refused(&["exec", "--process", process, NAME], "EOF while parsing")?;
    entered(&engine)?;
    // Without a terminal, and as the STOPSIGNAL of an image.
    engine.succeed(&["kill", NAME, "WINCH"])?;
    wait_for_line(&engine, "resized")?;
    engine.succeed(&["kill", NAME, "SIGRTMIN+3"])?;
    engine.wait_for(NAME, "stopped")?;
    wait_for_line(&engine, "signal")?;
    engine.succeed(&["delete", NAME])?;
    engine.nothing_left(NAME)
}

/// An engine that enters the mount namespace of the process that it knows, as `podman cp` does,
/// changes the container's files and not the host's; the network namespace is not the host's.
fn entered(engine: &Engine) -> Result<()> {
    let carrier = engine.state(NAME)?["pid"].to_string();
    let enter = |script: &str| {
        let mut command = Command::new("nsenter");
        succeed_with(command.args(["--target", &carrier, "--mount", "/bin/sh", "-c", script]))
    };
    let found = enter("cat /etc/message; echo copied >/tmp/copied; echo copied >/volume/copied")?;
    ensure!(found == "a message\n", "{found}");
    let inside = engine.succeed(&["exec", NAME, "cat", "/tmp/copied", "/volume/copied"])?;
    ensure!(inside == "copied\ncopied\n", "{inside}");
    ensure!(engine.path("volume/copied").exists(), "the volume has no copy");
    ensure!(network(&carrier)? != network("self")?, "the carrier has the host's network");
    Ok(())
}

/// Returns the network namespace of a process.
pub(super) fn network(pid: &str) -> Result<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/net")).context("no namespace")
}

fn wait_for_line(engine: &Engine, line: &str) -> Result<String> {
    let deadline = Instant::now() + GONE;
    loop {
        let output = engine.output();
        if output.lines().any(|found| found == line) {
            return Ok(output);
        }
        ensure!(Instant::now() < deadline, "no line {line:?}: {output}");
        sleep(Duration::from_millis(20));
    }
}
