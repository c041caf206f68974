//! Virtual interrupts: list registers of the GIC (IHI 0069, 4.8; IHI 0048, 5.2), by which the
//! processor delivers interrupts to a guest without exits.
//!
//! The VMM puts an interrupt into a word of the state page ([`abi::vcpu::arm64::virq`]). Before an
//! entry the kernel moves it to a free list register and clears the word. While words remain, the
//! processor interrupts the kernel as soon as list registers are free (maintenance interrupt).
//! Another one reports the end of an interrupt, if the VMM asks for it.

mod v2;
mod v3;

use core::cell::Cell;
use core::sync::atomic::{AtomicU8, Ordering};

use abi::vcpu::arm64::{VcpuState, virq};
use hw_arm64::gic::v2::hypervisor_interface as gich;
use hw_arm64::gic::virtual_interface as ich;

use crate::gic;
use crate::{cpu, log, read_register, write_register};
use v2::MappedRegisters;
use v3::SystemRegisters;

/// Virtual interface that the CPUs have ([`kind`]). That of a GICv3 is 0, the fastest to compare
/// with.
static KIND: AtomicU8 = AtomicU8::new(kind::NONE);

mod kind {
    pub const V3: u8 = 0;
    pub const V2: u8 = 1;
    pub const NONE: u8 = 2;
}

/// Number of list registers in use.
const LISTS: usize = 4;
/// A bit for each of them.
pub const ALL_LISTS: u64 = (1 << LISTS) - 1;

/// Registers of the executing CPU's virtual interface, in the formats of a GICv3.
trait Interface {
    /// Returns whether guests can have an interrupt of this number.
    fn is_number(number: u64) -> bool;
    /// List register ([`ich`]).
    fn list(index: usize) -> u64;
    /// Sets it.
    fn set_list(index: usize, value: u64);
    /// Sets the control register, with [`ich::ENABLED`] and [`ich::UNDERFLOW`].
    fn set_control(value: u64);
    /// Ends the request of [`ich::UNDERFLOW`], after an exit.
    fn finish();
    /// List registers without an interrupt and without the report of its end: a bit each.
    fn free_lists() -> u64;
    /// Those with the report of an interrupt's end.
    fn ended() -> u64;
    /// The guest's settings, and active priorities of both groups; opaque.
    fn settings() -> [u64; 3];
    /// Sets these.
    fn set_settings(values: [u64; 3]);
}

/// Evaluates an expression in which a name stands for the CPUs' [`Interface`], or the one for those
/// without any.
macro_rules! with_interface {
    ($name:ident: $value:expr, else $none:expr) => {
        match KIND.load(Ordering::Relaxed) {
            kind::V3 => {
                type $name = SystemRegisters;
                $value
            }
            kind::V2 => {
                type $name = MappedRegisters;
                $value
            }
            _ => $none,
        }
    };
}

/// Saved registers of the virtual interface. While a vCPU is a CPU's owner, the CPU has newer
/// values.
#[derive(Clone)]
pub struct VirtualInterface {
    lists: [Cell<u64>; LISTS],
    settings: [Cell<u64>; 3],
    /// No list register is in use; `lists` has no meaning then.
    are_free: Cell<bool>,
}

/// Looks what the first CPU has. `maintenance`: the machine has the maintenance interrupt.
pub fn init(maintenance: bool) {
    let (kind, lists, has_32_priorities, value) = if gic::v2::is_present() {
        let value = gic::v2::hypervisor_interface().read(gich::VTR);
        (kind::V2, gich::lists(value), ich::has_32_priorities(value.into()), value.into())
    } else {
        let value = read_register!("S3_4_C12_C11_1");
        (kind::V3, ich::lists(value), ich::has_32_priorities(value), value)
    };
    if maintenance && lists >= LISTS && has_32_priorities {
        KIND.store(kind, Ordering::Relaxed);
    } else {
        log!("guests have no interrupts: {value:#x} is no virtual interface that the kernel uses");
    }
}

