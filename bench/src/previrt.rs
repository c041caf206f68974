//! What it costs a kernel to be pre-virtualized, on the bare emulated machine: the same kernel without pads is what it is
//! compared with. What programs pay in processes of this host follows ([`hosted`]).

use crate::peers::GUEST;
use crate::report::{self, Figure};
use crate::runs::{self, Output};
use crate::{chart, first, guest, hosted, ratios, repeat, spread};
use anyhow::{Context, Result, bail};
use parador_tests::system::parador;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Exit code of `parador` for a command that it does not have.
const USAGE: i32 = 64;

/// Measures, prints, and keeps the figures.
pub fn measure() -> Result<()> {
    std::fs::create_dir_all(guest::folder()).context("cannot make a folder for the bench")?;
    let ram_disk = guest::ram_disk()?;
    let padded_kernel = kernel(&[])?;
    let plain_kernel = kernel(&["--plain"])?;
    let null_kernel = null(&padded_kernel)?;
    let run = |what: &str, kernel: &Path| repeat(what, || runs::bare(kernel, &ram_disk));
    let plain = run("Linux without pads", &plain_kernel)?;
    let padded = run("Linux with pads", &padded_kernel)?;
    let null = match &null_kernel {
        Some(kernel) => Some(run("Linux with every site in a stub", kernel)?),
        None => {
            println!("this `parador` has no `afterburn null`: that row is left out");
            None
        }
    };

    let mut figures = verified(&padded_kernel)?;
    figures.push(build_share(&padded_kernel)?);
    figures.push(overhead(
        "raw_overhead",
        "pads on a raw machine, geometric mean",
        &plain,
        &padded,
        1.005,
    )?);
    if let Some(null) = &null {
        let title = "every site in a stub, geometric mean";
        figures.push(overhead("null_wedge_overhead", title, &plain, null, 1.02)?);
    }
    figures.extend(hosted::figures(&padded_kernel)?);
    print_rows(&plain, &padded, null.as_deref())?;
    report::print(&figures);
    report::write_json("bench-previrt.json", &figures)?;
    draw(&plain, &padded, null.as_deref())?;
    if figures.iter().any(|figure| !figure.holds()) {
        bail!("a figure misses its limit");
    }
    Ok(())
}

/// The kernel of `parador kernel build`.
pub fn kernel(options: &[&str]) -> Result<PathBuf> {
    println!("building Linux {}", options.join(" "));
    let output = parador(&guest::folder())
        .args(["kernel", "build"])
        .args(options)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start parador")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let path = text.split_whitespace().nth(1).filter(|_| output.status.success());
    path.map(PathBuf::from).context("parador cannot build Linux")
}

/// The kernel with every site in a stub, if `parador` can make one.
fn null(kernel: &Path) -> Result<Option<PathBuf>> {
    let path = guest::folder().join("vmlinux-null");
    let output = parador(&guest::folder())
        .args(["afterburn", "null"])
        .arg(kernel)
        .arg("-o")
        .arg(&path)
        .stdin(Stdio::null())
        .output()
        .context("cannot start parador")?;
    match output.status.code() {
        Some(0) => Ok(Some(path)),
        Some(USAGE) => Ok(None),
        _ => bail!("`afterburn null` failed:\n{}", String::from_utf8_lossy(&output.stderr)),
    }
}

/// What `parador afterburn verify` finds.
fn verified(kernel: &Path) -> Result<Vec<Figure>> {
    let output = parador(&guest::folder())
        .args(["afterburn", "verify", "--json"])
        .arg(kernel)
        .stdin(Stdio::null())
        .output()
        .context("cannot start parador")?;
    let report: Value = serde_json::from_slice(&output.stdout).with_context(|| {
        format!("`afterburn verify` failed:\n{}", String::from_utf8_lossy(&output.stderr))
    })?;
    let (missed, overlaps, growth) = counts(&report).context("that report is not understood")?;
    let figure = |key, title, value, unit, limit| Figure {
        key,
        title,
        value,
        unit,
        world_switches: None,
        peer: None,
        limit,
        spread: 0.0,
    };
    Ok(vec![
        figure("sites_missed", "sensitive instructions that are no site", missed, "sites", 0.0),
        figure("pads_overlapping", "pads where Linux rewrites itself", overlaps, "sites", 0.0),
        figure("text_growth", "pads beside code", growth, "per cent", 1.0),
    ])
}

