//! Protection keys (Linux' `Documentation/core-api/protection-keys.rst`): a guest's programs do not reach its kernel nor the wedge, though
//! all of it is mapped in the same process.
//!
//! What programs may use has key 0. All else has [`CLOSED`], or [`READABLE`] where the host's kernel or the processor reads with a program's rights: the
//! selector of dispatched system calls, and the slots of rewritten ones. Keys do not stop fetches: what is executable is `crate::exec_scan`'s
//! concern. `docs/design/0013-protection-keys.md` has the whole argument.

use linux_raw_sys::general as linux;
use proto::wedge::{layout, option};
use wedge_x86::{CLOSED, PRIVATE, READABLE};

use crate::config::has;
use crate::shared::{OWN_VCPU, SIGNAL_STACK, VCPU_LENGTH, cell};
use crate::sys::{self, Errno};

const PAGE: u64 = 4096;
const DATA: u32 = linux::PROT_READ | linux::PROT_WRITE;

/// Whether they are used.
pub fn is_enabled() -> bool {
    has(option::KEYS)
}

/// Takes two keys of the host, for this process and those that it makes.
pub fn allocate() -> Result<(), Errno> {
    /// `EBUSY`.
    const OTHERS: Errno = Errno(16);
    for key in [CLOSED, READABLE] {
        // SAFETY: no memory is touched. All rights, for the time being.
        let given = unsafe { sys::call(linux::__NR_pkey_alloc, [0; 6]) }?;
        if given != u64::from(key) {
            return Err(OTHERS);
        }
    }
    Ok(())
}

/// Gives memory its key and rights, if keys are used.
pub fn protect(start: u64, length: u64, rights: u32, key: u32) -> Result<(), Errno> {
    if !is_enabled() || length == 0 {
        return Ok(());
    }
    let arguments = [start, length, rights.into(), key.into(), 0, 0];
    // SAFETY: the callers name memory whose rights are theirs to say.
    unsafe { sys::call(linux::__NR_pkey_mprotect, arguments).map(drop) }
}

/// Closes the memory that the processes of a machine share.
pub fn protect_shared() -> Result<(), Errno> {
    protect(layout::SHARED, layout::SHARED_LENGTH, DATA, CLOSED)
}

/// Closes a process's own memory and that of its virtual CPU, but for the page of registers and the stacks of signals, to which the host writes with a program's rights and
/// with those that it gives to handlers.
pub fn protect_own() -> Result<(), Errno> {
    protect(PRIVATE, PAGE, DATA, READABLE)?;
    protect(PRIVATE + PAGE, SIGNAL_STACK - PRIVATE - PAGE, DATA, CLOSED)?;
    // Mapped once more, so they have lost their key.
    protect(OWN_VCPU, VCPU_LENGTH, DATA, CLOSED)?;
    protect(layout::STUBS, layout::STUBS_LENGTH, DATA | linux::PROT_EXEC, CLOSED)?;
    // SAFETY: the cell is the same in all processes of a virtual CPU, and the byte has this value in each.
    unsafe { (*cell()).keys = is_enabled().into() };
    Ok(())
}
