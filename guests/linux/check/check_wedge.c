// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs generated sequences of sensitive instructions at privilege level 0 and prints what they
 * leave behind: the same on any machine that keeps to the manual. A test compares the lines of a
 * run on the processor with those of a run under a wedge.
 *
 *	insmod check_wedge.ko seed=N rounds=M prints "wedge: SEED ROUND DIGEST" for each round,
 * then "wedge: done"
 *
 * What depends on the machine (addresses, features, times) does not go into the digest, and
 * nothing is tried where QEMU is laxer than the manual (reserved bits of control registers,
 * non-canonical addresses, unknown MSRs): those have tests on the host.
 */
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/printk.h>
#include <linux/preempt.h>
#include <asm/desc.h>
#include <asm/msr.h>
#include <asm/processor-flags.h>
#include <asm/segment.h>
#include <asm/tsc.h>

static unsigned int seed = 1;
module_param(seed, uint, 0);
static unsigned int rounds = 16;
module_param(rounds, uint, 0);
static bool verbose, values;
module_param(verbose, bool, 0);
module_param(values, bool, 0);

enum { STEPS = 200 };

/* Arithmetic flags, direction, and those that software may set freely: not TF, IOPL, NT. */
#define OPEN_FLAGS	(X86_EFLAGS_CF | X86_EFLAGS_PF | X86_EFLAGS_AF | X86_EFLAGS_ZF | X86_EFLAGS_SF | X86_EFLAGS_OF | \
			 X86_EFLAGS_DF | X86_EFLAGS_AC | X86_EFLAGS_ID | X86_EFLAGS_IF)
#define KEPT_FLAGS	(OPEN_FLAGS | X86_EFLAGS_FIXED | X86_EFLAGS_IOPL | X86_EFLAGS_NT)

static u64 state, digest;

static u32 draw(u32 below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (u32)(state >> 16) % below;
}

static void note(u64 value)
{
	if (values)
		pr_info("wedge: value %llx\n", value);
	digest = (digest ^ value) * 0x100000001b3ULL;
}

static u64 flags_with(u64 flags)
{
	u64 seen;

	/* As one statement: between them nothing may use the flags or the stack. */
	asm volatile("pushf\n\t"
		     "push %1\n\t"
		     "popf\n\t"
		     "pushf\n\t"
		     "pop %0\n\t"
		     "popf"
		     : "=&r" (seen) : "r" (flags) : "memory", "cc");
	return seen;
}

static void step_flags(void)
{
	u64 flags = ((u64)draw(~0u) << 16 ^ draw(~0u)) & OPEN_FLAGS;

	note(flags_with(flags | X86_EFLAGS_FIXED) & KEPT_FLAGS);
}

static void step_interrupt_flag(void)
{
	u64 before, off, on, after;

	asm volatile("pushf; pop %0; cli; pushf; pop %1; sti; pushf; pop %2; cli; push %0; popf; pushf; pop %3"
		     : "=&r" (before), "=&r" (off), "=&r" (on), "=&r" (after) : : "memory", "cc");
	note(before & X86_EFLAGS_IF);
	note(off & X86_EFLAGS_IF);
	note(on & X86_EFLAGS_IF);
	note(after & X86_EFLAGS_IF);
}

/* Flags live over instructions that leave them alone. */
static void step_flags_kept(void)
{
	u64 flags = draw(~0u) & (X86_EFLAGS_CF | X86_EFLAGS_PF | X86_EFLAGS_AF | X86_EFLAGS_ZF | X86_EFLAGS_SF | X86_EFLAGS_OF);
	u64 seen, cr0;

	asm volatile("pushf; push %2; popf; mov %%cr0, %1; cli; swapgs; swapgs; mov %%cs, %w0; pushf; pop %0; popf"
		     : "=&r" (seen), "=&r" (cr0) : "r" (flags | X86_EFLAGS_FIXED) : "memory", "cc");
	note(seen & KEPT_FLAGS);
	note(cr0 & (X86_CR0_PE | X86_CR0_PG | X86_CR0_WP | X86_CR0_TS));
}

static void step_selectors(void)
{
	u16 cs, ss, ds, es;
	u64 wide;

	asm volatile("mov %%cs, %0; mov %%ss, %1; mov %%ds, %2; mov %%es, %3" : "=r" (cs), "=r" (ss), "=m" (ds), "=r" (es));
	asm volatile("mov $-1, %0; mov %%cs, %k0" : "=&r" (wide));
	note(cs), note(ss), note(ds), note(es), note(wide);
}

