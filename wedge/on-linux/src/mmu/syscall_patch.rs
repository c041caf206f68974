//! Rewriting of user-mode system calls so that they enter the wedge without a signal.
//!
//! The first calls of a call site arrive by Syscall User Dispatch. A frequent call site is replaced
//! by a jump in a private copy of its page; guest memory does not change. The jump is `jmp [slot]`,
//! seven bytes in place of
//!
//! - `mov eax, NUMBER; syscall` or
//! - `mov r9, [rsp+8]; syscall` (the C library's `syscall`),
//!
//! whose first instruction moves to the call's stub. The slot's address is chosen so that the bytes
//! in place of `syscall` are `int 0x74`: a jump to them faults and still results in the system
//! call, and so does a call that the kernel restarts. Without such an instruction (`read` has
//! number 0, for which there are shorter encodings), `syscall` becomes a short jump to nearby
//! padding ([`padding`]), which holds the long jump. All other call sites keep using signals.
//!
//! Invariants: only read-only pages are copied; decisions, changes and scans use the executed copy;
//! a copy is dropped together with the mapping of its page, and slots are reused only after all
//! copies of the process were dropped.

use linux_raw_sys::general as linux;
use proto::hosted::layout;
use vmm_mem::GuestMemory;
use wedge_core::{VirtualCpu, padding};
use wedge_x86::{CLOSED, READABLE};

use crate::isolation::pkeys;
use crate::linux::sys::{self, Backing, Errno};
use crate::mmu::exec_scan::{self, Page, ScannedPage};
use crate::mmu::frames;
use crate::mmu::memory::{self, PAGE, Ram, leaf};
use crate::state::shared::process;

/// Slots: the third address byte is the opcode of `INT`, the fourth one its vector.
const SLOTS: u64 = 0x74cd_0000;
const SLOTS_LENGTH: u64 = 0x1_0000;
/// Stubs, the targets of the slots.
const STUBS: u64 = SLOTS + SLOTS_LENGTH;
const STUB: u64 = 32;
const MAX_CALLS: u32 = (SLOTS_LENGTH / 8) as u32;
/// Vector in place of `syscall`.
const VECTOR: u8 = 0x74;
const _: () = assert!(SLOTS >> 16 == (VECTOR as u64) << 8 | 0xcd);
const _: () =
    assert!(SLOTS >= layout::PRIVATE && STUBS + MAX_CALLS as u64 * STUB <= layout::WEDGE_END);

/// Number of calls by signal after which a call site is rewritten.
const REWRITE_AFTER: u32 = 4;
/// Capacity of the call site counters.
const PLACES: usize = 256;
/// Capacity in copied pages.
const PAGES: usize = 128;
/// Length of the replaced code in bytes.
const LENGTH: usize = 7;
/// `mov r9, [rsp+8]`.
const LOAD_SIXTH: [u8; 5] = [0x4c, 0x8b, 0x4c, 0x24, 0x08];
const MOVE_NUMBER: u8 = 0xb8;
/// First instruction of a stub that replaces none: `nop`.
const NONE: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
const SHORT_JUMP: u8 = 0xeb;
/// `syscall`.
pub const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// Rewritten system calls of a process.
pub struct Calls {
    /// Return address of a call site, and number of its calls.
    places: [(u64, u32); PLACES],
    /// Addresses of copied pages; 0: none.
    pages: [u64; PAGES],
    /// Offsets of the original pages in guest memory.
    frames: [u64; PAGES],
    used: u32,
}

fn calls() -> &'static mut Calls {
    // SAFETY: it is in the process's own memory, used by its only thread outside of signal
    // handlers. The functions here do not call each other while they hold it.
    unsafe { &mut *process().calls.at() }
}

/// Maps slots and stubs in a new process.
pub fn set_up() -> Result<(), Errno> {
    let length = SLOTS_LENGTH + u64::from(MAX_CALLS) * STUB;
    let rights = linux::PROT_READ | linux::PROT_WRITE | linux::PROT_EXEC;
    // SAFETY: the range is reserved for them.
    unsafe { sys::map(SLOTS, length, rights, Backing::Own) }?;
    // User mode jumps through the slots.
    let data = linux::PROT_READ | linux::PROT_WRITE;
    pkeys::protect(SLOTS, SLOTS_LENGTH, data, READABLE)?;
    pkeys::protect(STUBS, length - SLOTS_LENGTH, rights, CLOSED)
}

