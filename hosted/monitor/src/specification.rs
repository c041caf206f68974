//! Generated files in `docs/spec`: tests compare them with the code.

use std::fs;
use std::path::Path;

use serde_json::Value;

/// Asserts that a file in `docs/spec` contains `value`; `PARADOR_NEW_SCHEMAS` in the environment
/// writes the file first.
///
/// The comparison is by value: the order of keys depends on features of other crates in the build.
pub fn assert_shipped(name: &str, value: &Value) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/spec").join(name);
    if std::env::var_os("PARADOR_NEW_SCHEMAS").is_some() {
        fs::write(&path, serde_json::to_string_pretty(value).unwrap() + "\n").unwrap();
    }
    let shipped: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert!(
        shipped == *value,
        "PARADOR_NEW_SCHEMAS=1 cargo test -p hosted-monitor rewrites {name}"
    );
}
