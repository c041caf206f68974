# Start-up code: from 32-bit protected mode of the boot loader, or real mode of an application
# processor, to long mode in the upper half.
#
# Two boot protocols are supported. PVH (Xen "x86/HVM direct boot ABI") finds the entry in an ELF
# note and passes hvm_start_info in EBX; Multiboot2 finds its header and passes a magic number in
# EAX and its information in EBX. Both start with flat 32-bit segments, paging and interrupts off.

.set PVH_MAGIC, 0x336ec578            # hvm_start_info.magic, also expected by boot_main()
.set CR4_PAE, 1 << 5
.set MSR_EFER, 0xc0000080
.set EFER_BITS, 1 << 11 | 1 << 8      # NXE, LME
.set CR0_BITS, 1 << 31 | 1 << 16 | 1 << 5 | 1 << 1 | 1   # PG, WP, NE, MP, PE
.set CODE64, 0x08
.set DATA, 0x10
.set COM1, 0x3f8
.set COM2, 0x2f8
.set PVH_COMMAND_LINE, 24             # hvm_start_info.cmdline_paddr
.set EXIT_PORT, 0xf4                  # QEMU's isa-debug-exit, with panic=debug-exit (panic.rs)
.set EXIT_UNAVAILABLE, 69 + 0x10      # exit code 69, as root reports it

.section .boot.header, "a"
.balign 8
multiboot2_header:
    .long 0xe85250d6, 0, multiboot2_header_end - multiboot2_header
    .long -(0xe85250d6 + multiboot2_header_end - multiboot2_header)
    .short 6, 0                       # align modules to pages
    .long 8
    .short 0, 0                       # end
    .long 8
multiboot2_header_end:

.section .note.pvh, "a", @note
.balign 4
    .long 4, 8, 18                    # name, descriptor, XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .quad pvh_entry

.section .boot.text, "ax"
.code32
.global multiboot2_entry
multiboot2_entry:
    movl %eax, %esi
    jmp start32
pvh_entry:
    movl $PVH_MAGIC, %esi
start32:
    cli
    cld
    movl %ebx, %edi
    movl $boot_stack_physical, %esp

    # The kernel requires long mode and no-execute pages.
    movl $0x80000000, %eax
    cpuid
    cmpl $0x80000001, %eax
    jb unsuitable
    movl $0x80000001, %eax
    cpuid
    andl $(1 << 29 | 1 << 20), %edx
    cmpl $(1 << 29 | 1 << 20), %edx
    jne unsuitable

    # Map the first 4 GiB three times: identity, image, and direct map.
    movl $boot_tables_physical, %ebp
    leal 0x1003(%ebp), %eax
    movl %eax, (%ebp)
    movl %eax, 256 * 8(%ebp)
    movl %eax, 258 * 8(%ebp)
    xorl %ecx, %ecx
1:  addl $0x1000, %eax
    movl %eax, 0x1000(%ebp, %ecx, 8)
    incl %ecx
    cmpl $4, %ecx
    jne 1b
    movl $0x83, %eax                  # present, writable, 2 MiB
    xorl %ecx, %ecx
2:  movl %eax, 0x2000(%ebp, %ecx, 8)
    addl $0x200000, %eax
    incl %ecx
    cmpl $(4 * 512), %ecx
    jne 2b

    movl $CR4_PAE, %eax
    movl %eax, %cr4
    movl %ebp, %cr3
    movl $MSR_EFER, %ecx
    rdmsr
    orl $EFER_BITS, %eax
    wrmsr
    movl $CR0_BITS, %eax
    movl %eax, %cr0
    lgdtl boot_gdt_pointer
    ljmpl $CODE64, $start64

# Reports an unsupported processor on both serial ports, terminates an emulated machine
# (`panic=debug-exit` on the command line), and stops. ESI and EDI are as `start32` left them.
unsuitable:
    movl %esi, %ebx
    movl $unsuitable_text, %esi