/// Counts a user-mode system call by signal, and rewrites a frequent call site. The instruction
/// pointer is after the call.
pub fn on_syscall_trap(cpu: &VirtualCpu, memory: &GuestMemory) {
    let after = cpu.frame.rip;
    let calls = calls();
    let place = &mut calls.places[(after ^ after >> 8) as usize % PLACES];
    if place.0 != after {
        *place = (after, 0);
    }
    place.1 += 1;
    if place.1.is_multiple_of(REWRITE_AFTER) && cpu.call_masks_flags() {
        // On failure signals continue.
        let _ = rewrite(cpu, memory, after);
    }
}

/// Replacement of a call site.
struct Replacement {
    /// First instruction of its stub.
    first: [u8; NONE.len()],
    /// Offset of the jump to the stub in the page.
    jump: usize,
    /// Short jump in place of `syscall`, if the jump is elsewhere.
    short: Option<[u8; SYSCALL.len()]>,
}

/// Returns the replacement of the call site before `after`, an offset in a page, whose last call
/// had this number.
fn find_replacement(bytes: &Page, after: usize, number: u32) -> Option<Replacement> {
    let call = after.checked_sub(SYSCALL.len())?;
    if bytes[call..after] != SYSCALL {
        return None;
    }
    // Check the byte before: a prefix would select another register.
    if let Some(start) = after.checked_sub(LENGTH).filter(|&start| start != 0) {
        let is_prefix = bytes[start - 1] & 0xf0 == 0x40;
        let first = *bytes[start..].first_chunk()?;
        let moves = first[0] == MOVE_NUMBER && first[1..] == number.to_le_bytes();
        if first == LOAD_SIXTH || !is_prefix && moves {
            return Some(Replacement { first, jump: start, short: None });
        }
    }
    let jump = padding::find(bytes, after, LENGTH)?;
    let distance = i8::try_from(jump - after).ok()?;
    Some(Replacement { first: NONE, jump, short: Some([SHORT_JUMP, distance as u8]) })
}

fn rewrite(cpu: &VirtualCpu, memory: &GuestMemory, after: u64) -> Option<()> {
    let page = after.checked_sub(1)? & !(PAGE - 1);
    let found = leaf(memory, cpu.paging(page, true).cr3, page)?;
    let frame = found.address + (page & (found.size - 1));
    if found.writable
        || !found.executable
        || pkeys::is_enabled() && !exec_scan::is_copy_of(page, frame)
    {
        return None;
    }
    let (offset, _) = Ram::new(&crate::state::shared::start()?).offset(frame)?;
    // With protection keys it is a copy already.
    if !pkeys::is_enabled() && !frames::may_copy(offset) {
        return None;
    }
    let mut original = [0; PAGE as usize];
    match pkeys::is_enabled() {
        // The executed copy.
        true => exec_scan::read(frame, &mut original)?,
        false => memory.read_slice(frame, &mut original).ok()?,
    }
    let replacement =
        find_replacement(&original, (after - page) as usize, cpu.frame.gpr[0] as u32)?;
    let calls = calls();
    if calls.used == MAX_CALLS {
        return None;
    }
    let slot = SLOTS + 8 * u64::from(calls.used);
    let stub = STUBS + STUB * u64::from(calls.used);
    let mut jump = [0xff, 0x24, 0x25, 0, 0, 0, 0];
    jump[3..].copy_from_slice(&(slot as u32).to_le_bytes());
    // Numbers and addresses are chosen by user mode, and must not encode a forbidden instruction in
    // the stub.
    let stub_code = stub_code(stub, &replacement.first, after);
    if exec_scan::find(&stub_code, 0).is_some() {
        return None;
    }
    let call = (after - page) as usize - SYSCALL.len();
    let jump = (replacement.jump, &jump[..]);
    let short = replacement.short.as_ref().map(|short| (call, &short[..]));
    let is_copied = calls.pages.contains(&page);
    if is_copied {
        // SAFETY: the copy is private memory, readable, and nothing writes to it now.
        let copy = unsafe { &*(page as *const Page) };
        // The page may have changed since it was copied, or another call's jump may be in the same
        // place.
        let is_same = |at: usize, length| copy[at..at + length] == original[at..at + length];
        if !is_same(call, SYSCALL.len()) || !is_same(replacement.jump, LENGTH) {
            return None;
        }
        original = *copy;
    }
    let wanted = if is_copied { page } else { 0 };
    let index = calls.pages.iter().position(|copied| *copied == wanted)?;
    let searched = ScannedPage::edited(original, [Some(jump), short].into_iter().flatten())?;
    calls.used += 1;
    // SAFETY: stubs are private memory, and this one is unused.
    unsafe { (stub as *mut [u8; STUB as usize]).write(stub_code) };
    // SAFETY: slots are private memory.
    unsafe { (slot as *mut u64).write(stub) };
    calls.pages[index] = page;
    calls.frames[index] = offset;
    // SAFETY: the page is user code or its copy; the guest does not run.
    unsafe { searched.publish(page) }.ok()
}

