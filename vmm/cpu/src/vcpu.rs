//! What a host offers for one virtual CPU: its registers, a slot for an event, a deadline, and
//! running it.
//!
//! Getters take `&mut self` because a back end may have to fetch a register group first; reading a
//! register that the exit already delivered costs a load.

use hw_x86::vmcb::event;

use crate::exit::Exit;

pub use hw_x86::vmcb::VmcbSegment as Segment;

/// General registers, numbered as instructions encode them.
#[allow(missing_docs, reason = "the manual's names")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Gpr {
    Rax = 0,
    Rcx = 1,
    Rdx = 2,
    Rbx = 3,
    Rsp = 4,
    Rbp = 5,
    Rsi = 6,
    Rdi = 7,
    R8 = 8,
    R9 = 9,
    R10 = 10,
    R11 = 11,
    R12 = 12,
    R13 = 13,
    R14 = 14,
    R15 = 15,
}

impl Gpr {
    /// The register with this encoding; only the low four bits count.
    pub const fn from_code(code: u8) -> Self {
        const ALL: [Gpr; 16] = [
            Gpr::Rax,
            Gpr::Rcx,
            Gpr::Rdx,
            Gpr::Rbx,
            Gpr::Rsp,
            Gpr::Rbp,
            Gpr::Rsi,
            Gpr::Rdi,
            Gpr::R8,
            Gpr::R9,
            Gpr::R10,
            Gpr::R11,
            Gpr::R12,
            Gpr::R13,
            Gpr::R14,
            Gpr::R15,
        ];
        ALL[(code & 15) as usize]
    }
}

/// Registers other than the general and the segment registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reg {
    /// Instruction pointer.
    Rip,
    /// Flags.
    Rflags,
    /// Bit 0: interrupts are held off for one instruction (`STI`, `MOV SS`).
    InterruptShadow,
    /// Control register 0.
    Cr0,
    /// Page-fault address.
    Cr2,
    /// Page-table root.
    Cr3,
    /// Control register 4.
    Cr4,
    /// Extended features; `SVME` reads as 0 and is not written.
    Efer,
    /// Current privilege level.
    Cpl,
    /// `STAR`.
    Star,
    /// `LSTAR`.
    Lstar,
    /// `CSTAR`.
    Cstar,
    /// `SFMASK`.
    Sfmask,
    /// `KernelGSbase`.
    KernelGsBase,
    /// `SYSENTER_CS`.
    SysenterCs,
    /// `SYSENTER_ESP`.
    SysenterEsp,
    /// `SYSENTER_EIP`.
    SysenterEip,
    /// `PAT`.
    Pat,
    /// Debug status.
    Dr6,
    /// Debug control.
    Dr7,
    /// Added to the host's time-stamp counter to give the guest's.
    TscOffset,
    /// Enabled extended state.
    Xcr0,
}

/// Segment and table registers; the first six numbered as instructions encode them.
#[allow(missing_docs, reason = "the manual's names")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Seg {
    Es = 0,
    Cs = 1,
    Ss = 2,
    Ds = 3,
    Fs = 4,
    Gs = 5,
    Gdtr = 6,
    Ldtr = 7,
    Idtr = 8,
    Tr = 9,
}

/// An interrupt or exception on its way into the guest, in the format of `EVENTINJ`
/// (AMD APM vol. 2, section 15.20).
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

    /// Whether there is an event.
    pub const fn is_some(self) -> bool {
        self.0 & event::VALID != 0
    }

    /// The vector.
    pub const fn vector(self) -> u8 {
        (self.0 & event::VECTOR) as u8
    }

    /// Whether this is an exception (not an interrupt).
    pub const fn is_exception(self) -> bool {
        self.is_some() && self.0 & event::TYPE_MASK == event::TYPE_EXCEPTION
    }
}

