//! Executable pages, with protection keys: nothing that could change `PKRU` is where a program can jump to, but what the wedge's own entry code guards.
//!
//! Keys do not stop fetches, so every executable page of the process counts, the kernel's too. `WRPKRU` and `XRSTOR` are looked for byte by
//! byte, wherever an instruction may begin. Pages of programs are executed from copies, in memory that is only the wedge's: whoever writes to a page,
//! a program by another mapping of it, the kernel for it, a device, changes what the copy is made of and not what runs. Where the
//! bytes are an instruction they are made `UD1` in the copy, which the wedge carries out. In the kernel's own code they are made `UD1` in place.
//!
//! A page in which they are part of other instructions is executed step by step: from a copy that this process alone has, one instruction at a
//! time that was looked at before, with the trap flag. When it is left the copy goes.
//!
//! Bytes that are to be executed by programs are of one type, [`Searched`], which only searching makes; nothing else is written to copies.
//!
//! Invariants: what a process has mapped executable for programs are copies, [`crate::syscall_patch`]'s, or, while the trap flag is set, the pages of a
//! step; a copy has neither sequence; nor have two mapped one behind the other. Copies are of one virtual CPU: while the wedge changes one,
//! nobody executes it.

use core::sync::atomic::Ordering::Relaxed;

use linux_raw_sys::general as linux;
use proto::wedge::layout;
use vmm_cpu::walk::Intent;
use vmm_mem::GuestMemory;
use wedge_core::VirtualCpu;
use wedge_core::cpu::rflags;
use wedge_core::mapped::Piece;

use crate::memory::{self, PAGE, Ram};
use crate::shared::mine;
use crate::sites::MOST_POKED;
use crate::{sys, syscall_patch};

/// First byte of both.
const FIRST: u8 = 0x0f;
/// Second byte of `UD1`, whose operand has the same form (SDM vol. 2).
const UD1: u8 = 0xb9;
/// Bytes of a sequence.
const LENGTH: usize = 3;
/// Longest instruction.
const LONGEST: u64 = 15;
/// Pages that end with the beginning of a sequence, at most.
const ENDS: usize = 64;

/// Whether `FIRST` and these are `WRPKRU`, or `XRSTOR` from memory.
fn completes(second: u8, third: u8) -> bool {
    match second {
        0x01 => third == 0xef,
        0xae => third & 0x38 == 0x28 && third < 0xc0,
        _ => false,
    }
}

/// Where the first sequence from an offset on begins.
pub fn find(bytes: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    while at + LENGTH <= bytes.len() {
        // Eight bytes at a time while none of them is the first one.
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

/// Whether a sequence is an instruction, as the C library has them: `xor edx, edx; xrstor`, and `wrpkru; xor eax, eax; ret`.
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

/// What a process knows of the code that it has mapped.
pub struct Code {
    /// Pages that end with the beginning of a sequence: addresses, and their last two bytes.
    ends: [(u64, [u8; 2]); ENDS],
    steps: Steps,
}

/// Pages that are executed step by step.
#[derive(Clone, Copy)]
struct Steps {
    /// The first address, and the first behind; equal: there are none.
    start: u64,
    end: u64,
    /// Nothing is mapped behind them.
    alone: bool,
    /// The instruction that is done now pushes the flags.
    pushes: bool,
    /// The trap flag is the program's own.
    traps: bool,
}

const NO_STEPS: Steps = Steps { start: 0, end: 0, alone: false, pushes: false, traps: false };

fn ends() -> &'static mut [(u64, [u8; 2]); ENDS] {
    // SAFETY: it is in the process's own memory, and only its one thread uses it, outside of signal handlers. The functions here do not call
    // each other while they have it.
    unsafe { &mut (*mine().code.at()).ends }
}

fn steps() -> &'static mut Steps {
    // SAFETY: as in `ends`.
    unsafe { &mut (*mine().code.at()).steps }
}

