//! `cargo xtask bench`: the cost of Parador in executed instructions on an emulated machine.
//!
//! QEMU counts instructions (`-icount shift=0`: one instruction is one nanosecond of the machine's
//! time), so a figure is the same in every run and on every host. Instructions do not price world
//! switches; their number is printed beside every figure. Every system runs twice, and the spread
//! between the runs is reported.
#![forbid(unsafe_code)]

mod arm64;
mod chart;
mod consolidation;
mod counted;
mod environments;
mod guest;
mod hosted;
mod kvm;
mod ladder;
mod linux;
mod peers;
mod pods;
mod previrt;
mod promises;
mod report;
mod runs;
mod statistics;
mod tools;
mod vtlb;

use anyhow::{Context, Result, bail};
use consolidation::Consolidation;
use parador_tests::system::workspace;
use peers::GUEST;
use report::{Figure, short};
use runs::{Clock, Output};
use serde_json::{Map, Value, json};
use statistics::VmStatistics;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// Number of runs of every system.
const RUNS: usize = 2;

/// VM exits, measured by a micro-guest: key, title, name in its output,
/// peer.
const EXITS: &[(&str, &str, &str, f64)] = &[
    ("hypercall", "hypercall settled in the kernel", "hypercall", peers::KVM_HYPERCALL),
    ("cpuid_exit", "CPUID answered by the user-level VMM", "cpuid", peers::KVM_CPUID),
    ("pio_exit", "port I/O answered by the user-level VMM", "pio", peers::KVM_PORT),
];
/// Accesses without a VM exit, measured by the same micro-guest.
const NO_EXITS: &[(&str, &str, &str, f64)] = &[
    ("cr8_read", "read of the task priority (CR8)", "cr8_read", peers::KVM_CR8),
    ("cr8_write", "write of the task priority, nothing pending", "cr8_write", peers::KVM_CR8),
];

const EXITS_SYSTEM: &str = "[system]\nboard = \"qemu-q35\"\nlog = \"com2\"\n\n[[vm]]\nname = \"exits\"\n\
    memory = \"16M\"\nkernel = \"{artifacts}/guest-exits\"\nconsole = \"com1\"\n";
/// Channels, measured by two micro-guests, in the same format; the peer's figures are from another
/// architecture.
const CHANNELS: &[(&str, &str, &str, f64)] = &[
    (
        "message_noswitch",
        "message to another guest, which is ready to run",
        "message_noswitch",
        peers::VARANASI_MESSAGE,
    ),
    (
        "message_wake",
        "message to another guest, which has halted",
        "message_wake",
        peers::VARANASI_MESSAGE,
    ),
    (
        "message_switch",
        "message to another guest's handler, by way of HLT",
        "message_switch",
        peers::VARANASI_MESSAGE_SWITCH,
    ),
    (
        "world_switch",
        "from one guest's HLT to the next instruction of another",
        "world_switch",
        peers::VARANASI_WORLD_SWITCH,
    ),
];

const CHANNEL_SYSTEM: &str = "[system]\nboard = \"qemu-q35\"\nlog = \"com2\"\ncpus = 1\nshare_cpus = true\n\n\
    [[vm]]\nname = \"first\"\nmemory = \"16M\"\nkernel = \"{artifacts}/guest-channel-cost\"\n\
    console = \"com1\"\n\n[[vm]]\nname = \"second\"\nmemory = \"16M\"\n\
    kernel = \"{artifacts}/guest-channel-cost\"\n\n[[channel]]\nbetween = [\"first\", \"second\"]\n\
    kind = \"shmem\"\nsize = \"64K\"\n";
const LONGEST_SYSTEM: &str = "[system]\nboard = \"qemu-q35\"\nlog = \"com2\"\n\n[[task]]\n\
    name = \"longest\"\nbinary = \"check-longest\"\nessential = true\n";
