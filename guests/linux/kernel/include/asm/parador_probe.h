/* SPDX-License-Identifier: GPL-2.0-only */
/* Support for kprobes beside rewritten sites. */
#ifndef _ASM_X86_PARADOR_PROBE_H
#define _ASM_X86_PARADOR_PROBE_H
#include <linux/module.h>
#include <asm/irqflags.h>
#include <asm/parador.h>
#include <asm/ptrace.h>

/* A record of parador_sites_1 (wedge/sites). */
struct parador_site {
	s32 offset;
	u8 length, padded, kind, flags;
} __packed;

#define PARADOR_KIND_CLI		0

/* Bounds of the kernel's table, by the linker. */
extern const struct parador_site __start_parador_sites_1[] __weak, __stop_parador_sites_1[] __weak;

static inline bool parador_is_cli_among(const struct parador_site *site,
					const struct parador_site *end, const void *address)
{
	for (; site && site < end; site++)
		if (site->kind == PARADOR_KIND_CLI && (void *)site + site->offset == address)
			return true;
	return false;
}

/*
 * True if CLI was assembled at an address. A rewriter may have put a store of a byte there, which
 * kprobes must not execute as one: they restore the interrupt flag after a single step.
 */
static inline bool parador_is_cli(const void *address)
{
	struct module *module;
	bool is_cli = false;

	if (core_kernel_text((unsigned long)address))
		return parador_is_cli_among(__start_parador_sites_1, __stop_parador_sites_1, address);
	preempt_disable();
	module = __module_text_address((unsigned long)address);
	if (module)
		is_cli = parador_is_cli_among(module->arch.parador_sites,
					      module->arch.parador_sites_end, address);
	preempt_enable();
	return is_cli;
}

/*
 * Sets the interrupt flag of registers that code saved which Linux copies: a rewriter does not see
 * its PUSHF. Nothing on the way from there changes the flag.
 */
static __always_inline void parador_fix_flags(struct pt_regs *regs)
{
	regs->flags = (regs->flags & ~X86_EFLAGS_IF) | (native_save_fl() & X86_EFLAGS_IF);
}

#endif
