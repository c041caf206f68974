//! Data segments and thread-local storage of user mode: of 32-bit code, and of 64-bit code that
//! loads selectors.
//!
//! User mode loads segment registers itself, so the host CPU must find the descriptors that the
//! guest kernel has set. Flat segments have the same selectors in guest and host Linux. TLS
//! descriptors ([`FIRST`]) differ between threads: the guest's Linux writes them to its GDT, and
//! announces changes by `LLDT`. At the next entry, and at the first one in another host process,
//! the wedge sets the same descriptors on the host, by the 32-bit system call set_thread_area(2),
//! the only interface, which accepts data segments only.
//!
//! The host clears a register whose descriptor is removed, unlike a processor. Linux still reads
//! such registers: `ES` and `DS` of the previous thread after it has changed the descriptors, and
//! all of those that set_thread_area(2) has removed. So the host's descriptor stays while the guest
//! kernel executes with a register that has its selector.
//!
//! At each entry to the guest, to its kernel too, the CPU's segment registers have the guest's
//! selectors; when it stops, the wedge reads them back. So the guest kernel reads the selectors
//! that user mode has loaded before a rewritten system call, and a return to user mode without the
//! wedge finds those of the next thread.
//!
//! Nothing else depends on segment registers: wedge and guest kernel are 64-bit code, and set the
//! bases of `FS` and `GS` without selectors.

use core::arch::asm;

use proto::hosted::option;
use vmm_mem::GuestMemory;
use wedge_core::{VirtualCpu, thread_area};
use wedge_x86::{CODE_32, CODE_64};

use crate::state::config::has;
use crate::state::process::process;
use crate::state::records::{TLS_COUNT, ThreadLocal};

/// Selector of Linux's first TLS descriptor (`GDT_ENTRY_TLS_MIN`).
const FIRST: u16 = 12 << 3 | 3;
/// `__USER_DS`.
const DATA: u16 = 0x2b;
/// `set_thread_area` (`arch/x86/entry/syscalls/syscall_32.tbl`).
pub const SET_THREAD_AREA: u32 = 243;
/// Segment registers, by their encoding.
const ES: usize = 0;
const DS: usize = 3;
const FS: usize = 4;
const GS: usize = 5;
/// Number of changes of descriptors of which the host has not all: a vCPU counts from 1.
const NOT_APPLIED: u64 = 0;

/// Returns whether user mode uses segment selectors: 32-bit code, or 64-bit code that has loaded
/// selectors. Linux sets none for 64-bit user code.
pub fn has_selectors(cpu: &VirtualCpu) -> bool {
    let has = |register: usize| cpu.segments[register].selector & !3 != 0;
    cpu.cpl == 3 && (!cpu.is_64_bit() || [ES, DS, FS, GS].into_iter().any(has))
}

/// Loads the guest's selectors into the host CPU, after TLS descriptors if the guest has changed
/// them: `changes` is the number of its changes.
pub fn load_segments(cpu: &mut VirtualCpu, memory: &GuestMemory, changes: u64) {
    if cpu.cpl == 3 && !cpu.is_64_bit() {
        // 32-bit code has a 32-bit instruction pointer.
        cpu.frame.rip &= u64::from(u32::MAX);
    }
    let is_stale = process().thread_local.get().changes != changes || has_selectors(cpu);
    let recorded = [ES, DS, FS, GS].map(|register| cpu.segments[register].selector);
    let found = selectors();
    // Mostly they are equal.
    if !is_stale && (recorded == found || recorded.map(host_selector) == found) {
        return;
    }
    let (fs_base, gs_base) = bases();
    let held = if cpu.cpl == 0 { recorded } else { [0; 4] };
    set_descriptors(cpu.descriptors(memory, FIRST), changes, held);
    load_selectors(recorded);
    // Loading a register, or changing its descriptor, has set its base.
    set_bases(fs_base, gs_base);
}

/// Sets the TLS descriptors on the host that differ from the guest's, and have the number of
/// `changes` then. Those of the selectors in `held` are not removed; the next entry tries again.
fn set_descriptors(wanted: [u64; TLS_COUNT], changes: u64, held: [u16; 4]) {
    let mut host = process().thread_local.get();
    host.changes = changes;
    for (index, &descriptor) in wanted.iter().enumerate() {
        let selector = FIRST + 8 * index as u16;
        if descriptor == 0 && host.usable[index] && held.contains(&selector) {
            host.changes = NOT_APPLIED;
        } else if host.descriptors[index] != descriptor {
            host.descriptors[index] = descriptor;
            let accepted = has(option::COMPAT) && set_host_descriptor(index, descriptor);
            if !accepted && has(option::COMPAT) {
                // Remove the previous descriptor.
                set_host_descriptor(index, 0);
            }
            host.usable[index] = accepted && descriptor != 0;
        }
    }
    process().thread_local.set(host);
}

