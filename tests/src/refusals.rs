//! Hosts that refuse to map, unmap or protect memory of guest processes: no guest continues with a
//! mapping that contradicts its page tables. The VM continues without the mapping, or ends with a
//! message.

use crate::fuzz;
use crate::hosted::net::wait_for;
use crate::hosted::{Rig, children, end, ended, start};
use crate::sandbox;
use anyhow::{Context, Result, ensure};
use linux_raw_sys::general as linux;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// For how long processes are kept from mapping anything.
const WHILE: Duration = Duration::from_secs(3);
/// The guest's fault, to the host.
const FAULT: i32 = 81;
/// Message about a user process that cannot be brought in line with the guest's page tables.
const GIVEN_UP: &str = "cannot map or unmap user memory";

/// All of it.
pub fn mappings() -> Result<()> {
    for (mode, call, code, text) in [
        (
            "none",
            linux::__NR_mmap,
            FAULT,
            "cannot map guest memory: Cannot allocate memory (ENOMEM)",
        ),
        // All user pages are dropped instead, a range that does not begin in the program's memory.
        ("none", linux::__NR_munmap, 0, "continues"),
        ("none", linux::__NR_mprotect, 0, "continues"),
        (
            "process",
            linux::__NR_mmap,
            FAULT,
            "cannot map guest memory: Cannot allocate memory (ENOMEM)",
        ),
        ("process", linux::__NR_mprotect, 0, "continues"),
    ] {
        always(mode, call, code, text).with_context(|| format!("{mode}, call {call}"))?;
    }
    program_processes()
}

/// A call about memory that some programs use always fails, in all processes.
fn always(mode: &str, call: u32, code: i32, text: &str) -> Result<()> {
    let rig = Rig::new()?;
    let itself = std::env::current_exe().context("no path of this program")?;
    let script = format!("/mnt/linux-fuzz {mode} 1 20\necho continues\n");
    let mut run = rig.script(&script, &[&fuzz::program()])?;
    run.args(["--protection", mode]);
    let mut refusing = Command::new(itself);
    refusing.args([sandbox::ENTER_REFUSING, &call.to_string()]);
    refusing.arg(run.get_program()).args(run.get_args()).current_dir(rig.folder());
    refusing.envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
    end(&mut refusing, "")?.well(code, &[text])?.never(&fuzz::WRONG)
}

/// With `--protection process`: the mapping thread of each program process is refused all new
/// mappings for some time. Processes are replaced until one can be filled in.
fn program_processes() -> Result<()> {
    let rig = Rig::new()?;
    let script = "echo it runs\n/mnt/linux-fuzz process 1 150\necho continues\n";
    let mut run = rig.script(script, &[&fuzz::program()])?;
    let mut child = start(run.args(["--protection", "process", "-c", "2"]))?;
    wait_for(&mut child, "it runs")?;
    let (until, mut limited) = (Instant::now() + WHILE, Vec::new());
    while Instant::now() < until && child.try_wait().context("cannot wait")?.is_none() {
        // Its end may come first.
        let Ok(all) = children(&child) else { break };
        for process in all.into_iter().skip(2) {
            // It has mapped what it needs itself when it has its second thread.
            let tasks = fs::read_dir(format!("/proc/{process}/task"));
            if tasks.is_ok_and(|tasks| tasks.count() == 2) && !limited.contains(&process) {
                limited.push(process);
                let mut limit = Command::new("prlimit");
                limit.args(["--pid", &process.to_string(), "--as=4096"]).stderr(Stdio::null());
                // It may have ended.
                limit.status().context("cannot start prlimit")?;
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
    let is_there = |process: &&u32| Path::new(&format!("/proc/{process}")).exists();
    let gone = limited.iter().filter(|process| !is_there(process)).count();
    let ended = ended(child)?;
    ensure!(gone != 0, "no process was replaced, of {}: {ended:?}", limited.len());
    let ended = match ended.code() {
        FAULT => ended.well(FAULT, &[GIVEN_UP])?,
        _ => ended.well(0, &["fuzz: all well with process", "continues"])?,
    };
    ended.never(&fuzz::WRONG)
}
