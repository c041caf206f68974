// Entered in supervisor mode without translation, by the protocol of Linux' zImage.
// r4: number of a register. r5: random value. r6: code that is written. r7: undefined instructions
// and aborts. r10, r11: constants of the random numbers. r12: of handlers.

.equ REGISTERS, 0x4000
.equ CALLS, 250
// Numbers of SCTLR and VBAR, which are not written: opc1, CRn, CRm, opc2.
.equ SCTLR, 1 << 7
.equ VBAR, 12 << 7
// Immediate values with a rotation: 0x4000, 1 << 10.
.equ IMM_REGISTERS, 0x901
.equ IMM_1024, 0xb01

.section .text.start, "ax"
.global guest_start
guest_start:
    a32_zimage guest_end

begin:
    a32_adr 0, vectors
    a32_mcr 0, 0, 12, 0, 0
    a32_mov 5, 1
    a32_mov 7, 0
    a32_adr 6, written
    a32_ldr_literal 10, multiplier
    a32_ldr_literal 11, increment

    // Every register of both coprocessors, read and then written.
    a32_ldr_literal 0, read_15
    a32_bl all_registers
    a32_ldr_literal 0, read_14
    a32_bl all_registers
    a32_cmp 7, 0
    a32_b EQUAL, failed

    // The same with two general-purpose registers.
    a32_mov 4, 0
1:  a32_ldr_literal 0, read_wide
    a32_bl one_wide
    a32_ldr_literal 0, write_wide
    a32_bl one_wide
    a32_add 4, 4, 1
    a32_cmp 4, 0xc01
    a32_b NOT_EQUAL, 1b

    // Registers of the interrupt controller.
    a32_ldr_literal 1, distributor
    a32_bl device
    a32_ldr_literal 1, redistributors
    a32_bl device

    // Device accesses and calls with the registers of each mode; then modes that are not for EL1.
    // The instruction after a change to one of those is undefined.
    .irp mode, 0x11, 0x12, 0x17, 0x1b, 0x1f
    a32_cps \mode
    a32_ldr_literal 1, distributor
    a32_ldr LR, 1
    a32_ldr SP, 1
    a32_mcr 0, LR, 1, 0, 1
    a32_mov_reg LR, 5
    a32_mcrr 0, 5, LR, 12
    .endr
    .irp mode, 0x16, 0x1a, 0x14, 0x18
    a32_cps 0x13
    a32_cps \mode
    a32_mov_reg 0, 0
    a32_msr_cpsr_c 0xc0 | \mode
    a32_mov_reg 0, 0
    .endr
    a32_cps 0x13

    // An IT block of T32 with device accesses: what follows them has another condition.
    a32_ldr_literal 1, distributor
    a32_mov 2, 0
    a32_adr 8, thumb
    a32_add 8, 8, 1
    a32_blx 8
    a32_cmp 2, 0
    a32_b NOT_EQUAL, failed

    // Calls that do not exist, and SGIs to any CPU.
    a32_mov 4, CALLS
1:  a32_ldr_literal 0, unknown_call
    a32_smc
    a32_add 0, 0, 1
    a32_cmp 0, 0
    a32_b NOT_EQUAL, failed
    a32_ldr_literal 0, wide_call
    a32_hvc
    a32_add 0, 0, 1
    a32_cmp 0, 0
    a32_b NOT_EQUAL, failed
    a32_bl next_random
    a32_mov_reg 8, 5
    a32_bl next_random
    a32_mcrr 0, 5, 8, 12
    a32_subs 4, 4, 1
    a32_b NOT_EQUAL, 1b

    a32_ldr_literal 0, system_off
    a32_hvc
    // The VMM logs this unknown call: the number of the register.
failed:
    a32_mov_reg 0, 4
    a32_hvc
    a32_ldr_literal 0, system_reset
    a32_hvc
    a32_b ALWAYS, failed

// Reads and writes all registers of a coprocessor, whose instruction to read is r0.
all_registers:
    a32_mov_reg 3, LR
    a32_mov 4, 0
