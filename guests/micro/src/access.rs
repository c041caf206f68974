//! Single memory accesses at CPL 0 and 3, and the exceptions that they raise.
//!
//! `IRET` enters a few instructions that access memory and then raise `#UD`: that is success. At
//! CPL 3 they run in a copy that every [`crate::paging::RootTable`] maps at [`USER_CODE`].
//! Interrupts are off.

use crate::trap::{CODE_SELECTOR, DATA_SELECTOR, PAGE_FAULT, UNDEFINED, USER_RPL, recover};
use crate::{cpu, paging};
use core::arch::{asm, global_asm};
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use hw_x86::paging::{TaskState, descriptor};

/// Address of the code that accesses memory at CPL 3.
pub const USER_CODE: u64 = 0x7fff_f000;

const USER_DATA_SELECTOR: u64 = 0x18 | USER_RPL;
const USER_CODE_SELECTOR: u64 = 0x20 | USER_RPL;
const TASK_SELECTOR: u16 = 0x28;
const STACK_LENGTH: usize = 0x4000;
/// `RFLAGS.AC`.
const ALIGNMENT_CHECK: u64 = 1 << 18;
/// `RFLAGS` with nothing but the bit that is always 1.
const FLAGS: u64 = 2;
/// `UD2`, for pages that are executed.
pub const UD2: u64 = 0x0b0f;

// Address in RDI, value in RAX. `LENGTH` bytes from one to the next.
global_asm!(
    r#"
    .text
    .balign 16
guest_access:
    mov rax, [rdi]
    ud2
    .balign 16
    mov [rdi], rax
    ud2
    .balign 16
    jmp rdi
    .balign 16
    invlpg [rdi]
    ud2
    .balign 16
guest_access_end:
    "#
);
const LENGTH: u64 = 16;

// SAFETY: labels of the code above.
unsafe extern "C" {
    static guest_access: u8;
    static guest_access_end: u8;
}

/// Kind of access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reads 8 bytes.
    Read,
    /// Writes 8 bytes.
    Write,
    /// Executes [`UD2`].
    Fetch,
    /// Executes `INVLPG`, which accesses nothing.
    Invalidate,
}

/// An access.
#[derive(Clone, Copy, Debug)]
pub struct MemoryAccess {
    /// Operation.
    pub kind: Kind,
    /// It runs at CPL 3.
    pub user: bool,
    /// `RFLAGS.AC` is set.
    pub ac: bool,
}

/// An access that has raised an exception.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessFault {
    /// Vector.
    pub vector: u8,
    /// Error code.
    pub error: u64,
    /// `CR2` of a page fault, otherwise 0.
    pub address: u64,
}

impl AccessFault {
    /// A page fault.
    pub fn page(error: u64, address: u64) -> Self {
        Self { vector: PAGE_FAULT, error, address }
    }
}

struct Segments {
    table: [AtomicU64; 7],
    task: UnsafeCell<TaskState>,
    stack: UnsafeCell<[u8; STACK_LENGTH]>,
}
// SAFETY: written by `init` before anything uses it; then only the CPU uses the cells.
unsafe impl Sync for Segments {}
static SEGMENTS: Segments = Segments {
    table: [const { AtomicU64::new(0) }; 7],
    task: UnsafeCell::new(TaskState::new()),
    stack: UnsafeCell::new([0; STACK_LENGTH]),
};

