//! Reports to the engine that processes of a container were killed for lack of memory.
//!
//! That happens in the guest, and engines watch the container's cgroup on the host. So the carrier,
//! whose container has ended, lets the host's kernel kill a process there for the same reason: a
//! copy of this program, which uses more memory than the cgroup has just been permitted. Engines
//! learn of it as of any other (`OOMKilled`), and the host's kernel log has it.

use crate::{cgroup, refuse};
use hosted_command::failure::{Failure, IoContext};
use hosted_command::supervise;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

/// Setting of a cgroup, of version 1 and of version 2, by which anonymous memory stays in memory.
const SWAP: [&str; 2] = ["memory.swappiness", "memory.swap.max"];
/// Memory that the cgroup is permitted besides what is in use: enough for the start of a program.
const START: u64 = 16 << 20;
/// Memory that the program uses besides the limit.
const EXCESS: u64 = 16 << 20;
/// Time for the engine to notice it before this process ends: Linux reports events of a cgroup at
/// intervals of up to 10 ms.
const NOTICE: Duration = Duration::from_millis(100);
/// Score by which the host's kernel kills a process before all others (proc(5)).
const SCORE: (&str, &str) = ("/proc/self/oom_score_adj", "1000");

/// Reports a lack of memory in the guest by cgroups of the host. Those of users without rights, and
/// without the controller, cannot report it.
pub fn report(cgroups: &[PathBuf]) {
    for cgroup in cgroups {
        for ([usage, limit], swap) in cgroup::MEMORY.into_iter().zip(SWAP) {
            if cgroup.join(limit).exists() {
                // It is a report only: the exit code says that the container was killed.
                let _ = exceed([usage, limit, swap].map(|name| cgroup.join(name)));
            }
        }
    }
}

fn exceed([usage, limit, swap]: [PathBuf; 3]) -> Result<(), Failure> {
    let used = fs::read_to_string(&usage).file_error("read", &usage)?;
    let used: u64 = used.trim().parse().map_err(|_| refuse(format!("used memory: {used:?}")))?;
    let before = [&limit, &swap].map(|file| (file, fs::read_to_string(file)));
    // The host may not count memory on the disk.
    let _ = fs::write(&swap, "0");
    let permitted = used + START;
    fs::write(&limit, permitted.to_string()).file_error("write", &limit)?;
    let mut command = Command::new(supervise::SELF);
    command.args(["oci", "exceed"]).arg((permitted + EXCESS).to_string());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let ended = command.status().start_error("the process that uses memory");
    thread::sleep(NOTICE);
    // Others may be in the cgroup, if the configuration says so.
    for (file, value) in before {
        let _ = value.map(|value| fs::write(file, value.trim()));
    }
    ended.map(drop)
}

/// Uses memory until the host's kernel kills this process.
///
/// # Errors
/// The score cannot be raised.
pub fn use_memory(bytes: usize) -> Result<(), Failure> {
    let (file, score) = SCORE;
    fs::write(file, score).file_error("write", Path::new(file))?;
    std::hint::black_box(vec![1_u8; bytes]);
    Ok(())
}
