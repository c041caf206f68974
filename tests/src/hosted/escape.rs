//! Guests whose kernels mean harm (`guests/linux/check/check_escape.c`), and what is around their machines: files, a process of the same user, and another
//! machine, which all stay as they are.

use super::{Ended, LIMIT, Rig, start, succeed_with};
use crate::previrt::Kernel;
use crate::system::artifacts;
use crate::transcript::Transcript;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Another seed than [`FIRST_SEED`].
const SEED: &str = "PARADOR_ESCAPE_SEED";
const FIRST_SEED: u64 = 1;
/// Seconds that a machine under attack may take: some hang.
const MOMENT: u32 = 20;
/// How long what is outside may take to show that it goes on, on a busy host.
const SHOWN: Duration = Duration::from_secs(60);
/// `SIGSYS`: the end by a filter of system calls.
const KILLED: i32 = 128 + 31;
/// What the neighbour computes, again and again.
const SUM: &str = "seq 20000 | sha256sum";
/// Sectors of the disk that is only read.
const FIXED: &str = "fixed.img";
const FIXED_LENGTH: usize = 4 << 20;
/// An image that a process of its own serves, and the folder of another.
const IMAGE: &str = "image.qcow2";
const FOLDER: &str = "folder";

/// The outside of a machine, and machines.
struct Outside {
    rig: Rig,
    module: PathBuf,
    seed: u64,
    /// A process of the same user, which blocks all signals that it can.
    canary: Child,
    neighbour: Child,
    console: Transcript,
    sum: String,
    before: BTreeMap<PathBuf, File>,
}

/// What a file is like.
#[derive(PartialEq, Eq, Debug)]
struct File {
    content: Vec<u8>,
    mode: u32,
    owner: (u32, u32),
    changed: (i64, i64),
}

impl Outside {
    fn new() -> Result<Self> {
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
        let mut canary = Command::new("setpriv");
        canary.args(["--pdeathsig", "KILL", "env", "--block-signal", "sleep", "100000"]);
        let canary = canary.stdin(Stdio::null()).spawn().context("cannot start a process")?;
        let sum = succeed_with(Command::new("sh").args(["-c", SUM]))?;
        let script = format!("while :; do echo sum $({SUM}); sleep 0.1; done");
        let mut neighbour = rig.bare(100 * LIMIT);
        neighbour.args(["-i", "busybox", "-m", "64M", "-p", &format!("parador.run=\"{script}\"")]);
        let mut neighbour = start(&mut neighbour)?;
        let output = neighbour.stdout.take().context("no output")?;
        let module = Kernel::get()?.check_escape();
        let sum = sum.split_whitespace().next().context("no sum")?.to_owned();
        let before = BTreeMap::new();
        let console = Transcript::follow("neighbour", output);
        let mut outside = Self { rig, module, seed, canary, neighbour, console, sum, before };
        outside.before = outside.files()?;
        outside.goes_on()?;
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
    fn goes_on(&mut self) -> Result<()> {
        let sums = |text: &str| text.lines().filter(|line| line.starts_with("sum ")).count();
        let (before, deadline) = (sums(&self.console.text()), Instant::now() + SHOWN);
        // One line may be on its way.
        while sums(&self.console.text()) < before + 3 {
            let left = Instant::now() < deadline;
            ensure!(left, "the neighbour does not go on:\n{}", self.console.tail());
            std::thread::sleep(Duration::from_millis(50));
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
        self.goes_on()
    }

    /// Runs a machine whose kernel takes the module, and looks around afterwards. The machine's own end is the caller's to judge, but it has one.
    fn attack(&mut self, arguments: &str, options: &[&str]) -> Result<Ended> {
        let canary = self.canary.id();
        let module = format!("insmod /mnt/check_escape.ko seed={} canary={canary}", self.seed);
        let script = format!("{module} {arguments} || echo refused; echo goes on\n");
        self.rig.disk("disk.img", &script, &[&self.module])?;
        let mut machine = self.rig.bare(MOMENT);
        let run = "mkdir -p /mnt; mount /dev/vda /mnt; sh -e /mnt/script";
        machine.args(["-i", "busybox", "-m", "128M", "-d", "disk.img", "-d"]);
        machine.arg(format!("{FIXED},ro=on")).args(options);
        machine.args(["--protection", "none", "-p", &format!("parador.run=\"{run}\"")]);
        // A session of its own, by which its processes are known.
        let mut session = Command::new("setsid");
        session.arg(machine.get_program()).args(machine.get_args());
        session.current_dir(self.rig.folder());
        session.envs(machine.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let child = start(&mut session)?;
        let id = child.id();
        let ended = super::ended(child)?;
        let mut check = || {
            // Of the loader's own panics: the wedge says that of itself in other words.
            let panicked = ended.messages.contains("thread '");
            ensure!(!panicked, "parador has panicked:\n{}", ended.messages);
            let deadline = Instant::now() + super::GONE;
            while let Some(left) = of_session(id)? {
                ensure!(Instant::now() < deadline, "a process has stayed:\n{left}");
                std::thread::sleep(Duration::from_millis(20));
            }
            self.is_whole()
        };
        match check() {
            Ok(()) => Ok(ended),
            Err(error) => Err(error.context(format!(
                "{arguments} seed={}: code {}\n{}\n{}",
                self.seed,
                ended.code,
                ended.console,
                last(&ended.messages)
            ))),
        }
    }
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

/// A process of this session that lives.
fn of_session(session: u32) -> Result<Option<String>> {
    for entry in fs::read_dir("/proc").context("no /proc")? {
        let path = entry.context("no /proc")?.path().join("stat");
        // It may end meanwhile.
        let Ok(stat) = fs::read_to_string(path) else { continue };
        let Some((_, rest)) = stat.rsplit_once(") ") else { continue };
        // State, parent, group, session.
        let fields: Vec<&str> = rest.split(' ').take(4).collect();
        if fields[0] != "Z" && fields.get(3) == Some(&session.to_string().as_str()) {
            return Ok(Some(stat));
        }
    }
    Ok(None)
}

/// The last attempt that the module has told of.
fn reached(ended: &Ended) -> Option<u64> {
    let at = |line: &str| line.split("escape: at ").nth(1)?.trim().parse().ok();
    ended.messages.lines().rev().find_map(at)
}

fn is_done(ended: &Ended) -> bool {
    ended.messages.contains("escape: done after") && ended.console.contains("goes on")
}

/// Every call that the filter of a guest's processes lets through, with arguments at random, is harmless, even to the guest where it spares itself; then without
/// sparing itself.
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
    /// With any arguments, or with some: `hosted_vmm::filters`.
    const ALLOWED: [u64; 16] =
        [1, 9, 10, 11, 15, 24, 131, 202, 203, 219, 223, 228, 231, 285, 318, 329];
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
        // A host without 32-bit calls answers these with a fault, which the guest gets: then it is a call of its own kernel by itself, which that does
        // not survive.
        let is_fault =
            what == "int80" && (ended.console.contains("refused") || ended.code == PANIC);
        let has_come_back = ended.messages.contains("comes back");
        let is_killed = ended.code == KILLED && !ended.console.contains("goes on");
        if has_come_back || !(is_killed || is_fault) {
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
        /// What handlers return through.
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

/// What processes share is written to, among it requests to disks, an image and a folder. Those who serve them stay inside.
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
