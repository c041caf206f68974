//! System calls of programs without a signal.
//!
//! The first calls from a place come by Syscall User Dispatch. A place that calls often gets a jump instead, in a copy of its page that
//! this process alone has; the guest's memory is not changed. The jump is `jmp [slot]`, seven bytes over
//!
//! - `mov eax, NUMBER; syscall` or
//! - `mov r9, [rsp+8]; syscall` (the C library's `syscall`),
//!
//! whose first instruction is carried out in the call's stub. The slot's address is chosen so that the bytes over `syscall` are `int 0x74`: who
//! jumps there faults and gets the system call all the same, and a call that the kernel restarts, too. Where there is no such instruction before
//! it (`read`'s number is 0, for which there are shorter ones), `syscall` becomes a short jump to bytes near it that are never executed
//! ([`padding`]), where the other jump is. Elsewhere signals stay.
//!
//! Invariants: only pages that are not writable are copied; what is decided on, changed and searched is the copy that is executed; a copy is dropped with any other mapping of its page, and slots are used
//! again only when all copies of the process have been dropped.

use linux_raw_sys::general as linux;
use proto::wedge::layout;
use vmm_mem::GuestMemory;
use wedge_core::{VirtualCpu, padding};
use wedge_x86::{CLOSED, READABLE};

use crate::exec_scan::{self, Page, Searched};
use crate::memory::{self, PAGE, Ram, leaf};
use crate::shared::mine;
use crate::sys::{self, Backing, Errno};
use crate::{frames, pkeys};

/// Slots: its third byte is `INT`, its fourth the vector.
const SLOTS: u64 = 0x74cd_0000;
const SLOTS_LENGTH: u64 = 0x1_0000;
/// Code that the slots lead to.
const STUBS: u64 = SLOTS + SLOTS_LENGTH;
const STUB: u64 = 32;
const MOST: u32 = (SLOTS_LENGTH / 8) as u32;
/// What is over `syscall`.
const VECTOR: u8 = 0x74;
const _: () = assert!(SLOTS >> 16 == (VECTOR as u64) << 8 | 0xcd);
const _: () = assert!(SLOTS >= layout::PRIVATE && STUBS + MOST as u64 * STUB <= layout::WEDGE_END);

/// Calls by signal from a place until it is rewritten.
const OFTEN: u32 = 4;
/// Places whose calls are counted.
const PLACES: usize = 256;
/// Pages that are copied.
const PAGES: usize = 128;
/// Bytes that are replaced.
const LENGTH: usize = 7;
/// `mov r9, [rsp+8]`.
const LOAD_SIXTH: [u8; 5] = [0x4c, 0x8b, 0x4c, 0x24, 0x08];
const MOVE_NUMBER: u8 = 0xb8;
/// First instruction of a stub that has none to carry out: `nop`.
const NONE: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
const SHORT_JUMP: u8 = 0xeb;
/// `syscall`.
pub const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// What a process knows of its calls.
pub struct Calls {
    /// Address behind the call, and how often.
    places: [(u64, u32); PLACES],
    /// Addresses of copied pages; 0: none.
    pages: [u64; PAGES],
    /// Offsets in guest memory of what they are copies of.
    frames: [u64; PAGES],
    used: u32,
}

fn calls() -> &'static mut Calls {
    // SAFETY: it is in the process's own memory, and only its one thread uses it, outside of signal handlers. The functions here do not call
    // each other while they have it.
    unsafe { &mut *mine().calls.at() }
}

/// Maps slots and stubs. For new processes.
pub fn set_up() -> Result<(), Errno> {
    let length = SLOTS_LENGTH + u64::from(MOST) * STUB;
    let rights = linux::PROT_READ | linux::PROT_WRITE | linux::PROT_EXEC;
    // SAFETY: the range is set aside for this.
    unsafe { sys::map(SLOTS, length, rights, Backing::Own) }?;
    // Jumps of programs go through slots.
    let data = linux::PROT_READ | linux::PROT_WRITE;
    pkeys::protect(SLOTS, SLOTS_LENGTH, data, READABLE)?;
    pkeys::protect(STUBS, length - SLOTS_LENGTH, rights, CLOSED)
}

