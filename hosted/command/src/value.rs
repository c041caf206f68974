//! Values of options and configuration files: sizes, times and MAC addresses.

use proto::net::Mac;
use schemars::JsonSchema;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;
use std::time::Duration;

/// Size in bytes, written with a unit: `"256M"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, JsonSchema)]
#[schemars(transparent)]
pub struct Size(#[schemars(with = "String", regex(pattern = "^[0-9]+[KMGkmg]$"))] pub u64);

impl Size {
    /// Parses digits and one of the units K, M, G (powers of 1024).
    pub fn parse(text: &str) -> Result<Self, String> {
        let refuse =
            || format!("invalid size `{text}`: expected digits and K, M or G, as in \"256M\"");
        let unit = text.chars().last().ok_or_else(refuse)?;
        let shift = match unit.to_ascii_uppercase() {
            'K' => 10,
            'M' => 20,
            'G' => 30,
            _ => return Err(refuse()),
        };
        let digits = &text[..text.len() - 1];
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(refuse());
        }
        let too_large = || format!("the size `{text}` is too large");
        let number: u64 = digits.parse().map_err(|_| too_large())?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(too_large)
    }

    /// Formats the size as it is parsed, in the largest unit without a remainder.
    pub fn text(self) -> String {
        let (shift, unit) = match self.0.trailing_zeros() {
            30.. => (30, 'G'),
            20.. => (20, 'M'),
            _ => (10, 'K'),
        };
        format!("{}{unit}", self.0 >> shift)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes % (1 << 30) == 0 && bytes > 0 => write!(f, "{} GiB", bytes >> 30),
            bytes if bytes % (1 << 20) == 0 => write!(f, "{} MiB", bytes >> 20),
            bytes if bytes < 1 << 20 => write!(f, "{} KiB", bytes.div_ceil(1 << 10)),
            bytes => write!(f, "{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        }
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text())
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SizeVisitor;

        impl Visitor<'_> for SizeVisitor {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size in quotes with a unit, as in \"256M\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                Size::parse(text).map_err(E::custom)
            }
        }

        deserializer.deserialize_any(SizeVisitor)
    }
}

/// Parses a time: digits and s, m or h; seconds without a unit.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let refuse = || format!("`{text}` is not a time: write digits and s, m or h, as in 60s");
    let (digits, unit) = match text.strip_suffix(['s', 'm', 'h']) {
        Some(digits) => (digits, &text[digits.len()..]),
        None => (text, "s"),
    };
    let seconds = match unit {
        "h" => 3600,
        "m" => 60,
        _ => 1,
    };
    let number: u64 = digits.parse().map_err(|_| refuse())?;
    match number.checked_mul(seconds).filter(|&seconds| seconds > 0) {
        Some(seconds) => Ok(Duration::from_secs(seconds)),
        None => Err(refuse()),
    }
}

/// Parses a MAC address of a network card.
pub fn parse_mac(text: &str) -> Result<Mac, String> {
    let refuse = || {
        format!(
            "invalid MAC address `{text}`: expected a unicast address such as 02:00:00:00:00:01"
        )
    };
    let mut mac = Mac::default();
    let mut parts = text.split(':');
    for byte in &mut mac {
        let part = parts.next().filter(|part| part.len() == 2).ok_or_else(refuse)?;
        *byte = u8::from_str_radix(part, 16).map_err(|_| refuse())?;
    }
    // Bit 0 of the first byte marks group addresses.
    if parts.next().is_some() || mac[0] & 1 != 0 || mac == Mac::default() {
        return Err(refuse());
    }
    Ok(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(Size::parse("256M"), Ok(Size(256 << 20)));
        assert_eq!(Size::parse("4k"), Ok(Size(4096)));
        assert_eq!(Size::parse("2G"), Ok(Size(2 << 30)));
        for wrong in [
            "",
            "M",
            "256",
            "-1M",
            "1.5G",
            "256MB",
            "1 M",
            "ä",
            "99999999999999999999G",
            "17179869184G",
        ] {
            assert!(Size::parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(Size(256 << 20).to_string(), "256 MiB");
        assert_eq!(Size(2 << 30).to_string(), "2 GiB");
        assert_eq!(Size(3 << 19).to_string(), "1.5 MiB");
        assert_eq!(Size(700).to_string(), "1 KiB");
    }

    #[test]
    fn times() {
        assert_eq!(parse_time("60s"), Ok(Duration::from_secs(60)));
        assert_eq!(parse_time("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(parse_time("1h"), Ok(Duration::from_secs(3600)));
        assert_eq!(parse_time("7"), Ok(Duration::from_secs(7)));
        for wrong in
            ["", "s", "-1", "0s", "1d", "1.5s", "99999999999999999999h", "6148914691236517205h"]
        {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }
}
