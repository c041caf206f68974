//! Dispatch of accesses to devices by address.
//!
//! Invariants: regions are sorted by base, are not empty, do not wrap and do not overlap. Every
//! byte of an access reaches at most one device, in ascending order, and a device sees only
//! naturally aligned accesses of a supported width.

use crate::Access;

/// A range of addresses and its device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// First address.
    pub base: u64,
    /// Length in bytes.
    pub len: u64,
    /// Device number, chosen by the board.
    pub device: u16,
    /// [`Access::offset`] at `base`: one device may have several ranges.
    pub offset: u64,
    /// Narrowest supported access, in bytes (a power of two, at most 8). A narrower read extracts
    /// its bytes from a wider one; a narrower write is dropped.
    pub min: u8,
    /// Widest supported access, in bytes (a power of two, at most 8). A wider access is split.
    pub max: u8,
}

impl Region {
    /// `len` byte-wide registers at `base`, seen by the device from offset 0.
    pub const fn bytes(base: u64, len: u64, device: u16) -> Self {
        Self { base, len, device, offset: 0, min: 1, max: 1 }
    }

    /// `len` bytes of 32-bit registers at `base`, seen by the device from offset 0.
    pub const fn words(base: u64, len: u64, device: u16) -> Self {
        Self { base, len, device, offset: 0, min: 4, max: 4 }
    }

    /// The same region, seen by the device from `offset`.
    pub const fn at(self, offset: u64) -> Self {
        Self { offset, ..self }
    }

    /// The same region with accesses of `min` to `max` bytes.
    pub const fn widths(self, min: u8, max: u8) -> Self {
        Self { min, max, ..self }
    }

    const fn contains(&self, address: u64) -> bool {
        address >= self.base && address - self.base < self.len
    }

    fn valid(&self) -> bool {
        let width = |w: u8| w.is_power_of_two() && w <= 8;
        self.len != 0
            && self.base.checked_add(self.len - 1).is_some()
            && self.offset.checked_add(self.len - 1).is_some()
            && width(self.min)
            && width(self.max)
            && self.min <= self.max
            // Else a widened read would leave the region.
            && self.offset.is_multiple_of(self.min.into())
            && self.len.is_multiple_of(self.min.into())
    }
}

/// Reason for rejecting a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MapError {
    /// The region overlaps another region.
    Overlap,
    /// The table is full.
    Full,
    /// The region is empty, wraps, or its widths are invalid: not powers of two up to 8 that fit
    /// its place.
    Invalid,
}

/// One part of an access, as one device sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// The device, or `None` if no device responds.
    pub device: Option<u16>,
    /// The access, from the start of the device; without a device, from address 0.
    pub access: Access,
}

/// A sorted table of up to `N` regions.
#[derive(Clone, Debug)]
pub struct Map<const N: usize> {
    regions: [Region; N],
    used: usize,
}

impl<const N: usize> Default for Map<N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const N: usize> Map<N> {
    /// An empty table.
    pub const fn new() -> Self {
        Self { regions: [Region::bytes(0, 0, 0); N], used: 0 }
    }

    /// Inserts a region.
    ///
    /// # Errors
    /// See [`MapError`]; the table is then unchanged.
    pub fn insert(&mut self, region: Region) -> Result<(), MapError> {
        if !region.valid() {
            return Err(MapError::Invalid);
        }
        let at = self.regions().partition_point(|r| r.base < region.base);
        let before = at.checked_sub(1).map(|i| self.regions[i]);
        let after = self.regions().get(at);
        if before.is_some_and(|r| r.contains(region.base))
            || after.is_some_and(|r| region.contains(r.base))
        {
            return Err(MapError::Overlap);
        }
        if self.used == N {
            return Err(MapError::Full);
        }
        self.regions.copy_within(at..self.used, at + 1);
        self.regions[at] = region;
        self.used += 1;
        Ok(())
    }

    /// Removes the region that starts at `base` (a PCI device moves its registers).
    pub fn remove(&mut self, base: u64) -> Option<Region> {
        let at = self.regions().iter().position(|r| r.base == base)?;
        let region = self.regions[at];
        self.regions.copy_within(at + 1..self.used, at);
        self.used -= 1;
        Some(region)
    }

    /// The regions, by ascending base.
    pub fn regions(&self) -> &[Region] {
        &self.regions[..self.used]
    }

