//! The tables of SPECIFICATION.md, generated from `bench/promises.toml` and the last line of each
//! series in `bench/results`. The text around the tables is written by hand.

use crate::process::workspace;
use crate::rules::compare_or_write;
use crate::source;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::fmt::Write;
use std::path::Path;
use toml::Table;

const PATH: &str = "SPECIFICATION.md";
const PROMISES: &str = "bench/promises.toml";
const TABLES: [&str; 7] = ["native", "arm64", "vtlb", "previrt", "hosted", "tools", "pods"];

/// Compares the tables in SPECIFICATION.md with their sources, or writes them with `--write`.
pub fn specification(arguments: &[String]) -> Result<()> {
    let promises: Table = source::read(&workspace().join(PROMISES))?
        .parse()
        .with_context(|| format!("{PROMISES} is no TOML"))?;
    let mut text = source::read(&workspace().join(PATH))?;
    for name in TABLES {
        let table = promises.get(name).and_then(toml::Value::as_table);
        let table = table.with_context(|| format!("{PROMISES} has no table `{name}`"))?;
        let series = string(table, "series").context("a table without `series`")?;
        let last = last_line(&workspace().join("bench/results").join(series))?;
        text = replace(&text, name, &render(name, table, last.as_ref())?)?;
    }
    compare_or_write("spec", Path::new(PATH), &text, arguments)
}

/// The last measurement of a series; `None`: nothing was measured yet.
fn last_line(path: &Path) -> Result<Option<Value>> {
    if !path.exists() {
        return Ok(None);
    }
    let text = source::read(path)?;
    let line = text.lines().last().map(serde_json::from_str).transpose();
    line.with_context(|| format!("{} has a line that is no JSON", path.display()))
}

/// Replaces the text between the two marks of a table.
fn replace(text: &str, name: &str, table: &str) -> Result<String> {
    let (begin, end) = (format!("<!-- table {name} -->\n"), "<!-- end -->");
    let parts = text.split_once(&begin).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(end)?;
        Some((before, after))
    });
    let (before, after) = parts.with_context(|| format!("{PATH} has no marks of table {name}"))?;
    Ok(format!("{before}{begin}\n{table}\n{end}{after}"))
}

/// A table and the list of its operations.
fn render(name: &str, table: &Table, last: Option<&Value>) -> Result<String> {
    let promises = table.get("promise").and_then(toml::Value::as_array).context("no promises")?;
    let command = string(table, "command").context("a table without `command`")?;
    let mut rows =
        String::from("| id | limit | measured | peer | command |\n|---|---|---|---|---|\n");
    let mut operations = String::new();
    for promise in promises.iter().filter_map(toml::Value::as_table) {
        let id = string(promise, "id").context("a promise without `id`")?;
        let unit = string(promise, "unit").or_else(|| string(table, "unit")).unwrap_or_default();
        let figure = last.and_then(|last| last.get("figures")?.get(id));
        let row = Row { unit, hosted: name == "hosted", promise, figure };
        writeln!(
            rows,
            "| `{id}` | {} | {} | {} | `{command}` |",
            row.limit()?,
            row.measured(),
            row.peer()
        )?;
        let what = string(promise, "what").with_context(|| format!("{id} without `what`"))?;
        writeln!(operations, "- `{id}`: {what}")?;
    }
    let origin = match last {
        Some(last) => format!(
            "Measured at commit {} with QEMU {}.",
            last["commit"].as_str().unwrap_or("unknown"),
            last["qemu"].as_str().unwrap_or("unknown")
        ),
        None => "Not measured since the series began.".to_owned(),
    };
    Ok(format!("{rows}\n{origin}\n\n{operations}"))
}

/// One promise and its measurement.
struct Row<'a> {
    unit: &'a str,
    hosted: bool,
    promise: &'a Table,
    figure: Option<&'a Value>,
}

