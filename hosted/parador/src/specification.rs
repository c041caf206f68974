//! Descriptions in `docs/spec` that are made from code: tests hold them equal to it.

use std::fs;
use std::path::Path;

use serde_json::Value;

/// Asserts that a file of `docs/spec` says `value`; with `PARADOR_NEW_SCHEMAS` in the environment the file is written first.
///
/// They are compared as values: whether keys keep their order depends on what else is built with them.
pub fn assert_shipped(name: &str, value: &Value) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/spec").join(name);
    if std::env::var_os("PARADOR_NEW_SCHEMAS").is_some() {
        fs::write(&path, serde_json::to_string_pretty(value).unwrap() + "\n").unwrap();
    }
    let shipped: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert!(shipped == *value, "PARADOR_NEW_SCHEMAS=1 cargo test -p parador writes {name} anew");
}
