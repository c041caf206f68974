//! Delegation and recursive revocation, in bounded steps.

use super::{Extent, GUEST_BITS, MAX_CAPABILITY_ORDER, Space, USER_PAGES, WORD_ORDER, units, work};
use crate::arch::Arch;
use crate::object::*;
use crate::pool::Handle;
use crate::table::{self, Format};
use crate::tree::Tree;
use crate::{Kernel, Result};
use abi::{Item, ItemKind, Status, rights};

/// A delegation from a task to an address space.
pub struct Delegation<A: Arch> {
    /// Delegating task.
    pub from: Handle<Task<A>>,
    /// Kind, size and rights of the delegated units.
    pub item: Item,
    /// First unit in the delegating task.
    pub source: u64,
    /// Receiving address space.
    pub to: SpaceRef<A>,
    /// First unit in the receiving address space.
    pub destination: u64,
}

impl<A: Arch> Delegation<A> {
    /// Checks bounds and alignment.
    fn check(&self) -> Result<()> {
        let size = units(self.item.order);
        check_range(self.item, self.to, self.destination)?;
        if self.source & (size - 1) != 0 || self.source.checked_add(size).is_none() {
            return Err(Status::BadArgument);
        }
        if self.item.kind == ItemKind::Capability && self.item.order > MAX_CAPABILITY_ORDER {
            return Err(Status::Overflow);
        }
        Ok(())
    }
}

/// Checks bounds and alignment of a range of a space.
fn check_range<A: Arch>(item: Item, space: SpaceRef<A>, base: u64) -> Result<()> {
    let size = units(item.order);
    let limit = match (item.kind, space) {
        (ItemKind::Memory, SpaceRef::Task(_)) => USER_PAGES,
        (ItemKind::Memory, SpaceRef::Vm(_)) => 1 << (GUEST_BITS - abi::PAGE_SHIFT),
        (ItemKind::Port, _) => 1 << 16,
        (ItemKind::Capability, SpaceRef::Task(_)) => MAX_SLOTS,
        (ItemKind::Capability, SpaceRef::Vm(_)) => return Err(Status::BadArgument),
    };
    let fits = base.checked_add(size).is_some_and(|end| end <= limit);
    if fits && base & (size - 1) == 0 { Ok(()) } else { Err(Status::BadArgument) }
}

/// Part of a delegation that becomes one mapping.
struct Part<A: Arch> {
    handle: Handle<MapNode<A>>,
    extent: Extent,
}

impl<A: Arch> Kernel<A> {
    /// Maximum order of a mapping, whose page-table entries are written in one step.
    pub fn max_order() -> u8 {
        (9 * A::Host::max_leaf_level().min(A::Nested::max_leaf_level()) + 8) as u8
    }

    // ---- delegation --------------------------------------------------------------------------

    /// Executes a step of a delegation: checks all units first, then maps them. `done` counts the
    /// units of both passes and starts at 0. `Ok(false)`: out of budget; call again with the
    /// updated `done`. A forged value of `done` at most skips checks of the first pass. Mappings
    /// made so far remain if the quota is exhausted, or if source or destination change between two
    /// steps.
    pub fn delegate_part(
        &self,
        delegation: &Delegation<A>,
        done: &mut u64,
        budget: &mut u32,
    ) -> Result<bool> {
        delegation.check()?;
        let sender = self.memory.get(delegation.from).ok_or(Status::Aborted)?;
        let space = self.space(delegation.to).filter(|space| !space.dying.get());
        let space = space.ok_or(Status::Aborted)?;
        let size = units(delegation.item.order);
        if *done > 2 * size {
            return Err(Status::BadArgument);
        }
        if delegation.item.kind == ItemKind::Capability {
            return self.delegate_capabilities(sender, delegation, done, budget);
        }
        let free_from = delegation.destination + done.saturating_sub(size);
        let targets = Self::tree(space, delegation.item.kind);
        let last = targets.at_most(&self.memory, delegation.destination + size - 1);
        let end = last.map(|last| self.memory.at(last)).map(|last| last.base + units(last.order));
        if *done < 2 * size && end.is_some_and(|end| end > free_from) {
            return Err(Status::Busy);
        }
        // A part that is everything is not looked up again.
        let mut whole = None;
        while *done < size {
            if !work::charge(budget, work::LOOKUP) {
                return Ok(false);
            }
            let part = self.part(sender, delegation, *done)?;
            *done += units(part.extent.order);
            whole = (units(part.extent.order) == size).then_some(part);
        }
        while *done < 2 * size {
            let part =
                whole.take().map_or_else(|| self.part(sender, delegation, *done - size), Ok)?;
            if !self.map_part(delegation, space, &part, budget)? {
                return Ok(false);
            }
            *done += units(part.extent.order);
        }
        Ok(true)
    }

