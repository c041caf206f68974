//! `cargo xtask bench vtlb`: the cost of memory virtualization by software (vTLB, shadow paging),
//! optimisation by optimisation, beside nested paging, KVM's shadow paging and the bare machine.
//!
//! Every column of the results is one system that runs the same benchmarks in the same RAM disk.
//! The figures are executed instructions; world switches are counted between marks by QEMU's plugin
//! ([`counted`](crate::counted)). Both are the same in every run, so each system runs once.

mod columns;
mod results;
mod rows;
mod systems;

use crate::guest::folder;
use crate::size_line;
use anyhow::{Context, Result, bail, ensure};
use columns::Column;
use results::Results;
use std::fs::create_dir_all;
use systems::Systems;

/// Measures all columns, prints and stores them. With names of columns it measures only these,
/// beside the bare machine, and stores nothing. Where a system fails, the others are printed, and
/// written to `target`.
pub fn measure(names: &[&str]) -> Result<()> {
    create_dir_all(folder()).context("cannot make a folder for the bench")?;
    let (mut measured, mut failures) = (Vec::new(), Vec::new());
    for outcome in Systems::new()?.run(&selected(names)?) {
        match outcome {
            Ok(one) => measured.push(one),
            Err(error) => failures.push(format!("{error:#}")),
        }
    }
    ensure!(!measured.is_empty(), "no system was measured:\n{}", failures.join("\n"));
    let results = Results::new(measured, size_line("vTLB: ")?)?;
    results.print();
    if names.is_empty() {
        results.write()?;
    }
    ensure!(failures.is_empty(), "{} systems failed:\n{}", failures.len(), failures.join("\n"));
    if names.is_empty() {
        results.store()?;
    }
    results.check()
}

/// Returns the columns with these names and the bare machine; all without a name.
fn selected(names: &[&str]) -> Result<Vec<Column>> {
    let all = columns::all();
    let known: Vec<&str> = all.iter().map(|column| column.name).collect();
    if let Some(name) = names.iter().find(|name| !known.contains(name)) {
        bail!("no column `{name}`; the columns are {}", known.join(", "));
    }
    let is_wanted = |column: &Column| {
        names.is_empty() || column.name == columns::NATIVE || names.contains(&column.name)
    };
    Ok(all.into_iter().filter(is_wanted).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selects_columns() {
        let names = |names: &[&str]| -> Vec<&str> {
            selected(names).unwrap().iter().map(|column| column.name).collect()
        };
        assert_eq!(names(&["kvm"]), ["native", "kvm"]);
        assert_eq!(names(&[]).len(), columns::all().len());
        assert!(selected(&["kvm", "absent"]).is_err());
    }
}
