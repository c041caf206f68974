//! Messages for engines: one line in the file of `--log`, and standard error.

use crate::line::{Global, LogFormat};
use hosted_command::failure::Failure;
use hosted_command::messages::to_stderr;
use rustix::fs::OFlags;
use serde_json::json;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{SystemTime, UNIX_EPOCH};

/// Reports a failure to the engine.
pub fn failure(global: &Global, failure: &Failure) {
    write(global, "error", failure);
}

/// Reports a failure in spite of which the command is carried out.
pub fn warning(global: &Global, failure: &Failure) {
    write(global, "warning", failure);
}

fn write(global: &Global, level: &str, failure: &Failure) {
    let text = text(failure);
    to_stderr(format_args!("{text}\n"));
    let Some(path) = &global.log else { return };
    let line = match global.log_format {
        LogFormat::Json => json!({ "level": level, "msg": text, "time": now() }).to_string(),
        LogFormat::Text => format!("time=\"{}\" level={level} msg={}", now(), json!(text)),
    };
    // It does not wait for the reader of a pipe.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let opened = OpenOptions::new().create(true).append(true).custom_flags(flags).open(path);
    // One write: several processes may append. Standard error has the message, too.
    let _ = opened.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
}

/// Returns the message of a failure, with its remedy, in one line.
pub fn text(failure: &Failure) -> String {
    let text = match failure {
        Failure::Simple { message, help: Some(help), .. } => format!("{message} ({help})"),
        Failure::Simple { message, .. } => message.clone(),
        Failure::Report { text, .. } => text.clone(),
    };
    text.trim().replace('\n', "; ")
}

/// Returns the time in UTC as RFC 3339 states it, in seconds.
pub fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    utc(since.as_secs())
}

/// Converts seconds since 1970 (Gregorian calendar; days are counted in eras of 400 years, which
/// begin in March).
fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3_600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_795_665_600), "2026-11-26T04:00:00Z");
    }
}
