//! The kernel's command line.

/// Maximum length in bytes; the rest is ignored.
pub const LENGTH: usize = 1024;

/// A command line.
pub struct CommandLine {
    bytes: [u8; LENGTH],
    length: usize,
}

impl CommandLine {
    /// No options.
    pub const EMPTY: Self = Self { bytes: [0; LENGTH], length: 0 };

    /// Its text, up to the first invalid UTF-8 sequence.
    pub fn text(&self) -> &str {
        let bytes = &self.bytes[..self.length];
        match core::str::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => core::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or(""),
        }
    }

    /// Value of the last `name=value`.
    pub fn option(&self, name: &str) -> Option<&str> {
        option(self.text(), name)
    }

    /// Sets the text, which ends at the first zero byte.
    pub fn set(&mut self, bytes: &[u8]) {
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        self.length = end.min(LENGTH);
        self.bytes[..self.length].copy_from_slice(&bytes[..self.length]);
    }
}

/// Value of the last `name=value` in a text.
pub fn option<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut words = text.split_ascii_whitespace().rev();
    words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options() {
        let mut line = CommandLine::EMPTY;
        line.set(b"log=com2 pool=1M log=none\0x=1");
        assert_eq!(line.option("log"), Some("none"));
        assert_eq!((line.option("pool"), line.option("x")), (Some("1M"), None));
        line.set(b"a=1 \xff b=2");
        assert_eq!((line.option("a"), line.option("b")), (Some("1"), None));
        line.set(&[b'a'; 5000]);
        assert_eq!(line.text().len(), LENGTH);
    }
}
