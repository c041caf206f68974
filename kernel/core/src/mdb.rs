//! Mapping database and capability look-up: delegation, recursive revocation, destruction of
//! objects.
//!
//! # Invariants
//!
//! * Every capability and every mapping of memory or ports has exactly one [`MapNode`]; a child's
//!   range, rights and units are contained in its parent's.
//! * Nodes of one address space and kind do not overlap.
//! * Page tables and port maps contain exactly the nodes; both are changed in the same step.
//! * An object exists as long as a capability to it exists; removing the last one destroys it.
//!
//! Delegation, revocation and destruction of tasks proceed in bounded steps ([`work`]). An
//! operation that exhausts its budget leaves a consistent state and restarts the system call, which
//! continues from there.

use core::cell::Cell;
use core::sync::atomic::Ordering;

use abi::{ItemKind, Status, rights};

use crate::arch::Arch;
use crate::object::*;
use crate::pool::{Account, Frame, Handle, Memory};
use crate::table::{self, Access};
use crate::tree::{Links, Tree};
use crate::{Kernel, Result};

pub use delegation::Delegation;

/// Calls a function of [`table`] for the format of the page tables of this space.
macro_rules! in_format {
    ($of:expr, $function:ident($($argument:expr),*)) => {
        match $of {
            SpaceRef::Task(_) => table::$function::<A::Host>($($argument),*),
            SpaceRef::Vm(_) => table::$function::<A::Nested>($($argument),*),
        }
    };
}

mod delegation;
mod lifecycle;
pub mod work;

/// Maximum depth of a chain of delegations.
const MAX_DEPTH: u8 = 250;
/// Maximum order of a delegation of capabilities.
const MAX_CAPABILITY_ORDER: u8 = 6;
/// Width of a guest-physical address in bits.
const GUEST_BITS: u32 = 48;
/// Pages that a task can map: the lower half except its last page, so that the address after a
/// SYSCALL instruction is always canonical (APM vol. 3, SYSRET).
const USER_PAGES: u64 = (abi::USER_END >> abi::PAGE_SHIFT) - 1;

/// Page tables in kernel memory, charged to one factory.
struct KernelTables<'a> {
    memory: &'a Memory,
    factory: Account,
}

impl table::Tables for KernelTables<'_> {
    fn first(&self, table: u64, range: core::ops::Range<usize>) -> Option<usize> {
        let words = self.memory.words(self.memory.frame_at(table)).get(range.clone())?;
        let index = words.iter().position(|word| word.load(Ordering::Relaxed) != 0)?;
        Some(range.start + index)
    }
    fn read(&self, table: u64, index: usize) -> u64 {
        self.memory.words(self.memory.frame_at(table))[index].load(Ordering::Relaxed)
    }
    fn write(&self, table: u64, index: usize, entry: u64) {
        self.memory.words(self.memory.frame_at(table))[index].store(entry, Ordering::Relaxed);
    }
    fn write_all(&self, table: u64, first: usize, count: u64, entry: impl Fn(u64) -> u64) {
        let words = self.memory.words(self.memory.frame_at(table));
        for (offset, word) in words.iter().skip(first).take(count as usize).enumerate() {
            word.store(entry(offset as u64), Ordering::Relaxed);
        }
    }
    fn alloc(&self) -> Result<u64> {
        Ok(self.memory.physical(self.memory.alloc_raw(self.factory, 1)?))
    }
    fn free(&self, table: u64) {
        self.memory.free_raw(self.memory.frame_at(table), 1);
    }
}

impl<A: Arch> Space<A> {
    fn new(factory: Account, root: Frame) -> Self {
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

/// `log2` of the number of ports in a word of a port map.
const WORD_ORDER: u8 = 6;

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
        // 16-bit division is cheaper, and `MAX_SLOTS` fits.
        let (selector, per_page) = (selector as u16, SLOTS_PER_PAGE as u16);
        let page = task.pages.get(usize::from(selector / per_page))?.get()?;
        Some(&self.memory.at(page).slots[usize::from(selector % per_page)])
    }

