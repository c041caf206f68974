// Entered at EL1 without translation, by the protocol of Linux' image.
// x20: number of a register. x21: random value. x22: undefined instructions. x23: code that is
// written. x27: length of a device's registers.

.equ MAGIC, 0x644d5241
.equ REGISTERS, 0x8000
.equ DISTRIBUTOR, 0x08000000
.equ REDISTRIBUTORS, 0x080a0000
.equ LENGTH, 0x10000
.equ STEP, 72
// Of a GICv2: length of the distributor's registers, and offset of the one that sends SGIs;
// registers of the CPU's interface.
.equ LENGTH_V2, 0x1000
.equ SEND, 0xf00
.equ CPU_INTERFACE, 0x08010000
.equ CPU_INTERFACE_LENGTH, 0x2000
.equ UNKNOWN_CALL, 0x84000123
.equ SYSTEM_OFF, 0x84000008
.equ SYSTEM_RESET, 0x84000009
.equ CALLS, 1000
.equ FIRST_ABORT, 0x20
.equ FAILED, 0x10000
// Numbers of SCTLR_EL1 and VBAR_EL1, and of CRn 4, which has the processor state: they are not
// written.
.equ SCTLR, 0x4080
.equ VBAR, 0x4600
.equ STATE, 4

.macro next_random
    mov x9, #0x4c2d
    movk x9, #0x5851, lsl #16
    movk x9, #0xf42d, lsl #32
    movk x9, #0x5851, lsl #48
    mul x21, x21, x9
    add x21, x21, #0x3b1
.endm

.section .text.start, "ax"
.global guest_start
guest_start:
    b begin
    .long 0
    .quad 0, 0x200000, 0xa, 0, 0, 0
    .long MAGIC
    .long 0

begin:
    adr x1, vectors
    msr vbar_el1, x1
    mov x21, #1
    mov x22, #0
    adr x23, written

    // Every system register, read and then written.
    mov x20, #0
1:  ldr w1, =0xd5300003
    bl access
    ubfx x2, x20, #7, #4
    cmp x2, #STATE
    b.eq 2f
    mov x2, #SCTLR
    cmp x20, x2
    b.eq 2f
    mov x2, #VBAR
    cmp x20, x2
    b.eq 2f
    next_random
    mov x3, x21
    ldr w1, =0xd5100003
    bl access
2:  add x20, x20, #1
    mov x2, #REGISTERS
    cmp x20, x2
    b.ne 1b
    cbz x22, failed

    // Registers of the interrupt controller all over its pages, in three widths. A GICv3's CPU
    // interface is among the registers above.
    ldr x24, =DISTRIBUTOR
    mov x27, #LENGTH - LENGTH % STEP
    mrs x1, id_aa64pfr0_el1
    ubfx x1, x1, #24, #4
    cbz x1, version_2
    bl device
    ldr x24, =REDISTRIBUTORS
    bl device
    ldr x24, =REDISTRIBUTORS + LENGTH
    bl device

    b calls

    // The CPU's interface is memory of the guest, whose registers have 32 bits.
version_2:
    mov x27, #LENGTH_V2 - LENGTH_V2 % STEP
    bl device
    ldr x24, =CPU_INTERFACE
    mov x25, #CPU_INTERFACE_LENGTH
1:  sub x25, x25, #4
    ldr w2, [x24, x25]
    next_random
    str w21, [x24, x25]
    cbnz x25, 1b
    ldr x24, =DISTRIBUTOR + SEND
    mov x25, #CALLS
1:  next_random
    str w21, [x24]
    subs x25, x25, #1
    b.ne 1b

    // Calls that do not exist, and SGIs to any CPU.
calls:
    mov x24, #CALLS
1:  ldr x0, =UNKNOWN_CALL
    smc #0
    cmn x0, #1
    b.ne failed
    next_random
    // ICC_SGI1R_EL1, undefined with a GICv2
    msr S3_0_C12_C11_5, x21
    // DC CISW
    dc cisw, x21
    subs x24, x24, #1
    b.ne 1b

    ldr x0, =SYSTEM_OFF
    hvc #0
    // The VMM logs these unknown calls: syndrome, and number of the register.
failed:
    mrs x0, esr_el1
    hvc #0
    orr x0, x20, #FAILED
    hvc #0
    ldr x0, =SYSTEM_RESET
    hvc #0
    b failed

// Executes the instruction w1 for the register x20.
access:
    mov x26, x30
    orr w1, w1, w20, lsl #5
    str w1, [x23]
    dc cvau, x23
    dsb ish
    ic ivau, x23
    dsb ish
    isb
    blr x23
    br x26

// Reads and writes x27 bytes of registers of a device at x24.
device:
    mov x25, x27
1:  sub x25, x25, #STEP
    add x1, x24, x25
    ldr x2, [x1]
    ldr w2, [x1, #4]
    ldrb w2, [x1, #3]
    next_random
    str w21, [x1]
    strh w21, [x1, #6]
    str x21, [x1]
    cbnz x25, 1b
    ret

.balign 2048
vectors:
    .rept 4
    .balign 128
    b failed
    .endr
    // An instruction that is undefined or trapped is skipped; no other exceptions may occur.
    .balign 128
    mrs x10, esr_el1
    lsr x10, x10, #26
    cmp x10, #FIRST_ABORT
    b.hs failed
    add x22, x22, #1
    mrs x10, elr_el1
    add x10, x10, #4
    msr elr_el1, x10
    eret
    .rept 11
    .balign 128
    b failed
    .endr

written:
    nop
    ret
