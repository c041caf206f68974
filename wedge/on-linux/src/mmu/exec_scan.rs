//! Executable pages with protection keys: user mode must not find an instruction that changes
//! `PKRU`, except in the wedge's guarded entry code.
//!
//! Keys do not restrict instruction fetches, so every executable page of the process matters,
//! including the kernel's. Pages are scanned for `WRPKRU` and `XRSTOR` at every byte where an
//! instruction can begin. User code executes from copies in memory of the wedge: a write to the
//! original page, by user mode through another mapping, by the kernel or by a device, does not
//! change the copy. A sequence that is an instruction becomes `UD1` in the copy, and the wedge
//! emulates it. In kernel code it becomes `UD1` in place.
//!
//! A page in which a sequence is part of other instructions is single-stepped: it executes from a
//! private copy, one previously checked instruction at a time, with the trap flag. The copy is
//! dropped when execution leaves it.
//!
//! Code for user mode has the type [`ScannedPage`], which only a scan creates; nothing else is
//! written to copies.
//!
//! Invariants: the executable user-mode mappings of a process are copies, those of
//! [`crate::mmu::syscall_patch`], or, while the trap flag is set, stepped pages. A copy contains no
//! sequence, nor do two adjacent mapped copies. Copies belong to one vCPU: nothing executes a copy
//! while the wedge changes it.

use core::sync::atomic::Ordering::Relaxed;

use linux_raw_sys::general as linux;
use proto::hosted::layout;
use vmm_cpu::walk::Intent;
use vmm_mem::GuestMemory;
use wedge_core::VirtualCpu;
use wedge_core::cpu::rflags;
use wedge_core::mapped::Piece;

use crate::linux::sys;
use crate::mmu::frames;
use crate::mmu::memory::{self, PAGE, Ram};
use crate::mmu::syscall_patch;
use crate::sites::MOST_POKED;
use crate::state::shared::process;

/// First byte of both sequences.
const FIRST: u8 = 0x0f;
/// Second byte of `UD1`, whose operand is encoded in the same way (SDM vol. 2).
const UD1: u8 = 0xb9;
/// Length of a sequence in bytes.
const LENGTH: usize = 3;
/// Longest instruction in bytes.
const LONGEST: u64 = 15;
/// Capacity in pages that end with the beginning of a sequence.
const ENDS: usize = 64;

/// Returns whether `FIRST` and these bytes are `WRPKRU`, or `XRSTOR` from memory.
fn completes(second: u8, third: u8) -> bool {
    match second {
        0x01 => third == 0xef,
        0xae => third & 0x38 == 0x28 && third < 0xc0,
        _ => false,
    }
}

/// Returns the offset of the first sequence from an offset on.
pub fn find(bytes: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    while at + LENGTH <= bytes.len() {
        // Skip eight bytes at a time without the first byte.
        if let Some(&word) = bytes[at..].first_chunk::<8>() {
            let differs = u64::from_ne_bytes(word) ^ u64::from_ne_bytes([FIRST; 8]);
            const LOW: u64 = u64::from_ne_bytes([0x01; 8]);
            const HIGH: u64 = u64::from_ne_bytes([0x80; 8]);
            if differs.wrapping_sub(LOW) & !differs & HIGH == 0 {
                at += 8;
                continue;
            }
        }
        let end = (at + 8).min(bytes.len() - LENGTH + 1);
        for place in at..end {
            if bytes[place] == FIRST && completes(bytes[place + 1], bytes[place + 2]) {
                return Some(place);
            }
        }
        at += 8;
    }
    None
}

/// Returns whether a sequence is an instruction as C libraries use it: `xor edx, edx; xrstor`, and
/// `wrpkru; xor eax, eax; ret`.
fn is_instruction(bytes: &[u8], at: usize) -> bool {
    match bytes[at + 1] {
        0xae => {
            let before = &bytes[..at];
            let before = before.strip_suffix(&[0x48]).unwrap_or(before);
            before.ends_with(&[0x31, 0xd2])
        }
        _ => bytes[at + LENGTH..].starts_with(&[0x31, 0xc0, 0xc3]),
    }
}

/// Executable pages of a process.
pub struct Code {
    /// Pages that end with the beginning of a sequence: address and last two bytes.
    ends: [(u64, [u8; 2]); ENDS],
    steps: Steps,
}

