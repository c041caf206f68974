//! Guests whose kernels mean harm (`guests/linux/check/check_escape.c`), and what is around their
//! machines: files, a process of the same user, and another machine, which all stay as they are.

pub mod outside;

use self::outside::{FOLDER, IMAGE, Outside, Place, last, of_session};
use super::{Ended, LIMIT, start, succeed_with, words};
use crate::system::artifacts;
use anyhow::{Context, Result, anyhow, bail, ensure};
use proto::hosted::MAX_DISKS;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

/// The end of a guest process that its seccomp filter or a fault has killed.
const KILLED: i32 = 81;
/// Message about a process that its filter has killed.
const FILTERED: &str = "seccomp filter (signal 31, SIGSYS)";

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
    // Disks, in the order of options; behind the room for disks, folders.
    for (queue, sound) in [(2, ROUNDS / 2), (3, ROUNDS / 2), (MAX_DISKS, 0)] {
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
        let wanted =
            if queue < MAX_DISKS { (sound, ROUNDS - sound, 0) } else { (done, refused, 0) };
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
            let names = ["(parador-wedge)", "(parador-vcpu"];
            let wedges = all.iter().filter(|stat| names.iter().any(|name| stat.contains(name)));
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
