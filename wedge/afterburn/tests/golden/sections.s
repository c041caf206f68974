	cli
	.section .foo, "ax"
	cli
	.section .rodata
template:
	pushf
	.previous
	hlt
	.pushsection .init.text, "ax"
	cli
	.subsection 1
	hlt
	.popsection
	.section .foo
	sti
	.pushsection .discard.text, "ax"
	cli
	.popsection
	.macro	to_data
	.section .data
	.endm
	.macro	in_data
	.pushsection .data
	.long	0xfa
	.popsection
	.endm
	in_data
	cli
	to_data
	.byte	0xfa
	.text
	hlt
