//! Little-endian bytes in message words.

/// Returns the number of words that hold `length` bytes.
pub const fn words(length: usize) -> usize {
    length.div_ceil(8)
}

/// Packs as many of `bytes` as fit `words`; returns the number of words used. The last word is
/// padded with zeros.
pub fn pack(bytes: &[u8], words: &mut [u64]) -> usize {
    let mut used = 0;
    for (chunk, word) in bytes.chunks(8).zip(words) {
        let mut raw = [0; 8];
        raw[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_le_bytes(raw);
        used += 1;
    }
    used
}

/// Unpacks `length` bytes of `words` into `bytes`, limited by the length of both; returns the
/// unpacked part.
pub fn unpack<'a>(words: &[u64], length: usize, bytes: &'a mut [u8]) -> &'a mut [u8] {
    let length = length.min(bytes.len()).min(8 * words.len());
    let bytes = &mut bytes[..length];
    for (chunk, word) in bytes.chunks_mut(8).zip(words) {
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        for length in 0..=32 {
            let bytes: Vec<u8> = (1..=length as u8).collect();
            let mut packed = [u64::MAX; 4];
            assert_eq!(pack(&bytes, &mut packed), words(length));
            assert_eq!(unpack(&packed, length, &mut [0; 40]), bytes);
        }
    }

    #[test]
    fn never_beyond_either_buffer() {
        let mut packed = [0; 2];
        assert_eq!(pack(&[7; 40], &mut packed), 2);
        assert_eq!(unpack(&packed, usize::MAX, &mut [0; 64]).len(), 16);
        assert_eq!(unpack(&packed, 16, &mut [0; 3]), [7; 3]);
    }
}
