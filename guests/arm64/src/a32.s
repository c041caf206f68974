// Instructions of A32 (Arm ARM, F5) for an assembler of A64, and the header of a `zImage`. Names of
// registers are numbers.

.equ ALWAYS, 0xe
.equ EQUAL, 0x0
.equ NOT_EQUAL, 0x1
.equ SP, 13
.equ LR, 14

.macro a32_mov rd, imm
    .long 0xe3a00000 | (\rd) << 12 | (\imm)
.endm
.macro a32_mov_reg rd, rm
    .long 0xe1a00000 | (\rd) << 12 | (\rm)
.endm
// Logical shift right by a constant.
.macro a32_lsr rd, rm, shift
    .long 0xe1a00020 | (\rd) << 12 | (\shift) << 7 | (\rm)
.endm
.macro a32_and rd, rn, imm
    .long 0xe2000000 | (\rn) << 16 | (\rd) << 12 | (\imm)
.endm
.macro a32_orr_lsl rd, rn, rm, shift
    .long 0xe1800000 | (\rn) << 16 | (\rd) << 12 | (\shift) << 7 | (\rm)
.endm
.macro a32_add rd, rn, imm
    .long 0xe2800000 | (\rn) << 16 | (\rd) << 12 | (\imm)
.endm
.macro a32_add_reg rd, rn, rm
    .long 0xe0800000 | (\rn) << 16 | (\rd) << 12 | (\rm)
.endm
.macro a32_subs rd, rn, imm
    .long 0xe2500000 | (\rn) << 16 | (\rd) << 12 | (\imm)
.endm
.macro a32_cmp rn, imm
    .long 0xe3500000 | (\rn) << 16 | (\imm)
.endm
.macro a32_cmp_reg rn, rm
    .long 0xe1500000 | (\rn) << 16 | (\rm)
.endm
.macro a32_mul rd, rn, rm
    .long 0xe0000090 | (\rd) << 16 | (\rm) << 8 | (\rn)
.endm
.macro a32_b condition, target
    .long (\condition) << 28 | 0x0a000000 | (((\target - . - 8) >> 2) & 0xffffff)
.endm
.macro a32_bl target
    .long 0xeb000000 | (((\target - . - 8) >> 2) & 0xffffff)
.endm
.macro a32_bx rm
    .long 0xe12fff10 | (\rm)
.endm
.macro a32_blx rm
    .long 0xe12fff30 | (\rm)
.endm
// Address of, and word at, a later label.
.macro a32_adr rd, target
    .long 0xe28f0000 | (\rd) << 12 | ((\target - . - 8) & 0xff)
    .long 0xe2800c00 | (\rd) << 16 | (\rd) << 12 | (((\target - . - 4) >> 8) & 0xff)
.endm
.macro a32_ldr_literal rd, target
    .long 0xe59f0000 | (\rd) << 12 | (\target - . - 8)
.endm
.macro a32_ldr rt, rn, offset=0
    .long 0xe5900000 | (\rn) << 16 | (\rt) << 12 | (\offset)
.endm
.macro a32_str rt, rn, offset=0
    .long 0xe5800000 | (\rn) << 16 | (\rt) << 12 | (\offset)
.endm
.macro a32_ldrb rt, rn, offset=0
    .long 0xe5d00000 | (\rn) << 16 | (\rt) << 12 | (\offset)
.endm
.macro a32_strh rt, rn, offset=0
    .long 0xe1c000b0 | (\rn) << 16 | (\rt) << 12 | (\offset)
.endm
// Of two registers from rt on: no syndrome describes it.
.macro a32_strd rt, rn
    .long 0xe1c000f0 | (\rn) << 16 | (\rt) << 12
.endm
.macro a32_mcr opc1, rt, crn, crm, opc2
    .long 0xee000f10 | (\opc1) << 21 | (\crn) << 16 | (\rt) << 12 | (\opc2) << 5 | (\crm)
.endm
.macro a32_mcrr opc1, rt, rt2, crm
    .long 0xec400f00 | (\rt2) << 16 | (\rt) << 12 | (\opc1) << 4 | (\crm)
.endm
.macro a32_cps mode
    .long 0xf1020000 | (\mode)
.endm
.macro a32_msr_cpsr_c imm
    .long 0xe321f000 | (\imm)
.endm
.macro a32_dsb
    .long 0xf57ff04f
.endm
.macro a32_isb
    .long 0xf57ff06f
.endm
.macro a32_hvc
    .long 0xe1400070
.endm
.macro a32_smc
    .long 0xe1600070
.endm

// Header: a branch to `begin`, magic numbers, start, end and byte order.
.macro a32_zimage end
    a32_b ALWAYS, begin
    .rept 8
    a32_mov_reg 0, 0
    .endr
    .long 0x016f2818, 0, \end - guest_start, 0x04030201
.endm
