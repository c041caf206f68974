//! Parser for options of the form `VALUE,KEY=VALUE,...` into types that TOML files use, too.
//!
//! It is a serde deserializer, so a key is defined once, in its struct. Values cannot contain
//! commas.

use crate::failure::{self, Failure};
use serde::de::value::MapDeserializer;
use serde::de::{self, Deserializer, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;
use std::fmt;

/// Parses `text`; its first part may be the value of the key `first`.
///
/// # Errors
/// Code 65, with `option` and the text in the message.
pub fn parse<T: de::DeserializeOwned>(option: &str, first: &str, text: &str) -> Result<T, Failure> {
    let refuse = |message| Failure::new(failure::BAD_CONFIG, format!("{option} {text}: {message}"));
    let mut pairs: Vec<(&str, Text<'_>)> = Vec::new();
    for (number, part) in text.split(',').enumerate() {
        let (key, value) = match part.split_once('=') {
            Some(pair) => pair,
            None if number == 0 => (first, part),
            None => return Err(refuse(format!("`{part}` has no value"))),
        };
        if pairs.iter().any(|pair| pair.0 == key) {
            return Err(refuse(format!("`{key}` is given twice")));
        }
        pairs.push((key, Text { key, value }));
    }
    T::deserialize(MapDeserializer::new(pairs.into_iter())).map_err(|error: Wrong| refuse(error.0))
}

/// Returns the name most similar to `written`, if one is similar.
pub fn nearest<'a>(written: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let alike = |name: &&str| strsim::jaro(written, name);
    names.into_iter().filter(|name| alike(name) > 0.7).max_by(|a, b| alike(a).total_cmp(&alike(b)))
}

/// Error of a text.
#[derive(Debug)]
struct Wrong(String);

impl std::error::Error for Wrong {}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl de::Error for Wrong {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self(message.to_string())
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        Self(match nearest(field, expected.iter().copied()) {
            Some(meant) => format!("unknown key `{field}`: did you mean `{meant}`?"),
            None => format!("unknown key `{field}`: expected one of {}", expected.join(", ")),
        })
    }

    fn missing_field(field: &'static str) -> Self {
        Self(format!("`{field}` is missing"))
    }
}

/// Value of a key, deserialized as its type requests.
#[derive(Clone, Copy)]
struct Text<'a> {
    key: &'a str,
    value: &'a str,
}

impl<'a> IntoDeserializer<'a, Wrong> for Text<'a> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl Text<'_> {
    fn wrong(self, wanted: &str) -> Wrong {
        Wrong(format!("`{}` must be {wanted}, not `{}`", self.key, self.value))
    }
}

impl<'de> Deserializer<'de> for Text<'de> {
    type Error = Wrong;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        let value = visitor.visit_borrowed_str(self.value);
        value.map_err(|error: Wrong| Wrong(format!("`{}`: {error}", self.key)))
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        match self.value {
            "on" => visitor.visit_bool(true),
            "off" => visitor.visit_bool(false),
            _ => Err(self.wrong("`on` or `off`")),
        }
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        match self.value.parse() {
            Ok(number) => visitor.visit_u64(number),
            Err(_) => Err(self.wrong("a number")),
        }
    }

    fn deserialize_u8<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        self.deserialize_u64(visitor)
    }

    fn deserialize_u16<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        self.deserialize_u64(visitor)
    }

    fn deserialize_u32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        self.deserialize_u64(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Wrong> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Wrong> {
        if !variants.contains(&self.value) {
            return Err(self.wrong(&format!("one of {}", variants.join(", "))));
        }
        let text: de::value::BorrowedStrDeserializer<'de, Wrong> =
            de::value::BorrowedStrDeserializer::new(self.value);
        text.deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple tuple_struct map struct identifier
        ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use std::path::PathBuf;

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Color {
        Red,
        Green,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields, rename_all = "kebab-case")]
    struct Thing {
        path: PathBuf,
        #[serde(default)]
        read_only: bool,
        count: Option<u32>,
        color: Option<Color>,
    }

    fn thing(text: &str) -> Result<Thing, String> {
        parse("--thing", "path", text).map_err(|failure| failure.to_string())
    }

    #[test]
    fn values_become_what_their_types_want() {
        let plain = Thing { path: "a".into(), read_only: false, count: None, color: None };
        assert_eq!(thing("a"), Ok(plain));
        let full = Thing {
            path: "b=c".into(),
            read_only: true,
            count: Some(7),
            color: Some(Color::Green),
        };
        assert_eq!(thing("count=7,path=b=c,color=green,read-only=on"), Ok(full));
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, said) in [
            ("a,read-only=yes", "`read-only` must be `on` or `off`, not `yes`"),
            ("a,count=many", "`count` must be a number, not `many`"),
            ("a,count=4294967296", "4294967296"),
            ("a,color=blue", "`color` must be one of red, green, not `blue`"),
            ("a,colour=red", "unknown key `colour`: did you mean `color`?"),
            ("a,xyz=1", "unknown key `xyz`: expected one of path, read-only"),
            ("count=1", "`path` is missing"),
            ("a,count", "`count` has no value"),
            ("a,path=b", "`path` is given twice"),
        ] {
            let message = thing(text).unwrap_err();
            assert!(message.contains(said), "{text}: {message}");
        }
    }
}
