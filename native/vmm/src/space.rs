//! The guest's memory and doorbells in the kernel's address spaces of the guest: a guest-physical
//! one for all vCPUs, or a guest-virtual one for each (rung `user` of a vTLB).
//!
//! In a guest-virtual space pages are mapped when the guest uses them ([`GuestSpace::fill`]). The
//! guest's memory is listed here by guest-physical address; a fill holds the lock of the list, so
//! after [`GuestSpace::unmap`] no fill maps what was removed.

use heapless::Vec;
use native_rt::{Factory, Notification, Space, Status, Vm, Window};
use proto::channel::{MAX_VM_CHANNELS, SHARES};
use proto::start::{Vmm, slot};
use proto::vtlb::Rung;
use vmm_mem::{MAX_RANGES, PAGE_SIZE};
use vmm_vcpu::MAX_VCPUS;

use crate::{Cell, VM, platform, vcpu_slots};

/// Largest mapping in a guest-virtual space: 2 MiB, as in the kernel's vTLB.
pub const MAX_ORDER: u8 = 9;
/// Bits of a guest-virtual address that count.
const ADDRESS: u64 = (1 << 48) - 1;
/// Maximum number of regions: guest memory around its hole, and channels with their shares.
const MAX_REGIONS: usize = MAX_RANGES + 1 + MAX_VM_CHANNELS * (1 + SHARES);

/// The address spaces of this program's guest.
pub static SPACE: GuestSpace =
    GuestSpace(Cell::new(Regions { vms: Vec::new(), regions: Vec::new(), is_virtual: false }));

/// See the module.
pub struct GuestSpace(Cell<Regions>);

struct Regions {
    vms: Vec<Vm, MAX_VCPUS>,
    is_virtual: bool,
    regions: Vec<Region, MAX_REGIONS>,
}

/// Memory at a guest-physical address.
#[derive(Clone, Copy, Debug)]
struct Region {
    address: u64,
    window: Window,
    rights: u8,
}

/// A page to be mapped in a guest-virtual space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Guest-virtual address, of which the page number counts.
    pub linear: u64,
    /// Guest-physical address, likewise.
    pub physical: u64,
    /// Largest block around it with one translation and these rights: 2^order pages.
    pub order: u8,
    /// Rights ([`abi::rights`]).
    pub rights: u8,
    /// Rights that the access needs.
    pub needs: u8,
}

impl GuestSpace {
    /// Creates the address spaces of a VM. A guest-virtual one is charged to a factory of its own,
    /// so that the guest's use of memory cannot exhaust the kernel memory of the VMM.
    pub fn create(&self, plan: &Vmm) -> Result<(), Status> {
        let factory = Factory::at(slot::FACTORY);
        let mut this = self.0.lock();
        let Some(user) = plan.vtlb.filter(|plan| plan.rung == Rung::User) else {
            let vm = factory.vm(VM, platform::vm_mode(plan.vtlb))?;
            return this.vms.push(vm).map_err(|_| Status::Overflow);
        };
        this.is_virtual = true;
        for index in 0..plan.cpus.len() as u64 {
            let own = vcpu_slots(MAX_VCPUS) + 2 * index;
            let quota = factory.factory(own, user.pool.into(), 0, 0)?;
            let vm = quota.vm(own + 1, platform::vm_mode(plan.vtlb))?;
            this.vms.push(vm).map_err(|_| Status::Overflow)?;
        }
        Ok(())
    }

    /// Returns the space of a vCPU, and whether it is guest-virtual.
    pub fn of_vcpu(&self, index: usize) -> Option<(Vm, bool)> {
        let this = self.0.lock();
        let vm = this.vms.get(if this.is_virtual { index } else { 0 })?;
        Some((*vm, this.is_virtual))
    }

    /// Lets the guest access a window's memory at a guest-physical address.
    ///
    /// # Errors
    /// `Busy` if the range is in use, and those of `Delegate`; then part of it may be mapped.
    pub fn map(&self, window: Window, address: u64, rights: u8) -> Result<(), Status> {
        let mut this = self.0.lock();
        if !this.is_virtual {
            return this.vms.first().ok_or(Status::BadCapability)?.map(window, address, rights);
        }
        let region = Region { address, window, rights };
        if this.regions.iter().any(|other| other.overlaps(&region)) {
            return Err(Status::Busy);
        }
        this.regions.push(region).map_err(|_| Status::Overflow)
    }

    /// Takes memory in a window away from the guest.
    pub fn unmap(&self, window: Window) {
        self.0.lock().regions.retain(|region| !region.is_in(window));
        // An absent mapping counts as revoked.
        let _ = window.revoke();
    }

