	.file	"x.c"
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
	cli
# 0 "" 2
#NO_APP
	movq	%rdi, %rbx
	testq	%rbx, %rbx
#APP
# 4 "x.c" 1
	sti
# 0 "" 2
# 5 "x.c" 1
	hlt; nop
# 0 "" 2
# 6 "x.c" 1
	pushf ; pop %rax
# 0 "" 2
# 7 "x.c" 1
	lar %dx, %eax
	/* output condition code z*/

# 0 "" 2
#NO_APP
	je	.L2
#APP
# 8 "x.c" 1
	1: rdmsr
2:
 .pushsection "__ex_table","a"
 .long (1b) - .
 .popsection

# 0 "" 2
#NO_APP
	jne	.L2
#APP
# 9 "x.c" 1
	movq %rax,(%rbx) # parador:pgtable
# 0 "" 2
# 9 "x.c" 1
	lock btrq $1, (%rbx) # parador:pgtable
	setc %al
# 0 "" 2
# 9 "x.c" 1
	# parador:announce
# 0 "" 2
# 10 "x.c" 1
	bts %eax, %edx; clts
	/* output condition code c*/

# 0 "" 2
#NO_APP
	movl	$0, %eax
	setc	%al
#APP
# 11 "x.c" 1
	wbinvd
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
