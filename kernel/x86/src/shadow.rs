//! vTLB on SVM without nested paging (APM vol. 2 §15.25.1): shadow tables translate for the guest
//! ([`kernel_core::vtlb`]), and its page faults, loads of CR3 and `INVLPG` are exits, which end
//! here, in the loop of [`crate::svm::Svm::enter`], without the kernel lock.
//!
//! # Invariants
//!
//! * Only leaves that this module makes from the VM's nested tables enter the shadow tables. After
//!   an unmapping all are dropped before the next entry ([`Shadow::unmapped`]).
//! * The state page shows the guest's own control registers; the VMCB holds those of [`control`].
//! * Everything is used by the CPU that runs the vCPU, or under the lock.

pub(crate) mod control;
mod decode;
mod exits;
pub use exits::RFLAGS_TRACED;
mod memory;
#[cfg(feature = "testing")]
pub mod testing;

use core::cell::Cell;

use abi::Status;
use abi::vcpu::x86::{VcpuState, vtlb as option, vtlb_counter};
use abi::vm_mode::MIN_POOL;
use hw_x86::vmcb::Vmcb;
use kernel_core::Result;
use kernel_core::pool::{Account, Frame, Memory};
use kernel_core::vtlb::defects::breaks;
use kernel_core::vtlb::{FRAMES_PER_TABLE, Flush, Options, Vtlb};

use crate::format::UserFormat;
use crate::svm::asid::Asids;
use decode::Instruction;
use memory::GuestMemory;

pub use control::{ControlRegisters, Registers, set_intercepts};

type Tables = Vtlb<UserFormat, GuestMemory>;

/// FrameAccess of the state.
const FRAMES: u32 = size_of::<State>().div_ceil(4096) as u32;
/// Tables that are added to the pool at a time.
const GROWTH: u16 = 4;
/// Tables without which no guest runs: those of the smallest pool.
const MIN_TABLES: u16 = tables_in(MIN_POOL);

/// vTLB of a vCPU: its state is in frames of its own, since objects and stacks are small.
#[derive(Clone)]
pub struct Shadow {
    frame: Frame,
    state: *const State,
}

/// State of a vTLB. Memory that is zero is a valid value, which [`Shadow::new`] completes.
pub struct State {
    tables: Tables,
    control: ControlRegisters,
    /// Value of the state page's `vtlb` in use. 0, no optimisation, is what [`Vtlb::start`] begins
    /// with.
    word: Cell<u64>,
    /// The space is to be loaded before the next entry.
    needs_load: Cell<bool>,
    /// Guest-physical address or CR2, and information, of an exit for the VMM.
    fault: Cell<(u64, u64)>,
    /// Instructions that were decoded last.
    code: [Code; 8],
    counters: [Cell<u64>; vtlb_counter::COUNT],
}

/// An instruction that was decoded.
struct Code {
    /// Linear address, and [`Vtlb::epoch`].
    key: Cell<(u64, u64)>,
    /// Physical address of the shadow leaf, and its value.
    leaf: Cell<(u64, u64)>,
    /// Physical address of the instruction.
    at: Cell<u64>,
    /// Words of its first and of its eighth byte.
    words: Cell<(u64, u64)>,
    instruction: Cell<Instruction>,
}

impl core::ops::Deref for Shadow {
    type Target = State;

    #[inline(always)]
    fn deref(&self) -> &State {
        // SAFETY: frames for this use only, which live as long as the vCPU and were zeroed when
        // allocated, which is a valid value: all fields are cells of integers, of types for which
        // zero is defined, or made of such. Only the CPU that runs the vCPU or holds the lock uses
        // it.
        unsafe { &*self.state }
    }
}

impl Shadow {
    /// Allocates the vTLB of a vCPU, with a pool of at most `pool` pages, and sets the intercepts.
    pub fn new(memory: &Memory, factory: Account, pool: u64, vmcb: &Vmcb) -> Result<Self> {
        let frame = memory.alloc_raw(factory, FRAMES)?;
        let this = Self { frame, state: memory.address(frame).cast_const().cast() };
        this.start(pool, vmcb);
        Ok(this)
    }

    /// Frees it.
    pub fn free(&self, memory: &Memory) {
        for physical in self.tables.frames() {
            memory.free_raw(memory.frame_at(physical), FRAMES_PER_TABLE);
        }
        memory.free_raw(self.frame, FRAMES);
    }
}

impl State {
    fn count(&self, counter: usize) {
        self.counters[counter].set(self.counters[counter].get() + 1);
    }

    /// Begins with an empty pool of at most `pool` pages, and sets the intercepts.
    fn start(&self, pool: u64, vmcb: &Vmcb) {
        self.tables.start(tables_in(pool));
        control::set_intercepts(&vmcb.control);
        let registers = Registers::written(&vmcb.save);
        self.tables.set_top(registers.top());
        self.control.set(vmcb, registers);
        self.needs_load.set(true);
    }

    // ---- between entries ------------------------------------------------------------------------

    /// Sets the VM's nested tables.
    pub fn set_root(&self, root: u64) {
        if !self.tables.memory.has_root(root) {
            self.unmapped(root);
        }
    }

    /// The VM's nested tables, at `root`, have lost mappings.
    pub fn unmapped(&self, root: u64) {
        self.tables.memory.set_root(root);
        if !breaks("unmap-drops") {
            self.drop_all();
        }
    }

    fn drop_all(&self) {
        self.count(vtlb_counter::FLUSHES);
        self.tables.drop_all();
        self.needs_load.set(true);
    }

