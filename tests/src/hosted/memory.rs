//! Sizes of memory, and the balloon.

use super::{LIMIT, Rig, children, end, start};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::time::{Duration, Instant};

/// Memory from the least to more than fits below 4 GiB; the host gives what is used of it. Programs
/// get it in pieces, if they may.
pub fn memory() -> Result<()> {
    let rig = Rig::new()?;
    for (size, least, most) in
        [("64M", 20_000, 64 << 10), ("321M", 250_000, 321 << 10), ("4G", 3_800_000, 4 << 20)]
    {
        let mut machine = rig.run();
        machine.args(["-m", size, "-p", "parador.run=\"grep MemTotal /proc/meminfo\""]);
        let ended = end(&mut machine, "")?.well(0, &[])?;
        let line = ended.console.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let words = line.and_then(|line| line.split_whitespace().next());
        let total: u64 = words.and_then(|word| word.parse().ok()).context("no MemTotal")?;
        ensure!((least..most).contains(&total), "{size}: {total} KiB");
    }
    let use_it = "mkdir /ram; mount -t tmpfs -o size=3600M ram /ram
        dd if=/dev/zero of=/ram/a bs=1M count=1200 2>/dev/null; md5sum </ram/a\n";
    let mut machine = rig.script(use_it, &[])?;
    // Of 1,200 MiB of zeros, in memory on both sides of the hole.
    machine.args(["-m", "4G"]);
    end(&mut machine, "")?.well(0, &["8c2297c9abaf3b724f6192f65efe9a89"])?;

    // A buffer of 1.9 MiB is too small for a large page: 475 pages, in pieces or one by one.
    let touch = "faults() { sed -n 's/^pgfault //p' /proc/vmstat; }; faults >/before
        dd if=/dev/zero of=/dev/null bs=1900k count=1 2>/dev/null
        echo took $(($(faults) - $(cat /before))) faults\n";
    for (how, expected) in [("always", 0..300), ("never", 475..800)] {
        let word = format!("transparent_hugepage={how}");
        let ended = end(&mut rig.script_with(LIMIT, &word, touch, &[])?, "")?.well(0, &[])?;
        let line = ended.console.lines().find_map(|line| line.strip_prefix("took "));
        let count = line.and_then(|line| line.split(' ').next()?.parse().ok());
        ensure!(count.is_some_and(|count| expected.contains(&count)), "{how}: {count:?} faults");
    }
    Ok(())
}

/// Memory that the guest frees returns to the host; the balloon takes memory and gives it back when
/// the guest needs it.
pub fn balloon() -> Result<()> {
    const MIB: u64 = 1 << 20;
    let rig = Rig::new()?;
    let script = "mkdir /ram; mount -t tmpfs -o size=500M ram /ram
        dd if=/dev/zero of=/ram/a bs=1M count=400 2>/dev/null; sleep 2; rm /ram/a; sleep 1000\n";
    for (option, is_given_back) in [("on", true), ("off", false)] {
        let mut child = start(rig.script(script, &[])?.args(["--balloon", option]))?;
        let mut wait_for =
            |what: &str, limit: u64, reached: &dyn Fn(u64) -> bool| -> Result<bool> {
                let deadline = Instant::now() + Duration::from_secs(limit);
                loop {
                    let used = children(&child)?.into_iter().map(memory_of).max().unwrap_or(0);
                    if reached(used) {
                        return Ok(true);
                    }
                    if Instant::now() > deadline {
                        let ended = child.try_wait().context("cannot look at parador")?;
                        ensure!(ended.is_none(), "{what}: the machine has ended");
                        return Ok(false);
                    }
                    std::thread::sleep(Duration::from_millis(100));
                }
            };
        ensure!(wait_for("fill", 60, &|used| used > 400 * MIB)?, "memory is not used");
        let is_less =
            wait_for("free", if is_given_back { 60 } else { 10 }, &|used| used < 200 * MIB)?;
        child.kill().and_then(|()| child.wait()).context("cannot end parador")?;
        ensure!(is_less == is_given_back, "--balloon {option}: given back: {is_less}");
    }
    let script =
        "sleep 3; grep MemFree /proc/meminfo; mkdir /ram; mount -t tmpfs -o size=500M ram /ram
        dd if=/dev/zero of=/ram/a bs=1M count=400 2>/dev/null; md5sum </ram/a\n";
    let mut machine = rig.script(script, &[])?;
    machine.args(["-m", "640M", "--balloon", "400M"]);
    // Of 400 MiB of zeros, more than the balloon leaves.
    let ended = end(&mut machine, "")?.well(0, &["61eabaf2bf278703738b433ff884c91f"])?;
    let line = ended.console.lines().find_map(|line| line.strip_prefix("MemFree:"));
    let free = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    ensure!(free.is_some_and(|free| free < 230 << 10), "{free:?} KiB beside a balloon");
    Ok(())
}

/// Returns the resident bytes of shared memory of a process.
fn memory_of(process: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{process}/statm")).unwrap_or_default();
    let pages = text.split_whitespace().nth(2).and_then(|word| word.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}