/// What is done once, as soon as the guest can take an interrupt.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum InterruptWindow {
    /// Nothing.
    #[default]
    Nothing,
    /// The guest exits, with [`Exit::InterruptWindow`].
    Exit,
    /// The guest takes the interrupt with this vector, without an exit. Until then it exits when it writes `CR8`.
    DeliverVirq(u8),
}

/// One virtual CPU of a host.
///
/// Setters take effect at the next [`Vcpu::run`]. A back end whose state lives in a shared page
/// marks the group that a setter changed.
pub trait Vcpu {
    /// A general register, [`Gpr::Rsp`] included.
    fn gpr(&mut self, register: Gpr) -> u64;
    /// Sets a general register.
    fn set_gpr(&mut self, register: Gpr, value: u64);
    /// Another register.
    fn get(&mut self, register: Reg) -> u64;
    /// Sets another register.
    fn set(&mut self, register: Reg, value: u64);
    /// A segment or table register.
    fn segment(&mut self, segment: Seg) -> Segment;
    /// Sets a segment or table register.
    fn set_segment(&mut self, segment: Seg, value: Segment);

    /// An SSE register, low half first; `None`: the back end does not give them.
    fn vector(&mut self, _register: u8) -> Option<[u64; 2]> {
        None
    }
    /// Sets an SSE register that it gives. What else is in its place (the upper half of an AVX register) stays.
    fn set_vector(&mut self, _register: u8, _value: [u64; 2]) {}

    /// Address of the instruction after the one that exited; 0 if the host does not know.
    fn next_rip(&mut self) -> u64;
    /// Bytes of the instruction that exited, and how many are valid (0 if the host does not know).
    fn instruction_bytes(&mut self) -> ([u8; 16], usize);

    /// What the access has come to with which the guest exited ([`Exit::Access`]): the value, 0 of a write; `None` raises
    /// `#GP(0)`. A back end that never exits in this way need not have it.
    fn complete_access(&mut self, _value: Option<u64>) {}

    /// Whether the guest reads and writes `CR8` without an exit: see the next three.
    const KEEPS_CR8: bool = false;
    /// What `CR8` is now.
    fn cr8(&mut self) -> u8 {
        0
    }
    /// What it is from the next entry on.
    fn set_cr8(&mut self, _value: u8) {}
    /// Whether the guest exits when it writes `CR8`, because an interrupt waits for a lower task priority. A back end whose
    /// guest exits in any case when it lowers it need not have it.
    fn set_cr8_exits(&mut self, _exit: bool) {}

    /// Whether the guest exits at its next `IRET`, before that is executed ([`Exit::Iret`]). `false`: the back end masks
    /// non-maskable interrupts by itself, and never exits there.
    fn set_iret_exits(&mut self, _exit: bool) -> bool {
        false
    }

    /// The event in the slot. After an exit: the one whose delivery the exit cut short; it is delivered at
    /// the next entry unless it is replaced.
    fn event(&mut self) -> Event;
    /// Puts an event into the slot, or empties it; it is delivered at the next entry.
    fn set_event(&mut self, event: Event);
    /// Says what is to be done as soon as the guest can take an interrupt.
    fn set_window(&mut self, wanted: InterruptWindow);
    /// Whether that has yet to be done.
    fn has_window(&mut self) -> bool;
    /// The host's time-stamp counter value at which to leave the guest with [`Exit::Deadline`];
    /// `u64::MAX` for none. Stays set until changed.
    fn set_deadline(&mut self, tsc: u64);
    /// Time in which the host had other things to do than to run this CPU, which was not idle: in ticks of the time-stamp
    /// counter, up to when it was last taken away.
    fn stolen(&mut self) -> u64;
    /// Whether each `HLT` of the guest is an exit at once. If not, the host may wait for it ([`Exit::Halted`]), as it may in the
    /// beginning.
    fn set_hlt_exits(&mut self, exit: bool);
    /// Empties the guest's TLB, global entries too, before the next entry.
    fn flush_tlb(&mut self);
    /// Runs the guest until it exits.
    fn run(&mut self) -> Exit;
}
