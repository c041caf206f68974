//! Compressed Linux kernels for AArch64, which the machine does not unpack: files of gzip
//! (`Image.gz`), and EFI programs with the kernel as a compressed payload (`vmlinuz.efi`; Linux,
//! drivers/firmware/efi/libstub/zboot-header.S). They are unpacked before the system starts, so
//! that no VMM has a decoder.

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::StreamingDecoder;
use std::io::Read;

/// Most bytes of a kernel, unpacked or not.
pub const LIMIT: u64 = 512 << 20;

const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Signature of the EFI program, its place, and those of the payload's offset, length (32 bits
/// each) and format (text that ends with a zero byte).
const ZBOOT: [u8; 4] = *b"zimg";
const SIGNATURE: usize = 4;
const PAYLOAD_OFFSET: usize = 8;
const PAYLOAD_LENGTH: usize = 12;
const FORMAT: usize = 24;
const FORMAT_LENGTH: usize = 32;

/// Returns the kernel in a compressed file; `None`: the file is not compressed.
///
/// # Errors
/// The file is damaged, its format is not gzip or Zstandard, or the kernel has more than [`LIMIT`]
/// bytes. The text continues one that names the file.
pub fn unpack(file: &[u8]) -> Result<Option<Vec<u8>>, String> {
    unpack_within(file, LIMIT)
}

fn unpack_within(file: &[u8], limit: u64) -> Result<Option<Vec<u8>>, String> {
    if file.starts_with(&GZIP) {
        return gzip(file, limit).map(Some);
    }
    if file.get(SIGNATURE..).is_none_or(|rest| !rest.starts_with(&ZBOOT)) {
        return Ok(None);
    }
    let word = |at: usize| {
        let bytes = file.get(at..)?.first_chunk()?;
        usize::try_from(u32::from_le_bytes(*bytes)).ok()
    };
    let payload = word(PAYLOAD_OFFSET).and_then(|from| {
        let length = word(PAYLOAD_LENGTH)?;
        file.get(from..from.checked_add(length)?)
    });
    let payload = payload.ok_or("the compressed kernel is not complete")?;
    let format = file.get(FORMAT..FORMAT + FORMAT_LENGTH).unwrap_or_default();
    let format = format.split(|&byte| byte == 0).next().unwrap_or_default();
    match format {
        b"gzip" => gzip(payload, limit),
        // Linux calls it by its number in its build rules, too.
        b"zstd" | b"zstd22" if payload.starts_with(&ZSTD) => zstd(payload, limit),
        _ => Err(format!(
            "the kernel is compressed as `{}`: only gzip and zstd are known",
            format.escape_ascii()
        )),
    }
    .map(Some)
}

fn gzip(packed: &[u8], limit: u64) -> Result<Vec<u8>, String> {
    read(MultiGzDecoder::new(packed), limit)
}

fn zstd(packed: &[u8], limit: u64) -> Result<Vec<u8>, String> {
    let decoder = StreamingDecoder::new(packed).map_err(|error| damaged(&error))?;
    read(decoder, limit)
}

fn read(from: impl Read, limit: u64) -> Result<Vec<u8>, String> {
    let mut kernel = Vec::new();
    let length = from.take(limit + 1).read_to_end(&mut kernel).map_err(|error| damaged(&error))?;
    match length as u64 > limit {
        true => Err(format!("the unpacked kernel has more than {limit} bytes")),
        false => Ok(kernel),
    }
}

fn damaged(error: &dyn std::fmt::Display) -> String {
    format!("the compressed kernel is damaged: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    const KERNEL: &[u8] = &[0x5a; 100_000];

    fn gzipped() -> Vec<u8> {
        let mut packed = Vec::new();
        let mut encoder = flate2::read::GzEncoder::new(KERNEL, flate2::Compression::fast());
        encoder.read_to_end(&mut packed).unwrap();
        packed
    }

    fn zboot(format: &str, payload: &[u8]) -> Vec<u8> {
        let mut file = b"MZ\0\0zimg".to_vec();
        file.extend(64_u32.to_le_bytes());
        file.extend((payload.len() as u32).to_le_bytes());
        file.resize(FORMAT, 0);
        file.extend(format.bytes());
        file.resize(64, 0);
        file.extend(payload);
        // What follows the payload is the program's.
        file.extend([0xcc; 32]);
        file
    }

    #[test]
    fn kernels_are_unpacked() {
        let zstd = compress_to_vec(KERNEL, CompressionLevel::Fastest);
        for packed in [gzipped(), zboot("gzip", &gzipped()), zboot("zstd", &zstd)] {
            assert!(unpack(&packed).unwrap().unwrap() == KERNEL);
        }
        for other in [&b""[..], b"MZ\0\0", KERNEL, b"MZ\0\0zimage?"] {
            assert_eq!(unpack(other), Ok(None));
        }
    }

    #[test]
    fn damaged_ones_are_refused() {
        let packed = gzipped();
        let refused = |file: &[u8], limit, reason: &str| {
            let error = unpack_within(file, limit).unwrap_err();
            assert!(error.contains(reason), "{error}");
        };
        refused(&packed[..packed.len() - 9], LIMIT, "damaged");
        refused(&packed, 99_999, "more than 99999 bytes");
        assert!(unpack_within(&packed, 100_000).is_ok());
        refused(
            &zboot("zstd", &compress_to_vec(KERNEL, CompressionLevel::Fastest)[..10]),
            LIMIT,
            "",
        );
        refused(&zboot("lzma", b"payload"), LIMIT, "compressed as `lzma`");
        refused(&zboot("zstd", b"no frame"), LIMIT, "compressed as `zstd`");
        refused(&zboot("gzip", &packed)[..200], LIMIT, "not complete");
        refused(&zboot("gzip", &packed)[..10], LIMIT, "not complete");
    }
}
