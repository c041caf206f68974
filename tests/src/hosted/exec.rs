//! `parador exec`: one command in a VM of its own.

use super::{GONE, Rig, SLOW, succeed};
use crate::system::parador;
use crate::terminal::Terminal;
use anyhow::{Context, Result, bail, ensure};
use rustix::io::ioctl_fionbio;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{Read, Write, pipe};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A command, and what it must do.
struct Case {
    options: &'static [&'static str],
    root: &'static str,
    command: &'static [&'static str],
    input: &'static str,
    code: i32,
    /// Whole of standard output.
    output: &'static str,
    /// Part of standard error.
    errors: &'static str,
}

/// A case without options on this host's root.
const CASE: Case =
    Case { options: &[], root: "/", command: &[], input: "", code: 0, output: "", errors: "" };

/// `FOLDER` stands for the current folder.
const CASES: [Case; 23] = [
    Case {
        command: &["sh", "-c", "echo out; echo err >&2; exit 42"],
        code: 42,
        output: "out\n",
        errors: "err\n",
        ..CASE
    },
    Case { command: &["cat"], input: "some\ninput", output: "some\ninput", ..CASE },
    Case { command: &["sh", "-c", "exit 255"], code: 255, ..CASE },
    Case { command: &["sh", "-c", "kill -9 $$"], code: 137, ..CASE },
    Case { command: &["/no/such"], code: 127, errors: "/no/such: No such file", ..CASE },
    Case { command: &["/etc/passwd"], code: 126, errors: "Permission denied", ..CASE },
    Case { command: &["pwd"], output: "FOLDER\n", ..CASE },
    // The current folder changes, and nothing else.
    Case {
        command: &["sh", "-ec", "echo made >made; echo gone >/etc/parador-gone; cat made"],
        output: "made\n",
        ..CASE
    },
    // Times have nanoseconds.
    Case {
        command: &["sh", "-ec", "touch -d @1000000000.123456789 made; stat -c %.9Y made"],
        output: "1000000000.123456789\n",
        ..CASE
    },
    Case {
        command: &["sh", "-c", "cat made; ls /etc/parador-gone"],
        code: 2,
        output: "made\n",
        ..CASE
    },
    Case {
        options: &["--ro", "."],
        command: &["sh", "-c", "echo x >new"],
        code: 2,
        errors: "Read-only file system",
        ..CASE
    },
    Case {
        options: &["-e", "A=b c", "-e", "TZ=", "-w", "/usr"],
        command: &["sh", "-c", "echo \"$A,$TZ,$PWD\""],
        output: "b c,,/usr\n",
        ..CASE
    },
    Case {
        options: &["--timeout", "2s"],
        command: &["sleep", "100"],
        code: 124,
        errors: "time limit reached",
        ..CASE
    },
    // Guest applications cannot use the agent: its port takes the host only.
    Case { command: &["perl", "-e", CONNECT], output: "closed\n", ..CASE },
    Case { command: &["perl", "-e", ATTRIBUTES], output: "same\n", ..CASE },
    // Files of other file systems of the host are other files.
    Case { command: &["sh", "-c", "test /proc -ef /sys || echo other"], output: "other\n", ..CASE },
    Case {
        root: "/nowhere",
        command: &["true"],
        code: 125,
        errors: "cannot find the root",
        ..CASE
    },
    Case { root: "made", command: &["true"], code: 125, errors: "is no folder", ..CASE },
    Case {
        options: &["--rw", "/"],
        command: &["true"],
        code: 125,
        errors: "would let the command change all of this host",
        ..CASE
    },
    Case {
        options: &["--ro", "/proc"],
        command: &["true"],
        code: 125,
        errors: "/proc is the guest kernel's own",
        ..CASE
    },
    Case { command: &[""], code: 125, errors: "cannot start a program without a name", ..CASE },
    Case { options: &["-m", "1"], command: &["true"], code: 125, errors: "invalid", ..CASE },
    Case {
        options: &["--agent-timeout", "2h"],
        command: &["true"],
        code: 125,
        errors: "expected 1s to 1h (got 2h)",
        ..CASE
    },
];

/// Connects to the agent over the guest's own address (`AF_VSOCK`, `VMADDR_CID_LOCAL`), and prints
/// whether it was admitted.
const CONNECT: &str = "socket(S, 40, 1, 0) or die; \
    my $a = pack('SSLLCx3', 40, 0, 1024, 1, 0); \
    if (!connect(S, $a)) { print \"closed\\n\"; exit } \
    syswrite(S, \"\\2\\0\\0\\0\\1\\0\"); \
    print sysread(S, my $b, 1) ? \"open\\n\" : \"closed\\n\"";

