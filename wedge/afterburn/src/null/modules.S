# The null image calls this routine after Linux has loaded a module and before Linux unloads one:
# RDI and RSI are start and end of the module's table of sites. `null.rs` assembles it and defines
# SLOTS and SLOTS_END, the area for stubs, and COUNTERS, 0 without counting, all as distances from
# `start`.
#
# A module's instruction stays in its place. The pad after it gets a jump to a stub that counts and
# jumps back, so exceptions refer to the right address. Only an instruction with its pad in front,
# which consists of prefixes, moves to the stub: exceptions refer to none of these, and none has an
# operand in memory. All registers are preserved. The kernel's text is read-only, so CR0.WP is off
# during the writes; interrupts are off, too, and a lock excludes other CPUs. The module is not
# running, and a stub belongs to one module from its announcement to its end, so no CPU executes the
# bytes that this routine writes.
#
# A slot: 8 bytes owner, the start of the module's table, 0 if free; then the code.

	.set	SLOT, 32
	.set	WP, 0x10000
	.set	CET, 0x800000

	.macro	enter
	pushfq
	.irp	register, rax, rcx, rdx, rbx, rdi, r8, r9, r10, r11
	push	%\register
	.endr
	cli
	mov	%cr4, %rax
	test	$CET, %eax			# with it WP cannot be off
	jnz	9f
	mov	%cr0, %r11
	mov	%r11, %rax
	and	$~WP, %rax
	mov	%rax, %cr0
7:	lock btsl $0, lock(%rip)
	jnc	8f
	pause
	jmp	7b
8:
	.endm

	.macro	leave
	movl	$0, lock(%rip)
	mov	%r11, %cr0
9:
	.irp	register, r11, r10, r9, r8, rdi, rbx, rdx, rcx, rax
	pop	%\register
	.endr
	popfq
	ret
	.endm

	.text
start:
announce:
	enter
	mov	%rdi, %r8
	mov	%rdi, %rbx
each:	lea	8(%rbx), %rax
	cmp	%rsi, %rax
	ja	done
	testb	$1, 7(%rbx)			# RECORD_ONLY
	jnz	next
	movslq	(%rbx), %rcx
	add	%rbx, %rcx
	movzbl	4(%rbx), %edx			# length
	movzbl	5(%rbx), %eax			# padded
	lea	5(%rdx), %edi
	add	%rcx, %rax			# the site's end
	cmpb	$0x2e, (%rcx)			# its pad is in front
	jne	behind
	cmp	$11, %edx			# what a slot has room for
	ja	next
	jmp	room
behind:	add	%rcx, %rdi
	cmp	%rax, %rdi
	ja	next				# no room for a jump after it
	add	%rdx, %rcx			# where the jump goes
room:
	lea	start + SLOTS(%rip), %r9
	lea	start + SLOTS_END(%rip), %rdi
free:	lea	SLOT(%r9), %rdx
	cmp	%rdi, %rdx
	ja	done				# what has no stub works without
	cmpq	$0, (%r9)
	je	found
	mov	%rdx, %r9
	jmp	free
found:	mov	%r8, (%r9)
	add	$8, %r9
	mov	%r9, %r10
	cmpb	$0x2e, (%rcx)
	jne	moved
	xor	%edi, %edi
1:	mov	(%rcx,%rdi), %dl
	mov	%dl, (%r10)
	inc	%r10
	inc	%edi
	cmpb	4(%rbx), %dil
	jb	1b
moved:
	.if	COUNTERS
	testb	$2, 7(%rbx)			# FLAGS_DEAD
	jz	back
	movzbl	6(%rbx), %edx			# kind
	lea	start + COUNTERS(%rip), %rdi
	lea	(%rdi,%rdx,8), %rdx
	movl	$0x05ff48f0, (%r10)		# lock incq DISTANCE(%rip)
	add	$8, %r10
	sub	%r10, %rdx
	mov	%edx, -4(%r10)
	.endif
back:	movb	$0xe9, (%r10)			# jmp to the site's end
	sub	%r10, %rax
	sub	$5, %eax
	mov	%eax, 1(%r10)
	movb	$0xe9, (%rcx)			# jmp to the stub
	sub	%rcx, %r9
	sub	$5, %r9d
	mov	%r9d, 1(%rcx)
next:	add	$8, %rbx
	jmp	each
done:	leave

	.balign	16
	.globl	retract
retract:
	enter
	lea	start + SLOTS(%rip), %r9
	lea	start + SLOTS_END(%rip), %rcx
1:	lea	SLOT(%r9), %rdx
	cmp	%rcx, %rdx
	ja	3f
	cmp	%rdi, (%r9)
	jne	2f
	movq	$0, (%r9)
2:	mov	%rdx, %r9
	jmp	1b
3:	leave

	.balign	8
lock:	.quad	0
