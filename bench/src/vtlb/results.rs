//! Figures of all systems: printed, stored and drawn.

use super::columns::{KVM, NATIVE, TOP};
use super::rows::{BENCHMARKS, Benchmark, Cost, MICRO};
use super::systems::Measured;
use crate::chart::{self, Group};
use crate::promises;
use crate::report::{self, Figure, rounded, short};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

const INSTRUCTIONS: &str = "instructions";
const SWITCHES: &str = "world switches";
const RATIO: &str = "ratio to native";
/// Suffixes of keys.
const OF_SWITCHES: &str = "_ws";
const OF_PRICED: &str = "_priced";

/// All measurements, the bare machine's first.
pub struct Results {
    measured: Vec<Measured>,
    figures: Vec<Figure>,
}

impl Results {
    /// Computes the figures. `lines` is the number of lines of the vTLB in the kernel.
    pub fn new(measured: Vec<Measured>, lines: f64) -> Result<Self> {
        let mut results = Self { measured, figures: Vec::new() };
        results.ensure_complete()?;
        let mut figures = Vec::new();
        for column in results.measured.iter().filter(|one| one.column.name != NATIVE) {
            for (row, &cost) in &column.costs {
                figures.extend(results.ratios(column, row, cost)?);
            }
            for (row, title) in MICRO {
                if let Some(&cost) = column.micro.get(row) {
                    figures.extend(results.micro(column, row, title, cost));
                }
            }
        }
        if results.column(TOP).is_some() {
            let title = "vTLB in the kernel, lines of Rust";
            figures.push(Figure::new("vtlb_lines", title, lines, "lines")?);
        }
        results.figures = figures;
        Ok(results)
    }

    /// Fails if a program has printed fewer rows than it has to.
    fn ensure_complete(&self) -> Result<()> {
        let native = &self.column(NATIVE).context("the bare machine was not measured")?.costs;
        for benchmark in &BENCHMARKS {
            let rows = benchmark.select(native.keys());
            ensure!(!rows.is_empty(), "the bare machine has no row of {}", benchmark.name);
            for one in self.measured.iter().filter(|one| one.column.has(benchmark.name)) {
                let missing = rows.iter().find(|row| !one.costs.contains_key(**row));
                ensure!(missing.is_none(), "{} has no row {missing:?}", one.column.title);
            }
        }
        let has_micro = |one: &&Measured| one.column.has_micro_guest();
        for one in self.measured.iter().filter(has_micro) {
            let missing = MICRO.iter().find(|(row, _)| !one.micro.contains_key(*row));
            ensure!(missing.is_none(), "{} has no row {missing:?}", one.column.title);
        }
        Ok(())
    }

    fn column(&self, name: &str) -> Option<&Measured> {
        self.measured.iter().find(|one| one.column.name == name)
    }

    fn native(&self, row: &str) -> Result<f64> {
        let cost = self.column(NATIVE).and_then(|native| native.costs.get(row));
        cost.map(|cost| cost.instructions).with_context(|| format!("no native row {row}"))
    }

    /// Figures of a row of `vbench`: instructions and priced instructions relative to native, and
    /// world switches.
    fn ratios(&self, column: &Measured, row: &str, cost: Cost) -> Result<[Figure; 3]> {
        let native = self.native(row)?;
        let key = format!("vtlb_{}_{row}", column.column.name);
        let peer = self.column(KVM).and_then(|kvm| kvm.costs.get(row));
        let figure = |suffix: &str, unit, value: f64, peer: Option<f64>| {
            figure(
                format!("{key}{suffix}"),
                format!("{row}, {}", column.column.title),
                unit,
                value,
                peer,
            )
        };
        Ok([
            Figure {
                world_switches: Some(cost.switches),
                ..figure(
                    "",
                    RATIO,
                    cost.instructions / native,
                    peer.map(|peer| peer.instructions / native),
                )
            },
            figure(OF_SWITCHES, SWITCHES, cost.switches, peer.map(|peer| peer.switches)),
            figure(
                OF_PRICED,
                RATIO,
                cost.priced() / native,
                peer.map(|peer| peer.priced() / native),
            ),
        ])
    }

