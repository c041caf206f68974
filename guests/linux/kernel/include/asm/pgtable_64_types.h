/* SPDX-License-Identifier: GPL-2.0-only */
/* Layout constants that a loader can change: see asm/parador.h. */
#include_next <asm/pgtable_64_types.h>
#ifndef _PARADOR_PGTABLE_64_TYPES_H
#define _PARADOR_PGTABLE_64_TYPES_H

#ifndef __ASSEMBLY__
#undef MODULES_END
#define MODULES_END		PARADOR_CONST32(modules_end)
#undef CPU_ENTRY_AREA_BASE
#define CPU_ENTRY_AREA_BASE	PARADOR_CONST(cpu_entry_area)
#endif

#endif
