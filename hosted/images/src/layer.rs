//! Layers: their compression and their digests.

use crate::archive::{self, Visited, refused};
use crate::limits::{MAX_BYTES, MAX_WINDOW};
use flate2::bufread::MultiGzDecoder;
use hosted_command::digest::hexadecimal;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use sha2::{Digest, Sha256};
use std::io::{self, BufRead, BufReader, Error, Read, Result};

/// First bytes of gzip and zstd, of its skippable frames without their lowest half byte.
const GZIP: &[u8] = b"\x1f\x8b";
const ZSTD: &[u8] = b"\x28\xb5\x2f\xfd";
const SKIPPABLE: &[u8] = b"\x2a\x4d\x18";
/// Bytes read at once.
const BUFFER: usize = 128 << 10;

/// Calls `visit` with each entry of a layer, and verifies its digests, in hexadecimal: of the file
/// if there is one, and of its contents without compression. `bytes` counts those.
///
/// # Errors
/// The layer is malformed or too long, has other digests, or an entry is refused; those of `visit`.
pub fn entries(
    file: impl Read,
    digest: Option<&str>,
    contents: &str,
    bytes: &mut u64,
    visit: impl FnMut(Visited<'_>) -> Result<()>,
) -> Result<()> {
    let mut file = Hashed::new(file);
    {
        let decoder = decode(BufReader::with_capacity(BUFFER, &mut file))?;
        let mut plain = Hashed::new(Counted { inner: decoder, bytes });
        archive::entries(&mut plain, visit)?;
        plain.verify("the layer's contents have", contents)?;
    }
    match digest {
        Some(digest) => file.verify("the layer has", digest),
        None => Ok(()),
    }
}

/// Returns the digest of a layer's contents without compression, `longest` bytes at most.
#[cfg(feature = "testing")]
pub fn digest_of_contents(layer: &[u8], longest: u64) -> Result<String> {
    let mut plain = Hashed::new(decode(layer)?);
    let length = io::copy(&mut (&mut plain).take(longest + 1), &mut io::sink())?;
    match length > longest {
        true => Err(refused(format!("the layer has more than {longest} bytes"))),
        false => Ok(hexadecimal(&plain.sha.finalize())),
    }
}

/// Returns the contents of a layer without compression.
fn decode<'a>(mut file: impl BufRead + 'a) -> Result<Box<dyn Read + 'a>> {
    let head = file.fill_buf()?;
    let is_skippable = head.get(1..4) == Some(SKIPPABLE) && head[0] & 0xf0 == 0x50;
    Ok(if head.starts_with(GZIP) {
        Box::new(MultiGzDecoder::new(file))
    } else if head.starts_with(ZSTD) || is_skippable {
        Box::new(Zstd::new(file))
    } else {
        Box::new(file)
    })
}

/// Reader that hashes what it reads.
struct Hashed<R> {
    inner: R,
    sha: Sha256,
}

impl<R: Read> Hashed<R> {
    fn new(inner: R) -> Self {
        Self { inner, sha: Sha256::new() }
    }

    /// Reads the rest and compares the digest.
    fn verify(mut self, what: &str, expected: &str) -> Result<()> {
        io::copy(&mut self, &mut io::sink())?;
        let found = hexadecimal(&self.sha.finalize());
        match found == expected {
            true => Ok(()),
            false => Err(refused(format!("{what} the digest {found}, not {expected}"))),
        }
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, room: &mut [u8]) -> Result<usize> {
        let count = self.inner.read(room)?;
        self.sha.update(&room[..count]);
        Ok(count)
    }
}

/// Reader that refuses more than [`MAX_BYTES`] of all layers.
struct Counted<'a, R> {
    inner: R,
    bytes: &'a mut u64,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, room: &mut [u8]) -> Result<usize> {
        let count = self.inner.read(room)?;
        *self.bytes += count as u64;
        match *self.bytes > MAX_BYTES {
            true => Err(refused(format!("the layers have more than {MAX_BYTES} bytes"))),
            false => Ok(count),
        }
    }
}

/// Decoder of a sequence of zstd frames (RFC 8878).
struct Zstd<R> {
    source: R,
    decoder: FrameDecoder,
    is_within_frame: bool,
}

impl<R: BufRead> Zstd<R> {
    fn new(source: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(MAX_WINDOW);
        Self { source, decoder, is_within_frame: false }
    }

    /// Begins the next frame; `false`: there is none.
    fn next_frame(&mut self) -> Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let mut skipped = (&mut self.source).take(length.into());
                    io::copy(&mut skipped, &mut io::sink())?;
                }
                Err(error) => return Err(Error::other(error)),
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, room: &mut [u8]) -> Result<usize> {
        loop {
            if !self.is_within_frame && !self.next_frame()? {
                return Ok(0);
            }
            self.is_within_frame = true;
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder.decode_blocks(&mut self.source, one).map_err(Error::other)?;
            }
            let count = self.decoder.read(room)?;
            if count != 0 || room.is_empty() {
                return Ok(count);
            }
            self.is_within_frame = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compressions_are_recognised() {
        let text = b"contents of a layer".repeat(1000);
        let gzip = {
            let mut bytes = Vec::new();
            let level = flate2::Compression::default();
            io::copy(&mut flate2::read::GzEncoder::new(&text[..], level), &mut bytes).unwrap();
            bytes
        };
        let zstd = ruzstd::encoding::compress_to_vec(
            &text[..],
            ruzstd::encoding::CompressionLevel::Fastest,
        );
        let skipped = b"\x5f\x2a\x4d\x18\x03\0\0\0abc";
        let forms = [
            text.clone(),
            gzip.clone(),
            zstd.clone(),
            [&zstd[..], skipped].concat(),
            [skipped, &zstd[..]].concat(),
        ];
        let read = |form: &[u8]| {
            let mut found = Vec::new();
            decode(form)?.read_to_end(&mut found)?;
            Result::Ok(found)
        };
        for form in &forms {
            assert!(read(form).unwrap() == text);
        }
        assert_eq!(read(&[&zstd[..], &zstd].concat()).unwrap().len(), 2 * text.len());
        for form in [gzip, zstd] {
            assert!(read(&form[..form.len() / 2]).is_err());
        }
    }
}
