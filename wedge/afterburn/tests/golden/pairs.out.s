.pushsection parador_sites_1,"a",@progbits;.popsection;	.file 1 "pairs.c"
	.text
	97710:sti; hlt;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,3,0;.popsection
	97710:sti
	# a comment between

	hlt;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,3,0;.popsection
	97710:sti
	.byte	0x0f, 0x01, 0xc9;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,4,0;.popsection
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:pushfq
	popq	%rax;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,5,0;.popsection
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:pushf ; pop (%rdi);97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,5,0;.popsection
	97710:push	%rdi
	popfq;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,6,0;.popsection
	97710:pushq	8(%rdi)
	.loc 1 1 1
	popf;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,6,0;.popsection
	# Not pairs.
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:sti;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,1,0;.popsection
1:	97710:hlt;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,2,0;.popsection
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:sti;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,1,0;.popsection
	nop
	97710:hlt;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,2,0;.popsection
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:pushf;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,7,0;.popsection
	97710:pop	%fs;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,43,0;.popsection
	97710:push	%gs;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,42,0;.popsection
	97710:popf;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,8,0;.popsection
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:pushf;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,7,0;.popsection
	.p2align 4
	pop	%rax
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:sti;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,1,0;.popsection
