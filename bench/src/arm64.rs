//! `cargo xtask bench arm64`: exits and interrupts of a guest on the kernel for AArch64, in
//! executed instructions of an emulated Cortex-A76 with GICv3. The counter has 62.5 MHz, so every
//! figure is a mean over many operations.

use crate::report::{self, Figure};
use crate::{guest, instructions, peers, repeat, runs, size_line};
use anyhow::{Context, Result, bail};
use serde_json::json;

/// Two vCPUs on one CPU, with a guest that measures.
const SYSTEM: &str = "[system]\nboard = \"qemu-virt\"\nlog = \"com2\"\nshare_cpus = true\n\n[[vm]]\n\
    name = \"bench\"\nmemory = \"16M\"\nkernel = \"micro:bench\"\nconsole = \"com1\"\ncpus = 2\n";
/// The same beside a program of lower priority that is always ready.
const SHARED: &str = "\n[[task]]\nname = \"neighbour\"\nbinary = \"check-neighbour\"\nessential = false\n\
    priority = 5\n";
/// Calls through gates.
const GATE_SYSTEM: &str = "[system]\nboard = \"qemu-virt\"\nlog = \"com2\"\n\n[[task]]\n\
    name = \"gatebench\"\nbinary = \"check-gatebench\"\nessential = true\n";
/// Key, which is the name in the guest's output, title, peer.
const ROWS: [(&str, &str, f64); 6] = [
    ("arm_hypercall", "hypercall settled in the kernel", peers::ARM_HYPERCALL),
    ("arm_mmio_exit", "MMIO answered by the user-level VMM", peers::ARM_MMIO),
    ("arm_self_sgi", "SGI to itself, sent, taken and ended", peers::ARM_SELF_SGI),
    ("arm_ipi", "SGI to a vCPU in WFI on the same CPU", peers::ARM_IPI),
    ("arm_vtimer", "virtual timer, from deadline to guest, busy", peers::ARM_TIMER),
    ("arm_vtimer_wfi", "the same, guest in WFI", peers::ARM_TIMER_WFI),
];

/// Measures, prints and stores the figures.
pub fn measure() -> Result<()> {
    std::fs::create_dir_all(guest::folder()).context("cannot make a folder for the bench")?;
    let outputs = repeat("micro-guest on AArch64", || runs::system(SYSTEM))?;
    let mut figures = Vec::new();
    for (key, title, peer) in ROWS {
        let figure = instructions(key, title, key, &outputs)?;
        figures.push(Figure { peer: Some(peer), ..figure });
    }
    let shared = format!("{SYSTEM}{SHARED}");
    let outputs = repeat("the same beside a program", || runs::system(&shared))?;
    let title = "the same in WFI, another thread has the CPU";
    let figure = instructions("arm_vtimer_shared", title, "arm_vtimer_wfi", &outputs)?;
    figures.push(Figure { peer: Some(peers::ARM_TIMER_WFI), ..figure });
    let outputs = repeat("gate call on AArch64", || runs::system(GATE_SYSTEM))?;
    let title = "gate call and reply, two tasks on one CPU";
    figures.push(instructions("arm_gate_call_reply", title, "gate_call_reply", &outputs)?);
    let title = "AArch64 kernel, lines of Rust and assembly";
    let lines = size_line("AArch64 kernel: ")?;
    figures.push(Figure::new("arm_kernel_lines", title, lines, "lines")?);
    report::print(&figures);
    report::write_json("bench-arm64.json", &figures)?;
    report::append_line("native-arm64.jsonl", &json!({ "figures": report::series(&figures) }))?;
    if figures.iter().any(|figure| !figure.holds()) {
        bail!("a figure misses its limit");
    }
    Ok(())
}
