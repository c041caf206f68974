//! Global allocator for programs that build tables or parse files.

use talc::TalcLock;
use talc::source::Claim;

/// Bytes of the heap, which is in the program's own memory.
pub const SIZE: usize = 8 << 10;

#[global_allocator]
static ALLOCATOR: TalcLock<spin::Mutex<()>, Claim> = {
    static mut HEAP: [u8; SIZE] = [0; SIZE];
    // SAFETY: no other code names the array.
    TalcLock::new(unsafe { Claim::array(&raw mut HEAP) })
};
