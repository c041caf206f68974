//! Parts of filters as instructions, for conditions that `seccompiler` cannot express.

use linux_raw_sys::{general as linux, ptrace};
use proto::hosted::{Filters, layout};
use seccompiler::sock_filter;

use crate::Error;

/// Offsets in `struct seccomp_data` (seccomp(2)), little-endian.
pub mod data {
    pub const NUMBER: u32 = 0;
    pub const ARCHITECTURE: u32 = 4;
    pub const INSTRUCTION_POINTER: u32 = 8;
    /// High halves of the first two arguments.
    pub const FIRST_HIGH: u32 = 20;
    pub const SECOND_HIGH: u32 = 28;
}

/// Loads the word at this offset of `struct seccomp_data`.
pub const fn load(k: u32) -> sock_filter {
    sock_filter { code: 0x20, jt: 0, jf: 0, k }
}

/// Masks the accumulator.
const fn and(k: u32) -> sock_filter {
    sock_filter { code: 0x54, jt: 0, jf: 0, k }
}

/// Skips `jf` instructions unless the accumulator has this value.
pub const fn unless(k: u32, jf: u8) -> sock_filter {
    sock_filter { code: 0x15, jt: 0, jf, k }
}

/// Skips `jt` instructions if the accumulator has this value.
pub const fn equal(k: u32, jt: u8) -> sock_filter {
    sock_filter { code: 0x15, jt, jf: 0, k }
}

/// Skips `k` instructions.
pub const fn jump(k: u32) -> sock_filter {
    sock_filter { code: 0x05, jt: 0, jf: 0, k }
}

/// Skips `jt` instructions if the accumulator is larger.
const fn if_above(k: u32, jt: u8) -> sock_filter {
    sock_filter { code: 0x25, jt, jf: 0, k }
}

/// Returns this action.
pub const fn ret(k: u32) -> sock_filter {
    sock_filter { code: 0x06, jt: 0, jf: 0, k }
}

/// Prologue of the filter of a process that runs guest user mode. A 32-bit call may set
/// thread-local storage. A call from the host's vsyscall page, which Syscall User Dispatch does not
/// intercept, raises a signal. Other 32-bit calls get the action `other`; 64-bit calls continue in
/// the filter.
pub fn user_mode_calls(other: u32) -> [sock_filter; 16] {
    /// `set_thread_area` (`arch/x86/entry/syscalls/syscall_32.tbl` in Linux).
    const SET_THREAD_AREA: u32 = 243;
    /// `AUDIT_ARCH_I386`.
    const I386: u32 = 0x4000_0003;
    let [gettimeofday, time, getcpu] = layout::VSYSCALL_CALLS;
    let (high, low) = ((layout::VSYSCALL >> 32) as u32, layout::VSYSCALL as u32);
    use data::{ARCHITECTURE, INSTRUCTION_POINTER, NUMBER};
    [
        load(ARCHITECTURE),
        unless(I386, 4),
        load(NUMBER),
        unless(SET_THREAD_AREA, 1),
        ret(ptrace::SECCOMP_RET_ALLOW),
        ret(other),
        // Only for these calls: the host caches calls that are allowed by number alone.
        load(NUMBER),
        equal(gettimeofday, 2),
        equal(time, 1),
        unless(getcpu, 6),
        load(INSTRUCTION_POINTER + 4),
        unless(high, 4),
        load(INSTRUCTION_POINTER),
        and(0xffff_f000),
        unless(low, 1),
        ret(ptrace::SECCOMP_RET_TRAP),
    ]
}

/// Prologue of the filter of a guest process: kills it at a call whose first two arguments are an
/// address range that may reach [`layout::CONFIG`]. `seccompiler` only compares arguments with
/// constants; this adds them, in units of 4 GiB.
pub fn check_address_range() -> [sock_filter; 13] {
    /// `BPF_MISC | BPF_TAX`: copies the accumulator to X.
    const COPY: sock_filter = sock_filter { code: 0x07, jt: 0, jf: 0, k: 0 };
    /// `BPF_ALU | BPF_ADD | BPF_X`: adds X to the accumulator.
    const ADD: sock_filter = sock_filter { code: 0x0c, jt: 0, jf: 0, k: 0 };
    /// Upper halves of address and length, so the sum has no carry.
    const MOST: u32 = (layout::CONFIG >> 32) as u32;
    /// Upper halves of both: the lower halves add less than two.
    const MOST_TOGETHER: u32 = MOST - 2;
    [
        load(data::NUMBER),
        equal(linux::__NR_mmap, 3),
        equal(linux::__NR_munmap, 2),
        equal(linux::__NR_mprotect, 1),
        unless(linux::__NR_pkey_mprotect, 8),
        load(data::FIRST_HIGH),
        if_above(MOST, 5),
        COPY,
        load(data::SECOND_HIGH),
        if_above(MOST, 2),
        ADD,
        sock_filter { jf: 1, ..if_above(MOST_TOGETHER, 0) },
        ret(ptrace::SECCOMP_RET_KILL_PROCESS),
    ]
}

/// Returns an instruction as `struct sock_filter` is in memory.
pub fn word(instruction: &sock_filter) -> u64 {
    u64::from(instruction.code)
        | u64::from(instruction.jt) << 16
        | u64::from(instruction.jf) << 24
        | u64::from(instruction.k) << 32
}

/// Packs the length, the instructions (`struct sock_filter`), and zeros.
pub fn pack(program: &[sock_filter]) -> Result<Vec<u64>, Error> {
    let mut words = vec![program.len() as u64];
    words.extend(program.iter().map(word));
    if words.len() > Filters::WORDS {
        let text = format!("{} instructions (limit {})", program.len(), Filters::WORDS - 1);
        return Err(Error(text));
    }
    words.resize(Filters::WORDS, 0);
    Ok(words)
}
