	.macro	ALTERNATIVE old, new, feature
140:
	\old
141:
	.skip	-(((144f-143f)-(141b-140b)) > 0) * ((144f-143f)-(141b-140b)),0x90
142:
	.pushsection .altinstructions,"a"
	.long	140b - .
	.long	143f - .
	.word	\feature
	.byte	142b-140b
	.byte	144f-143f
	.popsection
	.pushsection .altinstr_replacement,"ax"
143:
	\new
144:
	.popsection
	.endm
	.macro	twice new, feature
	ALTERNATIVE "", "\new", \feature
	.endm
	.macro	zap_gs
	mov	$0x2b, %eax
	mov	%eax, %gs
	.endm
	.text
	zap_gs
	ALTERNATIVE "", "zap_gs", 3
	ALTERNATIVE "", "swapgs", ( 3*32+ 1)
	ALTERNATIVE "vmcall", "vmmcall", 5
	ALTERNATIVE new="mov %cr3, %rax; wrmsr", old="", feature=7
	twice	"verw (%rax)", 9
#APP
# 10 "a.c" 1
	# ALT: oldnstr
661:
	inl (%dx), %eax
662:
# ALT: padding
.skip -(((6651f-6641f)-(662b-661b)) > 0) * ((6651f-6641f)-(662b-661b)),0x90
663:
.pushsection .altinstructions,"a"
 .long 661b - .
 .long 6641f - .
 .word 11
 .byte 663b-661b
 .byte 6651f-6641f
.popsection
.pushsection .altinstr_replacement, "ax"
# ALT: replacement 1
6641:
	.byte 0x0f,0x01,0xca
6651:
.popsection

# 0 "" 2
#NO_APP
	cli
