//! Processes of a VM while they are set up, as strace(1) sees them.

use super::{Rig, end};
use anyhow::{Context, Result, ensure};
use proto::hosted::layout;
use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

/// File of the trace.
const CALLS: &str = "calls";

/// A process that runs the guest takes its seccomp filter before it lets any signal in; in one of
/// programs, the thread that maps obeys the guest only when both threads have theirs.
pub fn order() -> Result<()> {
    let rig = Rig::new()?;
    for protection in ["none", "process"] {
        let calls = trace(&rig, protection)?;
        let mut confined = 0;
        for (process, calls) in &calls {
            let place = |what: &dyn Fn(&str) -> bool| calls.iter().position(|call| what(call));
            let filter = |call: &str| call.starts_with("seccomp(") && call.ends_with("= 0");
            let is_open =
                |call: &str| call.starts_with("rt_sigprocmask(SIG_SETMASK, [],") && is_done(call);
            let Some(filter) = place(&filter) else { continue };
            // The device process lets no signal in; all others have been made by it.
            if let Some(open) = place(&is_open) {
                ensure!(filter < open, "process {process} lets signals in first:\n{calls:#?}");
                confined += 1;
            }
            // Rust's library has handlers, too, but not for this one.
            let handler = |call: &str| call.starts_with("rt_sigaction(SIGSYS") && is_done(call);
            if let Some(handler) = place(&handler) {
                let blocks = |call: &str| call.starts_with("rt_sigprocmask(SIG_SETMASK, ~[");
                let blocked = place(&blocks);
                ensure!(
                    blocked.is_some_and(|blocked| blocked < handler),
                    "process {process} has handlers for signals that come:\n{calls:#?}"
                );
            }
        }
        ensure!(confined > 3, "{protection}: {confined} processes of the guest:\n{calls:#?}");
        if protection == "process" {
            mappers_wait(&rig)?;
        }
    }
    Ok(())
}

/// Returns true if the call returned without an error.
fn is_done(call: &str) -> bool {
    call.ends_with("= 0")
}

/// Runs a machine with a few programs; gives the calls of each of its threads, in their order.
fn trace(rig: &Rig, protection: &str) -> Result<BTreeMap<u32, Vec<String>>> {
    let machine = rig.run();
    let mut traced = Command::new("strace");
    traced.args(["-f", "-qq", "-o", CALLS, "-e", "signal=none", "-e"]);
    traced.arg("trace=seccomp,rt_sigprocmask,rt_sigaction,clone,munmap");
    // Only the superuser traces a process that may not be dumped; it is one all the same that
    // `parador` starts.
    traced.arg(machine.get_program()).args(machine.get_args()).current_dir(rig.folder());
    traced.envs(machine.get_envs().filter_map(|(name, value)| Some((name, value?))));
    traced.args(["--sandbox", "off", "--protection", protection]);
    traced.args(["-p", "parador.run=\"for n in 1 2 3; do ls / | wc -l; done\""]);
    end(&mut traced, "")?.well(0, &[])?;
    let mut calls: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for (thread, call) in listed(rig)? {
        calls.entry(thread).or_default().push(call);
    }
    Ok(calls)
}

/// The calls of all threads in the order in which they began. strace(1) splits one whose end
/// another thread's line comes before; here it is whole.
fn listed(rig: &Rig) -> Result<Vec<(u32, String)>> {
    let text = fs::read_to_string(rig.path(CALLS)).context("no list of calls")?;
    let mut calls: Vec<(u32, String)> = Vec::new();
    let mut begun: BTreeMap<u32, usize> = BTreeMap::new();
    for line in text.lines() {
        let Some((thread, call)) = line.split_once(' ') else { continue };
        let thread = thread.parse().with_context(|| format!("no thread: {line}"))?;
        let call = call.trim();
        let end = call.strip_prefix("<... ").and_then(|call| call.split_once(" resumed>"));
        if let Some((_, end)) = end {
            let begin = begun.remove(&thread).with_context(|| format!("no beginning: {line}"))?;
            calls[begin].1.push_str(end);
        } else if let Some(begin) = call.strip_suffix("<unfinished ...>") {
            begun.insert(thread, calls.len());
            calls.push((thread, begin.to_owned()));
        } else {
            calls.push((thread, call.to_owned()));
        }
    }
    Ok(calls)
}

/// The mapping thread of a user process unmaps the memory that both threads share before it does
/// anything else, after the other thread has installed its filter, in the order of the list.
fn mappers_wait(rig: &Rig) -> Result<()> {
    let calls = listed(rig)?;
    let unmaps = format!("munmap({:#x},", layout::PRIVATE);
    let mut seen = 0;
    for (at, (first, call)) in calls.iter().enumerate() {
        let is_thread = call.contains("CLONE_THREAD");
        let thread = call.rsplit("= ").next().filter(|_| is_thread);
        let Some(thread) = thread.and_then(|thread| thread.parse().ok()) else { continue };
        let own = |thread: u32, what: &str| {
            calls[at..].iter().position(|(who, call)| *who == thread && call.starts_with(what))
        };
        let (Some(filter), Some(other)) = (own(*first, "seccomp("), own(thread, "seccomp(")) else {
            continue;
        };
        let unmapped = own(thread, &unmaps).context("the thread that maps does not wait")?;
        ensure!(other < filter && filter < unmapped, "{:#?}", &calls[at..]);
        seen += 1;
    }
    ensure!(seen > 0, "no process of programs:\n{calls:#?}");
    Ok(())
}