/// Changes a file by one name, and reads its size by another one that was just looked up (with
/// `O_PATH`), and by its path.
const ATTRIBUTES: &str = "open(F, '>', 'linked') && link('linked', 'other') or die; \
    my $wrong = 0; \
    for my $size (1 .. 500) { \
        sysopen(P, 'other', 010000000) && syswrite(F, 'x') or die; \
        $wrong++ if (stat P)[7] != $size; close P; $wrong++ if -s 'other' != $size; \
    } \
    print $wrong ? \"$wrong wrong\\n\" : \"same\\n\"";

pub(super) fn exec(rig: &Rig) -> Command {
    let mut command = parador(rig.folder());
    command.arg("exec").arg("-k").arg(rig.kernel()).args(["--backend", "process"]);
    command
}

pub(super) fn run(command: &mut Command, input: &str) -> Result<Output> {
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().context("cannot start parador")?;
    let written = child.stdin.take().context("no input")?.write_all(input.as_bytes());
    // A command need not read its input.
    let _ = written;
    child.wait_with_output().context("cannot wait for parador")
}

/// Streams, exit codes, directories, environment, refusals.
pub fn commands() -> Result<()> {
    let rig = Rig::new()?;
    let folder = rig.folder().canonicalize().context("no folder")?;
    let folder = folder.to_str().context("a path that is not UTF-8")?;
    for case in CASES {
        let Case { options, root, command, input, code, output, errors } = case;
        let ended = run(exec(&rig).args(options).arg(root).arg("--").args(command), input)?;
        let [out, err] = [&ended.stdout, &ended.stderr].map(|text| String::from_utf8_lossy(text));
        let is_good = ended.status.code() == Some(code)
            && (code == 125 || out == output.replace("FOLDER", folder))
            && err.contains(errors);
        ensure!(is_good, "{command:?} in {root}: {:?}\n{out}\n{err}", ended.status);
    }
    ensure!(!Path::new("/etc/parador-gone").exists(), "the host's root was changed");
    kernels_folder(&rig)?;
    lost_output(&rig)?;
    streams_without_waits(&rig)?;
    clocks(&rig)
}

/// In a folder of the host's kernel a command has that of the guest's.
fn kernels_folder(rig: &Rig) -> Result<()> {
    let mut command = exec(rig);
    let ended =
        run(command.current_dir("/proc").args(["/", "--", "cat", "sys/kernel/hostname"]), "")?;
    ensure!(ended.status.success() && ended.stdout == b"parador\n", "{ended:?}");
    Ok(())
}

/// Output that cannot be written is an error, although the command has not learned of it.
fn lost_output(rig: &Rig) -> Result<()> {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").context("no /dev/full")?;
    let mut command = exec(rig);
    command.args(["/", "--", "echo", "lost"]).stdin(Stdio::null()).stdout(full);
    let ended = command.stderr(Stdio::piped()).output().context("cannot start parador")?;
    let errors = String::from_utf8_lossy(&ended.stderr);
    let is_reported = errors.contains("cannot write the command's output: No space left");
    ensure!(ended.status.code() == Some(125) && is_reported, "{ended:?}");
    Ok(())
}

/// Streams that another program has made non-blocking lose nothing, however slow their ends are.
fn streams_without_waits(rig: &Rig) -> Result<()> {
    const LENGTH: usize = 300_000;
    let (from, mut input) = pipe().context("cannot make a pipe")?;
    let (mut output, to) = pipe().context("cannot make a pipe")?;
    ioctl_fionbio(&from, true).context("cannot change a pipe")?;
    ioctl_fionbio(&to, true).context("cannot change a pipe")?;
    let mut command = exec(rig);
    command.args(["/", "--", "cat"]).stdin(from).stdout(to).stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot start parador")?;
    // The pipes of this process end with the command's.
    drop(command);
    sleep(Duration::from_secs(2));
    let written = spawn(move || input.write_all(&[b'x'; LENGTH]));
    let mut all = Vec::new();
    let mut room = [0; 4096];
    while let count @ 1.. = output.read(&mut room).context("no output")? {
        all.extend_from_slice(&room[..count]);
        sleep(Duration::from_millis(1));
    }
    let ended = child.wait().context("cannot wait for parador")?;
    let _ = written.join();
    ensure!(ended.success() && all.len() == LENGTH, "{ended}: {} bytes", all.len());
    Ok(())
}

