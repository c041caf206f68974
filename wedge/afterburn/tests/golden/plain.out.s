.pushsection parador_sites_1,"a",@progbits;.popsection;	.text
	.globl	f
	.type	f, @function
f:	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:cli;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,0,0;.popsection
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:STI;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,1,0;.popsection
	movq	%rax, %rbx	# not this: cli
	97710:movq	%cr3, %rax;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,13,0;.popsection; 97710:mov %rax, %cr3;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,14,0;.popsection
	97710:mov	%db7, %rax;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,15,0;.popsection /* cli */
	97710:mov	%rax, /* hlt */ %dr7;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,16,0;.popsection
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:cli;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,0,0;.popsection /* a comment
	over lines: hlt */ 97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:sti;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,1,0;.popsection
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:mov	%gs, %eax;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,40,0;.popsection
	97710:movw	8(%rax,%rbx,2), % ds;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,41,0;.popsection
	mov	%gs:8, %rax
	mov	$';, %al; 97710:hlt;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,2,0;.popsection
	mov	$'#', %al; 97710:cpuid;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,47,0;.popsection
1:	97710:rdmsr;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,17,0;.popsection
2: 3:	97710:wrmsr;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,18,0;.popsection
/ a line of comment: cli
	lock
	incl	(%rax)
	97710:rep; insb;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,11,0;.popsection
	97710:rep outsl;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,12,0;.popsection
	97710:in	(%dx), %al;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,9,0;.popsection
	97710:outb	%al, $0x80;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,10,0;.popsection
	int3
	int	$3
	97710:int	$0x80;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,58,0;.popsection
	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:swapgs;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,39,0;.popsection; 97710:sysretq;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,36,0;.popsection
	97710:rex.W sysret;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,36,0;.popsection
	97710:lgdt	table(%rip);97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,19,0;.popsection
	97710:lidt	(%rax);97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,20,0;.popsection
	97710:invlpg	(%rax);97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,30,0;.popsection; 97710:clts;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,29,0;.popsection; 97710:wbinvd;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,32,0;.popsection
	97710:push	%fs;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,42,0;.popsection
	97710:popq	%gs;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,43,0;.popsection
	97710:lretq;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,44,0;.popsection
	97710:ljmp	*(%rax);97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,45,0;.popsection
	97710:rex64 ljmp *8(%rax);97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,45,0;.popsection
	97710:iretq;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,35,0;.popsection
	97710:{disp32} lgdt 8(%rax);97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,19,0;.popsection
	97710:xsaves64 (%rdi);97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,59,0;.popsection
	97710:vmxoff;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,66,0;.popsection
	97710:verw	table(%rip);97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,57,0;.popsection
"quoted name":	97710:.skip -((8-(97711f-97709f))>0)*(8-(97711f-97709f)),46;97709:pushf;97711:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97711b-97710b,7,0;.popsection
	nop
	push	%rax
	nop
	97710:popf;97711:.nops -((8-(97711b-97710b))>0)*(8-(97711b-97710b));97712:.pushsection parador_sites_1;.long 97710b-.;.byte 97711b-97710b,97712b-97710b,8,0;.popsection
	.section .rodata
table:	.ascii	"cli; \"hlt\" # sti\\"
	.string	"; cli"
sti = 5
in = sti + 1
	.quad	sti, in
