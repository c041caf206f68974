//! Global allocator for programs that build tables or parse files.

use talc::TalcLock;
use talc::source::Claim;

/// Bytes of the heap, which is in the program's own memory. A VMM of AArch64 builds the guest's
/// device tree there, of up to 8 KiB, in an array that doubles while the last one still exists.
pub const SIZE: usize = if cfg!(target_arch = "aarch64") { 32 << 10 } else { 8 << 10 };

#[global_allocator]
static ALLOCATOR: TalcLock<spin::Mutex<()>, Claim> = {
    static mut HEAP: [u8; SIZE] = [0; SIZE];
    // SAFETY: no other code names the array.
    TalcLock::new(unsafe { Claim::array(&raw mut HEAP) })
};