    /// Returns the part that begins `offset` units after the start, if it may be delegated.
    fn part(&self, sender: &Task<A>, delegation: &Delegation<A>, offset: u64) -> Result<Part<A>> {
        let (item, at) = (delegation.item, delegation.source + offset);
        let sources = Self::tree(&sender.space, item.kind);
        let handle = self.find(sources, at).ok_or(Status::BadArgument)?;
        let node = self.memory.at(handle);
        if node.fixed.get() {
            return Err(Status::BadRights);
        }
        let limit = if item.kind == ItemKind::Memory { Self::max_order() } else { u8::MAX };
        let order = node.order.min(item.order).min(limit);
        let is_whole = node.order == order && order == item.order;
        if item.grant && (!is_whole || node.children.any().is_some()) {
            return Err(Status::Busy);
        }
        if at & (units(order) - 1) != 0 {
            return Err(Status::BadArgument);
        }
        let physical = node.physical + (at - node.base);
        let base = delegation.destination + offset;
        Ok(Part { handle, extent: Extent { kind: item.kind, base, physical, order } })
    }

    /// Maps a part. `Ok(false)`: out of budget, without effect.
    fn map_part(
        &self,
        delegation: &Delegation<A>,
        space: &Space<A>,
        part: &Part<A>,
        budget: &mut u32,
    ) -> Result<bool> {
        if !self.make_room(delegation.to, space, part.extent, budget)
            || !work::charge(budget, work::NODE + Self::words(part.extent.kind, part.extent.order))
        {
            return Ok(false);
        }
        let node = self.memory.at(part.handle);
        let rights = node.rights & (delegation.item.rights | rights::READ);
        let parent = if delegation.item.grant { node.parent.get() } else { Some(part.handle) };
        self.add_mapping(delegation.to, part.extent, rights, node.device, parent)?;
        if delegation.item.grant {
            self.remove_leaf(part.handle);
        }
        Ok(true)
    }

    /// Cost of writing the page-table or port-map entries of a mapping.
    fn words(kind: ItemKind, order: u8) -> u32 {
        match kind {
            ItemKind::Capability => 0,
            ItemKind::Port => work::of_words(units(order.saturating_sub(WORD_ORDER))),
            ItemKind::Memory => work::of_entries(table::entries::<A::Host>(order)),
        }
    }

    /// Frees the empty page tables in the range of a new mapping. `false`: out of budget.
    fn make_room(&self, of: SpaceRef<A>, space: &Space<A>, at: Extent, budget: &mut u32) -> bool {
        if at.kind != ItemKind::Memory {
            return true;
        }
        let tables = space.tables(&self.memory);
        let root = self.memory.physical(space.root);
        let (page, order) = (at.base, at.order);
        let mut may_continue = || work::charge(budget, work::TABLE);
        let (done, flush) =
            in_format!(of, make_room(&tables, root, page, order, &mut may_continue));
        self.request_flush(of, space, flush);
        done
    }

