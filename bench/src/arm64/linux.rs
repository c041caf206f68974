//! Debian's Linux as a guest on AArch64, beside the same kernel and RAM disk on the bare machine.

use crate::guest::{folder, source};
use crate::report::Figure;
use crate::runs::{self, ARM64, Bare, COMMAND_LINE_ARM64, MEMORY, NO_SLEEP, Output, system_with};
use abi::bundle::Header;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// Name of the system, and of the program of the benchmark.
const NAME: &str = "arm64-linux";
const PROGRAM: &str = "vbench";
/// Memory in MiB of the second bare machine, whose kernel has its data at other places.
const OTHER_MEMORY: &str = "272";
/// Rows that make up the score if they differ by less than [`NOISE`] between the two bare machines;
/// with another kernel of Debian one or two may not. Switches between processes with little memory,
/// pipes, `fork` alone, `mprotect` and huge pages differ by 0.3 to 4 %: which lines of a cache or
/// of a table two objects share depends on places.
const ROWS: [&str; 9] = [
    "compute",
    "nullsys",
    "forkexec",
    "touch_anon",
    "touch_file",
    "sockxmit_rt",
    "ctx_2p_64k_raw",
    "ctx_8p_64k_raw",
    "ctx_16p_64k_raw",
];
/// Largest difference that the places of data may make in a row.
const NOISE: f64 = 0.003;
/// Least number of rows in a score.
const LEAST_ROWS: u32 = 7;
/// KVM's score with VHE on the same machine.
const KVM: f64 = 1.0011;

/// Measures the score: geometric mean of guest to bare machine.
pub fn score() -> Result<Figure> {
    println!("running Linux as a guest on AArch64, and on two bare machines");
    compile()?;
    let description = format!(
        "[system]\nboard = \"qemu-virt\"\nlog = \"com2\"\nfiles = [\"{PROGRAM}\"]\n\n[[vm]]\n\
         name = \"guest\"\nmemory = \"{MEMORY}M\"\nkernel = \"debian\"\ninitrd = \"busybox\"\n\
         cmdline = \"{COMMAND_LINE_ARM64}\"\nconsole = \"com1\"\n"
    );
    let guest = system_with(NAME, &description, NO_SLEEP, &[])?;
    let (kernel, ram_disk) = (file("guest.kernel")?, file("guest.initrd")?);
    let bare = |memory| {
        let (machine, icount) = (ARM64, NO_SLEEP);
        Bare { machine, memory, kernel: &kernel, ram_disk: &ram_disk, more: "", icount }.run(&[])
    };
    compare(&guest, &bare(MEMORY)?, &bare(OTHER_MEMORY)?)
}

/// Prints the rows and returns the score, with the largest noise of its rows as its spread.
fn compare(guest: &Output, bare: &Output, other: &Output) -> Result<Figure> {
    let (mut sum, mut spread, mut count) = (0.0, 0.0_f64, 0);
    println!(
        "\n{:<18} {:>10} {:>10} {:>8} {:>8}",
        "instructions", "bare", "guest", "ratio", "noise"
    );
    for row in ROWS {
        let (value, native) = (guest.value(row)?, bare.value(row)?);
        let noise = (other.value(row)? / native - 1.0).abs();
        let note = if noise > NOISE { "  left out: the places of data" } else { "" };
        let ratio = value / native;
        println!("{row:<18} {native:>10.1} {value:>10.1} {ratio:>8.4} {noise:>8.4}{note}");
        if noise <= NOISE {
            (sum, spread, count) = (sum + ratio.ln(), spread.max(noise), count + 1);
        }
    }
    if count < LEAST_ROWS {
        bail!("only {count} rows do not depend on the places of data, of at least {LEAST_ROWS}");
    }
    let (title, mean) = ("guest benchmark, geometric mean", (sum / f64::from(count)).exp());
    let figure = Figure::new("arm_guest_geomean", title, mean, "ratio to native")?;
    Ok(Figure { spread, peer: Some(KVM), ..figure })
}

/// Compiles the benchmark for AArch64.
fn compile() -> Result<()> {
    let compiled = Command::new("aarch64-linux-gnu-gcc")
        .args(["-O2", "-static", "-Wall", "-o"])
        .arg(folder().join(PROGRAM))
        .arg(source(&format!("{PROGRAM}.c")))
        .status()
        .context("cannot start aarch64-linux-gnu-gcc; run ./install.sh")?;
    if !compiled.success() {
        bail!("aarch64-linux-gnu-gcc cannot compile {PROGRAM}");
    }
    Ok(())
}

/// Extracts a file of the system's bundle.
fn file(name: &str) -> Result<PathBuf> {
    let bundle = runs::bundle(NAME)?;
    let header = Header::parse(&bundle, bundle.len() as u64)
        .map_err(|error| anyhow::anyhow!("the bundle is damaged: {error:?}"))?;
    let found = header.find(name).with_context(|| format!("the bundle has no {name}"))?;
    let path = folder().join(format!("{NAME}.{name}"));
    fs::write(&path, &bundle[found.offset as usize..][..found.length as usize])
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}
