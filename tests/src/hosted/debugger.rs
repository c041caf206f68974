//! The guest's kernel under GDB.

use super::observed::wait;
use super::{Rig, start, vm_processes};
use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

/// Most seconds of a session: its VM may be on an emulated host, beside other tests.
const LIMIT: &str = "500";

/// Runs GDB commands on the guest kernel of the VM that listens at this address and returns GDB's
/// output.
fn gdb(rig: &Rig, commands: &[&str]) -> Result<String> {
    gdb_at(rig, "gdb", commands)
}

/// The same at another place.
pub fn gdb_at(rig: &Rig, place: &str, commands: &[&str]) -> Result<String> {
    let mut command = Command::new("timeout");
    command.args([LIMIT, "gdb", "-nx", "-batch"]).arg(rig.kernel()).current_dir(rig.folder());
    let target = format!("target remote {place}");
    // An emulated host beside other tests needs more than a minute until it answers.
    for line in ["set pagination off", "set remotetimeout 240", &target].iter().chain(commands) {
        command.args(["-ex", line]);
    }
    let output = command.stdin(Stdio::null()).output().context("cannot start gdb")?;
    let text = [output.stdout, output.stderr].concat();
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// These are in it.
pub fn has(text: &str, wanted: &[&str]) -> Result<()> {
    let missing = wanted.iter().find(|wanted| !text.contains(**wanted));
    ensure!(missing.is_none(), "`{}` did not appear:\n{text}", missing.unwrap_or(&""));
    Ok(())
}

/// It ends so, having printed this.
fn ends(mut child: Child, code: i32, wanted: &[&str]) -> Result<()> {
    drop(child.stdin.take());
    let output = child.wait_with_output().context("cannot wait for parador")?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    ensure!(output.status.code() == Some(code), "{}:\n{text}", output.status);
    has(&text, wanted)?;
    ensure!(!text.contains("Oops") && !text.contains("BUG:"), "{text}");
    Ok(())
}

/// The guest kernel stops at sync(2) and after single steps, memory is readable, and the guest
/// continues after the debugger detaches. Before that GDB executes and prints further commands.
pub fn at_sync(rig: &Rig, before: &[&str], wanted: &[&str]) -> Result<()> {
    let commands = [
        "x/s &linux_banner",
        "break *__x64_sys_sync",
        "continue",
        "backtrace 2",
        "x/2i $rip",
        "stepi",
        "stepi",
        "info symbol $rip",
        "print/x *(int*)&jiffies != 0",
        "delete",
        "detach",
    ];
    let text = gdb(rig, &[before, &commands].concat())?;
    has(&text, wanted)?;
    let shown = [
        "Linux version 6.",
        "Breakpoint 1, 0x",
        "in __x64_sys_sync ()",
        "in do_syscall_64 ()",
        "$1 = 0x1",
        "detached",
    ];
    has(&text, &shown)
}

/// A guest kernel stops at its first instruction, at breakpoints and after single steps; memory and
/// registers can be read and changed; the guest continues with and without a debugger.
pub fn session() -> Result<()> {
    let rig = Rig::new()?;
    for cpus in ["1", "2"] {
        let mut run = rig.run();
        run.args(["-c", cpus, "--gdb", "unix=gdb,wait"]);
        run.args(["-p", "parador.run=\"sync; echo has synced; exit 3\""]);
        let child = start(&mut run)?;
        wait(|| rig.folder().join("gdb").exists().then_some(()))?;
        at_sync(&rig, &["info symbol $rip"], &["x86_64_start_kernel"])?;
        ends(child, 3, &["has synced"])?;
    }
    late(&rig)?;
    // One that runs is interrupted and changed; the debugger comes twice, and leaves without a
    // word.
    let mut child = start(rig.run().args(["--gdb", "unix=gdb"]))?;
    let mut input = child.stdin.take().context("no input")?;
    input.write_all(b"echo ready; while :; do sync; done\n").context("cannot write")?;
    let mut output = child.stdout.take().context("no output")?;
    let mut printed = String::new();
    wait(|| {
        let mut bytes = [0; 4096];
        let count = output.read(&mut bytes).ok()?;
        printed.push_str(&String::from_utf8_lossy(&bytes[..count]));
        printed.contains("\nready").then_some(())
    })?;
    for _ in 0..2 {
        let text = gdb(
            &rig,
            &[
                "set var *(unsigned*)&panic_timeout = 0x1234",
                "print/x *(unsigned*)&panic_timeout",
                "break *ksys_sync",
                "continue",
                "continue",
                "print $_siginfo",
                "info threads",
                "kill",
            ],
        )?;
        has(&text, &["$1 = 0x1234", "Breakpoint 1, 0x", "in ksys_sync ()"])?;
    }
    child.kill().and_then(|()| child.wait()).context("cannot end parador")?;
    interrupt(&rig)
}

/// A debugger that connects before the guest has come to its first stop waits for it, also on a
/// host on which that takes seconds.
fn late(rig: &Rig) -> Result<()> {
    let child = start(rig.run().args(["--gdb", "unix=gdb,wait", "-p", "parador.run=\"exit 3\""]))?;
    // As soon as one of them exists it goes no further, so that no vCPU starts.
    let send = |signal| {
        let processes = vm_processes(&child).into_iter().filter_map(|id| Pid::from_raw(id as i32));
        // It may have ended meanwhile.
        processes.filter(|process| kill_process(*process, signal).is_ok()).count()
    };
    wait(|| (send(Signal::STOP) != 0).then_some(()))?;
    for _ in 0..100 {
        thread::sleep(Duration::from_millis(2));
        send(Signal::STOP);
    }
    // `parador` itself continues, and listens at last on a busy host.
    wait(|| rig.folder().join("gdb").exists().then_some(()))?;
    let text = thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(2500));
            // A list of children may lack some while others end (proc(5)).
            for _ in 0..20 {
                send(Signal::CONT);
                thread::sleep(Duration::from_millis(100));
            }
        });
        gdb(rig, &["info symbol $rip", "stepi", "info symbol $rip", "detach"])
    })?;
    has(&text, &["x86_64_start_kernel in section", "x86_64_start_kernel + "])?;
    ends(child, 3, &[])
}

/// Ctrl-C stops all virtual CPUs, also idle ones; a machine that ends ends the session. At a TCP
/// port.
fn interrupt(rig: &Rig) -> Result<()> {
    const INTERRUPT: &str = "python import os, signal, threading; \
                             threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()";
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let port = free.context("no free port")?.port();
    let mut run = rig.run();
    run.args(["-c", "2", "--gdb", &format!("tcp=:{port},wait")]);
    run.args(["-p", "parador.run=\"sleep 2; exit 4\""]);
    let child = start(&mut run)?;
    let inode = |line: &str| line.contains(&format!("0100007F:{port:04X} 00000000:0000 0A"));
    wait(|| fs::read_to_string("/proc/net/tcp").ok()?.lines().any(inode).then_some(()))?;
    let place = format!("127.0.0.1:{port}");
    let text = gdb_at(
        rig,
        &place,
        &[
            "break *do_idle",
            "continue",
            "delete",
            INTERRUPT,
            "continue",
            "info threads",
            "continue",
        ],
    )?;
    has(&text, &["received signal SIGINT", "Thread 1.2", "exited"])?;
    ends(child, 4, &[])
}