static void step_load_selector(void)
{
	/*
	 * Of null selectors only 0: an interrupt of the host returns to user mode under a wedge,
	 * and processors may clear null selectors then (SDM vol. 2A, IRET).
	 */
	static const u16 selectors[] = {
		0, __KERNEL_DS, __KERNEL_DS + 1, __USER_DS, __KERNEL_CS, __USER_CS, __KERNEL_CS + 3, 0x78, 0x7b, 0xfff8, 4, 0x1000,
	};
	u16 selector = selectors[draw(ARRAY_SIZE(selectors))], before, after;
	u32 faulted = 0;

	asm volatile("mov %%es, %0" : "=r" (before));
	asm volatile("1: mov %w2, %%es\n2:\n" _ASM_EXTABLE_TYPE_REG(1b, 2b, EX_TYPE_IMM_REG | EX_DATA_IMM(1), %0)
		     : "+r" (faulted) : "i" (0), "r" ((u32)selector));
	asm volatile("mov %%es, %0" : "=r" (after));
	asm volatile("mov %0, %%es" : : "r" ((u32)before));
	note(selector), note(faulted), note(after);
}

static void step_look_at_selector(void)
{
	u32 selector = draw(2) ? draw(32) * 8 + draw(4) : draw(0x10000), rights = 0, limit = 0;
	u8 has_rights, has_limit, readable, writable;

	/* The busy bit and the limits of machine-dependent descriptors are left out. */
	if ((selector & 4) || (selector >> 3 >= GDT_ENTRY_TSS && selector >> 3 < GDT_ENTRY_TLS_MIN) || selector >> 3 == GDT_ENTRY_CPUNODE)
		return;
	asm volatile("lar %2, %0; setz %1" : "+r" (rights), "=qm" (has_rights) : "r" (selector) : "cc");
	asm volatile("lsl %2, %0; setz %1" : "+r" (limit), "=qm" (has_limit) : "r" (selector) : "cc");
	asm volatile("verr %w1; setz %0" : "=qm" (readable) : "r" (selector) : "cc");
	asm volatile("verw %w1; setz %0" : "=qm" (writable) : "r" (selector) : "cc");
	/* Whether a descriptor has been used is not worth a difference. */
	note(selector), note(has_rights), note(rights & ~0x100u), note(has_limit), note(limit), note(readable), note(writable);
}

static void step_tables(void)
{
	struct desc_ptr gdt, idt;
	u16 tr, ldt;
	u64 wide;

	asm volatile("sgdt %0; sidt %1; str %2; sldt %3" : "=m" (gdt), "=m" (idt), "=m" (tr), "=r" (ldt));
	asm volatile("mov $-1, %0; str %k0" : "=&r" (wide));
	note(gdt.size), note(idt.size), note(tr), note(ldt), note(wide);
	/* The same again changes nothing. */
	asm volatile("lidt %0; sidt %1" : "+m" (idt), "=m" (gdt));
	note(gdt.size), note(gdt.address == idt.address);
}

static void step_control(void)
{
	u64 cr0, cr2, cr4, seen;

	asm volatile("mov %%cr0, %0; mov %%cr4, %1" : "=r" (cr0), "=r" (cr4));
	note(cr0 & (X86_CR0_PE | X86_CR0_PG | X86_CR0_WP | X86_CR0_NE | X86_CR0_ET | X86_CR0_TS));
	note(cr4 & (X86_CR4_PAE | X86_CR4_PGE | X86_CR4_OSFXSR));
	cr2 = (u64)draw(~0u) << 12;
	asm volatile("mov %1, %%cr2; mov %%cr2, %0" : "=r" (seen) : "r" (cr2));
	note(seen);
	asm volatile("mov %1, %%cr0; mov %%cr0, %0" : "=r" (seen) : "r" (cr0 | X86_CR0_TS));
	note(!!(seen & X86_CR0_TS));
	asm volatile("clts; mov %%cr0, %0" : "=r" (seen));
	note(!!(seen & X86_CR0_TS));
	asm volatile("smsw %0" : "=r" (seen));
	note(seen & 0xffff & ~X86_CR0_MP & ~X86_CR0_EM);
}

static void step_msrs(void)
{
	static const u32 own[] = { MSR_STAR, MSR_SYSCALL_MASK, MSR_KERNEL_GS_BASE, MSR_FS_BASE };
	u64 value, kept;
	u32 msr = own[draw(ARRAY_SIZE(own))];

	rdmsrl(msr, kept);
	if (msr == MSR_STAR || msr == MSR_SYSCALL_MASK) {
		note(kept);
	} else {
		wrmsrl(msr, (u64)draw(1 << 15) << 32 | draw(~0u));
		rdmsrl(msr, value);
		note(value);
		wrmsrl(msr, kept);
	}
}

static void step_swapgs(void)
{
	u64 inactive = (u64)draw(1 << 15) << 32 | draw(~0u), kept, seen, other;

	rdmsrl(MSR_KERNEL_GS_BASE, kept);
	wrmsrl(MSR_KERNEL_GS_BASE, inactive);
	/* Per-CPU data is unreachable between them: no C code. */
	asm volatile("swapgs; mov $0xc0000101, %%ecx; rdmsr; shl $32, %%rdx; or %%rdx, %%rax; mov %%rax, %0; swapgs"
		     : "=&r" (seen) : : "rax", "rcx", "rdx", "cc", "memory");
	rdmsrl(MSR_KERNEL_GS_BASE, other);
	note(seen == inactive), note(other == inactive);
	wrmsrl(MSR_KERNEL_GS_BASE, kept);
}

