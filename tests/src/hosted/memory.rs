//! Memory that a VM holds on the host. Sizes of memory are scenarios ([`super::linux`]).

use super::{LIMIT, Rig, children, end, start};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// Page structures of memory that the guest does not use occupy none of the host's, and the guest
/// can use all of it. Code, because it measures VMs from outside.
pub fn deferred() -> Result<()> {
    let rig = Rig::new()?;
    let used_with = |word: &str| -> Result<u64> {
        let script = "grep MemTotal /proc/meminfo >/dev/console; sleep 1000\n";
        let mut command = rig.script_with(LIMIT, word, script, &[])?;
        let mut child = start(command.args(["-m", "2G"]))?;
        let mut console = BufReader::new(child.stdout.take().context("no console")?).lines();
        let is_there = console.any(|line| line.is_ok_and(|line| line.contains("MemTotal")));
        let used = children(&child)?.into_iter().map(memory_of).max().unwrap_or(0);
        child.kill().and_then(|()| child.wait()).context("cannot end parador")?;
        ensure!(is_there, "the guest has not started");
        Ok(used)
    };
    let (all, deferred) = (used_with("parador_deferred=off")?, used_with("")?);
    // Of 32 MiB, 4 are those of the first 256 MiB.
    ensure!(deferred + 20 * MIB < all, "{deferred} of {all} bytes");
    let script = "set -e; mkdir /ram; mount -t tmpfs -o size=90% ram /ram
        free() { sed -n 's/MemFree: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo; }
        [ $(free) -gt 950000 ] && echo most is free
        dd if=/dev/urandom of=/ram/part bs=1M count=17 2>/dev/null
        parts() { for i in $(seq 50); do cat /ram/part; done; }
        parts > /ram/all; parts | cmp - /ram/all && echo all is used
        [ $(free) -lt 200000 ] && echo little is free
        rm /ram/all; dmesg | grep -i -e warning -e bug: || echo no complaint\n";
    let mut command = rig.script(script, &[])?;
    let texts = ["most is free", "all is used", "little is free", "no complaint"];
    end(command.args(["-m", "1G"]), "")?.has(0, &texts)?;
    Ok(())
}

/// Memory that the guest frees returns to the host. Code, because it follows the size of the
/// guest's processes over time.
pub fn balloon() -> Result<()> {
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
    Ok(())
}

/// Returns the resident bytes of shared memory of a process.
fn memory_of(process: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{process}/statm")).unwrap_or_default();
    let pages = text.split_whitespace().nth(2).and_then(|word| word.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}
