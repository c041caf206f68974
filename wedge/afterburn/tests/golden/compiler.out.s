.pushsection parador_sites_1,"a",@progbits;.popsection;	.file	"x.c"
	.text
	.globl	f
	.type	f, @function
f:
.LFB0:
	.cfi_startproc
	pushq	%rbx
	.cfi_def_cfa_offset 16
#APP
# 3 "x.c" 1
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:cli;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,0,2;.popsection
# 0 "" 2
#NO_APP
	movq	%rdi, %rbx
	testq	%rbx, %rbx
#APP
# 4 "x.c" 1
	97710:sti
# 0 "" 2
# 5 "x.c" 1
	hlt;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,3,0;.popsection; nop
# 0 "" 2
# 6 "x.c" 1
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:pushf ; pop %rax;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,5,2;.popsection
# 0 "" 2
# 7 "x.c" 1
	97710:lar %dx, %eax;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,54,0;.popsection
	/* output condition code z*/

# 0 "" 2
#NO_APP
	je	.L2
#APP
# 8 "x.c" 1
	1: 97710:rdmsr;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,17,0;.popsection
2:
 .pushsection "__ex_table","a"
 .long (1b) - .
 .popsection

# 0 "" 2
#NO_APP
	jne	.L2
#APP
# 9 "x.c" 1
	97710:movq %rax,(%rbx);97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,67,2;.popsection # parador:pgtable
# 0 "" 2
# 9 "x.c" 1
	97710:lock btrq $1, (%rbx);97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,67,0;.popsection # parador:pgtable
	setc %al
# 0 "" 2
# 9 "x.c" 1
	97710:;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,68,0;.popsection # parador:announce
# 0 "" 2
# 10 "x.c" 1
	bts %eax, %edx; 97710:clts;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,29,0;.popsection
	/* output condition code c*/

# 0 "" 2
#NO_APP
	movl	$0, %eax
	setc	%al
#APP
# 11 "x.c" 1
	97710:wbinvd;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,32,2;.popsection
# 0 "" 2
#NO_APP
.L2:
	popq	%rbx
	ret
	.cfi_endproc
.LFE0:
	.size	f, .-f
	.section	.rodata.str1.1,"aMS",@progbits,1
.LC0:
	.string	"cli # \"hlt\""
	.ident	"GCC"
	.section	.note.GNU-stack,"",@progbits