/// Changes the rights of a private copy.
pub fn protect(page: u64, rights: u32) -> Result<(), Errno> {
    // SAFETY: the page is a copy of a user page.
    unsafe { sys::protect(page, PAGE, rights) }
}

/// Returns the code of a stub: the first instruction, `mov rcx, after`, and a jump to the wedge.
fn stub_code(at: u64, first: &[u8], after: u64) -> [u8; STUB as usize] {
    let mut code = [0xcc; STUB as usize];
    code[..5].copy_from_slice(first);
    code[5..7].copy_from_slice(&[0x48, 0xb9]);
    code[7..15].copy_from_slice(&after.to_le_bytes());
    code[15] = 0xe9;
    let distance = wedge_x86::call_entry().wrapping_sub(at + 20) as u32;
    code[16..20].copy_from_slice(&distance.to_le_bytes());
    code
}

/// Returns whether the page of `rip` has rewritten calls, so that `int` at `rip` is the second half
/// of one.
pub fn is_rewritten(rip: u64) -> bool {
    let page = rip & !(PAGE - 1);
    page != 0 && calls().pages.contains(&page)
}

/// Returns the return address of the rewritten call whose second jump, between call site and stub,
/// is at `rip`.
fn pending_call(rip: u64) -> Option<u64> {
    if rip % PAGE > PAGE - LENGTH as u64 || !has_copy(rip & !(PAGE - 1)) {
        return None;
    }
    // SAFETY: the copy is private memory, readable, and nothing writes to it now.
    let jump = unsafe { *(rip as *const [u8; LENGTH]) };
    decode_jump(&jump).and_then(|(first, after)| (first == NONE).then_some(after))
}

/// Returns whether the second jump of a rewritten call is at `rip`.
pub fn is_on_way(rip: u64) -> bool {
    pending_call(rip).is_some()
}

/// Returns whether `rip` is in a stub.
pub fn is_stub(rip: u64) -> bool {
    (STUBS..STUBS + u64::from(MAX_CALLS) * STUB).contains(&rip)
}

/// Returns whether this process has a private copy of a page.
pub fn has_copy(page: u64) -> bool {
    let calls = calls();
    calls.used != 0 && calls.pages.contains(&page)
}

/// Returns whether a page's copy equals the page at this guest-physical address, except for
/// rewritten calls.
pub fn is_current(page: u64, frame: u64, memory: &GuestMemory) -> bool {
    /// Block size of the comparison in bytes.
    const CHUNK: usize = 64;
    let mut bytes = [0; PAGE as usize];
    if memory.read_slice(frame, &mut bytes).is_err() {
        return false;
    }
    // SAFETY: the copy is private memory, readable, and nothing writes to it now.
    let copy = unsafe { &*(page as *const [u8; PAGE as usize]) };
    let mut at = 0;
    while at < copy.len() {
        let end = copy.len().min(at + CHUNK);
        if bytes[at..end] == copy[at..end] {
            at = end;
        } else if bytes[at] == copy[at] {
            at += 1;
        } else {
            let Some(length) = replaced(page, copy, &bytes, at) else { return false };
            at += length;
        }
    }
    true
}

/// Returns the length of the rewritten code at an offset of a page's copy; `None`: the difference
/// has another cause.
fn replaced(page: u64, copy: &Page, original: &Page, at: usize) -> Option<usize> {
    if original[at..].starts_with(&SYSCALL) {
        let after = at + SYSCALL.len();
        let distance = copy.get(at + 1)?;
        let is_short = copy[at] == SHORT_JUMP
            && is_short(page, copy, original, after, after + usize::from(*distance));
        return is_short.then_some(SYSCALL.len());
    }
    let jump = copy.get(at..at + LENGTH)?;
    if is_jump_for(jump, original.get(at..at + LENGTH)?) {
        return Some(LENGTH);
    }
    let (first, after) = decode_jump(jump)?;
    let after = usize::try_from(after.checked_sub(page)?).ok()?;
    (first == NONE && is_short(page, copy, original, after, at)).then_some(LENGTH)
}

