//! System calls of programs without a signal.
//!
//! The first calls from a place come by Syscall User Dispatch. A place that calls often gets a jump instead, in a copy of its page that
//! this process alone has; the guest's memory is not changed. The jump is `jmp [slot]`, seven bytes over
//!
//! - `mov eax, NUMBER; syscall` or
//! - `mov r9, [rsp+8]; syscall` (the C library's `syscall`),
//!
//! whose first instruction is carried out in the call's stub. The slot's address is chosen so that the bytes over `syscall` are `int 0x74`: who
//! jumps there faults and gets the system call all the same, and a call that the kernel restarts, too. Elsewhere signals stay.
//!
//! Invariants: only pages that are not writable are copied; a copy is dropped with any other mapping of its page, and slots are used
//! again only when all copies of the process have been dropped.

use linux_raw_sys::general as linux;
use proto::wedge::layout;
use vmm_mem::GuestMemory;
use wedge_core::VirtualCpu;
use wedge_x86::{CLOSED, READABLE};

use crate::memory::{PAGE, leaf};
use crate::shared::mine;
use crate::sys::{self, Backing, Errno};
use crate::{code, keys};

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
/// `syscall`.
pub const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// What a process knows of its calls.
pub struct Calls {
    /// Address behind the call, and how often.
    places: [(u64, u32); PLACES],
    /// Addresses of copied pages; 0: none.
    pages: [u64; PAGES],
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
    keys::close(SLOTS, SLOTS_LENGTH, data, READABLE)?;
    keys::close(STUBS, length - SLOTS_LENGTH, rights, CLOSED)
}

/// A program has made a system call by signal; the instruction pointer is behind it.
pub fn made(cpu: &VirtualCpu, memory: &GuestMemory) {
    let behind = cpu.frame.rip;
    let calls = calls();
    let place = &mut calls.places[(behind ^ behind >> 8) as usize % PLACES];
    if place.0 != behind {
        *place = (behind, 0);
    }
    place.1 += 1;
    if place.1 == OFTEN && cpu.call_masks_flags() {
        // If it cannot be, signals go on.
        let _ = rewrite(cpu, memory, behind);
    }
}

fn rewrite(cpu: &VirtualCpu, memory: &GuestMemory, behind: u64) -> Option<()> {
    let start = behind.checked_sub(LENGTH as u64)?;
    let page = start & !(PAGE - 1);
    // The byte before is looked at, too.
    if start == page || behind > page + PAGE {
        return None;
    }
    let found = leaf(memory, cpu.paging(page, true).cr3, page)?;
    let frame = found.address + (page & (found.size - 1));
    if found.writable || !found.executable || keys::are_on() && !code::is_copy_of(page, frame) {
        return None;
    }
    let mut bytes = [0; LENGTH + 1];
    memory.read_slice(frame + (start - page) - 1, &mut bytes).ok()?;
    let [before, code @ ..] = bytes;
    let (first, call) = code.split_at(LOAD_SIXTH.len());
    // A prefix would make another register of it.
    let is_prefix = before & 0xf0 == 0x40;
    let number = (cpu.frame.gpr[0] as u32).to_le_bytes();
    let suits = call == SYSCALL
        && (first == LOAD_SIXTH || !is_prefix && first[0] == MOVE_NUMBER && first[1..] == number);
    let calls = calls();
    if !suits || calls.used == MOST {
        return None;
    }
    // What a program chooses, numbers and addresses, must not make another instruction there.
    let stub_code = stub_code(STUBS + STUB * u64::from(calls.used), first, behind);
    if code::find(&stub_code, 0).is_some() {
        return None;
    }
    let slot = SLOTS + 8 * u64::from(calls.used);
    let stub = STUBS + STUB * u64::from(calls.used);
    if !calls.pages.contains(&page) {
        let free = calls.pages.iter_mut().find(|page| **page == 0)?;
        copy(page, frame, memory)?;
        *free = page;
    }
    calls.used += 1;
    // SAFETY: stubs are this process's own memory, and this one is not used yet.
    unsafe { (stub as *mut [u8; STUB as usize]).write(stub_code) };
    // SAFETY: slots are this process's own memory.
    unsafe { (slot as *mut u64).write(stub) };
    let mut jump = [0xff, 0x24, 0x25, 0, 0, 0, 0];
    jump[3..].copy_from_slice(&(slot as u32).to_le_bytes());
    let changed = protect(page, linux::PROT_READ | linux::PROT_WRITE);
    if changed.is_ok() {
        // SAFETY: the page is this process's own copy, writable now; the guest does not run.
        unsafe { (start as *mut [u8; LENGTH]).write_unaligned(jump) };
        protect(page, linux::PROT_READ | linux::PROT_EXEC).ok()?;
    }
    Some(())
}

/// Puts a copy of a page in the place of its mapping.
fn copy(page: u64, frame: u64, memory: &GuestMemory) -> Option<()> {
    let mut bytes = [0; PAGE as usize];
    match keys::are_on() {
        // As it is mapped.
        true => code::read(frame, &mut bytes)?,
        false => memory.read_slice(frame, &mut bytes).ok()?,
    }
    let rights = linux::PROT_READ | linux::PROT_WRITE;
    // SAFETY: a page of a program of the guest is mapped there; the guest does not run.
    unsafe {
        sys::map(page, PAGE, rights, Backing::Own).ok()?;
        (page as *mut [u8; PAGE as usize]).write(bytes);
    }
    Some(())
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
    if memory.read_slice(frame, &mut bytes).is_err() || keys::are_on() && !code::close(&mut bytes) {
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
            let place = at..at + LENGTH;
            let (Some(original), Some(jump)) = (bytes.get(place.clone()), copy.get(place)) else {
                return false;
            };
            if !is_jump_for(jump, original) {
                return false;
            }
            at += LENGTH;
        }
    }
    true
}

/// Whether `jump` is what was written over `original`.
fn is_jump_for(jump: &[u8], original: &[u8]) -> bool {
    let [0xff, 0x24, 0x25, slot @ ..] = jump else { return false };
    let Ok(slot) = <[u8; 4]>::try_from(slot).map(u32::from_le_bytes) else { return false };
    let index = u64::from(slot).wrapping_sub(SLOTS) / 8;
    if index >= u64::from(calls().used) {
        return false;
    }
    // SAFETY: stubs are this process's own memory, and this one is in use.
    let first = unsafe { *((STUBS + STUB * index) as *const [u8; LOAD_SIXTH.len()]) };
    original.starts_with(&first) && original.ends_with(&SYSCALL)
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
