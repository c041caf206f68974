/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Makes stores of entries sites (asm/parador.h). The headers that this one includes come first, so
 * only this one sees the other macros.
 */
#ifndef _PARADOR_PGTABLE_64_H
#define _PARADOR_PGTABLE_64_H
#ifndef __ASSEMBLY__
#include <asm/processor.h>
#include <linux/bitops.h>
#include <linux/threads.h>
#include <asm/fixmap.h>
#include <asm/parador.h>

#pragma push_macro("WRITE_ONCE")
#pragma push_macro("xchg")
#undef WRITE_ONCE
#undef xchg
#define WRITE_ONCE	parador_store
#define xchg		parador_exchange
#endif

#include_next <asm/pgtable_64.h>

#ifndef __ASSEMBLY__
#pragma pop_macro("WRITE_ONCE")
#pragma pop_macro("xchg")
#endif
#endif
