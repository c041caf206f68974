//! Guests whose kernels mean harm (`guests/linux/check/check_escape.c`), and what is around their
//! machines: files, a process of the same user, and another machine, which all stay as they are.

use super::{Ended, LIMIT, Rig, start, succeed_with, words};
use crate::previrt::Kernel;
use crate::sandbox;
use crate::system::{artifacts, target};
use crate::transcript::Transcript;
use anyhow::{Context, Result, anyhow, bail, ensure};
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
/// The end of a guest process that its seccomp filter or a fault has killed.
const KILLED: i32 = 81;
/// Message about a process that its filter has killed.
const FILTERED: &str = "seccomp filter (signal 31, SIGSYS)";
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
const IMAGE: &str = "image.qcow2";
const FOLDER: &str = "folder";

/// Confinement of a VM, and the user who starts it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
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
    const ALL: [Self; 5] = [Self::Default, Self::Open, Self::Container, Self::User, Self::OpenUser];

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
struct Outside {
    rig: Rig,
    module: PathBuf,
    /// Time limit of each machine in seconds.
    limit: u32,
    seed: u64,
    place: Place,
    /// A process of the same user, which blocks all signals that it can.
    canary: Child,
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
    fn new() -> Result<Self> {
        Self::of(Place::Default)
    }

