//! A host for unit tests of the MMU: page tables in a map, and a guest with its own page tables.

use std::boxed::Box;
use std::collections::BTreeMap;
use std::vec::Vec;

use hw_walk::Intent;
use hw_x86::paging::entry;
use linux_raw_sys::general as linux;
use proto::errno::Errno;
use proto::hosted::layout;
use vmm_mem::GuestMemory;
use wedge_core::VirtualCpu;

use crate::mmu::exec_scan::Page;
use crate::mmu::fill::Fault;
use crate::mmu::frame_table::CopiedFrames;
use crate::mmu::host::{HostMap, MappingListener, STUB};
use crate::mmu::ram::{PAGE, Ram};
use crate::mmu::space::AddressSpace;
use crate::mmu::{Mmu, Modes, VmView};
use crate::state::shared::{SharedVcpu, idle_state};

pub const READ: u32 = linux::PROT_READ;
pub const WRITE: u32 = linux::PROT_WRITE;
pub const EXEC: u32 = linux::PROT_EXEC;
/// Guest memory below and above the hole.
pub const LOW: u64 = 8 << 20;
/// Guest-physical address of the kernel image.
pub const IMAGE_START: u64 = 0x4_0000;
pub const HIGH: u64 = 2 << 20;
/// A page of user mode whose page table is not shared with other tests' pages.
pub const USER: u64 = 0x10_0000_0000;
/// Entry flags of a user page that is present, accessed and dirty.
pub const DATA: u64 =
    entry::PRESENT | entry::WRITE | entry::USER | entry::ACCESSED | entry::DIRTY | entry::NX;
/// The same for code.
pub const CODE: u64 = entry::PRESENT | entry::USER | entry::ACCESSED;
/// Jump target of stubs.
pub const ENTRY: u64 = 0x7000_1234;

/// Content of a mapped page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Content {
    /// A page of the file of guest memory, by its offset.
    File(u64),
    /// Private memory.
    Private(Box<Page>),
}

/// A mapped page: content and rights.
pub type Mapped = (Content, u32);

/// Call of a listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    Map(u64, u64, u32, u64),
    Unmap(u64, u64),
    Narrow(u64, u64, u32),
    Stale,
    Walk(u64),
    Follow,
    Interrupt(usize),
}

/// Mapping call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    Map,
    MapPrivate,
    Unmap,
    Protect,
}

/// The host of a test.
pub struct FakeHost {
    pub pages: BTreeMap<u64, Mapped>,
    pub copies: BTreeMap<u64, Box<Page>>,
    pub stubs: BTreeMap<u32, [u8; STUB]>,
    pub events: Vec<Event>,
    /// Number of mapping calls.
    pub calls: usize,
    /// Calls that may fail.
    pub fails: fn(Call) -> bool,
    /// Number of further ones that succeed before one fails, and of those that fail after it.
    pub fails_after: Option<usize>,
    pub fails_again: usize,
    pub serialized: usize,
    /// Rights of the guest kernel's memory, by its first page.
    pub closed: BTreeMap<u64, (u64, u32)>,
    /// Action of the other vCPUs while this one waits.
    pub on_yield: Option<Box<dyn FnMut()>>,
}

impl Default for FakeHost {
    fn default() -> Self {
        Self {
            pages: BTreeMap::new(),
            copies: BTreeMap::new(),
            stubs: BTreeMap::new(),
            events: Vec::new(),
            calls: 0,
            fails: |_| true,
            fails_after: None,
            fails_again: 0,
            serialized: 0,
            closed: BTreeMap::new(),
            on_yield: None,
        }
    }
}