    /// Figures of a row of the micro-guest. Those of the top rung are named by the row alone.
    fn micro(&self, column: &Measured, row: &str, title: &str, cost: Cost) -> [Figure; 2] {
        let key = match column.column.name {
            TOP => format!("vtlb_{row}"),
            name => format!("vtlb_{name}_{row}"),
        };
        let title = format!("{title}, {}", column.column.title);
        let peer = self.column(KVM).and_then(|kvm| kvm.micro.get(row));
        let switches = key.clone() + OF_SWITCHES;
        [
            Figure {
                world_switches: Some(cost.switches),
                ..figure(
                    key,
                    title.clone(),
                    INSTRUCTIONS,
                    cost.instructions,
                    peer.map(|peer| peer.instructions),
                )
            },
            figure(switches, title, SWITCHES, cost.switches, peer.map(|peer| peer.switches)),
        ]
    }

    /// Returns the figures that have a limit.
    fn limited(&self) -> Vec<Figure> {
        self.figures.iter().filter(|figure| figure.limit.is_finite()).cloned().collect()
    }

    /// Prints every row of every system, statistics of the VMs, and figures with limits.
    pub fn print(&self) {
        self.print_table("instructions per operation", |_, cost| Some(cost.instructions));
        self.print_table("instructions, relative to native", |row, cost| {
            Some(cost.instructions / self.native(row).ok()?)
        });
        self.print_table("the same, with 1,200 for each world switch", |row, cost| {
            Some(cost.priced() / self.native(row).ok()?)
        });
        self.print_table("world switches per operation", |_, cost| Some(cost.switches));
        self.print_micro();
        self.print_events();
        for one in &self.measured {
            if let Some(statistics) = &one.statistics {
                statistics.print(&format!("boot and benchmark, {}", one.column.title));
            }
        }
        report::print(&self.limited());
    }

    fn print_table(&self, title: &str, value: impl Fn(&str, Cost) -> Option<f64>) {
        print!("\n{title}\n{:<18}", "");
        for one in &self.measured {
            print!(" {:>9}", one.column.name);
        }
        println!();
        for row in self.rows() {
            print!("{row:<18}");
            for one in &self.measured {
                let cost = one.costs.get(row).copied();
                let value = cost.and_then(|cost| value(row, cost));
                print!(" {:>9}", value.map_or("-".to_owned(), short));
            }
            println!();
        }
    }

    fn print_micro(&self) {
        println!("\nmicro-guest: instructions (world switches) per operation");
        for one in self.measured.iter().filter(|one| !one.micro.is_empty()) {
            let rows = MICRO.iter().filter_map(|(row, _)| {
                let cost = one.micro.get(*row)?;
                Some(format!("{row} {} ({})", short(cost.instructions), short(cost.switches)))
            });
            println!("{:<30} {}", one.column.title, rows.collect::<Vec<_>>().join(", "));
        }
    }

    /// Prints the events of each vTLB: fills, faults that the guest's tables cause, evictions,
    /// comparisons, ASIDs and others.
    fn print_events(&self) {
        println!("\nevents of the vTLB, boot and benchmarks");
        for one in self.measured.iter().filter(|one| !one.events.is_empty()) {
            let events = one.events.iter().map(|(name, count)| format!("{name} {count}"));
            println!("{:<30} {}", one.column.title, events.collect::<Vec<_>>().join(", "));
        }
        for one in self.measured.iter().filter(|one| !one.events_by_row.is_empty()) {
            print!("\nevents per operation, {}\n{:<18}", one.column.title, "");
            println!(
                "{}",
                one.events.iter().map(|(name, _)| format!(" {name:>13}")).collect::<String>()
            );
            for row in self.rows() {
                let Some(counts) = one.events_by_row.get(row) else { continue };
                let counts = counts.iter().map(|count| format!(" {:>13}", short(*count)));
                println!("{row:<18}{}", counts.collect::<String>());
            }
        }
    }

    /// Returns the names of all rows, benchmark by benchmark.
    fn rows(&self) -> Vec<&String> {
        let native = || self.measured.first().into_iter().flat_map(|native| native.costs.keys());
        BENCHMARKS.iter().flat_map(|benchmark| sorted(benchmark.select(native()))).collect()
    }

    /// Writes `target/bench-vtlb.json`.
    pub fn write(&self) -> Result<()> {
        report::write_json("bench-vtlb.json", &self.figures)
    }

    /// Adds a line to the series, and draws the benchmarks.
    pub fn store(&self) -> Result<()> {
        let native = self.column(NATIVE).context("the bare machine was not measured")?;
        report::append_line(
            "vtlb.jsonl",
            &json!({
                "guest_kernel": native.guest_kernel,
                "figures": report::series(&self.limited()),
                "rows": self.costs_by_row(),
                "statistics": self.statistics(),
            }),
        )?;
        for benchmark in &BENCHMARKS {
            let name = format!("vtlb-{}.svg", benchmark.name);
            chart::draw(&name, &self.drawing(benchmark)?)?;
        }
        Ok(())
    }

