//! SHA-256 digests in hexadecimal, by which entries of the cache are named and verified.

use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Returns the SHA-256 over parts, each with its length, in hexadecimal.
pub fn digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut sha = Sha256::new();
    for part in parts {
        sha.update((part.len() as u64).to_le_bytes());
        sha.update(part);
    }
    hexadecimal(&sha.finalize())
}

/// Returns the SHA-256 of a file in the format of sha256sum(1).
pub fn file_digest(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut sha = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let length = file.read(&mut buffer)?;
        if length == 0 {
            return Ok(hexadecimal(&sha.finalize()));
        }
        sha.update(&buffer[..length]);
    }
}

/// Returns bytes in lower-case hexadecimal.
pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
