//! Linux' compressed kernel for AArch32, `zImage` (Linux, Documentation/arm/booting.rst): a program
//! that decompresses the kernel to the start of RAM, and runs anywhere behind it.

use crate::BootError;

/// Offset of the magic number, and its value; the start of the image and its end follow.
const MAGIC: (usize, u32) = (0x24, 0x016f_2818);
const START: usize = 0x28;
const END: usize = 0x2c;
/// Offset of the second magic number, and its value: with it, the offset of a table follows.
const SECOND_MAGIC: (usize, u32) = (0x34, 0x4545_4545);
const TABLE: usize = 0x38;
/// Tag of a table (`arch/arm/boot/compressed/head.S`) whose words are: its length, this tag, offset
/// of the size of the decompressed kernel, length of its BSS, offset from the start of RAM.
const TAG: u32 = 0x5a53_4c4b;
/// Length of the header in bytes.
const HEADER: usize = 0x3c;
/// Offset for kernels without such a table. The documentation recommends 32 MiB.
const DEFAULT_OFFSET: u64 = 32 << 20;
/// Alignment, and memory behind the image that it uses while it decompresses: BSS, stack and heap.
const ALIGNMENT: u64 = 2 << 20;
const WORKING_MEMORY: u64 = 1 << 20;
/// Largest distance from the start of RAM: the decompressed kernel is in the same 128 MiB.
const LIMIT: u64 = 128 << 20;

/// Place of an image in RAM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Offset from the start of RAM, behind the memory of the decompressed kernel: otherwise the
    /// image would move itself to where other things are.
    pub offset: u64,
    /// Bytes of memory that it uses.
    pub length: u64,
}

/// Returns a word of the image.
fn word(kernel: &[u8], at: usize) -> Option<u32> {
    let bytes = kernel.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

/// Returns whether the file is an image of this format.
pub fn is_one(kernel: &[u8]) -> bool {
    word(kernel, MAGIC.0) == Some(MAGIC.1)
}

/// Returns the place of an image.
///
/// # Errors
/// It is shorter than it states, or its decompressed kernel is too large.
pub fn place(kernel: &[u8]) -> Result<Place, BootError> {
    let actual = kernel.len() as u64;
    let short = |needed: u64| BootError::Truncated { needed, actual };
    let word_at = |at: usize| word(kernel, at).ok_or(short(HEADER as u64));
    let length = word_at(END)?.checked_sub(word_at(START)?).ok_or(BootError::BadHeader)?;
    if u64::from(length) > actual {
        return Err(short(length.into()));
    }
    let offset = decompressed_end(kernel).unwrap_or(DEFAULT_OFFSET);
    let offset = offset.max(DEFAULT_OFFSET).next_multiple_of(ALIGNMENT);
    let length = actual + WORKING_MEMORY;
    if offset + length > LIMIT {
        return Err(BootError::BadHeader);
    }
    Ok(Place { offset, length })
}

/// Returns the end of the decompressed kernel, as an offset from the start of RAM; `None`: the
/// image does not state it.
fn decompressed_end(kernel: &[u8]) -> Option<u64> {
    let table = word(kernel, TABLE)? as usize;
    if word(kernel, SECOND_MAGIC.0)? != SECOND_MAGIC.1
        || word(kernel, table.checked_add(4)?)? != TAG
    {
        return None;
    }
    let field = |index: usize| word(kernel, table.checked_add(4 * index)?);
    let size = word(kernel, field(2)? as usize)?;
    Some(u64::from(size) + u64::from(field(3)?) + u64::from(field(4)?))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An image of one page.
    pub(crate) fn image() -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        for (at, value) in [(MAGIC.0, MAGIC.1), (START, 0x1000), (END, 0x2000)] {
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// The same with a table, for a decompressed kernel of this size.
    fn image_with_table(size: u32) -> Vec<u8> {
        let mut bytes = image();
        let table = 0x100;
        let words = [
            (SECOND_MAGIC.0, SECOND_MAGIC.1),
            (TABLE, table),
            (0x104, TAG),
            (0x108, 0xffc),
            (0x10c, 0x5_0000),
            (0x110, 0x8000),
            (0xffc, size),
        ];
        for (at, value) in words {
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn images_are_behind_their_kernels() {
        let expected = |offset| Ok(Place { offset, length: 4096 + WORKING_MEMORY });
        assert!(is_one(&image()) && !is_one(&[0; 64]) && !is_one(&[]));
        assert_eq!(place(&image()), expected(32 << 20));
        assert_eq!(place(&image_with_table(10 << 20)), expected(32 << 20));
        assert_eq!(place(&image_with_table(40 << 20)), expected(42 << 20));
    }

    #[test]
    fn images_with_a_wrong_header_are_refused() {
        for size in [126 << 20, u32::MAX] {
            assert_eq!(place(&image_with_table(size)), Err(BootError::BadHeader));
        }
        let short = &image()[..2048];
        assert_eq!(place(short), Err(BootError::Truncated { needed: 4096, actual: 2048 }));
        let header = &image()[..0x28];
        assert!(matches!(place(header), Err(BootError::Truncated { needed: 0x3c, actual: 0x28 })));
        let mut wrong = image();
        wrong[START..START + 4].copy_from_slice(&0x3000_u32.to_le_bytes());
        assert_eq!(place(&wrong), Err(BootError::BadHeader));
        // A table that is not in the image is none.
        for at in [TABLE, 0x108] {
            let mut wrong = image_with_table(60 << 20);
            wrong[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
            assert_eq!(place(&wrong).map(|place| place.offset), Ok(32 << 20));
        }
    }
}
