//! Parameters of a QEMU option: `VALUE,KEY=VALUE,KEY,...` ("QemuOpts").
//!
//! A comma within a value is doubled. A key without a value is `on`; `noKEY` is `KEY=off`. The
//! first part may be the value of a key that the option implies.

use crate::refuse;
use hosted_command::failure::{self, Failure};

/// Parameters of one option, which callers take one after another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Params {
    /// Option and its value, for messages.
    what: String,
    pairs: Vec<(String, String)>,
}

/// Splits a text at its commas; doubled ones are part of a value.
fn split(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        let is_end = letter == ',' && letters.next_if_eq(&',').is_none();
        match parts.last_mut() {
            Some(part) if !is_end => part.push(letter),
            _ => parts.push(String::new()),
        }
    }
    parts
}

impl Params {
    /// Parses the value of an option, whose first part may be the value of the key `implied`.
    ///
    /// # Errors
    /// An empty part: code 64.
    pub fn parse(option: &str, implied: Option<&str>, text: &str) -> Result<Self, Failure> {
        let what = format!("{option} {text}");
        let mut pairs = Vec::new();
        for (index, part) in split(text).into_iter().enumerate() {
            let pair = match (part.split_once('='), implied) {
                (Some((key, value)), _) if !key.is_empty() => (key.to_owned(), value.to_owned()),
                (None, Some(key)) if index == 0 && !part.is_empty() => (key.to_owned(), part),
                (None, _) if !part.is_empty() => match part.strip_prefix("no") {
                    // `server,nowait`, as older tools pass it.
                    Some(key @ ("wait" | "delay")) => (key.to_owned(), "off".to_owned()),
                    _ => (part, "on".to_owned()),
                },
                // A comma at the end.
                _ if index > 0 && part.is_empty() => continue,
                _ => return Err(refuse(format!("{what}: a parameter has no name"))),
            };
            pairs.push(pair);
        }
        Ok(Self { what, pairs })
    }

    /// Returns the option and its value.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// Takes the values of a key that may be given several times.
    pub fn take_all(&mut self, key: &str) -> Vec<String> {
        let (taken, left) = self.pairs.drain(..).partition(|pair| pair.0 == key);
        self.pairs = left;
        taken.into_iter().map(|(_, value)| value).collect()
    }

    /// Returns the value of a key, which stays; the last one counts.
    pub fn value(&self, key: &str) -> Option<&str> {
        let mut values = self.pairs.iter().rev().filter(|pair| pair.0 == key);
        values.next().map(|pair| pair.1.as_str())
    }

    /// Takes the value of a key; the last one counts.
    pub fn take(&mut self, key: &str) -> Option<String> {
        self.take_all(key).pop()
    }

    /// Takes the value of a required key.
    ///
    /// # Errors
    /// It is missing or empty: code 64.
    pub fn require(&mut self, key: &str) -> Result<String, Failure> {
        let value = self.take(key).filter(|value| !value.is_empty());
        value.ok_or_else(|| refuse(format!("{}: `{key}` is missing", self.what)))
    }

    /// Takes the value of a switch; absent it is `off`.
    ///
    /// # Errors
    /// It is no boolean: code 64.
    pub fn take_switch(&mut self, key: &str) -> Result<bool, Failure> {
        match self.take(key).as_deref() {
            Some("on" | "yes" | "true" | "y") => Ok(true),
            None | Some("off" | "no" | "false" | "n") => Ok(false),
            Some(value) => {
                Err(refuse(format!("{}: `{key}` must be on or off, not `{value}`", self.what)))
            }
        }
    }

    /// Ends the parameters: all others must be among `ignored`.
    ///
    /// # Errors
    /// Another one exists: code 64, with its name.
    pub fn finish(self, ignored: &[&str]) -> Result<(), Failure> {
        let unknown = self.pairs.iter().find(|pair| !ignored.contains(&pair.0.as_str()));
        match unknown {
            None => Ok(()),
            Some((key, _)) => Err(refuse(format!("{}: unknown parameter `{key}`", self.what))),
        }
    }

    /// Creates the failure of a value that is not supported: code 69.
    pub fn unsupported(&self, reason: &str) -> Failure {
        Failure::new(failure::UNAVAILABLE, format!("{}: {reason}", self.what))
    }

    /// Creates the failure of an invalid value: code 64.
    pub fn invalid(&self, reason: &str) -> Failure {
        refuse(format!("{}: {reason}", self.what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Params {
        Params::parse("-x", Some("first"), text).unwrap()
    }

    #[test]
    fn pairs() {
        let mut params = parse("local,id=a,path=/srv/a,,b=c,readonly,server,nowait");
        assert_eq!(params.require("first").unwrap(), "local");
        assert_eq!(params.take("path").as_deref(), Some("/srv/a,b=c"));
        assert!(params.take_switch("readonly").unwrap());
        assert!(params.take_switch("server").unwrap());
        assert_eq!(params.take("wait").as_deref(), Some("off"));
        assert!(!params.take_switch("absent").unwrap());
        let failure = params.clone().finish(&["bus"]).unwrap_err();
        assert!(failure.to_string().contains("unknown parameter `id`"), "{failure}");
        assert_eq!(failure.code(), failure::USAGE);
        params.finish(&["id"]).unwrap();
    }

    #[test]
    fn commas() {
        let values = |text: &str| parse(text).take_all("first");
        assert_eq!(values("a,,b"), ["a,b"]);
        assert_eq!(values(",,a,,"), [",a,"]);
        assert_eq!(values("a,,,first=b"), ["a,", "b"], "a doubled comma, then one that ends");
        assert_eq!(values("first=a,first=b,"), ["a", "b"], "a comma at the end");
        assert_eq!(parse("first=a=b,,c").take("first").as_deref(), Some("a=b,c"));
        for text in ["", "=a", "a,=b", ",a"] {
            let failure = Params::parse("-x", Some("first"), text).unwrap_err();
            assert_eq!(failure.code(), failure::USAGE, "{text}");
        }
        assert!(Params::parse("-x", None, "on-without-a-key").is_ok());
    }

    #[test]
    fn wrong_values() {
        let failure = parse("a,ro=maybe").take_switch("ro").unwrap_err();
        assert!(failure.to_string().contains("not `maybe`"));
        let failure = parse("a,id=").require("id").unwrap_err();
        assert!(failure.to_string().contains("-x a,id=: `id` is missing"), "{failure}");
        assert_eq!(parse("a").unsupported("why").code(), failure::UNAVAILABLE);
    }
}
