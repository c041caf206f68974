//! When `parador run` returns, no part of the VM is left.

use super::{Rig, children, is_alive, start, succeed};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::process::Command;

/// Times that each end is tried: a process that ends a moment later does so by chance.
const TIMES: u32 = 4;

/// Cause of a VM's end.
#[derive(Clone, Copy, Debug)]
enum End {
    /// The guest powers off.
    PowerOff,
    /// The guest's kernel panics.
    Panic,
    /// `parador` gets a signal.
    Terminated,
    /// The device process, which is the parent of the others, is killed.
    Killed,
}

/// Whatever has ended a machine, none of its processes is alive, and its disk is nobody's, in the
/// moment in which `parador run` has ended.
pub fn none() -> Result<()> {
    let rig = Rig::new()?;
    rig.disk("disk.img", "", &[])?;
    for (end, code) in
        [(End::PowerOff, 0), (End::Panic, 80), (End::Terminated, 143), (End::Killed, 137)]
    {
        for time in 0..TIMES {
            ended(&rig, end, code).with_context(|| format!("{end:?}, {time}"))?;
        }
    }
    inherits_nothing(&rig)
}

/// A descriptor of the program that starts `parador` does not reach the processes of the VM.
fn inherits_nothing(rig: &Rig) -> Result<()> {
    let file = rig.path("inherited");
    fs::write(&file, "").context("cannot write a file")?;
    let run = rig.run();
    let mut command = Command::new("sh");
    command.args(["-c", "exec 9<\"$0\"; exec \"$@\""]).arg(&file);
    command.arg(run.get_program()).args(run.get_args()).args(["-d", "disk.img"]);
    command.envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.current_dir(run.get_current_dir().unwrap_or(rig.folder()));
    let mut child = start(&mut command)?;
    let all = children(&child)?;
    let has = |process: &u32| {
        let all = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
        all.filter_map(|entry| fs::read_link(entry.path()).ok()).any(|target| target == file)
    };
    let (own, others): (Vec<u32>, Vec<u32>) = all.iter().partition(|process| has(process));
    succeed(Command::new("kill").args(["-TERM", &all[0].to_string()]))?;
    child.wait().context("cannot wait for parador")?;
    ensure!(own == all[..1], "{own:?} have a descriptor of the caller, {others:?} do not");
    Ok(())
}

fn ended(rig: &Rig, end: End, code: i32) -> Result<()> {
    let disk = "disk.img";
    // What is on its way to the disk when it ends takes the host's kernel longest.
    let load = "mkfs.ext2 -F /dev/vdb >/dev/null 2>&1; dd if=/dev/vda of=/dev/null bs=64k & ";
    let last = match end {
        End::PowerOff => "sleep 2; poweroff -f",
        End::Panic => "sleep 2; echo c >/proc/sysrq-trigger",
        End::Terminated | End::Killed => "sleep 100",
    };
    let mut command = rig.run();
    command.args(["-c", "2", "-d", disk, "-p", &format!("parador.run=\"{load}{last}\"")]);
    let mut child = start(&mut command)?;
    let all = children(&child)?;
    let kill = |signal: &str, process: u32| {
        succeed(Command::new("kill").args([signal, &process.to_string()]))
    };
    match end {
        End::PowerOff | End::Panic => {}
        End::Terminated => kill("-TERM", all[0])?,
        End::Killed => kill("-KILL", all[1])?,
    }
    let status = child.wait().context("cannot wait for parador")?;
    let left: Vec<_> = all.iter().filter(|process| is_alive(**process)).collect();
    ensure!(left.is_empty(), "processes {left:?} of {all:?} are alive");
    // Neither of them waits: the lock of machines, and those of programs of QEMU.
    let take = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(rig.folder());
        succeed(&mut command).context("the disk is in use")
    };
    take("flock", &["--nonblock", disk, "true"])?;
    take("qemu-io", &["-f", "raw", "-c", "write -P 0 0 512", disk])?;
    ensure!(status.code() == Some(code), "{status}");
    Ok(())
}
