.pushsection parador_sites_1,"a",@progbits;.popsection;	.text
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:cli;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,0,0;.popsection
	.code32
	"$c32.0":cli
	mov	%eax, %cr0
	ljmp	$8, $1f
	.code64
1:	"$c64.1":97710:hlt;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,2,0;.popsection
	.section .text.start, "ax"
	.code16
	"$c32.2":cli
	.section .text.more, "ax"
	"$c32.3":hlt
	.code64

.pushsection .text.more, "ax";"$c64.4":;.popsection

.pushsection .text.start, "ax";"$c64.5":;.popsection
