//! The surroundings of a VM under attack, which an attack must not change: files, a process of the
//! same user, another VM.

use crate::hosted::{Ended, GONE, LIMIT, Rig, ended, start, succeed_with};
use crate::previrt::Kernel;
use crate::sandbox;
use crate::system::{artifacts, target};
use crate::transcript::Transcript;
use anyhow::{Context, Result, anyhow, ensure};
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Another seed than [`FIRST_SEED`].
const SEED: &str = "PARADOR_ESCAPE_SEED";
const FIRST_SEED: u64 = 1;
/// Seconds that a machine under attack may take: some hang.
const MOMENT: u32 = 20;
/// Time limit for the bystanders' next sign of life, on a busy host.
const SHOWN: Duration = Duration::from_secs(60);
/// The end by `--timeout`.
const LATE: i32 = 124;
/// User and group that own nothing.
const UNPRIVILEGED: &str = "65534";
/// Result that the neighbour computes repeatedly.
const SUM: &str = "seq 20000 | sha256sum";
/// Sectors of the disk that is only read.
const FIXED: &str = "fixed.img";
const FIXED_LENGTH: usize = 4 << 20;
/// An image that a process of its own serves, and the folder of another.
pub(super) const IMAGE: &str = "image.qcow2";
pub(super) const FOLDER: &str = "folder";

/// Confinement of a VM, and the user who starts it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// As the tests, with all that keeps a machine in.
    Default,
    /// The same without namespaces and Landlock.
    Open,
    /// With a seccomp filter like a container's, which refuses namespaces, on a kernel without
    /// Landlock; as root if root runs the tests.
    Container,
    /// A user without any capability, with all that keeps a machine in.
    User,
    /// The same without namespaces and Landlock.
    OpenUser,
}

impl Place {
    pub(super) const ALL: [Self; 5] =
        [Self::Default, Self::Open, Self::Container, Self::User, Self::OpenUser];

    fn is_user(self) -> bool {
        matches!(self, Self::User | Self::OpenUser)
    }

    /// Words before and after the VM's command.
    fn around(self) -> Result<(Vec<String>, &'static [&'static str])> {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let open = &["--sandbox", "off"];
        Ok(match self {
            Self::Default => (Vec::new(), &[]),
            Self::Open => (Vec::new(), open),
            Self::Container => {
                let itself = std::env::current_exe().context("no path of this program")?;
                (vec![itself.display().to_string(), sandbox::ENTER_OLD.to_owned()], &[])
            }
            Self::User => (words(&plain_user()?), &[]),
            Self::OpenUser => (words(&plain_user()?), open),
        })
    }
}

/// Prefix that runs a command as another user without capabilities.
pub fn plain_user() -> Result<Vec<&'static str>> {
    let is_root = fs::metadata("/proc/self").context("no /proc")?.uid() == 0;
    let mut words = vec!["setpriv", "--inh-caps=-all", "--no-new-privs"];
    if is_root {
        words.extend(["--reuid", UNPRIVILEGED, "--regid", UNPRIVILEGED, "--clear-groups"]);
        words.push("--bounding-set=-all");
    }
    Ok(words)
}

/// The outside of a machine, and machines.
pub(super) struct Outside {
    pub(super) rig: Rig,
    module: PathBuf,
    /// Time limit of each machine in seconds.
    pub(super) limit: u32,
    pub(super) seed: u64,
    place: Place,
    /// A process of the same user, which blocks all signals that it can.
    pub(super) canary: Child,
    neighbour: Child,
    console: Transcript,
    sum: String,
    before: BTreeMap<PathBuf, File>,
}

/// State of a file.
#[derive(PartialEq, Eq, Debug)]
struct File {
    content: Vec<u8>,
    mode: u32,
    owner: (u32, u32),
    changed: (i64, i64),
}

impl Outside {
    pub(super) fn new() -> Result<Self> {
        Self::of(Place::Default)
    }

