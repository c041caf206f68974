	.macro	save_flags to:req
	pushf
	pop	\to
	.endm
	.macro	safe op
1:	\op
	.pushsection __ex_table, "a"
	.long	1b - .
	.popsection
	.endm
	.macro	sized size
	in\size	%dx, %\()\size\()
	.endm
	.macro	outer first second=cli
	.macro	inner
	\first
	\second
	.endm
	.endm
	.MACRO	Mixed
	hlt
	.ENDM
	.macro	str
	nop
	.endm
	.text
	save_flags %rax
	safe	rdmsr
	safe	nop
	safe	"wrmsr; nop"
	mixed
	str
	.rept	2
	cli
	.endr
	.irp	op, sti, nop, hlt
	\op
	.endr
	.irp	segment, ds, es
	mov	%eax, %\segment
	.endr
	.irpc	n, 04
	mov	%cr\n, %rax
	.endr
	.if	1
	cli
	.else
	sti
	.endif
	outer	"swapgs"
	inner
