begin:
    adr x0, text
    bl print
    b power_off
text:
    .asciz "hello from a micro-guest for AArch64\r\n"
    .align 2