    /// The region at `address`.
    #[inline]
    pub fn find(&self, address: u64) -> Option<&Region> {
        let at = self.regions().partition_point(|r| r.base <= address);
        self.regions().get(at.wrapping_sub(1)).filter(|r| r.contains(address))
    }

    /// Reads `size` (1 to 8) bytes at `address` through `device`, which is called once per piece.
    /// The caller chooses the value of a piece without device (on a PC: [`Access::open_bus`]).
    #[inline]
    pub fn read(&self, address: u64, size: u8, mut device: impl FnMut(Piece) -> u64) -> u64 {
        match self.whole(address, size) {
            Some(piece) => device(piece) & piece.access.open_bus(),
            None => self.read_split(address, size, &mut device),
        }
    }

    /// Writes `size` (1 to 8) bytes at `address` through `device`, which is called once per piece
    /// with the bytes of that piece.
    #[inline]
    pub fn write(&self, address: u64, size: u8, value: u64, mut device: impl FnMut(Piece, u64)) {
        match self.whole(address, size) {
            Some(piece) => device(piece, value & piece.access.open_bus()),
            None => self.write_split(address, size, value, &mut device),
        }
    }

    /// Common case: one device supports the access as it is.
    #[inline]
    fn whole(&self, address: u64, size: u8) -> Option<Piece> {
        let region = self.find(address)?;
        let start = address - region.base;
        let offset = region.offset + start;
        let fits = size.is_power_of_two()
            && size >= region.min
            && size <= region.max
            && offset & u64::from(size - 1) == 0
            && region.len - start >= u64::from(size);
        fits.then_some(Piece { device: Some(region.device), access: Access::new(offset, size) })
    }

    #[cold]
    fn read_split(&self, address: u64, size: u8, device: &mut dyn FnMut(Piece) -> u64) -> u64 {
        let mut value = 0;
        let mut done = 0;
        while done < size.min(8) {
            let part = self.part(address.wrapping_add(done.into()), size.min(8) - done);
            let bytes = Access::new(0, part.bytes).open_bus();
            let read = device(part.piece) >> (8 * part.skip) & bytes;
            value |= read << (8 * done);
            done += part.bytes;
        }
        value
    }

    #[cold]
    fn write_split(&self, address: u64, size: u8, value: u64, device: &mut dyn FnMut(Piece, u64)) {
        let mut done = 0;
        while done < size.min(8) {
            let at = address.wrapping_add(done.into());
            let part = self.part(at, size.min(8) - done);
            let bytes = Access::new(0, part.bytes).open_bus();
            let piece = if part.bytes == part.piece.access.size {
                part.piece
            } else {
                Piece { device: None, access: Access::new(at, part.bytes) }
            };
            device(piece, value >> (8 * done) & bytes);
            done += part.bytes;
        }
    }

    /// The first piece of an access of `left` bytes at `address`.
    fn part(&self, address: u64, left: u8) -> Part {
        let room = |end: u64| u8::try_from(end).unwrap_or(u8::MAX).min(left);
        let Some(region) = self.find(address) else {
            let next = self.regions().partition_point(|r| r.base <= address);
            let gap = self.regions().get(next).map_or(u64::MAX, |r| r.base - address);
            let bytes = aligned(address, room(gap), 8);
            return Part {
                piece: Piece { device: None, access: Access::new(address, bytes) },
                skip: 0,
                bytes,
            };
        };
        let start = address - region.base;
        let offset = region.offset + start;
        let room = room(region.len - start);
        let mut bytes = aligned(offset, room, region.max);
        let mut access = Access::new(offset, bytes);
        let mut skip = 0;
        if bytes < region.min {
            access = Access::new(offset & !u64::from(region.min - 1), region.min);
            skip = (offset - access.offset) as u8;
            bytes = room.min(region.min - skip);
        }
        Part { piece: Piece { device: Some(region.device), access }, skip, bytes }
    }
}

/// A piece, and the bytes of it that belong to the access.
struct Part {
    piece: Piece,
    skip: u8,
    bytes: u8,
}

