//! System registers, device registers, and instructions that need privilege.

/// Assembly of one instruction with VHE, and of another one without it. The processor decides at
/// boot (`boot.s`): there the second one replaces the first one where it has no VHE. The second one
/// may be a branch, but have no other address relative to its place.
#[macro_export]
macro_rules! alternative {
    ($vhe:expr, $without:expr) => {
        concat!(
            "661: ",
            $vhe,
            "\n.pushsection .alternatives, \"a\"\n.long 661b - .\n",
            $without,
            "\n.popsection"
        )
    };
}

/// Reads a system register whose reading has no side effect. Two names: with VHE and without it.
#[macro_export]
macro_rules! read_register {
    ($name:literal, $without:literal) => {{
        let value: u64;
        // SAFETY: reading the register changes nothing.
        unsafe {
            core::arch::asm!(
                $crate::alternative!(concat!("mrs {0}, ", $name), concat!("mrs {0}, ", $without)),
                out(reg) value, options(nomem, nostack)
            );
        }
        value
    }};
    ($name:literal) => {{
        let value: u64;
        // SAFETY: reading the register changes nothing.
        unsafe {
            core::arch::asm!(concat!("mrs {}, ", $name), out(reg) value, options(nomem, nostack));
        }
        value
    }};
}

/// Writes a system register. The writer answers for its effect.
#[macro_export]
macro_rules! write_register {
    ($name:literal, $without:literal, $value:expr) => {{
        let value: u64 = $value;
        core::arch::asm!(
            $crate::alternative!(concat!("msr ", $name, ", {0}"), concat!("msr ", $without, ", {0}")),
            in(reg) value, options(nostack)
        );
    }};
    ($name:literal, $value:expr) => {{
        let value: u64 = $value;
        core::arch::asm!(concat!("msr ", $name, ", {}"), in(reg) value, options(nostack));
    }};
}

/// Returns whether the kernel runs with VHE. The compiler knows no better than to ask each time.
#[inline(always)]
pub fn has_vhe() -> bool {
    let value: u64;
    // SAFETY: sets the register.
    unsafe {
        core::arch::asm!(
            alternative!("mov {0}, #1", "mov {0}, #0"),
            out(reg) value, options(pure, nomem, nostack, preserves_flags)
        );
    }
    value != 0
}

/// Orders what precedes before what follows, for the instruction stream.
#[inline(always)]
pub fn instruction_barrier() {
    // SAFETY: a barrier.
    unsafe { core::arch::asm!("isb", options(nostack)) };
}

/// Waits until all memory accesses before it are complete.
#[inline(always)]
pub fn data_barrier() {
    // SAFETY: a barrier.
    unsafe { core::arch::asm!("dsb sy", options(nostack)) };
}

/// Registers of a device, mapped for ever.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRegisters(usize);

impl DeviceRegisters {
    /// The registers at this virtual address.
    ///
    /// # Safety
    /// Device registers are mapped there, for ever; all accesses at multiples of their size inside
    /// of them have no effect on memory.
    pub const unsafe fn new(address: usize) -> Self {
        Self(address)
    }

    /// Reads 32 bits at a byte offset.
    #[inline(always)]
    pub fn read(self, offset: usize) -> u32 {
        // SAFETY: by `new`.
        unsafe { ((self.0 + offset) as *const u32).read_volatile() }
    }

    /// Writes 32 bits.
    #[inline(always)]
    pub fn write(self, offset: usize, value: u32) {
        // SAFETY: by `new`.
        unsafe { ((self.0 + offset) as *mut u32).write_volatile(value) }
    }

    /// Reads 64 bits.
    pub fn read_long(self, offset: usize) -> u64 {
        // SAFETY: by `new`.
        unsafe { ((self.0 + offset) as *const u64).read_volatile() }
    }

    /// Writes 64 bits.
    pub fn write_long(self, offset: usize, value: u64) {
        // SAFETY: by `new`.
        unsafe { ((self.0 + offset) as *mut u64).write_volatile(value) }
    }

    /// The registers from a byte offset on.
    pub const fn from(self, offset: usize) -> Self {
        Self(self.0 + offset)
    }
}

/// Stops this CPU for ever.
pub fn stop() -> ! {
    loop {
        // SAFETY: interrupts stay masked; waiting has no effect.
        unsafe { core::arch::asm!("msr daifset, #15", "wfi", options(nomem, nostack)) };
    }
}

/// Stack pointer of the caller.
#[inline(always)]
pub fn stack_pointer() -> u64 {
    let value: u64;
    // SAFETY: reads the register.
    unsafe { core::arch::asm!("mov {}, sp", out(reg) value, options(nomem, nostack)) };
    value
}
