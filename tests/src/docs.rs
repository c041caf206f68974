//! Checks that the tests named in documents exist.

use crate::system::workspace;
use anyhow::{Context, Result, bail, ensure};
use std::fs;

/// Documents that name tests.
const DOCUMENTS: [&str; 2] = ["docs/durability.md", "docs/threat-model.md"];
/// The document whose tables of claims name a test in each row.
const CLAIMS: &str = "docs/threat-model.md";
/// Claims without a test, as their rows begin. A row that gets one leaves this list.
const UNTESTED: [&str; 0] = [];
/// First components of the names of system tests.
const GROUPS: [&str; 6] =
    ["bochs/", "hosted/", "native-x86-npt/", "native-x86-vtlb/", "previrt/", "refuses/"];

/// Each test that a document names exists: a system test as `` `hosted/disk` ``, a function as ``
/// `folder/file.rs`: `function` ``, further functions of the same file behind commas.
pub fn named(tests: &[String]) -> Result<()> {
    for document in DOCUMENTS {
        let text = fs::read_to_string(workspace().join(document)).context(document)?;
        let found = check(&text, tests).with_context(|| document.to_owned())?;
        ensure!(found != 0, "{document} names no test");
    }
    let text = fs::read_to_string(workspace().join(CLAIMS)).context(CLAIMS)?;
    let claims = claims(&text, tests, &UNTESTED).context(CLAIMS)?;
    ensure!(claims != 0, "{CLAIMS} has no table of claims");
    Ok(())
}

/// Returns the number of claims with a test in tables that begin with "| claim about". Each row
/// names a test in its last column, except rows that begin with a text of `untested`, all of which
/// must exist.
fn claims(text: &str, tests: &[String], untested: &[&str]) -> Result<usize> {
    let (mut is_table, mut found) = (false, 0);
    let mut missing = untested.to_vec();
    for line in text.lines() {
        is_table = line.starts_with("| claim about") || is_table && line.starts_with('|');
        if !is_table || line.starts_with("| claim about") || line.starts_with("|--") {
            continue;
        }
        let column = line.trim_end_matches('|').rsplit('|').next().unwrap_or_default();
        let count = check(column, tests)?;
        if let Some(index) = missing.iter().position(|begin| line.starts_with(begin)) {
            missing.swap_remove(index);
            ensure!(count == 0, "a claim has a test now: {line}");
            continue;
        }
        ensure!(count != 0, "a claim has no test: {line}");
        found += 1;
    }
    ensure!(missing.is_empty(), "no such claims: {missing:?}");
    Ok(found)
}

/// Returns the number of tests that a text names.
fn check(text: &str, tests: &[String]) -> Result<usize> {
    // Every second piece is between back quotes.
    let pieces: Vec<&str> = text.split('`').collect();
    let mut found = 0;
    let mut file: Option<(&str, String)> = None;
    for (index, word) in pieces.iter().enumerate().skip(1).step_by(2) {
        let before = pieces[index - 1];
        if let Some((path, source)) = &file
            && matches!(before, ": " | ", ")
        {
            let function = format!("fn {word}(");
            ensure!(source.contains(&function), "{path} has no test `{word}`");
            found += 1;
            continue;
        }
        file = None;
        if word.ends_with(".rs") && pieces.get(index + 1) == Some(&": ") {
            let source =
                fs::read_to_string(workspace().join(word)).with_context(|| (*word).to_owned())?;
            file = Some((*word, source));
        } else if GROUPS.iter().any(|group| word.starts_with(group)) {
            let is_test = |name: &String| {
                name == word || name.strip_prefix(word).is_some_and(|rest| rest.starts_with('/'))
            };
            match tests.iter().any(is_test) {
                true => found += 1,
                false if workspace().join(word).exists() => {}
                false => bail!("there is no test `{word}`"),
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_claims() {
        let tests = ["hosted/disk".to_owned()];
        let table =
            "| claim about it | test |\n|---|---|\n| a | `hosted/disk` |\n| b | none: yet |\n\n";
        let found = |text: &str, untested: &[&str]| {
            claims(text, &tests, untested).map_err(|error| error.to_string())
        };
        assert_eq!(found(table, &["| b | none"]), Ok(1));
        assert_eq!(found(table, &[]), Err("a claim has no test: | b | none: yet |".to_owned()));
        assert_eq!(
            found(table, &["| a", "| b"]),
            Err("a claim has a test now: | a | `hosted/disk` |".to_owned())
        );
        assert_eq!(found(table, &["| b", "| c"]), Err("no such claims: [\"| c\"]".to_owned()));
        assert_eq!(
            found(&table.replace("disk", "disks"), &["| b"]),
            Err("there is no test `hosted/disks`".to_owned())
        );
        // Other tables have no tests.
        assert_eq!(found("| input | parsed by |\n|---|---|\n| a | b |\n", &[]), Ok(0));
    }

    #[test]
    fn names() {
        let tests = ["hosted/disk".to_owned(), "native-x86-npt/smp/1-cpu".to_owned()];
        let own = "`tests/src/docs.rs`: `names`, `others`";
        let found = |text: &str| check(text, &tests).map_err(|error| error.to_string());
        assert_eq!(found("`hosted/disk`, `native-x86-npt/smp`; `hosted/devices`"), Ok(2));
        assert_eq!(found(&own.replace("others", "check")), Ok(2));
        for (text, said) in [
            ("`hosted/disks`", "there is no test `hosted/disks`"),
            (own, "tests/src/docs.rs has no test `others`"),
            ("`tests/none.rs`: `names`", "tests/none.rs"),
        ] {
            assert_eq!(found(text), Err(said.to_owned()));
        }
    }
}