/// Returns the selector that the host's register has in place of one of the guest's: 0 if the host
/// has no such descriptor, as for those of the guest kernel.
fn host_selector(selector: u16) -> u16 {
    let host = process().thread_local.get();
    let index = (selector | 3).wrapping_sub(FIRST) / 8;
    let is_thread_local = host.usable.get(usize::from(index)).is_some_and(|&usable| usable);
    let flat = [3, DATA, CODE_32.into(), CODE_64.into()];
    if flat.contains(&(selector | 3)) || is_thread_local { selector } else { 0 }
}

/// Loads `ES`, `DS`, `FS`, `GS`.
fn load_selectors(wanted: [u16; 4]) {
    let found = selectors();
    let [es, ds, fs, gs] = wanted.map(host_selector);
    // SAFETY: the host has these descriptors; the wedge uses none of the registers.
    unsafe {
        if es != found[0] {
            asm!("mov es, {:x}", in(reg) es, options(nostack, preserves_flags));
        }
        if ds != found[1] {
            asm!("mov ds, {:x}", in(reg) ds, options(nostack, preserves_flags));
        }
        if fs != found[2] {
            asm!("mov fs, {:x}", in(reg) fs, options(nostack, preserves_flags));
        }
        if gs != found[3] {
            asm!("mov gs, {:x}", in(reg) gs, options(nostack, preserves_flags));
        }
    }
}

/// Sets the bases of `FS` and `GS`.
pub fn set_bases(fs: u64, gs: u64) {
    set_fs_base(fs);
    set_gs_base(gs);
}

/// Sets the base of `FS`. A base that is not canonical causes a fault of the wedge.
#[inline]
pub fn set_fs_base(base: u64) {
    // SAFETY: the wedge does not use FS.
    unsafe { asm!("wrfsbase {}", in(reg) base, options(nomem, nostack, preserves_flags)) };
}

/// Sets the base of `GS`. A base that is not canonical causes a fault of the wedge.
#[inline]
pub fn set_gs_base(base: u64) {
    // SAFETY: the wedge does not use GS.
    unsafe { asm!("wrgsbase {}", in(reg) base, options(nomem, nostack, preserves_flags)) };
}

/// Returns the host's TLS descriptors as arguments of `set_thread_area`.
pub fn areas() -> [[u32; 4]; TLS_COUNT] {
    let ThreadLocal { descriptors, usable, .. } = process().thread_local.get();
    core::array::from_fn(|index| {
        describe(index, if usable[index] { descriptors[index] } else { 0 })
    })
}

fn describe(index: usize, descriptor: u64) -> [u32; 4] {
    thread_area((FIRST >> 3) as u32 + index as u32, descriptor)
}

/// Takes over the selectors of the guest after it has stopped. One that the host does not have
/// stays until the guest loads another.
pub fn save_selectors(cpu: &mut VirtualCpu, found: [u16; 4]) {
    for (register, selector) in [ES, DS, FS, GS].into_iter().zip(found) {
        let recorded = cpu.segments[register].selector;
        if selector != recorded && selector != host_selector(recorded) {
            cpu.sync_data_segment(register, selector);
        }
    }
}

/// Reads `ES`, `DS`, `FS`, `GS`.
pub fn selectors() -> [u16; 4] {
    let (es, ds, fs, gs): (u16, u16, u16, u16);
    // SAFETY: they are only read.
    unsafe {
        asm!(
            "mov {:x}, es",
            "mov {:x}, ds",
            "mov {:x}, fs",
            "mov {:x}, gs",
            out(reg) es,
            out(reg) ds,
            out(reg) fs,
            out(reg) gs,
            options(nomem, nostack, preserves_flags),
        );
    }
    [es, ds, fs, gs]
}

/// Reads the bases of `FS` and `GS`.
pub fn bases() -> (u64, u64) {
    (fs_base(), gs_base())
}

/// Reads the base of `FS`.
#[inline]
pub fn fs_base() -> u64 {
    let base;
    // SAFETY: the loader has checked that user mode may read it.
    unsafe { asm!("rdfsbase {}", out(reg) base, options(nomem, nostack, preserves_flags)) };
    base
}

/// Reads the base of `GS`.
#[inline]
pub fn gs_base() -> u64 {
    let base;
    // SAFETY: as in `fs_base`.
    unsafe { asm!("rdgsbase {}", out(reg) base, options(nomem, nostack, preserves_flags)) };
    base
}

/// Sets a TLS descriptor on the host; 0 removes it. Returns whether the host has accepted it.
fn set_host_descriptor(index: usize, descriptor: u64) -> bool {
    let description = describe(index, descriptor);
    let result: u32;
    // SAFETY: the call reads the description on this stack, which is below 4 GiB. The loader has
    // checked that the host supports 32-bit calls, else the guest has no 32-bit user code.
    unsafe {
        asm!(
            "xchg rbx, {description}",
            "int 0x80",
            "xchg rbx, {description}",
            description = inout(reg) description.as_ptr() => _,
            inlateout("eax") SET_THREAD_AREA => result,
            // Clobbered before Linux 4.17.
            out("r8") _,
            out("r9") _,
            out("r10") _,
            out("r11") _,
        );
    }
    result == 0
}
