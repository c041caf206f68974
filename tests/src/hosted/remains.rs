//! When `parador run` returns, no part of the VM is left.

use super::{Rig, children, is_alive, start, succeed};
use anyhow::{Context, Result, ensure};
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
