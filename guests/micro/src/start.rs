//! From the PVH entry to 64-bit mode.

use core::arch::global_asm;
use core::sync::atomic::Ordering::Relaxed;

// Entered in 32-bit protected mode with flat segments, paging and interrupts off, and the address
// of the start information in `ebx`. The segments' descriptors need not exist in memory, so a table
// of our own is loaded before the first load of a selector.
global_asm!(
    r#"
    .section .note.pvh, "a", @note
    .balign 4
    .long 4, 4, {note_kind}
    .asciz "Xen"
    .long guest_start

    .section .text.start, "ax", @progbits
    .code32
    .global guest_start
guest_start:
    cli
    cld
    mov esp, offset guest_stack_top
    mov esi, ebx

    mov edi, offset guest_level_2
    # Present, writable, for user mode too, large.
    mov eax, 0x87
    xor edx, edx
    mov ecx, 16 * 512
2:  mov [edi], eax
    mov [edi + 4], edx
    add eax, 0x200000
    adc edx, 0
    add edi, 8
    dec ecx
    jnz 2b

    mov edi, offset guest_level_3
    mov eax, offset guest_level_2 + 7
    mov ecx, 16
3:  mov [edi], eax
    add eax, 0x1000
    add edi, 8
    dec ecx
    jnz 3b
    mov eax, offset guest_level_3 + 7
    mov [guest_level_4], eax

    mov eax, {cr4}
    mov cr4, eax
    mov eax, offset guest_level_4
    mov cr3, eax
    mov ecx, {efer_msr}
    rdmsr
    or eax, {efer}
    wrmsr
    mov eax, {cr0}
    mov cr0, eax
    lgdt [guest_gdtr]
    .byte 0xea
    .long guest_start_64
    .word 0x08

    .code64
guest_start_64:
    mov eax, 0x10
    mov ds, eax
    mov es, eax
    mov ss, eax
    xor eax, eax
    mov fs, eax
    mov gs, eax
    lldt ax
    mov rsp, offset guest_stack_top
    xor ebp, ebp
    mov edi, esi
    call {main}
    ud2

    # What runs first on other processors, copied below 1 MiB. Real mode goes to 64-bit mode at once: paging
    # and protection are switched on together.
    .balign 16
    .code16
    .global guest_cpu_start, guest_cpu_start_end
guest_cpu_start:
    cli
    mov ax, cs
    mov ds, ax
    # LGDT of a 32-bit base at DS:offset; the assembler takes no difference as an address.
    .byte 0x66, 0x0f, 0x01, 0x16
    .word guest_cpu_gdtr - guest_cpu_start
    mov eax, {cr4}
    mov cr4, eax
    mov eax, offset guest_level_4
    mov cr3, eax
    mov ecx, {efer_msr}
    rdmsr
    or eax, {efer}
    wrmsr
    mov eax, {cr0}
    mov cr0, eax
    # A far jump with a 32-bit offset.
    .byte 0x66, 0xea
    .long guest_cpu_start_64
    .word 0x08
    .balign 8
guest_cpu_gdtr:
    .word 23
    .long guest_gdt
guest_cpu_start_end:

    .code64
guest_cpu_start_64:
    mov eax, 0x10
    mov ds, eax
    mov es, eax
    mov ss, eax
    xor eax, eax
    mov fs, eax
    mov gs, eax
    lldt ax
    mov rsp, [{cpu_stack}]
    xor ebp, ebp
    cld
    call {cpu_main}
    ud2

    .section .rodata
    .balign 8
guest_gdt:
    .quad 0, {code}, {data}
guest_gdtr:
    .word 23
    .long guest_gdt
    .long 0

    .section .bss
    .balign 4096
guest_level_4: .skip 0x1000
guest_level_3: .skip 0x1000
guest_level_2: .skip 16 * 0x1000
guest_stack: .skip 0x10000
guest_stack_top:
    .text
    "#,
    note_kind = const hw_tables::pvh::NOTE_PHYS32_ENTRY,
    cr4 = const hw_x86::paging::cr4::PAE | hw_x86::paging::cr4::OSFXSR | OSXMMEXCPT,
    efer_msr = const hw_x86::msr::EFER,
    efer = const hw_x86::msr::efer::LME,
    cr0 = const CR0,
    code = const hw_x86::paging::descriptor::KERNEL_CODE,
    data = const hw_x86::paging::descriptor::KERNEL_DATA,
    main = sym main,
    cpu_stack = sym crate::smp::STACK,
    cpu_main = sym crate::smp::main,
);

/// `CR4`: SSE exceptions are `#XF`.
const OSXMMEXCPT: u64 = 1 << 10;
const CR0: u64 = {
    use hw_x86::paging::cr0::*;
    PE | MP | NE | WP | PG
};

// SAFETY: the macro `guest` defines it with this type.
unsafe extern "Rust" {
    safe fn guest_program();
}

extern "C" fn main(start_info: u64) -> ! {
    crate::boot::START_INFO.store(start_info, Relaxed);
    crate::trap::init();
    guest_program();
    crate::exit(0)
}