/// A program has made a system call by signal; the instruction pointer is behind it.
pub fn on_syscall_trap(cpu: &VirtualCpu, memory: &GuestMemory) {
    let behind = cpu.frame.rip;
    let calls = calls();
    let place = &mut calls.places[(behind ^ behind >> 8) as usize % PLACES];
    if place.0 != behind {
        *place = (behind, 0);
    }
    place.1 += 1;
    if place.1.is_multiple_of(OFTEN) && cpu.call_masks_flags() {
        // If it cannot be, signals go on.
        let _ = rewrite(cpu, memory, behind);
    }
}

/// How a place can be rewritten.
struct Form {
    /// What its stub carries out first.
    first: [u8; NONE.len()],
    /// Offset in the page of the jump to the stub.
    jump: usize,
    /// Over `syscall`, if the jump is elsewhere.
    short: Option<[u8; SYSCALL.len()]>,
}

/// The form for the place before `behind`, an offset in a page; its last call had this number.
fn form(bytes: &Page, behind: usize, number: u32) -> Option<Form> {
    let call = behind.checked_sub(SYSCALL.len())?;
    if bytes[call..behind] != SYSCALL {
        return None;
    }
    // The byte before is looked at, too: a prefix would make another register of it.
    if let Some(start) = behind.checked_sub(LENGTH).filter(|&start| start != 0) {
        let is_prefix = bytes[start - 1] & 0xf0 == 0x40;
        let first = *bytes[start..].first_chunk()?;
        let moves = first[0] == MOVE_NUMBER && first[1..] == number.to_le_bytes();
        if first == LOAD_SIXTH || !is_prefix && moves {
            return Some(Form { first, jump: start, short: None });
        }
    }
    let jump = padding::find(bytes, behind, LENGTH)?;
    let distance = i8::try_from(jump - behind).ok()?;
    Some(Form { first: NONE, jump, short: Some([SHORT_JUMP, distance as u8]) })
}

fn rewrite(cpu: &VirtualCpu, memory: &GuestMemory, behind: u64) -> Option<()> {
    let page = behind.checked_sub(1)? & !(PAGE - 1);
    let found = leaf(memory, cpu.paging(page, true).cr3, page)?;
    let frame = found.address + (page & (found.size - 1));
    if found.writable
        || !found.executable
        || pkeys::is_enabled() && !exec_scan::is_copy_of(page, frame)
    {
        return None;
    }
    let (offset, _) = Ram::new(&crate::shared::start()?).offset(frame)?;
    if frames::is_enabled() && !frames::may_copy(offset) {
        return None;
    }
    let mut original = [0; PAGE as usize];
    match pkeys::is_enabled() {
        // As it is mapped.
        true => exec_scan::read(frame, &mut original)?,
        false => memory.read_slice(frame, &mut original).ok()?,
    }
    let form = form(&original, (behind - page) as usize, cpu.frame.gpr[0] as u32)?;
    let calls = calls();
    if calls.used == MOST {
        return None;
    }
    let slot = SLOTS + 8 * u64::from(calls.used);
    let stub = STUBS + STUB * u64::from(calls.used);
    let mut jump = [0xff, 0x24, 0x25, 0, 0, 0, 0];
    jump[3..].copy_from_slice(&(slot as u32).to_le_bytes());
    // What a program chooses, numbers and addresses, must not make another instruction there.
    let stub_code = stub_code(stub, &form.first, behind);
    if exec_scan::find(&stub_code, 0).is_some() {
        return None;
    }
    let call = (behind - page) as usize - SYSCALL.len();
    let jump = (form.jump, &jump[..]);
    let short = form.short.as_ref().map(|short| (call, &short[..]));
    let is_copied = calls.pages.contains(&page);
    if is_copied {
        // SAFETY: the copy is this process's own memory, readable, and nobody writes to it now.
        let copy = unsafe { &*(page as *const Page) };
        // The page may have changed since it was copied, and another call's jump may be where this one's is to be.
        let is_same = |at: usize, length| copy[at..at + length] == original[at..at + length];
        if !is_same(call, SYSCALL.len()) || !is_same(form.jump, LENGTH) {
            return None;
        }
        original = *copy;
    }
    let wanted = if is_copied { page } else { 0 };
    let index = calls.pages.iter().position(|copied| *copied == wanted)?;
    let searched = Searched::edited(original, [Some(jump), short].into_iter().flatten())?;
    calls.used += 1;
    // SAFETY: stubs are this process's own memory, and this one is not used yet.
    unsafe { (stub as *mut [u8; STUB as usize]).write(stub_code) };
    // SAFETY: slots are this process's own memory.
    unsafe { (slot as *mut u64).write(stub) };
    calls.pages[index] = page;
    calls.frames[index] = offset;
    // SAFETY: a page of a program of the guest is mapped there, or its copy; the guest does not run.
    unsafe { searched.publish(page) }.ok()
}