/* IRETQ and LRETQ to the next instruction, with flags. */
static void step_returns(void)
{
	u64 flags = (draw(~0u) & OPEN_FLAGS & ~X86_EFLAGS_IF) | X86_EFLAGS_FIXED, seen, rsp, after;
	u16 ss, cs;

	asm volatile("mov %%rsp, %1\n\t"
		     "pushf\n\t"
		     "mov %%ss, %w3\n\t"
		     "mov %%rsp, %2\n\t"
		     "pushq %q3\n\t"
		     "pushq %2\n\t"
		     "pushq %5\n\t"
		     "mov %%cs, %w4\n\t"
		     "pushq %q4\n\t"
		     "pushq $1f\n\t"
		     "iretq\n"
		     "1: pushf; pop %0\n\t"
		     "popf\n\t"
		     "mov %%rsp, %2"
		     : "=&r" (seen), "=&r" (rsp), "=&r" (after), "=&r" (ss), "=&r" (cs) : "r" (flags) : "memory", "cc");
	note(seen & KEPT_FLAGS), note(rsp == after);
	asm volatile("mov %%rsp, %0\n\t"
		     "mov %%cs, %w2\n\t"
		     "pushq %q2\n\t"
		     "pushq $1f\n\t"
		     "lretq\n"
		     "1: mov %%rsp, %1"
		     : "=&r" (rsp), "=&r" (after), "=&r" (cs) : : "memory");
	note(rsp == after);
}

static void step_stack_segment(void)
{
	u32 faulted = 0;
	u64 kept;

	asm volatile("push %%fs; pop %0" : "=r" (kept));
	note(kept);
	asm volatile("1: mov %w2, %%ss\n2:\n" _ASM_EXTABLE_TYPE_REG(1b, 2b, EX_TYPE_IMM_REG | EX_DATA_IMM(1), %0)
		     : "+r" (faulted) : "i" (0), "r" ((u32)__USER_DS));
	note(faulted);
	asm volatile("mov %w0, %%ss" : : "r" ((u32)__KERNEL_DS));
}

static void step_debug(void)
{
	u64 kept, value = draw(~0u), seen;

	asm volatile("mov %%db3, %0; mov %2, %%db3; mov %%db3, %1; mov %0, %%db3" : "=&r" (kept), "=&r" (seen) : "r" (value));
	note(seen);
	asm volatile("mov %%db7, %0" : "=r" (seen));
	note(seen & 0xffff);
}

/* For several ticks of a timer. */
static u64 flags_after_ticks(u64 flags)
{
	u64 seen, end = rdtsc() + 20000ULL * tsc_khz / 1000;

	asm volatile("pushf\n\t"
		     "push %1\n\t"
		     "popf\n"
		     "1: rdtsc; shl $32, %%rdx; or %%rdx, %%rax; cmp %2, %%rax; jb 1b\n\t"
		     "pushf\n\t"
		     "pop %0\n\t"
		     "popf"
		     : "=&r" (seen) : "r" (flags), "r" (end) : "rax", "rdx", "memory", "cc");
	return seen;
}

/* Interrupts of the machine that wait until they are enabled change no flags. */
static void note_flags_over_ticks(void)
{
	unsigned long flags;

	local_irq_save(flags);
	note(flags_after_ticks(X86_EFLAGS_FIXED | X86_EFLAGS_ID) & X86_EFLAGS_ID);
	note(flags_after_ticks(X86_EFLAGS_FIXED) & X86_EFLAGS_ID);
	local_irq_restore(flags);
}

static void (*const kinds[])(void) = {
	step_flags, step_interrupt_flag, step_flags_kept, step_selectors, step_load_selector, step_look_at_selector, step_tables,
	step_control, step_msrs, step_swapgs, step_returns, step_stack_segment, step_debug,
};

static int __init check_wedge_init(void)
{
	unsigned int round, step;

	for (round = 0; round < rounds; round++) {
		state = (seed * 0x9e3779b97f4a7c15ULL) ^ (round + 1) * 0xbf58476d1ce4e5b9ULL;
		digest = 0xcbf29ce484222325ULL;
		if (!round)
			note_flags_over_ticks();
		for (step = 0; step < STEPS; step++) {
			unsigned long flags;
			u32 kind = draw(ARRAY_SIZE(kinds));

			local_irq_save(flags);
			kinds[kind]();
			local_irq_restore(flags);
			if (verbose)
				pr_info("wedge: %u.%u kind %u %016llx\n", round, step, kind, digest);
		}
		pr_info("wedge: %u %u %016llx\n", seed, round, digest);
	}
	pr_info("wedge: done\n");
	return 0;
}
module_init(check_wedge_init);

static void __exit check_wedge_exit(void)
{
}
module_exit(check_wedge_exit);

MODULE_DESCRIPTION("Sequences of sensitive instructions, for comparison");
MODULE_LICENSE("GPL");
