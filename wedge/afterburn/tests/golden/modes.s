	.text
	cli
	ret
	.code32
start32:
	cli
	mov	%eax, %cr0
	ljmp	$8, $1f
	.code64
1:	hlt
	.section .text.start, "ax"
	.code16
start16:
	cli
	ret
	.section .text.more, "ax"
more16:
	hlt
	ret
	.code64