/// Changes the rights of a page that this process alone has.
pub fn protect(page: u64, rights: u32) -> Result<(), Errno> {
    // SAFETY: the page is a copy of a program's.
    unsafe { sys::call(linux::__NR_mprotect, [page, PAGE, rights.into(), 0, 0, 0]).map(drop) }
}

/// The first instruction, `mov rcx, behind`, and a jump to the wedge.
fn stub_code(at: u64, first: &[u8], behind: u64) -> [u8; STUB as usize] {
    let mut code = [0xcc; STUB as usize];
    code[..5].copy_from_slice(first);
    code[5..7].copy_from_slice(&[0x48, 0xb9]);
    code[7..15].copy_from_slice(&behind.to_le_bytes());
    code[15] = 0xe9;
    let distance = wedge_x86::call_entry().wrapping_sub(at + 20) as u32;
    code[16..20].copy_from_slice(&distance.to_le_bytes());
    code
}

/// Whether a call was rewritten at an address, of which the second part is `int` at `rip`.
pub fn is_rewritten(rip: u64) -> bool {
    let page = rip & !(PAGE - 1);
    page != 0 && calls().pages.contains(&page)
}

/// The address behind the rewritten call whose second jump, between its place and its stub, is at `rip`.
fn on_way(rip: u64) -> Option<u64> {
    if rip % PAGE > PAGE - LENGTH as u64 || !has_copy(rip & !(PAGE - 1)) {
        return None;
    }
    // SAFETY: the copy is this process's own memory, readable, and nobody writes to it now.
    let jump = unsafe { *(rip as *const [u8; LENGTH]) };
    led_to(&jump).and_then(|(first, behind)| (first == NONE).then_some(behind))
}

/// Whether there is the second jump of a rewritten call, between its place and its stub.
pub fn is_on_way(rip: u64) -> bool {
    on_way(rip).is_some()
}

/// Whether there is the code of a rewritten call.
pub fn is_stub(rip: u64) -> bool {
    (STUBS..STUBS + u64::from(MOST) * STUB).contains(&rip)
}

/// Whether this process has a copy of a page of its own.
pub fn has_copy(page: u64) -> bool {
    let calls = calls();
    calls.used != 0 && calls.pages.contains(&page)
}