/// Stepped pages.
#[derive(Clone, Copy)]
struct Steps {
    /// First address and end; equal: none.
    start: u64,
    end: u64,
    /// Nothing is mapped after them.
    alone: bool,
    /// The current instruction pushes the flags.
    pushes: bool,
    /// The trap flag is user mode's own.
    traps: bool,
    /// Pages writable for the current instruction, as bits from the first page on.
    written: u8,
    /// Guest-physical addresses of the pages.
    frames: [u64; 2],
}

const NO_STEPS: Steps = Steps {
    start: 0,
    end: 0,
    alone: false,
    pushes: false,
    traps: false,
    written: 0,
    frames: [0; 2],
};

fn ends() -> &'static mut [(u64, [u8; 2]); ENDS] {
    // SAFETY: it is in the process's own memory, used by its only thread outside of signal
    // handlers. The functions here do not call each other while they hold it.
    unsafe { &mut (*process().code.at()).ends }
}

fn steps() -> &'static mut Steps {
    // SAFETY: as in `ends`.
    unsafe { &mut (*process().code.at()).steps }
}

/// Forgets the pages of an unmapped range.
pub fn forget(start: u64, end: u64) {
    let Steps { start: first, end: last, .. } = *steps();
    if start < last && first < end {
        // The remaining page was not scanned: it may be stepped only.
        let steps = steps();
        *steps = match first < start {
            true => Steps { end: start, alone: true, written: steps.written & 1, ..*steps },
            false => NO_STEPS,
        };
        if end < last {
            memory::drop_range(end, last);
        }
    }
    for (page, _) in ends() {
        if (start..end).contains(page) {
            *page = 0;
        }
    }
}

/// Returns the address of the copy for an offset in guest memory.
fn place(offset: u64) -> *mut [u8; PAGE as usize] {
    (layout::COPIES + offset) as *mut _
}

/// Reads the copy of the page at a guest-physical address.
pub fn read(address: u64, to: &mut [u8; PAGE as usize]) -> Option<()> {
    let start = crate::state::shared::start()?;
    let (offset, _) = Ram::new(&start).offset(address)?;
    // SAFETY: the copies are mapped, as long as guest memory.
    *to = unsafe { place(offset).read() };
    Some(())
}

/// Returns the offset of a vCPU's copies in the file of guest memory, for this length of guest
/// memory.
pub fn copies(length: u64, vcpu: usize) -> u64 {
    length * (1 + vcpu as u64)
}

/// Returns the offset of the original page for a mapped offset in the copies.
pub fn original(ram: &Ram, offset: u64) -> Option<u64> {
    offset.checked_sub(copies(ram.length(), process().vcpu.load(Relaxed) as usize))
}

/// Contents of a page of code.
pub type Page = [u8; PAGE as usize];

/// Page that user mode may execute: with protection keys, no sequence is in it, and none begins or
/// ends in it that did not before.
#[derive(Clone, PartialEq, Eq)]
pub struct ScannedPage(Page);

impl ScannedPage {
    /// Closes the sequences of a page; `None`: it must not be executed.
    fn closed(mut page: Page) -> Option<Self> {
        close(&mut page).then_some(Self(page))
    }

    /// Applies edits to an executable page; `None`: the result must not be executed.
    pub fn edited<'a>(
        mut page: Page,
        edits: impl Iterator<Item = (usize, &'a [u8])>,
    ) -> Option<Self> {
        const BORDER: usize = LENGTH - 1;
        for (at, bytes) in edits {
            let end = at + bytes.len();
            // The borders have determined which pages may be adjacent.
            if crate::isolation::pkeys::is_enabled() && (at < BORDER || end > page.len() - BORDER) {
                return None;
            }
            page.get_mut(at..end)?.copy_from_slice(bytes);
        }
        let has_sequence = crate::isolation::pkeys::is_enabled() && find(&page, 0).is_some();
        (!has_sequence).then_some(Self(page))
    }

