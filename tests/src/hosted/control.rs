//! Control of a running VM: `parador ctl`, `--wait-boot`, `--config`.

use super::{GONE, LIMIT, Rig, SLOW, end, start, succeed};
use crate::system::parador;
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A machine that is asked and told by its control socket, by `parador ctl`.
pub(super) struct Controlled<'a> {
    rig: &'a Rig,
    child: Child,
}

impl<'a> Controlled<'a> {
    const SOCKET: &'static str = "vm.sock";
    const CONSOLE: &'static str = "console";

    /// Starts it; its console goes to a file.
    pub(super) fn start(rig: &'a Rig, command: &mut Command) -> Result<Self> {
        let console = File::create(rig.path(Self::CONSOLE)).context("cannot make a file")?;
        command.args(["--api-socket", Self::SOCKET]).stdin(Stdio::null()).stdout(console);
        let child = command.stderr(Stdio::piped()).spawn().context("cannot start parador")?;
        Ok(Self { rig, child })
    }

    /// Code and output of `parador ctl`.
    fn ctl(&self, words: &[&str]) -> Result<(i32, String)> {
        let mut command = parador(self.rig.folder.path());
        command.args(["ctl", "--socket", Self::SOCKET]).args(words);
        let output = command.output().context("cannot start parador ctl")?;
        let text = [output.stdout, output.stderr].concat();
        let code = output.status.code().context("parador ctl was killed")?;
        Ok((code, String::from_utf8_lossy(&text).into_owned()))
    }

    /// `parador ctl` ends with this code and prints this text.
    pub(super) fn told(&self, words: &[&str], code: i32, text: &str) -> Result<String> {
        let (ended, said) = self.ctl(words)?;
        ensure!(ended == code && said.contains(text), "ctl {words:?}: {ended}\n{said}");
        Ok(said)
    }

