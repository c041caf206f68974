//! Factories: quotas of kernel memory and of CPU time.

use core::cell::Cell;

use abi::Status;

use super::{Handle, Memory, NONE, Object, SIZES};
use crate::Result;

/// Maximum share of CPU time of a factory: exceeds the CPUs of any machine.
const MAX_SHARE: u64 = 4096 * abi::SHARE_OF_CPU;

/// Maximum depth of the factory tree.
const MAX_DEPTH: u8 = 16;

/// Quota of kernel memory (frames) and of CPU time, with the slabs charged to it.
pub struct Factory {
    pub(super) quota: Cell<u32>,
    pub(super) used: Cell<u32>,
    /// Maximum priority of scheduling contexts created from it.
    pub max_priority: u64,
    /// CPU time reserved for it, in units of 1 / [`abi::SHARE_OF_CPU`] of a CPU; 0: uses the share
    /// of the nearest ancestor that has one.
    share: u64,
    /// Unused part of the share.
    free_share: Cell<u64>,
    /// Nearest ancestor with a share of its own. It outlives this factory, whose memory is charged
    /// to it.
    share_owner: Option<Handle<Factory>>,
    pub(super) parent: Account,
    /// Number of ancestors, which may be destroyed together with this factory.
    depth: u8,
    /// Number of capabilities to this factory.
    pub caps: Cell<u32>,
    pub(super) partial: [Cell<u32>; SIZES],
}

/// Factory that an allocation is charged to; `None`: the root factory.
pub type Account = Option<Handle<Factory>>;

impl Object for Factory {
    const CLASS: u8 = 0;
}

impl Factory {
    pub(super) const fn new(
        quota: u32,
        max_priority: u64,
        share: u64,
        parent: Account,
        share_owner: Option<Handle<Factory>>,
        depth: u8,
    ) -> Self {
        Self {
            quota: Cell::new(quota),
            used: Cell::new(0),
            max_priority,
            share,
            free_share: Cell::new(share),
            share_owner,
            parent,
            depth,
            caps: Cell::new(0),
            partial: [const { Cell::new(NONE) }; SIZES],
        }
    }

    /// Frames not charged yet.
    pub fn available(&self) -> u32 {
        self.quota.get() - self.used.get()
    }

    pub(super) fn charge(&self, frames: u32) -> Result<()> {
        if frames > self.available() {
            return Err(Status::NoQuota);
        }
        self.used.set(self.used.get() + frames);
        Ok(())
    }

    pub(super) fn uncharge(&self, frames: u32) {
        self.used.set(self.used.get() - frames);
    }
}

impl Memory {
    /// Creates a factory with `quota` frames and, unless 0, `share` of CPU time, both taken from
    /// `parent` or the owner of its share (`NoQuota`). Fails with `BadRights` if the maximum
    /// priority exceeds the parent's, and with `Overflow` if the factory tree is too deep.
    pub fn new_factory(
        &self,
        parent: Account,
        quota: u32,
        max_priority: u64,
        share: u64,
    ) -> Result<Handle<Factory>> {
        let account = self.factory(parent)?;
        if max_priority > account.max_priority {
            return Err(Status::BadRights);
        }
        if share > MAX_SHARE {
            return Err(Status::BadArgument);
        }
        if account.depth >= MAX_DEPTH {
            return Err(Status::Overflow);
        }
        let share_owner = self.share_owner(parent);
        account.charge(quota)?;
        let factory =
            Factory::new(quota, max_priority, share, parent, share_owner, account.depth + 1);
        self.exchange_share(share_owner, 0, share)
            .and_then(|()| {
                self.alloc(parent, factory).inspect_err(|_| self.return_share(share_owner, share))
            })
            .inspect_err(|_| account.uncharge(quota))
    }

    /// Factory whose share of CPU time is charged for objects of `factory`; `None` if unlimited.
    pub(crate) fn share_owner(&self, factory: Account) -> Option<Handle<Factory>> {
        let account = factory.and_then(|handle| self.get(handle))?;
        if account.share != 0 { factory } else { account.share_owner }
    }

    /// Replaces a charge of `old` share units by `new`. Fails with `NoQuota`, without effect, if
    /// the share is exceeded.
    pub(crate) fn exchange_share(
        &self,
        share_owner: Option<Handle<Factory>>,
        old: u64,
        new: u64,
    ) -> Result<()> {
        let Some(share_owner) = share_owner.and_then(|handle| self.get(handle)) else {
            return Ok(());
        };
        let left = (share_owner.free_share.get() + old).checked_sub(new).ok_or(Status::NoQuota)?;
        share_owner.free_share.set(left);
        Ok(())
    }

    /// Returns `share` units of CPU time.
    pub(crate) fn return_share(&self, share_owner: Option<Handle<Factory>>, share: u64) {
        if let Some(share_owner) = share_owner.and_then(|handle| self.get(handle)) {
            share_owner.free_share.set(share_owner.free_share.get() + share);
        }
    }

    /// Destroys a factory without capabilities and charges, and returns its quota to its parent;
    /// likewise for its ancestors.
    pub fn destroy_factory(&self, handle: Handle<Factory>) {
        let mut next = Some(handle);
        while let Some(handle) = next {
            let Some(factory) = self.get(handle) else { return };
            if factory.caps.get() != 0 || factory.used.get() != 0 {
                return;
            }
            let quota = factory.quota.get();
            next = factory.parent;
            self.return_share(factory.share_owner, factory.share);
            self.free(handle);
            if let Ok(parent) = self.factory(next) {
                parent.uncharge(quota);
            }
        }
    }
}