    /// Replaces the mapping at a linear address by a private copy.
    ///
    /// # Safety
    /// The mapping must be user code or its copy, and the guest must not run.
    pub unsafe fn publish(&self, page: u64) -> Result<(), sys::Errno> {
        let rights = linux::PROT_READ | linux::PROT_WRITE;
        // SAFETY: the caller guarantees the page; nothing executes or reads it during the write.
        unsafe {
            sys::map(page, PAGE, rights, sys::Backing::Own)?;
            (page as *mut Page).write(self.0);
        }
        syscall_patch::protect(page, linux::PROT_READ | linux::PROT_EXEC)
    }
}

/// Replaces the sequences that are instructions by `UD1`; `false`: the page must not be executed.
fn close(bytes: &mut [u8; PAGE as usize]) -> bool {
    let mut from = 0;
    while let Some(at) = find(bytes, from) {
        if !is_instruction(bytes, at) {
            return false;
        }
        bytes[at + 1] = UD1;
        from = at + 1;
    }
    true
}

/// Drops the executable copies of frames in a range of guest memory, given by its offset, before a
/// write.
pub fn drop_copies(offset: u64, length: u64) {
    let Steps { start, end, .. } = *steps();
    if start != end {
        memory::drop_range(start, end);
    }
    memory::drop_mapped(copies_offset() + offset, length, linux::PROT_EXEC);
}

/// Refreshes the copy of a guest page; returns whether it has changed. `None`: the page must not be
/// executed.
fn renew(memory: &GuestMemory, address: u64, offset: u64) -> Option<bool> {
    // SAFETY: copies belong to this vCPU, and only the wedge writes them; the guest does not run,
    // so nothing executes a partial copy.
    let copy = unsafe { &mut *place(offset) };
    if memory.is_equal(address, copy).ok()? {
        return Some(false);
    }
    let mut bytes = [0; PAGE as usize];
    memory.read_slice(address, &mut bytes).ok()?;
    let ScannedPage(bytes) = ScannedPage::closed(bytes)?;
    let changes = *copy != bytes;
    let borders = |page: &Page| {
        let ([a, b, ..], [.., y, z]) = (*page, *page);
        [a, b, y, z]
    };
    if borders(copy) != borders(&bytes) && (is_beginning(&bytes).is_some() || is_end(&bytes)) {
        memory::copy_changed(copies_offset() + offset);
    }
    *copy = bytes;
    Some(changes)
}

/// Returns the offset of this vCPU's copies.
fn copies_offset() -> u64 {
    let length = crate::state::shared::start().map_or(0, |start| start.memory);
    copies(length, process().vcpu.load(Relaxed) as usize)
}

/// Returns whether a sequence may end with the first bytes of a page.
fn is_end(page: &[u8; PAGE as usize]) -> bool {
    let [a, b, ..] = *page;
    completes(0x01, a) || completes(0xae, a) || completes(a, b)
}

/// Maps contiguous user pages executable and read-only, from a guest-physical address and its
/// offset in the file on; returns the end. A page that must not be executed ends the run.
pub fn map(
    memory: &GuestMemory,
    linear: u64,
    size: u64,
    address: u64,
    offset: u64,
) -> Result<u64, sys::Errno> {
    let mut mapped = 0;
    let Steps { start, end, .. } = *steps();
    if start != end && start < linear + size && linear <= end {
        // The last stepped page may have been mapped without its neighbour.
        memory::drop_range(start, end);
    }
    let previous = linear.wrapping_sub(PAGE);
    let mut before = ends().iter().find(|(page, _)| *page == previous).map(|(_, end)| *end);
    let mut changes = false;
    while mapped < size {
        match renew(memory, address + mapped, offset + mapped) {
            None => break,
            Some(changed) => changes |= changed,
        }
        // SAFETY: as in `renew`.
        let copy = unsafe { &*place(offset + mapped) };
        if before.is_some_and(|[a, b]| find(&[a, b, copy[0], copy[1]], 0).is_some()) {
            break;
        }
        before = is_beginning(copy);
        mapped += PAGE;
    }
    if mapped == 0 {
        return Ok(linear);
    }
    if changes {
        crate::guest::serialize();
    }
    let rights = linux::PROT_READ | linux::PROT_EXEC;
    let offset_of_copy = copies_offset() + offset;
    // SAFETY: a user-mode range, without memory of this program.
    unsafe { sys::map_now(linear, mapped, rights, layout::MEMORY_FD, offset_of_copy) }?;
    let piece = Piece { start: linear, end: linear + mapped, offset: offset_of_copy, rights };
    memory::mapped().add(piece);
    syscall_patch::forget(linear, linear + mapped);
    forget(linear, linear + mapped);
    for page in (0..mapped).step_by(PAGE as usize) {
        // SAFETY: as in `renew`.
        if let Some(end) = is_beginning(unsafe { &*place(offset + page) }) {
            remember(linear + page, end);
        }
    }
    if before.is_some() {
        // The next page may complete a sequence; it is scanned when it is executed.
        memory::drop_range(linear + mapped, linear + mapped + PAGE);
    }
    Ok(linear + mapped)
}