/// Lets the first processor run code at CPL 3: segments, and a stack for its exceptions.
pub fn init() {
    /// Operand of `LGDT`.
    #[repr(C, packed)]
    struct Operand(u16, u64);

    let stack = SEGMENTS.stack.get().addr() as u64 + STACK_LENGTH as u64;
    // The stack pointer is a multiple of 16 before the CPU pushes the frame.
    // SAFETY: nothing uses it yet.
    unsafe { (*SEGMENTS.task.get()).rsp[0] = stack & !0xf };
    let limit = size_of::<TaskState>() as u32 - 1;
    let [low, high] = descriptor::task_state(SEGMENTS.task.get().addr() as u64, limit);
    let table = [
        0,
        descriptor::KERNEL_CODE,
        descriptor::KERNEL_DATA,
        descriptor::USER_DATA,
        descriptor::USER_CODE,
        low,
        high,
    ];
    SEGMENTS.table.iter().zip(table).for_each(|(word, value)| word.store(value, SeqCst));
    let base = SEGMENTS.table.as_ptr().addr() as u64;
    let operand = Operand(size_of_val(&SEGMENTS.table) as u16 - 1, base);
    // SAFETY: the first descriptors are those of start-up, and the task state is complete.
    unsafe {
        asm!("lgdt [{}]", "ltr {:x}", in(reg) &raw const operand, in(reg) TASK_SELECTOR,
            options(nostack));
    }
}

/// Copies the code that accesses memory to a page.
pub(crate) fn copy_code(page: &[AtomicU64]) {
    let from = (&raw const guest_access).cast::<u64>();
    let bytes = (&raw const guest_access_end).addr() - from.addr();
    for (index, word) in page.iter().take(bytes / 8).enumerate() {
        // SAFETY: code between the two labels, which are aligned.
        word.store(unsafe { from.add(index).read() }, SeqCst);
    }
}

impl MemoryAccess {
    /// An access at CPL 0 with `RFLAGS.AC` clear.
    pub const fn kernel(kind: Kind) -> Self {
        Self { kind, user: false, ac: false }
    }

    /// An access at CPL 3.
    pub const fn user(kind: Kind) -> Self {
        Self { kind, user: true, ac: false }
    }

    /// Performs it, and returns what it has read; `value` is what it writes. [`init`] must have
    /// run. At CPL 3 it needs a [`crate::paging::RootTable`].
    pub fn perform(self, address: u64, value: u64) -> Result<u64, AccessFault> {
        let (base, cs, ss) = match self.user {
            true => (USER_CODE, USER_CODE_SELECTOR, USER_DATA_SELECTOR),
            false => {
                let base = (&raw const guest_access).addr() as u64;
                (base, CODE_SELECTOR.into(), DATA_SELECTOR.into())
            }
        };
        let flags = FLAGS | if self.ac { ALIGNMENT_CHECK } else { 0 };
        let found;
        let attempt = recover();
        // SAFETY: the code accesses the address and raises an exception, after which the program
        // continues at label 2 with all registers but RAX and the flags. Programs choose addresses
        // that they do not use.
        unsafe {
            asm!(
                "lea {tmp}, [rip + 2f]", "mov [{resume}], {tmp}", "mov [{stack}], rsp",
                "mov {tmp}, rsp",
                "push {ss}", "push {tmp}", "push {flags}", "push {cs}", "push {code}", "iretq",
                "2:", "push {clean}", "popfq",
                tmp = out(reg) _, resume = in(reg) attempt.resume(),
                stack = in(reg) attempt.stack(),
                ss = in(reg) ss, flags = in(reg) flags, cs = in(reg) cs,
                code = in(reg) base + LENGTH * self.kind as u64, clean = const FLAGS,
                in("rdi") address, inout("rax") value => found,
            );
        }
        let Err(exception) = attempt.finish_with_details() else { unreachable!("UD2 returned") };
        let ended = match self.kind {
            Kind::Fetch => exception.rip == address,
            _ => true,
        };
        if exception.vector == UNDEFINED && ended {
            return Ok(found);
        }
        let cr2 = if exception.vector == PAGE_FAULT { cpu::fault_address() } else { 0 };
        Err(AccessFault { vector: exception.vector, error: exception.error, address: cr2 })
    }
}

/// Reads at CPL 0.
pub fn read(address: u64) -> Result<u64, AccessFault> {
    MemoryAccess::kernel(Kind::Read).perform(address, 0)
}

/// Writes at CPL 0.
pub fn write(address: u64, value: u64) -> Result<(), AccessFault> {
    MemoryAccess::kernel(Kind::Write).perform(address, value).map(|_| ())
}

const _: () = assert!(USER_CODE.is_multiple_of(paging::PAGE));
