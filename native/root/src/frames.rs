//! Allocator of physical memory.

use heapless::Vec;

/// Maximum number of separate free ranges.
const MAX_RANGES: usize = 160;

/// A range of page frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Number of the first frame.
    pub first: u64,
    /// Number of frames.
    pub count: u64,
}

impl Run {
    const fn end(self) -> u64 {
        self.first + self.count
    }
}

#[derive(Clone, Copy, Debug)]
struct Free {
    run: Run,
    /// Ranges of different regions are never joined.
    region: usize,
}

/// The free page frames: disjoint ranges in ascending order.
#[derive(Default)]
pub struct Frames {
    free: Vec<Free, MAX_RANGES>,
    /// Freed frames that could not be tracked.
    untracked: u64,
}

impl Frames {
    /// Adds a region of free frames above all others. Returns `false` if there are too many.
    pub fn add(&mut self, region: usize, run: Run) -> bool {
        self.free.push(Free { run, region }).is_ok()
    }

    /// Allocates `count` contiguous frames, aligned to `align` frames, from the smallest range that
    /// fits: large ranges are kept for large requests.
    pub fn allocate(&mut self, count: u64, align: u64) -> Option<Run> {
        let fits = |free: &Free| {
            let first = free.run.first.checked_next_multiple_of(align)?;
            let end = first.checked_add(count)?;
            (count != 0 && end <= free.run.end()).then_some(first)
        };
        let (index, first) = self
            .free
            .iter()
            .enumerate()
            .filter_map(|(index, free)| Some((free.run.count, index, fits(free)?)))
            .min()
            .map(|(_, index, first)| (index, first))?;
        let Free { run, region } = self.free[index];
        let below = Run { first: run.first, count: first - run.first };
        let above = Run { first: first + count, count: run.end() - first - count };
        match (below.count, above.count) {
            (0, 0) => {
                self.free.remove(index);
            }
            (_, 0) => self.free[index].run = below,
            (0, _) => self.free[index].run = above,
            _ => {
                self.free.insert(index + 1, Free { run: above, region }).ok()?;
                self.free[index].run = below;
            }
        }
        Some(Run { first, count })
    }

    /// Frees frames of a region.
    pub fn free(&mut self, region: usize, run: Run) {
        let index = self.free.partition_point(|free| free.run.first < run.first);
        let joins_above = self
            .free
            .get(index)
            .is_some_and(|above| above.region == region && above.run.first == run.end());
        let joins_below = index > 0
            && self.free[index - 1].region == region
            && self.free[index - 1].run.end() == run.first;
        match (joins_below, joins_above) {
            (true, true) => {
                let above = self.free.remove(index);
                self.free[index - 1].run.count += run.count + above.run.count;
            }
            (true, false) => self.free[index - 1].run.count += run.count,
            (false, true) => {
                self.free[index].run.first = run.first;
                self.free[index].run.count += run.count;
            }
            (false, false) => {
                if self.free.insert(index, Free { run, region }).is_err() {
                    self.untracked += run.count;
                }
            }
        }
    }

    /// Returns the number of separate free ranges.
    pub fn pieces(&self) -> u64 {
        self.free.len() as u64
    }

    /// Returns the number of free frames.
    pub fn count(&self) -> u64 {
        self.free.iter().map(|free| free.run.count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames() -> Frames {
        let mut frames = Frames::default();
        assert!(frames.add(0, Run { first: 3, count: 10 }));
        assert!(frames.add(1, Run { first: 13, count: 1000 }));
        frames
    }

    #[test]
    fn aligned_and_from_the_smallest() {
        let mut frames = frames();
        assert_eq!(frames.allocate(4, 4), Some(Run { first: 4, count: 4 }));
        assert_eq!(frames.allocate(2, 1), Some(Run { first: 8, count: 2 }));
        assert_eq!(frames.allocate(512, 512), None, "there are as many, but not aligned");
        assert_eq!(frames.allocate(256, 256), Some(Run { first: 256, count: 256 }));
        assert_eq!(frames.allocate(0, 1), None);
        assert_eq!(frames.allocate(u64::MAX, 1), None);
    }

    #[test]
    fn freed_frames_are_joined() {
        let mut frames = frames();
        let all = frames.count();
        let mut taken: Vec<Run, 64> = Vec::new();
        for count in 1..40 {
            if let Some(run) = frames.allocate(count, count.next_power_of_two()) {
                assert!(
                    taken.iter().all(|other| other.end() <= run.first || run.end() <= other.first)
                );
                taken.push(run).unwrap();
            }
        }
        // An order that is neither that of allocation nor its reverse.
        taken.sort_by_key(|run| run.first * 7919 % 101);
        for run in taken {
            frames.free((run.first >= 13) as usize, run);
        }
        assert_eq!(frames.count(), all);
        assert_eq!(frames.free.len(), 2, "joined again, but not across regions");
        assert_eq!(frames.untracked, 0);
    }
}
