.pushsection parador_sites_1,"a",@progbits;.popsection;	.text
	97710:.byte	0x0f, 0x01, 0xca;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,51,0;.popsection
	97710:.byte	0x0f,0x01
	.byte	0xcb;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,50,0;.popsection
	nop
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:.byte	0xfa;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,0,0;.popsection;.byte 0x90;97710:.byte 0xf4;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,2,0;.popsection; nop
	97710:.byte	0x48, 0x0f, 0xc7, 0x2f;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,59,0;.popsection	# xsaves64
	97710:.byte	0x48; sysret;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,36,0;.popsection
	97710:.byte	0xf3
	insb;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,11,0;.popsection
	.byte	0x0f, 0x0b
	97710:.byte	0x66,0x0f,0x38,0x82, 1 | 0;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,31,0;.popsection
	.byte	0xea - 0
	97710:.byte	0xfb; hlt;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,3,0;.popsection
	97710:.byte	0x0f, 0x22
	.byte	0xd8;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,14,0;.popsection;.byte 0x90
	ret
	# Data: not all of it decodes.
	.byte	0xff, 0xff
	.section .rodata
	.byte	0x0f, 0x01, 0xca
	.byte	0xfa
