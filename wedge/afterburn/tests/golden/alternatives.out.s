.pushsection parador_sites_1,"a",@progbits;.popsection;.set .Lparador_only,0;	.macro	ALTERNATIVE old, new, feature
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
	97710:mov	%eax, %gs;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b))*(1-.Lparador_only);97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,41,0|.Lparador_only;.popsection
	.endm
	.text
	zap_gs
	ALTERNATIVE "", ".set .Lparador_only,1;zap_gs;.set .Lparador_only,0", 3
	ALTERNATIVE "", "97710:swapgs;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,39,1;.popsection", ( 3*32+ 1)
	ALTERNATIVE "97710:vmcall;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,61,1;.popsection", "97710:vmmcall;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,62,1;.popsection", 5
	ALTERNATIVE new="97710:mov %cr3, %rax;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,13,1;.popsection; 97710:wrmsr;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,18,1;.popsection", old="", feature=7
	twice	"97710:verw (%rax);97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,57,1;.popsection", 9
#APP
# 10 "a.c" 1
	# ALT: oldnstr
661:
	97710:inl (%dx), %eax;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,9,1;.popsection
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
	97710:.byte 0x0f,0x01,0xca;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,51,1;.popsection
6651:
.popsection

# 0 "" 2
#NO_APP
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:cli;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,0,0;.popsection
