/* SPDX-License-Identifier: GPL-2.0-only */
/* As asm/pgtable_64.h, for functions that change single bits, exchange or copy entries. */
#ifndef _PARADOR_PGTABLE_H
#define _PARADOR_PGTABLE_H
#ifndef __ASSEMBLY__
#include <linux/mem_encrypt.h>
#include <asm/page.h>
#include <asm/pgtable_types.h>
#include <linux/spinlock.h>
#include <asm/x86_init.h>
#include <asm/pkru.h>
#include <asm/fpu/api.h>
#include <asm/coco.h>
#include <linux/mm_types.h>
#include <linux/mmdebug.h>
#include <linux/log2.h>
#include <asm/fixmap.h>
#include <asm/parador.h>

#pragma push_macro("xchg")
#undef xchg
#define xchg			parador_exchange
#define clear_bit		parador_clear_bit
#define clone_pgd_range		clone_pgd_range_unmarked
#endif

#include_next <asm/pgtable.h>

#ifndef __ASSEMBLY__
#pragma pop_macro("xchg")
#undef clear_bit
#undef clone_pgd_range

static inline void clone_pgd_range(pgd_t *to, pgd_t *from, int count)
{
	parador_copy_entries(to, from, count);
}
#endif
#endif
