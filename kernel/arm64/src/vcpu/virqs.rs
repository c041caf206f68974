//! Virtual interrupts: list registers of the GICv3 (IHI 0069, 4.8), by which the processor delivers
//! interrupts to a guest without exits.
//!
//! The VMM puts an interrupt into a word of the state page ([`abi::vcpu::arm64::virq`]). Before an
//! entry the kernel moves it to a free list register and clears the word. While words remain, the
//! processor interrupts the kernel as soon as list registers are free (maintenance interrupt).

use core::cell::Cell;
use core::sync::atomic::{AtomicBool, Ordering};

use abi::vcpu::arm64::{VcpuState, virq};
use hw_arm64::gic::{FIRST_SPECIAL, virtual_interface as ich};

use crate::{log, read_register, write_register};

/// The CPUs have what this module needs.
static IS_AVAILABLE: AtomicBool = AtomicBool::new(false);

/// Number of list registers in use.
const LISTS: usize = 4;

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
    // SAFETY: interrupts for the guest, none of which is linked to one of the host.
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
        let number = value & virq::NUMBER;
        if value & virq::VALID == 0 || number >= FIRST_SPECIAL {
            word.set(0);
            continue;
        }
        let priority = value >> virq::PRIORITY_SHIFT & virq::PRIORITY_MASK;
        let entry = ich::PENDING | ich::GROUP_1 | priority << ich::PRIORITY_SHIFT | number;
        match place(number) {
            Some(index) => {
                // An interrupt that is active becomes pending, too.
                set_list(index, entry | list(index) & ich::ACTIVE);
                word.set(0);
            }
            None => left = true,
        }
    }
    set_control(ich::ENABLED | if left { ich::UNDERFLOW } else { 0 });
}

/// List register for an interrupt: the one that has it, since no two may, else a free one.
fn place(number: u64) -> Option<usize> {
    let is_used = |index: &usize| list(*index) & (ich::PENDING | ich::ACTIVE) != 0;
    let all = || 0..LISTS;
    let same = all().filter(is_used).find(|&index| list(index) & ich::NUMBER == number);
    same.or_else(|| all().find(|index| !is_used(index)))
}

/// Ends the request for maintenance interrupts, after an exit.
#[inline(always)]
pub fn finish() {
    if is_available() {
        set_control(ich::ENABLED);
    }
}
