/* Entry from the boot loader, exceptions, interrupts, system calls, and the way to user mode. */

#define KERNEL_CODE	0x08
#define KERNEL_DATA	0x10
#define USER_DATA	0x1b
#define USER_CODE	0x23

	/*
	 * PVH (xen/include/public/arch-x86/hvm/start_info.h): entered in 32-bit mode, paging off.
	 */
	.section .note.pvh, "a", @note
	.long	4, 4, 18
	.asciz	"Xen"
	.long	start

	.text
	.code32
	.globl	start
start:	cli
	mov	$stack_top, %esp
	/* The first GiB in 2 MiB pages, with user access. */
	movl	$(table3 + 7), table4
	movl	$(table2 + 7), table3
	mov	$table2, %edi
	mov	$0x87, %eax
	mov	$512, %ecx
1:	mov	%eax, (%edi)
	add	$0x200000, %eax
	add	$8, %edi
	loop	1b
	mov	$table4, %eax
	mov	%eax, %cr3
	mov	%cr4, %eax
	or	$0x20, %eax			/* PAE */
	mov	%eax, %cr4
	mov	$0xc0000080, %ecx		/* EFER: LME, SCE */
	rdmsr
	or	$0x101, %eax
	wrmsr
	mov	%cr0, %eax
	or	$0x80010001, %eax		/* PG, WP, PE */
	mov	%eax, %cr0
	lgdt	gdt_pointer
	ljmp	$KERNEL_CODE, $start64

	.code64
start64:
	mov	$KERNEL_DATA, %eax
	.irp	segment, ds, es, ss
	mov	%eax, %\segment
	.endr
	xor	%eax, %eax
	mov	%eax, %fs; mov %eax, %gs
	mov	$stack_top, %rsp
	/* The task-state segment's address goes into its descriptor. */
	mov	$tss, %rax
	mov	%ax, gdt_tss + 2
	shr	$16, %rax
	mov	%al, gdt_tss + 4
	mov	%ah, gdt_tss + 7
	mov	$(gdt_tss - gdt), %ax
	ltr	%ax
	call	main
1:	hlt
	jmp	1b

	/* Like Linux has it: the mnemonic is the argument; so is the table of what may fail. */
	.macro	safely op
1:	\op
	xor	%eax, %eax
2:	ret
	.pushsection __ex_table, "a"
	.long	1b - ., fixup - ., 0
	.popsection
	.endm

	.macro	function name
	.globl	\name
\name:
	.endm

function safe_rdmsr
	mov	%edi, %ecx
	safely	rdmsr

function safe_wrmsr
	mov	%edi, %ecx
	mov	%esi, %eax
	xor	%edx, %edx
	safely	wrmsr

function safe_xsetbv
	xor	%ecx, %ecx
	xor	%edx, %edx
	mov	$1, %eax
	safely	xsetbv

fixup:	mov	$1, %eax
	ret

	.macro	save
	.irp	register, rax, rbx, rcx, rdx, rsi, rdi, rbp, r8, r9, r10, r11, r12, r13, r14, r15
	push	%\register
	.endr
	.endm

	.macro	restore
	.irp	register, r15, r14, r13, r12, r11, r10, r9, r8, rbp, rdi, rsi, rdx, rcx, rbx, rax
	pop	%\register
	.endr
	.endm

	.macro	vector number error=0
	.align	16
	.if	!\error
	push	$0
	.endif
	push	$\number
	jmp	trap_entry
	.endm

	.align	16
	.globl	vectors
vectors:
	.set	i, 0
	.rept	256
	vector	i ((0x60227d00 >> (i & 31)) & (i < 32) & 1)
	.set	i, i + 1
	.endr

trap_entry:
	testb	$3, 24(%rsp)
	jz	1f
	swapgs
1:	save
	mov	%rsp, %rdi
	call	trap
	restore
	testb	$3, 24(%rsp)
	jz	1f
	swapgs
1:	add	$16, %rsp
	iretq

	.globl	syscall_entry
syscall_entry:
	swapgs
	mov	%rsp, %gs:8
	mov	%gs:0, %rsp
	push	%rcx
	push	%r11
	sti
	mov	%rax, %rsi
	call	system_call
	cli
	pop	%r11
	pop	%rcx
	mov	%gs:8, %rsp
	swapgs
	sysretq

	/* user(function, stack): returns when the program calls leave_user. */
function user
	push	%rbx
	push	%rbp
	push	%r12
	push	%r13
	push	%r14
	push	%r15
	mov	%rsp, user_return
	push	$USER_DATA
	push	%rsi
	pushf
	orl	$0x200, (%rsp)
	push	$USER_CODE
	push	%rdi
	swapgs
	iretq

function leave_user
	mov	user_return, %rsp
	pop	%r15
	pop	%r14
	pop	%r13
	pop	%r12
	pop	%rbp
	pop	%rbx
	ret

	.data
	.align	8
	.globl	gdt, gdt_tss
gdt:	.quad	0
	.quad	0x00af9b000000ffff		/* kernel code, data */
	.quad	0x00cf93000000ffff
	.quad	0x00cff3000000ffff		/* user data, code: the order of SYSRET */
	.quad	0x00affb000000ffff
gdt_tss:
	.quad	0x0000890000000067, 0
gdt_pointer:
	.word	. - gdt - 1
	.quad	gdt
	.globl	tss
	.align	8
tss:	.fill	104, 1, 0
user_return:
	.quad	0

	.bss
	.align	4096
	.globl	table4, table3, table2
table4:	.fill	4096
table3:	.fill	4096
table2:	.fill	4096
	.fill	16384
	.globl	stack_top
stack_top:
