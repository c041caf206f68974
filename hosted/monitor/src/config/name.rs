//! Name of a VM.

use crate::verb::is_verb;

/// Longest name: paths of sockets have at most 107 bytes (unix(7)).
const MAX_NAME: usize = 32;

/// Name of a VM, unique among those of a user.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmName(String);

impl VmName {
    /// Reads a name.
    ///
    /// # Errors
    /// It is too long, has other characters, or is a command of `parador ctl`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let is_known = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let begins = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
        if !begins || text.len() > MAX_NAME || !text.bytes().all(is_known) {
            return Err(format!(
                "a name has 1 to {MAX_NAME} letters, digits, `.`, `_` and `-`; a letter or digit is the first"
            ));
        }
        match is_verb(text) {
            true => Err(format!("`{text}` is a command of `parador ctl`")),
            false => Ok(Self(text.to_owned())),
        }
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn text(&self) -> Option<String> {
        Some(self.0.clone())
    }
}

string_value!(
    VmName,
    "VmName",
    "^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$",
    "Name of a VM, unique among those of a user; no command of `parador ctl`."
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded() {
        for good in ["a", "web-1", "A.b_c", "0", &"x".repeat(MAX_NAME)] {
            assert_eq!(VmName::parse(good).unwrap().as_str(), good);
        }
        let long = "x".repeat(MAX_NAME + 1);
        for wrong in ["", ".", "..", "-a", ".hidden", "a/b", "a b", "a\"", "é", "status", &long] {
            assert!(VmName::parse(wrong).is_err(), "{wrong}");
        }
    }
}
