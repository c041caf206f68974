//! Optimisations of the wedge, several vCPUs.

use super::{Rig, dummy, end, stress_program};
use anyhow::{Context, Result, bail, ensure};
use std::fs;

/// The wedge patches the kernel's code on its behalf; without that the kernel does so itself.
pub fn functions() -> Result<()> {
    let rig = Rig::new()?;
    let script = "for on in 1 0 1; do echo $on >/proc/sys/kernel/task_delayacct; done
        insmod /mnt/dummy.ko numdummies=3; rmmod dummy; echo changed\n";
    let dummy = dummy()?;
    for (options, counted) in [(&[][..], true), (&["--without", "functions"][..], false)] {
        let mut run = rig.script(script, &[&dummy])?;
        let ended = end(run.arg("--counters").args(options), "")?.well(0, &["changed"])?;
        let replaced = ended.messages.lines().any(|line| line.ends_with(" functions"));
        ensure!(replaced == counted, "{options:?}:\n{}", ended.messages);
    }
    Ok(())
}

/// Frequent system calls cause no signal: those that load their number as an immediate, and
/// read(2), whose number is 0.
pub fn calls() -> Result<()> {
    const BYTES: u64 = 50_000;
    let rig = Rig::new()?;
    let copy = format!("dd if=/dev/zero bs=1 count={BYTES} 2>/dev/null | wc -c");
    for (options, by_signal) in [(&[][..], false), (&["--without", "call-sites"][..], true)] {
        let mut run = rig.script(&format!("{copy}\n"), &[])?;
        let ended = end(run.arg("--counters").args(options), "")?.well(0, &[&BYTES.to_string()])?;
        let count = |name: &str| {
            let line = ended.messages.lines().find(|line| line.ends_with(name));
            line.and_then(|line| line.split_whitespace().rev().nth(name.split(' ').count()))
                .and_then(|count| count.parse::<u64>().ok())
                .with_context(|| format!("no count of {name}:\n{}", ended.messages))
        };
        let signals = count("calls by signal")?;
        // `dd` reads and writes each byte.
        ensure!((signals > 2 * BYTES) == by_signal, "{options:?}: {signals} signals");
        if !by_signal {
            let without = count("calls without a signal")?;
            ensure!(without > 2 * BYTES, "{without} calls without a signal");
            ensure!(signals < BYTES / 5, "{signals} calls by signal");
        }
    }
    Ok(())
}

/// Each optimisation can be switched off without another effect than speed.
pub fn ladder() -> Result<()> {
    const ALL: &str = "fast-sites,call-sites,functions,batches,spaces,in-process";
    let rig = Rig::new()?;
    // Seconds in which even a busy host gets once through everything.
    for (seconds, options) in [
        (1, &["--without", "batches"][..]),
        (1, &["--without", "spaces"]),
        (3, &["--without", "in-process", "-c", "2"]),
        (6, &["--protection", "remap", "-c", "2"]),
        (6, &["--without", ALL, "--protection", "remap"]),
    ] {
        let script = format!("/mnt/linux-stress {seconds}\n");
        let mut run = rig.script(&script, &[&stress_program()])?;
        end(run.args(options), "")?.well(0, &[]).with_context(|| format!("{options:?}"))?;
    }
    // The end of a traced process is the machine's, with its code.
    let mut run = rig.run();
    run.args(["--without", "in-process", "-p", "parador.run=\"machine-exit 7\""]);
    end(&mut run, "")?.well(7, &["the guest ended with code 7"])?;
    Ok(())
}

/// Every store to a page table is annotated: starting, stopping and changing the memory of
/// programs, and modules.
pub fn profile() -> Result<()> {
    let rig = Rig::new()?;
    let mut run = rig.script("/mnt/linux-stress 2\n", &[&stress_program()])?;
    let ended = end(run.args(["--profile-writes", "profile"]), "")?;
    ended.well(0, &[])?;
    let report = fs::read_to_string(rig.path("profile")).context("no profile")?;
    // N by annotated instructions, M by others.
    let mut numbers = report.split_whitespace().filter_map(|word| word.parse::<u64>().ok());
    let (Some(annotated), Some(others)) = (numbers.next(), numbers.next()) else {
        bail!("the profile is not understood:\n{report}");
    };
    ensure!(annotated > 10_000, "few writes:\n{report}");
    // The page of a root that has been freed may get contents that look like entries.
    ensure!(others * 5000 <= annotated, "stores are not annotated:\n{report}");
    Ok(())
}

/// Several virtual CPUs: the guest has them, its programs run on each, what they change of their
/// memory holds on all; code is changed and modules come and go meanwhile; a CPU can be taken out
/// and put back. They interrupt each other, or the device process does.
pub fn cpus() -> Result<()> {
    let rig = Rig::new()?;
    let dummy = dummy()?;
    for (cpus, sandbox) in [(2, "off"), (2, "on"), (4, "on")] {
        let script = format!(
            "[ $(nproc) = {cpus} ]; cat /sys/devices/system/clocksource/clocksource0/current_clocksource
            for cpu in $(seq 0 {last}); do
                taskset -c $cpu grep Cpus_allowed_list: /proc/self/status
                taskset -c $cpu sh -c 'while :; do :; done' &
                eval loop$cpu=$!
            done
            sleep 0.5; kill $(jobs -p); wait || true
            /mnt/linux-stress 4 & stress=$!
            for round in 1 2 3; do
                insmod /mnt/dummy.ko; ifconfig dummy0 up; ifconfig dummy0 down; rmmod dummy
                for on in 1 0 1; do echo $on >/proc/sys/kernel/task_delayacct; done
            done
            wait $stress; echo stress ended
            for round in 1 2 3; do
                echo 0 >/sys/devices/system/cpu/cpu1/online; nproc | sed 's/^/without: /'
                echo 1 >/sys/devices/system/cpu/cpu1/online; [ $(nproc) = {cpus} ]
            done
            for kind in RES CAL TLB; do
                grep $kind: /proc/interrupts | tr -s ' ' | cut -d ' ' -f 2-{end}
            done\n",
            last = cpus - 1,
            end = cpus + 1,
        );
        let mut machine = rig.script(&script, &[&dummy, &stress_program()])?;
        machine.args(["-c", &cpus.to_string(), "--sandbox", sandbox]);
        let each = format!("Cpus_allowed_list:\t{}\n", cpus - 1);
        let without = format!("without: {}\n", cpus - 1);
        let ended = end(&mut machine, "")?
            .well(0, &["\ntsc\n", &each, "stress: all well", "\nstress ended\n", &without])?;
        // All of them have been interrupted by others.
        let numbers = |line: &str| line.split(' ').map(|word| word.parse::<u32>().ok()).collect();
        let counts = ended.console.lines().filter_map(numbers);
        let counts: Vec<Vec<u32>> = counts.filter(|all: &Vec<_>| all.len() == cpus).collect();
        let all = counts.len() == 3 && counts.iter().flatten().all(|&count| count != 0);
        ensure!(all, "interrupts between {cpus} CPUs: {counts:?}\n{}", ended.console);
    }
    Ok(())
}