impl FakeHost {
    fn call(&mut self, call: Call) -> Result<(), Errno> {
        self.calls += 1;
        match &mut self.fails_after {
            _ if !(self.fails)(call) => Ok(()),
            Some(0) => {
                match self.fails_again.checked_sub(1) {
                    Some(left) => self.fails_again = left,
                    None => self.fails_after = None,
                }
                Err(Errno(12))
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Returns the offset in guest memory and the rights of a mapped page.
    pub fn at(&self, page: u64) -> Option<(u64, u32)> {
        match self.pages.get(&page)? {
            (Content::File(offset), rights) => Some((*offset, *rights)),
            (Content::Private(_), rights) => Some((u64::MAX, *rights)),
        }
    }
}

impl HostMap for &mut FakeHost {
    fn map(&mut self, linear: u64, length: u64, rights: u32, offset: u64) -> Result<(), Errno> {
        self.call(Call::Map)?;
        for at in (0..length).step_by(PAGE as usize) {
            self.pages.insert(linear + at, (Content::File(offset + at), rights));
        }
        Ok(())
    }

    fn map_private(&mut self, page: u64, contents: &Page, rights: u32) -> Result<(), Errno> {
        self.call(Call::MapPrivate)?;
        self.pages.insert(page, (Content::Private(Box::new(*contents)), rights));
        Ok(())
    }

    fn unmap(&mut self, start: u64, end: u64) -> Result<(), Errno> {
        self.call(Call::Unmap)?;
        self.pages.retain(|page, _| !(start..end).contains(page));
        Ok(())
    }

    fn protect(&mut self, linear: u64, length: u64, rights: u32) -> Result<(), Errno> {
        self.call(Call::Protect)?;
        if linear >= layout::DIRECT || (layout::IMAGE..layout::MODULES).contains(&linear) {
            self.closed.insert(linear, (length, rights));
        }
        for (_, (_, old)) in self.pages.range_mut(linear..linear + length) {
            *old = rights;
        }
        Ok(())
    }

    fn close(&mut self, linear: u64, length: u64, rights: u32) -> Result<(), Errno> {
        self.closed.insert(linear, (length, rights));
        Ok(())
    }

    fn page(&self, page: u64) -> &Page {
        match self.pages.get(&page) {
            Some((Content::Private(contents), _)) => contents,
            other => panic!("{page:#x} is not private: {other:?}"),
        }
    }

    fn read(&self, linear: u64, to: &mut [u8]) {
        for (at, byte) in (linear..).zip(to) {
            *byte = HostMap::page(self, at & !(PAGE - 1))[(at % PAGE) as usize];
        }
    }

    fn code_copy(&mut self, offset: u64) -> &mut Page {
        self.copies.entry(offset).or_insert_with(|| Box::new([0; PAGE as usize]))
    }

    fn stub(&self, index: u32) -> [u8; STUB] {
        self.stubs[&index]
    }

    fn put_stub(&mut self, index: u32, code: &[u8; STUB]) {
        self.stubs.insert(index, *code);
    }

    fn serialize(&mut self) {
        self.serialized += 1;
    }
}

impl MappingListener for &mut FakeHost {
    fn on_map(&mut self, linear: u64, length: u64, rights: u32, offset: u64) {
        self.events.push(Event::Map(linear, length, rights, offset));
    }

    fn on_unmap(&mut self, start: u64, end: u64) {
        self.events.push(Event::Unmap(start, end));
    }

    fn on_narrow(&mut self, start: u64, end: u64, rights: u32) {
        self.events.push(Event::Narrow(start, end, rights));
    }

    fn on_stale(&mut self) {
        self.events.push(Event::Stale);
    }

    fn on_walk(&mut self, _: &GuestMemory, _: u64, linear: u64) {
        self.events.push(Event::Walk(linear));
    }

    fn on_follow(&mut self) {
        self.events.push(Event::Follow);
    }

    fn count(&mut self, _: usize) {}

    fn interrupt(&mut self, vcpu: usize) {
        self.events.push(Event::Interrupt(vcpu));
    }

    fn yield_now(&mut self) {
        if let Some(act) = &mut self.on_yield {
            act();
        }
    }

    fn fatal(&mut self, what: core::fmt::Arguments<'_>) -> ! {
        panic!("{what}")
    }
}

/// A guest with one process.
pub struct Rig {
    pub memory: GuestMemory,
    pub host: FakeHost,
    pub space: Box<AddressSpace>,
    pub vcpus: &'static [SharedVcpu],
    pub table: &'static CopiedFrames,
    pub modes: Modes,
    pub cpu: VirtualCpu,
    next_table: u64,
}

impl Rig {
    /// Creates a guest in user mode, without mapped pages and with an idle second vCPU.
    pub fn new() -> Self {
        // SAFETY: zeros are the initial state of both.
        let (vcpus, table) = unsafe {
            let vcpus = Box::<[SharedVcpu]>::new_zeroed_slice(2).assume_init();
            (vcpus, Box::<CopiedFrames>::new_zeroed().assume_init())
        };
        let memory = vmm_mem::testing::memory(&[(0, LOW), (1 << 32, HIGH)]);
        let mut cpu = VirtualCpu::new();
        cpu.cpl = 3;
        cpu.cr3 = PAGE;
        let rig = Self {
            memory,
            host: FakeHost::default(),
            space: Box::default(),
            vcpus: Box::leak(vcpus),
            table: Box::leak(table),
            modes: Modes { keys: false, batches: true, profile: false },
            cpu,
            next_table: 2 * PAGE,
        };
        rig.slot_root();
        rig.vcpus[1].idle.store(idle_state::SLEEPING, core::sync::atomic::Ordering::SeqCst);
        rig
    }

    /// Creates a guest with protection keys.
    pub fn with_keys() -> Self {
        let mut rig = Self::new();
        rig.modes.keys = true;
        rig
    }

    fn slot_root(&self) {
        self.vcpus[0].slots[0].root.store(self.cpu.cr3, core::sync::atomic::Ordering::SeqCst);
    }

    /// Returns the MMU.
    pub fn mmu(&mut self) -> Mmu<'_, &mut FakeHost> {
        let vm = VmView {
            ram: Ram { low: LOW, high: HIGH, image_start: IMAGE_START },
            memory: &self.memory,
            vcpus: self.vcpus,
            index: 0,
            vcpu: &self.vcpus[0],
            slot: &self.vcpus[0].slots[0],
            table: self.table,
            code: (layout::IMAGE + 0x10_0000, layout::IMAGE + 0x20_0000),
            modes: self.modes,
        };
        Mmu { space: &mut self.space, host: &mut self.host, vm }
    }

    /// Handles a page fault.
    pub fn fill(&mut self, linear: u64, intent: Intent) -> Fault {
        let cpu = self.cpu.clone();
        self.mmu().fill(&cpu, linear, intent)
    }

    /// Returns the guest-physical address of the entry for an address at a level, whose shift is
    /// given; creates the tables above it.
    pub fn entry(&mut self, linear: u64, level: u64) -> u64 {
        let mut table = self.cpu.cr3;
        for shift in [39, 30, 21, 12] {
            let at = table | (linear >> shift & 0x1ff) << 3;
            if shift == level {
                return at;
            }
            let value = self.memory.read::<u64>(at).unwrap();
            if value == 0 {
                let all = entry::PRESENT | entry::WRITE | entry::USER | entry::ACCESSED;
                self.memory.write(at, self.next_table | all).unwrap();
                self.next_table += PAGE;
            }
            table = self.memory.read::<u64>(at).unwrap() & entry::ADDRESS;
        }
        unreachable!("levels are 39, 30, 21 and 12")
    }

    /// Sets the guest's translation of a page.
    pub fn set(&mut self, linear: u64, address: u64, flags: u64) {
        let at = self.entry(linear, 12);
        self.memory.write(at, address | flags).unwrap();
    }

    /// Sets the guest's translation of contiguous pages.
    pub fn set_run(&mut self, linear: u64, address: u64, pages: u64, flags: u64) {
        for at in (0..pages).map(|page| page * PAGE) {
            self.set(linear + at, address + at, flags);
        }
    }

    /// Makes the process apply what the other vCPUs and the table ask for.
    pub fn sync(&mut self) {
        self.mmu().sync_before_entry();
    }
}