    /// The capability at a selector.
    #[inline(always)]
    pub fn capability(&self, task: &Task<A>, selector: u64) -> Result<Capability<A>> {
        self.slot(task, selector).and_then(Cell::get).ok_or(Status::BadCapability)
    }

    /// Returns a free slot, whose page is allocated if needed. Fails with `Busy` if the slot is in
    /// use.
    fn free_slot<'a>(
        &'a self,
        task: &'a Task<A>,
        selector: u64,
    ) -> Result<&'a Cell<Option<Capability<A>>>> {
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

    /// Task that is not being destroyed. Fails with `Aborted`.
    pub(crate) fn living_task(&self, task: Handle<Task<A>>) -> Result<&Task<A>> {
        self.memory.get(task).filter(|task| !task.space.dying.get()).ok_or(Status::Aborted)
    }

    fn cap_count(&self, object: ObjectRef<A>) -> Option<&Cell<u32>> {
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

    /// Inserts a new capability into a free slot.
    pub fn insert_capability(
        &self,
        task: Handle<Task<A>>,
        selector: u64,
        object: ObjectRef<A>,
        rights: u8,
        parent: Option<Handle<MapNode<A>>>,
    ) -> Result<()> {
        let owner = self.living_task(task)?;
        let slot = self.free_slot(owner, selector)?;
        let count = self.cap_count(object).ok_or(Status::BadCapability)?;
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

    /// Memory and I/O ports of a task or VM.
    pub fn space(&self, space: SpaceRef<A>) -> Option<&Space<A>> {
        match space {
            SpaceRef::Task(task) => self.memory.get(task).map(|task| &task.space),
            SpaceRef::Vm(vm) => self.memory.get(vm).map(|vm| &vm.space),
        }
    }

    /// Returns whether a space is guest-virtual.
    pub fn is_guest_virtual(&self, space: SpaceRef<A>) -> bool {
        let SpaceRef::Vm(vm) = space else { return false };
        self.memory.get(vm).is_some_and(|vm| vm.translation == Translation::GuestVirtual)
    }

    fn new_node(
        &self,
        space: SpaceRef<A>,
        factory: Account,
        extent: Extent,
        rights: u8,
        device: bool,
        parent: Option<Handle<MapNode<A>>>,
    ) -> Result<Handle<MapNode<A>>> {
        let above = parent.map(|parent| self.memory.at(parent));
        let depth = above.map_or(0, |above| above.depth + 1);
        if depth > MAX_DEPTH {
            return Err(Status::Overflow);
        }
        let handle = self.memory.alloc(
            factory,
            MapNode {
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
                children: Tree::new(),
                siblings: Links::default(),
                links: Links::default(),
            },
        )?;
        if let Some(above) = above {
            above.children.insert(&self.memory, handle);
        }
        Ok(handle)
    }

    fn drop_node(&self, handle: Handle<MapNode<A>>) {
        if let Some(parent) = self.memory.at(handle).parent.get() {
            self.memory.at(parent).children.remove(&self.memory, handle);
        }
        self.memory.free(handle);
    }

    fn tree(space: &Space<A>, kind: ItemKind) -> &Tree<MapNode<A>> {
        match kind {
            ItemKind::Port => &space.ports,
            _ => &space.memory,
        }
    }

    /// Returns the node that covers unit `base`.
    fn find(&self, tree: &Tree<MapNode<A>>, base: u64) -> Option<Handle<MapNode<A>>> {
        let handle = tree.at_most(&self.memory, base)?;
        let node = self.memory.at(handle);
        (base - node.base < units(node.order)).then_some(handle)
    }

    /// Adds a mapping to an address space: node, and page-table or port-map entries.
    pub fn add_mapping(
        &self,
        to: SpaceRef<A>,
        extent: Extent,
        rights: u8,
        device: bool,
        parent: Option<Handle<MapNode<A>>>,
    ) -> Result<Handle<MapNode<A>>> {
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
    ) -> Result<()> {
        let tables = space.tables(&self.memory);
        let root = self.memory.physical(space.root);
        let physical = extent.physical << abi::PAGE_SHIFT;
        let is_guest_virtual = self.is_guest_virtual(to);
        let access = Access {
            write: rights & rights::WRITE != 0,
            execute: rights & rights::EXECUTE != 0,
            device,
            user: rights & rights::USER != 0 || !is_guest_virtual,
            global: rights & rights::GLOBAL != 0 && is_guest_virtual,
        };
        let (page, order) = (extent.base, extent.order);
        in_format!(to, map(&tables, root, page, physical, order, access))
    }

    fn open_ports(&self, to: SpaceRef<A>, space: &Space<A>, extent: Extent) -> Result<()> {
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
        let words = |port: u64| self.memory.words(self.memory.following(map, (port >> 15) as u32));
        if extent.order < WORD_ORDER {
            let mask = ((1 << units(extent.order)) - 1) << (extent.base & 63);
            let word = &words(extent.base)[(extent.base >> WORD_ORDER & 511) as usize];
            let old = word.load(Ordering::Relaxed);
            word.store(if closed { old | mask } else { old & !mask }, Ordering::Relaxed);
        } else {
            let end = extent.base + units(extent.order);
            let mut port = extent.base;
            while port < end {
                let first = (port >> WORD_ORDER & 511) as usize;
                let count = (512 - first).min(((end - port) >> WORD_ORDER) as usize);
                for word in &words(port)[first..first + count] {
                    word.store(if closed { u64::MAX } else { 0 }, Ordering::Relaxed);
                }
                port += (count as u64) << WORD_ORDER;
            }
        }
        space.port_generation.set(space.port_generation.get() + 1);
        // Also for opened ports: CPUs that have the space loaded load its port map again.
        self.need_flush(of, space);
    }

    /// Requests the flush of an address space that an operation on its tables has returned.
    fn request_flush(&self, of: SpaceRef<A>, space: &Space<A>, flush: table::Flush) {
        if let Some(root) = flush.root() {
            debug_assert_eq!(root, self.memory.physical(space.root), "another address space");
            self.need_flush(of, space);
        }
    }

    fn need_flush(&self, of: SpaceRef<A>, space: &Space<A>) {
        space.change();
        let active = match of {
            SpaceRef::Task(task) => (0..A::cpus())
                .filter(|&cpu| self.cpus[cpu].space.get() == Some(task))
                .fold(0, |cpus, cpu| cpus | 1 << cpu),
            // They leave the guest for the flush.
            SpaceRef::Vm(_) => space.active.take(),
        };
        if active != 0 {
            self.flush.set(self.flush.get() | active);
            self.memory.request_work();
        }
    }

    /// Removes a node without children, with its page-table or port-map entries or its capability.
    fn remove_leaf(&self, handle: Handle<MapNode<A>>) {
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
                    let flush = in_format!(space_ref, unmap(&tables, root, node.base, node.order));
                    self.request_flush(space_ref, space, flush);
                    space.memory.remove(&self.memory, handle);
                }
            }
        }
        self.drop_node(handle);
        if let Some(object) = ended
            && let Some(count) = self.cap_count(object)
        {
            count.set(count.get() - 1);
            if count.get() == 0 {
                self.destroy(object);
            }
        }
    }

    /// Removes a mapping placed by the kernel ([`MapNode::fixed`]), if it still exists.
    pub fn remove_fixed(&self, handle: Handle<MapNode<A>>) {
        if self.memory.get(handle).is_some() {
            self.remove_leaf(handle);
        }
    }

    /// Maps one kernel frame into a task at a page-aligned address, as a fixed mapping.
    pub fn map_fixed(
        &self,
        task: Handle<Task<A>>,
        address: u64,
        frame: Frame,
        write: bool,
    ) -> Result<Handle<MapNode<A>>> {
        let owner = self.living_task(task)?;
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
}

/// Range of a mapping.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Memory, capability or port.
    pub kind: ItemKind,
    /// First unit in the address space.
    pub base: u64,
    /// First unit of the resource: physical page number or port.
    pub physical: u64,
    /// `log2` of the number of units.
    pub order: u8,
}

#[cfg(test)]
mod tests;
