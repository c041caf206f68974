//! Exceptions and interrupts.

use crate::{UNEXPECTED_TRAP, cpu, exit, println, smp};
use core::arch::{asm, global_asm};
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use hw_x86::paging::GateDescriptor;

/// Non-maskable interrupt.
pub const NMI: u8 = 2;
/// First vector that is an interrupt.
pub const FIRST_INTERRUPT: u64 = 32;
/// Undefined opcode.
pub const UNDEFINED: u8 = 6;
/// General protection.
pub const PROTECTION: u8 = 13;
/// Page fault.
pub const PAGE_FAULT: u8 = 14;

/// Selector of 64-bit code, CPL 0.
pub(crate) const CODE_SELECTOR: u16 = 0x08;
/// Selector of data, CPL 0.
pub(crate) const DATA_SELECTOR: u16 = 0x10;
/// Requested privilege level of selectors for CPL 3.
pub(crate) const USER_RPL: u64 = 3;
const VECTORS: usize = 256;
/// Distance of entries in the assembly below.
const STUB_LENGTH: u64 = 16;

/// Registers of what was interrupted. Changes take effect on return.
#[allow(missing_docs, reason = "the manual's names")]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TrapFrame {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rbp: u64,
    pub rdi: u64,
    pub rsi: u64,
    pub rdx: u64,
    pub rcx: u64,
    pub rbx: u64,
    pub rax: u64,
    vector: u64,
    /// Error code, 0 where the exception has none.
    pub error: u64,
    pub rip: u64,
    pub cs: u64,
    pub rflags: u64,
    pub rsp: u64,
    pub ss: u64,
}

impl TrapFrame {
    /// The vector, 0 to 255.
    pub fn vector(&self) -> u8 {
        // Entries push it sign-extended.
        self.vector as u8
    }
}

// One entry per vector. Those without an error code (bits of the mask are those with one, APM vol.
// 2 §8.2) push a zero in its place.
global_asm!(
    r#"
    .text
    .balign 16
guest_traps:
    .set guest_vector, 0
    .rept 256
    .balign 16
    .if guest_vector < 32
    .if ((0x60227d00 >> guest_vector) & 1) == 0
    push 0
    .endif
    .else
    push 0
    .endif
    push guest_vector
    jmp guest_trap_entry
    .set guest_vector, guest_vector + 1
    .endr

guest_trap_entry:
    push rax
    push rbx
    push rcx
    push rdx
    push rsi
    push rdi
    push rbp
    push r8
    push r9
    push r10
    push r11
    push r12
    push r13
    push r14
    push r15
    cld
    mov rdi, rsp
    mov rbx, rsp
    and rsp, -16
    call {dispatch}
    mov rsp, rbx
    pop r15
    pop r14
    pop r13
    pop r12
    pop r11
    pop r10
    pop r9
    pop r8
    pop rbp
    pop rdi
    pop rsi
    pop rdx
    pop rcx
    pop rbx
    pop rax
    add rsp, 16
    iretq
    "#,
    dispatch = sym dispatch,
);

// SAFETY: `guest_traps` is the label above; the macro `guest` defines `guest_trap`.
unsafe extern "Rust" {
    static guest_traps: [u8; VECTORS * STUB_LENGTH as usize];
    safe fn guest_trap(frame: &mut TrapFrame);
}

#[repr(C, align(16))]
struct Table(UnsafeCell<[GateDescriptor; VECTORS]>);
// SAFETY: written once, by `init` before anything uses it.
unsafe impl Sync for Table {}
static TABLE: Table = Table(UnsafeCell::new([GateDescriptor::interrupt(0, 0, 0, 0); VECTORS]));

/// Operand of `LIDT`.
#[repr(C, packed)]
struct Descriptor {
    limit: u16,
    base: u64,
}

/// The exception that a processor expects, and the one that came.
struct Expected {
    /// Address to continue at after an expected exception; 0 if none is expected.
    resume: AtomicU64,
    /// Stack pointer to continue with after an exception at CPL 3.
    stack: AtomicU64,
    /// The vector of the exception plus 1, or 0.
    caught: AtomicU64,
    error: AtomicU64,
    rip: AtomicU64,
}

static EXPECTED: [Expected; smp::MOST] = [const {
    Expected {
        resume: AtomicU64::new(0),
        stack: AtomicU64::new(0),
        caught: AtomicU64::new(0),
        error: AtomicU64::new(0),
        rip: AtomicU64::new(0),
    }
}; smp::MOST];