1:  a32_lsr 9, 4, 11
    a32_orr_lsl 8, 0, 9, 21
    a32_lsr 9, 4, 7
    a32_and 9, 9, 15
    a32_orr_lsl 8, 8, 9, 16
    a32_lsr 9, 4, 3
    a32_and 9, 9, 15
    a32_orr_lsl 8, 8, 9, 0
    a32_and 9, 4, 7
    a32_orr_lsl 8, 8, 9, 5
    a32_bl execute
    a32_cmp 4, SCTLR
    a32_b EQUAL, 2f
    // 12 << 7 with a rotation.
    a32_cmp 4, 0xd18
    a32_b EQUAL, 2f
    a32_bl next_random
    a32_mov_reg 12, 5
    // The same without the bit of reads.
    .long 0xe3c88601
    a32_bl execute
2:  a32_add 4, 4, 1
    a32_cmp 4, IMM_REGISTERS
    a32_b NOT_EQUAL, 1b
    a32_bx 3

// Executes the instruction r0 for a register of two words: opc1 and CRm in r4.
one_wide:
    a32_mov_reg 3, LR
    a32_bl next_random
    a32_lsr 9, 4, 4
    a32_orr_lsl 8, 0, 9, 4
    a32_and 9, 4, 15
    a32_orr_lsl 8, 8, 9, 0
    a32_bl execute
    a32_bx 3

// Executes the instruction r8.
execute:
    a32_mov_reg 2, LR
    a32_str 8, 6
    a32_mcr 0, 8, 7, 5, 0
    a32_dsb
    a32_isb
    a32_blx 6
    a32_bx 2

next_random:
    a32_mul 5, 5, 10
    a32_add_reg 5, 5, 11
    a32_bx LR

// Reads and writes 4 KiB of registers of a device at r1.
device:
    a32_mov_reg 3, LR
    a32_mov 4, IMM_1024
1:  a32_bl next_random
    a32_ldr 2, 1
    a32_ldrb 2, 1, 3
    a32_str 5, 1
    a32_strh 5, 1, 2
    a32_strd 4, 1
    a32_add 1, 1, 4
    a32_subs 4, 4, 1
    a32_b NOT_EQUAL, 1b
    a32_bx 3

read_15:
    .long 0xee10cf10
read_14:
    .long 0xee10ce10
read_wide:
    .long 0xec598f00
write_wide:
    .long 0xec445f00
multiplier:
    .long 1664525
increment:
    .long 1013904223
distributor:
    .long 0x08000000
redistributors:
    .long 0x080a0000
unknown_call:
    .long 0x84000123
wide_call:
    .long 0xc4000003
system_off:
    .long 0x84000008
system_reset:
    .long 0x84000009

// cmp r0, r0; itte eq; ldreq r0, [r1], twice; addne r2, #1; bx lr.
thumb:
    .short 0x4280, 0xbf06, 0x6808, 0x6808, 0x3201, 0x4770
.balign 4
written:
    a32_mov_reg 0, 0
    a32_bx LR

.balign 32
vectors:
    a32_b ALWAYS, failed
    a32_b ALWAYS, undefined
    a32_b ALWAYS, failed
    a32_b ALWAYS, failed
    a32_b ALWAYS, abort
    a32_b ALWAYS, failed
    a32_b ALWAYS, failed
    a32_b ALWAYS, failed
// The instruction is skipped, in supervisor mode, where all of them are. The saved state may be
// illegal, and an emulator may have another one than that of the exception.
undefined:
    a32_add 7, 7, 1
    a32_ldr_literal 12, supervisor
    // msr spsr_cxsf, r12; movs pc, lr
    .long 0xe16ff00c, 0xe1b0f00e
abort:
    a32_add 7, 7, 1
    a32_ldr_literal 12, supervisor
    // msr spsr_cxsf, r12; subs pc, lr, #4
    .long 0xe16ff00c, 0xe25ef004
supervisor:
    .long 0x1d3
.balign 4
guest_end:
