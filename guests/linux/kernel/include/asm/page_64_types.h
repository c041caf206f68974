/* SPDX-License-Identifier: GPL-2.0-only */
/* Layout constants that a loader can change: see asm/parador.h. */
#include_next <asm/page_64_types.h>
#ifndef _PARADOR_PAGE_64_TYPES_H
#define _PARADOR_PAGE_64_TYPES_H
#include <asm/parador.h>

#ifndef __ASSEMBLY__
#undef __START_KERNEL_map
#define __START_KERNEL_map	PARADOR_CONST32(start_kernel_map)
#undef task_size_max
#define task_size_max()		PARADOR_CONST(task_limit)
#undef DEFAULT_MAP_WINDOW
#define DEFAULT_MAP_WINDOW	task_size_max()
#endif

/* Image, modules and fixmap share one GiB in the lower half. */
#undef KERNEL_IMAGE_SIZE
#define KERNEL_IMAGE_SIZE	(256 * 1024 * 1024)

#endif
