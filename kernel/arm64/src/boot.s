// Start of a CPU: header of the image, first translation tables, and the jump to the image's
// virtual addresses. Until then all code is independent of its address, and the MMU is off.

.section .head, "ax"
image_header:
    b boot_start
    .long 0
    .quad 0
    .quad image_length
    .quad {image_flags}
    .quad 0, 0, 0
    .long {image_magic}
    .long 0

.section .text.boot, "ax"

// Brings the CPU into the state in which the kernel runs. Returns in x20: 0: EL2 with VHE; 1: it
// was started at EL1; 2: EL2 without VHE. At EL3 it stops.
choose_level:
    msr daifset, #15
    msr spsel, #1
    mrs x0, CurrentEL
    ubfx x0, x0, #2, #2
    mov x20, #1
    cmp x0, #1
    b.eq 9f
    cmp x0, #2
    b.ne 8f
    mrs x1, id_aa64mmfr1_el1
    ubfx x1, x1, #8, #4
    // Where the first CPU has none, no CPU uses it.
    alternative "cbz x1, 2f", "b 2f"
    ldr x1, ={hcr_host}
    mov x20, #0
1:  msr hcr_el2, x1
    isb
9:  ret
2:  ldr x1, ={hcr_without_vhe}
    mov x20, #2
    b 1b
stop:
8:  wfe
    b 8b

// Turns translation on: TTBR0 = x0. Changes x2, x3, x6. The names of EL1 are for EL1, too, from
// which the kernel reports why it does not run.
enable_translation:
    alternative "msr ttbr0_el1, x0", "msr ttbr0_el2, x0"
    ldr x2, ={mair}
    alternative "msr mair_el1, x2", "msr mair_el2, x2"
    mrs x2, id_aa64mmfr0_el1
    and x2, x2, #7
    // 52 bits need other tables.
    mov x3, #5
    cmp x2, x3
    csel x2, x2, x3, lo
    ldr x3, ={tcr}
    orr x3, x3, x2, lsl #32
    ldr x6, ={tcr_without_vhe}
    orr x6, x6, x2, lsl #16
    alternative "msr tcr_el1, x3", "msr tcr_el2, x6"
    alternative "tlbi vmalle1", "tlbi alle2"
    dsb nsh
    ic iallu
    dsb nsh
    isb
    ldr x2, ={sctlr}
    ldr x3, ={sctlr_without_vhe}
    alternative "msr sctlr_el1, x2", "msr sctlr_el2, x3"
    isb
    ret

// Replaces the first instruction of each `alternative` by the second one. Branches are relative to
// their place. The caches may hold older lines. Changes x0 to x4.
use_alternatives:
    adrp x0, alternatives_start
    add x0, x0, :lo12:alternatives_start
    adrp x1, alternatives_end
    add x1, x1, :lo12:alternatives_end
1:  ldrsw x2, [x0]
    add x2, x2, x0
    ldr w3, [x0, #4]!
    ubfx w4, w3, #26, #5
    cmp w4, #5
    b.ne 2f
    sub x4, x0, x2
    asr x4, x4, #2
    add w4, w4, w3
    bfi w3, w4, #0, #26
2:  str w3, [x2]
    dsb sy
    dc ivac, x2
    add x0, x0, #4
    cmp x0, x1
    b.lo 1b
    dsb sy
    ic iallu
    dsb nsh
    isb
    ret

// The first CPU; x0: device tree.
boot_start:
    mov x19, x0
    bl choose_level
    cmp x20, #2
    b.ne 1f
    bl use_alternatives
1:
    // The image has no bytes for what begins as zero. The caches may hold older lines of it.
    adrp x0, bss_start
    add x0, x0, :lo12:bss_start
    adrp x1, image_end
    add x1, x1, :lo12:image_end
    mov x2, x0
1:  stp xzr, xzr, [x2], #16
    cmp x2, x1
    b.lo 1b
    dsb sy
    mrs x3, ctr_el0
    ubfx x3, x3, #16, #4
    mov x2, #4
    lsl x3, x2, x3
1:  dc ivac, x0
    add x0, x0, x3
    cmp x0, x1
    b.lo 1b
    dsb sy

    // x4: physical address of the image; x5: first table.
    adrp x4, image_header
    adrp x5, boot_tables
    // The identity map of the first block of the image, which has this code; by a root of its own,
    // too (`identity_root`).
    ldr x6, ={block}
    orr x6, x4, x6
    // Without VHE there is one privilege level, and this bit is 1.
    alternative "nop", "orr x6, x6, #{user}"
    add x7, x5, #0x1000
    add x10, x5, #0x3000
    ubfx x8, x4, #39, #9
    orr x9, x7, #3
    str x9, [x5, x8, lsl #3]
    str x9, [x10, x8, lsl #3]
    add x9, x5, #0x2000
    orr x9, x9, #3
    ubfx x8, x4, #30, #9
    str x9, [x7, x8, lsl #3]
    add x7, x5, #0x2000
    ubfx x8, x4, #21, #9
    str x6, [x7, x8, lsl #3]
    // The image at its virtual addresses.
    add x9, x5, #0x4000
    orr x9, x9, #3
    str x9, [x5, #{image_slot} * 8]
    add x11, x5, #0x4000
    add x9, x5, #0x5000
    orr x9, x9, #3
    str x9, [x11]
    add x11, x5, #0x5000
    ldr x8, =image_blocks
1:  str x6, [x11], #8
    add x6, x6, #0x200000
    subs x8, x8, #1
    b.ne 1b
    // The device tree, in two blocks.
    ldr x6, ={data_block}
    alternative "nop", "orr x6, x6, #{user}"
    bic x8, x19, #0x1fffff
    orr x6, x6, x8
    add x11, x5, #0x5000
    str x6, [x11, #{tree_index} * 8]
    add x6, x6, #0x200000
    str x6, [x11, #{tree_index} * 8 + 8]
    dsb sy

    mov x0, x5
    bl enable_translation
    ldr x2, =boot_stack_top
    mov sp, x2
    mov x0, x19
    mov x1, x20
    mov x2, x4
    ldr x3, ={main}
    br x3

// Another CPU; x0: its index.
.global secondary_start
secondary_start:
    mov x19, x0
    bl choose_level
    // It has no VHE, but the first CPU has.
    cmp x20, #2
    alternative "b.eq stop", "nop"
    adrp x4, secondary_data
    add x4, x4, :lo12:secondary_data
    ldp x0, x5, [x4]
    bl enable_translation
    mov sp, x5
    mov x0, x19
    ldr x3, ={processor_main}
    br x3

// Replaces the tables; x0: the new root, x1: virtual minus physical addresses of the image. Both
// maps have the image, with leaves of different sizes, so between them nothing may be cached: this
// runs in the identity map, which both have, and nothing else is mapped meanwhile (Arm ARM,
// D8.17.1).
.global replace_tables
replace_tables:
    adr x2, 1f
    sub x2, x2, x1
    adrp x3, identity_root
    sub x3, x3, x1
    br x2
1:  msr ttbr0_el2, x3
    isb
    tlbi alle2
    dsb nsh
    isb
    msr ttbr0_el2, x0
    isb
    ret

.bss
.balign 4096
boot_tables:
    .skip 0x3000
identity_root:
    .skip 0x3000
.global empty_table
empty_table:
    .skip 0x1000
boot_stack:
    .skip 0x8000
.global boot_stack_top
boot_stack_top:

.data
.balign 64
// Root of the kernel's tables and stack of the CPU that starts.
.global secondary_data
secondary_data:
    .quad 0, 0
.balign 64
.text