/// The guest's wall clock and its real-time clock have the host's time.
fn clocks(rig: &Rig) -> Result<()> {
    /// Difference that the agent does not correct, and that a start always exceeds.
    const TOLERANCE: Duration = Duration::from_millis(10);
    let script = "date +%s%N; cat /sys/class/rtc/rtc0/since_epoch";
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).context("a time before 1970");
    let before = now()?;
    let ended = run(exec(rig).arg("/").args(["--", "sh", "-ec", script]), "")?;
    let after = now()?;
    let output = String::from_utf8_lossy(&ended.stdout);
    let numbers: Vec<u64> = output.lines().filter_map(|line| line.parse().ok()).collect();
    let [time, second] = numbers[..] else { bail!("{ended:?}") };
    let is_now = (before..=after + TOLERANCE).contains(&Duration::from_nanos(time));
    ensure!(is_now, "the guest's time is {time}, the host's {before:?} to {after:?}");
    let is_now = (before.as_secs()..=after.as_secs()).contains(&second);
    ensure!(is_now, "the real-time clock has {second}, the host {before:?} to {after:?}");
    Ok(())
}

/// Roots that are folders and images; none is changed.
pub fn roots() -> Result<()> {
    let rig = Rig::new()?;
    let tree = rig.path("tree");
    fs::create_dir_all(tree.join("bin")).context("cannot make a folder")?;
    fs::copy("/bin/busybox", tree.join("bin/busybox")).context("cannot copy busybox")?;
    symlink("busybox", tree.join("bin/sh")).context("cannot make a link")?;
    fs::write(tree.join("file"), "before\n").context("cannot write a file")?;
    let [raw, image] = ["root.img", "root.qcow2"].map(|name| rig.path(name));
    let make = ["-q", "-t", "ext4", "-d"];
    succeed(Command::new("mke2fs").args(make).args([&tree, &raw]).arg("16M"))?;
    succeed(Command::new("qemu-img").args(["convert", "-O", "qcow2"]).args([&raw, &image]))?;
    let before = fs::read(&raw).context("no image")?;
    for root in [&tree, &raw, &image] {
        // A root without names of hosts gets its own, and one without modprobe(8) has its modules.
        let script =
            "busybox brctl addbr new; echo after >>/file; busybox cat /file; busybox uname -n
            busybox ping -c 1 -q localhost >&2; busybox ping -c 1 -q parador >&2";
        let ended = run(exec(&rig).arg(root).args(["--", "sh", "-ec", script]), "")?;
        let output = String::from_utf8_lossy(&ended.stdout);
        let is_good = ended.status.success() && output == "before\nafter\nparador\n";
        ensure!(is_good, "{}: {ended:?}", root.display());
    }
    ensure!(fs::read(&raw).context("no image")? == before, "the image was changed");
    let file = fs::read_to_string(tree.join("file")).context("no file")?;
    ensure!(file == "before\n", "the folder was changed");
    Ok(())
}

/// Runs `parador exec` in a namespace where `/etc`, with other name servers and no names of hosts,
/// is a copy that the guest may change.
const IN_ETC: &str = r#"
# A user cannot copy all of it.
cp -a /etc etc 2>/dev/null || true
rm -f etc/resolv.conf etc/hosts
echo nameserver 192.0.2.1 >etc/resolv.conf
mount --bind etc /etc
cd /etc
"$@" -- cat /etc/resolv.conf
cat /etc/resolv.conf
test ! -e /etc/hosts
"#;

/// The guest's name server, and its names of hosts, change no file of a shared directory.
pub fn shared_etc() -> Result<()> {
    let rig = Rig::new()?;
    let mut command = Command::new("unshare");
    command.arg("-m");
    if !rustix::process::geteuid().is_root() {
        command.arg("-r");
    }
    let own = exec(&rig);
    command.args(["sh", "-ec", IN_ETC, "sh"]).arg(own.get_program()).args(own.get_args());
    command.args(["--net", "user", "/"]).current_dir(rig.folder());
    let ended = run(&mut command, "")?;
    let output = String::from_utf8_lossy(&ended.stdout);
    let servers = "nameserver 192.0.2.1\n";
    ensure!(ended.status.success() && output == servers.repeat(2), "{ended:?}");
    Ok(())
}