    fn drawing(&self, benchmark: &Benchmark) -> Result<String> {
        match benchmark.rows {
            Some(_) => self.draw_rows(benchmark),
            None => self.draw_columns(benchmark),
        }
    }

    /// Returns instructions and world switches by row and system.
    fn costs_by_row(&self) -> Value {
        let of_row = |row: &String| {
            let costs = self.measured.iter().filter_map(|one| {
                let cost = one.costs.get(row)?;
                let numbers = json!([rounded(cost.instructions), rounded(cost.switches)]);
                Some((one.column.name.to_owned(), numbers))
            });
            (row.clone(), Value::Object(costs.collect()))
        };
        Value::Object(self.rows().into_iter().map(of_row).collect())
    }

    /// Returns the statistics of each VM of Parador by system.
    fn statistics(&self) -> Value {
        let of_column = |one: &Measured| {
            let statistics = one.statistics.as_ref()?;
            let counts = statistics.exits.iter().filter(|(_, count)| *count > 0);
            let mut object: Map<String, Value> =
                counts.map(|(name, count)| (name.clone(), json!(count))).collect();
            object.insert("entries".to_owned(), json!(statistics.entries));
            object.insert("settled".to_owned(), json!(statistics.settled));
            let events = one.events.iter().map(|(name, count)| (name.clone(), json!(count)));
            object.insert("vtlb".to_owned(), Value::Object(events.collect()));
            let of_row = |(row, counts): (&String, &Vec<f64>)| {
                let counts = counts.iter().copied().map(rounded).collect::<Vec<_>>();
                (row.clone(), json!(counts))
            };
            let by_row = one.events_by_row.iter().map(of_row);
            object.insert("vtlb_by_row".to_owned(), Value::Object(by_row.collect()));
            Some((one.column.name.to_owned(), Value::Object(object)))
        };
        Value::Object(self.measured.iter().filter_map(of_column).collect())
    }

    /// Draws a benchmark of one row: one group for each system.
    fn draw_columns(&self, benchmark: &Benchmark) -> Result<String> {
        let native = self.native(benchmark.name)?;
        let groups: Vec<Group> = self
            .others()
            .filter_map(|one| {
                let cost = one.costs.get(benchmark.name)?;
                let values = [cost.instructions, cost.priced()].map(|value| Some(value / native));
                Some(Group { title: one.column.title.to_owned(), values: values.to_vec() })
            })
            .collect();
        let legends = ["instructions", "instructions + 1,200 per world switch"];
        let title = format!("{}: instructions relative to native", benchmark.title);
        chart::ratios(&title, &legends, &groups, chart::end(&groups))
    }

    /// Draws a benchmark of several rows, with world switches priced: one group for each row.
    fn draw_rows(&self, benchmark: &Benchmark) -> Result<String> {
        let rows = self.rows();
        let rows = sorted(benchmark.select(rows.into_iter()));
        let has_rows = |one: &&Measured| rows.iter().any(|row| one.costs.contains_key(*row));
        let columns: Vec<&Measured> = self.others().filter(has_rows).collect();
        let mut groups = Vec::new();
        for row in rows {
            let native = self.native(row)?;
            let values =
                columns.iter().map(|one| Some(one.costs.get(row)?.priced() / native)).collect();
            groups.push(Group { title: row.clone(), values });
        }
        let legends: Vec<&str> = columns.iter().map(|one| one.column.title).collect();
        let title =
            format!("{}: instructions + 1,200 per world switch, of native", benchmark.title);
        chart::ratios(&title, &legends, &groups, chart::end(&groups))
    }

    fn others(&self) -> impl Iterator<Item = &Measured> {
        self.measured.iter().filter(|one| one.column.name != NATIVE)
    }

    /// Fails if a figure misses its limit.
    pub fn check(&self) -> Result<()> {
        let missed = self.figures.iter().filter(|figure| !figure.holds()).count();
        if missed > 0 {
            bail!("{missed} figures miss their limits");
        }
        Ok(())
    }
}

/// Returns a figure with the limit that is promised for its key, if any.
fn figure(key: String, title: String, unit: &'static str, value: f64, peer: Option<f64>) -> Figure {
    let limit = promises::limit(&key).unwrap_or(f64::INFINITY);
    Figure { key, title, value, unit, world_switches: None, peer, limit, spread: 0.0 }
}

