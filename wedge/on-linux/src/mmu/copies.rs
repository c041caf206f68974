//! Copies of user pages for execution, with protection keys ([`crate::mmu::exec_scan`]).

use linux_raw_sys::general as linux;
use wedge_core::mapped::Piece;

use crate::mmu::Mmu;
use crate::mmu::exec_scan::{ScannedPage, find, is_beginning, is_end};
use crate::mmu::host::{HostMap, MappingListener};
use crate::mmu::ram::PAGE;
use crate::mmu::space::{Steps, borders};
use proto::errno::Errno;

impl<H: HostMap + MappingListener> Mmu<'_, H> {
    /// Drops the executable copies of frames in a range of guest memory, given by its offset,
    /// before a write.
    pub(super) fn drop_code_copies(&mut self, offset: u64, length: u64) {
        let Steps { start, end, .. } = self.space.code.steps;
        if start != end {
            self.drop_range(start, end);
        }
        self.drop_mapped(self.vm.copies().start + offset, length, linux::PROT_EXEC);
    }

    /// Refreshes the copy of a guest page; returns whether it has changed. `None`: the page must
    /// not be executed.
    fn renew(&mut self, address: u64, offset: u64) -> Option<bool> {
        let memory = self.vm.memory;
        let copy = self.host.code_copy(offset);
        if memory.is_equal(address, copy).ok()? {
            return Some(false);
        }
        let mut bytes = [0; PAGE as usize];
        memory.read_slice(address, &mut bytes).ok()?;
        let scanned = ScannedPage::closed(bytes)?;
        let bytes = scanned.bytes();
        let changes = copy != bytes;
        if borders(copy) != borders(bytes) && (is_beginning(bytes).is_some() || is_end(bytes)) {
            self.copy_changed(self.vm.copies().start + offset);
        }
        *self.host.code_copy(offset) = *bytes;
        Some(changes)
    }

    /// Maps contiguous user pages executable and read-only, from a guest-physical address and its
    /// offset in the file on; returns the end. A page that must not be executed ends the run.
    pub(super) fn map_code(
        &mut self,
        linear: u64,
        size: u64,
        address: u64,
        offset: u64,
    ) -> Result<u64, Errno> {
        let mut mapped = 0;
        let Steps { start, end, .. } = self.space.code.steps;
        if start != end && start < linear + size && linear <= end {
            // The last stepped page may have been mapped without its neighbour.
            self.drop_range(start, end);
        }
        let mut before = self.space.code.end_of(linear.wrapping_sub(PAGE));
        let mut changes = false;
        while mapped < size {
            match self.renew(address + mapped, offset + mapped) {
                None => break,
                Some(changed) => changes |= changed,
            }
            let copy = self.host.code_copy(offset + mapped);
            if before.is_some_and(|[a, b]| find(&[a, b, copy[0], copy[1]], 0).is_some()) {
                break;
            }
            before = is_beginning(copy);
            mapped += PAGE;
        }
        if mapped == 0 {
            return Ok(linear);
        }
        if changes {
            self.host.serialize();
        }
        let rights = linux::PROT_READ | linux::PROT_EXEC;
        let offset_of_copy = self.vm.copies().start + offset;
        self.host.map(linear, mapped, rights, offset_of_copy)?;
        let piece = Piece { start: linear, end: linear + mapped, offset: offset_of_copy, rights };
        self.space.mapped.add(piece);
        self.forget(linear, linear + mapped);
        for page in (0..mapped).step_by(PAGE as usize) {
            let end = is_beginning(self.host.code_copy(offset + page));
            let full = end.and_then(|end| self.space.code.remember(linear + page, end));
            if let Some(other) = full {
                // The page can be faulted in again.
                self.drop_range(other, other + PAGE);
            }
        }
        if before.is_some() {
            // The next page may complete a sequence; it is scanned when it is executed.
            self.drop_range(linear + mapped, linear + mapped + PAGE);
        }
        Ok(linear + mapped)
    }

    /// Returns whether a page executes from the copy of a guest page.
    pub(super) fn is_copy_of(&self, page: u64, address: u64) -> bool {
        let piece = self.space.mapped.at(page);
        let mapped = piece.and_then(|piece| self.vm.original(piece.offset + (page - piece.start)));
        mapped.is_some() && mapped == self.vm.ram.offset(address).map(|(offset, _)| offset)
    }
}
