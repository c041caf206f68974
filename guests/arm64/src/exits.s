// Entered at EL1 without translation; x0: number of the vCPU, 0 or 1.
// x19: step, for the report of a failure. x20: number. x21: words shared with the VMM.

.equ UNMAPPED, 0x09000000
.equ SHARED, 0x40200000
.equ READ_ONLY, 0x40201000
.equ HELLO, 0x100
.equ DONE, 0x101
.equ GIVE, 0x103
.equ FAILED, 0x102
.equ FLOAT, 0x55
// Ticks of the timer, and number of its interrupt.
.equ TICKS, 100000
.equ TIMER, 27
.equ SGI, 3

.macro step number
    mov x19, #\number
.endm

// Fails unless a register has this value.
.macro expect register, value
    ldr x10, =\value
    cmp \register, x10
    b.ne failed
.endm

.section .text.start, "ax"
.global guest_start
guest_start:
    mov x20, x0
    ldr x21, =SHARED
    add x21, x21, x20, lsl #6
    adr x1, vectors
    msr vbar_el1, x1
    // Registers that the other vCPU also uses, on the same CPU.
    msr tpidr_el1, x20
    msr tpidr_el0, x20
    msr tpidrro_el0, x20
    msr contextidr_el1, x20
    msr cntv_cval_el0, x20
    isb

    step 1
    ldr x0, ={version}
    hvc #0
    mov x1, x0
    mov x2, x20
    mrs x3, mpidr_el1
    mov x0, #HELLO
    hvc #0
    expect x0, 0x5a5a

    step 2
    ldr x5, =UNMAPPED
    ldr w4, [x5, #0x10]
    expect x4, 0x12345678

    step 3
    ldr x6, =READ_ONLY
    ldr x7, [x6, #8]
    str x4, [x6, #8]
    ldr x8, [x6, #8]
    cmp x7, x8
    b.ne failed

    step 4
    // ICC_SGI1R_EL1
    msr S3_0_C12_C11_5, x20

    step 5
    smc #0
    expect x0, 0x77

    step 6
    mov x0, #3 << 20
    msr cpacr_el1, x0
    isb
    add x0, x20, #FLOAT
    // fmov d7, x0
    .inst 0x9e670007

    step 7
    wfi
1:  wfi
    ldr x0, [x21, #8]
    cbz x0, 1b

    step 8
1:  ldr x0, [x21]
    cbz x0, 1b

    step 9
    ldr x0, ={doorbell}
    mov x1, #0
    hvc #0
    expect x0, 0
    ldr x0, ={doorbell}
    mov x1, #2
    hvc #0
    expect x0, 1

    step 10
    mov x22, #0
    svc #1
    expect x22, 1
    // The same from EL0, which returns by the handler.
    msr spsr_el1, xzr
    adr x0, user
    msr elr_el1, x0
    eret
after_user:
    expect x22, 0x101

    step 11
    // ICC_IGRPEN1_EL1, ICC_PMR_EL1
    mov x0, #1
    msr S3_0_C12_C12_7, x0
    mov x0, #0xf0
    msr S3_0_C4_C6_0, x0
    isb
    mov x23, #0
    mov x24, #0
    mov x0, #GIVE
    hvc #0
    mov x0, #GIVE
    hvc #0
    // Interrupts wait while they are masked. All other words come without the VMM.
    cbnz x24, failed
    msr daifclr, #2
1:  cmp x24, #8
    b.ne 1b
    msr daifset, #2
    expect x23, 40 + 41 + 42 + 43 + 50 + 51 + 52 + 53

    // The SGI that the VMM has enabled, to itself: no exit.
    mov x23, #0
    mov x24, #0
    mov x0, #1
    lsl x0, x0, x20
    movk x0, #SGI << 8, lsl #16
    msr S3_0_C12_C11_5, x0
    msr daifclr, #2
    isb
    msr daifset, #2
    expect x23, SGI
    cmp x24, #1
    b.ne failed

    step 12
    mrs x0, tpidr_el1
    cmp x0, x20
    b.ne failed
    mrs x0, tpidr_el0
    cmp x0, x20
    b.ne failed
    mrs x0, tpidrro_el0
    cmp x0, x20
    b.ne failed
    mrs x0, contextidr_el1
    cmp x0, x20
    b.ne failed
    mrs x0, cntv_cval_el0
    cmp x0, x20
    b.ne failed
    // fmov x0, d7
    .inst 0x9e6600e0
    add x1, x20, #FLOAT
    cmp x0, x1
    b.ne failed

    step 13
    // No EL2, no performance monitors.
    mrs x0, id_aa64pfr0_el1
    ubfx x0, x0, #8, #4
    cbnz x0, failed
    mrs x0, id_aa64dfr0_el1
    ubfx x0, x0, #8, #4
    cbnz x0, failed

    step 14
    // The end of this interrupt is reported.
    mov x23, #0
    mov x24, #0
    mov x0, #GIVE
    hvc #0
    msr daifclr, #2
1:  cbz x24, 1b
    msr daifset, #2
    expect x23, 60

    step 15
    // An event of the VMM's that is an interrupt.
    mov x23, #0
    mov x24, #0
    mov x0, #GIVE
    hvc #0
    cbnz x24, failed
    msr daifclr, #2
    isb
    msr daifset, #2
    expect x23, 70

    step 16
    // The timer interrupts once, after the other vCPU has run, or while this one waits.
    mov x23, #0
    mov x24, #0
    mov x0, #TICKS & 0xffff
    movk x0, #TICKS >> 16, lsl #16
    msr cntv_tval_el0, x0
    mov x0, #1
    msr cntv_ctl_el0, x0
    mov x0, #GIVE
    hvc #0
    // It waits with interrupts masked, so that it misses none.
1:  wfi
    msr daifclr, #2
    isb
    msr daifset, #2
    cbz x24, 1b
    expect x23, TIMER
    mov x0, #DONE
    hvc #0
failed:
    mov x0, #FAILED
    mov x1, x19
    hvc #0
    b failed

user:
    svc #2
    b failed

.balign 2048
vectors:
    // Of EL1 with SP_EL0.
    .rept 4
    .balign 128
    b failed
    .endr
    .balign 128
    add x22, x22, #1
    eret
    // An interrupt: ICC_IAR1_EL1, ICC_EOIR1_EL1.
    .balign 128
    mrs x12, S3_0_C12_C12_0
    cmp x12, #TIMER
    b.ne 1f
    msr cntv_ctl_el0, xzr
    isb
1:  add x23, x23, x12
    add x24, x24, #1
    msr S3_0_C12_C12_1, x12
    eret
    .rept 2
    .balign 128
    b failed
    .endr
    .balign 128
    add x22, x22, #0x100
    b after_user
    .rept 7
    .balign 128
    b failed
    .endr