    /// Of machines at a place.
    pub(super) fn of(place: Place) -> Result<Self> {
        let seed = match std::env::var(SEED) {
            Ok(text) => text.parse().with_context(|| format!("{SEED} is no number"))?,
            Err(_) => FIRST_SEED,
        };
        let rig = Rig::new()?;
        fs::create_dir(rig.path("canary")).context("cannot make a folder")?;
        for (name, content) in [("empty", &b""[..]), ("some", b"content\n"), ("much", &[7; 70000])]
        {
            fs::write(rig.path("canary").join(name), content).context("cannot write a file")?;
        }
        fs::write(rig.path(FIXED), vec![5; FIXED_LENGTH]).context("cannot write a disk")?;
        fs::create_dir(rig.path(FOLDER)).context("cannot make a folder")?;
        fs::write(rig.path(FOLDER).join("file"), "content\n").context("cannot write a file")?;
        let mut image = Command::new("qemu-img");
        succeed_with(image.args(["create", "-q", "-f", "qcow2"]).arg(rig.path(IMAGE)).arg("16M"))?;
        if place.is_user() {
            share_with_all(&rig)?;
        }
        let user = if place.is_user() { plain_user()? } else { Vec::new() };
        let last = ["setpriv", "--pdeathsig", "KILL", "env", "--block-signal", "sleep", "100000"];
        let words = [&user[..], &last].concat();
        let mut canary = Command::new(words[0]);
        canary.args(&words[1..]);
        let canary = canary.stdin(Stdio::null()).spawn().context("cannot start a process")?;
        let sum = succeed_with(Command::new("sh").args(["-c", SUM]))?;
        let script = format!("while :; do echo sum $({SUM}); sleep 0.1; done");
        let mut neighbour = rig.bare(100 * LIMIT);
        neighbour.args(["-i", "busybox", "-m", "64M", "-p", &format!("parador.run=\"{script}\"")]);
        let mut neighbour = start(&mut neighbour)?;
        let output = neighbour.stdout.take().context("no output")?;
        let module = Kernel::get()?.check_escape();
        let sum = sum.split_whitespace().next().context("no sum")?.to_owned();
        let (before, limit) = (BTreeMap::new(), MOMENT);
        let console = Transcript::follow("neighbour", output);
        let mut outside =
            Self { rig, module, limit, seed, place, canary, neighbour, console, sum, before };
        outside.before = outside.files()?;
        outside.continues()?;
        Ok(outside)
    }

    /// Everything that no machine is to change.
    fn files(&self) -> Result<BTreeMap<PathBuf, File>> {
        let mut files = BTreeMap::new();
        let mut add = |path: PathBuf| {
            let data = fs::symlink_metadata(&path)?;
            let file = File {
                content: if data.is_dir() { Vec::new() } else { fs::read(&path)? },
                mode: data.mode(),
                owner: (data.uid(), data.gid()),
                changed: (data.ctime(), data.ctime_nsec()),
            };
            files.insert(path, file);
            Ok::<_, std::io::Error>(())
        };
        let folder = self.rig.path("canary");
        let entries = fs::read_dir(&folder).context("the canaries' folder is gone")?;
        let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        for path in paths.into_iter().chain([folder, self.rig.path(FIXED)]) {
            add(path.clone()).with_context(|| format!("{} is gone", path.display()))?;
        }
        Ok(files)
    }

    /// The neighbour computes, and right.
    fn continues(&mut self) -> Result<()> {
        let sums = |text: &str| text.lines().filter(|line| line.starts_with("sum ")).count();
        let (before, deadline) = (sums(&self.console.text()), Instant::now() + SHOWN);
        // One line may be on its way.
        while sums(&self.console.text()) < before + 3 {
            let left = Instant::now() < deadline;
            ensure!(left, "the neighbour does not continue:\n{}", self.console.tail());
            thread::sleep(Duration::from_millis(50));
        }
        let text = self.console.text();
        let all = &text[..text.rfind('\n').unwrap_or(0)];
        let wrong = all.lines().find(|line| {
            line.strip_prefix("sum ").is_some_and(|rest| !rest.starts_with(&self.sum))
        });
        ensure!(wrong.is_none(), "the neighbour computes {wrong:?}, not {}", self.sum);
        Ok(())
    }