/// Returns the last two bytes if a sequence may begin there.
fn is_beginning(page: &[u8; PAGE as usize]) -> Option<[u8; 2]> {
    let [.., a, b] = *page;
    (b == FIRST || a == FIRST && matches!(b, 0x01 | 0xae)).then_some([a, b])
}

fn remember(page: u64, end: [u8; 2]) {
    let ends = ends();
    let free = ends.iter().position(|(page, _)| *page == 0);
    let index = free.unwrap_or((page / PAGE) as usize % ENDS);
    let (other, _) = core::mem::replace(&mut ends[index], (page, end));
    if free.is_none() {
        // The page can be faulted in again.
        memory::drop_range(other, other + PAGE);
    }
}

/// Replaces the sequences that these bytes will form in kernel code by `UD1`, before the bytes are
/// written to a linear address: user mode may run on another vCPU. There are at most [`MOST_POKED`]
/// bytes.
pub fn close_poke(cpu: &VirtualCpu, memory: &GuestMemory, to: u64, bytes: &mut [u8]) {
    const BORDER: usize = LENGTH - 1;
    let mut around = [0; MOST_POKED + 2 * BORDER];
    let end = BORDER + bytes.len();
    let all = &mut around[..end + BORDER];
    let from = to.wrapping_sub(BORDER as u64);
    for (start, end) in [(0, BORDER), (end, end + BORDER)] {
        // Unmapped bytes form no sequence.
        let _ = cpu.read(memory, from.wrapping_add(start as u64), &mut all[start..end]);
    }
    all[BORDER..end].copy_from_slice(bytes);
    let mut offset = 0;
    while let Some(found) = find(all, offset) {
        offset = found + 1;
        match bytes.get_mut(offset.wrapping_sub(BORDER)) {
            Some(byte) => *byte = UD1,
            // The write can only fail if the page is unmapped by now.
            None => drop(crate::sites::write_code(cpu, memory, from + offset as u64, &[UD1])),
        }
    }
}

/// Replaces the sequences in the kernel code between two linear addresses, and those that extend
/// into it, by `UD1`.
pub fn close_kernel(cpu: &VirtualCpu, memory: &GuestMemory, start: u64, end: u64) {
    const BORDER: usize = LENGTH - 1;
    let mut bytes = [0; PAGE as usize + 2 * BORDER];
    let mut at = start & !(PAGE - 1);
    while at < end {
        let from = at - BORDER as u64;
        for (start, end) in
            [(0, BORDER), (BORDER, BORDER + PAGE as usize), (BORDER + PAGE as usize, bytes.len())]
        {
            let part = &mut bytes[start..end];
            if cpu.read(memory, from + start as u64, part).is_err() {
                // Unmapped bytes form no sequence.
                part.fill(0);
            }
        }
        let mut offset = 0;
        while let Some(found) = find(&bytes, offset) {
            // The write can only fail if the page is unmapped by now.
            let _ = crate::sites::write_code(cpu, memory, from + found as u64 + 1, &[UD1]);
            offset = found + 1;
        }
        at += PAGE;
    }
}

/// Effect of an instruction on a single step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Next {
    /// None: the trap follows it.
    Step,
    /// It pushes the trap flag.
    Pushes,
    /// It is a sequence, or another instruction could execute before the trap (SDM vol. 3, 6.8.3,
    /// 18.3.1.4; vol. 1, 16.3.7).
    Never,
}

