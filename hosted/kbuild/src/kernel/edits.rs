//! Patches of source files: unified diffs without context (`diff -U0`).
//!
//! Each hunk replaces at least one line. The old lines must be at their original position, or occur
//! exactly once in the file. A patch thus survives changes around it, and one that does not apply
//! any more is an error.

use hosted_command::failure::{self, Failure};
use std::fs;
use std::path::Path;

/// Hunk: old and new lines.
#[derive(Debug, PartialEq, Eq)]
struct Piece<'a> {
    /// First line in the original file, from 0.
    line: usize,
    old: Vec<&'a str>,
    new: Vec<&'a str>,
}

/// Hunks of one file.
#[derive(Debug, PartialEq, Eq)]
struct Change<'a> {
    path: &'a str,
    pieces: Vec<Piece<'a>>,
}

/// Applies the diffs in `text`, called `name` in messages, to the files below `tree`.
pub fn apply(name: &str, text: &str, tree: &Path) -> Result<(), Failure> {
    let wrong = |reason: String| Failure::new(failure::BAD_CONFIG, format!("{name}: {reason}"));
    for change in parse(text).map_err(wrong)? {
        let path = tree.join(change.path);
        let old = fs::read_to_string(&path)
            .map_err(|error| Failure::file(&format!("apply {name}, to read"), &path, &error))?;
        let new = change.apply(&old).map_err(|line| {
            let reason = format!("line {line} of {} does not match", change.path);
            wrong(reason).help(
                "the patches are for Linux 6.1 of Debian 12; use that as --source, or remove --source",
            )
        })?;
        fs::write(&path, new).map_err(|error| Failure::file("write", &path, &error))?;
    }
    Ok(())
}

/// Parses diffs. Text before the first file is ignored.
fn parse(text: &str) -> Result<Vec<Change<'_>>, String> {
    let mut changes: Vec<Change> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let wrong = |reason: &str| format!("line {}: {reason}", index + 1);
        if line.starts_with("--- ") {
            continue;
        }
        if let Some(path) = line.strip_prefix("+++ b/") {
            let safe = !path.split('/').any(|part| matches!(part, "" | "." | ".."));
            if !safe {
                return Err(wrong("a path leads out of the tree"));
            }
            changes.push(Change { path, pieces: Vec::new() });
            continue;
        }
        let Some(change) = changes.last_mut() else { continue };
        if let Some(ranges) = line.strip_prefix("@@ -") {
            let digits = ranges.split([',', ' ']).next().unwrap_or_default();
            let number: usize = digits.parse().map_err(|_| wrong("invalid line number"))?;
            let line = number.checked_sub(1).ok_or_else(|| wrong("line numbers start at 1"))?;
            change.pieces.push(Piece { line, old: Vec::new(), new: Vec::new() });
        } else if let Some(old) = line.strip_prefix('-') {
            let piece =
                change.pieces.last_mut().ok_or_else(|| wrong("a line before the first hunk"))?;
            piece.old.push(old);
        } else if let Some(new) = line.strip_prefix('+') {
            let piece =
                change.pieces.last_mut().ok_or_else(|| wrong("a line before the first hunk"))?;
            piece.new.push(new);
        } else if !line.is_empty() {
            return Err(wrong("expected `-`, `+` or `@@`"));
        }
    }
    let empty = changes.iter().find(|change| {
        change.pieces.is_empty() || change.pieces.iter().any(|piece| piece.old.is_empty())
    });
    match empty {
        Some(change) => Err(format!("a hunk of {} replaces no line", change.path)),
        None => Ok(changes),
    }
}

impl Change<'_> {
    /// Returns the changed text, or the number (from 1) of the first line that does not match.
    fn apply(&self, text: &str) -> Result<String, usize> {
        let lines: Vec<&str> = text.lines().collect();
        let mut result = String::with_capacity(text.len() + text.len() / 8);
        let mut done = 0;
        for piece in &self.pieces {
            let start = piece.find(&lines, done).ok_or(piece.line + 1)?;
            for line in lines[done..start].iter().chain(&piece.new) {
                result.push_str(line);
                result.push('\n');
            }
            done = start + piece.old.len();
        }
        for line in &lines[done..] {
            result.push_str(line);
            result.push('\n');
        }
        Ok(result)
    }
}

impl Piece<'_> {
    /// Returns the position of the old lines, not before line `from`.
    fn find(&self, lines: &[&str], from: usize) -> Option<usize> {
        let is_at = |start: usize| {
            let end = start.checked_add(self.old.len())?;
            (start >= from && lines.get(start..end)? == self.old).then_some(start)
        };
        is_at(self.line).or_else(|| {
            let mut places = (from..lines.len()).filter_map(is_at);
            places.next().filter(|_| places.next().is_none())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "a\nb\nc\nb\nd\n";

    fn change(differences: &str) -> Result<String, usize> {
        parse(differences).unwrap()[0].apply(TEXT)
    }

    #[test]
    fn lines_are_replaced_added_and_removed() {
        let differences = "why\n--- a/f\n+++ b/f\n@@ -2 +2,2 @@\n-b\n+x\n+y\n@@ -5 +6,0 @@\n-d\n";
        assert_eq!(change(differences), Ok("a\nx\ny\nc\nb\n".into()));
    }

    #[test]
    fn lines_may_have_moved_if_they_are_the_only_ones() {
        assert_eq!(change("+++ b/f\n@@ -9 +9 @@\n-c\n+x\n"), Ok("a\nb\nx\nb\nd\n".into()));
        // Occurs twice, neither at the original position.
        assert_eq!(change("+++ b/f\n@@ -9 +9 @@\n-b\n+x\n"), Err(9));
        assert_eq!(change("+++ b/f\n@@ -4 +4 @@\n-b\n+x\n"), Ok("a\nb\nc\nx\nd\n".into()));
        assert_eq!(change("+++ b/f\n@@ -1 +1 @@\n-e\n+x\n"), Err(1));
    }

    #[test]
    fn what_cannot_be_found_again_is_refused() {
        for wrong in [
            "+++ b/f\n@@ -1,0 +2 @@\n+x\n",
            "+++ b/f\n",
            "+++ b/../f\n@@ -1 +1 @@\n-a\n+b\n",
            "+++ b//f\n@@ -1 +1 @@\n-a\n+b\n",
            "+++ b/f\n@@ -x +1 @@\n-a\n+b\n",
            "+++ b/f\n@@ -0 +1 @@\n-a\n+b\n",
            "+++ b/f\n-a\n",
            "+++ b/f\n@@ -1 +1 @@\n a\n-b\n",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn our_own_edits_can_be_read() {
        for (name, text) in crate::kernel::EDITS {
            let changes = parse(text).unwrap_or_else(|reason| panic!("{name}: {reason}"));
            assert!(!changes.is_empty(), "{name}");
        }
    }
}