/// Physical address of the interface of a GICv2's guests to the CPU, if they have one.
pub fn guest_interface() -> Option<u64> {
    let is_v2 = KIND.load(Ordering::Relaxed) == kind::V2;
    is_v2.then(gic::v2::guest_interface)
}

/// Prepares this CPU, without interrupts for guests.
pub fn init_this_cpu() {
    with_interface!(I: I::set_control(ich::ENABLED), else {
        if !gic::v2::is_present() {
            // SAFETY: guests have no interrupts.
            unsafe { write_register!("S3_4_C12_C11_0", ich::TRAP_ALL) };
        }
    });
    VirtualInterface::reset().load(false);
    if has_system_registers() {
        let list = super::timer::link().map_or(0, |link| ich::PENDING | ich::GROUP_1 | link);
        cpu::current().guest.timer_list.store(list, Ordering::Relaxed);
    }
}

/// Returns whether guests have interrupts by a GICv3, whose registers the entry code uses.
#[inline(always)]
pub fn has_system_registers() -> bool {
    KIND.load(Ordering::Relaxed) == kind::V3
}

impl VirtualInterface {
    /// Values after a reset.
    pub const fn reset() -> Self {
        Self {
            lists: [const { Cell::new(0) }; LISTS],
            settings: [const { Cell::new(0) }; 3],
            are_free: Cell::new(true),
        }
    }

    /// Sets the saved values to those after a reset.
    pub fn clear(&self) {
        self.settings.iter().for_each(|saved| saved.set(0));
        self.are_free.set(true);
    }

    /// Saves the registers of this CPU, whose owner the vCPU is. `are_free` is the value of
    /// [`are_free`].
    #[inline(always)]
    pub fn save(&self, are_free: bool) {
        self.are_free.set(are_free);
        if !are_free {
            self.save_lists();
        }
        with_interface!(I: {
            for (saved, value) in self.settings.iter().zip(I::settings()) {
                saved.set(value);
            }
        }, else {});
    }

    #[inline(never)]
    fn save_lists(&self) {
        with_interface!(I: {
            for (index, saved) in self.lists.iter().enumerate() {
                saved.set(I::list(index));
            }
        }, else {});
    }

    /// Loads them. `are_free`: no list register of this CPU is in use, so what they have has no
    /// effect.
    #[inline(always)]
    pub fn load(&self, are_free: bool) {
        if !(are_free && self.are_free.get()) {
            self.load_lists();
        }
        with_interface!(I: I::set_settings(self.settings.each_ref().map(Cell::get)), else {});
    }

    #[inline(never)]
    fn load_lists(&self) {
        let are_free = self.are_free.get();
        with_interface!(I: {
            for (index, saved) in self.lists.iter().enumerate() {
                I::set_list(index, if are_free { 0 } else { saved.get() });
            }
        }, else {});
    }
}

/// Returns whether no list register of this CPU is in use: none has an interrupt, nor the report of
/// its end.
#[inline(always)]
pub fn are_free() -> bool {
    with_interface!(I: I::free_lists() == ALL_LISTS, else true)
}

/// Returns whether the state page has interrupts.
#[inline(always)]
pub fn has_words(state: &VcpuState) -> bool {
    state.virqs.iter().fold(0, |all, word| all | word.get()) != 0
}

/// Moves interrupts from the state page to list registers, before an entry.
#[inline(always)]
pub fn deliver(state: &VcpuState) {
    if has_words(state) {
        with_interface!(I: move_words::<I>(state), else {});
    }
}

fn move_words<I: Interface>(state: &VcpuState) {
    let mut left = false;
    for word in &state.virqs {
        let value = word.get();
        // Other threads of the VMM fill words that are 0 at any time, and change no others.
        if value == 0 {
            continue;
        }
        match value & virq::VALID == 0 || place::<I>(value, 0) {
            true => word.set(0),
            false => left = true,
        }
    }
    if left {
        I::set_control(ich::ENABLED | ich::UNDERFLOW);
    }
}