    /// Until it waits for boot.
    fn waits(&self) -> Result<()> {
        let deadline = Instant::now() + SLOW;
        loop {
            let (code, said) = self.ctl(&["status"])?;
            if code == 0 && said.contains("\"state\": \"created\"") {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "it does not wait: {code}\n{said}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns the last number that the guest has counted to.
    fn count(&self) -> usize {
        let console = fs::read_to_string(self.rig.path(Self::CONSOLE)).unwrap_or_default();
        console.lines().filter(|line| line.starts_with("count ")).count()
    }

    /// Waits until the guest has counted on.
    fn counts(&self) -> Result<()> {
        let (before, deadline) = (self.count(), Instant::now() + SLOW);
        while self.count() <= before {
            let console = || fs::read_to_string(self.rig.path(Self::CONSOLE)).unwrap_or_default();
            ensure!(
                Instant::now() < deadline,
                "the guest does not count beyond {before}:\n{}",
                console()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Waits for its end; returns its exit code and messages.
    pub(super) fn wait(mut self) -> Result<(Option<i32>, String)> {
        let mut messages = String::new();
        if let Some(mut errors) = self.child.stderr.take() {
            errors.read_to_string(&mut messages).context("no messages")?;
        }
        let status = self.child.wait().context("cannot wait for parador")?;
        Ok((status.code(), messages))
    }
}

/// Script of a guest that counts, and powers off when its power button is pressed.
const COUNT: &str = "set +e; insmod /mnt/evdev.ko; mkdir -p /etc/acpi/PWRF
    printf '#!/bin/sh\npoweroff -f\n' >/etc/acpi/PWRF/00000080; chmod +x /etc/acpi/PWRF/00000080
    acpid -l /dev/null
    n=0; while :; do n=$((n+1)); echo count $n; sleep 0.1; done\n";

/// Events of a VM that is booted, paused, resumed, reset and shut down.
pub const LIFE: [&str; 10] = [
    "created",
    "started",
    "running",
    "paused",
    "resumed",
    "reset",
    "started",
    "running",
    "shutdown-requested",
    "ended",
];

/// A VM pauses, resumes, resets and shuts down on command, and reports these events.
pub fn api() -> Result<()> {
    let rig = Rig::new()?;
    let evdev = rig.module("kernel/drivers/input/evdev.ko")?;
    let mut run = rig.script(COUNT, &[&evdev])?;
    run.args(["--metrics", "metrics", "--wait-boot"]);
    let machine = Controlled::start(&rig, &mut run)?;
    // Everything is there but the guest.
    machine.waits()?;
    machine.told(&["stats"], 0, "\"processes\": 0")?;
    for words in [&["pause"][..], &["resume"], &["reset"], &["shutdown"]] {
        machine.told(words, 1, "waits for boot")?;
    }
    ensure!(machine.count() == 0, "a machine that waits has counted");
    machine.told(&["boot"], 0, "starting")?;
    machine.counts()?;
    machine.told(&["boot"], 1, "already been started")?;
    machine.told(&["resume"], 1, "not paused")?;
    machine.told(&["pause"], 0, "paused")?;
    let before = machine.count();
    std::thread::sleep(Duration::from_secs(1));
    let after = machine.count();
    // A line may have been on its way.
    ensure!(after <= before + 1, "a paused guest has counted from {before} to {after}");
    machine.told(&["status"], 0, "\"state\": \"paused\"")?;
    machine.told(&["stats"], 0, "\"mappings_filled_in\"")?;
    machine.told(&["shutdown"], 1, "is paused")?;
    machine.told(&["resume"], 0, "running")?;
    machine.counts()?;
    machine.told(&["reset"], 0, "starting")?;
    machine.counts()?;
    machine.told(&["metrics"], 0, "parador_resets_total 1")?;
    machine.told(&["top", "-n", "1"], 0, "running  up ")?;
    let socket = rig.path(Controlled::SOCKET);
    let second = end(rig.run().args(["--api-socket", Controlled::SOCKET]), "")?;
    second.has(71, &["is in use by another process"])?;
    let events =
        start(parador(rig.folder.path()).args(["ctl", "-s", Controlled::SOCKET, "events"]))?;
    machine.told(&["shutdown"], 0, "running")?;
    let (code, messages) = machine.wait()?;
    ensure!(code == Some(0) && messages.contains("powered off"), "{code:?}: {messages}");
    ensure!(!socket.exists(), "the control socket has stayed");
    let events = events.wait_with_output().context("cannot wait for parador ctl")?;
    let events = String::from_utf8_lossy(&events.stdout).into_owned();
    let kinds: Vec<&str> = events.lines().filter_map(|line| line.split('"').nth(3)).collect();
    ensure!(kinds == LIFE, "{events}");
    let metrics = fs::read_to_string(rig.path("metrics")).context("no metrics")?;
    ensure!(metrics.contains("\"state\":\"ended\""), "{metrics}");

    // A killed VM leaves its socket, which the next VM replaces at once.
    let mut machine = Controlled::start(&rig, &mut rig.script(COUNT, &[&evdev])?)?;
    machine.counts()?;
    let events =
        start(parador(rig.folder.path()).args(["ctl", "-s", Controlled::SOCKET, "events"]))?;
    machine.child.kill().context("cannot kill parador")?;
    machine.child.wait().context("cannot wait for parador")?;
    events.wait_with_output().context("cannot wait for parador ctl")?;
    machine.told(&["status"], 69, "stale control socket")?;
    let machine = Controlled::start(&rig, &mut rig.script(COUNT, &[&evdev])?)?;
    machine.counts()?;
    machine.told(&["pause"], 0, "paused")?;
    machine.told(&["shutdown", "--force"], 0, "ended")?;
    let (code, messages) = machine.wait()?;
    ensure!(code == Some(0) && messages.contains("ended by request"), "{code:?}: {messages}");
    Ok(())
}

/// A machine that waits for boot and is ended otherwise.
pub fn boot() -> Result<()> {
    let rig = Rig::new()?;
    let waiting = |limit, more: &[&str]| -> Result<Controlled<'_>> {
        let mut run = rig.bare(limit);
        run.args(["-i", "busybox", "--wait-boot"]).args(more);
        let machine = Controlled::start(&rig, &mut run)?;
        machine.waits()?;
        Ok(machine)
    };
    let socket = rig.path(Controlled::SOCKET);
    let is_over = |machine: Controlled<'_>, code, text| -> Result<()> {
        let (ended, messages) = machine.wait()?;
        ensure!(ended == Some(code) && messages.contains(text), "{ended:?}: {messages}");
        ensure!(!socket.exists(), "the control socket has stayed");
        Ok(())
    };
    let machine = waiting(LIMIT, &[])?;
    machine.told(&["shutdown", "--force"], 0, "ended")?;
    is_over(machine, 0, "ended by request")?;
    let machine = waiting(LIMIT, &[])?;
    succeed(Command::new("kill").arg(machine.child.id().to_string()))?;
    is_over(machine, 128 + 15, "signal 15")?;
    is_over(waiting(2, &[])?, 124, "time limit")?;
    // The VM resets by itself.
    let machine = waiting(LIMIT, &["--on-reset", "reset", "-p", "parador.run=\"reboot -f\""])?;
    machine.told(&["boot"], 0, "starting")?;
    let deadline = Instant::now() + 3 * GONE;
    while !machine.ctl(&["metrics"])?.1.contains("parador_resets_total 2") {
        ensure!(Instant::now() < deadline, "the guest does not restart");
        std::thread::sleep(Duration::from_millis(50));
    }
    let descriptors = || {
        let all = fs::read_dir(format!("/proc/{}/fd", machine.child.id()));
        all.context("no descriptors").map(Iterator::count)
    };
    let before = descriptors()?;
    while !machine.ctl(&["metrics"])?.1.contains("parador_resets_total 8") {
        ensure!(Instant::now() < deadline, "the guest does not restart");
        std::thread::sleep(Duration::from_millis(50));
    }
    // Some are open only while the VM starts; a start that kept three would have kept 18.
    let after = descriptors()?;
    ensure!(after < before + 12, "{before} descriptors, after six resets {after}");
    machine.told(&["shutdown", "--force"], 0, "ended")?;
    is_over(machine, 0, "ended by request")?;
    end(rig.run().arg("--wait-boot"), "")?.has(64, &["--wait-boot requires --api-socket"])?;
    Ok(())
}

/// A machine that is described by a file, and what follows its ends.
pub fn config() -> Result<()> {
    let rig = Rig::new()?;
    let file = |more: &str| {
        let kernel = rig.kernel.display();
        let text = format!(
            "[vm]\nkernel = \"{kernel}\"\ninitrd = \"busybox\"\ntimeout = \"{LIMIT}\"\n{more}"
        );
        fs::write(rig.path("vm.toml"), text).context("cannot write a file")
    };
    let run = |words: &[&str]| {
        let mut command = parador(rig.folder.path());
        command.args(["run", "--config", "vm.toml"]).args(words);
        end(&mut command, "")
    };
    let reboot = "cmdline = \"parador.run=\\\"reboot -f\\\"\"\n";
    file(reboot)?;
    run(&["-m", "128M"])?.well(83, &["the guest reset (exit code 83"])?;
    run(&["--on-reset", "exit:9"])?.well(9, &[])?;
    // The second start finds what the first has left on the disk.
    let twice = "if [ -e /mnt/second ]; then exit 5; fi; touch /mnt/second; sync; reboot -f\n";
    rig.disk("disk.img", twice, &[])?;
    let start = "mkdir -p /mnt; mount /dev/vda /mnt; sh -e /mnt/script";
    file(&format!(
        "cmdline = \"parador.run=\\\"{start}\\\"\"\non-reset = \"reset\"\n[[disk]]\npath = \"disk.img\"\n"
    ))?;
    run(&[])?.well(5, &["restarting the VM"])?;
    file("on-panic = \"exit:3\"\ncmdline = \"parador.run=\\\"echo c >/proc/sysrq-trigger\\\"\"\n")?;
    run(&[])?.has(3, &["panicked"])?;
    Ok(())
}
