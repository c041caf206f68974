// x19: number of the tick. x20: ticks of the counter per tick. x21: counter at the next tick.

.equ TICKS, 1000
.equ DISTRIBUTOR, 0x08000000
.equ PRIVATE, 0x080b0000
.equ GROUP, 0x80
.equ ENABLE, 0x100
.equ GROUP_1_ENABLED, 0x12
.equ TIMER, 27
.equ TIMER_BIT, 1 << TIMER
.equ LOWEST_PRIORITY, 0xf8

begin:
    // The interrupt of the virtual timer in group 1; it stays masked, and ends the wait.
    ldr x0, =DISTRIBUTOR
    mov w1, #GROUP_1_ENABLED
    str w1, [x0]
    ldr x0, =PRIVATE
    mov w1, #-1
    str w1, [x0, #GROUP]
    mov w1, #TIMER_BIT
    str w1, [x0, #ENABLE]
    mov x0, #1
    msr S3_0_C12_C12_5, x0
    isb
    mov x1, #LOWEST_PRIORITY
    msr S3_0_C4_C6_0, x1
    msr S3_0_C12_C12_7, x0
    isb
    mrs x20, cntfrq_el0
    mrs x21, cntvct_el0
    mov x19, #0
1:  adr x0, text
    bl print
    mov x0, x19
    bl print_number
    adr x0, end_of_line
    bl print
    add x21, x21, x20
    msr cntv_cval_el0, x21
    mov x0, #1
    msr cntv_ctl_el0, x0
    isb
2:  wfi
    mrs x0, S3_0_C12_C12_0
    cmp x0, #TIMER
    b.ne 2b
    msr cntv_ctl_el0, xzr
    isb
    msr S3_0_C12_C12_1, x0
    mrs x0, cntvct_el0
    cmp x0, x21
    b.lo failed
    add x19, x19, #1
    cmp x19, #TICKS
    b.lo 1b
    b power_off
    .ltorg
text:
    .asciz "tick "
end_of_line:
    .asciz "\r\n"
    .align 2
