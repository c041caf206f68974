//! Capability lookup and the mapping database: delegation, recursive revocation, and the end of objects.
//!
//! # Invariants
//!
//! * Every mapping of memory and ports and every capability has exactly one [`Node`]; a child's
//!   range, rights and units are contained in its parent's.
//! * Nodes of one space and kind do not overlap.
//! * Page tables and port maps show exactly the nodes; they are changed in the same step.
//! * An object exists as long as it has a capability; the last one's removal ends it.
//!
//! Revocation is done in steps of one node. An operation that runs out of its budget of steps leaves a
//! consistent state and makes the system call start again, so it goes on where it stopped.

use core::cell::Cell;
use core::sync::atomic::Ordering;

use abi::vcpu::DOORBELLS;
use abi::{Item, ItemKind, Status, rights};

use crate::Kernel;
use crate::arch::Arch;
use crate::object::*;
use crate::pool::{Factory, Frame, Handle, Memory};
use crate::table::{self, Access};
use crate::tree::{Links, Tree};

/// Steps of revocation in one system call, before it is made to start again.
pub const STEPS: u32 = 64;
/// Deepest chain of delegations.
const MAX_DEPTH: u8 = 250;
/// Source mappings that one delegation may cover.
const MAX_CHUNKS: u32 = 64;
/// Largest order of a delegation of capabilities.
const MAX_CAPABILITY_ORDER: u8 = 6;
/// Guest-physical addresses have this many bits.
const GUEST_BITS: u32 = 48;
/// Pages that a task can map: all of its half but the last, so that the address after a SYSCALL
/// instruction is canonical wherever the instruction is (APM vol. 3, SYSRET).
const USER_PAGES: u64 = (abi::USER_END >> abi::PAGE_SHIFT) - 1;

/// Page tables in kernel memory, paid for by one factory.
struct KernelTables<'a> {
    memory: &'a Memory,
    factory: Option<Handle<Factory>>,
}

impl table::Tables for KernelTables<'_> {
    fn read(&self, table: u64, index: usize) -> u64 {
        self.memory.words(self.memory.frame_at(table))[index].load(Ordering::Relaxed)
    }
    fn write(&self, table: u64, index: usize, entry: u64) {
        self.memory.words(self.memory.frame_at(table))[index].store(entry, Ordering::Relaxed);
    }
    fn alloc(&self) -> Result<u64, Status> {
        Ok(self.memory.physical(self.memory.alloc_raw(self.factory, 1)?))
    }
    fn free(&self, table: u64) {
        self.memory.free_raw(self.memory.frame_at(table), 1);
    }
}

impl<A: Arch> Space<A> {
    fn new(factory: Option<Handle<Factory>>, root: Frame) -> Self {
        Self {
            factory,
            memory: Tree::new(),
            ports: Tree::new(),
            root,
            port_map: Cell::new(None),
            port_generation: Cell::new(0),
            active: Cell::new(0),
            generation: Cell::new(0),
            dying: Cell::new(false),
        }
    }

    fn tables<'a>(&self, memory: &'a Memory) -> KernelTables<'a> {
        KernelTables { memory, factory: self.factory }
    }
}

/// Number of units of an order.
fn units(order: u8) -> u64 {
    1 << order
}

impl<A: Arch> Kernel<A> {
    // ---- capabilities ------------------------------------------------------------------------

