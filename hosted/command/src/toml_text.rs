//! Reads TOML files into types, with the position of the first problem.

use crate::keyvalue;
use crate::problem::Problem;
use serde::de::DeserializeOwned;

/// Parses a file of type `T`. The problem has the position and, for a misspelt key, the likely one.
pub fn parse<T: DeserializeOwned>(text: &str) -> Result<T, Problem> {
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let mut lines = error.message().lines();
        let first = lines.next().unwrap_or("not TOML").to_owned();
        let problem = Problem::new(error.span().unwrap_or(0..0), first.clone());
        let rest: Vec<&str> = lines.collect();
        match () {
            () if !rest.is_empty() => problem.help(rest.join("; ")),
            () if first.starts_with("unknown field") => {
                // unknown field `KEY`, expected one of `A`, `B`
                let mut names = first.split('`').skip(1).step_by(2);
                let written = names.next().unwrap_or("");
                problem.help(match keyvalue::nearest(written, names) {
                    Some(meant) => format!("did you mean `{meant}`?"),
                    None => "correct or remove this key".to_owned(),
                })
            }
            () => problem,
        }
    })
}
