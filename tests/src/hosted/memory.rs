//! Memory that a VM holds on the host. Sizes of memory are scenarios ([`super::linux`]).

use super::{Rig, children, start};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::time::{Duration, Instant};

/// Memory that the guest frees returns to the host. Code, because it follows the size of the
/// guest's processes over time.
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
    Ok(())
}

/// Returns the resident bytes of shared memory of a process.
fn memory_of(process: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{process}/statm")).unwrap_or_default();
    let pages = text.split_whitespace().nth(2).and_then(|word| word.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}