/// The widest naturally aligned access at `offset` within `room` (at least 1) bytes, at most `max`
/// wide.
fn aligned(offset: u64, room: u8, max: u8) -> u8 {
    let mut size = max;
    while size > room || offset & u64::from(size - 1) != 0 {
        size /= 2;
    }
    size
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    fn map() -> Map<4> {
        let mut map = Map::new();
        map.insert(Region::words(0x100, 0x20, 2)).unwrap();
        map.insert(Region::bytes(0x20, 2, 0)).unwrap();
        map.insert(Region::bytes(0x22, 6, 1).at(4).widths(1, 4)).unwrap();
        map
    }

    #[test]
    fn rejects_invalid_regions() {
        let mut map = map();
        let before = map.regions().to_vec();
        for region in [
            Region::bytes(0x21, 1, 9),
            Region::bytes(0x1f, 2, 9),
            Region::bytes(0, 0x1000, 9),
            Region::bytes(0x11f, 1, 9),
        ] {
            assert_eq!(map.insert(region), Err(MapError::Overlap));
        }
        for region in [
            Region::bytes(0x50, 0, 9),
            Region::bytes(u64::MAX, 2, 9),
            Region::bytes(0x50, 4, 9).widths(1, 3),
            Region::bytes(0x50, 4, 9).widths(4, 2),
            Region::words(0x50, 4, 9).at(2),
            Region::words(0x50, 6, 9),
        ] {
            assert_eq!(map.insert(region), Err(MapError::Invalid), "{region:?}");
        }
        assert_eq!(map.regions(), before);
        map.insert(Region::bytes(u64::MAX, 1, 9)).unwrap();
        assert_eq!(map.insert(Region::bytes(0x50, 1, 9)), Err(MapError::Full));
        assert_eq!(map.find(u64::MAX).unwrap().device, 9);
        assert_eq!(map.remove(0x22).unwrap().device, 1);
        assert!(map.find(0x22).is_none());
        assert_eq!(map.remove(0x22), None);
    }

    #[test]
    fn splits_by_width_region_and_alignment() {
        let map = map();
        let pieces = |address, size| {
            let mut pieces = Vec::new();
            map.write(address, size, 0x8877_6655_4433_2211, |p, v| {
                pieces.push((p.device, p.access.offset, p.access.size, v));
            });
            pieces
        };
        assert_eq!(pieces(0x20, 2), [(Some(0), 0, 1, 0x11), (Some(0), 1, 1, 0x22)]);
        assert_eq!(
            pieces(0x21, 4),
            [(Some(0), 1, 1, 0x11), (Some(1), 4, 2, 0x3322), (Some(1), 6, 1, 0x44)]
        );
        assert_eq!(pieces(0x26, 4), [(Some(1), 8, 2, 0x2211), (None, 0x28, 2, 0x4433)]);
        assert_eq!(pieces(0x100, 8), [(Some(2), 0, 4, 0x4433_2211), (Some(2), 4, 4, 0x8877_6655)]);
        assert_eq!(pieces(0x102, 1), [(None, 0x102, 1, 0x11)], "a partial write is dropped");
        assert_eq!(map.read(0x102, 2, |_| 0x4433_2211), 0x4433, "a partial read is cut out");
    }

    proptest! {
        /// Each byte of any access is read and written as by a bytewise access.
        #[test]
        fn every_byte_reaches_its_place(address in 0_u64..0x140, size in 1_u8..=8, value: u64) {
            let map = map();
            let byte = |piece: Piece, i: u8| {
                let at = piece.access.offset + u64::from(i);
                (at as u8).wrapping_mul(7) ^ piece.device.map_or(0xff, |d| d as u8 * 16)
            };
            let read = |piece: Piece| {
                (0..piece.access.size).fold(0, |v, i| v | u64::from(byte(piece, i)) << (8 * i))
            };
            let whole = map.read(address, size, read);
            for i in 0..size {
                let one = map.read(address + u64::from(i), 1, read);
                prop_assert_eq!(whole >> (8 * i) & 0xff, one);
            }
            let mut written = Vec::new();
            map.write(address, size, value, |piece, v| {
                if piece.device.is_some() {
                    assert_eq!(piece.access.offset % u64::from(piece.access.size), 0);
                }
                for i in 0..piece.access.size {
                    written.push((v >> (8 * i)) as u8);
                }
            });
            prop_assert_eq!(&written[..], &value.to_le_bytes()[..usize::from(size)]);
        }
    }
}
