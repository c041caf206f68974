//! The interface of one x86 vCPU of a host: registers, an event slot and an interrupt window.
//!
//! Getters take `&mut self` because a back end may have to fetch a register group first; reading a
//! register that the exit already delivered costs a load.

use hw_x86::vmcb::event;
use vmm_vcpu::Vcpu;

use crate::exit::Exit;
use crate::registers::{Gpr, Groups, Reg, Registers, Seg, Segment, load_each, store_each};

/// An interrupt or exception to inject, in the format of `EVENTINJ` (AMD APM vol. 2, section
/// 15.20).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Event(pub u64);

impl Event {
    /// No event.
    pub const NONE: Self = Self(0);
    /// A non-maskable interrupt.
    pub const NMI: Self = Self(event::VALID | event::TYPE_NMI | 2);

    /// An external interrupt.
    pub const fn interrupt(vector: u8) -> Self {
        Self(event::VALID | event::TYPE_INTR | vector as u64)
    }

    /// An exception without error code.
    pub const fn exception(vector: u8) -> Self {
        Self(event::VALID | event::TYPE_EXCEPTION | vector as u64)
    }

    /// An exception with an error code.
    pub const fn exception_code(vector: u8, code: u32) -> Self {
        Self(
            event::VALID
                | event::TYPE_EXCEPTION
                | event::ERROR_VALID
                | vector as u64
                | (code as u64) << 32,
        )
    }

    /// True if there is an event.
    pub const fn is_some(self) -> bool {
        self.0 & event::VALID != 0
    }

    /// The vector.
    pub const fn vector(self) -> u8 {
        (self.0 & event::VECTOR) as u8
    }

    /// True for a maskable interrupt.
    pub const fn is_interrupt(self) -> bool {
        self.is_some() && self.0 & event::TYPE_MASK == event::TYPE_INTR
    }

    /// True for an interrupt of the instruction `INT n`.
    pub const fn is_software_interrupt(self) -> bool {
        self.is_some() && self.0 & event::TYPE_MASK == event::TYPE_SOFT
    }

    /// True for an exception (not an interrupt).
    pub const fn is_exception(self) -> bool {
        self.is_some() && self.0 & event::TYPE_MASK == event::TYPE_EXCEPTION
    }
}

/// Action to take once, as soon as the guest can take an interrupt.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum InterruptWindow {
    /// No action.
    #[default]
    Nothing,
    /// The guest exits, with [`Exit::InterruptWindow`].
    Exit,
    /// The guest takes the interrupt with this vector without an exit (virtual interrupt). Until
    /// then it exits when it writes `CR8`.
    DeliverVirq(u8),
}

/// One x86 vCPU of a host.
///
/// Setters take effect at the next [`Vcpu::run`]. A back end whose state is in a shared page marks
/// the group that a setter changed.
pub trait X86Vcpu: Vcpu<Exit = Exit> {
    /// Value of a general register, [`Gpr::Rsp`] included.
    fn gpr(&mut self, register: Gpr) -> u64;
    /// Sets a general register.
    fn set_gpr(&mut self, register: Gpr, value: u64);
    /// Value of another register.
    fn get(&mut self, register: Reg) -> u64;
    /// Sets another register.
    fn set(&mut self, register: Reg, value: u64);
    /// Value of a segment or table register.
    fn segment(&mut self, segment: Seg) -> Segment;
    /// Sets a segment or table register.
    fn set_segment(&mut self, segment: Seg, value: Segment);

    /// Reads the registers of these groups; all others are 0.
    fn load(&mut self, groups: Groups) -> Registers
    where
        Self: Sized,
    {
        load_each(self, groups)
    }
    /// Sets the registers of these groups. A back end that sets a group at once overrides this.
    fn store(&mut self, registers: &Registers, groups: Groups)
    where
        Self: Sized,
    {
        store_each(self, registers, groups);
    }

    /// Value of an SSE register, low half first; `None` if the back end does not provide them.
    fn vector(&mut self, _register: u8) -> Option<[u64; 2]> {
        None
    }
    /// Sets an SSE register that the back end provides. The upper half of the AVX register is kept.
    fn set_vector(&mut self, _register: u8, _value: [u64; 2]) {}

    /// Address of the instruction after the exiting one; 0 if the host does not provide it.
    fn next_rip(&mut self) -> u64;
    /// Bytes of the exiting instruction, and the number of valid bytes (0 if the host provides
    /// none).
    fn instruction_bytes(&mut self) -> ([u8; 16], usize);

    /// Drops the guest's translation of a linear address (`INVLPG`), and may drop others.
    fn invalidate(&mut self, _address: u64) {
        self.flush_tlb();
    }

    /// Value of a counter of the vTLB; `None`: the back end has none with this index.
    fn vtlb_events(&mut self, _index: u32) -> Option<u64> {
        None
    }

    /// Completes the access of an [`Exit::Access`]: the value read, 0 for a write; `None` raises
    /// `#GP(0)`. A back end without such exits keeps the default.
    fn complete_access(&mut self, _value: Option<u64>) {}

    /// The guest reads and writes `CR8` without an exit: see [`X86Vcpu::cr8`],
    /// [`X86Vcpu::set_cr8`] and [`X86Vcpu::set_cr8_exits`].
    const KEEPS_CR8: bool = false;
    /// Current `CR8`.
    fn cr8(&mut self) -> u8 {
        0
    }
    /// Sets `CR8` for the next entry.
    fn set_cr8(&mut self, _value: u8) {}
    /// Makes writes of `CR8` exit, because an interrupt is pending below the task priority, or
    /// because the write clears bits 3:0 of the task priority. A back end whose guest always exits
    /// when it lowers `CR8` keeps the default: its guest finds bits 3:0 unchanged after a write of
    /// the same class.
    fn set_cr8_exits(&mut self, _exit: bool) {}

    /// Makes the next `IRET` exit before it is executed ([`Exit::Iret`]). Returns `false` if the
    /// back end masks NMIs by itself and has no such exit.
    fn set_iret_exits(&mut self, _exit: bool) -> bool {
        false
    }

    /// Event in the slot. After an exit: the event whose delivery the exit interrupted; the next
    /// entry delivers it unless it is replaced. A maskable interrupt without a window is never put
    /// there, because a back end may offer it as a virtual one that the guest has not taken yet:
    /// [`InterruptWindow::DeliverVirq`] offers it instead.
    fn event(&mut self) -> Event;
    /// Puts an event into the slot, or empties it; the next entry delivers it.
    fn set_event(&mut self, event: Event);
    /// Sets the action to take as soon as the guest can take an interrupt.
    fn set_window(&mut self, wanted: InterruptWindow);
    /// True while that action is outstanding.
    fn has_window(&mut self) -> bool;
}