impl Row<'_> {
    fn limit(&self) -> Result<String> {
        let limit = self.promise.get("limit").context("a promise without `limit`")?;
        let number = limit.as_float().or_else(|| limit.as_integer().map(|number| number as f64));
        let is_least = self.promise.get("at_least").and_then(toml::Value::as_bool) == Some(true);
        match number {
            Some(number) if is_least => Ok(format!("≥ {}", with_unit(number, self.unit))),
            Some(number) => Ok(format!("≤ {}", with_unit(number, self.unit))),
            None if limit.as_str() == Some("peer") => Ok("below the peer".to_owned()),
            None => bail!("a limit is neither a number nor `peer`"),
        }
    }

    fn number(&self, key: &str) -> Option<f64> {
        self.figure?.get(key)?.as_f64()
    }

    fn measured(&self) -> String {
        let value = match self.hosted {
            true => self.number("ratio").or_else(|| self.number("parador")),
            false => self.number("value"),
        };
        let Some(value) = value else { return "–".to_owned() };
        let mut text = with_unit(value, self.unit);
        if let Some(switches) =
            self.number("world_switches").filter(|_| self.unit == "instructions")
        {
            let plural = if switches == 1.0 { "" } else { "es" };
            text += &format!(" ({} world switch{plural})", short(switches));
        }
        if let (true, Some(spread)) = (self.hosted, self.number("spread")) {
            text += &format!(" ± {:.0} %", spread * 50.0);
        }
        text
    }

    /// The peer's figure with its name; those of hosted VMs are relative to the host.
    fn peer(&self) -> String {
        if self.hosted {
            let native = self.number("native");
            let relative = |key: &str, name: &str| {
                let value = self.number(key)? / native.unwrap_or(1.0);
                let unit = if native.is_some() { "x" } else { self.unit };
                Some(format!("{name} {}", with_unit(value, unit)))
            };
            let peers = [relative("tcg", "TCG"), relative("uml", "UML")];
            let peers: Vec<String> = peers.into_iter().flatten().collect();
            return if peers.is_empty() { "–".to_owned() } else { peers.join(", ") };
        }
        match (string(self.promise, "peer"), self.number("peer")) {
            (Some(name), Some(value)) => format!("{name} {}", with_unit(value, self.unit)),
            _ => "–".to_owned(),
        }
    }
}

fn string<'a>(table: &'a Table, key: &str) -> Option<&'a str> {
    table.get(key)?.as_str()
}

/// A value in its unit; the tables leave out `instructions`.
fn with_unit(value: f64, unit: &str) -> String {
    match unit {
        "bytes" if value >= 1_048_576.0 => format!("{} MiB", short(value / 1_048_576.0)),
        "bytes" => format!("{} KiB", short(value / 1024.0)),
        "share" => format!("{} %", short(value * 100.0)),
        "x" => format!("{}x", short(value)),
        "instructions" => short(value),
        unit => format!("{} {unit}", short(value)),
    }
}

/// Three or four significant digits; thousands are separated.
fn short(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 100.0 || value.fract() == 0.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 0.1 => 3,
        _ => 4,
    };
    let text = format!("{value:.digits$}");
    let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
    let mut grouped = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    let fraction = fraction.trim_end_matches('0');
    if fraction.is_empty() { grouped } else { format!("{grouped}.{fraction}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "series = \"s\"\ncommand = \"make bench\"\nunit = \"instructions\"\n\
        [[promise]]\nid = \"a\"\nwhat = \"first\"\nlimit = 1500\npeer = \"KVM\"\n\
        [[promise]]\nid = \"b\"\nwhat = \"second\"\nlimit = \"peer\"\nunit = \"bytes\"\n";

    #[test]
    fn a_table() {
        let table: Table = TEXT.parse().unwrap();
        let last = r#"{"commit":"abc","qemu":"7.2","figures":{"a":{"value":1234.6,"world_switches":1.0,"peer":2864.0}}}"#;
        let last: Value = serde_json::from_str(last).unwrap();
        let text = render("native", &table, Some(&last)).unwrap();
        assert!(
            text.contains("| `a` | ≤ 1,500 | 1,235 (1 world switch) | KVM 2,864 | `make bench` |"),
            "{text}"
        );
        assert!(text.contains("| `b` | below the peer | – | – |"), "{text}");
        assert!(text.contains("commit abc with QEMU 7.2") && text.contains("- `b`: second"));
        assert!(render("native", &table, None).unwrap().contains("Not measured"));
    }

    #[test]
    fn relative_to_the_host() {
        let table: Table =
            "series = \"s\"\ncommand = \"c\"\nunit = \"x\"\n[[promise]]\nid = \"web\"\n\
             what = \"w\"\nlimit = 0.6\nat_least = true\n"
                .parse()
                .unwrap();
        let last: Value = serde_json::from_str(
            r#"{"figures":{"web":{"ratio":0.978,"native":200.0,"parador":195.0,"tcg":4.0,"uml":null,"spread":0.1}}}"#,
        )
        .unwrap();
        let text = render("hosted", &table, Some(&last)).unwrap();
        assert!(text.contains("| `web` | ≥ 0.6x | 0.978x ± 5 % | TCG 0.02x |"), "{text}");
    }

    #[test]
    fn marks() {
        let text = "head\n<!-- table x -->\nold\n<!-- end -->\ntail\n";
        let new = replace(text, "x", "new").unwrap();
        assert_eq!(new, "head\n<!-- table x -->\n\nnew\n<!-- end -->\ntail\n");
        assert!(replace(text, "y", "new").is_err());
    }

    #[test]
    fn numbers() {
        let texts = [54.0, 1234567.0, 1.007, 0.000075, 47.8, 5.92].map(short);
        assert_eq!(texts, ["54", "1,234,567", "1.007", "0.0001", "47.8", "5.92"]);
        assert_eq!(with_unit(163_840.0, "bytes"), "160 KiB");
        assert_eq!(with_unit(0.000075, "share"), "0.0075 %");
    }
}
