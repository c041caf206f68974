//! System calls.

use abi::{Op, Status};

pub(crate) use crate::processor::{Words, raw};

/// Performs a system call.
///
/// # Safety
/// The operation must not change memory that holds Rust objects, as the crate's documentation
/// explains.
#[inline(always)]
pub(crate) unsafe fn call(op: Op, arguments: Words) -> Result<Words, Status> {
    let (status, words) = {
        // SAFETY: the caller guarantees the operation.
        unsafe { raw(op as u64, arguments) }
    };
    if status == Status::Ok as u64 { Ok(words) } else { Err(Status::from_code(status)) }
}
