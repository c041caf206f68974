.pushsection parador_sites_1,"a",@progbits;.popsection;
.macro parador_site name,flags
.set .Lparador_kind,255
.ifeqs "\name","cli"
.set .Lparador_kind,0
.set .Lparador_pad,8
.endif
.ifeqs "\name","hlt"
.set .Lparador_kind,2
.set .Lparador_pad,8
.endif
.ifeqs "\name","inb"
.set .Lparador_kind,9
.set .Lparador_pad,8
.endif
.ifeqs "\name","inl"
.set .Lparador_kind,9
.set .Lparador_pad,8
.endif
.ifeqs "\name","ins"
.set .Lparador_kind,11
.set .Lparador_pad,8
.endif
.ifeqs "\name","insb"
.set .Lparador_kind,11
.set .Lparador_pad,8
.endif
.ifeqs "\name","insl"
.set .Lparador_kind,11
.set .Lparador_pad,8
.endif
.ifeqs "\name","insw"
.set .Lparador_kind,11
.set .Lparador_pad,8
.endif
.ifeqs "\name","invd"
.set .Lparador_kind,34
.set .Lparador_pad,8
.endif
.ifeqs "\name","invept"
.set .Lparador_kind,66
.set .Lparador_pad,8
.endif
.ifeqs "\name","invlpg"
.set .Lparador_kind,30
.set .Lparador_pad,8
.endif
.ifeqs "\name","invlpga"
.set .Lparador_kind,66
.set .Lparador_pad,8
.endif
.ifeqs "\name","invlpgb"
.set .Lparador_kind,66
.set .Lparador_pad,8
.endif
.ifeqs "\name","invpcid"
.set .Lparador_kind,31
.set .Lparador_pad,8
.endif
.ifeqs "\name","invvpid"
.set .Lparador_kind,66
.set .Lparador_pad,8
.endif
.ifeqs "\name","inw"
.set .Lparador_kind,9
.set .Lparador_pad,8
.endif
.ifeqs "\name","rdmsr"
.set .Lparador_kind,17
.set .Lparador_pad,8
.endif
.ifeqs "\name","rdmsrlist"
.set .Lparador_kind,66
.set .Lparador_pad,8
.endif
.ifeqs "\name","sti"
.set .Lparador_kind,1
.set .Lparador_pad,8
.endif
.if .Lparador_kind-255
.if (\flags)&1
97712:
.else
.nops -((.Lparador_pad-(97711b-97710b))>0)*(.Lparador_pad-(97711b-97710b))
97712:
.endif
.pushsection parador_sites_1
.long 97710b-.
.byte 97711b-97710b,97712b-97710b,.Lparador_kind,\flags
.popsection
.endif
.endm
	.macro	save_flags to:req
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:pushf
	pop	\to;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,5,0;.popsection
	.endm
	.macro	safe op
1:	97710:\op;97711:parador_site "\op",0
	.pushsection __ex_table, "a"
	.long	1b - .
	.popsection
	.endm
	.macro	sized size
	97710:in\size	%dx, %\()\size\();97711:parador_site "in\size",0
	.endm
	.macro	outer first second=cli
	.macro	inner
	97710:\first;97711:parador_site "\first",0
	97710:\second;97711:parador_site "\second",0
	.endm
	.endm
	.MACRO	Mixed
	97710:hlt;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,2,0;.popsection
	.ENDM
	.macro	str
	nop
	.endm
	.text
	save_flags %rax
	safe	rdmsr
	safe	nop
	safe	"97710:wrmsr;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,18,0;.popsection; nop"
	mixed
	str
	.rept	2
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:cli;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,0,0;.popsection
	.endr
	.irp	op, sti, nop, hlt
	97710:\op;97711:parador_site "\op",0
	.endr
	.irp	segment, ds, es
	97710:mov	%eax, %\segment;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,41,0;.popsection
	.endr
	.irpc	n, 04
	97710:mov	%cr\n, %rax;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,13,0;.popsection
	.endr
	.if	1
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:cli;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,0,0;.popsection
	.else
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:sti;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,1,0;.popsection
	.endif
	outer	"97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:swapgs;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,39,0;.popsection"
	inner
