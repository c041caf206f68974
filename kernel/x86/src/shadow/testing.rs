//! The vTLB of one vCPU on an invented machine: physical memory is an array of this thread, and
//! the TLB is the caller's. For the model in `fuzz`.

use core::cell::{Cell, RefCell};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::boxed::Box;
use std::vec::Vec;

use abi::vcpu::x86::{VcpuState, vtlb_counter};
use hw_x86::paging::{ENTRIES, entry};
use hw_x86::vmcb::{Vmcb, exit, tlb_control};
use kernel_core::vtlb::FRAMES_PER_TABLE;

use super::{Registers, State};
use crate::svm::asid::Asids;

pub use super::control::{Mode, Registers as GuestRegisters};
pub use crate::hvm::internal::NEEDS_FRAMES;
pub use kernel_core::vtlb::defects::{Place, choose_place, choose_rule, places, steps};

/// Pages of physical memory.
const PAGES: usize = 4096;
/// Attribute of a code segment: 64-bit mode.
const LONG_CODE: u64 = 1 << (16 + 9);

std::thread_local! {
    static MEMORY: &'static [[AtomicU64; ENTRIES]] =
        (0..PAGES).map(|_| [const { AtomicU64::new(0) }; ENTRIES]).collect::<Vec<_>>().leak();
    static STORE: Cell<Option<Store>> = const { Cell::new(None) };
    static INVALIDATED: RefCell<Vec<(u32, u64)>> = const { RefCell::new(Vec::new()) };
}

/// Width of physical addresses.
pub fn physical_bits() -> u32 {
    40
}

/// Number of ASIDs, including the host's ASID 0: few, so that they are exhausted often.
pub fn available() -> u32 {
    16
}

/// Words of a page of physical memory.
///
/// # Panics
/// If it is outside of memory: the code has left the tables of the vCPU and its VM.
pub fn page(physical: u64) -> &'static [AtomicU64; ENTRIES] {
    interleave();
    frame(physical)
}

fn frame(physical: u64) -> &'static [AtomicU64; ENTRIES] {
    &MEMORY.with(|memory| *memory)[((physical & entry::ADDRESS) >> 12) as usize]
}

/// A store of another processor while the code runs.
#[derive(Clone, Copy, Debug)]
pub struct Store {
    /// Looks at pages and words before it.
    pub after: u64,
    /// Physical address.
    pub at: u64,
    /// Value.
    pub value: u64,
}

/// Sets the next store of another processor. Returns the one before if it was not executed.
pub fn set_store(store: Option<Store>) -> Option<Store> {
    STORE.replace(store)
}

/// Counts a look at memory, and executes the store of another processor before it.
fn interleave() {
    let Some(store) = STORE.take() else { return };
    match store.after.checked_sub(1) {
        Some(after) => STORE.set(Some(Store { after, ..store })),
        None => frame(store.at)[store.at as usize / 8 % ENTRIES].store(store.value, Relaxed),
    }
}

/// Word of physical memory.
///
/// # Panics
/// As [`page`].
pub fn word(physical: u64) -> &'static AtomicU64 {
    &page(physical)[physical as usize / 8 % ENTRIES]
}

/// Notes an invalidation of one address, for the caller's TLB.
pub fn invlpga(address: u64, asid: u32) {
    INVALIDATED.with_borrow_mut(|list| list.push((asid, address)));
}

/// A vCPU with a vTLB.
pub struct TestVcpu {
    state: Box<State>,
    vmcb: Box<Vmcb>,
    page: Box<VcpuState>,
    asids: Asids,
}

/// Returns a value whose memory is zero.
macro_rules! zeroed {
    ($type:ty) => {
        // SAFETY: all fields are cells and atomics of integers, or of types for which zero is
        // defined, as `Shadow::deref` and `Svm::vmcb` state.
        unsafe { Box::<$type>::new_zeroed().assume_init() }
    };
}