    fn delegate_capabilities(
        &self,
        sender: &Task<A>,
        delegation: &Delegation<A>,
        done: &mut u64,
        budget: &mut u32,
    ) -> Result<bool> {
        let SpaceRef::Task(to) = delegation.to else { return Err(Status::BadArgument) };
        let (item, size) = (delegation.item, units(delegation.item.order));
        let receiver = self.memory.get(to).ok_or(Status::Aborted)?;
        while *done < 2 * size {
            let offset = *done & (size - 1);
            let is_second_pass = *done >= size;
            if !work::charge(budget, if is_second_pass { work::NODE } else { work::LOOKUP }) {
                return Ok(false);
            }
            let capability = self.capability(sender, delegation.source + offset)?;
            let node = self.memory.at(capability.node);
            if capability.rights & rights::DELEGATE == 0 {
                return Err(Status::BadRights);
            }
            if item.grant && node.children.any().is_some() {
                return Err(Status::Busy);
            }
            self.free_slot(receiver, delegation.destination + offset)?;
            if is_second_pass {
                let parent = if item.grant { node.parent.get() } else { Some(capability.node) };
                let rights = capability.rights & item.rights;
                let slot = delegation.destination + offset;
                self.insert_capability(to, slot, capability.object, rights, parent)?;
                if item.grant {
                    self.remove_leaf(capability.node);
                }
            }
            *done += 1;
        }
        Ok(true)
    }

    // ---- revocation --------------------------------------------------------------------------

    /// Removes a node and its descendants, one leaf per step. `false`: out of budget.
    pub(super) fn remove_subtree(&self, handle: Handle<MapNode<A>>, budget: &mut u32) -> bool {
        let mut leaf = handle;
        loop {
            while let Some(child) = self.memory.at(leaf).children.any() {
                leaf = child;
            }
            let node = self.memory.at(leaf);
            let cost = match node.kind {
                ItemKind::Capability => work::CAPABILITY,
                kind => work::LEAF + Self::words(kind, node.order),
            };
            if !work::charge(budget, cost) {
                return false;
            }
            let above = node.parent.get();
            self.remove_leaf(leaf);
            match above {
                Some(above) if leaf != handle => leaf = above,
                _ => return true,
            }
        }
    }

    /// Removes the children of a node that overlap the block of `2^order` units at `physical` (in
    /// units of the resource). `false`: out of budget.
    fn remove_children(
        &self,
        handle: Handle<MapNode<A>>,
        (physical, order): (u64, u8),
        budget: &mut u32,
    ) -> bool {
        while let Some(child) = self.overlapping(handle, physical, order) {
            if !self.remove_subtree(child, budget) {
                return false;
            }
        }
        true
    }

    /// Returns a child of a node that overlaps a block: inside it, or containing it.
    fn overlapping(
        &self,
        handle: Handle<MapNode<A>>,
        physical: u64,
        order: u8,
    ) -> Option<Handle<MapNode<A>>> {
        let parent = self.memory.at(handle);
        let children = &parent.children;
        let first = children.at_least(&self.memory, (physical, 0, 0));
        if let Some(child) = first
            && self.memory.at(child).physical - physical < units(order)
        {
            return first;
        }
        for order in order + 1..=parent.order {
            let base = physical & !(units(order) - 1);
            // Same base as the next smaller block, whose look-up would have found this one, too.
            if base == physical & !(units(order - 1) - 1) {
                continue;
            }
            let child = children.at_least(&self.memory, (base, order, 0));
            if child.is_some_and(|child| self.memory.at(child).physical == base) {
                return child;
            }
        }
        None
    }