/// Whether the copy of a page is, but for what was rewritten, what is at this guest-physical address now.
pub fn is_current(page: u64, frame: u64, memory: &GuestMemory) -> bool {
    /// Bytes that are compared at once.
    const CHUNK: usize = 64;
    let mut bytes = [0; PAGE as usize];
    if memory.read_slice(frame, &mut bytes).is_err()
        || pkeys::is_enabled() && !exec_scan::close(&mut bytes)
    {
        return false;
    }
    // SAFETY: the copy is this process's own memory, readable, and nobody writes to it now.
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

/// How many bytes were replaced at an offset of a page's copy, and nothing else than what was to be.
fn replaced(page: u64, copy: &Page, original: &Page, at: usize) -> Option<usize> {
    if original[at..].starts_with(&SYSCALL) {
        let behind = at + SYSCALL.len();
        let distance = copy.get(at + 1)?;
        let is_short = copy[at] == SHORT_JUMP
            && is_short(page, copy, original, behind, behind + usize::from(*distance));
        return is_short.then_some(SYSCALL.len());
    }
    let jump = copy.get(at..at + LENGTH)?;
    if is_jump_for(jump, original.get(at..at + LENGTH)?) {
        return Some(LENGTH);
    }
    let (first, behind) = led_to(jump)?;
    let behind = usize::try_from(behind.checked_sub(page)?).ok()?;
    (first == NONE && is_short(page, copy, original, behind, at)).then_some(LENGTH)
}

/// Whether the call before `behind` has become a short jump to one at `jump`, where nothing is executed.
fn is_short(page: u64, copy: &Page, original: &Page, behind: usize, jump: usize) -> bool {
    let Some(call) = behind.checked_sub(SYSCALL.len()) else { return false };
    let there = |bytes: &[u8]| bytes.get(jump..jump + LENGTH).and_then(led_to);
    original.get(call..behind) == Some(&SYSCALL)
        && copy.get(call..behind) == Some(&[SHORT_JUMP, jump.wrapping_sub(behind) as u8])
        && padding::find(original, behind, LENGTH) == Some(jump)
        && there(copy) == Some((NONE, page + behind as u64))
}

/// What the stub of a jump carries out first, and where its call goes on; `None`: it is no such jump.
fn led_to(jump: &[u8]) -> Option<([u8; NONE.len()], u64)> {
    let [0xff, 0x24, 0x25, slot @ ..] = jump else { return None };
    let slot = <[u8; 4]>::try_from(slot).map(u32::from_le_bytes).ok()?;
    let index = u64::from(slot).wrapping_sub(SLOTS) / 8;
    if index >= u64::from(calls().used) {
        return None;
    }
    // SAFETY: stubs are this process's own memory, and this one is in use.
    let code = unsafe { *((STUBS + STUB * index) as *const [u8; STUB as usize]) };
    Some((*code.first_chunk()?, u64::from_le_bytes(*code[7..].first_chunk()?)))
}

/// Whether `jump` is what was written over `original`.
fn is_jump_for(jump: &[u8], original: &[u8]) -> bool {
    let Some((first, _)) = led_to(jump) else { return false };
    original.starts_with(&first) && original.ends_with(&SYSCALL)
}

/// Drops the copies of the frame at this offset of guest memory.
pub fn drop_copies(offset: u64) {
    for index in 0..PAGES {
        let calls = calls();
        if calls.pages[index] != 0 && calls.frames[index] == offset {
            let page = calls.pages[index];
            memory::drop_range(page, page + PAGE);
        }
    }
}

/// User mode was interrupted: if that was between a rewritten call and its stub, it goes on at the system call.
pub fn step_back(cpu: &mut VirtualCpu) {
    if let Some(behind) = on_way(cpu.frame.rip) {
        cpu.frame.rip = behind - SYSCALL.len() as u64;
    }
}

/// The guest's kernel goes on to user mode: if that is the handler of a system call that a seccomp filter refuses, it finds the call's
/// page as it is, not the copy.
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
        let behind = u64::from(word(16)) | u64::from(word(20)) << 32;
        for page in [behind.wrapping_sub(SYSCALL.len() as u64), behind.wrapping_sub(1)] {
            let page = page & !(PAGE - 1);
            if page != 0 && has_copy(page) {
                memory::drop_range(page, page + PAGE);
            }
        }
    }
}

/// What was mapped between these addresses is not any longer.
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
