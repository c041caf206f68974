//! What programs pay in a pre-virtualized guest that runs in processes of this host: times, beside those of the same program on the host
//! itself and in QEMU, which translates (TCG).
//!
//! Hosts are noisy: the three take turns, and each figure is the median of all rounds. For computing it is the best one, because
//! whatever disturbs it only adds, and a ratio near 1 is to be told from 1.

use anyhow::{Context, Result};
use parador_tests::system::parador;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::chart;
use crate::guest::Tree;
use crate::report::{Figure, short};

/// Turns of each.
const ROUNDS: usize = 5;
/// The program and its RAM disk's first one.
const PROGRAM: &str = "hostbench";
/// How long a machine may take, in seconds.
const LIMIT: u32 = 180;

/// Where the program runs.
const PLACES: [&str; 3] = ["native", "hosted", "tcg"];
const NATIVE: usize = 0;
const HOSTED: usize = 1;
const TCG: usize = 2;

struct Row {
    name: &'static str,
    title: &'static str,
    /// Keys by [`PLACES`].
    keys: [&'static str; 3],
}

const ROWS: [Row; 4] = [
    Row {
        name: "null_syscall",
        title: "null system call",
        keys: ["native_null_syscall_us", "hosted_null_syscall_us", "tcg_null_syscall_us"],
    },
    Row {
        name: "fork",
        title: "fork, exit, wait",
        keys: ["native_fork_us", "hosted_fork_us", "tcg_fork_us"],
    },
    Row {
        name: "pipe",
        title: "pipe round trip",
        keys: ["native_pipe_us", "hosted_pipe_us", "tcg_pipe_us"],
    },
    Row {
        name: "touch",
        title: "touch of a fresh page",
        keys: ["native_touch_us", "hosted_touch_us", "tcg_touch_us"],
    },
];
const COMPUTE: &str = "compute";
/// The most that computing may take longer than on the host.
const COMPUTE_LIMIT: f64 = 1.02;

/// Times in microseconds by row: one for each round, of which each is a median already, and the best of all.
#[derive(Default)]
struct Times {
    medians: BTreeMap<String, Vec<f64>>,
    best: BTreeMap<String, f64>,
}

impl Times {
    fn read(&mut self, output: &str) {
        for line in output.lines() {
            // The kernel's own lines may come between.
            let Some((_, rest)) = line.split_once("HB ") else { continue };
            let mut words = rest.split_whitespace();
            let (Some(name), Some(median), Some(best)) = (words.next(), words.next(), words.next())
            else {
                continue;
            };
            let (Ok(median), Ok(best)) = (median.parse::<f64>(), best.parse::<f64>()) else {
                continue;
            };
            self.medians.entry(name.to_owned()).or_default().push(median);
            let known = self.best.entry(name.to_owned()).or_insert(f64::MAX);
            *known = known.min(best);
        }
    }

