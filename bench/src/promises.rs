//! Limits of the figures, from `bench/promises.toml`, which SPECIFICATION.md is generated from,
//! too.

use anyhow::{Context, Result};
use toml::{Table, Value};

const TEXT: &str = include_str!("../promises.toml");

/// Returns the limit of a figure. Fails if none is promised, or if it is the peer's figure.
pub fn limit(id: &str) -> Result<f64> {
    limit_in(TEXT, id)
}

/// Returns whether the limit of a figure is the least allowed value.
pub fn is_least(id: &str) -> bool {
    let found = find(TEXT, id).ok().flatten();
    found.is_some_and(|promise| promise.get("at_least") == Some(&Value::from(true)))
}

/// Returns a promise.
fn find(text: &str, id: &str) -> Result<Option<Value>> {
    let tables: Table = text.parse().context("promises.toml is no TOML")?;
    let promises = tables.values().filter_map(|table| table.get("promise")?.as_array()).flatten();
    let mut promises = promises.filter(|promise| promise.get("id") == Some(&Value::from(id)));
    Ok(promises.next().cloned())
}

fn limit_in(text: &str, id: &str) -> Result<f64> {
    let promise = find(text, id)?;
    let limit = promise.as_ref().and_then(|promise| promise.get("limit"));
    let number = limit.and_then(|limit| {
        limit.as_float().or_else(|| limit.as_integer().map(|number| number as f64))
    });
    number.with_context(|| format!("promises.toml has no limit for `{id}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits() {
        let text = "[a]\n[[a.promise]]\nid = \"x\"\nlimit = 3\n[[a.promise]]\nid = \"y\"\nlimit = 0.5\n\
                    [b]\n[[b.promise]]\nid = \"z\"\nlimit = \"peer\"\n";
        assert_eq!(limit_in(text, "x").unwrap(), 3.0);
        assert_eq!(limit_in(text, "y").unwrap(), 0.5);
        assert!(limit_in(text, "z").is_err());
        assert!(limit_in(text, "w").is_err());
        assert_eq!(limit("hypercall").unwrap(), 170.0);
    }
}
