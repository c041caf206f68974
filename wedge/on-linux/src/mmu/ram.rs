//! Layout of guest memory: guest-physical addresses, and offsets in the file that holds it.

use core::ops::Range;

use proto::hosted::{Start, layout};

/// Page size in bytes.
pub const PAGE: u64 = 4096;
/// Guest-physical address of the memory after the hole below it.
pub const FOUR_GIB: u64 = 1 << 32;

/// Layout of guest memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ram {
    /// Length of the part from address 0 on in bytes.
    pub low: u64,
    /// Length of the part from 4 GiB on in bytes.
    pub high: u64,
    /// Guest-physical address of the kernel image. Memory below it is not mapped there: a copy by
    /// the kernel that begins in user mode's memory ends at it.
    pub image_start: u64,
}

impl Ram {
    /// Creates the layout from the loader's record.
    pub fn new(start: &Start) -> Self {
        let low = start.memory.min(start.hole);
        let image_start = (start.code & !(PAGE - 1)).saturating_sub(layout::IMAGE);
        Self { low, high: start.memory - low, image_start }
    }

    /// Returns its length in bytes.
    pub fn length(&self) -> u64 {
        self.low + self.high
    }

    /// Returns the offset of a guest-physical address in the file of guest memory, and the number
    /// of bytes that follow.
    pub fn offset(&self, address: u64) -> Option<(u64, u64)> {
        if address < self.low {
            return Some((address, self.low - address));
        }
        let above = address.checked_sub(FOUR_GIB)?;
        (above < self.high).then(|| (self.low + above, self.high - above))
    }

    /// Returns the guest-physical address of an offset in the file.
    pub fn address(&self, offset: u64) -> Option<u64> {
        match offset.checked_sub(self.low) {
            None => Some(offset),
            Some(above) => (above < self.high).then_some(FOUR_GIB + above),
        }
    }

    /// Returns the guest-physical memory of the kernel image's mapping.
    pub fn image(&self) -> Range<u64> {
        self.image_start..self.low.min(layout::IMAGE_LENGTH)
    }

    /// Returns the address and the length of the kernel image's mapping.
    pub fn image_mapping(&self) -> (u64, u64) {
        let image = self.image();
        (layout::IMAGE + image.start, image.end.saturating_sub(image.start))
    }

    /// Returns the offset of a vCPU's code copies in the file, with protection keys.
    pub fn copies(&self, vcpu: usize) -> u64 {
        self.length() * (1 + vcpu as u64)
    }
}

/// Returns whether an address may be mapped on demand: not permanently mapped, and not the wedge's.
pub fn is_filled_in(linear: u64) -> bool {
    is_user(linear) || is_kernel(linear)
}

/// Returns whether an address belongs to user mode.
pub fn is_user(linear: u64) -> bool {
    linear < layout::TASK_SIZE && !(layout::IMAGE..layout::LOW_END).contains(&linear)
}

/// Returns whether an address belongs to the kernel and is mapped on demand. Such mappings are the
/// same in all processes.
pub fn is_kernel(linear: u64) -> bool {
    (layout::MODULES..layout::MODULES_END).contains(&linear)
        || (layout::FIXMAP..layout::LOW_END).contains(&linear)
        || (layout::VMALLOC..layout::GUEST_END).contains(&linear)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAM: Ram = Ram { low: 0x30_0000, high: 0x10_0000, image_start: 0x10_0000 };

    #[test]
    fn the_file_has_no_hole() {
        assert_eq!(RAM.offset(0x2f_f000), Some((0x2f_f000, 0x1000)));
        assert_eq!(RAM.offset(0x30_0000), None);
        assert_eq!(RAM.offset(FOUR_GIB), Some((0x30_0000, 0x10_0000)));
        assert_eq!(RAM.offset(FOUR_GIB + 0x10_0000), None);
        assert_eq!(RAM.length(), 0x40_0000);
    }

    #[test]
    fn addresses_and_offsets_are_inverse() {
        for offset in (0..RAM.length()).step_by(0x8_0000) {
            let address = RAM.address(offset).unwrap();
            assert_eq!(RAM.offset(address).map(|(offset, _)| offset), Some(offset));
        }
        assert_eq!(RAM.address(RAM.length()), None);
    }

    #[test]
    fn copies_follow_guest_memory() {
        assert_eq!([RAM.copies(0), RAM.copies(1)], [0x40_0000, 0x80_0000]);
    }

    #[test]
    fn the_image_is_at_most_as_long_as_its_place() {
        assert_eq!(RAM.image(), 0x10_0000..0x30_0000);
        assert_eq!(RAM.image_mapping(), (layout::IMAGE + 0x10_0000, 0x20_0000));
        assert_eq!(Ram { low: 1 << 31, ..RAM }.image().end, layout::IMAGE_LENGTH);
    }

    #[test]
    fn the_wedge_is_neither_the_users_nor_the_kernels() {
        for linear in
            [layout::WEDGE, layout::SHARED, layout::PRIVATE, layout::WEDGE_END - 1, layout::HOST]
        {
            assert!(!is_filled_in(linear), "{linear:#x}");
        }
        // Permanent mappings.
        assert!(!is_filled_in(layout::IMAGE) && !is_filled_in(layout::DIRECT));
    }

    #[test]
    fn user_mode_and_kernel_have_their_own_addresses() {
        for linear in [0, layout::IMAGE - 1, layout::LOW_END, layout::TASK_SIZE - 1] {
            assert!(is_user(linear) && !is_kernel(linear), "{linear:#x}");
        }
        for linear in [layout::MODULES, layout::FIXMAP, layout::VMALLOC, layout::GUEST_END - 1] {
            assert!(is_kernel(linear) && !is_user(linear), "{linear:#x}");
        }
    }
}
