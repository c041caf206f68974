//! List of the guest pages that a back end has mapped, so that a flush unmaps only stale pages.
//!
//! Each piece is a run of pages that are contiguous both in the guest's address space and in its
//! memory; pieces are in ascending order without overlap. When the list overflows, it is incomplete
//! until it is cleared: pages may be mapped that are not in the list.

/// Page size in bytes.
const PAGE: u64 = 4096;

/// Contiguous run of mapped pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Piece {
    /// First linear address.
    pub start: u64,
    /// End, exclusive.
    pub end: u64,
    /// Offset of the first page in the file of guest memory, in bytes.
    pub offset: u64,
    /// Protection of the mapping (`PROT_` bits).
    pub rights: u32,
}

impl Piece {
    /// Returns the part of the piece between two addresses.
    fn part(&self, start: u64, end: u64) -> Option<Self> {
        let (start, end) = (start.max(self.start), end.min(self.end));
        (start < end).then(|| Self {
            start,
            end,
            offset: self.offset + (start - self.start),
            ..*self
        })
    }

    /// Returns whether `next` continues this piece with the same rights.
    fn continues(&self, next: &Self) -> bool {
        self.end == next.start
            && self.offset + (self.end - self.start) == next.offset
            && self.rights == next.rights
    }
}

/// List of mapped pages. All zeros is an empty list.
#[derive(Clone, Debug)]
pub struct Mapped<const MOST: usize> {
    used: usize,
    incomplete: bool,
    pieces: [Piece; MOST],
}

impl<const MOST: usize> Default for Mapped<MOST> {
    fn default() -> Self {
        Self { used: 0, incomplete: false, pieces: [Piece::default(); MOST] }
    }
}

impl<const MOST: usize> Mapped<MOST> {
    /// Returns the pieces in ascending order.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces[..self.used]
    }

    /// Returns the piece that contains an address.
    pub fn at(&self, address: u64) -> Option<Piece> {
        let index = self.pieces().partition_point(|piece| piece.end <= address);
        self.pieces().get(index).filter(|piece| piece.start <= address).copied()
    }

    /// Returns whether the list contains all mapped pages.
    pub fn is_complete(&self) -> bool {
        !self.incomplete
    }

    /// Empties the list and makes it complete.
    pub fn clear(&mut self) {
        (self.used, self.incomplete) = (0, false);
    }

    /// Adds mapped pages, which replace previous ones at the same addresses.
    pub fn add(&mut self, piece: Piece) {
        if piece.start >= piece.end
            || !(piece.start | piece.end | piece.offset).is_multiple_of(PAGE)
        {
            return;
        }
        let at = self.cut(piece.start, piece.end);
        let before = at.checked_sub(1).map(|index| self.pieces[index]);
        if let Some(before) = before.filter(|before| before.continues(&piece)) {
            self.pieces[at - 1] = Piece { end: piece.end, ..before };
        } else {
            self.insert(at, piece);
        }
    }

    /// Removes the pages between two addresses.
    pub fn remove(&mut self, start: u64, end: u64) {
        self.cut(start, end);
    }

    /// Removes everything between two addresses; returns the index of the next piece.
    fn cut(&mut self, start: u64, end: u64) -> usize {
        let first = self.pieces().partition_point(|piece| piece.end <= start);
        let behind = self.pieces().partition_point(|piece| piece.start < end);
        if first >= behind {
            return first;
        }
        let left = self.pieces[first].part(0, start);
        let right = self.pieces[behind - 1].part(end, u64::MAX);
        self.pieces.copy_within(behind..self.used, first);
        self.used -= behind - first;
        if let Some(right) = right {
            self.insert(first, right);
        }
        if let Some(left) = left {
            self.insert(first, left);
            return first + 1;
        }
        first
    }

    fn insert(&mut self, at: usize, piece: Piece) {
        if self.used == MOST {
            self.incomplete = true;
            return;
        }
        self.pieces.copy_within(at..self.used, at + 1);
        self.pieces[at] = piece;
        self.used += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Add { start: u64, pages: u64, offset: u64, rights: u32 },
        Remove { start: u64, pages: u64 },
        Clear,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0..40_u64, 1..9_u64, 0..4_u64, 1..3_u32).prop_map(|(start, pages, offset, rights)| {
                // Offsets that often continue the page before.
                Step::Add { start, pages, offset: start + 64 * offset, rights }
            }),
            4 => (0..40_u64, 0..12_u64).prop_map(|(start, pages)| Step::Remove { start, pages }),
            1 => Just(Step::Clear),
        ]
    }

    /// Offset and rights by page.
    fn model(pieces: &[Piece]) -> BTreeMap<u64, (u64, u32)> {
        let pages = |piece: &Piece| {
            let piece = *piece;
            (0..(piece.end - piece.start) / PAGE).map(move |page| {
                (piece.start / PAGE + page, (piece.offset / PAGE + page, piece.rights))
            })
        };
        pieces.iter().flat_map(pages).collect()
    }

    proptest! {
        #[test]
        fn a_page_is_what_was_mapped_last(steps in vec(step(), 0..60)) {
            let mut mapped = Mapped::<64>::default();
            let mut expected = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Add { start, pages, offset, rights } => {
                        let [first, end, at] = [start, start + pages, offset].map(|page| page * PAGE);
                        mapped.add(Piece { start: first, end, offset: at, rights });
                        expected.extend((0..pages).map(|page| (start + page, (offset + page, rights))));
                    }
                    Step::Remove { start, pages } => {
                        mapped.remove(start * PAGE, (start + pages) * PAGE);
                        expected.retain(|page, _| !(start..start + pages).contains(page));
                    }
                    Step::Clear => {
                        mapped.clear();
                        expected.clear();
                    }
                }
                prop_assert!(mapped.is_complete());
                prop_assert_eq!(&model(mapped.pieces()), &expected);
                prop_assert!(mapped.pieces().is_sorted_by(|one, next| one.end <= next.start));
                prop_assert!(mapped.pieces().iter().all(|piece| piece.start < piece.end));
            }
        }
    }

    fn piece(page: u64) -> Piece {
        // No piece continues the previous one.
        Piece { start: 2 * page * PAGE, end: (2 * page + 1) * PAGE, offset: 0, rights: 1 }
    }

    #[test]
    fn a_full_list_says_so_until_it_is_cleared() {
        let mut mapped = Mapped::<3>::default();
        for page in 0..3 {
            mapped.add(piece(page));
        }
        assert!(mapped.is_complete());
        mapped.add(piece(3));
        assert!(!mapped.is_complete());
        mapped.remove(0, u64::MAX);
        assert!(!mapped.is_complete() && mapped.pieces().is_empty());
        mapped.clear();
        assert!(mapped.is_complete());
        mapped.add(piece(1));
        assert_eq!(mapped.pieces(), [piece(1)]);
    }

    #[test]
    fn nonsense_is_nothing() {
        let mut mapped = Mapped::<3>::default();
        mapped.add(Piece { start: PAGE, end: PAGE, offset: 0, rights: 1 });
        mapped.add(Piece { start: 1, end: PAGE, offset: 0, rights: 1 });
        assert!(mapped.pieces().is_empty());
    }
}