    #[inline(always)]
    fn slot<'a>(
        &'a self,
        task: &'a Task<A>,
        selector: u64,
    ) -> Option<&'a Cell<Option<Capability<A>>>> {
        if selector >= task.slots {
            return None;
        }
        // Short numbers, for a cheap division: `MAX_SLOTS` fits.
        let (selector, per_page) = (selector as u16, SLOTS_PER_PAGE as u16);
        let page = task.pages.get(usize::from(selector / per_page))?.get()?;
        Some(&self.memory.at(page).slots[usize::from(selector % per_page)])
    }

    /// The capability at a selector.
    #[inline(always)]
    pub fn capability(&self, task: &Task<A>, selector: u64) -> Result<Capability<A>, Status> {
        self.slot(task, selector).and_then(Cell::get).ok_or(Status::BadCapability)
    }

    /// Makes sure that a slot exists and is free.
    fn free_slot<'a>(
        &'a self,
        task: &'a Task<A>,
        selector: u64,
    ) -> Result<&'a Cell<Option<Capability<A>>>, Status> {
        if selector >= task.slots {
            return Err(Status::BadArgument);
        }
        let page = &task.pages[selector as usize / SLOTS_PER_PAGE];
        if page.get().is_none() {
            let slots = [const { Cell::new(None) }; SLOTS_PER_PAGE];
            page.set(Some(self.memory.alloc(task.space.factory, SlotPage { slots })?));
        }
        let slot = self.slot(task, selector).ok_or(Status::BadArgument)?;
        if slot.get().is_some() { Err(Status::Busy) } else { Ok(slot) }
    }

    fn count(&self, object: ObjectRef<A>) -> Option<&Cell<u32>> {
        let memory = &self.memory;
        Some(match object {
            ObjectRef::Task(handle) => &memory.get(handle)?.caps,
            ObjectRef::Thread(handle) => &memory.get(handle)?.caps,
            ObjectRef::Gate(handle) => &memory.get(handle)?.caps,
            ObjectRef::Notification(handle) => &memory.get(handle)?.caps,
            ObjectRef::Irq(handle) => &memory.get(handle)?.caps,
            ObjectRef::Factory(handle) => &memory.get(handle)?.caps,
            ObjectRef::SchedContext(handle) => &memory.get(handle)?.caps,
            ObjectRef::Vm(handle) => &memory.get(handle)?.caps,
            ObjectRef::Vcpu(handle) => &memory.get(handle)?.caps,
            ObjectRef::Platform => &self.platform_caps,
        })
    }

    /// Puts a new capability into a free slot.
    pub fn insert_capability(
        &self,
        task: Handle<Task<A>>,
        selector: u64,
        object: ObjectRef<A>,
        rights: u8,
        parent: Option<Handle<Node<A>>>,
    ) -> Result<(), Status> {
        let owner = self.memory.get(task).ok_or(Status::Aborted)?;
        if owner.space.dying.get() {
            return Err(Status::Aborted);
        }
        let slot = self.free_slot(owner, selector)?;
        let count = self.count(object).ok_or(Status::BadCapability)?;
        let node = self.new_node(
            SpaceRef::Task(task),
            owner.space.factory,
            Extent { kind: ItemKind::Capability, base: selector, physical: 0, order: 0 },
            rights,
            false,
            parent,
        )?;
        count.set(count.get() + 1);
        slot.set(Some(Capability { object, rights, node }));
        Ok(())
    }

    // ---- nodes -------------------------------------------------------------------------------

    /// The memory and ports of a task or guest.
    pub fn space(&self, space: SpaceRef<A>) -> Option<&Space<A>> {
        match space {
            SpaceRef::Task(task) => self.memory.get(task).map(|task| &task.space),
            SpaceRef::Vm(vm) => self.memory.get(vm).map(|vm| &vm.space),
        }
    }

    fn new_node(
        &self,
        space: SpaceRef<A>,
        factory: Option<Handle<Factory>>,
        extent: Extent,
        rights: u8,
        device: bool,
        parent: Option<Handle<Node<A>>>,
    ) -> Result<Handle<Node<A>>, Status> {
        let above = parent.map(|parent| self.memory.at(parent));
        let depth = above.map_or(0, |above| above.depth + 1);
        if depth > MAX_DEPTH {
            return Err(Status::Overflow);
        }
        let next = above.and_then(|above| above.child.get());
        let handle = self.memory.alloc(
            factory,
            Node {
                space,
                base: extent.base,
                physical: extent.physical,
                kind: extent.kind,
                order: extent.order,
                rights,
                device,
                fixed: Cell::new(false),
                depth,
                parent: Cell::new(parent),
                child: Cell::new(None),
                next: Cell::new(next),
                prev: Cell::new(None),
                links: Links::new(),
            },
        )?;
        if let Some(next) = next {
            self.memory.at(next).prev.set(Some(handle));
        }
        if let Some(above) = above {
            above.child.set(Some(handle));
        }
        Ok(handle)
    }

    fn drop_node(&self, handle: Handle<Node<A>>) {
        let node = self.memory.at(handle);
        if let Some(next) = node.next.get() {
            self.memory.at(next).prev.set(node.prev.get());
        }
        match (node.prev.get(), node.parent.get()) {
            (Some(prev), _) => self.memory.at(prev).next.set(node.next.get()),
            (None, Some(parent)) => self.memory.at(parent).child.set(node.next.get()),
            (None, None) => {}
        }
        self.memory.free(handle);
    }

    fn tree(space: &Space<A>, kind: ItemKind) -> &Tree<Node<A>> {
        match kind {
            ItemKind::Port => &space.ports,
            _ => &space.memory,
        }
    }

    /// The node that covers unit `base`.
    fn find(&self, tree: &Tree<Node<A>>, base: u64) -> Option<Handle<Node<A>>> {
        let handle = tree.at_most(&self.memory, base)?;
        let node = self.memory.at(handle);
        (base - node.base < units(node.order)).then_some(handle)
    }

    /// Adds a mapping to a space: node, page table, port map.
    pub fn add_mapping(
        &self,
        to: SpaceRef<A>,
        extent: Extent,
        rights: u8,
        device: bool,
        parent: Option<Handle<Node<A>>>,
    ) -> Result<Handle<Node<A>>, Status> {
        let space = self.space(to).ok_or(Status::Aborted)?;
        let handle = self.new_node(to, space.factory, extent, rights, device, parent)?;
        let written = match extent.kind {
            ItemKind::Port => self.open_ports(to, space, extent),
            _ => self.write_table(to, space, extent, rights, device),
        };
        if let Err(status) = written {
            self.drop_node(handle);
            return Err(status);
        }
        Self::tree(space, extent.kind).insert(&self.memory, handle);
        Ok(handle)
    }

    fn write_table(
        &self,
        to: SpaceRef<A>,
        space: &Space<A>,
        extent: Extent,
        rights: u8,
        device: bool,
    ) -> Result<(), Status> {
        let tables = space.tables(&self.memory);
        let root = self.memory.physical(space.root);
        let physical = extent.physical << abi::PAGE_SHIFT;
        let access = Access {
            write: rights & rights::WRITE != 0,
            execute: rights & rights::EXECUTE != 0,
            device,
        };
        let (page, order) = (extent.base, extent.order);
        let flush = match to {
            SpaceRef::Task(_) => {
                table::map::<A::Host>(&tables, root, page, physical, order, access)?
            }
            SpaceRef::Vm(_) => {
                table::map::<A::Nested>(&tables, root, page, physical, order, access)?
            }
        };
        if flush.is_needed() {
            self.need_flush(to, space);
        }
        Ok(())
    }

    fn open_ports(&self, to: SpaceRef<A>, space: &Space<A>, extent: Extent) -> Result<(), Status> {
        let frames = match to {
            SpaceRef::Task(_) => A::PORT_FRAMES,
            SpaceRef::Vm(_) => A::GUEST_PORT_FRAMES,
        };
        if frames == 0 {
            return Err(Status::Unsupported);
        }
        if space.port_map.get().is_none() {
            let map = self.memory.alloc_raw(space.factory, frames)?;
            for frame in 0..frames {
                for word in self.memory.words(self.memory.following(map, frame)) {
                    word.store(u64::MAX, Ordering::Relaxed);
                }
            }
            space.port_map.set(Some(map));
        }
        self.set_ports(to, space, extent, false);
        Ok(())
    }

    fn set_ports(&self, of: SpaceRef<A>, space: &Space<A>, extent: Extent, closed: bool) {
        let Some(map) = space.port_map.get() else { return };
        for port in extent.base..extent.base + units(extent.order) {
            let frame = self.memory.following(map, (port >> 15) as u32);
            let word = &self.memory.words(frame)[(port >> 6 & 511) as usize];
            let bit = 1 << (port & 63);
            let old = word.load(Ordering::Relaxed);
            word.store(if closed { old | bit } else { old & !bit }, Ordering::Relaxed);
        }
        space.port_generation.set(space.port_generation.get() + 1);
        if closed {
            self.need_flush(of, space);
        }
    }

    fn need_flush(&self, of: SpaceRef<A>, space: &Space<A>) {
        space.generation.set(space.generation.get() + 1);
        let active = match of {
            SpaceRef::Task(task) => (0..A::cpus())
                .filter(|&cpu| self.cpus[cpu].space.get() == Some(task))
                .fold(0, |cpus, cpu| cpus | 1 << cpu),
            SpaceRef::Vm(_) => space.active.get(),
        };
        self.flush.set(self.flush.get() | active);
    }

    /// Removes a node without children, and what it stands for.
    fn remove_leaf(&self, handle: Handle<Node<A>>) {
        let node = self.memory.at(handle);
        let extent =
            Extent { kind: node.kind, base: node.base, physical: node.physical, order: node.order };
        let mut ended = None;
        match (node.kind, node.space) {
            (ItemKind::Capability, SpaceRef::Task(task)) => {
                let slot = self.memory.get(task).and_then(|task| self.slot(task, node.base));
                ended = slot.and_then(Cell::take).map(|capability| capability.object);
            }
            (ItemKind::Port, space_ref) => {
                if let Some(space) = self.space(space_ref) {
                    self.set_ports(space_ref, space, extent, true);
                    space.ports.remove(&self.memory, handle);
                }
            }
            (_, space_ref) => {
                if let Some(space) = self.space(space_ref) {
                    let tables = space.tables(&self.memory);
                    let root = self.memory.physical(space.root);
                    let flush = match space_ref {
                        SpaceRef::Task(_) => {
                            table::unmap::<A::Host>(&tables, root, node.base, node.order)
                        }
                        SpaceRef::Vm(_) => {
                            table::unmap::<A::Nested>(&tables, root, node.base, node.order)
                        }
                    };
                    if flush.is_needed() {
                        self.need_flush(space_ref, space);
                    }
                    space.memory.remove(&self.memory, handle);
                }
            }
        }
        self.drop_node(handle);
        if let Some(object) = ended
            && let Some(count) = self.count(object)
        {
            count.set(count.get() - 1);
            if count.get() == 0 {
                self.end(object);
            }
        }
    }

    /// Removes a mapping that the kernel placed ([`Node::fixed`]), if it is still there.
    pub fn remove_fixed(&self, handle: Handle<Node<A>>) {
        if self.memory.get(handle).is_some() {
            self.remove_leaf(handle);
        }
    }

    /// Removes the subtree under `handle`, itself included, one leaf a step. `false`: out of budget.
    fn remove_subtree(&self, handle: Handle<Node<A>>, budget: &mut u32) -> bool {
        loop {
            if *budget == 0 {
                return false;
            }
            *budget -= 1;
            let mut leaf = handle;
            while let Some(child) = self.memory.at(leaf).child.get() {
                leaf = child;
            }
            self.remove_leaf(leaf);
            if leaf == handle {
                return true;
            }
        }
    }

    /// Removes what was delegated from `handle` and overlaps `physical` (units of the root).
    fn remove_children(
        &self,
        handle: Handle<Node<A>>,
        physical: core::ops::Range<u64>,
        budget: &mut u32,
    ) -> bool {
        let mut next = self.memory.at(handle).child.get();
        while let Some(child) = next {
            let node = self.memory.at(child);
            next = node.next.get();
            let overlaps =
                node.physical < physical.end && physical.start < node.physical + units(node.order);
            if overlaps && !self.remove_subtree(child, budget) {
                return false;
            }
        }
        true
    }

    // ---- delegation --------------------------------------------------------------------------

    /// Delegates from a task's space to another space. All or nothing, but for a lack of quota
    /// in the middle of a range of several mappings: what was delegated before stays.
    pub fn delegate(
        &self,
        from: Handle<Task<A>>,
        item: Item,
        source: u64,
        to: SpaceRef<A>,
        destination: u64,
    ) -> Result<(), Status> {
        let giver = self.memory.get(from).ok_or(Status::Aborted)?;
        let space = self.space(to).ok_or(Status::Aborted)?;
        if space.dying.get() {
            return Err(Status::Aborted);
        }
        let size = units(item.order);
        let limit = match (item.kind, to) {
            (ItemKind::Memory, SpaceRef::Task(_)) => USER_PAGES,
            (ItemKind::Memory, SpaceRef::Vm(_)) => 1 << (GUEST_BITS - abi::PAGE_SHIFT),
            (ItemKind::Port, _) => 1 << 16,
            (ItemKind::Capability, SpaceRef::Task(_)) => MAX_SLOTS,
            (ItemKind::Capability, SpaceRef::Vm(_)) => return Err(Status::BadArgument),
        };
        let misaligned = (source | destination) & (size - 1) != 0;
        let fits = destination.checked_add(size).is_some_and(|end| end <= limit);
        if misaligned || !fits || source.checked_add(size).is_none() {
            return Err(Status::BadArgument);
        }
        if item.kind == ItemKind::Capability {
            return self.delegate_capabilities(giver, item, source, to, destination);
        }
        let sources = Self::tree(&giver.space, item.kind);
        let targets = Self::tree(space, item.kind);
        if let Some(last) = targets.at_most(&self.memory, destination + size - 1) {
            let last = self.memory.at(last);
            if last.base + units(last.order) > destination {
                return Err(Status::Busy);
            }
        }
        // First look at everything, then act.
        let mut chunks = 0;
        let mut at = source;
        while at < source + size {
            let node = self.memory.at(self.find(sources, at).ok_or(Status::BadArgument)?);
            if node.fixed.get() {
                return Err(Status::BadRights);
            }
            if item.grant && (node.order > item.order || node.child.get().is_some()) {
                return Err(Status::Busy);
            }
            at = (node.base + units(node.order)).min(source + size);
            chunks += 1;
            if chunks > MAX_CHUNKS {
                return Err(Status::Overflow);
            }
        }
        at = source;
        while at < source + size {
            let handle = self.find(sources, at).ok_or(Status::BadArgument)?;
            let node = self.memory.at(handle);
            let order = node.order.min(item.order);
            let extent = Extent {
                kind: item.kind,
                base: destination + (at - source),
                physical: node.physical + (at - node.base),
                order,
            };
            let rights = node.rights & (item.rights | rights::READ);
            let parent = if item.grant { node.parent.get() } else { Some(handle) };
            self.add_mapping(to, extent, rights, node.device, parent)?;
            if item.grant {
                self.remove_leaf(handle);
            }
            at += units(order);
        }
        Ok(())
    }

    fn delegate_capabilities(
        &self,
        giver: &Task<A>,
        item: Item,
        source: u64,
        to: SpaceRef<A>,
        destination: u64,
    ) -> Result<(), Status> {
        let SpaceRef::Task(to) = to else { return Err(Status::BadArgument) };
        if item.order > MAX_CAPABILITY_ORDER {
            return Err(Status::Overflow);
        }
        let receiver = self.memory.get(to).ok_or(Status::Aborted)?;
        for offset in 0..units(item.order) {
            let capability = self.capability(giver, source + offset)?;
            if capability.rights & rights::DELEGATE == 0 {
                return Err(Status::BadRights);
            }
            if item.grant && self.memory.at(capability.node).child.get().is_some() {
                return Err(Status::Busy);
            }
            self.free_slot(receiver, destination + offset)?;
        }
        for offset in 0..units(item.order) {
            let capability = self.capability(giver, source + offset)?;
            let node = self.memory.at(capability.node);
            let parent = if item.grant { node.parent.get() } else { Some(capability.node) };
            self.insert_capability(
                to,
                destination + offset,
                capability.object,
                capability.rights & item.rights,
                parent,
            )?;
            if item.grant {
                self.remove_leaf(capability.node);
            }
        }
        Ok(())
    }

    /// Takes back what was delegated from a range of a task's space; with `own` also the task's own
    /// mappings. `Ok(false)`: out of budget, call again.
    pub fn unmap(
        &self,
        from: Handle<Task<A>>,
        item: Item,
        base: u64,
        own: bool,
        budget: &mut u32,
    ) -> Result<bool, Status> {
        let task = self.memory.get(from).ok_or(Status::Aborted)?;
        let size = units(item.order);
        if base & (size - 1) != 0 || base.checked_add(size).is_none() {
            return Err(Status::BadArgument);
        }
        if item.kind == ItemKind::Capability {
            let end = (base + size).min(task.slots);
            for selector in base..end {
                let Ok(capability) = self.capability(task, selector) else { continue };
                let done = if own {
                    self.remove_subtree(capability.node, budget)
                } else {
                    self.remove_children(capability.node, 0..u64::MAX, budget)
                };
                if !done {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        let tree = Self::tree(&task.space, item.kind);
        // From the end of the range downwards, so that what is done need not be looked at again.
        let mut end = base + size;
        while end > base {
            let Some(handle) = tree.at_most(&self.memory, end - 1) else { break };
            let node = self.memory.at(handle);
            let node_end = node.base + units(node.order);
            if node_end <= base {
                break;
            }
            let (low, high) = (node.base.max(base), node_end.min(base + size));
            let whole = low == node.base && high == node_end;
            end = low;
            if node.fixed.get() {
                if own {
                    return Err(Status::BadRights);
                }
            } else if own && !whole {
                return Err(Status::BadArgument);
            } else if own {
                if !self.remove_subtree(handle, budget) {
                    return Ok(false);
                }
            } else {
                let start = node.physical + (low - node.base);
                if !self.remove_children(handle, start..start + (high - low), budget) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Maps one kernel frame into a task at a page-aligned address, as a fixed mapping.
    pub fn map_fixed(
        &self,
        task: Handle<Task<A>>,
        address: u64,
        frame: Frame,
        write: bool,
    ) -> Result<Handle<Node<A>>, Status> {
        let owner = self.memory.get(task).ok_or(Status::Aborted)?;
        if owner.space.dying.get() {
            return Err(Status::Aborted);
        }
        let page = address >> abi::PAGE_SHIFT;
        if address & (abi::PAGE_SIZE - 1) != 0 || page >= USER_PAGES {
            return Err(Status::BadArgument);
        }
        if self.find(&owner.space.memory, page).is_some() {
            return Err(Status::Busy);
        }
        let physical = self.memory.physical(frame) >> abi::PAGE_SHIFT;
        let extent = Extent { kind: ItemKind::Memory, base: page, physical, order: 0 };
        let rights = if write { rights::READ | rights::WRITE } else { rights::READ };
        let handle = self.add_mapping(SpaceRef::Task(task), extent, rights, false, None)?;
        self.memory.at(handle).fixed.set(true);
        Ok(handle)
    }

    // ---- birth and death of spaces --------------------------------------------------------------

    /// Makes a task with `slots` capability slots.
    pub fn new_task(
        &self,
        factory: Option<Handle<Factory>>,
        slots: u64,
    ) -> Result<Handle<Task<A>>, Status> {
        if slots == 0 || slots > MAX_SLOTS {
            return Err(Status::BadArgument);
        }
        let root = self.memory.alloc_raw(factory, 1)?;
        A::init_root(self.memory.words(root));
        self.memory
            .alloc(
                factory,
                Task {
                    caps: Cell::new(0),
                    space: Space::new(factory, root),
                    slots,
                    pages: [const { Cell::new(None) }; SLOT_PAGES],
                    threads: Cell::new(None),
                    dying_next: Cell::new(None),
                },
            )
            .inspect_err(|_| self.memory.free_raw(root, 1))
    }

    /// Makes a guest-physical space.
    pub fn new_vm(&self, factory: Option<Handle<Factory>>) -> Result<Handle<Vm<A>>, Status> {
        if !A::has_nested() {
            return Err(Status::Unsupported);
        }
        let root = self.memory.alloc_raw(factory, 1)?;
        self.memory
            .alloc(
                factory,
                Vm {
                    caps: Cell::new(0),
                    space: Space::new(factory, root),
                    doorbells: [const { Cell::new(None) }; DOORBELLS],
                    dying_next: Cell::new(None),
                },
            )
            .inspect_err(|_| self.memory.free_raw(root, 1))
    }

    /// Ends an object whose last capability went.
    pub(crate) fn end(&self, object: ObjectRef<A>) {
        match object {
            ObjectRef::Task(handle) => {
                let task = self.memory.at(handle);
                task.space.dying.set(true);
                task.dying_next.set(self.dying_tasks.replace(Some(handle)));
            }
            ObjectRef::Vm(handle) => {
                let vm = self.memory.at(handle);
                vm.space.dying.set(true);
                vm.dying_next.set(self.dying_vms.replace(Some(handle)));
            }
            ObjectRef::Thread(handle) => self.end_thread(handle),
            ObjectRef::Gate(handle) => self.memory.free(handle),
            ObjectRef::Notification(handle) => self.end_notification(handle),
            ObjectRef::Irq(handle) => self.end_irq(handle),
            ObjectRef::Factory(handle) => self.memory.end_factory(handle),
            ObjectRef::SchedContext(handle) => self.end_sched(handle),
            ObjectRef::Vcpu(handle) => self.end_vcpu(handle),
            ObjectRef::Platform => {}
        }
    }

    /// Goes on taking apart tasks and guests that have ended. `false`: out of budget.
    pub fn reap(&self, budget: &mut u32) -> bool {
        while let Some(handle) = self.dying_tasks.get() {
            let task = self.memory.at(handle);
            while let Some(thread) = task.threads.get() {
                if *budget == 0 {
                    return false;
                }
                *budget -= 1;
                self.leave_task(thread);
            }
            for page in &task.pages {
                let Some(slots) = page.get() else { continue };
                for slot in &self.memory.at(slots).slots {
                    if let Some(capability) = slot.get()
                        && !self.remove_subtree(capability.node, budget)
                    {
                        return false;
                    }
                }
                page.set(None);
                self.memory.free(slots);
            }
            // Its capabilities may have been the last to other tasks, which are now before it.
            if self.dying_tasks.get() != Some(handle) {
                continue;
            }
            let of = SpaceRef::Task(handle);
            let (entries, frames) = (A::user_entries(), A::PORT_FRAMES);
            if !self.reap_space::<A::Host>(of, &task.space, entries, frames, budget) {
                return false;
            }
            self.dying_tasks.set(task.dying_next.get());
            self.memory.free(handle);
        }
        while let Some(handle) = self.dying_vms.get() {
            let vm = self.memory.at(handle);
            let of = SpaceRef::Vm(handle);
            let frames = A::GUEST_PORT_FRAMES;
            if !self.reap_space::<A::Nested>(of, &vm.space, 0..512, frames, budget) {
                return false;
            }
            self.dying_vms.set(vm.dying_next.get());
            self.memory.free(handle);
        }
        true
    }

    fn reap_space<F: table::Format>(
        &self,
        of: SpaceRef<A>,
        space: &Space<A>,
        entries: core::ops::Range<usize>,
        port_frames: u32,
        budget: &mut u32,
    ) -> bool {
        for tree in [&space.memory, &space.ports] {
            while let Some(node) = tree.any() {
                if !self.remove_subtree(node, budget) {
                    return false;
                }
            }
        }
        let tables = space.tables(&self.memory);
        if !table::clear::<F>(&tables, self.memory.physical(space.root), entries, budget) {
            return false;
        }
        // Whoever still has this space loaded leaves it before its root goes.
        self.need_flush(of, space);
        self.memory.free_raw(space.root, 1);
        if let Some(map) = space.port_map.take() {
            self.memory.free_raw(map, port_frames);
        }
        true
    }
}

/// What a mapping covers.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Memory, capability or port.
    pub kind: ItemKind,
    /// First unit in the space.
    pub base: u64,
    /// First unit of the resource: physical page number or port.
    pub physical: u64,
    /// `log2` of the number of units.
    pub order: u8,
}

#[cfg(test)]
mod tests;