/// Classifies a user-mode instruction, which may be truncated where the following bytes are not
/// executable.
fn next(bytes: &[u8]) -> Next {
    // In 32-bit code 40 to 4F are instructions; their successor is classified too early then.
    let is_prefix = |byte: &u8| matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x40..=0x4f | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3);
    let prefixes = bytes.iter().take_while(|byte| is_prefix(byte)).count();
    match bytes[prefixes..] {
        [0x9c, ..] => Next::Pushes,
        // POP SS, POPF, IRET, MOV to SS, XBEGIN.
        [0x17 | 0x9d | 0xcf, ..] | [0xc7, 0xf8, ..] => Next::Never,
        [0x8e, operands, ..] if operands >> 3 & 7 == 2 => Next::Never,
        [FIRST, second, third, ..] if completes(second, third) => Next::Never,
        _ => Next::Step,
    }
}

/// Returns the first and the last page that the instruction at an address may be in.
fn pages_of(rip: u64) -> (u64, u64) {
    (rip & !(PAGE - 1), rip.wrapping_add(LONGEST - 1) & !(PAGE - 1))
}

/// Returns whether an address is in a page that the instruction at `rip` may be in.
pub fn is_beside(rip: u64, linear: u64) -> bool {
    let (first, last) = pages_of(rip);
    [first, last].contains(&(linear & !(PAGE - 1)))
}

/// Prepares a user page with sequences for single-stepping. `false`: it cannot be executed.
pub fn open_steps(cpu: &VirtualCpu, ram: &Ram, memory: &GuestMemory) -> bool {
    let rip = cpu.frame.rip;
    let (first, last) = pages_of(rip);
    if !memory::is_user(first) || !memory::is_user(last) {
        return false;
    }
    let mut frames = [0; 2];
    let mut found: usize = 0;
    for page in (first..=last).step_by(PAGE as usize) {
        let paging = cpu.paging(page, true);
        let Ok((address, _)) = paging.translate(memory, page, Intent::Fetch, true) else { break };
        let Some((offset, _)) = ram.offset(address) else { break };
        frames::track(offset, PAGE, cpu.cpl == 3);
        frames[found] = address;
        found += 1;
    }
    let offsets = frames[..found].iter().filter_map(|&address| ram.offset(address));
    if !offsets.into_iter().all(|(offset, _)| frames::holds(offset, PAGE)) {
        // One of the pages has been written since: retry.
        return true;
    }
    memory::drop_range(first, last + PAGE);
    let wanted = frames[..found].iter().zip((first..).step_by(PAGE as usize));
    let mapped = wanted.take_while(|&(&address, page)| map_step(memory, page, address).is_some());
    let end = first + PAGE * mapped.count() as u64;
    // A part of the mapping has failed.
    if end <= last {
        memory::drop_range(end, last + PAGE);
    }
    if end == first {
        return false;
    }
    crate::guest::serialize();
    *steps() = Steps { start: first, end, alone: end <= last, frames, ..NO_STEPS };
    let goes = may_step(rip).is_some();
    if !goes {
        memory::drop_range(first, end);
    }
    goes
}

/// Prepares a step of an instruction that may write to its own page, with that page writable. The
/// written bytes go to guest memory afterwards. Otherwise execution and write faults of the page
/// would alternate forever.
pub fn open_writing_step(cpu: &VirtualCpu, ram: &Ram, memory: &GuestMemory, linear: u64) -> bool {
    let page = linear & !(PAGE - 1);
    if !is_stepped(page) && !open_steps(cpu, ram, memory) {
        return false;
    }
    let Steps { start, end, .. } = *steps();
    if !is_stepped(page) {
        // A page has been written since: retry. Else the host is out of mappings for this one.
        return start == end;
    }
    let rights = linux::PROT_READ | linux::PROT_WRITE | linux::PROT_EXEC;
    if syscall_patch::protect(page, rights).is_err() {
        return false;
    }
    steps().written |= 1 << ((page - start) / PAGE);
    true
}

/// Copies the bytes that a step has written to its pages to guest memory.
fn write_back(ram: &Ram, memory: &GuestMemory) {
    let Steps { start, end, written, frames, .. } = *steps();
    for (index, (page, address)) in (start..end).step_by(PAGE as usize).zip(frames).enumerate() {
        if written >> index & 1 == 0 {
            continue;
        }
        // SAFETY: the page is private memory, readable, and the guest does not run.
        let new = unsafe { &*(page as *const Page) };
        let mut old = [0; PAGE as usize];
        if memory.is_equal(address, new) == Ok(true)
            || memory.read_slice(address, &mut old).is_err()
        {
            continue;
        }
        let differs = |&at: &usize| new[at] != old[at];
        let Some(first) = (0..new.len()).find(differs) else { continue };
        let last = (0..new.len()).rfind(differs).unwrap_or(first);
        if let Some((offset, _)) = ram.offset(address) {
            frames::write(offset, PAGE);
        }
        // Guest memory is mapped for the life of the process.
        let _ = memory.write_slice(address + first as u64, &new[first..=last]);
    }
}

