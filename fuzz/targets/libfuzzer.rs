//! The targets under libFuzzer; the environment variable `PARADOR_FUZZ` names one.
#![no_main]

use std::sync::LazyLock;

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = std::env::var("PARADOR_FUZZ").unwrap_or_default();
    parador_fuzz::target(&name).expect("PARADOR_FUZZ names a target").run
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| TARGET(data));
