//! Virtual interrupts: list registers of the GICv3 (IHI 0069, 4.8), by which the processor delivers
//! interrupts to a guest without exits.
//!
//! The VMM puts an interrupt into a word of the state page ([`abi::vcpu::arm64::virq`]). Before an
//! entry the kernel moves it to a free list register and clears the word. While words remain, the
//! processor interrupts the kernel as soon as list registers are free (maintenance interrupt).
//! Another one reports the end of an interrupt, if the VMM asks for it.

use core::cell::Cell;
use core::sync::atomic::{AtomicBool, Ordering};

use abi::vcpu::arm64::{VcpuState, virq};
use hw_arm64::gic::{FIRST_SPECIAL, virtual_interface as ich};

use crate::{cpu, log, read_register, write_register};

/// The CPUs have what this module needs.
static IS_AVAILABLE: AtomicBool = AtomicBool::new(false);

/// Number of list registers in use.
const LISTS: usize = 4;
/// A bit for each of them.
pub const ALL_LISTS: u64 = (1 << LISTS) - 1;

/// Saved registers of the virtual interface. While a vCPU is a CPU's owner, the CPU has newer
/// values.
#[derive(Clone)]
pub struct VirtualInterface {
    lists: [Cell<u64>; LISTS],
    /// Settings of the guest: ICH_VMCR_EL2.
    control: Cell<u64>,
    /// Active priorities: ICH_AP0R0_EL2, ICH_AP1R0_EL2.
    active: [Cell<u64>; 2],
}

/// Looks what the first CPU has. `maintenance`: the machine has the maintenance interrupt.
pub fn init(maintenance: bool) {
    let kind = read_register!("S3_4_C12_C11_1");
    let is_available = maintenance && ich::lists(kind) >= LISTS && ich::has_32_priorities(kind);
    if !is_available {
        log!("guests have no interrupts: {kind:#x} is no virtual interface that the kernel uses");
    }
    IS_AVAILABLE.store(is_available, Ordering::Relaxed);
}

/// Returns whether guests have interrupts.
fn is_available() -> bool {
    IS_AVAILABLE.load(Ordering::Relaxed)
}

fn set_control(value: u64) {
    // SAFETY: concerns what guests receive, and an interrupt that only makes the kernel look again.
    unsafe { write_register!("S3_4_C12_C11_0", value) };
}

/// Prepares this CPU, without interrupts for guests.
pub fn init_this_cpu() {
    match is_available() {
        true => {
            set_control(ich::ENABLED);
            VirtualInterface::reset().load();
            let list = super::timer::link().map_or(0, |link| ich::PENDING | ich::GROUP_1 | link);
            cpu::current().guest.timer_list.store(list, Ordering::Relaxed);
        }
        false => set_control(ich::TRAP_ALL),
    }
}

fn list(index: usize) -> u64 {
    match index {
        0 => read_register!("S3_4_C12_C12_0"),
        1 => read_register!("S3_4_C12_C12_1"),
        2 => read_register!("S3_4_C12_C12_2"),
        _ => read_register!("S3_4_C12_C12_3"),
    }
}

fn set_list(index: usize, value: u64) {
    // SAFETY: interrupts for the guest, of which only the timer's is linked to one of the host.
    unsafe {
        match index {
            0 => write_register!("S3_4_C12_C12_0", value),
            1 => write_register!("S3_4_C12_C12_1", value),
            2 => write_register!("S3_4_C12_C12_2", value),
            _ => write_register!("S3_4_C12_C12_3", value),
        }
    }
}

impl VirtualInterface {
    /// Values after a reset.
    pub const fn reset() -> Self {
        Self {
            lists: [const { Cell::new(0) }; LISTS],
            control: Cell::new(0),
            active: [const { Cell::new(0) }; 2],
        }
    }

    /// Saves the registers of this CPU, whose owner the vCPU is.
    pub fn save(&self) {
        if !is_available() {
            return;
        }
        for (index, saved) in self.lists.iter().enumerate() {
            saved.set(list(index));
        }
        self.control.set(read_register!("S3_4_C12_C11_7"));
        self.active[0].set(read_register!("S3_4_C12_C8_0"));
        self.active[1].set(read_register!("S3_4_C12_C9_0"));
    }

