//! Raw system calls and deliberate faults, for programs that test the kernel.
//!
//! This module breaks the soundness argument of the crate on purpose. A program that enables the
//! feature must expect to be stopped at any point, and runs in a task of its own. The instructions
//! are those of the architecture's file.

use abi::PAGE_SIZE;

use crate::memory::Window;
use crate::syscall;

#[cfg_attr(target_arch = "aarch64", path = "probe/arm64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "probe/x86.rs")]
mod instructions;

pub use instructions::*;

/// Performs a system call with any number and arguments; returns the status and the result words.
pub fn system_call(op: u64, arguments: [u64; 6]) -> (u64, [u64; 6]) {
    // SAFETY: none; the program is a test and its task holds no data of value.
    unsafe { syscall::raw(op, arguments) }
}

/// Returns the address of this program's code and constants, which are mapped read-only.
pub fn code_address() -> u64 {
    undefined as *const () as u64
}

/// Returns a page of this program with a server that needs no memory, to be mapped executable at
/// the same address in another task, and the server's entry address. The server replies with the
/// caller's words, the last one replaced by the badge.
pub fn echo_server() -> (Window, u64) {
    unsafe extern "C" {
        safe fn native_echo();
    }
    page_of(native_echo as *const () as u64)
}

/// Returns a page of this program with a thread's code, to be mapped executable at the same address
/// in another task, and the entry address. The thread performs the system call described by four
/// words at its argument: the operation and three arguments.
pub fn call_once() -> (Window, u64) {
    unsafe extern "C" {
        safe fn native_call_once();
    }
    page_of(native_call_once as *const () as u64)
}

/// Returns the page of this program's code that has an entry address, and that address.
fn page_of(entry: u64) -> (Window, u64) {
    // SAFETY: code is constant.
    (unsafe { Window::read_only(entry & !(PAGE_SIZE - 1), PAGE_SIZE) }, entry)
}