    /// Of machines at a place.
    fn of(place: Place) -> Result<Self> {
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
    fn attack(&mut self, arguments: &str, options: &[&str]) -> Result<Ended> {
        self.attack_watched(arguments, options, |_| Ok(()))
    }

    /// The same; `watch` is called again and again while the machine runs, with the number of its
    /// session.
    fn attack_watched(
        &mut self,
        arguments: &str,
        options: &[&str],
        mut watch: impl FnMut(u32) -> Result<()>,
    ) -> Result<Ended> {
        let child = start(&mut self.machine(arguments, options)?)?;
        let id = child.id();
        let machine = thread::spawn(move || super::ended(child));
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
            let deadline = Instant::now() + super::GONE;
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
    fn machine(&self, arguments: &str, options: &[&str]) -> Result<Command> {
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
fn last(messages: &str) -> String {
    let lines: Vec<&str> = messages.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

/// Processes of this session that live: what `/proc` says of each.
fn of_session(session: u32) -> Result<Vec<String>> {
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

/// Returns the last attempt that the module has logged.
fn reached(ended: &Ended) -> Option<u64> {
    let at = |line: &str| line.split("escape: at ").nth(1)?.trim().parse().ok();
    ended.messages.lines().rev().find_map(at)
}

fn is_done(ended: &Ended) -> bool {
    ended.messages.contains("escape: done after") && ended.console.contains("continues")
}

/// Every call that the filter of a guest's processes lets through, with arguments at random, is
/// harmless, even to the guest where it spares itself; then without sparing itself.
pub fn calls(is_long: bool) -> Result<()> {
    let mut outside = Outside::new()?;
    let seeds = if is_long { 40 } else { 3 };
    for _ in 0..seeds {
        let rounds = if is_long { 200_000 } else { 20_000 };
        let ended = outside.attack(&format!("what=calls rounds={rounds}"), &[])?;
        let is_well = ended.code == 0 && is_done(&ended);
        ensure!(
            is_well,
            "seed {}: {}\n{}\n{}",
            outside.seed,
            ended.code,
            ended.console,
            last(&ended.messages)
        );
        let ended = outside.attack(&format!("what=calls rounds={rounds} wild=1"), &[])?;
        ensure!(reached(&ended).is_some(), "seed {}: {ended:?}", outside.seed);
        outside.seed += 1;
    }
    Ok(())
}

/// Every other number, by each way into the host's kernel, ends the machine. Some of them, or all.
pub fn numbers(is_long: bool) -> Result<()> {
    /// More than Linux has.
    const CALLS: u64 = 512;
    /// With any arguments, or with some: `hosted_filters`.
    const ALLOWED: [u64; 17] =
        [1, 9, 10, 11, 14, 15, 24, 131, 202, 203, 219, 223, 228, 231, 285, 318, 329];
    /// The only one that the filter lets through of 32-bit calls.
    const SET_THREAD_AREA: u64 = 243;
    /// The guest's kernel has panicked.
    const PANIC: i32 = 80;
    const ODD: [u64; 6] =
        [1 << 31, u32::MAX as u64, u64::MAX, 1 << 32, 1 << 63 | 57, 0xffff_ffff_0000_003b];
    let mut outside = Outside::new()?;
    let mut tries: Vec<(&str, u64)> = Vec::new();
    for number in (0..CALLS).filter(|number| !ALLOWED.contains(number)) {
        tries.push(("call", number));
    }
    for number in 0..CALLS {
        tries.push(("x32", number));
        if number != SET_THREAD_AREA {
            tries.push(("int80", number));
        }
    }
    // All of them take an hour; these are some of them by the seed.
    let mut random = outside.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut chosen: Vec<(&str, u64)> = ODD.iter().map(|number| ("call", *number)).collect();
    for _ in 0..if is_long { 300 } else { 14 } {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        chosen.push(tries.swap_remove((random >> 16) as usize % tries.len()));
    }
    for (what, number) in chosen {
        let ended = outside.attack(&format!("what={what} number={number}"), &[])?;
        // A host without 32-bit calls answers these with a fault, which the guest gets: then it is
        // a call of its own kernel by itself, which that does not survive.
        let is_fault =
            what == "int80" && (ended.console.contains("refused") || ended.code == PANIC);
        let has_returned = ended.messages.contains("call returned");
        let is_killed = ended.code == KILLED
            && ended.messages.contains(FILTERED)
            && !ended.console.contains("continues");
        if has_returned || !(is_killed || is_fault) {
            bail!(
                "{what} {number} seed={}: {}\n{}\n{}",
                outside.seed,
                ended.code,
                ended.console,
                last(&ended.messages)
            );
        }
    }
    Ok(())
}

/// Addresses in the wedge: its code, the handler of signals, and where others enter it.
struct Wedge {
    text: (u64, u64),
    handler: u64,
    places: Vec<u64>,
}

impl Wedge {
    fn read() -> Result<Self> {
        /// Address that signal handlers return to.
        const RESTORE: &str = "6signal7restore";
        const HANDLER: &str = "6signal7handler";
        let file = artifacts().join("parador-wedge.debug");
        let symbols = succeed_with(Command::new("nm").arg(&file))?;
        let mut wedge = Self { text: text_of(&file)?, handler: 0, places: Vec::new() };
        for line in symbols.lines() {
            let mut words = line.split_whitespace();
            let (Some(address), Some(_), Some(name)) = (words.next(), words.next(), words.next())
            else {
                continue;
            };
            let address = u64::from_str_radix(address, 16).context("no address")?;
            if name.ends_with(HANDLER) {
                wedge.handler = address;
            } else if name.ends_with(RESTORE) || name.starts_with("parador_wedge_") {
                wedge.places.push(address);
            }
        }
        ensure!(wedge.handler != 0 && wedge.places.len() > 10, "the wedge's symbols are others");
        wedge.places.truncate(32);
        Ok(wedge)
    }
}

fn text_of(file: &Path) -> Result<(u64, u64)> {
    let sections = succeed_with(Command::new("objdump").args(["-h", "-w"]).arg(file))?;
    let line = sections.lines().find(|line| line.split_whitespace().nth(1) == Some(".text"));
    let mut words = line.context("the wedge has no code")?.split_whitespace().skip(2);
    let mut number = || u64::from_str_radix(words.next()?, 16).ok();
    let (length, start) = number().zip(number()).context("the wedge has no code")?;
    Ok((start, start + length))
}

/// Jumps to all of the wedge's code, as far as machines and time go.
pub fn jumps(is_long: bool) -> Result<()> {
    attempts("jumps", is_long)
}

/// The ways into the wedge, and what signals leave, forged.
pub fn gate(is_long: bool) -> Result<()> {
    attempts("gate", is_long)
}

fn attempts(what: &str, is_long: bool) -> Result<()> {
    let wedge = Wedge::read()?;
    let mut outside = Outside::new()?;
    let places: Vec<String> = wedge.places.iter().map(|place| format!("{place:#x}")).collect();
    let (places, (first, last_address)) = (places.join(","), wedge.text);
    let (machines, all) = if is_long { (500, last_address - first) } else { (12, 4000) };
    let (mut from, mut silent) = (0, 0);
    for _ in 0..machines {
        let arguments = format!(
            "what={what} handler={:#x} text={first:#x},{last_address:#x} places={places} from={from} rounds={}",
            wedge.handler,
            all - from
        );
        let ended = outside.attack(&arguments, &[])?;
        if is_done(&ended) {
            from = all;
            break;
        }
        // One that ends before the first attempt was in its way before.
        silent = if reached(&ended).is_some() { 0 } else { silent + 1 };
        ensure!(silent < 3, "{what} seed={}: {ended:?}", outside.seed);
        from = reached(&ended).map_or(from, |at| at + 1).min(all);
        if from == all {
            break;
        }
    }
    println!("{what}: {from} attempts, seed {}", outside.seed);
    ensure!(from > machines, "only {from} attempts");
    Ok(())
}

/// The guest writes to memory that the VM's processes share, among it requests to disks, an image
/// and a folder. Their servers stay confined.
pub fn memory(is_long: bool) -> Result<()> {
    let mut outside = Outside::new()?;
    let share = format!("{FOLDER}:folder,ro=on");
    for _ in 0..if is_long { 40 } else { 3 } {
        let before = fs::read_dir(outside.rig.path(FOLDER)).context("no folder")?.count();
        for wild in [0, 1] {
            let arguments = format!("what=memory rounds=20000 wild={wild}");
            let ended = outside.attack(&arguments, &["-d", IMAGE, "--share", &share])?;
            ensure!(reached(&ended).is_some(), "seed {}: {ended:?}", outside.seed);
            let length = fs::metadata(outside.rig.path("disk.img")).context("no disk")?.len();
            ensure!(length == 96 << 20, "the disk has {length} bytes, seed {}", outside.seed);
            let after = fs::read_dir(outside.rig.path(FOLDER)).context("no folder")?.count();
            ensure!(
                after == before,
                "a folder that is only read has changed, seed {}",
                outside.seed
            );
        }
        outside.seed += 1;
    }
    Ok(())
}

/// `WRPKRU` of the guest's kernel.
pub fn keys() -> Result<()> {
    let mut outside = Outside::new()?;
    let ended = outside.attack("what=keys", &[])?;
    ensure!(is_done(&ended) && ended.code == 0, "{ended:?}");
    Ok(())
}

/// The guest writes hostile values to each word of shared memory: all of them affect the guest
/// only. A sample, or all with `--long`.
pub fn words(is_long: bool) -> Result<()> {
    let all = words::all()?;
    for (number, place) in Place::ALL.into_iter().enumerate() {
        let mut outside = Outside::of(place)?;
        let canary = u64::from(outside.canary.id());
        let hostile = [1, u64::MAX, canary | canary << 32, 8 | 8 << 32, 0];
        let chosen = if is_long { &hostile[..] } else { &hostile[number..=number] };
        for value in chosen {
            let (mut from, mut ends) = (0, 0);
            while from < all.len() {
                let arguments = format!("what=words value={value} from={from}");
                let ended = outside.attack(&arguments, &[])?;
                if is_done(&ended) {
                    break;
                }
                let at = reached(&ended).context("the module has not begun")? as usize;
                ends += 1;
                from = at.max(from) + 1;
            }
            println!("{place:?}: {} words are {value:#x}, {ends} ends", all.len());
        }
    }
    Ok(())
}

/// A process that is made after a word has been changed has no more rights than the others: it is
/// taken over, and tries to signal the canary.
pub fn takeover(is_long: bool) -> Result<()> {
    /// A word by which the process is had; and one that ends the machine.
    const NEEDED: [&str; 5] =
        ["vcpu_rsp", "vcpu_slots", "vcpu_wanted", "vcpu_cell", "shared_ended"];
    let all = words::all()?;
    let chosen = |name: &str| {
        // In a machine of one virtual CPU these decided once upon a time; today they are of other
        // parts.
        let is_flag = name.starts_with("shared_") || name.starts_with("start_");
        !NEEDED.contains(&name) && (is_long || is_flag)
    };
    let indices: Vec<usize> = (0..all.len()).filter(|index| chosen(&all[*index].name)).collect();
    for place in Place::ALL {
        let mut outside = Outside::of(place)?;
        let mut taken = 0;
        // One in each place at least; a few more by the seed.
        let step = if is_long { 1 } else { 9 };
        let first = outside.seed as usize % step;
        for index in indices.iter().skip(first).step_by(step) {
            let name = &all[*index].name;
            let arguments = format!("what=takeover word={index} value={}", u64::MAX / 0xff);
            let ended = outside.attack(&arguments, &[])?;
            let filtered = ended.messages.contains(FILTERED);
            // ESRCH, EPERM.
            let refused = [-3_i64, -1].iter().any(|error| {
                ended.messages.contains(&format!("escape: kill gives {}", *error as u64))
            });
            let is_had = ended.messages.contains("escape: a new process");
            // Where the host confines signals, a process may send this one, and no process outside
            // receives it.
            let keeps = matches!(place, Place::Default | Place::User);
            let as_expected = if keeps { filtered || refused } else { filtered };
            ensure!(!is_had || as_expected, "{place:?} {name}:\n{}", last(&ended.messages));
            taken += usize::from(is_had);
        }
        println!("{place:?}: {taken} of {} processes taken over", indices.len().div_ceil(step));
        ensure!(taken > 0, "{place:?}: no process was taken over");
    }
    Ok(())
}

/// The thread that maps for programs obeys the guest only when nothing runs in its process without
/// a filter.
pub fn mapper() -> Result<()> {
    for place in [Place::Open, Place::Default] {
        let mut outside = Outside::of(place)?;
        let options = ["--protection", "process", "-c", "2"];
        let ended = outside.attack("what=mapper rounds=64", &options)?;
        ensure!(reached(&ended).is_some(), "{place:?}: {ended:?}");
        let sent = ended.messages.contains("escape: kill gives");
        ensure!(!sent, "{place:?}: a program process has made a call of the host:\n{ended:?}");
    }
    Ok(())
}

/// Requests to disks, an image and a folder that no driver has made are carried out if they are
/// sound, all others are refused.
pub fn requests() -> Result<()> {
    const DISK: &str = "marks.img";
    const ROUNDS: u64 = 1024;
    let mut outside = Outside::new()?;
    let share = format!("{FOLDER}:folder");
    fs::write(outside.rig.path(DISK), vec![0; 1 << 20]).context("cannot write a disk")?;
    let options = ["-d", DISK, "-d", IMAGE, "--share", &share];
    // Disks, in the order of options; behind room for four, folders.
    for (queue, sound) in [(2, ROUNDS / 2), (3, ROUNDS / 2), (4, 0)] {
        let ended =
            outside.attack(&format!("what=requests queue={queue} rounds={ROUNDS}"), &options)?;
        let count = |what: &str| -> Result<u64> {
            let at = |line: &str| line.split(what).nth(1)?.trim().parse().ok();
            let found = ended.messages.lines().find_map(at);
            found.with_context(|| format!("queue {queue}: no `{what}`:\n{ended:?}"))
        };
        let [done, refused, silent] = [
            count("requests carried out ")?,
            count("requests refused ")?,
            count("requests unanswered ")?,
        ];
        let wanted = if queue < 4 { (sound, ROUNDS - sound, 0) } else { (done, refused, 0) };
        ensure!((done, refused, silent) == wanted, "queue {queue}: {done} {refused} {silent}");
        ensure!(done + refused == ROUNDS && is_done(&ended), "queue {queue}: {ended:?}");
        let file = match queue {
            2 => DISK,
            3 => {
                let mut image = Command::new("qemu-img");
                let convert = ["convert", "-f", "qcow2", "-O", "raw", IMAGE, "image.raw"];
                succeed_with(image.args(convert).current_dir(outside.rig.folder()))?;
                "image.raw"
            }
            _ => continue,
        };
        let content = fs::read(outside.rig.path(file)).context("no disk")?;
        for (number, sector) in content.chunks(512).enumerate() {
            let mark = u64::from_le_bytes(sector[..8].try_into()?);
            let number = number as u64;
            let wanted = if number < sound { words::MARK + number } else { 0 };
            ensure!(mark == wanted, "queue {queue}, sector {number}: {mark:#x}");
        }
    }
    Ok(())
}

/// A guest has as many processes as its machine may have, and no more, whatever it writes.
pub fn processes() -> Result<()> {
    let mut outside = Outside::new()?;
    // These machines do not hang: they end when the host has created up to 128 processes.
    outside.limit = LIMIT;
    for (options, most) in [
        (&["-c", "1"][..], 64),
        (&["-c", "1", "--protection", "process"], 128),
        (&["-c", "8"], 128),
    ] {
        let mut seen = 0;
        let ended = outside.attack_watched("what=processes", options, |session| {
            let all = of_session(session)?;
            let wedges = all.iter().filter(|stat| stat.contains("(parador-wedge)"));
            seen = seen.max(wedges.count());
            Ok(())
        })?;
        ensure!(ended.messages.contains("asked for 512 processes"), "{options:?}: {ended:?}");
        // The device process, and two for each disk where the host has no rings.
        println!("{options:?}: {seen} processes");
        ensure!((most / 2..=most + 5).contains(&seen), "{options:?}: {seen} processes");
    }
    Ok(())
}

/// A guest keeps to the CPUs that its machine was started on.
pub fn affinity() -> Result<()> {
    let mut outside = Outside::new()?;
    for by in 0..5 {
        let ended = outside.attack(&format!("what=affinity by={by}"), &[])?;
        let is_killed = ended.code == KILLED && ended.messages.contains(FILTERED);
        ensure!(is_killed && !ended.messages.contains("call returned"), "by={by}: {ended:?}");
    }
    // The same on one CPU: no process of the VM leaves it.
    let own = fs::read_to_string("/proc/self/status").context("no /proc")?;
    let own = allowed_cpus(&own)?;
    let first = own.split([',', '-']).next().context("no CPU")?.to_owned();
    let mut machine = outside.machine("what=affinity", &[])?;
    let mut bound = Command::new("taskset");
    bound.args(["-c", &first]).arg(machine.get_program()).args(machine.get_args());
    bound.current_dir(outside.rig.folder());
    bound.envs(machine.get_envs().filter_map(|(name, value)| Some((name, value?))));
    machine = bound;
    let child = start(&mut machine)?;
    let id = child.id();
    let machine = thread::spawn(move || super::ended(child));
    let mut looks = 0;
    while !machine.is_finished() {
        for stat in of_session(id)? {
            let process = stat.split(' ').next().unwrap_or_default();
            // It may end meanwhile.
            let Ok(status) = fs::read_to_string(format!("/proc/{process}/status")) else {
                continue;
            };
            let cpus = allowed_cpus(&status)?;
            ensure!(cpus == first, "a process runs on {cpus}, not on {first}:\n{stat}");
            looks += 1;
        }
        thread::sleep(Duration::from_millis(10));
    }
    let ended = machine.join().map_err(|_| anyhow!("the machine's thread panicked"))??;
    let given = ended.messages.contains("escape: sets of CPUs given 0");
    ensure!(given && ended.code == KILLED && looks > 10, "{looks} looks: {ended:?}");
    Ok(())
}

/// Returns the allowed CPUs of a process from `/proc/PID/status`.
fn allowed_cpus(status: &str) -> Result<String> {
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    Ok(line.context("no list of CPUs")?.trim().to_owned())
}

/// Exit codes are what a guest may bring about (`docs/spec/exit-codes.md`).
pub fn codes() -> Result<()> {
    let mut outside = Outside::new()?;
    for (what, code, text) in [
        ("end code=0", 0, "powered off"),
        ("end code=63", 63, "code 63"),
        ("end code=64", KILLED, "code 64, which is reserved"),
        ("end code=70", KILLED, "code 70, which is reserved"),
        ("end code=80", 80, "panicked"),
        ("end code=82", KILLED, "code 82, which is reserved"),
        ("end code=83", 83, "reset"),
        ("end code=124", KILLED, "code 124, which is reserved"),
        ("end code=137", KILLED, "code 137, which is reserved"),
        ("end code=256", KILLED, "code 256, which is reserved"),
        ("exit code=0", KILLED, "exited with status 0"),
        ("exit code=71", KILLED, "exited with status 71"),
        ("exit code=137", KILLED, "exited with status 137"),
        ("fault", KILLED, "was killed by signal 11"),
        ("call number=41", KILLED, FILTERED),
    ] {
        let ended = outside.attack(&format!("what={what}"), &[])?;
        let as_expected = ended.code == code && ended.messages.contains(text);
        ensure!(as_expected, "{what}: {}\n{}", ended.code, last(&ended.messages));
    }
    Ok(())
}
