//! `cargo xtask bench arm64`: exits and interrupts of a guest on the kernel for AArch64, in
//! executed instructions of an emulated Cortex-A76 with GICv3. The counter has 62.5 MHz, so every
//! figure is a mean over many operations.

mod linux;

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
/// Two VMs on one CPU that exchange messages.
const CHANNEL_SYSTEM: &str = "[system]\nboard = \"qemu-virt\"\nlog = \"com2\"\nshare_cpus = true\n\n\
    [[vm]]\nname = \"first\"\nmemory = \"16M\"\nkernel = \"micro:channel-cost\"\nconsole = \"com1\"\n\n\
    [[vm]]\nname = \"second\"\nmemory = \"16M\"\nkernel = \"micro:channel-cost\"\n\n\
    [[channel]]\nbetween = [\"first\", \"second\"]\nkind = \"shmem\"\nsize = \"64K\"\n";
/// A guest that touches its memory, and its VMM in one program.
const STAGE2_SYSTEM: &str = "[system]\nboard = \"qemu-virt\"\nlog = \"com2\"\n\n[[task]]\n\
    name = \"stage2\"\nbinary = \"check-stage2\"\nessential = true\n";
/// Key, which is the name in the guest's output, title, peer.
const ROWS: [(&str, &str, f64); 6] = [
    ("arm_hypercall", "hypercall settled in the kernel", peers::ARM_HYPERCALL),
    ("arm_mmio_exit", "MMIO answered by the user-level VMM", peers::ARM_MMIO),
    ("arm_self_sgi", "SGI to itself, sent, taken and ended", peers::ARM_SELF_SGI),
    ("arm_ipi", "SGI to a vCPU in WFI on the same CPU", peers::ARM_IPI),
    ("arm_vtimer", "virtual timer, from deadline to guest, busy", peers::ARM_TIMER),
    ("arm_vtimer_wfi", "the same, guest in WFI", peers::ARM_TIMER_WFI),
];
/// The same of two VMs with a channel.
const CHANNELS: [(&str, &str, f64); 3] = [
    ("arm_message_noswitch", "message to a guest that is ready, notified", peers::VARANASI_MESSAGE),
    (
        "arm_message_switch",
        "message, from one guest to the other's handler",
        peers::VARANASI_MESSAGE_SWITCH,
    ),
    (
        "arm_world_switch",
        "from one guest's WFI to the next instruction of another",
        peers::VARANASI_WORLD_SWITCH,
    ),
];
/// The same of a guest's memory.
const STAGE2: [(&str, &str, f64); 2] = [
    ("arm_stage2_demand", "first access to a page, mapped at its fault", peers::ARM_PAGE),
    ("arm_stage2_eager", "the same, mapped before", peers::ARM_PAGE_BEFORE),
];

/// Runs a system and returns its figures: key, which is the name in the output, title, peer.
fn rows(what: &str, system: &str, rows: &[(&str, &str, f64)]) -> Result<Vec<Figure>> {
    let outputs = repeat(what, || runs::system(system))?;
    rows.iter()
        .map(|&(key, title, peer)| {
            let figure = instructions(key, title, key, &outputs)?;
            Ok(Figure { peer: Some(peer), ..figure })
        })
        .collect()
}

/// Measures, prints and stores the figures.
pub fn measure() -> Result<()> {
    std::fs::create_dir_all(guest::folder()).context("cannot make a folder for the bench")?;
    let mut figures = rows("micro-guest on AArch64", SYSTEM, &ROWS)?;
    let shared = format!("{SYSTEM}{SHARED}");
    let outputs = repeat("the same beside a program", || runs::system(&shared))?;
    let title = "the same in WFI, another thread has the CPU";
    let figure = instructions("arm_vtimer_shared", title, "arm_vtimer_wfi", &outputs)?;
    figures.push(Figure { peer: Some(peers::ARM_TIMER_WFI), ..figure });
    figures.extend(rows("two guests with a channel on AArch64", CHANNEL_SYSTEM, &CHANNELS)?);
    figures.extend(rows("memory of a guest on AArch64", STAGE2_SYSTEM, &STAGE2)?);
    let outputs = repeat("gate call on AArch64", || runs::system(GATE_SYSTEM))?;
    let title = "gate call and reply, two tasks on one CPU";
    figures.push(instructions("arm_gate_call_reply", title, "gate_call_reply", &outputs)?);
    figures.push(linux::score()?);
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