    /// Revokes all delegations from a range of a task's space, and with `own` also removes the
    /// task's own mappings. `Ok(false)`: out of budget; call again with the updated `done`, which
    /// starts at 0.
    pub fn unmap(
        &self,
        from: Handle<Task<A>>,
        (item, base): (Item, u64),
        own: bool,
        done: &mut u64,
        budget: &mut u32,
    ) -> Result<bool> {
        let task = self.memory.get(from).ok_or(Status::Aborted)?;
        let size = units(item.order);
        if base & (size - 1) != 0 || base.checked_add(size).is_none() || *done > size {
            return Err(Status::BadArgument);
        }
        if item.kind == ItemKind::Capability {
            return Ok(self.unmap_capabilities(task, base, size, own, done, budget));
        }
        let tree = Self::tree(&task.space, item.kind);
        // Downwards from the end of the range, so that completed units need not be visited again.
        while *done < size {
            if !work::charge(budget, work::LOOKUP) {
                return Ok(false);
            }
            let Some(handle) = self.last(tree, base, size - *done) else { break };
            let node = self.memory.at(handle);
            let node_end = node.base + units(node.order);
            let (low, high) = (node.base.max(base), node_end.min(base + size));
            if node.fixed.get() {
                if own {
                    return Err(Status::BadRights);
                }
            } else if own {
                if low != node.base || high != node_end {
                    return Err(Status::BadArgument);
                }
                if !self.remove_subtree(handle, budget) {
                    return Ok(false);
                }
            } else {
                let block = (node.physical + (low - node.base), node.order.min(item.order));
                if !self.remove_children(handle, block, budget) {
                    return Ok(false);
                }
            }
            *done = base + size - low;
        }
        *done = size;
        Ok(true)
    }

    /// Returns the last mapping that overlaps `size` units from `base` on.
    fn last(&self, tree: &Tree<MapNode<A>>, base: u64, size: u64) -> Option<Handle<MapNode<A>>> {
        let last = tree.at_most(&self.memory, (base + size).checked_sub(1)?)?;
        let node = self.memory.at(last);
        (node.base + units(node.order) > base && size != 0).then_some(last)
    }

    /// Removes the mappings that overlap a range of a space and that task `from` has delegated
    /// there; with `free_tables` also frees the range's page tables, if nothing is mapped in it any
    /// more. `Ok(false)`: out of budget; call again with the updated `done`, which starts at 0.
    pub fn unmap_at(
        &self,
        from: Handle<Task<A>>,
        at: SpaceRef<A>,
        (item, base, free_tables): (Item, u64, bool),
        done: &mut u64,
        budget: &mut u32,
    ) -> Result<bool> {
        let space = self.space(at).ok_or(Status::Aborted)?;
        let (kind, order, size) = (item.kind, item.order, units(item.order));
        check_range(item, at, base)?;
        if kind == ItemKind::Capability || *done > size {
            return Err(Status::BadArgument);
        }
        let tree = Self::tree(space, kind);
        // Downwards, as in `unmap`.
        while let Some(handle) = self.last(tree, base, size - *done) {
            if !work::charge(budget, work::LOOKUP) {
                return Ok(false);
            }
            let node = self.memory.at(handle);
            let left = node.base.max(base) - base;
            let giver = node.parent.get().map(|parent| self.memory.at(parent).space);
            if giver == Some(SpaceRef::Task(from)) && !self.remove_subtree(handle, budget) {
                return Ok(false);
            }
            *done = size - left;
        }
        *done = size;
        if !free_tables || self.last(tree, base, size).is_some() {
            return Ok(true);
        }
        let extent = Extent { kind, base, physical: 0, order };
        Ok(self.make_room(at, space, extent, budget))
    }

    fn unmap_capabilities(
        &self,
        task: &Task<A>,
        base: u64,
        size: u64,
        own: bool,
        done: &mut u64,
        budget: &mut u32,
    ) -> bool {
        while *done < size && base + *done < task.slots {
            if !work::charge(budget, work::LOOKUP) {
                return false;
            }
            let selector = base + *done;
            let page = selector / SLOTS_PER_PAGE as u64;
            if task.pages[page as usize].get().is_none() {
                *done = ((page + 1) * SLOTS_PER_PAGE as u64 - base).min(size);
                continue;
            }
            if let Ok(capability) = self.capability(task, selector) {
                let finished = if own {
                    self.remove_subtree(capability.node, budget)
                } else {
                    self.remove_children(capability.node, (0, 0), budget)
                };
                if !finished {
                    return false;
                }
            }
            *done += 1;
        }
        *done = size;
        true
    }
}