    /// Binds the guest's doorbell `index` to `bits` of a notification; 0 unbinds it.
    pub fn bind_doorbell(&self, index: u64, notification: Notification, bits: u64) {
        for vm in &self.0.lock().vms {
            // If the notification's owner has ended, the doorbell is already unbound.
            let _ = vm.bind_doorbell(index, notification, bits);
        }
    }

    /// Maps a page in a guest-virtual space, in the largest block that its memory allows, and
    /// returns the order of that. `None`: no memory of the guest, or one without the rights that
    /// the access needs.
    ///
    /// # Errors
    /// `NoQuota` if kernel memory for the mapping is exhausted.
    pub fn fill(&self, vm: Vm, page: &Page) -> Result<Option<u8>, Status> {
        let this = self.0.lock();
        let found = this.regions.iter().find_map(|region| region.block(page));
        let Some((window, linear, order, rights)) = found else { return Ok(None) };
        let mapped = match vm.map(window, linear, rights) {
            // Smaller pages, or fewer rights.
            Err(Status::Busy) => {
                vm.unmap_at(linear, order, false).and_then(|()| vm.map(window, linear, rights))
            }
            mapped => mapped,
        };
        match mapped {
            Ok(()) => Ok(Some(order)),
            // The peer of a channel has revoked its share.
            Err(Status::BadArgument) => Ok(None),
            Err(status) => Err(status),
        }
    }
}

impl Region {
    fn overlaps(&self, other: &Self) -> bool {
        self.address < other.address + other.window.length()
            && other.address < self.address + self.window.length()
    }

    fn is_in(&self, window: Window) -> bool {
        let offset = self.window.base().wrapping_sub(window.base());
        offset < window.length()
    }

    /// Returns the block of memory to be mapped for a page: its window, guest-virtual address,
    /// order and rights. `None` if the page is elsewhere, or lacks a right.
    fn block(&self, page: &Page) -> Option<(Window, u64, u8, u8)> {
        let rights = page.rights & self.rights;
        let (host, length) = (self.window.base(), self.window.length());
        let (offset, order) = block(page, self.address, host, length)?;
        let window = self.window.part(offset, PAGE_SIZE << order)?;
        let linear = page.linear & ADDRESS & !((PAGE_SIZE << order) - 1);
        (page.needs & !rights == 0).then_some((window, linear, order, rights))
    }
}

/// Returns the largest block around a page that is aligned in all three address spaces and inside
/// of the `length` bytes at guest-physical address `address`, which the VMM has at `host`: offset
/// and order. `None` if the page is elsewhere.
fn block(page: &Page, address: u64, host: u64, length: u64) -> Option<(u64, u8)> {
    let offset = page.physical.checked_sub(address).filter(|&offset| offset < length)?;
    let at = host + offset;
    (0..=page.order.min(MAX_ORDER)).rev().find_map(|order| {
        let size = PAGE_SIZE << order;
        let differs = (page.physical ^ page.linear | page.physical ^ at) & (size - 1);
        let first = offset.checked_sub(page.physical & (size - 1))?;
        let fits = first + size <= length && differs < PAGE_SIZE;
        fits.then_some((first, order))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_everywhere_and_inside() {
        const TWO_MIB: u64 = 2 << 20;
        const HIGH: u64 = 0xffff_8880_0000_0000;
        let page = |linear, physical, order| Page { linear, physical, order, rights: 0, needs: 0 };
        let length = 3 * TWO_MIB;
        for (page, address, host, expected) in [
            (page(HIGH + 0x20_5678, 0x20_5678, 9), 0, 4 * TWO_MIB, Some((TWO_MIB, 9))),
            (page(0x20_5678, 0x20_5678, 18), 0, 0, Some((TWO_MIB, 9))),
            (page(0x20_5678, 0x20_5678, 0), 0, 0, Some((0x20_5000, 0))),
            // The VMM has it at another offset from 2 MiB: 64 KiB.
            (page(0x20_5678, 0x20_5678, 9), 0, 0x1_0000, Some((0x20_0000, 4))),
            // The block would begin before the region, or end behind it.
            (page(0x1f_f000, 0x1f_f000, 9), 0x1f_0000, 0x1f_0000, Some((0, 4))),
            (page(0x60_1000, 0x60_1000, 9), 0x3000, 0x3000, Some((0x60_0000 - 0x3000, 1))),
            (page(0x7000, 0x4000, 9), 0x4000, 0x4000, Some((0, 0))),
            (page(0x3fff, 0x3fff, 0), 0x4000, 0x4000, None),
            (page(0, 0x4000 + length, 9), 0x4000, 0x4000, None),
            (page(0, u64::MAX, 9), 0x4000, 0x4000, None),
        ] {
            assert_eq!(block(&page, address, host, length), expected, "{page:x?} {host:#x}");
        }
    }
}
