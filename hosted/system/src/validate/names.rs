//! Names of objects in a description.

use hosted_command::problem::Problem;
use proto::system as compiled;
use toml::Spanned;

/// Names of one kind, with the position of the first use.
pub(super) struct Names {
    kind: &'static str,
    known: Vec<String>,
}

impl Names {
    /// Creates an empty list.
    pub(super) fn new(kind: &'static str) -> Self {
        Self { kind, known: Vec::new() }
    }

    /// Checks and adds a name.
    pub(super) fn add(&mut self, name: &Spanned<String>, problems: &mut Vec<Problem>) {
        let text = name.get_ref();
        if !is_name(text) {
            let message = format!("invalid name `{text}`");
            problems.push(Problem::new(name.span(), message).help(format!(
                "names consist of 1 to {} characters of a-z, 0-9 and -",
                compiled::MAX_NAME
            )));
        }
        if self.known.contains(text) {
            let message = format!("duplicate {} name `{text}`", self.kind);
            problems.push(Problem::new(name.span(), message).help("choose another name"));
        }
        self.known.push(text.clone());
    }
}

/// Returns whether a text is a valid name.
pub(super) fn is_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=compiled::MAX_NAME).contains(&text.len()) && text.bytes().all(allowed)
}
