//! From long mode to protected mode without paging, PAE, real mode, and back.

use super::{DATA, OFFSET, address_of};
use core::arch::{asm, global_asm};
use core::sync::atomic::Ordering::SeqCst;
use guests_micro::paging::{ALL, FrameAllocator, PAGE};
use guests_micro::{check, cpu, println};
use hw_x86::msr::{self, efer};
use hw_x86::paging::{cr0, entry, level_shift};

const ROUNDS: u32 = 50;
/// Page below 1 MiB for code of real mode, which loaders do not use.
const REAL: u64 = 0x5_0000;
/// Words in that page: one that real mode reads, and one that it writes, 1 more.
const REAL_INPUT: u64 = 0x800;
const REAL_OUTPUT: u64 = 0x808;
/// A page of PAE tables, by the second pointer.
const PAE_PAGE: u64 = 1 << level_shift(3);
/// 32-bit code and data; 16-bit code and data at [`REAL`].
const CODE_32: u64 = 0x00cf_9b00_0000_ffff;
const CODE_16: u64 = 0x0000_9b00_0000_ffff | REAL << 16;
const DATA_16: u64 = 0x0000_9300_0000_ffff | REAL << 16;

// EDI: a word of data; ESI: its address by the PAE tables; R8D (saved in memory): root of PAE;
// EBP: the entry; EBX: the other value of that entry's lower half. Results in memory.
global_asm!(
    r#"
    .text
    .code64
guest_modes:
    push rbx
    push rbp
    mov rbx, rcx
    mov rbp, rdx
    mov [guest_modes_pae], r8
    mov [guest_modes_stack], rsp
    mov rax, cr3
    mov [guest_modes_cr3], rax
    sgdt [guest_modes_old]
    lgdt [guest_modes_gdtr]
    push 0x18
    lea rax, [rip + 2f]
    push rax
    retfq

    # Compatibility mode; then paging goes off, and with it long mode.
    .code32
2:  mov eax, 0x10
    mov ds, eax
    mov es, eax
    mov ss, eax
    mov eax, cr0
    and eax, {no_paging}
    mov cr0, eax
    mov ecx, {efer_msr}
    rdmsr
    and eax, {no_long}
    wrmsr
    # Protected mode without paging.
    mov eax, [edi]
    mov [guest_modes_results], eax
    # PAE.
    mov eax, [guest_modes_pae]
    mov cr3, eax
    mov eax, cr0
    or eax, {paging}
    mov cr0, eax
    mov eax, [esi]
    mov [guest_modes_results + 4], eax
    mov [ebp], ebx
    invlpg [esi]
    mov eax, [esi]
    mov [guest_modes_results + 8], eax
    # Without paging again, then real mode.
    mov eax, cr0
    and eax, {no_paging}
    mov cr0, eax
    mov eax, [edi]
    mov [guest_modes_results + 12], eax
    .byte 0xea
    .long 0
    .word 0x20

    .code16
    .balign 16
guest_modes_real:
    mov ax, 0x28
    mov ds, ax
    mov es, ax
    mov ss, ax
    mov eax, cr0
    and al, 0xfe
    mov cr0, eax
    .byte 0xea
    .word 3f - guest_modes_real
    .word {segment}
3:  mov ax, cs
    mov ds, ax
    mov es, ax
    mov ss, ax
    mov ebx, {input}
    mov eax, [bx]
    inc eax
    mov ebx, {output}
    mov [bx], eax
    .byte 0x66, 0x0f, 0x01, 0x16
    .word 4f - guest_modes_real
    mov eax, cr0
    or al, 1
    mov cr0, eax
    .byte 0x66, 0xea
    .long guest_modes_back
    .word 0x18
    .balign 8
4:  .word 6 * 8 - 1
    .long guest_modes_gdt
guest_modes_real_end:

    .code32
guest_modes_back:
    mov eax, 0x10
    mov ds, eax
    mov es, eax
    mov ss, eax
    mov eax, [guest_modes_cr3]
    mov cr3, eax
    mov ecx, {efer_msr}
    rdmsr
    or eax, {long}
    wrmsr
    mov eax, cr0
    or eax, {paging}
    mov cr0, eax
    .byte 0xea
    .long 5f
    .word 0x08

    .code64
5:  lgdt [guest_modes_old]
    mov rsp, [guest_modes_stack]
    pop rbp
    pop rbx
    ret

    .data
    .balign 8
guest_modes_gdt:
    .quad 0, {code}, {data}, {code_32}, {code_16}, {data_16}
guest_modes_gdtr:
    .word 6 * 8 - 1
    .quad guest_modes_gdt
    .balign 8
guest_modes_old: .skip 16
guest_modes_stack: .quad 0
guest_modes_cr3: .quad 0
guest_modes_pae: .quad 0
guest_modes_results: .skip 16
    .text
    "#,
    no_paging = const !(cr0::PG as u32) as i32,
    paging = const cr0::PG as u32,
    efer_msr = const msr::EFER,
    no_long = const !(efer::LME as u32) as i32,
    long = const efer::LME as u32,
    segment = const REAL >> 4,
    input = const REAL_INPUT,
    output = const REAL_OUTPUT,
    code = const hw_x86::paging::descriptor::KERNEL_CODE,
    data = const hw_x86::paging::descriptor::KERNEL_DATA,
    code_32 = const CODE_32,
    code_16 = const CODE_16,
    data_16 = const DATA_16,
);

