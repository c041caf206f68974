//! Files that the user names, read with a limit: a device or a pipe may have no end.

use crate::failure::{self, Failure, IoContext};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Most bytes of a description or configuration.
const MAX_TEXT: u64 = 16 << 20;

/// Reads a file of at most `limit` bytes.
///
/// # Errors
/// It has more: 65. It cannot be read.
pub fn bytes(path: &Path, limit: u64) -> Result<Vec<u8>, Failure> {
    let mut read = Vec::new();
    let opened = File::open(path).file_error("read", path)?;
    opened.take(limit.saturating_add(1)).read_to_end(&mut read).file_error("read", path)?;
    if read.len() as u64 > limit {
        let text = format!("{} has more than {limit} bytes", path.display());
        return Err(Failure::new(failure::BAD_CONFIG, text));
    }
    Ok(read)
}

/// Reads a description or configuration.
///
/// # Errors
/// It is no UTF-8 text, or has more than 16 MiB: 65. It cannot be read.
pub fn text(path: &Path) -> Result<String, Failure> {
    String::from_utf8(bytes(path, MAX_TEXT)?).map_err(|_| {
        Failure::new(failure::BAD_CONFIG, format!("{} is not UTF-8 text", path.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn files_without_end_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "text").unwrap();
        assert_eq!(text(&path).unwrap(), "text");
        assert_eq!(bytes(&path, 4).unwrap(), b"text");
        let refused = |result: Result<Vec<u8>, Failure>, expected: &str| {
            let failure = result.unwrap_err();
            assert_eq!(failure.code(), failure::BAD_CONFIG);
            assert!(failure.to_string().contains(expected), "{failure}");
        };
        refused(bytes(&path, 3), "has more than 3 bytes");
        refused(text(Path::new("/dev/zero")).map(Into::into), "/dev/zero has more than 16777216");
        fs::write(&path, b"\xff").unwrap();
        refused(text(&path).map(Into::into), "is not UTF-8 text");
        fs::remove_file(&path).unwrap();
        assert_eq!(bytes(&path, 1).unwrap_err().code(), failure::MISSING_FILE);
    }
}