/// An exception that was expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exception {
    /// Vector.
    pub vector: u8,
    /// Error code, 0 where the exception has none.
    pub error: u64,
    /// Address of the instruction that raised it.
    pub rip: u64,
}

/// Installs the table. Called once, at start.
pub(crate) fn init() {
    let base = (&raw const guest_traps).addr() as u64;
    for vector in 0..VECTORS {
        let entry = base + vector as u64 * STUB_LENGTH;
        // SAFETY: nothing else runs, and the table is not loaded yet.
        unsafe { (*TABLE.0.get())[vector] = GateDescriptor::interrupt(entry, CODE_SELECTOR, 0, 0) };
    }
    load_table();
}

/// Lets this processor use the table.
pub(crate) fn load_table() {
    let limit = (size_of::<Table>() - 1) as u16;
    load(limit, TABLE.0.get().addr() as u64);
}

/// Replaces the entry of a vector.
///
/// # Safety
///
/// No other processor runs, and code at `entry` handles every such trap from now on.
pub unsafe fn set_entry(vector: u8, entry: u64) {
    let gate = GateDescriptor::interrupt(entry, CODE_SELECTOR, 0, 0);
    // SAFETY: by contract nothing else uses the table.
    unsafe { (*TABLE.0.get())[usize::from(vector)] = gate };
}

/// Takes the table away: the next exception or interrupt ends in a triple fault.
pub fn remove_table() {
    load(0, 0);
}

fn load(limit: u16, base: u64) {
    let descriptor = Descriptor { limit, base };
    // SAFETY: the table is complete and lives forever, or is empty, which stops the processor at
    // the next trap.
    unsafe { asm!("lidt [{}]", in(reg) &raw const descriptor, options(nostack, readonly)) };
}

extern "C" fn dispatch(frame: &mut TrapFrame) {
    let expected = &EXPECTED[smp::index()];
    let exception = u64::from(frame.vector()) < FIRST_INTERRUPT && frame.vector() != NMI;
    let resume = expected.resume.load(Relaxed);
    if resume == 0 || !exception {
        return guest_trap(frame);
    }
    expected.resume.store(0, Relaxed);
    expected.caught.store(u64::from(frame.vector()) + 1, Relaxed);
    expected.error.store(frame.error, Relaxed);
    expected.rip.store(frame.rip, Relaxed);
    frame.rip = resume;
    if frame.cs & USER_RPL == USER_RPL {
        frame.cs = CODE_SELECTOR.into();
        frame.ss = DATA_SELECTOR.into();
        frame.rsp = expected.stack.load(Relaxed);
    }
}

/// For programs that expect no trap at all.
pub fn unexpected(frame: &mut TrapFrame) -> ! {
    println!("unexpected trap {} at {:#x}", frame.vector(), frame.rip);
    println!("{frame:#x?}");
    println!("cr2 {:#x}", cpu::fault_address());
    exit(UNEXPECTED_TRAP)
}

/// One instruction that may raise an exception on this processor, whose index it holds.
pub struct Attempt(usize);

/// Begins an attempt.
pub fn recover() -> Attempt {
    let index = smp::index();
    EXPECTED[index].caught.store(0, Relaxed);
    Attempt(index)
}

impl Attempt {
    /// Operand for the address to continue at after an exception, set just before the instruction.
    pub fn resume(&self) -> *mut u64 {
        EXPECTED[self.0].resume.as_ptr()
    }

    /// Operand for the stack pointer to continue with after an exception at CPL 3.
    pub fn stack(&self) -> *mut u64 {
        EXPECTED[self.0].stack.as_ptr()
    }

    /// Returns the vector of the exception that the instruction raised, if any.
    pub fn finish(self) -> Result<(), u8> {
        self.finish_with_details().map_err(|exception| exception.vector)
    }

    /// Returns the exception that the instruction raised, if any.
    pub fn finish_with_details(self) -> Result<(), Exception> {
        let expected = &EXPECTED[self.0];
        expected.resume.store(0, Relaxed);
        let vector = match expected.caught.load(Relaxed) {
            0 => return Ok(()),
            vector => (vector - 1) as u8,
        };
        let error = expected.error.load(Relaxed);
        Err(Exception { vector, error, rip: expected.rip.load(Relaxed) })
    }
}
