//! Cost of pre-virtualization for a kernel on the bare emulated machine, relative to the same
//! kernel without pads, and to Debian's source without any patch; then times of programs in hosted
//! VMs ([`hosted`]).

use crate::peers::GUEST;
use crate::report::{self, Figure};
use crate::runs::{self, Output};
use crate::{chart, first, guest, hosted, ratios, repeat, spread};
use anyhow::{Context, Result, bail};
use parador_tests::previrt::COPIED;
use parador_tests::system::parador;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Exit code of `parador` for an unknown command.
const USAGE: i32 = 64;

/// Measures, prints and stores the figures.
pub fn measure() -> Result<()> {
    std::fs::create_dir_all(guest::folder()).context("cannot make a folder for the bench")?;
    let ram_disk = guest::ram_disk()?;
    let padded_kernel = kernel(&[])?;
    let plain_kernel = kernel(&["--variant", "plain"])?;
    let untuned_kernel = kernel(&["--variant", "untuned"])?;
    let stock_kernel = kernel(&["--variant", "stock"])?;
    let null_kernel = null(&padded_kernel)?;
    let run = |what: &str, kernel: &Path| repeat(what, || runs::bare(kernel, &ram_disk));
    let plain = run("Linux without pads", &plain_kernel)?;
    let padded = run("Linux with pads", &padded_kernel)?;
    let untuned = run("Linux with pads, without the optional patches", &untuned_kernel)?;
    let stock = run("Linux as in Debian's source", &stock_kernel)?;
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
    )?);
    figures.push(overhead(
        "raw_stock",
        "required patches and pads, to Debian's source",
        &stock,
        &untuned,
    )?);
    if let Some(null) = &null {
        let title = "every site in a stub, geometric mean";
        figures.push(overhead("null_wedge_overhead", title, &plain, null)?);
    }
    figures.extend(hosted::figures(&padded_kernel)?);
    print_rows(&plain, &padded, null.as_deref())?;
    report::print(&figures);
    report::write_json("bench-previrt.json", &figures)?;
    report::append_line("previrt.jsonl", &json!({ "figures": report::series(&figures) }))?;
    draw(&plain, &padded, null.as_deref())?;
    if figures.iter().any(|figure| !figure.holds()) {
        bail!("a figure misses its limit");
    }
    Ok(())
}

/// Returns the kernel of `parador kernel build`.
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

/// Returns the kernel with every site rewritten to a stub, if `parador` can make one.
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

/// Returns the findings of `parador afterburn verify`.
fn verified(kernel: &Path) -> Result<Vec<Figure>> {
    let output = parador(&guest::folder())
        .args(["afterburn", "verify", "--json"])
        .args(COPIED)
        .arg(kernel)
        .stdin(Stdio::null())
        .output()
        .context("cannot start parador")?;
    let report: Value = serde_json::from_slice(&output.stdout).with_context(|| {
        format!("`afterburn verify` failed:\n{}", String::from_utf8_lossy(&output.stderr))
    })?;
    let (missed, overlaps, growth) = counts(&report).context("that report is not understood")?;
    Ok(vec![
        Figure::new("sites_missed", "sensitive instructions without a site", missed, "sites")?,
        Figure::new("pads_overlapping", "sites that overlap Linux's patching", overlaps, "sites")?,
        Figure::new("text_growth", "growth of code by pads", growth, "per cent")?,
    ])
}

/// Returns the afterburner's share of the CPU time of the kernel build, from the build's record.
fn build_share(kernel: &Path) -> Result<Figure> {
    let path = kernel.with_file_name("cost.json");
    let text = std::fs::read(&path).with_context(|| {
        format!("cannot read {}; remove the folder to build the kernel again", path.display())
    })?;
    let cost: Value = serde_json::from_slice(&text)?;
    let seconds = |name: &str| cost.get(name).and_then(Value::as_f64);
    let share = seconds("afterburner_cpu_seconds").zip(seconds("cpu_seconds"));
    let (part, whole) = share.with_context(|| format!("{} is not understood", path.display()))?;
    let title = "afterburner in a kernel's build";
    Figure::new("build_cpu_share", title, part / whole * 100.0, "per cent")
}

/// Returns the number of missed or wrongly recorded sensitive instructions, overlaps, and growth in
/// per cent.
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
) -> Result<Figure> {
    let (value, _) = ratios(plain, first(other)?)?;
    let mut largest: f64 = 0.0;
    for row in GUEST {
        largest = largest.max(spread(plain, row.name)?).max(spread(other, row.name)?);
    }
    Ok(Figure { spread: largest, ..Figure::new(key, title, value, "ratio")? })
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