/// What the afterburner took of the CPU time of building the kernel, as noted then.
fn build_share(kernel: &Path) -> Result<Figure> {
    let path = kernel.with_file_name("cost.json");
    let text = std::fs::read(&path).with_context(|| {
        format!("cannot read {}; remove the folder to build the kernel anew", path.display())
    })?;
    let cost: Value = serde_json::from_slice(&text)?;
    let seconds = |name: &str| cost.get(name).and_then(Value::as_f64);
    let share = seconds("afterburner_cpu_seconds").zip(seconds("cpu_seconds"));
    let (part, whole) = share.with_context(|| format!("{} is not understood", path.display()))?;
    Ok(Figure {
        key: "build_cpu_share",
        title: "afterburner in a kernel's build",
        value: part / whole * 100.0,
        unit: "per cent",
        world_switches: None,
        peer: None,
        limit: 5.0,
        spread: 0.0,
    })
}

/// Sensitive instructions that were missed or recorded wrongly, overlaps, and growth in per cent.
fn counts(report: &Value) -> Option<(f64, f64, f64)> {
    let length = |name: &str| Some(report.get(name)?.as_array()?.len() as f64);
    let growth = report.get("text")?.get("growth_percent")?.as_f64()?;
    Some((length("missed")? + length("wrong")?, length("overlaps")?, growth))
}

fn overhead(
    key: &'static str,
    title: &'static str,
    plain: &[Output],
    other: &[Output],
    limit: f64,
) -> Result<Figure> {
    let (value, _) = ratios(plain, first(other)?)?;
    let mut largest: f64 = 0.0;
    for row in GUEST {
        largest = largest.max(spread(plain, row.name)?).max(spread(other, row.name)?);
    }
    Ok(Figure {
        key,
        title,
        value,
        unit: "ratio to plain",
        world_switches: None,
        peer: None,
        limit,
        spread: largest,
    })
}

fn print_rows(plain: &[Output], padded: &[Output], null: Option<&[Output]>) -> Result<()> {
    println!(
        "\n{:<38} {:>10} {:>10} {:>10}",
        "instructions per operation", "plain", "padded", "null"
    );
    for row in GUEST {
        let value = |outputs: &[Output]| first(outputs)?.value(row.name);
        let null = null.map(value).transpose()?;
        println!(
            "{:<38} {:>10} {:>10} {:>10}",
            row.title,
            report::short(value(plain)?),
            report::short(value(padded)?),
            null.map_or("-".into(), report::short),
        );
    }
    Ok(())
}

fn draw(plain: &[Output], padded: &[Output], null: Option<&[Output]>) -> Result<()> {
    let mut groups = Vec::new();
    for row in GUEST {
        let native = first(plain)?.value(row.name)?;
        let ratio = |outputs: &[Output]| {
            Ok::<f64, anyhow::Error>(first(outputs)?.value(row.name)? / native)
        };
        let null: Option<f64> = null.map(ratio).transpose()?;
        groups.push(chart::Group {
            title: row.title.to_owned(),
            values: vec![Some(ratio(padded)?), null],
        });
    }
    let text = chart::ratios(
        "Instructions per operation of a pre-virtualized Linux on a raw machine, relative to a plain one",
        &["with pads", "every site in a stub"],
        &groups,
        chart::NEAR,
    )?;
    chart::draw("previrt.svg", &text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_report() {
        let text = r#"{"missed":[{}],"wrong":[{}],"overlaps":[],"text":{"growth_percent":0.7}}"#;
        assert_eq!(counts(&serde_json::from_str(text).unwrap()), Some((2.0, 0.0, 0.7)));
        assert_eq!(counts(&serde_json::from_str("{}").unwrap()), None);
    }
}