/// Lets the processor interrupt as soon as list registers are free.
pub fn request_maintenance() {
    with_interface!(I: I::set_control(ich::ENABLED | ich::UNDERFLOW), else {});
}

/// Puts the interrupt of a word into a list register, linked to one of the host with the bits
/// `link`. Returns whether there is one for it.
#[inline(always)]
pub fn place_word(word: u64, link: u64) -> bool {
    with_interface!(I: place::<I>(word, link), else true)
}

#[inline(always)]
fn place<I: Interface>(word: u64, link: u64) -> bool {
    let number = word & virq::NUMBER;
    if !I::is_number(number) {
        return true;
    }
    let priority = word >> virq::PRIORITY_SHIFT & virq::PRIORITY_MASK;
    let report = if word & virq::REPORT_END != 0 { ich::REPORT_END } else { 0 };
    let entry = ich::PENDING | ich::GROUP_1 | priority << ich::PRIORITY_SHIFT | number;
    let free = I::free_lists();
    if free != ALL_LISTS {
        return place_beside::<I>(free, entry | report | link);
    }
    I::set_list(0, entry | report | link);
    true
}

/// Puts an interrupt into the list register that has it, since no two may, else into one of the
/// `free` ones. Returns whether there is one.
#[inline(never)]
fn place_beside<I: Interface>(free: u64, entry: u64) -> bool {
    let (number, is_linked) = (entry & ich::NUMBER, entry & ich::LINKED != 0);
    let is_free = |index: usize| free & 1 << index != 0;
    let same = (0..LISTS).find(|&index| !is_free(index) && I::list(index) & ich::NUMBER == number);
    if !is_linked && same.is_some_and(|index| I::list(index) & ich::LINKED != 0) {
        // It is pending or active already. Without its link nothing would deactivate the host's.
        return true;
    }
    let Some(index) = same.or_else(|| (0..LISTS).find(|&index| is_free(index))) else {
        return false;
    };
    // An interrupt that is active becomes pending, too, unless it is linked: those of the host do
    // not occur again before the guest has ended them. Nor do those whose end is reported, unless
    // the guest has made them inactive by the distributor.
    let stays_active = same.is_some() && entry & (ich::LINKED | ich::REPORT_END) == 0;
    let active = if stays_active { I::list(index) & ich::ACTIVE } else { 0 };
    I::set_list(index, entry | active);
    true
}

/// Returns whether a list register has the interrupt that is linked to one of the host.
pub fn has_linked() -> bool {
    with_interface!(I: has_bit::<I>(ich::LINKED), else false)
}

/// Returns whether an interrupt is pending in a list register, or its end is to be reported.
#[inline(always)]
pub fn has_pending() -> bool {
    !are_free() && (has_ended() || with_interface!(I: has_bit::<I>(ich::PENDING), else false))
}

/// Returns whether a list register in use has this bit.
fn has_bit<I: Interface>(bit: u64) -> bool {
    let free = I::free_lists();
    free != ALL_LISTS && (0..LISTS).any(|index| free & 1 << index == 0 && I::list(index) & bit != 0)
}

/// Returns whether the end of an interrupt is to be reported. The maintenance interrupt occurs as
/// long as a list register has that.
pub fn has_ended() -> bool {
    with_interface!(I: I::ended() != 0, else false)
}

/// Takes the number of an interrupt whose end is to be reported, if the guest has ended one.
pub fn take_ended() -> Option<u64> {
    with_interface!(I: take_ended_of::<I>(), else None)
}

fn take_ended_of<I: Interface>() -> Option<u64> {
    let ended = I::ended();
    let index = (ended != 0).then(|| ended.trailing_zeros() as usize)?;
    let number = I::list(index) & ich::NUMBER;
    I::set_list(index, 0);
    Some(number)
}

/// Ends the request for maintenance interrupts, after an exit.
#[inline(always)]
pub fn finish() {
    with_interface!(I: I::finish(), else {});
}