impl TestVcpu {
    /// Creates a vCPU with a pool of at most `tables` tables, these control registers and options
    /// ([`abi::vcpu::x86::vtlb`]), and nested tables at `nested`.
    pub fn new(tables: u64, registers: Registers, options: u64, nested: u64) -> Self {
        let this = Self {
            state: zeroed!(State),
            vmcb: zeroed!(Vmcb),
            page: zeroed!(VcpuState),
            asids: Asids::new(),
        };
        this.write(registers);
        this.state.start(tables * u64::from(FRAMES_PER_TABLE), &this.vmcb);
        this.page.vtlb.set(options);
        this.state.set_root(nested);
        this
    }

    fn write(&self, registers: Registers) {
        let save = &self.vmcb.save;
        save.cr0.set(registers.cr0);
        save.cr3.set(registers.cr3);
        save.cr4.set(registers.cr4);
        save.efer.set(registers.efer);
    }

    /// The VMCB.
    pub fn vmcb(&self) -> &Vmcb {
        &self.vmcb
    }

    /// Writes control registers as the VMM does after an exit.
    pub fn write_control(&self, registers: Registers) {
        self.write(registers);
        self.state.take_control(&self.vmcb);
    }

    /// Removes a translation as the VMM does after an exit.
    pub fn invalidate(&self, address: u64) {
        self.state.invalidate(address);
    }

    /// The nested tables have lost mappings.
    pub fn unmapped(&self, nested: u64) {
        self.state.unmapped(nested);
    }

    /// Sets the options.
    pub fn set_options(&self, options: u64) {
        self.page.vtlb.set(options);
    }

    /// Prepares an entry. `frames`: returns the physical address of the frames of a further table.
    pub fn prepare(&self, mut frames: impl FnMut() -> u64) {
        let tables = &self.state.tables;
        self.state.take_options(self.page.vtlb.get());
        if self.state.is_short_of_tables() {
            for _ in 0..super::GROWTH.min(tables.missing_tables()) {
                tables.add_table(frames());
            }
        }
        if self.state.needs_load.get() {
            self.state.load();
        }
        assert!(!self.state.needs_load.get(), "a prepared vCPU has a root");
        self.vmcb.control.tlb_control.set(tlb_control::NOTHING);
        self.state.apply(&self.asids, &self.vmcb);
    }

    /// Handles the page fault of an access with an error code at a privilege level. Returns the
    /// reason of the exit for the VMM, if there is one.
    pub fn page_fault(&self, address: u64, code: u64, level: u8) -> Option<u64> {
        let Vmcb { control, save } = &*self.vmcb;
        control.exit_info1.set(code);
        control.exit_info2.set(address);
        save.cpl.set(level);
        self.exit(exit::PAGE_FAULT)
    }

    /// Executes an instruction at `rip` that the kernel may recognise, in 64-bit mode at CPL 0,
    /// with its operand in RAX. Returns the reason of the exit for the VMM, if there is one.
    pub fn instruction(&self, code: u64, rip: u64, operand: u64) -> Option<u64> {
        let save = &self.vmcb.save;
        save.rip.set(rip);
        save.rax.set(operand);
        save.cpl.set(0);
        save.segments[VcpuState::CS].access.set(LONG_CODE);
        self.exit(code)
    }

    fn exit(&self, code: u64) -> Option<u64> {
        let control = &self.vmcb.control;
        control.event_inj.set(0);
        control.exit_code.set(code);
        self.state.handle(&self.asids, &self.vmcb, &self.page)
    }

    /// Guest-physical address or CR2, and information, of the last exit for the VMM.
    pub fn fault(&self) -> (u64, u64) {
        self.state.fault()
    }

    /// The addresses that were invalidated since the last call, with their ASIDs.
    pub fn take_invalidations(&self) -> Vec<(u32, u64)> {
        INVALIDATED.take()
    }

    /// Number of ASIDs that were assigned.
    pub fn asids(&self) -> u64 {
        self.state.counters[vtlb_counter::ASIDS].get()
    }
}

/// Clears pages of physical memory.
pub fn clear(pages: core::ops::Range<u64>) {
    for page in &MEMORY.with(|memory| *memory)[pages.start as usize..pages.end as usize] {
        page.iter().for_each(|word| word.store(0, Relaxed));
    }
}
