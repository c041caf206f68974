//! Scenarios of a Linux guest of `parador run` as a table of steps.

use super::{Rig, WRONG, end};
use crate::system::artifacts;
use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};

/// A step of a guest: its name, commands of its shell, and texts that it prints. A command that
/// fails ends the guest.
type Step = (&'static str, &'static str, &'static [&'static str]);

/// A Linux guest that carries out steps from its disk and ends with code 0.
#[derive(Debug)]
pub struct Linux {
    /// Name of its tests.
    pub name: &'static str,
    /// Numbers of virtual CPUs.
    cpus: &'static [u32],
    /// Word of the kernel command line.
    word: &'static str,
    /// Programs on the disk, below `/mnt`; `dummy.ko` is a module of the kernel.
    files: &'static [&'static str],
    steps: &'static [Step],
}

/// Scenarios.
pub const LINUX: &[Linux] = &[
    Linux {
        name: "module",
        cpus: &[1],
        word: "",
        files: &["dummy.ko"],
        steps: &[
            ("load", "insmod /mnt/dummy.ko; ifconfig dummy0 up; ifconfig dummy0 down", &[]),
            ("unload", "rmmod dummy; ! ifconfig dummy0 2>/dev/null", &[]),
            ("again", "for n in 1 2; do insmod /mnt/dummy.ko; rmmod dummy; done", &[]),
        ],
    },
    Linux {
        name: "crashes",
        cpus: &[1],
        word: "",
        files: &["linux-stress"],
        steps: &[(
            "signals of crashing programs",
            "set +e; for way in null divide undefined breakpoint privileged kernel; do
                /mnt/linux-stress crash $way; echo $way $?; done; set -e",
            &[
                "\nnull 139\n",
                "\ndivide 136\n",
                "\nundefined 132\n",
                "\nbreakpoint 133\n",
                "\nprivileged 139\n",
                "\nkernel 139\n",
            ],
        )],
    },
    Linux {
        name: "preemption",
        cpus: &[1],
        word: "",
        files: &[],
        steps: &[
            ("loops", "for n in 1 2 3; do (while :; do :; done) & done", &[]),
            (
                "beside them",
                "n=0; while [ $n -lt 20000 ]; do n=$((n+1)); done; sleep 0.1; ls / >/dev/null",
                &[],
            ),
        ],
    },
    Linux {
        name: "compat",
        cpus: &[1, 2],
        word: "",
        files: &["linux-compat-32", "linux-compat-64"],
        steps: &[
            (
                "64-bit programs",
                "/mnt/linux-compat-64",
                &["64-bit code: all well", "old calls: all well"],
            ),
            (
                "three 32-bit programs at once",
                "for n in 1 2 3; do /mnt/linux-compat-32 >/tmp/$n & all=\"$all $!\"; done
                for one in $all; do wait $one; done; cat /tmp/1 /tmp/2 /tmp/3
                [ $(cat /tmp/1 /tmp/2 /tmp/3 | grep -c '32-bit code: all well') = 3 ]",
                &[],
            ),
        ],
    },
    Linux {
        name: "compat-refused",
        cpus: &[1],
        word: "ia32_emulation=off",
        files: &["linux-compat-32", "linux-compat-64"],
        steps: &[
            ("32-bit programs are refused", "! /mnt/linux-compat-32", &[]),
            ("64-bit programs", "/mnt/linux-compat-64", &["64-bit code: all well"]),
        ],
    },
];

/// Line that a script prints before a step; with [`END`], after the last one.
const STEP: &str = "step: ";
const END: &str = "all steps";

impl Linux {
    fn script(&self) -> String {
        let step = |(name, commands, _): &Step| format!("echo '{STEP}{name}'\n{commands}\n");
        self.steps.iter().map(step).collect::<String>() + "echo '" + STEP + END + "'\n"
    }

    /// Places of the files on this host.
    fn files(&self, rig: &Rig) -> Result<Vec<PathBuf>> {
        let place = |name: &&str| match *name {
            "dummy.ko" => rig.dummy(),
            name => Ok(artifacts().join(name)),
        };
        self.files.iter().map(place).collect()
    }

    /// Checks what the guest has printed.
    fn check(&self, printed: &str) -> Result<()> {
        let mut parts = printed.split(STEP).skip(1);
        for (name, _, texts) in self.steps {
            let part = parts.next().filter(|part| part.starts_with(name));
            let part = part.with_context(|| format!("step `{name}` did not begin"))?;
            if let Some(missing) = texts.iter().find(|text| !part.contains(**text)) {
                bail!("step `{name}`: `{missing}` did not appear");
            }
        }
        let wrong = WRONG.iter().find(|wrong| printed.contains(**wrong));
        ensure!(wrong.is_none(), "`{wrong:?}` appeared");
        ensure!(parts.next().is_some_and(|part| part.starts_with(END)), "the last step failed");
        Ok(())
    }

    /// Runs it in processes of this host.
    pub fn in_processes(&self) -> Result<()> {
        let rig = Rig::new()?;
        let files = self.files(&rig)?;
        let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
        for cpus in self.cpus {
            let mut run = rig.script_with(super::LIMIT, self.word, &self.script(), &files)?;
            let ended = end(run.args(["-c", &cpus.to_string()]), "")?;
            let printed = format!("{}\n{}", ended.console, ended.messages);
            self.check(&printed).with_context(|| format!("{cpus} CPUs:\n{printed}"))?;
            ended.well(0, &[])?;
        }
        Ok(())
    }
}
