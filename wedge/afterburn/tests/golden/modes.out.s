.pushsection parador_sites_1,"a",@progbits;.popsection;	.text
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:cli;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,0,0;.popsection
	ret
	.code32
start32:
	cli
	mov	%eax, %cr0
	ljmp	$8, $1f
	.code64
1:	97710:hlt;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,2,0;.popsection
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