    /// Loads them.
    pub fn load(&self) {
        if !is_available() {
            return;
        }
        for (index, saved) in self.lists.iter().enumerate() {
            set_list(index, saved.get());
        }
        // SAFETY: they concern guests alone.
        unsafe {
            write_register!("S3_4_C12_C11_7", self.control.get());
            write_register!("S3_4_C12_C8_0", self.active[0].get());
            write_register!("S3_4_C12_C9_0", self.active[1].get());
        }
    }
}

/// Moves interrupts from the state page to list registers, before an entry.
#[inline(always)]
pub fn deliver(state: &VcpuState) {
    if state.virqs.iter().any(|word| word.get() != 0) && is_available() {
        move_words(state);
    }
}

fn move_words(state: &VcpuState) {
    let mut left = false;
    for word in &state.virqs {
        let value = word.get();
        let is_ignored = value & virq::VALID == 0 || value & virq::NUMBER >= FIRST_SPECIAL;
        match is_ignored || place_word(value, 0) {
            true => word.set(0),
            false => left = true,
        }
    }
    if left {
        request_maintenance();
    }
}

/// Lets the processor interrupt as soon as list registers are free.
pub fn request_maintenance() {
    set_control(ich::ENABLED | ich::UNDERFLOW);
}

/// Puts the interrupt of a word into a list register, linked to one of the host with the bits
/// `link`. Returns whether there is one for it.
#[inline(always)]
pub fn place_word(word: u64, link: u64) -> bool {
    let number = word & virq::NUMBER;
    if !is_available() || number >= FIRST_SPECIAL {
        return true;
    }
    let priority = word >> virq::PRIORITY_SHIFT & virq::PRIORITY_MASK;
    let report = if word & virq::REPORT_END != 0 { ich::REPORT_END } else { 0 };
    let entry = ich::PENDING | ich::GROUP_1 | priority << ich::PRIORITY_SHIFT | number;
    let free = free_lists();
    if free != ALL_LISTS {
        return place_beside(free, entry | report | link);
    }
    set_list(0, entry | report | link);
    true
}

/// Puts an interrupt into the list register that has it, since no two may, else into one of the
/// `free` ones. Returns whether there is one.
#[inline(never)]
fn place_beside(free: u64, entry: u64) -> bool {
    let (number, is_linked) = (entry & ich::NUMBER, entry & ich::LINKED != 0);
    let is_free = |index: usize| free & 1 << index != 0;
    let same = (0..LISTS).find(|&index| !is_free(index) && list(index) & ich::NUMBER == number);
    let Some(index) = same.or_else(|| (0..LISTS).find(|&index| is_free(index))) else {
        return false;
    };
    // An interrupt that is active becomes pending, too, unless it is linked: those of the host do
    // not occur again before the guest has ended them.
    let active = if same.is_some() && !is_linked { list(index) & ich::ACTIVE } else { 0 };
    set_list(index, entry | active);
    true
}

/// List registers without an interrupt and without the report of its end: a bit each.
#[inline(always)]
fn free_lists() -> u64 {
    read_register!("S3_4_C12_C11_5") & ALL_LISTS
}

/// Returns whether a list register has the interrupt that is linked to one of the host.
pub fn has_linked() -> bool {
    is_available()
        && free_lists() != ALL_LISTS
        && (0..LISTS).any(|index| free_lists() & 1 << index == 0 && list(index) & ich::LINKED != 0)
}

/// Returns whether an interrupt is pending in a list register.
pub fn has_pending() -> bool {
    is_available()
        && free_lists() != ALL_LISTS
        && (0..LISTS).any(|index| list(index) & ich::PENDING != 0)
}

/// Takes the number of an interrupt whose end is to be reported, if the guest has ended one.
pub fn take_ended() -> Option<u64> {
    if !is_available() {
        return None;
    }
    let ended = read_register!("S3_4_C12_C11_3") & ALL_LISTS;
    let index = (ended != 0).then(|| ended.trailing_zeros() as usize)?;
    let number = list(index) & ich::NUMBER;
    set_list(index, 0);
    Some(number)
}

/// Ends the request for maintenance interrupts, after an exit.
#[inline(always)]
pub fn finish() {
    if is_available() {
        set_control(ich::ENABLED);
    }
}
