//! Random user programs (`guests/linux/fuzz.c`) in guests whose user mode and kernel are processes
//! of a host: without protection keys on this host, with keys on an emulated one. Neither the
//! programs' neighbours nor the guest kernel's code and constants change, and the VM continues.
//!
//! Program n of a run is made from the run's seed + n: `PARADOR_FUZZ_SEED`, or always the same.

use crate::hosted::{LIMIT, Rig, end};
use crate::keys::{HOST_CPUS, cpus, host_disk, ram_disk, run_host};
use crate::previrt::Kernel;
use crate::system::artifacts;
use crate::transcript::ensure_lacks;
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;

/// Another seed than [`FIRST_SEED`].
const SEED: &str = "PARADOR_FUZZ_SEED";
const FIRST_SEED: u64 = 1;
/// Programs with each mode and number of virtual CPUs, and those of a long run.
const PROGRAMS: [(&str, u64, u64); 3] =
    [("none", 300, 20_000), ("process", 100, 2_000), ("keys", 8, 3_000)];
const CPUS: [&str; 2] = ["1", "2"];
/// A program that once reached its kernel (with keys: the page behind one that is executed in
/// steps).
const FOUND: u64 = 100_543;
/// Seconds of a machine in a long run, and of the emulated host.
const LONG: u32 = 1800;
const HOST_LIMIT: u32 = 300;
/// The last line of the program, without the mode.
const WELL: &str = "fuzz: all well with";
/// Line that the guest prints afterwards if its kernel is unchanged.
const UNCHANGED: &str = "the kernel's code and constants are unchanged";
/// Texts that neither the program, the script nor Linux may print.
pub const WRONG: [&str; 7] =
    ["FAILED", "HAS CHANGED", "BUG:", "WARNING:", "Oops", "Call Trace", "detected stalls"];

fn programs(mode: &str, is_long: bool) -> Result<u64> {
    let found = PROGRAMS.iter().find(|(name, ..)| *name == mode);
    let (_, short, long) = found.with_context(|| format!("no mode {mode}"))?;
    Ok(if is_long { *long } else { *short })
}

/// The guest's script: sums of the kernel's memory around the programs.
fn script(folder: &str, mode: &str, is_long: bool) -> Result<String> {
    let seed = match std::env::var(SEED) {
        Ok(text) => text.parse().with_context(|| format!("{SEED} is no number"))?,
        Err(_) => FIRST_SEED,
    };
    let count = programs(mode, is_long)?;
    Ok(format!(
        "at() {{ awk -v name=$1 '$3 == name {{ print \"0x\" $1 }}' /proc/kallsyms; }}
        sum() {{
            insmod {folder}/check_memory.ko first=$(at _stext),$(at __start_rodata) last=$(at _etext),$(at __end_rodata)
            rmmod check_memory
            dmesg | grep -o 'memory: [0-9]* bytes, sum.*' | tail -n 1
        }}
        {folder}/linux-fuzz {mode} {FOUND} 1
        before=$(sum)
        {folder}/linux-fuzz {mode} {seed} {count}
        after=$(sum)
        echo \"$before; $after\"
        test -n \"$before\" && test \"$before\" = \"$after\" && echo \"{UNCHANGED}\" || echo \"the kernel HAS CHANGED\"
        ls / >/dev/null && echo continues\n"
    ))
}

/// The program.
pub fn program() -> PathBuf {
    artifacts().join("linux-fuzz")
}

fn files() -> Result<[PathBuf; 2]> {
    Ok([program(), Kernel::get()?.check_memory()])
}

/// All modes.
pub fn modes(is_long: bool) -> Result<()> {
    let files = files()?;
    let files = files.each_ref().map(PathBuf::as_path);
    for mode in ["none", "process"] {
        for cpus in CPUS {
            let rig = Rig::new()?;
            let limit = if is_long { LONG } else { LIMIT };
            let mut run = rig.script_with(limit, "", &script("/mnt", mode, is_long)?, &files)?;
            run.args(["-c", cpus, "--protection", mode]);
            let well = format!("{WELL} {mode}");
            end(&mut run, "")?
                .well(0, &[&well, UNCHANGED, "continues"])
                .and_then(|ended| ended.never(&WRONG))
                .with_context(|| format!("--protection {mode} -c {cpus}"))?;
        }
    }
    Ok(())
}

/// With protection keys, on an emulated host.
pub fn keys(is_long: bool) -> Result<()> {
    let rig = Rig::new()?;
    let script = script("/root", "keys", is_long)? + "sleep 1\npoweroff -f\n";
    let guest = ram_disk(rig.folder(), "guest", &script, &files()?, &[])?;
    let limit = if is_long { LONG } else { HOST_LIMIT };
    let host: String = cpus(is_long)
        .iter()
        .map(|cpus| {
            format!(
                "echo \"== $(date +%s): {cpus}\"
                parador run vmlinux -i guest -m 256M -c {cpus} -p quiet --protection keys --artifacts /bin </dev/null
                echo ends with $?\n"
            )
        })
        .chain(["poweroff -f\n".to_owned()])
        .collect();
    let host = host_disk(rig.folder(), &host, &[rig.kernel().to_owned(), guest])?;
    let console = run_host(&host, limit, &["-smp", &HOST_CPUS.to_string()])?;
    let parts: Vec<_> = console.split("== ").skip(1).collect();
    ensure!(parts.len() == cpus(is_long).len(), "{} machines:\n{console}", parts.len());
    for text in [&format!("{WELL} keys")[..], UNCHANGED, "continues", "ends with 0"] {
        let all = parts.iter().all(|part| part.contains(text));
        ensure!(all, "`{text}` did not appear:\n{console}");
    }
    ensure_lacks(&console, &WRONG)?;
    Ok(())
}
