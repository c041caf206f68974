//! Guest memory for the debugger: its layout, and translation of linear addresses.

/// Page size.
const PAGE: u64 = 4096;
/// Bits of a page-table entry (AMD APM vol. 2, section 5.3).
const PRESENT: u64 = 1;
const USER: u64 = 1 << 2;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// First guest-physical address of memory above 4 GiB.
const HIGH: u64 = 1 << 32;

/// Layout of guest memory: `low` bytes from guest-physical 0, the rest from 4 GiB.
#[derive(Clone, Copy, Debug)]
pub struct Ram {
    /// Bytes below 4 GiB.
    pub low: u64,
    /// Total size in bytes.
    pub size: u64,
}

impl Ram {
    /// Returns the offset of a guest-physical address in the file of guest memory, and the bytes
    /// that follow there.
    pub fn offset(self, address: u64) -> Option<(u64, u64)> {
        let (at, end) = match address.checked_sub(HIGH) {
            Some(above) => (self.low.checked_add(above)?, self.size),
            None => (address, self.low),
        };
        Some((at, end.checked_sub(at).filter(|&left| left != 0)?))
    }
}

/// Result of a translation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapped {
    /// Guest-physical address.
    pub address: u64,
    /// Bytes to the end of the page.
    pub left: u64,
    /// Accessible in user mode.
    pub is_users: bool,
}

/// Walks page tables with this number of levels (AMD APM vol. 2, section 5.3.3); see
/// [`LEVELS`](proto::hosted::debug::register::LEVELS). Access rights are ignored.
pub fn translate(
    levels: u64,
    root: u64,
    linear: u64,
    read: impl Fn(u64) -> Option<u64>,
) -> Option<Mapped> {
    let shifts: &[u32] = match levels {
        0 => {
            let left = PAGE - linear % PAGE;
            return Some(Mapped { address: linear, left, is_users: false });
        }
        4 => &[39, 30, 21, 12],
        5 => &[48, 39, 30, 21, 12],
        _ => return None,
    };
    let (mut table, mut is_users) = (root & ADDRESS, true);
    for &shift in shifts {
        let entry = read(table | (linear >> shift & 0x1ff) << 3)?;
        if entry & PRESENT == 0 {
            return None;
        }
        is_users &= entry & USER != 0;
        if shift == 12 || shift < 39 && entry & LARGE != 0 {
            let size = PAGE << (shift - 12);
            let inside = linear & (size - 1);
            let address = entry & ADDRESS & !(size - 1) | inside;
            return Some(Mapped { address, left: size - inside, is_users });
        }
        table = entry & ADDRESS;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn tables_of_all_sizes() {
        let entries = BTreeMap::from([
            (8, 0x1007),
            (0x1000, 0x2007),
            (0x2008, 0x4000_0081),
            (0x2000, 0x3007),
            (0x3000, 0x20_0081),
            (0x3008, 0x4007),
            (0x4000, 0x8000_0000_0000_5007),
        ]);
        let walk =
            |levels, root, linear| translate(levels, root, linear, |at| entries.get(&at).copied());
        let place = |address, left, is_users| Some(Mapped { address, left, is_users });
        let find = |linear| walk(4, 0x1fff, linear);
        assert_eq!(find(0x4000_1234), place(0x4000_1234, 0x3fff_edcc, false));
        assert_eq!(find(0x1234), place(0x20_1234, 0x1f_edcc, false));
        assert_eq!(find(0x20_0ffe), place(0x5ffe, 2, true));
        assert_eq!(find(0x20_1000), None);
        // Five levels, none, and invalid numbers.
        assert_eq!(walk(5, 0, 1 << 48 | 0x20_0ffe), place(0x5ffe, 2, true));
        assert_eq!(walk(5, 0, 0x20_0ffe), None);
        assert_eq!(walk(0, 0x1fff, 0x1234), place(0x1234, 0xdcc, false));
        assert_eq!(walk(0, 0, u64::MAX), place(u64::MAX, 1, false));
        assert!(
            [1, 2, 3, 6, u64::MAX].iter().all(|&levels| walk(levels, 0x1fff, 0x1234).is_none())
        );
        let ram = Ram { low: 0x3000, size: 0x5000 };
        assert_eq!((ram.offset(0x2fff), ram.offset(0x3000)), (Some((0x2fff, 1)), None));
        assert_eq!(
            (ram.offset(HIGH + 8), ram.offset(HIGH + 0x2000)),
            (Some((0x3008, 0x1ff8)), None)
        );
    }
}