/// Root reads files of all owners below ROOT, and with `owners=on` a folder has the guest's; for
/// other users the option is refused.
pub fn owners() -> Result<()> {
    let rig = Rig::new()?;
    let tree = rig.path("tree");
    fs::create_dir_all(tree.join("bin")).context("cannot make a folder")?;
    fs::copy("/bin/busybox", tree.join("bin/busybox")).context("cannot copy busybox")?;
    symlink("busybox", tree.join("bin/sh")).context("cannot make a link")?;
    fs::create_dir(tree.join("etc")).context("cannot make a folder")?;
    fs::write(tree.join("etc/passwd"), "web:x:1234:99::/:/bin/sh\n").context("no users")?;
    let changed = rig.path("changed");
    fs::create_dir(&changed).context("cannot make a folder")?;
    let secret = tree.join("secret");
    fs::write(&secret, "of 1234\n").context("cannot write a file")?;
    let option = format!("{},owners=on", changed.display());
    let mut command = exec(&rig);
    command.args(["--rw", &option]).arg(&tree).args(["--", "busybox", "sh", "-ec"]);
    command.arg(format!(
        "cd {}; busybox cat /secret; busybox touch made; busybox chown 1234:99 made
        busybox chmod 4750 made; busybox touch other; busybox chmod 777 .
        busybox su web -c 'busybox mkdir folder; busybox touch folder/inner'",
        changed.display()
    ));
    if !rustix::process::geteuid().is_root() {
        let ended = run(&mut command, "")?;
        let errors = String::from_utf8_lossy(&ended.stderr);
        let is_refused = ended.status.code() == Some(125) && errors.contains("owners=on serves");
        ensure!(is_refused, "{ended:?}");
        return Ok(());
    }
    chown(&secret, Some(1234), Some(1234)).context("cannot change an owner")?;
    let private = fs::Permissions::from_mode(0o600);
    fs::set_permissions(&secret, private).context("cannot change a mode")?;
    let ended = run(&mut command, "")?;
    let output = String::from_utf8_lossy(&ended.stdout);
    ensure!(ended.status.success() && output == "of 1234\n", "{ended:?}");
    for (name, owners, mode) in [
        ("made", (1234, 99), 0o104_750),
        ("other", (0, 0), 0o100_644),
        ("folder", (1234, 99), 0o040_755),
        ("folder/inner", (1234, 99), 0o100_644),
    ] {
        let found = fs::metadata(changed.join(name)).context("no file")?;
        let is_good = (found.uid(), found.gid()) == owners && found.mode() == mode;
        ensure!(is_good, "{name}: {found:?}");
    }
    unwritable(&rig)
}

/// Without `owners=on` root of the guest cannot change a folder of another user; if its command
/// fails, the remedy is stated.
fn unwritable(rig: &Rig) -> Result<()> {
    let folder = rig.path("foreign");
    fs::create_dir(&folder).context("cannot make a folder")?;
    chown(&folder, Some(1234), Some(1234)).context("cannot change an owner")?;
    for (script, code, is_stated) in [("echo 1 >made", 2, true), ("test ! -e made", 0, false)] {
        let mut command = exec(rig);
        command.current_dir(&folder).args(["/", "--", "sh", "-c", script]);
        let ended = run(&mut command, "")?;
        let errors = String::from_utf8_lossy(&ended.stderr);
        let states = errors.contains(&format!("`--rw {},owners=on` lets it", folder.display()));
        ensure!(ended.status.code() == Some(code) && states == is_stated, "{ended:?}");
    }
    Ok(())
}

/// Makes `image.tar`, as `docker save` does: busybox with an owner and set-user-ID, a user, and a
/// command.
const MAKE_IMAGE: &str = r#"
mkdir -p tree/bin tree/etc tree/srv
cp /bin/busybox tree/bin/busybox
ln -s busybox tree/bin/sh
echo 'web:x:33:34::/srv:/bin/sh' >tree/etc/passwd
echo 'log:x:4:web' >tree/etc/group
tar -cf layer.tar --owner=7:7 --group=8:8 --mode=4755 -C tree .
digest=$(sha256sum <layer.tar | cut -d' ' -f1)
cat >config.json <<END
{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:$digest"]},
"config":{"User":"web","Env":["A=image"],"WorkingDir":"/srv","Entrypoint":["sh","-c"],
"Cmd":["busybox id -u; busybox id -G; pwd; echo \$A \$HOME; busybox stat -c %u:%g:%a /bin/busybox"]}}
END
echo '[{"Config":"config.json","Layers":["layer.tar"]}]' >manifest.json
tar -cf image.tar manifest.json config.json layer.tar
"#;

