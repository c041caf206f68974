	.text
	cli
	.code32
	cli
	mov	%eax, %cr0
	ljmp	$8, $1f
	.code64
1:	hlt
	.section .text.start, "ax"
	.code16
	cli
	.section .text.more, "ax"
	hlt
	.code64
