.pushsection parador_sites_1,"a",@progbits;.popsection;	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:cli;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,0,0;.popsection
	.section .foo, "ax"
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:cli;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,0,0;.popsection
	.section .rodata
template:
	97710:pushf;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,7,1;.popsection
	.previous
	97710:hlt;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,2,0;.popsection
	.pushsection .init.text, "ax"
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:cli;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,0,0;.popsection
	.subsection 1
	97710:hlt;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,2,0;.popsection
	.popsection
	.section .foo
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:sti;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,1,0;.popsection
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
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:cli;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,0,0;.popsection
	to_data
	.byte	0xfa
	.text
	97710:hlt;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,2,0;.popsection