/// An archive as `docker save` makes it: owners, modes, and the image's command and user.
pub fn archive() -> Result<()> {
    let rig = Rig::new()?;
    succeed(Command::new("sh").args(["-ec", MAKE_IMAGE]).current_dir(rig.folder()))?;
    let exec = || {
        let mut command = exec(&rig);
        command.env("XDG_CACHE_HOME", rig.path("cache"));
        command
    };
    let expect = |command: &mut Command, output: &str| {
        let ended = run(command, "")?;
        let is_good = ended.status.success() && String::from_utf8_lossy(&ended.stdout) == output;
        ensure!(is_good, "{command:?}: {ended:?}");
        Ok(())
    };
    expect(exec().arg("image.tar"), "33\n34 4\n/srv\nimage /srv\n7:8:4755\n")?;
    // From the cache: the archive's layers are not needed again.
    let script = "echo $A; echo x >/tmp/new; busybox stat -c %u /tmp/new";
    let options = ["-e", "A=own", "image.tar", "--", "sh", "-c", script];
    expect(exec().args(options), "own\n33\n")?;
    for (root, reason) in [(".", "the command is missing"), ("layer.tar", "is no folder")] {
        let ended = run(exec().arg(root), "")?;
        let errors = String::from_utf8_lossy(&ended.stderr);
        let is_good = ended.status.code() == Some(125) && errors.contains(reason);
        ensure!(is_good, "{root}: {ended:?}");
    }
    Ok(())
}

/// A terminal with its size and keys.
pub fn terminal() -> Result<()> {
    let rig = Rig::new()?;
    let script = "tty; stty size; read line; echo \"got $line\"; sleep 100";
    let mut terminal = Terminal::start(exec(&rig).args(["/", "--", "sh", "-c", script]))?;
    let soon = Instant::now() + SLOW;
    terminal.screen.expect("24 80", soon)?;
    terminal.type_text("word\r")?;
    terminal.screen.expect("got word", soon)?;
    terminal.type_text("\x03")?;
    let code = terminal.wait(soon)?;
    ensure!(code == 130, "Ctrl-C ended it with {code}");
    Ok(())
}

/// Signals reach the command; nothing is left when the carrier is killed.
pub fn killed() -> Result<()> {
    let rig = Rig::new()?;
    let start = |prefix: &[&str], script: &str| {
        let own = exec(&rig);
        let mut command = Command::new(prefix.first().copied().unwrap_or("env"));
        command.args(prefix.iter().skip(1)).arg(own.get_program()).args(own.get_args());
        command
            .current_dir(rig.folder())
            .envs(own.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.env("XDG_RUNTIME_DIR", rig.folder()).args(["/", "--", "sh", "-c", script]);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let mut line = [0; 6];
        child.stdout.as_mut().context("no output")?.read_exact(&mut line)?;
        ensure!(line == *b"ready\n", "it has printed {line:?}");
        Ok(child)
    };
    let mut child = start(&[], "trap 'exit 7' TERM; echo ready; while :; do sleep 0.1; done")?;
    kill_process(Pid::from_child(&child), Signal::TERM).context("cannot send a signal")?;
    let code = child.wait().context("cannot wait")?.code();
    ensure!(code == Some(7), "the command's handler gave {code:?}");
    resized_early(&rig)?;
    let mut child = start(&["nohup"], "echo ready; sleep 1; exit 8")?;
    kill_process(Pid::from_child(&child), Signal::HUP).context("cannot send a signal")?;
    let code = child.wait().context("cannot wait")?.code();
    ensure!(code == Some(8), "SIGHUP ended a command below nohup with {code:?}");
    let mut child = start(&[], "echo ready; sleep 100")?;
    ensure!(processes(rig.folder())? != 0, "the VM has no process");
    child.kill().and_then(|()| child.wait()).context("cannot kill it")?;
    let deadline = Instant::now() + GONE;
    while processes(rig.folder())? != 0 {
        ensure!(Instant::now() < deadline, "processes of the VM are left");
        sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Signals before the agent's answer, as of a terminal that is resized, do no harm.
fn resized_early(rig: &Rig) -> Result<()> {
    let mut command = exec(rig);
    let mut child = command.args(["/", "--", "true"]).stdin(Stdio::null()).spawn()?;
    let code = loop {
        if let Some(status) = child.try_wait().context("cannot wait")? {
            break status.code();
        }
        kill_process(Pid::from_child(&child), Signal::WINCH).context("cannot send a signal")?;
        sleep(Duration::from_millis(1));
    };
    ensure!(code == Some(0), "SIGWINCH ended the command with {code:?}");
    Ok(())
}

/// Returns how many processes have this folder in their command line.
pub(super) fn processes(folder: &Path) -> Result<usize> {
    let folder = folder.as_os_str().as_bytes();
    let lines = fs::read_dir("/proc").context("no /proc")?.filter_map(|entry| {
        // A process may end meanwhile.
        fs::read(entry.ok()?.path().join("cmdline")).ok()
    });
    let has_folder = |line: &Vec<u8>| line.windows(folder.len()).any(|part| part == folder);
    Ok(lines.filter(has_folder).count())
}