    /// Median, and how far the rounds are apart, relative to it.
    fn figure(&self, name: &str) -> Result<(f64, f64)> {
        let rounds = self.medians.get(name).filter(|rounds| rounds.len() == ROUNDS);
        let mut sorted = rounds.with_context(|| format!("no times for {name}"))?.clone();
        sorted.sort_by(f64::total_cmp);
        let median = sorted[ROUNDS / 2];
        Ok((median, (sorted[ROUNDS - 1] - sorted[0]) / median))
    }
}

/// Measures `kernel` in processes of this host; gives the figures.
pub fn measure(kernel: &Path) -> Result<Vec<Figure>> {
    let tree = Tree::new("host", &["sh", "mount", "poweroff"])?;
    tree.program(PROGRAM)?;
    tree.init("host-init")?;
    let disk = tree.pack()?;
    let program = tree.path(PROGRAM);
    let mut times: [Times; 3] = Default::default();
    for round in 1..=ROUNDS {
        println!("times of programs on this host: round {round} of {ROUNDS}");
        times[NATIVE].read(&output(&mut Command::new(&program))?);
        let mut run = parador(&crate::guest::folder());
        run.arg("run").arg(kernel).arg("-i").arg(&disk);
        run.args(["-p", "quiet", "--timeout", &format!("{LIMIT}s")]);
        times[HOSTED].read(&output(&mut run)?);
        let mut qemu = Command::new("timeout");
        qemu.arg(LIMIT.to_string()).arg("qemu-system-x86_64");
        qemu.args(["-M", "q35", "-accel", "tcg", "-cpu", "max", "-m", "1024", "-smp", "1"]);
        qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio"]);
        qemu.arg("-no-reboot").arg("-kernel").arg(kernel).arg("-initrd").arg(&disk);
        qemu.args([
            "-append",
            "console=ttyS0 panic=-1 mitigations=off transparent_hugepage=always quiet",
        ]);
        times[TCG].read(&output(&mut qemu)?);
    }
    let mut figures = Vec::new();
    let mut groups = Vec::new();
    println!("\n{:<24} {:>10} {:>10} {:>10}  microseconds", "program", "native", "hosted", "tcg");
    for row in ROWS {
        let values = [
            times[NATIVE].figure(row.name)?,
            times[HOSTED].figure(row.name)?,
            times[TCG].figure(row.name)?,
        ];
        let [native, hosted, tcg] = values.map(|(value, _)| short(value));
        println!("{:<24} {native:>10} {hosted:>10} {tcg:>10}", row.title);
        groups.push(group(row.title, values.map(|(value, _)| value)));
        for (place, (value, spread)) in values.into_iter().enumerate() {
            figures.push(Figure {
                key: row.keys[place],
                title: titles(row.title, place),
                value,
                unit: "us",
                world_switches: None,
                peer: (place == HOSTED).then_some(values[TCG].0),
                // The published neighbour is what has to be beaten.
                limit: if place == HOSTED { values[TCG].0 } else { f64::INFINITY },
                spread,
            });
        }
    }
    let best = |place: usize| {
        times[place].best.get(COMPUTE).copied().with_context(|| format!("no {COMPUTE}"))
    };
    let native = best(NATIVE)?;
    groups.push(group("computing", [native, best(HOSTED)?, best(TCG)?]));
    let title =
        "Time of programs in processes of this host and in QEMU (TCG), relative to the host's own";
    chart::draw("hosted.svg", &chart::ratios(title, &["hosted", "TCG"], &groups)?)?;
    for (place, key, limit) in [
        (NATIVE, "native_compute_ratio", f64::INFINITY),
        (HOSTED, "hosted_compute_ratio", COMPUTE_LIMIT),
        (TCG, "tcg_compute_ratio", f64::INFINITY),
    ] {
        figures.push(Figure {
            key,
            title: titles("computing", place),
            value: best(place)? / native,
            unit: "ratio to native",
            world_switches: None,
            peer: (place == HOSTED).then_some(best(TCG)? / native),
            limit,
            spread: times[place].figure(COMPUTE)?.1,
        });
    }
    Ok(figures)
}

fn group(title: &str, [native, hosted, tcg]: [f64; 3]) -> chart::Group {
    chart::Group {
        title: title.to_owned(),
        values: vec![Some(hosted / native), Some(tcg / native)],
    }
}

/// Titles live as long as the program, which has few.
fn titles(what: &str, place: usize) -> &'static str {
    format!("{what}, {}", PLACES[place]).leak()
}

fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {command:?}"))?;
    anyhow::ensure!(
        output.status.success(),
        "{command:?} failed ({}):\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_program_prints() {
        let mut times = Times::default();
        for median in [3.0, 1.0, 2.0, 5.0, 4.0] {
            times.read(&format!("[ 0.1] noise\nHB fork {median} 0.5 9\nHB broken\n"));
        }
        assert_eq!(times.figure("fork").unwrap(), (3.0, 4.0 / 3.0));
        assert_eq!(times.best["fork"], 0.5);
        assert!(times.figure("pipe").is_err());
    }
}
