/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Support for modules: sets their constants to those of this kernel, and announces their sites to a
 * rewriter.
 */
#ifndef _ASM_X86_PARADOR_MODULE_H
#define _ASM_X86_PARADOR_MODULE_H
#include <linux/module.h>
#include <asm/page.h>
#include <asm/pgtable.h>
#include <asm/unaligned.h>

/* A record of parador_consts_1 (asm/parador.h). */
struct parador_constant {
	s32 offset;
	u8 width;
	u8 id;
	u16 reserved;
} __packed;

/* Adds to a constant the distance by which this kernel was moved; 0 in the upper half. */
static inline void parador_move_constant(const struct parador_constant *record)
{
	void *place = (void *)record + record->offset;
	u64 by;

	switch (record->id) {
	case PARADOR_ID_start_kernel_map:
		by = PARADOR_CONST32(start_kernel_map) - PARADOR_start_kernel_map;
		break;
	case PARADOR_ID_modules_end:
		by = PARADOR_CONST32(modules_end) - PARADOR_modules_end;
		break;
	case PARADOR_ID_fixaddr_top:
		by = PARADOR_CONST32(fixaddr_top) - PARADOR_fixaddr_top;
		break;
	case PARADOR_ID_task_limit:
		by = PARADOR_CONST(task_limit) - PARADOR_task_limit;
		break;
	case PARADOR_ID_cpu_entry_area:
		by = PARADOR_CONST(cpu_entry_area) - PARADOR_cpu_entry_area;
		break;
	default:
		pr_warn_once("parador: a constant with the unknown id %u\n", record->id);
		return;
	}
	if (record->width == 8)
		put_unaligned(get_unaligned((u64 *)place) + by, (u64 *)place);
	else
		put_unaligned(get_unaligned((u32 *)place) + (u32)by, (u32 *)place);
}

/*
 * Two sites without an instruction: without a rewriter they are only padding. They inform a
 * rewriter that the sites recorded from rdi to rsi exist now, or that Linux is about to unload
 * them.
 */
static noinline void parador_announce(void *start, void *end)
{
	asm volatile("# parador:announce" : : "D" (start), "S" (end) : "memory", "cc");
}

static noinline void parador_retract(void *start, void *end)
{
	asm volatile("# parador:retract" : : "D" (start), "S" (end) : "memory", "cc");
}

/* The module's text is still writable, and no CPU executes it. */
static inline void parador_module_loaded(struct module *module, const Elf_Ehdr *header, const Elf_Shdr *sections)
{
	const char *names = (void *)header + sections[header->e_shstrndx].sh_offset;
	const Elf_Shdr *section, *sites = NULL;

	for (section = sections; section < sections + header->e_shnum; section++) {
		void *start = (void *)section->sh_addr, *end = start + section->sh_size;

		if (!(section->sh_flags & SHF_ALLOC))
			continue;
		if (!strcmp(names + section->sh_name, "parador_sites_1"))
			sites = section;
		if (!strcmp(names + section->sh_name, "parador_consts_1")) {
			struct parador_constant *record;

			for (record = start; (void *)(record + 1) <= end; record++)
				parador_move_constant(record);
		}
	}
	if (sites && sites->sh_size) {
		module->arch.parador_sites = (void *)sites->sh_addr;
		module->arch.parador_sites_end = (void *)sites->sh_addr + sites->sh_size;
		parador_announce(module->arch.parador_sites, module->arch.parador_sites_end);
	}
}

static inline void parador_module_unloading(struct module *module)
{
	if (module->arch.parador_sites)
		parador_retract(module->arch.parador_sites, module->arch.parador_sites_end);
	module->arch.parador_sites = NULL;
}

#endif
