// The board `virt` for guests that use its UART, its timer and PSCI. Entered at EL1 without
// translation, by the protocol of Linux' image; continues at `begin` with a stack and vectors.

.equ MAGIC, 0x644d5241
.equ UART, 0x09000000
.equ UART_FLAGS, 0x18
.equ TRANSMIT_FULL, 5
.equ RECEIVE_EMPTY, 4
.equ SYSTEM_OFF, 0x84000008
.equ SYSTEM_RESET, 0x84000009

.section .text.start, "ax"
.global guest_start
guest_start:
    b 1f
    .long 0
    .quad 0, 0x200000, 0xa, 0, 0, 0
    .long MAGIC
    .long 0
1:  adr x1, guest_start
    add x1, x1, #0x100000
    mov sp, x1
    adr x1, board_vectors
    msr vbar_el1, x1
    b begin

// Prints the text at x0, which ends with a zero. Changes x0 to x3.
print:
    ldr x1, =UART
1:  ldrb w2, [x0], #1
    cbz w2, 3f
2:  ldr w3, [x1, #UART_FLAGS]
    tbnz w3, #TRANSMIT_FULL, 2b
    str w2, [x1]
    b 1b
3:  ret

// Prints the number in x0, decimal. Changes x0 to x7.
print_number:
    sub sp, sp, #32
    add x4, sp, #31
    strb wzr, [x4]
    mov x5, #10
1:  udiv x6, x0, x5
    msub x7, x6, x5, x0
    add w7, w7, #'0'
    strb w7, [x4, #-1]!
    mov x0, x6
    cbnz x0, 1b
    mov x0, x4
    mov x7, x30
    bl print
    mov x30, x7
    add sp, sp, #32
    ret

// Ends the VM.
power_off:
    ldr w0, =SYSTEM_OFF
    hvc #0
failed:
    ldr w0, =SYSTEM_RESET
    hvc #0
    b .
    .ltorg

// Every exception is a failure.
.align 11
board_vectors:
.rept 16
    b failed
    .align 7
.endr
