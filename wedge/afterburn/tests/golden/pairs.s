	.file 1 "pairs.c"
	.text
	sti; hlt
	sti
	# a comment between

	hlt
	sti
	.byte	0x0f, 0x01, 0xc9
	pushfq
	popq	%rax
	pushf ; pop (%rdi)
	push	%rdi
	popfq
	pushq	8(%rdi)
	.loc 1 1 1
	popf
	# Not pairs.
	sti
1:	hlt
	sti
	nop
	hlt
	pushf
	pop	%fs
	push	%gs
	popf
	pushf
	.p2align 4
	pop	%rax
	sti