/// Returns whether the call before `after` was replaced by a short jump to the jump at `jump` in
/// padding.
fn is_short(page: u64, copy: &Page, original: &Page, after: usize, jump: usize) -> bool {
    let Some(call) = after.checked_sub(SYSCALL.len()) else { return false };
    let there = |bytes: &[u8]| bytes.get(jump..jump + LENGTH).and_then(decode_jump);
    original.get(call..after) == Some(&SYSCALL)
        && copy.get(call..after) == Some(&[SHORT_JUMP, jump.wrapping_sub(after) as u8])
        && padding::find(original, after, LENGTH) == Some(jump)
        && there(copy) == Some((NONE, page + after as u64))
}

/// Returns the first instruction of a jump's stub, and its return address; `None`: not such a jump.
fn decode_jump(jump: &[u8]) -> Option<([u8; NONE.len()], u64)> {
    let [0xff, 0x24, 0x25, slot @ ..] = jump else { return None };
    let slot = <[u8; 4]>::try_from(slot).map(u32::from_le_bytes).ok()?;
    let index = u64::from(slot).wrapping_sub(SLOTS) / 8;
    if index >= u64::from(calls().used) {
        return None;
    }
    // SAFETY: stubs are private memory, and this one is in use.
    let code = unsafe { *((STUBS + STUB * index) as *const [u8; STUB as usize]) };
    Some((*code.first_chunk()?, u64::from_le_bytes(*code[7..].first_chunk()?)))
}

/// Returns whether `jump` is the replacement of `original`.
fn is_jump_for(jump: &[u8], original: &[u8]) -> bool {
    let Some((first, _)) = decode_jump(jump) else { return false };
    original.starts_with(&first) && original.ends_with(&SYSCALL)
}

/// Drops the copies of frames in a range of guest memory, given by its offset.
pub fn drop_copies(offset: u64, length: u64) {
    for index in 0..PAGES {
        let calls = calls();
        let is_wanted = (offset..offset + length).contains(&calls.frames[index]);
        if calls.pages[index] != 0 && is_wanted {
            let page = calls.pages[index];
            memory::drop_range(page, page + PAGE);
        }
    }
}

/// Moves interrupted user mode back to its system call if it was between a rewritten call and its
/// stub.
pub fn step_back(cpu: &mut VirtualCpu) {
    if let Some(after) = pending_call(cpu.frame.rip) {
        cpu.frame.rip = after - SYSCALL.len() as u64;
    }
}

/// Drops the copy of a call's page when the guest kernel enters the handler of a system call that a
/// seccomp filter of the guest has refused, so that the handler finds the original code.
pub fn show_refused(cpu: &VirtualCpu, memory: &GuestMemory) {
    /// `SIGSYS`, and `SYS_SECCOMP` (`asm-generic/siginfo.h`).
    const SIGNAL: u32 = 31;
    const CODE: u32 = 1;
    let [number, information] = [7, 6].map(|register| cpu.frame.gpr[register]);
    if cpu.cpl != 3 || number != u64::from(SIGNAL) {
        return;
    }
    let mut bytes = [0; 24];
    if cpu.read(memory, information, &mut bytes).is_err() {
        return;
    }
    let word =
        |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    if word(0) == SIGNAL && word(8) == CODE {
        let after = u64::from(word(16)) | u64::from(word(20)) << 32;
        for page in [after.wrapping_sub(SYSCALL.len() as u64), after.wrapping_sub(1)] {
            let page = page & !(PAGE - 1);
            if page != 0 && has_copy(page) {
                memory::drop_range(page, page + PAGE);
            }
        }
    }
}

/// Forgets the copies in an unmapped range.
pub fn forget(start: u64, end: u64) {
    let calls = calls();
    if calls.used == 0 {
        return;
    }
    for page in &mut calls.pages {
        if (start..end).contains(page) {
            *page = 0;
        }
    }
    if calls.pages.iter().all(|&page| page == 0) {
        calls.used = 0;
        calls.places.fill((0, 0));
    }
}