// SAFETY: labels of the code above, with these types.
unsafe extern "C" {
    static guest_modes: u8;
    static guest_modes_real: u8;
    static guest_modes_real_end: u8;
    static guest_modes_results: [u32; 4];
}

/// Goes through the modes several times, with data that differs.
pub fn run(frames: &FrameAllocator) {
    let mut frames = frames.start_over();
    let [first, second] = frames.large.map(|large| large + OFFSET);
    // The identity of the first GiB, and a page behind it.
    let pointers = frames.take();
    let [identity, directory, table] = [(); 3].map(|()| frames.take());
    for (index, word) in frames.page(identity).iter().enumerate() {
        word.store((index as u64) << level_shift(2) | ALL | entry::LARGE, SeqCst);
    }
    frames.page(directory)[0].store(table | ALL, SeqCst);
    frames.word(pointers).store(identity | entry::PRESENT, SeqCst);
    frames.word(pointers + 8).store(directory | entry::PRESENT, SeqCst);
    let place = &frames.page(table)[1];
    for round in 0..ROUNDS {
        place.store(first | ALL, SeqCst);
        enter(round, [first, PAE_PAGE + PAGE, address_of(place), second | ALL], pointers);
        let [none, one, two, after] =
            // SAFETY: only the code above writes it.
            unsafe { (&raw const guest_modes_results).read_volatile() };
        check!(none == DATA[0] as u32, "without paging: {none:#x}");
        check!(one == DATA[0] as u32, "PAE: {one:#x}");
        check!(two == DATA[1] as u32, "PAE after a change: {two:#x}");
        check!(after == DATA[0] as u32, "without paging again: {after:#x}");
        // SAFETY: memory of the real-mode code.
        let real = unsafe { ((REAL + REAL_OUTPUT) as *const u32).read_volatile() };
        check!(real == round + 1, "real mode: {real} instead of {}", round + 1);
        check!(place.load(SeqCst) & entry::ACCESSED != 0, "PAE sets no accessed bit");
    }
    println!("{ROUNDS} ways through real mode, no paging, and PAE");
}

/// Goes once: a word, its address by PAE, its entry, and another value of that.
fn enter(round: u32, [word, by_pae, entry, value]: [u64; 4], pointers: u64) {
    let start = (&raw const guest_modes_real).addr();
    let length = (&raw const guest_modes_real_end).addr() - start;
    cpu::disable_interrupts();
    // SAFETY: nothing else is in the low page. The code ends in the mode in which it began, with
    // the same tables, and changes the entry, the low page, and registers below.
    unsafe {
        core::ptr::copy_nonoverlapping(start as *const u8, REAL as *mut u8, length);
        ((REAL + REAL_INPUT) as *mut u32).write_volatile(round);
        asm!("call {code}", code = in(reg) &raw const guest_modes, in("rdi") word,
            in("rsi") by_pae, inout("rdx") entry => _, inout("rcx") value => _,
            inout("r8") pointers => _, out("rax") _, out("r9") _, out("r10") _, out("r11") _,
            out("r12") _, out("r13") _, out("r14") _, out("r15") _);
    }
}