/// What was mapped between these addresses is not any longer.
pub fn forget(start: u64, end: u64) {
    let Steps { start: first, end: last, .. } = *steps();
    if start < last && first < end {
        // A page that is left has not been searched: it is executed by steps or not at all.
        *steps() = match first < start {
            true => Steps { start: first, end: start, alone: true, ..NO_STEPS },
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

/// Where the copies are that belong to an offset in guest memory.
fn place(offset: u64) -> *mut [u8; PAGE as usize] {
    (layout::COPIES + offset) as *mut _
}

/// Reads the copy of a page at a guest-physical address.
pub fn read(address: u64, to: &mut [u8; PAGE as usize]) -> Option<()> {
    let start = crate::shared::start()?;
    let (offset, _) = Ram::new(&start).offset(address)?;
    // SAFETY: copies are mapped as long as guest memory.
    *to = unsafe { place(offset).read() };
    Some(())
}

/// Where a virtual CPU's copies begin in the descriptor of guest memory, which is this long itself.
pub fn copies(length: u64, vcpu: usize) -> u64 {
    length * (1 + vcpu as u64)
}

/// The page of guest memory that a mapped offset is a copy of.
pub fn original(ram: &Ram, offset: u64) -> Option<u64> {
    offset.checked_sub(copies(ram.length(), mine().vcpu.load(Relaxed) as usize))
}

/// Bytes of a page of code.
pub type Page = [u8; PAGE as usize];

/// A page that programs may execute: with protection keys neither sequence is in it, nor does one begin or end in it that did not before.
#[derive(Clone, PartialEq, Eq)]
pub struct Searched(Page);

impl Searched {
    /// A page with its sequences closed; `None`: it must not be executed.
    fn closed(mut page: Page) -> Option<Self> {
        close(&mut page).then_some(Self(page))
    }

    /// A page that is executed, with other bytes at some offsets; `None`: it must not be executed so.
    pub fn edited<'a>(
        mut page: Page,
        edits: impl Iterator<Item = (usize, &'a [u8])>,
    ) -> Option<Self> {
        const BORDER: usize = LENGTH - 1;
        for (at, bytes) in edits {
            let end = at + bytes.len();
            // What its neighbours may be was decided by its borders.
            if crate::pkeys::is_enabled() && (at < BORDER || end > page.len() - BORDER) {
                return None;
            }
            page.get_mut(at..end)?.copy_from_slice(bytes);
        }
        let has_sequence = crate::pkeys::is_enabled() && find(&page, 0).is_some();
        (!has_sequence).then_some(Self(page))
    }

    /// Puts it in the place of what is mapped at a linear address, as memory of this process alone.
    ///
    /// # Safety
    /// A page of a program of the guest is there, or its copy, and the guest does not run.
    pub unsafe fn publish(&self, page: u64) -> Result<(), sys::Errno> {
        let rights = linux::PROT_READ | linux::PROT_WRITE;
        // SAFETY: the caller's; nobody executes or reads the page while it is written.
        unsafe {
            sys::map(page, PAGE, rights, sys::Backing::Own)?;
            (page as *mut Page).write(self.0);
        }
        syscall_patch::protect(page, linux::PROT_READ | linux::PROT_EXEC)
    }
}

/// Makes a page what may be executed; `false`: it must not be.
pub fn close(bytes: &mut [u8; PAGE as usize]) -> bool {
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

/// Whether the copy of a page is what the page is now.
pub fn is_current(memory: &GuestMemory, address: u64, offset: u64) -> bool {
    // SAFETY: as in `renew`.
    let copy = unsafe { &*place(offset) };
    // Most pages have no sequence.
    if memory.is_equal(address, copy) == Ok(true) {
        return true;
    }
    let mut bytes = [0; PAGE as usize];
    memory.read_slice(address, &mut bytes).is_ok() && close(&mut bytes) && bytes == *copy
}

/// Makes the copy of a page of guest memory what the page is; whether it was another one. `None`: it must not be executed.
fn renew(memory: &GuestMemory, address: u64, offset: u64) -> Option<bool> {
    // SAFETY: copies are this virtual CPU's alone, and only the wedge writes them; the guest does not run, so nobody executes it half done.
    let copy = unsafe { &mut *place(offset) };
    if memory.is_equal(address, copy).ok()? {
        return Some(false);
    }
    let mut bytes = [0; PAGE as usize];
    memory.read_slice(address, &mut bytes).ok()?;
    let Searched(bytes) = Searched::closed(bytes)?;
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

/// Where this virtual CPU's copies begin.
fn copies_offset() -> u64 {
    let length = crate::shared::start().map_or(0, |start| start.memory);
    copies(length, mine().vcpu.load(Relaxed) as usize)
}

/// Whether a sequence may end with the first bytes of a page.
fn is_end(page: &[u8; PAGE as usize]) -> bool {
    let [a, b, ..] = *page;
    completes(0x01, a) || completes(0xae, a) || completes(a, b)
}

/// Maps pages of a program that follow each other in guest memory, from a guest-physical address and its offset in the descriptor on, so that they can be
/// executed and not written; gives where that ends. A page that must not be executed ends it.
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
        // The last of them may have been alone.
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
    // SAFETY: a range of a program: nothing of this one is there.
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
        // What is behind may make it whole; it is looked at when it is executed.
        memory::drop_range(linear + mapped, linear + mapped + PAGE);
    }
    Ok(linear + mapped)
}

/// The last two bytes, if a sequence may begin there.
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
        // It can be filled in again.
        memory::drop_range(other, other + PAGE);
    }
}

/// Makes the sequences that these bytes will be in the kernel's code, or be part of, what the wedge carries out, before they are written to a
/// linear address: other virtual CPUs may be in programs. There are at most [`MOST_POKED`] bytes.
pub fn close_poke(cpu: &VirtualCpu, memory: &GuestMemory, to: u64, bytes: &mut [u8]) {
    const BORDER: usize = LENGTH - 1;
    let mut around = [0; MOST_POKED + 2 * BORDER];
    let end = BORDER + bytes.len();
    let all = &mut around[..end + BORDER];
    let from = to.wrapping_sub(BORDER as u64);
    for (start, end) in [(0, BORDER), (end, end + BORDER)] {
        // What is not there is no sequence.
        let _ = cpu.read(memory, from.wrapping_add(start as u64), &mut all[start..end]);
    }
    all[BORDER..end].copy_from_slice(bytes);
    let mut offset = 0;
    while let Some(found) = find(all, offset) {
        offset = found + 1;
        match bytes.get_mut(offset.wrapping_sub(BORDER)) {
            Some(byte) => *byte = UD1,
            // Nothing else is there to be done if it has gone.
            None => drop(crate::sites::write_code(cpu, memory, from + offset as u64, &[UD1])),
        }
    }
}

/// Makes the sequences in the kernel's code between two linear addresses, and those that reach into it, what the wedge carries out.
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
                // What is not there is no sequence.
                part.fill(0);
            }
        }
        let mut offset = 0;
        while let Some(found) = find(&bytes, offset) {
            // Nothing else is there to be done if it has gone.
            let _ = crate::sites::write_code(cpu, memory, from + found as u64 + 1, &[UD1]);
            offset = found + 1;
        }
        at += PAGE;
    }
}