    /// Takes over the control registers that the VMM has written to the VMCB. Whatever they require
    /// to be flushed is flushed; everything, if none has changed.
    pub fn take_control(&self, vmcb: &Vmcb) {
        let (old, new) = (self.control.get(&vmcb.save), Registers::written(&vmcb.save));
        self.control.set(vmcb, new);
        let is_same = old == new && !breaks("drop-at-same-value");
        if old.role() != new.role() || is_same {
            self.tables.set_top(new.top());
            self.drop_all();
        } else if old.cr3 != new.cr3 && !breaks("load-at-cr3") {
            self.needs_load.set(true);
        }
    }

    /// Removes the translation of an address.
    pub fn invalidate(&self, address: u64) {
        self.count(vtlb_counter::INVALIDATIONS);
        self.tables.invalidate(address);
    }

    /// The guest's own control registers.
    pub fn control(&self) -> &ControlRegisters {
        &self.control
    }

    /// Copies the counters to the state page.
    pub fn show_counters(&self, state: &VcpuState) {
        let tables = &self.tables;
        self.counters[vtlb_counter::FILLS].set(tables.fills.get());
        self.counters[vtlb_counter::EVICTIONS].set(tables.evictions.get());
        self.counters[vtlb_counter::SYNCS].set(tables.syncs.get());
        for (to, from) in state.vtlb_counters.iter().zip(&self.counters) {
            to.set(from.get());
        }
    }

    /// Guest-physical address or CR2, and information, of the last exit for the VMM.
    pub fn fault(&self) -> (u64, u64) {
        self.fault.get()
    }

    /// Grows the pool if it is short of tables, takes new options over, and loads the space. Before
    /// an entry, under the lock.
    pub fn prepare(&self, memory: &Memory, factory: Account, state: &VcpuState) -> Result<()> {
        self.take_options(state.vtlb.get());
        if self.is_short_of_tables() {
            self.grow(memory, factory)?;
        }
        if self.needs_load.get() {
            self.load();
        }
        // Without a root the processor would walk memory that is no table.
        if self.needs_load.get() { Err(Status::NoQuota) } else { Ok(()) }
    }

    /// Takes over the options of the state page.
    fn take_options(&self, word: u64) {
        if self.word.replace(word) != word {
            self.tables.set_options(options(word));
            self.needs_load.set(true);
        }
    }

    fn is_short_of_tables(&self) -> bool {
        self.tables.free_tables() < GROWTH && self.tables.missing_tables() > 0
    }

    fn grow(&self, memory: &Memory, factory: Account) -> Result<()> {
        let tables = &self.tables;
        for _ in 0..GROWTH.min(tables.missing_tables()) {
            match memory.alloc_raw(factory, FRAMES_PER_TABLE) {
                Ok(frames) => tables.add_table(memory.physical(frames)),
                Err(status) if tables.size() < MIN_TABLES => return Err(status),
                Err(_) => {
                    tables.close_pool();
                    break;
                }
            }
        }
        Ok(())
    }

    /// Loads the space of the guest's CR3.
    fn load(&self) {
        let loaded = self.tables.load(self.control.last().root());
        self.needs_load.set(loaded.is_err());
        if self.word.get() & option::ASID == 0 {
            self.tables.set_tag(0, 0);
        }
    }

    /// Flushes the TLB as far as needed, and sets the root and the ASID of the VMCB.
    #[inline(always)]
    pub fn apply(&self, asids: &Asids, Vmcb { control, save }: &Vmcb) {
        let tables = &self.tables;
        if tables.needs_flush() {
            self.flush(asids.epoch());
        }
        let (mut asid, epoch) = tables.tag();
        if epoch != asids.epoch() && !(breaks("compare-epoch") && epoch != 0) {
            self.count(vtlb_counter::ASIDS);
            let epoch = asids.assign(control);
            asid = control.guest_asid.get();
            tables.set_tag(asid, epoch);
        }
        let root = tables.root().unwrap_or(0);
        control.guest_asid.set(asid);
        save.cr3.set(root);
        control.clean.set(0);
    }

    /// Flushes the TLB as far as needed.
    fn flush(&self, epoch: u64) {
        let tables = &self.tables;
        let invalidates = self.word.get() & option::INVALIDATE_PAGE != 0;
        match tables.take_flush() {
            Flush::None => {}
            Flush::Page { address, everywhere: true }
                if invalidates && !breaks("invalidate-everywhere") =>
            {
                tables.tags(epoch).for_each(|asid| invlpga(address, asid));
            }
            Flush::Page { address, .. } if invalidates => {
                let (asid, of) = tables.tag();
                if of == epoch {
                    invlpga(address, asid);
                }
            }
            Flush::Page { everywhere: false, .. } | Flush::Space => tables.set_tag(0, 0),
            Flush::Page { .. } | Flush::All => tables.drop_tags(),
        }
    }
}

/// Number of tables in a pool of `pages`.
const fn tables_in(pages: u64) -> u16 {
    (pages / FRAMES_PER_TABLE as u64) as u16
}

/// Options of the state page's word.
fn options(word: u64) -> Options {
    let has = |bit: u64| word & bit != 0;
    Options {
        spaces: (word >> option::SPACES_SHIFT) as u8,
        global: has(option::GLOBAL),
        sync: has(option::SYNC),
        trace: has(option::TRACE),
        protect: has(option::TRACE_WRITES),
    }
}

#[cfg(feature = "testing")]
use testing::invlpga;

/// Invalidates one address in the TLB.
#[cfg(not(feature = "testing"))]
fn invlpga(address: u64, asid: u32) {
    // Addresses of tables lack the sign.
    let address = ((address << 16) as i64 >> 16) as u64;
    // SAFETY: SVM is enabled; dropping a translation is harmless.
    unsafe {
        core::arch::asm!("invlpga rax, ecx", in("rax") address, in("ecx") asid, options(nostack));
    }
}