const GATE_SYSTEM: &str = "[system]\nboard = \"qemu-q35\"\nlog = \"com2\"\n\n[[task]]\n\
    name = \"gatebench\"\nbinary = \"check-gatebench\"\nessential = true\n";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => measure(),
        ["previrt"] => previrt::measure(),
        ["tools"] => tools::measure(),
        ["pods"] => pods::measure(None),
        ["pods", part] => pods::measure(Some(part)),
        ["arm64"] => arm64::measure(),
        ["vtlb", ref columns @ ..] => vtlb::measure(columns),
        ["hosted"] => hosted_with(|kernel| hosted::measure(kernel, false)),
        ["hosted", "--quick"] => hosted_with(|kernel| hosted::measure(kernel, true)),
        ["ladder"] => hosted_with(hosted::ladder),
        ["ladder", "--counted"] => hosted_with(|kernel| ladder::counted(&kernel)),
        ["ladder", "--quick"] => hosted_with(hosted::small_ladder),
        [part] => measure_part(part),
        _ => Err(anyhow::anyhow!("what is to be measured?")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Result<()> {
    std::fs::create_dir_all(guest::folder()).context("cannot make a folder for the bench")?;
    let ram_disk = guest::ram_disk()?;
    let description = runs::guest_description(&ram_disk, "", Clock::Tsc);
    let kernel = runs::guest_kernel(&description)?;

    let mut figures = micro_figures()?;
    let bare = repeat("Linux on the bare machine", || runs::bare(&kernel, &ram_disk))?;
    let guest = repeat("Linux in a virtual machine", || runs::system(&description))?;
    println!("running Linux in a virtual machine, with kvmclock");
    let kvmclock = runs::system(&runs::guest_description(&ram_disk, "", Clock::Kvm))?;
    println!("running Linux in a virtual machine, boot only");
    let boot = runs::system(&runs::guest_description(&ram_disk, " bench=boot ", Clock::Tsc))?;
    let boot_statistics = VmStatistics::read(&boot.log)?;
    let statistics = VmStatistics::read(&first(&guest)?.log)?.since(&boot_statistics);

    let rows = print_guest(&bare, &guest)?;
    figures.extend(guest_figures(&bare, &guest, &statistics)?);
    let memory_title = "memory taken for one VM beyond guest memory";
    figures.push(Figure {
        peer: Some(peers::KARMA_BYTES),
        ..Figure::new("vmm_bytes", memory_title, statistics.bytes, "bytes")?
    });
    let lines_title = "kernel, lines of Rust and assembly";
    figures.push(Figure::new("kernel_lines", lines_title, size_line("x86-64 kernel: ")?, "lines")?);
    figures.extend(Consolidation::new()?.figures("")?);
    boot_statistics.print("boot");
    statistics.print("the benchmark");
    print_boot(&bare, &guest)?;
    let (mean, worst) = ratios(&bare, &kvmclock)?;
    println!(
        "with kvmclock, which Linux then reads at every switch of processes: geometric mean {mean:.4}, worst row {worst:.4}"
    );
    println!(
        "the VMM's program: {} bytes, mapped from the boot module and shared by all virtual machines",
        statistics.shared
    );
    report::print(&figures);
    report::write_json("bench.json", &figures)?;
    report::append_series(&figures, rows, first(&guest)?.fact("kernel"))?;
    draw(&bare, &guest)?;
    if figures.iter().any(|figure| !figure.holds()) {
        bail!("a figure misses its limit");
    }
    Ok(())
}

/// Measures the micro-guests and the kernel's paths, without Linux.
fn micro_figures() -> Result<Vec<Figure>> {
    let exits = repeat("micro-guest", || runs::system(EXITS_SYSTEM))?;
    let channel = repeat("two guests with a channel", || runs::system(CHANNEL_SYSTEM))?;
    let gate = repeat("gate call", || runs::system(GATE_SYSTEM))?;
    // One VM exit and one entry per operation.
    let mut figures = exit_figures(EXITS, Some(1.0), &exits)?;
    figures.extend(exit_figures(NO_EXITS, Some(0.0), &exits)?);
    figures.extend(exit_figures(CHANNELS, None, &channel)?);
    let gate_title = "gate call + reply, two tasks, one CPU";
    figures.push(instructions("gate_call_reply", gate_title, "gate_call_reply", &gate)?);
    let longest = repeat("hostile program", || runs::measured(LONGEST_SYSTEM))?;
    let longest_title = "longest path with interrupts disabled, hostile program";
    figures.push(instructions("kernel_max", longest_title, "kernel_max", &longest)?);
    Ok(figures)
}

/// Measures hosted VMs with the pre-virtualized kernel.
fn hosted_with(measure: impl FnOnce(PathBuf) -> Result<()>) -> Result<()> {
    std::fs::create_dir_all(guest::folder()).context("cannot make a folder for the bench")?;
    measure(previrt::kernel(&[])?)
}

/// Measures only the micro-guests, or one part of [`Consolidation`], and stores nothing.
fn measure_part(part: &str) -> Result<()> {
    std::fs::create_dir_all(guest::folder()).context("cannot make a folder for the bench")?;
    let figures = match part {
        "micro" => micro_figures()?,
        _ => Consolidation::new()?.figures(part)?,
    };
    if figures.is_empty() {
        bail!("no part `{part}`: micro, ipi, disk, net, many, previrt, hosted, tools");
    }
    report::print(&figures);
    Ok(())
}

fn repeat(what: &str, run: impl Fn() -> Result<Output>) -> Result<Vec<Output>> {
    (1..=RUNS)
        .map(|number| {
            println!("running {number} of {RUNS}: {what}");
            run().with_context(|| what.to_owned())
        })
        .collect()
}

fn first(outputs: &[Output]) -> Result<&Output> {
    outputs.first().context("nothing was run")
}

/// Largest difference between the runs, relative to the first.
fn spread(outputs: &[Output], name: &str) -> Result<f64> {
    let reference = first(outputs)?.value(name)?;
    let mut largest: f64 = 0.0;
    for output in outputs {
        largest = largest.max((output.value(name)? - reference).abs() / reference);
    }
    Ok(largest)
}

/// Returns a figure in instructions that all runs have printed with this name.
fn instructions(key: &str, title: &str, name: &str, runs: &[Output]) -> Result<Figure> {
    let figure = Figure::new(key, title, first(runs)?.value(name)?, "instructions")?;
    Ok(Figure { spread: spread(runs, name)?, ..figure })
}

/// Returns the figures that a guest has printed: key, title, name in its output, peer.
fn exit_figures(
    rows: &[(&'static str, &'static str, &str, f64)],
    world_switches: Option<f64>,
    exits: &[Output],
) -> Result<Vec<Figure>> {
    rows.iter()
        .map(|&(key, title, name, peer)| {
            let peer = Some(peer);
            Ok(Figure { world_switches, peer, ..instructions(key, title, name, exits)? })
        })
        .collect()
}

/// Returns the ratios of the guest benchmark to the bare machine: geometric mean and worst row.
fn ratios(bare: &[Output], guest: &Output) -> Result<(f64, f64)> {
    let mut product = 0.0;
    let mut worst: f64 = 0.0;
    for row in GUEST {
        let ratio = guest.value(row.name)? / first(bare)?.value(row.name)?;
        product += ratio.ln();
        worst = worst.max(ratio);
    }
    Ok(((product / GUEST.len() as f64).exp(), worst))
}

/// Returns the figures of the guest benchmark.
fn guest_figures(
    bare: &[Output],
    guest: &[Output],
    statistics: &VmStatistics,
) -> Result<[Figure; 2]> {
    let (mean, worst) = ratios(bare, first(guest)?)?;
    let mut largest_spread: f64 = 0.0;
    let (mut peer_product, mut peer_worst): (f64, f64) = (0.0, 0.0);
    for row in GUEST {
        peer_product += (row.kvm / row.native).ln();
        peer_worst = peer_worst.max(row.kvm / row.native);
        largest_spread = largest_spread.max(spread(guest, row.name)?).max(spread(bare, row.name)?);
    }
    let count = GUEST.len() as f64;
    let figure = |key, title, value, peer| -> Result<Figure> {
        Ok(Figure {
            world_switches: Some(statistics.entries),
            peer: Some(peer),
            spread: largest_spread,
            ..Figure::new(key, title, value, "ratio to native")?
        })
    };
    let peer_mean = (peer_product / count).exp();
    Ok([
        figure("guest_geomean", "guest benchmark, geometric mean", mean, peer_mean)?,
        figure("guest_worst", "guest benchmark, worst row", worst, peer_worst)?,
    ])
}

/// Prints the guest benchmark row by row and returns it for the series.
fn print_guest(bare: &[Output], guest: &[Output]) -> Result<Value> {
    println!(
        "\n{:<38} {:>10} {:>10} {:>7} {:>8} {:>8} {:>8}",
        "instructions per operation", "native", "guest", "ratio", "KVM", "KVM npt=0", "Xen PV"
    );
    let mut rows = Map::new();
    for row in GUEST {
        let native = first(bare)?.value(row.name)?;
        let value = first(guest)?.value(row.name)?;
        let ratio = |peer: f64| format!("{:.3}", peer / row.native);
        println!(
            "{:<38} {:>10} {:>10} {:>7.3} {:>8} {:>8} {:>8}",
            row.title,
            short(native),
            short(value),
            value / native,
            ratio(row.kvm),
            row.shadow.map_or("-".into(), ratio),
            ratio(row.xen),
        );
        rows.insert(row.name.to_owned(), json!({ "native": native, "guest": value }));
    }
    Ok(Value::Object(rows))
}

fn print_boot(bare: &[Output], guest: &[Output]) -> Result<()> {
    let (native, virtual_) = (first(bare)?.value("boot")?, first(guest)?.value("boot")?);
    println!(
        "\nboot to init: native {:.0} million instructions, guest {:.0} million (ratio {:.3})",
        native / 1e6,
        virtual_ / 1e6,
        virtual_ / native
    );
    Ok(())
}

/// Returns the count in the line of `cargo xtask size` that starts with `start`.
fn size_line(start: &str) -> Result<f64> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["xtask", "size"])
        .current_dir(workspace())
        .output()
        .context("cannot start cargo")?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines()
        .find_map(|line| line.strip_prefix(start)?.split(' ').next()?.parse().ok())
        .with_context(|| format!("cargo xtask size printed no line `{start}`"))
}

fn draw(bare: &[Output], guest: &[Output]) -> Result<()> {
    let mut groups = Vec::new();
    for row in GUEST {
        let ratio = first(guest)?.value(row.name)? / first(bare)?.value(row.name)?;
        groups.push(chart::Group {
            title: row.title.to_owned(),
            values: vec![
                Some(ratio),
                Some(row.kvm / row.native),
                row.shadow.map(|shadow| shadow / row.native),
                Some(row.xen / row.native),
            ],
        });
    }
    let text = chart::ratios(
        "Instructions per operation in a guest, relative to native Linux (less is better)",
        &["Parador", "KVM", "KVM, shadow paging", "Xen PV"],
        &groups,
        chart::NEAR,
    )?;
    chart::draw("guest.svg", &text)
}
