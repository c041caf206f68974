//! Protection keys (Linux's `Documentation/core-api/protection-keys.rst`): guest user mode can
//! access neither the guest kernel nor the wedge, although all are mapped in the same process.
//!
//! Memory of user mode has key 0. All other memory has [`CLOSED`], or [`READABLE`] where the host
//! kernel or the CPU reads with user-mode rights: the selector of system call dispatch, and the
//! jump slots of rewritten system calls. Keys do not restrict instruction fetches;
//! `crate::mmu::exec_scan` controls executable pages. `docs/design/0013-protection-keys.md` has the
//! full argument.

use host_linux::sys::{self, Backing, Errno, NumberCall};
use linux_raw_sys::general as linux;
use proto::hosted::{layout, option};
use wedge_x86::{CLOSED, PRIVATE, READABLE};

use crate::isolation::contract::{Isolation, SignalEntry, SignalStack};
use crate::isolation::signal_stacks;
use crate::mmu::guest_range;
use crate::mmu::ram::Ram;
use crate::state::config::has;
use crate::state::shared::{OWN_VCPU, SIGNAL_STACK, SIGNAL_STACK_LENGTH, VCPU_LENGTH, cell};

const PAGE: u64 = 4096;
const DATA: u32 = linux::PROT_READ | linux::PROT_WRITE;

/// Allocates two protection keys, for this process and its children.
fn allocate() -> Result<(), Errno> {
    /// `EBUSY`.
    const OTHERS: Errno = Errno(16);
    for key in [CLOSED, READABLE] {
        // The keys permit all accesses for now.
        let given = sys::call_with_numbers(NumberCall::AllocateKey, [0; 4])?;
        if given != u64::from(key) {
            return Err(OTHERS);
        }
    }
    Ok(())
}

/// Sets the key and the rights of memory, if protection keys are in use.
pub fn protect(start: u64, length: u64, rights: u32, key: u32) -> Result<(), Errno> {
    if !has(option::KEYS) || length == 0 {
        return Ok(());
    }
    let arguments = [start, length, rights.into(), key.into(), 0, 0];
    // SAFETY: the callers own the memory and determine its rights.
    unsafe { sys::call(linux::__NR_pkey_mprotect, arguments).map(drop) }
}

/// Signal stack that the host disables while a handler runs (`SS_AUTODISARM`, sigaltstack(2)),
/// until it returns or is abandoned: whatever user mode's stack pointer is, its signal frame is at
/// the top, and frames of nested signals are below.
static DISARMED_STACK: SignalStack = [SIGNAL_STACK, 1 << 31, SIGNAL_STACK_LENGTH];

/// Isolation by protection keys.
pub struct ProtectionKeys;

impl Isolation for ProtectionKeys {
    fn set_up_vm(&self) -> Result<(), Errno> {
        allocate()?;
        protect(layout::SHARED, layout::SHARED_LENGTH, DATA, CLOSED)
    }

    fn protect_config(&self) -> Result<(), Errno> {
        let length = layout::CONFIG_LENGTH + layout::CPU_SETS_LENGTH;
        protect(layout::CONFIG, length, linux::PROT_READ, CLOSED)
    }

    /// Closes a process's private memory and that of its vCPU, except for the register page and the
    /// signal stacks, which the host writes with user-mode rights and with the rights of signal
    /// handlers.
    fn protect_process(&self) -> Result<(), Errno> {
        protect(PRIVATE, PAGE, DATA, READABLE)?;
        protect(PRIVATE + PAGE, SIGNAL_STACK - PRIVATE - PAGE, DATA, CLOSED)?;
        // These are separate mappings, which have no key yet.
        protect(OWN_VCPU, VCPU_LENGTH, DATA, CLOSED)?;
        protect(layout::STUBS, layout::STUBS_LENGTH, DATA | linux::PROT_EXEC, CLOSED)?;
        // SAFETY: all processes of a vCPU share the cell and write the same value.
        unsafe { (*cell()).keys = 1 };
        Ok(())
    }

    fn map_process(&self, ram: &Ram, vcpu: usize, _slot: usize) -> Result<(), Errno> {
        let length = ram.length();
        let copies = Backing::Shared(layout::MEMORY_FD, ram.copies(vcpu));
        guest_range::map(layout::COPIES, length, DATA, copies)?;
        protect(layout::COPIES, length, DATA, CLOSED)
    }

    fn scans_code(&self) -> bool {
        true
    }

    fn signal_entry(&self) -> SignalEntry {
        SignalEntry { handler: Some(wedge_x86::keyed_handler()), stack: &DISARMED_STACK }
    }

    fn stack_after_handler(&self) -> Option<&'static SignalStack> {
        Some(&DISARMED_STACK)
    }

    fn on_signal(&self, context: u64) {
        signal_stacks::note_kernel_signal(context);
    }

    fn before_entry(&self) {
        // The kernel may return to user mode without the wedge.
        signal_stacks::scrub();
    }
}