/// Sorts names of rows by the numbers in them.
fn sorted(mut rows: Vec<&String>) -> Vec<&String> {
    rows.sort_by_key(|row| {
        let text: String = row.chars().filter(|char| !char.is_ascii_digit()).collect();
        let digits = row.split(|char: char| !char.is_ascii_digit());
        let numbers: Vec<u64> = digits.filter_map(|number| number.parse().ok()).collect();
        (text, numbers)
    });
    rows
}

#[cfg(test)]
mod tests {
    use super::super::columns;
    use super::*;
    use std::collections::BTreeMap;

    fn measured(name: &str, factor: f64, switches: f64) -> Measured {
        let column = columns::all().into_iter().find(|column| column.name == name).unwrap();
        let cost = |instructions| Cost { instructions: factor * instructions, switches };
        let row = |benchmark: &Benchmark| match benchmark.rows {
            Some(prefix) => (format!("{prefix}_4"), cost(2000.0)),
            None => (benchmark.name.to_owned(), cost(10_000.0)),
        };
        let micro = |&(row, _): &(&str, &str)| (row.to_owned(), cost(250.0));
        Measured {
            column,
            costs: BENCHMARKS.iter().map(row).collect(),
            micro: MICRO.iter().map(micro).collect(),
            statistics: None,
            events: Vec::new(),
            events_by_row: BTreeMap::new(),
            guest_kernel: String::new(),
        }
    }

    fn results() -> Results {
        let measured =
            vec![measured(NATIVE, 1.0, 0.0), measured(KVM, 4.0, 9.0), measured(TOP, 1.1, 1.0)];
        Results::new(measured, 1500.0).unwrap()
    }

    #[test]
    fn figures_have_the_agreed_keys() {
        let results = results();
        let figure = |key: &str| results.figures.iter().find(|one| one.key == key).unwrap();
        let ratio = figure("vtlb_top_forkwait");
        assert_eq!((rounded(ratio.value), ratio.limit, ratio.peer), (1.1, 1.2, Some(4.0)));
        let switches = figure("vtlb_top_forkwait_ws");
        assert_eq!((switches.value, switches.limit, switches.peer), (1.0, 40.0, Some(9.0)));
        let priced = figure("vtlb_top_forkwait_priced");
        assert_eq!((rounded(priced.value), priced.limit), (1.22, 1.55));
        assert_eq!(figure("vtlb_kvm_forkwait_priced").limit, f64::INFINITY);
        assert_eq!((figure("vtlb_fill").value, figure("vtlb_fill").limit), (275.0, 300.0));
        assert_eq!(figure("vtlb_fill_ws").limit, 1.0);
        assert_eq!(figure("vtlb_kvm_cr3").value, 1000.0);
        assert!(figure("vtlb_lines").holds());
        // CR3: 275 of 250, injected fault: 275 of 200; compilation and two more rows: 1.1 and 1.22.
        let missed: Vec<&str> = results
            .figures
            .iter()
            .filter(|figure| !figure.holds())
            .map(|figure| figure.key.as_str())
            .collect();
        assert_eq!(
            missed,
            ["vtlb_top_compile", "vtlb_top_compile_priced", "vtlb_inject", "vtlb_cr3"]
        );
        assert!(results.check().is_err());
    }

    #[test]
    fn a_missing_row_is_an_error() {
        let mut incomplete = measured(TOP, 1.0, 1.0);
        incomplete.costs.remove("compile");
        assert!(Results::new(vec![measured(NATIVE, 1.0, 0.0), incomplete], 0.0).is_err());
        let mut incomplete = measured(TOP, 1.0, 1.0);
        incomplete.micro.remove("cr3");
        assert!(Results::new(vec![measured(NATIVE, 1.0, 0.0), incomplete], 0.0).is_err());
    }

    #[test]
    fn drawings_have_all_systems() {
        let results = results();
        for benchmark in &BENCHMARKS {
            let text = results.drawing(benchmark).unwrap();
            assert!(text.contains("INVLPGA") && text.contains("KVM"), "{}", benchmark.name);
        }
        assert!(results.drawing(&BENCHMARKS[0]).unwrap().contains(">1.22<"));
    }

    #[test]
    fn rows_are_in_order_of_their_numbers() {
        let rows = ["ctx_16p_4k", "ctx_4p_64k", "ctx_4p_4k"].map(String::from);
        assert_eq!(sorted(rows.iter().collect()), ["ctx_4p_4k", "ctx_4p_64k", "ctx_16p_4k"]);
    }
}
