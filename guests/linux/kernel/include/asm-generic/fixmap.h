/* SPDX-License-Identifier: GPL-2.0-only */
/* A layout constant that a loader can change (asm/parador.h), before the functions that use it. */
#ifndef _PARADOR_GENERIC_FIXMAP_H
#define _PARADOR_GENERIC_FIXMAP_H
#include <asm/parador.h>

#undef FIXADDR_TOP
#define FIXADDR_TOP	PARADOR_CONST32(fixaddr_top)

#include_next <asm-generic/fixmap.h>

#endif