    /// Nothing outside has been touched.
    fn is_whole(&mut self) -> Result<()> {
        let now = self.files()?;
        for (path, file) in &self.before {
            ensure!(now.get(path) == Some(file), "{} has been changed", path.display());
        }
        ensure!(now.len() == self.before.len(), "there are files more: {:?}", now.keys());
        let status = fs::read_to_string(format!("/proc/{}/status", self.canary.id()))
            .context("a process of the user has ended")?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.map(str::trim).unwrap_or_default()
        };
        let pending = [field("SigPnd:"), field("ShdPnd:")];
        let is_quiet = pending.iter().all(|bits| bits.chars().all(|digit| digit == '0'));
        ensure!(
            is_quiet && field("State:").starts_with('S'),
            "a process of the user has been sent a signal:\n{status}"
        );
        self.continues()
    }

    /// Runs a machine whose kernel takes the module, and looks around afterwards. The machine's own
    /// end is the caller's to judge, but it has one.
    pub(super) fn attack(&mut self, arguments: &str, options: &[&str]) -> Result<Ended> {
        self.attack_watched(arguments, options, |_| Ok(()))
    }

    /// The same; `watch` is called again and again while the machine runs, with the number of its
    /// session.
    pub(super) fn attack_watched(
        &mut self,
        arguments: &str,
        options: &[&str],
        mut watch: impl FnMut(u32) -> Result<()>,
    ) -> Result<Ended> {
        let child = start(&mut self.machine(arguments, options)?)?;
        let id = child.id();
        let machine = thread::spawn(move || ended(child));
        let mut watched = Ok(());
        while !machine.is_finished() {
            watched = watched.and_then(|()| watch(id));
            thread::sleep(Duration::from_millis(10));
        }
        let ended = machine.join().map_err(|_| anyhow!("the machine's thread panicked"))??;
        let check = || {
            watched?;
            // Of the loader's own panics: the wedge says that of itself in other words.
            let panicked = ended.messages.contains("thread '");
            ensure!(!panicked, "parador has panicked:\n{}", ended.messages);
            let deadline = Instant::now() + GONE;
            while let Some(left) = of_session(id)?.first() {
                ensure!(Instant::now() < deadline, "a process has stayed:\n{left}");
                thread::sleep(Duration::from_millis(20));
            }
            let is_a_guests = matches!(ended.code, 0..=63 | 80 | 81 | 83 | LATE);
            ensure!(is_a_guests, "the guest has brought about exit code {}", ended.code);
            self.is_whole()
        };
        match check() {
            Ok(()) => Ok(ended),
            Err(error) => Err(error.context(format!(
                "{:?} {arguments} seed={}: code {}\n{}\n{}",
                self.place,
                self.seed,
                ended.code,
                ended.console,
                last(&ended.messages)
            ))),
        }
    }

    /// The command for a machine whose kernel takes the module.
    pub(super) fn machine(&self, arguments: &str, options: &[&str]) -> Result<Command> {
        let canary = self.canary.id();
        let module = format!("insmod /mnt/check_escape.ko seed={} canary={canary}", self.seed);
        let script = format!("{module} {arguments} || echo refused; echo continues\n");
        self.rig.disk("disk.img", &script, &[&self.module])?;
        let mut machine = self.rig.bare(self.limit);
        let run = "mkdir -p /mnt; mount /dev/vda /mnt; sh -e /mnt/script";
        machine.args(["-i", "busybox", "-m", "128M", "-d", "disk.img", "-d"]);
        machine.arg(format!("{FIXED},ro=on")).args(options);
        if !options.contains(&"--protection") {
            machine.args(["--protection", "none"]);
        }
        machine.args(["-p", &format!("parador.run=\"{run}\"")]);
        let (before, behind) = self.place.around()?;
        // A session of its own, by which its processes are known.
        let mut session = Command::new("setsid");
        session.args(before);
        if self.place.is_user() {
            // It is where that user finds it.
            let own: Vec<_> = machine.get_args().collect();
            let run = own.iter().position(|word| *word == "run").context("no machine")?;
            session.arg(self.rig.path("parador")).arg("run").arg(self.rig.path("vmlinux"));
            session.args(&own[run + 2..]).arg("--artifacts").arg(self.rig.folder());
            chown(&self.rig.path("disk.img"), self.canary_user()?)?;
            session.env("XDG_CACHE_HOME", self.rig.folder());
        } else {
            session.arg(machine.get_program()).args(machine.get_args());
            session.envs(machine.get_envs().filter_map(|(name, value)| Some((name, value?))));
        }
        session.args(behind).current_dir(self.rig.folder());
        Ok(session)
    }

    /// User and group of the canary.
    fn canary_user(&self) -> Result<(u32, u32)> {
        let data = fs::metadata(format!("/proc/{}", self.canary.id()));
        let data = data.context("a process of the user has ended")?;
        Ok((data.uid(), data.gid()))
    }
}

/// Gives a file to a user.
fn chown(path: &Path, (user, group): (u32, u32)) -> Result<()> {
    std::os::unix::fs::chown(path, Some(user), Some(group)).context("cannot give a disk away")
}

/// Puts all that a machine needs where every user finds it.
fn share_with_all(rig: &Rig) -> Result<()> {
    for (from, name) in [
        (target().join("release/parador"), "parador"),
        (artifacts().join("parador-wedge"), "parador-wedge"),
        (rig.kernel().to_owned(), "vmlinux"),
    ] {
        fs::copy(&from, rig.path(name))
            .with_context(|| format!("cannot copy {}", from.display()))?;
    }
    let open = Permissions::from_mode(0o755);
    fs::set_permissions(rig.folder(), open).context("cannot open a folder")
}

impl Drop for Outside {
    fn drop(&mut self) {
        for child in [&mut self.canary, &mut self.neighbour] {
            // It may have ended, which was looked for where it matters.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The end of messages, of which a guest can make many.
pub(super) fn last(messages: &str) -> String {
    let lines: Vec<&str> = messages.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

/// Processes of this session that live: what `/proc` says of each.
pub(super) fn of_session(session: u32) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("no /proc")? {
        let path = entry.context("no /proc")?.path().join("stat");
        // It may end meanwhile.
        let Ok(stat) = fs::read_to_string(path) else { continue };
        let Some((_, rest)) = stat.rsplit_once(") ") else { continue };
        // State, parent, group, session.
        let fields: Vec<&str> = rest.split(' ').take(4).collect();
        if fields[0] != "Z" && fields.get(3) == Some(&session.to_string().as_str()) {
            found.push(stat);
        }
    }
    Ok(found)
}
