//! User programs at the border between guest user mode and the guest kernel
//! (`guests/linux/isolation.c`), where both run in processes of this host. With protection keys the
//! same program runs on an emulated host: see [`crate::keys`].

use crate::hosted::net::wait_for;
use crate::hosted::{Rig, children, end, ended, start};
use crate::previrt::Kernel;
use crate::system::artifacts;
use anyhow::{Context, Result, ensure};
use proto::hosted::layout;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Tests of the program that every mode passes.
pub const TESTS: [&str; 16] = [
    "kernel-copies",
    "stepped-calls",
    "traced-steps",
    "steps-everywhere",
    "alignment-checks",
    "middle-of-calls",
    "call-stacks",
    "stale-copies",
    "stepped-neighbours",
    "page-ends",
    "own-code",
    "refused-calls",
    "watchpoints",
    "cpu-numbers",
    "time-stamps",
    "compacted-state",
];
/// Tests of copies of code whose original is written.
pub const COPY_TESTS: [&str; 6] = [
    "double-mappings",
    "writers-elsewhere",
    "written-files",
    "device-writes",
    "driver-pages",
    "breakpoints",
];
/// Tests of the program whose own code is executed in steps with protection keys.
pub const STEP_TESTS: [&str; 5] =
    ["alignment-checks", "stale-copies", "steps-everywhere", "stepped-calls", "own-code"];

/// Returns the commands that give the source of random numbers to the module that has a page for
/// it, which is in this folder.
pub fn driver(folder: &str) -> String {
    format!(
        "cd /sys/bus/virtio/drivers/virtio_rng; echo virtio[0-9]* >unbind; cd /; insmod {folder}/check_device.ko"
    )
}

/// Tests of the program without protection keys: user mode forges each word that its process and
/// the kernel's share and that it can write, and pages that the kernel frees are gone all the same;
/// jumps to memory of the VM's processes end the program.
const PROCESS_TESTS: [&str; 3] = ["freed-pages", "freed-elsewhere", "wild-jumps"];
/// Text that the program prints when it finds something wrong.
pub const WRONG: [&str; 2] = ["FAILED", "isolation: line"];

/// The program.
pub fn program() -> PathBuf {
    artifacts().join("linux-isolation")
}

/// Returns the program whose own code is executed in steps with protection keys.
pub fn stepped_program() -> PathBuf {
    artifacts().join("linux-isolation-steps")
}

/// Runs the tests in each mode that needs no processor feature, on one vCPU and on
/// two. The VM continues and ends with its own exit code.
pub fn modes() -> Result<()> {
    let rig = Rig::new()?;
    let (program, module) = (program(), Kernel::get()?.check_device());
    for mode in ["none", "process"] {
        for cpus in ["1", "2"] {
            let tests = [&TESTS[..], &COPY_TESTS[..], &PROCESS_TESTS[..]].concat().join(" ");
            let driver = driver("/mnt");
            let script = format!("{driver}\n/mnt/linux-isolation {mode} {tests}\necho continues\n");
            let mut run = rig.script(&script, &[&program, &module])?;
            let ended = end(run.args(["-c", cpus, "--protection", mode]), "")?;
            let well = format!("all well with {mode}");
            ended
                .well(0, &[&well, "continues"])
                .and_then(|ended| ended.never(&WRONG))
                .with_context(|| format!("--protection {mode} -c {cpus}"))?;
        }
    }
    Ok(())
}

/// The signal stack of a guest process does not overflow, however many events are signalled while
/// it waits for a host CPU.
pub fn many_events() -> Result<()> {
    let rig = Rig::new()?;
    for mode in ["none", "process"] {
        let mut run = rig.run();
        let script =
            "echo it runs; n=0; while [ $n -lt 1500000 ]; do n=$((n+1)); done; echo continues";
        run.args(["--protection", mode, "-p", &format!("quiet parador.run=\"{script}\"")]);
        let mut child = start(&mut run)?;
        wait_for(&mut child, "it runs")?;
        // The device process comes first.
        let guests: Vec<_> = children(&child)?.iter().skip(2).map(u32::to_string).collect();
        let signal = |name: &str| {
            let mut kill = Command::new("kill");
            kill.arg(format!("-{name}")).args(&guests).stderr(Stdio::null());
            // One of them may have ended.
            kill.status().context("cannot start kill").map(drop)
        };
        signal("STOP")?;
        for _ in 0..64 {
            signal(&layout::KICK_SIGNAL.to_string())?;
        }
        signal("CONT")?;
        let ended = ended(child)?.well(0, &["continues"]);
        ended.with_context(|| format!("--protection {mode}"))?;
    }
    ensure!(layout::KICK_SIGNAL < 32, "the host queues signal {}", layout::KICK_SIGNAL);
    Ok(())
}