3:  lodsb
    movl $COM1, %edx
    outb %al, %dx
    movl $COM2, %edx
    outb %al, %dx
    cmpb $0, (%esi)
    jne 3b
    # EBX: start of the text to search. The command line of PVH ends with a zero; that of Multiboot2
    # is inside its information, which begins with its size.
    cmpl $PVH_MAGIC, %ebx
    movl %edi, %ebx
    movl (%edi), %edx
    jne 4f
    movl PVH_COMMAND_LINE(%edi), %ebx
    movl %ebx, %edi
    xorl %eax, %eax
    movl $4096, %ecx
    repne scasb
    movl %edi, %edx
    subl %ebx, %edx
4:  addl %ebx, %edx                   # the end
5:  leal unsuitable_words_length(%ebx), %eax
    cmpl %edx, %eax
    ja 6f
    movl %ebx, %esi
    movl $unsuitable_words, %edi
    movl $unsuitable_words_length, %ecx
    repe cmpsb
    leal 1(%ebx), %ebx
    jne 5b
    movb $EXIT_UNAVAILABLE, %al
    outb %al, $EXIT_PORT
6:  hlt
    jmp 6b
unsuitable_text:
    .asciz "kernel: this processor has no long mode or no NX (no-execute pages); Parador needs both\r\n"
unsuitable_words:
    .ascii "panic=debug-exit"
.set unsuitable_words_length, . - unsuitable_words

.code64
start64:
    movl $DATA, %eax
    movl %eax, %ds
    movl %eax, %es
    movl %eax, %ss
    xorl %eax, %eax
    movl %eax, %fs
    movl %eax, %gs
    movabsq $start_high, %rax
    jmpq *%rax

.balign 8
boot_gdt:
    .quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff
boot_gdt_pointer:
    .short boot_gdt_pointer - boot_gdt - 1
    .long boot_gdt

.text
start_high:
    leaq boot_stack_top(%rip), %rsp
    xorl %ebp, %ebp
    xchgl %esi, %edi                  # boot_main(magic, information)
    callq {boot_main}
    ud2

# Copied to a page below 1 MiB, where an application processor starts with CS = page / 16, IP = 0.
# It enters long mode in one step on the start-up tables, then the upper half on the kernel's
# tables.
.section .rodata
.global trampoline, trampoline_data, trampoline_end
.code16
trampoline:
    cli
    cld
    movw %cs, %ax
    movw %ax, %ds
    xorl %ebx, %ebx
    movw %ax, %bx
    shll $4, %ebx                     # the page's address
    leal (trampoline64 - trampoline)(%ebx), %eax
    movl %eax, trampoline_target - trampoline
    movl $boot_tables_physical, %eax
    movl %eax, %cr3
    movl $CR4_PAE, %eax
    movl %eax, %cr4
    movl $MSR_EFER, %ecx
    rdmsr
    orl $EFER_BITS, %eax
    wrmsr
    lgdtl trampoline_gdt_pointer - trampoline
    movl $CR0_BITS, %eax
    movl %eax, %cr0
    ljmpl *(trampoline_target - trampoline)
.code64
trampoline64:
    movl $DATA, %eax
    movl %eax, %ds
    movl %eax, %es
    movl %eax, %ss
    movq (trampoline_data - trampoline)(%rbx), %rcx
    movq (trampoline_data - trampoline + 8)(%rbx), %rsp
    movl (trampoline_data - trampoline + 16)(%rbx), %edi
    movabsq $trampoline_high, %rax
    jmpq *%rax
.balign 8
trampoline_gdt_pointer:
    .short boot_gdt_pointer - boot_gdt - 1
    .long boot_gdt
trampoline_target:
    .long 0
    .short CODE64
.balign 8
trampoline_data:                      # filled in for each processor: CR3, stack, index
    .quad 0, 0, 0
trampoline_end:

.text
trampoline_high:
    movq %rcx, %cr3
    xorl %ebp, %ebp
    callq {processor_main}
    ud2

.section .bss
.balign 4096
.global boot_tables, boot_stack_top
boot_tables:                          # PML4, page-directory pointers, four page directories
    .skip 6 * 4096
boot_stack:
    .skip 32768
boot_stack_top:
.text
