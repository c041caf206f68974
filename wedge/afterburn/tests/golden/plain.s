	.text
	.globl	f
	.type	f, @function
f:	cli
	STI
	movq	%rax, %rbx	# not this: cli
	movq	%cr3, %rax; mov %rax, %cr3
	mov	%db7, %rax /* cli */
	mov	%rax, /* hlt */ %dr7
	cli /* a comment
	over lines: hlt */ sti
	mov	%gs, %eax
	movw	8(%rax,%rbx,2), % ds
	mov	%gs:8, %rax
	mov	$';, %al; hlt
	mov	$'#', %al; cpuid
1:	rdmsr
2: 3:	wrmsr
/ a line of comment: cli
	lock
	incl	(%rax)
	rep; insb
	rep outsl
	in	(%dx), %al
	outb	%al, $0x80
	int3
	int	$3
	int	$0x80
	swapgs; sysretq
	rex.W sysret
	lgdt	table(%rip)
	lidt	(%rax)
	invlpg	(%rax); clts; wbinvd
	push	%fs
	popq	%gs
	lretq
	ljmp	*(%rax)
	rex64 ljmp *8(%rax)
	iretq
	{disp32} lgdt 8(%rax)
	xsaves64 (%rdi)
	vmxoff
	verw	table(%rip)
"quoted name":	pushf
	nop
	push	%rax
	nop
	popf
	.section .rodata
table:	.ascii	"cli; \"hlt\" # sti\\"
	.string	"; cli"
sti = 5
in = sti + 1
	.quad	sti, in