/// What an instruction does with the trap flag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Next {
    /// Nothing: it is followed by the trap.
    Step,
    /// It pushes it.
    Pushes,
    /// It is a sequence, or another instruction could be done before the trap (SDM vol. 3, 6.8.3, 18.3.1.4; vol. 1, 16.3.7).
    Never,
}

/// Looks at an instruction of a program, of which there may be less than it has if what follows cannot be executed.
fn next(bytes: &[u8]) -> Next {
    // In 32-bit code 40 to 4F are instructions of their own; then what follows them is looked at too early.
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

/// A page of a program with sequences is to be executed: the next instruction can be done as a step. `false`: it is an undefined one.
pub fn open_steps(cpu: &VirtualCpu, memory: &GuestMemory) -> bool {
    let rip = cpu.frame.rip;
    let first = rip & !(PAGE - 1);
    let last = rip.wrapping_add(LONGEST - 1) & !(PAGE - 1);
    if !memory::is_program(first) || !memory::is_program(last) {
        return false;
    }
    memory::drop_range(first, last + PAGE);
    let pages = (last - first) / PAGE + 1;
    let mapped = (0..pages).take_while(|page| map_step(cpu, memory, first + page * PAGE).is_some());
    let end = first + PAGE * mapped.count() as u64;
    // What could be mapped only in part.
    if end <= last {
        memory::drop_range(end, last + PAGE);
    }
    if end == first {
        return false;
    }
    crate::guest::serialize();
    *steps() = Steps { start: first, end, alone: end <= last, ..NO_STEPS };
    let goes = may_step(rip).is_some_and(|next| next != Next::Never);
    if !goes {
        memory::drop_range(first, end);
    }
    goes
}

/// Maps a page as it is now.
fn map_step(cpu: &VirtualCpu, memory: &GuestMemory, page: u64) -> Option<()> {
    let mut bytes = [0; PAGE as usize];
    let found = cpu.paging(page, true).translate(memory, page, Intent::Fetch, true);
    memory.read_slice(found.ok()?.0, &mut bytes).ok()?;
    let rights = linux::PROT_READ | linux::PROT_WRITE;
    // SAFETY: a page of a program, where nothing is mapped.
    unsafe {
        sys::map(page, PAGE, rights, sys::Backing::Own).ok()?;
        (page as *mut [u8; PAGE as usize]).write(bytes);
    }
    syscall_patch::protect(page, linux::PROT_READ | linux::PROT_EXEC).ok()
}

/// The instruction at an address, if it is in the pages of a step as a whole, or as far as it can be executed.
fn may_step(rip: u64) -> Option<Next> {
    let Steps { start, end, alone, .. } = *steps();
    let is_whole = rip.checked_add(LONGEST).is_some_and(|behind| behind <= end);
    if !(start..end).contains(&rip) || !is_whole && !alone {
        return None;
    }
    let length = LONGEST.min(end - rip);
    // SAFETY: the pages are this process's own memory, readable, and not written now.
    Some(next(unsafe { core::slice::from_raw_parts(rip as *const u8, length as usize) }))
}

/// Before the guest goes on: whether it does one instruction only, of the pages of a step. If it is elsewhere, they go.
pub fn begin_step(cpu: &mut VirtualCpu) -> bool {
    let Steps { start, end, .. } = *steps();
    if start == end {
        return false;
    }
    let next = if cpu.cpl == 3 { may_step(cpu.frame.rip) } else { None };
    let Some(next) = next.filter(|next| *next != Next::Never) else {
        // A sequence comes back as a fault.
        memory::drop_range(start, end);
        return false;
    };
    let steps = steps();
    steps.pushes = next == Next::Pushes;
    steps.traps = cpu.frame.rflags & rflags::TF != 0;
    cpu.frame.rflags |= rflags::TF;
    true
}

/// The guest has stopped after [`begin_step`], by a trap or not. Gives whether that was for the step alone.
pub fn end_step(cpu: &mut VirtualCpu, memory: &GuestMemory, trapped: bool) -> bool {
    let Steps { pushes, traps, .. } = *steps();
    if traps {
        return false;
    }
    cpu.frame.rflags &= !rflags::TF;
    // Bit 8 is in the second byte.
    let (at, mut byte) = (cpu.frame.gpr[4].wrapping_add(1), [0]);
    if trapped && pushes && memory::is_program(at) {
        // It has just been written there; who takes the page away meanwhile has what it was.
        let _ = cpu.read(memory, at, &mut byte);
        let _ = cpu.write(memory, at, &[byte[0] & !1]);
    }
    trapped
}

/// Whether a page is executed from the copy of a page of guest memory.
pub fn is_copy_of(page: u64, address: u64) -> bool {
    let Some(start) = crate::shared::start() else { return false };
    let ram = Ram::new(&start);
    let piece = memory::mapped().at(page);
    let mapped = piece.and_then(|piece| original(&ram, piece.offset + (page - piece.start)));
    mapped.is_some() && mapped == ram.offset(address).map(|(offset, _)| offset)
}