/// Maps a private copy of the page at a guest-physical address.
fn map_step(memory: &GuestMemory, page: u64, address: u64) -> Option<()> {
    let mut bytes = [0; PAGE as usize];
    memory.read_slice(address & !(PAGE - 1), &mut bytes).ok()?;
    let rights = linux::PROT_READ | linux::PROT_WRITE;
    // SAFETY: a user-mode page, where nothing is mapped.
    unsafe {
        sys::map(page, PAGE, rights, sys::Backing::Own).ok()?;
        (page as *mut [u8; PAGE as usize]).write(bytes);
    }
    syscall_patch::protect(page, linux::PROT_READ | linux::PROT_EXEC).ok()
}

/// Returns whether an address is in the stepped pages.
pub fn is_stepped(rip: u64) -> bool {
    (steps().start..steps().end).contains(&rip)
}

/// Returns the instruction at an address in the stepped pages, as far as it is executable.
fn may_step(rip: u64) -> Option<Next> {
    let Steps { start, end, alone, .. } = *steps();
    let is_whole = rip.checked_add(LONGEST).is_some_and(|after| after <= end);
    if !(start..end).contains(&rip) || !is_whole && !alone {
        return None;
    }
    let length = LONGEST.min(end - rip);
    // SAFETY: the pages are private memory, readable, and not written now.
    Some(next(unsafe { core::slice::from_raw_parts(rip as *const u8, length as usize) }))
}

/// Continuation of the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Begin {
    /// Without steps.
    Free,
    /// One instruction by a single step.
    Step,
    /// One instruction, emulated by the wedge.
    Instead,
}

/// Decides before an entry whether the guest executes a single step of the stepped pages. Drops the
/// pages if execution has left them.
pub fn begin_step(cpu: &mut VirtualCpu) -> Begin {
    let Steps { start, end, .. } = *steps();
    if start == end {
        return Begin::Free;
    }
    let next = if cpu.cpl == 3 { may_step(cpu.frame.rip) } else { None };
    let next = match next {
        None => {
            memory::drop_range(start, end);
            return Begin::Free;
        }
        Some(Next::Never) => return Begin::Instead,
        Some(next) => next,
    };
    let steps = steps();
    steps.pushes = next == Next::Pushes;
    steps.traps = cpu.frame.rflags & rflags::TF != 0;
    cpu.frame.rflags |= rflags::TF;
    Begin::Step
}

/// Ends a step begun by [`begin_step`], after a trap or another stop. Returns whether the stop is
/// due to the step alone.
pub fn end_step(cpu: &mut VirtualCpu, ram: &Ram, memory: &GuestMemory, trapped: bool) -> bool {
    let Steps { start, end, pushes, traps, written, .. } = *steps();
    if written != 0 {
        write_back(ram, memory);
        if trapped {
            memory::drop_range(start, end);
        }
    }
    if traps {
        return false;
    }
    cpu.frame.rflags &= !rflags::TF;
    // Bit 8 is in the second byte.
    let (at, mut byte) = (cpu.frame.gpr[4].wrapping_add(1), [0]);
    if trapped && pushes && memory::is_user(at) {
        // The instruction has just written it; if the page is unmapped by now, the value stays.
        let _ = cpu.read(memory, at, &mut byte);
        let _ = cpu.write(memory, at, &[byte[0] & !1]);
    }
    trapped
}

/// Returns whether a page executes from the copy of a guest page.
pub fn is_copy_of(page: u64, address: u64) -> bool {
    let Some(start) = crate::state::shared::start() else { return false };
    let ram = Ram::new(&start);
    let piece = memory::mapped().at(page);
    let mapped = piece.and_then(|piece| original(&ram, piece.offset + (page - piece.start)));
    mapped.is_some() && mapped == ram.offset(address).map(|(offset, _)| offset)
}
