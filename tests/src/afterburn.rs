//! The afterburner on a kernel that is not Linux (`guests/previrt`): with pads, and with every site
//! in a stub, it must do what it does without.

use crate::system::{ONE_THREAD, parador, qemu, target, workspace};
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// Time limit of a VM on a busy host, in seconds.
const LIMIT: u32 = 120;
/// The last thing that it prints.
const END: &str = "back from user mode\nsites are whole records 1\noff\n";

/// Builds the kernel with and without pads, checks the pads, makes null images, and compares what
/// all of them print.
pub fn small_kernel() -> Result<()> {
    let folder = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
    let folder = folder.path();
    succeed(parador(folder).args(["afterburn", "tools", "tools"]))?;
    for padded in ["", "1"] {
        let mut make = Command::new("make");
        make.arg("-s").arg("-C").arg(workspace().join("guests/previrt"));
        make.arg(format!("O={}", folder.display())).arg(format!("PADDED={padded}"));
        succeed(make.env_remove("MAKEFLAGS").env_remove("MAKELEVEL"))?;
    }
    let padded = "previrt-padded.elf";
    succeed(parador(folder).args(["afterburn", "verify", padded]))?;
    succeed(parador(folder).args(["afterburn", "null", padded, "-o", "null.elf"]))?;
    succeed(parador(folder).args(["afterburn", "null", padded, "--count", "-o", "count.elf"]))?;
    let expected = run(&folder.join("previrt.elf"))?;
    ensure!(expected.ends_with(END), "it does not work without pads:\n{expected}");
    for image in [padded, "null.elf", "count.elf"] {
        let printed = run(&folder.join(image))?;
        ensure!(printed == expected, "{image} prints:\n{printed}\ninstead of:\n{expected}");
    }
    Ok(())
}

/// Boots an image on the emulated machine and returns what it prints.
fn run(image: &Path) -> Result<String> {
    let mut machine = qemu(LIMIT, ONE_THREAD);
    machine.args(["-cpu", "max", "-m", "64", "-kernel"]);
    succeed(machine.arg(image).current_dir(target()))
}

fn succeed(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot start {name}"))?;
    let text =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat();
    ensure!(output.status.success(), "{name} ended with {}:\n{text}", output.status);
    Ok(text)
}
